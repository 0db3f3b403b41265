"""Where every byte of a program's state is: the stage table applied to a parameter tree.

A `Layout` is made once, from abstract shapes, before anything is allocated.
"""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig, uses_disk
from zerojax.models import BLOCKS, LayeredModel, Model, check_floating, init_params, layered_specs
from zerojax.precision import PRECISIONS, LossScale
from zerojax.sharding import FSDP, STAGES, LeafSpec, Replicated, named, param_specs, replicated_leaves, stored_spec
from zerojax.state.disk_layout import DiskLayout
from zerojax.state.opt_state import init_opt_state_shape, opt_state_specs, owners
from zerojax.state.tile_groups import TileGroup, tile_groups, tiled_leaves
from zerojax.state.train_state import OnDisk, Pending, Split, TrainState, is_stored

logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes, specs and shardings of a program's state.

    Attributes:
      mesh: the device mesh.
      config: as given.
      specs: LeafSpec of each parameter, by path.
      abstract_params: the parameter tree in float32 shapes.
      abstract_arrays: TrainState of ShapeDtypeStruct with shardings, as if nothing were on disk.
      abstract_state: the same, as a program takes it: leaves of the nvme tier are OnDisk.
      shardings: TrainState of NamedSharding.
      replicated: leaves that the ZeRO axis does not split.
      num_layers: of a LayeredModel, else None.
      device_layers: layers of a LayeredModel whose optimizer state stays on the device while `opt_state` is off it.
      disk: the records of the nvme tier, where there is one.
      tiles: of a streamed step, the groups of leaves whose records are tiles.
    """

    mesh: Mesh
    config: ZeroConfig
    specs: dict[str, LeafSpec]
    abstract_params: Any
    abstract_arrays: TrainState
    abstract_state: TrainState
    shardings: TrainState
    replicated: tuple[Replicated, ...]
    num_layers: int | None = None
    device_layers: int = 0
    disk: DiskLayout | None = None
    tiles: tuple[TileGroup, ...] = ()

    def lead(self, index: int) -> int:
        """Return how many leading dims of a stacked parameter leaf count its records: 2 for tiles, else 1."""
        return 2 if any(index in group.leaves for group in self.tiles) else 1

    @property
    def order(self) -> jax.Array:
        """Indices 0, 1, .. of as many layers, and tiles of a layer, as there are: i32[n], to be an argument of programs."""
        return jnp.arange(max(self.num_layers or 0, *(group.num_tiles for group in self.tiles), 0))

    def param_shardings(self, sharded: bool) -> Any:
        """Return the parameters' shardings on the device, split over the ZeRO axis or not."""
        return _param_shardings(self.abstract_params, self.specs, self.mesh, sharded, "device")


def _param_shardings(params: Any, specs: dict[str, LeafSpec], mesh: Mesh, sharded: bool, tier: str) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: named(mesh, stored_spec(specs[jax.tree_util.keystr(path)], sharded), tier), params
    )


def _split(tree: Any, is_stacked: Any, layers: int, num_layers: int, mesh: Mesh) -> Any:
    """Return a tree of stacked leaves in host memory with their first `layers` layers on the device.

    Args:
      tree: of ShapeDtypeStruct with shardings.
      is_stacked: tree of bool of its structure.
      layers: k.
      num_layers: L.
      mesh: the device mesh.
    """

    def split(leaf: jax.ShapeDtypeStruct, stacked: bool) -> Any:
        if not stacked:
            return leaf
        rest = leaf.shape[1:]
        on_device = named(mesh, leaf.sharding.spec)
        return Split(
            jax.ShapeDtypeStruct((layers, *rest), leaf.dtype, sharding=on_device),  # pyright: ignore[reportArgumentType]
            jax.ShapeDtypeStruct((num_layers - layers, *rest), leaf.dtype, sharding=leaf.sharding),  # pyright: ignore[reportArgumentType]
        )

    return jax.tree.map(split, tree, is_stacked)


def build_layout(model: Model | LayeredModel, tx: optax.GradientTransformation, config: ZeroConfig, mesh: Mesh) -> Layout:
    """Choose specs and shardings for the whole state, from shapes alone.

    Raises:
      ValueError: parameters that are not floating, specs that do not fit, an optimizer that cannot run sharded.
    """
    stage, precision = STAGES[config.stage], PRECISIONS[config.precision]
    abstract_key = jax.eval_shape(lambda: jax.random.key(0))
    made = jax.eval_shape(lambda key: init_params(model, key), abstract_key)
    check_floating(made)
    given = model.specs if isinstance(model, Model) else layered_specs(model)
    specs = param_specs(made, given, mesh, FSDP, first_dims=_first_dims(model, made), min_shard_bytes=config.min_shard_bytes)

    master = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), made)
    compute = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(precision.compute_dtype)), made)
    opt_state = init_opt_state_shape(tx, master)
    opt_specs = opt_state_specs(opt_state, master, specs, mesh, FSDP, config.min_shard_bytes)
    scalar = named(mesh, ())
    tree = jax.tree.structure(opt_state)
    is_shared = jax.tree.unflatten(tree, [owner is None for owner in owners(opt_state, master)])  # scalars of the program

    def state_of(scalar: Any, key: Any, params: Any, master: Any, opt_state: Any, counter: Any) -> TrainState:
        return TrainState(
            step=counter,
            skipped=counter,
            key=key,
            params=params,
            master=master if precision.has_master else None,
            opt_state=opt_state,
            loss_scale=LossScale(scalar, counter, counter) if precision.scales_loss else None,
        )

    shardings = state_of(
        scalar,
        scalar,
        _param_shardings(made, specs, mesh, stage.params, _array_tier(config.params)),
        _param_shardings(made, specs, mesh, stage.opt_state, _array_tier(config.opt_state)),
        jax.tree.map(
            lambda s, shared: named(
                mesh, stored_spec(s, stage.opt_state), "device" if shared else _array_tier(config.opt_state)
            ),
            opt_specs, is_shared, is_leaf=lambda s: isinstance(s, LeafSpec),
        ),
        scalar,
    )  # fmt: skip
    f32, i32 = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    shapes = state_of(f32, abstract_key, compute, master, opt_state, i32)
    abstract_state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    device_layers = int(config.opt_state_device_fraction * model.num_layers) if isinstance(model, LayeredModel) else 0
    if device_layers:
        abstract_state = _split_opt_state(abstract_state, made, device_layers, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, abstract_state)
    replicated = tuple(replicated_leaves(made, specs)) if stage.opt_state else ()
    _report(replicated, mesh)
    num_layers = model.num_layers if isinstance(model, LayeredModel) else None
    if config.delayed_update and num_layers is not None:
        pending = _pending(master, opt_state, specs, config, mesh)
        abstract_state = dataclasses.replace(abstract_state, pending=pending)
        shardings = jax.tree.map(lambda a: a.sharding, abstract_state)
    arrays, disk = abstract_state, None
    if uses_disk(config):
        disk = DiskLayout(config, mesh)
        abstract_state = _on_disk(abstract_state, is_shared, config, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, abstract_state)
    tiles = tile_groups(model, made, config)
    return Layout(
        mesh, config, specs, master, arrays, abstract_state, shardings, replicated, num_layers, device_layers, disk, tiles
    )


def _first_dims(model: Model | LayeredModel, params: Any) -> dict[str, int]:
    """Return by path the dims that come before those that may be split: that of layers, and that of tiles."""
    if not isinstance(model, LayeredModel):
        return {}
    paths = jax.tree_util.tree_flatten_with_path(params[BLOCKS])[0]
    root = jax.tree_util.DictKey(BLOCKS)
    return {
        jax.tree_util.keystr((root, *path)): 1 + bool(tiled)
        for (path, _), tiled in zip(paths, tiled_leaves(model, params), strict=True)
    }


def _array_tier(tier: str) -> str:
    """Return the tier of the arrays that a leaf would be if it were not on disk."""
    return "device" if tier == "nvme" else tier


def _on_disk(state: TrainState, is_shared: Any, config: ZeroConfig, mesh: Mesh) -> TrainState:
    """Put OnDisk in place of the leaves of the nvme tier; scalars that the whole optimizer state shares are none."""
    token: Any = jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=named(mesh, (mesh.axis_names,)))

    def placed(leaf: Any, shared: bool = False) -> Any:
        if isinstance(leaf, Split):
            return Split(leaf.device, placed(leaf.host))
        return leaf if shared else OnDisk(token, leaf.shape, leaf.dtype)

    def weights(tree: Any, tier: str) -> Any:
        return jax.tree.map(placed, tree, is_leaf=is_stored) if tier == "nvme" else tree

    opt_state = state.opt_state
    if config.opt_state == "nvme":
        opt_state = jax.tree.map(placed, opt_state, is_shared, is_leaf=is_stored)
    return dataclasses.replace(
        state, params=weights(state.params, config.params), master=weights(state.master, config.opt_state), opt_state=opt_state
    )


def _pending(params: Any, opt_state: Any, specs: dict[str, LeafSpec], config: ZeroConfig, mesh: Mesh) -> Pending:
    """Return the shapes of a delayed update, the stacked layers' leaves before the others."""
    dtype = jnp.dtype(PRECISIONS[config.precision].compute_dtype if config.num_microbatches == 1 else "float32")
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    leaves.sort(key=lambda entry: entry[0][0] != jax.tree_util.DictKey(BLOCKS))  # stable

    def grad(path: tuple[Any, ...], leaf: Any) -> Any:
        spec = stored_spec(specs[jax.tree_util.keystr(path)], STAGES[config.stage].opt_state)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=named(mesh, spec, config.opt_state))

    def scalar(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named(mesh, ()))

    mirrors = zip(jax.tree.leaves(opt_state), owners(opt_state, params), strict=True)
    return Pending(
        grads=[grad(path, leaf) for path, leaf in leaves],
        shared=[scalar(leaf) for leaf, owner in mirrors if owner is None],
        scalars=scalar(jax.ShapeDtypeStruct((3,), jnp.float32)),  # pyright: ignore[reportArgumentType]
        ready=scalar(jax.ShapeDtypeStruct((), jnp.bool_)),  # pyright: ignore[reportArgumentType]
    )


def _split_opt_state(state: TrainState, params: Any, layers: int, mesh: Mesh) -> TrainState:
    """Keep the optimizer state and masters of the first `layers` layers on the device."""
    num_layers = jax.tree.leaves(params[BLOCKS])[0].shape[0]
    blocks = [path[0] == jax.tree_util.DictKey(BLOCKS) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    owned = [owner is not None and blocks[owner] for owner in owners(state.opt_state, params)]
    opt_state = _split(
        state.opt_state, jax.tree.unflatten(jax.tree.structure(state.opt_state), owned), layers, num_layers, mesh
    )
    master = state.master
    if master is not None:
        master = _split(master, jax.tree.unflatten(jax.tree.structure(params), blocks), layers, num_layers, mesh)
    return dataclasses.replace(state, opt_state=opt_state, master=master)


def _report(replicated: tuple[Replicated, ...], mesh: Mesh) -> None:
    if replicated:
        total = sum(r.num_bytes for r in replicated)
        names = "; ".join(f"{r.name} ({r.num_bytes} B: {r.why})" for r in replicated[:8])
        more = f"; and {len(replicated) - 8} more" if len(replicated) > 8 else ""
        logger.warning(
            "%d leaves, %d float32 bytes, stay replicated over %s=%d: %s%s",
            len(replicated), total, FSDP, mesh.shape[FSDP], names, more,
        )  # fmt: skip


def unit_bytes(model: Model | LayeredModel, layout: Layout) -> tuple[list[int], int]:
    """Return the gathered bytes of each parameter leaf, and the most that may count as one layer.

    A stacked leaf of a LayeredModel counts as one layer's, and a layer is a block. A Model's layers are not known: half of
    the model is the most that may.
    """
    itemsize = jnp.dtype(PRECISIONS[layout.config.precision].compute_dtype).itemsize
    leaves, block = [], 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]:
        num_bytes = leaf.size * itemsize
        if isinstance(model, LayeredModel) and path[0] == jax.tree_util.DictKey(BLOCKS):
            num_bytes //= model.num_layers
            block += num_bytes
        leaves.append(num_bytes)
    return leaves, max(block or sum(leaves) // 2, max(leaves))
