"""What a mixture takes and returns: the weights of its experts, and the result with the choice."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Array = jax.Array


class Experts(NamedTuple):
    """The weights of experts, and how an expert combines its two products.

    Attributes:
      up: weights [E, H, F].
      down: weights [E, F, H].
      gate: weights [E, H, F], or None.
      up_bias, gate_bias: biases [E, F], or None.
      down_bias: biases [E, H], or None.
      combine: function of `x up` and of `x gate`, or None, that returns what `down` multiplies.
    """

    up: Array
    down: Array
    gate: Array | None = None
    up_bias: Array | None = None
    gate_bias: Array | None = None
    down_bias: Array | None = None
    combine: Callable[[Array, Any], Array] = lambda raised, gated: raised


class Mixed(NamedTuple):
    """What `mix` returns.

    Attributes:
      y: weighted sum of each token's experts [B, T, H], in x's dtype.
      chosen: the experts of each token, i32[B, T, k].
      dropped: fraction of the choices that were dropped, f32[].
    """

    y: Array
    chosen: Array
    dropped: Array
