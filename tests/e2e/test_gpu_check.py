"""benchmarks/gpu_check.py: parts run separately and are joined, and bounds can fail.

A check that ends badly affects no other.
"""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gpu_check
import jax
import kernels
import numpy as np
import problem
import pytest
from gpu_checks import joined
from gpu_checks.equality import Tolerance, compare
from gpu_checks.jobs import Job, one_device
from gpu_checks.kernels import check_sweep
from gpu_checks.link.copies import WAYS, Arrays, beside_rows, jit_loop, wrong_records
from gpu_checks.machine import Machine, described, grow, meminfo
from gpu_checks.mixes import FEW, GPU, IN_BACKWARD, SMALL, Copied
from gpu_checks.parts import TIME_LIMIT, Check, Context, Group, Needs, Part, seconds_of
from gpu_checks.rows import Row, attempt, line
from gpu_checks.runner import Run, share_of
from gpu_checks.speed import speed_rows
from gpu_checks.steps import disks, llamas
from gpu_checks.steps.llamas import Case, Room, compared_rows, fitted, least_compute, measured_rows
from gpu_checks.steps.needs import num_params, pinned_bytes
from gpu_checks.steps.profile import DOWN, UP, events_of, measure
from gpu_checks.turns import Timed
from kernel_cases import Product
from matmul_sweep import Outcome

from pallas_kernels.matmul import measured
from pallas_kernels.matmul.config import Config
from zerojax.planner import Link

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TINY = problem.Problem(layers=2, hidden=32, heads=4, seq=16, vocab=128, batch=4, steps=4)


# --- the script -----------------------------------------------------------------------------------


def run_gpu_check(
    folder: pathlib.Path, *words: str, env: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, dict[str, dict[str, dict[str, Row]]]]:
    """Run the script on a CPU with tiny sizes.

    Returns its table, and rows by part, check and name.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--small", *words]
    command += [
        "--save",
        str(folder / "table.md"),
        "--out",
        str(folder / "results"),
        "--swap-dir",
        str(folder),
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = joined.read_runs(folder / "results")
    assert all(run.facts["versions"]["jax"] == jax.__version__ for run in runs)
    rows = {
        run.head["part"]: {name: {row.name: row for row in one.rows} for name, one in run.checks.items()} for run in runs
    }  # fmt: skip
    return (folder / "table.md").read_text(), rows


@pytest.mark.parametrize(
    "words",
    [
        ("--part", "equality", "--only", "slices", "fp32"),
        pytest.param((), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_gpu_check_runs_on_a_cpu_and_every_bound_holds(tmp_path, words):
    """Cases left out by default are other mixes, need a GPU, or are in test_kernel_benchmark.py."""
    # The bounds of "activations" are for the fusions that users have.
    text, rows = run_gpu_check(tmp_path, *words, env={} if words else {"XLA_FLAGS": ""})
    assert all(row.ok is True for row in rows["equality"]["slices"].values())
    assert len(rows["equality"]["fp32"]) == len(FEW["fp32"])
    assert "| fp32 | half of opt_state, distance 2 | loss " in text
    if not words:
        assert set(rows) == set(gpu_check.PARTS)
        assert rows["first"]["copies both"]["both, linear index: records"].ok is True
        assert (
            rows["memory"]["memory"]["peak device memory"].figure
            == "skipped: cpu devices do not count theirs"
        )
        link = rows["mixes"]["speed"]["all, in_backward: link"].values
        assert link["to_device"] > link["to_host"] > 0
        assert {
            row.ok
            for name, row in rows["kernels"]["matmul"].items()
            if name.endswith(("xla", "unfused"))
        } == {True}
        assert rows["nvme"]["nvme"]["all, activations, clipped"].ok is True
        assert rows["disks"]["disk"]["step over the one from host memory"].values["ratio"] > 0
        assert list((tmp_path / "results").glob("steps-host.*.xplane.pb.gz"))
    names = [path.name for path in (tmp_path / "results").iterdir()]
    assert all(re.fullmatch(r"[a-z0-9_.-]+", name) for name in names), names
    assert all(path.is_file() for path in (tmp_path / "results").iterdir())
    assert all(sum(name.startswith(f"{part}.") for name in names) <= 7 for part in gpu_check.PARTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        (
            "--part",
            "first",
            "memory",
            "--only",
            "slices",
            "copies both",
            "memory",
            "8 layers, opt_state",
        ),
        (),
    ],
    ids=["some", "all"],
)
@pytest.mark.usefixtures("h200_compiler")
def test_gpu_check_compiles_without_a_gpu(tmp_path, words):
    text, rows = run_gpu_check(tmp_path, "--compile-only", *words)
    assert rows["first"]["slices"]["update"].values["slices"] == 2
    streamed = rows["memory"]["memory"]["all, activations, in_backward"]
    assert streamed.ok is True
    assert streamed.values["slices"] > 0
    assert (
        rows["first"]["8 layers, opt_state"]["predicted at assumed rates"].values[
            "predicted_seconds"
        ]
        > 0
    )
    if not words:
        assert sum(map(len, rows["kernels"].values())) == len(kernels.cases(small=True))
    assert "a GPU that is not there" in text
    told = joined.fits(joined.read_runs(tmp_path / "results"), list(gpu_check.PARTS))
    assert "| h200 | " in told
    assert (
        "| first | 8 layers, opt_state | opt_state on the host, 3 layers, 128 tokens | all | 0.0 | 0.0 | 4.0 | yes |"
        in told
    )


def test_parts_come_in_the_order_of_what_they_decide():
    order = (
        "first equality steps-opt_state steps-host nvme peers steps-all kernels sweep disks memory equality-more groups "
        "steps-delayed steps-resident mixes"
    )
    assert list(gpu_check.PARTS) == order.split()
    assert gpu_check.PARTS["first"].checks[0].name == "machine"


@pytest.mark.parametrize("mode", ["run", "compile-only", "small run"])
def test_a_part_needs_less_than_its_limit(mode):
    for part in gpu_check.PARTS.values():
        assert sum(seconds_of(check.needs, mode) for check in part.checks) <= TIME_LIMIT, part.name
        assert len({check.name for check in part.checks}) == len(part.checks)


# --- parts, whatever they check -------------------------------------------------------------------

WORKER = """
import os, subprocess, sys, time
from gpu_checks.parts import Check, Context, Needs
from gpu_checks.rows import Row
from gpu_checks.runner import pipes, serve
from gpu_checks.mixes import SMALL

def good(context):
    print("this is not a result")
    yield Row("known", str(context.known.get("found")), ok=True, values={"known.found": 7.0})

def crashes(context):
    yield Row("before", "1", ok=True)
    os._exit(3)

def hangs(context):
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield Row("before", "2", ok=True, values={"pid": left.pid})
    time.sleep(60)

def shortened(context):
    yield Row("short", str(context.is_short))

def raises(context):
    yield Row("before", "3", ok=True)
    raise RuntimeError("broken | here")

needs = Needs(gpu=1, compiled=1)
def half(context):
    yield Row("found", "1", values={"known.found": 1.0})
    raise RuntimeError("the second rate")

def half_crashes(context):
    yield Row("found", "1", values={"known.found": 1.0})
    os._exit(3)

checked = (good, crashes, hangs, shortened, raises, half, half_crashes)
named = {f.__name__: f for f in checked} | {"last": good}
checks = [Check(name=name, run=f, compiled=None, needs=needs) for name, f in named.items()]
context = Context(sizes=SMALL, peer_python=None, keep=None, swap_dir="", ram_dir="")
serve(checks, context, False, lambda: {"hardware": "some", "versions": {"jax": "1"}}, *pipes())
"""


def fake_run(folder: pathlib.Path, needs: Mapping[str, float], limit: float) -> Run:
    """Return a run of a part with the checks of `WORKER`, which share a process.

    Each check has its number of seconds.
    """
    worker = folder / "worker.py"
    worker.write_text(f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n{WORKER}")
    checks = tuple(
        Check(
            name=name,
            run=lambda _: iter(()),
            compiled=None,
            needs=Needs(gpu=seconds, compiled=0, small=0),
        )
        for name, seconds in needs.items()
    )
    part = Part(name="fake", what="", groups=(Group(checks=checks),))
    command = [sys.executable, str(worker)]
    return Run(
        part=part,
        only=None,
        mode="run",
        limit=limit,
        out=folder / "out",
        command=command,
        told="some command",
    )


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie process counts as ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_check_that_crashes_or_hangs_takes_no_other_with_it(tmp_path):
    left = tmp_path / "left"
    left.mkdir()
    (left / "of a lost check").touch()
    # The later checks claim to need far more time than they do, so that a slow machine makes no
    # difference.
    run = fake_run(
        tmp_path, {"good": 1, "crashes": 1, "hangs": 1, "raises": 6, "last": 6}, limit=15
    )
    thread = threading.Thread(target=run, args=([left],))
    thread.start()
    file = tmp_path / "out" / "fake.jsonl"
    while not (
        file.exists() and '"before", "figure": "2"' in file.read_text()
    ):  # written while the check is still running
        assert thread.is_alive()
        time.sleep(0.02)
    assert '"check": "hangs", "end"' not in file.read_text()
    thread.join()
    (found,) = joined.read_runs(tmp_path / "out")
    assert {name: one.status for name, one in found.checks.items()} == {
        "good": "done", "crashes": "crashed", "hangs": "stopped", "raises": "done", "last": "done",
    }  # fmt: skip
    assert [row.figure for row in found.checks["crashes"].rows] == [
        "1",
        "exit status 3: this is not a result",
    ]
    assert found.checks["hangs"].rows[-1].figure.startswith("stopped after ")
    assert found.checks["raises"].rows[-1].figure == "RuntimeError: broken | here"
    assert (
        found.checks["last"].rows[0].figure == "7.0"
    )  # an earlier check's findings, whatever happened to its process
    assert not joined.holds([found])
    assert list(left.iterdir()) == []
    assert not is_running(int(found.checks["hangs"].rows[0].values["pid"]))
    assert found.seconds is not None
    assert found.seconds < run.limit


def test_a_check_that_has_no_time_left_is_not_begun_and_is_listed(tmp_path):
    run = fake_run(tmp_path, {"good": 5, "crashes": 5}, limit=1)
    run.command = ["/not/there"]
    run()
    (found,) = joined.read_runs(tmp_path / "out")
    why = "not run: it needs 5 s, and 1 s of 1 s were left"
    assert joined.missing(found) == [("good", why), ("crashes", why)]
    assert not joined.holds([found])
    assert f"- fake, crashes: {why}" in joined.table([found], ["fake"])


def test_a_check_with_few_seconds_left_runs_in_its_short_form(tmp_path):
    run = fake_run(tmp_path, {"good": 4, "shortened": 60}, limit=30)
    run()
    (found,) = joined.read_runs(tmp_path / "out")
    assert {name: one.status for name, one in found.checks.items()} == {
        "good": "done",
        "shortened": "done",
    }
    assert found.checks["shortened"].rows[0].figure == "True"
    other = fake_run(tmp_path / "out", {"shortened": 20}, limit=30)
    other()
    (found,) = joined.read_runs(tmp_path / "out" / "out")
    assert found.checks["shortened"].rows[0].figure == "False"


def test_short_seconds_shorten_checks_and_drop_none(tmp_path):
    """Seconds left, seconds that the check needs, and seconds that later checks need."""
    assert share_of(100, 10, 60) == 40  # what no other check needs
    assert share_of(100, 60, 60) == 60  # the later checks keep two thirds
    assert share_of(100, 90, 60) == 79  # and at least 35 %
    assert share_of(30, 90, 60) == 18  # a fifth each
    run = fake_run(tmp_path, {"good": 20, "shortened": 300, "last": 100}, limit=50)
    run()
    (found,) = joined.read_runs(tmp_path / "out")
    assert {name: one.status for name, one in found.checks.items()} == dict.fromkeys(
        ("good", "shortened", "last"), "done"
    )
    assert found.checks["shortened"].rows[0].figure == "True"


@pytest.mark.parametrize("check", ["half", "half_crashes"])
def test_rates_of_a_check_that_fails_halfway_are_measured_again(tmp_path, check):
    run = fake_run(tmp_path, {check: 10, "last": 10}, limit=60)
    first, last = run.part.groups[0].checks
    run.part = dataclasses.replace(
        run.part, groups=(Group(checks=(dataclasses.replace(first, measures=True), last)),)
    )
    run.key = "an H100, jax 1"
    for _ in range(2):
        run()
        found = joined.read_runs(tmp_path / "out")[-1]
        assert found.checks[check].rows[0].figure == "1"
        assert found.checks[check].rows[-1].ok is False
        assert (
            found.checks["last"].rows[0].figure == "1.0"
        )  # a later check of the same part gets the available rates
        assert not (tmp_path / "out" / "rates.json").exists()


def test_rates_are_measured_once_for_a_device_and_a_version_of_jax(tmp_path):
    def measured_by(key: str) -> list[Row]:
        run = fake_run(tmp_path, {"good": 5, "last": 5}, limit=60)
        first, last = run.part.groups[0].checks
        run.part = dataclasses.replace(
            run.part, groups=(Group(checks=(dataclasses.replace(first, measures=True), last)),)
        )
        run.key = key
        run()
        found = joined.read_runs(tmp_path / "out")[-1]
        return [found.checks[name].rows[0] for name in ("good", "last")]

    first, last = measured_by("an H100, jax 1")
    assert (first.figure, last.figure) == ("None", "7.0")
    again, last = measured_by("an H100, jax 1")
    assert (again.figure, last.figure) == ("measured by an earlier part: found 7", "7.0")
    other, _ = measured_by("an H200, jax 1")
    assert other.figure == "None"
    assert json.loads((tmp_path / "out" / "rates.json").read_text()).keys() == {
        "an H100, jax 1",
        "an H200, jax 1",
    }


def lines(
    path: pathlib.Path,
    hardware: str,
    at: str,
    rows: Mapping[str, Row | None],
    cut_off: bool = False,
) -> None:
    """Write the files of a run of the part that the file is named after.

    A check without a row writes nothing.
    """
    head = {
        "part": path.stem,
        "command": "c",
        "mode": "run",
        "limit": 480.0,
        "time": at,
        "checks": list(rows),
    }
    said: list[Any] = [{"head": head}, {"facts": {"hardware": hardware, "versions": {"jax": "1"}}}]
    for name, row in rows.items():
        if row is not None:
            said.append({"check": name, "row": dataclasses.asdict(row)})
            said += [] if cut_off else [{"check": name, "end": {"status": "done", "seconds": 1.0}}]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(
            "\n".join(map(json.dumps, said))
            + ('\n{"check": "half' if cut_off else '\n{"seconds": 2.0}\n')
        )


def test_results_of_parts_that_ran_apart_join(tmp_path):
    lines(
        tmp_path / "a" / "two.jsonl",
        "one GPU",
        "2026-11-01 10:00:00",
        {"x": Row("r", "replaced", ok=False), "y": Row("r", "y")},
    )
    lines(
        tmp_path / "b" / "two.jsonl",
        "one GPU",
        "2026-11-02 10:00:00",
        {"x": Row("r", "new", "b", ok=True)},
    )
    lines(
        tmp_path / "c" / "one.jsonl",
        "another",
        "2026-11-03 10:00:00",
        {"z": Row("r", "z"), "w": None},
        cut_off=True,
    )
    runs = joined.latest(joined.read_runs(tmp_path))
    text = joined.table(runs, ["one", "two"])
    assert "replaced" not in text
    assert "| x | r | new | b | yes |" in text
    assert text.index("## one") < text.index("## two")
    assert "Machine 1: another. Versions: jax 1." in text
    assert "Machine 2: one GPU. Versions: jax 1." in text
    assert "- one, z: cut off; what it found until then is above" in text
    assert "- one, w: not run: the part was cut off before it" in text
    assert text.endswith("1 of 1 bounds hold; 2 checks have no result.\n")
    assert not joined.holds(runs)
    assert joined.holds(runs[:2])


def test_a_run_that_began_no_check_is_replaced_by_a_later_one_on_any_machine(tmp_path):
    one, path = {"x": Row("r", "new", "b", ok=True)}, tmp_path / "one.jsonl"
    head = {
        "part": "one",
        "command": "c",
        "mode": "run",
        "limit": 1.0,
        "time": "2026-11-01 10:00:00",
        "checks": ["x"],
    }
    end = {"check": "x", "end": {"status": "not run", "seconds": 0.0}}
    said = [
        {"head": head},
        {"check": "x", "row": dataclasses.asdict(Row("x", "not run: why"))},
        end,
    ]
    path.write_text("\n".join(map(json.dumps, said)) + "\n")
    assert not joined.holds(joined.latest(joined.read_runs(tmp_path)))
    lines(path, "one GPU", "2026-11-02 10:00:00", one)
    (run,) = joined.latest(joined.read_runs(tmp_path))
    assert run.facts["hardware"] == "one GPU"
    assert joined.holds([run])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--swap-dir", "not/there"], "--swap-dir not/there: no such folder"),
        (["--small", "--ram-dir", "not/there"], "--ram-dir not/there: no such folder"),
        (["--join", "not/there"], "--join not/there: no such folder"),
        (["--small", "--limit", "0"], "--limit 0: a positive number"),
        (["--part", "first"], "JAX finds no GPU here"),
        (["--part", "first", "--chip", "h100"], "give --compile-only, too"),
        (["--small", "--fits"], "give --join, too"),
        (["--small", "--host-memory", "0"], "--host-memory 0: at least 1 GiB"),
    ],
)
def test_gpu_check_refuses_what_would_measure_something_else(options, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert why in capsys.readouterr().err


def commands_of(page: str) -> list[list[str]]:
    """Return the options of each gpu_check command on a page of docs."""
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    found = re.findall(
        r"^(?:XLA_FLAGS=\S* )?python benchmarks/gpu_check\.py (.*)$", text, re.MULTILINE
    )
    return [shlex.split(words) for words in found]


@pytest.mark.parametrize(
    "words",
    [words for page in ("first_contact.md", "performance.md") for words in commands_of(page)],
    ids=" ".join,
)
def test_commands_on_pages_name_parts_and_checks_that_exist(words, monkeypatch, tmp_path):
    """First-contact commands fit into ten minutes per call; another test sums them up."""
    for folder in ("RESULTS", "DISK", "results"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", *words[: words.index("#") if "#" in words else None]]
    )
    options = gpu_check.parse()
    if options.only and not options.join:
        chosen = {check.name for part in options.part for check in gpu_check.PARTS[part].checks}
        assert set(options.only) <= chosen


def test_each_call_of_the_first_contact_takes_ten_minutes_at_most():
    page = (ROOT / "docs" / "first_contact.md").read_text()
    calls = re.split(r"^## Call \d: .*$", page, flags=re.MULTILINE)[1:]
    assert len(calls) == 3
    for call in calls:
        limits = [
            float(limit) for limit in re.findall(r"--limit (\d+)", call.partition("\n## ")[0])
        ]
        assert len(limits) >= 2
        assert sum(limits) <= 570  # seconds; Python start-ups are within the limits


def test_a_folder_without_results_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--join", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds no results"):
        gpu_check.main()


def test_a_row_says_what_was_raised():
    def breaks():
        yield Row("first", "1", ok=True)
        raise RuntimeError("broken | here") from OSError("the disk")

    def refuses():
        raise NotImplementedError("not built")
        yield

    first, second = attempt("breaks", breaks)
    assert first.ok
    assert (second.ok, second.figure) == (False, "RuntimeError: broken | here OSError: the disk")
    assert (
        line("check", second)
        == "| check | breaks | RuntimeError: broken / here OSError: the disk |  | NO |"
    )
    (row,) = attempt("refuses", refuses)
    assert (row.ok, row.figure) == (None, "skipped: not built")


# --- reports of checks ----------------------------------------------------------------------------


def test_a_sweep_tells_verdicts_and_fails_where_a_winner_is_wrong(monkeypatch, tmp_path):
    product = Product(192, 128, 320)
    row = measured.Row(
        chip="H200", num_cores=132, problem=product.problem, activation=None, config=Config(), seconds=0.9e-3, xla_seconds=1e-3,
        jax_seconds=None, device="NVIDIA H200", jax="0", date="2026-11-01",
    )  # fmt: skip
    outcomes = [
        Outcome(product, row, "of 5 sizes tried"),
        Outcome(product, None, "wrong", is_right=False),
        Outcome(product, None, "not run: a CPU"),
    ]
    monkeypatch.setattr(kernels, "sweep_outcomes", lambda *_: outcomes)
    context = Context(sizes=SMALL, peer_python=None, keep=tmp_path, swap_dir="", ram_dir="")
    won, wrong, left_out = check_sweep(context)
    assert (
        "0.900 of XLA's time, not comparable with that of JAX's kernel; None takes kernel"
        in won.figure
    )
    assert (won.ok, wrong.ok, left_out.ok) == (None, False, None)


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_of_copies_tells_of_wrong_records(way):
    copied = Copied(shape=(3, 2, 2), left=(2, 2), right=(2, 2), products=(1, 1))
    arrays = Arrays.make(copied, one_device())
    seen = np.asarray(arrays.run(jit_loop(way, "linear", 1, copied, one_device())))
    down = np.asarray(arrays.down)
    assert wrong_records(way, seen, down) == 0
    if way != "down":  # as if XLA took record i at tick i, which is correct in the middle
        assert wrong_records(way, seen[::-1], down) == 2
    if way != "up":
        assert wrong_records(way, seen, down[::-1]) > 0


def test_copies_beside_products_are_judged_by_the_longer_of_both():
    (row,) = beside_rows("up", 90.0, copies=1.0, products=0.5, beside=1.2, judged=True)
    assert (row.ok, row.bound) == (False, "at least 0.9 of alone")
    (row,) = beside_rows("up", 90.0, copies=1.0, products=2.0, beside=2.08, judged=True)
    assert (row.ok, row.bound) == (True, "at most 1.05")
    (row,) = beside_rows("up", 90.0, copies=1.0, products=2.0, beside=2.2, judged=True)
    assert not row.ok


PROFILE = """
planes { name: "/host:CPU" lines { name: "Stream #9" events { metadata_id: 1 duration_ps: 5 } } event_metadata { key: 1 } }
planes {
  name: "/device:GPU:0"
  lines { name: "Steps" events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000000000 } }
  lines { name: "Stream #1(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000000000 stats { metadata_id: 1 str_value: "fusion.1" } }
    events { metadata_id: 1 offset_ps: 2000000000000 duration_ps: 1000000000000 stats { metadata_id: 1 str_value: "mover" } }
    events { metadata_id: 1 offset_ps: 5000000000000 duration_ps: 3000000000000 stats { metadata_id: 1 str_value: "fusion" } } }
  lines { name: "Stream #2(MemcpyH2D)"
    events { metadata_id: 2 offset_ps: 1000000000000 duration_ps: 2000000000000
      stats { metadata_id: 2 str_value: "kind_src:pinned kind_dst:device size:40 dest:0 async:1" } } }
  lines { name: "Stream #3(MemcpyD2H)"
    events { metadata_id: 3 offset_ps: 2000000000000 duration_ps: 8000000000000
      stats { metadata_id: 2 str_value: "kind_src:device kind_dst:pinned size:80 dest:0 async:1" } } }
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyH2D" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2H" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "memcpy_details" } }
}
"""


def test_a_profile_tells_idle_time_and_what_runs_beside_what():
    """The profile has kernels in 0-2 and 5-8 s, and one in 2-3 s that moves host memory.

    40 bytes are copied up in 1-3 s and 80 down in 2-10 s.
    """
    events = events_of(jax.profiler.ProfileData.from_text_proto(PROFILE))
    found = measure(events, {"mover"}, num_steps=1)
    assert (found.seconds, found.compute_seconds, found.mover_seconds) == (10.0, 5.0, 1.0)
    assert found.idle == 0.5
    assert found.copied_bytes == {UP: 40, DOWN: 80}
    assert found.copy_seconds == {UP: 2.0, DOWN: 8.0}
    assert found.beside == pytest.approx(4 / 9)
    assert (found.both_seconds, found.both_rate) == (1.0, 30.0)
    assert measure(events, (), num_steps=2).compute_seconds == 3.0
    with pytest.raises(NotImplementedError, match="no GPU"):
        events_of(jax.profiler.ProfileData.from_text_proto('planes { name: "/host:CPU" }'))


def test_bounds_of_a_step_hold_at_most_tokens_alone(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    found = measure(
        events_of(jax.profiler.ProfileData.from_text_proto(PROFILE)), (), num_steps=1
    )  # 0.6 of the step
    for mode, is_largest, ok in (
        ("opt_state on the host", True, False),
        ("opt_state on the host", False, None),
        ("resident", True, None),
    ):
        case = Case(mode=mode, sizes=GPU.llama, tokens=32768, is_largest=is_largest)
        compute, copies = measured_rows(found, case, judged=True, both=36.0)
        assert compute.ok is ok
        assert copies.ok is (None if mode == "resident" else False)  # 30 of 36 bytes per second
    predicted: Any = type("Predicted", (), {"seconds": 2.0, "idle": 0.3})
    assert [
        next(compared_rows(found, step, predicted, judged=True)).ok for step in (2.2, 1.6, 2.4)
    ] == [True, False, False]
    predicted.idle = 0.2  # where 0.4 was measured
    assert not next(compared_rows(found, 2.0, predicted, judged=True)).ok


def test_the_bound_of_compute_is_that_of_the_version_of_jax():
    mode = "params, grads, opt_state on the host"
    versions = ((0, 10, 2), (0, 11, 0), (0, 11, 2), (0, 12, 0))
    assert [least_compute(mode, version) for version in versions] == [None, 0.81, 0.81, 0.85]
    assert least_compute("resident", (0, 12, 0)) is None


MODES = (
    "resident",
    "opt_state on the host",
    "params, grads, opt_state on the host",
    "the same, delayed_update",
)


@pytest.mark.parametrize("mode", MODES)
def test_the_pool_is_sized_to_what_a_mode_keeps_in_host_memory(mode):
    case = Case(
        mode=mode, sizes=dataclasses.replace(SMALL.llama, layers=6), tokens=SMALL.llama.tokens[0]
    )
    with case.build(one_device()) as program:
        kept = program.memory(case.abstract_batch()).tiers["pinned_host"]
    # The arrays that a delayed update creates are pinned in addition to the pool.
    assert sum(kept.values()) - kept.get("made", 0) == pytest.approx(
        pinned_bytes(mode, case.sizes), rel=0.01
    )


def test_a_pool_is_what_is_needed_and_never_above_what_the_user_or_the_host_allows():
    fields = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "device_bytes": 78 << 30}
    free = Machine(**fields, host_bytes=128 << 30, pool_gib=None)
    needed = pinned_bytes("opt_state on the host", GPU.llama)
    assert free.pool(needed) == 80  # GiB, for 75.3
    assert free.pool(0) == 4
    assert free.pool(200 << 30) == 116
    assert dataclasses.replace(free, pool_gib=60).pool(needed) == 60
    assert dataclasses.replace(free, pool_gib=110).pool(needed) == 80
    (group,) = (
        g for g in gpu_check.PARTS["steps-opt_state"].groups if g.checks[0].name == "16K tokens"
    )
    assert gpu_check.pool_of(group, GPU, free) == 80  # both numbers of tokens run in one program
    (group,) = (g for g in gpu_check.PARTS["first"].groups if g.checks[-1].name == "copies both")
    assert (
        gpu_check.pool_of(group, GPU, free) == 19
    )  # GiB: pieces of 8 for two stacks of 5.4, and 2 for the link's arrays


def test_a_larger_device_has_more_layers():
    def fitted_to(chip: str) -> int:
        there = described(chip, None)
        case = Case(mode="resident", sizes=GPU.llama, tokens=16384)
        fits, _ = fitted(case, Resident, Room(device=there.device_bytes))
        return fits.sizes.layers

    class Resident:
        """What the resident step keeps, in closed form."""

        def __init__(self, case: Case) -> None:
            self.case = case

        def memory(self, _: Any) -> Any:
            return type(
                "Report", (), {"tiers": {"device": {"states": 16 * num_params(self.case.sizes)}}}
            )

        def close(self) -> None:
            pass

    assert fitted_to("h200") == 32
    assert 8 < fitted_to("h100") < 24


def test_host_memory_that_is_touched_is_given_back():
    assert grow(32 << 20, threads=2) == (32 << 20, meminfo("MemTotal"))
    assert grow(32 << 20, threads=2, seconds=-1) == (0, meminfo("MemTotal"))  # no time is left


def test_a_step_has_as_many_layers_as_host_memory_has_room_for():
    class Program:
        def __init__(self, layers: int) -> None:
            self.layers, self.closed = layers, False

        def memory(self, _: Any) -> Any:
            return type(
                "Report",
                (),
                {"tiers": {"pinned_host": {"opt_state": 10 * self.layers, "buffers": 7}}},
            )

        def close(self) -> None:
            built.append(self.layers)

    built: list[int] = []
    case = Case(mode="the same, delayed_update", sizes=GPU.llama, tokens=16384)
    for room, layers in ((None, 32), (327, 32), (326, 31), (100, 9), (17, 1)):
        fits, program = fitted(case, lambda one: Program(one.sizes.layers), Room(host=room))
        assert (fits.sizes.layers, program.layers) == (layers, layers)
        assert layers not in built
    with pytest.raises(NotImplementedError, match="of host memory"):
        fitted(case, lambda one: Program(one.sizes.layers), Room(host=16))
    # A user's small pool reduces the number of layers, too.
    half = Room(pool=pinned_bytes(case.mode, case.sizes) // 2)
    assert fitted(case, lambda one: Program(one.sizes.layers), half)[0].sizes.layers == 15


@dataclasses.dataclass
class Sized:
    """A program that takes a byte of the device per layer and token."""

    layers: int
    closed: bool = False

    def memory(self, batch: Any) -> Any:
        return type(
            "Report", (), {"tiers": {"device": {"states": self.layers * batch["tokens"].size}}}
        )

    def close(self) -> None:
        self.closed = True


class Counting:
    """A stand-in for a program's steps; the state counts them."""

    def __init__(self, case: Case, context: Context, program: Sized, state: int | None) -> None:
        self.case, self.program, self.state = case, program, state

    def rows(self):
        self.state = (self.state or 0) + 1
        values = {"layers": self.program.layers, "of": self.case.sizes.layers, "steps": self.state}
        yield Row("step", "", values=values | {"is_largest": self.case.is_largest})


@pytest.mark.parametrize(
    ("device_bytes", "layers", "steps"),
    [(24 * 32768, (24, 20), 1), (2 * 24 * 32768, (32, 32), 2)],
    ids=["rebuilt", "kept"],
)
def test_a_program_of_fewer_tokens_is_fitted_again_to_more(
    monkeypatch, device_bytes, layers, steps
):
    built: list[Sized] = []

    def build(case: Case, mesh: Any) -> Sized:
        built.append(Sized(case.sizes.layers))
        return built[-1]

    monkeypatch.setattr(Case, "build", build)
    monkeypatch.setattr(llamas, "Stepped", Counting)
    context = Context(
        sizes=GPU,
        peer_python=None,
        keep=pathlib.Path(),
        swap_dir="",
        ram_dir="",
        device_bytes=device_bytes,
    )
    sizes = dataclasses.replace(GPU.llama, layers=32 if steps == 2 else 24)

    def step(tokens: int) -> Mapping[str, float]:
        case = Case(mode="resident", sizes=sizes, tokens=tokens, is_largest=tokens == 32768)
        return list(llamas.check_step(lambda _: case)(context))[-1].values

    assert step(16384) == {"layers": layers[0], "of": layers[0], "steps": 1, "is_largest": False}
    assert step(32768) == {
        "layers": layers[1],
        "of": layers[1],
        "steps": steps,
        "is_largest": steps == 2,
    }
    assert [program.closed for program in built] == [True] * (len(built) - 1) + [False]
    assert len(built) == (1 if steps == 2 else 2)


def test_a_step_from_a_disk_has_fewer_layers_if_seconds_are_short(monkeypatch):
    monkeypatch.setattr(disks, "rooms", lambda context: {disks.RAM: 10**12, disks.DISK: 10**12})
    context = Context(sizes=GPU, peer_python=None, keep=pathlib.Path(), swap_dir="", ram_dir="")
    for where in disks.MODES:
        layers = [
            disks.case_of(where, dataclasses.replace(context, is_short=is_short)).sizes.layers
            for is_short in (False, True)
        ]
        assert layers == [18, llamas.SHORT_LAYERS]


def test_the_layers_on_a_disk_are_as_many_as_fit():
    of = GPU.on_disk
    layer, ends = 14 * (4 * 4096**2 + 3 * 4096 * 11008), 28 * 32000 * 4096
    assert (
        disks.fitting(of, {disks.RAM: 10**12, disks.DISK: 10**12}, disks.DISK).layers == of.layers
    )
    assert (
        disks.fitting(
            of, {disks.RAM: ends + 5 * layer, disks.DISK: ends + 7 * layer}, disks.DISK
        ).layers
        == 5
    )
    # A full RAM disk does not keep the disk from being checked.
    assert disks.fitting(of, {disks.RAM: 0, disks.DISK: ends + 7 * layer}, disks.DISK).layers == 7
    with pytest.raises(NotImplementedError, match=r"no layer of 2\.6 GiB fits on the RAM disk"):
        disks.fitting(of, {disks.RAM: layer, disks.DISK: 10**12}, disks.RAM)
    assert (
        SMALL.on_disk.layers
        == disks.fitting(SMALL.on_disk, {disks.DISK: 1 << 30}, disks.DISK).layers
    )


def test_gpu_check_sees_another_loss_and_another_parameter():
    job = Job(name="mix", problem=TINY, fields={})
    tolerance = Tolerance(ulp=2, params=1e-6, gradients=1e-6)
    losses, leaves = (
        np.array([2, 1], np.float32),
        [np.array([0, 4], np.float32), np.zeros(2, np.float32)],
    )

    def compared(losses, leaves):
        right = (
            np.array([2, 1], np.float32),
            leaves_before,
            [np.array([0, 4], np.float32), np.zeros(2, np.float32)],
        )
        return compare(job, (losses, leaves_before, leaves), right, tolerance)

    leaves_before = [np.zeros(2, np.float32)] * 2
    assert compared(losses, leaves).values == {"loss_ulp": 0, "params": 0}
    near = compared(np.nextafter(losses, np.float32(9)), leaves)
    assert near.ok
    assert near.values["loss_ulp"] == 1
    assert not compared(losses * np.float32(1.0001), leaves).ok
    assert not compared(losses * np.float32("nan"), leaves).ok
    assert compared(losses, [leaves[0] + np.float32([1, 0]), leaves[1]]).values["params"] == 0.25
    assert not compared(
        losses, [leaves[0], leaves[1] + np.float32(1e-20)]
    ).ok  # a leaf that is zero must stay zero


@pytest.mark.parametrize(("step", "hidden", "floor"), [(3.0, 1.0, 1.0), (4.0, 0.0, 4 / 3)])
def test_gpu_check_tells_how_much_of_the_transfers_is_hidden(step, hidden, floor):
    job = Job(name="mix", problem=TINY, fields=IN_BACKWARD)
    link = Link(to_device=20.0, to_host=10.0, both=25.0)
    assert link.seconds(20.0, 5.0) == 1.0
    assert link.seconds(20.0, 20.0) == 2.0
    assert link.seconds(25.0, 12.5) == 1.5
    rows = list(speed_rows(job, Timed([step] * 3, [3.0] * 3, [{"loss": 1.0}] * 3, 20, 5), link))
    assert [row.name for row in rows] == [
        "mix: step over resident",
        "mix: link",
        "mix: transfers hidden",
    ]
    assert rows[0].values["ratio"] == step / 3
    assert rows[2].values["hidden"] == hidden
    assert rows[2].values["over_floor"] == floor
