"""Build a train step: the public entry, and the program it returns.

A `Program` holds no arrays. It knows the layout of its state (specs, shardings, bytes) before anything is allocated, so it
can be built, lowered and accounted for on a mesh that is not there.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from host_offload.schedule import Schedule, build_schedule
from zerojax import memory
from zerojax.config import ZeroConfig, require_built
from zerojax.layout import Layout, batch_sharding, build_layout, check_batch
from zerojax.mesh import FSDP, check_mesh
from zerojax.model import BLOCKS, LayeredModel, Model
from zerojax.partition import Replicated
from zerojax.resident import build_init, build_step, plain_loss, sharded_loss, unit_bytes
from zerojax.state import TrainState

logger = logging.getLogger("zerojax")

Metrics = Mapping[str, jax.Array]


def build_train_step(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    config: ZeroConfig,
    mesh: Mesh,
    *,
    batch: Any = None,
) -> "Program":
    """Build a sharded train step.

    Args:
      model: a Model or a LayeredModel; `zerojax.from_flax` makes both.
      tx: any optax transformation. Clipping belongs in `config.clip_norm`, where a non-finite gradient is caught before it.
      config: stage, tiers, precision.
      mesh: from `zerojax.make_mesh`; devices of a compile-only topology will do.
      batch: an example batch or its tree of ShapeDtypeStruct. With it the loss is traced and checked now; without it, at
        the first step.

    Returns:
      The program. Nothing is allocated before `program.init`.

    Raises:
      ValueError: what cannot work, with names, numbers and the repair.
      NotImplementedError: a setting that this version does not build.
    """
    if not isinstance(model, Model | LayeredModel):
        raise ValueError(f"model must be a zerojax.Model or LayeredModel, got {type(model).__name__}; see zerojax.from_flax")
    if not isinstance(config, ZeroConfig):
        raise ValueError(f"config must be a zerojax.ZeroConfig, got {type(config).__name__}")
    if config.params != "device" and isinstance(model, Model):
        raise ValueError(
            f"params={config.params!r} streams layer by layer, and the layers of a Model are not known: "
            "use params='device', or give a LayeredModel (zerojax.from_flax(embed=..., block=..., head=..., num_layers=...))"
        )
    require_built(config)
    check_mesh(mesh)
    with jax.set_mesh(mesh):
        program = Program(model, tx, build_layout(model, tx, config, mesh))
    if batch is not None:
        program.check(batch)
    return program


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A train step that is lowered and not yet compiled."""

    lowered: jax.stages.Lowered
    mesh: Mesh

    def as_text(self) -> str:
        """Return the StableHLO."""
        return self.lowered.as_text()

    def compile(self) -> jax.stages.Compiled:
        """Compile; the result offers `as_text()` (scheduled HLO of one device) and `memory_analysis()`."""
        with jax.set_mesh(self.mesh):
            return self.lowered.compile()


class Program:
    """A train step over one model, optimizer, config and mesh. Made by `build_train_step`."""

    def __init__(self, model: Model | LayeredModel, tx: optax.GradientTransformation, layout: Layout) -> None:
        self.model, self.tx, self.layout = model, tx, layout
        self.mesh, self.config = layout.mesh, layout.config
        self._reported: dict[str, None] = {}
        loss = sharded_loss(model, layout, self._report)
        options = compiler_options(model, layout)
        self._init = jax.jit(build_init(model, tx, layout), out_shardings=layout.shardings)
        self._step = jax.jit(
            build_step(model, tx, layout, loss),
            donate_argnums=0,
            out_shardings=(layout.shardings, None),
            compiler_options=options,
        )
        self._eval = jax.jit(lambda params, batch: loss(params, batch, None).astype(jnp.float32), compiler_options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release what the program holds outside of JAX; the device tier holds nothing."""

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
        return build_schedule(self.model.num_layers if isinstance(self.model, LayeredModel) else 1)

    def init(self, key: jax.Array) -> TrainState:
        """Make the state, each device its own shard.

        Args:
          key: from `jax.random.key`; a legacy uint32 key will do.
        """
        if not isinstance(key, jax.Array):
            raise ValueError(f"init takes a random key, such as jax.random.key(0), got {key!r}")
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        if key.shape:
            raise ValueError(f"init takes one random key, got an array of shape {key.shape}")
        with jax.set_mesh(self.mesh):
            return self._init(key)

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
        if state.step.is_deleted():  # jax 0.10 on CPU crashes the process on some donated arguments
            raise ValueError("this state was donated to an earlier step, and is gone: go on with the state that step returned")
        batch = self.shard_batch(batch)
        with jax.set_mesh(self.mesh):
            return self._step(state, batch)

    def eval(self, state: TrainState, batch: Any) -> jax.Array:
        """Return the loss of a batch, f32[], with key=None: deterministic, and without an update."""
        batch = self.shard_batch(batch, num_microbatches=1)
        with jax.set_mesh(self.mesh):
            return self._eval(state.params, batch)

    def shard_batch(self, batch: Any, num_microbatches: int | None = None) -> Any:
        """Place a batch on the mesh: dim 0 over `data` and `fsdp`. Leaves already there stay.

        Raises:
          ValueError: the batch does not divide.
        """
        count = self.config.num_microbatches if num_microbatches is None else num_microbatches
        processes = len({d.process_index for d in self.mesh.devices.flat})
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf, batch)

        def parts(leaf: Any) -> int:
            """Return how many processes hold a part of dim 0 each: 1 if the leaf is the whole batch already."""
            is_whole = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            return 1 if is_whole or leaf.ndim == 0 else processes

        def whole(leaf: Any) -> Any:
            if not hasattr(leaf, "shape"):
                return leaf
            return jax.ShapeDtypeStruct((leaf.shape[0] * parts(leaf), *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype)

        check_batch(jax.tree.map(whole, batch), self.mesh, count)

        def place(leaf: Any) -> jax.Array:
            sharding = batch_sharding(self.mesh, leaf.ndim)
            if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf
            if parts(leaf) > 1:
                return jax.make_array_from_process_local_data(sharding, leaf)
            return jax.device_put(leaf, sharding)

        return jax.tree.map(place, batch)

    def check(self, batch: Any) -> None:
        """Trace a step over a batch's shapes, and raise ValueError if it cannot be trained. Nothing runs."""
        check_batch(batch, self.mesh, self.config.num_microbatches)
        with jax.set_mesh(self.mesh):
            jax.eval_shape(self._step, self.layout.abstract_state, self.abstract_batch(batch))

    def _report(self, sentence: str) -> None:
        if sentence not in self._reported:
            self._reported[sentence] = None
            logger.warning("gather on use: %s", sentence)

    def abstract_batch(self, batch: Any) -> Any:
        """Return the ShapeDtypeStruct of each leaf of a batch, with its sharding."""

        def abstract(a: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(a.dtype)
            return jax.ShapeDtypeStruct(a.shape, dtype, sharding=batch_sharding(self.mesh, len(a.shape)))

        return jax.tree.map(abstract, batch)

    def lower(self, abstract_batch: Any) -> LoweredStep:
        """Lower the step for this mesh, which may be one of devices that are not there.

        Args:
          abstract_batch: tree of ShapeDtypeStruct (or arrays, of which only shapes are read), global shapes.
        """
        check_batch(abstract_batch, self.mesh, self.config.num_microbatches)
        with jax.set_mesh(self.mesh):
            lowered = self._step.lower(self.layout.abstract_state, self.abstract_batch(abstract_batch))
        return LoweredStep(lowered, self.mesh)

    def memory(self, batch: Any) -> memory.MemoryReport:
        """Return the bytes of a step on each device, per tier, and the bytes that its collectives move."""
        check_batch(batch, self.mesh, self.config.num_microbatches)
        with jax.set_mesh(self.mesh):
            return memory.program_memory(
                self.layout, plain_loss(self.model, self.layout), self.abstract_batch(batch), self.model
            )

    def params(self, state: TrainState) -> Any:
        """Return the sharded parameter tree in the compute dtype; `{"embed", "blocks", "head"}` for a LayeredModel."""
        return state.params

    def master_params(self, state: TrainState) -> Any:
        """Return the float32 parameters that the optimizer updates, sharded as its state is."""
        return state.params if state.master is None else state.master

    def iter_params(self, state: TrainState) -> Iterator[tuple[str, Any]]:
        """Yield the float32 parameters piece by piece, as (name, tree).

        A LayeredModel yields "embed", "blocks/0" .. "blocks/L-1" and "head"; a Model one leaf at a time.
        """
        params = self.master_params(state)
        if isinstance(self.model, LayeredModel):
            yield "embed", params["embed"]
            for layer in range(self.model.num_layers):
                yield f"{BLOCKS}/{layer}", jax.tree.map(lambda a, layer=layer: a[layer], params[BLOCKS])
            yield "head", params["head"]
        else:
            for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
                yield jax.tree_util.keystr(path), leaf


def compiler_options(model: Model | LayeredModel, layout: Layout) -> dict[str, Any] | None:
    """Return XLA options for GPUs: collectives are combined up to one layer, not up to the whole model.

    XLA's default merges the gradients of several layers into one reduce_scatter and holds them all until it runs.
    """
    if layout.mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return None
    leaves, layer = unit_bytes(model, layout)
    threshold = layer if isinstance(model, LayeredModel) else max(leaves)
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": threshold,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": threshold // layout.mesh.shape[FSDP],
    }
