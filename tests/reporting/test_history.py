"""The figures of a run survive full disks, kills, damaged lines and a second run in the folder."""

import errno
import importlib
import json
import logging
import math
import os
import pathlib
import subprocess
import sys

import pytest

from zerojax.reporting import folder as folder_module
from zerojax.reporting import history as history_module
from zerojax.reporting.folder import DROPPED, LOCK, METRICS, PAGE, RunFolder, set_aside
from zerojax.reporting.history import History
from zerojax.reporting.writers import Guarded, TensorBoard

GOOD = '{"step": 1, "train/loss": 3.0}\n'


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(str(tmp_path))
    yield made
    made.close()


def lines_of(folder: RunFolder, name: str = METRICS) -> list[dict[str, float]]:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    text = pathlib.Path(folder.file(name)).read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write_steps(folder: RunFolder, first: int, stop: int, loss: float = 1.0) -> History:
    history = History(folder, first)
    for step in range(first, stop):
        history.write(step, {"train/loss": loss})
    history.close(failed=False)
    return history


class FullDisk:
    """Let a number of bytes be written; later writes fail as on a full disk."""

    def __init__(self, monkeypatch) -> None:
        self.room = 10**9
        real = os.pwrite

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            if self.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = real(fd, data[: self.room], offset)
            self.room -= written
            return written

        monkeypatch.setattr(history_module.os, "pwrite", pwrite)


@pytest.mark.parametrize(
    "damaged",
    [
        b"\0\0\0\n",
        b'{"loss": 1.0}\n',
        b"[3]\n",
        b'{"step": 2, "train/loss": 1.0}{"st\n',
        b'{"step": 2, "train/loss": "\xff"}\n',
        b'{"step": 2, "\xff": 1.0}\n',
        b'{"step": 2, "\\ud800": 1.0}\n',
        b'{"step": 2.5, "train/loss": 1.0}\n',
        b'{"step": -2, "train/loss": 1.0}\n',
        b'{"step": 1' + b"0" * 30 + b', "train/loss": 1.0}\n',
        b'{"step": 2, "train/loss": true}\n',
        b'{"step": 2, "train/loss": [1.0]}\n',
        b'{"step": 2, "train/loss": 1' + b"0" * 5000 + b"}\n",
        b'{"step": 2, "train/loss": ' + b"[" * 100_000 + b"\n",
        b"\n",
    ],
)
def test_a_damaged_line_is_left_out_alone(folder, caplog, damaged):
    after = '{"step": 3, "train/loss": 2.5}\n'
    pathlib.Path(folder.file(METRICS)).write_bytes(GOOD.encode() + damaged + after.encode())
    write_steps(folder, 5, 6)
    assert [line["step"] for line in lines_of(folder)] == [1, 3, 5]
    assert pathlib.Path(folder.file(DROPPED)).read_bytes() == damaged
    assert "cannot be read at line 2:" in caplog.text
    assert "has no figures of steps 4 to 4" in caplog.text


def test_a_resumed_run_moves_the_steps_that_it_makes_again(folder):
    write_steps(folder, 1, 6, loss=1.0)
    history = write_steps(folder, 4, 9, loss=2.0)
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["train/loss"] for line in lines_of(folder)] == [1.0] * 3 + [2.0] * 5
    expected = [(step, 1.0 if step < 4 else 2.0) for step in range(1, 9)]
    assert list(history.series["train/loss"]) == expected
    assert [line["step"] for line in lines_of(folder, DROPPED)] == [4, 5]


def test_a_new_run_loses_nothing_of_an_earlier_one(folder):
    write_steps(folder, 1, 4, loss=1.0)
    for number in (1, 2):
        pathlib.Path(folder.file(PAGE)).write_text(f"page {number}")
        set_aside(folder.file(PAGE))
        assert pathlib.Path(folder.file(f"report.{number}.html")).read_text() == f"page {number}"
    set_aside(folder.file(PAGE))  # without a page
    write_steps(folder, 1, 3, loss=2.0)
    assert [line["train/loss"] for line in lines_of(folder)] == [2.0, 2.0]
    assert [line["train/loss"] for line in lines_of(folder, DROPPED)] == [1.0, 1.0, 1.0]


def test_a_kill_while_a_run_resumes_leaves_whole_lines(folder, monkeypatch):
    write_steps(folder, 1, 100)
    before = pathlib.Path(folder.file(METRICS)).read_bytes()

    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(folder_module.os, name, kill)
            with pytest.raises(Killed):
                History(folder, 90)
        assert pathlib.Path(folder.file(METRICS)).read_bytes() == before
    write_steps(folder, 90, 91)
    assert [line["step"] for line in lines_of(folder)] == list(range(1, 91))


def test_figures_that_are_not_finite_are_null(folder):
    history = History(folder, 1)
    history.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf})
    history.close(failed=False)
    assert lines_of(folder) == [{"step": 1, "train/loss": None, "train/grad_norm": None}]
    assert math.isnan(History(folder, 2).series["train/loss"][0].value)


def test_lines_of_older_runs_become_strict_json(folder):
    old = '{"step": 1, "train/loss": NaN}\n{"step": 2, "train/loss": 1e999}\n{"step": 3, "train/loss": null}\n'
    pathlib.Path(folder.file(METRICS)).write_text(old)
    write_steps(folder, 4, 5)
    assert lines_of(folder) == [
        {"step": step, "train/loss": 1.0 if step == 4 else None} for step in (1, 2, 3, 4)
    ]
    assert not pathlib.Path(folder.file(DROPPED)).exists()


@pytest.mark.parametrize("room", [0, 1, 40, 55])
def test_lines_wait_for_room_on_a_full_disk(folder, monkeypatch, caplog, room):
    disk = FullDisk(monkeypatch)
    history = History(folder, 1)
    history.write(1, {"train/loss": 1.0})
    disk.room = room
    for step in (2, 3, 4):
        history.write(step, {"train/loss": 1.0})
        assert pathlib.Path(folder.file(METRICS)).read_bytes().endswith(b"\n")
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert "No space left on device; the run continues" in caplog.text
    disk.room = 10**9
    history.write(5, {"train/loss": 1.0})
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3, 4, 5]
    disk.room = 0
    history.write(6, {"train/loss": 1.0})
    history.close(failed=False)
    assert "lacks 1 lines" in caplog.text


def test_a_full_disk_at_the_resume_keeps_the_old_lines(folder, monkeypatch, caplog):
    write_steps(folder, 1, 6)
    before = pathlib.Path(folder.file(METRICS)).read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(history_module.os, "replace", full)
        history = History(folder, 4)
        history.write(4, {"train/loss": 2.0})
        assert pathlib.Path(folder.file(METRICS)).read_bytes() == before
    history.write(5, {"train/loss": 2.0})
    assert [(line["step"], line["train/loss"]) for line in lines_of(folder)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
    ]
    assert "cannot be written: No space left" in caplog.text
    history.close(failed=False)


def test_a_folder_takes_one_run(folder, tmp_path):
    with pytest.raises(
        ValueError,
        match=rf"is in use: another run, of process {os.getpid()}, writes its figures there",
    ):
        RunFolder(str(tmp_path))
    folder.close()
    RunFolder(str(tmp_path)).close()


def test_a_killed_process_releases_the_folder(tmp_path):
    """A process started by the run does not keep the lock either."""
    script = (
        "import os, runpy, sys, time\n"
        "folder = runpy.run_path(sys.argv[2])['RunFolder'](sys.argv[1])  # without the rest of the package\n"
        # Both say that they are ready: the child releases the lock as it starts, which may be after
        # its parent continues.
        "os.fork()\nos.write(1, b'ready\\n')\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), folder_module.__file__],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            with pytest.raises(ValueError, match=f"of process {process.pid},"):
                RunFolder(str(tmp_path))
            process.kill()
            process.wait()
            RunFolder(str(tmp_path)).close()
        finally:
            os.killpg(process.pid, 9)


@pytest.mark.parametrize("name", [METRICS, DROPPED, PAGE, LOCK, f"{METRICS}.tmp"])
@pytest.mark.parametrize("kind", ["fifo", "link", "dangling", "folder"])
def test_files_that_are_not_regular_are_refused_by_name(tmp_path, name, kind):
    path = tmp_path / "run" / name
    path.parent.mkdir()
    target = tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        if kind == "link":
            target.write_text("kept")
        path.symlink_to(target)
    with pytest.raises(ValueError, match=rf"{name}: .*remove it, or choose another folder"):
        RunFolder(str(tmp_path / "run"))
    assert not target.exists() or target.read_text() == "kept"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/run' cannot be written"):
        RunFolder(str(tmp_path / "file" / "run"))


def test_a_writer_that_fails_is_closed_and_opened_again_later(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("zerojax.reporting.writers.time.monotonic", lambda: now[0])
    calls = list[str]()

    class Failing:
        def write(self, step, figures):
            calls.append(f"write {step}")
            if step == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

        def close(self, failed):
            calls.append(f"close {failed}")

    def make() -> Failing:
        calls.append("open")
        return Failing()

    guarded = Guarded("tensorboard", None, make)
    for step, at in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 100.0)):
        now[0] = at
        guarded.write(step, {})
    guarded.close(failed=False)
    assert calls == ["open", "write 1", "write 2", "close True", "open", "write 4", "close False"]
    assert (
        "tensorboard takes no figures: OSError: [Errno 28] No space left on device; the run continues"
        in caplog.text
    )


def test_tensorboard_reports_a_full_disk_to_its_caller(tmp_path, monkeypatch):
    """The package's writer would end its thread, and block the training after ten more figures."""
    writer = TensorBoard(str(tmp_path), first=1)
    monkeypatch.setattr("zerojax.reporting.writers._FLUSH_SECONDS", 0.0)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, writer._records._writer.fileno())
        with pytest.raises(OSError, match="No space left"):
            writer.write(1, {"train/loss": 1.0})
        with pytest.raises(OSError, match="No space left"):
            writer.close(failed=True)
    finally:
        os.close(full)


def test_tensorboard_reads_what_was_written(tmp_path):
    first = TensorBoard(str(tmp_path), first=1)
    for step in range(1, 6):
        first.write(step, {"train/loss": 1.0 / step})
    first.close(failed=True)
    second = TensorBoard(str(tmp_path), first=4)
    second.write(4, {"train/loss": math.nan})
    second.close(failed=False)
    event_pb2 = importlib.import_module(
        "tensorboardX.proto.event_pb2"
    )  # its classes are created on import
    found = []
    for path in sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found.append((event.step, event.WhichOneof("what")))
    steps = [(step, "summary") for step in range(1, 6)]
    assert found == [
        (0, "file_version"),
        *steps,
        (0, "file_version"),
        (4, "session_log"),
        (4, "summary"),
    ]
