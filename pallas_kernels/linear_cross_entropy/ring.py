"""A ring of slots in shared memory for tiles of x and w; one warpgroup fills it, two empty it.

The tensor memory accelerator (TMA) copies a tile of x and a tile of w into a slot; wgmma reads both
from there. Two barriers per slot order them: `full`, on which the slot's two copies arrive, and
`empty`, on which each multiplying warpgroup arrives when the product that read the slot has ended.
It arrives one product later, so that one product is always in flight. Steps are numbered
consecutively over all tiles of a block, so the loader runs ahead into the next tile while one ends.

    loader     s:  wait empty[s - num_stages];  two copies -> slot
    multiplier s:  wait full[s];  acc += a @ b;  wait for product s - 1;  arrive empty[s - 1]
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as plgpu

COPIES = 2
"""Copies per step, the number of arrivals on a slot's `full` barrier."""
WARPGROUPS = 2
"""Multiplying warpgroups per block; one more warpgroup loads."""
# Per thread: 128 * (40 + 2 * 232) = 63 Ki of a core's 64 Ki.
LOADER_REGISTERS = 40
MULTIPLIER_REGISTERS = 232


def loop(start: Any, stop: Any, body: Callable[[Any], None]) -> None:
    """Run `body(i)` for i from `start` to `stop` in a kernel."""

    def step(i: Any, _: tuple[()]) -> tuple[()]:
        body(i)
        return ()

    lax.fori_loop(start, stop, step, ())


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots `x[num_stages, ..]` and `w[num_stages, ..]` in shared memory, and their barriers."""

    num_stages: int
    x: Any
    w: Any
    full: Any
    empty: Any

    def slot(self, step: Any) -> Any:
        """Return the slot of a step; steps are counted from the block's first."""
        return lax.rem(step, self.num_stages)

    def fill(self, step: Any, copies: Callable[[Any], list[tuple[Any, Any]]]) -> None:
        """Wait until a step's slot is empty, then start its copies.

        `copies(slot)` returns pairs of views of global and shared memory.
        """
        slot = self.slot(step)

        # In the first round every slot is empty, and nothing has arrived on its barrier.
        @pl.when(step >= self.num_stages)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        # `full` counts exactly COPIES arrivals: with fewer copies a multiplier would wait forever,
        # with more it would start too early.
        pairs = copies(slot)
        assert len(pairs) == COPIES
        for gmem, smem in pairs:
            plgpu.copy_gmem_to_smem(gmem, smem, self.full.at[slot])

    def drain(self, steps: Any) -> None:
        """Wait until all `steps` steps are consumed; barriers are then in their initial state."""
        loop(
            jnp.maximum(steps - self.num_stages, 0),
            steps,
            lambda step: plgpu.barrier_wait(self.empty.at[self.slot(step)]),
        )

    def products(
        self,
        first: Any,
        count: int,
        shape: tuple[int, int],
        operands: Callable[[Any, Any], tuple[Any, Any]],
    ) -> jax.Array:
        """Return the float32 sum of the products of `count` steps from `first`.

        Args:
          first: number of the first step.
          count: number of steps.
          shape: shape of the sum.
          operands: function such that `operands(i, slot)` returns the two operands of step `first +
            i`.
        """

        def scope(acc_ref: Any) -> jax.Array:
            def multiply(i: Any) -> None:
                slot = self.slot(first + i)
                plgpu.barrier_wait(self.full.at[slot])
                plgpu.wgmma(acc_ref, *operands(i, slot))
                plgpu.wgmma_wait(1)  # the product of the step before has ended

                # The slot of the step before `first` was released at the end of the previous sum.
                @pl.when(i > 0)
                def _():
                    plgpu.barrier_arrive(self.empty.at[self.slot(first + i - 1)])

            loop(0, count, multiply)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.empty.at[self.slot(first + count - 1)])
            return acc_ref[...]

        return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
