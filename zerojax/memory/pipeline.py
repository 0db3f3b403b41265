"""Bytes that a pipelined step takes in addition to its arguments, and sends.

The records in flight are read from its list of operations (`zerojax.memory.pipeline_steps`). In
each tick a device holds, whatever the number of microbatches is,

    sums     of gradients: its own in float32 with reduce_every="step", otherwise on shards
    ring     saved values: slots x K layers of a chunk
    x, dx    of the microbatches that the stages pass on

and what the largest of its units needs: embedding, forward or backward of one layer, head. With
T = v M + p - 1 ticks in each direction, it sends

    layers             K T gathers in each direction at stage 3; one reduction a step, or K T;
                       with one reduction, K T all_reduces over `context`
    embedding          at stage 3 gathers in T ticks, and for M derivatives
    head               2 M gathers at stage 3, for each microbatch's loss and derivative
    between stages     x in T ticks, dx in T ticks
    for the head       y to the stages' tokens, and dy back, in M ticks; dx in T ticks
"""

from typing import Any

import jax

from host_offload.schedule import StepPlan
from zerojax.memory.collectives import num_leaf_shards, splits_state
from zerojax.memory.kept import pipeline_kept
from zerojax.memory.leaves import (
    decoded_bytes,
    grad_elements,
    grad_itemsize,
    local_bytes,
    reduced_itemsize,
    unreduced_bytes,
)
from zerojax.memory.pipeline_steps import UnitBytes, pipeline_operations
from zerojax.memory.pipeline_traces import UnitTraces
from zerojax.memory.report import RunningBytes
from zerojax.pipeline import PipelineStep
from zerojax.sharding import DATA, STAGES, TENSOR, context_size, local_elements, stored_spec
from zerojax.state import Leaf
from zerojax.trees import Batch

UNSTACKED_UNITS = ("embed", "head", "embed_backward")
"""The computations of a tick outside of the layers."""


class PipelineBytes:
    """Counts the bytes of one step for a batch.

    Attributes:
      traces: the computations of a tick.
      operations: all operations of the step, with their bytes.
    """

    def __init__(self, step: PipelineStep, abstract_batch: Batch) -> None:
        """Trace the step's units for a batch.

        Args:
          step: the step.
          abstract_batch: tree of ShapeDtypeStruct.
        """
        self.step = step
        self.layout = step.layout
        self.microbatch = microbatch_shapes(step, abstract_batch)
        self.traces = UnitTraces(step, self.microbatch)
        self._leaves_read = {unit: self.traces.read_leaves(unit) for unit in UNSTACKED_UNITS}
        self._sizes = self._unit_bytes()
        self.operations: StepPlan = pipeline_operations(step, self._sizes)

    # --- bytes held -------------------------------------------------------------------------------

    def _unit_bytes(self) -> UnitBytes:
        """Return the bytes of the units of a tick."""
        traces = self.traces
        layout = self.layout
        gathers = STAGES[layout.config.stage].params
        in_float32 = layout.reduces_once or layout.reduces_in_float32
        grad_size = 4 if in_float32 else None

        def working(unit: str) -> int:
            # Layers are copied out of their stacks, unless they are gathered.
            copies = unit in ("forward", "backward") and not gathers
            return traces.working_bytes(unit, copies, grad_size)

        shapes = jax.tree.leaves(traces.x)
        has_chunks = self.step.table.num_chunks > 1
        return UnitBytes(
            x=sum(map(local_bytes, shapes, traces.x_specs, [layout.mesh] * len(shapes))),
            spread=sum(map(local_bytes, shapes, traces.spread_specs, [layout.mesh] * len(shapes))),
            embed=working("embed"),
            forward=working("forward"),
            # A conditional has copies of the sums to which it adds.
            head=working("head") + (self._sums_bytes("head") if has_chunks else 0),
            backward=working("backward"),
            embed_backward=working("embed_backward") + self._sums_bytes("embed"),
            gathered=self._gathered_bytes(),
            head_grads=self._head_grads_bytes(),
            reduced=self._reduced_bytes(),
        )

    def _gathered_bytes(self) -> dict[str, int]:
        """Return the bytes that each unit has gathered at one time: leaves one after another."""
        layout = self.layout
        gathered = {"embed": 0, "head": 0, "layer": 0}
        if not STAGES[layout.config.stage].params and not layout.encodings:
            return gathered
        for leaf in layout.all_leaves:
            unit = "layer" if leaf.is_stacked else leaf.path[0].key
            size = decoded_bytes(leaf, layout)
            if STAGES[layout.config.stage].params and num_leaf_shards(leaf, layout.mesh) > 1:
                size += (
                    local_elements(leaf.shape, leaf.spec.base, layout.mesh) * leaf.dtype.itemsize
                )
            if leaf.is_stacked:
                size //= leaf.shape[0]
            gathered[unit] = max(gathered[unit], size)
        # A layer's next leaf arrives while products read one, and the head's for its derivative.
        gathered["layer"] *= 2
        gathered["head"] *= 2
        return gathered

    def _reduced_bytes(self) -> int:
        """Return the bytes of the largest reduced gradient of a layer."""
        layout = self.layout
        is_sharded = STAGES[layout.config.stage].opt_state
        largest = 0
        for index in self.step.stack.blocks:
            leaf = layout.leaves[index]
            elements = local_elements(leaf.shape, stored_spec(leaf.spec, is_sharded), layout.mesh)
            size = elements // leaf.shape[0] * reduced_itemsize(layout, leaf)
            largest = max(largest, size)
        return largest

    def _sums_bytes(self, unit: str) -> int:
        """Return the bytes of the sums of the gradients of the embedding or the head."""
        layout = self.layout
        is_sharded = STAGES[layout.config.stage].opt_state and not layout.reduces_once
        elements = 0
        for index in self._leaves_read[unit]:
            leaf = layout.all_leaves[index]
            if not leaf.frozen:
                elements += local_elements(
                    leaf.shape, stored_spec(leaf.spec, is_sharded), layout.mesh
                )
        return 4 * elements

    def _head_grads_bytes(self) -> int:
        """Return the bytes of the head's gradients in one microbatch, before they are reduced."""
        layout = self.layout
        num_bytes = 0
        for index in self._leaves_read["head"]:
            leaf = layout.all_leaves[index]
            if not leaf.frozen:
                elements = local_elements(leaf.shape, leaf.spec.base, layout.mesh)
                num_bytes += elements * reduced_itemsize(layout, leaf)
        return num_bytes

    def running(self) -> RunningBytes:
        """Return the bytes of the step in addition to its arguments, and over the host link."""
        layout = self.layout
        operations = self.operations
        sums = 4 if layout.sums_in_float32 else grad_itemsize(layout)
        grads = sums * grad_elements(layout)
        activations = 2 * self._sizes.x
        activations += sum(value.num_bytes for value in pipeline_kept(self.step, self.microbatch))
        gathered = max(self._sizes.gathered.values())
        ticks = max(operations.find_peak(phase.name) for phase in self.step.table.phases)
        device = {
            "grads": grads,
            "unreduced": unreduced_bytes(layout),
            "gathered": gathered,
            "activations": activations,
        }
        held = sum(device.values())
        peak = max(
            held - gathered + ticks,
            # After the ticks the ring is free, and then the sums.
            held - gathered - activations + self._handed_bytes(),
            self._update_bytes(),
        )
        device["in_flight"] = max(0, peak - held)
        return RunningBytes(
            device,
            {"grads": 0, "activations": 0},
            link={
                "to_device": operations.moved("up", called=False),
                "to_host": operations.moved("down", called=False),
            },
            called={
                "to_device": operations.moved("up", called=True),
                "to_host": operations.moved("down", called=True),
            },
        )

    def _handed_bytes(self) -> int:
        """Return the bytes of gradients after the ticks, beside the sums, when the ring is free.

        Each record's gradients are reduced and written to the stacks that wait for the update.
        """
        layout = self.layout
        host = self.step.host
        handed = 0
        if host is None or not host.stashes:
            handed = grad_elements(layout, blocks=True) * grad_itemsize(layout)
        if layout.reduces_once:
            handed += self.operations.find_peak("reduce")
            # The sums of embedding and head have been reduced.
            handed -= unreduced_bytes(layout, blocks=False)
        return handed

    def _update_bytes(self) -> int:
        """Return the bytes of an update of the full tree: gradients, and parameters to gather."""
        layout = self.layout
        stage = STAGES[layout.config.stage]
        if self.step.update is not None or self.step.host is not None:
            return 0  # one record at a time
        num_bytes = grad_elements(layout) * grad_itemsize(layout)
        if stage.opt_state and not stage.params:
            for leaf in layout.leaves:
                for spec in (leaf.spec.sharded, leaf.spec.base):
                    elements = local_elements(leaf.shape, spec, layout.mesh)
                    num_bytes += elements * leaf.dtype.itemsize
        return num_bytes

    # --- bytes sent -------------------------------------------------------------------------------

    def collectives(self) -> dict[str, int]:
        """Return the bytes that each device sends in a step, by collective."""
        sent: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
        for index, leaf in enumerate(self.layout.all_leaves):
            for name, num_bytes in self._sent_for(index, leaf).items():
                sent[name] += num_bytes
        for parts in (self._sent_between_stages(), self._sent_over_tensor()):
            for name, num_bytes in parts.items():
                sent[name] = sent.get(name, 0.0) + num_bytes
        return {name: int(n) for name, n in sent.items()}

    @property
    def _num_ticks(self) -> int:
        """The number of ticks in each direction, T."""
        return self.step.table.time

    def _num_uses(self, index: int, leaf: Leaf) -> tuple[float, float]:
        """Return how often a step gathers a leaf at stage 3, and reduces its gradient.

        A stacked leaf counts its layers of a stage together.
        """
        table = self.step.table
        if leaf.is_stacked:
            passes = self._num_ticks / table.num_chunks
            gathers, reductions = 2 * passes, passes
        else:
            uses = {
                "embed": self._num_ticks,
                "embed_backward": table.num_microbatches,
                # The loss and its derivative gather on their own.
                "head": 2 * table.num_microbatches,
            }
            reductions = table.num_microbatches
            gathers = sum(uses[unit] for unit in uses if index in self._leaves_read[unit])
        return gathers, 1 if self.layout.reduces_once else reductions

    def _sent_for(self, index: int, leaf: Leaf) -> dict[str, float]:
        """Return the bytes that each device sends for a leaf's weights and gradients."""
        layout = self.layout
        mesh = layout.mesh
        stage = STAGES[layout.config.stage]
        gathers, reductions = self._num_uses(index, leaf)
        shards = num_leaf_shards(leaf, mesh)
        replicas = mesh.shape[DATA]
        elements = local_elements(leaf.shape, leaf.spec.base, mesh)
        size = elements * reduced_itemsize(layout, leaf)
        # The sums have no rows over `context`: each tick adds up its layers' gradients.
        context = context_size(mesh) if layout.reduces_once else 1
        over_context = 0.0
        if leaf.is_stacked:
            over_context = 2 * size * _ring(context) * gathers / 2
        if not splits_state(layout, leaf):
            copies = shards * replicas // context
            all_reduced = 2 * size * _ring(copies) * reductions + over_context
            return {} if leaf.frozen else {"all_reduce": all_reduced}
        ring = elements * _ring(shards)
        sent = {"all_gather": ring * leaf.dtype.itemsize * (gathers if stage.params else 1)}
        if leaf.frozen:
            return sent if stage.params else {}
        shards //= context
        sent["reduce_scatter"] = size * _ring(shards) * reductions
        sent["all_reduce"] = 2 * size / shards * _ring(replicas) * reductions + over_context
        return sent

    def _sent_between_stages(self) -> dict[str, float]:
        """Return the bytes that each device sends over `pipe` for activations."""
        table = self.step.table
        sizes = self._sizes
        backward_ticks = self._num_ticks
        heads = table.num_microbatches
        share = _ring(table.num_stages)
        return {
            "pipe_permute": sizes.x * 2 * self._num_ticks,
            "pipe_all_to_all": sizes.x * share * (heads + backward_ticks),
            "pipe_all_gather": sizes.x * share * heads,
        }

    def _sent_over_tensor(self) -> dict[str, float]:
        """Return the bytes that each device sends over `tensor` for activations."""
        if self.layout.mesh.shape[TENSOR] == 1:
            return {}
        table = self.step.table
        layers = self._num_ticks * self.step.order.chunk_layers
        times = {
            "embed": self._num_ticks,
            "forward": layers,
            "head": table.num_microbatches,
            "backward": layers,
            "embed_backward": table.num_microbatches,
        }
        sent = dict[str, float]()
        for unit, count in times.items():
            for name, num_bytes in self.traces.sent_over_tensor(unit).items():
                name = f"{TENSOR}_{name}"
                sent[name] = sent.get(name, 0.0) + count * num_bytes
        return sent


def microbatch_shapes(step: PipelineStep, abstract_batch: Batch) -> Batch:
    """Return the shapes of one microbatch.

    Args:
      step: the step.
      abstract_batch: tree of ShapeDtypeStruct.
    """
    count = step.config.num_microbatches

    def shape(a: Any) -> jax.ShapeDtypeStruct:
        shape = (a.shape[0] // count, *a.shape[1:]) if a.shape else a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(shape, abstract_batch)


def _ring(devices: int) -> float:
    """Return the share of an array that each device sends in a ring, (n - 1) / n."""
    return (devices - 1) / devices
