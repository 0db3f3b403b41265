"""A rule for each leaf of a layer, applied to stacks of layers, and to one record.

Of a LayeredModel such a rule sees what optax would see on separate layers, [D, F] and not [L, D,
F], in every stage and tier. Where all layers are on the device they are updated together, and at
stages 1 to 3 the part that needs whole leaves is shared out over the devices that hold the shards,
layer by layer:

    x[L, D_fsdp, F] -> x[L_fsdp, D, F]      an all_to_all
    y[L_fsdp, D, F] = vmap(middle)(x)       each device the whole leaves of L / N layers
    y[L_fsdp, D, F] -> y[L, D_fsdp, F]      an all_to_all

An L that N does not divide is filled up with copies of layers, whose results are dropped: a device
  then works on ceil(L / N).
Of one layer on its own, as a streamed step has it, the value is gathered, and each device makes the
result and keeps its shard: what is streamed is one layer, so there is nothing to share out by
layers. Leaves that are no stack are left to XLA, which partitions products by itself.
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

from zerojax.config import reason
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
from zerojax.sharding import STAGES, Spec, axes_of, named
from zerojax.state import Layout, OwnedTransformation, init_opt_state_shape, map_opt_state

logger = logging.getLogger("zerojax")

Array = jax.Array
_SHOWN = 5
"""Leaves that an error lists."""
_REPAIR = (
    "decide by path (masks and labels of optax may be trees), or leave out what combines them: config.clip_norm does what "
    "optax.clip_by_global_norm does, num_microbatches what optax.MultiSteps does"
)


class LayerTransformation(OwnedTransformation):
    """An optimizer over stacks of layers that does to each layer what optax would do to it alone.

    Attributes:
      rule: the rule for each leaf.
    """

    rule: LeafRule


def layer_transformation(rule: LeafRule, move: Move | None = None) -> LayerTransformation:
    """Return a rule for each leaf as an optimizer of the whole tree."""
    there = Stay() if move is None else move

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        return rule.update_tree(
            updates, state, params, jnp.float32(0) if value is None else value, there
        )

    tx = LayerTransformation(rule.init_tree, update)
    tx.owners, tx.rule = rule.owners, rule
    tx.moved = tuple(rule.moved(i) for i in range(len(rule.stacked)))
    return tx


def by_layer(
    tx: optax.GradientTransformation,
    params: Any,
    on_stacks: tuple[Any, jex.ClosedJaxpr] | ValueError,
    stacked: Sequence[bool],
) -> optax.GradientTransformation:
    """Return an optimizer that treats a stack of layers as it would treat each layer, or `tx` where
    it does so itself.

    An elementwise optimizer that decides something from shapes becomes an
    `ElementwiseTransformation`, and one whose rule needs whole leaves of a layer a
    `LayerTransformation`. One that combines layers or leaves stays as it is.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      on_stacks: its abstract state over them and its traced update, of (grads, state, params,
        loss); or why it cannot be traced over them.
      stacked: for each parameter leaf whether it is a stack of layers.

    Raises:
      ValueError: it combines layers or leaves, and decides from shapes: it would treat stacks in
        another way than layers. Or it reads the shapes of several leaves at once. Or it works on
        one layer alone, and combines leaves.
    """
    is_elementwise = not isinstance(on_stacks, ValueError) and _is_elementwise(
        on_stacks[1], on_stacks[0], params
    )
    if is_elementwise and not any(stacked):
        return tx
    layer = one_layer(params, stacked)
    try:
        layer_state, traced = init_opt_state_shape(tx, layer)
    except ValueError:  # it takes stacks alone, or nothing
        return tx
    of_layer = without_branches(traced)
    found = Differences()
    if any(stacked) and not isinstance(on_stacks, ValueError):
        found = differences(
            _traced(tx, params, *on_stacks), _traced(tx, layer, layer_state, traced), stacked
        )
    rule = elementwise_rule(tx, params, stacked, layer_state, of_layer)
    if isinstance(rule, ElementwiseUpdate):
        _check_reads_one_leaf(found, params, stacked)
        return tx if is_elementwise and not found else elementwise_transformation(tx, rule)
    by_leaf = leaf_rule(tx, params, stacked, layer_state, of_layer)
    if not isinstance(by_leaf, str):
        _check_reads_one_leaf(found, params, stacked)
        return layer_transformation(by_leaf)
    if isinstance(on_stacks, ValueError):
        raise ValueError(
            "the optimizer works on one layer's leaves and not on stacks of layers [L, ...], and it cannot be applied layer by "
            f"layer, because it combines layers or leaves ({by_leaf}); {_REPAIR}. On stacks: {on_stacks}"
        ) from on_stacks
    _report_differences(found, params, stacked, by_leaf)
    return tx


def _traced(
    tx: optax.GradientTransformation, params: Any, state: Any, update: jex.ClosedJaxpr
) -> Traced:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    owners = tuple(
        owner_by_path(path, paths) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    )
    # A conditional over the whole tree would make every leaf differ where one does.
    return Traced(jax.make_jaxpr(tx.init)(params), without_branches(update), state, owners)


def _check_reads_one_leaf(found: Differences, params: Any, stacked: Sequence[bool]) -> None:
    """Raise ValueError for an optimizer that acts on each leaf by itself, and reads the shapes of
    others.

    A layer's tree shows it the sizes of one layer, and stacks show it those of all layers. A leaf
    that is no stack has one shape in both: what it is updated with differs only where other leaves'
    shapes enter.
    """
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    crossed = [
        jax.tree_util.keystr(paths[i][0])
        for i in (*found.rules, *found.constants)
        if not stacked[i]
    ]
    if not crossed and not found.shared:
        return
    shared = [f"the optimizer's state {path}" for path in found.shared]
    raise ValueError(
        "the optimizer reads the shapes of other leaves, such as the number of all parameters: over stacks of layers [L, ...] "
        f"and over the leaves of one layer it computes another value for {_listed([*crossed, *shared])}; compute the number "
        "before, and give it to the optimizer as a Python number"
    )


def _report_differences(
    found: Differences, params: Any, stacked: Sequence[bool], fault: str
) -> None:
    """Raise ValueError for an optimizer that would treat stacks in another way than layers; log
    other constants alone.
    """
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    has_rules = bool(found.rules or found.shared_rules)
    named = [
        f"{jax.tree_util.keystr(paths[i][0])} {paths[i][1].shape}, of a layer {paths[i][1].shape[1:]}"
        for i in (found.rules if has_rules else found.constants)
        if stacked[i]
    ]
    shared = found.shared_rules if has_rules else found.shared_constants
    named += [f"the optimizer's state {path}" for path in shared]
    if not named:
        return
    shown = _listed(named)
    if has_rules:
        raise ValueError(
            f"the optimizer decides from shapes, and it combines layers or leaves ({fault}), so it would see stacks of layers "
            f"[L, ...] and update them in another way than layers: {shown}; {_REPAIR}"
        )
    logger.warning(
        "the optimizer reads sizes, and it combines layers or leaves (%s), so it reads those of stacks of layers [L, ...]: %s. "
        "To let it read a layer's, %s",
        fault,
        shown,
        _REPAIR,
    )


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more


def _is_elementwise(update: jex.ClosedJaxpr, opt_state: Any, params: Any) -> bool:
    opt_map = map_opt_state(opt_state, params)
    if fault_of_update(update, opt_map, params) is None:
        return True
    divided = without_branches(update)
    return divided is not update and fault_of_update(divided, opt_map, params) is None


def shared_out(tx: optax.GradientTransformation, layout: Layout) -> optax.GradientTransformation:
    """Return an optimizer with its work on whole leaves shared out over the devices that hold their
    shards.
    """
    if not isinstance(tx, LayerTransformation) or not STAGES[layout.config.stage].opt_state:
        return tx
    return layer_transformation(tx.rule, _ByLayers(layout))


def why_not_by_leaf(
    tx: optax.GradientTransformation, params: Any, stacked: Sequence[bool]
) -> str | None:
    """Return why an optimizer cannot be applied to each leaf of a layer on its own, or None;
    arguments as `by_layer`.
    """
    layer = one_layer(params, stacked)
    try:
        layer_state, of_layer = init_opt_state_shape(tx, layer)
    except ValueError as error:
        return f"on one layer it fails: {error}"
    rule = leaf_rule(tx, params, stacked, layer_state, without_branches(of_layer))
    return rule if isinstance(rule, str) else None


def check_whole_leaves(layout: Layout) -> None:
    """Raise ValueError where a program that updates record by record never has a whole leaf of a
    layer on the device.
    """
    what = f"{reason(layout.config)} with an optimizer that combines elements of a leaf (Muon, Adafactor, LAMB, ..)"
    if layout.config.update_on == "host":
        raise ValueError(
            f"{what} and update_on='host': the host updates each device's shard where it rests, element by element; use "
            "update_on='device', or an elementwise optimizer such as optax.adamw"
        )
    if layout.groups:
        group = layout.groups[0]
        raise ValueError(
            f"{what}: {layout.leaves[group.leaves[0]].name} is moved tile by tile, {group.num_tiles} tiles a layer, and never "
            "whole; use gather_ahead=True, with which layers move whole, or an elementwise optimizer such as optax.adamw"
        )


class _ByLayers:
    """Values of stacks move to whole leaves of some layers on each device."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.mesh = layout, layout.mesh

    def whole(self, index: int, value: Array) -> Array:
        """x[L, D_fsdp, F] -> x[L_fsdp, D, F], filled up to a multiple of the devices."""
        spec, leaf = self._spec(index), self.layout.leaves[index]
        if not leaf.is_stacked or not any(spec):
            return value
        axes = _axes(spec)
        layers, devices = value.shape[0], math.prod(self.mesh.shape[a] for a in axes)
        rows = -(-layers // devices) * devices
        # Copies and not zeros, of which a rule might make NaN.
        copies = [value] * (rows // layers) + ([value[: rows % layers]] if rows % layers else [])
        value = jnp.concatenate(copies) if rows > layers else value
        at = _spec_like(spec[1:], leaf.record_shape, value.shape[1:])
        return _turned(
            value, self.mesh, _path((None, *at), axes) if at else [_front(axes, value.ndim)]
        )

    def shard(self, index: int, value: Array, like: Any) -> Array:
        """y[L_fsdp, D, F] -> y[L, D_fsdp, F], without what it was filled up with."""
        spec, leaf = self._spec(index), self.layout.leaves[index]
        if not leaf.is_stacked or not any(spec):
            return value
        axes, at = _axes(spec), _spec_like(spec[1:], leaf.record_shape, value.shape[1:])
        value = _turned(
            value, self.mesh, _path((None, *at), axes)[::-1] if at else [(None,) * value.ndim]
        )
        return value[: like.shape[0]]

    def _spec(self, index: int) -> Spec:
        return self.layout.leaves[index].spec.sharded


class Gathered:
    """Values of one layer, or of a leaf that is no stack, are gathered, and cut into shards again."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.mesh = layout, layout.mesh

    def whole(self, index: int, value: Array) -> Array:
        """x[D_fsdp, F] -> x[D, F]."""
        spec, leaf = self._spec(index), self.layout.leaves[index]
        if not any(spec):
            return value
        at = _spec_like(spec, leaf.record_shape, value.shape)
        # Both ends are stated: else XLA might gather what the value is made of, which is more.
        return _turned(value, self.mesh, [*([at] if at else []), (None,) * value.ndim])

    def shard(self, index: int, value: Array, like: Any) -> Array:
        """y[D, F] -> y[D_fsdp, F]."""
        del like
        spec, leaf = self._spec(index), self.layout.leaves[index]
        at = _spec_like(spec, leaf.record_shape, value.shape) if any(spec) else None
        return _turned(value, self.mesh, [(None,) * value.ndim, *([at] if at else [])])

    def _spec(self, index: int) -> Spec:
        leaf = self.layout.leaves[index]
        spec = leaf.spec.sharded if STAGES[self.layout.config.stage].opt_state else leaf.spec.base
        return spec[leaf.lead :]


def _axes(spec: Spec) -> list[str]:
    """Return the mesh axes of a spec, in order."""
    return [axis for entry in spec for axis in axes_of(entry)]


def _spec_like(spec: Spec, shape: Sequence[int], value: Sequence[int]) -> Spec | None:
    """Return the spec of a value that has a leaf's elements in the leaf's order, but for dims of 1;
    None of any other.

    Args:
      spec: of the leaf.
      shape: of the leaf.
      value: shape of the value.
    """
    entries = [entry for entry, n in zip(spec, shape, strict=True) if n != 1]
    places = [d for d, n in enumerate(value) if n != 1]
    if [value[d] for d in places] != [n for n in shape if n != 1]:
        return None
    at: list[Any] = [None] * len(value)
    for d, entry in zip(places, entries, strict=True):
        at[d] = entry
    return tuple(at)


def _front(axes: Sequence[str], ndim: int) -> Spec:
    return (tuple(axes) if len(axes) > 1 else axes[0], *(None,) * (ndim - 1))


def _path(spec: Spec, axes: Sequence[str]) -> list[Spec]:
    """Return specs from a stack's shards to its first dim split by all of `axes`, one mesh axis
    moved at a time.

    XLA turns the move of one axis into an all_to_all. Several at once it may not, and gather the
    stack.
    """
    path, here = [spec], list(spec)
    moved: list[str] = []
    # The last axis of a dim first: what is left of it is still a split of that dim.
    for axis in reversed(axes):
        moved = [*moved, axis]
        for d, entry in enumerate(here[1:], 1):
            rest = tuple(a for a in axes_of(entry) if a != axis)
            here[d] = rest[0] if len(rest) == 1 else (rest or None)
        here[0] = tuple(moved) if len(moved) > 1 else moved[0]
        path.append(tuple(here))
    return path


def _turned(value: Array, mesh: Mesh, path: Sequence[Spec]) -> Array:
    """Move a value from shards to shards."""
    for spec in path:
        value = jax.lax.with_sharding_constraint(value, named(mesh, spec))
    return value
