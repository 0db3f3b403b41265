"""A whole step as one list of phases: those of each stack of layers, and those of the leaves that are no layers.

    embed
    forward         stack by stack, the first one first
    head
    backward        stack by stack, the last one first
    embed_backward
    update          stack by stack, the first one first
    ends            before the update of the layers, or after it

The loops of a stack are those of a schedule of its own (`host_offload.schedule.schedule`). Rings are filled when a loop begins
and empty when it ends, so that stacks share no slot, and the bytes in flight are those of one stack at a time. A part of a
stack, whose layers keep other values for backward than those beside it, has loops of its own, and is here what a stack is.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from host_offload.schedule.ops import LAYERS, Loop, Op
from host_offload.schedule.schedule import Phase, Schedule
from host_offload.schedule.tiles import TiledSchedule


def layers_kind(kind: str, stack: str) -> str:
    """Return the name of the records of a kind that are a stack's layers; `stack` is its name, "" of the only one."""
    return f"{kind}.{stack}" if stack else kind


class Part(NamedTuple):
    """A phase of a step.

    Attributes:
      phase: of it.
      name: "forward", "backward" or "update"; or that of a phase of the leaves that are no layers (`build_ends`).
      stack: of layers, by name; None of the leaves that are no layers.
      group: whose tiles it goes over, or "".
    """

    phase: Phase
    name: str
    stack: str | None = None
    group: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """Everything that a step does, in order.

    Attributes:
      stacks: the schedule of each stack of layers by name, in order; "" is the name of the only one.
      ends: the phases of the other leaves by name (`host_offload.schedule.build_ends`).
      ends_first: the other leaves are updated before the layers.
    """

    stacks: Mapping[str, Schedule]
    ends: Mapping[str, Phase] = dataclasses.field(default_factory=dict)
    ends_first: bool = False

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """All phases, in the order in which they run."""
        update = ["ends", "update"] if self.ends_first else ["update", "ends"]
        found = list[Part]()
        for name in ("embed", "forward", "head", "backward", "embed_backward", *update):
            found += [Part(self.ends[name], name)] if name in self.ends else []
            for stack, schedule in (reversed if name == "backward" else list)(list(self.stacks.items())):
                layers = [Part(phase, name, stack) for phase in schedule.phases if phase.name == name]
                found += layers
                # After the layers of a stack come the tiles of all of them, group by group.
                groups = schedule.tiles if isinstance(schedule, TiledSchedule) and layers and name == "update" else ()
                found += [Part(group.phase("update"), "update", stack, group.name) for group in groups]
        return tuple(found)

    def __str__(self) -> str:
        lines = [f"{'phase':<22} {'ticks':>11} {'operation':<12} {'of':<28} {'numbers':>11} {'lane':<8} {'bytes':>16}"]
        for part in self.parts:
            name = part.name if part.stack is None else _named(part.stack, part.name) + (f"/{part.group}" if part.group else "")
            for depth, loop, op in _operations(part.phase):
                record = op.record.kind if op.record.leaves == LAYERS else f"{op.record.kind} of {op.record.leaves}"
                ticks, last = f"{loop.start} .. {loop.stop - 1}", op.number + loop.step * (loop.trips - 1)
                numbers = f"{op.number} .. {last}" if loop.trips > 1 else f"{op.number}"
                when = "" if not op.lag else f"  {abs(op.lag)} ticks {'late' if op.lag > 0 else 'ahead'}"
                start = f"{name:<22} {ticks if loop.trips > 1 else loop.start:>11} {'  ' * depth + op.verb:<12} {record:<28}"
                lines.append(f"{start} {numbers:>11} {op.lane:<8} {op.num_bytes:>16,}{when}")
        return "\n".join(lines)

    def moved(self, *lanes: str, called: bool | None = None) -> int:
        """Return the bytes that cross some lanes of a device in a step (`Phase.moved`)."""
        return sum(part.phase.moved(*lanes, called=called) for part in self.parts)

    def peak_of(self, name: str) -> int:
        """Return the most bytes in flight in any tick of the phases of a name; 0 where there are none."""
        return max((part.phase.peak_bytes for part in self.parts if part.name == name), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight in any tick: of the layers' loops, and of the update of the other leaves."""
        return max(map(self.peak_of, ("forward", "backward", "update", "ends")))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StackedSchedule(Schedule):
    """The schedules of several stacks as one: its phases are called "<stack>/<phase>", in the order in which they run.

    Attributes:
      stacks: the schedule of each, by name, in order.
    """

    stacks: Mapping[str, Schedule]

    @property
    def num_slots(self) -> int:
        """The most slots that a ring has."""
        return max(stack.num_slots for stack in self.stacks.values())

    @property
    def peak_layers(self) -> int:
        """The most layers in flight of a stack."""
        return max(stack.peak_layers for stack in self.stacks.values())

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight on a device in each tick of every loop, by "<stack>/<loop>".

        Raises:
          ValueError: the schedules were built without record_bytes.
        """
        return {_named(name, loop): n for name, stack in self.stacks.items() for loop, n in stack.in_flight().items()}

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight of a stack."""
        return max(stack.peak_bytes for stack in self.stacks.values())

    def title(self) -> str:
        """Return what stands above a table or a picture."""
        return "; ".join(f"{name}: {stack.title()}" for name, stack in self.stacks.items())

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {stack}" for name, stack in self.stacks.items())


def stacked_schedule(stacks: Mapping[str, Schedule]) -> Schedule:
    """Return the schedule of a step over some stacks, given that of each by name; of one without a name, its own."""
    if list(stacks) == [""]:
        return stacks[""]
    order = [("forward", list), ("backward", reversed), ("update", list)]
    phases = [
        dataclasses.replace(phase, name=_named(name, kind))
        for kind, run in order
        for name, schedule in run(list(stacks.items()))
        for phase in schedule.phases
        if phase.name == kind
    ]
    every = list(stacks.values())
    # A kind is where it is in some stack: a stack may have none of it.
    tiers = {kind: max((s.tiers[kind] for s in every), key=lambda tier: tier != "device") for kind in every[0].tiers}
    fields: dict[str, Any] = {field.name: getattr(every[0], field.name) for field in dataclasses.fields(Schedule)}
    fields |= {"num_layers": sum(s.num_layers for s in every), "first_layer": 0}
    fields |= {"device_layers": sum(max(0, s.device_layers - s.first_layer) for s in every)}
    # Records of different stacks have different sizes: those are told by the schedule of each.
    fields |= {"phases": tuple(phases), "tiers": tiers, "record_bytes": None}
    return StackedSchedule(**fields, stacks=stacks)


def _operations(phase: Phase, depth: int = 0) -> Iterator[tuple[int, Loop, Op]]:
    """Yield (how deep it is, its loop, operation) of each operation, with those of loops over tiles."""
    for loop in phase.loops:
        for op in loop.ops:
            yield depth, loop, op
            yield from _operations(op.inner, depth + 1) if op.inner is not None else ()


def _named(stack: str, loop: str) -> str:
    return f"{stack}/{loop}" if stack else loop
