"""The optimizer on sharded state: where optax's state lives, the global norm, and the update.

    norm   = sqrt(sum over leaves and shards of g^2)        exact: XLA adds a psum of one scalar
    g      = g * min(1, clip_norm / norm)
    master = master + updates(g, opt_state, master)          float32, each device its own shard
    params = all_gather(cast(master))                        stages 1 and 2; stage 3 gathers on use

Every leaf of the optimizer state that mirrors a parameter (same path, same shape) gets that parameter's spec; a factored or
extra leaf is split by its own shape. Any optax transformation works, since each sees whole arrays and XLA moves what crosses
shards.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.gather import Spec
from zerojax.partition import LeafSpec, leaf_spec


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


def global_norm(grads: Any) -> jax.Array:
    """Return the Euclidean norm over all leaves and shards: f32[]."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """Return what gradients of global norm `norm` are multiplied by, so that it is at most `clip_norm`: f32[]."""
    return jnp.float32(1) if clip_norm is None else jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def select(condition: jax.Array, on_true: Any, on_false: Any) -> Any:
    """Choose between two trees by one boolean."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), on_true, on_false)


def stored_spec(spec: LeafSpec, sharded: bool) -> Spec:
    """Return the spec of a leaf, by the stage table's word on its kind of state."""
    return spec.sharded if sharded else spec.base
