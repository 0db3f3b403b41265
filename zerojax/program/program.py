"""Build a train step: the public entry, and the program it returns.

A `Program` holds no arrays. It knows the layout of its state (specs, shardings, bytes) before anything is allocated, so it
can be built, lowered and accounted for on a mesh that is not there.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from host_offload.device import check_host_slices
from host_offload.engine import DiskRecords
from host_offload.schedule import Move, Schedule, build_schedule, moves_of
from zerojax.config import streams
from zerojax.memory import MemoryReport, program_memory
from zerojax.models import LayeredModel, Model
from zerojax.optim import HostUpdate, RecordUpdate, build_update, update_by_record, update_on_host
from zerojax.program.compile import CompiledStep, LoweredStep, compiler_options, with_next_number
from zerojax.program.init import build_born_init, build_init
from zerojax.program.read_params import ParamReader
from zerojax.resident import build_step, plain_loss, sharded_loss
from zerojax.runtime import SwapSession, interrupts_wait
from zerojax.sharding import Replicated, abstract_batch, batch_sharding, check_batch, explicit, named, place_batch
from zerojax.state import Layout, StateRecords, TrainState, allocate_all, check_is_there, is_away, masters
from zerojax.streamed import Plans, Scratch, StreamedStep, index_arrays

logger = logging.getLogger("zerojax")
Metrics = Mapping[str, jax.Array | float]


class Program:
    """A train step over one model, optimizer, config and mesh. Made by `build_train_step`."""

    def __init__(self, model: Model | LayeredModel, tx: optax.GradientTransformation, layout: Layout) -> None:
        self.model, self.tx, self.layout = model, tx, layout
        self.mesh, self.config = layout.mesh, layout.config
        self.records = StateRecords(layout)
        self.swap = None if layout.disk is None else SwapSession(layout.disk)
        self._reported: dict[str, None] = {}
        self._arrays: tuple[Plans, jax.Array] | None = None
        options = compiler_options(model, layout)
        self._streamed: StreamedStep | None = None
        if isinstance(model, LayeredModel) and streams(layout.config):
            self._streamed = StreamedStep(model, tx, self.records, self._report)
            step, evaluate = self._streamed.step, self._streamed.eval
            self._host = self._streamed.host
        else:
            loss = sharded_loss(model, layout, self._report)
            record_update = RecordUpdate(tx, self.records) if layout.updates_by_record else None
            on_host = record_update is not None and layout.config.update_on == "host"
            self._host = host = HostUpdate(record_update, stashes=False, summed=1) if record_update and on_host else None

            def step(state: TrainState, batch: Any, plans: Plans, one: jax.Array, scratch: Scratch) -> Any:
                del plans
                update = build_update(tx, layout)
                if record_update is not None:
                    update = update_by_record(record_update, one) if host is None else update_on_host(host)
                after, metrics = build_step(model, layout, loss, update)(state, batch)
                return (after, scratch), metrics

            def evaluate(params: Any, batch: Any, plans: Plans, one: jax.Array) -> jax.Array:
                del plans, one
                return loss(params, batch, None).astype(jnp.float32)

        if not layout.updates_by_record:
            self._init = jax.jit(build_init(model, tx, layout), out_shardings=layout.shardings)
        else:
            born = build_born_init(model, tx, self.records)
            whole = explicit(named(self.mesh, ()))
            empty = [a.sharding for a in jax.tree.leaves(layout.abstract_state) if is_away(a)]
            self._init = jax.jit(
                born,
                donate_argnums=3,
                in_shardings=(whole, whole, whole, empty, whole),
                out_shardings=explicit(layout.shardings),
            )
        self._step, self._options = step if self.swap is None else with_next_number(step), options
        self._compiled: dict[Any, CompiledStep] = {}
        self._grads: list[jax.Array] | None = None
        self._eval = jax.jit(evaluate, compiler_options=options)
        self._reader = ParamReader(model, self.records, self.swap, self.calling)
        self._lock = threading.RLock()  # one program at a time, where it calls back

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release what the program holds between steps: host memory for gradients and activations."""
        with self.calling():
            self._compiled.clear()
            self._grads = None
            if self._host is not None:
                self._host.host.release()
            if self.swap is not None:
                self.swap.close()

    @cached_property
    def _moves(self) -> tuple[Move, ...]:
        """What a step reads from disk and writes to it, in order."""
        assert self.layout.disk is not None
        first, last = self.records.end_moves()
        by_host = {} if self._host is None else self._host.moves()
        kinds, layers = self.layout.disk.kinds.keys(), [phase.name for phase in self.schedule.phases]
        after = ["update"] if self._streamed is not None and self._streamed.ending.ends_first else []
        loops = {} if self._streamed is None else self._streamed.tracer.tile_loops()
        before = moves_of(self.schedule, kinds, [name for name in layers if name not in after], by_host, loops)
        return (*first, *before, *last, *moves_of(self.schedule, kinds, after, by_host))

    @cached_property
    def _eval_moves(self) -> tuple[Move, ...]:
        assert self.layout.disk is not None
        first, _ = self.records.end_moves()
        loops = {} if self._streamed is None else self._streamed.tracer.eval_loops()
        forward = moves_of(self.schedule, self.layout.disk.kinds.keys(), ("forward",), loops=loops)
        return (*first, *(move for move in forward if move.kind.split(".")[0] == "params"))

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
        """Parameters of a Model that stage 3 could not gather on use, with the reason. Known once the step is traced."""
        return tuple(self._reported)

    @cached_property
    def schedule(self) -> Schedule:
        """The order in which layers are gathered, computed and released. A Model counts as one layer."""
        if self._streamed is not None:
            return self._streamed.schedule
        return build_schedule(self.model.num_layers if isinstance(self.model, LayeredModel) else 1)

    def trace_swaps(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a context whose steps are drawn into a file when it ends: swapping as planned, and as it was.

        Args:
          path: of a file that Perfetto opens (https://ui.perfetto.dev); compressed if it ends in ".gz". It tells of this
            process's devices, so processes need a file each. The layout is in `host_offload.trace.perfetto`.

        Raises:
          ValueError: nothing rests on nvme, or the file cannot be written; or, on entering, there is another trace.
          OSError: the file could not be written when the context ended; after an error inside of it, that is logged instead.
        """
        if self.swap is None:
            raise ValueError(
                "this program has nothing on nvme, and so no swapping to trace: set params, opt_state, ... to 'nvme'"
            )
        return self.swap.trace(path)

    def init(self, key: jax.Array) -> TrainState:
        """Make the state, each device its own shard.

        Args:
          key: from `jax.random.key`; a legacy uint32 key will do.

        Raises:
          RuntimeError: state in host memory finds no room there, or this device and jaxlib read wrong records of it.
          SwapError: the disk is too small for what rests there, or cannot be written to.
        """
        if not isinstance(key, jax.Array):
            raise ValueError(f"init takes a random key, such as jax.random.key(0), got {key!r}")
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        if key.shape:
            raise ValueError(f"init takes one random key, got an array of shape {key.shape}")
        with self.calling(), jax.set_mesh(self.mesh):
            if self.swap is not None:
                self.swap.open()
            if not self.layout.updates_by_record:
                return self._init(key)
            self.check_host_memory()
            order = self.layout.order
            empty = allocate_all([a for a in jax.tree.leaves(self.layout.abstract_state) if is_away(a)])
            if self.swap is None:
                return self._init(key, order, jnp.int32(1), empty, jnp.int32(0))
            self.swap.begin((), (), name="init")
            state = self._init(key, order, jnp.int32(1), empty, jnp.int32(self.swap.generation))
            jax.block_until_ready(state)
            self.swap.finish()
            return state

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Run a program in this: where it calls back, no signal leaves it, and no other thread runs one beside it."""
        if self.swap is None and self._host is None:
            yield
            return
        with self._lock, interrupts_wait():
            yield

    def check_host_memory(self) -> None:
        """Test, once a process, that the devices read the right records of host memory; a CPU does."""
        if self.mesh.devices.flat[0].platform != "cpu":
            check_host_slices(self.mesh.local_devices[0])

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run one train step.

        Args:
          state: from `init` or the previous step. Donated: its buffers are reused, and it must not be read again.
          batch: tree of arrays, dim 0 the global batch; in a run of several processes numpy leaves hold this
            process's part of it.

        Returns:
          The new state, and metrics as described in `zerojax.metrics.step_metrics`.

        Raises:
          ValueError: the state was donated before, the batch does not divide, or the loss is not a scalar; before anything
            runs.
        """
        check_is_there(state)
        batch = self.shard_batch(batch)
        with self.calling(), jax.set_mesh(self.mesh):
            self._check_state(state)
            jitted, (plans, one) = self._jitted(batch), self._indices()
            scratch = self._take_scratch(jitted)
            memory = [] if self._host is None else self._host.prepare(jax.block_until_ready(state))
            if self.swap is not None:
                self.swap.begin(state, self._moves, jitted.on_disk)
            (state, scratch), metrics = jitted.step(state, batch, plans, one, scratch)
            if self._host is not None or self.swap is not None:
                jax.block_until_ready((state, scratch, metrics))
            self._keep_scratch(jitted, scratch)
            if self.swap is not None:
                metrics |= self.swap.finish(is_step=True)
            if self._host is not None:
                self._host.check(memory, state)
            return state, metrics

    def check_state(self, state: TrainState) -> None:
        """Raise ValueError for a state that was donated, or that another program made, or what is none."""
        if not isinstance(state, TrainState):
            raise ValueError(f"a zerojax.TrainState is needed, such as init and step return, not {type(state).__name__}")
        check_is_there(state)
        self._check_state(state)

    def _check_state(self, state: TrainState) -> None:
        """Raise ValueError for a state that was donated, perhaps by another thread just now, or that another program made."""
        check_is_there(state)
        leaves, tree = jax.tree.flatten(state)
        expected, places = self._expected
        if tree != expected:
            raise ValueError(
                "this state is of another structure than this program's: it was made by a program of another config"
            )
        for i, (leaf, (shape, away)) in enumerate(zip(leaves, places, strict=True)):
            if is_away(leaf) != away or leaf.shape != shape:
                path = jax.tree_util.tree_flatten_with_path(state)[0][i][0]
                tiers = ["host memory" if is_host else "device memory" for is_host in (is_away(leaf), away)]
                raise ValueError(
                    f"this state's {jax.tree_util.keystr(path)} is {leaf.shape} in {tiers[0]}, and this program's is {shape} "
                    f"in {tiers[1]}: it was made by a program of another model or config"
                )

    @cached_property
    def _expected(self) -> tuple[Any, list[tuple[tuple[int, ...], bool]]]:
        """The structure of this program's states, and of each leaf the shape and whether it rests in host memory."""
        leaves, tree = jax.tree.flatten(self.layout.abstract_state)
        return tree, [(leaf.shape, is_away(leaf)) for leaf in leaves]

    def _take_scratch(self, jitted: CompiledStep) -> Scratch:
        """Return the host memory of a step, which is donated: a step that fails leaves none. Allocates it where there is none.

        Gradients do not depend on the batch, and are shared; of activations only the last shape's are kept.
        """
        abstract = jitted.abstract_scratch
        if not abstract:
            return abstract
        if jitted.kept is None and abstract["residuals"]:
            for other in self._compiled.values():
                other.kept = None
        if (jitted.kept is None and abstract["residuals"]) or (self._grads is None and abstract["grads"]):
            self.check_host_memory()
        kept = allocate_all(abstract["residuals"]) if jitted.kept is None else jitted.kept
        grads = allocate_all(abstract["grads"]) if self._grads is None else self._grads
        jitted.kept = self._grads = None
        return {"residuals": kept, "grads": grads}

    def _keep_scratch(self, jitted: CompiledStep, scratch: Scratch) -> None:
        if scratch:
            jitted.kept, self._grads = scratch["residuals"], scratch["grads"]

    def _indices(self) -> tuple[Plans, jax.Array]:
        """Return the schedule's arrays as arguments of the step: known when compiling, XLA would derive wrong slices."""
        if self._arrays is None:
            self._arrays = (index_arrays(self.schedule.arrays()), jnp.int32(1))
        return self._arrays

    def _jitted(self, batch: Any) -> CompiledStep:
        """Return the step for batches of this shape. To be called under the mesh."""
        leaves, tree = jax.tree.flatten(batch)
        key = (tree, tuple((a.shape, jnp.dtype(a.dtype)) for a in leaves))
        if key not in self._compiled:
            abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
            scratch: Scratch = {}
            if self._streamed is not None:
                scratch = self._streamed.abstract_scratch(self.layout.abstract_arrays.params, abstract)
            whole, state = explicit(named(self.mesh, ())), explicit(self.layout.shardings)
            host = jax.tree.map(lambda a: a.sharding, scratch)
            batches = jax.tree.map(lambda a: explicit(batch_sharding(self.mesh, len(a.shape))), batch)
            step = jax.jit(
                self._step,
                donate_argnums=(0, 4),
                in_shardings=(state, batches, whole, whole, host),
                out_shardings=((state, host), whole),
                compiler_options=self._options,
            )
            on_disk: Sequence[DiskRecords] = ()
            if self._streamed is not None and self.swap is not None:
                on_disk = self._streamed.on_disk(self.layout.abstract_arrays.params, abstract)
            self._compiled[key] = CompiledStep(step, scratch, on_disk)
        return self._compiled[key]

    def eval(self, state: TrainState, batch: Any) -> jax.Array:
        """Return the loss of a batch, f32[], with key=None: deterministic, and without an update."""
        check_is_there(state)
        batch = self.shard_batch(batch, num_microbatches=1)
        with self.calling(), jax.set_mesh(self.mesh):
            self._check_state(state)
            plans, one = self._indices()
            if self.swap is None:
                return self._eval(state.params, batch, plans, one)
            jax.eval_shape(self._eval, state.params, batch, plans, one)  # traced first: which loops over tiles it has
            self.swap.begin(state.params, self._eval_moves, name="eval")
            loss = jax.block_until_ready(self._eval(state.params, batch, plans, one))
            self.swap.finish()
            return loss

    def shard_batch(self, batch: Any, num_microbatches: int | None = None) -> Any:
        """Place a batch on the mesh: dim 0 over `data` and `fsdp`. Leaves already there stay.

        Raises:
          ValueError: the batch does not divide.
        """
        count = self.config.num_microbatches if num_microbatches is None else num_microbatches
        return place_batch(batch, self.mesh, count)

    def check(self, batch: Any) -> None:
        """Trace a step over a batch's shapes, and raise ValueError if it cannot be trained. Nothing runs."""
        check_batch(batch, self.mesh, self.config.num_microbatches)
        with jax.set_mesh(self.mesh):
            self._abstract_call(batch, lambda step, *args: jax.eval_shape(step, *args))

    def _abstract_call(self, batch: Any, call: Callable[..., Any]) -> Any:
        """Return `call(step, *abstract arguments)`."""
        abstract = self.abstract_batch(batch)
        jitted, whole = self._jitted(abstract), named(self.mesh, ())

        def index(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

        plans = jax.tree.map(lambda a: index(a.shape), self.schedule.arrays())
        one = index(())
        return call(jitted.step, self.layout.abstract_state, abstract, plans, one, jitted.abstract_scratch)

    def _report(self, sentence: str) -> None:
        if sentence not in self._reported:
            self._reported[sentence] = None
            logger.warning("gather on use: %s", sentence)

    def abstract_batch(self, batch: Any) -> Any:
        """Return the ShapeDtypeStruct of each leaf of a batch, with its sharding."""
        return abstract_batch(batch, self.mesh)

    def lower(self, abstract_batch: Any) -> LoweredStep:
        """Lower the step for this mesh, which may be one of devices that are not there.

        Args:
          abstract_batch: tree of ShapeDtypeStruct (or arrays, of which only shapes are read), global shapes.
        """
        check_batch(abstract_batch, self.mesh, self.config.num_microbatches)
        with jax.set_mesh(self.mesh):
            lowered = self._abstract_call(abstract_batch, lambda step, *args: step.lower(*args))
        has_callbacks = self._host is not None or self.swap is not None
        return LoweredStep(lowered, self.mesh, self._options, has_callbacks)

    def memory(self, batch: Any) -> MemoryReport:
        """Return the bytes of a step on each device, per tier, and those that its collectives and its host link move."""
        check_batch(batch, self.mesh, self.config.num_microbatches)
        with jax.set_mesh(self.mesh):
            return program_memory(
                self.records,
                plain_loss(self.model, self.layout),
                self.abstract_batch(batch),
                self.model,
                streamed=self._streamed,
            )

    def params(self, state: TrainState) -> Any:
        """Return the sharded parameter tree in the compute dtype; `{"embed", "blocks", "head"}` for a LayeredModel.

        Leaves on nvme are `zerojax.state.OnDisk`.

        Raises:
          ValueError: the state was donated.
        """
        check_is_there(state)
        return state.params

    def master_params(self, state: TrainState) -> Any:
        """Return the float32 parameters that the optimizer updates, sharded as its state is, where they rest.

        With a fraction of the optimizer state on the device, stacked leaves are `zerojax.state.Split`; on nvme, `OnDisk`.

        Raises:
          ValueError: the state was donated.
        """
        check_is_there(state)
        return masters(state)

    def iter_params(self, state: TrainState) -> Iterator[tuple[str, Any]]:
        """Yield the float32 parameters piece by piece, as (name, tree), on the device.

        A LayeredModel yields "embed", "blocks/0" .. "blocks/L-1" and "head"; a Model one leaf at a time.

        Raises:
          ValueError: the state was donated, or is not the one on disk.
          SwapError: a record cannot be read.
        """
        yield from self._reader.pieces(state)
