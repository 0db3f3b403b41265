"""The leaves of a program's state, under names that do not depend on where the bytes are stored.

    name in a checkpoint            in the state
    weights['blocks']['w']          master, or params if they are their own masters; float32. A
                                    frozen leaf: frozen, in its own dtype
    weights['blocks']['w']#nf4.codes
                                    one array of a frozen 4-bit leaf; `.dim-2` before `.codes` if
                                    that dim was moved to the end
    opt_state[0].mu['blocks']['w']  opt_state
    step, skipped, key, ...         the field
    pending.grads[0]                pending

Stage, mesh, tier, and the dtype of the compute copy change specs and tiers, but not names: a state
saved under one config can be read under another. The compute copy (params that have masters) is not
saved: it is cast from the weights.

Shapes do not depend on the mesh either. The records of a pipeline hold one layer of every stage
(`zerojax.state.wide`), and a checkpoint holds layers:

    state         W[v K, p_pipe, D_fsdp, F]
    checkpoint    W[L_pipe, D_fsdp, F], on each device v stores of K neighboring layers
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from host_offload.engine import DiskRecords
from zerojax.models import LayeredModel, Model
from zerojax.sharding import Spec, pad_spec
from zerojax.state import (
    Layout,
    OnDisk,
    RecordSpec,
    Split,
    StageOrder,
    StateRecords,
    TrainState,
    is_stored,
    tiled_leaves,
)

ROUNDING_STEP = "rounding_step"
"""The step count with which bfloat16 moments are rounded."""
ENCODED = "#"
"""Separator of the weight's and the array's names, for an array of an 8-bit or 4-bit weight.

No path contains it.
"""
INLINE_ELEMENTS = 64
"""Most elements of a leaf that is saved in the manifest; leaves that mirror a parameter never are.
"""


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of a TrainState.

    Attributes:
      name: name in a checkpoint.
      path: path of the leaf in the state.
      shape: shape over all layers.
      dtype: dtype of the leaf in this program.
      saved_dtype: dtype in which the leaf is saved.
      spec: spec of the leaf in this program, one entry per dim. With an `order`, the entry of the
        layers is the one of the stages.
      tier: tier in which the leaf is stored; in a Split, the tier of its second part.
      lead: number of leading dims that number its records: 0, 1 for layers, or 2 for tiles of
        layers.
      tiles: whether the leaf is known to be a stack of tiles; an integer is the number of tiles
        along the first dim of the weight.
      group: name of the group of tiles, if `lead` is 2.
      stack: name of the leaf's stack of layers; "" if the model has only one, or the leaf is
        unstacked.
      mirrors: whether the leaf is a weight, or belongs to a weight, like a moment or a pending
        gradient.
      is_derived: whether the leaf is cast from the leaf of the same name, and so not saved.
      disk_records: records on disk that hold the leaf, or a Split's second part; None if it is not
        on disk.
      disk_leaf: position of the leaf in these records.
      first: number of records in a Split's first part: of layers, or of layers of every stage.
      is_frozen: whether the leaf is a weight that is never written.
      encodes: path of the weight, for an array of an 8-bit or 4-bit weight; otherwise "".
      order: which layer each record in this program holds of each pipeline stage; None if a record
        is one layer.
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
    stack: str = ""
    mirrors: bool = False
    is_derived: bool = False
    disk_records: DiskRecords | None = None
    disk_leaf: int = 0
    first: int = 0
    is_frozen: bool = False
    encodes: str = ""
    order: StageOrder | None = None

    @property
    def record_dims(self) -> tuple[int, ...]:
        """Sizes of the dims that number the leaf's records in this program."""
        return self.shape[: self.lead] if self.order is None else (self.order.num_records,)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Shape of one of the leaf's records in this program."""
        layer = self.shape[self.lead :]
        return layer if self.order is None else (self.order.num_stages, *layer)

    @property
    def is_inline(self) -> bool:
        """Whether the leaf is saved in the manifest."""
        return not (self.mirrors or any(self.spec)) and math.prod(self.shape) <= INLINE_ELEMENTS

    @property
    def first_record(self) -> int:
        """Number of the first record after a Split's first part, which is a stack of its own."""
        return self.first * math.prod(self.shape[1 : self.lead])

    def record(self, mesh: jax.sharding.Mesh) -> RecordSpec:
        """Return how the arrays store one record of the leaf."""
        # The dim of the stages has the place of the dim of the layers.
        spec = self.spec[self.lead :] if self.order is None else self.spec
        return RecordSpec(mesh, spec, self.tier)


def is_weight(leaf: StateLeaf) -> bool:
    """Return whether a leaf is one of the weights that the optimizer updates."""
    return leaf.name.startswith("weights") and not (leaf.is_frozen or leaf.is_derived)


def state_arrays(state: TrainState) -> list[Any]:
    """Return the arrays of a state in the order of `state_leaves`.

    A Split or an OnDisk counts as one array.
    """
    return jax.tree.leaves(state, is_leaf=is_stored)


def state_leaves(model: Model | LayeredModel, records: StateRecords) -> list[StateLeaf]:
    """Describe each leaf of a program's states, in the order of `state_arrays`.

    Args:
      model: model whose layers are the records of the state (`Program.state_model`).
      records: how the program's states are stored.
    """
    layout = records.layout
    # Both are in the order of the flattened state: the leaves as if none were on disk, and the
    # leaves as a program takes them.
    arrays = jax.tree_util.tree_flatten_with_path(layout.abstract_arrays, is_leaf=is_stored)[0]
    nodes = state_arrays(layout.abstract_state)
    # In a LayeredModel only stacks of layers have flags, otherwise every leaf.
    flags = tiled_leaves(model, layout.abstract_whole)
    is_layered = isinstance(model, LayeredModel)
    indices = [i for i in layout.in_tree if layout.all_leaves[i].is_stacked or not is_layered]
    tiles = dict(zip(indices, flags, strict=True))
    stored = zip(nodes, _mirrored(records), strict=True)
    return [
        _describe_leaf(layout, path, array, node, mirror, tiles)
        for (path, array), (node, mirror) in zip(arrays, stored, strict=True)
    ]


class _Mirror(NamedTuple):
    """The weight that a leaf of a state belongs to.

    Attributes:
      owner: index of the parameter leaf that the leaf is or mirrors; None: neither.
      record: how records store the leaf; None if they do not hold it.
    """

    owner: int | None = None
    record: RecordSpec | None = None


def _describe_leaf(
    layout: Layout,
    path: tuple[Any, ...],
    array: Any,
    node: Any,
    mirror: _Mirror,
    tiles: Mapping[int, bool | int],
) -> StateLeaf:
    """Describe one leaf.

    Args:
      layout: layout of the program's states.
      path: path of the leaf in the state.
      array: the leaf as if it were not on disk, or a Split of such arrays.
      node: the leaf as a program takes it.
      mirror: weight that the leaf belongs to.
      tiles: tiles of the parameter leaves that may be stacks of tiles, by index.
    """
    owner, record = mirror
    host_node = node.host if isinstance(node, Split) else node
    on_disk = isinstance(host_node, OnDisk)
    disk_records = record.disk_records if record is not None and on_disk else None

    if isinstance(array, Split):
        stored = array.host
        first = array.device.shape[0]
        shape = (first + stored.shape[0], *stored.shape[1:])
    else:
        stored = array
        first = 0
        shape = tuple(array.shape)

    param = None if owner is None else layout.all_leaves[owner]
    order = None if param is None else param.order
    has_params_shape = param is not None and shape == param.shape
    spec = pad_spec(stored.sharding.spec, len(stored.shape))
    if order is not None:
        shape = (order.num_layers, *shape[2:])
        spec = spec[1:]
    # A state whose shape differs from its weight's, such as a sum of rows, is not a stack of tiles.
    leaf_tiles: bool | int = False
    if owner is not None and has_params_shape:
        leaf_tiles = tiles.get(owner, False)

    field = path[0].name
    return StateLeaf(
        name=_name(path, layout),
        path=jax.tree_util.keystr(path),
        shape=shape,
        dtype=stored.dtype,
        saved_dtype=jnp.dtype("float32") if field in ("params", "master") else stored.dtype,
        spec=spec,
        tier="nvme" if on_disk else _tier(stored),
        lead=0 if param is None else param.lead,
        tiles=leaf_tiles,
        group="" if param is None else param.group,
        stack="" if param is None else param.stack,
        mirrors=owner is not None,
        is_derived=field == "params" and layout.has_master,
        disk_records=disk_records,
        disk_leaf=record.leaf if record is not None and disk_records is not None else 0,
        first=first,
        is_frozen=field == "frozen",
        encodes=_encoded_path(path, layout),
        order=order,
    )


def _mirrored(records: StateRecords) -> Iterator[_Mirror]:
    """Yield the weight that each leaf of a state belongs to, in the order of the leaves."""
    layout = records.layout
    state = records.layout.abstract_state
    trained = range(len(layout.leaves))
    frozen = range(len(layout.leaves), len(layout.all_leaves))
    # In the order in which the state is flattened.
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if field.name == "params":
            yield from itertools.starmap(_Mirror, zip(trained, records.params, strict=True))
        elif field.name == "master" and value is not None:
            yield from itertools.starmap(_Mirror, zip(trained, records.master, strict=True))
        elif field.name == "opt_state":
            owners = layout.opt_map.owners
            yield from itertools.starmap(_Mirror, zip(owners, records.opt, strict=True))
        elif field.name == "frozen" and value is not None:
            yield from itertools.starmap(_Mirror, zip(frozen, records.frozen, strict=True))
        else:
            grads: list[int] = []
            if field.name == "pending" and value is not None:
                grads = [*layout.stacked, *layout.unstacked]  # the first field of Pending
            yield from (_Mirror(i, records.stored_grads[i]) for i in grads)
            yield from [_Mirror()] * (len(jax.tree.leaves(value)) - len(grads))


def _encoded_path(path: tuple[Any, ...], layout: Layout) -> str:
    """Return the path of the weight that the array at a path of the state encodes, or ""."""
    if path[0].name != "frozen" or not layout.encodings:
        return ""
    prefixes = (jax.tree_util.keystr(path[1:end]) for end in range(1, len(path)))
    return next((prefix for prefix in prefixes if prefix in layout.encodings), "")


def _name(path: tuple[Any, ...], layout: Layout) -> str:
    """Return the checkpoint name of the leaf at a path of the state."""
    field = path[0].name
    weight = _encoded_path(path, layout)
    if weight:
        encoding = layout.encodings[weight]
        # Two layouts may have arrays of the same shape, for example of a square matrix, so the name
        # tells them apart. So it does for tiles whose numbers are in another order.
        moved = "" if encoding.layout.moved is None else f".dim{encoding.layout.moved}"
        tiles = "" if encoding.joins else f".tiles{encoding.num_tiles}"
        format = f"{encoding.layout.format}{moved}{tiles}"
        return f"weights{weight}{ENCODED}{format}{jax.tree_util.keystr(path[-1:])}"
    if field in ("params", "master", "frozen"):
        return f"weights{jax.tree_util.keystr(path[1:])}"
    # A wrapper's state: a count, and the state of the wrapped optimizer.
    if field == "opt_state" and layout.config.moments == "bfloat16":
        if path[1].name != "inner":
            return ROUNDING_STEP
        return f"opt_state{jax.tree_util.keystr(path[2:])}"
    return jax.tree_util.keystr(path).removeprefix(".")


def _tier(array: jax.ShapeDtypeStruct) -> str:
    memory_kind = getattr(array.sharding, "memory_kind", None)
    return "pinned_host" if memory_kind == "pinned_host" else "device"


def arrays_in_memory(leaf: StateLeaf, value: Any) -> Iterator[tuple[jax.Array, int]]:
    """Yield the arrays of a leaf that are not on disk, each with the number of its first record."""
    if isinstance(value, Split):
        yield value.device, 0
        value = value.host
    if not isinstance(value, OnDisk):
        yield value, leaf.first
