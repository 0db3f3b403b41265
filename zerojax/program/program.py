"""The program that `build_train_step` returns: one model's train step with its compiled forms.

Between steps it holds no arrays except host memory. It knows the layout of its state (specs,
shardings, bytes) before anything is allocated, so it can be lowered and accounted for on a mesh
whose devices are not available. A step defines the computation (`zerojax.program.step`). The
program compiles and runs the step and passes its arguments, in the same way for every kind of step:

    check the state, place the batch  ->  compile, once per shape  ->  begin the disk  ->  run
        ->  raise errors
"""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import optax

from host_offload.schedule import Move, Schedule, StepPlan
from zerojax.activations import BlockProduct, SequenceParallelism
from zerojax.hlo import HostTraffic, host_traffic, module_name, read_thunks
from zerojax.memory import (
    KeptValues,
    MemoryReport,
    kept_by_program,
    program_memory,
    steps_of_program,
)
from zerojax.models import CACHE, LayeredModel, Model, split_faults, with_cache
from zerojax.pipeline import PipelineSchedule
from zerojax.program.away import move_away, move_back
from zerojax.program.compile import CompiledStep, LoweredStep, ScratchMemory, StepCompiler
from zerojax.program.fingerprint import batch_key, batch_lines, key_lines, trace_lines
from zerojax.program.gathering import GatheredEarly, build_gather
from zerojax.program.init import StateInit
from zerojax.program.read_params import ParamReader
from zerojax.program.runner import Runner
from zerojax.program.self_test import (
    VERIFY_OFFSETS,
    HostAddresses,
    SelfTest,
    verifies_offsets,
    wrong_offset,
)
from zerojax.program.skipped import SkipWarnings
from zerojax.program.step import Metrics, Step
from zerojax.program.updated_records import RecordSettler
from zerojax.progress import working
from zerojax.resident import ResidentStep
from zerojax.runtime import Calls, SwapSession
from zerojax.sharding import (
    PIPE,
    Replicated,
    Rows,
    abstract_batch,
    batch_part,
    check_batch,
    no_mesh,
    num_stages,
    place_any_batch,
    place_batch,
    uncommitted,
    without_mesh,
)
from zerojax.state import (
    StateCheck,
    StateRecords,
    TrainState,
    as_arguments,
    check_is_there,
    masters,
    narrow_params,
)
from zerojax.streamed import StreamedStep
from zerojax.trees import Batch, ModelState


class Predicts(Protocol):
    """The part of a plan (`zerojax.planner.Plan`) that `Program.trace_swaps` uses."""

    @property
    def spans(self) -> Sequence[tuple[str, str, float, float]]:
        """(lane, label, start, stop) of each lane's work, in seconds from the start of the step."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _CachedApply:
    """A forward with a cache for earlier tokens.

    Attributes:
      step: the step of a model with a cache.
      run: `run(params, model_state, cache, batch)`, jitted with the cache donated.
    """

    step: Step
    run: Any

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The records that it reads from disk, in order, once it has been traced."""
        return self.step.eval_moves(skips=True)

    @cached_property
    def unsettled_moves(self) -> tuple[Move, ...]:
        """The records that it reads of a state with a pending update, in order."""
        return self.step.unsettled_eval_moves()


class Program:
    """A train step over one model, optimizer, config and mesh, made by `build_train_step`.

    Attributes:
      model: the given model.
      state_model: the model whose layers are the records of the state: the given one, or in a
        pipeline one whose layers are several layers side by side (`zerojax.state.wide`).
      tx: the given optimizer; with bfloat16 moments, wrapped to keep them in bfloat16.
      records: how the state is stored, record by record.
      layout: location of every byte of the state.
      mesh: the given mesh, or the mesh with this package's axes that was made from it.
      config: the given config.
      swap: session of the nvme tier, or None.
      check_state: function that returns a state that this program can take, with numbers as arrays;
        raises ValueError for any other state.
      warnings: logs why steps were skipped, once their metrics are known.
      settler: reads a state's records with its pending update applied, for checkpoints.
      calls: compares this program's calls with the other processes' calls; None if there is only
        one process.
    """

    def __init__(
        self,
        model: Model | LayeredModel,
        tx: optax.GradientTransformation,
        records: StateRecords,
        step: Step,
        gathered_early: GatheredEarly,
        sequence: SequenceParallelism,
        state_model: Model | LayeredModel,
    ) -> None:
        """Run `step` over `model`, `tx` and the layout of `records`.

        Args:
          model: the model.
          tx: the optimizer.
          records: how the state is stored.
          step: equations of the step.
          gathered_early: filled by the step's traces.
          sequence: filled by the step's traces.
          state_model: the model whose layers are the state's records.
        """
        self.model = model
        self.state_model = state_model
        self.tx = tx
        self.records = records
        self.layout = records.layout
        layout = self.layout
        self.mesh = layout.mesh
        self.config = layout.config
        self._step = step
        self._gathered_early = gathered_early
        self._sequence = sequence
        self._compiler = StepCompiler(model, layout, step)
        self._scratch = ScratchMemory()
        self.swap = None if layout.disk is None else SwapSession(layout.disk)
        self._runner = Runner(self.swap, step.host)
        self.check_state = StateCheck(layout)
        self._init = StateInit(state_model, tx, records, step.update)
        self.warnings = SkipWarnings(self.config)
        self._cached: dict[int, _CachedApply] = {}  # by the length of caches
        self._reader = ParamReader(model, records, self._runner, step)
        self.settler = RecordSettler(records, self._runner, step)
        self.calls: Calls | None = None

    def __enter__(self) -> Self:
        """Return the program, to be closed at the end of a `with` block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the program."""
        self.close()

    @without_mesh
    def close(self) -> None:
        """Release the host memory that the program holds between steps, its threads and its folder.

        In a forked child this does nothing: folder, threads and memory belong to the parent.
        """
        if self._runner.is_forked:
            return
        if self.calls is not None:
            self.calls.close()
        with self.calling():
            self.warnings.look()
            self._compiler.clear()
            self._cached.clear()
            self._scratch.clear()
            self._runner.close()

    # --- facts about the step ---------------------------------------------------------------------

    @property
    def shardings(self) -> TrainState:
        """Shardings of the state: a TrainState of NamedSharding.

        In a pipeline they are those of the state's records (`zerojax.TrainState`).
        """
        return self.layout.shardings

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of each batch this process provides, and the number of parts.

        Each process passes its part of dim 0 to `step`. There is one part per process, unless
        `pipe`, `context` or `tensor` spans several processes: these provide the same rows.
        """
        return batch_part(self.mesh)

    @property
    def replicated(self) -> tuple[Replicated, ...]:
        """Parameters that `fsdp` does not split, with their bytes and the reason; largest first."""
        return self.layout.replicated

    @property
    def gathered_early(self) -> tuple[str, ...]:
        """Parameters of a Model that stage 3 could not gather on use, with the reason.

        They are known once the step is traced.
        """
        return tuple(self._gathered_early.sentences)

    @property
    def sequence_parallel(self) -> tuple[BlockProduct, ...]:
        """With `sequence_parallel`, the blocks' products: column, row, or unchanged and why.

        They are known once a step is traced.
        """
        return self._sequence.products

    @property
    def schedule(self) -> Schedule | PipelineSchedule:
        """The order in which layers are gathered, computed and released.

        A Model counts as one layer. In a pipeline it is the order of microbatches in every stage.
        """
        return self._step.schedule

    @cached_property
    def _moves(self) -> tuple[Move, ...]:
        return self._step.moves()

    @cached_property
    def _eval_moves(self) -> tuple[Move, ...]:
        return self._step.eval_moves()

    @cached_property
    def _apply_moves(self) -> tuple[Move, ...]:
        return self._step.eval_moves(skips=True)

    @cached_property
    def _unsettled_eval_moves(self) -> tuple[Move, ...]:
        return self._step.unsettled_eval_moves()

    @cached_property
    def _settle_moves(self) -> tuple[Move, ...]:
        return self._step.settle_moves()

    @cached_property
    def _grads_moves(self) -> tuple[Move, ...]:
        return self._step.grads_moves()

    @property
    def disk_metrics(self) -> dict[str, float]:
        """What the last step, evaluation or forward of this program moved on disk.

        Bytes, seconds and counts have the names of a step's metrics, such as `swap_read_bytes`. It
        is empty if nothing is stored on disk, and before the first call.
        """
        return dict(self._runner.moved)

    @without_mesh
    def memory(self, batch: Batch) -> MemoryReport:
        """Return the bytes of a step on each device, per tier, collective and host link.

        Args:
          batch: arrays, or a tree of ShapeDtypeStruct, with global shapes.

        Raises:
          ValueError: the model refuses the batch, or it does not divide.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            return program_memory(self.records, self._step, self.abstract_batch(batch))

    @without_mesh
    def operations(self, batch: Batch) -> StepPlan:
        """Return every operation of a step on records, in order.

        A step loads, gathers, computes, reduces and stores records. `program.schedule`,
        `program.memory` and the disk's reads ahead follow from this list, and the planner predicts
        the seconds of a step from one that is made in the same way. `print` shows it as a table:
        loops, their ticks, and for each operation the numbers of its records, its lane and its
        bytes per device.

        Args:
          batch: arrays, or a tree of ShapeDtypeStruct, with global shapes.

        Raises:
          ValueError: the model refuses the batch, or it does not divide.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            return steps_of_program(self.records, self._step, self.abstract_batch(batch))

    @without_mesh
    def kept(self, batch: Batch) -> KeptValues:
        """Return the saved activations of a step, each with name, shape, spec, tier and bytes.

        It is a tuple of `zerojax.memory.Kept`, largest first, and prints as a table. For a streamed
        step it contains the saved activations of the layers; for a resident step, embedding and
        head are included. For a step in pipeline stages it contains the saved activations of the
        layers in all slots. The activations in `program.memory` have two arrays more: x and its
        cotangent for one microbatch, on their way between stages.

        Args:
          batch: arrays, or a tree of ShapeDtypeStruct, with global shapes.

        Raises:
          ValueError: the model refuses the batch, or it does not divide.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            return kept_by_program(self.records, self._step, self.abstract_batch(batch))

    @without_mesh
    def host_copies(self, batch: Batch) -> HostTraffic:
        """Return the data that a step moves over each device's host link, by copies and by kernels.

        These are facts of the compiled program, not times. The step is compiled, and XLA's list of
        the work it will do (its thunks) distinguishes copies by the GPU's copy engines from
        kernels, which read and write host memory from the cores. Bytes moved by callbacks
        (`update_on="host"`, nvme) are not in the program, and so not counted. If the devices are
        available, steps over batches of this shape run the compiled result.

            print(program.host_copies(batch))  # bytes up and down, and the leaves that kernels move
            program.host_copies(batch).share_of_copies

        Args:
          batch: arrays, or a tree of ShapeDtypeStruct, with global shapes.

        Raises:
          ValueError: the model refuses the batch, or it does not divide.
          NotImplementedError: the mesh consists of CPUs, whose programs do not distinguish host
            memory from device memory.
        """
        platform = self.mesh.devices.flat[0].platform
        if platform not in ("gpu", "cuda"):
            raise NotImplementedError(
                f"host_copies reads programs for GPUs, and this mesh is of platform {platform!r}: "
                'build the program on zerojax.aot.gpu_mesh("h200"), which needs no GPU'
            )
        with tempfile.TemporaryDirectory() as folder:
            text = self.lower(batch).compile({"xla_dump_to": folder}).as_text()
            assert text is not None
            # A streamed step's loops of unknown trip count run once.
            return host_traffic(text, read_thunks(folder, module_name(text)), unknown_trips=1)

    def _check_by_model(self, batch: Batch) -> None:
        """Raise ValueError for a batch that the model itself refuses."""
        if self.model.check_batch is not None:
            self.model.check_batch(batch)

    def _check_shapes(self, batch: Batch) -> None:
        """Raise ValueError for a batch that the model refuses, or that does not divide."""
        self._check_by_model(batch)
        check_batch(batch, self.mesh, self.config.num_microbatches)

    @without_mesh
    def check(self, batch: Batch) -> None:
        """Trace a step over a batch's shapes, and raise ValueError if it cannot be trained.

        Nothing runs.

        Args:
          batch: arrays, or a tree of ShapeDtypeStruct, with global shapes.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            compiled = self._compiler.step(self.abstract_batch(batch))
            compiled.step.trace(*compiled.abstract_args)

    @without_mesh
    def lower(self, abstract_batch: Batch) -> LoweredStep:
        """Lower the step for this mesh, whose devices need not be available.

        Args:
          abstract_batch: tree of ShapeDtypeStruct, or of arrays whose shapes are read, with global
            shapes.

        Raises:
          ValueError: the model refuses the batch, or it does not divide.
        """
        self._check_shapes(abstract_batch)
        with jax.set_mesh(self.mesh):
            compiled = self._compiler.step(self.abstract_batch(abstract_batch))
            if self._runner.calls_back:
                lowered = self._compiler.order(compiled.step, compiled.abstract_args).lower()
            else:
                lowered = compiled.step.lower(*compiled.abstract_args)
        return LoweredStep(
            lowered, self.mesh, self._compiler.options, self._runner.calls_back, compiled
        )

    # --- running ----------------------------------------------------------------------------------

    @without_mesh
    def init(self, key: jax.Array) -> TrainState:
        """Make the state, each device its own shards.

        Args:
          key: key from `jax.random.key`, or a legacy uint32 key; the same key in all processes.

        Raises:
          ValueError: the key is no random key, or another process has a different key or makes
            different parameters from it.
          RuntimeError: host memory is too small for the arrays stored there, or this device and
            jaxlib read wrong records of it; or another process left.
          SwapError: the disk is too small for the records stored there, or cannot be written to.
        """
        if not isinstance(key, jax.Array):
            raise ValueError(f"init takes a random key, such as jax.random.key(0), got {key!r}")
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        if key.shape:
            raise ValueError(f"init takes one random key, got an array of shape {key.shape}")
        key = uncommitted(key)
        if self.calls is not None:
            self.calls.agree("init", {"key": key_lines(key)})
        with working("init"), self.calling(), jax.set_mesh(self.mesh):
            arguments = self._init.arguments(key, self._runner.open())
            if self.calls is not None:
                traced = self._init.jitted.trace(*arguments)
                self.calls.agree("init, traced", {"parameters": trace_lines(traced.jaxpr)})
            return self._runner.run("init", self._init.jitted, *arguments)

    def _note(self, call: str, batch: Batch) -> bool:
        """Compare a call over a batch with the other processes' calls.

        This happens before the batch is placed: processes must agree on its shapes before any
        program runs over it.

        Returns:
          Whether this is the first such call over these shapes.
        """
        if self.calls is None:
            return False
        return self.calls.note(call, batch_key(batch), lambda: batch_lines(batch))

    def _state_numbers(self, lines: Sequence[str]) -> None:
        """State the numbers that this process put into a state.

        If another process put in different numbers, the weights would differ.
        """
        if self.calls is not None:
            self.calls.tell("numbers put into the state", lines)

    def _compare_step(self, compiled: CompiledStep, args: Sequence[Any]) -> None:
        """Compare the traced step with the other processes'; its loss contains constants too."""
        if self.calls is not None:
            traced = compiled.step.trace(*as_arguments(args))
            self.calls.agree("step, traced", {"program": trace_lines(traced.jaxpr)})

    def calling(self) -> AbstractContextManager[None]:
        """Return a context in which to run programs over the state.

        If they call back, only one runs at a time, and no signal interrupts it.
        """
        return self._runner.calling()

    @without_mesh
    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one train step.

        Args:
          state: state from `init` or the previous step. It is donated: its buffers are reused, and
            it must not be read again.
          batch: tree of arrays whose dim 0 is the global batch; in a run of several processes,
            numpy leaves contain this process's part of it. Numpy arrays are copied before this
            returns, and may be refilled afterwards.

        Returns:
          The new state, and metrics as described in `zerojax.metrics.step_metrics` together with
          the metrics of the model's loss. A step whose gradients are not finite leaves the state as
          it was. A later call logs a warning about a batch with a fault (a metric `fault/...` of
          the model), and about many such steps in a row.

        Raises:
          ValueError: the state was already donated, the batch does not divide or the model refuses
            it, the loss is not a scalar, or another process has a batch of other shapes or another
            loss. It is raised before anything runs.
          RuntimeError: another process left before this step, or an update on the host failed.
          SwapError: a record on disk could not be moved; the state is lost.
        """
        return self._stepped(state, batch)

    def _stepped(
        self, state: TrainState, batch: Batch, host_addresses: HostAddresses | None = None
    ) -> tuple[TrainState, Metrics]:
        """Run one train step.

        If given, `host_addresses` reads the addresses of the arrays in host memory before and after
        the step.
        """
        check_is_there(state)
        is_first = self._note("step", batch)
        batch = self.shard_batch(batch)
        with self.calling(), jax.set_mesh(self.mesh):
            # Checked once more: another thread may have donated the state in the meantime.
            state = self.check_state(state, self._state_numbers)
            self.check_state.check_pending(state)
            # Before the moves: they follow from the block's loops over tiles, which a trace finds.
            compiled = self._compiler.step(batch)
            scratch = self._scratch.take(compiled.abstract_scratch, self.mesh)
            args = (state, batch, scratch)
            if is_first:
                self._compare_step(compiled, args)
            with nullcontext() if compiled.has_run else working("compile"):
                if self._runner.calls_back and not compiled.is_ordered:
                    self._compiler.order(compiled.step, as_arguments(args))
                    compiled.is_ordered = True
                addresses = self._runner.begin_step(state, self._moves, compiled.written)
                if host_addresses is not None:
                    host_addresses.read_before((state, scratch))
                results = self._runner.call(compiled.run, *args)
            compiled.has_run = True
            del args  # some of them were donated
            (state, scratch), metrics = self._runner.finished(results)
            if host_addresses is not None:
                host_addresses.read_after((state, scratch))
            # Before errors are raised: this memory has come back, whatever happened to the disk.
            self._scratch.keep(compiled.abstract_scratch, scratch)
            state, disk_metrics = self._runner.end_step(state, addresses)
            self.warnings.add_step(metrics)
            return state, metrics | disk_metrics

    @without_mesh
    def self_test(self, state: TrainState, batch: Batch) -> tuple[TrainState, SelfTest]:
        """Run one train step with checks of XLA's promises, for a new device, driver or jaxlib.

        The step is compiled once more so that XLA, if it can, compares each slice's offset in host
        memory with the offset that the device computed. The step's arrays in host memory must come
        back in the same memory. The resulting state is that of an ordinary step.

            state, found = program.self_test(state, batch)
            print(found)

        Args:
          state: state from `init` or the previous step. It is donated, and lost if a check fails.
          batch: batch as in `step`.

        Returns:
          The new state, and the results of the checks.

        Raises:
          RuntimeError: a slice was read at a wrong offset, or XLA copied donated host memory.
          ValueError: the state or the batch cannot be used, as in `step`.
        """
        verifies = verifies_offsets(self.mesh)
        lowered = self.lower(batch)
        addresses = HostAddresses()
        assert lowered.step is not None
        unverified = lowered.step.run
        try:
            # the next step of this shape runs the result
            lowered.compile({VERIFY_OFFSETS: True} if verifies else None)
            state, metrics = jax.block_until_ready(self._stepped(state, batch, addresses))
        except jax.errors.JaxRuntimeError as error:
            if not verifies:
                raise
            raise wrong_offset(error) from error
        finally:
            lowered.step.run = unverified
        addresses.check()
        return state, SelfTest(
            metrics=metrics,
            offsets_verified=verifies,
            num_host_arrays=len(addresses.before),
            host_bytes=addresses.num_bytes,
        )

    @without_mesh
    def settle(self, state: TrainState) -> TrainState:
        """Return the state with the update applied that the last step left to the next one.

        Only a step with update="in_forward" leaves one; any other state is returned unchanged. The
        next step applies the update by itself, so training does not need this call. Evaluations and
        reads of an unsettled state apply the update to what they read, on every call: settle the
        state before several of them. It costs as much as the update phase of
        update="after_backward", and no second state.

        Args:
          state: state from `init` or the previous step. It is donated.

        Raises:
          ValueError: the state was already donated, or another program left an update in it.
          RuntimeError: an update on the host failed.
          SwapError: a record on disk could not be moved; the state is lost.
        """
        check_is_there(state)
        if self.config.update != "in_forward":
            self._is_unsettled(state)  # raises for a state of another program
            return state
        with self.calling(), jax.set_mesh(self.mesh):
            state = self.check_state(state, self._state_numbers)
            self.check_state.check_pending(state)
            settle = self._compiler.settle
            if self._runner.calls_back:
                self._compiler.order(settle, as_arguments((state,)))
            addresses = self._runner.begin_step(state, self._settle_moves, name="settle")
            settled = self._runner.finished(self._runner.call(settle, state))
            state, _ = self._runner.end_step(settled, addresses)
            return state

    @without_mesh
    def offload(self, state: TrainState) -> TrainState:
        """Move a state off the device, into host memory, so that other work can have the device.

            state = program.offload(state)
            ...                             # another program, such as one that samples
            state = program.reload(state)

        Between these calls the program can do nothing with the state. Bits do not change. Arrays
        that are stored in host memory or on a disk stay there. The freed memory returns to JAX's
        pool: other programs of this process can use it, and other processes only if JAX does not
        keep the pool (`XLA_PYTHON_CLIENT_ALLOCATOR=platform`).

        Args:
          state: state from `init` or the previous step. It is donated.

        Raises:
          ValueError: the state was already donated, or another program made it.
          RuntimeError: host memory is too small.
        """
        check_is_there(state)
        with self.calling(), jax.set_mesh(self.mesh):
            return move_away(self.check_state(state, self._state_numbers), self.layout)

    @without_mesh
    def reload(self, state: TrainState) -> TrainState:
        """Move a state that `offload` returned back to where the program stores it.

        Args:
          state: state from `offload`. It is donated. A state that was not moved is returned as it
            is.

        Raises:
          ValueError: the state was already donated, or another program made it.
        """
        check_is_there(state)
        with self.calling(), jax.set_mesh(self.mesh):
            return self.check_state(move_back(state, self.layout), self._state_numbers)

    @without_mesh
    def eval(self, state: TrainState, batch: Batch) -> Any:
        """Return the loss of a batch, f32[], with key=None: deterministic, and without an update.

        If the model's loss has metrics, return a dict of "loss" and the metrics by name. The
        model's own state is only read.

        Args:
          state: state to read.
          batch: batch with any number of rows. If it does not divide by the devices of `data` x
            `fsdp`, it is padded when it is placed, and the loss covers only its own rows. A program
            is compiled for each number of rows.

        Raises:
          ValueError: the state was donated, or the model refuses the batch.
        """
        batch, rows = self._any_batch("eval", state, batch)
        return self._evaluated(
            self._evaluate("eval", state, batch, lambda *args: self._compiler.eval(rows))
        )

    @without_mesh
    def apply(self, state: TrainState, batch: Batch) -> Any:
        """Return the outputs of the model's `predict`, without keys and without an update.

        The state is read where it is stored.

        Args:
          state: state to read.
          batch: batch with any number of rows, as in `eval`.

        Returns:
          The tree that `predict` returns. Leaves whose dim 0 is the number of rows are split like
          the batch, over `data`, `fsdp` and `expert`. All other leaves are on every device; if the
          batch does not divide, all leaves are.

        Raises:
          ValueError: the model has no `predict`, or the state was donated.
        """
        if self.model.predict is None:
            kind = type(self.model).__name__
            raise ValueError(
                "program.apply runs the model's own function from a batch to outputs, and this "
                f"{kind} has none: give it predict=, as {kind}(..., predict=...) or "
                "from_flax(..., predict=...)"
            )
        batch, rows = self._any_batch("apply", state, batch)
        return self._evaluate(
            "apply", state, batch, lambda *args: self._compiler.apply(rows, *args)
        )

    @without_mesh
    def apply_cached(
        self, state: TrainState, batch: Batch, cache: Any, length: int
    ) -> tuple[Any, Any]:
        """Return the outputs of `predict` for tokens that follow others, and the updated cache.

        Args:
          state: state to read.
          batch: dict, as the model takes it; its rows must divide by the devices.
          cache: None if there are no earlier tokens, else the cache from the last call, which is
            donated.
          length: number of tokens that a cache has room for, the same in all calls.

        Returns:
          (outputs of `predict`, cache); the cache is a tree of arrays [B, L, ...].

        Raises:
          ValueError: the model has no `cache` or no `predict`, the batch does not divide, or the
            state was donated.
          NotImplementedError: the mesh has `pipe`.
        """
        if num_stages(self.mesh) > 1:
            raise NotImplementedError(
                f"apply_cached does not run on a mesh with {PIPE}={num_stages(self.mesh)}: each "
                "stage has only its own layers. Use program.apply, which needs no cache, or save a "
                "checkpoint and restore it with a program on a mesh with these devices on fsdp"
            )
        model = self.model
        if not isinstance(model, LayeredModel) or model.cache is None or model.predict is None:
            raise ValueError("apply_cached needs a LayeredModel with cache= and predict=")
        check_is_there(state)
        self._note(f"apply_cached of {length}", batch)
        batch = self.shard_batch(batch, 1)
        with self.calling(), jax.set_mesh(self.mesh):
            if length not in self._cached:
                self._cached[length] = self._build_cached(with_cache(model, length))
            cached = self._cached[length]
            state = self.check_state(state)
            params = cached.step.readable(state)
            args = (params, state.model_state, cache, batch)
            # A trace finds the loops over tiles, and so the moves.
            if self.swap is not None:
                self._compiler.order(cached.run, as_arguments(args))
            is_settled = not isinstance(params, TrainState)
            return self._runner.run(
                "apply_cached",
                cached.run,
                *args,
                reads=params,
                moves=cached.moves if is_settled else cached.unsettled_moves,
            )

    def _build_cached(self, model: LayeredModel) -> _CachedApply:
        """Return the step of a model with a cache, jitted with the cache donated."""
        gather = build_gather(self.layout, self._gathered_early)
        step: Step
        if isinstance(self._step, StreamedStep):
            step = self._step.of_model(model, gather)
        else:
            step = ResidentStep(model, self.tx, self.records, None, gather)

        def run(params: Any, model_state: ModelState, cache: Any, batch: Batch) -> Any:
            return step.apply(
                params, model_state, batch if cache is None else {**batch, CACHE: cache}
            )

        options = self._compiler.options
        return _CachedApply(step, jax.jit(run, donate_argnums=2, compiler_options=options))

    def _any_batch(self, call: str, state: TrainState, batch: Batch) -> tuple[Any, Rows | None]:
        check_is_there(state)
        self._check_by_model(batch)
        self._note(call, batch)
        return place_any_batch(batch, self.mesh)

    def _evaluate(
        self, name: str, state: TrainState, batch: Batch, compiled: Callable[..., Any]
    ) -> Any:
        """Run `compiled(*args)`, a jitted function of a state's parameters and model state."""
        with self.calling(), jax.set_mesh(self.mesh):
            state = self.check_state(state)
            params = self._step.readable(state)
            args = (params, state.model_state, batch)
            program = compiled(*as_arguments(args))
            # A trace finds the loops over tiles, and so the moves.
            if self.swap is not None:
                self._compiler.order(program, as_arguments(args))
            is_settled = not isinstance(params, TrainState)
            if not is_settled:
                moves = self._unsettled_eval_moves
            elif name == "apply":
                moves = self._apply_moves
            else:
                moves = self._eval_moves
            return self._runner.run(name, program, *args, reads=params, moves=moves)

    @without_mesh
    def grads(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """Return a step's loss over a batch and its gradients; nothing is updated or donated.

        The loss is the mean over microbatches, with the random keys that the next step would draw.
        Gradients are as the loss gives them: the loss scale is divided out, nothing is clipped, and
        non-finite values remain.

        A streamed step returns its gradients only with update="after_backward": with "in_backward"
        no gradient is stored, and with "in_forward" the state's gradients belong to the last step
        and are not applied yet. A resident step returns them always.

        Args:
          state: state to read.
          batch: batch as in `step`.

        Returns:
          (loss as `eval` returns it, gradients). Gradients are float32, on the device, and have the
          tree and sharding of `params(state)`, with None for frozen parameters.

        Raises:
          ValueError: the state was donated, or the batch does not divide.
          NotImplementedError: the step is streamed, and config.update is not "after_backward", the
            update is on the host, or its gradients are stored off the device.
        """
        self._step.check_grads()
        check_is_there(state)
        self._note("grads", batch)
        batch = self.shard_batch(batch)
        with self.calling(), jax.set_mesh(self.mesh):
            state = self.check_state(state)
            step = self._compiler.step(batch)
            program = self._compiler.grads(batch)
            scratch = self._scratch.take(step.abstract_scratch, self.mesh)
            # The parts that are not read stay where they are stored.
            reads = dataclasses.replace(state, master=None, opt_state=None, pending=None)
            args = (reads, batch, scratch)
            if self._runner.calls_back:
                self._compiler.order(program, as_arguments(args))
            result, scratch = self._runner.run(
                "grads", program, *args, reads=reads, moves=self._grads_moves, written=step.written
            )
            self._scratch.keep(step.abstract_scratch, scratch)
            loss, grads = result
            return self._evaluated(loss), narrow_params(grads, self.layout.order, donate=True)

    def _evaluated(self, result: Any) -> Any:
        """Return a loss without its batch's faults; a warning reports them once they are known."""
        if not isinstance(result, Mapping):
            return result
        faults, metrics = split_faults(result)
        self.warnings.add_evaluation(faults)
        return metrics["loss"] if set(metrics) == {"loss"} else metrics

    @without_mesh
    def shard_batch(self, batch: Batch, num_microbatches: int | None = None) -> Any:
        """Place a batch on the mesh, with dim 0 split over `data`, `fsdp` and `expert`.

        Leaves that are already placed stay; numpy arrays are copied.

        Args:
          batch: tree of arrays, as in `step`.
          num_microbatches: number of microbatches that each device's rows must divide into; None
            for the config's.

        Raises:
          ValueError: the batch does not divide, the model refuses it, or a leaf is not an array of
            numbers.
        """
        self._check_by_model(batch)
        count = self.config.num_microbatches if num_microbatches is None else num_microbatches
        return place_batch(batch, self.mesh, count)

    def abstract_batch(self, batch: Batch) -> Any:
        """Return the ShapeDtypeStruct of each leaf of a batch, with its sharding.

        Args:
          batch: tree of arrays or ShapeDtypeStructs, with the rows of all devices in dim 0.
        """
        return abstract_batch(batch, self.mesh)

    def trace_swaps(
        self, path: str | os.PathLike[str], *, plan: Predicts | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that draws its steps' swapping into a file, as planned and as it was.

        The file is written when the context ends.

        Args:
          path: file that Perfetto opens (https://ui.perfetto.dev); compressed if it ends in ".gz".
            It covers this process's devices, so each process needs its own file. The layout is
            described in `host_offload.trace.perfetto`.
          plan: plan from `zj.plan`, whose predicted lanes are drawn from the start of each step.

        Raises:
          ValueError: nothing is stored on nvme, or the file cannot be written; or, on entering,
            another trace is active.
          OSError: the file could not be written when the context ended. If the context ended with
            an error, this is logged instead.
        """
        if self.swap is None:
            raise ValueError(
                "this program has nothing on nvme, and so no swapping to trace: set params, "
                "opt_state, ... to 'nvme'"
            )
        return self.swap.trace(path, () if plan is None else plan.spans)

    @without_mesh
    def params(self, state: TrainState) -> Any:
        """Return the sharded parameter tree in the compute dtype.

        A LayeredModel's tree is `{"embed", "blocks", "head"}`. Leaves on nvme are
        `zerojax.state.OnDisk`. With update="in_forward" and an unsettled state, the trainable
        leaves are copies to which the pending update is applied (`settle`).

        On a mesh with `pipe`, stacks are copies in the order of the layers, split over `pipe` along
        dim 0: W[L_pipe, D_fsdp, F]. They take the same space again.

        Args:
          state: state of this program.

        Raises:
          ValueError: the state was donated.
        """
        check_is_there(state)
        if self._is_unsettled(state) and self.config.params != "nvme":
            copies = self._reader.copies(state, ema=False)
            return self.layout.join(dataclasses.replace(state, params=copies))
        return narrow_params(self.layout.join(state), self.layout.order)

    def _is_unsettled(self, state: TrainState) -> bool:
        """Return whether a state holds an update that the next step's forward applies.

        Raises:
          ValueError: it holds one, and is a state of another program, which would apply it.
        """
        if state.pending is None or self.config.delayed_update or not bool(state.pending.ready):
            return False
        if self.config.update != "in_forward":
            raise ValueError(
                "the state holds an update that is not applied yet, and is of another program, "
                "with update='in_forward': settle it there, with program.settle(state)"
            )
        return True

    @without_mesh
    def master_params(self, state: TrainState) -> Any:
        """Return the float32 parameters that the optimizer updates, in their shardings and tier.

        Frozen parameters have no master and are None. With a fraction of the optimizer state on the
        device, stacked leaves are `zerojax.state.Split`; on nvme, `OnDisk`.

        On a mesh with `pipe`, stacks are copies in the order of the layers, as in `params`. If
        their masters are in host memory, in part or all, they pass through the device one leaf
        after the other, and the copies are in host memory.

        Args:
          state: state of this program.

        Raises:
          ValueError: the state was donated, or with update="in_forward" it is not settled.
        """
        check_is_there(state)
        if self._is_unsettled(state):
            raise ValueError(
                "master_params returns the state's own arrays, and this state holds an update that "
                "is not applied yet: call state = program.settle(state) first, or read the float32 "
                "weights with program.iter_params(state)"
            )
        return narrow_params(masters(state), self.layout.order)

    @without_mesh
    def ema_params(self, state: TrainState) -> Any:
        """Return the averages of the weights that `zerojax.Ema` keeps, like `params(state)`.

        They have the dtype, shardings and tier of that tree. They are a copy, which takes the same
        space again. To evaluate with them, pass them to `eval` in place of the parameters:

            program.eval(dataclasses.replace(state, params=program.ema_params(state)), batch)

        Args:
          state: state of this program.

        Raises:
          ValueError: the optimizer has no `zerojax.Ema` last in its chain, the parameters are
            stored on nvme (use `iter_params`), or the state was donated, or with
            update="in_forward" it is not settled.
          SwapError: a record cannot be read.
        """
        self._reader.check_averages()
        check_is_there(state)
        if self._is_unsettled(state):
            # An evaluation of the state with these parameters would update them.
            raise ValueError(
                "ema_params takes the place of the parameters in a state, and this state holds an "
                "update that is not applied yet: call state = program.settle(state) first, or read "
                "the averages with program.iter_params(state, ema=True)"
            )
        averages = self._reader.copies(state, ema=True)
        return narrow_params(averages, self.layout.order, donate=True)

    def iter_params(self, state: TrainState, *, ema: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield the float32 parameters piece by piece, as (name, tree), on the device.

        A LayeredModel yields "embed", "blocks/0" .. "blocks/L-1" and "head"; with several stacks,
        "blocks/<stack>/0" and so on. A Model yields one leaf at a time.

        Args:
          state: state to read.
          ema: whether to yield the averages that `zerojax.Ema` keeps instead.

        Raises:
          ValueError: the state was donated, or is not the one on disk, or there are no averages.
          SwapError: a record cannot be read.
        """
        if ema:
            self._reader.check_averages()
        check_is_there(state)
        self._is_unsettled(state)  # raises for a state of another program
        if self.layout.order is not None:
            # Its parameters may be stacks of layers in place of records.
            state = self.check_state(state)
        pieces = self._reader.pieces(state, ema)
        while True:
            # The caller's mesh is in scope again between two pieces.
            with no_mesh():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece
