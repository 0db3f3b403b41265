"""Read a decoder's sizes and options from a Hugging Face `config.json`, without transformers.

    zerojax.hf.schema    allowed values of the keys that are read
    zerojax.hf.keys      treatment of all other keys, and families that are refused

Every error names the file and the key.
"""

import dataclasses
import os
import reprlib
import stat
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from host_offload.fields import Field, parse_json
from zerojax.hf.keys import EXPERTS, NOT_BUILT, check_keys
from zerojax.hf.rope import Rope, parse_rope
from zerojax.hf.schema import ACTIVATIONS, FULL, SLIDING, read_kinds, values

CONFIG = "config.json"
_MOST_BYTES = 64 * 2**20
"""Maximum size of `config.json` in bytes."""
SAME_ACTIVATIONS: Mapping[str, str] = MappingProxyType({"gelu_new": "gelu_pytorch_tanh"})
"""Aliases of activations."""
_READ = frozenset(
    {
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    }
)
"""Keys that every family reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    Attributes:
      vocab, hidden, intermediate, layers: V, H, width of the MLP, and L.
      heads, kv_heads, head_dim: number of query heads, number of key and value heads that the query
        heads share, and D, the width of each head.
      norm_eps: epsilon of root mean square norms.
      activation: activation of the MLP's gate.
      tied: whether the head shares the embedding's matrix.
      windows: number of tokens that each layer attends to, 0 for all.
      ropes: rotary embedding of each layer.
      attention_scale: factor of attention scores.
      attention_cap, logits_cap: soft cap of scores and of logits, or None.
      qkv_bias, output_bias, mlp_bias: whether these projections have a bias.
      qk_norm: whether queries and keys are normalized per head.
      unit_norm: whether norms multiply by 1 + weight in float32 (Gemma) instead of by the weight.
      post_norms: whether the outputs of attention and MLP are normalized too (Gemma 2 and 3).
      scales_embedding: whether embeddings are multiplied by the square root of H.
      pad_token: token whose embedding is used but not trained, as torch's `padding_idx`; or None.
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
        """Number of parameters, without adapters."""
        h = self.hidden
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        f = self.intermediate
        block = h * (2 * q + 2 * kv + 3 * f)
        block += h * (4 if self.post_norms else 2)
        if self.qk_norm:
            block += 2 * self.head_dim
        if self.qkv_bias:
            block += q + 2 * kv
        if self.output_bias:
            block += h
        if self.mlp_bias:
            block += 2 * f + h
        return self.layers * block + self.vocab * h * (1 if self.tied else 2) + h

    def computes(self) -> dict[str, Any]:
        """Return the options that affect the computation but not the weights' shapes, for JSON.

        `pad_token` is not included, because it only affects training. Derived numbers are rounded
        to 6 digits, so that another version of numpy does not make them differ. Layers with the
        same rotations share one entry: [layers, factor, frequencies].
        """
        alike: dict[Rope, list[int]] = {}
        for layer, rope in enumerate(self.ropes):
            alike.setdefault(rope, []).append(layer)
        names = (
            "heads",
            "kv_heads",
            "head_dim",
            "norm_eps",
            "tied",
            "attention_cap",
            "logits_cap",
            "unit_norm",
            "scales_embedding",
        )
        ropes = []
        for rope, layers in alike.items():
            frequencies = [_rounded(frequency) for frequency in rope.frequencies]
            ropes.append([layers, _rounded(rope.factor), frequencies])
        return {name: getattr(self, name) for name in names} | {
            "activation": SAME_ACTIVATIONS.get(self.activation, self.activation),
            "attention_scale": _rounded(self.attention_scale),
            "windows": list(self.windows),
            "ropes": ropes,
        }


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model: everything that `config.json` does not say, and the names of its tensors.

    Attributes:
      names: parameter for each tensor name in the file, in which `{layer}` and `{expert}` stand for
        numbers, as `zerojax.import_params(rename=)` takes it. The value is the parameter's name, or
        a pair of it and the order of its dims in the file, as `numpy.transpose` takes it; or a list
        of `zerojax.weights.Place` for a tensor that holds several parameters. None: the tensor is
        not read. If the names or the parts depend on sizes, a function of the `DecoderConfig` that
        returns such a table.
      defaults: values of keys that `config.json` leaves out.
      reads: keys that this family reads in addition to the common ones, out of "attention_bias",
        "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation", "layer_types",
        "max_window_layers", "mlp_bias", "query_pre_attn_scalar", "rope_local_base_freq",
        "sliding_window", "sliding_window_pattern" and "use_sliding_window".
      qkv_bias, output_bias: whether these projections have a bias; None: as `attention_bias` of
        `config.json` says.
      qk_norm, unit_norm, post_norms, scales_embedding: options of the same names in a
        `DecoderConfig`.
      windows: layers with a window: "none"; "all"; "pattern", all but every n-th (Gemma); or
        "last", the layers from `max_window_layers` on if `use_sliding_window` is true (Qwen).
    """

    names: Mapping[str, Any] | Callable[[DecoderConfig], Mapping[str, Any]]
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
    """Return the JSON object in a folder's `config.json`.

    Args:
      folder: path of a folder that holds `config.json`.

    Raises:
      ValueError: the file does not exist, or is not a JSON object.
    """
    path = os.path.join(os.fspath(folder), CONFIG)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise ValueError(
                f"{path} cannot be read: it is not a file of at most {_MOST_BYTES // 2**20} MiB"
            )
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): a folder in the format of save_pretrained "
            "is needed"
        ) from error
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, but a JSON object is needed")
    return raw


def find_family(raw: Mapping[str, Any], families: Mapping[str, Family], where: str) -> Family:
    """Return the family of a config by its `model_type`.

    Args:
      raw: object in `config.json`.
      families: supported families by `model_type`.
      where: path of the file, for errors.

    Raises:
      ValueError: the model is not supported; the error names the unsupported feature.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(
            f"{where}: model_type={reprlib.repr(kind)}: the name of a family is needed, such as "
            "'llama'"
        )
    modalities = [key for key in ("vision_config", "audio_config", "text_config") if raw.get(key)]
    if modalities:
        raise ValueError(
            f"{where}: {_about_others(kind, modalities, raw.get('text_config'), families)}"
        )
    experts = [key for key in EXPERTS if raw.get(key)]
    if experts:
        value = reprlib.repr(raw[experts[0]])
        raise ValueError(
            f"{where}: model_type {kind!r} has {experts[0]}={value}: mixtures of experts are not "
            "supported"
        )
    for key in ("quantization_config", "quantization"):
        quantization = raw.get(key)
        if quantization:
            method = quantization
            if isinstance(quantization, Mapping):
                method = quantization.get("quant_method", "unknown")
            raise ValueError(
                f"{where}: its weights are quantized ({reprlib.repr(method)} in {key}): use the "
                "original checkpoint in 16 or 32 bits, and ZeroConfig(frozen_dtype='nf4' or "
                "'int8') for a small frozen base"
            )
    if kind in families:
        return families[kind]
    if kind in NOT_BUILT:
        raise ValueError(f"{where}: model_type {kind!r} is not supported: it has {NOT_BUILT[kind]}")
    raise ValueError(
        f"{where}: model_type {kind[:80]!r} is not supported, only {', '.join(sorted(families))}: "
        "add it to `families`"
    )


def _about_others(
    kind: str, modalities: list[str], text: object, families: Mapping[str, Family]
) -> str:
    """Return why a model of images or sound is refused.

    If its language model is supported, the text says how to use that.
    """
    has = (
        f"model_type {kind!r} has {', '.join(modalities)}: models of images or sound are not "
        "supported"
    )
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    if isinstance(inner, str) and inner in families:
        return (
            f"{has}. Its language model belongs to a supported family, {inner!r}: "
            "docs/fine_tuning.md shows how to save it alone, as a separate folder"
        )
    if isinstance(inner, str) and inner in NOT_BUILT:
        return f"{has}, and neither is its language model, {inner!r}, which has {NOT_BUILT[inner]}"
    if kind in NOT_BUILT:
        return f"{has}, and neither is its language model, which has {NOT_BUILT[kind]}"
    return (
        f"{has}, and neither is its language model, {reprlib.repr(inner)}, only "
        f"{', '.join(sorted(families))}"
    )


def decoder_config(raw: Mapping[str, Any], family: Family, where: str) -> DecoderConfig:
    """Return the decoder that a `config.json` describes.

    Args:
      raw: object in the file.
      family: family of the model.
      where: path of the file, for errors.

    Raises:
      ValueError: a key is missing or unknown, or its value is unsupported or invalid; the error
        names the key.
    """
    try:
        return _decoder_config(raw, family, where)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _decoder_config(raw: Mapping[str, Any], family: Family, where: str) -> DecoderConfig:
    reads = _READ | set(family.reads)
    compared = {"layer_types"} | (_UNUSED_WINDOW if _has_no_window(raw, family) else set())
    check_keys(raw, reads | compared, family.defaults, where)
    value = values(raw, family.defaults, reads)
    hidden = value["hidden_size"]
    heads = value["num_attention_heads"]
    layers = value["num_hidden_layers"]
    kv_heads = value["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads}"
        )
    head_dim = value["head_dim"] or hidden // heads
    if head_dim % 2 or not head_dim:
        raise ValueError(
            f"head_dim={head_dim} (by default hidden_size={hidden} // "
            f"num_attention_heads={heads}): an even width is needed, because rotations act on pairs"
        )
    activation = value["hidden_activation"] or value["hidden_act"]
    if activation is None:
        # A family that reads `hidden_activation` ignores this key.
        state = "null" if "hidden_act" in raw else "missing"
        raise ValueError(f"hidden_act is {state}, but one of {', '.join(ACTIVATIONS)} is needed")
    kinds, window = _layer_kinds(value, family, layers)
    if "layer_types" not in reads and raw.get("layer_types") is not None:
        _check_kinds(raw["layer_types"], kinds)
    has_bias = value["attention_bias"]
    return DecoderConfig(
        vocab=value["vocab_size"],
        hidden=hidden,
        intermediate=value["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=value["rms_norm_eps"],
        activation=activation,
        tied=value["tie_word_embeddings"],
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        ropes=_ropes(value, kinds, head_dim, has_kinds="rope_local_base_freq" in reads),
        attention_scale=(value["query_pre_attn_scalar"] or head_dim) ** -0.5,
        attention_cap=value["attn_logit_softcapping"],
        logits_cap=value["final_logit_softcapping"],
        qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=has_bias if family.output_bias is None else family.output_bias,
        mlp_bias=value["mlp_bias"],
        qk_norm=family.qk_norm,
        unit_norm=family.unit_norm,
        post_norms=family.post_norms,
        scales_embedding=family.scales_embedding,
        pad_token=_pad_token(value["pad_token_id"], value["vocab_size"]),
    )


_UNUSED_WINDOW = {"sliding_window", "max_window_layers", "use_sliding_window"}


def _has_no_window(raw: Mapping[str, Any], family: Family) -> bool:
    """Return whether the file, of a family without windows, says that its window is unused."""
    return family.windows == "none" and raw.get("use_sliding_window") is False


def _pad_token(pad: int | None, vocab: int) -> int | None:
    """Return the padding token; a negative number counts from the end, as in torch."""
    if pad is None:
        return None
    if not -vocab <= pad < vocab:
        raise ValueError(f"pad_token_id={pad}: null is needed, or a token below vocab_size={vocab}")
    return pad % vocab


def _layer_kinds(value: Mapping[str, Any], family: Family, layers: int) -> tuple[list[str], int]:
    """Return the kind of each layer, FULL or SLIDING, and the window's size in tokens."""
    window = value["sliding_window"]
    is_unused = family.windows == "last" and not value["use_sliding_window"]
    if is_unused:
        window = None
    kinds = value["layer_types"]
    if kinds is None:
        pattern = value["sliding_window_pattern"] or 1
        first = value["max_window_layers"] or 0
        of = {
            "none": lambda i: False,
            "all": lambda i: window is not None,
            "pattern": lambda i: bool((i + 1) % pattern),
            "last": lambda i: window is not None and i >= first,
        }[family.windows]
        kinds = [SLIDING if of(i) else FULL for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(
            f"layer_types has {len(kinds)} kinds, but num_hidden_layers={layers}: one kind per "
            "layer is needed"
        )
    if SLIDING in kinds and window is None:
        why = "use_sliding_window is not true" if is_unused else "sliding_window is null"
        raise ValueError(
            f"{why}, but layer_types has {SLIDING!r}, which needs sliding_window, a positive "
            "integer"
        )
    return kinds, window or 0


def _check_kinds(value: object, kinds: list[str]) -> None:
    """Raise ValueError if `layer_types` contradicts a family that does not read the key."""
    file_kinds = read_kinds(Field(value, "layer_types"))
    if file_kinds == kinds:
        return
    expected = reprlib.repr(kinds)
    if len(set(kinds)) == 1:
        expected = f"{kinds[0]!r} in each of {len(kinds)} layers"
    raise ValueError(
        f"layer_types={reprlib.repr(file_kinds)}: this model_type has {expected}: write that, or "
        "remove the key"
    )


def _ropes(
    value: Mapping[str, Any], kinds: list[str], head_dim: int, *, has_kinds: bool
) -> tuple[Rope, ...]:
    """Return the rotary embedding of each layer.

    Newer files have `rope_parameters`; older files have `rope_scaling` and `rope_theta`.

    Args:
      value: checked values by key.
      kinds: kind of each layer.
      head_dim: D, the width of a head.
      has_kinds: whether the family may rotate sliding layers differently (Gemma 3). In this case
        `rope_parameters` holds an object for each kind, and the flat `rope_scaling` applies only to
        full layers.
    """
    fields = [
        Field(value[name], name) for name in ("rope_parameters", "rope_scaling") if value[name]
    ]
    if len(fields) == 2 and fields[0].value != fields[1].value:
        raise ValueError("rope_parameters and rope_scaling differ: remove one of them")
    field = fields[0] if fields else Field({}, "rope_parameters")
    kinds_of_layers: tuple[str, ...] = (SLIDING, FULL)
    by_kind: dict[str, Field] = dict.fromkeys(kinds_of_layers, field)
    nested = sorted({SLIDING, FULL} & set(field.value))
    if not has_kinds and nested:
        raise ValueError(
            f"{field.name} has {', '.join(nested)}, but this model_type rotates all layers in the "
            "same way"
        )
    if has_kinds:
        by_kind = _ropes_by_kind(field)
    thetas = {
        FULL: value["rope_theta"],
        SLIDING: value["rope_local_base_freq"] or value["rope_theta"],
    }
    common = {"head_dim": head_dim, "max_positions": value["max_position_embeddings"]}
    ropes = {kind: parse_rope(by_kind[kind], theta=thetas[kind], **common) for kind in by_kind}
    return tuple(ropes[kind] for kind in kinds)


def _ropes_by_kind(field: Field) -> dict[str, Field]:
    """Return the rope object for each kind of layer, for a family in which they differ."""
    nothing = {kind: Field({}, field.name) for kind in (SLIDING, FULL)}
    if not field.value:
        return nothing
    if field.name == "rope_parameters":
        unknown = sorted(set(field.value) - {SLIDING, FULL})
        if unknown:
            raise ValueError(
                f"rope_parameters has {unknown}: this model_type takes one object for {FULL!r} and "
                f"one for {SLIDING!r}"
            )
        ropes = dict(nothing)
        for kind, rope in field.value.items():
            if rope is not None:
                ropes[kind] = Field(rope, f"rope_parameters.{kind}")
        return ropes
    if "type" in field.value and "rope_type" not in field.value:
        raise ValueError(
            "rope_scaling.type: versions of transformers disagree on its meaning here; use "
            "rope_type instead"
        )
    return nothing | {FULL: field}
