"""Batches of rows: shuffled and endless for training, or each row once for evaluation.

Training batches of rows in memory are read through grain, which shuffles them in each epoch and
prefetches. The epochs are concatenated into one endless sequence of rows. Step k takes the rows
from k B to (k + 1) B - 1 of this sequence, and each process reads its own part of them. A step
therefore has the same rows for any number of processes, and a saved position is just the step
number. With weights, each file has an endless sequence of its own
(`zerojax.data.corpora.mixing`). Rows that are streamed come from `zerojax.data.corpora.streaming`.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import xxhash

from zerojax.data.corpora.mixing import Mixture, Pattern
from zerojax.data.corpora.streaming import Stream, StreamedRows
from zerojax.data.packing import Rows
from zerojax.user_values import whole_number

Batch = dict[str, np.ndarray]


class Batches:
    """An endless iterator over this process's part of each step's batch.

    `zj.Checkpointer` saves and restores its position through `get_state` and `set_state`. Make it
    with `zerojax.data.batches`, which fills in the parts of the processes.
    """

    def __init__(
        self, rows: Rows | Mixture, batch_size: int, seed: int, part: int, num_parts: int
    ) -> None:
        """Start at step 0.

        Args:
          rows: packed rows, as `pack` returns them.
          batch_size: number of rows per batch, over all processes together.
          seed: seed of the shuffled order.
          part: index of the part of each batch that this process reads.
          num_parts: number of parts that each batch is divided into.

        Raises:
          ImportError: grain is not installed.
          ValueError: there are fewer rows than `batch_size`, or `batch_size` is not divisible by
            `num_parts`.
        """
        try:
            import grain
        except ImportError as error:
            raise ImportError("shuffled batches need grain: pip install 'zerojax[hf]'") from error
        local = _part_size(batch_size, part, num_parts)
        if len(rows) < batch_size:
            raise ValueError(
                f"{len(rows)} rows are too few for a batch of {batch_size}: use a smaller "
                "batch_size or a shorter seq"
            )
        self._identity = _identity(rows, batch_size, seed)
        # Local batches are dealt to the parts in turn: the k-th local batch of every part makes up
        # step k. An epoch may end within a batch.
        order = _endless(rows, seed)
        dealt = order.batch(local, drop_remainder=True)[part::num_parts]
        # The rows are already in memory. grain's defaults (500 batches ahead, 16 threads) would
        # take seconds of CPU time at the start.
        self._read = iter(
            dealt.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8))
        )
        self._next = 0

    def __iter__(self) -> "Batches":
        """Return the iterator itself."""
        return self

    def __next__(self) -> Batch:
        """Return this process's part of the next step's batch."""
        batch = next(self._read)
        self._next += 1
        return batch

    def go_to(self, step: int) -> None:
        """Continue with the batch of a step.

        This position is valid after a restore with a different number of processes.

        Args:
          step: number of the step, counted from 0.
        """
        self._read.set_state({"next_index": step})  # grain's name for it
        self._next = step

    def get_state(self) -> dict[str, Any]:
        """Return the position as a JSON-serializable dict."""
        return {"next": self._next, "rows": self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Args:
          state: a position that `get_state` returned.

        Raises:
          ValueError: the position belongs to different rows: another file, tokenizer, seq, batch
            size or seed.
        """
        _check_identity(state, self._identity)
        self.go_to(state["next"])


class StreamedBatches:
    """An endless iterator over this process's part of each step's batch of streamed rows.

    It has the methods of `Batches`.
    """

    def __init__(self, rows: Stream, batch_size: int, seed: int, part: int, num_parts: int) -> None:
        """Start at step 0.

        Args:
          rows: rows of a stream, as `zerojax.data.stream` returns them.
          batch_size: number of rows per batch, over all processes together.
          seed: seed of the shuffled order.
          part: index of the part of each batch that this process reads.
          num_parts: number of parts that each batch is divided into.

        Raises:
          ValueError: `batch_size` is not divisible by `num_parts`.
        """
        local = _part_size(batch_size, part, num_parts)
        self._identity = f"{rows.identity()}, batch_size {batch_size}, seed {seed}"
        self._rows = StreamedRows(rows, seed)
        self._batch_size = batch_size
        self._own = range(part * local, (part + 1) * local)
        self._next = 0

    def __iter__(self) -> "StreamedBatches":
        """Return the iterator itself."""
        return self

    def __next__(self) -> Batch:
        """Return this process's part of the next step's batch.

        Raises:
          ValueError: a record cannot be read; the error names its place.
        """
        # Every process walks over all rows, and builds its own.
        places = [self._rows.advance() for _ in range(self._batch_size)]
        self._next += 1
        own = [places[k] for k in self._own]
        return _stack_rows([rows[index] for rows, index in own])

    def go_to(self, step: int) -> None:
        """Continue with the batch of a step.

        Reads everything before it, since only `set_state` knows where its records are.

        Args:
          step: number of the step, counted from 0.
        """
        self._rows.rewind()
        for _ in range(step * self._batch_size):
            self._rows.advance()
        self._next = step

    def get_state(self) -> dict[str, Any]:
        """Return the position as a JSON-serializable dict."""
        return {"next": self._next, "rows": self._identity, "stream": self._rows.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Args:
          state: a position that `get_state` returned.

        Raises:
          ValueError: the position belongs to other rows, or the records there have changed.
        """
        _check_identity(state, self._identity)
        self._rows.set_state(state["stream"])
        self._next = state["next"]


class _Weighted:
    """The endless sequences of several files, as one."""

    def __init__(self, orders: Sequence[Any], pattern: Pattern) -> None:
        """Draw from `orders` in a pattern."""
        self._orders = orders
        self._pattern = pattern

    def __len__(self) -> int:
        """Return the number of rows, which has no end."""
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        """Return a row."""
        file, row = self._pattern[index]
        return self._orders[file][row]


def _endless(rows: Rows | Mixture, seed: int) -> Any:
    """Return the endless sequence of rows, as a dataset of grain."""
    import grain

    if not isinstance(rows, Mixture) or rows.pattern is None:
        return grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
    orders = [grain.MapDataset.source(file).seed(seed).shuffle().repeat() for file in rows.files]
    return grain.MapDataset.source(_Weighted(orders, rows.pattern))


def batches(
    rows: Rows | Mixture | Stream,
    batch_size: int,
    seed: int = 0,
    *,
    part: int | None = None,
    num_parts: int | None = None,
) -> Batches | StreamedBatches:
    """Return an endless iterator of shuffled batches, with a different order in each epoch.

    Args:
      rows: packed rows, as `pack`, `mix` or `stream` returns them.
      batch_size: number of rows per batch, over all processes together.
      seed: seed of the shuffled order.
      part: index of the part of each batch that this process reads; defaults to
        `jax.process_index()`.
      num_parts: number of parts that each batch is divided into; defaults to
        `jax.process_count()`.

    Returns:
      An iterator of dicts of i32[batch_size / num_parts, seq].

    Raises:
      ValueError: there are fewer rows than `batch_size`, or `batch_size` is not divisible by
        `num_parts`.
    """
    part, num_parts = _own_part(part, num_parts)
    batch_size = whole_number("batch_size", batch_size, 1)
    seed = whole_number("seed", seed, 0)
    if isinstance(rows, Stream):
        return StreamedBatches(rows, batch_size, seed, part, num_parts)
    return Batches(rows, batch_size, seed, part, num_parts)


def batches_once(
    rows: Rows | Mixture,
    batch_size: int,
    *,
    count: int | None = None,
    part: int | None = None,
    num_parts: int | None = None,
) -> Iterator[Batch]:
    """Yield each row once, in order, for evaluation.

    The last batch is filled up with padding rows, in which no token counts.

    Args:
      rows: packed rows, as `pack` or `mix` returns them.
      batch_size: number of rows per batch, over all processes together.
      count: maximum number of batches; their rows are spread evenly over all rows. None: all rows.
      part: index of the part of each batch that this process reads; defaults to
        `jax.process_index()`.
      num_parts: number of parts that each batch is divided into; defaults to
        `jax.process_count()`.

    Yields:
      Dicts of i32[batch_size / num_parts, seq].

    Raises:
      ValueError: `batch_size` is not divisible by `num_parts`.
    """
    part, num_parts = _own_part(part, num_parts)
    batch_size = whole_number("batch_size", batch_size, 1)
    count = None if count is None else whole_number("count", count, 1, ", or None for all rows")
    local = _part_size(batch_size, part, num_parts)
    return _batches_once(rows, batch_size, count, part, local)


def _batches_once(
    rows: Rows | Mixture, batch_size: int, count: int | None, part: int, local: int
) -> Iterator[Batch]:
    total = len(rows) if count is None else min(len(rows), count * batch_size)
    # The first rows hold the longest examples, so they alone would not represent the rest.
    row_ids = np.arange(total) * len(rows) // total
    for begin in range(part * local, -(-total // batch_size) * batch_size, batch_size):
        batch_rows = [rows[int(row_id)] for row_id in row_ids[begin : begin + local]]
        batch_rows += [rows.empty()] * (local - len(batch_rows))
        yield _stack_rows(batch_rows)


def _stack_rows(rows: Sequence[Batch]) -> Batch:
    """Return a batch [B, seq] of rows [seq]."""
    batch: Batch = {}
    for name in rows[0]:
        batch[name] = np.stack([row[name] for row in rows])
    return batch


def _own_part(part: int | None, num_parts: int | None) -> tuple[int, int]:
    if (part is None) != (num_parts is None):
        raise ValueError(
            f"part={part} and num_parts={num_parts}: give both, or neither to use JAX's processes"
        )
    if part is None or num_parts is None:
        return jax.process_index(), jax.process_count()
    return whole_number("part", part, 0), whole_number("num_parts", num_parts, 1)


def _part_size(batch_size: int, part: int, num_parts: int) -> int:
    """Return the number of rows of each batch that one process reads."""
    if part >= num_parts:
        raise ValueError(f"part={part} of num_parts={num_parts}: parts are counted from 0")
    if batch_size % num_parts:
        raise ValueError(
            f"batch_size={batch_size} is not divisible by {num_parts} processes: use a multiple of "
            "the number of processes"
        )
    return batch_size // num_parts


def _check_identity(state: dict[str, Any], identity: str) -> None:
    """Raise ValueError if a position was saved for other rows."""
    if state["rows"] != identity:
        raise ValueError(
            f"the position was saved for the rows {state['rows']}, but these are {identity}: use "
            "the file, the tokenizer, seq, batch_size and seed that it was saved with, or restore "
            "without data"
        )


def _identity(rows: Rows | Mixture, batch_size: int, seed: int) -> str:
    """Return a string that identifies the rows and their order."""
    checksum = xxhash.xxh64()
    for a in rows.arrays:
        checksum.update(np.ascontiguousarray(a).data)
    return (
        f"{len(rows)} of {rows.seq}, batch_size {batch_size}, seed {seed}, checksum "
        f"{checksum.hexdigest()}"
    )
