"""Parse the text of a compiled program: its computations, their instructions and result shapes.

`compiled.as_text()` is the program that one device runs, after partitioning, fusion and scheduling.
It is read line by line:

    %gathered = bf16[64,64]{1,0:S(5)} all-gather(%shard), channel_id=1, dimensions={0}
     result     shape                 op         text

The text is parsed rather than the proto, because every version and backend of XLA provides the text
without its compiler's classes. Instructions are kept in scheduled order. Attributes stay text in
`text`; only the attributes that every reader needs are properties.

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
        if self.dtype.startswith("u"):
            return range(1 << bits)
        if self.dtype.startswith("s"):
            return range(-(1 << bits - 1), 1 << bits - 1)
        return None

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
      text: text of the operands and attributes.
      line: line number in the program's text, from 1; 0 if unknown.
    """

    result: str
    shape: str
    op: str
    text: str
    line: int = 0

    @property
    def operands(self) -> list[str]:
        """Names of the results that the instruction reads."""
        # Attributes such as control-predecessors name results too, so only the text up to the end
        # of the operands is read.
        return re.findall(r"%([\w.\-#]+)", self.text.split("), ")[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction runs.

        They are a fusion's computation, a loop's condition and body, or a conditional's branches.
        """
        names = _CALLED.findall(self.text)
        for branches in _BRANCHES.findall(self.text):
            for branch in branches.split(","):
                name = branch.strip().lstrip("%")
                if name:
                    names.append(name)
        return names

    @property
    def trips(self) -> int | None:
        """The trip count of a loop; None if XLA does not know it."""
        trips = _TRIPS.search(self.text)
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
        if computation not in self.computations:
            return []
        return list(self.computations[computation].instructions.values())


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
    for name, is_entry, lines in _split_computations(text):
        if name in computations:
            raise fault(lines[0][0] if lines else 0, f"two computations are named {name}")
        computations[name] = _parse_computation(name, lines)
        if is_entry:
            entry = name
    if not entry:
        raise ValueError(
            "the text has no ENTRY, or was cut before it: give the full text of a compiled program"
        )
    return Module(entry, computations)


def _parse_computation(name: str, lines: list[tuple[int, str]]) -> Computation:
    """Parse the numbered lines of a computation."""
    instructions = dict[str, Instruction]()
    root = ""
    for number, line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:
            raise fault(number, f"not an instruction: {line.strip()}")
        long = _TOO_LONG.search(line)
        if long is not None:
            raise fault(number, f"a number with {len(long.group()):,} digits is too long")
        is_root, result, *texts = match.groups()
        i = Instruction(result, *texts, line=number)
        instructions |= _elements(i, instructions)
        if result in instructions:
            raise fault(number, f"{name} has two instructions named {result}")
        instructions[result] = i
        if is_root:
            root = result
    return Computation(name, root, instructions)


def _elements(i: Instruction, before: Mapping[str, Instruction]) -> dict[str, Instruction]:
    """Return the tuple elements that an instruction reads by number.

    Dumps of jax 0.12 write such an operand as `%loop#2`. Each element is returned as the equivalent
    get-tuple-element, named "loop#2".
    """
    elements = {}
    for name, number in _ELEMENT.findall(i.text.split("), ")[0]):
        result = f"{name}#{number}"
        if name not in before or result in before:
            continue
        shapes = tuple_shapes(before[name].shape)
        if int(number) >= len(shapes):
            raise fault(
                i.line,
                f"{i.result} reads element {number} of {name}, which has {len(shapes)} elements",
            )
        text = f"%{name}), index={number}"
        elements[result] = Instruction(
            result, shapes[int(number)], "get-tuple-element", text, line=i.line
        )
    return elements


def tuple_shapes(shape: str) -> list[str]:
    """Return the shapes of a tuple's elements, given the text of the tuple's shape."""
    depth = 0
    elements = [""]
    for c in _COMMENT.sub("", shape)[1:-1]:
        depth += (c in "({[") - (c in ")}]")
        if c == "," and not depth:
            elements.append("")
        else:
            elements[-1] += c
    return [element.strip() for element in elements]


def module_name(text: str) -> str:
    """Return the name of a program, such as "jit_step"; empty if the text does not state it.

    Args:
      text: the program's HLO, `compiled.as_text()`.
    """
    name = re.match(r"HloModule ([\w.\-]+)", text)
    return "" if name is None else name.group(1)


def _split_computations(text: str) -> Iterator[_Lines]:
    """Yield each computation of a module.

    Raises:
      ValueError: a computation is not closed, or an instruction is outside any computation.
    """
    current: _Lines | None = None  # the computation that is open
    for number, line in enumerate(text.splitlines(), 1):
        header = None if line.startswith("HloModule") else _HEADER.match(line)
        if header is not None:
            if current is not None:
                raise fault(
                    number,
                    f"computation {current.name} is not closed before {header.group(2)} begins",
                )
            current = _Lines(header.group(2), bool(header.group(1)), [])
        elif current is None:
            if _INSTRUCTION.match(line):
                raise fault(number, f"an instruction is outside any computation: {line.strip()}")
        elif line.startswith("}"):  # lines inside a computation are indented
            yield current
            current = None
        elif not _COMMENTED.match(line):
            current.lines.append((number, line))
    if current is not None:
        raise ValueError(f"the text was cut: computation {current.name} is not closed")


def is_shape(shape: str) -> bool:
    """Return whether a text consists only of arrays and tuples of arrays."""
    depth = 0
    for c in _ARRAY.sub("", _COMMENT.sub("", shape)):
        depth += (c == "(") - (c == ")")
        if c not in "(), " or depth < 0:
            return False
    return not depth


def parse_arrays(shape: str) -> list[Array]:
    """Return the arrays in the text of a shape: one array, or a tuple's arrays."""
    arrays = []
    for dtype, sizes, order, tiling_and_space in _ARRAY.findall(shape):
        dims = parse_ints(sizes)
        # Without a layout, as in a signature, the last dim varies fastest.
        minor_to_major = parse_ints(order) or tuple(reversed(range(len(dims))))
        arrays.append(Array(dtype, dims, minor_to_major, "S(5)" in tiling_and_space))
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
            line, name = _failed_instruction(error)
            cause = f"{type(error).__name__}: {error}"
            raise fault(line, f"{name or 'the text'} is not valid HLO text ({cause})") from error

    return checked


def _failed_instruction(error: BaseException) -> tuple[int, str]:
    """Return the line and name of the instruction being read when `error` was raised.

    It is the local variable `i` of the innermost call that has one.
    """
    innermost = (0, "")
    trace = error.__traceback__
    while trace is not None:
        i = trace.tb_frame.f_locals.get("i")
        line = getattr(i, "line", None)
        result = getattr(i, "result", None)
        if isinstance(line, int) and isinstance(result, str):
            innermost = (line, result)
        trace = trace.tb_next
    return innermost
