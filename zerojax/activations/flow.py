"""How every value of a traced function is split, given the splits of its inputs.

The partitioner decides this in the compiled program. It propagates the specs of the inputs forward
through the equations, in the notation of `zerojax.sharding`:

    qkv[B_fsdp, T, F_tensor] = x[B_fsdp, T, H] W[H, F_tensor]          free dims keep their axes
    y[B_fsdp, T, H] = a[B_fsdp, T, F_tensor] V[F_tensor, H]            an axis of both contracted
                                                                       dims is summed over
    q[B, T, heads_tensor, w] = reshape(qkv[B, T, F_tensor])            a dim that is reshaped to
                                                                       several keeps its axes in
                                                                       the first of them
    s[B, T, S_tensor] + m[T, S] -> [B, T, S_tensor]                    a split dim meets an
                                                                       unsplit one

`flow` returns what these rules imply, and None where they leave a choice: two operands whose splits
differ, an axis that would split two dims of a result, a split that a reshape or a slice does not
preserve, an equation that is not in the table. Values that are made of no data (an iota, a mask of
random bits, a dim made by a broadcast) are split like the values that they meet; on their own
nothing is known about them.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.jaxprs import (
    ENTERED,
    POINTWISE,
    REDUCTIONS,
    Analysis,
    FlatJaxpr,
    Instruction,
    manual_axes,
)
from zerojax.sharding import (
    CONTEXT,
    TENSOR,
    Spec,
    pad_spec,
    parse_axes,
)

ANY: Any = object()
"""Entry of a dim that takes the split of the values that it meets."""
Split = tuple[Any, ...]
"""For each dim, the mesh axes that split it, as a tuple, or ANY."""
_Rule = Callable[[jex.JaxprEqn, Sequence[Split], Mapping[str, int]], Sequence[Split | None]]


class _Unclear(Exception):  # noqa: N818  # not an error: it ends a rule that leaves a choice
    """The rules leave a choice."""


def flow(
    program: FlatJaxpr,
    inputs: Sequence[Spec | None],
    axis_sizes: Mapping[str, int],
    apart: Mapping[int, FlatJaxpr] = MappingProxyType({}),
) -> dict[int, Spec | None]:
    """Return the spec of every slot of a program, or None where the partitioner has a choice.

    Args:
      program: a flattened function.
      inputs: spec of each input slot, one entry per dim, or None if unknown.
      axis_sizes: sizes of the mesh axes, `mesh.shape`.
      apart: for equations that are taken apart, and therefore return more results, their programs
        by the slot of the first result.
    """
    input_splits: list[Split | None] = [
        None if spec is None else tuple(map(parse_axes, spec)) for spec in inputs
    ]
    avals = dict[int, Any]()
    for i in program.instructions:
        # The additional results of an equation that is taken apart come last.
        for out, v in zip(i.outs, i.eqn.outvars, strict=False):
            avals[out] = v.aval
    splits = SplitAnalysis(axis_sizes, apart).run(program, input_splits)
    return {slot: split_to_spec(split, avals.get(slot)) for slot, split in splits.items()}


def has_island(program: FlatJaxpr) -> bool:
    """Return whether a program has a `jax.shard_map`, which may split a value by any dim."""
    return any(_is_or_has_island(i.eqn) for i in program.instructions)


def _is_or_has_island(eqn: jex.JaxprEqn) -> bool:
    if eqn.primitive.name == "shard_map":
        return True
    return any(_is_or_has_island(e) for j in jex.jaxprs_in_params(eqn.params) for e in j.eqns)


def split_to_spec(split: Split | None, aval: Any) -> Spec | None:
    """Return a split as a spec, or None if nothing is known about it."""
    if split is None:
        return None
    # If any dim is known, dims that nothing splits count as unsplit.
    open_dims = [dim for dim, entry in enumerate(split) if entry is ANY]
    is_open = any(aval is None or aval.shape[dim] != 1 for dim in open_dims)
    if is_open and not any(entry is not ANY and entry for entry in split):
        return None
    return as_spec(split)


def as_spec(split: Split) -> Spec:
    """Return a split as a spec in which ANY counts as unsplit."""
    spec = []
    for entry in split:
        if entry is ANY or not entry:
            spec.append(None)
        else:
            spec.append(entry[0] if len(entry) == 1 else tuple(entry))
    return tuple(spec)


def tensor_dims(split: Split) -> list[int]:
    """Return the dims that `tensor` splits."""
    return [d for d, entry in enumerate(split) if entry is not ANY and TENSOR in entry]


def infer_output_splits(
    eqn: jex.JaxprEqn,
    ins: Sequence[Split | None],
    sizes: Mapping[str, int],
) -> list[Split | None]:
    """Return how the results of one equation are split, or None where that is unclear."""
    return SplitAnalysis(sizes).equation(eqn, ins)


class SplitAnalysis(Analysis[Split | None]):
    """Analysis of the split of every value; None where the rules leave a choice."""

    enters = ENTERED["flow"]

    def __init__(
        self,
        sizes: Mapping[str, int],
        apart: Mapping[int, FlatJaxpr] = MappingProxyType({}),
    ) -> None:
        """Track values over a mesh of these axis sizes; see `flow` for `apart`."""
        self.sizes = sizes
        self.apart = apart

    def constant(self, value: Any) -> Split:
        """Return the split of a constant, ANY in every dim."""
        return (ANY,) * jnp.ndim(value)

    def instruction(self, i: Instruction, ins: Sequence[Split | None]) -> list[Split | None]:
        """Return how the results of an instruction are split."""
        program = self.apart.get(i.outs[0]) if i.outs else None
        # In the equation's regions, the slots of `apart` mean other values.
        inner = SplitAnalysis(self.sizes)
        if program is None:
            return inner.equation(i.eqn, ins)
        return self.results(program, inner.run(program, ins))

    def equation(self, eqn: jex.JaxprEqn, ins: Sequence[Split | None]) -> list[Split | None]:
        """Return how the results of an equation are split; None where that is unclear."""
        try:
            outs = super().equation(eqn, ins)
        except _Unclear:
            return [None] * len(eqn.outvars)
        return [None if out is None or _is_twice(out) else out for out in outs]

    def apply(self, eqn: jex.JaxprEqn, ins: Sequence[Split | None]) -> Sequence[Split | None]:
        """Return how the results are split, by the rule of the primitive."""
        name = eqn.primitive.name
        free = [(ANY,) * _ndim(v) for v in eqn.outvars]
        # Each device computes the random bits that it needs from the key.
        if name.startswith("random_") or name == "iota":
            return free
        if name == "sharding_constraint" and ins[0] is None:
            return [_constrained_fully(eqn)]
        known = [split for split in ins if split is not None]
        if len(known) < len(ins) or name in self.enters:
            raise _Unclear
        rule = _RULES.get(name)
        if rule is not None:
            return rule(eqn, known, self.sizes)
        if all(entry is ANY for entry in itertools.chain(*known)):
            return free
        raise _Unclear

    def join(self, facts: Sequence[Split | None]) -> Split | None:
        """Return the common split of a value that has several origins."""
        known = [split for split in facts if split is not None]
        return _meet_all(known) if len(known) == len(facts) else None

    def sliced(self, fact: Split | None) -> Split | None:
        """Return the split of one entry of a stack."""
        return None if fact is None else _unsplit(fact, (0,))[1:]

    def stacked(self, fact: Split | None) -> Split | None:
        """Return the split of a stack of values."""
        return None if fact is None else ((), *fact)

    def of_shards(self, eqn: jex.JaxprEqn, ins: Sequence[Split | None]) -> list[Split | None]:
        """Return how the operands are split inside, over the axes left to the partitioner."""
        manual = manual_axes(eqn)

        def without_manual(entry: Any) -> Any:
            return entry if entry is ANY else tuple(axis for axis in entry if axis not in manual)

        return [None if split is None else tuple(map(without_manual, split)) for split in ins]

    def of_wholes(self, eqn: jex.JaxprEqn, outs: Sequence[Split | None]) -> list[Split | None]:
        """Return how the results are split, by their specs and by the splits inside."""
        manual = manual_axes(eqn)
        is_left = any(size > 1 and axis not in manual for axis, size in self.sizes.items())

        def joined(spec: PartitionSpec, split: Split | None, v: Any) -> Split | None:
            if split is None and is_left:
                return None
            if split is None:  # no axis is left to the partitioner
                split = ((),) * _ndim(v)
            # The axes of the shard_map come first: other axes split each of its devices' pieces.
            pairs = zip(map(parse_axes, pad_spec(spec, _ndim(v))), split, strict=True)
            return tuple((a or ANY) if b is ANY else (*a, *b) for a, b in pairs)

        return list(map(joined, eqn.params["out_specs"], outs, eqn.outvars))


def _ndim(v: Any) -> int:
    return len(getattr(v.aval, "shape", ()))


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _is_twice(split: Split) -> bool:
    """Return whether a mesh axis would split two dims."""
    axes = list(itertools.chain(*(entry for entry in split if entry is not ANY)))
    return len(set(axes)) < len(axes)


def _meet(a: Any, b: Any) -> Any:
    """Return the split of a dim whose split is `a` in one operand and `b` in another.

    Where one split begins with the other, each device cuts its own part of the larger piece.
    """
    if a is ANY or (b is not ANY and b[: len(a)] == a):
        return b
    if b is ANY or a[: len(b)] == b:
        return a
    raise _Unclear


def _meet_all(splits: Sequence[Split]) -> Split:
    """Return the common split of several operands of one shape."""
    result = splits[0]
    for split in splits[1:]:
        result = tuple(map(_meet, result, split))
    return result


def _unsplit(split: Split, dims: Sequence[int]) -> Split:
    """Return the split, after checking that these dims, which an equation needs unsplit, are.

    Raises:
      _Unclear: one of them is split.
    """
    if any(split[d] is not ANY and split[d] for d in dims):
        raise _Unclear
    return split


def _pointwise(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    shape = _shape(eqn.outvars[0])
    result: Split = (ANY,) * len(shape)
    for v, split in zip(eqn.invars, ins, strict=True):
        if len(split) not in (0, len(shape)):  # a bitcast to another width
            raise _Unclear
        if split:  # otherwise it is a scalar next to arrays
            # A dim of 1 is repeated along the dim that it meets.
            repeated = _changed_dims(_shape(v), shape)
            split = tuple(ANY if d in repeated else entry for d, entry in enumerate(split))
            result = tuple(map(_meet, result, split))
    return [result]


def _changed_dims(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the dims whose sizes differ."""
    return [d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]


def _transpose(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    return [tuple(ins[0][d] for d in eqn.params["permutation"])]


def _broadcast(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    old = _shape(eqn.invars[0])
    new = _shape(eqn.outvars[0])
    result = [ANY] * len(new)
    for d, new_d in enumerate(eqn.params["broadcast_dimensions"]):
        result[new_d] = ins[0][d] if old[d] == new[new_d] else ANY
    return [tuple(result)]


def _squeeze(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    return [tuple(entry for d, entry in enumerate(ins[0]) if d not in eqn.params["dimensions"])]


def _reshape(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    """Return the split of a reshape, whose dims fall into groups of equal products.

    Inside of a group, axes are kept if each shard is a run of consecutive elements.
    """
    old = _shape(eqn.invars[0])
    new = _shape(eqn.outvars[0])
    if eqn.params.get("dimensions") is not None or 0 in (*old, *new):
        raise _Unclear
    result: list[Any] = [ANY] * len(new)  # dims of 1 have nothing to split
    for old_dims, new_dims in _groups(old, new):
        old_entries = [(old[d], ins[0][d]) for d in old_dims]
        entries = _regrouped(old_entries, [new[d] for d in new_dims], sizes)
        for d, entry in zip(new_dims, entries, strict=True):
            result[d] = entry
    return [tuple(result)]


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of old and new dims with equal numbers of elements, in order.

    Dims of 1 are left out.
    """
    old_dims = [d for d, n in enumerate(old) if n != 1]
    new_dims = [d for d, n in enumerate(new) if n != 1]
    groups = list[tuple[list[int], list[int]]]()
    while old_dims:
        old_group = [old_dims.pop(0)]
        new_group = [new_dims.pop(0)]
        old_count = old[old_group[0]]
        new_count = new[new_group[0]]
        while old_count != new_count:
            if old_count > new_count:
                new_group.append(new_dims.pop(0))
                new_count *= new[new_group[-1]]
            else:
                old_group.append(old_dims.pop(0))
                old_count *= old[old_group[-1]]
        groups.append((old_group, new_group))
    return groups


def _regrouped(
    old: Sequence[tuple[int, Any]], new: Sequence[int], sizes: Mapping[str, int]
) -> list[Any]:
    """Return the entries of the dims `new` of a reshape, given the sizes and entries of `old`.

    Both hold the same elements.
    """
    if all(entry is ANY for _, entry in old):
        return [ANY] * len(new)
    axes = list[str]()
    is_run = True
    for size, entry in old:
        if entry is ANY or not entry:
            is_run = is_run and size == 1
            continue
        if not is_run:  # a dim before is not fully split, so shards are not contiguous
            raise _Unclear
        axes += entry
        is_run = math.prod(sizes[axis] for axis in entry) == size
    result = list[Any]()
    for n in new:
        entry = list[str]()
        while axes and n % sizes[axes[0]] == 0:
            n //= sizes[axes[0]]
            entry.append(axes.pop(0))
        if axes and n > 1:
            raise _Unclear
        result.append(tuple(entry))
    if axes:
        raise _Unclear
    return result


def _slice(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    """Return the split of the result of a slice, pad, concatenate or split.

    Dims whose size changes must be unsplit.
    """
    results = []
    for out in eqn.outvars:
        splits = list[Split]()
        for v, split in zip(eqn.invars, ins, strict=True):
            if len(split) != _ndim(out):  # a start, or a padding value
                continue
            changed = _changed_dims(_shape(v), _shape(out))
            _unsplit(split, changed)
            splits.append(tuple(() if d in changed else entry for d, entry in enumerate(split)))
        results.append(_meet_all(splits))
    return results


def _dynamic_slice(
    eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]
) -> list[Split]:
    return [_unsplit(ins[0], _changed_dims(_shape(eqn.invars[0]), _shape(eqn.outvars[0])))]


def _dynamic_update_slice(
    eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]
) -> list[Split]:
    operand, update = ins[:2]
    dims = _changed_dims(_shape(eqn.invars[0]), _shape(eqn.invars[1]))
    return [_meet_all([_unsplit(operand, dims), _unsplit(update, dims)])]


def _along(*names: str) -> _Rule:
    """Return the rule of an equation that keeps shapes and needs some dims unsplit.

    A parameter of the equation, one of `names`, gives these dims.
    """

    def rule(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
        dims = next(eqn.params[name] for name in names if name in eqn.params)
        split = _unsplit(_meet_all(ins), dims if isinstance(dims, Sequence) else (dims,))
        return [split] * len(eqn.outvars)

    return rule


def _fft(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    return [_unsplit(ins[0], range(len(ins[0]) - len(eqn.params["fft_lengths"]), len(ins[0])))]


def _top_k(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    last = len(ins[0]) - 1
    return [_unsplit(ins[0], (eqn.params.get("axis", last) % len(ins[0]),))] * len(eqn.outvars)


def _reduction(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    return [tuple(entry for d, entry in enumerate(ins[0]) if d not in eqn.params["axes"])]


def _dot_general(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    contract, batch = eqn.params["dimension_numbers"]
    first, second = _gather_context(ins, contract, batch)
    out = [_meet(first[i], second[j]) for i, j in zip(*batch, strict=True)]
    for n, split in enumerate((first, second)):
        used = (*contract[n], *batch[n])
        out += [entry for d, entry in enumerate(split) if d not in used]
    # An axis of a contracted dim disappears in a sum over devices. It must not also split a dim of
    # the result.
    summed = [_meet(first[i], second[j]) for i, j in zip(*contract, strict=True)]
    if _is_twice((*out, *summed)):
        raise _Unclear
    return [tuple(out)]


def _gather_context(
    ins: Sequence[Split], contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
) -> tuple[Split, Split]:
    """Return the splits of a product's operands, one of them gathered over `context` if needed.

    A product of tokens with tokens, as in attention that the model computes itself, has `context`
    in two dims: those of queries and of keys, or those of queries and of summed values. Queries
    keep their split, and keys and values are gathered.
    """
    first, second = ins
    is_free = list[bool]()
    for n, split in enumerate(ins):
        own_dims = [d for d, entry in enumerate(split) if _has_context(entry)]
        if len(own_dims) != 1 or own_dims[0] in batch[n]:
            return first, second
        is_free.append(own_dims[0] not in contract[n])
    if is_free[0]:
        return first, tuple(map(_without_context, second))
    if is_free[1]:
        return tuple(map(_without_context, first)), second
    return first, second


def _has_context(entry: Any) -> bool:
    return entry is not ANY and CONTEXT in entry


def _without_context(entry: Any) -> Any:
    return tuple(axis for axis in entry if axis != CONTEXT) if _has_context(entry) else entry


def _gather(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> list[Split]:
    """Return the split of a look-up: the indices' dims, and the dims that are taken in full.

    If the vocabulary is split, the result is a sum over devices.
    """
    table, ids = ins
    numbers = eqn.params["dimension_numbers"]
    shape = _shape(eqn.invars[0])
    slice_sizes = eqn.params["slice_sizes"]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    id_entries = iter(ids[:-1])
    table_dims = iter(d for d in range(len(table)) if d not in dropped)
    out = list[Any]()
    for d in range(_ndim(eqn.outvars[0])):
        if d not in numbers.offset_dims:
            out.append(next(id_entries))
            continue
        table_d = next(table_dims)
        if slice_sizes[table_d] != shape[table_d]:
            _unsplit(table, (table_d,))
        out.append(table[table_d])
    _unsplit(table, numbers.operand_batching_dims)
    if _is_twice((*out, *(table[d] for d in numbers.collapsed_slice_dims))):
        raise _Unclear
    return [tuple(out)]


def _fused_attention(
    eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]
) -> list[Split]:
    """Return the split of cuDNN's attention, for q, k, v[B, T, N, H] (or [B, N, T, H]).

    The output is split like q, and the logsumexp is [B, N, T]; backward returns dq, dk, dv.
    """
    seq = 2 if eqn.params["layout"] else 1
    for split in ins[:3]:
        _unsplit(split, (seq, 3))
    logsumexp = (ins[0][0], ins[0][3 - seq], ())
    return [logsumexp if _ndim(v) == 3 else ins[n] for n, v in enumerate(eqn.outvars)]


def _constraint(
    eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]
) -> list[Split | None]:
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return [None]
    split = list(ins[0])
    for d, entry in enumerate(pad_spec(spec, len(split))):
        if entry is not PartitionSpec.UNCONSTRAINED:
            split[d] = parse_axes(entry)
    return [tuple(split)]


def _constrained_fully(eqn: jex.JaxprEqn) -> Split | None:
    """Return the split that a constraint of every dim gives to a value of unknown split."""
    ndim = _ndim(eqn.outvars[0])
    (split,) = _constraint(eqn, [(ANY,) * ndim], {})
    return None if split is None or ANY in split else split


def _same(eqn: jex.JaxprEqn, ins: Sequence[Split], sizes: Mapping[str, int]) -> Sequence[Split]:
    return ins


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin", "reduce_xor"), _reduction),
    **dict.fromkeys(("slice", "pad", "concatenate", "split"), _slice),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("optimization_barrier", "device_put", "ppermute"), _same),
    "sort": _along("dimension"),
    "fft": _fft,
    "rev": _along("dimensions"),
    "top_k": _top_k,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
    "gather": _gather,
    "dot_product_attention_fwd_wrapper": _fused_attention,
    "dot_product_attention_bwd_wrapper": _fused_attention,
    "sharding_constraint": _constraint,
}
