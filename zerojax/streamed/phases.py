"""One phase of a streamed step: a loop over ticks, with a ring of records on their way to the device."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.schedule import Phase
from zerojax.jaxprs import evaluate, flatten
from zerojax.state import Index, OnDevice, Plan

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Tick:
    """One tick, as its body sees it.

    Attributes:
      layer: i32[], the layer computed; of an ending, the record that it takes.
      write: i32[], the same, known once this tick's fetch has landed: the index to write at.
      consume: i32[], the layer whose record is taken; read it only if `takes`.
      taken: the record taken out of the ring, or None where nothing was fetched ahead.
      landing: the record on its way, or None; a tick returns it.
      takes: whether a record is taken in this tick.
      on_device: whether the layer's optimizer state stays on the device.
    """

    layer: Any
    write: Any
    consume: Array
    taken: list[Array] | None
    landing: list[Array] | None
    takes: bool
    on_device: bool

    def index(self, at: Callable[[Any], Index] = lambda layer: layer) -> Index:
        """Return the index of the record in stacks of optimizer state, given that of a layer or tile by its number."""
        return OnDevice(self.layer) if self.on_device else at(self.layer)

    def write_index(self, at: Callable[[Any], Index] = lambda layer: layer) -> Index:
        """Return the same index, to write at."""
        return OnDevice(self.write) if self.on_device else at(self.write)


def run_phase(
    phase: Phase,
    plan: Plan,
    carry: Any,
    tick: Callable[[Any, Tick], tuple[Any, Any]],
    one: Array,
    *,
    fetch: Callable[[Any, Array], list[Array]],
    device_layers: int = 0,
) -> Any:
    """Run the ticks of a phase as loops.

    Ticks that do the same things (fetch or not, take or not) run in one loop, so that nothing is fetched in vain. A single tick
    is a loop too, whose bound XLA does not know: unrolled, its gathers and fetches would start where the program starts.

    Args:
      phase: the schedule, which decides what is compiled.
      plan: its arrays, as arguments of the program.
      carry: whatever the ticks pass on.
      tick: `tick(carry, now) -> (carry, landing)`, which may tie `now.landing` to what it computes: it must then have landed
        before that, and lands beside what comes earlier.
      one: i32[] holding 1, an argument of the program.
      fetch: `fetch(carry, layer) -> record`, the arrays that are fetched ahead.
      device_layers: layers whose optimizer state stays on the device.
    """
    ring: Any = None
    single = len(phase.preload) == 1  # one slot is carried as it is

    def take(slots: Array, slot: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(slots, slot, 0, keepdims=False)

    def place_in(slots: Array, value: Array, slot: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(slots, value, slot, 0)

    if len(phase.preload):
        first = [fetch(carry, plan["preload"][i]) for i in range(len(phase.preload))]
        ring = first[0] if len(first) == 1 else [jnp.stack(leaves) for leaves in zip(*first, strict=True)]
    kinds = [
        (int(f) >= 0, int(c) >= 0, int(slot) >= 0, int(layer) < device_layers)
        for f, c, slot, layer in zip(phase.fetch, phase.consume, phase.use_slot, phase.layer, strict=True)
    ]
    start = 0
    for (fetches, takes, from_ring, on_device), ticks in itertools.groupby(kinds):
        stop = start + len(list(ticks))

        def body(
            t: Array,
            state: Any,
            fetches: bool = fetches,
            takes: bool = takes,
            from_ring: bool = from_ring,
            on_device: bool = on_device,
        ) -> tuple[Any, Any]:
            carry, ring = state
            layer, consume = plan["layer"][t], plan["consume"][t]
            taken, landing, write = None, None, layer
            if takes and from_ring:
                taken = ring if single else [take(r, plan["use_slot"][t]) for r in ring]
            if fetches and ring is not None:
                landing = fetch(carry, plan["fetch"][t])
                if set(phase.fetches) & set(phase.writes):
                    write, landing = jax.lax.optimization_barrier((layer, landing))
            elif fetches:
                taken = fetch(carry, consume)
            carry, landed = tick(carry, Tick(layer, write, consume, taken, landing, takes, on_device))
            if landed is not None:
                slot = plan["fetch_slot"][t]
                ring = landed if single else [place_in(r, v, slot) for r, v in zip(ring or (), landed, strict=True)]
            return carry, ring

        end = stop if stop - start > 1 else start + one
        carry, ring = jax.lax.fori_loop(start, end, body, (carry, ring))
        start = stop
    return carry


def beside(function: Callable[..., Any], args: tuple[Any, ...], work: Any) -> tuple[Any, Any]:
    """Return `function(*args)`, and `work`, which must be there before the last quarter of the function's matrix products.

    XLA's scheduler starts a collective, or a copy, as late as its result allows: what only the next layer needs would begin
    where this one ends. So its result is tied to a product of this layer, and it runs beside the products before that.
    """
    if not jax.tree.leaves(work):
        return function(*args), work
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    program = flatten(closed.jaxpr, closed.consts)
    slots: dict[int, Any] = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    products = [n for n, i in enumerate(program.instructions) if i.eqn.primitive.name == "dot_general"]
    last = products[3 * len(products) // 4] if products else None
    for number, i in enumerate(program.instructions):
        if number == last:
            operands = {ref: slots[ref] for ref in i.ins if isinstance(ref, int)}
            tied, work = jax.lax.optimization_barrier((operands, work))
            slots.update(tied)
        evaluate([i], slots)
    leaves = [slots[ref] if isinstance(ref, int) else ref.value for ref in program.outputs]
    return jax.tree.unflatten(jax.tree.structure(out), leaves), work
