"""Frozen stacks of tiles in 8 or 4 bits: each tile is encoded, moved and decoded by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import tiling

D, H, LAYERS = 64, 256, 2


def embed(p, batch, key):
    return batch["x"] @ p["w"]


def block(p, x, key):
    return x + tiling.tiled_mlp(x @ p["mix"], p["mlp"], jax.nn.gelu)


def head(p, p_embed, x, batch, key):
    return jnp.mean((x @ p["w"]) ** 2)


def model_of(tiles):
    def init_block(key):
        keys = jax.random.split(key, 3)
        dense = {
            "up": jax.random.normal(keys[0], (D, H)) / 8,
            "down": jax.random.normal(keys[1], (H, D)) / 16,
        }
        return {"mix": jax.random.normal(keys[2], (D, D)) / 8, "mlp": tiling.tile_mlp(dense, tiles)}

    def init_end(key):
        return {"w": jax.random.normal(key, (D, D)) / 8}

    return zj.LayeredModel(
        LAYERS, init_end, embed, init_block, block, init_end, head,
        tiles={"mix": False, "mlp": True}, frozen={"embed": False, "block": {"mix": False, "mlp": True}, "head": False},
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", ["pinned_host", "nvme"])
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_encoded_tiles_train_like_the_weights_that_they_stand_for(tmp_path, dtype, frozen):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    x = np.random.default_rng(0).normal(size=(4, 8, D)).astype(np.float32)
    swap = {"swap_dir": str(tmp_path)} if frozen == "nvme" else {}

    def build(tiles, **fields):
        config = zj.ZeroConfig(stage=3, frozen=frozen, **fields, **swap)
        return zj.build_train_step(model_of(tiles), optax.sgd(0.1, momentum=0.9), config, mesh)

    with build(4, frozen_dtype=dtype) as program:
        state = program.init(jax.random.key(0))
        pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
        with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
            ckpt.save(program, state)
        losses = []
        for _ in range(3):
            state, metrics = program.step(state, {"x": x})
            losses.append(float(jax.block_until_ready(metrics["loss"])))
    blocks = jax.tree.map(lambda *a: np.stack(a), *(pieces[f"blocks/{n}"] for n in range(LAYERS)))
    tree = {"embed": pieces["embed"], "blocks": blocks, "head": pieces["head"]}
    with build(4) as program:
        state = zj.import_params(program, tree, key=jax.random.key(0))
        for loss in losses:
            state, metrics = program.step(state, {"x": x})
            np.testing.assert_allclose(
                loss, float(jax.block_until_ready(metrics["loss"])), rtol=1e-5
            )
    # The columns of up are in another order in other tiles, and so are its blocks.
    with (
        build(2, frozen_dtype=dtype) as program,
        zj.Checkpointer(tmp_path / "ckpt") as ckpt,
        pytest.raises(zj.CheckpointError, match=rf"{dtype}.tiles[24]"),
    ):
        ckpt.restore(program)
