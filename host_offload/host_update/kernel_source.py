"""Generate the source of a host kernel: an elementwise jaxpr as the lines of a loop.

`Writer` walks the equations. Equations that depend only on scalars become lines before the loop;
all others become lines of the loop, on float32 values. `source_of_loop` combines loads, lines and
stores.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint32": 4, "bool": 1}
"""Dtypes that kernels support, and their sizes in bytes. The first three can be arrays."""
ARRAYS = ("float32", "bfloat16", "float16")
SCALARS = ("float32", "int32", "bool")


@dataclasses.dataclass(frozen=True)
class Value:
    """A variable or a constant of the kernel's source.

    Attributes:
      text: name or constant expression in the source.
      dtype: name of the dtype.
      varies: whether the value differs between elements, so that it is defined in the loop.
    """

    text: str
    dtype: str
    varies: bool = False


@dataclasses.dataclass(frozen=True)
class Stream:
    """Memory that the kernel reads or writes: an input, an output, or both in place.

    Attributes:
      dtype: name of the dtype.
      is_array: whether it is an array; if not, it has one element.
      input: index of the input, or None.
      output: index of the output, or None.
    """

    dtype: str
    is_array: bool
    input: int | None = None
    output: int | None = None

    @property
    def name(self) -> str:
        """Name of the stream in messages."""
        return f"output {self.output}" if self.input is None else f"input {self.input}"

    def find(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> np.ndarray:
        """Return this stream's array.

        Args:
          inputs: inputs of the call.
          outputs: outputs of the call.

        Raises:
          ValueError: the array has a wrong type, dtype or size, or is not contiguous, aligned or
            writable; or an output in place is given with other memory than its input's.
        """
        array = outputs[self.output or 0] if self.input is None else inputs[self.input]
        if (
            not isinstance(array, np.ndarray)
            or not array.flags.c_contiguous
            or array.ctypes.data % NUM_BYTES[self.dtype]
        ):
            raise ValueError(
                f"{self.name} is {type(array).__name__}: a contiguous, aligned numpy array is "
                "needed"
            )
        # numpy itself has no bfloat16, so two-byte floats may be given as uint16.
        is_bits = array.dtype == np.uint16 and NUM_BYTES[self.dtype] == 2
        if str(array.dtype) != self.dtype and not is_bits:
            raise ValueError(
                f"{self.name} has dtype {array.dtype}: the kernel was built for {self.dtype}"
            )
        if self.output is not None and not array.flags.writeable:
            raise ValueError(f"{self.name} is read-only, and output {self.output} is written there")
        if not self.is_array and array.size != 1:
            raise ValueError(
                f"{self.name} has {array.size} elements: it depends on no array, and has 1"
            )
        if self.input is not None and self.output is not None:
            output = outputs[self.output]
            if output is not None and _memory(output) != _memory(array):
                raise ValueError(
                    f"output {self.output} is in place over {self.name}, but has other memory: "
                    "give None, or the same memory"
                )
        return array


def _memory(array: np.ndarray) -> tuple[int, int]:
    """Return the address and the bytes of an array."""
    return array.ctypes.data, array.nbytes


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# If either operand is NaN, the result is NaN.
_MAX, _MIN = (f"select(({{0}} {op} {{1}}) | ({{0}} != {{0}}), {{0}}, {{1}})" for op in (">=", "<="))
EXACT = {
    "neg": "-{0}",
    "abs": "abs({0})",
    # NaN and both zeros are returned unchanged.
    "sign": "select({0} > f32(0), f32(1), select({0} < f32(0), f32(-1), {0}))",
    "max": _MAX,
    "min": _MIN,
    "floor": "floor({0})",
    "ceil": "ceil({0})",
}
"""Float equations whose exact results are values of the operands' dtype, or small integers."""
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
"""Float equations whose results are rounded to the dtype of the equation."""
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
UNSIGNED = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shift_left": "shift_left({0}, {1})",
    "shift_right_logical": "shift_right({0}, {1})",
}
"""Equations of uint32, modulo 2^32."""
BOOLEANS = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} != {1}", "not": "not {0}"}
SAME = frozenset({"copy", "name"})
SHAPED = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
INLINED = frozenset({"jit", "closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"})


class Writer:
    """Turns equations into lines of source.

    Attributes:
      before: lines before the loop, which depend only on scalars.
      loop: lines of the loop.
    """

    def __init__(self) -> None:
        """Start without lines."""
        self.before: list[str] = []
        self.loop: list[str] = []
        self._num = 0

    def define(self, text: str, dtype: str, varies: bool) -> Value:
        """Return a value for an expression, assigned to a new variable unless it is a name.

        Args:
          text: expression in the source.
          dtype: name of its dtype.
          varies: whether it is computed in the loop.
        """
        if text.isidentifier():
            return Value(text, dtype, varies)
        name = f"t{self._num}"
        self._num += 1
        (self.loop if varies else self.before).append(f"{name} = {text}")
        return Value(name, dtype, varies)

    def walk(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Write the lines of a jaxpr, with nested jaxprs inlined.

        Args:
          jaxpr: jaxpr to write.
          consts: values of its constants.
          args: values of its inputs.

        Returns:
          The values of its outputs.

        Raises:
          ValueError: an equation is not supported.
        """
        env = dict(zip(jaxpr.invars, args, strict=True))
        env |= {
            var: _constant(value, var.aval)
            for var, value in zip(jaxpr.constvars, consts, strict=True)
        }

        def read(atom: Any) -> Value:
            return _constant(atom.val, atom.aval) if isinstance(atom, jex.Literal) else env[atom]

        # Skip equations whose results are not needed: they may be unsupported.
        for eqn in _live(jaxpr):
            ins = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in INLINED:
                inner: Any = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                if isinstance(inner, jex.ClosedJaxpr):
                    outs = self.walk(inner.jaxpr, inner.consts, ins)
                else:
                    outs = self.walk(inner, (), ins)
            else:
                outs = [self.equation(eqn, ins)]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: jex.JaxprEqn, ins: list[Value]) -> Value:
        """Write the lines of one equation.

        Args:
          eqn: equation to write.
          ins: values of its operands.

        Returns:
          The value of its result.

        Raises:
          ValueError: the equation is not supported.
        """
        aval: Any = eqn.outvars[0].aval
        dtype = str(aval.dtype)
        varies = any(v.varies for v in ins)
        if eqn.primitive.name in SAME:
            return ins[0]
        # A scalar can be broadcast, but an array must keep its shape.
        if eqn.primitive.name in SHAPED:
            operand: Any = eqn.invars[0].aval
            keeps_shape = operand.shape == aval.shape if varies else operand.size == 1
            if len(ins) > 1 or not keeps_shape:
                raise ValueError(f"{_named(eqn)}: it changes the shape of an array")
            return ins[0]
        if eqn.primitive.name == "clamp" and dtype in ARRAYS:
            # JAX's definition, min(max(x, low), high); both propagate NaN.
            low, x, high = ins
            raised = self.define(_MAX.format(x.text, low.text), dtype, varies)
            return self.define(_MIN.format(raised.text, high.text), dtype, varies)
        if eqn.primitive.name == "integer_pow" and dtype in ARRAYS:
            return self.power(ins[0], eqn.params["y"])
        return self.define(_expression(eqn, ins, dtype), dtype, varies)

    def power(self, x: Value, y: int) -> Value:
        """Write x**y as squarings and products, in XLA's order, and return its value."""
        product = ""
        exponent = abs(y)
        while exponent:
            if exponent & 1:
                text = f"{product} * {x.text}" if product else x.text
                product = self.define(text, x.dtype, x.varies).text
            exponent >>= 1
            if exponent:
                x = self.define(f"{x.text} * {x.text}", x.dtype, x.varies)
        product = product or "f32(1)"
        text = f"f32(1) / {product}" if y < 0 else product
        return self.define(_rounded(text, x.dtype), x.dtype, x.varies)


def _expression(eqn: jex.JaxprEqn, ins: list[Value], dtype: str) -> str:
    """Return the Python expression of an equation whose result has type `dtype`."""
    name = eqn.primitive.name
    source = ins[0].dtype if ins else None
    args = [v.text for v in ins]
    if {dtype, *(v.dtype for v in ins)} - NUM_BYTES.keys():
        raise ValueError(f"{_named(eqn)}: host kernels support {', '.join(NUM_BYTES)}")
    if name == "convert_element_type" and (
        dtype != "uint32" or source in ("uint32", "int32", "bool")
    ):
        return _converted(args[0], str(source), dtype)
    if name == "select_n" and source == "bool" and len(ins) == 3:
        # select_n takes the case for False first.
        return f"select({args[0]}, {args[2]}, {args[1]})"
    if name in COMPARISONS:
        return f"{args[0]} {COMPARISONS[name]} {args[1]}"
    if name == "is_finite":
        # False for NaN too.
        return f"abs({args[0]}) < inf"
    if dtype == "bool" and name in BOOLEANS:
        return BOOLEANS[name].format(*args)
    if name == "bitcast_convert_type" and {dtype, source} == {"float32", "uint32"}:
        return f"{'parse_bits' if dtype == 'uint32' else 'float_of'}({args[0]})"
    if dtype == "uint32" and name in UNSIGNED:
        return f"u32({UNSIGNED[name].format(*args)})"
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
        return f"{text} != {'f32' if source in ARRAYS else 'i32'}(0)"
    if dtype == "uint32":
        return f"u32({text})"
    if dtype == "int32":
        return f"to_int32({text})" if source in ARRAYS else f"i32({text})"
    if source not in ARRAYS:
        text = f"f32({text})"
    return _rounded(text, dtype)


def _constant(value: Any, aval: Any) -> Value:
    """Return a constant with one element.

    Raises:
      ValueError: the constant has more elements, or an unsupported dtype.
    """
    dtype = str(aval.dtype)
    if aval.size != 1 or dtype not in NUM_BYTES:
        raise ValueError(
            f"a constant of shape {aval.shape} and dtype {dtype}: pass it as an input, or use a "
            "single number"
        )
    number = np.asarray(value, aval.dtype).reshape(())
    if dtype == "bool":
        return Value(repr(bool(number)), dtype)
    if dtype in ("int32", "uint32"):
        return Value(f"{dtype[0]}32({int(number)})", dtype)
    x = float(number.astype(np.float32))
    if math.isnan(x):
        return Value("nan", dtype)
    if math.isinf(x):
        return Value("f32(-inf)" if x < 0 else "f32(inf)", dtype)
    return Value(f"f32({x!r})", dtype)


def _live(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """Return the equations on which an output depends, in order."""
    needed = {v for v in jaxpr.outvars if isinstance(v, jex.Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, jex.Var))
            live.append(eqn)
    return live[::-1]


def _named(eqn: jex.JaxprEqn) -> str:
    return (
        f"a host kernel does not support {eqn.primitive.name} "
        f"(`{str(eqn).splitlines()[0].strip()}`)"
    )


def source_of_loop(
    writer: Writer,
    streams: Sequence[Stream],
    scalars: dict[int, str | None],
    results: Sequence[Value],
) -> tuple[str, int]:
    """Generate the Python source of a kernel.

    Args:
      writer: lines of the jaxpr.
      streams: memory that the kernel reads or writes.
      scalars: dtype of each scalar input, by index of the input; None for an array.
      results: value of each output.

    Returns:
      The source, and the bytes that it moves per element.
    """
    dtypes: list[str] = []  # of the arrays that are stored or loaded in the loop
    stores_in_loop = list[str]()
    stores_before = list[str]()
    for k, stream in enumerate(streams):
        # An output that equals its own input is not written.
        if stream.output is None or results[stream.output].text == f"x{stream.input}":
            continue
        result = results[stream.output].text
        if stream.is_array:
            stores_in_loop.append(f"store{k}(a{k}, i, {result})")
            dtypes.append(stream.dtype)
        else:
            stores_before.append(f"store{k}(a{k}, 0, {result})")

    # Do not load unused inputs: the bytes moved determine the time of a call.
    used = set(re.findall(r"\bx\d+\b", "\n".join(writer.loop + stores_in_loop)))
    loads = list[str]()
    for k, stream in enumerate(streams):
        if f"x{stream.input}" in used:
            loads.append(f"x{stream.input} = load{k}(a{k}, i)")
            dtypes.append(stream.dtype)

    arguments = [f"a{k}" for k in range(len(streams))]
    arguments += [f"x{k}" for k, dtype in scalars.items() if dtype is not None]
    body = loads + writer.loop + stores_in_loop
    lines = [
        f"def kernel({', '.join(['n', 'counter', 'block', *arguments])}):",
        # Every thread runs this function. The mode belongs to the thread, so each thread sets and
        # restores it.
        "    mode = flush_subnormals()",
        # Every thread stores the outputs that depend only on scalars; all store the same value.
        *(f"    {line}" for line in writer.before + stores_before),
        "    while True:",
        "        start = claim(counter, block)",
        "        if start >= n:",
        "            break",
        "        for i in range(start, min(start + block, n)):",
        *(f"            {line}" for line in body or ["pass"]),
        "    set_mode(mode)",
    ]
    return "\n".join(lines) + "\n", sum(NUM_BYTES[dtype] for dtype in dtypes)
