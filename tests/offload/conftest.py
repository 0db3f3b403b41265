"""Disks to fail on."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    yield from _mounted(tmp_path / "small", "size=1m")


@pytest.fixture
def read_only_disk(tmp_path):
    yield from _mounted(tmp_path / "read_only", "size=1m,ro")


def _mounted(path, options):
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root and the right to mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
