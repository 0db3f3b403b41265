"""The rewriter of `zerojax.grads.unreduced`: which values have rows, and how to get them.

    forwards     how each value is split along the batch's axes, and which values are sums over
                 the batch or linear in such sums: these can have rows
    backwards    from the wanted gradients: which of these values are held with rows
    forwards     their equations are applied to each piece, or to each row

The first two passes are in the constructor, the third is `run`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.activations import ANY, Split, describe, infer_output_splits
from zerojax.grads.batch_sums import (
    BILINEAR,
    LINEAR_IN_SUMS,
    SUMS,
    apply_without_batch_sums,
    counts_once,
    find_cut_dims,
    find_reductions,
    is_initial_value,
)
from zerojax.grads.rewriter import GradRewriter, IsOpaque, Rules
from zerojax.grads.row_rule import RowRule
from zerojax.jaxprs import (
    ENTERED,
    INLINED,
    FlatJaxpr,
    Instruction,
    Ref,
    Region,
    bind,
    evaluate,
    is_among,
    list_regions,
    rebind,
    rebind_scan,
    rebind_shard_map,
)
from zerojax.sharding import pad_spec, parse_axes, without_axes

Array = jax.Array
_ENTERED = ENTERED["unreduced_grads"] - INLINED - {"shard_map"}
"""Equations whose jaxprs are rewritten. In a `jax.shard_map`, only reductions are left out."""


class UnreducedGradRewriter(GradRewriter):
    """Rewrites one jaxpr so that its gradients have a row for each device's batch.

    Attributes:
      rule: properties of the derivative.
      splits: how each slot is split along the batch's axes.
      sums: slots that are sums over the batch, or made from such sums: they can have rows.
      possible_sums: slots that may be sums over the batch, made in an unknown way.
      with_rows: the slots of `sums` that are held with rows.
    """

    def __init__(
        self,
        program: FlatJaxpr,
        cotangents: set[int],
        data: set[int],
        outputs: Sequence[bool],
        is_opaque: IsOpaque,
        rule: RowRule,
        splits: Sequence[Split],
        inputs_with_rows: set[int],
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
          inputs_with_rows: slots of the inputs that have rows.
        """
        super().__init__(program, cotangents, data, outputs, is_opaque)
        self.rule = rule
        self.splits: dict[int, Split] = dict(zip(program.inputs, splits, strict=True))
        self.sums = set(inputs_with_rows)
        self.possible_sums = set[int]()
        for i in program.instructions:
            self._analyze(i)

        self.with_rows = set(inputs_with_rows)
        for ref, is_wanted in zip(program.outputs, outputs, strict=True):
            if is_wanted and isinstance(ref, int) and ref in self.sums:
                self.with_rows.add(ref)
        # A slot's readers come after its maker, so all readers of a result are known when its maker
        # is visited.
        for i in reversed(program.instructions):
            if not self.with_rows.isdisjoint(i.outs):
                self.with_rows.update(self.sums.intersection(self._list_operands_with_rows(i)))
        self.rewritten = self.with_rows

    # --- which slots ------------------------------------------------------------------------------

    def _split(self, ref: Ref, v: Any) -> Split:
        return self.splits[ref] if isinstance(ref, int) else (ANY,) * _ndim(v)

    def _batch_dim(self, i: Instruction, operand: int) -> int:
        return self.rule.batch_dim(self._split(i.ins[operand], i.eqn.invars[operand]))

    def _analyze(self, i: Instruction) -> None:
        """Find how the results of an instruction are split, and which are sums over the batch."""
        if i.eqn.primitive.name in _ENTERED:
            self._analyze_regions(i)
        else:
            self.splits.update(zip(i.outs, self._infer_splits(i), strict=True))
            self.sums.update(self.cotangents.intersection(self._list_sums(i)))
        for out in i.outs:
            if out in self.cotangents and self._is_possible_sum(i, out):
                self.possible_sums.add(out)

    def _is_possible_sum(self, i: Instruction, out: int) -> bool:
        """Return whether a result outside `sums` may be a sum over the batch."""
        if out in self.sums or self.rule.batch_dim(self.splits[out]) >= 0:
            return False
        if not self.possible_sums.isdisjoint(i.reads):
            return True
        data_splits = [self.splits[slot] for slot in i.reads if slot in self.data]
        return any(ANY in split or self.rule.batch_dim(split) >= 0 for split in data_splits)

    def _analyze_regions(self, i: Instruction) -> None:
        """Find how the results of an instruction with jaxprs are split, and which are sums."""
        regions = list_regions(i.eqn)
        carried = regions[0].carried
        # The carry starts as split as its initial value, until the body's results are known.
        for position, out in zip(carried, i.outs, strict=False):
            self.splits[out] = self._split(i.ins[position], i.eqn.invars[position])

        has_changed = True
        while has_changed:
            has_changed = False
            rewriters = [
                self.build_region_rewriter(i, region, [False] * len(i.outs)) for region in regions
            ]
            for n, out in enumerate(i.outs):
                split = _join_result_splits(rewriters, n, _ndim(i.eqn.outvars[n]))
                is_batch = self.rule.batch_dim(split) >= 0
                if n >= len(carried):
                    self.splits[out] = split
                elif is_batch:
                    has_changed |= self.rule.batch_dim(self.splits[out]) < 0
                    self.splits[out] = split
                is_sum = any(is_among(r.program.outputs[n], r.sums) for r in rewriters)
                if is_sum and out in self.cotangents:
                    self.sums.add(out)

    def _infer_splits(self, i: Instruction) -> list[Split]:
        """Return how the results of an instruction are split."""
        if self.rule.num_tokens and i.eqn.primitive.name == "sharding_constraint":
            # It leaves the tokens to the partitioner.
            return [self._split(i.ins[0], i.eqn.invars[0])]
        operands = zip(i.ins, i.eqn.invars, strict=True)
        operand_splits = [self._split(ref, v) for ref, v in operands]
        inferred = infer_output_splits(i.eqn, operand_splits, self.rule.mesh.shape)
        is_data = not self.data.isdisjoint(i.reads)
        splits: list[Split] = []
        for n, (v, split) in enumerate(zip(i.eqn.outvars, inferred, strict=True)):
            if i.eqn.primitive.name != "shard_map":
                splits.append(self._complete_split(split, _shape(v), is_data))
            elif split is None:
                spec = pad_spec(i.eqn.params["out_specs"][n], _ndim(v))
                splits.append(tuple(map(parse_axes, spec)))
            else:
                splits.append(split)
        return splits

    def _complete_split(self, split: Split | None, shape: tuple[int, ...], is_data: bool) -> Split:
        """Return an inferred split, or a guess if it is open.

        A value made from data is assumed to have its examples in dim 0 if the length fits.
        """
        guess = self.rule.guess_split(shape, is_data)
        dim = self.rule.batch_dim(guess)
        if dim >= 0:
            is_open = split is None or (self.rule.batch_dim(split) < 0 and split[dim] is ANY)
            if is_open:
                return guess
        return (ANY,) * len(shape) if split is None else split

    def _list_sums(self, i: Instruction) -> Sequence[int]:
        """Return the results of an instruction that can have rows."""
        name = i.eqn.primitive.name
        if name == "optimization_barrier":
            return [out for ref, out in zip(i.ins, i.outs, strict=True) if is_among(ref, self.sums)]
        if name == "shard_map":
            reductions = find_reductions(i.eqn, self.rule.mesh, self.rule.axes)
            pairs = zip(i.outs, reductions, strict=True)
            return [out for out, steps in pairs if steps is not None]
        if self.is_opaque(i.eqn):
            return ()
        if self.cut_dims(i) is not None:
            return i.outs
        return i.outs if self._is_linear_in_sums(i) else ()

    def _is_linear_in_sums(self, i: Instruction) -> bool:
        """Return whether an instruction reads sums over the batch, and is linear in them."""
        name = i.eqn.primitive.name
        sum_positions = [n for n, ref in enumerate(i.ins) if is_among(ref, self.sums)]
        # A custom derivative of the model may do anything with a gradient: clip it, or divide by
        # its norm.
        if not sum_positions or name not in LINEAR_IN_SUMS:
            return False
        if name == "div":
            return sum_positions == [0]
        if name in BILINEAR:
            return len(sum_positions) == 1
        return not (name == "select_n" and 0 in sum_positions)

    def _list_operands_with_rows(self, i: Instruction) -> Sequence[int]:
        """Return the operands that have rows if a result has rows."""
        name = i.eqn.primitive.name
        if name == "shard_map":
            return []
        if name == "optimization_barrier":
            pairs = zip(i.ins, i.outs, strict=True)
        elif name in _ENTERED:  # inputs are unchanged, except carried sums
            carried = list_regions(i.eqn)[0].carried
            pairs = zip((i.ins[position] for position in carried), i.outs, strict=False)
        else:
            return i.reads
        return [ref for ref, out in pairs if out in self.with_rows and isinstance(ref, int)]

    def cut_dims(self, i: Instruction) -> Mapping[int, int] | None:
        """Return {operand: dim to cut} for a sum over the batch, else None.

        Missing operands are the same for all pieces, except the operands that a sum starts from
        (`is_initial_value`).
        """
        name = i.eqn.primitive.name
        if name not in SUMS:
            return None
        for slot in i.reads:
            is_start = name == "scatter-add" and slot == i.ins[0]
            if slot in self.sums and not is_start:
                return None  # linear in sums that were made before
        batch_dims = [self._batch_dim(i, operand) for operand in range(len(i.ins))]
        dims = find_cut_dims(i.eqn, batch_dims)
        shapes = [_shape(v) for v in i.eqn.invars]
        is_even = all(shapes[n][dim] % self.rule.num_rows == 0 for n, dim in dims.items())
        return dims if dims and is_even else None

    # --- values -----------------------------------------------------------------------------------

    def has_form(self, slot: int, value: Any) -> bool:
        """Return whether a slot is held with rows."""
        return slot in self.with_rows

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
            if ref in self.possible_sums and self.rule.num_rows > 1:
                self.rule.reduced_early.append(describe(self.makers[ref].eqn))
            self.formed_values[ref] = self.rule.lift(self.plain(ref))
        return self.formed_values[ref]

    def build_region_rewriter(
        self,
        i: Instruction,
        region: Region,
        outputs: Sequence[bool],
    ) -> "UnreducedGradRewriter":
        """Return the rewriter of one region of an instruction in `_ENTERED`.

        Args:
          i: the instruction; its results are the results of the region.
          region: the jaxpr in the instruction, or one of several branches.
          outputs: whether each result is to have rows.
        """
        program, cotangents, data = self.flatten_region(i, region)
        splits: list[Split] = []
        operands = zip(i.ins[region.first :], region.jaxpr.invars, strict=True)
        for position, (ref, v) in enumerate(operands):
            split = self._split(ref, v)
            if position in region.carried:
                carry_split = self.splits[i.outs[position - region.carried.start]]
                # the carry's result shows where the batch is, if its initial value does not
                if self.rule.batch_dim(carry_split) >= 0:
                    split = carry_split
            # for arrays that are scanned over, this is one slice
            splits.append(split[len(split) - _ndim(v) :])

        pairs = zip(region.carried, outputs, strict=False)
        inputs_with_rows = {program.inputs[position] for position, is_wanted in pairs if is_wanted}
        return UnreducedGradRewriter(
            program,
            cotangents,
            data,
            outputs,
            self.is_opaque,
            self.rule,
            splits,
            inputs_with_rows,
        )

    # --- equations whose result has rows -----------------------------------------------------

    def by_default(self, i: Instruction) -> list[Any]:
        """Apply an equation to each piece of the arrays that it sums, or to each row of a sum."""
        dims = self.cut_dims(i)
        mapped: dict[int, Any] = {}
        for position, ref in enumerate(i.ins):
            if dims is not None and position in dims:
                mapped[position] = self.rule.cut(self.plain(ref), dims[position])
            elif self._is_mapped(i, position, is_batch_sum=dims is not None):
                mapped[position] = self.rows(ref)
        # Closed over instead of mapped with None, so that a literal keeps its weak type.
        unmapped = {n: self.plain(ref) for n, ref in enumerate(i.ins) if n not in mapped}

        def apply_to_row(row: dict[int, Any]) -> list[Any]:
            operands = unmapped | row
            return bind(i.eqn, [operands[position] for position in range(len(i.ins))])

        return [self.rule.constrain(out) for out in jax.vmap(apply_to_row)(mapped)]

    def _is_mapped(self, i: Instruction, position: int, is_batch_sum: bool) -> bool:
        """Return whether an equation is mapped over the rows of an operand that is not cut."""
        ref = i.ins[position]
        if is_among(ref, self.with_rows):
            return True
        if is_batch_sum:
            return is_initial_value(i, position)
        if counts_once(i, position):
            return True
        return i.eqn.primitive.name not in BILINEAR and is_among(ref, self.cotangents)

    def convolution(self, i: Instruction) -> list[Any]:
        """Apply a convolution that sums over the batch to each device's part.

        If it were mapped, the partitioner would gather the summed arrays.
        """
        dims = self.cut_dims(i)
        if dims is None:
            return self.by_default(i)
        mesh = self.rule.mesh
        rows = self.rule.axes

        def convolve_part(*operands: Any) -> Array:
            return i.eqn.primitive.bind(*operands, **i.eqn.params)[None]

        run = jax.shard_map(
            convolve_part,
            mesh=mesh,
            in_specs=tuple(PartitionSpec(*(None,) * dims[n], rows) for n in range(len(i.ins))),
            out_specs=PartitionSpec(rows),
            # The partitioner splits the other axes, such as `tensor`.
            axis_names=set(rows if mesh.size > self.rule.num_rows else mesh.axis_names),
            check_vma=False,
        )
        return [run(*(self.plain(ref) for ref in i.ins))]

    def barrier(self, i: Instruction) -> list[Any]:
        """Apply an optimization_barrier; its results in `with_rows` have rows."""
        operands: list[Any] = []
        for ref, out in zip(i.ins, i.outs, strict=True):
            operands.append(self.rows(ref) if out in self.with_rows else self.plain(ref))
        return bind(i.eqn, operands)

    def constraint(self, i: Instruction) -> list[Any]:
        """Keep a constraint's other axes; the batch's axes split the rows."""
        spec = getattr(i.eqn.params["sharding"], "spec", None)
        value = self.rows(i.ins[0])
        if spec is None:
            return [self.rule.constrain(value)]
        return [self.rule.constrain(value, *self._without_rows(pad_spec(spec, value.ndim - 1)))]

    def enter(self, i: Instruction) -> list[Any]:
        """Rewrite the regions of an instruction.

        A loop carries sums over its iterations with rows.
        """
        regions = list_regions(i.eqn)
        has_rows = [out in self.with_rows for out in i.outs]
        rewriters = [self.build_region_rewriter(i, region, has_rows) for region in regions]
        carried = regions[0].carried
        carried_sums = {n for n, is_row in zip(carried, has_rows, strict=False) if is_row}
        operands: list[Any] = []
        for n, ref in enumerate(i.ins):
            operands.append(self.rows(ref) if n in carried_sums else self.plain(ref))
        if not regions[0].is_loop:
            return rebind(i.eqn, [rewriter.run for rewriter in rewriters], operands)
        constrain = self.rule.constrain

        def body(values: Sequence[Any]) -> list[Any]:
            outs = zip(rewriters[0].run(values), has_rows, strict=True)
            return [constrain(out) if is_row else out for out, is_row in outs]

        outs = rebind_scan(i.eqn, body, operands)
        for n in range(len(carried), len(outs)):
            if has_rows[n]:
                # After the iterations: ys[L, R, ...] -> [R, L, ...]. No data moves if each device
                # holds one row.
                outs[n] = constrain(jnp.moveaxis(outs[n], 1, 0))
        return outs

    def shard_map(self, i: Instruction) -> list[Any]:
        """Apply a shard_map; its results in `with_rows` skip the sums over the batch's axes."""
        (region,) = list_regions(i.eqn)
        program = region.flatten()
        reductions = find_reductions(i.eqn, self.rule.mesh, self.rule.axes)
        out_specs = list(i.eqn.params["out_specs"])
        for n, out in enumerate(i.outs):
            if out not in self.with_rows:
                reductions[n] = None
            elif reductions[n] is not None:
                spec = pad_spec(out_specs[n], _ndim(i.eqn.outvars[n]))
                out_specs[n] = PartitionSpec(self.rule.axes, *self._without_rows(spec))

        def run(values: Sequence[Any]) -> list[Any]:
            slots: dict[int, Any] = dict(zip(program.inputs, values, strict=True))
            evaluate(program.instructions, slots)
            outs = program.results(slots)
            for n, steps in enumerate(reductions):
                if steps is not None:
                    outs[n] = apply_without_batch_sums(steps, slots, self.rule.axes)
            return outs

        return rebind_shard_map(i.eqn, run, [self.plain(ref) for ref in i.ins], tuple(out_specs))

    def _without_rows(self, spec: Sequence[Any]) -> tuple[Any, ...]:
        """Return a spec without the axes of the rows; unconstrained dims stay unconstrained."""
        unconstrained = PartitionSpec.UNCONSTRAINED
        sharded = tuple(None if entry is unconstrained else entry for entry in spec)
        sharded = without_axes(sharded, *self.rule.axes)
        pairs = zip(spec, sharded, strict=True)
        return tuple(
            unconstrained if entry is unconstrained else remaining for entry, remaining in pairs
        )

    rules: ClassVar[Rules] = {
        "optimization_barrier": barrier,
        "sharding_constraint": constraint,
        "conv_general_dilated": convolution,
        **dict.fromkeys(_ENTERED, enter),
        "shard_map": shard_map,
    }


def _shape(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def _ndim(v: Any) -> int:
    return len(_shape(v))


def _join_result_splits(
    rewriters: Sequence[UnreducedGradRewriter], number: int, ndim: int
) -> Split:
    """Return how a result of several regions is split: like the batch if it is so in any of them.

    Args:
      rewriters: the rewriters of the regions.
      number: index of the result.
      ndim: number of dims of the instruction's result. If a scan stacks slices, a slice has fewer.
    """
    splits: list[Split] = []
    for rewriter in rewriters:
        ref = rewriter.program.outputs[number]
        if isinstance(ref, int):
            splits.append(rewriter.splits[ref])
    chosen = splits[0] if splits else (ANY,) * ndim
    for split in splits:
        if rewriters[0].rule.batch_dim(split) >= 0:
            chosen = split
            break
    return ((),) * (ndim - len(chosen)) + chosen
