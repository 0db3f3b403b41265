"""One pass of a train step over its layers: its operations, its arrays, and its bytes.

A `Phase` is stored as loops of operations (`host_offload.schedule.ops`). The compiled step reads
them as arrays with one element per tick (`layer`, `consume`, `fetch`, `store`, ...), which
`host_offload.schedule.schedule` explains. Tables and estimates read bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from host_offload.schedule.ops import (
    HEAD,
    HEAD_PIECES,
    KINDS,
    LATE_UNSTACKED,
    LAYERS,
    MOVES,
    UNSTACKED_PIECES,
    Loop,
    Op,
    Record,
)

UNSTACKED_NAMES = {
    HEAD: "head",
    HEAD_PIECES: "pieces of the head",
    LATE_UNSTACKED: "embedding and head",
    UNSTACKED_PIECES: "pieces of larger leaves",
}
"""Names of unstacked leaves that are updated during a phase, by `Record.leaves`."""
CALLBACK_MOVES = {
    "handed": "gradients down",
    "weights": "float32 weights down",
    "made": "new parameters up",
}
"""What callbacks move over the link, by `Record.kind`."""
_HOLD = frozenset({"fetch", "load", "gather", "compute", "reduce", "update", "send", "exchange"})
"""Verbs of operations whose bytes are on the device during their tick."""
_MAIN = frozenset({"compute", "run", "update", "host_update"})


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Phase:
    """One pass of a train step over T layers, one per tick.

    Arrays are int32 and read-only; -1 means none.

    Attributes:
      name: "forward", "backward" or "update"; "<stack>/<name>" if there are several stacks.
      loops: operations, in order (`host_offload.schedule.ops`).
      device_layers: number of the first layer whose opt_state is in its tier; the opt_state of
        lower layers is on the device.
      first_layer: number of the lowest layer, from which records of activations are counted.
      leaves: operations that update leaf by leaf during the phase, if the optimizer does not update
        layer by layer; else None.
    """

    name: str
    loops: tuple[Loop, ...]
    device_layers: int = 0
    first_layer: int = 0
    leaves: "Phase | None" = None

    def ticks(self) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """Yield the number and operations of each tick, before, in and after the main loops."""
        for loop in self.loops:
            yield from loop

    @functools.cached_property
    def main(self) -> tuple[Loop, ...]:
        """The loops whose ticks compute or update a layer."""
        loops = [loop for loop in self.loops if loop.start >= 0]
        return tuple(loop for loop in loops if any(is_main(op) for op in loop.ops))

    def _kinds(self, *verbs: str) -> tuple[str, ...]:
        kinds: dict[str, None] = {}
        for loop in self.loops:
            for op in loop.ops:
                record = op.record
                if op.verb in verbs and record.leaves == LAYERS and record.kind in KINDS:
                    kinds[record.kind] = None
        return tuple(kinds)

    @functools.cached_property
    def fetches(self) -> tuple[str, ...]:
        """Kinds read ahead; a ring slot holds one record of each."""
        return self._kinds("fetch")

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """Kinds read in the tick that uses them."""
        return self._kinds("load")

    @functools.cached_property
    def writes(self) -> tuple[str, ...]:
        """Kinds written."""
        return self._kinds("store")

    def _column(self, wanted: Callable[[Op], bool]) -> np.ndarray:
        """Return the record number of the wanted operation per main tick: int32[T], -1 if none."""
        columns: list[np.ndarray] = [np.zeros(0, np.int32)]
        for loop in self.main:
            numbers = (op.number for op in loop.ops if op.record.leaves == LAYERS and wanted(op))
            first = next(numbers, None)
            if first is None:
                columns.append(np.full(loop.trips, -1))
            else:
                columns.append(first + loop.step * np.arange(loop.trips))
        return int32(np.concatenate(columns))

    @functools.cached_property
    def first_loops(self) -> list[Loop]:
        """The loop that fetches and gathers tick 0's layer before tick 0, if any."""
        return [loop for loop in self.loops if loop.stop <= 0 and any(map(_is_gather, loop.ops))]

    @functools.cached_property
    def _preloads(self) -> list[Loop]:
        """The loops that fill the ring."""
        return [loop for loop in self.loops if loop.stop <= 0 and loop not in self.first_loops]

    @functools.cached_property
    def _after(self) -> list[Loop]:
        """The loops after the last layer."""
        return [loop for loop in self.loops if self.main and loop.start >= self.main[-1].stop]

    @functools.cached_property
    def layer(self) -> np.ndarray:
        """int32[T], the layer that each tick computes or updates."""
        if any(_is_compute(op) for loop in self.main for op in loop.ops):
            # A tick of forward may also update the layer that it gathers ahead.
            return self._column(_is_compute)
        return self._column(is_main)

    @functools.cached_property
    def consume(self) -> np.ndarray:
        """int32[T], the layer whose record each tick takes.

        The record is taken from the ring if there is one. Forward and backward gather it.
        """
        return self._column(_is_gather) if self._gathers else self.layer

    @functools.cached_property
    def _gathers(self) -> bool:
        return any(_is_gather(op) for loop in self.loops for op in loop.ops)

    @functools.cached_property
    def fetch(self) -> np.ndarray:
        """int32[T], the layer whose `fetches` start to move to the device."""
        return self._column(lambda op: op.verb == "fetch")

    @functools.cached_property
    def store(self) -> np.ndarray:
        """int32[T], the layer whose `writes` are written."""
        return self._column(lambda op: op.verb == "store" and op.record.kind in KINDS)

    @functools.cached_property
    def first(self) -> int:
        """The layer fetched and taken before tick 0, outside the ring (gather_ahead), else -1."""
        return next((op.number for loop in self.first_loops for op in loop.ops), -1)

    @functools.cached_property
    def preload(self) -> np.ndarray:
        """int32[n], layers fetched before tick 0, each into the next slot of the ring.

        It is empty if the phase has no ring.
        """
        return int32(_list_numbers(self._preloads, lambda op: op.verb == "fetch"))

    @functools.cached_property
    def use_slot(self) -> np.ndarray:
        """int32[T], the ring slot that each tick takes from; -1 if it uses no slot."""
        num_slots = len(self.preload)
        num_ticks = len(self.layer)
        if not num_slots:
            return int32(np.full(num_ticks, -1))
        num_takes = num_slots + int((self.fetch >= 0).sum())
        takes = np.arange(num_ticks) - self.first_take
        return int32(np.where((takes >= 0) & (takes < num_takes), takes % num_slots, -1))

    @functools.cached_property
    def first_take(self) -> int:
        """The first tick that takes a record out of the ring; 0 if the phase has no ring.

        Earlier ticks visit layers whose opt_state is on the device, in a phase that fetches nothing
        else.
        """
        if not len(self.preload):
            return 0
        return int(np.argmax(self.consume == self.preload[0]))

    @functools.cached_property
    def fetch_slot(self) -> np.ndarray:
        """int32[T], the ring slot that `fetch` fills, after the take in the same tick."""
        return int32(np.where(self.fetch >= 0, self.use_slot, -1))

    @functools.cached_property
    def drain(self) -> np.ndarray:
        """int32[n], layers whose `writes` are written after the last tick.

        Their number is the number of ticks by which stores are late.
        """
        return int32(_list_numbers(self._after, _is_late_store))

    @property
    def stores_late(self) -> int:
        """The number of ticks between a record's update and its store."""
        lags = [0]
        for loop in self._after:
            lags += [op.lag for op in loop.ops if _is_late_store(op)]
        return max(lags)

    def list_ticks(self, leaves: str, verb: str) -> list[int]:
        """Return the ticks in which unstacked leaves are loaded, updated or stored.

        Args:
          leaves: name of the leaves in `Record.leaves`.
          verb: "load", "update" or "store".
        """
        ticks: dict[int, None] = {}
        for tick, ops in self.ticks():
            if any((op.record.leaves, op.verb) == (leaves, verb) for op in ops):
                ticks[tick] = None
        return list(ticks)

    def off_device(self, kinds: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Return the kinds that are off the device for a layer: all, or all but opt_state.

        Args:
          kinds: kinds of records, such as "params" and "opt_state".
          layer: index of the layer, counted from 0.
        """
        if layer >= self.device_layers:
            return kinds
        return tuple(kind for kind in kinds if kind != "opt_state")

    def list_fetches(self, tick: int) -> tuple[str, ...]:
        """Return the `fetches` that are off the device for the layer of a tick.

        These are all kinds, or all but opt_state.

        Args:
          tick: index of the tick, counted from 0 for the first layer that is computed.
        """
        return self.off_device(self.fetches, int(self.layer[tick]))

    # --- bytes ------------------------------------------------------------------------------------

    def moved(self, *lanes: str, called: bool | None = None) -> int:
        """Return the bytes per device that cross some lanes, including inner loops.

        Args:
          *lanes: "up" (host memory to device), "down" (device to host memory), "read" (from disk)
            or "write" (to disk).
          called: True counts only bytes that callbacks move, False only the remaining bytes, None
            all bytes.

        Raises:
          ValueError: no lane is given, or records never move in a given lane.
        """
        if not lanes or any(lane not in MOVES for lane in lanes):
            known = ", ".join(map(repr, MOVES))
            wrong = ", ".join(map(repr, lanes))
            raise ValueError(f"moved({wrong}): give one or more of the lanes {known}")
        if called not in (None, True, False):
            raise ValueError(f"called={called!r}: True, False or None is needed")
        total = 0
        for loop in self.loops:
            on_disk = {op.record: op.num_bytes for op in loop.ops if op.verb in ("read", "write")}
            for op in loop.ops:
                if op.inner is not None:
                    total += loop.trips * op.inner.moved(*lanes, called=called)
                elif op.lane in lanes:
                    # Callbacks move records on disk, and what a host update hands over.
                    by_callbacks = min(op.num_bytes, on_disk.get(op.record, 0))
                    if op.record.kind in CALLBACK_MOVES:
                        by_callbacks = op.num_bytes
                    counted = {
                        None: op.num_bytes,
                        True: by_callbacks,
                        False: op.num_bytes - by_callbacks,
                    }
                    total += loop.trips * counted[called]
        return total

    def in_flight(self) -> np.ndarray:
        """Return the bytes in flight per device in ticks 0 .. T-1: int64[T].

        `Schedule.in_flight` lists the counted bytes.
        """
        return np.concatenate(
            [np.full(loop.trips, self._bytes(loop), np.int64) for loop in self.main]
        )

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device in any tick, including ticks after the last layer."""
        return max(self.layers_peak_bytes, self.drain_peak_bytes)

    @property
    def layers_peak_bytes(self) -> int:
        """The most bytes in flight per device in a tick that computes or updates a layer."""
        return max((self._bytes(loop) for loop in self.main), default=0)

    @property
    def drain_peak_bytes(self) -> int:
        """The most bytes in flight per device in a tick after the last layer.

        These ticks store records, or update embedding and head.
        """
        return max((self._bytes(loop) for loop in self._after), default=0)

    @functools.cached_property
    def _bytes_in_every_tick(self) -> int:
        """Bytes that every tick holds: the ring, and space for records that are stored late."""
        # All slots are alike: each has space for all kinds, even if a layer lacks one.
        slot: dict[Record, int] = {}
        for loop in self.loops:
            slot |= {op.record: op.num_bytes for op in loop.ops if op.verb == "fetch"}
        stored_late = 0
        for loop in self._after:
            late_bytes = sum(op.num_bytes for op in loop.ops if _is_late_store(op))
            stored_late += loop.trips * late_bytes
        return len(self.preload) * sum(slot.values()) + stored_late

    def _bytes(self, loop: Loop) -> int:
        """Return the bytes of one tick of a loop.

        They are the records that it loads, gathers and computes, and the records that wait for a
        later tick.
        """
        inner = max((op.inner.peak_bytes for op in loop.ops if op.inner is not None), default=0)
        # A record that a tick gathers twice, for forward and for the derivative, counts once.
        records = dict[tuple[str, Record, int], int]()
        for op in loop.ops:
            if op.verb in _HOLD or _adds_bytes(op, loop):
                records[op.verb, op.record, op.number] = op.num_bytes
        return self._bytes_in_every_tick + inner + sum(records.values())


def is_main(op: Op) -> bool:
    """Return whether an operation computes or updates its tick's own layer or leaf."""
    return op.verb in _MAIN and op.record.leaves not in UNSTACKED_NAMES


def _is_compute(op: Op) -> bool:
    return op.verb == "compute" and is_main(op)


def _is_gather(op: Op) -> bool:
    return op.verb == "gather" and op.record.kind == "gathered"


def _is_late_store(op: Op) -> bool:
    return op.verb == "store" and op.lag > 0 and op.record.leaves == LAYERS


def _adds_bytes(op: Op, loop: Loop) -> bool:
    """Return whether the device holds a stored record in addition to the tick's own results."""
    record = op.record
    if record.kind == "handed":
        # For a layer, a slice of the stacked gradients, unless backward has just reduced it.
        has_reduced = any(loop_op.verb == "reduce" for loop_op in loop.ops)
        return record.leaves == LAYERS and not has_reduced
    is_late = op.verb == "store" and op.lag > 0
    return record.kind == "weights" or (is_late and record.leaves != LAYERS)


def _list_numbers(loops: Iterable[Loop], wanted: Callable[[Op], bool]) -> list[int]:
    """Return the record numbers of the wanted operations, in order and without duplicates."""
    numbers: dict[int, None] = {}
    for loop in loops:
        for _, ops in loop:
            numbers |= {op.number: None for op in ops if wanted(op)}
    return list(numbers)


def int32(values: ArrayLike) -> np.ndarray:
    """Return a read-only int32 array."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array
