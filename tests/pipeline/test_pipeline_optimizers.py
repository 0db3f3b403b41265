"""Optimizers that combine the elements of a leaf treat each layer of a pipeline on its own.

Losses, parameters, their averages and the saved optimizer state equal one device's.
"""

import dataclasses
import functools
import itertools
import pathlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import matrix
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P
from matrix_of_checkpoints import assert_same, numbers

import zerojax as zj

HOST = "pinned_host"
LAYERS, STEPS = 8, 5


def mixed() -> optax.GradientTransformation:
    """Return Muon for one matrix of each layer, and Adafactor and LAMB for other leaves."""

    def label(path: Any, leaf: Any) -> str:
        del leaf
        name = path[-1].key
        return "muon" if name == "w1" else "adafactor" if name == "w2" else "lamb"

    optimizers = {
        "muon": optax.contrib.muon(0.02, weight_decay=0.1),
        "adafactor": TX["adafactor"](),
        "lamb": TX["lamb"](),
    }
    return optax.partition(
        optimizers, lambda params: jax.tree_util.tree_map_with_path(label, params)
    )


TX: dict[str, Any] = {
    "muon": lambda: optax.contrib.muon(0.02, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=8, momentum=0.9),
    "lamb": lambda: optax.lamb(0.02, eps=1e-3, weight_decay=0.1),
    "novograd": lambda: optax.novograd(0.02, eps=1e-3),
    "clip_by_block_rms": lambda: optax.chain(
        optax.clip_by_block_rms(0.01), optax.adam(0.02, eps=1e-2)
    ),
    "mixed": mixed,
}
MESHES = {
    "pipe2": {"pipe": 2, "fsdp": 1},
    "pipe2_fsdp2": {"pipe": 2, "fsdp": 2},
    "pipe4_fsdp2": {"pipe": 4, "fsdp": 2},
    "pipe2_fsdp2_tensor2": {"pipe": 2, "fsdp": 2, "tensor": 2},
}
AXES: dict[str, tuple[Any, ...]] = {
    "tx": tuple(TX),
    "mesh": tuple(MESHES),
    "chunks": (1, 2),
    "stage": (0, 1, 2, 3),
    "opt_state": ("device", HOST),
    "precision": ("fp32", "bf16"),
    "stack": ("unnamed", "named"),
}
QUICK = ("mixed", "pipe2_fsdp2", 2, 1, HOST, "fp32", "named")


@functools.cache
def cases() -> list[tuple[Any, ...]]:
    """Return cases that cover every pair of values of two axes, after the quick one."""
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    pairs = matrix.pairwise(random.Random(0).sample(every, len(every)))
    return [QUICK, *(tuple(case.values()) for case in pairs)]


def init_block(key: jax.Array) -> Any:
    return {
        "w1": toys.draw(key, (toys.HIDDEN, toys.INNER)) / 4,
        "w2": toys.draw(key, (toys.INNER, toys.HIDDEN), 1) / 6,
        "scale": jnp.ones(toys.HIDDEN),
    }


def block(p: Any, x: jax.Array, key: Any, context: Any, factor: jax.Array) -> jax.Array:
    del key, context
    return (x + factor * jnp.tanh((x * p["scale"]) @ p["w1"]) @ p["w2"]).astype(x.dtype)


SPECS = {"w1": P(None, "tensor"), "w2": P("tensor", None), "scale": P()}
FACTORS = np.linspace(0.8, 1.2, LAYERS, dtype=np.float32)


def build_model(is_named: bool) -> zj.LayeredModel:
    """Return a model whose layers are its own, or one named stack."""
    parts: dict[str, Any] = {"num_layers": LAYERS, "init_block": init_block, "block": block}
    per_layer: Any = FACTORS
    specs: Any = SPECS
    if is_named:
        unused = dict.fromkeys(parts)
        parts = {"stacks": [zj.Stack("only", **parts)]}
        parts = unused | parts
        per_layer, specs = {"only": per_layer}, {"only": specs}
    return dataclasses.replace(toys.small(), **parts, per_layer=per_layer, specs={"block": specs})


def build(tx: str, axes: dict[str, int], is_named: bool = False, **fields: Any) -> zj.Program:
    return zj.build_train_step(
        build_model(is_named),
        optax.chain(TX[tx](), zj.Ema(0.9)),
        zj.ZeroConfig(num_microbatches=4, **fields),
        zj.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))]),
    )


def save(program: zj.Program, state: zj.TrainState, folder: pathlib.Path) -> dict[str, Any]:
    """Save a state, and return its arrays in the order of the layers, by name."""
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(program, state)
    return numbers(folder, STEPS)


def train(program: zj.Program, folder: pathlib.Path) -> tuple[list[float], dict[str, Any]]:
    """Return losses, and the arrays of the saved state after the last step."""
    state = program.init(jax.random.key(0))
    losses = []
    for batch in toys.batches(STEPS):
        state, metrics = jax.block_until_ready(program.step(state, batch))
        losses.append(float(metrics["loss"]))
    return losses, save(program, state, folder)


@functools.cache
def reference(tx: str, precision: str, folder: pathlib.Path) -> tuple[list[float], dict[str, Any]]:
    return train(build(tx, {"fsdp": 1}, precision=precision), folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return the results of one device, by optimizer and precision."""
    folder = tmp_path_factory.mktemp("references")
    return lambda tx, precision: reference(tx, precision, folder / f"{tx}-{precision}")


@pytest.mark.by_default("-".join(map(str, QUICK)))
@pytest.mark.parametrize(
    ("tx", "mesh", "chunks", "stage", "opt_state", "precision", "stack"),
    [pytest.param(*case, id="-".join(map(str, case))) for case in dict.fromkeys(cases())],
)
def test_each_layer_is_updated_as_on_one_device(
    tx, mesh, chunks, stage, opt_state, precision, stack, references, tmp_path
):
    program = build(
        tx,
        MESHES[mesh],
        stack == "named",
        pipe_chunks=chunks,
        stage=stage,
        opt_state=opt_state,
        precision=precision,
    )
    losses, saved = train(program, tmp_path)
    saved = {name.replace("['only']", ""): a for name, a in saved.items()}
    wanted_losses, wanted = references(tx, precision)
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6 if precision == "fp32" else 2e-3)
    assert jax.tree.map(np.shape, saved) == jax.tree.map(np.shape, wanted)
    if precision == "bf16":
        # Rounding may turn the sign of a small gradient, which these optimizers scale up.
        return
    for name, b in wanted.items():
        # Moments show the rounding of single gradients.
        share = 1e-5 if name.startswith("weights") or ".ema_params" in name else 1e-4
        atol = share * np.max(np.abs(b), initial=0)
        np.testing.assert_allclose(saved[name], b, rtol=0, atol=atol, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("opt_state", ["device", HOST])
def test_state_is_restored_without_a_pipeline_and_back(opt_state, tmp_path):
    program = build("mixed", MESHES["pipe4_fsdp2"], pipe_chunks=2, opt_state=opt_state)
    _, saved = train(program, tmp_path / "there")
    plain = build("mixed", {"fsdp": 2}, stage=2)
    for target, source, folder in ((plain, "there", "plain"), (program, "plain", "back")):
        with zj.Checkpointer(tmp_path / source) as ckpt:
            restored = ckpt.restore(target)
        assert_same(save(target, restored, tmp_path / folder), saved)
