"""Export a checkpoint's weights as a Hugging Face folder.

The names, layouts and dtypes are taken from the folder `like`, which the weights came from.

    tensor of `like` [out, in]   <-   record [in, out] of one layer, transposed, or some of its rows
    merge_lora:                  <-   W^T + s (A B)^T, in float32; with DoRA, scaled to its norms

As in an import, the table of names gives the parameter for each tensor of `like`, or for each part
of it. The tensor is written piece by piece from the checkpoint's records, without a program, model
or device.

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
from zerojax.hf.adapters.start import (
    Remainder,
    Table,
    adapted_stem,
    build_names,
    find_adapted,
    module_at,
)
from zerojax.hf.base import check_base, is_rounded, other_base
from zerojax.hf.beside import ADAPTER_FILES, copy_beside, end_tokens, files_beside
from zerojax.hf.config import CONFIG, Family, open_folder
from zerojax.hf.importing import ADAPTER, check_config_sizes, is_of_experts, map_names
from zerojax.hf.mixtures.stacks import BLOCKS
from zerojax.hf.model import DECODER, config_of, read_family
from zerojax.hf.names import FAMILIES
from zerojax.hf.sources import Source, cut_rows, map_leaves, map_sources, read_adapter, read_weight
from zerojax.sharding import without_mesh
from zerojax.user_values import positive_number
from zerojax.weights import (
    DTYPES,
    INDEX_NAME,
    DividedFile,
    Place,
    Tensor,
    WeightFile,
    build_places,
    export_dtype,
    open_checkpoint,
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
    ema: bool = False,
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
      ema: whether to write the averages of `zerojax.Ema` or of `zerojax.schedule_free_adamw` in
        place of the trained weights.
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
    base = open_folder(like)
    # Check these first: otherwise they would fail after all weights were written, or leave a folder
    # that transformers cannot use.
    extra_files = files_beside(like)
    end_tokens(like)
    with write_atomically(out) as output, open_checkpoint(checkpoint) as saved:
        leaves = map_leaves(saved, ema)
        lora = _lora_to_merge(saved, leaves, merge_lora)
        divided = _divided(saved, base, leaves, lora, like, families)
        sources = _sources(saved, base, divided, leaves, like, families)
        if lora is not None:
            _check_mergeable(lora, leaves)
        tensors = {
            n: Tensor(base.tensors[n].shape, kind or base.tensors[n].dtype) for n in divided.parts
        }
        others = _others(base, like, families)
        writer = _Writer(saved, divided, like, leaves, sources, tensors, lora)

        def pieces(name: str) -> Iterator[np.ndarray]:
            return _copied(base, name) if name in others else writer.pieces(name)

        with explaining(f"writing {output}"):
            os.mkdir(output)
            _write_shards(output, tensors | others, pieces, shard_bytes)
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


def _divided(
    saved: SavedState,
    base: WeightFile,
    leaves: Mapping[str, tuple[str, bool]],
    lora: Lora | None,
    like: str | os.PathLike[str],
    families: Mapping[str, Family],
) -> DividedFile:
    """Return a folder's weights, with the parameters of a checkpoint's model as their places.

    With PiSSA's start they lack the factors that the adapters started from.
    """
    # Groups of experts have the names of experts in one group.
    is_tiled = any(
        saved.leaves[leaf].is_tiled
        for name, (leaf, is_encoded) in leaves.items()
        if not is_encoded and not is_of_experts(name)
    )
    table = map_names(like, families, is_tiled=is_tiled)
    if lora is None or lora.init == "default":
        return DividedFile(base, table)
    return Remainder(base, table, lora)


def _sources(
    saved: SavedState,
    base: WeightFile,
    divided: DividedFile,
    leaves: Mapping[str, tuple[str, bool]],
    like: str | os.PathLike[str],
    families: Mapping[str, Family],
) -> dict[str, Source]:
    """Return the parameter of each part of a folder's tensors.

    Config and frozen weights are compared first.

    Only a sample of the frozen weights is compared.

    Raises:
      CheckpointError: the folder holds another model or another base; the error names the
        difference.
    """
    sources = map_sources(saved, divided, leaves, like)
    check_config_sizes(like, base, families, is_whole=True)
    about = {DECODER: config_of(like, families).computes()}
    difference = about_difference(about, saved.about)
    if difference:
        raise CheckpointError(
            f"{saved.folder} was trained with {difference[0]}, but "
            f"{os.path.join(os.fspath(like), CONFIG)} has {difference[1]}: pass the folder that it "
            "was trained from as `like`"
        )
    check_base(saved, divided, sources, like, all_numbers=False)
    return sources


class _Writer:
    """Computes the tensors of the exported folder."""

    def __init__(
        self,
        saved: SavedState,
        base: DividedFile,
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
        for part in self._base.parts[name]:
            source = self._sources[part]
            if source.layout is not None:
                check_base(self._saved, self._base, {part: source}, self._like, all_numbers=True)
        for rows in cut_rows(shape, PIECE_BYTES // 4):
            box = (rows, *((0, n) for n in shape[1:]))
            piece = self._base.join(name, box, self._piece)
            try:
                with np.errstate(over="raise"):
                    yield np.ascontiguousarray(piece, kind)
            except FloatingPointError as error:
                raise CheckpointError(
                    f"{name} holds numbers beyond the range of {kind.name}: use bfloat16"
                ) from error

    def _piece(self, name: str, box: Box) -> np.ndarray:
        """Return a box of a tensor's part, in float32 or with the folder's own numbers."""
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
        magnitudes = self._leaves.get(f"{adapted_stem(source.place.name)}{ADAPTER}m")
        if magnitudes is None:
            return weight
        # A box has complete rows [out, in], whose norms are the norms of the columns here.
        norms = np.linalg.norm(weight.astype(np.float64), axis=1)
        wanted = read_adapter(self._saved, magnitudes[0], source.place.layer)
        factors = wanted[slice(*box[0])] / norms
        return weight * factors.astype(np.float32)[:, None]

    def _delta(self, source: Source, box: Box) -> np.ndarray | None:
        """Return what a weight's adapter adds to a box of its tensor; None if it has none."""
        stem = adapted_stem(source.place.name)
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


def _others(
    base: WeightFile, like: str | os.PathLike[str], families: Mapping[str, Family]
) -> dict[str, Tensor]:
    """Return the tensors of a folder that are not read, and that an export copies.

    Raises:
      CheckpointError: a tensor has a dtype that is not written.
    """
    family, config = read_family(like, families)
    places = build_places(family.table(config))
    others = {name: tensor for name, tensor in base.tensors.items() if not places(name)}
    for name, tensor in others.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{base.path}: {name} of {tensor.dtype} cannot be copied: only floating dtypes are "
                "written. Remove it from the files if the model does not need it"
            )
    return others


def _copied(file: WeightFile, name: str) -> Iterator[np.ndarray]:
    """Yield the rows of a tensor that is exported as it is in the folder."""
    shape = file.tensors[name].shape
    if not shape:
        yield np.asarray(file.read(name, ()))
        return
    for rows in cut_rows(shape, PIECE_BYTES // 4):
        yield np.ascontiguousarray(file.read(name, (rows, *((0, n) for n in shape[1:]))))


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
    ema: bool = False,
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
      ema: whether to write the averages of `zerojax.Ema` or of `zerojax.schedule_free_adamw` in
        place of the adapters.
      families: model families by `model_type`, as for `zerojax.hf.model_of`.

    Raises:
      ValueError: `out` exists, `dtype` is not supported, the model of `like` is not supported, it
        holds several adapted projections in one matrix, or weights other than adapters were
        trained.
      CheckpointError: there is no checkpoint, it has no adapters, they were trained on another base
        than `like`, or the `config.json` of `like` has other sizes than its weights (the error
        names the key).
      DamagedError: the checkpoint is incomplete or damaged.
    """
    kind = export_dtype(dtype)
    like = os.path.expanduser(os.fspath(like))
    table = map_names(like, families, is_tiled=False)
    with write_atomically(out) as output, open_checkpoint(checkpoint) as saved:
        leaves = map_leaves(saved, ema)
        lora = read_lora(saved, leaves)
        base = open_folder(like)
        untiled = DividedFile(base, table)
        trained = _check_trained(saved, leaves, lora, table)
        matrices = _peft_matrices(saved, leaves, lora, untiled, table)
        _check_beside(matrices, untiled, like, saved)
        check_config_sizes(like, base, families, is_whole=True)
        divided = _divided(saved, base, leaves, lora, like, families)
        sources: dict[str, Source] = {}
        if any(ADAPTER not in name for name in leaves):  # else a checkpoint of adapters alone
            sources = _sources(saved, base, divided, leaves, like, families)
        tensors = {name: Tensor(matrices[name].shape, kind.name) for name in sorted(matrices)}
        tensor_of = build_names(table)
        whole: dict[str, str] = {}
        for name, place in untiled.places.items():
            if place.name in trained:
                whole[f"{PREFIX}{tensor_of(place)}"] = name
        for name in sorted(whole):
            tensors[name] = Tensor(untiled.tensors[whole[name]].shape, kind.name)
        kinds = {name: Tensor(tensor.shape, kind.name) for name, tensor in base.tensors.items()}
        writer = _Writer(saved, divided, like, leaves, sources, kinds)

        def pieces(name: str) -> Iterator[np.ndarray]:
            if name in whole:
                yield from writer.pieces(whole[name])
                return
            matrix = matrices[name]
            values = read_adapter(saved, matrix.leaf, matrix.layer).T
            if isinstance(divided, Remainder) and matrix.kind != "lora_m":
                a, b = divided.factors(matrix.tensor)
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
    saved: SavedState, leaves: Mapping[str, tuple[str, bool]], lora: Lora, table: Table
) -> set[str]:
    """Return the names of the parameters that were trained in full, as `modules_to_save` says.

    Raises:
      ValueError: other weights were trained too, or PEFT knows the modules by other names.
    """
    tensor_of = build_names(table)
    expected = set[str]()
    for place in (place for places in table.values() for place in places):
        first = place if place.layer is not None else place._replace(layer=0)
        module = module_at(first)
        tensor = tensor_of(first)
        if lora.saves(module) != lora.saves(tensor.rpartition(".")[0]) or (
            lora.saves(module) and place.part is not None
        ):
            raise ValueError(
                f"modules_to_save={lora.modules_to_save!r}: the module {module} is {tensor} in "
                "transformers, so PEFT would save others: write everything by "
                "zerojax.export_hf(merge_lora=True)"
            )
        if lora.saves(module):
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
    base: DividedFile,
    table: Table,
) -> dict[str, _Matrix]:
    """Return what each tensor of PEFT's file holds, by its name.

    Args:
      saved: checkpoint.
      leaves: weights of the checkpoint, as `map_leaves` returns them.
      lora: options of its adapters.
      base: weights of the folder, for an untiled model.
      table: parameters for each tensor name of the base, as `map_names` returns them.

    Raises:
      ValueError: the base holds several projections in one matrix, for which PEFT has one adapter.
      CheckpointError: the folder lacks a matrix that has an adapter.
    """
    tensor_of = build_names(table)
    adapted = find_adapted(base.places, lora)
    matrices: dict[str, _Matrix] = {}
    missing = []
    for name in sorted(leaves):
        stem, _, letter = name.partition(ADAPTER)
        if not letter:
            continue
        _check_undivided(stem, table)
        leaf = leaves[name][0]
        shape = saved.leaves[leaf].shape
        members = adapted.get(stem, {})
        is_stacked = stem.startswith(BLOCKS)
        for layer in range(shape[0]) if is_stacked else [None]:
            place = Place(f"{stem}.{'kernel' if is_stacked else 'embedding'}", layer)
            if layer not in members:
                missing.append(f"adapters for {tensor_of(place)} which does not exist")
                continue
            kind = f"lora_{letter}"
            matrix = _Matrix(
                tensor=members[layer],
                kind=kind,
                leaf=leaf,
                layer=layer,
                shape=_doubled(shape[is_stacked:][::-1], kind, lora),
                base_dim=int((kind == "lora_a") != stem.endswith("embed_tokens")),
            )
            matrices[peft_name(tensor_of(place).removesuffix(".weight"), kind)] = matrix
    if missing:
        raise CheckpointError(
            f"{saved.folder} holds another model than {base.path}: {first_few(missing)}"
        )
    return matrices


def _check_undivided(stem: str, table: Table) -> None:
    """Raise ValueError if a module's matrix is a part of a tensor."""
    for tensor, places in table.items():
        stems = [adapted_stem(place.name) for place in places]
        if stem in stems and len(places) > 1:
            names = ", ".join(name.rpartition(".")[2] for name in stems)
            raise ValueError(
                f"the base holds {names} in one matrix, {tensor}, for which PEFT has one adapter: "
                "merge the adapters by zerojax.export_hf(merge_lora=True)"
            )


def _doubled(shape: tuple[int, ...], kind: str, lora: Lora) -> tuple[int, ...]:
    """Return the shape of a matrix in PEFT's file, with twice the rank after PiSSA's start."""
    if lora.init == "default" or kind == "lora_m":
        return shape
    return tuple(2 * n if dim == (kind == "lora_b") else n for dim, n in enumerate(shape))


def _check_beside(
    matrices: Mapping[str, _Matrix],
    base: DividedFile,
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
