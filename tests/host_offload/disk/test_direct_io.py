import concurrent.futures
import errno
import functools
import json
import logging
import os
import pathlib
import re
import resource
import signal
import threading
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_files import descriptors

from host_offload.device.buffers import allocate
from host_offload.disk import checksum as checksum_module
from host_offload.disk import tuning
from host_offload.disk.checksum import compute_checksum
from host_offload.disk.direct_file import DirectFile, read_file, write_file
from host_offload.disk.direct_io import DirectIo
from host_offload.disk.errors import SwapError
from host_offload.disk.folder import SwapFolder
from host_offload.disk.record_format import LeafFormat, RecordFormat
from host_offload.disk.store import Store
from host_offload.disk.tensorstore_io import TensorstoreIo
from host_offload.disk.tuning import IoSettings, tune

SMALL = IoSettings(num_threads=3, block_bytes=8192)
READERS = {"direct": lambda s=SMALL: DirectIo(s), "tensorstore": lambda s=SMALL: TensorstoreIo(s)}
LAYERS = 4


@pytest.fixture(params=list(READERS))
def io(request):
    with READERS[request.param]() as io:
        yield io


@pytest.fixture
def direct():
    with DirectIo(SMALL) as io:
        yield io


@pytest.fixture
def store(tmp_path):
    with SwapFolder(str(tmp_path)) as folder:
        yield make_store(folder)


def make_store(folder, num_bytes=40_000, kind="params", layers=LAYERS):
    return Store(
        folder.path, kind, 0, layers, RecordFormat((LeafFormat("w", (num_bytes,), "uint8"),))
    )


def random_record(store, seed=0):
    buffer = allocate(store.format.padded_bytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, buffer.nbytes, np.uint8)
    return buffer


def at_address(num_bytes, shift):
    """Return uint8[num_bytes] at an address `shift` past a multiple of 4096."""
    return allocate(num_bytes + shift)[shift:]


# --- files ----------------------------------------------------------------------------------------

sizes = st.one_of(st.integers(1, 20_000), st.sampled_from([1, 4095, 4096, 4097, 8192, 12288]))
offsets = st.one_of(st.integers(0, 10_000), st.sampled_from([0, 1, 4095, 4096, 8192]))
shifts = st.sampled_from([0, 0, 1, 512, 4000, 4095])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("files") / "file"


@settings(max_examples=120, deadline=None)
@given(sizes, offsets, shifts, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_span_is_written_and_read_exactly(scratch, size, offset, shift, even, direct, seed):
    if even:  # offset and address are congruent: a body in the middle is direct
        shift = offset % 4096
    before = np.random.default_rng(1).bytes(30_000)
    scratch.write_bytes(before)
    buffer = at_address(size, shift)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    write_file(str(scratch), buffer, size, offset=offset, direct=direct)
    expected = bytearray(before.ljust(offset + size, b"\0"))
    expected[offset : offset + size] = buffer.tobytes()
    assert scratch.read_bytes() == bytes(expected)
    found = at_address(size + 10, shift)
    read_file(str(scratch), found, size, offset=offset, direct=direct)
    assert found[:size].tobytes() == buffer.tobytes()
    assert not found[size:].any(), "bytes beyond the span were written"


def is_direct(fd):
    line = next(
        x
        for x in pathlib.Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        if x.startswith("flags")
    )
    return bool(int(line.split()[1], 8) & os.O_DIRECT)


def wrap_transfers(monkeypatch, wrapper):
    """Replace preadv and pwritev by wrapper(real, fd, parts, offset)."""
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, functools.partial(wrapper, getattr(os, name)))


def calls_of(monkeypatch):
    """Return the calls of preadv and pwritev as (is direct, offset, length)."""
    calls = []

    def record(real, fd, parts, offset):
        calls.append((is_direct(fd), offset, len(parts[0])))
        return real(fd, parts, offset)

    wrap_transfers(monkeypatch, record)
    return calls


@pytest.fixture
def o_direct(scratch):
    scratch.touch()
    with DirectFile(str(scratch), writes=False) as file:
        if not file.direct:
            pytest.skip(f"the file system of {scratch} does not support O_DIRECT")


@pytest.mark.usefixtures("o_direct")
def test_a_span_is_direct_but_for_head_and_tail(scratch, monkeypatch):
    calls = calls_of(monkeypatch)
    write_file(str(scratch), at_address(20_000, 4000), 20_000, offset=4000)
    body = 16384
    assert calls == [
        (False, 4000, 96),
        (True, 4096, body),
        (False, 4096 + body, 20_000 - 96 - body),
    ]
    calls.clear()
    read_file(str(scratch), at_address(8192, 1), 8192)  # the address is unsuitable
    assert calls == [(False, 0, 8192)]


def test_a_file_that_ends_before_is_an_error(scratch):
    scratch.write_bytes(b"x" * 5000)
    with pytest.raises(OSError, match="ends at byte 5000, and 3192 bytes more"):
        read_file(str(scratch), allocate(8192), 8192)


def test_a_buffer_that_is_too_short_is_refused(scratch):
    for call in (read_file, write_file):
        with pytest.raises(ValueError, match="n >= 5000"):
            call(str(scratch), allocate(4096), 5000)


def test_short_transfers_go_on_where_they_ended(scratch, monkeypatch):
    random = np.random.default_rng(0)

    def shorten(real, fd, parts, at):
        return real(fd, [parts[0][: random.integers(1, len(parts[0]) + 1)]], at)

    wrap_transfers(monkeypatch, shorten)
    buffer, found = allocate(20_000), allocate(20_000)
    buffer[:] = random.integers(0, 256, 20_000)
    write_file(str(scratch), buffer, 20_000, direct=False)  # any length is suitable
    read_file(str(scratch), found, 20_000, direct=False)
    np.testing.assert_array_equal(found, buffer)


@pytest.mark.usefixtures("o_direct")
def test_a_direct_transfer_that_ends_within_a_sector_goes_on_buffered(scratch, monkeypatch):
    scratch.write_bytes(np.random.default_rng(0).bytes(12288))
    calls, first = calls_of(monkeypatch), [5000]

    def shorten(real, fd, parts, at):
        moved = real(fd, parts, at)
        return first.pop() if first else moved

    wrap_transfers(monkeypatch, shorten)
    found = allocate(12288)
    read_file(str(scratch), found, 12288)
    assert found.tobytes() == scratch.read_bytes()
    assert calls == [(True, 0, 12288), (False, 5000, 3192), (True, 8192, 4096)]


# --- records --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60_000),
    st.integers(1, 5),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([0, 0, 8]),
)
def test_records_are_what_was_written_for_any_blocks_and_threads(
    tmp_path_factory, size, blocks, threads, preallocated, shift
):
    with (
        SwapFolder(str(tmp_path_factory.mktemp("swap"))) as folder,
        DirectIo(IoSettings(threads, blocks * 4096)) as io,
    ):
        store = make_store(folder, size)
        if preallocated:
            store.preallocate()
        records = [at_address(store.format.padded_bytes, shift) for _ in range(LAYERS)]
        for layer, record in enumerate(records):
            record[:] = np.random.default_rng(layer).integers(0, 256, record.nbytes, np.uint8)
        for future in [io.write(store, layer, record) for layer, record in enumerate(records)]:
            assert future.result(60) > 0
        found = [at_address(store.format.padded_bytes, shift) for _ in range(LAYERS)]
        for future in [io.read(store, layer, buffer) for layer, buffer in enumerate(found)]:
            future.result(60)
        for layer, (record, buffer) in enumerate(zip(records, found, strict=True)):
            assert (
                pathlib.Path(store.record_path(layer)).read_bytes()
                == record.tobytes()
                == buffer.tobytes()
            )


@pytest.mark.parametrize("reads", READERS)
@pytest.mark.parametrize("writes", READERS)
def test_each_reader_reads_bit_for_bit_what_the_other_wrote(store, writes, reads):
    with READERS[writes]() as writer, READERS[reads]() as reader:
        for turn in range(2):  # and over existing data
            record, found = random_record(store, turn), random_record(store, 9)
            writer.write(store, 1, record).result(60)
            reader.read(store, 1, found).result(60)
            np.testing.assert_array_equal(found, record)
            assert int(store.checksums[1]) == compute_checksum(record)


def test_several_threads_work_at_one_record(store, direct, monkeypatch):
    together = threading.Barrier(SMALL.num_threads)
    real = os.pwritev

    def meet(*arguments):
        if arguments[2] < SMALL.num_threads * SMALL.block_bytes:
            together.wait(30)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", meet)
    direct.write(store, 0, random_record(store)).result(60)


def test_a_larger_buffer_serves_and_keeps_its_rest(store, io):
    size = store.format.padded_bytes
    buffer = allocate(size + 8192)
    buffer[size:] = 7
    io.write(store, 0, buffer).result(60)
    buffer[:size] = 1
    io.read(store, 0, buffer).result(60)
    assert not buffer[:size].any()
    assert (buffer[size:] == 7).all()


def test_wrong_arguments_are_refused_at_once(store, io):
    small, frozen = allocate(4096), random_record(store)
    frozen.flags.writeable = False
    for call in (io.read, io.write):
        with pytest.raises(ValueError, match="n >= 40960"):
            call(store, 0, small)
        with pytest.raises(ValueError, match="layer 4 of params"):
            call(store, LAYERS, random_record(store))
    with pytest.raises(ValueError, match="writable"):
        io.read(store, 0, frozen)
    io.write(store, 0, frozen).result(60)


@pytest.mark.parametrize(
    ("threads", "block"),
    [(0, 4096), (1, 0), (1, 5000), (1000, 4096), (1.5, 4096), (1, 4096.0), (1, 1 << 40)],
)
def test_settings_that_do_not_serve_are_refused(threads, block):
    with pytest.raises(ValueError, match=f"num_threads={threads}, block_bytes={block}"):
        IoSettings(threads, block)


def test_a_closed_reader_refuses(store, io):
    io.write(store, 0, random_record(store))
    io.close()
    assert store.written[0], "closing must wait"
    with pytest.raises(RuntimeError, match="shutdown"):
        io.read(store, 0, random_record(store))


def test_a_pending_transfer_can_be_cancelled(store, monkeypatch):
    entered, go, real = threading.Event(), threading.Event(), os.pwritev

    def hold(*arguments):
        entered.set()
        assert go.wait(30)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", hold)
    with DirectIo(IoSettings(1, 8192)) as io:
        first, second = (
            io.write(store, 0, random_record(store)),
            io.write(store, 1, random_record(store)),
        )
        assert entered.wait(30)
        assert second.cancel()
        go.set()
        assert first.result(60) > 0
    assert not store.written[1]
    assert not os.path.exists(store.record_path(1))


# --- checksums ------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=3000), st.integers(0, 2**31))
def test_a_checksum_tells_a_flipped_bit(contents, where):
    buffer = np.frombuffer(contents, np.uint8).copy()
    before = compute_checksum(buffer)
    assert 0 < before < 2**64
    assert compute_checksum(buffer.copy()) == before
    where %= 8 * buffer.size
    buffer[where // 8] ^= 1 << where % 8
    assert compute_checksum(buffer) != before


def test_a_checksum_is_never_zero(monkeypatch):
    monkeypatch.setattr(
        checksum_module, "xxhash", types.SimpleNamespace(xxh3_64_intdigest=lambda data: 0)
    )
    assert compute_checksum(np.zeros(8, np.uint8)) == 1


def test_a_record_without_a_checksum_is_read_as_it_is(store, io):
    io.write(store, 0, random_record(store), checksum=False).result(60)
    assert store.checksums[0] == 0
    flip_a_bit(store.record_path(0))
    io.read(store, 0, random_record(store)).result(60)


# --- failures -------------------------------------------------------------------------------------


def flip_a_bit(path):
    contents = bytearray(pathlib.Path(path).read_bytes())
    contents[20_001] ^= 16
    pathlib.Path(path).write_bytes(bytes(contents))


def append(path):
    with open(path, "ab") as file:
        file.write(b"x")


FAULTS = {
    "flipped bit": (flip_a_bit, "a bit flipped, or another program overwrote it", None),
    "truncated": (lambda path: os.truncate(path, 10_000), "changed its size", None),
    "emptied": (lambda path: os.truncate(path, 0), "changed its size", None),
    "longer": (append, "changed its size", None),
    "removed": (os.unlink, "something removed it", errno.ENOENT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_record_is_an_error(store, io, fault):
    damage, message, number = FAULTS[fault]
    io.write(store, 2, random_record(store)).result(60)
    damage(store.record_path(2))
    with pytest.raises(
        SwapError, match=rf"reading params of rank 0 of layer 2, .*c\.2\.0 failed.*{message}"
    ) as caught:
        io.read(store, 2, random_record(store)).result(60)
    assert (caught.value.file, caught.value.layer, caught.value.errno) == (
        store.record_path(2),
        2,
        number,
    )
    record = random_record(store, 5)  # writing it again repairs it
    io.write(store, 2, record).result(60)
    found = random_record(store)
    io.read(store, 2, found).result(60)
    np.testing.assert_array_equal(found, record)


def link_elsewhere(path):
    os.rename(path, elsewhere := f"{path}.elsewhere")
    os.symlink(elsewhere, path)


PLANTED = {
    "fifo": (os.mkfifo, "a FIFO"),
    "folder": (os.mkdir, "a folder"),
    "link": (link_elsewhere, "a symbolic link"),
}


def error_of(transfer, fifo):
    try:
        return str(transfer.exception(10))
    finally:
        if not transfer.done():  # let it continue
            os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_put_in_a_records_place_is_neither_followed_nor_waited_for(store, io, planted):
    plant, what = PLANTED[planted]
    record = random_record(store)
    io.write(store, 2, record).result(60)
    path = store.record_path(2)
    if planted != "link":
        os.unlink(path)
    plant(path)
    message = rf"layer 2, {path} failed: {what} is in its place.*remove it, and keep other programs off swap_dir"
    for call in (io.read, io.write):
        assert re.search(message, error_of(call(store, 2, record), path))
    with pytest.raises(SwapError, match=rf"reserving .*{what} is in its place"):
        store.preallocate()


def test_a_fifo_in_the_place_of_what_tensorstore_opens_beside_a_record_is_an_error(store):
    record, description = random_record(store), os.path.join(store.path, "zarr.json")
    with READERS["tensorstore"]() as io:
        io.write(store, 2, record).result(60)
        os.mkfifo(path := store.record_path(2) + ".__lock")
        assert "a FIFO is in its place" in error_of(io.write(store, 2, record), path)
    os.unlink(description)
    os.mkfifo(description)
    with READERS["tensorstore"]() as io:
        assert re.search(
            r"zarr\.json failed: a FIFO is in its place",
            error_of(io.read(store, 1, record, verify=False), description),
        )


def test_a_flipped_bit_passes_where_it_is_not_asked(store, io):
    io.write(store, 0, random_record(store)).result(60)
    flip_a_bit(store.record_path(0))
    io.read(store, 0, random_record(store), verify=False).result(60)


def test_a_record_that_was_never_written_is_no_zeros(store, io):
    store.preallocate()
    with pytest.raises(SwapError, match=r"params of layer 3, .*never written completely"):
        io.read(store, 3, random_record(store)).result(60)


@pytest.mark.by_default("3-EIO", "0-EDQUOT")
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EMFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("block", [0, 3])
def test_an_error_of_the_disk_comes_out_of_the_future(store, direct, monkeypatch, number, block):
    direct.write(store, 1, random_record(store)).result(60)
    before = descriptors()

    def fail(real, fd, parts, at):
        if at == block * SMALL.block_bytes:
            raise OSError(number, os.strerror(number))
        return real(fd, parts, at)

    wrap_transfers(monkeypatch, fail)
    name = errno.errorcode[number]
    with pytest.raises(
        SwapError, match=rf"reading params of rank 0 of layer 1.*{name} \({number}\)"
    ) as caught:
        direct.read(store, 1, random_record(store)).result(60)
    assert (caught.value.errno, caught.value.layer) == (number, 1)
    with pytest.raises(SwapError, match=rf"writing params of rank 0 of layer 1.*{name}"):
        direct.write(store, 1, random_record(store)).result(60)
    assert not descriptors() - before
    monkeypatch.undo()
    with pytest.raises(SwapError, match="never written completely"):  # half of it is new
        direct.read(store, 1, random_record(store)).result(60)


def test_a_file_that_cannot_be_opened_is_an_error(store, direct, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SwapError, match="ulimit -n"):
        direct.write(store, 0, random_record(store)).result(60)


def test_a_full_disk_is_an_error_and_leaves_the_folder_removable(small_disk, io):
    with SwapFolder(str(small_disk)) as folder:
        store = make_store(folder, 300_000, layers=8)

        def write_all():
            for layer in range(8):
                io.write(store, layer, random_record(store)).result(60)

        with pytest.raises(
            SwapError, match=r"writing params .*ENOSPC \(28\).*free space"
        ) as caught:
            write_all()
        failed = caught.value.layer
        assert failed in (2, 3)
        assert caught.value.file == store.record_path(failed)
        assert store.written.tolist() == [layer < failed for layer in range(8)]
        found = random_record(store, 9)
        io.read(store, 0, found).result(60)  # earlier data is intact
        np.testing.assert_array_equal(found, random_record(store))
    assert os.listdir(small_disk) == []


def test_a_write_that_fails_is_an_error_and_the_record_counts_as_lost(store, io):
    io.write(store, 0, random_record(store)).result(60)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SwapError, match=r"EFBIG.*RLIMIT_FSIZE"):
            io.write(store, 0, random_record(store)).result(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    with pytest.raises(SwapError, match="never written completely"):
        io.read(store, 0, random_record(store)).result(60)


def test_many_cycles_with_failures_leave_no_descriptors_and_no_threads(store):
    def cycle():
        with DirectIo(SMALL) as direct, TensorstoreIo(SMALL) as through:
            for io in (direct, through):
                concurrent.futures.wait(
                    [io.write(store, layer, random_record(store)) for layer in range(3)]
                )
                os.unlink(store.record_path(2))
                os.truncate(store.record_path(1), 5)
                done = [io.read(store, layer, random_record(store)) for layer in range(4)]
                assert [type(f.exception(60)) for f in done] == [
                    type(None),
                    SwapError,
                    SwapError,
                    SwapError,
                ]

    cycle()  # tensorstore keeps its own threads
    files, threads = descriptors(), set(threading.enumerate())
    for _ in range(15):
        cycle()
    assert not descriptors() - files
    assert not set(threading.enumerate()) - threads


# --- file systems without O_DIRECT ----------------------------------------------------------------


def refuse_at_open(monkeypatch):
    real = os.open

    def open_(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_)


def refuse_at_transfer(monkeypatch):
    def call(real, fd, parts, at):
        if is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, parts, at)

    wrap_transfers(monkeypatch, call)


@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_transfer])
def test_a_file_system_without_o_direct_is_served_buffered_and_named_once(
    store, direct, monkeypatch, caplog, refuse
):
    refuse(monkeypatch)
    with caplog.at_level(logging.WARNING, "host_offload"):
        for layer in range(LAYERS):
            record, found = random_record(store, layer), random_record(store, 9)
            direct.write(store, layer, record).result(60)
            direct.read(store, layer, found).result(60)
            np.testing.assert_array_equal(found, record)
    swap = os.path.dirname(os.path.dirname(store.path))
    assert [r.getMessage().startswith(f"{swap} has no O_DIRECT") for r in caplog.records] == [True]


# --- tuning ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_PROBE_BYTES", 2 << 20)
    tuning._tune.cache_clear()
    with SwapFolder(str(tmp_path)) as folder:
        yield folder
    tuning._tune.cache_clear()


@pytest.fixture
def rates(monkeypatch):
    """Replace the disk's measured rates; returns rates by settings, and the settings tried."""
    told, tried = {}, []

    def rate(path, buffer, settings, pool):
        tried.append(settings)
        return told.get(settings, 1.0)

    monkeypatch.setattr(tuning, "_rate", rate)
    return told, tried


def test_a_probe_reads_the_disk_and_leaves_no_file(folder):
    assert tune(folder.path, seconds=0.05) in tuning._CANDIDATES
    assert os.listdir(folder.path) == ["lock"]


def test_the_fastest_settings_are_found_and_kept(folder, rates, monkeypatch):
    told, tried = rates
    best = IoSettings(8, 1 << 20)
    told.update({best: 3.0, tuning.DEFAULT: 2.9, IoSettings(2, 4 << 20): 3.5})
    clock = iter(range(10_000))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(clock) / 100)
    assert tune(folder.path) == IoSettings(2, 4 << 20)
    assert set(tried) == set(tuning._CANDIDATES)
    tried.clear()
    assert tune(folder.path) == IoSettings(2, 4 << 20)
    tuning._tune.cache_clear()  # another process
    assert tune(folder.path) == IoSettings(2, 4 << 20)
    assert tried == []


def test_settings_that_are_hardly_faster_do_not_replace_the_default(folder, rates):
    told, _ = rates
    told.update({tuning.DEFAULT: 1.0, IoSettings(8, 1 << 20): 1.04})
    assert tune(folder.path, seconds=0.05) == tuning.DEFAULT


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"identity": [0, 0, 0], "num_threads": 1, "block_bytes": 4096}',
        "other",
        "wrong",
    ],
)
def test_an_answer_that_cannot_be_read_or_is_of_another_disk_is_not_used(
    folder, rates, contents, tmp_path
):
    identity = list(tuning._identity(folder.path))
    if contents == "other":
        contents = json.dumps(
            {"identity": [identity[0] + 1, *identity[1:]], "num_threads": 1, "block_bytes": 4096}
        )
    elif contents == "wrong":
        contents = json.dumps({"identity": identity, "num_threads": 0, "block_bytes": 4096})
    (tmp_path / tuning._CACHE).write_text(contents)
    assert tune(folder.path, seconds=0.05) == tuning.DEFAULT
    assert rates[1], "the disk was not probed"
    assert json.loads((tmp_path / tuning._CACHE).read_text())["identity"] == identity


def of_everyone(path):
    path.chmod(0o666)


def of_another_user(path):
    os.chown(path, os.geteuid() + 1, -1)


def link_to_it(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path):
    path.unlink()
    os.mkfifo(path)


NOT_TRUSTED = {
    "of everyone": of_everyone,
    "of another user": of_another_user,
    "link": link_to_it,
    "fifo": fifo,
    "no candidate": lambda path: path.write_text(path.read_text().replace("4194304", str(1 << 30))),
    "deep": lambda path: path.write_text("[" * 4000),
    "long number": lambda path: path.write_text(path.read_text().replace("4194304", "9" * 4000)),
}


@pytest.mark.parametrize("case", NOT_TRUSTED)
def test_an_answer_that_others_may_have_written_is_not_used(folder, rates, tmp_path, case):
    if case == "of another user" and os.geteuid():
        pytest.skip("only root can create another user's file")
    cache, chosen = tmp_path / tuning._CACHE, IoSettings(2, 4 << 20)
    tuning._save(cache, tuning._identity(folder.path), chosen)
    assert cache.stat().st_mode & 0o777 == 0o600
    assert tune(folder.path) == chosen
    assert not rates[1]
    tuning._tune.cache_clear()
    NOT_TRUSTED[case](cache)
    assert tune(folder.path, seconds=0.05) == tuning.DEFAULT
    assert rates[1], "the disk was not probed"
    assert (cache.is_file(), cache.is_symlink(), cache.stat().st_uid) == (True, False, os.geteuid())


def test_an_answer_is_written_through_no_name_that_is_there(folder, rates, tmp_path):
    victim = tmp_path / "of the user"
    victim.write_text("kept")
    cache = tmp_path / tuning._CACHE
    for name in (cache, tmp_path / f"{cache.name}.{os.getpid()}"):
        name.symlink_to(victim)
    assert tune(folder.path, seconds=0.05) == tuning.DEFAULT
    assert victim.read_text() == "kept"
    assert json.loads(cache.read_text())["num_threads"] == tuning.DEFAULT.num_threads
    assert {path.name for path in tmp_path.iterdir()} == {
        "of the user", "zerojax-swap-0", cache.name, f"{cache.name}.{os.getpid()}"
    }  # fmt: skip


def test_an_answer_that_cannot_be_kept_leaves_no_file(folder, rates, tmp_path):
    (tmp_path / tuning._CACHE / "in use").mkdir(parents=True)
    assert tune(folder.path, seconds=0.05) == tuning.DEFAULT
    assert {path.name for path in tmp_path.iterdir()} == {"zerojax-swap-0", tuning._CACHE}


def test_a_probe_that_fails_gives_the_default_and_leaves_no_file(small_disk, caplog, monkeypatch):
    monkeypatch.setattr(tuning, "_PROBE_BYTES", 4 << 20)
    tuning._tune.cache_clear()
    with SwapFolder(str(small_disk)) as folder, caplog.at_level(logging.WARNING, "host_offload"):
        assert tune(folder.path) == tuning.DEFAULT == IoSettings(4, 8 << 20)
        assert os.listdir(folder.path) == ["lock"]
    assert "No space left" in caplog.text
