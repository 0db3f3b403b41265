"""The optimizer on the host: its equations become kernels, and the step calls them.

The update of one leaf is traced and split (`zerojax.optim.host_kernel`). The program computes on
the device what depends only on scalars: a schedule, bias corrections, the clipping factor. The
remaining work, on each element of gradient, weight and state, becomes a fused loop over host memory
(`host_offload.host_update`). So any elementwise optimizer runs on the host, with the same numbers
as on the device.

    device                                host
    g[l] = reduce_scatter(dp)    --g-->   g, w, s = ...;  w, s = update(g, w, s);  in place
    params[l] = cast(w)          <--p--   cast(w)           4 bytes per parameter in 16-bit dtypes

If parameters are stored in host memory, the kernel writes them there, and nothing is loaded to the
device until the next step fetches them. If the state is on disk, the host reads a layer's records,
updates them in their buffers and writes them back (`host_offload.host_update.step`). Meanwhile the
device computes other layers, and the disk reads ahead:

    disk:  w[l], s[l]  -->  buffer, in place  -->  disk
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import PartitionSpec

from host_offload.calls import CallbackSite, Calls
from host_offload.device import driver, find_link
from host_offload.host_update import (
    HOST_LAG,
    DelayedStep,
    HostLeaves,
    HostStep,
    LeafGroup,
    LeafKernel,
    QueuedStep,
    build_kernel,
)
from zerojax.optim.by_record import RecordUpdate
from zerojax.optim.host_kernel import HostRule
from zerojax.optim.host_state import HostBinding, HostState, find_disk_record
from zerojax.optim.whole_tree import Update, clip_factor, finish, measure_grads
from zerojax.state import FlatState, OnDisk, Pending, RecordSpec, TrainState, is_stored
from zerojax.trees import Grads

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What a callback receives, in addition to the device's position and the token.

    Attributes:
      numbers: i32[] each, such as the layer and whether to update it.
      memory: arrays in host memory and their specs, or None.
      scalars: f32[n], the scalars of the kernels, or None.
      arrays: gradients and float32 weights, sharded as `records` specify.
      records: one spec for each of `arrays`.
    """

    numbers: Sequence[Array] = ()
    memory: tuple[list[Array], list[PartitionSpec]] | None = None
    scalars: Array | None = None
    arrays: Sequence[Array] = ()
    records: Sequence[RecordSpec] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlightLayers:
    """Layers whose gradients were sent and whose parameters were not fetched yet, oldest first.

    Attributes:
      layers: i32[lag], numbers of the layers in their stack.
      goes: bool[lag], whether each layer is updated; False if an entry holds no layer.
    """

    layers: Array
    goes: Array

    def then(self, layer: Array, go: Array) -> "InFlightLayers":
        """Return a copy without the oldest layer and with one more layer.

        Args:
          layer: i32[], number of the layer.
          go: bool[], whether the layer is updated.
        """
        layers = jnp.concatenate([self.layers[1:], layer[None].astype(jnp.int32)])
        return InFlightLayers(layers, jnp.concatenate([self.goes[1:], go[None]]))


class HostUpdate:
    """The update on the host, as operations inside the step that call its kernels.

    Attributes:
      state: the memory that the kernels work on.
      binding: operations on that memory before and after a step.
      host: the kernels, with the arrays that they keep in host memory.
      stashes: whether the layers' gradients wait in host memory, or on disk, for their scale.
      on_disk: where gradients that wait on disk are stored, by leaf index.
      leaves_pending: whether a step leaves its gradients to the next one, which updates with them.
      in_forward: whether the next step's forward takes over what they make.
      params_away: whether parameters are stored off the device.
      needs_weights: whether float32 weights are stored on the device and passed to the kernels.
      lag: number of calls between sending a layer's gradients and fetching its parameters; 0 means
        that one call does both.
    """

    def __init__(
        self,
        update: RecordUpdate,
        *,
        stashes: bool,
        summed: int,
        on_disk: Mapping[int, RecordSpec] = MappingProxyType({}),
    ) -> None:
        """Build the kernels.

        Args:
          update: the update of the program's state by records.
          stashes: whether the layers' gradients wait in host memory, or on disk, for their scale.
          summed: number of microbatches over which the gradients are summed.
          on_disk: where gradients that wait on disk are stored, by leaf index.
        """
        self.record_update = update
        self.records = update.records
        self.layout = update.layout
        self.mesh = update.mesh
        self.config = update.layout.config
        self.stashes = stashes
        self.on_disk = on_disk
        self.state = HostState(self.records, stashes=stashes, on_disk=on_disk)
        self.in_forward = self.config.update == "in_forward"
        self.leaves_pending = self.in_forward or self.config.delayed_update
        self.params_away = self.state.params_away
        self.needs_weights = self.state.needs_weights
        has_master = self.layout.has_master
        order = self.state.order
        self.rules = [
            HostRule(update, i, self.state.grad_dtype(i), summed, has_master) for i in order
        ]
        # One vector holds the scalars of all kernels: each reads its own slice.
        start = 0
        kernels = []
        for rule, index in zip(self.rules, order, strict=True):
            scalars = slice(start, start + len(rule.sent))
            start = scalars.stop
            kernels.append(self._build_kernel(rule, index, scalars))
        disk = self.layout.disk
        self.host = HostLeaves(
            kernels,
            find_link(self.mesh.devices.flat[0].platform),
            None if disk is None else disk.swap,
            in_place=self.in_forward,
        )
        self.calls = Calls(list(self.mesh.devices.flat)) if disk is None else disk.swap.calls
        self.binding = HostBinding(self.state, self.host, self.calls if disk is None else None)
        self._step = HostStep(self.host)
        self._delayed = DelayedStep(self.host, self._ranges())
        # On a CPU, callbacks receive all arrays in host memory and update them immediately.
        self.lag = 0 if self.state.hands_over or self.leaves_pending else HOST_LAG
        if not self.state.hands_over:
            self.binding.queued = QueuedStep(
                self.host, self.leaf_groups(), list(self.mesh.devices.flat), driver
            )

    def _build_kernel(self, rule: HostRule, index: int, scalars: slice) -> LeafKernel:
        """Return the kernel of a leaf; `scalars` is its slice of the vector of all scalars."""
        num_states = len(rule.states)
        # The inputs are gradient, weight, states, then scalars; the outputs are weight, states,
        # then the cast weight. An aliased result is written over its operand.
        aliases = [(1 + k, 2 + k) for k in range(num_states)]
        # A weight has its own result if it is stored on the device, or if the device still reads it
        # while a delayed update runs.
        if self.layout.has_master or not (self.needs_weights or self.config.delayed_update):
            aliases.append((0, 1))
        is_array = [True] * (2 + num_states) + [False] * len(rule.sent)
        stash = self.on_disk.get(index)
        return LeafKernel(
            kernel=build_kernel(rule.kernel, aliases, arrays=is_array),
            scalars=scalars,
            arrays=tuple(find_disk_record(record) for record in self.state.specs(index)),
            num_states=num_states,
            stacked=index in self.layout.blocks,
            weight_on_device=self.needs_weights,
            casts=self.layout.has_master,
            params_on_device=not self.params_away,
            pending=self.leaves_pending,
            grad=None if stash is None else find_disk_record(stash),
        )

    def leaf_groups(self) -> list[LeafGroup]:
        """Return the groups of leaves transferred together on a GPU; empty on a mesh of CPUs."""
        if self.state.hands_over:
            return []
        num_scalars = max(1, sum(len(rule.sent) for rule in self.rules))
        groups: list[LeafGroup] = []
        if self.leaves_pending:
            groups.append(LeafGroup(range(0), (), (), (), num_scalars, stacked=False))
        for leaf_ids in self._kernel_leaves():
            stacked = leaf_ids[0] in self.layout.blocks
            grads: list[tuple[tuple[int, ...], np.dtype]] = []
            weights: list[tuple[tuple[int, ...], np.dtype]] = []
            params: list[tuple[tuple[int, ...], np.dtype]] = []
            for i in leaf_ids:
                shape = self.state.shard_shape(i)[int(stacked) :]
                grads.append((shape, np.dtype(self.state.grad_dtype(i))))
                weights.append((shape, np.dtype(jnp.float32)))
                params.append((shape, np.dtype(self.layout.leaves[i].dtype)))
            first = self._first(leaf_ids)
            stashes = self.leaves_pending or (stacked and self.stashes)
            group = LeafGroup(
                leaves=range(first, first + len(leaf_ids)),
                grads=() if stashes else tuple(grads),
                weights=tuple(weights) if self.needs_weights else (),
                params=tuple(params) if self.in_forward or not self.params_away else (),
                num_scalars=num_scalars,
                stacked=stacked,
            )
            if not self.leaves_pending:
                groups.append(group)
            if stashes:
                stash = dataclasses.replace(
                    group,
                    grads=tuple(grads),
                    weights=(),
                    params=group.params if self.leaves_pending and stacked else (),
                    num_scalars=0,
                    stashes=True,
                )
                groups.append(stash)
        return groups

    def _kernel_leaves(self) -> list[tuple[int, ...]]:
        """Return the leaves whose kernels are consecutive: of each stack, then unstacked leaves."""
        leaf_ids = [*(stack.blocks for stack in self.layout.stacks), self.layout.unstacked]
        return [indices for indices in leaf_ids if indices]

    def _ranges(self) -> list[range]:
        """Return the numbers of the kernels of each stack, then of the unstacked leaves."""
        ranges = []
        for leaf_ids in self._kernel_leaves():
            first = self._first(leaf_ids)
            ranges.append(range(first, first + len(leaf_ids)))
        return ranges

    def close(self) -> None:
        """Stop the workers, and drop all references to memory.

        A later step rebuilds what it needs.
        """
        if self.binding.queued is not None:
            self.binding.queued.close()
        self.binding.release()

    def none_in_flight(self) -> dict[int, InFlightLayers]:
        """Return the initial loop carry for delayed results: {first leaf of a stack: no layers}.

        The mapping is empty if results are not delayed.
        """
        if not self.lag:
            return {}
        none = InFlightLayers(jnp.zeros(self.lag, jnp.int32), jnp.zeros(self.lag, bool))
        return {stack.blocks[0]: none for stack in self.layout.stacks if stack.blocks}

    def scalars(
        self, shared: Sequence[Array], loss: Array, factor: Array, scale: Array, *count: Array
    ) -> Array:
        """Return the scalars of all leaves' kernels: f32[n].

        Args:
          shared: the scalars of the optimizer state before the step.
          loss: f32[], the loss of the step.
          factor: f32[], the clipping factor.
          scale: f32[], the loss scale.
          *count: f32[], the number of microbatches, with an update in forward.
        """
        values: list[Array] = []
        for rule in self.rules:
            values += rule.scalars([*shared, loss, factor, scale, *count])
        return jnp.stack(values) if values else jnp.zeros(1, jnp.float32)

    def stash(
        self, leaf_ids: Sequence[int], layer: Array, grads: Sequence[Array], token: Array
    ) -> Array:
        """Keep the gradients of some leaves in host memory or on disk, until they can be scaled.

        Args:
          leaf_ids: indices of the leaves.
          layer: i32[], the layer, if the leaves are stacked.
          grads: gradients of the leaves, or of one layer of them.
          token: i32[devices], from the previous callback.

        Returns:
          The next token.
        """
        records = [self.records.grads[i] for i in leaf_ids]
        if self.binding.queued is not None:
            site = CallbackSite(self.calls, "stash")
            callback = functools.partial(
                self.binding.queued.stash, first=self._first(leaf_ids), site=site
            )
        else:
            callback = functools.partial(self._step.stash, first=self._first(leaf_ids))
        inputs = _Inputs(numbers=[layer], arrays=grads, records=records)
        return self._call(callback, (), inputs, token)[1]

    def _first(self, leaf_ids: Sequence[int]) -> int:
        """Return the number of the first kernel of some leaves; their kernels are consecutive."""
        return self.state.order.index(leaf_ids[0]) if leaf_ids else 0

    def update_layer(
        self,
        states: FlatState,
        leaf_ids: Sequence[int],
        layer: Array,
        grads: Sequence[Array],
        old: Sequence[Array],
        go: Array,
        scalars: Array,
        token: Array,
        in_flight: Mapping[int, InFlightLayers],
    ) -> tuple[FlatState, Array, dict[int, InFlightLayers]]:
        """Update one layer.

        If `lag` is not 0, the layer's parameters on the device are written `lag` layers later, or
        by `update_unstacked`.

        Args:
          states: all leaves of the state.
          leaf_ids: indices of the leaves of the layer's stack.
          layer: i32[], number of the layer.
          grads: gradients, sharded, in the dtype in which they were summed; empty if they are
            stashed.
          old: float32 weights, if they are on the device.
          go: bool[], whether to update.
          scalars: vector returned by `scalars`.
          token: i32[devices], orders the callbacks of a device.
          in_flight: layers in flight, from `none_in_flight` or from the previous call.

        Returns:
          The states, the next token, and the layers in flight.
        """
        in_flight = dict(in_flight)
        if not leaf_ids:
            return states, token, in_flight
        new, token = self._update(states, leaf_ids, layer, grads, old, go, scalars, token)
        if self.lag:
            before = in_flight[leaf_ids[0]]
            in_flight[leaf_ids[0]] = before.then(layer, go)
            layer = before.layers[0]
            go = before.goes[0]
        return self._write_layer(states, leaf_ids, layer, new, go), token, in_flight

    def _write_layer(
        self,
        states: FlatState,
        leaf_ids: Sequence[int],
        layer: Array,
        new: Sequence[Array],
        go: Array,
    ) -> FlatState:
        """Write the parameters of one layer that callbacks made, if any."""
        params = list(states.params)
        for i, value in zip(leaf_ids, new, strict=False):
            record = self.records.params[i]
            before = record.read(params[i], layer)
            # Without an update, the callback has not written to its result.
            params[i] = record.write(params[i], layer, jnp.where(go, value, before))
        return FlatState(params, states.master, states.opt)

    def start(self, states: FlatState, pending: Pending, token: Array) -> Array:
        """Start the update that the previous step left pending.

        Args:
          states: all leaves of the state.
          pending: gradients and scalars of the previous step.
          token: i32[devices], from the previous callback.

        Returns:
          The next token.
        """
        scalars = self.scalars(pending.shared, *pending.scalars)
        ready = pending.ready.astype(jnp.int32)
        if self.binding.queued is not None:
            callback = self.binding.queued.start
            inputs = _Inputs(numbers=[ready, jnp.int32(0)], scalars=scalars)
        else:
            callback = self._delayed.start
            memory = self.state.operands(states, self.state.order, pending)
            inputs = _Inputs(numbers=[ready], memory=memory, scalars=scalars)
        return self._call(callback, (), inputs, token)[1]

    def stash_unstacked(self, grads: Sequence[Array], token: Array) -> Array:
        """Keep the gradients of the unstacked leaves in host memory, and return the next token.

        Args:
          grads: gradients of the unstacked leaves.
          token: i32[devices], from the previous callback.
        """
        return self.stash(self.layout.unstacked, jnp.int32(0), grads, token)

    def install(
        self,
        params: Mapping[int, Array],
        leaf_ids: Sequence[int],
        layer: Array,
        pending: Pending,
        token: Array,
    ) -> tuple[dict[int, Array], Array]:
        """Take over the new parameters of one layer, or of the unstacked leaves, on the device.

        Args:
          params: parameters by leaf index, including all of `leaf_ids`.
          leaf_ids: indices of the leaves of one stack, or of all unstacked leaves.
          layer: i32[], number of the layer.
          pending: gradients and scalars of the previous step.
          token: i32[devices], orders the callbacks of a device.

        Returns:
          The parameters, and the next token.
        """
        params = dict(params)
        if not leaf_ids:
            return params, token
        stacked = self.layout.leaves[leaf_ids[0]].is_stacked
        new, token = self.receive(leaf_ids, layer, token)
        for i, value in zip(leaf_ids, new, strict=True):
            record = self.records.params[i]
            before = record.read(params[i], layer) if stacked else params[i]
            # Nothing is pending before the first step, or after a skipped step.
            value = jnp.where(pending.ready, value, before)
            params[i] = record.write(params[i], layer, value) if stacked else record.store(value)
        return params, token

    def receive(
        self, leaf_ids: Sequence[int], layer: Array, token: Array
    ) -> tuple[list[Array], Array]:
        """Wait for the update of one layer, or of the unstacked leaves; return new parameters.

        Args:
          leaf_ids: indices of the leaves of one stack, or of all unstacked leaves.
          layer: i32[], number of the layer.
          token: i32[devices], orders the callbacks of a device.

        Returns:
          The parameters, sharded like the optimizer state, and the next token. Parameters that are
          stored on the device are undefined if there is nothing to update.
        """
        if not leaf_ids:
            return [], token
        kernels = {"first": self._first(leaf_ids), "count": len(leaf_ids)}
        if self.binding.queued is not None:
            site = CallbackSite(self.calls, "install")
            callback = functools.partial(self.binding.queued.install, **kernels, site=site)
        else:
            callback = functools.partial(self._delayed.install, **kernels)
        inputs = _Inputs(numbers=[layer])
        return self._call(callback, leaf_ids, inputs, token, returns_params=True)

    def finish(self, states: FlatState, pending: Pending, token: Array) -> Array:
        """Wait for the update that `start` began, and return the next token.

        Args:
          states: all leaves of the state.
          pending: gradients and scalars of the previous step.
          token: i32[devices], from the previous callback.
        """
        if self.binding.queued is not None:
            return self._call(self.binding.queued.finish, (), _Inputs(), token)[1]
        memory = self.state.operands(states, self.state.order, pending)
        return self._call(self._delayed.finish, (), _Inputs(memory=memory), token)[1]

    def update_unstacked(
        self,
        states: FlatState,
        grads: Sequence[Array],
        go: Array,
        scalars: Array,
        token: Array,
        in_flight: Mapping[int, InFlightLayers],
    ) -> tuple[FlatState, Array]:
        """Update every unstacked leaf, and fetch the parameters of all layers still in flight.

        Weights on the device, if any, are read from `states`.

        Args:
          states: all leaves of the state.
          grads: gradients of the unstacked leaves; empty if they are stashed.
          go: bool[], whether to update.
          scalars: vector returned by `scalars`.
          token: i32[devices], orders the callbacks of a device.
          in_flight: layers in flight, from the last `update_layer`.

        Returns:
          The states, and the next token.
        """
        unstacked = self.layout.unstacked
        old = []
        if self.needs_weights:
            # Each device passes on the shard that it updates: below stage 3 it has the unsharded
            # weight.
            for i in unstacked:
                sharding = self.records.grads[i].sharding
                old.append(jax.lax.with_sharding_constraint(states.params[i], sharding))
        new, token = self._update(states, unstacked, jnp.int32(0), grads, old, go, scalars, token)
        for stack in self.layout.stacks:
            blocks = stack.blocks
            if not (in_flight and blocks):
                continue
            last = in_flight[blocks[0]]
            for n in range(self.lag):
                layer_params, token = self._take(blocks, token)
                states = self._write_layer(
                    states, blocks, last.layers[n], layer_params, last.goes[n]
                )
        if self.lag and unstacked:
            new, token = self._take(unstacked, token)
        params = list(states.params)
        for i, value in zip(unstacked, new, strict=False):
            params[i] = self.records.params[i].store(jnp.where(go, value, params[i]))
        return FlatState(params, states.master, states.opt), token

    def _take(self, leaf_ids: Sequence[int], token: Array) -> tuple[list[Array], Array]:
        """Fetch the results of some leaves' oldest update that was not fetched yet."""
        assert self.binding.queued is not None
        callback = functools.partial(self.binding.queued.take, first=self._first(leaf_ids))
        results = () if self.params_away else leaf_ids
        inputs = _Inputs(numbers=[jnp.int32(0)])
        return self._call(callback, results, inputs, token, returns_params=True)

    def _update(
        self,
        states: FlatState,
        leaf_ids: Sequence[int],
        layer: Array,
        grads: Sequence[Array],
        old: Sequence[Array],
        go: Array,
        scalars: Array,
        token: Array,
    ) -> tuple[list[Array], Array]:
        """Update some leaves, of one layer if they are stacked.

        Returns:
          The new parameters, as far as the callback returns them, and the next token.
        """
        if not leaf_ids:
            return [], token
        records = [self.records.grads[i] for i in leaf_ids]
        results = () if self.params_away else leaf_ids
        first = self._first(leaf_ids)
        inputs = _Inputs(
            numbers=[layer, go.astype(jnp.int32)],
            scalars=scalars,
            arrays=[*grads, *old],
            records=records * (bool(grads) + bool(old)),
        )
        if self.lag:
            assert self.binding.queued is not None
            callback = functools.partial(self.binding.queued.update, first=first)
            if leaf_ids[0] not in self.layout.blocks:
                # A separate call fetches the results of unstacked leaves.
                results = ()
        else:
            callback = functools.partial(
                self._step.update, first=first, count=len(leaf_ids), stashed=not grads
            )
            memory = self.state.operands(states, leaf_ids, None)
            inputs = dataclasses.replace(inputs, memory=memory)
        return self._call(callback, results, inputs, token, returns_params=True)

    def _call(
        self,
        callback: Callable[..., None],
        results: Sequence[int],
        inputs: _Inputs,
        token: Array,
        *,
        returns_params: bool = False,
    ) -> tuple[list[Array], Array]:
        """Call back on every device, with its own shards.

        Args:
          callback: function of (context, out, numbers, token, memory if any, scalars if any,
            *arrays). Its numbers are the device's position in the mesh, `inputs.numbers`, and the
            number of the state.
          results: indices of the parameter leaves whose shards it returns in the compute dtype, of
            one layer if stacked, else of the full leaf.
          inputs: what the callback receives.
          token: i32[devices], from the previous callback.
          returns_params: whether the callback returns the parameters of `results`, of which there
            may be none, and a token; otherwise it returns only a token.

        Returns:
          The results, and the next token.
        """
        per_device = PartitionSpec(self.mesh.axis_names)
        out = jax.ShapeDtypeStruct((1,), jnp.int32)  # the next token
        if returns_params:
            out = ([self._abstract_result(i) for i in results], out)
        memory, memory_specs = inputs.memory or ([], [])

        def call(
            position: Array,
            token: Array,
            numbers: Array,
            memory: list[Array],
            scalars: Array | None,
            arrays: list[Array],
        ) -> tuple[list[Array], Array]:
            numbers = jnp.concatenate([position, numbers, token])  # i32[n + 2]
            operands: list[Any] = [] if inputs.memory is None else [memory]
            if scalars is not None:
                operands.append(scalars)
            # Not io_callback, which hangs with several CPU devices if an operand has 128 KB or
            # more. The side effect is the update of host memory: no result shows it, and XLA must
            # not drop or merge the calls.
            call_back = buffer_callback(callback, out, has_side_effect=True)
            outs = call_back(numbers, token, *operands, *arrays)
            return outs if returns_params else ([], outs)

        # Inside shard_map, so that each device calls back once, with its own shards.
        call_on_shards = jax.shard_map(
            call,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(
                per_device,
                per_device,
                PartitionSpec(),
                memory_specs,
                PartitionSpec(),
                [PartitionSpec(*record.spec) for record in inputs.records],
            ),
            out_specs=([PartitionSpec(*self.records.grads[i].spec) for i in results], per_device),
            check_vma=False,
        )
        positions = jnp.arange(self.mesh.size, dtype=jnp.int32)
        numbers = _as_vector(inputs.numbers)
        return call_on_shards(
            positions, token, numbers, memory, inputs.scalars, list(inputs.arrays)
        )

    def _abstract_result(self, index: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the parameter shard that a callback returns: one layer of a stack."""
        lead = int(index in self.layout.blocks)
        shape = self.state.shard_shape(index)[lead:]
        return jax.ShapeDtypeStruct(shape, self.layout.leaves[index].dtype)

    def first_token(self, state: TrainState) -> Array:
        """Return the token before a step's first callback, i32[devices].

        It is the number of the state on disk, or 0 if the state is not on disk.
        """
        leaves = jax.tree.leaves((state.params, state.master, state.opt_state), is_leaf=is_stored)
        tokens = [leaf.token for leaf in leaves if isinstance(leaf, OnDisk)]
        return tokens[0] if tokens else jnp.zeros(self.mesh.size, jnp.int32)


def _as_vector(numbers: Sequence[Array]) -> Array:
    """Return numbers, i32[] each, as one array."""
    if not numbers:
        return jnp.zeros(0, jnp.int32)
    # Not jnp.stack: `zerojax.program.call_order` recognizes the layers by these concatenations.
    return jnp.concatenate([number[None].astype(jnp.int32) for number in numbers])


def update_on_host(host: HostUpdate) -> Update:
    """Return the update of a resident step whose optimizer runs on the host."""

    def update(state: TrainState, loss: Array, grads: Grads) -> tuple[TrainState, dict[str, Array]]:
        config = host.config
        records = host.records
        # The kernels divide by the loss scale and clip.
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        measured = measure_grads(config, state, grads, host.record_update.unused)
        ok = measured.finite
        factor = clip_factor(measured.norm, config.clip_norm)
        states = records.flat(state)
        scalars = host.scalars(records.list_shared(states), loss, factor, scale)
        # Exact: the gradients were cast up before.
        leaf_grads = [
            grad.astype(host.state.grad_dtype(i)) for i, grad in enumerate(jax.tree.leaves(grads))
        ]
        token = host.first_token(state)
        states, _ = host.update_unstacked(states, leaf_grads, ok, scalars, token, {})
        states = records.with_shared(states, host.record_update.shared(states, loss, ok))
        params, master, opt_state = records.trees(state, states)
        return finish(
            state, params, master, opt_state, loss, measured.norm, ok, config.loss_scaling
        )

    return update
