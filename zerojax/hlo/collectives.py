"""Read a compiled program: which collectives it runs in a step, and how many bytes each moves.

XLA's scheduled HLO is the program of one device. A computation is counted as often as it runs: loop bodies by their known trip
count. Bytes are those of the whole (unsharded) operand, so a model of P parameters gathered once in bfloat16 counts 2P; what
a ring sends is that times (N-1)/N.

`peak_gathered_bytes` follows gathered parameters through the schedule, from the gather to the last use of the value or of what
is computed from it alone (a copy, a cast, a transpose): the figure that tells ZeRO-3 from a program that only looks like it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")
_ITEM_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
TRIPS = re.compile(r"known_trip_count\D+(\d+)")
_CALLS = ("call", "conditional", "async-start", "custom-call", "fusion-start")
_VIEWS = ("bitcast", "get-tuple-element", "tuple", "opt-barrier", "optimization-barrier", "all-gather-done")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      op: its kind, such as "all-gather".
      dtype: HLO's name of the element type, such as "bf16"; the widest where several arrays are combined.
      num_bytes: bytes of the whole operand: results of a gather, operands of a reduction.
      times: how often it runs in a step.
      computation: the HLO computation that holds it.
    """

    op: str
    dtype: str
    num_bytes: int
    times: int
    computation: str


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: its result, the result's shape, the opcode, and the text of operands and attributes."""

    result: str
    shape: str
    op: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    @property
    def called(self) -> list[str]:
        groups = [c.strip().lstrip("%") for group in _BRANCHES.findall(self.rest) for c in group.split(",")]
        return _CALLED.findall(self.rest) + groups


def parse_module(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """Return the entry computation's name, and every computation's instructions in scheduled order."""
    entry, bodies = "", {}
    for is_entry, name, lines in computations_of(text):
        matches = (INSTRUCTION.match(line) for line in lines)
        bodies[name] = [Instruction(*m.groups()) for m in matches if m is not None]
        entry = name if is_entry else entry
    return entry, bodies


def bits_of(dtype: str) -> int:
    """Return the bits of one element of an HLO dtype."""
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0


def shapes_of(text: str) -> list[tuple[str, int]]:
    """Return (dtype, bytes) of each array shape in `text`."""
    found = []
    for dtype, dims in _SHAPE.findall(text):
        count = math.prod(int(d) for d in dims.split(",") if d)
        found.append((dtype, count * bits_of(dtype) // 8))
    return found


def computations_of(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """Yield each computation of a module: whether it is the entry, its name, and its lines."""
    name, is_entry, lines = None, False, []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith("HloModule"):
            name, is_entry, lines = header.group(2), bool(header.group(1)), []
        elif line.startswith("}") and name is not None:
            yield is_entry, name, lines
            name = None
        elif name is not None:
            lines.append(line)


def collectives(text: str, unknown_trips: int | None = None) -> list[Collective]:
    """List the collectives of a program.

    Args:
      text: `compiled.as_text()`.
      unknown_trips: how often a loop runs whose trip count XLA does not know; in a streamed step that is 1.

    Raises:
      ValueError: a loop that holds a collective has no known trip count.
    """
    entry, bodies = parse_module(text)
    found: list[Collective] = []

    def visit(name: str, times: int) -> None:
        results: dict[str, str] = {}
        for i in bodies.get(name, ()):
            results[i.result] = i.shape
            kind = i.op.removesuffix("-start")
            if kind in COLLECTIVES:
                found.append(_collective(kind, i, results, times, name))
            if i.op == "while":
                before, trips = len(found), TRIPS.search(i.rest)
                for computation in i.called:
                    visit(computation, times * int(trips.group(1)) if trips else times * (unknown_trips or 1))
                if trips is None and unknown_trips is None and len(found) > before:
                    raise ValueError(f"loop {i.result} holds collectives, and its trip count is not known")
            elif i.op in _CALLS:
                for computation in i.called:
                    visit(computation, times)

    visit(entry, 1)
    return found


def _collective(kind: str, i: Instruction, results: dict[str, str], times: int, computation: str) -> Collective:
    operands = [s for name in i.operands for s in shapes_of(results.get(name, ""))]
    outputs = shapes_of(i.shape)
    if i.op.endswith("-start") and len(outputs) > len(operands):  # a start's result is the pair (operands, results)
        outputs = outputs[len(operands) :]
    counted = operands if kind == "reduce-scatter" else outputs
    widest = max(counted, key=lambda s: bits_of(s[0]), default=("token", 0))
    return Collective(kind, widest[0], sum(n for _, n in counted), times, computation)


def collective_bytes(text: str, least_bytes: int = 0, unknown_trips: int | None = None) -> dict[str, int]:
    """Return the bytes of whole operands by collective, over a step.

    Args:
      text: `compiled.as_text()`.
      least_bytes: smaller collectives (the norm's scalar) are left out.
      unknown_trips: as for `collectives`.
    """
    total: dict[str, int] = {}
    for c in collectives(text, unknown_trips):
        if c.num_bytes >= least_bytes:
            total[c.op] = total.get(c.op, 0) + c.num_bytes * c.times
    return total


def peak_gathered_bytes(text: str) -> int:
    """Return the most bytes of gathered values that are live at once.

    A value is gathered if an all_gather made it, or if it is computed from gathered values alone. It is live from its
    definition to the last instruction that reads it; views (bitcasts, tuples) share its bytes. A loop adds its body's peak.

    Args:
      text: `compiled.as_text()`, in which instructions stand in scheduled order.
    """
    entry, bodies = parse_module(text)

    def peak(name: str) -> int:
        instructions = bodies.get(name, [])
        holds: dict[str, frozenset[str]] = {}  # result -> the gathered buffers that it is a view of
        size: dict[str, int] = {}
        last: dict[str, int] = {}
        born: dict[int, list[str]] = {}
        inner = [0] * len(instructions)
        constants = {i.result for i in instructions if i.op in ("constant", "iota")}
        for index, i in enumerate(instructions):
            seen = frozenset(b for o in i.operands for b in holds.get(o, ()))
            for buffer in seen:
                last[buffer] = index
            if i.op in _VIEWS:
                holds[i.result] = seen
            elif i.op in ("all-gather", "all-gather-start") or (
                seen and i.op in ("fusion", "copy", "transpose", "convert", "reshape", "copy-start", "copy-done")
                and all(o in constants or holds.get(o) for o in i.operands)
            ):  # fmt: skip
                shapes = shapes_of(i.shape)
                whole = shapes[len(i.operands) :] if i.op == "all-gather-start" and len(shapes) > len(i.operands) else shapes
                size[i.result] = sum(n for _, n in whole)
                holds[i.result] = frozenset({i.result})
                last[i.result] = index
                born.setdefault(index, []).append(i.result)
            if i.op == "while" or i.op in _CALLS:
                inner[index] = max((peak(c) for c in i.called), default=0)
        live = most = 0
        dying: dict[int, list[str]] = {}
        for buffer, index in last.items():
            dying.setdefault(index, []).append(buffer)
        for index in range(len(instructions)):
            live += sum(size[b] for b in born.get(index, ()))
            most = max(most, live + inner[index])
            live -= sum(size[b] for b in dying.get(index, ()))
        return most

    return peak(entry)
