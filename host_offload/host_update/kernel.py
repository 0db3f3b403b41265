"""An elementwise jaxpr as one fused loop over host memory: any elementwise optimizer at the speed
of memory.

An optimizer on the host (ZeRO-Offload, arXiv:2101.06840, section 4.3) touches each byte of its
state once a step and computes little, so its floor is memory bandwidth. The published answer is
Adam written by hand in vector instructions. Here the rule comes from its own jaxpr, whatever the
rule: each array is read once and written once,

    for i in range(n):                                  # blocks of i on several threads
        g, m, v, p = G[i], M[i], V[i], P[i]             # widened to float32
        ...                                             # the equations, in order
        M[i], V[i], P[i] = ...                          # in place, rounded to the dtype of each array

and equations of scalars alone (bias corrections, schedules) run once a call, before the loop. The
loop is compiled by numba when the kernel is built.

What it computes: float32 arithmetic, each equation rounded once. Nothing is reassociated or
  contracted, because the loop waits
for memory anyway; so NaN and infinity behave as written, and neither the number of threads nor the
place of a block changes a bit. Values of bfloat16 and float16 are rounded to nearest even wherever
the jaxpr has that dtype. XLA may contract a product and a sum, so its results differ by an ulp or
so. Subnormal float32 counts as zero, as in XLA's CPU programs: those threads run with the processor
set so and callbacks inherit it, hence the loop sets it on each of its threads.

How it is threaded: the calling thread and its helpers claim blocks by an atomic counter, without
  the GIL. A call never waits
for a helper that has not started, so a busy interpreter costs help but no waiting, and any number
of threads may call at once. This is why it is no numba `prange`: one of numba's thread layers
aborts on concurrent calls, another on a fork.
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

MIN_BLOCK, MAX_BLOCK = 2**14, 2**20  # elements: the start of a block costs about a microsecond


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled loop over host memory, built by `build_kernel`.

    Attributes:
      source: what was compiled, as Python.
      bytes_per_element: bytes read and written for each element. Times the elements, over the
        memory's bandwidth, it is the least time of a call.
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

        Any number of Python threads may call at once, each with memory of its own. The GIL is
        released.

        Args:
          inputs: an array or a number for each input of the jaxpr. Arrays are contiguous and of one
            size, at any offset; those of bfloat16 and float16 may come as uint16.
          outputs: an array for each output; of one element where the output depends on no array and
            has no dims (a count of steps). Those in place are None, or the input's memory again.
          num_threads: at most this many threads work, the calling one included; None is one for
            each core.

        Raises:
          ValueError: an array is not of the declared dtype, of the size of the others, contiguous
            or writable; or memory that is written overlaps other memory.
        """
        num_threads = _num_cores() if num_threads is None else num_threads
        if (len(inputs), len(outputs)) != (
            len(self._scalars),
            self._num_outputs,
        ) or num_threads < 1:
            raise ValueError(
                f"{len(inputs)} inputs, {len(outputs)} outputs, num_threads={num_threads}: "
                f"{len(self._scalars)}, {self._num_outputs} and 1 or more are needed"
            )
        arrays = [stream.find(inputs, outputs) for stream in self._streams]
        n = _common_size(self._streams, arrays)
        addresses = [a.ctypes.data for a in arrays]
        _check_overlap(
            self._streams,
            [(start, start + a.nbytes) for start, a in zip(addresses, arrays, strict=True)],
        )
        # Four blocks for each thread, so that a slow one leaves its share to the others. Multiples
        # of 64 elements keep two threads out of one cache line, where arrays start at one.
        block = min(max(-(-n // (4 * num_threads)), MIN_BLOCK), MAX_BLOCK) // 64 * 64
        counter = np.zeros(1, np.int64)
        args = [n, counter.ctypes.data, block, *addresses]
        args += [
            np.dtype(dtype).type(np.asarray(inputs[k]).item())
            for k, dtype in self._scalars.items()
            if dtype is not None
        ]
        jobs = []
        try:
            with contextlib.suppress(RuntimeError):  # no helper starts while the interpreter exits
                for _ in range(min(num_threads, -(-n // block)) - 1):
                    jobs.append(self._helpers.submit(self._run, *args))
            self._run(*args)
        finally:
            # Helpers hold raw addresses: none may run on when the counter and the arrays are gone.
            for job in jobs:
                if not job.cancel():  # it has started, and may be in its last block
                    job.result()


def build_kernel(
    closed_jaxpr: jex.ClosedJaxpr,
    aliases: Sequence[tuple[int, int]] = (),
    *,
    arrays: Sequence[bool] | None = None,
) -> Kernel:
    """Compile an elementwise jaxpr to a loop over host memory.

    The shapes of arrays in the jaxpr are stand-ins: a call takes any number of elements.

    Args:
      closed_jaxpr: of elementwise equations, and of any on scalars that kernels know; nested jaxprs
        are inlined.
      aliases: pairs (output, input): the output is written over the input's memory, which is then
        read before it is written, element by element.
      arrays: which inputs are arrays; by default those whose aval has dims. An array may be of
        shape (), a scalar may not have dims.

    Raises:
      ValueError: an equation is not elementwise, or of a dtype that kernels do not know; the
        message names it. Or the inputs are not of the kinds above, or an alias is not between
        arrays of one dtype.
    """
    jaxpr = closed_jaxpr.jaxpr
    avals: list[Any] = [v.aval for v in jaxpr.invars]
    is_array = tuple(a.ndim > 0 for a in avals) if arrays is None else tuple(arrays)
    _check_inputs(avals, is_array)
    writer = Writer()
    values = [
        Value(f"x{k}", str(a.dtype), varies)
        for k, (a, varies) in enumerate(zip(avals, is_array, strict=True))
    ]
    results = writer.walk(jaxpr, closed_jaxpr.consts, values)
    _check_aliases(aliases, values, results)
    source_of = dict(aliases)  # output -> the input over which it is written
    output_of = {k: output for output, k in aliases}

    # Memory: the arrays among the inputs, each with the output written over it, and then outputs
    # with memory of their own.
    streams = [Stream(v.dtype, True, k, output_of.get(k)) for k, v in enumerate(values) if v.varies]
    for k, (var, value) in enumerate(zip(jaxpr.outvars, results, strict=True)):
        aval: Any = var.aval
        if value.dtype not in (ARRAYS if value.varies or aval.ndim else SCALARS):
            raise ValueError(
                f"output {k} is {aval.str_short()}: arrays are {', '.join(ARRAYS)}; scalars {', '.join(SCALARS)}"
            )
        if k not in source_of:
            streams.append(Stream(value.dtype, value.varies or aval.ndim > 0, None, k))
    scalars = {k: None if v.varies else v.dtype for k, v in enumerate(values)}
    source, num_bytes = source_of_loop(writer, streams, scalars, results)
    from host_offload.host_update.kernel_llvm import (
        compile_source,
    )  # imports numba, which most programs need not wait for

    run = compile_source(
        source, tuple(s.dtype for s in streams), tuple(d for d in scalars.values() if d is not None)
    )
    helpers = ThreadPoolExecutor(_num_cores(), thread_name_prefix="host_offload")
    return Kernel(source, num_bytes, len(results), scalars, tuple(streams), run, helpers)


def _check_inputs(avals: Sequence[Any], is_array: Sequence[bool]) -> None:
    if len(is_array) != len(avals) or not any(is_array):
        raise ValueError(
            f"arrays={list(is_array)} for {len(avals)} inputs: one flag for each, and one array at least"
        )
    sizes = {a.size for a, varies in zip(avals, is_array, strict=True) if varies}
    for k, (aval, varies) in enumerate(zip(avals, is_array, strict=True)):
        if str(aval.dtype) not in (ARRAYS if varies else SCALARS) or (aval.ndim and not varies):
            raise ValueError(
                f"input {k} is {aval.str_short()}: arrays are {', '.join(ARRAYS)}; scalars {', '.join(SCALARS)}, no dims"
            )
    if len(sizes) > 1:
        raise ValueError(f"arrays of {sorted(sizes)} elements: all have the same number")


def _check_aliases(
    aliases: Sequence[tuple[int, int]], values: Sequence[Value], results: Sequence[Value]
) -> None:
    outputs, inputs = [o for o, _ in aliases], [i for _, i in aliases]
    if len(set(outputs)) < len(outputs) or len(set(inputs)) < len(inputs):
        raise ValueError(
            f"aliases {list(aliases)}: an output has one place, and a place one output"
        )
    for output, k in aliases:
        if not (0 <= output < len(results) and 0 <= k < len(values)) or not values[k].varies:
            raise ValueError(
                f"alias ({output}, {k}): there is no such output, or input {k} is no array"
            )
        if results[output].dtype != values[k].dtype:
            raise ValueError(
                f"alias ({output}, {k}): {results[output].dtype} is written over {values[k].dtype}"
            )


def _common_size(streams: Sequence[Stream], arrays: Sequence[np.ndarray]) -> int:
    sizes = {s.name: a.size for s, a in zip(streams, arrays, strict=True) if s.is_array}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"arrays of one size are needed: {', '.join(f'{name} has {size}' for name, size in sizes.items())}"
        )
    return next(iter(sizes.values()))


def _check_overlap(streams: Sequence[Stream], spans: Sequence[tuple[int, int]]) -> None:
    """Raise where written memory is not a stream's own: the loop was compiled for that."""
    end, end_written = 0, 0  # of the memory before, and of what is written of it
    for (start, stop), stream in sorted(
        zip(spans, streams, strict=True), key=lambda entry: entry[0]
    ):
        written = stream.output is not None
        # What is written may touch nothing before it; what is read, nothing written.
        if start < stop and start < (end if written else end_written):
            raise ValueError(
                f"{stream.name} overlaps other memory of this call, and one of both is written: alias them, or copy"
            )
        end, end_written = max(end, stop), max(end_written, stop if written else 0)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
