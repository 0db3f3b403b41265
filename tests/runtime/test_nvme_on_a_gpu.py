"""Whole programs whose records cross by the GPU's way, slots and streams, on a driver that is simulated: the same numbers."""

import jax
import numpy as np
import pytest
import toys
from simulated_cuda import SimulatedCuda

import zerojax as zj
from host_offload.device import copies, gpu_copies
from host_offload.device.cuda_driver import Driver
from host_offload.device.gpu_copies import GpuCopies

DISK = "nvme"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}
CASES = {
    "after backward": {"clip_norm": 0.5},
    "in backward": {"update": "in_backward", "prefetch_distance": 2, "gather_ahead": True},
    "on the host, nothing ahead": {"update_on": "host", "prefetch_distance": 0, "num_microbatches": 2, "precision": "bf16"},
}


def train(swap_dir, fields, steps=3):
    config = zj.ZeroConfig(stage=3, swap_dir=str(swap_dir), **ALL, **fields)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with zj.build_train_step(toys.layered(), toys.optimizer(), config, mesh) as program:
        losses, state = toys.run(program, program.init(jax.random.key(0)), toys.batches(steps))
        return losses, jax.device_get(list(program.iter_params(state))), program.swap.engine.copies


@pytest.mark.by_default("in backward")
@pytest.mark.parametrize("name", CASES)
def test_records_that_cross_by_slots_and_streams_are_the_same(name, tmp_path, monkeypatch):
    expected, params, way = train(tmp_path, CASES[name])
    assert isinstance(way, copies.HostCopies)
    cuda = SimulatedCuda(delay=0.001)
    monkeypatch.setattr("host_offload.engine.ops.copies_of", lambda devices: GpuCopies(devices, Driver(cuda)))
    monkeypatch.setattr(gpu_copies, "pointer", lambda buffer: np.asarray(buffer).ctypes.data)
    monkeypatch.setattr(gpu_copies, "stream_of", lambda context: 0)
    losses, same, way = train(tmp_path, CASES[name])
    assert isinstance(way, GpuCopies)
    assert losses == expected
    toys.assert_trees_close([tree for _, tree in same], [tree for _, tree in params], atol=0)
    beside = sum(num_bytes for stream, _, num_bytes in cuda.copies if stream)
    least = 0 if "update_on" in CASES[name] else 0.25  # half of a way is between slot and program
    assert beside > least * sum(num_bytes for *_, num_bytes in cuda.copies)
    assert cuda.streams == cuda.events == {}
