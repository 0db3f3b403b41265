"""The schedule of a step over several stacks of layers, such as an encoder and a decoder: those of the stacks, in turn.

    forward    stack by stack, the first one first
    backward   stack by stack, the last one first
    update     stack by stack, the first one first

The loops of a stack are those of a schedule of its own (`host_offload.schedule.schedule`). Rings are filled when a loop begins
and empty when it ends, so that stacks share no slot, and the bytes in flight are those of one stack at a time. A part of a
stack, whose layers keep other values for backward than those beside it, has loops of its own, and is here what a stack is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.schedule.schedule import Phase, Schedule
from host_offload.schedule.timeline import Strip


def layers_kind(kind: str, stack: str) -> str:
    """Return the name of the records of a kind that are a stack's layers; `stack` is its name, "" of the only one."""
    return f"{kind}.{stack}" if stack else kind


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StackedSchedule(Schedule):
    """The schedules of several stacks as one: its phases are called "<stack>/<phase>", in the order in which they run.

    Attributes:
      stacks: the schedule of each, by name, in order.
    """

    stacks: Mapping[str, Schedule]

    def arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the int32 arrays of every loop of every stack, by "<stack>/<loop>"."""
        return {_named(name, loop): a for name, stack in self.stacks.items() for loop, a in stack.arrays().items()}

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

    def _title(self) -> str:
        return "; ".join(f"{name}: {stack._title()}" for name, stack in self.stacks.items())

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {stack}" for name, stack in self.stacks.items())

    def _strips(self) -> list[Strip]:
        of_stack = {_named(name, phase.name): phase for name, stack in self.stacks.items() for phase in stack.phases}
        return [dataclasses.replace(of_stack[phase.name]._strip(), name=phase.name) for phase in self.phases]


def stacked_schedule(stacks: Mapping[str, Schedule]) -> Schedule:
    """Return the schedule of a step over some stacks, given that of each by name; of one without a name, its own."""
    names = list(stacks)
    if names == [""]:
        return stacks[""]
    order = [("forward", names), ("backward", names[::-1]), ("update", names)]
    phases: list[Phase] = []
    for kind, run in order:
        for name in run:
            found = [phase for phase in stacks[name].phases if phase.name == kind]
            phases += [dataclasses.replace(phase, name=_named(name, kind)) for phase in found]
    every = list(stacks.values())
    # A kind is where it is in some stack: a stack may have none of it.
    tiers = {kind: max((s.tiers[kind] for s in every), key=lambda tier: tier != "device") for kind in every[0].tiers}
    fields: dict[str, Any] = {field.name: getattr(every[0], field.name) for field in dataclasses.fields(Schedule)}
    fields |= {"num_layers": sum(s.num_layers for s in every), "first_layer": 0}
    fields |= {"device_layers": sum(max(0, s.device_layers - s.first_layer) for s in every)}
    # Records of different stacks have different sizes: those are told by the schedule of each.
    fields |= {"phases": tuple(phases), "tiers": tiers, "record_bytes": None}
    return StackedSchedule(**fields, stacks=stacks)


def _named(stack: str, loop: str) -> str:
    return f"{stack}/{loop}"
