"""A function of a random key that makes a module's variables, traced once for its shapes and for
its numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex

MOST_CONSTANT_BYTES = 1 << 20
"""Arrays that a trace may hold on to; a module made from larger ones is traced again when its
parameters are made.
"""


class TracedInit:
    """A function `make(key)`, which is called once for many uses.

    Attributes:
      abstract: the tree that `make` returns, of ShapeDtypeStruct.
    """

    def __init__(self, make: Callable[[jax.Array], Any]) -> None:
        """Trace `make`, for a scalar key of the default kind."""
        self._make, self._key = make, jax.eval_shape(lambda: jax.random.key(0))
        traced: jex.ClosedJaxpr
        traced, self.abstract = jax.make_jaxpr(make, return_shape=True)(self._key)
        constant_bytes = sum(getattr(constant, "nbytes", 0) for constant in traced.consts)
        self._traced = traced if constant_bytes <= MOST_CONSTANT_BYTES else None

    def __call__(self, key: jax.Array) -> Any:
        """Return what `make(key)` returns."""
        if self._traced is None or (key.shape, key.dtype) != (self._key.shape, self._key.dtype):
            return self._make(key)
        leaves = jex.jaxpr_as_fun(self._traced)(key)
        return jax.tree.unflatten(jax.tree.structure(self.abstract), leaves)
