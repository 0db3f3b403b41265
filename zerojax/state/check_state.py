"""Checks that a program can take a state: it was not donated, and it has the program's layout.

A scalar of the optimizer's state may be a number: users of `optax.inject_hyperparams` write
`state.opt_state.hyperparams["learning_rate"] = 1e-4`. It becomes an array of the leaf's dtype and sharding.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.given import as_integer, as_number
from zerojax.state.host_memory import is_away
from zerojax.state.layout import Layout
from zerojax.state.train_state import TrainState, as_arguments, check_is_array, check_is_there


@dataclasses.dataclass(frozen=True)
class _Expected:
    """What a program expects of a leaf.

    Attributes:
      shape: of it.
      dtype: of it.
      sharding: of it.
      is_away: whether it is in host memory.
      takes_numbers: whether it is a scalar on the device that a number may replace.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    is_away: bool
    takes_numbers: bool


class StateCheck:
    """Compares states with a layout before every step, and so keeps what it expects of them."""

    def __init__(self, layout: Layout) -> None:
        leaves, self._structure = jax.tree.flatten(layout.abstract_state)
        self._expected = [_expected(leaf) for leaf in leaves]

    def __call__(self, state: TrainState) -> TrainState:
        """Return a state that the program can take: the same one, numbers in the place of scalars made into arrays.

        Raises:
          ValueError: the state was donated, or another program made it, or it is none, or a number is not finite.
        """
        check_is_there(state)
        leaves, structure = jax.tree.flatten(as_arguments(state))
        if structure != self._structure:
            raise ValueError(
                "this state is of another structure than this program's: it was made by a program of another config"
            )
        made: dict[int, jax.Array] = {}
        for i, (leaf, expected) in enumerate(zip(leaves, self._expected, strict=True)):
            if expected.takes_numbers and _is_number(leaf, expected):
                made[i] = _scalar(leaf, expected, lambda i=i: _name(state, i))
                continue
            check_is_array(leaf, lambda i=i: _name(state, i))
            if is_away(leaf) != expected.is_away or leaf.shape != expected.shape:
                places = ["host memory" if is_host else "device memory" for is_host in (is_away(leaf), expected.is_away)]
                raise ValueError(
                    f"this state's {_name(state, i)} is {leaf.shape} in {places[0]}, and this program's is {expected.shape} "
                    f"in {places[1]}: it was made by a program of another model or config"
                )
        if not made:
            return state
        # Leaves on disk count as one in either form of the tree.
        given, tree = jax.tree.flatten(state)
        return jax.tree.unflatten(tree, [made.get(i, leaf) for i, leaf in enumerate(given)])


def _expected(leaf: Any) -> _Expected:
    is_number = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
    takes_numbers = leaf.shape == () and is_number and not is_away(leaf)
    return _Expected(leaf.shape, leaf.dtype, leaf.sharding, is_away(leaf), takes_numbers)


def _is_number(leaf: Any, expected: _Expected) -> bool:
    """Return whether a leaf is a number, or an array that holds one in another dtype or on other devices."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, int | float | np.generic) or (isinstance(leaf, np.ndarray) and leaf.shape == ())
    if leaf.shape != () or leaf.is_deleted():
        return False
    is_elsewhere = leaf.committed and leaf.sharding.device_set != expected.sharding.device_set
    return leaf.dtype != expected.dtype or is_elsewhere


def _scalar(leaf: Any, expected: _Expected, name: Any) -> jax.Array:
    """Return a number as an array of the expected dtype and sharding."""
    is_float = jnp.issubdtype(expected.dtype, jnp.floating)
    number = as_number(leaf) if is_float else as_integer(leaf)
    if number is None or not _fits(number, expected.dtype, is_float):
        kind = "finite number" if is_float else "whole number"
        raise ValueError(f"this state's {name()} is {leaf!r}: a {kind} that {expected.dtype} holds is needed")
    return jax.device_put(np.asarray(number, expected.dtype), expected.sharding)


def _fits(number: float, dtype: Any, is_float: bool) -> bool:
    limits = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
    return float(limits.min) <= number <= float(limits.max)


def _name(state: TrainState, index: int) -> str:
    """Return the path of a leaf."""
    return jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(as_arguments(state))[0][index][0])
