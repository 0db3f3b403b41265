"""Frozen weights in 8 and 4 bits, in checkpoints and imports.

Every tier has the same bits, and a different layout is refused.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from pallas_kernels.storage import decode, encode
from zerojax.checkpoint import inspect
from zerojax.models import init_params

LAYERS, HIDDEN, INNER, VOCAB = 2, 16, 1024, 64
HOST, DISK = "pinned_host", "nvme"
TIERS = {
    "device": {},
    "host": {"params": HOST, "opt_state": HOST},
    "base_on_disk": {"frozen": DISK},
}


def init_block(key):
    up, down = jax.random.split(key)
    base = {
        "up": jax.random.normal(up, (HIDDEN, INNER)) / 4,
        "down": jax.random.normal(down, (INNER, HIDDEN)) / 32,
    }
    return base | {"scale": jnp.ones(HIDDEN)}


MODEL = zj.LayeredModel(
    LAYERS,
    lambda key: jax.random.normal(key, (VOCAB, HIDDEN)),
    lambda table, batch, key: table[batch["tokens"]],
    init_block,
    lambda p, x, key: x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"],
    lambda key: jnp.zeros(VOCAB),
    lambda bias, table, x, batch, key: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            (x @ table.T + bias).astype(jnp.float32), batch["tokens"]
        )
    ),
    frozen={"embed": True, "block": {"up": True, "down": True, "scale": False}},
)
BATCH = {"tokens": np.arange(8 * 4).reshape(8, 4) % VOCAB}


def build(format, tmp_path, devices=2, **fields):
    (swap := tmp_path / "swap").mkdir(exist_ok=True)
    config = zj.ZeroConfig(
        frozen_dtype=format, swap_dir=str(swap) if DISK in fields.values() else None, **fields
    )
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    return zj.build_train_step(MODEL, optax.sgd(1e-2), config, mesh)


def weights(program, state):
    return jax.device_get(dict(program.iter_params(state)))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.by_default("nf4-host-base_on_disk")
@pytest.mark.parametrize("restored_to", TIERS)
@pytest.mark.parametrize("saved_from", TIERS)
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_an_encoded_base_is_restored_bit_for_bit_into_every_tier(
    format, saved_from, restored_to, tmp_path
):
    directory = tmp_path / "run"
    with (
        build(format, tmp_path, **TIERS[saved_from]) as program,
        zj.Checkpointer(directory) as ckpt,
    ):
        state, _ = jax.block_until_ready(program.step(program.init(jax.random.key(0)), BATCH))
        saved = weights(program, state)
        ckpt.save(program, state)
        ckpt.wait()
        held = sum(
            a.size * a.dtype.itemsize
            for a in jax.tree.leaves(program.layout.abstract_arrays.frozen)
        )
        text = inspect(directory / "1").text
        assert re.search(rf"total frozen +{held:,}\n", text)
        assert f"weights['blocks']['up']#{format}." in text
    with (
        build(format, tmp_path, **TIERS[restored_to]) as program,
        zj.Checkpointer(directory) as ckpt,
    ):
        state = ckpt.restore(program)
        assert_same(weights(program, state), saved)
        jax.block_until_ready(program.step(state, BATCH))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("format", "fields"),
    [
        ("int8", {"devices": 1}),
        ("int8", {"devices": 4}),
        ("int8", {"stage": 1}),
        ("int8", {"stage": 1, "devices": 4}),
        ("nf4", {"devices": 4}),
        ("nf4", {"devices": 4, "params": HOST}),
    ],
)
def test_adapters_go_on_over_a_base_on_other_shards(format, fields, tmp_path):
    batches = [{"tokens": (BATCH["tokens"] + n) % VOCAB} for n in range(4)]
    with build(format, tmp_path) as program, zj.Checkpointer(tmp_path / "run") as ckpt:
        state = program.init(jax.random.key(0))
        expected = []
        for number, batch in enumerate(batches):
            if number == 2:
                ckpt.save(program, state)
                ckpt.wait()
            state, metrics = program.step(state, batch)
            expected.append(float(metrics["loss"]))
        saved = weights(program, state)
    with build(format, tmp_path, **fields) as program, zj.Checkpointer(tmp_path / "run") as ckpt:
        state = ckpt.restore(program)
        got = []
        for batch in batches[2:]:
            state, metrics = program.step(state, batch)
            got.append(float(metrics["loss"]))
        np.testing.assert_allclose(got, expected[2:], rtol=1e-6)
        after = weights(program, state)
        for layer in range(LAYERS):
            for name in ("up", "down"):
                np.testing.assert_array_equal(
                    after[f"blocks/{layer}"][name], saved[f"blocks/{layer}"][name]
                )


def test_an_encoded_base_moves_where_its_blocks_and_groups_are_whole(tmp_path):
    saved = {}
    for format in ("int8", "nf4"):
        with build(format, tmp_path) as program, zj.Checkpointer(tmp_path / format) as ckpt:
            state = program.init(jax.random.key(0))
            saved = weights(program, state) if format == "int8" else saved
            ckpt.save(program, state)
            ckpt.wait()
    # A single device merges all dims of an array. The blocks are the same.
    with (
        build("int8", tmp_path, devices=1, frozen=DISK) as program,
        zj.Checkpointer(tmp_path / "int8") as ckpt,
    ):
        assert_same(weights(program, ckpt.restore(program)), saved)
    # One group of scales on one device becomes two on two devices.
    refused = pytest.raises(
        zj.CheckpointError, match=r"in 8 or 4 bits in other blocks .*#nf4.*of several saved groups.*bit for bit or not at all.*"
        "import_params",
    )  # fmt: skip
    with (
        build("nf4", tmp_path, devices=1) as program,
        zj.Checkpointer(tmp_path / "nf4") as ckpt,
        refused,
    ):
        ckpt.restore(program)
    refused = pytest.raises(
        zj.CheckpointError, match=r"no weights\['blocks'\]\['down'\] .*bit for bit or not at all"
    )
    with build(None, tmp_path) as program, zj.Checkpointer(tmp_path / "nf4") as ckpt, refused:
        ckpt.restore(program)
    with pytest.raises(
        zj.CheckpointError, match=r"\['down'\] is frozen, and stored in nf4.*iter_params"
    ):
        zj.export_safetensors(tmp_path / "nf4", tmp_path / "out.safetensors")


@pytest.mark.by_default("nf4-base_on_disk")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_an_imported_base_is_what_the_codec_makes_of_it(format, tier, tmp_path):
    params = jax.device_get(init_params(MODEL, jax.random.key(0)))
    with build(format, tmp_path, **TIERS[tier]) as program:
        state = zj.import_params(program, params, key=jax.random.key(0))
        got, encodings = weights(program, state), program.layout.encodings
        for name in ("up", "down"):
            weight = params["blocks"][name]
            whole = decode(
                encode(jnp.asarray(weight), encodings[f"['blocks']['{name}']"].layout), jnp.float32
            )
            assert 0 < np.abs(weight - whole).max() < 0.2 * np.abs(weight).max()
            for layer in range(LAYERS):
                np.testing.assert_array_equal(got[f"blocks/{layer}"][name], whole[layer])
        fewer = params | {"blocks": params["blocks"] | {"up": params["blocks"]["up"][:, :8]}}
        with pytest.raises(
            ValueError, match=r"blocks.up \[2, 8, 1024\], and here it is \[2, 16, 1024\]"
        ):
            zj.import_params(program, fewer, key=jax.random.key(0))
