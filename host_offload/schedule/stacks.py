"""A full step as one list of phases: of each stack of layers, and of the unstacked leaves.

    embed
    forward         stack by stack, first to last
    head
    backward        stack by stack, last to first
    embed_backward
    update          stack by stack, first to last
    unstacked       update of the unstacked leaves: before the update of the layers, or after it; if
                    forward updates the layers, before `embed`

Each stack has a schedule of its own (`host_offload.schedule.schedule`), which provides its loops. A
loop fills its rings when it begins and empties them before it ends, so stacks share no slot, and
bytes in flight belong to one stack at a time. If some layers of a stack save other values for
backward than the layers next to them, they form a part with loops of its own, and this module
treats each part as a stack.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.schedule.ops import (
    EVERY_LEAF,
    HEAD,
    HEAD_PIECES,
    LATE_UNSTACKED,
    LAYERS,
    UNSTACKED_PIECES,
    Loop,
    Op,
)
from host_offload.schedule.phase import Phase
from host_offload.schedule.schedule import Schedule
from host_offload.schedule.tiles import TiledSchedule

_UNSTACKED = {
    "unstacked": "embed, head",
    EVERY_LEAF: "all parameters",
    HEAD: "head, small leaves",
    HEAD_PIECES: "head, in pieces",
    LATE_UNSTACKED: "embed, head",
    UNSTACKED_PIECES: "embed, head, in pieces",
}
"""Names of unstacked leaves in a table."""
_TABLE_HEADS = ("phase", "ticks", "operation", "of", "numbers", "lane", "bytes", "")
_RIGHT_ALIGNED = ("ticks", "numbers", "bytes")
_BEFORE_UPDATE = ("embed", "forward", "head", "backward", "embed_backward")


def layers_kind(kind: str, stack: str) -> str:
    """Return the name of the records that hold one kind of a stack's layers.

    Args:
      kind: kind of the records, in KINDS.
      stack: name of the stack; "" if it is the only one.
    """
    return f"{kind}.{stack}" if stack else kind


class StepPhase(NamedTuple):
    """One phase of a step.

    Attributes:
      phase: the phase's loops.
      name: "forward", "backward" or "update", or the name of a phase of the unstacked leaves
        (`build_unstacked`).
      stack: name of the stack of layers; None for unstacked leaves.
      group: name of the group of tiles that the phase visits, or "".
    """

    phase: Phase
    name: str
    stack: str | None = None
    group: str = ""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepPlan:
    """All operations of a step, in order.

    Attributes:
      stacks: schedule of each stack of layers by name, in order; "" is the name of the only stack.
      unstacked: phases of the unstacked leaves by name (`host_offload.schedule.build_unstacked`).
      unstacked_first: whether the unstacked leaves are updated before the layers.
      names: names of unstacked leaves in the table, by their name in records; a missing leaf keeps
        its name in records.
      num_microbatches: number of microbatches in each computation of a layer.
      order: names of the phases in the order in which they run; if empty, those of a step over
        stacks of layers.
    """

    stacks: Mapping[str, Schedule]
    unstacked: Mapping[str, Phase] = dataclasses.field(default_factory=dict)
    unstacked_first: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_microbatches: int = 1
    order: tuple[str, ...] = ()

    @functools.cached_property
    def phases(self) -> tuple[StepPhase, ...]:
        """All phases, in the order in which they run."""
        phases = list[StepPhase]()
        for name in self._phase_names():
            if name in self.unstacked:
                phases.append(StepPhase(self.unstacked[name], name))
            stacks = list(self.stacks.items())
            if name == "backward":
                stacks.reverse()
            for stack, schedule in stacks:
                phases += _list_phases(name, stack, schedule)
        return tuple(phases)

    @property
    def updates_in_forward(self) -> bool:
        """Whether forward updates the layers, with the previous step's gradients."""
        return any(schedule.update == "in_forward" for schedule in self.stacks.values())

    def _phase_names(self) -> tuple[str, ...]:
        """Return the names of all phases, in the order in which they run."""
        if self.order:
            return self.order
        if self.updates_in_forward:
            # The previous step's gradients update embedding and head before anything reads them.
            return ("unstacked", *_BEFORE_UPDATE)
        if self.unstacked_first:
            return (*_BEFORE_UPDATE, "unstacked", "update")
        return (*_BEFORE_UPDATE, "update", "unstacked")

    def __repr__(self) -> str:
        """Return one line with the names of the phases."""
        titles = dict.fromkeys(_title(step_phase) for step_phase in self.phases)
        return f"<StepPlan of {', '.join(titles)}; print it for a table>"

    def __str__(self) -> str:
        """Return a table with one row per operation of each loop."""
        rows: list[tuple[str, ...]] = [_TABLE_HEADS]
        for step_phase in self.phases:
            for units, loop, op in _operations(step_phase.phase):
                # Skip gathers of replicated parameters.
                if op.verb != "gather" or op.num_bytes:
                    rows.append(self._row(_title(step_phase), units, loop, op))
        lines = [self._head()] if self.peak_bytes else []
        columns = list[list[str]]()
        for head, *cells in zip(*rows, strict=True):
            columns.append(_align([head, *cells], to_right=head in _RIGHT_ALIGNED))
        lines += ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        return "\n".join(lines)

    def _head(self) -> str:
        """Return the first line of the table."""
        phase, num_bytes = self.peak
        head = f"at most {num_bytes:,} bytes in flight on a device, in {phase}"
        if self.num_microbatches > 1:
            head += f"; a layer computes its {self.num_microbatches} microbatches in one tick"
        return head

    def _row(self, phase: str, units: Sequence[str], loop: Loop, op: Op) -> tuple[str, ...]:
        """Return the cells of an operation.

        `units` are what the loops around it count, such as "tile", from the outside.
        """
        record = op.record.kind
        ticks = f"{loop.start}"
        numbers = f"{op.number}"
        if op.record.leaves != LAYERS:
            leaves = self.names.get(op.record.leaves)
            record += f" of {leaves or _UNSTACKED.get(op.record.leaves, op.record.leaves)}"
        if loop.trips > 1:
            ticks += f" .. {loop.stop - 1}"
            numbers += f" .. {op.number + loop.step * (loop.trips - 1)}"
        if units:
            ticks = f"{units[-1]} {ticks}"
        size = f"{op.num_bytes:,}" if op.num_bytes else "-"
        verb = "  " * len(units) + op.verb
        return (phase, ticks, verb, record, numbers, op.lane, size, _lag(op))

    def moved(self, *lanes: str, called: bool | None = None) -> int:
        """Return the bytes per device that cross some lanes in one step.

        For the bytes that devices send to each other, see `program.memory(batch).collectives`.

        Args:
          *lanes: "up" (host memory to device), "down" (device to host memory), "read" (from disk)
            or "write" (to disk).
          called: True counts only bytes that callbacks move, False only the remaining bytes, None
            all bytes.

        Raises:
          ValueError: no lane is given, or records never move in a given lane.
        """
        return sum(step_phase.phase.moved(*lanes, called=called) for step_phase in self.phases)

    def find_peak(self, name: str) -> int:
        """Return the most bytes in flight per device in any tick of the phases with a name.

        It is 0 if this step has no such phase.

        Args:
          name: name of a phase, such as "forward", or its title in the table, such as
            "stack/forward".

        Raises:
          ValueError: no step has a phase with that name.
        """
        known = (*_BEFORE_UPDATE, "update", "unstacked")
        titles = [_title(step_phase) for step_phase in self.phases]
        if name not in (*known, *titles):
            present = ", ".join(dict.fromkeys(titles))
            raise ValueError(
                f"phase {name!r}: this step has {present}, and steps have {', '.join(known)}"
            )
        peaks = list[int]()
        for title, step_phase in zip(titles, self.phases, strict=True):
            if name in (step_phase.name, title):
                peaks.append(step_phase.phase.peak_bytes)
        return max(peaks, default=0)

    @functools.cached_property
    def peak(self) -> tuple[str, int]:
        """The title of the phase with the most bytes in flight, and these bytes per device.

        The loaded embedding and head stay on the device from forward to the end of backward.
        """
        loaded = self.unstacked["embed"].moved("up") if "embed" in self.unstacked else 0
        peak = ("", 0)
        for step_phase in self.phases:
            num_bytes = step_phase.phase.peak_bytes
            # `embed` counts its own loads, and the update does not need them.
            if step_phase.name in _BEFORE_UPDATE[1:]:
                num_bytes += loaded
            if num_bytes > peak[1]:
                peak = (_title(step_phase), num_bytes)
        return peak

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device in any tick, including gathered parameters.

        This is the sum of `gathered` and `in_flight` in a memory report.
        """
        return self.peak[1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StackedSchedule(Schedule):
    """The schedules of several stacks as one schedule.

    Its phases are called "<stack>/<phase>", in the order in which they run.

    Attributes:
      stacks: schedule of each stack by name, in order.
    """

    stacks: Mapping[str, Schedule]

    @property
    def num_slots(self) -> int:
        """The number of slots of the largest ring."""
        return max(stack.num_slots for stack in self.stacks.values())

    @property
    def peak_layers(self) -> int:
        """The most layers in flight in any stack."""
        return max(stack.peak_layers for stack in self.stacks.values())

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight per device in each tick: int64 arrays by "<stack>/<loop>".

        Raises:
          ValueError: the schedules were built without record_bytes.
        """
        num_bytes = dict[str, np.ndarray]()
        for name, stack in self.stacks.items():
            for loop, loop_bytes in stack.in_flight().items():
                num_bytes[_named(name, loop)] = loop_bytes
        return num_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device in any stack.

        Raises:
          ValueError: the schedules were built without record_bytes.
        """
        return max(stack.peak_bytes for stack in self.stacks.values())

    def title(self) -> str:
        """Return the title of a table or picture."""
        return "; ".join(f"{name}: {stack.title()}" for name, stack in self.stacks.items())

    def __str__(self) -> str:
        """Return the tables of all stacks."""
        return "\n\n".join(f"{name}: {stack}" for name, stack in self.stacks.items())


def _list_phases(name: str, stack: str, schedule: Schedule) -> list[StepPhase]:
    """Return a stack's phases with a name; its layers come before the tiles of its groups."""
    phases = [StepPhase(phase, name, stack) for phase in schedule.phases if phase.name == name]
    if phases and name == "update" and isinstance(schedule, TiledSchedule):
        # After a stack's layers, the tiles of all its layers are updated, group by group.
        for group in schedule.tiles:
            phases.append(StepPhase(group.phase("update"), "update", stack, group.name))
    return phases


def stacked_schedule(stacks: Mapping[str, Schedule]) -> Schedule:
    """Return the schedule of a step over several stacks.

    Args:
      stacks: schedule of each stack by name, in order. A single stack named "" returns its own
        schedule.
    """
    if list(stacks) == [""]:
        return stacks[""]
    schedules = list(stacks.values())
    # A stack may lack a kind, so take the tier from a stack that has it.
    tiers = dict[str, str]()
    for kind in schedules[0].tiers:
        stack_tiers = [schedule.tiers[kind] for schedule in schedules]
        tiers[kind] = max(stack_tiers, key=lambda tier: tier != "device")
    fields: dict[str, Any] = {
        field.name: getattr(schedules[0], field.name) for field in dataclasses.fields(Schedule)
    }
    fields |= {
        "num_layers": sum(s.num_layers for s in schedules),
        "first_layer": 0,
        "device_layers": sum(max(0, s.device_layers - s.first_layer) for s in schedules),
        "phases": tuple(_rename_phases(stacks)),
        "tiers": tiers,
        # Records of different stacks have different sizes: each stack's schedule holds its own.
        "record_bytes": None,
    }
    return StackedSchedule(**fields, stacks=stacks)


def _rename_phases(stacks: Mapping[str, Schedule]) -> Iterator[Phase]:
    """Yield the phases of all stacks in the order in which they run, as "<stack>/<phase>"."""
    for name in ("forward", "backward", "update"):
        in_order = list(stacks.items())
        if name == "backward":
            in_order.reverse()
        for stack, schedule in in_order:
            for phase in schedule.phases:
                if phase.name == name:
                    yield dataclasses.replace(phase, name=_named(stack, name))


def _align(cells: list[str], to_right: bool) -> list[str]:
    """Return the cells of a column, padded to equal width."""
    width = max(map(len, cells))
    return [cell.rjust(width) if to_right else cell.ljust(width) for cell in cells]


def _title(step_phase: StepPhase) -> str:
    """Return the name of a phase in the table."""
    if step_phase.stack is None:
        return step_phase.name
    title = _named(step_phase.stack, step_phase.name)
    return f"{title}/{step_phase.group}" if step_phase.group else title


def _lag(op: Op) -> str:
    """Return the lag of an operation in words; "" if it has none."""
    if not op.lag:
        return ""
    if op.verb == "host_update":
        return "since the step began"
    ticks = "1 tick" if abs(op.lag) == 1 else f"{abs(op.lag)} ticks"
    return f"{ticks} {'late' if op.lag > 0 else 'ahead'}"


def _operations(
    phase: Phase, units: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Loop, Op]]:
    """Yield (units, loop, operation) for each operation, including those of inner loops."""
    for loop in phase.loops:
        for op in loop.ops:
            yield units, loop, op
            if op.inner is not None:
                unit = "tile" if op.verb == "tiles" else op.inner.name
                yield from _operations(op.inner, (*units, unit))


def _named(stack: str, loop: str) -> str:
    return f"{stack}/{loop}" if stack else loop
