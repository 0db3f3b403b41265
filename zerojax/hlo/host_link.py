"""Find what a compiled program moves over the host link, and prove its host slices' addresses.

In HLO, an array in pinned host memory has the memory space S(5). A streamed step moves such arrays
one record at a time, with dynamic-slices (host to device) and dynamic-update-slices (device to
host) in loops. It must never copy a full stack. Both are counted here, as often as they run.

XLA may give a slice a descriptor, `dynamic_slice_config` in its backend_config. The slice then
starts `offset + stride * i` bytes into its array, where i is the number of finished iterations of
an enclosing loop, and the index is no longer read. In jax 0.10 and 0.11 the descriptor is derived
as if the index were i, whatever function of i it is (openxla/xla 46231). This module therefore
computes each index for every iteration, from the constants and the counters of the enclosing loops
(`index_values`). A descriptor is proven if it gives the same addresses; a descriptor that is not
proven is unsafe. An index that is read from an argument of the program is unknown to the compiler
too: it has no descriptor, and is read when it is used.

    text = compiled.as_text()
    assert not hlo.unsafe_host_slices(text)

`host_offload.device.self_test` checks the same by running slices on a device.
"""

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np

from zerojax.hlo.index_values import CALLS, DONE, OTHER, Frame, entry_frame, equal, walk
from zerojax.hlo.parse import Array, Instruction, parse_arrays, reads_program

_SLICES = ("dynamic-slice", "dynamic-update-slice")
_VIEWS = (
    *DONE,
    *CALLS,
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "custom-call",
    "opt-barrier",
    "optimization-barrier",
    "after-all",
    "add-dependency",
)


class Descriptor(NamedTuple):
    """The address of a slice: `byte_offset + byte_stride * i`.

    Attributes:
      byte_offset: bytes from the start of the array in iteration 0.
      byte_stride: bytes from one iteration to the next.
      loop_index: enclosing loop whose finished iterations are i; 0 is the innermost.
    """

    byte_offset: int
    byte_stride: int
    loop_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class HostSlice:
    """A slice of an array in host memory that a program reads or writes.

    Attributes:
      computation: HLO computation that contains the slice.
      op: "dynamic-slice" or "dynamic-update-slice".
      direction: "to_device", "to_host" or "host_to_host".
      num_bytes: bytes moved in each run.
      times: number of runs per step.
      index: what picks the record: "raw" (the counter of an enclosing loop that starts at 0 and
        steps by 1), "constant", "array" (read from an argument of the program) or "other".
      has_descriptor: whether XLA fixed the address.
      descriptor: the fixed address; None if there is no descriptor, or its form is unknown.
      proven: whether the descriptor gives the address of the requested record in every iteration.
      instruction: name of the instruction in its computation.
    """

    computation: str
    op: str
    direction: str
    num_bytes: int
    times: int
    index: str
    has_descriptor: bool
    descriptor: Descriptor | None
    proven: bool
    instruction: str


@dataclasses.dataclass(frozen=True, slots=True)
class HostCopy:
    """A full array that is copied from, to or within host memory, or that a kernel accesses there.

    Attributes:
      computation: HLO computation that contains the copy.
      op: "copy", "copy-start", or the instruction of a kernel that accesses host memory, such as
        "slice" or "add".
      direction: "to_device", "to_host" or "host_to_host".
      num_bytes: bytes moved in each run.
      times: number of runs per step.
      instruction: name of the instruction in its computation.
    """

    computation: str
    op: str
    direction: str
    num_bytes: int
    times: int
    instruction: str


@reads_program
def host_slices(text: str, unknown_trips: int | None = None) -> list[HostSlice]:
    """Return the slices of arrays in host memory, in scheduled order.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`, with the backend_config of every
        instruction.
      unknown_trips: trip count to assume for a loop whose count XLA does not know.

    Raises:
      ValueError: a loop that contains a slice has no known trip count.
    """
    return [
        _host_slice(frame, i, times)
        for frame, i, times in walk(entry_frame(text), unknown_trips)
        if i.op in _SLICES and frame.arrays(i.operands[0])[0].on_host
    ]


@reads_program
def unsafe_host_slices(text: str, unknown_trips: int | None = None) -> list[HostSlice]:
    """Return the slices of host memory whose descriptor is not proven to give the requested record.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`, with the backend_config of every
        instruction.
      unknown_trips: trip count to assume for a loop whose count XLA does not know. An index that
        depends on such a loop's counter is never proven.

    Raises:
      ValueError: a loop that contains a slice has no known trip count.
    """
    return [s for s in host_slices(text, unknown_trips) if s.has_descriptor and not s.proven]


@reads_program
def host_copies(text: str, unknown_trips: int | None = None) -> list[HostCopy]:
    """Return the moves of full arrays from, to or within host memory.

    They are copies, and kernels that work on the arrays there. Slices are listed by `host_slices`.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`, with the backend_config of every
        instruction.
      unknown_trips: trip count to assume for a loop whose count XLA does not know.

    Raises:
      ValueError: a loop that contains a copy has no known trip count.
    """
    visits = walk(entry_frame(text), unknown_trips)
    copies = (_host_copy(frame, i, times) for frame, i, times in visits if i.op not in _VIEWS)
    return [c for c in copies if c is not None]


@reads_program
def host_link_bytes(text: str, unknown_trips: int | None = None) -> dict[str, int]:
    """Return the bytes that one device moves over its host link per step.

    Args:
      text: the program's scheduled HLO, `compiled.as_text()`, with the backend_config of every
        instruction.
      unknown_trips: trip count to assume for a loop whose count XLA does not know.

    Returns:
      Bytes by direction: "to_device", "to_host". Moves within host memory are not counted.

    Raises:
      ValueError: a loop that moves host memory has no known trip count.
    """
    total = {"to_device": 0, "to_host": 0}
    for move in (*host_slices(text, unknown_trips), *host_copies(text, unknown_trips)):
        if move.direction in total:
            total[move.direction] += move.num_bytes * move.times
    return total


def _known(times: int | None, frame: Frame, i: Instruction) -> int:
    if times is None:
        raise ValueError(
            f"{i.result} in {frame.computation.name} uses host memory in a loop whose trip count "
            "is unknown: give unknown_trips"
        )
    return times


def _direction(source_on_host: bool, target_on_host: bool) -> str:
    if source_on_host and target_on_host:
        return "host_to_host"
    return "to_device" if source_on_host else "to_host"


def _host_slice(frame: Frame, i: Instruction, times: int | None) -> HostSlice:
    stack = frame.arrays(i.operands[0])[0]
    result = parse_arrays(i.shape)[0]
    is_write = i.op == "dynamic-update-slice"
    # Operands: the stack; for an update, the slice; then one start index per dim.
    if is_write:
        record = frame.arrays(i.operands[1])[0]
        direction = _direction(record.on_host, True)
        starts = [frame.value(o) for o in i.operands[2:]]
    else:
        record = result
        direction = _direction(True, record.on_host)
        starts = [frame.value(o) for o in i.operands[1:]]

    # If the slice is as long as the stack, the start can only be 0.
    sliced = [d for d in range(len(stack.dims)) if record.dims[d] < stack.dims[d]]
    address = _address(starts, sliced, record, stack)
    has_descriptor, descriptor = _descriptor(i.text)
    is_proven = (
        descriptor is not None and address is not None and _has_address(descriptor, address, frame)
    )
    return HostSlice(
        computation=frame.computation.name,
        op=i.op,
        direction=direction,
        num_bytes=record.num_bytes,
        times=_known(times, frame, i),
        index=_index_kind(frame, starts[sliced[0]] if sliced else np.asarray(0)),
        has_descriptor=has_descriptor,
        descriptor=descriptor,
        proven=is_proven,
        instruction=i.result,
    )


def _address(starts: list[Any], sliced: list[int], record: Array, stack: Array) -> Any:
    """Return the bytes from a stack's start to a slice, over the enclosing loops' iterations.

    None if the start in one of the dims `sliced` is unknown.
    """
    address = np.asarray(0)
    for d in sliced:
        if not isinstance(starts[d], np.ndarray):
            return None
        # Starts are clamped so that the slice stays inside.
        start = np.clip(starts[d], 0, stack.dims[d] - record.dims[d])
        address = address + start * stack.stride(d)
    return address


def _index_kind(frame: Frame, index: Any) -> str:
    if not isinstance(index, np.ndarray):
        return index if isinstance(index, str) else OTHER
    for loop in range(len(frame.trips)):
        # The counter of a loop with one iteration is a constant, and is reported as one.
        counter = frame.iterations(loop)
        if counter is not None and counter.size > 1 and equal(index, counter):
            return "raw"
    return "constant" if np.all(index == index.flat[0]) else OTHER


def _has_address(descriptor: Descriptor, address: np.ndarray, frame: Frame) -> bool:
    """Return whether a descriptor gives an address in every iteration."""
    if not descriptor.byte_stride:
        # One address in all iterations, even if the trip count is unknown.
        return equal(np.asarray(descriptor.byte_offset), address)
    counter = frame.iterations(descriptor.loop_index)
    if counter is None:
        return False
    return equal(descriptor.byte_offset + descriptor.byte_stride * counter, address)


def _descriptor(text: str) -> tuple[bool, Descriptor | None]:
    """Return whether an instruction has a descriptor, and the descriptor if its form is known.

    It is `"dynamic_slice_config":{..}`. The numbers are strings, and jax 0.12 nests the numbers of
    a linear address one level deeper.
    """
    _, key, tail = text.partition('"dynamic_slice_config":')
    if not key:
        return False, None
    config, _ = json.JSONDecoder().raw_decode(tail)
    linear = config.pop("linear", None) or config
    fields = {"loop_index", "byte_offset", "byte_stride"}
    if config.keys() - fields or linear.keys() - fields:
        return True, None  # an address of unknown form
    numbers = {"loop_index": config.get("loop_index", 0), **linear}
    return True, Descriptor(*(int(numbers.get(f, 0)) for f in Descriptor._fields))


def _host_copy(frame: Frame, i: Instruction, times: int | None) -> HostCopy | None:
    sources = [frame.arrays(o)[0] for o in i.operands if frame.arrays(o)]
    results = parse_arrays(i.shape)
    if i.op == "copy-start":
        results = results[:1]  # of (result, operand, context)
    if i.op in _SLICES and sources and sources[0].on_host:
        return None  # listed by `host_slices`
    host_sources = [a for a in sources if a.on_host]
    host_results = [a for a in results if a.on_host]
    if not host_sources and not host_results:
        return None
    # A kernel that works on host memory reads its operands over the link. A copy or a slice moves
    # only its result.
    reads_operands = i.op not in ("copy", "copy-start", "slice") and host_sources
    moved = host_sources if reads_operands else results
    return HostCopy(
        computation=frame.computation.name,
        op=i.op,
        direction=_direction(bool(host_sources), bool(host_results)),
        num_bytes=sum(a.num_bytes for a in moved),
        times=_known(times, frame, i),
        instruction=i.result,
    )
