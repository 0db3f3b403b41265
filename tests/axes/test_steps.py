"""Steps on meshes with `expert` and `context` equal one device's."""

import functools
import itertools
import random
from typing import Any

import jax
import long_decoder
import matrix
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

HOST, DISK = "pinned_host", "nvme"
STEPS = 5
MESHES: dict[str, dict[str, int]] = {
    "context2": {"fsdp": 2, "context": 2},
    "context4": {"fsdp": 2, "context": 4},
    "data2_context2": {"data": 2, "fsdp": 2, "context": 2},
    "context2_tensor2": {"fsdp": 2, "context": 2, "tensor": 2},
    "expert2": {"fsdp": 2, "expert": 2},
    "expert2_context2": {"fsdp": 2, "expert": 2, "context": 2},
    "expert4_tensor2": {"expert": 4, "tensor": 2, "fsdp": 1},
}
STATES: dict[str, dict[str, Any]] = {
    "stage_0": {"stage": 0},
    "stage_1": {"stage": 1},
    "stage_2": {"stage": 2},
    "stage_3": {"stage": 3},
    "host": {"params": HOST, "grads": HOST, "opt_state": HOST},
    "disk": {"params": DISK, "grads": DISK, "opt_state": DISK},
    "updated_on_host": {"opt_state": HOST, "update_on": "host"},
    "in_forward": {"opt_state": HOST, "update": "in_forward", "clip_norm": 0.5},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"num_microbatches": 2},
    "reduce_once": {"num_microbatches": 2, "reduce_every": "step"},
    "sequence_parallel": {"sequence_parallel": True},
    "partitioned": {"partition_activations": True},
    "ahead": {"gather_ahead": True},
    "dropout": {"dropout": 0.25},
}
AXES: dict[str, tuple[Any, ...]] = {
    "mesh": tuple(MESHES),
    "attention": ("plain", "ring", "ulysses", "gather"),
    "state": tuple(STATES),
    "activations": ("save", "selective", "remat", HOST),
    "option": tuple(OPTIONS),
}
QUICK = [
    {
        "mesh": "context4",
        "attention": "ring",
        "state": "stage_3",
        "activations": "save",
        "option": "plain",
    },
    {
        "mesh": "context2_tensor2",
        "attention": "ulysses",
        "state": "host",
        "activations": "selective",
        "option": "sequence_parallel",
    },
    {
        "mesh": "expert2_context2",
        "attention": "plain",
        "state": "stage_3",
        "activations": "remat",
        "option": "plain",
    },
]


def is_valid(case: dict[str, Any]) -> bool:
    """Return whether a case's settings have a meaning together."""
    option = case["option"]
    if "context" not in case["mesh"] and case["attention"] != "plain":
        return False
    if option in ("sequence_parallel", "partitioned") and "tensor" not in case["mesh"]:
        return False
    return option != "ahead" or case["state"] not in ("stage_0", "stage_1", "stage_2")


@functools.cache
def pairwise_cases() -> list[dict[str, Any]]:
    """Choose cases until they cover every pair of values of two axes."""
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    every = [case for case in every if is_valid(case)]
    return matrix.pairwise(random.Random(0).sample(every, len(every)))


def train(
    mesh: dict[str, int], attention: str, experts: bool, dropout: float, fields: dict[str, Any]
) -> tuple[np.ndarray, Any]:
    """Return losses and parameters after some steps, with an evaluation in the middle."""
    attend = long_decoder.plain_attention
    if attention != "plain":
        attend = functools.partial(long_decoder.split_attention, attention)
    size = int(np.prod(list(mesh.values())))
    program = zj.build_train_step(
        long_decoder.model(attend, experts=experts, dropout=dropout),
        # A large eps: gradients that are almost 0 would otherwise differ in sign.
        optax.adam(1e-2, eps=1e-2),
        zj.ZeroConfig(**fields),
        zj.make_mesh(**mesh, devices=jax.devices()[:size]),
    )
    with program:
        state = program.init(jax.random.key(0))
        losses = []
        for batch in long_decoder.batches(STEPS):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
            if len(losses) == 2:
                losses.append(float(program.eval(state, batch)["loss"]))
        state = program.settle(state)
        layers = [jax.device_get(tree) for _, tree in program.iter_params(state)]
    return np.asarray(losses, np.float32), layers


@functools.cache
def reference(experts: bool, dropout: float, count: int, clip: float | None) -> Any:
    """Return losses and parameters of one device that keeps everything."""
    fields = {"num_microbatches": count, "clip_norm": clip}
    return train({"fsdp": 1}, "plain", experts, dropout, fields)


def check(case: dict[str, Any], swap_dir: str) -> None:
    fields = {**STATES[case["state"]], **OPTIONS[case["option"]]}
    fields["activations"] = case["activations"]
    dropout = fields.pop("dropout", 0.0)
    if case["state"] == "disk":
        fields["swap_dir"] = swap_dir
    mesh = MESHES[case["mesh"]]
    experts = "expert" in mesh
    count = fields.get("num_microbatches", 1)
    expected, weights = reference(experts, dropout, count, fields.get("clip_norm"))
    losses, params = train(mesh, case["attention"], experts, dropout, fields)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    toys.assert_trees_close(params, weights, atol=5e-6)


@pytest.mark.parametrize("case", QUICK, ids=matrix.name_of)
def test_a_step_equals_one_device(case, tmp_path):
    check(case, str(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", pairwise_cases(), ids=matrix.name_of)
def test_steps_of_every_pair_equal_one_device(case, tmp_path):
    check(case, str(tmp_path))


def test_arguments_are_those_of_the_account():
    program = zj.build_train_step(
        long_decoder.model(experts=True),
        optax.adam(1e-2),
        zj.ZeroConfig(precision="bf16"),
        zj.make_mesh(**MESHES["expert2_context2"]),
    )
    batch = long_decoder.batches(1)[0]
    stats: Any = program.lower(batch).compile().memory_analysis()
    assert stats.argument_size_in_bytes == program.memory(batch).argument_bytes
