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


@dataclasses.dataclass(frozen=True, eq=False)
class OptStateMap:
    """How an optimizer's state divides over the parameters.

    Attributes:
      abstract: the abstract optimizer state.
      owners: for each leaf of the state the index of the parameter leaf that it mirrors, or, of an
        `OwnedTransformation`, belongs to; None: all parameters share it.
    """

    abstract: Any
    owners: tuple[int | None, ...]

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """The leaves of the abstract state."""
        return jax.tree.leaves(self.abstract)

    @functools.cached_property
    def names(self) -> list[str]:
        """The paths of the leaves, as strings."""
        return [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(self.abstract)[0]
        ]

    @functools.cached_property
    def shared(self) -> tuple[int, ...]:
        """Indices of the leaves that belong to no parameter: of an elementwise optimizer, scalars
        that all parameters share.
        """
        return tuple(j for j, owner in enumerate(self.owners) if owner is None)

    def states_of(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the state leaves that belong to the parameter leaves in `part`, in
        the order of the state.
        """
        params = set(part)
        return tuple(j for j, owner in enumerate(self.owners) if owner in params)

    def owner(self, index: int) -> int:
        """Return the index of the parameter leaf that a leaf of the state belongs to."""
        owner = self.owners[index]
        assert owner is not None
        return owner


def map_opt_state(abstract_opt_state: Any, abstract_params: Any) -> OptStateMap:
    """Find the parameter leaf that each leaf of the optimizer state mirrors: the one of the same
    path and the same shape.
    """
    params = {
        path: (i, leaf.shape)
        for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(abstract_params)[0])
    }

    def owner(path: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
        for start in range(
            len(path) + 1
        ):  # optax puts a parameter's path behind that of its own state
            # The shape counts too: a factored moment has its parameter's path, and another shape.
            index, param_shape = params.get(path[start:], (None, None))
            if index is not None and param_shape == shape:
                return index
        return None

    leaves = jax.tree_util.tree_flatten_with_path(abstract_opt_state)[0]
    return OptStateMap(abstract_opt_state, tuple(owner(path, leaf.shape) for path, leaf in leaves))


class OwnedTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer that tells which parameter leaf each leaf of its state belongs to, whatever its
    shape.

    Attributes:
      owners: for each leaf of the state; None: all parameters share it.
      moved: for each parameter leaf the float32 elements of one layer that move to where the leaf
        is whole, and back.
    """

    owners: tuple[int | None, ...]
    moved: tuple[tuple[int, int], ...]


class OptimizerError(ValueError):
    """An optimizer that cannot work, told by this package itself: raised as it is."""


_NOT_OFFERED = {
    "grad_fn": "grad_fn would be a second gradient in one step (optax.contrib.sam: opaque_mode=False takes two steps instead)",
    "value_fn": "value_fn would be the loss at other weights, for a search along a line: choose a fixed or scheduled step size",
    "obj_fn": "obj_fn would be the loss as a function of the weights, as a Hessian estimate needs it, on another batch: "
    "choose one that needs gradients alone",
}
"""Arguments of updates in optax that a step does not offer, and why."""


def opt_state_specs(
    opt_map: OptStateMap, params: Sequence[Leaf], mesh: Mesh, axis: str, min_shard_bytes: int
) -> tuple[LeafSpec, ...]:
    """Return a LeafSpec for each leaf of the optimizer state.

    A leaf that mirrors a parameter, one of `params`, has its spec. A factored or extra leaf is
    split by its own shape, behind the dims that number the records of the parameter that it belongs
    to.
    """

    def spec(shape: tuple[int, ...], owner: int | None) -> LeafSpec:
        if owner is not None and shape == params[owner].shape:
            return params[owner].spec
        lead = 0 if owner is None else params[owner].lead
        return leaf_spec(shape, mesh, axis, first_dim=lead, min_shard_bytes=min_shard_bytes)

    return tuple(
        spec(tuple(leaf.shape), owner)
        for leaf, owner in zip(opt_map.leaves, opt_map.owners, strict=True)
    )


def check_optimizer(tx: Any) -> None:
    """Raise ValueError for what is no optimizer."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise ValueError(f"tx must be an optax.GradientTransformation, got {type(tx).__name__}")


def init_opt_state_shape(
    tx: optax.GradientTransformation, abstract_master: Any
) -> tuple[Any, jex.ClosedJaxpr]:
    """Return the abstract optimizer state, and the traced update, of (grads, state, params, loss).

    Raises:
      ValueError: the optimizer's state is not made of arrays, or its update needs what a jitted
        sharded step cannot give.
    """
    check_optimizer(tx)
    try:
        state = jax.eval_shape(tx.init, abstract_master)
    except OptimizerError:
        raise
    except Exception as e:  # the user's code: whatever it raises, the optimizer is at fault
        raise ValueError(f"the optimizer cannot be initialised as sharded arrays: {e!r}") from e
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        trace = jax.make_jaxpr(functools.partial(call_update, tx), return_shape=True)
        jaxpr, (updates, after) = trace(abstract_master, state, abstract_master, scalar)
    except OptimizerError:
        raise
    except Exception as e:  # the user's code again
        reasons = [why for name, why in _NOT_OFFERED.items() if name in str(e)]
        raise ValueError(
            "the optimizer's update cannot run inside a sharded step, which offers (grads, state, params) and value=loss; "
            f"{'; '.join(reasons) or 'choose one that needs no more'}: {e!r}"
        ) from e
    # What a step relies on: updates mirror the parameters, and the state keeps its structure,
    # shapes and dtypes.
    if jax.tree.structure(updates) != jax.tree.structure(abstract_master):
        raise ValueError(
            "the optimizer changes the structure of the gradients; its updates must mirror the parameters"
        )
    shapes = zip(
        jax.tree_util.tree_flatten_with_path(abstract_master)[0],
        jax.tree.leaves(updates),
        strict=True,
    )
    wrong = [
        f"{jax.tree_util.keystr(path)}: {u.shape} for {p.shape}"
        for (path, p), u in shapes
        if u.shape != p.shape
    ]
    if wrong:
        raise ValueError(f"the optimizer's updates must have the parameters' shapes, but {wrong}")
    if jax.tree.structure(after) != jax.tree.structure(state):
        raise ValueError(
            "the optimizer's state changes structure when updated, so it cannot be donated"
        )
    changed = [
        f"{jax.tree_util.keystr(path)}: {a.shape} {a.dtype} -> {b.shape} {b.dtype}"
        for (path, a), b in zip(
            jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(after), strict=True
        )
        if a.shape != b.shape or a.dtype != b.dtype
    ]
    if changed:
        raise ValueError(
            f"the optimizer's state changes shape or dtype when updated, so it cannot be donated: {changed}"
        )
    return state, jaxpr


def traced_optimizer(
    tx: optax.GradientTransformation, abstract_master: Any
) -> tuple[Any, jex.ClosedJaxpr] | ValueError:
    """Return what `init_opt_state_shape` returns, or its error: an optimizer may work on one layer,
    and not on stacks of them.

    Raises:
      ValueError: `tx` is no optimizer.
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
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, loss: jax.Array
) -> tuple[Any, Any]:
    """Call `tx.update`, with `value=loss` for transformations that take it (plateau schedules,
    Polyak steps).

    Raises:
      OptimizerError: one part of the optimizer refuses it, and another needs it.
    """
    tx = optax.with_extra_args_support(tx)
    try:
        return tx.update(grads, opt_state, params, value=loss)
    except TypeError as error:
        # A chain hands extra arguments to its parts, so no signature tells what they take: a call
        # does. It is traced, and what was traced before the error is used by nothing.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
        refusal = error
    try:
        return tx.update(grads, opt_state, params)
    except TypeError as error:
        if "'value'" not in str(error):
            raise
        raise OptimizerError(
            f"one part of the optimizer takes no value=loss ({refusal}), and another needs it ({error}): keep these parts out "
            "of one optax.chain"
        ) from error
