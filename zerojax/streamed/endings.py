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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from host_offload.schedule import Phase
from zerojax.models import BLOCKS
from zerojax.optim import RecordUpdate, build_update, clip_factor
from zerojax.state import FlatState, Index, Plan, Tile, TrainState, is_stored, pick, read_layer, wait_for, write_layer
from zerojax.streamed.ending import BackwardResult, RecordGrads, Result, closed
from zerojax.streamed.phases import Tick, run_phase
from zerojax.streamed.plan import StreamedPlan

Array = jax.Array


class StoredGrads:
    """Gradients are stored until all are known."""

    ends_first = False

    def __init__(self, layout: StreamedPlan) -> None:
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

    def use(self, state: TrainState, carried: dict[str, Any], made: RecordGrads) -> tuple[dict[str, Any], Any]:
        squares = carried["squares"] + self.layout.squares(made.grads, state)
        return self.store(carried, made.now, made.part, made.grads) | {"squares": squares}, made.landing

    def store(self, carried: dict[str, Any], now: Tick, part: Sequence[int], grads: list[Array]) -> dict[str, Any]:
        layout, stacks = self.layout, carried["grads"]
        after = write_layer(pick(layout.grads, part), layout.pick(stacks, part), now.write, grads)
        return carried | {"grads": layout.put(stacks, part, after)}

    def read_grads(self, carried: dict[str, Any], part: Sequence[int], index: Index) -> list[Array]:
        return read_layer(pick(self.layout.grads, part), self.layout.pick(carried["grads"], part), index)

    def norm(self, sums: BackwardResult) -> Array:
        """Return the global norm of the unscaled gradients."""
        return jnp.sqrt(sums.carried["squares"] + self.layout.squares(sums.ends, sums.state))


class WholeTree(StoredGrads):
    """Everything that the optimizer reads is on the device: any optimizer runs, once, on whole trees."""

    def __init__(self, layout: StreamedPlan, tx: optax.GradientTransformation) -> None:
        super().__init__(layout)
        self.update = build_update(tx, layout.layout)

    def end(self, sums: BackwardResult) -> Result:
        layout = self.layout
        grads = dict(zip((*layout.stacked, *layout.ends), [*sums.carried["grads"], *sums.ends], strict=True))
        tree = jax.tree.structure(sums.state.params)
        mean = [layout.mean(grads[i]) for i in range(len(grads))]
        return self.update(sums.state, sums.loss, jax.tree.unflatten(tree, mean))


class ByLayers(StoredGrads):
    """The update is a loop over layers, and over each group's tiles, whose records come from where they rest and go back."""

    def __init__(self, layout: StreamedPlan, update: RecordUpdate) -> None:
        super().__init__(layout)
        self.record_update, self.records = update, update.records
        # The layer updated first is the one whose gradient was stored last: on disk that write is done meanwhile.
        self.ends_first = layout.layout.disk is not None

    def end(self, sums: BackwardResult) -> Result:
        layout, update, records, state = self.layout, self.record_update, self.records, sums.state
        # What the update fetches first comes after backward, not before it.
        plans, squares = wait_for(sums.plans, sums.carried["squares"], layout.mesh)
        sums = dataclasses.replace(sums, carried=sums.carried | {"squares": squares})
        norm = self.norm(sums)
        ok, factor = jnp.isfinite(norm), clip_factor(norm, self.config.clip_norm)

        def ready(grad: Array) -> Array:
            grad = layout.unscaled(grad, state)
            return grad if self.config.clip_norm is None else grad * factor

        states = records.flat(state)
        shared = records.shared_of(states)
        ends = [ready(g) for g in sums.ends]
        if self.ends_first:
            states = update.update_ends(states, ends, shared, sums.loss, ok, sums.one)
            if (token := records.end_token(states)) is not None:
                plans, _ = wait_for(plans, token, layout.mesh)
        loops = [UpdateLoop(layout.schedule.phase("update"), plans["update"], layout.blocks, layout.layout.device_layers)]
        for group, tiles in layout.loops:
            at = partial(Tile.numbered, of=group.num_tiles)
            loops.append(UpdateLoop(tiles.phase("update"), plans[tiles.plan("update")], group.leaves, 0, at))
        before: list[Array] = []
        for loop in loops:
            if before:  # the disk sees one order
                loop = dataclasses.replace(loop, plan=wait_for(loop.plan, before, layout.mesh)[0])
            states = self.update_records(sums, states, loop, ready, ok)
            before = records.tokens(states, loop.part) or before
        if not self.ends_first:
            states = update.update_ends(states, ends, shared, sums.loss, ok, sums.one)
        return closed(update, sums, states, norm)

    def update_records(
        self, sums: BackwardResult, states: FlatState, loop: "UpdateLoop", ready: Callable[[Array], Array], ok: Array
    ) -> FlatState:
        """Update the records of one loop.

        Args:
          sums: of the step.
          states: all leaves.
          loop: over the records.
          ready: a stored gradient -> the one to update with.
          ok: bool[], whether to update at all.
        """
        layout, records, part, at = self.layout, self.records, loop.part, loop.at
        shared = records.shared_of(states)
        old_away = states.master is None and layout.params_away
        opt_away = self.config.opt_state != "device"
        opt_ahead = opt_away and not (loop.on_device and (old_away or layout.grads_away))
        num = len(part)

        def fetch(states: FlatState, layer: Array) -> list[Array]:
            record = self.read_grads(sums.carried, part, at(layer)) if layout.grads_away else []
            record += records.read_params(states, part, at(layer)) if old_away else []
            return record + (records.read_opt(states, part, at(layer)) if opt_ahead else [])

        def tick(states: FlatState, now: Tick) -> tuple[FlatState, Any]:
            taken, here, there = list(now.taken or []), now.index(at), now.write_index(at)
            grads = self.read_grads(sums.carried, part, here) if not layout.grads_away else taken[:num]
            taken = taken[num:] if layout.grads_away else taken
            old: list[Array] = []
            if states.master is None:
                old, taken = (taken[:num], taken[num:]) if old_away else (records.read_params(states, part, here), taken)
            opt = taken if opt_ahead and not now.on_device else records.read_opt(states, part, here)
            mean = [ready(g) for g in grads]
            return self.record_update.update_layer(states, part, there, mean, old + opt, shared, sums.loss, ok, now.landing)

        return run_phase(loop.phase, loop.plan, states, tick, sums.one, fetch=fetch, device_layers=loop.on_device)


@dataclasses.dataclass(frozen=True)
class UpdateLoop:
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


class InBackward:
    """A layer is updated in the tick that makes its gradient, which is never stored."""

    ends_first = False

    def __init__(self, layout: StreamedPlan, update: RecordUpdate) -> None:
        self.layout, self.record_update, self.records = layout, update, update.records

    def begin(self, state: TrainState, loss: Array, grads: list[Array], token: Array) -> dict[str, Any]:
        del grads
        return {"squares": jnp.float32(0), "states": self.records.flat(state), "loss": loss, "token": token}

    def params(self, state: TrainState, carried: dict[str, Any]) -> list[Array]:
        del state
        return [carried["states"].params[i] for i in self.layout.stacked]

    def use(self, state: TrainState, carried: dict[str, Any], made: RecordGrads) -> tuple[dict[str, Any], Any]:
        layout, records, states, now, part = self.layout, self.records, carried["states"], made.now, made.part
        old = layout.on_shards(made.params, part) if states.master is None else []
        read = old + records.read_opt(states, part, now.index())
        squares = carried["squares"] + layout.squares(made.grads, state)
        shared, mean, ok = records.shared_of(states), [layout.mean(g) for g in made.grads], jnp.isfinite(squares)
        states, landing = self.record_update.update_layer(
            states, part, now.write_index(), mean, read, shared, carried["loss"], ok, made.landing
        )
        return carried | {"states": states, "squares": squares}, landing

    def end(self, sums: BackwardResult) -> Result:
        update, states = self.record_update, sums.carried["states"]
        norm = jnp.sqrt(sums.carried["squares"] + self.layout.squares(sums.ends, sums.state))
        ends, shared = [self.layout.mean(g) for g in sums.ends], self.records.shared_of(states)
        states = update.update_ends(states, ends, shared, sums.loss, jnp.isfinite(norm), sums.one)
        return closed(update, sums, states, norm)
