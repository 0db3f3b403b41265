"""Export a checkpoint's weights as a Hugging Face folder.

The names, layouts and dtypes are taken from the folder `like`, which the weights came from.

    tensor of `like` [out, in]   <-   record [in, out] of one layer, transposed, or some of its rows
    merge_lora:                  <-   W^T + s (A B)^T, in float32; with DoRA, scaled to its norms

As in an import, the table of names gives the parameter for each tensor of `like`. The tensor is
written piece by piece from the checkpoint's records, without a program, model or device.

Training never wrote frozen weights. So where the checkpoint's number equals the folder's, rounded
to the checkpoint's dtype, the folder's number is written. The folder's numbers are also written for
quantized weights, because an adapter belongs to the base that it was trained on. For this reason
frozen weights are compared with the folder (`zerojax.hf.base`): a sample of each tensor before
anything is written, and all of each tensor as it is written.

A different base is an error for 16-bit and 32-bit weights too. The checkpoint has their numbers,
but names, dtypes, config and tokenizer would be another model's, and untrained weights would no
longer have the folder's bits.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from host_offload.disk import Box, numpy_dtype
from zerojax.checkpoint import CheckpointError, SavedState, about_difference, explaining, first_few
from zerojax.hf.adapters.lora import Lora
from zerojax.hf.adapters.peft import PREFIX, peft_config, peft_name
from zerojax.hf.adapters.start import Remainder, find_adapted
from zerojax.hf.base import check_base, is_rounded, other_base
from zerojax.hf.beside import ADAPTER_FILES, copy_beside, end_tokens, files_beside
from zerojax.hf.config import CONFIG, Family
from zerojax.hf.importing import ADAPTER, STACK, check_config_sizes, map_names
from zerojax.hf.model import DECODER, config_of
from zerojax.hf.names import FAMILIES
from zerojax.hf.sources import Source, cut_rows, map_leaves, map_sources, read_adapter, read_weight
from zerojax.sharding import without_mesh
from zerojax.user_values import positive_number
from zerojax.weights import (
    INDEX_NAME,
    Tensor,
    WeightFile,
    export_dtype,
    open_checkpoint,
    open_weights,
    renaming,
    write_atomically,
    write_safetensors,
)

PIECE_BYTES = 256 * 2**20
"""Maximum float32 bytes per piece of a tensor: large, so that few transposed tensors are cut."""


@without_mesh
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
    """Write a checkpoint's weights as a folder for `AutoModelForCausalLM.from_pretrained`.

        zj.export_hf("runs/llama/checkpoints", "llama-tuned", like="Llama-3.1-8B")

    Call this in one process only. It holds at most a few hundred MB of a weight at a time. The only
    device it uses is the CPU, which quantizes the folder's numbers again to compare them with a
    quantized base.

    Args:
      checkpoint: folder of one step of a `Checkpointer`, or the checkpointer's directory, of which
        the newest complete step is used.
      out: path of the folder to write; it must not exist.
      like: path of the folder that the weights were imported from. It provides the names and dtypes
        of `out`, and the files next to the weights, such as `config.json` and the tokenizer's
        files. Links are followed within the folder, and from a snapshot of the hub's cache to its
        blobs. Its weights are compared with the frozen weights.
      dtype: float32, float16, bfloat16 or float64; None: the dtype of each tensor in `like`.
      shard_bytes: maximum bytes per file, exceeded only by a single larger tensor.
      merge_lora: whether to add adapters to the weights that they adapt. A checkpoint with adapters
        needs this, or `export_peft`.
      families: model families by `model_type`, as for `zerojax.hf.model_of`.

    Raises:
      ValueError: `out` exists, an option does not fit, the model of `like` is not supported, or the
        checkpoint has adapters and `merge_lora` is False. Or a file of `like` cannot be copied, or
        its `generation_config.json` is invalid; these are found before anything is written.
      CheckpointError: there is no checkpoint, it holds another model than `like` or was trained on
        another base, the `config.json` of `like` has other sizes than its weights (the error names
        the key), or the folder cannot be written. The error names the first tensors that differ.
      DamagedError: the checkpoint is incomplete or damaged.
    """
    shard_bytes = positive_number("shard_bytes", shard_bytes)
    kind = None if dtype is None else export_dtype(dtype).name
    like = os.path.expanduser(os.fspath(like))
    base = open_weights(like)
    # Check these first: otherwise they would fail after all weights were written, or leave a folder
    # that transformers cannot use.
    extra_files = files_beside(like)
    end_tokens(like)
    with write_atomically(out) as output, open_checkpoint(checkpoint) as saved:
        leaves = map_leaves(saved)
        lora = _lora_to_merge(saved, leaves, merge_lora)
        base = _with_start(base, lora, like, families)
        sources = _sources(saved, base, leaves, like, families)
        if lora is not None:
            _check_mergeable(lora, leaves)
        dtypes = {n: kind or tensor.dtype for n, tensor in open_weights(like).tensors.items()}
        tensors = {n: Tensor(base.tensors[n].shape, dtypes[n]) for n in sources}
        writer = _Writer(saved, base, like, leaves, sources, tensors, lora)
        with explaining(f"writing {output}"):
            os.mkdir(output)
            _write_shards(output, tensors, writer.pieces, shard_bytes)
            copy_beside(extra_files, output, dtype=kind)


def _lora_to_merge(
    saved: SavedState, leaves: Mapping[str, tuple[str, bool]], merge_lora: bool
) -> Lora | None:
    """Return the options of a checkpoint's adapters, or None if it has none.

    Raises:
      ValueError: `merge_lora` does not fit the checkpoint.
      CheckpointError: the checkpoint does not record the options.
    """
    adapters = {name for name in leaves if name.endswith(f"{ADAPTER}a")}
    if adapters and not merge_lora:
        raise ValueError(
            f"{saved.folder} holds adapters for {len(adapters)} projections: merge them "
            "by merge_lora=True, or write only the adapters by zerojax.export_peft"
        )
    if merge_lora and not adapters:
        raise ValueError(
            f"merge_lora=True, but {saved.folder} holds no adapters: leave merge_lora out"
        )
    return read_lora(saved, leaves) if adapters else None


def read_lora(saved: SavedState, leaves: Mapping[str, tuple[str, bool]]) -> Lora:
    """Return the adapters' options of a checkpoint's model.

    Raises:
      CheckpointError: it has no adapters, or does not record their options.
    """
    if not any(ADAPTER in name for name in leaves):
        raise CheckpointError(
            f"{saved.folder} holds no adapters: write its weights by zerojax.export_hf"
        )
    options: Any = saved.about.get("lora")
    try:
        return Lora(**{**options, "targets": tuple(options["targets"])})
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{saved.folder} does not record the rank and scale of its adapters, {options!r}: it "
            "was not saved from a model of zerojax.hf.model_of"
        ) from error


def _check_mergeable(lora: Lora, leaves: Mapping[str, tuple[str, bool]]) -> None:
    """Raise ValueError if merging an embedding's adapter would change the head, too."""
    if "embed_tokens" in lora.targets and "head.lm_head.embedding" not in leaves:
        raise ValueError(
            "the head is tied to the embedding, and the adapter of embed_tokens changes only the "
            "embedding: write the adapters by zerojax.export_peft"
        )


def _with_start(
    base: WeightFile,
    lora: Lora | None,
    like: str | os.PathLike[str],
    families: Mapping[str, Family],
) -> WeightFile:
    """Return a folder's weights as the base of the adapters, without what PiSSA subtracts."""
    if lora is None or lora.init == "default":
        return base
    return Remainder(base, renaming(map_names(like, families, is_tiled=False)), lora)


def _sources(
    saved: SavedState,
    base: WeightFile,
    leaves: Mapping[str, tuple[str, bool]],
    like: str | os.PathLike[str],
    families: Mapping[str, Family],
) -> dict[str, Source]:
    """Return the parameter of each tensor of a folder, after comparing config and frozen weights.

    Only a sample of the frozen weights is compared.

    Raises:
      CheckpointError: the folder holds another model or another base; the error names the
        difference.
    """
    sources = map_sources(saved, base, leaves, like, families)
    check_config_sizes(like, base, families, is_whole=True)
    about = {DECODER: config_of(like, families).computes()}
    difference = about_difference(about, saved.about)
    if difference:
        raise CheckpointError(
            f"{saved.folder} was trained with {difference[0]}, but "
            f"{os.path.join(os.fspath(like), CONFIG)} has {difference[1]}: pass the folder that it "
            "was trained from as `like`"
        )
    check_base(saved, base, sources, like, all_numbers=False)
    return sources


class _Writer:
    """Computes the tensors of the exported folder."""

    def __init__(
        self,
        saved: SavedState,
        base: WeightFile,
        like: str,
        leaves: Mapping[str, tuple[str, bool]],
        sources: Mapping[str, Source],
        tensors: Mapping[str, Tensor],
        lora: Lora | None = None,
    ) -> None:
        """Take the checkpoint, the base and its path, the tensors to write, and the adapters."""
        self._saved = saved
        self._base = base
        self._like = like
        self._leaves = leaves
        self._sources = sources
        self._tensors = tensors
        self._lora = lora

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's rows piece by piece, in the dtype in which they are written."""
        shape = self._tensors[name].shape
        kind = numpy_dtype(self._tensors[name].dtype)
        source = self._sources[name]
        if source.layout is not None:
            check_base(self._saved, self._base, {name: source}, self._like, all_numbers=True)
        for rows in cut_rows(shape, PIECE_BYTES // 4):
            box = (rows, *((0, n) for n in shape[1:]))
            piece = self._piece(name, box)
            try:
                with np.errstate(over="raise"):
                    yield np.ascontiguousarray(piece, kind)
            except FloatingPointError as error:
                raise CheckpointError(
                    f"{name} holds numbers beyond the range of {kind.name}: use bfloat16"
                ) from error

    def _piece(self, name: str, box: Box) -> np.ndarray:
        """Return a box of a tensor, in float32 or with the folder's own numbers."""
        source = self._sources[name]
        delta = self._delta(source, box)
        if source.layout is not None:
            weight = self._base.read(name, box)
        else:
            weight = read_weight(self._saved, source, box)
            if source.is_frozen:
                base_weight = np.asarray(self._base.read(name, box))
                if not is_rounded(weight, base_weight):
                    raise other_base(self._like, self._saved, [name])
                weight = np.where(
                    base_weight.astype(weight.dtype) == weight,
                    base_weight.astype(base_weight.dtype),
                    weight.astype(base_weight.dtype),
                )
        if delta is None:
            return weight
        weight = np.asarray(weight, np.float32) + delta
        magnitudes = self._leaves.get(f"{_adapted_stem(source.place.name)}{ADAPTER}m")
        if magnitudes is None:
            return weight
        # A box has complete rows [out, in], whose norms are the norms of the columns here.
        norms = np.linalg.norm(weight.astype(np.float64), axis=1)
        wanted = read_adapter(self._saved, magnitudes[0], source.place.layer)
        factors = wanted[slice(*box[0])] / norms
        return weight * factors.astype(np.float32)[:, None]

    def _delta(self, source: Source, box: Box) -> np.ndarray | None:
        """Return what a weight's adapter adds to a box of its tensor; None if it has none."""
        stem = _adapted_stem(source.place.name)
        names = [f"{stem}{ADAPTER}{matrix}" for matrix in "ab"]
        if names[0] not in self._leaves:
            return None
        layer = source.place.layer
        a = read_adapter(self._saved, self._leaves[names[0]][0], layer)  # [in, r]
        b = read_adapter(self._saved, self._leaves[names[1]][0], layer)  # [r, out]
        assert self._lora is not None
        scale = np.float32(self._lora.scale)
        rows, columns = (slice(*ends) for ends in box)
        if stem.endswith("embed_tokens"):  # [in, out], as in the file
            return (a[rows] @ b[:, columns]) * scale
        return (a[columns] @ b[:, rows]).T * scale


def _adapted_stem(name: str) -> str:
    """Return the name of the module whose adapter changes a parameter; "" if it is no matrix."""
    stem, _, ending = name.rpartition(".")
    if ending in ("kernel", "embedding"):
        return stem
    # The weights of a tiled MLP have the names of their projections.
    return f"{name}_proj" if ending in ("gate", "up", "down") else ""


def _write_shards(
    folder: str,
    tensors: Mapping[str, Tensor],
    pieces: Callable[[str], Iterator[np.ndarray]],
    shard_bytes: float,
) -> None:
    """Write tensors as one file, or as several files with an index."""
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
    files = ["model.safetensors"]
    if count > 1:
        files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for file, names in zip(files, shards, strict=True):
        # transformers checks which framework wrote a file, and treats "pt" as its own.
        write_safetensors(
            os.path.join(folder, file), {n: tensors[n] for n in names}, pieces, {"format": "pt"}
        )
    if count > 1:
        weight_map: dict[str, str] = {}
        for file, names in zip(files, shards, strict=True):
            weight_map |= dict.fromkeys(names, file)
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        with open(os.path.join(folder, INDEX_NAME), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


@without_mesh
def export_peft(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str],
    dtype: Any = None,
    families: Mapping[str, Family] = FAMILIES,
) -> None:
    """Write the adapters of a checkpoint as a folder for `peft.PeftModel.from_pretrained`.

    The folder holds `adapter_model.safetensors`, and `adapter_config.json`, which names `like` as
    the base by its absolute path. The base is not written, except for `modules_to_save`. Only a
    sample of each tensor of `like` is compared with the base in the checkpoint.

    With `init="pissa"`, the base of training is `like` without the first adapters, s A0 B0. The
    folder has adapters of twice the rank for the original base, [A, A0] and [B; -B0].

    Args:
      checkpoint: folder of one step of a `Checkpointer`, or the checkpointer's directory, of which
        the newest complete step is used.
      out: path of the folder to write; it must not exist.
      like: path of the base's folder, which determines the adapters' names.
      dtype: dtype of the adapters; None: float32.
      families: model families by `model_type`, as for `zerojax.hf.model_of`.

    Raises:
      ValueError: `out` exists, `dtype` is not supported, the model of `like` is not supported, or
        weights other than adapters were trained.
      CheckpointError: there is no checkpoint, it has no adapters, they were trained on another base
        than `like`, or the `config.json` of `like` has other sizes than its weights (the error
        names the key).
      DamagedError: the checkpoint is incomplete or damaged.
    """
    kind = export_dtype(dtype)
    like = os.path.expanduser(os.fspath(like))
    table = map_names(like, families, is_tiled=False)
    with write_atomically(out) as output, open_checkpoint(checkpoint) as saved:
        leaves = map_leaves(saved)
        lora = read_lora(saved, leaves)
        base = open_weights(like)
        matrices = _peft_matrices(saved, leaves, lora, base, table)
        trained = _check_trained(saved, leaves, lora, table)
        _check_beside(matrices, base, like, saved)
        check_config_sizes(like, base, families, is_whole=True)
        started = _with_start(base, lora, like, families)
        sources: dict[str, Source] = {}
        if any(ADAPTER not in name for name in leaves):  # else a checkpoint of adapters alone
            sources = _sources(saved, started, leaves, like, families)
        tensors = {name: Tensor(matrices[name].shape, kind.name) for name in sorted(matrices)}
        for name in sorted(sources):
            if sources[name].place.name in trained:
                tensors[f"{PREFIX}{name}"] = Tensor(base.tensors[name].shape, kind.name)
        kinds = {name: Tensor(tensor.shape, kind.name) for name, tensor in base.tensors.items()}
        writer = _Writer(saved, started, like, leaves, sources, kinds)

        def pieces(name: str) -> Iterator[np.ndarray]:
            if name not in matrices:
                yield from writer.pieces(name.removeprefix(PREFIX))
                return
            matrix = matrices[name]
            values = read_adapter(saved, matrix.leaf, matrix.layer).T
            if isinstance(started, Remainder) and matrix.kind != "lora_m":
                a, b = started.factors(matrix.tensor)
                first = a.T if matrix.kind == "lora_a" else -b.T
                values = np.concatenate([values, first], matrix.rank_dim)
            yield np.ascontiguousarray(values, kind)

        with explaining(f"writing {output}"):
            os.mkdir(output)
            write_safetensors(
                os.path.join(output, ADAPTER_FILES[1]), tensors, pieces, {"format": "pt"}
            )
            with open(os.path.join(output, ADAPTER_FILES[0]), "w", encoding="utf-8") as file:
                json.dump(peft_config(lora, os.path.abspath(like)), file, indent=2)


def _check_trained(
    saved: SavedState,
    leaves: Mapping[str, tuple[str, bool]],
    lora: Lora,
    table: Mapping[str, Any],
) -> set[str]:
    """Return the names of the parameters that were trained in full, as `modules_to_save` says.

    Raises:
      ValueError: other weights were trained too.
    """
    place_of = renaming(table)
    expected = set[str]()
    for pattern in table:
        place = place_of(pattern.replace("{layer}", "0"))
        if place is not None and lora.saves(pattern.replace("{layer}", "0").rpartition(".")[0]):
            expected.add(place.name)
    trained = {
        name
        for name, (leaf, is_encoded) in leaves.items()
        if ADAPTER not in name and not is_encoded and leaf not in saved.frozen
    }
    others = sorted(trained - expected)
    if others:
        raise ValueError(
            f"{saved.folder} holds trained weights in addition to the adapters: "
            f"{first_few(others)}. PEFT's file would lack them: write everything by "
            "zerojax.export_hf(merge_lora=True), or train with modules_to_save= of the Lora"
        )
    return trained


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A tensor of PEFT's file.

    Attributes:
      tensor: name of the adapted tensor in the base.
      kind: "lora_a", "lora_b" or "lora_m".
      leaf: leaf of the checkpoint that holds it.
      layer: its layer, or None if the leaf is not stacked.
      shape: its shape in PEFT's file.
      base_dim: dim of the adapted tensor that is as large as the matrix's other dim.
    """

    tensor: str
    kind: str
    leaf: str
    layer: int | None
    shape: tuple[int, ...]
    base_dim: int

    @property
    def rank_dim(self) -> int:
        """Dim of the rank: A is [r, in], and B [out, r]."""
        return int(self.kind == "lora_b")

    @property
    def size(self) -> int:
        """Size of the dim that is not the rank."""
        return self.shape[-1 if self.kind == "lora_a" else 0]


def _peft_matrices(
    saved: SavedState,
    leaves: Mapping[str, tuple[str, bool]],
    lora: Lora,
    base: WeightFile,
    table: Mapping[str, Any],
) -> dict[str, _Matrix]:
    """Return what each tensor of PEFT's file holds, by its name.

    Args:
      saved: checkpoint.
      leaves: weights of the checkpoint, as `map_leaves` returns them.
      lora: options of its adapters.
      base: weights of the folder.
      table: parameter for each tensor name of the base, as `map_names` returns it.

    Raises:
      CheckpointError: the folder lacks a matrix that has an adapter.
    """
    place_of = renaming(table)
    adapted = find_adapted(base, place_of, lora)
    patterns: dict[str, str] = {}
    for pattern in table:
        place = place_of(pattern.replace("{layer}", "0"))
        if place is not None and pattern.endswith(".weight"):
            patterns[place.name.rpartition(".")[0]] = pattern
    matrices: dict[str, _Matrix] = {}
    missing = []
    for name in sorted(leaves):
        stem, _, letter = name.partition(ADAPTER)
        if not letter:
            continue
        leaf = leaves[name][0]
        shape = saved.leaves[leaf].shape
        members = adapted.get(stem, {})
        is_stacked = stem.startswith(STACK)
        layers = range(shape[0]) if is_stacked else [None]
        for layer in layers:
            if layer not in members:
                tensor = patterns.get(stem, stem).replace("{layer}", str(layer))
                missing.append(f"adapters for {tensor} which does not exist")
                continue
            tensor = members[layer]
            kind = f"lora_{letter}"
            is_turned = stem.endswith("embed_tokens")
            matrix = _Matrix(
                tensor,
                kind,
                leaf,
                layer,
                _doubled(shape[is_stacked:][::-1], kind, lora),
                int((kind == "lora_a") != is_turned),
            )
            matrices[peft_name(tensor.removesuffix(".weight"), kind)] = matrix
    if missing:
        raise CheckpointError(
            f"{saved.folder} holds another model than {base.path}: {first_few(missing)}"
        )
    return matrices


def _doubled(shape: tuple[int, ...], kind: str, lora: Lora) -> tuple[int, ...]:
    """Return the shape of a matrix in PEFT's file, with twice the rank after PiSSA's start."""
    if lora.init == "default" or kind == "lora_m":
        return shape
    return tuple(2 * n if dim == (kind == "lora_b") else n for dim, n in enumerate(shape))


def _check_beside(
    matrices: Mapping[str, _Matrix],
    base: WeightFile,
    like: str | os.PathLike[str],
    saved: SavedState,
) -> None:
    """Raise CheckpointError if adapters A[r, in] and B[out, r] do not fit a folder's [out, in]."""
    wrong = []
    for matrix in matrices.values():
        shape = base.tensors[matrix.tensor].shape
        if len(shape) != 2 or shape[matrix.base_dim] != matrix.size:
            letter = matrix.kind[-1].upper()
            wrong.append(f"lora_{letter} {list(matrix.shape)} for {matrix.tensor} {list(shape)}")
    if wrong:
        raise CheckpointError(
            f"{saved.folder} holds another model than {os.fspath(like)}: {first_few(wrong)}"
        )
