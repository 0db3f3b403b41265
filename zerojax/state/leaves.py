"""The table of a model's parameter leaves, and which records each of them is part of.

    role     leaf                                                   lead    one record holds
    block    W[L, ...], a stack of a LayeredModel's layers          1       one layer of all such leaves
    tile     W[L, T, ...], of a group whose records are tiles       2       one tile of all leaves of its group
    end      any other: embedding, head, every leaf of a Model      0       the leaf

`lead` counts the leading dims that number a leaf's records; what follows them is the shape of one
record. The table is in the order of the flattened parameter tree, so that an index into it is also
one into the flattened parameters. Frozen leaves are a table of their own, and their indices go on
where those of the trained ones end: to whoever updates, there are none.
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
      name: where they are in a layer, such as "mlp".
      leaves: the indices of those that are trained, in order.
      num_tiles: T.
      frozen: of those that are frozen, likewise (`Layout.all_leaves`).
      stack: of layers, as of a `Leaf`.
    """

    name: str
    leaves: tuple[int, ...]
    num_tiles: int
    frozen: tuple[int, ...] = ()
    stack: str = ""

    @property
    def weights(self) -> tuple[int, ...]:
        """All of them: those that are trained, then those that are frozen."""
        return self.leaves + self.frozen

    def kind(self, kind: str) -> str:
        """Return the name of this group's records of a kind."""
        return tiles_kind(kind, self.name)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter leaf.

    Attributes:
      path: in the parameter tree.
      name: the path as a string, such as "['blocks']['w']".
      shape: of all its records together.
      dtype: in which it is computed; its master is float32. Of frozen integers and booleans, their
        own.
      spec: how the mesh splits it, all dims.
      lead: leading dims that number its records.
      group: name of its group of tiles, where `lead` is 2.
      frozen: whether it is read alone: it has no master, gradient or optimizer state.
      decodes: of the first array of a leaf in 8 or 4 bits, that leaf, which is made of it where it
        is used: all its records.
      stack: name of the stack of layers that it is of; "" where there is one, or none.
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
        return _ROLES[self.lead]

    @property
    def is_stacked(self) -> bool:
        """Whether it is a stack of layers."""
        return self.lead > 0

    @property
    def lead_shape(self) -> tuple[int, ...]:
        """How many records of it there are, along each leading dim: (), (L,) or (L, T)."""
        return self.shape[: self.lead]

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record of it: of a layer, a tile, or the whole leaf."""
        return self.shape[self.lead :]


def is_stacked(model: Model | LayeredModel, path: Sequence[Any]) -> bool:
    """Tell whether the parameter leaf at a path is a stack of layers.

    A Model has none, whatever its keys are.
    """
    return isinstance(model, LayeredModel) and path[0] == jax.tree_util.DictKey(BLOCKS)


def build_leaves(
    model: Model | LayeredModel,
    abstract_compute: Any,
    specs: Mapping[str, LeafSpec],
    groups: Sequence[TileGroup],
    frozen: Sequence[bool],
) -> tuple[Leaf, ...]:
    """Return the table of all leaves, trained and frozen, in the order of the tree.

    Args:
      model: whose parameters they are.
      abstract_compute: the parameter tree, in the compute dtype.
      specs: by path.
      groups: of leaves whose records are tiles, by their places in the tree.
      frozen: whether each leaf is.
    """
    group_of = {i: group.name for group in groups for i in group.leaves}
    leaves = []
    arrays = jax.tree_util.tree_flatten_with_path(abstract_compute)[0]
    for i, (path, array) in enumerate(arrays):
        name, lead = jax.tree_util.keystr(path), int(is_stacked(model, path)) + (i in group_of)
        leaf = Leaf(
            path, name, array.shape, array.dtype, specs[name], lead, group_of.get(i, ""), frozen[i]
        )
        leaves.append(dataclasses.replace(leaf, stack=stack_name(model, path)))
    return tuple(leaves)


def stack_name(model: Model | LayeredModel, path: Sequence[Any]) -> str:
    """Return the name of the stack of layers that the parameter leaf at a path is of; "" where a
    model has one, or none.
    """
    return (
        path[1].key
        if is_stacked(model, path) and isinstance(model, LayeredModel) and model.stacks
        else ""
    )
