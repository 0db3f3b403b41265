"""Copies between buffers and device slots on separate streams.

The driver is a stand-in whose streams run late.
"""

import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from simulated_cuda import SimulatedCuda

from host_offload.device.copies import HostCopies
from host_offload.device.cuda_driver import Driver
from host_offload.device.gpu_copies import GpuCopies, build_copies
from host_offload.disk.direct_io import DirectIo
from host_offload.disk.folder import SwapFolder
from host_offload.disk.record_format import LeafFormat, RecordFormat
from host_offload.disk.store import Store
from host_offload.disk.tuning import IoSettings
from host_offload.engine.engine import Engine
from host_offload.schedule.moves import Move

FORMAT = RecordFormat((LeafFormat("w", (40, 30), "float32"), LeafFormat("b", (7,), "bfloat16")))
PARTS = [(start, leaf.num_bytes) for start, leaf in zip(FORMAT.offsets, FORMAT.leaves, strict=True)]
LAYERS = 6


class Buffer:
    """A callback's buffer on a GPU."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.__cuda_array_interface__ = {"data": (array.ctypes.data, False)}


class Gpu:
    """A simulated GPU, and a program on it: one stream, and its callbacks' arguments."""

    def __init__(self, delay=0.002):
        self.cuda = SimulatedCuda(delay=delay)
        self.driver = Driver(self.cuda)
        self.copies = GpuCopies(jax.devices()[:2], self.driver)
        self.driver.ensure_context()
        self.stream = self.driver.make_stream()
        self.context = SimpleNamespace(stream=self.stream)

    @property
    def up(self):
        return self.copies._gpus[0].up

    @property
    def down(self):
        return self.copies._gpus[0].down

    def values(self, value=0.0):
        return [
            Buffer(np.full(leaf.shape, value, view.dtype))
            for leaf, view in zip(FORMAT.leaves, empty()[1], strict=True)
        ]

    def set(self, values, value):
        """Queue a write of `value` to the values on the program's stream, as XLA would."""

        def compute():
            time.sleep(0.001)
            for buffer in values:
                buffer.array[...] = value

        self.cuda._queue(self.stream, compute)

    def get(self, values):
        """Return the value that the program sees when its stream arrives here."""
        seen = []
        self.cuda._queue(
            self.stream, lambda: seen.extend(b.array.astype(np.float32) for b in values)
        )
        self.driver.finish_stream(self.stream)
        assert all((a == seen[0].flat[0]).all() for a in seen), (
            "the leaves belong to several records"
        )
        return float(seen[0].flat[0])


def empty():
    buffer = np.zeros(FORMAT.padded_bytes, np.uint8)
    return buffer, FORMAT.views(buffer)


def record(value):
    buffer, views = empty()
    for view in views:
        view[...] = value
    return buffer, views


@pytest.fixture
def gpu():
    gpu = Gpu()
    gpu.copies.add("params", 0, FORMAT.padded_bytes, PARTS, up=True, down=True)
    yield gpu
    gpu.copies.close()
    gpu.driver.destroy_stream(gpu.stream)
    assert gpu.cuda.streams == {}
    assert gpu.cuda.events == {}


def test_a_lifted_record_comes_from_its_slot_and_its_buffer_is_free(gpu, monkeypatch):
    lifted, woken = gpu.copies._gpus[0].lifted, []
    wake = lifted._wake
    monkeypatch.setattr(lifted, "_wake", lambda: (woken.append(True), wake()))
    for value in range(1, 8):
        buffer, views = record(value)
        gpu.copies.lift("params", 0, buffer)
        gpu.cuda.copies.clear()
        out = gpu.values()
        woken.clear()
        freed = gpu.copies.load(gpu.context, "params", 0, views, out)
        assert woken == []  # the caller that requests the future wakes the thread, not the callback
        assert [
            copy[:2] for copy in gpu.cuda.copies if copy[1] in {view.ctypes.data for view in views}
        ] == []
        assert {stream for stream, *_ in gpu.cuda.copies} == {gpu.stream}
        freed.result(10)
        buffer[...] = 255  # the disk reads the next record into it
        assert gpu.get(out) == value


def test_the_next_record_is_lifted_while_the_program_still_reads_the_slot(gpu):
    (first, views), (second, more), out = record(1), record(2), gpu.values()
    gpu.copies.lift("params", 0, first)
    gpu.cuda._queue(gpu.stream, lambda: time.sleep(0.05))  # the program is late
    gpu.copies.load(gpu.context, "params", 0, views, out)
    gpu.copies.lift("params", 0, second)
    assert gpu.get(out) == 1
    gpu.copies.load(gpu.context, "params", 0, more, out)
    assert gpu.get(out) == 2


def test_a_record_that_was_not_lifted_is_copied_all_the_same(gpu):
    (first, _), (second, views), out = record(1), record(2), gpu.values()
    gpu.copies.lift("params", 0, first)
    gpu.copies.lift("params", 0, second)  # the slot is taken
    gpu.copies.load(gpu.context, "params", 0, views, out).result(10)
    second[...] = 255
    assert gpu.get(out) == 2
    gpu.copies.load(gpu.context, "params", 0, FORMAT.views(first), out)
    assert gpu.get(out) == 1


def test_a_dropped_record_is_not_taken_for_the_next_one_in_its_buffer(gpu):
    buffer, views = record(1)
    gpu.copies.lift("params", 0, buffer)
    gpu.copies.drop("params", 0, buffer)
    for view in views:
        view[...] = 2
    out = gpu.values()
    gpu.copies.load(gpu.context, "params", 0, views, out)
    assert gpu.get(out) == 2


def test_a_dropped_buffer_is_read_no_more(gpu):
    gpu.cuda._queue(gpu.up, lambda: time.sleep(0.05))
    buffer, _ = record(1)
    gpu.copies.lift("params", 0, buffer)
    freed = gpu.copies.drop("params", 0, buffer)
    assert not freed.done()
    freed.result(10)
    assert all(happened is None or happened.is_set() for happened in gpu.cuda.events.values())
    assert gpu.copies.drop("params", 0, buffer) is None


def test_a_slot_is_not_filled_before_it_is_copied_down(gpu):
    gpu.cuda._queue(gpu.down, lambda: time.sleep(0.05))
    kept = []
    for value in (1, 2):
        values, (_, views) = gpu.values(value), empty()
        kept.append(
            (value, values, views, gpu.copies.save(gpu.context, "params", 0, values, views))
        )
    for value, _, views, done in kept:
        done.result(10)
        assert all((view == np.float32(value)).all() for view in views)


def test_stored_records_are_those_of_their_callback(gpu):
    """The program overwrites its values after each store.

    A slot is filled again while it is copied to the host.
    """
    values, kept = gpu.values(), []
    for value in range(1, 8):
        gpu.set(values, value)
        _, views = empty()
        kept.append((value, views, gpu.copies.save(gpu.context, "params", 0, values, views)))
        gpu.set(values, -1)
    for value, views, done in kept:
        done.result(10)
        assert all((view == np.float32(value)).all() for view in views)


def test_a_kind_of_one_record_is_copied_on_the_programs_stream(gpu):
    gpu.copies.add("head", 0, FORMAT.padded_bytes, PARTS, up=False, down=False)
    values, out = gpu.values(), gpu.values()
    buffer, views = empty()
    gpu.set(values, 3)
    gpu.copies.save(gpu.context, "head", 0, values, views).result(10)
    assert all((view == np.float32(3)).all() for view in views)
    gpu.copies.lift("head", 0, buffer)
    gpu.copies.load(gpu.context, "head", 0, views, out).result(10)
    buffer[...] = 255
    assert gpu.get(out) == 3


def test_values_are_cleared_and_tokens_passed_on(gpu):
    values, token, after = (
        gpu.values(5),
        Buffer(np.full(1, 9, np.int32)),
        Buffer(np.zeros(1, np.int32)),
    )
    gpu.copies.clear(gpu.context, values)
    gpu.copies.pass_on(gpu.context, 0, token, after)
    assert gpu.get(values) == 0
    assert after.array[0] == 9


def test_a_copy_that_the_driver_refuses_is_told(gpu):
    gpu.cuda.fail_copies = True
    with pytest.raises(RuntimeError, match="cuMemcpyAsync failed with CUDA_ERROR_OUT_OF_MEMORY"):
        gpu.copies.lift("params", 0, record(1)[0])
    gpu.cuda.fail_copies = False


def test_a_store_that_fails_leaves_no_copy_under_way(gpu, monkeypatch):
    gpu.cuda._queue(gpu.down, lambda: time.sleep(0.05))
    values, (buffer, views), record_event = gpu.values(1), empty(), gpu.driver.record

    def fails(event, stream):  # when the copy to the host is queued
        if stream == gpu.down:
            raise RuntimeError("cuEventRecord failed")
        record_event(event, stream)

    monkeypatch.setattr(gpu.driver, "record", fails)
    with pytest.raises(RuntimeError, match="cuEventRecord failed"):
        gpu.copies.save(gpu.context, "params", 0, values, views)
    assert (views[0] == 1).all()  # the one queued copy to the host has ended
    buffer[...] = 7
    gpu.driver.finish_stream(gpu.down)
    assert (buffer == 7).all()


def test_copies_of_a_cpu_need_no_driver():
    assert isinstance(build_copies(jax.devices()), HostCopies)
    with pytest.raises(NotImplementedError, match="these are tpu's"):
        build_copies([SimpleNamespace(platform="tpu")])


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_steps_of_an_engine_on_a_gpu_read_and_write_the_right_records(tmp_path, distance):
    """Each step reads every record and stores it incremented by one.

    Disk, streams and program each have their own pace.
    """
    gpu, rounds = Gpu(delay=0.0005), 5
    moves = [Move("params", layer, writes) for layer in range(LAYERS) for writes in (False, True)]
    with SwapFolder(str(tmp_path)) as folder:
        engine = Engine(DirectIo(IoSettings(3, 4096)), distance, pin="none", copies=gpu.copies)
        engine.add("params", 0, Store(folder.path, "params", 0, LAYERS, FORMAT))
        values = gpu.values()
        engine.begin(())
        for layer in range(LAYERS):
            gpu.set(values, layer)
            engine.store(
                "params",
                0,
                layer,
                lambda views: gpu.copies.save(gpu.context, "params", 0, values, views),
            )
        for round_ in range(rounds):
            engine.begin(moves)
            for layer in range(LAYERS):
                fetched = gpu.values()

                def use(views, fetched=fetched):
                    return gpu.copies.load(gpu.context, "params", 0, views, fetched)

                engine.fetch("params", 0, layer, use)
                assert gpu.get(fetched) == layer + round_
                gpu.set(values, layer + round_ + 1)
                engine.store(
                    "params",
                    0,
                    layer,
                    lambda views: gpu.copies.save(gpu.context, "params", 0, values, views),
                )
                gpu.set(values, -1)
        engine.check()
        engine.close()
    gpu.driver.destroy_stream(gpu.stream)
    assert gpu.cuda.streams == {}
    assert not [t for t in threading.enumerate() if t.name.startswith("zerojax-copies")]


def on_a_gpu(gpu, folder, distance=1):
    """Return an engine with records on its disk, and functions that fetch and store a record."""
    engine = Engine(DirectIo(IoSettings(1, 4096)), distance, pin="none", copies=gpu.copies)
    engine.add("params", 0, Store(folder.path, "params", 0, LAYERS, FORMAT))
    values = gpu.values(1)

    def fetch(layer):
        engine.fetch(
            "params",
            0,
            layer,
            lambda views: gpu.copies.load(gpu.context, "params", 0, views, values),
        )

    def store(layer):
        engine.store(
            "params",
            0,
            layer,
            lambda views: gpu.copies.save(gpu.context, "params", 0, values, views),
        )

    for layer in range(LAYERS):
        store(layer)
    engine.flush()
    return engine, fetch, store


def test_a_callback_of_a_gpu_leaves_it_to_another_thread_to_read_ahead(tmp_path, monkeypatch):
    gpu, here = Gpu(), threading.current_thread()
    with SwapFolder(str(tmp_path)) as folder:
        engine, fetch, store = on_a_gpu(gpu, folder)
        engine.begin(
            [Move("params", layer, writes) for layer in range(LAYERS) for writes in (False, True)]
        )
        engine.flush()
        read_ahead, threads = engine._read_ahead, []
        monkeypatch.setattr(
            engine,
            "_read_ahead",
            lambda lane: (threads.append(threading.current_thread()), read_ahead(lane)),
        )
        fetch(0)
        store(0)
        engine.flush()
        assert [thread.name for thread in threads].count("zerojax-ahead") == 1
        assert here not in threads
        fetch(1)
        assert engine.take_stats().misses == 0
        engine.close()
    assert not [t for t in threading.enumerate() if t.name == "zerojax-ahead" and t.is_alive()]


def test_an_error_while_a_gpus_records_are_read_ahead_is_told(tmp_path, monkeypatch):
    gpu = Gpu()
    with SwapFolder(str(tmp_path)) as folder:
        engine, fetch, _ = on_a_gpu(gpu, folder)
        engine.begin([Move("params", layer) for layer in range(LAYERS)])
        engine.flush()

        def refuse(lane):
            raise MemoryError("no room")

        monkeypatch.setattr(engine, "_read_ahead", refuse)
        fetch(0)
        engine.settle()
        with pytest.raises(RuntimeError, match="no room"):
            engine.check()
        monkeypatch.undo()
        engine.close()


def test_a_copy_down_that_fails_is_an_error_of_the_engine(tmp_path, monkeypatch):
    gpu = Gpu()
    with SwapFolder(str(tmp_path)) as folder:
        engine = Engine(DirectIo(IoSettings(1, 4096)), 1, pin="none", copies=gpu.copies)
        engine.add("params", 0, Store(folder.path, "params", 0, LAYERS, FORMAT))

        def refuse(event):
            raise RuntimeError("cuEventSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)")

        with monkeypatch.context() as patched:
            patched.setattr(gpu.driver, "finish_event", refuse)
            values = gpu.values(1)
            engine.store(
                "params",
                0,
                2,
                lambda views: gpu.copies.save(gpu.context, "params", 0, values, views),
            )
            with pytest.raises(RuntimeError, match=r"(?s)layer 2.*CUDA_ERROR_ILLEGAL_ADDRESS"):
                engine.flush()
        engine.close()


def test_a_store_returns_while_its_record_is_copied_down(tmp_path):
    gpu, held = Gpu(), threading.Event()
    with SwapFolder(str(tmp_path)) as folder:
        engine = Engine(DirectIo(IoSettings(1, 4096)), 1, pin="none", copies=gpu.copies)
        engine.add("params", 0, Store(folder.path, "params", 0, LAYERS, FORMAT))
        gpu.cuda._queue(gpu.down, held.wait)
        values, fetched = gpu.values(5), gpu.values()
        engine.store(
            "params", 0, 2, lambda views: gpu.copies.save(gpu.context, "params", 0, values, views)
        )
        assert engine.take_stats().bytes_written == 0
        held.set()
        engine.fetch(
            "params", 0, 2, lambda views: gpu.copies.load(gpu.context, "params", 0, views, fetched)
        )
        assert gpu.get(fetched) == 5
        engine.close()


def test_a_record_updated_on_the_host_is_not_what_was_lifted_before(tmp_path):
    """The host updates records in buffers that were read ahead and copied to the device."""
    gpu, rounds = Gpu(delay=0.0), 4
    moves = [Move("params", layer, writes) for layer in range(LAYERS) for writes in (False, True)]
    with SwapFolder(str(tmp_path)) as folder:
        engine = Engine(DirectIo(IoSettings(2, 4096)), 1, pin="none", copies=gpu.copies)
        engine.add("params", 0, Store(folder.path, "params", 0, LAYERS, FORMAT), in_place=True)
        kept = [gpu.values(layer) for layer in range(LAYERS)]
        for layer, values in enumerate(kept):
            engine.store(
                "params",
                0,
                layer,
                lambda views, v=values: gpu.copies.save(gpu.context, "params", 0, v, views),
            )
        for round_ in range(rounds):
            engine.begin(moves)
            deadline = time.monotonic() + 20
            while (
                gpu.copies._up["params", 0].source is None
            ):  # the first record was read and lifted
                assert time.monotonic() < deadline
            for layer in range(LAYERS):
                with engine.borrow("params", 0, layer, "update") as views:
                    for view in views:
                        view += 1
            for layer in range(LAYERS):
                fetched = gpu.values()
                engine.fetch(
                    "params",
                    0,
                    layer,
                    lambda views, f=fetched: gpu.copies.load(gpu.context, "params", 0, views, f),
                )
                assert gpu.get(fetched) == layer + round_ + 1
        engine.close()
