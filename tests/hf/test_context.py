"""Hugging Face decoders over `context`: attention, losses and gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import FAMILIES, adamw, batch_of, need, write
from test_packed_rows import packed_and_alone

import zerojax as zj
from zerojax.hf import attend, model_of

need("torch", "transformers")


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
