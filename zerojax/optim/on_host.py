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
from collections.abc import Mapping, Sequence
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
    LAG,
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
from zerojax.optim.host_state import HostBinding, HostState, find_rest
from zerojax.optim.whole_tree import Update, clip_factor, finish, measure_grads
from zerojax.state import FlatState, OnDisk, Pending, RecordSpec, TrainState, is_stored
from zerojax.trees import Grads

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handed:
    """Layers whose gradients were sent and whose parameters were not fetched yet, oldest first.

    Attributes:
      layers: i32[lag], numbers of the layers in their stack.
      goes: bool[lag], whether each layer is updated; False if an entry holds no layer.
    """

    layers: Array
    goes: Array

    def then(self, layer: Array, go: Array) -> "Handed":
        """Return a copy without the oldest layer and with one more layer.

        Args:
          layer: i32[], number of the layer.
          go: bool[], whether the layer is updated.
        """
        layers = jnp.concatenate([self.layers[1:], layer[None].astype(jnp.int32)])
        return Handed(layers, jnp.concatenate([self.goes[1:], go[None]]))


class HostUpdate:
    """The update on the host, as operations inside the step that call its kernels.

    Attributes:
      state: the memory that the kernels work on.
      binding: operations on that memory before and after a step.
      host: the kernels, with the arrays that they keep in host memory.
      stashes: whether the layers' gradients wait in host memory, or on disk, for their scale.
      on_disk: where gradients that wait on disk are stored, by leaf index.
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
        self.params_away = self.state.params_away
        self.needs_weights = self.state.needs_weights
        has_master = self.layout.has_master
        order = self.state.order
        self.rules = [
            HostRule(update, i, self.state.grad_dtype(i), summed, has_master) for i in order
        ]
        # One vector holds the scalars of all kernels: each reads its own slice.
        start = 0
        leaves = []
        for rule, index in zip(self.rules, order, strict=True):
            scalars = slice(start, start + len(rule.crossing))
            start = scalars.stop
            leaves.append(self._leaf(rule, index, scalars))
        disk = self.layout.disk
        self.host = HostLeaves(
            leaves,
            find_link(self.mesh.devices.flat[0].platform),
            None if disk is None else disk.swap,
        )
        self.calls = Calls(list(self.mesh.devices.flat)) if disk is None else disk.swap.calls
        self.binding = HostBinding(self.state, self.host, self.calls if disk is None else None)
        self._step, self._delayed = HostStep(self.host), DelayedStep(self.host, self._ranges())
        # On a CPU, callbacks receive all arrays in host memory and update them immediately.
        self.lag = 0 if self.state.hands_over or self.config.delayed_update else LAG
        if not self.state.hands_over:
            self.binding.queued = QueuedStep(
                self.host, self.parts(), list(self.mesh.devices.flat), driver
            )

    def _leaf(self, rule: HostRule, index: int, scalars: slice) -> LeafKernel:
        weight_on_device = self.needs_weights
        delayed = self.config.delayed_update
        states = len(rule.states)
        in_place = self.layout.has_master or not (weight_on_device or delayed)
        # An aliased result is written over its operand. A weight has its own result if it is stored
        # on the device, or if the device still reads it while a delayed update runs. The inputs are
        # gradient, weight, states, then scalars; the outputs are weight, states, then the cast
        # weight.
        aliases = [(1 + k, 2 + k) for k in range(states)] + ([(0, 1)] if in_place else [])
        arrays = [True] * (2 + states) + [False] * len(rule.crossing)
        stash = self.on_disk.get(index)
        return LeafKernel(
            kernel=build_kernel(rule.kernel, aliases, arrays=arrays),
            scalars=scalars,
            arrays=tuple(find_rest(record) for record in self.state.specs(index)),
            num_states=states,
            stacked=index in self.layout.blocks,
            weight_on_device=weight_on_device,
            casts=self.layout.has_master,
            params_on_device=not self.params_away,
            delayed=delayed,
            grad=None if stash is None else find_rest(stash),
        )

    def parts(self) -> list[LeafGroup]:
        """Return the groups of leaves transferred together on a GPU; empty on a mesh of CPUs."""
        if self.state.hands_over:
            return []
        delayed = self.config.delayed_update
        num_scalars = max(1, sum(len(rule.crossing) for rule in self.rules))
        specs = [LeafGroup(range(0), (), (), (), num_scalars, stacked=False)] if delayed else []
        for leaf_ids in (*(stack.blocks for stack in self.layout.stacks), self.layout.unstacked):
            if not leaf_ids:
                continue
            stacked = leaf_ids[0] in self.layout.blocks
            shapes = [self.state.shard_shape(i)[int(stacked) :] for i in leaf_ids]
            kinds = [
                (self.state.grad_dtype(i), jnp.float32, self.layout.leaves[i].dtype)
                for i in leaf_ids
            ]
            grads, weights, params = (
                tuple(
                    (shape, np.dtype(dtypes[n]))
                    for shape, dtypes in zip(shapes, kinds, strict=True)
                )
                for n in range(3)
            )
            first = self._first(leaf_ids)
            stashes = delayed or (stacked and self.stashes)
            spec = LeafGroup(
                leaves=range(first, first + len(leaf_ids)),
                grads=() if stashes else grads,
                weights=weights if self.needs_weights else (),
                params=() if self.params_away else params,
                num_scalars=num_scalars,
                stacked=stacked,
            )
            specs += [] if delayed else [spec]
            if stashes:
                up = spec.params if delayed and stacked else ()
                specs.append(
                    dataclasses.replace(
                        spec, grads=grads, weights=(), params=up, num_scalars=0, stashes=True
                    )
                )
        return specs

    def _ranges(self) -> list[range]:
        """Return the numbers of the kernels of each stack, then of the unstacked leaves."""
        parts = (*(stack.blocks for stack in self.layout.stacks), self.layout.unstacked)
        return [
            range(self._first(leaf_ids), self._first(leaf_ids) + len(leaf_ids))
            for leaf_ids in parts
            if leaf_ids
        ]

    def close(self) -> None:
        """Stop the workers, and drop all references to memory.

        A later step rebuilds what it needs.
        """
        if self.binding.queued is not None:
            self.binding.queued.close()
        self.binding.release()

    def nothing_handed(self) -> dict[int, Handed]:
        """Return the initial loop carry for delayed results: {first leaf of a stack: no layers}.

        The mapping is empty if results are not delayed.
        """
        if not self.lag:
            return {}
        none = Handed(jnp.zeros(self.lag, jnp.int32), jnp.zeros(self.lag, bool))
        return {stack.blocks[0]: none for stack in self.layout.stacks if stack.blocks}

    def scalars(self, shared: Sequence[Array], loss: Array, factor: Array, scale: Array) -> Array:
        """Return the scalars of all leaves' kernels: f32[n].

        Args:
          shared: the scalars of the optimizer state before the step.
          loss: f32[], the loss of the step.
          factor: f32[], the clipping factor.
          scale: f32[], the loss scale.
        """
        values = [v for rule in self.rules for v in rule.scalars([*shared, loss, factor, scale])]
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
        return self._call(callback, (), [layer], None, None, grads, records, token)[1]

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
        handed: Mapping[int, Handed],
    ) -> tuple[FlatState, Array, dict[int, Handed]]:
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
          handed: layers in flight, from `nothing_handed` or from the previous call.

        Returns:
          The states, the next token, and the layers in flight.
        """
        handed = dict(handed)
        if not leaf_ids:
            return states, token, handed
        new, token = self._update(states, leaf_ids, layer, grads, old, go, scalars, token)
        if self.lag:
            before = handed[leaf_ids[0]]
            handed[leaf_ids[0]] = before.then(layer, go)
            layer = before.layers[0]
            go = before.goes[0]
        return self._write_layer(states, leaf_ids, layer, new, go), token, handed

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
            before = self.records.params[i].read(params[i], layer)
            # Without an update, the callback has not written to its result.
            params[i] = self.records.params[i].write(params[i], layer, jnp.where(go, value, before))
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
            where = [ready, jnp.int32(0)]
            return self._call(
                self.binding.queued.start, (), where, None, scalars, (), (), token, small=True
            )[1]
        memory = self.state.operands(states, self.state.order, pending)
        return self._call(
            self._delayed.start, (), [ready], memory, scalars, (), (), token, small=True
        )[1]

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
        if self.binding.queued is not None:
            site = CallbackSite(self.calls, "install")
            callback = functools.partial(
                self.binding.queued.install,
                first=self._first(leaf_ids),
                count=len(leaf_ids),
                site=site,
            )
        else:
            callback = functools.partial(
                self._delayed.install, first=self._first(leaf_ids), count=len(leaf_ids)
            )
        new, token = self._call(
            callback, tuple(leaf_ids), [layer], None, None, (), (), token, small=False
        )
        for i, value in zip(leaf_ids, new, strict=True):
            record = self.records.params[i]
            before = record.read(params[i], layer) if stacked else params[i]
            # Nothing is pending before the first step, or after a skipped step.
            value = jnp.where(pending.ready, value, before)
            params[i] = record.write(params[i], layer, value) if stacked else record.store(value)
        return params, token

    def finish(self, states: FlatState, pending: Pending, token: Array) -> Array:
        """Wait for the update that `start` began, and return the next token.

        Args:
          states: all leaves of the state.
          pending: gradients and scalars of the previous step.
          token: i32[devices], from the previous callback.
        """
        if self.binding.queued is not None:
            return self._call(self.binding.queued.finish, (), [], None, None, (), (), token)[1]
        memory = self.state.operands(states, self.state.order, pending)
        return self._call(self._delayed.finish, (), [], memory, None, (), (), token)[1]

    def update_unstacked(
        self,
        states: FlatState,
        grads: Sequence[Array],
        go: Array,
        scalars: Array,
        token: Array,
        handed: Mapping[int, Handed],
    ) -> tuple[FlatState, Array]:
        """Update every unstacked leaf, and fetch the parameters of all layers still in flight.

        Weights on the device, if any, are read from `states`.

        Args:
          states: all leaves of the state.
          grads: gradients of the unstacked leaves; empty if they are stashed.
          go: bool[], whether to update.
          scalars: vector returned by `scalars`.
          token: i32[devices], orders the callbacks of a device.
          handed: layers in flight, from the last `update_layer`.

        Returns:
          The states, and the next token.
        """
        unstacked = self.layout.unstacked
        old = [states.params[i] for i in unstacked] if self.needs_weights else []
        # Each device passes on the shard that it updates: below stage 3 it has the unsharded
        # weight.
        old = [
            jax.lax.with_sharding_constraint(v, self.records.grads[i].sharding)
            for v, i in zip(old, unstacked, strict=False)
        ]
        new, token = self._update(states, unstacked, jnp.int32(0), grads, old, go, scalars, token)
        for stack in self.layout.stacks:
            if handed and stack.blocks:
                last = handed[stack.blocks[0]]
                for n in range(self.lag):
                    of_layer, token = self._take(stack.blocks, token)
                    states = self._write_layer(
                        states, stack.blocks, last.layers[n], of_layer, last.goes[n]
                    )
        if self.lag and unstacked:
            new, token = self._take(unstacked, token)
        params = list(states.params)
        for i, value in zip(unstacked, new, strict=False):
            params[i] = self.records.params[i].store(jnp.where(go, value, params[i]))
        return FlatState(params, states.master, states.opt), token

    def _take(self, leaf_ids: Sequence[int], token: Array) -> tuple[list[Array], Array]:
        """Fetch the results of the oldest update of a part that was not fetched yet."""
        assert self.binding.queued is not None
        callback = functools.partial(self.binding.queued.take, first=self._first(leaf_ids))
        results = () if self.params_away else tuple(leaf_ids)
        return self._call(callback, results, [jnp.int32(0)], None, None, (), (), token, small=False)

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
        if not leaf_ids:
            return [], token
        records = [self.records.grads[i] for i in leaf_ids]
        results = () if self.params_away else tuple(leaf_ids)
        where = [layer, go.astype(jnp.int32)]
        operands = [*grads, *old]
        if self.lag:
            assert self.binding.queued is not None
            queued = functools.partial(self.binding.queued.update, first=self._first(leaf_ids))
            # A separate call fetches the results of unstacked leaves.
            results = results if leaf_ids[0] in self.layout.blocks else ()
            of_operands = records * (bool(grads) + bool(old))
            return self._call(
                queued, results, where, None, scalars, operands, of_operands, token, small=False
            )
        callback = functools.partial(
            self._step.update, first=self._first(leaf_ids), count=len(leaf_ids), stashed=not grads
        )
        memory = self.state.operands(states, leaf_ids, None)
        return self._call(
            callback,
            results,
            where,
            memory,
            scalars,
            operands,
            records * (bool(grads) + bool(old)),
            token,
        )

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
          callback: function of (context, out, where, token, memory if any, scalars if any,
            *operands).
          results: indices of the parameter leaves whose shards it returns in the compute dtype, of
            one layer if stacked, else of the full leaf.
          where: i32[] each, sent after the device's position in the mesh and before the token.
          memory: arrays in host memory and their specs, or None.
          scalars: f32[n], or None.
          operands: arrays, sharded as `records` specify.
          records: one spec for each operand.
          token: i32[devices], from the previous callback.
          small: whether the callback returns only a token; None means if it gets no scalars.

        Returns:
          The results, and the next token.
        """
        every = PartitionSpec(self.mesh.axis_names)
        # For a stack of layers, the callback returns one layer.
        abstract_results = [
            jax.ShapeDtypeStruct(
                self.state.shard_shape(i)[int(i in self.layout.blocks) :],
                self.layout.leaves[i].dtype,
            )
            for i in results
        ]
        after = jax.ShapeDtypeStruct((1,), jnp.int32)
        only_token = scalars is None if small is None else small
        arrays, specs = memory or ([], [])

        def local(
            position: Array,
            token: Array,
            where: Array,
            arrays: Any,
            scalars: Any,
            operands: list[Array],
        ) -> Any:
            where = jnp.concatenate(
                [position, where, token]
            )  # i32[n + 2]; the token holds the state's number
            out = after if only_token else (abstract_results, after)
            extra = ([] if memory is None else [arrays]) + ([] if scalars is None else [scalars])
            # Not io_callback, which hangs with several CPU devices if an operand has 128 KB or
            # more. The side effect is the update of host memory: no result shows it, and XLA must
            # not drop or merge the calls.
            outs = buffer_callback(callback, out, has_side_effect=True)(
                where, token, *extra, *operands
            )
            return ([], outs) if only_token else outs

        # Inside shard_map, so that each device calls back once, with its own shards.
        island = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(
                every,
                every,
                PartitionSpec(),
                specs,
                PartitionSpec(),
                [PartitionSpec(*r.spec) for r in records],
            ),
            out_specs=([PartitionSpec(*self.records.grads[i].spec) for i in results], every),
            check_vma=False,
        )
        positions = jnp.arange(self.mesh.size, dtype=jnp.int32)
        # Not jnp.stack: `zerojax.program.call_order` recognizes the layers by these concatenations.
        told = (
            jnp.concatenate([value[None].astype(jnp.int32) for value in where])
            if where
            else jnp.zeros(0, jnp.int32)
        )
        return island(positions, token, told, arrays, scalars, list(operands))

    def first_token(self, state: TrainState) -> Array:
        """Return the token before a step's first callback, i32[devices].

        It is the number of the state on disk, or 0 if the state is not on disk.
        """
        leaves = jax.tree.leaves((state.params, state.master, state.opt_state), is_leaf=is_stored)
        tokens = [leaf.token for leaf in leaves if isinstance(leaf, OnDisk)]
        return tokens[0] if tokens else jnp.zeros(self.mesh.size, jnp.int32)


def update_on_host(host: HostUpdate) -> Update:
    """Return the update of a resident step whose optimizer runs on the host."""

    def update(
        state: TrainState, value: Array, grads: Grads
    ) -> tuple[TrainState, dict[str, Array]]:
        config = host.config
        records = host.records
        # The kernels divide by the loss scale and clip.
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        measured = measure_grads(config, state, grads, host.record_update.unused)
        norm = measured.norm
        ok = measured.finite
        factor = clip_factor(norm, config.clip_norm)
        states = records.flat(state)
        scalars = host.scalars(records.list_shared(states), value, factor, scale)
        grads = [
            g.astype(host.state.grad_dtype(i)) for i, g in enumerate(jax.tree.leaves(grads))
        ]  # exact: cast up before
        states, _ = host.update_unstacked(states, grads, ok, scalars, host.first_token(state), {})
        states = records.with_shared(states, host.record_update.shared(states, value, ok))
        return finish(state, *records.trees(state, states), value, norm, ok, config.loss_scaling)

    return update
