"""Parse the text of a compiled program: its computations, their instructions and result shapes.

`compiled.as_text()` is the program that one device runs, after partitioning, fusion and scheduling.
It is read line by line:

    %gathered = bf16[64,64]{1,0:S(5)} all-gather(%shard), channel_id=1, dimensions={0}
     result     shape                 op         rest

The text is parsed rather than the proto, because every version and backend of XLA provides the text
without its compiler's classes. Instructions are kept in scheduled order. Attributes stay text in
`rest`; only the attributes that every reader needs are properties.

A text that XLA does not write is refused with the line and the reason. Known kinds of damage are
checked before a program is read (`zerojax.hlo.check`). `reads_program` turns any other failure of a
reader into the same error, with its cause.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, ParamSpec, TypeVar

_ITEM_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([\d,]*)([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")
_TRIPS = re.compile(r"known_trip_count[^\d-]*(-?\d+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_COMMENTED = re.compile(r"^\s*(//|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """An array shape with its layout.

    Attributes:
      dtype: HLO's name of the element type, such as "bf16".
      dims: size of each dim.
      minor_to_major: dims from the fastest-varying to the slowest.
      on_host: whether the array is in pinned host memory, which is memory space S(5).
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    on_host: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.dims) * parse_bits(self.dtype) // 8

    @property
    def integers(self) -> range | None:
        """The range of integers that an element can hold; None if elements are not integers."""
        bits = parse_bits(self.dtype)
        if self.dtype == "pred":
            return range(2)
        return {"u": range(1 << bits), "s": range(-(1 << bits - 1), 1 << bits - 1)}.get(
            self.dtype[0]
        )

    def stride(self, dim: int) -> int:
        """Return the number of bytes from one index of `dim` to the next."""
        faster = self.minor_to_major[: self.minor_to_major.index(dim)]
        return math.prod(self.dims[d] for d in faster) * parse_bits(self.dtype) // 8


_TOO_LONG = re.compile(r"\d{1000}\d*")
"""A number with 1,000 digits or more: no program has one, and Python converts at most 4,300 digits.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      result: name of the result.
      shape: text of the result's shape; a tuple's is in parentheses.
      op: opcode.
      rest: text of the operands and attributes.
      line: line number in the program's text, from 1; 0 if unknown.
    """

    result: str
    shape: str
    op: str
    rest: str
    line: int = 0

    @property
    def operands(self) -> list[str]:
        """Names of the results that the instruction reads."""
        # Attributes such as control-predecessors name results too, so only the text up to the end
        # of the operands is read.
        return re.findall(r"%([\w.\-#]+)", self.rest.split("), ")[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction runs.

        They are a fusion's computation, a loop's condition and body, or a conditional's branches.
        """
        branches = [
            c.strip().lstrip("%")
            for group in _BRANCHES.findall(self.rest)
            for c in group.split(",")
        ]
        return _CALLED.findall(self.rest) + [c for c in branches if c]

    @property
    def trips(self) -> int | None:
        """The trip count of a loop; None if XLA does not know it."""
        trips = _TRIPS.search(self.rest)
        return int(trips.group(1)) if trips else None


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """A function of HLO.

    Attributes:
      name: name of the computation.
      root: name of the result that it returns; empty if no instruction is marked ROOT.
      instructions: instructions by their result's name, in scheduled order.
    """

    name: str
    root: str
    instructions: Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A parsed program.

    Attributes:
      entry: name of the computation that runs first.
      computations: all computations by name.
    """

    entry: str
    computations: Mapping[str, Computation]

    def instructions(self, computation: str) -> list[Instruction]:
        """Return a computation's instructions in scheduled order, [] if it is not in the text."""
        return (
            list(self.computations[computation].instructions.values())
            if computation in self.computations
            else []
        )


class _Lines(NamedTuple):
    """The lines of a computation, with their line numbers in the program's text."""

    name: str
    is_entry: bool
    lines: list[tuple[int, str]]


def parse_module(text: str) -> Module:
    """Parse a compiled program.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.

    Returns:
      The parsed program.

    Raises:
      ValueError: a line is not valid, the text was truncated, or it has no ENTRY.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"text is of type {type(text).__name__}: give the text of a compiled program, "
            "compiled.as_text()"
        )
    entry = ""
    computations = {}
    for name, is_entry, lines in _computations(text):
        if name in computations:
            raise fault(lines[0][0] if lines else 0, f"two computations are named {name}")
        instructions = dict[str, Instruction]()
        root = ""
        for number, line in lines:
            match = _INSTRUCTION.match(line)
            if match is None:
                raise fault(number, f"not an instruction: {line.strip()}")
            if (long := _TOO_LONG.search(line)) is not None:
                raise fault(number, f"a number with {len(long.group()):,} digits is too long")
            is_root, result, *texts = match.groups()
            i = Instruction(result, *texts, line=number)
            instructions |= _elements(i, instructions)
            if result in instructions:
                raise fault(number, f"{name} has two instructions named {result}")
            instructions[result] = i
            root = result if is_root else root
        computations[name] = Computation(name, root, instructions)
        entry = name if is_entry else entry
    if not entry:
        raise ValueError(
            "the text has no ENTRY, or was cut before it: give the full text of a compiled program"
        )
    return Module(entry, computations)


def _elements(i: Instruction, before: Mapping[str, Instruction]) -> dict[str, Instruction]:
    """Return the tuple elements that an instruction reads by number.

    Dumps of jax 0.12 write such an operand as `%loop#2`. Each element is returned as the equivalent
    get-tuple-element, named "loop#2".
    """
    found = {}
    for name, number in _ELEMENT.findall(i.rest.split("), ")[0]):
        if name in before and f"{name}#{number}" not in before:
            result, parts = f"{name}#{number}", tuple_shapes(before[name].shape)
            if int(number) >= len(parts):
                raise fault(
                    i.line,
                    f"{i.result} reads element {number} of {name}, which has {len(parts)} elements",
                )
            rest = f"%{name}), index={number}"
            found[result] = Instruction(
                result, parts[int(number)], "get-tuple-element", rest, line=i.line
            )
    return found


def tuple_shapes(shape: str) -> list[str]:
    """Return the shapes of a tuple's elements, given the text of the tuple's shape."""
    depth = 0
    parts = [""]
    for c in _COMMENT.sub("", shape)[1:-1]:
        depth += (c in "({[") - (c in ")}]")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def module_name(text: str) -> str:
    """Return the name of a program, such as "jit_step"; empty if the text does not state it.

    Args:
      text: the program's HLO, `compiled.as_text()`.
    """
    name = re.match(r"HloModule ([\w.\-]+)", text)
    return "" if name is None else name.group(1)


def _computations(text: str) -> Iterator[_Lines]:
    """Yield each computation of a module.

    Raises:
      ValueError: a computation is not closed, or an instruction is outside any computation.
    """
    found: _Lines | None = None
    for number, line in enumerate(text.splitlines(), 1):
        header = None if line.startswith("HloModule") else _HEADER.match(line)
        if found is None and header is None:
            if _INSTRUCTION.match(line):
                raise fault(number, f"an instruction is outside any computation: {line.strip()}")
        elif header is not None:
            if found is not None:
                raise fault(
                    number,
                    f"computation {found.name} is not closed before {header.group(2)} begins",
                )
            found = _Lines(header.group(2), bool(header.group(1)), [])
        elif found is not None and line.startswith("}"):  # lines inside a computation are indented
            yield found
            found = None
        elif found is not None and not _COMMENTED.match(line):
            found.lines.append((number, line))
    if found is not None:
        raise ValueError(f"the text was cut: computation {found.name} is not closed")


def is_shape(shape: str) -> bool:
    """Return whether a text consists only of arrays and tuples of arrays."""
    rest = _ARRAY.sub("", _COMMENT.sub("", shape))
    depth = 0
    for c in rest:
        depth += (c == "(") - (c == ")")
        if c not in "(), " or depth < 0:
            return False
    return not depth


def parse_arrays(shape: str) -> list[Array]:
    """Return the arrays in the text of a shape: one array, or a tuple's arrays."""
    arrays = []
    for dtype, sizes, order, rest in _ARRAY.findall(shape):
        dims = parse_ints(sizes)
        # Without a layout, as in a signature, the last dim varies fastest.
        arrays.append(
            Array(
                dtype, dims, parse_ints(order) or tuple(reversed(range(len(dims)))), "S(5)" in rest
            )
        )
    return arrays


def parse_ints(text: str) -> tuple[int, ...]:
    """Return the integers in a text, such as the dims of a shape."""
    return tuple(int(n) for n in re.findall(r"-?\d+", text))


def parse_bits(dtype: str) -> int:
    """Return the number of bits in one element of an HLO dtype."""
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0


P = ParamSpec("P")
R = TypeVar("R")
_STUMBLES = (
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    ArithmeticError,
    RecursionError,
    StopIteration,
    MemoryError,
)


class ProgramTextError(ValueError):
    """A text is not a program that XLA can have written; the message gives line and reason."""


def fault(line: int, reason: str) -> ProgramTextError:
    """Return the error for a line of a program's text.

    Args:
      line: line number, from 1; 0 if the fault is in no single line.
      reason: what is wrong with the line; truncated to 300 characters.
    """
    return ProgramTextError(
        f"line {line} of the program's text: {_short(reason)}" if line else _short(reason)
    )


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}.."


def reads_program(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a reader of a program's text so that whatever fails in it becomes a ValueError.

    The error names the line and the instruction that was being read.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ProgramTextError:
            raise
        except _STUMBLES as error:
            line, name = _place(error)
            said = f"{type(error).__name__}: {error}"
            raise fault(line, f"{name or 'the text'} is not valid HLO text ({said})") from error

    return checked


def _place(error: BaseException) -> tuple[int, str]:
    """Return the line and name of the instruction being read when `error` was raised.

    It is the local variable `i` of the innermost call that has one.
    """
    found = (0, "")
    trace = error.__traceback__
    while trace is not None:
        i = trace.tb_frame.f_locals.get("i")
        line = getattr(i, "line", None)
        result = getattr(i, "result", None)
        if isinstance(line, int) and isinstance(result, str):
            found = (line, result)
        trace = trace.tb_next
    return found
