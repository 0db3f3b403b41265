import ctypes
import gc
import logging
import mmap
import pathlib
import re
import resource
import sys
import threading
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cuda import SimulatedCuda

from host_offload.device import buffers, cuda_driver
from host_offload.device.buffers import HUGE_BYTES, Ring, allocate, lock_pages
from host_offload.device.cuda_driver import Driver

MIB = 1 << 20


def mapping_of(buffer):
    """Return the lines of /proc about the mapping that holds a buffer."""
    entries = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )",
        pathlib.Path("/proc/self/smaps").read_text(),
        flags=re.MULTILINE,
    )
    for entry in entries[1:]:
        start, end = (int(x, 16) for x in entry.split()[0].split("-"))
        if start <= buffer.ctypes.data < end:
            return entry
    raise AssertionError("the buffer is not mapped")


def resident_kib(buffer):
    return int(re.search(r"^Rss:\s+(\d+) kB", mapping_of(buffer), re.MULTILINE).group(1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5 * MIB))
def test_memory_is_aligned_zero_private_and_of_the_size(num_bytes):
    buffer = allocate(num_bytes)
    assert buffer.shape == (num_bytes,)
    assert buffer.dtype == np.uint8
    assert buffer.ctypes.data % HUGE_BYTES == 0
    assert buffer.flags.writeable
    assert not buffer.any()
    buffer[-1] = 1  # the last byte exists


def test_memory_is_private_touched_and_advised_to_huge_pages():
    buffer = allocate(8 * MIB)
    entry = mapping_of(buffer)
    assert entry.split()[1] == "rw-p"
    assert resident_kib(buffer) >= 8 << 10
    if "[never]" not in pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert re.search(r"^VmFlags:.*\bhg\b", entry, re.MULTILINE)


def test_memory_of_no_bytes_is_refused():
    with pytest.raises(ValueError, match="num_bytes=0"):
        allocate(0)


def test_memory_that_the_machine_lacks_is_an_error_with_the_bytes():
    with pytest.raises(MemoryError, match=str(1 << 60)):
        allocate(1 << 60)


def test_a_kernel_without_huge_pages_serves(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *arguments):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    assert allocate(MIB).nbytes == MIB


def test_locked_pages_are_counted_by_the_kernel():
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    buffer = allocate(64 << 10)
    if not lock_pages(buffer):
        pytest.skip(f"RLIMIT_MEMLOCK is only {soft} bytes")
    assert re.search(r"^VmFlags:.*\blo\b", mapping_of(buffer), re.MULTILINE)


def test_a_refused_lock_is_logged_once_with_the_limit_and_the_remedy(monkeypatch, caplog):
    def refuse(address, num_bytes):
        ctypes.set_errno(12)
        return -1

    monkeypatch.setattr(buffers, "_libc", lambda: types.SimpleNamespace(mlock=refuse))
    monkeypatch.setattr(buffers, "_warned", threading.Event())
    with caplog.at_level(logging.WARNING, "host_offload"), Ring(3, 4096) as ring:
        assert not ring.locked
        assert not lock_pages(ring.take())
    [record] = caplog.records
    assert "Cannot allocate memory" in record.getMessage()
    assert re.search(r"RLIMIT_MEMLOCK is (\d+ bytes|unlimited).*ulimit -l", record.getMessage())


def test_a_platform_without_mlock_is_no_error(monkeypatch):
    monkeypatch.setattr(buffers, "_libc", lambda: types.SimpleNamespace())
    monkeypatch.setattr(buffers, "_warned", threading.Event())
    assert lock_pages(allocate(4096)) is False


# --- rings ----------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.lists(st.one_of(st.just("take"), st.integers(0, 3)), max_size=30))
def test_a_ring_never_hands_out_a_buffer_twice(num_buffers, actions):
    with Ring(num_buffers, 4096, pin="none") as ring:
        out = []
        for action in actions:
            if action == "take":
                if len(out) == num_buffers:
                    with pytest.raises(
                        TimeoutError, match=f"all {num_buffers} of 4096 bytes are out"
                    ):
                        ring.take(timeout=0)
                    continue
                out.append(ring.take(timeout=0))
            elif action < len(out):
                ring.give(out.pop(action))
            assert ring.free == num_buffers - len(out)
            assert len({b.ctypes.data for b in out}) == len(out)
            assert all(b.nbytes == 4096 for b in out)


def test_a_buffer_given_twice_or_of_another_is_refused():
    with Ring(2, 4096, pin="none") as ring, Ring(1, 4096, pin="none") as other:
        buffer, foreign = ring.take(), other.take()
        ring.give(buffer)
        for wrong in (buffer, foreign, np.zeros(4096, np.uint8)):
            with pytest.raises(ValueError, match="given back already, or is not of this ring"):
                ring.give(wrong)
        assert ring.free == 2
        assert other.free == 0


def waiting(ring, monkeypatch):
    """Return an event that is set when a thread, holding the ring's lock, is about to wait."""
    event, wait_for = threading.Event(), ring._changed.wait_for

    def announce(*arguments):
        event.set()
        return wait_for(*arguments)

    monkeypatch.setattr(ring._changed, "wait_for", announce)
    return event


class Taker(threading.Thread):
    def __init__(self, ring):
        super().__init__()
        self.ring, self.got, self.error = ring, None, None
        self.start()

    def run(self):
        try:
            self.got = self.ring.take()
        except RuntimeError as error:
            self.error = error


def test_a_full_ring_waits_until_a_buffer_comes_back(monkeypatch):
    with Ring(1, 4096, pin="none") as ring:
        buffer = ring.take()
        event = waiting(ring, monkeypatch)
        taker = Taker(ring)
        assert event.wait(30)
        assert taker.got is None
        ring.give(buffer)
        taker.join(30)
        assert taker.got is buffer
        assert ring.seconds_waited > 0


def test_a_wait_ends_after_its_time():
    with Ring(1, 4096, pin="none") as ring:
        ring.take()
        with pytest.raises(
            TimeoutError, match=r"within 0\.02 s: all 1 of 4096 bytes are out; .*larger"
        ):
            ring.take(timeout=0.02)
        assert ring.seconds_waited >= 0.02


def test_closing_wakes_who_waits_with_an_error(monkeypatch):
    ring = Ring(1, 4096, pin="none")
    held = ring.take()
    event = waiting(ring, monkeypatch)
    taker = Taker(ring)
    assert event.wait(30)
    ring.close()
    taker.join(30)
    assert "closed" in str(taker.error)
    held[:] = 1  # still its holder's
    ring.give(held)
    ring.close()
    with pytest.raises(RuntimeError, match="closed"):
        ring.take()


def test_many_threads_share_a_ring():
    with Ring(3, 4096, pin="none") as ring:
        errors = []

        def work(mark):
            for _ in range(100):
                buffer = ring.take(timeout=30)
                buffer[:] = mark
                if not (buffer == mark).all():
                    errors.append(mark)
                ring.give(buffer)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert errors == []
        assert ring.free == 3


def test_closed_rings_leave_no_memory():
    def mapped():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    Ring(2, 16 * MIB, pin="none").close()
    gc.disable()  # the ring is freed without the garbage collector
    try:
        before = mapped()
        for _ in range(10):
            ring = Ring(2, 16 * MIB, pin="none")
            ring.give(ring.take())
            ring.close()
        assert mapped() - before < 16 * MIB
    finally:
        gc.enable()


@pytest.mark.parametrize("arguments", [(0, 4096, "none"), (1, 0, "none"), (1, 4096, "yes")])
def test_a_ring_of_wrong_arguments_is_refused(arguments):
    *sizes, pin = arguments
    with pytest.raises(ValueError, match=r"num_buffers=|num_bytes="):
        Ring(*sizes, pin=pin)


# --- the CUDA driver ------------------------------------------------------------------------------


def test_a_ring_registers_its_buffers_with_the_driver_and_lets_go_of_them(monkeypatch):
    driver = SimulatedCuda()
    monkeypatch.setattr(buffers, "driver", lambda: Driver(driver))
    ring = Ring(3, 5000, pin="cuda")
    assert ring.locked
    buffer = ring.take()
    assert driver.registered[buffer.ctypes.data] == 5000
    assert len(driver.registered) == 3
    ring.close()
    assert list(driver.registered) == [buffer.ctypes.data], (
        "a buffer that is out may have copies in flight"
    )
    ring.give(buffer)
    assert driver.registered == {}


def test_a_driver_that_refuses_leaves_nothing_registered(monkeypatch):
    driver = SimulatedCuda(most_registered=2)
    monkeypatch.setattr(buffers, "driver", lambda: Driver(driver))
    with pytest.raises(
        RuntimeError, match=r"cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    ):
        Ring(3, 4096, pin="cuda")
    assert driver.registered == {}


def test_a_missing_binding_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    cuda_driver.driver.cache_clear()
    with pytest.raises(NotImplementedError, match=r"pip install 'zerojax\[cuda\]'"):
        Ring(1, 4096, pin="cuda")
