"""Bytes of a step by tier and kind.

As in `zerojax.memory.program`, these bytes are added to the model's state:

    gathered      the largest layer, embedding or head that is unsharded at one time; two layers
                  with gather_ahead
    in_flight     records in flight (`Schedule.in_flight`)
    activations   saved activations: of all microbatches in a streamed step, of one in a resident
                  step
    working       what the backward of one layer, or the head, needs in addition

Each is counted in the phase that holds the most in total: head, backward, the ticks after
backward's last layer, or update.
"""

from collections.abc import Mapping, Sequence

from host_offload.host_update import HOST_LAG
from host_offload.schedule import Op, Phase, Schedule, StepPhase, StepPlan, TiledSchedule
from host_offload.tiers import TIERS
from zerojax.config import frozen_tier, reduces_once
from zerojax.costs.layer_runs import LayerRun
from zerojax.costs.step_records import StepRecords

Bytes = dict[str, dict[str, int]]
"""Bytes per device by tier and kind."""


class StepBytes:
    """Bytes per device of a step.

    Attributes:
      records: records of the step.
      runs: runs of layers, first layer first.
      steps: all operations of the step, with a schedule for each run.
      tiles: number of tiles in which the layers' MLPs run.
    """

    def __init__(
        self, records: StepRecords, runs: Sequence[LayerRun], steps: StepPlan, tiles: int
    ) -> None:
        """Count nothing yet; `by_tier` does."""
        self.records = records
        self.runs = runs
        self.steps = steps
        self.tiles = tiles
        self._bytes: Bytes = {tier: {} for tier in TIERS}

    def by_tier(self) -> Bytes:
        """Return the bytes per device by tier and kind."""
        self._bytes = {tier: {} for tier in TIERS}
        self._add_states()
        self._add_activations()
        self._add("device", "batch", self.records.workload.batch_bytes)
        self._add_unreduced()
        for schedule in self.steps.stacks.values():
            self._add_layer_buffers(schedule)
        self._add_unstacked_buffers()
        self._add("device", "slots", self._slot_bytes())
        # Add the other bytes of the phase that holds the most.
        peak = max(self._phases(), key=lambda kinds: sum(kinds.values()))
        for kind, num_bytes in peak.items():
            self._add("device", kind, num_bytes)
        return self._bytes

    def _add(self, tier: str, kind: str, num_bytes: float) -> None:
        if num_bytes:
            kinds = self._bytes[tier]
            kinds[kind] = kinds.get(kind, 0) + int(num_bytes)

    # --- states and activations -------------------------------------------------------------------

    def _add_states(self) -> None:
        """Add parameters, optimizer state and stored gradients."""
        records = self.records
        config = records.config
        workload = records.workload
        per_param = records.per_param
        params_share = records.share(records.sharded.params)
        self._add(config.params, "params", workload.elements * per_param.params * params_share)
        frozen = workload.unstacked_frozen_bytes + sum(
            stack.num_layers * stack.frozen_bytes for stack in workload.stacks
        )
        self._add(frozen_tier(config), "frozen", frozen * params_share)

        states = {
            "master": per_param.master,
            "opt_state": records.opt_state_bytes - per_param.master,
        }
        if config.opt_state == "nvme":  # one record on disk
            states = {"opt_state": records.opt_state_bytes}
        opt_state_share = records.share(records.sharded.opt_state)
        on_device = sum(
            records.num_device_layers(stack) * stack.elements for stack in workload.stacks
        )
        away = workload.elements - on_device
        for kind, size in states.items():
            self._add("device", kind, on_device * size * opt_state_share)
            self._add(config.opt_state, kind, away * size * opt_state_share)

        in_layers = workload.elements - workload.unstacked_elements
        if records.is_streamed and records.updates_in_backward:
            in_layers = 0  # their gradients are never stored
        layers_tier = config.grads if records.is_streamed else "device"
        kind = "grads"
        if records.updates_on_host and records.updates_in_forward:
            # All gradients wait in host memory for the next step.
            self._add("pinned_host", "pending", records.grads_shard_bytes(workload.elements))
            in_layers = 0
            if config.params == "device":
                made = workload.elements * per_param.params * opt_state_share
                self._add("pinned_host", "made", made)
        elif records.updates_in_forward:
            # Gradients that the next step's forward applies belong to the state.
            kind = "pending"
        unstacked = records.grads_shard_bytes(workload.unstacked_elements)
        sums = unstacked * records.summed_itemsize / per_param.grads
        if kind == "pending":
            self._add("device", kind, unstacked)
            # Backward sums in the place of the pending gradients if they have the same dtype.
            self._add("device", "grads", 0 if sums == unstacked else sums)
        else:
            self._add("device", kind, max(sums, unstacked))
        # Records on disk are named by their kind alone.
        layers_kind = "grads" if layers_tier == "nvme" else kind
        self._add(layers_tier, layers_kind, records.grads_shard_bytes(in_layers))

    def _add_activations(self) -> None:
        """Add offloaded activations; activations on the device count in their phase."""
        for run in self.runs:
            saved = run.saved
            tier = saved.tier if saved.away_bytes else "device"
            away = run.num_layers * saved.away_bytes / self.records.repeats
            self._add(tier, "activations", away)

    def _add_unreduced(self) -> None:
        """Add each device's unsharded sums, besides the shards that count as "grads"."""
        records = self.records
        if not reduces_once(records.config):
            return
        workload = records.workload
        sums = workload.unstacked_elements if records.is_streamed else 2 * workload.elements
        self._add("device", "unreduced", 4 * sums * (1 - records.share(records.sharded.opt_state)))

    def _kept_bytes(self) -> int:
        """Return the bytes of saved activations on the device."""
        records = self.records
        in_layers = sum(run.num_layers * run.saved.device_bytes for run in self.runs)
        unstacked = 0 if records.is_streamed else records.workload.unstacked_kept
        return int(in_layers / records.repeats + unstacked / records.repeats)

    def _gathered_bytes(self) -> int:
        """Return the bytes of the largest layers, embedding or head that are gathered at a time."""
        records = self.records
        if not records.is_gathered:
            return 0
        workload = records.workload
        params = records.per_param.params
        layer = 0.0
        if workload.is_layered:  # a plain Model gathers leaf by leaf, as `largest_unstacked` counts
            layer = max(
                (
                    stack.gathered(self.tiles) * params + stack.frozen_bytes
                    for stack in workload.stacks
                ),
                default=0.0,
            )
        layers = layer * (1 + records.config.gather_ahead)
        return int(max(layers, workload.largest_unstacked * params))

    # --- phases -----------------------------------------------------------------------------------

    def _phases(self) -> list[dict[str, int]]:
        """Return the bytes by kind that each phase holds, without states, stored grads and batch.

        The phases are the head, backward, the ticks after backward's last layer, and the update.
        """
        num_microbatches = self.records.config.num_microbatches
        working = max((run.saved.working_bytes for run in self.runs), default=0)
        working = int(working / num_microbatches)
        head = int(self.records.workload.head_working / num_microbatches)
        kept = self._kept_bytes()
        gathered = self._gathered_bytes()
        loaded = self.steps.unstacked["embed"].moved("up")
        in_flight = self._in_flight()
        # Records that backward reads to update a layer arrive after the layer's derivative, unless
        # they are in flight during it.
        in_tick = min(map(_updated_in_tick, self.steps.stacks.values()), default=0)
        backward = in_flight["backward"] + max(working + gathered - in_tick, 0)
        return [
            {
                "activations": kept,
                "gathered": gathered,
                "in_flight": loaded + in_flight["forward"],
                "working": head,
            },
            {
                "activations": kept,
                "in_flight": loaded + backward - min(working + gathered, backward),
                "gathered": min(gathered, backward),
                "working": max(0, min(working, backward - gathered)),
            },
            # Drain and update need no saved activations, and do not read embedding and head.
            {"in_flight": in_flight["drain"]},
            {"in_flight": in_flight["update"]},
        ]

    def _in_flight(self) -> dict[str, int]:
        """Return the most bytes of records in flight in each phase, without gathered layers.

        "drain" is the part after backward's last layer: late stores of records, and the updates of
        embedding and head.
        """
        if not self.records.is_streamed:
            return self._in_flight_resident()
        most = {"forward": 0, "backward": 0, "drain": 0, "update": self._unstacked_update_bytes()}
        for step_phase in self.steps.phases:
            if step_phase.stack is None:
                continue
            if step_phase.name == "backward":
                most["drain"] = max(most["drain"], step_phase.phase.drain_peak_bytes)
            peak = self._phase_peak(step_phase, self.steps.stacks[step_phase.stack])
            most[step_phase.name] = max(most[step_phase.name], peak)
        if not self.records.updates_by_record:
            most["update"] += self._full_update_bytes()
        return most

    def _in_flight_resident(self) -> dict[str, int]:
        """Return `_in_flight` for a step whose layers stay on the device."""
        records = self.records
        workload = records.workload
        backward = 0
        if records.repeats > 1:  # a microbatch's gradients, in addition to their sums
            backward = int(workload.elements * records.per_param.params)
        # New parameters are gathered leaf by leaf, and offloaded optimizer state is loaded and
        # stored leaf by leaf.
        sharded = records.sharded
        regathers = sharded.opt_state and not sharded.params and records.grid.fsdp > 1
        leaf = workload.largest_leaf * (records.per_param.params if regathers else 0.0)
        moved = 0.0
        if records.loads_opt_state:
            share = records.share(sharded.opt_state)
            moved = 2 * workload.largest_leaf * records.opt_state_bytes * share
        update = int(leaf + moved) + self._full_update_bytes()
        return {"forward": 0, "backward": backward, "drain": 0, "update": update}

    def _unstacked_update_bytes(self) -> int:
        """Return the bytes in flight while embedding and head are updated."""
        records = self.records
        phase = self.steps.unstacked["unstacked"]
        if not records.loads_opt_state or len(phase.loops) != 1:
            return phase.peak_bytes
        # Embedding and head are updated at the same time, with float32 gradients in place of the
        # stored ones. The first layer's record, which the update loop prefetches, is already
        # present.
        share = records.share(records.sharded.opt_state)
        widened = (4 - records.per_param.grads) * records.workload.unstacked_elements * share
        first_schedule = next(iter(self.steps.stacks.values()))
        return phase.peak_bytes + int(widened) + _first_record_bytes(first_schedule)

    def _phase_peak(self, step_phase: StepPhase, schedule: Schedule) -> int:
        """Return the most bytes in flight in one phase of a run, without gathered layers."""
        sizes = _record_bytes(schedule)
        gathered = 0
        if step_phase.name != "update":
            gathered = sizes["gathered"] * (1 + schedule.gather_ahead)
        if isinstance(schedule, TiledSchedule) and gathered:
            gathered += max(_record_bytes(loops.flat)["gathered"] for loops in schedule.tiles)
        is_backward = step_phase.name == "backward"
        phase = step_phase.phase
        phase_peak = phase.layers_peak_bytes if is_backward else phase.peak_bytes
        peak = phase_peak - gathered + self._copied_bytes(schedule, phase)
        if is_backward and self.records.config.num_microbatches > 1:
            # Sums over microbatches are float32, in addition to one microbatch's gradient.
            peak += 4 * sizes["derivative"] // self.records.reduced_itemsize
        return peak

    def _full_update_bytes(self) -> int:
        """Return the additional bytes of a full-tree update on a CPU.

        They are float32 gradients and updates, because XLA fuses less on a CPU.
        """
        records = self.records
        if not records.shares_cores or records.updates_by_record:
            return 0
        return int(2 * 4 * records.workload.elements * records.share(records.sharded.opt_state))

    def _copied_bytes(self, schedule: Schedule, phase: Phase) -> int:
        """Return the difference of a loop's peak bytes from its schedule's, as compiled for H200.

        A record is copied out of a ring of several slots. A record on disk is updated in the buffer
        that it was read to, so it takes no second record, but its gradients are float32. Records
        that backward reads in the same tick arrive after the derivative, in the place of its
        temporary memory.
        """
        sizes = _record_bytes(schedule)
        is_backward = phase.name == "backward"
        copied = 0
        if len(phase.preload) > 1:
            copied = sum(sizes[kind] for kind in phase.fetches)
        # The layer's weights are copied, because the same tick writes the stack they are in.
        if is_backward and any(_is_regather(op) for loop in phase.main for op in loop.ops):
            copied += sizes["params"]
        if "opt_state" not in phase.writes or schedule.tiers["opt_state"] != "nvme":
            return copied
        grads = sizes["grads"]
        if is_backward:
            grads += sizes["derivative"]
        widened = int((4 / self.records.per_param.grads - 1) * grads)
        return copied - sizes["opt_state"] + widened

    # --- buffers and slots ------------------------------------------------------------------------

    def _add_layer_buffers(self, schedule: Schedule) -> None:
        """Add the host memory buffers of a run's records in the nvme tier.

        Each kind of record has as many buffers to read as to write.
        """
        records = self.records
        distance = records.config.prefetch_distance
        sizes = _record_bytes(schedule)
        kinds_of_host = ("opt_state", "grads") if records.updates_on_host else ()
        on_disk = [
            kind
            for kind, tier in schedule.tiers.items()
            if tier == "nvme" and kind not in kinds_of_host
        ]
        count = min(distance + 1, schedule.num_layers)
        self._add("pinned_host", "buffers", 2 * count * sum(sizes[kind] for kind in on_disk))
        if records.updates_on_host and records.config.opt_state == "nvme":
            # Records are updated in the buffers they are read to.
            count = min(2 * (distance + 1), schedule.num_layers)
            self._add("pinned_host", "buffers", count * sizes["opt_state"])

    def _add_unstacked_buffers(self) -> None:
        """Add the host memory buffers of unstacked leaves in the nvme tier."""
        records = self.records
        config = records.config
        workload = records.workload
        params = 0.0
        if config.params == "nvme":
            params_share = records.share(records.sharded.params)
            params = workload.unstacked_elements * records.per_param.params * params_share
        opt_state = 0.0
        if config.opt_state == "nvme":
            share = records.share(records.sharded.opt_state)
            size = records.opt_state_bytes
            num_buffers = 1 if records.updates_on_host else 2
            opt_state = records.updated_unstacked * size * share * num_buffers
            if not workload.is_layered:  # leaves share buffers, one after another
                num_buffers = 2 * (config.prefetch_distance + 1)
                opt_state = min(opt_state, num_buffers * workload.largest_leaf * size * share)
        self._add("pinned_host", "buffers", 2 * params + opt_state)

    def _slot_bytes(self) -> int:
        """Return the bytes of GPU memory outside the program through which callbacks move records.

        The nvme tier has a slot for each direction in which a kind of record crosses the link. A
        host update has one slot for the records that it stores, and `HOST_LAG` slots for new
        parameters, or one if it uses the previous step's gradients. The runs of a stack share the
        slots of its states.
        """
        records = self.records
        if records.shares_cores or not records.is_streamed:
            return 0
        total = 0
        for run, schedule in zip(self.runs, self.steps.stacks.values(), strict=True):
            total += self._slots_of_schedule(schedule, is_first=run.first == 0)
            if isinstance(schedule, TiledSchedule):
                for loops in schedule.tiles:
                    total += self._slots_of_schedule(loops.flat, is_first=run.first == 0)
        return total

    def _slots_of_schedule(self, schedule: Schedule, is_first: bool) -> int:
        """Return the bytes of the slots of one schedule's records.

        `is_first` says whether its run is the first of its stack.
        """
        updates_on_host = self.records.updates_on_host
        sizes = _record_bytes(schedule)
        total = 0
        if updates_on_host and is_first:
            config = self.records.config
            uses_previous = config.delayed_update or config.update == "in_forward"
            lag = 1 if uses_previous else HOST_LAG
            total += sizes["handed"] + sizes["weights"] + lag * sizes["made"]
        if schedule.num_layers == 1:  # nothing to overlap
            return total
        # With a host update, the device only reads parameters; other states stay on the host.
        ways = {"params": 1, "grads": 0, "opt_state": 0} if updates_on_host else {}
        for kind, tier in schedule.tiers.items():
            if tier == "nvme" and (is_first or kind == "activations"):
                total += ways.get(kind, 2) * sizes[kind]
        return total


def _record_bytes(schedule: Schedule) -> Mapping[str, int]:
    """Return the bytes of a schedule's records by kind."""
    assert schedule.record_bytes is not None
    return schedule.record_bytes


def _is_regather(op: Op) -> bool:
    """Return whether an operation gathers the updated parameters of stages 1 and 2."""
    return (op.verb, op.record.kind) == ("gather", "params")


def _first_record_bytes(schedule: Schedule) -> int:
    """Return the bytes of the record that the update loop prefetches; 0 without such a loop."""
    total = 0
    for phase in schedule.phases:
        if phase.name != "update":
            continue
        for loop in phase.loops:
            if loop.start == -1:
                total += sum(op.num_bytes for op in loop.ops if op.verb == "fetch")
    return total


def _updated_in_tick(schedule: Schedule) -> int:
    """Return the bytes that a backward tick loads and updates after its layer's derivative."""
    phase = schedule.phase("backward")
    if phase.stores_late or schedule.update != "in_backward":
        return 0
    return max(
        sum(op.num_bytes for op in loop.ops if op.verb in ("load", "update")) for loop in phase.main
    )
