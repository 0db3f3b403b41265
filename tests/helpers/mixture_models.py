"""Tiny mixtures of experts that transformers writes: three variants of released configs each."""

import pathlib
from typing import Any

import hf_models
import jax
import numpy as np

import zerojax as zj

_BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_QWEN3 = {
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
_OLMOE = {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4, "eos_token_id": 1}
_GLM4_MOE = {
    "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}  # fmt: skip
_MSCALE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 16, "num_local_experts": 4, "intermediate_size": 32, "intermediate_size_mlp": 64, "attention_chunk_size": 5,
    "no_rope_layer_interval": 2, "floor_scale": 3, "attn_scale": 0.5,
}  # fmt: skip
_GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5, "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {**_QWEN3, **_BALANCE}),
    "qwen3_moe-coder": ("Qwen3MoeConfig", {**_QWEN3, "num_experts_per_tok": 5, "norm_topk_prob": False}),
    "qwen3_moe-window": (
        "Qwen3MoeConfig",
        {**_QWEN3, "use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, **_BALANCE}),
    "mixtral-window": ("MixtralConfig", {"num_local_experts": 8, "sliding_window": 5}),
    "mixtral-8x22b": (
        "MixtralConfig",
        {"num_local_experts": 4, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "olmoe": ("OlmoeConfig", {**_OLMOE, **_BALANCE}),
    "olmoe-normalized": ("OlmoeConfig", {**_OLMOE, "norm_topk_prob": True}),
    "olmoe-grouped": ("OlmoeConfig", {**_OLMOE, "num_key_value_heads": 2, "num_experts_per_tok": 1}),
    "glm4_moe": ("Glm4MoeConfig", _GLM4_MOE),
    "glm4_moe-norms": (
        "Glm4MoeConfig",
        {**_GLM4_MOE, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe-groups": (
        "Glm4MoeConfig",
        {**_GLM4_MOE, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2},
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v2-groups": (
        "DeepseekV2Config",
        {
            **_DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 16.0, "rope_parameters": _MSCALE,
        },
    ),
    "deepseek_v2-wide": (
        "DeepseekV2Config", {**_DEEPSEEK, "v_head_dim": 20, "first_k_dense_replace": 0, "attention_bias": True},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": _MSCALE}),
    "deepseek_v3-ungrouped": (
        "DeepseekV3Config", {**_DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3-halves": (
        "DeepseekV3Config",
        {**_DEEPSEEK, "rope_interleave": False, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2},
    ),
    "llama4": ("Llama4TextConfig", _LLAMA4),
    "llama4-dense": (
        "Llama4TextConfig",
        {**_LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "num_local_experts": 8},
    ),
    "llama4-long": ("Llama4TextConfig", {**_LLAMA4, "attention_chunk_size": None, "attn_temperature_tuning": False}),
    "gpt_oss": ("GptOssConfig", {**_GPT_OSS, **_BALANCE}),
    "gpt_oss-120b": (
        "GptOssConfig",
        {**_GPT_OSS, "num_local_experts": 8, "num_experts_per_tok": 4, "swiglu_limit": 0.5},
    ),
    "gpt_oss-plain": (
        "GptOssConfig",
        {
            **_GPT_OSS,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
"""Config classes of transformers and their options, by name."""
ROWS = 4
"""Rows of a batch, which four devices split."""


def write(case: str, folder: pathlib.Path, **options: Any) -> Any:
    """Write a random model into a folder as transformers does, and return it."""
    return hf_models.write(CASES[case], folder, shard="1MB", **options)


def batch_of(seed: int = 0) -> dict[str, np.ndarray]:
    """Return tokens and targets, some of which do not count."""
    return hf_models.batch_of(seed, rows=ROWS, length=10)


def program_of(
    model: zj.LayeredModel,
    place: str,
    folder: pathlib.Path,
    has_experts: bool = True,
    **fields: Any,
) -> Any:
    """Return a program on fsdp 2 x expert 2 whose state is in a tier, or "alone" on fsdp 2."""
    axes = {"fsdp": 2, "expert": 2} if has_experts and place != "alone" else {"fsdp": 2}
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: 2 ** len(axes)])
    if place in ("pinned_host", "nvme"):
        fields = {"params": place, "grads": place, "opt_state": place, **fields}
    if "nvme" in fields.values():
        fields["swap_dir"] = str(folder)
    return zj.build_train_step(model, hf_models.adamw(), zj.ZeroConfig(**fields), mesh)


def torch_loss(model: Any, batch: Any) -> Any:
    """Return the mean loss over the targets that count, with the balance loss if the config says so."""
    import torch

    tokens = torch.tensor(batch["tokens"], dtype=torch.long)
    targets = torch.tensor(batch["targets"], dtype=torch.long).flatten()
    out = model(tokens)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets, ignore_index=-1)
    if getattr(model.config, "output_router_logits", False):
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    return loss


def torch_losses(model: Any, steps: int = 5, parameters: Any = None) -> list[float]:
    """Return the losses of AdamW steps."""
    import torch

    parameters = list(model.parameters()) if parameters is None else parameters
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    losses = []
    for step in range(steps):
        loss = torch_loss(model, batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
