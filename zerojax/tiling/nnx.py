"""Tiled layers for Flax NNX: they hold the weights of a dense layer as tiles, and use one at a time
(`operators`).

They are initialized with the numbers of the dense layers they stand for, from the same random
streams, so that one can replace the other in a model. `tile_kernel` and `tile_mlp` cut dense
weights into tiles; `untile_kernel` and `untile_mlp` join them.
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
from zerojax.tiling.weights import check_tiles, tile_kernel, tiles_of

Array = jax.Array
Initializer = Callable[..., Any]
_ANNOTATIONS = ("out_sharding", "sharding_names", "sharding")
"""Versions of Flax differ in the name of an annotation."""


def _param(param: Any, in_tiles: int, tile: Callable[[Array], Array]) -> nnx.Param[Array]:
    """Return a parameter that holds tiles; its sharding annotation, if there is one, is adapted to
    them.

    Its metadata `tiles` is (how many tiles lie along the first dim, number of dims). The number of
    dims distinguishes it from a stack of modules, which has one more.
    """
    if not isinstance(param, nnx.VariableMetadata):
        value = tile(param)
        return nnx.Param(value, tiles=(in_tiles, value.ndim))
    value = tile(param.raw_value)
    metadata: dict[str, Any] = {**param.metadata, "tiles": (in_tiles, value.ndim)}
    # The dim that numbers the tiles comes first, and no axis splits it.
    for name in _ANNOTATIONS:
        if metadata.get(name) is not None:
            metadata[name] = (None, *metadata[name])
    return nnx.Param(value, **metadata)


class TiledDense(nnx.Module):
    """A dense layer y = x W + b whose W is gathered, fetched, used and released one tile at a time.

    Attributes:
      kernel: [out_tiles * in_tiles, D / in_tiles, F / out_tiles].
      bias: [F], or None.
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
        """Make the weights: those that `nnx.Linear` makes.

        Args:
          in_features: D.
          out_features: F.
          num_tiles: along F; None chooses by `zerojax.tiling.choose_num_tiles`.
          in_tiles: along D.
          use_bias: whether there is one.
          dtype: of x, products and result; that of x by default.
          param_dtype: of the weights.
          implementation: of the products, as of `zerojax.tiling.tiled_dense`; None chooses by
            measurements.
          kernel_init: makes [D, F]; may be `nnx.with_partitioning`.
          bias_init: makes [F]; may be `nnx.with_partitioning`.
          rngs: streams.

        Raises:
          ValueError: tiles that do not divide a dim, or an unknown implementation.
        """
        check_implementation(implementation, "TiledDense")
        check_tiles(in_tiles, in_features, "in_tiles")
        # Float32 bytes of [D / in_tiles, F], which `num_tiles` divides along F.
        num_bytes = 4 * in_features * out_features // in_tiles
        tiles = tiles_of(
            num_tiles, out_features, num_bytes, f"a dense kernel [{in_features}, {out_features}]"
        )
        self.in_tiles, self.dtype, self.implementation = in_tiles, dtype, implementation
        # Initialized whole and then cut, so fan-in and random numbers are those of `nnx.Linear`.
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = _param(
            kernel, in_tiles, lambda w: tile_kernel(w, in_tiles=in_tiles, out_tiles=tiles)
        )
        self.spec = annotation(kernel)
        self.bias = (
            _bias(bias_init(rngs.params(), (out_features,), param_dtype))
            if use_bias
            else nnx.data(None)
        )

    def __call__(self, x: Array) -> Array:
        """Return x W + b: x[..., D] -> [..., F]."""
        x = x if self.dtype is None else x.astype(self.dtype)
        options: Any = {
            "in_tiles": self.in_tiles,
            "implementation": self.implementation,
            "spec": self.spec,
        }
        return tiled_dense(
            x, self.kernel[...], None if self.bias is None else self.bias[...], **options
        )


def annotation(param: Any) -> tuple[str | None, ...] | None:
    """Return the mesh axes of a parameter's dims, as `nnx.with_partitioning` says them, or None."""
    metadata = param.metadata if isinstance(param, nnx.VariableMetadata) else {}
    return next(
        (tuple(metadata[name]) for name in _ANNOTATIONS if metadata.get(name) is not None), None
    )


def _bias(param: Any) -> nnx.Param[Array]:
    return (
        nnx.Param(param.raw_value, **param.metadata)
        if isinstance(param, nnx.VariableMetadata)
        else nnx.Param(param)
    )


class TiledMLP(nnx.Module):
    """An MLP y = f(x up + b) down + c, whose weights are used one tile of the hidden dim at a time.

    Neither a whole weight nor the hidden activations are ever there. With `gated`, f(x gate) * (x
    up) replaces f(x up).

    Attributes:
      up: [t, D, H / t].
      down: [t, H / t, D].
      gate: [t, D, H / t], or None.
      up_bias: [t, H / t], or None; gate_bias has the same shape.
      down_bias: [D], or None.
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
        """Make the weights: those of `nnx.Linear` for up, gate if there is one, and down, in this
        order.

        Args:
          features: D.
          hidden: H.
          num_tiles: along H; None chooses by `zerojax.tiling.choose_num_tiles`.
          seq_tiles: pieces of the sequence in which a tile is used.
          activation: f.
          gated: whether there is a gate.
          use_bias: whether there are biases.
          dtype: of x, products and result; that of x by default.
          param_dtype: of the weights.
          implementation: of the products, as of `zerojax.tiling.tiled_mlp`; None chooses by
            measurements.
          up_init: makes [D, H], of up and gate; may be `nnx.with_partitioning`.
          down_init: makes [H, D]; may be `nnx.with_partitioning`.
          bias_init: makes [H], of up and gate; may be `nnx.with_partitioning`.
          down_bias_init: makes [D].
          rngs: streams.

        Raises:
          ValueError: tiles that do not divide the hidden dim, or an unknown implementation.
        """
        check_implementation(implementation, "TiledMLP")
        check_activation(activation, "TiledMLP")
        # Float32 bytes of all weights of which a tile has a slice: up and down, and gate.
        num_bytes = 4 * features * hidden * (3 if gated else 2)
        tiles = tiles_of(num_tiles, hidden, num_bytes, f"an MLP [{features}, {hidden}]")
        self.num_tiles, self.seq_tiles, self.activation, self.dtype = (
            tiles,
            seq_tiles,
            activation,
            dtype,
        )
        self.implementation = implementation

        def column() -> tuple[Any, Any]:
            # The kernel before its bias, as `nnx.Linear` draws from the stream.
            kernel = up_init(rngs.params(), (features, hidden), param_dtype)
            bias = bias_init(rngs.params(), (hidden,), param_dtype) if use_bias else None
            param = _param(kernel, 1, lambda w: tile_kernel(w, out_tiles=tiles))
            return param, nnx.data(None) if bias is None else _param(
                bias, tiles, lambda b: b.reshape(tiles, -1)
            )

        self.up, self.up_bias = column()
        self.gate, self.gate_bias = column() if gated else (nnx.data(None), nnx.data(None))
        down = down_init(rngs.params(), (hidden, features), param_dtype)
        self.down = _param(down, tiles, lambda w: tile_kernel(w, in_tiles=tiles))
        self.down_bias = (
            _bias(down_bias_init(rngs.params(), (features,), param_dtype))
            if use_bias
            else nnx.data(None)
        )

    def __call__(self, x: Array) -> Array:
        """Return the MLP of x[..., S, D]."""
        x = x if self.dtype is None else x.astype(self.dtype)
        names = ("up", "gate", "down", "up_bias", "gate_bias", "down_bias")
        weights = {name: a[...] for name in names if (a := getattr(self, name)) is not None}
        options: Any = {"seq_tiles": self.seq_tiles, "implementation": self.implementation}
        return tiled_mlp(x, weights, self.activation, **options)
