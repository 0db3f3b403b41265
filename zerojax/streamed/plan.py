"""How the records of a streamed step are stored and moved.

A plan holds the specs, tiers and dtypes of every leaf, and lists the disk moves for read-ahead.

A layer's record of a kind is its shards of that kind on one device. The loops
(`zerojax.streamed.loops`) and the update policies (`zerojax.streamed.update_policies`) both read a
`StreamedPlan`, and the `StackPlan` of each run of layers (`zerojax.state.runs`). A plan does little
computation: it gathers records, and computes means and squares of gradients.

The schedule (`zerojax.streamed.schedules`) covers the records of layers. The plan adds two things
to it: the unstacked leaves (`unstacked`), and the loops over tiles inside a tick, which are known
once the block is traced.
"""

import copy
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.schedule import (
    LATE_UNSTACKED,
    UNSTACKED_PIECES,
    Move,
    Phase,
    Schedule,
    StepPlan,
    TiledSchedule,
    TileLoops,
    advise,
    build_unstacked,
    list_moves,
    stacked_schedule,
)
from zerojax.compat import most_link_groups, num_update_groups
from zerojax.config import ZeroConfig, streams
from zerojax.grads import (
    Derivative,
    ReducedEarly,
    float32_grads,
    reduced,
    unreduced_grads,
    unreduced_sharding,
)
from zerojax.models import LayeredModel, StackModel, list_stacks
from zerojax.optim import HostUpdate, RecordUpdate, unused_grads, used
from zerojax.sharding import ActivationSpec, Spec, count_rows, named
from zerojax.state import (
    DiskArgument,
    Index,
    LayerRange,
    Layout,
    RecordSpec,
    StackLeaves,
    StateRecords,
    TileGroup,
    TrainState,
    gathered_unstacked,
    host_update,
    is_encoded,
    is_stored,
    layer_ranges,
    pick,
    read_layer,
    unstacked_leaves,
)
from zerojax.streamed.schedules import (
    chunked_unstacked,
    early_unstacked,
    head_pieces,
    plan_schedules,
    unstacked_groups,
)
from zerojax.tiling import marked

Array = jax.Array
Kept = Mapping[str, Mapping[str, int]]
"""Bytes that one layer of each run saves off the device for backward.

They have the form of `record_bytes`, by the run's name.
"""
Loops = Sequence[Mapping[str, Sequence[tuple[TileLoops, str]]]]
"""Loops over tiles in a tick of each phase, for each run of layers."""


@dataclasses.dataclass(frozen=True)
class RecordLeaves:
    """The leaves of a layer's record, or of a tile's.

    Attributes:
      trained: indices of the trainable leaves.
      frozen: indices of the frozen leaves.
      state_on_device: whether all of these records have their optimizer state on the device,
        although its tier is another one.
    """

    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    state_on_device: bool = False

    @property
    def all(self) -> tuple[int, ...]:
        """Indices of all leaves: trainable, then frozen."""
        return self.trained + self.frozen


@dataclasses.dataclass(frozen=True, eq=False)
class StackPlan:
    """One run of layers of a stack (all layers or a segment) and its schedule.

    Attributes:
      stack: the model's stack of layers.
      run: the layers of the stack that belong to the run, and their saved activations.
      schedule: schedule of the run's loops.
      reading: the phase of a forward that only reads the parameters, such as an evaluation's.
      nodes: indices of the leaves with which a block is called, in the order of its tree; for an
        encoded leaf, the indices of its arrays in an `Encoded`.
      tree: tree structure of a block's parameters.
    """

    stack: StackModel
    run: LayerRange
    schedule: Schedule
    reading: Phase
    nodes: tuple[Any, ...]
    tree: Any

    @functools.cached_property
    def operands(self) -> tuple[int, ...]:
        """Indices of the leaves with which a block is called, in the order of its tree.

        The first array of an encoded leaf stands for it.
        """
        return tuple(jax.tree.leaves(node)[0] for node in self.nodes)

    @property
    def leaves(self) -> StackLeaves:
        """The leaves of the stack, by index."""
        return self.run.stack

    @property
    def name(self) -> str:
        """The name of the stack; "" if it is the only one."""
        return self.leaves.name

    @property
    def model(self) -> LayeredModel:
        """The model with only this stack."""
        return self.stack.model

    @property
    def num_layers(self) -> int:
        """Number of layers in the run."""
        return self.run.num_layers

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the trainable leaves whose shards form a layer's record."""
        return self.leaves.blocks

    @property
    def layer(self) -> tuple[int, ...]:
        """Indices of leaves whose parameters are fetched together: `blocks`, then frozen ones."""
        return (*self.leaves.blocks, *self.leaves.frozen_blocks)

    @property
    def record(self) -> RecordLeaves:
        """The leaves of a layer's record."""
        leaves = self.leaves
        is_on_device = self.run.device_layers == self.run.stop
        return RecordLeaves(leaves.blocks, leaves.frozen_blocks, is_on_device)

    @property
    def groups(self) -> tuple[TileGroup, ...]:
        """The groups of tile stacks whose records are tiles."""
        return self.leaves.groups

    @property
    def loops(self) -> list[tuple[TileGroup, TileLoops]]:
        """The groups of tile stacks, each with the loops over its tiles."""
        if isinstance(self.schedule, TiledSchedule):
            return list(zip(self.groups, self.schedule.tiles, strict=True))
        return []

    @property
    def drains_beside_unstacked(self) -> bool:
        """Whether the record that is updated last is stored while unstacked leaves are loaded."""
        return any(phase.list_ticks(LATE_UNSTACKED, "load") for phase in self.schedule.phases)

    def number(self, layer: Any) -> Any:
        """Return the number of one of its layers among all stacks' layers, used for random keys."""
        return layer + self.stack.first if self.stack.first else layer

    def group_nodes(self, group: TileGroup) -> dict[int, Any]:
        """Return the entries of `nodes` that are stacks of a group, by operand, in tree order."""
        pairs = zip(self.operands, self.nodes, strict=True)
        return {operand: node for operand, node in pairs if operand in group.weights}

    def without_tiles(self, leaves: Sequence[Array]) -> list[Any]:
        """Return a block's leaves in the order of its tree, with None for stacks of tiles.

        Args:
          leaves: the leaves of `layer`, in its order.
        """
        by_index = dict(zip(self.layer, leaves, strict=True))
        return [by_index.get(i) for i in self.leaves.in_tree]


class StreamedPlan:
    """Records, tiers and schedule of one streamed step.

    Attributes:
      count: number of microbatches.
      stream: sharding of a layer's input and output, for one microbatch.
      state_records: how the state is stored.
      leaves: the parameter leaves, trainable leaves first, then frozen ones (`Layout.all_leaves`).
      update: the update by records, or None if the full tree is updated on the device.
      unused: indices of the leaves whose gradients the optimizer never uses; the norm leaves them
        out.
      host: the update on the host, or None.
      of_stacks: plan of each run of layers, in order.
      schedule: schedule of the step.
      stacked: indices of the trainable leaves of all stacks of layers, in order.
      unstacked: indices of the trainable unstacked leaves.
      early_unstacked: unstacked leaves updated before the layers' backward and written back in its
        first tick.
      head_pieces: unstacked leaves updated in pieces during the ticks of backward, and how they are
        cut.
      late_unstacked: the remaining unstacked leaves.
      chunked_unstacked: late_unstacked larger than a layer's record, and their number of pieces.
      drained: the run whose last record is stored while late_unstacked are loaded, or None.
      stacks: indices of all stacked parameters: `stacked`, then frozen ones.
      params: how each parameter is stored.
      grads: how each gradient is stored from backward to update.
      params_away: whether trainable parameters are stored off the device.
      grads_away: whether gradients are stored off the device.
      grads_in_memory: whether gradients are stored in stacks in host memory that live inside a
        step, which XLA writes and reads.
    """

    def __init__(
        self, model: LayeredModel, state_records: StateRecords, update: RecordUpdate | None
    ) -> None:
        """Plan the step and check that it can be streamed.

        Raises:
          ValueError: the schedule exceeds `device_budget_bytes`.
        """
        layout = state_records.layout
        config = layout.config
        self.state_records = state_records
        self.layout = layout
        self.config = config
        self.mesh = layout.mesh
        self.leaves = layout.all_leaves
        self.count = config.num_microbatches
        self.stream = ActivationSpec(layout.mesh, is_stream=config.sequence_parallel)
        self._early = ReducedEarly()
        self.update = update
        if update is None:
            self.unused = unused_grads(layout.update_jaxpr, len(layout.leaves))
        else:
            self.unused = update.unused

        frozen = sorted(
            i for stack in layout.stacks for leaf_ids in stack.frozen_parts for i in leaf_ids
        )
        self.stacked = layout.stacked
        self.unstacked = layout.unstacked
        self.stacks = (*layout.stacked, *frozen)

        self.grads = state_records.stored_grads
        self.params = [state_records.weight(i) for i in range(len(self.leaves))]
        self.params_away = config.params != "device"
        self.grads_away = state_records.grads_tier != "device" and config.update != "in_backward"
        self.grads_in_memory = (
            self.grads_away
            and state_records.grads_tier == "pinned_host"
            and config.update != "in_forward"
        )

        self._schedule(model)
        self._check_budget({})
        self.host = self._host_update()

    def of_model(self, model: LayeredModel) -> "StreamedPlan":
        """Return this plan for the blocks of another model with the same parameters."""
        models = {stack.name: stack for stack in list_stacks(model)}
        plan = copy.copy(self)
        plan.of_stacks = tuple(
            dataclasses.replace(stack, stack=models[stack.name]) for stack in self.of_stacks
        )
        return plan

    def _schedule(self, model: LayeredModel) -> None:
        """Choose when unstacked leaves are updated, and schedule the runs of layers."""
        layout = self.layout
        records = self.state_records
        self._runs = layer_ranges(layout)
        self.head_pieces = head_pieces(records, self._runs, self.update)
        self.chunked_unstacked = chunked_unstacked(
            records, self._runs, self.update, self.head_pieces
        )
        self.early_unstacked = early_unstacked(records, self._runs)
        before_layers = (*self.early_unstacked, *self.head_pieces)
        self.late_unstacked = tuple(i for i in self.unstacked if i not in before_layers)

        planned = self._plan_schedules(self.config.prefetch_distance, self.config.gather_ahead)
        schedules = {
            name: dataclasses.replace(schedule, stream=str(self.stream))
            for name, schedule in planned.items()
        }
        models = {stack.name: stack for stack in list_stacks(model)}
        reading = self._plan_reading()
        self.of_stacks = tuple(
            _stack_plan(
                models[run.stack.name],
                run,
                schedules[run.name],
                reading[run.name].phase("forward"),
                layout,
            )
            for run in self._runs
        )
        self.schedule = stacked_schedule(schedules)
        self.drained = next(
            (stack for stack in self.of_stacks if stack.drains_beside_unstacked), None
        )

    def _host_update(self) -> HostUpdate | None:
        """Return the update on the host, or None if the device updates."""
        config = self.config
        if self.update is None or config.update_on != "host":
            return None
        stashes = config.update != "in_backward" and (
            config.grads != "device" or config.delayed_update or config.update == "in_forward"
        )
        # An update on the host moves full layers (`untiled_setting`), so gradient records are never
        # tiles.
        on_disk = dict[int, RecordSpec]()
        for i in self.layout.blocks:
            if self.grads[i].disk_records is not None:
                on_disk[i] = self.grads[i]
        return HostUpdate(self.update, stashes=stashes, summed=self.count, on_disk=on_disk)

    def _plan_reading(self) -> dict[str, Schedule]:
        """Return schedules whose forward only reads the parameters, by the name of the run."""
        config = self.config
        if config.update == "in_forward":
            config = dataclasses.replace(config, update="after_backward")
        return self._plan_schedules(config.prefetch_distance, config.gather_ahead, config=config)

    def _plan_schedules(
        self,
        distance: int,
        gather_ahead: bool,
        kept: Kept | None = None,
        config: ZeroConfig | None = None,
    ) -> dict[str, Schedule]:
        """Return the schedule of each run of layers by its name.

        Args:
          distance: prefetch distance, in ticks.
          gather_ahead: whether the next layer is gathered while the current one computes.
          kept: bytes that each run's layers save for backward, if known.
          config: config to plan for; None for the step's own.
        """
        return plan_schedules(
            self.state_records,
            self._runs,
            self.chunked_unstacked,
            self.head_pieces,
            self.grads,
            distance,
            gather_ahead,
            kept or {},
            config or self.config,
        )

    def _check_budget(self, kept: Kept, loops: Loops | None = None) -> None:
        """Raise ValueError if a step has more bytes in flight than `device_budget_bytes`.

        Args:
          kept: bytes that one layer of each run saves for backward; empty before there is a batch.
          loops: loops over tiles, as in `steps`.
        """
        config = self.config
        budget = config.device_budget_bytes
        distance = config.prefetch_distance
        ahead = config.gather_ahead
        if budget is None:
            return

        def build(distance: int, ahead: bool) -> StepPlan:
            return self._step_plan(
                self._plan_schedules(distance, ahead, kept), loops, unstacked_first=False
            )

        phase, peak = build(distance, ahead).peak
        if peak > budget:
            # `gather_ahead` alone may be what makes the step stream.
            # A resident step has no `grads_dtype`.
            plain = dataclasses.replace(config, gather_ahead=False, grads_dtype=None)
            is_needed = not streams(plain)
            choices = (False,)
            if ahead:
                choices = (True,) if is_needed else (True, False)
            counted = "with this batch's saved activations off the device, " if kept else ""
            raise ValueError(
                f"device_budget_bytes={budget}: {counted}prefetch_distance={distance} with "
                f"gather_ahead={ahead} puts {peak} bytes in flight on a device, in {phase}, "
                f"{peak - budget} over the budget; " + advise(build, distance, choices, budget)
            )

    def steps(
        self, loops: Loops | None, unstacked_first: bool, kept: Kept | None = None
    ) -> StepPlan:
        """Return all operations of a step.

        Args:
          loops: loops over tiles, for each run of layers; None for the schedules' own.
          unstacked_first: whether the unstacked leaves are updated before the layers.
          kept: bytes that one layer of each run saves for backward, if known.

        Raises:
          ValueError: more bytes are in flight than `device_budget_bytes`.
        """
        if kept is not None:
            self._check_budget(kept, loops)
        schedules = self._plan_schedules(
            self.config.prefetch_distance, self.config.gather_ahead, kept
        )
        return self._step_plan(schedules, loops, unstacked_first)

    def reading_steps(self, loops: Loops) -> StepPlan:
        """Return the operations of a step whose forward only reads the parameters.

        An evaluation runs its forward.
        """
        return self._step_plan(self._plan_reading(), loops, unstacked_first=False)

    def _step_plan(
        self, schedules: Mapping[str, Schedule], loops: Loops | None, unstacked_first: bool
    ) -> StepPlan:
        """Return all operations of a step, given the schedules of its layers.

        Without `loops`, the schedules' default loops over tiles are used.
        """
        if loops is not None:
            schedules = {
                name: with_tiles(schedule, tile_loops)
                for (name, schedule), tile_loops in zip(schedules.items(), loops, strict=True)
            }
        phases = [phase for schedule in schedules.values() for phase in schedule.phases]
        beside = {*self.early_unstacked, *self.head_pieces}
        for phase in phases:
            if phase.list_ticks(LATE_UNSTACKED, "load") or phase.list_ticks(
                UNSTACKED_PIECES, "load"
            ):
                beside |= set(self.late_unstacked)
        pieces = {} if self.update is None else self.update.num_pieces()
        leaves = unstacked_leaves(self.state_records, beside, pieces)
        host = host_update(self.config, self.layout.has_master)
        unstacked = build_unstacked(
            leaves, self.layout.has_master, host, gathered_unstacked(self.state_records)
        )
        names = {str(i): leaf.name for i, leaf in enumerate(self.leaves)}
        return StepPlan(schedules, unstacked, unstacked_first, names, self.count)

    def link_groups(self, leaf_ids: Sequence[int]) -> int:
        """Return the number of groups into which a record's arrays are split in backward.

        One group is loaded while another is stored. Each turn needs products of its own, and
        backward has three for each matrix.

        Args:
          leaf_ids: indices of the record's leaves.
        """
        if self.config.link_groups is not None:
            return self.config.link_groups
        num_matrices = sum(len(self.leaves[i].record_shape) > 1 for i in leaf_ids)
        return max(2, min(most_link_groups(), 2 * num_matrices))

    def forward_groups(self) -> int:
        """Return the number of groups into which a record's arrays are split in forward.

        Forward has one product for each matrix, and each turn ends with a product of its own. With
        more than two turns some wait for their transfers and others for their products: predicted
        for a Llama of 6.7 B parameters on one H200, 65,536 tokens, 2 to 12 groups take 5.85 to
        6.50 s.
        """
        return self.config.link_groups or 2

    def update_groups(self) -> int:
        """Return the number of groups into which an update after backward splits a record's arrays.

        There are no products between the turns.
        """
        return self.config.link_groups or num_update_groups()

    def unstacked_groups(self) -> list[list[int]]:
        """Bin the uncut `late_unstacked`, largest first, into groups no larger than a layer's
        record.

        A single leaf may be larger.
        """
        assert self.drained is not None
        return unstacked_groups(
            self.layout,
            [i for i in self.late_unstacked if i not in self.chunked_unstacked],
            self.drained.blocks,
        )

    def derivative(self, derivative: Derivative, leaf_ids: Sequence[int | None]) -> Derivative:
        """Return a derivative whose gradients are summed in `reduce_dtype`.

        With `reduces_once` it returns each device's own sums.

        Args:
          derivative: the derivative.
          leaf_ids: indices of the leaves of its gradients, in order; None for an operand that is
            computed from parameters.
        """
        # A loop over tiles stays one equation, where a block can be cut.
        is_loop = lambda eqn: marked(eqn) is not None  # noqa: E731
        if self.layout.reduces_in_float32:
            derivative = float32_grads(derivative, self.layout.platform, is_loop)
        if self.layout.reduces_once:
            unsharded = [() if i is None else self.gathered_spec(i) for i in leaf_ids]
            return unreduced_grads(derivative, self.mesh, is_loop, unsharded, self._early)
        return derivative

    def grad_dtype(self, index: int) -> Any:
        """Return the dtype in which a leaf's gradient is stored."""
        return self.layout.grad_dtype(index)

    def grad_shape(self, index: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a leaf's stored gradient; if stacked, of one layer or tile."""
        return jax.ShapeDtypeStruct(self.leaves[index].record_shape, self.grad_dtype(index))

    def empty(self, record: RecordSpec, a: Any, lead: Sequence[int]) -> Any:
        """Return an empty stack [*lead, ...] of a record, on the device or on disk."""
        if record.disk_records is not None:
            return DiskArgument(record.disk_records.first_token(), (*lead, *a.shape), a.dtype)
        stack = jnp.zeros((*lead, *a.shape), a.dtype)
        return jax.lax.with_sharding_constraint(
            stack, named(self.mesh, (*(None,) * len(lead), *record.spec))
        )

    def empty_grads(self) -> list[Any]:
        """Return empty stacks for the gradients of the `stacked` leaves."""
        return [
            self.empty(self.grads[i], self.grad_shape(i), self.leaves[i].lead_shape)
            for i in self.stacked
        ]

    def abstract_stack(self, record: RecordSpec, a: Any, lead: Sequence[int]) -> Any:
        """Return the shape and sharding of a stack [*lead, ...] of a record in its tier."""
        sharding = named(self.mesh, (*(None,) * len(lead), *record.spec), record.tier)
        return jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype, sharding=sharding)

    def abstract_grads(self) -> list[Any]:
        """Return shapes and shardings of the `stacked` leaves' gradients, in their tiers."""
        return [
            self.abstract_stack(self.grads[i], self.grad_shape(i), self.leaves[i].lead_shape)
            for i in self.stacked
        ]

    def read_params(
        self, stacks: Sequence[Any], leaf_ids: Sequence[int], index: Index
    ) -> list[Array]:
        """Return the shards of one layer or tile, on the device.

        Args:
          stacks: stacks of parameters, in the order of `self.stacks`.
          leaf_ids: indices of the record's leaves, with frozen leaves last.
          index: index of the record.
        """
        # Trainable and frozen leaves are separate records: each is one fetch from disk.
        trained = [i for i in leaf_ids if not self.leaves[i].frozen]
        frozen = [i for i in leaf_ids if self.leaves[i].frozen]
        shards = list[Array]()
        for record_leaves in (trained, frozen):
            stacks_of_record = self.pick(stacks, record_leaves)
            shards += read_layer(pick(self.params, record_leaves), stacks_of_record, index)
        return shards

    def away(self, leaf_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the leaves of `leaf_ids` whose parameters are off the device, and are fetched."""
        return tuple(i for i in leaf_ids if self.params[i].is_away)

    def take_params(
        self, stacks: Sequence[Any], leaf_ids: Sequence[int], fetched: Sequence[Array], index: Index
    ) -> list[Array]:
        """Return the shards of one layer or tile, given its fetched arrays.

        Args:
          stacks: stacks of parameters, in the order of `self.stacks`.
          leaf_ids: indices of the record's leaves, with frozen leaves last.
          fetched: shards of the leaves `away(leaf_ids)`.
          index: index of the record.
        """
        away = self.away(leaf_ids)
        if not away:
            return self.read_params(stacks, leaf_ids, index)
        arrays = dict(zip(away, fetched, strict=True))
        on_device = [i for i in leaf_ids if i not in arrays]
        arrays |= zip(on_device, self.read_params(stacks, on_device, index), strict=True)
        return [arrays[i] for i in leaf_ids]

    def weight_stacks(self, blocks: Any) -> list[Any]:
        """Return the stacks of parameters in the order of `stacks`.

        `blocks` is the tree of all layers' parameters.
        """
        in_tree = [i for i in self.layout.in_tree if self.leaves[i].is_stacked]
        by_index = dict(zip(in_tree, jax.tree.leaves(blocks, is_leaf=is_stored), strict=True))
        return [by_index[i] for i in self.stacks]

    def frozen_stacks(self, state: TrainState) -> list[Any]:
        """Return the frozen stacks of parameters, in the order of `self.stacks`."""
        if state.frozen is None:
            return []
        leaves = jax.tree.leaves(state.frozen, is_leaf=is_stored)
        return [leaves[i - len(self.layout.leaves)] for i in self.stacks[len(self.stacked) :]]

    def pick(self, stacks: Sequence[Any], leaf_ids: Sequence[int]) -> list[Any]:
        """Return the arrays of some leaves.

        `stacks` is ordered like `self.stacks` or `self.stacked`.
        """
        return [stacks[self.stacks.index(i)] for i in leaf_ids]

    def put(
        self, stacks: Sequence[Any], leaf_ids: Sequence[int], values: Sequence[Any]
    ) -> list[Any]:
        """Return `stacks`, ordered like `self.stacked`, with `values` for the leaves `leaf_ids`."""
        by_index = dict(zip(leaf_ids, values, strict=True))
        return [by_index.get(i, stack) for i, stack in zip(self.stacked, stacks, strict=True)]

    def gather(self, shards: Sequence[Array], leaf_ids: Sequence[int]) -> list[Array]:
        """All_gather the shards of some leaves of a record: W[D_fsdp, F] -> W[D, F]."""
        return [
            self._gather(shard, self.params[i].spec, self.gathered_spec(i))
            for i, shard in zip(leaf_ids, shards, strict=True)
        ]

    def whole(self, gathered: Sequence[Array], leaf_ids: Sequence[int]) -> list[Array]:
        """Constrain a gathered record to stay gathered in the body of a loop over microbatches.

        Otherwise, XLA after 0.10 may pass shards into a loop that follows a loop over layers, and
        gather them in each of its iterations.
        """
        shardings = [named(self.mesh, self.gathered_spec(i)) for i in leaf_ids]
        return [
            jax.lax.with_sharding_constraint(w, sharding)
            for w, sharding in zip(gathered, shardings, strict=True)
        ]

    def gathered_spec(self, index: int) -> Spec:
        """Return the spec of a leaf's gathered record: the leaf's own spec, without ZeRO's axes."""
        leaf = self.leaves[index]
        return leaf.spec.base[leaf.lead :]

    def _gather(self, shard: Array, spec: Spec, gathered_spec: Spec) -> Array:
        if gathered_spec == spec:
            return shard
        # Both ends are constrained. Without the first constraint, GSPMD might gather the array from
        # which the shard was cut.
        shard = jax.lax.with_sharding_constraint(shard, named(self.mesh, spec))
        return jax.lax.with_sharding_constraint(shard, named(self.mesh, gathered_spec))

    def zero_grads(self, indices: Sequence[int]) -> list[Array]:
        """Return zeros in which the gradients of some leaves are summed over microbatches.

        The leaves belong to one record, or are unstacked.
        """
        zeros = list[Array]()
        for i in indices:
            shape = self.leaves[i].record_shape
            if self.layout.reduces_once:
                shape = (count_rows(self.mesh, self.gathered_spec(i)), *shape)
            zeros.append(jnp.zeros(shape, jnp.float32))
        return self.summed_at(zeros, indices)

    def summed_at(self, grads: Sequence[Array], indices: Sequence[int]) -> list[Array]:
        """Constrain gradients to where they are summed over microbatches.

        They are summed on their shards, or each device sums its own.
        """
        if not self.layout.reduces_once:
            return self.on_shards(grads, indices)
        constrained = list[Array]()
        for g, i in zip(grads, indices, strict=True):
            sharding = unreduced_sharding(self.mesh, self.gathered_spec(i))
            # Results of a loop over tiles have no row dim.
            if g.ndim == len(sharding.spec):
                g = jax.lax.with_sharding_constraint(g, sharding)
            constrained.append(g)
        return constrained

    def reduced(self, grads: Sequence[Array], indices: Sequence[int]) -> list[Array]:
        """Return gradients summed over microbatches, on the shards of the optimizer state."""
        if not self.layout.reduces_once:
            return self.on_shards(grads, indices)
        on_shards = list[Array]()
        for g, i in zip(grads, indices, strict=True):
            sharding = self.grads[i].sharding
            has_row_dim = g.ndim > len(self.leaves[i].record_shape)
            if has_row_dim:
                on_shards.append(reduced(g, sharding, self.gathered_spec(i)))
            else:
                on_shards.append(jax.lax.with_sharding_constraint(g, sharding))
        return on_shards

    def on_shards(self, grads: Sequence[Array], indices: Sequence[int]) -> list[Array]:
        """Constrain gradients or weights to the shards of the optimizer state.

        They belong to one layer, or to unstacked leaves.
        """
        return [
            jax.lax.with_sharding_constraint(g, self.grads[i].sharding)
            for g, i in zip(grads, indices, strict=True)
        ]

    def stored(self, grads: Sequence[Array], indices: Sequence[int]) -> list[Array]:
        """Return gradients in the dtype in which they are stored until the update.

        Args:
          grads: gradients summed over microbatches, on their shards.
          indices: indices of their leaves.
        """
        if self.config.grads_dtype is None:
            return list(grads)
        return [_rounded(g, self.grad_dtype(i)) for g, i in zip(grads, indices, strict=True)]

    def mean(self, grad: Array) -> Array:
        """Return the float32 mean over microbatches of a summed gradient."""
        grad = grad.astype(jnp.float32)
        return grad if self.count == 1 else grad / self.count

    def unscaled(self, grad: Array, state: TrainState) -> Array:
        """Return the mean gradient without the loss scale."""
        grad = self.mean(grad)
        return grad if state.loss_scale is None else grad / state.loss_scale.scale

    def squares(self, grads: Sequence[Array], leaf_ids: Sequence[int], state: TrainState) -> Array:
        """Return the sum of squares of the unscaled gradients that the optimizer uses: f32[].

        Args:
          grads: gradients of some leaves, summed over microbatches.
          leaf_ids: indices of these leaves.
          state: the state, which holds the loss scale.
        """
        grads = used(grads, leaf_ids, self.unused)
        return sum((jnp.sum(jnp.square(self.unscaled(g, state))) for g in grads), jnp.float32(0))


def _rounded(grad: Array, dtype: Any) -> Array:
    """Return a gradient in `dtype`, rounded even if it is used as soon as it is computed.

    XLA may leave out a cast to a narrower dtype that it casts back.
    """
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        bits = jnp.finfo(dtype)
        grad = jax.lax.reduce_precision(grad, bits.nexp, bits.nmant)
    return grad.astype(dtype)


def _stack_plan(
    stack: StackModel, run: LayerRange, schedule: Schedule, reading: Phase, layout: Layout
) -> StackPlan:
    tree = layout.block_tree(stack.name)
    nodes = jax.tree.leaves(jax.tree.unflatten(tree, run.stack.in_tree), is_leaf=is_encoded)
    return StackPlan(stack, run, schedule, reading, tuple(nodes), tree)


# --- disk reads and writes ------------------------------------------------------------------------


def moves(
    plan: StreamedPlan, steps: StepPlan, phases: Collection[str] | None = None
) -> tuple[Move, ...]:
    """Return the disk moves of a step, or of some of its phases, in program order.

    The engine reads ahead in this order.
    """
    if plan.layout.disk is None:
        return ()
    names = {stack.run.name: (stack.name, stack.run.activations_kind) for stack in plan.of_stacks}
    return list_moves(steps, plan.layout.disk.kinds.keys(), phases, names)


def with_tiles(
    schedule: Schedule, loops: Mapping[str, Sequence[tuple[TileLoops, str]]]
) -> Schedule:
    """Return a schedule with the loops over tiles of its traced block, by phase."""
    if not isinstance(schedule, TiledSchedule):
        return schedule
    return schedule.with_tiles(
        {
            phase: [(tiles.name, tile_phase) for tiles, tile_phase in phase_loops]
            for phase, phase_loops in loops.items()
        }
    )
