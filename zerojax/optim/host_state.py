"""The state that an update on the host works on, and how kernels reach its memory.

A program for CPUs passes the state's memory to its callbacks as operands. A program for GPUs cannot
pass host memory to a callback, so the addresses are bound before a step and compared after it. The
step donates the state and returns it updated in place, so the addresses are equal. If they
differed, the kernels would have worked on memory that no longer belongs to the state.

A delayed update has two sets of arrays for gradients, and two for parameters stored in host memory:
the program reads one set while callbacks and kernels write the other. The sets swap roles after the
step (`HostBinding.exchange`). An update in forward needs one set: its kernels have ended before
backward reads parameters and stores gradients.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
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
    """The arrays of a state that the kernels read and write.

    Attributes:
      order: indices of the parameter leaves in the order of their kernels, stacked leaves first.
      stashes: whether the layers' gradients wait in host memory, or on disk, for their scale.
      on_disk: where gradients that wait on disk are stored, by leaf index.
      params_away: whether parameters are stored off the device, where kernels write them.
      needs_weights: whether float32 weights are stored on the device and passed to the kernels.
      hands_over: whether callbacks receive the memory as operands.
    """

    def __init__(
        self, records: StateRecords, *, stashes: bool, on_disk: Mapping[int, RecordSpec]
    ) -> None:
        """Find the arrays of the state that `records` describes; see the class for arguments."""
        self.records = records
        self.layout = records.layout
        self.mesh = records.mesh
        self.config = records.layout.config
        self.stashes = stashes
        self.on_disk = on_disk
        self.order = (*self.layout.blocks, *self.layout.unstacked)
        self.params_away = self.config.params != "device"
        self.needs_weights = not self.layout.has_master and not self.params_away
        self.hands_over = self.mesh.devices.flat[0].platform == "cpu"

    def arrays(self, states: FlatState, index: int) -> list[Any]:
        """Return the arrays in host memory that a leaf's kernel works on."""
        leaves = self._select(states.params, states.master, states.opt, index)
        return [leaf for leaf in leaves if not isinstance(leaf, OnDisk)]

    def specs(self, index: int) -> list[RecordSpec]:
        """Return the specs of all arrays that a leaf's kernel works on, in memory or on disk."""
        master = self.records.master if self.layout.has_master else None
        return self._select(self.records.params, master, self.records.opt, index)

    def _select(
        self, params: Sequence[Any], master: Sequence[Any] | None, opt: Sequence[Any], index: int
    ) -> list[Any]:
        """Return a leaf's weight, optimizer state, and the parameter that holds the cast weight.

        The weight and the parameter are left out if they are stored on the device.
        """
        selected = []
        if master is not None:
            selected.append(master[index])
        elif self.params_away:
            selected.append(params[index])
        selected += [opt[j] for j in self.layout.opt_map.list_state_leaves((index,))]
        if self.layout.has_master and self.params_away:
            selected.append(params[index])
        return selected

    def operands(
        self, states: FlatState, leaf_ids: Sequence[int], pending: Pending | None
    ) -> tuple[list[Array], list[PartitionSpec]]:
        """Return the arrays that a callback on some leaves receives, and their specs.

        Args:
          states: all leaves of the state.
          leaf_ids: indices of the leaves that the callback works on.
          pending: the gradients that the previous step left, or None.

        Returns:
          Arrays and their partition specs; both lists are empty on a GPU.
        """
        arrays: list[Array] = []
        specs: list[PartitionSpec] = []
        if not self.hands_over:
            return arrays, specs
        for index in leaf_ids:
            leaf_arrays = self.arrays(states, index)
            if pending is not None:
                leaf_arrays.append(pending.grads[self.order.index(index)])
            arrays += leaf_arrays
            specs += [self._partition(index)] * len(leaf_arrays)
        return arrays, specs

    def shard_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a leaf's shard on one device, including all layers."""
        sharding = NamedSharding(self.mesh, self._partition(index))
        return sharding.shard_shape(self.layout.leaves[index].shape)

    def grad_dtype(self, index: int) -> Any:
        """Return the dtype in which a leaf's gradient is passed to the kernels."""
        return self.layout.grad_dtype(index)

    def _partition(self, index: int) -> PartitionSpec:
        """Return the partition spec of a full leaf, sharded like the optimizer state."""
        lead = self.layout.leaves[index].lead
        return PartitionSpec(*(None,) * lead, *self.records.grads[index].spec)


class HostBinding:
    """Binds a state's memory to the kernels before a step, and checks for errors after it.

    Attributes:
      queued: the callbacks of a GPU program whose kernels run in workers, or None.
    """

    def __init__(self, state: HostState, host: HostLeaves, calls: Calls | None) -> None:
        """Bind the memory of `state` to `host`.

        Args:
          state: the arrays that the kernels read and write.
          host: the kernels.
          calls: counter of the program's callbacks; None if another part of the program counts
            them.
        """
        self.state = state
        self.host = host
        self._calls = calls
        self.queued: QueuedStep | None = None
        # For a delayed update: arrays for this step's gradients, and for the parameters that it
        # writes in host memory.
        self._spare: list[Any] = []
        self._spare_params: list[Any] = []
        self._together = AllProcesses(
            state.mesh, "the optimizer's update on the host", RuntimeError
        )

    def prepare(self, state: TrainState) -> list[int]:
        """Make room for what a step keeps in host memory, and bind the state's memory if necessary.

        The memory is bound if callbacks do not receive it as operands. Errors of a step that was
        abandoned for another reason are discarded.

        Returns:
          The bound addresses of the arrays that kernels write.
        """
        self.host.take_errors()
        if self._calls is not None:
            self._calls.begin()
        mesh = self.state.mesh
        # The number by which a program's callbacks identify their device.
        positions = {device: n for n, device in enumerate(mesh.devices.flat)}
        local = [positions[d] for d in mesh.local_devices]
        # Reserved before the step: a callback must not raise, so it could not report that memory
        # ran out.
        self._reserve(local)
        if self.queued is not None:
            self.queued.prepare(local)
        return [] if self.state.hands_over else self._bind(state, positions, local)

    def _reserve(self, local: Sequence[int]) -> None:
        """Reserve memory for gradients and new parameters; `local` are this process's devices."""
        layout = self.state.layout
        pending = layout.abstract_state.pending
        stashes_in_memory = self.state.stashes and not self.state.on_disk
        for kernel, index in enumerate(self.state.order):
            shape = self.state.shard_shape(index)
            for device in local:
                if pending is None and stashes_in_memory and index in layout.blocks:
                    self.host.reserve(device, kernel, shape, self.state.grad_dtype(index))
                if pending is not None and not self.state.params_away:
                    self.host.reserve_new_params(device, kernel, shape, layout.leaves[index].dtype)

        if pending is None or self.host.in_place:
            return
        if not self._spare:
            self._spare = allocate_all(pending.grads)
        positions = {device: n for n, device in enumerate(self.state.mesh.devices.flat)}
        for kernel, array in enumerate(self._spare):
            for shard in array.addressable_shards:
                self.host.bind_stash(positions[shard.device], kernel, view(shard.data))
        if not self.state.params_away:
            return
        if not self._spare_params:
            self._spare_params = allocate_all(jax.tree.leaves(layout.abstract_state.params))
        for kernel, index in enumerate(self.state.order):
            for shard in self._spare_params[index].addressable_shards:
                self.host.bind_new_params(positions[shard.device], kernel, view(shard.data))

    def exchange(self, state: TrainState) -> TrainState:
        """Swap the two sets of arrays of a delayed update after a step, and return the new state.

        The step's gradients become the pending gradients. If parameters are stored in host memory,
        those made from the previous pending gradients become the parameters. The old arrays are
        kept for the next step.
        """
        if state.pending is None or self.host.in_place:
            return state
        grads = self._spare
        self._spare = state.pending.grads
        state = dataclasses.replace(state, pending=dataclasses.replace(state.pending, grads=grads))
        if not self.state.params_away:
            return state
        old_params, tree = jax.tree.flatten(state.params)
        new_params = self._spare_params
        self._spare_params = old_params
        return dataclasses.replace(state, params=jax.tree.unflatten(tree, new_params))

    def release(self) -> None:
        """Drop the references to the state's memory."""
        self._spare = []
        self._spare_params = []
        self.host.release()

    def _bind(
        self, state: TrainState, positions: dict[Any, int], local: Sequence[int]
    ) -> list[int]:
        """Bind the state's memory, and return the addresses of the arrays that kernels write."""
        states = self.state.records.flat(state)
        addresses = []
        for kernel, index in enumerate(self.state.order):
            arrays = self.state.arrays(states, index)
            if state.pending is not None:
                arrays.append(state.pending.grads[kernel])
            views_by_array: list[dict[int, np.ndarray]] = []
            for array in arrays:
                shards = array.addressable_shards
                views_by_array.append({positions[s.device]: view(s.data) for s in shards})
            for device in local:
                # In the order that `arrays` and the kernels use: the pending gradient comes last.
                views = [by_device[device] for by_device in views_by_array]
                if state.pending is not None:
                    self.host.bind_pending(device, kernel, views[-1])
                    # A delayed update only reads it.
                    if self.host.in_place:
                        addresses.append(views[-1].ctypes.data)
                    views.pop()
                self.host.bind(device, kernel, views)
                if self.state.config.delayed_update and self.state.params_away:
                    # The parameters, first or last in the list, are only read: new ones are made in
                    # other arrays.
                    views = views[:-1] if self.state.layout.has_master else views[1:]
                addresses += [v.ctypes.data for v in views]
        return addresses

    def check(self, before: list[int], state: TrainState) -> None:
        """Raise a step's callback errors, and check that the step returned the same memory.

        Raises:
          RuntimeError: an update failed, in this or another process, or the step returned other
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
                    "the step returned the optimizer state in other memory than it was given, so "
                    "the update is lost"
                )

        self._together.do(check)


def find_disk_record(record: RecordSpec) -> Rest:
    """Return where a leaf of the state is stored for the host update; None means host memory."""
    return None if record.disk_records is None else OnRecord(record.disk_records.kind, record.leaf)
