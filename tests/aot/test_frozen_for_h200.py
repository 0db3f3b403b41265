"""Steps with frozen weights compiled for 8 H200s.

The base has no gradients or masters, and is neither reduced nor stored. A layer is two frozen
matrices and adapters of rank 8 (LoRA), so every size distinguishes the base from the trainable
leaves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import aot, hlo

pytestmark = pytest.mark.xdist_group(
    "h200"
)  # tests share compiled programs, so they share a process
LAYERS, HIDDEN, INNER, RANK, VOCAB, SEQ, GPUS = 4, 1024, 4096, 8, 512, 32, 8
BASE = 2 * HIDDEN * INNER
"""Frozen parameters per layer.

The table and the head are frozen too, with 2 x VOCAB x HIDDEN parameters together.
"""
ADAPTERS = 2 * RANK * (HIDDEN + INNER)
FROZEN = {
    "embed": True,
    "block": {"up": True, "down": True, "lora": False},
    "head": {"out": True, "scale": False},
}
HOST = "pinned_host"
CASES: dict[str, dict[str, Any]] = {
    "stage_0": {"stage": 0},
    "stage_2": {"stage": 2},
    "stage_3": {"clip_norm": 1.0},
    "remat": {"activations": "remat", "num_microbatches": 2},
    "base_on_host": {"frozen": HOST, "clip_norm": 1.0},
    "all_on_host": {"params": HOST, "opt_state": HOST, "grads": HOST},
    "in_backward": {
        "params": HOST,
        "opt_state": HOST,
        "update": "in_backward",
        "gather_ahead": True,
    },
}


def init_block(key: Any) -> Any:
    draw = lambda *shape: jax.random.normal(key, shape)  # noqa: E731
    lora = {
        "a": draw(HIDDEN, RANK),
        "b": draw(RANK, INNER),
        "c": draw(INNER, RANK),
        "d": draw(RANK, HIDDEN),
    }
    return {"up": draw(HIDDEN, INNER), "down": draw(INNER, HIDDEN), "lora": lora}


def block(p: Any, x: Any, key: Any) -> Any:
    lora = p["lora"]
    y = jax.nn.gelu(x @ p["up"] + (x @ lora["a"]) @ lora["b"])
    return x + y @ p["down"] + (y @ lora["c"]) @ lora["d"]


def head(p: Any, table: Any, x: Any, batch: Any, key: Any) -> Any:
    logits = ((x * p["scale"]) @ p["out"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


MODEL = zj.LayeredModel(
    LAYERS,
    lambda key: jax.random.normal(key, (VOCAB, HIDDEN)),
    lambda table, batch, key: table[batch["tokens"]],
    init_block,
    block,
    lambda key: {"out": jax.random.normal(key, (HIDDEN, VOCAB)), "scale": jnp.ones(HIDDEN)},
    head,
    frozen=FROZEN,
)


@functools.cache
def compiled(name: str, format: Any = None) -> Any:
    config = zj.ZeroConfig(
        **{"stage": 3, "precision": "bf16", "frozen_dtype": format, **CASES[name]}
    )
    program = zj.build_train_step(
        MODEL, optax.adamw(1e-3), config, aot.gpu_mesh("h200", gpus_per_host=GPUS)
    )
    tokens = jax.ShapeDtypeStruct((2 * GPUS * config.num_microbatches, SEQ), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    result = program.lower(batch).compile()
    return program, result.as_text(), result.memory_analysis(), program.memory(batch)


# by default test_hf_for_h200.py finds no gradient or master of a base of 8 B
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_base_is_neither_reduced_nor_stored_nor_held_in_float32(name):
    program, text, stats, report = compiled(name)
    # Only scalars and the adapters' gradients are reduced, the latter in the dtypes of compute or
    # accumulation; the table's rows are not.
    reduced = [
        c
        for c in hlo.collectives(text, unknown_trips=1)
        if c.op in ("all-reduce", "reduce-scatter", "all-to-all")
    ]
    total = sum(c.num_bytes * c.times for c in reduced if c.num_bytes >= 1024)
    count = program.config.num_microbatches
    assert 0 < total <= 1.2 * 4 * count * (LAYERS * ADAPTERS + HIDDEN)
    # No array of the base's shape, full or a shard, is in float32: no master, no pending gradient.
    sizes = {
        size // shards
        for size in (BASE // 2, LAYERS * BASE // 2, VOCAB * HIDDEN)
        for shards in (1, GPUS)
    }
    assert not [
        leaf for leaf in jax.tree.leaves(program.layout.abstract_state.master) if leaf.size in sizes
    ]
    assert not [
        leaf
        for leaf in jax.tree.leaves(program.layout.abstract_state.opt_state)
        if leaf.size in sizes
    ]
    for shape in (
        f"{HIDDEN},{INNER}",
        f"{INNER},{HIDDEN}",
        f"{HIDDEN // GPUS},{INNER}",
        f"{INNER // GPUS},{HIDDEN}",
    ):
        assert not [kind for kind in (f"f32[{shape}]", f"f32[{LAYERS},{shape}]") if kind in text]
    # Only trainable leaves are stored to the host.
    stores = hlo.host_link_bytes(text, unknown_trips=1)["to_host"]
    assert stores == report.host_link["to_host"] <= 1.2 * 16 * (LAYERS * ADAPTERS + 8 * HIDDEN)
    assert stats.host_output_size_in_bytes == stats.host_alias_size_in_bytes
    assert stats.host_temp_size_in_bytes == 0


@pytest.mark.by_default("base_on_host")
@pytest.mark.parametrize("name", CASES)
def test_the_base_takes_2_bytes_a_parameter_and_is_read_twice(name):
    program, text, stats, report = compiled(name)
    ends, shards = 2 * VOCAB * HIDDEN, GPUS if program.config.stage == 3 else 1
    held = {tier: kinds.get("frozen", 0) for tier, kinds in report.tiers.items()}
    assert sum(held.values()) == 2 * (LAYERS * BASE + ends) // shards
    assert report.argument_bytes == stats.argument_size_in_bytes
    assert report.host_argument_bytes == stats.host_argument_size_in_bytes
    if held[HOST]:  # forward and backward; unstacked leaves are loaded once
        trained = 100 * (LAYERS * ADAPTERS + HIDDEN) // shards
        loaded = hlo.host_link_bytes(text, unknown_trips=1)["to_device"]
        assert loaded == report.host_link["to_device"]
        assert 0 <= loaded - (4 * LAYERS * BASE + 2 * ends) // shards <= trained
    gathered = hlo.collective_bytes(text, unknown_trips=1, least_bytes=1024).get("all-gather", 0)
    np.testing.assert_allclose(
        gathered * (GPUS - 1) / GPUS,
        report.collectives["all_gather"],
        rtol=0.05,
        atol=4 * LAYERS * ADAPTERS,
    )


@pytest.mark.by_default("nf4-stage_3")
@pytest.mark.parametrize(
    "name", ["stage_0", "stage_2", "stage_3", "remat", "base_on_host", "all_on_host"]
)
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_a_base_in_8_or_4_bits_is_gathered_encoded_and_no_decoded_copy_is_kept(format, name):
    program, text, stats, report = compiled(name, format)
    _, _, plain, _ = compiled(name)
    ends, shards = 2 * VOCAB * HIDDEN, GPUS if program.config.stage == 3 else 1
    held = (
        sum(kinds.get("frozen", 0) for kinds in report.tiers.values())
        * shards
        / (LAYERS * BASE + ends)
    )
    assert {"int8": 1.015, "nf4": 0.515}[format] < held < {"int8": 1.02, "nf4": 0.52}[format]
    # Copies of all layers would take LAYERS times this one layer.
    assert stats.temp_size_in_bytes < plain.temp_size_in_bytes + 2 * BASE
    assert stats.host_temp_size_in_bytes == 0
    assert report.host_argument_bytes == stats.host_argument_size_in_bytes
    loaded = hlo.host_link_bytes(text, unknown_trips=1)
    assert loaded["to_device"] == report.host_link["to_device"]
    assert (
        loaded["to_host"]
        == report.host_link["to_host"]
        <= 1.2 * 16 * (LAYERS * ADAPTERS + 8 * HIDDEN)
    )
    if name == "base_on_host":  # forward and backward; unstacked leaves are loaded once
        read = (loaded["to_device"] * shards / held - ends) / (LAYERS * BASE)
        assert 2 <= read <= 2.02
    gathered = hlo.collective_bytes(text, unknown_trips=1, least_bytes=1024).get("all-gather", 0)
    count = program.config.num_microbatches if name == "remat" else 1
    codes = 2 * held * count * (LAYERS * BASE + 2 * ends) if shards > 1 else 0
    assert (
        gathered <= codes + 8 * count * LAYERS * ADAPTERS
    )  # stages 1 and 2 gather the updated adapters
