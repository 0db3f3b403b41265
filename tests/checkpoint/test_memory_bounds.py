"""Saves and restores take no more copies than documented.

Restores of a process's shards and of a record are measured on 150 to 230 MB.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import processes
import pytest
import toys
from matrix_of_checkpoints import Place, build

import zerojax as zj
from zerojax.checkpoint import restore as restoring

pytestmark = pytest.mark.xdist_group("memory_bounds")  # which share one measuring process
SLACK = 40 << 20  # for compiling, and for records of 9 MB
ON_DISK = "on disk, the same as the checkpoint's"
ROWS = {"on the device, at most 64 MB of copies": 16, "on the device": 16, ON_DISK: 24}
"""Measurements, and the number of layers of each one's model.

On disk, more layers take no more memory, and their state is 230 MB.
"""
SCRIPT = """
import ctypes, gc, json, sys
import checkpoints
for name, layers in json.loads(sys.argv[2]).items():
    print(json.dumps(checkpoints.run(name, checkpoints.Size(layers=layers, hidden=256), sys.argv[1])))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what one row took is not there for the next, whose memory is counted from here
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the measurements of `benchmarks/checkpoints.py` by row, from a single process."""
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(tmp_path_factory.mktemp("measured")),
        json.dumps(ROWS),
    ]
    env = processes.environment()
    env["PYTHONPATH"] += os.pathsep + str(processes.ROOT / "benchmarks")
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(ROWS, map(json.loads, done.stdout.splitlines()), strict=True))


def test_copies_are_the_shards_or_within_the_bound(measured):
    bounded, whole, _ = measured.values()
    assert whole["state_bytes"] > 140e6
    assert whole["async_bytes"] > 0.9 * whole["state_bytes"]  # the measurement would show it
    assert whole["async_bytes"] < whole["state_bytes"] + SLACK
    assert bounded["async_bytes"] < (64 << 20) + SLACK
    for row in (whole, bounded):
        assert row["restore_bytes"] < row["state_bytes"] + row["record_bytes"] + SLACK


def test_one_record_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """A record is read once the previous one is in place, even on a slow device.

    Large products keep the device busy here.
    """
    read, fillers, made, unready = restoring.LeafSource.record, restoring.filler, [], []

    @jax.jit
    def slowly(value):
        none = jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ x), jnp.zeros((600, 600)))[0, 0]
        return value + none.astype(value.dtype)

    def record(source, index, sharding):
        unready.extend(
            a for arrays in made[-1:] for a in jax.tree.leaves(arrays) if not a.is_ready()
        )
        return read(source, index, sharding)

    def filler(*args):
        put = fillers(*args)

        def put_slowly(arrays, values, index):
            made.append(put(arrays, [slowly(values[0]), *values[1:]], index))
            return made[-1]

        return put_slowly

    monkeypatch.setattr(restoring.LeafSource, "record", record)
    monkeypatch.setattr(restoring, "filler", filler)
    with (
        build(Place(3, "device", "1"), tmp_path) as program,
        zj.Checkpointer(tmp_path / "c") as ckpt,
    ):
        ckpt.save(program, program.init(jax.random.key(0)))
        ckpt.restore(program)
    assert len(made) == toys.LAYERS
    assert not unready


def test_a_state_on_disk_never_passes_through_memory_whole(measured):
    row = measured[ON_DISK]
    assert row["sync_bytes"] < SLACK
    assert row["async_bytes"] < SLACK
    assert row["restore_bytes"] < 0.5 * row["state_bytes"]  # the tier's buffers, of 5 layers
