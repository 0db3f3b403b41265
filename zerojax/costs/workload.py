"""A model as numbers for a plan: parameters, bytes and seconds of layers, embedding and head.

A `Workload` has one of two sources: a model, which is traced, and timed if its devices are present
(`zerojax.costs.traced`), or `Sizes`, from closed forms (`workload_of_sizes`). The estimate of a
config (`zerojax.costs.estimate`) is the same for both.

All figures are per device. A device's rows are its rows of the step's batch, over all microbatches.
Elements are counted per device of a tensor group, before `fsdp` splits them.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.activations import MODES
from zerojax.choice import Value
from zerojax.costs.sizes import Sizes
from zerojax.machines import Machine

_CROSSING = 17.0
"""Device memory traffic of a layer's forward, in multiples of s b h elements.

In 16 bits, it is 34 s b h bytes.
"""
CHECKPOINTED = "remat"
"""Mode of a layer whose activations are in another tier: its input is stored there, and everything
else is recomputed.
"""


class Grid(NamedTuple):
    """Sizes of the mesh axes.

    Attributes:
      data: size of the axis `data`.
      fsdp: size of the axis `fsdp`.
      tensor: size of the axis `tensor`.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch."""
        return self.data * self.fsdp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StackWork:
    """Work and bytes of the layers of one stack, per layer and device.

    Attributes:
      name: name of the stack; "" if it is the only one.
      num_layers: L, number of layers.
      elements: number of trainable parameters.
      frozen_bytes: bytes of frozen parameters, as stored.
      tiled: number of the MLP's elements that can be cut into tiles.
      x_bytes: bytes of the layer's input.
      kept: bytes saved for backward, including the layer's input, by activation mode.
      working: bytes that backward needs in addition to saved bytes, over all rows, by activation
        mode.
      forward: seconds of compute in forward.
      backward: seconds of compute in backward, including recomputation, by activation mode.
      values: values that the layer can save in addition to its input.
      sent: bytes sent over `tensor`, by activation mode.
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
        """Return the elements that are gathered at the same time if the MLP runs in tiles.

        These are the elements of one tile and all untiled elements.
        """
        return self.elements - self.tiled + self.tiled / tiles


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, an optimizer and a batch, as numbers.

    Attributes:
      name: description of the model.
      is_layered: whether the layers are known, so that they can stream.
      stacks: stacks of layers, in order; for a plain Model, one stack with the full model as its
        only layer.
      unstacked_elements: number of trainable parameters in embedding and head.
      largest_unstacked: elements gathered at once for the larger of embedding and head; frozen
        leaves count by their bytes.
      largest_leaf: elements of the largest leaf; a stacked leaf counts all its layers.
      unstacked_frozen_bytes: bytes of the frozen parameters of embedding and head.
      unstacked_kept: bytes that embedding and head save for backward.
      head_working: bytes that the head needs while it runs, over all rows.
      embed: seconds of the embedding's forward.
      head: seconds of the head's forward and backward.
      embed_backward: seconds of the embedding's backward.
      moment_bytes: bytes of float32 optimizer state per parameter.
      update: seconds of the optimizer on the device, per parameter.
      host_update: whether the optimizer can run on the host.
      batch_bytes: bytes of a device's part of the batch.
      rows: number of batch rows per device.
      tokens: tokens per step on all devices; rows if the number of tokens is unknown.
      flops: the model's FLOPs per step on all devices: three times the forward FLOPs, minus the
        gradients that frozen weights do not need; 0 if unknown.
      forward_flops: FLOPs of the layers' forward per step on all devices.
      source: source of the seconds.
    """

    name: str
    is_layered: bool = True
    stacks: tuple[StackWork, ...]
    unstacked_elements: int
    largest_unstacked: int
    largest_leaf: int = 0
    unstacked_frozen_bytes: int = 0
    unstacked_kept: int = 0
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
        """Number of layers in all stacks."""
        return sum(stack.num_layers for stack in self.stacks)

    @property
    def elements(self) -> int:
        """Number of trainable parameters on a device of a tensor group."""
        return self.unstacked_elements + sum(
            stack.num_layers * stack.elements for stack in self.stacks
        )


def workload_of_sizes(sizes: Sizes, machine: Machine, grid: Grid, precision: str) -> Workload:
    """Return a transformer's workload from closed forms.

    A product of n tokens with W weights takes 2 n W FLOPs, and attention 4 T h per token
    (`zerojax.formulas`); backward takes twice as much. In addition, each value that Korthikanti et
    al. count for a layer (arXiv:2205.05198, table 2: 34 s b h bytes) crosses device memory once in
    forward and twice in backward. Attention is one kernel, which saves no scores.

    Args:
      sizes: sizes of the transformer and its batch.
      machine: machine whose rates are used.
      grid: sizes of the mesh axes.
      precision: name of the config's precision.

    Raises:
      ValueError: the batch or the heads do not divide evenly, or the machine lacks a figure.
    """
    _check_divisible(sizes, grid)
    flop_rate, memory_rate = machine.needs(f"flops.{precision}", "memory_rate")
    t = grid.tensor
    itemsize = 4 if precision == "fp32" else 2
    rows = sizes.batch // grid.batch_shards
    tokens = rows * sizes.seq
    sbh = tokens * sizes.hidden * itemsize
    unstacked = -(-sizes.end_params // t)
    head_flops = 2.0 * tokens * sizes.head_weights / t
    rates = _SizedRates(flop_rate, memory_rate, t, itemsize)
    return Workload(
        name=f"{sizes.num_params:,} parameters, {sizes.layers} layers x {sizes.hidden}",
        stacks=(_stack_of_sizes(sizes, rows, rates),),
        unstacked_elements=unstacked,
        largest_unstacked=unstacked,
        largest_leaf=-(-sizes.layers * sizes.hidden * sizes.mlp_width * (1 + sizes.gated) // t),
        head_working=3 * unstacked + 5 * sbh // 2,
        embed=2.0 * sbh / memory_rate,
        head=3.0 * head_flops / flop_rate,
        embed_backward=2.0 * sbh / memory_rate,
        update=_update_bytes(precision) / memory_rate,
        batch_bytes=tokens * 8,
        rows=rows,
        tokens=sizes.tokens,
        flops=sizes.step_flops(),
        forward_flops=sizes.step_flops() / 3 - 2.0 * sizes.tokens * sizes.head_weights,
        source=f"closed forms at the rates of {machine.name}",
    )


class _SizedRates(NamedTuple):
    """Rates of one device, and how a transformer of given sizes runs on it.

    Attributes:
      flop_rate: FLOP/s of products.
      memory_rate: bytes per second to and from device memory.
      tensor: t, number of devices that share a layer's products.
      itemsize: bytes per activation element.
    """

    flop_rate: float
    memory_rate: float
    tensor: int
    itemsize: int


def _check_divisible(sizes: Sizes, grid: Grid) -> None:
    """Raise ValueError if the batch or the heads do not divide evenly over the devices."""
    if sizes.batch % grid.batch_shards:
        fits = -(-sizes.batch // grid.batch_shards) * grid.batch_shards
        raise ValueError(
            f"batch {sizes.batch} is not divisible by data x fsdp = {grid.data} x {grid.fsdp}, and "
            f"a sequence is not split over devices; use {fits}"
        )
    if sizes.heads % grid.tensor:
        raise ValueError(
            f"heads {sizes.heads} is not divisible by tensor={grid.tensor}: a head is not split "
            "over devices"
        )


def _stack_of_sizes(sizes: Sizes, rows: int, rates: _SizedRates) -> StackWork:
    """Return the work of a transformer's layers; `rows` is the number of sequences per device."""
    t = rates.tensor
    itemsize = rates.itemsize
    tokens = rows * sizes.seq
    sbh = tokens * sizes.hidden * itemsize
    attention = 4.0 * sizes.seq * sizes.hidden  # FLOPs per token
    crossing = _CROSSING * sbh / t / rates.memory_rate
    products = tokens * (2.0 * sizes.layer_params + attention) / t / rates.flop_rate
    forward = products + crossing

    kept = dict[str, int]()
    working = dict[str, int]()
    for mode in MODES:
        kept_bytes = sizes.layer_kept_bytes(
            rows, activations=mode, tensor=t, fused_attention=True, itemsize=itemsize
        )
        kept[mode] = int(kept_bytes)
        working[mode] = int(_working_elements(sizes, mode) * tokens * itemsize / t)

    extra_seconds = {
        # The additional saved bytes are written and read.
        "everything": 2 * (kept["everything"] - kept["save"]) / rates.memory_rate,
        "save": 0.0,
        "selective": tokens * attention / t / rates.flop_rate,
        "remat": forward,
    }
    return StackWork(
        num_layers=sizes.layers,
        elements=-(-sizes.layer_params // t),
        tiled=-(-sizes.hidden * sizes.mlp_width * (2 + sizes.gated) // t),
        x_bytes=sbh,
        kept=kept,
        working=working,
        forward=forward,
        backward={mode: 2.0 * forward + extra_seconds[mode] for mode in MODES},
        values=_values_of_sizes(sizes, tokens, rates),
        sent=_sent_over_tensor(sbh, t),
    )


def _update_bytes(precision: str) -> int:
    """Return the bytes of device memory traffic per parameter of Adam's update.

    Masters and moments are read and written, gradients are read, and parameters are written.
    Without masters, parameters are also read.
    """
    if precision == "fp32":
        return 2 * 8 + 4 + 2 * 4
    return 2 * 4 + 2 * 8 + 2 + 2


def _working_elements(sizes: Sizes, mode: str) -> float:
    """Return the elements per token that a layer's backward needs in addition to saved activations.

    The counts follow a step compiled for an H200: the MLP's activation and its cotangents, f + f
    (gated: f + f + 2 f), plus, if ungated, three of the stream's width. With remat, recomputed
    queries, keys and values are added.
    """
    if sizes.gated:
        elements = 4 * sizes.mlp_width
        recomputed = sizes.qkv_width + 2 * sizes.hidden
    else:
        elements = 2 * sizes.mlp_width + 3 * sizes.hidden
        recomputed = sizes.qkv_width
    if mode == CHECKPOINTED:
        elements += recomputed
    return elements


def _sent_over_tensor(sbh: int, t: int) -> dict[str, float]:
    """Return the bytes that a device sends over `tensor` per layer, by activation mode.

    They are all_reduces of s b h (`zerojax.memory.tensor`).
    """
    reduces = {"everything": 4, "save": 4, "selective": 4, "remat": 6}
    return {mode: n * 2.0 * sbh * (t - 1) / t for mode, n in reduces.items()}


def _values_of_sizes(sizes: Sizes, tokens: int, rates: _SizedRates) -> tuple[Value, ...]:
    """Return the values that a GPT's layer can save: the results of its products, in order.

    They have the names of examples/gpt.py.

    Args:
      sizes: sizes of the transformer.
      tokens: number of tokens per device.
      rates: rates of one device.
    """
    t = rates.tensor
    h = sizes.hidden
    width = (2 if sizes.gated else 1) * sizes.mlp_width
    qkv = sizes.qkv_width

    def product(
        name: str,
        weights: int,
        elements: float,
        operands: tuple[int, ...],
        attention_flops: float = 0.0,
    ) -> Value:
        """Return the result of a product, from its weights and its elements per token."""
        flops = 2.0 * weights / t + attention_flops / t
        return Value(
            name=name,
            num_bytes=int(tokens * elements * rates.itemsize),
            seconds=tokens * flops / rates.flop_rate,
            operands=operands,
        )

    return (
        product("qkv", h * qkv, qkv / t, ()),
        product("attention", 0, h / t, (0,), 4.0 * sizes.seq * h),
        product("projection", h * h, h, (1,)),
        product("mlp_hidden", h * width, width / t, (2,)),
    )
