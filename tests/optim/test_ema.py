"""The moving average of the weights, in every tier.

It equals a float64 average, is saved and exported, and can be used for evaluation.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
import toys

import zerojax as zj

HOST, DISK = "pinned_host", "nvme"
WIDTH, LAYERS, BATCH, DECAY = 8, 2, 8, 0.8


def matrix(key):
    return {"w": toys.draw(key, (WIDTH, WIDTH)) / 3}


def mean_square(p, x, batch):
    return jnp.mean((x @ p["w"] - batch["y"]) ** 2)


def layered():
    return zj.LayeredModel(
        LAYERS,
        init_embed=matrix,
        embed=lambda p, batch, key: batch["x"] @ p["w"],
        init_block=matrix,
        block=lambda p, x, key: x + jnp.tanh(x @ p["w"]),
        init_head=matrix,
        head=lambda p, p_embed, x, batch, key: mean_square(p, x, batch),
    )


def plain_loss(params, batch):
    x = batch["x"] @ params["embed"]["w"]
    for layer in range(LAYERS):
        x = x + jnp.tanh(x @ params["blocks"]["w"][layer])
    return mean_square(params["head"], x, batch)


def unrolled():
    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "embed": matrix(keys[0]),
            "blocks": jax.vmap(matrix)(jax.random.split(keys[1], LAYERS)),
            "head": matrix(keys[2]),
        }

    return zj.Model(init, lambda params, batch, key: plain_loss(params, batch))


def batches(count=8):
    random = np.random.default_rng(0)
    return [
        {name: random.standard_normal((BATCH, WIDTH), dtype=np.float32) for name in "xy"}
        for _ in range(count)
    ]


def average(debias=False):
    return optax.chain(optax.adamw(3e-2), zj.Ema(DECAY, debias))


def build(tmp_path=None, model=None, tx=None, **fields):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    config = zj.ZeroConfig(swap_dir=None if tmp_path is None else str(tmp_path), **fields)
    return zj.build_train_step(model or layered(), tx or average(), config, mesh)


def whole(program, state, **options):
    """Return the float32 parameters as one numpy tree."""
    pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state, **options)}
    if "embed" not in pieces:
        return jax.tree.unflatten(
            jax.tree.structure(program.layout.abstract_params), list(pieces.values())
        )
    blocks = jax.tree.map(
        lambda *layers: np.stack(layers), *[pieces[f"blocks/{n}"] for n in range(LAYERS)]
    )
    return {"embed": pieces["embed"], "blocks": blocks, "head": pieces["head"]}


def assert_close(found, expected, atol):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=atol),
        found,
        expected,
    )


@functools.cache
def plain_run():
    """Return the losses and the weights after each step of plain AdamW.

    It runs on one device, from the weights of key 0.
    """
    with build() as program:
        params = whole(program, program.init(jax.random.key(0)))
    tx = optax.adamw(3e-2)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(plain_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses, weights = tx.init(params), [], [params]
    for batch in batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        weights.append(jax.device_get(params))
    return losses, weights


def averaged(weights, debias=False):
    """Return the average in float64.

    With `debias`, the first entry, which is the average before the first step, is left out.
    """
    ema = jax.tree.map(lambda a: np.float64(0 if debias else 1) * a, weights[0])
    for after in weights[1:]:
        ema = jax.tree.map(
            lambda e, w: DECAY * e + (1 - DECAY) * np.asarray(w, np.float64), ema, after
        )
    return jax.tree.map(lambda e: e / (1 - DECAY ** (len(weights) - 1)), ema) if debias else ema


TIERS = {
    "stage_1": {"stage": 1, "precision": "bf16"},
    "stage_3": {"debias": True},
    "streamed": {"params": HOST, "opt_state": HOST},
    "fraction": {"params": HOST, "opt_state": HOST, "opt_state_device_fraction": 0.5},
    "in_backward": {"params": HOST, "opt_state": HOST, "update": "in_backward", "debias": True},
    "host": {"opt_state": HOST, "update_on": "host", "debias": True},
    "delayed": {"params": HOST, "opt_state": HOST, "update_on": "host", "delayed_update": True},
    "moments": {"params": HOST, "opt_state": HOST, "moments": "bfloat16"},
    "disk": {"params": DISK, "grads": DISK, "opt_state": DISK},
    "disk_of_state": {"opt_state": DISK},
    "host_with_disk": {"params": DISK, "opt_state": DISK, "update_on": "host"},
}


@pytest.mark.by_default("streamed")
@pytest.mark.parametrize("case", TIERS)
def test_average_is_that_of_the_weights_in_float64(case, tmp_path):
    fields = dict(TIERS[case])
    debias = fields.pop("debias", False)
    with build(tmp_path, tx=average(debias), **fields) as program:
        state, losses, weights = program.init(jax.random.key(0)), [], []
        weights.append(whole(program, state))
        for batch in batches():
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
            weights.append(whole(program, state))
        ema = whole(program, state, ema=True)
        assert_close(ema, averaged(weights, debias), 1e-6)
        if case not in ("stage_1", "delayed", "moments"):  # different numbers
            assert_close(losses, plain_run()[0], 1e-5)
            assert_close(weights[-1], plain_run()[1][-1], 1e-4)
            assert_close(ema, averaged(plain_run()[1], debias), 1e-4)
        if fields.get("params") == DISK:
            with pytest.raises(ValueError, match="ema=True"):
                program.ema_params(state)
        else:
            params = program.ema_params(state)
            for found, like, expected in zip(
                *map(jax.tree.leaves, (params, state.params, ema)), strict=True
            ):
                assert (found.dtype, found.sharding) == (like.dtype, like.sharding)
                np.testing.assert_array_equal(np.asarray(found), expected.astype(found.dtype))
            if fields.get("precision") is None:
                loss = program.eval(dataclasses.replace(state, params=params), batches(1)[0])
                np.testing.assert_allclose(float(loss), plain_loss(ema, batches(1)[0]), rtol=1e-6)
        # A step with a non-finite gradient is skipped, and the average with it.
        if case not in ("delayed", "in_backward"):
            state, metrics = program.step(
                state, batches(1)[0] | {"y": np.full((BATCH, WIDTH), np.nan, np.float32)}
            )
            assert float(metrics["skipped_steps"]) == 1
            jax.tree.map(np.testing.assert_array_equal, whole(program, state, ema=True), ema)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "tiers",
    [{"params": HOST, "opt_state": HOST}, {"params": HOST, "opt_state": DISK}],
    ids=[HOST, DISK],
)
def test_average_of_tiles_is_read_tile_by_tile(tiers, tmp_path):
    with build(tmp_path, tiled_toys.model(), **tiers) as program:
        assert program.layout.groups
        state, batch = program.init(jax.random.key(0)), tiled_toys.batches(1)[0]
        weights = [whole(program, state)]
        for _ in range(2):
            state, _ = jax.block_until_ready(program.step(state, batch))
            weights.append(whole(program, state))
        ema = whole(program, state, ema=True)
        assert_close(ema, averaged(weights), 1e-6)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(program.ema_params(state)), ema)


def labels(tree):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "blocks" if "blocks" in jax.tree_util.keystr(path) else "ends", tree
    )


WRAPPED = {
    "partition": lambda: optax.chain(
        optax.partition({"blocks": optax.adamw(1e-2), "ends": optax.sgd(0.1)}, labels),
        zj.Ema(DECAY),
    ),
    "multi_steps": lambda: optax.MultiSteps(average(debias=True), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(average(), 3),
}


@pytest.mark.by_default("partition")
@pytest.mark.parametrize("name", WRAPPED)
def test_average_in_wrappers_is_that_of_plain_optax(name):
    tx = WRAPPED[name]()
    program = build(model=unrolled(), tx=tx)
    state = program.init(jax.random.key(0))
    params = whole(program, state)
    opt_state = tx.init(params)
    step = jax.jit(lambda p, s, b: tx.update(jax.grad(plain_loss)(p, b), s, p))
    for batch in batches():
        state, _ = jax.block_until_ready(program.step(state, batch))
        updates, opt_state = step(params, opt_state, batch)
        params = optax.apply_updates(params, updates)
    expected = [
        x
        for x in jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "ema_params"))
        if hasattr(x, "ema_params")
    ]
    assert_close(whole(program, state, ema=True), expected[0].ema_params, 1e-5)
    assert_close(whole(program, state), params, 1e-4)


def test_average_stays_float32_beside_moments_in_bfloat16():
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_flatten_with_path(
        build(moments="bfloat16").layout.abstract_state.opt_state)[0]}  # fmt: skip
    assert {name.split("'")[0]: dtype.name for name, dtype in dtypes.items() if "'" in name} == {
        ".inner[0][0].mu[": "bfloat16", ".inner[0][0].nu[": "bfloat16", ".inner[1].ema_params[": "float32",
    }  # fmt: skip


def ends(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "head" in jax.tree_util.keystr(path), params
    )


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(zj.Ema(DECAY), optax.adamw(1e-3)),
        optax.chain(optax.scale_by_adam(), zj.Ema(DECAY), optax.scale(-1e-3)),
        optax.chain(average(), optax.masked(optax.set_to_zero(), ends)),
    ],
    ids=["first", "before_the_rate", "before_a_mask"],
)
def test_average_that_is_not_last_is_refused(tx):
    with pytest.raises(ValueError, match=r"put Ema last, as in optax\.chain"):
        build(tx=tx)


@pytest.mark.parametrize(
    ("tx", "match"),
    [
        (optax.adamw(1e-3), "keeps no average"),
        (optax.chain(average(), zj.Ema(0.9)), "keeps 2 averages of"),
        (
            optax.partition({"blocks": average(), "ends": optax.sgd(0.1)}, labels),
            r"keeps 0 averages of \['embed'\]",
        ),
    ],
    ids=["none", "two", "not_all"],
)
def test_reading_what_is_not_there_is_refused(tx, match):
    program = build(model=unrolled(), tx=tx)
    state: Any = None  # not read
    with pytest.raises(ValueError, match=match):
        program.ema_params(state)
    with pytest.raises(ValueError, match=match):
        next(program.iter_params(state, ema=True))


@pytest.mark.parametrize("decay", [1, -0.1, True, "0.9", float("nan")])
def test_bad_decay_is_refused(decay):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        zj.Ema(decay)


def test_average_without_parameters_is_refused():
    with pytest.raises(ValueError, match="params"):
        average().update({"w": jnp.ones(2)}, average().init({"w": jnp.ones(2)}))


def test_average_is_saved_exported_and_imported(tmp_path):
    program = build(model=unrolled(), tx=average())
    state = program.init(jax.random.key(0))
    for batch in batches(2):
        state, _ = jax.block_until_ready(program.step(state, batch))
    ema, weights = whole(program, state, ema=True), whole(program, state)
    with zj.Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(program, state)
        restored = checkpoints.restore(program)
    jax.tree.map(np.testing.assert_array_equal, whole(program, restored, ema=True), ema)
    for export in (zj.export_safetensors, zj.export_orbax):
        export(tmp_path / "c", tmp_path / export.__name__, ema=True)
        imported = zj.import_params(program, tmp_path / export.__name__, key=jax.random.key(0))
        # An average starts at the weights.
        for found in (whole(program, imported), whole(program, imported, ema=True)):
            jax.tree.map(np.testing.assert_array_equal, found, ema)
    assert not np.allclose(ema["head"]["w"], weights["head"]["w"], atol=1e-3)


def test_export_of_an_average_that_was_not_kept_is_refused(tmp_path):
    program = build(model=unrolled(), tx=optax.sgd(0.1))
    with zj.Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(program, program.init(jax.random.key(0)))
    with pytest.raises(RuntimeError, match=r"holds 0 averages of weights\['blocks'\]\['w'\]"):
        zj.export_safetensors(tmp_path / "c", tmp_path / "out", ema=True)
