"""The loop body of a pipelined step: a tick, with one forward and one backward unit of every stage.

    x[p_pipe, B, T, H]   dy <- dx of the stage above                               beside F
                         x  = where(first, embed(microbatch), x)
                         y, saved = F(x);  ring[slot] = saved
                         x <- y of the stage below                                 beside B
                         loss, dy[last] = head and its derivative
                         dx, g = B(ring[slot], dy);  sums += g

Forward and backward units of a tick are of different microbatches. The ticks of a phase are one
loop: "fill" has only forward units, "drain" only backward units (`zerojax.pipeline.schedule`). A
stage without a unit computes on what it has, and its results are dropped.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.models import Loss, Metrics, floating
from zerojax.pipeline.layers import StageLayers
from zerojax.pipeline.stages import Stages
from zerojax.pipeline.ticks import Ticks
from zerojax.sharding import (
    CONTEXT,
    PIPE,
    TENSOR,
    as_entry,
    batch_axes,
)
from zerojax.streamed import EmbedHead
from zerojax.trees import Batch, Params, Tree

Array = jax.Array


class Carry(NamedTuple):
    """Values that the ticks of a step pass on.

    Attributes:
      x: input of each stage's next chunk, [p, B, T, H].
      dx: cotangent of the input of each stage's last derived chunk; None for leaves that are not
        floating.
      ring: ring of the values that forward saved.
      sums: sums of the layers' gradients.
      unstacked: sums of the gradients of embedding and head.
      loss: f32[], sum of the losses of the microbatches.
      metrics: sums of the head's metrics.
      added: sums of what the layers add to the loss, or None.
    """

    x: Tree
    dx: Tree
    ring: list[Array]
    sums: list[Array]
    unstacked: list[Array]
    loss: Array
    metrics: Metrics
    added: Loss | None


@dataclasses.dataclass(frozen=True, eq=False)
class StepTicks:
    """The ticks of one step.

    Attributes:
      stages: operations on arrays over the stages.
      layers: the layers of all stages.
      embed_head: embedding and head.
      unstacked: their leaves, sharded.
      batch: all microbatches.
      keys: their random keys, or None.
      scale: f32[], loss scale.
      total_weight: weight of the loss over all microbatches, or None if the loss is a mean.
      num_chunks: v, number of chunks of each stage.
    """

    stages: Stages
    layers: StageLayers
    embed_head: EmbedHead
    unstacked: Params
    batch: Batch
    keys: Array | None
    scale: Array
    total_weight: Array | None
    num_chunks: int

    def first(self, x: Tree, num_slots: int, added: Loss | None) -> Carry:
        """Return the values before the first tick.

        Args:
          x: shapes of the input of the first layer, of one microbatch.
          num_slots: number of slots of the ring.
          added: shapes of what a layer adds to the loss, or None.
        """
        plan = self.layers.plan
        zeros = jax.tree.map(lambda a: jnp.zeros((self.stages.count, *a.shape), a.dtype), x)
        zeros = self.layers.constrain(zeros)
        done = jax.eval_shape(lambda: self._derive_head(_zeros_like(x), jnp.int32(0)))
        sums = [jnp.zeros(a.shape, jnp.float32) for a in done[0]]
        return Carry(
            x=zeros,
            dx=floating(zeros),
            ring=self.layers.empty_ring(num_slots),
            sums=self.layers.empty_sums(),
            unstacked=plan.summed_at(sums, plan.unstacked),
            loss=jnp.float32(0),
            metrics=_zeros_like(done[1][2]),
            added=jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), added),
        )

    def run(self, phase: str, carry: Carry, tick: Ticks) -> Carry:
        """Run one tick.

        Args:
          phase: "fill", "steady" or "drain".
          carry: the values so far.
          tick: the tick of the schedule.
        """
        if phase == "fill":
            return self._forward(carry, tick, None)[0]
        dy = self.stages.send_down(carry.dx)
        if phase == "drain":
            return self._backward(carry, tick, dy, None)
        carry, dy, y = self._run_forward_beside(carry, tick, dy)
        x = self.stages.send_up(y)
        carry, dy = self._run_head(carry, tick, y, dy)
        return self._backward(carry, tick, dy, x)

    def evaluate(self, x: Tree, tick: Ticks, added: Loss | None) -> tuple[Tree, Tree, Loss | None]:
        """Run the forward units of one tick of an evaluation, which saves nothing.

        Args:
          x: input of each stage's chunk, [p, B, T, H].
          tick: the tick.
          added: sums of what the layers add to the loss, or None.

        Returns:
          The input of each stage's next chunk, the output of each stage, and `added`.
        """
        carry = Carry(x, None, [], [], [], jnp.float32(0), {}, added)
        carry, _, y = self._forward(carry, tick, None)
        return carry.x, y, carry.added

    # --- parts of a tick --------------------------------------------------------------------------

    def _forward(self, carry: Carry, tick: Ticks, dy: Tree) -> tuple[Carry, Tree, Tree]:
        """Run the forward units; return the carry with the next inputs, `dy`, and the outputs."""
        carry, dy, y = self._run_forward_beside(carry, tick, dy)
        return carry._replace(x=self.stages.send_up(y)), dy, y

    def _run_forward_beside(self, carry: Carry, tick: Ticks, dy: Tree) -> tuple[Carry, Tree, Tree]:
        """Run the forward units, beside which `dy` arrives; return the carry, `dy`, the outputs."""
        units = tick.forward
        batch, key = self._microbatch(tick.enters)

        # Every stage looks up the same tokens, of which the first stage's are used: the partitioner
        # would divide the look-up over the stages otherwise, and gather the result.
        def embed(batch: Batch) -> Tree:
            x, _ = self.embed_head.embed(self.unstacked, batch, key, None)
            return self.layers.plan.stream.constrain(x)

        entering = self.stages.map(embed)(self.stages.repeat(batch))
        is_first = (self.stages.numbers == 0) & (units.chunk == 0)
        x = self.layers.constrain(self.stages.select(is_first, entering, carry.x))
        y, ring, added, dy = self.layers.forward(units, x, carry.ring, carry.added, dy)
        return carry._replace(ring=ring, added=added), dy, y

    def _run_head(self, carry: Carry, tick: Ticks, y: Tree, dy: Tree) -> tuple[Carry, Tree]:
        """Run the head on the last stage's output; return the carry, and `dy` with its result."""
        last = self.stages.count - 1
        y = jax.tree.map(lambda a: a[last], y)

        def derive(y: Tree, sums: list[Array]) -> Any:
            grads, done = self._derive_head(self.spread(y), tick.meets_head)
            return _added(sums, grads), done

        def skip(y: Tree, sums: list[Array]) -> Any:
            _, done = jax.eval_shape(derive, y, sums)
            return sums, _zeros_like(done)

        # Gradients are added inside of the branch: its results would be arrays of their own.
        sums = carry.unstacked
        if self.num_chunks == 1:
            sums, (value, dz, metrics) = derive(y, sums)
        else:
            sums, (value, dz, metrics) = jax.lax.cond(tick.meets_head >= 0, derive, skip, y, sums)
        is_last = (self.stages.numbers == last) & (tick.backward.chunk == self.num_chunks - 1)
        carry = carry._replace(
            unstacked=sums,
            loss=carry.loss + value,
            metrics=jax.tree.map(jnp.add, carry.metrics, metrics),
        )
        return carry, self.stages.select(is_last, self._collect(dz), dy)

    def _backward(self, carry: Carry, tick: Ticks, dy: Tree, x: Tree) -> Carry:
        """Run the backward units, beside which the next inputs `x` arrive, if there are any."""
        dx, sums, x = self.layers.backward(
            tick.backward, self.layers.constrain(dy), carry.ring, carry.sums, x
        )

        def derive(dx: Tree, sums: list[Array]) -> list[Array]:
            batch, key = self._microbatch(tick.leaves)
            return _added(sums, self.embed_head.derive_embed(self.unstacked, batch, key, dx))

        leaving = self.spread(jax.tree.map(lambda a: a[0], dx))
        unstacked = jax.lax.cond(
            tick.leaves >= 0, derive, lambda dx, sums: sums, leaving, carry.unstacked
        )
        return carry._replace(
            x=carry.x if x is None else x,
            dx=dx,
            sums=sums,
            unstacked=unstacked,
        )

    def _derive_head(self, y: Tree, number: Any) -> tuple[list[Array], tuple[Array, Tree, Any]]:
        """Return the head's gradients of the unstacked leaves, and (loss, dy, metrics)."""
        batch, key = self._microbatch(number)
        grads, (value, dy, metrics, _) = self.embed_head.derive_head(
            self.unstacked, y, batch, key, self.scale, total_weight=self.total_weight
        )
        return grads, (value, dy, metrics)

    def _microbatch(self, number: Any) -> tuple[Batch, Array | None]:
        """Return a microbatch and its key, on all stages."""
        number = jnp.maximum(number, 0)
        take = lambda a: jax.lax.dynamic_index_in_dim(a, number, 0, keepdims=False)  # noqa: E731
        return jax.tree.map(take, self.batch), None if self.keys is None else self.keys[number]

    def spread(self, x: Tree) -> Any:
        """Split the tokens of one microbatch's activations over the stages too.

        In a stream that `tensor` splits, each device sends its own tokens, and they are gathered
        over `tensor` where they arrive.
        """
        if self.layers.plan.stream.is_stream:
            x = jax.tree.map(lambda a: self._split_tokens(a, (PIPE, TENSOR)), x)
        return jax.tree.map(lambda a: self._split_tokens(a, (PIPE,)), x)

    def _collect(self, dy: Tree) -> Any:
        """Return cotangents whose tokens `spread` has split, on their way back to a stage."""
        if self.layers.plan.stream.is_stream:
            dy = jax.tree.map(lambda a: self._split_tokens(a, (PIPE, TENSOR)), dy)
        return dy

    def _split_tokens(self, a: Array, axes: tuple[str, ...]) -> Array:
        """Split dim 1 of an array over `context` and more axes, if it divides by them."""
        mesh = self.stages.mesh
        axes = tuple(axis for axis in (CONTEXT, *axes) if mesh.shape.get(axis, 1) > 1)
        size = math.prod(mesh.shape[axis] for axis in axes)
        if a.ndim < 3 or a.shape[1] % size:
            return a
        rest = (PartitionSpec.UNCONSTRAINED,) * (a.ndim - 2)
        spec = PartitionSpec(batch_axes(mesh), as_entry(axes), *rest)
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))


def _added(totals: list[Array], terms: list[Array]) -> list[Array]:
    """Return sums with more terms, in the dtypes of the sums."""
    return [total + a.astype(total.dtype) for total, a in zip(totals, terms, strict=True)]


def _zeros_like(tree: Any) -> Any:
    """Return zeros of the shapes of a tree."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
