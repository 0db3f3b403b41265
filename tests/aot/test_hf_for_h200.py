"""Steps of pretrained models compiled for one H200.

One is an 8 B model with adapters, built from its `config.json` alone.
"""

import functools
import json
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import aot
from zerojax.hf import config_of, model_of

pytestmark = pytest.mark.xdist_group(
    "h200"
)  # tests share compiled programs, so they share a process
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500_000.0, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
LORA, SEQ = zj.Lora(rank=16, alpha=32, targets="all"), 2048
MATRICES = ((4096, 14_336), (4096, 4096), (4096, 1024), (128_256, 4096))
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "nf4": {"frozen_dtype": "nf4"},
    "int8": {"frozen_dtype": "int8"},
    "host": {"frozen": "pinned_host"},
}
BYTES = {"bf16": 2.0, "host": 2.0, "nf4": 0.53, "int8": 1.03}
"""Maximum bytes per parameter of the base."""


@functools.cache
def compiled(name: str, packed: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w") as file:
            json.dump(LLAMA_8B, file)
        model, count = model_of(folder, lora=LORA), config_of(folder).num_params
    config = zj.ZeroConfig(precision="bf16", activations="remat", **CASES[name])
    program = zj.build_train_step(
        model, optax.adamw(1e-4), config, aot.gpu_mesh("h200", gpus_per_host=1)
    )
    tokens = jax.ShapeDtypeStruct((1, SEQ), jnp.int32)
    keys = ("tokens", "targets", *(("segment_ids", "positions") if packed else ()))
    result = program.lower(dict.fromkeys(keys, tokens)).compile()
    return program, result.as_text(), result.memory_analysis(), count


@pytest.mark.by_default("nf4")
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_8_billion_holds_no_gradient_or_master_of_the_base(name):
    program, text, stats, count = compiled(name, False)
    assert count == 8_030_261_248
    # The decoder of 8 or 4 bits passes one layer through float32, within its fusion; nothing does
    # so for all layers.
    depths = (("32,",), ("", "32,"))[name in ("bf16", "host")]
    shapes = {
        f"{depth}{a},{b}" for m, n in MATRICES for a, b in ((m, n), (n, m)) for depth in depths
    }
    shapes -= {"1024,4096"}  # which a tile of the loss has as well: 1024 tokens
    assert not [
        s for s in shapes if f"f32[{s}]" in text
    ]  # no master, and no gradient that is pending or summed
    state = program.layout.abstract_state
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    widths = (
        4096 + 4096,
        4096 + 1024,
        4096 + 1024,
        4096 + 4096,
        4096 + 14_336,
        4096 + 14_336,
        14_336 + 4096,
    )
    assert trained == 32 * LORA.rank * sum(widths)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.master)) == trained
    held = stats.argument_size_in_bytes + stats.host_argument_size_in_bytes
    assert held < BYTES[name] * count + 16 * trained + 1e6
    assert stats.temp_size_in_bytes < 8e9
    print(name, trained, held, stats.temp_size_in_bytes)


@pytest.mark.by_default("False")
@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_cudnns(packed):
    _, text, _, _ = compiled("nf4", packed)
    kind = "ScaleBiasSoftmax" if packed else "Softmax"  # segments become a bias [B, 1, T, T]
    assert f'custom_call_target="__cudnn$fmha{kind}"' in text
    assert f'custom_call_target="__cudnn$fmha{kind}Backward"' in text
    # There are no scores [heads, T, T].
    assert f"32,{SEQ},{SEQ}]" not in text
