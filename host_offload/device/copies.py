"""Copy records between host buffers and device buffers, inside callbacks of a running program.

On a CPU both are host memory, and a record is copied directly. On a GPU a callback runs while the
program is being queued, and a copy on the program's own stream would not overlap with the program.
So each kind of record has a **slot** in device memory for each direction, and each GPU has two
streams for copies:

    up      disk -> buffer --up stream--> slot       once the record is read and the slot is free,
                                                     overlapped with the program
            slot --program's stream--> values        in the callback that fetches, at the speed of
                                                     device memory
    down    values --program's stream--> slot        in the callback that stores
            slot --down stream--> buffer -> disk     overlapped with what the program does next

    event           recorded after       waited for by
    up, full        the copy up          the program's stream, before it reads the slot; a thread,
                                         which gives the buffer back
    up, empty       the program's read   the up stream, before the next copy into the slot
    down, full      the program's write  the down stream, before it reads the slot
    down, empty     the copy down        the program's stream, before it fills the slot again
    down, saved     the copy down        a thread, before the buffer is written to disk

Alternatively a copy could be two callbacks of one loop body, a start and a wait, between which XLA
computes. Slots need no such places in the program: for every kind, copies up run ahead by a full
tick, copies down end after their tick, and no copy in flight uses a buffer of the program, which
XLA could copy or reuse. The price is one record of device memory per kind and direction.

A kind with a single record has nothing to overlap with. It has no slot, and is copied on the
program's stream, from and to page-locked memory. A record that was not read early enough is copied
in the same way. An event on that stream then shows when the buffer is free or filled.

No callback waits for the program. The number of buffers limits how far callbacks run ahead of the
GPU: a buffer that a copy still needs is not free, and a callback that finds no free buffer waits
for one, as it does for a slow disk.
"""

import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

LeafSpans = Sequence[tuple[int, int]]
"""(offset in a record, bytes) of each leaf."""


class Views(list[np.ndarray]):
    """The leaves of a record, in the memory of a buffer."""

    @functools.cached_property
    def address(self) -> int:
        """Address of the record, which must have leaves: the address of the first leaf."""
        return self[0].ctypes.data


class Copies(Protocol):
    """Copies records between buffers and devices.

    In all methods, `rank` is the device's position in the mesh.

    Attributes:
      lifts: whether copies to a device may run ahead of the program. If not, `lift` does nothing.
    """

    lifts: bool

    def add(
        self, kind: str, rank: int, num_bytes: int, leaves: LeafSpans, *, up: bool, down: bool
    ) -> None:
        """Create the slots of a kind on a device.

        Args:
          kind: name of the kind.
          rank: position of the device in the mesh.
          num_bytes: bytes per record.
          leaves: offset and bytes of each leaf in a record.
          up: whether to create a slot for copies to the device.
          down: whether to create a slot for copies from the device.
        """
        ...

    def remove(self, kind: str) -> None:
        """Free a kind's slots on all devices."""
        ...

    def lift(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        """Start to copy a buffer's record to its slot ("lift" it), if the slot is free."""
        ...

    def drop(self, kind: str, rank: int, buffer: np.ndarray) -> "Future[None] | None":
        """Forget that a buffer was lifted, and free its slot.

        Returns:
          A future that is done when the copy no longer reads the buffer; None if the buffer was
          not lifted.
        """
        ...

    def load(
        self, context: Any, kind: str, rank: int, views: Views, out: Sequence[Any]
    ) -> "Future[None] | None":
        """Copy a record's leaves to a callback's output buffers.

        The futures that `load` and `save` return wake the thread that completes them only when
        they are used for the first time. A callback leaves that to another thread.

        Args:
          context: the callback's context.
          kind: name of the kind.
          rank: position of the device in the mesh.
          views: leaves of the record.
          out: output buffers, one per leaf.

        Returns:
          A future that is done when `views` may be overwritten; None if they may be immediately.
        """
        ...

    def save(
        self, context: Any, kind: str, rank: int, values: Sequence[Any], views: Views
    ) -> "Future[None] | None":
        """Copy a callback's operands to a record's leaves.

        Args:
          context: the callback's context.
          kind: name of the kind.
          rank: position of the device in the mesh.
          values: buffers of the operands, one per leaf.
          views: leaves of the record.

        Returns:
          A future that is done when the copy has ended; None if it has ended already.
        """
        ...

    def pass_on(self, context: Any, rank: int | None, source: Any, out: Any) -> None:
        """Copy a token, i32[1], to the next token; `rank` is None if an error made it unknown."""
        ...

    def clear(self, context: Any, out: Sequence[Any]) -> None:
        """Fill a callback's buffers with zeros."""
        ...

    def close(self) -> None:
        """Wait for all copies, and free slots and threads."""
        ...


class HostCopies:
    """Copies records of CPU devices, whose buffers are host memory; nothing is lifted."""

    lifts = False

    def add(
        self, kind: str, rank: int, num_bytes: int, leaves: LeafSpans, *, up: bool, down: bool
    ) -> None:
        """Do nothing: CPU devices need no slots."""
        del kind, rank, num_bytes, leaves, up, down

    def remove(self, kind: str) -> None:
        """Do nothing: there are no slots."""
        del kind

    def lift(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        """Do nothing: copies to a CPU device do not run ahead."""
        del kind, rank, buffer

    def drop(self, kind: str, rank: int, buffer: np.ndarray) -> None:
        """Return None: no buffer was lifted."""
        del kind, rank, buffer

    def load(self, context: Any, kind: str, rank: int, views: Views, out: Sequence[Any]) -> None:
        """Copy a record's leaves to a callback's output buffers."""
        del context, kind, rank
        for target, value in zip(out, views, strict=True):
            np.copyto(np.asarray(target), value)

    def save(self, context: Any, kind: str, rank: int, values: Sequence[Any], views: Views) -> None:
        """Copy a callback's operands to a record's leaves."""
        del context, kind, rank
        for value, room in zip(values, views, strict=True):
            np.copyto(room, np.asarray(value))

    def pass_on(self, context: Any, rank: int | None, source: Any, out: Any) -> None:
        """Copy a token, i32[1], to the next token."""
        del context
        np.asarray(out)[...] = np.asarray(source)

    def clear(self, context: Any, out: Sequence[Any]) -> None:
        """Fill a callback's buffers with zeros."""
        del context
        for target in out:
            np.asarray(target)[...] = 0

    def close(self) -> None:
        """Do nothing: there are no copies in flight."""
        pass


def num_bytes(buffer: Any) -> int:
    """Return the number of bytes of a callback's buffer."""
    return math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize
