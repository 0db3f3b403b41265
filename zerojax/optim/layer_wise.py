"""Apply a rule for each leaf of a layer to stacks of layers, and to one record.

In a LayeredModel the rule sees what optax would see on separate layers, [D, F] and not [L, D, F],
in every stage and tier. If all layers are on the device, they are updated together. At stages 1 to
3 the part that needs full leaves is then divided, layer by layer, among the devices that hold the
shards:

    x[L, D_fsdp, F] -> x[L_fsdp, D, F]      an all_to_all
    y[L_fsdp, D, F] = vmap(middle)(x)       each device has the full leaves of L / N layers
    y[L_fsdp, D, F] -> y[L, D_fsdp, F]      an all_to_all

If N does not divide L, the stack is padded with copies of layers, whose results are dropped: a
device then works on ceil(L / N) layers.

In a streamed step only one layer is on the device, so there are no layers to divide: the value is
gathered, and each device computes the result and keeps its own shard. Unstacked leaves are left to
XLA, which partitions their products itself.

In a pipeline a record holds one layer of every stage. The devices of a stage work on its layers
alone, and nothing is sent over `pipe`:

    x[L / p, p_pipe, D_fsdp, F] -> x[(L / p)_fsdp, p_pipe, D, F]      an all_to_all in each stage
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.config import piecewise_update_setting
from zerojax.optim.decisions import Differences, Traced, differences
from zerojax.optim.elementwise import (
    ElementwiseUpdate,
    elementwise_rule,
    elementwise_transformation,
    fault_of_update,
)
from zerojax.optim.leaf_rule import (
    LeafRule,
    Move,
    Stay,
    leaf_rule,
    one_layer,
    owner_by_path,
    without_branches,
)
from zerojax.sharding import STAGES, Spec, named, pad_spec, parse_axes
from zerojax.state import Layout, OwnedTransformation, init_opt_state_shape, map_opt_state
from zerojax.trees import Grads, OptState, Params

logger = logging.getLogger("zerojax")

Array = jax.Array
_SHOWN = 5
"""Number of leaves that an error lists."""
_REPAIR = (
    "decide by path (masks and labels of optax may be trees), or remove what combines them: "
    "replace optax.clip_by_global_norm by clip_norm= and optax.MultiSteps by num_microbatches="
)


class LayerTransformation(OwnedTransformation):
    """An optimizer over stacks that treats each layer as optax would treat it alone.

    Attributes:
      rule: the rule for each leaf.
    """

    rule: LeafRule


def layer_transformation(rule: LeafRule, move: Move | None = None) -> LayerTransformation:
    """Return a rule for each leaf as an optimizer of the full tree.

    Args:
      rule: the rule for each leaf of a layer.
      move: how values reach the devices that hold full leaves; None leaves them where they are.
    """
    if move is None:
        move = Stay()

    def update(
        updates: Grads, state: OptState, params: Params = None, *, value: Any = None, **_: Any
    ) -> tuple[Grads, OptState]:
        loss = jnp.float32(0) if value is None else value
        return rule.update_tree(updates, state, params, loss, move)

    tx = LayerTransformation(rule.init_tree, update)
    tx.owners = rule.owners
    tx.rule = rule
    tx.moved = tuple(rule.moved(i) for i in range(len(rule.stacked)))
    return tx


def by_layer(
    tx: optax.GradientTransformation,
    params: Params,
    on_stacks: tuple[Any, jex.ClosedJaxpr] | ValueError,
    stacked: Sequence[int],
) -> optax.GradientTransformation:
    """Return an optimizer that treats a stack as it would treat each layer alone.

    An elementwise optimizer that makes decisions from shapes becomes an
    `ElementwiseTransformation`, and an optimizer whose rule needs full leaves of a layer becomes a
    `LayerTransformation`. An optimizer that combines layers or leaves, or that already treats
    stacks in this way, is returned unchanged.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      on_stacks: the optimizer's abstract state over `params` and its traced update, a function of
        (grads, state, params, loss); or the error raised by tracing it over them.
      stacked: for each parameter leaf, the number of leading dims that count layers.

    Raises:
      ValueError: the optimizer combines layers or leaves and also makes decisions from shapes, so
        that it would treat stacks differently than layers; or it reads the shapes of several leaves
        at the same time; or it works only on single layers, and combines leaves.
    """
    is_elementwise = False
    if not isinstance(on_stacks, ValueError):
        opt_state, update = on_stacks
        is_elementwise = _is_elementwise(update, opt_state, params)
    if is_elementwise and not any(stacked):
        return tx
    layer = one_layer(params, stacked)
    try:
        layer_state, traced = init_opt_state_shape(tx, layer)
    except ValueError:  # it works only on stacks, or not at all
        return tx
    layer_update = without_branches(traced)
    diffs = Differences()
    if any(stacked) and not isinstance(on_stacks, ValueError):
        over_stacks = _traced(tx, params, *on_stacks)
        over_layer = _traced(tx, layer, layer_state, traced)
        diffs = differences(over_stacks, over_layer, stacked)
    rule = elementwise_rule(tx, params, stacked, layer_state, layer_update)
    if isinstance(rule, ElementwiseUpdate):
        _check_reads_one_leaf(diffs, params, stacked)
        return tx if is_elementwise and not diffs else elementwise_transformation(tx, rule)
    by_leaf = leaf_rule(tx, params, stacked, layer_state, layer_update)
    if not isinstance(by_leaf, str):
        _check_reads_one_leaf(diffs, params, stacked)
        return layer_transformation(by_leaf)
    if isinstance(on_stacks, ValueError):
        raise ValueError(
            "the optimizer works on one layer's leaves but not on stacks of layers [L, ...], and "
            "it cannot be applied layer by layer because it combines layers or leaves "
            f"({by_leaf}); {_REPAIR}. On stacks: {on_stacks}"
        ) from on_stacks
    _report_differences(diffs, params, stacked, by_leaf)
    return tx


def _traced(
    tx: optax.GradientTransformation, params: Params, state: OptState, update: jex.ClosedJaxpr
) -> Traced:
    """Return an optimizer traced over `params`, from its state and traced update over them."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    state_paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    owners = tuple(owner_by_path(path, paths) for path in state_paths)
    # With a conditional over the full tree, every leaf would differ if one does.
    return Traced(jax.make_jaxpr(tx.init)(params), without_branches(update), state, owners)


def _check_reads_one_leaf(diffs: Differences, params: Params, stacked: Sequence[int]) -> None:
    """Raise ValueError if an optimizer of single leaves reads the shapes of other leaves.

    One layer's tree shows it the sizes of one layer, and stacks show it the sizes of all layers. An
    unstacked leaf has the same shape in both, so its update differs only if the shapes of other
    leaves enter.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    names = []
    for i in (*diffs.rules, *diffs.constants):
        if not stacked[i]:
            names.append(jax.tree_util.keystr(leaves[i][0]))
    names += [f"the optimizer's state {path}" for path in diffs.shared]
    if not names:
        return
    raise ValueError(
        "the optimizer reads the shapes of other leaves, such as the number of all parameters: it "
        "computes different values over stacks of layers [L, ...] and over one layer for "
        f"{_listed(names)}; compute the number beforehand and pass it to the "
        "optimizer as a Python number"
    )


def _report_differences(
    diffs: Differences, params: Params, stacked: Sequence[int], fault: str
) -> None:
    """Raise ValueError for an optimizer that would treat stacks differently than layers.

    If only constants differ, log a warning instead.
    """
    has_rules = bool(diffs.rules or diffs.shared_rules)
    leaf_ids = diffs.rules if has_rules else diffs.constants
    shared = diffs.shared_rules if has_rules else diffs.shared_constants
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    names = []
    for i in leaf_ids:
        path, leaf = leaves[i]
        if stacked[i]:
            name = jax.tree_util.keystr(path)
            names.append(f"{name} {leaf.shape}, one layer {leaf.shape[stacked[i] :]}")
    names += [f"the optimizer's state {path}" for path in shared]
    if not names:
        return
    shown = _listed(names)
    if has_rules:
        raise ValueError(
            f"the optimizer decides from shapes and combines layers or leaves ({fault}), so it "
            "would see stacks of layers [L, ...] and update them differently than single layers: "
            f"{shown}; {_REPAIR}"
        )
    logger.warning(
        "the optimizer reads sizes and combines layers or leaves (%s), so it reads the sizes of "
        "stacks of layers [L, ...]: %s. To let it read the sizes of one layer, %s",
        fault,
        shown,
        _REPAIR,
    )


def _listed(names: Sequence[str]) -> str:
    """Return names as text: the first few, and the number of the others."""
    more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more


def _is_elementwise(update: jex.ClosedJaxpr, opt_state: OptState, params: Params) -> bool:
    """Return whether an update is elementwise, if necessary after its branches are removed."""
    opt_map = map_opt_state(opt_state, params)
    if fault_of_update(update, opt_map, params) is None:
        return True
    divided = without_branches(update)
    return divided is not update and fault_of_update(divided, opt_map, params) is None


def shared_out(tx: optax.GradientTransformation, layout: Layout) -> optax.GradientTransformation:
    """Return an optimizer whose work on full leaves is divided among the devices with their shards.

    Args:
      tx: the optimizer; unchanged unless it is a `LayerTransformation` with sharded state.
      layout: layout of the program's state.
    """
    if not isinstance(tx, LayerTransformation) or not STAGES[layout.config.stage].opt_state:
        return tx
    return layer_transformation(tx.rule, _ByLayers(layout))


def why_not_by_leaf(
    tx: optax.GradientTransformation, params: Params, stacked: Sequence[int]
) -> str | None:
    """Return why an optimizer cannot be applied to each leaf of a layer on its own, or None.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      stacked: for each parameter leaf, the number of leading dims that count layers.
    """
    layer = one_layer(params, stacked)
    try:
        layer_state, layer_update = init_opt_state_shape(tx, layer)
    except ValueError as error:
        return f"it fails on one layer: {error}"
    rule = leaf_rule(tx, params, stacked, layer_state, without_branches(layer_update))
    return rule if isinstance(rule, str) else None


def check_whole_leaves(layout: Layout) -> None:
    """Check that a program with a record-by-record update gathers full leaves of a layer.

    Args:
      layout: layout of the program's state.

    Raises:
      ValueError: the host runs the update, or layers move tile by tile, so that the device never
        holds a full leaf of a layer.
    """
    subject = (
        f"{piecewise_update_setting(layout.config)} with an optimizer that combines elements of "
        "a leaf (Muon, Adafactor, LAMB)"
    )
    if layout.config.update_on == "host":
        raise ValueError(
            f"{subject} and update_on='host': the host updates each device's shard in place, "
            "element by element; use update_on='device', or an elementwise optimizer such as "
            "optax.adamw"
        )
    if layout.groups:
        group = layout.groups[0]
        raise ValueError(
            f"{subject}: {layout.leaves[group.leaves[0]].name} is moved tile by tile, "
            f"{group.num_tiles} tiles a layer, and is never gathered in full; use "
            "gather_ahead=True, which moves full layers, or an elementwise optimizer such as "
            "optax.adamw"
        )


class _ByLayers:
    """Moves values of stacks so that each device holds full leaves of some layers."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.mesh = layout.mesh

    def whole(self, index: int, value: Array) -> Array:
        """Return x[L, D_fsdp, F] as x[L_fsdp, D, F], with L padded to a multiple of the devices."""
        axes = self._layer_axes(index)
        if not axes:
            return value
        num_layers = value.shape[0]
        num_devices = math.prod(self.mesh.shape[axis] for axis in axes)
        num_rows = -(-num_layers // num_devices) * num_devices
        if num_rows > num_layers:
            # Padded with copies and not with zeros, for which a rule might compute NaN.
            copies = [value] * (num_rows // num_layers)
            if num_rows % num_layers:
                copies.append(value[: num_rows % num_layers])
            value = jnp.concatenate(copies)
        stages, layer_spec = self._value_specs(index, value.shape)
        if layer_spec:
            path = _path((None, *stages, *layer_spec), axes)
        else:
            path = [pad_spec((_spec_entry(axes), *stages), value.ndim)]
        return _reshard(value, self.mesh, path)

    def shard(self, index: int, value: Array, like: Any) -> Array:
        """Return y[L_fsdp, D, F] as y[L, D_fsdp, F], without the padding."""
        axes = self._layer_axes(index)
        if not axes:
            return value
        stages, layer_spec = self._value_specs(index, value.shape)
        if layer_spec:
            path = _path((None, *stages, *layer_spec), axes)[::-1]
        else:
            path = [pad_spec((None, *stages), value.ndim)]
        return _reshard(value, self.mesh, path)[: like.shape[0]]

    def _layer_axes(self, index: int) -> list[str]:
        """Return the mesh axes that split the layers of a stack; none for an unstacked leaf."""
        leaf = self.layout.leaves[index]
        return _axes(leaf.spec.sharded[leaf.layer_dims :]) if leaf.is_stacked else []

    def _value_specs(self, index: int, shape: Sequence[int]) -> tuple[Spec, Spec | None]:
        """Return the spec of a stack's dim of stages, if any, and of one layer of a value."""
        leaf = self.layout.leaves[index]
        dims = leaf.layer_dims
        spec = leaf.spec.sharded
        return spec[1:dims], _spec_like(spec[dims:], leaf.layer_shape, shape[dims:])


class Gathered:
    """Gathers values of one layer, or of an unstacked leaf, and shards them again."""

    def __init__(self, layout: Layout) -> None:
        """Use the shardings of `layout`."""
        self.layout = layout
        self.mesh = layout.mesh

    def whole(self, index: int, value: Array) -> Array:
        """Return x[D_fsdp, F] of parameter leaf `index` as x[D, F]."""
        stages, spec = self._specs(index)
        if not any(spec):
            return value
        gathered = pad_spec(stages, value.ndim)
        shards = self._shards(index, value)
        # Both ends are constrained: otherwise XLA might gather the inputs of the value, which are
        # larger.
        return _reshard(value, self.mesh, [shards, gathered] if shards else [gathered])

    def shard(self, index: int, value: Array, like: Any) -> Array:
        """Return y[D, F] of parameter leaf `index` as y[D_fsdp, F]."""
        del like
        stages, spec = self._specs(index)
        gathered = pad_spec(stages, value.ndim)
        shards = self._shards(index, value) if any(spec) else None
        return _reshard(value, self.mesh, [gathered, shards] if shards else [gathered])

    def _specs(self, index: int) -> tuple[Spec, Spec]:
        """Return the spec of a record's dim of stages, if any, and of one layer."""
        leaf = self.layout.leaves[index]
        spec = leaf.spec.sharded if STAGES[self.layout.config.stage].opt_state else leaf.spec.base
        return spec[leaf.lead : leaf.layer_dims], spec[leaf.layer_dims :]

    def _shards(self, index: int, value: Array) -> Spec | None:
        """Return the spec of a value that has the elements of a leaf in their order, or None."""
        stages, spec = self._specs(index)
        layer_spec = _spec_like(
            spec, self.layout.leaves[index].layer_shape, value.shape[len(stages) :]
        )
        return (*stages, *layer_spec) if layer_spec else None


def _axes(spec: Spec) -> list[str]:
    """Return the mesh axes of a spec, in order."""
    axes: list[str] = []
    for entry in spec:
        axes += parse_axes(entry)
    return axes


def _spec_like(spec: Spec, shape: Sequence[int], value_shape: Sequence[int]) -> Spec | None:
    """Return the spec of a value whose elements are a leaf's elements in the leaf's order, or None.

    The value's shape may differ from the leaf's shape only in dims of size 1.

    Args:
      spec: spec of the leaf.
      shape: shape of the leaf.
      value_shape: shape of the value.
    """
    if [n for n in value_shape if n != 1] != [n for n in shape if n != 1]:
        return None
    entries = iter([entry for entry, n in zip(spec, shape, strict=True) if n != 1])
    return tuple(None if n == 1 else next(entries) for n in value_shape)


def _path(spec: Spec, axes: Sequence[str]) -> list[Spec]:
    """Return specs that lead from a stack's shards to dim 0 split by all of `axes`.

    Each spec moves one mesh axis, which XLA turns into an all_to_all. If several axes moved at the
    same time, XLA might gather the stack instead.
    """
    path = [spec]
    # The last axis of a dim moves first, so that the remaining axes still split that dim.
    moved: list[str] = []
    for axis in reversed(axes):
        moved.append(axis)
        dims = [
            _spec_entry([name for name in parse_axes(entry) if name not in moved])
            for entry in spec[1:]
        ]
        path.append((_spec_entry(moved), *dims))
    return path


def _spec_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return the mesh axes that split a dim as an entry of a spec."""
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else tuple(axes)


def _reshard(value: Array, mesh: Mesh, path: Sequence[Spec]) -> Array:
    """Move a value through a sequence of shardings."""
    for spec in path:
        value = jax.lax.with_sharding_constraint(value, named(mesh, spec))
    return value
