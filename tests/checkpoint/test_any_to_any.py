"""A state restored in another stage, tier, mesh and precision is the same, bit for bit."""

import pathlib

import jax
import pytest
import toys
from matrix_of_checkpoints import (
    DISK,
    HOST,
    SAVED,
    STEPS,
    TARGETS,
    Place,
    assert_same,
    build,
    numbers,
    trained,
)

import zerojax as zj
from zerojax.state import as_arguments

pytestmark = pytest.mark.xdist_group("any_to_any")  # which share checkpoints
AFTERWARDS = toys.batches(STEPS + 3)[STEPS:]
ROUNDING = 2e-4
"""Relative tolerance of float16 losses, which depend on the order of gradient sums."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return `of(place)`: a checkpoint's directory, its contents, and the continued run's losses.

    Each checkpoint is made once.
    """
    made = {}

    def of(place: Place):
        if place not in made:
            folder = tmp_path_factory.mktemp("saved")
            with build(place, folder / "swap") as program, zj.Checkpointer(folder / "c") as ckpt:
                state = trained(program)
                ckpt.save(program, state)
                losses, _ = toys.run(program, state, AFTERWARDS)
            made[place] = (folder / "c", numbers(folder / "c", STEPS), losses)
        return made[place]

    return of


def restored_alike(checkpoints, source: Place, target: Place, tmp_path: pathlib.Path) -> None:
    """Restore, save the restored state, and compare all contents of the two checkpoints."""
    directory, expected, _ = checkpoints(source)
    with build(target, tmp_path / "swap") as program, zj.Checkpointer(directory) as ckpt:
        state = ckpt.restore(program)
        flat, shardings = jax.tree.leaves(as_arguments(state)), jax.tree.leaves(program.shardings)
        assert all(
            a.sharding.is_equivalent_to(s, a.ndim) for a, s in zip(flat, shardings, strict=True)
        )
        assert all(
            a.sharding.memory_kind == s.memory_kind
            for a, s in zip(flat, shardings, strict=True)
            if s.memory_kind is not None
        )
        if (
            state.master is not None
            and program.config.params == "device"
            and program.config.opt_state == "device"
        ):
            cast = jax.tree.map(lambda m, p: m.astype(p.dtype), state.master, state.params)
            toys.assert_trees_close(jax.device_get(state.params), jax.device_get(cast), atol=0)
        with zj.Checkpointer(tmp_path / "again") as again:
            again.save(program, state)
    assert_same(numbers(tmp_path / "again", STEPS), expected)


THINNED = [
    (Place(0, DISK), Place(0, DISK)),
    (Place(2, "device"), Place(1, HOST, "4")),
    (Place(1, HOST), Place(2, "device", "2")),
    (Place(3, HOST), Place(2, DISK, "1")),
    (Place(2, "device"), Place(3, DISK, "4x2")),
]


def test_thinned_pairs_meet_all_values():
    for values in ({p.stage for p, _ in THINNED}, {t.stage for _, t in THINNED}):
        assert values == {0, 1, 2, 3}
    assert {p.tier for p, _ in THINNED} == {t.tier for _, t in THINNED} == {"device", HOST, DISK}
    assert {t.mesh for _, t in THINNED} == {"8", "4", "2", "1", "4x2"}
    assert all(p in SAVED and t in TARGETS for p, t in THINNED)


@pytest.mark.by_default(*(f"{source}-{target}" for source, target in THINNED[4:]))
@pytest.mark.parametrize(("source", "target"), THINNED, ids=str)
def test_restored_is_saved(checkpoints, source, target, tmp_path):
    restored_alike(checkpoints, source, target, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("source", SAVED, ids=str)
def test_restored_is_saved_everywhere(checkpoints, source, target, tmp_path):
    restored_alike(checkpoints, source, target, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_losses_afterwards_are_those_of_the_run_that_went_on(checkpoints, target, tmp_path):
    """Restore each checkpoint into one program, bit for bit where it was saved."""
    with build(target, tmp_path / "swap") as program:
        for source in SAVED:
            directory, _, expected = checkpoints(source)
            with zj.Checkpointer(directory) as ckpt:
                losses, _ = toys.run(program, ckpt.restore(program), AFTERWARDS)
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
            print(f"{source} -> {target}: {apart:.1e}")
            assert losses == expected if source == target else apart <= ROUNDING, (
                str(source),
                losses,
                expected,
            )
