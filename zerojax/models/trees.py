"""The floating leaves of a tree: real or complex leaves, which have derivatives.

Integers, booleans and random keys have none.
"""

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.trees import Tree


def floating(tree: Tree) -> Any:
    """Return a tree with None in place of each leaf that is not floating."""
    return jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.inexact) else None, tree)


def merged(floats: Any, tree: Tree) -> Any:
    """Return `tree` with its floating leaves replaced by `floats`, a tree like `floating(tree)`."""
    return jax.tree.map(
        lambda a, leaf: leaf if a is None else a, floats, tree, is_leaf=lambda node: node is None
    )
