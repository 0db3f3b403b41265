"""Examples of a file as arrays: all their tokens behind each other.

    tokens[N], counted[N], starts[E + 1]        example i is tokens[starts[i] : starts[i + 1]]

A token takes 5 bytes, whatever the file's size; Python objects are those of one record at a time.
"""

import array
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from zerojax.data.chat import RENDER_SECONDS, checked_options
from zerojax.data.cpu_limit import CpuLimit
from zerojax.data.encoding import Encoder, Form
from zerojax.data.reading import Source, source
from zerojax.given import whole_number
from zerojax.progress import working

logger = logging.getLogger("zerojax.data")


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Tokenized examples.

    Attributes:
      source: what they were read from.
      tokens: i32[N].
      counted: bool[N], the tokens that count in the loss.
      starts: i64[E + 1], where each example begins, and N.
      numbers: i64[E], the record that each example was made of: its line, or its index in a folder
        of `datasets`.
    """

    source: Source
    tokens: np.ndarray
    counted: np.ndarray
    starts: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, i64[E]."""
        return np.diff(self.starts)

    def place(self, i: int) -> str:
        """Return how errors name example i."""
        return self.source.place(int(self.numbers[i]))

    def hold_out(self, one_in: int) -> tuple["Examples", "Examples"]:
        """Return (those to train on, those held out): of every `one_in` records the last one is
        held out.

        What is made of one record stays together. Records that are added to the end of a file
        change nothing for the others.

        Raises:
          ValueError: fewer than 2, or either part would be empty.
        """
        one_in = whole_number("one_in", one_in, 2, ", else all is held out")
        record = np.unique(self.numbers, return_inverse=True)[
            1
        ]  # from 0; numbers are lines, of which some may be empty
        held_out = record % one_in == one_in - 1
        if held_out.all() or not held_out.any():
            raise ValueError(
                f"of {len(self)} examples one in {one_in} cannot be held out: give more, or take a smaller one_in"
            )
        return self._those(~held_out), self._those(held_out)

    def _those(self, chosen: np.ndarray) -> "Examples":
        of_token = np.repeat(chosen, self.lengths)
        starts = np.concatenate([[0], np.cumsum(self.lengths[chosen])])
        return Examples(
            self.source, self.tokens[of_token], self.counted[of_token], starts, self.numbers[chosen]
        )


def tokenize(
    path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    split: str | None = None,
    form: Form | None = None,
    each_answer: bool = False,
    add_eos: bool = True,
    template_options: Mapping[str, Any] | None = None,
) -> Examples:
    """Read and tokenize a file of examples.

    A record holds `messages`, a conversation in the form of OpenAI and transformers; or `prompt`
    and `completion`, two texts or two lists of messages; or `text`. `tools` beside messages are
    given to the template.

    Args:
      path: of a JSONL file, or a folder that `datasets` saved (`save_to_disk`).
      tokenizer: of transformers, such as `load_tokenizer(folder)` returns.
      split: which data set of a folder with several, such as "train".
      form: "messages", "prompt" or "text", where records have the keys of several forms.
      each_answer: make an example of each answer of a conversation, with what comes before it as
        the context; for templates that write an earlier turn in another way than the last one, such
        as Qwen 3's, which forgets its thinking.
      add_eos: end texts and completions with the tokenizer's `eos_token`. Chat templates end turns
        by themselves.
      template_options: given to the chat template by name, such as `{"enable_thinking": False}`.

    Returns:
      The examples, in the order of the file.

    Raises:
      ValueError: a record that cannot be read, in which no token counts, or for which the chat
        template does not tell which do; with file and line, or the number of the example. Or no
        records.
    """
    where = source(path, split)
    options = checked_options(template_options)
    tokens, counted, starts, numbers = (
        array.array("i"),
        bytearray(),
        array.array("q", [0]),
        array.array("q"),
    )
    with working("tokenize", where.count()) as advance, CpuLimit(RENDER_SECONDS) as limit:
        encoder = Encoder(tokenizer, form, add_eos, each_answer, options, limit)
        for number, record in where.records():
            encoder.notices.number = number
            try:
                for example in encoder.encode(record):
                    tokens.frombytes(example.tokens.tobytes())
                    counted += example.counted.tobytes()
                    starts.append(len(tokens))
                    numbers.append(number)
            except Exception as error:  # templates raise errors of their own
                raise ValueError(f"{where.place(number)}: {error}") from error
            advance(1)
    encoder.notices.log(where.place)
    if not numbers:
        raise ValueError(f"{where.path}: no examples in it")
    examples = Examples(
        where,
        np.frombuffer(tokens, np.int32),
        np.frombuffer(counted, bool),
        np.frombuffer(starts, np.int64),
        np.frombuffer(numbers, np.int64),
    )
    in_loss = int(examples.counted.sum())
    logger.info(
        "%s: %d examples, %d tokens, of which %d count in the loss",
        where.path,
        len(examples),
        len(tokens),
        in_loss,
    )
    return examples
