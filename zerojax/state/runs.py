"""Ranges of layers: contiguous layers of one stack that save the same, with their own loops.

A stack is one range, unless `ZeroConfig.activations` is a tuple of segments. Then each segment is
one range:

    stack       layers 0 .. 31
    segments    8 in pinned_host        16 with remat          8 with save
    ranges      layers 0-7              layers 8-23            layers 24-31
    forward     the ranges in this order; backward in reverse order

Parameters, gradients, optimizer state, inputs of each layer and random keys belong to a stack, and
are numbered by the stack's layers. So no stack of parameters is cut; a range indexes the full
stack, starting at its first layer. The stacks of saved activations, and the records of activations
on disk, belong to a range and are numbered from the range's first layer.
"""

import dataclasses
from collections.abc import Sequence

from zerojax.config import Segment
from zerojax.state.layout import Layout, StackLeaves


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """One range of layers.

    Attributes:
      stack: the stack that contains the range.
      first: number of the range's first layer in the stack.
      segment: number of layers, and what happens to their residuals.
      is_segment: whether the user gave segments.
    """

    stack: StackLeaves
    first: int
    segment: Segment
    is_segment: bool

    @property
    def num_layers(self) -> int:
        """Number of layers in the range."""
        return self.segment.num_layers

    @property
    def stop(self) -> int:
        """Number of the layer after the range's last layer."""
        return self.first + self.num_layers

    @property
    def starts_stack(self) -> bool:
        """Whether this is the first range of its stack."""
        return self.first == 0

    @property
    def name(self) -> str:
        """The name of the range's loops.

        It is the stack's name for a full stack, else "layers 0-7" or "<stack> layers 0-7".
        """
        if not self.is_segment:
            return self.stack.name
        if self.num_layers > 1:
            layers = f"layers {self.first}-{self.stop - 1}"
        else:
            layers = f"layer {self.first}"
        return f"{self.stack.name} {layers}".lstrip()

    @property
    def activations_kind(self) -> str:
        """The name of the records on disk that hold the layers' saved activations."""
        kind = self.stack.kind("activations")
        return f"{kind}.{self.first}-{self.stop - 1}" if self.is_segment else kind

    @property
    def device_layers(self) -> int:
        """Layers below this number keep their optimizer state on the device.

        It is 0 if there is no such layer in the range.
        """
        stop_on_device = min(self.stack.device_layers, self.stop)
        return stop_on_device if stop_on_device > self.first else 0


def layer_ranges(layout: Layout) -> tuple[LayerRange, ...]:
    """Return the ranges of a model's layers, first layer first.

    Args:
      layout: layout of the program's state.

    Raises:
      ValueError: the segments have more or fewer layers than the model, or a segment crosses the
        end of a stack.
    """
    config = layout.config
    stacks = layout.stacks
    if isinstance(config.activations, tuple):
        return _segmented(config.activations, stacks)
    ranges = []
    for stack in stacks:
        segment = Segment(
            stack.num_layers,
            activations=config.activations,
            saved_names=config.saved_names,
            offloaded_names=config.offloaded_names,
        )
        ranges.append(LayerRange(stack, 0, segment, is_segment=False))
    return tuple(ranges)


def _segmented(
    segments: Sequence[Segment], stacks: Sequence[StackLeaves]
) -> tuple[LayerRange, ...]:
    """Return one range for each segment. Layers are numbered through all stacks of the model."""
    segment_layers = sum(segment.num_layers for segment in segments)
    model_layers = sum(stack.num_layers for stack in stacks)
    if segment_layers != model_layers:
        raise ValueError(
            f"activations has {len(segments)} segments of "
            f"{' + '.join(str(s.num_layers) for s in segments)} = {segment_layers} layers, and the "
            f"model has {model_layers}: the segments must cover all of its layers, first layer "
            "first"
        )
    ranges = list[LayerRange]()
    stop = 0
    position = 0  # of the current stack in `stacks`
    stack_start = 0
    for number, segment in enumerate(segments):
        start = stop
        stop = start + segment.num_layers
        while start >= stack_start + stacks[position].num_layers:
            stack_start += stacks[position].num_layers
            position += 1
        stack = stacks[position]
        stack_stop = stack_start + stack.num_layers
        if stop > stack_stop:
            raise ValueError(
                f"activations[{number}] covers layers {start} to {stop - 1} of the model, but "
                f"stack {stack.name!r} ends with layer {stack_stop - 1}: a segment cannot cross "
                f"stacks; give {stack_stop - start} layers up to there, and {stop - stack_stop} "
                "after it"
            )
        ranges.append(LayerRange(stack, start - stack_start, segment, is_segment=True))
    return tuple(ranges)
