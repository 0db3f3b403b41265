"""Which layer is fetched, taken, computed and stored at each tick of a train step: pure functions, int32 arrays, a table.

A step over L equal layers is two or three loops, its **phases**, of L **ticks** each. One tick computes one layer. Where they
are a part of a stack, layers have the numbers that they have in the stack, from `first_layer` on; here that is 0:

    forward   0 .. L-1   the layer's output from its input
    backward  L-1 .. 0   its gradients, the layer being computed again
    update    0 .. L-1   its parameters, once all gradients are known (they may have to be scaled by their norm)

With update="in_backward" a backward tick also updates its layer and there is no third phase.

Records (the params, frozen params, grads, opt_state or activations of one layer) whose tier is not "device" move while the step
runs. The loops read the arrays of a `Phase`, so an order is data and not code. Tick t of a loop does, in this order:

    take     consume[t], out of ring slot use_slot[t]; forward and backward gather it: W[D_fsdp, F] -> W[D, F]
    fetch    fetch[t], which lands in fetch_slot[t]: that slot has just been emptied, so use_slot[t] = fetch_slot[t]
    compute  layer[t], on what was taken
    store    store[t] = layer[t], what this tick computed

The **ring** has `distance` = d slots. Take number c empties slot c mod d, and the fetch of the same tick
refills that slot with the record of take c + d. So a record is taken exactly d ticks after its fetch, which can hide behind the
computation of d ticks, and nothing in a slot is overwritten before it is taken. The first d records are fetched before tick 0
(`preload`), the last d takes fetch nothing, and a loop leaves its ring empty. With fewer takes than d all are preloaded. With
d = 0 there is no ring: fetch[t] is what tick t itself takes, and waits for.

Without `gather_ahead` a tick takes the layer that it computes: consume = layer, one layer is whole at a time, and its gather is
waited for. With `gather_ahead` tick t takes and gathers layer[t+1] while it computes layer[t]: two layers are whole, `first` =
layer[0] is taken before tick 0, and the last tick takes nothing.

Dependencies: a computation waits for its take, a take for the fetch of d ticks ago, a fetch for the take from its slot. A
fetch waits for no store of its own loop: a loop reads a record before it writes it, and reads no record that it has written.
What an earlier loop wrote is complete before a later one begins.

    phase     reads ahead (`fetches`)       reads in the tick (`reads`)   writes (`writes`)
    forward   params, frozen                                              activations
    backward  params, frozen, activations                                 grads
      or      params, frozen, activations   opt_state                     opt_state, params (update in backward)
    update    grads, opt_state, params*                                   opt_state, params

Only kinds off the device count. params*: where parameters have no float32 masters beside them, they are themselves what is
updated. The optimizer state of layers 0 .. device_layers-1 may stay on the device (a fractional offload): the update phase
visits these layers last, and fetches nothing for them unless another kind is off the device. In backward the optimizer state is
read in the tick that uses it: that copy hides behind the tick's own derivative, and so takes no slot.

**Late stores.** What is updated may be stored a tick late: tick t stores what tick t - 1 updated, store[t] = layer[t-1], in the
other direction than its loads, and in backward beside its own products. The first tick then stores nothing, and the record of
the last one is stored after the loop (`drain`). Such an update phase has no ring: a tick loads the record that it updates.

**Ends.** Leaves that are no stack of layers are updated beside such a backward (`ends`). What only the head uses has its
gradient before the first tick, in which nothing else is stored: it is loaded before the loop, and stored in that tick. Of those
that are larger than a record each of the first ticks loads and updates a piece, which the next tick stores (`head_pieces`). The
others have their gradients after the last tick: they are loaded while its record is drained, and stored then. Those that are
larger than a record come after that, in pieces: one is stored while the next one is loaded (`pieces`).

All ticks count the same here. A schedule bounds layers and bytes; seconds have to be measured.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from host_offload.schedule.timeline import Box, Lane, Strip, draw_html, draw_svg, draw_text

KINDS = ("params", "frozen", "grads", "opt_state", "activations")
UPDATES = ("after_backward", "in_backward")
SIZES = ("gathered", *KINDS)  # what record_bytes may hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndsMove:
    """When the optimizer state of leaves that are no stack of layers crosses the link, beside a loop.

    Attributes:
      name: of the leaves, "head", "head_pieces", "embed" or "pieces".
      fetch: the tick beside which it is loaded; -1 is before the loop, the number of ticks is after it.
      store: the tick beside which it is stored, after its update.
      num_bytes: of it, on one device; of "pieces" those of the largest one.
      count: how many ticks in a row move so much each, from `fetch` and from `store` on.
    """

    name: str
    fetch: int
    store: int
    num_bytes: int = 0
    count: int = 1


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Phase:
    """One loop of a train step, T = num_layers ticks. Arrays are int32 and read-only; -1 means none.

    Attributes:
      name: "forward", "backward" or "update".
      layer: int32[T], the layer computed, or updated.
      consume: int32[T], the layer whose record is taken, from the ring or not, and gathered in forward and backward.
      use_slot: int32[T], the ring slot that it is taken from; -1 where the ring has nothing for this tick.
      fetch: int32[T], the layer whose `fetches` start to move to the device.
      fetch_slot: int32[T], the ring slot that they fill, after the take of the same tick.
      store: int32[T], the layer whose `writes` are written.
      drain: int32[n], layers whose `writes` are written after the last tick: one where stores are late, else none.
      preload: int32[n], layers fetched before tick 0; not empty exactly where the phase has a ring.
      preload_slot: int32[n], the slots that they fill.
      first: the layer fetched and taken before tick 0, outside of the ring (gather_ahead), else -1.
      fetches: kinds read ahead; a ring slot holds one record of each.
      reads: kinds read in the tick that uses them.
      writes: kinds written.
      device_layers: opt_state of the layers below this one is on the device, whatever its tier.
      first_layer: the lowest layer, from which records of activations are counted.
      ends: what else crosses the link beside the loop.
      in_words: what moves and is in no array, such as by callbacks; or "".
    """

    name: str
    layer: np.ndarray
    consume: np.ndarray
    use_slot: np.ndarray
    fetch: np.ndarray
    fetch_slot: np.ndarray
    store: np.ndarray
    drain: np.ndarray
    preload: np.ndarray
    preload_slot: np.ndarray
    first: int
    fetches: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    device_layers: int
    first_layer: int = 0
    ends: tuple[EndsMove, ...] = ()
    in_words: str = ""

    @property
    def stores_late(self) -> bool:
        """Whether a tick stores what the one before it updated."""
        return len(self.drain) > 0

    def kinds_of(self, tick: int) -> tuple[str, ...]:
        """Return those of `fetches` that are off the device for the layer of `tick`: all, or all but opt_state."""
        return self.off_device(self.fetches, int(self.layer[tick]))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the int32 arrays by field name, `first` as int32[1]."""
        names = ("layer", "consume", "use_slot", "fetch", "fetch_slot", "store", "preload", "preload_slot")
        return {name: getattr(self, name) for name in names} | {"first": int32([self.first])}

    def off_device(self, kinds: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Return those of some kinds that are off the device for a layer: all, or all but opt_state."""
        return kinds if layer >= self.device_layers else tuple(kind for kind in kinds if kind != "opt_state")

    def _strip(self) -> Strip:
        ring = len(self.preload)
        boxes: dict[str, list[Box]] = {name: [] for name in ("fetch", "read", "gather", "compute", "store")}
        slots: dict[int, list[Box]] = {slot: [] for slot in range(ring)}

        def put(boxes: list[Box], layer: int, kinds: tuple[str, ...], tick: int, ticks: int = 1) -> None:
            if layer >= 0 and kinds:
                boxes.append(Box(layer=layer, start=tick, stop=tick + ticks, kinds=kinds))

        # What precedes tick 0 is drawn where a loop that had begun earlier would have it.
        start = -ring - (self.first >= 0)
        put(boxes["fetch"], self.first, self.off_device(self.fetches, self.first), start)
        put(boxes["gather"], self.first, ("gathered",), -1)
        # What is fetched in tick t is taken in tick t + ring, and has a slot in between.
        fetched = [(slot - ring, layer, slot) for slot, layer in enumerate(self.preload.tolist())]
        fetched += zip(range(len(self.fetch)), self.fetch.tolist(), self.fetch_slot.tolist(), strict=True)
        for tick, layer, slot in fetched:
            kinds = self.off_device(self.fetches, layer)
            put(boxes["fetch"], layer, kinds, tick)
            if slot >= 0:
                put(slots[slot], layer, kinds, tick, ring)
        for tick, layer in enumerate(self.layer.tolist()):
            put(boxes["read"], layer, self.off_device(self.reads, layer), tick)
            put(boxes["gather"], int(self.consume[tick]), ("gathered",) if self.name != "update" else (), tick)
            put(boxes["compute"], layer, ("compute",), tick)
            put(boxes["store"], int(self.store[tick]), self.off_device(self.writes, layer), tick)
        for layer in self.drain.tolist():
            put(boxes["store"], layer, self.off_device(self.writes, layer), len(self.layer))
        lanes = [Lane(name=name, boxes=tuple(b)) for name, b in boxes.items()]
        lanes += [Lane(name=f"slot {slot}", boxes=tuple(b)) for slot, b in slots.items()]
        for name, ticks in (("fetch ends", [e.fetch for e in self.ends]), ("store ends", [e.store for e in self.ends])):
            each = [
                (e.name[0].upper(), t) for e, tick in zip(self.ends, ticks, strict=True) for t in range(tick, tick + e.count)
            ]
            ends = [Box(layer=letter, start=t, stop=t + 1, kinds=("opt_state",)) for letter, t in each]
            lanes.append(Lane(name=name, boxes=tuple(ends)))
        start = min([start, *(e.fetch for e in self.ends)])
        stop = max([len(self.layer) + len(self.drain), *(e.store + e.count for e in self.ends)])
        return Strip(name=self.name, note=self._note(), start=start, stop=stop, lanes=tuple(lanes))

    def _note(self) -> str:
        parts = (("fetches", self.fetches), ("reads", self.reads), ("writes", self.writes))
        text = "; ".join(f"{verb} {', '.join(kinds)}" for verb, kinds in parts if kinds)
        text += " a tick late" if self.stores_late else ""
        for e in self.ends:
            if e.name == "pieces":
                text += "; pieces of larger leaves: after the last store"
                continue
            if e.name == "head_pieces":
                text += f"; {e.count} pieces of the head: one a tick"
                continue
            at = [
                "before the loop" if t < 0 else f"tick {t}" if t < len(self.layer) else "after the loop"
                for t in (e.fetch, e.store)
            ]
            text += f"; {e.name}: fetched {at[0]}, stored {at[1]}" if at[0] != at[1] else f"; {e.name}: {at[0]}"
        return f": {'; '.join(some for some in (text, self.in_words) if some) or 'nothing moves'}"

    def _rows(self) -> list[str]:
        rows = []
        if self.first >= 0:
            rows.append(("before", self.first if self.fetches else -1, -1, self.first, -1, -1))
        rows += [("before", layer, slot, -1, -1, -1) for layer, slot in zip(self.preload, self.preload_slot, strict=True)]
        # A fetch fills the slot that the take of its tick has emptied: where both are given they are equal.
        slot = np.maximum(self.use_slot, self.fetch_slot)
        rows += zip(range(len(self.layer)), self.fetch, slot, self.consume, self.layer, self.store, strict=True)
        rows += [("after", -1, -1, -1, -1, layer) for layer in self.drain]
        return [
            f"{self.name:<8} {tick:>6}" + "".join(f" {layer if layer >= 0 else '-':>7}" for layer in layers)
            for tick, *layers in rows
        ]


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
      record_bytes: bytes of one layer on one device by kind, and "gathered"; None where they were not given.
      stream: what layers take and return, and how it is split, as the table says it: "x[B_(data, fsdp), T_tensor, H]"; or "".
      first_layer: the lowest layer: those of a run within a stack are first_layer .. first_layer + L - 1.
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
        return {**vars(self), "tiers": dict(self.tiers), "record_bytes": sizes}  # a mapping proxy is not pickled

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        sizes = state["record_bytes"]
        proxies = {"tiers": MappingProxyType(state["tiers"]), "record_bytes": sizes and MappingProxyType(sizes)}
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
        raise ValueError(f"phase {name!r}: a schedule with update={self.update!r} has the phases {names}")

    def arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the int32 arrays of every phase: phase name -> field name -> array, `first` as int32[1]."""
        return {phase.name: phase.arrays() for phase in self.phases}

    @property
    def num_slots(self) -> int:
        """Slots of a ring: `distance`, or 0 where no phase has one."""
        return self.distance if any(len(phase.preload) for phase in self.phases) else 0

    @property
    def peak_layers(self) -> int:
        """The largest number of layers in one tick that are computed, gathered, or in the ring and on their way to it."""
        return max(int(self._layers(phase).max()) for phase in self.phases)

    def _layers(self, phase: Phase) -> np.ndarray:
        took = phase.use_slot >= 0
        # After each tick: the preloaded records, and the fetches less the takes so far.
        ring = len(phase.preload) + np.cumsum((phase.fetch_slot >= 0) * 1 - took)
        return 1 + ring + (self._ahead(phase) & (phase.consume >= 0))

    def _ahead(self, phase: Phase) -> bool:
        return self.gather_ahead and phase.name != "update"

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight on a device in each tick: phase name -> int64[T].

        The sum of

          - the ring, all of its slots, and the record that lands while the one it replaces is in use;
          - the layer gathered, and with gather_ahead the next one, and what was taken for this layer a tick ago and is not
            used up by its gather (activations; params that the tick updates);
          - `reads` and `writes` of the layer;
          - in backward the layer's gradient, whatever the tier of gradients;
          - of `ends` what a tick stores, and in such a tick the room for the record that it leaves to the next one; of their
            pieces what it loads and stores.

        Arrays that stay on the device, and what a layer's own computation needs, are not counted; nor are the ticks before 0.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        if self.record_bytes is None:
            raise ValueError("record_bytes=None: bytes in flight are known where build_schedule is given record_bytes")
        return {phase.name: self._bytes(phase, self.record_bytes) for phase in self.phases}

    def _bytes(self, phase: Phase, size: Mapping[str, int]) -> np.ndarray:
        total = np.zeros(self.num_layers, np.int64)

        def add(kinds: Iterable[str], layers: np.ndarray) -> None:
            for kind in kinds:
                total[moved((kind,), layers, self.device_layers)] += size[kind]

        if len(phase.preload):
            total += self.distance * sum(size[kind] for kind in phase.fetches)
        add(phase.fetches, phase.fetch)
        add(phase.reads, phase.layer)
        add(phase.writes, phase.store)
        for move in phase.ends:
            if move.name == "head_pieces":  # a piece is loaded while the one before it is stored
                for first in (move.fetch, move.store):
                    total[first : first + move.count] += move.num_bytes
                continue
            # The loop of that tick has the room that later ticks have for a record that was updated and is not stored yet.
            room = sum(size[kind] for kind in phase.writes)
            total[move.store : move.store + 1] += move.num_bytes + room
        if phase.name != "update":
            total += size["gathered"]
        if phase.name == "backward" and "grads" not in phase.writes:
            total += size["grads"]
        if self._ahead(phase):
            total[phase.consume >= 0] += size["gathered"]
            # A gather copies what it takes. The tick still needs activations, and params where they are what is updated.
            used = {"activations"} if self.master else {"activations", *phase.writes}
            add(used.intersection(phase.fetches), phase.layer)
        return total

    @property
    def peak_bytes(self) -> int:
        """The largest of `in_flight`."""
        return max(int(total.max()) for total in self.in_flight().values())

    def _title(self) -> str:
        ahead = ", gather_ahead" if self.gather_ahead else ""
        size = f" ({self.peak_bytes} bytes)" if self.record_bytes else ""
        return f"{self.num_layers} layers, distance {self.distance}{ahead}, at most {self.peak_layers} in flight{size}"

    def __str__(self) -> str:
        notes = [phase.name + phase._note() for phase in self.phases]
        names = f"{'phase':<8} {'tick':>6} {'fetch':>7} {'slot':>7} {'take':>7} {'compute':>7} {'store':>7}"
        between = [f"between layers: {self.stream}"] if self.stream else []
        return "\n".join([self._title(), *between, *notes, names, *(row for phase in self.phases for row in phase._rows())])

    def _strips(self) -> list[Strip]:
        return [phase._strip() for phase in self.phases]

    def timeline(self, width: int = 80) -> str:
        """Return the phases as text: one row a lane (fetch, read, gather, compute, store, ring slots), one column a tick.

        Every tick is one column wide, however long it takes. Lanes in which nothing happens are left out, and so are the
        middle ticks of a phase that does not fit.

        Args:
          width: characters of a line.
        """
        return draw_text(self._title(), self._strips(), width)

    def timeline_svg(self) -> str:
        """Return the lanes of `timeline`, complete, as an SVG document: a box for each layer, coloured by kind.

        Every tick is drawn equally long, however long it takes.
        """
        return draw_svg(self._title(), self._strips())

    def timeline_html(self) -> str:
        """Return an HTML file that holds the SVG and the table."""
        return draw_html(self._title(), self._strips(), str(self))


def moved(kinds: tuple[str, ...], layer, device_layers: int):
    """Return for each layer whether any of `kinds` is off the device. All are, but opt_state of the first layers may not be."""
    some = any(kind != "opt_state" for kind in kinds)
    return (layer >= 0) & (some | (("opt_state" in kinds) & (layer >= device_layers)))


def int32(values) -> np.ndarray:
    """Return a read-only i32 array."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array


def padded(values: np.ndarray, length: int) -> np.ndarray:
    """Return an i32 array of `length`, the missing entries -1: no layer."""
    return int32(np.append(values, np.full(length - len(values), -1)))
