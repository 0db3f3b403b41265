"""Read the records of a state with its pending update applied, one record at a time.

    for each layer (or tile, or unstacked leaf):   g, w, s = load;   yield update(g, w, s)

This is `program.settle` without a second state and without a change of the first: the device holds
one record more. `zerojax.Checkpointer.save` writes the records, so that a checkpoint needs no
gradients, and any program continues from it.

A checkpoint that holds gradients all the same is restored into a program with another `update` in
the same way (`LeafUpdate`): what it reads of a leaf is updated on its way to the new state.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zerojax.optim import RecordUpdate
from zerojax.program.runner import Runner
from zerojax.program.step import Step
from zerojax.state import (
    Index,
    OnDevice,
    OnDisk,
    Pending,
    StateRecords,
    Tile,
    TrainState,
    is_stored,
)


@dataclasses.dataclass(frozen=True)
class UpdatedRecord:
    """One record of a state after its pending update.

    Attributes:
      leaf_ids: indices of the parameter leaves in the record.
      index: index of the record along the leaves' leading dims: (), (layer,) or (layer, tile).
      weights: float32 weights of the leaves, on the device, with leading dims of 1.
      opt: optimizer state of the leaves, in the order of `OptStateMap.list_state_leaves`, on the
        device, with leading dims of 1.
    """

    leaf_ids: tuple[int, ...]
    index: tuple[int, ...]
    weights: list[jax.Array]
    opt: list[jax.Array]


class LeafUpdate:
    """Applies a pending update to arrays of a checkpoint, on one device of this process.

    No collective is needed, so each process may update other parts at another time.

    Attributes:
      is_elementwise: whether any part of a leaf can be updated by itself; otherwise all of a
        record's leaf is needed.
    """

    def __init__(self, update: RecordUpdate, pending: Pending) -> None:
        """Apply `pending`, whose gradients are passed to each call, with the rule of `update`."""
        self.is_elementwise = update.is_elementwise
        self._update = update
        self._pending = pending
        self._device = update.mesh.local_devices[0]

    def __call__(
        self, index: int, grad: np.ndarray, weight: np.ndarray, opt: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return a record's weight of one leaf after the update, and the leaf's optimizer state.

        Args:
          index: index of the parameter leaf.
          grad: the saved gradient, without leading dims.
          weight: float32 weight.
          opt: optimizer state of the leaf, in the order of the state.
        """
        with jax.set_mesh(Mesh(np.array([self._device]), ("alone",))):
            args = jax.device_put((self._pending, grad, weight, list(opt)), self._device)
            return [np.asarray(value) for value in self._apply(index, *args)]

    @cached_property
    def _apply(self) -> Any:
        def apply(
            index: int, pending: Pending, grad: jax.Array, weight: jax.Array, opt: list[jax.Array]
        ) -> list[jax.Array]:
            def update(values: list[jax.Array]) -> list[jax.Array]:
                mean, weight, *opt = values
                scalars = (pending.shared, pending.scalars[0])
                weight, opt = self._update.update_alone(index, mean, weight, opt, *scalars)
                return [weight, *opt]

            # In a branch, as in a step, so that XLA rounds the same sums.
            values = [pending.mean_grad(grad), weight, *opt]
            return jax.lax.cond(pending.ready, update, lambda values: values[1:], values)

        return jax.jit(apply, static_argnums=0)


class RecordSettler:
    """Applies the pending update of a state to its records, one at a time."""

    def __init__(self, records: StateRecords, runner: Runner, step: Step) -> None:
        """Prepare to read states of a program.

        Args:
          records: how its states are stored.
          runner: runner of the program.
          step: step of the program, which knows the update that a state leaves pending.
        """
        self.layout = records.layout
        self._records = records
        self._runner = runner
        self._step = step

    @cached_property
    def is_exact(self) -> bool:
        """Whether the records equal the next step's, bit for bit.

        A whole-leaf optimizer has sums and products, which XLA may compute in another order in
        another program. An update on the host has kernels of its own.
        """
        config = self.layout.config
        update = self._step.update
        if config.update != "in_forward" or config.update_on != "device" or update is None:
            return False
        return update.is_elementwise

    def settles(self, state: TrainState) -> bool:
        """Return whether to read a state by its updated records.

        They are exact, and nothing that they replace is on disk: records on disk need no copy as
        they are.
        """
        changed = (state.params, state.master, state.opt_state, state.pending)
        stored = jax.tree.leaves(changed, is_leaf=is_stored)
        return self.is_exact and not any(isinstance(leaf, OnDisk) for leaf in stored)

    def has_update(self, state: TrainState) -> bool:
        """Return whether a state holds an update to apply.

        It holds none before the first step, after `program.settle`, and after gradients that are
        not finite.
        """
        return state.pending is not None and bool(state.pending.ready)

    def leaf_update(self, pending: Pending) -> LeafUpdate:
        """Return how to apply a pending update of another program, which a checkpoint holds.

        Raises:
          ValueError: the optimizer of this program cannot update single leaves.
        """
        update = self._step.update
        if update is None:
            update = RecordUpdate(self.layout.tx, self._records)
        return LeafUpdate(update, pending)

    def __call__(self, state: TrainState) -> Iterator[UpdatedRecord]:
        """Yield the updated records of a state, which is only read.

        Args:
          state: a state with a pending update, for which `settles` is true.
        """
        layout = self.layout
        for i in layout.unstacked:
            yield self._updated(state, (i,), ())
        for stack in layout.stacks:
            for layer in range(stack.num_layers):
                is_on_device = layer < stack.device_layers
                if stack.blocks:
                    yield self._updated(state, stack.blocks, (layer,), is_on_device)
                for group in stack.groups:
                    for tile in range(group.num_tiles if group.leaves else 0):
                        index = (layer, tile)
                        yield self._updated(state, group.leaves, index, num_tiles=group.num_tiles)

    def _updated(
        self,
        state: TrainState,
        leaf_ids: Sequence[int],
        index: tuple[int, ...],
        is_on_device: bool = False,
        num_tiles: int = 0,
    ) -> UpdatedRecord:
        leaf_ids = tuple(leaf_ids)
        numbers = [jnp.int32(number) for number in index]
        args = (state, numbers, leaf_ids, is_on_device, num_tiles)
        weights, opt = self._runner.run("save", self._update, *args, reads=state)
        return UpdatedRecord(leaf_ids, index, weights, opt)

    @cached_property
    def _update(self) -> Any:
        """Function `update(state, numbers, leaf_ids, is_on_device, num_tiles)`.

        It is compiled once for the layers of a stack, and once for each unstacked leaf.
        """

        def update(
            state: TrainState,
            numbers: list[jax.Array],
            leaf_ids: tuple[int, ...],
            is_on_device: bool,
            num_tiles: int,
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            index: Index = jnp.int32(0)
            if len(numbers) == 2:
                layer, tile = numbers
                index = Tile(layer, tile, num_tiles)
            elif numbers:
                index = OnDevice(numbers[0]) if is_on_device else numbers[0]
            weights, opt = self._step.updated_record(state, leaf_ids, index)
            lead = len(numbers)

            def with_lead(value: jax.Array) -> jax.Array:
                return value.reshape((1,) * lead + value.shape)

            return [with_lead(w) for w in weights], [with_lead(s) for s in opt]

        return jax.jit(update, static_argnums=(2, 3, 4))
