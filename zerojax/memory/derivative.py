"""Bytes that a step holds while it computes, on meshes with `context` or `expert`.

Attention over `context` and experts over `expert` hold arrays that no layer saves: keys, values and
their gradients of the whole sequence ("gather"), blocks that travel around a ring, the experts'
cells and their products. The derivative is traced, and `zerojax.memory.alive` finds the most bytes
that its arrays hold at one time.

A streamed step traces a layer's derivative, whose arguments include what forward saved. A resident
step traces the derivative of its objective, with the loops over layers and what they save.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zerojax.activations import Split
from zerojax.memory.alive import find_peak_bytes, split_like_batch
from zerojax.sharding import CONTEXT, EXPERT, ActivationSpec, parse_axes
from zerojax.state import Layout, Leaf, join_frozen
from zerojax.streamed import StreamedStep, derivative_jaxpr
from zerojax.trees import Batch, ModelState, Params


def counts_working(layout: Layout) -> bool:
    """Return whether working memory is counted: the mesh has `context` or `expert`."""
    return any(layout.mesh.shape.get(axis, 1) > 1 for axis in (CONTEXT, EXPERT))


def layer_working_bytes(streamed: StreamedStep, shapes: Batch) -> dict[str, int]:
    """Return the bytes that the derivative of a layer holds, for each run of layers.

    The layer's weights and their gradients, and values that forward saved, are not included.

    Args:
      streamed: the streamed step.
      shapes: shapes and dtypes of the batch.
    """
    layout = streamed.layout
    state = layout.abstract_arrays
    inputs = streamed.embed_head.abstract_inputs(layout.join(state), state.model_state, shapes)
    plans = streamed.abstract_residuals(shapes)
    working = dict[str, int]()
    for loops, plan, (_, x, given) in zip(streamed.loops, plans, inputs, strict=True):
        args = loops.tracer.abstract_call(x, given, streamed.microbatches.count)
        jaxpr = derivative_jaxpr(plan.block, *args)
        split = split_like_batch(ActivationSpec(layout.mesh), jax.tree.leaves(args[1])[0].shape[0])
        leaves = [layout.all_leaves[i] for i in loops.stack.leaves.in_tree]
        splits = _split_weights(leaves, args[0], 1)
        splits += [split(aval.shape) for aval in jaxpr.in_avals[len(splits) :]]
        first = len(jax.tree.leaves(args))
        num_residuals = len(plan.block.shapes)  # the arrays before them are the layer's input
        for n, array in enumerate(plan.arrays[-num_residuals:] if num_residuals else (), first):
            spec = array.record.spec[plan.lead :]
            splits[n] = tuple(
                () if e is PartitionSpec.UNCONSTRAINED else parse_axes(e) for e in spec
            )
        num_grads = sum(not is_frozen for is_frozen in plan.block.frozen)
        working[loops.stack.run.name] = find_peak_bytes(
            jaxpr, splits, layout.mesh.shape, split, late=range(num_grads)
        )
    return working


def objective_working_bytes(layout: Layout, objective: Any, micro: Batch) -> int:
    """Return the bytes that a microbatch's derivative holds, with the values that forward saves.

    Parameters, gathered weights and gradients are not included.

    Args:
      layout: layout of the program.
      objective: objective of the step, a function of the full parameters.
      micro: shapes and dtypes of a microbatch.
    """
    state = layout.abstract_arrays
    frozen = jax.eval_shape(layout.decode, jax.tree.map(_shape, state.frozen))
    params, model_state = jax.tree.map(_shape, (state.params, state.model_state))

    def derivative(params: Params, frozen: Params, batch: Batch, model_state: ModelState) -> Any:
        def loss(params: Params) -> jax.Array:
            return objective(join_frozen(params, frozen), batch, None, model_state)[0].value()

        return jax.value_and_grad(loss)(params)

    jaxpr = jax.make_jaxpr(derivative)(params, frozen, micro, model_state)
    rows = [a.shape[0] for a in jax.tree.leaves(micro) if a.shape]
    split = split_like_batch(ActivationSpec(layout.mesh), rows[0] if rows else 0)
    splits = _split_weights(layout.leaves, params, 0)
    splits += [split(aval.shape) for aval in jaxpr.in_avals[len(splits) :]]
    num_results = len(jaxpr.out_avals)
    return find_peak_bytes(jaxpr, splits, layout.mesh.shape, split, late=range(1, num_results))


def _shape(a: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, without its sharding."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _split_weights(leaves: Sequence[Leaf], weights: Params, lead: int) -> list[Split]:
    """Return the splits of gathered weights, one for each array.

    Args:
      leaves: their leaves.
      weights: shapes of the weights. A decoded weight, or a tile, is not its leaf's array, and
        counts as unsplit.
      lead: number of leading dims of a leaf that the weight lacks.
    """
    shapes = [a.shape for a in jax.tree.leaves(weights)]
    if len(leaves) != len(shapes):
        return [((),) * len(shape) for shape in shapes]
    splits = list[Split]()
    for leaf, shape in zip(leaves, shapes, strict=True):
        is_leaf = tuple(leaf.shape[lead:]) == tuple(shape)
        splits.append(
            tuple(map(parse_axes, leaf.spec.base[lead:])) if is_leaf else ((),) * len(shape)
        )
    return splits
