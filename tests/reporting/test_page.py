"""A run's page shows what its user asks, however the run went, and stays one plain file."""

import contextlib
import dataclasses
import html.parser
import json
import math
import re
import shlex
import sys

import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.reporting import run as run_module
from zerojax.reporting.folder import SESSIONS
from zerojax.reporting.page import escape
from zerojax.reporting.sessions import read_command
from zerojax.reporting.settings import flatten_settings
from zerojax.reporting.speed import LONGEST, Speed
from zerojax.reporting.summary import format_duration

NASTY = "<script>alert(1)</script> & \" ' \x1b[31m"


@dataclasses.dataclass
class Sizes:
    layers: int = 2
    hidden: int = 8


@dataclasses.dataclass
class Options:
    model: str
    rate: float = 0.1
    seed: int = 0
    words: list[str] = dataclasses.field(default_factory=list)
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    zero: zj.ZeroConfig = dataclasses.field(default_factory=zj.ZeroConfig)


@pytest.fixture(scope="module")
def program():
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(toys.layered(), optax.adam(1e-3), zj.ZeroConfig(stage=1), mesh)


def make_run(program, folder, **options):
    return zj.Run(folder, program=program, **({"report_to": ()} | options))


def take_steps(run, first, stop, losses=None, skipped=0):
    for step in range(first, stop):
        loss = 8 / step if losses is None else losses[step]
        metrics = {"loss": np.float32(loss), "grad_norm": np.float32(1)}
        run.step(step, metrics | {"skipped_steps": np.float32(skipped)})


def validate(run, losses):
    for step, loss in losses.items():
        with run.pause():
            run.log(step, {"validation/loss": loss})


def read_page(folder):
    return (folder / "report.html").read_text()


def read_facts(folder):
    """Return the facts at the top of the page by name."""
    pairs = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", read_page(folder))
    return dict(pairs)


class Outline(html.parser.HTMLParser):
    """Check that elements are closed in order, and collect their names and attributes."""

    EMPTY = ("meta", "link")

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def find(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_page_shows_when_the_run_began_and_how_long_it_took(program, tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    run_module.time.tzset()
    now = [1_000_000.0]
    monkeypatch.setattr(run_module.time, "time", lambda: now[0])
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 3)
        now[0] += 3700
    facts = read_facts(tmp_path)
    assert facts["Started"] == "1970-01-12 13:46:40+00:00"
    assert facts["Duration"] == "1 h 01 min"
    assert facts["Steps"] == "2"


def test_the_page_shows_the_command_line(program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--name", NASTY, "\udcff"])
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 2)
    command = read_command()
    assert shlex.split(command)[:4] == ["python", "train.py", "--name", NASTY]
    page = read_page(tmp_path)
    assert "<script" not in page
    assert f"<pre>{escape(command)}</pre>" in page
    assert "&lt;script&gt;" in escape(command)
    assert "\\udcff" in page
    assert "\x1b" not in page


def test_the_page_shows_samples_as_they_are(program, tmp_path, capsys):
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 2)
        run.sample("f(x):\n  <b>", prompt="def ")
        run.sample(f"{NASTY} \ud800")
    page = read_page(tmp_path)
    assert "<pre><b>def </b>f(x):\n  &lt;b&gt;</pre>" in page
    assert "<script" not in page
    assert "\\ud800" in page
    assert "--- sample ---\ndef f(x):\n  <b>" in capsys.readouterr().out


def test_the_page_shows_the_best_and_the_first_validation_loss(program, tmp_path):
    with make_run(program, tmp_path) as run:
        validate(run, {0: 6.0})
        take_steps(run, 1, 5)
        validate(run, {2: math.nan, 3: 2.5, 4: 2.75})
    facts = read_facts(tmp_path)
    assert facts["First validation loss"] == "6.0000 at step 0"
    assert facts["Best validation loss"] == "2.5000 at step 3"
    assert facts["Last validation loss"] == "2.7500 at step 4"
    assert facts["Training loss"] == "2.0000 at step 4 (first 8)"


def test_a_run_without_validation_says_so(program, tmp_path):
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 3)
    assert read_facts(tmp_path)["Validation loss"] == "not measured"


def test_the_page_shows_rates_of_the_last_interval(program, tmp_path, monkeypatch):
    """A run that became slower does not show the mean with its faster steps."""
    now = [0.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])

    def take(run, first, seconds):
        for step, each in enumerate(seconds, first):
            now[0] += each
            take_steps(run, step, step + 1)

    with make_run(program, tmp_path, tokens=1000, flops_per_token=1e6) as run:
        take(run, 1, [1.0] * 5)
        validate(run, {5: 1.0})
        take(run, 6, [3.0, 4.0, 5.0])
        assert "250 tokens/s" in run.line
    facts = read_facts(tmp_path)
    assert facts["Tokens per second"] == "250 in steps 6 to 8"
    assert facts["Seconds per step"] == "4 in steps 6 to 8"
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    rates = [line["speed/seconds_per_step"] for line in lines if line.get("speed/seconds_per_step")]
    assert rates == [1.0] * 4 + [3.0, 4.0, 5.0]


def test_an_interval_of_one_step_names_it(program, tmp_path):
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 3)
    assert read_facts(tmp_path)["Seconds per step"].endswith(" in step 2")


def test_an_interval_without_pauses_has_a_longest_length():
    speed = Speed(tokens=10)
    for step in range(1, 2 * LONGEST + 12):
        speed.add(step, {}, now=1.0 * step if step <= LONGEST else LONGEST + 2.0 * (step - LONGEST))
    assert speed.interval.num_steps == 10
    assert speed.measure_interval()["speed/tokens_per_second"] == 5.0


def test_the_page_shows_chosen_options_first_and_folds_the_others(program, tmp_path):
    options = Options(model="<m>", rate=0.2, sizes=Sizes(hidden=16))
    with make_run(program, tmp_path, config=options) as run:
        take_steps(run, 1, 2)
    page = read_page(tmp_path)
    section = page.partition("<h2>Options</h2>")[2].partition("</section>")[0]
    chosen, _, folded = section.partition("<details>")
    rows = re.findall('<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', chosen)
    assert rows == [
        ("model", "&lt;m&gt;", ""),
        ("rate", "0.2", "0.1"),
        ("sizes.hidden", "16", "8"),
    ]
    assert "3 options with their defaults" in folded
    assert re.findall('<th scope="row">(.*?)</th>', folded) == ["seed", "words", "sizes.layers"]
    config = page.partition("<h2>ZeroConfig</h2>")[2].partition("<details>")[0]
    assert '<th scope="row">stage</th><td>1</td>' in config
    assert "zero.stage" not in page


def test_a_mapping_has_no_defaults():
    config = {"a": {"b": None}, "zero": zj.ZeroConfig(stage=2)}
    settings = {setting.name: setting for setting in flatten_settings(config)}
    assert (settings["a.b"].value, settings["a.b"].is_default) == ("None", False)
    assert (settings["zero.stage"].value, settings["zero.stage"].is_default) == ("2", False)


def test_the_page_shows_versions_and_devices(program, tmp_path):
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 2)
    section = read_page(tmp_path).partition("<h2>Versions and devices</h2>")[2]
    rows = dict(re.findall('<th scope="row">(.*?)</th><td>(.*?)</td>', section))
    assert rows["jax"] == jax.__version__
    assert rows["mesh"].startswith("2 x cpu")
    assert {"python", "host", "devices", "cores", "host memory"} <= rows.keys()


def test_the_page_shows_bytes_by_tier_against_capacity(program, tmp_path):
    (batch,) = toys.batches(1)
    memory = program.memory(batch)
    with make_run(program, tmp_path, memory=memory) as run:
        take_steps(run, 1, 2)
    page = read_page(tmp_path)
    figure = page.partition('<figure id="bytes-device">')[2].partition("</figure>")[0]
    assert figure.count('class="stripe"') == len([n for n in memory.tiers["device"].values() if n])
    assert figure.count('class="capacity"') == 1
    assert "params" in figure
    facts = read_facts(tmp_path)
    assert facts["Parameters"] == f"{memory.num_params:,}"
    assert "Peak resident memory of this process" in facts


def test_the_page_shows_waits_for_the_disk(program, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    disk = {"swap_read_bytes": 3e9, "swap_write_bytes": 1e9, "swap_stall_seconds": 1.0}
    with make_run(program, tmp_path) as run:
        for step in range(1, 4):
            now[0] += 2.0
            run.step(step, {"loss": np.float32(1), **disk})
    facts = read_facts(tmp_path)
    assert facts["Waiting for the disk"] == "25.0 % of the time in steps 2 to 3"
    assert facts["Disk traffic"] == "2.00 GB/s in steps 2 to 3"


def test_the_page_has_curves_of_training_and_validation(program, tmp_path):
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 5)
        validate(run, {4: 2.5})
    labels = [
        svg["aria-label"] for svg in Outline(read_page(tmp_path)).find("svg") if "role" in svg
    ]
    assert labels[0] == (
        "Loss over steps. training: 8 at step 1, least 2 at step 4, last 2 at step 4. "
        "validation: 2.5 at step 4, least 2.5 at step 4, last 2.5 at step 4."
    )


@pytest.mark.parametrize("steps", [0, None])
def test_a_run_of_zero_steps_has_a_page(program, tmp_path, steps):
    with make_run(program, tmp_path, steps=steps):
        pass
    page = read_page(tmp_path)
    Outline(page)
    assert "Finished." in page
    assert "No figures were reported." in page
    assert read_facts(tmp_path)["Steps"] == ("0 of 0" if steps == 0 else "0")


def test_a_run_that_fails_before_its_first_step_shows_why(program, tmp_path):
    """A script that exits because of an error shows that error."""

    def fail():
        with make_run(program, tmp_path):
            try:
                raise ValueError("--seq 7: <even> numbers only")
            except ValueError:
                sys.exit(2)

    with pytest.raises(SystemExit):
        fail()
    page = read_page(tmp_path)
    Outline(page)
    assert "<li>ValueError: --seq 7: &lt;even&gt; numbers only</li>" in page
    assert "Traceback (most recent call last)" in page


def test_a_run_that_never_begins_keeps_an_earlier_page(program, tmp_path):
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 3)
    page = read_page(tmp_path)
    with contextlib.suppress(ZeroDivisionError), make_run(program, tmp_path):
        raise ZeroDivisionError
    assert read_page(tmp_path) == page
    assert not (tmp_path / "report.1.html").exists()


def test_a_loss_of_nan_is_a_problem_and_not_an_error(program, tmp_path):
    losses = {1: 3.0, 2: math.nan, 3: math.inf, 4: math.nan}
    with make_run(program, tmp_path) as run:
        take_steps(run, 1, 5, losses, skipped=3)
        validate(run, {4: math.nan})
    page = read_page(tmp_path)
    Outline(page)
    assert "<li>The training loss was not finite at 3 steps, first at step 2.</li>" in page
    assert "<li>The validation loss was not finite at one step, first at step 4.</li>" in page
    facts = read_facts(tmp_path)
    assert facts["Best validation loss"] == "none is finite"
    assert facts["Skipped steps"] == "3"
    all_nan = tmp_path / "all"
    with make_run(program, all_nan) as run:
        take_steps(run, 1, 3, {1: math.nan, 2: math.nan})
    Outline(read_page(all_nan))
    assert read_facts(all_nan)["Training loss"] == "nan at step 2 (first nan)"


def test_the_page_shows_notices_of_skipped_steps(program, tmp_path):
    with make_run(program, tmp_path) as run:
        for step in range(1, 31):
            run.step(step, {"loss": np.float32(np.nan), "grads_finite": np.float32(0)})
    assert "<li>Step 10: 10 steps in a row were skipped" in read_page(tmp_path)


def test_a_resumed_run_shows_all_its_sessions(program, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    with make_run(program, tmp_path, steps=9) as run:
        validate(run, {0: 5.0})
        take_steps(run, 1, 4)
        run.ended = "stopped by a signal after step 3"
        now[0] += 100.0
    started = read_facts(tmp_path)["Started"]
    with make_run(program, tmp_path, steps=9) as run:
        run.begin(4)
        page = read_page(tmp_path)
        take_steps(run, 4, 10)
        validate(run, {9: 2.0})
        now[0] += 20.0
    assert "Running." in page
    assert "<td>100.0 s</td>" not in page
    page, facts = read_page(tmp_path), read_facts(tmp_path)
    Outline(page)
    assert facts["Started"] == started
    assert facts["Duration"] == "2 min 00 s in 2 sessions"
    assert facts["Resumed"].endswith("at step 4")
    assert facts["First validation loss"] == "5.0000 at step 0"
    assert facts["Steps"] == "9 of 9"
    section = page.partition("<h2>Sessions</h2>")[2].partition("</section>")[0]
    assert re.findall("<td>([^<]*)</td>", section)[:3] == [
        "1 min 40 s",
        "1 to 3",
        "stopped by a signal after step 3",
    ]
    assert re.findall("<td>([^<]*)</td>", section)[3:] == ["20.0 s", "4 to 9", "finished"]
    assert not (tmp_path / "report.1.html").exists()


def test_a_session_that_was_killed_is_called_so(program, tmp_path):
    with make_run(program, tmp_path) as run:
        run.begin()
        sessions = (tmp_path / SESSIONS).read_text()
        take_steps(run, 1, 4)
    (tmp_path / SESSIONS).write_text(sessions)  # as the kill left it
    with make_run(program, tmp_path) as run:
        run.begin(4)
    assert "<td>killed</td>" in read_page(tmp_path)


@pytest.mark.parametrize(
    "damaged", [b"", b"[3]", b"{}", b'[{"started": 1}]', b"\xff", b"[" * 100_000]
)
def test_damaged_sessions_are_left_out(program, tmp_path, caplog, damaged):
    (tmp_path / SESSIONS).write_bytes(damaged)
    with make_run(program, tmp_path) as run:
        take_steps(run, 4, 6)
    assert "cannot be read, and is replaced" in caplog.text
    assert read_facts(tmp_path)["Resumed"] == "at step 4"


def test_a_resumed_run_without_remaining_steps_keeps_its_figures(program, tmp_path):
    with make_run(program, tmp_path, steps=3) as run:
        take_steps(run, 1, 4)
    with make_run(program, tmp_path, steps=3) as run:
        run.begin(4)
        run.sample("text")
    assert read_facts(tmp_path)["Steps"] == "3 of 3"
    assert "training: 8 at step 1" in read_page(tmp_path)
    assert "<pre>text</pre>" in read_page(tmp_path)


def test_a_run_begins_once(program, tmp_path):
    with make_run(program, tmp_path) as run:
        run.begin()
        with pytest.raises(ValueError, match="step=3: the run has already begun, at step 1"):
            run.begin(3)


def test_a_new_run_does_not_take_over_a_validation_before_the_first_step(program, tmp_path):
    for loss in (6.0, 5.0):
        with make_run(program, tmp_path) as run:
            run.begin()
            validate(run, {0: loss})
            take_steps(run, 1, 2)
    assert read_facts(tmp_path)["First validation loss"] == "5.0000 at step 0"
    assert (tmp_path / "report.1.html").exists()


def test_the_page_is_one_plain_file(program, tmp_path):
    with make_run(program, tmp_path, name=NASTY, memory=program.memory(*toys.batches(1))) as run:
        take_steps(run, 1, 4)
        run.sample("text")
    page = read_page(tmp_path)
    outline = Outline(page)
    assert page.startswith("<!DOCTYPE html>")
    assert outline.find("html") == [{"lang": "en"}]
    names = {meta.get("name"): meta for meta in outline.find("meta")}
    assert names["viewport"]["content"] == "width=device-width, initial-scale=1"
    assert any("Finished" in text and "alert(1)" in text for text in outline.texts)  # the title
    assert not outline.find("script")
    assert "://" not in page
    assert "prefers-color-scheme: dark" in page
    for svg in outline.find("svg"):
        assert svg.get("aria-label") or svg.get("aria-hidden") == "true"
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len({*ids})


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (192, "3 min 12 s"),
        (3599.9, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (90_000, "1 d 01 h"),
    ],
)
def test_durations_have_two_units(seconds, words):
    assert format_duration(seconds) == words
