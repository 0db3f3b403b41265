"""Full programs whose records move as on a GPU, through slots and streams.

The driver is simulated, and the results are the same.
"""

import threading

import jax
import numpy as np
import optax
import pytest
import toys
from simulated_cuda import SimulatedCuda

import zerojax as zj
from host_offload.calls import log
from host_offload.device import copies, gpu_copies
from host_offload.device.cuda_driver import Driver
from host_offload.device.gpu_copies import GpuCopies
from host_offload.disk import SwapError
from host_offload.engine import Swap
from host_offload.engine.job_thread import JobThread

DISK = "nvme"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}
CASES = {
    "after backward": {"clip_norm": 0.5},
    "in backward": {"update": "in_backward", "prefetch_distance": 2, "gather_ahead": True},
    "on the host, nothing ahead": {
        "update_on": "host",
        "prefetch_distance": 0,
        "num_microbatches": 2,
        "precision": "bf16",
    },
}


def train(swap_dir, fields, steps=3, simulated=None):
    config = zj.ZeroConfig(stage=3, swap_dir=str(swap_dir), **ALL, **fields)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with zj.build_train_step(toys.small(), optax.adamw(1e-2), config, mesh) as program:
        if simulated is not None:
            program.swap.swap.calls.log = simulated.log(list(mesh.devices.flat))
        state = program.init(jax.random.key(0))
        if simulated is not None:
            simulated.is_step = True
        losses, state = toys.run(program, state, toys.batches(steps))
        if simulated is not None:
            simulated.is_step = False
        return losses, jax.device_get(list(program.iter_params(state))), program.swap.engine.copies


class Simulated:
    """Replace the GPU driver in the callbacks of CPU programs, and watch what they wait for.

    Attributes:
      waits: number of waits for a stream or an event, for each callback of a step.
      last: each callback's last action, "driver" or "thread" (work left to a thread), and how often
        it took that action.
    """

    def __init__(self, monkeypatch):
        self.cuda, self.is_step, self.waits, self.logged = SimulatedCuda(delay=0.001), False, [], []
        self.driver, self.last, self._done = Driver(self.cuda), [], threading.local()
        for name in ("copy", "copy_in", "copy_out", "record", "wait"):
            monkeypatch.setattr(Driver, name, self._noted(getattr(Driver, name), "driver"))
        monkeypatch.setattr(JobThread, "submit", self._noted(JobThread.submit, "thread"))
        monkeypatch.setattr(
            "host_offload.engine.ops.build_copies", lambda devices: GpuCopies(devices, self.driver)
        )
        address = lambda buffer: np.asarray(buffer).ctypes.data  # noqa: E731
        monkeypatch.setattr(
            gpu_copies, "pointers", lambda buffers: [address(buffer) for buffer in buffers]
        )
        for module in (gpu_copies, log):
            monkeypatch.setattr(module, "pointer", address)
            monkeypatch.setattr(module, "find_stream", lambda context: 0)
        # Both devices use stream 0, which runs its calls immediately, so the stream does not
        # identify the device.
        monkeypatch.setattr(
            log.CallLog, "find_rank", lambda log, context, where: int(np.asarray(where)[0])
        )
        entries = log.CallLog.entries

        def noted(calls):
            for entry in entries(calls):
                self.logged.append(entry)
                yield entry

        monkeypatch.setattr(log.CallLog, "entries", noted)
        for name in ("on_fetch", "on_store"):
            monkeypatch.setattr(Swap, name, self._watched(getattr(Swap, name)))

    def log(self, devices):
        return log.CallLog(devices, self.driver)

    def _noted(self, call, what):
        def run(*args, **options):
            if hasattr(self._done, "steps"):
                self._done.steps.append(what)
            return call(*args, **options)

        return run

    def _watched(self, callback):
        def run(*args, **options):
            before = self.cuda.waits.count(threading.get_ident())
            self._done.steps = []
            callback(*args, **options)
            if self.is_step:
                self.waits.append(self.cuda.waits.count(threading.get_ident()) - before)
                self.last.append((self._done.steps[-1], self._done.steps.count("thread")))

        return run


@pytest.mark.by_default("in backward")
@pytest.mark.parametrize("name", CASES)
def test_records_that_cross_by_slots_and_streams_are_the_same(name, tmp_path, monkeypatch):
    expected, params, way = train(tmp_path, CASES[name])
    assert isinstance(way, copies.HostCopies)
    simulated = Simulated(monkeypatch)
    cuda = simulated.cuda
    losses, same, way = train(tmp_path, CASES[name], simulated=simulated)
    assert isinstance(way, GpuCopies)
    assert losses == expected
    toys.assert_trees_close([tree for _, tree in same], [tree for _, tree in params], atol=0)
    # No callback of a step waited, and each was sent what it had assumed.
    assert simulated.waits == [0] * len(simulated.logged)
    assert simulated.waits
    # A thread is woken once, after the last driver call, since it could take the interpreter.
    assert set(simulated.last) == {("thread", 1)}
    beside = sum(num_bytes for stream, _, num_bytes in cuda.copies if stream)
    # half of a direction's bytes move between slot and program
    least = 0 if "update_on" in CASES[name] else 0.25
    assert beside > least * sum(num_bytes for *_, num_bytes in cuda.copies)
    assert cuda.streams == cuda.events == {}


def test_an_order_that_the_log_contradicts_is_an_error(tmp_path, monkeypatch):
    simulated, find_rank = Simulated(monkeypatch), log.CallLog.find_rank

    def swapped(calls, context, where):  # moves the other device's records
        return (
            1 - find_rank(calls, context, where)
            if simulated.is_step
            else find_rank(calls, context, where)
        )

    monkeypatch.setattr(log.CallLog, "find_rank", swapped)
    with pytest.raises(
        SwapError, match=r"call 1 of a step was for device \d and not \d as scheduled.*disk is lost"
    ):
        train(tmp_path, CASES["in backward"], steps=1, simulated=simulated)
