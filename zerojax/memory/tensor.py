"""Bytes that each device sends over `tensor` in a step of one program, by collective.

The loss and its derivative are traced as a resident step evaluates them, with the layers' saved
activations of the config, and read by `zerojax.activations.sent_over_tensor`. Nothing runs. A
streamed step computes the same for a layer, in loops of its own.

For one of Megatron's layers this is, in units of s b h (t-1)/t bytes times the itemsize,

    tensor parallelism       all_reduce   2 x (2 + 2), and 2 more with remat
    sequence parallelism     all_gather 2 + 4, reduce_scatter 2 + 2; with remat one more scatter
    rings                    permute, as much as these together

The layers of a stack all send the same number of bytes. With segments, each mode is therefore
traced for all layers, and weighted by its share of them.

The bytes that `partition_activations` sends to gather saved values are counted by
`zerojax.memory.kept`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.activations import sent_over_tensor
from zerojax.resident import plain_objective
from zerojax.sharding import TENSOR, pad_spec
from zerojax.state import Layout, layer_ranges
from zerojax.trees import Batch, ModelState


def tensor_collectives(layout: Layout, model: Any, abstract_batch: Batch) -> dict[str, int]:
    """Return the bytes that each device sends over `tensor`: "tensor_all_gather" and so on.

    The result is empty if `tensor` has one device.

    Args:
      layout: layout of the program.
      model: model that the step computes; with sequence parallelism, the transformed model.
      abstract_batch: tree of ShapeDtypeStruct with shardings.
    """
    if layout.mesh.shape[TENSOR] == 1:
        return {}
    layers = _layers_by_mode(layout)
    modes = {stack: next(iter(counts)) for stack, counts in layers.items()}
    first = _sent(layout, model, abstract_batch, modes)
    total = dict(first)
    for stack, counts in layers.items():
        for mode in counts.keys() - {modes[stack]}:
            other = _sent(layout, model, abstract_batch, modes | {stack: mode})
            for name in first.keys() | other.keys():
                difference = other.get(name, 0) - first.get(name, 0)
                share = difference * counts[mode] // sum(counts.values())
                total[name] = total.get(name, 0) + share
    return {f"{TENSOR}_{name}": n for name, n in total.items() if n}


def _layers_by_mode(layout: Layout) -> dict[str, dict[str, int]]:
    """Return the number of layers by stack and mode.

    The modes are "everything"; "save", the results of products; and "remat", only the layer's
    input.
    """
    layers: dict[str, dict[str, int]] = {}
    for run in layer_ranges(layout):
        # If a tier is named, the layer's input is saved there.
        activations = run.segment.activations
        if activations == "everything":
            mode = "everything"
        elif activations in ("save", "selective"):
            mode = "save"
        else:
            mode = "remat"
        counts = layers.setdefault(run.stack.name, {})
        counts[mode] = counts.get(mode, 0) + run.num_layers
    return layers


def _sent(
    layout: Layout, model: Any, abstract_batch: Batch, modes: Mapping[str, str]
) -> dict[str, int]:
    """Return the bytes by collective if all layers of a stack save activations by `modes`."""
    mesh = layout.mesh
    objective = plain_objective(model, layout, modes)
    state = layout.abstract_arrays
    params, model_state = jax.tree.map(_shape, (layout.join(state), state.model_state))
    leaves, tree = jax.tree.flatten(jax.eval_shape(layout.decode, params))
    specs = layout.decoded_leaves()
    count = layout.config.num_microbatches

    def derivative(leaves: list[Any], batch: Batch, model_state: ModelState) -> Any:
        def loss(trained: list[Any]) -> Any:
            next_trained = iter(trained)
            all_leaves = [
                a if leaf.frozen else next(next_trained)
                for a, leaf in zip(leaves, specs, strict=True)
            ]
            params = jax.tree.unflatten(tree, all_leaves)
            return objective(params, batch, None, model_state)[0].value()

        trained = [a for a, leaf in zip(leaves, specs, strict=True) if not leaf.frozen]
        return jax.value_and_grad(loss)(trained)

    micro = jax.tree.map(partial(_microbatch_shape, count=count), abstract_batch)
    jaxpr = jax.make_jaxpr(derivative)(leaves, micro, model_state)
    input_specs = [leaf.spec.base for leaf in specs]
    for a in jax.tree.leaves(abstract_batch):
        input_specs.append(pad_spec(a.sharding.spec, len(a.shape)))
    input_specs += [(None,) * jnp.ndim(a) for a in jax.tree.leaves(model_state)]
    sent = sent_over_tensor(jaxpr, input_specs, mesh)
    return {name: int(n * count) for name, n in sent.items()}


def _shape(a: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, without its sharding."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _microbatch_shape(a: Any, count: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of the batch in one of `count` microbatches."""
    shape = (a.shape[0] // count, *a.shape[1:]) if a.shape else a.shape
    return jax.ShapeDtypeStruct(shape, a.dtype)
