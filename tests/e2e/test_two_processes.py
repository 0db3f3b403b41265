"""Two processes on one machine (jax.distributed, gloo) train like a single process.

An error in one of them is raised in both.
"""

import errno

import jax
import numpy as np
import processes
import pytest
import toys
from matrix_of_checkpoints import assert_same, numbers

import zerojax as zj

pytestmark = pytest.mark.xdist_group("two_processes")  # tests share the processes' findings
DAMAGED = "opt_state/{rank}/c.1.0"

WORKER = """
import errno, signal, time
import toys
import zerojax as zj
from host_offload.disk import SwapError

mesh = zj.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
assert jax.device_count() == 4 or processes == 1
# numpy leaves hold this process's part: rows of the first data shard, then of the second
part = slice(me * toys.BATCH // processes, (me + 1) * toys.BATCH // processes)
local = [{k: v[part] if getattr(v, "ndim", 0) else v for k, v in b.items()} for b in toys.batches(3)]
found = {}


def build(kind, swap_dir=None, **fields):
    config = zj.ZeroConfig(stage=3, clip_norm=0.5, swap_dir=swap_dir and str(swap_dir), **fields)
    return zj.build_train_step(getattr(toys, kind)(), toys.optimizer(), config, mesh)


def losses_of(program, data):
    losses, state = toys.run(program, program.init(jax.random.key(0)), data)
    return [*losses, float(program.eval(state, data[0]))], state


DISK = dict.fromkeys(("params", "grads", "opt_state", "activations"), "nvme")


def failure(what, work):
    start = time.monotonic()
    try:
        work()
    except (RuntimeError, ValueError) as error:
        assert time.monotonic() - start < 20
        found[what] = [type(error).__name__, str(error), getattr(error, "file", None), getattr(error, "errno", None)]


def fail_in_one(program):
    "Let the last process fail: in a step, between two steps, and where a program is built."
    engine, last = program.swap.engine, me == processes - 1
    state, _ = program.step(program.init(jax.random.key(0)), local[0])
    engine.flush()
    if last:
        (out / f"zerojax-swap-{me}" / "DAMAGED".format(rank=max(engine._lanes))).unlink()
    failure("in a step", lambda: program.step(state, local[1]))
    found["failed"] = engine.failed
    failure("after it", lambda: next(program.iter_params(program_state)))
    state, _ = program.step(program.init(jax.random.key(0)), local[0])
    if last:
        engine.fail(OSError(errno.EIO, ""))  # as a write does that ends after its step
    failure("between steps", lambda: program.step(state, local[1]))
    found["after all"] = losses_of(program, local[:3])[0]
    program.close()
    failure("build", lambda: build("layered", out / "nowhere" if last else out, **DISK))


def fail_on_host(program):
    "Let an optimizer's kernel fail in the last process."
    update, last = program._runner.host.host.run_kernel, me == processes - 1
    state, _ = program.step(program.init(jax.random.key(0)), local[0])

    def broken(*args, **kwargs):
        raise ZeroDivisionError("no kernel")

    if last:
        program._runner.host.host.run_kernel = broken
    failure("on the host", lambda: program.step(state, local[1]))
    program._runner.host.host.run_kernel = update
    found["after the host"] = toys.run(program, program.init(jax.random.key(0)), local[:3])[0]


def stop_one(program):
    "Send a signal to the last process during a run: both stop after the same step."
    state = program.init(jax.random.key(0))
    with zj.Preemption() as preemption:
        for step in range(1, 10_000):
            if step == 2 and me == processes - 1:
                signal.raise_signal(signal.SIGTERM)
            state, _ = jax.block_until_ready(program.step(state, local[0]))
            if preemption.reached(step):
                break
    found["stopped"] = step


def restore_what_one_saved(program):
    with zj.Checkpointer(out.parent / "one" / "saved") as ckpt:
        state = ckpt.restore(program)
    found["restored"] = float(program.eval(state, local[0]))
    with zj.Checkpointer(out / "again") as ckpt:
        ckpt.save(program, state)


with build("layered", out, **DISK) as program:
    found["nvme"], program_state = losses_of(program, local[:3])
    found["folders"] = sorted(path.name for path in out.glob("zerojax-swap-[0-9]*"))
    found["ranks"] = sorted(program.swap.engine._lanes)
    with zj.Checkpointer(out / "saved") as ckpt:
        ckpt.save(program, program_state)
    if processes > 1:
        fail_in_one(program)
        restore_what_one_saved(program)
# of a stack of layers in memory test_save_together.py compares the losses
toys.LAYERS = 1
with build("unrolled", num_microbatches=2, update_on="host", opt_state="pinned_host") as program:
    found["host"] = toys.run(program, program.init(jax.random.key(0)), local[:3])[0]
    if processes > 1:
        fail_on_host(program)
        stop_one(program)
""".replace("DAMAGED", DAMAGED)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the folder, and the findings of a single process and of each of two processes."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "one").mkdir()
    alone = {"jax": jax, "processes": 1, "me": 0, "out": folder / "one"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "LAYERS", toys.LAYERS)  # changed by the worker
        # in this process: a third one would start and import for as long as it trains
        exec(WORKER, alone)
    return folder, [alone["found"], *processes.launch(WORKER, folder / "two", 2, devices=4)]


@pytest.mark.parametrize("kind", ["nvme", "host"])
def test_two_processes_train_the_losses_of_one(found, kind):
    alone, first, second = (each[kind] for each in found[1])
    assert first == second
    np.testing.assert_allclose(first, alone, rtol=1e-5)
    assert alone[-1] < alone[0]


def test_what_two_processes_saved_from_disk_one_restores_and_the_reverse(found, tmp_path):
    folder, (alone, first, second) = found
    assert_same(numbers(folder / "two" / "again", 3), numbers(folder / "one" / "saved", 3))
    np.testing.assert_allclose(
        [first["restored"], second["restored"]], alone["nvme"][-1], rtol=1e-5
    )
    config = zj.ZeroConfig(
        stage=3, swap_dir=str(tmp_path), params="nvme", grads="nvme", opt_state="nvme"
    )
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    saved, again = folder / "two" / "saved", tmp_path / "again"
    with (
        zj.build_train_step(toys.layered(), toys.optimizer(), config, mesh) as program,
        zj.Checkpointer(saved) as source, zj.Checkpointer(again) as target,
    ):  # fmt: skip
        target.save(program, source.restore(program))
    assert_same(numbers(again, 3), numbers(saved, 3))


def test_each_process_has_its_own_swap_folder(found):
    alone, first, second = found[1]
    assert alone["folders"] == ["zerojax-swap-0"]
    assert first["folders"] == second["folders"] == ["zerojax-swap-0", "zerojax-swap-1"]
    assert alone["ranks"] == sorted(first["ranks"] + second["ranks"]) == list(range(4))


def test_processes_stop_after_the_same_step(found):
    _, first, second = found[1]
    assert first["stopped"] == second["stopped"]
    assert 2 <= first["stopped"] < 9999


def failed_in_another(what):
    return f"{what} of process 1 failed: that process raises the error, with its cause and remedy"


def test_what_fails_in_one_process_is_raised_in_both(found):
    _, other, failed = found[1]
    for what, number in (
        ("in a step", errno.ENOENT),
        ("between steps", errno.EIO),
        ("build", None),
    ):
        assert other[what][0] == "SwapError"
        assert "process 1 failed" in other[what][1]
        assert failed[what][3] == number
    assert failed["in a step"][2].endswith(DAMAGED.format(rank=max(failed["ranks"])))
    assert failed["build"][0] == "ValueError"
    assert "nowhere" in failed["build"][1]
    assert other["on the host"][:2] == [
        "RuntimeError",
        failed_in_another("the optimizer's update on the host"),
    ]
    assert failed["on the host"][0] == "RuntimeError"
    assert (
        "state is lost: restore a checkpoint, or make a state with init" in failed["on the host"][1]
    )
    for each in (other, failed):
        assert each["after the host"] == each["host"]
        assert each["failed"]
        assert "lost: restore a checkpoint, or make a state with init" in each["after it"][1]
        assert each["after all"] == each["nvme"]
