"""What the layers of a streamed step read besides parameters and activations: the same in each, or a slice of a stack."""

import dataclasses
from typing import Any

import jax

from zerojax.models import Given
from zerojax.streamed.microbatches import Microbatches

Array = jax.Array


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
        """Return what one layer is given of all microbatches, which are dim 0 of everything where there are several."""
        one = self.given(self.context, layer)
        return Given(one.context, microbatches.repeated(one.layer), microbatches.repeated(one.state))
