"""Check that a parsed text is a program that XLA can have written, so that readers can rely on it.

    names         every operand is defined earlier; every called computation is in the text
    calls         computations are not recursive, and nested no deeper than `MOST_DEPTH`
    shapes        only arrays and tuples of arrays, known element types; layouts permute the dims
    tuples        a tuple element that is read exists
    parameters    each caller passes as many operands as its computation reads
    loops         a condition, a body, and at most `MOST_TRIPS` iterations
    slices        one index per dim

Without these checks an edited or truncated text would give wrong figures, or an error without a
reason.
"""

import functools
import math
import re
from collections.abc import Mapping

from zerojax.hlo.parse import (
    Array,
    Computation,
    Instruction,
    Module,
    fault,
    is_shape,
    parse_arrays,
    parse_module,
    tuple_shapes,
)

MOST_TRIPS = 10**6
"""Largest supported trip count of one loop.

A training step's loops run over layers, tiles and microbatches.
"""
MOST_DEPTH = 100
_MOST_BYTES = 1 << 60
_DTYPE = re.compile(r"pred|token|opaque|[su](1|2|4|8|16|32|64)|bf16|f(16|32|64)|f[48]e\w+|c64|c128")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_INDEX = re.compile(r"\bindex=(-?\d+)")
_NUMBER = re.compile(r"(\d+)\)")
_PASSES_OPERANDS = ("fusion", "fusion-start", "call", "call-start", "async-start")
_SLICES = ("dynamic-slice", "dynamic-update-slice")
_NO_OPERANDS = frozenset(
    {
        "parameter",
        "constant",
        "iota",
        "tuple",
        "custom-call",
        "custom-call-start",
        "fusion",
        "fusion-start",
        "after-all",
        "call",
        "call-start",
        "async-start",
        "partition-id",
        "replica-id",
        "rng-get-and-update-state",
        "infeed",
        "recv",
        "rng",
        "sort",
        "conditional",
        "opt-barrier",
        "send",
        "outfeed",
        "get-dimension-size",
        "all-reduce",
        "all-to-all",
    }
)
"""Operations that may have no operands, or whose operand count is not checked here."""


@functools.lru_cache(maxsize=2)  # several readers parse the same text, which can be megabytes long
def checked_module(text: str) -> Module:
    """Parse a compiled program, and check that XLA can have written it.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`.

    Returns:
      The parsed program.

    Raises:
      ValueError: XLA cannot have written the text; the message has the line and the reason.
    """
    module = parse_module(text)
    for computation in module.computations.values():
        defined = dict[str, Instruction]()
        for i in computation.instructions.values():
            _check_names(i, defined, module)
            _check_shape(i)
            _check_form(i, defined)
            defined[i.result] = i
        if not computation.root:
            last = max((i.line for i in computation.instructions.values()), default=0)
            raise fault(last, f"computation {computation.name} has no ROOT")
    _check_calls(module)
    for computation in module.computations.values():
        _check_operands(computation, module)
    return module


def _check_names(i: Instruction, defined: Mapping[str, Instruction], module: Module) -> None:
    for name in i.operands:
        if name not in defined:
            raise fault(
                i.line,
                f"{i.result} reads %{name}, which is not defined above it in its computation",
            )
    for name in i.called:
        if name not in module.computations:
            raise fault(i.line, f"{i.result} calls computation {name}, which is not in the text")
    if not i.operands and i.op not in _NO_OPERANDS and not i.op.endswith(("-done", "-start")):
        raise fault(i.line, f"{i.result} ({i.op}) has no operands")
    if i.op.endswith("-done") and not i.operands:
        raise fault(i.line, f"{i.result} ({i.op}) has no operands")


def _check_shape(i: Instruction) -> None:
    if not is_shape(i.shape):
        raise fault(
            i.line,
            f"the shape of {i.result} is neither an array nor a tuple of arrays: {i.shape}",
        )
    for array in parse_arrays(i.shape):
        if _DTYPE.fullmatch(array.dtype) is None:
            raise fault(i.line, f"{i.result} has the unknown element type {array.dtype!r}")
        if sorted(array.minor_to_major) != list(range(len(array.dims))):
            raise fault(
                i.line,
                f"the layout {array.minor_to_major} of {i.result} does not permute its dims "
                f"{array.dims}",
            )
        if math.prod(array.dims) * 16 > _MOST_BYTES:
            raise fault(
                i.line, f"{i.result} has dims {array.dims}, which are too large for any device"
            )


def _check_form(i: Instruction, defined: Mapping[str, Instruction]) -> None:
    if i.op == "get-tuple-element":
        index = _INDEX.search(i.text)
        count = len(tuple_shapes(defined[i.operands[0]].shape))
        if index is None or not 0 <= int(index[1]) < count:
            element = "no element" if index is None else f"element {index[1]}"
            raise fault(
                i.line, f"{i.result} reads {element} of {i.operands[0]}, which has {count} elements"
            )
    elif i.op == "parameter" and _NUMBER.match(i.text) is None:
        raise fault(i.line, f"{i.result} is parameter({i.text}: a number is needed")
    elif i.op == "while":
        _check_loop(i)
    elif i.op in _SLICES:
        _check_slice(i, defined)
    elif i.op == "tuple" and len(tuple_shapes(i.shape)) != len(i.operands) and i.operands:
        raise fault(
            i.line,
            f"{i.result} is a tuple of {len(tuple_shapes(i.shape))} elements, but has "
            f"{len(i.operands)} operands",
        )
    elif i.op == "conditional" and len(i.operands) != len(i.called) + 1:
        raise fault(
            i.line,
            f"{i.result} has {len(i.called)} branches, but {len(i.operands) - 1} operands for them",
        )


def _check_loop(i: Instruction) -> None:
    roles = re.findall(r"\b(condition|body)=%?[\w.\-]+", _QUOTED.sub("", i.text))
    if sorted(roles) != ["body", "condition"] or len(i.operands) != 1:
        raise fault(i.line, f"the loop {i.result} needs one condition, one body and one operand")
    if i.trips is not None and not 0 <= i.trips <= MOST_TRIPS:
        raise fault(
            i.line,
            f"the loop {i.result} runs {i.trips:.4g} times; 0 to {MOST_TRIPS:,} are supported",
        )


def _check_slice(i: Instruction, defined: Mapping[str, Instruction]) -> None:
    num_arrays = 2 if i.op == "dynamic-update-slice" else 1  # operands before the indices
    shapes = [defined[name].shape for name in i.operands[:num_arrays]] + [i.shape]
    arrays = [parse_arrays(shape)[0] for shape in shapes if parse_arrays(shape)]
    ranks = {len(a.dims) for a in arrays}
    if (
        len(arrays) != num_arrays + 1
        or len(ranks) != 1
        or len(i.operands) != num_arrays + len(arrays[0].dims)
    ):
        raise fault(i.line, f"{i.result} ({i.op}) needs one index per dim of its operand")
    # The second array is what an update writes, or the result of a slice.
    operand, piece = arrays[:2]
    if not _fits_in(piece, operand):
        raise fault(
            i.line, f"{i.result} slices {piece.dims}, which does not fit its operand {operand.dims}"
        )


def _fits_in(piece: Array, array: Array) -> bool:
    return all(n <= size for n, size in zip(piece.dims, array.dims, strict=True))


def _check_calls(module: Module) -> None:
    """Raise for computations that call each other recursively, or are nested too deep to follow."""
    depth = dict[str, int]()
    open_calls = set[str]()
    stack: list[tuple[str, bool]] = [(name, False) for name in module.computations]
    while stack:
        name, is_done = stack.pop()
        called = {c: i for i in module.instructions(name) for c in i.called}
        if is_done:
            open_calls.discard(name)
            depth[name] = 1 + max((depth[c] for c in called), default=0)
            if depth[name] > MOST_DEPTH:
                raise ValueError(
                    f"computation {name} has calls nested {depth[name]} deep; at most {MOST_DEPTH} "
                    "are supported"
                )
            continue
        if name in depth:
            continue
        open_calls.add(name)
        stack.append((name, True))
        for callee, i in called.items():
            if callee in open_calls:
                raise fault(
                    i.line,
                    f"{i.result} calls {callee}, which calls it back: recursion is not valid HLO",
                )
            if callee not in depth:
                stack.append((callee, False))


def _check_operands(computation: Computation, module: Module) -> None:
    """Raise for an instruction that passes fewer operands to a computation than it reads."""
    for i in computation.instructions.values():
        if i.op in _PASSES_OPERANDS:
            needed = _num_parameters(module.computations[i.called[0]]) if i.called else 0
            if not i.called or needed > len(i.operands):
                raise fault(
                    i.line,
                    f"{i.result} passes {len(i.operands)} operands to a computation that reads "
                    f"{needed}",
                )
        elif i.op in ("while", "conditional"):
            for name in i.called:
                needed = _num_parameters(module.computations[name])
                if needed > 1:
                    raise fault(
                        i.line, f"{i.result} passes 1 operand to {name}, which reads {needed}"
                    )


def _num_parameters(computation: Computation) -> int:
    """Return the number of operands that a computation reads."""
    parameters = [i for i in computation.instructions.values() if i.op == "parameter"]
    numbers = [int(i.text.split(")")[0]) for i in parameters]
    return max(numbers, default=-1) + 1
