"""One phase of a streamed step: a loop over ticks, with a ring of records on their way to the device."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from host_offload.schedule import Phase
from zerojax.jaxprs import evaluate, flatten
from zerojax.state import Index, OnDevice, Plan, wait_for

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScheduleArrays:
    """The schedule's arrays, as arguments of the program: XLA must not know what is in them.

    If XLA for GPUs can derive the index of a slice of host memory from a loop's counter, it may read another layer
    (`zerojax.state.records`). And XLA unrolls a loop if it knows that it makes one trip.

    Attributes:
      phases: i32 arrays of each phase, by name; of several stacks by "<stack>/<phase>".
      one: i32[] holding 1, which bounds loops of one trip.
    """

    phases: Mapping[str, Mapping[str, Any]]
    one: Any

    def phase(self, name: str) -> "PhaseArrays":
        """Return the arrays of one phase."""
        return PhaseArrays(self.phases[name], self.one)

    def of_stack(self, name: str) -> "ScheduleArrays":
        """Return those of one of several stacks, by its name; all of them where it is the only one, ""."""
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
    """

    columns: Plan
    one: Array

    def after(self, values: Any, mesh: Mesh) -> "PhaseArrays":
        """Return the arrays. What reads them then comes after `values`."""
        return dataclasses.replace(self, columns=wait_for(self.columns, values, mesh)[0])


@dataclasses.dataclass(frozen=True)
class Tick:
    """One tick, as its body sees it.

    Attributes:
      layer: i32[], the layer computed; of an ending, the record updated; in a loop over tiles, the tile.
      write: i32[], the same number, to write at. If the phase writes the stacks that it fetches from, it depends on this tick's
        fetch, so that the write comes after that read.
      consume: i32[], the layer whose record is taken; read it only if `takes_record`.
      record: out of the ring, or None where nothing was fetched ahead.
      landing: the record on its way, or None; a tick returns it.
      takes_record: whether a record is taken in this tick.
      on_device: whether the layer's optimizer state stays on the device.
    """

    layer: Any
    write: Any
    consume: Array
    record: list[Array] | None
    landing: list[Array] | None
    takes_record: bool
    on_device: bool

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
) -> Any:
    """Run the ticks of a phase as loops.

    Consecutive ticks that do the same things (fetch or not, take or not) run in one loop, so that nothing is fetched in vain. A
    single tick is a loop too, whose bound XLA does not know. Were it unrolled, XLA would start its gathers and fetches at the
    top of the program.

    Args:
      phase: the schedule, which decides what is compiled.
      arrays: those of the phase.
      carry: whatever the ticks pass on.
      tick: `tick(carry, now) -> (carry, landing)`. It may tie `now.landing` to an operation (`beside`): the transfer then ends
        before that operation, and overlaps what comes earlier.
      fetch: `fetch(carry, layer) -> record`, the arrays that are fetched ahead.
      device_layers: layers whose optimizer state stays on the device.
    """
    ring, columns = None, arrays.columns
    single = len(phase.preload) == 1  # one slot is carried as it is

    def take(slots: Array, slot: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(slots, slot, 0, keepdims=False)

    def place_in(slots: Array, value: Array, slot: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(slots, value, slot, 0)

    if len(phase.preload):
        # What the first ticks take has no earlier tick to be fetched in.
        first = [fetch(carry, columns["preload"][i]) for i in range(len(phase.preload))]
        # A ring of one slot is the record itself: nothing is sliced or put in place. Else record i fills slot i.
        ring = first[0] if len(first) == 1 else [jnp.stack(leaves) for leaves in zip(*first, strict=True)]
    start = 0
    # The numpy schedule decides which loops are compiled. Inside of them all indices are read from the arrays.
    for kind, ticks in itertools.groupby(_kinds(phase, device_layers)):
        stop = start + len(list(ticks))

        def body(t: Array, state: Any, kind: _TickKind = kind) -> tuple[Any, Any]:
            carry, ring = state
            index, consume = columns["layer"][t], columns["consume"][t]
            record, landing, write_index = None, None, index
            if kind.takes and kind.from_ring:
                record = ring if single else [take(r, columns["use_slot"][t]) for r in ring]
            if kind.fetches and ring is not None:
                landing = fetch(carry, columns["fetch"][t])
                if set(phase.fetches) & set(phase.writes):
                    # A stack that is read and written in one tick: unless the write waits for the read, XLA copies the stack.
                    write_index, landing = jax.lax.optimization_barrier((index, landing))
            # Without a ring a record is fetched in the tick that takes it.
            elif kind.fetches:
                record = fetch(carry, consume)
            now = Tick(index, write_index, consume, record, landing, kind.takes, kind.on_device)
            carry, landed = tick(carry, now)
            if landed is not None:
                # After the record was taken: this may be the slot that it was in.
                slot = columns["fetch_slot"][t]
                ring = landed if single else [place_in(r, v, slot) for r, v in zip(ring or (), landed, strict=True)]
            return carry, ring

        # XLA unrolls a loop if it knows that it makes one trip, so the bound of such a loop is an argument.
        end = stop if stop - start > 1 else start + arrays.one
        carry, ring = jax.lax.fori_loop(start, end, body, (carry, ring))
        start = stop
    return carry


@dataclasses.dataclass(frozen=True)
class _TickKind:
    """What the ticks of one loop have in common.

    Attributes:
      fetches: a record is fetched.
      takes: a record is taken.
      from_ring: it was fetched in an earlier tick.
      on_device: the layer's optimizer state stays on the device.
    """

    fetches: bool
    takes: bool
    from_ring: bool
    on_device: bool


def _kinds(phase: Phase, device_layers: int) -> list[_TickKind]:
    """Return the kind of each tick."""
    ticks = zip(phase.fetch, phase.consume, phase.use_slot, phase.layer, strict=True)
    return [_TickKind(int(f) >= 0, int(c) >= 0, int(slot) >= 0, int(layer) < device_layers) for f, c, slot, layer in ticks]


def beside(function: Callable[..., Any], args: tuple[Any, ...], work: Any) -> tuple[Any, Any]:
    """Return `function(*args)`, and `work`, which is done before the last quarter of the function's matrix products.

    XLA's scheduler starts a collective or a copy as late as the first use of its result allows. What only the next layer needs
    would start where this layer ends, and overlap nothing. So its result is tied to a product of this layer, and it overlaps
    the products before that one.
    """
    if not jax.tree.leaves(work):
        return function(*args), work
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    # Evaluated equation by equation, so that a barrier can be put in front of one of them.
    program = flatten(closed.jaxpr, closed.consts)
    slots: dict[int, Any] = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    products = [n for n, i in enumerate(program.instructions) if i.eqn.primitive.name == "dot_general"]
    # Of a GPT block of hidden 2048, compiled for 8 H200s, fetches run beside 4 products in forward and 10 in backward. Half of
    # the products gives 3 and 6, all but the last 5 and 14, and either holds 6 % more memory: 373 MB instead of 351.
    last = products[3 * len(products) // 4] if products else None
    for number, i in enumerate(program.instructions):
        if number == last:
            # The product waits for `work`, since its operands pass the same barrier. What comes before it runs beside the work.
            operands = {ref: slots[ref] for ref in i.ins if isinstance(ref, int)}
            operands, work = jax.lax.optimization_barrier((operands, work))
            slots.update(operands)
        evaluate([i], slots)
    leaves = [slots[ref] if isinstance(ref, int) else ref.value for ref in program.outputs]
    return jax.tree.unflatten(jax.tree.structure(out), leaves), work
