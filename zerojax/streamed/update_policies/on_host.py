"""Update policies that pass gradients to the callbacks of an update on the host (`HostUpdate`).

    HostUpdateInBackward    a layer is updated in the tick of backward that computes its gradient
    OnHost                  gradients wait for the norm, on the device or on the host; then each
                            layer is updated
    Delayed                 gradients wait on the host for the next step, and the host uses them
                            while that step computes

The callbacks of a device must run in one order. Each callback takes a token and returns one, and
the update policies pass it on.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.optim import HostUpdate, RecordUpdate, clip_factor
from zerojax.state import Pending, TrainState
from zerojax.streamed.phases import Tick, run_phase
from zerojax.streamed.plan import StreamedPlan
from zerojax.streamed.update_policies.in_backward import UpdatedState, UpdateInBackward
from zerojax.streamed.update_policies.interface import (
    BackwardResult,
    HeadDone,
    RecordGrads,
    Result,
    closed,
    loss_scale,
)
from zerojax.streamed.update_policies.stored import GradStacks, StoredGrads

Array = jax.Array


class HostUpdateInBackward(UpdateInBackward):
    """Update policy whose host update of a layer runs in the tick that computes its gradient.

    Gradients are never stored.
    """

    def __init__(self, plan: StreamedPlan, update: RecordUpdate, host: HostUpdate) -> None:
        """Update on the host with `host`."""
        super().__init__(plan, update)
        self.host = host

    def begin(
        self, state: TrainState, head: HeadDone, grads: list[Array], token: Array
    ) -> UpdatedState:
        """Return the value that backward carries, with the scalars of the host's kernels."""
        carried = super().begin(state, head, grads, token)
        # Gradients are neither clipped nor unscaled: the norm is known only after all layers are
        # updated, and there is no loss scale.
        shared = self.records.list_shared(carried.states)
        one = jnp.float32(1)
        scalars = self.host.scalars(shared, head.loss, one, one)
        return dataclasses.replace(carried, scalars=scalars, handed=self.host.none_in_flight())

    def use(
        self, state: TrainState, carried: UpdatedState, record: RecordGrads
    ) -> tuple[UpdatedState, Any]:
        """Pass one layer's gradients to the host, which updates the layer."""
        assert carried.scalars is not None
        squares = carried.squares + self.plan.squares(record.grads, record.leaf_ids, state)
        # Cut the shard out of the gathered layer instead of reading it again.
        old = self.plan.on_shards(record.params, record.leaf_ids) if self.host.needs_weights else []
        grads = record.grads
        in_flight = record.in_flight
        if record.now.writes_after_fetch:
            # The new parameters are written to the stacks from which `in_flight` is fetched.
            grads, in_flight = jax.lax.optimization_barrier((grads, in_flight))
        states, token, handed = self.host.update_layer(
            carried.states,
            record.leaf_ids,
            record.now.layer,
            grads,
            old,
            jnp.isfinite(squares),
            carried.scalars,
            carried.token,
            carried.handed,
        )
        return dataclasses.replace(
            carried, states=states, squares=squares, token=token, handed=handed
        ), in_flight

    def end(self, result: BackwardResult[UpdatedState]) -> Result:
        """Update the unstacked leaves on the host and finish the step."""
        carried = result.carried
        norm = self.norm(result)
        assert carried.scalars is not None
        ok = jnp.isfinite(norm)
        states, _ = self.host.update_unstacked(
            carried.states, result.unstacked, ok, carried.scalars, carried.token, carried.handed
        )
        return closed(self.record_update, result, states, norm)


class OnHost(StoredGrads):
    """Update policy whose host update of all layers runs after the norm is known.

    Until then, gradients are kept on the device or stashed in host memory.
    """

    def __init__(self, plan: StreamedPlan, update: RecordUpdate, host: HostUpdate) -> None:
        """Update on the host with `host`."""
        super().__init__(plan)
        self.record_update = update
        self.records = update.records
        self.host = host

    def begin(
        self, state: TrainState, head: HeadDone, grads: list[Array], token: Array
    ) -> GradStacks:
        """Return the value that backward carries; it has no gradients if callbacks stash them."""
        carried = super().begin(state, head, grads, token)
        # Callbacks keep the gradients, so that the loop of backward carries no stacks of them.
        return dataclasses.replace(carried, grads=[]) if self.host.stashes else carried

    def store(self, carried: GradStacks, record: RecordGrads) -> GradStacks:
        """Store one record's gradients, or stash them on the host."""
        if self.host.stashes:
            token = self.host.stash(record.leaf_ids, record.now.layer, record.grads, carried.token)
            return dataclasses.replace(carried, token=token)
        return super().store(carried, record)

    def of_layers(
        self,
        result: BackwardResult[GradStacks],
        tick: Callable[[Sequence[int], Any, Tick], Any],
        carry: Any,
    ) -> Any:
        """Run `tick(leaves, carry, now)` for the layers of every run; return the final carry."""
        for stack in self.plan.of_stacks:
            phase = stack.schedule.phase("update")
            run = partial(tick, stack.blocks)
            # Nothing is fetched to the device: the callbacks use host memory and the disk's
            # buffers.
            carry = run_phase(
                phase,
                result.begin,
                carry,
                run,
                mesh=self.plan.mesh,
                slices_host=self.plan.state_records.slices_host,
                fetch=_fetch_nothing,
            )
        return carry

    def end(self, result: BackwardResult[GradStacks]) -> Result:
        """Update all layers and the unstacked leaves on the host, and finish the step."""
        records = self.records
        host = self.host
        state = result.state
        norm = self.norm(result)
        ok = jnp.isfinite(norm)
        states = records.flat(state)
        scalars = host.scalars(
            records.list_shared(states),
            result.loss,
            clip_factor(norm, self.config.clip_norm),
            loss_scale(state),
        )

        def tick(leaf_ids: Sequence[int], carry: Any, now: Tick) -> Any:
            states, token, handed = carry
            # Stashed gradients wait in host memory or on disk, where the kernels find them by
            # layer.
            grads = [] if host.stashes else self.read_grads(result.carried, leaf_ids, now.layer)
            old = records.read_params(states, leaf_ids, now.layer) if host.needs_weights else []
            return host.update_layer(
                states, leaf_ids, now.layer, grads, old, ok, scalars, token, handed
            ), now.in_flight

        states, token, handed = self.of_layers(
            result, tick, (states, result.carried.token, host.none_in_flight())
        )
        unstacked = self.stored_unstacked(result)
        states, _ = host.update_unstacked(states, unstacked, ok, scalars, token, handed)
        return closed(self.record_update, result, states, norm)


class Delayed(OnHost):
    """Update policy that leaves its gradients to the next step.

    The host applies them while that step computes (delayed update; ZeRO-Offload, section 5.2). A
    layer is used for the last time in its tick of backward. That tick installs the layer's new
    parameters, which have crossed the link in the meantime. Parameters in host memory are exchanged
    after the step (`HostBinding.exchange`).
    """

    def begin(
        self, state: TrainState, head: HeadDone, grads: list[Array], token: Array
    ) -> GradStacks:
        """Return the value that backward carries, with the stacks of parameters on the device."""
        carried = super().begin(state, head, grads, token)
        params = self.records.flat(state).params
        return dataclasses.replace(
            carried,
            params={} if self.host.params_away else {i: params[i] for i in self.plan.stacked},
        )

    def params(self, state: TrainState, carried: GradStacks) -> list[Array]:
        """Return the stacks of parameters that backward updates."""
        # The stacks that are being written. If backward read the stacks from before the step, XLA
        # would keep a copy of them.
        if carried.params:
            return [carried.params[i] for i in self.plan.stacked]
        return super().params(state, carried)

    def use(
        self, state: TrainState, carried: GradStacks, record: RecordGrads
    ) -> tuple[GradStacks, Any]:
        """Stash one layer's gradients, then install its new parameters."""
        carried, in_flight = super().use(state, carried, record)
        if not carried.params:
            return carried, in_flight
        assert state.pending is not None
        # This runs after the gradients are stashed, and so after the layer's last use.
        params, token = self.host.install(
            carried.params, record.leaf_ids, record.now.layer, state.pending, carried.token
        )
        return dataclasses.replace(carried, params=params, token=token), in_flight

    def end(self, result: BackwardResult[GradStacks]) -> Result:
        """Hand this step's gradients to the next step, and finish the step."""
        plan = self.plan
        records = self.records
        host = self.host
        state = result.state
        pending = state.pending
        assert pending is not None
        # The norm of this step's gradients. The update that was installed used the norm of the
        # previous step.
        norm = self.norm(result)
        token = host.stash_unstacked(self.stored_unstacked(result), result.carried.token)
        states = records.flat(state)
        if not host.params_away:
            params, token = host.install(
                dict(enumerate(states.params)) | result.carried.params,
                plan.unstacked,
                jnp.int32(0),
                pending,
                token,
            )
            states = dataclasses.replace(states, params=[params[i] for i in range(len(params))])
        host.finish(states, pending, token)
        # The next step applies these gradients and needs this step's loss, clipping factor, loss
        # scale and optimizer scalars. `closed` then advances the scalars in the state.
        scalars = jnp.stack(
            [result.loss, clip_factor(norm, self.config.clip_norm), loss_scale(state)]
        )
        # The arrays are passed on unchanged: callbacks have written this step's gradients to their
        # memory.
        next_pending = Pending(
            pending.grads, records.list_shared(states), scalars, jnp.isfinite(norm)
        )
        return closed(self.record_update, result, states, norm, next_pending)


def _fetch_nothing(carry: Any, layer: Array) -> list[Array]:
    """Fetch nothing ahead."""
    del carry, layer
    return []
