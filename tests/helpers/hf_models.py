"""Tiny random models written by transformers in float32 on the CPU, and their outputs."""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zerojax as zj

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
    case: str,
    folder: pathlib.Path,
    *,
    dtype: str = "float32",
    shard: str = "40KB",
    seed: int = 0,
    **sizes: Any,
) -> Any:
    """Write a random model into a folder as transformers does, split into several files.

    Returns the model in float32.
    """
    import torch
    import transformers

    name, options = CASES[case]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SIZES, **options, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", trust_remote_code=False
    )
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are initialized to constants
            parameter.add_(0.1 * torch.randn_like(parameter))
    if dtype == "float32":
        model.save_pretrained(folder, max_shard_size=shard)
        return model.eval()
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    # Loaded again because `to` has also rounded the rotary frequencies.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", trust_remote_code=False
    )
    return loaded.eval()


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
