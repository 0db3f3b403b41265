"""Checks that a program can take a state: it was not donated, and it has the program's layout.

A scalar of the optimizer's state may be a number: users of `optax.inject_hyperparams` write
`state.opt_state.hyperparams["learning_rate"] = 1e-4`. It becomes an array of the leaf's dtype and
sharding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.given import as_integer, as_number, shown
from zerojax.state.host_memory import is_away
from zerojax.state.layout import Layout
from zerojax.state.train_state import TrainState, as_arguments, check_is_array, check_is_there

_SHOWN = 3
"""Leaves that an error lists."""


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

    def __call__(
        self, state: TrainState, tell: Callable[[Sequence[str]], None] | None = None
    ) -> TrainState:
        """Return a state that the program can take: the same one, numbers in the place of scalars
        made into arrays.

        Args:
          state: to check.
          tell: called, where numbers took the place of scalars, with a line for each: its path and
            its value.

        Raises:
          ValueError: the state was donated, or another program made it, or it is none, or a number
            is not finite.
        """
        check_is_there(state)
        leaves, structure = jax.tree.flatten(as_arguments(state))
        if structure != self._structure:
            raise ValueError(self._other_structure(state))
        made: dict[int, jax.Array] = {}
        for i, (leaf, expected) in enumerate(zip(leaves, self._expected, strict=True)):
            if expected.takes_numbers and _replaces(leaf, expected):
                made[i] = _scalar(leaf, expected, lambda i=i: _name(state, i))
                continue
            check_is_array(leaf, lambda i=i: _name(state, i))
            if is_away(leaf) != expected.is_away or leaf.shape != expected.shape:
                places = [
                    "host memory" if is_host else "device memory"
                    for is_host in (is_away(leaf), expected.is_away)
                ]
                raise ValueError(
                    f"this state's {_name(state, i)} is {leaf.shape} in {places[0]}, and this program's is {expected.shape} "
                    f"in {places[1]}: it was made by a program of another model or config"
                )
        if not made:
            return state
        if tell is not None:
            tell([f"{_name(state, i)} = {shown(leaves[i])}" for i in made])
        # Leaves on disk count as one in either form of the tree.
        given, tree = jax.tree.flatten(state)
        return jax.tree.unflatten(tree, [made.get(i, leaf) for i, leaf in enumerate(given)])

    def _other_structure(self, state: TrainState) -> str:
        """Return an error that names the leaves which a state lacks, or has beside the program's."""
        given, expected = (
            _names(as_arguments(state)),
            _names(jax.tree.unflatten(self._structure, self._expected)),
        )
        lacks = [name for name in expected if name not in set(given)]
        extra = [name for name in given if name not in set(expected)]
        found = [f"it lacks {_listed(lacks)}"] if lacks else []
        found += [f"it has {_listed(extra)}, which the program's state has not"] if extra else []
        what = f" ({', and '.join(found)})" if found else ""
        return (
            f"this state is of another structure than this program's{what}: it was made by a program of another config, or "
            "a value in it was replaced by one that is no number"
        )


def _expected(leaf: Any) -> _Expected:
    is_number = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
    takes_numbers = leaf.shape == () and is_number and not is_away(leaf)
    return _Expected(leaf.shape, leaf.dtype, leaf.sharding, is_away(leaf), takes_numbers)


def _replaces(leaf: Any, expected: _Expected) -> bool:
    """Return whether a leaf is not the expected scalar itself, so that its value has to be read as
    a number.
    """
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
            f"this state's {name()} is {shown(leaf)}: a {kind} that {expected.dtype} holds is needed, or an array of shape () "
            "with such a number"
        )
    value = np.asarray(number, expected.dtype)
    # Without a collective: device_put would compare the value between processes, and fail by an
    # assertion.
    return jax.make_array_from_callback((), expected.sharding, lambda _: value)


def _fits(number: float, dtype: Any, is_float: bool) -> bool:
    """Return whether a dtype holds a number: rounded to it, the number is finite, and 0 only where
    it was 0.
    """
    if not is_float:
        limits = jnp.iinfo(dtype)
        return int(limits.min) <= number <= int(limits.max)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.asarray(number, dtype))
    limits = jnp.finfo(dtype)
    # XLA takes float32's and bfloat16's subnormal numbers for 0.
    least = limits.smallest_subnormal if dtype == jnp.float16 else limits.tiny
    return number == 0 or float(least) <= abs(rounded) <= float(limits.max)


def _name(state: TrainState, index: int) -> str:
    """Return the path of a leaf."""
    return _names(as_arguments(state))[index]


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
