"""Records between host buffers and device buffers, inside callbacks of a running program.

On a CPU both are host memory, and a record is copied directly. On a GPU a callback runs while the
program is queued, and a copy on the program's own stream overlaps nothing. So each kind of record
has a **slot** in device memory for each direction, and a GPU has two streams of its own:

    up      disk -> buffer --up stream--> slot        as soon as the record is read and the slot is free, beside the program
            slot --program's stream--> values         in the callback that fetches, at the speed of device memory
    down    values --program's stream--> slot         in the callback that stores
            slot --down stream--> buffer -> disk      beside whatever the program does next

    event           recorded after       waited for by
    up, full        the copy up          the program's stream, before it reads the slot; a thread, which gives the buffer back
    up, empty       the program read     the up stream, before the next copy into the slot
    down, full      the program wrote    the down stream, before it reads the slot
    down, empty     the copy down        the program's stream, before it fills the slot again
    down, saved     the copy down        a thread, before the buffer is written to disk

A copy could also be two callbacks of one loop body, a start and a wait, between which XLA computes.
A slot needs no such place in the program: copies up run ahead by a whole tick, copies down end
after it, for every kind, and no buffer of the program is in flight where XLA may copy or reuse it.
The price is one record of device memory for each kind and direction.

A kind of a single record has nothing to be copied ahead of. It has no slot, and is copied on the
program's stream, from and to page-locked memory; so is a record that was not read early enough. An
event on that stream then tells when its buffer is free, or filled.

No callback waits for the program. What bounds how far it runs ahead of the GPU are the buffers: one
  that a copy still needs is
not free, and a callback that finds none waits for one, as it does for a slow disk.
"""

import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

Parts = Sequence[tuple[int, int]]
"""Where each leaf begins in a record, and how many bytes it has."""


class Views(list[np.ndarray]):
    """The leaves of a record, in the memory of a buffer."""

    @functools.cached_property
    def address(self) -> int:
        """Where the record starts, if it has leaves: the first lies there."""
        return self[0].ctypes.data


class Copies(Protocol):
    """How records cross between buffers and a device. `rank` is the device's position in the mesh.

    Attributes:
      lifts: whether copies toward a device may run ahead of the program. `lift` does nothing where
        they may not.
    """

    lifts: bool

    def add(
        self, kind: str, rank: int, num_bytes: int, parts: Parts, *, up: bool, down: bool
    ) -> None:
        """Make slots for a kind's records of `num_bytes`, in the wanted directions; `parts` are
        their leaves.
        """
        ...

    def remove(self, kind: str) -> None:
        """Free a kind's slots."""
        ...

    def lift(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        """Start to copy a buffer's record to its slot on the device ("lift" it), if the slot is
        free.
        """
        ...

    def drop(self, kind: str, rank: int, buffer: np.ndarray) -> "Future[None] | None":
        """Forget that a buffer was lifted; return a future of the end of the copy that reads it, or
        None if none does.
        """
        ...

    def load(
        self, context: Any, kind: str, rank: int, views: Views, out: Sequence[Any]
    ) -> "Future[None] | None":
        """Copy a record's leaves to a callback's buffers; return when `views` may be reused, or
        None if at once.

        A future of this or of `save` wakes the thread that completes it when it is first asked for
        anything, and not before: a callback leaves that to another thread.
        """
        ...

    def save(
        self, context: Any, kind: str, rank: int, values: Sequence[Any], views: Views
    ) -> "Future[None] | None":
        """Copy a callback's buffers to a record's leaves; return a future of the end of the copy,
        or None if it has ended.
        """
        ...

    def pass_on(self, context: Any, rank: int | None, source: Any, out: Any) -> None:
        """Copy a token, i32[1], to the next one; `rank` is None where an error hides it."""
        ...

    def clear(self, context: Any, out: Sequence[Any]) -> None:
        """Fill a callback's buffers with zeros."""
        ...

    def close(self) -> None:
        """Wait for all copies, and free slots and threads."""
        ...


class HostCopies:
    """Records of CPU devices, whose buffers are host memory: nothing is lifted."""

    lifts = False

    def add(
        self, kind: str, rank: int, num_bytes: int, parts: Parts, *, up: bool, down: bool
    ) -> None:
        del kind, rank, num_bytes, parts, up, down

    def remove(self, kind: str) -> None:
        del kind

    def lift(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        del kind, rank, buffer

    def drop(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        del kind, rank, buffer

    def load(self, context: Any, kind: str, rank: int, views: Views, out: Sequence[Any]) -> None:
        del context, kind, rank
        for target, value in zip(out, views, strict=True):
            np.copyto(np.asarray(target), value)

    def save(self, context: Any, kind: str, rank: int, values: Sequence[Any], views: Views) -> None:
        del context, kind, rank
        for value, room in zip(values, views, strict=True):
            np.copyto(room, np.asarray(value))

    def pass_on(self, context: Any, rank: int | None, source: Any, out: Any) -> None:
        del context
        np.asarray(out)[...] = np.asarray(source)

    def clear(self, context: Any, out: Sequence[Any]) -> None:
        del context
        for target in out:
            np.asarray(target)[...] = 0

    def close(self) -> None:
        pass


def num_bytes(buffer: Any) -> int:
    """Return the bytes of a callback's buffer."""
    return math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize
