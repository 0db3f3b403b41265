"""A parameter tree taken apart into trained and frozen leaves, and put together again.

    whole = join(trained, frozen)        each of them the structure of the parameters, None in the place of the other's leaves

A frozen leaf may stand for several arrays, as a tree in its place: they pass through both functions as they are.
"""

from typing import Any

import jax

from zerojax.state.train_state import is_stored


def split_frozen(flags: Any, whole: Any) -> tuple[Any, Any]:
    """Return the trained and the frozen part of a tree; `flags` is a tree of bool over the parameters, or None: none is."""
    if flags is None:
        return whole, None
    pick = lambda wanted: jax.tree.map(lambda flag, leaf: leaf if flag == wanted else None, flags, whole)  # noqa: E731
    return pick(False), pick(True)


def join_frozen(trained: Any, frozen: Any) -> Any:
    """Return the whole tree; `frozen` is None where nothing is frozen."""
    if frozen is None:
        return trained
    is_leaf = lambda node: node is None or is_stored(node)  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=is_leaf)
