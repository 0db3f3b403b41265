"""What a config needs on a machine, given a workload: bytes by tier, schedule, work of each lane.

The bytes of a model's state follow `zerojax.formulas.memory`, tier by tier: b bytes per parameter
in kind k, sharded over N if its stage says so. As in `zerojax.memory.program`, these bytes are
added:

    gathered      the largest layer, embedding or head that is unsharded at one time; two layers
                  with gather_ahead
    in_flight     records in flight (`Schedule.in_flight`)
    activations   saved activations: of all microbatches in a streamed step, of one in a resident
                  step
    working       what the backward of one layer, or the head, needs in addition

Each is counted in the phase that holds the most in total: head, backward or update.

Seconds are `zerojax.costs.timing`'s, for the schedule that the step would follow. `Estimate.least`
is a lower bound that needs no walk: no lane can do its work in less time than its bytes over its
rate, and compute waits for whatever it cannot overlap.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from host_offload.host_update import LAG
from host_offload.schedule import (
    LATE_UNSTACKED,
    UNSTACKED_PIECES,
    Op,
    Phase,
    Schedule,
    StepPlan,
    TiledSchedule,
    UnstackedLeaf,
    UnstackedMove,
    build_unstacked,
)
from host_offload.tiers import TIERS
from zerojax.activations import MODES
from zerojax.config import ZeroConfig, frozen_tier, grads_in_float32, reduces_once, streams
from zerojax.costs.timing import LayerWork, StepTime, UnstackedWork, Wires, step_time
from zerojax.costs.workload import CHECKPOINTED, Grid, StackWork, Workload
from zerojax.formulas import state_bytes
from zerojax.machines import Machine
from zerojax.optim import LEAST_BYTES, MOST_PIECES
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES
from zerojax.state import host_update
from zerojax.streamed import RunFacts, run_schedule

_RESIDENT = {
    "params": "device",
    "grads": "device",
    "opt_state": "device",
    "update_on": "device",
    "prefetch_distance": 0,
    "gather_ahead": False,
    "opt_state_device_fraction": 0.0,
    "delayed_update": False,
}
"""Config fields for the schedule of a step whose layers stay on the device."""
Bytes = dict[str, dict[str, int]]
"""Bytes per device by tier and kind."""


@dataclasses.dataclass(frozen=True, eq=False)
class Estimate:
    """Bytes, schedule and seconds of a config on a machine.

    Attributes:
      config: config of the step.
      tiles: number of tiles in which the layers' MLPs run; 1 means untiled.
      bytes: bytes per device, by tier and kind.
      steps: all operations of the step, in order, with their bytes.
      layers: seconds of one layer, for each run of layers.
      unstacked: seconds of embedding and head.
      wires: rates of host link and disk per device.
      repeats: number of microbatches that a resident step runs one after another.
      collectives: bytes that a device sends per step, by collective.
      again: seconds of recomputation per step, in all layers and microbatches.
    """

    config: ZeroConfig
    tiles: int
    bytes: Mapping[str, Mapping[str, int]]
    steps: StepPlan
    layers: tuple[LayerWork, ...]
    unstacked: UnstackedWork
    wires: Wires
    repeats: int
    collectives: Mapping[str, float]
    again: float

    def needed(self, tier: str) -> int:
        """Return the bytes per device needed in a tier."""
        return sum(self.bytes[tier].values())

    @functools.cached_property
    def time(self) -> StepTime:
        """Seconds of the step, from a walk through its schedule."""
        return step_time(self.steps, self.layers, self.unstacked, self.wires, repeats=self.repeats)

    def seconds_with(self, wires: Wires) -> float:
        """Return the seconds of the step at other rates of host link and disk."""
        return step_time(
            self.steps, self.layers, self.unstacked, wires, repeats=self.repeats
        ).seconds

    @functools.cached_property
    def moved(self) -> dict[str, int]:
        """Bytes per device and step moved in each lane: "up", "down", "read" and "write"."""
        return {lane: self.steps.moved(lane) for lane in ("up", "down", "read", "write")}

    @functools.cached_property
    def least(self) -> float:
        """Lower bound of the step's seconds."""
        rates = self.wires
        moved = self.moved
        compute = self.unstacked.embed + self.unstacked.head + self.unstacked.embed_backward
        network = host = 0.0
        for schedule, work in zip(self.steps.stacks.values(), self.layers, strict=True):
            n = schedule.num_layers
            compute += n * (work.forward + work.backward)
            network += n * (2 * work.gather if not schedule.gather_ahead else 0.0)
            host += n * work.host
        compute *= self.repeats
        link = max(
            moved["up"] / rates.up,
            moved["down"] / rates.down,
            (moved["up"] + moved["down"]) / rates.link_both,
        )
        disk = max(
            moved["read"] / rates.read,
            moved["write"] / rates.write,
            (moved["read"] + moved["write"]) / rates.disk_both,
        )
        if rates.shares_cores:
            return max(
                disk,
                compute
                + network * self.repeats
                + host
                + moved["up"] / rates.up
                + moved["down"] / rates.down,
            )
        return max(compute + network * self.repeats, link, disk, host)


def build_wires(machine: Machine, config: ZeroConfig, shares_cores: bool) -> Wires:
    """Return the rates of host link and disk per device that a config uses.

    Rates that the config does not use are not required.

    Args:
      machine: machine whose figures are used.
      config: config of the step.
      shares_cores: whether the devices are threads of a CPU.

    Raises:
      ValueError: the machine lacks a figure that the config needs.
    """
    tiers = {
        config.params,
        config.grads,
        config.opt_state,
        frozen_tier(config),
        *_tiers_of_activations(config),
    }
    if tiers == {"device"}:
        return Wires(shares_cores=shares_cores)
    up, down, both = machine.needs("link_up", "link_down", "link_both")
    if "nvme" not in tiers:
        return Wires(up=up, down=down, link_both=both, shares_cores=shares_cores)
    read, write, disk_both = (
        n / machine.devices_per_node for n in machine.needs("disk_read", "disk_write", "disk_both")
    )
    return Wires(
        up=up,
        down=down,
        link_both=both,
        read=read,
        write=write,
        disk_both=disk_both,
        shares_cores=shares_cores,
    )


def _tiers_of_activations(config: ZeroConfig) -> set[str]:
    kept = config.activations
    of_each = [kept] if isinstance(kept, str) else [segment.activations for segment in kept]
    named = [config] if isinstance(kept, str) else list(kept)
    tiers = {tier for tier in of_each if tier in TIERS}
    return tiers | ({"pinned_host"} if any(each.offloaded_names for each in named) else set())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What one run of equal layers saves, per layer and device.

    Attributes:
      num_layers: number of layers in the run.
      tier: tier of the layer's input and of offloaded values.
      device: bytes on the device.
      away: bytes in `tier`.
      backward: seconds of backward, including recomputation.
      working: bytes that backward needs in addition to saved bytes.
      mode: activation mode.
    """

    num_layers: int
    tier: str
    device: int
    away: int
    backward: float
    working: int
    mode: str


def _runs(config: ZeroConfig, stack: StackWork, skipped: int) -> list[Kept]:
    """Return a stack's runs of equal layers; `skipped` is the number of layers before the stack."""
    if isinstance(config.activations, str):
        return [
            build_kept(
                stack,
                stack.num_layers,
                config.activations,
                config.saved_names,
                config.offloaded_names,
            )
        ]
    runs = list[Kept]()
    first = 0
    for segment in config.activations:
        if skipped <= first < skipped + stack.num_layers:
            names = (segment.saved_names, segment.offloaded_names)
            runs.append(build_kept(stack, segment.num_layers, segment.activations, *names))
        first += segment.num_layers
    return runs


def build_kept(
    stack: StackWork, num_layers: int, activations: str, saved: Any, offloaded: Any
) -> Kept:
    """Return what a run of equal layers saves.

    Args:
      stack: work and bytes of the run's stack.
      num_layers: number of layers in the run.
      activations: activation mode, or tier of the activations.
      saved: names of the values saved on the device.
      offloaded: names of the values offloaded to host memory.
    """
    mode = activations if activations in MODES else CHECKPOINTED
    tier = "pinned_host" if offloaded else "device"
    if activations not in MODES:
        tier = activations
    by_name = {value.name: value for value in stack.values}
    if mode == CHECKPOINTED:
        kept = sum(by_name[name].num_bytes for name in saved if name in by_name)
    else:
        kept = 0
    away = sum(by_name[name].num_bytes for name in offloaded if name in by_name)
    # Saved and fetched values are not recomputed.
    if mode == CHECKPOINTED:
        spared = sum(by_name[name].seconds for name in (*saved, *offloaded) if name in by_name)
    else:
        spared = 0.0
    device = stack.kept[mode] + kept
    if activations not in MODES:
        device = device - stack.x_bytes
        away = away + stack.x_bytes
    elif mode != CHECKPOINTED:
        device -= away
    return Kept(
        num_layers=num_layers,
        tier=tier,
        device=max(0, device),
        away=away,
        backward=stack.backward[mode]
        if mode != CHECKPOINTED
        else max(stack.backward["save"], stack.backward[mode] - spared),
        working=stack.working[mode],
        mode=mode,
    )


def estimate(
    workload: Workload,
    config: ZeroConfig,
    grid: Grid,
    machine: Machine,
    *,
    shares_cores: bool = False,
    tiles: int = 1,
) -> Estimate:
    """Estimate a config's bytes and seconds.

    Args:
      workload: workload of the model, on one device of this grid.
      config: config of the step.
      grid: sizes of the mesh axes.
      machine: machine whose figures are used.
      shares_cores: whether the devices are threads of a CPU.
      tiles: number of tiles in which the layers' MLPs run.

    Raises:
      ValueError: the machine lacks a figure that the config needs.
    """
    return _Estimator(workload, config, grid, machine, shares_cores, tiles).estimate()


def _is_regather(op: Op) -> bool:
    """Return whether an operation gathers the updated parameters of stages 1 and 2."""
    return (op.verb, op.record.kind) == ("gather", "params")


class _Estimator:
    def __init__(
        self,
        workload: Workload,
        config: ZeroConfig,
        grid: Grid,
        machine: Machine,
        shares_cores: bool,
        tiles: int,
    ) -> None:
        self.workload = workload
        self.config = config
        self.grid = grid
        self.machine = machine
        self.tiles = tiles
        self.wires = build_wires(machine, config, shares_cores)
        self.row = STAGES[config.stage]
        self.streamed = workload.is_layered and streams(config)
        precision = PRECISIONS[config.precision]
        moments = workload.moment_bytes * (0.5 if config.moments == "bfloat16" else 1.0)
        reduce_dtype = "float32" if grads_in_float32(config) else None
        self.b = state_bytes(
            config.precision,
            moments=8,
            num_microbatches=config.num_microbatches,
            reduce_dtype=reduce_dtype,
        )
        self.state = self.b.master + moments  # bytes per parameter in opt_state's record
        self.master = precision.has_master
        self.on_host = config.update_on == "host"
        self.by_record = {config.params, config.grads, config.opt_state} != {
            "device"
        } or config.update == "in_backward"
        self.repeats = 1 if self.streamed else config.num_microbatches
        self.moves = config.opt_state != "device" and not self.on_host
        self.in_backward = config.update == "in_backward"
        self.reductions = 1 if reduces_once(config) else config.num_microbatches
        if (reduce_dtype and config.reduce_dtype == "float32") or reduces_once(config):
            self.reduced = 4
        else:
            self.reduced = self.b.params
        self.network = self._network()

    def _network(self) -> float:
        """Return the bytes per second of a collective over `fsdp` and `data`.

        The rate is infinite if there is no such collective.
        """
        grid = self.grid
        machine = self.machine
        if grid.batch_shards == 1 and grid.tensor == 1:
            return float("inf")
        within = grid.devices <= machine.devices_per_node
        return machine.need("network_in_node" if within else "network_between_nodes")

    def _tensor_network(self) -> float:
        """Return the bytes per second of a collective over `tensor`.

        Its devices are neighbours, in one node if they fit.
        """
        within = self.grid.tensor <= self.machine.devices_per_node
        return self.machine.need("network_in_node" if within else "network_between_nodes")

    def share(self, sharded: bool) -> float:
        """Return the fraction of a kind that one device stores."""
        return 1 / self.grid.fsdp if sharded else 1.0

    # --- bytes ------------------------------------------------------------------------------------

    def record(self, elements: float, frozen: float = 0.0) -> dict[str, int]:
        """Return the bytes of a record by kind, as `schedule.build_schedule` takes them."""
        b = self.b
        part = elements * self.share(self.row.opt_state)
        on_device = self.config.params == "device"
        sizes = {
            "params": elements * b.params * self.share(self.row.params),
            "gathered": elements * b.params + frozen if self.is_gathered else 0,
            "derivative": elements * (4 if self.reduced == 4 else b.params),
            "grads": part * b.grads,
            "opt_state": part * self.state,
            "frozen": frozen * self.share(self.row.params),
            "handed": part * b.grads,
            "weights": 4 * part if on_device and not self.master else 0,
            "made": part * b.params if on_device else 0,
        }
        return {kind: int(n) for kind, n in sizes.items()}

    @property
    def is_gathered(self) -> bool:
        """Whether layers are gathered into buffers of their own, next to their shards."""
        return (self.row.params and self.grid.fsdp > 1) or self.config.params != "device"

    def grads_shard(self, elements: float) -> int:
        """Return the bytes of a stored gradient."""
        return int(elements * self.b.grads * self.share(self.row.opt_state))

    def device_layers(self, stack: StackWork) -> int:
        """Return the number of a stack's layers whose optimizer state stays on the device.

        The fraction of layers is rounded down.
        """
        return int(round(self.config.opt_state_device_fraction * stack.num_layers, 9))

    def schedule(
        self,
        stack: StackWork,
        run: Kept,
        first: int,
        tiles: int,
        unstacked: Sequence[UnstackedMove],
    ) -> Schedule:
        """Return the schedule of a run of layers that starts at layer `first` of its stack.

        `tiles` is the number of tiles into which its MLPs are cut.
        """
        config = self.config if self.streamed else dataclasses.replace(self.config, **_RESIDENT)
        facts = RunFacts(
            num_layers=run.num_layers,
            device_layers=min(max(0, self.device_layers(stack) - first), run.num_layers)
            if self.streamed
            else 0,
            activations=run.tier if self.streamed and run.away else "device",
            frozen=frozen_tier(config) if self.streamed and stack.frozen_bytes else "device",
            num_tiles={"mlp": tiles} if tiles > 1 else {},
            num_arrays=self.master + 2 * bool(self.workload.moment_bytes),
            has_master=self.master,
            both_ways=self.both_ways,
            is_split=self.grid.fsdp > 1,
        )
        own = stack.elements - (stack.tiled if tiles > 1 else 0)
        sizes = self.record(own, stack.frozen_bytes) | {"activations": run.away}
        return run_schedule(
            config, facts, sizes, tile_bytes=[self.record(stack.tiled / tiles)], unstacked=unstacked
        )

    def steps(self, runs: Sequence[tuple[StackWork, Kept, int]], tiles: int = 1) -> StepPlan:
        """Return all operations of the step; `tiles` is the number of tiles of a layer's record."""
        schedules = dict[str, Schedule]()
        last = 0 if self.in_backward else len(runs) - 1  # last run of backward, or of the update
        leaf = self.unstacked_leaf()
        for n, (stack, run, first) in enumerate(runs):
            if n == last and leaf.tiers["opt_state"] != "device":
                unstacked = [self.unstacked_beside(leaf, stack.elements)]
            else:
                unstacked = []
            schedules[f"{n}" if len(runs) > 1 else ""] = self.schedule(
                stack, run, first, tiles, unstacked
            )
        late = any(phase.stores_late for phase in list(schedules.values())[last].phases)
        leaves = [leaf._replace(is_beside=late), *self.frozen_leaf()]
        return StepPlan(
            schedules, build_unstacked(leaves, self.master, host_update(self.config, self.master))
        )

    def unstacked_leaf(self) -> UnstackedLeaf:
        """Return embedding and head as one leaf; for a plain Model, the full model as one leaf."""
        config = self.config
        workload = self.workload
        updated = workload.unstacked_elements if workload.is_layered else workload.elements
        tiers = {
            "params": config.params,
            "opt_state": config.opt_state if self.on_host or self.moves else "device",
        }
        sizes = self.record(updated) | {
            "params": self.record(workload.unstacked_elements)["params"]
        }
        # If copy engines move it, its smallest array is cut into pieces of at least `LEAST_BYTES`.
        count = min(MOST_PIECES, sizes["opt_state"] * 4 // max(1, int(self.state)) // LEAST_BYTES)
        cut = (
            self.both_ways
            and config.opt_state == "pinned_host"
            and not self.on_host
            and workload.is_layered
        )
        return UnstackedLeaf("unstacked", tiers, sizes, num_pieces=max(1, count) if cut else 1)

    @property
    def both_ways(self) -> bool:
        """Whether copy engines move both directions of the link at the same time."""
        return not self.wires.shares_cores

    def frozen_leaf(self) -> list[UnstackedLeaf]:
        """Return the frozen part of embedding and head, or nothing."""
        size = self.workload.unstacked_frozen_bytes * self.share(self.row.params)
        if size:
            return [
                UnstackedLeaf(
                    "frozen",
                    {"frozen": frozen_tier(self.config)},
                    {"frozen": int(size)},
                    frozen=True,
                )
            ]
        return []

    def unstacked_beside(self, leaf: UnstackedLeaf, elements: float) -> UnstackedMove:
        """Return the move of embedding and head during late stores of records.

        They are cut into pieces if they are larger than a layer.
        """
        away = leaf.tiers["params"] != "device"
        stored = leaf.sizes["opt_state"] + (leaf.sizes["params"] if away else 0)
        loaded = leaf.sizes["opt_state"] + (leaf.sizes["params"] if away and not self.master else 0)
        count = min(
            MOST_PIECES,
            math.ceil(leaf.sizes["opt_state"] / max(1, self.record(elements)["opt_state"])),
        )
        if count <= 1:
            return UnstackedMove(LATE_UNSTACKED, (stored,), (), (loaded,))
        return UnstackedMove(UNSTACKED_PIECES, (stored // count,), (count,), (loaded // count,))

    def estimate(self) -> Estimate:
        """Return the config's bytes, operations and work."""
        config = self.config
        workload = self.workload
        runs = list[tuple[StackWork, Kept, int]]()
        skipped = 0
        for stack in workload.stacks:
            first = 0
            for run in _runs(config, stack, skipped):
                runs.append((stack, run, first))
                first += run.num_layers
            skipped += stack.num_layers
        steps = self.steps(runs)
        in_tiles = self.steps(runs, self.tiles) if self.tiles > 1 else steps
        return Estimate(
            config=config,
            tiles=self.tiles,
            bytes=self.bytes(in_tiles, runs),
            steps=steps,
            layers=tuple(self.work(stack, run) for stack, run, _ in runs),
            unstacked=self.unstacked(),
            wires=self.wires,
            repeats=1 if self.streamed else config.num_microbatches,
            collectives=self.collectives(),
            again=sum(
                run.num_layers * (run.backward - stack.backward["save"]) for stack, run, _ in runs
            ),
        )

    def bytes(self, steps: StepPlan, runs: Sequence[tuple[StackWork, Kept, int]]) -> Bytes:
        """Return the bytes per device by tier and kind."""
        config = self.config
        workload = self.workload
        b = self.b
        share = self.share
        tiers: Bytes = {tier: {} for tier in TIERS}

        def add(tier: str, kind: str, n: float) -> None:
            if n:
                tiers[tier][kind] = tiers[tier].get(kind, 0) + int(n)

        every = workload.elements
        unstacked = workload.unstacked_elements
        add(config.params, "params", every * b.params * share(self.row.params))
        frozen = workload.unstacked_frozen_bytes + sum(
            s.num_layers * s.frozen_bytes for s in workload.stacks
        )
        add(frozen_tier(config), "frozen", frozen * share(self.row.params))
        states = {"master": b.master, "opt_state": self.state - b.master}
        if config.opt_state == "nvme":  # one record on disk
            states = {"opt_state": self.state}
        on_device = sum(self.device_layers(s) * s.elements for s in workload.stacks)
        for kind, size in states.items():
            add("device", kind, on_device * size * share(self.row.opt_state))
            add(config.opt_state, kind, (every - on_device) * size * share(self.row.opt_state))
        blocks = 0 if self.streamed and self.in_backward else every - unstacked
        tier = config.grads if self.streamed else "device"
        add("device", "grads", self.grads_shard(unstacked))
        add(tier, "grads", self.grads_shard(blocks))
        gathered = 0
        if self.is_gathered:
            stacks = (
                workload.stacks if workload.is_layered else ()
            )  # a plain Model gathers leaf by leaf, counted by `largest_unstacked`
            layer = max(
                (s.gathered(self.tiles) * b.params + s.frozen_bytes for s in stacks), default=0
            )
            gathered = int(
                max(layer * (1 + config.gather_ahead), workload.largest_unstacked * b.params)
            )
        count = 1 if self.streamed else config.num_microbatches
        for _, run, _ in runs:
            add(
                run.tier if run.away else "device", "activations", run.num_layers * run.away / count
            )
        add("device", "batch", workload.batch_bytes)
        if reduces_once(
            config
        ):  # each device's unsharded sums, in addition to the shards counted in `grads`
            sums = unstacked if self.streamed else 2 * every
            add("device", "unreduced", 4 * sums * (1 - share(self.row.opt_state)))
        self.add_buffers(add, steps)
        add("device", "slots", self.slots(steps, runs))
        kept = sum(run.num_layers * run.device for _, run, _ in runs) / count + (
            0 if self.streamed else workload.unstacked_kept / count
        )
        # Add the other bytes of the phase that holds the most.
        peak = max(
            self.phases(steps, runs, gathered, int(kept)), key=lambda kinds: sum(kinds.values())
        )
        for kind, n in peak.items():
            add("device", kind, n)
        return tiers

    def phases(
        self, steps: StepPlan, runs: Sequence[tuple[StackWork, Kept, int]], gathered: int, kept: int
    ) -> list[dict[str, int]]:
        """Return the bytes by kind that each phase holds, without states, stored grads and batch.

        The phases are the head, backward, the ticks after backward's last layer, and the update.
        """
        config = self.config
        workload = self.workload
        loaded = steps.unstacked["embed"].moved("up")
        in_flight = self.in_flight(steps)
        working = int(max((run.working for _, run, _ in runs), default=0) / config.num_microbatches)
        head = int(workload.head_working / config.num_microbatches)
        held = {"activations": kept, "gathered": gathered}
        # Records that backward reads to update a layer arrive after the layer's derivative, unless
        # they are in flight during it.
        in_tick = min(map(self._in_tick, steps.stacks.values()), default=0)
        backward = in_flight["backward"] + max(working + gathered - in_tick, 0)
        return [
            held | {"in_flight": loaded + in_flight["forward"], "working": head},
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

    def in_flight(self, steps: StepPlan) -> dict[str, int]:
        """Return the most bytes of records in flight in each phase, without gathered layers.

        "drain" is the part after backward's last layer: late stores of records, and the updates of
        embedding and head.
        """
        workload = self.workload
        most = {
            "forward": 0,
            "backward": 0,
            "drain": 0,
            "update": steps.unstacked["unstacked"].peak_bytes,
        }
        if self.moves and len(steps.unstacked["unstacked"].loops) == 1:
            # Embedding and head are updated at the same time, with float32 gradients in place of
            # the stored ones. The first layer's record, which the update loop prefetches, is
            # already present.
            grads = (
                (4 - self.b.grads) * workload.unstacked_elements * self.share(self.row.opt_state)
            )
            most["update"] += int(grads) + sum(
                map(self._first_record, list(steps.stacks.values())[:1])
            )
        if not self.streamed:
            whole = self.row.opt_state and not self.row.params and self.grid.fsdp > 1
            if self.repeats > 1:  # a microbatch's gradients, in addition to their sums
                most["backward"] += int(workload.elements * self.b.params)
            # New parameters are gathered leaf by leaf, and offloaded optimizer state is loaded and
            # stored leaf by leaf.
            leaf = workload.largest_leaf * (self.b.params if whole else 0.0)
            if self.moves:
                moved = 2 * workload.largest_leaf * self.state * self.share(self.row.opt_state)
            else:
                moved = 0.0
            return most | {"update": int(leaf + moved) + self._whole_update()}
        for part in steps.parts:
            if part.stack is None:
                continue
            schedule = steps.stacks[part.stack]
            assert schedule.record_bytes is not None
            sizes = schedule.record_bytes
            whole = sizes["gathered"] * (1 + schedule.gather_ahead) if part.name != "update" else 0
            if isinstance(schedule, TiledSchedule) and whole:
                whole += max(
                    (loops.flat.record_bytes or {})["gathered"] for loops in schedule.tiles
                )
            is_backward = part.name == "backward"
            most_of_phase = part.phase.layers_peak_bytes if is_backward else part.phase.peak_bytes
            peak = most_of_phase - whole + self._copied(schedule, part.phase)
            if is_backward:
                most["drain"] = max(most["drain"], part.phase.drain_peak_bytes)
            if is_backward and self.config.num_microbatches > 1:
                # Sums over microbatches are float32, in addition to one microbatch's gradient.
                peak += 4 * sizes["derivative"] // (4 if self.reduced == 4 else self.b.params)
            most[part.name] = max(most[part.name], peak)
        if not self.by_record:
            most["update"] += self._whole_update()
        return most

    def _whole_update(self) -> int:
        """Return the additional bytes of a full-tree update on a CPU.

        They are float32 gradients and updates, because XLA fuses less on a CPU.
        """
        if not self.wires.shares_cores or self.by_record:
            return 0
        return int(2 * 4 * self.workload.elements * self.share(self.row.opt_state))

    @staticmethod
    def _first_record(schedule: Schedule) -> int:
        """Return the bytes of the record that the update loop prefetches; 0 without such a loop."""
        updates = [
            loop
            for phase in schedule.phases
            if phase.name == "update"
            for loop in phase.loops
            if loop.start == -1
        ]
        return sum(op.num_bytes for loop in updates for op in loop.ops if op.verb == "fetch")

    @staticmethod
    def _in_tick(schedule: Schedule) -> int:
        """Return the bytes that a backward tick loads and updates after its layer's derivative."""
        phase = schedule.phase("backward")
        if phase.stores_late or schedule.update != "in_backward":
            return 0
        return max(
            sum(op.num_bytes for op in loop.ops if op.verb in ("load", "update"))
            for loop in phase.main
        )

    def _copied(self, schedule: Schedule, phase: Phase) -> int:
        """Return the difference of a loop's peak bytes from its schedule's, as compiled for H200.

        A record is copied out of a ring of several slots. A record on disk is updated in the buffer
        that it was read to, so it takes no second record, but its gradients are float32. Records
        that backward reads in the same tick arrive after the derivative, in the place of its
        temporary memory.
        """
        sizes = schedule.record_bytes
        assert sizes is not None
        taken = sum(sizes[kind] for kind in phase.fetches) if len(phase.preload) > 1 else 0
        # The layer's weights are copied, because the same tick writes the stack they are in.
        if phase.name == "backward" and any(
            _is_regather(op) for loop in phase.main for op in loop.ops
        ):
            taken += sizes["params"]
        if "opt_state" not in phase.writes or schedule.tiers["opt_state"] != "nvme":
            return taken
        grads = sizes["grads"] + (sizes["derivative"] if phase.name == "backward" else 0)
        return taken - sizes["opt_state"] + int((4 / self.b.grads - 1) * grads)

    def add_buffers(self, add: Any, steps: StepPlan) -> None:
        """Add the host memory buffers of the nvme tier.

        Each kind of record has as many buffers to read as to write.
        """
        distance = self.config.prefetch_distance
        for schedule in steps.stacks.values():
            count = min(distance + 1, schedule.num_layers)
            sizes = schedule.record_bytes
            assert sizes is not None
            held_by_host = ("opt_state", "grads") if self.on_host else ()
            on_disk = [
                kind
                for kind, tier in schedule.tiers.items()
                if tier == "nvme" and kind not in held_by_host
            ]
            add("pinned_host", "buffers", 2 * count * sum(sizes[kind] for kind in on_disk))
            if (
                self.on_host and self.config.opt_state == "nvme"
            ):  # records are updated in the buffers they are read to
                add(
                    "pinned_host",
                    "buffers",
                    min(2 * (distance + 1), schedule.num_layers) * sizes["opt_state"],
                )
        workload = self.workload
        if self.config.params == "nvme":
            params = workload.unstacked_elements * self.b.params * self.share(self.row.params)
        else:
            params = 0.0
        on_disk = self.config.opt_state == "nvme"
        updated = workload.unstacked_elements if workload.is_layered else workload.elements
        state = (
            updated
            * self.state
            * self.share(self.row.opt_state)
            * on_disk
            * (1 if self.on_host else 2)
        )
        if not workload.is_layered:  # leaves share buffers, one after another
            state = min(
                state,
                2
                * (distance + 1)
                * workload.largest_leaf
                * self.state
                * self.share(self.row.opt_state),
            )
        add("pinned_host", "buffers", 2 * params + state)

    def slots(self, steps: StepPlan, runs: Sequence[tuple[StackWork, Kept, int]]) -> int:
        """Return the bytes of GPU memory outside the program through which callbacks move records.

        The nvme tier has a slot for each direction in which a kind of record crosses the link. A
        host update has one slot for the records that it stores, and `LAG` slots for new parameters,
        or one if the update is delayed. The runs of a stack share the slots of its states.
        """
        if self.wires.shares_cores or not self.streamed:
            return 0
        # With a host update, the device only reads parameters; other states stay on the host.
        ways = {"params": 1, "grads": 0, "opt_state": 0} if self.on_host else {}
        total = 0
        for (_, _, first), schedule in zip(runs, steps.stacks.values(), strict=True):
            records = [schedule]
            if isinstance(schedule, TiledSchedule):
                records += [loops.flat for loops in schedule.tiles]
            for record in records:
                sizes = record.record_bytes
                assert sizes is not None
                if self.on_host and first == 0:
                    lag = 1 if self.config.delayed_update else LAG
                    total += sizes["handed"] + sizes["weights"] + lag * sizes["made"]
                if record.num_layers == 1:  # nothing to overlap
                    continue
                for kind, tier in record.tiers.items():
                    if tier == "nvme" and (first == 0 or kind == "activations"):
                        total += ways.get(kind, 2) * sizes[kind]
        return total

    # --- work -------------------------------------------------------------------------------------

    def gather(self, elements: float, frozen_bytes: float = 0.0) -> float:
        """Return the seconds of an all_gather of trainable parameters and frozen bytes."""
        n = self.grid.fsdp
        return (elements * self.b.params + frozen_bytes) * (n - 1) / n / self.network

    def reduce(self, elements: float) -> float:
        """Return the seconds of reducing gradients in one step."""
        return self.sent_reduced(elements) / self.network

    def sent_reduced(self, elements: float) -> float:
        """Return the bytes that a device sends to reduce gradients, over all microbatches.

        `elements` is the number of gradient elements.
        """
        return sum(self.reduces(elements).values())

    def reduces(self, elements: float) -> dict[str, float]:
        """Return the bytes that a device sends to reduce `elements` gradients, by collective.

        Shards are scattered over `fsdp` and summed over `data`.
        """
        n = self.grid.fsdp
        d = self.grid.data
        each = elements * self.reduced * self.reductions
        if not self.row.opt_state:
            return {"all_reduce": 2 * each * (n * d - 1) / (n * d)}
        return {"reduce_scatter": each * (n - 1) / n, "all_reduce": 2 * each / n * (d - 1) / d}

    @property
    def gathers_of_unstacked(self) -> int:
        """Number of gathers of embedding and head for forward: one per microbatch."""
        return self.config.num_microbatches

    def regather(self, elements: float) -> float:
        """Return the seconds of the all_gather after an update.

        It is needed if parameters are unsharded and their update is sharded.
        """
        return self.gather(elements) if self.row.opt_state and not self.row.params else 0.0

    def update(self, elements: float) -> float:
        """Return the seconds in which the device updates `elements` parameters."""
        if self.on_host:
            return 0.0
        return elements * self.share(self.row.opt_state) * self.workload.update

    def host_seconds(self, elements: float) -> float:
        """Return the seconds of the host update of `elements` parameters."""
        if not self.on_host:
            return 0.0
        b = self.b
        part = elements * self.share(self.row.opt_state)
        rate = self.machine.need("host_kernel") / self.machine.devices_per_node
        # The kernel reads and writes masters and moments, reads gradients, and writes parameters in
        # 16 bits.
        touched = (
            2 * (self.state if self.master else self.state + b.params)
            + b.grads
            + (b.params if self.master else 0)
        )
        return part * touched / rate

    def work(self, stack: StackWork, run: Kept) -> LayerWork:
        """Return the seconds of one layer of a run."""
        n = stack.elements
        updated = n if self.workload.is_layered else 0  # `unstacked` updates all of a plain Model
        repeats = 1 if self.streamed else self.config.num_microbatches
        if self.grid.tensor > 1:
            sent = stack.sent.get(run.mode, 0.0) / self._tensor_network()
        else:
            sent = 0.0
        gathers = self.row.params
        return LayerWork(
            forward=(stack.forward + sent / 3) / repeats,
            backward=(run.backward + 2 * sent / 3) / repeats,
            update=self.update(updated),
            gather=self.gather(n, stack.frozen_bytes) if gathers else 0.0,
            reduce=self.reduce(n) / repeats,
            regather=self.regather(n),
            host=self.host_seconds(updated),
        )

    def unstacked(self) -> UnstackedWork:
        """Return the seconds of embedding and head; for a plain Model, its full update."""
        config = self.config
        workload = self.workload
        n = workload.unstacked_elements
        repeats = 1 if self.streamed else config.num_microbatches
        updates = n if workload.is_layered else workload.elements
        return UnstackedWork(
            embed=workload.embed / repeats,
            head=workload.head / repeats,
            embed_backward=workload.embed_backward / repeats,
            update=self.update(updates),
            gather=self.gather(n, workload.unstacked_frozen_bytes)
            / 2
            * self.gathers_of_unstacked
            / repeats
            if self.row.params
            else 0.0,
            reduce=self.reduce(n) / repeats,
            host=self.host_seconds(updates),
        )

    def collectives(self) -> dict[str, float]:
        """Return the bytes that a device sends per step, by collective."""
        n = self.grid.fsdp
        b = self.b
        work = self.workload
        gathered = 0.0
        if (
            self.row.params
        ):  # in forward and backward; a streamed step gathers a layer once for all microbatches
            layers = sum(
                s.num_layers * (s.elements * b.params + s.frozen_bytes) for s in work.stacks
            )
            unstacked = work.unstacked_elements * b.params + work.unstacked_frozen_bytes
            gathered = 2 * (
                layers * (1 if self.streamed else self.config.num_microbatches)
                + unstacked * self.gathers_of_unstacked
            )
        elif self.row.opt_state:
            gathered = work.elements * b.params
        sent = {"all_gather": gathered * (n - 1) / n} | self.reduces(work.elements)
        over = sum(s.num_layers * s.sent.get("save", 0.0) for s in self.workload.stacks)
        return {k: v for k, v in (sent | {"tensor": over}).items() if v}
