"""What meshes with `expert` and `context` refuse, by name and with a repair."""

from typing import Any

import jax
import jax.numpy as jnp
import long_decoder
import optax
import pytest

import zerojax as zj


def build(mesh: dict[str, int], experts: bool = False, **fields: Any) -> zj.Program:
    return zj.build_train_step(
        long_decoder.model(experts=experts),
        optax.adam(1e-2),
        zj.ZeroConfig(**fields),
        zj.make_mesh(**mesh),
    )


def test_a_mesh_with_expert_needs_a_model_with_experts():
    with pytest.raises(
        ValueError, match=r"expert=2, but no weight .* or put these devices on fsdp"
    ):
        build({"fsdp": 4, "expert": 2})


def test_experts_that_do_not_divide_are_refused():
    mesh = zj.make_mesh(fsdp=2, expert=3, devices=jax.devices()[:6])
    words = (
        r"\['up'\]: 8 experts .* do not divide by expert=3: choose a mesh whose expert divides 8, "
        r"or 9 experts"
    )
    with pytest.raises(ValueError, match=words):
        zj.build_train_step(
            long_decoder.model(experts=True), optax.adam(1e-2), zj.ZeroConfig(), mesh
        )


def test_one_expert_over_several_devices_is_refused():
    model = zj.Model(
        lambda key: {"up": jnp.ones((1, 4, 4))},
        lambda params, batch, key: jnp.mean(batch["x"] @ params["up"][0]),
        specs={"up": jax.sharding.PartitionSpec("expert")},
    )
    words = (
        r"1 expert \(dim 0 of shape \(1, 4, 4\)\) does not divide by expert=2: choose a mesh without "
        r"expert, or 2 experts"
    )
    with pytest.raises(ValueError, match=words):
        zj.build_train_step(
            model, optax.adam(1e-2), zj.ZeroConfig(), zj.make_mesh(fsdp=4, expert=2)
        )


def test_rings_of_tensor_parallelism_are_refused_over_context():
    fields = {"sequence_parallel": True, "tensor_overlap": True}
    words = r"tensor_overlap=True is not supported on a mesh with context=2: set tensor_overlap=Fal"
    with pytest.raises(NotImplementedError, match=words):
        build({"fsdp": 2, "context": 2, "tensor": 2}, **fields)


def test_a_stream_that_does_not_divide_is_refused():
    program = build({"fsdp": 1, "context": 4, "tensor": 2}, sequence_parallel=True)
    batch = {name: array[:, :12] for name, array in long_decoder.batches(1)[0].items()}
    words = r"over context=4 x tensor=2, and 12 does not divide by 8: pad the sequences to 16"
    with pytest.raises(ValueError, match=words):
        program.check(batch)


def test_a_plan_is_refused():
    mesh = zj.make_mesh(fsdp=2, expert=2, context=2)
    words = (
        r"cannot predict what a step sends on a mesh with expert=2 and context=2: plan on a mesh "
        r".* sends, less the exchanges of zj.attention and zj.moe"
    )
    with pytest.raises(NotImplementedError, match=words):
        zj.plan(
            long_decoder.model(experts=True),
            optax.adam(1e-2),
            mesh,
            long_decoder.batches(1)[0],
            "h100-80gb",
        )


def test_tuning_is_refused():
    mesh = zj.make_mesh(fsdp=2, expert=2, context=2)
    words = r"autotune does not support a mesh with expert=2 and context=2: .* pass zerojax.aot"
    with pytest.raises(NotImplementedError, match=words):
        zj.autotune(
            long_decoder.model(experts=True),
            optax.adam(1e-2),
            zj.ZeroConfig(),
            mesh,
            long_decoder.batches(1)[0],
        )


def test_generation_is_refused():
    program = zj.build_train_step(
        long_decoder.model(), optax.adam(1e-2), zj.ZeroConfig(), zj.make_mesh(fsdp=4, context=2)
    )
    with pytest.raises(NotImplementedError, match=r"does not run on a mesh with context=2"):
        zj.generate(program, program.init(jax.random.key(0)), [[1, 2]], 2)


def test_specs_of_a_model_may_not_name_context():
    model = zj.Model(
        lambda key: {"w": jnp.ones((8, 8))},
        lambda params, batch, key: jnp.mean(batch["x"] @ params["w"]),
        specs={"w": jax.sharding.PartitionSpec("context")},
    )
    with pytest.raises(ValueError, match=r"names 'context', which ZeRO assigns"):
        zj.build_train_step(
            model, optax.adam(1e-2), zj.ZeroConfig(), zj.make_mesh(fsdp=4, context=2)
        )
