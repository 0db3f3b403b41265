"""Programs from disk are built many times here: the disk is not probed for each."""

import pytest

from host_offload.tuning import DEFAULT


@pytest.fixture(autouse=True)
def _probed(monkeypatch):
    monkeypatch.setattr("zerojax.disk.tune", lambda _: DEFAULT)
