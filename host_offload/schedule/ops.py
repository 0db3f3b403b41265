"""A step as a list of operations: the one place where its order is written.

    phase    one pass over the layers of a stack: loops, one after the other
    loop     trips that do the same, each with the next layer
    op       one thing that a trip does with one record

What a step computes, moves and holds is read off this list: the compiled loops, the moves of the
disk, bytes in flight and over the link, seconds, tables and pictures.

An operation has a **verb** and runs in a **lane**, which does one thing after another:

    verb         lane      what it does
    fetch        up        loads a record for a later tick, or for this tick if nothing is read ahead
    load         up        loads a record for this tick, from host memory to the device
    store        down      stores a record, from the device to host memory
    store        host      stores a record that the host updated: it stays in host memory, and nothing crosses the link
    read         read      reads a record from the disk into a buffer in host memory, before `fetch` or `load`
    write        write     writes a record from a buffer in host memory to the disk, after `store`
    gather       network   makes a record whole on each device
    tiles        compute   runs a loop over the tiles of a group, `inner`, as part of the layer
    compute      compute   forward, or the derivative, for all microbatches
    reduce       network   reduces a gradient to shards
    update       compute   runs the optimizer on the device
    host_update  host      runs the optimizer on the host
    host_read    read      reads a record from the disk into the buffer where the host updates it
    host_write   write     writes a record from that buffer to the disk

Ticks number the trips of a phase. Tick t >= 0 computes the t-th layer that the phase visits; ticks
before 0 fill the ring, and ticks after the last layer store what is left. The **lag** of an
operation is the number of ticks by which it follows the tick that computes with its record: -2 for
a record that is fetched two ticks ahead, 1 for a record that is stored a tick late. A `host_update`
with a negative lag has no tick of its own: with a delayed update the host has updated since the
step began, and the tick waits until it is done with the record.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

KINDS = ("params", "frozen", "grads", "opt_state", "activations")
"""Kinds of records that rest somewhere from one step, or one phase, to the next."""
LANES: tuple[str, ...] = ("compute", "network", "up", "down", "read", "write", "host")
MOVES: tuple[str, ...] = ("up", "down", "read", "write")
"""Lanes in which records cross the link to host memory, or go to and from the disk."""
LAYERS = "layers"
"""`Record.leaves` of a layer's one record."""
EVERY_LEAF = "every_leaf"
"""`Record.leaves` of all parameters, where an optimizer updates them as one tree."""
HEAD, HEAD_PIECES, LATE_ENDS, END_PIECES = "head", "head_pieces", "late_ends", "end_pieces"
"""`Record.leaves` of leaves that are no stack of layers, where they are updated beside backward or
update.
"""


class Record(NamedTuple):
    """What an operation works on.

    Attributes:
      kind: one of KINDS, or "layer": what a tick computes; "gathered": a layer's parameters, whole
        on each device; "handed", "weights": the gradient and the float32 weights that an update on
        the host is given; "made": the parameters that an update on the host returns.
      leaves: LAYERS, the name of a group of tiles, or the name of unstacked leaves.
    """

    kind: str
    leaves: str = LAYERS


class Op(NamedTuple):
    """One operation of a trip.

    Attributes:
      verb: what is done.
      record: to what.
      number: of the record among those of its kind, in the first trip of the loop: the number of a
        layer or tile.
      lane: where.
      num_bytes: bytes of the record on one device, which cross the link or the disk, or which the
        device holds. 0 if the operation adds none, or if they are unknown.
      lag: ticks from the one that computes with the record to this one.
      inner: of "tiles", the `host_offload.schedule.Phase` over the tiles of one layer; else None.
    """

    verb: str
    record: Record
    number: int
    lane: str
    num_bytes: int = 0
    lag: int = 0
    inner: Any = None

    def moved(self, number: int) -> "Op":
        """Return the operation with a record so many further. A planner asks for very many."""
        verb, record, first, lane, num_bytes, lag, inner = self
        return tuple.__new__(Op, (verb, record, first + number, lane, num_bytes, lag, inner))


@dataclasses.dataclass(frozen=True)
class Loop:
    """Trips that do the same operations, each with the next layer.

    Attributes:
      start: tick of the first trip.
      trips: how many there are.
      step: what a trip adds to the number of each operation: 1 or -1.
      ops: of the first trip, in order.
    """

    start: int
    trips: int
    step: int
    ops: tuple[Op, ...]

    @property
    def stop(self) -> int:
        """The tick after the last trip."""
        return self.start + self.trips

    def at(self, tick: int) -> tuple[Op, ...]:
        """Return the operations of a tick."""
        moved = self.step * (tick - self.start)
        return tuple([op.moved(moved) for op in self.ops])

    def __iter__(self) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """Yield the number and the operations of each tick."""
        for tick in range(self.start, self.stop):
            yield tick, self.at(tick)


def joined(loops: Iterable[Loop]) -> tuple[Loop, ...]:
    """Return loops, of which those that go on where the one before them ends are one with it where
    their trips do the same.
    """
    found: list[Loop] = []
    for loop in loops:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.stop, last.step) == (loop.start, loop.step)
            and last.at(loop.start) == loop.ops
        ):
            found[-1] = dataclasses.replace(last, trips=last.trips + loop.trips)
        else:
            found.append(loop)
    return tuple(found)
