"""Two processes save together and one restores, and the reverse; what fails in one is raised in both, and nobody waits."""

import errno

import numpy as np
import processes
import pytest
import save_together
import toys
from matrix_of_checkpoints import assert_same, numbers
from save_together import TIERS

import zerojax as zj

pytestmark = pytest.mark.xdist_group("two_processes_of_checkpoints")  # tests share what the processes found

WORKER = """
import save_together
found = save_together.work(out, me)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder of this process's checkpoints and of two processes', and what each of the three found."""
    folder, alone = tmp_path_factory.mktemp("together"), {}
    for tier in TIERS:
        with save_together.build(folder, tier) as program:
            alone[tier] = save_together.save(program, folder / "one" / tier)
    return folder, alone, processes.launch(WORKER, folder / "two", 2, devices=4)


@pytest.mark.parametrize("tier", TIERS)
def test_one_process_restores_what_two_saved(found, tier, tmp_path):
    folder, alone, (first, second) = found
    assert first["trained"][tier] == second["trained"][tier]
    np.testing.assert_allclose(first["trained"][tier], alone[tier], rtol=1e-5)
    directory = folder / "two" / "saved" / tier
    with save_together.build(tmp_path, tier) as program, zj.Checkpointer(directory) as ckpt:
        with pytest.raises(zj.IteratorError, match="iterators of 2 processes, and these are 1"):
            ckpt.restore(program, data=save_together.Counter())
        state = ckpt.restore(program)
        with zj.Checkpointer(tmp_path / "again") as again:
            again.save(program, state)
        assert_same(numbers(tmp_path / "again", save_together.STEPS), numbers(directory, save_together.STEPS))
        losses, _ = toys.run(program, state, toys.batches(5)[save_together.STEPS :])
    np.testing.assert_allclose(losses, first["trained"][tier][save_together.STEPS :], rtol=1e-5)


@pytest.mark.parametrize("tier", TIERS)
def test_two_processes_restore_what_one_saved(found, tier):
    folder, alone, (first, second) = found
    again, saved = folder / "two" / "again" / tier, folder / "one" / tier
    assert_same(numbers(again, save_together.STEPS), numbers(saved, save_together.STEPS))
    assert first["restored"][tier] == second["restored"][tier]
    np.testing.assert_allclose(first["restored"][tier], alone[tier][save_together.STEPS :], rtol=1e-5)


def test_each_process_restores_its_iterator(found):
    _, _, both = found
    assert [each["position"] for each in both] == [save_together.STEPS, 10 + save_together.STEPS]


def test_what_one_process_finds_damaged_all_pass_over(found):
    _, _, both = found
    assert [each["passed over"] for each in both] == [1, 1]


def failed_in(process):
    return f"saving the checkpoint of process {process} failed: that process raises the error, with its cause and remedy"


def test_what_fails_in_one_process_is_raised_in_both(found):
    _, _, (first, second) = found
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
