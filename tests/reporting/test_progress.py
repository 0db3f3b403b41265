"""Long work reports its progress, and bars show it.

Programs, checkpoints, imports and exports report.
"""

import jax
import optax
import pytest
import toys

import zerojax as zj
from zerojax.progress import shown_by, working
from zerojax.reporting.display import Display


class Seen(list):
    """What was shown: name, total and count of each piece of work, and whether it ended."""

    def __call__(self, what, total):
        entry = [what, total, 0, False]
        self.append(entry)

        class Shown:
            def __enter__(self):
                return lambda count: entry.__setitem__(2, entry[2] + count)

            def __exit__(self, *error):
                entry[3] = True

        return Shown()

    def total(self, name):
        return sum(total for what, total, *_ in self if what == name)


def test_long_work_tells_how_far_it_is():
    seen = Seen()
    with working("unseen", 3) as advance:
        advance(1)
    assert seen == []
    with shown_by(seen), working("restore", 2) as advance:
        advance(1)
        advance(1)
    assert seen == [["restore", 2, 2, True]]
    with working("after", 1) as advance:
        advance(1)
    assert len(seen) == 1


@pytest.mark.by_default("nvme")
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_program_and_its_checkpoints_tell_how_far_they_are(tier, tmp_path):
    (tmp_path / "swap").mkdir()
    fields = {
        "params": tier,
        "opt_state": tier,
        "swap_dir": str(tmp_path / "swap") if tier == "nvme" else None,
    }
    mesh, seen = zj.make_mesh(fsdp=2, devices=jax.devices()[:2]), Seen()
    with (
        shown_by(seen),
        zj.build_train_step(
            toys.layered(), optax.adam(1e-3), zj.ZeroConfig(**fields), mesh
        ) as program,
        zj.Checkpointer(tmp_path / "checkpoints") as checkpointer,
    ):
        state = program.init(jax.random.key(0))
        for batch in toys.batches(2):
            state, _ = jax.block_until_ready(program.step(state, batch))
        checkpointer.save(program, state)
        checkpointer.wait()
        checkpointer.restore(program)
        zj.export_safetensors(tmp_path / "checkpoints", tmp_path / "w.safetensors")
        zj.import_params(program, tmp_path / "w.safetensors", key=jax.random.key(0))
    names = [what for what, *_ in seen]
    assert list(dict.fromkeys(names)) == [
        "init",
        "compile",
        "verify",
        "restore",
        "export",
        "import",
    ]
    assert names.count("compile") == 1  # of two steps
    assert all(ended for *_, ended in seen)
    records = 3 * (
        2 if tier == "nvme" else 1
    )  # at least those of three layers; on disk, one per device
    for what, total, count, _ in seen:
        assert total is None or count == total, what
        if what in ("restore", "import"):
            assert total is not None
            assert seen.total(what) >= records, what


def test_bars_are_drawn_where_they_are_wanted(capsys):
    with Display(is_quiet=False, has_bars=True) as display:
        with working("import", 7) as advance:
            advance(3)
            (task,) = display._progress.tasks
            assert (task.description, task.completed, task.total) == ("import", 3, 7)
        display.step(4, 10, "loss 1.0")
        (task,) = display._progress.tasks
        assert (task.description, task.completed, task.total) == ("loss 1.0", 4, 10)
    with (
        Display(is_quiet=False, has_bars=None) as display,
        working("import", 7),
    ):  # no terminal here
        assert display._progress.disable
    capsys.readouterr()
