"""A step as a list of operations: the only place that defines its order.

    phase    one pass over the layers of a stack: loops, one after the other
    loop     iterations with the same operations, each with the next layer
    op       one operation of an iteration, on one record

Everything that a step computes, moves and holds is derived from this list: the compiled loops, the
moves on disk, bytes in flight and over the host link, seconds, tables and pictures.

An operation has a **verb** and runs in a **lane**. A lane runs one operation after another:

    verb         lane      what it does
    fetch        up        loads a record for a later tick, or for this tick without prefetch
    load         up        loads a record for this tick, from host memory to the device
    store        down      stores a record, from the device to host memory
    store        host      stores a record that the host updated; nothing crosses the link
    read         read      reads a record from disk into a host buffer, before `fetch` or `load`
    write        write     writes a record from a host buffer to disk, after `store`
    gather       network   gathers a record on each device
    tiles        compute   runs a loop over the tiles of a group, `inner`, as part of the layer
    run          compute   runs a part of a pipeline's tick, `inner`: a chunk of layers, or the head
    send         network   sends a microbatch's activations to a neighboring stage of a pipeline
    exchange     network   divides a microbatch's activations over all stages, or collects them
    compute      compute   computes forward or the derivative, for all microbatches
    reduce       network   reduces a gradient to shards
    update       compute   runs the optimizer on the device
    host_update  host      runs the optimizer on the host
    host_read    read      reads a record from disk into the buffer in which the host updates it
    host_write   write     writes a record from that buffer to disk

Ticks number the iterations of a phase. Tick t >= 0 computes the t-th layer that the phase visits;
ticks before 0 fill the ring, and ticks after the last layer store the remaining records. The
**lag** of an operation is the number of ticks by which it follows the tick that computes with its
record: -2 for a record that is fetched two ticks ahead, 1 for a record that is stored one tick
late. A `host_update` with a negative lag has no tick of its own: with a delayed update, and with an
update in forward, the host has been updating since the step began, and the tick waits until the
host has finished the record.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

KINDS = ("params", "frozen", "grads", "opt_state", "activations")
"""Kinds of records that are stored from one step, or one phase, to the next."""
LANES: tuple[str, ...] = ("compute", "network", "up", "down", "read", "write", "host")
MOVES: tuple[str, ...] = ("up", "down", "read", "write")
"""Lanes in which records cross the host link, or move to or from the disk."""
LAYERS = "layers"
"""`Record.leaves` of a layer's record."""
EVERY_LEAF = "every_leaf"
"""`Record.leaves` of all parameters, if the optimizer updates them as one tree."""
HEAD = "head"
HEAD_PIECES = "head_pieces"
LATE_UNSTACKED = "late_unstacked"
UNSTACKED_PIECES = "unstacked_pieces"
"""`Record.leaves` of unstacked leaves that are updated during backward or update."""

ON_DISK = "_on_disk"
"""Suffix of the names of on-disk record sizes, which include padding: "params_on_disk"."""


class Record(NamedTuple):
    """The data that an operation works on.

    Attributes:
      kind: one of KINDS, or "layer": a tick's computation; "gathered": a layer's gathered
        parameters; "handed" and "weights": the gradient and the float32 weights that are sent to an
        update on the host; "made": the parameters that an update on the host returns. In a
        pipeline "x", "y", "dx" and "dy" are the activations and cotangents between stages.
      leaves: LAYERS, the name of a group of tiles, or the name of unstacked leaves.
    """

    kind: str
    leaves: str = LAYERS


class Op(NamedTuple):
    """One operation of a loop's iteration.

    Attributes:
      verb: name of the operation.
      record: record that it works on.
      number: index of the record among the records of its kind (of a layer or tile), in the loop's
        first iteration.
      lane: lane in which it runs.
      num_bytes: bytes of the record per device that cross the host link or move to or from the
        disk, or that the device holds. 0 if the operation adds none, or if they are unknown.
      lag: ticks from the tick that computes with the record to this operation.
      inner: for "tiles", the `host_offload.schedule.Phase` over the tiles of one layer; for "run",
        over the layers of a chunk; else None.
    """

    verb: str
    record: Record
    number: int
    lane: str
    num_bytes: int = 0
    lag: int = 0
    inner: Any = None

    def moved(self, number: int) -> "Op":
        """Return the operation on the record `number` further.

        It avoids the overhead of `_replace`, because a planner calls it very often.
        """
        verb, record, first, lane, num_bytes, lag, inner = self
        return tuple.__new__(Op, (verb, record, first + number, lane, num_bytes, lag, inner))


def size_in_lane(lane: str, kind: str, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a record in a lane; a record may have another size on disk.

    Args:
      lane: lane in which the record moves.
      kind: kind of the record.
      sizes: bytes by kind, and by "<kind>_on_disk" if a record has another size on disk.
    """
    size = sizes.get(kind, 0)
    if lane in ("read", "write"):
        return sizes.get(kind + ON_DISK, size)
    return size


class HostUpdate(NamedTuple):
    """How callbacks update records on the host.

    Attributes:
      stashes: whether gradients wait on the host, from the tick of backward that computes them.
      is_delayed: whether gradients wait for the next step; backward then loads the parameters that
        the previous step's gradients produced.
      takes_weights: whether the weights on the device are their own masters, and are stored
        together with the gradients.
      gives_params: whether new parameters are loaded to the device.
      in_forward: whether gradients wait for the next step, whose forward loads the parameters that
        they produced.
    """

    stashes: bool = False
    is_delayed: bool = False
    takes_weights: bool = False
    gives_params: bool = True
    in_forward: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """Iterations with the same operations, each with the next layer.

    Attributes:
      start: tick of the first iteration.
      trips: number of iterations.
      step: change of each operation's number per iteration: 1 or -1.
      ops: operations of the first iteration, in order.
    """

    start: int
    trips: int
    step: int
    ops: tuple[Op, ...]

    @property
    def stop(self) -> int:
        """The tick after the last iteration."""
        return self.start + self.trips

    def ops_at(self, tick: int) -> tuple[Op, ...]:
        """Return the operations of a tick, in order."""
        distance = self.step * (tick - self.start)
        return tuple([op.moved(distance) for op in self.ops])

    def __iter__(self) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """Yield the number and the operations of each tick."""
        for tick in range(self.start, self.stop):
            yield tick, self.ops_at(tick)


def merge_loops(loops: Iterable[Loop]) -> tuple[Loop, ...]:
    """Return the loops, merging each with its successor if that continues its operations."""
    merged: list[Loop] = []
    for loop in loops:
        if merged and _continues(merged[-1], loop):
            last = merged[-1]
            merged[-1] = dataclasses.replace(last, trips=last.trips + loop.trips)
        else:
            merged.append(loop)
    return tuple(merged)


def _continues(first: Loop, second: Loop) -> bool:
    """Return whether more iterations of the first loop would do what the second loop does."""
    if (first.stop, first.step) != (second.start, second.step):
        return False
    return first.ops_at(second.start) == second.ops
