"""The order of layers in the state of a pipeline: wide records of p layers side by side.

A mesh with p pipeline stages splits the L layers of a model into v p chunks of K neighboring
layers, L = v p K. Stage s holds the chunks s, p + s, 2 p + s, ... (`ZeroConfig.pipe_chunks` = v).
The state is that of a model of L / p wide layers, each of p layers, one of every stage:

    W[L, D, F]  ->  W[v K, p_pipe, D_fsdp, F]

    record c K + k holds layer (c p + s) K + k of every stage s

A record is read, updated and moved as without a pipeline; each device works on the layer of its own
stage. Everything that users see has the model's order, [L, ...]; the functions here convert.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from zerojax.models import LayeredModel, abstract_block
from zerojax.sharding import PIPE, broadcast_specs
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

    def init_block(keys: Array) -> Params:
        return jax.vmap(model.init_block, spmd_axis_name=PIPE)(keys)

    def block(*args: Any) -> Any:
        raise AssertionError("a record of a pipeline is not run as a layer")

    abstract = abstract_block(model)
    specs = dict(model.specs or {})
    block_specs = broadcast_specs(specs.get("block"), abstract)
    wide_specs = [PartitionSpec(PIPE, *spec) for spec in block_specs]
    specs["block"] = jax.tree.unflatten(jax.tree.structure(abstract), wide_specs)
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(LayeredModel)}
    fields.update(
        num_layers=order.num_records,
        init_block=init_block,
        block=block,
        specs=specs,
        context=None,
        per_layer=None,
        cache=None,
        check_batch=None,
    )
    return WideModel(**fields, order=order, layer=model)


def stage_order(model: Any) -> StageOrder | None:
    """Return the order of a model's layers in its records, or None if a record is a layer."""
    return model.order if isinstance(model, WideModel) else None
