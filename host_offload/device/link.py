"""Copies between a device buffer and host memory, inside a callback of a running program.

On a CPU a buffer is host memory, and is used in place. On a GPU a callback runs while the program
is being queued, and the values that it reads must be computed first. So it copies on the program's
own stream and waits for that stream; its writes are queued there too. The copies use page-locked
staging memory, allocated once per place and device, because callbacks of several devices run
concurrently. A place is any key that identifies the caller and its operand.
"""

import ctypes
import math
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from host_offload.device.cuda_driver import driver


class Link(Protocol):
    """Reads and writes device buffers in callbacks.

    In all methods, `place` is a key that distinguishes the buffers of different callers.
    """

    def read(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Return a buffer's contents; valid until the callback returns or reads the place again."""
        ...

    def room(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Return host memory into which the caller writes the new contents of a buffer."""
        ...

    def write(self, context: Any, buffer: Any, place: Hashable) -> None:
        """Copy the contents of `room(context, buffer, place)` to the buffer."""
        ...

    def allocate(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return zeros in host memory from which copies can overlap with a program."""
        ...

    def free(self, arrays: Iterable[np.ndarray]) -> None:
        """Release memory from `allocate`, before its last reference is dropped."""
        ...


class HostLink:
    """Buffers of the CPU backend."""

    def read(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Return a view of a callback's buffer."""
        del context, place
        # A view. np.array, which would copy, fails on a callback's buffer.
        return np.asarray(buffer)

    def room(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Return a view of a callback's buffer."""
        del context, place
        return np.asarray(buffer)

    def write(self, context: Any, buffer: Any, place: Hashable) -> None:
        """Do nothing: `room` is the buffer itself."""
        del context, buffer, place

    def allocate(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return zeros in ordinary memory."""
        return np.zeros(shape, dtype)

    def free(self, arrays: Iterable[np.ndarray]) -> None:
        """Do nothing: ordinary memory is freed with its last reference."""
        del arrays


class CudaLink:
    """Buffers of a CUDA GPU, copied by the driver.

    Attributes:
      staging: page-locked host memory by place, stream, shape and dtype.
    """

    def __init__(self) -> None:
        """Create a link without staging memory."""
        self.staging: dict[Hashable, np.ndarray] = {}
        self._lock = threading.Lock()  # of `staging`: devices call back concurrently

    def read(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Copy a buffer to its staging memory, wait for the program's stream, and return it."""
        host = self.room(context, buffer, place)
        call = driver()
        call.copy(host.ctypes.data, pointer(buffer), host.nbytes, find_stream(context))
        # The callback runs while the program is being queued: the values exist only once the stream
        # has reached this point.
        call.finish_stream(find_stream(context))
        return host

    def room(self, context: Any, buffer: Any, place: Hashable) -> np.ndarray:
        """Return a buffer's page-locked staging memory, allocated at the first call."""
        dtype = np.dtype(buffer.dtype)
        # The stream identifies the device: each device has its own staging memory.
        key = (place, find_stream(context), tuple(buffer.shape), str(dtype))
        with self._lock:
            if key not in self.staging:
                array = np.empty(buffer.shape, dtype)
                if array.nbytes:
                    # Page-locked, because the driver stages copies of pageable memory and blocks
                    # the caller.
                    driver().register(array)
                self.staging[key] = array
            return self.staging[key]

    def write(self, context: Any, buffer: Any, place: Hashable) -> None:
        """Copy the staging memory to its buffer, and wait for the program's stream."""
        host = self.room(context, buffer, place)
        call = driver()
        call.copy(pointer(buffer), host.ctypes.data, host.nbytes, find_stream(context))
        call.finish_stream(find_stream(context))  # the staging memory will be reused

    def allocate(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return zeros in page-locked memory."""
        array = np.zeros(shape, dtype)
        if array.nbytes:
            driver().register(array)
        return array

    def free(self, arrays: Iterable[np.ndarray]) -> None:
        """Unregister page-locked memory from `allocate`."""
        for array in arrays:
            if array.nbytes:
                driver().unregister(array)


def find_stream(context: Any) -> int:
    """Return the program's stream on a GPU, to which a callback may add work."""
    return int(context.stream)


def pointer(buffer: Any) -> int:
    """Return the device address of a callback's buffer on a GPU."""
    return int(buffer.__cuda_array_interface__["data"][0])


def pointers(buffers: Sequence[Any]) -> list[int]:
    """Return the device address of each of a callback's buffers on a GPU.

    One call for all leaves of a record, which may be many.
    """
    return [buffer.__cuda_array_interface__["data"][0] for buffer in buffers]


def find_link(platform: str) -> Link:
    """Return the link to the devices of a platform.

    Args:
      platform: platform of the devices: "cpu", "gpu" or "cuda".

    Raises:
      NotImplementedError: the buffers of the platform have no known interface.
    """
    if platform == "cpu":
        return HostLink()
    if platform in ("gpu", "cuda"):
        return CudaLink()
    raise NotImplementedError(
        f"a host update moves buffers of cpu and cuda devices, and these are {platform}'s"
    )


def writable(array: np.ndarray) -> np.ndarray:
    """Return a writable view of an array's memory, even if the array is read-only."""
    return _at(array.ctypes.data, array.shape, array.dtype)


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * num_bytes).from_address(address)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def view(array: Any) -> np.ndarray:
    """Return a writable numpy view of a single-device jax.Array in host memory.

    Writing to the view changes the array. Use this only for arrays that one program owns and passes
    from step to step; nothing else may refer to them.
    """
    # np.asarray would return a read-only array, and is slow if the array belongs to a GPU client.
    return _at(array.unsafe_buffer_pointer(), array.shape, array.dtype)
