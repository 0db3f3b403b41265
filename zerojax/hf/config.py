"""What a decoder is, read from the `config.json` of a Hugging Face folder, without transformers.

A key of the file is read, known to change nothing here, or refused by name: a model whose mathematics is not built must not
train as if it were. What is null or false is taken for a feature that is off.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from zerojax.hf.rope import Rope, rope_of

CONFIG = "config.json"
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Of MLPs."""
SAME_ACTIVATIONS: Mapping[str, str] = MappingProxyType({"gelu_new": "gelu_pytorch_tanh"})
"""Other names of the same ones."""
SLIDING, FULL = "sliding_attention", "full_attention"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")
_NO_CHANGE = frozenset({
    # of files, tokens and generation
    "architectures", "auto_map", "bos_token_id", "decoder_start_token_id", "dtype", "eos_token_id", "finetuning_task",
    "id2label", "label2id", "model_type", "prefix", "problem_type", "sep_token_id", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unsloth_version", "_name_or_path",
    # which transformers writes beside layer_types, and does not read
    "_sliding_window_pattern",
    # of how transformers runs a model
    "_attn_implementation", "attn_implementation", "_experts_implementation", "cache_implementation",
    "chunk_size_feed_forward", "gradient_checkpointing", "output_attentions", "output_hidden_states", "return_dict",
    "torchscript", "use_bfloat16", "use_cache",
    # of how it was initialised; "pretraining_tp" cuts products into parts whose sum is the same
    "initializer_range", "pretraining_tp",
})  # fmt: skip
_READ = frozenset({
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "vocab_size",
})  # fmt: skip
"""Of every family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    Attributes:
      vocab, hidden, intermediate, layers: V, H, the width of the MLP, and L.
      heads, kv_heads, head_dim: query heads, the heads of keys and values that they share, and the width of each.
      norm_eps: of root mean square norms.
      activation: of the gate of the MLP.
      tied: the head is the embedding.
      windows: by layer, how many tokens are seen, or 0 for all.
      ropes: by layer.
      attention_scale: of scores.
      attention_cap, logits_cap: of scores and logits, or None.
      qkv_bias, output_bias, mlp_bias: which products have one.
      qk_norm: queries and keys have norms, over each head.
      unit_norm: norms multiply by 1 + weight, in float32 (Gemma), and not by the weight.
      post_norms: what attention and MLP add to the stream has norms, too (Gemma 2 and 3).
      scales_embedding: embeddings are multiplied by the square root of H.
      pad_token: of which an embedding is looked up and not trained, as torch's `padding_idx`; or None.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tied: bool
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    attention_cap: float | None
    logits_cap: float | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    unit_norm: bool
    post_norms: bool
    scales_embedding: bool
    pad_token: int | None

    @property
    def num_params(self) -> int:
        """Parameters, adapters not counted."""
        h, q, kv, f = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        block = h * (2 * q + 2 * kv + 3 * f) + h * (4 if self.post_norms else 2) + (2 * self.head_dim if self.qk_norm else 0)
        block += (q + 2 * kv if self.qkv_bias else 0) + (h if self.output_bias else 0) + (2 * f + h if self.mlp_bias else 0)
        return self.layers * block + self.vocab * h * (1 if self.tied else 2) + h

    def computes(self) -> dict[str, Any]:
        """Return, as JSON has it, what shapes of weights do not tell of what is computed of them.

        Not `pad_token`, which says what is trained. Numbers that are computed of others are rounded to 6 digits, lest another
        version of numpy make them another model. Of layers that rotate alike one is told: [layers, factor, frequencies].
        """
        alike: dict[Rope, list[int]] = {}
        for layer, rope in enumerate(self.ropes):
            alike.setdefault(rope, []).append(layer)
        told = (
            "heads", "kv_heads", "head_dim", "norm_eps", "tied", "attention_cap", "logits_cap", "unit_norm", "scales_embedding",
        )  # fmt: skip
        return {name: getattr(self, name) for name in told} | {
            "activation": SAME_ACTIVATIONS.get(self.activation, self.activation),
            "attention_scale": _rounded(self.attention_scale),
            "windows": list(self.windows),
            "ropes": [[layers, _rounded(r.factor), [_rounded(f) for f in r.frequencies]] for r, layers in alike.items()],
        }


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model: what its `config.json` does not say, and where its tensors belong.

    Attributes:
      names: by a tensor's name in the file, `{layer}` in the place of a number: the parameter's name here, or a pair of it and
        the order of its dims in the file, as `numpy.transpose` takes it. None: the tensor is not read.
      defaults: values of the keys that `config.json` leaves out.
      reads: keys that this family reads beside those that all do: of "attention_bias", "attn_logit_softcapping",
        "final_logit_softcapping", "hidden_activation", "layer_types", "max_window_layers", "mlp_bias", "query_pre_attn_scalar",
        "rope_local_base_freq", "sliding_window", "sliding_window_pattern" and "use_sliding_window".
      qkv_bias, output_bias: None: as `attention_bias` of `config.json` says.
      qk_norm, unit_norm, post_norms, scales_embedding: as of a `DecoderConfig`.
      windows: "none", "all" layers, "pattern": each but every n-th (Gemma), or "last": the layers from `max_window_layers` on,
        where `use_sliding_window` says so (Qwen).
    """

    names: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: tuple[str, ...] = ()
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    unit_norm: bool = False
    post_norms: bool = False
    scales_embedding: bool = False
    windows: str = "none"


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a folder's `config.json` holds.

    Raises:
      ValueError: there is none, or it is no JSON object.
    """
    path = os.path.join(os.fspath(folder), CONFIG)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): a folder as save_pretrained writes it is needed"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, and a JSON object is needed")
    return found


def family_of(raw: Mapping[str, Any], families: Mapping[str, Family], where: str) -> Family:
    """Return the family of a config by its `model_type`.

    Raises:
      ValueError: it is not built; what it has that is not built is named.
    """
    kind = str(raw.get("model_type"))
    if vision := sorted(key for key in raw if key in ("vision_config", "audio_config", "text_config")):
        raise ValueError(
            f"{where}: model_type {kind!r} has {', '.join(vision)}: models of images or sound are not built. Save the language "
            "model alone, as model.language_model.save_pretrained(folder) of transformers, whose config is of text"
        )
    if experts := [key for key in _EXPERTS if raw.get(key)]:
        raise ValueError(f"{where}: model_type {kind!r} has {experts[0]}={raw[experts[0]]}: mixtures of experts are not built")
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, Mapping) else quantized
        raise ValueError(
            f"{where}: its weights are quantised ({method}): give the checkpoint in 16 or 32 bits that it was made from, and "
            "ZeroConfig(frozen_dtype='nf4' or 'int8') for a small frozen base"
        )
    if kind not in families:
        raise ValueError(f"{where}: model_type {kind!r} is not built: {', '.join(sorted(families))} are; add it to `families`")
    return families[kind]


def decoder_config(raw: Mapping[str, Any], family: Family, where: str) -> DecoderConfig:
    """Return what a `config.json` describes.

    Args:
      raw: of the file.
      family: of its model.
      where: the file, for errors.

    Raises:
      ValueError: a key is missing or unknown, or has a value that is not built: it is named.
    """
    read = _READ | set(family.reads)
    _check_keys(raw, read, where)
    given = {**family.defaults, **{key: value for key, value in raw.items() if key in read or key == "model_type"}}

    def number(key: str, default: Any = None) -> Any:
        value = given.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{where}: {key}={value!r}: a positive number is needed")
        return value

    hidden, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads={heads} do not divide by num_key_value_heads={kv_heads}")
    head_dim = number("head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim={head_dim}: rotations take pairs, so an even width is needed")
    activation = given.get("hidden_activation") or given.get("hidden_act")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{where}: the activation {activation!r} is not built: {', '.join(ACTIVATIONS)} are")
    kinds, window = _layer_kinds(given, family, layers, where)
    has_bias = bool(given.get("attention_bias"))
    try:
        ropes = _ropes(given, kinds, head_dim)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return DecoderConfig(
        vocab=number("vocab_size"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=number("rms_norm_eps"),
        activation=activation,
        tied=bool(given.get("tie_word_embeddings")),
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        ropes=ropes,
        attention_scale=number("query_pre_attn_scalar", head_dim) ** -0.5,
        attention_cap=given.get("attn_logit_softcapping"),
        logits_cap=given.get("final_logit_softcapping"),
        qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=has_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(given.get("mlp_bias")),
        qk_norm=family.qk_norm,
        unit_norm=family.unit_norm,
        post_norms=family.post_norms,
        scales_embedding=family.scales_embedding,
        pad_token=_pad_token(given, number("vocab_size"), where),
    )


def _pad_token(given: Mapping[str, Any], vocab: int, where: str) -> int | None:
    """Return the token of padding; a negative one counts from the end, as torch has it."""
    pad = given.get("pad_token_id")
    if pad is None:
        return None
    if isinstance(pad, bool) or not isinstance(pad, int) or not -vocab <= pad < vocab:
        raise ValueError(f"{where}: pad_token_id={pad!r}: null, or a token of the {vocab} is needed")
    return pad % vocab


def _check_keys(given: Mapping[str, Any], read: Set[str], where: str) -> None:
    """Raise ValueError for keys that may change what is computed and are not read, and for dropout."""
    on = {key: value for key, value in given.items() if value not in (None, False)}
    if on.get("attention_dropout"):
        raise ValueError(f"{where}: attention_dropout={on['attention_dropout']}: dropout of scores is not built; set it to 0")
    on.pop("attention_dropout", None)
    if unknown := sorted(key for key in on if key not in read | _NO_CHANGE):
        told = ", ".join(f"{key}={on[key]!r}" for key in unknown)
        raise ValueError(f"{where}: {told}: unknown, and may change what the model computes; if it does not, take it out")


def _layer_kinds(given: Mapping[str, Any], family: Family, layers: int, where: str) -> tuple[list[str], int]:
    """Return whether each layer sees all tokens or a window, and how many a window has."""
    window = given.get("sliding_window")
    if family.windows == "last" and not given.get("use_sliding_window"):
        window = None
    kinds = given.get("layer_types")
    if kinds is None:
        pattern = given.get("sliding_window_pattern") or 1
        of = {
            "none": lambda i: False,
            "all": lambda i: window is not None,
            "pattern": lambda i: bool((i + 1) % pattern),
            "last": lambda i: window is not None and i >= given["max_window_layers"],
        }[family.windows]
        kinds = [SLIDING if of(i) else FULL for i in range(layers)]
    unknown = sorted(set(kinds) - {SLIDING, FULL})
    if len(kinds) != layers or unknown:
        named = f"{unknown} of them are not built" if unknown else f"there are {layers} layers"
        raise ValueError(f"{where}: layer_types={kinds}: {named}; each of {layers} is {SLIDING!r} or {FULL!r}")
    if SLIDING in kinds and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"{where}: sliding_window={window!r}: layers of {SLIDING!r} need a positive integer")
    return list(kinds), window or 0


def _ropes(given: Mapping[str, Any], kinds: list[str], head_dim: int) -> tuple[Rope, ...]:
    """Return the rotations of each layer.

    The newer `rope_parameters` goes before `rope_scaling`. Either may hold a dict for each kind of layer; where it does not,
    and there is a base of sliding layers (`rope_local_base_freq`, Gemma 3), scaling is that of full ones alone.
    """
    parameters = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    by_kind = {kind: dict(parameters.pop(kind) or {}) for kind in (SLIDING, FULL) if kind in parameters}
    if by_kind and parameters:
        raise ValueError(f"rope_parameters has keys {sorted(parameters)} beside those of kinds of layers")
    local = given.get("rope_local_base_freq")
    common = {"head_dim": head_dim, "max_positions": given.get("max_position_embeddings")}
    ropes = {}
    for kind in set(kinds):
        theta = given["rope_theta"] if local is None or kind == FULL else local
        of_kind = by_kind.get(kind, {}) if by_kind or (local is not None and kind == SLIDING) else parameters
        ropes[kind] = rope_of(of_kind, theta=theta, **common)
    return tuple(ropes[kind] for kind in kinds)
