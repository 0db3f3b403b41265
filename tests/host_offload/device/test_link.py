"""Concurrent callbacks of several GPUs put data in staging memory, with a simulated driver."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_cuda import SimulatedCuda
from test_copies import Buffer

from host_offload.device import link
from host_offload.device.cuda_driver import Driver
from host_offload.host_update.host_leaves import HostLeaves


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(SimulatedCuda())
    driver.ensure_context()
    monkeypatch.setattr(link, "driver", lambda: driver)
    return driver


def test_staging_memory_is_registered_once_for_threads_that_ask_at_once(driver, monkeypatch):
    cuda, context, buffer = link.CudaLink(), SimpleNamespace(stream=0), Buffer(np.zeros(4))
    register, barrier, rooms = driver.register, threading.Barrier(4), []

    def slow(array):
        time.sleep(0.05)
        register(array)

    def ask():
        barrier.wait()
        rooms.append(cuda.room(context, buffer, "where"))

    monkeypatch.setattr(driver, "register", slow)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({room.ctypes.data for room in rooms}) == 1
    assert list(driver._api.registered) == [rooms[0].ctypes.data]


def test_tokens_of_gpus_that_end_a_callback_at_once_are_their_own(driver):
    leaves = HostLeaves((), link.CudaLink())
    contexts = [SimpleNamespace(stream=driver.make_stream()) for _ in range(2)]
    tokens, is_open = [Buffer(np.zeros(1, np.int32)) for _ in contexts], threading.Event()
    driver._api._queue(
        contexts[0].stream, is_open.wait
    )  # the first GPU's copy runs after the second's

    def finish(gpu):
        driver.ensure_context()
        leaves.finish(contexts[gpu], tokens[gpu], 10 + gpu)

    threads = [threading.Thread(target=finish, args=(gpu,)) for gpu in range(2)]
    threads[0].start()
    while not driver._api.copies:
        time.sleep(0.001)
    threads[1].start()
    threads[1].join()
    is_open.set()
    threads[0].join()
    assert [int(token.array[0]) for token in tokens] == [10, 11]
    assert leaves.take_errors() == []
