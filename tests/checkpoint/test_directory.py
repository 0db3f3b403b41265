"""One directory over several runs: what is kept, set aside, waited for and refused."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import pytest
from flax import nnx

import zerojax as zj
from zerojax.checkpoint.directory import Directory
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.manifest import SavedState, _checksum

BATCH = {"x": np.arange(16, dtype=np.float32).reshape(4, 4) / 16}


def loss(params, batch, key):
    del key
    return jnp.mean(jnp.square(batch["x"] @ params["w"].reshape(4, -1) - 1))


def build(shape=(4, 8), **fields):
    model = zj.Model(lambda key: {"w": jax.random.normal(key, shape)}, fields.pop("loss", loss))
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    return zj.build_train_step(
        fields.pop("model", model),
        fields.pop("tx", optax.adam(1e-2)),
        zj.ZeroConfig(**fields),
        mesh,
    )


@pytest.fixture(scope="module")
def program():
    return build()


def run(program, state, ckpt, steps, **options):
    for _ in range(steps):
        state, _ = program.step(state, BATCH)
        ckpt.save(program, state, **options)
    return state


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="Python 3.12.0 and 3.12.1 start no threads once the program ends (cpython 113964), and Orbax needs one",
)
def test_the_last_save_is_waited_for_when_the_program_ends(tmp_path):
    """The Checkpointer is never closed, and the save is slow."""
    code = """
        import sys, time, jax
        import zerojax as zj
        from zerojax.checkpoint.save import Saving
        from test_directory import build
        finish = Saving.finish
        def slow(self):
            time.sleep(0.5)
            finish(self)
        Saving.finish = slow
        program = build()
        ckpt = zj.Checkpointer(sys.argv[1])
        assert ckpt.save(program, program.init(jax.random.key(0)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "c")]
    environment = processes.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert zj.Checkpointer(tmp_path / "c").latest_step() == 0


def test_a_closed_checkpointer_saves_no_more(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        pass
    with pytest.raises(CheckpointError, match="is closed: create another"):
        ckpt.save(program, program.init(jax.random.key(0)))


def test_after_a_rollback_newer_steps_are_set_aside(program, tmp_path, caplog):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 4)
    kept = (tmp_path / "3" / "state" / "manifest.0.json").read_bytes()
    with zj.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore(program, 1)
        assert ckpt.all_steps() == [1, 2, 3, 4]
        with pytest.raises(ValueError, match="an iterator with get_state"):
            ckpt.save(program, program.step(state, BATCH)[0], data=iter([]))
        assert ckpt.all_steps() == [1, 2, 3, 4]
        run(program, ckpt.restore(program, 1), ckpt, 1)
        assert ckpt.latest_step() == 2
    assert "step 4 is set aside as 4.set-aside, as this run continued from step 1" in caplog.text
    assert (tmp_path / "3.set-aside" / "state" / "manifest.0.json").read_bytes() == kept
    with zj.Checkpointer(tmp_path) as ckpt:
        assert int(ckpt.restore(program).step) == 2


def test_a_state_behind_the_last_one_is_of_another_run(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 2)
        state, _ = program.step(program.init(jax.random.key(1)), BATCH)
        with pytest.raises(CheckpointError, match="of another run, and this state is at step 1"):
            ckpt.save(program, state)


def test_what_is_no_number_is_no_best(program, tmp_path):
    with zj.Checkpointer(tmp_path, max_to_keep=2, best_metric="loss") as ckpt:
        state = program.init(jax.random.key(0))
        for value in (3.0, float("nan"), 1.0, 2.0, float("nan")):
            state = run(program, state, ckpt, 1, metrics={"loss": value})
        assert ckpt.best_step() == 3
        assert ckpt.all_steps() == [3, 4, 5]  # including the newest


def test_metrics_that_are_no_numbers_are_named(program, tmp_path):
    with zj.Checkpointer(tmp_path, best_metric="loss") as ckpt:
        state = program.init(jax.random.key(0))
        for wrong in (None, "low", 1j, 10**400, np.ones(2)):
            with pytest.raises(ValueError, match=r"metrics\['other'\] is .*: a number is needed"):
                ckpt.save(program, state, metrics={"loss": 1.0, "other": wrong})
        assert ckpt.save(program, state, metrics={"loss": float("inf"), "other": np.float32(2)})
        assert ckpt.best_step() == 0


def test_a_lock_that_was_removed_is_told(program, tmp_path):
    """Otherwise another run could take it, and both would set each other's steps aside."""
    with zj.Checkpointer(tmp_path) as ckpt, zj.Checkpointer(tmp_path) as other:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1)
        ckpt.wait()
        (tmp_path / ".zerojax.lock").unlink()
        run(program, other.restore(program), other, 1)
        other.wait()
        with pytest.raises(CheckpointError, match=r"lock was removed while this run saves there"):
            run(program, state, ckpt, 1)
        assert other.all_steps() == [1, 2]


def test_a_directory_that_was_removed_is_told(program, tmp_path):
    with zj.Checkpointer(tmp_path / "c") as ckpt:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1)
        ckpt.wait()
        shutil.rmtree(tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"c was removed: create another Checkpointer"):
            run(program, state, ckpt, 1)


def test_readers_leave_what_is_being_written_alone(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 1)
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    with zj.Checkpointer(tmp_path) as reader:
        assert reader.best_step() == reader.latest_step() == 1
        reader.restore(program)
        assert (tmp_path / "2.orbax-checkpoint-tmp").is_dir()
        run(program, reader.restore(program), reader, 1)
    assert not (tmp_path / "2.orbax-checkpoint-tmp").exists()


def test_a_forked_child_does_not_keep_the_lock(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        state = run(program, program.init(jax.random.key(0)), ckpt, 1)
        ckpt.wait()
        (hold, release), (told, tell) = os.pipe(), os.pipe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "warnings.warn", lambda *_, **__: None
            )  # from JAX: a forked child must not use it
            child = os.fork()
        if child == 0:  # the fork has changed the lock by the time it returns
            os.write(tell, b"1")
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
    try:
        assert os.read(told, 1) == b"1"
        with zj.Checkpointer(tmp_path) as other:
            run(program, other.restore(program), other, 1)
    finally:
        for end in (release, hold, told, tell):
            os.close(end)
        os.waitpid(child, 0)
    assert int(state.step) == 1


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_random_keys_keep_their_implementation(impl, tmp_path):
    made = build()
    with zj.Checkpointer(tmp_path) as ckpt:
        state = made.init(jax.random.key(3, impl=impl))
        ckpt.save(made, state)
        restored = ckpt.restore(made)
        assert restored.key.dtype == state.key.dtype
        np.testing.assert_array_equal(
            jax.random.key_data(restored.key), jax.random.key_data(state.key)
        )
        made.step(restored, BATCH)


def test_an_array_is_not_taken_for_tiles(program, tmp_path):
    """[2, 4, 4] would be the tiles of [4, 8]."""
    with zj.Checkpointer(tmp_path) as ckpt, build(shape=(2, 4, 4)) as stacked:
        ckpt.save(stacked, stacked.init(jax.random.key(0)))
        with pytest.raises(
            CheckpointError, match=r"weights\['w'\] \[2, 4, 4\], and here it is \[4, 8\]"
        ):
            ckpt.restore(program)


class Tiled(nnx.Module):
    def __init__(self, tiles, rngs):
        self.mlp = zj.TiledMLP(4, 8, num_tiles=tiles, rngs=rngs)


def test_tiles_of_a_whole_flax_model_are_converted(tmp_path):
    def made(tiles):
        model = zj.from_flax(
            lambda rngs: Tiled(tiles, rngs),
            lambda m, batch: jnp.mean(jnp.square(m.mlp(batch["x"]))),
        )
        return build(model=model)

    losses = []
    for tiles in (4, 2, 8, 1):
        other = made(tiles)
        with zj.Checkpointer(tmp_path) as ckpt:
            state = other.init(jax.random.key(0)) if tiles == 4 else ckpt.restore(other)
            if tiles == 4:
                ckpt.save(other, state)
        losses.append(float(other.eval(state, BATCH)))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_leaves_without_elements_are_saved(tmp_path):
    def both(params, batch, key):
        return loss(params, batch, key) + jnp.sum(params["empty"])

    model = zj.Model(
        lambda key: {"w": jax.random.normal(key, (4, 8)), "empty": jnp.zeros((0, 4))}, both
    )
    made = build(model=model)
    with zj.Checkpointer(tmp_path) as ckpt:
        state = run(made, made.init(jax.random.key(0)), ckpt, 1)
        restored = ckpt.restore(made)
        np.testing.assert_array_equal(restored.params["w"], state.params["w"])
        assert restored.params["empty"].shape == (0, 4)


@pytest.mark.parametrize("text", ["[1]", "{}", "no json", '{"checksum": 3}'])
def test_a_manifest_that_is_something_else_is_damage(program, text, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 2)
        ckpt.wait()
        (tmp_path / "2" / "state" / "manifest.0.json").write_text(text)
        with pytest.raises(DamagedError, match=r"manifest\.0\.json"):
            ckpt.restore(program, 2)
        assert ckpt.latest_step() == 1
        assert int(ckpt.restore(program).step) == 1


def test_a_checkpoint_of_another_version_is_not_passed_over(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 2)
        ckpt.wait()
        path = tmp_path / "2" / "state" / "manifest.0.json"
        said = json.loads(path.read_text()) | {"format": 99}
        del said["checksum"]
        path.write_text(json.dumps(said | {"checksum": _checksum(said)}))
        with pytest.raises(
            CheckpointError, match="has format 99, and this version of zerojax reads 1"
        ):
            ckpt.restore(program)


def test_a_position_that_is_not_asked_for_is_told(program, tmp_path, caplog):
    class Counter:
        def get_state(self):
            return {"at": 3}

        def set_state(self, state):
            raise AssertionError

    with zj.Checkpointer(tmp_path) as ckpt:
        run(program, program.init(jax.random.key(0)), ckpt, 1, data=Counter())
        ckpt.restore(program)
    assert "step 1 holds the position of an iterator" in caplog.text
    with SavedState(str(tmp_path / "1" / "state")) as saved:
        assert saved.data == {0: {"at": 3}}


def test_wrong_arguments_are_told(program, tmp_path):
    with zj.Checkpointer(tmp_path) as ckpt:
        state = program.init(jax.random.key(0))
        for wrong in (None, state.params):
            with pytest.raises(ValueError, match=r"a zerojax\.TrainState is needed"):
                ckpt.save(program, wrong)
        for step in (True, "1"):
            with pytest.raises(ValueError, match="the number of a step is needed"):
                ckpt.restore(program, step)
    gone = zj.Checkpointer(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(
        CheckpointError, match=r"the directory of checkpoints .*gone does not exist"
    ):
        gone.latest_step()


def test_the_newest_whole_step_is_the_first_that_can_be_read(tmp_path, caplog):
    directory = Directory(tmp_path)
    assert directory.newest_whole(str) is None
    for name in ("3", "20", "100", "7.set-aside", "101.orbax-checkpoint-tmp-1", ".deleted"):
        (tmp_path / name).mkdir()
    (tmp_path / "200").write_text("no folder")
    assert directory.listing() == ([3, 20, 100], ["101.orbax-checkpoint-tmp-1"])

    def read(step: int) -> str:
        if step in damaged:
            raise DamagedError(f"step {step} is damaged")
        return f"state {step}"

    for damaged, expected in (((), 100), ((100,), 20), ((100, 20), 3)):
        caplog.clear()
        assert directory.newest_whole(read) == (expected, f"state {expected}")
        assert [record.getMessage() for record in caplog.records] == [
            f"step {step} is passed over: step {step} is damaged" for step in damaged
        ]
    damaged = (100, 20, 3)
    with pytest.raises(DamagedError, match="step 3 is damaged"):
        directory.newest_whole(read)
    assert "step 3 is passed over" not in caplog.text
    assert directory.newest_whole(read, required=False) is None
    assert "step 3 is passed over" in caplog.text


def test_a_step_is_set_aside_under_a_name_that_is_free(tmp_path):
    directory = Directory(tmp_path)
    for name in ("5.set-aside", "5.set-aside1", "5", "3"):
        (tmp_path / name).mkdir()
    assert directory.settle(3, [5]) == ["5.set-aside2"]
    assert directory.steps() == [3]
    assert (tmp_path / "5.set-aside2").is_dir()
