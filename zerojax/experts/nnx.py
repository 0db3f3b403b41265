"""A mixture of experts for Flax NNX, whose parameters name the axes that split them.

router[H, E]    up, gate[E_expert, H, F_tensor]    down[E_expert, F_tensor, H]
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.experts.loss import ExpertStats
from zerojax.experts.mixture import check_options, moe
from zerojax.sharding import EXPERT, TENSOR

Array = jax.Array
Initializer = Callable[..., Any]

UP_AXES = (EXPERT, None, TENSOR)
DOWN_AXES = (EXPERT, TENSOR, None)
default_router_init = jax.nn.initializers.lecun_normal()
default_expert_init = jax.nn.initializers.lecun_normal(batch_axis=0)
"""Each expert is initialized like a dense layer: dim 0 is not part of the fan-in."""


def _param(param: Any, axes: tuple[str | None, ...] | None) -> nnx.Param[Array]:
    """Return a parameter annotated by `axes`, unless its initializer has annotated it."""
    if isinstance(param, nnx.VariableMetadata):
        return nnx.Param(param.raw_value, **param.metadata)
    if axes is None:
        return nnx.Param(param)
    # Not sharded when it is made: the step chooses the shards, and a mesh may lack `expert`.
    return nnx.Param(param, out_sharding=axes, eager_sharding=False)


class MoE(nnx.Module):
    """A mixture of experts: `zj.moe` with its weights.

    The experts' weights are annotated for the axes `expert` and `tensor`, which a mesh may lack.

    Attributes:
      router: weight [H, E].
      up: weights [E, H, F].
      down: weights [E, F, H].
      gate: weights [E, H, F], or None.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        num_experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float | None = 1.25,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        normalize: bool = True,
        gated: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        router_init: Initializer = default_router_init,
        up_init: Initializer = default_expert_init,
        down_init: Initializer = default_expert_init,
        rngs: nnx.Rngs,
    ) -> None:
        """Initialize router, up, gate (if gated) and down, in this order.

        Args:
          features: number of input and output features H.
          hidden: number of hidden features F of each expert.
          num_experts: number of experts E.
          top_k: number of experts that a token visits.
          capacity_factor: cells per expert, as in `zj.moe`; None drops no token.
          activation: activation function of the experts.
          normalize: whether the weights of a token's experts add up to 1.
          gated: whether the experts have a gate.
          dtype: dtype of x, products and result; x's dtype by default. Routing is in float32.
          param_dtype: dtype of the weights.
          router_init: initializer of the router [H, E]; may be `nnx.with_partitioning`.
          up_init: initializer of up and gate, [E, H, F]; may be `nnx.with_partitioning`, whose axes
            then replace `expert` and `tensor`.
          down_init: initializer of down, [E, F, H]; may be `nnx.with_partitioning`.
          rngs: random streams.

        Raises:
          ValueError: num_experts, top_k, capacity_factor or the activation is invalid.
        """
        check_options(num_experts, top_k, capacity_factor, activation)
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.activation = activation
        self.normalize = normalize
        self.dtype = dtype

        def create(init: Initializer, shape: tuple[int, ...], axes: Any) -> nnx.Param[Array]:
            return _param(init(rngs.params(), shape, param_dtype), axes)

        up_shape = (num_experts, features, hidden)
        self.router = create(router_init, (features, num_experts), None)
        self.up = create(up_init, up_shape, UP_AXES)
        self.gate = create(up_init, up_shape, UP_AXES) if gated else nnx.data(None)
        self.down = create(down_init, (num_experts, hidden, features), DOWN_AXES)

    def __call__(self, x: Array) -> tuple[Array, ExpertStats]:
        """Return y and the statistics of the routing: x[B, T, H] -> y[B, T, H].

        Raises:
          ValueError: an option or x does not fit, as in `zj.moe`.
        """
        x = x if self.dtype is None else x.astype(self.dtype)
        return moe(
            x,
            self.router[...],
            self.up[...].astype(x.dtype),
            self.down[...].astype(x.dtype),
            gate=None if self.gate is None else self.gate[...].astype(x.dtype),
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            activation=self.activation,
            normalize=self.normalize,
        )
