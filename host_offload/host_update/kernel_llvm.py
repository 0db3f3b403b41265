"""Compile the loop of a host kernel, with LLVM instructions that numba does not offer."""

import functools
import math
import platform
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from host_offload.host_update.kernel_source import NUM_BYTES

F32 = ir.FloatType()
F16 = ir.HalfType()
I64 = ir.IntType(64)
I32 = ir.IntType(32)
I16 = ir.IntType(16)
I8 = ir.IntType(8)
MEMORY = {"float32": F32, "bfloat16": I16, "float16": I16, "int32": I32, "bool": I8}
TYPES = {
    "int32": numba.int32,
    "uint32": numba.uint32,
    "bool": numba.boolean,
}  # every other dtype is computed in float32


def _of_float(result: Any, write: Callable[..., Any]) -> Any:
    """Return an intrinsic of one float32 argument, emitted by `write(builder, value)`."""

    @intrinsic
    def call(typing: Any, x: Any) -> Any:
        return result(numba.float32), lambda context, builder, sig, args: write(builder, args[0])

    return call


def _llvm(name: str, *types: ir.Type) -> Callable[..., Any]:
    kind = ir.FunctionType(types[0] if types else F32, [F32])
    return lambda builder, x: builder.call(
        builder.module.declare_intrinsic(name, types or (F32,), kind), [x]
    )


def _round_bfloat16(builder: Any, x: Any) -> Any:
    """Round to nearest even, in integers: LLVM can vectorize this on every processor."""
    bits = builder.bitcast(x, I32)
    high = builder.lshr(bits, I32(16))
    # This carries if the lower half is above 0x8000, or is 0x8000 and the last remaining bit is 1.
    rounded = builder.add(builder.add(bits, I32(0x7FFF)), builder.and_(high, I32(1)))
    # A NaN is handled separately, because adding could turn it into infinity.
    quiet = builder.or_(builder.and_(bits, I32(0x80000000)), I32(0x7FC00000))
    result = builder.and_(
        builder.select(builder.fcmp_unordered("uno", x, x), quiet, rounded), I32(0xFFFF0000)
    )
    return builder.bitcast(result, F32)


def _round_float16(builder: Any, x: Any) -> Any:
    return builder.fpext(builder.fptrunc(x, F16), F32)


@intrinsic
def _select(typing: Any, condition: Any, x: Any, y: Any) -> Any:
    kind = numba.types.unliteral(x)
    # Both values are computed: a branch would prevent LLVM from vectorizing the loop.
    return kind(numba.boolean, kind, kind), lambda context, builder, sig, args: builder.select(
        *args
    )


def _shift(name: str) -> Any:
    """Return an intrinsic that shifts a uint32; shifts by 32 or more give 0, as in XLA."""

    @intrinsic
    def shift(typing: Any, x: Any, y: Any) -> Any:
        def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            # In LLVM a shift by 32 or more is undefined. So shift by the low five bits, and select
            # 0 afterwards.
            shifted = getattr(builder, name)(args[0], builder.and_(args[1], I32(31)))
            return builder.select(builder.icmp_unsigned("<", args[1], I32(32)), shifted, I32(0))

        return numba.uint32(numba.uint32, numba.uint32), write

    return shift


@intrinsic
def _bits_to_float(typing: Any, x: Any) -> Any:
    """Return the float32 with the bits of a uint32."""
    return numba.float32(numba.uint32), lambda context, builder, sig, args: builder.bitcast(
        args[0], F32
    )


@intrinsic
def _claim(typing: Any, counter: Any, num: Any) -> Any:
    """Atomically add `num` to the counter at an address, and return its previous value."""

    def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        # Monotonic ordering is enough: each block must be claimed once, and the counter passes no
        # other data between threads.
        return builder.atomic_rmw(
            "add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic"
        )

    return numba.int64(numba.int64, numba.int64), write


X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
FLUSH = 0
if X86:
    FLUSH = 0x8040  # FTZ and DAZ of MXCSR
elif ARM:
    FLUSH = 1 << 24  # FZ of FPCR


@intrinsic
def _flush_subnormals(typing: Any) -> Any:
    """Make this thread treat subnormal numbers as zero, and return its previous mode."""

    def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        old = _read_mode(builder)
        _write_mode(builder, builder.or_(old, I64(FLUSH)))
        return old

    return numba.int64(), write


@intrinsic
def _set_mode(typing: Any, mode: Any) -> Any:
    """Restore a mode of this thread that `_flush_subnormals` returned."""

    def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _write_mode(builder, args[0])
        return context.get_dummy_value()

    return numba.void(numba.int64), write


def _read_mode(builder: Any) -> Any:
    if X86:
        # These instructions only work on memory; they cannot take or return a value.
        place = builder.bitcast(builder.alloca(I32), I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse.stmxcsr", (), kind), [place])
        return builder.zext(builder.load(builder.bitcast(place, I32.as_pointer())), I64)
    if ARM:
        return builder.call(
            builder.module.declare_intrinsic("llvm.aarch64.get.fpcr", (), ir.FunctionType(I64, [])),
            [],
        )
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
    """Declare to LLVM that streams do not overlap, which every call checks.

    Without this LLVM compares all pairs of streams at run time, or does not vectorize the loop.
    """
    domain = module.add_metadata(["fused"])
    scopes = [module.add_metadata([f"stream {k}", domain]) for k in range(num_streams)]
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[stream]]))
    instruction.set_metadata(
        "noalias", module.add_metadata([s for k, s in enumerate(scopes) if k != stream])
    )


def _load(dtype: str, stream: int, num_streams: int) -> Any:
    """Return an intrinsic (address, index) -> the element as float32."""

    @intrinsic
    def load(typing: Any, address: Any, index: Any) -> Any:
        def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(args[0], MEMORY[dtype].as_pointer()), [args[1]])
            # Only an element's alignment is certain: a layer of a stack may start anywhere.
            x = builder.load(pointer, align=NUM_BYTES[dtype])
            _no_overlap(x, builder.module, stream, num_streams)
            if dtype == "bfloat16":
                return builder.bitcast(builder.shl(builder.zext(x, I32), I32(16)), F32)
            return builder.fpext(builder.bitcast(x, F16), F32) if dtype == "float16" else x

        return numba.float32(numba.int64, numba.int64), write

    return load


def _store(dtype: str, stream: int, num_streams: int) -> Any:
    """Return an intrinsic (address, index, value of `dtype`) -> None."""

    @intrinsic
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(args[0], MEMORY[dtype].as_pointer()), [args[1]])
            x = args[2]
            if dtype == "bfloat16":
                # Exact, because the value was rounded by its equation, so its low half is zero.
                x = builder.trunc(builder.lshr(builder.bitcast(x, I32), I32(16)), I16)
            elif dtype == "float16":
                x = builder.bitcast(builder.fptrunc(x, F16), I16)
            elif dtype == "bool":
                x = builder.zext(x, I8)
            _no_overlap(
                builder.store(x, pointer, align=NUM_BYTES[dtype]),
                builder.module,
                stream,
                num_streams,
            )
            return context.get_dummy_value()

        kind = TYPES.get(dtype, numba.float32)
        return numba.void(numba.int64, numba.int64, kind), write

    return store


WORDS = {
    "math": math,
    "f32": np.float32,
    "i32": np.int32,
    "u32": np.uint32,
    "inf": np.float32("inf"),
    "nan": np.float32("nan"),
    "select": _select,
    "shift_left": _shift("shl"),
    "shift_right": _shift("lshr"),
    "parse_bits": _of_float(numba.uint32, lambda builder, x: builder.bitcast(x, I32)),
    "float_of": _bits_to_float,
    "claim": _claim,
    "flush_subnormals": _flush_subnormals,
    "set_mode": _set_mode,
    "sqrt": _of_float(numba.float32, _llvm("llvm.sqrt")),
    "floor": _of_float(numba.float32, _llvm("llvm.floor")),
    "ceil": _of_float(numba.float32, _llvm("llvm.ceil")),
    # NaN becomes 0, and values out of range become the nearest int32.
    "to_int32": _of_float(numba.int32, _llvm("llvm.fptosi.sat", I32, F32)),
    "round_bfloat16": _of_float(numba.float32, _round_bfloat16),
    "round_float16": _of_float(numba.float32, _round_float16),
}
"""The names that a kernel's source may use, in addition to its own loads and stores."""


@functools.cache
def compile_source(
    source: str, streams: tuple[str, ...], scalars: tuple[str, ...]
) -> Callable[..., None]:
    """Compile the source of a kernel.

    Args:
      source: Python source of the function `kernel`.
      streams: dtype of each stream.
      scalars: dtype of each scalar argument.

    Returns:
      The compiled function, which releases the GIL.
    """
    words: dict[str, Any] = dict(WORDS)
    for k, dtype in enumerate(streams):
        words[f"load{k}"], words[f"store{k}"] = (
            _load(dtype, k, len(streams)),
            _store(dtype, k, len(streams)),
        )
    # `words` become the globals of the function.
    exec(source, words)
    # n, the address of the counter, the block size, the addresses of the streams; then the scalars.
    types = [numba.int64] * (3 + len(streams)) + [
        TYPES.get(dtype, numba.float32) for dtype in scalars
    ]
    # error_model="numpy": a division by zero gives infinity, not an exception. No fastmath, which
    # would also turn powers into calls of __powisf2, a function that numba does not link.
    return numba.njit(numba.void(*types), nogil=True, error_model="numpy")(words["kernel"])
