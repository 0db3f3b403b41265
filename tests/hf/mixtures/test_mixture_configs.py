"""Released configs of mixtures are read, and options that do not fit are refused by name."""

import json
from typing import Any

import pytest

import zerojax as zj
from zerojax.hf import config_of, model_of

_QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024,
    "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
    "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 50304,
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
_DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
_GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96,
    "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "tie_word_embeddings": False, "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
_DEEPSEEK3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "auto_map": {}, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
RELEASED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-30B-A3B": (_QWEN3, 30_532_122_624),
    "Mixtral-8x7B": (_MIXTRAL, 46_702_792_704),
    "OLMoE-1B-7B": (_OLMOE, 6_919_161_856),
    "gpt-oss-20b": (_GPT_OSS, 20_914_757_184),
    "DeepSeek-V2-Lite": (_DEEPSEEK, 15_706_484_224),
    "DeepSeek-V3": (_DEEPSEEK3, 671_026_404_352),
    "GLM-4.5-Air": (_GLM, 106_852_245_504),
}
"""Keys and numbers of parameters of released models."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": ({**_QWEN3, "num_experts": None}, "num_experts is missing"),
    "two numbers": (
        {**_QWEN3, "num_local_experts": 64},
        "num_experts=128, num_local_experts=64: these keys",
    ),
    "too many": ({**_QWEN3, "num_experts_per_tok": 129}, "which exceeds num_experts=128"),
    "no layer": ({**_QWEN3, "decoder_sparse_step": 49}, "no layer of 48 has experts"),
    "noise": ({**_MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    "clipped": ({**_OLMOE, "clip_qkv": 8.0}, "clip_qkv=8.0: clipped queries"),
    "score": (
        {**_DEEPSEEK, "scoring_func": "sigmoid"},
        "scoring_func='sigmoid': only 'softmax' is supported",
    ),
    "method": ({**_DEEPSEEK, "topk_method": "noaux_tc"}, "topk_method='noaux_tc': only"),
    "groups": ({**_GLM, "n_group": 3}, "n_group=3 and topk_group=1 do not fit 128 experts"),
    "narrow groups": ({**_GLM, "n_group": 128, "num_experts_per_tok": 1}, "n_group=128 leaves 1"),
    "kv heads": ({**_DEEPSEEK, "num_key_value_heads": 4}, "num_key_value_heads=4 is not"),
    "wide values": ({**_DEEPSEEK, "v_head_dim": 256}, "v_head_dim=256 exceeds"),
}


def folder_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", list(RELEASED))
def test_released_mixtures_have_their_number_of_parameters(tmp_path, name):
    config, count = RELEASED[name]
    assert config_of(folder_of(tmp_path, config)).num_params == count


@pytest.mark.parametrize("name", list(REFUSED))
def test_mixtures_that_do_not_fit_are_refused(tmp_path, name):
    config, told = REFUSED[name]
    with pytest.raises(ValueError, match=told):
        config_of(folder_of(tmp_path, config))


def test_adapters_of_experts_and_of_missing_projections_are_refused(tmp_path):
    lora = zj.Lora(rank=2, alpha=4, targets=("q_proj", "up_proj"))
    with pytest.raises(ValueError, match="projections of experts, which have no adapters"):
        model_of(folder_of(tmp_path, _QWEN3), lora=lora)
    with pytest.raises(ValueError, match="v_proj: latent attention has no such projection"):
        model_of(folder_of(tmp_path, _DEEPSEEK), lora=zj.Lora(rank=2, alpha=4))
    with pytest.raises(ValueError, match="mlp_tiles=2: experts are not stored in tiles"):
        model_of(folder_of(tmp_path, _QWEN3), mlp_tiles=2)
