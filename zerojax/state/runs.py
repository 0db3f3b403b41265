"""Runs of layers: contiguous layers of one stack that keep the same for backward, and have loops of
their own.

A stack is one run, unless `ZeroConfig.activations` is a tuple of segments. Then each segment is
one:

    stack       layers 0 .. 31
    segments    8 in pinned_host        16 with remat          8 with save
    runs        layers 0-7              layers 8-23            layers 24-31
    forward     the runs in this order, backward in the other

What belongs to a stack is numbered by its layers: parameters, gradients, optimizer state, what is
  given to each layer, random
keys. So no stack of parameters is cut, and a run indexes all of it from its first layer on. What
belongs to a run is numbered from its own first layer: the stacks of what its layers keep, and the
records of activations on disk.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from zerojax.config import Segment
from zerojax.state.layout import Layout, StackLeaves


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """One run.

    Attributes:
      stack: of which its layers are.
      first: number of its first layer in the stack.
      segment: how many layers, and what happens to their residuals.
      is_segment: whether the user gave segments.
    """

    stack: StackLeaves
    first: int
    segment: Segment
    is_segment: bool

    @property
    def num_layers(self) -> int:
        """Layers of the run."""
        return self.segment.num_layers

    @property
    def stop(self) -> int:
        """Number of the layer after the last."""
        return self.first + self.num_layers

    @property
    def starts_stack(self) -> bool:
        """Whether no run of its stack comes before it."""
        return self.first == 0

    @property
    def name(self) -> str:
        """The name of its loops: of a whole stack that of the stack, else "layers 0-7" or "<stack>
        layers 0-7".
        """
        if not self.is_segment:
            return self.stack.name
        layers = (
            f"layers {self.first}-{self.stop - 1}" if self.num_layers > 1 else f"layer {self.first}"
        )
        return f"{self.stack.name} {layers}".lstrip()

    @property
    def activations_kind(self) -> str:
        """The name of the records on disk of what its layers keep."""
        kind = self.stack.kind("activations")
        return f"{kind}.{self.first}-{self.stop - 1}" if self.is_segment else kind

    @property
    def device_layers(self) -> int:
        """Optimizer state of the layers below this one stays on the device; 0 where that is no
        layer of the run.
        """
        most = min(self.stack.device_layers, self.stop)
        return most if most > self.first else 0


def runs_of(layout: Layout) -> tuple[LayerRun, ...]:
    """Return the runs of a model's layers, first layer first.

    Raises:
      ValueError: the segments have more or fewer layers than the model, or one goes over the end of
        a stack.
    """
    config, stacks = layout.config, layout.stacks
    if isinstance(config.activations, tuple):
        return _segmented(config.activations, stacks)
    kept = {
        "activations": config.activations,
        "saved_names": config.saved_names,
        "offloaded_names": config.offloaded_names,
    }
    return tuple(
        LayerRun(stack, 0, Segment(stack.num_layers, **kept), is_segment=False) for stack in stacks
    )


def _segmented(segments: Sequence[Segment], stacks: Sequence[StackLeaves]) -> tuple[LayerRun, ...]:
    given, there = (sum(one.num_layers for one in some) for some in (segments, stacks))
    if given != there:
        raise ValueError(
            f"activations has {len(segments)} segments of {' + '.join(str(s.num_layers) for s in segments)} = {given} layers, "
            f"and the model has {there}: the segments are all of its layers, first layer first"
        )
    runs, stop = list[LayerRun](), 0
    firsts = list(itertools.accumulate((stack.num_layers for stack in stacks), initial=0))
    for number, segment in enumerate(segments):
        start, stop = stop, stop + segment.num_layers
        stack, first, end = next(
            one for one in zip(stacks, firsts, firsts[1:], strict=False) if start < one[2]
        )
        if stop > end:
            raise ValueError(
                f"activations[{number}] has the layers {start} to {stop - 1} of the model, and stack {stack.name!r} ends with "
                f"layer {end - 1}: a segment is of one stack; give {end - start} layers up to there, and {stop - end} after it"
            )
        runs.append(LayerRun(stack, start - first, segment, is_segment=True))
    return tuple(runs)
