"""The CUDA driver, as far as copies beside a running program need it: streams, events, copies,
page-locked memory.

A thin layer over the package cuda-bindings. Streams, events and addresses are plain integers, and a
call that fails raises.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

Part = tuple[int, int]
"""Address and bytes of a leaf of a record."""


class Driver:
    """The calls of one process.

    Copies, fills and waits are queued on a stream and return at once.
    """

    def __init__(self, api: Any) -> None:
        """Use the module `api`: cuda.bindings.driver, or one with the same functions."""
        self._api, self._success = api, api.CUresult.CUDA_SUCCESS
        self._call("cuInit", 0)

    def context_of(self, ordinal: int) -> int:
        """Return the primary context of a GPU, which is the one that XLA uses."""
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
        # A buffer of a closed ring is unregistered by whoever returns it, such as an I/O thread,
        # which has no context.
        if not int(self._call("cuCtxGetCurrent")):
            self.use(self.context_of(0))

    # --- memory -----------------------------------------------------------------------------------

    def register(self, buffer: np.ndarray) -> None:
        """Page-lock host memory for every context of the process: copies of it can then overlap the
        program.
        """
        self.ensure_context()
        self._call(
            "cuMemHostRegister",
            buffer.ctypes.data,
            buffer.nbytes,
            self._api.CU_MEMHOSTREGISTER_PORTABLE,
        )

    def unregister(self, buffer: np.ndarray) -> None:
        """Undo `register`; copies of the memory must be done."""
        self.ensure_context()
        self._call("cuMemHostUnregister", buffer.ctypes.data)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy between any two of host and device; host memory must be registered."""
        if (
            num_bytes
            and (status := self._api.cuMemcpyAsync(target, source, num_bytes, stream)[0])
            != self._success
        ):
            self._refuse("cuMemcpyAsync", status)

    # A callback makes one of these two calls for all leaves of a record: nothing is looked up
    # inside of the loops.

    def copy_out(self, parts: Sequence[Part], targets: Sequence[int], stream: int) -> None:
        """Copy each part of a record to a buffer of its own."""
        copy, success = self._api.cuMemcpyAsync, self._success
        for (address, num_bytes), target in zip(parts, targets, strict=True):
            if num_bytes and (status := copy(target, address, num_bytes, stream)[0]) != success:
                self._refuse("cuMemcpyAsync", status)

    def copy_in(self, parts: Sequence[Part], sources: Sequence[int], stream: int) -> None:
        """Copy buffers, one each, to the parts of a record."""
        copy, success = self._api.cuMemcpyAsync, self._success
        for (address, num_bytes), source in zip(parts, sources, strict=True):
            if num_bytes and (status := copy(address, source, num_bytes, stream)[0]) != success:
                self._refuse("cuMemcpyAsync", status)

    def clear(self, target: int, num_bytes: int, stream: int) -> None:
        """Fill device memory with zeros."""
        if num_bytes:
            self._call("cuMemsetD8Async", target, 0, num_bytes, stream)

    # --- order ------------------------------------------------------------------------------------
    # What every callback calls is written out: a call by its name takes as long again.

    def make_stream(self) -> int:
        """Return a stream of the current context that does not wait for the default one."""
        return int(
            self._call("cuStreamCreate", self._api.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        )

    def make_event(self) -> int:
        """Return an event of the current context."""
        # Events only order here, and without time stamps they are cheaper.
        return int(
            self._call("cuEventCreate", self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        )

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that was queued on a stream so far."""
        if (status := self._api.cuEventRecord(event, stream)[0]) != self._success:
            self._refuse("cuEventRecord", status)

    def wait(self, stream: int, event: int) -> None:
        """Let what is queued on a stream from now on wait for an event as it was last recorded."""
        if (status := self._api.cuStreamWaitEvent(stream, event, 0)[0]) != self._success:
            self._refuse("cuStreamWaitEvent", status)

    def finish_event(self, event: int) -> None:
        """Wait until an event has happened."""
        self._call("cuEventSynchronize", event)

    def finish_stream(self, stream: int) -> None:
        """Wait until all that was queued on a stream is done."""
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def destroy_event(self, event: int) -> None:
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
    """Return the driver of this machine.

    Raises:
      NotImplementedError: the package cuda-bindings is missing.
      RuntimeError: there is no driver, or it refuses.
    """
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NotImplementedError(
            "host memory and files beside a GPU need the package cuda-bindings to speak with the driver: "
            "pip install 'zerojax[cuda]', or pip install cuda-bindings"
        ) from error
    return Driver(api)
