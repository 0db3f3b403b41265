import errno
import fcntl
import gc
import json
import logging
import math
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys

import disks
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_files import descriptors

from host_offload.disk import store as store_module
from host_offload.disk.checksum import compute_checksum
from host_offload.disk.errors import SwapError, explain, of_tensorstore
from host_offload.disk.folder import SwapFolder
from host_offload.disk.record_format import BLOCK_BYTES, LEAF_BYTES, LeafFormat, RecordFormat
from host_offload.disk.store import RecordFile, Store

ROOT = pathlib.Path(__file__).resolve().parents[3]
TWO = RecordFormat((LeafFormat("w", (3, 5), "bfloat16"), LeafFormat("step", (), "int32")))
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "bool")
leaf_formats = st.builds(
    LeafFormat,
    st.text(min_size=1, max_size=4),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
)
record_formats = st.lists(leaf_formats, max_size=6).map(lambda leaves: RecordFormat(tuple(leaves)))


@pytest.fixture
def folder(tmp_path):
    with SwapFolder(str(tmp_path)) as folder:
        yield folder


def run_python(code, *arguments, **options):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


# --- records --------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(record_formats)
def test_leaves_are_aligned_and_do_not_overlap(form):
    end = 0
    for leaf, offset in zip(form.leaves, form.offsets, strict=True):
        assert offset % LEAF_BYTES == 0
        assert end <= offset < end + LEAF_BYTES, (
            "leaves must be in order, with no more padding than alignment needs"
        )
        end = offset + leaf.num_bytes
    assert form.num_bytes == end
    assert form.padded_bytes % BLOCK_BYTES == 0
    assert max(end, 1) <= form.padded_bytes < max(end, 1) + BLOCK_BYTES


@settings(max_examples=100, deadline=None)
@given(record_formats)
def test_views_are_the_buffers_own_memory(form):
    buffer = np.zeros(form.padded_bytes, np.uint8)
    views = form.views(buffer)
    assert [(v.shape, v.dtype.name) for v in views] == [
        (leaf.shape, leaf.dtype) for leaf in form.leaves
    ]
    for k, view in enumerate(views):
        view[...] = np.ones((), view.dtype)
        assert all(np.all(v == (j <= k)) for j, v in enumerate(views)), (
            "a leaf overwrote another leaf"
        )
    expected = sum(
        int(np.sum(np.ascontiguousarray(v).reshape(-1).view(np.uint8) != 0)) for v in views
    )
    assert np.count_nonzero(buffer) == expected, (
        "a view is a copy, or bytes outside the leaves were written"
    )


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(67, np.uint8),
        np.zeros(68, np.int8),
        np.zeros((2, 64), np.uint8),
        np.zeros(200, np.uint8)[::2],
    ],
    ids=["short", "int8", "2d", "strided"],
)
def test_views_of_a_buffer_that_does_not_serve_are_refused(buffer):
    assert TWO.num_bytes == 68
    with pytest.raises(ValueError, match=r"n >= 68"):
        TWO.views(buffer)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="bfloat17"):
        RecordFormat((LeafFormat("w", (2,), "bfloat17"),)).num_bytes  # noqa: B018


# --- stores ---------------------------------------------------------------------------------------

READER = """
import json, sys
import ml_dtypes, numpy as np
path, client = sys.argv[1:]
if client == "tensorstore":
    import tensorstore as ts
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
    attributes, record = array.spec().to_json()["metadata"]["attributes"], array[2].read().result()
else:
    import zarr
    array = zarr.open_array(path, mode="r")
    attributes, record = dict(array.attrs), array[2]
leaves = {}
for leaf in attributes["leaves"]:
    part = record[leaf["offset"] : leaf["offset"] + leaf["num_bytes"]]
    value = np.ascontiguousarray(part).view(getattr(ml_dtypes, leaf["dtype"], leaf["dtype"])).reshape(leaf["shape"])
    leaves[leaf["name"]] = value.astype(float).tolist()
assert not any(name.split(".")[0] in ("host_offload", "zerojax", "jax") for name in sys.modules)
print(json.dumps({"leaves": leaves, "metadata": attributes["metadata"], "shape": list(array.shape)}))
"""


@pytest.mark.parametrize("client", ["tensorstore", "zarr"])
def test_another_process_finds_the_leaves_by_the_attributes(folder, client):
    if client == "zarr":
        pytest.importorskip("zarr")
    metadata = {"mesh": {"fsdp": 4}, "specs": {"w": [None, "fsdp"]}}
    store = Store(folder.path, "params", 1, 4, TWO, metadata)
    buffer = np.zeros(TWO.padded_bytes, np.uint8)
    w, step = TWO.views(buffer)
    w[...], step[...] = np.arange(15).reshape(3, 5), 7
    pathlib.Path(store.record_path(2)).write_bytes(buffer.tobytes())
    with run_python(READER, store.path, client) as process:
        found = json.loads(process.communicate(timeout=60)[0])
    assert found["leaves"] == {"w": np.arange(15.0).reshape(3, 5).tolist(), "step": 7}
    assert found["metadata"] == metadata
    assert found["shape"] == [4, TWO.padded_bytes]


def test_creating_a_store_holds_no_layer_in_memory_or_on_disk(folder):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    form = RecordFormat((LeafFormat("w", (1 << 28,), "float32"),))  # 1 GiB per layer
    store = Store(folder.path, "params", 0, 1000, form)
    assert os.listdir(store.path) == ["zarr.json"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    assert store.num_bytes == 1000 << 30
    assert store.checksums.shape == (1000,)
    assert not store.checksums.any()


def test_a_record_is_one_file_of_the_padded_bytes_also_where_it_is_zero(folder):
    store = Store(folder.path, "grads", 0, 3, TWO)
    store.open_array()[1].write(np.zeros(TWO.padded_bytes, np.uint8)).result()
    assert os.stat(store.record_path(1)).st_size == TWO.padded_bytes == 4096
    assert sorted(os.listdir(store.path)) == ["c.1.0", "zarr.json"]


def test_preallocate_reserves_the_disk_and_keeps_what_is_written(folder):
    form = RecordFormat((LeafFormat("w", (100_000,), "uint8"),))
    store = Store(folder.path, "params", 0, 4, form)
    record = np.random.default_rng(0).integers(0, 256, form.padded_bytes, np.uint8)
    store.open_array()[3].write(record).result()
    for _ in range(2):
        store.preallocate()
        for layer in range(4):
            found = os.stat(store.record_path(layer))
            assert found.st_size == form.padded_bytes
            assert found.st_blocks * 512 >= form.padded_bytes
    assert pathlib.Path(store.record_path(3)).read_bytes() == record.tobytes()


def test_preallocate_counts_what_is_reserved_already(folder, monkeypatch):
    store = Store(folder.path, "params", 0, 4, TWO)
    free = [store.num_bytes]
    monkeypatch.setattr("host_offload.disk.store._free_bytes", lambda path: free[0])
    store.preallocate()
    free[0] = 0
    store.preallocate()
    os.unlink(store.record_path(2))
    with pytest.raises(SwapError, match="has 4096 bytes too few"):
        store.preallocate()


def test_preallocate_tells_the_bytes_that_the_disk_lacks(folder):
    store = Store(
        folder.path, "opt_state", 0, 1024, RecordFormat((LeafFormat("m", (1 << 40,), "float32"),))
    )
    missing = store.num_bytes - folder.free_bytes()
    with pytest.raises(
        SwapError, match=r"1024 records x \d+ bytes = .* bytes too few.*swap_dir"
    ) as caught:
        store.preallocate()
    told = int(str(caught.value).split(" bytes too few")[0].split()[-1])
    assert abs(told - missing) < 1 << 34, (
        "the reported bytes are off by more than other writers explain"
    )
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(store.path) == ["zarr.json"]


def test_preallocate_on_a_disk_that_fills_meanwhile_is_an_error(small_disk, monkeypatch):
    with SwapFolder(str(small_disk)) as folder:
        store = Store(
            folder.path, "params", 0, 20, RecordFormat((LeafFormat("w", (1 << 16,), "uint8"),))
        )
        free = store_module._free_bytes
        found = iter([lambda path: 1 << 40])
        monkeypatch.setattr(store_module, "_free_bytes", lambda path: next(found, free)(path))
        with pytest.raises(SwapError, match="too few") as caught:
            store.preallocate()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.layer is not None
    assert os.listdir(small_disk) == []


def test_a_file_system_that_cannot_reserve_gets_files_of_the_right_size(folder, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store = Store(folder.path, "params", 0, 2, TWO)
    store.preallocate()
    assert [os.stat(store.record_path(layer)).st_size for layer in range(2)] == [4096, 4096]


@pytest.mark.parametrize(
    ("kind", "rank", "layers"),
    [("", 0, 1), ("a/b", 0, 1), ("..", 0, 1), ("params", -1, 1), ("params", 0, 0)],
)
def test_a_store_of_wrong_arguments_is_refused(folder, kind, rank, layers):
    with pytest.raises(ValueError, match=f"rank={rank}, num_layers={layers}"):
        Store(folder.path, kind, rank, layers, TWO)


def test_a_layer_that_is_not_there_is_refused(folder):
    store = Store(folder.path, "params", 0, 3, TWO)
    for layer in (-1, 3):
        with pytest.raises(ValueError, match=f"layer {layer} of params: there are 3"):
            store.record_path(layer)


def test_a_store_that_exists_already_is_refused(folder):
    Store(folder.path, "params", 0, 3, TWO)
    with pytest.raises(SwapError, match=r"creating the records of params.*ALREADY_EXISTS"):
        Store(folder.path, "params", 0, 3, TWO)


def test_a_store_in_a_folder_that_was_removed_is_an_error(tmp_path):
    with pytest.raises(SwapError, match="ENOENT") as caught:
        Store(str(tmp_path / "gone"), "params", 0, 3, TWO)
    assert caught.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == []


# --- second names ---------------------------------------------------------------------------------


def new(folder, **options):
    return Store(
        folder.path,
        "frozen",
        0,
        2,
        RecordFormat((LeafFormat("w", (96 << 10,), "uint8"),)),
        **options,
    )


def written(folder, **options):
    """Return a store of two records of 96 KiB; record `n` is filled with n + 1."""
    store = new(folder, **options)
    store.preallocate()
    for layer in range(2):
        write(store, layer, layer + 1)
    return store


def write(store, layer, value):
    """Fill a record with a byte, as the engine does.

    The bytes are written to the file that has the record's name after `begin_write`.
    """
    store.begin_write(layer)
    record = np.full(store.format.padded_bytes, value, np.uint8)
    with open(store.record_path(layer), "r+b") as file:
        file.write(record.tobytes())
    store.end_write(layer, 1)


def full(fd, offset, size):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def held_bytes(path):
    """Return the bytes that a folder's files take on disk, counting each file once."""
    files = {
        (found := file.stat()).st_ino: found.st_blocks
        for file in pathlib.Path(path).rglob("*")
        if file.is_file()
    }
    return 512 * sum(files.values())


@pytest.mark.parametrize("written_once", [True, False])
def test_a_linked_record_takes_a_spare_file_unless_it_is_written_once(folder, written_once):
    store = written(folder, written_once=written_once)
    before = held_bytes(folder.path)
    for layer in range(2):
        store.link(layer, os.path.join(folder.path, f"kept-{layer}"))
        store.link(layer, os.path.join(folder.path, f"again-{layer}"))
    assert held_bytes(folder.path) - before == (0 if written_once else store.num_bytes)
    for layer in range(2):  # a new state is created, with different weights
        write(store, layer, 9)
    assert [set(pathlib.Path(folder.path, f"kept-{n}").read_bytes()) for n in range(2)] == [
        {1},
        {2},
    ]
    assert [set(pathlib.Path(store.record_path(n)).read_bytes()) for n in range(2)] == [{9}, {9}]
    assert not [name for name in os.listdir(store.path) if name.startswith("spare")]


def test_a_full_disk_links_what_is_written_once_and_refuses_a_new_state(folder, monkeypatch):
    store = written(folder, written_once=True)
    kept = [os.path.join(folder.path, f"kept-{layer}") for layer in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for layer in range(2):
            store.link(layer, kept[layer])
        with pytest.raises(SwapError, match="frozen") as error:
            store.reserve_spares()
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="No space"):
            store.begin_write(0)
        os.unlink(kept[1])  # the checkpoint is gone: the record is written in place
        write(store, 1, 9)
    assert not [name for name in os.listdir(store.path) if name.startswith("spare")]
    store.reserve_spares()
    assert [os.path.exists(os.path.join(store.path, f"spare.{layer}")) for layer in range(2)] == [
        True,
        False,
    ]
    write(store, 0, 9)
    assert set(pathlib.Path(kept[0]).read_bytes()) == {1}
    assert [set(pathlib.Path(store.record_path(n)).read_bytes()) for n in range(2)] == [{9}, {9}]


def other_files(folder, store):
    """Return a file for each record of a store, as in a checkpoint; record `n` has n + 5."""
    paths = [pathlib.Path(folder.path, f"checkpoint-{layer}") for layer in range(store.num_layers)]
    for layer, path in enumerate(paths):
        path.write_bytes(bytes([layer + 5]) * store.format.padded_bytes)
    return [
        RecordFile(str(path), compute_checksum(np.frombuffer(path.read_bytes(), np.uint8)))
        for path in paths
    ]


@pytest.mark.parametrize("is_new", [True, False])
def test_an_offered_file_becomes_the_record_without_room_and_is_never_written_to(
    folder, monkeypatch, is_new
):
    store = new(folder, written_once=True) if is_new else written(folder, written_once=True)
    files = other_files(folder, store)
    before = held_bytes(folder.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        patch.setattr("host_offload.disk.store._free_bytes", lambda path: 0)
        assert all(store.offer(layer, file) for layer, file in enumerate(files))
        store.preallocate()
        store.reserve_spares()
        assert store.adopt() == {0, 1}
    assert held_bytes(folder.path) == before - (0 if is_new else store.num_bytes)
    assert sorted(os.listdir(store.path)) == ["c.0.0", "c.1.0", "zarr.json"]
    for layer, file in enumerate(files):
        assert os.path.samefile(file.path, store.record_path(layer))
        store.require(layer)
        store.verify(layer, np.fromfile(file.path, np.uint8))
        assert store.offer(layer, file)  # once more: it is already the record
    assert store.adopt() == {0, 1}
    assert sorted(os.listdir(store.path)) == ["c.0.0", "c.1.0", "zarr.json"]
    store.reserve_spares()  # another state
    assert held_bytes(folder.path) == before + (store.num_bytes if is_new else 0)
    for layer in range(2):
        write(store, layer, 9)
    assert [set(pathlib.Path(file.path).read_bytes()) for file in files] == [{5}, {6}]
    assert [set(pathlib.Path(store.record_path(layer)).read_bytes()) for layer in range(2)] == [
        {9},
        {9},
    ]


def test_what_was_offered_and_reserved_is_given_back(folder):
    store = written(folder, written_once=True)
    store.link(1, os.path.join(folder.path, "kept"))
    files = other_files(folder, store)
    before = held_bytes(folder.path)
    assert store.offer(0, files[0])
    store.reserve_spares()
    assert held_bytes(folder.path) == before + store.format.padded_bytes
    store.give_back()
    assert store.adopt() == set()
    assert held_bytes(folder.path) == before
    assert sorted(os.listdir(store.path)) == ["c.0.0", "c.1.0", "zarr.json"]
    assert [set(pathlib.Path(store.record_path(layer)).read_bytes()) for layer in range(2)] == [
        {1},
        {2},
    ]


@pytest.mark.parametrize("what", ["short", "link", "missing", "other file system", "written often"])
def test_a_file_that_cannot_be_a_record_is_not_taken(folder, monkeypatch, what):
    store = written(folder, written_once=what != "written often")
    file = other_files(folder, store)[0]
    if what == "short":
        os.truncate(file.path, 4096)
    if what in ("link", "missing"):
        os.rename(file.path, f"{file.path}.moved")
    if what == "link":
        os.symlink(f"{file.path}.moved", file.path)
    if what == "other file system":
        monkeypatch.setattr(os, "link", other_file_system)
    assert not store.offer(0, file)
    assert store.adopt() == set()
    assert set(pathlib.Path(store.record_path(0)).read_bytes()) == {1}
    assert sorted(os.listdir(store.path)) == ["c.0.0", "c.1.0", "zarr.json"]


def other_file_system(source, target):
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


# --- swap folders ---------------------------------------------------------------------------------


def test_a_swap_folder_is_private_and_goes_when_closed(tmp_path):
    (tmp_path / "of the user").write_text("x")
    folder = SwapFolder(str(tmp_path), process=3)
    assert folder.path == str(tmp_path / "zerojax-swap-3")
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    assert 0 < folder.free_bytes() <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    Store(folder.path, "params", 0, 2, TWO).preallocate()
    for _ in range(2):
        folder.close()
        assert os.listdir(tmp_path) == ["of the user"]


def test_a_swap_folder_goes_with_its_last_reference(tmp_path):
    folder = SwapFolder(str(tmp_path))
    assert os.listdir(tmp_path)
    del folder
    gc.collect()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.write_text("x")], ids=["missing", "file"]
)
def test_a_swap_dir_that_is_no_folder_is_refused(tmp_path, make):
    path = tmp_path / "swap"
    make(path)
    with pytest.raises(
        ValueError, match=r"swap_dir='.*swap' (does not exist|is not a folder).*mkdir"
    ):
        SwapFolder(str(path))


def test_a_read_only_disk_is_refused(read_only_disk):
    with pytest.raises(SwapError, match=r"EROFS.*set another swap_dir") as caught:
        SwapFolder(str(read_only_disk))
    assert caught.value.errno == errno.EROFS


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    if os.geteuid() == 0:  # root may write anywhere, so simulate the kernel's refusal

        def refuse(path, mode=0o777):
            raise PermissionError(errno.EACCES, "Permission denied", path)

        monkeypatch.setattr(os, "mkdir", refuse)
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(SwapError, match=r"EACCES.*give this user the right") as caught:
        SwapFolder(str(tmp_path))
    assert caught.value.file == str(tmp_path / "zerojax-swap-0")


def test_a_disk_without_files_left_is_told_from_a_full_one(tmp_path):
    with (
        disks.mounted(tmp_path / "small", "size=1m,nr_inodes=8") as path,
        SwapFolder(str(path)) as folder,
    ):
        store = Store(folder.path, "params", 0, 20, RecordFormat((LeafFormat("w", (4,), "uint8"),)))
        with pytest.raises(SwapError, match=r"reserving 4096 bytes .*ENOSPC.*df -i") as caught:
            store.preallocate()
        assert caught.value.errno == errno.ENOSPC


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "zerojax-swap-0").write_text("x")
    with pytest.raises(SwapError, match="is not a folder"):
        SwapFolder(str(tmp_path))


def test_a_link_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("x")
    (tmp_path / "zerojax-swap-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SwapError, match="is a symbolic link"):
        SwapFolder(str(tmp_path))
    assert (tmp_path / "elsewhere" / "kept").exists()


HOLDER = """
import os, sys
from host_offload.disk import LeafFormat, RecordFormat, Store, SwapFolder
folder = SwapFolder(sys.argv[1])
Store(folder.path, "params", 0, 2, RecordFormat((LeafFormat("w", (8,), "float32"),))).preallocate()
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


def test_a_second_opener_is_told_who_has_the_folder(tmp_path):
    with run_python(HOLDER, tmp_path) as process:
        pid = process.stdout.readline().strip()
        with pytest.raises(SwapError, match=rf"in use by process {pid}: .*kill {pid}"):
            SwapFolder(str(tmp_path))
        SwapFolder(
            str(tmp_path), process=1
        ).close()  # another process of the same program has its own folder
        process.communicate("\n", timeout=60)  # it ends without closing
    assert os.listdir(tmp_path) == []
    with (
        SwapFolder(str(tmp_path)),
        pytest.raises(SwapError, match=rf"this process \(pid {os.getpid()}\): close that program"),
    ):
        SwapFolder(str(tmp_path))


def test_the_folder_of_a_killed_process_is_emptied_and_used_again(tmp_path, caplog):
    with run_python(HOLDER, tmp_path) as process:
        pid = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert os.path.exists(tmp_path / "zerojax-swap-0" / "params" / "0" / "c.1.0")
    with caplog.at_level(logging.WARNING, "host_offload"), SwapFolder(str(tmp_path)) as folder:
        assert os.listdir(folder.path) == ["lock"]
    assert [f"process {pid}, which is gone" in r.getMessage() for r in caplog.records] == [True]
    assert os.listdir(tmp_path) == []


FORKER = """
import os, sys
from host_offload.disk import SwapFolder
folder = SwapFolder(sys.argv[1])
child = os.fork()
if child == 0:
    folder.close()
    sys.exit()  # runs what is registered with atexit
os.waitpid(child, 0)
assert os.path.exists(os.path.join(folder.path, "lock")), "the child removed its parent's folder"
print(os.getpid(), flush=True)
if os.fork() == 0:
    print("child", flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_a_forked_child_neither_removes_the_folder_nor_keeps_it_locked(tmp_path, caplog):
    with run_python(FORKER, tmp_path) as process:
        pid = process.stdout.readline().strip()
        assert pid, "the process printed nothing: see its traceback"
        assert process.stdout.readline().strip() == "child"  # its fork handlers have run
        process.kill()  # its second child keeps running
        process.wait(timeout=60)
        with SwapFolder(str(tmp_path)):
            assert f"process {pid}, which is gone" in caplog.text
        process.stdin.close()


@pytest.mark.parametrize("removes", ["lock", "folder"])
def test_a_folder_that_its_owner_removes_meanwhile_is_made_anew(tmp_path, monkeypatch, removes):
    path, real, calls = tmp_path / "zerojax-swap-0", fcntl.flock, []

    def race(fd, operation):
        calls.append(fd)
        if len(calls) == 1:  # between open and lock
            (path / "lock").unlink()
            if removes == "folder":
                path.rmdir()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", race)
    with SwapFolder(str(tmp_path)), pytest.raises(SwapError, match="in use"):
        SwapFolder(str(tmp_path))  # a lock on a removed file would keep nobody out
    assert len(calls) == 3
    assert os.listdir(tmp_path) == []


def test_a_folder_that_was_removed_by_hand_closes_without_an_error(tmp_path, caplog):
    folder = SwapFolder(str(tmp_path))
    os.unlink(os.path.join(folder.path, "lock"))
    os.rmdir(folder.path)
    folder.close()
    assert caplog.records == []


def test_swap_folders_leave_no_descriptors(tmp_path):
    before = descriptors()
    for _ in range(20):
        with SwapFolder(str(tmp_path)), pytest.raises(SwapError):
            SwapFolder(str(tmp_path))
    assert not descriptors() - before


def make_fifo(path):
    os.mkfifo(path)


def make_link(path):
    (path.parent.parent / "of the user").write_text("kept")
    path.symlink_to(path.parent.parent / "of the user")


def make_second_name(path):
    (path.parent.parent / "of the user").write_text("kept")
    os.link(path.parent.parent / "of the user", path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a name of at most 107 bytes


@pytest.mark.parametrize(
    ("plant", "what"),
    [(make_fifo, "a FIFO"), (make_link, "a symbolic link"), (os.mkdir, "a folder"), (make_socket, "a socket"),
     (make_second_name, "another name too")],
)  # fmt: skip
def test_what_is_no_file_of_its_own_in_the_place_of_the_lock_is_refused(tmp_path, plant, what):
    path = tmp_path / "zerojax-swap-0"
    path.mkdir(0o700)
    plant(path / "lock")
    (path / "kept").write_text("kept")
    with pytest.raises(
        SwapError, match=rf"swap-0/lock.*{what}.*remove .*swap_dir to another folder"
    ):
        SwapFolder(str(tmp_path))
    assert (path / "kept").read_text() == "kept"
    assert (
        not (tmp_path / "of the user").exists() or (tmp_path / "of the user").read_text() == "kept"
    )


@pytest.mark.parametrize("call", ["lstat", "listdir", "listdir of a folder that goes"])
def test_a_folder_that_goes_between_two_looks_at_it_is_made_anew(tmp_path, monkeypatch, call):
    """Remove the folder as its owner does: first its contents, then the lock file, then itself."""
    path, real, calls = tmp_path / "zerojax-swap-0", getattr(os, call.split()[0]), []
    path.mkdir()
    (path / "lock").touch()

    def race(name, **options):
        is_first = name == str(path) and not calls
        found = real(name, **options) if is_first and " " in call else None
        if is_first:
            calls.append(name)
            (path / "lock").unlink()
            path.rmdir()
        return found or real(name, **options)

    monkeypatch.setattr(os, call.split()[0], race)
    with SwapFolder(str(tmp_path)) as folder:
        assert real(folder.path)
    assert calls


@pytest.mark.by_default("ENOSYS")
@pytest.mark.parametrize(
    "number",
    [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK],
    ids=lambda number: errno.errorcode[number],
)
def test_a_file_system_without_locks_is_refused_and_left_as_it_was(tmp_path, monkeypatch, number):
    def refuse(fd, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = descriptors()
    with pytest.raises(
        SwapError,
        match=rf"{errno.errorcode[number]} \({number}\).*without a lock.*swap_dir.*local disk",
    ) as caught:
        SwapFolder(str(tmp_path))
    assert caught.value.errno == number
    assert not descriptors() - before
    monkeypatch.undo()
    SwapFolder(str(tmp_path)).close()  # the leftovers are taken over, where there are locks
    assert os.listdir(tmp_path) == []


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("ENOSPC", "free space"), ("EDQUOT", "quota"), ("EIO", "dmesg"), ("ENOENT", "cleaners"), ("EROFS", "read-only"),
     ("EACCES", "right to"), ("EMFILE", "ulimit -n"), ("EFBIG", "RLIMIT_FSIZE"), ("EINVAL", "local disk"), ("ENOLCK", "local")],
)  # fmt: skip
def test_an_error_states_file_layer_errno_and_remedy(name, remedy):
    number = getattr(errno, name)
    error = explain(
        OSError(number, os.strerror(number)), doing="reading params", file="/disk/c.3.0", layer=3
    )
    assert (error.file, error.layer, error.errno) == ("/disk/c.3.0", 3, number)
    for part in (
        "reading params of layer 3, /disk/c.3.0 failed",
        f"{name} ({number})",
        os.strerror(number),
        remedy,
    ):
        assert part in str(error)
    assert explain(error, doing="something else") is error


def test_an_error_of_another_kind_keeps_its_words():
    error = explain(ZeroDivisionError("a/0"), doing="reading params")
    assert str(error) == "reading params failed: ZeroDivisionError: a/0"
    assert (error.file, error.layer, error.errno) == (None, None, None)


def test_tensorstores_errors_keep_the_errno():
    error = of_tensorstore(
        ValueError("RESOURCE_EXHAUSTED: Error writing local file: no space [os_error_code='28']")
    )
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    other = ValueError("INVALID_ARGUMENT")
    assert of_tensorstore(other) is other


def test_bytes_of_a_record_follow_from_its_leaves():
    form = RecordFormat(
        (LeafFormat("a", (7,), "float8_e4m3fn"), LeafFormat("b", (1000, 3), "bfloat16"))
    )
    assert form.offsets == (0, 64)
    assert form.num_bytes == 64 + 6000
    assert form.padded_bytes == 8192
    assert form.views(np.zeros(8192, np.uint8))[0].dtype == ml_dtypes.float8_e4m3fn
    assert math.prod(form.leaves[1].shape) == 3000
