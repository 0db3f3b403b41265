"""The optimizer on the host with its records on disk.

Results are the same, its records do not cross the link, and every error is reported.
"""

import errno
import pathlib
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import matrix
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from host_offload.disk.errors import SwapError, explain
from zerojax.state.train_state import OnDisk, is_stored

DISK, HOST = matrix.DISK, matrix.HOST


def build(tmp_path, fields, model=None, tx=None):
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    config = zj.ZeroConfig(
        **{"stage": 3, "opt_state": DISK, "update_on": "host", "swap_dir": str(tmp_path), **fields}
    )
    return zj.build_train_step(model or toys.small(), tx or optax.adamw(1e-2), config, mesh)


def train(program, data):
    """Return losses and float32 parameters."""
    with program:
        losses, state = toys.run(program, program.init(jax.random.key(0)), data)
        return losses, [
            np.asarray(a) for _, tree in program.iter_params(state) for a in jax.tree.leaves(tree)
        ]


def on_disk(program, tmp_path, kinds=("opt_state", "master", "params")):
    """Return the bytes of every record of some kinds, by file."""
    program.swap.engine.flush()
    files = [
        path for path in tmp_path.rglob("c.*") if path.parent.parent.name.split(".")[0] in kinds
    ]
    assert files
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.usefixtures("default_fusions")
@pytest.mark.by_default("bf16_in_backward-small")
@pytest.mark.parametrize("model", ["layered", "small"])
@pytest.mark.parametrize(
    ("fields", "tiers"),
    [
        (
            {"precision": "bf16", "clip_norm": 0.5},
            {"params": DISK, "grads": DISK, "opt_state": DISK, "prefetch_distance": 2},
        ),
        (
            {"precision": "bf16", "update": "in_backward", "moments": "bfloat16"},
            {"params": DISK, "opt_state": DISK, "io": "tensorstore", "prefetch_distance": 0},
        ),
        ({"precision": "fp16"}, {"params": HOST, "grads": DISK, "opt_state": DISK}),
        (
            {"num_microbatches": 4},
            {"params": DISK, "grads": DISK, "opt_state": HOST, "io": "tensorstore"},
        ),
        pytest.param(
            {"update": "in_backward"},
            {"params": DISK, "opt_state": DISK},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["bf16", "bf16_in_backward", "fp16", "microbatches", "fp32_in_backward"],
)
def test_disk_and_host_memory_agree_bit_for_bit(fields, tiers, model, tmp_path):
    """The kernels and the gradients are the same.

    Only where gradients wait, and how they are read, differs.
    """
    memory = {name: HOST if tier == DISK else tier for name, tier in tiers.items() if name != "io"}
    made = getattr(toys, model)(), toys.optimizer() if model == "layered" else None
    expected, before = train(build(tmp_path, fields | memory, *made), toys.batches(4))
    losses, after = train(build(tmp_path, fields | tiers, *made), toys.batches(4))
    np.testing.assert_array_equal(losses, expected)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)


# by default `test_equivalence_of_tiers.py` runs one, and the test above compares the layers' bits
@pytest.mark.exhaustive
@pytest.mark.usefixtures("default_fusions")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resident_model_with_its_optimizer_state_on_disk(precision, tmp_path):
    """Some of the leaves are scalars, and are stored with the other leaves."""
    fields = {"stage": 1, "clip_norm": 0.5, "num_microbatches": 4, "precision": precision}
    expected, before = train(
        build(tmp_path, fields | {"opt_state": HOST}, toys.unrolled(), toys.optimizer()),
        toys.batches(4),
    )
    program = build(tmp_path, fields, toys.unrolled(), toys.optimizer())
    assert all(isinstance(leaf, OnDisk) or leaf.dtype == jnp.int32 for leaf in opt_leaves(program))
    losses, after = train(program, toys.batches(4))
    np.testing.assert_array_equal(losses, expected)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)


def opt_leaves(program):
    return jax.tree.leaves(program.layout.abstract_state.opt_state, is_leaf=is_stored)


# by default `test_host_update.py` runs lion; the tier of its state changes no kernel
@pytest.mark.exhaustive
@pytest.mark.usefixtures("default_fusions")
@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_any_elementwise_optimizer_runs_there(name, tmp_path):
    tx = {"lion": optax.lion(1e-3), "sgd": optax.sgd(0.05, 0.9)}[name]
    expected, before = train(
        build(tmp_path, {"opt_state": HOST, "params": HOST}, tx=tx), toys.batches(3)
    )
    losses, after = train(build(tmp_path, {"params": DISK}, tx=tx), toys.batches(3))
    np.testing.assert_array_equal(losses, expected)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)


def files_bytes(program, kinds):
    """Return the bytes of the records of some kinds, over all devices."""
    shelves = program.layout.disk.kinds.values()
    return 4 * sum(r.num_layers * r.num_bytes for r in shelves if r.kind.split(".")[0] in kinds)


@pytest.mark.by_default("fields1-2-2-read1-written1")
@pytest.mark.parametrize(
    ("fields", "down", "up", "read", "written"),
    [
        ({"precision": "bf16"}, 2, 2, ("opt_state", "master"), ("opt_state", "master")),
        (
            {"precision": "bf16", "grads": DISK},
            2,
            2,
            ("opt_state", "master", "grads"),
            ("opt_state", "master", "grads"),
        ),
        (
            {"precision": "bf16", "update": "in_backward"},
            2,
            2,
            ("opt_state", "master"),
            ("opt_state", "master"),
        ),
        ({"params": HOST}, 4, 0, ("opt_state",), ("opt_state",)),
        # float32 weights on the device are loaded as well
        ({}, 8, 4, ("opt_state",), ("opt_state",)),
        ({"opt_state": HOST, "grads": DISK, "precision": "bf16"}, 2, 2, ("grads",), ("grads",)),
    ],
)
def test_the_optimizer_state_goes_to_the_disk_and_back_once_and_never_to_the_device(
    fields, down, up, read, written, tmp_path
):
    with build(
        tmp_path, {"prefetch_distance": 0, **fields}
    ) as program:  # nothing is read for the next step
        state = program.init(jax.random.key(0))
        traffic, engine = program._runner.host.host.traffic, program.swap.engine
        taken, take = [], engine.take_stats
        engine.take_stats = lambda: (
            taken.append(take()) or taken[-1]
        )  # during the step, while its last writes are in flight
        for batch in toys.batches(2):
            settle(engine)
            engine.take_stats()
            taken.clear()
            before = (traffic.to_host, traffic.to_device)
            state, _ = program.step(state, batch)
            settle(engine)
            engine.take_stats()
            assert traffic.to_host - before[0] == toys.trained_bytes(program, down)
            assert traffic.to_device - before[1] == toys.trained_bytes(program, up)
            assert sum(stats.bytes_read for stats in taken) == files_bytes(program, read)
            assert sum(stats.bytes_written for stats in taken) == files_bytes(program, written)


def settle(engine):
    """Wait for pending writes."""
    engine.flush()
    while any(lane.writing for lane in engine._lanes.values()):
        threading.Event().wait(0.001)


@pytest.mark.by_default("in_backward-2")
@pytest.mark.parametrize(
    ("update", "distance"),
    [
        ("after_backward", 0),
        ("after_backward", 1),
        ("in_backward", 0),
        ("in_backward", 2),
        pytest.param("after_backward", 2, marks=pytest.mark.exhaustive),
        pytest.param("in_backward", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_reads_run_ahead_of_the_kernels(update, distance, tmp_path):
    fields = {"update": update}
    fields |= (
        {"grads": DISK, "activations": DISK, "precision": "bf16"}
        if update == "after_backward"
        else {}
    )
    with build(tmp_path, {"prefetch_distance": distance, **fields}) as program:
        state = program.init(jax.random.key(0))
        for step, batch in enumerate(toys.batches(4)):
            state, metrics = program.step(state, batch)
            late = float(metrics["swap_misses"])
            assert (late == 0 or step == 0) if distance else late > 0


@pytest.mark.by_default("bf16")
@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16", "params": DISK, "grads": DISK},
        {"params": DISK, "update": "in_backward"},
        {"precision": "fp16", "grads": HOST},
    ],
    ids=["bf16", "in_backward", "fp16"],
)
def test_a_gradient_that_is_not_finite_updates_nothing(fields, tmp_path):
    good, bad = toys.batches(3), toys.batches(2)[1] | {"weight": np.float32(np.nan)}
    with build(tmp_path, fields) as program:
        state, _ = program.step(program.init(jax.random.key(0)), good[0])
        kept = on_disk(program, tmp_path)
        state, metrics = program.step(state, bad)
        assert float(metrics["skipped_steps"]) == 1
        assert on_disk(program, tmp_path) == kept
        for lane in (
            program.swap.engine._lanes.values()
        ):  # only the next step's first records are read ahead
            assert lane.window.position == len(lane.window.moves)
        state, metrics = program.step(state, good[2])
        assert on_disk(program, tmp_path) != kept
        assert np.isfinite(float(metrics["loss"]))


def break_disk(program, name, kind, layer):
    """Make one record's reads or writes fail, as a disk does."""
    io = program.swap.engine.io
    whole = getattr(io, name)

    def broken(store, at, buffer):
        if (store.kind, at) != (kind, layer):
            return whole(store, at, buffer)
        done = Future()
        done.set_exception(
            explain(OSError(errno.EIO, "broken"), doing=f"{name} {kind}", file=store.path, layer=at)
        )
        return done

    setattr(io, name, broken)
    return lambda: setattr(io, name, whole)


@pytest.fixture(scope="module")
def breakable(tmp_path_factory):
    """Return `breakable() -> program, expected losses`.

    The program is built once, and starts again in each test.
    """
    made = []

    def get():
        if not made:
            fields = {"precision": "bf16", "params": DISK, "grads": DISK, "prefetch_distance": 2}
            program = build(tmp_path_factory.mktemp("swap"), fields)
            made.append(
                (program, toys.run(program, program.init(jax.random.key(0)), toys.batches(3))[0])
            )
        return made[0]

    yield get
    for program, _ in made:
        program.close()


@pytest.mark.by_default("write-params")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("read", "opt_state"), ("write", "opt_state"), ("write", "grads"), ("write", "params")],
)
def test_an_error_of_the_disk_is_raised_by_the_step_and_hangs_nothing(name, kind, breakable):
    data, (program, expected) = toys.batches(3), breakable()
    state, _ = program.step(program.init(jax.random.key(0)), data[0])
    repair = break_disk(program, name, kind, 1)
    with pytest.raises(SwapError, match=f"{name} {kind} of layer 1.*EIO") as error:
        toys.run(program, state, data[1:])  # a write at the end of the step may fail after it
    assert (error.value.layer, error.value.errno) == (1, errno.EIO)
    repair()
    losses, _ = toys.run(
        program, program.init(jax.random.key(0)), data
    )  # the disk has been replaced: a new state trains
    np.testing.assert_array_equal(losses, expected)


def test_an_error_of_a_kernel_is_raised_by_the_step(tmp_path, monkeypatch):
    with build(tmp_path, {"params": DISK}) as program:
        state, _ = program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
        calls = []

        def fail(*args, **_):
            calls.append(args)
            raise OSError("no such thing")

        monkeypatch.setattr(program._runner.host.host, "run_kernel", fail)
        with pytest.raises(
            RuntimeError, match="update on the host failed, and the state is lost"
        ) as error:
            program.step(state, toys.batches(1)[0])
        assert isinstance(error.value.__cause__, OSError)
        assert len(calls) > 4  # other layers continued


def test_a_state_whose_records_were_overwritten_is_refused(tmp_path, monkeypatch):
    with build(
        tmp_path, {"grads": HOST}
    ) as program:  # the number passes through a callback that needs no record
        old, new = program.init(jax.random.key(0)), program.init(jax.random.key(1))
        kept, (first, second) = on_disk(program, tmp_path), (number_of(old), number_of(new))
        with pytest.raises(
            ValueError,
            match=rf"this state \(number {first}\) is not the one on disk \(number {second}\)",
        ):
            program.step(old, toys.batches(1)[0])
        assert on_disk(program, tmp_path) == kept
        begin = program.swap.begin
        monkeypatch.setattr(
            program.swap, "begin", lambda held, *args, **kwargs: begin((), *args, **kwargs)
        )  # the callbacks check it too
        with pytest.raises(
            SwapError,
            match=f"records of state {first} were asked for, and those of state {second} are on disk",
        ):
            program.step(old, toys.batches(1)[0])
        assert all(pathlib.Path(path).read_bytes() == was for path, was in kept.items())


def number_of(state):
    leaves = jax.tree.leaves(state, is_leaf=is_stored)
    return next(int(leaf.token[0]) for leaf in leaves if isinstance(leaf, OnDisk))


def test_leaves_on_disk_carry_the_number_of_their_state(tmp_path):
    with build(tmp_path, {"params": DISK, "precision": "bf16"}) as program:
        program.init(jax.random.key(0))
        state = program.init(jax.random.key(0))
        first = program.swap.generation
        for step, batch in enumerate(toys.batches(2)):
            leaves = jax.tree.leaves(
                (state.params, state.master, state.opt_state), is_leaf=is_stored
            )
            held = [leaf for leaf in leaves if isinstance(leaf, OnDisk)]
            assert len(held) == len(leaves) - 1  # all but the step count
            assert all((np.asarray(leaf.token) == first + step).all() for leaf in held)
            state, _ = program.step(state, batch)
