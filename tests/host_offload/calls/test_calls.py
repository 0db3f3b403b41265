"""What sites assume, and what programs on GPUs send to the log.

The driver is a stand-in whose streams run late.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_cuda import SimulatedCuda

from host_offload.calls import CallbackSite, CallLog, Calls, find_site
from host_offload.device.cuda_driver import Driver
from host_offload.disk import SwapError

CPU = SimpleNamespace(platform="cpu", process_index=0, local_hardware_id=0)


class Buffer:
    """A callback's buffer on a GPU."""

    def __init__(self, values):
        self.array = np.array(values, np.int32)
        self.__cuda_array_interface__ = {"data": (self.array.ctypes.data, False)}


class Gpus:
    """Two GPUs that call back, each from a stream that lags behind its callbacks."""

    def __init__(self):
        self.cuda = SimulatedCuda()
        self.driver = Driver(self.cuda)
        devices = [
            SimpleNamespace(platform="cuda", process_index=0, local_hardware_id=n) for n in range(2)
        ]
        self.calls = Calls(devices)
        self.calls.log = CallLog(devices, self.driver)
        self.contexts, self.late = [], threading.Event()
        for device in range(2):
            self.driver.use(self.driver.retain_context(device))
            self.contexts.append(SimpleNamespace(stream=self.driver.make_stream()))
        self.calls.number = 5

    def ask(self, site, device, *sent):
        """Call back; sent numbers exist once the stream arrives here, and are gone afterwards."""
        stream, buffer = self.contexts[device].stream, Buffer([-1, -1, -1])
        self.cuda._queue(stream, self.late.wait)
        self.cuda._queue(stream, lambda: buffer.array.__setitem__(slice(None), sent))
        asked = site.ask(self.contexts[device], buffer)
        self.cuda._queue(stream, lambda: buffer.array.fill(-2))
        return asked


def test_layers_are_known_before_the_program_has_come_to_the_call():
    gpus = Gpus()
    site = CallbackSite(gpus.calls, "fetch params")
    site.order = [2, 1]
    for _ in range(2):
        gpus.calls.begin()
        gpus.late.clear()
        for layer in (2, 1):
            assert [gpus.ask(site, device, device, layer, 5) for device in (1, 0)] == [
                (1, layer, 5),
                (0, layer, 5),
            ]
        gpus.late.set()
        gpus.calls.check()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ((0, 1, 5), "layer 1 and not 2"),
        ((1, 2, 5), "device 1 and not 0"),
        ((0, 2, 4), "state 4 and not 5"),
    ],
)
def test_a_call_for_another_record_than_assumed_is_an_error_of_the_step(sent, message):
    gpus = Gpus()
    site = CallbackSite(gpus.calls, "fetch params")
    site.order = [2]
    gpus.calls.begin()
    assert gpus.ask(site, 0, *sent) == (0, 2, 5)
    gpus.late.set()
    with pytest.raises(SwapError, match=f"fetch params: call 1 of a step was for {message}"):
        gpus.calls.check()


def test_records_of_a_step_belong_to_no_state():
    gpus = Gpus()
    site = CallbackSite(gpus.calls, "store grads", of_state=False)
    site.order = [0]
    gpus.calls.begin()
    assert gpus.ask(site, 0, 0, 0, 0) == (0, 0, 0)
    gpus.late.set()
    gpus.calls.check()


def test_a_step_that_was_left_in_the_middle_leaves_no_count():
    gpus = Gpus()
    site = CallbackSite(gpus.calls, "fetch params")
    site.order = [0, 1]
    gpus.late.set()
    gpus.calls.begin()
    gpus.ask(site, 0, 0, 0, 5)
    gpus.calls.begin()
    assert [gpus.ask(site, 0, 0, layer, 5).layer for layer in (0, 1)] == [0, 1]
    gpus.calls.check()
    with pytest.raises(SwapError, match="device 0 makes call 3, and its schedule has 2"):
        gpus.ask(site, 0, 0, 0, 5)


def test_a_site_without_an_order_waits_for_what_it_is_sent():
    gpus = Gpus()
    site = CallbackSite(gpus.calls, "store params")
    gpus.calls.begin()
    gpus.late.set()
    assert gpus.ask(site, 1, 1, 7, 5) == (1, 7, 5)
    gpus.calls.check()


def test_more_calls_than_the_log_was_made_for_are_compared_too():
    gpus = Gpus()
    site = CallbackSite(gpus.calls, "fetch params")
    site.order = list(range(5000))
    gpus.late.set()
    gpus.calls.begin()
    gpus.calls.reserve(100)
    for layer in range(5000):
        gpus.ask(site, 0, 0, layer if layer != 4500 else 0, 5)
    with pytest.raises(SwapError, match="call 4501 of a step was for layer 0 and not 4500"):
        gpus.calls.check()


def test_memory_of_the_log_is_unlocked_with_it():
    gpus = Gpus()
    gpus.calls.reserve(5000)
    assert len(gpus.cuda.registered) == 4
    gpus.calls.log = None
    assert gpus.cuda.registered == {}


def test_on_a_cpu_each_call_is_compared_at_once():
    calls = Calls([CPU])
    site = CallbackSite(calls, "fetch params")
    calls.begin()
    assert site.ask(None, np.array([1, 9, 5])) == (
        1,
        9,
        5,
    )  # any number, as long as no order is known
    site.order = [2, 1]
    calls.begin()
    assert site.ask(None, np.array([0, 2, 5])) == (0, 2, 5)
    assert site.ask(None, np.array([1, 2, 5])) == (1, 2, 5)
    with pytest.raises(SwapError, match="fetch params: call 2 of a step was for layer 0 and not 1"):
        site.ask(None, np.array([0, 0, 5]))


def test_a_callback_without_a_site_has_none():
    assert find_site(print) is None
