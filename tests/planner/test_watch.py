"""A run compared with its plan: what is reported, once, and what is not."""

import dataclasses
import logging

import jax
import pytest

import zerojax as zj
from zerojax.planner import StepWatch, plan
from zerojax.planner import watch as watch_module

pytestmark = pytest.mark.xdist_group("watch")  # which share a plan
MACHINE = zj.Machine(
    name="toy", device_bytes=10**12, host_bytes=10**12, disk_bytes=10**12, disk_tbw_bytes=6 * 10**14,
    flops={"bf16": 1e12, "fp32": 1e12}, memory_rate=1e12, link_up=1e10, link_down=1e10, link_both=2e10, disk_read=3e9,
    disk_write=3e9, disk_both=3e9,
)  # fmt: skip


@pytest.fixture(scope="module")
def planned() -> zj.Plan:
    sizes = zj.Sizes(layers=2, hidden=256, heads=4, seq=128, batch=2, vocab=512)
    return plan(
        sizes, machine=MACHINE, fixed={"precision": "bf16", "params": "nvme", "opt_state": "nvme"}
    )


class Clock:
    """A clock that passes the given seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(watch_module.time, "perf_counter", lambda: self.now)

    def run(self, watch: StepWatch, seconds: float, steps: int = 30, **metrics: float) -> None:
        for _ in range(steps):
            self.now += seconds
            watch.step(metrics)


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name == "zerojax"
    ]


def waited(planned: zj.Plan, more: float = 0.0) -> float:
    """Return the metric of a step that waits for the disk as planned, plus `more` seconds."""
    exposed = planned.time.exposed
    return (exposed["read"] + exposed["write"] + more) * jax.local_device_count()


def test_a_step_as_planned_is_not_told(planned, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "zerojax"):
        Clock(monkeypatch).run(StepWatch(planned), 1.19 * planned.seconds)
    assert told(caplog, logging.WARNING) == []


@pytest.mark.parametrize("factor", [0.75, 1.25])
def test_a_step_off_its_plan_is_told_once(planned, monkeypatch, caplog, factor):
    watch = StepWatch(planned)
    with caplog.at_level(logging.INFO, "zerojax"):
        Clock(monkeypatch).run(watch, factor * planned.seconds, swap_stall_seconds=waited(planned))
    (line,) = told(caplog, logging.WARNING)
    assert f"{100 * (factor - 1):+.0f} %" in line
    assert "compute" in line
    assert watch.seconds == pytest.approx(factor * planned.seconds)


def test_the_disk_is_at_fault_where_it_is_waited_for(planned, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "zerojax"):
        stall = waited(planned, 0.8 * planned.seconds)
        Clock(monkeypatch).run(StepWatch(planned), 2 * planned.seconds, swap_stall_seconds=stall)
    (line,) = told(caplog, logging.WARNING)
    assert "disk" in line


def test_bytes_a_day_and_days_left(planned, monkeypatch, caplog):
    watch = StepWatch(machine=MACHINE)
    with caplog.at_level(logging.INFO, "zerojax"):
        Clock(monkeypatch).run(watch, 2.0, swap_write_bytes=3e9)
    assert watch.written_a_day == pytest.approx(1.5e9 * 86400)
    assert watch.disk_days == pytest.approx(6e14 / (1.5e9 * 86400))
    (line,) = told(caplog, logging.INFO)
    assert "130 TB per day" in line
    assert "5 days" in line


def test_the_first_step_and_pauses_do_not_count(planned, monkeypatch):
    clock, watch = Clock(monkeypatch), StepWatch(planned)
    clock.run(watch, 100.0, steps=1)
    for _ in range(12):
        clock.run(watch, 1.0, steps=2)
        clock.now += 50.0
        watch.pause()
        clock.run(watch, 1.0, steps=1)
    assert watch.seconds == pytest.approx(1.0)


def test_a_machine_of_a_plan_is_its_own(planned):
    assert StepWatch(planned).machine is planned.machine
    other = dataclasses.replace(MACHINE, disk_tbw_bytes=1)
    assert StepWatch(planned, machine=other).machine is other


def test_watch_refuses_what_is_no_plan_machine_or_metrics():
    with pytest.raises(ValueError, match=r"plan must be a zerojax\.Plan, got 'x'"):
        StepWatch("x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"machine must be a zerojax\.Machine, got 'l4'"):
        StepWatch(machine="l4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"metrics=None: pass the metrics that program\.step returns"
    ):
        StepWatch().step(None)  # pyright: ignore[reportArgumentType]
