"""Where each byte of a program's state is stored: the stage table applied to a parameter tree.

A `Layout` is built once, from abstract shapes, before anything is allocated
(`zerojax.state.build_layout`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from host_offload.schedule import layers_kind
from zerojax.config import (
    ZeroConfig,
    frozen_tier,
    reduces_in_float32,
    reduces_once,
    stored_grads_dtype,
    sums_in_float32,
    updates_by_parts,
)
from zerojax.models import LayeredModel, block_path
from zerojax.precision import PRECISIONS
from zerojax.sharding import (
    LeafSpec,
    Replicated,
    named,
    num_batch_shards,
    num_stages,
    stored_spec,
)
from zerojax.state.disk_layout import DiskLayout
from zerojax.state.encodings import Encoding, decoded, decoding_model, encode_tree
from zerojax.state.leaves import Leaf, TileGroup
from zerojax.state.opt_state import OptStateMap
from zerojax.state.train_state import TrainState, join_frozen
from zerojax.state.wide import StageOrder
from zerojax.trees import Params, Tree


@dataclasses.dataclass(frozen=True)
class StackLeaves:
    """The leaves of one stack of layers, as indices into `Layout.all_leaves`.

    Attributes:
      name: name of the stack; "" if the model has only one.
      num_layers: L, the number of layers.
      blocks: trainable leaves whose records are layers.
      frozen_blocks: frozen leaves whose records are layers.
      groups: groups of leaves whose records are tiles.
      in_tree: all leaves of the stack, in the order of the tree.
      device_layers: number of layers whose optimizer state stays on the device when `opt_state` is
        offloaded.
    """

    name: str
    num_layers: int
    blocks: tuple[int, ...]
    frozen_blocks: tuple[int, ...]
    groups: tuple[TileGroup, ...]
    in_tree: tuple[int, ...]
    device_layers: int

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The trainable leaves by record: a layer's leaves, then a tile's leaves for each group."""
        return [self.blocks, *(group.leaves for group in self.groups)]

    @property
    def frozen_parts(self) -> list[tuple[int, ...]]:
        """The frozen leaves by record: a layer's leaves, then a tile's leaves for each group."""
        return [self.frozen_blocks, *(group.frozen for group in self.groups)]

    def kind(self, kind: str) -> str:
        """Return the name of this stack's layer records of a kind, such as "params"."""
        return layers_kind(kind, self.name)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes, specs and shardings of a program's state.

    Attributes:
      mesh: the device mesh.
      config: configuration of the program, as given.
      specs: LeafSpec of each parameter, by path.
      leaves: the trainable parameter leaves, in the order of the flattened tree.
      groups: groups of leaves whose records are tiles, in a streamed step.
      tx: the optimizer, in the form that is applied to the full tree.
      opt_map: the parameter leaf that owns each leaf of the optimizer state.
      opt_specs: LeafSpec of each leaf of the optimizer state.
      update_jaxpr: the optimizer's traced update of the full tree, a function of (grads, state,
        params, loss).
      abstract_params: tree of the trainable parameters in float32 shapes, with None in place of
        frozen parameters.
      abstract_arrays: TrainState of ShapeDtypeStruct with shardings, as if nothing were on disk.
      abstract_state: TrainState of ShapeDtypeStruct with shardings, as a program takes it: leaves
        of the nvme tier are DiskArgument.
      shardings: TrainState of NamedSharding.
      replicated: leaves that the ZeRO axis does not split.
      num_layers: number of layers in all stacks of a LayeredModel; None for a Model.
      device_layers: number of layers whose optimizer state stays on the device when `opt_state` is
        offloaded, by the name of the stack.
      disk: the records of the nvme tier, or None.
      frozen: the frozen parameter leaves, in the order of the flattened tree.
      flags: tree of bool over the parameters, true for frozen ones; None if no parameter is frozen.
      abstract_whole: the full parameter tree, in the compute dtypes.
      places: position of each of `all_leaves` in the flattened full tree.
      encodings: frozen leaves stored in 8 or 4 bits, by path. Each encoded array is a leaf here; in
        `frozen` and `abstract_whole` the weights are `Encoded` nodes, and `flags` counts each
        weight once.
      stack_layers: L of each stack of a LayeredModel, in order, by name; the name is "" if the
        model has only one.
      order: which layer each record holds of each pipeline stage; None if a record is one layer.
    """

    mesh: Mesh
    config: ZeroConfig
    specs: dict[str, LeafSpec]
    leaves: tuple[Leaf, ...]
    groups: tuple[TileGroup, ...]
    tx: optax.GradientTransformation
    opt_map: OptStateMap
    opt_specs: tuple[LeafSpec, ...]
    update_jaxpr: jex.ClosedJaxpr
    abstract_params: Any
    abstract_arrays: TrainState
    abstract_state: TrainState
    shardings: TrainState
    replicated: tuple[Replicated, ...]
    num_layers: int | None = None
    device_layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    disk: DiskLayout | None = None
    frozen: tuple[Leaf, ...] = ()
    flags: Any = None
    abstract_whole: Any = None
    places: tuple[int, ...] = ()
    encodings: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    stack_layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    order: StageOrder | None = None

    @functools.cached_property
    def all_leaves(self) -> tuple[Leaf, ...]:
        """The trainable leaves, then the frozen leaves.

        Indices of frozen leaves refer to this tuple.
        """
        return self.leaves + self.frozen

    @functools.cached_property
    def frozen_unstacked(self) -> tuple[int, ...]:
        """Indices of the unstacked frozen leaves."""
        return self._list_frozen("end")

    def _list_frozen(self, role: str) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.frozen, len(self.leaves)) if leaf.role == role)

    @functools.cached_property
    def in_tree(self) -> tuple[int, ...]:
        """The indices of all leaves in the order of the flattened full tree."""
        return tuple(sorted(range(len(self.all_leaves)), key=self.places.__getitem__))

    @property
    def frozen_tier(self) -> str:
        """The tier of the frozen leaves."""
        return frozen_tier(self.config)

    @property
    def compute_dtype(self) -> Any:
        """The dtype of the parameters that the model receives."""
        return jnp.dtype(PRECISIONS[self.config.precision].compute_dtype)

    @property
    def platform(self) -> str:
        """The platform of the mesh, such as "cpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def reduces_in_float32(self) -> bool:
        """Whether gradients are computed and reduced in float32 with a 16-bit compute dtype."""
        return reduces_in_float32(self.config)

    @property
    def reduces_once(self) -> bool:
        """Whether devices sum their own gradients over microbatches and reduce them at the end."""
        num_rows = num_batch_shards(self.mesh) * num_stages(self.mesh)
        return reduces_once(self.config) and num_rows > 1

    @property
    def sums_in_float32(self) -> bool:
        """Whether gradients are summed in float32 over microbatches."""
        return sums_in_float32(self.config)

    @property
    def stored_grads_dtype(self) -> str:
        """Name of the dtype in which gradients are stored between backward and update."""
        return stored_grads_dtype(self.config)

    def summed_dtype(self, index: int) -> Any:
        """Return the dtype of a leaf's gradient once backward has computed it."""
        dtype = self.leaves[index].dtype
        return jnp.promote_types(dtype, jnp.float32) if sums_in_float32(self.config) else dtype

    def grad_dtype(self, index: int) -> Any:
        """Return the dtype in which a leaf's gradient is stored between backward and update."""
        return stored_grad_dtype(self.leaves[index], self.config)

    def encode(self, params: Params, *keys: str) -> Any:
        """Return parameters as they are stored, with some leaves encoded.

        Args:
          params: all parameters of a Model, or a part of a LayeredModel's parameters: one layer,
            the embedding or the head.
          keys: keys that lead to `params` in the full tree; none for a Model.
        """
        return encode_tree(self.encodings, params, *keys)

    def decode(self, params: Params) -> Any:
        """Return parameters as the model receives them, from gathered ones that may be encoded."""
        return decoded(params, self.compute_dtype) if self.encodings else params

    def decoded_leaves(self, indices: Sequence[int] | None = None) -> list[Leaf]:
        """Return leaves as the model receives them: one leaf for all arrays of an encoded weight.

        Args:
          indices: indices into `all_leaves`, in the wanted order; None for all, in tree order.
        """
        if indices is None:
            indices = self.in_tree
        leaves = [self.all_leaves[i] for i in indices]
        encoded_paths = [leaf.decodes.path for leaf in leaves if leaf.decodes is not None]
        decoded_leaves = []
        for leaf in leaves:
            # The first array of an encoded weight stands for all of its arrays.
            if leaf.decodes is not None:
                decoded_leaves.append(leaf.decodes)
            elif not any(leaf.path[: len(path)] == path for path in encoded_paths):
                decoded_leaves.append(leaf)
        return decoded_leaves

    def decoding(self, model: LayeredModel) -> LayeredModel:
        """Return a model whose functions take parameters that may be encoded."""
        return decoding_model(model, self.compute_dtype) if self.encodings else model

    def join(self, state: TrainState) -> Any:
        """Return the full parameter tree of a state, or of an abstract state."""
        return join_frozen(state.params, state.frozen)

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the trainable leaves whose records are layers, in all stacks."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.role == "block")

    @functools.cached_property
    def stacks(self) -> tuple[StackLeaves, ...]:
        """The leaves of each stack of layers, in order."""
        return tuple(
            self._stack(name, num_layers) for name, num_layers in self.stack_layers.items()
        )

    def _stack(self, name: str, num_layers: int) -> StackLeaves:
        leaves = self.all_leaves
        in_tree = [i for i in self.in_tree if leaves[i].is_stacked and leaves[i].stack == name]
        blocks = sorted(i for i in in_tree if leaves[i].role == "block")
        return StackLeaves(
            name=name,
            num_layers=num_layers,
            blocks=tuple(i for i in blocks if i < len(self.leaves)),
            frozen_blocks=tuple(i for i in blocks if i >= len(self.leaves)),
            groups=tuple(group for group in self.groups if group.stack == name),
            in_tree=tuple(in_tree),
            device_layers=self.device_layers.get(name, 0),
        )

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters.

        Quantized weights count as their decoded elements; scales do not count.
        """
        return sum(math.prod(leaf.shape) for leaf in self.decoded_leaves())

    @functools.cached_property
    def unstacked(self) -> tuple[int, ...]:
        """Indices of the unstacked trainable leaves."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.role == "end")

    @functools.cached_property
    def stacked(self) -> tuple[int, ...]:
        """Indices of the stacked trainable leaves, in `blocks` or `groups`, in order."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.is_stacked)

    @property
    def has_master(self) -> bool:
        """Whether float32 masters exist in addition to the parameters."""
        return self.abstract_state.master is not None

    @property
    def updates_by_record(self) -> bool:
        """Whether the optimizer runs by layer or by leaf, because some state is offloaded."""
        return updates_by_parts(self.config)

    def block_tree(self, stack: str) -> Any:
        """Return the structure of the parameters of a stack's layers."""
        node = self.abstract_whole
        for key in block_path(stack):
            node = node[key]
        return jax.tree.structure(node)

    def param_shardings(self, sharded: bool) -> Any:
        """Return the parameters' shardings on the device, split over the ZeRO axis or not."""
        return param_shardings(self.abstract_params, self.specs, self.mesh, sharded, "device")


def stored_grad_dtype(leaf: Leaf, config: ZeroConfig) -> Any:
    """Return the dtype in which a leaf's gradient is stored between backward and update."""
    dtype = jnp.dtype(stored_grads_dtype(config))
    # A complex gradient stays complex.
    is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return dtype if is_floating else jnp.promote_types(leaf.dtype, dtype)


def param_shardings(
    params: Params, specs: Mapping[str, LeafSpec], mesh: Mesh, sharded: bool, tier: str
) -> Tree:
    """Return the sharding of each parameter in a tier.

    Args:
      params: abstract parameters, all or some of them.
      specs: LeafSpec of each parameter, by path.
      mesh: the device mesh.
      sharded: whether the parameters are split over the ZeRO axis.
      tier: "device" or "pinned_host".
    """

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        spec = stored_spec(specs[jax.tree_util.keystr(path)], sharded)
        return named(mesh, spec, tier)

    return jax.tree_util.tree_map_with_path(sharding, params)


def unit_bytes(layout: Layout) -> tuple[list[int], int]:
    """Return the gathered bytes of each parameter leaf, and the largest size to treat as one layer.

    For a stacked leaf of a LayeredModel, one layer's bytes are returned, and a layer is a block. A
    Model's layers are unknown, so half of the model counts as the largest layer.
    """
    sizes: list[int] = []
    blocks: dict[str, int] = {}
    for leaf in layout.all_leaves:
        num_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if leaf.is_stacked:
            num_bytes //= leaf.shape[0]
            blocks[leaf.stack] = blocks.get(leaf.stack, 0) + num_bytes
        sizes.append(num_bytes)
    largest_layer = max(blocks.values(), default=0) or sum(sizes) // 2
    # At least the largest leaf, such as an embedding, which may be gathered in one piece.
    return sizes, max(largest_layer, max(sizes))
