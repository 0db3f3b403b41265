"""Compile a step: once for each shape of batch, with host memory shared between the compiled steps.

    step     (state, batch, scratch) -> ((state, scratch), metrics)        state and scratch donated
    eval     (params, model_state, batch) -> loss, or a dict of it and metrics
    apply    (params, model_state, batch) -> outputs of the model
    grads    (state, batch, scratch) -> ((loss, gradients), scratch)       scratch donated

A step is jitted when the first batch of a shape arrives. The shardings of everything that it takes
and returns are given, including memory kinds: JAX then pairs a donated argument with a result in
the same memory.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from host_offload.engine import DiskRecords
from zerojax.aot import CompiledProgram, compile_with_callbacks, is_there
from zerojax.config import calls_host, moves_host_memory, streams
from zerojax.models import LayeredModel, Model
from zerojax.optim import LearningRates, learning_rates
from zerojax.program.call_order import order_calls
from zerojax.program.step import Scratch, Step
from zerojax.sharding import (
    STAGES,
    ActivationSpec,
    Rows,
    batch_size,
    explicit,
    named,
    num_zero_shards,
)
from zerojax.state import (
    Layout,
    TrainState,
    allocate_all,
    check_host_reads,
    numbered_next,
    unit_bytes,
)
from zerojax.trees import Batch

_WRONG_OPTION = re.compile(r"No such compile option: '[^']*'|While setting option [^\n]*[^\n.]")
"""XLA's errors about options."""


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A train step that is lowered and not yet compiled.

    Attributes:
      lowered: the lowered step.
      mesh: mesh that it was lowered for.
      options: XLA options that the program sets itself, or None.
      has_callbacks: whether the step calls back to the host.
      step: compiled form of the step that will run the result, or None.
    """

    lowered: jax.stages.Lowered
    mesh: Mesh
    options: Mapping[str, Any] | None = None
    has_callbacks: bool = False
    step: "CompiledStep | None" = None

    def as_text(self) -> str:
        """Return the StableHLO."""
        return self.lowered.as_text()

    def compile(
        self, options: Mapping[str, str | bool | int | float] | None = None
    ) -> jax.stages.Compiled | CompiledProgram:
        """Compile the step.

            options = {"xla_gpu_enable_while_loop_double_buffering": False}
            compiled = program.lower(batch).compile(options)

        The result has `as_text()` (scheduled HLO of one device) and `memory_analysis()`. If the
        devices are available, the program's steps over batches of this shape run the last compiled
        result.

        Args:
          options: XLA options by name, as in XLA_FLAGS without the dashes; they take precedence
            over the program's own. None: only the program's own. Other programs, such as `eval`, do
            not get them.

        Raises:
          ValueError: this version of XLA does not know an option or its value.
        """
        check_options(options)
        try:
            # Without the devices, the topology's own client compiles callbacks.
            if self.has_callbacks and not is_there(self.mesh):
                return compile_with_callbacks(
                    self.lowered, self.mesh, {**(self.options or {}), **(options or {})}
                )
            with jax.set_mesh(self.mesh):
                plain_options: dict[str, Any] | None = dict(options) if options else None
                compiled = self.lowered.compile(plain_options)
        except jax.errors.JaxRuntimeError as error:
            wrong = _WRONG_OPTION.search(str(error))
            if not options or wrong is None:
                raise
            raise ValueError(
                f"compile({dict(options)}): XLA of jax {jax.__version__} says: {wrong[0]}; use "
                "the names of XLA_FLAGS that this version has, without dashes"
            ) from error
        # `jax.jit` does not use executables that were compiled ahead of time, and would compile the
        # same program again.
        if self.step is not None and is_there(self.mesh):
            self.step.run = compiled
        return compiled


def check_options(options: Any) -> None:
    """Raise ValueError unless options for XLA are None or a dict of names and plain values."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ValueError(f"compile takes XLA's options as a dict, by name, got {options!r}")
    wrong = {}
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
            wrong[name] = value
    if wrong:
        raise ValueError(
            f"XLA's options are text, numbers or booleans by name, and these are not: {wrong}"
        )
    dashed = [name.lstrip("-") for name in options if name.startswith("-")]
    if dashed:
        raise ValueError(f"XLA's options are named without dashes: {', '.join(dashed)}")


@dataclasses.dataclass(eq=False)
class CompiledStep:
    """The step for batches of one shape.

    Attributes:
      step: `step(state, batch, scratch) -> ((state, scratch), metrics)`, jitted.
      abstract_args: shapes and shardings of its arguments.
      written: records on disk that it writes before it reads them.
      run: function that a step calls: `step`, or its result of ahead-of-time compilation.
      is_ordered: whether its callbacks know the order of their calls.
      has_run: whether it was called, and so is compiled.
    """

    step: Any
    abstract_args: tuple[Any, Any, Scratch]
    written: Sequence[DiskRecords] = ()
    run: Any = None
    is_ordered: bool = False
    has_run: bool = False

    def __post_init__(self) -> None:
        """Run `step` until something else was compiled."""
        self.run = self.step

    @property
    def abstract_scratch(self) -> Scratch:
        """Shapes and shardings of the host memory that the step uses while it runs."""
        return self.abstract_args[2]


class StepCompiler:
    """Jit a step for each shape of batch that arrives.

    Attributes:
      options: options for XLA, or None.
    """

    def __init__(self, model: Model | LayeredModel, layout: Layout, step: Step) -> None:
        """Jit the functions of `step`, for this model and layout."""
        self._layout = layout
        self._step = step
        self.options = compiler_options(model, layout)
        self._by_shape: dict[Any, CompiledStep] = {}
        self._grads_by_shape: dict[Any, Any] = {}
        self._evals: dict[Rows | None, Any] = {}
        self._applies: dict[Any, Any] = {}
        self._rates = learning_rates(layout)
        self._ordered: dict[int, Any] = {}  # traced programs by id

    def step(self, batch: Batch) -> CompiledStep:
        """Return the step for batches of this shape, abstract or not.

        Must be called under the mesh.
        """
        key = _build_batch_key(batch)
        if key not in self._by_shape:
            self._by_shape[key] = self._jit(batch)
        return self._by_shape[key]

    def order(self, program: Any, args: Sequence[Any]) -> Any:
        """Trace a jitted program, and store in its callbacks the order of their calls.

        Must be called under the mesh, before the program runs: a call with the same arguments is
        not traced again.

        Args:
          program: jitted program.
          args: arguments of the program, abstract or not.

        Returns:
          The traced program.
        """
        traced = program.trace(*args)
        closed = traced.jaxpr
        if id(closed) not in self._ordered:
            order_calls(closed)
            self._ordered[id(closed)] = closed
        return traced

    @functools.cached_property
    def settle(self) -> Any:
        """`settle(state)`, jitted with the state donated."""
        shardings = explicit(self._layout.shardings)

        def settle(state: TrainState) -> TrainState:
            state = self._step.settle(state)
            return state if self._layout.disk is None else numbered_next(state)

        return jax.jit(
            settle,
            donate_argnums=0,
            in_shardings=(shardings,),
            out_shardings=shardings,
            compiler_options=self.options,
        )

    def eval(self, rows: Rows | None) -> Any:
        """Return `eval(params, model_state, batch)`, jitted, for batches of any shape.

        Args:
          rows: rows of a padded batch that count; None for all.
        """
        if rows not in self._evals:
            self._evals[rows] = jax.jit(
                self._of_rows(self._step.eval, rows), compiler_options=self.options
            )
        return self._evals[rows]

    def apply(self, rows: Rows | None, *args: Any) -> Any:
        """Return `apply(params, model_state, batch)`, jitted for a batch of the shape in `args`.

        Outputs whose dim 0 is the batch's are split like the batch, if it divides; all other
        outputs are on every device.

        Args:
          rows: rows of a padded batch that count; None for all.
          *args: arguments of the function.
        """
        batch = args[2]
        key = (rows, _build_batch_key(batch))
        if key not in self._applies:
            mesh = self._layout.mesh
            function = self._of_rows(self._step.apply, rows)
            size = batch_size(batch) if rows is None else None

            def sharding(a: Any) -> Any:
                if a.shape[:1] == (size,):
                    return ActivationSpec(mesh).batch(len(a.shape))
                return named(mesh, ())

            shardings = jax.tree.map(sharding, jax.eval_shape(function, *args))
            self._applies[key] = jax.jit(
                function, out_shardings=shardings, compiler_options=self.options
            )
        return self._applies[key]

    def _of_rows(self, function: Callable[..., Any], rows: Rows | None) -> Callable[..., Any]:
        """Return a function of padded batches that passes only these rows to `function`."""
        if rows is None:
            return function
        mesh = self._layout.mesh
        return lambda params, model_state, batch: function(
            params, model_state, rows.cut(batch, mesh)
        )

    def grads(self, batch: Batch) -> Any:
        """Return `grads(state, batch, scratch)`, jitted, for batches of this shape.

        Must be called under the mesh.
        """
        key = _build_batch_key(batch)
        if key not in self._grads_by_shape:
            layout = self._layout
            scalar = named(self._layout.mesh, ())
            at = layout.param_shardings(STAGES[layout.config.stage].params)
            host = jax.tree.map(lambda a: a.sharding, self.step(batch).abstract_scratch)
            self._grads_by_shape[key] = jax.jit(
                self._step.grads,
                donate_argnums=2,
                out_shardings=((explicit(scalar), at), host),
                compiler_options=self.options,
            )
        return self._grads_by_shape[key]

    def _jit(self, batch: Batch) -> CompiledStep:
        layout = self._layout
        mesh = self._layout.mesh
        step = self._step
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
        # This traces the block, so that `Step.moves` knows its loops.
        scratch = step.abstract_scratch(abstract)
        written = step.records_written(abstract)
        scalar = named(mesh, ())
        whole = explicit(scalar)
        state = explicit(layout.shardings)
        host = jax.tree.map(lambda a: a.sharding, scratch)
        batches = jax.tree.map(lambda a: ActivationSpec(mesh).batch(len(a.shape)), batch)
        run = with_learning_rates(step.step, self._rates) if self._rates.names else step.step
        # State and scratch are donated, so that host memory is updated in place too.
        jitted = jax.jit(
            run if layout.disk is None else with_next_number(run),
            donate_argnums=(0, 2),
            in_shardings=(state, explicit(batches), host),
            out_shardings=((state, host), whole),
            compiler_options=self.options,
        )
        args = (
            layout.abstract_state,
            jax.tree.map(
                lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
                abstract,
                batches,
            ),
            scratch,
        )
        return CompiledStep(jitted, args, written)

    def clear(self) -> None:
        """Forget all compiled programs."""
        for compiled in (
            self._by_shape,
            self._grads_by_shape,
            self._evals,
            self._applies,
            self._ordered,
        ):
            compiled.clear()


def _build_batch_key(batch: Batch) -> Any:
    """Return a hashable key for the shapes and dtypes of a batch."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((a.shape, jnp.dtype(a.dtype)) for a in leaves)


class ScratchMemory:
    """Host memory of steps between their calls.

    A step's returned scratch is given to the next step with the same shapes. Stacks that do not
    depend on the batch, such as gradients, are shared by steps of all shapes. For stacks that do,
    such as activations, only the last shape's are kept.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self._stacks: dict[str, tuple[list[Any], list[jax.Array]]] = {}

    def take(self, abstract: Scratch, mesh: Mesh) -> Scratch:
        """Return the scratch of a step, allocating what is missing.

        It is donated, so a step that fails leaves none.

        Args:
          abstract: shapes and shardings of the scratch, by use.
          mesh: mesh of the program.
        """
        scratch: Scratch = {}
        for use, shapes in abstract.items():
            last_shapes, stacks = self._stacks.pop(use, (None, []))
            if last_shapes != shapes:
                del stacks  # before new ones are allocated
                if shapes:
                    check_host_reads(mesh)
                stacks = allocate_all(shapes)
            scratch[use] = stacks
        return scratch

    def keep(self, abstract: Scratch, scratch: Scratch) -> None:
        """Keep the scratch that a step returned."""
        self._stacks = {use: (abstract[use], stacks) for use, stacks in scratch.items()}

    def stacks(self, use: str) -> list[jax.Array]:
        """Return the kept stacks for a use."""
        return self._stacks.get(use, ([], []))[1]

    def clear(self) -> None:
        """Release all kept memory."""
        self._stacks.clear()


def with_next_number(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that advances the state's number on disk."""

    def numbered(*args: Any) -> Any:
        (state, scratch), metrics = step(*args)
        return (numbered_next(state), scratch), metrics

    return numbered


def with_learning_rates(step: Callable[..., Any], rates: LearningRates) -> Callable[..., Any]:
    """Return a step whose metrics include its optimizer's learning rates.

    The step raises ValueError if a metric of its own has the name of a learning rate.
    """

    def with_rates(state: TrainState, *args: Any) -> Any:
        (after, scratch), metrics = step(state, *args)
        duplicates = sorted(set(metrics) & set(rates.names))
        if duplicates:
            raise ValueError(
                f"the loss returns metrics {duplicates}, which are this optimizer's learning "
                "rates: rename them"
            )
        return (after, scratch), metrics | rates(state.opt_state, after.opt_state)

    return with_rates


def compiler_options(model: Model | LayeredModel, layout: Layout) -> dict[str, Any] | None:
    """Return XLA options for GPUs, or None for other devices.

    Collectives are combined up to one layer, and copies of host memory run on streams. XLA's
    default merges the gradients of several layers into one reduce_scatter, and holds all of them
    until it runs. It also puts most copies of host memory into CUDA graphs, where the driver
    chooses how they are made.
    """
    if layout.mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return None
    leaves, layer = unit_bytes(layout)
    widening = 2 if layout.reduces_in_float32 else 1  # gradients relative to parameters
    # A Model's layers are unknown, so its collectives are combined up to one leaf.
    threshold = layer if isinstance(model, LayeredModel) else max(leaves)
    shards = num_zero_shards(layout.mesh)
    # XLA compares the all_gather threshold with the full array, and the reduce_scatter threshold
    # with the shard.
    options: dict[str, Any] = {
        "xla_gpu_all_gather_combine_threshold_bytes": threshold,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": widening * threshold // shards,
    }
    if layout.mesh.size > 32 and jax.__version_info__ >= (0, 12):
        # XLA's own all_reduce kernel has a thread of one warp for each device. With more than 32
        # devices the compiler of jaxlib 0.12.0 ends the process: "size mismatch when packing
        # elements for LLVM struct". Without these kernels, NCCL runs the collectives.
        options["xla_gpu_experimental_use_collective_kernels"] = ""
    if moves_host_memory(layout.config) and not layout.config.cuda_graphs:
        options["xla_gpu_enable_command_buffer"] = ""
    if calls_host(layout.config):
        # From 0.11 on, XLA moves a callback into a fusion with the slices of stacks that are its
        # operands. Before 0.12 it clones the callback and also keeps the original, because
        # callbacks have side effects. With `update_on="host"`, each layer was then updated twice
        # per step (an H100, jaxlib 0.11.2).
        options["xla_gpu_enable_dynamic_slice_fusion"] = False
    if isinstance(model, LayeredModel) and streams(layout.config):
        # A layer's gradients are reduced leaf by leaf, overlapped with its remaining products.
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = widening * max(leaves) // shards
        # By default XLA lets only one collective and one copy run at a time, and so starts the next
        # where the last one ended. Each limit is above what a tick has in flight. A tick of GPT
        # blocks updated in backward has 4 reduce_scatters and 21 copies to the device. Compiled for
        # 8 H200s, its copies of weights and moments overlap 17 products. With a limit of 4 copies,
        # or of 1, no copy overlaps any product. With a limit of 1 collective, the longest
        # reduce_scatter spans 3 products instead of 7.
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 16
        options["xla_gpu_experimental_parallel_async_compute_limit"] = 64
    return options
