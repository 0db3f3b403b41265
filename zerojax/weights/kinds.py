"""What a file or folder is that holds no weights in a format that is read here, and what to do with
it: for errors alone.

Told by its first bytes, as `file` does, or by the names in a folder. Nothing is loaded or
unpickled.
"""

import os
import re

from host_offload.disk import ReadFile
from host_offload.fields import Field, parse_json
from zerojax.checkpoint import STATE

_MOST_INDEX = 64 << 20
_START = 512
"""First bytes that are looked at."""
_JOIN = (
    "join them into one file by safetensors.torch: save_file({n: t for f in files for n, t in load_file(f).items()}, "
    "'joined.safetensors'), and import that"
)
_RESAVE = "save its tensors as safetensors (safetensors.torch.save_file), and import that"
_MAGIC = (
    (
        b"GGUF",
        "a GGUF file, whose weights may be quantized: import the safetensors that it was made from",
    ),
    (
        b"\x93NUMPY",
        "one array of numpy (.npy): save a dict of names and arrays by safetensors.numpy.save_file, and import that",
    ),
    (b"\x89HDF\r\n\x1a\n", f"an HDF5 file, as of Keras: {_RESAVE}"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (
        b"version https://git-lfs",
        "the pointer of git-lfs to a file that was not downloaded: run `git lfs pull`",
    ),
    (b"<", "a page of HTML or XML, as a failed download leaves: download the file again"),
)


def kind_of_file(path: str) -> str | None:
    """Return what a file is and what to do, or None where nothing is known of it.

    Raises:
      OSError: it cannot be read.
    """
    file = ReadFile(path)
    if not file.num_bytes:
        return "an empty file: it was not written or not downloaded to its end"
    start = file.read_start(_START)
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return kind
    if start.startswith(b"PK\x03\x04"):
        # The name of the first entry of a zip archive.
        name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
        if name.endswith(b".npy"):
            return "an archive of numpy (.npz): save_file(dict(numpy.load(path)), ...) of safetensors.numpy, and import that"
        if b"data.pkl" in name or b"/.format_version" in name:
            return f"a zip archive of torch.save: load it by torch.load(path, weights_only=True), {_RESAVE}"
        return "a zip archive: unpack it first"
    if start[:1] == b"\x80" and 2 <= start[1] <= 5:
        return (
            "a pickle, as of torch.save, which is not unpickled here, because it may run any program: load it where you trust "
            f"it, by torch.load(path, weights_only=True), {_RESAVE}"
        )
    if start.lstrip()[:1] == b"{":
        return _kind_of_json(path, file)
    return None


def _kind_of_json(path: str, file: ReadFile) -> str:
    """Return what a JSON file is: an index of shards, or something else."""
    try:
        found = Field(parse_json(file.read_all(_MOST_INDEX)))
        shards = sorted({shard.text() for _, shard in found["weight_map"].fields()})
    except (ValueError, OSError):
        return "a JSON file, and no weights"
    if not shards:
        return "an index of shards that names none"
    form = "safetensors" if shards[0].endswith(".safetensors") else "other"
    names = ", ".join(shards[:2]) + (", ..." if len(shards) > 2 else "")
    absent = [
        name for name in shards if not os.path.exists(os.path.join(os.path.dirname(path), name))
    ]
    lost = f" ({len(absent)} of them are not beside it, the first {absent[0]})" if absent else ""
    if len(shards) == 1 and form == "safetensors":
        return f"HuggingFace's index of one file: import {shards[0]} beside it{lost}"
    repair = (
        _JOIN
        if form == "safetensors"
        else f"load each by torch.load(path, weights_only=True), {_RESAVE}"
    )
    return f"HuggingFace's index of weights in {len(shards)} {form} files, {names}{lost}: {repair}"


def kind_of_folder(path: str) -> str | None:
    """Return what a folder is that has no _METADATA, and what to do; None where nothing is known of
    it.

    Raises:
      OSError: it cannot be read.
    """
    names = sorted(os.listdir(path))
    if not names:
        return "an empty folder"
    if os.path.isdir(os.path.join(path, STATE)):
        return "a zerojax checkpoint, for Checkpointer.restore, zj.import_params or zj.export_orbax"
    if any(
        re.fullmatch("[0-9]+", name) and os.path.isdir(os.path.join(path, name, STATE))
        for name in names
    ):
        return "a directory of zerojax checkpoints, for Checkpointer(path).restore, zj.import_params or zj.export_orbax"
    inner = [name for name in names if os.path.exists(os.path.join(path, name, "_METADATA"))]
    if inner:
        return f"a folder around a checkpoint of Orbax: {inner[0]} in it has one, so import {os.path.join(path, inner[0])}"
    if weights := [name for name in names if name.endswith(".safetensors")]:
        if len(weights) == 1:
            return f"a folder with one safetensors file: import {os.path.join(path, weights[0])}"
        return f"a folder with {len(weights)} safetensors files: import one of them, or {_JOIN}"
    if weights := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return f"a folder with {weights[0]}, as of torch.save: load it by torch.load(path, weights_only=True), {_RESAVE}"
    if weights := [name for name in names if name.endswith(".gguf")]:
        return f"a folder with {weights[0]}, whose weights may be quantized: import the safetensors that it was made from"
    return None
