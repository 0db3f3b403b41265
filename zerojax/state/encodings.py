"""Frozen weights stored in 8 or 4 bits: which leaves, how each is split, encoded and decoded.

    storage   Encoded(codes[A, (B C)_fsdp], scales[..], ..)     replaces the leaf W[A, B_fsdp, C]
    use       decode(all_gather(codes, scales, ..))             W[A, B, C] in the compute dtype, a
                                                                layer or a tile at a time

For code that stores, moves, gathers, saves or counts leaves, each encoded array is a frozen leaf of
its own. Only two places know about the weight: `Encoding.encode` makes the arrays from a layer's
float32 leaves, on each device's shard, and `decoded` makes weights from gathered arrays. In a stack
of tiles each tile is encoded by itself, as each layer is: no block of numbers crosses two of them.
`pallas_kernels.storage` is the codec.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import storage
from pallas_kernels.storage import Encoded
from zerojax.config import ZeroConfig
from zerojax.models import LayeredModel, Model
from zerojax.sharding import PIPE, STAGES, LeafSpec, Spec, named, parse_axes, stored_spec
from zerojax.state.leaves import Leaf, TileGroup, is_stacked, tiles_by_path
from zerojax.state.wide import StageOrder, stage_order
from zerojax.trees import Params

logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How one leaf is encoded.

    Attributes:
      layout: layout of the leaf's elements in the encoded arrays.
      shape: shape of the leaf, of one layer if it is stacked, of one tile in a stack of tiles.
      spec: sharding spec of the stored leaf, or of one layer or tile of it.
      mesh: the device mesh.
      lead_shape: sizes of the dims that count layers and tiles: (), (L,), (T,) or (L, T).
      num_tiles: T of a stack of tiles; None for other leaves.
      joins: whether the tiles, one after another, are the weight's numbers in order, as groups of
        experts are. Checkpoints then convert to other numbers of tiles.
      order: which layer each record holds of each pipeline stage; None if a record is one layer.
    """

    layout: storage.Layout
    shape: tuple[int, ...]
    spec: Spec
    mesh: Mesh
    lead_shape: tuple[int, ...]
    num_tiles: int | None = None
    joins: bool = True
    order: StageOrder | None = None

    @property
    def lead(self) -> int:
        """Number of dims that count layers and tiles."""
        return len(self.lead_shape)

    def encode(self, w: Any) -> Encoded:
        """Return a leaf of one record, or an unstacked leaf, encoded on each device's shard.

        A record is one layer; with an `order`, one layer of every stage, each encoded by itself.
        So are the tiles of a stack of tiles.
        """
        spec = self.spec if self.num_tiles is None else (None, *self.spec)
        if self.order is not None:
            spec = (PIPE, *spec)
        w = jax.lax.with_sharding_constraint(jnp.asarray(w, jnp.float32), named(self.mesh, spec))
        # The XLA implementation inside shard_map, so that the partitioner need not see through the
        # reshapes.
        encode = functools.partial(storage.encode, layout=self.layout, implementation="xla")
        out_specs = PartitionSpec(*storage.encoded_spec(self.layout, spec))
        specs: dict[str, Any] = {"in_specs": PartitionSpec(*spec), "out_specs": out_specs}
        return jax.shard_map(encode, mesh=self.mesh, check_vma=False, **specs)(w)

    def encode_here(self, w: np.ndarray) -> list[np.ndarray]:
        """Return the encoded arrays of an unsharded weight, computed on one device of this process.

        Args:
          w: the weight, with all or some of its layers.
        """
        device = jax.local_devices()[0]
        # The program's mesh may be set here, and need not contain this device.
        with jax.set_mesh(Mesh(np.asarray([device]), ("device",))):
            encoded = _encode_jit(jax.device_put(w, device), layout=self.layout)
            return [np.asarray(a) for a in jax.tree.leaves(encoded)]

    @property
    def abstract(self) -> Encoded:
        """The shapes of the encoded arrays, including all layers."""
        lead_shape = self.lead_shape
        if self.order is not None:
            lead_shape = (self.order.num_records, self.order.num_stages, *lead_shape[1:])
        return storage.abstract_encoded(self.layout, lead_shape + self.shape)

    def leaf_spec(self, spec: LeafSpec, sharded: bool) -> LeafSpec:
        """Return how the mesh splits each encoded array.

        Args:
          spec: how the mesh would split the leaf.
          sharded: whether the stored arrays are split over the ZeRO axis.
        """
        base = storage.encoded_spec(self.layout, spec.base)
        stored = storage.encoded_spec(self.layout, stored_spec(spec, sharded))
        return LeafSpec(base, stored, spec.replicated)


@functools.partial(jax.jit, static_argnames="layout")
def _encode_jit(w: jax.Array, layout: storage.Layout) -> Encoded:
    return storage.encode(w, layout, "xla")


def list_encodings(
    model: Model | LayeredModel,
    config: ZeroConfig,
    abstract_whole: Params,
    specs: Mapping[str, LeafSpec],
    is_frozen: Sequence[bool],
    mesh: Mesh,
) -> dict[str, Encoding]:
    """Return how each frozen leaf to store in 8 or 4 bits is encoded, by path.

    Leaves that no layout supports keep their dtype, which is logged once.

    Args:
      model: the model.
      config: configuration of the program.
      abstract_whole: the full parameter tree, in the compute dtypes.
      specs: LeafSpec of each parameter, by path.
      is_frozen: whether each leaf is frozen.
      mesh: the device mesh.
    """
    if config.frozen_dtype is None:
        return {}
    sharded = STAGES[config.stage].params
    candidates: list[_Candidate] = []
    tiles = tiles_by_path(model, abstract_whole)
    leaves = jax.tree_util.tree_flatten_with_path(abstract_whole)[0]
    for (path, leaf), frozen in zip(leaves, is_frozen, strict=True):
        if frozen and jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path)
            spec = stored_spec(specs[name], sharded)
            stacked = is_stacked(model, path)
            order = stage_order(model) if stacked else None
            candidates.append(_Candidate(name, leaf, spec, stacked, tiles.get(name, False), order))
    return _choose_encodings(config.frozen_dtype, candidates, mesh)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A floating frozen leaf, which may be encoded.

    Attributes:
      name: path of the leaf, as a string.
      leaf: the leaf's shape and dtype, including all layers.
      spec: sharding spec of the stored leaf, including all dims.
      is_stacked: whether the leaf is a stack of layers.
      tiles: whether the leaf, or each of its layers, is a stack of tiles, as in `Model.tiles`.
      order: which layer each record of the stack holds of each pipeline stage; None if a record is
        one layer.
    """

    name: str
    leaf: jax.ShapeDtypeStruct
    spec: Spec
    is_stacked: bool
    tiles: bool | int
    order: StageOrder | None


def _choose_encodings(
    format: storage.Format, candidates: Sequence[_Candidate], mesh: Mesh
) -> dict[str, Encoding]:
    """Return the encodings of the leaves that a layout supports, by path; log the others."""
    encodings = {}
    unsupported: list[tuple[_Candidate, str]] = []
    for candidate in candidates:
        leaf = candidate.leaf
        num_layer_dims = candidate.is_stacked + (candidate.order is not None)
        lead_dims = num_layer_dims + bool(candidate.tiles)
        shape = tuple(leaf.shape[lead_dims:])
        spec = tuple(candidate.spec[lead_dims:])
        shards = tuple(math.prod(mesh.shape[axis] for axis in parse_axes(entry)) for entry in spec)
        if (why := storage.refusal(format, shape, shards)) is not None:
            unsupported.append((candidate, why))
            continue
        layout = storage.choose_layout(format, shape, shards)
        lead_shape = tuple(leaf.shape[:lead_dims])
        if candidate.order is not None:
            lead_shape = (candidate.order.num_layers, *lead_shape[2:])
        num_tiles = None
        joins = True
        if candidate.tiles:
            num_tiles = lead_shape[-1]
            joins = not isinstance(candidate.tiles, bool) and candidate.tiles == num_tiles
        encodings[candidate.name] = Encoding(
            layout, shape, spec, mesh, lead_shape, num_tiles, joins, candidate.order
        )
    if unsupported:
        largest, why = max(unsupported, key=lambda item: item[0].leaf.size)
        logger.info(
            "frozen_dtype=%r: %d of %d frozen leaves, %d of %d elements, stay in %s, such as %s: "
            "%s",
            format,
            len(unsupported),
            len(candidates),
            sum(candidate.leaf.size for candidate, _ in unsupported),
            sum(candidate.leaf.size for candidate in candidates),
            largest.leaf.dtype,
            largest.name,
            why,
        )
    return encodings


@dataclasses.dataclass(frozen=True)
class EncodedTree:
    """A parameter tree in which `Encoded` nodes replace the encoded leaves.

    Attributes:
      tree: the abstract tree.
      specs: LeafSpec of each array, by path.
      is_frozen: whether each array is frozen.
      groups: groups of leaves whose records are tiles, by position of the arrays.
    """

    tree: Params
    specs: dict[str, LeafSpec]
    is_frozen: list[bool]
    groups: tuple[TileGroup, ...]


def encode_leaves(
    encodings: Mapping[str, Encoding],
    leaves: Sequence[Leaf],
    abstract_whole: Params,
    groups: Sequence[TileGroup],
    sharded: bool,
) -> EncodedTree:
    """Return the parameter tree as it is stored.

    Args:
      encodings: how each encoded leaf is encoded, by path.
      leaves: the unencoded leaves, in the order of the tree.
      abstract_whole: the full parameter tree, in the compute dtypes.
      groups: groups of leaves whose records are tiles, by position of the unencoded leaves.
      sharded: whether the stored arrays are split over the ZeRO axis.
    """
    arrays, structure = jax.tree.flatten(abstract_whole)
    nodes = []
    specs = {}
    is_frozen: list[bool] = []
    positions: list[range] = []  # of the arrays of each leaf
    for leaf, array in zip(leaves, arrays, strict=True):
        node = array
        spec = leaf.spec
        if leaf.name in encodings:
            encoding = encodings[leaf.name]
            node = encoding.abstract
            spec = encoding.leaf_spec(leaf.spec, sharded)
        nodes.append(node)
        first = len(is_frozen)
        for path, _ in jax.tree_util.tree_flatten_with_path(node)[0]:
            specs[jax.tree_util.keystr((*leaf.path, *path))] = spec
            is_frozen.append(leaf.frozen)
        positions.append(range(first, len(is_frozen)))
    moved_groups = [
        dataclasses.replace(
            group, leaves=tuple(array for i in group.leaves for array in positions[i])
        )
        for group in groups
    ]
    tree = jax.tree.unflatten(structure, nodes)
    return EncodedTree(tree, specs, is_frozen, tuple(moved_groups))


def with_decoded(
    table: Sequence[Leaf], unencoded: Sequence[Leaf], encodings: Mapping[str, Encoding]
) -> tuple[Leaf, ...]:
    """Return the leaves, where an encoded weight's first array refers to the decoded leaf.

    Args:
      table: all leaves; each encoded array is a leaf.
      unencoded: all leaves; each weight is a leaf.
      encodings: how each encoded leaf is encoded, by path.
    """
    weights = {leaf.path: leaf for leaf in unencoded if leaf.name in encodings}
    leaves = []
    for leaf in table:
        prefixes = [path for path in weights if leaf.path[: len(path)] == path]
        if leaf.frozen and prefixes:
            # Later arrays of this weight find no prefix.
            leaf = dataclasses.replace(leaf, decodes=weights.pop(prefixes[0]))
        leaves.append(leaf)
    return tuple(leaves)


def encode_tree(encodings: Mapping[str, Encoding], params: Params, *keys: str) -> Any:
    """Return parameters with `Encoded` nodes in place of the leaves to encode.

    Args:
      encodings: how each encoded leaf is encoded, by path.
      params: the full tree of a Model, or a part of a LayeredModel's tree, such as one layer.
      keys: keys that lead to `params` in the full tree; none for the full tree.
    """
    if not encodings:
        return params
    first_keys = tuple(jax.tree_util.DictKey(key) for key in keys)

    def encode(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array | Encoded:
        encoding = encodings.get(jax.tree_util.keystr((*first_keys, *path)))
        return leaf if encoding is None else encoding.encode(leaf)

    return jax.tree_util.tree_map_with_path(encode, params)


def is_encoded(node: Any) -> bool:
    """Return whether a node of a parameter tree is a weight in 8 or 4 bits."""
    return isinstance(node, Encoded)


def decoded(params: Params, dtype: Any) -> Any:
    """Return parameters with their encoded leaves decoded to `dtype`.

    A leaf whose arrays are None, because they are elsewhere, becomes None.
    """

    # The XLA implementation keeps the dims, so a split array stays split without communication.
    def decode(leaf: Any) -> Any:
        if not is_encoded(leaf):
            return leaf
        return storage.decode(leaf, dtype, "xla") if jax.tree.leaves(leaf) else None

    return jax.tree.map(decode, params, is_leaf=is_encoded)


def decoding_model(model: LayeredModel, dtype: Any) -> LayeredModel:
    """Return a model whose functions take encoded leaves and decode them to `dtype`."""

    def decoding(function: Any) -> Any:
        return lambda p, *args: function(decoded(p, dtype), *args)

    def head(p: Params, p_embed: Params, *args: Any) -> Any:
        return model.head(decoded(p, dtype), decoded(p_embed, dtype), *args)

    def predict(p: Params, p_embed: Params, *args: Any) -> Any:
        assert model.predict is not None
        return model.predict(decoded(p, dtype), decoded(p_embed, dtype), *args)

    def block_functions(stack: Any) -> dict[str, Any]:
        enter = None if stack.enter is None else decoding(stack.enter)
        return {"block": decoding(stack.block), "enter": enter}

    functions: dict[str, Any] = {"embed": decoding(model.embed), "head": head}
    if model.predict is not None:
        functions["predict"] = predict
    if model.stacks:
        functions["stacks"] = [
            dataclasses.replace(stack, **block_functions(stack)) for stack in model.stacks
        ]
    else:
        functions |= block_functions(model)
    return dataclasses.replace(model, **functions)
