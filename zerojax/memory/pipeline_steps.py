"""A pipelined step as a list of operations (`host_offload.schedule.ops`).

    fill, steady, drain    the ticks of the pipeline (`zerojax.pipeline.schedule`)
    reduce                 with reduce_every="step", each record's gradients after the ticks
    update, unstacked      as in a streamed step

A tick does in all stages, each with units of its own,

    fill, steady     embed; F over the K layers of a chunk; send x up
    steady           send dy down; exchange y, head, exchange dy
    steady, drain    send dy down; B over the K layers; exchange dx; embed's derivative

A unit is numbered by its place in the order of its stage: tick t runs unit t of the first stage
forward, and unit t - (v p - 1) of the last stage backward. With several chunks, only some ticks
meet the head or leave the first stage, and a phase is a loop for each run of equal ticks.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from host_offload.schedule import Loop, Op, Phase, Record, StepPlan
from zerojax.pipeline import PipelinePhase, PipelineStep
from zerojax.state import record_bytes

HEAD = "head and loss"
"""`Record.leaves` of the head's computation."""
ORDER = ("fill", "steady", "drain", "reduce", "update", "unstacked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Bytes that one device holds or sends in a tick.

    Attributes:
      x: one microbatch's activations between layers.
      spread: the same, with the tokens split over the stages too.
      embed: temporary memory of the embedding.
      forward: temporary memory of one layer's forward.
      head: temporary memory of the head and its derivative.
      backward: temporary memory of one layer's backward.
      embed_backward: temporary memory of the embedding's derivative.
      gathered: parameters of "embed", "head" and "layer" that are gathered at one time, or 0.
      head_grads: gradients of the head in one microbatch.
      reduced: the largest gradient of a layer, reduced.
    """

    x: int
    spread: int
    embed: int
    forward: int
    head: int
    backward: int
    embed_backward: int
    gathered: dict[str, int]
    head_grads: int
    reduced: int


def pipeline_operations(step: PipelineStep, sizes: UnitBytes) -> StepPlan:
    """Return all operations of a pipelined step.

    Args:
      step: the step.
      sizes: bytes of its units, for a batch.
    """
    base = step.plan.steps(None, unstacked_first=step.policy.unstacked_first)
    (schedule,) = base.stacks.values()
    builder = _Ticks(step, sizes)
    phases = [builder.phase(phase) for phase in step.table.phases if phase.num_ticks]
    phases += builder.reduce()
    phases += [phase for phase in schedule.phases if phase.name == "update"]
    return dataclasses.replace(
        base,
        stacks={"": dataclasses.replace(schedule, phases=tuple(phases))},
        unstacked={"unstacked": base.unstacked["unstacked"]},
        num_microbatches=1,
        order=ORDER,
    )


class _Ticks:
    """Writes the loops of a pipeline's ticks."""

    def __init__(self, step: PipelineStep, sizes: UnitBytes) -> None:
        self.step = step
        self.sizes = sizes
        self.num_layers = step.order.chunk_layers
        self.first_backward = step.table.phase("fill").stop
        stack = step.stack
        self.record = record_bytes(
            step.plan.state_records, stack.blocks, stack.leaves.frozen_blocks
        )
        self.reduces_once = step.layout.reduces_once

    def phase(self, phase: PipelinePhase) -> Phase:
        """Return a phase as loops of ticks with the same operations."""
        ticks = phase.ticks
        # With one chunk, the code of the head is part of every steady tick.
        meets_head = (ticks.meets_head >= 0) | (self.step.table.num_chunks == 1)
        flags = zip(meets_head.tolist(), (ticks.leaves >= 0).tolist(), strict=True)
        loops = list[Loop]()
        start = phase.start
        for (has_head, leaves), run in itertools.groupby(flags):
            trips = len(list(run))
            ops = tuple(self._ops(phase.name, start, has_head, leaves))
            loops.append(Loop(start, trips, 1, ops))
            start += trips
        return Phase(name=phase.name, loops=tuple(loops))

    def reduce(self) -> list[Phase]:
        """Return the loop that reduces each record's gradients, or nothing."""
        if not self.reduces_once or not self.step.stack.blocks:
            return []
        num_records = self.step.order.num_records
        # The sums are read where they are.
        op = Op("reduce", Record("grads"), num_records - 1, "network", self.record["grads"])
        held = Op("compute", Record("grads"), num_records - 1, "compute")
        return [Phase(name="reduce", loops=(Loop(0, num_records, -1, (op, held)),))]

    def _ops(self, phase: str, tick: int, has_head: bool, leaves: bool) -> Iterator[Op]:
        """Yield the operations of a phase's first tick with these flags."""
        sizes = self.sizes
        unit = tick - self.first_backward
        if phase != "fill":
            yield Op("send", Record("dy"), unit, "network", sizes.x)
        if phase != "drain":
            yield self._run("embed", tick, self._gather("embed"), sizes.embed)
            yield self._layers("forward", tick)
            yield Op("send", Record("x"), tick, "network", sizes.x)
        if phase == "steady" and has_head:
            yield Op("exchange", Record("y"), unit, "network", sizes.spread)
            yield self._run(HEAD, unit, self._gather("head"), sizes.head)
            if not self.reduces_once:
                # Until they are reduced, which XLA does beside the layers.
                yield Op("reduce", Record("grads", HEAD), unit, "network", sizes.head_grads)
            yield Op("exchange", Record("dy"), unit, "network", sizes.x)
        if phase != "fill":
            yield self._layers("backward", unit)
            yield Op("exchange", Record("dx"), unit, "network", sizes.spread)
        if leaves:
            yield self._run("embed", unit, [], sizes.embed_backward, is_backward=True)

    def _gather(self, unit: str) -> list[Op]:
        size = self.sizes.gathered[unit]
        leaves = HEAD if unit == "head" else unit
        return [Op("gather", Record("gathered", leaves), 0, "network", size)] if size else []

    def _run(
        self, name: str, number: int, gathers: list[Op], working: int, *, is_backward: bool = False
    ) -> Op:
        """Return the operation that computes embedding or head."""
        ops = [*gathers, Op("compute", Record("layer", name), number, "compute", working)]
        if is_backward and not self.reduces_once:
            ops.append(Op("reduce", Record("grads", name), number, "network"))
        inner = Phase(name=name, loops=(Loop(0, 1, 1, tuple(ops)),))
        return Op("run", Record("layer", name), number, "compute", inner=inner)

    def _layers(self, direction: str, number: int) -> Op:
        """Return the operation that computes a unit: the K layers of a chunk."""
        is_backward = direction == "backward"
        first = self.num_layers - 1 if is_backward else 0
        working = self.sizes.backward if is_backward else self.sizes.forward
        ops = list[Op]()
        if gathered := self.sizes.gathered["layer"]:
            ops.append(Op("gather", Record("gathered"), first, "network", gathered))
        ops.append(Op("compute", Record("layer"), first, "compute", working))
        if is_backward and not self.reduces_once and self.step.stack.blocks:
            # Each leaf's gradient is reduced, and added to the sums, as soon as it is computed.
            ops.append(Op("reduce", Record("grads"), first, "network", self.sizes.reduced))
        loop = Loop(0, self.num_layers, -1 if is_backward else 1, tuple(ops))
        return Op(
            "run",
            Record("layer", direction),
            number,
            "compute",
            inner=Phase(name="layer", loops=(loop,)),
        )
