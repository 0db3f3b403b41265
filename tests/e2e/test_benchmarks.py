"""benchmarks/step_time.py, nvme_peers.py and gpu_check.py run, agree with themselves, and fail when something is wrong."""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import gpt
import gpu_check
import jax
import kernels
import numpy as np
import nvme_peers
import problem
import problem_in_jax
import pytest
import step_time
from gpu_checks.equality import Tolerance, compare
from gpu_checks.jobs import Job
from gpu_checks.mixes import FEW, IN_BACKWARD
from gpu_checks.rows import Row, attempt, line
from gpu_checks.speed import Link, speed_rows
from gpu_checks.turns import Timed

from zerojax.models.model import init_layered

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SMALL = problem.Problem(layers=2, hidden=32, heads=4, seq=16, vocab=128, batch=4, steps=4)


@pytest.mark.exhaustive  # by default gpu_check.py runs as a process, and what follows calls this benchmark's parts
@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["--only", "gather on use"], ["zerojax stage 3, gather on use"]),
        (
            [],
            [
                *(f"zerojax stage {stage}" for stage in range(4)),
                "zerojax stage 3, gather on use",
                "zerojax stage 0, 1 device",
            ],
        ),
    ],
    ids=["some", "all"],
)
def test_step_time_agrees_and_saves_a_table(tmp_path, only, names):
    target = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "step_time.py"), *SMALL.arguments(), "--rounds", "1", *only]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--save", str(target)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in target.read_text().splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["contender", "jax plain", *names]
    assert "Losses agree within 0.0001" in done.stdout


def test_step_time_tells_when_losses_differ():
    entries = [step_time.Contender("jax plain", 1, []), step_time.Contender("other", 2, [])]
    result = {"losses": [1.0, 0.9, 0.8], "seconds": [1.0, 1.0, 2.0], "version": "jax", "hardware": "1 x cpu"}
    other = result | {"losses": [1.0, 0.9, 0.8 + 2e-4], "seconds": [1.0, 1.0, 3.0]}
    text, agree = step_time.table(SMALL, 2, [{"jax plain": result, "other": other}], entries, "command")
    assert not agree
    assert "DO NOT agree" in text
    assert "| other | 2 | 3000 | 1.50 |" in text


@pytest.mark.exhaustive
def test_nvme_peers_agree_and_leave_nothing_on_the_disk(tmp_path):
    target, disk = tmp_path / "table.md", tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, str(ROOT / "benchmarks" / "nvme_peers.py"), *SMALL.arguments(), "--rounds", "1"]
    command += ["--only", "all on disk", "--swap-dir", str(disk), "--save", str(target)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in target.read_text().splitlines() if line.startswith("| zero")]
    assert [row[1] for row in rows] == [nvme_peers.BASE, "zerojax, all on disk"]
    assert all(float(row[9]) < 1e-6 for row in rows)  # the same weights, whether born in memory or on disk
    assert list(disk.iterdir()) == []


def test_problem_in_bf16_begins_with_numbers_of_bf16():
    half = problem.weights(dataclasses.replace(SMALL, precision="bf16"))
    for name, value in problem.weights(SMALL).items():
        np.testing.assert_array_equal(half[name], value.astype(jax.numpy.bfloat16).astype(np.float32))


def test_a_model_is_born_with_the_weights_of_the_problem():
    key = jax.random.key(3)
    model = problem_in_jax.born_with_weights(gpt.layered_gpt(problem_in_jax.gpt_config(SMALL)), SMALL, key)
    made, tree = jax.jit(lambda: init_layered(model, key))(), problem_in_jax.flax_tree(SMALL)
    tree["blocks"] = jax.tree.map(lambda *layers: np.stack(layers), *tree["blocks"].values())
    jax.tree.map(np.testing.assert_array_equal, made, tree)


def nvme_result(seconds: float, losses: tuple[float, ...] = (4.0, 2.0, 1.0, 1.0)) -> dict:
    """Return what a contender tells after four steps; the first two count for nothing."""
    disk = [[int(9e9), int(9e9)], [0, 0], [int(5e6), int(2e6)], [int(20e6), int(4e6)]]
    facts = {"resident_bytes": int(2e9), "version": "some", "hardware": "1 x cpu", "threads": 2}
    return facts | {"losses": list(losses), "seconds": [9.0, 9.0, seconds, seconds], "disk_bytes": disk}


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
    text, agree = nvme_peers.table(SMALL, [{nvme_peers.BASE: nvme_result(1.0), nvme_peers.TORCH: other}], "command")
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


def run_gpu_check(folder: pathlib.Path, *words: str, env: Mapping[str, str] = MappingProxyType({})) -> tuple[str, dict]:
    """Run the script on a CPU with tiny sizes, and return its table and its JSON."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--small", *words]
    command += ["--out", str(folder / "table.md"), "--json", str(folder / "rows.json")]
    env = os.environ | {"JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=450, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "table.md").read_text(), json.loads((folder / "rows.json").read_text())


@pytest.mark.parametrize(
    "left_out",
    [("bf16", "activations", "tiles", "memory", "kernels", "nvme", "speed"), pytest.param((), marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
def test_gpu_check_runs_on_a_cpu_and_every_bound_holds(tmp_path, left_out):
    """What is left out by default does what "fp32" does, of other mixes, needs a GPU, or is in test_kernel_benchmark.py."""
    checks = [name for name in gpu_check.CHECKS if name not in left_out]
    # The bounds of "activations" are those of the fusions that users have.
    env = {} if "activations" in left_out else {"XLA_FLAGS": ""}
    text, facts = run_gpu_check(tmp_path, "--only", *checks, env=env)
    rows = {name: {row["name"]: row for row in rows} for name, rows in facts["rows"].items()}
    assert list(rows) == checks
    for check in {"slices", "fp32", "tiles"} - set(left_out):
        assert rows[check], check
        assert all(row["ok"] is True for row in rows[check].values())
    assert len(rows["fp32"]) == len(FEW["fp32"])
    if "memory" not in left_out:
        assert rows["memory"]["peak device memory"]["figure"] == "skipped: cpu devices do not count theirs"
    if "speed" not in left_out:
        speed = rows["speed"]
        assert speed["all, in_backward: step over resident"]["values"]["ratio"] > 0
        link = speed["all, in_backward: link"]["values"]
        assert link["to_device"] > link["to_host"] > 0
        assert "FSDP2, CPUOffloadPolicy" in speed
    if "kernels" not in left_out:
        assert {row["ok"] for name, row in rows["kernels"].items() if name.endswith(("xla", "unfused"))} == {True}
    if "nvme" not in left_out:
        assert rows["nvme"]["all, activations, clipped"]["ok"] is True
        disk = rows["nvme"]["timed: all, in_backward: disk"]["values"]
        assert disk["read_bytes"] > disk["write_bytes"] > 0
    assert all(row["ok"] is not False for found in rows.values() for row in found.values())
    assert facts["versions"]["jax"] == jax.__version__
    assert "| fp32 | half of opt_state, distance 2 | loss " in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("checks", [("slices", "memory"), ("slices", "memory", "kernels")], ids=["some", "all"])
@pytest.mark.usefixtures("h200_compiler")
def test_gpu_check_compiles_without_a_gpu(tmp_path, checks):
    text, facts = run_gpu_check(tmp_path, "--compile-only", "--only", *checks)
    rows = {name: {row["name"]: row for row in rows} for name, rows in facts["rows"].items()}
    assert rows["slices"]["update"]["values"]["slices"] == 2
    streamed = rows["memory"]["all, activations, in_backward"]
    assert streamed["ok"] is True
    assert streamed["values"]["slices"] > 0
    if "kernels" in checks:
        assert len(rows["kernels"]) == len(kernels.cases(small=True))
        assert all(row["ok"] is True for row in rows["kernels"].values())
    assert "an H200 that is not there" in text


def test_gpu_check_goes_on_after_a_failure(tmp_path):
    def breaks():
        yield Row("first", "1", ok=True)
        raise RuntimeError("broken | here") from OSError("the disk")

    def refuses():
        raise NotImplementedError("not built")
        yield

    first, second = attempt("breaks", breaks)
    assert first.ok
    assert (second.ok, second.figure) == (False, "RuntimeError: broken | here OSError: the disk")
    assert line("check", second) == "| check | breaks | RuntimeError: broken / here OSError: the disk |  | NO |"
    (row,) = attempt("refuses", refuses)
    assert (row.ok, row.figure) == (None, "skipped: not built")
    options = argparse.Namespace(small=True, compile_only=False, peer_python=None, limit=1.0)
    for seconds, why in ((0.05, "stopped after 0 s"), (0.0, "not run: the others took the 1 s")):
        _, (row,) = gpu_check.run_check("slices", options, str(tmp_path), seconds)
        assert row.ok is False
        assert row.figure == why


def test_gpu_check_sees_another_loss_and_another_parameter():
    job = Job(name="mix", problem=SMALL, fields={})
    tolerance = Tolerance(ulp=2, params=1e-6, gradients=1e-6)
    losses, leaves = np.array([2, 1], np.float32), [np.array([0, 4], np.float32), np.zeros(2, np.float32)]

    def compared(losses, leaves):
        right = (np.array([2, 1], np.float32), leaves_before, [np.array([0, 4], np.float32), np.zeros(2, np.float32)])
        return compare(job, (losses, leaves_before, leaves), right, tolerance)

    leaves_before = [np.zeros(2, np.float32)] * 2
    assert compared(losses, leaves).values == {"loss_ulp": 0, "params": 0}
    near = compared(np.nextafter(losses, np.float32(9)), leaves)
    assert near.ok
    assert near.values["loss_ulp"] == 1
    assert not compared(losses * np.float32(1.0001), leaves).ok
    assert not compared(losses * np.float32("nan"), leaves).ok
    assert compared(losses, [leaves[0] + np.float32([1, 0]), leaves[1]]).values["params"] == 0.25
    assert not compared(losses, [leaves[0], leaves[1] + np.float32(1e-20)]).ok  # a leaf that is zero must stay so


@pytest.mark.parametrize(("step", "hidden", "floor"), [(3.0, 1.0, 1.0), (4.0, 0.0, 4 / 3)])
def test_gpu_check_tells_how_much_of_the_transfers_is_hidden(step, hidden, floor):
    job = Job(name="mix", problem=SMALL, fields=IN_BACKWARD)
    link = Link(to_device=20.0, to_host=10.0, both=25.0)
    assert link.seconds(20.0, 5.0) == 1.0
    assert link.seconds(20.0, 20.0) == 2.0
    assert link.seconds(25.0, 12.5) == 1.5
    rows = list(speed_rows(job, Timed([step] * 3, [3.0] * 3, [{"loss": 1.0}] * 3, 20, 5), link))
    assert [row.name for row in rows] == ["mix: step over resident", "mix: link", "mix: transfers hidden"]
    assert rows[0].values["ratio"] == step / 3
    assert rows[2].values["hidden"] == hidden
    assert rows[2].values["over_floor"] == floor
