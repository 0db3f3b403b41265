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
rows sorted by experts), is reduced where it is made, put in row 0, and reported
(`ReducedEarly`).

In a pipeline all stages work on embedding and head, each on its part of the tokens:

    x[B_(data, fsdp), T_pipe, D]  ->  g[R_(data, pipe, fsdp), D, F]

The same rewriting is applied twice: first with the rows of the batch, then with those of dim 1.
"""

import logging
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.grads.rewriter import Derivative, IsOpaque, TracedDerivative
from zerojax.grads.row_rule import RowRule
from zerojax.grads.unreduced_rewriter import UnreducedGradRewriter
from zerojax.sharding import (
    CONTEXT,
    DATA,
    PIPE,
    batch_axes,
    list_axes,
    pad_spec,
    parse_axes,
    row_axes,
    without_axes,
)
from zerojax.trees import Params

Array = jax.Array
logger = logging.getLogger("zerojax")


class ReducedEarly:
    """Logs which sums are reduced in each microbatch, each reason once.

    The sums of embedding and head are traced several times in one step: share one object between
    the derivatives of a program.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, rule: RowRule) -> None:
        """Log what `rule` has reduced early, unless an earlier call did."""
        sums = list(dict.fromkeys(rule.reduced_early))
        if sums and rule.num_tokens % rule.num_rows:
            sums = [f"rows of {rule.num_tokens} tokens"]
        new = [name for name in sums if name not in self._logged]
        self._logged.update(new)
        if not new:
            return
        if rule.num_tokens % rule.num_rows:
            axes = " x ".join(f"{axis}={rule.mesh.shape[axis]}" for axis in rule.axes)
            logger.warning(
                "reduce_every='step': %s do not divide by %s, so the gradients of embedding and "
                "head are reduced in each microbatch instead: pad rows to %d tokens",
                new[0],
                axes,
                -(-rule.num_tokens // rule.num_rows) * rule.num_rows,
            )
            return
        logger.warning(
            "reduce_every='step': the dim of the %s is not found in %s, so the result is reduced "
            "in each microbatch instead: write it as a product or a sum over that dim, outside of "
            "kernels and while_loops, or set reduce_every='microbatch', which takes less memory",
            "tokens" if rule.num_tokens else "batch",
            ", ".join(new),
        )


def unreduced_grads(
    derivative: Derivative,
    mesh: Mesh,
    is_opaque: IsOpaque = lambda eqn: False,
    unsharded: Sequence[Sequence[Any]] | None = None,
    early: ReducedEarly | None = None,
) -> Derivative:
    """Return a derivative whose gradients are per device: g[R_(data, fsdp), ...] instead of g[...].

    Args:
      derivative: `derivative(cotangents, data, params) -> (gradients, others)`. Dim 0 of the first
        leaf of (cotangents, data) that is not a scalar is the batch; other leaves whose dim 0 has
        the same length are split in the same way. If `pipe` splits rows, dim 1 of that leaf counts
        its tokens.
      mesh: the device mesh. R is the number of batch shards; for a leaf that `expert` splits, it
        does not count the devices along that axis.
      is_opaque: function that says whether a `jit` stays one equation; gradients that it returns
        are left unchanged.
      unsharded: spec of the unsharded leaf of each gradient, in the order of the gradients' leaves;
        None if `expert` splits none of them.
      early: reports sums that are reduced in each microbatch; None reports each derivative's.

    Returns:
      A function of the same arguments. Gradients keep their dtype, and `others` are unchanged.
    """
    early = early or ReducedEarly()
    if unsharded is None:
        return _add_rows(derivative, mesh, is_opaque, early, batch_axes(mesh), None)
    positions: dict[tuple[str, ...], set[int]] = {}
    for position, spec in enumerate(unsharded):
        positions.setdefault(row_axes(mesh, spec), set()).add(position)
    for axes, group in positions.items():
        of_batch = tuple(axis for axis in axes if axis != PIPE)
        derivative = _add_rows(derivative, mesh, is_opaque, early, of_batch, group)
        if PIPE in axes:
            derivative = _add_rows(
                derivative, mesh, is_opaque, early, (PIPE,), group, of_tokens=True
            )
            derivative = _merge_rows(derivative, mesh, axes, group)
    return derivative


def _merge_rows(
    derivative: Derivative, mesh: Mesh, axes: tuple[str, ...], positions: Set[int]
) -> Derivative:
    """Return a derivative with one dim of rows: g[p_pipe, R_(data, fsdp), ...] -> g[p R, ...].

    Args:
      derivative: the derivative.
      mesh: the device mesh.
      axes: the axes of all rows, in their order.
      positions: positions of the gradients with two dims of rows among the leaves.
    """
    of_batch = tuple(axis for axis in axes if axis != PIPE)
    sizes = [mesh.shape[axis] for axis in (PIPE, *of_batch)]
    place = axes.index(PIPE)
    unsplit = PartitionSpec.UNCONSTRAINED

    def merge(g: Array) -> Array:
        rest = g.shape[2:]
        rows = jnp.moveaxis(g.reshape(*sizes, *rest), 0, place)
        spec = PartitionSpec(*axes, *(unsplit,) * len(rest))
        rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, spec))
        merged = rows.reshape(-1, *rest)
        spec = PartitionSpec(axes, *(unsplit,) * len(rest))
        return jax.lax.with_sharding_constraint(merged, NamedSharding(mesh, spec))

    def run(cotangents: Any, data: Any, params: Params) -> Any:
        grads, others = derivative(cotangents, data, params)
        leaves, tree = jax.tree.flatten(grads)
        merged = [merge(g) if n in positions else g for n, g in enumerate(leaves)]
        return jax.tree.unflatten(tree, merged), others

    return run


def _add_rows(
    derivative: Derivative,
    mesh: Mesh,
    is_opaque: IsOpaque,
    early: ReducedEarly,
    axes: tuple[str, ...],
    positions: Set[int] | None,
    of_tokens: bool = False,
) -> Derivative:
    """Return a derivative that returns some gradients with rows.

    Args:
      derivative: the derivative, as in `unreduced_grads`.
      mesh: the device mesh.
      is_opaque: as in `unreduced_grads`.
      early: as in `unreduced_grads`.
      axes: axes that split the rows.
      positions: positions of these gradients among the leaves; None for all of them.
      of_tokens: whether the rows are parts of the tokens instead of the batch.
    """

    def run(cotangents: Any, data: Any, params: Params) -> Any:
        traced = TracedDerivative.of(derivative, (cotangents, data, params), is_opaque)
        program = traced.program
        shapes = [jnp.shape(leaf) for leaf in traced.leaves]
        num_data = len(traced.cotangents) + len(traced.data)
        batch_size, num_tokens = _find_sizes(shapes[:num_data])
        rule = RowRule(mesh, axes, batch_size, num_tokens if of_tokens else 0)
        splits = [rule.guess_split(shape, n < num_data) for n, shape in enumerate(shapes)]

        data_slots = list(traced.data)
        for slot, split in zip(traced.cotangents, splits, strict=False):
            # A cotangent of the batch is data too: a sum over it is a sum over the batch.
            if rule.batch_dim(split) >= 0:
                data_slots.append(slot)

        is_wanted = list(traced.is_grad)
        for position, is_grad in enumerate(traced.is_grad):
            is_wanted[position] = is_grad and (positions is None or position in positions)
        rewriter = UnreducedGradRewriter(
            program,
            program.reached(traced.cotangents, by_result=True),
            program.reached(data_slots, by_result=True),
            is_wanted,
            is_opaque,
            rule,
            splits,
            inputs_with_rows=set(),
        )
        results = traced.rewritten(rewriter)
        early.log(rule)
        return results

    return run


def _find_sizes(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return the lengths of dims 0 and 1 of the first array that is not a scalar, or 0."""
    for shape in shapes:
        if shape:
            return shape[0], shape[1] if len(shape) > 1 else 0
    return 0, 0


def reduced(
    value: Array, sharding: NamedSharding, unsharded: Sequence[Any] | PartitionSpec
) -> Array:
    """Add up the rows of an unreduced gradient: g[R_(data, fsdp), D, F] -> g[D_fsdp, F].

    It is one reduction, in the gradient's dtype. With replicas it takes two steps, a reduce_scatter
    and an all_reduce of the shards, because the partitioner would make one all_reduce of both.

    Args:
      value: the unreduced gradient.
      sharding: sharding of the result.
      unsharded: spec of the unsharded leaf.
    """
    mesh = sharding.mesh
    spec = pad_spec(sharding.spec, value.ndim - 1)
    whole = pad_spec(unsharded, value.ndim - 1)
    shards = tuple(axis for axis in row_axes(mesh, whole) if axis != DATA)
    is_split = without_axes(spec, *shards) != spec
    if is_split and CONTEXT in list_axes(spec):
        total = _scattered(value, mesh, spec, whole, shards)
        return jax.lax.with_sharding_constraint(total, sharding)
    if mesh.shape[DATA] > 1 and is_split:
        value = value.reshape(mesh.shape[DATA], -1, *value.shape[1:])  # [data, fsdp, D, F]: local
        rows = NamedSharding(mesh, PartitionSpec(DATA, shards, *whole))
        value = jnp.sum(jax.lax.with_sharding_constraint(value, rows), 1)
        value = jax.lax.with_sharding_constraint(
            value, NamedSharding(mesh, PartitionSpec(DATA, *spec))
        )
    return jax.lax.with_sharding_constraint(jnp.sum(value, 0), sharding)


def _scattered(
    value: Array, mesh: Any, spec: Sequence[Any], whole: Sequence[Any], shards: tuple[str, ...]
) -> Array:
    """Add up the rows by a reduce_scatter over some axes: g[R_(data, fsdp), D, F] -> g[D_fsdp, F].

    On a mesh with `context` the rows are sums over `context` already, and each device still has to
    cut its part of the result. From constraints alone, the partitioner would make an all_reduce of
    this, and cut it once.

    Args:
      value: the unreduced gradient.
      mesh: the device mesh.
      spec: spec of the reduced gradient.
      whole: spec of the unsharded leaf. An axis that the function does not name is gathered.
      shards: axes that split the rows, without `data`.
    """
    dim = next(d for d, entry in enumerate(spec) if set(shards) & set(parse_axes(entry)))

    def add(rows: Array) -> Array:
        part = jax.lax.psum_scatter(rows[0], shards, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(part, DATA) if mesh.shape[DATA] > 1 else part

    entries = list(whole)
    entries[dim] = (*parse_axes(whole[dim]), *shards)
    return jax.shard_map(
        add,
        mesh=mesh,
        in_specs=PartitionSpec((DATA, *shards), *whole),
        out_specs=PartitionSpec(*entries),
        axis_names={DATA, *shards, *list_axes(whole)},
        check_vma=False,
    )(value)
