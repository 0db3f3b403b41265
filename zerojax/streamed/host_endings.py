"""Endings whose optimizer runs on the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.optim import HostUpdate, RecordUpdate, clip_factor
from zerojax.state import Pending, TrainState
from zerojax.streamed.ending import BackwardResult, RecordGrads, Result, closed, loss_scale
from zerojax.streamed.endings import InBackward, StoredGrads
from zerojax.streamed.phases import Tick, run_phase
from zerojax.streamed.plan import StreamedPlan

Array = jax.Array


class HostInBackward(InBackward):
    """The same, on the host."""

    def __init__(self, layout: StreamedPlan, update: RecordUpdate, host: HostUpdate) -> None:
        super().__init__(layout, update)
        self.host = host

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        carried = super().begin(state, loss, grads, token)
        shared, one = self.records.shared_of(carried["states"]), jnp.float32(1)
        return carried | {"scalars": self.host.scalars(shared, loss, one, one)}

    def use(self, state: TrainState, carried: dict[str, Any], made: RecordGrads) -> tuple[dict[str, Any], Any]:
        squares = carried["squares"] + self.layout.squares(made.grads, state)
        old = self.layout.on_shards(made.params, made.part) if self.host.needs_weights else []
        states, token = self.host.update_layer(
            carried["states"], made.now.write, made.grads, old, jnp.isfinite(squares), carried["scalars"], carried["token"]
        )
        return carried | {"states": states, "squares": squares, "token": token}, made.landing

    def end(self, sums: BackwardResult) -> Result:
        carried, norm = sums.carried, jnp.sqrt(sums.carried["squares"] + self.layout.squares(sums.ends, sums.state))
        states, _ = self.host.update_ends(
            carried["states"], sums.ends, jnp.isfinite(norm), carried["scalars"], carried["token"]
        )
        return closed(self.record_update, sums, states, norm)


class OnHost(StoredGrads):
    """The host updates every layer when the norm is known. Gradients wait on the device, or stashed in host memory."""

    def __init__(self, layout: StreamedPlan, update: RecordUpdate, host: HostUpdate) -> None:
        super().__init__(layout)
        self.record_update, self.records, self.host = update, update.records, host

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        carried = super().begin(state, loss, grads, token)
        return carried | {"grads": []} if self.host.stashes else carried

    def store(self, carried: dict[str, Any], now: Tick, part: Sequence[int], grads: list[Array]) -> dict[str, Any]:
        if self.host.stashes:
            return carried | {"token": self.host.stash(now.layer, grads, carried["token"])}
        return super().store(carried, now, part, grads)

    def end(self, sums: BackwardResult) -> Result:
        layout, records, host, state = self.layout, self.records, self.host, sums.state
        norm = self.norm(sums)
        ok, states = jnp.isfinite(norm), records.flat(state)
        scalars = host.scalars(
            records.shared_of(states), sums.loss, clip_factor(norm, self.config.clip_norm), loss_scale(state)
        )

        def tick(carry: Any, now: Tick) -> Any:
            states, token = carry
            grads = [] if host.stashes else self.read_grads(sums.carried, layout.blocks, now.layer)
            old = records.read_params(states, layout.blocks, now.layer) if host.needs_weights else []
            return host.update_layer(states, now.write, grads, old, ok, scalars, token), now.landing

        carry = (states, sums.carried["token"])
        states, token = run_phase(layout.schedule.phase("update"), sums.plans["update"], carry, tick, sums.one, fetch=_nothing)
        states, _ = host.update_ends(states, sums.ends, ok, scalars, token)
        return closed(self.record_update, sums, states, norm)


class Delayed(OnHost):
    """The host works on the gradients of the step before while this one computes (ZeRO-Offload, section 5.2)."""

    def end(self, sums: BackwardResult) -> Result:
        layout, records, host, state = self.layout, self.records, self.host, sums.state
        pending = state.pending
        assert pending is not None
        norm = self.norm(sums)
        token = host.stash_ends(sums.ends, sums.carried["token"])

        def tick(carry: Any, now: Tick) -> Any:
            return host.install(carry[0], layout.blocks, now.write, pending, carry[1]), now.landing

        carry = (records.flat(state), token)
        states, token = run_phase(layout.schedule.phase("update"), sums.plans["update"], carry, tick, sums.one, fetch=_nothing)
        states, _ = host.install(states, layout.ends, jnp.int32(0), pending, token)
        scalars = jnp.stack([sums.loss, clip_factor(norm, self.config.clip_norm), loss_scale(state)])
        left = Pending(pending.grads, records.shared_of(states), scalars, jnp.isfinite(norm))
        return closed(self.record_update, sums, states, norm, left)


def _nothing(carry: Any, layer: Array) -> list[Array]:
    """Fetch nothing ahead."""
    del carry, layer
    return []
