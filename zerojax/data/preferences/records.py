"""Records of preferences, in the columns of TRL, as tokenized sequences.

    prompt, chosen, rejected      two answers to one prompt
    chosen, rejected              two conversations, or texts, with a common beginning
    prompt, completion, label     one answer, which is desirable (true) or not (false)

Each column is a text or a list of messages. A record becomes sequences in the same way as `prompt`
and `completion` of `zerojax.data.tokenize`: an answer's tokens count, with the special token that
ends it.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax.data.chat import RENDER_SECONDS, checked_options
from zerojax.data.conversations import shortened
from zerojax.data.cpu_limit import CpuLimit
from zerojax.data.encoding import Encoder
from zerojax.data.examples import ExampleBuilder, Examples
from zerojax.data.reading import source
from zerojax.progress import working

_PAIR = ("chosen", "rejected")
_SINGLE = ("prompt", "completion", "label")


@dataclasses.dataclass(frozen=True, eq=False)
class Preferences:
    """Tokenized answers, in pairs or with labels.

    Attributes:
      examples: sequences. Pair i is the sequences 2 i (chosen) and 2 i + 1 (rejected); if
        `is_paired` is False, sequence i is a single answer.
      labels: i32[n], 1 for each pair; for single answers 1 (desirable) or -1 (undesirable).
      is_paired: whether the answers come in pairs.
    """

    examples: Examples
    labels: np.ndarray
    is_paired: bool

    def __len__(self) -> int:
        """Return the number of pairs, or of single answers."""
        return len(self.labels)

    def hold_out(self, one_in: int) -> tuple["Preferences", "Preferences"]:
        """Split off every `one_in`-th record, as `Examples.hold_out` does.

        Args:
          one_in: number of records of which the last is held out, at least 2.

        Returns:
          (preferences to train on, preferences held out).

        Raises:
          ValueError: `one_in` is less than 2, or either part would be empty.
        """
        held_out = self.examples.find_held_out(one_in)
        of_label = held_out[::2] if self.is_paired else held_out
        return tuple(
            Preferences(self.examples.select(chosen), self.labels[labels], self.is_paired)
            for chosen, labels in ((~held_out, ~of_label), (held_out, of_label))
        )  # pyright: ignore[reportReturnType]

    def unpaired(self) -> "Preferences":
        """Return single answers: the chosen ones as desirable, the rejected ones as not."""
        if not self.is_paired:
            return self
        labels = np.tile(np.asarray([1, -1], np.int32), len(self))
        return Preferences(self.examples, labels, False)

    def with_mismatches(self) -> "Preferences":
        """Return pairs of each single answer and the previous record's answer to its prompt.

        The second sequences of these pairs are for the KL term of `zerojax.dpo_loss(kind="kto")`:
        the first prompt is followed by the last answer.

        Raises:
          ValueError: the answers are in pairs, or there is only one.
        """
        if self.is_paired:
            raise ValueError("these answers come in pairs: use unpaired() first")
        if len(self) < 2:
            raise ValueError(
                "kto compares each answer with another example's: at least 2 are needed"
            )
        examples = self.examples
        builder = ExampleBuilder()
        previous = self._answer(len(self) - 1)
        for i in range(len(self)):
            tokens, counted, start = self._sequence(i)
            builder.add(tokens, counted, int(examples.numbers[i]))
            builder.add(
                np.concatenate([tokens[:start], previous[0]]),
                np.concatenate([counted[:start], previous[1]]),
                int(examples.numbers[i]),
            )
            previous = (tokens[start:], counted[start:])
        return Preferences(builder.finish(examples.source), self.labels, True)

    def _sequence(self, i: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return a sequence's tokens, which of them count, and the index of the first that does."""
        begin, end = self.examples.starts[i : i + 2]
        counted = self.examples.counted[begin:end]
        return self.examples.tokens[begin:end], counted, int(counted.argmax())

    def _answer(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, counted, start = self._sequence(i)
        return tokens[start:], counted[start:]


def read_preferences(
    path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    split: str | None = None,
    add_eos: bool = True,
    template_options: Mapping[str, Any] | None = None,
) -> Preferences:
    """Read and tokenize a file of preferences.

    A record holds `chosen` and `rejected`, with or without a `prompt`, or `prompt`, `completion`
    and a `label`. Prompts and answers are texts, or lists of messages. Without a prompt, both
    answers begin with it: the common messages, or the common characters up to a space. All records
    have the same form.

    Args:
      path: path of a JSONL file, or of a folder that `datasets` saved (`save_to_disk`).
      tokenizer: tokenizer of transformers, as `zerojax.data.load_tokenizer(folder)` returns it.
      split: name of the data set to read, such as "train", if the folder holds several.
      add_eos: whether to end texts with the tokenizer's `eos_token`. Chat templates end turns
        themselves.
      template_options: extra variables for the chat template by name.

    Returns:
      The answers, in the order of the file.

    Raises:
      ValueError: a record cannot be read, or none of an answer's tokens counts; the error names the
        file and line, or the number of the example. Or the source has no records.
    """
    records = source(path, split)
    options = checked_options(template_options)
    builder = ExampleBuilder()
    labels: list[int] = []
    is_paired: bool | None = None
    with working("tokenize", records.count()) as advance, CpuLimit(RENDER_SECONDS) as limit:
        encoder = Encoder(tokenizer, "prompt", add_eos, False, options, limit)
        for number, record in records.records():
            encoder.notices.number = number
            try:
                pairs = _is_pair(record)
                if is_paired not in (None, pairs):
                    raise ValueError(
                        "this record has another form than the first one: pairs and single "
                        "answers cannot be mixed in a file"
                    )
                is_paired = pairs
                labels.append(1 if pairs else _read_label(record["label"]))
                for part in _parts(record) if pairs else [record]:
                    for example in encoder.encode(part):
                        builder.add(example.tokens, example.counted, number)
            except Exception as error:  # templates raise errors of their own
                raise ValueError(f"{records.place(number)}: {error}") from error
            advance(1)
    encoder.notices.log(records.place)
    return Preferences(builder.finish(records), np.asarray(labels, np.int32), bool(is_paired))


def _is_pair(record: Mapping[str, Any]) -> bool:
    """Return whether a record has two answers.

    Raises:
      ValueError: it has neither two answers nor one with a label.
    """
    has_pair = all(record.get(key) is not None for key in _PAIR)
    has_single = all(record.get(key) is not None for key in _SINGLE)
    if has_pair == has_single:
        raise ValueError(
            f"the keys are {sorted(record)}: 'chosen' and 'rejected' are needed, with or without "
            "'prompt', or 'prompt', 'completion' and 'label'"
        )
    return has_pair


def _read_label(label: Any) -> int:
    if label is True or (type(label) is int and label == 1):
        return 1
    if label is False or (type(label) is int and label == 0):
        return -1
    raise ValueError(f"'label' is {shortened(label)}: true (desirable) or false is needed")


def _parts(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records `prompt`, `completion` of the chosen and of the rejected answer."""
    answers = [record[key] for key in _PAIR]
    prompt = record.get("prompt")
    is_listed = [isinstance(answer, list | tuple) for answer in answers]
    if is_listed[0] != is_listed[1]:
        raise ValueError(
            "'chosen' and 'rejected' must both be texts, or both lists of messages, got "
            f"{type(answers[0]).__name__} and {type(answers[1]).__name__}"
        )
    # Some data sets repeat the question as a text beside two complete conversations.
    if prompt is None or (isinstance(prompt, str) and is_listed[0]):
        size = _common_length(*answers)
        prompt = answers[0][:size]
        answers = [answer[size:] for answer in answers]
    for answer in answers:
        part = {"prompt": prompt, "completion": answer}
        yield part | ({"tools": record["tools"]} if record.get("tools") else {})


def _common_length(chosen: Any, rejected: Any) -> int:
    """Return the length of the prompt with which two conversations, or two texts, begin.

    Raises:
      ValueError: they are equal, or no message, or no further one, is common to them.
    """
    for answer, key in ((chosen, "chosen"), (rejected, "rejected")):
        if not isinstance(answer, Sequence):
            raise ValueError(
                f"{key!r} must be a text or a list of messages, got {type(answer).__name__}"
            )
    if chosen == rejected:
        raise ValueError(
            "'chosen' and 'rejected' are equal, so they do not show where the prompt ends: give "
            "the 'prompt', or leave the record out"
        )
    shorter = min(len(chosen), len(rejected))
    size = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if isinstance(chosen, str):
        # The space before two different words belongs to the answers, as a tokenizer joins them.
        return size - 1 if size and chosen[size - 1] == " " else size
    if not 0 < size < shorter:
        raise ValueError(
            "without 'prompt', 'chosen' and 'rejected' begin with the same messages and go on with "
            f"different ones, but they have {size} common messages of {len(chosen)} and "
            f"{len(rejected)}: give the 'prompt'"
        )
    return size
