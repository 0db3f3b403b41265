"""Weight files of arbitrary content: nonsense is refused by name, before allocating for it."""

import json
import os
import pathlib
import pickle
import shutil
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from mutations import DEEP, flipped, mutated, outcomes
from weight_files import program_of

import zerojax as zj
from zerojax.weights import importing
from zerojax.weights.importing import open_weights

HEADER = {
    "__metadata__": {"zerojax.tiled": '["b"]', "format": "np"},
    "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
    "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [48, 56]},
    "c.d": {"dtype": "I8", "shape": [], "data_offsets": [56, 57]},
}


def write(path: pathlib.Path, header: Any, num_bytes: int = 57) -> pathlib.Path:
    """Write a safetensors file from a header or its text."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def read_all(path: pathlib.Path) -> None:
    """Read a small box of each tensor."""
    file = open_weights(path)
    for name, tensor in file.tensors.items():
        if importing.known_dtype(tensor.dtype).itemsize:
            file.read(name, tuple((0, min(n, 3)) for n in tensor.shape))


def a(**fields: Any) -> dict[str, Any]:
    return HEADER | {"a": HEADER["a"] | fields}


REFUSED = {
    "overlap": (
        a(data_offsets=[4, 52]),
        "a ends at byte 52, and b is at bytes 48 to 56: they overlap",
    ),
    "outside": (a(data_offsets=[48, 96]), r"a float32\[3, 4\] cannot be at bytes 48 to 96 of 57"),
    "backwards": (a(data_offsets=[48, 0]), "a .* cannot be at bytes 48 to 0"),
    "negative": (a(data_offsets=[-48, 0]), r"a.data_offsets\[0\] is -48, and an integer, from 0"),
    "one offset": (
        a(data_offsets=[48]),
        r"a.data_offsets is \[48\], and \[start, stop\] is needed",
    ),
    "negative dims": (a(shape=[-3, -4]), r"a.shape\[0\] is -3"),
    "overflow": (
        a(shape=[2**32, 2**32]),
        r"a.shape is \[4294967296, 4294967296\], and a shape of less than 2\^63 bytes",
    ),
    "overflow to 0": (
        a(shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
        r"a.shape is .*less than 2\^63 bytes",
    ),
    "float dims": (a(shape=[3.0, 4]), r"a.shape\[0\] is 3.0"),
    "many dims": (a(shape=[1] * 70), "a list of at most 32 integers is needed"),
    "dtype": (a(dtype=["F32"]), r"a.dtype is \['F32'\], and a text is needed"),
    "no fields": (HEADER | {"a": 3}, "a is 3, and an object is needed"),
    "missing": (HEADER | {"a": {"shape": [3, 4]}}, "a.dtype is missing"),
    "no object": ([1, 2], r"it is \[1, 2\], and an object is needed"),
    "metadata": (
        HEADER | {"__metadata__": {"zerojax.tiled": 3}},
        r"__metadata__\['zerojax.tiled'\] is 3, and a text is",
    ),
    "tiles": (
        HEADER | {"__metadata__": {"zerojax.tiled": '{"b": 1}'}},
        "zerojax.tiled is .*, and a list is needed",
    ),
    "no tiles": (HEADER | {"__metadata__": {"zerojax.tiled": "["}}, "zerojax.tiled is not JSON"),
    "twice": ('{"a": 1, "a": 2}', "'a' appears twice"),
    "deep": ("[" * 100_000, "it is nested too deeply"),
    "deep tiles": (
        HEADER | {"__metadata__": {"zerojax.tiled": "[" * 100_000}},
        "nested too deeply",
    ),
    "surrogate": (
        HEADER | {"\ud800": HEADER["a"]},
        "a name in it is '.ud800', and a text of UTF-8 is needed",
    ),
    "deep field": (HEADER | {"a": DEEP}, "a is .*, and an object is needed"),
}


def test_headers_that_make_no_sense_are_refused_by_field(tmp_path):
    read_all(write(tmp_path / "good", HEADER))
    for header, told in REFUSED.values():
        with pytest.raises(zj.CheckpointError, match=told):
            read_all(write(tmp_path / "file", header))


def test_a_header_is_no_larger_than_the_format_allows(tmp_path):
    """The file has holes, which take no disk space."""
    with open(tmp_path / "file", "wb") as file:
        file.write((1 << 40).to_bytes(8, "little") + b"{")
        file.truncate(1 << 41)
    with pytest.raises(
        zj.CheckpointError,
        match="its header takes 1099511627776 bytes, and a safetensors header at most",
    ):
        open_weights(tmp_path / "file")


@pytest.mark.parametrize("num", [200, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_changed_headers_end_in_an_error_that_tells_them(tmp_path, num):
    text, path = json.dumps(HEADER), tmp_path / "file"
    good = write(path, HEADER).read_bytes()

    def flip(seed: int) -> None:
        path.write_bytes(flipped(good, seed, len(text) + 8))
        read_all(path)

    found = outcomes(
        {seed: lambda seed=seed: read_all(write(path, mutated(text, seed))) for seed in range(num)}
    )
    print(f"{num} changed headers: {dict(found)}")
    found = outcomes({seed: lambda seed=seed: flip(seed) for seed in range(num // 4)})
    print(f"{num // 4} flipped bits: {dict(found)}")


# --- other inputs of an import --------------------------------------------------------------------


def files_of_other_kinds(folder: pathlib.Path) -> dict[str, str]:
    """Create files and folders that are not weights in a readable format.

    Returns the expected error for each.
    """
    shards = {f"layer.{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    for name in ("sharded", "single", "several", "torch", "steps/7/state", "gguf"):
        (folder / name).mkdir(parents=True)
    index = json.dumps({"metadata": {"total_size": 8}, "weight_map": shards})
    (folder / "sharded/model.safetensors.index.json").write_text(index)
    for name in (
        "sharded/model-00001-of-00002.safetensors",
        "single/x.safetensors",
        "several/x.safetensors",
    ):
        write(folder / name, HEADER)
    write(folder / "several/y.safetensors", HEADER)
    (folder / "torch/pytorch_model.bin").write_bytes(b"")
    (folder / "gguf/model.gguf").write_bytes(b"GGUF")
    np.savez(folder / "arrays.npz", a=np.ones(3))
    np.save(folder / "array.npy", np.ones(3))
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02}.")
    with zipfile.ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("readme", b"")
    (folder / "old.bin").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    (folder / "quantized.gguf").write_bytes(b"GGUF" + bytes(60))
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "deep.json").write_text("{" + '"a": [' * 100_000)
    (folder / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (folder / "page").write_text("<!DOCTYPE html><html>not found</html>")
    (folder / "empty").write_bytes(b"")
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "torch.index.json").write_text(index.replace(".safetensors", ".bin"))
    joined = r"join them into one file by safetensors.torch: save_file"
    return {
        "sharded/model.safetensors.index.json": "names 2 files, 1 missing next to it: model-00002-of-00002.safetensors",
        "sharded": "model.safetensors.index.json names 2 files, 1 missing next to it",
        "torch.index.json": "a Hugging Face index of weights in 2 other files, .*: load each by torch.load",
        "single": "it is a folder with one safetensors file: import .*single/x.safetensors;",
        "several": f"it is a folder with 2 safetensors files: import one of them, or {joined}",
        "torch": "it is a folder with pytorch_model.bin, as of torch.save: load it by torch.load",
        "gguf": "it is a folder with model.gguf",
        "steps": "it is a directory of zerojax checkpoints, for Checkpointer",
        "steps/7": "it is a zerojax checkpoint, for Checkpointer.restore, zj.import_params or zj.export_orbax",
        "arrays.npz": r"it is a numpy archive \(.npz\): call safetensors.numpy.save_file\(dict\(numpy.load\(path\)\), ...\)",
        "array.npy": "it is a single numpy array",
        "model.pt": "it is a zip archive of torch.save: load it by torch.load",
        "other.zip": "it is a zip archive: unpack it first",
        "old.bin": "it is a pickle, .* which is not unpickled here",
        "quantized.gguf": "it is a GGUF file",
        "config.json": "it is a JSON file without weights",
        "deep.json": "it is a JSON file without weights",
        "pointer": "it is a git-lfs pointer .*`git lfs pull`",
        "page": "it is an HTML or XML page",
        "empty": "it is an empty file",
        "fifo": "fifo: a FIFO is in its place, and no regular file",
        "zero": "zero: a device is in its place, and no regular file",
    }


def test_files_of_other_kinds_are_told(tmp_path):
    for name, told in files_of_other_kinds(tmp_path).items():
        with pytest.raises(zj.CheckpointError, match=told):
            open_weights(tmp_path / name)


def test_weights_that_a_file_does_not_tell_apart_are_refused(tmp_path):
    """One tensor was read for both."""
    model = zj.Model(
        lambda key: {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)}, lambda p, b, k: jnp.float32(0)
    )
    write(tmp_path / "file", {"a.b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 8)
    told = r"weights\['a'\]\['b'\] and weights\['a.b'\] of the model are both a.b in .*file: rename one of them"
    with program_of(model) as program, pytest.raises(zj.CheckpointError, match=told):
        zj.import_params(program, tmp_path / "file", key=jax.random.key(0))


# --- Orbax ----------------------------------------------------------------------------------------

TREE = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "n": {"b": np.zeros(2000, np.float32), "s": np.float32(3)},
}
OPTIONS = {
    "ocdbt": {},
    "zarr": {"use_ocdbt": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """Return a folder with Orbax checkpoints, named by OPTIONS."""
    folder = tmp_path_factory.mktemp("orbax")
    for name, options in OPTIONS.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
            writer.save(folder / name, args=ocp.args.PyTreeSave(jax.tree.map(jnp.asarray, TREE)))
    return folder


def change(path: pathlib.Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


LARGE = 2**20


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"chunks": [LARGE, LARGE]},
            r"a \[3, 4\] has chunks of \[1048576, 1048576\], which are larger than it is",
        ),
        (
            {"chunks": [LARGE, LARGE], "shape": [LARGE, LARGE]},
            r"a .* has chunks of .*, which take 4398046511104 bytes each, and its files have \d\d bytes: they cannot hold such a",
        ),
        ({"shape": [-3, 4]}, "a/.zarray.*shape"),
        ({"shape": [2**70, 4]}, "a/.zarray.*shape"),
        ({"shape": "x"}, "a/.zarray.*shape"),
        ({"dtype": "x"}, "a/.zarray.*dtype"),
    ],
)
def test_chunks_that_no_file_can_hold_are_refused(saved, tmp_path, fields, told):
    """Tensorstore allocates a chunk before it examines its bytes.

    If it cannot, it ends the process.
    """
    shutil.copytree(saved / "zarr", tmp_path / "o")
    change(tmp_path / "o" / "a" / ".zarray", **fields)
    with pytest.raises(zj.CheckpointError, match=told):
        read_all(tmp_path / "o")


def test_chunks_of_shards_that_no_file_can_hold_are_refused(saved, tmp_path):
    def of(outer: int, inner: int) -> dict[str, Any]:
        said = json.loads((saved / "zarr3" / "a" / "zarr.json").read_text())
        said["shape"] = said["chunk_grid"]["configuration"]["chunk_shape"] = [outer, outer]
        said["codecs"][0]["configuration"]["chunk_shape"] = [inner, inner]
        return said

    for outer, inner, told in (
        (LARGE, LARGE, "take 4398046511104 bytes each"),
        (LARGE, 1, "grid shape of .* has more than"),
        (2**15, 1, "a of .* cannot be read: .*Error reading shard index"),
    ):
        shutil.copytree(saved / "zarr3", folder := tmp_path / f"{outer}-{inner}")
        (folder / "a" / "zarr.json").write_text(json.dumps(of(outer, inner)))
        with pytest.raises(zj.CheckpointError, match=told):
            read_all(folder)


def test_arrays_of_one_value_whose_chunks_are_not_stored_are_read(saved, tmp_path):
    """Such chunks take no memory at any size: earlier versions of Orbax omitted chunks of zeros."""
    shutil.copytree(saved / "zarr", tmp_path / "o")
    (tmp_path / "o" / "a" / "0.0").unlink()
    change(tmp_path / "o" / "a" / ".zarray", chunks=[LARGE, LARGE], shape=[LARGE, LARGE])
    np.testing.assert_array_equal(
        open_weights(tmp_path / "o").read("a", ((5, 7), (0, 3))), np.zeros((2, 3))
    )


def test_a_compressed_chunk_may_be_much_larger_than_its_file(tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(tmp_path / "o", args=ocp.args.PyTreeSave({"a": jnp.zeros((64, 2**18))}))
    assert (
        sum(path.stat().st_size for path in (tmp_path / "o").rglob("*") if path.is_file()) < 2**14
    )
    np.testing.assert_array_equal(
        open_weights(tmp_path / "o").read("a", ((5, 6), (0, 3))), np.zeros((1, 3))
    )


def leaf(*keys: Any, value_type: Any = "jax.Array") -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": value_type},
    }


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"x": leaf("..", "..", "etc")}, "cannot be read as a checkpoint of Orbax"),
        (
            {"x": leaf("../zarr3/a")},
            r"key_metadata is .*, and keys that name a folder in this one is needed",
        ),
        ({"x": leaf("/etc")}, "keys that name a folder in this one is needed"),
        (
            {"x": leaf("n", "b"), "y": leaf("n.b")},
            "x and y are both stored as n.b: rename one of them",
        ),
        ({"x": leaf([])}, r"key_metadata\[0\].key is \[\], and a text is needed"),
        ({"x": leaf("a", value_type=3)}, "value_type is 3, and a text is needed"),
        ({"x": {}}, "tree_metadata.x.value_metadata is missing"),
        ([], r"tree_metadata is \[\], and an object is needed"),
    ],
)
def test_trees_that_make_no_sense_are_refused_by_field(saved, tmp_path, tree, told):
    shutil.copytree(saved / "zarr", tmp_path / "o")
    change(tmp_path / "o" / "_METADATA", tree_metadata=tree)
    with pytest.raises(zj.CheckpointError, match=told):
        read_all(tmp_path / "o")


@pytest.mark.parametrize("name", ["_METADATA", "a/.zarray", "a/0.0"])
def test_nothing_waits_for_a_fifo_in_a_folder_of_orbax(saved, tmp_path, name):
    shutil.copytree(saved / "zarr", tmp_path / "o")
    (tmp_path / "o" / name).unlink()
    os.mkfifo(tmp_path / "o" / name)
    with pytest.raises(
        zj.CheckpointError, match=f"{name}: a FIFO is in its place, and no regular file"
    ):
        read_all(tmp_path / "o")


@pytest.mark.parametrize("num", [20, pytest.param(2_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["_METADATA", "a/.zarray", "a/zarr.json"])
def test_changed_folders_of_orbax_end_in_an_error_that_tells_them(saved, tmp_path, name, num):
    shutil.copytree(saved / ("zarr3" if name.endswith("zarr.json") else "zarr"), tmp_path / "o")
    text = (tmp_path / "o" / name).read_bytes()

    def check(content: bytes) -> None:
        (tmp_path / "o" / name).write_bytes(content)
        read_all(tmp_path / "o")

    calls: dict[int, Any] = {
        seed: lambda seed=seed: check(json.dumps(mutated(text, seed)).encode())
        for seed in range(num)
    }
    calls |= {num + seed: lambda seed=seed: check(flipped(text, seed)) for seed in range(num // 4)}
    print(f"{len(calls)} of {name}: {dict(outcomes(calls))}")
