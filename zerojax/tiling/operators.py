"""Memory-centric tiling: an operator too large for a device runs as a sequence of tiles.

After ZeRO-Infinity (arXiv:2104.07857, section 5.1.3). The weight of a dense layer is stored as a
stack of tiles, and used in a loop that gathers, uses and releases one tile at a time:

    tiles along the output   W[t, D, F/t]        y[:, k] = x W[k]                   columns of y
    along the input          W[t, D/t, F]        y = sum_k x[:, k] W[k]             float32 sum
    along both               W[o*i, D/i, F/o]    y[:, k] = sum_j x[:, j] W[k*i + j]

An MLP is tiled along its hidden dim, so that neither its two weights nor its hidden activations
ever exist in full:

    up[t, D, H/t], down[t, H/t, D]               y = sum_k f(x up[k]) down[k]

A tile is a unit of rematerialisation. Backward gathers it again, recomputes its inner activations,
and reduces its gradient to the shards before it moves on to the next tile. Forward saves only the
input, which all tiles share. At stage 3 the loop is a scan over a stack whose tile dim is not
split, so gather-on-use slices the stack while it is sharded.

DeepSpeed's TiledLinear makes a module of each tile, so that its hooks gather it; here the tiles are
one leaf.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import Implementation
from zerojax.tiling.kernels import (
    check_activation,
    check_implementation,
    joined,
    measured_faster,
    product,
    tensor_dims,
    use_mlp,
)
from zerojax.tiling.loops import loop_over
from zerojax.tiling.weights import check_tiles

Array = jax.Array
WIDE = "zerojax_wide_product"
"""Name inside of a `wide_product` that identifies its equation."""


def tile_sum(
    function: Callable[[Any, Any, Any], Array], tiles: Any, x: Any, parts: Any = None
) -> Array:
    """Return sum_k function(tiles[k], x, parts[k]), summed in float32.

    Args:
      function: differentiable function of (tile, x, part), which backward runs again. Its result
        has the same shape for every tile.
      tiles: tree of stacks [t, ...]; a slice of each is one tile.
      x: tree that every tile reads.
      parts: tree of stacks [t, ...] of which each tile reads its own slice, or None.
    """
    return loop_over(function, tiles, x, parts)[0]


def tile_stack(function: Callable[[Any, Any], Array], tiles: Any, x: Any) -> Array:
    """Return function(tiles[k], x) for every tile, stacked: [t, ...].

    Backward runs the function again.
    """
    count = jax.tree.leaves(tiles)[0].shape[0]
    return loop_over(lambda tile, x, _: function(tile, x), tiles, x, num_out=count, summed=False)


def in_chunks(
    function: Callable[[Any, Array], Array], num_chunks: int
) -> Callable[[Any, Array], Array]:
    """Return `function(tile, x)` for x[..., S, D], run on `num_chunks` pieces of dim S in sequence.

    Its inner activations are never held for more than one piece, in forward or in backward.
    """
    if num_chunks == 1:
        return function

    def chunked(tile: Any, x: Array) -> Array:
        *lead, seq, width = x.shape
        check_tiles(num_chunks, seq, "seq_tiles")
        # [..., S, D] -> [chunks, ..., S / chunks, D]
        pieces = jnp.moveaxis(x.reshape(*lead, num_chunks, seq // num_chunks, width), -3, 0)
        unit = jax.checkpoint(lambda piece: function(tile, piece))
        chunks = jnp.moveaxis(jax.lax.map(unit, pieces), 0, -3)  # [..., chunks, S / chunks, F]
        return chunks.reshape(*lead, seq, chunks.shape[-1])

    return chunked


def tiled_dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    in_tiles: int = 1,
    implementation: Implementation | None = None,
    spec: Sequence[str | None] | None = None,
) -> Array:
    """Return x W + b, one tile of W at a time.

    Args:
      x: activations [..., D].
      kernel: tiles [out_tiles * in_tiles, D / in_tiles, F / out_tiles] from `tile_kernel`, in the
        dtype of x.
      bias: bias [F], or None.
      in_tiles: number of tiles along D.
      implementation: implementation of the products: "mosaic" (`pallas_kernels.matmul`'s kernel for
        Hopper GPUs, 16-bit dtypes), "xla" or "reference" of that op. None takes XLA's products, and
        the op's if its table of measurements shows that the kernel is faster for a tile's product.
      spec: mesh axes of W's dims (D, F), for the kernel: it runs on the columns, or the rows, of a
        device of a tensor group. None runs it on full tiles.

    Returns:
      [..., F] in the dtype of x; products are summed in float32.

    Raises:
      ValueError: x and the tiles do not fit, `in_tiles` does not divide the number of tiles, or the
        implementation is unknown.
      NotImplementedError: the named implementation does not support this dtype or this device.
    """
    check_implementation(implementation, "tiled_dense")
    count, d, f = kernel.shape
    check_tiles(in_tiles, count, "in_tiles")
    if x.shape[-1] != in_tiles * d:
        raise ValueError(
            f"x has {x.shape[-1]} features, and {in_tiles} tiles of {d} take {in_tiles * d}"
        )
    columns, summed = tensor_dims(spec)
    axes: dict[str, Any] = {"columns": columns, "summed": summed}
    accumulates = in_tiles > 1 or summed is not None

    def one_tile(run: Callable[..., Array], kernel: Array, x: Array, bias: Array | None) -> Array:
        if not accumulates:
            return run(x, kernel[0], None if bias is None else bias[:f], **axes)
        wide = {**axes, "preferred_element_type": jnp.float32}
        total = product(x[..., :d], kernel[0], implementation="xla", **wide)
        return run(x[..., :d], kernel[0], None, None, total, **wide)

    if implementation is not None or measured_faster(one_tile, kernel, x, bias):
        run = functools.partial(product, implementation=implementation, **axes)
        if not accumulates:
            return _biased_columns(run, kernel, x, bias)
        run = functools.partial(run, preferred_element_type=jnp.float32)
        y = _accumulated(run, kernel, x, in_tiles)
    elif in_tiles == 1:
        y = _join_columns(tile_stack(lambda w, x: x @ w.astype(x.dtype), kernel, x))
    else:
        y = _summed(kernel, x, in_tiles).astype(x.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def _join_columns(y: Array) -> Array:
    """Return the columns of all tiles together: y[t, ..., F/t] -> [..., F]."""
    y = jnp.moveaxis(y, 0, -2)  # [..., t, F/t]
    *lead, count, f = y.shape
    return y.reshape(*lead, count * f)


def _biased_columns(
    run: Callable[..., Array], kernel: Array, x: Array, bias: Array | None
) -> Array:
    """Return x W + b[..., F] for tiles along F; the kernel adds each tile's part of the bias."""
    count, _, f = kernel.shape
    biases = None if bias is None else bias.reshape(count, f)
    y = loop_over(lambda w, x, b: run(x, w, b), kernel, x, biases, num_out=count, summed=False)
    return _join_columns(y)


def _summed(kernel: Array, x: Array, in_tiles: int) -> Array:
    """Return x W[..., F] in float32 for tiles along D, or along both dims, by XLA's products."""
    out_tiles = kernel.shape[0] // in_tiles
    pieces = _split_rows(x, in_tiles)
    if out_tiles > 1:
        return _both(kernel, pieces, out_tiles)
    return tile_sum(
        lambda w, _, piece: wide_product(piece, w.astype(piece.dtype)), kernel, None, pieces
    )


def _split_rows(x: Array, in_tiles: int) -> Array:
    """Return the pieces of x that the tiles along D read: x[..., D] -> [i, ..., D/i]."""
    *lead, d = x.shape
    return jnp.moveaxis(x.reshape(*lead, in_tiles, d // in_tiles), -2, 0)


def _accumulated(run: Callable[..., Array], kernel: Array, x: Array, in_tiles: int) -> Array:
    """Return y[..., F] for tiles along D, in x's dtype.

    Each kernel adds its product to the float32 sum of the products before.
    """
    out_tiles = kernel.shape[0] // in_tiles
    pieces = _split_rows(x, in_tiles)
    if out_tiles == 1:
        y = loop_over(
            lambda w, _, piece, total: run(piece, w, accumulate=total),
            kernel,
            None,
            pieces,
            accumulates=True,
        )
        return joined(y[0], x.ndim, x.dtype)

    def unit(w: Array, pieces: Array, j: Array, total: Array | None) -> Array:
        piece = jax.lax.dynamic_index_in_dim(pieces, j, 0, keepdims=False)
        return run(piece, w, accumulate=total)

    piece_numbers = jnp.arange(kernel.shape[0]) % in_tiles
    y = loop_over(unit, kernel, pieces, piece_numbers, num_out=out_tiles, accumulates=True)
    y = joined(jnp.moveaxis(y, 0, -2), x.ndim + 1, x.dtype)  # [..., o, F/o]
    return y.reshape(*x.shape[:-1], -1)


def _both(kernel: Array, pieces: Array, out_tiles: int) -> Array:
    """Return y[..., F] for tiles along both dims, in float32; pieces are [i, ..., D/i]."""
    in_tiles = pieces.shape[0]

    def unit(w: Array, pieces: Array, j: Array) -> Array:
        piece = jax.lax.dynamic_index_in_dim(pieces, j, 0, keepdims=False)
        return wide_product(piece, w.astype(piece.dtype))

    # Tile k i + j reads piece j. `loop_over` passes a tile its own entry of a stack, so j is passed
    # as a stack of numbers.
    piece_numbers = jnp.arange(kernel.shape[0]) % in_tiles
    y = loop_over(unit, kernel, pieces, piece_numbers, num_out=out_tiles)
    return _join_columns(y)


def tiled_mlp(
    x: Array,
    weights: Mapping[str, Array],
    activation: Callable[[Array], Array] = jax.nn.gelu,
    *,
    seq_tiles: int = 1,
    implementation: Implementation | None = None,
) -> Array:
    """Return an MLP's result, computed one tile of its hidden dim at a time.

    It is y = sum_k f(x up[k] + b[k]) down[k] + c. With a "gate", f(x gate[k]) * (x up[k]) replaces
    f(x up[k]) (arXiv:2002.05202).

    Args:
      x: activations [..., S, D].
      weights: "up"[t, D, H/t], "down"[t, H/t, F], and optionally "gate"[t, D, H/t], "up_bias"[t,
        H/t], "gate_bias"[t, H/t] and "down_bias"[F], as returned by `tile_mlp`, in the dtype of x.
      activation: activation function f.
      seq_tiles: number of pieces of S for which each tile is used one after the other; the hidden
        activations are then [..., S / seq_tiles, H / t].
      implementation: implementation of the products, as in `tiled_dense`. The kernel includes
        biases, a gate, and f if it is `jax.nn.gelu` or `jax.nn.silu`; any other f is applied after
        it. It adds a tile to the sum in place if `seq_tiles` is 1.

    Returns:
      [..., S, F] in the dtype of x; summed in float32.

    Raises:
      ValueError: the weights do not belong together, `seq_tiles` does not divide S, or the
        implementation is unknown.
      NotImplementedError: the named implementation does not support this dtype or this device.
    """
    check_implementation(implementation, "tiled_mlp")
    check_activation(activation, "tiled_mlp")
    tiles = {name: a for name, a in weights.items() if name != "down_bias"}
    _check_mlp(tiles, x)

    def one_tile(run: Callable[..., Array], tiles: Mapping[str, Array], x: Array) -> Array:
        tile = {name: a[0] for name, a in tiles.items()}
        if seq_tiles > 1:
            return use_mlp(run, tile, x[..., : x.shape[-2] // seq_tiles, :], activation)
        total = use_mlp(functools.partial(product, implementation="xla"), tile, x, activation)
        return use_mlp(run, tile, x, activation, total)

    by_op = implementation is not None or measured_faster(one_tile, tiles, x)
    run = functools.partial(product, implementation=implementation)

    def use(tile: Mapping[str, Array], x: Array) -> Array:
        if by_op:
            return joined(use_mlp(run, tile, x, activation), x.ndim, jnp.float32)
        return _xla_mlp_tile(tile, x, activation)

    if by_op and seq_tiles == 1:
        unit = lambda tile, x, _, total: use_mlp(run, tile, x, activation, total)  # noqa: E731
        y = joined(loop_over(unit, tiles, x, accumulates=True)[0], x.ndim, x.dtype)
    else:
        chunked = in_chunks(use, seq_tiles)
        y = tile_sum(lambda tile, x, _: chunked(tile, x), tiles, x).astype(x.dtype)
    return y + weights["down_bias"].astype(y.dtype) if "down_bias" in weights else y


def _check_mlp(tiles: Mapping[str, Array], x: Array) -> None:
    """Raise ValueError unless the tiles of an MLP belong together, and to x[..., D]."""
    unknown = sorted(set(tiles) - {"up", "down", "gate", "up_bias", "gate_bias"})
    if unknown:
        raise ValueError(
            f"an MLP has up, down, gate, up_bias, gate_bias and down_bias, not {unknown}"
        )
    shapes = {name: a.shape for name, a in tiles.items()}
    missing = sorted({"up", "down"} - set(tiles))
    if missing:
        raise ValueError(f"an MLP has up and down, and {missing} are missing")
    up = shapes["up"]
    down = shapes["down"]
    biases = {shape for name, shape in shapes.items() if name.endswith("_bias")}
    alike = (
        len(up) == len(down) == 3
        and up[::2] == down[:2]
        and shapes.get("gate", up) == up
        and biases <= {up[::2]}
    )
    if not alike or up[1] != x.shape[-1]:
        raise ValueError(f"these tiles do not belong together, or not to x {x.shape}: {shapes}")


def _xla_mlp_tile(
    tile: Mapping[str, Array], x: Array, activation: Callable[[Array], Array]
) -> Array:
    """Return the result of one tile of an MLP in float32, by XLA's products; see `tiled_mlp`."""

    def linear(name: str) -> Array:
        y = x @ tile[name].astype(x.dtype)  # [..., S / seq_tiles, H / t]
        bias = tile.get(f"{name}_bias")
        return y if bias is None else y + bias.astype(x.dtype)

    if "gate" in tile:
        hidden = activation(linear("gate")) * linear("up")
    else:
        hidden = activation(linear("up"))
    return wide_product(hidden, tile["down"].astype(x.dtype))


@jax.custom_vjp
def wide_product(x: Array, w: Array) -> Array:
    """Return x[..., D] w[D, F] in float32, for operands of one dtype.

    Use it if the result is summed and then rounded to that dtype. Its cotangent is then a number of
    that dtype, so the gradients are products of that dtype, which devices sum like those of a dense
    layer. By JAX's rule they would first be float32, and collectives would move twice the bytes.
    """
    return checkpoint_name(jnp.matmul(x, w, preferred_element_type=jnp.float32), WIDE)


def _wide_product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return wide_product(x, w), (x, w)


def _wide_product_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    # Round before the products, so that dw, and the collective that sums it, has the dtype of x.
    dy = dy.astype(x.dtype)
    lead = tuple(range(x.ndim - 1))
    return dy @ w.T, jnp.tensordot(x, dy, (lead, lead))


def is_wide_product(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation is a `wide_product`."""
    if eqn.primitive.name != "custom_vjp_call":
        return False
    return any(
        inner.params.get("name") == WIDE
        for jaxpr in jex.jaxprs_in_params(eqn.params)
        for inner in jaxpr.eqns
    )


wide_product.defvjp(_wide_product_forward, _wide_product_backward)
