"""benchmarks/beside_plain.py and nvme_peers.py run, agree with themselves, and can fail."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import beside_plain
import gpt
import jax
import numpy as np
import nvme_peers
import problem
import problem_in_jax
import pytest
from plain_parts import steps

from zerojax.models.model import init_layered

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SMALL = problem.Problem(layers=2, hidden=32, heads=4, seq=16, vocab=128, batch=4, steps=4)


PARTS = {
    "update": ["the update of stage 0", "the same, with a clipped norm"],
    "imports": ["import zerojax", "import zerojax, and build_train_step", "zerojax --help"],
}


# by default gpu_check.py runs as a process, and the tests below call this benchmark's parts
@pytest.mark.exhaustive
def test_beside_plain_agrees_and_saves_a_table(tmp_path):
    target = tmp_path / "table.md"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "beside_plain.py"),
        *SMALL.arguments(),
        "--rounds",
        "1",
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--parts", "step", *PARTS, "--save", str(target)],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [
        line.split("|")[1].strip()
        for line in target.read_text().splitlines()
        if line.startswith("| ")
    ]
    assert [row for row in rows if row != "contender"] == [
        *(row.name for row in steps.ONE_DEVICE), *(name for names in PARTS.values() for name in names)
    ]  # fmt: skip
    assert "Losses agree within 0.0001" in done.stdout


def test_beside_plain_tells_when_losses_differ():
    found = {
        "step": (
            {"plain": 1.0, "other": 1.5},
            {"plain": [1.0, 0.9, 0.8], "other": [1.0, 0.9, 0.8 + 2e-4, 0.7]},
        )
    }
    assert beside_plain.disagreement([found, found]) == pytest.approx(2e-4)


def test_beside_plain_tells_ratios_within_a_round():
    row = steps.ONE_DEVICE[1]
    rounds = [
        {"step": ({row.base: base, row.name: own}, {})}
        for base, own in ((1.0, 1.5), (2.0, 2.2), (4.0, 4.8))
    ]
    text = beside_plain.table(SMALL, rounds, [], "AVX2", "command")
    assert f"| {row.name} | {row.base} | 2,200.0 | 2,000.0 | 1.20 (1.10 to 1.50) | 1.05 |" in text


@pytest.mark.exhaustive
def test_nvme_peers_agree_and_leave_nothing_on_the_disk(tmp_path):
    target, disk = tmp_path / "table.md", tmp_path / "disk"
    disk.mkdir()
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "nvme_peers.py"),
        *SMALL.arguments(),
        "--rounds",
        "1",
    ]
    command += ["--only", "all on disk", "--swap-dir", str(disk), "--save", str(target)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in target.read_text().splitlines()
        if line.startswith("| zero")
    ]
    assert [row[1] for row in rows] == [nvme_peers.BASE, "zerojax, all on disk"]
    assert all(
        float(row[9]) < 1e-6 for row in rows
    )  # the same weights, whether initialized in memory or on disk
    assert list(disk.iterdir()) == []


def test_problem_in_bf16_begins_with_numbers_of_bf16():
    half = problem.weights(dataclasses.replace(SMALL, precision="bf16"))
    for name, value in problem.weights(SMALL).items():
        np.testing.assert_array_equal(
            half[name], value.astype(jax.numpy.bfloat16).astype(np.float32)
        )


def test_a_model_is_born_with_the_weights_of_the_problem():
    key = jax.random.key(3)
    model = problem_in_jax.born_with_weights(
        gpt.layered_gpt(problem_in_jax.gpt_config(SMALL)), SMALL, key
    )
    made, tree = jax.jit(lambda: init_layered(model, key))(), problem_in_jax.flax_tree(SMALL)
    tree["blocks"] = jax.tree.map(lambda *layers: np.stack(layers), *tree["blocks"].values())
    jax.tree.map(np.testing.assert_array_equal, made, tree)


def nvme_result(seconds: float, losses: tuple[float, ...] = (4.0, 2.0, 1.0, 1.0)) -> dict:
    """Return a contender's report after four steps; the first two do not count."""
    disk = [[int(9e9), int(9e9)], [0, 0], [int(5e6), int(2e6)], [int(20e6), int(4e6)]]
    facts = {"resident_bytes": int(2e9), "version": "some", "hardware": "1 x cpu", "threads": 2}
    return facts | {
        "losses": list(losses),
        "seconds": [9.0, 9.0, seconds, seconds],
        "disk_bytes": disk,
    }


def test_nvme_peers_compare_each_with_its_own_step_in_memory():
    times = {nvme_peers.BASE: 1.0, "zerojax, state on disk": 1.5, "zerojax, all on disk": 4.0}
    times |= {nvme_peers.TORCH: 0.5, nvme_peers.DEEPSPEED: 1.0}
    first = {name: nvme_result(seconds) for name, seconds in times.items()}
    second = first | {nvme_peers.TORCH: nvme_result(1.0), nvme_peers.DEEPSPEED: nvme_result(3.0)}
    text, agree = nvme_peers.table(SMALL, [first, second], "command")
    assert agree
    assert "| zerojax, state on disk | 1500 | 43 | 1.50 | 1.50-1.50 | 10, 2 | 2.00 |" in text
    assert "| DeepSpeed ZeRO-3, NVMe | 2000 | 32 | 2.50 | 2.00-3.00 |" in text
    assert "state on disk: a smaller slowdown than DeepSpeed ZeRO-3, NVMe in 2 of 2 rounds." in text
    assert "all on disk: a smaller slowdown than DeepSpeed ZeRO-3, NVMe in 0 of 2 rounds." in text


@pytest.mark.parametrize("last", [1.0002, 0.9998, float("nan")])
def test_nvme_peers_tell_when_losses_differ(last):
    other = nvme_result(1.0, (4.0, 2.0, 1.0, last))
    text, agree = nvme_peers.table(
        SMALL, [{nvme_peers.BASE: nvme_result(1.0), nvme_peers.TORCH: other}], "command"
    )
    assert not agree
    assert "DO NOT agree" in text


def test_problem_is_the_same_whatever_else_is_made():
    first, again = problem.weights(SMALL), problem.weights(SMALL)
    assert json.dumps(sorted(first)) == json.dumps(sorted(problem.shapes(SMALL)))
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    tokens, targets = problem.batches(SMALL)[0]
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.max() < SMALL.vocab
