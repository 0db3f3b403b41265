"""A checkpoint's weights as a Hugging Face folder: in the names, layouts and dtypes of the folder that they came from.

    tensor of `like` [out, in]   <-   record [in, out] of one layer, transposed                        all of it, or some rows
    merge_lora:                  <-   W^T + (alpha / rank) (A B)^T                                     in float32

Of each tensor of `like` the table of names tells which parameter it is, as in an import. It is written piece by piece from the
checkpoint's records, without a program, model or device. Frozen weights were never written: where the checkpoint's number is
that of the folder, rounded to the checkpoint's dtype, the folder's own is written; and where they rest in 8 or 4 bits it is,
too, since an adapter belongs beside the base that it was trained for.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from host_offload.disk import Box, numpy_dtype
from zerojax.checkpoint import ENCODED, CheckpointError, SavedState, explaining, first_few, of_mlp, retiled
from zerojax.hf.config import CONFIG, Family, read_config
from zerojax.hf.importing import ADAPTER, names_of
from zerojax.hf.names import FAMILIES, Lora
from zerojax.weights import (
    INDEX_NAME,
    Place,
    Tensor,
    WeightFile,
    export_dtype,
    open_checkpoint,
    open_weights,
    path_of,
    read_part,
    renaming,
    write_atomically,
    write_safetensors,
)

PIECE_BYTES = 256 * 2**20
"""Most float32 bytes of a piece of a tensor: that a transposed one is cut where it must be, and no sooner."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclasses.dataclass(frozen=True)
class _Source:
    """The parameter that a tensor is.

    Attributes:
      leaf: its name in the checkpoint.
      place: of the tensor.
      shape: of the parameter, all layers', not in tiles.
      is_frozen: it was not trained.
      is_encoded: it rests in 8 or 4 bits.
    """

    leaf: str
    place: Place
    shape: tuple[int, ...]
    is_frozen: bool
    is_encoded: bool


def export_hf(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str],
    dtype: Any = None,
    shard_bytes: float = 5e9,
    merge_lora: bool = False,
    families: Mapping[str, Family] = FAMILIES,
) -> None:
    """Write the weights of a checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads.

        zj.export_hf("runs/llama/checkpoints", "llama-tuned", like="Llama-3.1-8B")

    To be called by one process; it uses no device, and holds at most some hundred MB of a weight.

    Args:
      checkpoint: folder of one step of a `Checkpointer`, or its directory: then its newest whole step.
      out: folder to write; nothing may be there.
      like: the folder that the weights were imported from: its names, its dtypes, and its files beside the weights, such as
        `config.json` and those of the tokenizer, are those of `out`.
      dtype: float32, float16, bfloat16 or float64; None: of each tensor that of `like`.
      shard_bytes: most bytes of one file, unless a tensor is larger.
      merge_lora: add adapters to the weights beside which they stand. A checkpoint with adapters needs it; or use
        `export_peft`.
      families: as of `zerojax.hf.model_of`.

    Raises:
      ValueError: `out` exists, an option does not fit, the model of `like` is not built, or the checkpoint has adapters and
        `merge_lora` is False.
      CheckpointError: there is no checkpoint, its weights are not those of `like`, or the folder cannot be written.
      DamagedError: the checkpoint is not whole.
    """
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int | float) or shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes!r}: a positive number is needed")
    kind = None if dtype is None else export_dtype(dtype).name
    base = open_weights(like)
    with write_atomically(out) as output, open_checkpoint(checkpoint) as saved:
        leaves = _leaves(saved)
        adapters = {name for name in leaves if ADAPTER in name}
        if adapters and not merge_lora:
            raise ValueError(
                f"{saved.folder} holds adapters beside {len(adapters) // 2} projections: merge them by merge_lora=True, or "
                "write them alone by zerojax.export_peft"
            )
        if merge_lora and not adapters:
            raise ValueError(f"merge_lora=True, and {saved.folder} holds no adapters")
        lora = lora_of(saved) if adapters else None
        sources = _sources(saved, base, leaves, like, families)
        tensors = {n: Tensor(base.tensors[n].shape, kind or base.tensors[n].dtype) for n in sources}
        writer = _Writer(saved, base, leaves, sources, tensors, None if lora is None else lora.scale)
        with explaining(f"writing {output}"):
            os.mkdir(output)
            _write_shards(output, tensors, writer.pieces, shard_bytes)
            _copy_others(os.fspath(like), output, kind)


def lora_of(saved: SavedState) -> Lora:
    """Return the adapters that a checkpoint's model has.

    Raises:
      CheckpointError: the checkpoint does not tell.
    """
    told: Any = saved.about.get("lora")
    try:
        return Lora(**{**told, "targets": tuple(told["targets"])})
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{saved.folder} does not tell the rank and scale of its adapters, {told!r}: it was not saved of a model of "
            "zerojax.hf.model_of"
        ) from error


def _leaves(saved: SavedState) -> dict[str, tuple[str, bool]]:
    """Return the weights of a checkpoint by the names that files have, each with its name there and whether it is encoded."""
    found: dict[str, tuple[str, bool]] = {}
    for name in saved.leaves:
        if name.startswith("weights"):
            whole, mark, _ = name.partition(ENCODED)
            found[".".join(path_of(whole))] = (whole, bool(mark))
    return found


def _sources(
    saved: SavedState,
    base: WeightFile,
    leaves: Mapping[str, tuple[str, bool]],
    like: str | os.PathLike[str],
    families: Mapping[str, Family],
) -> dict[str, _Source]:
    """Return the parameter of each tensor that is written.

    Raises:
      CheckpointError: one has none, or its shape differs, or a weight is no tensor of `like`: the first are named.
    """
    is_tiled = any(saved.leaves[leaf].is_tiled for leaf, is_encoded in leaves.values() if not is_encoded)
    place_of = renaming(names_of(like, families, is_tiled=is_tiled))
    places = {name: found for name in base.tensors if (found := place_of(name)) is not None}
    sources: dict[str, _Source] = {}
    differences: list[str] = []
    frozen, layers = saved.frozen, _num_layers(places)
    for name, place in places.items():
        shape = base.tensors[name].shape
        if base.tensors[name].dtype not in ("float64", "float32", "float16", "bfloat16"):
            differences.append(f"{name} of {base.tensors[name].dtype} in {like}, which is no floating dtype that is written")
            continue
        shape = shape if place.axes is None else tuple(shape[axis] for axis in place.axes)
        shape = shape if place.layer is None else (layers, *shape)
        if place.name not in leaves:
            differences.append(f"no {place.name}, which is {name} {list(base.tensors[name].shape)} there")
            continue
        leaf, is_encoded = leaves[place.name]
        source = sources[name] = _Source(leaf, place, shape, is_encoded or leaf in frozen, is_encoded)
        try:
            # The shape of an encoded weight is in no file of the checkpoint: its arrays are those of its blocks.
            if not is_encoded and saved.leaves[leaf].shape != shape:
                _retiled(saved, source)
        except ValueError:
            differences.append(f"{place.name} {list(saved.leaves[leaf].shape)}, and {name} there makes it {list(shape)}")
    used = {place.name for place in places.values()}
    extra = sorted(name for name in leaves if name not in used and ADAPTER not in name)
    differences += [f"{name}, which is no tensor there" for name in extra]
    if differences:
        raise CheckpointError(f"{saved.folder} is of another model than {os.fspath(like)}. It holds: {first_few(differences)}")
    return sources


def _num_layers(places: Mapping[str, Place]) -> int:
    return 1 + max((place.layer for place in places.values() if place.layer is not None), default=-1)


def _retiled(saved: SavedState, source: _Source) -> Any:
    """Return how to read a weight in tiles as a whole one.

    Raises:
      ValueError: the shapes do not fit.
    """
    leaf = saved.leaves[source.leaf]
    shapes = {name: other.shape for name, other in saved.leaves.items()}
    return retiled(
        leaf.shape, source.shape, stacked=source.place.layer is not None, tiled=(leaf.is_tiled, False),
        is_mlp=of_mlp(source.leaf, shapes),
    )  # fmt: skip


class _Writer:
    """Reads tensors of the folder that is written."""

    def __init__(
        self,
        saved: SavedState,
        base: WeightFile,
        leaves: Mapping[str, tuple[str, bool]],
        sources: Mapping[str, _Source],
        tensors: Mapping[str, Tensor],
        scale: float | None,
    ) -> None:
        self._saved, self._base, self._leaves, self._sources = saved, base, leaves, sources
        self._tensors, self._scale = tensors, scale

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's rows, some at a time, in the dtype in which it is written."""
        shape, kind = self._tensors[name].shape, numpy_dtype(self._tensors[name].dtype)
        row = max(1, math.prod(shape[1:])) * 4
        step = max(1, PIECE_BYTES // row)
        for start in range(0, shape[0], step):
            box = ((start, min(start + step, shape[0])), *((0, n) for n in shape[1:]))
            piece = self._piece(name, box)
            try:
                with np.errstate(over="raise"):
                    yield np.ascontiguousarray(piece, kind)
            except FloatingPointError as error:
                raise CheckpointError(f"{name} holds numbers that {kind.name} does not reach: use bfloat16") from error

    def _piece(self, name: str, box: Box) -> np.ndarray:
        """Return a box of a tensor: float32, or the folder's own numbers."""
        source = self._sources[name]
        delta = self._delta(source, box)
        if source.is_encoded:
            weight = self._base.read(name, box)
        else:
            weight = self._weight(source, box)
            if source.is_frozen:
                there = np.asarray(self._base.read(name, box))
                weight = np.where(there.astype(weight.dtype) == weight, there.astype(there.dtype), weight.astype(there.dtype))
        return weight if delta is None else np.asarray(weight, np.float32) + delta

    def _weight(self, source: _Source, box: Box) -> np.ndarray:
        """Return a box of a tensor from the checkpoint, in the dtype in which it was saved."""
        axes = source.place.axes or tuple(range(len(box)))
        front = () if source.place.layer is None else ((source.place.layer, source.place.layer + 1),)
        here = front + tuple(box[axis] for axis in axes)
        kind = numpy_dtype(self._saved.leaves[source.leaf].dtype)
        out = np.empty([b - a for a, b in here], kind)
        if self._saved.leaves[source.leaf].shape == source.shape:
            read_part(self._saved, source.leaf, here, out)
        else:
            _retiled(self._saved, source).read(self._saved.records, source.leaf, here, out)
        part = out[0] if front else out
        return part.transpose(np.argsort(axes))

    def _delta(self, source: _Source, box: Box) -> np.ndarray | None:
        """Return what the adapter beside a weight adds to a box of its tensor, or None."""
        stem, _, ending = source.place.name.rpartition(".")
        names = [f"{stem}{ADAPTER}{part}" for part in "ab"]
        if ending != "kernel" or names[0] not in self._leaves:
            return None
        layer = source.place.layer
        a, b = (adapter(self._saved, self._leaves[name][0], layer) for name in names)  # [in, r], [r, out]
        (out_start, out_stop), (in_start, in_stop) = box
        assert self._scale is not None
        return (a[in_start:in_stop] @ b[:, out_start:out_stop]).T * np.float32(self._scale)


def adapter(saved: SavedState, leaf: str, layer: int | None) -> np.ndarray:
    """Return one layer of an adapter's matrix, in float32."""
    shape = saved.leaves[leaf].shape
    front = () if layer is None else ((layer, layer + 1),)
    box = front + tuple((0, n) for n in shape[len(front) :])
    out = np.empty([b - a for a, b in box], np.float32)
    read_part(saved, leaf, box, out)
    return out[0] if front else out


def _write_shards(
    folder: str, tensors: Mapping[str, Tensor], pieces: Callable[[str], Iterator[np.ndarray]], shard_bytes: float
) -> None:
    """Write tensors as one file, or as several and their index."""
    sizes = {n: math.prod(t.shape) * numpy_dtype(t.dtype).itemsize for n, t in tensors.items()}
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if used + size > shard_bytes and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    count = len(shards)
    files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)] if count > 1 else ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        # transformers asks which framework wrote a file, and takes "pt" for its own.
        write_safetensors(os.path.join(folder, file), {n: tensors[n] for n in names}, pieces, {"format": "pt"})
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        with open(os.path.join(folder, INDEX_NAME), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


def _copy_others(like: str, folder: str, dtype: str | None) -> None:
    """Copy what a folder holds beside weights; its config tells the dtype that they have now."""
    for name in sorted(os.listdir(like)):
        path = os.path.join(like, name)
        if os.path.isfile(path) and not name.startswith(".") and not name.endswith(_WEIGHTS) and name not in _ADAPTER_FILES:
            shutil.copyfile(path, os.path.join(folder, name))
    if dtype is not None:
        config = read_config(like)
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        with open(os.path.join(folder, CONFIG), "w", encoding="utf-8") as out:
            json.dump(config, out, indent=2)


def export_peft(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str],
    dtype: Any = None,
    families: Mapping[str, Family] = FAMILIES,
) -> None:
    """Write the adapters of a checkpoint as a folder that `peft.PeftModel.from_pretrained` loads.

    It holds `adapter_model.safetensors` and `adapter_config.json`; the base is not written.

    Args:
      checkpoint: as of `export_hf`.
      out: folder to write; nothing may be there.
      like: the folder of the base, whose names the adapters follow.
      dtype: of the adapters; None: float32.
      families: as of `zerojax.hf.model_of`.

    Raises:
      ValueError: `out` exists, another dtype, the model of `like` is not built, or other weights than adapters were trained.
      CheckpointError: there is no checkpoint, or it has no adapters.
      DamagedError: the checkpoint is not whole.
    """
    kind = export_dtype(dtype)
    table = names_of(like, families, is_tiled=False)
    with write_atomically(out) as output, open_checkpoint(checkpoint) as saved:
        leaves = {name: leaf for name, (leaf, _) in _leaves(saved).items() if ADAPTER in name}
        if not leaves:
            raise CheckpointError(f"{saved.folder} holds no adapters: zerojax.export_hf writes its weights")
        frozen, whole = saved.frozen, _leaves(saved)
        trained = [n for n, (leaf, is_encoded) in whole.items() if n not in leaves and not is_encoded and leaf not in frozen]
        if trained:
            raise ValueError(
                f"{saved.folder} holds weights that were trained beside the adapters: {first_few(sorted(trained))}. PEFT's "
                "file would be without them: write all by zerojax.export_hf(merge_lora=True)"
            )
        lora = lora_of(saved)
        found: dict[str, tuple[str, int]] = {}
        for there, here in table.items():
            stem = "" if here is None or isinstance(here, str) else here[0].removesuffix(".kernel")
            for part, letter in (("a", "A"), ("b", "B")):
                if (leaf := leaves.get(f"{stem}{ADAPTER}{part}")) is not None:
                    module = f"base_model.model.{there.removesuffix('.weight')}.lora_{letter}.weight"
                    found |= {module.replace("{layer}", str(n)): (leaf, n) for n in range(saved.leaves[leaf].shape[0])}
        shapes = {name: saved.leaves[leaf].shape[:0:-1] for name, (leaf, _) in found.items()}  # transposed
        _check_beside(shapes, like, saved)
        tensors = {name: Tensor(shapes[name], kind.name) for name in sorted(found)}

        def pieces(name: str) -> Iterator[np.ndarray]:
            yield np.ascontiguousarray(adapter(saved, *found[name]).T, kind)

        with explaining(f"writing {output}"):
            os.mkdir(output)
            write_safetensors(os.path.join(output, _ADAPTER_FILES[1]), tensors, pieces, {"format": "pt"})
            with open(os.path.join(output, _ADAPTER_FILES[0]), "w", encoding="utf-8") as file:
                json.dump(_peft_config(lora, os.fspath(like)), file, indent=2)


def _check_beside(shapes: Mapping[str, tuple[int, ...]], like: str | os.PathLike[str], saved: SavedState) -> None:
    """Raise CheckpointError where adapters, A[r, in] and B[out, r], do not stand beside matrices [out, in] of a folder."""
    base = open_weights(like).tensors
    wrong = []
    for name, shape in shapes.items():
        module, _, part = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        there = base[f"{module}.weight"].shape if f"{module}.weight" in base else ()
        if len(there) != 2 or shape[part == "A"] != there[part == "A"]:
            wrong.append(f"lora_{part} {list(shape)} beside {module}.weight {list(there) or 'which is not there'}")
    if wrong:
        raise CheckpointError(f"{saved.folder} is of another model than {os.fspath(like)}: {first_few(wrong)}")


def _peft_config(lora: Lora, base: str) -> dict[str, Any]:
    """Return what PEFT reads of adapters."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": list(lora.targets), "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
