"""The collectives of a compiled program: how often each runs per step, and how many bytes it moves.

A computation counts as often as it runs: a loop's body as often as its known trip count. The full
(unsharded) operand's bytes are counted, so a model of P parameters gathered once in bfloat16 counts
2P. A ring sends (N-1)/N of that.

If you give a mesh, each collective is reported with the axes over which it runs
(`zerojax.hlo.groups`): "tensor", or "data+fsdp" for several axes.

`peak_gathered_bytes` follows gathered parameters through the schedule: from the gather to the last
use of the value, or of a copy, cast or transpose of it. A program may hold sharded parameters and
still gather all of them at the same time. This number reveals it.
"""

import dataclasses
from typing import Any, overload

from zerojax.hlo.check import checked_module
from zerojax.hlo.groups import Devices, read_devices
from zerojax.hlo.parse import Array, Instruction, parse_arrays, parse_bits, reads_program

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
_CALLS = ("call", "conditional", "async-start", "custom-call", "fusion-start")
_VIEWS = (
    "bitcast",
    "get-tuple-element",
    "tuple",
    "opt-barrier",
    "optimization-barrier",
    "all-gather-done",
)
_COPIES = ("fusion", "copy", "transpose", "convert", "reshape", "copy-start")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
      op: kind of the collective, such as "all-gather".
      dtype: HLO's name of the element type, such as "bf16"; the widest type if several arrays are
        combined.
      num_bytes: bytes of the full operand: results of a gather, operands of a reduction.
      times: number of runs per step.
      computation: HLO computation that contains the collective.
      axes: mesh axes over which it runs, in the mesh's order: "tensor", or "data+fsdp". "other" if
        its groups are no product of axes, such as halves of an axis; "none" if each group is one
        device. A permute runs over all axes in which a source and its target differ. None if no
        mesh was given.
    """

    op: str
    dtype: str
    num_bytes: int
    times: int
    computation: str
    axes: str | None = None


@reads_program
def collectives(
    text: str, unknown_trips: int | None = None, *, mesh: Any = None
) -> list[Collective]:
    """Return the collectives of a program.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.
      unknown_trips: trip count to assume for a loop whose count XLA does not know; 1 in a streamed
        step.
      mesh: mesh that the program was compiled for, to find each collective's axes.

    Raises:
      ValueError: a loop that contains a collective has no known trip count, or the number of
        devices in the mesh and in the program differ.
    """
    devices = None if mesh is None else read_devices(text, mesh)
    module = checked_module(text)
    operations: list[Collective] = []

    def visit(name: str, times: int) -> None:
        shapes: dict[str, str] = {}
        for i in module.instructions(name):
            shapes[i.result] = i.shape
            # A split collective counts at its start: its done has no kind in the list.
            kind = i.op.removesuffix("-start")
            if kind in COLLECTIVES:
                operations.append(_collective(kind, i, shapes, times, name, devices))
            if i.op == "while":
                num_before = len(operations)
                trips = unknown_trips if i.trips is None else i.trips
                for computation in i.called:
                    visit(computation, times * (1 if trips is None else trips))
                # Only a loop that contains collectives makes the count wrong.
                if trips is None and len(operations) > num_before:
                    raise ValueError(
                        f"loop {i.result} contains collectives, and its trip count is unknown: "
                        "give unknown_trips"
                    )
            elif i.op in _CALLS:
                for computation in i.called:
                    visit(computation, times)

    visit(module.entry, 1)
    return operations


def _collective(
    kind: str,
    i: Instruction,
    shapes: dict[str, str],
    times: int,
    computation: str,
    devices: Devices | None,
) -> Collective:
    operands = [a for name in i.operands for a in parse_arrays(shapes.get(name, ""))]
    # A reduce-scatter's result is the shard; its full array is the operand.
    arrays = operands if kind == "reduce-scatter" else _results(i, len(operands))
    dtypes = [a.dtype for a in arrays]
    num_bytes = sum(a.num_bytes for a in arrays)
    axes = None if devices is None else devices.axes(kind, i)
    widest = max(dtypes, key=parse_bits, default="token")
    return Collective(kind, widest, num_bytes, times, computation, axes)


def _results(i: Instruction, num_operands: int) -> list[Array]:
    """Return the result arrays of a collective.

    The shape of an asynchronous start is the pair (operands, results).
    """
    arrays = parse_arrays(i.shape)
    is_pair = i.op.endswith("-start") and len(arrays) > num_operands
    return arrays[num_operands:] if is_pair else arrays


@overload
def collective_bytes(
    text: str, least_bytes: int = 0, unknown_trips: int | None = None, *, mesh: None = None
) -> dict[str, int]: ...
@overload
def collective_bytes(
    text: str, least_bytes: int = 0, unknown_trips: int | None = None, *, mesh: Any
) -> dict[str, dict[str, int]]: ...
@reads_program
def collective_bytes(
    text: str, least_bytes: int = 0, unknown_trips: int | None = None, *, mesh: Any = None
) -> Any:
    """Return the bytes of the collectives' full operands per step.

        hlo.collective_bytes(text)               {"all-gather": 96, "all-reduce": 64}
        hlo.collective_bytes(text, mesh=mesh)    {"fsdp": {"all-gather": 96},
                                                  "tensor": {"all-reduce": 64}}

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.
      least_bytes: least size of a collective to count; smaller ones (the norm's scalar) are left
        out.
      unknown_trips: trip count to assume for a loop whose count XLA does not know; 1 in a streamed
        step.
      mesh: mesh that the program was compiled for. A collective over several axes counts under
        their names in the mesh's order, "data+fsdp"; "other" and "none" are as in
        `Collective.axes`.

    Returns:
      Bytes by collective; with a mesh, by axes and then by collective.

    Raises:
      ValueError: a loop that contains a collective has no known trip count, or the number of
        devices in the mesh and in the program differ.
    """
    total: dict[Any, Any] = {}
    for c in collectives(text, unknown_trips, mesh=mesh):
        if c.num_bytes >= least_bytes:
            by_op = total if mesh is None else total.setdefault(c.axes, {})
            by_op[c.op] = by_op.get(c.op, 0) + c.num_bytes * c.times
    return total


@reads_program
def peak_gathered_bytes(text: str) -> int:
    """Return the largest number of bytes of gathered values that are live at the same time.

    A value is gathered if an all_gather made it, or if it is computed from gathered values alone.
    It is live from its definition to the last instruction that reads it. Views (bitcasts, tuples)
    share its bytes. A loop adds its body's peak.

    Args:
      text: the program's HLO, `compiled.as_text()`, whose instructions are in scheduled order.
    """
    module = checked_module(text)

    def peak(name: str) -> int:
        instructions = module.instructions(name)
        # Bytes that the computation of a loop, a call or a branch holds while it runs, on top of
        # the values that are live here.
        inner = []
        for i in instructions:
            runs_others = i.op == "while" or i.op in _CALLS
            inner.append(max(map(peak, i.called), default=0) if runs_others else 0)
        buffers = _gathered_buffers(instructions)
        live = 0
        most = 0
        for index in range(len(instructions)):
            live += sum(b.num_bytes for b in buffers if b.first == index)
            most = max(most, live + inner[index])
            # After the maximum: an instruction's operands and result are in memory together.
            live -= sum(b.num_bytes for b in buffers if b.last == index)
        return most

    return peak(module.entry)


@dataclasses.dataclass(slots=True)
class _Buffer:
    """A gathered value.

    Attributes:
      num_bytes: bytes of the value.
      first: index of the instruction that makes it.
      last: index of the last instruction that reads it.
    """

    num_bytes: int
    first: int
    last: int


def _gathered_buffers(instructions: list[Instruction]) -> list[_Buffer]:
    """Follow gathered values through a computation."""
    viewed: dict[str, list[_Buffer]] = {}  # result -> the buffers that it is, or that it views
    buffers: list[_Buffer] = []
    constants = {i.result for i in instructions if i.op in ("constant", "iota")}
    for index, i in enumerate(instructions):
        # Each buffer once: nested tuples would otherwise double its entries at every level.
        by_id: dict[int, _Buffer] = {}
        for operand in i.operands:
            by_id |= {id(buffer): buffer for buffer in viewed.get(operand, ())}
        reads = list(by_id.values())
        for buffer in reads:
            buffer.last = index
        # A fusion that also reads data makes an activation, not a gathered parameter.
        copies = (
            reads
            and i.op in _COPIES
            and all(operand in constants or viewed.get(operand) for operand in i.operands)
        )
        # A view keeps its source alive, so both have the same buffers.
        if i.op in _VIEWS:
            viewed[i.result] = reads
        elif i.op in ("all-gather", "all-gather-start") or copies:
            arrays = parse_arrays(i.shape)
            if i.op == "all-gather-start":
                arrays = _results(i, len(i.operands))
            elif i.op == "copy-start":
                arrays = arrays[:1]  # the copy, of (copy, source, context)
            buffer = _Buffer(sum(a.num_bytes for a in arrays), index, index)
            buffers.append(buffer)
            # An asynchronous copy reads its source until it is done.
            viewed[i.result] = [buffer, *reads] if i.op == "copy-start" else [buffer]
        elif i.op == "copy-done":
            viewed[i.result] = reads[:1]
    return buffers
