"""Cut weights into tiles, choose the number of tiles, and join tiles again."""

import logging
import math
from collections.abc import Mapping

import jax

from zerojax.given import as_integer, whole_number

logger = logging.getLogger("zerojax")
Array = jax.Array

TILE_BYTES = 1 << 28
"""Most bytes of a tile, gathered in float32, with `num_tiles=None`.

It is a small part of any GPU's memory, and still makes a large enough product.
"""


def choose_num_tiles(size: int, num_bytes: int, what: str) -> int:
    """Return the fewest tiles that divide a dim and have at most TILE_BYTES each; log if several.

    Args:
      size: size of the dim.
      num_bytes: float32 bytes of the full weight, or of the weights that are tiled together.
      what: description of these weights, for the log.

    Raises:
      ValueError: the dim has no such divisor.
    """
    # Search upwards from the least number that keeps a tile within TILE_BYTES: the first divisor
    # has the largest tiles.
    for tiles in range(max(1, math.ceil(num_bytes / TILE_BYTES)), size + 1):
        if size % tiles == 0:
            if tiles > 1:
                logger.info("%s of %.2f GiB is kept as %d tiles", what, num_bytes / 2**30, tiles)
            return tiles
    raise ValueError(
        f"{what} of {num_bytes} bytes cannot be divided into tiles of {TILE_BYTES} bytes by any "
        f"divisor of {size}"
    )


def check_tiles(tiles: int, size: int, what: str) -> int:
    """Return `tiles` as an int if it divides a dim of `size`; `what` is its name, for messages.

    Raises:
      ValueError: it does not divide the dim, or is not a positive integer.
    """
    dim = as_integer(size)
    if dim is None or dim < 1:
        raise ValueError(
            f"a dim of {size!r}, to be tiled by {what}={tiles!r}: an integer of at least 1 is "
            "needed"
        )
    count = whole_number(what, tiles, 1)
    if dim % count:
        raise ValueError(
            f"{what}={count} does not divide the dim of {dim} that it tiles: {dim} % {count} = "
            f"{dim % count}"
        )
    return count


def resolve_num_tiles(num_tiles: int | None, size: int, num_bytes: int, what: str) -> int:
    """Return the number of tiles of a dim: `num_tiles`, or the choice of `choose_num_tiles`.

    Raises:
      ValueError: `num_tiles` does not divide the dim, or no number of tiles does.
    """
    if num_tiles is None:
        return choose_num_tiles(size, num_bytes, what)
    return check_tiles(num_tiles, size, "num_tiles")


def tile_kernel(kernel: Array, *, in_tiles: int = 1, out_tiles: int = 1) -> Array:
    """Return a dense kernel W[D, F] as tiles [out_tiles * in_tiles, D / in_tiles, F / out_tiles].

    Raises:
      ValueError: the kernel is not [D, F], or the tiles do not divide a dim.
    """
    if kernel.ndim != 2:
        raise ValueError(f"a dense kernel is [D, F], and this one is {kernel.shape}")
    d, f = kernel.shape
    in_tiles = check_tiles(in_tiles, d, "in_tiles")
    out_tiles = check_tiles(out_tiles, f, "out_tiles")
    split = kernel.reshape(in_tiles, d // in_tiles, out_tiles, f // out_tiles)  # [i, D/i, o, F/o]
    # The tiles of one block of columns are consecutive, so their sum is complete before the next
    # block's begins.
    return split.transpose(2, 0, 1, 3).reshape(out_tiles * in_tiles, d // in_tiles, f // out_tiles)


def untile_kernel(tiles: Array, *, in_tiles: int = 1) -> Array:
    """Return the dense kernel of tiles, the inverse of `tile_kernel`.

    Raises:
      ValueError: `in_tiles` does not divide the number of tiles, or is not a positive integer.
    """
    rows = as_integer(in_tiles)
    if rows is None or rows < 1 or tiles.ndim != 3 or tiles.shape[0] % rows:
        raise ValueError(
            f"in_tiles={in_tiles!r}: tiles are [out_tiles * in_tiles, D / in_tiles, F / "
            f"out_tiles], both numbers integers of at least 1, not {tiles.shape}"
        )
    count, d, f = tiles.shape
    out_tiles = count // in_tiles
    return (
        tiles.reshape(out_tiles, in_tiles, d, f)
        .transpose(1, 2, 0, 3)
        .reshape(in_tiles * d, out_tiles * f)
    )


def tile_mlp(dense: Mapping[str, Array], num_tiles: int) -> dict[str, Array]:
    """Return the weights of a dense MLP as tiles along its hidden dim.

    Args:
      dense: weights "up"[D, H], "down"[H, D], and optionally "gate"[D, H], "up_bias"[H],
        "gate_bias"[H]; other entries are kept unchanged.
      num_tiles: number of tiles.

    Raises:
      ValueError: the tiles do not divide H.
    """
    tiled = dict(dense)
    for name in ("up", "gate"):
        if name in dense:
            tiled[name] = tile_kernel(dense[name], out_tiles=num_tiles)
    tiled["down"] = tile_kernel(dense["down"], in_tiles=num_tiles)
    for name in ("up_bias", "gate_bias"):
        if name in dense:
            tiled[name] = dense[name].reshape(num_tiles, -1)
    return tiled


def untile_mlp(tiled: Mapping[str, Array]) -> dict[str, Array]:
    """Return the dense weights of a tiled MLP, the inverse of `tile_mlp`."""
    dense = dict(tiled)
    for name in ("up", "gate"):
        if name in tiled:
            dense[name] = untile_kernel(tiled[name])
    dense["down"] = untile_kernel(tiled["down"], in_tiles=tiled["down"].shape[0])
    for name in ("up_bias", "gate_bias"):
        if name in tiled:
            dense[name] = tiled[name].reshape(-1)
    return dense
