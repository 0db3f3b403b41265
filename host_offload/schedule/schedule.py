"""Phases of a train step as data: the layer that each tick fetches, takes, computes and stores.

A step over L equal layers is two or three passes, its **phases**, of L **ticks** each. One tick
computes one layer. If the layers are a part of a stack, they keep their numbers in the stack, which
start at `first_layer`; here it is 0:

    forward   0 .. L-1   the layer's output from its input
    backward  L-1 .. 0   its gradients; the layer is recomputed
    update    0 .. L-1   its parameters, once all gradients are known (their norm may scale them)

With update="in_backward" a backward tick also updates its layer, and there is no third phase.

Records (the params, frozen params, grads, opt_state or activations of one layer) whose tier is not
"device" move while the step runs. `host_offload.schedule.build` writes each phase as a list of
operations (`host_offload.schedule.ops`), which the compiled step follows, so the order is data and
not code. Tick t of a loop does, in this order:

    take     consume[t], out of ring slot use_slot[t];
             forward and backward gather it: W[D_fsdp, F] -> W[D, F]
    fetch    fetch[t], into fetch_slot[t]; that slot has just been emptied,
             so fetch_slot[t] = use_slot[t]
    compute  layer[t], on the record that was taken
    store    store[t] = layer[t], the results of this tick

The **ring** has `distance` = d slots. Take number c empties slot c mod d, and the fetch in the same
tick refills that slot with the record of take c + d. So a record is taken exactly d ticks after its
fetch, the fetch can overlap with the computation of d ticks, and no slot is overwritten before it
is taken. The first d records are fetched before tick 0 (`preload`), the last d ticks fetch nothing,
and a loop leaves its ring empty. With fewer takes than d, all records are preloaded. With d = 0
there is no ring: fetch[t] is the record that tick t itself takes and waits for.

Without `gather_ahead` a tick takes the layer that it computes: consume = layer, only one layer is
gathered at a time, and the tick waits for its gather. With `gather_ahead` tick t takes and gathers
layer[t+1] while it computes layer[t]: two layers are gathered, `first` = layer[0] is taken before
tick 0, and the last tick takes nothing.

Dependencies: a computation waits for its take, a take for the fetch d ticks earlier, and a fetch
for the take from its slot. A fetch never waits for a store of its own loop: a loop reads a record
before it writes it, and never reads a record that it has written. The writes of an earlier loop are
complete before a later loop begins.

    phase     reads ahead (`fetches`)      reads in the tick (`reads`)  writes (`writes`)
    forward   params, frozen                                            activations
    backward  params, frozen, activations                               grads
      or      params, frozen, activations  opt_state                    opt_state, params
    update    grads, opt_state, params*                                 opt_state, params

The second row of backward is for update="in_backward". Only kinds off the device count. params*:
only if parameters have no float32 masters, because then the parameters themselves are updated. The
optimizer state of layers 0 .. device_layers-1 may stay on the device (a fractional offload): the
update phase visits these layers last, and fetches nothing for them unless another kind is off the
device. In backward the optimizer state is read in the tick that uses it: that copy overlaps with
the tick's own derivative, and so takes no slot.

**Late stores.** Updated records may be stored some ticks late. With a lag of 1, tick t stores the
records that tick t - 1 updated, store[t] = layer[t-1]: the stores use the opposite direction of the
link to the tick's loads, and in backward overlap with the tick's products. The first tick then
stores nothing, and the record of the last tick is stored after the loop (`drain`). An update phase
with late stores has no ring: each tick loads the record that it updates.

**Unstacked leaves** are updated during a phase with late stores. The gradients of leaves that
only the head uses are complete before backward, whose first tick stores nothing else: these leaves
are loaded before the loop and stored in that tick. If they are larger than a record, each of the
first ticks loads and updates one piece, and the next tick stores it. The gradients of the remaining
leaves are complete after the last tick: these leaves are loaded while the last tick's record is
drained, in groups, and each group is stored while the next is loaded. Leaves larger than a record
follow in pieces: one piece is stored while the next is loaded.

An update on the host stores gradients, and loads new parameters, by callbacks in the ticks that
compute the gradients.

All ticks count equally here. A schedule bounds layers and bytes; seconds have to be measured.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

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
)
from host_offload.schedule.timeline import Box, Lane, Strip, draw_html, draw_svg, draw_text

UPDATES = ("after_backward", "in_backward")
ON_DISK = "_on_disk"
"""Suffix of the names of on-disk record sizes, which include padding: "params_on_disk"."""
# The valid keys of `record_bytes`.
SIZES = (
    "gathered",
    "derivative",
    "handed",
    "weights",
    "made",
    *KINDS,
    *(kind + ON_DISK for kind in KINDS),
)
_UNSTACKED = {
    HEAD: "head",
    HEAD_PIECES: "pieces of the head",
    LATE_UNSTACKED: "embedding and head",
    UNSTACKED_PIECES: "pieces of larger leaves",
}


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
        """Return the record number of the wanted operation per main tick: int32[T], -1 if none."""
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
        """The loop that fetches and gathers tick 0's layer before tick 0, if any."""
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
        """int32[T], the layer that each tick computes or updates."""
        return self._column(_is_main)

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
        return next((op.number for loop in self._firsts for op in loop.ops), -1)

    @functools.cached_property
    def preload(self) -> np.ndarray:
        """int32[n], layers fetched before tick 0, each into the next slot of the ring.

        It is empty if the phase has no ring.
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
        """int32[T], the ring slot that each tick takes from; -1 if it uses no slot."""
        num_slots = len(self.preload)
        num_ticks = len(self.layer)
        num_takes = (num_slots + int((self.fetch >= 0).sum())) if num_slots else 0
        return int32(
            np.where(np.arange(num_ticks) < num_takes, np.arange(num_ticks) % max(1, num_slots), -1)
        )

    @functools.cached_property
    def fetch_slot(self) -> np.ndarray:
        """int32[T], the ring slot that `fetch` fills, after the take in the same tick."""
        return int32(np.where(self.fetch >= 0, self.use_slot, -1))

    @functools.cached_property
    def drain(self) -> np.ndarray:
        """int32[n], layers whose `writes` are written after the last tick.

        Their number is the number of ticks by which stores are late.
        """
        found = [
            op.number for loop in self._after for _, ops in loop for op in ops if _is_late_store(op)
        ]
        return int32(list(dict.fromkeys(found)))

    @property
    def stores_late(self) -> int:
        """The number of ticks between a record's update and its store."""
        return max(
            (op.lag for loop in self._after for op in loop.ops if _is_late_store(op)), default=0
        )

    def list_ticks(self, leaves: str, verb: str) -> list[int]:
        """Return the ticks in which unstacked leaves are loaded, updated or stored.

        Args:
          leaves: name of the leaves in `Record.leaves`.
          verb: "load", "update" or "store".
        """
        ticks = (
            t
            for loop in self.loops
            for t, ops in loop
            if any((op.record.leaves, op.verb) == (leaves, verb) for op in ops)
        )
        return list(dict.fromkeys(ticks))

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
        """Return the bytes per device that cross some lanes, including loops over tiles.

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
                    if op.record.kind in _CALLED:
                        by_callbacks = op.num_bytes
                    else:
                        by_callbacks = min(op.num_bytes, on_disk.get(op.record, 0))
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
    def _held(self) -> int:
        """Bytes that every tick holds: the ring, and space for records that are stored late."""
        # All slots are alike: each has space for all kinds, even if a layer lacks one.
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
        """Return the bytes of one tick of a loop.

        They are the records that it loads, gathers and computes, and the records that wait for a
        later tick.
        """
        tiles = max((op.inner.peak_bytes for op in loop.ops if op.inner is not None), default=0)
        # A record that a tick gathers twice, for forward and for the derivative, counts once.
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
        of_unstacked: dict[str, list[Box]] = {"fetch unstacked": [], "store unstacked": []}
        num_fetched = 0
        for loop in self.loops:
            for tick, ops in loop:
                in_tick: dict[tuple[str, int], list[str]] = {}
                for op in ops:
                    lane = _lane_drawn(op)
                    if op.record.leaves in _UNSTACKED and lane in ("read", "store"):
                        name = "fetch unstacked" if lane == "read" else "store unstacked"
                        letter = op.record.leaves[0].upper()
                        of_unstacked[name].append(
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
                        # A record is taken as many ticks after its fetch as the ring has slots.
                        at = Box(layer=layer, start=tick, stop=tick + len(slots), kinds=kinds)
                        slots[num_fetched % len(slots)].append(at)
                        num_fetched += 1
        lanes = [Lane(name=name, boxes=tuple(b)) for name, b in boxes.items()]
        lanes += [Lane(name=f"slot {slot}", boxes=tuple(b)) for slot, b in slots.items()]
        lanes += [Lane(name=name, boxes=tuple(b)) for name, b in of_unstacked.items()]
        start = min(loop.start for loop in self.loops)
        stop = max(loop.stop for loop in self.loops)
        return Strip(name=self.name, note=self.note(), start=start, stop=stop, lanes=tuple(lanes))

    def note(self) -> str:
        """Return the text after the name in a heading: the kinds that move, and other moves."""
        parts = (("fetches", self.fetches), ("reads", self.reads), ("writes", self.writes))
        texts = [f"{verb} {', '.join(kinds)}" for verb, kinds in parts if kinds]
        if self.stores_late:
            texts[-1] += (
                " a tick late" if self.stores_late == 1 else f" {self.stores_late} ticks late"
            )
        last = len(self.layer)

        def at(tick):
            if tick < 0:
                return "before the loop"
            if tick < last:
                return f"tick {tick}"
            return "after the loop"

        for leaves, name in _UNSTACKED.items():
            loaded = self.list_ticks(leaves, "load")
            stored = self.list_ticks(leaves, "store")
            if not loaded:
                continue
            if leaves in (HEAD_PIECES, UNSTACKED_PIECES):
                texts.append(
                    f"{len(loaded)} {name}: one a tick"
                    if leaves == HEAD_PIECES
                    else f"{name}: after the last store"
                )
                continue
            first = at(loaded[0])
            then = at(stored[-1])
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
        """Return the lines of a table: phase, tick, and layers fetched, taken, computed, stored."""
        fetched = self.first if self.fetches else -1
        rows: list[tuple[Any, ...]] = (
            [("before", fetched, -1, self.first, -1, -1)] if self.first >= 0 else []
        )
        rows += [("before", layer, slot, -1, -1, -1) for slot, layer in enumerate(self.preload)]
        # A fetch fills the slot that the take in its tick has emptied, so both slots are equal
        # unless one is -1.
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
"""Verbs of operations whose bytes are on the device during their tick."""
_MAIN = frozenset({"compute", "update", "host_update"})
_CALLED = {
    "handed": "gradients down",
    "weights": "float32 weights down",
    "made": "new parameters up",
}


def _is_main(op: Op) -> bool:
    """Return whether an operation computes or updates its tick's own layer or leaf."""
    return op.verb in _MAIN and op.record.leaves not in _UNSTACKED


def _is_gather(op: Op) -> bool:
    return op.verb == "gather" and op.record.kind == "gathered"


def _is_late_store(op: Op) -> bool:
    return op.verb == "store" and op.lag > 0 and op.record.leaves == LAYERS


def _is_held(op: Op, loop: Loop) -> bool:
    """Return whether the device holds a stored record in addition to the tick's own results."""
    if (
        op.record.kind == "handed"
    ):  # for a layer, a slice of the stacked gradients, unless backward has just reduced it
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
    """The phases of one train step, as the module's docstring describes them.

    Attributes:
      num_layers: number of layers, L.
      distance: ticks between the fetch of a record and its use.
      update: "after_backward" or "in_backward".
      gather_ahead: whether the next layer is gathered while the current layer computes.
      master: whether parameters have float32 masters, stored and moved with opt_state.
      tiers: tier of every kind.
      device_layers: number of the first layer whose opt_state is in its tier; the opt_state of
        lower layers is on the device.
      phases: phases in the order in which they run.
      record_bytes: bytes of one layer per device by kind, with the additional keys of
        `build_schedule`; None if unknown.
      stream: the arrays between layers and their sharding, as shown in the table, such as
        "x[B_(data, fsdp), T_tensor, H]"; or "".
      first_layer: number of the lowest layer; a run within a stack has layers first_layer ..
        first_layer + L - 1.
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
        """Return the state to pickle, with dicts in place of mapping proxies."""
        sizes = None if self.record_bytes is None else dict(self.record_bytes)
        return {
            **vars(self),
            "tiers": dict(self.tiers),
            "record_bytes": sizes,
        }  # a mapping proxy cannot be pickled

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the pickled state, with mapping proxies in place of dicts."""
        sizes = state["record_bytes"]
        proxies = {
            "tiers": MappingProxyType(state["tiers"]),
            "record_bytes": sizes and MappingProxyType(sizes),
        }
        self.__dict__.update({**state, **proxies})

    def phase(self, name: str) -> Phase:
        """Return the phase with a name.

        Args:
          name: name of the phase, such as "forward".

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
        """The number of slots in a ring: `distance`, or 0 if no phase has a ring."""
        return self.distance if any(len(phase.preload) for phase in self.phases) else 0

    @property
    def peak_layers(self) -> int:
        """The most layers in any tick that are computed, gathered, in the ring, or in flight."""
        return max(int(_layers(phase).max()) for phase in self.phases)

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight per device in each tick: phase name -> int64[T].

        They are the sum of

          - the ring with all its slots, and the record that arrives while the record that it
            replaces is in use;
          - the gathered layer, and with gather_ahead the next one, and the records that were taken
            for this layer a tick ago and that its gather has not used up (activations; params that
            the tick updates);
          - the records that the tick reads, and its results: new records, and activations that are
            stored in another tier;
          - in backward the layer's gradient, both unsharded and as stored, whatever the tier of
            gradients;
          - space for a record that is stored a tick late, and unstacked leaves in their ticks.

        Arrays that stay on the device, the temporaries of a layer's own computation, and the ticks
        before 0 are not counted.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        if self.record_bytes is None:
            raise ValueError(
                "this schedule holds no bytes: use program.operations(batch) for a program's "
                "bytes, or pass record_bytes to build_schedule"
            )
        return {phase.name: phase.in_flight() for phase in self.phases}

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device in any tick of these loops over layers.

        A program's schedule knows neither the batch nor the embedding and the head;
        `StepPlan.peak_bytes` counts them too.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        self.in_flight()  # raises ValueError without record_bytes
        return max(phase.peak_bytes for phase in self.phases)

    def title(self) -> str:
        """Return the title of a table or picture."""
        ahead = ", gather_ahead" if self.gather_ahead else ""
        size = f" ({self.peak_bytes:,} bytes)" if self.record_bytes else ""
        layers = "1 layer" if self.num_layers == 1 else f"{self.num_layers} layers"
        return (
            f"{layers}, distance {self.distance}{ahead}, at most {self.peak_layers} in flight{size}"
        )

    def __str__(self) -> str:
        """Return the title, a note for each phase, and a table with one row per tick."""
        notes = [phase.name + phase.note() for phase in self.phases]
        names = (
            f"{'phase':<8} {'tick':>6} {'fetch':>7} {'slot':>7} {'take':>7} {'compute':>7} "
            f"{'store':>7}"
        )
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
        """Return the phases as text: one row per lane, one column per tick.

        The lanes are fetch, read, gather, compute, store and the ring slots. Every tick is one
        column wide, however long it takes. Idle lanes are omitted, and so are the middle ticks of a
        phase that does not fit.

        Args:
          width: characters per line.
        """
        return draw_text(self.title(), self.strips(), width)

    def timeline_svg(self) -> str:
        """Return all lanes of `timeline` as an SVG document, with a coloured box for each layer.

        The colour shows the kind. Every tick is drawn with the same width, however long it takes.
        """
        return draw_svg(self.title(), self.strips())

    def timeline_html(self) -> str:
        """Return a standalone HTML file with the SVG and the table."""
        return draw_html(self.title(), self.strips(), str(self))


def _layers(phase: Phase) -> np.ndarray:
    """Return the number of layers in each tick: computed, gathered ahead, or in the ring."""
    took = phase.use_slot >= 0
    # After each tick: the preloaded records, plus the fetches minus the takes so far.
    ring = len(phase.preload) + np.cumsum((phase.fetch_slot >= 0) * 1 - took)
    return 1 + ring + ((phase.first >= 0) & (phase.consume >= 0))


def int32(values: Any) -> np.ndarray:
    """Return a read-only int32 array."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array
