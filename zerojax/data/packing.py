"""Examples packed into rows of equal length.

Rows are packed by best-fit decreasing (Ding et al., arXiv:2404.10830): examples are placed from the
longest to the shortest, each into the row where it leaves the least room, or into a new row.
Examples are never cut to fill rows, and with real length distributions the rows are nearly full.

An example of n tokens takes n - 1 positions. Each position holds a token and its successor, which
is the target if it counts.

    tokens       a0 a1 a2 b0 b1  0          from a0 .. a3 and b0 .. b2
    targets      -1 a2 a3 b1 b2 -1          a1 does not count
    segment_ids   1  1  1  2  2  0
    positions     0  1  2  0  1  0
"""

import bisect
import dataclasses
import logging
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from zerojax.data.examples import Examples
from zerojax.user_values import whole_number

TooLong = Literal["refuse", "truncate", "drop"]
logger = logging.getLogger("zerojax.data")


def best_fit(lengths: Sequence[int] | np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack examples into rows, given only their lengths.

    Args:
      lengths: length of each example, from 1 to `seq`.
      seq: length of a row.

    Returns:
      (order i64[E], starts i64[R + 1]): row r holds order[starts[r] : starts[r + 1]]. Examples of
      equal length keep their order.
    """
    lengths = np.asarray(lengths, np.int64)
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free positions -> rows
    rooms: list[int] = []  # its keys, sorted
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        k = bisect.bisect_left(rooms, length)
        if k == len(rooms):
            row = len(rows)
            room = seq
            rows.append([])
        else:
            room = rooms[k]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[k]
        rows[row].append(i)
        if room > length:
            if room - length not in by_room:
                bisect.insort(rooms, room - length)
            by_room.setdefault(room - length, []).append(row)
    order = np.fromiter((i for row in rows for i in row), np.int64, len(lengths))
    return order, np.cumsum([0, *map(len, rows)], dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Statistics of packing.

    Attributes:
      examples: number of examples in the rows.
      rows: number of rows, of `seq` positions each.
      positions: number of positions that hold a token.
      counted: number of targets that count in the loss.
      truncated: number of truncated examples.
      cut_tokens: number of tokens cut from the truncated examples.
      dropped: number of examples left out.
    """

    examples: int
    rows: int
    positions: int
    counted: int
    truncated: int
    cut_tokens: int
    dropped: int


class Rows:
    """Rows of packed examples, built on access.

    `rows[r]` is a dict of i32[seq]: `tokens`, `targets` (-1: not counted), `segment_ids` (1, 2, ..;
    0: padding) and `positions` (from 0 in each segment).

    Attributes:
      seq: positions per row.
      examples: packed examples.
      order: i64[E], indices of examples, row by row.
      starts: i64[R + 1], row r holds the examples order[starts[r] : starts[r + 1]].
      counts: statistics of packing.
    """

    def __init__(
        self, examples: Examples, seq: int, order: np.ndarray, starts: np.ndarray, counts: Counts
    ) -> None:
        """Take what `pack` computes; the attributes have the same names."""
        self.examples = examples
        self.seq = seq
        self.order = order
        self.starts = starts
        self.counts = counts

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.starts) - 1

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays that determine the rows."""
        return (self.examples.tokens, self.examples.counted, self.order, self.starts)

    def members(self, row: int) -> np.ndarray:
        """Return the indices of the examples in a row, in order.

        Args:
          row: index of the row, counted from 0.
        """
        return self.order[self.starts[row] : self.starts[row + 1]]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Build row `index` from the tokens of its examples."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}: rows are counted from 0")
        out = self.empty()
        position = 0
        for segment, i in enumerate(self.members(index), 1):
            begin, end = self.examples.starts[i : i + 2]
            piece = slice(begin, min(end, begin + self.seq + 1))
            tokens = self.examples.tokens[piece]
            counted = self.examples.counted[piece]
            target = slice(position, position + len(tokens) - 1)
            out["tokens"][target] = tokens[:-1]
            out["targets"][target] = np.where(counted[1:], tokens[1:], -1)
            out["segment_ids"][target] = segment
            out["positions"][target] = np.arange(len(tokens) - 1)
            position = target.stop
        return out

    def empty(self) -> dict[str, np.ndarray]:
        """Return a row of padding, in which no target counts."""
        names = ("tokens", "targets", "segment_ids", "positions")
        return {name: np.full(self.seq, -1 if name == "targets" else 0, np.int32) for name in names}


def pack(examples: Examples, seq: int, *, too_long: TooLong = "refuse") -> Rows:
    """Pack examples into rows by best-fit decreasing.

    Args:
      examples: tokenized examples, as `tokenize` returns them.
      seq: positions per row. An example of n tokens takes n - 1.
      too_long: treatment of examples with more than seq + 1 tokens: "refuse" raises an error,
        "truncate" keeps their first seq + 1 tokens, "drop" leaves them out. `rows.counts` reports
        how many there were.

    Returns:
      The packed rows.

    Raises:
      ValueError: an example is too long, or none of its tokens counts after truncation (the error
        names its place), or no example is left.
    """
    if too_long not in get_args(TooLong):
        raise ValueError(
            f"too_long={too_long!r} is unknown: choose from {', '.join(get_args(TooLong))}"
        )
    seq = whole_number("seq", seq, 1)
    lengths = examples.lengths
    is_long = lengths > seq + 1
    num_long = int(is_long.sum())
    if num_long and too_long == "refuse":
        raise _too_long_error(examples, int(np.argmax(is_long)), num_long, seq)
    chosen = np.flatnonzero(~is_long) if too_long == "drop" else np.arange(len(examples))
    if not len(chosen):
        raise ValueError(
            f"all {len(examples)} examples have more than seq + 1 = {seq + 1} tokens: use a longer "
            "seq"
        )
    lengths_in_row = np.minimum(lengths[chosen], seq + 1)
    counted = _counted(examples, chosen, lengths_in_row)
    uncounted = np.flatnonzero(counted == 0)
    if uncounted.size:
        i = int(chosen[uncounted[0]])
        raise ValueError(
            f"{examples.place(i)}: of its {lengths[i]} tokens only the first seq + 1 = {seq + 1} "
            "are kept, and none of them counts in the loss. This affects "
            f"{len(uncounted)} examples: use a longer seq, or too_long='drop'"
        )
    order, starts = best_fit(lengths_in_row - 1, seq)
    counts = Counts(
        examples=len(chosen),
        rows=len(starts) - 1,
        positions=int(lengths_in_row.sum()) - len(chosen),
        counted=int(counted.sum()),
        truncated=num_long if too_long == "truncate" else 0,
        cut_tokens=int((lengths[chosen] - lengths_in_row).sum()),
        dropped=len(examples) - len(chosen),
    )
    logger.info(
        "packed into rows of %d: %s, %.1f%% full",
        seq,
        counts,
        100 * counts.positions / (counts.rows * seq),
    )
    return Rows(examples, seq, chosen[order], starts, counts)


def _too_long_error(examples: Examples, first: int, num_long: int, seq: int) -> ValueError:
    """Return the error for examples that do not fit a row, of which `first` is the first."""
    n = examples.lengths[first]
    return ValueError(
        f"{examples.place(first)}: {n} tokens take {n - 1} positions, but a row has "
        f"seq={seq}; {num_long} of {len(examples)} examples are too long, and the longest has "
        f"{examples.lengths.max()} tokens: use a longer seq, or too_long='truncate', or "
        "too_long='drop'"
    )


def _counted(examples: Examples, chosen: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Return the number of counted targets among the first `pieces` tokens of each example."""
    begins = examples.starts[chosen]
    edges = np.stack([begins + 1, begins + pieces], -1).ravel()  # the first token is not a target
    # reduceat sums the last segment up to the end of the array.
    if edges[-1] == len(examples.counted):
        edges = edges[:-1]
    return np.add.reduceat(examples.counted, edges, dtype=np.int64)[::2]
