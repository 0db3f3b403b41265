"""Forward and backward of one chunk of layers of every stage, each with its own microbatch.

A chunk is K layers (`zerojax.state.wide`). Its layers run in a loop, in which all stages run the
same equations: a traced block (`zerojax.streamed.traced_block`), mapped over the stages. The values
that forward saves go to a ring of slots, and gradients are added to sums:

    ring   saved[slots K, p_pipe, B, T, H]          slot * K + k holds layer k of a chunk
    sums   g[v K, p_pipe, D_fsdp, F]                chunk * K + k; on the shards of the state, or
           g[v K, R_(data, fsdp), p_pipe, D, F]     each device's own, with reduce_every="step"

The first layer of a chunk is taken out of its loop, so that the permute of a neighbor's activations
can overlap with its products (`zerojax.grads.beside`): XLA runs no collective beside a loop.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.grads import beside, unreduced_sharding
from zerojax.models import Given, Loss
from zerojax.pipeline.stages import Stages
from zerojax.pipeline.ticks import Units
from zerojax.sharding import PIPE, Spec, splits_activations
from zerojax.state import RecordSpec
from zerojax.streamed import BlockTracer, LayerInputs, ResidualPlan, StreamedPlan, derive_key
from zerojax.trees import Params, Tree

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class StageLayers:
    """The layers of all stages, with what they read in a step.

    Attributes:
      stages: operations on arrays over the stages.
      plan: records of the state.
      tracer: tracer of the block.
      residuals: the values of one layer and one microbatch that forward saves; None if it saves
        nothing, in an evaluation.
      stacks: stacks of parameters [v K, p, ...], in the order of `StackPlan.layer`.
      inputs: inputs of the layers, with a leading dim for microbatches.
      d_added: f32[], cotangent of the layers' addition to the loss, or None.
    """

    stages: Stages
    plan: StreamedPlan
    tracer: BlockTracer
    residuals: ResidualPlan
    stacks: list[Array]
    inputs: LayerInputs
    d_added: Array | None = None

    @property
    def _stack(self) -> Any:
        return self.plan.of_stacks[0]

    @property
    def _chunk_layers(self) -> int:
        order = self.plan.layout.order
        assert order is not None
        return order.chunk_layers

    # --- stacks of a step -------------------------------------------------------------------------

    def empty_ring(self, num_slots: int) -> list[Array]:
        """Return the empty ring of saved values.

        Args:
          num_slots: number of slots.
        """
        ring = list[Array]()
        for array in self.residuals.arrays:
            shape = (num_slots * self._chunk_layers, self.stages.count, *array.abstract.shape)
            empty = jnp.zeros(shape, array.abstract.dtype)
            ring.append(self._constrain(empty, (None, PIPE, *array.record.spec)))
        return ring

    def empty_sums(self) -> list[Array]:
        """Return zeros for the sums of the layers' gradients."""
        plan = self.plan
        blocks = self._stack.blocks
        sums = list[Array]()
        for i, zeros in zip(blocks, plan.zero_grads(blocks), strict=True):
            dtype = jnp.float32 if plan.layout.sums_in_float32 else plan.grad_dtype(i)
            shape = (*plan.leaves[i].lead_shape, *zeros.shape)
            spec = plan.grads[i].spec
            if plan.layout.reduces_once:
                spec = unreduced_sharding(plan.mesh, plan.gathered_spec(i)).spec
            sums.append(self._constrain(jnp.zeros(shape, dtype), (None, *spec)))
        return sums

    def _read_ring(self, ring: list[Array], index: Array) -> list[Array]:
        """Return an entry of each stage's ring: ring[n, p, ...] -> [p, ...]."""
        values = list[Array]()
        for array, stack in zip(self.residuals.arrays, ring, strict=True):
            spec = _known_spec(array.record)
            if spec is None:
                values += self.stages.take([stack], index)
            else:
                values.append(self.stages.take_in_order(stack, index, spec))
        return values

    def _write_ring(
        self, ring: list[Array], index: Array, saved: list[Array], is_used: Array
    ) -> list[Array]:
        """Write an entry of each stage's ring in place, and return the ring."""
        written = list[Array]()
        for array, stack, value in zip(self.residuals.arrays, ring, saved, strict=True):
            spec = _known_spec(array.record)
            if spec is None:
                written += self.stages.put([stack], index, [value], is_used)
            else:
                written.append(self.stages.put_in_order(stack, index, value, is_used, spec))
        return written

    def _constrain(self, a: Array, spec: Sequence[Any]) -> Array:
        sharding = NamedSharding(self.plan.mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(a, sharding)

    def constrain(self, x: Tree) -> Any:
        """Constrain activations over the stages, x[p, B, T, H]."""
        return self.stages.map(self.plan.stream.constrain)(x)

    # --- one layer of every stage -----------------------------------------------------------------

    def _read_layer(self, units: Units, k: Array) -> tuple[list[Array], Any, Any, Any]:
        """Return the gathered leaves, keys, contexts and `per_layer` of layer k of each chunk."""
        plan = self.plan
        order = plan.layout.order
        assert order is not None
        record = units.chunk * self._chunk_layers + k
        shards = list[Array]()
        for i, stack in zip(self._stack.layer, self.stacks, strict=True):
            spec = tuple(plan.params[i].spec)[1:]  # without the stages
            shards.append(self.stages.take_in_order(stack, record, spec))
        leaves = plan.gather(shards, self._stack.layer)
        layer = (units.chunk * order.num_stages + self.stages.numbers) * self._chunk_layers + k
        keys = None
        if self.inputs.keys is not None:
            keys = jax.vmap(derive_key)(self.inputs.keys[units.microbatch], layer)
        context = self.stages.pick(self.inputs.context, units.microbatch)
        per_layer = self.stages.pick(self.inputs.per_layer, layer)
        return leaves, keys, context, per_layer

    def _block_params(self, leaves: Sequence[Array]) -> Params:
        return self.tracer.block_tree(self._stack.without_tiles(leaves))

    def _forward_layer(
        self, leaves: Sequence[Array], x: Tree, key: Any, context: Any, per_layer: Any
    ) -> tuple[Tree, Loss | None, list[Array]]:
        """Return the output, the addition to the loss and the saved values of one stage's layer."""
        residuals = self.residuals
        given = Given(context, per_layer, None)
        y, added, values = residuals.block.forward(self._block_params(leaves), x, key, given)
        saved = list[Array]()
        pairs = zip(residuals.arrays, [*jax.tree.leaves(x), *values], strict=True)
        for array, value in pairs:
            saved.append(self._constrain(value, array.record.spec))
        return self.plan.stream.constrain(y), added, saved

    def _backward_layer(
        self,
        leaves: Sequence[Array],
        values: Sequence[Array],
        dy: Tree,
        key: Any,
        context: Any,
        per_layer: Any,
    ) -> tuple[list[Array], Tree]:
        """Return the gradients of one stage's layer, and the cotangent of its input."""
        x, saved = self.residuals.split(values)
        constrain = self.plan.stream.constrain
        grads, dx, _ = self.residuals.block.backward(
            self._block_params(leaves),
            constrain(x),
            key,
            Given(context, per_layer, None),
            saved,
            dy,
            self.d_added,
        )
        return jax.tree.leaves(grads), constrain(dx)

    # --- chunks -----------------------------------------------------------------------------------

    def forward(
        self, units: Units, x: Tree, ring: list[Array], added: Loss | None, work: Any
    ) -> tuple[Tree, list[Array], Loss | None, Any]:
        """Run a chunk of every stage.

        Args:
          units: the chunks, slots and microbatches.
          x: input of each stage's chunk, [p, B, T, H].
          ring: the ring of saved values; empty if nothing is saved.
          added: additions to the loss so far, or None.
          work: result of a collective, which overlaps with the first layer.

        Returns:
          The output of each stage's chunk, the ring, the additions to the loss, and `work`.
        """
        is_used = jnp.asarray(units.chunk) >= 0
        units = _clipped(units)

        def run(k: Array, x: Tree, ring: list[Array], added: Loss | None, work: Any) -> Any:
            leaves, *inputs = self._read_layer(units, k)
            (y, more, saved), work = beside(
                self.stages.map(self._forward_layer), (leaves, x, *inputs), work
            )
            if ring:
                ring = self._write_ring(ring, units.slot * self._chunk_layers + k, saved, is_used)
            return (self.constrain(y), ring, _with_stages(added, more, is_used)), work

        carry, work = run(jnp.int32(0), x, ring, added, work)

        def run_next(k: Array, carry: tuple[Tree, list[Array], Loss | None]) -> Any:
            x, ring, added = carry
            return run(k, x, ring, added, None)[0]

        y, ring, added = jax.lax.fori_loop(1, self._chunk_layers, run_next, carry)
        return y, ring, added, work

    def backward(
        self, units: Units, dy: Tree, ring: list[Array], sums: list[Array], work: Any
    ) -> tuple[Tree, list[Array], Any]:
        """Derive a chunk of every stage, and add its gradients to the sums.

        Args:
          units: the chunks, slots and microbatches.
          dy: cotangent of the output of each stage's chunk, [p, B, T, H].
          ring: the ring of saved values.
          sums: sums of the layers' gradients.
          work: result of a collective, which overlaps with the first layer derived.

        Returns:
          The cotangent of each chunk's input, the sums, and `work`.
        """
        is_used = jnp.asarray(units.chunk) >= 0
        units = _clipped(units)
        blocks = self._stack.blocks
        num_layers = self._chunk_layers
        # Rows of unreduced gradients come before the stages.
        dim = int(self.plan.layout.reduces_once)
        derive = self.stages.map(self._backward_layer, out_axes=(dim, 0))

        def run(number: Array, dy: Tree, sums: list[Array], work: Any) -> Any:
            k = num_layers - 1 - number
            leaves, *inputs = self._read_layer(units, k)
            values = self._read_ring(ring, units.slot * num_layers + k)
            (grads, dx), work = beside(derive, (leaves, values, dy, *inputs), work)
            grads = self.plan.summed_at(grads, blocks)
            record = units.chunk * num_layers + k
            sums = self.stages.add(sums, record, grads, is_used, dim + 1)
            return (self.constrain(dx), sums), work

        carry, work = run(jnp.int32(0), dy, sums, work)

        def run_next(number: Array, carry: tuple[Tree, list[Array]]) -> Any:
            dy, sums = carry
            return run(number, dy, sums, None)[0]

        dx, sums = jax.lax.fori_loop(1, num_layers, run_next, carry)
        return dx, sums, work


def _known_spec(record: RecordSpec) -> Spec | None:
    """Return the spec of a saved value, or None if the partitioner chooses how to split it."""
    is_open = PartitionSpec.UNCONSTRAINED in record.spec
    if is_open and splits_activations(record.mesh):
        return None
    return tuple(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in record.spec)


def _clipped(units: Units) -> Units:
    """Return units with valid indices for stages without work, whose results are dropped."""
    return Units(*(jnp.maximum(a, 0) for a in units))


def _with_stages(added: Loss | None, more: Loss | None, is_used: Array) -> Loss | None:
    """Return additions to the loss with those of one layer of each stage, [p], that has work."""
    if added is None or more is None:
        return None

    def add(total: Array, a: Array) -> Array:
        flags = is_used.reshape(-1, *(1,) * (a.ndim - 1))
        return total + jnp.sum(jnp.where(flags, a, 0).astype(total.dtype), 0)

    return jax.tree.map(add, added, more)
