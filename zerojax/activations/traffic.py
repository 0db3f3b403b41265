"""Bytes that tensor parallelism sends in a traced function, from how its inputs are split.

`zerojax.activations.flow` says how each value is split. Where `tensor` splits a dim that is summed, each device has a part of
the sum, y{U_tensor}, and the partitioner adds the parts:

    y[B, T, H]{U_tensor} -> y[B, T, H]             all_reduce, where a whole value is read
    y[B, T, H]{U_tensor} -> y[B, T_tensor, H]      reduce_scatter, where a constraint splits it
    z[B, T_tensor, H]    -> z[B, T, H]             all_gather, where a constraint makes it whole
    the rings of `zerojax.activations.rings`       permute

Parts are added once, however many equations read a value, and sums of parts are added before: cotangents of the queries, keys
and values make one all_reduce. So in a derivative these are Megatron's collectives, those of sequence parallelism, and those of
an embedding and a head that are split by the vocabulary; and what is computed again is sent again.

A ring sends of n bytes n (t-1)/t in a gather or a scatter, twice that in an all_reduce, and n in each permute. Where the rules
of flow leave a choice, a value is taken to be split as what it meets.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.activations.flow import ANY, Split, inside_of, outs_of
from zerojax.jaxprs import scan_arity
from zerojax.sharding import TENSOR, Spec, axes_of, pad_spec

_SUMS = frozenset(
    {"add", "sub", "add_any", "neg", "reshape", "transpose", "squeeze", "broadcast_in_dim", "name", "copy"}
)  # fmt: skip
"""Equations that act on parts of a sum as on the sum."""
_REDUCED = ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin")
_INSIDE = {"psum": "all_reduce", "psum_invariant": "all_reduce", "pmax": "all_reduce", "pmin": "all_reduce"} | {
    "all_gather": "all_gather", "all_gather_invariant": "all_gather", "reduce_scatter": "reduce_scatter", "ppermute": "permute"
}  # fmt: skip
"""Collectives that a `jax.shard_map` spells out."""


class _Value:
    """A value: how it is split, whether each device of a tensor group has a part of its sum, and how often it is made."""

    __slots__ = ("is_part", "split", "times")

    def __init__(self, split: Split, is_part: bool = False, times: float = 1) -> None:
        self.split, self.is_part, self.times = split, is_part, times


def sent_over_tensor(jaxpr: Any, inputs: Sequence[Spec | None], mesh: Mesh) -> dict[str, float]:
    """Return the bytes that each device sends over `tensor`, by collective: "all_gather", "reduce_scatter", "all_reduce"
    and "permute".

    Args:
      jaxpr: a closed jaxpr, of a derivative.
      inputs: of each argument its spec, one entry a dim, or None where it is split as what it meets.
      mesh: the device mesh.
    """
    walk = _Walk(mesh.shape)
    avals: list[Any] = [v.aval for v in jaxpr.jaxpr.invars]
    given = [
        _Value((ANY,) * _ndim(aval) if spec is None else tuple(map(axes_of, spec)))
        for spec, aval in zip(inputs, avals, strict=True)
    ]
    outs = walk.run(jaxpr.jaxpr, given, 1)
    for out, v in zip(outs, jaxpr.jaxpr.outvars, strict=True):
        walk.add_parts(out, v.aval)
    return dict(walk.sent)


def _ndim(aval: Any) -> int:
    return len(getattr(aval, "shape", ()))


class _Walk:
    """Follows splits through equations, and adds up what is sent."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Follow values over a mesh of these axes."""
        self.sizes, self.tensor = sizes, sizes[TENSOR]
        self.sent: collections.Counter[str] = collections.Counter()

    def run(self, jaxpr: jex.Jaxpr, inputs: Sequence[_Value], times: float) -> list[_Value]:
        """Return the results of a jaxpr that runs so many times."""
        env: dict[Any, _Value] = {v: _Value((ANY,) * _ndim(v.aval)) for v in jaxpr.constvars}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def value(atom: Any) -> _Value:
            return _Value((ANY,) * _ndim(atom.aval)) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.apply(eqn, [value(v) for v in eqn.invars], times), strict=True))
        return [value(v) for v in jaxpr.outvars]

    def apply(self, eqn: jex.JaxprEqn, ins: list[_Value], times: float) -> list[_Value]:
        """Return the results of one equation."""
        name, inner = eqn.primitive.name, list(jex.jaxprs_in_params(eqn.params))
        if name == "sharding_constraint":
            return [self.constrained(eqn, ins[0], times)]
        if name not in ("scan", "while", "cond", "shard_map") and len(inner) == 1 and len(inner[0].invars) == len(ins):
            return self.run(inner[0], ins, times)  # parts stay parts in a call
        if name not in _SUMS:
            for v, read in zip(ins, eqn.invars, strict=True):
                self.add_parts(v, read.aval)
        if name == "scan":
            return self.scan(eqn, ins, times)
        if name == "shard_map":
            self.inside(inner[0], inside_of(eqn, [v.split for v in ins]), times)
            specs = zip(eqn.params["out_specs"], eqn.outvars, outs_of(eqn, [v.split for v in ins], self.sizes), strict=True)
            return [
                _Value(tuple(map(axes_of, pad_spec(spec, _ndim(v.aval)))) if found is None else found, times=times)
                for spec, v, found in specs
            ]
        if name == "cond":
            return self.cond(eqn, ins, times)
        self.gather_operand(eqn, ins)
        splits = self.splits(eqn, [v.split for v in ins])
        return [_Value(s, self.is_part(eqn, ins), times) for s in splits]

    def gather_operand(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> None:
        """All_gather an operand that has to be whole: of a reshape across its shards, or of two that are split in free dims."""
        if eqn.primitive.name == "reshape":
            is_whole = outs_of(eqn, [ins[0].split], self.sizes)[0] is not None
        elif eqn.primitive.name == "dot_general":
            contract, batch = eqn.params["dimension_numbers"]
            taken = [{*c, *b} for c, b in zip(contract, batch, strict=True)]
            pairs = zip(ins, taken, strict=True)
            is_whole = not all(any(_has(e) and d not in t for d, e in enumerate(v.split)) for v, t in pairs)
        else:
            return
        v = ins[0]
        if not is_whole and any(map(_has, v.split)):
            v.split = tuple(tuple(a for a in e if a != TENSOR) if _has(e) else e for e in v.split)
            self.send("all_gather", self.bytes(eqn.invars[0].aval, v.split), v.times)

    def splits(self, eqn: jex.JaxprEqn, ins: Sequence[Split]) -> list[Split]:
        """Return how the results are split; where that is not clear, as what they meet."""
        outs = outs_of(eqn, ins, self.sizes)
        return [(ANY,) * _ndim(v.aval) if out is None else out for out, v in zip(outs, eqn.outvars, strict=True)]

    def is_part(self, eqn: jex.JaxprEqn, ins: Sequence[_Value]) -> bool:
        """Tell whether the results are parts of sums."""
        name = eqn.primitive.name
        if name in _SUMS:
            return any(v.is_part for v in ins)
        if name in _REDUCED:
            return any(_has(ins[0].split[d]) for d in eqn.params["axes"])
        if name == "dot_general":
            contract = eqn.params["dimension_numbers"][0]
            return any(_has(v.split[d]) for v, dims in zip(ins, contract, strict=True) for d in dims)
        if name == "gather":  # a look-up in a table that is split by its rows
            return any(_has(ins[0].split[d]) for d in eqn.params["dimension_numbers"].collapsed_slice_dims)
        return False

    def constrained(self, eqn: jex.JaxprEqn, v: _Value, times: float) -> _Value:
        """Return a value as a constraint splits it."""
        out: Any = eqn.outvars[0].aval
        (split,) = self.splits(eqn, [v.split])
        was, now = (any(map(_has, s)) for s in (v.split, split))
        if v.is_part and now and not was:
            whole = self.bytes(out, split) * self.tensor
            self.send("reduce_scatter", whole, times)
            return _Value(split, times=times)
        self.add_parts(v, out)
        if was and not now:
            self.send("all_gather", self.bytes(out, split), times)
        return _Value(split, times=times)

    def scan(self, eqn: jex.JaxprEqn, ins: Sequence[_Value], times: float) -> list[_Value]:
        """Return the results of a loop, whose body sends what it sends in each iteration."""
        num_consts, num_carry = scan_arity(eqn.params, len(ins))
        body, length = eqn.params["jaxpr"].jaxpr, eqn.params["length"]
        carry = [v.split for v in ins[num_consts : num_consts + num_carry]]
        fixed, slices = [v.split for v in ins[:num_consts]], [v.split[1:] for v in ins[num_consts + num_carry :]]
        sums: set[int] | None = None  # what a loop only adds parts to is reduced after it
        while True:
            walk = _Walk(self.sizes)
            made = [v.times for v in ins[:num_consts]]  # what a loop reads whole each time is made whole once
            consts = [_Value(s, times=n) for s, n in zip(fixed, made, strict=True)]
            carried = [_Value(s, n in (sums or ()), times * length) for n, s in enumerate(carry)]
            outs = walk.run(body, [*consts, *carried, *(_Value(s, times=times * length) for s in slices)], times * length)
            # What is not known of a carry is known after an iteration.
            after = [tuple(map(_first_known, s, out.split)) for s, out in zip(carry, outs, strict=False)]
            found = {n for n, v in enumerate(carried) if outs[n].is_part and (sums is None or (n in sums and v.is_part))}
            if after == carry and found == sums:
                break
            carry, sums = after, found if after == carry else None
        assert sums is not None
        for n, (out, v) in enumerate(zip(outs, body.outvars, strict=True)):
            if n not in sums:
                walk.add_parts(out, v.aval)
        self.sent.update(walk.sent)
        stacked = [_Value(((), *out.split), times=times) for out in outs[num_carry:]]
        return [*(_Value(s, n in sums, times) for n, s in enumerate(carry)), *stacked]

    def cond(self, eqn: jex.JaxprEqn, ins: Sequence[_Value], times: float) -> list[_Value]:
        """Return the results of the branch that sends most."""
        runs = list[tuple[float, _Walk, list[_Value]]]()
        for branch in eqn.params["branches"]:
            walk = _Walk(self.sizes)
            outs = walk.run(branch.jaxpr, [_Value(v.split, times=v.times) for v in ins[1:]], times)
            for out, v in zip(outs, branch.jaxpr.outvars, strict=True):
                walk.add_parts(out, v.aval)
            runs.append((sum(walk.sent.values()), walk, outs))
        _, walk, outs = max(runs, key=lambda run: run[0])
        self.sent.update(walk.sent)
        return outs

    def inside(self, jaxpr: jex.Jaxpr, splits: Sequence[Split | None], times: float) -> None:
        """Count the collectives that a shard_map spells out, on the arrays of one device.

        Args:
          jaxpr: inside of it.
          splits: how its arguments are split over axes that are left to the partitioner.
          times: how often it runs.
        """
        env: dict[Any, Split | None] = dict(zip(jaxpr.invars, splits, strict=True))
        for eqn in jaxpr.eqns:
            ins = [(ANY,) * _ndim(v.aval) if isinstance(v, jex.Literal) else env.get(v) for v in eqn.invars]
            kind, outs = _INSIDE.get(eqn.primitive.name), outs_of(eqn, ins, self.sizes)
            env.update(zip(eqn.outvars, outs, strict=True))
            axes = axes_of(eqn.params.get("axes", eqn.params.get("axis_name", ())))
            if kind is not None and TENSOR in axes:
                # The whole is the result of a gather, and the operand of a reduction.
                arrays = zip(eqn.outvars, outs, strict=True) if kind == "all_gather" else zip(eqn.invars, ins, strict=True)
                num_bytes = sum(self.bytes(v.aval, split or ()) for v, split in arrays)
                # A permute sends all of what it is given.
                factor = {"all_reduce": 2, "permute": self.tensor / (self.tensor - 1)}.get(kind, 1)
                self.send(kind, num_bytes * factor, times)
            for inner in jex.jaxprs_in_params(eqn.params):
                splits = ins if len(inner.invars) == len(ins) else [None] * len(inner.invars)
                self.inside(inner, splits, times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1))

    def add_parts(self, v: _Value, aval: Any) -> None:
        """All_reduce a value of which each device has a part; afterwards it is whole for whoever reads it."""
        if v.is_part:
            self.send("all_reduce", 2 * self.bytes(aval, v.split), v.times)
            v.is_part = False

    def bytes(self, aval: Any, split: Split) -> float:
        """Return the bytes of one device's shard."""
        shards = math.prod(self.sizes[axis] for entry in split if entry is not ANY for axis in entry)
        return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize / shards

    def send(self, kind: str, num_bytes: float, times: float) -> None:
        """Count what a ring sends of so many bytes."""
        self.sent[kind] += num_bytes * (self.tensor - 1) / self.tensor * times  # pyright: ignore[reportArgumentType]


def _has(entry: Any) -> bool:
    """Tell whether `tensor` splits a dim."""
    return entry is not ANY and TENSOR in entry


def _first_known(a: Any, b: Any) -> Any:
    return b if a is ANY else a
