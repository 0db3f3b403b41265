"""`config.json` alone says what a model is; unsupported or unknown parts are refused by name."""

import json
import os
import pathlib
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hf_models import CASES, SIZES, batch_of, bits, need, program_of, torch_logits

import zerojax as zj
from zerojax.hf import config_of, model_of
from zerojax.jaxprs import flatten

LLAMA = {"model_type": "llama", **SIZES}
GEMMA3 = {"model_type": "gemma3_text", **SIZES, "head_dim": 16, "sliding_window": 5}

PHI3 = {"model_type": "phi3", **SIZES, "pad_token_id": 0}
SMOLLM3 = {"model_type": "smollm3", **SIZES, "pad_token_id": 0}
EXAONE4 = {"model_type": "exaone4", **SIZES}


def folder_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


REFUSED = {
    "experts": (
        {"model_type": "qwen2_moe", "num_experts": 8},
        "'qwen2_moe' has num_experts=8: mixtures of experts of this model_type are not supported",
    ),
    "experts of a dense family": ({"num_local_experts": 8}, "'llama' has num_local_experts=8"),
    "vision": (
        {"model_type": "llava", "text_config": {}, "vision_config": {"depth": 1}},
        "has vision_config: models of images",
    ),
    "unknown": (
        {"model_type": "mamba"},
        "model_type 'mamba' is not supported, only cohere, cohere2, deepseek_v2",
    ),
    "none": ({"model_type": None}, "model_type=None: the name of a family is needed"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"weights are quantized \('gptq' in quantization_config\)",
    ),
    "rope": (
        {"rope_scaling": {"type": "ntk", "factor": 2.0}},
        "rope of type 'ntk' is not supported: choose from default, linear, llama3, yarn, longrope",
    ),
    "longrope": (
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters.short_factor is missing",
    ),
    "longrope's factors": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [1]}},
        "short_factor has 2 numbers, but 6 pairs of dims are rotated",
    ),
    "longrope's numbers": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 0], "long_factor": [1]}},
        r"short_factor\[1\] is 0, and a number, above 0",
    ),
    "odd part": (
        {**PHI3, "partial_rotary_factor": 0.6},
        "partial_rotary_factor=0.6 of head_dim=12 rotates 7 dims: an even number is needed",
    ),
    "part": ({**PHI3, "partial_rotary_factor": 2}, "partial_rotary_factor is 2, and a number"),
    "rotated layers": (
        {**SMOLLM3, "no_rope_layers": [1, 0]},
        "no_rope_layers has 2 numbers, but num_hidden_layers=3",
    ),
    "rotated layers' numbers": (
        {**SMOLLM3, "no_rope_layers": [1, 2, 1]},
        r"no_rope_layers\[1\] is 2, and an integer, from 0 to 1",
    ),
    "pattern of layers": (
        {**EXAONE4, "sliding_window_pattern": "LGL"},
        "sliding_window_pattern is 'LGL', and a number of layers, or letters",
    ),
    "no pattern": (
        {**EXAONE4, "sliding_window_pattern": None},
        "sliding_window_pattern is null: a number of layers is needed, or layer_types",
    ),
    "theta of some layers": (
        {"model_type": "olmo3", "sliding_window": 5, "pad_token_id": 0, "rope_theta": 1e4},
        "rope_theta=10000: versions of transformers disagree",
    ),
    "multiplier": (
        {"model_type": "granite", "residual_multiplier": 0},
        "residual_multiplier is 0, and a number, above 0",
    ),
    "experts by default": (
        {"model_type": "granitemoehybrid"},
        "num_local_experts=None: only 0 is supported for this model_type",
    ),
    "kinds by default": (
        {"model_type": "granitemoehybrid", "num_local_experts": 0},
        "layer_types is missing: this model_type needs a kind for each layer",
    ),
    "state space layers": (
        {"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["mamba"] * 3},
        r"layer_types\[0\] is 'mamba', and one of sliding_attention, full_attention",
    ),
    "queries": (
        {"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}},
        "llama_4_scaling_beta is missing",
    ),
    "no layers of its own": (
        {
            "model_type": "mllama",
            "text_config": {**SIZES, "cross_attention_layers": [0, 1, 2], "pad_token_id": 0},
        },
        "cross_attention_layers lists all 3 layers",
    ),
    "rope key": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mode": 3}},
        r"has the unknown keys \['mode'\]",
    ),
    "rope lacks": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        "rope_scaling.low_freq_factor is missing",
    ),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1: dropout is not supported"),
    "keys": (
        {"attention_gain": 0.5, "mup": True},
        "attention_gain=0.5, mup=True: unknown, and may change",
    ),
    "of another family": (
        {"attn_logit_softcapping": 30.0},
        "attn_logit_softcapping=30.0: this model_type does not have it",
    ),
    "gemma3 cap": (
        {**GEMMA3, "attn_logit_softcapping": 30.0},
        "attn_logit_softcapping=30.0: this model_type does not",
    ),
    "bidirectional": (
        {**GEMMA3, "use_bidirectional_attention": True},
        "use_bidirectional_attention=True: a decoder does not attend",
    ),
    "layer types": (
        {**GEMMA3, "layer_types": ["chunked_attention"] * 3},
        r"layer_types\[0\] is 'chunked_attention', and one of",
    ),
    "layer count": (
        {**GEMMA3, "layer_types": ["full_attention"]},
        "layer_types has 1 kinds, but num_hidden_layers=3",
    ),
    "window": ({**GEMMA3, "sliding_window": 0}, "sliding_window is 0, and an integer, from 1"),
    "activation": ({"hidden_act": "xielu"}, "hidden_act is 'xielu', and one of silu, gelu"),
    "groups": (
        {"num_key_value_heads": 3},
        "num_attention_heads=4 is not divisible by num_key_value_heads=3",
    ),
    "size": ({"hidden_size": "48"}, "hidden_size is '48', and an integer, from 1"),
    "missing": ({"vocab_size": None}, "vocab_size is None, and an integer, from 1"),
    "odd heads": ({"head_dim": 5}, "head_dim=5 .*: an even width is needed"),
    "pad": (
        {"pad_token_id": 96},
        "pad_token_id=96: null is needed, or a token below vocab_size=96",
    ),
    # types and ranges
    "eps": (
        {"rms_norm_eps": float("nan")},
        "rms_norm_eps is nan, and a number, above 0, below 1, is needed",
    ),
    "one as eps": (
        {"rms_norm_eps": 1},
        "rms_norm_eps is 1, and a number, above 0, below 1, is needed",
    ),
    "no rope": ({"rope_parameters": False}, "rope_parameters is False, and an object is needed"),
    "no older rope": ({"rope_scaling": False}, "rope_scaling is False, and an object is needed"),
    "null activation": ({"hidden_act": None}, "hidden_act is null, but one of silu, gelu"),
    "no eps": ({"rms_norm_eps": 0}, "rms_norm_eps is 0, and a number"),
    "text as eps": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', and a number"),
    "theta": ({"rope_theta": float("nan")}, "rope_theta is nan, and a number, above 1"),
    "no theta": ({"rope_theta": 0}, "rope_theta is 0, and a number, above 1"),
    "null theta": ({"rope_theta": None}, "rope_theta is None, and a number"),
    "infinite theta": ({"rope_theta": float("inf")}, "rope_theta is inf, and a number"),
    "inner theta": (
        {"rope_parameters": {"rope_theta": -1.0}},
        r"rope_parameters.rope_theta is -1.0, and a number",
    ),
    "factor 0": (
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        r"rope_scaling.factor is 0, and a number, from 1",
    ),
    "factor -2": (
        {"rope_scaling": {"rope_type": "yarn", "factor": -2}},
        r"rope_scaling.factor is -2, and a number",
    ),
    "text as factor": (
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        r"rope_scaling.factor is '2', and a number",
    ),
    "true as factor": (
        {"rope_scaling": {"type": "linear", "factor": True}},
        r"rope_scaling.factor is True, and a number",
    ),
    "frequencies": (
        {"rope_scaling": {**CASES["llama3"][1]["rope_parameters"], "low_freq_factor": 4.0}},
        "rope_scaling: low_freq_factor=4.0 is not below high_freq_factor=4.0",
    ),
    "beta": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}},
        "rope_scaling: beta_fast=1.0 is below beta_slow=2.0",
    ),
    "null truncate": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": None}},
        "truncate is None, and true or",
    ),
    "rope type": (
        {"rope_scaling": {"rope_type": ["linear"]}},
        r"rope_scaling.rope_type: rope of type \['linear'\] is not",
    ),
    "two rope types": (
        {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2.0}},
        "rope_scaling has rope_type='linear' and type='default'",
    ),
    "rope text": ({"rope_scaling": "linear"}, "rope_scaling is 'linear', and an object is needed"),
    "two ropes": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default"},
        },
        "rope_parameters and rope_scaling differ",
    ),
    "kinds of ropes": (
        {"rope_parameters": {"full_attention": {}}},
        "has full_attention, but this model_type rotates all layers",
    ),
    "flat rope": (
        {**GEMMA3, "rope_parameters": {"rope_theta": 2.0}},
        r"has \['rope_theta'\]: this model_type takes one object",
    ),
    "inner rope": (
        {**GEMMA3, "rope_parameters": {"full_attention": 3}},
        "rope_parameters.full_attention is 3, and an object",
    ),
    "older rope": (
        {**GEMMA3, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling.type: versions of",
    ),
    "cap": (
        {**GEMMA3, "final_logit_softcapping": "50"},
        "final_logit_softcapping is '50', and a number, above 0",
    ),
    "cap 0": (
        {**GEMMA3, "final_logit_softcapping": 0},
        "final_logit_softcapping is 0, and a number, above 0",
    ),
    "scale": (
        {**GEMMA3, "query_pre_attn_scalar": float("inf")},
        "query_pre_attn_scalar is inf, and a number",
    ),
    "flag": (
        {"tie_word_embeddings": "false"},
        "tie_word_embeddings is 'false', and true or false is needed",
    ),
    "number as flag": ({"attention_bias": 1}, "attention_bias is 1, and true or false"),
    "zero as flag": ({"mlp_bias": 0}, "mlp_bias is 0, and true or false"),
    "float size": ({"hidden_size": 3.0}, r"hidden_size is 3.0, and an integer, from 1"),
    "true size": ({"num_hidden_layers": True}, "num_hidden_layers is True, and an integer"),
    "huge size": (
        {"hidden_size": 10**30},
        "hidden_size is 1000000000000000000000000000000, and an integer, from 1",
    ),
    "layers": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000, and an integer, from 1 to 4096",
    ),
    "positions": (
        {"max_position_embeddings": 64.0},
        "max_position_embeddings is 64.0, and an integer",
    ),
    "heads": ({"num_attention_heads": 96}, "head_dim=0 .*hidden_size=48 // num_attention_heads=96"),
    "list as activation": ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\], and one of"),
    "kinds of layers": (
        {**GEMMA3, "layer_types": "full_attention"},
        "layer_types is 'full_attention', and a list",
    ),
    "lists in kinds": (
        {**GEMMA3, "layer_types": [["full_attention"]] * 3},
        r"layer_types\[0\] is \['full_attention'\]",
    ),
    "pattern": (
        {**GEMMA3, "sliding_window_pattern": 0},
        "sliding_window_pattern is 0, and an integer, from 1",
    ),
    "true pad": ({"pad_token_id": True}, "pad_token_id is True, and an integer"),
    "type": ({"model_type": ["llama"]}, r"model_type=\['llama'\]: the name of a family"),
    # features that must be off
    "not causal": (
        {"is_causal": False},
        "is_causal=False: a decoder does not attend to later tokens; allowed: true",
    ),
    "no dropout": (
        {"attention_dropout": float("nan")},
        "attention_dropout=nan: dropout is not supported",
    ),
    "rotary": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5: this model_type rotates whole heads",
    ),
    "pruned": (
        {"pruned_heads": {"0": [1]}},
        "pruned_heads={'0': .*: pruned heads are not supported",
    ),
    "layers of their own": (
        {"per_layer_config": {"1": {"hidden_size": 3}}},
        "per_layer_config=.*: sizes that differ",
    ),
    "mlx": ({"quantization": {"bits": 4, "group_size": 64}}, "weights are quantized"),
    "sliding": (
        {"layer_types": ["sliding_attention"] * 3},
        "this model_type has 'full_attention' in each of 3 layers",
    ),
    "unused window": (
        {**GEMMA3, "sliding_window": None, "layer_types": ["sliding_attention"] * 3},
        "sliding_window is null",
    ),
    "pattern of gemma2": (
        {**GEMMA3, "model_type": "gemma2", "sliding_window_pattern": 3},
        "sliding_window_pattern=3: this model_type does not have it; allowed: null, false, 2",
    ),
    # of families that are refused
    "gemma3n": (
        {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
        "neither is its language model, 'gemma3n_text', which has per-layer embeddings",
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl", "vision_config": {"a": 1}},
        "which has rotations over three axes",
    ),
    "text of gemma4": (
        {"model_type": "gemma4_text"},
        "'gemma4_text' is not supported: it has norms of values",
    ),
    "text of qwen3_5": ({"model_type": "qwen3_5_text"}, "it has linear attention layers"),
    "text of an unknown one": (
        {"model_type": "x", "text_config": {"model_type": "y"}},
        "neither is its language model, 'y'",
    ),
    "built text": (
        {"model_type": "llava", "text_config": {"model_type": "gemma3_text"}},
        "language model belongs to a supported family",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_are_not_built_are_refused_by_name(tmp_path, name):
    change, told = REFUSED[name]
    with pytest.raises(ValueError, match=told):
        model_of(folder_of(tmp_path, {**LLAMA, **change}))


def test_folders_without_a_config_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config.json cannot be read \(No such file"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list, but a JSON object"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match="is not JSON: it is nested too deeply"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 48, "hidden_size": 64}')
    with pytest.raises(ValueError, match="'hidden_size' appears twice"):
        model_of(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(
        ValueError, match=r"config.json cannot be read: it is not a file of at most 64 MiB"
    ):
        model_of(tmp_path)


NO_CHANGE = {
    "smollm2": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {}},
    },
    "mirrors": {"unsloth_fixed": True, "unsloth_version": "2025.1", "neftune_noise_alpha": 5.0},
    "generation": {
        "max_length": 4096,
        "min_length": 1,
        "temperature": 0.6,
        "top_k": 50,
        "top_p": 0.9,
        "do_sample": True,
    },
    "beams": {
        "num_beams": 4,
        "repetition_penalty": 1.1,
        "length_penalty": 0.5,
        "forced_eos_token_id": 2,
    },
    "tasks": {
        "num_labels": 3,
        "id2label": {"0": "a"},
        "problem_type": None,
        "classifier_dropout": 0.1,
    },
    "neutral": {
        "partial_rotary_factor": 1.0,
        "pruned_heads": {},
        "use_mrope": False,
        "is_causal": True,
        "num_experts": 0,
    },
    "dropout": {"attention_dropout": 0.0, "resid_pdrop": 0, "hidden_dropout": None},
    "kinds": {"layer_types": ["full_attention"] * 3},
    "unused window": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "null": {
        "sliding_window": None,
        "rope_scaling": None,
        "vision_config": None,
        "quantization_config": None,
    },
}
"""Keys that have no effect in a Llama."""


@pytest.mark.parametrize("name", list(NO_CHANGE))
def test_keys_that_change_nothing_are_taken_without_a_word(tmp_path, caplog, name):
    plain = config_of(folder_of(tmp_path, LLAMA))
    assert config_of(folder_of(tmp_path, {**LLAMA, **NO_CHANGE[name]})) == plain
    assert not caplog.records


def test_every_generation_key_of_transformers_changes_nothing(tmp_path):
    need("transformers")
    import transformers

    keys = transformers.GenerationConfig().to_dict()
    values = {
        key: 7
        for key in keys
        if not key.startswith("_") and key not in {"pad_token_id", "transformers_version"}
    }
    assert {"temperature", "num_beams", "max_length"} <= set(values)
    assert config_of(folder_of(tmp_path, {**LLAMA, **values})) == config_of(
        folder_of(tmp_path, LLAMA)
    )


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("mystery", (None, False, 0, 0.0, "", [], {})),
        ("mystery_factor", (1, 1.0)),
        ("mystery_multiplier", (1.0,)),
    ],
)
def test_unknown_keys_that_seem_off_are_warned_of_once_by_name(tmp_path, caplog, key, values):
    for n, value in enumerate(values):
        (tmp_path / str(n)).mkdir()
        folder = folder_of(tmp_path / str(n), {**LLAMA, key: value})
        caplog.clear()
        assert config_of(folder) == config_of(folder)
        assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
            f"{key}={value!r}"
        ]


@pytest.mark.parametrize(
    ("key", "value"),
    [("mystery", 1), ("mystery", True), ("mystery_factor", True), ("mystery", [0])],
)
def test_unknown_keys_of_other_values_are_refused(tmp_path, key, value):
    with pytest.raises(
        ValueError, match=f"{key}=.*: unknown, and may change what the model computes"
    ):
        config_of(folder_of(tmp_path, {**LLAMA, key: value}))


@pytest.mark.parametrize("case", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_config_without_optional_keys_means_what_it_means_to_transformers(tmp_path, case):
    """Sizes missing from a file are the family's defaults, not derived from the heads."""
    need("transformers")
    import transformers

    theirs = getattr(transformers, CASES[case][0])()
    needed = {key: getattr(theirs, key) for key in list(SIZES)[:5]}
    ours = config_of(folder_of(tmp_path, {"model_type": theirs.model_type, **needed}))
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )


def test_the_most_layers_take_a_moment(tmp_path):
    """Values that differ between layers are computed once per kind of layer."""
    config = {**LLAMA, "num_hidden_layers": 4096, "head_dim": 8192}
    start = time.process_time()
    model = model_of(folder_of(tmp_path, config))
    assert model.per_layer["frequencies"].shape == (4096, 4096)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"attention": "flash"}, "attention='flash' is unknown"),
        (
            {"mlp_tiles": 2, "lora": zj.Lora(rank=2, alpha=4, targets="all", use_dora=True)},
            "mlp_tiles=2 cannot be combined with use_dora=True for gate_proj, up_proj, down_proj",
        ),
        ({"mlp_tiles": 3}, "3"),
        ({"trainable": lambda path, value: False}, "matches no parameter"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, told):
    with pytest.raises(ValueError, match=told):
        model_of(folder_of(tmp_path, LLAMA), **options)


def test_tensor_axes_split_whole_heads(tmp_path):
    model = model_of(folder_of(tmp_path, LLAMA))
    mesh = zj.make_mesh(fsdp=1, tensor=4, devices=jax.devices()[:4])
    program = zj.build_train_step(model, optax.sgd(1.0), zj.ZeroConfig(stage=3), mesh)
    with pytest.raises(ValueError, match="num_key_value_heads=2 is not divisible by tensor=4"):
        program.check(batch_of())


OLDER = {
    "llama3": {"rope_theta": 5e5, "rope_scaling": None},
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2},
}


@pytest.mark.parametrize("name", list(OLDER))
def test_older_keys_mean_what_the_newer_ones_do(tmp_path, name):
    """Files from before transformers 5 have `rope_scaling`, and windows by a pattern."""
    if name == "llama3":
        newer = {**LLAMA, **CASES["llama3"][1]}
        of_rope = dict(newer["rope_parameters"])
        older = {k: v for k, v in newer.items() if k != "rope_parameters"}
        older |= {"rope_theta": of_rope.pop("rope_theta"), "rope_scaling": of_rope}
    else:
        ropes = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        newer = {**GEMMA3, "layer_types": kinds, "rope_parameters": ropes}
        older = {
            **GEMMA3,
            **OLDER["gemma3"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    configs = [config_of(folder_of(tmp_path, config)) for config in (newer, older)]
    assert configs[0] == configs[1]
    assert len(set(configs[0].ropes)) == (2 if name == "gemma3" else 1)


def test_another_name_of_an_activation_is_no_other_model(tmp_path):
    told = {
        name: config_of(folder_of(tmp_path, {**LLAMA, "hidden_act": name})).computes()
        for name in ("gelu_new", "gelu_pytorch_tanh", "gelu")
    }
    assert told["gelu_new"] == told["gelu_pytorch_tanh"] != told["gelu"]


def test_a_family_is_added_by_a_table_and_a_block(tmp_path):
    """Apertus, as docs/fine_tuning.md adds it: options, other names, and another MLP."""
    need("torch", "transformers")
    import torch
    import transformers

    page = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "fine_tuning.md"
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.S)
    example = next(block for block in blocks if "ApertusBlock" in block)
    scope: dict[str, Any] = {"folder": tmp_path / "model"}
    torch.manual_seed(0)
    config = transformers.ApertusConfig(**SIZES, pad_token_id=0, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", trust_remote_code=False
    ).eval()
    theirs.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"'apertus' is not supported, only .*: add it to"):
        model_of(tmp_path / "model")
    exec(example, scope)
    families = scope["families"]
    program = program_of(scope["model"], "device", tmp_path, 1)
    state = zj.import_hf(program, tmp_path / "model", key=jax.random.key(0), families=families)
    ours = np.asarray(program.apply(state, batch_of()))
    np.testing.assert_allclose(
        ours, torch_logits(theirs, batch_of()).detach().numpy(), rtol=0, atol=1e-4
    )
    with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(program, state)
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=tmp_path / "model", families=families)
    assert bits(tmp_path / "out") == bits(tmp_path / "model")


def test_real_sizes_have_the_published_number_of_parameters(tmp_path):
    """Sizes of Llama 3.1 8B, Qwen 2.5 0.5B and Gemma 2 2B in their `config.json`."""
    sizes = lambda *n: dict(zip(list(SIZES)[:6], n, strict=True))  # noqa: E731
    models = {
        8_030_261_248: {"model_type": "llama", **sizes(128_256, 4096, 14_336, 32, 32, 8)},
        494_032_768: {
            "model_type": "qwen2",
            **sizes(151_936, 896, 4864, 24, 14, 2),
            "tie_word_embeddings": True,
        },
        2_614_341_888: {"model_type": "gemma2", **sizes(256_000, 2304, 9216, 26, 8, 4)},
    }
    for count, config in models.items():
        assert config_of(folder_of(tmp_path, config)).num_params == count


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "qwen3"])
def test_products_are_in_the_dtype_in_which_parameters_arrive(tmp_path, kind):
    config = {
        **LLAMA,
        "model_type": kind,
        "head_dim": 16,
        "sliding_window": None if kind == "qwen3" else 5,
    }
    model = model_of(
        folder_of(
            tmp_path, {k: v for k, v in config.items() if kind != "llama" or k != "sliding_window"}
        )
    )
    key, batch = jax.random.key(0), batch_of()

    def run():
        low = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
        x = model.embed(low(model.init_embed(key)), batch, None)
        layer = jax.tree.map(lambda a: jnp.asarray(a)[0], model.per_layer)
        assert x.dtype == jnp.bfloat16
        assert model.context is not None
        return model.block(low(model.init_block(key)), x, None, model.context(batch), layer)

    jaxpr = jax.make_jaxpr(run)()
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16
    flat = flatten(jaxpr.jaxpr, jaxpr.consts).instructions
    inputs: list[Any] = [
        i.eqn.invars[0].aval for i in flat if i.eqn.primitive.name == "dot_general"
    ]
    products = [aval.dtype for aval in inputs]
    assert len(products) >= 9  # seven projections, scores, and the results computed from them
    assert set(products) == {jnp.dtype("bfloat16")}
