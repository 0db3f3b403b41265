"""All tests here compile for absent GPUs."""

import pytest


@pytest.fixture(autouse=True)
def _compiles_for_gpus(h200_compiler):
    pass
