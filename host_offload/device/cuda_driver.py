"""The part of the CUDA driver needed for copies that overlap with a running program.

It covers streams, events, copies and page-locked memory, as a thin layer over the package
cuda-bindings. Streams, events and addresses are plain integers. A call that fails raises
RuntimeError.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

MemorySpan = tuple[int, int]
"""(address, bytes) of a leaf of a record."""


class Driver:
    """The driver calls of one process.

    Copies, fills and waits are queued on a stream and return immediately.
    """

    def __init__(self, api: Any) -> None:
        """Initialize the driver.

        Args:
          api: module cuda.bindings.driver, or a module with the same functions.
        """
        self._api = api
        self._success = api.CUresult.CUDA_SUCCESS
        self._call("cuInit", 0)

    def retain_context(self, ordinal: int) -> int:
        """Return the primary context of a GPU, which XLA uses too."""
        return int(self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal)))

    def context_of_stream(self, stream: int) -> int:
        """Return the context of a stream."""
        return int(self._call("cuStreamGetCtx", stream))

    def use(self, context: int) -> None:
        """Make a context current in the calling thread."""
        if (status := self._api.cuCtxSetCurrent(context)[0]) != self._success:
            self._refuse("cuCtxSetCurrent", status)

    def ensure_context(self) -> None:
        """Make the primary context of GPU 0 current, unless the calling thread has a context."""
        # A buffer of a closed ring is unregistered by the thread that returns it. That may be an
        # I/O thread, which has no context.
        if not int(self._call("cuCtxGetCurrent")):
            self.use(self.retain_context(0))

    # --- memory -----------------------------------------------------------------------------------

    def register(self, buffer: np.ndarray) -> None:
        """Page-lock host memory for every context, so its copies can overlap with a program."""
        self.ensure_context()
        flag = self._api.CU_MEMHOSTREGISTER_PORTABLE
        self._call("cuMemHostRegister", buffer.ctypes.data, buffer.nbytes, flag)

    def unregister(self, buffer: np.ndarray) -> None:
        """Undo `register`; all copies of the memory must have ended."""
        self.ensure_context()
        self._call("cuMemHostUnregister", buffer.ctypes.data)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between host and device memory, or within either.

        Args:
          target: address of the destination.
          source: address of the source.
          num_bytes: bytes to copy.
          stream: stream on which the copy is queued. Host memory should be registered, or the copy
            blocks the caller.
        """
        if not num_bytes:
            return
        status = self._api.cuMemcpyAsync(target, source, num_bytes, stream)[0]
        if status != self._success:
            self._refuse("cuMemcpyAsync", status)

    # A callback makes one of these two calls for all leaves of a record, so nothing is looked up
    # inside of the loops.

    def copy_out(self, leaves: Sequence[MemorySpan], targets: Sequence[int], stream: int) -> None:
        """Queue copies of each leaf of a record to its own buffer, on one stream."""
        copy = self._api.cuMemcpyAsync
        success = self._success
        for (address, num_bytes), target in zip(leaves, targets, strict=True):
            if num_bytes and (status := copy(target, address, num_bytes, stream)[0]) != success:
                self._refuse("cuMemcpyAsync", status)

    def copy_in(self, leaves: Sequence[MemorySpan], sources: Sequence[int], stream: int) -> None:
        """Queue copies of one buffer to each leaf of a record, on one stream."""
        copy = self._api.cuMemcpyAsync
        success = self._success
        for (address, num_bytes), source in zip(leaves, sources, strict=True):
            if num_bytes and (status := copy(address, source, num_bytes, stream)[0]) != success:
                self._refuse("cuMemcpyAsync", status)

    def clear(self, target: int, num_bytes: int, stream: int) -> None:
        """Queue a fill of device memory with zeros."""
        if num_bytes:
            self._call("cuMemsetD8Async", target, 0, num_bytes, stream)

    # --- order ------------------------------------------------------------------------------------
    # The calls that every callback makes are written out: `_call` would double their time.

    def make_stream(self) -> int:
        """Return a new stream of the current context that does not wait for the default stream."""
        flag = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuStreamCreate", flag.value))

    def make_event(self) -> int:
        """Return a new event of the current context."""
        # The events are only used for ordering, and are cheaper without time stamps.
        flag = self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return int(self._call("cuEventCreate", flag.value))

    def record(self, event: int, stream: int) -> None:
        """Record an event: it happens when all work queued on a stream so far is done."""
        if (status := self._api.cuEventRecord(event, stream)[0]) != self._success:
            self._refuse("cuEventRecord", status)

    def wait(self, stream: int, event: int) -> None:
        """Make work queued on a stream from now on wait for an event, as it was last recorded."""
        if (status := self._api.cuStreamWaitEvent(stream, event, 0)[0]) != self._success:
            self._refuse("cuStreamWaitEvent", status)

    def finish_event(self, event: int) -> None:
        """Wait until an event has happened."""
        self._call("cuEventSynchronize", event)

    def finish_stream(self, stream: int) -> None:
        """Wait until all work queued on a stream is done."""
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream."""
        self._call("cuStreamDestroy", stream)

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy", event)

    def _call(self, name: str, *args: Any) -> Any:
        result = getattr(self._api, name)(*args)
        if result[0] != self._success:
            self._refuse(name, result[0])
        return result[1] if len(result) > 1 else None

    def _refuse(self, name: str, status: Any) -> NoReturn:
        raise RuntimeError(f"{name} failed with {status.name} ({int(status)})")


@functools.cache
def driver() -> Driver:
    """Return the driver of this machine, the same object on every call.

    Raises:
      NotImplementedError: the package cuda-bindings is missing.
      RuntimeError: the driver is missing, or cannot be initialized.
    """
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NotImplementedError(
            "host memory and files next to a GPU need the package cuda-bindings to call the "
            "driver: pip install 'zerojax[cuda]', or pip install cuda-bindings"
        ) from error
    return Driver(api)
