"""Measured seconds of parts of a step: one program each, the fastest of a few runs on the devices.

Arrays are created from shapes alone and placed as the step places them: activations split over the
batch, a layer's parameters gathered. The fastest run counts because other work on the machine only
slows a run down.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zerojax.models import floating
from zerojax.sharding import ActivationSpec, named
from zerojax.streamed import StackLoops
from zerojax.trees import Params, Tree

_REPEATS = 9
_SECONDS = 1.0


class Timed(NamedTuple):
    """Time and memory of a program on one device.

    Attributes:
      seconds: fastest run time, in seconds.
      working: bytes of temporary memory, excluding arguments and results.
    """

    seconds: float
    working: int


class Stopwatch:
    """Stopwatch that times functions on the devices of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        """Time on the devices of `mesh`."""
        self.mesh = mesh

    def call(self, function: Callable[..., Any], *args: Any) -> Timed:
        """Time a function.

        Args:
          function: function of arrays or pytrees of arrays.
          *args: shapes, or pytrees of shapes, of its arguments.
        """
        return self._timed(function, self.arrays(args))

    def block(
        self, loops: StackLoops, blocks: Mapping[str, Any], args: Any
    ) -> tuple[Timed, dict[str, Timed]]:
        """Time a block's forward, and its derivative in each mode.

        Args:
          loops: loops of the block's stack.
          blocks: traced block by mode.
          args: shapes of the block's arguments: parameters, input, key and batch.

        Returns:
          The forward's time, and the derivative's time by mode.
        """
        params, x, key, inputs = args
        gathered = self._gathered(loops, params)
        data = self.arrays((x, key, inputs))
        forward = self._timed(blocks["remat"].forward, (gathered, *data))
        backward: dict[str, Timed] = {}
        for mode, block in blocks.items():
            # Two modes that save the same values run the same program. If it were timed twice, one
            # of the modes would seem faster.
            same = [known for known in backward if _has_same_backward(block, blocks[known])]
            if same:
                backward[mode] = backward[same[0]]
                continue
            residuals = self.arrays(list(block.shapes))
            dy = floating(data[0])
            d_added = jnp.float32(1) if block.adds else None
            backward[mode] = self._timed(block.backward, (gathered, *data, residuals, dy, d_added))
        return forward, backward

    def _gathered(self, loops: StackLoops, params: Params) -> Params:
        """Return arrays of the shapes of a layer's parameters, gathered as the block reads them."""
        shapes, tree = jax.tree.flatten(params)
        arrays = list[jax.Array]()
        for shape, i in zip(shapes, loops.stack.operands, strict=True):
            leaf = loops.plan.leaves[i]
            spec = () if leaf.decodes is not None else leaf.spec.base[leaf.lead :]
            arrays.append(self._array(shape, named(self.mesh, spec)))
        return jax.tree.unflatten(tree, arrays)

    def arrays(self, tree: Tree) -> Any:
        """Return arrays of the given shapes, placed as the step places them.

        A shape with a sharding uses it. Without a sharding, an array is split if its dim 0 is the
        batch.
        """
        batch_size = max((a.shape[0] for a in jax.tree.leaves(tree) if a.shape), default=0)
        spec = ActivationSpec(self.mesh)

        def place(a: Any) -> jax.Array:
            sharding = getattr(a, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                sharding = named(self.mesh, spec.given(a.shape, batch_size))
            return self._array(a, sharding)

        return jax.tree.map(place, tree)

    def _array(self, a: Any, sharding: NamedSharding) -> jax.Array:
        """Return an array of the shape and dtype of `a`."""
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)

        def fill() -> jax.Array:
            if not jnp.issubdtype(a.dtype, jnp.inexact):
                return jnp.zeros(a.shape, a.dtype)
            # Small mixed-sign values, unlike zeros or ones, keep sums as small as in a model.
            indices = jax.lax.iota(jnp.float32, max(1, a.size))[: a.size]
            return (jnp.sin(indices) * 0.05).reshape(a.shape).astype(a.dtype)

        return jax.jit(fill, out_shardings=sharding)()

    def _timed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Timed:
        """Compile a function, and time the fastest of a few runs."""
        compiled = jax.jit(function).lower(*args).compile()
        jax.block_until_ready(compiled(*args))
        times = list[float]()
        began = time.perf_counter()
        while not times or (len(times) < _REPEATS and time.perf_counter() - began < _SECONDS):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            times.append(time.perf_counter() - start)
        stats = compiled.memory_analysis()
        working = 0 if stats is None else stats.temp_size_in_bytes
        return Timed(min(times), working)


def _has_same_backward(block: Any, other: Any) -> bool:
    """Return whether two modes of a block have the same backward."""
    return (
        type(block) is type(other)
        and block.residuals == other.residuals
        and block.apart.keys() == other.apart.keys()
    )
