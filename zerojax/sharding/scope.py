"""Code that must not be affected by a mesh that the caller has in scope.

A program brings its own mesh. The caller may have another one in scope, by `jax.set_mesh`, for its
own arrays. Two things then go wrong inside the program. New arrays are created on the caller's
mesh, and JAX refuses to use them on the program's mesh. And JAX refuses operations on the program's
arrays, since their mesh is not the one in scope. So each call of a program first leaves the
caller's mesh, and arrays that the caller created on that mesh are moved (`uncommitted`,
`zerojax.sharding.batches`).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

P = ParamSpec("P")
T = TypeVar("T")
_NO_MESH = Mesh(np.empty((), dtype=object), ())


def no_mesh() -> AbstractContextManager[object]:
    """Return a context in which no mesh is in scope."""
    return nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(_NO_MESH)


def without_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` wrapped to run with no mesh in scope; it may set its own meshes."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with no_mesh():
            return function(*args, **kwargs)

    return run


def uncommitted(key: jax.Array) -> jax.Array:
    """Return a random key that programs on any mesh accept.

    The caller's key may be on another mesh. Call this with no mesh in scope. The key's bytes cross
    to the host and back.

    Args:
      key: a typed key, or a legacy uint32 key.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jnp.asarray(np.asarray(key))
    data = jnp.asarray(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def is_on_another_mesh(array: object, mesh: Mesh) -> bool:
    """Return whether an array's sharding names another mesh, even one of the same devices."""
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return False
    return array.sharding.mesh != mesh
