"""A small decoder of `zerojax.hf` built from config.json alone, and a clean batch's results."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import optax

import zerojax as zj
from zerojax.hf import model_of

VOCAB = 96
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip


def write(folder: pathlib.Path, **fields: Any) -> pathlib.Path:
    """Write config.json into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return folder


def program_of(folder: pathlib.Path, devices: int = 1, tx: Any = None, **config: Any) -> zj.Program:
    """Return a program for the folder's model, with random weights."""
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    # With weight decay, a step with gradients of 0 would move the weights.
    tx = optax.adamw(1e-2, weight_decay=0.1) if tx is None else tx
    return zj.build_train_step(model_of(folder, attention="xla"), tx, zj.ZeroConfig(**config), mesh)


def batch_of(rows: int = 4, length: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    """Return tokens and targets, some of which do not count."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, length + 1)).astype(np.int32)
    targets = np.where(rng.random((rows, length)) < 0.3, -1, tokens[:, 1:]).astype(np.int32)
    return {"tokens": tokens[:, :-1].copy(), "targets": targets}


def bytes_of(program: zj.Program, state: zj.TrainState) -> list[bytes]:
    """Return the bits of the weights and of the optimizer state's arrays."""
    weights = [leaf for _, tree in program.iter_params(state) for leaf in jax.tree.leaves(tree)]
    opt = [leaf for leaf in jax.tree.leaves(state.opt_state) if isinstance(leaf, jax.Array)]
    scale = [] if state.loss_scale is None else list(state.loss_scale)
    return [np.asarray(leaf).tobytes() for leaf in (*weights, *opt, *scale)]
