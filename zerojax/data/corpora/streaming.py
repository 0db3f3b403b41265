"""Rows of data sets that do not fit in memory, read as they are needed.

A file is read in windows of some thousand records. The records of a window are tokenized, packed
and shuffled together, and their rows used up, while a thread prepares the next window. After the
last window the file begins again, in another order. Memory holds two windows, whatever the file's
size.

    position = (epoch, window, where it begins, rows used), a few numbers for each file

A run that resumes reads only the window at its position. The checksum of the window's tokens is
part of the position, so a window that changed meanwhile is an error. Later windows may change: a
broken record is repaired, and the run resumed.

Rows are shuffled only within their window. So a file that is sorted, by topic or by length, should
be shuffled once before.
"""

import copy
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from zerojax.data.chat import RENDER_SECONDS, checked_options
from zerojax.data.corpora.mixing import Pattern
from zerojax.data.cpu_limit import CpuLimit
from zerojax.data.encoding import Encoder, Form
from zerojax.data.examples import ExampleBuilder, Examples
from zerojax.data.packing import Rows, TooLong, pack
from zerojax.data.reading import Position, Source, source
from zerojax.user_values import whole_number

logger = logging.getLogger("zerojax.data")
WINDOW = 10_000
"""Number of records in a window by default."""


@dataclasses.dataclass(frozen=True)
class PackedWindow:
    """One window of a file, tokenized and packed.

    Attributes:
      epoch: number of earlier passes over the file.
      index: number of earlier windows in this pass.
      begin: position of its first record.
      end: position after its last record.
      is_last: whether the file ends after it.
      rows: its rows, or None if it has none.
      checksum: checksum of its rows.
    """

    epoch: int
    index: int
    begin: Position
    end: Position
    is_last: bool
    rows: Rows | None
    checksum: str

    def order(self, seed: int) -> np.ndarray:
        """Return the order in which its rows are used, i64[R]."""
        if self.rows is None:
            return np.zeros(0, np.int64)
        # The numbers of RandomState are the same in every version of numpy.
        state = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, self.epoch, self.index])
        return state.permutation(len(self.rows))


class StreamedFile:
    """Windows of one file.

    Attributes:
      source: file or folder.
      seq: positions per row.
      window: number of records per window.
      first: first window of the file.
    """

    def __init__(
        self, records: Source, encoder: Encoder, seq: int, window: int, too_long: TooLong
    ) -> None:
        """Read the first window.

        Raises:
          ValueError: a record of it cannot be read, or it gives no rows.
        """
        self.source = records
        self.seq = seq
        self.window = window
        self._encoder = encoder
        self._too_long: TooLong = too_long
        self._lock = threading.Lock()  # the encoder takes one record at a time
        self.first = self.read(0, 0, Position())
        if self.first.rows is None:
            raise ValueError(
                f"{records.path}: none of its first {window} records gives a row of seq={seq}: use "
                "a longer seq, or other data"
            )

    def read(self, epoch: int, index: int, begin: Position) -> PackedWindow:
        """Return the window that begins at a position.

        Raises:
          ValueError: a record cannot be read or is too long; the error names its place.
        """
        with self._lock:
            window = self.source.window(begin, self.window)
            builder = ExampleBuilder()
            for number, record in window.records:
                self._encoder.notices.number = number
                try:
                    for example in self._encoder.encode(record):
                        builder.add(example.tokens, example.counted, number)
                except Exception as error:  # templates raise errors of their own
                    raise ValueError(f"{self.source.place(number)}: {error}") from error
            self._encoder.notices.log(self.source.place)
        rows = self._pack(builder.finish(self.source)) if window.records else None
        checksum = xxhash.xxh64()
        for a in () if rows is None else rows.arrays:
            checksum.update(np.ascontiguousarray(a).data)
        return PackedWindow(
            epoch, index, begin, window.end, window.is_last, rows, checksum.hexdigest()
        )

    def _pack(self, examples: Examples) -> Rows | None:
        """Return the rows of a window's examples, or None if all of them are dropped."""
        if self._too_long == "drop" and not (examples.lengths <= self.seq + 1).any():
            return None
        return pack(examples, self.seq, too_long=self._too_long)

    def after(self, window: PackedWindow) -> PackedWindow:
        """Return the next window, which is the first one after the last."""
        if window.is_last:
            return self.read(window.epoch + 1, 0, Position())
        return self.read(window.epoch, window.index + 1, window.end)


class Stream:
    """Files that are read as they are needed, for `batches`.

    Attributes:
      files: the files.
      pattern: pattern in which batches draw from several files; None for a single one.
    """

    def __init__(self, files: Sequence[StreamedFile], pattern: Pattern | None) -> None:
        """Take files, as `stream` opens them.

        Args:
          files: the files.
          pattern: pattern in which batches draw from them; None for a single one.
        """
        self.files = tuple(files)
        self.pattern = pattern

    @property
    def seq(self) -> int:
        """Positions per row."""
        return self.files[0].seq

    @property
    def first_examples(self) -> list[Examples]:
        """Examples in the first window of each file."""
        return [file.first.rows.examples for file in self.files if file.first.rows is not None]

    def identity(self) -> str:
        """Return a string that identifies the first windows and how they are read."""
        parts = []
        for i, file in enumerate(self.files):
            share = "" if self.pattern is None else f", weight {self.pattern.weights[i]:.6g}"
            parts.append(f"windows of {file.window} records, checksum {file.first.checksum}{share}")
        return f"rows of {self.seq} in {'; '.join(parts)}"


def stream(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    *,
    seq: int,
    window: int = WINDOW,
    weights: Sequence[float] | None = None,
    split: str | None = None,
    form: Form | None = None,
    each_answer: bool = False,
    add_eos: bool = True,
    template_options: Mapping[str, Any] | None = None,
    too_long: TooLong = "refuse",
) -> Stream:
    """Return the rows of a data set that does not fit in memory, for `batches`.

        rows = stream("web.jsonl", tokenizer, seq=2048, window=10_000)

    Only the first window of each file is read now.

    Args:
      path: path of a JSONL file, or of a folder that `datasets` saved; or several, with `weights`.
      tokenizer: tokenizer of transformers, as `load_tokenizer(folder)` returns it.
      seq: positions per row.
      window: number of records that are tokenized, packed and shuffled together.
      weights: relative weight of each of several files, as shares of rows.
      split: name of the data set to read in folders that hold several.
      form: form of the records, as in `tokenize`.
      each_answer: whether to make one example per answer, as in `tokenize`.
      add_eos: whether to end texts with the tokenizer's `eos_token`, as in `tokenize`.
      template_options: extra variables for the chat template by name.
      too_long: treatment of examples that do not fit a row, as in `pack`.

    Raises:
      ValueError: an argument does not fit, or the first window of a file cannot be read or gives
        no rows.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else [*path]
    if not paths:
        raise ValueError("path=[]: at least one file is needed")
    if len(paths) > 1 and weights is None:
        raise ValueError(f"{len(paths)} files are streamed: give the share of each by weights=")
    if weights is not None and len(weights) != len(paths):
        raise ValueError(f"weights={[*weights]} for {len(paths)} files: one each is needed")
    seq = whole_number("seq", seq, 1)
    window = whole_number("window", window, 1)
    options = checked_options(template_options)
    pattern = None if weights is None else Pattern(weights)
    files = []
    for place in paths:
        # Each file has a tokenizer of its own: a thread uses it beside the caller's.
        encoder = Encoder(
            copy.deepcopy(tokenizer), form, add_eos, each_answer, options, CpuLimit(RENDER_SECONDS)
        )
        # Files beside folders have no splits.
        has_splits = len(paths) == 1 or os.path.isdir(place)
        records = source(place, split if has_splits else None)
        files.append(StreamedFile(records, encoder, seq, window, too_long))
    return Stream(files, pattern)


class _Ahead:
    """A call that runs in a thread of its own."""

    def __init__(self, call: Callable[[], PackedWindow]) -> None:
        """Start the call."""
        self._call = call
        self._error: BaseException | None = None
        self._value: PackedWindow | None = None
        # A daemon: the end of the program does not wait for a window that nobody needs.
        self._thread = threading.Thread(target=self._run, name="zerojax-data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> PackedWindow:
        """Wait for the call; return its result, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class _Cursor:
    """The position in one file, between two rows."""

    def __init__(self, file: StreamedFile, seed: int) -> None:
        """Start before the first row."""
        self._file = file
        self._seed = seed
        self._ahead: _Ahead | None = None
        self.enter(file.first, 0)

    def enter(self, window: PackedWindow, used: int) -> None:
        """Continue in a window of which some rows are used."""
        self.window = window
        self.used = used
        self._order = window.order(self._seed)
        self._ahead = None

    def advance(self) -> tuple[Rows, int]:
        """Return the rows of a window and the index of the next row among them."""
        if self._ahead is None:
            self._ahead = _Ahead(lambda window=self.window: self._file.after(window))
        while self.used == len(self._order):
            window = self._ahead.result()
            self.enter(window, 0)
            self._ahead = _Ahead(lambda window=window: self._file.after(window))
        self.used += 1
        assert self.window.rows is not None
        return self.window.rows, int(self._order[self.used - 1])

    def get_state(self) -> dict[str, Any]:
        """Return the position as a JSON-serializable dict."""
        window = self.window
        return {
            "epoch": window.epoch,
            "window": window.index,
            "offset": window.begin.offset,
            "number": window.begin.number,
            "checksum": window.checksum,
            "used": self.used,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Raises:
          ValueError: the window there has changed.
        """
        begin = Position(state["offset"], state["number"])
        if begin.offset:
            window = self._file.read(state["epoch"], state["window"], begin)
        else:
            window = dataclasses.replace(self._file.first, epoch=state["epoch"])
        if window.checksum != state["checksum"]:
            raise ValueError(
                f"{self._file.source.path}: the {self._file.window} records after number "
                f"{begin.number} have changed since the position was saved: restore the file, or "
                "restore without data"
            )
        self.enter(window, state["used"])


class StreamedRows:
    """An endless sequence of rows of a stream, from the first one on."""

    def __init__(self, rows: Stream, seed: int) -> None:
        """Start before row 0."""
        self._stream = rows
        self._seed = seed
        self.rewind()

    def rewind(self) -> None:
        """Go back to row 0."""
        self._next = 0
        self._cursors = [_Cursor(file, self._seed) for file in self._stream.files]

    def advance(self) -> tuple[Rows, int]:
        """Return the rows of a window and the index of the next row among them."""
        pattern = self._stream.pattern
        file = 0 if pattern is None else pattern[self._next][0]
        self._next += 1
        return self._cursors[file].advance()

    def get_state(self) -> dict[str, Any]:
        """Return the position as a JSON-serializable dict."""
        return {"row": self._next, "files": [cursor.get_state() for cursor in self._cursors]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Raises:
          ValueError: the window of a file there has changed.
        """
        for cursor, position in zip(self._cursors, state["files"], strict=True):
            cursor.set_state(position)
        self._next = state["row"]
