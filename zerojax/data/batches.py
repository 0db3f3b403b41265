"""Batches of rows: shuffled without end for training, or each row once for evaluation.

Training goes through grain, which shuffles the rows anew in each epoch and reads ahead. The epochs
follow each other; of their rows step k takes those from k B to (k + 1) B - 1, and each process its
own part of these. So a step has the same rows for any number of processes, and its number is all
that a position holds.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xxhash

from zerojax.data.packing import Rows
from zerojax.given import whole_number

Batch = dict[str, np.ndarray]


class Batches:
    """An endless iterator of this process's part of each step's batch.

    `get_state` and `set_state` make it one that `zj.Checkpointer` saves and restores.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, part: int, num_parts: int) -> None:
        try:
            import grain
        except ImportError as error:
            raise ImportError("shuffled batches need grain: pip install 'zerojax[hf]'") from error
        local = _part_size(batch_size, part, num_parts)
        if len(rows) < batch_size:
            raise ValueError(
                f"{len(rows)} rows are too few for a batch of {batch_size}: take a smaller batch_size or a shorter seq"
            )
        self._identity = _identity(rows, batch_size, seed)
        # Batches of the parts are dealt out in turn: the k-th of every process make up step k. An
        # epoch ends within a batch.
        order = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
        dealt = order.batch(local, drop_remainder=True)[part::num_parts]
        # The rows are in memory: grain's own 500 batches ahead, in 16 threads, would take seconds
        # of a core at the start.
        self._read = iter(
            dealt.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8))
        )
        self._next = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        batch = next(self._read)
        self._next += 1
        return batch

    def go_to(self, step: int) -> None:
        """Continue with the batch of a step, counted from 0, as after a restore by another number
        of processes.
        """
        self._read.set_state({"next_index": step})  # grain's name for it
        self._next = step

    def get_state(self) -> dict[str, Any]:
        """Return the position, as JSON has it."""
        return {"next": self._next, "rows": self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Raises:
          ValueError: it is one among other rows, of another file, seq, batch size or seed.
        """
        if state["rows"] != self._identity:
            raise ValueError(
                f"the position is one among the rows {state['rows']}, and these are {self._identity}: give the file, the "
                "tokenizer, seq, batch_size and seed that it was saved with, or restore without data"
            )
        self.go_to(state["next"])


def batches(
    rows: Rows,
    batch_size: int,
    seed: int = 0,
    *,
    part: int | None = None,
    num_parts: int | None = None,
) -> Batches:
    """Return an endless iterator of shuffled batches, each epoch in another order.

    Args:
      rows: of `pack`.
      batch_size: rows of a batch of all processes together.
      seed: of the order.
      part: which part of each batch this process reads; `jax.process_index()`.
      num_parts: how many there are; `jax.process_count()`.

    Returns:
      An iterator of dicts of i32[batch_size / num_parts, seq].

    Raises:
      ValueError: too few rows, or a batch that does not divide.
    """
    part, num_parts = _own_part(part, num_parts)
    batch_size, seed = whole_number("batch_size", batch_size, 1), whole_number("seed", seed, 0)
    return Batches(rows, batch_size, seed, part, num_parts)


def batches_once(
    rows: Rows,
    batch_size: int,
    *,
    count: int | None = None,
    part: int | None = None,
    num_parts: int | None = None,
) -> Iterator[Batch]:
    """Yield each row once, in order, for evaluation. The last batch is filled up with rows of
    padding, which count nothing.

    Args:
      rows: of `pack`.
      batch_size: rows of a batch of all processes together.
      count: so many batches at most, of rows spread evenly over all; None: all rows.
      part: as of `batches`.
      num_parts: as of `batches`.

    Raises:
      ValueError: a batch that does not divide.
    """
    part, num_parts = _own_part(part, num_parts)
    batch_size = whole_number("batch_size", batch_size, 1)
    count = None if count is None else whole_number("count", count, 1, ", or None for all rows")
    local = _part_size(batch_size, part, num_parts)
    return _batches_once(rows, batch_size, count, part, local)


def _batches_once(
    rows: Rows, batch_size: int, count: int | None, part: int, local: int
) -> Iterator[Batch]:
    total = len(rows) if count is None else min(len(rows), count * batch_size)
    # Rows of long examples come first, so the first rows alone would be others than the rest.
    chosen = np.arange(total) * len(rows) // total
    for begin in range(part * local, -(-total // batch_size) * batch_size, batch_size):
        own = [rows[int(r)] for r in chosen[begin : begin + local]]
        own += [rows.empty()] * (local - len(own))
        yield {name: np.stack([row[name] for row in own]) for name in own[0]}


def _own_part(part: int | None, num_parts: int | None) -> tuple[int, int]:
    if (part is None) != (num_parts is None):
        raise ValueError(
            f"part={part} and num_parts={num_parts}: give both, or neither for those of JAX's processes"
        )
    if part is None or num_parts is None:
        return jax.process_index(), jax.process_count()
    return whole_number("part", part, 0), whole_number("num_parts", num_parts, 1)


def _part_size(batch_size: int, part: int, num_parts: int) -> int:
    """Return the rows of a batch that one process reads."""
    if part >= num_parts:
        raise ValueError(f"part={part} of num_parts={num_parts}: they are counted from 0")
    if batch_size % num_parts:
        raise ValueError(
            f"a batch of {batch_size} rows does not divide by {num_parts} processes: take a multiple of these"
        )
    return batch_size // num_parts


def _identity(rows: Rows, batch_size: int, seed: int) -> str:
    """Return what tells rows and their order apart from others."""
    checksum = xxhash.xxh64()
    for a in (rows.examples.tokens, rows.examples.counted, rows.order, rows.starts):
        checksum.update(np.ascontiguousarray(a).data)
    return f"{len(rows)} of {rows.seq}, batch_size {batch_size}, seed {seed}, checksum {checksum.hexdigest()}"
