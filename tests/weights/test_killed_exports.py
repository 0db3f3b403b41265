"""The next export removes what a killed export left, but not another process's files."""

import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from zerojax.weights import exporting
from zerojax.weights import rooms as rooms_module
from zerojax.weights.exporting import write_atomically


def export(path: pathlib.Path) -> None:
    with write_atomically(path) as output:
        pathlib.Path(output).write_text("whole")


def rooms(folder: pathlib.Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".tmp"))


class Kill(BaseException):
    """End an export like a kill: nothing is cleaned up."""


@pytest.fixture
def killed(monkeypatch):
    """Return a function that begins an export and is killed in it.

    The kernel then releases its lock.
    """

    def begin(path: pathlib.Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rooms_module.shutil, "rmtree", lambda *_, **__: None)
            patch.setattr(rooms_module, "_remove", lambda *_: None, raising=False)
            patch.setattr(rooms_module, "_remove_dead", lambda _: None)
            with pytest.raises(Kill):
                write_and_die(path)

    return begin


def write_and_die(path: pathlib.Path) -> None:
    with write_atomically(path) as output:
        pathlib.Path(output).mkdir()
        (pathlib.Path(output) / "model.safetensors").write_bytes(bytes(1000))
        raise Kill


def test_the_next_export_removes_what_killed_ones_left(tmp_path, killed, caplog):
    for name in ("a", "b.safetensors", "c.d"):
        killed(tmp_path / name)
    assert len(rooms(tmp_path)) == 3
    left = rooms(tmp_path)
    export(tmp_path / "e")
    assert os.listdir(tmp_path) == ["e"]
    assert all(
        f"{tmp_path / name} was left by an export that was killed, and is removed" in caplog.text
        for name in left
    )


def test_an_export_that_is_under_way_is_left_alone(tmp_path, killed, caplog):
    killed(tmp_path / "dead")
    with write_atomically(tmp_path / "slow") as output:
        pathlib.Path(output).write_text("slow")
        (room,) = [name for name in rooms(tmp_path) if name.startswith(".slow.")]
        export(tmp_path / "quick")
        assert rooms(tmp_path) == [room]
    assert sorted(os.listdir(tmp_path)) == ["quick", "slow"]
    assert (tmp_path / "slow").read_text() == "slow"
    assert room not in caplog.text


@pytest.mark.parametrize("at", ["open_regular", "flock", "write", "rename"])
def test_a_kill_before_the_owner_has_its_name_leaves_nothing_for_long(
    tmp_path, monkeypatch, caplog, at
):
    def die(*_, **__):
        raise Kill

    module = {"open_regular": rooms_module, "flock": fcntl, "write": os, "rename": os}[at]
    with monkeypatch.context() as patch:
        patch.setattr(rooms_module.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(module, at, die)
        with pytest.raises(Kill):
            export(tmp_path / "killed")
    (left,) = rooms(tmp_path)
    export(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert f"{tmp_path / left} was left by an export that was killed, and is removed" in caplog.text


@pytest.mark.parametrize("at", ["open_regular", "flock", "rename"])
def test_an_export_whose_new_folder_another_removes_makes_another_one(tmp_path, monkeypatch, at):
    """Another export examines the folder just before it has an owner."""
    module = {"open_regular": rooms_module, "flock": fcntl, "rename": os}[at]
    real, looked = getattr(module, at), []

    def look_first(*args, **options):
        if not looked:
            looked.append(rooms(tmp_path))
            rooms_module._remove_dead(str(tmp_path))
        return real(*args, **options)

    monkeypatch.setattr(module, at, look_first)
    export(tmp_path / "out")
    assert len(looked[0]) == 1
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "whole"


def test_a_kill_while_an_export_cleans_up_leaves_what_the_next_one_removes(tmp_path, monkeypatch):
    real = os.unlink

    def unlink_once(path, *args, **options):
        real(path, *args, **options)
        raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_once)
        with pytest.raises(Kill):
            write_files_and_fail(tmp_path / "failed")
    (left,) = rooms(tmp_path)
    assert os.path.exists(tmp_path / left / "failed.owner")
    export(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def write_files_and_fail(path: pathlib.Path) -> None:
    with write_atomically(path) as output:
        for n in range(5):
            pathlib.Path(f"{output}.{n}").write_text("x")
        raise ValueError


def test_what_may_be_another_machines_is_named_and_kept(tmp_path, killed, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        killed(tmp_path / "theirs")
    # An earlier version held no lock.
    old = tmp_path / ".old.abcd1234.tmp"
    (old / "old").mkdir(parents=True)
    others = tmp_path / ".others.tmp"
    others.mkdir()
    (tmp_path / ".file.abcd1234.tmp").write_text("no folder")
    (tmp_path / ".link.abcd1234.tmp").symlink_to(others)
    before = rooms(tmp_path)
    export(tmp_path / "out")
    assert rooms(tmp_path) == before
    (theirs,) = [name for name in before if name.startswith(".theirs.")]
    assert (
        f"{tmp_path / theirs} was left by an export on elsewhere, or one is running there"
        in caplog.text
    )
    assert f"{old} was left by an export, or one is running" in caplog.text
    assert "others" not in caplog.text
    assert "link" not in caplog.text


def test_without_locks_exports_work_and_nothing_is_removed(tmp_path, monkeypatch, caplog):
    def no_locks(*_: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with write_atomically(tmp_path / "slow") as output:
        pathlib.Path(output).write_text("slow")
        export(tmp_path / "quick")
        assert len(rooms(tmp_path)) == 1
    assert sorted(os.listdir(tmp_path)) == ["quick", "slow"]
    assert "was left by an export, or one is running" in caplog.text


def test_without_locks_a_folder_in_which_nothing_is_written_yet_stays(tmp_path, monkeypatch):
    def no_locks(*_: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with write_atomically(tmp_path / "slow") as output:
        export(tmp_path / "quick")
        pathlib.Path(output).write_text("slow")
    assert sorted(os.listdir(tmp_path)) == ["quick", "slow"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_everything_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch, is_folder):
    synced = []
    monkeypatch.setattr(
        exporting,
        "sync",
        lambda path: synced.append((os.path.basename(path), (tmp_path / "out").exists())),
    )
    with write_atomically(tmp_path / "out") as output:
        if is_folder:
            pathlib.Path(output).mkdir()
            (pathlib.Path(output) / "weights").write_text("whole")
        else:
            pathlib.Path(output).write_text("whole")
    names = ["weights", "out"] if is_folder else ["out"]
    assert synced == [*((name, False) for name in names), (tmp_path.name, True)]


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    export(pathlib.Path("~/out"))
    assert os.listdir(tmp_path) == ["out"]


CHILD = """
import pathlib, sys
from zerojax.weights.exporting import write_atomically
with write_atomically(sys.argv[1]) as output:
    pathlib.Path(output).write_bytes(bytes(1000))
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_nothing_for_long(tmp_path, number):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "killed")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    export(tmp_path / "first")
    assert len(rooms(tmp_path)) == 1
    child.send_signal(number)
    child.communicate()
    assert len(rooms(tmp_path)) == 1
    time.sleep(0.1)
    export(tmp_path / "second")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]
