"""Read a decoder's sizes and options from a Hugging Face `config.json`, without transformers.

    zerojax.hf.schema    allowed values of the keys that are read
    zerojax.hf.keys      treatment of all other keys, and families that are refused

Every error names the file and the key.
"""

import dataclasses
import os
import reprlib
import stat
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from host_offload.fields import Field, parse_json
from zerojax.hf.keys import EXPERTS, NOT_BUILT, NUMBERS_OF_EXPERTS, check_keys, is_same
from zerojax.hf.mixtures.chunked_config import READS as CHUNKED_READS
from zerojax.hf.mixtures.chunked_config import ChunkedConfig, parse_chunked
from zerojax.hf.mixtures.config import Mixture, MixtureConfig, parse_mixture
from zerojax.hf.mixtures.latent_config import IGNORED as IGNORED_WITH_LATENT
from zerojax.hf.mixtures.latent_config import READS as LATENT_READS
from zerojax.hf.mixtures.latent_config import LatentConfig, parse_latent, scale_scores
from zerojax.hf.mixtures.stacks import Run, list_runs, name_by_stack
from zerojax.hf.quantized.folder import QUANTIZATION, is_decoded, open_decoded, quant_method
from zerojax.hf.rope import Rope, no_rope, parse_rope
from zerojax.hf.schema import ACTIVATIONS, FULL, SLIDING, number, read_kinds, read_object, values
from zerojax.weights import LAYER, REST, WeightFile, read_places

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
      norm_eps: epsilon of norms.
      activation: activation of the MLP's gate, or of its only input projection.
      tied: whether the head shares the embedding's matrix.
      windows: number of tokens that each layer attends to, 0 for all.
      ropes: rotary embedding of each layer.
      attention_scale: factor of attention scores.
      attention_cap, logits_cap: soft cap of scores and of logits, or None.
      qkv_bias, output_bias, mlp_bias: whether these projections have a bias.
      qk_norm: whether queries and keys are normalized, per head unless `qk_norm_joint`.
      unit_norm: whether norms multiply by 1 + weight in float32 (Gemma) instead of by the weight.
      post_norms: whether the outputs of attention and MLP are normalized too (Gemma 2 and 3).
      scales_embedding: whether embeddings are multiplied by the square root of H.
      pad_token: token whose embedding is used but not trained, as torch's `padding_idx`; or None.
      qk_norm_joint: whether queries and keys are normalized over all heads together (OLMo 2).
      layer_norm: whether norms also subtract the mean.
      norm_bias: whether norms have a bias.
      pre_norms: whether the inputs of attention and MLP are normalized.
      parallel: whether attention and MLP have the same input, x[l+1] = x + attention(z) + mlp(z)
        with z = norm(x) (Cohere).
      gated: whether the MLP has a gate.
      adjacent_pairs: whether rotations act on dims 2 i and 2 i + 1 instead of on halves of a head.
      embedding_factor, residual_factor, logits_factor: factors of embeddings, of the outputs of
        attention and MLP, and of logits (Granite).
      query_growth: (beta, length) if queries are multiplied by 1 + beta log(1 + floor(p / length))
        at position p (Ministral 3); or None.
      extra_tokens: rows of the embedding after the vocabulary, which have no logits (mllama).
      skipped: numbers of the layers in the files that are not part of the decoder: the cross
        attention to images of mllama. `layers` counts the other ones.
      mixture: experts in place of the MLP, or None.
      latent: sizes of latent attention, or None. `head_dim` is then the width of queries and keys.
      chunked: options of attention in chunks (Llama 4), or None.
      sinks: whether the softmax of each head has one more score, whose value is 0 (gpt-oss).
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
    qk_norm_joint: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    pre_norms: bool = True
    parallel: bool = False
    gated: bool = True
    adjacent_pairs: bool = False
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logits_factor: float = 1.0
    query_growth: tuple[float, int] | None = None
    extra_tokens: int = 0
    skipped: tuple[int, ...] = ()
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    chunked: ChunkedConfig | None = None
    sinks: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of a block's norms over the hidden size.

        With four norms, `post_attention_layernorm` normalizes attention's output; with two before
        attention and MLP, the MLP's input.
        """
        if self.parallel:
            return ("input_layernorm",)
        before = ("input_layernorm",) if self.pre_norms else ()
        after = ("post_feedforward_layernorm",) if self.post_norms else ()
        inner = ("pre_feedforward_layernorm",) if self.pre_norms and self.post_norms else ()
        return (*before, "post_attention_layernorm", *inner, *after)

    @property
    def num_params(self) -> int:
        """Number of parameters, without adapters."""
        h = self.hidden
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        f = self.intermediate
        inputs = 2 if self.gated else 1
        norm = h * (2 if self.norm_bias else 1)
        block = h * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)
        if self.latent is not None:
            block = self.latent.count_params(h, self.heads, self.qkv_bias)
        block += norm * len(self.norms)
        if self.qk_norm:
            block += q + kv if self.qk_norm_joint else 2 * self.head_dim
        if self.sinks:
            block += self.heads
        if self.output_bias:
            block += h
        mlp = h * (inputs + 1) * f + (inputs * f + h if self.mlp_bias else 0)
        mlps = self.layers * mlp
        if self.mixture is not None:
            sparse = sum(self.mixture.sparse)
            mlps = (self.layers - sparse) * mlp + sparse * self.mixture.count_params(h)
        rows = self.vocab * (1 if self.tied else 2) + self.extra_tokens
        return self.layers * block + mlps + rows * h + norm

    @property
    def visited_width(self) -> float:
        """Width of the MLP, or of the experts that a token visits, on average over layers."""
        if self.mixture is None:
            return self.intermediate
        m = self.mixture
        sparse = sum(m.sparse) / self.layers
        visited = m.routing.top_k * m.intermediate + m.shared
        return sparse * visited + (1 - sparse) * self.intermediate

    @property
    def runs(self) -> tuple[Run, ...]:
        """Runs of layers with experts or without, each of which is a stack."""
        sparse = (False,) * self.layers if self.mixture is None else self.mixture.sparse
        return list_runs(sparse)

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
            "layer_norm",
            "adjacent_pairs",
            "parallel",
        )
        factors = ("embedding_factor", "residual_factor", "logits_factor")
        ropes = []
        for rope, layers in alike.items():
            entry: list[Any] = [layers, _rounded(rope.factor), _all_rounded(rope.frequencies)]
            if rope.length:
                entry += [_all_rounded(rope.long_frequencies), rope.length, rope.growth]
            ropes.append(entry)
        return {name: getattr(self, name) for name in names} | {
            "activation": SAME_ACTIVATIONS.get(self.activation, self.activation),
            "attention_scale": _rounded(self.attention_scale),
            "windows": list(self.windows),
            "ropes": ropes,
            **{name: _rounded(getattr(self, name)) for name in factors},
            "query_growth": self.query_growth,
            "chunked": None if self.chunked is None else dataclasses.asdict(self.chunked),
            "mixture": None if self.mixture is None else self.mixture.computes(),
        }


def _all_rounded(numbers: Sequence[float]) -> list[float]:
    return [_rounded(number) for number in numbers]


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
        not read, and an export copies it. If the names or the parts depend on sizes, a function of
        the `DecoderConfig` that returns such a table.
      defaults: values of keys that `config.json` leaves out.
      reads: keys that this family reads in addition to the common ones, out of
        `zerojax.hf.schema.KEYS`.
      qkv_bias, output_bias, mlp_bias: whether these projections have a bias; None: as
        `attention_bias`, `attention_out_bias`, `mlp_bias` or `use_bias` of `config.json` says.
      qk_norm, qk_norm_joint, unit_norm, pre_norms, post_norms, layer_norm, norm_bias, parallel,
        gated, adjacent_pairs, scales_embedding, sinks: options of the same names in a
        `DecoderConfig`; qk_norm is None if `use_qk_norm` of `config.json` says it.
      windows: layers with a window: "none"; "all"; "pattern", all but every n-th (Gemma); "last",
        the layers from `max_window_layers` on if `use_sliding_window` is true (Qwen); "switched",
        all layers if `use_sliding_window` is true (Qwen 3 with experts); or
        "unrotated", the layers without rotations if `use_sliding_window` is true (SmolLM3).
      rotates: layers with rotations: "all"; "listed", as `no_rope_layers` says (SmolLM3);
        "sliding", the layers with a window (Cohere 2); "hybrid", the same if there is a window,
        else all (EXAONE 4); or "typed", all if `position_embedding_type` is "rope", else none
        (Granite 4).
      ropes_by_kind: whether layers with a window may be rotated differently (Gemma 3, OLMo 3).
      rope_aliases: other names of types of rotations.
      rope: `rope_parameters` if the file has neither them nor `rope_scaling`.
      query_growth: whether queries grow with their position (Ministral 3).
      activations: activations that stand for other ones.
      eps: key of the norms' epsilon.
      width: key of the MLP's width.
      kinds: names in `layer_types` that stand for other ones.
      needs: values that keys must have, because another value, or none, means another model.
      ignores: beginnings of keys that change nothing in the layers that the family has.
      inside: if the language model is a part of a model of images, the beginnings of its tensors'
        names in such folders, each by its beginning in a folder of its own; one table per form of
        the folder. `config.json` then describes it in `text_config`, whose `model_type` names its
        family, with the `defaults` of this family in addition.
      others: beginnings of the names of further tensors that are not read.
      skips: key of the layers that are not part of the decoder, or None.
      extra_tokens: option of the same name in a `DecoderConfig`.
      block: class of the layers, a subclass of `zerojax.hf.Block`; None: that class.
      mixture: how `config.json` describes experts, for a family with experts in place of the MLP.
      latent: whether attention is latent, and the family is a mixture.
      chunked: whether attention is in chunks (Llama 4), and the family is a mixture.
    """

    names: Mapping[str, Any] | Callable[[DecoderConfig], Mapping[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: tuple[str, ...] = ()
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | None = False
    qk_norm_joint: bool = False
    unit_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    parallel: bool = False
    gated: bool = True
    adjacent_pairs: bool = False
    scales_embedding: bool = False
    windows: str = "none"
    rotates: str = "all"
    ropes_by_kind: bool = False
    rope_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    query_growth: bool = False
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    eps: str = "rms_norm_eps"
    width: str = "intermediate_size"
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignores: tuple[str, ...] = ()
    inside: tuple[Mapping[str, str], ...] = ()
    others: tuple[str, ...] = ()
    skips: str | None = None
    extra_tokens: int = 0
    block: Any = None
    mixture: Mixture | None = None
    latent: bool = False
    chunked: bool = False
    sinks: bool = False

    def table(self, config: DecoderConfig) -> Mapping[str, Any]:
        """Return the parameter for each tensor name.

        Args:
          config: decoder, on whose sizes the table may depend.
        """
        names = self.names(config) if callable(self.names) else self.names
        if config.skipped:
            names = _renumbered(names, config)
        names = name_by_stack(names, config.runs)
        return {**names, **{f"{prefix}{REST}": None for prefix in self.others}}


def _renumbered(names: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Return a table for files in which some of the layers are not part of the decoder."""
    num_layers = config.layers + len(config.skipped)
    kept = [i for i in range(num_layers) if i not in config.skipped]
    table: dict[str, Any] = {}
    for name, value in names.items():
        if LAYER not in name:
            table[name] = value
            continue
        places = read_places(value, name)
        for layer, i in enumerate(kept):
            table[name.replace(LAYER, str(i))] = [place._replace(layer=layer) for place in places]
    prefixes = {name.partition(LAYER)[0] for name in names if LAYER in name}
    for prefix in prefixes:
        table |= {f"{prefix}{i}.{REST}": None for i in config.skipped}
    return table


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


def open_folder(folder: str | os.PathLike[str]) -> WeightFile:
    """Open a folder's weights, decoded if they are quantized.

    Args:
      folder: path of a folder that holds `config.json`.

    Raises:
      ValueError: `config.json` cannot be read.
      CheckpointError: the folder holds no weights.
    """
    return open_decoded(folder, read_config(folder))


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
    outer = families.get(kind)
    if outer is not None and outer.inside:
        return _inner_family(raw, outer, families, where)
    modalities = [key for key in ("vision_config", "audio_config", "text_config") if raw.get(key)]
    if modalities:
        raise ValueError(
            f"{where}: {_about_others(kind, modalities, raw.get('text_config'), families)}"
        )
    is_mixture = kind in families and families[kind].mixture is not None
    _check_formats(raw, where, is_mixture=is_mixture)
    if kind in families:
        return families[kind]
    if kind in NOT_BUILT:
        raise ValueError(f"{where}: model_type {kind!r} is not supported: it has {NOT_BUILT[kind]}")
    raise ValueError(
        f"{where}: model_type {kind[:80]!r} is not supported, only {', '.join(sorted(families))}: "
        "add it to `families`"
    )


def _check_formats(raw: Mapping[str, Any], where: str, *, is_mixture: bool = False) -> None:
    """Raise ValueError for quantized weights, and for experts unless the family has them."""
    counts = [key for key in NUMBERS_OF_EXPERTS if key in raw]
    has_none = is_mixture or (bool(counts) and not any(raw[key] for key in counts))
    experts = [] if has_none else [key for key in EXPERTS if raw.get(key)]
    if experts:
        value = reprlib.repr(raw[experts[0]])
        raise ValueError(
            f"{where}: model_type {raw['model_type']!r} has {experts[0]}={value}: mixtures of "
            "experts of this model_type are not supported"
        )
    method = quant_method(raw)
    if method is not None and not is_decoded(raw):
        raise ValueError(
            f"{where}: its weights are quantized ({method!r} in {QUANTIZATION}): use the original "
            "checkpoint in 16 or 32 bits, and ZeroConfig(frozen_dtype='nf4' or 'int8') for a small "
            "frozen base. Only bitsandbytes, mxfp4 and fp8 are decoded"
        )


def _inner_family(
    raw: Mapping[str, Any], outer: Family, families: Mapping[str, Family], where: str
) -> Family:
    """Return the family of the language model in a model of images.

    Its tensors have the names that they have in the outer folder.
    """
    _check_formats(raw, where)
    inner = find_family(text_config(raw, outer), families, f"{where}, text_config")

    def names(config: DecoderConfig) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for prefixes in outer.inside:
            for name, entry in inner.table(config).items():
                start = next((start for start in prefixes if name.startswith(start)), None)
                if start is not None:
                    table[prefixes[start] + name.removeprefix(start)] = entry
        return table

    return dataclasses.replace(
        inner,
        names=names,
        defaults={**inner.defaults, **outer.defaults},
        inside=outer.inside,
        others=outer.others,
    )


def text_config(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the object that describes the decoder in a `config.json`.

    Args:
      raw: object in the file.
      family: family of the file's `model_type`.
    """
    if not family.inside:
        return dict(raw)
    text = read_object(Field(raw.get("text_config") or {}, "text_config"))
    # Models of images tie the head by the outer key.
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if raw.get(key) is not None}
    return {"model_type": family.defaults.get("model_type")} | text | tied


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
    repeated = IGNORED_WITH_LATENT if family.latent else ()
    raw = {
        key: value
        for key, value in text_config(raw, family).items()
        if key in family.needs or not (key.startswith(family.ignores) or key in repeated)
    }
    if is_decoded(raw):
        del raw[QUANTIZATION]
    for key, needed in family.needs.items():
        if not is_same(raw.get(key), needed):
            raise ValueError(
                f"{key}={reprlib.repr(raw.get(key))}: only {needed!r} is supported for this "
                "model_type"
            )
    # transformers writes 0 for a pattern without windows.
    if raw.get("sliding_window", 0) is None and is_same(raw.get("sliding_window_pattern"), 0):
        del raw["sliding_window_pattern"]
    if family.kinds and raw.get("layer_types") is None:
        raise ValueError("layer_types is missing: this model_type needs a kind for each layer")
    if family.kinds and isinstance(raw.get("layer_types"), list):
        raw["layer_types"] = [
            family.kinds.get(kind, kind) if isinstance(kind, str) else kind
            for kind in raw["layer_types"]
        ]
    sizes = {family.eps, family.width}
    reads = (_READ | set(family.reads) | sizes) - family.needs.keys()
    reads -= {"rms_norm_eps", "intermediate_size"} - sizes
    if family.mixture is not None:
        reads |= family.mixture.reads
    if family.latent:
        reads |= set(LATENT_READS)
    listed_kinds = raw.pop("layer_types", None) if family.chunked else None
    if family.chunked:
        reads |= set(CHUNKED_READS)
    compared = {"layer_types"} | (_UNUSED_WINDOW if _has_no_window(raw, family) else set())
    check_keys(raw, reads | compared | family.needs.keys(), family.defaults, where)
    value = values(raw, family.defaults, reads)
    for name in (family.eps, family.width):
        if value[name] is None:
            raise ValueError(f"{name} is missing")
    hidden = value["hidden_size"]
    heads = value["num_attention_heads"]
    skipped = _skipped_layers(value, family)
    layers = value["num_hidden_layers"] - len(skipped)
    kv_heads = value["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads}"
        )
    head_dim = value["head_dim"] or hidden // heads
    latent = parse_latent(value) if family.latent else None
    if latent is not None:
        head_dim = latent.rope_dim
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
    listed = _listed_rotations(value, family, layers)
    kinds, window = _layer_kinds(value, family, layers, listed)
    if "layer_types" not in reads and raw.get("layer_types") is not None:
        _check_kinds(raw["layer_types"], kinds)
    ropes, query_growth = _ropes(value, family, kinds, head_dim)
    is_rotated = _rotated_layers(value, family, kinds, window, listed)
    chunked = parse_chunked(value, listed_kinds, is_rotated) if family.chunked else None
    width = len(ropes[0].frequencies)
    qkv_bias, output_bias, mlp_bias = _biases(value, family)
    scale = value["attention_multiplier"] or (value["query_pre_attn_scalar"] or head_dim) ** -0.5
    if latent is not None:
        scale = scale_scores(latent, value)
    mixture = None
    if family.mixture is not None:
        mixture = parse_mixture(value, family.mixture, layers)
    return DecoderConfig(
        vocab=value["vocab_size"],
        hidden=hidden,
        intermediate=value[family.width],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim if latent is None else latent.key_dim,
        norm_eps=value[family.eps],
        activation=family.activations.get(activation, activation),
        tied=value["tie_word_embeddings"],
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        ropes=tuple(
            rope if rotated else no_rope(width)
            for rope, rotated in zip(ropes, is_rotated, strict=True)
        ),
        attention_scale=scale,
        attention_cap=value["attn_logit_softcapping"],
        logits_cap=value["final_logit_softcapping"],
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=value["use_qk_norm"] if family.qk_norm is None else family.qk_norm,
        qk_norm_joint=family.qk_norm_joint,
        unit_norm=family.unit_norm,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        layer_norm=family.layer_norm,
        norm_bias=family.norm_bias,
        parallel=family.parallel,
        gated=family.gated,
        adjacent_pairs=family.adjacent_pairs or value["rope_interleave"],
        scales_embedding=family.scales_embedding,
        embedding_factor=value["embedding_multiplier"] or 1.0,
        residual_factor=value["residual_multiplier"] or 1.0,
        logits_factor=(value["logit_scale"] or 1.0) / (value["logits_scaling"] or 1.0),
        query_growth=query_growth,
        extra_tokens=family.extra_tokens,
        skipped=skipped,
        pad_token=_pad_token(value["pad_token_id"], value["vocab_size"]),
        mixture=mixture,
        latent=latent,
        chunked=chunked,
        sinks=family.sinks,
    )


def _skipped_layers(value: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the numbers of the layers that are not part of the decoder."""
    if family.skips is None:
        return ()
    layers = value["num_hidden_layers"]
    skipped = tuple(sorted({i for i in value[family.skips] if i < layers}))
    if len(skipped) == layers:
        raise ValueError(f"{family.skips} lists all {layers} layers: none would be left")
    return skipped


def _biases(value: Mapping[str, Any], family: Family) -> tuple[bool, bool, bool]:
    """Return whether q, k and v, the output projection, and the MLP have biases."""
    shared = value["use_bias"]
    qkv = value["attention_bias"] or shared
    output = value["attention_out_bias"] if "attention_out_bias" in family.reads else qkv
    return (
        qkv if family.qkv_bias is None else family.qkv_bias,
        output if family.output_bias is None else family.output_bias,
        value["mlp_bias"] or shared if family.mlp_bias is None else family.mlp_bias,
    )


def _listed_rotations(value: Mapping[str, Any], family: Family, layers: int) -> list[bool]:
    """Return which layers `no_rope_layers` lists as rotated; all in families without the key."""
    if family.rotates != "listed":
        return [True] * layers
    listed = value["no_rope_layers"]
    if listed is None:
        interval = value["no_rope_layer_interval"] or 1
        return [bool((i + 1) % interval) for i in range(layers)]
    if len(listed) < layers:
        raise ValueError(
            f"no_rope_layers has {len(listed)} numbers, but num_hidden_layers={layers}: one number "
            "per layer is needed"
        )
    return listed[:layers]


def _rotated_layers(
    value: Mapping[str, Any], family: Family, kinds: list[str], window: int, listed: list[bool]
) -> list[bool]:
    """Return whether each layer is rotated."""
    if family.rotates == "sliding" or (family.rotates == "hybrid" and window):
        return [kind == SLIDING for kind in kinds]
    if family.rotates == "typed":
        return [value["position_embedding_type"] == "rope"] * len(kinds)
    return listed


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


def _layer_kinds(
    value: Mapping[str, Any], family: Family, layers: int, listed: list[bool]
) -> tuple[list[str], int]:
    """Return the kind of each layer, FULL or SLIDING, and the window's size in tokens.

    `listed` are the layers that `no_rope_layers` lists as rotated.
    """
    window = value["sliding_window"]
    is_unused = (
        family.windows in ("last", "unrotated", "switched") and not value["use_sliding_window"]
    )
    if is_unused:
        window = None
    kinds = value["layer_types"]
    pattern = value["sliding_window_pattern"]
    if kinds is None:
        if family.windows == "pattern" and pattern is None and window is not None:
            raise ValueError(
                "sliding_window_pattern is null: a number of layers is needed, or layer_types"
            )
        pattern = pattern or 1
        first = value["max_window_layers"] or 0
        of = {
            "none": lambda i: False,
            "all": lambda i: window is not None,
            "switched": lambda i: window is not None,
            "pattern": lambda i: (
                bool((i + 1) % pattern) and (window is not None or family.rotates != "hybrid")
            ),
            "unrotated": lambda i: window is not None and not listed[i],
            "last": lambda i: window is not None and i >= first,
        }[family.windows]
        kinds = [SLIDING if of(i) else FULL for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(_about_length(kinds, layers))
    if SLIDING in kinds and window is None:
        why = "use_sliding_window is not true" if is_unused else "sliding_window is null"
        raise ValueError(
            f"{why}, but layer_types has {SLIDING!r}, for which this model_type needs "
            "sliding_window, a positive integer"
        )
    return kinds, window or 0


def _about_length(kinds: Sequence[str], layers: int) -> str:
    return (
        f"layer_types has {len(kinds)} kinds, but num_hidden_layers={layers}: one kind per layer "
        "is needed"
    )


def _check_kinds(value: object, kinds: list[str]) -> None:
    """Raise ValueError if `layer_types` contradicts a family that does not read the key."""
    file_kinds = read_kinds(Field(value, "layer_types"))
    if file_kinds == kinds:
        return
    if len(file_kinds) != len(kinds):
        raise ValueError(_about_length(file_kinds, len(kinds)))
    expected = reprlib.repr(kinds)
    if len(set(kinds)) == 1:
        expected = f"{kinds[0]!r} in each of {len(kinds)} layers"
    raise ValueError(
        f"layer_types={reprlib.repr(file_kinds)}: this model_type has {expected}: write that, or "
        "remove the key"
    )


def _ropes(
    value: Mapping[str, Any], family: Family, kinds: list[str], head_dim: int
) -> tuple[list[Rope], tuple[float, int] | None]:
    """Return the rotary embedding of each layer, and the growth of queries with their position.

    Newer files have `rope_parameters`; older files have `rope_scaling` and `rope_theta`. If the
    family may rotate layers with a window differently, `rope_parameters` holds an object for each
    kind, and the flat `rope_scaling` applies only to full layers.

    Args:
      value: checked values by key.
      family: family of the model.
      kinds: kind of each layer.
      head_dim: D, the width of a head.
    """
    fields = [
        Field(value[name], name) for name in ("rope_parameters", "rope_scaling") if value[name]
    ]
    if len(fields) == 2 and fields[0].value != fields[1].value:
        raise ValueError("rope_parameters and rope_scaling differ: remove one of them")
    field = fields[0] if fields else Field(dict(family.rope), "rope_parameters")
    kinds_of_layers: tuple[str, ...] = (SLIDING, FULL)
    by_kind: dict[str, Field] = dict.fromkeys(kinds_of_layers, field)
    nested = sorted({SLIDING, FULL} & set(field.value))
    if not family.ropes_by_kind and nested:
        raise ValueError(
            f"{field.name} has {', '.join(nested)}, but this model_type rotates all layers in the "
            "same way"
        )
    if family.ropes_by_kind:
        by_kind = _ropes_by_kind(field)
    default = family.defaults.get("rope_theta")
    is_flat = "rope_theta" not in by_kind[SLIDING].value and SLIDING in kinds
    if (
        family.ropes_by_kind
        and is_flat
        and "rope_local_base_freq" not in family.reads
        and value["rope_theta"] != default
    ):
        raise ValueError(
            f"rope_theta={value['rope_theta']:g}: versions of transformers disagree whether it is "
            f"for layers with a window too; allowed: {default:g}, or rope_parameters with an "
            "object that has rope_theta for each kind of layer"
        )
    thetas = {
        FULL: value["rope_theta"],
        SLIDING: value["rope_local_base_freq"] or value["rope_theta"],
    }
    common: dict[str, Any] = {
        "head_dim": head_dim,
        "max_positions": value["max_position_embeddings"],
        "original_positions": value["original_max_position_embeddings"],
        "part": value["partial_rotary_factor"],
        "aliases": family.rope_aliases,
        "ignored": _OF_QUERIES if family.query_growth else frozenset(),
    }
    ropes = {kind: parse_rope(by_kind[kind], theta=thetas[kind], **common) for kind in by_kind}
    growth = _read_growth(field) if family.query_growth else None
    return [ropes[kind] for kind in kinds], growth


_OF_QUERIES = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})
"""Keys of Ministral 3's rotations that do not affect the rotations."""


def _read_growth(field: Field) -> tuple[float, int]:
    """Return the growth of queries that an object of rotations describes."""
    beta = number(least=0, most=1e3)(field["llama_4_scaling_beta"])
    return beta, field["original_max_position_embeddings"].integer(1, 2**53)


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
