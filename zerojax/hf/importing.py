"""Load the weights of a Hugging Face folder into a fresh state, for any tier, mesh and tiling.

Before an import or an export, the tensors of a folder are compared with the sizes in its
`config.json`:

    vocab_size=300, and model.embed_tokens.weight [288, 48] has 288

transformers builds a model from `config.json` and loads no tensor of another shape, so an export
must not write such a folder. An import also compares tensors with the program's model, but this
model may come from a different `config.json`.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from zerojax.checkpoint import CheckpointError, about_difference, first_few
from zerojax.hf.adapters.lora import Lora
from zerojax.hf.adapters.peft import check_same, read_peft
from zerojax.hf.adapters.start import AdaptedFile
from zerojax.hf.config import CONFIG, DecoderConfig, Family, open_folder
from zerojax.hf.decoder import Options
from zerojax.hf.heads.folder import read_num_labels
from zerojax.hf.heads.scores import SCORE
from zerojax.hf.mixtures.block import choose_parts
from zerojax.hf.mixtures.stacks import stack_of
from zerojax.hf.model import DECODER, config_of, read_family
from zerojax.hf.names import FAMILIES
from zerojax.models import LayeredModel
from zerojax.program import Program
from zerojax.sharding import without_mesh
from zerojax.state import TrainState
from zerojax.weights import (
    DividedFile,
    Place,
    WeightFile,
    import_params,
    read_places,
)

ADAPTER = ".lora.lora_"
"""Part of a parameter's name that only adapters have."""
_PIECE = 1 << 24
"""Number of elements compared at a time."""
_TILED = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}


@without_mesh
def import_hf(
    program: Program,
    folder: str | os.PathLike[str],
    *,
    key: jax.Array,
    adapters: str | os.PathLike[str] | None = None,
    families: Mapping[str, Family] = FAMILIES,
) -> TrainState:
    """Return a fresh state of a program with the weights of a folder.

    If there are several processes, all of them must call this.

        state = zj.import_hf(program, folder, key=jax.random.key(0))

    Tensors are read one record at a time, layer by layer, into the tier where each is stored. A
    process holds at most one record in addition to its own shards.

    Args:
      program: program of a model that `zerojax.hf.model_of` built from this folder, or from another
        folder whose config describes the same computation.
      folder: path of a folder with `config.json`, and with `model.safetensors` or
        `model.safetensors.index.json` and the files that it names.
      key: random key from `jax.random.key`, as for `program.init`; it initializes the adapters.
      adapters: folder of adapters to train on, as PEFT or `zerojax.export_peft` writes it; the
        model has the options that `zerojax.hf.read_peft` returns for it. None starts new adapters.
      families: model families by `model_type`, as for `zerojax.hf.model_of`.

    Returns:
      The state at step 0, as `zerojax.import_params` returns it.

    Raises:
      ValueError: the folder's model is not supported, its head is tied but differs from the
        embedding, or `key` is not a random key.
      CheckpointError: the folder has no such files, its config describes another computation than
        the program's model or other sizes than the tensors (the error names the key), or tensors
        are missing, unknown or misshapen, or hold NaN, infinities, or numbers beyond the compute
        dtype (the error names the first ones).
      DamagedError: a file cannot be read.
      SwapError: the program's disk is too small, or failed.
    """
    if not isinstance(program.model, LayeredModel):
        raise ValueError(
            "import_hf takes a program of a model that zerojax.hf.model_of built; "
            "zerojax.import_params takes any"
        )
    folder = os.path.expanduser(os.fspath(folder))
    is_scored = SCORE in (program.model.about or {})
    names = map_names(
        folder,
        families,
        is_tiled=_has_tiled_mlps(program.model),
        is_scored=is_scored,
    )
    _check_config(program.model, folder, families)
    file = open_folder(folder)
    check_config_sizes(folder, file, families, is_whole=False)
    if not is_scored:
        _check_tied(folder, names)
    has_score = read_num_labels(folder) is not None
    source: WeightFile = file
    rename: Any = names
    lora = _find_lora(program.model, adapters)
    if lora is not None and (adapters is not None or lora.use_dora or lora.init != "default"):
        adapted = AdaptedFile(file, names, lora, adapters)
        source = adapted
        rename = adapted.rename

    def may_be_missing(name: str) -> bool:
        # A causal model's folder has no head of scores, which then starts at random.
        return ADAPTER in name or (name.startswith(f"head.{SCORE}.") and not has_score)

    return import_params(program, source, key=key, rename=rename, missing=may_be_missing)


def _has_tiled_mlps(model: LayeredModel) -> bool:
    """Return whether a model stores its MLPs in tiles. Groups of experts are no such tiles."""
    flags = jax.tree_util.tree_flatten_with_path(model.tiles)[0]
    return any(flag and not is_of_experts(jax.tree_util.keystr(path)) for path, flag in flags)


def is_of_experts(name: str) -> bool:
    """Return whether a parameter, named by `keystr` or with dots, belongs to routed experts."""
    return "['experts']" in name or ".experts." in name


def _find_lora(model: LayeredModel, adapters: str | os.PathLike[str] | None) -> Lora | None:
    """Return the options of a model's adapters; None if it has none.

    Raises:
      ValueError: the adapters of a folder are not the model's.
      CheckpointError: the folder of adapters cannot be read.
    """
    options = (model.about or {}).get("lora")
    if options is None and adapters is not None:
        raise ValueError(
            f"adapters={os.fspath(adapters)!r}, but the program's model has no adapters: build it "
            "with lora=zerojax.hf.read_peft(adapters)"
        )
    if options is None:
        return None
    lora = Lora(**{**options, "targets": tuple(options["targets"])})
    if adapters is not None:
        check_same(lora, read_peft(adapters), adapters)
    return lora


def _check_config(model: LayeredModel, folder: str, families: Mapping[str, Family]) -> None:
    """Raise CheckpointError if a folder's config describes another computation than the model.

    Such a difference need not show in any shape.
    """
    about = {DECODER: config_of(folder, families).computes()}
    difference = about_difference(model.about or {}, about)
    if difference:
        raise CheckpointError(
            f"{os.path.join(folder, CONFIG)} has {difference[0]}, but this program's model has "
            f"{difference[1]}: build the model from this folder (zerojax.hf.model_of), or import "
            "the folder that it was built from"
        )


def check_config_sizes(
    folder: str | os.PathLike[str],
    file: WeightFile,
    families: Mapping[str, Family],
    *,
    is_whole: bool,
) -> None:
    """Raise CheckpointError if a folder's config.json has other sizes than its tensors.

    Args:
      folder: path of a folder that holds `config.json`.
      file: weights of the folder.
      families: model families by `model_type`.
      is_whole: whether to check as well that no tensor is missing or superfluous.
    """
    names = map_names(folder, families, is_tiled=False)
    config_path = os.path.join(os.fspath(folder), CONFIG)
    family, config = read_family(folder, families)
    params = list_params(config, family.block)
    num_labels = read_num_labels(folder)
    if num_labels is not None:
        params.pop("head.lm_head.embedding", None)
        hidden = Size(config.hidden, f"hidden_size={config.hidden}")
        params[f"head.{SCORE}.kernel"] = hidden, Size(num_labels, f"num_labels={num_labels}")
    check_sizes(config, params, names, file, config_path, is_whole=is_whole)


def _check_tied(folder: str | os.PathLike[str], names: Mapping[str, tuple[Place, ...]]) -> None:
    """Raise ValueError if config.json ties the head to the embedding but they differ."""
    heads = [name for name in names if name.endswith("lm_head.weight") and not names[name]]
    tables = [
        name
        for name, places in names.items()
        if places and places[0].name == "embed.embed_tokens.embedding"
    ]
    file = open_folder(folder)
    head = next((name for name in heads if name in file.tensors), None)
    table = next((name for name in tables if name in file.tensors), None)
    if head is None or table is None:
        return
    shape = file.tensors[head].shape
    is_same = shape == file.tensors[table].shape
    step = max(1, _PIECE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        box = ((start, min(start + step, shape[0])), *((0, n) for n in shape[1:]))
        is_same = is_same and np.array_equal(file.read(head, box), file.read(table, box))
    if not is_same:
        raise ValueError(
            f"{os.path.join(os.fspath(folder), CONFIG)} has tie_word_embeddings=true, but {head} "
            f"differs from {table}: set it to false if the model has a head of its own, or remove "
            "that tensor from the files"
        )


def map_names(
    folder: str | os.PathLike[str],
    families: Mapping[str, Family],
    *,
    is_tiled: bool,
    is_scored: bool | None = None,
) -> dict[str, tuple[Place, ...]]:
    """Return the parameters for each tensor name of a folder, given the folder's options.

    Args:
      folder: path of a folder that holds `config.json`.
      families: model families by `model_type`.
      is_tiled: whether the model stores its MLPs in tiles.
      is_scored: whether the model scores sequences; None: as the folder's does.

    Returns:
      A table like `Family.names`; tensors that are not read have no place.

    Raises:
      ValueError: the folder's model is not supported.
    """
    family, config = read_family(folder, families)
    names: dict[str, tuple[Place, ...]] = {}
    if is_scored is None:
        is_scored = read_num_labels(folder) is not None
    if is_scored:
        names[f"{SCORE}.weight"] = (Place(f"head.{SCORE}.kernel", axes=(1, 0)),)
    for tensor, value in family.table(config).items():
        places = read_places(value, tensor)
        # Some files hold a tied embedding twice; `import_hf` has checked that both are equal.
        is_head = any(place.name.startswith("head.lm_head.") for place in places)
        if is_head and (config.tied or is_scored):
            places = ()
        names[tensor] = tuple(map(_in_tiles, places)) if is_tiled else places
    return names


def _in_tiles(place: Place) -> Place:
    """Return the place of a tensor for tiled MLPs: "mlp.up_proj.kernel" becomes "mlp.up"."""
    for untiled, tiled in _TILED.items():
        for suffix, tiled_suffix in (
            (f"{untiled}.kernel", tiled),
            (f"{untiled}.bias", f"{tiled}_bias"),
        ):
            if place.name.endswith(suffix):
                return place._replace(name=place.name.removesuffix(suffix) + tiled_suffix)
    return place


# --- sizes ----------------------------------------------------------------------------------------


class Size(NamedTuple):
    """The size of a dim.

    Attributes:
      number: number of elements.
      keys: keys of `config.json` that determine the number, with their values.
    """

    number: int
    keys: str


Dims = tuple[Size, ...]
STACK = "blocks."
"""Prefix of the names of parameters that exist once per layer."""


def list_params(c: DecoderConfig, block: Any = None) -> dict[str, Dims]:
    """Return the dims, in one layer, of each parameter of a decoder without adapters, by name.

    Args:
      c: the decoder.
      block: class of its layers, if it is a subclass of `zerojax.hf.Block`: its parameters are
        listed with it, whatever the keys of `config.json` on which their sizes depend.
    """
    vocab = Size(c.vocab, f"vocab_size={c.vocab}")
    hidden = Size(c.hidden, f"hidden_size={c.hidden}")
    rows = vocab
    if c.extra_tokens:
        rows = Size(c.vocab + c.extra_tokens, f"{vocab.keys} plus {c.extra_tokens}")
    params: dict[str, Dims] = {"embed.embed_tokens.embedding": (rows, hidden)}
    if not c.tied:
        params["head.lm_head.embedding"] = vocab, hidden
    params["head.norm.scale"] = (hidden,)
    if c.norm_bias:
        params["head.norm.bias"] = (hidden,)
    known = list_block_params(c)
    parts = choose_parts(c)
    for run in c.runs:
        run_block = block or (parts.blocks[run.has_experts] if c.mixture is not None else None)
        of_run = known if run_block is None else _params_of(run_block, c, known)
        params |= {f"{run.prefix}{name}": dims for name, dims in of_run.items()}
    return params


def list_block_params(c: DecoderConfig) -> dict[str, Dims]:
    """Return the dims of the parameters of a layer with and without experts, by name."""
    hidden = Size(c.hidden, f"hidden_size={c.hidden}")
    width = Size(c.intermediate, f"intermediate_size={c.intermediate}")
    head = Size(c.head_dim, f"head_dim={c.head_dim}")
    heads = Size(c.heads, f"num_attention_heads={c.heads}")
    q = Size(c.heads * c.head_dim, f"{heads.keys} times {head.keys}")
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
    if not c.gated:
        del matrices["mlp.gate_proj"]
    params: dict[str, Dims] = {}
    for name, (d_in, d_out, has_bias) in matrices.items():
        params[f"{name}.kernel"] = d_in, d_out
        if has_bias:
            params[f"{name}.bias"] = (d_out,)
    for name in c.norms:
        params[f"{name}.scale"] = (hidden,)
        if c.norm_bias:
            params[f"{name}.bias"] = (hidden,)
    if c.qk_norm:
        params["self_attn.q_norm.scale"] = (q if c.qk_norm_joint else head,)
        params["self_attn.k_norm.scale"] = (kv if c.qk_norm_joint else head,)
    if c.sinks:
        params["self_attn.sinks"] = (heads,)
    if c.mixture is not None:
        experts = Size(c.mixture.experts, f"the number of experts={c.mixture.experts}")
        width = Size(c.mixture.intermediate, f"the width of an expert={c.mixture.intermediate}")
        params |= {
            "mlp.router.kernel": (hidden, experts),
            "mlp.experts.gate_proj": (experts, hidden, width),
            "mlp.experts.up_proj": (experts, hidden, width),
            "mlp.experts.down_proj": (experts, width, hidden),
        }
    return params


def _params_of(block: Any, c: DecoderConfig, known: Mapping[str, Dims]) -> dict[str, Dims]:
    """Return the dims of the parameters of a class of layers, with their keys where known."""
    shapes = jax.eval_shape(lambda: nnx.state(block(c, Options(), rngs=nnx.Rngs(0)), nnx.Param))
    listed: dict[str, Dims] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(shapes))[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        dims = known.get(name, ())
        is_known = [size.number for size in dims] == list(leaf.shape)
        unknown = tuple(Size(n, f"{block.__name__}'s {name}") for n in leaf.shape)
        listed[name] = dims if is_known else unknown
    return listed


def count_layers(places: Mapping[str, Place]) -> dict[str, int]:
    """Return one more than the highest layer number, by stack."""
    counts: dict[str, int] = {}
    for place in places.values():
        if place.layer is not None:
            stack = stack_of(place.name)
            counts[stack] = max(counts.get(stack, 0), place.layer + 1)
    return counts


def count_experts(places: Mapping[str, Place]) -> dict[str, int]:
    """Return one more than the highest number of an expert, by parameter with experts."""
    counts: dict[str, int] = {}
    for place in places.values():
        if place.expert is not None:
            counts[place.name] = max(counts.get(place.name, 0), place.expert + 1)
    return counts


def check_sizes(
    config: DecoderConfig,
    params: Mapping[str, Dims],
    names: Mapping[str, tuple[Place, ...]],
    file: WeightFile,
    config_path: str,
    *,
    is_whole: bool,
) -> None:
    """Compare the tensors of a folder with its `config.json`.

    Args:
      config: decoder that the file describes.
      params: its parameters, as `list_params` returns them.
      names: parameters for each tensor name, for a model with untiled MLPs.
      file: weights of the folder.
      config_path: path of `config.json`.
      is_whole: whether to check as well that no tensor is missing or superfluous. Otherwise only
        shapes and the number of layers are compared.

    Raises:
      CheckpointError: a size or the number of layers differs (the error names the key), or a tensor
        is missing or superfluous (the error names it).
    """
    divided = DividedFile(file, names)
    places = divided.places
    differences = _sizes_that_differ(places, params, divided)
    layers = sum(count_layers(places).values())
    if layers not in (0, config.layers):
        differences.append(
            f"num_hidden_layers={config.layers}, but the tensors have {layers} layers"
        )
    elif is_whole:
        differences += _presence(places, params, names, config)
    if differences:
        raise CheckpointError(
            f"{config_path} does not describe the weights next to it: {first_few(differences)}. "
            "Use the config.json that belongs to them"
        )


def _sizes_that_differ(
    places: Mapping[str, Place], params: Mapping[str, Dims], file: WeightFile
) -> list[str]:
    """Return a description of each size that differs, with the first tensor that contradicts it."""
    descriptions: dict[str, str] = {}
    order = {param: position for position, param in enumerate(params)}
    names = [name for name, place in places.items() if place.name in params]
    names.sort(key=lambda name: (order[places[name].name], places[name].layer or 0, name))
    for name in names:
        place = places[name]
        shape = file.tensors[name].shape
        dims = params[place.name]
        if place.expert is not None:
            dims = dims[1:]
        if len(shape) != len(dims):
            numbers = [size.number for size in dims]
            descriptions.setdefault(name, f"{name} {list(shape)}, but the model has {numbers}")
            continue
        axes = place.axes or range(len(shape))
        for size, axis in zip(dims, axes, strict=True):
            if shape[axis] != size.number:
                descriptions.setdefault(
                    size.keys, f"{size.keys}, but {name} {list(shape)} has {shape[axis]}"
                )
    return list(descriptions.values())


def _presence(
    places: Mapping[str, Place],
    params: Mapping[str, Dims],
    names: Mapping[str, tuple[Place, ...]],
    config: DecoderConfig,
) -> list[str]:
    """Return descriptions of the missing and the superfluous tensors."""
    have = {(place.name, place.layer) for place in places.values()}
    patterns: dict[tuple[str, int | None], str] = {}
    for pattern, entries in names.items():
        for place in entries:
            patterns[place.name, place.layer] = pattern
    missing = []
    for name in params:
        runs = [run for run in config.runs if name.startswith(run.prefix)]
        numbers = range(runs[0].num_layers) if runs else [None]
        for layer in numbers:
            if (name, layer) not in have:
                pattern = patterns.get((name, layer), patterns.get((name, None), name))
                missing.append(f"no {pattern.replace('{layer}', str(layer))}")
    extra = [
        f"{name}, which the model does not have"
        for name, place in places.items()
        if place.name not in params
    ]
    return missing + extra
