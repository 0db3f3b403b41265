"""The ends of a streamed model: the embedding before its layers, the head after them, and the derivatives of both.

Their leaves are no stack of layers. They are loaded once a step, and stay on the device until it ends. Stage 3 gathers each
where it is used, as in the resident step. The gradients of head and embedding are added, since both may use a tied embedding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.models import BLOCKS, LayeredModel, checked
from zerojax.sharding import ActivationSpec
from zerojax.state import is_stored, join_frozen, split_frozen
from zerojax.streamed.microbatches import Microbatches, key_of
from zerojax.streamed.plan import StreamedPlan

Array = jax.Array


class Ends:
    """Embedding and head of a model, as functions of their leaves: a tree `{"embed", "head"}`."""

    def __init__(self, model: LayeredModel, plan: StreamedPlan, microbatches: Microbatches, gather: Callable[..., Any]) -> None:
        """Evaluate both through `gather(function, leaves, *args)`, which gathers the leaves and reduces their gradients."""
        self.model, self.plan, self.microbatches, self.mesh = model, plan, microbatches, plan.mesh
        self._gather, self.activations = gather, ActivationSpec(plan.mesh)

    def load(self, params: Any) -> Any:
        """Return the leaves, sharded, on the device."""
        # OnDisk leaves are leaves here: `RecordSpec.load` reads them.
        leaves, tree = jax.tree.flatten(_without_blocks(params), is_leaf=is_stored)
        in_tree = [i for i in self.plan.layout.in_tree if not self.plan.leaves[i].is_stacked]
        return jax.tree.unflatten(tree, [self.plan.params[i].load(leaf) for i, leaf in zip(in_tree, leaves, strict=True)])

    def _split(self, ends: Any) -> tuple[Any, Any]:
        """Return the trained and the frozen leaves, each as a tree with None in the place of the others."""
        flags = self.plan.layout.flags
        return split_frozen(None if flags is None else _without_blocks(flags), ends)

    def embed(self, ends: Any, batch: Any, key: Any) -> Any:
        """Return the first layer's input, of one microbatch."""
        batch = self.activations.constrain(batch)
        # Keys 0 .. L-1 are those of the layers, L is the embedding's, L+1 the head's.
        key = key_of(key, self.model.num_layers)
        x = self._gather(lambda p, b, k: self.model.embed(p["embed"], b, k), ends, batch, key)
        return self.activations.constrain(x)

    def abstract_input(self, abstract_params: Any, abstract_batch: Any) -> tuple[Any, Any]:
        """Return the shapes of the first layer's input, and of the keys, of all microbatches."""

        def first(params: Any, batch: Any) -> Any:
            batch, keys = self.microbatches.split(batch, jax.random.key(0) if self.model.stochastic else None)
            ends = _without_blocks(params)
            return self.microbatches.each(lambda b, k: self.embed(ends, b, k), batch, keys), keys

        on_device = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_params)
        return jax.eval_shape(first, on_device, abstract_batch)

    def head(self, ends: Any, x: Any, batch: Any, key: Any) -> Array:
        """Return the loss of one microbatch: f32[]."""
        key = key_of(key, self.model.num_layers + 1)

        def loss(p: Any, x: Any, b: Any, k: Any) -> Array:
            return checked(lambda p, b, k: self.model.head(p["head"], p["embed"], x, b, k))(p, b, k)

        return self._gather(loss, ends, x, batch, key).astype(jnp.float32)

    def head_and_grads(self, ends: Any, y: Any, batch: Any, keys: Any, scale: Array) -> tuple[Array, Any, list[Array]]:
        """Return the mean loss, dloss/dy, and the summed gradients of `ends`; the derivative is that of scale * loss."""
        ends, frozen = self._split(ends)

        def one(y: Any, batch: Any, key: Any) -> tuple[list[Array], tuple[Array, Any]]:
            batch = self.activations.constrain(batch)

            # Scaled inside of the derivative: else small float16 cotangents would vanish. The loss is returned unscaled.
            def scaled(ends: Any, y: Any) -> tuple[Array, Array]:
                value = self.head(join_frozen(ends, frozen), y, batch, key)
                return value * scale, value

            (g, dy), value = jax.grad(scaled, argnums=(0, 1), has_aux=True)(ends, y)
            return self._reduced(g), (value, self.activations.constrain(dy))

        count = self.microbatches.count
        g, (value, dy) = self.microbatches.fold(one, self.plan.zero_grads(self.plan.ends), y, batch, keys)
        return (value if count == 1 else jnp.sum(value) / count), dy, g

    def embed_grads(self, ends: Any, batch: Any, keys: Any, dx: Any, g_ends: list[Array]) -> list[Array]:
        """Add the embedding's gradients to those of the head.

        The embedding is computed again rather than its residuals held through the whole step: it is a look-up.
        """
        ends, frozen = self._split(ends)

        def one(dx: Any, batch: Any, key: Any) -> tuple[list[Array], None]:
            (g,) = jax.vjp(lambda p: self.embed(join_frozen(p, frozen), batch, key), ends)[1](dx)
            return self._reduced(g), None

        # Several microbatches are added to the head's gradients one by one, in float32; a single one in its own dtype.
        if self.microbatches.count > 1:
            return self.microbatches.fold(one, g_ends, dx, batch, keys)[0]
        return [a + b for a, b in zip(g_ends, one(dx, batch, keys)[0], strict=True)]

    def _reduced(self, grads: Any) -> list[Array]:
        """Return gradients of the leaves, on their shards."""
        return self.plan.on_shards(jax.tree.leaves(grads), self.plan.ends)


def _without_blocks(params: Any) -> Any:
    return {name: tree for name, tree in params.items() if name != BLOCKS}
