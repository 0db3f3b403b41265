"""Which layer is fetched, taken, computed and stored at each tick of a train step: phases and their
tables, as data.

A step over L equal layers is two or three passes, its **phases**, of L **ticks** each. One tick
computes one layer. Where they are a part of a stack, layers have the numbers that they have in the
stack, from `first_layer` on; here that is 0:

    forward   0 .. L-1   the layer's output from its input
    backward  L-1 .. 0   its gradients, the layer being computed again
    update    0 .. L-1   its parameters, once all gradients are known (they may have to be scaled by their norm)

With update="in_backward" a backward tick also updates its layer and there is no third phase.

Records (the params, frozen params, grads, opt_state or activations of one layer) whose tier is not
"device" move while the step runs. `host_offload.schedule.build` writes each phase as a list of
operations (`host_offload.schedule.ops`), which the compiled step follows, so an order is data and
not code. Tick t of a loop does, in this order:

    take     consume[t], out of ring slot use_slot[t]; forward and backward gather it: W[D_fsdp, F] -> W[D, F]
    fetch    fetch[t], which lands in fetch_slot[t]: that slot has just been emptied, so use_slot[t] = fetch_slot[t]
    compute  layer[t], on what was taken
    store    store[t] = layer[t], what this tick computed

The **ring** has `distance` = d slots. Take number c empties slot c mod d, and the fetch of the same
tick refills that slot with the record of take c + d. So a record is taken exactly d ticks after its
fetch, which can hide behind the computation of d ticks, and nothing in a slot is overwritten before
it is taken. The first d records are fetched before tick 0 (`preload`), the last d takes fetch
nothing, and a loop leaves its ring empty. With fewer takes than d all are preloaded. With d = 0
there is no ring: fetch[t] is what tick t itself takes, and waits for.

Without `gather_ahead` a tick takes the layer that it computes: consume = layer, one layer is whole
at a time, and its gather is waited for. With `gather_ahead` tick t takes and gathers layer[t+1]
while it computes layer[t]: two layers are whole, `first` = layer[0] is taken before tick 0, and the
last tick takes nothing.

Dependencies: a computation waits for its take, a take for the fetch of d ticks ago, a fetch for the
take from its slot. A fetch waits for no store of its own loop: a loop reads a record before it
writes it, and reads no record that it has written. What an earlier loop wrote is complete before a
later one begins.

    phase     reads ahead (`fetches`)       reads in the tick (`reads`)   writes (`writes`)
    forward   params, frozen                                              activations
    backward  params, frozen, activations                                 grads
      or      params, frozen, activations   opt_state                     opt_state, params (update in backward)
    update    grads, opt_state, params*                                   opt_state, params

Only kinds off the device count. params*: where parameters have no float32 masters beside them, they
are themselves what is updated. The optimizer state of layers 0 .. device_layers-1 may stay on the
device (a fractional offload): the update phase visits these layers last, and fetches nothing for
them unless another kind is off the device. In backward the optimizer state is read in the tick that
uses it: that copy hides behind the tick's own derivative, and so takes no slot.

**Late stores.** What is updated may be stored some ticks later: with a lag of 1, tick t stores what
tick t - 1 updated, store[t] = layer[t-1], in the other direction than its loads, and in backward
beside its own products. The first tick then stores nothing, and the record of the last one is
stored after the loop (`drain`). Such an update phase has no ring: a tick loads the record that it
updates.

**Ends.** Leaves that are no stack of layers are updated beside such a phase. What only the head
uses has its gradient before backward, in whose first tick nothing else is stored: it is loaded
before the loop, and stored in that tick. Of those that are larger than a record each of the first
ticks loads and updates a piece, which the next tick stores. The others have their gradients after
the last tick: they are loaded while its record is drained, in groups, of which each is stored while
the next one is loaded. Those that are larger than a record come after that, in pieces: one is
stored while the next one is loaded.

An update on the host stores gradients, and loads new parameters, by callbacks in the ticks that
make them.

All ticks count the same here. A schedule bounds layers and bytes; seconds have to be measured.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from host_offload.schedule.ops import (
    END_PIECES,
    HEAD,
    HEAD_PIECES,
    KINDS,
    LATE_ENDS,
    LAYERS,
    MOVES,
    Loop,
    Op,
)
from host_offload.schedule.timeline import Box, Lane, Strip, draw_html, draw_svg, draw_text

UPDATES = ("after_backward", "in_backward")
ON_DISK = "_on_disk"
"""Ends the names of sizes that a record takes on the disk, padding included: "params_on_disk"."""
# The names that `record_bytes` may hold.
SIZES = (
    "gathered",
    "derivative",
    "handed",
    "weights",
    "made",
    *KINDS,
    *(kind + ON_DISK for kind in KINDS),
)
_ENDS = {
    HEAD: "head",
    HEAD_PIECES: "pieces of the head",
    LATE_ENDS: "embedding and head",
    END_PIECES: "pieces of larger leaves",
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Phase:
    """One pass of a train step over layers: T = num_layers ticks. Arrays are int32 and read-only;
    -1 means none.

    Attributes:
      name: "forward", "backward" or "update"; where there are several stacks, "<stack>/<name>".
      loops: its operations, in order (`host_offload.schedule.ops`).
      device_layers: opt_state of the layers below this one is on the device, whatever its tier.
      first_layer: the lowest layer, from which records of activations are counted.
      leaves: what is done meanwhile leaf by leaf, where the layers are not what is updated.
    """

    name: str
    loops: tuple[Loop, ...]
    device_layers: int = 0
    first_layer: int = 0
    leaves: "Phase | None" = None

    def ticks(self) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """Yield the number and the operations of each tick, before the loop, in it and after it."""
        for loop in self.loops:
            yield from loop

    @functools.cached_property
    def main(self) -> tuple[Loop, ...]:
        """The loops whose ticks compute or update a layer."""
        return tuple(loop for loop in self.loops if any(_is_main(op) for op in loop.ops))

    def _kinds(self, *verbs: str) -> tuple[str, ...]:
        found = (op.record for loop in self.loops for op in loop.ops if op.verb in verbs)
        return tuple(
            dict.fromkeys(
                record.kind for record in found if record.leaves == LAYERS and record.kind in KINDS
            )
        )

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
        """Return the index of an operation in each tick of the main loops: int32[T], -1 where a
        tick has none.
        """
        columns: list[Any] = [np.zeros(0, np.int32)]
        for loop in self.main:
            first = next(
                (op.number for op in loop.ops if op.record.leaves == LAYERS and wanted(op)), None
            )
            columns.append(
                np.full(loop.trips, -1)
                if first is None
                else first + loop.step * np.arange(loop.trips)
            )
        return int32(np.concatenate(columns))

    @functools.cached_property
    def _firsts(self) -> list[Loop]:
        """The loop that fetches and gathers the layer of tick 0 before it, if any."""
        return [loop for loop in self.loops if loop.stop <= 0 and any(map(_is_gather, loop.ops))]

    @functools.cached_property
    def _preloads(self) -> list[Loop]:
        """The loops that fill the ring."""
        return [loop for loop in self.loops if loop.stop <= 0 and loop not in self._firsts]

    @functools.cached_property
    def _after(self) -> list[Loop]:
        """The loops after the last layer."""
        return [loop for loop in self.loops if self.main and loop.start >= self.main[-1].stop]

    @functools.cached_property
    def layer(self) -> np.ndarray:
        """int32[T], the layer computed, or updated."""
        return self._column(_is_main)

    @functools.cached_property
    def consume(self) -> np.ndarray:
        """int32[T], the layer whose record is taken, from the ring or not, and gathered in forward
        and backward.
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
        """The layer fetched and taken before tick 0, outside of the ring (gather_ahead), else -1."""
        return next((op.number for loop in self._firsts for op in loop.ops), -1)

    @functools.cached_property
    def preload(self) -> np.ndarray:
        """int32[n], layers fetched before tick 0, each into the next slot of the ring; not empty if
        the phase has a ring.
        """
        found = [
            op.number
            for loop in self._preloads
            for _, ops in loop
            for op in ops
            if op.verb == "fetch"
        ]
        return int32(list(dict.fromkeys(found)))

    @functools.cached_property
    def use_slot(self) -> np.ndarray:
        """int32[T], the ring slot that a tick takes from; -1 where the ring has nothing for it."""
        num_slots, num_ticks = len(self.preload), len(self.layer)
        num_takes = (num_slots + int((self.fetch >= 0).sum())) if num_slots else 0
        return int32(
            np.where(np.arange(num_ticks) < num_takes, np.arange(num_ticks) % max(1, num_slots), -1)
        )

    @functools.cached_property
    def fetch_slot(self) -> np.ndarray:
        """int32[T], the ring slot that `fetch` fills, after the take of the same tick."""
        return int32(np.where(self.fetch >= 0, self.use_slot, -1))

    @functools.cached_property
    def drain(self) -> np.ndarray:
        """int32[n], layers whose `writes` are written after the last tick: as many as stores are
        ticks late.
        """
        found = [
            op.number for loop in self._after for _, ops in loop for op in ops if _is_late_store(op)
        ]
        return int32(list(dict.fromkeys(found)))

    @property
    def stores_late(self) -> int:
        """How many ticks after its update a record is stored."""
        return max(
            (op.lag for loop in self._after for op in loop.ops if _is_late_store(op)), default=0
        )

    def ticks_of(self, leaves: str, verb: str) -> list[int]:
        """Return the ticks in which leaves that are no stack of layers are loaded, updated or
        stored.
        """
        ticks = (
            t
            for loop in self.loops
            for t, ops in loop
            if any((op.record.leaves, op.verb) == (leaves, verb) for op in ops)
        )
        return list(dict.fromkeys(ticks))

    def off_device(self, kinds: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Return those of some kinds that are off the device for a layer: all, or all but
        opt_state.
        """
        return (
            kinds
            if layer >= self.device_layers
            else tuple(kind for kind in kinds if kind != "opt_state")
        )

    def kinds_of(self, tick: int) -> tuple[str, ...]:
        """Return those of `fetches` that are off the device for the layer of `tick`: all, or all
        but opt_state.
        """
        return self.off_device(self.fetches, int(self.layer[tick]))

    # --- bytes ------------------------------------------------------------------------------------

    def moved(self, *lanes: str, called: bool | None = None) -> int:
        """Return the bytes that cross some lanes of a device, with those of the loops over tiles in
        each tick.

        Args:
          *lanes: "up", "down", "read" or "write".
          called: count only what callbacks move, or only what they do not; None: everything.

        Raises:
          ValueError: no lane is given, or one in which no record moves.
        """
        if not lanes or any(lane not in MOVES for lane in lanes):
            known, wrong = ", ".join(map(repr, MOVES)), ", ".join(map(repr, lanes))
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
                    by_callbacks = (
                        op.num_bytes
                        if op.record.kind in _CALLED
                        else min(op.num_bytes, on_disk.get(op.record, 0))
                    )
                    counted = {
                        None: op.num_bytes,
                        True: by_callbacks,
                        False: op.num_bytes - by_callbacks,
                    }
                    total += loop.trips * counted[called]
        return total

    def in_flight(self) -> np.ndarray:
        """Return the bytes in flight on a device in each tick 0 ..

        T-1: int64[T] (`Schedule.in_flight`).
        """
        return np.concatenate(
            [np.full(loop.trips, self._bytes(loop), np.int64) for loop in self.main]
        )

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight in a tick, also after the last layer."""
        return max(self.layers_peak_bytes, self.drain_peak_bytes)

    @property
    def layers_peak_bytes(self) -> int:
        """The most bytes in flight in a tick that computes or updates a layer."""
        return max((self._bytes(loop) for loop in self.main), default=0)

    @property
    def drain_peak_bytes(self) -> int:
        """The most bytes in flight in a tick after the last layer, which stores records or updates
        embedding and head.
        """
        return max((self._bytes(loop) for loop in self._after), default=0)

    @functools.cached_property
    def _held(self) -> int:
        """Bytes that all ticks hold: the ring, and the room for a record that is stored a tick
        late.
        """
        # All slots are alike: each has room for all kinds, also where a layer lacks one.
        slot = {
            op.record: op.num_bytes
            for loop in self._preloads
            for op in loop.ops
            if op.verb == "fetch"
        }
        return len(self.preload) * sum(slot.values()) + sum(
            loop.trips * op.num_bytes
            for loop in self._after
            for op in loop.ops
            if _is_late_store(op)
        )

    def _bytes(self, loop: Loop) -> int:
        """Return the bytes of one tick of a loop: what it loads, gathers and makes, and what waits
        for a later tick.
        """
        tiles = max((op.inner.peak_bytes for op in loop.ops if op.inner is not None), default=0)
        # A record that is gathered twice in a tick, for forward and for the derivative, is there
        # once.
        held = {
            (op.verb, op.record, op.number): op.num_bytes
            for op in loop.ops
            if op.verb in _HOLD or _is_held(op, loop)
        }
        return self._held + tiles + sum(held.values())

    # --- tables and pictures ----------------------------------------------------------------------

    def strip(self) -> Strip:
        """Return the phase as lanes of boxes."""
        boxes: dict[str, list[Box]] = {
            name: [] for name in ("fetch", "read", "gather", "compute", "store")
        }
        slots: dict[int, list[Box]] = {slot: [] for slot in range(len(self.preload))}
        of_ends: dict[str, list[Box]] = {"fetch ends": [], "store ends": []}
        num_fetched = 0
        for loop in self.loops:
            for tick, ops in loop:
                in_tick: dict[tuple[str, int], list[str]] = {}
                for op in ops:
                    lane = _lane_drawn(op)
                    if op.record.leaves in _ENDS and lane in ("read", "store"):
                        name = "fetch ends" if lane == "read" else "store ends"
                        letter = op.record.leaves[0].upper()
                        of_ends[name].append(
                            Box(layer=letter, start=tick, stop=tick + 1, kinds=("opt_state",))
                        )
                    elif lane and op.record.leaves == LAYERS:
                        in_tick.setdefault((lane, op.number), []).append(
                            op.record.kind if lane != "compute" else "compute"
                        )
                for (lane, layer), kinds in in_tick.items():
                    kinds = tuple(dict.fromkeys(kinds))
                    boxes[lane].append(Box(layer=layer, start=tick, stop=tick + 1, kinds=kinds))
                    if lane == "fetch" and slots and loop not in self._firsts:
                        # What is fetched in a tick is taken as many ticks later as the ring has
                        # slots.
                        at = Box(layer=layer, start=tick, stop=tick + len(slots), kinds=kinds)
                        slots[num_fetched % len(slots)].append(at)
                        num_fetched += 1
        lanes = [Lane(name=name, boxes=tuple(b)) for name, b in boxes.items()]
        lanes += [Lane(name=f"slot {slot}", boxes=tuple(b)) for slot, b in slots.items()]
        lanes += [Lane(name=name, boxes=tuple(b)) for name, b in of_ends.items()]
        start, stop = min(loop.start for loop in self.loops), max(loop.stop for loop in self.loops)
        return Strip(name=self.name, note=self.note(), start=start, stop=stop, lanes=tuple(lanes))

    def note(self) -> str:
        """Return what stands after the name in a heading: which kinds move, and what else does."""
        parts = (("fetches", self.fetches), ("reads", self.reads), ("writes", self.writes))
        texts = [f"{verb} {', '.join(kinds)}" for verb, kinds in parts if kinds]
        if self.stores_late:
            texts[-1] += (
                " a tick late" if self.stores_late == 1 else f" {self.stores_late} ticks late"
            )
        last = len(self.layer)

        def at(tick):
            return (
                "before the loop"
                if tick < 0
                else f"tick {tick}"
                if tick < last
                else "after the loop"
            )

        for leaves, name in _ENDS.items():
            loaded, stored = self.ticks_of(leaves, "load"), self.ticks_of(leaves, "store")
            if not loaded:
                continue
            if leaves in (HEAD_PIECES, END_PIECES):
                texts.append(
                    f"{len(loaded)} {name}: one a tick"
                    if leaves == HEAD_PIECES
                    else f"{name}: after the last store"
                )
                continue
            first, then = at(loaded[0]), at(stored[-1])
            texts.append(
                f"{name}: fetched {first}, stored {then}" if first != then else f"{name}: {first}"
            )
        every = [
            op
            for loop in (*self.loops, *(self.leaves.loops if self.leaves else ()))
            for op in loop.ops
        ]
        if called := dict.fromkeys(op.record.kind for op in every if op.record.kind in _CALLED):
            texts.append(f"callbacks move {', '.join(_CALLED[kind] for kind in called)}")
        elif stored := [
            op
            for op in every
            if op.record.leaves != LAYERS and (op.verb, op.record.kind) == ("store", "opt_state")
        ]:
            num_leaves = len({op.record.leaves for op in stored})
            cut = len({op.record.leaves for op in stored if op.lag}) if self.leaves else 0
            in_pieces = f", {cut} of {num_leaves} in pieces of rows" if cut else ""
            texts += (
                [f"opt_state is read and written leaf by leaf{in_pieces}"] if self.leaves else []
            )
        return f": {'; '.join(texts) or 'nothing moves'}"

    def rows(self) -> list[str]:
        """Return the lines of a table: phase, tick, and the layers that are fetched, taken,
        computed and stored.
        """
        fetched = self.first if self.fetches else -1
        rows: list[tuple[Any, ...]] = (
            [("before", fetched, -1, self.first, -1, -1)] if self.first >= 0 else []
        )
        rows += [("before", layer, slot, -1, -1, -1) for slot, layer in enumerate(self.preload)]
        # A fetch fills the slot that the take of its tick has emptied: where both are given they
        # are equal.
        slot = np.maximum(self.use_slot, self.fetch_slot)
        rows += zip(
            range(len(self.layer)),
            self.fetch,
            slot,
            self.consume,
            self.layer,
            self.store,
            strict=True,
        )
        rows += [("after", -1, -1, -1, -1, layer) for layer in self.drain]
        return [
            f"{self.name:<8} {tick:>6}"
            + "".join(f" {layer if layer >= 0 else '-':>7}" for layer in layers)
            for tick, *layers in rows
        ]


_HOLD = frozenset({"fetch", "load", "gather", "compute", "reduce", "update"})
"""Verbs of operations whose bytes are on the device in their tick."""
_MAIN = frozenset({"compute", "update", "host_update"})
_CALLED = {
    "handed": "gradients down",
    "weights": "float32 weights down",
    "made": "new parameters up",
}


def _is_main(op: Op) -> bool:
    """Return whether an operation is its tick's own: it computes or updates what the tick is for, a
    layer or a leaf.
    """
    return op.verb in _MAIN and op.record.leaves not in _ENDS


def _is_gather(op: Op) -> bool:
    return op.verb == "gather" and op.record.kind == "gathered"


def _is_late_store(op: Op) -> bool:
    return op.verb == "store" and op.lag > 0 and op.record.leaves == LAYERS


def _is_held(op: Op, loop: Loop) -> bool:
    """Tell whether what a tick stores is there besides what the tick makes."""
    if (
        op.record.kind == "handed"
    ):  # of a layer, a slice of the stack of gradients, unless backward has just reduced it
        return op.record.leaves == LAYERS and not any(other.verb == "reduce" for other in loop.ops)
    return op.record.kind == "weights" or (
        op.verb == "store" and op.lag > 0 and op.record.leaves != LAYERS
    )


def _lane_drawn(op: Op) -> str:
    """Return the lane of a picture in which an operation is drawn, or ""."""
    if _is_main(op):
        return "compute"
    if op.record.kind not in (*KINDS, "gathered"):
        return ""
    return {"fetch": "fetch", "load": "read", "gather": "gather", "store": "store"}.get(op.verb, "")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """The phases of one train step, as the module describes them.

    Attributes:
      num_layers: L.
      distance: ticks between the fetch of a record and its use.
      update: "after_backward" or "in_backward".
      gather_ahead: the next layer is gathered while this one computes.
      master: parameters have float32 masters, which rest and move with opt_state.
      tiers: the tier of every kind.
      device_layers: opt_state of the layers below this one is on the device, whatever its tier.
      phases: in the order in which they run.
      record_bytes: bytes of one layer on one device by kind, and "gathered"; None where they were
        not given.
      stream: what layers take and return, and how it is split, as the table says it: "x[B_(data,
        fsdp), T_tensor, H]"; or "".
      first_layer: the lowest layer: those of a run within a stack are first_layer .. first_layer +
        L - 1.
    """

    num_layers: int
    distance: int
    update: str
    gather_ahead: bool
    master: bool
    tiers: Mapping[str, str]
    device_layers: int
    phases: tuple[Phase, ...]
    record_bytes: Mapping[str, int] | None
    stream: str = ""
    first_layer: int = 0

    def __getstate__(self) -> dict[str, Any]:
        sizes = None if self.record_bytes is None else dict(self.record_bytes)
        return {
            **vars(self),
            "tiers": dict(self.tiers),
            "record_bytes": sizes,
        }  # a mapping proxy is not pickled

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        sizes = state["record_bytes"]
        proxies = {
            "tiers": MappingProxyType(state["tiers"]),
            "record_bytes": sizes and MappingProxyType(sizes),
        }
        self.__dict__.update({**state, **proxies})

    def phase(self, name: str) -> Phase:
        """Return a phase by name.

        Raises:
          ValueError: this schedule has no such phase.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        names = ", ".join(phase.name for phase in self.phases)
        raise ValueError(
            f"phase {name!r}: a schedule with update={self.update!r} has the phases {names}"
        )

    @property
    def num_slots(self) -> int:
        """Slots of a ring: `distance`, or 0 where no phase has one."""
        return self.distance if any(len(phase.preload) for phase in self.phases) else 0

    @property
    def peak_layers(self) -> int:
        """The largest number of layers in one tick that are computed, gathered, or in the ring and
        on their way to it.
        """
        return max(int(_layers(phase).max()) for phase in self.phases)

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight on a device in each tick: phase name -> int64[T].

        The sum of

          - the ring, all of its slots, and the record that lands while the one it replaces is in
            use;
          - the layer gathered, and with gather_ahead the next one, and what was taken for this
            layer a tick ago and is not used up by its gather (activations; params that the tick
            updates);
          - what the tick reads, and what it makes of it: new records, activations that are stored
            elsewhere;
          - in backward the layer's gradient, whole and as it rests, whatever the tier of gradients;
          - the room for a record that is stored a tick late, and leaves that are no stack of layers
            in their ticks.

        Arrays that stay on the device, and what a layer's own computation needs, are not counted;
        nor are the ticks before 0.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        if self.record_bytes is None:
            raise ValueError(
                "this schedule holds no bytes: program.operations(batch) has those of a program, and build_schedule takes "
                "record_bytes"
            )
        return {phase.name: phase.in_flight() for phase in self.phases}

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight in any tick of these loops over layers.

        A program's schedule does not know a batch, nor the embedding and the head:
        `StepPlan.peak_bytes` counts them too.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        self.in_flight()  # raises
        return max(phase.peak_bytes for phase in self.phases)

    def title(self) -> str:
        """Return what stands above a table or a picture."""
        ahead = ", gather_ahead" if self.gather_ahead else ""
        size = f" ({self.peak_bytes:,} bytes)" if self.record_bytes else ""
        layers = "1 layer" if self.num_layers == 1 else f"{self.num_layers} layers"
        return (
            f"{layers}, distance {self.distance}{ahead}, at most {self.peak_layers} in flight{size}"
        )

    def __str__(self) -> str:
        notes = [phase.name + phase.note() for phase in self.phases]
        names = f"{'phase':<8} {'tick':>6} {'fetch':>7} {'slot':>7} {'take':>7} {'compute':>7} {'store':>7}"
        between = [f"between layers: {self.stream}"] if self.stream else []
        return "\n".join(
            [
                self.title(),
                *between,
                *notes,
                names,
                *(row for phase in self.phases for row in phase.rows()),
            ]
        )

    def strips(self) -> list[Strip]:
        """Return every phase as lanes of boxes."""
        return [phase.strip() for phase in self.phases]

    def timeline(self, width: int = 80) -> str:
        """Return the phases as text: one row a lane (fetch, read, gather, compute, store, ring
        slots), one column a tick.

        Every tick is one column wide, however long it takes. Lanes in which nothing happens are
        left out, and so are the middle ticks of a phase that does not fit.

        Args:
          width: characters of a line.
        """
        return draw_text(self.title(), self.strips(), width)

    def timeline_svg(self) -> str:
        """Return the lanes of `timeline`, complete, as an SVG document: a box for each layer,
        coloured by kind.

        Every tick is drawn equally long, however long it takes.
        """
        return draw_svg(self.title(), self.strips())

    def timeline_html(self) -> str:
        """Return an HTML file that holds the SVG and the table."""
        return draw_html(self.title(), self.strips(), str(self))


def _layers(phase: Phase) -> np.ndarray:
    """Return how many layers each tick has: computed, gathered ahead, in the ring."""
    took = phase.use_slot >= 0
    # After each tick: the preloaded records, and the fetches less the takes so far.
    ring = len(phase.preload) + np.cumsum((phase.fetch_slot >= 0) * 1 - took)
    return 1 + ring + ((phase.first >= 0) & (phase.consume >= 0))


def int32(values: Any) -> np.ndarray:
    """Return a read-only i32 array."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array
