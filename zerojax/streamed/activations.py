"""Where saved activations are stored until backward: on the device, in host memory or on disk.

`zerojax.streamed.residuals` decides which values of a layer are saved and which are recomputed.
This module gives each saved value, and the layer's input, a `RecordSpec`. Forward fills a stack
`[L, ...]` of each, over the L layers of a run, and backward reads it:

    device         the stack is created inside the program
    pinned_host    the stack is an argument of the program, donated and returned
    nvme           records of the kind "activations"; only the layer's input can be on disk

With `partition_activations`, arrays that `tensor` does not already shard are stored sharded over
it: forward keeps a slice, which moves no data, and backward gathers it (ZeRO-R's Pa;
arXiv:1910.02054, section 6.1).

    computed  x[B_(data, fsdp), T, H]
    stored    x[B_(data, fsdp), T_tensor, H]
    gathered  x[B_(data, fsdp), T, H]

All of this follows from the shapes of a batch (`BlockTracer.plan_residuals`). If tiles are records,
the traced block is also cut at its loops over tiles (`zerojax.streamed.tiled_block`).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from host_offload.schedule import TileLoops
from zerojax.activations import MODES, flow, has_island
from zerojax.models import Given, Loss, call_block, check_block, in_stack
from zerojax.sharding import (
    CONTEXT,
    TENSOR,
    ActivationSpec,
    LeafSpec,
    Spec,
    as_entry,
    leaf_spec,
    named,
    parse_axes,
    splits_activations,
)
from zerojax.state import RecordSpec, pick, read_layer, write_layer
from zerojax.streamed.microbatches import LayerInputs
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.streamed.residuals import plan_layer
from zerojax.streamed.tiled_block import TiledBlock
from zerojax.streamed.traced_block import TracedBlock
from zerojax.trees import Params, Tree

Array = jax.Array
Scratch = dict[str, list[Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class SavedArray:
    """One array that forward saves of each layer, and how it is stored.

    Attributes:
      record: how the array is stored.
      abstract: shape and dtype, with all microbatches.
      gathered_spec: spec without `tensor`, if the array is stored sharded over `tensor` and
        gathered for backward; else None.
      replicated: why the array is stored unsharded although activations are to be partitioned, or
        None.
    """

    record: RecordSpec
    abstract: jax.ShapeDtypeStruct
    gathered_spec: Spec | None
    replicated: str | None

    def constrain_stored(self, value: Array) -> Array:
        """Constrain a value to its spec in the stacks, if it is gathered for backward."""
        if self.gathered_spec is None:
            return value
        return _constrain(value, self.record.mesh, self.record.spec)

    def constrain_gathered(self, value: Array) -> Array:
        """Constrain a value to its spec outside the stacks, if its stored spec differs."""
        if self.gathered_spec is None:
            return value
        return _constrain(value, self.record.mesh, self.gathered_spec)


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualPlan:
    """The arrays that forward saves of each layer for backward, and how they are stored.

    With several microbatches, dim 0 of each array counts them.

    Attributes:
      block: the traced block, which returns and reads the residuals.
      arrays: the saved arrays: first the leaves of the layer's input, then the block's residuals.
      x_names: "x" and a path for each leaf of the layer's input.
      x_tree: tree structure of the layer's input.
      lead: number of leading dims before a microbatch's own dims: 1 with several microbatches, else
        0.
      tiled: the block cut at its loops over tiles, if tiles are records; else None.
      first: index in the stack of layers of the run's first layer, where the stacks of saved arrays
        begin.
    """

    block: TracedBlock
    arrays: tuple[SavedArray, ...]
    x_names: tuple[str, ...]
    x_tree: Any
    lead: int
    tiled: TiledBlock | None = None
    first: int = 0

    @property
    def records(self) -> tuple[RecordSpec, ...]:
        """How each array is stored, in the order of `arrays`."""
        return tuple(array.record for array in self.arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """Display name of each array, in the order of `arrays`.

        A leaf of the input is "x" and a path. A residual has the name that the model gave it, or
        its number and the equation that computes it.
        """
        return (*self.x_names, *self.block.labels)

    @property
    def away(self) -> tuple[int, ...]:
        """Indices of the arrays that are stored off the device."""
        return tuple(i for i, array in enumerate(self.arrays) if array.record.is_away)

    @property
    def in_memory(self) -> tuple[int, ...]:
        """Indices of the arrays in host memory.

        XLA reads and writes these arrays; callbacks move arrays on disk.
        """
        return tuple(i for i in self.away if self.arrays[i].record.disk_records is None)

    def fetch(self, stacks: Sequence[Any], layer: Array) -> list[Array]:
        """Return one layer's arrays that are stored off the device.

        Args:
          stacks: stacks of all saved arrays, in the order of `arrays`.
          layer: i32[], number of the layer in its stack of layers.
        """
        return read_layer(
            pick(self.records, self.away), pick(stacks, self.away), self._index(layer)
        )

    def read(self, stacks: Sequence[Any], fetched: Sequence[Array], layer: Array) -> list[Array]:
        """Return all arrays of one layer, given the arrays that `fetch` returned.

        Args:
          stacks: stacks of all saved arrays, in the order of `arrays`.
          fetched: the layer's arrays that are stored off the device.
          layer: i32[], number of the layer in its stack of layers.
        """
        away = dict(zip(self.away, fetched, strict=True))
        index = self._index(layer)
        values = list[Array]()
        for i, record in enumerate(self.records):
            if i in away:
                values.append(away[i])
            else:
                values.append(_row_major(record.read(stacks[i], index), record.mesh))
        return values

    def write(
        self, stacks: Sequence[Any], layer: Any, x: Any, values: Sequence[Array]
    ) -> list[Any]:
        """Return the stacks with one layer's input and residuals written to them.

        Args:
          stacks: stacks of all saved arrays, in the order of `arrays`.
          layer: number of the layer in its stack of layers.
          x: the layer's input.
          values: the block's residuals.
        """
        # Constrained to their specs outside the stacks, so that the partitioner does not shard a
        # value's computation to match its storage.
        index = self._index(layer)
        gathered = self._constrain_gathered([*jax.tree.leaves(x), *values])
        return write_layer(self.records, stacks, index, gathered)

    def _index(self, layer: Any) -> Any:
        """Return the index of a layer in the stacks.

        It is linear in the layer's number, as the layer's number is in the counter of a loop.
        """
        return layer - self.first if self.first else layer

    def split(self, values: Sequence[Array]) -> tuple[Any, list[Array]]:
        """Return the layer's input and the block's residuals, gathered, from `values`.

        The values are of one microbatch or of all.
        """
        # Both ends of the gather are constrained. Without the first constraint, the partitioner
        # might gather the full stack instead of its slice.
        stored = [
            array.constrain_stored(value) for array, value in zip(self.arrays, values, strict=True)
        ]
        gathered = self._constrain_gathered(stored)
        count = self.x_tree.num_leaves
        return jax.tree.unflatten(self.x_tree, gathered[:count]), gathered[count:]

    def _constrain_gathered(self, values: Sequence[Array]) -> list[Array]:
        return [
            array.constrain_gathered(value)
            for array, value in zip(self.arrays, values, strict=True)
        ]


class BlockTracer:
    """Traces the block of a run of layers over the shapes of a batch.

    It chooses the values that forward saves, and finds the block's loops over tiles.

    Attributes:
      stack: the run of layers that share the block.
      traced: the block of the most recently traced step, cut at its loops over tiles, if tiles are
        records; else None.
      traced_eval: the block of the most recently traced evaluation, cut in the same way; else None.
    """

    def __init__(self, stack: StackPlan, plan: StreamedPlan) -> None:
        """Check that the run's `activations` mode is supported.

        Raises:
          NotImplementedError: activations="everything" and tiles off the device.
        """
        self.stack = stack
        self.model = stack.model
        self.plan = plan
        self.layout = plan.layout
        self.mesh = plan.mesh
        self.config = plan.config
        if stack.groups and stack.run.segment.activations == "everything":
            raise NotImplementedError(
                "activations='everything' is not supported for layers whose tiles are stored off "
                "the device: use 'save', or keep params on the device"
            )
        self.traced: TiledBlock | None = None
        self.traced_eval: TiledBlock | None = None

    def _abstract_block(self) -> Params:
        """Return the shapes of one layer's parameters, in the compute dtype."""
        stacks = [self.plan.leaves[i] for i in self.stack.leaves.in_tree]
        return jax.eval_shape(
            self.block_tree, [jax.ShapeDtypeStruct(a.layer_shape, a.dtype) for a in stacks]
        )

    def block_tree(self, leaves: Sequence[Any]) -> Params:
        """Return a block's parameters, decoded, from its gathered leaves."""
        return self.layout.decode(jax.tree.unflatten(self.stack.tree, leaves))

    def operands(self, full: Sequence[Array]) -> list[Any]:
        """Return the leaves with which a block is called, in the order of its tree.

        Stacks of tiles are None.
        """
        leaves = self.stack.without_tiles(full)
        if self.layout.encodings:
            return jax.tree.leaves(self.block_tree(leaves), is_leaf=lambda node: node is None)
        return leaves

    def abstract_call(self, x: Any, inputs: LayerInputs, count: int) -> tuple[Any, Any, Any, Given]:
        """Return the shapes of a block's arguments for one microbatch: (params, x, key, given).

        Args:
          x: shapes of the first layer's input, of all microbatches.
          inputs: shapes of the other inputs, of all microbatches.
          count: number of microbatches.
        """
        # The block is traced for one microbatch, so its arrays have no microbatch dim.
        lead = int(count > 1)

        def without_dims(tree: Tree, num_dims: int) -> Tree:
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[num_dims:], a.dtype), tree)

        given = Given(
            without_dims(inputs.context, lead),
            without_dims(inputs.per_layer, 1),
            without_dims(inputs.state, 1),
        )
        params = self._abstract_block()
        return params, without_dims(x, lead), without_dims(inputs.keys, lead), given

    def abstract_added(self, x: Any, inputs: LayerInputs, count: int) -> Loss | None:
        """Return the shapes of a block's addition to the loss of one microbatch, or None."""
        return check_block(self.model, *self.abstract_call(x, inputs, count)).loss

    def _run_block(self, params: Params, x: Any, key: Any, given: Given) -> tuple[Any, Loss | None]:
        out = call_block(self.model, params, x, key, given)
        return out.x, out.loss

    def _check_state(self, params: Params, x: Any, key: Any, given: Given) -> None:
        """Raise ValueError if the block changes its state."""
        if given.state is None:
            return
        closed = jax.make_jaxpr(lambda *args: call_block(self.model, *args).state)(
            params, x, key, given
        )
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(given.state)[0]]
        # The state's leaves are the last inputs. A leaf returned unchanged is the same variable.
        inputs = closed.jaxpr.invars[-len(paths) :] if paths else []
        changed = list[str]()
        for path, after, before in zip(paths, closed.jaxpr.outvars, inputs, strict=True):
            if after is not before:
                changed.append(jax.tree_util.keystr(path))
        if changed:
            raise ValueError(
                f"the block changes its state {', '.join(changed)}, but a streamed step only "
                "supports blocks that read their state: use a layer without running statistics "
                "(LayerNorm, RMSNorm, GroupNorm), or keep the full model on the device, with "
                "activations='everything', 'save' or 'remat', and partition_activations=False"
            )

    def plan_residuals(self, x: Any, inputs: LayerInputs, count: int) -> ResidualPlan:
        """Choose the values that forward saves.

        Args:
          x: shapes of the first layer's input, of all microbatches.
          inputs: shapes of the other inputs of the layers.
          count: number of microbatches.

        Raises:
          ValueError: the block changes its state, or does not fit its inputs and outputs.
        """
        with in_stack(self.stack.name):
            return self._plan_residuals(x, inputs, count)

    def _plan_residuals(self, x: Any, inputs: LayerInputs, count: int) -> ResidualPlan:
        args = self.abstract_call(x, inputs, count)
        check_block(self.model, *args)
        self._check_state(*args)

        # `activations` names a recomputation mode or a tier. With a tier, the layer's input is
        # stored there and everything else is recomputed.
        run = self.stack.run
        segment = run.segment
        if segment.activations in MODES:
            mode = segment.activations
            x_tier = "device"
        else:
            mode = "remat"
            x_tier = segment.activations
        layer, tiled = self._cut(args, count, mode, segment.saved_names, segment.offloaded_names)

        x_one = args[1]
        x_leaves, x_tree = jax.tree.flatten(x_one)
        x_names = [
            f"x{jax.tree_util.keystr(path)}"
            for path, _ in jax.tree_util.tree_flatten_with_path(x_one)[0]
        ]
        batch_size = _batch_size(x_leaves)
        stream = dataclasses.replace(self.plan.stream, num_microbatches=count)
        x_arrays = [self._saved_array(a, x_tier, stream, None, batch_size) for a in x_leaves]
        if x_tier == "nvme" and self.layout.disk is not None:
            x_arrays = self._declare_on_disk(x_arrays, x_names)

        # A residual such as attention's scores has the sequence in another dim than the stream.
        lengths = [a.shape[1] for a in x_leaves if len(a.shape) > 1]
        spec = ActivationSpec(self.mesh, count, length=max(lengths, default=None))
        residuals = list[SavedArray]()
        triples = zip(layer.shapes, layer.offloaded, self._specs(layer, args), strict=True)
        for a, is_offloaded, known in triples:
            tier = "pinned_host" if is_offloaded else "device"
            residuals.append(self._saved_array(a, tier, spec, known, batch_size))

        # `tile_loops` reads `traced`: the disk's read-ahead order follows from the loops that the
        # block contains.
        self.traced = tiled
        return ResidualPlan(
            block=layer,
            # `ResidualPlan.split` separates the leaves of the input from the residuals.
            arrays=(*x_arrays, *residuals),
            x_names=tuple(x_names),
            x_tree=x_tree,
            lead=int(count > 1),
            tiled=tiled,
            first=run.first,
        )

    def _saved_array(
        self, a: Any, tier: str, rule: ActivationSpec, known: Spec | None, batch_size: int
    ) -> SavedArray:
        """Choose how one array of a layer is stored.

        Args:
          a: its shape and dtype, of one microbatch.
          tier: where it is stored.
          rule: how arrays of its kind are split.
          known: its spec, if it is known before the partitioner runs.
          batch_size: rows of one microbatch.
        """
        split = None
        if self.config.partition_activations and self.mesh.shape[TENSOR] > 1:
            if known is None and a.shape[:1] != (batch_size,):
                split = LeafSpec((), (), "its sharding over other axes is unknown")
            else:
                base = known or rule.given(a.shape, batch_size)
                split = _split_over_tensor(a.shape, base, self.mesh)

        count = rule.num_microbatches
        lead = (count,) if count > 1 else ()  # [M, ...] with several microbatches
        stored_spec = known
        gathered_spec = None
        if split is not None and split.sharded != split.base:
            stored_spec = split.sharded
            gathered_spec = (*(None,) * len(lead), *split.base)
        record = RecordSpec(self.mesh, rule.saved(a.shape, batch_size, tier, stored_spec), tier)
        return SavedArray(
            record=record,
            abstract=jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype),
            gathered_spec=gathered_spec,
            replicated=None if split is None else split.replicated,
        )

    def _declare_on_disk(
        self, x_arrays: Sequence[SavedArray], names: Sequence[str]
    ) -> list[SavedArray]:
        """Return the arrays of a layer's input with their records on disk.

        They are one record: they are written together and read together, and no step reads the
        records of another step.
        """
        assert self.layout.disk is not None
        disk_records = self.layout.disk.declare(
            self.stack.run.activations_kind,
            self.stack.num_layers,
            names,
            [array.abstract for array in x_arrays],
            [array.record.spec for array in x_arrays],
            lifetime="step",
        )
        on_disk = list[SavedArray]()
        for array in x_arrays:
            record = dataclasses.replace(array.record, disk_records=disk_records)
            on_disk.append(dataclasses.replace(array, record=record))
        return on_disk

    def _specs(self, layer: TracedBlock, args: tuple[Any, Any, Any, Given]) -> list[Spec | None]:
        """Return the spec of each residual, or None where the partitioner has a choice."""
        # Otherwise all residuals are split like the batch.
        if not splits_activations(self.mesh) and not has_island(layer.program):
            return [None] * len(layer.residuals)
        _, x, key, given = args
        spec = ActivationSpec(self.mesh)
        size = _batch_size(jax.tree.leaves(x))
        leaves = [self.plan.leaves[i] for i in self.stack.operands]
        params = [None if leaf.decodes is not None else leaf.layer_spec for leaf in leaves]
        data = [spec.given(a.shape, size) for a in jax.tree.leaves((x, key, given))]
        split_programs = {slot: split.program for slot, split in layer.apart.items()}
        specs = flow(layer.program, [*params, *data], self.mesh.shape, split_programs)
        return [specs[slot] for slot in layer.residuals]

    def _cut(
        self,
        args: tuple[Any, Any, Any, Given],
        count: int,
        mode: str = "remat",
        saved: Sequence[str] = (),
        offloaded: Sequence[str] = (),
    ) -> tuple[TracedBlock, TiledBlock | None]:
        """Trace the block over abstract arguments.

        If tiles are records, also cut it at its loops over tiles.
        """
        plan = self.plan
        stack = self.stack
        frozen = [plan.leaves[i].frozen for i in stack.operands]
        trained = [i for i in stack.operands if not plan.leaves[i].frozen]
        # With overlap, the mode decides whether rings keep a gathered value or send it again, so
        # the program differs between modes.
        has_rings = self.config.tensor_overlap and self.mesh.shape[TENSOR] > 1
        layer = plan_layer(
            self._run_block,
            *args,
            mode,
            saved,
            offloaded,
            tiled=bool(stack.groups),
            frozen=frozen,
            of_context=self.model.enter is not None,
            transform=functools.partial(plan.derivative, leaf_ids=trained),
            numbers=not has_rings,
        )
        if not stack.groups:
            return layer, None
        names = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(args[0])[0]
        ]
        # A group's indices count the leaves of the full model, but the block's trace has only the
        # leaves of one layer.
        groups = [
            [stack.operands.index(i) for i in stack.group_nodes(group)] for group in stack.groups
        ]
        tiled = TiledBlock(layer, groups, names, count, args)
        return layer, tiled

    def stacks(self, residuals: ResidualPlan, scratch: Sequence[Array]) -> list[Array]:
        """Return the empty stacks that forward fills.

        Args:
          residuals: the arrays to save.
          scratch: the stacks in host memory, in the order of `residuals.in_memory`.
        """
        # Stacks in host memory are donated arguments, since XLA would first create a stack that the
        # program allocates on the device.
        in_memory = dict(zip(residuals.in_memory, scratch, strict=True))
        lead = (self.stack.num_layers,)
        stacks = list[Array]()
        for i, array in enumerate(residuals.arrays):
            if i in in_memory:
                stacks.append(in_memory[i])
            else:
                stacks.append(self.plan.empty(array.record, array.abstract, lead))
        return stacks

    def without_residuals(self, x: Any, inputs: LayerInputs) -> TiledBlock | None:
        """Return the block of a pass that saves nothing, cut at its loops over tiles.

        The block is traced for one microbatch. The result is None if tiles are not records.
        """
        if not self.stack.groups:
            return None
        self.traced_eval = self._cut(self.abstract_call(x, inputs, 1), 1)[1]
        return self.traced_eval

    def eval_loops(
        self, updates: bool = False, skips: bool = False
    ) -> dict[str, list[tuple[TileLoops, str]]]:
        """Return the loops over tiles in a forward tick of the evaluation that was last traced.

        The result maps the phase to (loops, phase of these loops), and is empty before a trace.

        Args:
          updates: whether the evaluation applies a pending update to what it reads.
          skips: whether to leave out loops that know only when they run which tiles they read.
        """
        loops = [tiles for _, tiles in self.stack.loops]
        traced = self.traced_eval
        if traced is None:
            return {}
        phase = "forward" if updates else "read"
        forward = zip(traced.forward_loops, traced.needed_loops, strict=True)
        return {"forward": [(loops[g], phase) for g, chooses in forward if not (skips and chooses)]}

    def settle_loops(self) -> dict[str, list[tuple[TileLoops, str]]]:
        """Return the loops over tiles in a tick that updates a layer without computing it."""
        return {"forward": [(tiles, "forward") for _, tiles in self.stack.loops]}

    def tile_loops(self) -> dict[str, list[tuple[TileLoops, str]]]:
        """Return the loops over tiles in a tick of each phase of a step, in order.

        The result maps each phase to pairs of loops and the phase of these loops.
        """
        loops = [tiles for _, tiles in self.stack.loops]
        if self.traced is None:  # no batch yet: assume a block without recomputation
            return {
                "forward": [(g, "forward") for g in loops],
                "backward": [(g, "backward") for g in reversed(loops)],
            }
        # Backward also runs a loop forward if its result is needed to recompute later values.
        backward = [
            (loops[g], "backward" if derived else "read")
            for g, derived in self.traced.backward_loops
        ]
        return {
            "forward": [(loops[g], "forward") for g in self.traced.forward_loops],
            "backward": backward,
        }


def _split_over_tensor(shape: tuple[int, ...], spec: Spec, mesh: Mesh) -> LeafSpec:
    """Return the spec of a saved activation that is also sharded over `tensor`.

    It is sharded along the sequence if possible, else by the rule for parameters.

    Args:
      shape: shape of one microbatch's activation.
      spec: its sharding over the other axes.
      mesh: the device mesh, with several devices along `tensor`.
    """
    if any(TENSOR in parse_axes(entry) for entry in spec):
        return LeafSpec(spec, spec, None)
    sequence_axes = parse_axes(spec[1]) if len(shape) > 1 else ()
    if len(shape) > 1 and set(sequence_axes) <= {CONTEXT} and shape[1]:
        axes = (*sequence_axes, TENSOR)
        if shape[1] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            return LeafSpec(spec, (spec[0], as_entry(axes), *spec[2:]), None)
    return leaf_spec(shape, mesh, (TENSOR,), spec)


def _constrain(value: Array, mesh: Mesh, spec: Spec) -> Array:
    """Constrain a value of one microbatch or of all to a spec of all microbatches."""
    value_spec = PartitionSpec(*spec[len(spec) - value.ndim :])
    return jax.lax.with_sharding_constraint(value, named(mesh, value_spec))


def _row_major(value: Array, mesh: Mesh) -> Array:
    """Constrain a slice of a stack to the layout of the stack, on a single device.

    Otherwise XLA may choose the layout that the first product wants, and copy the full stack into
    it before the loop. On several devices, XLA's partitioner would gather a value with such a
    constraint.
    """
    is_free = value.ndim < 2 or mesh.devices.size > 1
    return value if is_free else with_layout_constraint(value, Layout(tuple(range(value.ndim))))


def _batch_size(leaves: Sequence[Any]) -> int:
    """Return the number of rows of a microbatch, from the leaves of a layer's input."""
    return leaves[0].shape[0] if leaves[0].shape else 0
