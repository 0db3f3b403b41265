"""Tiny random models written by transformers in float32 on the CPU, and their outputs."""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax.hf import FAMILIES as BUILT
from zerojax.hf.importing import map_names
from zerojax.weights import open_weights
from zerojax.weights.arrays import ArrayTree
from zerojax.weights.renamed import RenamedFile

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_WINDOW = {"sliding_window": 5}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, **_WINDOW}
_QWEN_WINDOW = {"use_sliding_window": True, "max_window_layers": 1, **_WINDOW}
_LINEAR3 = {
    _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}

_PAD = {"pad_token_id": 0}
_SHORT = [1.0, 1.1, 1.3, 1.7, 2.2, 3.0]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": _SHORT,
    "long_factor": [4.0 * factor for factor in _SHORT],
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
_GLM = {"head_dim": 16, **_PAD}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.25,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
}
_HYBRID = {
    **_MULTIPLIERS, "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 64,
    "intermediate_size": 80, "position_embedding_type": "rope", "mamba_n_heads": 2, **_PAD,
}  # fmt: skip
_NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
_MINISTRAL3 = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-heads": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 20}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5}),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-yarn-factors": (
        "LlamaConfig",
        {
            "rope_parameters": {
                **_YARN,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "beta_fast": 16,
                "truncate": False,
            }
        },
    ),
    "mistral": ("MistralConfig", _WINDOW),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", _QWEN_WINDOW),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-biases": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "qwen3-window": ("Qwen3Config", {"head_dim": 16, **_QWEN_WINDOW}),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma2-no-caps": (
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2-untied": (
        "Gemma2Config",
        {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma2-all-sliding": ("Gemma2Config", {**_GEMMA, "layer_types": [_SLIDING] * 3}),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "layer_types": [_SLIDING, _FULL, _SLIDING]}),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {**_GEMMA, "layer_types": [_SLIDING, _FULL, _FULL], "rope_parameters": _LINEAR3},
    ),
}
"""Config classes of transformers and their options, by name."""
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 8}),
    # Phi-3-mini-4k, Phi-4, Phi-3.5-mini, Phi-4-mini
    "phi3": ("Phi3Config", {"sliding_window": 5, "num_key_value_heads": 4, **_PAD}),
    "phi4": ("Phi3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 2.5e5}, **_PAD}),
    "phi3.5": (
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16, "num_key_value_heads": 4, **_PAD},
    ),
    "phi4-mini": (
        "Phi3Config",
        {
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 8,
            "hidden_size": 64, "tie_word_embeddings": True, **_PAD,
        },
    ),
    # Gemma 2B, 7B, and older files, which mean the approximation by "gelu"
    "gemma": ("GemmaConfig", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma-7b": ("GemmaConfig", {"head_dim": 20, "num_key_value_heads": 4}),
    "gemma-gelu": ("GemmaConfig", {"head_dim": 16, "hidden_act": "gelu"}),
    # OLMo 2 7B, 32B, 1B
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, **_PAD}),
    "olmo2-32b": ("Olmo2Config", {"rms_norm_eps": 1e-6, **_PAD}),
    "olmo2-1b": ("Olmo2Config", {"num_key_value_heads": 4, "attention_bias": True, **_PAD}),
    # OLMo 3 7B before and after its extension, and 32B
    "olmo3": ("Olmo3Config", {"num_key_value_heads": 4, "sliding_window": 5, "num_hidden_layers": 4, **_PAD}),
    "olmo3-yarn": (
        "Olmo3Config",
        {
            "sliding_window": 5, "layer_types": [_SLIDING, _FULL, _SLIDING], **_PAD,
            "rope_parameters": {
                _FULL: {**_YARN, "rope_theta": 5e5, "attention_factor": 1.2},
                _SLIDING: {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "olmo3-32b": ("Olmo3Config", {"sliding_window": 5, "rms_norm_eps": 1e-6, "num_hidden_layers": 4, **_PAD}),
    # SmolLM3 3B, its base without layers listed, and windows
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], **_PAD}),
    "smollm3-interval": ("SmolLM3Config", {"no_rope_layer_interval": 2, "tie_word_embeddings": False, **_PAD}),
    "smollm3-window": (
        "SmolLM3Config",
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1], **_PAD},
    ),
    # Granite 3.1 2B and 8B, 3.0, Granite 4 micro, 350M and without positions
    "granite": ("GraniteConfig", {**_MULTIPLIERS, "tie_word_embeddings": True, **_PAD}),
    "granite-biases": ("GraniteConfig", {**_MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "granite-8b": ("GraniteConfig", {**_MULTIPLIERS, "logits_scaling": 0.125, "rms_norm_eps": 1e-5, **_PAD}),
    "granite4": ("GraniteMoeHybridConfig", {**_HYBRID, "tie_word_embeddings": True}),
    "granite4-350m": ("GraniteMoeHybridConfig", {**_HYBRID, "num_key_value_heads": 4}),
    "granite4-nope": ("GraniteMoeHybridConfig", {**_HYBRID, "position_embedding_type": None}),
    # GLM-4-9B-0414, 32B, Z1, and GLM-4-9B
    "glm4": ("Glm4Config", {**_GLM, "attention_bias": True}),
    "glm4-32b": ("Glm4Config", {**_GLM, "attention_bias": False, "num_key_value_heads": 4}),
    "glm4-quarter": ("Glm4Config", {**_GLM, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    "glm": ("GlmConfig", {**_GLM, "attention_bias": True}),
    # Seed-OSS 36B instruct and base, without dropout
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, **_NO_DROPOUT, **_PAD}),
    "seed_oss-out": ("SeedOssConfig", {"head_dim": 16, "attention_out_bias": True, **_NO_DROPOUT, **_PAD}),
    "seed_oss-plain": ("SeedOssConfig", {"head_dim": 16, "attention_bias": False, "mlp_bias": True, **_NO_DROPOUT, **_PAD}),
    # Ministral 8B, and Ministral 3 (its language model)
    "ministral": ("MinistralConfig", {"sliding_window": 5, "head_dim": 20, "layer_types": [_FULL, _SLIDING, _SLIDING]}),
    "ministral-all": ("MinistralConfig", {"sliding_window": 5, "head_dim": 16}),
    "ministral-full": ("MinistralConfig", {"sliding_window": 5, "head_dim": 12, "layer_types": [_FULL] * 3}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": _MINISTRAL3, **_PAD}),
    "ministral3-tied": (
        "Ministral3Config",
        {"head_dim": 16, "rope_parameters": _MINISTRAL3, "tie_word_embeddings": True, **_PAD},
    ),
    "ministral3-window": ("Ministral3Config", {"head_dim": 16, "rope_parameters": _MINISTRAL3, "sliding_window": 5, **_PAD}),
    # EXAONE 4.0 32B, 1.2B, and a pattern of layers
    "exaone4": ("Exaone4Config", {"sliding_window": 5, "layer_types": [_SLIDING, _SLIDING, _FULL], **_PAD}),
    "exaone4-1.2b": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": [_FULL] * 3, "tie_word_embeddings": True, "rope_parameters": _LLAMA3},
    ),
    "exaone4-pattern": ("Exaone4Config", {"sliding_window": 5, "sliding_window_pattern": 2}),
    # Command R7B, Command A, and Command R
    "cohere2": ("Cohere2Config", {"sliding_window": 5, "layer_types": [_SLIDING, _SLIDING, _FULL], "logit_scale": 2.5}),
    "cohere2-a": ("Cohere2Config", {"sliding_window": 5, "num_hidden_layers": 4, "tie_word_embeddings": False, "logit_scale": 1.5}),
    "cohere2-biases": ("Cohere2Config", {"sliding_window": 5, "attention_bias": True, "logit_scale": 1.5}),
    "cohere": ("CohereConfig", {"num_key_value_heads": 4, "logit_scale": 1.5}),
    # StarCoder2 3B, 7B and 15B, without dropout
    "starcoder2": ("Starcoder2Config", {"sliding_window": 5, **_NO_DROPOUT}),
    "starcoder2-7b": ("Starcoder2Config", {"num_key_value_heads": 1, **_NO_DROPOUT}),
    "starcoder2-plain": ("Starcoder2Config", {"use_bias": False, "tie_word_embeddings": False, **_NO_DROPOUT}),
}  # fmt: skip
"""Cases of further dense families: the variants of their released models."""
CASES |= DENSE
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
"""Names of one case per family."""


def need(*modules: str) -> None:
    """Skip the test module if a module is missing; in CI, which installs all of them, fail."""
    import importlib.util

    if absent := [name for name in modules if importlib.util.find_spec(name) is None]:
        if os.environ.get("CI"):
            raise RuntimeError(f"CI installs zerojax[dev], but {', '.join(absent)} cannot be found")
        pytest.skip(
            f"this module needs {', '.join(absent)}; run pip install 'zerojax[dev]'",
            allow_module_level=True,
        )


def write(
    case: str | tuple[str, dict[str, Any]],
    folder: pathlib.Path,
    *,
    dtype: str = "float32",
    shard: str = "40KB",
    seed: int = 0,
    noise: float = 0.1,
    **sizes: Any,
) -> Any:
    """Write a random model into a folder as transformers does, split into several files.

    Normal numbers times `noise` are added to all weights. Returns the model in float32.
    """
    import torch
    import transformers

    name, options = CASES[case] if isinstance(case, str) else case
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SIZES, **options, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", trust_remote_code=False
    )
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are initialized to constants
            parameter.add_(noise * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    if dtype == "float32":
        model.save_pretrained(folder, max_shard_size=shard)
        return model.eval()
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    # Loaded again because `to` has also rounded the rotary frequencies.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", trust_remote_code=False
    )
    return loaded.eval()


def renamed(folder: pathlib.Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays with the names of a folder's tensors as a model's parameters."""
    file = RenamedFile(ArrayTree(arrays), map_names(folder, BUILT, is_tiled=False))
    return {
        name: file.read(name, tuple((0, n) for n in tensor.shape))
        for name, tensor in file.tensors.items()
    }


def bits(folder: pathlib.Path) -> dict[str, Any]:
    """Return the bytes of all tensors of a folder, by name, with dtype and shape."""
    file = open_weights(folder)
    return {
        name: (
            t.dtype,
            t.shape,
            np.asarray(file.read(name, tuple((0, n) for n in t.shape))).tobytes(),
        )
        for name, t in file.tensors.items()
    }


def batch_of(
    seed: int = 0, rows: int = 2, length: int = 12, vocab: int = 96
) -> dict[str, np.ndarray]:
    """Return tokens and targets, some of which do not count."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1)).astype(np.int32)
    targets = np.where(rng.random((rows, length)) < 0.3, -1, tokens[:, 1:]).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": targets}


def torch_logits(model: Any, batch: Any) -> Any:
    """Return the logits of transformers."""
    import torch

    return model(torch.tensor(batch["tokens"], dtype=torch.long)).logits


def torch_loss(model: Any, batch: Any) -> Any:
    """Return the mean loss over the targets that count."""
    import torch

    targets = torch.tensor(batch["targets"], dtype=torch.long).flatten()
    return torch.nn.functional.cross_entropy(
        torch_logits(model, batch).flatten(0, 1), targets, ignore_index=-1
    )


def torch_losses(
    model: Any, steps: int = 5, rate: float = 1e-3, parameters: Any = None
) -> list[float]:
    """Return the losses of AdamW steps."""
    import torch

    parameters = list(model.parameters()) if parameters is None else parameters
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    losses = []
    for step in range(steps):
        loss = torch_loss(model, batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(rate: float = 1e-3) -> optax.GradientTransformation:
    """Return the optimizer of `torch_losses`."""
    return optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)


def program_of(
    model: zj.LayeredModel,
    tier: str,
    tmp_path: pathlib.Path,
    devices: int = 2,
    tx: Any = None,
    **fields: Any,
) -> zj.Program:
    """Return a program whose state is stored in `tier`."""
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    tiers = {} if tier == "device" else {"params": tier, "grads": tier, "opt_state": tier}
    swap = {"swap_dir": str(tmp_path)} if tier == "nvme" or "nvme" in fields.values() else {}
    return zj.build_train_step(
        model, adamw() if tx is None else tx, zj.ZeroConfig(**{**tiers, **swap, **fields}), mesh
    )


def losses_of(
    program: zj.Program, state: zj.TrainState, steps: int = 5
) -> tuple[list[float], zj.TrainState]:
    """Return the losses of steps over the batches of `torch_losses`, and the final state."""
    losses = []
    for step in range(steps):
        state, metrics = program.step(state, batch_of(step))
        losses.append(float(jax.block_until_ready(metrics["loss"])))
    return losses, state
