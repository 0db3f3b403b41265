"""Whatever system call fails or falls short, no number is wrong and no checkpoint is lost.

Nothing hangs, and each error is reported. One process makes all runs (`runs.py`), under a library
that makes its calls fail (`shim.c`). A finding is printed with the seed of its episode, which
`runs.py` takes as its first seed.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import processes
import pytest
import shim

HERE = pathlib.Path(__file__).parent
LEAKED = 4
"""Number of files that may stay open: what libraries keep, and not one for each run."""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip(
            f"LD_PRELOAD stands in for glibc's functions on Linux, and this is {sys.platform}"
        )
    if shim.compiler() is None:
        pytest.skip("this test needs a C compiler: install cc, or set CC")
    path = tmp_path_factory.mktemp("shim") / "shim.so"
    shim.build(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Return a folder in memory if possible: thousands of files are written and synced."""
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path, prefix="zerojax-faults-"
    ) as made:
        yield pathlib.Path(made)


def run(library, script, *arguments, seconds):
    path = os.pathsep.join([str(HERE), processes.environment()["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, str(HERE / script), str(library), *map(str, arguments)],
        env=processes.environment() | {"LD_PRELOAD": str(library), "PYTHONPATH": path},
        capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip


def test_a_call_of_each_kind_fails_as_planned(library, tmp_path):
    done = run(library, "each_kind.py", tmp_path, seconds=60)
    assert done.returncode == 0, done.stderr


FEW, ALL = "device,nvme", "device,nvme,nvme_tensorstore,nvme_all"
CASES = {
    "15": (FEW, 0, 15),
    "in_forward.9": ("in_forward", 3, 9),
    "in_forward.500": ("in_forward", 200_000, 500),
} | {f"5000.{part}": (ALL, 10_000 * (part + 1), 500) for part in range(10)}


@pytest.mark.by_default("15")
@pytest.mark.parametrize("case", CASES)
def test_what_fails_is_told_and_nothing_is_lost(library, folder, tmp_path, case):
    toys, first, runs = CASES[case]
    (root := folder / "root").mkdir()
    out = tmp_path / "out.json"
    done = run(library, "runs.py", root, toys, first, 3600, runs, out, seconds=3600)
    assert done.returncode == 0, (root.with_name("root.last").read_text(), done.stderr[-10000:])
    report = json.loads(out.read_text())
    print(report["counts"])
    assert report["found"] == [], json.dumps(report, indent=1)
    assert report["counts"]["runs"] == runs
    assert report["counts"]["hit"] > 0.8 * runs
    assert len(report["counts"]["leaked"]) <= LEAKED, report["counts"]
