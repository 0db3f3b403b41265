"""Build a program's `Layout`: apply the stage table and the tiers to a parameter tree.

Everything follows from abstract shapes, in this order:

    weights      specs, groups of tiles, encodings, and the table of leaves
    optimizer    its traced update, and the parameter that each leaf of its state mirrors
    state        shape, dtype, sharding and tier of every array, as if nothing were on disk
    disk         the same state with the leaves of the nvme tier replaced

Nothing is allocated.
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

from zerojax.config import (
    ZeroConfig,
    frozen_tier,
    updates_by_parts,
    uses_disk,
)
from zerojax.models import (
    LayeredModel,
    Model,
    frozen_flags,
    init_params,
    init_state,
    layered_specs,
    list_stacks,
)
from zerojax.precision import PRECISIONS, LossScale
from zerojax.sharding import (
    STAGES,
    LeafSpec,
    Replicated,
    named,
    param_specs,
    replicated_leaves,
    stored_spec,
    zero_axes,
)
from zerojax.state.disk_layout import DiskLayout
from zerojax.state.encodings import Encoding, encode_leaves, list_encodings, with_decoded
from zerojax.state.layout import Layout, param_shardings, stored_grad_dtype
from zerojax.state.leaves import Leaf, TileGroup, build_leaves, tile_groups, tiles_by_path
from zerojax.state.opt_state import (
    OptStateMap,
    OwnedTransformation,
    init_opt_state_shape,
    map_opt_state,
    opt_state_specs,
    traced_optimizer,
)
from zerojax.state.train_state import (
    DiskArgument,
    Pending,
    Split,
    TrainState,
    is_stored,
    split_frozen,
)
from zerojax.state.wide import stage_order
from zerojax.trees import OptState, Params, Tree

logger = logging.getLogger("zerojax")

ByLayer = Callable[
    [optax.GradientTransformation, Any, tuple[Any, jex.ClosedJaxpr] | ValueError, Sequence[int]],
    optax.GradientTransformation,
]
"""(tx, abstract params, (abstract state, traced update) or error, dims of layers) -> optimizer."""


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The parameters of a model, as they are stored.

    Attributes:
      specs: LeafSpec of each parameter, by path.
      leaves: the trainable parameter leaves, in the order of the flattened tree.
      frozen_leaves: the frozen parameter leaves, in the order of the flattened tree.
      positions: position of each leaf in the flattened full tree, trainable leaves first.
      groups: groups of leaves whose records are tiles.
      encodings: frozen leaves stored in 8 or 4 bits, by path.
      frozen_flags: tree of bool over the parameters, true for frozen ones; None if no parameter is
        frozen.
      abstract_whole: the full parameter tree, in the compute dtypes, with encoded leaves.
      replicated: leaves that the ZeRO axis does not split although the stage asks for it.
    """

    specs: dict[str, LeafSpec]
    leaves: tuple[Leaf, ...]
    frozen_leaves: tuple[Leaf, ...]
    positions: tuple[int, ...]
    groups: tuple[TileGroup, ...]
    encodings: dict[str, Encoding]
    frozen_flags: Any
    abstract_whole: Params
    replicated: tuple[Replicated, ...]

    @functools.cached_property
    def abstract_trained(self) -> Params:
        """The trainable parameters in the compute dtypes, with None in place of frozen ones."""
        return split_frozen(self.frozen_flags, self.abstract_whole)[0]

    @functools.cached_property
    def abstract_frozen(self) -> Params:
        """The frozen parameters, with None in place of trainable ones; None if nothing is."""
        return split_frozen(self.frozen_flags, self.abstract_whole)[1]

    @functools.cached_property
    def abstract_master(self) -> Params:
        """The trainable parameters in float32, with None in place of frozen ones."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self.abstract_trained
        )


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """The optimizer, as it is applied to the full tree.

    Attributes:
      tx: the optimizer.
      opt_map: the abstract state, and the parameter leaf that owns each of its leaves.
      specs: LeafSpec of each leaf of the state.
      update_jaxpr: the traced update, a function of (grads, state, params, loss).
    """

    tx: optax.GradientTransformation
    opt_map: OptStateMap
    specs: tuple[LeafSpec, ...]
    update_jaxpr: jex.ClosedJaxpr

    @functools.cached_property
    def is_shared(self) -> OptState:
        """Tree of bool over the state, true for leaves that belong to no parameter."""
        flags = [owner is None for owner in self.opt_map.owners]
        return jax.tree.unflatten(jax.tree.structure(self.opt_map.abstract), flags)


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
    weights = _build_weights(model, config, mesh)
    optimizer = _trace_optimizer(model, tx, weights, config, mesh, by_layer)
    device_layers = _count_device_layers(weights.leaves, config)

    _report_replicated(weights.replicated, mesh)

    # `arrays` has all leaves as if they were in memory; leaves on disk come last.
    arrays = _build_all_arrays(model, weights, optimizer, device_layers, config, mesh)
    disk = None
    abstract_state = arrays
    if uses_disk(config):
        disk = DiskLayout(config, mesh)
        num_stacked = sum(leaf.is_stacked for leaf in weights.leaves)
        abstract_state = _put_on_disk(arrays, optimizer.is_shared, num_stacked, config, mesh)

    num_layers = None
    stack_layers = {}
    if isinstance(model, LayeredModel):
        num_layers = model.num_layers
        stack_layers = {stack.name: stack.model.num_layers for stack in list_stacks(model)}
    return Layout(
        mesh=mesh,
        config=config,
        specs=weights.specs,
        leaves=weights.leaves,
        groups=weights.groups,
        tx=optimizer.tx,
        opt_map=optimizer.opt_map,
        opt_specs=optimizer.specs,
        update_jaxpr=optimizer.update_jaxpr,
        abstract_params=weights.abstract_master,
        abstract_arrays=arrays,
        abstract_state=abstract_state,
        shardings=jax.tree.map(lambda a: a.sharding, abstract_state),
        replicated=weights.replicated,
        num_layers=num_layers,
        device_layers=device_layers,
        disk=disk,
        frozen=weights.frozen_leaves,
        flags=weights.frozen_flags,
        abstract_whole=weights.abstract_whole,
        places=weights.positions,
        encodings=weights.encodings,
        stack_layers=stack_layers,
        order=stage_order(model),
    )


# --- weights --------------------------------------------------------------------------------------


def _build_weights(model: Model | LayeredModel, config: ZeroConfig, mesh: Mesh) -> _Weights:
    """Return how the parameters of a model are stored."""
    stage = STAGES[config.stage]
    params = jax.eval_shape(lambda key: init_params(model, key), _abstract_key())
    flags = frozen_flags(model, params)
    is_frozen = jax.tree.leaves(flags)
    if not any(is_frozen):
        flags = None
        _check_frozen_config(config)
    _report_widened(split_frozen(flags, params)[0], config)

    model_specs = model.specs if isinstance(model, Model) else layered_specs(model)
    specs = param_specs(
        params,
        model_specs,
        mesh,
        zero_axes(mesh),
        first_dims=_count_first_dims(model, params),
        min_shard_bytes=config.min_shard_bytes,
    )
    whole = _in_compute_dtype(params, config)
    groups = tile_groups(model, params, config)
    replicated = tuple(replicated_leaves(whole, specs)) if stage.opt_state else ()
    encodings = list_encodings(model, config, whole, specs, is_frozen, mesh)
    if encodings:
        unencoded = build_leaves(model, whole, specs, groups, is_frozen)
        encoded = encode_leaves(encodings, unencoded, whole, groups, stage.params)
        whole = encoded.tree
        specs = encoded.specs
        groups = encoded.groups
        table = build_leaves(model, whole, specs, groups, encoded.is_frozen)
        table = with_decoded(table, unencoded, encodings)
    else:
        table = build_leaves(model, whole, specs, groups, is_frozen)

    # Trainable leaves come first, so that an update counts only them.
    positions = sorted(range(len(table)), key=lambda i: table[i].frozen)  # sorted is stable
    return _Weights(
        specs=specs,
        leaves=tuple(leaf for leaf in table if not leaf.frozen),
        frozen_leaves=tuple(leaf for leaf in table if leaf.frozen),
        positions=tuple(positions),
        groups=tuple(_index_by_leaf(group, table, positions) for group in groups),
        encodings=encodings,
        frozen_flags=flags,
        abstract_whole=whole,
        replicated=replicated,
    )


def _abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def _in_compute_dtype(params: Params, config: ZeroConfig) -> Params:
    """Return abstract parameters with their floating leaves in the compute dtype."""
    compute_dtype = jnp.dtype(PRECISIONS[config.precision].compute_dtype)

    def cast(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, compute_dtype if is_floating else leaf.dtype)

    return jax.tree.map(cast, params)


def _check_frozen_config(config: ZeroConfig) -> None:
    """Raise ValueError for settings of frozen weights if the model freezes nothing."""
    for name in ("frozen", "frozen_dtype"):
        if (value := getattr(config, name)) is not None:
            raise ValueError(
                f"{name}={value!r}, and the model freezes nothing: choose the frozen weights with "
                f"`frozen` of the Model or LayeredModel, or leave {name}=None"
            )


def _index_by_leaf(group: TileGroup, table: Sequence[Leaf], positions: Sequence[int]) -> TileGroup:
    """Return a group with leaf indices, divided into trainable and frozen, for tree positions."""
    indices = [positions.index(position) for position in group.leaves]
    num_trained = sum(not leaf.frozen for leaf in table)
    trained = tuple(i for i in indices if i < num_trained)
    frozen = tuple(i for i in indices if i >= num_trained)
    return dataclasses.replace(group, leaves=trained, frozen=frozen)


def _count_first_dims(model: Model | LayeredModel, params: Params) -> dict[str, int]:
    """Return the number of leading dims (layers, tiles) that are never split, by path."""
    if not isinstance(model, LayeredModel):
        return {}
    num_layer_dims = 1 if stage_order(model) is None else 2
    return {
        name: num_layer_dims + bool(tiles) for name, tiles in tiles_by_path(model, params).items()
    }


# --- optimizer ------------------------------------------------------------------------------------


def _trace_optimizer(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    weights: _Weights,
    config: ZeroConfig,
    mesh: Mesh,
    by_layer: ByLayer,
) -> _Optimizer:
    """Return the optimizer of a program, traced over float32 weights."""
    # The optimizer's state is over float32 weights, whatever the compute dtype.
    master = weights.abstract_master
    traced = traced_optimizer(tx, master)
    # Any optimizer can update the full tree of a Model.
    if isinstance(model, LayeredModel) or updates_by_parts(config):
        applied = by_layer(tx, master, traced, [leaf.layer_dims for leaf in weights.leaves])
        if applied is not tx:
            tx = applied
            traced = init_opt_state_shape(tx, master)
    if isinstance(traced, ValueError):
        raise traced
    opt_state, update_jaxpr = traced
    if isinstance(tx, OwnedTransformation):
        opt_map = OptStateMap(opt_state, tx.owners)
    else:
        opt_map = map_opt_state(opt_state, master)
    specs = opt_state_specs(opt_map, weights.leaves, mesh, zero_axes(mesh), config.min_shard_bytes)
    return _Optimizer(tx, opt_map, specs, update_jaxpr)


def _count_device_layers(leaves: Sequence[Leaf], config: ZeroConfig) -> dict[str, int]:
    """Return how many layers keep their optimizer state on the device, by stack.

    A stack without trainable leaves has no state, and no entry.
    """
    num_layers = {leaf.stack: leaf.shape[0] for leaf in leaves if leaf.is_stacked}
    # Rounded twice, because 0.29 * 100 is 28.999999999999996.
    share = config.opt_state_device_fraction
    device_layers = {name: int(round(share * count, 9)) for name, count in num_layers.items()}
    if share and num_layers and not any(device_layers.values()):
        count = max(num_layers.values())
        in_stage = any(leaf.order is not None for leaf in leaves)
        layers = f"{count} layers of a stage" if in_stage else f"{count} layers"
        logger.warning(
            "opt_state_device_fraction=%s keeps no optimizer state on the device: %s of %s is less "
            "than one. Use at least 1/%d = %s",
            share,
            share,
            layers,
            count,
            math.ceil(1000 / count) / 1000,
        )
    return device_layers


# --- arrays of the state --------------------------------------------------------------------------


def _build_all_arrays(
    model: Model | LayeredModel,
    weights: _Weights,
    optimizer: _Optimizer,
    device_layers: Mapping[str, int],
    config: ZeroConfig,
    mesh: Mesh,
) -> TrainState:
    """Return the state's shapes and shardings, as if nothing were on disk."""
    arrays = _build_arrays(model, weights, optimizer, config, mesh)
    if any(device_layers.values()):
        arrays = _split_opt_state(arrays, weights.leaves, optimizer.opt_map, device_layers, mesh)
    if weights.frozen_leaves:
        frozen = _build_frozen_arrays(weights, config, mesh)
        arrays = dataclasses.replace(arrays, frozen=frozen)
    leaves_pending = config.delayed_update or config.update == "in_forward"
    if leaves_pending and isinstance(model, LayeredModel):
        pending = _build_pending(weights.leaves, optimizer.opt_map, config, mesh)
        arrays = dataclasses.replace(arrays, pending=pending)
    return arrays


def _build_arrays(
    model: Model | LayeredModel,
    weights: _Weights,
    optimizer: _Optimizer,
    config: ZeroConfig,
    mesh: Mesh,
) -> TrainState:
    """Return the state's shapes and shardings, without frozen weights and a pending update."""
    stage = STAGES[config.stage]
    precision = PRECISIONS[config.precision]
    replicated = named(mesh, ())

    def build_scalar(like: Any) -> Any:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=replicated)

    def build_weights(abstract: Params, sharded: bool, tier: str) -> Params:
        shardings = param_shardings(abstract, weights.specs, mesh, sharded, _array_tier(tier))
        return _with_shardings(abstract, shardings)

    opt_state = optimizer.opt_map.abstract
    opt_tier = _array_tier(config.opt_state)
    # Scalars of the optimizer state stay on the device in every tier, because the program computes
    # with them.
    opt_shardings = [
        named(mesh, stored_spec(spec, stage.opt_state), "device" if owner is None else opt_tier)
        for spec, owner in zip(optimizer.specs, optimizer.opt_map.owners, strict=True)
    ]
    opt_shardings = jax.tree.unflatten(jax.tree.structure(opt_state), opt_shardings)

    master = None
    if precision.has_master:
        master = build_weights(weights.abstract_master, stage.opt_state, config.opt_state)
    counter = build_scalar(jax.ShapeDtypeStruct((), jnp.int32))
    loss_scale = None
    if precision.scales_loss:
        scale = build_scalar(jax.ShapeDtypeStruct((), jnp.float32))
        loss_scale = LossScale(scale, counter, counter)
    model_state = jax.eval_shape(lambda key: init_state(model, key), _abstract_key())
    return TrainState(
        step=counter,
        skipped=counter,
        key=build_scalar(_abstract_key()),
        params=build_weights(weights.abstract_trained, stage.params, config.params),
        master=master,
        opt_state=_with_shardings(opt_state, opt_shardings),
        loss_scale=loss_scale,
        model_state=jax.tree.map(build_scalar, model_state),
    )


def _build_frozen_arrays(weights: _Weights, config: ZeroConfig, mesh: Mesh) -> Params:
    """Return the shapes and shardings of the frozen weights."""
    frozen = weights.abstract_frozen
    sharded = STAGES[config.stage].params
    tier = _array_tier(frozen_tier(config))
    return _with_shardings(frozen, param_shardings(frozen, weights.specs, mesh, sharded, tier))


def _with_shardings(abstract: Tree, shardings: Tree) -> Any:
    """Return a tree of ShapeDtypeStruct with shardings."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )


def _build_pending(
    leaves: Sequence[Leaf], opt_map: OptStateMap, config: ZeroConfig, mesh: Mesh
) -> Pending:
    """Return the shapes of an update that a step leaves to the next one, stacked leaves first."""

    def grad(leaf: Leaf) -> Any:
        spec = stored_spec(leaf.spec, STAGES[config.stage].opt_state)
        # The host reads gradients where the optimizer state is. An update in forward on the device
        # reads them where backward stores them.
        tier = config.opt_state
        if config.update_on == "device":
            tier = _array_tier(config.grads) if leaf.is_stacked else "device"
        dtype = stored_grad_dtype(leaf, config)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=named(mesh, spec, tier))

    def scalar(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, ()))

    stacked_first = sorted(leaves, key=lambda leaf: not leaf.is_stacked)  # sorted is stable
    shared = [opt_map.leaves[j] for j in opt_map.shared]
    return Pending(
        grads=[grad(leaf) for leaf in stacked_first],
        shared=[scalar(leaf.shape, leaf.dtype) for leaf in shared],
        scalars=scalar((4 if config.update == "in_forward" else 3,), jnp.float32),
        ready=scalar((), jnp.bool_),
    )


def _split_opt_state(
    state: TrainState,
    leaves: Sequence[Leaf],
    opt_map: OptStateMap,
    device_layers: Mapping[str, int],
    mesh: Mesh,
) -> TrainState:
    """Keep the optimizer state and masters of each stack's first layers on the device.

    `device_layers` has the number of these layers, by the name of the stack.
    """
    layers_by_leaf = [device_layers[leaf.stack] if leaf.is_stacked else 0 for leaf in leaves]
    layers_by_state_leaf = [
        0 if owner is None else layers_by_leaf[owner] for owner in opt_map.owners
    ]
    opt_state = _split_stacks(state.opt_state, layers_by_state_leaf, mesh)
    master = state.master
    if master is not None:
        master = _split_stacks(master, layers_by_leaf, mesh)
    return dataclasses.replace(state, opt_state=opt_state, master=master)


def _split_stacks(tree: Tree, device_layers: Sequence[int], mesh: Mesh) -> Any:
    """Return a tree of stacked leaves in host memory, with the first layers on the device.

    Args:
      tree: tree of ShapeDtypeStruct with shardings.
      device_layers: for each leaf, the number k of layers on the device; 0 for unstacked leaves.
      mesh: the device mesh.
    """

    def split(leaf: jax.ShapeDtypeStruct, on_device: int) -> Any:
        if not on_device:
            return leaf
        num_layers, *layer_shape = leaf.shape
        sharding = named(mesh, leaf.sharding.spec)
        # [L, ...] -> [k, ...] on the device, and [L - k, ...] in the leaf's tier.
        return Split(
            jax.ShapeDtypeStruct((on_device, *layer_shape), leaf.dtype, sharding=sharding),  # pyright: ignore[reportArgumentType]
            jax.ShapeDtypeStruct(
                (num_layers - on_device, *layer_shape), leaf.dtype, sharding=leaf.sharding
            ),  # pyright: ignore[reportArgumentType]
        )

    leaves, structure = jax.tree.flatten(tree)
    halves = [split(leaf, k) for leaf, k in zip(leaves, device_layers, strict=True)]
    return jax.tree.unflatten(structure, halves)


def _array_tier(tier: str) -> str:
    """Return the tier that a leaf's array would have if it were not on disk."""
    return "device" if tier == "nvme" else tier


def _put_on_disk(
    state: TrainState, is_shared: Any, num_stacked: int, config: ZeroConfig, mesh: Mesh
) -> TrainState:
    """Replace the leaves of the nvme tier by DiskArgument.

    Args:
      state: the state's shapes and shardings, as if nothing were on disk.
      is_shared: tree of bool like the optimizer state, true for the scalars that all of it shares;
        they stay arrays.
      num_stacked: number of stacked leaves, which come first in a pending update.
      config: config of the program.
      mesh: the device mesh.
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
    pending = state.pending
    if pending is not None and config.grads == "nvme":
        stacked = map(leaf_on_disk, pending.grads[:num_stacked])
        pending = dataclasses.replace(pending, grads=[*stacked, *pending.grads[num_stacked:]])
    return dataclasses.replace(
        state,
        params=weights(state.params, config.params),
        master=weights(state.master, config.opt_state),
        opt_state=opt_state,
        pending=pending,
        frozen=weights(state.frozen, frozen_tier(config)),
    )


# --- logs ----------------------------------------------------------------------------------------
def _report_replicated(replicated: tuple[Replicated, ...], mesh: Mesh) -> None:
    """Log the leaves that the ZeRO axis does not split, largest first."""
    if not replicated:
        return
    names = "; ".join(f"{r.name} ({r.num_bytes} B: {r.why})" for r in replicated[:8])
    more = f"; and {len(replicated) - 8} more" if len(replicated) > 8 else ""
    logger.warning(
        "%d leaves, %d float32 bytes, stay replicated over %s: %s%s",
        len(replicated),
        sum(r.num_bytes for r in replicated),
        " x ".join(f"{axis}={mesh.shape[axis]}" for axis in zero_axes(mesh)),
        names,
        more,
    )


def _report_widened(params: Params, config: ZeroConfig) -> None:
    """Log that parameters that the model creates in 16 bits are kept in float32."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    narrow = [(path, leaf.dtype.name) for path, leaf in leaves if leaf.dtype.itemsize < 4]
    if narrow:
        stored_as = "float32"
        if config.precision != "fp32":
            stored_as = f"{PRECISIONS[config.precision].compute_dtype} with float32 masters"
        first_path, first_dtype = narrow[0]
        logger.warning(
            "%d parameter leaves, such as %s, are made in %s, but kept in %s: precision=%r chooses "
            "the dtype, not the model's param_dtype. 16 bits only round the initial weights, so "
            "leave param_dtype float32",
            len(narrow),
            jax.tree_util.keystr(first_path),
            first_dtype,
            stored_as,
            config.precision,
        )
