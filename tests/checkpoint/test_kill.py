"""A process killed at any moment, even during a save, continues from a complete checkpoint.

Its losses equal those of an uninterrupted process.
"""

import contextlib
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import killed
import processes
import pytest

import zerojax as zj
from zerojax.checkpoint.manifest import SavedState

LONGEST_RUN = 3.0
"""Maximum seconds for which a process trains and saves before it is killed."""


@contextlib.contextmanager
def worker(
    folder: pathlib.Path, tier: str, last: int
) -> Iterator[tuple[subprocess.Popen[str], int, pathlib.Path]]:
    """Start a process, and yield it once it trains.

    Also yields the step from which it continued and the file of its warnings.
    """
    told = folder / "stderr"
    command = [sys.executable, killed.__file__, str(folder), tier, str(last)]
    with told.open("w") as stderr:
        process = subprocess.Popen(
            command, env=processes.environment(), stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        assert line[:1] == ["ready"], told.read_text()
        yield process, int(line[1]), told
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def assert_whole(directory: pathlib.Path) -> int:
    """Compare every byte of every checkpoint, and return the newest step, or 0."""
    with zj.Checkpointer(directory) as ckpt:
        steps = ckpt.all_steps()
        assert ckpt.latest_step() == (steps[-1] if steps else None)
    assert len(steps) <= killed.KEPT + 1
    for step in steps:
        assert step % killed.EVERY == 0
        with SavedState(str(directory / str(step) / "state")) as saved:
            saved.check(checksums=True)
            assert int(saved.values["step"]) == step
    return steps[-1] if steps else 0


def logged(folder: pathlib.Path, name: str) -> dict[int, set[str]]:
    """Return all losses written for each step, without lines that a kill cut off."""
    found: dict[int, set[str]] = {}
    for line in (folder / name).read_text().split("\n")[:-1]:
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.by_default("1-in_forward_nvme")
@pytest.mark.parametrize("tier", ["device", "nvme", "in_forward", "in_forward_nvme"])
@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_killed_runs_go_on_to_the_same_losses(tmp_path, tier, kills):
    delays, saved, in_saves = random.Random(0), tmp_path / "saved", 0
    longest = LONGEST_RUN if kills > 1 else 1.5
    for kill in range(kills):
        newest = assert_whole(saved)
        with worker(tmp_path, tier, last=1 << 30) as (process, start, told):
            assert start == newest
            assert ("zerojax-swap-0" in told.read_text()) == (
                kill > 0 and tier.endswith("nvme")
            )  # from the process before
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(delays.uniform(0, longest))
                raise AssertionError(told.read_text())
            process.kill()
            assert process.wait() == -signal.SIGKILL
        in_saves += any("tmp" in path.name for path in saved.iterdir())
        assert (tmp_path / "swap" / "zerojax-swap-0").is_dir() == tier.endswith("nvme")
    newest = assert_whole(saved)
    assert newest > 0
    last = max(newest + 3, *logged(tmp_path, "losses"))
    with worker(tmp_path, tier, last) as (process, start, told):
        assert start == newest
        if tier.endswith("nvme"):
            assert "zerojax-swap-0" in told.read_text()
        assert process.wait(300) == 0, told.read_text()
    found, whole = (
        logged(tmp_path, "losses"),
        logged(tmp_path, "whole"),
    )  # from an uninterrupted run
    assert sorted(found) == sorted(whole) == [*range(1, last + 1)]
    assert found == whole
    assert not [path for path in (tmp_path / "swap").iterdir() if path.is_dir()]
    print(f"{in_saves} of {kills} kills were in a save; {newest} steps")
    assert in_saves >= kills // 10
