"""The ticks of a pipeline as lanes of boxes, one lane for each stage.

`host_offload.schedule` draws them, as text and as SVG.
"""

from collections.abc import Sequence

from host_offload.schedule import Box, Lane, Strip
from zerojax.pipeline.ticks import PipelinePhase, Units


def build_strip(name: str, phases: Sequence[PipelinePhase], num_chunks: int) -> Strip:
    """Return phases, one after the other, as one strip with a lane for each stage.

    Args:
      name: name of the strip.
      phases: phases in order, with at least one tick together.
      num_chunks: number of chunks on each stage; with one, labels leave the chunk out.
    """
    spans = list[str]()
    for phase in phases:
        if phase.num_ticks:
            ticks = _list_ticks(phase.start, phase.stop)
            spans.append(ticks if phase.name == name else f"{phase.name} {ticks}")
    num_stages = phases[0].ticks.forward.slot.shape[1]
    return Strip(
        name=name,
        note=f": {', '.join(spans)}",
        start=phases[0].start,
        stop=phases[-1].stop,
        lanes=tuple(_build_lane(phases, stage, num_chunks) for stage in range(num_stages)),
    )


def describe_units(num_chunks: int) -> str:
    """Return a sentence that explains the labels of units.

    Args:
      num_chunks: number of chunks on each stage.
    """
    if num_chunks == 1:
        return "F2: forward of microbatch 2; B2: backward of microbatch 2"
    return "F2.1: forward of microbatch 2 in chunk 1; B2.1: backward of microbatch 2 in chunk 1"


def _list_ticks(start: int, stop: int) -> str:
    return f"tick {start}" if stop - start == 1 else f"ticks {start} to {stop - 1}"


def _build_lane(phases: Sequence[PipelinePhase], stage: int, num_chunks: int) -> Lane:
    """Return the lane of a stage: a box for each tick in which it computes."""
    boxes = list[Box]()
    for phase in phases:
        directions = {"forward": phase.ticks.forward, "backward": phase.ticks.backward}
        for row in range(phase.num_ticks):
            labels, kinds, details = list[str](), list[str](), list[str]()
            for direction, units in directions.items():
                if units.slot[row, stage] >= 0:
                    labels.append(direction[0].upper() + _name_unit(units, row, stage, num_chunks))
                    kinds.append(direction)
                    details.append(f"{direction} of {_describe_unit(units, row, stage)}")
            if labels:
                tick = phase.start + row
                box = Box(
                    layer="/".join(labels),
                    start=tick,
                    stop=tick + 1,
                    kinds=tuple(kinds),
                    details="; ".join(details),
                )
                boxes.append(box)
    return Lane(name=f"stage {stage}", boxes=tuple(boxes))


def _name_unit(units: Units, row: int, stage: int, num_chunks: int) -> str:
    """Return the microbatch of a unit, and its chunk if there are several: "2" or "2.1"."""
    microbatch = units.microbatch[row, stage]
    return f"{microbatch}" if num_chunks == 1 else f"{microbatch}.{units.chunk[row, stage]}"


def _describe_unit(units: Units, row: int, stage: int) -> str:
    return (
        f"microbatch {units.microbatch[row, stage]}, chunk {units.chunk[row, stage]}, "
        f"slot {units.slot[row, stage]}"
    )
