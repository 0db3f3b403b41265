"""Bytes that tensor parallelism sends in a traced function, given the splits of its inputs.

`zerojax.activations.flow` determines how each value is split. If `tensor` splits a summed dim, each
device has a partial sum, y{U_tensor}, and the partitioner adds the partial sums:

    y[B, T, H]{U_tensor} -> y[B, T, H]             all_reduce, where a complete value is read
    y[B, T, H]{U_tensor} -> y[B, T_tensor, H]      reduce_scatter, where a constraint splits it
    z[B, T_tensor, H]    -> z[B, T, H]             all_gather, where a constraint unsplits it
    the rings of `zerojax.activations.rings`       permute

Partial sums are reduced once, however many equations read the value, and partial sums that are
added together are reduced after the addition: cotangents of the queries, keys and values make one
all_reduce. In a derivative this yields Megatron's collectives, those of sequence parallelism, and
those of an embedding and a head that are split by the vocabulary. Recomputed values are sent again.

For n bytes a ring sends n (t-1)/t in a gather or a scatter, twice that in an all_reduce, and n in
each permute. Where the rules of flow leave a choice, a value is assumed to be split like the values
that it meets.
"""

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.activations.flow import ANY, Split, SplitAnalysis, infer_output_splits
from zerojax.jaxprs import ENTERED, Analysis, flatten, list_regions
from zerojax.sharding import TENSOR, Spec, pad_spec, parse_axes

_SUMS = frozenset(
    {
        "add",
        "sub",
        "add_any",
        "neg",
        "reshape",
        "transpose",
        "squeeze",
        "broadcast_in_dim",
        "name",
        "copy",
    }
)
"""Equations that act on partial sums as on the sum."""
_REDUCED = ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin")
_INSIDE = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
} | {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "ppermute": "permute",
}
"""Collectives that a `jax.shard_map` calls explicitly."""


class _Value:
    """A value's split, whether it is a partial sum per device, and how often it is computed."""

    __slots__ = ("is_part", "split", "times")

    def __init__(self, split: Split, is_part: bool = False, times: float = 1) -> None:
        self.split = split
        self.is_part = is_part
        self.times = times


def sent_over_tensor(jaxpr: Any, inputs: Sequence[Spec | None], mesh: Mesh) -> dict[str, float]:
    """Return the bytes that each device sends over `tensor`, by collective.

    The keys are "all_gather", "reduce_scatter", "all_reduce" and "permute".

    Args:
      jaxpr: closed jaxpr of a derivative.
      inputs: spec of each argument, one entry per dim, or None if it is split like the values that
        it meets.
      mesh: the device mesh.
    """
    counter = TensorTrafficCounter(mesh.shape)
    program = flatten(jaxpr.jaxpr, jaxpr.consts)
    avals: list[Any] = [v.aval for v in jaxpr.jaxpr.invars]
    values = list[_Value]()
    for spec, aval in zip(inputs, avals, strict=True):
        split = (ANY,) * _ndim(aval) if spec is None else tuple(map(parse_axes, spec))
        values.append(_Value(split))
    outs = counter.results(program, counter.run(program, values))
    counter.add_all_parts(outs, jaxpr.jaxpr.outvars)
    return dict(counter.sent)


def _ndim(aval: Any) -> int:
    return len(getattr(aval, "shape", ()))


class TensorTrafficCounter(Analysis[_Value]):
    """Track splits through equations, and add up the bytes that are sent.

    Attributes:
      sent: bytes that each device sends, by collective.
    """

    enters = ENTERED["traffic"]

    def __init__(self, sizes: Mapping[str, int], times: float = 1) -> None:
        """Track values over a mesh of these axis sizes, in a jaxpr that runs `times` times."""
        self.sizes = sizes
        self.tensor = sizes[TENSOR]
        self.times = times
        self.sent: collections.Counter[str] = collections.Counter()

    def constant(self, value: Any) -> _Value:
        """Return the value of a constant, with ANY in every dim."""
        return _Value((ANY,) * jnp.ndim(value))

    def apply(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> list[_Value]:
        """Return the results of an equation, and count the bytes that it sends."""
        if eqn.primitive.name == "sharding_constraint":
            return [self.constrained(eqn, ins[0])]
        if eqn.primitive.name not in _SUMS:
            self.add_all_parts(ins, eqn.invars)
        self.gather_operand(eqn, ins)
        splits = self.splits(eqn, [v.split for v in ins])
        return [_Value(split, self.is_part(eqn, ins), self.times) for split in splits]

    # --- control flow: a call keeps partial sums; other regions read complete values --------------

    def scan(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> list[_Value]:
        """Return the results of a loop, whose body sends its bytes in each iteration.

        A sum to which a loop only adds partial sums is reduced after the loop. Once the splits are
        known, every carried value is assumed to be a partial sum; each round drops those that the
        body reads in full.
        """
        self.add_all_parts(ins, eqn.invars)
        (region,) = list_regions(eqn)
        times = self.times * eqn.params["length"]
        consts, carry, xs = region.split(ins)
        splits = [v.split for v in carry]
        slices = [v.split[1:] for v in xs]
        sums: set[int] | None = None
        while True:
            counter = TensorTrafficCounter(self.sizes, times)
            carry = [_Value(split, n in (sums or ()), times) for n, split in enumerate(splits)]
            operands = [
                # Values that a loop reads in full in each iteration are reduced once.
                *(_Value(v.split, times=v.times) for v in consts),
                *carry,
                *(_Value(split, times=times) for split in slices),
            ]
            outs = counter.region(region, operands)
            # Unknown splits of a carry may be known after an iteration.
            pairs = zip(splits, outs, strict=False)
            after = [tuple(map(_first_known, split, out.split)) for split, out in pairs]
            stay = [n for n, v in enumerate(carry) if sums is None or v.is_part]
            next_sums = {n for n in stay if outs[n].is_part}
            if after == splits and next_sums == sums:
                break
            sums = next_sums if after == splits else None
            splits = after
        for n, (out, v) in enumerate(zip(outs, region.jaxpr.outvars, strict=True)):
            if n not in next_sums:
                counter.add_parts(out, v.aval)
        self.sent.update(counter.sent)
        carried = [_Value(split, n in next_sums, self.times) for n, split in enumerate(splits)]
        stacks = [_Value(((), *out.split), times=self.times) for out in outs[len(carry) :]]
        return [*carried, *stacks]

    def cond(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> list[_Value]:
        """Return the results of the branch that sends the most bytes."""
        self.add_all_parts(ins, eqn.invars)
        branches = list[tuple[TensorTrafficCounter, list[_Value]]]()
        for region in list_regions(eqn):
            counter = TensorTrafficCounter(self.sizes, self.times)
            outs = counter.region(region, [_Value(v.split, times=v.times) for v in ins])
            counter.add_all_parts(outs, region.jaxpr.outvars)
            branches.append((counter, outs))
        counter, outs = max(branches, key=lambda branch: sum(branch[0].sent.values()))
        self.sent.update(counter.sent)
        return outs

    def shard_map(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> list[_Value]:
        """Return the results of a shard_map, and count the collectives that it calls explicitly."""
        self.add_all_parts(ins, eqn.invars)
        (region,) = list_regions(eqn)
        splits = [v.split for v in ins]
        self.inside(region.jaxpr, SplitAnalysis(self.sizes).of_shards(eqn, splits), self.times)
        outs = list[_Value]()
        for n, split in enumerate(infer_output_splits(eqn, splits, self.sizes)):
            if split is None:
                spec = pad_spec(eqn.params["out_specs"][n], _ndim(eqn.outvars[n].aval))
                split = tuple(map(parse_axes, spec))
            outs.append(_Value(split, times=self.times))
        return outs

    # --- one equation --------------------------------------------------------------------------

    def gather_operand(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> None:
        """All-gather an operand that must be unsplit.

        This is the operand of a reshape across its shards, or one of two operands that are split in
        free dims.
        """
        if eqn.primitive.name == "reshape":
            is_unclear = infer_output_splits(eqn, [ins[0].split], self.sizes)[0] is None
        elif eqn.primitive.name == "dot_general":
            contract, batch = eqn.params["dimension_numbers"]
            # Both operands are split in a free dim.
            is_unclear = True
            for n, v in enumerate(ins):
                used = (*contract[n], *batch[n])
                if not any(_has(entry) for d, entry in enumerate(v.split) if d not in used):
                    is_unclear = False
        else:
            return
        v = ins[0]
        if is_unclear and any(map(_has, v.split)):
            v.split = tuple(map(_without_tensor, v.split))
            self.send("all_gather", self.bytes(eqn.invars[0].aval, v.split), v.times)

    def splits(self, eqn: jex.JaxprEqn, ins: Sequence[Split]) -> list[Split]:
        """Return how the results are split, with ANY in every dim if that is unclear."""
        outs = zip(infer_output_splits(eqn, ins, self.sizes), eqn.outvars, strict=True)
        return [(ANY,) * _ndim(v.aval) if split is None else split for split, v in outs]

    def is_part(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> bool:
        """Return whether the results are partial sums."""
        name = eqn.primitive.name
        if name in _SUMS:
            return any(v.is_part for v in ins)
        if name in _REDUCED:
            return any(_has(ins[0].split[d]) for d in eqn.params["axes"])
        if name == "dot_general":
            lhs, rhs = ins
            lhs_dims, rhs_dims = eqn.params["dimension_numbers"][0]
            lhs_entries = [lhs.split[d] for d in lhs_dims]
            return any(map(_has, [*lhs_entries, *(rhs.split[d] for d in rhs_dims)]))
        if name == "gather":  # a look-up in a table whose rows are split
            dims = eqn.params["dimension_numbers"].collapsed_slice_dims
            return any(_has(ins[0].split[d]) for d in dims)
        return False

    def constrained(self, eqn: jex.JaxprEqn, v: _Value) -> _Value:
        """Return a value with the split of a constraint."""
        out: Any = eqn.outvars[0].aval
        (split,) = self.splits(eqn, [v.split])
        was_split = any(map(_has, v.split))
        is_split = any(map(_has, split))
        if v.is_part and is_split and not was_split:
            num_bytes = self.bytes(out, split) * self.tensor
            self.send("reduce_scatter", num_bytes, self.times)
            return _Value(split, times=self.times)
        self.add_parts(v, out)
        if was_split and not is_split:
            self.send("all_gather", self.bytes(out, split), self.times)
        return _Value(split, times=self.times)

    def inside(self, jaxpr: jex.Jaxpr, splits: Sequence[Split | None], times: float) -> None:
        """Count the collectives that a shard_map calls explicitly, on the arrays of one device.

        Args:
          jaxpr: jaxpr inside of the shard_map.
          splits: how its arguments are split over the axes that are left to the partitioner.
          times: number of times that it runs.
        """
        env: dict[Any, Split | None] = dict(zip(jaxpr.invars, splits, strict=True))
        for eqn in jaxpr.eqns:
            ins = [
                (ANY,) * _ndim(v.aval) if isinstance(v, jex.Literal) else env.get(v)
                for v in eqn.invars
            ]
            kind = _INSIDE.get(eqn.primitive.name)
            outs = infer_output_splits(eqn, ins, self.sizes)
            env.update(zip(eqn.outvars, outs, strict=True))
            axes = parse_axes(eqn.params.get("axes", eqn.params.get("axis_name", ())))
            if kind is not None and TENSOR in axes:
                # The full array is the result of a gather, and the operand of a reduction.
                if kind == "all_gather":
                    arrays = zip(eqn.outvars, outs, strict=True)
                else:
                    arrays = zip(eqn.invars, ins, strict=True)
                num_bytes = sum(self.bytes(v.aval, split or ()) for v, split in arrays)
                # A permute sends its full operand.
                factor = {"all_reduce": 2, "permute": self.tensor / (self.tensor - 1)}.get(kind, 1)
                self.send(kind, num_bytes * factor, times)
            inner_times = times
            if eqn.primitive.name == "scan":
                inner_times *= eqn.params["length"]
            for inner in jex.jaxprs_in_params(eqn.params):
                inner_splits = ins if len(inner.invars) == len(ins) else [None] * len(inner.invars)
                self.inside(inner, inner_splits, inner_times)

    def add_all_parts(self, values: Sequence[_Value], atoms: Sequence[Any]) -> None:
        """Reduce the partial sums among values, whose variables are given."""
        for v, atom in zip(values, atoms, strict=True):
            self.add_parts(v, atom.aval)

    def add_parts(self, v: _Value, aval: Any) -> None:
        """All-reduce a value if it is a partial sum; afterwards it is complete for all readers."""
        if v.is_part:
            self.send("all_reduce", 2 * self.bytes(aval, v.split), v.times)
            v.is_part = False

    def bytes(self, aval: Any, split: Split) -> float:
        """Return the bytes of one device's shard."""
        axes = itertools.chain(*(entry for entry in split if entry is not ANY))
        shards = math.prod(self.sizes[axis] for axis in axes)
        return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize / shards

    def send(self, kind: str, num_bytes: float, times: float) -> None:
        """Count the bytes that a ring sends for an array of `num_bytes`."""
        self.sent[kind] += num_bytes * (self.tensor - 1) / self.tensor * times  # pyright: ignore[reportArgumentType]


def _has(entry: Any) -> bool:
    """Return whether `tensor` splits a dim."""
    return entry is not ANY and TENSOR in entry


def _without_tensor(entry: Any) -> Any:
    """Return the entry of a dim after a gather over `tensor`."""
    return tuple(axis for axis in entry if axis != TENSOR) if _has(entry) else entry


def _first_known(a: Any, b: Any) -> Any:
    return b if a is ANY else a
