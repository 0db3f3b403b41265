"""Checkpoints hold layers: a state of any pipeline is restored into any other program, bit for bit.

Both directions, with every byte compared.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import pytest
import toys
from matrix_of_checkpoints import DISK, HOST, assert_same, numbers
from single_layers import build_small, read_layers

import zerojax as zj
from zerojax.checkpoint import inspect
from zerojax.checkpoint.manifest import SavedState
from zerojax.state import Split, is_stored

LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program has its state: the axes of its mesh, and fields of its config."""

    axes: dict[str, int]
    fields: dict[str, Any]


PIPELINES = {
    "pipe4": Place({"pipe": 4, "fsdp": 2}, {"stage": 3, "pipe_chunks": 2}),
    "tensor": Place({"pipe": 4, "tensor": 2}, {"stage": 1, "pipe_chunks": 2}),
    "fsdp": Place({"pipe": 2, "fsdp": 4}, {"stage": 2, "pipe_chunks": 4}),
    "host": Place({"pipe": 4, "fsdp": 2}, {"stage": 3, "pipe_chunks": 2, "opt_state": HOST}),
    "fraction": Place(
        {"pipe": 2, "fsdp": 2},
        {"stage": 3, "pipe_chunks": 2, "opt_state": HOST, "opt_state_device_fraction": 0.75},
    ),
}
OTHERS = {
    "resident": Place({"fsdp": 2}, {"stage": 1}),
    "pipe2": Place({"pipe": 2, "fsdp": 2}, {"stage": 3, "pipe_chunks": 2}),
    "streamed": Place({"fsdp": 4}, {"stage": 3, "params": HOST, "grads": HOST, "opt_state": HOST}),
    "nvme": Place({"fsdp": 2}, {"stage": 3, "params": DISK, "opt_state": DISK}),
    "tensor2": Place({"fsdp": 2, "tensor": 2}, {"stage": 2, "opt_state": DISK}),
}
PRECISIONS = {
    "fp16": {"precision": "fp16"},
    "moments": {"precision": "bf16", "moments": "bfloat16"},
}


def build(place: Place, swap: pathlib.Path, more: dict[str, Any]) -> zj.Program:
    fields = place.fields | more
    if DISK in fields.values():
        swap.mkdir(exist_ok=True)
        fields["swap_dir"] = str(swap)
    devices = jax.devices()[: int(np.prod(list(place.axes.values())))]
    mesh = zj.make_mesh(**place.axes, devices=devices)
    model = toys.layered(tensor="tensor" in place.axes)
    model = dataclasses.replace(model, num_layers=LAYERS)
    tx = optax.chain(optax.adamw(1e-2), zj.Ema(0.9))
    return zj.build_train_step(model, tx, zj.ZeroConfig(num_microbatches=4, **fields), mesh)


def filled(program: zj.Program) -> zj.TrainState:
    """Return a state whose masters and optimizer state have a different number in each place."""
    state = program.init(jax.random.key(0))
    rng = np.random.default_rng(0)

    def fill(a: jax.Array) -> jax.Array:
        if not (a.ndim and jnp.issubdtype(a.dtype, jnp.floating)):
            return a
        return jax.device_put(rng.standard_normal(a.shape).astype(a.dtype), a.sharding)

    opt_state = jax.tree.map(fill, state.opt_state)
    if state.master is None:
        return dataclasses.replace(
            state, params=jax.tree.map(fill, state.params), opt_state=opt_state
        )
    master = jax.tree.map(fill, state.master)
    params = jax.tree.map(
        lambda whole, old: jax.device_put(whole.astype(old.dtype), old.sharding),
        jax.tree.map(whole, master, is_leaf=is_stored),
        state.params,
    )
    return dataclasses.replace(state, params=params, master=master, opt_state=opt_state)


def whole(stack: Any) -> np.ndarray:
    if isinstance(stack, Split):
        return np.concatenate([stack.device, stack.host])
    return np.asarray(stack)


def save(program: zj.Program, state: zj.TrainState, folder: pathlib.Path) -> pathlib.Path:
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(program, state)
    return folder


def restore(program: zj.Program, folder: pathlib.Path) -> zj.TrainState:
    with zj.Checkpointer(folder) as ckpt:
        return ckpt.restore(program)


def assert_same_state(actual: zj.TrainState, expected: zj.TrainState) -> None:
    flat = jax.tree_util.tree_flatten_with_path(expected)[0]
    for a, (path, b) in zip(jax.tree.leaves(actual), flat, strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding), path
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


@pytest.mark.by_default("resident-pipe4-fp16", "nvme-fraction-moments")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("other", OTHERS)
def test_a_pipelines_state_is_restored_anywhere_and_back(other, pipeline, precision, tmp_path):
    more = PRECISIONS[precision]
    source = build(PIPELINES[pipeline], tmp_path / "unused", more)
    state = filled(source)
    there = numbers(save(source, state, tmp_path / "there"), 0)
    with build(OTHERS[other], tmp_path / "swap", more) as program:
        restored = restore(program, tmp_path / "there")
        layers = read_layers(program, restored, ema=False)
        back = numbers(save(program, restored, tmp_path / "back"), 0)
    assert_same(back, there)
    for path, stack in jax.tree_util.tree_flatten_with_path(layers)[0]:
        np.testing.assert_array_equal(stack, there[f"weights{jax.tree_util.keystr(path)}"])
    for expected, actual in zip(
        jax.tree.leaves(read_layers(source, state, ema=True)),
        [value for name, value in there.items() if ".ema_params" in name],
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)
    assert_same_state(restore(source, tmp_path / "back"), state)


def test_files_and_descriptions_show_layers(tmp_path):
    program = build(PIPELINES["pipe4"], tmp_path, {})
    save(program, filled(program), tmp_path / "run")
    with SavedState(str(tmp_path / "run" / "0" / "state")) as saved:
        leaf = saved.leaves["weights['blocks']['w1']"]
        assert leaf.shape == (LAYERS, toys.HIDDEN, toys.INNER)
        assert leaf.spec == "('pipe', 'fsdp', None)"
        stores = [store for store in saved.records.stores if store.lead]
        # Each device has a store for each of its 2 chunks of 1 layer.
        held = sorted(
            (store.folder, store.lead, store.first, store.num_records) for store in stores
        )
        expected = [
            (f"layers.{4 * chunk + stage}/{2 * stage + shard}", (LAYERS,), 4 * chunk + stage, 1)
            for chunk in range(2)
            for stage in range(4)
            for shard in range(2)
        ]
        assert held == sorted(expected)
    text = inspect(tmp_path / "run" / "0", verify=True).text
    assert "[8, 16, 40]" in text
    assert "pipe=4 data=1 fsdp=2" in text


def test_exported_layers_are_imported(tmp_path):
    source = build(PIPELINES["pipe4"], tmp_path, {})
    state = filled(source)
    weights = read_layers(source, state, ema=False)
    save(source, state, tmp_path / "run")
    zj.export_safetensors(tmp_path / "run", tmp_path / "weights.safetensors")
    target = build(OTHERS["pipe2"], tmp_path, {})
    for path in (tmp_path / "weights.safetensors", tmp_path / "run", source.params(state)):
        imported = zj.import_params(target, path, key=jax.random.key(0))
        actual = read_layers(target, imported, ema=False)
        jax.tree.map(np.testing.assert_array_equal, actual, weights)
        # Averages start as copies of the weights.
        averages = read_layers(target, imported, ema=True)
        jax.tree.map(np.testing.assert_array_equal, averages, weights)


def init_wide_block(key: jax.Array) -> Any:
    """Return a block whose products are large enough for blocks of 8-bit and 4-bit numbers."""
    base = {"up": toys.draw(key, (toys.HIDDEN, 1024)) / 4, "down": toys.draw(key, (1024, 16), 1)}
    return base | {"scale": jnp.ones(toys.HIDDEN)}


def run_wide_block(p: Any, x: jax.Array, key: Any) -> jax.Array:
    del key
    return x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"] / 32


FROZEN = dataclasses.replace(
    toys.small(),
    num_layers=LAYERS,
    init_block=init_wide_block,
    block=run_wide_block,
    frozen={"block": {"up": True, "down": True, "scale": False}},
)


def build_frozen(axes: dict[str, int], format: str, **fields: Any) -> zj.Program:
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    mesh = zj.make_mesh(**axes, devices=devices)
    config = zj.ZeroConfig(stage=3, frozen_dtype=format, num_microbatches=4, **fields)
    return zj.build_train_step(FROZEN, optax.sgd(1e-2), config, mesh)


@pytest.mark.by_default("nf4")
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_an_encoded_base_has_the_same_bits_in_a_pipeline(format, tmp_path):
    plain = build_frozen({"fsdp": 2}, format)
    expected = numbers(save(plain, plain.init(jax.random.key(0)), tmp_path / "plain"), 0)
    assert any("#" in name for name in expected)
    program = build_frozen({"pipe": 2, "fsdp": 2}, format, pipe_chunks=2)
    state = program.init(jax.random.key(0))
    assert_same(numbers(save(program, state, tmp_path / "pipe"), 0), expected)
    assert_same_state(restore(program, tmp_path / "plain"), state)
    # Decoded, in other stages.
    weights = read_layers(program, state, ema=False)
    other = build_frozen({"pipe": 4, "fsdp": 2}, format)
    for restored in (
        restore(other, tmp_path / "pipe"),
        zj.import_params(other, tmp_path / "pipe", key=jax.random.key(0)),
    ):
        actual = read_layers(other, restored, ema=False)
        jax.tree.map(np.testing.assert_array_equal, actual, weights)
    assert_same_state(restore(program, save(other, restored, tmp_path / "other")), state)


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", OTHERS)
def test_training_continues_elsewhere(other, tmp_path):
    data = toys.batches(4)
    source = build(PIPELINES["pipe4"], tmp_path / "unused", {})
    _, state = toys.run(source, source.init(jax.random.key(0)), data[:2])
    save(source, state, tmp_path / "run")
    expected, _ = toys.run(source, state, data[2:])
    with build(OTHERS[other], tmp_path / "swap", {}) as program:
        losses, _ = toys.run(program, restore(program, tmp_path / "run"), data[2:])
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


WORKER = """
import jax, toys
import zerojax as zj
from single_layers import build_small

program = build_small(pipe=2, fsdp=2)
assert program.batch_part == (0, 1)
with zj.Checkpointer(out.parent / "plain") as ckpt:
    state = ckpt.restore(program)
with zj.Checkpointer(out / "again") as ckpt:
    ckpt.save(program, state)
names = [name for name, _ in jax.block_until_ready(list(program.iter_params(state)))]
stack = jax.block_until_ready(program.params(state)["blocks"]["w"])
losses, _ = toys.run(program, state, toys.batches(2))
found = {"names": names, "first": stack.addressable_shards[0].index[0].start, "losses": losses}
"""


@pytest.mark.exhaustive
def test_two_processes_hold_a_stage_each(tmp_path):
    program = build_small(fsdp=2, devices=jax.devices()[:2])
    state = filled(program)
    expected = numbers(save(program, state, tmp_path / "plain"), 0)
    losses, _ = toys.run(program, state, toys.batches(2))
    both = processes.launch(WORKER, tmp_path / "two", 2, devices=4)
    assert_same(numbers(tmp_path / "two" / "again", 0), expected)
    for number, each in enumerate(both):
        assert each["names"] == ["embed", *(f"blocks/{i}" for i in range(LAYERS)), "head"]
        assert (each["first"] or 0) == number * LAYERS // 2
        np.testing.assert_allclose(each["losses"], losses, rtol=2e-6)
