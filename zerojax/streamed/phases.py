"""One phase of a streamed step: a loop over ticks, with a ring of records on their way to the device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from host_offload.device import one_trip
from host_offload.schedule import HEAD, HEAD_PIECES, LAYERS, Op, Phase
from zerojax.state import Index, OnDevice, Plan, wait_for

Array = jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["phases", "one"], meta_fields=["linear"])
@dataclasses.dataclass(frozen=True)
class ScheduleArrays:
    """The schedule's arrays, as arguments of the program: XLA must not know what is in them.

    If XLA for GPUs can derive the index of a slice of host memory from a loop's counter, it may read another layer
    (`zerojax.state.records`). And XLA unrolls a loop if it knows that it makes one trip. Where XLA derives such an index
    rightly, it is to know it: the slice is then a copy, else a kernel.

    Attributes:
      phases: i32 arrays of each phase, by name; of several runs of layers by "<run>/<phase>".
      one: i32[] holding 1, which bounds loops of one trip.
      linear: the mesh of a program that computes indices from the counters of its loops where the schedule is linear, and
        reads the arrays elsewhere; None: it reads the arrays everywhere.
    """

    phases: Mapping[str, Mapping[str, Any]]
    one: Any
    linear: Mesh | None = None

    def phase(self, name: str) -> "PhaseArrays":
        """Return the arrays of one phase."""
        return PhaseArrays(self.phases[name], self.one, self.linear)

    def of_run(self, name: str) -> "ScheduleArrays":
        """Return those of one of several runs of layers, by its name; all of them where it is the only one, ""."""
        if not name:
            return self
        before = f"{name}/"
        mine = {loop.removeprefix(before): arrays for loop, arrays in self.phases.items() if loop.startswith(before)}
        return dataclasses.replace(self, phases=mine)

    def after(self, values: Any, mesh: Mesh) -> tuple["ScheduleArrays", Any]:
        """Return the arrays, and `values`. What reads the arrays of a phase then comes after `values`."""
        phases, values = wait_for(self.phases, values, mesh)
        return dataclasses.replace(self, phases=phases), values


@dataclasses.dataclass(frozen=True)
class PhaseArrays:
    """The arrays of one phase.

    Attributes:
      columns: i32 arrays, by field of `host_offload.schedule.Phase`.
      one: i32[] holding 1.
      linear: as of `ScheduleArrays`.
    """

    columns: Plan
    one: Array
    linear: Mesh | None = None

    def after(self, values: Any, mesh: Mesh) -> "PhaseArrays":
        """Return the arrays. What reads them then comes after `values`."""
        return dataclasses.replace(self, columns=wait_for(self.columns, values, mesh)[0])


@dataclasses.dataclass(frozen=True)
class Tick:
    """One tick, as its body sees it.

    Attributes:
      layer: i32[], the layer computed; of an ending, the record updated; in a loop over tiles, the tile.
      write: i32[], the same number, to write at. If the phase writes the stacks that it fetches from, it depends on this tick's
        fetch, so that the write comes after that read. A linear index depends on the loop's counter alone: see `lands_first`.
      consume: i32[], the layer whose record is taken; read it only if `takes_record`.
      record: out of the ring, or None where nothing was fetched ahead.
      landing: the record on its way, or None; a tick returns it.
      takes_record: whether a record is taken in this tick.
      on_device: whether the layer's optimizer state stays on the device.
      fetch: i32[], the layer whose record the tick fetches itself, where stores are late; else None.
      stored: i32[], the layer that the tick before updated, where this tick stores it (`Phase.stores_late`); else None.
      stores_ends: whether it stores the records of leaves that the head completed (`Phase.ends`).
      loads_pieces: whether it loads and updates a piece of such leaves that are larger than a record.
      stores_pieces: whether it stores the piece that the tick before updated.
      lands_first: the phase writes the stacks that it fetches from, and `write` does not say so: what the tick writes there has
        to wait for `landing`.
    """

    layer: Any
    write: Any
    consume: Array
    record: list[Array] | None
    landing: list[Array] | None
    takes_record: bool
    on_device: bool
    lands_first: bool = False
    fetch: Array | None = None
    stored: Array | None = None
    stores_ends: bool = False
    loads_pieces: bool = False
    stores_pieces: bool = False

    def index(self, at: Callable[[Any], Index] = lambda layer: layer) -> Index:
        """Return the index of the record in stacks of optimizer state, given that of a layer or tile by its number."""
        return OnDevice(self.layer) if self.on_device else at(self.layer)

    def write_index(self, at: Callable[[Any], Index] = lambda layer: layer) -> Index:
        """Return the same index, to write at."""
        return OnDevice(self.write) if self.on_device else at(self.write)


def run_phase(
    phase: Phase,
    arrays: PhaseArrays,
    carry: Any,
    tick: Callable[[Any, Tick], tuple[Any, Any]],
    *,
    fetch: Callable[[Any, Array], list[Array]],
    device_layers: int = 0,
    drain: Callable[[Array, Any], Any] | None = None,
) -> Any:
    """Run the ticks of a phase as loops.

    Consecutive ticks that do the same things (fetch or not, take or not) run in one loop, so that nothing is fetched in vain. A
    single tick is a loop too, of one trip, that XLA does not unroll. Were it unrolled, XLA would start its gathers and fetches
    at the top of the program.

    Args:
      phase: the schedule, which decides what is compiled.
      arrays: those of the phase.
      carry: whatever the ticks pass on.
      tick: `tick(carry, now) -> (carry, landing)`. It may tie `now.landing` to an operation (`beside`): the transfer then ends
        before that operation, and overlaps what comes earlier.
      fetch: `fetch(carry, layer) -> record`, the arrays that are fetched ahead.
      device_layers: layers whose optimizer state stays on the device.
      drain: `drain(layer, carry) -> carry` stores what the last tick updated, where stores are late; None: whoever runs the
        phase stores it.
    """
    ring, columns = None, arrays.columns
    single = len(phase.preload) == 1  # one slot is carried as it is

    def take(slots: Array, slot: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(slots, slot, 0, keepdims=False)

    def place_in(slots: Array, value: Array, slot: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(slots, value, slot, 0)

    if len(phase.preload):
        ring = _preload(phase, arrays, functools.partial(fetch, carry))
    if arrays.linear is not None:
        # No index says that this loop comes after what the arrays come after, so the values that it carries do.
        carry, ring, columns = jax.lax.optimization_barrier((carry, ring, columns))
    # The operations decide which loops are compiled. Inside of them indices are read from the arrays, or linear.
    for kind, ticks in _loops(phase, device_layers):
        start, stop = ticks.start, ticks.stop
        at = functools.partial(_index, phase, columns, ticks, arrays.linear is not None)

        def body(t: Array, state: Any, kind: _TickKind = kind, at: Callable[[str, Array], Array] = at) -> tuple[Any, Any]:
            carry, ring = state
            index, consume = at("layer", t), at("consume", t)
            record, landing, write_index, lands_first = None, None, index, False
            if kind.takes and kind.from_ring:
                record = ring if single else [take(r, columns["use_slot"][t]) for r in ring]
            late, fetched = phase.stores_late, None
            if kind.fetches and ring is not None and late:
                fetched = at("fetch", t)
            elif kind.fetches and ring is not None:
                landing = fetch(carry, at("fetch", t))
                # A stack that is read and written in one tick: unless the write waits for the read, XLA copies the stack.
                lands_first = bool(set(phase.fetches) & set(phase.writes))
                if lands_first and arrays.linear is None:
                    write_index, landing = jax.lax.optimization_barrier((index, landing))
            # Without a ring a record is fetched in the tick that takes it.
            elif kind.fetches:
                record = fetch(carry, consume)
            lands_first = lands_first and arrays.linear is not None
            # Only a linear index may be of another layer than the tick's own (`StreamedPlan.stores_late`).
            stored = at("store", t) if late and kind.stores else None
            now = Tick(
                index, write_index, consume, record, landing, kind.takes, kind.on_device, lands_first, fetched, stored,
                kind.stores_ends, kind.loads_pieces, kind.stores_pieces,
            )  # fmt: skip
            carry, landed = tick(carry, now)
            if landed is not None:
                # After the record was taken: this may be the slot that it was in.
                slot = columns["fetch_slot"][t]
                ring = landed if single else [place_in(r, v, slot) for r, v in zip(ring or (), landed, strict=True)]
            return carry, ring

        if stop - start == 1 and arrays.linear is not None:
            carry, ring = one_trip(start, body, (carry, ring), arrays.linear)
        else:
            # XLA unrolls a loop if it knows that it makes one trip, so the bound of such a loop is an argument.
            end = stop if stop - start > 1 else start + arrays.one
            carry, ring = jax.lax.fori_loop(start, end, body, (carry, ring))
    if drain is not None:
        for layer in phase.drain.tolist():
            assert arrays.linear is not None
            carry = one_trip(layer, drain, carry, arrays.linear)
    return carry


def fetch_first(phase: Phase, arrays: PhaseArrays, fetch: Callable[[Array], list[Array]]) -> list[Array]:
    """Fetch the record of `phase.first`, which is taken before the phase's ticks."""
    if arrays.linear is None:
        return fetch(arrays.columns["first"][0])
    return _fetch_in_loop(arrays, fetch, 1, lambda t: jnp.int32(phase.first) + t)


def _index(phase: Phase, columns: Plan, ticks: range, is_linear: bool, name: str, t: Array) -> Array:
    """Return entry t of a column: a linear function of t where it is one in all of `ticks`, else read from its array."""
    values = getattr(phase, name)[ticks.start : ticks.stop]
    steps = np.diff(values)
    if not is_linear or (steps != steps[:1]).any():
        return columns[name][t]
    step = int(steps[0]) if len(steps) else 1  # of one tick, too, a function of t: XLA makes no copy of a constant index
    return jnp.int32(int(values[0]) - step * ticks.start) + jnp.int32(step) * t


def _preload(phase: Phase, arrays: PhaseArrays, fetch: Callable[[Array], list[Array]]) -> list[Array]:
    """Fetch what the first ticks take, which have no earlier tick to be fetched in; returns the ring.

    A ring of one slot is the record itself: nothing is sliced or put in place. Else record i fills slot i.
    """
    columns, num = arrays.columns, len(phase.preload)
    if arrays.linear is not None:
        return _fetch_in_loop(arrays, fetch, num, functools.partial(_index, phase, columns, range(num), True, "preload"))
    records = [fetch(columns["preload"][i]) for i in range(num)]
    return records[0] if num == 1 else [jnp.stack(leaves) for leaves in zip(*records, strict=True)]


def _fetch_in_loop(
    arrays: PhaseArrays, fetch: Callable[[Array], list[Array]], num: int, at: Callable[[Array], Array]
) -> list[Array]:
    """Fetch the records at(0) .. at(num - 1) in a loop; returns [num, ...] of each leaf, or the record where num = 1."""

    def put(t: Array, ring: list[Array]) -> list[Array]:
        record = fetch(at(t))
        if num == 1:
            return record
        return [jax.lax.dynamic_update_index_in_dim(r, v, t, 0) for r, v in zip(ring, record, strict=True)]

    lead = () if num == 1 else (num,)
    shapes = jax.eval_shape(fetch, jax.ShapeDtypeStruct((), jnp.int32))
    empty = [jnp.zeros((*lead, *a.shape), a.dtype) for a in shapes]
    # The loop starts when the arrays are known, and not at the top of the program.
    empty, _ = jax.lax.optimization_barrier((empty, arrays.columns))
    assert arrays.linear is not None
    return one_trip(0, put, empty, arrays.linear) if num == 1 else jax.lax.fori_loop(0, num, put, empty)


@dataclasses.dataclass(frozen=True)
class _TickKind:
    """What the ticks of one loop have in common.

    Attributes:
      fetches: a record is fetched.
      takes: a record is taken.
      from_ring: it was fetched in an earlier tick.
      on_device: the layer's optimizer state stays on the device.
      stores: a record is stored.
      stores_ends: so are leaves that the head completed.
      loads_pieces, stores_pieces: as of `Tick`.
    """

    fetches: bool
    takes: bool
    from_ring: bool
    on_device: bool
    stores: bool
    stores_ends: bool
    loads_pieces: bool
    stores_pieces: bool


def _loops(phase: Phase, device_layers: int) -> list[tuple[_TickKind, range]]:
    """Return the loops that are compiled, each with the kind of its ticks: those of the phase's operations.

    Loops that do the same one after the other, with layers that do not follow each other, are one.
    """
    found: list[tuple[_TickKind, range]] = []
    for loop in phase.main:
        ops, on_device = loop.ops, int(phase.layer[loop.start]) < device_layers
        assert on_device == (int(phase.layer[loop.stop - 1]) < device_layers)
        kind = _TickKind(
            fetches=any(op.verb == "fetch" for op in ops),
            takes=int(phase.consume[loop.start]) >= 0,
            from_ring=int(phase.use_slot[loop.start]) >= 0,
            on_device=on_device,
            # Where stores are not late, each tick of a phase does store, or what it stores is on the device as its state is.
            stores=not phase.stores_late or any(_moves(op, LAYERS, "store") for op in ops),
            stores_ends=any(_moves(op, HEAD, "store") for op in ops),
            loads_pieces=any(_moves(op, HEAD_PIECES, "load") for op in ops),
            stores_pieces=any(_moves(op, HEAD_PIECES, "store") for op in ops),
        )
        if found and found[-1][0] == kind:
            found[-1] = (kind, range(found[-1][1].start, loop.stop))
        else:
            found.append((kind, range(loop.start, loop.stop)))
    return found


def _moves(op: Op, leaves: str, verb: str) -> bool:
    return (op.record.leaves, op.verb) == (leaves, verb)
