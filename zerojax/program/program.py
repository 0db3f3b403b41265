"""The program that `build_train_step` returns: a train step over one model, optimizer, config and
mesh.

It holds no arrays but host memory between steps. It knows the layout of its state (specs,
shardings, bytes) before anything is allocated, so it can be lowered and accounted for on a mesh
that is not there. A step defines what is computed (`zerojax.program.step`). The program compiles
and runs it, and gives it its arguments, in the same way for every step:

    check the state, place the batch  ->  compile, once a shape  ->  begin the disk  ->  run  ->  raise what went wrong
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
from zerojax.config import streams
from zerojax.hlo import HostTraffic, host_traffic, module_name, read_thunks
from zerojax.memory import (
    KeptValues,
    MemoryReport,
    kept_by_program,
    program_memory,
    steps_of_program,
)
from zerojax.models import CACHE, LayeredModel, Model, split_faults, with_cache
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
from zerojax.progress import working
from zerojax.resident import ResidentStep
from zerojax.runtime import Calls, SwapSession
from zerojax.sharding import (
    Replicated,
    Rows,
    abstract_batch,
    check_batch,
    no_mesh,
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
)


class Predicts(Protocol):
    """What `Program.trace_swaps` takes of a plan (`zerojax.planner.Plan`)."""

    @property
    def spans(self) -> Sequence[tuple[str, str, float, float]]:
        """(lane, label, start, stop) of what each lane does, in seconds from the step's begin."""
        ...


class Program:
    """A train step over one model, optimizer, config and mesh. Made by `build_train_step`.

    Attributes:
      model: as given.
      tx: as given; with bfloat16 moments, what keeps them so.
      records: how the state rests, record by record.
      layout: where every byte of the state is.
      mesh: as given, or the one of this package's axes that was made of it.
      config: as given.
      swap: what rests on disk, while the program is open, or None.
      check_state: returns a state that this program can take, numbers as arrays; raises ValueError
        for another.
      warnings: logs why steps were skipped, once their metrics are known.
      calls: compares the calls of this program with those of the other processes; None where a
        process is alone.
    """

    def __init__(
        self,
        model: Model | LayeredModel,
        tx: optax.GradientTransformation,
        records: StateRecords,
        step: Step,
        gathered_early: GatheredEarly,
        sequence: SequenceParallelism,
    ) -> None:
        """Run `step`, over `model`, `tx` and the layout of `records`; its traces tell
        `gathered_early` and `sequence`.
        """
        self.model, self.tx, self.records, self.layout = model, tx, records, records.layout
        layout = self.layout
        self.mesh, self.config = layout.mesh, layout.config
        self._step, self._gathered_early, self._sequence = step, gathered_early, sequence
        self._compiler, self._scratch = StepCompiler(model, layout, step), ScratchMemory()
        self.swap = None if layout.disk is None else SwapSession(layout.disk)
        self._runner = Runner(self.swap, step.host)
        self.check_state = StateCheck(layout)
        self._init = StateInit(model, tx, records, step.update)
        self.warnings = SkipWarnings(self.config)
        self._cached: dict[int, Any] = {}  # jitted, by the length of caches
        self._reader = ParamReader(model, records, self._runner)
        self.calls: Calls | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @without_mesh
    def close(self) -> None:
        """Release what the program holds between steps: host memory for gradients and activations.

        In a forked child this does nothing: folder, threads and memory are the parent's.
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

    # --- what it is -------------------------------------------------------------------------------

    @property
    def shardings(self) -> TrainState:
        """Shardings of the state: a TrainState of NamedSharding."""
        return self.layout.shardings

    @property
    def replicated(self) -> tuple[Replicated, ...]:
        """Parameters that `fsdp` does not split, with their bytes and the reason; largest first."""
        return self.layout.replicated

    @property
    def gathered_early(self) -> tuple[str, ...]:
        """Parameters of a Model that stage 3 could not gather on use, with the reason.

        Known once the step is traced.
        """
        return tuple(self._gathered_early.sentences)

    @property
    def sequence_parallel(self) -> tuple[BlockProduct, ...]:
        """With `sequence_parallel`, the blocks' products: column, row, or left alone and why.

        Known once a step is traced.
        """
        return self._sequence.products

    @property
    def schedule(self) -> Schedule:
        """The order in which layers are gathered, computed and released.

        A Model counts as one layer.
        """
        return self._step.schedule

    @cached_property
    def _moves(self) -> tuple[Move, ...]:
        return self._step.moves()

    @cached_property
    def _eval_moves(self) -> tuple[Move, ...]:
        return self._step.eval_moves()

    @cached_property
    def _grads_moves(self) -> tuple[Move, ...]:
        return self._step.grads_moves()

    @without_mesh
    def memory(self, batch: Any) -> MemoryReport:
        """Return the bytes of a step on each device, per tier, and those that its collectives and
        its host link move.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            return program_memory(self.records, self._step, self.abstract_batch(batch))

    @without_mesh
    def operations(self, batch: Any) -> StepPlan:
        """Return everything that a step does with records, in order: what it loads, gathers,
        computes, reduces and stores.

        `program.schedule`, `program.memory` and the reads ahead of the disk follow from this list,
        and the planner predicts the seconds of a step from one that is made in the same way.
        `print` shows it as a table: loops, their ticks, and for each operation the numbers of its
        records, its lane and its bytes on one device.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            return steps_of_program(self.records, self._step, self.abstract_batch(batch))

    @without_mesh
    def kept(self, batch: Any) -> KeptValues:
        """Return what a step keeps of a batch from forward to backward: each value with name,
        shape, spec, tier and bytes.

        It is a tuple of `zerojax.memory.Kept`, largest first, and prints as a table. Of a streamed
        step it holds what is kept of its layers; of a resident one also what embedding and head
        keep.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            return kept_by_program(self.records, self._step, self.abstract_batch(batch))

    @without_mesh
    def host_copies(self, batch: Any) -> HostTraffic:
        """Return what a step moves over each device's link to the host, by copies and by kernels;
        compiled facts, not times.

        The step is compiled, and XLA's own list of what it will do (its thunks) tells copies by the
        GPU's copy engines from kernels, which read and write host memory from the cores. What
        callbacks move (`update_on="host"`, nvme) is not in the program, and so not counted. Where
        the devices are there, steps over batches of this shape run what was compiled.

            print(program.host_copies(batch))  # bytes up and down, and the leaves that kernels move
            program.host_copies(batch).share_of_copies

        Args:
          batch: arrays, or a tree of ShapeDtypeStruct.

        Raises:
          NotImplementedError: the mesh is of CPUs, whose programs do not tell host memory from a
            device's.
        """
        platform = self.mesh.devices.flat[0].platform
        if platform not in ("gpu", "cuda"):
            raise NotImplementedError(
                f"host_copies reads programs for GPUs, and this mesh is of platform {platform!r}: build the program on "
                'zerojax.aot.gpu_mesh("h200"), whose devices need not be there'
            )
        with tempfile.TemporaryDirectory() as folder:
            text = self.lower(batch).compile({"xla_dump_to": folder}).as_text()
            assert text is not None
            # A streamed step's loops of unknown trip count run once.
            return host_traffic(text, read_thunks(folder, module_name(text)), unknown_trips=1)

    def _check_given(self, batch: Any) -> None:
        """Raise ValueError for a batch that the model itself refuses."""
        if self.model.check_batch is not None:
            self.model.check_batch(batch)

    def _check_shapes(self, batch: Any) -> None:
        """Raise ValueError for a batch that the model refuses, or that does not divide."""
        self._check_given(batch)
        check_batch(batch, self.mesh, self.config.num_microbatches)

    @without_mesh
    def check(self, batch: Any) -> None:
        """Trace a step over a batch's shapes, and raise ValueError if it cannot be trained.

        Nothing runs.
        """
        self._check_shapes(batch)
        with jax.set_mesh(self.mesh):
            compiled = self._compiler.step(self.abstract_batch(batch))
            compiled.step.trace(*compiled.abstract_args)

    @without_mesh
    def lower(self, abstract_batch: Any) -> LoweredStep:
        """Lower the step for this mesh, which may be one of devices that are not there.

        Args:
          abstract_batch: tree of ShapeDtypeStruct (or arrays, of which only shapes are read),
            global shapes.
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

    # --- what it does -----------------------------------------------------------------------------

    @without_mesh
    def init(self, key: jax.Array) -> TrainState:
        """Make the state, each device its own shard.

        Args:
          key: from `jax.random.key`; a legacy uint32 key will do. The same one in all processes.

        Raises:
          ValueError: this is no random key, or another process has another one or makes other
            parameters of it.
          RuntimeError: state in host memory finds no room there, or this device and jaxlib read
            wrong records of it; or another process left.
          SwapError: the disk is too small for what rests there, or cannot be written to.
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
                self.calls.agree(
                    "init, traced",
                    {"parameters": trace_lines(self._init.jitted.trace(*arguments).jaxpr)},
                )
            return self._runner.run("init", self._init.jitted, *arguments)

    def _note(self, call: str, batch: Any) -> bool:
        """Compare a call over a batch with the other processes'; returns whether it is the first
        one over these shapes.

        Called before the batch is placed: processes must agree on its shapes before any program
          runs over it.
        """
        if self.calls is None:
            return False
        return self.calls.note(call, batch_key(batch), lambda: batch_lines(batch))

    def _tell_numbers(self, lines: Sequence[str]) -> None:
        """State to the other processes which numbers this one put into a state: with others the
        weights would differ.
        """
        if self.calls is not None:
            self.calls.tell("numbers put into the state", lines)

    def _compare_step(self, compiled: CompiledStep, args: Sequence[Any]) -> None:
        """Compare the step as it was traced with the other processes': its loss, too, holds
        constants.
        """
        if self.calls is not None:
            self.calls.agree(
                "step, traced",
                {"program": trace_lines(compiled.step.trace(*as_arguments(args)).jaxpr)},
            )

    def calling(self) -> AbstractContextManager[None]:
        """Return a context for programs over the state: of those that call back it lets one run at
        a time, and no signal in.
        """
        return self._runner.calling()

    @without_mesh
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run one train step.

        Args:
          state: from `init` or the previous step. Donated: its buffers are reused, and it must not
            be read again.
          batch: tree of arrays, dim 0 the global batch; in a run of several processes numpy leaves
            hold this process's part of it. Numpy arrays are copied before this returns, and may
            then be filled again.

        Returns:
          The new state, and metrics as described in `zerojax.metrics.step_metrics`, with those of
          the model's loss beside them. A step whose gradients are not finite leaves the state as it
          was; a later call logs a warning of a batch with a fault (a metric `fault/...` of the
          model), and of many such steps in a row.

        Raises:
          ValueError: the state was donated before, the batch does not divide or is one that the
            model refuses, the loss is not a scalar, or another process has a batch of other shapes
            or another loss; before anything runs.
          RuntimeError: another process left before this step.
        """
        return self._stepped(state, batch)

    def _stepped(
        self, state: TrainState, batch: Any, addresses_of: HostAddresses | None = None
    ) -> tuple[TrainState, Metrics]:
        """Run one train step; read where its arrays in host memory are, before and after, if asked
        to.
        """
        check_is_there(state)
        is_first = self._note("step", batch)
        batch = self.shard_batch(batch)
        with self.calling(), jax.set_mesh(self.mesh):
            state = self.check_state(
                state, self._tell_numbers
            )  # once more: another thread may have donated it just now
            # Before the moves: these follow from the block's loops over tiles, which a trace finds.
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
                if addresses_of is not None:
                    addresses_of.read_before((state, scratch))
                results = self._runner.call(compiled.run, *args)
            compiled.has_run = True
            del args  # of which some were donated
            (state, scratch), metrics = self._runner.finished(results)
            if addresses_of is not None:
                addresses_of.read_after((state, scratch))
            # Before errors are raised: this memory has come back, whatever happened to the disk.
            self._scratch.keep(compiled.abstract_scratch, scratch)
            state, of_disk = self._runner.end_step(state, addresses)
            self.warnings.add_step(metrics)
            return state, metrics | of_disk

    @without_mesh
    def self_test(self, state: TrainState, batch: Any) -> tuple[TrainState, SelfTest]:
        """Run one train step under checks of what it takes from XLA on trust; for a new device,
        driver or jaxlib.

        The step is compiled once more, so that XLA compares the offset of each slice of host memory
        with the one that the device computed, where it can; and what the step takes in host memory
        must come back there. The state that it makes is that of an ordinary step.

            state, found = program.self_test(state, batch)
            print(found)

        Args:
          state: as for `step`. Donated: where a check fails, the state is lost, too.
          batch: as for `step`.

        Raises:
          RuntimeError: a slice was read at a wrong offset, or XLA copied donated host memory.
          ValueError: as `step`.
        """
        verifies, lowered, addresses = (
            verifies_offsets(self.mesh),
            self.lower(batch),
            HostAddresses(),
        )
        assert lowered.step is not None
        usual = lowered.step.run
        try:
            lowered.compile(
                {VERIFY_OFFSETS: True} if verifies else None
            )  # which the next step of this shape runs
            state, metrics = jax.block_until_ready(self._stepped(state, batch, addresses))
        except jax.errors.JaxRuntimeError as error:
            if not verifies:
                raise
            raise wrong_offset(error) from error
        finally:
            lowered.step.run = usual
        addresses.check()
        return state, SelfTest(
            metrics=metrics,
            offsets_verified=verifies,
            num_host_arrays=len(addresses.before),
            host_bytes=addresses.num_bytes,
        )

    @without_mesh
    def eval(self, state: TrainState, batch: Any) -> Any:
        """Return the loss of a batch, f32[], with key=None: deterministic, and without an update.

        Where the model's loss has metrics: a dict of them by name, and of "loss". The model's own
        state is only read.

        Args:
          state: that is read.
          batch: of any number of rows. One that does not divide by the devices of `data` x `fsdp`
            is padded on its way to them, and its loss is that of its own rows. A program is
            compiled for each number.
        """
        batch, rows = self._any_batch("eval", state, batch)
        return self._evaluated(
            self._evaluate("eval", state, batch, lambda *args: self._compiler.eval(rows))
        )

    @without_mesh
    def apply(self, state: TrainState, batch: Any) -> Any:
        """Return the outputs of the model's `predict`, with the state where it rests; without keys,
        and without an update.

        Args:
          state: that is read.
          batch: of any number of rows, as in `eval`.

        Returns:
          The tree that `predict` returns. Leaves whose dim 0 counts the rows of the batch are split
          as it is: over `data` and `fsdp`; the others are on every device, and so are all of them
          where the batch does not divide.

        Raises:
          ValueError: the model has no `predict`, or the state was donated.
        """
        if self.model.predict is None:
            kind = type(self.model).__name__
            raise ValueError(
                f"program.apply runs the model's own function from a batch to outputs, and this {kind} has none: give it "
                f"predict=, as {kind}(..., predict=...) or from_flax(..., predict=...)"
            )
        batch, rows = self._any_batch("apply", state, batch)
        return self._evaluate(
            "apply", state, batch, lambda *args: self._compiler.apply(rows, *args)
        )

    @without_mesh
    def apply_cached(
        self, state: TrainState, batch: Any, cache: Any, length: int
    ) -> tuple[Any, Any]:
        """Return the outputs of the model's `predict` for tokens that follow others, and the cache
        with what is kept of them.

        Args:
          state: that is read.
          batch: a dict, as the model takes it; its rows divide by the devices.
          cache: None where there are no tokens before, else what the last call returned; donated.
          length: tokens that a cache has room for, the same in all calls.

        Returns:
          (what `predict` returns, cache); the latter a tree of arrays [B, L, ...].

        Raises:
          ValueError: the model has no `cache` or no `predict`, its layers come to the device one by
            one, the batch does not divide, or the state was donated.
        """
        model = self.model
        if not isinstance(model, LayeredModel) or model.cache is None or model.predict is None:
            raise ValueError("apply_cached needs a LayeredModel with cache= and predict=")
        if streams(self.config):
            raise ValueError(
                "layers come to the device one by one, each as a whole for all tokens: use apply, without a cache"
            )
        check_is_there(state)
        self._note(f"apply_cached of {length}", batch)
        batch = self.shard_batch(batch, 1)
        if length not in self._cached:
            step = ResidentStep(
                with_cache(model, length),
                self.tx,
                self.records,
                None,
                build_gather(self.layout, self._gathered_early),
            )

            def run(params: Any, model_state: Any, cache: Any, batch: Any) -> Any:
                return step.apply(
                    params, model_state, batch if cache is None else {**batch, CACHE: cache}
                )

            self._cached[length] = jax.jit(
                run, donate_argnums=2, compiler_options=self._compiler.options
            )
        with self.calling(), jax.set_mesh(self.mesh):
            state = self.check_state(state)
            params = self.layout.join(state)
            return self._cached[length](params, state.model_state, cache, batch)

    def _any_batch(self, call: str, state: TrainState, batch: Any) -> tuple[Any, Rows | None]:
        check_is_there(state)
        self._check_given(batch)
        self._note(call, batch)
        return place_any_batch(batch, self.mesh)

    def _evaluate(
        self, name: str, state: TrainState, batch: Any, compiled: Callable[..., Any]
    ) -> Any:
        """Run `compiled(*args)`, a jitted function of args that reads a state's parameters and the
        model's own state.
        """
        with self.calling(), jax.set_mesh(self.mesh):
            state = self.check_state(state)
            params = self.layout.join(state)
            args = (params, state.model_state, batch)
            program = compiled(*as_arguments(args))
            if (
                self.swap is not None
            ):  # which loops over tiles it has, and so its moves, are known once it is traced
                self._compiler.order(program, as_arguments(args))
            return self._runner.run(name, program, *args, reads=params, moves=self._eval_moves)

    @without_mesh
    def grads(self, state: TrainState, batch: Any) -> tuple[Any, Any]:
        """Return the loss of a step over a batch, and the gradients that it would have; nothing is
        updated or donated.

        A step's loss: the mean over microbatches, with the random keys that the next step draws.
        Gradients are as the loss gives them: the loss scale is divided out, nothing is clipped, and
        what is not finite stays so.

        Args:
          state: that is read.
          batch: as of `step`.

        Returns:
          (loss, as `eval` returns it; gradients), the latter float32, like `params(state)`, sharded
          as these are and on the device; None in the place of frozen ones.

        Raises:
          ValueError: the state was donated, or the batch does not divide.
          NotImplementedError: a streamed step that does not store its gradients on the device.
        """
        self._step.check_grads()
        check_is_there(state)
        self._note("grads", batch)
        batch = self.shard_batch(batch)
        with self.calling(), jax.set_mesh(self.mesh):
            state = self.check_state(state)
            step, program = self._compiler.step(batch), self._compiler.grads(batch)
            scratch = self._scratch.take(step.abstract_scratch, self.mesh)
            # What is not read stays where it rests.
            reads = dataclasses.replace(state, master=None, opt_state=None, pending=None)
            args = (reads, batch, scratch)
            if self._runner.calls_back:
                self._compiler.order(program, as_arguments(args))
            result, scratch = self._runner.run(
                "grads", program, *args, reads=reads, moves=self._grads_moves, written=step.written
            )
            self._scratch.keep(step.abstract_scratch, scratch)
            loss, grads = result
            return self._evaluated(loss), grads

    def _evaluated(self, result: Any) -> Any:
        """Return a loss without the faults of its batch, of which a warning is logged when they are
        known.
        """
        if not isinstance(result, Mapping):
            return result
        faults, metrics = split_faults(result)
        self.warnings.add_evaluation(faults)
        return metrics["loss"] if set(metrics) == {"loss"} else metrics

    @without_mesh
    def shard_batch(self, batch: Any, num_microbatches: int | None = None) -> Any:
        """Place a batch on the mesh: dim 0 over `data` and `fsdp`. Leaves already there stay; numpy
        arrays are copied.

        Raises:
          ValueError: the batch does not divide, the model refuses it, or it holds what is no array
            of numbers.
        """
        self._check_given(batch)
        count = self.config.num_microbatches if num_microbatches is None else num_microbatches
        return place_batch(batch, self.mesh, count)

    def abstract_batch(self, batch: Any) -> Any:
        """Return the ShapeDtypeStruct of each leaf of a batch, with its sharding."""
        return abstract_batch(batch, self.mesh)

    def trace_swaps(
        self, path: str | os.PathLike[str], *, plan: Predicts | None = None
    ) -> AbstractContextManager[None]:
        """Return a context whose steps are drawn into a file when it ends: swapping as planned, and
        as it was.

        Args:
          path: of a file that Perfetto opens (https://ui.perfetto.dev); compressed if it ends in
            ".gz". It tells of this process's devices, so processes need a file each. The layout is
            in `host_offload.trace.perfetto`.
          plan: of `zj.plan`; what it predicts of the lanes is drawn from the begin of each step.

        Raises:
          ValueError: nothing rests on nvme, or the file cannot be written; or, on entering, there
            is another trace.
          OSError: the file could not be written when the context ended; after an error inside of
            it, that is logged instead.
        """
        if self.swap is None:
            raise ValueError(
                "this program has nothing on nvme, and so no swapping to trace: set params, opt_state, ... to 'nvme'"
            )
        return self.swap.trace(path, () if plan is None else plan.spans)

    @without_mesh
    def params(self, state: TrainState) -> Any:
        """Return the sharded parameter tree in the compute dtype; `{"embed", "blocks", "head"}` for
        a LayeredModel.

        Leaves on nvme are `zerojax.state.OnDisk`.

        Raises:
          ValueError: the state was donated.
        """
        check_is_there(state)
        return self.layout.join(state)

    @without_mesh
    def master_params(self, state: TrainState) -> Any:
        """Return the float32 parameters that the optimizer updates, sharded as its state is, where
        they rest.

        In the place of frozen ones, which have no master, there is None. With a fraction of the
        optimizer state on the device, stacked leaves are `zerojax.state.Split`; on nvme, `OnDisk`.

        Raises:
          ValueError: the state was donated.
        """
        check_is_there(state)
        return masters(state)

    @without_mesh
    def ema_params(self, state: TrainState) -> Any:
        """Return the averages of the weights that `zerojax.Ema` keeps, in the dtype, shardings and
        tier of `params(state)`.

        They are a copy, which takes as much room again. To evaluate with them, hand them to `eval`
        in the parameters' place:

            program.eval(dataclasses.replace(state, params=program.ema_params(state)), batch)

        Raises:
          ValueError: the optimizer has no `zerojax.Ema` last in its chain, the parameters rest on
            nvme (use `iter_params`), or the state was donated.
          SwapError: a record cannot be read.
        """
        return self._reader.averages(state)

    def iter_params(self, state: TrainState, *, ema: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield the float32 parameters piece by piece, as (name, tree), on the device.

        A LayeredModel yields "embed", "blocks/0" .. "blocks/L-1" and "head", of several stacks
        "blocks/<stack>/0" and so on; a Model one leaf at a time.

        Args:
          state: that is read.
          ema: yield the averages that `zerojax.Ema` keeps of them.

        Raises:
          ValueError: the state was donated, or is not the one on disk, or there are no averages.
          SwapError: a record cannot be read.
        """
        pieces = self._reader.pieces(state, ema)
        while True:
            # Between two pieces the caller's mesh is in scope again.
            with no_mesh():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece
