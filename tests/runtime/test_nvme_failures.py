"""Disk errors are raised by program.step, with file and layer; nothing hangs.

No wrong number is returned.
"""

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import disks
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from open_files import descriptors

import zerojax as zj
from host_offload.disk.errors import SwapError
from host_offload.engine.buffer_sets import DeviceRecords

pytestmark = pytest.mark.xdist_group(
    "nvme_failures"
)  # tests share programs, so they share a process

DISK = "nvme"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def build(swap_dir, devices=4, **fields):
    config = zj.ZeroConfig(stage=3, swap_dir=str(swap_dir), **{**ALL, **fields})
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    return zj.build_train_step(toys.small(), optax.adamw(1e-2), config, mesh)


def folder_of(swap_dir):
    (folder,) = (path for path in pathlib.Path(swap_dir).iterdir() if path.is_dir())
    return folder


def losses_of(program, state, steps=3):
    losses = []
    for batch in toys.batches(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return `opened(io, distance) -> program, expected losses`.

    Each program is built once, and starts again in each test.
    """
    made = {}

    def get(io, distance):
        if (io, distance) not in made:
            program = build(tmp_path_factory.mktemp("swap"), io=io, prefetch_distance=distance)
            made[io, distance] = program, losses_of(program, program.init(jax.random.key(0)))[0]
        return made[io, distance]

    yield get
    for program, _ in made.values():
        program.close()
        assert not [
            path for path in pathlib.Path(program.config.swap_dir).iterdir() if path.is_dir()
        ]


def cut(path):
    os.truncate(path, 100)


def remove(path):
    path.unlink()


def flip(path):
    with open(path, "r+b") as file:
        file.seek(17)
        byte = file.read(1)[0]
        file.seek(17)
        file.write(bytes([byte ^ 4]))


def fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.by_default("flip-direct", "fifo-direct")
@pytest.mark.parametrize("io", ["direct", "tensorstore"])
@pytest.mark.parametrize("damage", [cut, remove, flip, fifo])
def test_a_damaged_record_is_named_and_the_state_is_lost(opened, damage, io):
    program, expected = opened(io, 1)
    state = program.init(jax.random.key(0))
    state, _ = program.step(state, toys.batches(1)[0])
    record = folder_of(program.config.swap_dir) / "opt_state" / "1" / "c.1.0"
    program.swap.engine.flush()
    damage(record)
    copy = jax.tree.map(lambda leaf: leaf.copy(), state)
    start = time.monotonic()
    with pytest.raises(SwapError) as error:
        program.step(state, toys.batches(1)[0])
    assert time.monotonic() - start < 20
    assert error.value.layer == 1
    assert error.value.file == str(record)
    with pytest.raises(ValueError, match="if step raised an error instead, restore a checkpoint"):
        program.step(state, toys.batches(1)[0])
    assert_refused(program, copy)
    found, _ = losses_of(program, program.init(jax.random.key(0)))
    assert found == expected


def assert_refused(program, copy):
    """Check that the state on disk is lost.

    A copy of the lost state does not help, and the records alone are not a state.
    """
    batch = toys.batches(1)[0]
    calls = (
        lambda: program.step(copy, batch),
        lambda: program.eval(copy, batch),
        lambda: next(program.iter_params(copy)),
    )
    for call in calls:
        with pytest.raises(SwapError, match="state on the disk is lost: restore a checkpoint, or"):
            call()
    assert not copy.step.is_deleted()


@pytest.mark.by_default("direct")
@pytest.mark.parametrize("io", ["direct", "tensorstore"])
def test_a_disk_that_is_full_in_the_middle_of_a_step(tmp_path, io):
    """Space is reserved in advance.

    "direct" finds none when a record has lost its reservation, "tensorstore" when it rewrites a
    file.
    """
    with disks.mounted(tmp_path / "small", "size=4m") as disk:
        with build(disk, io=io) as program:
            expected, state = losses_of(program, program.init(jax.random.key(0)))
            program.swap.engine.flush()
            record = (
                folder_of(disk) / "grads" / "0" / "c.1.0"
            )  # is written in the middle of the step, and only read afterwards
            os.truncate(record, 0)
            ballast, copy, start = (
                disks.fill(disk),
                jax.tree.map(lambda leaf: leaf.copy(), state),
                time.monotonic(),
            )
            with pytest.raises(
                SwapError, match=r"ENOSPC \(28\).*free space.*state on the disk is lost"
            ) as error:
                program.step(state, toys.batches(1)[0])
            assert time.monotonic() - start < 20
            assert (error.value.errno, error.value.layer is None) == (errno.ENOSPC, False)
            assert (
                error.value.file == str(record)
                if io == "direct"
                else error.value.file.startswith(str(disk))
            )
            assert_refused(program, copy)
            with pytest.raises(SwapError, match="ENOSPC"):  # nor is there space for another one
                program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
            ballast.unlink()
            assert losses_of(program, program.init(jax.random.key(0)))[0] == expected
        assert list(disk.iterdir()) == []


@pytest.mark.by_default("preadv")
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_an_io_error_in_the_middle_of_a_step(opened, monkeypatch, name):
    program, expected = opened("direct", 1)
    state = program.init(jax.random.key(0))
    state, _ = program.step(state, toys.batches(1)[0])
    program.swap.engine.flush()
    calls = []

    def broken(*args):
        calls.append(args)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, broken)
    with pytest.raises(
        SwapError
    ) as error:  # the next step reports a write that fails after the last callback
        losses_of(program, state, 2)
    assert calls
    assert error.value.errno == errno.EIO
    assert error.value.file is not None
    monkeypatch.undo()
    assert losses_of(program, program.init(jax.random.key(0)))[0] == expected


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_an_interrupt_in_a_thread_of_the_disk_is_carried_out(opened, monkeypatch, name):
    program, expected = opened("direct", 1)
    state, _ = program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
    program.swap.engine.flush()

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, name, broken)
    with pytest.raises((SwapError, KeyboardInterrupt)):
        losses_of(program, state, 2)
    monkeypatch.undo()
    assert losses_of(program, program.init(jax.random.key(0)))[0] == expected


def test_an_exception_inside_a_callback_is_carried_out(opened, monkeypatch):
    program, expected = opened("direct", 1)
    state = program.init(jax.random.key(0))
    # Functions that every callback calls. A buffer's leaves are found once, so the number of format
    # queries is arbitrary.
    monkeypatch.setattr(DeviceRecords, "views", lambda *_: 1 / 0)
    with pytest.raises(SwapError) as error:
        program.step(state, toys.batches(1)[0])
    monkeypatch.undo()
    assert "ZeroDivisionError" in str(error.value.__cause__) or "division" in str(error.value)
    assert program.swap.engine.failed
    assert losses_of(program, program.init(jax.random.key(0)))[0] == expected


def test_a_state_that_a_later_init_overwrote_is_refused(opened):
    program, other = opened("direct", 1)
    expected, _ = losses_of(program, program.init(jax.random.key(1)))
    assert expected != other
    first = program.init(jax.random.key(0))
    second = program.init(jax.random.key(1))
    batch = toys.batches(1)[0]
    for call in (
        lambda: program.step(first, batch),
        lambda: program.eval(first, batch),
        lambda: next(program.iter_params(first)),
    ):
        with pytest.raises(ValueError, match="overwritten by a later init"):
            call()
    assert losses_of(program, second)[0] == expected  # the refused calls did no harm


def test_a_folder_serves_one_program_and_a_closed_one_says_so_and_can_begin_again(tmp_path):
    program = build(tmp_path)
    with pytest.raises(SwapError, match=str(os.getpid())):
        build(tmp_path)
    expected, state = losses_of(program, program.init(jax.random.key(0)))
    assert folder_of(tmp_path).stat().st_mode & 0o777 == 0o700
    program.close()
    with build(tmp_path) as other:
        other.init(jax.random.key(0))
    program.close()
    with pytest.raises(RuntimeError, match="closed"):
        program.step(state, toys.batches(1)[0])
    assert losses_of(program, program.init(jax.random.key(0)))[0] == expected
    program.close()


def test_buffers_that_no_memory_holds_are_refused_when_the_program_is_built(tmp_path):
    def init_block(key):
        return {"w": jnp.ones((1 << 21, 1 << 20))}  # 8 TiB

    model = toys.layered()
    model = zj.LayeredModel(
        4,
        model.init_embed,
        model.embed,
        init_block,
        lambda p, x, key: x,
        model.init_head,
        model.head,
    )
    config = zj.ZeroConfig(stage=3, params=DISK, opt_state=DISK, swap_dir=str(tmp_path))
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    with pytest.raises(
        RuntimeError,
        match=rf" {4 * (2 << 41)} bytes x 4 devices.* for opt_state, .*prefetch_distance=1",
    ):
        zj.build_train_step(model, toys.optimizer(), config, mesh)
    assert list(tmp_path.iterdir()) == []


def test_swap_dir_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        build(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="not a folder"):
        build(tmp_path / "file")


KILLED = """
import os, signal, sys, threading
sys.path[:0] = [{helpers!r}, {tests!r}, {here!r}]
import conftest, jax, toys
import test_nvme_failures as t
program = t.build({folder!r})
state = program.init(jax.random.key(0))
state, _ = program.step(state, toys.batches(1)[0])
engine, calls = program.swap.engine, []
store = engine.store
def killed(*args):
    calls.append(args)
    if len(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    store(*args)
engine.store = killed
print("ready", flush=True)
program.step(state, toys.batches(1)[0])
"""


@pytest.mark.exhaustive  # by default test_kill.py sees the same warning
def test_a_folder_of_a_killed_process_is_recognised(tmp_path, caplog):
    code = KILLED.format(
        helpers=str(ROOT / "tests" / "helpers"),
        tests=str(ROOT / "tests"),
        here=os.path.dirname(__file__),
        folder=str(tmp_path),
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "ready", done.stderr
    assert done.returncode == -signal.SIGKILL
    assert list(folder_of(tmp_path).rglob("c.*"))
    with caplog.at_level("WARNING"), build(tmp_path) as program:
        losses_of(program, program.init(jax.random.key(0)), 1)
    assert [r for r in caplog.records if "zerojax-swap" in r.getMessage()]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def own_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zerojax")]


def steps_of(program, state, batch, steps):
    """Train, and count threads, descriptors and resident bytes while nothing is in flight.

    Returns the state and the counts.
    """
    for step in range(steps):
        state, metrics = program.step(state, batch)
        assert np.isfinite(float(metrics["loss"]))
        assert step == 0 or metrics["swap_misses"] == 0
    program.swap.engine.flush()
    return state, own_threads(), descriptors(), resident_bytes()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
@pytest.mark.parametrize("steps", [12, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_many_steps_on_many_devices_grow_nothing(tmp_path, steps):
    """On 8 devices: no hang, and no growth of threads, descriptors or memory."""
    batch = toys.batches(1)[0]
    others = own_threads()
    with build(tmp_path, devices=8, update="in_backward") as program:
        state = program.init(jax.random.key(0))
        state, threads, files, num_bytes = steps_of(program, state, batch, 9)
        state, threads_after, files_after, num_bytes_after = steps_of(
            program, state, batch, steps - 9
        )
        assert len(threads_after) == len(threads)
        assert not files_after - files
        assert num_bytes_after - num_bytes < 16 << 20
    assert own_threads() == others


def wait_for(child, seconds=10):
    """Return a child's exit status; a hanging child is killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it hangs"


@pytest.mark.filterwarnings("ignore:.*os.fork")  # from JAX and Python, which have threads
def test_a_forked_child_that_unwinds_leaves_the_program_to_its_parent(
    opened, monkeypatch, tmp_path
):
    program, expected = opened("direct", 1)
    batches = toys.batches(3)
    state, metrics = program.step(program.init(jax.random.key(0)), batches[0])
    losses, engine, read = [float(metrics["loss"])], program.swap.engine, os.preadv
    engine.flush()
    monkeypatch.setattr(os, "preadv", lambda *args: (time.sleep(0.2), read(*args))[1])
    with contextlib.ExitStack() as stack:
        stack.enter_context(program.trace_swaps(tmp_path / "trace.json"))
        program.swap.begin(state, program._moves[::-1])  # reads ahead, which never end in the child
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with (
                    contextlib.suppress(ZeroDivisionError),
                    program,
                    stack,
                    contextlib.closing(engine),
                    engine.io,
                ):
                    raise ZeroDivisionError
                status = 0
            finally:
                os._exit(status)
        assert wait_for(child) == 0
        assert not (tmp_path / "trace.json").exists()
    monkeypatch.undo()
    assert folder_of(program.config.swap_dir).is_dir()
    for batch in batches[1:]:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses == expected
