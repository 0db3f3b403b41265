"""What a config needs on a machine, given a workload: bytes by tier, schedule, work of each lane.

    layer_runs     runs of equal layers, and what each layer saves for backward
    step_records   bytes of each record, and the schedule that the step would follow
    step_bytes     bytes of each tier in the phase that holds the most
    step_work      seconds of each layer, and bytes of collectives
    timing         seconds of the step, from a walk through the schedule

`Estimate.least` is a lower bound that needs no walk: no lane can do its work in less time than its
bytes over its rate, and compute waits for whatever it cannot overlap.
"""

import dataclasses
import functools
from collections.abc import Mapping

from host_offload.schedule import StepPlan
from host_offload.tiers import TIERS
from zerojax.config import ZeroConfig, frozen_tier
from zerojax.costs.lane_times import LayerWork, StepTime, UnstackedWork, Wires
from zerojax.costs.layer_runs import list_runs
from zerojax.costs.step_bytes import StepBytes
from zerojax.costs.step_records import StepRecords
from zerojax.costs.step_work import StepWork
from zerojax.costs.timing import step_time
from zerojax.costs.workload import Grid, Workload
from zerojax.machines import Machine


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
        time = step_time(self.steps, self.layers, self.unstacked, wires, repeats=self.repeats)
        return time.seconds

    @functools.cached_property
    def moved(self) -> dict[str, int]:
        """Bytes per device and step moved in each lane: "up", "down", "read" and "write"."""
        return {lane: self.steps.moved(lane) for lane in ("up", "down", "read", "write")}

    @functools.cached_property
    def least(self) -> float:
        """Lower bound of the step's seconds."""
        compute = self.unstacked.embed + self.unstacked.head + self.unstacked.embed_backward
        network = 0.0
        host = 0.0
        for schedule, work in zip(self.steps.stacks.values(), self.layers, strict=True):
            num_layers = schedule.num_layers
            compute += num_layers * (work.forward + work.backward)
            host += num_layers * work.host
            if not schedule.gather_ahead:  # compute waits for both gathers of a layer
                network += num_layers * (2 * work.gather)
        compute *= self.repeats
        network *= self.repeats

        wires = self.wires
        moved = self.moved
        up = moved["up"] / wires.up
        down = moved["down"] / wires.down
        read = moved["read"] / wires.read
        write = moved["write"] / wires.write
        disk = max(read, write, (moved["read"] + moved["write"]) / wires.disk_both)
        if wires.shares_cores:
            return max(disk, compute + network + host + up + down)
        link = max(up, down, (moved["up"] + moved["down"]) / wires.link_both)
        return max(compute + network, link, disk, host)


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
    wires = _build_wires(machine, config, shares_cores)
    records = StepRecords(workload, config, grid, shares_cores)
    work = StepWork(records, machine)
    runs = list_runs(config, workload)
    steps = records.list_operations(runs)
    tiled_steps = records.list_operations(runs, tiles) if tiles > 1 else steps
    recomputed = (
        run.num_layers * (run.saved.backward - run.stack.backward["save"]) for run in runs
    )
    return Estimate(
        config=config,
        tiles=tiles,
        bytes=StepBytes(records, runs, tiled_steps, tiles).by_tier(),
        steps=steps,
        layers=tuple(map(work.layer_work, runs)),
        unstacked=work.unstacked_work(),
        wires=wires,
        repeats=records.repeats,
        collectives=work.collectives(),
        again=sum(recomputed),
    )


def _build_wires(machine: Machine, config: ZeroConfig, shares_cores: bool) -> Wires:
    """Return the rates of host link and disk per device that a config uses.

    Rates that the config does not use are not required.

    Args:
      machine: machine whose figures are used.
      config: config of the step.
      shares_cores: whether the devices are threads of a CPU.

    Raises:
      ValueError: the machine lacks a figure that the config needs.
    """
    tiers = {config.params, config.grads, config.opt_state, frozen_tier(config)}
    tiers |= _tiers_of_activations(config)
    if tiers == {"device"}:
        return Wires(shares_cores=shares_cores)
    up, down, link_both = machine.needs("link_up", "link_down", "link_both")
    wires = Wires(up=up, down=down, link_both=link_both, shares_cores=shares_cores)
    if "nvme" not in tiers:
        return wires
    read, write, disk_both = machine.needs("disk_read", "disk_write", "disk_both")
    devices = machine.devices_per_node
    return dataclasses.replace(
        wires, read=read / devices, write=write / devices, disk_both=disk_both / devices
    )


def _tiers_of_activations(config: ZeroConfig) -> set[str]:
    """Return the tiers that saved activations use, besides those of the activation modes."""
    activations = config.activations
    segments = [config] if isinstance(activations, str) else activations
    tiers = {segment.activations for segment in segments if segment.activations in TIERS}
    if any(segment.offloaded_names for segment in segments):
        tiers.add("pinned_host")
    return tiers
