"""The example, stopped by a signal, continues from its last step.

Its losses are those of an uninterrupted run.
"""

import contextlib
import gzip
import io
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
import test_train_gpt as t
import train_gpt

import zerojax as zj

pytestmark = pytest.mark.xdist_group("resumed_gpt")
STEPS = 24
NAMES = ("train/loss", "validation/loss")


def arguments(folder: pathlib.Path, text: str, sample_bytes: int = 0) -> list[str]:
    """Return the options that all runs share.

    At the default learning rate, so short a run would be unstable and magnify rounding.
    """
    sizes = [
        "--steps",
        str(STEPS),
        "--seq",
        "32",
        "--batch-size",
        "8",
        "--eval-every",
        "3",
        "--learning-rate",
        "3e-4",
    ]
    sizes += ["--sample-bytes", str(sample_bytes)]
    return ["--data", text, *sizes, "--logdir", str(folder / "log")]


def saving(folder: pathlib.Path) -> list[str]:
    return ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "4", "--keep", "2"]


def figures(folder: pathlib.Path) -> list[dict[str, dict[int, float]]]:
    """Return the figures of each run that wrote below a folder, in order."""
    return [
        {n: t.events(p, n) for n in NAMES}
        for p in sorted((folder / "log").glob("events.out.tfevents.*"))
    ]


def stopped(folder: pathlib.Path, text: str, number: int, processes: int = 1) -> int:
    """Run until a checkpoint exists, and send a signal to the last process.

    Returns the step at which all processes stopped.
    """
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        str(t.ROOT / "examples" / "train_gpt.py"),
        *arguments(folder, text),
        *saving(folder),
    ]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    workers = []
    for me in range(processes):
        env = t.os.environ | {"JAX_PLATFORMS": "cpu"}
        if processes > 1:
            env |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(me),
            }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        devices = ["--devices", str(2 // processes)]
        workers.append(subprocess.Popen([*command, *devices], env=env, cwd=folder, **pipes))
    try:
        end = time.monotonic() + 120
        while not (folder / "saved" / "4").is_dir():
            assert time.monotonic() < end
            assert all(worker.poll() is None for worker in workers), [
                worker.communicate() for worker in workers
            ]
            time.sleep(0.02)
        workers[-1].send_signal(number)
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * processes, outputs
    for stdout, _ in outputs[1:]:  # only the first process prints; gloo writes lines of its own
        assert not any(word in stdout for word in ("loss", "parameters", "sample"))
    told = "stopped by a signal after step "
    (line,) = (line for line in outputs[0][0].splitlines() if line.startswith(told))
    return int(line.removeprefix(told).split(",")[0])


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Yield `train(*arguments)`, which runs in this process with one program for all calls.

    It returns the output.
    """
    text, programs = t.folder(tmp_path_factory.mktemp("text")), []
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])

    def train(*arguments: str) -> str:
        options = train_gpt.parse(arguments)
        if not programs:
            programs.append(train_gpt.build(options, mesh)[:2])
        ((c, program),) = programs
        ckpt = train_gpt.open_checkpoints(options)
        with ckpt or contextlib.nullcontext(), contextlib.redirect_stdout(io.StringIO()) as printed:
            train_gpt.run(options, c, program, train_gpt.prepare(options, c, program), ckpt)
        return printed.getvalue()

    yield train, text
    for _, program in programs:
        program.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, here):
    """Return the text, and the figures and output of an uninterrupted run."""
    folder, (train, text) = tmp_path_factory.mktemp("whole"), here
    printed = train(*arguments(folder, text, sample_bytes=20))
    assert "--- sample ---" in printed
    return text, figures(folder)[0], printed


def resumed(
    folder: pathlib.Path, text: str, step: int, train: Callable[..., str]
) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """Continue in one process, and return the figures before and after."""
    assert f"continues from step {step} of" in train(
        *arguments(folder, text), *saving(folder), "--resume", "True"
    )
    assert sorted(int(path.name) for path in (folder / "saved").iterdir() if path.is_dir()) == [
        STEPS - STEPS % 4 - 4,
        STEPS,
    ]
    before, after = figures(folder)
    assert list(before["train/loss"]) == [*range(1, step + 1)]
    assert list(after["train/loss"]) == [*range(step + 1, STEPS + 1)]
    assert list(after["validation/loss"]) == [
        s for s in range(step + 1, STEPS + 1) if s % 3 == 0 or s == STEPS
    ]
    return before, after


# by default test_kill.py compares the losses bit for bit, and the test below stops a run
@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_to_the_same_losses(tmp_path, whole):
    text, expected, _ = whole
    step = stopped(tmp_path, text, signal.SIGINT)
    assert 4 <= step < STEPS
    refused = t.run(tmp_path, *arguments(tmp_path, text), *saving(tmp_path))
    assert refused.returncode == 2
    assert f"holds checkpoints up to step {step}: --resume True" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1

    def train(*arguments: str) -> str:
        done = t.run(tmp_path, *arguments, "--devices", "2")
        assert done.returncode == 0, done.stderr
        return done.stdout

    for found in resumed(tmp_path, text, step, train):
        for name in NAMES:
            assert found[name] == {s: expected[name][s] for s in found[name]}


@pytest.mark.exhaustive  # by default test_two_processes.py stops two processes
def test_processes_stop_at_one_step_and_one_process_goes_on(tmp_path, whole, here):
    """One of two processes is sent the signal; one process's iterator replaces both."""
    text, expected, _ = whole
    step = stopped(tmp_path, text, signal.SIGTERM, processes=2)
    assert 4 <= step < STEPS
    for found in resumed(tmp_path, text, step, here[0]):
        for name in NAMES:
            np.testing.assert_allclose(
                list(found[name].values()),
                [expected[name][s] for s in found[name]],
                rtol=1e-4,
                err_msg=name,
            )


# by default test_larger_than_memory.py trains a GPT on disk, and test_kill.py compares such losses
@pytest.mark.exhaustive
def test_train_gpt_with_states_on_disk_equals_the_run_in_memory(tmp_path, whole):
    """Losses, validation and the sampled text are the same.

    The lines mention the disk, and nothing is left on it.
    """
    text, expected, in_memory = whole
    (swap := tmp_path / "swap").mkdir()
    trace = tmp_path / "trace.json.gz"
    tiers = [
        "--params",
        "nvme",
        "--opt-state",
        "nvme",
        "--swap-dir",
        str(swap),
        "--swap-trace",
        str(trace),
    ]
    done = t.run(tmp_path, *arguments(tmp_path, text, sample_bytes=20), *tiers, "--devices", "2")
    assert done.returncode == 0, done.stderr
    (found,) = figures(tmp_path)
    for name, count in zip(NAMES, (STEPS, STEPS // 3), strict=True):
        assert found[name].keys() == expected[name].keys()
        assert len(found[name]) == count
        np.testing.assert_allclose(
            list(found[name].values()), list(expected[name].values()), rtol=0, atol=1e-5
        )
    assert done.stdout.split("--- sample ---")[1] == in_memory.split("--- sample ---")[1]
    assert "stall" not in in_memory
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    for line in lines[1:]:
        told = re.search(r"stall (\d+) %  (\d+\.\d\d) GB/s swapped", line)
        assert told, line
        assert int(told[1]) <= 100
        assert float(told[2]) > 0
    assert not [path for path in swap.iterdir() if path.is_dir()]
    drawn = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    runs = [event["name"].split()[0] for event in drawn if event.get("cat") == "steps"]
    assert runs == ["step"] * 3 + ["eval"] * runs.count("eval")


def test_resume_needs_a_directory(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--resume", "True"])
    monkeypatch.setattr(train_gpt, "start", None)  # otherwise it would train here
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "train_gpt.py: error: --resume True: from which --checkpoint-dir?"
    ]
