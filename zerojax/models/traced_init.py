"""A function of a random key that creates a module's variables, traced once for all its uses.

Both the shapes and the values come from that trace.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex

MOST_CONSTANT_BYTES = 1 << 20
"""Maximum bytes of arrays that a trace may keep alive.

A module built from larger arrays is traced again when its parameters are created.
"""


class TracedInit:
    """A function `make(key)`, which is traced once for many uses.

    Attributes:
      abstract: the tree that `make` returns, with ShapeDtypeStruct leaves.
    """

    def __init__(self, make: Callable[[jax.Array], Any]) -> None:
        """Trace `make` for a scalar key of the default kind."""
        self._make = make
        self._key = jax.eval_shape(lambda: jax.random.key(0))
        traced: jex.ClosedJaxpr
        traced, self.abstract = jax.make_jaxpr(make, return_shape=True)(self._key)
        constant_bytes = sum(getattr(constant, "nbytes", 0) for constant in traced.consts)
        self._traced = traced if constant_bytes <= MOST_CONSTANT_BYTES else None

    def __call__(self, key: jax.Array) -> Any:
        """Return `make(key)`, from the trace if it is kept and fits the key."""
        if self._traced is None or (key.shape, key.dtype) != (self._key.shape, self._key.dtype):
            return self._make(key)
        leaves = jex.jaxpr_as_fun(self._traced)(key)
        return jax.tree.unflatten(jax.tree.structure(self.abstract), leaves)
