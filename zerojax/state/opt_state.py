"""The shape of optax's state: which of its leaves mirror a parameter, and how they are sharded."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.sharding import LeafSpec, leaf_spec
from zerojax.state.leaves import Leaf
from zerojax.trees import Grads, OptState, Params, Tree


@dataclasses.dataclass(frozen=True, eq=False)
class OptStateMap:
    """The parameter leaf that owns each leaf of an optimizer's state.

    Attributes:
      abstract: the abstract optimizer state.
      owners: for each state leaf, the index of the parameter leaf that it mirrors (or, in an
        `OwnedTransformation`, belongs to); None if all parameters share it.
    """

    abstract: OptState
    owners: tuple[int | None, ...]

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """The leaves of the abstract state."""
        return jax.tree.leaves(self.abstract)

    @functools.cached_property
    def names(self) -> list[str]:
        """The paths of the state leaves, as strings."""
        leaves = jax.tree_util.tree_flatten_with_path(self.abstract)[0]
        return [jax.tree_util.keystr(path) for path, _ in leaves]

    @functools.cached_property
    def shared(self) -> tuple[int, ...]:
        """Indices of the state leaves that belong to no parameter.

        In an elementwise optimizer they are scalars that all parameters share.
        """
        return tuple(j for j, owner in enumerate(self.owners) if owner is None)

    def list_state_leaves(self, leaf_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the state leaves that belong to some parameter leaves, in order."""
        params = set(leaf_ids)
        return tuple(j for j, owner in enumerate(self.owners) if owner in params)

    def owner(self, index: int) -> int:
        """Return the index of the parameter leaf that a state leaf belongs to."""
        owner = self.owners[index]
        assert owner is not None
        return owner


def map_opt_state(abstract_opt_state: OptState, abstract_params: Params) -> OptStateMap:
    """Find the parameter leaf that each leaf of the optimizer state mirrors.

    It is the leaf with the same path and the same shape.

    Args:
      abstract_opt_state: the abstract optimizer state.
      abstract_params: the abstract parameters.
    """
    params = jax.tree_util.tree_flatten_with_path(abstract_params)[0]
    # The shape counts too: a factored moment has its parameter's path, but another shape.
    indices = {(path, leaf.shape): i for i, (path, leaf) in enumerate(params)}

    def find_owner(path: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
        # optax appends a parameter's path to the path of its own state.
        for start in range(len(path) + 1):
            index = indices.get((path[start:], shape))
            if index is not None:
                return index
        return None

    leaves = jax.tree_util.tree_flatten_with_path(abstract_opt_state)[0]
    owners = tuple(find_owner(path, leaf.shape) for path, leaf in leaves)
    return OptStateMap(abstract_opt_state, owners)


class OwnedTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer that knows which parameter leaf each leaf of its state belongs to.

    A state leaf may have any shape.

    Attributes:
      owners: for each state leaf, the index of its parameter leaf; None if all parameters share it.
      moved: for each parameter leaf, the number of float32 elements of one layer that are gathered
        for the update, and the number sent back.
    """

    owners: tuple[int | None, ...]
    moved: tuple[tuple[int, int], ...]


class OptimizerError(ValueError):
    """The optimizer cannot work. This package raises the error itself and does not rewrap it."""


_NOT_OFFERED = {
    "grad_fn": "grad_fn would be a second gradient in one step (optax.contrib.sam: use "
    "opaque_mode=False, which takes two steps instead)",
    "value_fn": "value_fn would be the loss at other weights, for a search along a line: choose a "
    "fixed or scheduled step size",
    "obj_fn": "obj_fn would be the loss as a function of the weights, on another batch, for a "
    "Hessian estimate: choose an optimizer that needs only gradients",
}
"""Arguments of optax updates that a step does not offer, and why."""


def opt_state_specs(
    opt_map: OptStateMap,
    params: Sequence[Leaf],
    mesh: Mesh,
    axes: tuple[str, ...],
    min_shard_bytes: int,
) -> tuple[LeafSpec, ...]:
    """Return a LeafSpec for each leaf of the optimizer state.

    A leaf that mirrors one of `params` gets that parameter's spec. A factored or extra leaf is
    split by its own shape, after the dims that count the layers of the parameter that it belongs
    to; a dim of pipeline stages is split as the parameter's.

    Args:
      opt_map: the parameter leaf that owns each state leaf.
      params: the trainable parameter leaves.
      mesh: the device mesh.
      axes: the mesh axes that split state.
      min_shard_bytes: float32 bytes below which a leaf stays replicated.
    """

    def spec(shape: tuple[int, ...], owner: int | None) -> LeafSpec:
        if owner is not None and shape == params[owner].shape:
            return params[owner].spec
        lead = 0
        base = None
        if owner is not None:
            param = params[owner]
            lead = max(param.lead, param.layer_dims)
            base = param.spec.base[: param.layer_dims]
        return leaf_spec(shape, mesh, axes, base, first_dim=lead, min_shard_bytes=min_shard_bytes)

    return tuple(
        spec(tuple(leaf.shape), owner)
        for leaf, owner in zip(opt_map.leaves, opt_map.owners, strict=True)
    )


def check_optimizer(tx: Any) -> None:
    """Raise ValueError if `tx` is not an optimizer."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise ValueError(f"tx must be an optax.GradientTransformation, got {type(tx).__name__}")


def init_opt_state_shape(
    tx: optax.GradientTransformation, abstract_master: Params
) -> tuple[OptState, jex.ClosedJaxpr]:
    """Return the abstract optimizer state, and the update traced as (grads, state, params, loss).

    Args:
      tx: the optimizer.
      abstract_master: abstract float32 parameters.

    Raises:
      ValueError: the optimizer's state does not consist of arrays, or its update needs something
        that a jitted sharded step cannot provide.
    """
    check_optimizer(tx)
    try:
        state = jax.eval_shape(tx.init, abstract_master)
    except OptimizerError:
        raise
    except Exception as e:  # user code: whatever it raises, the optimizer is at fault
        raise ValueError(f"the optimizer cannot be initialised as sharded arrays: {e!r}") from e
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        trace = jax.make_jaxpr(functools.partial(call_update, tx), return_shape=True)
        jaxpr, (updates, after) = trace(abstract_master, state, abstract_master, scalar)
    except OptimizerError:
        raise
    except Exception as e:  # user code again
        reasons = [why for name, why in _NOT_OFFERED.items() if name in str(e)]
        raise ValueError(
            "the optimizer's update cannot run inside a sharded step, which offers (grads, state, "
            "params) and value=loss; "
            f"{'; '.join(reasons) or 'choose an optimizer that needs no more'}: {e!r}"
        ) from e
    _check_updates(updates, abstract_master)
    _check_state_after(state, after)
    return state, jaxpr


def _check_updates(updates: Tree, abstract_master: Params) -> None:
    """Raise ValueError unless the optimizer's updates mirror the parameters."""
    if jax.tree.structure(updates) != jax.tree.structure(abstract_master):
        raise ValueError(
            "the optimizer changes the structure of the gradients; its updates must mirror the "
            "parameters"
        )
    params = jax.tree_util.tree_flatten_with_path(abstract_master)[0]
    wrong = []
    for (path, param), update in zip(params, jax.tree.leaves(updates), strict=True):
        if update.shape != param.shape:
            wrong.append(f"{jax.tree_util.keystr(path)}: {update.shape} for {param.shape}")
    if wrong:
        raise ValueError(f"the optimizer's updates must have the parameters' shapes, but {wrong}")


def _check_state_after(before: OptState, after: OptState) -> None:
    """Raise ValueError unless the state keeps its structure, shapes and dtypes in an update."""
    if jax.tree.structure(after) != jax.tree.structure(before):
        raise ValueError(
            "the optimizer's state changes structure when updated, so it cannot be donated"
        )
    leaves = jax.tree_util.tree_flatten_with_path(before)[0]
    changed = []
    for (path, a), b in zip(leaves, jax.tree.leaves(after), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            change = f"{a.shape} {a.dtype} -> {b.shape} {b.dtype}"
            changed.append(f"{jax.tree_util.keystr(path)}: {change}")
    if changed:
        raise ValueError(
            "the optimizer's state changes shape or dtype when updated, so it cannot be donated: "
            f"{changed}"
        )


def traced_optimizer(
    tx: optax.GradientTransformation, abstract_master: Params
) -> tuple[OptState, jex.ClosedJaxpr] | ValueError:
    """Return the result of `init_opt_state_shape`, or its error.

    The error is returned because an optimizer may work on one layer but not on stacks of layers.

    Args:
      tx: the optimizer.
      abstract_master: abstract float32 parameters.

    Raises:
      ValueError: `tx` is not an optimizer.
      OptimizerError: the optimizer cannot work, whatever the shapes.
    """
    check_optimizer(tx)
    try:
        return init_opt_state_shape(tx, abstract_master)
    except OptimizerError:
        raise
    except ValueError as error:
        return error


def call_update(
    tx: optax.GradientTransformation,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    loss: jax.Array,
) -> tuple[Grads, OptState]:
    """Call `tx.update`, with `value=loss` for transformations that take it.

    Plateau schedules and Polyak steps take it.

    Args:
      tx: the optimizer.
      grads: float32 gradients.
      opt_state: the optimizer state before the step.
      params: float32 weights.
      loss: f32[], the loss of the step.

    Raises:
      OptimizerError: one part of the optimizer rejects `value`, and another needs it.
    """
    tx = optax.with_extra_args_support(tx)
    try:
        return tx.update(grads, opt_state, params, value=loss)
    except TypeError as error:
        # A chain passes extra arguments on to its parts, so no signature shows what they take; only
        # a call does. The call is traced, and equations traced before the error are never used.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
        refusal = error
    try:
        return tx.update(grads, opt_state, params)
    except TypeError as error:
        if "'value'" not in str(error):
            raise
        raise OptimizerError(
            f"one part of the optimizer takes no value=loss ({refusal}), and another needs it "
            f"({error}): do not combine these parts in one optax.chain"
        ) from error
