"""An elementwise jaxpr as one fused loop over host memory: any elementwise optimizer at the speed of memory.

An optimizer on the host (ZeRO-Offload, arXiv:2101.06840, section 4.3) touches each byte of its state once a step and computes
little, so its floor is memory bandwidth. The published answer is Adam written by hand in vector instructions. Here the rule
comes from its own jaxpr, whatever the rule: each array is read once and written once,

    for i in range(n):                                  # blocks of i on several threads
        g, m, v, p = G[i], M[i], V[i], P[i]             # widened to float32
        ...                                             # the equations, in order
        M[i], V[i], P[i] = ...                          # in place, rounded to the dtype of each array

and equations of scalars alone (bias corrections, schedules) run once a call, before the loop. The loop is compiled by numba
when the kernel is built.

What it computes: float32 arithmetic, each equation rounded once. Nothing is reassociated or contracted, because the loop waits
for memory anyway; so NaN and infinity behave as written, and neither the number of threads nor the place of a block changes a
bit. Values of bfloat16 and float16 are rounded to nearest even wherever the jaxpr has that dtype. XLA may contract a product
and a sum, so its results differ by an ulp or so. Subnormal float32 counts as zero, as in XLA's CPU programs: those threads run
with the processor set so and callbacks inherit it, hence the loop sets it on each of its threads.

How it is threaded: the calling thread and its helpers claim blocks by an atomic counter, without the GIL. A call never waits
for a helper that has not started, so a busy interpreter costs help and not time, and any number of threads may call at once.
This is why it is no numba `prange`: one of numba's thread layers aborts on concurrent calls, another on a fork.
"""

import contextlib
import dataclasses
import functools
import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.extend.core as jex
import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "bool": 1}
"""Dtypes of a kernel, and their sizes. The first three may be arrays."""

ARRAYS = ("float32", "bfloat16", "float16")
SCALARS = ("float32", "int32", "bool")
MIN_BLOCK, MAX_BLOCK = 2**14, 2**20  # elements: the start of a block costs about a microsecond

# --- kernels -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Value:
    """A variable of the loop (`varies`) or of the lines before it, or a constant. `text` is its name in the source."""

    text: str
    dtype: str
    varies: bool = False


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Memory that the loop reads or writes: an input, an output, or both in place. Not an array: one element."""

    dtype: str
    is_array: bool
    input: int | None = None
    output: int | None = None

    @property
    def name(self) -> str:
        return f"output {self.output}" if self.input is None else f"input {self.input}"

    def find(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> np.ndarray:
        """Return this stream's array.

        Raises:
          ValueError: it is none that the loop could take.
        """
        array = outputs[self.output or 0] if self.input is None else inputs[self.input]
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or array.ctypes.data % NUM_BYTES[self.dtype]:
            raise ValueError(f"{self.name} is {type(array).__name__}: a contiguous, aligned numpy array is needed")
        if str(array.dtype) not in {self.dtype, "uint16" if NUM_BYTES[self.dtype] == 2 else self.dtype}:
            raise ValueError(f"{self.name} has dtype {array.dtype}: the kernel was built for {self.dtype}")
        if self.output is not None and not array.flags.writeable:
            raise ValueError(f"{self.name} is read-only, and output {self.output} is written there")
        if not self.is_array and array.size != 1:
            raise ValueError(f"{self.name} has {array.size} elements: it depends on no array, and has 1")
        other = None if self.input is None or self.output is None else outputs[self.output]
        if other is not None and (other.ctypes.data, other.nbytes) != (array.ctypes.data, array.nbytes):
            raise ValueError(f"output {self.output} is in place over {self.name}, but is other memory: give None, or the same")
        return array


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled loop over host memory; `build_kernel` makes it.

    Attributes:
      source: what was compiled, as Python.
      bytes_per_element: bytes read and written for each element. Times the elements, over the memory's bandwidth, it is the
        least time of a call.
    """

    source: str
    bytes_per_element: int
    _num_outputs: int
    _scalars: dict[int, str | None]  # input -> dtype, or None for an array
    _streams: tuple[_Stream, ...]
    _run: Callable[..., None]
    _helpers: ThreadPoolExecutor

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[np.ndarray | None], num_threads: int | None = None) -> None:
        """Compute `outputs` from `inputs`.

        Any number of Python threads may call at once, each with memory of its own. The GIL is released.

        Args:
          inputs: an array or a number for each input of the jaxpr. Arrays are contiguous and of one size, at any offset;
            those of bfloat16 and float16 may come as uint16.
          outputs: an array for each output; of one element where the output depends on no array and has no dims (a count of
            steps). Those in place are None, or the input's memory again.
          num_threads: at most so many threads work, this one included; None is one for each core.

        Raises:
          ValueError: an array is not of the declared dtype, of the size of the others, contiguous or writable; or memory that
            is written overlaps other memory.
        """
        num_threads = _num_cores() if num_threads is None else num_threads
        if (len(inputs), len(outputs)) != (len(self._scalars), self._num_outputs) or num_threads < 1:
            raise ValueError(
                f"{len(inputs)} inputs, {len(outputs)} outputs, num_threads={num_threads}: "
                f"{len(self._scalars)}, {self._num_outputs} and 1 or more are needed"
            )
        arrays = [stream.find(inputs, outputs) for stream in self._streams]
        n = _common_size(self._streams, arrays)
        addresses = [a.ctypes.data for a in arrays]
        _check_overlap(self._streams, [(start, start + a.nbytes) for start, a in zip(addresses, arrays, strict=True)])
        block = min(max(-(-n // (4 * num_threads)), MIN_BLOCK), MAX_BLOCK) // 64 * 64
        counter = np.zeros(1, np.int64)
        args = [n, counter.ctypes.data, block, *addresses]
        args += [np.dtype(dtype).type(np.asarray(inputs[k]).item()) for k, dtype in self._scalars.items() if dtype is not None]
        started = []
        try:
            with contextlib.suppress(RuntimeError):  # no helper starts while the interpreter exits
                for _ in range(min(num_threads, -(-n // block)) - 1):
                    started.append(self._helpers.submit(self._run, *args))
            self._run(*args)
        finally:
            for helper in started:
                if not helper.cancel():  # it has started, and may be in its last block
                    helper.result()


def build_kernel(
    closed_jaxpr: jex.ClosedJaxpr, aliases: Sequence[tuple[int, int]] = (), *, arrays: Sequence[bool] | None = None
) -> Kernel:
    """Compile an elementwise jaxpr to a loop over host memory.

    The shapes of arrays in the jaxpr are stand-ins: a call takes any number of elements.

    Args:
      closed_jaxpr: of elementwise equations, and of any on scalars that kernels know; nested jaxprs are inlined.
      aliases: pairs (output, input): the output is written over the input's memory, which is then read before it is written,
        element by element.
      arrays: which inputs are arrays; by default those whose aval has dims. An array may be of shape (), a scalar may not
        have dims.

    Raises:
      ValueError: an equation is not elementwise, or of a dtype that kernels do not know; the message names it. Or the inputs
        are not of the kinds above, or an alias is not between arrays of one dtype.
    """
    jaxpr = closed_jaxpr.jaxpr
    avals: list[Any] = [v.aval for v in jaxpr.invars]
    is_array = tuple(a.ndim > 0 for a in avals) if arrays is None else tuple(arrays)
    _check_inputs(avals, is_array)
    writer = _Writer()
    values = [_Value(f"x{k}", str(a.dtype), varies) for k, (a, varies) in enumerate(zip(avals, is_array, strict=True))]
    results = writer.walk(jaxpr, closed_jaxpr.consts, values)
    _check_aliases(aliases, values, results)
    source_of = dict(aliases)  # output -> the input over which it is written
    output_of = {k: output for output, k in aliases}

    streams = [_Stream(v.dtype, True, k, output_of.get(k)) for k, v in enumerate(values) if v.varies]
    for k, (var, value) in enumerate(zip(jaxpr.outvars, results, strict=True)):
        aval: Any = var.aval
        if value.dtype not in (ARRAYS if value.varies or aval.ndim else SCALARS):
            raise ValueError(f"output {k} is {aval.str_short()}: arrays are {', '.join(ARRAYS)}; scalars {', '.join(SCALARS)}")
        if k not in source_of:
            streams.append(_Stream(value.dtype, value.varies or aval.ndim > 0, None, k))
    scalars = {k: None if v.varies else v.dtype for k, v in enumerate(values)}
    source, num_bytes = _source(writer, streams, scalars, results)
    run = _compile(source, tuple(s.dtype for s in streams), tuple(d for d in scalars.values() if d is not None))
    helpers = ThreadPoolExecutor(_num_cores(), thread_name_prefix="host_offload")
    return Kernel(source, num_bytes, len(results), scalars, tuple(streams), run, helpers)


def _check_inputs(avals: Sequence[Any], is_array: Sequence[bool]) -> None:
    if len(is_array) != len(avals) or not any(is_array):
        raise ValueError(f"arrays={list(is_array)} for {len(avals)} inputs: one flag for each, and one array at least")
    sizes = {a.size for a, varies in zip(avals, is_array, strict=True) if varies}
    for k, (aval, varies) in enumerate(zip(avals, is_array, strict=True)):
        if str(aval.dtype) not in (ARRAYS if varies else SCALARS) or (aval.ndim and not varies):
            raise ValueError(
                f"input {k} is {aval.str_short()}: arrays are {', '.join(ARRAYS)}; scalars {', '.join(SCALARS)}, no dims"
            )
    if len(sizes) > 1:
        raise ValueError(f"arrays of {sorted(sizes)} elements: all have the same number")


def _check_aliases(aliases: Sequence[tuple[int, int]], values: Sequence[_Value], results: Sequence[_Value]) -> None:
    outputs, inputs = [o for o, _ in aliases], [i for _, i in aliases]
    if len(set(outputs)) < len(outputs) or len(set(inputs)) < len(inputs):
        raise ValueError(f"aliases {list(aliases)}: an output has one place, and a place one output")
    for output, k in aliases:
        if not (0 <= output < len(results) and 0 <= k < len(values)) or not values[k].varies:
            raise ValueError(f"alias ({output}, {k}): there is no such output, or input {k} is no array")
        if results[output].dtype != values[k].dtype:
            raise ValueError(f"alias ({output}, {k}): {results[output].dtype} is written over {values[k].dtype}")


def _common_size(streams: Sequence[_Stream], arrays: Sequence[np.ndarray]) -> int:
    sizes = {s.name: a.size for s, a in zip(streams, arrays, strict=True) if s.is_array}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"arrays of one size are needed: {', '.join(f'{name} has {size}' for name, size in sizes.items())}")
    return next(iter(sizes.values()))


def _check_overlap(streams: Sequence[_Stream], spans: Sequence[tuple[int, int]]) -> None:
    """Raise where written memory is not a stream's own: the loop was compiled for that."""
    end, end_written = 0, 0  # of the memory before, and of what is written of it
    for (start, stop), stream in sorted(zip(spans, streams, strict=True), key=lambda entry: entry[0]):
        written = stream.output is not None
        if start < stop and start < (end if written else end_written):
            raise ValueError(
                f"{stream.name} overlaps other memory of this call, and one of both is written: alias them, or copy"
            )
        end, end_written = max(end, stop), max(end_written, stop if written else 0)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- primitives as expressions; {0}, {1}, {2} are operands ---------------------------------------------------------------

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MAX, _MIN = (f"select(({{0}} {op} {{1}}) | ({{0}} != {{0}}), {{0}}, {{1}})" for op in (">=", "<="))  # NaN of either side wins
EXACT = {
    "neg": "-{0}",
    "abs": "abs({0})",
    "sign": "select({0} > f32(0), f32(1), select({0} < f32(0), f32(-1), {0}))",
    "max": _MAX,
    "min": _MIN,
    "floor": "floor({0})",
    "ceil": "ceil({0})",
}
"""Of floats: results that are values of the operands' dtype, or small integers."""
ROUNDED = {
    "add": "{0} + {1}",
    "add_any": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "square": "{0} * {0}",
    "sqrt": "sqrt({0})",
    "rsqrt": "f32(1) / sqrt({0})",
    "exp": "math.exp({0})",
    "expm1": "math.expm1({0})",
    "log": "math.log({0})",
    "log1p": "math.log1p({0})",
    "logistic": "f32(1) / (f32(1) + math.exp(-{0}))",
    "tanh": "math.tanh({0})",
    "sin": "math.sin({0})",
    "cos": "math.cos({0})",
    "pow": "{0} ** f32({1})",
}
"""Of floats: results that are rounded to the dtype of the equation."""
INTEGERS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "abs": "abs({0})",
    "sign": "({0} > 0) - ({0} < 0)",
    "max": "max({0}, {1})",
    "min": "min({0}, {1})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "clamp": "min(max({1}, {0}), {2})",
}
BOOLEANS = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} != {1}", "not": "not {0}"}
SAME = frozenset({"copy", "copy_p", "name"})
SHAPED = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})


class _Writer:
    """Turns equations into lines: those of scalars alone, and those of the loop."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.loop: list[str] = []
        self._num = 0

    def define(self, text: str, dtype: str, varies: bool) -> _Value:
        if text.isidentifier():
            return _Value(text, dtype, varies)
        name = f"t{self._num}"
        self._num += 1
        (self.loop if varies else self.before).append(f"{name} = {text}")
        return _Value(name, dtype, varies)

    def walk(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[_Value]) -> list[_Value]:
        """Write a jaxpr, nested ones inlined, and return the values of its outputs."""
        env = dict(zip(jaxpr.invars, args, strict=True))
        env |= {var: _constant(value, var.aval) for var, value in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> _Value:
            return _constant(atom.val, atom.aval) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in _live(jaxpr):
            ins = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in INLINED:
                inner: Any = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                is_closed = isinstance(inner, jex.ClosedJaxpr)
                outs = self.walk(inner.jaxpr if is_closed else inner, inner.consts if is_closed else (), ins)
            else:
                outs = [self.equation(eqn, ins)]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: jex.JaxprEqn, ins: list[_Value]) -> _Value:
        """Write one equation."""
        aval: Any = eqn.outvars[0].aval
        dtype, varies = str(aval.dtype), any(v.varies for v in ins)
        if eqn.primitive.name in SAME:
            return ins[0]
        if eqn.primitive.name in SHAPED:  # a scalar is the same on every element; an array must stay as it is
            moved: Any = eqn.invars[0].aval
            if len(ins) > 1 or (moved.shape != aval.shape if varies else moved.size != 1):
                raise ValueError(f"{_named(eqn)}: it changes the shape of an array")
            return ins[0]
        if eqn.primitive.name == "clamp" and dtype in ARRAYS:
            low, x, high = ins
            raised = self.define(_MAX.format(x.text, low.text), dtype, varies)
            return self.define(_MIN.format(raised.text, high.text), dtype, varies)
        if eqn.primitive.name == "integer_pow" and dtype in ARRAYS:
            return self.power(ins[0], eqn.params["y"])
        return self.define(_expression(eqn, ins, dtype), dtype, varies)

    def power(self, x: _Value, y: int) -> _Value:
        """Write x**y as squarings and products, in XLA's order."""
        product, rest = "", abs(y)
        while rest:
            if rest & 1:
                product = self.define(f"{product} * {x.text}" if product else x.text, x.dtype, x.varies).text
            rest >>= 1
            x = self.define(f"{x.text} * {x.text}", x.dtype, x.varies) if rest else x
        product = product or "f32(1)"
        return self.define(_rounded(f"f32(1) / {product}" if y < 0 else product, x.dtype), x.dtype, x.varies)


def _expression(eqn: jex.JaxprEqn, ins: list[_Value], dtype: str) -> str:
    """Return the Python expression of one equation, of type `dtype`."""
    name, source = eqn.primitive.name, ins[0].dtype if ins else None
    args = [v.text for v in ins]
    if {dtype, *(v.dtype for v in ins)} - NUM_BYTES.keys():
        raise ValueError(f"{_named(eqn)}: host kernels know {', '.join(NUM_BYTES)}")
    if name == "convert_element_type":
        return _converted(args[0], str(source), dtype)
    if name == "select_n" and source == "bool" and len(ins) == 3:
        return f"select({args[0]}, {args[2]}, {args[1]})"
    if name in COMPARISONS:
        return f"{args[0]} {COMPARISONS[name]} {args[1]}"
    if name == "is_finite":
        return f"abs({args[0]}) < inf"
    if dtype == "bool" and name in BOOLEANS:
        return BOOLEANS[name].format(*args)
    if dtype == "int32" and name in INTEGERS:
        return f"i32({INTEGERS[name].format(*args)})"
    if dtype in ARRAYS:
        if name in EXACT:
            return EXACT[name].format(*args)
        if name in ROUNDED:
            return _rounded(ROUNDED[name].format(*args), dtype)
    raise ValueError(f"{_named(eqn)}: it is not elementwise, or not on {source}")


def _rounded(text: str, dtype: str) -> str:
    return text if dtype == "float32" else f"round_{dtype}({text})"


def _converted(text: str, source: str, dtype: str) -> str:
    if source == dtype or (source in ARRAYS and dtype == "float32"):
        return text
    if dtype == "bool":
        return f"{text} != {'i32' if source == 'int32' else 'f32'}(0)"
    if dtype == "int32":
        return f"i32({text})" if source == "bool" else f"to_int32({text})"
    if source in ("int32", "bool"):
        text = f"f32({text})"
    return _rounded(text, dtype)


def _constant(value: Any, aval: Any) -> _Value:
    """Return a constant of one element.

    Raises:
      ValueError: it has more elements, or is of a dtype that kernels do not know.
    """
    dtype = str(aval.dtype)
    if aval.size != 1 or dtype not in NUM_BYTES:
        raise ValueError(f"a constant of shape {aval.shape} and dtype {dtype}: make it an input, or one number")
    number = np.asarray(value, aval.dtype).reshape(())
    if dtype == "bool":
        return _Value(repr(bool(number)), dtype)
    if dtype == "int32":
        return _Value(f"i32({int(number)})", dtype)
    x = float(number.astype(np.float32))
    return _Value(f"f32({x!r})" if math.isfinite(x) else "nan" if math.isnan(x) else f"f32({'-' * (x < 0)}inf)", dtype)


def _live(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """Return the equations on which an output depends, in order."""
    needed, live = {v for v in jaxpr.outvars if isinstance(v, jex.Var)}, []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, jex.Var))
            live.append(eqn)
    return live[::-1]


def _named(eqn: jex.JaxprEqn) -> str:
    return f"a host kernel cannot hold {eqn.primitive.name} (`{str(eqn).splitlines()[0].strip()}`)"


def _source(
    writer: _Writer, streams: Sequence[_Stream], scalars: dict[int, str | None], results: Sequence[_Value]
) -> tuple[str, int]:
    """Return the loop in Python, and the bytes that it moves for each element."""
    stores = {True: [], False: []}
    moved: list[str] = []
    for k, s in enumerate(streams):
        if s.output is not None and results[s.output].text != f"x{s.input}":  # what returns as it came is not written
            stores[s.is_array].append(f"store{k}(a{k}, {'i' if s.is_array else 0}, {results[s.output].text})")
            moved += [s.dtype] * s.is_array
    used = set(re.findall(r"\bx\d+\b", "\n".join(writer.loop + stores[True])))
    read = {k: s for k, s in enumerate(streams) if f"x{s.input}" in used}
    moved += [s.dtype for s in read.values()]
    arguments = [f"a{k}" for k in range(len(streams))] + [f"x{k}" for k, dtype in scalars.items() if dtype is not None]
    inner = [f"x{s.input} = load{k}(a{k}, i)" for k, s in read.items()] + writer.loop + stores[True]
    lines = [
        f"def kernel({', '.join(['n', 'counter', 'block', *arguments])}):",
        "    mode = flush_subnormals()",
        *(f"    {line}" for line in writer.before + stores[False]),
        "    while True:",
        "        start = claim(counter, block)",
        "        if start >= n:",
        "            break",
        "        for i in range(start, min(start + block, n)):",
        *(f"            {line}" for line in inner or ["pass"]),
        "    set_mode(mode)",
    ]
    return "\n".join(lines) + "\n", sum(NUM_BYTES[dtype] for dtype in moved)


# --- what the loop calls: instructions that numba has no word for --------------------------------------------------------

F32, F16, I64, I32, I16, I8 = ir.FloatType(), ir.HalfType(), ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)
MEMORY = {"float32": F32, "bfloat16": I16, "float16": I16, "int32": I32, "bool": I8}
TYPES = {"int32": numba.int32, "bool": numba.boolean}  # every other dtype is computed in float32


def _of_float(result: Any, write: Callable[..., Any]) -> Any:
    """Return an intrinsic of one float32, written by `write(builder, value)`."""

    @intrinsic
    def call(typing: Any, x: Any) -> Any:
        return result(numba.float32), lambda context, builder, sig, args: write(builder, args[0])

    return call


def _llvm(name: str, *types: ir.Type) -> Callable[..., Any]:
    kind = ir.FunctionType(types[0] if types else F32, [F32])
    return lambda builder, x: builder.call(builder.module.declare_intrinsic(name, types or (F32,), kind), [x])


def _round_bfloat16(builder: Any, x: Any) -> Any:
    """Round to nearest even, in the integers: LLVM makes vectors of this on every processor."""
    bits = builder.bitcast(x, I32)
    high = builder.lshr(bits, I32(16))
    rounded = builder.add(builder.add(bits, I32(0x7FFF)), builder.and_(high, I32(1)))
    quiet = builder.or_(builder.and_(bits, I32(0x80000000)), I32(0x7FC00000))  # adding could turn a NaN into infinity
    kept = builder.and_(builder.select(builder.fcmp_unordered("uno", x, x), quiet, rounded), I32(0xFFFF0000))
    return builder.bitcast(kept, F32)


def _round_float16(builder: Any, x: Any) -> Any:
    return builder.fpext(builder.fptrunc(x, F16), F32)


@intrinsic
def _select(typing: Any, condition: Any, x: Any, y: Any) -> Any:
    kind = numba.types.unliteral(x)
    return kind(numba.boolean, kind, kind), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def _claim(typing: Any, counter: Any, num: Any) -> Any:
    """Add `num` to the counter at an address, atomically; return what it was."""

    def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic")

    return numba.int64(numba.int64, numba.int64), write


X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
FLUSH = 0x8040 if X86 else 1 << 24 if ARM else 0  # MXCSR's FTZ and DAZ; FPCR's FZ


@intrinsic
def _flush_subnormals(typing: Any) -> Any:
    """Let this thread count subnormal numbers as zero; return the mode that it had."""

    def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        old = _read_mode(builder)
        _write_mode(builder, builder.or_(old, I64(FLUSH)))
        return old

    return numba.int64(), write


@intrinsic
def _set_mode(typing: Any, mode: Any) -> Any:
    """Give this thread back the mode that it had."""

    def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _write_mode(builder, args[0])
        return context.get_dummy_value()

    return numba.void(numba.int64), write


def _read_mode(builder: Any) -> Any:
    if X86:
        place = builder.bitcast(builder.alloca(I32), I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse.stmxcsr", (), kind), [place])
        return builder.zext(builder.load(builder.bitcast(place, I32.as_pointer())), I64)
    if ARM:
        return builder.call(builder.module.declare_intrinsic("llvm.aarch64.get.fpcr", (), ir.FunctionType(I64, [])), [])
    return I64(0)


def _write_mode(builder: Any, mode: Any) -> None:
    if X86:
        place = builder.bitcast(builder.alloca(I32), I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
        builder.store(builder.trunc(mode, I32), builder.bitcast(place, I32.as_pointer()))
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse.ldmxcsr", (), kind), [place])
    elif ARM:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.module.declare_intrinsic("llvm.aarch64.set.fpcr", (), kind), [mode])


def _no_overlap(instruction: Any, module: Any, stream: int, num_streams: int) -> None:
    """Tell LLVM that streams do not overlap (calls check it): else it compares all pairs of them, or makes no vectors."""
    domain = module.add_metadata(["fused"])
    scopes = [module.add_metadata([f"stream {k}", domain]) for k in range(num_streams)]
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[stream]]))
    instruction.set_metadata("noalias", module.add_metadata([s for k, s in enumerate(scopes) if k != stream]))


def _load(dtype: str, stream: int, num_streams: int) -> Any:
    """Return an intrinsic: (address, index) -> the element, as float32."""

    @intrinsic
    def load(typing: Any, address: Any, index: Any) -> Any:
        def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(args[0], MEMORY[dtype].as_pointer()), [args[1]])
            x = builder.load(pointer, align=NUM_BYTES[dtype])
            _no_overlap(x, builder.module, stream, num_streams)
            if dtype == "bfloat16":
                return builder.bitcast(builder.shl(builder.zext(x, I32), I32(16)), F32)
            return builder.fpext(builder.bitcast(x, F16), F32) if dtype == "float16" else x

        return numba.float32(numba.int64, numba.int64), write

    return load


def _store(dtype: str, stream: int, num_streams: int) -> Any:
    """Return an intrinsic: (address, index, value of that dtype) -> None."""

    @intrinsic
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(args[0], MEMORY[dtype].as_pointer()), [args[1]])
            x = args[2]
            if dtype == "bfloat16":
                x = builder.trunc(builder.lshr(builder.bitcast(x, I32), I32(16)), I16)
            elif dtype == "float16":
                x = builder.bitcast(builder.fptrunc(x, F16), I16)
            elif dtype == "bool":
                x = builder.zext(x, I8)
            _no_overlap(builder.store(x, pointer, align=NUM_BYTES[dtype]), builder.module, stream, num_streams)
            return context.get_dummy_value()

        kind = TYPES.get(dtype, numba.float32)
        return numba.void(numba.int64, numba.int64, kind), write

    return store


WORDS = {
    "math": math,
    "f32": np.float32,
    "i32": np.int32,
    "inf": np.float32("inf"),
    "nan": np.float32("nan"),
    "select": _select,
    "claim": _claim,
    "flush_subnormals": _flush_subnormals,
    "set_mode": _set_mode,
    "sqrt": _of_float(numba.float32, _llvm("llvm.sqrt")),
    "floor": _of_float(numba.float32, _llvm("llvm.floor")),
    "ceil": _of_float(numba.float32, _llvm("llvm.ceil")),
    "to_int32": _of_float(numba.int32, _llvm("llvm.fptosi.sat", I32, F32)),  # NaN is 0, and what is too large the largest
    "round_bfloat16": _of_float(numba.float32, _round_bfloat16),
    "round_float16": _of_float(numba.float32, _round_float16),
}
"""What a kernel's source may name, beside its own loads and stores."""


@functools.cache
def _compile(source: str, streams: tuple[str, ...], scalars: tuple[str, ...]) -> Callable[..., None]:
    """Compile the source of a kernel. `streams` and `scalars` are the dtypes of its arguments."""
    words: dict[str, Any] = dict(WORDS)
    for k, dtype in enumerate(streams):
        words[f"load{k}"], words[f"store{k}"] = _load(dtype, k, len(streams)), _store(dtype, k, len(streams))
    exec(source, words)
    types = [numba.int64] * (3 + len(streams)) + [TYPES.get(dtype, numba.float32) for dtype in scalars]
    # error_model: a division by zero is an infinity, not an exception. Not fastmath, which also turns powers into calls of
    # __powisf2, a function that numba does not link.
    return numba.njit(numba.void(*types), nogil=True, error_model="numpy")(words["kernel"])
