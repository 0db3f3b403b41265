"""Streamed from disk = resident: the nvme tier changes no number, and no error of it goes unseen."""

import matrix
import pytest

DISK, HOST = matrix.DISK, matrix.HOST
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}


@pytest.mark.parametrize("case", matrix.pairwise(matrix.every_case_on_disk()), ids=matrix.name_of)
def test_nvme_step_equals_the_resident_one(case, tmp_path):
    ulps, relative = matrix.differences(case, str(tmp_path))
    most_ulps, most_relative = matrix.bounds(case)
    assert ulps <= most_ulps
    assert relative <= most_relative
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
