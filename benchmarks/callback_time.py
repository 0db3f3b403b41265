"""Time the nvme tier's GPU callbacks without a GPU, with a driver and a disk that do nothing.

What remains is a callback's work in Python: find the record and its buffer, call the driver, and
wake the thread that does the rest. The GPU gets no new work while a callback runs. The time of the
copies alone (the request and the driver's calls) is reported next to the total. The threads that a
callback wakes run at the same time, so both figures include their share of the interpreter. A
driver call is one of:

    python     a Python function that does nothing and keeps the interpreter lock
    c          a C function that does nothing, called by ctypes, which releases the lock: another
               thread may take the interpreter during each call, as with the real driver

The package cuda-bindings adds 1 to 3 us per call, which neither figure includes. The table shows
the least and the median of several runs' medians.

    python benchmarks/callback_time.py [runs]
"""

import ctypes
import enum
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np

from host_offload.calls import CallbackSite, CallLog
from host_offload.device import Driver, GpuCopies
from host_offload.disk import LeafFormat, RecordFormat, Store
from host_offload.engine import Engine, Swap
from host_offload.schedule import Move

LAYERS, DISTANCE, ENDS = 32, 1, 6
ROUNDS = 9


class Nothing(ModuleType):
    """Fake of cuda.bindings.driver that counts its calls."""

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2))

    class CUresult(enum.IntEnum):
        """Result of every call."""

        CUDA_SUCCESS = 0

    def __init__(self, by_c: bool) -> None:
        """Make a driver whose calls do nothing, in C if `by_c`, else in Python."""
        super().__init__("cuda.bindings.driver")
        self.calls = 0
        self._function = ctypes.CDLL(None).labs if by_c else None

    def __getattr__(self, name: str) -> Any:
        """Return a function that counts its calls and reports success."""
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_: Any) -> Any:
            self.calls += 1
            if self._function is not None:
                self._function(1)
            return Nothing.CUresult.CUDA_SUCCESS, 77

        setattr(self, name, call)  # later look-ups skip __getattr__, as in the real package
        return call


class NoDisk:
    """Disk whose reads and writes do nothing and finish immediately."""

    def read(self, store: Store, layer: int, buffer: np.ndarray) -> "Future[float]":
        """Return a finished future."""
        del store, layer, buffer
        done: Future[float] = Future()
        done.set_result(0.0)
        return done

    write = read

    def close(self) -> None:
        """Do nothing."""
        pass


class Buffer:
    """A callback's buffer at a fake address."""

    def __init__(self, address: int, leaf: LeafFormat) -> None:
        """Make a buffer with a leaf's shape and dtype."""
        self.shape, self.dtype = leaf.shape, np.dtype(leaf.dtype)
        self.__cuda_array_interface__ = {"data": (address, False)}


def measure(num_leaves: int, by_c: bool = False) -> dict[str, tuple[float, float, float]]:
    """Return the cost of fetch and store callbacks on records of `num_leaves` leaves.

    Each value is (microseconds per callback, microseconds of its copies, driver calls per
    callback); times are medians.
    """
    api = Nothing(by_c)
    driver = Driver(api)
    device = jax.devices("cpu")[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("fsdp",))
    leaf = LeafFormat("w", (64, 64), "float32")
    form, one = RecordFormat((leaf,) * num_leaves), RecordFormat((leaf,))
    swap = Swap(mesh)
    swap.calls.log = CallLog([device], driver)
    copies = swap.__dict__["copies"] = GpuCopies([device], driver)
    context = SimpleNamespace(stream=7)
    token = Buffer(1 << 20, LeafFormat("", (1,), "int32"))
    where = Buffer(1 << 20, LeafFormat("", (3,), "int32"))
    # XLA gives each value a buffer of its own.
    outs = [Buffer((2 + i) << 20, leaf) for i in range(num_leaves)]
    moves = [Move("params", layer) for layer in range(LAYERS)]
    moves += [
        move
        for layer in range(LAYERS)
        for move in (Move("opt_state", layer), Move("opt_state", layer, True))
    ]
    moves += [
        move for i in range(ENDS) for move in (Move(f"params.{i}", 0), Move(f"params.{i}", 0, True))
    ]
    sites = {name: CallbackSite(swap.calls, name) for name in ("fetch", "store", "one")}
    for name in ("fetch", "store"):
        sites[name].order = list(range(LAYERS))
    sites["params"] = CallbackSite(swap.calls, "fetch params")
    sites["params"].order = list(range(LAYERS))
    spent = [0.0]

    def apart(call: Any) -> Any:
        """Return a function that adds the time of its calls to `spent`."""

        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            spent[0] += time.perf_counter() - start
            return result

        return run

    copies.load, copies.save = apart(copies.load), apart(copies.save)
    for site in sites.values():
        site.ask = apart(site.ask)
    of_copies: dict[str, list[float]] = {"fetch": [], "store": []}
    times: dict[str, list[float]] = {"fetch": [], "store": []}
    counts: dict[str, int] = dict.fromkeys(times, 0)
    with tempfile.TemporaryDirectory() as folder:
        engine = swap.engine = Engine(NoDisk(), DISTANCE, pin="none", copies=copies)
        for kind in ("params", "opt_state"):
            engine.add(kind, 0, Store(folder, kind, 0, LAYERS, form))
        for i in range(ENDS):
            engine.add(
                f"params.{i}", 0, Store(folder, f"params.{i}", 0, 1, one), up=False, down=False
            )

        def timed(name: str, call: Any) -> None:
            spent[0], before, start = 0.0, api.calls, time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
            of_copies[name].append(spent[0])
            counts[name] += api.calls - before

        for _ in range(ROUNDS):
            swap.calls.begin()
            engine.begin(moves)
            for _ in range(LAYERS):
                swap.on_fetch(context, outs, where, token, kind="params", site=sites["params"])
            for _ in range(LAYERS):
                time.sleep(1e-4)  # lets the woken threads finish
                timed(
                    "fetch",
                    lambda: swap.on_fetch(
                        context, outs, where, token, kind="opt_state", site=sites["fetch"]
                    ),
                )
                time.sleep(1e-4)

                def store():
                    return swap.on_store(
                        context, token, where, token, *outs, kind="opt_state", site=sites["store"]
                    )

                timed("store", store)
            for i in range(ENDS):
                for name in ("fetch", "store"):
                    site = CallbackSite(swap.calls, name)
                    site.order = [0]
                    if name == "fetch":
                        swap.on_fetch(
                            context, outs[:1], where, token, kind=f"params.{i}", site=site
                        )
                    else:
                        swap.on_store(
                            context, token, where, token, outs[0], kind=f"params.{i}", site=site
                        )
        engine.check()
        engine.close()
    return {
        name: (
            1e6 * statistics.median(times[name]),
            1e6 * statistics.median(of_copies[name]),
            counts[name] / len(times[name]),
        )
        for name in times
    }


def main() -> None:
    """Print a table."""
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for num_leaves in (1, 9, 27):
        for by_c in (False, True):
            runs = [measure(num_leaves, by_c) for _ in range(num_runs)]
            for name in ("fetch", "store"):
                wholes, copies, calls = zip(*(run[name] for run in runs), strict=True)
                print(
                    f"{num_leaves:3d} leaves, {name}, driver in {'c     ' if by_c else 'python'}: "
                    f"least {min(wholes):6.1f} us, "
                    f"median {statistics.median(wholes):6.1f} us, "
                    f"copies alone {statistics.median(copies):6.1f} us, "
                    f"{calls[0]:.0f} calls of the driver"
                )


if __name__ == "__main__":
    main()
