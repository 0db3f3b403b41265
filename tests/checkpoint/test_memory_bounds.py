"""Saving takes the copies that it says, and restoring a process's shards and a record: measured, on states of 150 MB."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "checkpoints.py"
SLACK = 40 << 20  # what compiling takes, and records of 9 MB


@pytest.fixture
def measured(quick_processes, tmp_path):
    def of(row: str):
        command = [sys.executable, str(SCRIPT), str(tmp_path), "--row", row, "--layers", "16", "--hidden", "256"]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return of


def test_copies_are_the_shards_or_within_the_bound(measured):
    whole, bounded = measured("on the device"), measured("on the device, at most 64 MB of copies")
    assert whole["state_bytes"] > 140e6
    assert whole["async_bytes"] > 0.9 * whole["state_bytes"]  # what is measured would be seen
    assert whole["async_bytes"] < whole["state_bytes"] + SLACK
    assert bounded["async_bytes"] < (64 << 20) + SLACK
    for row in (whole, bounded):
        assert row["restore_bytes"] < row["state_bytes"] + row["record_bytes"] + SLACK


def test_a_state_on_disk_never_passes_through_memory_whole(measured):
    row = measured("on disk, the same as the checkpoint's")
    assert row["sync_bytes"] < SLACK
    assert row["async_bytes"] < SLACK
    assert row["restore_bytes"] < 0.6 * row["state_bytes"]  # the tier's buffers, of 5 layers
