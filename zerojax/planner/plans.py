"""A plan: the chosen config, its bytes in each tier, its step time, and its wear of the disk.

All seconds of a plan are predicted, and all bytes are counted before anything runs. The plan shows
the rates that it uses, and their sources.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from host_offload.tiers import TIERS
from zerojax.config import ZeroConfig
from zerojax.costs import LANES, Estimate, Grid, StepTime
from zerojax.machines import Machine, format_bytes
from zerojax.planner.candidates import MIN_GAIN
from zerojax.planner.pictures import build_page, draw_plan

TRACED = ("compute", "up", "down", "read", "write")
"""Lanes that a trace of swapping shows next to the measured moves."""


class PlanError(ValueError):
    """Nothing fits.

    The message has the tier, the needed and available bytes, and the nearest change that fits.

    Attributes:
      tier: tier that lacks the most in the config that comes nearest: "device", "pinned_host",
        "nvme", on a CPU "device and pinned_host"; or "days of the disk"; "" if no config can be
        built.
      needed: bytes of the tier that one device needs; or days.
      had: bytes of the tier that one device may use; or days.
    """

    def __init__(self, message: str, tier: str = "", needed: float = 0.0, had: float = 0.0) -> None:
        """Create the error.

        Args:
          message: message of the error.
          tier: tier that lacks the most.
          needed: bytes, or days, that are needed.
          had: bytes, or days, that are available.
        """
        super().__init__(message)
        self.tier = tier
        self.needed = needed
        self.had = had


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """A config that lost: it is slower, or it is less plain and saves less than `MIN_GAIN`.

    Attributes:
      seconds: predicted seconds of its step.
      fields: its fields that differ from the default.
    """

    seconds: float
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the seconds and the fields as text."""
        return f"{self.seconds:.4g} s: {_named(self.fields)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """Bytes of the compiled program next to the plan's.

    Attributes:
      device_bytes: bytes per device of arguments, undonated results and temporaries, plus records
        outside the program.
      planned_bytes: bytes per device in the plan.
      host_bytes: bytes per device of arguments in pinned host memory.
      planned_host_bytes: bytes per device in pinned host memory in the plan.
      sent: bytes that a device sends over `data` and `fsdp` per step, by collective.
      planned_sent: bytes that a device sends per step in the plan, by collective.
    """

    device_bytes: int
    planned_bytes: int
    host_bytes: int
    planned_host_bytes: int
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    planned_sent: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Return the compiled and the planned device bytes as text."""
        off = self.planned_bytes / self.device_bytes - 1
        return (
            f"compiled: {format_bytes(self.device_bytes)} per device, "
            f"planned {format_bytes(self.planned_bytes)} ({off:+.1%})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The config chosen for a model on a machine, with its predicted costs.

    Attributes:
      config: config to build the step with.
      name: description of the model.
      grid: sizes of the mesh axes.
      machine: machine that was planned for.
      tiles: number of tiles in which the layers' MLPs run, for a plan from sizes; 1 means untiled.
        It does not describe a model's own tiles.
      bytes: bytes per device, {tier: {kind: bytes}}, as `program.memory` counts them for the
        config's program. If no program can be built from sizes, which a note reports, they are
        estimates, and "working" is what the backward of one layer, or the head, needs.
      peak_bytes: estimated peak bytes of the device: its states, and the phase that holds the most,
        including the working memory of a layer or the head. `bytes` has the most of each kind in
        any phase, and no working memory.
      capacity: bytes of each tier that one device may use; None if unknown.
      time: predicted seconds of the step, by lane.
      estimate: estimate that the prediction is based on: schedules, work of each lane, rates.
      tokens: tokens per step; rows if the number of tokens is unknown.
      flops: the model's FLOPs per step, on all devices.
      hardware_flops: FLOPs per step including recomputation, on all devices.
      link_bytes: bytes that one device moves over the host link per step: "up" and "down".
      disk_bytes: bytes that one node's disks read and write per step: "read" and "write".
      collectives: bytes that a device sends per step, by collective.
      beaten: other configs that fit, the fastest first. Configs faster than the plan are less
        plain, and save less than `MIN_GAIN`.
      notes: what the plan could not consider, and what it assumes.
      source: source of the seconds of compute.
      search: number of configs that were examined, and how.
      validated: bytes of the compiled program, or None.
      length: tokens of a sequence, if the plan is for the longest ones that fit; else None.
      block: tokens whose multiples were tried for `length`.
    """

    config: ZeroConfig
    name: str
    grid: Grid
    machine: Machine
    tiles: int
    bytes: Mapping[str, Mapping[str, int]]
    capacity: Mapping[str, float | None]
    time: StepTime
    tokens: int
    flops: float
    hardware_flops: float
    link_bytes: Mapping[str, float]
    disk_bytes: Mapping[str, float]
    collectives: Mapping[str, float]
    peak_bytes: int
    beaten: tuple[RunnerUp, ...]
    notes: tuple[str, ...]
    source: str
    search: str
    estimate: Estimate = dataclasses.field(repr=False, compare=False)
    validated: Validated | None = None
    length: int | None = None
    block: int | None = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.time.seconds

    @property
    def device_bytes(self) -> int:
        """Bytes that a device must have for the plan to fit.

        This is the sum of `bytes["device"]`, or `peak_bytes` if that is more.
        """
        return max(sum(self.bytes["device"].values()), self.peak_bytes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on all devices together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """The model's FLOP/s over the vendor's peak of all devices; None if the peak is unknown."""
        return self._of_peak(self.flops)

    @property
    def hfu(self) -> float | None:
        """FLOP/s including recomputation over the vendor's peak; None if the peak is unknown."""
        return self._of_peak(self.hardware_flops)

    def _of_peak(self, flops: float) -> float | None:
        peak = self.machine.peak_flops.get(self.config.precision)
        return flops / self.seconds / (peak * self.grid.devices) if peak and flops else None

    @property
    def disk_bytes_a_day(self) -> float:
        """Bytes that a node's disks write per day of steps."""
        return self.disk_bytes["write"] / self.seconds * 86400

    @property
    def disk_days(self) -> float | None:
        """Days until a node's disks have written their rated bytes (TBW).

        None if nothing is written or the rating is unknown.
        """
        rated = self.machine.disk_tbw_bytes
        return rated / self.disk_bytes_a_day if rated and self.disk_bytes_a_day else None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of `config` that differ from the default."""
        return changed(self.config)

    @property
    def title(self) -> str:
        """The model, the machine, the mesh, and the seconds of a step, as text."""
        shape = (
            ", ".join(f"{axis}={n}" for axis, n in self.grid._asdict().items() if n > 1)
            or "one device"
        )
        return (
            f"{self.name} on {self.machine.name} ({shape}): {self.seconds:.4g} s a step, predicted"
        )

    @property
    def spans(self) -> tuple[tuple[str, str, float, float], ...]:
        """Work of the lanes of `TRACED`.

        Each is (lane, label with the layer, start, stop), in seconds from the step's start.
        """
        spans = [span for span in self.time.spans if span.lane in TRACED]
        return tuple(
            (s.lane, f"{s.label} {s.layer}" if s.layer >= 0 else s.label, s.start, s.stop)
            for s in spans
        )

    def to_json(self) -> str:
        """Return the plan's bytes, seconds and ratios as JSON, without the spans of lanes."""
        time = self.time
        lanes = {
            lane: {
                "busy": time.busy[lane],
                "hidden": time.hidden[lane],
                "exposed": time.exposed[lane],
            }
            for lane in LANES
        }
        document = {
            "config": {name: _plain(value) for name, value in self.fields.items()},
            "model": self.name,
            "mesh": self.grid._asdict(),
            "machine": self.machine.name,
            "nodes": self.machine.nodes,
            "tiles": self.tiles,
            "bytes": {tier: dict(kinds) for tier, kinds in self.bytes.items()},
            "capacity": dict(self.capacity),
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "phases": [
                {"name": p.name, "seconds": p.seconds, "bound_by": p.bound_by} for p in time.phases
            ],
            "lanes": lanes,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "link_bytes": dict(self.link_bytes),
            "disk_bytes": dict(self.disk_bytes),
            "disk_bytes_a_day": self.disk_bytes_a_day,
            "disk_days": self.disk_days,
            "collectives": dict(self.collectives),
            "beaten": [
                {"seconds": b.seconds, "fields": {k: _plain(v) for k, v in b.fields.items()}}
                for b in self.beaten
            ],
            "notes": list(self.notes),
            "source": self.source,
            "search": self.search,
            "validated": None if self.validated is None else dataclasses.asdict(self.validated),
            "length": self.length,
            "block": self.block,
        }
        return json.dumps(document, indent=2)

    def __str__(self) -> str:
        """Return the plan as text."""
        rows = [
            self.title,
            f"  config      {_named(self.fields) or 'the default'}"
            + (f"; MLPs in {self.tiles} tiles" if self.tiles > 1 else ""),
        ]
        if self.length is not None:
            rows.append(
                f"  length      {self.length:,} tokens per sequence, the longest multiple of "
                f"{self.block:,} that fits"
            )
        rates = [f"{self.tokens_per_second:,.0f} tokens/s"]
        rates += [
            f"{name} {100 * value:.1f} %"
            for name, value in (("MFU", self.mfu), ("HFU", self.hfu))
            if value is not None
        ]
        rows.append(f"  speed       {', '.join(rates)}")
        for tier in TIERS:
            kinds = {kind: n for kind, n in self.bytes[tier].items() if n}
            if kinds:
                had = self.capacity[tier]
                of = "" if had is None else f" of {format_bytes(had)}"
                parts = ", ".join(
                    f"{kind} {format_bytes(n)}"
                    for kind, n in sorted(kinds.items(), key=lambda item: -item[1])
                )
                rows.append(
                    f"  {tier:<11} {format_bytes(sum(kinds.values()))}{of} a device: {parts}"
                )
        rows.append(
            f"  peak        {format_bytes(self.peak_bytes)} per device, including working memory; "
            "estimated"
        )
        for name, moved in (
            ("link", self.link_bytes),
            ("disk", self.disk_bytes),
            ("network", self.collectives),
        ):
            if any(moved.values()):
                of = "a node" if name == "disk" else "a device"
                rows.append(
                    f"  {name:<11} "
                    f"{', '.join(f'{way} {format_bytes(n)}' for way, n in moved.items() if n)} "
                    f"a step, {of}"
                )
        if self.disk_bytes_a_day:
            days = "" if self.disk_days is None else f", {self.disk_days:,.0f} days to its TBW"
            written = format_bytes(self.disk_bytes_a_day)
            rows.append(f"  wear        {written} written per day and node{days}")
        rows += ["  " + line for line in str(self.time).splitlines()]
        rows += [f"  {self._against(other)}" for other in self.beaten]
        rows += [f"  note        {note}" for note in self.notes]
        rows += [f"  {self.validated}"] if self.validated is not None else []
        return "\n".join([*rows, f"  seconds of compute: {self.source}; {self.search}"])

    def _against(self, other: RunnerUp) -> str:
        """Return a line about another config: that it is slower, or faster but less plain."""
        if other.seconds >= self.seconds:
            return f"beaten      {other}"
        return (
            f"less plain  {other} ({1 - other.seconds / self.seconds:.1%} faster, "
            f"but {MIN_GAIN:.0%} required)"
        )

    def svg(self) -> str:
        """Return the plan as an SVG document: bytes by tier, the timeline, and its efficiency."""
        return draw_plan(self)

    def html(self) -> str:
        """Return the plan as an HTML document: the SVG, followed by the plan as text."""
        return build_page(self)


def changed(config: ZeroConfig) -> dict[str, Any]:
    """Return the fields of a config that differ from the default."""
    default = ZeroConfig()
    names = [field.name for field in dataclasses.fields(ZeroConfig)]
    return {
        name: getattr(config, name)
        for name in names
        if getattr(config, name) != getattr(default, name)
    }


def _named(fields: Mapping[str, Any]) -> str:
    """Return fields as keyword arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _plain(value: Any) -> Any:
    """Return a field's value in a form that JSON can hold."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: _plain(v) for k, v in dataclasses.asdict(value).items()}
    return value
