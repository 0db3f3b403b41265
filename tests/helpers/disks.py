"""File systems to fail on: small ones in memory, which root may mount."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def mounted(path: pathlib.Path, options: str) -> Iterator[pathlib.Path]:
    """Mount a tmpfs at a new folder, or skip the test."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root and the right to mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def resize(path: pathlib.Path, size: str) -> None:
    """Give a mounted tmpfs another size."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)


def fill(path: pathlib.Path) -> pathlib.Path:
    """Leave no room on the file system of a folder; returns the file that takes it."""
    ballast = path / "ballast"
    with open(ballast, "wb") as file:
        found = os.statvfs(path)
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)
    assert os.statvfs(path).f_bavail == 0
    return ballast
