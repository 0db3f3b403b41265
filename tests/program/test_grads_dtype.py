"""`grads_dtype` changes how gradients are stored, and their bytes, but not how they are summed."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

HOST, DISK = "pinned_host", "nvme"
HIDDEN = 64
ON_HOST = {"params": HOST, "grads": HOST, "opt_state": HOST}
ON_DISK = {"params": DISK, "grads": DISK, "opt_state": DISK}
SUMMED = {"precision": "bf16", "num_microbatches": 2, "clip_norm": 1.0}


def model() -> zj.LayeredModel:
    """Return a model whose gradients fill whole pages of a disk in 16 bits and in 32."""
    return zj.LayeredModel(
        toys.LAYERS,
        lambda key: {"table": 0.3 * toys.draw(key, (toys.VOCAB, HIDDEN))},
        lambda p, batch, key: p["table"][batch["tokens"]],
        lambda key: {"w": toys.draw(key, (HIDDEN, HIDDEN)) / 8},
        lambda p, x, key: x + jnp.tanh(x @ p["w"]),
        lambda key: {"out": toys.draw(key, (HIDDEN, toys.VOCAB)) / 8},
        lambda p, p_embed, x, batch, key: toys.cross_entropy(x @ p["out"], batch),
    )


def build(grads_dtype: str | None, tx: Any = None, **fields: Any) -> zj.Program:
    config = zj.ZeroConfig(grads_dtype=grads_dtype, **fields)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(model(), tx or optax.adamw(1e-2), config, mesh)


def train(program: zj.Program, data: list[Any], state: Any = None) -> tuple[list[dict], Any]:
    """Return the metrics of each step, and the last state."""
    state = program.init(jax.random.key(0)) if state is None else state
    rows = []
    for batch in data:
        state, metrics = jax.block_until_ready(program.step(state, batch))
        row = {name: float(value) for name, value in metrics.items()}
        if program.swap is not None:  # a step does not wait for its last writes
            program.swap.engine.flush()
            row["swap_write_bytes"] += program.swap.engine.take_stats().bytes_written
        rows.append(row)
    return rows, state


@dataclasses.dataclass(frozen=True)
class Run:
    """Metrics and parameters of a training, and the bytes of one step on one device.

    Attributes:
      rows: metrics of each step.
      params: parameters after the last step.
      moved: bytes over the host link in each direction, and to and from the disk.
    """

    rows: list[dict]
    params: dict[str, Any]
    moved: dict[str, int]


def run(grads_dtype: str | None, folder: pathlib.Path, **fields: Any) -> Run:
    data = toys.batches(4)
    with build(grads_dtype, swap_dir=folder, **fields) as program:
        operations = program.operations(data[0])
        moved = {lane: operations.moved(lane) for lane in ("up", "down", "read", "write")}
        rows, state = train(program, data)
        state = program.settle(state)
        params = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
    return Run(rows, params, moved)


def assert_same(actual: Run, expected: Run) -> None:
    """Assert equal metrics and parameters, bit for bit."""
    for old, new in zip(expected.rows, actual.rows, strict=True):
        for name in ("loss", "grad_norm", "skipped_steps"):
            assert new.get(name) == old.get(name), name
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)


def assert_near(actual: Run, expected: Run) -> None:
    """Assert equal first steps up to the update, and later ones within the rounding of bfloat16."""
    assert actual.rows[0]["loss"] == expected.rows[0]["loss"]
    # The norm is that of the sums.
    np.testing.assert_allclose(actual.rows[0]["grad_norm"], expected.rows[0]["grad_norm"], 1e-6)
    for old, new in zip(expected.rows, actual.rows, strict=True):
        np.testing.assert_allclose(new["loss"], old["loss"], rtol=2**-8)
    assert actual.rows[-1]["loss"] != expected.rows[-1]["loss"]


@pytest.mark.by_default("disk")
@pytest.mark.parametrize("tiers", [ON_HOST, ON_DISK], ids=["host", "disk"])
def test_bfloat16_halves_the_bytes_of_summed_gradients_and_rounds_each_sum_once(tiers, tmp_path):
    plain = run(None, tmp_path, update="after_backward", **tiers, **SUMMED)
    after = run("bfloat16", tmp_path, update="after_backward", **tiers, **SUMMED)
    forward = run("bfloat16", tmp_path, update="in_forward", **tiers, **SUMMED)
    saved = toys.LAYERS * HIDDEN * HIDDEN // 2 * 2  # 2 of 4 bytes, of the shards of 2 devices
    lanes = ("up", "down", "read", "write") if tiers is ON_DISK else ("up", "down")
    for lane in lanes:
        assert plain.moved[lane] - after.moved[lane] == saved
    if tiers is ON_DISK:  # the engine of both devices, in the last step
        written = forward.rows[-1]["swap_write_bytes"]
        assert written == 2 * forward.moved["write"] == 2 * (plain.moved["write"] - saved)
    assert_near(after, plain)
    assert_same(forward, after)


ON_THE_HOST = {"opt_state": HOST, "update_on": "host"}
HOST_UPDATES = {
    "grads_on_host": {**ON_HOST, **ON_THE_HOST},
    "grads_on_device": ON_THE_HOST,
    "grads_on_disk": {**ON_THE_HOST, "grads": DISK},
    "in_forward": {**ON_HOST, **ON_THE_HOST, "update": "in_forward"},
    "delayed": {**ON_THE_HOST, "delayed_update": True},
}


@pytest.mark.exhaustive  # by default the test above rounds with an update on the device
@pytest.mark.parametrize("case", HOST_UPDATES.values(), ids=HOST_UPDATES)
def test_the_host_updates_with_rounded_gradients(case, tmp_path):
    rounded = run("bfloat16", tmp_path, **SUMMED, **case)
    assert_near(rounded, run(None, tmp_path, **SUMMED, **case))
    if case.get("update") == "in_forward":
        case = case | {"update": "after_backward"}
        assert_same(rounded, run("bfloat16", tmp_path, **SUMMED, **case))


def test_a_full_tree_is_updated_with_rounded_gradients_and_the_norm_of_the_sums():
    case = {"precision": "bf16", "num_microbatches": 2, "activations": HOST}
    data = toys.batches(1)
    grads, norms, weights = {}, {}, {}
    for dtype in (None, "bfloat16"):
        program = build(dtype, optax.sgd(1.0), **case)
        state = program.init(jax.random.key(0))
        start = jax.device_get(state.master)
        grads[dtype] = jax.device_get(program.grads(state, data[0])[1])
        rows, state = train(program, data, state)
        norms[dtype] = rows[0]["grad_norm"]
        weights[dtype] = jax.device_get(state.master)
        expected = jax.tree.map(lambda w, g: w - g, start, grads[dtype])
        jax.tree.map(np.testing.assert_array_equal, weights[dtype], expected)
    # A mean over 2 microbatches rounds like the sum.
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(np.float32), grads[None])
    jax.tree.map(np.testing.assert_array_equal, grads["bfloat16"], rounded)
    np.testing.assert_allclose(norms["bfloat16"], norms[None], rtol=1e-6)
    assert abs(optax.global_norm(rounded) / norms[None] - 1) > 1e-5


def test_float32_holds_16_bit_gradients_without_changing_a_number(tmp_path):
    case = {**ON_HOST, "precision": "bf16", "update": "in_forward"}
    wide = run("float32", tmp_path, **case)
    plain = run(None, tmp_path, **case)
    # The norm clips nothing here, and jax 0.12 sums its squares in another order.
    norms = [[row.pop("grad_norm") for row in each.rows] for each in (wide, plain)]
    np.testing.assert_allclose(*norms, rtol=1e-6)
    assert_same(wide, plain)
    added = toys.LAYERS * HIDDEN * HIDDEN // 2 * 2
    assert {lane: n - plain.moved[lane] for lane, n in wide.moved.items()} == {
        "up": added,
        "down": added,
        "read": 0,
        "write": 0,
    }


MIXES = {
    "one_reduction": {**ON_HOST, **SUMMED, "reduce_every": "step"},
    "float32_sums": {**ON_HOST, "precision": "bf16", "reduce_dtype": "float32"},
    "gather_ahead": {**ON_HOST, **SUMMED, "gather_ahead": True, "prefetch_distance": 2},
    "half_on_device": {**ON_HOST, **SUMMED, "opt_state_device_fraction": 0.5},
    "bf16_moments": {**ON_HOST, **SUMMED, "moments": "bfloat16"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MIXES.values(), ids=MIXES)
def test_both_orders_of_an_update_read_the_same_rounded_gradients(case, tmp_path):
    after = run("bfloat16", tmp_path, update="after_backward", **case)
    assert_same(run("bfloat16", tmp_path, update="in_forward", **case), after)
    assert_near(after, run(None, tmp_path, update="after_backward", **case))


def test_float32_training_may_store_bfloat16_gradients(tmp_path):
    case = {**ON_HOST, "update": "in_forward"}
    assert_near(run("bfloat16", tmp_path, **case), run(None, tmp_path, **case))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"update": "in_backward"}, "update='in_backward': each layer"),
        ({"opt_state": HOST, "precision": "fp16"}, "precision='fp16': its gradients"),
        ({"num_microbatches": 2}, "needs a streamed step"),
    ],
    ids=["in_backward", "fp16", "resident"],
)
def test_a_dtype_that_means_nothing_or_loses_too_much_is_refused(fields, match):
    with pytest.raises(ValueError, match=rf"grads_dtype='bfloat16'.*{match}"):
        zj.ZeroConfig(grads_dtype="bfloat16", **fields)


def test_a_model_without_layers_is_refused():
    config = zj.ZeroConfig(grads_dtype="bfloat16", opt_state=HOST)
    with pytest.raises(ValueError, match="grads_dtype='bfloat16' works layer by layer"):
        zj.build_train_step(toys.unrolled(), optax.adam(1e-3), config, zj.make_mesh(fsdp=8))


def test_a_program_refuses_a_state_with_gradients_of_another_dtype():
    case = {**ON_HOST, **SUMMED, "update": "in_forward"}
    state = build(None, **case).init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"is float32, and this program's is bfloat16: .*grads_d"):
        build("bfloat16", **case).settle(state)


PENDING = {**ON_HOST, **SUMMED, "update": "in_forward", "update_on": "host"}


@pytest.mark.by_default("host-None")
@pytest.mark.parametrize("wider", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("case", ["host", "disk"])
def test_a_pending_update_is_restored_into_wider_gradients_only(case, wider, tmp_path):
    """`wider` is the dtype of the program that saves, or of the one that restores."""
    fields = PENDING if case == "host" else {**ON_DISK, **SUMMED, "update": "in_forward"}
    fields = fields | {"swap_dir": tmp_path}
    data = toys.batches(3)
    with build("bfloat16", **fields) as program, zj.Checkpointer(tmp_path / "a") as checkpointer:
        _, state = train(program, data[:2])
        checkpointer.save(program, state)
        expected, _ = train(program, data[2:], state)
    with build(wider, **fields) as other:
        with zj.Checkpointer(tmp_path / "a") as checkpointer:
            state = checkpointer.restore(other)
        assert bool(state.pending.ready)
        actual, state = train(other, data[2:], state)
        # The widened gradients update as the rounded ones would have.
        assert actual[0]["loss"] == expected[0]["loss"]
        with zj.Checkpointer(tmp_path / "b") as checkpointer:
            checkpointer.save(other, state)
    with build("bfloat16", **fields) as program, zj.Checkpointer(tmp_path / "b") as checkpointer:
        if wider == "bfloat16":
            checkpointer.restore(program)
            return
        with pytest.raises(zj.CheckpointError, match="grads_dtype='bfloat16' would round them"):
            checkpointer.restore(program)


def test_a_plan_keeps_a_fixed_dtype():
    machine = dataclasses.replace(zj.machine("h200"), device_bytes=2**20)
    fixed = {"grads_dtype": "bfloat16", "precision": "bf16", "num_microbatches": 2}
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    batch = toys.batches(1)[0]
    made = zj.plan(model(), optax.adamw(1e-2), mesh, batch, machine, fixed=fixed)
    assert made.config.grads_dtype == "bfloat16"
    assert made.config.update != "in_backward"
    with zj.build_train_step(model(), optax.adamw(1e-2), made.config, mesh) as program:
        counted = program.memory(batch).tiers
    for tier, kinds in made.bytes.items():
        assert kinds == {kind: n for kind, n in counted[tier].items() if n}
