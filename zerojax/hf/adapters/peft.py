"""Folders of adapters as PEFT writes them: their options, and the names of their tensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [r, in]      lora_a [in, r]
                                                    .lora_B.weight [out, r]     lora_b [r, out]
                                                    .lora_magnitude_vector      lora_m [out]
    base_model.model.model.embed_tokens.lora_embedding_A [r, V]                 lora_a [V, r]
                                       .lora_embedding_B [H, r]                 lora_b [r, H]
    base_model.model.lm_head.weight                                             modules_to_save

Which modules are adapted is read from the tensors' names, because `target_modules` may be a regular
expression or a shorthand.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from zerojax.checkpoint import CheckpointError, first_few
from zerojax.hf.adapters.lora import Lora
from zerojax.hf.beside import ADAPTER_FILES
from zerojax.weights import WeightFile, open_weights

PREFIX = "base_model.model."
"""Prefix of a module's name in PEFT's files."""
BASE = ".base_layer.weight"
"""End of the name of an adapted embedding's own weights, which PEFT writes with its adapter."""
_ADAPTER = re.compile(r"(.+)\.lora_(embedding_)?([AB]|magnitude_vector)(\.weight)?")
_MATRICES = {"A": "lora_a", "B": "lora_b", "magnitude_vector": "lora_m"}
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""
_REQUIRED = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
}
"""Keys that must have this value, or be missing."""
_READ = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights")
_IGNORED = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
)


def read_peft(folder: str | os.PathLike[str]) -> Lora:
    """Return the options of a folder of adapters, as PEFT and `zerojax.export_peft` write it.

        lora = zj.hf.read_peft("adapters")
        model = zj.hf.model_of(base, lora=lora)
        ...
        state = zj.import_hf(program, base, key=key, adapters="adapters")

    Args:
      folder: path of a folder with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
      ValueError: the adapters are of a kind that is not built; the error names the key.
      CheckpointError: a file is missing or cannot be read.
    """
    folder = os.path.expanduser(os.fspath(folder))
    config = _read_config(folder)
    path = os.path.join(folder, ADAPTER_FILES[0])
    for key, value in config.items():
        if key in _REQUIRED and value != _REQUIRED[key]:
            raise ValueError(f"{path} has {key}={value!r}: only {_REQUIRED[key]!r} is supported")
        known = key in _REQUIRED or key in _READ or key in _IGNORED
        if not known and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"{path} has {key}={value!r}, which is not supported: train without")
    init = config.get("init_lora_weights", True)
    is_pissa = isinstance(init, str) and init.startswith("pissa")
    if not is_pissa and init not in _KEEP_BASE:
        raise ValueError(
            f"{path} has init_lora_weights={init!r}, which changes the base in a way that is not "
            "supported: let PEFT convert the adapters (path_initial_model_for_weight_conversion "
            "of save_pretrained)"
        )
    targets = sorted({module.rpartition(".")[2] for module, _ in read_modules(folder)})
    if not targets:
        raise ValueError(f"{folder} holds no adapters: its tensors have no names with lora_A")
    try:
        return Lora(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=tuple(targets),
            dropout=config.get("lora_dropout") or 0.0,
            use_rslora=config.get("use_rslora") or False,
            use_dora=config.get("use_dora") or False,
            init=init if is_pissa else "default",
            modules_to_save=tuple(config.get("modules_to_save") or ()),
        )
    except KeyError as error:
        raise ValueError(f"{path} has no {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_config(folder: str) -> dict[str, Any]:
    """Return the content of a folder's `adapter_config.json`.

    Raises:
      CheckpointError: the file is missing, or is not a JSON object.
    """
    path = os.path.join(folder, ADAPTER_FILES[0])
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}: a JSON object is needed")
    return config


def open_peft(folder: str | os.PathLike[str]) -> WeightFile:
    """Open the tensors of a folder of adapters.

    Raises:
      CheckpointError: the file is missing or cannot be read.
    """
    folder = os.path.expanduser(os.fspath(folder))
    path = os.path.join(folder, ADAPTER_FILES[1])
    if not os.path.isfile(path) and os.path.isfile(os.path.join(folder, "adapter_model.bin")):
        raise CheckpointError(
            f"{folder} holds adapter_model.bin, a pickle, which is not read: load the adapters "
            f"with PEFT and save them as {ADAPTER_FILES[1]} (save_pretrained)"
        )
    return open_weights(path)


def read_modules(folder: str | os.PathLike[str]) -> set[tuple[str, str]]:
    """Return the adapted modules of a folder, and the matrices that each has.

    For example ("model.layers.0.self_attn.q_proj", "lora_a").
    """
    modules = set[tuple[str, str]]()
    for name in open_peft(folder).tensors:
        match = _ADAPTER.fullmatch(name.removeprefix(PREFIX))
        if match is not None:
            modules.add((match[1], _MATRICES[match[3]]))
    return modules


def peft_name(module: str, matrix: str) -> str:
    """Return the name in PEFT's files of an adapter's matrix.

    Args:
      module: name of the adapted module in transformers.
      matrix: "lora_a", "lora_b" or "lora_m".
    """
    if matrix == "lora_m":
        return f"{PREFIX}{module}.lora_magnitude_vector"
    letter = matrix[-1].upper()
    if module.endswith("embed_tokens"):
        return f"{PREFIX}{module}.lora_embedding_{letter}"
    return f"{PREFIX}{module}.lora_{letter}.weight"


def peft_config(lora: Lora, base: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Adapters that started from singular values are written with twice their rank, beside the
    original base (`export_peft`).

    Args:
      lora: options of the adapters.
      base: path or name of the base.
    """
    rank = lora.rank
    alpha = lora.alpha
    if lora.init != "default":
        rank = 2 * lora.rank
        alpha = lora.alpha * (2**0.5 if lora.use_rslora else 2)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if "score" in lora.modules_to_save else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "modules_to_save": list(lora.modules_to_save) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def check_same(lora: Lora, other: Lora, folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if the adapters of a folder are not the adapters of a model.

    The fraction of dropped inputs may differ.

    Args:
      lora: options of the model's adapters.
      other: options of the folder's adapters.
      folder: path of the folder.
    """

    def describe(lora: Lora) -> Mapping[str, Any]:
        return {
            "rank": lora.rank,
            "scale": lora.scale,
            "targets": lora.targets,
            "use_dora": lora.use_dora,
            "init": lora.init,
            "modules_to_save": tuple(sorted(lora.modules_to_save)),
        }

    ours = describe(lora)
    theirs = describe(other)
    differences = [
        f"{key}={theirs[key]!r}, and here it is {ours[key]!r}"
        for key in ours
        if ours[key] != theirs[key]
    ]
    if differences:
        raise ValueError(
            f"{os.fspath(folder)} holds adapters with {first_few(differences)}: build the model "
            "with lora=zerojax.hf.read_peft(folder)"
        )
