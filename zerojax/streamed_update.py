"""What a streamed step does with a layer's gradient, and how it ends: five endings of one backward.

    ending          backward, at layer l                          after backward
    WholeTree       store g[l] on the device                      norm, clip, one update of the whole tree
    ByLayers        store g[l] in its tier                        norm; for each layer: fetch, scale, update, write back
    InBackward      fetch w[l], s[l]; update; write back          the leaves that are no stack of layers
    OnHost          store g[l], on the device or on the host      norm; the host updates each layer
      in backward   the host updates layer l                      the other leaves
    Delayed         store g[l] on the host                        take over what the host made of the last step's gradients

Backward carries a dict: "squares", the sum of squares of the gradients so far, and what the ending needs. Clipping is exact:
the scale is applied when all layers' gradients are known.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from host_offload.schedule import Phase
from zerojax.host_update import HostUpdate
from zerojax.model import BLOCKS
from zerojax.optim import clip_factor
from zerojax.parts import Parts, States
from zerojax.records import Index, Now, Plan, Tile, pick, read_layer, run_phase, wait_for, write_layer
from zerojax.resident import build_update, finish
from zerojax.state import Pending, TrainState, is_stored
from zerojax.streamed_layout import StreamedLayout

Array = jax.Array
Result = tuple[TrainState, dict[str, Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """What is known when backward is over.

    Attributes:
      state: before the step.
      loss: f32[], the mean over microbatches.
      carried: by backward.
      ends: summed gradients of the leaves that are no stack of layers.
      plans: the schedule's arrays.
      one: i32[] holding 1.
    """

    state: TrainState
    loss: Array
    carried: dict[str, Any]
    ends: list[Array]
    plans: Mapping[str, Plan]
    one: Array


@dataclasses.dataclass(frozen=True)
class Made:
    """What a tick of backward makes of a record, a layer or a tile of one.

    Attributes:
      now: the tick; `now.layer` and `now.write` are the record's index.
      part: indices of the record's leaves.
      grads: summed over microbatches, on their shards.
      params: gathered.
      landing: what this tick fetches.
    """

    now: Now
    part: Sequence[int]
    grads: list[Array]
    params: list[Array]
    landing: Any


class Ending(Protocol):
    """How a step uses gradients."""

    ends_first: bool
    """Whether the leaves that are no stack of layers are updated before the layers."""

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        """Return what backward carries; `grads` are the stacks in host memory, if any."""
        ...

    def params(self, state: TrainState, carried: dict[str, Any]) -> list[Array]:
        """Return the stacks of parameters that backward reads, of all stacked leaves."""
        ...

    def use(self, state: TrainState, carried: dict[str, Any], made: Made) -> tuple[dict[str, Any], Any]:
        """Take one record's gradients; returns what is carried on, and `landing`."""
        ...

    def end(self, sums: Sums) -> Result:
        """Finish the step."""
        ...


def ending_of(layout: StreamedLayout, tx: optax.GradientTransformation) -> Ending:
    """Return the ending that a config asks for."""
    in_backward = layout.config.update == "in_backward"
    if layout.parts is None:
        return WholeTree(layout, tx)
    if layout.host is None:
        return InBackward(layout, layout.parts) if in_backward else ByLayers(layout, layout.parts)
    if layout.config.delayed_update:
        return Delayed(layout, layout.parts, layout.host)
    return HostInBackward(layout, layout.parts, layout.host) if in_backward else OnHost(layout, layout.parts, layout.host)


class _Stored:
    """Gradients are stored until all are known."""

    ends_first = False

    def __init__(self, layout: StreamedLayout) -> None:
        self.layout, self.config = layout, layout.config

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        del state, loss
        layout = self.layout
        if not layout.grads_in_memory:
            grads = layout.empty_grads()
        return {"squares": jnp.float32(0), "grads": grads, "token": token}

    def params(self, state: TrainState, carried: dict[str, Any]) -> list[Array]:
        del carried
        return jax.tree.leaves(state.params[BLOCKS], is_leaf=is_stored)

    def use(self, state: TrainState, carried: dict[str, Any], made: Made) -> tuple[dict[str, Any], Any]:
        squares = carried["squares"] + self.layout.squares(made.grads, state)
        return self.store(carried, made.now, made.part, made.grads) | {"squares": squares}, made.landing

    def store(self, carried: dict[str, Any], now: Now, part: Sequence[int], grads: list[Array]) -> dict[str, Any]:
        layout, stacks = self.layout, carried["grads"]
        after = write_layer(pick(layout.grads, part), layout.pick(stacks, part), now.write, grads)
        return carried | {"grads": layout.put(stacks, part, after)}

    def read_grads(self, carried: dict[str, Any], part: Sequence[int], index: Index) -> list[Array]:
        return read_layer(pick(self.layout.grads, part), self.layout.pick(carried["grads"], part), index)

    def norm(self, sums: Sums) -> Array:
        """Return the global norm of the unscaled gradients."""
        return jnp.sqrt(sums.carried["squares"] + self.layout.squares(sums.ends, sums.state))


class WholeTree(_Stored):
    """Everything that the optimizer reads is on the device: any optimizer runs, once, on whole trees."""

    def __init__(self, layout: StreamedLayout, tx: optax.GradientTransformation) -> None:
        super().__init__(layout)
        self.update = build_update(tx, layout.layout)

    def end(self, sums: Sums) -> Result:
        layout = self.layout
        grads = dict(zip((*layout.stacked, *layout.ends), [*sums.carried["grads"], *sums.ends], strict=True))
        tree = jax.tree.structure(sums.state.params)
        mean = [layout.mean(grads[i]) for i in range(len(grads))]
        return self.update(sums.state, sums.loss, jax.tree.unflatten(tree, mean))


class ByLayers(_Stored):
    """The update is a loop over layers, and over each group's tiles, whose records come from where they rest and go back."""

    def __init__(self, layout: StreamedLayout, parts: Parts) -> None:
        super().__init__(layout)
        self.parts = parts
        # The layer updated first is the one whose gradient was stored last: on disk that write is done meanwhile.
        self.ends_first = layout.layout.disk is not None

    def end(self, sums: Sums) -> Result:
        layout, parts, state = self.layout, self.parts, sums.state
        # What the update fetches first comes after backward, not before it.
        plans, squares = wait_for(sums.plans, sums.carried["squares"], layout.mesh)
        sums = dataclasses.replace(sums, carried=sums.carried | {"squares": squares})
        norm = self.norm(sums)
        ok, factor = jnp.isfinite(norm), clip_factor(norm, self.config.clip_norm)

        def ready(grad: Array) -> Array:
            grad = layout.unscaled(grad, state)
            return grad if self.config.clip_norm is None else grad * factor

        states = parts.flat(state)
        shared = parts.shared_of(states)
        ends = [ready(g) for g in sums.ends]
        if self.ends_first:
            states = parts.update_ends(states, ends, shared, sums.loss, ok, sums.one)
            if (token := parts.end_token(states)) is not None:
                plans, _ = wait_for(plans, token, layout.mesh)
        loops = [Loop(layout.schedule.phase("update"), plans["update"], layout.blocks, layout.layout.device_layers)]
        for group, tiles in layout.loops:
            at = partial(Tile.numbered, of=group.num_tiles)
            loops.append(Loop(tiles.phase("update"), plans[tiles.plan("update")], group.leaves, 0, at))
        before: list[Array] = []
        for loop in loops:
            if before:  # the disk sees one order
                loop = dataclasses.replace(loop, plan=wait_for(loop.plan, before, layout.mesh)[0])
            states = self.update_records(sums, states, loop, ready, ok)
            before = parts.tokens(states, loop.part) or before
        if not self.ends_first:
            states = parts.update_ends(states, ends, shared, sums.loss, ok, sums.one)
        return closed(parts, sums, states, norm)

    def update_records(self, sums: Sums, states: States, loop: "Loop", ready: Callable[[Array], Array], ok: Array) -> States:
        """Update the records of one loop.

        Args:
          sums: of the step.
          states: all leaves.
          loop: over the records.
          ready: a stored gradient -> the one to update with.
          ok: bool[], whether to update at all.
        """
        layout, parts, part, at = self.layout, self.parts, loop.part, loop.at
        shared = parts.shared_of(states)
        old_away = states.master is None and layout.params_away
        opt_away = self.config.opt_state != "device"
        opt_ahead = opt_away and not (loop.on_device and (old_away or layout.grads_away))
        num = len(part)

        def fetch(states: States, layer: Array) -> list[Array]:
            record = self.read_grads(sums.carried, part, at(layer)) if layout.grads_away else []
            record += parts.read_params(states, part, at(layer)) if old_away else []
            return record + (parts.read_opt(states, part, at(layer), False) if opt_ahead else [])

        def tick(states: States, now: Now) -> tuple[States, Any]:
            taken, here, there = list(now.taken or []), at(now.layer), at(now.write)
            grads = self.read_grads(sums.carried, part, here) if not layout.grads_away else taken[:num]
            taken = taken[num:] if layout.grads_away else taken
            old: list[Array] = []
            if states.master is None:
                old, taken = (taken[:num], taken[num:]) if old_away else (parts.read_params(states, part, here), taken)
            opt = taken if opt_ahead and not now.on_device else parts.read_opt(states, part, here, now.on_device)
            mean = [ready(g) for g in grads]
            return parts.update_layer(states, part, there, mean, old + opt, shared, sums.loss, ok, now.on_device, now.landing)

        return run_phase(loop.phase, loop.plan, states, tick, sums.one, fetch=fetch, device_layers=loop.on_device)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the update over records.

    Attributes:
      phase: of the schedule.
      plan: its arrays.
      part: the leaves of a record.
      on_device: layers whose optimizer state stays on the device.
      at: number of a record -> its index.
    """

    phase: Phase
    plan: Plan
    part: Sequence[int]
    on_device: int
    at: Callable[[Array], Index] = lambda layer: layer


def closed(parts: Parts, sums: Sums, states: States, norm: Array, pending: Pending | None = None) -> Result:
    """Move the shared scalars on and finish the step."""
    ok, state = jnp.isfinite(norm), sums.state
    states = parts.close(states, parts.shared(states, sums.loss, ok))
    return finish(state, *parts.trees(state, states), sums.loss, norm, ok, parts.layout.config.loss_scaling, pending)


class InBackward:
    """A layer is updated in the tick that makes its gradient, which is never stored."""

    ends_first = False

    def __init__(self, layout: StreamedLayout, parts: Parts) -> None:
        self.layout, self.parts = layout, parts

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        del grads
        return {"squares": jnp.float32(0), "states": self.parts.flat(state), "loss": loss, "token": token}

    def params(self, state: TrainState, carried: dict[str, Any]) -> list[Array]:
        del state
        return [carried["states"].params[i] for i in self.layout.stacked]

    def use(self, state: TrainState, carried: dict[str, Any], made: Made) -> tuple[dict[str, Any], Any]:
        layout, parts, states, now, part = self.layout, self.parts, carried["states"], made.now, made.part
        old = layout.on_shards(made.params, part) if states.master is None else []
        read = old + parts.read_opt(states, part, now.layer, now.on_device)
        squares = carried["squares"] + layout.squares(made.grads, state)
        shared, mean, ok = parts.shared_of(states), [layout.mean(g) for g in made.grads], jnp.isfinite(squares)
        states, landing = parts.update_layer(
            states, part, now.write, mean, read, shared, carried["loss"], ok, now.on_device, made.landing
        )
        return carried | {"states": states, "squares": squares}, landing

    def end(self, sums: Sums) -> Result:
        parts, states = self.parts, sums.carried["states"]
        norm = jnp.sqrt(sums.carried["squares"] + self.layout.squares(sums.ends, sums.state))
        ends, shared = [self.layout.mean(g) for g in sums.ends], parts.shared_of(states)
        states = parts.update_ends(states, ends, shared, sums.loss, jnp.isfinite(norm), sums.one)
        return closed(parts, sums, states, norm)


class HostInBackward(InBackward):
    """The same, on the host."""

    def __init__(self, layout: StreamedLayout, parts: Parts, host: HostUpdate) -> None:
        super().__init__(layout, parts)
        self.host = host

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        carried = super().begin(state, loss, grads, token)
        shared, one = self.parts.shared_of(carried["states"]), jnp.float32(1)
        return carried | {"scalars": self.host.scalars(shared, loss, one, one)}

    def use(self, state: TrainState, carried: dict[str, Any], made: Made) -> tuple[dict[str, Any], Any]:
        squares = carried["squares"] + self.layout.squares(made.grads, state)
        old = self.layout.on_shards(made.params, made.part) if self.host.needs_weights else []
        states, token = self.host.update_layer(
            carried["states"], made.now.write, made.grads, old, jnp.isfinite(squares), carried["scalars"], carried["token"]
        )
        return carried | {"states": states, "squares": squares, "token": token}, made.landing

    def end(self, sums: Sums) -> Result:
        carried, norm = sums.carried, jnp.sqrt(sums.carried["squares"] + self.layout.squares(sums.ends, sums.state))
        states, _ = self.host.update_ends(
            carried["states"], sums.ends, jnp.isfinite(norm), carried["scalars"], carried["token"]
        )
        return closed(self.parts, sums, states, norm)


class OnHost(_Stored):
    """The host updates every layer when the norm is known. Gradients wait on the device, or stashed in host memory."""

    def __init__(self, layout: StreamedLayout, parts: Parts, host: HostUpdate) -> None:
        super().__init__(layout)
        self.parts, self.host = parts, host

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        carried = super().begin(state, loss, grads, token)
        return carried | {"grads": []} if self.host.stashes else carried

    def store(self, carried: dict[str, Any], now: Now, part: Sequence[int], grads: list[Array]) -> dict[str, Any]:
        if self.host.stashes:
            return carried | {"token": self.host.stash(now.layer, grads, carried["token"])}
        return super().store(carried, now, part, grads)

    def end(self, sums: Sums) -> Result:
        layout, parts, host, state = self.layout, self.parts, self.host, sums.state
        norm = self.norm(sums)
        ok, states = jnp.isfinite(norm), parts.flat(state)
        scalars = host.scalars(parts.shared_of(states), sums.loss, clip_factor(norm, self.config.clip_norm), loss_scale(state))

        def tick(carry: Any, now: Now) -> Any:
            states, token = carry
            grads = [] if host.stashes else self.read_grads(sums.carried, parts.blocks, now.layer)
            old = parts.read_params(states, parts.blocks, now.layer) if host.needs_weights else []
            return host.update_layer(states, now.write, grads, old, ok, scalars, token), now.landing

        carry = (states, sums.carried["token"])
        states, token = run_phase(layout.schedule.phase("update"), sums.plans["update"], carry, tick, sums.one, fetch=_nothing)
        states, _ = host.update_ends(states, sums.ends, ok, scalars, token)
        return closed(parts, sums, states, norm)


class Delayed(OnHost):
    """The host works on the gradients of the step before while this one computes (ZeRO-Offload, section 5.2)."""

    def end(self, sums: Sums) -> Result:
        layout, parts, host, state = self.layout, self.parts, self.host, sums.state
        pending = state.pending
        assert pending is not None
        norm = self.norm(sums)
        token = host.stash_ends(sums.ends, sums.carried["token"])

        def tick(carry: Any, now: Now) -> Any:
            return host.install(carry[0], parts.blocks, now.write, pending, carry[1]), now.landing

        carry = (parts.flat(state), token)
        states, token = run_phase(layout.schedule.phase("update"), sums.plans["update"], carry, tick, sums.one, fetch=_nothing)
        states, _ = host.install(states, parts.ends, jnp.int32(0), pending, token)
        scalars = jnp.stack([sums.loss, clip_factor(norm, self.config.clip_norm), loss_scale(state)])
        left = Pending(pending.grads, parts.shared_of(states), scalars, jnp.isfinite(norm))
        return closed(parts, sums, states, norm, left)


def loss_scale(state: TrainState) -> Array:
    """Return the scale of the loss: 1 where there is none."""
    return jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale


def _nothing(carry: Any, layer: Array) -> list[Array]:
    """Fetch nothing ahead."""
    del carry, layer
    return []
