"""The workload of a model: traced over the shapes of a batch, and timed if its devices are present.

A block is traced in each activation mode as a streamed step traces it, so it saves what the step
saves. Seconds have one of two sources, recorded in `Workload.source`:

    timed      the block alone, its derivative in each mode, embedding and head, on the devices of
               the mesh: one program each, compiled and run a few times
    roofline   equation by equation, at the machine's rates (`zerojax.costs.roofline`)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.activations import MODES
from zerojax.aot import is_there
from zerojax.choice import Value
from zerojax.config import ZeroConfig
from zerojax.costs.roofline import Roofline, num_bytes, peak_bytes, trace_program
from zerojax.costs.stopwatch import Stopwatch
from zerojax.costs.workload import Grid, StackWork, Workload
from zerojax.jaxprs import FlatJaxpr, Instruction, count_flops, flatten
from zerojax.machines import Machine
from zerojax.memory import KeptValues, kept_by_program
from zerojax.models import LayeredModel, Model
from zerojax.program import assemble
from zerojax.sharding import DATA, FSDP, TENSOR, abstract_batch, local_elements
from zerojax.state import Layout
from zerojax.streamed import ResidualPlan, StackLoops, StreamedStep, derivative_jaxpr
from zerojax.trees import Batch, Grads, ModelState, Params, Tree


def build_grid(mesh: Mesh) -> Grid:
    """Return the sizes of a mesh's axes."""
    return Grid(mesh.shape[DATA], mesh.shape[FSDP], mesh.shape[TENSOR])


def workload_of_model(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    batch: Batch,
    machine: Machine,
    base: ZeroConfig,
    *,
    is_for_length: bool = False,
) -> Workload:
    """Return the workload of a model on a mesh.

    Args:
      model: model, as in `zerojax.build_train_step`.
      tx: optimizer, as in `zerojax.build_train_step`.
      mesh: mesh of devices; parts of the step are timed if its devices are present.
      batch: batch of one step, as arrays or a pytree of ShapeDtypeStruct.
      machine: machine whose rates the roofline uses.
      base: config whose precision, min_shard_bytes, frozen and similar fields apply.
      is_for_length: whether the workload decides how long sequences can be. Then nothing is timed,
        since a layer may not fit, and working bytes are an upper estimate.
    """
    abstract = abstract_batch(batch, mesh)
    with jax.set_mesh(mesh):
        if isinstance(model, Model):
            return _PlainTracer(model, tx, mesh, abstract, machine, base, is_for_length).workload()
        return _LayeredTracer(model, tx, mesh, abstract, machine, base, is_for_length).workload()


class _Tracer:
    """Shared parts of the tracers for plain and layered models."""

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        batch: Batch,
        machine: Machine,
        base: ZeroConfig,
        is_for_length: bool = False,
    ) -> None:
        self.model = model
        self.tx = tx
        self.mesh = mesh
        self.batch = batch
        self.machine = machine
        self.base = base
        self.grid = build_grid(mesh)
        self.precision = base.precision
        self.roofline = Roofline(machine, base.precision, self.grid)
        self.shapes = jax.tree.map(_shape, batch)
        arrays = jax.tree.leaves(batch)
        array_shapes = [a.shape for a in arrays if a.shape]
        self.rows = array_shapes[0][0] if array_shapes else 1
        token_shapes = [a.shape for a in arrays if _is_tokens(a)]
        self.tokens = math.prod(token_shapes[0]) if token_shapes else self.rows
        # Several processes would measure different seconds and choose different configs.
        is_timed = is_there(mesh) and jax.process_count() == 1 and not is_for_length
        self.watch = Stopwatch(mesh) if is_timed else None
        self.counts_operands = is_for_length

    def assemble(self, **fields: Any) -> Any:
        """Return the parts of the program of some config fields, with everything on the device."""
        on_device = {
            "params": "device",
            "grads": "device",
            "opt_state": "device",
            "opt_state_device_fraction": 0.0,
            "frozen": None if self.base.frozen in (None, "device") else "device",
            "partition_activations": False,
            "saved_names": (),
            "offloaded_names": (),
            "device_budget_bytes": None,
            "swap_dir": None,
        }
        simplest = {
            "update": None,
            "update_on": "device",
            "delayed_update": False,
            "num_microbatches": 1,
            "clip_norm": None,
            "grads_dtype": None,
        }
        config = dataclasses.replace(self.base, **{**on_device, **simplest, **fields})
        return assemble(self.model, self.tx, config, self.mesh)

    @property
    def source(self) -> str:
        """Source of the seconds, as text."""
        if self.watch is not None:
            return f"timed on {self.mesh.size} x {self.mesh.devices.flat[0].device_kind}"
        return f"roofline of its equations at the rates of {self.machine.name}"

    def shared_fields(self, layout: Layout) -> dict[str, Any]:
        """Return the fields of a `Workload` that are the same for plain and layered models."""
        moments = self.moment_bytes(layout)
        return {
            "largest_leaf": self.largest_leaf(layout),
            "moment_bytes": moments,
            "update": self.update_seconds(moments),
            "batch_bytes": self.batch_bytes(),
            "rows": self.rows // self.grid.batch_shards,
            "tokens": self.tokens,
            "source": self.source,
        }

    def working_bytes(self, program: FlatJaxpr) -> int:
        """Return the bytes of activations that a derivative holds at one time on a device."""
        peak = peak_bytes(program, self.rows, counts_operands=self.counts_operands)
        return peak // self.grid.batch_shards

    def kept_seconds(self, extra_bytes: float) -> float:
        """Return the seconds in which a device writes and reads additional saved bytes.

        The roofline leaves these bytes out, since XLA fuses elementwise equations. A timed program
        has already read them.
        """
        crossings = 2 if self.watch is None else 1
        return crossings * extra_bytes / self.roofline.memory_rate

    def update_seconds(self, moments: float) -> float:
        """Return the seconds in which the device updates one parameter.

        The update reads and writes the states and reads the gradient.

        Args:
          moments: bytes of optimizer state per parameter, without the master.
        """
        if self.precision == "fp32":
            master = 0
            grads = 4
            params = 2 * 4  # read and written
        else:
            master = 4
            grads = 2
            params = 2
        moved = 2 * (master + moments) + grads + params
        return moved / self.roofline.memory_rate

    def moment_bytes(self, layout: Layout) -> float:
        """Return the bytes of float32 optimizer state per parameter."""
        trained = sum(math.prod(leaf.shape) for leaf in layout.leaves)
        # Shared scalars, such as a step count, stay on the device and are not counted.
        opt_map = layout.opt_map
        arrays = [a for j, a in enumerate(opt_map.leaves) if a.shape or j not in opt_map.shared]
        total = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        to_float32 = 2.0 if self.base.moments == "bfloat16" else 1.0
        return total / max(1, trained) * to_float32

    def batch_bytes(self) -> int:
        """Return the bytes of a device's part of the batch."""
        return sum(
            math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(self.batch)
        )

    def elements(self, layout: Layout, leaf_ids: Sequence[int]) -> int:
        """Return the elements of some leaves on one device of a tensor group."""
        leaves = [layout.all_leaves[i] for i in leaf_ids]
        return sum(local_elements(leaf.shape, leaf.spec.base, self.mesh) for leaf in leaves)

    def gathered_elements(self, layout: Layout, leaf_ids: Sequence[int]) -> int:
        """Return the elements of some leaves, with frozen leaves counted by their bytes.

        A frozen leaf counts as its bytes divided by the compute dtype's item size.
        """
        itemsize = 4 if self.precision == "fp32" else 2
        trained, frozen = _split_frozen(layout, leaf_ids)
        return self.elements(layout, trained) + self.frozen_bytes(layout, frozen) // itemsize

    def largest_leaf(self, layout: Layout) -> int:
        """Return the elements of the largest trainable leaf on one device of a tensor group.

        A stacked leaf counts all its layers.
        """
        trained, _ = _split_frozen(layout, range(len(layout.all_leaves)))
        return max((self.elements(layout, [i]) for i in trained), default=0)

    def frozen_bytes(self, layout: Layout, leaf_ids: Sequence[int]) -> int:
        """Return the bytes of some frozen leaves, as stored."""
        leaves = [layout.all_leaves[i] for i in leaf_ids]
        return sum(
            local_elements(leaf.shape, leaf.spec.base, self.mesh) * leaf.dtype.itemsize
            for leaf in leaves
        )

    def frozen_flops(self, layout: Layout, leaf_ids: Sequence[int], forward: float) -> float:
        """Return the FLOPs of the gradients that frozen matrices among some leaves do not need.

        The result is at most `forward`, the FLOPs of these leaves in forward.
        """
        _, frozen = _split_frozen(layout, leaf_ids)
        leaves = [layout.all_leaves[i].decodes or layout.all_leaves[i] for i in frozen]
        matrices = sum(math.prod(leaf.shape) for leaf in leaves if len(leaf.shape) - leaf.lead > 1)
        return min(2.0 * self.tokens * matrices, forward)


class _Call(NamedTuple):
    """A function with its arguments, whose shapes suffice to trace it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def trace(self) -> FlatJaxpr:
        """Return the function as a flat list of the equations it needs."""
        return trace_program(self.function, jax.tree.map(_shape, self.args))


class _EmbedHeadCalls(NamedTuple):
    """Embedding and head as a step runs them, over all microbatches.

    Attributes:
      embed: the embedding's forward.
      head: the head's forward and backward.
      head_forward: the head's forward alone.
      embed_backward: the embedding's backward.
    """

    embed: _Call
    head: _Call
    head_forward: _Call
    embed_backward: _Call


class _EmbedHeadCosts(NamedTuple):
    """Costs of embedding and head.

    Attributes:
      embed: seconds of the embedding's forward.
      head: seconds of the head's forward and backward.
      embed_backward: seconds of the embedding's backward.
      working: bytes that the head needs while it runs.
      flops: FLOPs of the head's forward on all devices.
    """

    embed: float
    head: float
    embed_backward: float
    working: int
    flops: float


class _BlockCosts(NamedTuple):
    """Costs of a block.

    Attributes:
      forward: seconds of forward.
      backward: seconds of backward, including recomputation, by activation mode.
      working: bytes that backward needs in addition to saved bytes, by activation mode.
    """

    forward: float
    backward: dict[str, float]
    working: dict[str, int]


class _PlainCosts(NamedTuple):
    """Costs of a plain model's loss and derivative.

    Attributes:
      forward: seconds of the loss.
      save: seconds of the loss and its derivative, with the results of products saved.
      everything: seconds of the loss and its derivative, with everything saved.
      derivative: the loss and its derivative, with the results of products saved.
    """

    forward: float
    save: float
    everything: float
    derivative: FlatJaxpr


class _LayeredTracer(_Tracer):
    def workload(self) -> Workload:
        """Trace, and time if possible, every stack, the embedding and the head."""
        # gather_ahead makes the step stream although everything is on the device.
        programs = {
            mode: self.assemble(stage=3, activations=mode, gather_ahead=True) for mode in MODES
        }
        kept = {
            mode: kept_by_program(program.records, program.step, self.batch)
            for mode, program in programs.items()
        }
        steps = {mode: program.step for mode, program in programs.items()}
        plans = self.trace_blocks(steps)
        step = steps["save"]
        assert isinstance(step, StreamedStep)
        stacks = self.stacks(step, plans, kept)
        embed_head = self.embed_head_costs(step)
        resident = self.assemble(stage=3, activations="remat")
        kept_resident = kept_by_program(resident.records, resident.step, self.batch).num_bytes

        layout = step.layout
        unstacked = [i for i, leaf in enumerate(layout.all_leaves) if not leaf.is_stacked]
        trained, frozen = _split_frozen(layout, unstacked)
        embed_leaves = _named_leaves(layout, unstacked, "embed")
        head_leaves = _named_leaves(layout, unstacked, "head")
        layer_flops, forward_flops = self.layer_flops(step, plans)
        # A head without a matrix of its own uses the embedding's.
        head_matrices = head_leaves if _has_matrix(layout, head_leaves) else unstacked
        frozen_flops = self.frozen_flops(layout, head_matrices, embed_head.flops)
        return Workload(
            name=f"{layout.num_params:,} parameters, {self.model.num_layers} layers",
            stacks=stacks,
            unstacked_elements=self.elements(layout, trained),
            largest_unstacked=max(
                self.gathered_elements(layout, embed_leaves),
                self.gathered_elements(layout, head_leaves),
            ),
            unstacked_frozen_bytes=self.frozen_bytes(layout, frozen),
            unstacked_kept=max(0, kept_resident - kept["remat"].num_bytes),
            head_working=embed_head.working,
            embed=embed_head.embed,
            head=embed_head.head,
            embed_backward=embed_head.embed_backward,
            flops=layer_flops + 3.0 * embed_head.flops - frozen_flops,
            forward_flops=forward_flops,
            **self.shared_fields(layout),
        )

    def trace_blocks(self, steps: Mapping[str, StreamedStep]) -> list[dict[str, ResidualPlan]]:
        """Return each stack's traced block with what it saves, by activation mode."""
        plans = [dict[str, ResidualPlan]() for _ in steps["save"].loops]
        for mode, step in steps.items():
            for by_mode, plan in zip(plans, step.abstract_residuals(self.shapes), strict=True):
                by_mode[mode] = plan
        return plans

    def stacks(
        self,
        step: StreamedStep,
        plans: Sequence[Mapping[str, ResidualPlan]],
        kept: Mapping[str, KeptValues],
    ) -> tuple[StackWork, ...]:
        """Return the work of all stacks.

        Args:
          step: step whose block saves the results of products.
          plans: each stack's traced block with what it saves, by activation mode.
          kept: saved values of all stacks, by activation mode.
        """
        layout = step.layout
        state = layout.abstract_arrays
        inputs = step.embed_head.abstract_inputs(layout.join(state), state.model_state, self.shapes)
        stacks = list[StackWork]()
        for n, loops in enumerate(step.loops):
            _, x, layer_inputs = inputs[n]
            args = loops.tracer.abstract_call(x, layer_inputs, 1)
            kept_bytes = _kept_by_stack(kept, loops.stack.name)
            stacks.append(self.stack(loops, plans[n], kept_bytes, args))
        return tuple(stacks)

    def layer_flops(
        self, step: StreamedStep, plans: Sequence[Mapping[str, ResidualPlan]]
    ) -> tuple[float, float]:
        """Return the FLOPs of all layers on all devices: of the step, and of its forward."""
        flops = 0.0
        forward_flops = 0.0
        for loops, by_mode in zip(step.loops, plans, strict=True):
            instructions = by_mode["remat"].block.program.instructions
            forward = loops.stack.num_layers * sum(count_flops(i.eqn) for i in instructions)
            forward_flops += forward
            frozen = self.frozen_flops(step.layout, loops.stack.leaves.in_tree, forward)
            flops += 3.0 * forward - frozen
        return flops, forward_flops

    def stack(
        self,
        loops: StackLoops,
        plans: Mapping[str, ResidualPlan],
        kept: Mapping[str, int],
        args: tuple[Any, ...],
    ) -> StackWork:
        """Return the work of one stack.

        Args:
          loops: loops of the stack.
          plans: its traced block with what it saves, by activation mode.
          kept: saved bytes of all layers by activation mode.
          args: abstract arguments of the block.
        """
        layout = loops.plan.layout
        num_layers = loops.stack.num_layers
        costs = self.block_costs(loops, plans, args)
        trained, frozen = _split_frozen(layout, loops.stack.leaves.in_tree)
        layer_kept = {mode: num_bytes // num_layers for mode, num_bytes in kept.items()}
        backward = dict(costs.backward)
        backward["everything"] += self.kept_seconds(layer_kept["everything"] - layer_kept["save"])
        return StackWork(
            name=loops.stack.name,
            num_layers=num_layers,
            elements=self.elements(layout, trained) // num_layers,
            frozen_bytes=self.frozen_bytes(layout, frozen) // num_layers,
            x_bytes=layer_kept["remat"],
            kept=layer_kept,
            working=costs.working,
            forward=costs.forward,
            backward=backward,
            values=self.values(plans["save"], costs.forward),
        )

    def block_costs(
        self, loops: StackLoops, plans: Mapping[str, ResidualPlan], args: tuple[Any, ...]
    ) -> _BlockCosts:
        """Return the costs of a block, timed or by the roofline."""
        if self.watch is not None:
            blocks = {mode: plan.block for mode, plan in plans.items()}
            forward, derivatives = self.watch.block(loops, blocks, args)
            return _BlockCosts(
                forward.seconds,
                {mode: timed.seconds for mode, timed in derivatives.items()},
                {mode: timed.working for mode, timed in derivatives.items()},
            )
        backward = dict[str, float]()
        working = dict[str, int]()
        for mode, plan in plans.items():
            closed = derivative_jaxpr(plan.block, *args)
            program = flatten(closed.jaxpr, closed.consts)
            working[mode] = self.working_bytes(program)
            live = program.live(program.outputs)
            backward[mode] = self.roofline.seconds(live)
        forward = self.roofline.seconds(plans["remat"].block.program.instructions)
        return _BlockCosts(forward, backward, working)

    def values(self, plan: ResidualPlan, forward: float) -> tuple[Value, ...]:
        """Return the values that a block can save, in program order, with their recompute times.

        Args:
          plan: traced block with what it saves.
          forward: seconds of the block's forward, which all its equations take together.
        """
        block = plan.block
        instructions = block.program.instructions
        total = self.roofline.seconds(instructions)
        scale = forward / total if total else 0.0
        producers = {slot: i for i in instructions for slot in i.outs}
        number_of_slot = {slot: n for n, slot in enumerate(block.residuals)}
        shards = self.grid.batch_shards * self.grid.tensor
        values = list[Value]()
        names = set[str]()
        for n, slot in enumerate(block.residuals):
            equations, operands = _recomputation(slot, producers, number_of_slot)
            seconds = 0.0
            for equation in equations:
                seconds += self.roofline.equation_seconds(equation) * scale
            name = block.labels[n]
            if name.startswith("#"):
                name = name.split(" ")[0]
            if name in names:
                name = f"{name} ({n})"
            names.add(name)
            values.append(
                Value(
                    name=name,
                    num_bytes=max(1, num_bytes(block.shapes[n]) // shards),
                    seconds=seconds,
                    operands=tuple(sorted(k for k in operands if k < n)),
                )
            )
        return tuple(values)

    # --- embedding and head -----------------------------------------------------------------------

    def embed_head_costs(self, step: StreamedStep) -> _EmbedHeadCosts:
        """Return the costs of embedding and head, timed or by the roofline."""
        calls = self.embed_head_calls(step)
        timed_calls = (calls.embed, calls.head, calls.embed_backward)
        programs = [call.trace() for call in timed_calls]
        forward = calls.head_forward.trace()
        flops = sum(count_flops(i.eqn) for i in forward.instructions)
        if self.watch is not None:
            timed = [self.watch.call(call.function, *call.args) for call in timed_calls]
            seconds = [call.seconds for call in timed]
            working = timed[1].working
        else:
            seconds = [self.roofline.seconds(program.instructions) for program in programs]
            working = self.working_bytes(programs[1])
        return _EmbedHeadCosts(
            embed=seconds[0],
            head=seconds[1],
            embed_backward=seconds[2],
            working=working,
            flops=flops,
        )

    def embed_head_calls(self, step: StreamedStep) -> _EmbedHeadCalls:
        """Return embedding and head as a step runs them, with abstract arguments."""
        layout = step.layout
        state = layout.abstract_arrays
        embed_head = step.embed_head
        leaves = {name: tree for name, tree in layout.join(state).items() if name != "blocks"}
        key = jax.random.key(0) if self.model.stochastic else None
        model_state = None
        if state.model_state is not None:
            unstacked = {k: tree for k, tree in state.model_state.items() if k != "blocks"}
            model_state = jax.tree.map(_zeros, unstacked)

        def embed(leaves: Tree, batch: Batch) -> Any:
            return embed_head.embed_all(embed_head.load(leaves), batch, key, model_state)

        abstract_leaves = jax.tree.map(_shape, leaves)
        x, embed_states, head_state = jax.eval_shape(embed, abstract_leaves, self.shapes)
        inputs = embed_head.abstract_inputs(layout.join(state), state.model_state, self.shapes)
        y = inputs[-1][1]

        def head(leaves: Tree, y: Tree, batch: Batch) -> Any:
            states = jax.tree.map(_zeros, head_state)
            result = embed_head.head_and_grads(
                embed_head.load(leaves), y, batch, key, jnp.float32(1), states
            )
            return result.loss, result.dy, result.grads

        def head_forward(leaves: Tree, y: Tree, batch: Batch) -> jax.Array:
            states = jax.tree.map(_zeros, head_state)
            return embed_head.head(embed_head.load(leaves), y, batch, key, states)[0].total

        def embed_backward(leaves: Tree, dx: Tree, grads: Grads, batch: Batch) -> Any:
            states = jax.tree.map(_zeros, embed_states)
            return embed_head.embed_grads(embed_head.load(leaves), batch, key, dx, states, grads)

        _, _, grads = jax.eval_shape(head, abstract_leaves, y, self.shapes)
        return _EmbedHeadCalls(
            embed=_Call(embed, (leaves, self.batch)),
            head=_Call(head, (leaves, y, self.batch)),
            head_forward=_Call(head_forward, (leaves, y, self.batch)),
            embed_backward=_Call(embed_backward, (leaves, x, grads, self.batch)),
        )


class _PlainTracer(_Tracer):
    def workload(self) -> Workload:
        """Trace a plain Model as a single layer that is the full model."""
        modes = ("everything", "save", "remat")
        programs = {mode: self.assemble(stage=0, activations=mode) for mode in modes}
        layout = programs["save"].records.layout
        kept = {
            mode: kept_by_program(program.records, program.step, self.batch).num_bytes
            for mode, program in programs.items()
        }
        kept["selective"] = kept["save"]
        state = layout.abstract_arrays
        args = (layout.join(state), self.batch, state.model_state)
        loss = _Call(self.loss(programs["save"]), args)
        derivative = _Call(_with_derivative(self.loss(programs["save"])), args)
        plain_derivative = _Call(_with_derivative(self.loss(programs["everything"])), args)

        loss_program = loss.trace()
        derivative_program = derivative.trace()
        if self.watch is not None:
            forward, save_seconds, everything_seconds = (
                self.watch.call(call.function, *call.args).seconds
                for call in (loss, derivative, plain_derivative)
            )
        else:
            forward, save_seconds, everything_seconds = (
                self.roofline.seconds(program.instructions)
                for program in (loss_program, derivative_program, plain_derivative.trace())
            )
        costs = _PlainCosts(forward, save_seconds, everything_seconds, derivative_program)

        forward_flops = sum(count_flops(i.eqn) for i in loss_program.instructions)
        frozen_flops = self.frozen_flops(layout, range(len(layout.all_leaves)), forward_flops)
        return Workload(
            name=f"{layout.num_params:,} parameters",
            is_layered=False,
            stacks=(self.stack(layout, kept, costs),),
            unstacked_elements=0,
            largest_unstacked=max((math.prod(leaf.shape) for leaf in layout.leaves), default=0),
            head_working=0,
            embed=0.0,
            head=0.0,
            embed_backward=0.0,
            flops=3.0 * forward_flops - frozen_flops,
            forward_flops=forward_flops,
            **self.shared_fields(layout),
        )

    def stack(self, layout: Layout, kept: Mapping[str, int], costs: _PlainCosts) -> StackWork:
        """Return the work of the full model as a single layer.

        Args:
          layout: layout of the program.
          kept: saved bytes, by activation mode.
          costs: costs of the loss and its derivative.
        """
        forward = costs.forward
        backward = max(costs.save - forward, forward)
        plain_backward = max(costs.everything - forward, forward)
        plain_backward += self.kept_seconds(kept["everything"] - kept["save"])
        working = self.working_bytes(costs.derivative)

        trained = range(len(layout.leaves))
        frozen = range(len(layout.leaves), len(layout.all_leaves))
        return StackWork(
            num_layers=1,
            elements=self.elements(layout, trained),
            frozen_bytes=self.frozen_bytes(layout, frozen),
            x_bytes=0,
            kept=kept,
            working=dict.fromkeys(MODES, max(0, working - kept["save"])),
            forward=forward,
            backward={
                "everything": plain_backward,
                "save": backward,
                "selective": backward,
                "remat": backward + forward,
            },
        )

    def loss(self, program: Any) -> Callable[..., Any]:
        """Return the loss of a program, as a function of parameters, batch and state."""
        key = jax.random.key(0) if self.model.stochastic else None

        def loss(params: Params, batch: Batch, model_state: ModelState) -> Any:
            return program.step.objective(params, batch, key, model_state)[0].value()

        return loss


def _kept_by_stack(kept: Mapping[str, KeptValues], stack: str) -> dict[str, int]:
    """Return the saved bytes of one stack, by activation mode."""
    kept_bytes = dict[str, int]()
    for mode, values in kept.items():
        kept_bytes[mode] = sum(value.num_bytes for value in values if value.stack == stack)
    return kept_bytes


def _with_derivative(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss together with its derivative by the parameters."""

    def loss_and_grads(params: Params, batch: Batch, model_state: ModelState) -> Any:
        return jax.value_and_grad(loss, allow_int=True)(params, batch, model_state)

    return loss_and_grads


def _is_tokens(a: Any) -> bool:
    """Return whether an array of the batch is assumed to hold tokens: 2-D integers."""
    return len(a.shape) == 2 and jnp.issubdtype(a.dtype, jnp.integer)


def _shape(a: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, without its sharding."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _zeros(a: Any) -> jax.Array:
    """Return zeros of an array's shape and dtype."""
    return jnp.zeros(a.shape, a.dtype)


def _split_frozen(layout: Layout, leaf_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return trainable and frozen leaves."""
    trained = [i for i in leaf_ids if not layout.all_leaves[i].frozen]
    frozen = [i for i in leaf_ids if layout.all_leaves[i].frozen]
    return trained, frozen


def _named_leaves(layout: Layout, leaf_ids: Sequence[int], name: str) -> list[int]:
    """Return the leaves of one entry of the parameters, such as "embed" or "head"."""
    return [i for i in leaf_ids if layout.all_leaves[i].path[0].key == name]


def _has_matrix(layout: Layout, leaf_ids: Sequence[int]) -> bool:
    """Return whether some leaves include a matrix."""
    leaves = [layout.all_leaves[i].decodes or layout.all_leaves[i] for i in leaf_ids]
    return any(len(leaf.shape) > 1 for leaf in leaves)


def _recomputation(
    slot: int, producers: Mapping[int, Instruction], number_of_slot: Mapping[int, int]
) -> tuple[list[Instruction], set[int]]:
    """Return the equations that recompute a value, and the numbers of the values that they read.

    Args:
      slot: slot of the value.
      producers: equation that computes each slot.
      number_of_slot: number of each value that can be saved, by its slot.
    """
    equations = list[Instruction]()
    operands = set[int]()
    visited = set[int]()
    pending = [slot]
    while pending:
        current = pending.pop()
        if current in visited or current not in producers:
            continue
        visited.add(current)
        if current != slot and current in number_of_slot:
            operands.add(number_of_slot[current])
            continue
        equations.append(producers[current])
        pending += producers[current].reads
    return equations, operands
