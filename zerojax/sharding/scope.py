"""Work that is not affected by a mesh which the caller has in scope.

A program brings its own mesh. A caller may have another one in scope, by `jax.set_mesh`, for arrays
of their own. Then two things go wrong inside of the program: new arrays land on the caller's mesh,
and JAX refuses to use them on the program's; and operations on the program's arrays are refused,
since the mesh in scope is not theirs. So each call of a program first leaves the caller's mesh, and
whatever the caller made on it is moved (`uncommitted`, `zerojax.sharding.batches`).
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
    """Return a function that runs with no mesh in scope; what it does with meshes of its own is up
    to it.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with no_mesh():
            return function(*args, **kwargs)

    return run


def uncommitted(key: jax.Array) -> jax.Array:
    """Return a random key, or a legacy uint32 one, that programs of any mesh take: the caller's may
    be on another mesh.

    To be called with no mesh in scope. The key's bytes cross to the host and back.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jnp.asarray(np.asarray(key))
    data = jnp.asarray(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def is_on_another_mesh(array: object, mesh: Mesh) -> bool:
    """Return whether an array's sharding names a mesh that is not this one, though its devices may
    be the same.
    """
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return False
    return array.sharding.mesh != mesh
