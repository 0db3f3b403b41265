"""The weights of a Hugging Face folder in a fresh state, in any tier, mesh, tiles and frozen dtype."""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint import CheckpointError, about_difference
from zerojax.hf.config import CONFIG, Family, decoder_config, family_of, read_config
from zerojax.hf.model import DECODER, config_of
from zerojax.hf.names import FAMILIES
from zerojax.hf.sizes import check_sizes
from zerojax.models import LayeredModel
from zerojax.program import Program
from zerojax.sharding import without_mesh
from zerojax.state import TrainState
from zerojax.weights import WeightFile, import_params, open_weights

ADAPTER = ".lora.lora_"
"""In the names of adapters alone."""
_PIECE = 1 << 24
"""Elements that are compared at once."""
_TILED = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}


@without_mesh
def import_hf(
    program: Program, folder: str | os.PathLike[str], *, key: jax.Array, families: Mapping[str, Family] = FAMILIES
) -> TrainState:
    """Return a fresh state of a program whose weights are those of a folder; in a run of several processes all call this.

        state = zj.import_hf(program, folder, key=jax.random.key(0))

    Its tensors are read one record at a time, layer by layer, wherever they rest; no process holds more of them than that,
    beside its own shards.

    Args:
      program: of a model that `zerojax.hf.model_of` made of this folder, or of another whose config computes the same.
      folder: with `config.json`, and `model.safetensors` or `model.safetensors.index.json` and the files that it names.
      key: from `jax.random.key`, as for `program.init`, which makes the adapters.
      families: as of `zerojax.hf.model_of`.

    Returns:
      The state at step 0, as of `zerojax.import_params`.

    Raises:
      ValueError: the folder's model is not built, its head is tied and another than the embedding, or `key` is no random key.
      CheckpointError: the folder has no such files, its config computes something else than the program's model or has other
        sizes than the tensors (the key is named), or tensors are missing, unknown or misshapen, or hold NaN, infinities, or
        numbers beyond the compute dtype: the first are named.
      DamagedError: a file cannot be read.
      SwapError: the program's disk is too small, or failed.
    """
    if not isinstance(program.model, LayeredModel):
        raise ValueError("import_hf takes a program of a model that zerojax.hf.model_of made; zerojax.import_params takes any")
    folder = os.path.expanduser(os.fspath(folder))
    names = names_of(folder, families, is_tiled=any(jax.tree.leaves(program.model.tiles)))
    _check_config(program.model, folder, families)
    check_config_sizes(folder, open_weights(folder), families, is_whole=False)
    _check_tied(folder, names)
    # The rest of the model must be there.
    return import_params(program, folder, key=key, rename=names, missing=lambda name: ADAPTER in name)


def _check_config(model: LayeredModel, folder: str, families: Mapping[str, Family]) -> None:
    """Raise CheckpointError where a folder's config computes something else than a model, which no shape may show."""
    made = {DECODER: config_of(folder, families).computes()}
    if told := about_difference(model.about or {}, made):
        raise CheckpointError(
            f"{os.path.join(folder, CONFIG)} makes it {told[0]}, and this program's model has {told[1]}: build the model from "
            "this folder (zerojax.hf.model_of), or import the folder that it was built from"
        )


def check_config_sizes(
    folder: str | os.PathLike[str], file: WeightFile, families: Mapping[str, Family], *, is_whole: bool
) -> None:
    """Raise CheckpointError where a folder's config.json has other sizes than its tensors.

    Args:
      folder: with `config.json`.
      file: the folder's weights.
      families: see `zerojax.hf.model_of`.
      is_whole: compare which tensors there are, too.
    """
    names = names_of(folder, families, is_tiled=False)
    where = os.path.join(os.fspath(folder), CONFIG)
    check_sizes(config_of(folder, families), names, file, where, is_whole=is_whole)


def _check_tied(folder: str | os.PathLike[str], names: Mapping[str, Any]) -> None:
    """Raise ValueError where config.json ties the head to the embedding, and the files hold another head: which is meant?"""
    heads = [name for name in names if name.startswith("lm_head.") and names[name] is None]
    tables = [name for name, here in names.items() if _name(here) == "embed.embed_tokens.embedding"]
    if not heads or not tables:
        return
    file = open_weights(folder)
    head, table = heads[0], tables[0]
    if head not in file.tensors or table not in file.tensors:
        return
    shape = file.tensors[head].shape
    is_same = shape == file.tensors[table].shape
    step = max(1, _PIECE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        box = ((start, min(start + step, shape[0])), *((0, n) for n in shape[1:]))
        is_same = is_same and np.array_equal(file.read(head, box), file.read(table, box))
    if not is_same:
        raise ValueError(
            f"{os.path.join(os.fspath(folder), CONFIG)} has tie_word_embeddings=true, and {head} is not {table}: set it to "
            "false where the model has a head of its own, or take that tensor out of the files"
        )


def names_of(folder: str | os.PathLike[str], families: Mapping[str, Family], *, is_tiled: bool) -> dict[str, Any]:
    """Return the table of names of a folder's tensors, for its own options.

    Args:
      folder: with `config.json`.
      families: by `model_type`.
      is_tiled: the model stores its MLPs in tiles.

    Raises:
      ValueError: the folder's model is not built.
    """
    raw, where = read_config(folder), os.path.join(os.fspath(folder), CONFIG)
    family = family_of(raw, families, where)
    names = dict(family.names)
    if decoder_config(raw, family, where).tied:
        # Some files hold the embedding twice; `import_hf` has seen that it is the same.
        names = {there: None if _name(here).startswith("head.lm_head.") else here for there, here in names.items()}
    return {there: _in_tiles(here) for there, here in names.items()} if is_tiled else names


def _name(here: Any) -> str:
    return "" if here is None else here if isinstance(here, str) else here[0]


def _in_tiles(here: Any) -> Any:
    """Return the place of a tensor in a model whose MLPs are tiled: "mlp.up_proj.kernel" is "mlp.up"."""
    name = _name(here)
    for whole, tiled in _TILED.items():
        for ending, new in ((f"{whole}.kernel", tiled), (f"{whole}.bias", f"{tiled}_bias")):
            if name.endswith(ending):
                name = name.removesuffix(ending) + new
                return name if isinstance(here, str) else (name, *here[1:])
    return here
