"""Two different processes (jax.distributed, gloo) end with an error that names the difference.

They do not hang.
"""

import pathlib
import re

import processes
import pytest

WORKER = """
import time
import jax.numpy as jnp
import numpy as np
import optax
import toys
import zerojax as zj

mesh = zj.make_mesh(fsdp=2)
found = {}


def build(rate=1e-2, stage=0, factor=1.0):
    def loss(params, batch, key):
        x = jax.nn.one_hot(batch["tokens"], 8) @ params["w"]
        return factor * jnp.mean(x * x)

    model = zj.Model(lambda key: {"w": toys.draw(key, (8, 8))}, loss)
    return zj.build_train_step(model, optax.sgd(rate), zj.ZeroConfig(stage=stage), mesh)


def local(rows=4, length=6):
    return {"tokens": np.full((rows, length), me, np.int32)}


def error(what, work):
    try:
        work()
    except (RuntimeError, ValueError) as raised:
        found[what] = [type(raised).__name__, str(raised)]


def leave():
    json.dump(found, open(out / f"{me}.json", "w"))

"""
DIFFER = """
error("optimizer", lambda: build(rate=0.01 * (1 + me)))
error("config", lambda: build(stage=3 * me))
program, other = build(), build(factor=1.0 + me)
error("key", lambda: program.init(jax.random.key(me)))
state = program.init(jax.random.key(0))
error("rows", lambda: program.step(state, local(rows=4 + 2 * me)))
error("length", lambda: program.step(state, local(length=6 + me)))
error("loss", lambda: other.step(state, local()))
"""
TRAIN = """
program = build()
state = program.init(jax.random.key(0))
for length in (7, 6):  # both are known from here on
    state, metrics = program.step(state, local(length=length))
"""
SHORT = """
for step in range(4 - me):
    if step == 3:
        leave()
    state, metrics = program.step(state, local())
    found.setdefault("losses", []).append(float(metrics["loss"]))
leave()
"""


def ends(script: str, folder: pathlib.Path) -> list[tuple[int, str]]:
    """Return the status and the output of each of two processes."""
    workers = processes.start(WORKER + script, folder, 2, devices=2)
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return [(worker.returncode, output) for worker, output in zip(workers, outputs, strict=True)]


def test_what_differs_is_named_in_both_and_a_process_that_ends_early_ends_the_other(tmp_path):
    """One launch covers all cases, since each launch takes seconds."""
    folder = tmp_path / "two"
    (first, _), (second, _) = both = ends(DIFFER + TRAIN + SHORT, folder)
    words = {
        "optimizer": r"program 1, build_train_step differs .*optimizer: .*mul\(-0\.01.* process 0; .*mul\(-0\.02.* process 1",
        "config": r"program 2, build_train_step differs .*config: stage=0 in process 0; stage=3 in process 1",
        "key": r"program 3, init differs .*key: threefry2x32 \[0, 0\] in process 0; threefry2x32 \[0, 1\] in process 1",
        "rows": r"step over \['tokens'\] int32\[4,6\] in process 0, but .*\['tokens'\] int32\[6,6\] in process 1",
        "length": r"step over \['tokens'\] int32\[4,6\] in process 0, but .*\['tokens'\] int32\[4,7\] in process 1",
        "loss": r"program 4, step, traced differs .*program: .*1\.0.* in process 0; .*2\.0.* in process 1",
    }
    one, two = processes.found_by(folder, 2)
    for what, pattern in words.items():
        assert one[what] == two[what]
        assert one[what][0] == "ValueError"
        assert re.search(pattern, one[what][1]), one[what][1]
    assert one["losses"] == two["losses"]
    assert len(one["losses"]) == 3
    assert (first, second) == (1, 1)
    for _, output in both:
        assert re.search(
            r"call \d+ is program 5, step in process 0; process 1 ended before it; every process must",
            output,
        )


OTHERS: dict[str, tuple[str, str]] = {
    "process 0 ends early": (
        "if me == 1: program.step(state, local())",
        "step in process 1; process 0 ended before it",
    ),
    "an error": (
        "if me == 1: raise KeyError('bad data')\nprogram.step(state, local())",
        r"step in process 0; process 1 ended with KeyError \('bad data'\) before it",
    ),
    "sys.exit": (
        "if me == 1: sys.exit(0)\nprogram.step(state, local())",
        "step in process 0; process 1 ended before it",
    ),
    "a new shape in one": (
        "program.step(state, local(length=6 + 2 * me))",
        r"step over \['tokens'\] int32\[4,6\] in process 0, but .* int32\[4,8\] in process 1",
    ),
    "a new call in one": (
        "(program.eval if me else program.step)(state, local())",
        "step in process 0, but program 1, eval in process 1",
    ),
    "a save in one": (
        "zj.Checkpointer(out / 'saved').save(program, state) if me == 0 else program.step(state, local())",
        "program 1, save in process 0, but program 1, step in process 1",
    ),
    "a closed program": (
        "program.close()\nif me == 0: program.step(state, local())\ntime.sleep(60)",
        "process 1 closed program 1 after call 7, and call 8 is program 1, step",
    ),
    "a build in one": (
        "if me == 0: build()\nelse: program.step(state, local())",
        "build_train_step in process 0, but program 1, step",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", OTHERS)
def test_two_processes_that_part_both_end_and_say_why(case, tmp_path):
    script, words = OTHERS[case]
    begun = "\njson.dump(found, open(out / f'{me}.json', 'w'))\n"
    for status, output in ends(
        f"{TRAIN}{begun}{script}\njax.block_until_ready(state)\n", tmp_path / "two"
    ):
        assert status != 0
        assert re.search(words, output), output


RESTORE = """
with zj.Checkpointer(out / "saved") as ckpt:
    for _ in range(2):
        ckpt.save(program, state)
        state, _ = program.step(state, local())
    ckpt.wait()
    error("step", lambda: ckpt.restore(program, 2 + me))
    weights = {"w": np.zeros((8, 8), np.float32)}
    error("key", lambda: zj.import_params(program, weights, key=jax.random.key(me)))
    state = ckpt.restore(program)
found["restored"] = int(state.step)
"""


@pytest.mark.exhaustive
def test_two_processes_restore_one_checkpoint_and_import_with_one_key(tmp_path):
    one, two = processes.launch(WORKER + TRAIN + RESTORE, tmp_path / "two", 2, devices=2)
    words = {
        "step": "restore of step 2 in process 0, but program 1, restore of step 3 in process 1",
        "key": r"program 1, import differs between processes: values: key \[\d+, \d+\] in process 0; key \[\d+",
    }
    for what, pattern in words.items():
        assert one[what] == two[what]
        assert re.search(pattern, one[what][1]), one[what][1]
    assert one["restored"] == two["restored"] == 3
