"""Rows of several files, in one order: all of them, or drawn by weights.

Without weights, the rows of all files are shuffled together, and an epoch has each of them once.

With weights w_i, a share of w_i of all rows comes from file i. Row k is row `index` of file i:

    i = pattern[k mod P]        index = (k div P) n_i + number of i in pattern[: k mod P]

where the pattern of P = 1000 entries has n_i = w_i P of them for file i, spread evenly. The rows of
each file are shuffled and repeated on their own, so a small file begins again while a large one
still goes on. Everything follows from k, so a position is still the number of the step.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from zerojax.data.packing import Counts, Rows

PERIOD = 1000
"""Number of rows after which the pattern of files repeats."""


class Pattern:
    """The file of each row.

    Attributes:
      weights: share of each file; the sum is 1.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Spread files evenly over a period.

        Args:
          weights: relative weights, positive.

        Raises:
          ValueError: a weight is not a positive number, or so small that no row would be drawn.
        """
        if not weights or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights={[*weights]}: positive numbers are needed")
        total = math.fsum(weights)
        self.weights = tuple(weight / total for weight in weights)
        exact = np.asarray(self.weights) * PERIOD
        counts = np.floor(exact).astype(np.int64)
        # The files with the largest remainders get one more row each.
        rest = np.argsort(counts - exact, kind="stable")[: PERIOD - int(counts.sum())]
        counts[rest] += 1
        if not counts.all():
            smallest = min(self.weights)
            raise ValueError(
                f"weights={[*weights]}: a share of {smallest:.2g} is less than one row in {PERIOD}"
            )
        self._counts = counts
        self._files = np.zeros(PERIOD, np.int64)
        self._before = np.zeros((PERIOD, len(counts)), np.int64)
        taken = np.zeros(len(counts), np.int64)
        for k in range(PERIOD):
            self._before[k] = taken
            self._files[k] = np.argmax((k + 1) * counts - taken * PERIOD)
            taken[self._files[k]] += 1

    def __getitem__(self, k: int) -> tuple[int, int]:
        """Return the file of row k, and the number of earlier rows from that file."""
        period, place = divmod(k, PERIOD)
        file = int(self._files[place])
        return file, int(period * self._counts[file] + self._before[place, file])


class Mixture:
    """Rows of several files.

    Attributes:
      files: rows of each file.
      pattern: pattern in which batches draw from the files; None: all rows are shuffled together.
    """

    def __init__(self, files: Sequence[Rows], weights: Sequence[float] | None = None) -> None:
        """Join the rows of files.

        Args:
          files: rows of each file, with the same `seq`.
          weights: relative weight of each file, as shares of rows; None: each row once an epoch.

        Raises:
          ValueError: the weights do not fit, or `seq` differs.
        """
        if len({rows.seq for rows in files}) != 1:
            raise ValueError(
                f"files have rows of {[rows.seq for rows in files]} tokens: pack all with one seq"
            )
        if weights is not None and len(weights) != len(files):
            raise ValueError(f"weights={[*weights]} for {len(files)} files: one each is needed")
        self.files = tuple(files)
        self.pattern = None if weights is None else Pattern(weights)
        self._starts = np.cumsum([0, *map(len, files)])

    @property
    def seq(self) -> int:
        """Positions per row."""
        return self.files[0].seq

    @property
    def counts(self) -> Counts:
        """Statistics of packing, summed over the files."""
        fields = [dataclasses.astuple(rows.counts) for rows in self.files]
        return type(self.files[0].counts)(*map(sum, zip(*fields, strict=True)))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays that determine the rows."""
        arrays = [a for rows in self.files for a in rows.arrays]
        if self.pattern is not None:
            arrays.append(np.asarray(self.pattern.weights))
        return tuple(arrays)

    def __len__(self) -> int:
        """Return the number of rows in all files."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return row `index`, counted through the files one after the other."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}: rows are counted from 0")
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.files[file][index - int(self._starts[file])]

    def empty(self) -> dict[str, np.ndarray]:
        """Return a row of padding, in which no target counts."""
        return self.files[0].empty()


def mix(files: Sequence[Rows], weights: Sequence[float] | None = None) -> Rows | Mixture:
    """Join the rows of several files into one order, for `batches` and `batches_once`.

        rows = mix([pack(chats, seq=1024), pack(code, seq=1024)], weights=[0.7, 0.3])

    Args:
      files: rows of each file, as `pack` returns them.
      weights: relative weight of each file: its share of the rows of training batches. A file whose
        rows are used up begins again, in another order. None: an epoch has each row of each file
        once.

    Returns:
      The rows; those of a single file itself.

    Raises:
      ValueError: there are no files, a weight is not positive or one is missing, or `seq` differs.
    """
    if not files:
        raise ValueError("files=[]: at least one is needed")
    if len(files) == 1 and weights is None:
        return files[0]
    return Mixture(files, weights)
