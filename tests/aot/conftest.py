"""Everything here compiles for GPUs that are not there."""

import pytest


@pytest.fixture(autouse=True)
def _compiles_for_gpus(h200_compiler):
    pass
