"""Who moves what over the link to the host: copies by the GPU's copy engines, or kernels on its
cores.

A copy leaves the cores to products. A kernel that reads or writes host memory takes their place,
and the link's bandwidth is harder to reach from it. Which of both a slice becomes depends on its
index: `zerojax.hlo.host_link` tells which slices have the descriptor that makes a copy, and
`zerojax.hlo.thunks` what XLA's runtime will do. Copies in CUDA graphs are told apart from those on
streams: the driver decides who makes them, and no run has shown whether a copy engine does.

    traffic = hlo.host_traffic(text, hlo.read_thunks(folder), unknown_trips=1)
    print(traffic)
    assert not traffic.kernels

Each move is told with the array in host memory that it is of. That is followed through loops and
calls to an argument of the program, whose name is the leaf's.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from zerojax.hlo.check import checked_module
from zerojax.hlo.host_link import HostCopy, HostSlice, host_copies, host_slices
from zerojax.hlo.parse import Array, Instruction, Module, parse_arrays, reads_program
from zerojax.hlo.thunks import Thunks

COPY, KERNEL = "copy", "kernel"
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
    """One operation of a program that moves an array, or a slice of one, over the link to the host.

    Attributes:
      computation: the HLO computation whose schedule holds it.
      instruction: its name there; of an asynchronous operation the start's.
      by: "copy" or "kernel".
      direction: "to_device", "to_host"; or "host_to_host", which crosses the link in both
        directions.
      num_bytes: bytes that it moves each time.
      times: how often it runs in a step.
      leaf: the argument of the program that the array in host memory is, such as
        "state.master['blocks']['w1']"; empty where it is none, as what a copy to the host makes.
      shape: of that array, as "f32[32,4096,11008]".
      in_graph: whether it is a node of a CUDA graph; False without the program's thunks.
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
    """What a program moves over the link to the host in a step of one device. It prints as a table.

    What callbacks to the host move is not in the program, and so not here: `has_callbacks` tells
      whether there are some.

    Attributes:
      moves: each operation: slices, then whole arrays, each in the order of the schedule.
      source: "thunks" where those of the program told copies from kernels, "descriptors" where the
        HLO did.
      has_callbacks: whether the program calls back, and so may move more than it says.
    """

    moves: tuple[HostMove, ...]
    source: str
    has_callbacks: bool = False

    @property
    def by_copies(self) -> dict[str, int]:
        """Bytes by copies in a step, by direction: "to_device", "to_host"."""
        return _bytes(m for m in self.moves if m.by == COPY)

    @property
    def by_kernels(self) -> dict[str, int]:
        """Bytes by kernels in a step, by direction."""
        return _bytes(m for m in self.moves if m.by == KERNEL)

    @property
    def in_graphs(self) -> dict[str, int]:
        """Those of `by_copies` whose copies are nodes of CUDA graphs, in bytes by direction."""
        return _bytes(m for m in self.moves if m.by == COPY and m.in_graph)

    @property
    def kernels(self) -> tuple[HostMove, ...]:
        """The moves that kernels do, of the most bytes in a step first."""
        return tuple(
            sorted((m for m in self.moves if m.by == KERNEL), key=lambda m: -m.num_bytes * m.times)
        )

    @property
    def share_of_copies(self) -> float:
        """The part of the bytes that copies move; 1 where nothing moves."""
        copies, kernels = sum(self.by_copies.values()), sum(self.by_kernels.values())
        return copies / (copies + kernels) if copies + kernels else 1.0

    def __str__(self) -> str:
        """Return a table: bytes by direction, and the arrays that kernels move."""
        rows = [
            f"bytes of a step over the link to the host, counted in its program by its {self.source}"
        ]
        for by, total in ((COPY, self.by_copies), (KERNEL, self.by_kernels)):
            rows.append(
                f"  by {by:<6}  to device {total['to_device']:>16,}  to host {total['to_host']:>16,}"
            )
        if any((graphs := self.in_graphs).values()):
            rows.append(
                f"  copies in CUDA graphs  to device {graphs['to_device']:>10,}  to host {graphs['to_host']:>16,}"
            )
        moves = any(sum(total.values()) for total in (self.by_copies, self.by_kernels))
        rows.append(
            f"  {100 * self.share_of_copies:.1f} % by copies"
            if moves
            else "  the program itself moves nothing"
        )
        if self.has_callbacks:
            rows.append("  besides what the program's callbacks move, which it does not say")
        for m in self.kernels:
            what = m.leaf or "an array of the program's own"
            rows.append(
                f"  kernel {m.direction:<9} {m.times:>6} x {m.num_bytes:>13,}  {what} {m.shape}"
            )
        return "\n".join(rows)


def _bytes(moves: Iterable[HostMove]) -> dict[str, int]:
    """Return the bytes of moves in a step, by direction; those from host to host cross the link
    both ways.
    """
    total: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)
    for move in moves:
        for direction in DIRECTIONS if move.direction not in DIRECTIONS else (move.direction,):
            total[direction] += move.num_bytes * move.times
    return total


@reads_program
def host_traffic(
    text: str, thunks: Thunks | None = None, unknown_trips: int | None = None
) -> HostTraffic:
    """Tell who moves what over the link to the host, for one device.

    Args:
      text: `compiled.as_text()`.
      thunks: of the same compilation. Without them a slice counts as a copy if XLA gave it a
        descriptor.
      unknown_trips: how often a loop runs whose trip count XLA does not know; in a streamed step
        that is 1.

    Raises:
      ValueError: a loop that moves something has no known trip count, or the thunks are of another
        program.
    """
    tree = _CallTree(checked_module(text))
    moves: dict[tuple[str, str], HostMove] = {}
    for found in (*host_slices(text, unknown_trips), *host_copies(text, unknown_trips)):
        move, key = _move(tree, found, thunks), (found.computation, found.instruction)
        # What two loops call is found in each.
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
        # A copy inside of a fusion is part of a kernel.
        is_copy = found.op in _COPIES and scheduled == found.instruction
    of, name = tree.host_array(found.computation, found.instruction)
    # What a copy to the host makes is a new array, whatever it is a copy of.
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
    """Which instruction of a program calls each computation."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._caller = {
            c: (name, i)
            for name in module.computations
            for i in module.instructions(name)
            for c in i.called
        }

    def scheduled(self, computation: str, instruction: str) -> tuple[str, str]:
        """Return the computation and the instruction, at or around one, that the schedule runs: of
        a part of a fusion, it.
        """
        while (caller := self._caller.get(computation)) is not None and caller[
            1
        ].op not in _CONTROL:
            computation, instruction = caller[0], caller[1].result
        return computation, instruction

    def host_array(self, computation: str, instruction: str) -> tuple[Array, str]:
        """Return the array in host memory that an instruction reads or writes, and the result that
        it is.
        """
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
        """Follow a result back to the argument of the program that it is; (None, "") where it is
        none.
        """
        element: int | None = None
        while (i := self.module.computations[computation].instructions.get(name)) is not None:
            if i.op == "parameter":
                number, caller = int(i.rest.split(")")[0]), self._caller.get(computation)
                if caller is None:
                    named = _OP_NAME.search(i.rest)
                    return parse_arrays(i.shape)[0], "" if named is None else named[1].replace(
                        "\\'", "'"
                    )
                # A branch of a conditional has one operand, after the condition; a loop's body has
                # the tuple that it carries.
                number = (
                    caller[1].called.index(computation) + 1
                    if caller[1].op == "conditional"
                    else number
                )
                computation, name = caller[0], caller[1].operands[number]
            elif i.op == "get-tuple-element":
                index = _INDEX.search(i.rest)
                name, element = i.operands[0], None if index is None else int(index[1])
            elif i.op == "tuple" and element is not None:
                name, element = i.operands[element], None
            elif i.op in _SAME or i.op == "while" or i.op.endswith("-done"):
                name = i.operands[0]
            elif i.called and i.op not in _CONTROL:  # what a fusion updates in place is its root's
                inner = self.module.computations[i.called[0]]
                computation, name = inner.name, inner.root
            else:
                break
        return None, ""
