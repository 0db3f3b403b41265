"""Batches are shuffled again in each epoch, and do not depend on the number of processes.

Iteration continues where it stopped.
"""

import itertools

import jax
import numpy as np
import optax
import pytest
import toys
from packed_examples import examples_of

import zerojax as zj
from zerojax import data

ROWS = data.pack(examples_of([4] * 48), 6)  # of 3 positions each, two per row: 24 rows


def firsts(batch):
    """Return values that identify the rows."""
    return batch["tokens"][:, 0]


def test_every_row_comes_once_in_an_epoch_and_epochs_differ():
    taken = [firsts(batch) for batch in itertools.islice(data.batches(ROWS, 6, seed=3), 8)]
    first, second = np.concatenate(taken[:4]).tolist(), np.concatenate(taken[4:]).tolist()
    every = sorted(ROWS[i]["tokens"][0] for i in range(24))
    assert sorted(first) == sorted(second) == every
    assert first != second
    assert np.array_equal(firsts(next(data.batches(ROWS, 6, seed=3))), taken[0])
    assert not np.array_equal(firsts(next(data.batches(ROWS, 6, seed=4))), taken[0])


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_together_read_the_rows_of_one(processes):
    alone = data.batches(ROWS, 18, seed=1)
    together = [
        data.batches(ROWS, 18, seed=1, part=part, num_parts=processes) for part in range(processes)
    ]
    for _ in range(5):  # epochs end within batches
        own = np.concatenate([firsts(next(part)) for part in together])
        assert np.array_equal(own, firsts(next(alone)))


def test_checkpointer_continues_a_run_of_batches(tmp_path):
    model, mesh = toys.layered(), zj.make_mesh(fsdp=8)
    program = zj.build_train_step(model, optax.sgd(0.1), zj.ZeroConfig(stage=3), mesh)
    state = program.init(jax.random.key(0))
    read = data.batches(ROWS, 8, seed=5)
    for _ in range(5):
        next(read)
    with zj.Checkpointer(tmp_path / "checkpoints") as ckpt:
        ckpt.save(program, state, data=read)
        after = np.stack([firsts(next(read)) for _ in range(3)])
        again = data.batches(ROWS, 8, seed=5)
        ckpt.restore(program, data=again)
        assert np.array_equal(np.stack([firsts(next(again)) for _ in range(3)]), after)
        with pytest.raises(ValueError, match="seed that it was saved with"):
            ckpt.restore(program, data=data.batches(ROWS, 8, seed=6))
    there = data.batches(
        ROWS, 8, seed=5, part=1, num_parts=2
    )  # with another number of processes: from the step number
    there.go_to(5)
    assert np.array_equal(firsts(next(there)), after[0, 4:])


def test_each_row_is_evaluated_once_and_padding_counts_nothing():
    batches = list(data.batches_once(ROWS, 10))
    rows = np.concatenate([batch["tokens"] for batch in batches])
    assert rows.shape == (30, 6)
    assert rows[:24].tolist() == [ROWS[i]["tokens"].tolist() for i in range(24)]
    assert (batches[-1]["targets"][4:] == -1).all()
    parts = [list(data.batches_once(ROWS, 10, part=part, num_parts=2)) for part in range(2)]
    for whole, *own in zip(batches, *parts, strict=True):
        assert np.array_equal(whole["targets"], np.concatenate([part["targets"] for part in own]))
    some = np.concatenate([batch["tokens"] for batch in data.batches_once(ROWS, 4, count=2)])
    assert some.tolist() == [ROWS[i]["tokens"].tolist() for i in range(0, 24, 3)]


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="24 rows are too few for a batch of 25"):
        data.batches(ROWS, 25)
    with pytest.raises(ValueError, match="batch_size=9 is not divisible by 2 processes"):
        data.batches(ROWS, 9, part=0, num_parts=2)
    with pytest.raises(ValueError, match="part=2 of num_parts=2"):
        data.batches_once(ROWS, 8, part=2, num_parts=2)
    with pytest.raises(ValueError, match="give both, or neither"):
        data.batches(ROWS, 8, part=0)
