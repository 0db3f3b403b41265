"""What a model is for a plan: parameters, bytes and seconds of a layer and of its ends, as numbers.

Two sources make a `Workload`: a model, traced and where its devices are there timed
(`zerojax.costs.traced`), and `Sizes`, from closed forms (`workload_of_sizes`). What is estimated of
a config (`zerojax.costs.estimate`) is the same for both.

All figures are of one device, whose rows of the batch are those of a step, of all microbatches.
Elements are those of a device of a tensor group, before `fsdp` splits them.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.activations import MODES
from zerojax.choice import Value
from zerojax.costs.sizes import Sizes
from zerojax.machines import Machine

_CROSSING = 17.0
"""Of s b h elements, those that cross the device's memory in a layer's forward: 34 s b h bytes in
16 bits.
"""
CHECKPOINTED = "remat"
"""The mode in which a layer in another tier runs: its input is stored there, and all else is
computed again.
"""


class Grid(NamedTuple):
    """Sizes of the mesh's axes."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def batch_shards(self) -> int:
        """Parts of the batch."""
        return self.data * self.fsdp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StackWork:
    """The layers of one stack.

    Attributes:
      name: of the stack; "" of the only one.
      num_layers: L.
      elements: trained parameters of a layer.
      frozen_bytes: bytes of a layer's frozen parameters, as they rest.
      tiled: those of its elements that may be cut into tiles, of its MLP.
      x_bytes: bytes of a layer's input.
      kept: by mode, bytes that a layer keeps for backward, its input among them.
      working: by mode, bytes that a layer's backward has at once besides, of all rows.
      forward: seconds of compute.
      backward: by mode, seconds of the derivative with what it computes again.
      values: what a layer may keep besides its input.
      sent: by mode, bytes sent over `tensor` for a layer.
    """

    name: str = ""
    num_layers: int
    elements: int
    frozen_bytes: int = 0
    tiled: int = 0
    x_bytes: int
    kept: Mapping[str, int]
    working: Mapping[str, int]
    forward: float
    backward: Mapping[str, float]
    values: tuple[Value, ...] = ()
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def gathered(self, tiles: int) -> float:
        """Return the elements that are gathered at once where the MLP runs in tiles: one of them,
        and what is beside it.
        """
        return self.elements - self.tiled + self.tiled / tiles


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, an optimizer and a batch.

    Attributes:
      name: of the model.
      is_layered: whether its layers are known, so that they can stream.
      stacks: of layers, in order; of a plain Model one of one layer, which is all of it.
      end_elements: parameters of embedding and head.
      largest_end: elements of the larger of both, which is gathered at once; frozen ones count by
        their bytes.
      largest_leaf: elements of the largest leaf, of all layers where it is a stack.
      end_frozen_bytes: bytes of the ends' frozen parameters.
      end_kept: bytes that the ends keep besides.
      head_working: bytes that the head has at once, of all rows.
      embed: seconds of forward.
      head: seconds of forward and derivative.
      embed_backward: seconds of the derivative.
      moment_bytes: bytes of float32 optimizer state for one parameter.
      update: seconds of the optimizer on the device for one parameter.
      host_update: whether the optimizer can run on the host.
      batch_bytes: bytes of a device's part of the batch.
      rows: rows of a device.
      tokens: of a step, on all devices; rows where tokens are not known.
      flops: the model's FLOPs of a step, on all devices: three times those of forward, less those
        of the gradients that frozen weights do not get; 0 where they are not known.
      forward_flops: those of the layers' forward.
      source: where the seconds are from.
    """

    name: str
    is_layered: bool = True
    stacks: tuple[StackWork, ...]
    end_elements: int
    largest_end: int
    largest_leaf: int = 0
    end_frozen_bytes: int = 0
    end_kept: int = 0
    head_working: int
    embed: float
    head: float
    embed_backward: float
    moment_bytes: float = 8.0
    update: float
    host_update: bool = True
    batch_bytes: int = 0
    rows: int
    tokens: int
    flops: float
    forward_flops: float
    source: str

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return sum(stack.num_layers for stack in self.stacks)

    @property
    def elements(self) -> int:
        """Trained parameters of a device of a tensor group."""
        return self.end_elements + sum(stack.num_layers * stack.elements for stack in self.stacks)


def workload_of_sizes(sizes: Sizes, machine: Machine, grid: Grid, precision: str) -> Workload:
    """Return a transformer's workload by closed forms.

    A product of n tokens with W weights takes 2 n W FLOPs, attention 4 T h a token
    (`zerojax.formulas`); a derivative twice as much. Beside them each value that Korthikanti et al.
    count of a layer (arXiv:2205.05198, table 2: 34 s b h bytes) crosses the device's memory once
    forward and twice backward. Attention is one kernel, which keeps no scores.

    Raises:
      ValueError: the batch does not divide, or the machine lacks a figure.
    """
    if sizes.batch % grid.batch_shards:
        fits = -(-sizes.batch // grid.batch_shards) * grid.batch_shards
        raise ValueError(
            f"batch {sizes.batch} does not divide by data x fsdp = {grid.data} x {grid.fsdp}: each device has whole sequences; "
            f"use {fits}"
        )
    if sizes.heads % grid.tensor:
        raise ValueError(
            f"heads {sizes.heads} do not divide by tensor={grid.tensor}: a device has whole heads"
        )
    rate, memory = machine.needs(f"flops.{precision}", "memory_rate")
    itemsize = 4 if precision == "fp32" else 2
    rows, t = sizes.batch // grid.batch_shards, grid.tensor
    tokens = rows * sizes.seq
    sbh = tokens * sizes.hidden * itemsize
    layer, ends = sizes.layer_params, sizes.end_params
    attention = 4.0 * sizes.seq * sizes.hidden
    crossing = _CROSSING * sbh / t / memory
    forward = tokens * (2.0 * layer + attention) / t / rate + crossing
    again = {"save": 0.0, "selective": tokens * attention / t / rate, "remat": forward}
    how = {"tensor": t, "fused_attention": True, "itemsize": itemsize}
    kept = {mode: int(sizes.layer_kept_bytes(rows, activations=mode, **how)) for mode in MODES}
    again["everything"] = (
        2 * (kept["everything"] - kept["save"]) / memory
    )  # what is kept besides is written, and read
    working = {mode: int(_working_elements(sizes, mode) * tokens * itemsize / t) for mode in MODES}
    head_flops = 2.0 * tokens * sizes.head_weights / t
    per_element = (
        2 * (4 if precision != "fp32" else 0)
        + 2 * 8
        + itemsize
        + (itemsize if precision != "fp32" else 2 * itemsize)
    )
    values = _values_of_sizes(sizes, rows, t, itemsize, rate, tokens)
    return Workload(
        name=f"{sizes.num_params:,} parameters, {sizes.layers} layers x {sizes.hidden}",
        stacks=(
            StackWork(
                num_layers=sizes.layers,
                elements=-(-layer // t),
                tiled=-(-sizes.hidden * sizes.mlp_width * (2 + sizes.gated) // t),
                x_bytes=sbh,
                kept=kept,
                working=working,
                forward=forward,
                backward={mode: 2.0 * forward + again[mode] for mode in MODES},
                values=values,
                sent=_sent_over_tensor(sbh, t),
            ),
        ),
        end_elements=-(-ends // t),
        largest_end=-(-ends // t),
        largest_leaf=-(-sizes.layers * sizes.hidden * sizes.mlp_width * (1 + sizes.gated) // t),
        head_working=3 * -(-ends // t) + 5 * sbh // 2,
        embed=2.0 * sbh / memory,
        head=3.0 * head_flops / rate,
        embed_backward=2.0 * sbh / memory,
        update=per_element / memory,
        batch_bytes=tokens * 8,
        rows=rows,
        tokens=sizes.tokens,
        flops=sizes.step_flops(),
        forward_flops=sizes.step_flops() / 3 - 2.0 * sizes.tokens * sizes.head_weights,
        source=f"closed forms at the rates of {machine.name}",
    )


def _working_elements(sizes: Sizes, mode: str) -> float:
    """Return what a layer's backward has at once for a token besides what was kept: elements, as
    compiled for an H200.

    The MLP's activation and its cotangents, f + f (gated: f + f + 2 f); where those are few, three
    of the stream's width. What is computed again is there too: queries, keys and values.
    """
    width = (4 if sizes.gated else 2) * sizes.mlp_width + (0 if sizes.gated else 3 * sizes.hidden)
    again = sizes.qkv_width + (2 * sizes.hidden if sizes.gated else 0)
    return width + (again if mode == CHECKPOINTED else 0)


def _sent_over_tensor(sbh: int, t: int) -> dict[str, float]:
    """Return the bytes that a device sends over `tensor` for a layer (`zerojax.memory.tensor`):
    all_reduces of s b h.
    """
    reduces = {"everything": 4, "save": 4, "selective": 4, "remat": 6}
    return {mode: n * 2.0 * sbh * (t - 1) / t for mode, n in reduces.items()}


def _values_of_sizes(
    sizes: Sizes, rows: int, t: int, itemsize: int, rate: float, tokens: int
) -> tuple[Value, ...]:
    """Return what a GPT's layer may keep: the results of its products, in order, under the names of
    examples/gpt.py.
    """
    h, width, qkv = sizes.hidden, (2 if sizes.gated else 1) * sizes.mlp_width, sizes.qkv_width

    def product(
        name: str, weights: int, elements: float, operands: tuple[int, ...], more: float = 0.0
    ) -> Value:
        seconds = tokens * (2.0 * weights / t + more / t) / rate
        return Value(
            name=name,
            num_bytes=int(tokens * elements * itemsize),
            seconds=seconds,
            operands=operands,
        )

    return (
        product("qkv", h * qkv, qkv / t, ()),
        product("attention", 0, h / t, (0,), 4.0 * sizes.seq * h),
        product("projection", h * h, h, (1,)),
        product("mlp_hidden", h * width, width / t, (2,)),
    )
