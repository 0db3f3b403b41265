"""The largest number of bytes that the arrays of a traced function hold at one time on a device.

Results of products, look-ups, loops, sums, collectives and kernels are arrays in memory, from the
equation that computes them to the last equation that reads them. XLA fuses other equations into
their readers, so their results hold their operands instead. A fused result that a product, a loop,
a collective or an island reads is an array too:

    h = x W               an array
    a = gelu(h)           an array, since a product reads it
    y = x + a V           fused into its readers: it holds x and the array a V

Loops update their carry in place. Values made of no data, such as masks, are remade by each reader.
Nothing waits for the gradients of weights, and XLA runs their products last, so the operands of
these products are held until the end. If gradients are added to sums at once, they count at the
equation that computes them.

The splits of values follow from the splits of the arguments (`zerojax.activations.flow`). In an
island, a `jax.shard_map`, shapes are one device's. The copies that XLA adds to change an array's
layout are not counted, nor are buffers of kernels.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.activations import ANY, Split, SplitAnalysis
from zerojax.jaxprs import (
    CUSTOM_DERIVATIVES,
    REDUCTIONS,
    REMAT,
    FlatJaxpr,
    Instruction,
    Ref,
    count_flops,
    flatten,
    is_among,
    list_regions,
)
from zerojax.sharding import ActivationSpec, pad_spec, parse_axes

_CALLS = CUSTOM_DERIVATIVES | {REMAT}
_REGIONS = frozenset({"scan", "cond", "shard_map"})
_COLLECTIVES = frozenset({"all_gather", "all_to_all", "reduce_scatter", "psum", "ppermute"})
_READS_ARRAYS = _REGIONS | _COLLECTIVES | {"dot_general", "gather", "sort", "top_k"}
"""Equations whose operands are arrays in memory, besides kernels."""
_VIEWS = frozenset(
    {
        "copy",
        "expand_dims",
        "name",
        "pvary",
        "reduce_precision",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "stop_gradient",
    }
)
"""Equations whose result is in the operand's memory."""
_UPDATES = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})
"""Equations that write into their first operand."""
_MAKES_ARRAYS = _READS_ARRAYS | _UPDATES | REDUCTIONS | {"while", "cumsum"}
"""Equations whose results are arrays in memory, besides kernels."""


def find_peak_bytes(
    jaxpr: jex.ClosedJaxpr,
    splits: Sequence[Split | None],
    sizes: Mapping[str, int],
    split_by_shape: Callable[[Sequence[int]], Split],
    *,
    late: Sequence[int] = (),
    weights: Collection[int] = (),
    saved: Collection[int] = (),
    adds_results: bool = False,
    result_itemsize: int | None = None,
) -> int:
    """Return the most bytes that a function's arrays hold at one time on a device.

    Its other arguments are not included.

    Args:
      jaxpr: the traced function.
      splits: split of each argument, or None if it is unknown.
      sizes: sizes of the mesh axes, `mesh.shape`.
      split_by_shape: split of a value whose split does not follow from those of the arguments.
      late: positions of the results that are gradients of weights.
      weights: positions of the arguments that each product copies when it reads them.
      saved: positions of the arguments that are copied before the first equation that reads them.
      adds_results: whether results are added to sums as soon as they are computed, and count at
        that equation. Otherwise they are not included.
      result_itemsize: bytes of an element of such a result; None for those of its dtype.
    """
    program = _inline(flatten(jaxpr.jaxpr, jaxpr.consts))
    program = _delay(program, [program.outputs[n] for n in late])
    memory = _Memory(sizes, split_by_shape)
    facts = memory.analysis.run(program, splits)
    owners = _list_owners(program)
    arrays = memory.arrays(program, facts, owners, {program.inputs[n] for n in saved})
    for slot in _list_results(program, owners) & arrays.keys():
        array = arrays.pop(slot)
        if adds_results:
            itemsize = result_itemsize or array.itemsize
            arrays[slot] = dataclasses.replace(array, itemsize=itemsize, last=array.first)
    copies = memory.copies(program, facts, {program.inputs[n] for n in weights})
    return memory.peak(program, facts, arrays, copies)


def split_like_batch(spec: ActivationSpec, rows: int) -> Callable[[Sequence[int]], Split]:
    """Return a function that splits an array by its shape, as a batch if its dim 0 may be one.

    Args:
      spec: how activations are split.
      rows: number of rows of the batch.
    """
    return lambda shape: tuple(map(parse_axes, spec.given(tuple(shape), rows)))


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array on a device, and the numbers of the equations that need it first and last."""

    num_elements: int
    itemsize: int
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize


class _Memory:
    """The memory of programs on one device."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        split_by_shape: Callable[[Sequence[int]], Split] | None,
    ) -> None:
        """Count bytes over a mesh; `split_by_shape` is None in an island."""
        self.analysis = SplitAnalysis(sizes)
        self.sizes = sizes
        self.split_by_shape = split_by_shape

    def peak(
        self,
        program: FlatJaxpr,
        facts: Mapping[int, Any],
        arrays: Mapping[int, _Array],
        copies: Sequence[_Array] = (),
    ) -> int:
        """Return the most bytes that a program, with its regions, holds at one time."""
        changes = [0] * (len(program.instructions) + 2)
        for array in (*arrays.values(), *copies):
            changes[array.first] += array.num_bytes
            changes[array.last + 1] -= array.num_bytes
        held = itertools.accumulate(changes)
        peak = 0
        for i, outside in zip(program.instructions, held, strict=False):
            inside = 0
            if i.eqn.primitive.name in _REGIONS:
                results = sum(arrays[out].num_bytes for out in i.outs if out in arrays)
                inside = self._inside(i, [self.analysis.read(ref, facts) for ref in i.ins], results)
            peak = max(peak, outside + inside)
        return peak

    def _inside(self, i: Instruction, ins: Sequence[Split | None], result_bytes: int) -> int:
        """Return the bytes that an equation's regions hold in addition to its results."""
        is_island = i.eqn.primitive.name == "shard_map"
        peak = 0
        for region in list_regions(i.eqn):
            operands = list(ins[region.first :])
            program = _inline(region.flatten())
            late: Sequence[Ref] = ()
            if is_island:
                operands = self.analysis.of_shards(i.eqn, operands)
            if region.is_loop:
                consts, carry, xs = region.split(operands)
                operands = [*consts, *carry, *map(self.analysis.sliced, xs)]
                # A loop over layers stacks the gradients of their weights.
                late = program.outputs[len(region.carried) :]
                result_bytes = 0  # a slice of them is an array of its own
            program = _delay(program, late)
            memory = _Memory(self.sizes, None) if is_island else self
            facts = memory.analysis.run(program, operands)
            arrays = memory.arrays(program, facts, _list_owners(program))
            peak = max(peak, memory.peak(program, facts, arrays))
        return max(0, peak - result_bytes)

    def arrays(
        self,
        program: FlatJaxpr,
        facts: Mapping[int, Any],
        owners: Mapping[int, int],
        saved: Set[int] = frozenset(),
    ) -> dict[int, _Array]:
        """Return the arrays of a program, and of the arguments in `saved`, by slot."""
        instructions = program.instructions
        first_reads = dict[int, int]()
        carried = set[int]()
        for n, i in enumerate(instructions):
            for slot in i.reads if _reads_arrays(i) else ():
                first_reads.setdefault(owners[slot], n)
            carried.update(owners[slot] for slot in _carry(i))
        results = {owners[ref] for ref in program.outputs if isinstance(ref, int)}
        last_reads = dict.fromkeys(results, len(instructions))
        arrays = dict[int, _Array]()
        for n, i in reversed(list(enumerate(instructions))):
            read_at = n
            for number, (out, v) in enumerate(zip(i.outs, i.eqn.outvars, strict=True)):
                if owners[out] != out:
                    continue
                last = last_reads.get(out, n)
                first: int | None = None
                if _makes_arrays(i):
                    first = n
                elif out in results or out in carried or not _is_fill(i):
                    # Its operands are read when the array is computed, before its first reader.
                    first = first_reads.get(out, n if out in results else None)
                if first is not None:
                    split = self._split(i, number, facts[out])
                    arrays[out] = self._array(v.aval, split, first, last)
                read_at = max(read_at, last if first is None else first)
            for slot, v in _list_reads(i):
                last_reads[owners[slot]] = max(last_reads.get(owners[slot], 0), read_at)
                if slot in saved:
                    arrays[slot] = self._array(v.aval, facts[slot], n, last_reads[slot])
        return arrays

    def copies(
        self, program: FlatJaxpr, facts: Mapping[int, Any], weights: Set[int]
    ) -> list[_Array]:
        """Return the copies of weights, one for each product that reads them."""
        copies = list[_Array]()
        for n, i in enumerate(program.instructions):
            if count_flops(i.eqn):
                for slot, v in _list_reads(i):
                    if slot in weights:
                        copies.append(self._array(v.aval, facts[slot], n, n))
        return copies

    def _split(self, i: Instruction, number: int, split: Split | None) -> Split | None:
        """Return the split of a result; for an island or a stack, at least the known part."""
        aval: Any = i.eqn.outvars[number].aval
        if split is not None or self.split_by_shape is None:
            return split
        if i.eqn.primitive.name == "shard_map":
            spec = pad_spec(i.eqn.params["out_specs"][number], len(aval.shape))
            return tuple(map(parse_axes, spec))
        if i.eqn.primitive.name == "scan" and number >= len(list_regions(i.eqn)[0].carried):
            return ((), *self.split_by_shape(aval.shape[1:]))
        return None

    def _array(self, aval: Any, split: Split | None, first: int, last: int) -> _Array:
        """Return a value as an array of one device."""
        dtype = getattr(aval, "dtype", None)
        if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
            return _Array(0, 0, first, last)
        if self.split_by_shape is not None:
            if split is None:
                split = self.split_by_shape(aval.shape)
            elif all(entry is ANY for entry in split):
                return _Array(0, 0, first, last)  # made of no data
        axes = [axis for entry in split or () if entry is not ANY for axis in entry]
        num_shards = math.prod(self.sizes[axis] for axis in axes)
        return _Array(math.prod(aval.shape) // num_shards, dtype.itemsize, first, last)


def _list_results(program: FlatJaxpr, owners: Mapping[int, int]) -> set[int]:
    """Return the slots of the arrays that hold a program's results.

    A loop's stacks that become results by fused equations, stacks of gradients, are included.
    """
    makers = {out: i for i in program.instructions for out in i.outs}
    pending = [owners[ref] for ref in program.outputs if isinstance(ref, int)]
    results = set(pending)
    while pending:
        slot = pending.pop()
        i = makers.get(slot)
        if i is None:
            continue
        if i.eqn.primitive.name == "scan":
            results.add(slot)
        elif not _makes_arrays(i):
            pending += (owners[slot] for slot in i.reads)
    return results


def _list_reads(i: Instruction) -> list[tuple[int, Any]]:
    """Return the slots that an equation reads, with the variables in their places."""
    pairs = zip(i.ins, i.eqn.invars, strict=True)
    return [(ref, v) for ref, v in pairs if isinstance(ref, int)]


def _reads_arrays(i: Instruction) -> bool:
    return i.has_jaxpr or i.eqn.primitive.name in _READS_ARRAYS


def _makes_arrays(i: Instruction) -> bool:
    return i.has_jaxpr or i.eqn.primitive.name in _MAKES_ARRAYS


def _is_fill(i: Instruction) -> bool:
    """Return whether a result repeats one number, which readers do without an array."""
    return i.eqn.primitive.name == "broadcast_in_dim" and not i.eqn.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]


def _carry(i: Instruction) -> list[int]:
    """Return the slots that a loop updates in place."""
    if i.eqn.primitive.name != "scan":
        return []
    (region,) = list_regions(i.eqn)
    return [ref for ref in region.split(i.ins)[1] if isinstance(ref, int)]


def _list_owners(program: FlatJaxpr) -> dict[int, int]:
    """Return, for each slot, the slot whose array it is in: its own, or another one's.

    An update of a value that only repeats one number makes an array.
    """
    owners = {slot: slot for slot in program.inputs}
    fills = set[int]()
    for i in program.instructions:
        owners.update((out, out) for out in i.outs)
        if _is_fill(i):
            fills.update(i.outs)
        shared: Sequence[Ref] = ()  # operands in whose memory the first results are
        name = i.eqn.primitive.name
        is_update = name in _UPDATES and not is_among(i.ins[0], fills)
        if name in _VIEWS or is_update:
            shared = i.ins[:1]
        elif name == "optimization_barrier":
            shared = i.ins
        elif name == "scan":
            (region,) = list_regions(i.eqn)
            shared = region.split(i.ins)[1]
        for ref, out in zip(shared, i.outs, strict=False):
            if isinstance(ref, int):
                owners[out] = owners[ref]
    return owners


def _inline(program: FlatJaxpr) -> FlatJaxpr:
    """Return a program with the equations of rematerialized regions and of calls in it."""
    slots = [*program.inputs, *itertools.chain(*(i.outs for i in program.instructions))]
    unused = itertools.count(1 + max(slots, default=0))

    def expand(instructions: Sequence[Instruction], names: dict[int, Ref]) -> Iterator[Instruction]:
        for i in instructions:
            ins = _renamed(i.ins, names)
            if i.eqn.primitive.name not in _CALLS:
                outs: Any = _renamed(i.outs, names)
                yield dataclasses.replace(i, ins=ins, outs=outs)
                continue
            (region,) = list_regions(i.eqn)
            called = region.flatten()
            inner: dict[int, Ref] = dict(zip(called.inputs, ins, strict=True))
            for each in called.instructions:
                inner.update((out, next(unused)) for out in each.outs)
            yield from expand(called.instructions, inner)
            names.update(zip(i.outs, _renamed(called.outputs, inner), strict=True))

    names = dict[int, Ref]()
    instructions = tuple(expand(program.instructions, names))
    outputs = _renamed(program.outputs, names)
    return dataclasses.replace(program, instructions=instructions, outputs=outputs)


def _renamed(refs: Sequence[Ref], names: Mapping[int, Ref]) -> tuple[Ref, ...]:
    return tuple(names.get(ref, ref) if isinstance(ref, int) else ref for ref in refs)


def _delay(program: FlatJaxpr, outputs: Sequence[Ref]) -> FlatJaxpr:
    """Return a program without unused equations, in which those of these outputs come last."""
    early = program.live([ref for ref in program.outputs if ref not in outputs])
    computed = {out for i in early for out in i.outs}
    late = [i for i in program.live(program.outputs) if computed.isdisjoint(i.outs)]
    return dataclasses.replace(program, instructions=(*early, *late))
