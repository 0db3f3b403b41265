"""Models and settings that a pipeline refuses, each with its reason and repair."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import long_decoder
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj

LAYERS = 8


def build(model: Any = None, mesh: Any = None, tx: Any = None, **fields: Any) -> zj.Program:
    """Build a pipelined program on 4 devices."""
    return zj.build_train_step(
        long_decoder.model(layers=LAYERS) if model is None else model,
        tx or optax.adam(1e-2),
        zj.ZeroConfig(**{"num_microbatches": 4, **fields}),
        mesh or zj.make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4]),
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"params": "pinned_host"}, "params='pinned_host' is not supported.*params='device'"),
        ({"grads": "pinned_host"}, "grads='pinned_host' is not supported.*grads='device'"),
        ({"opt_state": "nvme"}, "opt_state='nvme' is not supported.*opt_state='device'"),
        ({"activations": "pinned_host"}, "activations='pinned_host'.*activations='selective'"),
        (
            {"activations": (zj.Segment(8, activations="save"),)},
            "with segments is not supported.*one mode for all layers",
        ),
        ({"offloaded_names": ("#0",)}, "offloaded_names=.'#0',. is not supported"),
        ({"update": "in_backward"}, "update='in_backward' is not supported"),
        ({"update": "in_forward"}, "update='in_forward' is not supported"),
        (
            {
                "precision": "bf16",
                "opt_state": "pinned_host",
                "update_on": "host",
                "delayed_update": True,
            },
            "delayed_update=True is not supported",
        ),
        ({"gather_ahead": True}, "gather_ahead=True is not supported"),
        (
            {"opt_state": "pinned_host", "device_budget_bytes": 10**9},
            "device_budget_bytes=1000000000 is not supported",
        ),
    ],
)
def test_settings_are_refused_by_name(fields, expected, tmp_path):
    if "nvme" in fields.values():
        fields = {**fields, "swap_dir": str(tmp_path)}
    with pytest.raises(NotImplementedError, match=expected):
        build(**fields)


def test_partitioned_activations_are_refused():
    # With and without an axis that could split them.
    for mesh in (zj.make_mesh(pipe=2, fsdp=2, tensor=2), None):
        with pytest.raises(NotImplementedError, match="partition_activations=True is not supp"):
            build(mesh=mesh, partition_activations=True)


def test_models_are_refused_by_name():
    model = long_decoder.model(layers=LAYERS)
    with pytest.raises(NotImplementedError, match=r"a Model has no layers.*pipe=1"):
        build(toys.unrolled())
    entered = dataclasses.replace(model, enter=lambda p, x, batch, key: (x, None))
    with pytest.raises(NotImplementedError, match=r"`enter` is not supported.*pipe=2.*pipe=1"):
        build(entered)
    stacks = [zj.Stack(name, 4, toys.init_block, toys.block) for name in ("a", "b")]
    several = dataclasses.replace(toys.layered(), init_block=None, block=None, stacks=stacks)
    with pytest.raises(NotImplementedError, match="several stacks of layers is not supported"):
        build(several)
    last = dataclasses.replace(stacks[0], enter=lambda p, x, batch, key: (x, None))
    last = dataclasses.replace(last, block=lambda p, x, key, context, layer: x)
    with pytest.raises(NotImplementedError, match="`enter` is not supported"):
        build(dataclasses.replace(several, stacks=[last]))
    stateful = dataclasses.replace(model, init_state={"head": lambda key: jnp.zeros(())})
    with pytest.raises(NotImplementedError, match="`init_state` is not supported"):
        build(stateful)


def test_specs_may_not_name_pipe():
    specs = {"block": {**long_decoder.SPECS, "q": P("pipe", None, None)}}
    model = dataclasses.replace(long_decoder.model(layers=LAYERS), specs=specs)
    with pytest.raises(ValueError, match="'pipe' splits layers by their numbers: leave it out"):
        build(model)


def test_layers_must_divide_by_the_stages():
    with pytest.raises(ValueError, match=r"num_layers=8 .* 2 x 3 = 6: use 6 or 12 layers"):
        build(pipe_chunks=3, num_microbatches=4)


def test_microbatches_must_divide_by_the_stages_if_there_are_chunks():
    with pytest.raises(ValueError, match="num_microbatches=5 does not divide by pipe=2"):
        build(pipe_chunks=2, num_microbatches=5)


def test_few_microbatches_are_reported(caplog):
    build(num_microbatches=1)
    assert (
        "num_microbatches=1 for pipe=2: each stage has work in 1 of 2 ticks and is idle for 50 % of "
        "a step. It is idle for 33 % with num_microbatches=2, and for 11 % with 8"
    ) in caplog.text


def test_a_fraction_of_less_than_a_layer_of_a_stage_is_reported(caplog):
    build(opt_state="pinned_host", opt_state_device_fraction=0.2)
    assert (
        "opt_state_device_fraction=0.2 keeps no optimizer state on the device: 0.2 of 4 layers of a "
        "stage is less than one. Use at least 1/4 = 0.25"
    ) in caplog.text


def test_rows_that_do_not_divide_by_the_stages_are_reported_once(caplog):
    model = dataclasses.replace(toys.small(), num_layers=LAYERS)
    program = build(model, stage=1)
    batch = toys.batches(1)[0]
    program.memory(batch)
    program.kept(batch)
    assert "reduce_every" not in caplog.text
    program.check(batch)
    program.check({**batch, "weight": batch["weight"] * 2})
    assert caplog.text.count("reduce_every") == 1
    assert (
        "rows of 5 tokens do not divide by pipe=2, so the gradients of embedding and head are "
        "reduced in each microbatch instead: pad rows to 6 tokens"
    ) in caplog.text


def test_weights_that_read_activations_are_refused():
    def head(p: Any, p_embed: Any, x: Any, batch: Any, key: Any) -> zj.Loss:
        loss = long_decoder.head(p, p_embed, x, batch, key)
        return zj.Loss(loss.total, weight=jnp.sum(jnp.abs(x)))

    model = dataclasses.replace(long_decoder.model(layers=LAYERS), head=head)
    program = build(model)
    with pytest.raises(ValueError, match="the weight of the loss depends on the activations"):
        program.check(long_decoder.batches(1)[0])


def test_a_block_must_return_what_the_embedding_does():
    model = long_decoder.model(layers=LAYERS)
    wrong = dataclasses.replace(
        model, embed=lambda p, batch, key: model.embed(p, batch, key).astype(jnp.bfloat16)
    )
    wrong = dataclasses.replace(wrong, block=lambda *args: model.block(*args).astype(jnp.float32))
    with pytest.raises(
        ValueError, match=r"a block must return x as it got it: .*cast x to the compute dtype"
    ):
        build(wrong).check(long_decoder.batches(1)[0])


def test_sums_of_a_step_are_chosen_unless_they_are_refused():
    assert build(stage=1).config.reduce_every == "step"
    assert build(stage=2).config.reduce_every is None
    narrow = build(stage=1, precision="bf16", reduce_dtype="bfloat16")
    assert narrow.config.reduce_every is None
