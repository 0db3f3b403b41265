"""1F1B, plain and interleaved: which unit every stage of a pipeline computes in every tick.

    p    stages: devices along the mesh axis `pipe`
    v    chunks: runs of consecutive layers on each stage
    M    microbatches

A microbatch passes chunk 0 of stages 0 .. p-1, then chunk 1 of stages 0 .. p-1, and so on. Backward
takes the same way back. A **unit** is one microbatch in one chunk of one stage, in one direction.
Each stage computes v M units in each direction, in this order:

    unit k      chunk c = (k mod p v) div p, microbatch k div (p v) p + k mod p
    forward     on stage s in tick s + k
    backward    on stage s in tick v p - 1 + (p - 1 - s) + k, in chunk v - 1 - c

Each unit runs exactly one tick after the unit whose result it needs, so what a stage sends in one
tick is used by its neighbor in the next. Only the last stage, which has the head, begins a
microbatch's backward in the tick that ends its forward. For p = 3, v = 1 and M = 4:

    tick       0     1     2        3        4        5        6     7
    stage 0    F0    F1    F2       F3       B0       B1       B2    B3
    stage 1          F0    F1       F2 B0    F3 B1    B2       B3
    stage 2                F0 B0    F1 B1    F2 B2    F3 B3
               fill        steady                              drain

v M + p - 1 ticks compute forward, and as many compute backward. If F and B are the seconds of all
chunks of a stage, and the devices wait for nothing else, a step takes (M + (p - 1)/v) (F + B). The
bubble is (p - 1)/(v M) of the seconds without one.

A **slot** holds what a forward unit keeps for the backward of the same microbatch and chunk. Each
stage takes its slots from a free list. Stage 0 needs the most, min(v M, v p + p - 1), and all
stages have as many. For v = 1 this is nearly twice the p slots of textbook 1F1B (PipeDream-Flush,
arXiv:2006.09503; interleaved: Megatron-LM, arXiv:2104.04473), where a stage waits within the tick
for its neighbor. Here it never does, so transfers run beside computation.
"""

import logging
from dataclasses import dataclass

import numpy as np

from host_offload.schedule import Strip, draw_html, draw_svg, draw_text, fits
from zerojax.pipeline.ticks import PipelinePhase, Ticks, Units
from zerojax.pipeline.timeline import build_strip, describe_units
from zerojax.user_values import whole_number

logger = logging.getLogger("zerojax")


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineSchedule:
    """The units of every stage in every tick, as the module's docstring describes them.

    Attributes:
      num_stages: number of stages, p.
      num_microbatches: number of microbatches, M.
      num_chunks: number of chunks of layers on each stage, v.
      num_slots: number of slots on each stage: min(v M, v p + p - 1).
      phases: "fill", "steady" and "drain", in the order in which they run.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int
    num_slots: int
    phases: tuple[PipelinePhase, ...]

    def phase(self, name: str) -> PipelinePhase:
        """Return the phase with a name.

        Args:
          name: "fill", "steady" or "drain".

        Raises:
          ValueError: there is no such phase.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        names = ", ".join(phase.name for phase in self.phases)
        raise ValueError(f"phase {name!r}: a pipeline's schedule has the phases {names}")

    @property
    def num_ticks(self) -> int:
        """The number of ticks of all phases: v M + v p + p - 2."""
        return self.phases[-1].stop

    @property
    def time(self) -> int:
        """The time of a step, v M + p - 1, in units of one chunk's forward and backward.

        v M of it is computation, and p - 1 is the bubble.
        """
        return self.num_chunks * self.num_microbatches + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """The time that each stage is idle, as a fraction of the time it computes: (p-1)/(v M)."""
        return (self.num_stages - 1) / (self.num_chunks * self.num_microbatches)

    def title(self) -> str:
        """Return the title of a table or picture."""
        stages = _count(self.num_stages, "stage")
        if self.num_chunks > 1:
            stages += f" of {self.num_chunks} chunks"
        return (
            f"{stages}, {_count(self.num_microbatches, 'microbatch', 'microbatches')}: "
            f"{_count(self.num_ticks, 'tick')}, {_count(self.num_slots, 'slot')} on each stage, "
            f"bubble {self.num_stages - 1}/{self.num_chunks * self.num_microbatches} = "
            f"{100 * self.bubble:.1f} %"
        )

    def __str__(self) -> str:
        """Return the timeline, followed by a legend."""
        return f"{self.timeline()}\n\n{describe_units(self.num_chunks)}"

    def strips(self) -> list[Strip]:
        """Return the ticks as lanes of boxes, one lane for each stage."""
        return [build_strip("pipeline", self.phases, self.num_chunks)]

    def timeline(self, width: int = 100) -> str:
        """Return the ticks as text: one row per stage, one column per tick.

        If the ticks do not fit into one line, each phase has rows of its own. The middle ticks of
        a phase that does not fit either are omitted.

        Args:
          width: characters per line.
        """
        strips = self.strips()
        if not fits(strips[0], width):
            present = [phase for phase in self.phases if phase.num_ticks]
            strips = [build_strip(phase.name, [phase], self.num_chunks) for phase in present]
        return draw_text(self.title(), strips, width)

    def timeline_svg(self) -> str:
        """Return the lanes as an SVG document, with a box for each stage and tick.

        Every tick is drawn with the same width, although a steady tick takes longer.
        """
        return draw_svg(self.title(), self.strips())

    def timeline_html(self) -> str:
        """Return a standalone HTML file with the SVG and the text."""
        return draw_html(self.title(), self.strips(), str(self))


def build_pipeline_schedule(
    num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> PipelineSchedule:
    """Return the schedule of one step.

    A warning is logged if there are fewer microbatches than stages.

    Args:
      num_stages: number of stages, p: the size of the mesh axis `pipe`.
      num_microbatches: number of microbatches, M.
      num_chunks: number of chunks of layers on each stage, v.

    Raises:
      ValueError: an argument is not an integer of at least 1, or M does not divide by p although v
        is above 1.
    """
    p = whole_number("num_stages", num_stages, 1)
    num_microbatches = whole_number("num_microbatches", num_microbatches, 1)
    v = whole_number("num_chunks", num_chunks, 1)
    _check_microbatches(p, num_microbatches, v)

    num_units = v * num_microbatches
    units = np.arange(num_units)
    turn, place = np.divmod(units, p * v)
    chunk, member = np.divmod(place, p)
    microbatch = turn * p + member

    stages = np.arange(p)
    forward_stop = num_units + p - 1
    backward_start = v * p - 1
    num_ticks = backward_start + forward_stop
    forward_tick = units[:, None] + stages  # [v M, p]
    backward_tick = backward_start + units[:, None] + (p - 1 - stages)
    forward_chunk = _by_tick(num_ticks, forward_tick, chunk)
    forward_microbatch = _by_tick(num_ticks, forward_tick, microbatch)
    backward_chunk = _by_tick(num_ticks, backward_tick, v - 1 - chunk)
    backward_microbatch = _by_tick(num_ticks, backward_tick, microbatch)
    forward_slot, backward_slot, num_slots = _assign_slots(
        # Backward has the same number as the forward unit whose slot it empties.
        forward_chunk * num_microbatches + forward_microbatch,
        backward_chunk * num_microbatches + backward_microbatch,
    )

    ticks = Ticks(
        forward=Units(forward_chunk, forward_slot, forward_microbatch),
        backward=Units(backward_chunk, backward_slot, backward_microbatch),
        enters=np.where(forward_chunk[:, 0] == 0, forward_microbatch[:, 0], -1),
        meets_head=np.where(forward_chunk[:, -1] == v - 1, forward_microbatch[:, -1], -1),
        leaves=np.where(backward_chunk[:, 0] == 0, backward_microbatch[:, 0], -1),
    )
    return PipelineSchedule(
        num_stages=p,
        num_microbatches=num_microbatches,
        num_chunks=v,
        num_slots=num_slots,
        phases=(
            _cut("fill", ticks, 0, backward_start),
            _cut("steady", ticks, backward_start, forward_stop),
            _cut("drain", ticks, forward_stop, num_ticks),
        ),
    )


def build_forward_ticks(schedule: PipelineSchedule) -> Ticks:
    """Return the forward units of a step without its backward units, in T = v M + p - 1 ticks.

    Args:
      schedule: the schedule of the step.
    """
    fill, steady, _ = (phase.ticks for phase in schedule.phases)
    return Ticks(
        forward=_joined(fill.forward, steady.forward),
        backward=_joined(fill.backward, steady.backward),
        enters=np.concatenate([fill.enters, steady.enters]),
        meets_head=np.concatenate([fill.meets_head, steady.meets_head]),
        leaves=np.concatenate([fill.leaves, steady.leaves]),
    )


def build_single_ticks(num_stages: int, num_chunks: int) -> Ticks:
    """Return the ticks in which one microbatch passes all chunks, v p of them, without backward.

    Args:
      num_stages: number of stages, p.
      num_chunks: number of chunks of layers on each stage, v.
    """
    ticks = np.arange(num_stages * num_chunks, dtype=np.int32)
    chunk, stage = np.divmod(ticks, num_stages)
    none = np.full((len(ticks), num_stages), -1, np.int32)
    has_unit = stage[:, None] == np.arange(num_stages)
    microbatch = np.where(has_unit, 0, none)
    return Ticks(
        forward=Units(np.where(has_unit, chunk[:, None], none), microbatch, microbatch),
        backward=Units(none, none, none),
        enters=np.where(ticks == 0, 0, none[:, 0]),
        meets_head=np.where(ticks == ticks[-1], 0, none[:, 0]),
        leaves=none[:, 0],
    )


def _joined(first: Units, second: Units) -> Units:
    """Return the units of consecutive ticks."""
    return Units(*map(np.concatenate, zip(first, second, strict=True)))


def _check_microbatches(p: int, num_microbatches: int, v: int) -> None:
    """Check that microbatches form groups, and log a warning if there are fewer than stages.

    Raises:
      ValueError: the microbatches do not divide by p although v is above 1.
    """
    groups, rest = divmod(num_microbatches, p)
    if v > 1 and rest:
        nearest = f"{(groups + 1) * p}"
        if groups:
            nearest = f"{groups * p} or {nearest}"
        raise ValueError(
            f"num_microbatches={num_microbatches} does not divide by pipe={p} "
            f"({num_microbatches} = {groups} x {p} + {rest}): with pipe_chunks={v}, stages take "
            f"microbatches in groups of {p}. Use num_microbatches={nearest}, or pipe_chunks=1"
        )
    if num_microbatches < p:
        # There are no chunks: otherwise, microbatches would divide by p.
        ticks = num_microbatches + p - 1
        logger.warning(
            "num_microbatches=%d for pipe=%d: each stage has work in %d of %d ticks and is idle "
            "for %.0f %% of a step. It is idle for %.0f %% with num_microbatches=%d, and for %.0f "
            "%% with %d",
            num_microbatches,
            p,
            num_microbatches,
            ticks,
            100 * (p - 1) / ticks,
            100 * (p - 1) / (2 * p - 1),
            p,
            100 * (p - 1) / (5 * p - 1),
            4 * p,
        )


def _by_tick(num_ticks: int, ticks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values of units by tick and stage: int32[T, p], -1 where there is no unit.

    Args:
      num_ticks: number of ticks, T.
      ticks: tick of each unit on each stage, [v M, p].
      values: value of each unit, [v M].
    """
    num_stages = ticks.shape[1]
    by_tick = np.full((num_ticks, num_stages), -1, np.int32)
    by_tick[ticks, np.arange(num_stages)] = values[:, None]
    return by_tick


def _assign_slots(forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Assign a slot to each unit, from its forward tick to its backward tick.

    Args:
      forward: number of the forward unit by tick and stage, int32[T, p]; negative for none.
      backward: number of the backward unit, alike.

    Returns:
      (slots that forward fills, slots that backward empties, number of slots): int32[T, p], -1 for
      none.
    """
    forward_slot = np.full_like(forward, -1)
    backward_slot = np.full_like(backward, -1)
    num_slots = 0
    for stage in range(forward.shape[1]):
        units = zip(forward[:, stage].tolist(), backward[:, stage].tolist(), strict=True)
        free = list[int]()
        held = dict[int, int]()
        count = 0
        for tick, (forward_unit, backward_unit) in enumerate(units):
            # Forward comes first, so it never gets the slot that backward empties in its tick.
            if forward_unit >= 0:
                if not free:
                    free.append(count)
                    count += 1
                held[forward_unit] = free.pop()
                forward_slot[tick, stage] = held[forward_unit]
            if backward_unit >= 0:
                slot = held.pop(backward_unit)
                free.append(slot)
                backward_slot[tick, stage] = slot
        num_slots = max(num_slots, count)
    return forward_slot, backward_slot, num_slots


def _cut(name: str, ticks: Ticks, start: int, stop: int) -> PipelinePhase:
    """Return the ticks start .. stop-1 as a phase, with read-only arrays."""

    def part(values: np.ndarray) -> np.ndarray:
        values = values[start:stop].astype(np.int32)
        values.setflags(write=False)
        return values

    cut = Ticks(
        forward=Units(*map(part, ticks.forward)),
        backward=Units(*map(part, ticks.backward)),
        enters=part(ticks.enters),
        meets_head=part(ticks.meets_head),
        leaves=part(ticks.leaves),
    )
    return PipelinePhase(name=name, start=start, ticks=cut)


def _count(number: int, one: str, several: str = "") -> str:
    """Return a number with its noun."""
    return f"{number} {one}" if number == 1 else f"{number} {several or one + 's'}"
