"""Seconds and peak bytes of a traced program, equation by equation.

A product of F FLOPs that touches B bytes takes max(F / flops, B / memory_rate). Reductions take
B / memory_rate. Other equations are free, because XLA mostly fuses their results away.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.costs.workload import Grid
from zerojax.jaxprs import (
    FUSED_ATTENTION,
    PRODUCTS,
    REDUCTIONS,
    FlatJaxpr,
    Instruction,
    count_flops,
    dtype_of_products,
    flatten,
)
from zerojax.machines import Machine

_IN_MEMORY = REDUCTIONS | PRODUCTS
"""Primitives whose operands and results cross device memory."""
_READERS = PRODUCTS | {"scan", "while", "pallas_call", *FUSED_ATTENTION}
"""Products, loops and kernels, whose operands are mostly in memory."""


class Roofline:
    """Seconds of equations on one device of a machine; 0 if the machine has no rates.

    Attributes:
      memory_rate: bytes per second to and from device memory.
    """

    def __init__(self, machine: Machine, precision: str, grid: Grid) -> None:
        """Take the rates of a machine.

        Args:
          machine: machine whose rates are used.
          precision: name of the precision of products that are not float32.
          grid: sizes of the mesh axes, over which all equations are split.
        """
        figures = machine.figures
        self.memory_rate = figures.get("memory_rate", math.inf)
        self._product_rate = figures.get(f"flops.{precision}", math.inf)
        self._float32_rate = figures.get("flops.fp32", self._product_rate)
        self._shards = grid.batch_shards * grid.tensor

    def equation_seconds(self, i: Instruction) -> float:
        """Return the seconds of one equation."""
        flops = count_flops(i.eqn) / self._shards
        if not flops and i.eqn.primitive.name not in _IN_MEMORY:
            return 0.0
        is_float32 = dtype_of_products(i.eqn) == jnp.float32
        rate = self._float32_rate if is_float32 else self._product_rate
        arrays = (*i.eqn.invars, *i.eqn.outvars)
        moved = sum(num_bytes(v.aval) for v in arrays) / self._shards
        return max(flops / rate, moved / self.memory_rate)

    def seconds(self, instructions: Iterable[Instruction]) -> float:
        """Return the seconds of some equations, one after another."""
        return sum(map(self.equation_seconds, instructions))


def trace_program(function: Callable[..., Any], args: Sequence[Any]) -> FlatJaxpr:
    """Return a function of abstract arguments as a flat list of the equations it needs."""
    closed = jax.make_jaxpr(function)(*args)
    program = flatten(closed.jaxpr, closed.consts)
    return dataclasses.replace(program, instructions=program.live(program.outputs))


def num_bytes(aval: Any) -> int:
    """Return the bytes of an array on all devices together; 0 for a PRNG key."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * dtype.itemsize


def peak_bytes(program: FlatJaxpr, rows: int, *, counts_operands: bool = False) -> int:
    """Return the peak bytes of activations alive at one equation, on all devices together.

    Only activations that XLA keeps in memory count: results of products, look-ups, reductions,
    loops and kernels whose dim 0 counts the batch or its tokens. Elementwise results are fused into
    their readers. Inputs and gradients of weights are not counted.

    Args:
      program: flat program of a derivative.
      rows: number of rows in the batch.
      counts_operands: whether elementwise results that products, loops or kernels read count too,
        and what one turn of a loop holds. XLA fuses some of them into products, so this is an upper
        estimate.
    """
    last_read: dict[int, int] = {}
    for n, i in enumerate(program.instructions):
        last_read.update(dict.fromkeys(i.reads, n))
    outputs = [slot for slot in program.outputs if isinstance(slot, int)]
    last_read.update(dict.fromkeys(outputs, len(program.instructions)))

    read_in_memory = set[int]()
    for i in program.instructions:
        if counts_operands and i.eqn.primitive.name in _READERS:
            read_in_memory.update(i.reads)

    alive = 0
    peak = 0
    freed_after = dict[int, int]()
    for n, i in enumerate(program.instructions):
        name = i.eqn.primitive.name
        is_in_memory = i.has_jaxpr or count_flops(i.eqn) or name in _IN_MEMORY
        for slot, v in zip(i.outs, i.eqn.outvars, strict=True):
            shape = getattr(v.aval, "shape", ())
            if not (is_in_memory or slot in read_in_memory):
                continue
            if not shape or not rows or shape[0] % rows:
                continue
            size = num_bytes(v.aval)
            alive += size
            stop = last_read.get(slot, n)
            freed_after[stop] = freed_after.get(stop, 0) + size
        inside = 0
        if counts_operands and name == "scan":
            body = i.eqn.params["jaxpr"]
            inside = peak_bytes(flatten(body.jaxpr, body.consts), 1, counts_operands=True)
        peak = max(peak, alive + inside)
        alive -= freed_after.pop(n, 0)
    return peak
