"""The table of a model's parameter leaves, and the records to which each leaf belongs.

    role     leaf                                               lead    one record holds
    block    W[L, ...], a stack of a LayeredModel's layers      1       one layer of all such leaves
    tile     W[L, T, ...], in a group whose records are tiles   2       one tile of all its leaves
    end      embedding, head, every leaf of a Model             0       the leaf

`lead` counts the leading dims that number a leaf's records; the remaining dims are the shape of one
record. The table is in the order of the flattened parameter tree, so an index into it is also an
index into the flattened parameters. Frozen leaves have their own table, and their indices continue
after the indices of the trainable leaves. The code that updates weights sees only trainable leaves.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from host_offload.schedule import tiles_kind
from zerojax.models import BLOCKS, LayeredModel, Model
from zerojax.sharding import LeafSpec

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
        """Shape of one of the leaf's records: a layer, a tile, or the full leaf."""
        return self.shape[self.lead :]


def is_stacked(model: Model | LayeredModel, path: Sequence[Any]) -> bool:
    """Return whether the parameter leaf at a path is a stack of layers.

    A Model has no stacks, whatever its keys are.
    """
    return isinstance(model, LayeredModel) and path[0] == jax.tree_util.DictKey(BLOCKS)


def build_leaves(
    model: Model | LayeredModel,
    abstract_compute: Any,
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
    group_of = {i: group.name for group in groups for i in group.leaves}
    leaves = []
    arrays = jax.tree_util.tree_flatten_with_path(abstract_compute)[0]
    for i, (path, array) in enumerate(arrays):
        name = jax.tree_util.keystr(path)
        lead = int(is_stacked(model, path)) + (i in group_of)
        leaf = Leaf(
            path,
            name,
            array.shape,
            array.dtype,
            specs[name],
            lead,
            group_of.get(i, ""),
            frozen[i],
        )
        leaves.append(dataclasses.replace(leaf, stack=stack_name(model, path)))
    return tuple(leaves)


def stack_name(model: Model | LayeredModel, path: Sequence[Any]) -> str:
    """Return the name of the stack of layers that the parameter leaf at a path belongs to.

    It is "" if the model has only one stack, or the leaf is unstacked.
    """
    if is_stacked(model, path) and isinstance(model, LayeredModel) and model.stacks:
        return path[1].key
    return ""
