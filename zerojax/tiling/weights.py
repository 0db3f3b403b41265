"""Weights in tiles: how many tiles to use, how a whole weight is cut into them, and how they are
joined again.
"""

import logging
import math
from collections.abc import Mapping

import jax

from zerojax.given import as_integer, whole_number

logger = logging.getLogger("zerojax")
Array = jax.Array

TILE_BYTES = 1 << 28
"""Bytes of a tile, gathered in float32, at most, with `num_tiles=None`: a small part of any GPU,
and a product large enough.
"""


def choose_num_tiles(size: int, num_bytes: int, what: str) -> int:
    """Return the fewest tiles that divide a dim and are each at most TILE_BYTES; logs it if there
    is more than one.

    Args:
      size: of the dim.
      num_bytes: of the whole weight, or of the weights that are tiled together.
      what: they are, for the log.

    Raises:
      ValueError: the dim has no such divisor.
    """
    # Upwards from the least number that keeps a tile within TILE_BYTES: the first divisor has the
    # largest tiles.
    for tiles in range(max(1, math.ceil(num_bytes / TILE_BYTES)), size + 1):
        if size % tiles == 0:
            if tiles > 1:
                logger.info("%s of %.2f GiB is kept as %d tiles", what, num_bytes / 2**30, tiles)
            return tiles
    raise ValueError(
        f"{what} of {num_bytes} bytes is not divided into tiles of {TILE_BYTES} bytes by any divisor of {size}"
    )


def check_tiles(tiles: int, size: int, what: str) -> int:
    """Return a number of tiles that divides a dim.

    Raises:
      ValueError: it does not, or is no positive integer.
    """
    dim = as_integer(size)
    if dim is None or dim < 1:
        raise ValueError(
            f"a dim of {size!r}, to be tiled by {what}={tiles!r}: an integer of at least 1 is needed"
        )
    count = whole_number(what, tiles, 1)
    if dim % count:
        raise ValueError(
            f"{what}={count} does not divide the dim of {dim} that it tiles: {dim} % {count} = {dim % count}"
        )
    return count


def tiles_of(num_tiles: int | None, size: int, num_bytes: int, what: str) -> int:
    """Return the number of tiles of a dim: the one asked for, or as `choose_num_tiles` says.

    Raises:
      ValueError: it does not divide the dim.
    """
    return (
        choose_num_tiles(size, num_bytes, what)
        if num_tiles is None
        else check_tiles(num_tiles, size, "num_tiles")
    )


def tile_kernel(kernel: Array, *, in_tiles: int = 1, out_tiles: int = 1) -> Array:
    """Return a dense kernel as tiles: W[D, F] -> W[out_tiles * in_tiles, D / in_tiles, F /
    out_tiles].

    Raises:
      ValueError: the tiles do not divide a dim.
    """
    if kernel.ndim != 2:
        raise ValueError(f"a dense kernel is [D, F], and this one is {kernel.shape}")
    d, f = kernel.shape
    in_tiles = check_tiles(in_tiles, d, "in_tiles")
    out_tiles = check_tiles(out_tiles, f, "out_tiles")
    split = kernel.reshape(in_tiles, d // in_tiles, out_tiles, f // out_tiles)  # [i, D/i, o, F/o]
    # The tiles of one block of columns follow each other, so their sum is finished before the next
    # block's begins.
    return split.transpose(2, 0, 1, 3).reshape(out_tiles * in_tiles, d // in_tiles, f // out_tiles)


def untile_kernel(tiles: Array, *, in_tiles: int = 1) -> Array:
    """Return tiles as the dense kernel: what `tile_kernel` does, undone.

    Raises:
      ValueError: `in_tiles` does not divide the tiles, or is no positive integer.
    """
    rows = as_integer(in_tiles)
    if rows is None or rows < 1 or tiles.ndim != 3 or tiles.shape[0] % rows:
        raise ValueError(
            f"in_tiles={in_tiles!r}: tiles are [out_tiles * in_tiles, D / in_tiles, F / out_tiles], both numbers integers of "
            f"at least 1, not {tiles.shape}"
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
      dense: "up"[D, H], "down"[H, D], and if there are such "gate"[D, H], "up_bias"[H],
        "gate_bias"[H]; others stay so.
      num_tiles: of them.

    Raises:
      ValueError: they do not divide H.
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
    """Return the weights of a tiled MLP as those of a dense one: what `tile_mlp` does, undone."""
    dense = dict(tiled)
    for name in ("up", "gate"):
        if name in tiled:
            dense[name] = untile_kernel(tiled[name])
    dense["down"] = untile_kernel(tiled["down"], in_tiles=tiled["down"].shape[0])
    for name in ("up_bias", "gate_bias"):
        if name in tiled:
            dense[name] = tiled[name].reshape(-1)
    return dense
