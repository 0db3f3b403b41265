"""`import_params` reads the weights of a zerojax checkpoint saved under any configuration.

Its optimizer, mesh, stage and tier do not matter.
"""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax.checkpoint.manifest import SavedState

HIDDEN, INNER, LAYERS = 8, 1024, 2


def block(key):
    up, down = jax.random.split(key)
    base = {
        "up": jax.random.normal(up, (HIDDEN, INNER)),
        "down": jax.random.normal(down, (INNER, HIDDEN)),
    }
    return base | {"scale": jnp.ones(HIDDEN)}


def model(about=None, frozen=True):
    return zj.LayeredModel(
        LAYERS,
        init_embed=lambda key: {"w": jax.random.normal(key, (HIDDEN, HIDDEN))},
        embed=lambda p, batch, key: batch @ p["w"],
        init_block=block,
        block=lambda p, x, key: x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"],
        init_head=lambda key: {"gate": jnp.ones(())},
        head=lambda p, p_embed, x, batch, key: jnp.mean(x) * p["gate"],
        frozen={"block": {"up": frozen, "down": frozen, "scale": False}} if frozen else None,
        about=about,
    )


def build(tx, devices=1, *, of=None, **fields):
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    return zj.build_train_step(of or model(frozen=False), tx, zj.ZeroConfig(**fields), mesh)


def weights_of(program, state):
    return jax.device_get(dict(program.iter_params(state)))


SCHEDULED = optax.adamw(optax.linear_schedule(1e-3, 0, 10))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a directory with two steps of AdamW with a schedule, on two devices.

    Also returns the weights of each step.
    """
    folder = tmp_path_factory.mktemp("saved")
    program = build(SCHEDULED, devices=2, stage=3, of=model({"lora": {"alpha": 1}}, frozen=False))
    weights = {}
    for step in (1, 2):
        state = program.init(jax.random.key(step))
        weights[step] = weights_of(program, state)
        with zj.Checkpointer(folder / "first") as ckpt:
            ckpt.save(program, state)
        # No step is compiled: the folder's name is the step number.
        shutil.move(folder / "first" / "0", folder / str(step))
    return folder, weights


@pytest.mark.parametrize("place", ["newest", "step", "host"])
def test_weights_go_on_under_another_optimizer(saved, place):
    folder, weights = saved
    fields = (
        {"params": "pinned_host", "opt_state": "pinned_host", "stage": 3}
        if place == "host"
        else {"stage": 0}
    )
    program = build(optax.sgd(0.1, momentum=0.9), **fields)
    path = folder / "1" if place == "step" else folder
    state = zj.import_params(program, path, key=jax.random.key(1))
    jax.tree.map(
        np.testing.assert_array_equal,
        weights_of(program, state),
        weights[1 if place == "step" else 2],
    )
    assert int(state.step) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))


def test_a_restore_says_what_the_optimizers_keep_and_names_the_import(saved):
    folder, _ = saved
    program = build(optax.adamw(1e-3))
    with zj.Checkpointer(folder) as ckpt, pytest.raises(zj.CheckpointError) as error:
        ckpt.restore(program)
    told = str(error.value)
    assert (
        "the checkpoint has a count of steps, as a schedule keeps, at opt_state[2], and this program has none"
        in told
    )
    assert "zerojax.import_params(program, " in told
    assert repr(str(folder / "2")) in told
    # The call that it names.
    assert int(zj.import_params(program, str(folder / "2"), key=jax.random.key(0)).step) == 0
    momentum = build(optax.sgd(0.1, momentum=0.9))
    with zj.Checkpointer(folder) as ckpt, pytest.raises(zj.CheckpointError) as error:
        ckpt.restore(momentum)
    message = "at opt_state[0] this program has momentum (trace), and the checkpoint has Adam's moments (count, mu, nu)"
    assert message in str(error.value)


def test_a_damaged_step_is_passed_over_and_a_damaged_one_that_was_named_is_refused(
    saved, tmp_path, caplog
):
    folder, weights = saved
    shutil.copytree(folder, tmp_path / "c")
    with SavedState(str(tmp_path / "c" / "2" / "state")) as state:
        for _, _, path in state.records.files():
            data = bytearray(pathlib.Path(path).read_bytes())
            data[0] ^= 1
            pathlib.Path(path).write_bytes(data)
    program = build(optax.sgd(0.1))
    found = zj.import_params(program, tmp_path / "c", key=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, weights_of(program, found), weights[1])
    assert "2 is passed over" in caplog.text
    with pytest.raises(zj.CheckpointError, match="checksum"):
        zj.import_params(program, tmp_path / "c" / "2", key=jax.random.key(0))


def test_what_the_model_said_of_itself_is_compared(saved, tmp_path):
    folder, weights = saved
    zj.export_safetensors(folder, tmp_path / "file.safetensors")
    zj.export_orbax(folder, tmp_path / "orbax")
    other = build(optax.sgd(0.1), of=model({"lora": {"alpha": 2}}, frozen=False))
    for path in (folder, tmp_path / "file.safetensors", tmp_path / "orbax"):
        with pytest.raises(zj.CheckpointError, match=r"alpha.: 1.*alpha.: 2"):
            zj.import_params(other, path, key=jax.random.key(0))
    same = build(optax.sgd(0.1), of=model({"lora": {"alpha": 1, "dropout": 0.5}}, frozen=False))
    state = zj.import_params(same, tmp_path / "file.safetensors", key=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, weights_of(same, state), weights[2])


def test_names_can_be_changed_and_missing_weights_made(saved):
    folder, weights = saved
    more = build(optax.sgd(0.1), of=with_adapter())
    with pytest.raises(zj.CheckpointError, match=r"no blocks\.lora.*old\.w"):
        zj.import_params(more, folder, key=jax.random.key(0), rename={"embed.w": "old.w"})
    state = zj.import_params(
        more, folder, key=jax.random.key(0), missing=lambda name: "lora" in name
    )
    found = weights_of(more, state)
    assert all((found[f"blocks/{layer}"].pop("lora") == 7).all() for layer in range(LAYERS))
    jax.tree.map(np.testing.assert_array_equal, found, weights[2])


def with_adapter():
    def init(key):
        return block(key) | {"lora": jnp.full(HIDDEN, 7.0)}

    def run(p, x, key):
        return x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"] + p["lora"]

    base = model(frozen=False)
    return zj.LayeredModel(
        LAYERS, base.init_embed, base.embed, init, run, base.init_head, base.head
    )


@pytest.mark.by_default("int8")
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_an_encoded_base_comes_bit_for_bit_or_not_at_all(tmp_path, format):
    program = build(SCHEDULED, of=model(), frozen_dtype=format)
    state = program.init(jax.random.key(0))
    with zj.Checkpointer(tmp_path) as ckpt:
        ckpt.save(program, state)
    other = build(
        optax.sgd(0.1),
        of=model(),
        frozen_dtype=format,
        params="pinned_host",
        opt_state="pinned_host",
        stage=3,
    )
    found = zj.import_params(other, tmp_path, key=jax.random.key(1))
    jax.tree.map(
        np.testing.assert_array_equal, weights_of(other, found), weights_of(program, state)
    )
    plain = build(optax.sgd(0.1), of=model())
    # Never silently initialized, whatever is missing.
    with pytest.raises(
        zj.CheckpointError, match=rf"blocks\.down in {format}, .*frozen_dtype='{format}'"
    ):
        zj.import_params(plain, tmp_path, key=jax.random.key(1), missing="init")


def test_state_and_integers_that_are_not_trained_come_with_the_weights(tmp_path):
    stateful = zj.Model(
        lambda key: {"w": jnp.ones(4), "ids": jax.random.randint(key, (3,), 0, 1000)},
        lambda params, batch, key, state: (
            jnp.sum(params["w"]) * jnp.mean(batch),
            {"mean": state["mean"] + 1},
        ),
        init_state=lambda key: {"mean": jnp.zeros(100)},
    )
    program = build(optax.adam(0.1), of=stateful)
    state, _ = program.step(program.init(jax.random.key(0)), np.ones((2, 1), np.float32))
    with zj.Checkpointer(tmp_path) as ckpt:
        ckpt.save(program, state)
    other = build(optax.sgd(0.1), of=stateful)
    found = zj.import_params(other, tmp_path, key=jax.random.key(5))
    np.testing.assert_array_equal(found.model_state["mean"], np.ones(100))
    jax.tree.map(
        np.testing.assert_array_equal, weights_of(other, found), weights_of(program, state)
    )
