"""The floating leaves of a tree, real or complex, which have derivatives, apart from integers,
booleans and random keys.
"""

from typing import Any

import jax
import jax.numpy as jnp


def floating(tree: Any) -> Any:
    """Return a tree with None in place of the leaves that are not floating; a tree of floats is
    returned as it is.
    """
    return jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.inexact) else None, tree)


def merged(floats: Any, tree: Any) -> Any:
    """Return `tree` with the leaves of `floats`, which is like `floating(tree)`, in their places."""
    return jax.tree.map(
        lambda a, whole: whole if a is None else a, floats, tree, is_leaf=lambda node: node is None
    )
