"""A mixture of experts for Flax Linen, equivalent to the NNX module in `zerojax.experts.nnx`."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.experts.loss import ExpertStats
from zerojax.experts.mixture import check_options, moe
from zerojax.experts.nnx import DOWN_AXES, UP_AXES, default_expert_init, default_router_init

Array = jax.Array
Initializer = Callable[..., Any]


@flax.struct.dataclass
class _Annotated(nn.Partitioned):
    """A parameter with the names of its axes, which constrain nothing when it is made.

    The step chooses the shards, and a mesh may lack `expert`.
    """

    def unbox(self, apply_constraint: bool = False) -> Any:
        """Return the parameter."""
        del apply_constraint
        return self.value


def _annotated(init: Initializer, names: tuple[str | None, ...]) -> Initializer:
    """Return an initializer that names the axes of its result, unless `init` does."""

    def make(key: Array, shape: tuple[int, ...], dtype: Any) -> Any:
        param = init(key, shape, dtype)
        return param if isinstance(param, nn.meta.AxisMetadata) else _Annotated(param, names)

    return make


class MoE(nn.Module):
    """A mixture of experts: `zj.moe` with its weights router, up, gate (if gated) and down.

    The experts' weights are annotated for the axes `expert` and `tensor`, which a mesh may lack.

    Attributes:
      hidden: number of hidden features F of each expert.
      num_experts: number of experts E.
      top_k: number of experts that a token visits.
      capacity_factor: cells per expert, as in `zj.moe`; None drops no token.
      activation: activation function of the experts.
      normalize: whether the weights of a token's experts add up to 1.
      gated: whether the experts have a gate.
      dtype: dtype of x, products and result; x's dtype by default. Routing is in float32.
      param_dtype: dtype of the weights.
      router_init: initializer of the router [H, E]; may be `nn.with_partitioning`.
      up_init: initializer of up and gate, [E, H, F]; may be `nn.with_partitioning`, whose axes then
        replace `expert` and `tensor`.
      down_init: initializer of down, [E, F, H]; may be `nn.with_partitioning`.
    """

    hidden: int
    num_experts: int
    top_k: int = 2
    capacity_factor: float | None = 1.25
    activation: Callable[[Array], Array] = jax.nn.gelu
    normalize: bool = True
    gated: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    router_init: Initializer = default_router_init
    up_init: Initializer = default_expert_init
    down_init: Initializer = default_expert_init

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
          ValueError: num_experts, top_k, capacity_factor or the activation is invalid.
        """
        check_options(self.num_experts, self.top_k, self.capacity_factor, self.activation)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, ExpertStats]:
        """Return y and the statistics of the routing: x[B, T, H] -> y[B, T, H].

        Raises:
          ValueError: an option or x does not fit, as in `zj.moe`.
        """
        x = x if self.dtype is None else x.astype(self.dtype)
        size = x.shape[-1]

        def create(name: str, init: Initializer, shape: tuple[int, ...]) -> Array:
            return self.param(name, init, shape, self.param_dtype)

        up_shape = (self.num_experts, size, self.hidden)
        up_init = _annotated(self.up_init, UP_AXES)
        router = create("router", self.router_init, (size, self.num_experts))
        up = create("up", up_init, up_shape).astype(x.dtype)
        gate = create("gate", up_init, up_shape).astype(x.dtype) if self.gated else None
        down_init = _annotated(self.down_init, DOWN_AXES)
        down = create("down", down_init, (self.num_experts, self.hidden, size)).astype(x.dtype)
        return moe(
            x,
            router,
            up,
            down,
            gate=gate,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            activation=self.activation,
            normalize=self.normalize,
        )
