"""Float32 parameters from any tier, one piece at a time: for export, where the whole tree would not fit."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.models import BLOCKS, LayeredModel, Model
from zerojax.program.runner import Runner
from zerojax.state import (
    OnDevice,
    OnDisk,
    StateRecords,
    Tile,
    TileGroup,
    TrainState,
    check_is_there,
    is_stored,
    load_leaves,
    masters,
)


class ParamReader:
    """Reads the parameters that the optimizer updates, onto the device."""

    def __init__(
        self,
        model: Model | LayeredModel,
        records: StateRecords,
        runner: Runner,
    ) -> None:
        """Read states of a program.

        Args:
          model: of the program.
          records: how its states rest.
          runner: of the program.
        """
        self.model, self.layout, self.records, self._runner = model, records.layout, records, runner
        self._ends: dict[int, Any] = {}

    def pieces(self, state: TrainState) -> Iterator[tuple[str, Any]]:
        """Yield (name, tree): "embed", "blocks/0" .. "blocks/L-1" and "head" of a LayeredModel, each leaf of a Model."""
        if not isinstance(self.model, LayeredModel):
            for index, leaf in enumerate(self.layout.leaves):
                yield leaf.name, self._end(state, index)
            return
        tree = self.layout.abstract_params
        indices = jax.tree.unflatten(jax.tree.structure(tree), range(len(jax.tree.leaves(tree))))
        yield "embed", jax.tree.map(lambda i: self._end(state, i), indices["embed"])
        for layer in range(self.model.num_layers):
            check_is_there(state)
            where, order = layer < self.layout.device_layers, self.layout.order
            # The layer is an argument: one compiled program reads them all, and XLA cannot derive the index.
            yield f"{BLOCKS}/{layer}", self._read(self._layer, state, jnp.int32(layer), where, order)
        yield "head", jax.tree.map(lambda i: self._end(state, i), indices["head"])

    def _read(self, read: Any, tree: Any, *args: Any) -> Any:
        """Call `read(tree, *args)`, which reads from any tier."""
        with self._runner.calling(), jax.set_mesh(self.layout.mesh):
            return self._runner.run("read", read, tree, *args, reads=tree)

    def _end(self, state: TrainState, index: int) -> jax.Array:
        """Return a parameter that is no stack of layers."""
        check_is_there(state)
        leaf = jax.tree.leaves(masters(state), is_leaf=is_stored)[index]
        if not isinstance(leaf, OnDisk):
            return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        specs, stacks = self.records.weight_record(self.records.flat(state), index)
        # Compiled once for each leaf: its records on disk are part of the program.
        if index not in self._ends:
            self._ends[index] = jax.jit(lambda stacks: load_leaves(specs, stacks)[0])
        return self._read(self._ends[index], stacks)

    @cached_property
    def _layer(self) -> Any:
        """Return `read(state, layer, on_device, order)`: one layer of stacks that rest in any tier."""
        tree, records, layout = jax.tree.structure(self.layout.abstract_params[BLOCKS]), self.records, self.layout

        def read(state: TrainState, layer: jax.Array, on_device: bool, order: jax.Array) -> Any:
            states = records.flat(state)
            leaves = dict(
                zip(
                    layout.blocks,
                    records.read_weights(states, layout.blocks, OnDevice(layer) if on_device else layer),
                    strict=True,
                )
            )
            for group in layout.groups:

                def tile(k: jax.Array, group: TileGroup = group) -> list[jax.Array]:
                    return records.read_weights(states, group.leaves, Tile(layer, k, group.num_tiles))

                # A layer is wanted whole here, so its tiles are stacked again.
                leaves |= zip(group.leaves, jax.lax.map(tile, order[: group.num_tiles]), strict=True)
            return jax.tree.unflatten(tree, [leaves[i] for i in layout.stacked])

        return jax.jit(read, static_argnums=2)
