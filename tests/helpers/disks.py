"""File systems that fail: small ones, in memory or in a file, that root may mount."""

import contextlib
import fcntl
import os
import pathlib
import struct
import subprocess
from collections.abc import Iterable, Iterator

import pytest


@contextlib.contextmanager
def mounted(path: pathlib.Path, options: str) -> Iterator[pathlib.Path]:
    """Mount a tmpfs at a new folder, or skip the test."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root and permission to mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextlib.contextmanager
def ext4(path: pathlib.Path, num_bytes: int, options: str = "loop") -> Iterator[pathlib.Path]:
    """Mount an ext4 file system in the file `path`.img, or skip the test."""
    path.mkdir()
    image = path.with_suffix(".img")
    with open(image, "wb") as file:
        file.truncate(num_bytes)
    for command in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", options, str(image), str(path)],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is needed; install e2fsprogs")
        if done.returncode:
            pytest.skip(f"{command[0]} needs root and loop devices: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def lose_data(mount: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Make the bytes of some files on an `ext4` file system unreadable.

    Whatever the kernel has cached stays readable: all names, and the bytes of other files that were
    just written or read.
    """
    os.sync()
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.truncate(mount.with_suffix(".img"), 4096)


def shut_down(mount: pathlib.Path) -> None:
    """Make an `ext4` file system fail, as after a disk error: later writes end in EIO."""
    request = 0x8004587D  # EXT4_IOC_SHUTDOWN
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, request, struct.pack("I", 2))  # without writing its journal
    finally:
        os.close(fd)


def resize(path: pathlib.Path, size: str) -> None:
    """Resize a mounted tmpfs."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)


def fill(path: pathlib.Path) -> pathlib.Path:
    """Fill the file system that holds `folder`; returns the file that takes up the space."""
    ballast = path / "ballast"
    with open(ballast, "wb") as file:
        found = os.statvfs(path)
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)
    assert os.statvfs(path).f_bavail == 0
    return ballast
