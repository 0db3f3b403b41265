"""The state that an update on the host works on: which arrays, where they rest, and how kernels
come to their memory.

A program for CPUs hands its callbacks the memory of the state as operands. A program for GPUs
cannot pass host memory to a callback: there the addresses are bound before a step, and compared
after it. The step donates the state and returns it updated in place, so they are the same; were
they not, the kernels would have worked on memory that is no longer the state's.

A delayed update has two sets of arrays for gradients, and for parameters where they rest in host
  memory: the program reads one,
while callbacks and kernels write the other. They exchange their roles after the step
(`HostBinding.exchange`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from host_offload.calls import Calls
from host_offload.device import view
from host_offload.host_update import HostLeaves, OnRecord, QueuedStep, Rest
from zerojax.runtime import AllProcesses
from zerojax.state import (
    FlatState,
    OnDisk,
    Pending,
    RecordSpec,
    StateRecords,
    TrainState,
    allocate_all,
)

Array = jax.Array


class HostState:
    """What the kernels read and write of a state.

    Attributes:
      order: the parameter leaves in the order of their kernels: those of the layers before the
        others.
      stashes: gradients of the layers wait in host memory, or on disk, for their scale.
      on_disk: how those that wait on disk rest, by the leaf's index.
      params_away: parameters rest off the device, where kernels write them.
      needs_weights: float32 weights rest on the device, and are handed over.
      hands_over: callbacks are handed the memory, as operands.
    """

    def __init__(
        self, records: StateRecords, *, stashes: bool, on_disk: Mapping[int, RecordSpec]
    ) -> None:
        self.records, self.layout, self.mesh, self.config = (
            records,
            records.layout,
            records.mesh,
            records.layout.config,
        )
        self.stashes, self.on_disk = stashes, on_disk
        self.order = (*self.layout.blocks, *self.layout.ends)
        self.params_away = self.config.params != "device"
        self.needs_weights = not self.layout.has_master and not self.params_away
        self.hands_over = self.mesh.devices.flat[0].platform == "cpu"

    def arrays(self, states: FlatState, index: int) -> list[Any]:
        """Return the arrays of a leaf that its kernel works on, of those that rest in host memory."""
        return [
            a
            for a in self._select(states.params, states.master, states.opt, index)
            if not isinstance(a, OnDisk)
        ]

    def specs(self, index: int) -> list[RecordSpec]:
        """Return how all of them rest."""
        records = self.records
        return self._select(
            records.params, records.master if self.layout.has_master else None, records.opt, index
        )

    def _select(
        self, params: Sequence[Any], master: Sequence[Any] | None, opt: Sequence[Any], index: int
    ) -> list[Any]:
        """Return of a leaf the weight, unless it is on the device, the states, and the parameter to
        cast to, unless it is.
        """
        weight = (
            master[index : index + 1]
            if master is not None
            else params[index : index + 1]
            if self.params_away
            else []
        )
        cast = params[index : index + 1] if self.layout.has_master and self.params_away else []
        return [*weight, *(opt[j] for j in self.layout.opt_map.states_of((index,))), *cast]

    def operands(
        self, states: FlatState, part: Sequence[int], pending: Pending | None
    ) -> tuple[list[Array], list[PartitionSpec]]:
        """Return the arrays that a callback on some leaves is handed, and their specs; nothing on a
        GPU.
        """
        arrays: list[Array] = []
        specs: list[PartitionSpec] = []
        if not self.hands_over:
            return arrays, specs
        for index in part:
            of_leaf = self.arrays(states, index)
            of_leaf += [pending.grads[self.order.index(index)]] if pending is not None else []
            arrays += of_leaf
            specs += [self._partition(index)] * len(of_leaf)
        return arrays, specs

    def shard_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of one device's part of a leaf, of all layers."""
        return NamedSharding(self.mesh, self._partition(index)).shard_shape(
            self.layout.leaves[index].shape
        )

    def grad_dtype(self, index: int) -> Any:
        """Return the dtype in which a leaf's gradient is handed over."""
        return self.layout.grad_dtype(index)

    def _partition(self, index: int) -> PartitionSpec:
        """Return the spec of a whole leaf, on the shards of the optimizer state."""
        return PartitionSpec(
            *(None,) * self.layout.leaves[index].lead, *self.records.grads[index].spec
        )


class HostBinding:
    """Binds a state's memory to the kernels before a step, and checks the state and the kernels'
    errors after it.

    Attributes:
      queued: the callbacks of a program for GPUs whose kernels run in workers, or None.
    """

    def __init__(self, state: HostState, host: HostLeaves, calls: Calls | None) -> None:
        """Bind memory of `state` to `host`; `calls` are of its program, where no other part of it
        counts them.
        """
        self.state, self.host, self._calls = state, host, calls
        self.queued: QueuedStep | None = None
        # Of a delayed update: arrays for this step's gradients, and for the parameters that it
        # makes in host memory.
        self._spare: list[Any] = []
        self._spare_params: list[Any] = []
        self._together = AllProcesses(
            state.mesh, "the optimizer's update on the host", RuntimeError
        )

    def prepare(self, state: TrainState) -> list[int]:
        """Make room for what a step keeps in host memory, and bind the state's memory where
        callbacks are not handed it.

        Errors of a step that was given up for another reason are forgotten.

        Returns:
          The addresses bound of what kernels write.
        """
        self.host.take_errors()
        if self._calls is not None:
            self._calls.begin()
        mesh = self.state.mesh
        # The number by which a program tells its callbacks on which device they are.
        positions = {device: n for n, device in enumerate(mesh.devices.flat)}
        local = [positions[d] for d in mesh.local_devices]
        # Reserved before the step, since a callback must not raise and so cannot report that memory
        # ran out.
        self._reserve(local)
        if self.queued is not None:
            self.queued.prepare(local)
        return [] if self.state.hands_over else self._bind(state, positions, local)

    def _reserve(self, local: Sequence[int]) -> None:
        layout, delayed = self.state.layout, self.state.config.delayed_update
        stashes_in_memory = self.state.stashes and not self.state.on_disk
        for leaf, index in enumerate(self.state.order):
            shape = self.state.shard_shape(index)
            for device in local:
                if not delayed and stashes_in_memory and index in layout.blocks:
                    self.host.reserve(device, leaf, shape, self.state.grad_dtype(index))
                if delayed and not self.state.params_away:
                    self.host.reserve_new_params(device, leaf, shape, layout.leaves[index].dtype)
        pending = layout.abstract_state.pending
        if pending is None:
            return
        if not self._spare:
            self._spare = allocate_all(pending.grads)
        positions = {device: n for n, device in enumerate(self.state.mesh.devices.flat)}
        for leaf, array in enumerate(self._spare):
            for shard in array.addressable_shards:
                self.host.bind_stash(positions[shard.device], leaf, view(shard.data))
        if not self.state.params_away:
            return
        if not self._spare_params:
            self._spare_params = allocate_all(jax.tree.leaves(layout.abstract_state.params))
        for leaf, index in enumerate(self.state.order):
            for shard in self._spare_params[index].addressable_shards:
                self.host.bind_new_params(positions[shard.device], leaf, view(shard.data))

    def exchange(self, state: TrainState) -> TrainState:
        """Return the state after a step with a delayed update: its gradients are the pending ones,
        and what it made of those before are the parameters, where they rest in host memory. The
        arrays of both take those of the next step.
        """
        if state.pending is None:
            return state
        grads, self._spare = self._spare, state.pending.grads
        state = dataclasses.replace(state, pending=dataclasses.replace(state.pending, grads=grads))
        if not self.state.params_away:
            return state
        old, tree = jax.tree.flatten(state.params)
        made, self._spare_params = self._spare_params, old
        return dataclasses.replace(state, params=jax.tree.unflatten(tree, made))

    def release(self) -> None:
        """Drop the references to memory."""
        self._spare, self._spare_params = [], []
        self.host.release()

    def _bind(
        self, state: TrainState, positions: dict[Any, int], local: Sequence[int]
    ) -> list[int]:
        states, addresses = self.state.records.flat(state), []
        for leaf, index in enumerate(self.state.order):
            arrays = self.state.arrays(states, index) + (
                [state.pending.grads[leaf]] if state.pending is not None else []
            )
            shards = [
                {positions[s.device]: view(s.data) for s in a.addressable_shards} for a in arrays
            ]
            for device in local:
                # In the order that `arrays` and the kernels have: the pending gradient comes last.
                views = [shard[device] for shard in shards]
                if state.pending is not None:  # which kernels only read
                    self.host.bind_pending(device, leaf, views.pop())
                self.host.bind(device, leaf, views)
                if state.pending is not None and self.state.params_away:
                    # The parameters, before or behind the others, are read alone: new ones are made
                    # in other arrays.
                    views = views[:-1] if self.state.layout.has_master else views[1:]
                addresses += [v.ctypes.data for v in views]
        return addresses

    def check(self, before: list[int], state: TrainState) -> None:
        """Raise what went wrong in the callbacks of a step, and make sure that the state is the
        memory they worked on.

        Raises:
          RuntimeError: an update failed, here or in another process, or the step returned other
            memory.
        """

        def check() -> None:
            self.host.check()
            if self._calls is not None:
                self._calls.check()
            # Binding the returned state yields its addresses. If they differ, the kernels updated
            # other memory.
            if self.prepare(state) != before:
                raise RuntimeError(
                    "the step returned the optimizer state in other memory than it was given: the update is lost"
                )

        self._together.do(check)


def rest_of(record: RecordSpec) -> Rest:
    """Return where a leaf of the state rests for the host update: None is host memory."""
    return None if record.disk_records is None else OnRecord(record.disk_records.kind, record.leaf)
