"""Tiled layers for Flax Linen, equivalent to the NNX layers in `zerojax.tiling.nnx`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from pallas_kernels.dispatch import Implementation
from zerojax.tiling.kernels import check_activation, check_implementation
from zerojax.tiling.operators import tiled_dense, tiled_mlp
from zerojax.tiling.weights import check_tiles, resolve_num_tiles, tile_kernel

Array = jax.Array
Initializer = Callable[..., Any]


def _tiled(init: Initializer, tile: Callable[[Array], Array]) -> Initializer:
    """Return an initializer that is called with the dense shape and returns tiles.

    It adapts a sharding annotation to the tiles.
    """

    def make(key: Array, shape: tuple[int, ...], dtype: Any) -> Any:
        param = init(key, shape, dtype)
        # The dim that numbers the tiles is first, and no axis splits it.
        if isinstance(param, nn.Partitioned):
            return param.replace(value=tile(param.value), names=(None, *param.names))
        return tile(param)

    return make


def _annotation(init: Initializer, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
    """Return the mesh axes of a parameter's dims by its `nn.with_partitioning`, or None."""
    box = jax.eval_shape(
        lambda key: init(key, shape, jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
    )
    return tuple(box.names) if isinstance(box, nn.Partitioned) else None


class TiledDense(nn.Module):
    """A dense layer y = x W + b whose W is gathered, fetched, used and released one tile at a time.

    Attributes:
      features: number of output features F.
      num_tiles: number of tiles along F; None chooses it by `zerojax.tiling.choose_num_tiles`.
      in_tiles: number of tiles along the input's dim.
      use_bias: whether the layer has a bias.
      dtype: dtype of x, products and result; x's dtype by default.
      param_dtype: dtype of the weights.
      implementation: implementation of the products, as in `zerojax.tiling.tiled_dense`; None
        chooses by measurements. An unknown name raises ValueError.
      kernel_init: initializer of the kernel [D, F]; may be `nn.with_partitioning`.
      bias_init: initializer of the bias [F].
    """

    features: int
    num_tiles: int | None = None
    in_tiles: int = 1
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the implementation is unknown."""
        check_implementation(self.implementation, "TiledDense")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return x W + b: x[..., D] -> [..., F]."""
        x = x if self.dtype is None else x.astype(self.dtype)
        size = x.shape[-1]
        check_tiles(self.in_tiles, size, "in_tiles")
        # Float32 bytes of [D / in_tiles, F], which is divided into `num_tiles` along F.
        num_bytes = 4 * size * self.features // self.in_tiles
        tiles = resolve_num_tiles(
            self.num_tiles, self.features, num_bytes, f"a dense kernel [{size}, {self.features}]"
        )
        # Initialize the full kernel and then cut it, so that fan-in and random numbers are the
        # dense layer's.
        init = _tiled(
            self.kernel_init, lambda w: tile_kernel(w, in_tiles=self.in_tiles, out_tiles=tiles)
        )
        kernel = self.param("kernel", init, (size, self.features), self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        spec = _annotation(self.kernel_init, (size, self.features))
        return tiled_dense(
            x, kernel, bias, in_tiles=self.in_tiles, implementation=self.implementation, spec=spec
        )


class TiledMLP(nn.Module):
    """An MLP y = f(x up + b) down + c that uses its weights one tile of the hidden dim at a time.

    Attributes:
      hidden: number of hidden features H.
      num_tiles: number of tiles along H; None chooses it by `zerojax.tiling.choose_num_tiles`.
      seq_tiles: number of pieces of the sequence for which a tile is used one after the other.
      activation: activation function f.
      gated: whether f(x gate) * (x up) replaces f(x up).
      use_bias: whether the layers have biases.
      dtype: dtype of x, products and result; x's dtype by default.
      param_dtype: dtype of the weights.
      implementation: implementation of the products, as in `zerojax.tiling.tiled_mlp`; None chooses
        by measurements. An unknown name raises ValueError.
      up_init: initializer of up and gate, [D, H]; may be `nn.with_partitioning`.
      down_init: initializer of down, [H, D]; may be `nn.with_partitioning`.
      bias_init: initializer of the biases of up and gate, [H]; may be `nn.with_partitioning`.
      down_bias_init: initializer of the bias of down, [D].
    """

    hidden: int
    num_tiles: int | None = None
    seq_tiles: int = 1
    activation: Callable[[Array], Array] = jax.nn.gelu
    gated: bool = False
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    up_init: Initializer = nn.linear.default_kernel_init
    down_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    down_bias_init: Initializer = nn.initializers.zeros_init()
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the implementation is unknown or the activation is no function."""
        check_implementation(self.implementation, "TiledMLP")
        check_activation(self.activation, "TiledMLP")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return the MLP's result: x[..., S, D] -> [..., S, D]."""
        x = x if self.dtype is None else x.astype(self.dtype)
        size = x.shape[-1]
        hidden = self.hidden
        tiles = resolve_num_tiles(
            self.num_tiles,
            hidden,
            4 * size * hidden * (3 if self.gated else 2),
            f"an MLP [{size}, {hidden}]",
        )
        weights: dict[str, Array] = {}
        for name in ("up", "gate") if self.gated else ("up",):
            init = _tiled(self.up_init, lambda w: tile_kernel(w, out_tiles=tiles))
            weights[name] = self.param(name, init, (size, hidden), self.param_dtype)
            if self.use_bias:
                split = _tiled(self.bias_init, lambda b: b.reshape(tiles, -1))
                weights[f"{name}_bias"] = self.param(
                    f"{name}_bias", split, (hidden,), self.param_dtype
                )
        down = _tiled(self.down_init, lambda w: tile_kernel(w, in_tiles=tiles))
        weights["down"] = self.param("down", down, (hidden, size), self.param_dtype)
        if self.use_bias:
            weights["down_bias"] = self.param(
                "down_bias", self.down_bias_init, (size,), self.param_dtype
            )
        return tiled_mlp(
            x,
            weights,
            self.activation,
            seq_tiles=self.seq_tiles,
            implementation=self.implementation,
        )
