"""The training state: one pytree of sharded arrays, born sharded.

`init` runs under jit with the state's shardings as output, so no device and no host ever holds a
whole leaf that is sharded: each device generates its own shard (JAX's counter-based random numbers
make the values independent of the mesh).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zerojax.precision import LossScale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
    """Stacked layers in two places.

    Attributes:
      device: [k, ...], layers 0 .. k-1.
      host: [L-k, ...], the rest, in pinned host memory or OnDisk.
    """

    device: jax.Array
    host: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """An update that is delayed to the next step.

    Attributes:
      grads: gradients as they were summed, in pinned host memory: stacked layers' leaves first,
        then the others.
      shared: the optimizer's scalars that belong to them.
      scalars: f32[3], loss, clipping factor and loss scale.
      ready: bool[], whether there is an update to do: not before the first step, nor after a
        gradient that is not finite.
    """

    grads: list[jax.Array]
    shared: list[jax.Array]
    scalars: jax.Array
    ready: jax.Array


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A leaf that rests on disk; `Program.iter_params` reads it.

    To trees it is a leaf, as an array would be: mapped over, it tells its shape and dtype, and
      refuses to be computed with.

    Attributes:
      token: i32[devices], the number of its state: a program has one state on disk, and works on no
        other.
      shape: of the array that it stands for.
      dtype: likewise.
    """

    token: jax.Array
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def block_until_ready(self) -> Self:
        """Wait for the program that made it, as `jax.block_until_ready` of a tree does for arrays."""
        self.token.block_until_ready()
        return self

    def copy(self) -> Self:
        """Return a leaf of the same records, which outlives a step that donates this one.

        No step may have changed them.
        """
        return dataclasses.replace(self, token=self.token.copy())

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(self._no_numbers("takes part in no computation"))

    # What arrays do. Without these, Python's own errors would name no remedy.
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
        # A property, so that it is raised where JAX looks for it. And no TypeError: JAX would put
        # its own text in its place.
        no = "takes part in no computation (a program's step and eval are compiled already: call them outside of jit)"
        raise ValueError(self._no_numbers(no))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._no_numbers(f"has no {name!r}"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(self._no_numbers("cannot be copied or pickled"))

    def _no_numbers(self, what: str) -> str:
        leaf = f"{self.dtype}{list(self.shape)}"
        return f"this leaf {leaf} rests on disk and {what}: program.iter_params(state) reads parameters from there"


@dataclasses.dataclass(frozen=True)
class DiskArgument(OnDisk):
    """The same inside of a program, and in the shapes of its arguments: a node whose child, the
    token, is what JAX passes.
    """


jax.tree_util.register_dataclass(
    DiskArgument, data_fields=["token"], meta_fields=["shape", "dtype"]
)


def as_arguments(tree: Any) -> Any:
    """Return a tree as a compiled program takes it: its leaves on disk are nodes."""
    return _map_on_disk(lambda leaf: DiskArgument(leaf.token, leaf.shape, leaf.dtype), tree)


def as_leaves(tree: Any) -> Any:
    """Return what a compiled program has returned, its nodes on disk as leaves."""
    return _map_on_disk(lambda leaf: OnDisk(leaf.token, leaf.shape, leaf.dtype), tree)


def _map_on_disk(function: Callable[[OnDisk], Any], tree: Any) -> Any:
    """Return a tree with `function` applied to what of it is on disk."""
    is_on_disk = lambda node: isinstance(node, OnDisk)  # noqa: E731
    return jax.tree.map(
        lambda node: function(node) if is_on_disk(node) else node, tree, is_leaf=is_on_disk
    )


def is_stored(node: Any) -> bool:
    """Tell whether a node of a state tree stands for one leaf, as a Split and an OnDisk do.

    To be passed as `is_leaf`.
    """
    return isinstance(node, Split | OnDisk)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes. Donated to each step.

    Attributes:
      step: i32[], calls of the step so far.
      skipped: i32[], updates skipped because a gradient was not finite.
      key: base random key; a step's keys are functions of (key, step, microbatch, layer).
      params: those that are trained, in the compute dtype; whole below stage 3, sharded at stage 3.
      master: float32 weights where the compute dtype is narrower, else None.
      opt_state: optax's state over the float32 weights. With a fraction on the device, stacked
        leaves are `Split`, as are those of `master`. Leaves of the nvme tier are `OnDisk`, here and
        in params.
      loss_scale: dynamic loss scaling with precision="fp16", else None.
      pending: with `delayed_update`, the update that the next step does, else None.
      frozen: weights that the model freezes, in the compute dtype (integers in their own), whole
        below stage 3, sharded at stage 3; None in the place of those that are trained, as params
        has None in the place of these. None: nothing is frozen.
      model_state: what the model keeps beside its parameters and updates by itself, replicated;
        `{"embed", "blocks", "head"}`, of those that there are, for a LayeredModel. None where the
        model has no `init_state`.
    """

    step: jax.Array
    skipped: jax.Array
    key: jax.Array
    params: Any
    master: Any
    opt_state: Any
    loss_scale: LossScale | None
    pending: Pending | None = None
    frozen: Any = None
    model_state: Any = None


def state_key(key: jax.Array) -> jax.Array:
    """Return the key that the state made by `init(key)` carries: unlike any that its parameters
    were drawn with.
    """
    # An arbitrary number. Parameters are drawn from splits of the key, and a model's init has no
    # reason to fold this one in.
    return jax.random.fold_in(key, 0x5EED)


def numbered_next(state: TrainState) -> TrainState:
    """Return a state whose leaves on disk carry the next number."""
    return _map_on_disk(lambda leaf: dataclasses.replace(leaf, token=leaf.token + 1), state)


def check_is_there(state: TrainState) -> None:
    """Raise ValueError for a state that was donated, or what is none."""
    if not isinstance(state, TrainState):
        raise ValueError(
            f"a zerojax.TrainState is needed, such as init and step return, not {type(state).__name__}"
        )
    if isinstance(state.step, Tracer):
        raise ValueError(
            "a program's step and eval are compiled already, and move states between tiers: call them outside of jit"
        )
    check_is_array(state.step)
    if state.step.is_deleted():  # jax 0.10 on CPU crashes the process on some donated arguments
        raise ValueError(
            "this state was donated to an earlier step, and is gone: go on with the state that step returned"
        )


def check_is_array(leaf: Any, name: Callable[[], str] = lambda: "step") -> None:
    """Raise ValueError for a leaf of a state that is no jax.Array: numpy's, or an abstract one;
    `name` returns its path.
    """
    if not isinstance(leaf, jax.Array):
        raise ValueError(
            f"this state holds a {type(leaf).__name__} where a jax.Array is needed, at {name()}: go on with the state that "
            "step returned, or restore a checkpoint"
        )


def with_model_state(before: TrainState, after: TrainState, model_state: Any) -> TrainState:
    """Return the state after a step with the model's own state; with that of before the step, where
    its update was skipped.
    """
    if model_state is None:
        return after
    is_done = after.skipped == before.skipped
    kept = jax.tree.map(
        lambda new, old: jnp.where(is_done, new, old), model_state, before.model_state
    )
    return dataclasses.replace(after, model_state=kept)


def with_loss_scale(
    before: TrainState, after: TrainState, has_fault: jax.Array | None
) -> TrainState:
    """Return the state after a step whose batch may have had a fault: that is no overflow, and the
    loss scale stays.
    """
    if has_fault is None or before.loss_scale is None:
        return after
    kept = jax.tree.map(
        lambda new, old: jnp.where(has_fault, old, new), after.loss_scale, before.loss_scale
    )
    return dataclasses.replace(after, loss_scale=kept)


def masters(state: TrainState) -> Any:
    """Return the float32 parameters that the optimizer updates, where they rest."""
    return state.params if state.master is None else state.master


# --- trained and frozen leaves: trees of which each has None in the place of the other's leaves ---


def split_frozen(flags: Any, whole: Any) -> tuple[Any, Any]:
    """Return the trained and the frozen part of a tree; `flags` is a tree of bool over the
    parameters, or None: none is.
    """
    if flags is None:
        return whole, None

    def pick(wanted):
        return jax.tree.map(lambda flag, leaf: leaf if flag == wanted else None, flags, whole)

    return pick(False), pick(True)


def join_frozen(trained: Any, frozen: Any) -> Any:
    """Return the whole tree; `frozen` is None where nothing is frozen."""
    if frozen is None:
        return trained
    is_leaf = lambda node: node is None or is_stored(node)  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=is_leaf)
