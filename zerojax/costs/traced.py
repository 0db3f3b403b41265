"""The workload of a model: traced over the shapes of a batch, and timed if its devices are present.

A block is traced in each activation mode as a streamed step traces it, so it saves what the step
saves. Seconds have one of two sources, recorded in `Workload.source`:

    timed      the block alone, its derivative in each mode, embedding and head, on the devices of
               the mesh: one program each, compiled and run a few times
    roofline   equation by equation: a product of F FLOPs that touches B bytes takes
               max(F / flops, B / memory_rate); reductions take B / memory_rate; other equations are
               free, because XLA mostly fuses their results away
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.activations import MODES
from zerojax.aot import is_there
from zerojax.choice import Value
from zerojax.config import ZeroConfig
from zerojax.costs.stopwatch import Stopwatch
from zerojax.costs.workload import Grid, StackWork, Workload
from zerojax.jaxprs import (
    PRODUCTS,
    REDUCTIONS,
    FlatJaxpr,
    Instruction,
    count_flops,
    dtype_of_products,
    flatten,
)
from zerojax.machines import Machine
from zerojax.memory import kept_by_program
from zerojax.models import LayeredModel, Model
from zerojax.program import assemble
from zerojax.sharding import DATA, FSDP, TENSOR, abstract_batch, local_elements
from zerojax.streamed import StackLoops, StreamedStep, derivative_jaxpr
from zerojax.trees import Batch, Grads, ModelState, Params

Costs = Callable[[Instruction], float]
"""Function that returns the seconds of one equation on one device."""


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
) -> Workload:
    """Return the workload of a model on a mesh.

    Args:
      model: model, as in `zerojax.build_train_step`.
      tx: optimizer, as in `zerojax.build_train_step`.
      mesh: mesh of devices; parts of the step are timed if its devices are present.
      batch: batch of one step, as arrays or a pytree of ShapeDtypeStruct.
      machine: machine whose rates the roofline uses.
      base: config whose precision, min_shard_bytes, frozen and similar fields apply.
    """
    given = abstract_batch(batch, mesh)
    with jax.set_mesh(mesh):
        if isinstance(model, Model):
            return _PlainTracer(model, tx, mesh, given, machine, base).workload()
        return _LayeredTracer(model, tx, mesh, given, machine, base).workload()


class _Tracer:
    """Shared parts of the tracers for plain and layered models."""

    def __init__(
        self, model: Any, tx: Any, mesh: Mesh, batch: Batch, machine: Machine, base: ZeroConfig
    ) -> None:
        self.model = model
        self.tx = tx
        self.mesh = mesh
        self.batch = batch
        self.machine = machine
        self.base = base
        self.grid = build_grid(mesh)
        self.precision = base.precision
        self.shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
        sizes = [a.shape for a in jax.tree.leaves(batch) if a.shape]
        self.rows = sizes[0][0] if sizes else 1
        # 2-D integer arrays are assumed to be tokens.
        whole = [
            a.shape
            for a in jax.tree.leaves(batch)
            if len(a.shape) == 2 and jnp.issubdtype(a.dtype, jnp.integer)
        ]
        self.tokens = math.prod(whole[0]) if whole else self.rows
        # Several processes would measure different seconds and choose different configs.
        self.watch = Stopwatch(mesh) if is_there(mesh) and jax.process_count() == 1 else None

    def parts(self, **fields: Any) -> Any:
        """Return the assembled parts of a config's program, with everything on the device."""
        away = {
            "params": "device",
            "grads": "device",
            "opt_state": "device",
            "opt_state_device_fraction": 0.0,
        }
        plain = {
            "update": None,
            "update_on": "device",
            "delayed_update": False,
            "num_microbatches": 1,
            "clip_norm": None,
        }
        named: dict[str, Any] = {
            "saved_names": (),
            "offloaded_names": (),
            "device_budget_bytes": None,
            "swap_dir": None,
        }
        frozen = {
            "frozen": None if self.base.frozen in (None, "device") else "device",
            "partition_activations": False,
        }
        return assemble(
            self.model,
            self.tx,
            dataclasses.replace(self.base, **(away | plain | named | frozen | fields)),
            self.mesh,
        )

    @property
    def source(self) -> str:
        """Source of the seconds, as text."""
        if self.watch is not None:
            return f"timed on {self.mesh.size} x {self.mesh.devices.flat[0].device_kind}"
        return f"roofline of its equations at the rates of {self.machine.name}"

    @functools.cached_property
    def costs(self) -> Costs:
        """Roofline seconds of an equation, as a function; 0 if the machine has no rates."""
        figures = self.machine.figures
        shards = self.grid.batch_shards * self.grid.tensor
        memory = figures.get("memory_rate", math.inf)

        def seconds(i: Instruction) -> float:
            flops = count_flops(i.eqn) / shards
            name = i.eqn.primitive.name
            if not flops and name not in REDUCTIONS | PRODUCTS:
                return 0.0
            dtype = "fp32" if dtype_of_products(i.eqn) == jnp.float32 else self.precision
            rate = figures.get(f"flops.{dtype}", figures.get(f"flops.{self.precision}", math.inf))
            moved = sum(_num_bytes(v.aval) for v in (*i.eqn.invars, *i.eqn.outvars)) / shards
            return max(flops / rate, moved / memory)

        return seconds

    def roofline(self, program: FlatJaxpr) -> float:
        """Return the roofline seconds of a traced function on one device."""
        return sum(map(self.costs, program.instructions))

    def kept_seconds(self, more: float) -> float:
        """Return the seconds in which a device writes and reads `more` additional saved bytes.

        Costs of equations leave these bytes out, since XLA fuses elementwise equations. A timed
        program has already read them.
        """
        crossings = 2 if self.watch is None else 1
        return crossings * more / self.machine.figures.get("memory_rate", math.inf)

    def update_seconds(self, moments: float) -> float:
        """Return the seconds in which the device updates one parameter.

        The update reads and writes the states and reads the gradient.
        """
        itemsize = 4 if self.precision == "fp32" else 2
        master = 0 if self.precision == "fp32" else 4
        moved = 2 * (master + moments) + itemsize + (itemsize if master else 2 * itemsize)
        return moved / self.machine.figures.get("memory_rate", math.inf)

    def moment_bytes(self, layout: Any) -> float:
        """Return the bytes of float32 optimizer state per parameter."""
        trained = sum(math.prod(leaf.shape) for leaf in layout.leaves)
        # Shared scalars, such as a step count, stay on the device and are not counted.
        own = [
            a
            for j, a in enumerate(layout.opt_map.leaves)
            if a.shape or j not in layout.opt_map.shared
        ]
        total = sum(math.prod(a.shape) * a.dtype.itemsize for a in own)
        return total / max(1, trained) * (2.0 if self.base.moments == "bfloat16" else 1.0)

    def elements(self, layout: Any, indices: Sequence[int]) -> int:
        """Return the elements of some leaves on one device of a tensor group."""
        leaves = [layout.all_leaves[i] for i in indices]
        return sum(local_elements(leaf.shape, leaf.spec.base, self.mesh) for leaf in leaves)

    def gathered_elements(self, layout: Any, indices: Sequence[int]) -> int:
        """Return the elements of some leaves, with frozen leaves counted by their bytes.

        A frozen leaf counts as its bytes divided by the compute dtype's item size.
        """
        trained, frozen = (
            [i for i in indices if layout.all_leaves[i].frozen == is_frozen]
            for is_frozen in (False, True)
        )
        return self.elements(layout, trained) + self.frozen_bytes(layout, frozen) // (
            4 if self.precision == "fp32" else 2
        )

    def largest_leaf(self, layout: Any) -> int:
        """Return the elements of the largest trainable leaf on one device of a tensor group.

        A stacked leaf counts all its layers.
        """
        return max(
            (
                self.elements(layout, [i])
                for i, leaf in enumerate(layout.all_leaves)
                if not leaf.frozen
            ),
            default=0,
        )

    def frozen_bytes(self, layout: Any, indices: Sequence[int]) -> int:
        """Return the bytes of some frozen leaves, as stored."""
        leaves = [layout.all_leaves[i] for i in indices]
        return sum(
            local_elements(leaf.shape, leaf.spec.base, self.mesh) * leaf.dtype.itemsize
            for leaf in leaves
        )

    def frozen_flops(self, layout: Any, indices: Sequence[int], forward: float) -> float:
        """Return the FLOPs of the gradients that frozen matrices among some leaves do not need.

        The result is at most `forward`, the FLOPs of these leaves in forward.
        """
        frozen = [
            leaf.decodes or leaf
            for leaf in map(layout.all_leaves.__getitem__, indices)
            if leaf.frozen
        ]
        matrices = sum(math.prod(leaf.shape) for leaf in frozen if len(leaf.shape) - leaf.lead > 1)
        return min(2.0 * self.tokens * matrices, forward)


class _LayeredTracer(_Tracer):
    def workload(self) -> Workload:
        """Trace, and time if possible, every stack, the embedding and the head."""
        # gather_ahead makes the step stream although everything is on the device.
        steps = {mode: self.parts(stage=3, activations=mode, gather_ahead=True) for mode in MODES}
        kept = {
            mode: kept_by_program(parts.records, parts.step, self.batch)
            for mode, parts in steps.items()
        }
        step = steps["save"].step
        assert isinstance(step, StreamedStep)
        layout = step.layout
        state = step.layout.abstract_arrays
        plans = {mode: parts.step.abstract_residuals(self.shapes) for mode, parts in steps.items()}
        entered = step.embed_head.abstract_inputs(
            layout.join(state), state.model_state, self.shapes
        )
        stacks = []
        for n, loops in enumerate(step.loops):
            by_mode = {
                mode: sum(k.num_bytes for k in kept[mode] if k.stack == loops.stack.name)
                for mode in MODES
            }
            blocks = {mode: plans[mode][n].block for mode in MODES}
            args = loops.tracer.abstract_call(entered[n][1], entered[n][2], 1)
            stacks.append(self.stack(loops, blocks, by_mode, args))
        embed, head, embed_backward, head_working = self.embed_head_costs(step)
        unstacked = [i for i, leaf in enumerate(layout.all_leaves) if not leaf.is_stacked]
        trained = [i for i in unstacked if not layout.all_leaves[i].frozen]
        parts = [
            [i for i in unstacked if layout.all_leaves[i].path[0].key == name]
            for name in ("embed", "head")
        ]
        of_head = [layout.all_leaves[i] for i in parts[1]]
        has_own = any(
            len((leaf.decodes or leaf).shape) > 1 for leaf in of_head
        )  # else the head is the embedding
        pairs = zip(step.loops, plans["remat"], strict=True)
        flops = forward_flops = 0.0
        for loops, plan in pairs:
            forward = loops.stack.num_layers * self.flops_of_block(plan.block)
            forward_flops += forward
            flops += 3.0 * forward - self.frozen_flops(layout, loops.stack.leaves.in_tree, forward)
        resident = self.parts(stage=3, activations="remat")
        whole = kept_by_program(resident.records, resident.step, self.batch).num_bytes
        return Workload(
            name=f"{layout.num_params:,} parameters, {self.model.num_layers} layers",
            stacks=tuple(stacks),
            unstacked_elements=self.elements(layout, trained),
            largest_unstacked=max(self.gathered_elements(layout, part) for part in parts),
            largest_leaf=self.largest_leaf(layout),
            unstacked_frozen_bytes=self.frozen_bytes(
                layout, [i for i in unstacked if layout.all_leaves[i].frozen]
            ),
            unstacked_kept=max(0, whole - kept["remat"].num_bytes),
            head_working=head_working,
            embed=embed,
            head=head,
            embed_backward=embed_backward,
            moment_bytes=self.moment_bytes(layout),
            update=self.update_seconds(self.moment_bytes(layout)),
            batch_bytes=sum(
                math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
                for a in jax.tree.leaves(self.batch)
            ),
            rows=self.rows // self.grid.batch_shards,
            tokens=self.tokens,
            flops=flops
            + 3.0 * self.head_flops
            - self.frozen_flops(layout, parts[1] if has_own else unstacked, self.head_flops),
            forward_flops=forward_flops,
            source=self.source,
        )

    def flops_of_block(self, block: Any) -> float:
        """Return the FLOPs of a block's forward on all devices."""
        return sum(count_flops(i.eqn) for i in block.program.instructions)

    def stack(
        self, loops: StackLoops, blocks: Mapping[str, Any], kept: Mapping[str, int], args: Any
    ) -> StackWork:
        """Return the work of one stack."""
        layout = loops.plan.layout
        leaves = loops.stack.leaves
        num_layers = loops.stack.num_layers
        forward, backward, working = self.block_seconds(loops, blocks, args)
        trained = [i for i in leaves.in_tree if not layout.all_leaves[i].frozen]
        frozen = [i for i in leaves.in_tree if layout.all_leaves[i].frozen]
        each = {mode: n // num_layers for mode, n in kept.items()}
        backward["everything"] += self.kept_seconds(each["everything"] - each["save"])
        return StackWork(
            name=loops.stack.name,
            num_layers=num_layers,
            elements=self.elements(layout, trained) // num_layers,
            frozen_bytes=self.frozen_bytes(layout, frozen) // num_layers,
            x_bytes=each["remat"],
            kept=each,
            working=working,
            forward=forward,
            backward=backward,
            values=self.values(blocks["save"], forward),
        )

    def block_seconds(
        self, loops: StackLoops, blocks: Mapping[str, Any], args: Any
    ) -> tuple[float, dict[str, float], dict[str, int]]:
        """Return a block's forward seconds, and its backward seconds and working bytes by mode."""
        if self.watch is not None:
            forward, derivatives = self.watch.block(loops, blocks, args)
            seconds, working = (
                {mode: getattr(t, name) for mode, t in derivatives.items()}
                for name in ("seconds", "working")
            )
            return forward.seconds, seconds, working
        derivatives = {mode: derivative_jaxpr(block, *args) for mode, block in blocks.items()}
        programs = {
            mode: flatten(closed.jaxpr, closed.consts) for mode, closed in derivatives.items()
        }
        live = {
            mode: dataclasses.replace(p, instructions=p.live(p.outputs))
            for mode, p in programs.items()
        }
        working = {
            mode: peak_bytes(p, self.rows) // self.grid.batch_shards for mode, p in programs.items()
        }
        return (
            self.roofline(blocks["remat"].program),
            {mode: self.roofline(p) for mode, p in live.items()},
            working,
        )

    def values(self, block: Any, forward: float) -> tuple[Value, ...]:
        """Return the values that a block can save, in program order, with their recompute times."""
        program = block.program
        total = self.roofline(block.program)
        scale = forward / total if total else 0.0
        number = {slot: n for n, slot in enumerate(block.residuals)}
        made = {out: i for i in program.instructions for out in i.outs}
        shards = self.grid.batch_shards * self.grid.tensor
        found = list[Value]()
        names = set[str]()
        for n, (slot, shape, label) in enumerate(
            zip(block.residuals, block.shapes, block.labels, strict=True)
        ):
            seconds = 0.0
            operands = set[int]()
            seen = set[int]()
            left = [slot]
            while left:
                at = left.pop()
                if at in seen or at not in made:
                    continue
                seen.add(at)
                if at != slot and at in number:
                    operands.add(number[at])
                    continue
                seconds += self.costs(made[at]) * scale
                left += made[at].reads
            name = label.split(" ")[0] if label.startswith("#") else label
            name = name if name not in names else f"{name} ({n})"
            names.add(name)
            size = max(1, _num_bytes(shape) // shards)
            found.append(
                Value(
                    name=name,
                    num_bytes=size,
                    seconds=seconds,
                    operands=tuple(sorted(k for k in operands if k < n)),
                )
            )
        return tuple(found)

    # --- embedding and head -----------------------------------------------------------------------

    def embed_head_costs(self, step: StreamedStep) -> tuple[float, float, float, int]:
        """Return the seconds of embedding, head and embedding's backward, and the head's bytes.

        The head's seconds include its backward; its bytes are those it needs while it runs.
        """
        layout = step.layout
        state = step.layout.abstract_arrays
        embed_head = step.embed_head
        leaves = {name: tree for name, tree in layout.join(state).items() if name != "blocks"}
        key = jax.random.key(0) if self.model.stochastic else None
        if state.model_state is None:
            before = None
        else:
            before = {k: v for k, v in state.model_state.items() if k != "blocks"}

        def embed(leaves: Any, batch: Batch) -> Any:
            return embed_head.embed_all(embed_head.load(leaves), batch, key, before)

        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)  # noqa: E731
        if before is not None:
            before = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), before)
        out = jax.eval_shape(embed, jax.tree.map(shape, leaves), self.shapes)
        y = embed_head.abstract_inputs(layout.join(state), state.model_state, self.shapes)[-1][1]
        states = out[1]
        after = out[2]

        def head(leaves: Any, y: Any, batch: Batch) -> Any:
            read = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), after)
            done = embed_head.head_and_grads(
                embed_head.load(leaves), y, batch, key, jnp.float32(1), read
            )
            return done.loss, done.dy, done.grads

        def forward(leaves: Any, y: Any, batch: Batch) -> Any:
            read = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), after)
            return embed_head.head(embed_head.load(leaves), y, batch, key, read)[0].total

        def embed_backward(leaves: Any, dx: Any, grads: Grads, batch: Batch) -> Any:
            read = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), states)
            return embed_head.embed_grads(embed_head.load(leaves), batch, key, dx, read, grads)

        _, _dy, grads = jax.eval_shape(head, jax.tree.map(shape, leaves), y, self.shapes)
        calls = (
            (embed, (leaves, self.batch)),
            (head, (leaves, y, self.batch)),
            (embed_backward, (leaves, out[0], grads, self.batch)),
        )
        programs = [_program(f, jax.tree.map(shape, args)) for f, args in calls]
        only_forward = _program(forward, jax.tree.map(shape, (leaves, y, self.batch)))
        self.head_flops = sum(count_flops(i.eqn) for i in only_forward.instructions)
        working = peak_bytes(programs[1], self.rows) // self.grid.batch_shards
        if self.watch is None:
            first, second, third = map(self.roofline, programs)
        else:
            timed = [self.watch.call(f, *args) for f, args in calls]
            first, second, third = (t.seconds for t in timed)
            working = timed[1].working
        return first, second, third, working


class _PlainTracer(_Tracer):
    def workload(self) -> Workload:
        """Trace a plain Model as a single layer that is the full model."""
        modes = ("everything", "save", "remat")
        parts = {mode: self.parts(stage=0, activations=mode) for mode in modes}
        layout = parts["save"].records.layout
        state = parts["save"].records.layout.abstract_arrays
        kept = {
            mode: kept_by_program(p.records, p.step, self.batch).num_bytes
            for mode, p in parts.items()
        }
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)  # noqa: E731
        key = jax.random.key(0) if self.model.stochastic else None
        params = layout.join(state)
        model_state = state.model_state

        def of_mode(mode: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
            """Return the loss, and the loss with its derivative."""
            objective = parts[mode].step.objective

            def loss(params: Params, batch: Batch, model_state: ModelState) -> Any:
                return objective(params, batch, key, model_state)[0].value()

            return loss, lambda params, batch, state: jax.value_and_grad(loss, allow_int=True)(
                params, batch, state
            )

        abstract = jax.tree.map(shape, (params, self.batch, model_state))
        loss, derivative = of_mode("save")
        forward_program = _program(loss, abstract)
        both = _program(derivative, abstract)
        plain_derivative = of_mode("everything")[1]
        if self.watch is not None:
            args = (params, self.batch, model_state)
            forward, whole, plain = (
                self.watch.call(f, *args).seconds for f in (loss, derivative, plain_derivative)
            )
        else:
            forward = self.roofline(forward_program)
            whole = self.roofline(both)
            plain = self.roofline(_program(plain_derivative, abstract))
        backward = max(whole - forward, forward)
        plain_backward = max(plain - forward, forward)
        plain_backward += self.kept_seconds(kept["everything"] - kept["save"])
        trained = range(len(layout.leaves))
        kept["selective"] = kept["save"]
        largest = max((math.prod(layout.leaves[i].shape) for i in trained), default=0)
        working = peak_bytes(both, self.rows) // self.grid.batch_shards
        stack = StackWork(
            num_layers=1,
            elements=self.elements(layout, trained),
            frozen_bytes=self.frozen_bytes(
                layout, range(len(layout.leaves), len(layout.all_leaves))
            ),
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
        moments = self.moment_bytes(layout)
        forward_flops = sum(count_flops(i.eqn) for i in forward_program.instructions)
        return Workload(
            name=f"{layout.num_params:,} parameters",
            is_layered=False,
            stacks=(stack,),
            unstacked_elements=0,
            largest_unstacked=largest,
            largest_leaf=self.largest_leaf(layout),
            head_working=0,
            embed=0.0,
            head=0.0,
            embed_backward=0.0,
            moment_bytes=moments,
            update=self.update_seconds(moments),
            batch_bytes=sum(
                math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
                for a in jax.tree.leaves(self.batch)
            ),
            rows=self.rows // self.grid.batch_shards,
            tokens=self.tokens,
            flops=3.0 * forward_flops
            - self.frozen_flops(layout, range(len(layout.all_leaves)), forward_flops),
            forward_flops=forward_flops,
            source=self.source,
        )


def _program(function: Callable[..., Any], args: Sequence[Any]) -> FlatJaxpr:
    """Return a function of abstract arguments as a flat list of the equations it needs."""
    closed = jax.make_jaxpr(function)(*args)
    program = flatten(closed.jaxpr, closed.consts)
    return dataclasses.replace(program, instructions=program.live(program.outputs))


def _num_bytes(aval: Any) -> int:
    """Return the bytes of an array on all devices together; 0 for a PRNG key."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * dtype.itemsize


def peak_bytes(program: FlatJaxpr, rows: int) -> int:
    """Return the peak bytes of activations alive at one equation, on all devices together.

    Only activations that XLA keeps in memory count: results of products, look-ups, reductions,
    loops and kernels whose dim 0 counts the batch or its tokens. Elementwise results are fused into
    their readers. Inputs and gradients of weights are not counted.

    Args:
      program: flat program of a derivative.
      rows: number of rows in the batch.
    """
    last: dict[int, int] = {}
    for n, i in enumerate(program.instructions):
        last.update(dict.fromkeys(i.reads, n))
    last.update({ref: len(program.instructions) for ref in program.outputs if isinstance(ref, int)})
    alive = 0
    peak = 0
    freed_at = dict[int, int]()
    for n, i in enumerate(program.instructions):
        is_fused = not (
            i.has_jaxpr or count_flops(i.eqn) or i.eqn.primitive.name in REDUCTIONS | PRODUCTS
        )
        for slot, v in zip(i.outs, i.eqn.outvars, strict=True):
            shape = getattr(v.aval, "shape", ())
            if is_fused or not shape or not rows or shape[0] % rows:
                continue
            size = _num_bytes(v.aval)
            alive += size
            stop = last.get(slot, n)
            freed_at[stop] = freed_at.get(stop, 0) + size
        peak = max(peak, alive)
        alive -= freed_at.pop(n, 0)
    return peak
