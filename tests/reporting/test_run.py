"""A run's figures arrive on time and in the right place, and are on its page however it ends."""

import contextlib
import json
import logging
import os
import pathlib
import re
import signal
import sys
import types
from collections.abc import Callable

import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.reporting import recorder as recorder_module
from zerojax.reporting import run as run_module
from zerojax.reporting import writers


@pytest.fixture(scope="module")
def program():
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(toys.layered(), optax.adam(1e-3), zj.ZeroConfig(stage=1), mesh)


def run_of(program, folder: pathlib.Path, **options) -> zj.Run:
    return zj.Run(folder, program=program, **({"report_to": ()} | options))


def metrics_of(step: int, **others) -> dict[str, object]:
    return {
        "loss": np.float32(8 / step),
        "grad_norm": np.float32(1),
        "skipped_steps": np.float32(0),
        **others,
    }


def make_steps(run: zj.Run, count: int, then: Callable[[], object] = lambda: None) -> None:
    with run:
        for step in range(1, count + 1):
            run.step(step, metrics_of(step))
        then()


def lines_of(folder: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Value:
    """A metric that records when its value is requested."""

    def __init__(self, step: int, asked: list[int]) -> None:
        self.step, self.asked = step, asked

    def __array__(self, dtype=None, copy=None):
        self.asked.append(self.step)
        return np.asarray(self.step, np.float32)


@pytest.mark.parametrize("late", [False, True, None])
def test_a_value_is_asked_for_when_the_next_step_was_started(program, tmp_path, late):
    """On CPUs, which None detects here, figures are reported immediately."""
    asked, before = list[int](), list[list[int]]()
    with run_of(program, tmp_path, late=late) as run:
        for step in range(1, 5):
            run.step(step, {"loss": Value(step, asked)})
            before.append(asked.copy())
        with run.pause():  # waits for all of them
            assert asked == [1, 2, 3, 4]
    assert before == (
        [[], [1], [1, 2], [1, 2, 3]] if late else [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    )
    assert [line["train/loss"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]


def test_figures_are_of_the_steps_since_the_last_pause(program, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    disk = {"swap_read_bytes": 3e9, "swap_write_bytes": 1e9, "swap_stall_seconds": 1.0}
    with run_of(program, tmp_path, tokens=1000, flops_per_token=6e6, steps=8) as run:
        run._speed.peak = 1e10

        def steps(first: int, stop: int, seconds: float) -> None:
            for step in range(first, stop):
                now[0] += seconds
                run.step(step, metrics_of(step, **disk))

        steps(1, 2, 50.0)  # compiles
        assert "speed/tokens_per_second" not in run.figures
        steps(2, 4, 2.0)
        found = {
            name.removeprefix("speed/"): run.figures[name]
            for name in run.figures
            if name.startswith("speed/")
        }
        assert found == pytest.approx(
            {
                "seconds_per_step": 2.0,
                "tokens_per_second": 500.0,
                "model_flops_per_second": 3e9,
                "mfu": 0.3,
                "stall": 0.25,  # one second of two devices' four
                "swap_bytes_per_second": 2e9,
            }
        )
        assert (
            run.line
            == "loss 2.667  norm 1.00  500 tokens/s  3.0 GFLOP/s  MFU 30.0 %  stall 25 %  2.00 GB/s swapped"
        )
        with run.pause():
            now[0] += 1000.0
            run.log(3, {"validation/loss": 2.5})
        steps(4, 6, 4.0)
        assert run.figures["speed/tokens_per_second"] == pytest.approx(250.0)
    page = (tmp_path / "report.html").read_text()
    assert "Ended early, after 5 of 8 steps" in page
    assert re.findall("<figcaption>([^<]*)</figcaption>", page)[:5] == [
        "Loss",
        "Tokens per second",
        "Seconds per step",
        "Utilization (MFU), %",
        "Waiting for the disk, %",
    ]


def test_steps_may_be_numbers_of_numpy(program, tmp_path):
    with run_of(program, tmp_path) as run:
        for step in np.arange(1, 3):
            run.step(step, metrics_of(int(step)))
        run.log(np.int32(2), {"validation/loss": 1.0})
        with pytest.raises(ValueError, match=r"step=2\.5: an integer"):
            run.step(2.5, metrics_of(2))
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 2]


def test_the_rate_of_a_schedule_is_told_where_the_step_does_not_tell_it(program, tmp_path):
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    with run_of(program, tmp_path, schedule=schedule) as run:
        run.step(1, metrics_of(1))
        run.step(
            2, metrics_of(2, skipped_steps=np.float32(1))
        )  # the optimizer has not counted any update
        run.step(3, metrics_of(3, skipped_steps=np.float32(1)))
        run.step(4, metrics_of(4, learning_rate=np.float32(7)))
    rates = [line["train/learning_rate"] for line in lines_of(tmp_path)]
    np.testing.assert_allclose(rates, [0.0, 0.0, 0.1, 7.0], rtol=1e-6)


@pytest.mark.parametrize("end", ["error", "sigterm", "interrupt"])
def test_a_run_that_is_ended_leaves_its_report(program, tmp_path, end):
    # If a shell starts the tests in the background, SIGINT is ignored.
    of_shell = signal.signal(signal.SIGINT, signal.default_int_handler)
    before, kind = (
        signal.getsignal(signal.SIGTERM),
        {"error": ZeroDivisionError, "sigterm": SystemExit},
    )
    expected = kind.get(end, KeyboardInterrupt)

    def leave() -> None:
        if end == "error":
            raise ZeroDivisionError("no <such> number")
        os.kill(os.getpid(), signal.SIGTERM if end == "sigterm" else signal.SIGINT)

    try:
        with pytest.raises(expected) as ended:
            make_steps(run_of(program, tmp_path, late=True), 3, leave)
    finally:
        signal.signal(signal.SIGINT, of_shell)
    assert signal.getsignal(signal.SIGTERM) == before
    page = (tmp_path / "report.html").read_text()
    words = {
        "error": "Failed: ZeroDivisionError: no &lt;such&gt; number.",
        "sigterm": "Stopped by SIGTERM.",
        "interrupt": "Stopped by Ctrl-C.",
    }
    assert words[end] in page
    assert ("in leave" in page.partition("Traceback")[2]) == (end == "error")
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]  # including the last one
    if end == "sigterm":
        assert ended.value.code == 143


def test_a_page_that_cannot_be_written_is_a_warning(program, tmp_path, monkeypatch, caplog):
    def full(path, report):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder_module, "write_page", full)
    with caplog.at_level(logging.WARNING, "zerojax"), pytest.raises(ZeroDivisionError):
        make_steps(run_of(program, tmp_path), 1, lambda: 1 // 0)
    assert "No space left" in caplog.text
    make_steps(run_of(program, tmp_path), 1)


def test_a_run_that_goes_on_keeps_the_steps_before(program, tmp_path):
    """A killed run left steps after its last checkpoint, and a half-written line."""
    for first, stop, loss in ((1, 6, 1.0), (4, 9, 2.0)):
        with run_of(program, tmp_path) as run:
            for step in range(first, stop):
                run.step(step, {"loss": np.float32(loss)})
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "tr')
    whole = (tmp_path / "metrics.jsonl").read_text().splitlines()[:-1]
    assert [json.loads(line)["step"] for line in whole] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [json.loads(line)["train/loss"] for line in whole] == [1.0] * 3 + [2.0] * 5


def test_wandb_gets_the_same_figures(program, tmp_path, monkeypatch):
    """A module of the same name stands in for it."""
    calls = list[tuple]()

    class Stand:
        def log(self, figures, step):
            calls.append(("log", step, figures["train/loss"]))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(**options):
        calls.append(
            ("init", options["project"], options["name"], options["dir"], options["config"])
        )
        return Stand()

    stand = types.SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "wandb", stand)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with pytest.raises(ZeroDivisionError):
        make_steps(
            run_of(program, tmp_path, report_to=("wandb",), config={"a": 1}), 2, lambda: 1 // 0
        )
    name, folder = tmp_path.name, str(tmp_path)
    assert calls == [
        ("init", "zerojax", name, folder, {"a": "1"}),
        ("log", 1, 8.0),
        ("log", 2, 4.0),
        ("finish", 1),
    ]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"report_to": ("wandb",)}, ModuleNotFoundError, "needs wandb: pip install 'wandb'"),
        (
            {"report_to": ("tensorboard",)},
            ModuleNotFoundError,
            r"needs tensorboardX: pip install 'zerojax\[report\]'",
        ),
        (
            {"report_to": "wandb"},
            ValueError,
            "report_to='wandb': a tuple of 'tensorboard', 'wandb'",
        ),
        ({"report_to": ("mlflow",)}, ValueError, "mlflow"),
        ({"profile": -1}, ValueError, "profile=-1: an integer of at least 0"),
        ({"tokens": 0}, ValueError, "tokens=0: an integer of at least 1"),
        ({"config": 3}, ValueError, "config=3: a mapping or a dataclass"),
    ],
)
def test_what_is_missing_is_told_when_a_run_is_made(
    program, tmp_path, monkeypatch, options, error, words
):
    for name in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    with pytest.raises(error, match=words):
        run_of(program, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_rich_is_named_where_it_is_missing(program, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "rich.console", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs rich: pip install 'zerojax\[report\]'"):
        run_of(program, tmp_path)


def test_other_processes_write_nothing(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda *args: 1)
    with run_of(program, tmp_path / "new", report_to=("tensorboard",)) as run:
        for step in (1, 2):
            run.step(step, metrics_of(step))
        run.print("a line")
    assert run.figures["train/loss"] == 4.0  # they have the figures as well
    assert not (tmp_path / "new").exists()
    assert capsys.readouterr().out == ""


def test_steps_are_profiled_from_the_third_on(program, tmp_path, monkeypatch):
    calls, asked = list[str](), list[int]()
    monkeypatch.setattr(
        jax.profiler,
        "start_trace",
        lambda folder: calls.append(f"start after {max(asked)} in {folder}"),
    )
    monkeypatch.setattr(
        jax.profiler, "stop_trace", lambda: calls.append(f"stop after {max(asked)}")
    )
    with run_of(program, tmp_path, profile=2, late=True) as run:
        for step in range(1, 7):
            run.step(step, {"loss": Value(step, asked)})
    assert calls == [f"start after 2 in {tmp_path}", "stop after 4"]
    with run_of(program, tmp_path, profile=9) as run:  # a run that ends before
        for step in range(1, 4):
            run.step(step, {"loss": Value(step, asked)})
    assert calls[2:] == [f"start after 6 in {tmp_path}", "stop after 6"]


def test_a_signal_whose_exception_was_swallowed_ends_the_run_at_the_next_step(program, tmp_path):
    with run_of(program, tmp_path) as run:
        with contextlib.suppress(SystemExit):  # like the garbage collector
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            run.step(1, {"loss": np.float32(2)})
    assert ended.value.code == 143


def test_a_module_that_lacks_another_is_not_called_missing(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'google'", name="google")

    monkeypatch.setattr(writers.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="google"):
        writers.import_writers(("tensorboard",))
