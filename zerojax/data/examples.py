"""Examples of a file as arrays, in which the tokens of all examples are concatenated.

    tokens[N], counted[N], starts[E + 1]        example i is tokens[starts[i] : starts[i + 1]]

Each token takes 5 bytes, whatever the file's size. Only one record at a time exists as Python
objects.
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
from zerojax.progress import working
from zerojax.user_values import whole_number

logger = logging.getLogger("zerojax.data")


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Tokenized examples.

    Attributes:
      source: file or folder that they were read from.
      tokens: i32[N], token ids of all examples.
      counted: bool[N], whether each token counts in the loss.
      starts: i64[E + 1], index of each example's first token, and N.
      numbers: i64[E], number of the record that each example was made from: its line, or its index
        in a folder of `datasets`.
    """

    source: Source
    tokens: np.ndarray
    counted: np.ndarray
    starts: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, i64[E]."""
        return np.diff(self.starts)

    def place(self, i: int) -> str:
        """Return the place of an example for error messages, such as a file and a line.

        Args:
          i: index of the example, counted from 0.
        """
        return self.source.place(int(self.numbers[i]))

    def hold_out(self, one_in: int) -> tuple["Examples", "Examples"]:
        """Split off every `one_in`-th record.

        All examples of one record stay together. Appending records to a file does not change which
        of the earlier ones are held out.

        Args:
          one_in: number of records of which the last is held out, at least 2.

        Returns:
          (examples to train on, examples held out).

        Raises:
          ValueError: `one_in` is less than 2, or either part would be empty.
        """
        held_out = self.find_held_out(one_in)
        return self.select(~held_out), self.select(held_out)

    def find_held_out(self, one_in: int) -> np.ndarray:
        """Return which examples `hold_out` splits off, bool[E].

        Args:
          one_in: number of records of which the last is held out, at least 2.

        Raises:
          ValueError: `one_in` is less than 2, or either part would be empty.
        """
        one_in = whole_number("one_in", one_in, 2, ", because 1 would hold out everything")
        record = np.unique(self.numbers, return_inverse=True)[
            1
        ]  # contiguous from 0; numbers are lines, some of which may be empty
        held_out = record % one_in == one_in - 1
        if held_out.all() or not held_out.any():
            raise ValueError(
                f"cannot hold out one in {one_in} of {len(self)} examples: add examples, or use a "
                "smaller one_in"
            )
        return held_out

    def select(self, chosen: np.ndarray) -> "Examples":
        """Return some of the examples, in the same order.

        Args:
          chosen: bool[E], True for each example to return.
        """
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
    and `completion`, two texts or two lists of messages; or `text`. A record with messages may also
    have `tools`, which are passed to the template. The columns of ShareGPT (`conversations`) and of
    Alpaca (`instruction`, `input`, `output`) are read, too.

    Args:
      path: path of a JSONL file, or of a folder that `datasets` saved (`save_to_disk`).
      tokenizer: tokenizer of transformers, as `load_tokenizer(folder)` returns it.
      split: name of the data set to read, such as "train", if the folder holds several.
      form: "messages", "prompt", "text", "sharegpt" or "alpaca"; needed if records have the keys of
        several forms.
      each_answer: whether to make one example per answer of a conversation, with the preceding
        messages as its context. Use it for templates that render an earlier turn differently from
        the last one, such as Qwen 3's, which removes the thinking from earlier turns.
      add_eos: whether to end texts and completions with the tokenizer's `eos_token`. Chat templates
        end turns themselves.
      template_options: extra variables for the chat template by name, such as
        `{"enable_thinking": False}`.

    Returns:
      The examples, in the order of the file.

    Raises:
      ValueError: a record cannot be read, none of its tokens counts, or the chat template does not
        show which ones do; the error names the file and line, or the number of the example. Or the
        source has no records.
    """
    records = source(path, split)
    options = checked_options(template_options)
    builder = ExampleBuilder()
    with working("tokenize", records.count()) as advance, CpuLimit(RENDER_SECONDS) as limit:
        encoder = Encoder(tokenizer, form, add_eos, each_answer, options, limit)
        for number, record in records.records():
            encoder.notices.number = number
            try:
                for example in encoder.encode(record):
                    builder.add(example.tokens, example.counted, number)
            except Exception as error:  # templates raise errors of their own
                raise ValueError(f"{records.place(number)}: {error}") from error
            advance(1)
    encoder.notices.log(records.place)
    examples = builder.finish(records)
    logger.info(
        "%s: %d examples, %d tokens, of which %d count in the loss",
        records.path,
        len(examples),
        len(examples.tokens),
        int(examples.counted.sum()),
    )
    return examples


class ExampleBuilder:
    """Collects examples in contiguous buffers, without a Python object for each."""

    def __init__(self) -> None:
        """Start without examples."""
        self._tokens = array.array("i")
        self._counted = bytearray()
        self._starts = array.array("q", [0])
        self._numbers = array.array("q")

    def add(self, tokens: np.ndarray, counted: np.ndarray, number: int) -> None:
        """Append an example of record `number`: tokens i32[n], and which of them count, bool[n]."""
        self._tokens.frombytes(tokens.tobytes())
        self._counted += counted.tobytes()
        self._starts.append(len(self._tokens))
        self._numbers.append(number)

    def finish(self, source: Source) -> Examples:
        """Return the examples, which share memory with the buffers.

        Raises:
          ValueError: there are none.
        """
        if not self._numbers:
            raise ValueError(f"{source.path}: it holds no examples")
        return Examples(
            source,
            np.frombuffer(self._tokens, np.int32),
            np.frombuffer(self._counted, bool),
            np.frombuffer(self._starts, np.int64),
            np.frombuffer(self._numbers, np.int64),
        )
