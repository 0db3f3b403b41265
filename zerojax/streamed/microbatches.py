"""The microbatches of a streamed step, the random keys of its layers, and the layers' other inputs.

With several microbatches, dim 0 of every array that depends on data counts them, and a function of
one microbatch runs in a loop over it. A layer's gradients are summed over that loop in float32,
since sums in 16 bits would lose the smaller terms. A single microbatch has no such dim, no loop,
and gradients in their own dtype.
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
from zerojax.trees import Batch, Context, Tree

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """Applies functions of one microbatch to all microbatches of a step.

    Attributes:
      mesh: the device mesh.
      count: number of microbatches per step.
    """

    mesh: Mesh
    count: int

    def each(self, function: Callable[..., Any], *trees: Tree) -> Any:
        """Apply `function` to every microbatch: dim 0 of the trees if there are several."""
        # A loop, not a vmap, so that the intermediate values of only one microbatch are live at a
        # time.
        if self.count == 1:
            return function(*trees)
        return jax.lax.map(lambda microbatch: function(*microbatch), trees)

    def fold(
        self,
        function: Callable[..., tuple[list[Array], Any]],
        total: list[Array],
        *trees: Tree,
        between: Sequence[Callable[[list[Array]], list[Array]]] = (),
    ) -> tuple[list[Array], Any]:
        """Sum the first result of `function` over microbatches.

        Returns the sum and the second results. The sum is float32 if there are several
        microbatches.

        Args:
          function: function of one microbatch.
          total: the sum so far.
          *trees: arguments of `function`, with microbatches as dim 0 if there are several.
          between: functions that update the sum. Several microbatches are divided into len(between)
            + 1 equal parts, and `between[n]` runs after part n.
        """
        if self.count == 1:
            return function(*trees)

        def body(total: list[Array], microbatch: Any) -> tuple[list[Array], Any]:
            values, out = function(*microbatch)
            return [t + v.astype(jnp.float32) for t, v in zip(total, values, strict=True)], out

        if not between:
            return jax.lax.scan(body, total, trees)
        outs = []
        bounds = [self.count * n // (len(between) + 1) for n in range(len(between) + 2)]
        for n, (start, end) in enumerate(itertools.pairwise(bounds)):
            if end > start:
                part = jax.tree.map(lambda a, s=start, e=end: a[s:e], trees)
                total, out = jax.lax.scan(body, total, part)
                outs.append(out)
            if n < len(between):
                total = between[n](total)
        return total, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *outs)

    def split(self, batch: Batch, key: Any) -> tuple[Any, Any]:
        """Return the microbatches of a batch, and a random key for each or None."""
        if self.count == 1:
            return batch, key
        # The resident step folds in the same numbers, so both draw the same masks.
        if key is None:
            keys = None
        else:
            keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(self.count))
        return split_microbatches(batch, self.count), keys

    def repeated(self, tree: Tree) -> Any:
        """Repeat a tree that is the same for all microbatches along dim 0, if there are several."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (self.count, *a.shape)), tree)

    def derive_keys(self, keys: Any, layer: Array) -> Any:
        """Return the key of one layer for each microbatch."""
        if self.count == 1 or keys is None:
            return derive_key(keys, layer)
        return jax.vmap(lambda key: derive_key(key, layer))(keys)

    def constrain(self, x: Any) -> Any:
        """Constrain the activations of all microbatches to the batch's sharding."""
        return ActivationSpec(self.mesh, self.count).constrain_all(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Inputs that all layers of a step read.

    Attributes:
      keys: random keys of the microbatches, or None.
      context: context of the microbatches, or None.
      per_layer: `model.per_layer`, arrays [L, ...], or None.
      state: state of the blocks, [L, ...], or None; it is only read.
    """

    keys: Any = None
    context: Any = None
    per_layer: Any = None
    state: Any = None

    def given(self, context: Context, layer: Array) -> Given:
        """Return one layer's inputs for one microbatch, given the microbatch's context."""
        # These arrays are on the device. The index computed here is not used to slice host memory.
        take = lambda a: jax.lax.dynamic_index_in_dim(a, layer, 0, keepdims=False)  # noqa: E731
        return Given(context, jax.tree.map(take, self.per_layer), jax.tree.map(take, self.state))

    def given_all(self, layer: Array, microbatches: Microbatches) -> Given:
        """Return one layer's inputs for all microbatches, which are dim 0 if there are several."""
        given = self.given(self.context, layer)
        return Given(
            given.context, microbatches.repeated(given.layer), microbatches.repeated(given.state)
        )


def derive_key(key: Any, layer: int | Array) -> Any:
    """Return the random key of one layer, or None."""
    return None if key is None else jax.random.fold_in(key, layer)
