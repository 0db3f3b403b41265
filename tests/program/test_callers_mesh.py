"""A program runs as on a mesh of `make_mesh`, whatever mesh the caller has in scope.

The names of its axes do not matter either.
"""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
HOST = "pinned_host"
TIERS = {
    "device": {},
    "host": {"params": HOST, "opt_state": HOST},
    "nvme": {"params": "nvme", "opt_state": "nvme"},
}
X, Y = (
    np.sin(np.arange(64.0)).reshape(8, 8).astype(np.float32),
    np.cos(np.arange(64.0)).reshape(8, 8).astype(np.float32),
)
SHAPE = (8, 8)


def mesh_of(kind, **sizes):
    devices = np.asarray(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(
        devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(kind,) * len(sizes)
    )


def init(key):
    a, b = jax.random.split(key)
    return {"a": jax.random.normal(a, SHAPE), "b": jax.random.normal(b, SHAPE)}


MODEL = zj.Model(
    init,
    lambda p, batch, key: jnp.mean((jnp.tanh(batch["x"] @ p["a"]) @ p["b"] - batch["y"]) ** 2),
    predict=lambda p, batch: jnp.tanh(batch["x"] @ p["a"]) @ p["b"],
)
LAYERED = zj.LayeredModel(
    2,
    lambda key: jax.random.normal(key, SHAPE),
    lambda p, batch, key: batch["x"] @ p,
    lambda key: {"w": jax.random.normal(key, SHAPE) / 8},
    lambda p, x, key: x + jnp.tanh(x @ p["w"]),
    lambda key: jax.random.normal(key, SHAPE),
    lambda p, p_embed, x, batch, key: jnp.mean((x @ p - batch["y"]) ** 2),
    predict=lambda p, p_embed, x, batch: x @ p,
)


def run(model, mesh, folder, scope=contextlib.nullcontext, place=lambda a: a, axes=None, **config):
    """Call all methods of a program with a mesh in scope; returns the results as numpy arrays."""
    folder.mkdir()
    if "nvme" in config.values():
        (folder / "swap").mkdir()
        config["swap_dir"] = str(folder / "swap")
    found = {}

    def note(name, tree):
        found[name] = jax.tree.map(np.asarray, tree)

    with scope(), warnings.catch_warnings():
        batch = {"x": place(X), "y": place(Y)}
        config = zj.ZeroConfig(stage=3, **config)
        with zj.build_train_step(
            model, optax.adamw(1e-2), config, mesh, batch=batch, axes=axes
        ) as program:
            state = program.init(jax.random.key(0))
            for step in range(2):
                state, metrics = program.step(state, batch)
                note(f"loss of step {step}", metrics["loss"])
            note("eval", program.eval(state, batch))
            note("odd eval", program.eval(state, {"x": jnp.asarray(X[:5]), "y": Y[:5]}))
            note(
                "perplexity",
                zj.perplexity(program, state, [batch], weight=lambda b: (b["x"] > 0).sum()).loss,
            )
            note("outputs", program.apply(state, batch))
            note("gradients", program.grads(state, batch)[0])
            note("weights", dict(program.iter_params(state)))
            assert program.memory(batch).tiers
            assert "func" in program.lower(batch).as_text()
            with zj.Checkpointer(folder / "run") as ckpt:
                ckpt.save(program, state)
                ckpt.wait()
                state = ckpt.restore(program)
            note("restored", dict(program.iter_params(state)))
            zj.export_safetensors(folder / "run", folder / "out.safetensors")
            state = zj.import_params(program, folder / "out.safetensors", key=jax.random.key(1))
            state, metrics = program.step(state, batch)
            note("loss after an import", metrics["loss"])
    return found


def assert_same(a, b):
    assert a.keys() == b.keys()
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_users_explicit_mesh_trains_as_one_of_make_mesh(tmp_path):
    theirs = mesh_of(EXPLICIT, r=2, x=2, one=1)
    place = lambda a: jax.device_put(a, NamedSharding(theirs, P("r")))  # noqa: E731
    got = run(
        MODEL,
        theirs,
        tmp_path / "a",
        lambda: jax.set_mesh(theirs),
        place,
        axes={"data": "r", "fsdp": "x"},
    )
    with jax.set_mesh(mesh_of(AUTO, other=8)):  # a different mesh in scope changes nothing either
        expected = run(
            MODEL, zj.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4]), tmp_path / "b"
        )
    assert_same(got, expected)


SCOPES = {
    "explicit": lambda: jax.set_mesh(mesh_of(EXPLICIT, x=4, y=2)),
    "auto": lambda: jax.set_mesh(mesh_of(AUTO, x=8)),
    "names": lambda: jax.set_mesh(mesh_of(EXPLICIT, data=1, fsdp=4, tensor=2)),
    "with": lambda: mesh_of(AUTO, x=8),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
@pytest.mark.parametrize("tier", TIERS)
def test_a_mesh_in_scope_changes_nothing(tier, tmp_path):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    expected = run(LAYERED, mesh, tmp_path / "none", **TIERS[tier])
    for name, scope in SCOPES.items():
        assert_same(
            run(LAYERED, mesh, tmp_path / name, scope, jnp.asarray, **TIERS[tier]), expected
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", TIERS)
def test_axes_in_another_order_train_as_those_of_make_mesh(tier, tmp_path):
    theirs = mesh_of(AUTO, t=2, x=2, y=2)
    got = run(
        LAYERED, theirs, tmp_path / "a", axes={"tensor": "t", "fsdp": ("x", "y")}, **TIERS[tier]
    )
    devices = theirs.devices.transpose(1, 2, 0).reshape(-1)
    expected = run(
        LAYERED, zj.make_mesh(fsdp=4, tensor=2, devices=devices), tmp_path / "b", **TIERS[tier]
    )
    assert_same(got, expected)
