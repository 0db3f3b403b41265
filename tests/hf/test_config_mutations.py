"""A randomly changed `config.json` is refused by key, or computes what transformers computes.

Each mutation of a published config ends in one of these ways; any other fails the test, with its
seed:

    refused         by a ValueError that names a changed key
    equal           logits are those of transformers, with the same weights
    of the same sizes    too large to run here: both read the same sizes
    theirs          transformers refuses it
"""

import json
import random
import time
import zlib
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from hf_models import batch_of, need
from mutations import mutated
from real_configs import CONFIGS

from zerojax.hf import FAMILIES, DecoderConfig, config_of, model_of
from zerojax.weights import DividedFile
from zerojax.weights.arrays import ArrayTree

need("torch", "transformers")

TOLERANCE = 1e-4
"""Tolerance of logits, as in test_parity.py; relative for logits larger than 1."""
SECONDS = 10
_LAYER_TYPES = (
    ["full_attention"] * 3,
    ["sliding_attention"] * 3,
    ["sliding_attention", "full_attention", "full_attention"],
)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES = (
    None, {}, {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 1}, {"rope_type": "linear", "factor": 0.5},
    {"rope_type": "linear", "factor": -2.0}, {"rope_type": "linear", "factor": float("nan")}, {"rope_type": ["linear"]},
    {"rope_type": "default"}, {"rope_type": "default", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.0}, _LLAMA3, _YARN,
    {**_LLAMA3, "rope_theta": 5e5}, {**_LLAMA3, "low_freq_factor": 4.0}, {**_LLAMA3, "high_freq_factor": 8},
    {**_YARN, "beta_fast": 16, "beta_slow": 2}, {**_YARN, "beta_fast": 0}, {**_YARN, "attention_factor": 1.3},
    {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, {**_YARN, "truncate": False}, {**_YARN, "truncate": None},
    {"rope_type": "default", "rope_theta": 3e4}, {"rope_theta": 3e4}, {"rope_theta": 0}, {"partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e5}}, {"sliding_attention": None}, {"full_attention": 3},
    {"type": "linear", "rope_type": "default", "factor": 2.0}, [], "linear", 3, True,
)  # fmt: skip
CHANGES: dict[str, tuple[Any, ...]] = {
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "rope_theta": (0, -1.0, 1, float("nan"), float("inf"), 2e4, 10**30, "10000", None, True, 1.5),
    "rope_local_base_freq": (0, 1e5, None, float("nan"), "1"),
    "rms_norm_eps": (0, 1e-3, 1e-12, 0.5, 2.0, float("nan"), "1e-6", None, True, 1),
    "head_dim": (None, 8, 12, 20, 5, 0, 12.0, 10**30, "12", True),
    "num_key_value_heads": (None, 1, 2, 3, 4, 8, 0, 2.0),
    "num_attention_heads": (1, 2, 3, 6, 8, 48, 96, 0, 4.0, True),
    "num_hidden_layers": (1, 2, 4, 0, 3.0, 10**9, "3", True),
    "hidden_size": (24, 96, 50, 1, 3.0, 10**30, None, False),
    "intermediate_size": (1, 128, 0, 64.0, 2**40),
    "vocab_size": (97, 200, 96.0, 0, 2**31),
    "layer_types": (*_LAYER_TYPES, None, [], ["full_attention"], "full_attention", [3, 3, 3], [["full_attention"]] * 3),
    "sliding_window": (None, 3, 1, 64, 0, -1, 5.0, "5", False, True),
    "sliding_window_pattern": (1, 2, 3, 0, None, "2", 2.0),
    "use_sliding_window": (True, False, None, "false", 1, 0),
    "max_window_layers": (0, 1, 2, 28, -1, None, 1.0),
    "attn_logit_softcapping": (None, 5.0, 50, 0, "50", float("inf"), False),
    "final_logit_softcapping": (None, 2.0, 30, 0, "30", float("nan"), False),
    "query_pre_attn_scalar": (16, 256, 24.5, 0, None, "24"),
    "hidden_act": ("silu", "gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "swish", None, ["silu"], 3),
    "hidden_activation": ("silu", "gelu", "gelu_pytorch_tanh", None, ["silu"]),
    "tie_word_embeddings": (True, False, None, "false", 0, 1),
    "attention_bias": (True, False, None, "false", 1, 0),
    "mlp_bias": (True, False, None, "true", 0),
    "pad_token_id": (None, 0, -1, 95, 96, -97, 2.0, True, "0"),
    "max_position_embeddings": (32, 1, 0, 64.0, 131072, 10**30),
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3n_text", "llama4_text", None, 3, []),
    "is_causal": (True, False, None),
    "use_bidirectional_attention": (True, False, None),
    "partial_rotary_factor": (1.0, 1, 0.5, 0, None),
    "attention_dropout": (0, 0.1, None, "0", float("nan")),
    "pruned_heads": ({}, {"0": [1]}, None),
    "num_experts": (0, 8, None),
    "quantization_config": (None, {}, {"quant_method": "gptq", "bits": 4}),
    "temperature": (0.6,), "top_k": (50,), "max_length": (4096,), "do_sample": (True,), "num_beams": (4,), "num_labels": (3,),
    "unsloth_fixed": (True,), "neftune_noise_alpha": (5.0,), "repetition_penalty": (1.1,), "is_decoder": (True,),
    "unknown_key": (None, False, 0, 0.0, "", [], {}, 1, True, 1.0, "x"),
    "unknown_factor": (1, 1.0, 2.0, True),
}  # fmt: skip
"""Values that a file may have, by key: good ones, and slips."""


def changed(name: str, seed: int) -> dict[str, Any]:
    """Return a published config with one or a few changes."""
    rng = random.Random(f"{name} {seed}")
    if rng.random() < 0.4:
        return mutated(json.dumps(CONFIGS[name]), rng.randrange(2**32))
    config = json.loads(json.dumps(CONFIGS[name]))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        key = rng.choice(list(CHANGES))
        if key in config and rng.random() < 0.2:
            del config[key]
        else:
            config[key] = rng.choice(CHANGES[key])
    return config


def names_of_changes(before: Any, after: Any) -> set[str]:
    """Return the keys whose values differ, including objects with a differing entry.

    1, 1.0 and true differ.
    """
    if not isinstance(before, dict) or not isinstance(after, dict):
        return set()
    differ = {
        key
        for key in before.keys() | after.keys()
        if repr(before.get(key, ...)) != repr(after.get(key, ...))
    }
    inner = (names_of_changes(before.get(key), after.get(key)) for key in differ)
    return differ.union(*inner)


class Trial:
    """Run mutations, and count how they end."""

    def __init__(self, folder: Any, *, computes: bool = True) -> None:
        self.folder, self.computes = folder, computes
        self.counts: Counter[str] = Counter()
        self._models: set[DecoderConfig] = set()
        self._ours: dict[DecoderConfig, np.ndarray] = {}

    def run(self, name: str, seed: int) -> None:
        config = changed(name, seed)
        try:
            outcome = self.outcome(CONFIGS[name], config)
        except Exception as error:
            differ = sorted(names_of_changes(CONFIGS[name], config), key=repr)
            shown = {
                key: config.get(key, "deleted")
                for key in differ
                if key in config or key in CONFIGS[name]
            }
            raise AssertionError(
                f"{name} {seed}: {shown}: {type(error).__name__}: {error}"
            ) from error
        self.counts[outcome] += 1

    def outcome(self, before: dict[str, Any], config: dict[str, Any]) -> str:
        (self.folder / "config.json").write_text(json.dumps(config))
        start = time.process_time()  # other work may run at the same time
        try:
            ours = config_of(self.folder)
            model = model_of(self.folder) if self.computes and ours not in self._models else None
        except ValueError as error:
            told = str(error)
            assert any(key in told for key in names_of_changes(before, config)), (
                f"the error names none of the changed keys: {told}"
            )
            return "refused"
        finally:
            assert time.process_time() - start < SECONDS
        self._models.add(ours)
        if not self.computes:
            return "accepted"
        is_large = ours.layers > 64 or ours.num_params > 10**7
        theirs = transformers_model(self.folder, is_large)
        if theirs is None:
            return "theirs"
        if is_large:
            check_sizes(theirs, ours)
            return "of the same sizes"
        batch = batch_of(vocab=min(96, ours.vocab))
        logits = logits_of(theirs, batch)
        if logits is None:
            return "theirs"
        if ours not in self._ours:
            table = FAMILIES[config["model_type"]].table(ours)
            self._ours[ours] = our_logits(model or model_of(self.folder), table, theirs, batch)
        bound = TOLERANCE * max(1.0, float(np.abs(logits).max()))
        np.testing.assert_allclose(self._ours[ours], logits, rtol=0, atol=bound)
        return "equal"


def transformers_model(folder: Any, is_large: bool) -> Any:
    """Return transformers' model of a folder, with weights by name.

    Returns a config if the model is large, and None if transformers refuses it.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if is_large:
            return config
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
        ).eval()
    except Exception:
        return None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = np.random.default_rng(zlib.crc32(name.encode())).normal(
                0, 0.1, tuple(parameter.shape)
            )
            is_gain = name.endswith("norm.weight") and "gemma" not in config.model_type
            parameter.copy_(torch.tensor(values + is_gain))
    return model


def check_sizes(theirs: Any, ours: DecoderConfig) -> None:
    """Compare the sizes with those of a transformers config."""
    names = {
        "layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size", "vocab": "vocab_size",
        "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    }  # fmt: skip
    assert {here: getattr(theirs, there) for here, there in names.items()} == {
        here: getattr(ours, here) for here in names
    }


def logits_of(theirs: Any, batch: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return transformers' logits, or None if it only now refuses the config."""
    import torch

    tokens = torch.tensor(batch["tokens"], dtype=torch.long)
    try:
        with torch.no_grad():
            return theirs(tokens, use_cache=False, return_dict=True).logits.numpy()
    except Exception:
        return None


def our_logits(model: Any, table: Any, theirs: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Return a model's logits with the weights of a transformers model."""
    key = jax.random.key(0)
    shapes = {
        part: jax.eval_shape(getattr(model, f"init_{part}"), key)
        for part in ("embed", "block", "head")
    }
    found: dict[tuple[str, int | None], np.ndarray] = {}
    arrays = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}
    divided = DividedFile(ArrayTree(arrays), table)
    for name, at in divided.places.items():
        array = divided.read(name, tuple((0, n) for n in divided.tensors[name].shape))
        found[at.name, at.layer] = array if at.axes is None else array.transpose(at.axes)
    used = set()

    def params(part: str, layer: int | None) -> Any:
        def value(path: Any, leaf: Any) -> np.ndarray:
            stem = "blocks" if part == "block" else part
            at = f"{stem}.{jax.tree_util.keystr(path, simple=True, separator='.')}", layer
            assert found[at].shape == leaf.shape, at
            used.add(at)
            return found[at]

        return jax.tree_util.tree_map_with_path(value, shapes[part])

    embed, head = params("embed", None), params("head", None)
    context = model.context(batch)
    x = model.embed(embed, batch, None)
    for layer in range(model.num_layers):
        x = model.block(
            params("block", layer),
            x,
            None,
            context,
            jax.tree.map(lambda a, n=layer: a[n], model.per_layer),
        )
    assert used == set(found)
    return np.asarray(model.predict(head, embed, x, batch))


def test_published_configs_are_taken_without_a_word(tmp_path, caplog):
    trial = Trial(tmp_path, computes=False)
    assert {name: trial.outcome({}, config) for name, config in CONFIGS.items()} == dict.fromkeys(
        CONFIGS, "accepted"
    )
    assert not caplog.records


def test_some_changed_configs_are_refused_by_key_or_compute_the_same(tmp_path):
    """By default, most configs are only read."""
    trial = Trial(tmp_path, computes=False)
    for seed in range(12):
        for name in CONFIGS:
            trial.run(name, seed)
    assert trial.counts["refused"] > 40
    assert trial.counts["accepted"] > 40
    computed = Trial(tmp_path)
    for seed in range(6):
        computed.run("smollm2", seed)
    assert computed.counts["equal"] > 2


@pytest.mark.exhaustive  # by default some of them
@pytest.mark.parametrize("name", list(CONFIGS))
def test_changed_configs_are_refused_by_key_or_compute_the_same(tmp_path, name):
    trial = Trial(tmp_path)
    assert trial.outcome({}, CONFIGS[name]) == "equal"
    for seed in range(225):
        trial.run(name, seed)
    print(name, dict(trial.counts))
