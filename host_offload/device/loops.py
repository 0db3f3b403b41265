"""A loop of one iteration that XLA keeps as a loop, although its bound is known.

XLA inlines loops of one iteration. For code that slices host memory this is bad in two ways. The
transfer may start at the beginning of the program and occupy device memory from then on. And a
slice outside of a loop is moved by a kernel, whose cores read host memory, instead of by a copy
engine. A bound unknown to XLA would keep the loop, but then the host waits for the device before
every iteration, and slices in such a loop are moved by a kernel too.

XLA does not inline a loop whose body has a side effect. Drawing a number from the device's own
generator is a side effect, and takes one thread. `jax.random` does not use that generator, and
nothing reads the number.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Array = jax.Array
T = TypeVar("T")


def one_trip(tick: int, body: Callable[[Array, T], T], carry: T, mesh: Mesh | None = None) -> T:
    """Return `body(tick, carry)`, computed in a loop of one iteration, with `tick` as its counter.

    Args:
      tick: value of the counter, known to XLA, so that an index linear in it has a known address.
      body: function (i32[], carry) -> carry.
      carry: pytree with at least one array.
      mesh: device mesh of the program, if it is partitioned.
    """

    def kept(i: Array, carry: T) -> T:
        # Tie the draw to all results, or JAX would drop it, because no result needs it.
        return jax.lax.optimization_barrier((body(i, carry), _draw(mesh)))[0]

    return jax.lax.fori_loop(tick, tick + 1, kept, carry)


def run_loop(
    start: int, stop: int, body: Callable[[Array, T], T], carry: T, mesh: Mesh | None = None
) -> T:
    """Apply `body` for the ticks start .. stop - 1, in a loop that XLA keeps; return the carry.

    Args:
      start: first tick.
      stop: tick after the last one.
      body: function (i32[], carry) -> carry.
      carry: pytree with at least one array.
      mesh: device mesh of the program, if it is partitioned.
    """
    if stop - start == 1:
        return one_trip(start, body, carry, mesh)
    return jax.lax.fori_loop(start, stop, body, carry)


def _draw(mesh: Mesh | None) -> Array:
    """Draw a random number on each device, only for the side effect."""
    draw = lambda: jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), ())  # noqa: E731
    if mesh is None or mesh.size == 1:
        return draw()
    # Under shard_map each device draws for itself; the partitioner would let one device draw and
    # send the number to all.
    return jax.shard_map(draw, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)()
