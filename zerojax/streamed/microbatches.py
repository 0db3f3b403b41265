"""The microbatches of a streamed step, the random keys of its layers, and what these read besides.

Where there are several, dim 0 of whatever depends on data counts them, and a function of one
microbatch runs in a loop over it. A layer's gradients are summed over that loop: in float32, as
sums in 16 bits would lose the smaller terms. A single microbatch has no such dim, no loop, and
gradients in their own dtype.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.models import Given
from zerojax.sharding import ActivationSpec, split_microbatches

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """Functions of one microbatch, applied to all of a step.

    Attributes:
      mesh: the device mesh.
      count: microbatches of a step.
    """

    mesh: Mesh
    count: int

    def each(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Apply `function` to every microbatch: dim 0 of the trees where there are several."""
        # A loop and not a vmap: intermediate values are there for one microbatch at a time.
        return (
            function(*trees) if self.count == 1 else jax.lax.map(lambda one: function(*one), trees)
        )

    def fold(
        self,
        function: Callable[..., tuple[list[Array], Any]],
        total: list[Array],
        *trees: Any,
        between: Sequence[Callable[[list[Array]], list[Array]]] = (),
    ) -> tuple[list[Array], Any]:
        """Sum over microbatches the first result of `function`, in float32 where there are several;
        return the second.

        Args:
          function: of one microbatch.
          total: the sum so far.
          *trees: microbatches are dim 0 of them, where there are several.
          between: of several microbatches, what is done with the sum after each of len(between) + 1
            equal parts but the last.
        """
        if self.count == 1:
            return function(*trees)

        def body(total: list[Array], one: Any) -> tuple[list[Array], Any]:
            values, out = function(*one)
            return [t + v.astype(jnp.float32) for t, v in zip(total, values, strict=True)], out

        if not between:
            return jax.lax.scan(body, total, trees)
        outs = []
        ends = [self.count * n // (len(between) + 1) for n in range(len(between) + 2)]
        for n, (start, end) in enumerate(itertools.pairwise(ends)):
            if end > start:
                total, out = jax.lax.scan(
                    body, total, jax.tree.map(lambda a, s=start, e=end: a[s:e], trees)
                )
                outs.append(out)
            total = between[n](total) if n < len(between) else total
        return total, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)

    def split(self, batch: Any, key: Any) -> tuple[Any, Any]:
        """Return the microbatches and their keys."""
        if self.count == 1:
            return batch, key
        # The numbers that the resident step folds in, so that both draw the same masks.
        keys = (
            None
            if key is None
            else jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(self.count))
        )
        return split_microbatches(batch, self.count), keys

    def repeated(self, tree: Any) -> Any:
        """Return what is the same for all microbatches with a dim of them in front, where there are
        several.
        """
        return (
            tree
            if self.count == 1
            else jax.tree.map(lambda a: jnp.broadcast_to(a, (self.count, *a.shape)), tree)
        )

    def keys_of(self, keys: Any, layer: Array) -> Any:
        """Return the key of one layer for each microbatch."""
        return (
            key_of(keys, layer)
            if self.count == 1 or keys is None
            else jax.vmap(lambda key: key_of(key, layer))(keys)
        )

    def constrain(self, x: Any) -> Any:
        """Keep the activations of all microbatches split as the batch is."""
        return ActivationSpec(self.mesh, self.count).constrain_all(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """What all layers of a step read.

    Attributes:
      keys: of the microbatches, or None.
      context: of the microbatches, or None.
      per_layer: `model.per_layer`, arrays [L, ...], or None.
      state: of the blocks, [L, ...], or None; only read.
    """

    keys: Any = None
    context: Any = None
    per_layer: Any = None
    state: Any = None

    def given(self, context: Any, layer: Array) -> Given:
        """Return what one layer is given of one microbatch, by its context."""
        # On the device: no index of a slice of host memory is derived from it.
        take = lambda a: jax.lax.dynamic_index_in_dim(a, layer, 0, keepdims=False)  # noqa: E731
        return Given(context, jax.tree.map(take, self.per_layer), jax.tree.map(take, self.state))

    def given_all(self, layer: Array, microbatches: Microbatches) -> Given:
        """Return what one layer is given of all microbatches, which are dim 0 of everything where
        there are several.
        """
        one = self.given(self.context, layer)
        return Given(
            one.context, microbatches.repeated(one.layer), microbatches.repeated(one.state)
        )


def key_of(key: Any, layer: int | Array) -> Any:
    """Return the key of one layer, or None."""
    return None if key is None else jax.random.fold_in(key, layer)
