"""Identify a file or folder that holds no weights in a supported format, and name the remedy.

This is only for errors. A file is identified by its first bytes, as the command `file` does, a
folder by the names in it. Nothing is loaded or unpickled.
"""

import os
import re

from host_offload.disk import ReadFile
from host_offload.fields import Field, parse_json
from zerojax.checkpoint import STATE

_MOST_INDEX = 64 << 20
_START = 512
"""Number of first bytes that are examined."""
_JOIN = (
    "join them into one file by safetensors.torch: save_file({n: t for f in files for n, t in "
    "load_file(f).items()}, 'joined.safetensors'), and import that"
)
_RESAVE = "save its tensors as safetensors (safetensors.torch.save_file), and import that"
_MAGIC = (
    (
        b"GGUF",
        "a GGUF file, whose weights may be quantized: import the safetensors that it was "
        "created from",
    ),
    (
        b"\x93NUMPY",
        "a single numpy array (.npy): save a dict of names and arrays by "
        "safetensors.numpy.save_file, and import that",
    ),
    (b"\x89HDF\r\n\x1a\n", f"an HDF5 file, such as Keras writes: {_RESAVE}"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (
        b"version https://git-lfs",
        "a git-lfs pointer to a file that was not downloaded: run `git lfs pull`",
    ),
    (b"<", "an HTML or XML page, as a failed download leaves: download the file again"),
)


def kind_of_file(path: str) -> str | None:
    """Return what a file is and what to do, or None if it is unknown.

    Raises:
      OSError: the file cannot be read.
    """
    file = ReadFile(path)
    if not file.num_bytes:
        return "an empty file: it was not completely written or downloaded"
    start = file.read_start(_START)
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return kind
    if start.startswith(b"PK\x03\x04"):
        # The name of the first entry of a zip archive.
        name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
        if name.endswith(b".npy"):
            return (
                "a numpy archive (.npz): call safetensors.numpy.save_file(dict(numpy.load(path)), "
                "...), and import that"
            )
        if b"data.pkl" in name or b"/.format_version" in name:
            return (
                "a zip archive of torch.save: load it by torch.load(path, weights_only=True), "
                f"{_RESAVE}"
            )
        return "a zip archive: unpack it first"
    if start[:1] == b"\x80" and 2 <= start[1] <= 5:
        return (
            "a pickle, as of torch.save, which is not unpickled here, because it may run any "
            "program: load it where you trust it, by torch.load(path, weights_only=True), "
            f"{_RESAVE}"
        )
    if start.lstrip()[:1] == b"{":
        return _kind_of_json(path, file)
    return None


def _kind_of_json(path: str, file: ReadFile) -> str:
    """Return what a JSON file is: an index of shards, or something else."""
    try:
        index = Field(parse_json(file.read_all(_MOST_INDEX)))
        shards = sorted({shard.text() for _, shard in index["weight_map"].fields()})
    except (ValueError, OSError):
        return "a JSON file without weights"
    if not shards:
        return "an index of shards that names none"
    form = "safetensors" if shards[0].endswith(".safetensors") else "other"
    names = ", ".join(shards[:2]) + (", ..." if len(shards) > 2 else "")
    absent = [
        name for name in shards if not os.path.exists(os.path.join(os.path.dirname(path), name))
    ]
    lost = f" ({len(absent)} missing next to it, the first is {absent[0]})" if absent else ""
    if len(shards) == 1 and form == "safetensors":
        return f"a Hugging Face index of one file: import {shards[0]} next to it{lost}"
    if form == "safetensors":
        repair = _JOIN
    else:
        repair = f"load each by torch.load(path, weights_only=True), {_RESAVE}"
    return f"a Hugging Face index of weights in {len(shards)} {form} files, {names}{lost}: {repair}"


def kind_of_folder(path: str) -> str | None:
    """Return what a folder without _METADATA is and what to do, or None if it is unknown.

    Raises:
      OSError: the folder cannot be read.
    """
    names = sorted(os.listdir(path))
    if not names:
        return "an empty folder"
    if os.path.isdir(os.path.join(path, STATE)):
        return "a zerojax checkpoint, for Checkpointer.restore, zj.import_params or zj.export_orbax"
    steps = [name for name in names if re.fullmatch("[0-9]+", name)]
    if any(os.path.isdir(os.path.join(path, step, STATE)) for step in steps):
        return (
            "a directory of zerojax checkpoints, for Checkpointer(path).restore, zj.import_params "
            "or zj.export_orbax"
        )
    inner = [name for name in names if os.path.exists(os.path.join(path, name, "_METADATA"))]
    if inner:
        return (
            f"a folder around an Orbax checkpoint: {inner[0]} in it has one, so import "
            f"{os.path.join(path, inner[0])}"
        )
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights:
        if len(weights) == 1:
            return f"a folder with one safetensors file: import {os.path.join(path, weights[0])}"
        return f"a folder with {len(weights)} safetensors files: import one of them, or {_JOIN}"
    weights = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if weights:
        return (
            f"a folder with {weights[0]}, as of torch.save: load it by torch.load(path, "
            f"weights_only=True), {_RESAVE}"
        )
    weights = [name for name in names if name.endswith(".gguf")]
    if weights:
        return (
            f"a folder with {weights[0]}, whose weights may be quantized: import the safetensors "
            "that it was created from"
        )
    return None
