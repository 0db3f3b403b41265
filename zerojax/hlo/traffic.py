"""Find out whether copies or kernels move a program's data over the link to the host.

Copies are made by the GPU's copy engines and leave the cores to products. A kernel that reads or
writes host memory occupies the cores, and reaches less of the link's bandwidth. A slice becomes one
or the other depending on its index: `zerojax.hlo.host_link` finds the slices with the descriptor
that makes a copy, and `zerojax.hlo.thunks` reads what XLA's runtime will do. Copies in CUDA graphs
are listed separately from copies on streams: the driver decides how they are made, and no run has
shown whether a copy engine makes them.

    traffic = hlo.host_traffic(text, hlo.read_thunks(folder), unknown_trips=1)
    print(traffic)
    assert not traffic.kernels

Each move is reported with its array in host memory. The array is followed through loops and calls
to an argument of the program, whose name is the leaf's name.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

from zerojax.hlo.check import checked_module
from zerojax.hlo.host_link import HostCopy, HostSlice, host_copies, host_slices
from zerojax.hlo.parse import Array, Instruction, Module, parse_arrays, reads_program
from zerojax.hlo.thunks import Thunks

COPY = "copy"
KERNEL = "kernel"
DIRECTIONS = ("to_device", "to_host")
_COPIES = ("copy", "copy-start")
_CONTROL = ("while", "conditional", "call")
_SAME = (
    "copy",
    "copy-start",
    "copy-done",
    "bitcast",
    "reshape",
    "dynamic-update-slice",
    "opt-barrier",
    "optimization-barrier",
)
_CALLBACK = re.compile(r'custom_call_target="[^"]*callback[^"]*"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_INDEX = re.compile(r"index=(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class HostMove:
    """An operation of a program that moves an array, or a slice of one, over the link to the host.

    Attributes:
      computation: HLO computation whose schedule contains the operation.
      instruction: name of the instruction there; for an asynchronous operation, its start.
      by: "copy" or "kernel".
      direction: "to_device", "to_host", or "host_to_host", which crosses the link in both
        directions.
      num_bytes: bytes moved in each run.
      times: number of runs per step.
      leaf: program argument that the array in host memory is, such as
        "state.master['blocks']['w1']"; empty if it is no argument, such as the result of a copy to
        the host.
      shape: shape of that array, such as "f32[32,4096,11008]".
      in_graph: whether the operation is a node of a CUDA graph; False without the program's thunks.
    """

    computation: str
    instruction: str
    by: str
    direction: str
    num_bytes: int
    times: int
    leaf: str
    shape: str
    in_graph: bool = False


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """The data that a program moves over one device's link to the host in a step.

    It prints as a table. Bytes moved by callbacks to the host are not in the program, and so not
    included: `has_callbacks` reports whether there are any.

    Attributes:
      moves: all operations that move host memory: first slices, then full arrays, each in scheduled
        order.
      source: how copies and kernels were distinguished: "thunks" (the program's thunks) or
        "descriptors" (the HLO).
      has_callbacks: whether the program calls back to the host, and so may move more bytes.
    """

    moves: tuple[HostMove, ...]
    source: str
    has_callbacks: bool = False

    @property
    def by_copies(self) -> dict[str, int]:
        """Bytes moved by copies per step, by direction: "to_device", "to_host"."""
        return _bytes(m for m in self.moves if m.by == COPY)

    @property
    def by_kernels(self) -> dict[str, int]:
        """Bytes moved by kernels per step, by direction: "to_device", "to_host"."""
        return _bytes(m for m in self.moves if m.by == KERNEL)

    @property
    def in_graphs(self) -> dict[str, int]:
        """Bytes per step of `by_copies` that nodes of CUDA graphs move, by direction."""
        return _bytes(m for m in self.moves if m.by == COPY and m.in_graph)

    @property
    def kernels(self) -> tuple[HostMove, ...]:
        """The moves made by kernels, most bytes per step first."""
        moves = [m for m in self.moves if m.by == KERNEL]
        return tuple(sorted(moves, key=lambda m: -m.num_bytes * m.times))

    @property
    def share_of_copies(self) -> float:
        """The share of the bytes that copies move; 1 if the program moves nothing."""
        copies = sum(self.by_copies.values())
        kernels = sum(self.by_kernels.values())
        return copies / (copies + kernels) if copies + kernels else 1.0

    def __str__(self) -> str:
        """Return a table of bytes by direction, and of the arrays that kernels move."""
        rows = [
            f"bytes per step over the link to the host, counted in the program by its {self.source}"
        ]
        for by, total in ((COPY, self.by_copies), (KERNEL, self.by_kernels)):
            rows.append(
                f"  by {by:<6}  to device {total['to_device']:>16,}"
                f"  to host {total['to_host']:>16,}"
            )
        in_graphs = self.in_graphs
        if any(in_graphs.values()):
            rows.append(
                f"  copies in CUDA graphs  to device {in_graphs['to_device']:>10,}"
                f"  to host {in_graphs['to_host']:>16,}"
            )
        if any(self.by_copies.values()) or any(self.by_kernels.values()):
            rows.append(f"  {100 * self.share_of_copies:.1f} % by copies")
        else:
            rows.append("  the program itself moves nothing")
        if self.has_callbacks:
            rows.append("  plus the bytes that callbacks move, which the program does not state")
        for m in self.kernels:
            leaf = m.leaf or "an array of the program's own"
            rows.append(
                f"  kernel {m.direction:<9} {m.times:>6} x {m.num_bytes:>13,}  {leaf} {m.shape}"
            )
        return "\n".join(rows)


def _bytes(moves: Iterable[HostMove]) -> dict[str, int]:
    """Return the bytes of moves per step, by direction; host-to-host moves count in both."""
    total: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)
    for move in moves:
        directions = (move.direction,) if move.direction in DIRECTIONS else DIRECTIONS
        for direction in directions:
            total[direction] += move.num_bytes * move.times
    return total


@reads_program
def host_traffic(
    text: str, thunks: Thunks | None = None, unknown_trips: int | None = None
) -> HostTraffic:
    """Return the data that a program moves over one device's link, by copies and by kernels.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.
      thunks: thunks of the same compilation. Without them, a slice counts as a copy if XLA gave it
        a descriptor.
      unknown_trips: trip count to assume for a loop whose count XLA does not know; 1 in a streamed
        step.

    Returns:
      All moves over the link, with their bytes and how often each runs in a step.

    Raises:
      ValueError: a loop that moves host memory has no known trip count, or the thunks belong to
        another program.
    """
    tree = _CallTree(checked_module(text))
    moves: dict[tuple[str, str], HostMove] = {}
    for access in (*host_slices(text, unknown_trips), *host_copies(text, unknown_trips)):
        move = _move(tree, access, thunks)
        key = (access.computation, access.instruction)
        if key in moves:  # a computation that two loops call is visited in each
            move = dataclasses.replace(move, times=move.times + moves[key].times)
        moves[key] = move
    source = "descriptors" if thunks is None else "thunks"
    return HostTraffic(tuple(moves.values()), source, _CALLBACK.search(text) is not None)


def _move(tree: "_CallTree", access: HostSlice | HostCopy, thunks: Thunks | None) -> HostMove:
    computation, scheduled = tree.scheduled(access.computation, access.instruction)
    if thunks is not None:
        is_copy = thunks.is_copy(scheduled)
    elif isinstance(access, HostSlice):
        is_copy = access.has_descriptor
    else:
        # A copy inside a fusion is part of a kernel.
        is_copy = access.op in _COPIES and scheduled == access.instruction
    array, name = tree.host_array(access.computation, access.instruction)
    leaf = ""
    # A copy to the host makes a new array, whatever its source is.
    if name != access.instruction:
        argument, leaf = tree.leaf(access.computation, name)
        array = argument or array
    dims = ",".join(map(str, array.dims))
    return HostMove(
        computation=computation,
        instruction=scheduled,
        by=COPY if is_copy else KERNEL,
        direction=access.direction,
        num_bytes=access.num_bytes,
        times=access.times,
        leaf=leaf,
        shape=f"{array.dtype}[{dims}]",
        in_graph=thunks is not None and scheduled in thunks.in_graphs,
    )


class _Caller(NamedTuple):
    """The instruction that calls a computation, and the computation that contains it."""

    computation: str
    instruction: Instruction


class _CallTree:
    """The calling instruction of each computation of a program."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._callers: dict[str, _Caller] = {}  # by the called computation
        for name in module.computations:
            for i in module.instructions(name):
                for called in i.called:
                    self._callers[called] = _Caller(name, i)

    def scheduled(self, computation: str, instruction: str) -> tuple[str, str]:
        """Return the computation and instruction that the schedule runs.

        For an instruction inside a fusion, it is the fusion; else the instruction itself.
        """
        caller = self._callers.get(computation)
        while caller is not None and caller.instruction.op not in _CONTROL:
            computation = caller.computation
            instruction = caller.instruction.result
            caller = self._callers.get(computation)
        return computation, instruction

    def host_array(self, computation: str, instruction: str) -> tuple[Array, str]:
        """Return the host-memory array that an instruction accesses, and its result's name."""
        i = self.module.computations[computation].instructions[instruction]
        for operand in [*self._operands(computation, i), i]:
            for array in parse_arrays(operand.shape):
                if array.on_host:
                    return array, operand.result
        raise AssertionError(f"{instruction} touches no host memory")

    def _operands(self, computation: str, i: Instruction) -> list[Instruction]:
        instructions = self.module.computations[computation].instructions
        return [instructions[name] for name in i.operands if name in instructions]

    def leaf(self, computation: str, name: str) -> tuple[Array | None, str]:
        """Follow a result back to the program argument that it is; (None, "") if it is none."""
        element: int | None = None
        while (i := self.module.computations[computation].instructions.get(name)) is not None:
            if i.op == "parameter":
                caller = self._callers.get(computation)
                if caller is None:
                    op_name = _OP_NAME.search(i.text)
                    leaf = "" if op_name is None else op_name[1].replace("\\'", "'")
                    return parse_arrays(i.shape)[0], leaf
                if caller.instruction.op == "conditional":
                    # A branch has one operand, after the condition.
                    number = caller.instruction.called.index(computation) + 1
                else:
                    number = int(i.text.split(")")[0])  # 0 in a loop's body: the carried tuple
                computation = caller.computation
                name = caller.instruction.operands[number]
            elif i.op == "get-tuple-element":
                index = _INDEX.search(i.text)
                name = i.operands[0]
                element = None if index is None else int(index[1])
            elif i.op == "tuple" and element is not None:
                name = i.operands[element]
                element = None
            elif i.op in _SAME or i.op == "while" or i.op.endswith("-done"):
                name = i.operands[0]
            elif i.called and i.op not in _CONTROL:
                # A fusion's root is the array that it updates in place.
                inner = self.module.computations[i.called[0]]
                computation = inner.name
                name = inner.root
            else:
                break
        return None, ""
