"""Gradients down, kernels, parameters up, beside a program that runs late: right in any order, and each wait is needed."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_cuda import SimulatedCuda

from host_offload.device import link
from host_offload.device.cuda_driver import Driver
from host_offload.host_update import gpu_worker, queued
from host_offload.host_update.gpu_worker import LAG, Part, PartSpec
from host_offload.host_update.host_leaves import HostLeaves

F32 = np.dtype(np.float32)
LAYERS, SHAPES = 7, ((300,), (2, 50))


class Buffer:
    """A callback's buffer on a GPU."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype


class Late(SimulatedCuda):
    """Some streams take long for each copy."""

    def __init__(self):
        super().__init__()
        self.seconds = {}

    def cuMemcpyAsync(self, target, source, num_bytes, stream):  # noqa: N802
        if stream in self.seconds:
            self._queue(stream, lambda: time.sleep(self.seconds[stream]))
        return super().cuMemcpyAsync(target, source, num_bytes, stream)


class Leaves(HostLeaves):
    """Kernels that take the gradient and the layer for the new parameter."""

    def __init__(self):
        kernel = SimpleNamespace(records={}, grad=None, arrays=(), delayed=False)
        super().__init__([kernel, kernel], link.CudaLink())

    def run_kernel(self, device, leaf, layer, grad, scalars, *, weight=None, result=None, views=None):
        assert result is not None
        result[...] = grad * scalars[leaf] + layer


class Replay:
    """One step of a program on a stream of its own, whose every array has one place that each layer uses again."""

    def __init__(self, monkeypatch):
        self.cuda = Late()
        self.driver = driver = Driver(self.cuda)
        driver.ensure_context()
        self.stream = driver.make_stream()
        for module in (gpu_worker, queued):
            monkeypatch.setattr(module, "pointer", lambda buffer: buffer.array.ctypes.data)
        self.leaves = Leaves()
        specs = tuple((shape, F32) for shape in SHAPES)
        spec = PartSpec(range(2), specs, (), specs, 2, stacked=True)
        device = SimpleNamespace(local_hardware_id=0)
        monkeypatch.setattr(Part, "_slot", lambda self, packing, device: Slot(packing.num_bytes))
        self.step = queued.QueuedStep(self.leaves, [spec], [device], lambda: driver)
        self.step.prepare([0])
        self.worker = self.step._workers[0]
        self.part = self.worker.parts[0]

    def run(self, goes=(True,) * LAYERS):
        """Return the parameters of every layer after it, and those that are right."""
        rng, copy = np.random.default_rng(0), self.driver.copy
        grads = [[rng.normal(size=shape).astype(F32) for shape in SHAPES] for _ in range(LAYERS)]
        wheres = [np.array([0, layer, go, 9], np.int32) for layer, go in enumerate(goes)]
        scalars, context = Buffer(np.array([2, 3], F32)), SimpleNamespace(stream=self.stream)
        where, after, token = Buffer(np.zeros(4, np.int32)), Buffer(np.array([9], np.int32)), Buffer(np.zeros(1, np.int32))
        operands, results = ([Buffer(np.zeros(shape, F32)) for shape in SHAPES] for _ in range(2))
        taken = np.zeros((LAYERS + LAG, sum(r.array.size for r in results)), F32)

        def take(n):
            at = taken[n].ctypes.data
            for result in results:
                copy(at, result.array.ctypes.data, result.array.nbytes, self.stream)
                at += result.array.nbytes

        for n in range(LAYERS):
            copy(where.array.ctypes.data, wheres[n].ctypes.data, 16, self.stream)
            for operand, grad in zip(operands, grads[n], strict=True):
                copy(operand.array.ctypes.data, grad.ctypes.data, grad.nbytes, self.stream)
            self.step.update(context, (results, token), where, after, scalars, *operands, first=0)
            take(n)
        for n in range(LAYERS, LAYERS + LAG):
            self.step.take(context, (results, token), where, after, first=0)
            take(n)
        self.driver.finish_stream(self.stream)
        expected = [np.concatenate([(g * s + n).ravel() for g, s in zip(grads[n], (2, 3), strict=True)]) for n in range(LAYERS)]
        return taken[LAG:], np.array(expected, F32), int(token.array[0])


class Slot:
    def __init__(self, num_bytes):
        self.memory = np.zeros(num_bytes, np.uint8)

    def unsafe_buffer_pointer(self):
        return self.memory.ctypes.data


@pytest.fixture
def replay(monkeypatch):
    made = Replay(monkeypatch)
    yield made
    for stream in made.cuda.streams:
        made.cuda.seconds[stream] = 0
    made.step.close()


def without(replay, monkeypatch, name):
    """Take one wait out, and slow down what it waits for."""
    driver, part, worker, stream = replay.driver, replay.part, replay.worker, replay.stream
    wait, finish = driver.wait, driver.finish_event
    slow = {"down": worker.down, "up": worker.up, "program": stream}
    skip = {
        "program fills the slot": ("down", lambda on, event: on == stream and event in part.arrived),
        "down reads the slot": ("program", lambda on, event: on == worker.down),
        "worker reads": ("down", lambda on, event: on is None and event in part.arrived),
        "worker fills the room": ("up", lambda on, event: on is None and event in part.sent),
        "up fills the slot": ("program", lambda on, event: on == worker.up),
        "program reads the slot": ("up", lambda on, event: on == stream and event in part.sent),
    }
    if name in skip:
        which, is_out = skip[name]
        monkeypatch.setattr(driver, "wait", lambda on, event: is_out(on, event) or wait(on, event))
        monkeypatch.setattr(driver, "finish_event", lambda event: is_out(None, event) or finish(event))
    else:
        which = "down"
        monkeypatch.setattr(gpu_worker.Job, "finish", lambda job: None)
    replay.cuda.seconds[slow[which]] = 0.004


WAITS = [
    "program fills the slot",
    "down reads the slot",
    "worker reads",
    "worker fills the room",
    "up fills the slot",
    "program reads the slot",
    "callback waits for the worker",
]


@pytest.mark.parametrize("slow", ["nothing", "down", "up", "stream"])
def test_a_program_that_runs_late_is_given_the_right_parameters(slow, replay):
    streams = {"down": replay.worker.down, "up": replay.worker.up, "stream": replay.stream}
    replay.cuda.seconds = {streams[slow]: 0.002} if slow in streams else {}
    for _ in range(2):  # a second step uses everything again
        replay.step.prepare([0])
        taken, expected, number = replay.run()
        np.testing.assert_array_equal(taken, expected)
        assert number == 9
    assert replay.leaves.take_errors() == []


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_needed(name, replay, monkeypatch):
    without(replay, monkeypatch, name)
    taken, expected, _ = replay.run()
    assert not np.array_equal(taken, expected)
