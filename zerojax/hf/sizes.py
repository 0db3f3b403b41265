"""Do the tensors of a folder have the sizes that its `config.json` says? If not, which key do they contradict?

    vocab_size=300, and model.embed_tokens.weight [288, 48] has 288

transformers makes a model by `config.json` and loads no tensor of another shape, so an export must not write such a folder.
An import compares tensors with a program's model as well, but that model may come from another `config.json`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from zerojax.checkpoint import CheckpointError, first_few
from zerojax.hf.config import DecoderConfig
from zerojax.weights import Place, WeightFile, renaming


class Size(NamedTuple):
    """The size of a dim.

    Attributes:
      number: of elements.
      keys: of `config.json` that it follows from, with their values.
    """

    number: int
    keys: str


Dims = tuple[Size, ...]
STACK = "blocks."
"""How the name of a parameter begins that each layer has."""


def params_of(c: DecoderConfig) -> dict[str, Dims]:
    """Return the parameters of a decoder, adapters left out, by name: the dims of each, for one layer."""
    vocab, hidden = Size(c.vocab, f"vocab_size={c.vocab}"), Size(c.hidden, f"hidden_size={c.hidden}")
    width = Size(c.intermediate, f"intermediate_size={c.intermediate}")
    head = Size(c.head_dim, f"head_dim={c.head_dim}")
    q = Size(c.heads * c.head_dim, f"num_attention_heads={c.heads} times {head.keys}")
    kv = Size(c.kv_heads * c.head_dim, f"num_key_value_heads={c.kv_heads} times {head.keys}")
    matrices = {
        "self_attn.q_proj": (hidden, q, c.qkv_bias),
        "self_attn.k_proj": (hidden, kv, c.qkv_bias),
        "self_attn.v_proj": (hidden, kv, c.qkv_bias),
        "self_attn.o_proj": (q, hidden, c.output_bias),
        "mlp.gate_proj": (hidden, width, c.mlp_bias),
        "mlp.up_proj": (hidden, width, c.mlp_bias),
        "mlp.down_proj": (width, hidden, c.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if c.post_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    params: dict[str, Dims] = {"embed.embed_tokens.embedding": (vocab, hidden), "head.norm.scale": (hidden,)}
    if not c.tied:
        params["head.lm_head.embedding"] = vocab, hidden
    for name, (d_in, d_out, has_bias) in matrices.items():
        params[f"{STACK}{name}.kernel"] = d_in, d_out
        if has_bias:
            params[f"{STACK}{name}.bias"] = (d_out,)
    return params | {f"{STACK}{name}.scale": (size,) for name, size in norms.items()}


def check_sizes(config: DecoderConfig, names: Mapping[str, Any], file: WeightFile, where: str, *, is_whole: bool) -> None:
    """Compare the tensors of a folder with what its `config.json` says.

    Args:
      config: what the file says.
      names: the table of the folder's tensors, for a model that is not tiled.
      file: the folder's weights.
      where: the path of `config.json`.
      is_whole: compare which tensors there are, too. Without it only their shapes and the number of layers are compared.

    Raises:
      CheckpointError: a size, or the number of layers, differs: the key is named. Or a tensor is missing, or there is one too
        many: it is named.
    """
    place_of, params = renaming(names), params_of(config)
    places = {name: place for name in file.tensors if (place := place_of(name)) is not None}
    differences = _sizes_that_differ(places, params, file)
    layers = 1 + max((place.layer for place in places.values() if place.layer is not None), default=-1)
    if layers not in (0, config.layers):
        differences.append(f"num_hidden_layers={config.layers}, and the tensors are of {layers} layers")
    elif is_whole:
        differences += _presence(places, params, names, config.layers)
    if differences:
        raise CheckpointError(
            f"{where} is not of the weights beside it: {first_few(differences)}. Take the config.json that belongs to them"
        )


def _sizes_that_differ(places: Mapping[str, Place], params: Mapping[str, Dims], file: WeightFile) -> list[str]:
    """Return each size that differs, with the first tensor that has another."""
    found: dict[str, str] = {}
    order = list(params)
    named = [(order.index(place.name), place.layer or 0, name) for name, place in places.items() if place.name in params]
    for _, _, name in sorted(named):
        place = places[name]
        shape, dims = file.tensors[name].shape, params[place.name]
        if len(shape) != len(dims):
            numbers = [size.number for size in dims]
            found.setdefault(name, f"{name} {list(shape)}, and the model has {numbers}")
            continue
        axes = place.axes or range(len(shape))
        for size, axis in zip(dims, axes, strict=True):
            if shape[axis] != size.number:
                found.setdefault(size.keys, f"{size.keys}, and {name} {list(shape)} has {shape[axis]}")
    return list(found.values())


def _presence(places: Mapping[str, Place], params: Mapping[str, Dims], names: Mapping[str, Any], layers: int) -> list[str]:
    """Return the tensors that are missing, and those too many."""
    have = {(place.name, place.layer) for place in places.values()}
    own = {place.name: pattern for pattern in names if (place := renaming(names)(pattern.replace("{layer}", "0")))}
    missing = []
    for name in params:
        numbers = range(layers) if name.startswith(STACK) else [None]
        absent = [layer for layer in numbers if (name, layer) not in have]
        pattern = own.get(name, name)
        missing += [f"no {pattern.replace('{layer}', str(layer))}" for layer in absent]
    extra = [f"{name}, of which the model has none" for name, place in places.items() if place.name not in params]
    return missing + extra
