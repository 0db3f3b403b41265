"""Sequence parallelism for a model that does not implement it.

It follows Korthikanti et al. (arXiv:2205.05198, section 4.2.2).

With tensor parallelism alone, every device of a tensor group holds the full stream x[B, T, H], and
repeats norms, dropout and residual sums. Here the stream is stored as x[B, T_tensor, H], and only
products whose weights `tensor` splits see it in full:

    column     W[H, F_t], split in a free dim      gather   z[B, T_t, H] -> z[B, T, H],
                                                            then h[B, T, F_t] = z W
    row        V[F_t, H], split in the summed dim  scatter  y[B, T, H]{U_t} = h V,
                                                            then y -> y[B, T_t, H]

An all_reduce is a reduce_scatter and an all_gather, so two gathers and two scatters per layer,
forward and backward, move as much as two all_reduces. Backward gathers z once more, for the
gradients of W, since a gathered value is never saved.

Each function of the model is traced, and its trace is run equation by equation.
`zerojax.activations.flow` tracks which values are split in the sequence. Where such a value meets a
split weight, one of the two operations of `zerojax.activations.sequence_ops` is inserted: one
gather for all products that read a value, one scatter of each sum. All other equations run
unchanged, and where the rules leave a split open, the partitioner decides. The values are right
whatever is inserted, since both operations only specify where a value is stored.

Rematerialised regions are entered. For a loop over tiles, the operand is gathered before it and the
result is scattered after it. Its products are computed as [t_tensor, ...] entries, one per device,
so that nothing is reduced inside of the loop.

With `overlap`, a gather and its products, or a product and its scatter, become one ring
(`zerojax.activations.rings`), if all of them are plain products with known splits. Otherwise the
operations stay, and `why` gives the reason.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax.activations.flow import Split
from zerojax.activations.sequence_ops import constrain, scatter_sequence
from zerojax.activations.sequence_walk import (
    STREAM_AXES,
    BlockProduct,
    Rule,
    SequenceInterpreter,
    split_as_batch,
)
from zerojax.jaxprs import trace
from zerojax.models import LayeredModel, StackModel, list_stacks
from zerojax.sharding import (
    TENSOR,
    Spec,
    as_entry,
    batch_axes,
    context_size,
    num_batch_shards,
    param_specs,
    parse_axes,
    without_axes,
    zero_axes,
)
from zerojax.tiling import parse
from zerojax.trees import Params

Array = jax.Array


class SequenceParallelism:
    """Collects the products of a model's blocks, as they were last traced."""

    def __init__(self) -> None:
        """Start without any products."""
        self._by_stack: dict[str, tuple[BlockProduct, ...]] = {}

    @property
    def products(self) -> tuple[BlockProduct, ...]:
        """Products of all stacks, in order."""
        return tuple(itertools.chain(*self._by_stack.values()))

    def traced(self, stack: str, products: Sequence[BlockProduct]) -> None:
        """Replace the products of a stack by the products of a newly traced block."""
        self._by_stack[stack] = tuple(
            dataclasses.replace(product, stack=stack) for product in products
        )


def sequence_parallel(
    model: LayeredModel,
    mesh: Mesh,
    collector: SequenceParallelism,
    overlap: bool = False,
    recomputed: bool = False,
) -> LayeredModel:
    """Return a model whose stream is split over `tensor` in its sequence.

    Its functions have the same arguments and results.

    Args:
      model: model whose specs name `tensor`. The floating leaves of x with three dims or more are
        its stream: dim 0 is the batch, dim 1 the sequence.
      mesh: the device mesh.
      collector: receives the products of the blocks as they are traced.
      overlap: whether to overlap gathers and scatters with the products, in rings.
      recomputed: whether backward recomputes all of a layer.

    Raises:
      ValueError: no weight of a block names `tensor`, which has more than one device.
    """
    if mesh.shape[TENSOR] == 1:
        return model
    specs = model.specs or {}
    _check_specs(specs.get("block"), mesh)
    # The derivative of a head begins where its forward ends, so saving fewer values would not lower
    # its peak memory.
    unstacked = (specs.get("head"), specs.get("embed"))
    unstacked_rule = Rule(mesh, overlap=overlap, recomputed=True)
    rule = dataclasses.replace(unstacked_rule, recomputed=recomputed)

    if model.stacks:
        block_specs = specs.get("block") or {}
        stacks = []
        for stack, stack_model in zip(model.stacks, list_stacks(model), strict=True):
            functions = _stack_functions(stack_model, stack_model.of(block_specs), rule, collector)
            stacks.append(dataclasses.replace(stack, **functions))
        fields: dict[str, Any] = {"stacks": stacks}
    else:
        (stack_model,) = list_stacks(model)
        fields = _stack_functions(stack_model, specs.get("block"), rule, collector)
    if model.predict is not None:
        fields["predict"] = _entered(model.predict, unstacked, unstacked_rule)
    has_state = "embed" in (model.init_state or {})
    return dataclasses.replace(
        model,
        embed=_leaving(model.embed, mesh, lambda out: out[0] if has_state else out),
        head=_entered(model.head, unstacked, unstacked_rule),
        **fields,
    )


def _stack_functions(
    stack: StackModel, block_specs: Any, rule: Rule, collector: SequenceParallelism
) -> dict[str, Any]:
    """Return the functions to replace in a stack, or in a model that has only one."""
    block = stack.model.block
    enter = stack.model.enter
    collect = functools.partial(collector.traced, stack.name)
    return {
        "block": _entered(block, (block_specs,), rule, collect, returns_stream=True),
        "enter": None if enter is None else _leaving(enter, rule.mesh, lambda out: out[0]),
    }


def _check_specs(block_specs: Any, mesh: Mesh) -> None:
    """Raise ValueError if no weight of a block names `tensor`."""
    for spec in jax.tree.leaves(block_specs, is_leaf=lambda s: isinstance(s, PartitionSpec)):
        if any(TENSOR in parse_axes(entry) for entry in spec):
            return
    raise ValueError(
        "sequence_parallel=True gathers and scatters activations for products whose weights "
        f"tensor={mesh.shape[TENSOR]} splits, and no weight of a block names 'tensor': give the "
        "blocks specs, by Flax's annotations, or as in zerojax.with_specs(model, "
        "{r'(qkv|fc)/kernel': P(None, 'tensor'), r'(proj|out)/kernel': P('tensor', None)}); or "
        "leave sequence_parallel=False"
    )


def _leaving(
    function: Callable[..., Any], mesh: Mesh, select_stream: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return an embedding, or an `enter`, whose x leaves it as a stream.

    If the vocabulary is split, the sum over it is scattered.
    """

    def run(*args: Any) -> Any:
        out = function(*args)
        leaves, tree = jax.tree.flatten(out)
        # x comes first, before any other results.
        for n, spec in _stream_specs(select_stream(out), mesh).items():
            # Without the constraint, the partitioner splits tokens by the sequence too, and may
            # gather the table for them.
            gathered = constrain(leaves[n], without_axes(spec, TENSOR), mesh)
            leaves[n] = scatter_sequence(gathered, spec, mesh)
        return jax.tree.unflatten(tree, leaves)

    return run


def _entered(
    function: Callable[..., Any],
    specs: tuple[Any, ...],
    rule: Rule,
    collect: Callable[[Sequence[BlockProduct]], None] = lambda products: None,
    returns_stream: bool = False,
) -> Callable[..., Any]:
    """Return `function(*params, x, *inputs)` with the operations of sequence parallelism inserted.

    Args:
      function: a block, or a head.
      specs: specs of each tree of params.
      rule: options of the walk, except those that depend on x.
      collect: function that receives the products.
      returns_stream: whether the function returns an x, alone or before other results.

    Raises:
      ValueError: during tracing, if x has no stream although the function returns one, or if dim 1
        of x is not divisible.
    """
    mesh = rule.mesh

    def run(*args: Any) -> Any:
        params = args[: len(specs)]
        x = args[len(specs)]
        inputs = args[len(specs) + 1 :]
        program, out = trace(function, *args, is_opaque=lambda eqn: parse(eqn) is not None)
        param_splits = _param_splits(params, specs, mesh)
        values = list[Any](jax.tree.leaves(params))
        splits = list[Split | None](split for _, split in param_splits)
        paths = dict[int, tuple[str, ...]]()
        for slot, (path, _) in zip(program.inputs, param_splits, strict=False):
            paths[slot] = (path,)

        x_leaves = jax.tree.leaves(x)
        streams = _stream_specs(x, mesh)
        for n, a in enumerate(x_leaves):
            if n in streams:
                values.append(constrain(a, streams[n], mesh))
                splits.append(tuple(map(parse_axes, streams[n])))
            else:
                values.append(a)
                splits.append(split_as_batch(a, mesh))
        if returns_stream and not streams:
            raise _without_stream(x_leaves)
        values += jax.tree.leaves(inputs)
        splits += _input_splits(inputs, x_leaves, mesh)

        shapes = {jnp.shape(x_leaves[n])[:2] for n in streams}
        walk = SequenceInterpreter(dataclasses.replace(rule, streams=shapes, products=[]), paths)
        outs, _ = walk.run(program, values, splits)
        collect(walk.rule.products)
        if returns_stream:
            # x comes first, before any other results of a block.
            for n, spec in streams.items():
                outs[n] = constrain(outs[n], spec, mesh)
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return run


def _param_splits(
    params: Sequence[Params], specs: Sequence[Any], mesh: Mesh
) -> list[tuple[str, Split]]:
    """Return the path and the split of each leaf of some trees of parameters, in order."""
    splits = list[tuple[str, Split]]()
    for tree, tree_specs in zip(params, specs, strict=True):
        for path, spec in param_specs(tree, tree_specs, mesh, zero_axes(mesh)).items():
            splits.append((path, tuple(map(parse_axes, spec.base))))
    return splits


def _input_splits(inputs: Any, x_leaves: Sequence[Any], mesh: Mesh) -> list[Split | None]:
    """Return the split of each leaf of the arguments after x.

    Dim 0 may be the batch; the other dims are left to the partitioner.
    """
    batch_shapes = {jnp.shape(a)[:1] for a in x_leaves}
    splits = list[Split | None]()
    for a in jax.tree.leaves(inputs):
        is_batch = jnp.shape(a)[:1] in batch_shapes
        splits.append(split_as_batch(a, mesh) if is_batch else ((),) * jnp.ndim(a))
    return splits


def _without_stream(x_leaves: Sequence[Any]) -> ValueError:
    """Return the error for an x that has no stream."""
    leaves = ", ".join(f"{jnp.result_type(a).name}{list(jnp.shape(a))}" for a in x_leaves)
    return ValueError(
        "sequence_parallel=True splits dim 1 of x[B, T, ...] between layers, and no floating leaf "
        f"of x has three dims: x is {leaves}. Leave sequence_parallel=False"
    )


def _stream_specs(x: Any, mesh: Mesh) -> dict[int, Spec]:
    """Return the specs of the leaves of x that are its stream, by their index.

    They are floating, have three dims or more, and have the sequence length of the largest such
    leaf.

    Raises:
      ValueError: dim 1 of such a leaf is not divisible by `tensor`.
    """
    candidates = dict[int, tuple[str, Any]]()
    for n, (path, a) in enumerate(jax.tree_util.tree_flatten_with_path(x)[0]):
        if jnp.ndim(a) >= 3 and jnp.issubdtype(jnp.result_type(a), jnp.inexact):
            candidates[n] = (jax.tree_util.keystr(path), a)
    shapes = [jnp.shape(a) for _, a in candidates.values()]
    largest = max(shapes, key=math.prod, default=(0, 0))
    return {
        n: _stream_spec(a, mesh, path)
        for n, (path, a) in candidates.items()
        if jnp.shape(a)[1] == largest[1]
    }


def _stream_spec(a: Any, mesh: Mesh, path: str) -> Spec:
    """Return P((data, fsdp), tensor, None) for a leaf of x.

    On a mesh with `context`, dim 1 is split over `context` and `tensor`.

    Raises:
      ValueError: dim 1 of the leaf is not divisible by `tensor`, or by `context` x `tensor`.
    """
    shape = jnp.shape(a)
    axes = STREAM_AXES if context_size(mesh) > 1 else (TENSOR,)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if shape[1] % shards:
        sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
        raise ValueError(
            f"sequence_parallel=True splits dim 1 of x{path}, of shape {tuple(shape)}, over "
            f"{sizes}, and {shape[1]} does not divide by {shards}: pad the sequences to "
            f"{-(-shape[1] // shards) * shards}, or leave sequence_parallel=False"
        )
    rows = batch_axes(mesh) if shape[0] % num_batch_shards(mesh) == 0 else None
    return (rows, as_entry(axes), *(None,) * (len(shape) - 2))
