"""Runs of equal layers of a config, with the bytes that a layer saves and its seconds of backward.

A config gives all layers one choice of activations, or each `Segment` of layers its own. Neighbours
of one stack with the same choice form a run, whose layers have one schedule.
"""

import dataclasses

from zerojax.activations import MODES
from zerojax.config import Segment, ZeroConfig
from zerojax.costs.workload import CHECKPOINTED, StackWork, Workload


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedActivations:
    """What a layer saves for backward, and what its backward costs, per device.

    Attributes:
      mode: activation mode.
      tier: tier of the layer's input and of offloaded values.
      device_bytes: bytes saved on the device.
      away_bytes: bytes saved in `tier`.
      backward: seconds of backward, including recomputation.
      working_bytes: bytes that backward needs in addition to saved bytes.
    """

    mode: str
    tier: str
    device_bytes: int
    away_bytes: int
    backward: float
    working_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """Contiguous layers of one stack that save the same values.

    Attributes:
      stack: work and bytes of the stack's layers.
      first: index of the run's first layer in its stack.
      num_layers: number of layers in the run.
      saved: what each layer saves.
    """

    stack: StackWork
    first: int
    num_layers: int
    saved: SavedActivations


def list_runs(config: ZeroConfig, workload: Workload) -> list[LayerRun]:
    """Return the runs of all stacks, first layer first."""
    runs = list[LayerRun]()
    layers_before = 0
    for stack in workload.stacks:
        first = 0
        for segment in _list_segments(config, stack, layers_before):
            saved = saved_activations(stack, segment)
            runs.append(
                LayerRun(stack=stack, first=first, num_layers=segment.num_layers, saved=saved)
            )
            first += segment.num_layers
        layers_before += stack.num_layers
    return runs


def _list_segments(config: ZeroConfig, stack: StackWork, layers_before: int) -> list[Segment]:
    """Return a stack's segments.

    `layers_before` is the number of layers in earlier stacks.
    """
    if isinstance(config.activations, str):
        return [
            Segment(
                stack.num_layers,
                activations=config.activations,
                saved_names=config.saved_names,
                offloaded_names=config.offloaded_names,
            )
        ]
    segments = list[Segment]()
    first = 0
    for segment in config.activations:
        if layers_before <= first < layers_before + stack.num_layers:
            segments.append(segment)
        first += segment.num_layers
    return segments


def saved_activations(stack: StackWork, segment: Segment) -> SavedActivations:
    """Return what each layer of a segment saves.

    Args:
      stack: work and bytes of the segment's stack.
      segment: activation mode of the layers, or tier of their inputs, and names of the values that
        they keep and offload.
    """
    is_mode = segment.activations in MODES
    mode = segment.activations if is_mode else CHECKPOINTED
    by_name = {value.name: value for value in stack.values}
    kept = [by_name[name] for name in segment.saved_names if name in by_name]
    offloaded = [by_name[name] for name in segment.offloaded_names if name in by_name]

    device_bytes = stack.kept[mode]
    away_bytes = sum(value.num_bytes for value in offloaded)
    backward = stack.backward[mode]
    if mode == CHECKPOINTED:
        device_bytes += sum(value.num_bytes for value in kept)
        # Saved and fetched values are not recomputed.
        spared = sum(value.seconds for value in (*kept, *offloaded))
        backward = max(stack.backward["save"], backward - spared)
    else:
        device_bytes -= away_bytes  # the mode would keep offloaded values on the device

    tier = "pinned_host" if segment.offloaded_names else "device"
    if not is_mode:
        tier = segment.activations
        device_bytes -= stack.x_bytes
        away_bytes += stack.x_bytes
    return SavedActivations(
        mode=mode,
        tier=tier,
        device_bytes=max(0, device_bytes),
        away_bytes=away_bytes,
        backward=backward,
        working_bytes=stack.working[mode],
    )
