"""Float32 parameters from any tier, one piece at a time: for export, where the whole tree would not fit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.models import BLOCKS, LayeredModel, Model
from zerojax.optim import Parts
from zerojax.runtime import SwapSession
from zerojax.state import Index, Layout, OnDisk, Tile, TileGroup, TrainState, check_is_there, is_stored, load_leaves, masters


class ParamReader:
    """Reads the parameters that the optimizer updates, onto the device."""

    def __init__(
        self,
        model: Model | LayeredModel,
        layout: Layout,
        parts: Parts | None,
        swap: SwapSession | None,
        calling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Read states of `layout`.

        Args:
          model: of the program.
          layout: likewise.
          parts: how states rest where they do not rest on the device.
          swap: of the program, where something rests on disk.
          calling: returns the context for a program that calls back.
        """
        self.model, self.layout, self.parts, self._swap, self._calling = model, layout, parts, swap, calling
        self._ends: dict[int, Any] = {}

    def pieces(self, state: TrainState) -> Iterator[tuple[str, Any]]:
        """Yield (name, tree): "embed", "blocks/0" .. "blocks/L-1" and "head" of a LayeredModel, each leaf of a Model."""
        if not isinstance(self.model, LayeredModel):
            for index, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(self.layout.abstract_params)[0]):
                yield jax.tree_util.keystr(path), self._end(state, index)
            return
        tree = self.layout.abstract_params
        indices = jax.tree.unflatten(jax.tree.structure(tree), range(len(jax.tree.leaves(tree))))
        yield "embed", jax.tree.map(lambda i: self._end(state, i), indices["embed"])
        for layer in range(self.model.num_layers):
            check_is_there(state)
            where, order = layer < self.layout.device_layers, self.layout.order
            yield f"{BLOCKS}/{layer}", self._read(self._layer, state, jnp.int32(layer), where, order)
        yield "head", jax.tree.map(lambda i: self._end(state, i), indices["head"])

    def _read(self, read: Any, held: Any, *args: Any) -> Any:
        """Call `read(held, *args)`, which reads from any tier."""
        if self._swap is None:
            with jax.set_mesh(self.layout.mesh):
                return read(held, *args)
        with self._calling(), jax.set_mesh(self.layout.mesh):
            self._swap.begin(held, (), name="read")
            values = jax.block_until_ready(read(held, *args))
            self._swap.finish()
            return values

    def _end(self, state: TrainState, index: int) -> jax.Array:
        """Return a parameter that is no stack of layers."""
        check_is_there(state)
        leaf = jax.tree.leaves(masters(state), is_leaf=is_stored)[index]
        if not isinstance(leaf, OnDisk):
            return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        parts = self.parts
        assert parts is not None
        if state.master is None:
            records, held = [parts.params[index]], [leaf]
        else:  # the master is part of a record
            records, held = parts.opt_records((index,)), parts.opt_states(parts.flat(state), (index,))
        if index not in self._ends:
            self._ends[index] = jax.jit(lambda held: load_leaves(records, held)[0])
        return self._read(self._ends[index], held)

    @cached_property
    def _layer(self) -> Any:
        """Return `read(state, layer, on_device, order)`: one layer of stacks that rest in any tier."""
        tree, parts = jax.tree.structure(self.layout.abstract_params[BLOCKS]), self.parts

        def read(state: TrainState, layer: jax.Array, on_device: bool, order: jax.Array) -> Any:
            if parts is None:
                stacks = masters(state)[BLOCKS]
                return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, layer, 0, keepdims=False), stacks)
            states, read_opt, read_params = parts.flat(state), parts.read_opt, parts.read_params

            def weights(part: Sequence[int], index: Index) -> list[jax.Array]:
                if state.master is None:
                    return read_params(states, part, index)
                return read_opt(states, part, index, on_device)[: len(part)]

            leaves = dict(zip(parts.blocks, weights(parts.blocks, layer), strict=True))
            for group in parts.groups:

                def tile(k: jax.Array, group: TileGroup = group) -> list[jax.Array]:
                    return weights(group.leaves, Tile(layer, k, group.num_tiles))

                leaves |= zip(group.leaves, jax.lax.map(tile, order[: group.num_tiles]), strict=True)
            return jax.tree.unflatten(tree, [leaves[i] for i in sorted(leaves)])

        return jax.jit(read, static_argnums=2)
