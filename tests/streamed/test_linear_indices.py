"""Indices that are linear in the counters of loops change no number, and are used where the schedule is linear."""

import functools

import jax
import numpy as np
import optax
import pytest
import tiled_toys
import toys

import zerojax as zj
from host_offload.schedule import build_schedule
from zerojax.state import state_records
from zerojax.streamed import phases

HOST, DISK = "pinned_host", "nvme"
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
CASES = {
    "all": ALL,
    "all_ahead_2": {**ALL, "gather_ahead": True, "prefetch_distance": 2},
    "all_distance_0": {**ALL, "prefetch_distance": 0},
    "all_distance_5": {**ALL, "prefetch_distance": 5},
    "in_backward": {**ALL, "update": "in_backward", "gather_ahead": True},
    "in_backward_bf16": {**ALL, "update": "in_backward", "precision": "bf16"},
    "opt_state": {"opt_state": HOST, "clip_norm": 0.5},
    "in_backward_2": {**ALL, "update": "in_backward", "prefetch_distance": 2, "num_microbatches": 2},
    "in_backward_0": {**ALL, "update": "in_backward", "prefetch_distance": 0},
    "opt_state_in_backward": {"opt_state": HOST, "update": "in_backward", "activations": "remat"},
    "half": {**ALL, "opt_state_device_fraction": 0.5},
    "microbatches": {**ALL, "num_microbatches": 4},
    "on_host": {**ALL, "update_on": "host"},
    "on_host_in_backward": {**ALL, "update_on": "host", "update": "in_backward"},
    "delayed": {"opt_state": HOST, "params": HOST, "update_on": "host", "delayed_update": True},
    "activations": {"activations": HOST, "opt_state": HOST},
    "disk": {"params": DISK, "grads": HOST, "opt_state": DISK, "activations": HOST},
    "tiles": {**ALL, "tiles": True},
    "tiles_in_backward": {**ALL, "tiles": True, "update": "in_backward"},
}


def train(config, tiles):
    """Return losses and trained state of ten steps."""
    model, data = (tiled_toys.model(), tiled_toys.batches(10, 4)) if tiles else (toys.layered(), toys.batches(10, 4))
    tx = optax.adamw(1e-2)
    with zj.build_train_step(model, tx, config, zj.make_mesh(devices=jax.devices()[:1])) as program:
        losses, state = toys.run(program, program.init(jax.random.key(0)), data)
        leaves = jax.tree.leaves([tree for _, tree in program.iter_params(state)])
        return np.asarray(losses), *map(np.asarray, leaves)


@pytest.mark.by_default("in_backward")
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_with_indices_from_arrays(case, tmp_path, monkeypatch):
    """But for last bits: XLA for CPUs drops barriers, and fuses what slices at an array's entry in another way."""
    fields = dict(CASES[case])
    tiles = fields.pop("tiles", False)
    config = zj.ZeroConfig(stage=3, swap_dir=tmp_path if DISK in fields.values() else None, **fields)
    of_arrays = train(config, tiles)
    monkeypatch.setattr(state_records, "takes_linear_slices", lambda mesh: True)
    for a, b in zip(train(config, tiles), of_arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.max(np.abs(b)))


@functools.cache
def schedule():
    tiers = dict.fromkeys(("params", "grads", "opt_state", "activations"), HOST)
    return build_schedule(6, 2, tiers=tiers)


def indices(values, ticks, is_linear=True):
    """Return the index of each tick, and whether its array was read."""
    phase = schedule().phase("backward")
    reads = []

    class Column:
        def __getitem__(self, t):
            reads.append(int(t))
            return values[t]

    object.__setattr__(phase, "layer", np.asarray(values, np.int32))
    found = [int(phases._index(phase, {"layer": Column()}, range(*ticks), is_linear, "layer", t)) for t in range(*ticks)]
    return found, bool(reads)


@pytest.mark.parametrize(
    ("values", "ticks", "is_read"),
    [
        ([5, 4, 3, 2, 1, 0], (0, 6), False),
        ([5, 4, 3, 2, 1, 0], (2, 5), False),
        ([9, 9, 0, 2, 4, 9], (2, 5), False),
        ([0, 1, 3, 4, 5, 6], (1, 2), False),
        ([0, 1, 3, 4, 5, 6], (0, 6), True),
    ],
)
def test_an_array_is_read_only_where_the_ticks_are_not_linear(values, ticks, is_read):
    assert indices(values, ticks) == (values[slice(*ticks)], is_read)
    assert indices(values, ticks, is_linear=False) == (values[slice(*ticks)], True)
