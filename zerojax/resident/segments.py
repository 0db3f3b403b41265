"""Saved activations of a loss whose layers are unknown: its trace is cut into segments.

Each segment is treated as a layer:

    remat    a segment saves the values that cross the cuts
    save     it also saves the values that are expensive to recompute (`zerojax.activations.kept`)

A program that computes T bytes of intermediate values, with x bytes live at a cut, saves
K x + T / K bytes in K segments. The sum is least for segments of sqrt(T x) bytes (Chen et al.,
arXiv:1604.06174). Cuts are made where few bytes are live. In a residual network that is between its
branches, where only the stream x crosses. Each segment but the last is a `jax.checkpoint` region,
so gather-on-use treats it as a layer: it gathers the segment's parameters at its top, and again in
its recomputation.

A scan in the model is not cut: its body becomes the segment. Regions that the model rematerialises
itself stay as they are.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.activations import Keeper, Splits, keeps
from zerojax.jaxprs import (
    PRODUCTS,
    REMAT,
    FlatJaxpr,
    Instruction,
    evaluate,
    list_regions,
    read,
    rebind_scan,
    trace,
)
from zerojax.trees import Params

SLACK = 1.25
"""Largest bytes live at a cut, as a multiple of the least live bytes."""
_ALONE = ("scan", REMAT)
"""Primitives whose equation is a segment by itself."""


def keep_by_segments(
    loss: Callable[..., Any], mode: str = "remat", splits: Splits | None = None
) -> Callable[..., Any]:
    """Return `loss(params, batch, *data)` with each segment saving values for backward.

    Args:
      loss: the loss to cut; all leaves of its batch have the same dim 0.
      mode: "save" or "remat".
      splits: how saved values are sharded with mode "save"; None leaves it to the partitioner.
    """

    def segmented(params: Params, *data: Any) -> Any:
        program, out_shape = trace(loss, params, *data)
        values = jax.tree.leaves((params, *data))
        slots = dict(zip(program.inputs, values, strict=True))
        num_params = len(jax.tree.leaves(params))
        keeper = None
        if mode == "save":
            keeper = Keeper.of(program, program.inputs[num_params:], splits, data)
        _run(program, slots, num_params, keeper)
        return jax.tree.unflatten(jax.tree.structure(out_shape), program.results(slots))

    return segmented


def _run(program: FlatJaxpr, slots: dict[int, Any], num_params: int, keeper: Keeper | None) -> None:
    """Evaluate `program`: equations of parameters alone first, then the segments.

    `keeper` decides which values the segments save.
    """
    of_params = set(program.inputs[:num_params])
    data: list[tuple[int, Instruction]] = []
    for index, i in enumerate(program.instructions):
        reads = [ref for ref in i.ins if isinstance(ref, int)]
        if reads and all(ref in of_params for ref in reads) and not i.has_jaxpr:
            evaluate([i], slots)
            of_params.update(i.outs)
        else:
            data.append((index, i))
    pieces = segments(program, data)
    for number, piece in enumerate(pieces):
        instructions = [i for _, i in piece]
        # The name of the primitive, if the segment is one equation.
        primitive = instructions[0].eqn.primitive.name if len(instructions) == 1 else ""
        if primitive == "scan" and keeper is None:
            _scan(instructions[0], slots)
            continue
        # Backward of the last segment follows its forward immediately, so recomputing it would save
        # no memory. A checkpoint with a policy refuses callbacks, and would repeat debug prints.
        if keeper is None:
            is_plain = number == len(pieces) - 1
        else:
            is_plain = any(i.eqn.effects for i in instructions)
        if is_plain or primitive == REMAT:
            evaluate(instructions, slots)
        else:
            _region(program, piece, slots, keeper)


def _region(
    program: FlatJaxpr,
    piece: Sequence[tuple[int, Instruction]],
    slots: dict[int, Any],
    keeper: Keeper | None,
) -> None:
    """Evaluate one segment under jax.checkpoint."""
    instructions = [i for _, i in piece]
    last = piece[-1][0]
    results = {out for i in instructions for out in i.outs}
    # A region is a function of the values that it reads from outside, and returns the values that
    # are read after it.
    reads = dict[int, None]()  # a set in order
    for i in instructions:
        for ref in i.ins:
            if isinstance(ref, int) and ref not in results:
                reads[ref] = None
    outs = [out for out in results if program.last_read.get(out, -1) > last]
    run = evaluate if keeper is None else keeper.run
    policy = None if keeper is None else keeps

    @partial(jax.checkpoint, policy=policy)
    def region(values: list[Any]) -> list[Any]:
        inside = dict(zip(reads, values, strict=True))
        run(instructions, inside)
        return [inside[out] for out in outs]

    slots.update(zip(outs, region([slots[ref] for ref in reads]), strict=True))


def _scan(i: Instruction, slots: dict[int, Any]) -> None:
    """Evaluate a scan with its body under jax.checkpoint."""
    values = [read(ref, slots) for ref in i.ins]
    (region,) = list_regions(i.eqn)
    # In a scan, forward and backward are separate loops, whose equations XLA cannot merge, so no
    # barriers are needed.
    checkpoint = partial(jax.checkpoint, prevent_cse=False)
    outs = rebind_scan(i.eqn, region.flatten().run, values, around=checkpoint)
    slots.update(zip(i.outs, outs, strict=True))


def segments(
    program: FlatJaxpr, data: Sequence[tuple[int, Instruction]]
) -> list[list[tuple[int, Instruction]]]:
    """Cut the data-dependent instructions into consecutive segments.

    Args:
      program: the flattened program.
      data: its data-dependent instructions, each with its index in the program.
    """
    out_bytes = [sum(_num_bytes(v) for v in i.eqn.outvars) for _, i in data]
    live = _live_bytes(program, data)
    heavy = [p for p, (_, i) in enumerate(data) if i.eqn.primitive.name in PRODUCTS or i.has_jaxpr]
    regions = {p for p, (_, i) in enumerate(data) if i.eqn.primitive.name in _ALONE}
    # Cuts are only made between the first and the last heavy equation. Outside, only tokens or a
    # scalar may be live, and no cut between layers comes near such a minimum.
    inside = range(heavy[0], heavy[-1]) if len(heavy) > 1 else range(0)
    least = min((live[p] for p in inside if live[p]), default=0)
    # In the module docstring's terms: T is the sum of all results, and x the least live bytes.
    target = math.sqrt(sum(out_bytes) * least)
    pieces: list[list[tuple[int, Instruction]]] = [[]]
    piece_bytes = 0
    for p, item in enumerate(data):
        # A region that the model rematerialises is a segment by itself. Inside another segment it
        # would be computed a third time.
        if p in regions and pieces[-1]:
            pieces.append([])
            piece_bytes = 0
        pieces[-1].append(item)
        piece_bytes += out_bytes[p]
        if p in regions or (p in inside and piece_bytes >= target and live[p] <= SLACK * least):
            pieces.append([])
            piece_bytes = 0
    return [piece for piece in pieces if piece]


def _live_bytes(program: FlatJaxpr, data: Sequence[tuple[int, Instruction]]) -> list[int]:
    """Return the bytes that are live after each data-dependent equation.

    A value lives from the equation that computes it to the last one that reads it.
    """
    live = list[int]()
    num_bytes = 0
    dying = dict[int, list[int]]()  # bytes of live values by the index of their last reader
    for index, i in data:
        for out, v in zip(i.outs, i.eqn.outvars, strict=True):
            last = program.last_read.get(out, index)
            num_bytes += _num_bytes(v)
            dying.setdefault(last, []).append(_num_bytes(v))
        num_bytes -= sum(sum(sizes) for last, sizes in dying.items() if last <= index)
        dying = {last: sizes for last, sizes in dying.items() if last > index}
        live.append(num_bytes)
    return live


def _num_bytes(v: Any) -> int:
    dtype = v.aval.dtype
    # A key of JAX's default random generator is two 32-bit words.
    return math.prod(v.aval.shape) * (
        8 if jnp.issubdtype(dtype, jax.dtypes.extended) else dtype.itemsize
    )
