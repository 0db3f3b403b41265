"""Tiled layers for Flax NNX that store dense weights as tiles and use one tile at a time.

The tiles are used by the functions of `operators`. The layers are initialized with the same
numbers as the dense layers that they replace, from the same random streams, so that either can be
used in a model. `tile_kernel` and `tile_mlp` cut dense weights into tiles; `untile_kernel` and
`untile_mlp` join them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init

from pallas_kernels.dispatch import Implementation
from zerojax.tiling.kernels import check_activation, check_implementation
from zerojax.tiling.operators import tiled_dense, tiled_mlp
from zerojax.tiling.weights import check_tiles, resolve_num_tiles, tile_kernel

Array = jax.Array
Initializer = Callable[..., Any]
_ANNOTATIONS = ("out_sharding", "sharding_names", "sharding")
"""Names of an annotation in different versions of Flax."""


def _param(param: Any, in_tiles: int, tile: Callable[[Array], Array]) -> nnx.Param[Array]:
    """Return a parameter that holds tiles, with its sharding annotation, if any, adapted to them.

    Its metadata `tiles` is (number of tiles along the first dim, number of dims). The number of
    dims distinguishes it from a stack of modules, which has one more.
    """
    if not isinstance(param, nnx.VariableMetadata):
        value = tile(param)
        return nnx.Param(value, tiles=(in_tiles, value.ndim))
    value = tile(param.raw_value)
    metadata: dict[str, Any] = {**param.metadata, "tiles": (in_tiles, value.ndim)}
    # The dim that numbers the tiles is first, and no axis splits it.
    for name in _ANNOTATIONS:
        if metadata.get(name) is not None:
            metadata[name] = (None, *metadata[name])
    return nnx.Param(value, **metadata)


class TiledDense(nnx.Module):
    """A dense layer y = x W + b whose W is gathered, fetched, used and released one tile at a time.

    Attributes:
      kernel: weights [out_tiles * in_tiles, D / in_tiles, F / out_tiles].
      bias: bias [F], or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_tiles: int | None = None,
        in_tiles: int = 1,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
    ) -> None:
        """Initialize the weights with the same values as `nnx.Linear`.

        Args:
          in_features: number of input features D.
          out_features: number of output features F.
          num_tiles: number of tiles along F; None chooses it by `zerojax.tiling.choose_num_tiles`.
          in_tiles: number of tiles along D.
          use_bias: whether the layer has a bias.
          dtype: dtype of x, products and result; x's dtype by default.
          param_dtype: dtype of the weights.
          implementation: implementation of the products, as in `zerojax.tiling.tiled_dense`; None
            chooses by measurements.
          kernel_init: initializer of the kernel [D, F]; may be `nnx.with_partitioning`.
          bias_init: initializer of the bias [F]; may be `nnx.with_partitioning`.
          rngs: random streams.

        Raises:
          ValueError: a number of tiles does not divide its dim, or the implementation is unknown.
        """
        check_implementation(implementation, "TiledDense")
        check_tiles(in_tiles, in_features, "in_tiles")
        # Float32 bytes of [D / in_tiles, F], which is divided into `num_tiles` along F.
        num_bytes = 4 * in_features * out_features // in_tiles
        tiles = resolve_num_tiles(
            num_tiles, out_features, num_bytes, f"a dense kernel [{in_features}, {out_features}]"
        )
        self.in_tiles = in_tiles
        self.dtype = dtype
        self.implementation = implementation
        # Initialize the full kernel and then cut it, so that fan-in and random numbers are
        # `nnx.Linear`'s.
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = _param(
            kernel, in_tiles, lambda w: tile_kernel(w, in_tiles=in_tiles, out_tiles=tiles)
        )
        self.spec = annotation(kernel)
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = _bias(bias_init(rngs.params(), (out_features,), param_dtype))

    def __call__(self, x: Array) -> Array:
        """Return x W + b: x[..., D] -> [..., F]."""
        x = x if self.dtype is None else x.astype(self.dtype)
        options: Any = {
            "in_tiles": self.in_tiles,
            "implementation": self.implementation,
            "spec": self.spec,
        }
        bias = None if self.bias is None else self.bias[...]
        return tiled_dense(x, self.kernel[...], bias, **options)


def annotation(param: Any) -> tuple[str | None, ...] | None:
    """Return the mesh axes of a parameter's dims by its `nnx.with_partitioning`, or None."""
    metadata = param.metadata if isinstance(param, nnx.VariableMetadata) else {}
    for name in _ANNOTATIONS:
        if metadata.get(name) is not None:
            return tuple(metadata[name])
    return None


def _bias(param: Any) -> nnx.Param[Array]:
    if isinstance(param, nnx.VariableMetadata):
        return nnx.Param(param.raw_value, **param.metadata)
    return nnx.Param(param)


class TiledMLP(nnx.Module):
    """An MLP y = f(x up + b) down + c that uses its weights one tile of the hidden dim at a time.

    Neither a full weight nor the full hidden activations ever exist. With `gated`, f(x gate) * (x
    up) replaces f(x up).

    Attributes:
      up: weights [t, D, H / t].
      down: weights [t, H / t, D].
      gate: weights [t, D, H / t], or None.
      up_bias: bias [t, H / t], or None; gate_bias has the same shape.
      down_bias: bias [D], or None.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        num_tiles: int | None = None,
        seq_tiles: int = 1,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        gated: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
        up_init: Initializer = default_kernel_init,
        down_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        down_bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
    ) -> None:
        """Initialize up, gate (if gated) and down, in this order, with the values of `nnx.Linear`.

        Args:
          features: number of input and output features D.
          hidden: number of hidden features H.
          num_tiles: number of tiles along H; None chooses it by `zerojax.tiling.choose_num_tiles`.
          seq_tiles: number of pieces of the sequence for which a tile is used one after the other.
          activation: activation function f.
          gated: whether the MLP has a gate.
          use_bias: whether the layers have biases.
          dtype: dtype of x, products and result; x's dtype by default.
          param_dtype: dtype of the weights.
          implementation: implementation of the products, as in `zerojax.tiling.tiled_mlp`; None
            chooses by measurements.
          up_init: initializer of up and gate, [D, H]; may be `nnx.with_partitioning`.
          down_init: initializer of down, [H, D]; may be `nnx.with_partitioning`.
          bias_init: initializer of the biases of up and gate, [H]; may be `nnx.with_partitioning`.
          down_bias_init: initializer of the bias of down, [D].
          rngs: random streams.

        Raises:
          ValueError: the tiles do not divide the hidden dim, or the implementation is unknown.
        """
        check_implementation(implementation, "TiledMLP")
        check_activation(activation, "TiledMLP")
        # Float32 bytes of all weights that are tiled together: up, down and, if gated, gate.
        num_bytes = 4 * features * hidden * (3 if gated else 2)
        tiles = resolve_num_tiles(num_tiles, hidden, num_bytes, f"an MLP [{features}, {hidden}]")
        self.num_tiles = tiles
        self.seq_tiles = seq_tiles
        self.activation = activation
        self.dtype = dtype
        self.implementation = implementation

        def column() -> tuple[Any, Any]:
            # The kernel before its bias, in the order in which `nnx.Linear` draws from the stream.
            kernel = up_init(rngs.params(), (features, hidden), param_dtype)
            bias = bias_init(rngs.params(), (hidden,), param_dtype) if use_bias else None
            param = _param(kernel, 1, lambda w: tile_kernel(w, out_tiles=tiles))
            if bias is None:
                return param, nnx.data(None)
            return param, _param(bias, tiles, lambda b: b.reshape(tiles, -1))

        self.up, self.up_bias = column()
        self.gate, self.gate_bias = column() if gated else (nnx.data(None), nnx.data(None))
        down = down_init(rngs.params(), (hidden, features), param_dtype)
        self.down = _param(down, tiles, lambda w: tile_kernel(w, in_tiles=tiles))
        self.down_bias = nnx.data(None)
        if use_bias:
            self.down_bias = _bias(down_bias_init(rngs.params(), (features,), param_dtype))

    def __call__(self, x: Array) -> Array:
        """Return the MLP's result: x[..., S, D] -> [..., S, D]."""
        x = x if self.dtype is None else x.astype(self.dtype)
        names = ("up", "gate", "down", "up_bias", "gate_bias", "down_bias")
        params = {name: getattr(self, name) for name in names}
        weights = {name: param[...] for name, param in params.items() if param is not None}
        options: Any = {"seq_tiles": self.seq_tiles, "implementation": self.implementation}
        return tiled_mlp(x, weights, self.activation, **options)
