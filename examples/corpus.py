"""The data of a fine-tuning run: one file or several with weights, in memory or streamed.

--data a.jsonl                           all rows, shuffled in each epoch
--data a.jsonl b.jsonl                   all rows of both files
--data a.jsonl:0.7 b.jsonl:0.3           7 rows of 10 from the first file, 3 from the second
--data web.jsonl --stream 10000          windows of 10,000 records, read as they are needed
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from train_loop import LoopOptions

from zerojax.data import Examples, Mixture, Rows, Stream, mix, pack, stream, tokenize


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(LoopOptions):
    """Options of the data.

    Attributes:
      data: JSONL files, or folders of `datasets`, with messages, prompt and completion, or text, or
        ShareGPT's or Alpaca's columns. A weight may follow each, as in a.jsonl:0.7 b.jsonl:0.3: its
        share of the rows.
      split: name of the data set in a folder with several.
      validation_data: file or folder of held-out examples; by default a part of the data.
      validation_split: name of the data set in that folder; without validation_data, in the folder
        of the data.
      held_out: one in `held_out` examples is held out if there is no other validation data; 0:
        none, and no validation.
      form: form of the examples: messages, prompt, text, sharegpt or alpaca; needed if they have
        the keys of several forms.
      each_answer: make one example of each answer in a conversation.
      too_long: what to do with an example longer than a row: refuse, truncate or drop.
      seq: tokens per row; a row may hold several examples.
      stream: read the data as it is needed, for data that does not fit in memory: number of records
        that are tokenized, packed and shuffled together, such as 10000. 0: read all of it first.
      epochs: number of passes over the rows.
      steps: number of train steps; replaces epochs.
    """

    data: tuple[str, ...]
    split: str | None = None
    validation_data: str | None = None
    validation_split: str | None = None
    held_out: int = 20
    form: Literal["messages", "prompt", "text", "sharegpt", "alpaca"] | None = None
    each_answer: bool = False
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    seq: int = 1024
    stream: int = 0
    epochs: float = 1.0
    steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The rows of a run.

    Attributes:
      rows: training rows.
      held_out: rows of the held-out examples, or None.
      examples: examples of the training files, or of the first window of each, and after them the
        held-out examples.
    """

    rows: Rows | Mixture | Stream
    held_out: Rows | Mixture | None
    examples: list[Examples]


def split_weights(data: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return the paths and the weights in `--data`; None if there are no weights.

    `~` in a path is expanded. A name that ends in a colon and a number is a path if it exists.

    Raises:
      ValueError: there is no path, a weight is not positive, or only some paths have a weight.
    """
    paths = []
    weights: list[float | None] = []
    for text in data:
        path, _, number = text.rpartition(":")
        weight = _number(number)
        if not path or weight is None or os.path.lexists(os.path.expanduser(text)):
            path, weight = text, None
        if weight is not None and not 0 < weight < math.inf:
            raise ValueError(f"--data {text}: a weight is a positive number, such as {path}:0.5")
        paths.append(os.path.expanduser(path))
        weights.append(weight)
    if not paths:
        raise ValueError("--data: at least one file or folder is needed")
    given = [weight for weight in weights if weight is not None]
    if not given:
        return paths, None
    if len(given) < len(paths):
        missing = data[weights.index(None)]
        raise ValueError(
            f"--data {' '.join(data)}: {missing} has no weight: give all files weights, as in "
            f"{missing}:1, or none"
        )
    return paths, given


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_corpus(options: DataOptions) -> None:
    """Check the options of the data that do not need the data.

    Raises:
      ValueError: a weight is wrong, or a streamed run lacks what it needs.
    """
    paths, weights = split_weights(options.data)
    if options.stream < 0:
        raise ValueError(
            f"--stream {options.stream}: a number of records is needed, such as 10000; or 0"
        )
    if not options.stream:
        return
    if options.steps is None:
        raise ValueError(
            "--stream reads the data as it is needed, so the number of its rows is unknown: give "
            "--steps in place of --epochs"
        )
    if options.held_out and not (options.validation_data or options.validation_split):
        raise ValueError(
            "--stream holds no examples out, because it never has all of them: give "
            "--validation-data, or --held-out 0"
        )
    if len(paths) > 1 and weights is None:
        raise ValueError(
            f"--stream with {len(paths)} files needs the share of each: give weights, as in "
            f"{paths[0]}:1"
        )


@contextlib.contextmanager
def errors_as_options(validation: str = "") -> Iterator[None]:
    """Write the library's advice in errors as options; `validation` is a prefix of their names."""
    try:
        yield
    except ValueError as error:
        words = str(error).replace("split=", f"--{validation}split ")
        words = words.replace("set tokenizer.chat_template to one", "give a --chat-template")
        words = words.replace("or set tokenizer.chat_template", "or give a --chat-template")
        raise ValueError(f"--{validation}data: {words}") from error


def read_corpus(
    options: DataOptions,
    tokenizer: Any,
    template_options: dict[str, Any],
    read: Callable[[str, str | None], Any] | None = None,
    pack_rows: Callable[[Any], Any] | None = None,
) -> Corpus:
    """Read the data of a run.

    Args:
      options: the run's options.
      tokenizer: tokenizer of transformers.
      template_options: arguments of the chat template by name.
      read: function that returns the examples of a path and a split, with a method `hold_out`; by
        default `zerojax.data.tokenize`.
      pack_rows: function that packs them into rows; by default `zerojax.data.pack`.

    Raises:
      ValueError: an example cannot be read, or does not fit a row.
    """
    paths, weights = split_weights(options.data)
    form: dict[str, Any] = {
        "form": options.form,
        "each_answer": options.each_answer,
        "template_options": template_options,
    }

    def read_texts(path: str, split: str | None) -> Examples:
        return tokenize(path, tokenizer, split=split, **form)

    def pack_texts(examples: Examples) -> Rows:
        return pack(examples, options.seq, too_long=options.too_long)

    read, pack_rows = read or read_texts, pack_rows or pack_texts
    held_out: list[Any] = []
    if options.validation_data is not None or options.validation_split is not None:
        path = options.validation_data or paths[0]
        with errors_as_options("validation-"):
            held_out = [read(path, options.validation_split)]
    if options.stream:
        with errors_as_options():
            rows = stream(
                paths,
                tokenizer,
                seq=options.seq,
                window=options.stream,
                weights=weights,
                split=options.split,
                too_long=options.too_long,
                **form,
            )
        train = rows.first_examples
    else:
        train = []
        for path in paths:
            split = options.split if _may_have_splits(path, paths) else None
            with errors_as_options():
                train.append(read(path, split))
        if options.held_out and not held_out:
            pairs = [_hold_out(examples, options.held_out) for examples in train]
            train = [kept for kept, _ in pairs]
            held_out = [apart for _, apart in pairs]
        rows = mix([pack_rows(file) for file in train], weights)
    validation = [pack_rows(file) for file in held_out]
    return Corpus(rows, mix(validation) if validation else None, [*train, *held_out])


def _may_have_splits(path: str, paths: Sequence[str]) -> bool:
    """Return whether `--split` concerns a path: files beside folders have no splits."""
    return os.path.isdir(path) or not any(map(os.path.isdir, paths))


def _hold_out(examples: Any, one_in: int) -> tuple[Any, Any]:
    try:
        return examples.hold_out(one_in)
    except ValueError as error:
        raise ValueError(f"--held-out {one_in}: {error}") from error


def describe_rows(rows: Rows | Mixture | Stream) -> list[str]:
    """Return a summary of rows in words, with a line for each of several weighted files."""
    if isinstance(rows, Stream):
        records = rows.files[0].window
        return [f"rows of {rows.seq:,}, read in windows of {records:,} records"] + [
            f"{share}{file.source.path}"
            for share, file in zip(_shares(rows.pattern, len(rows.files)), rows.files, strict=True)
        ]
    lines = [_describe_counts(rows.counts, rows.seq)]
    if isinstance(rows, Mixture) and rows.pattern is not None:
        for share, file in zip(_shares(rows.pattern, len(rows.files)), rows.files, strict=True):
            path = file.examples.source.path
            lines.append(f"{share}{path}: {_describe_counts(file.counts, file.seq)}")
    return lines


def _shares(pattern: Any, count: int) -> list[str]:
    """Return the share of each file in words."""
    if pattern is None:
        return [""] * count
    return [f"{100 * weight:.3g} % of the rows from " for weight in pattern.weights]


def _describe_counts(c: Any, seq: int) -> str:
    text = (
        f"{c.examples:,} examples in {c.rows:,} rows of {seq:,}, "
        f"{100 * c.positions / (c.rows * seq):.0f} % full"
    )
    text += f"; {c.counted:,} tokens count in the loss"
    return (
        text
        + f"; {c.truncated:,} cut" * bool(c.truncated)
        + f"; {c.dropped:,} left out" * bool(c.dropped)
    )
