"""Exported weights are the checkpoint's, as Orbax and safetensors read them.

An export appears complete or not at all.
"""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import warnings
from typing import Any

import disks
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from matrix_of_checkpoints import numbers
from weight_files import AWKWARD, awkward, program_of, save

import zerojax as zj
from zerojax import cli
from zerojax.checkpoint.errors import DamagedError
from zerojax.checkpoint.manifest import SavedState
from zerojax.weights import exporting
from zerojax.weights.exporting import export_dtype
from zerojax.weights.names import split_path

EXPORTS = {"orbax": zj.export_orbax, "safetensors": zj.export_safetensors}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a directory with steps 0 and 5, whose weights differ."""
    folder = tmp_path_factory.mktemp("exported")
    with program_of(awkward()) as program:
        save(program, program.init(jax.random.key(0)), folder / "c")
        save(program, program.init(jax.random.key(5)), folder / "five")
    shutil.move(folder / "five" / "0", folder / "c" / "5")
    return folder / "c"


@pytest.fixture
def checkpoints(original, tmp_path):
    shutil.copytree(original, tmp_path / "c")
    return tmp_path / "c"


def flip(step: pathlib.Path) -> None:
    """Change a byte of each record of a step."""
    with SavedState(str(step / "state")) as saved:
        for _, _, path in saved.records.files():
            data = bytearray(pathlib.Path(path).read_bytes())
            data[0] ^= 1
            pathlib.Path(path).write_bytes(data)


def joined(tree: Any, prefix: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        k: v
        for key, own in tree.items()
        for k, v in joined(own, f"{prefix}.{key}" if prefix else key).items()
    }


def read(form: str, path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return tensors by name, as other libraries read them."""
    if form == "orbax":
        return joined(ocp.StandardCheckpointer().restore(path))
    return pytest.importorskip("safetensors.numpy").load_file(path)


@pytest.mark.parametrize("form", EXPORTS)
def test_others_read_the_tree(original, tmp_path, form):
    EXPORTS[form](original / "0", tmp_path / "out")
    expected, found = numbers(original, 0), read(form, tmp_path / "out")
    assert sorted(found) == sorted(AWKWARD)
    for name, own in AWKWARD.items():
        assert found[name].dtype == np.float32
        assert found[name].shape == expected[own].shape
        np.testing.assert_array_equal(found[name], expected[own])
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_orbax_restores_what_it_does_of_its_own(original, tmp_path, dtype):
    """Without a target, arrays are JAX arrays on the first device.

    Dtypes that JAX lacks are numpy arrays.
    """
    zj.export_orbax(original / "0", tmp_path / "out", dtype=dtype)
    found = joined(ocp.StandardCheckpointer().restore(tmp_path / "out"))
    with warnings.catch_warnings(
        action="ignore"
    ):  # about shardings that are read from a file, as for any checkpoint
        again = joined(ocp.PyTreeCheckpointer().restore(tmp_path / "out"))
    expected = numbers(original, 0)
    for name, own in AWKWARD.items():
        is_numpy = dtype == "float64" or name == "none"
        for array in (found[name], again[name]):
            assert isinstance(array, np.ndarray if is_numpy else jax.Array)
            assert is_numpy or jnp.asarray(array).devices() == {jax.devices()[0]}
            np.testing.assert_array_equal(array, expected[own].astype(dtype))


def test_orbax_restores_into_shardings(original, tmp_path):
    zj.export_orbax(original / "0", tmp_path / "out")
    sharding = NamedSharding(zj.make_mesh(fsdp=2, devices=jax.devices()[:2]), PartitionSpec("fsdp"))
    target = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
        ocp.StandardCheckpointer().restore(tmp_path / "out"),
    )
    target["layers"]["0"]["w"] = jax.ShapeDtypeStruct((6, 4), jnp.bfloat16, sharding=sharding)
    found = ocp.StandardCheckpointer().restore(tmp_path / "out", target)["layers"]["0"]["w"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(
        found, numbers(original, 0)[AWKWARD["layers.0.w"]].astype(jnp.bfloat16)
    )


@pytest.mark.parametrize(
    "dtype", ["int3", "bf16", "", object(), "f4,(", 3, ["float32"], {"names": 3}]
)
def test_what_is_no_dtype_is_named(tmp_path, dtype):
    """This is refused before the checkpoint is read."""
    with pytest.raises(ValueError, match=r"dtype=.*: weights are exported as one of float"):
        export_dtype(dtype)
    for export in (zj.export_safetensors, zj.export_orbax):
        with pytest.raises(ValueError, match="dtype="):
            export(tmp_path / "none", tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("form", EXPORTS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", np.float64])
def test_dtype_is_that_asked_for(original, tmp_path, form, dtype):
    EXPORTS[form](original / "0", tmp_path / "out", dtype=dtype)
    expected, found = numbers(original, 0), read(form, tmp_path / "out")
    for name, own in AWKWARD.items():
        assert found[name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found[name], expected[own].astype(dtype))


def test_safetensors_header_is_canonical(original, tmp_path):
    zj.export_safetensors(original / "0", tmp_path / "out")
    data = (tmp_path / "out").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    assert list(header) == sorted(AWKWARD)
    at = 0
    for told in header.values():
        assert told["data_offsets"] == [at, at := at + 4 * int(np.prod(told["shape"]))]
    assert len(data) == 8 + length + at


def test_linen_and_nnx_modules_run_with_exported_weights(tmp_path):
    class Nnx(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layers[1](jnp.tanh(self.layers[0](x)))

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
            return nn.Dense(2)(jnp.tanh(nn.Dense(4)(batch["x"])))

    batch = {"x": np.random.default_rng(0).standard_normal((8, 3), dtype=np.float32)}

    def saved(model: zj.Model, path: pathlib.Path) -> tuple[dict, float]:
        with program_of(model) as program:
            state = program.init(jax.random.key(1))
            save(program, state, path)
            return ocp.StandardCheckpointer().restore(exported(path)), float(
                program.eval(state, batch)
            )

    def exported(path: pathlib.Path) -> pathlib.Path:
        zj.export_orbax(path, path / "exported")
        return path / "exported"

    tree, loss = saved(zj.from_flax(Nnx, lambda m, b: jnp.mean(m(b["x"]) ** 2)), tmp_path / "nnx")
    module = Nnx(nnx.Rngs(7))
    by_number = {"layers": {int(k): v for k, v in tree["layers"].items()}}
    nnx.update(module, jax.tree.map(jnp.asarray, by_number))
    assert float(jnp.mean(module(batch["x"]) ** 2)) == pytest.approx(loss, rel=1e-6)

    linen = zj.from_flax(Linen(), lambda m, b: jnp.mean(m(b) ** 2), example_batch=batch)
    tree, loss = saved(linen, tmp_path / "linen")
    assert float(jnp.mean(jnp.square(Linen().apply({"params": tree}, batch)))) == pytest.approx(
        loss, rel=1e-6
    )


def test_newest_whole_step_is_taken(checkpoints, tmp_path, caplog):
    (checkpoints / "9.orbax-checkpoint-tmp").mkdir()
    own = AWKWARD["layers.0.w"]
    for name, step in (("newest", 5), ("older", 0)):
        zj.export_safetensors(checkpoints, tmp_path / name)
        np.testing.assert_array_equal(
            read("safetensors", tmp_path / name)["layers.0.w"], numbers(checkpoints, step)[own]
        )
        flip(checkpoints / str(step))
    assert f"{checkpoints / '5'} is passed over" in caplog.text
    for source in (checkpoints, checkpoints / "5"):
        with pytest.raises(DamagedError, match="checksum"):
            zj.export_orbax(source, tmp_path / "none")
    assert sorted(os.listdir(tmp_path)) == ["c", "newest", "older"]


@pytest.mark.parametrize("form", EXPORTS)
def test_bad_input_is_refused_and_leaves_nothing(original, tmp_path, form):
    there = tmp_path / "there"
    there.mkdir() if form == "orbax" else there.write_text("kept")
    with pytest.raises(ValueError, match="there exists: remove it, or use another path"):
        EXPORTS[form](original, there)
    with pytest.raises(ValueError, match="absent is not a folder"):
        EXPORTS[form](original, tmp_path / "absent" / "out")
    with pytest.raises(
        ValueError, match="dtype=int8: weights are exported as one of float64, float32"
    ):
        EXPORTS[form](original, tmp_path / "out", dtype=jnp.int8)
    for source in (tmp_path, tmp_path / "absent", original / "7"):
        with pytest.raises(
            zj.CheckpointError, match=r"neither a zerojax\.Checkpointer's directory"
        ):
            EXPORTS[form](source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["there"]


@pytest.mark.parametrize("form", EXPORTS)
def test_numbers_out_of_reach_are_refused_by_name(original, tmp_path, form, monkeypatch):
    def large(self, name: str, box: object, out: np.ndarray) -> None:
        out[...] = np.full(out.shape, 1e5 if name == AWKWARD["gate"] else 0, np.float32)

    monkeypatch.setattr(exporting.SavedState, "check", lambda self, **_: None)
    monkeypatch.setattr("host_offload.disk.saved_records.SavedRecords.read", large)
    with pytest.raises(
        zj.CheckpointError, match=r"weights\['gate'\] holds numbers beyond the range of float16"
    ):
        EXPORTS[form](original, tmp_path / "out", dtype=jnp.float16)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("form", EXPORTS)
def test_full_disk_is_told_and_leaves_nothing(original, tmp_path, form):
    with disks.mounted(tmp_path / "small", "size=64k") as folder:
        disks.fill(folder)
        with pytest.raises(zj.CheckpointError, match=r"No space left|ENOSPC"):
            EXPORTS[form](original, folder / "out")
        assert os.listdir(folder) == ["ballast"]


def test_a_disk_that_fails_while_a_file_is_written_is_told(original, tmp_path, monkeypatch):
    """With mapped files, SIGBUS ended the process if the file system allocates immediately."""
    with disks.ext4(tmp_path / "disk", 16 << 20, "loop,nodelalloc") as folder:
        read_part = exporting.read_part

        def failing(*args: Any) -> None:
            disks.shut_down(folder)
            read_part(*args)

        monkeypatch.setattr(exporting, "read_part", failing)
        with pytest.raises(
            zj.CheckpointError, match=r"writing .*out failed: EIO \(5\), .*; the disk failed"
        ):
            zj.export_safetensors(original / "0", folder / "out")


@pytest.mark.parametrize(
    "number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get
)
def test_file_systems_that_reserve_nothing_are_written_to(original, tmp_path, monkeypatch, number):
    zj.export_safetensors(original / "0", tmp_path / "expected")

    def refused(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    zj.export_safetensors(original / "0", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()


def test_writes_that_are_cut_short_are_continued(original, tmp_path, monkeypatch):
    zj.export_safetensors(original / "0", tmp_path / "expected")
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(exporting, "PIECE_BYTES", 20)
    zj.export_safetensors(original / "0", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()


@given(st.lists(st.one_of(st.text(max_size=4), st.integers(0, 9)), min_size=1, max_size=4))
def test_keys_survive_their_names(keys):
    path = tuple(
        jax.tree_util.SequenceKey(k) if isinstance(k, int) else jax.tree_util.DictKey(k)
        for k in keys
    )
    assert split_path(f"weights{jax.tree_util.keystr(path)}") == tuple(map(str, keys))


def test_attributes_are_keys_and_other_keys_are_refused():
    path = (jax.tree_util.GetAttrKey("layer"), jax.tree_util.FlattenedIndexKey(3))
    assert split_path(f"weights{jax.tree_util.keystr(path)}") == ("layer", "3")
    with pytest.raises(zj.CheckpointError, match="is not a key that other formats support"):
        split_path("weights['a'][(1, 2)]")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": 1.0}, "a.b": 2.0}, "are both a.b in other formats: rename one of them"),
        ({"a": {"b.c": 1.0}, "a.b": {"c": 2.0}}, "are both a.b.c in other formats"),
    ],
)
def test_names_that_clash_are_refused(tmp_path, tree, message):
    model = zj.Model(lambda key: jax.tree.map(jnp.float32, tree), lambda p, b, k: jnp.float32(0))
    with program_of(model) as program:
        save(program, program.init(jax.random.key(0)), tmp_path / "c")
    with pytest.raises(zj.CheckpointError, match=message):
        zj.export_safetensors(tmp_path / "c", tmp_path / "out")


@pytest.mark.parametrize("key", ["..", "a\\b", "/a", "a/../b"])
def test_names_that_are_no_folders_are_refused(tmp_path, key):
    model = zj.Model(lambda _: {key: jnp.float32(1)}, lambda p, b, k: jnp.float32(0))
    with program_of(model) as program:
        save(program, program.init(jax.random.key(0)), tmp_path / "c")
    with pytest.raises(zj.CheckpointError, match="Orbax's format cannot have a folder named"):
        zj.export_orbax(tmp_path / "c", tmp_path / "out")
    zj.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert list(read("safetensors", tmp_path / "out")) == [key]


def test_command_line(original, tmp_path, capsys):
    cli.main(
        [
            "export",
            str(original),
            str(tmp_path / "a"),
            "--format",
            "safetensors",
            "--dtype",
            "bfloat16",
            "--step",
            "0",
        ]
    )
    own = AWKWARD["layers.0.w"]
    found = read("safetensors", tmp_path / "a")["layers.0.w"]
    np.testing.assert_array_equal(found, numbers(original, 0)[own].astype(jnp.bfloat16))
    cli.main(["export", str(original / "5"), str(tmp_path / "b"), "--format", "orbax"])
    np.testing.assert_array_equal(
        read("orbax", tmp_path / "b")["layers.0.w"], numbers(original, 5)[own]
    )
    for arguments in (
        [str(original), str(tmp_path / "b")],
        [str(original), str(tmp_path / "d"), "--step", "3"],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", *arguments, "--format", "orbax"])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


MEMORY = """
import pathlib, sys, threading, time
import zerojax as zj
from zerojax.weights import exporting as export

def anonymous():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

export.PIECE_BYTES = 2**20
zj.export_orbax(sys.argv[1], sys.argv[2] + "/small")  # what is loaded and started once
zj.export_safetensors(sys.argv[1], sys.argv[2] + "/small.safetensors")
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
zj.export_orbax(sys.argv[3], sys.argv[2] + "/large")
zj.export_safetensors(sys.argv[3], sys.argv[2] + "/large.safetensors")
done.set()
thread.join()
print(peak - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux reports anonymous memory in /proc/self/status"
)
def test_anonymous_memory_is_bounded(original, tmp_path):
    num_mib = 96
    large = zj.Model(lambda key: {"w": jnp.ones((num_mib, 2**18))}, lambda p, b, k: jnp.sum(p["w"]))
    with program_of(large) as program:
        save(program, program.init(jax.random.key(0)), tmp_path / "c")
    arguments = [str(original / "0"), str(tmp_path), str(tmp_path / "c")]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments], check=True, capture_output=True, text=True
    )
    assert float(done.stdout) < num_mib / 3
