"""Read a compiled program: which collectives it runs in a step, and how many bytes each moves.

XLA's scheduled HLO is the program of one device. A computation is counted as often as it runs: loop bodies by their known trip
count. Bytes are those of the whole (unsharded) operand, so a model of P parameters gathered once in bfloat16 counts 2P; what
a ring sends is that times (N-1)/N.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")

_ITEM_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r"known_trip_count\D+(\d+)")


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


def _bits(dtype: str) -> int:
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0


def _shapes(text: str) -> list[tuple[str, int]]:
    """Return (dtype, bytes) of each array shape in `text`."""
    found = []
    for dtype, dims in _SHAPE.findall(text):
        count = math.prod(int(d) for d in dims.split(",") if d)
        found.append((dtype, count * _bits(dtype) // 8))
    return found


def _computations(text: str) -> Iterator[tuple[bool, str, list[str]]]:
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


def collectives(text: str) -> list[Collective]:
    """List the collectives of a program.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: a loop that holds a collective has no known trip count.
    """
    bodies: dict[str, list[str]] = {}
    entry = ""
    for is_entry, name, lines in _computations(text):
        bodies[name] = lines
        entry = name if is_entry else entry
    found: list[Collective] = []

    def visit(name: str, times: int) -> None:
        results: dict[str, str] = {}
        for line in bodies.get(name, ()):
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            result, shape, op, rest = match.groups()
            results[result] = shape
            kind = op.removesuffix("-start")
            if kind in COLLECTIVES:
                found.append(_collective(kind, shape, rest, results, times, name, op.endswith("-start")))
            called = _CALLED.findall(rest)
            called += [c.strip().lstrip("%") for group in _BRANCHES.findall(rest) for c in group.split(",")]
            if op == "while":
                before = len(found)
                trips = _TRIPS.search(rest)
                for computation in called:
                    visit(computation, times * int(trips.group(1)) if trips else times)
                if trips is None and len(found) > before:
                    raise ValueError(f"loop {result} holds collectives, and its trip count is not known")
            elif op in ("call", "conditional", "async-start", "custom-call"):
                for computation in called:
                    visit(computation, times)

    visit(entry, 1)
    return found


def _collective(
    kind: str, shape: str, rest: str, results: dict[str, str], times: int, computation: str, is_start: bool
) -> Collective:
    operands = [s for name in re.findall(r"%([\w.\-]+)", rest.split(")")[0]) for s in _shapes(results.get(name, ""))]
    operands = operands or _shapes(rest.split(")")[0])
    outputs = _shapes(shape)
    if is_start and len(outputs) > len(operands):  # a start's result is the pair (operands, results)
        outputs = outputs[len(operands) :]
    counted = operands if kind == "reduce-scatter" else outputs
    widest = max(counted, key=lambda s: _bits(s[0]), default=("token", 0))
    return Collective(kind, widest[0], sum(n for _, n in counted), times, computation)


def collective_bytes(text: str, least_bytes: int = 0) -> dict[str, int]:
    """Return the bytes of whole operands by collective, over a step.

    Args:
      text: `compiled.as_text()`.
      least_bytes: smaller collectives (the norm's scalar) are left out.
    """
    total: dict[str, int] = {}
    for c in collectives(text):
        if c.num_bytes >= least_bytes:
            total[c.op] = total.get(c.op, 0) + c.num_bytes * c.times
    return total
