"""A stand-in for the module cuda.bindings.driver on machines without a GPU.

Streams run late, each in a thread of its own. Addresses are addresses in host memory. A copy reads
its source when it runs, not when it is queued, so a copy that is neither ordered by events nor
waited for moves the wrong bytes. Stream 0 stands for a program outside the queues: its calls run
immediately.
"""

import ctypes
import queue
import random
import threading
import time
import types

CONTEXT = 77  # of the first GPU; the other GPUs' follow


class Failure(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


class _Enum:
    value = 1


class SimulatedCuda(types.ModuleType):
    CU_MEMHOSTREGISTER_PORTABLE = 1

    class CUresult:
        CUDA_SUCCESS = 0

    class CUstream_flags:  # noqa: N801
        CU_STREAM_NON_BLOCKING = _Enum

    class CUevent_flags:  # noqa: N801
        CU_EVENT_DISABLE_TIMING = _Enum

    def __init__(self, most_registered=1000, delay=0.0):
        """Refuse to register more than `most_registered` buffers.

        Operations of streams take up to `delay` seconds each.
        """
        super().__init__("cuda.bindings.driver")
        self.registered, self.most_registered, self.delay = {}, most_registered, delay
        self.events, self.streams = (
            {},
            {},
        )  # event -> what its last record waits for; stream -> its queue
        self.copies = []  # (stream, source, bytes) of every copy
        self.fail_copies = False
        self.late = {}  # stream -> seconds per copy, instead of `delay`
        self.finished = []  # streams that a caller waited for directly, not through an event
        self.waits = []  # threads that waited for a stream or an event
        self.contexts = {}  # context of each stream
        self._context, self._next, self._lock = threading.local(), 100, threading.Lock()

    def _number(self):
        with self._lock:
            self._next += 1
            return self._next

    def cuInit(self, flags):  # noqa: N802
        return (0,)

    def cuCtxGetCurrent(self):  # noqa: N802
        return 0, getattr(self._context, "current", 0)

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return 0, CONTEXT + device

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self._context.current = context
        return (0,)

    def cuMemHostRegister(self, address, num_bytes, flags):  # noqa: N802
        assert self._context.current >= CONTEXT
        assert flags == 1
        if len(self.registered) == self.most_registered:
            return (Failure(2),)
        self.registered[address] = num_bytes
        return (0,)

    def cuMemHostUnregister(self, address):  # noqa: N802
        return (0,) if self.registered.pop(address, None) else (Failure(713),)

    def cuStreamCreate(self, flags):  # noqa: N802
        assert self._context.current >= CONTEXT
        number, todo = self._number(), queue.SimpleQueue()
        self.streams[number], self.contexts[number] = todo, self._context.current

        def run():
            while (call := todo.get()) is not None:
                call()

        threading.Thread(target=run, daemon=True).start()
        return 0, number

    def cuStreamGetCtx(self, stream):  # noqa: N802
        return 0, self.contexts[stream]

    def cuStreamDestroy(self, stream):  # noqa: N802
        self.streams.pop(stream).put(None)
        return (0,)

    def cuEventCreate(self, flags):  # noqa: N802
        assert self._context.current >= CONTEXT
        number = self._number()
        self.events[number] = None
        return 0, number

    def cuEventDestroy(self, event):  # noqa: N802
        del self.events[event]
        return (0,)

    def _queue(self, stream, call):
        assert self._context.current >= CONTEXT, "called from a thread without the context"
        if stream == 0:
            call()
        else:
            self.streams[stream].put(call)
        return (0,)

    def cuEventRecord(self, event, stream):  # noqa: N802
        happened = threading.Event()
        self.events[event] = happened
        return self._queue(stream, happened.set)

    def cuStreamWaitEvent(self, stream, event, flags):  # noqa: N802
        happened = self.events[event]
        return self._queue(stream, happened.wait) if happened is not None else (0,)

    def cuEventSynchronize(self, event):  # noqa: N802
        assert self._context.current >= CONTEXT
        self.waits.append(threading.get_ident())
        if (happened := self.events[event]) is not None:
            happened.wait()
        return (0,)

    def cuStreamSynchronize(self, stream):  # noqa: N802
        self.finished.append(stream)
        self.waits.append(threading.get_ident())
        done = threading.Event()
        self._queue(stream, done.set)
        done.wait()
        return (0,)

    def _late(self, stream, call):
        def run():
            if stream in self.late:
                time.sleep(self.late[stream])
            elif stream and self.delay:
                time.sleep(random.random() * self.delay)
            call()

        return self._queue(stream, run)

    def cuMemcpyAsync(self, target, source, num_bytes, stream):  # noqa: N802
        if self.fail_copies:
            return (Failure(700),)
        self.copies.append((stream, source, num_bytes))
        return self._late(stream, lambda: ctypes.memmove(target, source, num_bytes))

    def cuMemsetD8Async(self, target, value, num_bytes, stream):  # noqa: N802
        return self._late(stream, lambda: ctypes.memset(target, value, num_bytes))
