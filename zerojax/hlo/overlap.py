"""Find the computation that overlaps the collectives and host copies of a compiled program.

XLA's scheduled HLO is a sequence. An operation that is split into a start and a done overlaps the
instructions between them. An operation that is not split, or that XLA marks `is_sync`, overlaps
nothing. Only the matrix products in between are counted, since they take the time that hides a
transfer. Products inside a loop count as often as they run.

    all-gather-start  dot  dot  all-gather-done  dot       spans 2 products
    dot  dot  dot  all-gather                              spans none
"""

import dataclasses
import re

from zerojax.hlo.check import checked_module
from zerojax.hlo.communication import COLLECTIVES
from zerojax.hlo.parse import Array, Instruction, Module, parse_arrays, reads_program

# Targets of library calls: matrix products, attention and convolutions.
_PRODUCT = re.compile(
    r'custom_call_target="[^"]*(?:gemm|matmul|cublas|fmha|cudnn|conv)[^"]*"', re.IGNORECASE
)
_WAITED = re.compile(r'"is_sync":\s*true')
_HOST = "S(5)"
_MOVES = ("copy", "fusion", "dynamic-slice", "dynamic-update-slice")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A transfer of a compiled program, and the computation that it overlaps.

    Attributes:
      kind: a collective, such as "all-gather"; or "to_device" or "to_host", over the link to the
        host.
      computation: HLO computation that contains the transfer.
      num_bytes: bytes of a collective's full operand, or bytes moved over the link.
      times: number of runs per step.
      is_async: whether other operations may overlap it.
      products: matrix products between its start and its end; 0 if it is not asynchronous.
    """

    kind: str
    computation: str
    num_bytes: int
    times: int
    is_async: bool
    products: int


@reads_program
def spans(text: str, unknown_trips: int = 1) -> list[Span]:
    """Return the transfers of a program, in scheduled order.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.
      unknown_trips: trip count to assume for a loop whose count XLA does not know; 1 in a streamed
        step.
    """
    module = checked_module(text)
    products = _Products(module, unknown_trips)
    transfers: list[Span] = []

    def visit(name: str, times: int) -> None:
        instructions = module.instructions(name)
        shapes = {i.result: i.shape for i in instructions}
        for index, i in enumerate(instructions):
            kind = _kind(i, shapes, module)
            if kind is not None:
                end = _end(instructions, index)
                is_async = end is not None and not _WAITED.search(i.text)
                overlapped = instructions[index + 1 : end] if is_async else []
                last = i if end is None else instructions[end]
                transfers.append(
                    Span(
                        kind=kind,
                        computation=name,
                        num_bytes=_num_bytes(i, kind, shapes, last),
                        times=times,
                        is_async=is_async,
                        products=products.count(overlapped),
                    )
                )
            elif i.op == "while":
                for computation in i.called:
                    visit(computation, times * products.trips(i))
            elif i.op in ("call", "conditional"):
                for computation in i.called:
                    visit(computation, times)

    visit(module.entry, 1)
    return transfers


@reads_program
def num_products(text: str, unknown_trips: int = 1) -> int:
    """Return the number of matrix products that a program runs, in loops once per iteration.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.
      unknown_trips: trip count to assume for a loop whose count XLA does not know.
    """
    module = checked_module(text)
    return _Products(module, unknown_trips).count(module.instructions(module.entry))


@reads_program
def carried_arrays(text: str) -> list[list[Array]]:
    """Return the arrays that each loop of a program carries, inner loops included.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.

    Returns:
      One list of arrays per loop, largest array first.
    """
    module = checked_module(text)
    carried = []
    for name in module.computations:
        for i in module.instructions(name):
            if i.op == "while":
                carried.append(sorted(parse_arrays(i.shape), key=lambda a: -a.num_bytes))
    return carried


class _Products:
    """Counts the matrix products that instructions run."""

    def __init__(self, module: Module, unknown_trips: int) -> None:
        self.module = module
        self.unknown_trips = unknown_trips
        self._counts: dict[str, int] = {}

    def trips(self, i: Instruction) -> int:
        return self.unknown_trips if i.trips is None else i.trips

    def count(self, instructions: list[Instruction]) -> int:
        return sum(self._count_one(i) for i in instructions)

    def _count_one(self, i: Instruction) -> int:
        if i.op in ("dot", "convolution"):
            return 1
        if i.op == "custom-call":
            return int(_PRODUCT.search(i.text) is not None)
        inner = sum(self._count_computation(computation) for computation in i.called)
        if i.op == "while":
            return inner * self.trips(i)
        if i.op == "fusion":
            return min(inner, 1)  # one kernel, however many products it contains
        if i.op in ("call", "conditional"):
            return inner
        return 0

    def _count_computation(self, computation: str) -> int:
        if computation not in self._counts:
            self._counts[computation] = self.count(self.module.instructions(computation))
        return self._counts[computation]


def _end(instructions: list[Instruction], start: int) -> int | None:
    """Return the index of the instruction that waits for a start; None if it is not split."""
    i = instructions[start]
    if not i.op.endswith("-start"):
        return None
    later = enumerate(instructions[start + 1 :], start + 1)
    # The first reader of a start is its done.
    return next(n for n, reader in later if i.result in reader.operands)


def _kind(i: Instruction, shapes: dict[str, str], module: Module) -> str | None:
    op = i.op.removesuffix("-start")
    # A generic async-start has its collective in a separate computation.
    if op == "async":
        called = [inner.op for c in i.called for inner in module.instructions(c)]
        op = next((inner_op for inner_op in called if inner_op in COLLECTIVES), op)
    if op in COLLECTIVES:
        return op
    if op not in _MOVES:
        return None
    touches_host = _HOST in i.shape or any(_HOST in shapes.get(o, "") for o in i.operands)
    if not touches_host:
        return None
    return "to_host" if _HOST in _result(i) else "to_device"


def _result(i: Instruction) -> str:
    """Return the shape of an instruction's result; for a start, the result of its end."""
    if i.op == "copy-start":  # (result, operand, context)
        return i.shape.split("}, ")[0]
    if i.op == "fusion-start":  # ((operands), result, context)
        end_of_operands = ")}), " if ")}), " in i.shape else "), "
        return i.shape.partition(end_of_operands)[2]
    return i.shape


def _num_bytes(i: Instruction, kind: str, shapes: dict[str, str], end: Instruction) -> int:
    if kind == "reduce-scatter":
        # Its full arrays are the operands.
        counted = [shapes.get(o, "") for o in i.operands]
    elif kind == "to_host" and "update-slice" in i.text + i.result:
        # Written in place into a stack: only the slice crosses the link.
        counted = [shapes.get(i.operands[1], "")]
    else:
        # The end of a split transfer returns its result; an unsplit one is its own end.
        counted = [end.shape]
    return sum(a.num_bytes for shape in counted for a in parse_arrays(shape))
