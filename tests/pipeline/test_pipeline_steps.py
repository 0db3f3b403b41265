"""Steps in pipeline stages equal those of one device."""

import dataclasses
import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import long_decoder
import matrix
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

HOST = "pinned_host"
LAYERS, STEPS = 16, 5
MESHES: dict[str, dict[str, int]] = {
    "pipe4": {"pipe": 4, "fsdp": 1},
    "pipe4_fsdp2": {"pipe": 4, "fsdp": 2},
    "pipe2_fsdp2": {"pipe": 2, "fsdp": 2},
    "pipe2_data2": {"pipe": 2, "data": 2, "fsdp": 2},
    "pipe2_tensor2": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "pipe2_context2": {"pipe": 2, "fsdp": 2, "context": 2},
    "pipe2_expert2": {"pipe": 2, "fsdp": 2, "expert": 2},
}
MICROBATCHES = {"p": (1, 0), "p_plus_1": (1, 1), "2p": (2, 0), "3p": (3, 0)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "host": {"opt_state": HOST},
    "updated_on_host": {"opt_state": HOST, "update_on": "host"},
    "sequence_parallel": {"sequence_parallel": True},
    "dropout": {"dropout": 0.25},
    "named": {"saved_names": ("#0",)},
}
AXES: dict[str, tuple[Any, ...]] = {
    "mesh": tuple(MESHES),
    "chunks": (1, 2, 4),
    "microbatches": tuple(MICROBATCHES),
    "stage": (0, 1, 2, 3),
    "reduce_every": (None, "microbatch", "step"),
    "activations": ("save", "selective", "remat", "everything"),
    "option": tuple(OPTIONS),
}
QUICK = [
    {
        "mesh": "pipe4_fsdp2",
        "chunks": 2,
        "microbatches": "p",
        "stage": 1,
        "reduce_every": None,
        "activations": "selective",
        "option": "dropout",
    },
    {
        "mesh": "pipe2_fsdp2",
        "chunks": 1,
        "microbatches": "p_plus_1",
        "stage": 3,
        "reduce_every": None,
        "activations": "save",
        "option": "updated_on_host",
    },
]


def is_valid(case: dict[str, Any]) -> bool:
    """Return whether a case's settings have a meaning together."""
    if case["microbatches"] == "p_plus_1" and case["chunks"] > 1:
        return False
    return case["option"] != "sequence_parallel" or "tensor" in case["mesh"]


@functools.cache
def pairwise_cases() -> list[dict[str, Any]]:
    """Choose cases until they cover every pair of values of two axes."""
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    every = [case for case in every if is_valid(case)]
    return matrix.pairwise(random.Random(0).sample(every, 1500))


def block_with_loss(block: Any) -> Any:
    """Return a block that depends on `per_layer` and adds to the loss."""

    def run(p: Any, x: Any, key: Any, segment_ids: Any, factor: Any) -> Any:
        y = x + factor * (block(p, x, key, segment_ids, factor) - x)
        total = 1e-3 * jnp.mean(jnp.square(y.astype(jnp.float32)))
        return y, zj.Loss(total, metrics={"square": total})

    return run


def build_model(mesh: dict[str, int], dropout: float) -> zj.LayeredModel:
    """Return a decoder whose blocks read a context and `per_layer`, and add to the loss."""
    attend = long_decoder.plain_attention
    if "context" in mesh:
        attend = functools.partial(long_decoder.split_attention, "ring")
    model = long_decoder.model(attend, "expert" in mesh, dropout, LAYERS)
    factors = np.linspace(0.8, 1.2, LAYERS, dtype=np.float32)
    return dataclasses.replace(model, block=block_with_loss(model.block), per_layer=factors)


def train(
    mesh: dict[str, int], model: zj.LayeredModel, rows: int, fields: dict[str, Any]
) -> tuple[np.ndarray, Any]:
    """Return losses and parameters after some steps, with an evaluation in the middle."""
    size = int(np.prod(list(mesh.values())))
    program = zj.build_train_step(
        model,
        # A large eps: gradients that are almost 0 would otherwise differ in sign.
        optax.adam(3e-3, eps=1e-2),
        zj.ZeroConfig(**fields),
        zj.make_mesh(**mesh, devices=jax.devices()[:size]),
    )
    with program:
        state = program.init(jax.random.key(0))
        losses = []
        for batch in long_decoder.batches(STEPS, rows):
            state, metrics = jax.block_until_ready(program.step(state, batch))
            losses += [float(metrics[name]) for name in ("loss", "counted", "square")]
            if len(losses) == 6:
                losses.append(float(program.eval(state, batch)["loss"]))
        params = jax.device_get(program.params(state))
    return np.asarray(losses, np.float32), params


@functools.cache
def reference(experts: bool, dropout: float, rows: int, count: int, clip: float | None) -> Any:
    """Return losses and parameters of one device that keeps everything."""
    model = build_model({"expert": 1} if experts else {}, dropout)
    fields = {"num_microbatches": count, "clip_norm": clip}
    return train({"fsdp": 1}, model, rows, fields)


def check(case: dict[str, Any]) -> None:
    mesh = MESHES[case["mesh"]]
    fields = dict(OPTIONS[case["option"]])
    dropout = fields.pop("dropout", 0.0)
    times, more = MICROBATCHES[case["microbatches"]]
    count = times * mesh["pipe"] + more
    for name in ("stage", "reduce_every", "activations"):
        fields[name] = case[name]
    fields |= {"num_microbatches": count, "pipe_chunks": case["chunks"]}
    rows = count * int(np.prod([mesh.get(axis, 1) for axis in ("data", "fsdp", "expert")]))
    expected, weights = reference("expert" in mesh, dropout, rows, count, fields.get("clip_norm"))
    losses, params = train(mesh, build_model(mesh, dropout), rows, fields)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    toys.assert_trees_close(params, weights, atol=5e-6)


@pytest.mark.by_default(matrix.name_of(QUICK[0]))
@pytest.mark.parametrize("case", QUICK, ids=matrix.name_of)
def test_a_pipelined_step_equals_one_device(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", pairwise_cases(), ids=matrix.name_of)
def test_pipelined_steps_of_every_pair_equal_one_device(case):
    check(case)
