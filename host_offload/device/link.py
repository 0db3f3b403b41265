"""Bytes between a device buffer and host memory, inside a callback of a running program.

On a CPU a buffer is host memory, and is used in place. On a GPU a callback runs while the program
  is being queued: what it
reads must be computed first, so it copies on the program's own stream and waits for that stream;
what it writes is queued there too. The copies go through page-locked staging memory, allocated once
for each place, which is a name of the caller and its operand, on each device: callbacks of several
devices run at once.
"""

import ctypes
import math
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from host_offload.device.cuda_driver import driver


class Link(Protocol):
    """How a callback reads and writes device buffers.

    `place` tells the buffers of different callers apart.
    """

    def read(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Return a buffer's contents, valid until the callback returns or the same place is read
        again.
        """
        ...

    def room(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Return host memory in which the caller puts the new contents of a buffer."""
        ...

    def write(self, context: Any, buffer: Any, place: Hashable) -> None:
        """Copy the contents of `room(context, buffer, place)` to the buffer."""
        ...

    def allocate(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return zeros in memory that copies beside a program reach."""
        ...

    def free(self, arrays: Iterable[np.ndarray]) -> None:
        """Give up memory from `allocate`, before its last reference goes."""
        ...


class HostLink:
    """Buffers of the CPU backend."""

    def read(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        del context, place
        # A view. np.array, which would copy, fails on the buffer of a callback.
        return np.asarray(buffer)

    def room(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        del context, place
        return np.asarray(buffer)

    def write(self, context: Any, buffer: Any, place: Hashable) -> None:
        del context, buffer, place

    def allocate(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def free(self, arrays: Iterable[np.ndarray]) -> None:
        del arrays


class CudaLink:
    """Buffers of a CUDA GPU, moved by the driver."""

    def __init__(self) -> None:
        self.staging: dict[Hashable, np.ndarray] = {}
        self._lock = threading.Lock()  # of the staging: devices call back at once

    def read(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        host, call = self.room(context, buffer, place), driver()
        call.copy(host.ctypes.data, pointer(buffer), host.nbytes, stream_of(context))
        # The callback runs while the program is being queued: the values exist once the stream has
        # come this far.
        call.finish_stream(stream_of(context))
        return host

    def room(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        dtype = np.dtype(buffer.dtype)
        key = (
            place,
            stream_of(context),
            tuple(buffer.shape),
            str(dtype),
        )  # a device's stream: devices have a room each
        with self._lock:
            if key not in self.staging:
                array = np.empty(buffer.shape, dtype)
                if array.nbytes:
                    # Page-locked, because the driver stages a copy of pageable memory and blocks
                    # its caller.
                    driver().register(array)
                self.staging[key] = array
            return self.staging[key]

    def write(self, context: Any, buffer: Any, place: Hashable) -> None:
        host, call = self.room(context, buffer, place), driver()
        call.copy(pointer(buffer), host.ctypes.data, host.nbytes, stream_of(context))
        call.finish_stream(stream_of(context))  # the staging memory is used again

    def allocate(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        array = np.zeros(shape, dtype)
        if array.nbytes:
            driver().register(array)
        return array

    def free(self, arrays: Iterable[np.ndarray]) -> None:
        for array in arrays:
            if array.nbytes:
                driver().unregister(array)


def stream_of(context: Any) -> int:
    """Return the program's stream on a GPU, to which a callback may add."""
    return int(context.stream)


def pointer(buffer: Any) -> int:
    """Return the device address of a callback's buffer on a GPU."""
    return int(buffer.__cuda_array_interface__["data"][0])


def pointers(buffers: Sequence[Any]) -> list[int]:
    """Return `pointer` of each buffer, in one call: a record may have many leaves."""
    return [buffer.__cuda_array_interface__["data"][0] for buffer in buffers]


def link_of(platform: str) -> Link:
    """Return the link to the devices of a platform.

    Raises:
      NotImplementedError: a platform whose buffers have no known interface.
    """
    if platform == "cpu":
        return HostLink()
    if platform in ("gpu", "cuda"):
        return CudaLink()
    raise NotImplementedError(
        f"an update on the host moves buffers of cpu and cuda devices, and these are {platform}'s"
    )


def writable(array: np.ndarray) -> np.ndarray:
    """Return a writable array over the same memory."""
    return _at(array.ctypes.data, array.shape, array.dtype)


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * num_bytes).from_address(address)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def view(array: Any) -> np.ndarray:
    """Return the memory of a single-device array in host memory, as numpy; writing to it changes
    the array.

    For arrays that one program owns and passes from step to step: nothing else may refer to them.
    """
    # np.asarray would return a read-only array, and is slow where the array belongs to a GPU
    # client.
    return _at(array.unsafe_buffer_pointer(), array.shape, array.dtype)
