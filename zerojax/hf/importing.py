"""The weights of a Hugging Face folder in a fresh state, in any tier, mesh, tiles and frozen dtype."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.hf.config import CONFIG, Family, decoder_config, family_of, read_config
from zerojax.hf.names import FAMILIES
from zerojax.models import LayeredModel
from zerojax.program import Program
from zerojax.state import TrainState
from zerojax.weights import import_params

ADAPTER = ".lora.lora_"
"""In the names of adapters alone."""
_TILED = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}


def import_hf(
    program: Program, folder: str | os.PathLike[str], *, key: jax.Array, families: Mapping[str, Family] = FAMILIES
) -> TrainState:
    """Return a fresh state of a program whose weights are those of a folder; in a run of several processes all call this.

        state = zj.import_hf(program, folder, key=jax.random.key(0))

    Its tensors are read one record at a time, layer by layer, wherever they rest; no process holds more of them than that,
    beside its own shards.

    Args:
      program: of a model that `zerojax.hf.model_of` made of this folder, or of another with the same sizes.
      folder: with `config.json`, and `model.safetensors` or `model.safetensors.index.json` and the files that it names.
      key: from `jax.random.key`, as for `program.init`, which makes the adapters.
      families: as of `zerojax.hf.model_of`.

    Returns:
      The state at step 0, as of `zerojax.import_params`.

    Raises:
      ValueError: the folder's model is not built, or `key` is no random key.
      CheckpointError: the folder has no such files, or tensors are missing, unknown or misshapen: the first are named.
      DamagedError: a file cannot be read.
      SwapError: the program's disk is too small, or failed.
    """
    if not isinstance(program.model, LayeredModel):
        raise ValueError("import_hf takes a program of a model that zerojax.hf.model_of made; zerojax.import_params takes any")
    names = names_of(folder, families, is_tiled=any(jax.tree.leaves(program.model.tiles)))
    # The rest of the model must be there.
    return import_params(program, folder, key=key, rename=names, missing=lambda name: ADAPTER in name)


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
        # Some files hold the embedding twice; transformers reads it once.
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
