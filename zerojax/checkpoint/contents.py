"""What a program's state holds, by names that do not depend on where the bytes rest.

    name in a checkpoint            in the state
    weights['blocks']['w']          master, or params where these are their own masters; float32
    opt_state[0].mu['blocks']['w']  opt_state
    step, skipped, key, ...         the field
    pending.grads[0]                pending

Stage, mesh, tier, and the dtype of the compute copy change specs and places and leave the names: a state saved under one config
is read under another. The compute copy (params beside masters) is no content: it is cast from the weights.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.engine import DiskRecords
from zerojax.models import BLOCKS, LayeredModel, Model
from zerojax.optim import Parts
from zerojax.sharding import Spec, pad_spec
from zerojax.state import Layout, OnDisk, RecordSpec, Split, TrainState, is_stored, owners, tiled_leaves

ROUNDING_STEP = "rounding_step"
"""The count by which moments in bfloat16 are rounded."""
INLINE_ELEMENTS = 64
"""A leaf that mirrors no parameter, and has no more elements than this, is told in the checkpoint's description."""


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of a TrainState.

    Attributes:
      name: of what it holds, in a checkpoint.
      path: of the leaf in the state.
      shape: of all layers.
      dtype: of the leaf here.
      saved_dtype: in which it is saved.
      spec: of the leaf here, one entry a dim.
      tier: where it rests: of a Split, its second part.
      lead: leading dims that number its records: 0, 1 for layers, or 2 for tiles of layers.
      tiles: it is known to be a stack of tiles, of a layer; an integer tells how many lie along the first dim of the weight.
      group: name of the group of tiles, where `lead` is 2.
      mirrors: it is a weight, or mirrors one.
      is_derived: it is cast from the content of its name, and not saved.
      shelf: the records on disk that hold it, if any do, or its second part.
      shelf_leaf: its place among their leaves.
      first: layers of a Split's first part.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: Any
    saved_dtype: Any
    spec: Spec
    tier: str
    lead: int = 0
    tiles: bool | int = False
    group: str = ""
    mirrors: bool = False
    is_derived: bool = False
    shelf: DiskRecords | None = None
    shelf_leaf: int = 0
    first: int = 0

    @property
    def is_inline(self) -> bool:
        """Whether it is told in the checkpoint's description."""
        return not (self.mirrors or any(self.spec)) and math.prod(self.shape) <= INLINE_ELEMENTS

    def record(self, mesh: jax.sharding.Mesh) -> RecordSpec:
        """Return how one record of it rests in arrays."""
        return RecordSpec(mesh, self.spec[self.lead :], self.tier)


def leaves_of(state: TrainState) -> list[Any]:
    """Return the leaves of a state, Splits and OnDisk as one, in the order of `contents_of`."""
    return jax.tree.leaves(state, is_leaf=is_stored)


def contents_of(model: Model | LayeredModel, layout: Layout, parts: Parts | None) -> list[StateLeaf]:
    """Return what each leaf of a program's states is.

    Args:
      model: of the program.
      layout: likewise.
      parts: likewise; None where no state is off the device.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(layout.abstract_arrays, is_leaf=is_stored)
    rests = leaves_of(layout.abstract_state)
    params = jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]
    num, has_master = len(params), layout.abstract_state.master is not None
    stacked = [layout.num_layers is not None and path[0] == jax.tree_util.DictKey(BLOCKS) for path, _ in params]
    flagged = [i for i, s in enumerate(stacked) if s or isinstance(model, Model)]
    tiled = dict(zip(flagged, tiled_leaves(model, layout.abstract_params), strict=True))
    groups = {i: group.name for group in layout.tiles for i in group.leaves}
    owned = owners(_whole(layout.abstract_arrays.opt_state), layout.abstract_params)
    counts = {"params": 0, "master": 0, "opt_state": 0, "grads": 0}

    def made(path: tuple[Any, ...], array: Any, rest: Any) -> StateLeaf:
        field = path[0].name
        part = "grads" if field == "pending" and path[1].name == "grads" else field
        index = counts.get(part, 0)
        if part in counts:
            counts[part] += 1
        owner: int | None = None
        record: RecordSpec | None = None
        name = jax.tree_util.keystr(path).removeprefix(".")
        if field in ("params", "master"):
            owner, name = index, "weights" + jax.tree_util.keystr(path[1:])
            if parts is not None:
                record = (parts.params if field == "params" else parts.master)[index]
        elif field == "opt_state":
            owner = owned[index]
            if layout.config.moments == "bfloat16":  # a wrapper's state: a count, and the optimizer's own
                inner = path[1].name == "inner"
                name = f"opt_state{jax.tree_util.keystr(path[2:])}" if inner else ROUNDING_STEP
            record = parts.opt[index] if parts is not None else None
        elif part == "grads":
            owner = [*(i for i in range(num) if stacked[i]), *(i for i in range(num) if not stacked[i])][index]
        lead = layout.lead(owner) if owner is not None and stacked[owner] else 0
        on_disk = isinstance(rest, OnDisk) or (isinstance(rest, Split) and isinstance(rest.host, OnDisk))
        whole = array.host if isinstance(array, Split) else array
        first = array.device.shape[0] if isinstance(array, Split) else 0
        shelf = record.shelf if record is not None and on_disk else None
        shape = (first + whole.shape[0], *whole.shape[1:]) if isinstance(array, Split) else tuple(whole.shape)
        is_weight = field in ("params", "master")
        return StateLeaf(
            name=name,
            path=jax.tree_util.keystr(path),
            shape=shape,
            dtype=whole.dtype,
            saved_dtype=jnp.dtype("float32") if is_weight else whole.dtype,
            spec=pad_spec(whole.sharding.spec, len(whole.shape)),
            tier="nvme" if on_disk else _tier(whole),
            lead=lead,
            tiles=owner is not None and tiled.get(owner, False),
            group=groups.get(owner, "") if owner is not None and lead == 2 else "",
            mirrors=owner is not None,
            is_derived=field == "params" and has_master,
            shelf=shelf,
            shelf_leaf=record.leaf if record is not None and shelf is not None else 0,
            first=first,
        )

    return [made(path, array, rest) for (path, array), rest in zip(flat, rests, strict=True)]


def _whole(tree: Any) -> Any:
    """Return a tree with ShapeDtypeStruct of all layers in place of Splits."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, Split):
            return leaf
        shape = (leaf.device.shape[0] + leaf.host.shape[0], *leaf.host.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.host.dtype)

    return jax.tree.map(whole, tree, is_leaf=is_stored)


def _tier(leaf: Any) -> str:
    return "pinned_host" if getattr(leaf.sharding, "memory_kind", None) == "pinned_host" else "device"


def arrays_of(content: StateLeaf, leaf: Any) -> Iterator[tuple[jax.Array, int]]:
    """Yield the arrays of a leaf that is not on disk, each with the number of its first layer."""
    if isinstance(leaf, Split):
        yield leaf.device, 0
        leaf = leaf.host
    if not isinstance(leaf, OnDisk):
        yield leaf, content.first
