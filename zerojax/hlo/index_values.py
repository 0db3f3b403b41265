"""Follow integers through a compiled program, to find the value of an index in every iteration.

A value is known if it can be computed from constants and the counters of the enclosing loops. It is
then an array over the iterations of those loops, one axis each, with the innermost loop first, so
that values of outer loops broadcast. For example, in a loop of 3 iterations inside one of 5, the
inner counter is int[3, 1] and the outer one int[5]. A loop's counter is guessed from its first two
values as start + step * k. The guess is kept only if the body maps each value to the next. An
element that the body returns unchanged keeps its initial value.

An unknown value has a reason. ARGUMENT: it was read from an argument of the program, or computed
only from such values, constants and counters. OTHER: anything else. Only integers are followed.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from zerojax.hlo.check import checked_module
from zerojax.hlo.parse import Array, Computation, Instruction, parse_arrays, parse_ints

ARGUMENT = "array"
OTHER = "other"
_MOST_ITERATIONS = 10**6
"""Most iterations of nested loops together: a followed value has an element for each."""
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
"""The known values of an HLO tuple: a function from an element's number to its value.

A vector of constants is a tuple of ints instead.
"""


def entry_frame(text: str) -> "Frame":
    """Return the run of a program's entry computation.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.
    """
    module = checked_module(text)
    return Frame(module.computations, module.entry, lambda _: ARGUMENT, ())


def walk(
    frame: "Frame", unknown_trips: int | None = None, times: int | None = 1
) -> Iterator[tuple["Frame", Instruction, int | None]]:
    """Visit every instruction that runs, with the number of times that it runs.

    Args:
      frame: run of a computation to start from.
      unknown_trips: trip count to assume for a loop whose count XLA does not know; None to leave it
        unknown.
      times: number of times that `frame` runs.

    Yields:
      (run of the computation, instruction, number of times that it runs; None if unknown).
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
      program: all computations by name.
      computation: the computation that runs.
      argument: known value of each parameter, as a function of its number.
      trips: trip counts of the enclosing loops, innermost first; None for an unknown count.
    """

    def __init__(
        self,
        program: Mapping[str, Computation],
        name: str,
        argument: _Element,
        trips: tuple[int | None, ...],
    ) -> None:
        """Run the computation `name` of `program`, given its arguments and trip counts."""
        self.program = program
        self.computation = program[name]
        self.argument = argument
        self.trips = trips
        self._values: dict[str, Any] = {}
        self._loops: dict[str, tuple[int | None, _Element, _Element]] = {}

    def arrays(self, name: str) -> list[Array]:
        """Return the arrays of a result."""
        instruction = self.computation.instructions.get(name)
        return [] if instruction is None else parse_arrays(instruction.shape)

    def iterations(self, loop: int) -> np.ndarray | None:
        """Return the iteration numbers 0, 1, .. of an enclosing loop, on the loop's axis.

        Args:
          loop: number of loops outwards; 0 is the innermost.

        Returns:
          The numbers; None if the loop does not exist or its trip count is unknown.
        """
        trips = self.trips[loop] if loop < len(self.trips) else None
        return None if trips is None else _counter(trips, len(self.trips) - loop)

    def value(self, name: str) -> Any:
        """Return the known value of a result, or the reason why it is unknown."""
        if name not in self._values:
            i = self.computation.instructions.get(name)
            value = OTHER if i is None else self._evaluate(i)
            # An array has an element per iteration; it must fit the result's shape and type.
            if isinstance(value, np.ndarray) and not _fits(value, self.arrays(name)[0]):
                value = OTHER
            self._values[name] = value
        return self._values[name]

    def inner(self, i: Instruction) -> "list[tuple[Frame, int | None]]":
        """Return the computations that an instruction runs, and how often it runs each.

        A count is None if the trip count of a loop is unknown.
        """
        frames = []
        if i.op == "while":
            trips, element, _ = self._loop(i)
            for name in i.called:
                frame = Frame(self.program, name, lambda _: element, (trips, *self.trips))
                frames.append((frame, trips))
        elif i.op == "conditional":  # operands: the branch number, then one argument per branch
            for name, operand in zip(i.called, i.operands[1:], strict=True):
                frame = Frame(self.program, name, lambda _, o=operand: self.value(o), self.trips)
                frames.append((frame, 1))
        elif i.op in CALLS and i.called:
            frame = Frame(
                self.program, i.called[0], lambda n: self.value(i.operands[n]), self.trips
            )
            frames.append((frame, 1))
        return frames

    def _evaluate(self, i: Instruction) -> Any:
        if i.op == "parameter":
            # For `parameter(2)`, `text` is `2)` and possibly attributes.
            return self.argument(int(i.text.split(")")[0]))
        if i.op == "tuple":
            return lambda n: self.value(i.operands[n])
        if i.op == "get-tuple-element":
            index = re.search(r"index=(\d+)", i.text)
            if index is None:
                return OTHER
            return _element(self.value(i.operands[0]), int(index.group(1)))
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
            # A fusion or call has the value that its computation returns for these operands.
            inner = self.inner(i)[0][0]
            return inner.value(inner.computation.root)
        if i.op in _ARITHMETIC or i.op in _MOVES or i.op == "compare":
            return _compute(i, [self.value(o) for o in i.operands])
        return OTHER

    def _loop(self, i: Instruction) -> tuple[int | None, _Element, _Element]:
        """Return a loop's trip count, and its elements' known values inside and after it."""
        if i.result not in self._loops:
            self._loops[i.result] = self._follow(i)
        return self._loops[i.result]

    def _follow(self, i: Instruction) -> tuple[int | None, _Element, _Element]:
        """Run a loop's body on each element's first values, and keep the guesses that it confirms.

        Returns:
          (trip count, value of each element in the loop, value of each element after it).
        """
        trips = i.trips
        body = _BODY.search(i.text)
        initial = self.value(i.operands[0])
        assert body is not None
        values: dict[int, Any] = {}
        unchanged = object()

        def following(n: int, value: Any) -> Any:  # the body's result for element n
            def carried(m: int) -> Any:
                return value if m == n else element(m)

            frame = Frame(self.program, body.group(1), lambda _: carried, (trips, *self.trips))
            return _element(frame.value(frame.computation.root), n)

        def element(n: int) -> Any:
            if n not in values:
                values[n] = OTHER  # value seen by elements that depend on themselves
                values[n] = inside(n)
            return values[n]

        def inside(n: int) -> Any:
            first = _element(initial, n)
            # If the sentinel is returned, the body only passes the element on.
            if following(n, unchanged) is unchanged:
                return first
            second = following(n, first) if isinstance(first, np.ndarray) else OTHER
            if trips is None or not isinstance(second, np.ndarray):
                return OTHER
            if math.prod(n or 1 for n in (trips, *self.trips)) > _MOST_ITERATIONS:
                return OTHER
            guess = first + (second - first) * _counter(trips, 1 + len(self.trips))
            # Two values suggest a line. It is right only if the body maps each of its points to the
            # next.
            next_value = following(n, guess)
            if not isinstance(next_value, np.ndarray):
                return OTHER
            next_value, guess = np.broadcast_arrays(next_value, guess)
            return guess if equal(next_value[:-1], guess[1:]) else OTHER

        def after(n: int) -> Any:
            return _element(initial, n) if following(n, unchanged) is unchanged else OTHER

        return trips, element, after


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two values are the same in every iteration."""
    return bool(np.all(a == b))


def _fits(value: np.ndarray, array: Array) -> bool:
    """Return whether an HLO array holds one integer, of a type that has all integers of `value`."""
    if array.integers is None or math.prod(array.dims) != 1:
        return False
    least = int(value.min(initial=0))
    most = int(value.max(initial=0))
    return least in array.integers and most in array.integers


def _counter(trips: int, axes: int) -> np.ndarray:
    # [trips, 1, ..]: the axes after the first belong to the outer loops.
    return np.arange(trips).reshape(-1, *(1,) * (axes - 1))


def _element(value: Any, n: int) -> Any:
    """Return element n of a known tuple, or the reason why the tuple is unknown."""
    if callable(value):
        return value(n)
    return value if isinstance(value, str) else OTHER


def _constant(i: Instruction) -> Any:
    text = i.text.split(")")[0]
    if text in ("true", "false"):
        return np.asarray(int(text == "true"))
    if re.fullmatch(r"-?\d+", text):
        return np.asarray(int(text))
    return parse_ints(text) if re.fullmatch(r"\{(-?\d+(, )?)+\}", text) else OTHER


def _compute(i: Instruction, values: list[Any]) -> Any:
    """Apply an instruction to integers; if not all of them are known, return the reason."""
    if all(isinstance(v, np.ndarray) for v in values):
        if i.op == "compare":
            direction = re.search(r"direction=(\w+)", i.text)
            if direction is None:
                return OTHER
            return np.asarray(_COMPARE[direction.group(1)](*values), int)
        return np.asarray(_ARITHMETIC[i.op](*values)) if i.op in _ARITHMETIC else OTHER
    if i.op == "dynamic-slice" and isinstance(values[0], tuple):
        index = values[-1]
        if isinstance(index, np.ndarray):
            # int[n] with one index. A slice of several elements is dropped because of its shape.
            table = np.asarray(values[0])
            return table[np.clip(index, 0, len(table) - 1)] if len(values) == 2 else OTHER
    if i.op in ("dynamic-slice", "gather") and values[0] is ARGUMENT:
        return ARGUMENT  # at any index
    unknown = [v for v in values if not isinstance(v, np.ndarray | tuple)]
    return ARGUMENT if unknown and all(v is ARGUMENT for v in unknown) else OTHER
