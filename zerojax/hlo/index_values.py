"""Follow integers through a compiled program, to find the value of an index in every iteration.

A value is known if it can be computed from constants and the counters of the enclosing loops. It is
then an array over the iterations of those loops, one axis each, the innermost first, so that values
of outer loops broadcast: in a loop of 3 trips inside one of 5, the inner counter is int[3, 1] and
the outer one int[5]. A loop's counter is guessed from its first two values, as start + step * k.
The guess is kept only if the body maps each value to the next. An element that the body returns
unchanged keeps its initial value.

A value that is not known has a reason. ARGUMENT: it was read from an argument of the program, or
  computed from such values,
constants and counters alone. OTHER: anything else. Only integers are followed.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from zerojax.hlo.check import checked_module
from zerojax.hlo.parse import Array, Computation, Instruction, parse_arrays, parse_ints

ARGUMENT, OTHER = "array", "other"
_MOST_ITERATIONS = 10**6
"""Of loops in loops, together: a value that is followed has an element for each."""
DONE = ("fusion-done", "async-done", "async-update", "copy-done", "call-done")
CALLS = ("fusion", "fusion-start", "call", "call-start", "async-start")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_SAME = ("copy", "copy-start", "bitcast", "reshape", *DONE)
_MOVES = (
    "convert",
    "broadcast",
    "slice",
    "concatenate",
    "transpose",
    "reverse",
    "pad",
    "gather",
    "dynamic-slice",
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "negate": np.negative,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "convert": np.asarray,
    "broadcast": np.asarray,
    "select": lambda p, a, b: np.where(p != 0, a, b),
    "remainder": np.fmod,
    "clamp": lambda low, x, high: np.clip(x, low, high),
}
_Element = Callable[[int], Any]
"""What is known of an HLO tuple: a function of the element's number.

Of a vector of constants it is a tuple of ints.
"""


def entry_frame(text: str) -> "Frame":
    """Return the run of a program's entry computation.

    Args:
      text: `compiled.as_text()`.
    """
    module = checked_module(text)
    return Frame(module.computations, module.entry, lambda _: ARGUMENT, ())


def walk(
    frame: "Frame", unknown_trips: int | None = None, times: int | None = 1
) -> Iterator[tuple["Frame", Instruction, int | None]]:
    """Visit every instruction that runs, with the times that it does; None where that is not known.

    Args:
      frame: the run to start from.
      unknown_trips: how often a loop runs whose trip count XLA does not know; None if that is not
        known.
      times: how often `frame` runs.
    """
    for i in frame.computation.instructions.values():
        yield frame, i, times
        for inner, count in frame.inner(i):
            trips = unknown_trips if count is None else count
            yield from walk(
                inner, unknown_trips, None if times is None or trips is None else times * trips
            )


class Frame:
    """One run of a computation.

    Attributes:
      program: every computation by name.
      computation: the one that runs.
      argument: what is known of each parameter.
      trips: trip counts of the loops around, the innermost first; None where one is not known.
    """

    def __init__(
        self,
        program: Mapping[str, Computation],
        name: str,
        argument: _Element,
        trips: tuple[int | None, ...],
    ) -> None:
        self.program, self.computation, self.argument, self.trips = (
            program,
            program[name],
            argument,
            trips,
        )
        self._values: dict[str, Any] = {}
        self._loops: dict[str, tuple[int | None, _Element, _Element]] = {}

    def arrays(self, name: str) -> list[Array]:
        """List the arrays of a result."""
        return (
            parse_arrays(self.computation.instructions[name].shape)
            if name in self.computation.instructions
            else []
        )

    def iterations(self, loop: int) -> np.ndarray | None:
        """Return 0, 1, .. of the loop that is `loop` loops outwards, on its axis; None where its
        trips are not known.
        """
        trips = self.trips[loop] if loop < len(self.trips) else None
        return None if trips is None else _column(trips, len(self.trips) - loop)

    def value(self, name: str) -> Any:
        """Return what is known of a result."""
        if name not in self._values:
            i = self.computation.instructions.get(name)
            value = OTHER if i is None else self._evaluate(i)
            if isinstance(
                value, np.ndarray
            ):  # an element for each iteration, if it fits the shape and the type
                array = self.arrays(name)[0]
                ends = (int(value.min(initial=0)), int(value.max(initial=0)))
                fits = array.integers is not None and all(end in array.integers for end in ends)
                value = value if fits and math.prod(array.dims) == 1 else OTHER
            self._values[name] = value
        return self._values[name]

    def inner(self, i: Instruction) -> "list[tuple[Frame, int | None]]":
        """Return the computations that an instruction runs, and how often."""
        if i.op == "while":
            trips, element, _ = self._loop(i)
            return [
                (Frame(self.program, c, lambda _: element, (trips, *self.trips)), trips)
                for c in i.called
            ]
        if i.op == "conditional":  # the branch, then an argument for each computation
            branches = [lambda _, o=o: self.value(o) for o in i.operands[1:]]
            return [
                (Frame(self.program, c, b, self.trips), 1)
                for c, b in zip(i.called, branches, strict=True)
            ]
        if i.op in CALLS:
            return [
                (Frame(self.program, c, lambda n: self.value(i.operands[n]), self.trips), 1)
                for c in i.called[:1]
            ]
        return []

    def _evaluate(self, i: Instruction) -> Any:
        if i.op == "parameter":
            # Of `parameter(2)` the rest is `2)`, and perhaps attributes.
            return self.argument(int(i.rest.split(")")[0]))
        if i.op == "tuple":
            return lambda n: self.value(i.operands[n])
        if i.op == "get-tuple-element":
            index = re.search(r"index=(\d+)", i.rest)
            return (
                OTHER if index is None else _element(self.value(i.operands[0]), int(index.group(1)))
            )
        if i.op == "while":
            return self._loop(i)[2]
        if i.op in _SAME:
            return self.value(i.operands[0])
        arrays = parse_arrays(i.shape)
        if not any(a.integers for a in arrays):
            return OTHER
        if i.op == "constant":
            return _constant(i)
        if i.op == "iota":
            return tuple(range(*arrays[0].dims)) if len(arrays[0].dims) == 1 else OTHER
        if i.op in CALLS:
            # Of a fusion or a call: the value that its computation returns for these operands.
            inner = self.inner(i)[0][0]
            return inner.value(inner.computation.root)
        if i.op in _ARITHMETIC or i.op in _MOVES or i.op == "compare":
            return _compute(i, [self.value(o) for o in i.operands])
        return OTHER

    def _loop(self, i: Instruction) -> tuple[int | None, _Element, _Element]:
        """Return a loop's trips, and what is known of each element that it carries: inside it, and
        after it.
        """
        if i.result not in self._loops:
            self._loops[i.result] = self._follow(i)
        return self._loops[i.result]

    def _follow(self, i: Instruction) -> tuple[int | None, _Element, _Element]:
        trips, body, initial = i.trips, _BODY.search(i.rest), self.value(i.operands[0])
        assert body is not None
        values: dict[int, Any] = {}
        unchanged = object()

        def following(n: int, value: Any) -> Any:  # what the body makes of element n
            def carried(m: int) -> Any:
                return value if m == n else element(m)

            frame = Frame(self.program, body.group(1), lambda _: carried, (trips, *self.trips))
            return _element(frame.value(frame.computation.root), n)

        def element(n: int) -> Any:
            if n not in values:
                values[n] = OTHER  # to those that it depends on itself
                values[n] = inside(n)
            return values[n]

        def inside(n: int) -> Any:
            first = _element(initial, n)
            # A sentinel that comes back was only handed on by the body.
            if following(n, unchanged) is unchanged:
                return first
            second = following(n, first) if isinstance(first, np.ndarray) else OTHER
            if trips is None or not isinstance(second, np.ndarray):
                return OTHER
            if math.prod(n or 1 for n in (trips, *self.trips)) > _MOST_ITERATIONS:
                return OTHER
            guess = first + (second - first) * _column(trips, 1 + len(self.trips))
            # Two values suggest a line. It holds only if the body leads from each of its points to
            # the next.
            after = following(n, guess)
            if not isinstance(after, np.ndarray):
                return OTHER
            after, guess = np.broadcast_arrays(after, guess)
            return guess if equal(after[:-1], guess[1:]) else OTHER

        return (
            trips,
            element,
            lambda n: _element(initial, n) if following(n, unchanged) is unchanged else OTHER,
        )


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two values are the same in every iteration."""
    return bool(np.all(a == b))


def _column(trips: int, axes: int) -> np.ndarray:
    # [trips, 1, ..]: the axes after the first are those of the loops further out.
    return np.arange(trips).reshape(-1, *(1,) * (axes - 1))


def _element(value: Any, n: int) -> Any:
    return value(n) if callable(value) else value if isinstance(value, str) else OTHER


def _constant(i: Instruction) -> Any:
    text = {"true": "1", "false": "0"}.get(i.rest.split(")")[0], i.rest.split(")")[0])
    if re.fullmatch(r"-?\d+", text):
        return np.asarray(int(text))
    return parse_ints(text) if re.fullmatch(r"\{(-?\d+(, )?)+\}", text) else OTHER


def _compute(i: Instruction, values: list[Any]) -> Any:
    """Apply an instruction to integers; where they are not all known, say why."""
    if all(isinstance(v, np.ndarray) for v in values):
        if i.op == "compare":
            direction = re.search(r"direction=(\w+)", i.rest)
            return np.asarray(_COMPARE[direction.group(1)](*values), int) if direction else OTHER
        return np.asarray(_ARITHMETIC[i.op](*values)) if i.op in _ARITHMETIC else OTHER
    if (
        i.op == "dynamic-slice"
        and isinstance(values[0], tuple)
        and isinstance(values[-1], np.ndarray)
    ):
        table = np.asarray(
            values[0]
        )  # int[n], and its one index; a slice of several elements is dropped by its shape
        return table[np.clip(values[1], 0, len(table) - 1)] if len(values) == 2 else OTHER
    if i.op in ("dynamic-slice", "gather") and values[0] is ARGUMENT:
        return ARGUMENT  # wherever it is read
    unknown = [v for v in values if not isinstance(v, np.ndarray | tuple)]
    return ARGUMENT if unknown and all(v is ARGUMENT for v in unknown) else OTHER
