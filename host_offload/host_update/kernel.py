"""Compile an elementwise jaxpr to a fused loop over host memory.

A host optimizer (ZeRO-Offload, arXiv:2101.06840, section 5.1) touches each byte of its state once
per step and computes little, so memory bandwidth limits its speed. The published solution is Adam,
written by hand in vector instructions. Here the loop is generated from the jaxpr of any elementwise
update rule. Each array is read once and written once,

    for i in range(n):                                  # blocks of i on several threads
        g, m, v, p = G[i], M[i], V[i], P[i]             # widened to float32
        ...                                             # the equations, in order
        M[i], V[i], P[i] = ...                          # in place, rounded to each array's dtype

and equations that depend only on scalars (bias corrections, schedules) run once per call, before
the loop. numba compiles the loop when the kernel is built.

Arithmetic: float32, with each equation rounded once. Nothing is reassociated or contracted, because
the loop waits for memory anyway. So NaN and infinity behave as written, and the result does not
depend on the number of threads or the position of blocks, down to the last bit. bfloat16 and
float16 values are rounded to nearest even wherever the jaxpr has that dtype. XLA may contract a
product and a sum, so its results may differ by about an ulp. Subnormal float32 numbers count as
zero, as in XLA's CPU programs: XLA sets the processor to this mode on its threads, and callbacks
inherit it, so the loop sets it on each of its threads.

Threads: the calling thread and its helpers claim blocks with an atomic counter, without the GIL. A
call never waits for a helper that has not started. So a busy interpreter means less help but no
waiting, and any number of threads may call at the same time. This rules out numba's `prange`: one
of numba's threading layers aborts on concurrent calls, another after a fork.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.extend.core as jex
import numpy as np

from host_offload.host_update.kernel_source import (
    ARRAYS,
    SCALARS,
    Stream,
    Value,
    Writer,
    source_of_loop,
)

MIN_BLOCK, MAX_BLOCK = 2**14, 2**20  # elements; starting a block costs about a microsecond


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled loop over host memory, built by `build_kernel`.

    Attributes:
      source: Python source that was compiled.
      bytes_per_element: bytes read and written per element. Multiplied by the number of elements
        and divided by the memory's bandwidth, it is a lower bound of a call's time.
    """

    source: str
    bytes_per_element: int
    _num_outputs: int
    _scalars: dict[int, str | None]  # input -> dtype, or None for an array
    _streams: tuple[Stream, ...]
    _run: Callable[..., None]
    _helpers: ThreadPoolExecutor

    def __call__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[np.ndarray | None],
        num_threads: int | None = None,
    ) -> None:
        """Compute `outputs` from `inputs`.

        Any number of Python threads may call at the same time, each with its own memory. The GIL is
        released.

        Args:
          inputs: an array or a number per input of the jaxpr. Arrays must be contiguous and have
            the same size; they may be views at any offset. bfloat16 and float16 arrays may be given
            as uint16.
          outputs: an array per output. It has one element if the output depends on no array and has
            no dims (a step count). For an output in place, give None or the input's memory.
          num_threads: maximum number of threads, including the calling one; by default, the number
            of cores.

        Raises:
          ValueError: the number of inputs, outputs or threads is wrong; an array has the wrong
            dtype or size, or is not contiguous or writable; or written memory overlaps other
            memory.
        """
        if num_threads is None:
            num_threads = _num_cores()
        self._check_call(len(inputs), len(outputs), num_threads)
        arrays = [stream.find(inputs, outputs) for stream in self._streams]
        num_elements = _common_size(self._streams, arrays)
        _check_overlap(self._streams, arrays)
        # Four blocks per thread, so that faster threads can take over blocks of a slow one. With
        # multiples of 64 elements two threads never share a cache line, if arrays are aligned.
        block = min(max(-(-num_elements // (4 * num_threads)), MIN_BLOCK), MAX_BLOCK) // 64 * 64
        num_blocks = -(-num_elements // block)
        counter = np.zeros(1, np.int64)
        addresses = [array.ctypes.data for array in arrays]
        args = [num_elements, counter.ctypes.data, block, *addresses, *self._read_scalars(inputs)]
        self._run_on_threads(args, min(num_threads, num_blocks) - 1)

    def _check_call(self, num_inputs: int, num_outputs: int, num_threads: int) -> None:
        wanted = (len(self._scalars), self._num_outputs)
        if (num_inputs, num_outputs) != wanted or num_threads < 1:
            raise ValueError(
                f"{num_inputs} inputs, {num_outputs} outputs, num_threads={num_threads}: "
                f"{len(self._scalars)}, {self._num_outputs} and 1 or more are needed"
            )

    def _read_scalars(self, inputs: Sequence[Any]) -> list[np.generic]:
        """Return the scalar inputs, in the dtypes of the compiled loop."""
        return [
            np.dtype(dtype).type(np.asarray(inputs[k]).item())
            for k, dtype in self._scalars.items()
            if dtype is not None
        ]

    def _run_on_threads(self, args: Sequence[Any], num_helpers: int) -> None:
        """Run the loop in this thread and in helpers, and wait for the helpers that started."""
        jobs = []
        try:
            # RuntimeError: helpers cannot start while the interpreter exits.
            with contextlib.suppress(RuntimeError):
                for _ in range(num_helpers):
                    jobs.append(self._helpers.submit(self._run, *args))
            self._run(*args)
        finally:
            # Helpers hold raw addresses: none may still run when the counter and arrays are freed.
            for job in jobs:
                if not job.cancel():  # the job has started, and may be in its last block
                    job.result()


def build_kernel(
    closed_jaxpr: jex.ClosedJaxpr,
    aliases: Sequence[tuple[int, int]] = (),
    *,
    arrays: Sequence[bool] | None = None,
) -> Kernel:
    """Compile an elementwise jaxpr to a loop over host memory.

    The shapes of arrays in the jaxpr are placeholders: a call accepts any number of elements.

    Args:
      closed_jaxpr: jaxpr of elementwise equations on arrays, and of supported equations on scalars;
        nested jaxprs are inlined.
      aliases: pairs (output, input) for outputs that overwrite an input's memory; each element is
        read before it is written.
      arrays: whether each input is an array; by default, inputs with dims are arrays. An array may
        have shape (), but a scalar must not have dims.

    Returns:
      The compiled kernel.

    Raises:
      ValueError: an equation is not elementwise or has an unsupported dtype, and is named in the
        message; an input or output is not supported; or an alias does not connect arrays of the
        same dtype.
    """
    jaxpr = closed_jaxpr.jaxpr
    avals: list[Any] = [v.aval for v in jaxpr.invars]
    is_array = tuple(a.ndim > 0 for a in avals) if arrays is None else tuple(arrays)
    _check_inputs(avals, is_array)
    writer = Writer()
    values = [
        Value(f"x{k}", str(aval.dtype), varies)
        for k, (aval, varies) in enumerate(zip(avals, is_array, strict=True))
    ]
    results = writer.walk(jaxpr, closed_jaxpr.consts, values)
    _check_aliases(aliases, values, results)
    out_avals: list[Any] = [v.aval for v in jaxpr.outvars]
    _check_outputs(out_avals, results)
    streams = _list_streams(values, results, out_avals, aliases)
    scalars = {k: None if v.varies else v.dtype for k, v in enumerate(values)}
    source, num_bytes = source_of_loop(writer, streams, scalars, results)
    # Imported here, because it imports numba, which is slow and which most programs do not need.
    from host_offload.host_update.kernel_llvm import compile_source

    array_dtypes = tuple(stream.dtype for stream in streams)
    scalar_dtypes = tuple(dtype for dtype in scalars.values() if dtype is not None)
    run = compile_source(source, array_dtypes, scalar_dtypes)
    helpers = ThreadPoolExecutor(_num_cores(), thread_name_prefix="host_offload")
    return Kernel(source, num_bytes, len(results), scalars, tuple(streams), run, helpers)


def _list_streams(
    values: Sequence[Value],
    results: Sequence[Value],
    out_avals: Sequence[Any],
    aliases: Sequence[tuple[int, int]],
) -> list[Stream]:
    """Return the memory of a kernel: input arrays with the outputs that overwrite them, outputs."""
    overwriting = {k: output for output, k in aliases}  # input -> output
    in_place = {output for output, _ in aliases}
    streams = list[Stream]()
    for k, value in enumerate(values):
        if value.varies:
            streams.append(Stream(value.dtype, True, k, overwriting.get(k)))
    for k, (value, aval) in enumerate(zip(results, out_avals, strict=True)):
        if k not in in_place:
            streams.append(Stream(value.dtype, value.varies or aval.ndim > 0, None, k))
    return streams


def _check_outputs(avals: Sequence[Any], results: Sequence[Value]) -> None:
    for k, (aval, value) in enumerate(zip(avals, results, strict=True)):
        if value.dtype not in (ARRAYS if value.varies or aval.ndim else SCALARS):
            raise ValueError(
                f"output {k} is {aval.str_short()}: arrays must be {', '.join(ARRAYS)}; scalars "
                f"{', '.join(SCALARS)}"
            )


def _check_inputs(avals: Sequence[Any], is_array: Sequence[bool]) -> None:
    if len(is_array) != len(avals) or not any(is_array):
        raise ValueError(
            f"arrays={list(is_array)} for {len(avals)} inputs: give one flag per input, and at "
            "least one array"
        )
    sizes = {a.size for a, varies in zip(avals, is_array, strict=True) if varies}
    for k, (aval, varies) in enumerate(zip(avals, is_array, strict=True)):
        if str(aval.dtype) not in (ARRAYS if varies else SCALARS) or (aval.ndim and not varies):
            raise ValueError(
                f"input {k} is {aval.str_short()}: arrays must be {', '.join(ARRAYS)}; scalars "
                f"{', '.join(SCALARS)}, without dims"
            )
    if len(sizes) > 1:
        raise ValueError(f"arrays of {sorted(sizes)} elements: all must have the same number")


def _check_aliases(
    aliases: Sequence[tuple[int, int]], values: Sequence[Value], results: Sequence[Value]
) -> None:
    outputs = [o for o, _ in aliases]
    inputs = [i for _, i in aliases]
    if len(set(outputs)) < len(outputs) or len(set(inputs)) < len(inputs):
        raise ValueError(
            f"aliases {list(aliases)}: an output must have one place, and a place one output"
        )
    for output, k in aliases:
        if not (0 <= output < len(results) and 0 <= k < len(values)) or not values[k].varies:
            raise ValueError(
                f"alias ({output}, {k}): there is no such output, or input {k} is not an array"
            )
        if results[output].dtype != values[k].dtype:
            raise ValueError(
                f"alias ({output}, {k}): {results[output].dtype} is written over {values[k].dtype}"
            )


def _common_size(streams: Sequence[Stream], arrays: Sequence[np.ndarray]) -> int:
    sizes = {s.name: a.size for s, a in zip(streams, arrays, strict=True) if s.is_array}
    if len(set(sizes.values())) > 1:
        texts = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"arrays must have the same size: {texts}")
    return next(iter(sizes.values()))


def _check_overlap(streams: Sequence[Stream], arrays: Sequence[np.ndarray]) -> None:
    """Raise ValueError if written memory overlaps another stream: the loop assumes no overlap."""
    end = 0  # of the memory so far
    end_written = 0  # of its written part
    pairs = zip(streams, arrays, strict=True)
    for stream, array in sorted(pairs, key=lambda pair: pair[1].ctypes.data):
        start = array.ctypes.data
        stop = start + array.nbytes
        is_written = stream.output is not None
        # Written memory must not overlap any earlier memory; read memory, no written memory.
        if start < stop and start < (end if is_written else end_written):
            raise ValueError(
                f"{stream.name} overlaps other memory of this call, and one of the two is written: "
                "alias them, or copy"
            )
        end = max(end, stop)
        if is_written:
            end_written = max(end_written, stop)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
