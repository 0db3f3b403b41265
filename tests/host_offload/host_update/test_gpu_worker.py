"""Gradients to the host, kernels, and parameters to the device, while a program runs late.

The results are correct in any order, and each wait is needed.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_cuda import SimulatedCuda

from host_offload.device import link
from host_offload.device.cuda_driver import Driver
from host_offload.host_update import gpu_worker, queued
from host_offload.host_update.group_memory import HOST_LAG, GroupMemory, LeafGroup
from host_offload.host_update.host_leaves import HostLeaves

F32 = np.dtype(np.float32)
LAYERS, SHAPES = 7, ((300,), (2, 50))
CROSSING = tuple((shape, F32) for shape in SHAPES)


class Buffer:
    """A callback's buffer on a GPU."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype


class Late(SimulatedCuda):
    """A driver on which some streams take long for each copy."""

    def __init__(self):
        super().__init__()
        self.seconds = {}

    def cuMemcpyAsync(self, target, source, num_bytes, stream):  # noqa: N802
        if stream in self.seconds:
            self._queue(stream, lambda: time.sleep(self.seconds[stream]))
        return super().cuMemcpyAsync(target, source, num_bytes, stream)


class Leaves(HostLeaves):
    """Kernels that take the gradient and the layer as the new parameter."""

    def __init__(self):
        kernel = SimpleNamespace(
            records={}, grad=None, arrays=(), pending=False, stacked=True, params_on_device=True
        )
        super().__init__([kernel, kernel], link.CudaLink())
        self.layers = []  # of the first leaf, in the order of updates

    def run_kernel(
        self, device, leaf, layer, grad, scalars, *, weight=None, result=None, views=None
    ):
        assert result is not None
        self.layers += [layer] if leaf == 0 else []
        result[...] = grad * scalars[leaf] + layer


class Replay:
    """A program's step on its own stream, in which all layers reuse the place of each array."""

    specs: tuple[LeafGroup, ...] = (LeafGroup(range(2), CROSSING, (), CROSSING, 2, stacked=True),)

    def __init__(self, monkeypatch):
        self.cuda = Late()
        self.driver = driver = Driver(self.cuda)
        driver.ensure_context()
        self.stream = driver.make_stream()
        for module in (gpu_worker, queued):
            monkeypatch.setattr(module, "pointer", lambda buffer: buffer.array.ctypes.data)
        self.leaves = Leaves()
        device = SimpleNamespace(local_hardware_id=0)
        monkeypatch.setattr(
            GroupMemory, "_slot", lambda self, packing, device: Slot(packing.num_bytes)
        )
        self.step = queued.QueuedStep(self.leaves, self.specs, [device], lambda: driver)
        self.step.prepare([0])
        self.worker = self.step._workers[0]
        self.group = self.worker.groups[0]

    layers: tuple[int, ...] = tuple(range(LAYERS))
    """Layers that the program hands over, in order."""

    def run(self, goes=(True,) * LAYERS):
        """Return the parameters received after each layer, and the correct ones."""
        rng, copy = np.random.default_rng(0), self.driver.copy
        grads = [[rng.normal(size=shape).astype(F32) for shape in SHAPES] for _ in range(LAYERS)]
        wheres = [
            np.array([0, layer, go, 9], np.int32)
            for layer, go in zip(self.layers, goes, strict=True)
        ]
        scalars, context = Buffer(np.array([2, 3], F32)), SimpleNamespace(stream=self.stream)
        where, after, token = (
            Buffer(np.zeros(4, np.int32)),
            Buffer(np.array([9], np.int32)),
            Buffer(np.zeros(1, np.int32)),
        )
        operands, results = ([Buffer(np.zeros(shape, F32)) for shape in SHAPES] for _ in range(2))
        taken = np.zeros((LAYERS + HOST_LAG, sum(r.array.size for r in results)), F32)

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
        for n in range(LAYERS, LAYERS + HOST_LAG):
            self.step.take(context, (results, token), where, after, first=0)
            take(n)
        self.driver.finish_stream(self.stream)
        expected = [
            np.concatenate([(g * s + n).ravel() for g, s in zip(grads[n], (2, 3), strict=True)])
            for n in range(LAYERS)
        ]
        return taken[HOST_LAG:], np.array(expected, F32), int(token.array[0])


class Delayed(Replay):
    """One step of a program with a delayed update.

    It computes its gradients in backward, and takes parameters there.
    """

    specs = (
        LeafGroup(range(0), (), (), (), 2, stacked=False),
        LeafGroup(range(2), CROSSING, (), CROSSING, 0, stacked=True, stashes=True),
    )
    calls = tuple((call, n) for n in reversed(range(LAYERS)) for call in ("stash", "install"))

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.group, leaves = self.worker.stashes[0], self.leaves
        for leaf, shape in enumerate(SHAPES):
            for arrays in (leaves.pending, leaves.stashed, leaves.new_params):
                arrays[0, leaf] = np.zeros((LAYERS, *shape), F32)
        self.step_number, self.grads = 0, [[np.zeros(shape, F32) for shape in SHAPES]] * LAYERS

    def run(self, goes=(True,) * LAYERS, installs=True):
        """Return the parameters received after each layer, and the correct ones.

        The correct ones are made from the previous step's gradients.
        """
        assert all(goes)
        rng, copy, leaves = np.random.default_rng(self.step_number), self.driver.copy, self.leaves
        self.step_number += 1
        values, told = np.array([2, 3], F32) + self.step_number, np.array([0, 1, 0, 9], np.int32)
        expected = [
            np.concatenate(
                [(g * s + n).ravel() for g, s in zip(self.grads[n], values, strict=True)]
            )
            for n in range(LAYERS)
        ]
        self.grads = grads = [
            [rng.normal(size=shape).astype(F32) for shape in SHAPES] for _ in range(LAYERS)
        ]
        scalars, context = Buffer(np.zeros(2, F32)), SimpleNamespace(stream=self.stream)
        where, after, token = (
            Buffer(np.zeros(4, np.int32)),
            Buffer(np.array([9], np.int32)),
            Buffer(np.zeros(1, np.int32)),
        )
        operands, results = ([Buffer(np.zeros(shape, F32)) for shape in SHAPES] for _ in range(2))
        taken = np.zeros((LAYERS, sum(r.array.size for r in results)), F32)
        copy(where.array.ctypes.data, told.ctypes.data, 16, self.stream)
        copy(scalars.array.ctypes.data, values.ctypes.data, 8, self.stream)
        self.step.start(context, token, where, after, scalars)
        for call, n in self.calls:
            site = SimpleNamespace(ask=lambda context, where, n=n: (0, n, 9))
            if call == "stash":
                for operand, grad in zip(operands, grads[n], strict=True):
                    copy(operand.array.ctypes.data, grad.ctypes.data, grad.nbytes, self.stream)
                self.step.stash(context, token, where, after, *operands, first=0, site=site)
            elif installs:
                self.step.install(
                    context, (results, token), where, after, first=0, count=2, site=site
                )
                at = taken[n].ctypes.data
                for result in results:
                    copy(at, result.array.ctypes.data, result.array.nbytes, self.stream)
                    at += result.array.nbytes
        self.step.finish(context, token, where, after)
        made = [np.array(leaves.new_params[0, leaf]) for leaf in range(2)]
        self.driver.finish_stream(self.stream)
        self.step.prepare([0])  # as after a step: the stashed arrays have arrived
        leaves.pending, leaves.stashed = leaves.stashed, leaves.pending
        if not installs:
            taken = np.concatenate([a.reshape(LAYERS, -1) for a in made], 1)
        return taken, np.array(expected, F32), int(token.array[0])


class InForward(Delayed):
    """One step of a program that updates in forward: it takes parameters before its gradients.

    The gradients overwrite the previous step's.
    """

    calls = (
        *(("install", n) for n in range(LAYERS)),
        *(("stash", n) for n in reversed(range(LAYERS))),
    )

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.leaves.in_place = True
        self.leaves.stashed = self.leaves.pending


class Slot:
    def __init__(self, num_bytes):
        self.memory = np.zeros(num_bytes, np.uint8)

    def unsafe_buffer_pointer(self):
        return self.memory.ctypes.data


def closed_after(made):
    yield made
    for stream in made.cuda.streams:
        made.cuda.seconds[stream] = 0
    made.step.close()


@pytest.fixture
def replay(monkeypatch):
    yield from closed_after(Replay(monkeypatch))


@pytest.fixture
def delayed(monkeypatch):
    yield from closed_after(Delayed(monkeypatch))


@pytest.fixture
def in_forward(monkeypatch):
    yield from closed_after(InForward(monkeypatch))


def without(replay, monkeypatch, name):
    """Remove one wait, and slow down the operation that it waits for."""
    driver, group, worker, stream = replay.driver, replay.group, replay.worker, replay.stream
    wait, finish = driver.wait, driver.finish_event
    slow = {"down": worker.down, "up": worker.up, "program": stream}
    skip = {
        "program fills the slot": (
            "down",
            lambda on, event: on == stream and event in group.arrived,
        ),
        "down reads the slot": ("program", lambda on, event: on == worker.down),
        "worker reads": ("down", lambda on, event: on is None and event in group.arrived),
        "worker fills the room": ("up", lambda on, event: on is None and event in group.sent),
        "up fills the slot": ("program", lambda on, event: on == worker.up),
        "program reads the slot": ("up", lambda on, event: on == stream and event in group.sent),
    }
    if name in skip:
        which, is_out = skip[name]
        monkeypatch.setattr(driver, "wait", lambda on, event: is_out(on, event) or wait(on, event))
        monkeypatch.setattr(
            driver, "finish_event", lambda event: is_out(None, event) or finish(event)
        )
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
    for _ in range(2):  # a second step reuses everything
        replay.step.prepare([0])
        taken, expected, number = replay.run()
        np.testing.assert_array_equal(taken, expected)
        assert number == 9
    assert replay.leaves.take_errors() == []


def test_a_layer_that_is_handed_over_twice_in_a_step_is_an_error(replay):
    replay.layers = (0, 1, 1, 2, 3, 4, 5)
    replay.run()
    errors = replay.leaves.take_errors()
    assert "asked twice for the update of layer 1 in one step" in str(errors[0])


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_needed(name, replay, monkeypatch):
    without(replay, monkeypatch, name)
    taken, expected, _ = replay.run()
    assert not np.array_equal(taken, expected)


@pytest.mark.parametrize("slow", ["nothing", "down", "up", "stream"])
def test_a_delayed_update_is_given_to_the_layers_of_a_program_that_runs_late(slow, delayed):
    streams = {"down": delayed.worker.down, "up": delayed.worker.up, "stream": delayed.stream}
    delayed.cuda.seconds = {streams[slow]: 0.002} if slow in streams else {}
    for _ in range(3):
        taken, expected, number = delayed.run()
        np.testing.assert_array_equal(taken, expected)
        assert number == 9
    assert delayed.leaves.layers == 3 * list(reversed(range(LAYERS)))  # in the order of backward
    assert delayed.leaves.take_errors() == []


@pytest.mark.parametrize("slow", ["nothing", "down", "up", "stream"])
def test_an_update_in_forward_is_given_to_the_layers_of_a_program_that_runs_late(slow, in_forward):
    made = in_forward
    streams = {"down": made.worker.down, "up": made.worker.up, "stream": made.stream}
    made.cuda.seconds = {streams[slow]: 0.002} if slow in streams else {}
    for _ in range(3):
        taken, expected, number = made.run()
        np.testing.assert_array_equal(taken, expected)
        assert number == 9
    assert made.leaves.layers == 3 * list(range(LAYERS))  # in the order of forward
    assert made.leaves.take_errors() == []


def without_delayed(delayed, monkeypatch, name):
    """Remove one wait of a delayed update, and slow down the operation that it waits for."""
    driver, group, worker, stream = delayed.driver, delayed.group, delayed.worker, delayed.stream
    wait, finish = driver.wait, driver.finish_event
    slow, is_out = {
        "program fills the slot down": (
            worker.down,
            lambda on, event: on == stream and event in group.arrived,
        ),
        "down reads the slot": (stream, lambda on, event: on == worker.down),
        "worker reads the scalars": (
            stream,
            lambda on, event: on is None and event in worker.groups[0].arrived,
        ),
        "up fills the slot": (stream, lambda on, event: on == worker.up),
        "program reads the slot up": (
            worker.up,
            lambda on, event: on == stream and event in group.sent,
        ),
        "callback waits for the worker": (stream, None),
    }[name]
    if is_out is None:
        monkeypatch.setattr(gpu_worker.Job, "finish", lambda job: None)
    else:
        monkeypatch.setattr(driver, "wait", lambda on, event: is_out(on, event) or wait(on, event))
        monkeypatch.setattr(
            driver, "finish_event", lambda event: is_out(None, event) or finish(event)
        )
    delayed.cuda.seconds[slow] = 0.004


DELAYED_WAITS = [
    "program fills the slot down",
    "down reads the slot",
    "worker reads the scalars",
    "up fills the slot",
    "program reads the slot up",
    "callback waits for the worker",
]


@pytest.mark.parametrize("name", DELAYED_WAITS)
def test_each_wait_of_a_delayed_update_is_needed(name, delayed, monkeypatch):
    delayed.run()
    without_delayed(delayed, monkeypatch, name)
    steps = [delayed.run()[:2] for _ in range(2)]  # a wrong stash shows a step later
    assert not all(np.array_equal(taken, expected) for taken, expected in steps)


@pytest.mark.parametrize("waits", [True, False])
def test_the_last_callback_waits_for_what_no_layer_takes(waits, delayed, monkeypatch):
    delayed.run()
    if not waits:
        monkeypatch.setattr(gpu_worker.Job, "finish", lambda job: None)
    delayed.cuda.seconds[delayed.stream] = 0.004
    made, expected, _ = delayed.run(installs=False)
    assert np.array_equal(made, expected) == waits
