"""The training state: one pytree of sharded arrays, created sharded.

`init` runs under jit with the state's shardings as output, so no device and no host ever holds an
unsharded copy of a sharded leaf. Each device generates its own shard; JAX's counter-based random
numbers make the values independent of the mesh.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zerojax.precision import LossScale
from zerojax.trees import ModelState, OptState, Params, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
    """Stacked layers in two places.

    Attributes:
      device: [k, ...], layers 0 .. k-1.
      host: [L-k, ...], the remaining layers, in pinned host memory or OnDisk.
    """

    device: jax.Array
    host: Any


IN_FORWARD = (4,)
"""Shape of the scalars of a pending update that the next step's forward applies."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """An update that a step leaves to the next step.

    Attributes:
      grads: gradients summed over microbatches, stacked leaves first. A delayed update keeps them
        in pinned host memory, an update in forward in the tier of the gradients.
      shared: the optimizer's scalars for this update.
      scalars: f32[3], loss, clipping factor and loss scale. For an update in forward f32[4], with
        the number of microbatches.
      ready: bool[], whether there is an update to do; False before the first step, and after a
        gradient that is not finite.
    """

    grads: list[jax.Array]
    shared: list[jax.Array]
    scalars: jax.Array
    ready: jax.Array

    def mean_grad(self, grad: jax.Array) -> jax.Array:
        """Return the gradient to update with: the mean over microbatches, unscaled and clipped.

        The numbers are those of the step that computed the gradient, which may have run with
        another precision, `clip_norm` or number of microbatches.

        Args:
          grad: one of `grads` of an update in forward, or a part of one, on the device.
        """
        _, factor, scale, count = self.scalars
        # In this order, as in an update after backward. Factors of 1 change no bit.
        return grad.astype(jnp.float32) / count / scale * factor


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A leaf stored on disk; `Program.iter_params` reads it.

    In a pytree it is a leaf, like an array. It has a shape and a dtype, and raises an error if used
    in a computation.

    Attributes:
      token: i32[devices], number of the state that the leaf belongs to: a program has one state on
        disk and works on no other.
      shape: shape of the array on disk.
      dtype: dtype of the array on disk.
    """

    token: jax.Array
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Number of dims of the array on disk."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the array on disk."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array on disk, in total over all devices."""
        return self.size * self.dtype.itemsize

    def block_until_ready(self) -> Self:
        """Wait for the program that made this leaf, like `jax.block_until_ready` for arrays."""
        self.token.block_until_ready()
        return self

    def copy(self) -> Self:
        """Return a leaf of the same records, which outlives a step that donates this one.

        It is valid as long as no step has changed the records.
        """
        return dataclasses.replace(self, token=self.token.copy())

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(self._no_numbers("cannot be used in a computation"))

    # Operators that arrays have. Without these methods, Python's own errors would not name a
    # remedy.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        __pow__
    ) = __rpow__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __matmul__ = __rmatmul__ = __neg__ = (
        __pos__
    ) = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __iter__ = __float__ = __int__ = _refuse
    __array__ = _refuse

    @property
    def __jax_array__(self) -> Any:
        """Refuse the conversion that JAX attempts, with an error that names a remedy."""
        # A property, so that the error is raised where JAX looks up the attribute. It is not a
        # TypeError because JAX would replace the text of a TypeError.
        reason = (
            "cannot be used in a computation (a program's step and eval are compiled already: call "
            "them outside of jit)"
        )
        raise ValueError(self._no_numbers(reason))

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for an attribute that only arrays have."""
        raise AttributeError(self._no_numbers(f"has no {name!r}"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles."""
        raise TypeError(self._no_numbers("cannot be copied or pickled"))

    def _no_numbers(self, reason: str) -> str:
        leaf = f"{self.dtype}{list(self.shape)}"
        return (
            f"this leaf {leaf} is stored on disk and {reason}: read parameters with "
            "program.iter_params(state)"
        )


@dataclasses.dataclass(frozen=True)
class DiskArgument(OnDisk):
    """A leaf on disk inside a program, and in the shapes of its arguments.

    It is a pytree node whose only child is the token, which JAX passes.
    """


jax.tree_util.register_dataclass(
    DiskArgument, data_fields=["token"], meta_fields=["shape", "dtype"]
)


def as_arguments(tree: Tree) -> Any:
    """Return a tree in the form that a compiled program takes: its leaves on disk are nodes."""
    return _map_on_disk(lambda leaf: DiskArgument(leaf.token, leaf.shape, leaf.dtype), tree)


def as_leaves(tree: Tree) -> Any:
    """Return the output of a compiled program with its nodes on disk turned into leaves."""
    return _map_on_disk(lambda leaf: OnDisk(leaf.token, leaf.shape, leaf.dtype), tree)


def _map_on_disk(function: Callable[[OnDisk], Any], tree: Tree) -> Any:
    """Return a tree with `function` applied to its leaves on disk."""
    is_on_disk = lambda node: isinstance(node, OnDisk)  # noqa: E731
    return jax.tree.map(
        lambda node: function(node) if is_on_disk(node) else node, tree, is_leaf=is_on_disk
    )


def is_stored(node: Any) -> bool:
    """Return whether a node of a state tree stands for one leaf, as a Split and an OnDisk do.

    Pass it as `is_leaf`.
    """
    return isinstance(node, Split | OnDisk)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes. Donated to each step.

    On a mesh with `pipe`, stacks here are records of one layer of every stage, [v K, p_pipe, ...]
    (`zerojax.state.wide`), as are `Program.shardings`. `Program.params`, `master_params`,
    `ema_params`, `grads`, `iter_params`, checkpoints and exports have the model's own order,
    [L, ...]. A stack of layers may take the place of its records in `params` and `frozen`.

    Attributes:
      step: i32[], number of calls of the step so far.
      skipped: i32[], number of updates skipped because a gradient was not finite.
      key: base random key; a step's keys are functions of (key, step, microbatch, layer).
      params: trainable parameters in the compute dtype; unsharded below stage 3, sharded at stage
        3.
      master: float32 weights if the compute dtype is narrower, else None.
      opt_state: optax's state over the float32 weights. With a fraction on the device, stacked
        leaves here and in `master` are `Split`. Leaves of the nvme tier are `OnDisk`, here and in
        `params`.
      loss_scale: dynamic loss scaling with precision="fp16", else None.
      pending: with `delayed_update` or update="in_forward", the update that the next step does;
        else None.
      frozen: frozen weights in the compute dtype (integers in their own), unsharded below stage 3,
        sharded at stage 3. It has None in place of trainable leaves, as `params` has None in place
        of frozen leaves. None if nothing is frozen.
      model_state: replicated state that the model keeps in addition to its parameters and updates
        itself; for a LayeredModel a dict with the keys "embed", "blocks" and "head", if present.
        None if the model has no `init_state`.
    """

    step: jax.Array
    skipped: jax.Array
    key: jax.Array
    params: Params
    master: Params
    opt_state: OptState
    loss_scale: LossScale | None
    pending: Pending | None = None
    frozen: Params = None
    model_state: ModelState = None


def state_key(key: jax.Array) -> jax.Array:
    """Return the key that the state made by `init(key)` carries.

    It differs from any key that its parameters were drawn with.
    """
    # An arbitrary number. Parameters are drawn from splits of the key, and a model's init has no
    # reason to fold this number in.
    return jax.random.fold_in(key, 0x5EED)


def numbered_next(state: TrainState) -> TrainState:
    """Return a state whose leaves on disk carry the next number."""
    return _map_on_disk(lambda leaf: dataclasses.replace(leaf, token=leaf.token + 1), state)


def check_is_there(state: TrainState) -> None:
    """Check that a state can be used.

    Raises:
      ValueError: it is not a TrainState, or a tracer, or it was donated.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            "a zerojax.TrainState is needed, as returned by init and step, not "
            f"{type(state).__name__}"
        )
    if isinstance(state.step, Tracer):
        raise ValueError(
            "a program's step and eval are compiled already, and move states between tiers: call "
            "them outside of jit"
        )
    check_is_array(state.step)
    if state.step.is_deleted():  # jax 0.10 on CPU crashes the process on some donated arguments
        raise ValueError(
            "this state was donated to an earlier step and no longer exists: continue with the "
            "state that step returned; if step raised an error instead, restore a checkpoint, or "
            "make a state with init"
        )


def check_is_array(leaf: Any, name: Callable[[], str] = lambda: "step") -> None:
    """Raise ValueError for a leaf that is not a jax.Array, such as numpy's or an abstract array.

    Args:
      leaf: leaf of a state.
      name: function that returns the leaf's path, for the error.
    """
    if not isinstance(leaf, jax.Array):
        raise ValueError(
            f"this state holds a {type(leaf).__name__} where a jax.Array is needed, at {name()}: "
            "continue with the state that step returned, or restore a checkpoint"
        )


def with_model_state(before: TrainState, after: TrainState, model_state: ModelState) -> TrainState:
    """Return the state after a step with the model's own new state.

    If the update was skipped, the model's state stays as it was before the step.

    Args:
      before: the state before the step.
      after: the state after the step.
      model_state: the model's new state, or None.
    """
    if model_state is None:
        return after
    is_done = after.skipped == before.skipped
    model_state = jax.tree.map(
        lambda new, old: jnp.where(is_done, new, old), model_state, before.model_state
    )
    return dataclasses.replace(after, model_state=model_state)


def with_loss_scale(
    before: TrainState, after: TrainState, has_fault: jax.Array | None
) -> TrainState:
    """Return the state after a step whose batch may have had a fault.

    A fault is not an overflow, so the loss scale then stays as it was before the step.

    Args:
      before: the state before the step.
      after: the state after the step.
      has_fault: bool[], whether the batch had a fault, or None.
    """
    if has_fault is None or before.loss_scale is None:
        return after
    loss_scale = jax.tree.map(
        lambda new, old: jnp.where(has_fault, old, new), after.loss_scale, before.loss_scale
    )
    return dataclasses.replace(after, loss_scale=loss_scale)


def masters(state: TrainState) -> Any:
    """Return the float32 parameters that the optimizer updates, in their tiers."""
    return state.params if state.master is None else state.master


# --- trainable and frozen leaves: two trees, each with None in place of the other's leaves --------


def split_frozen(flags: Any, whole: Params) -> tuple[Params, Params]:
    """Return the trainable and the frozen part of a tree.

    Args:
      flags: tree of bool over the parameters, true for frozen ones; None if nothing is frozen.
      whole: the full parameter tree.
    """
    if flags is None:
        return whole, None

    def pick(wanted: bool) -> Params:
        return jax.tree.map(lambda flag, leaf: leaf if flag == wanted else None, flags, whole)

    return pick(False), pick(True)


def join_frozen(trained: Params, frozen: Params) -> Params:
    """Return the full tree, joined from its trainable and frozen parts.

    Args:
      trained: the trainable part, with None in place of frozen leaves.
      frozen: the frozen part, with None in place of trainable leaves; None if nothing is frozen.
    """
    if frozen is None:
        return trained
    is_leaf = lambda node: node is None or is_stored(node)  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=is_leaf)
