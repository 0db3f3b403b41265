"""Keep gradients as each device's own sums, which are reduced only when the caller adds them up.

    g[D, F]{U_(data, fsdp)}    a pending sum over devices, held as an array: one row per device

    x[B_(data, fsdp), T, D], dy[B_(data, fsdp), T, F]
    x -> x[R_(data, fsdp), B / R, T, D]                     R batch shards; local
    g[R_(data, fsdp), D, F] = for each r: dot(x[r], dy[r])  local, and sum(g, 0) is the gradient

So M microbatches add R rows M times, and one reduction at the end replaces M reductions. A
partitioner has no such value: if an equation leaves a sum over devices pending, it reduces
immediately. So a derivative is traced, and rewritten backwards from its
gradients, as in `zerojax.grads.float32_grads`:

    sums over the batch    dot_general, convolutions, reduce_sum, scatter-add: mapped over R pieces
                           of the summed arrays
    their users            equations linear in the sums: mapped over R
    added values           gradients that do not depend on data, such as a penalty's: put in row 0
    `jax.shard_map`        the psum or psum_scatter over the batch's axes is left out, and the
                           result has one row per device

Loops, branches and rematerialized regions are entered: gradients that a loop carries or stacks have
rows. The loss and everything that forward computes stay the same: random masks, statistics over a
batch, token counts.

A sum is exact whichever dim is cut into R pieces, and it is local if that dim is the batch dim. The
position of the batch dim is followed from dim 0 of the arguments (`zerojax.activations.flow`). A
sum in which the batch dim is not found, or for which there is no rule (a kernel, a `while_loop`,
rows sorted by experts), is reduced where it is made, put in row 0, and reported.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.activations import ANY, Split, describe, infer_output_splits
from zerojax.grads.rewriter import Derivative, GradRewriter, IsOpaque, Rules, TracedDerivative
from zerojax.jaxprs import (
    ENTERED,
    INLINED,
    LINEAR,
    FlatJaxpr,
    Instruction,
    Ref,
    Region,
    bind,
    evaluate,
    is_among,
    list_regions,
    read,
    rebind,
    rebind_scan,
    rebind_shard_map,
)
from zerojax.sharding import (
    BATCH_AXES,
    DATA,
    FSDP,
    TENSOR,
    num_batch_shards,
    pad_spec,
    parse_axes,
    without_axis,
)
from zerojax.trees import Params

Array = jax.Array
_Chain = Sequence[tuple[jex.JaxprEqn, Ref]]
"""Consecutive equations of a shard_map body, each with its operand."""
logger = logging.getLogger("zerojax")
_REDUCED = frozenset({"psum", "psum_invariant", "reduce_scatter"})
_MOVED = frozenset({"transpose", "convert_element_type", "copy", "name", "pvary"})
"""Equations that may accompany a reduction in a shard_map: they act alike on arrays and shards."""
_BILINEAR = frozenset({"mul", "div", "dot_general", "conv_general_dilated"})
"""Equations with exactly one cotangent operand."""
_ADDITIVE = frozenset(
    {"add", "sub", "add_any", "concatenate", "dynamic_update_slice", "complex", "scatter-add"}
)
"""Equations that are linear in all operands together: an operand without rows counts once."""
_LINEAR_IN_SUMS = (
    LINEAR
    | _ADDITIVE
    | _BILINEAR
    | _MOVED
    | frozenset(
        {
            "rev",
            "pad",
            "select_n",
            "gather",
            "dynamic_slice",
            "cumsum",
            "sharding_constraint",
            "reduce",
            "real",
            "imag",
            "conj",
            "optimization_barrier",
            "all_to_all",
            "fft",
            "triangular_solve",
            "stop_gradient",
            "reshard",
        }
    )
)
_ENTERED = ENTERED["unreduced_grads"] - INLINED - {"shard_map"}
"""Equations whose jaxprs are rewritten. In a `jax.shard_map`, only reductions are left out."""


def unreduced_grads(
    derivative: Derivative,
    mesh: Mesh,
    is_opaque: IsOpaque = lambda eqn: False,
) -> Derivative:
    """Return a derivative whose gradients are per device: g[R_(data, fsdp), ...] instead of g[...].

    Args:
      derivative: `derivative(cotangents, data, params) -> (gradients, others)`. Dim 0 of the first
        leaf of (cotangents, data) that is not a scalar is the batch; other leaves whose dim 0 has
        the same length are split in the same way.
      mesh: the device mesh. R is the size of `data` times the size of `fsdp`.
      is_opaque: function that says whether a `jit` stays one equation; gradients that it returns
        are left unchanged.

    Returns:
      A function of the same arguments. Gradients keep their dtype, and `others` are unchanged.
    """

    def run(cotangents: Any, data: Any, params: Params) -> Any:
        traced = TracedDerivative.of(derivative, (cotangents, data, params), is_opaque)
        program = traced.program
        num_data = len(traced.cotangents) + len(traced.data)
        shapes = [jnp.shape(a) for a in traced.leaves]
        rows = next((shape[0] for shape in shapes[:num_data] if shape), 0)
        rule = _RowRule(mesh, rows)
        splits = [rule.given(shape, rows if n < num_data else 0) for n, shape in enumerate(shapes)]
        # A cotangent of rows is data too: a sum over it is a sum over the batch.
        pairs = zip(traced.cotangents, splits, strict=False)
        of_data = [*traced.data, *(slot for slot, split in pairs if rule.dim(split) >= 0)]
        rewriter = UnreducedGradRewriter(
            program,
            program.reached(traced.cotangents, by_result=True),
            program.reached(of_data, by_result=True),
            traced.is_grad,
            is_opaque,
            rule,
            splits,
            given=set(),
        )
        results = traced.rewritten(rewriter)
        for what in dict.fromkeys(rule.lifted):
            logger.warning(
                "reduce_every='step': the dim in which %s sums the batch is unknown, so its result "
                "is reduced in each microbatch",
                what,
            )
        return results

    return run


def reduced(value: Array, sharding: NamedSharding) -> Array:
    """Add up the rows of an unreduced gradient: g[R_(data, fsdp), D, F] -> g[D_fsdp, F].

    It is one reduction, in the gradient's dtype. With replicas it takes two steps, a reduce_scatter
    and an all_reduce of the shards, because the partitioner would make one all_reduce of both.

    Args:
      value: the unreduced gradient.
      sharding: sharding of the result.
    """
    mesh = sharding.mesh
    spec = pad_spec(sharding.spec, value.ndim - 1)
    if mesh.shape[DATA] > 1 and without_axis(spec, FSDP) != spec:
        value = value.reshape(mesh.shape[DATA], -1, *value.shape[1:])  # [data, fsdp, D, F]: local
        value = jnp.sum(
            jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(DATA, FSDP))),
            1,
        )
        value = jax.lax.with_sharding_constraint(
            value, NamedSharding(mesh, PartitionSpec(DATA, *spec))
        )
    return jax.lax.with_sharding_constraint(jnp.sum(value, 0), sharding)


def unreduced_sharding(mesh: Mesh, whole: Sequence[Any]) -> NamedSharding:
    """Return the sharding of an unreduced gradient.

    Args:
      mesh: the device mesh.
      whole: partition spec of the unsharded leaf, which can only use the axis `tensor`.
    """
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, *whole))


@dataclasses.dataclass(frozen=True)
class _RowRule:
    """Properties shared by all jaxprs of a derivative.

    Attributes:
      mesh: the device mesh.
      rows: number of rows of a microbatch.
      lifted: descriptions of the sums that were reduced where they are made.
    """

    mesh: Mesh
    rows: int
    lifted: list[str] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        """R, the number of batch shards."""
        return num_batch_shards(self.mesh)

    def given(self, shape: tuple[int, ...], rows: int) -> Split:
        """Return how an argument is split; its dim 0 is the batch if it has `rows` rows."""
        is_batch = shape[:1] == (rows,) and rows > 0 and rows % self.count == 0
        return (BATCH_AXES, *((),) * (len(shape) - 1)) if is_batch else ((),) * len(shape)

    def dim(self, split: Split) -> int:
        """Return the dim that is split like the batch, or -1."""
        found = [
            d for d, entry in enumerate(split) if entry is not ANY and set(entry) & set(BATCH_AXES)
        ]
        return found[0] if found else -1

    def constrain(self, value: Array, *spec: Any) -> Array:
        """Keep dim 0, the rows, on their devices.

        The partitioner chooses the sharding of the other dims unless `spec` gives it.
        """
        rest = spec or (PartitionSpec.UNCONSTRAINED,) * (value.ndim - 1)
        return jax.lax.with_sharding_constraint(value, unreduced_sharding(self.mesh, rest))

    def cut(self, value: Any, dim: int) -> Array:
        """Return an array with dim `dim` cut into R pieces, as dim 0: x[B, D] -> x[R, B / R, D]."""
        value = jnp.asarray(value)
        pieces = value.reshape(*value.shape[:dim], self.count, -1, *value.shape[dim + 1 :])
        return self.constrain(jnp.moveaxis(pieces, dim, 0))

    def lift(self, value: Any) -> Array:
        """Return rows whose sum is `value`: the value itself, and zeros."""
        value = jnp.asarray(value)
        row = jax.lax.broadcasted_iota(jnp.int32, (self.count, *(1,) * value.ndim), 0)
        return self.constrain(jnp.where(row == 0, value[None], jnp.zeros((), value.dtype)))


def _ndim(v: Any) -> int:
    return len(getattr(v.aval, "shape", ()))


class UnreducedGradRewriter(GradRewriter):
    """Rewrites one jaxpr so that its gradients have a row for each device's batch.

    Attributes:
      rule: properties of the derivative.
      splits: how each slot is split along the batch's axes.
      sums: slots that are sums over the batch, or made from such sums: they can have rows.
      lost: slots that may be sums over the batch, made in an unknown way.
      own: the slots of `sums` that are held with rows.
    """

    def __init__(
        self,
        program: FlatJaxpr,
        cotangents: set[int],
        data: set[int],
        outputs: Sequence[bool],
        is_opaque: IsOpaque,
        rule: _RowRule,
        splits: Sequence[Split],
        given: set[int],
    ) -> None:
        """Choose the values that have rows.

        Args:
          program: the jaxpr.
          cotangents: slots that depend on cotangents.
          data: slots that depend on data.
          outputs: whether each result is wanted with rows.
          is_opaque: whether a `jit` stays one equation.
          rule: properties of the derivative.
          splits: how each input is split along the batch's axes.
          given: slots of the inputs that have rows.
        """
        super().__init__(program, cotangents, data, outputs, is_opaque)
        self.rule = rule
        self.splits: dict[int, Split] = dict(zip(program.inputs, splits, strict=True))
        self.sums = set(given)
        self.lost = set[int]()
        for i in program.instructions:
            if i.eqn.primitive.name in _ENTERED:
                self._look_into(i)
            else:
                self.splits.update(zip(i.outs, self._infer_splits(i), strict=True))
                self.sums.update(out for out in self._list_sums(i) if out in cotangents)
            self.lost.update(out for out in i.outs if out in cotangents and self._is_lost(i, out))
        pairs = zip(program.outputs, outputs, strict=True)
        self.own = {
            ref
            for ref, is_wanted in pairs
            if is_wanted and isinstance(ref, int) and ref in self.sums
        } | given
        # A slot's readers come after its maker, so all readers of a result are known when its maker
        # is visited.
        for i in reversed(program.instructions):
            if not self.own.isdisjoint(i.outs):
                self.own.update(
                    slot for slot in self._list_operands_with_rows(i) if slot in self.sums
                )
        self.rewritten = self.own

    # --- which slots ------------------------------------------------------------------------------

    def _split(self, ref: Ref, v: Any) -> Split:
        return self.splits[ref] if isinstance(ref, int) else (ANY,) * _ndim(v)

    def _is_lost(self, i: Instruction, out: int) -> bool:
        """Return whether a result outside `sums` may be a sum over the batch."""
        if out in self.sums or self.rule.dim(self.splits[out]) >= 0:
            return False
        of_data = [self.splits[slot] for slot in i.reads if slot in self.data]
        return not self.lost.isdisjoint(i.reads) or any(
            ANY in split or self.rule.dim(split) >= 0 for split in of_data
        )

    def _look_into(self, i: Instruction) -> None:
        """Find how the results of an instruction with jaxprs are split, and which are sums."""
        regions = list_regions(i.eqn)
        carry = regions[0].carried
        # The carry starts as split as its initial value, until the body's results are known.
        self.splits |= {
            out: self._split(i.ins[p], i.eqn.invars[p])
            for p, out in zip(carry, i.outs, strict=False)
        }
        while True:
            inner = [self.inside(i, region, [False] * len(i.outs)) for region in regions]
            again = False
            for n, (out, v) in enumerate(zip(i.outs, i.eqn.outvars, strict=True)):
                refs = [(rewriter, rewriter.program.outputs[n]) for rewriter in inner]
                found = [rewriter.splits[ref] for rewriter, ref in refs if isinstance(ref, int)]
                split = next(
                    (split for split in found if self.rule.dim(split) >= 0),
                    found[0] if found else (ANY,) * _ndim(v),
                )
                # for arrays that a scan stacks, this is one slice
                split = ((),) * (_ndim(v) - len(split)) + split
                again |= n < len(carry) and self.rule.dim(split) >= 0 > self.rule.dim(
                    self.splits[out]
                )
                if n >= len(carry) or self.rule.dim(split) >= 0:
                    self.splits[out] = split
                is_sum = any(is_among(ref, rewriter.sums) for rewriter, ref in refs)
                if out in self.cotangents and is_sum:
                    self.sums.add(out)
            if not again:
                return

    def _infer_splits(self, i: Instruction) -> list[Split]:
        """Return how the results of an instruction are split."""
        found = infer_output_splits(
            i.eqn,
            [self._split(ref, v) for ref, v in zip(i.ins, i.eqn.invars, strict=True)],
            self.rule.mesh.shape,
        )
        if i.eqn.primitive.name == "shard_map":
            triples = zip(found, i.eqn.params["out_specs"], i.eqn.outvars, strict=True)
            return [
                tuple(map(parse_axes, pad_spec(spec, _ndim(v)))) if s is None else s
                for s, spec, v in triples
            ]
        # If the table leaves it open, a value made from data is assumed to have its rows in dim 0
        # if the length fits.
        rows = self.rule.rows if not self.data.isdisjoint(i.reads) else 0
        guessed = [self.rule.given(getattr(v.aval, "shape", ()), rows) for v in i.eqn.outvars]
        return [
            self._known_or_guessed(split, guess)
            for split, guess in zip(found, guessed, strict=True)
        ]

    def _known_or_guessed(self, split: Split | None, guess: Split) -> Split:
        """Return a split, or the guess that its rows are in dim 0 if the split is open."""
        if self.rule.dim(guess) >= 0:
            # Only an array with rows has a first dim.
            is_open = split is None or (self.rule.dim(split) < 0 and split[0] is ANY)
            if is_open:
                return guess
        return (ANY,) * len(guess) if split is None else split

    def _dim(self, i: Instruction, operand: int) -> int:
        return self.rule.dim(self._split(i.ins[operand], i.eqn.invars[operand]))

    def _list_sums(self, i: Instruction) -> Sequence[int]:
        """Return the results of an instruction that can have rows."""
        name = i.eqn.primitive.name
        if name == "optimization_barrier":
            return [out for ref, out in zip(i.ins, i.outs, strict=True) if is_among(ref, self.sums)]
        if name == "shard_map":
            return [
                out
                for out, chain in zip(i.outs, _reductions(self.rule, i.eqn), strict=True)
                if chain is not None
            ]
        if self.is_opaque(i.eqn):
            return ()
        if self.cut_dims(i) is not None:
            return i.outs
        of_sums = [n for n, ref in enumerate(i.ins) if is_among(ref, self.sums)]
        # A custom derivative of the model may do anything with a gradient: clip it, or divide by
        # its norm.
        if not of_sums or name not in _LINEAR_IN_SUMS:
            return ()
        if name in _BILINEAR and (len(of_sums) > 1 or (name == "div" and of_sums != [0])):
            return ()
        if name == "select_n" and 0 in of_sums:
            return ()
        return i.outs

    def _list_operands_with_rows(self, i: Instruction) -> list[int]:
        """Return the operands that have rows if a result has rows."""
        name = i.eqn.primitive.name
        if name == "optimization_barrier":
            return [
                ref
                for ref, out in zip(i.ins, i.outs, strict=True)
                if out in self.own and isinstance(ref, int)
            ]
        if name in _ENTERED:  # inputs are unchanged, except carried sums
            pairs = zip((i.ins[p] for p in list_regions(i.eqn)[0].carried), i.outs, strict=False)
            return [ref for ref, out in pairs if out in self.own and isinstance(ref, int)]
        return [] if name == "shard_map" else list(i.reads)

    def cut_dims(self, i: Instruction) -> Mapping[int, int] | None:
        """Return {operand: dim to cut} for a sum over the batch, else None.

        Missing operands are the same for all pieces, except the operands that a sum starts from
        (`_starts`).
        """
        name = i.eqn.primitive.name
        params = i.eqn.params
        if any(
            slot in self.sums
            for slot in i.reads
            if not (name == "scatter-add" and slot == i.ins[0])
        ):
            return None  # linear in sums that were made before
        shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in i.eqn.invars]
        dims: dict[int, int] = {}
        if name == "dot_general":
            pairs = zip(*params["dimension_numbers"][0], strict=True)
            found = [(a, b) for a, b in pairs if a == self._dim(i, 0) or b == self._dim(i, 1)]
            dims = {0: found[0][0], 1: found[0][1]} if found else {}
        elif name == "conv_general_dilated":
            # In a kernel's gradient, the batch is the feature dim that both operands have.
            numbers = params["dimension_numbers"]
            features = (numbers.lhs_spec[1], numbers.rhs_spec[1])
            is_sum = params["feature_group_count"] == params["batch_group_count"] == 1
            dims = dict(enumerate(features)) if is_sum and self._dim(i, 0) == features[0] else {}
        elif name in ("reduce_sum", "reduce"):
            summed = params["axes"] if name == "reduce_sum" else params["dimensions"]
            is_sum = name == "reduce_sum" or [e.primitive.name for e in params["jaxpr"].eqns] == [
                "add"
            ]
            dims = {0: self._dim(i, 0)} if is_sum and self._dim(i, 0) in summed else {}
        elif name == "scatter-add":
            numbers = params["dimension_numbers"]
            rows = [d for d in range(len(shapes[2])) if d not in numbers.update_window_dims]
            # All dims of the indices except the last correspond to the dims of the rows, in order;
            # batching dims are not summed.
            of_rows = self._dim(i, 2)
            of_ids = self._dim(i, 1)
            at = of_ids if of_ids < len(rows) else -1
            if of_rows in rows:
                at = rows.index(of_rows)
            if at >= 0 and at not in numbers.scatter_indices_batching_dims:
                dims = {1: at, 2: rows[at]}
            else:
                dims = {}
        is_even = all(shapes[operand][dim] % self.rule.count == 0 for operand, dim in dims.items())
        return dims if dims and is_even else None

    # --- values -----------------------------------------------------------------------------------

    def has_form(self, slot: int, value: Any) -> bool:
        """Return whether a slot is held with rows."""
        return slot in self.own

    def as_plain(self, slot: int, value: Any) -> Any:
        """Add up the rows of a value."""
        return jnp.sum(value, 0, dtype=value.dtype)

    def as_output(self, ref: Ref) -> Any:
        """Return a result with rows."""
        return self.rows(ref)

    def rows(self, ref: Ref) -> Any:
        """Return a value with rows."""
        if not isinstance(ref, int):
            return self.rule.lift(ref.value)
        if ref not in self.formed_values:
            if ref in self.lost:
                self.rule.lifted.append(describe(self.makers[ref].eqn))
            self.formed_values[ref] = self.rule.lift(self.plain(ref))
        return self.formed_values[ref]

    def inside(
        self,
        i: Instruction,
        region: Region,
        is_own: Sequence[bool],
    ) -> "UnreducedGradRewriter":
        """Return the rewriting of one region of an instruction in `_ENTERED`.

        Args:
          i: the instruction; its results are the results of the region.
          region: the jaxpr in the instruction, or one of several branches.
          is_own: whether each result is to have rows.
        """
        program, cotangents, data = self.flatten_region(i, region)
        splits = []
        pairs = zip(i.ins[region.first :], region.jaxpr.invars, strict=True)
        for position, (ref, v) in enumerate(pairs):
            ndim = _ndim(v)
            split = self.splits[ref] if isinstance(ref, int) else (ANY,) * ndim
            if position in region.carried:
                out = self.splits[i.outs[position - region.carried.start]]
                # the carry's result shows where the batch is, if its initial value does not
                split = out if self.rule.dim(out) >= 0 else split
            # for arrays that are scanned over, this is one slice
            splits.append(split[len(split) - ndim :])
        pairs = zip(region.carried, is_own, strict=False)
        given = {program.inputs[position] for position, own in pairs if own}
        of_slots = (program, cotangents, data, is_own)
        return UnreducedGradRewriter(*of_slots, self.is_opaque, self.rule, splits, given)

    # --- equations whose result has rows -----------------------------------------------------

    def by_default(self, i: Instruction) -> list[Any]:
        """Apply an equation to each piece of the arrays that it sums, or to each row of a sum."""
        dims = self.cut_dims(i)
        rule = self.rule
        is_additive = dims is None and i.eqn.primitive.name not in _BILINEAR
        mapped: dict[int, Any] = {}
        for position, ref in enumerate(i.ins):
            if dims is not None and position in dims:
                mapped[position] = rule.cut(self.plain(ref), dims[position])
            elif (
                (dims is not None and _starts(i, position))
                or is_among(ref, self.own)
                or (is_additive and is_among(ref, self.cotangents))
                or (dims is None and _counts_once(i, position))
            ):
                mapped[position] = self.rows(ref)
        # Closed over instead of mapped with None, so that a literal keeps its weak type.
        others = {n: self.plain(ref) for n, ref in enumerate(i.ins) if n not in mapped}

        def one(values: dict[int, Any]) -> list[Any]:
            every = others | values
            return bind(i.eqn, [every[position] for position in range(len(i.ins))])

        return [rule.constrain(out) for out in jax.vmap(one)(mapped)]

    def convolution(self, i: Instruction) -> list[Any]:
        """Apply a convolution that sums over the batch to each device's part.

        If it were mapped, the partitioner would gather the summed arrays.
        """
        dims = self.cut_dims(i)
        rule = self.rule
        if dims is None:
            return self.by_default(i)
        specs = tuple(PartitionSpec(*(None,) * dims[n], BATCH_AXES) for n in range(len(i.ins)))

        def one(*values: Any) -> Array:
            return i.eqn.primitive.bind(*values, **i.eqn.params)[None]

        axes = set(BATCH_AXES) if rule.mesh.shape[TENSOR] > 1 else set(rule.mesh.axis_names)
        run = jax.shard_map(
            one,
            mesh=rule.mesh,
            in_specs=specs,
            out_specs=PartitionSpec(BATCH_AXES),
            axis_names=axes,
            check_vma=False,
        )
        return [run(*(self.plain(ref) for ref in i.ins))]

    def barrier(self, i: Instruction) -> list[Any]:
        """Apply an optimization_barrier; its results in `own` have rows."""
        pairs = zip(i.ins, (out in self.own for out in i.outs), strict=True)
        return bind(i.eqn, [self.rows(ref) if own else self.plain(ref) for ref, own in pairs])

    def constraint(self, i: Instruction) -> list[Any]:
        """Keep a constraint's other axes; the batch's axes split the rows."""
        spec = getattr(i.eqn.params["sharding"], "spec", None)
        value = self.rows(i.ins[0])
        if spec is None:
            return [self.rule.constrain(value)]
        return [self.rule.constrain(value, *_without_batch(pad_spec(spec, value.ndim - 1)))]

    def enter(self, i: Instruction) -> list[Any]:
        """Rewrite the regions of an instruction.

        A loop carries sums over its iterations with rows.
        """
        regions = list_regions(i.eqn)
        is_own = [out in self.own for out in i.outs]
        inner = [self.inside(i, region, is_own) for region in regions]
        carried = regions[0].carried
        own_carry = {n for n, own in zip(carried, is_own, strict=False) if own}
        values = [
            # carried sums, and everything else
            self.rows(ref) if n in own_carry else self.plain(ref)
            for n, ref in enumerate(i.ins)
        ]
        if not regions[0].is_loop:
            return rebind(i.eqn, [one.run for one in inner], values)
        constrain = self.rule.constrain

        def body(values: Sequence[Any]) -> list[Any]:
            outs = zip(inner[0].run(values), is_own, strict=True)
            return [constrain(out) if own else out for out, own in outs]

        outs = rebind_scan(i.eqn, body, values)
        for n, own in enumerate(is_own):
            if own and n >= len(carried):
                # After the iterations: ys[L, R, ...] -> [R, L, ...]. No data moves if each device
                # holds one row.
                outs[n] = constrain(jnp.moveaxis(outs[n], 1, 0))
        return outs

    def shard_map(self, i: Instruction) -> list[Any]:
        """Apply a shard_map; its results in `own` skip the sums over the batch's axes."""
        (region,) = list_regions(i.eqn)
        program = region.flatten()
        chains = _reductions(self.rule, i.eqn)
        pairs = zip(i.outs, chains, strict=True)
        chains = [chain if out in self.own else None for out, chain in pairs]

        def drop_batch_sums(chain: _Chain, slots: dict[int, Any]) -> Any:
            """Return a result without the sums over the batch's axes."""
            value = read(chain[0][1], slots)
            for eqn, _ in chain:
                if eqn.primitive.name not in _REDUCED:
                    (value,) = bind(eqn, [value])
                elif rest := tuple(sorted(_list_summed_axes(eqn) - set(BATCH_AXES))):
                    value = jax.lax.psum(value, rest)
            return jnp.asarray(value)[None]

        def run(values: Sequence[Any]) -> list[Any]:
            slots: dict[int, Any] = dict(zip(program.inputs, values, strict=True))
            evaluate(program.instructions, slots)
            outs = zip(program.results(slots), chains, strict=True)
            return [out if chain is None else drop_batch_sums(chain, slots) for out, chain in outs]

        def with_rows(spec: PartitionSpec, v: Any) -> PartitionSpec:
            return PartitionSpec(BATCH_AXES, *_without_batch(pad_spec(spec, _ndim(v))))

        out_specs = tuple(
            spec if chain is None else with_rows(spec, v)
            for spec, chain, v in zip(i.eqn.params["out_specs"], chains, i.eqn.outvars, strict=True)
        )
        return rebind_shard_map(i.eqn, run, [self.plain(ref) for ref in i.ins], out_specs)

    rules: ClassVar[Rules] = {
        "optimization_barrier": barrier,
        "sharding_constraint": constraint,
        "conv_general_dilated": convolution,
        **dict.fromkeys(_ENTERED, enter),
        "shard_map": shard_map,
    }


def _counts_once(i: Instruction, position: int) -> bool:
    """Return whether an operand is added, so that it is put in row 0 if it has no rows."""
    name = i.eqn.primitive.name
    if name == "select_n":
        return position > 0
    if name == "dynamic_update_slice":
        return position < 2
    return name in _ADDITIVE and not (name == "scatter-add" and position == 1)


def _starts(i: Instruction, position: int) -> bool:
    """Return whether a sum starts from an operand, which then counts once, not per piece."""
    return (i.eqn.primitive.name, position) in (("scatter-add", 0), ("reduce", 1))


def _without_batch(spec: Sequence[Any]) -> tuple[Any, ...]:
    free = PartitionSpec.UNCONSTRAINED
    rest = tuple(None if entry is free else entry for entry in spec)
    for axis in BATCH_AXES:
        rest = without_axis(rest, axis)
    return tuple(free if entry is free else kept for entry, kept in zip(spec, rest, strict=True))


def _reductions(rule: _RowRule, eqn: jex.JaxprEqn) -> list[_Chain | None]:
    """Return for each result of a shard_map the chain from a batch sum to the result, or None."""
    (region,) = list_regions(eqn)
    program = region.flatten()
    makers = {out: i for i in program.instructions for out in i.outs}
    batch = {axis for axis in BATCH_AXES if rule.mesh.shape[axis] > 1}
    found: list[_Chain | None] = []
    for ref in program.outputs:
        chain = list[tuple[jex.JaxprEqn, Ref]]()
        over = set[str]()
        while (
            isinstance(ref, int)
            and (i := makers.get(ref)) is not None
            and i.eqn.primitive.name in _MOVED | _REDUCED
        ):
            if i.eqn.primitive.name in _REDUCED:
                # A scatter that is not tiled drops a dim that the full array has.
                if (
                    not i.eqn.params.get("tiled", True)
                    or i.eqn.params.get("axis_index_groups") is not None
                ):
                    break
                over |= _list_summed_axes(i.eqn)
            ref = i.ins[i.outs.index(ref)]
            chain.append((i.eqn, ref))
        found.append(chain[::-1] if batch <= over else None)
    return found


def _list_summed_axes(eqn: jex.JaxprEqn) -> set[str]:
    """Return the axes over which a reduction in a shard_map sums."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return set(parse_axes(axes))
