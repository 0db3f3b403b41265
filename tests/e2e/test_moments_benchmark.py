"""benchmarks/moments.py runs, and its table has differences between runs of one seed."""

import argparse
import os
import pathlib
import subprocess
import sys

import moments
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_table_tells_differences_of_each_seed():
    options = argparse.Namespace(layers=1, hidden=16, seq=8, batch=2, steps=10, seeds=2)
    found = {}
    for seed in range(2):
        for name, more in zip(moments.RUNS, (0.0, 0.01 * (seed + 1), 0.5), strict=True):
            losses = np.r_[
                np.full(8, 9.0), 2 + seed + more, 2 + seed + more
            ]  # the last fifth counts
            found[0.9, name, seed] = moments.Found(losses, 3 + seed - more)
    rows = moments.table(found, options, "command", 60.0).splitlines()[-3:]
    assert rows[0].startswith(
        "| 0.9 | float32 | 2.5000 (2.0000 to 3.0000) | +0.0000 (+0.0000 to +0.0000) | 3.5000 (3.0000"
    )
    assert rows[1].startswith(
        "| 0.9 | bfloat16, stochastic | 2.5150 (2.0100 to 3.0200) | +0.0150 (+0.0100 to +0.0200) |"
    )
    assert rows[1].endswith("| -0.0150 (-0.0200 to -0.0100) |")
    assert rows[2].startswith(
        "| 0.9 | bfloat16, nearest | 3.0000 (2.5000 to 3.5000) | +0.5000 (+0.5000 to +0.5000) |"
    )


def folder(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(
            f"file {i}: the quick brown fox jumps over the lazy dog. " * 20
        )
    return str(text)


@pytest.mark.exhaustive
def test_settings_are_three_from_the_same_weights(tmp_path):
    options = argparse.Namespace(
        layers=1, hidden=16, seq=16, batch=4, steps=8, data=folder(tmp_path)
    )
    found = {name: moments.train(name, 0.9, 0, options).losses for name in moments.RUNS}
    assert len({losses[0] for losses in found.values()}) == 1
    assert len({losses[-1] for losses in found.values()}) == 3
    for losses in found.values():
        np.testing.assert_allclose(losses, found[moments.FLOAT32], rtol=1e-3)


@pytest.mark.exhaustive  # by default the test above trains its settings
def test_benchmark_of_moments_saves_its_table(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "moments.py"),
        "--save",
        str(tmp_path / "table.md"),
    ]
    command += [
        "--layers=1",
        "--hidden=16",
        "--seq=16",
        "--batch=4",
        "--steps=3",
        "--seeds=1",
        "--b2=0.9",
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--data", folder(tmp_path)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "table.md").read_text().splitlines()[-3:]
    assert [row.split(" | ")[1] for row in rows] == list(moments.RUNS)
