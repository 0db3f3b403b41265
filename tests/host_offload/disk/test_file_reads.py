"""Boxes of arrays in files equal numpy's slices, whatever part is contiguous.

An unreadable byte is an error that names it.
"""

import errno
import math
import os

import ml_dtypes
import numpy as np
import pytest
from disks import ext4, lose_data
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.disk import file_reads
from host_offload.disk.checksum import checksum_of_blocks, compute_checksum
from host_offload.disk.errors import NotRegularError, TruncatedError
from host_offload.disk.file_reads import ReadFile

DTYPES = (np.float32, np.uint8, ml_dtypes.bfloat16)


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    starts = [draw(st.integers(0, size)) for size in shape]
    return shape, tuple(
        (start, draw(st.integers(start, size))) for start, size in zip(starts, shape, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(
    case=boxes(),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    small=st.booleans(),
    data=st.data(),
)
def test_a_box_is_numpys_slice(tmp_path_factory, case, dtypes, small, data):
    """Reduce the sizes, so that blocks of 64 bytes and pieces of 16 reach every branch."""
    (shape, box), (there, here), offset = (
        case,
        map(np.dtype, dtypes),
        data.draw(st.sampled_from([0, 3, 64])),
    )
    whole = (np.arange(math.prod(shape)) % 100).reshape(shape).astype(there)
    path = tmp_path_factory.mktemp("box") / "file"
    path.write_bytes(b"\xff" * offset + whole.tobytes() + b"\xff" * 5)
    expected = whole[tuple(slice(*ends) for ends in box)].astype(here)
    out = np.zeros(expected.shape, here)
    if data.draw(st.booleans()):
        out = out.T.copy().T  # strides that differ from the file's
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(file_reads, "BLOCK_BYTES", 64)
            patch.setattr(file_reads, "PIECE_BYTES", 16)
        ReadFile(str(path)).read_box(offset, shape, np.dtype(there), box, out)
    np.testing.assert_array_equal(out, expected)


def test_no_more_is_held_than_a_block(tmp_path, monkeypatch):
    """Columns of a matrix of 8 blocks are read by blocks of rows.

    Wide pieces that are far apart are read one by one.
    """
    path, sizes = tmp_path / "file", []
    whole = np.random.default_rng(0).standard_normal((4096, 2048), np.float32)
    whole.tofile(path)
    read_bytes = ReadFile.read_bytes

    def noted(self, offset, out):
        sizes.append(out.nbytes)
        read_bytes(self, offset, out)

    monkeypatch.setattr(ReadFile, "read_bytes", noted)
    for shape, box in (
        ((4096, 2048), ((0, 4096), (5, 7))),
        ((64, 131072), ((0, 64), (100, 20000))),
    ):
        sizes.clear()
        out = np.empty([b - a for a, b in box], np.float32)
        ReadFile(str(path)).read_box(0, shape, np.dtype(np.float32), box, out)
        np.testing.assert_array_equal(
            out, whole.reshape(shape)[tuple(slice(*ends) for ends in box)]
        )
        assert max(sizes) <= file_reads.BLOCK_BYTES
        assert sum(sizes) <= (whole.nbytes if shape[1] == 2048 else out.nbytes)


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 128, 1000])
def test_a_checksum_of_blocks_is_that_of_the_bytes(tmp_path, num_bytes, monkeypatch):
    monkeypatch.setattr(file_reads, "BLOCK_BYTES", 64)
    content = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    content.tofile(tmp_path / "file")
    assert checksum_of_blocks(
        ReadFile(str(tmp_path / "file")).blocks(num_bytes)
    ) == compute_checksum(content)


def test_reads_that_are_cut_short_are_continued(tmp_path, monkeypatch):
    content = np.random.default_rng(0).integers(0, 256, 100, np.uint8)
    content.tofile(tmp_path / "file")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset))
    out = np.empty(90, np.uint8)
    ReadFile(str(tmp_path / "file")).read_bytes(10, out)
    np.testing.assert_array_equal(out, content[10:])
    with pytest.raises(TruncatedError, match="ends at byte 100, and 3 more are needed"):
        ReadFile(str(tmp_path / "file")).read_bytes(13, out)


@pytest.mark.parametrize(
    ("path", "kind"), [("fifo", "a FIFO"), (".", "a folder"), ("/dev/zero", "a device")]
)
def test_what_is_no_file_is_told_and_not_waited_for(tmp_path, path, kind):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotRegularError, match=f": {kind} is in its place, and no regular file"):
        ReadFile(str(tmp_path / path))


def test_a_whole_file_is_read_up_to_a_bound(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    file = ReadFile(str(tmp_path / "file"))
    assert file.read_all(3) == file.read_start(7) == b"abc"
    assert file.read_start(2) == b"ab"
    with pytest.raises(TruncatedError, match="has 3 bytes, and at most 2 are expected"):
        file.read_all(2)


def test_an_unreadable_sector_is_an_error_with_its_byte(tmp_path):
    with ext4(tmp_path / "disk", 16 << 20) as folder:
        (path := folder / "file").write_bytes(bytes(1 << 20))
        lose_data(folder, [path])
        with pytest.raises(OSError, match=r"Input/output error at byte \d+: '.*file'") as caught:
            ReadFile(str(path)).read_bytes(0, np.empty(1 << 20, np.uint8))
        assert caught.value.errno == errno.EIO
