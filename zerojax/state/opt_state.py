"""The shape of optax's state: which of its leaves mirror a parameter, and how they are sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.sharding import LeafSpec, leaf_spec


def owners(abstract_opt_state: Any, abstract_params: Any) -> tuple[int | None, ...]:
    """Return, for each leaf of the optimizer state, the index of the parameter leaf it mirrors (same path, same shape)."""
    params = {path: (i, leaf.shape) for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(abstract_params)[0])}

    def owner(path: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
        for start in range(len(path) + 1):
            index, own = params.get(path[start:], (None, None))
            if index is not None and own == shape:
                return index
        return None

    return tuple(owner(path, leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_opt_state)[0])


class OptimizerError(ValueError):
    """An optimizer that cannot work, told by this package's own wrappers: raised as it is."""


def opt_state_specs(
    abstract_opt_state: Any, abstract_params: Any, specs: dict[str, LeafSpec], mesh: Mesh, axis: str, min_shard_bytes: int
) -> Any:
    """Return a LeafSpec for each leaf of the optimizer state, as a tree of its structure."""
    params = {
        path: (leaf.shape, specs[jax.tree_util.keystr(path)])
        for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params)[0]
    }

    def spec_of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> LeafSpec:
        for start in range(len(path) + 1):
            shape, spec = params.get(path[start:], (None, None))
            if spec is not None and shape == leaf.shape:
                return spec
        return leaf_spec(leaf.shape, mesh, axis, min_shard_bytes=min_shard_bytes)

    return jax.tree_util.tree_map_with_path(spec_of, abstract_opt_state)


def check_optimizer(tx: Any) -> None:
    """Raise ValueError for what is no optimizer."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise ValueError(f"tx must be an optax.GradientTransformation, got {type(tx).__name__}")


def init_opt_state_shape(tx: optax.GradientTransformation, abstract_master: Any) -> Any:
    """Return the abstract optimizer state.

    Raises:
      ValueError: the optimizer's state is not made of arrays, or its update needs what a jitted sharded step cannot give.
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
        updates, after = jax.eval_shape(
            lambda g, s, p, value: call_update(tx, g, s, p, value), abstract_master, state, abstract_master, scalar
        )
    except Exception as e:  # the user's code, as above
        raise ValueError(
            "the optimizer's update cannot run inside a sharded step, which offers (grads, state, params) and value=loss; "
            f"choose one that needs no more: {e!r}"
        ) from e
    if jax.tree.structure(updates) != jax.tree.structure(abstract_master):
        raise ValueError("the optimizer changes the structure of the gradients; its updates must mirror the parameters")
    shapes = zip(jax.tree_util.tree_flatten_with_path(abstract_master)[0], jax.tree.leaves(updates), strict=True)
    wrong = [f"{jax.tree_util.keystr(path)}: {u.shape} for {p.shape}" for (path, p), u in shapes if u.shape != p.shape]
    if wrong:
        raise ValueError(f"the optimizer's updates must have the parameters' shapes, but {wrong}")
    if jax.tree.structure(after) != jax.tree.structure(state):
        raise ValueError("the optimizer's state changes structure when updated, so it cannot be donated")
    changed = [
        f"{jax.tree_util.keystr(path)}: {a.shape} {a.dtype} -> {b.shape} {b.dtype}"
        for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(after), strict=True)
        if a.shape != b.shape or a.dtype != b.dtype
    ]
    if changed:
        raise ValueError(f"the optimizer's state changes shape or dtype when updated, so it cannot be donated: {changed}")
    return state


def call_update(tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, loss: jax.Array) -> tuple[Any, Any]:
    """Call `tx.update`, with `value=loss` for transformations that ask for it (plateau schedules, Polyak steps)."""
    return optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss)
