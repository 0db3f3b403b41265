"""Two processes save together and one restores, and the reverse.

An error in one process is raised in both, and no process hangs.
"""

import errno

import numpy as np
import processes
import pytest
import save_together
import toys
from matrix_of_checkpoints import assert_same, numbers

import zerojax as zj

pytestmark = pytest.mark.xdist_group(
    "two_processes_of_checkpoints"
)  # tests share the processes' findings

WORKER = """
import save_together
found = save_together.work(out, me, "TIER")
"""


@pytest.fixture(
    scope="module", params=["device", pytest.param("nvme", marks=pytest.mark.exhaustive)]
)
def found(tmp_path_factory, request):
    """Return this process's program, the two checkpoint folders, and all three processes' findings.

    By default test_two_processes.py saves and restores state on disk.
    """
    folder, tier = tmp_path_factory.mktemp("together"), request.param
    with save_together.build(folder, tier) as program:
        alone = save_together.save(program, folder / "one")
        yield (
            program,
            folder,
            alone,
            processes.launch(WORKER.replace("TIER", tier), folder / "two", 2, devices=4),
        )


def test_one_process_restores_what_two_saved(found, tmp_path):
    program, folder, alone, (first, second) = found
    assert first["trained"] == second["trained"]
    np.testing.assert_allclose(first["trained"], alone, rtol=1e-5)
    directory = folder / "two" / "saved"
    with zj.Checkpointer(directory) as ckpt:
        with pytest.raises(zj.IteratorError, match="iterators of 2 processes, and this run has 1"):
            ckpt.restore(program, data=save_together.Counter())
        state = ckpt.restore(program)
        with zj.Checkpointer(tmp_path / "again") as again:
            again.save(program, state)
        assert_same(
            numbers(tmp_path / "again", save_together.STEPS),
            numbers(directory, save_together.STEPS),
        )
        losses, _ = toys.run(program, state, toys.batches(5)[save_together.STEPS :])
    np.testing.assert_allclose(losses, first["trained"][save_together.STEPS :], rtol=1e-5)


def test_two_processes_restore_what_one_saved(found):
    _, folder, alone, (first, second) = found
    again, saved = folder / "two" / "again", folder / "one"
    assert_same(numbers(again, save_together.STEPS), numbers(saved, save_together.STEPS))
    assert first["restored"] == second["restored"]
    np.testing.assert_allclose(first["restored"], alone[save_together.STEPS :], rtol=1e-5)


def test_each_process_restores_its_iterator(found):
    *_, both = found
    assert [each["position"] for each in both] == [save_together.STEPS, 10 + save_together.STEPS]


def test_what_one_process_finds_damaged_all_pass_over(found):
    *_, both = found
    assert [each["passed over"] for each in both] == [1, 1]


def failed_in(process):
    return f"saving the checkpoint of process {process} failed: that process raises the error, with its cause and remedy"


def test_what_fails_in_one_process_is_raised_in_both(found):
    *_, (first, second) = found
    assert second["copying"] == ["save", "ZeroDivisionError", "no position", None]
    assert first["copying"] == ["save", "CheckpointError", failed_in(1), None]
    assert [first["making"][k] for k in (0, 1, 3)] == ["save", "CheckpointError", errno.ENOSPC]
    assert second["making"] == ["save", "CheckpointError", failed_in(0), None]
    assert second["writing"][:2] == ["wait", "CheckpointError"]
    assert second["writing"][3] == errno.ENOSPC
    assert first["writing"] == ["wait", "CheckpointError", failed_in(1), None]
    assert first["committing"][:2] == ["wait", "CheckpointError"]
    assert "already exists" in first["committing"][2]
    assert second["committing"] == ["wait", "CheckpointError", failed_in(0), None]
    for each in (first, second):
        assert each["left"] == {what: [] for what in ("copying", "making", "writing", "committing")}
        assert each["after"] == [3]
