"""Hugging Face decoders over `context`: attention, losses and gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import FAMILIES, adamw, batch_of, need, write
from safetensors.numpy import load_file
from test_packed_rows import packed_and_alone

import zerojax as zj
from zerojax.hf import attend, model_of

need("torch", "transformers")

HOST, DISK = "pinned_host", "nvme"
BASES = {
    "resident": {},
    "streamed": {"params": HOST, "grads": HOST, "opt_state": HOST},
    "base_on_host": {"frozen": HOST},
    "base_on_disk": {"frozen": DISK, "activations": "remat"},
    "all_on_disk": {"params": DISK, "grads": DISK, "opt_state": DISK, "frozen": DISK},
}
CASE_OF = {"ulysses": "llama", "ring": "llama-one-kv-head"}
"""A model for which attention over context=2 chooses the method: it has 2 key heads, or 1."""


@pytest.mark.by_default("cap", "segments")
@pytest.mark.parametrize(
    "options",
    [
        {"cap": 2.0, "window": 5},
        {"window": jnp.int32(5), "segment_ids": np.repeat(np.arange(4), 4)[None].repeat(2, 0)},
        {"window": jnp.int32(0)},
    ],
    ids=["cap", "segments", "all"],
)
def test_attention_over_context_is_that_of_one_device(options):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 16, n, 8)), jnp.float32) for n in (4, 2, 2))

    def total(q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v, scale=0.5, **options)))

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    expected = run(q, k, v)
    with jax.set_mesh(zj.make_mesh(fsdp=1, context=4, devices=jax.devices()[:4])):
        got = jax.jit(jax.value_and_grad(functools.partial(total), (0, 1, 2)))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.max(np.abs(a - b)) <= 5e-6 * np.max(np.abs(b))


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_folder_trains_over_context_unedited(tmp_path, case, is_packed):
    write(case, tmp_path)
    batch = packed_and_alone()[0] if is_packed else batch_of()
    found = []
    for axes in ({"fsdp": 1}, {"fsdp": 2, "context": 2}):
        devices = jax.devices()[: int(np.prod(list(axes.values())))]
        config = zj.ZeroConfig(activations="selective")
        mesh = zj.make_mesh(**axes, devices=devices)
        program = zj.build_train_step(model_of(tmp_path), adamw(), config, mesh)
        state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
        found.append(jax.device_get(program.grads(state, batch)))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", CASE_OF)
def test_adapters_over_an_nf4_base_train_over_context(tmp_path, method, base):
    """The reference has as many shards, so its base has the same blocks of 4-bit numbers."""
    write(CASE_OF[method], tmp_path, dtype="bfloat16", hidden_size=64, intermediate_size=256)
    model = model_of(tmp_path, lora=zj.Lora(rank=3, alpha=12, targets="all"))
    context = {"fsdp": 2, "context": 2}
    found = []
    for axes, fields in (({"fsdp": 4}, {}), (context, BASES[base])):
        if DISK in fields.values():
            fields = {**fields, "swap_dir": tmp_path}
        config = zj.ZeroConfig(frozen_dtype="nf4", **fields)
        mesh = zj.make_mesh(**axes, devices=jax.devices()[:4])
        with zj.build_train_step(model, adamw(), config, mesh) as program:
            state = zj.import_hf(program, tmp_path, key=jax.random.key(1))
            losses = []
            for step in range(5):
                batch = batch_of(step, rows=4, length=16)
                state, metrics = jax.block_until_ready(program.step(state, batch))
                losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-6)


@pytest.mark.by_default("qwen2")
@pytest.mark.parametrize("case", FAMILIES)
def test_a_folder_is_exported_from_context_with_the_bits_of_fsdp(tmp_path, case):
    like = tmp_path / "like"
    write(case, like, shard="1GB")
    found = []
    for n, axes in enumerate(({"fsdp": 8}, {"fsdp": 2, "context": 4})):
        config = zj.ZeroConfig()
        with zj.build_train_step(model_of(like), adamw(), config, zj.make_mesh(**axes)) as program:
            state = zj.import_hf(program, like, key=jax.random.key(0))
            with zj.Checkpointer(tmp_path / f"checkpoint{n}") as checkpoints:
                checkpoints.save(program, state)
        zj.export_hf(tmp_path / f"checkpoint{n}", tmp_path / f"out{n}", like=like)
        found.append(load_file(tmp_path / f"out{n}" / "model.safetensors"))
    original = load_file(like / "model.safetensors")
    assert list(found[0]) == list(found[1]) == list(original)
    for name, array in original.items():
        np.testing.assert_array_equal(found[0][name], array)
        np.testing.assert_array_equal(found[1][name], array)
