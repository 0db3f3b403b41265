"""Temporary memory of a traced computation, estimated for one device as XLA compiles it.

XLA fuses elementwise equations into their readers, so only some values take memory of their own:
results of products, reductions, look-ups and loops, and operands of products. Each counts from the
equation that computes it to the first product after the last one that reads it, directly or
through fused equations: XLA's order is not that of the trace.
Results, such as gradients that are added to sums at once, and weights, which are copied out of
their stacks for the product that reads them, count at one equation.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.activations import flow
from zerojax.jaxprs import REDUCTIONS, FlatJaxpr, Instruction, count_flops, flatten
from zerojax.sharding import ActivationSpec, Spec, local_elements

_LOOK_UPS = frozenset({"gather", "scatter", "scatter-add", "dynamic_slice", "sort", "cumsum"})
_MOVED = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "name", "copy", "sharding_constraint"}
)
"""Equations that a product reads its operand through."""


def peak_working_bytes(
    closed: Any,
    specs: Sequence[Spec | None],
    activations: ActivationSpec,
    batch_size: int,
    weights: Collection[int] = (),
    saved: Collection[int] = (),
    result_itemsize: int | None = None,
) -> int:
    """Return the most bytes that a computation has in memory at one equation, on each device.

    Args:
      closed: closed jaxpr of the computation. Its other arguments do not count.
      specs: spec of each argument, or None if it is unknown.
      activations: how values with an unknown spec are split, and the mesh.
      batch_size: number of rows of the batch.
      weights: positions of the arguments that are copied when a product reads them.
      saved: positions of the arguments that are copied before the first equation that reads them.
      result_itemsize: bytes of an element of each result; None for those of its dtype.
    """
    program = flatten(closed.jaxpr, closed.consts)
    slot_specs = flow(program, specs, activations.mesh.shape)

    def count(slot: int, aval: Any, itemsize: int | None = None) -> int:
        spec = slot_specs.get(slot)
        if spec is None:
            spec = activations.given(getattr(aval, "shape", ()), batch_size)
        return _local_bytes(aval, spec, activations.mesh, itemsize)

    copied = {program.inputs[position] for position in weights}
    sliced = {program.inputs[position] for position in saved}
    live = program.live(program.outputs)
    results = {ref for ref in program.outputs if isinstance(ref, int)}
    stored = _list_stored(program, live)
    last_read = _find_last_reads(live, stored, sliced)

    held = dict[int, int]()
    peak = 0
    num_products = 0
    products_before = list[int]()
    for number, i in enumerate(live):
        at_once = 0
        if count_flops(i.eqn):
            for ref, v in zip(i.ins, i.eqn.invars, strict=True):
                if isinstance(ref, int) and ref in copied:
                    at_once += count(ref, v.aval)
        for ref, v in zip(i.ins, i.eqn.invars, strict=True):
            if isinstance(ref, int) and ref in sliced:
                held[ref] = count(ref, v.aval)
                sliced.remove(ref)
        for slot, v in zip(i.outs, i.eqn.outvars, strict=True):
            if slot not in stored:
                continue
            if slot in results and slot not in last_read:
                at_once += count(slot, v.aval, result_itemsize)
            else:
                held[slot] = count(slot, v.aval)
        peak = max(peak, sum(held.values()) + at_once)
        num_products += bool(count_flops(i.eqn))
        products_before.append(num_products)
        for slot in list(held):
            read = last_read.get(slot, number)
            if read <= number and num_products > products_before[read]:
                del held[slot]
    return peak


def _list_stored(program: FlatJaxpr, live: Sequence[Instruction]) -> set[int]:
    """Return the slots of the values that take memory of their own."""
    producers = {slot: i for i in live for slot in i.outs}
    stored = {ref for ref in program.outputs if isinstance(ref, int)}
    for i in live:
        name = i.eqn.primitive.name
        is_product = bool(count_flops(i.eqn))
        if is_product or i.has_jaxpr or name in REDUCTIONS or name in _LOOK_UPS:
            stored.update(i.outs)
        if is_product:
            stored.update(_follow_operand(slot, producers) for slot in i.reads)
    return stored.intersection(producers)


def _follow_operand(slot: int, producers: Mapping[int, Instruction]) -> int:
    """Return the value that a product reads, before it was transposed or reshaped."""
    while slot in producers and producers[slot].eqn.primitive.name in _MOVED:
        reads = producers[slot].reads
        if not reads:
            break
        slot = reads[0]
    return slot


def _find_last_reads(
    live: Sequence[Instruction], stored: Set[int], sliced: Set[int]
) -> dict[int, int]:
    """Return the number of the last instruction that reads each stored value or copied argument.

    An instruction whose results are not stored is fused into its readers.
    """
    sources = {slot: frozenset({slot}) for slot in sliced}
    last_read = dict[int, int]()
    for number, i in enumerate(live):
        read = frozenset(_list_sources(i, sources))
        if not stored.isdisjoint(i.outs):
            last_read.update(dict.fromkeys(read, number))
        for slot in i.outs:
            sources[slot] = frozenset({slot}) if slot in stored else read
    return last_read


def _list_sources(i: Instruction, sources: Mapping[int, frozenset[int]]) -> Iterator[int]:
    for slot in i.reads:
        yield from sources.get(slot, ())


def _local_bytes(aval: Any, spec: Spec, mesh: Mesh, itemsize: int | None) -> int:
    """Return the bytes of one device's part of an array; 0 for a random key."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return local_elements(aval.shape, spec, mesh) * (itemsize or dtype.itemsize)
