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
from collections.abc import Iterable, Iterator

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
        return tuple(
            sorted((m for m in self.moves if m.by == KERNEL), key=lambda m: -m.num_bytes * m.times)
        )

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
        if any((graphs := self.in_graphs).values()):
            rows.append(
                f"  copies in CUDA graphs  to device {graphs['to_device']:>10,}"
                f"  to host {graphs['to_host']:>16,}"
            )
        moves = any(sum(total.values()) for total in (self.by_copies, self.by_kernels))
        rows.append(
            f"  {100 * self.share_of_copies:.1f} % by copies"
            if moves
            else "  the program itself moves nothing"
        )
        if self.has_callbacks:
            rows.append("  plus the bytes that callbacks move, which the program does not state")
        for m in self.kernels:
            what = m.leaf or "an array of the program's own"
            rows.append(
                f"  kernel {m.direction:<9} {m.times:>6} x {m.num_bytes:>13,}  {what} {m.shape}"
            )
        return "\n".join(rows)


def _bytes(moves: Iterable[HostMove]) -> dict[str, int]:
    """Return the bytes of moves per step, by direction; host-to-host moves count in both."""
    total: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)
    for move in moves:
        for direction in DIRECTIONS if move.direction not in DIRECTIONS else (move.direction,):
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
    for found in (*host_slices(text, unknown_trips), *host_copies(text, unknown_trips)):
        move = _move(tree, found, thunks)
        key = (found.computation, found.instruction)
        # A computation that two loops call is visited in each.
        moves[key] = (
            dataclasses.replace(move, times=move.times + moves[key].times) if key in moves else move
        )
    has_callbacks = _CALLBACK.search(text) is not None
    return HostTraffic(
        tuple(moves.values()), "descriptors" if thunks is None else "thunks", has_callbacks
    )


def _move(tree: "_CallTree", found: HostSlice | HostCopy, thunks: Thunks | None) -> HostMove:
    computation, scheduled = tree.scheduled(found.computation, found.instruction)
    if thunks is not None:
        is_copy = thunks.is_copy(scheduled)
    elif isinstance(found, HostSlice):
        is_copy = found.has_descriptor
    else:
        # A copy inside a fusion is part of a kernel.
        is_copy = found.op in _COPIES and scheduled == found.instruction
    of, name = tree.host_array(found.computation, found.instruction)
    # A copy to the host makes a new array, whatever its source is.
    array, leaf = (None, "") if name == found.instruction else tree.leaf(found.computation, name)
    dims = ",".join(map(str, (array or of).dims))
    return HostMove(
        computation=computation,
        instruction=scheduled,
        by=COPY if is_copy else KERNEL,
        direction=found.direction,
        num_bytes=found.num_bytes,
        times=found.times,
        leaf=leaf,
        shape=f"{(array or of).dtype}[{dims}]",
        in_graph=thunks is not None and scheduled in thunks.in_graphs,
    )


class _CallTree:
    """The calling instruction of each computation of a program."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._caller = {
            c: (name, i)
            for name in module.computations
            for i in module.instructions(name)
            for c in i.called
        }

    def scheduled(self, computation: str, instruction: str) -> tuple[str, str]:
        """Return the computation and instruction that the schedule runs.

        For an instruction inside a fusion, it is the fusion; else the instruction itself.
        """
        while (caller := self._caller.get(computation)) is not None and caller[
            1
        ].op not in _CONTROL:
            computation = caller[0]
            instruction = caller[1].result
        return computation, instruction

    def host_array(self, computation: str, instruction: str) -> tuple[Array, str]:
        """Return the host-memory array that an instruction accesses, and its result's name."""
        i = self.module.computations[computation].instructions[instruction]
        for name, shape in [*self._operands(computation, i), (i.result, i.shape)]:
            arrays = [a for a in parse_arrays(shape) if a.on_host]
            if arrays:
                return arrays[0], name
        raise AssertionError(f"{instruction} touches no host memory")

    def _operands(self, computation: str, i: Instruction) -> Iterator[tuple[str, str]]:
        of = self.module.computations[computation].instructions
        yield from ((o, of[o].shape) for o in i.operands if o in of)

    def leaf(self, computation: str, name: str) -> tuple[Array | None, str]:
        """Follow a result back to the program argument that it is; (None, "") if it is none."""
        element: int | None = None
        while (i := self.module.computations[computation].instructions.get(name)) is not None:
            if i.op == "parameter":
                number = int(i.rest.split(")")[0])
                caller = self._caller.get(computation)
                if caller is None:
                    named = _OP_NAME.search(i.rest)
                    return parse_arrays(i.shape)[0], "" if named is None else named[1].replace(
                        "\\'", "'"
                    )
                # A branch of a conditional has one operand, after the condition. A loop's body has
                # the carried tuple.
                number = (
                    caller[1].called.index(computation) + 1
                    if caller[1].op == "conditional"
                    else number
                )
                computation = caller[0]
                name = caller[1].operands[number]
            elif i.op == "get-tuple-element":
                index = _INDEX.search(i.rest)
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
