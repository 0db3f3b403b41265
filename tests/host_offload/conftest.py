"""Disks that can fail."""

import disks
import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    with disks.mounted(tmp_path / "small", "size=1m") as path:
        yield path


@pytest.fixture
def read_only_disk(tmp_path):
    with disks.mounted(tmp_path / "read_only", "size=1m,ro") as path:
        yield path
