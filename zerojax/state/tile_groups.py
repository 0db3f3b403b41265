"""Find the leaves whose records are tiles, and the leaves whose tiles are used together.

A **group** is the stacks [T, ...] that one module holds, such as the weights of a `TiledMLP`: a
block uses tile k of each stack together, in one loop. Everything else in a block, including stacks
of a single tile, has one record per layer.
"""

import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any

import jax

from zerojax.config import ZeroConfig, streams, untiled_setting
from zerojax.models import BLOCKS, LayeredModel, Model, of_every_stack
from zerojax.state.leaves import TileGroup, is_stacked, stack_name
from zerojax.trees import Params
from zerojax.user_values import as_flag, as_integer

logger = logging.getLogger("zerojax")


def tiled_leaves(model: Model | LayeredModel, abstract_params: Params) -> list[bool | int]:
    """Return whether each leaf is a stack of tiles, according to `model.tiles`.

    For a LayeredModel, the leaves are the leaves of its blocks.

    Args:
      model: the model.
      abstract_params: the abstract parameter tree.

    Returns:
      For each leaf, a bool, or the number of tiles along the first dim.

    Raises:
      ValueError: `model.tiles` has another structure, names a leaf without a tile dim, or gives a
        number that does not divide the tiles of a leaf.
    """
    is_layered = isinstance(model, LayeredModel)
    if is_layered:
        params, what = (abstract_params[BLOCKS], "parameters of one layer")
    else:
        params, what = (abstract_params, "parameters")
    try:
        if isinstance(model, LayeredModel):
            tiles = of_every_stack(model, model.tiles, False)
        else:
            tiles = model.tiles
        flag_tree = jax.tree.map(lambda flag, sub: jax.tree.map(lambda _: flag, sub), tiles, params)
        flags = jax.tree.leaves(flag_tree)
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"tiles must mirror the {what}, or be a prefix of their tree: {e}") from e
    for flag, (path, leaf) in zip(
        flags, jax.tree_util.tree_flatten_with_path(params)[0], strict=True
    ):
        number = flag if as_flag(flag) is not None else as_integer(flag)
        if number is None or (as_flag(flag) is None and number < 1):
            raise ValueError(
                f"tiles holds {flag!r} for {jax.tree_util.keystr(path)}: it must be True, False or "
                "the number of tiles along the first dim"
            )
        # The dim of tiles follows the dim of layers, if there is one.
        if flag and len(leaf.shape) < 1 + is_layered:
            raise ValueError(
                f"tiles names {jax.tree_util.keystr(path)}, which is a scalar: a stack of tiles is "
                "[T, ...]"
            )
        if flag and leaf.shape[is_layered] % flag:
            raise ValueError(
                f"tiles holds {flag} for {jax.tree_util.keystr(path)}, which has "
                f"{leaf.shape[is_layered]} tiles: the number along the first dim must divide them"
            )
    return flags


def tile_groups(
    model: Model | LayeredModel, abstract_params: Params, config: ZeroConfig
) -> tuple[TileGroup, ...]:
    """Return the groups whose records are tiles.

    The result is empty if a step does not stream, or streams only full layers. A group's leaves are
    given by their positions in the tree, whether they are frozen or not.

    Args:
      model: the model.
      abstract_params: the abstract parameter tree.
      config: configuration of the program.

    Raises:
      ValueError: `model.tiles` is wrong (see `tiled_leaves`), or stacks of one module differ in
        their number of tiles.
    """
    if not isinstance(model, LayeredModel) or not any(
        flags := tiled_leaves(model, abstract_params)
    ):
        return ()
    if not streams(config):
        return ()
    if (why := untiled_setting(config)) is not None:
        logger.info(
            "%s moves full layers: stacks of tiles are fetched and gathered with the rest of their "
            "layer",
            why,
        )
        return ()
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(abstract_params)[0]]
    leaves = jax.tree.leaves(abstract_params)
    stacked = [i for i, path in enumerate(paths) if is_stacked(model, path)]
    modules: dict[tuple[Any, ...], list[int]] = {}  # path of a module: its stacks of tiles
    for i, flag in zip(stacked, flags, strict=True):
        if flag and leaves[i].shape[1] > 1:
            # Without the key of the blocks and the name of the leaf, this is the path of the module
            # that holds the leaf.
            modules.setdefault(paths[i][1:-1], []).append(i)
    groups: list[TileGroup] = []
    for path, indices in modules.items():
        name = _path_name(path)
        names = [group.name for group in groups]
        # Different paths may have the same name, such as the keys 1 and "1", and a name is also a
        # folder.
        name = next(n for n in (f"{name}{k or ''}" for k in itertools.count()) if n not in names)
        counts = {jax.tree_util.keystr(paths[i]): leaves[i].shape[1] for i in indices}
        if len(set(counts.values())) > 1:
            raise ValueError(
                "stacks of tiles in one module are used together, but differ in their number of "
                f"tiles: {counts}"
            )
        stack = stack_name(model, paths[indices[0]])
        groups.append(TileGroup(name, tuple(indices), leaves[indices[0]].shape[1], stack=stack))
    return tuple(groups)


def _path_name(path: Sequence[Any]) -> str:
    """Return the name of the module that holds a stack, for use in the name of a folder.

    Characters not allowed there are written as %hex.
    """
    keys = [
        str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path
    ]
    return (
        ".".join(
            re.sub(r"[^A-Za-z0-9_-]", lambda match: f"%{ord(match[0]):x}", key) for key in keys
        )
        or "block"
    )
