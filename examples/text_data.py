"""Turn the bytes of text files into training windows, through grain.

The default corpus needs no download: it is the source of the Python standard library that runs this
script. Files are in the order of their paths. A checksum of a file's path decides whether the file
is held out, so the split does not change when files are added or removed.
"""

import pathlib
import sysconfig
import zlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

HELD_OUT = 20
"""One in `HELD_OUT` files is held out for validation."""

_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "__pycache__",
    "idlelib",
    "turtledemo",
}


def standard_library() -> tuple[pathlib.Path, list[pathlib.Path]]:
    """Return the folder of Python's standard library and its source files without tests.

    The files are in the order of their paths.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    return root, sorted(files, key=lambda p: p.relative_to(root).as_posix())


def text_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the text files below `folder`, in the order of their paths.

    Hidden files, and files with a NUL byte in their first 4096 bytes, are skipped.

    Raises:
      ValueError: `folder` is not a folder, or has no text files.
    """
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: not a folder")
    files = []
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and _is_text(path):
            files.append(path)
    if not files:
        raise ValueError(f"--data {folder}: no text files in it")
    return files


def _is_text(path: pathlib.Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(4096)


def load_corpus(folder: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read a corpus as bytes; a NUL byte follows each file.

    Args:
      folder: folder with text files; None for the standard library.

    Returns:
      (train, held_out), uint8. If the folder has a single file, its last twentieth is held out.
    """
    if folder is None:
        root, files = standard_library()
    else:
        root = pathlib.Path(folder)
        files = text_files(root)
    if len(files) == 1:
        data = np.frombuffer(files[0].read_bytes(), np.uint8)
        cut = len(data) - len(data) // HELD_OUT
        return data[:cut], data[cut:]
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in files:
        is_held_out = zlib.crc32(path.relative_to(root).as_posix().encode()) % HELD_OUT == 0
        parts[is_held_out].append(path.read_bytes() + b"\0")
    # With few files, the checksum may hold out none or all of them.
    if not parts[True]:
        parts[True].append(parts[False].pop())
    if not parts[False]:
        parts[False].append(parts[True].pop())
    return tuple(
        np.frombuffer(b"".join(parts[is_held_out]), np.uint8) for is_held_out in (False, True)
    )  # type: ignore[return-value]


# The text is in memory. grain's defaults, 500 batches ahead in 16 threads, took up to 4 s of a core
# at the start of a run.
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


class Windows(grain.sources.RandomAccessDataSource):
    """Windows of `seq` bytes and their successors: {"tokens": i32[seq], "targets": i32[seq]}."""

    def __init__(self, data: np.ndarray, seq: int) -> None:
        """Split `data` into windows of `seq` bytes.

        Raises:
          ValueError: there are too few bytes for one window.
        """
        if len(data) <= seq:
            raise ValueError(f"{len(data)} bytes of text are too few for windows of {seq}")
        self.data, self.seq = data, seq

    def __len__(self) -> int:
        """Return the number of complete windows."""
        # Subtract one byte: the last window needs a successor.
        return (len(self.data) - 1) // self.seq

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return the window at `index`."""
        piece = self.data[index * self.seq : (index + 1) * self.seq + 1].astype(np.int32)
        return {"tokens": piece[:-1], "targets": piece[1:]}


def batches(
    data: np.ndarray, seq: int, batch_size: int, seed: int, *, part: int = 0, num_parts: int = 1
) -> Iterator[Any]:
    """Return an endless, shuffled iterator of batches.

    Its `get_state` and `set_state` make it checkpointable. The processes' parts of one step form
    the same batch for any number of processes.

    Args:
      data: text as bytes.
      seq: tokens per window.
      batch_size: number of windows in one process's batch.
      seed: seed of the shuffle.
      part: index of the part of each step's windows that this process reads.
      num_parts: number of processes.

    Raises:
      ValueError: there are too few windows for one batch.
    """
    windows = grain.MapDataset.source(Windows(data, seq)).seed(seed).shuffle()
    if len(windows) < batch_size * num_parts:
        raise ValueError(
            f"{len(windows)} windows of {seq} bytes are too few for a batch of "
            f"{batch_size * num_parts}"
        )
    # Processes take batches in turn, so their k-th batches together form step k.
    dealt = windows.repeat().batch(batch_size, drop_remainder=True)[part::num_parts]
    return iter(dealt.to_iter_dataset(READ_AHEAD))


def go_to(iterator: Any, count: int) -> None:
    """Move an iterator from `batches` to the position after `count` batches."""
    iterator.set_state({"next_index": count})  # grain's name for it


def validation_batches(data: np.ndarray, seq: int, batch_size: int, count: int) -> list[Any]:
    """Return at least one and at most `count` batches of held-out windows.

    The windows are spread over the text and always the same.
    """
    windows = Windows(data, seq)
    total = min(count, max(1, len(windows) // batch_size)) * batch_size
    # Spread the windows evenly over the text; repeat them if the text is too short.
    indices = (
        np.arange(total) * len(windows) // total
        if total <= len(windows)
        else np.arange(total) % len(windows)
    )
    rows = [windows[int(i)] for i in indices]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return [
        {k: v[i : i + batch_size] for k, v in stacked.items()} for i in range(0, total, batch_size)
    ]
