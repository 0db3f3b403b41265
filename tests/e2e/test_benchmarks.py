"""benchmarks/step_time.py runs, agrees with itself, and fails when a contender learns something else."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import problem
import step_time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SMALL = problem.Problem(layers=2, hidden=32, heads=4, seq=16, vocab=128, batch=4, steps=4)


def test_step_time_agrees_and_saves_a_table(tmp_path):
    target = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "step_time.py"), *SMALL.arguments(), "--rounds", "1"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--save", str(target)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in target.read_text().splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == [
        "contender", "jax plain", "zerojax stage 0", "zerojax stage 1", "zerojax stage 2", "zerojax stage 3",
        "zerojax stage 3, gather on use", "zerojax stage 0, 1 device",
    ]  # fmt: skip
    assert "Losses agree within 0.0001" in done.stdout


def test_step_time_tells_when_losses_differ():
    entries = [step_time.Contender("jax plain", 1, []), step_time.Contender("other", 2, [])]
    result = {"losses": [1.0, 0.9, 0.8], "seconds": [1.0, 1.0, 2.0], "version": "jax", "hardware": "1 x cpu"}
    other = result | {"losses": [1.0, 0.9, 0.8 + 2e-4], "seconds": [1.0, 1.0, 3.0]}
    text, agree = step_time.table(SMALL, 2, [{"jax plain": result, "other": other}], entries, "command")
    assert not agree
    assert "DO NOT agree" in text
    assert "| other | 2 | 3000 | 1.50 |" in text


def test_problem_is_the_same_whatever_else_is_made():
    first, again = problem.weights(SMALL), problem.weights(SMALL)
    assert json.dumps(sorted(first)) == json.dumps(sorted(problem.shapes(SMALL)))
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    tokens, targets = problem.batches(SMALL)[0]
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.max() < SMALL.vocab
