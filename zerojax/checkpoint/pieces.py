"""Shards of leaves on their way to disk, and the bound on the host memory of their copies.

A `Piece` is one leaf's shard on one device. `copied` packs a run of layers of several pieces into records in host memory.
`Room` counts the bytes of such copies until they are written, and makes the copying thread wait where there are too many.
"""

import dataclasses
import math
import threading
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from host_offload.device import allocate
from host_offload.disk import RecordFormat
from zerojax.checkpoint.leaves import StateLeaf


@dataclasses.dataclass(frozen=True)
class Piece:
    """One leaf's shard on one device.

    Attributes:
      leaf: of the state.
      data: [records.., *shape], on the device or in its host memory.
      start: of the shard, in the dims after those that number records.
    """

    leaf: StateLeaf
    data: jax.Array
    start: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """What one record holds."""
        return tuple(self.data.shape[self.leaf.lead :])


class Room:
    """Host memory for copies that are not written yet.

    Attributes:
      most: bytes that they may take together; None: any. What is larger than that alone is let through alone.
    """

    def __init__(self, most: int | None) -> None:
        self.most, self._used, self._peak = most, 0, 0
        self._changed = threading.Condition()

    @property
    def peak(self) -> int:
        """Most bytes at one time."""
        return self._peak

    def take(self, num_bytes: int) -> None:
        """Wait until there is room, and take it."""
        with self._changed:
            # With nothing in use a piece of any size goes through, else one above the bound would wait for ever.
            self._changed.wait_for(lambda: self.most is None or not self._used or self._used + num_bytes <= self.most)
            self._used += num_bytes
            self._peak = max(self._peak, self._used)

    def give(self, num_bytes: int) -> None:
        """Give back what was taken, in any thread."""
        with self._changed:
            self._used -= num_bytes
            self._changed.notify_all()


def copied(pieces: Sequence[Piece], low: int, high: int, form: RecordFormat) -> np.ndarray:
    """Return the records of layers low .. high, uint8[n, padded_bytes], in memory of their own, which no device writes to."""
    leaves = [on_host(piece, low, high) for piece in pieces]
    count = len(leaves[0])
    records = allocate(count * form.padded_bytes).reshape(count, form.padded_bytes)  # zeros between the leaves
    for number, record in enumerate(records):
        for view, values in zip(form.views(record), leaves, strict=True):
            np.copyto(view, values[number])
    return records


def on_host(piece: Piece, low: int, high: int) -> np.ndarray:
    """Return layers low .. high of a shard, [records, *shape]. Read it at once: on a CPU it is a view of device memory."""
    data, lead = piece.data, piece.leaf.lead
    count = (high - low) * math.prod(data.shape[1:lead])
    if lead and (low, high) != (0, data.shape[0]):
        # In numpy the slice is a view. By JAX it would be a second copy in host memory.
        if is_host_memory(data):
            return np.asarray(data)[low:high].reshape(count, *piece.shape)
        (device,) = data.devices()
        # The slice is a program of its own, on the one device that holds this shard and not on the mesh in scope.
        with jax.set_mesh(Mesh(np.array([device]), ("alone",))):
            data = data[low:high]
    return np.asarray(data).reshape(count, *piece.shape)


def is_host_memory(data: jax.Array) -> bool:
    """Tell whether an array of one device is in memory that numpy reads where it is."""
    return next(iter(data.devices())).platform == "cpu"
