"""Checkpoints of an earlier version are restored by this one, elsewhere, and trained on from.

The restored state is the same bit for bit.
"""

import json
import tarfile

import jax
import numpy as np
import older
import pytest

import zerojax as zj

HOST, DISK = "pinned_host", "nvme"
ON_HOST = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
CASES = {
    "memory to disk": (
        "memory",
        {"fsdp": 2},
        {"params": DISK, "opt_state": DISK, "grads": DISK, "clip_norm": 0.5},
    ),
    "memory to pinned_host": ("memory", {"data": 2, "fsdp": 4}, {**ON_HOST, "clip_norm": 0.5}),
    "disk to memory": (
        "disk",
        {"fsdp": 8},
        {"stage": 1, "precision": "fp16", "moments": "bfloat16"},
    ),
}
ROUNDING = {"memory": 1e-5, "disk": 2e-4}
"""Tolerances of later losses, which depend on summation order and processor: float32, float16."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive if HOST in n else ()) for n in CASES]
)
def test_older_checkpoint_is_restored_elsewhere_and_trained_on_from(name, tmp_path, monkeypatch):
    source, axes, fields = CASES[name]
    expected = json.loads((older.DATA / older.EXPECTED).read_text())[source]
    with tarfile.open(older.DATA / f"{source}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    with older.build(axes, {"stage": 3, **fields}) as program, zj.Checkpointer(source) as ckpt:
        state = ckpt.restore(program)
        assert (int(state.step), int(state.skipped)) == (older.STEPS, expected["skipped"])
        assert older.weights(program, state) == expected["weights"]
        if "opt_state" not in fields:
            assert [older.digest(leaf) for leaf in jax.tree.leaves(state.opt_state)] == expected[
                "opt_state"
            ]
        losses, _ = older.train(
            program, state, older.batches(program.config.precision)[older.STEPS :]
        )
    np.testing.assert_allclose(
        losses, [float.fromhex(loss) for loss in expected["losses"]], rtol=ROUNDING[source]
    )
    assert losses[0] != losses[1]
