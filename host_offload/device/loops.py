"""A loop of one trip that XLA keeps as a loop, although it knows the bound.

XLA inlines a loop of one trip. For what slices host memory that is wrong twice: the transfer may
  start at the top of the
program and hold its record on the device ever since, and a slice outside of loops is moved by a
kernel that reads host memory from the cores, and not by a copy engine. A bound that XLA does not
know keeps the loop, but the host then waits for the device to learn whether to go round again, and
an index in such a loop is moved by a kernel too.

XLA inlines no loop whose body has a side effect. Drawing a number from the device's own generator
is one, and takes one thread. `jax.random` does not use that generator, and nothing reads the
number.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Array = jax.Array
T = TypeVar("T")


def one_trip(tick: int, body: Callable[[Array, T], T], carry: T, mesh: Mesh | None = None) -> T:
    """Return `body(tick, carry)`, computed in a loop of one trip; `tick` is its counter there.

    Args:
      tick: known to XLA, so that an index that is linear in the counter has a known address.
      body: (i32[], carry) -> carry.
      carry: at least one array.
      mesh: of the program, where it is partitioned.
    """

    def kept(i: Array, carry: T) -> T:
        # Tied to all results, or JAX would leave the draw out, which no result needs.
        return jax.lax.optimization_barrier((body(i, carry), _draw(mesh)))[0]

    return jax.lax.fori_loop(tick, tick + 1, kept, carry)


def run_loop(
    start: int, stop: int, body: Callable[[Array, T], T], carry: T, mesh: Mesh | None = None
) -> T:
    """Return `carry` after `body(tick, carry)` for the ticks start .. stop - 1, in a loop that XLA
    keeps.

    Args:
      start: the first tick.
      stop: the tick after the last one.
      body: (i32[], carry) -> carry.
      carry: at least one array.
      mesh: of the program, where it is partitioned.
    """
    if stop - start == 1:
        return one_trip(start, body, carry, mesh)
    return jax.lax.fori_loop(start, stop, body, carry)


def _draw(mesh: Mesh | None) -> Array:
    """Draw a number, and use it for nothing."""
    draw = lambda: jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), ())  # noqa: E731
    if mesh is None or mesh.size == 1:
        return draw()
    # Each device by itself: the partitioner would let one device draw and send the number to the
    # others.
    return jax.shard_map(draw, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)()
