"""A run stops where its validation loss no longer falls, and a resumed run stops at the same step."""

import contextlib
import json
import math
import types
from typing import Any, cast

import pytest
import train_loop
from selection import METRIC, Selection
from train_loop import LoopOptions

VALIDATION = {2: 5.0, 4: 4.0, 6: math.nan, 8: 4.0, 10: 4.5, 12: 1.0}


class Report:
    """Stands in for `zj.Run`."""

    line = ""
    watch = types.SimpleNamespace(written_a_day=0)

    def __init__(self):
        self.printed: list[str] = []
        self.figures: dict[str, float] = {}
        self.ended = ""

    def step(self, step, metrics):
        pass

    def log(self, step, figures):
        self.figures |= figures

    def print(self, line):
        self.printed.append(line)

    def pause(self):
        return contextlib.nullcontext()


class Saves:
    """Stands in for a checkpointer; `steps` are the steps that it saved."""

    def __init__(self):
        self.steps: dict[int, float] = {}

    def save(self, program, state, *, metrics, data, force):
        if force or state.step % 3 == 0:
            self.steps[state.step] = metrics[METRIC]

    def wait(self):
        pass


def train(selection, start=0, last=12):
    """Train from a step by a program that only counts."""
    options = LoopOptions(eval_every=2, checkpoint_dir="saved")
    step = lambda state, batch: (types.SimpleNamespace(step=state.step + 1), {})  # noqa: E731
    report, saves = Report(), Saves()
    state, is_over = train_loop.train(
        options,
        last,
        cast(Any, types.SimpleNamespace(step=step)),
        cast(Any, types.SimpleNamespace(step=start)),
        iter(range(100)),
        cast(Any, saves),
        cast(Any, report),
        contextlib.nullcontext(),
        lambda state: VALIDATION[int(state.step)],
        selection,
    )
    assert not is_over
    return int(state.step), saves.steps, report


def test_a_run_stops_early_and_a_resumed_run_at_the_same_step(tmp_path):
    step, saved, report = train(Selection(str(tmp_path), 3))
    assert step == 10
    # steps 2 and 4 are new lowest losses, 3, 6 and 9 are due, and 10 is the last
    assert list(saved) == [2, 3, 4, 6, 9, 10]
    assert saved[4] == 4.0
    assert saved[3] == math.inf
    assert report.ended == "stopped early after step 10"
    assert "lowest validation 4.000, at step 4" in report.printed
    assert train(Selection(str(tmp_path), 3), 10)[0] == 10  # nothing is left to do
    for start in (3, 6, 9):
        step, _, report = train(Selection(str(tmp_path), 3), start)
        assert step == 10
    assert report.ended
    # A signal ended a run at step 4, before it was validated.
    (tmp_path / "validations.json").write_text(json.dumps({"format": 1, "losses": {"2": 5.0}}))
    assert train(Selection(str(tmp_path), 3), 4)[0] == 10


def test_without_patience_a_run_goes_on(tmp_path):
    step, saved, report = train(Selection(str(tmp_path), None))
    assert step == 12
    assert saved[12] == 1.0
    assert not report.ended
    assert train(None)[1] == {
        3: math.inf,
        6: pytest.approx(math.nan, nan_ok=True),
        9: math.inf,
        12: 1,
    }


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "losses": {}}', '{"format": 1}'])
def test_a_damaged_record_is_refused_by_name(tmp_path, text):
    (tmp_path / "validations.json").write_text(text)
    with pytest.raises(ValueError, match=r"validations\.json.*Remove it to count"):
        Selection(str(tmp_path), 1)
