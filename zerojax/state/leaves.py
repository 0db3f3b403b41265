"""The table of a model's parameter leaves, and the records to which each leaf belongs.

    role     leaf                                               lead    one record holds
    block    W[L, ...], a stack of a LayeredModel's layers      1       one layer of all such leaves
    tile     W[L, T, ...], in a group whose records are tiles   2       one tile of all its leaves
    end      embedding, head, every leaf of a Model             0       the leaf

On a mesh with `pipe`, a record holds one layer of every stage: its first dim counts the stages
(`zerojax.state.wide`).

`lead` counts the leading dims that number a leaf's records; the remaining dims are the shape of one
record. The table is in the order of the flattened parameter tree, so an index into it is also an
index into the flattened parameters. Frozen leaves have their own table, and their indices continue
after the indices of the trainable leaves. The code that updates weights sees only trainable leaves.

A **group** is the stacks [T, ...] that one module holds, such as the weights of a `TiledMLP`: a
block uses tile k of each stack together, in one loop. Everything else in a block, including stacks
of a single tile, has one record per layer.
"""

import dataclasses
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from host_offload.schedule import tiles_kind
from zerojax.config import ZeroConfig, streams, untiled_setting
from zerojax.models import BLOCKS, LayeredModel, Model, of_every_stack
from zerojax.sharding import LeafSpec, Spec
from zerojax.state.wide import StageOrder, stage_order
from zerojax.trees import Params
from zerojax.user_values import as_flag, as_integer

logger = logging.getLogger("zerojax")

Role = Literal["block", "tile", "end"]
_ROLES: tuple[Role, ...] = ("end", "block", "tile")  # by lead


@dataclasses.dataclass(frozen=True)
class TileGroup:
    """Stacks of tiles that are used together.

    Attributes:
      name: path of the stacks in a layer, such as "mlp".
      leaves: indices of the trainable stacks, in order.
      num_tiles: T, the number of tiles in a layer.
      frozen: indices of the frozen stacks, in order (`Layout.all_leaves`).
      stack: name of the stack of layers, as in `Leaf`.
    """

    name: str
    leaves: tuple[int, ...]
    num_tiles: int
    frozen: tuple[int, ...] = ()
    stack: str = ""

    @property
    def weights(self) -> tuple[int, ...]:
        """Indices of all stacks of tiles in the group: trainable, then frozen."""
        return self.leaves + self.frozen

    def kind(self, kind: str) -> str:
        """Return the name of this group's records of a kind, such as "params"."""
        return tiles_kind(kind, self.name)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter leaf.

    Attributes:
      path: path in the parameter tree.
      name: the path as a string, such as "['blocks']['w']".
      shape: shape of all the leaf's records together.
      dtype: dtype used in computation; its master is float32. Frozen integers and booleans keep
        their own dtype.
      spec: how the mesh splits the leaf, including all dims.
      lead: number of leading dims that number the leaf's records.
      group: name of the leaf's group of tiles, if `lead` is 2.
      frozen: whether the leaf is only read: it has no master, gradient or optimizer state.
      decodes: the decoded leaf, with all its records, if this leaf is the first array of a weight
        in 8 or 4 bits; else None.
      stack: name of the stack of layers that the leaf belongs to; "" if the model has only one, or
        the leaf is unstacked.
      order: which layer each record holds of each pipeline stage; None if a record is one layer, or
        the leaf is unstacked.
    """

    path: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: LeafSpec
    lead: int = 0
    group: str = ""
    frozen: bool = False
    decodes: "Leaf | None" = None
    stack: str = ""
    order: StageOrder | None = None

    @property
    def role(self) -> Role:
        """The role of the leaf, see the table in the module docstring."""
        return _ROLES[self.lead]

    @property
    def is_stacked(self) -> bool:
        """Whether the leaf is a stack of layers."""
        return self.lead > 0

    @property
    def lead_shape(self) -> tuple[int, ...]:
        """Number of the leaf's records along each leading dim: (), (L,) or (L, T)."""
        return self.shape[: self.lead]

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Shape of one of the leaf's records: a layer, a tile, or the full leaf.

        With an `order`, it is the shape of one layer of every stage.
        """
        return self.shape[self.lead :]

    @property
    def layer_dims(self) -> int:
        """Number of leading dims that count layers: 2 for records of several stages."""
        return int(self.is_stacked) + (self.order is not None)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of the leaf in one layer, or of the full leaf if it is unstacked."""
        return self.shape[self.layer_dims :]

    @property
    def layer_spec(self) -> Spec:
        """The user's spec of the leaf in one layer, or of the full leaf if it is unstacked."""
        return self.spec.base[self.layer_dims :]


def is_stacked(model: Model | LayeredModel, path: Sequence[Any]) -> bool:
    """Return whether the parameter leaf at a path is a stack of layers.

    A Model has no stacks, whatever its keys are.
    """
    return isinstance(model, LayeredModel) and path[0] == jax.tree_util.DictKey(BLOCKS)


def build_leaves(
    model: Model | LayeredModel,
    abstract_compute: Params,
    specs: Mapping[str, LeafSpec],
    groups: Sequence[TileGroup],
    frozen: Sequence[bool],
) -> tuple[Leaf, ...]:
    """Return the table of all leaves, trainable and frozen, in the order of the tree.

    Args:
      model: the model.
      abstract_compute: the parameter tree, in the compute dtype.
      specs: LeafSpec of each leaf, by path.
      groups: groups of leaves whose records are tiles, by position in the tree.
      frozen: whether each leaf is frozen.
    """
    group_names: dict[int, str] = {}
    for group in groups:
        group_names |= dict.fromkeys(group.leaves, group.name)
    leaves = []
    arrays = jax.tree_util.tree_flatten_with_path(abstract_compute)[0]
    for i, (path, array) in enumerate(arrays):
        name = jax.tree_util.keystr(path)
        leaf = Leaf(
            path=path,
            name=name,
            shape=array.shape,
            dtype=array.dtype,
            spec=specs[name],
            lead=int(is_stacked(model, path)) + (i in group_names),
            group=group_names.get(i, ""),
            frozen=frozen[i],
            stack=stack_name(model, path),
            order=stage_order(model) if is_stacked(model, path) else None,
        )
        leaves.append(leaf)
    return tuple(leaves)


def stack_name(model: Model | LayeredModel, path: Sequence[Any]) -> str:
    """Return the name of the stack of layers that the parameter leaf at a path belongs to.

    It is "" if the model has only one stack, or the leaf is unstacked.
    """
    if isinstance(model, LayeredModel) and model.stacks and is_stacked(model, path):
        return path[1].key
    return ""


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
    tiles = model.tiles
    params = abstract_params
    described = "parameters"
    try:
        if isinstance(model, LayeredModel):
            params = abstract_params[BLOCKS]
            described = "parameters of one layer"
            tiles = of_every_stack(model, model.tiles, False)
        flag_tree = jax.tree.map(lambda flag, sub: jax.tree.map(lambda _: flag, sub), tiles, params)
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(
            f"tiles must mirror the {described}, or be a prefix of their tree: {e}"
        ) from e
    flags = jax.tree.leaves(flag_tree)
    # The dim of tiles follows the dims of layers, if any.
    tile_dim = int(isinstance(model, LayeredModel)) + (stage_order(model) is not None)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    for flag, (path, leaf) in zip(flags, leaves, strict=True):
        _check_tile_flag(flag, jax.tree_util.keystr(path), leaf.shape, tile_dim)
    return flags


def tiles_by_path(model: Model | LayeredModel, abstract_params: Params) -> dict[str, bool | int]:
    """Return the results of `tiled_leaves` by the path of each leaf that may be a stack of tiles.

    Args:
      model: the model.
      abstract_params: the abstract parameter tree.

    Raises:
      ValueError: `model.tiles` is wrong (see `tiled_leaves`).
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(abstract_params)[0]]
    if isinstance(model, LayeredModel):
        paths = [path for path in paths if is_stacked(model, path)]
    flags = tiled_leaves(model, abstract_params)
    return {jax.tree_util.keystr(path): flag for path, flag in zip(paths, flags, strict=True)}


def _check_tile_flag(flag: Any, name: str, shape: tuple[int, ...], tile_dim: int) -> None:
    """Check the value that `model.tiles` has for a leaf.

    Args:
      flag: the value; True, False or the number of tiles is right.
      name: path of the leaf, for the error.
      shape: shape of the leaf.
      tile_dim: the dim of tiles, if the leaf is a stack of tiles.

    Raises:
      ValueError: the value is wrong.
    """
    is_flag = as_flag(flag) is not None
    number = flag if is_flag else as_integer(flag)
    if number is None or (not is_flag and number < 1):
        raise ValueError(
            f"tiles holds {flag!r} for {name}: it must be True, False or the number of tiles along "
            "the first dim"
        )
    if not flag:
        return
    if len(shape) <= tile_dim:
        raise ValueError(f"tiles names {name}, which is a scalar: a stack of tiles is [T, ...]")
    if shape[tile_dim] % flag:
        raise ValueError(
            f"tiles holds {flag} for {name}, which has {shape[tile_dim]} tiles: the number along "
            "the first dim must divide them"
        )


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
    if not isinstance(model, LayeredModel):
        return ()
    flags = tiled_leaves(model, abstract_params)
    if not any(flags) or not streams(config):
        return ()
    why = untiled_setting(config) if stage_order(model) is None else "a pipeline"
    if why is not None:
        logger.info(
            "%s moves full layers: stacks of tiles are fetched and gathered with the rest of their "
            "layer",
            why,
        )
        return ()
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(abstract_params)[0]]
    leaves = jax.tree.leaves(abstract_params)
    stacked = [i for i, path in enumerate(paths) if is_stacked(model, path)]

    stacks_by_module: dict[tuple[Any, ...], list[int]] = {}  # stacks of tiles, by module path
    for i, flag in zip(stacked, flags, strict=True):
        if flag and leaves[i].shape[1] > 1:
            # Without the key of the blocks and the name of the leaf, this is the path of the module
            # that holds the leaf.
            stacks_by_module.setdefault(paths[i][1:-1], []).append(i)

    groups: list[TileGroup] = []
    for path, indices in stacks_by_module.items():
        counts = {jax.tree_util.keystr(paths[i]): leaves[i].shape[1] for i in indices}
        if len(set(counts.values())) > 1:
            raise ValueError(
                "stacks of tiles in one module are used together, but differ in their number of "
                f"tiles: {counts}"
            )
        name = _unused_name(_path_name(path), [group.name for group in groups])
        stack = stack_name(model, paths[indices[0]])
        num_tiles = leaves[indices[0]].shape[1]
        groups.append(TileGroup(name, tuple(indices), num_tiles, stack=stack))
    return tuple(groups)


def _unused_name(name: str, used: Sequence[str]) -> str:
    """Return `name`, followed by a number if it is used already.

    Different paths may have the same name, such as the keys 1 and "1", and a name is also a folder.
    """
    numbered = (f"{name}{number or ''}" for number in itertools.count())
    return next(candidate for candidate in numbered if candidate not in used)


def _path_name(path: Sequence[Any]) -> str:
    """Return the name of the module that holds a stack, for use in the name of a folder.

    Characters not allowed there are written as %hex.
    """
    keys = []
    for key in path:
        key = getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
        keys.append(re.sub(r"[^A-Za-z0-9_-]", lambda match: f"%{ord(match[0]):x}", str(key)))
    return ".".join(keys) or "block"
