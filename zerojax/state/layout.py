"""Where each byte of a program's state is stored: the stage table applied to a parameter tree.

A `Layout` is built once, from abstract shapes, before anything is allocated.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from host_offload.schedule import layers_kind
from zerojax.config import (
    ZeroConfig,
    frozen_tier,
    grads_in_float32,
    reduces_in_float32,
    reduces_once,
    updates_by_parts,
    uses_disk,
)
from zerojax.models import (
    BLOCKS,
    LayeredModel,
    Model,
    block_path,
    frozen_flags,
    init_params,
    init_state,
    layered_specs,
    list_stacks,
)
from zerojax.precision import PRECISIONS, LossScale
from zerojax.sharding import (
    FSDP,
    STAGES,
    LeafSpec,
    Replicated,
    named,
    num_batch_shards,
    param_specs,
    replicated_leaves,
    stored_spec,
)
from zerojax.state.disk_layout import DiskLayout
from zerojax.state.encodings import (
    Encoding,
    check_tiles,
    choose_encodings,
    decoded,
    decoding_model,
    encode_tree,
)
from zerojax.state.leaves import Leaf, TileGroup, build_leaves, is_stacked
from zerojax.state.opt_state import (
    OptStateMap,
    OwnedTransformation,
    init_opt_state_shape,
    map_opt_state,
    opt_state_specs,
    traced_optimizer,
)
from zerojax.state.tile_groups import tile_groups, tiled_leaves
from zerojax.state.train_state import (
    DiskArgument,
    Pending,
    Split,
    TrainState,
    is_stored,
    join_frozen,
    split_frozen,
)
from zerojax.trees import OptState, Params, Tree

logger = logging.getLogger("zerojax")


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
        return reduces_once(self.config) and num_batch_shards(self.mesh) > 1

    @property
    def grads_in_float32(self) -> bool:
        """Whether gradients are stored in float32 between backward and update."""
        return grads_in_float32(self.config)

    def grad_dtype(self, index: int) -> Any:
        """Return the dtype in which a leaf's gradient is stored between backward and update."""
        dtype = self.leaves[index].dtype
        return jnp.promote_types(dtype, jnp.float32) if self.grads_in_float32 else dtype

    def encode(self, params: Params, *part: str) -> Any:
        """Return parameters as they are stored, with some leaves encoded.

        Args:
          params: all parameters of a Model, or a part of a LayeredModel's parameters: one layer,
            the embedding or the head.
          part: keys that lead to the part in the full tree.
        """
        return encode_tree(self.encodings, params, *part)

    def decode(self, params: Params) -> Any:
        """Return parameters as the model receives them, from gathered ones that may be encoded."""
        return decoded(params, self.compute_dtype) if self.encodings else params

    def decoded_leaves(self, indices: Sequence[int] | None = None) -> list[Leaf]:
        """Return leaves as the model receives them: one leaf for all arrays of an encoded weight.

        Args:
          indices: indices into `all_leaves`, in the wanted order; None for all, in tree order.
        """
        leaves = [self.all_leaves[i] for i in (self.in_tree if indices is None else indices)]
        encoded = [leaf.decodes.path for leaf in leaves if leaf.decodes is not None]

        def is_array_of_one(leaf: Leaf) -> bool:
            return any(leaf.path[: len(path)] == path for path in encoded)

        # The first array of an encoded weight stands for all of its arrays.
        return [
            leaf.decodes or leaf
            for leaf in leaves
            if leaf.decodes is not None or not is_array_of_one(leaf)
        ]

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
        of_stack = [
            i
            for i in self.in_tree
            if self.all_leaves[i].is_stacked and self.all_leaves[i].stack == name
        ]
        blocks = sorted(i for i in of_stack if self.all_leaves[i].role == "block")
        return StackLeaves(
            name=name,
            num_layers=num_layers,
            blocks=tuple(i for i in blocks if i < len(self.leaves)),
            frozen_blocks=tuple(i for i in blocks if i >= len(self.leaves)),
            groups=tuple(group for group in self.groups if group.stack == name),
            in_tree=tuple(of_stack),
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
        return _param_shardings(self.abstract_params, self.specs, self.mesh, sharded, "device")


def _param_shardings(
    params: Params, specs: dict[str, LeafSpec], mesh: Mesh, sharded: bool, tier: str
) -> Any:
    """Return the sharding of each parameter in a tier; unsharded leaves keep the user's spec."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: named(mesh, stored_spec(specs[jax.tree_util.keystr(path)], sharded), tier),
        params,
    )


def _split(tree: Tree, layers: Any, mesh: Mesh) -> Any:
    """Return a tree of stacked leaves in host memory, with the first layers on the device.

    Args:
      tree: tree of ShapeDtypeStruct with shardings.
      layers: tree of int with the same structure: number k of layers on the device, 0 for unstacked
        leaves.
      mesh: the device mesh.
    """

    def split(leaf: jax.ShapeDtypeStruct, layers: int) -> Any:
        if not layers:
            return leaf
        num_layers, *rest = leaf.shape
        on_device = named(mesh, leaf.sharding.spec)
        # [L, ...] -> [k, ...] on the device, and [L - k, ...] in the leaf's tier.
        return Split(
            jax.ShapeDtypeStruct((layers, *rest), leaf.dtype, sharding=on_device),  # pyright: ignore[reportArgumentType]
            jax.ShapeDtypeStruct((num_layers - layers, *rest), leaf.dtype, sharding=leaf.sharding),  # pyright: ignore[reportArgumentType]
        )

    return jax.tree.map(split, tree, layers)


ByLayer = Callable[
    [optax.GradientTransformation, Any, tuple[Any, jex.ClosedJaxpr] | ValueError, Sequence[bool]],
    optax.GradientTransformation,
]
"""(tx, abstract params, (abstract state, traced update) or error, is stacked) -> optimizer."""


def build_layout(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    config: ZeroConfig,
    mesh: Mesh,
    by_layer: ByLayer = lambda tx, *_: tx,
) -> Layout:
    """Choose specs and shardings for the full state, from shapes alone.

    Args:
      model: the model.
      tx: the optimizer.
      config: configuration of the program.
      mesh: the device mesh.
      by_layer: function that chooses how the optimizer is applied to stacks of layers.

    Raises:
      ValueError: the model has no trainable parameters or parameters that are not numbers, specs do
        not fit, or the optimizer cannot run sharded.
    """
    abstract_key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda key: init_params(model, key), abstract_key)
    table = _build_table(model, config, mesh, params)
    optimizer = _trace_optimizer(model, tx, config, mesh, by_layer, table)
    state = _abstract_state(config, mesh, abstract_key, table, optimizer)
    model_state = _abstract_model_state(model, mesh, abstract_key)
    if model_state is not None:
        state = dataclasses.replace(state, model_state=model_state)
    device_layers = _device_layers(config, table.leaves)
    if any(device_layers.values()):
        state = _split_opt_state(state, table.leaves, optimizer.opt_map, device_layers, mesh)
    if table.frozen_leaves:
        state = dataclasses.replace(state, frozen=_abstract_frozen(config, mesh, table))
    replicated = tuple(table.replicated) if STAGES[config.stage].opt_state else ()
    _report(replicated, mesh)
    is_layered = isinstance(model, LayeredModel)
    if config.delayed_update and is_layered:
        pending = _pending(table.leaves, optimizer.opt_map, config, mesh)
        state = dataclasses.replace(state, pending=pending)
    # Leaves on disk come last, so that `abstract_arrays` has all leaves as if they were in memory.
    arrays = state
    disk = None
    if uses_disk(config):
        disk = DiskLayout(config, mesh)
        state = _on_disk(state, optimizer.is_shared, config, mesh)
    num_layers_of = {}
    if is_layered:
        num_layers_of = {stack.name: stack.model.num_layers for stack in list_stacks(model)}
    return Layout(
        mesh,
        config,
        table.specs,
        table.leaves,
        table.groups,
        optimizer.tx,
        optimizer.opt_map,
        optimizer.specs,
        optimizer.update_jaxpr,
        optimizer.abstract_weights,
        arrays,
        state,
        jax.tree.map(lambda a: a.sharding, state),
        replicated,
        model.num_layers if is_layered else None,
        device_layers,
        disk,
        table.frozen_leaves,
        table.flags,
        table.params,
        table.positions,
        table.encodings,
        num_layers_of,
    )


@dataclasses.dataclass(frozen=True)
class _LeafTable:
    """The parameters of a model as stored: in the compute dtype, frozen weights encoded.

    Attributes:
      params: shapes of all parameters, trainable and frozen.
      flags: tree of bool, which leaves are frozen; None if none is.
      specs: spec of each leaf, by path.
      leaves: the trainable leaves.
      frozen_leaves: the frozen leaves.
      positions: position of each leaf in the tree, trainable leaves first.
      groups: groups of tiles, by index of leaf.
      encodings: frozen leaves stored in 8 or 4 bits, by path.
      replicated: leaves that ZeRO cannot shard.
    """

    params: Params
    flags: Any
    specs: dict[str, LeafSpec]
    leaves: tuple[Leaf, ...]
    frozen_leaves: tuple[Leaf, ...]
    positions: tuple[int, ...]
    groups: tuple[TileGroup, ...]
    encodings: Mapping[str, Encoding]
    replicated: Sequence[Replicated]

    @property
    def trained_params(self) -> Params:
        """Shapes of the trainable parameters, with None in place of frozen leaves."""
        return split_frozen(self.flags, self.params)[0]


def _build_table(
    model: Model | LayeredModel, config: ZeroConfig, mesh: Mesh, params: Params
) -> _LeafTable:
    """Return the table of a model's leaves, from the shapes of its parameters."""
    flags = frozen_flags(model, params)
    is_frozen = jax.tree.leaves(flags)
    if not any(is_frozen):
        flags = None
        _check_frozen_config(config)
    _report_widened(split_frozen(flags, params)[0], config)
    user_specs = model.specs if isinstance(model, Model) else layered_specs(model)
    specs = param_specs(
        params,
        user_specs,
        mesh,
        FSDP,
        first_dims=_first_dims(model, params),
        min_shard_bytes=config.min_shard_bytes,
    )
    stored = _in_compute_dtype(params, config)
    replicated = replicated_leaves(stored, specs)
    groups = tile_groups(model, params, config)
    encodings = _encodings(model, config, stored, specs, is_frozen, mesh)
    if encodings:
        decoded_leaves = build_leaves(model, stored, specs, (), is_frozen)
        stored, specs, is_frozen, groups = _encode_table(
            encodings, decoded_leaves, stored, groups, STAGES[config.stage].params
        )
        table = build_leaves(model, stored, specs, groups, is_frozen)
        table = _with_decoded(table, decoded_leaves, encodings)
    else:
        table = build_leaves(model, stored, specs, groups, is_frozen)
    # Trainable leaves come first, so that an update counts only them. `sorted` is stable.
    positions = tuple(sorted(range(len(table)), key=lambda position: table[position].frozen))
    return _LeafTable(
        params=stored,
        flags=flags,
        specs=specs,
        leaves=tuple(leaf for leaf in table if not leaf.frozen),
        frozen_leaves=tuple(leaf for leaf in table if leaf.frozen),
        positions=positions,
        groups=tuple(_trained_first(group, table, positions) for group in groups),
        encodings=encodings,
        replicated=replicated,
    )


def _in_compute_dtype(params: Params, config: ZeroConfig) -> Params:
    """Return shapes of parameters with floating leaves in the compute dtype."""
    compute_dtype = jnp.dtype(PRECISIONS[config.precision].compute_dtype)

    def stored(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = compute_dtype if _is_floating(leaf) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(stored, params)


@dataclasses.dataclass(frozen=True)
class _TracedOptimizer:
    """An optimizer and its state, traced over the float32 weights.

    Attributes:
      tx: the optimizer, applied layer by layer if it cannot update whole stacks.
      abstract_weights: shapes of the float32 weights, whatever the compute dtype.
      opt_state: shapes of the optimizer state.
      opt_map: which state leaf belongs to which parameter.
      specs: spec of each leaf of the optimizer state.
      update_jaxpr: the traced update.
      is_shared: tree of bool, which leaves of the optimizer state belong to no parameter.
    """

    tx: optax.GradientTransformation
    abstract_weights: Params
    opt_state: OptState
    opt_map: OptStateMap
    specs: Any
    update_jaxpr: Any
    is_shared: Any


def _trace_optimizer(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    config: ZeroConfig,
    mesh: Mesh,
    by_layer: ByLayer,
    table: _LeafTable,
) -> _TracedOptimizer:
    """Trace the optimizer over the trainable float32 weights.

    Raises:
      ValueError: the optimizer cannot be traced or cannot run sharded.
    """
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), table.trained_params
    )
    traced = traced_optimizer(tx, weights)
    # Any optimizer can update the full tree of a Model.
    if isinstance(model, LayeredModel) or updates_by_parts(config):
        applied = by_layer(tx, weights, traced, [leaf.is_stacked for leaf in table.leaves])
        if applied is not tx:
            tx = applied
            traced = init_opt_state_shape(tx, weights)
    if isinstance(traced, ValueError):
        raise traced
    opt_state, update_jaxpr = traced
    if isinstance(tx, OwnedTransformation):
        opt_map = OptStateMap(opt_state, tx.owners)
    else:
        opt_map = map_opt_state(opt_state, weights)
    is_shared = [owner is None for owner in opt_map.owners]
    return _TracedOptimizer(
        tx=tx,
        abstract_weights=weights,
        opt_state=opt_state,
        opt_map=opt_map,
        specs=opt_state_specs(opt_map, table.leaves, mesh, FSDP, config.min_shard_bytes),
        update_jaxpr=update_jaxpr,
        is_shared=jax.tree.unflatten(jax.tree.structure(opt_state), is_shared),
    )


def _abstract_state(
    config: ZeroConfig,
    mesh: Mesh,
    abstract_key: Any,
    table: _LeafTable,
    optimizer: _TracedOptimizer,
) -> TrainState:
    """Return shapes and shardings of the trainable state, as if nothing was on disk."""
    stage = STAGES[config.stage]
    precision = PRECISIONS[config.precision]
    scalar = named(mesh, ())
    state_tier = _array_tier(config.opt_state)

    def build_state(
        scalar: Any, key: Any, params: Params, master: Any, opt_state: OptState, counter: Any
    ) -> TrainState:
        return TrainState(
            step=counter,
            skipped=counter,
            key=key,
            params=params,
            master=master if precision.has_master else None,
            opt_state=opt_state,
            loss_scale=LossScale(scalar, counter, counter) if precision.scales_loss else None,
        )

    def state_sharding(spec: LeafSpec, is_shared: bool) -> Any:
        # Scalars of the optimizer state stay on the device in every tier, because the program
        # computes with them.
        tier = "device" if is_shared else state_tier
        return named(mesh, stored_spec(spec, stage.opt_state), tier)

    params = table.trained_params
    weights = optimizer.abstract_weights
    specs = table.specs
    tree = jax.tree.structure(optimizer.opt_state)
    shardings = build_state(
        scalar,
        scalar,
        _param_shardings(weights, specs, mesh, stage.params, _array_tier(config.params)),
        _param_shardings(weights, specs, mesh, stage.opt_state, state_tier),
        jax.tree.map(
            state_sharding,
            jax.tree.unflatten(tree, optimizer.specs),
            optimizer.is_shared,
            is_leaf=lambda spec: isinstance(spec, LeafSpec),
        ),
        scalar,
    )
    f32 = jax.ShapeDtypeStruct((), jnp.float32)
    i32 = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = build_state(f32, abstract_key, params, weights, optimizer.opt_state, i32)
    return jax.tree.map(_with_sharding, shapes, shardings)


def _with_sharding(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return a shape with a sharding."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _abstract_model_state(model: Model | LayeredModel, mesh: Mesh, abstract_key: Any) -> Any:
    """Return shapes and shardings of the model's own state, which is replicated; None if none."""
    state = jax.eval_shape(lambda key: init_state(model, key), abstract_key)
    return jax.tree.map(lambda leaf: _with_sharding(leaf, named(mesh, ())), state)


def _device_layers(config: ZeroConfig, leaves: Sequence[Leaf]) -> dict[str, int]:
    """Return how many layers of each stack keep their optimizer state on the device.

    A stack without trainable leaves has no state and does not appear.
    """
    share = config.opt_state_device_fraction
    num_layers = {leaf.stack: leaf.shape[0] for leaf in leaves if leaf.is_stacked}
    # Rounded twice, because 0.29 * 100 is 28.999999999999996.
    return {name: int(round(share * count, 9)) for name, count in num_layers.items()}


def _abstract_frozen(config: ZeroConfig, mesh: Mesh, table: _LeafTable) -> Params:
    """Return shapes and shardings of the frozen weights, as if nothing was on disk."""
    _, frozen = split_frozen(table.flags, table.params)
    tier = _array_tier(frozen_tier(config))
    shardings = _param_shardings(frozen, table.specs, mesh, STAGES[config.stage].params, tier)
    return jax.tree.map(_with_sharding, frozen, shardings)


def _check_frozen_config(config: ZeroConfig) -> None:
    """Raise ValueError for settings of frozen weights if the model freezes nothing."""
    for name in ("frozen", "frozen_dtype"):
        if (value := getattr(config, name)) is not None:
            raise ValueError(
                f"{name}={value!r}, and the model freezes nothing: choose the frozen weights with "
                f"`frozen` of the Model or LayeredModel, or leave {name}=None"
            )


def _encodings(
    model: Model | LayeredModel,
    config: ZeroConfig,
    whole: Any,
    specs: Mapping[str, LeafSpec],
    is_frozen: Sequence[bool],
    mesh: Mesh,
) -> dict[str, Encoding]:
    """Return the frozen leaves to store in 8 or 4 bits, by path."""
    if config.frozen_dtype is None:
        return {}
    arrays = jax.tree_util.tree_flatten_with_path(whole)[0]
    chosen = [
        (path, a)
        for (path, a), frozen in zip(arrays, is_frozen, strict=True)
        if frozen and _is_floating(a)
    ]
    leaves = {jax.tree_util.keystr(path): a for path, a in chosen}
    stacked = [jax.tree_util.keystr(path) for path, _ in chosen if is_stacked(model, path)]
    at = {path: stored_spec(specs[path], STAGES[config.stage].params) for path in leaves}
    encodings = choose_encodings(config.frozen_dtype, leaves, at, stacked, mesh)
    of_tiles = [
        (path, a) for path, a in arrays if is_stacked(model, path) or isinstance(model, Model)
    ]
    pairs = zip(of_tiles, tiled_leaves(model, whole), strict=True)
    check_tiles(
        model,
        config.frozen_dtype,
        list(encodings),
        [jax.tree_util.keystr(p) for (p, _), flag in pairs if flag],
    )
    return encodings


def _is_floating(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _encode_table(
    encodings: Mapping[str, Encoding],
    given: Sequence[Leaf],
    whole: Any,
    groups: Sequence[TileGroup],
    sharded: bool,
) -> tuple[Any, dict[str, LeafSpec], list[bool], tuple[TileGroup, ...]]:
    """Return the tree with `Encoded` nodes, its specs and flags, and groups by position in it."""
    arrays, tree = jax.tree.flatten(whole)
    nodes = []
    specs = {}
    flags = []
    places = []
    for leaf, array in zip(given, arrays, strict=True):
        encoding = encodings.get(leaf.name)
        node = array if encoding is None else encoding.abstract
        spec = leaf.spec if encoding is None else encoding.leaf_spec(leaf.spec, sharded)
        places.append(len(flags))
        for below, _ in jax.tree_util.tree_flatten_with_path(node)[0]:
            specs[jax.tree_util.keystr((*leaf.path, *below))] = spec
            flags.append(leaf.frozen)
        nodes.append(node)
    groups = [
        dataclasses.replace(group, leaves=tuple(places[i] for i in group.leaves))
        for group in groups
    ]
    return jax.tree.unflatten(tree, nodes), specs, flags, tuple(groups)


def _with_decoded(
    table: Sequence[Leaf], given: Sequence[Leaf], encodings: Mapping[str, Encoding]
) -> tuple[Leaf, ...]:
    """Return the leaves, where an encoded weight's first array refers to the decoded leaf."""
    waiting = {leaf.path: leaf for leaf in given if leaf.name in encodings}
    leaves = []
    for leaf in table:
        if leaf.frozen:
            of = next(
                (waiting.pop(path) for path in list(waiting) if leaf.path[: len(path)] == path),
                None,
            )
        else:
            of = None
        leaves.append(leaf if of is None else dataclasses.replace(leaf, decodes=of))
    return tuple(leaves)


def _trained_first(group: TileGroup, table: Sequence[Leaf], places: Sequence[int]) -> TileGroup:
    """Return a group by leaf indices instead of tree positions, trainable leaves before frozen."""
    indices = [places.index(place) for place in group.leaves]
    num_trained = sum(not leaf.frozen for leaf in table)
    trained, frozen = (
        [i for i in indices if (i < num_trained) == wanted] for wanted in (True, False)
    )
    return dataclasses.replace(group, leaves=tuple(trained), frozen=tuple(frozen))


def _first_dims(model: Model | LayeredModel, params: Params) -> dict[str, int]:
    """Return the number of leading dims (layers, tiles) that are never split, by path."""
    if not isinstance(model, LayeredModel):
        return {}
    paths = jax.tree_util.tree_flatten_with_path({BLOCKS: params[BLOCKS]})[0]
    flags = tiled_leaves(model, params)
    return {
        jax.tree_util.keystr(path): 1 + bool(tiled)
        for (path, _), tiled in zip(paths, flags, strict=True)
    }


def _array_tier(tier: str) -> str:
    """Return the tier that a leaf's array would have if it were not on disk."""
    return "device" if tier == "nvme" else tier


def _on_disk(state: TrainState, is_shared: Any, config: ZeroConfig, mesh: Mesh) -> TrainState:
    """Replace the leaves of the nvme tier by DiskArgument.

    Scalars that the full optimizer state shares stay arrays.
    """
    # One number per device: each device orders its own callbacks and waits for no other device.
    token: Any = jax.ShapeDtypeStruct(
        (mesh.size,), jnp.int32, sharding=named(mesh, (mesh.axis_names,))
    )

    def leaf_on_disk(leaf: Any, shared: bool = False) -> Any:
        if isinstance(leaf, Split):
            return Split(leaf.device, leaf_on_disk(leaf.host))
        return leaf if shared else DiskArgument(token, leaf.shape, leaf.dtype)

    def weights(tree: Tree, tier: str) -> Any:
        return jax.tree.map(leaf_on_disk, tree, is_leaf=is_stored) if tier == "nvme" else tree

    opt_state = state.opt_state
    if config.opt_state == "nvme":
        opt_state = jax.tree.map(leaf_on_disk, opt_state, is_shared, is_leaf=is_stored)
    return dataclasses.replace(
        state,
        params=weights(state.params, config.params),
        master=weights(state.master, config.opt_state),
        opt_state=opt_state,
        frozen=weights(state.frozen, frozen_tier(config)),
    )


def _pending(
    leaves: Sequence[Leaf], opt_map: OptStateMap, config: ZeroConfig, mesh: Mesh
) -> Pending:
    """Return the shapes of a delayed update, stacked leaves first."""
    # The same dtype as `Layout.grad_dtype`.
    dtype = jnp.dtype(
        "float32" if grads_in_float32(config) else PRECISIONS[config.precision].compute_dtype
    )

    def grad(leaf: Leaf) -> Any:
        spec = stored_spec(leaf.spec, STAGES[config.stage].opt_state)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=named(mesh, spec, config.opt_state))

    def scalar(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named(mesh, ()))

    return Pending(
        grads=[
            grad(leaf) for leaf in sorted(leaves, key=lambda leaf: not leaf.is_stacked)
        ],  # sorted is stable
        shared=[scalar(opt_map.leaves[j]) for j in opt_map.shared],
        scalars=scalar(jax.ShapeDtypeStruct((3,), jnp.float32)),  # pyright: ignore[reportArgumentType]
        ready=scalar(jax.ShapeDtypeStruct((), jnp.bool_)),  # pyright: ignore[reportArgumentType]
    )


def _split_opt_state(
    state: TrainState,
    leaves: Sequence[Leaf],
    opt_map: OptStateMap,
    layers: Mapping[str, int],
    mesh: Mesh,
) -> TrainState:
    """Keep the optimizer state and masters of each stack's first layers on the device.

    `layers` has the number of these layers, by the name of the stack.
    """
    of_leaves = [layers[leaf.stack] if leaf.is_stacked else 0 for leaf in leaves]

    def split(tree: Tree, layers: Sequence[int]) -> Any:
        return _split(tree, jax.tree.unflatten(jax.tree.structure(tree), layers), mesh)

    opt_state = split(
        state.opt_state, [0 if owner is None else of_leaves[owner] for owner in opt_map.owners]
    )
    master = state.master
    if master is not None:
        master = split(master, of_leaves)
    return dataclasses.replace(state, opt_state=opt_state, master=master)


def _report(replicated: tuple[Replicated, ...], mesh: Mesh) -> None:
    if replicated:
        total = sum(r.num_bytes for r in replicated)
        names = "; ".join(f"{r.name} ({r.num_bytes} B: {r.why})" for r in replicated[:8])
        more = f"; and {len(replicated) - 8} more" if len(replicated) > 8 else ""
        logger.warning(
            "%d leaves, %d float32 bytes, stay replicated over %s=%d: %s%s",
            len(replicated),
            total,
            FSDP,
            mesh.shape[FSDP],
            names,
            more,
        )


def _report_widened(params: Params, config: ZeroConfig) -> None:
    """Log that parameters that the model creates in 16 bits are kept in float32."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    narrow = [
        (jax.tree_util.keystr(path), leaf.dtype.name)
        for path, leaf in leaves
        if leaf.dtype.itemsize < 4
    ]
    if narrow:
        if config.precision == "fp32":
            kept = "float32"
        else:
            kept = f"{PRECISIONS[config.precision].compute_dtype} with float32 masters"
        logger.warning(
            "%d parameter leaves, such as %s, are made in %s, but kept in %s: precision=%r chooses "
            "the dtype, not the model's param_dtype. 16 bits only round the initial weights, so "
            "leave param_dtype float32",
            len(narrow),
            narrow[0][0],
            narrow[0][1],
            kept,
            config.precision,
        )


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
    # At least the largest leaf, such as an embedding, which may be gathered in one piece.
    return sizes, max(max(blocks.values(), default=0) or sum(sizes) // 2, max(sizes))
