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
these products are held until the end.

The splits of values follow from the splits of the arguments (`zerojax.activations.flow`). In an
island, a `jax.shard_map`, shapes are one device's. The copies that XLA adds to change an array's
layout are not counted, nor are buffers of kernels.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    flatten,
    list_regions,
)
from zerojax.sharding import pad_spec, parse_axes

_CALLS = CUSTOM_DERIVATIVES | {REMAT}
_REGIONS = frozenset({"scan", "cond", "shard_map"})
_COLLECTIVES = frozenset({"all_gather", "all_to_all", "reduce_scatter", "psum", "ppermute"})
_READS_ARRAYS = _REGIONS | _COLLECTIVES | {"dot_general", "gather", "sort", "top_k"}
"""Equations whose operands are arrays in memory, besides kernels."""
_MAKES_ARRAYS = _READS_ARRAYS | REDUCTIONS | {"while", "cumsum"}
"""Equations whose results are arrays in memory, besides kernels."""
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


def find_peak_bytes(
    jaxpr: jex.ClosedJaxpr,
    splits: Sequence[Split | None],
    sizes: Mapping[str, int],
    split_by_shape: Callable[[Sequence[int]], Split],
    late: Sequence[int] = (),
) -> int:
    """Return the most bytes that a function's arrays hold at one time on a device.

    Its arguments and results are not included.

    Args:
      jaxpr: the traced function.
      splits: split of each argument, or None if it is unknown.
      sizes: sizes of the mesh axes, `mesh.shape`.
      split_by_shape: split of a value whose split does not follow from those of the arguments.
      late: positions of the results that are gradients of weights.
    """
    program = _inline(flatten(jaxpr.jaxpr, jaxpr.consts))
    program = _delay(program, [program.outputs[n] for n in late])
    return _Memory(sizes, split_by_shape).peak(program, splits, with_results=False)


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array: its bytes, and the numbers of the equations that need it first and last."""

    num_bytes: int
    first: int
    last: int


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
        self, program: FlatJaxpr, splits: Sequence[Split | None], with_results: bool = True
    ) -> int:
        """Return the most bytes of a program's arrays at one time, without its arguments."""
        instructions = program.live(program.outputs)
        program = dataclasses.replace(program, instructions=instructions)
        facts = self.analysis.run(program, splits)
        owners = _list_owners(program)
        arrays = self._arrays(program, facts, owners)
        if not with_results:
            for ref in program.outputs:
                if isinstance(ref, int):
                    arrays.pop(owners[ref], None)
            for slot in _sources(program, owners):
                arrays.pop(slot, None)
        changes = [0] * (len(instructions) + 2)
        for array in arrays.values():
            changes[array.first] += array.num_bytes
            changes[array.last + 1] -= array.num_bytes
        held = itertools.accumulate(changes)
        peak = 0
        for i, outside in zip(instructions, held, strict=False):
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
            if is_island:
                operands = self.analysis.of_shards(i.eqn, operands)
            if region.is_loop:
                consts, carry, xs = region.split(operands)
                operands = [*consts, *carry, *map(self.analysis.sliced, xs)]
                # A loop over layers stacks the gradients of their weights.
                program = _delay(program, program.outputs[len(region.carried) :])
                result_bytes = 0  # a slice of them is an array of its own
            memory = _Memory(self.sizes, None) if is_island else self
            peak = max(peak, memory.peak(program, operands))
        return max(0, peak - result_bytes)

    def _arrays(
        self, program: FlatJaxpr, facts: Mapping[int, Any], owners: Mapping[int, int]
    ) -> dict[int, _Array]:
        """Return the arrays of a program, by slot."""
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
                    arrays[out] = _Array(self._num_bytes(v.aval, split), first, last)
                read_at = max(read_at, last if first is None else first)
            for slot in i.reads:
                last_reads[owners[slot]] = max(last_reads.get(owners[slot], 0), read_at)
        return arrays

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

    def _num_bytes(self, aval: Any, split: Split | None) -> int:
        """Return a device's bytes of a value."""
        dtype = getattr(aval, "dtype", None)
        if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
            return 0
        if self.split_by_shape is not None:
            if split is None:
                split = self.split_by_shape(aval.shape)
            elif all(entry is ANY for entry in split):
                return 0  # made of no data
        axes = [axis for entry in split or () if entry is not ANY for axis in entry]
        num_shards = math.prod(self.sizes[axis] for axis in axes)
        return math.prod(aval.shape) * dtype.itemsize // num_shards


def _sources(program: FlatJaxpr, owners: Mapping[int, int]) -> set[int]:
    """Return the stacks of a loop that become results by fused equations: stacks of gradients."""
    makers = {out: i for i in program.instructions for out in i.outs}
    pending = [ref for ref in program.outputs if isinstance(ref, int)]
    sources = set[int]()
    while pending:
        slot = owners[pending.pop()]
        i = makers.get(slot)
        if i is None:
            continue
        if i.eqn.primitive.name == "scan":
            sources.add(slot)
        elif not _makes_arrays(i):
            pending += i.reads
    return sources


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
    """Return, for each slot, the slot whose array it is in: its own, or another one's."""
    owners = {slot: slot for slot in program.inputs}
    for i in program.instructions:
        owners.update((out, out) for out in i.outs)
        shared: Sequence[Ref] = ()  # operands in whose memory the first results are
        if i.eqn.primitive.name in _VIEWS | _UPDATES:
            shared = i.ins[:1]
        elif i.eqn.primitive.name == "optimization_barrier":
            shared = i.ins
        elif i.eqn.primitive.name == "scan":
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
    """Return a program in which equations that only these outputs need come last."""
    early = program.live([ref for ref in program.outputs if ref not in outputs])
    computed = {out for i in early for out in i.outs}
    late = [i for i in program.live(program.outputs) if computed.isdisjoint(i.outs)]
    return dataclasses.replace(program, instructions=(*early, *late))
