"""The optimizer on the host: its equations taken apart for a kernel, and the callbacks inside the step.

The update of one leaf is traced and divided. What depends on scalars alone (a schedule, bias corrections, the clipping factor)
is computed by the program, on the device; what is left, for each element of gradient, weight and state, becomes a fused loop
over host memory (`host_offload.host_update`). So any elementwise optimizer runs there, with the numbers it has on the device.

    device                                host
    g[l] = reduce_scatter(dp)    --g-->   g, w, s = ...;  w, s = update(g, w, s);  in place
    params[l] = cast(w)          <--p--   cast(w)                       4 bytes a parameter in 16 bits

Where parameters rest in host memory the kernel writes them there, and nothing comes up but what the next step fetches. Of the
nvme tier the host reads a layer's records, updates them in their buffers and writes them (`host_offload.host_update.step`):

    disk:  w[l], s[l]  -->  buffer, in place  -->  disk        while the device computes, and the disk reads ahead, other layers
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import PartitionSpec

from host_offload.device import link_of, view
from host_offload.engine import DiskRecords
from host_offload.host_update import DelayedStep, HostLeaves, HostStep, LeafKernel, OnRecord, build_kernel
from zerojax.optim.by_record import RecordUpdate
from zerojax.optim.host_kernel import HostRule
from zerojax.optim.host_state import rest_of
from zerojax.optim.whole_tree import Update, clip_factor, finish, scale_grads
from zerojax.runtime import AllProcesses
from zerojax.state import FlatState, OnDisk, Pending, RecordSpec, TrainState, is_stored

Array = jax.Array


class HostUpdate:
    """The host's part of a program: kernels, memory, and the operations that call them inside the step."""

    def __init__(self, update: RecordUpdate, *, stashes: bool, summed: int, on_disk: DiskRecords | None = None) -> None:
        """Build the kernels.

        Args:
          update: by records, of the program.
          stashes: gradients of the layers wait in host memory, or on disk, for their scale.
          summed: gradients are handed over as sums of so many microbatches.
          on_disk: the records in which they wait, if on disk: one leaf for each of `Layout.blocks`.
        """
        self.summed, self.on_disk = summed, on_disk
        self.record_update, self.records, self.layout = update, update.records, update.layout
        self.mesh, self.stashes = update.mesh, stashes
        self.config = update.layout.config
        self._together = AllProcesses(self.mesh, "the optimizer's update on the host", RuntimeError)
        self.has_master = update.layout.has_master
        self.params_away = self.config.params != "device"
        self.needs_weights = not self.has_master and not self.params_away  # float32 weights rest on the device
        self.order = (*self.layout.blocks, *self.layout.ends)
        self.rules = [HostRule(update, i, self.grad_dtype(i), self.summed, self.has_master) for i in self.order]
        platform = self.mesh.devices.flat[0].platform
        self.hands_over = platform == "cpu"  # a GPU program cannot pass host memory to a callback
        start, leaves = 0, []
        for rule, index in zip(self.rules, self.order, strict=True):
            scalars = slice(start, start + len(rule.crossing))
            start = scalars.stop
            leaves.append(self._leaf(rule, index, scalars))
        disk = self.layout.disk
        self.host = HostLeaves(leaves, link_of(platform), None if disk is None else disk.swap)
        self._step, self._delayed = HostStep(self.host), DelayedStep(self.host)

    def _leaf(self, rule: HostRule, index: int, scalars: slice) -> LeafKernel:
        weight_on_device, delayed = self.needs_weights, self.config.delayed_update
        states = len(rule.states)
        in_place = self.has_master or not (weight_on_device or delayed)
        aliases = [(1 + k, 2 + k) for k in range(states)] + ([(0, 1)] if in_place else [])
        arrays = [True] * (2 + states) + [False] * len(rule.crossing)
        shelf = self.on_disk if index in self.layout.blocks else None
        return LeafKernel(
            kernel=build_kernel(rule.kernel, aliases, arrays=arrays),
            scalars=scalars,
            arrays=tuple(rest_of(record) for record in self._rests(index)),
            num_states=states,
            stacked=index in self.layout.blocks,
            weight_on_device=weight_on_device,
            casts=self.has_master,
            params_on_device=not self.params_away,
            delayed=delayed,
            grad=None if shelf is None else OnRecord(shelf.kind, self.layout.blocks.index(index)),
        )

    # --- around a step -----------------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState) -> list[int]:
        """Make room for what a step keeps in host memory, and bind the state's memory where callbacks are not handed it.

        Errors of a step that was given up for another reason are forgotten.

        Returns:
          The addresses bound.
        """
        self.host.take_errors()
        positions = {device: n for n, device in enumerate(self.mesh.devices.flat)}
        local = [positions[d] for d in self.mesh.local_devices]
        for leaf, index in enumerate(self.order):
            shape, delayed = self._shard_shape(index), self.config.delayed_update
            for device in local:
                if delayed or (self.stashes and self.on_disk is None and index in self.layout.blocks):
                    self.host.reserve(device, leaf, shape, self.grad_dtype(index))
                if delayed:
                    self.host.reserve_new_params(device, leaf, shape, self.layout.leaves[index].dtype)
        if self.hands_over:
            return []
        states, addresses = self.records.flat(state), []
        for leaf, index in enumerate(self.order):
            arrays = self._held(states, index) + ([state.pending.grads[leaf]] if state.pending is not None else [])
            shards = [{positions[s.device]: view(s.data) for s in a.addressable_shards} for a in arrays]
            for device in local:
                views = [shard[device] for shard in shards]
                addresses += [v.ctypes.data for v in views]
                if state.pending is not None:
                    self.host.bind_pending(device, leaf, views.pop())
                self.host.bind(device, leaf, views)
        return addresses

    def memory(
        self, states: FlatState, part: Sequence[int], pending: Pending | None
    ) -> tuple[list[Array], list[PartitionSpec]]:
        """Return the arrays that a callback on some leaves is handed, and their specs; nothing on a GPU."""
        arrays: list[Array] = []
        specs: list[PartitionSpec] = []
        if not self.hands_over:
            return arrays, specs
        for index in part:
            own = self._held(states, index)
            own += [pending.grads[self.order.index(index)]] if pending is not None else []
            lead = (None,) if index in self.layout.blocks else ()
            arrays += own
            specs += [PartitionSpec(*lead, *self.records.grads[index].spec)] * len(own)
        return arrays, specs

    def _held(self, states: FlatState, index: int) -> list[Any]:
        """Return the arrays of a leaf that its kernel works on, of those that rest in host memory."""
        return [a for a in self._chosen(states.params, states.master, states.opt, index) if not isinstance(a, OnDisk)]

    def _rests(self, index: int) -> list[RecordSpec]:
        """Return how all of them rest."""
        return self._chosen(self.records.params, self.records.master if self.has_master else None, self.records.opt, index)

    def _chosen(self, params: Sequence[Any], master: Sequence[Any] | None, opt: Sequence[Any], index: int) -> list[Any]:
        """Return of a leaf the weight, unless it is on the device, the states, and the parameter to cast to, unless it is."""
        weight = master[index : index + 1] if master is not None else params[index : index + 1] if self.params_away else []
        cast = params[index : index + 1] if self.has_master and self.params_away else []
        return [*weight, *(opt[j] for j in self.layout.opt_map.states_of((index,))), *cast]

    def moves(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the kinds of stacked records that callbacks read and write in a tick of each phase: {phase: (reads, writes)}.

        Parameters that are written are the schedule's own.
        """
        records = [r for i in self.layout.blocks for r in self._rests(i)]
        updated = tuple(
            dict.fromkeys(r.disk_records.kind for r in records if r.disk_records is not None and r.disk_records.in_place)
        )
        writes = tuple(kind for kind in updated if kind != "params")
        if self.config.update == "in_backward":
            return {"backward": (updated, writes)}
        grads = () if self.on_disk is None else (self.on_disk.kind,)
        return {"backward": ((), grads), "update": ((*grads, *updated), writes)}

    def _shard_shape(self, index: int) -> tuple[int, ...]:
        lead = (None,) if index in self.layout.blocks else ()
        sharding = jax.sharding.NamedSharding(self.mesh, PartitionSpec(*lead, *self.records.grads[index].spec))
        return sharding.shard_shape(self.layout.leaves[index].shape)

    def grad_dtype(self, index: int) -> Any:
        return self.layout.leaves[index].dtype if self.config.num_microbatches == 1 else jnp.dtype(jnp.float32)

    def check(self, before: list[int], state: TrainState) -> None:
        """Raise what went wrong in the callbacks of a step, and make sure that the state is the memory they worked on.

        Raises:
          RuntimeError: an update failed, here or in another process, or the step returned other memory.
        """

        def check() -> None:
            self.host.check()
            if self.prepare(state) != before:
                raise RuntimeError(
                    "the step returned the optimizer state in other memory than it was given: the update is lost"
                )

        self._together.do(check)

    # --- inside the step ---------------------------------------------------------------------------------------------------

    def scalars(self, shared: Sequence[Array], loss: Array, factor: Array, scale: Array) -> Array:
        """Return the scalars of every leaf's kernel: f32[n]."""
        values = [v for rule in self.rules for v in rule.scalars([*shared, loss, factor, scale])]
        return jnp.stack(values) if values else jnp.zeros(1, jnp.float32)

    def stash(self, layer: Array, grads: Sequence[Array], token: Array) -> Array:
        """Keep one layer's gradients in host memory; returns a token."""
        records = [self.records.grads[i] for i in self.layout.blocks]
        return self._call(functools.partial(self._step.stash, first=0), (), [layer], None, None, grads, records, token)[1]

    def update_layer(
        self,
        states: FlatState,
        layer: Array,
        grads: Sequence[Array],
        old: Sequence[Array],
        go: Array,
        scalars: Array,
        token: Array,
    ) -> tuple[FlatState, Array]:
        """Update one layer.

        Args:
          states: all leaves.
          layer: i32[].
          grads: sharded, in the dtype in which they were summed; empty where they are stashed.
          old: float32 weights, where they are on the device.
          go: bool[], whether to update.
          scalars: from `scalars`.
          token: orders the callbacks of a device.
        """
        blocks = self.layout.blocks
        new, token = self._update(states, blocks, 0, layer, grads, old, go, scalars, token)
        params = list(states.params)
        for i, value in zip(blocks, new, strict=False):
            before = self.records.params[i].read(params[i], layer)
            params[i] = self.records.params[i].write(params[i], layer, jnp.where(go, value, before))
        return FlatState(params, states.master, states.opt), token

    def start(self, states: FlatState, pending: Pending, token: Array) -> Array:
        """Begin the update that the step before left; returns a token."""
        memory = self.memory(states, self.order, pending)
        scalars = self.scalars(pending.shared, *pending.scalars)
        ready = pending.ready.astype(jnp.int32)
        return self._call(self._delayed.start, (), [ready], memory, scalars, (), (), token, small=True)[1]

    def stash_ends(self, grads: Sequence[Array], token: Array) -> Array:
        """Keep the gradients of the leaves that are no stack of layers in host memory; returns a token."""
        records = [self.records.grads[i] for i in self.layout.ends]
        callback = functools.partial(self._step.stash, first=len(self.layout.blocks))
        return self._call(callback, (), [jnp.int32(0)], None, None, grads, records, token)[1]

    def install(
        self, states: FlatState, part: Sequence[int], layer: Array, pending: Pending, token: Array
    ) -> tuple[FlatState, Array]:
        """Take over the new parameters of one layer, or of the leaves that are no stack of layers."""
        if not part:
            return states, token
        blocks = part == self.layout.blocks
        results = () if self.params_away else tuple(part)
        callback = functools.partial(self._delayed.install, first=0 if blocks else len(self.layout.blocks), count=len(part))
        memory = self.memory(states, part, pending)
        new, token = self._call(callback, results, [layer], memory, None, (), (), token, small=False)
        params = list(states.params)
        for i, value in zip(part, new, strict=False):
            record = self.records.params[i]
            before = record.read(params[i], layer) if blocks else params[i]
            value = jnp.where(pending.ready, value, before)
            params[i] = record.write(params[i], layer, value) if blocks else record.store(value)
        return FlatState(params, states.master, states.opt), token

    def update_ends(
        self, states: FlatState, grads: Sequence[Array], go: Array, scalars: Array, token: Array
    ) -> tuple[FlatState, Array]:
        """Update every leaf that is no stack of layers. The weights on the device, if any, are read from `states`."""
        ends = self.layout.ends
        old = [states.params[i] for i in ends] if self.needs_weights else []
        old = [jax.lax.with_sharding_constraint(v, self.records.grads[i].sharding) for v, i in zip(old, ends, strict=False)]
        new, token = self._update(states, ends, len(self.layout.blocks), jnp.int32(0), grads, old, go, scalars, token)
        params = list(states.params)
        for i, value in zip(ends, new, strict=False):
            params[i] = self.records.params[i].store(jnp.where(go, value, params[i]))
        return FlatState(params, states.master, states.opt), token

    def _update(
        self,
        states: FlatState,
        part: Sequence[int],
        first: int,
        layer: Array,
        grads: Sequence[Array],
        old: Sequence[Array],
        go: Array,
        scalars: Array,
        token: Array,
    ) -> tuple[list[Array], Array]:
        if not part:
            return [], token
        records = [self.records.grads[i] for i in part]
        results = () if self.params_away else tuple(part)
        callback = functools.partial(self._step.update, first=first, count=len(part), stashed=not grads)
        where = [layer, go.astype(jnp.int32)]
        memory, given = self.memory(states, part, None), [*grads, *old]
        return self._call(callback, results, where, memory, scalars, given, records * (bool(grads) + bool(old)), token)

    def _call(
        self,
        callback: Any,
        results: Sequence[int],
        where: Sequence[Array],
        memory: tuple[list[Array], list[PartitionSpec]] | None,
        scalars: Array | None,
        operands: Sequence[Array],
        records: Sequence[RecordSpec],
        token: Array,
        *,
        small: bool | None = None,
    ) -> tuple[list[Array], Array]:
        """Call back on every device, with its own shards.

        Args:
          callback: takes (context, out, where, token, memory if any, scalars if any, *operands).
          results: parameter leaves of which it makes one layer's, or a whole leaf's, shards in the compute dtype.
          where: i32[] each, sent after the device's position in the mesh, and before the token.
          memory: arrays in host memory, and their specs, or None.
          scalars: f32[n], or None.
          operands: sharded as `records` say.
          records: one for each operand.
          token: i32[devices], of the callback before.
          small: whether the callback makes nothing but a token; by default, if it gets no scalars.

        Returns:
          The results, and the next token.
        """
        every = PartitionSpec(self.mesh.axis_names)
        made = [
            jax.ShapeDtypeStruct(self._shard_shape(i)[int(i in self.layout.blocks) :], self.layout.leaves[i].dtype)
            for i in results
        ]
        after = jax.ShapeDtypeStruct((1,), jnp.int32)
        only_token = scalars is None if small is None else small
        arrays, specs = memory or ([], [])

        def local(position: Array, token: Array, where: Array, arrays: Any, scalars: Any, operands: list[Array]) -> Any:
            where = jnp.concatenate([position, where, token])
            out = after if only_token else (made, after)
            extra = ([] if memory is None else [arrays]) + ([] if scalars is None else [scalars])
            got = buffer_callback(callback, out, has_side_effect=True)(where, token, *extra, *operands)
            return ([], got) if only_token else got

        island = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(every, every, PartitionSpec(), specs, PartitionSpec(), [PartitionSpec(*r.spec) for r in records]),
            out_specs=([PartitionSpec(*self.records.grads[i].spec) for i in results], every),
            check_vma=False,
        )
        positions = jnp.arange(self.mesh.size, dtype=jnp.int32)
        return island(positions, token, jnp.stack(list(where)), arrays, scalars, list(operands))

    def first_token(self, state: TrainState) -> Array:
        """Return the token before a step's first callback, i32[devices]: the number of the state that is on disk, or 0."""
        leaves = jax.tree.leaves((state.params, state.master, state.opt_state), is_leaf=is_stored)
        tokens = [leaf.token for leaf in leaves if isinstance(leaf, OnDisk)]
        return tokens[0] if tokens else jnp.zeros(self.mesh.size, jnp.int32)


def update_on_host(host: HostUpdate) -> Update:
    """Return the update of a resident step whose optimizer runs on the host."""

    def update(state: TrainState, value: Array, grads: Any) -> tuple[TrainState, dict[str, Array]]:
        config, records = host.config, host.records
        # The kernels divide by the loss scale and clip.
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        _, norm, ok = scale_grads(config, state, grads)
        factor = clip_factor(norm, config.clip_norm)
        states = records.flat(state)
        scalars = host.scalars(records.shared_of(states), value, factor, scale)
        grads = [g.astype(host.grad_dtype(i)) for i, g in enumerate(jax.tree.leaves(grads))]  # exact: cast up before
        states, _ = host.update_ends(states, grads, ok, scalars, host.first_token(state))
        states = records.with_shared(states, host.record_update.shared(states, value, ok))
        return finish(state, *records.trees(state, states), value, norm, ok, config.loss_scaling)

    return update
