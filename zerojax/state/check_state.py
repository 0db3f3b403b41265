"""Check that a program can use a state: it was not donated, and it has the program's layout.

A scalar of the optimizer's state may be a Python or NumPy number: users of
`optax.inject_hyperparams` write `state.opt_state.hyperparams["learning_rate"] = 1e-4`. The number
becomes an array with the leaf's dtype and sharding.

Parameters may be in the order of the layers, [L, ...], where the program's state holds records of
several stages: users evaluate with `dataclasses.replace(state, params=program.ema_params(state))`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models import BLOCKS
from zerojax.state.host_memory import is_away
from zerojax.state.layout import Layout
from zerojax.state.train_state import (
    IN_FORWARD,
    TrainState,
    as_arguments,
    check_is_array,
    check_is_there,
)
from zerojax.state.wide import StageOrder, widen_stack
from zerojax.trees import Tree
from zerojax.user_values import as_integer, as_number, shown

_SHOWN = 3
"""Number of leaves that an error lists."""


@dataclasses.dataclass(frozen=True)
class _Expected:
    """What a program expects of a leaf.

    Attributes:
      shape: the leaf's shape.
      dtype: the leaf's dtype.
      sharding: the leaf's sharding.
      is_away: whether the leaf is in host memory.
      takes_numbers: whether the leaf is a scalar on the device that a number may replace.
      order: order of the layers in the records if the leaf may be given as a stack of layers, else
        None.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    is_away: bool
    takes_numbers: bool
    order: StageOrder | None = None


class StateCheck:
    """Compares states with a layout before every step; the expected values are computed once."""

    def __init__(self, layout: Layout) -> None:
        """Compute what `layout` expects of each leaf."""
        leaves, self._structure = jax.tree.flatten(layout.abstract_state)
        names = _names(layout.abstract_state)
        self._expected = [
            _expected(leaf, layout.order if _is_weight_stack(name) else None)
            for leaf, name in zip(leaves, names, strict=True)
        ]
        self._grads = [i for i, name in enumerate(names) if name.startswith(".pending.grads")]

    def __call__(
        self, state: TrainState, report: Callable[[Sequence[str]], None] | None = None
    ) -> TrainState:
        """Return a state that the program can use.

        It is the same state, with numbers in place of scalars converted to arrays, and stacks of
        layers in place of records of several stages converted to these.

        Args:
          state: the state to check.
          report: called if numbers took the place of scalars, with one line for each: its path and
            its value.

        Raises:
          ValueError: the state was donated, or another program made it, or it is not a TrainState,
            or a number is not finite.
        """
        check_is_there(state)
        leaves, structure = jax.tree.flatten(as_arguments(state))
        if structure != self._structure:
            raise ValueError(self._other_structure(state))
        scalars: dict[int, jax.Array] = {}
        widened: dict[int, jax.Array] = {}
        for i, (leaf, expected) in enumerate(zip(leaves, self._expected, strict=True)):
            if expected.takes_numbers and _replaces(leaf, expected):
                scalars[i] = _scalar(leaf, expected, lambda i=i: _name(state, i))
                continue
            check_is_array(leaf, lambda i=i: _name(state, i))
            if _is_narrow(leaf, expected):
                assert expected.order is not None
                widened[i] = widen_stack(leaf, expected.order, expected.sharding)
                continue
            if is_away(leaf) != expected.is_away or leaf.shape != expected.shape:
                advice = "the state was made by a program with another model or config"
                if leaf.shape == expected.shape and is_away(leaf):
                    advice += ", or program.offload moved it: then call program.reload(state)"
                raise ValueError(
                    f"this state's {_name(state, i)} is {leaf.shape} in {_memory(is_away(leaf))}, "
                    f"and this program's is {expected.shape} in {_memory(expected.is_away)}: "
                    f"{advice}"
                )
        if not (scalars or widened):
            return state
        if scalars and report is not None:
            report([f"{_name(state, i)} = {shown(leaves[i])}" for i in scalars])
        # A leaf on disk counts as one leaf in both forms of the tree.
        state_leaves, tree = jax.tree.flatten(state)
        converted = scalars | widened
        replaced = [converted.get(i, leaf) for i, leaf in enumerate(state_leaves)]
        return jax.tree.unflatten(tree, replaced)

    def check_pending(self, state: TrainState) -> None:
        """Check that a step can overwrite the gradients of a state's pending update.

        Raises:
          ValueError: they have another dtype than the program's.
        """
        leaves = jax.tree.leaves(as_arguments(state)) if self._grads else []
        for i in self._grads:
            if leaves[i].dtype != self._expected[i].dtype:
                raise ValueError(
                    f"this state's {_name(state, i)} is {leaves[i].dtype}, and this program's is "
                    f"{self._expected[i].dtype}: the state was made by a program with another "
                    "grads_dtype, precision or num_microbatches; save it there, and restore the "
                    "checkpoint here"
                )

    def _other_structure(self, state: TrainState) -> str:
        """Return an error that names the leaves that a state lacks or has in excess."""
        actual = _names(as_arguments(state))
        expected = _names(jax.tree.unflatten(self._structure, self._expected))
        missing = [name for name in expected if name not in set(actual)]
        extra = [name for name in actual if name not in set(expected)]
        names = [*missing, *extra]
        if names and all(name.startswith(".pending") for name in names):
            return self._other_pending(state)
        differences = []
        if missing:
            differences.append(f"it lacks {_listed(missing)}")
        if extra:
            differences.append(f"it has {_listed(extra)}, which the program's state lacks")
        details = f" ({', and '.join(differences)})" if differences else ""
        return (
            f"this state has another structure than this program's{details}: it was made by a "
            "program with another config, or a value in it was replaced by something other than a "
            "number"
        )

    def _other_pending(self, state: TrainState) -> str:
        """Return an error for a state that keeps its gradients for the next step, or does not."""
        ours = _update_setting(jax.tree.unflatten(self._structure, self._expected).pending)
        theirs = _update_setting(state.pending)
        return (
            f"this state was made by a program with {theirs}, and this program has {ours}, whose "
            "states hold other gradients between steps: save the state with a zerojax.Checkpointer "
            f"and restore it with this program, or build this program with {theirs}"
        )


def _update_setting(pending: Any) -> str:
    """Return the setting under which a state keeps an update for the next step, or none."""
    if pending is None:
        return "update='after_backward' or 'in_backward'"
    is_in_forward = pending.scalars.shape == IN_FORWARD
    return "update='in_forward'" if is_in_forward else "delayed_update=True"


def _memory(is_host: bool) -> str:
    return "host memory" if is_host else "device memory"


def _expected(leaf: Any, order: StageOrder | None) -> _Expected:
    is_number = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
    takes_numbers = leaf.shape == () and is_number and not is_away(leaf)
    return _Expected(leaf.shape, leaf.dtype, leaf.sharding, is_away(leaf), takes_numbers, order)


def _is_weight_stack(name: str) -> bool:
    """Return whether a leaf of a state is a stack of weights, if the model has layers."""
    return name.startswith(tuple(f".{field}['{BLOCKS}']" for field in ("params", "frozen")))


def _is_narrow(leaf: jax.Array, expected: _Expected) -> bool:
    """Return whether a leaf is a stack of layers where records of several stages are expected."""
    order = expected.order
    return order is not None and leaf.shape == (order.num_layers, *expected.shape[2:])


def _replaces(leaf: Any, expected: _Expected) -> bool:
    """Return whether a leaf's value must be read as a number: it is not the expected scalar."""
    if not isinstance(leaf, jax.Array):
        return not isinstance(leaf, jax.ShapeDtypeStruct)
    if leaf.shape != ():
        return True
    if leaf.is_deleted():
        return False
    is_elsewhere = leaf.committed and leaf.sharding.device_set != expected.sharding.device_set
    return leaf.dtype != expected.dtype or is_elsewhere


def _scalar(leaf: Any, expected: _Expected, name: Callable[[], str]) -> jax.Array:
    """Return a number as an array of the expected dtype and sharding."""
    is_float = jnp.issubdtype(expected.dtype, jnp.floating)
    number = as_number(leaf) if is_float else as_integer(leaf)
    if number is None or not _fits(number, expected.dtype, is_float):
        kind = "finite number" if is_float else "whole number"
        raise ValueError(
            f"this state's {name()} is {shown(leaf)}: it must be a {kind} that {expected.dtype} "
            "can hold, or an array of shape () with such a number"
        )
    value = np.asarray(number, expected.dtype)
    # Without a collective: device_put would compare the value between processes, and fail with an
    # assertion.
    return jax.make_array_from_callback((), expected.sharding, lambda _: value)


def _fits(number: float, dtype: Any, is_float: bool) -> bool:
    """Return whether a dtype can hold a number.

    After rounding, the number must be finite, and 0 only if it was 0 before.
    """
    if not is_float:
        limits = jnp.iinfo(dtype)
        return int(limits.min) <= number <= int(limits.max)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.asarray(number, dtype))
    limits = jnp.finfo(dtype)
    # XLA flushes subnormal numbers of float32 and bfloat16 to 0.
    least = limits.smallest_subnormal if dtype == jnp.float16 else limits.tiny
    return number == 0 or float(least) <= abs(rounded) <= float(limits.max)


def _name(state: TrainState, index: int) -> str:
    """Return the path of a leaf."""
    return _names(as_arguments(state))[index]


def _names(tree: Tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
