"""The text of a compiled program, parsed: computations, their instructions in scheduled order, and
the shapes of results.

`compiled.as_text()` is the program that one device runs, after partitioning, fusion and scheduling.
It is read line by line:

    %gathered = bf16[64,64]{1,0:S(5)} all-gather(%shard), channel_id=1, dimensions={0}
     result     shape                 op         rest

The text is parsed and not the proto, because the text is what every version and backend of XLA
gives without its compiler's classes. Attributes stay text in `rest`; only those that every reader
needs are properties.

Texts that XLA does not write are refused with the line and the reason. What is known to go wrong is
checked before a program is read (`zerojax.hlo.check`). `reads_program` turns whatever else a reader
stumbles over into the same error, with its cause.
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
      dims: of the array.
      minor_to_major: dims from the fastest to the slowest.
      on_host: whether it is in pinned host memory, which is memory space S(5).
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    on_host: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.dims) * bits_of(self.dtype) // 8

    @property
    def integers(self) -> range | None:
        """The integers that an element can be; None if it is no integer."""
        bits = bits_of(self.dtype)
        if self.dtype == "pred":
            return range(2)
        return {"u": range(1 << bits), "s": range(-(1 << bits - 1), 1 << bits - 1)}.get(
            self.dtype[0]
        )

    def stride(self, dim: int) -> int:
        """Return the bytes from one index of `dim` to the next."""
        faster = self.minor_to_major[: self.minor_to_major.index(dim)]
        return math.prod(self.dims[d] for d in faster) * bits_of(self.dtype) // 8


_TOO_LONG = re.compile(r"\d{1000}\d*")
"""No number of a program is as long, and Python converts none of more than 4,300 digits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      result: its name.
      shape: text of the result's shape, a tuple's in parentheses.
      op: the opcode.
      rest: text of operands and attributes.
      line: its line in the program's text, from 1; 0 if it is not known.
    """

    result: str
    shape: str
    op: str
    rest: str
    line: int = 0

    @property
    def operands(self) -> list[str]:
        """Names of the results that it reads."""
        # Attributes such as control-predecessors name results too, so only the text up to the
        # operands' end is read.
        return re.findall(r"%([\w.\-#]+)", self.rest.split("), ")[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs: a fusion's, a loop's condition and body, a
        conditional's branches.
        """
        branches = [
            c.strip().lstrip("%")
            for group in _BRANCHES.findall(self.rest)
            for c in group.split(",")
        ]
        return _CALLED.findall(self.rest) + [c for c in branches if c]

    @property
    def trips(self) -> int | None:
        """How often a loop runs; None where XLA does not know."""
        trips = _TRIPS.search(self.rest)
        return int(trips.group(1)) if trips else None


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """A function of HLO: the result that it returns, and its instructions by their result, in
    scheduled order.
    """

    name: str
    root: str
    instructions: Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A compiled program: its computations by name, and the name of the one that is called first."""

    entry: str
    computations: Mapping[str, Computation]

    def instructions(self, computation: str) -> list[Instruction]:
        """Return a computation's instructions in scheduled order; none of one that the text does
        not hold.
        """
        return (
            list(self.computations[computation].instructions.values())
            if computation in self.computations
            else []
        )


class _Lines(NamedTuple):
    """The lines of a computation, numbered as in the program's text."""

    name: str
    is_entry: bool
    lines: list[tuple[int, str]]


def parse_module(text: str) -> Module:
    """Parse a compiled program.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: a line is not what XLA writes, the text was cut, or it has no ENTRY.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"text is of type {type(text).__name__}: give the text of a compiled program, compiled.as_text()"
        )
    entry, computations = "", {}
    for name, is_entry, lines in _computations(text):
        if name in computations:
            raise fault(lines[0][0] if lines else 0, f"a second computation is called {name}")
        instructions, root = dict[str, Instruction](), ""
        for number, line in lines:
            match = _INSTRUCTION.match(line)
            if match is None:
                raise fault(number, f"this is no instruction: {line.strip()}")
            if (long := _TOO_LONG.search(line)) is not None:
                raise fault(number, f"it has a number of {len(long.group()):,} digits or more")
            is_root, result, *texts = match.groups()
            i = Instruction(result, *texts, line=number)
            instructions |= _elements(i, instructions)
            if result in instructions:
                raise fault(number, f"{name} has a second instruction called {result}")
            instructions[result] = i
            root = result if is_root else root
        computations[name] = Computation(name, root, instructions)
        entry = name if is_entry else entry
    if not entry:
        raise ValueError(
            "the text has no ENTRY, or was cut before it: give the whole text of a compiled program"
        )
    return Module(entry, computations)


def _elements(i: Instruction, before: Mapping[str, Instruction]) -> dict[str, Instruction]:
    """Return the elements of tuples that an instruction reads by number, as `%loop#2`, which dumps
    of jax 0.12 hold.

    Each is the get-tuple-element that the number stands for, named "loop#2".
    """
    found = {}
    for name, number in _ELEMENT.findall(i.rest.split("), ")[0]):
        if name in before and f"{name}#{number}" not in before:
            result, parts = f"{name}#{number}", tuple_shapes(before[name].shape)
            if int(number) >= len(parts):
                raise fault(
                    i.line, f"{i.result} reads element {number} of {name}, which has {len(parts)}"
                )
            rest = f"%{name}), index={number}"
            found[result] = Instruction(
                result, parts[int(number)], "get-tuple-element", rest, line=i.line
            )
    return found


def tuple_shapes(shape: str) -> list[str]:
    """Return the shapes that a tuple's is made of."""
    depth, parts = 0, [""]
    for c in _COMMENT.sub("", shape)[1:-1]:
        depth += (c in "({[") - (c in ")}]")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def module_name(text: str) -> str:
    """Return the name of a program, such as "jit_step".

    Args:
      text: `compiled.as_text()`.
    """
    name = re.match(r"HloModule ([\w.\-]+)", text)
    return "" if name is None else name.group(1)


def _computations(text: str) -> Iterator[_Lines]:
    """Yield each computation of a module.

    Raises:
      ValueError: a computation is not closed, or an instruction stands outside of one.
    """
    found: _Lines | None = None
    for number, line in enumerate(text.splitlines(), 1):
        header = None if line.startswith("HloModule") else _HEADER.match(line)
        if found is None and header is None:
            if _INSTRUCTION.match(line):
                raise fault(
                    number, f"an instruction stands outside of a computation: {line.strip()}"
                )
        elif header is not None:
            if found is not None:
                raise fault(
                    number,
                    f"{header.group(2)} begins, and computation {found.name} before it has not ended",
                )
            found = _Lines(header.group(2), bool(header.group(1)), [])
        elif found is not None and line.startswith("}"):  # computations' lines are indented
            yield found
            found = None
        elif found is not None and not _COMMENTED.match(line):
            found.lines.append((number, line))
    if found is not None:
        raise ValueError(f"the text was cut: computation {found.name} does not end")


def is_shape(shape: str) -> bool:
    """Return whether a text is nothing but arrays, and tuples of them."""
    rest = _ARRAY.sub("", _COMMENT.sub("", shape))
    depth = 0
    for c in rest:
        depth += (c == "(") - (c == ")")
        if c not in "(), " or depth < 0:
            return False
    return not depth


def parse_arrays(shape: str) -> list[Array]:
    """List the arrays of a shape: one, or those of a tuple."""
    arrays = []
    for dtype, sizes, order, rest in _ARRAY.findall(shape):
        dims = parse_ints(sizes)
        # Without a layout, as in a signature, the last dim is the fastest.
        arrays.append(
            Array(
                dtype, dims, parse_ints(order) or tuple(reversed(range(len(dims)))), "S(5)" in rest
            )
        )
    return arrays


def parse_ints(text: str) -> tuple[int, ...]:
    """List the integers in a text, such as dims."""
    return tuple(int(n) for n in re.findall(r"-?\d+", text))


def bits_of(dtype: str) -> int:
    """Return the bits of one element of an HLO dtype."""
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
    """A text is not a program as XLA writes it. The message has the line and the reason."""


def fault(line: int, reason: str) -> ProgramTextError:
    """Return the error of a line of a program's text, counted from 1; 0: of no single line."""
    return ProgramTextError(
        f"line {line} of the program's text: {_short(reason)}" if line else _short(reason)
    )


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}.."


def reads_program(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that reads the text of a program raise ValueError, with a line, for all that
    it stumbles over.
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
            raise fault(line, f"{name or 'the text'} is not what XLA writes ({said})") from error

    return checked


def _place(error: BaseException) -> tuple[int, str]:
    """Return line and name of the instruction that was being read: of the innermost call that has
    one as `i`.
    """
    found, trace = (0, ""), error.__traceback__
    while trace is not None:
        i = trace.tb_frame.f_locals.get("i")
        line, result = getattr(i, "line", None), getattr(i, "result", None)
        if isinstance(line, int) and isinstance(result, str):
            found = (line, result)
        trace = trace.tb_next
    return found
