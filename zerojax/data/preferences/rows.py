"""Pairs of sequences packed into rows: both sequences of a pair are in the same row.

    tokens       c0 c1 c2 r0 r1 0          pair 1: c0 .. c3 (chosen) and r0 .. r2 (rejected)
    targets      -1 c2 c3 -1 r2 -1
    segment_ids   1  1  1  2  2 0          2 p - 1 and 2 p are pair p
    positions     0  1  2  0  1 0
    labels        1                        one per pair that a row has room for; 0: none
    reference     l1 l2                    log-probability of each sequence under the reference

A pair is then never split over devices, microbatches or pipeline stages, and short pairs fill a row
together. Rows are packed by best-fit decreasing, as in `zerojax.data.packing`. For a reward, which
is read at a sequence's last token, that token is in the row too (`with_last`).
"""

import hashlib
import logging
from typing import Any, get_args

import numpy as np

from zerojax.data.packing import Counts, Rows, TooLong, best_fit
from zerojax.data.preferences.records import Preferences
from zerojax.user_values import whole_number

logger = logging.getLogger("zerojax.data")


class PairRows(Rows):
    """Rows of packed pairs, built on access; `zerojax.data.batches` takes them.

    `rows[r]` is a dict of i32[seq] `tokens`, `targets`, `segment_ids` and `positions`, of `labels`,
    i32[P], and with a reference of `reference`, f32[2 P].

    Attributes:
      pairs: packed pairs.
      seq: positions per row.
      examples: their sequences.
      order: i64[E], indices of pairs, row by row.
      starts: i64[R + 1], row r holds the pairs order[starts[r] : starts[r + 1]].
      counts: statistics of packing; `counts.examples` counts sequences.
      most: i64[E], maximum number of tokens that are kept of each pair's sequences.
      with_last: whether the last token of a sequence has a position.
      reference: f32[E, 2], log-probability of each sequence under the reference; or None.
    """

    def __init__(
        self,
        pairs: Preferences,
        seq: int,
        order: np.ndarray,
        starts: np.ndarray,
        counts: Counts,
        most: np.ndarray,
        with_last: bool,
        reference: np.ndarray | None = None,
    ) -> None:
        """Take what `pack_pairs` computes; the attributes have the same names."""
        super().__init__(pairs.examples, seq, order, starts, counts)
        self.pairs = pairs
        self.most = most
        self.with_last = with_last
        self.reference = reference

    @property
    def room(self) -> int:
        """P, the largest number of pairs in a row."""
        return int(np.diff(self.starts).max())

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays that determine the rows, except for the reference."""
        return (*super().arrays, self.pairs.labels, self.most)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Build row `index` from the tokens of its pairs."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}: rows are counted from 0")
        out = self.empty()
        position = 0
        for slot, pair in enumerate(self.members(index)):
            out["labels"][slot] = self.pairs.labels[pair]
            if self.reference is not None:
                out["reference"][2 * slot : 2 * slot + 2] = self.reference[pair]
            for side in (0, 1):
                position = self._write(out, position, int(pair), side, 2 * slot + side + 1)
        return out

    def _write(
        self, out: dict[str, np.ndarray], position: int, pair: int, side: int, segment: int
    ) -> int:
        """Write a sequence of a pair from `position` on; return the position after it."""
        begin, end = self.examples.starts[2 * pair + side : 2 * pair + side + 2]
        end = min(end, begin + self.most[pair])
        tokens = self.examples.tokens[begin:end]
        counted = self.examples.counted[begin:end]
        # The last token is predicted; only a reward also reads the activation at it.
        length = len(tokens) - (not self.with_last)
        place = slice(position, position + length)
        targets = np.full(length, -1, np.int32)
        targets[: len(tokens) - 1] = np.where(counted[1:], tokens[1:], -1)
        out["tokens"][place] = tokens[:length]
        out["targets"][place] = targets
        out["segment_ids"][place] = segment
        out["positions"][place] = np.arange(length)
        return position + length

    def empty(self) -> dict[str, np.ndarray]:
        """Return a row of padding, without a pair."""
        out = super().empty()
        out["labels"] = np.zeros(self.room, np.int32)
        if self.reference is not None:
            out["reference"] = np.zeros(2 * self.room, np.float32)
        return out

    def with_reference(self, reference: np.ndarray) -> "PairRows":
        """Return these rows with the log-probabilities of their sequences under a reference.

        Args:
          reference: f32[E, 2], as `zerojax.preferences.reference_log_probs` returns it.

        Raises:
          ValueError: it has another shape.
        """
        reference = np.asarray(reference, np.float32)
        if reference.shape != (len(self.pairs), 2):
            raise ValueError(
                f"reference has shape {list(reference.shape)}: [{len(self.pairs)}, 2] is needed, "
                "the log-probabilities of both sequences of each pair"
            )
        return PairRows(
            self.pairs,
            self.seq,
            self.order,
            self.starts,
            self.counts,
            self.most,
            self.with_last,
            reference,
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 of the sequences, which a reference's log-probabilities belong to.

        It does not depend on the packing, except where sequences are truncated.
        """
        digest = hashlib.sha256()
        kept = np.minimum(self.examples.lengths, np.repeat(self.most, 2))
        for a in (self.examples.tokens, self.examples.counted, self.examples.starts, kept):
            digest.update(np.ascontiguousarray(a).data)
        return digest.hexdigest()


def pack_pairs(
    pairs: Preferences, seq: int, *, too_long: TooLong = "refuse", with_last: bool = False
) -> PairRows:
    """Pack pairs into rows by best-fit decreasing.

    Args:
      pairs: pairs, as `read_preferences` returns them; single answers with labels are paired first
        (`Preferences.with_mismatches`).
      seq: positions per row. A pair of n and m tokens takes n + m - 2, or n + m if `with_last`.
      too_long: treatment of pairs that take more than `seq`: "refuse" raises an error, "truncate"
        cuts the ends of the longer sequence, or of both to equal lengths, "drop" leaves pairs out.
      with_last: whether a sequence's last token has a position, as a reward needs.

    Returns:
      The packed rows.

    Raises:
      ValueError: the answers are single, a pair is too long, or truncation leaves an answer without
        a counted token (the error names its place), or no pair is left.
    """
    if too_long not in get_args(TooLong):
        raise ValueError(
            f"too_long={too_long!r} is unknown: choose from {', '.join(get_args(TooLong))}"
        )
    if not pairs.is_paired:
        raise ValueError(
            "these are single answers with labels: use with_mismatches() for kto, which pairs each "
            "with another example's answer"
        )
    seq = whole_number("seq", seq, 2)
    taken = pairs.examples.lengths.reshape(-1, 2) - (not with_last)  # positions of each sequence
    is_long = taken.sum(1) > seq
    num_long = int(is_long.sum())
    if num_long and too_long == "refuse":
        raise _too_long_error(pairs, taken, int(np.argmax(is_long)), num_long, seq)
    chosen = np.flatnonzero(~is_long) if too_long == "drop" else np.arange(len(pairs))
    if not len(chosen):
        raise ValueError(
            f"all {len(pairs)} pairs take more than seq={seq} positions: use a longer seq"
        )
    # The longer sequence of a long pair is cut, or both to half a row.
    limit = np.maximum(seq - taken.min(1), seq // 2)
    limit = np.where(is_long, limit, taken.max(1))
    kept = np.minimum(taken, limit[:, None])
    most = limit + (not with_last)
    counted = _check_counted(pairs, chosen, most)
    order, starts = best_fit(kept[chosen].sum(1), seq)
    counts = Counts(
        examples=2 * len(chosen),
        rows=len(starts) - 1,
        positions=int(kept[chosen].sum()),
        counted=counted,
        truncated=int((taken > limit[:, None])[chosen].sum()),
        cut_tokens=int((taken - kept)[chosen].sum()),
        dropped=2 * (len(pairs) - len(chosen)),
    )
    logger.info("packed pairs into rows of %d: %s", seq, counts)
    return PairRows(pairs, seq, chosen[order], starts, counts, most, with_last)


def _check_counted(pairs: Preferences, chosen: np.ndarray, most: np.ndarray) -> int:
    """Return the number of counted targets of the chosen pairs.

    Raises:
      ValueError: an answer has none left; the error names its place.
    """
    total = 0
    examples = pairs.examples
    for i in chosen.tolist():
        for side in (2 * i, 2 * i + 1):
            begin, end = examples.starts[side : side + 2]
            counted = int(examples.counted[begin + 1 : min(end, begin + most[i])].sum())
            if not counted:
                raise ValueError(
                    f"{examples.place(side)}: of {end - begin} tokens only the first {most[i]} are "
                    "kept, and none of them counts in the loss: use a longer seq, or "
                    "too_long='drop'"
                )
            total += counted
    return total


def _too_long_error(
    pairs: Preferences, taken: Any, first: int, num_long: int, seq: int
) -> ValueError:
    """Return the error for pairs that do not fit a row, of which `first` is the first."""
    n, m = taken[first].tolist()
    return ValueError(
        f"{pairs.examples.place(2 * first)}: the pair takes {n} + {m} positions, but a row has "
        f"seq={seq} for both sequences; {num_long} of {len(pairs)} pairs are too long, and the "
        f"longest takes {int(taken.sum(1).max())}: use a longer seq, or too_long='truncate', or "
        "too_long='drop'"
    )
