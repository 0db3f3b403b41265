"""The ticks of a pipeline as arrays, in three phases that are loops of their own.

    fill      forward only       until the first microbatch has met the head
    steady    both               each stage computes one forward unit and one backward unit
    drain     backward only      until the last microbatch has left

`Ticks` and `Units` are named tuples, which JAX takes as pytrees: a loop over a phase scans
`phase.ticks`, and its body reads `tick.forward.slot`, int32[p].
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

Integers = Any
"""Array of int32: of numpy in a schedule, of JAX in the body of a loop over ticks."""


class Units(NamedTuple):
    """The unit that each stage computes in each tick, in one direction: int32[T, p], -1 for none.

    Attributes:
      chunk: chunk of the stage's layers, 0 .. v-1.
      slot: slot that holds what forward keeps for backward. Forward fills it, backward empties it.
      microbatch: microbatch, 0 .. M-1.
    """

    chunk: Integers
    slot: Integers
    microbatch: Integers


class Ticks(NamedTuple):
    """What happens in each of T ticks; -1 for nothing.

    Within a tick, forward comes before backward: on the last stage, both may have the same unit.

    Attributes:
      forward: forward units, int32[T, p] each.
      backward: backward units, int32[T, p] each.
      enters: microbatch that the embedding gives to stage 0, int32[T].
      meets_head: microbatch whose last forward unit runs on the last stage, int32[T]. Its loss and
        the derivative of the loss are computed in the same tick.
      leaves: microbatch whose last backward unit runs on stage 0, int32[T]. Its derivative goes to
        the embedding.
    """

    forward: Units
    backward: Units
    enters: Integers
    meets_head: Integers
    leaves: Integers


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PipelinePhase:
    """Consecutive ticks that run as one loop.

    Attributes:
      name: "fill", "steady" or "drain".
      start: number of the first tick, counted from the beginning of the step.
      ticks: the ticks, as arrays.
    """

    name: str
    start: int
    ticks: Ticks

    @property
    def num_ticks(self) -> int:
        """The number of ticks, T. It may be 0, except in "steady"."""
        return len(self.ticks.enters)

    @property
    def stop(self) -> int:
        """The number of the tick after the last one."""
        return self.start + self.num_ticks
