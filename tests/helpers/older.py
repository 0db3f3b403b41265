"""Write the checkpoints of data/: one state in memory, one on disk; later versions restore them.

    JAX_PLATFORMS=cpu python tests/helpers/older.py tests/checkpoint/data

The files in data/ were written by commit 8e126d1. Neither they nor this model may change.
"""

import hashlib
import json
import os
import pathlib
import sys
import tarfile
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax as zj
from zerojax.tiling import tiled_mlp

DATA = pathlib.Path(__file__).resolve().parents[1] / "checkpoint" / "data"
EXPECTED = "expected.json"
STEPS, AFTERWARDS = 3, 2
LAYERS, D, TILES, BATCH, SEQ = 2, 8, 2, 8, 3
DISK = "nvme"
PLACES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "memory": ({"fsdp": 4}, {"stage": 3, "precision": "fp32", "clip_norm": 0.5}),
    "disk": (
        {"fsdp": 2},
        {
            "stage": 3, "precision": "fp16", "loss_scaling": zj.LossScaling(initial=16.0), "moments": "bfloat16",
            "params": DISK, "grads": DISK, "opt_state": DISK,
        },
    ),
}  # fmt: skip
"""Mesh and config fields of each program that saved a state."""


def draw(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[-2])


def init_block(key):
    up, down = jax.random.split(key)
    return {
        "scale": jnp.ones(D),
        "mlp": {"up": draw(up, TILES, D, D // TILES), "down": draw(down, TILES, D // TILES, D)},
    }


def block(p, x, key):
    if key is not None:  # so that losses depend on the random key as well
        x = (x * jax.random.bernoulli(key, 0.9, x.shape)).astype(x.dtype)
    return x + tiled_mlp(x * p["scale"], p["mlp"], jnp.tanh)


def embed(p, batch, key):
    return batch["x"].astype(p["w"].dtype) @ p["w"]


def head(p, p_embed, x, batch, key):
    return jnp.mean(jnp.square((x @ p["out"]).astype(jnp.float32) - batch["y"])) * batch["weight"]


def model():
    return zj.LayeredModel(
        LAYERS, lambda key: {"w": draw(key, 4, D)}, embed, init_block, block, lambda key: {"out": jnp.ones(D) / D}, head,
        tiles={"scale": False, "mlp": True}, stochastic=True,
    )  # fmt: skip


def batches(precision: str) -> list[Any]:
    """Return the batches before and after the checkpoint; the second overflows float16."""
    random, weights = np.random.default_rng(0), [1.0, 1e9 if precision == "fp16" else 1.0]
    return [
        {
            "x": random.standard_normal((BATCH, SEQ, 4), dtype=np.float32),
            "y": random.standard_normal((BATCH, SEQ), dtype=np.float32),
            "weight": np.float32(weights[i] if i < len(weights) else 1),
        }
        for i in range(STEPS + AFTERWARDS)
    ]


def build(axes: dict[str, int], fields: dict[str, Any]) -> zj.Program:
    """Return a program; if a tier is on disk, its swap folder is in the current folder."""
    if DISK in fields.values():
        os.makedirs("swap", exist_ok=True)
        fields = fields | {"swap_dir": "swap"}
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    return zj.build_train_step(model(), optax.adamw(1e-2), zj.ZeroConfig(**fields), mesh)


def train(
    program: zj.Program, state: zj.TrainState, data: list[Any]
) -> tuple[list[float], zj.TrainState]:
    losses = []
    for batch in data:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def weights(program: zj.Program, state: zj.TrainState) -> dict[str, str]:
    """Return a hash of each float32 weight."""
    pieces = dict(program.iter_params(state))
    return {
        jax.tree_util.keystr(path): digest(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(pieces)[0]
    }


def digest(array: Any) -> str:
    found = np.ascontiguousarray(jax.device_get(array))
    return hashlib.sha256(f"{found.dtype}{found.shape}".encode() + found.tobytes()).hexdigest()


def write(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Save a state as NAME.tar.xz, in the current folder.

    Returns the expected values after a restore.
    """
    axes, fields = PLACES[name]
    data = batches(fields["precision"])
    with build(axes, fields) as program, zj.Checkpointer(name) as ckpt:
        _, state = train(program, program.init(jax.random.key(0)), data[:STEPS])
        ckpt.save(program, state)
        ckpt.wait()
        expected = {"weights": weights(program, state), "skipped": int(state.skipped)}
        expected["losses"] = [loss.hex() for loss in train(program, state, data[STEPS:])[0]]
        with build(
            {"fsdp": 1},
            {"stage": 0, "precision": fields["precision"], "moments": program.config.moments},
        ) as plain:
            expected["opt_state"] = [
                digest(leaf) for leaf in jax.tree.leaves(ckpt.restore(plain).opt_state)
            ]
    with tarfile.open(folder / f"{name}.tar.xz", "w:xz", preset=9) as tar:
        tar.add(f"{name}/{STEPS}", filter=plain_entry)
    return expected


def plain_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the writer and the time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main(folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    target = pathlib.Path(folder).resolve()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        expected = {name: write(name, target) for name in PLACES}
        os.chdir(target)
    (target / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
