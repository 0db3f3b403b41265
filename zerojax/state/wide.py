"""The order of layers in the state of a pipeline: wide records of p layers side by side.

A mesh with p pipeline stages splits the L layers of a model into v p chunks of K neighboring
layers, L = v p K. Stage s holds the chunks s, p + s, 2 p + s, ... (`ZeroConfig.pipe_chunks` = v).
The state is that of a model of L / p wide layers, each of p layers, one of every stage:

    W[L, D, F]  ->  W[v K, p_pipe, D_fsdp, F]

    record c K + k holds layer (c p + s) K + k of every stage s

A record is read, updated and moved as without a pipeline; each device works on the layer of its own
stage. Everything that users see has the model's order, [L, ...]; the functions here convert.

    narrow_params     W[v K, p_pipe, D_fsdp, F] -> W[L_pipe, D_fsdp, F]
    widen_stack       the inverse

With v = 1, each stage already holds neighboring layers, so neither moves data between devices.
Otherwise XLA exchanges chunks by an all_to_all and a permute if v divides p or p divides v, and
else all_gathers a stack over `pipe`, one leaf at a time.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.models import BLOCKS, LayeredModel, Stack, abstract_block, list_stacks
from zerojax.sharding import PIPE, broadcast_specs, pad_spec
from zerojax.state.train_state import Split, is_stored
from zerojax.trees import Params

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class StageOrder:
    """Which layer each record holds of each stage.

    Attributes:
      num_layers: L, number of layers of the model.
      num_stages: p, number of pipeline stages.
      num_chunks: v, number of chunks of layers of each stage.
    """

    num_layers: int
    num_stages: int
    num_chunks: int = 1

    @property
    def chunk_layers(self) -> int:
        """K, the number of layers of a chunk."""
        return self.num_layers // (self.num_stages * self.num_chunks)

    @property
    def num_records(self) -> int:
        """V K, the number of records of a stack."""
        return self.num_layers // self.num_stages

    @functools.cached_property
    def layers(self) -> np.ndarray:
        """The layer that each record holds of each stage: int[v K, p]."""
        chunks = (self.num_chunks, self.num_stages, self.chunk_layers)
        return np.swapaxes(np.arange(self.num_layers).reshape(chunks), 1, 2).reshape(
            self.num_records, self.num_stages
        )

    def find(self, layer: int) -> tuple[int, int]:
        """Return the record and the stage that hold a layer."""
        chunk, k = divmod(layer, self.chunk_layers)
        turn, stage = divmod(chunk, self.num_stages)
        return turn * self.chunk_layers + k, stage

    def runs(self, start: int, stop: int) -> Iterator[range]:
        """Yield the runs of records in which each stage holds neighboring layers.

        Args:
          start: number of the first record.
          stop: number of the last record plus one.
        """
        while start < stop:
            end = min(stop, (start // self.chunk_layers + 1) * self.chunk_layers)
            yield range(start, end)
            start = end

    def widen(self, stack: Any) -> Any:
        """Return a stack of layers as records: W[L, ...] -> W[v K, p, ...].

        Args:
          stack: array of jax or numpy.
        """
        rest = stack.shape[1:]
        chunks = stack.reshape(self.num_chunks, self.num_stages, self.chunk_layers, *rest)
        return chunks.swapaxes(1, 2).reshape(self.num_records, self.num_stages, *rest)

    def narrow(self, stack: Any) -> Any:
        """Return a stack of records in the order of the layers: W[v K, p, ...] -> W[L, ...].

        Args:
          stack: array of jax or numpy.
        """
        rest = stack.shape[2:]
        chunks = stack.reshape(self.num_chunks, self.chunk_layers, self.num_stages, *rest)
        return chunks.swapaxes(1, 2).reshape(self.num_layers, *rest)


@dataclasses.dataclass(frozen=True)
class WideModel(LayeredModel):
    """A model whose layers are the records of a pipeline's state.

    It describes the state alone: its parameters can be created, but its layers cannot be run.

    Attributes:
      order: the order of the layers in the records.
      layer: the model of which each record holds several layers.
    """

    order: StageOrder = None  # pyright: ignore[reportAssignmentType]  # required
    layer: LayeredModel = None  # pyright: ignore[reportAssignmentType]  # required

    def split_layer_keys(self, key: Array) -> Array:
        """Return the keys of the layers of each record: key[v K, p].

        A layer is drawn from its own key, whatever the mesh.
        """
        return self.order.widen(self.layer.split_layer_keys(key))


def widen_model(model: LayeredModel, order: StageOrder) -> WideModel:
    """Return the model whose layers are the records of a pipeline's state.

    Args:
      model: a model of one stack of layers, without `enter`, `init_state` and `tiles`.
      order: the order of its layers in the records.
    """
    (stack,) = list_stacks(model)

    def init_block(keys: Array) -> Params:
        return jax.vmap(stack.model.init_block, spmd_axis_name=PIPE)(keys)

    def block(*args: Any) -> Any:
        raise AssertionError("a record of a pipeline is not run as a layer")

    abstract = abstract_block(stack.model)
    specs = dict(model.specs or {})
    block_specs = broadcast_specs(stack.of(specs.get("block")), abstract)
    wide_specs = [PartitionSpec(PIPE, *spec) for spec in block_specs]
    specs["block"] = jax.tree.unflatten(jax.tree.structure(abstract), wide_specs)
    wide = {"num_layers": order.num_records, "init_block": init_block, "block": block}
    if stack.name:
        specs["block"] = {stack.name: specs["block"]}
        wide = {"stacks": (Stack(stack.name, **wide),)}
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(LayeredModel)}
    fields.update(wide, specs=specs, context=None, per_layer=None, cache=None, check_batch=None)
    return WideModel(**fields, order=order, layer=model)


def stage_order(model: Any) -> StageOrder | None:
    """Return the order of a model's layers in its records, or None if a record is a layer."""
    return model.order if isinstance(model, WideModel) else None


# --- the order of the model -----------------------------------------------------------------------


def narrow_params(params: Params, order: StageOrder | None, *, donate: bool = False) -> Params:
    """Return a parameter tree with its stacks in the order of the layers, [L, ...].

    Stacks of records are copied, one after the other; stacks in this order and leaves of embedding
    and head are returned as they are. A stack in host memory passes through the device, and its
    copy is in host memory too.

    Args:
      params: tree of parameters, or of gradients, with records of several stages. Leaves may be
        None.
      order: the order of the layers in the records; None returns the tree unchanged.
      donate: whether to delete each stack once it has been copied.
    """
    if order is None:
        return params

    def narrow(stack: Any) -> jax.Array:
        if not isinstance(stack, Split) and stack.shape[0] == order.num_layers:
            return stack
        narrowed = _narrow_stack(stack, order)
        if donate:
            jax.block_until_ready(narrowed)
            jax.tree.map(lambda a: a.delete(), stack)
        return narrowed

    return {**params, BLOCKS: jax.tree.map(narrow, params[BLOCKS], is_leaf=is_stored)}


def _narrow_stack(stack: Any, order: StageOrder) -> jax.Array:
    """Return a stack of records, or the two parts of one, as one stack of layers."""
    parts = [stack.device, stack.host] if isinstance(stack, Split) else [stack]
    last = parts[-1].sharding
    spec = pad_spec(last.spec, parts[-1].ndim)
    on_device = NamedSharding(last.mesh, PartitionSpec(*spec[1:]), memory_kind="device")
    parts = [jax.device_put(a, a.sharding.with_memory_kind("device")) for a in parts]
    narrowed = _build_narrow(order, on_device)(parts)
    return jax.device_put(narrowed, on_device.with_memory_kind(last.memory_kind))


@functools.lru_cache(maxsize=256)
def _build_narrow(order: StageOrder, sharding: NamedSharding) -> Any:
    def narrow(parts: list[jax.Array]) -> jax.Array:
        return order.narrow(parts[0] if len(parts) == 1 else jnp.concatenate(parts))

    return jax.jit(narrow, out_shardings=sharding)


def widen_stack(stack: jax.Array, order: StageOrder, sharding: NamedSharding) -> jax.Array:
    """Return a stack of layers as records: W[L, ...] -> W[v K, p_pipe, ...].

    Args:
      stack: the stack of layers, on the devices of the mesh.
      order: the order of the layers in the records.
      sharding: sharding and tier of the records.
    """
    on_device = sharding.with_memory_kind("device")
    widened = _build_widen(order, on_device)(
        jax.device_put(stack, stack.sharding.with_memory_kind("device"))
    )
    return jax.device_put(widened, sharding)


@functools.lru_cache(maxsize=256)
def _build_widen(order: StageOrder, sharding: NamedSharding) -> Any:
    return jax.jit(order.widen, out_shardings=sharding)


def pick_stage(record: Array, stage: Array) -> Array:
    """Return the layer that a record holds of one stage: W[p_pipe, D, F] -> W[D, F].

    The stage's devices send their bits to the others, so no device holds p layers.

    Args:
      record: one layer of every stage.
      stage: i32[], number of the stage.
    """
    dtype = record.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(pick_stage(record.real, stage), pick_stage(record.imag, stage))
    if dtype == jnp.bool_:
        return pick_stage(record.astype(jnp.uint8), stage).astype(jnp.bool_)
    # A sum of integers, because a sum of floats would turn -0 into 0.
    bits = jax.lax.bitcast_convert_type(record, jnp.dtype(f"uint{8 * dtype.itemsize}"))
    is_stage = (jnp.arange(record.shape[0]) == stage).reshape(-1, *(1,) * (record.ndim - 1))
    picked = jnp.sum(jnp.where(is_stage, bits, 0), axis=0, dtype=bits.dtype)
    return jax.lax.bitcast_convert_type(picked, dtype)
