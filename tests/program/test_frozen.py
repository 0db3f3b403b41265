"""Frozen weights in every stage and tier equal `optax.set_to_zero` on one device.

They have no gradients and no optimizer state, and are never written.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
import toys

import zerojax as zj
from zerojax.models import init_params
from zerojax.state import OnDisk

FROZEN = {
    "embed": {"table": True, "odd": False},
    "block": {"w1": True, "b1": True, "w2": False, "scale": False, "gate": False},
}
FROZEN["head"] = {"frozen": True, "bias": False}
FLAGS = {"embed": FROZEN["embed"], "blocks": FROZEN["block"], "head": FROZEN["head"]}
LINEAR_PROBE = {"embed": True, "block": True, "head": {"frozen": False, "bias": False}}
STEPS, CLIP, HOST, DISK = 8, 0.1, "pinned_host", "nvme"
CASES = {
    **{f"stage_{stage}": {"stage": stage} for stage in range(4)},
    "remat": {"activations": "remat", "num_microbatches": 2},
    "base_on_host": {"frozen": HOST},
    "base_on_disk": {"frozen": DISK, "num_microbatches": 2},
    "base_alone_on_device": {
        "params": HOST,
        "opt_state": HOST,
        "grads": HOST,
        "frozen": "device",
        "gather_ahead": True,
    },
    "ahead": {"frozen": HOST, "gather_ahead": True, "prefetch_distance": 2},
    "params_on_host": {"params": HOST, "prefetch_distance": 0},
    "opt_state_on_host_below_3": {"stage": 2, "opt_state": HOST},
    "all_on_host": {"params": HOST, "opt_state": HOST, "grads": HOST, "activations": HOST},
    "all_on_disk": {"params": DISK, "opt_state": DISK, "grads": DISK, "activations": DISK},
    "in_backward": {"params": DISK, "opt_state": DISK, "update": "in_backward", "clip": None},
    "on_the_host": {"params": HOST, "opt_state": HOST, "grads": HOST, "update_on": "host"},
    "on_the_host_from_disk": {"params": DISK, "opt_state": DISK, "update_on": "host"},
    "half_of_opt_state": {"opt_state": HOST, "opt_state_device_fraction": 0.4, "frozen": DISK},
    "on_the_host_base_on_disk": {"opt_state": HOST, "update_on": "host", "frozen": DISK},
}


def flags_over(frozen):
    params = jax.eval_shape(lambda: init_params(toys.layered(), jax.random.key(0)))
    named = {"embed": frozen["embed"], "blocks": frozen["block"], "head": frozen["head"]}
    return jax.tree.map(lambda flag, sub: jax.tree.map(lambda _: flag, sub), named, params)


@functools.cache
def expected(name, clip):
    """Train all parameters on one device by optax alone, with zero updates for the frozen ones."""
    flags = flags_over({"lora": FROZEN, "probe": LINEAR_PROBE}[name])
    adam = (
        optax.adamw(1e-2)
        if clip is None
        else optax.chain(optax.clip_by_global_norm(clip), optax.adamw(1e-2))
    )
    tx = optax.multi_transform(
        {"t": adam, "f": optax.set_to_zero()}, jax.tree.map(lambda f: "f" if f else "t", flags)
    )

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(toys.plain_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.jit(lambda key: init_params(toys.layered(), key))(jax.random.key(0))
    opt_state, losses = tx.init(params), []
    for batch in toys.batches(STEPS):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def build(named, tmp_path, /, tx=None, model=None, **fields):
    model = dataclasses.replace(model or toys.layered(), frozen=named)
    config = zj.ZeroConfig(swap_dir=str(tmp_path) if DISK in fields.values() else None, **fields)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(model, tx or optax.adamw(1e-2), config, mesh)


def check_run(program, name, clip):
    """Train, and compare losses and parameters with the plain program's.

    Returns the bytes written and read in all steps.
    """
    state, losses, written, read = program.init(jax.random.key(0)), [], 0.0, 0.0
    before = jax.device_get(
        [leaf for leaf in jax.tree.leaves(state.frozen) if not isinstance(leaf, OnDisk)]
    )
    for batch in toys.batches(STEPS):
        state, metrics = jax.block_until_ready(program.step(state, batch))
        losses.append(float(metrics["loss"]))
        written += float(metrics.get("swap_write_bytes", 0))
        read += float(metrics.get("swap_read_bytes", 0))
    after = jax.device_get(
        [leaf for leaf in jax.tree.leaves(state.frozen) if not isinstance(leaf, OnDisk)]
    )
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    plain_losses, plain = expected(name, clip)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    pieces = dict(program.iter_params(state))
    for layer in range(toys.LAYERS):
        of_layer = jax.tree.map(lambda a, layer=layer: a[layer], plain["blocks"])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
            pieces[f"blocks/{layer}"],
            of_layer,
        )
    for part in ("embed", "head"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), pieces[part], plain[part]
        )
    return {"written": written, "read": read}


def check_writes(program, moved):
    """Check that neither the plan nor the disk writes a byte of the base.

    Only trainable leaves have state.
    """
    layout = program.layout
    assert not [move for move in program._moves if move.writes and move.kind.startswith("frozen")]
    assert not [phase for phase in toys.layer_schedule(program).phases if "frozen" in phase.writes]
    trained = [leaf.shape for leaf in layout.leaves]
    assert [leaf.shape for leaf in jax.tree.leaves(layout.abstract_arrays.params)] == trained
    assert len(layout.opt_map.shared) + 2 * len(trained) == len(layout.opt_map.leaves)
    if layout.disk is not None:
        kinds = {move.kind: layout.disk.kinds[move.kind].num_bytes for move in program._moves}
        written = (
            sum(kinds[move.kind] for move in program._moves if move.writes) * program.mesh.size
        )
        read = (
            sum(kinds[move.kind] for move in program._moves if not move.writes) * program.mesh.size
        )
        # Reads ahead and writes behind may be counted in a neighboring step: compare the total of
        # all steps, to within one step.
        if program.config.update_on == "device":
            assert abs(moved["read"] - STEPS * read) < read
            assert moved["written"] >= (STEPS - 1) * written
        # including what init left
        assert moved["written"] <= STEPS * written + layout.disk.num_bytes
        base = [move for move in program._moves if move.kind == "frozen"]
        assert len(base) == (
            2 * toys.LAYERS if "frozen" in layout.disk.kinds else 0
        )  # forward and backward


@pytest.mark.by_default("base_on_disk")
@pytest.mark.parametrize("case", CASES)
def test_frozen_weights_equal_updates_set_to_zero(case, tmp_path):
    fields = dict(CASES[case])
    clip = fields.pop("clip", CLIP)
    with build(FROZEN, tmp_path, clip_norm=clip, **fields) as program:
        check_writes(program, check_run(program, "lora", clip))


@pytest.mark.exhaustive
def test_a_delayed_update_of_what_trains_is_that_of_the_whole_tree(tmp_path):
    flags = flags_over(FROZEN)
    zeroed = optax.multi_transform(
        {"t": optax.adamw(1e-2), "f": optax.set_to_zero()},
        jax.tree.map(lambda f: "f" if f else "t", flags),
    )
    fields = {
        "params": HOST,
        "opt_state": HOST,
        "update_on": "host",
        "delayed_update": True,
        "clip_norm": CLIP,
    }
    runs = []
    for named, tx in ((FROZEN, None), (False, zeroed)):
        with build(named, tmp_path, tx=tx, **fields) as program:
            losses, state = toys.run(program, program.init(jax.random.key(0)), toys.batches(STEPS))
            runs.append((losses, jax.device_get(dict(program.iter_params(state)))))
    np.testing.assert_allclose(*(losses for losses, _ in runs), rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *(params for _, params in runs)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_head_alone_is_trained(case, tmp_path):
    fields = dict(CASES[case])
    clip = fields.pop("clip", CLIP)
    with build(LINEAR_PROBE, tmp_path, clip_norm=clip, **fields) as program:
        check_run(program, "probe", clip)


def test_the_account_counts_the_base_as_a_kind_of_its_own(tmp_path):
    batch = toys.batches(1)[0]
    with build(FROZEN, tmp_path, params="device", frozen=HOST, precision="bf16") as program:
        report, stats = program.memory(batch), program.lower(batch).compile().memory_analysis()
        base = sum(math.prod(leaf.shape) for leaf in program.layout.frozen)
        assert (
            report.tiers[HOST]["frozen"] == report.host_argument_bytes == 2 * base // 2
        )  # on two devices
        assert report.argument_bytes + report.host_argument_bytes == stats.argument_size_in_bytes
        assert "frozen" in str(report)
        assert "fetches frozen" in str(toys.layer_schedule(program))
        assert "frozen" in toys.layer_schedule(program).timeline_svg()
        # forward and backward read each layer; unstacked leaves are read once
        layers = sum(math.prod(leaf.shape) for leaf in program.layout.frozen if leaf.is_stacked)
        assert report.host_link == {
            "to_device": (4 * layers + 2 * (base - layers)) // 2,
            "to_host": 0,
        }


def test_device_budget_counts_the_base(tmp_path):
    with build(FROZEN, tmp_path, frozen=HOST, prefetch_distance=0) as program:
        least = program.operations(toys.batches(1)[0]).peak_bytes
    with pytest.raises(ValueError, match="bytes in flight"):
        build(FROZEN, tmp_path, frozen=HOST, prefetch_distance=2, device_budget_bytes=least)
    build(FROZEN, tmp_path, frozen=HOST, prefetch_distance=0, device_budget_bytes=least).close()
    with build(FROZEN, tmp_path, frozen=HOST, prefetch_distance=2) as program:
        layer = sum(
            4 * math.prod(leaf.record_shape) // 2
            for leaf in program.layout.frozen
            if leaf.is_stacked
        )
        assert (toys.layer_schedule(program).record_bytes or {})[
            "frozen"
        ] == layer  # its shard on one of two devices


@pytest.mark.by_default("params_on_host")
@pytest.mark.parametrize("case", ["stage_0", "stage_3", "params_on_host", "all_on_disk"])
def test_integers_are_frozen_and_keep_their_dtype(case, tmp_path):
    def init_block(key):
        return toys.init_block(key) | {
            "shift": jnp.arange(toys.HIDDEN, dtype=jnp.int32) % 3,
            "on": jnp.ones((), bool),
        }

    def block(p, x, key):
        y = toys.block({name: a for name, a in p.items() if name not in ("shift", "on")}, x, key)
        return jnp.where(p["on"], y + (0.01 * p["shift"]).astype(x.dtype), y)

    model = dataclasses.replace(toys.layered(), init_block=init_block, block=block)
    params, batch = (
        jax.jit(lambda key: init_params(model, key))(jax.random.key(0)),
        toys.batches(1)[0],
    )

    @jax.jit
    def plain(params):
        x = toys.embed(params["embed"], batch, None)
        for layer in range(toys.LAYERS):
            x = block(jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"]), x, None)
        return toys.head(params["head"], params["embed"], x, batch, None)

    with build(False, tmp_path, model=model, **CASES[case]) as program:
        assert [leaf.name for leaf in program.layout.frozen] == [
            "['blocks']['on']",
            "['blocks']['shift']",
        ]
        state = program.init(jax.random.key(0))
        assert [leaf.dtype.name for leaf in jax.tree.leaves(state.frozen)] == ["bool", "int32"]
        losses, state = toys.run(program, state, [batch] * 3)
        np.testing.assert_allclose(losses[0], plain(params), rtol=1e-5)
        assert losses[2] < losses[1] < losses[0]
        pieces = dict(program.iter_params(state))["blocks/1"]
        assert pieces["shift"].dtype == jnp.int32
        assert np.array_equal(pieces["shift"], params["blocks"]["shift"][1])


def test_frozen_leaves_of_a_model_and_labels_of_its_whole_tree(tmp_path):
    """A label for every path, as full-tree optimizers use; frozen leaves' labels are never read."""
    model = toys.unrolled()
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "slow" if "w1" in jax.tree_util.keystr(path) else "fast", params
    )
    tx = optax.multi_transform({"slow": optax.adamw(1e-3), "fast": optax.adamw(1e-2)}, labels)
    frozen = {
        "embed": True,
        "layers": [
            True,
            False,
            {"w1": False, "b1": False, "w2": True, "scale": True, "gate": True},
        ],
    }
    frozen["head"] = False
    with build(frozen, tmp_path, tx=tx, model=model, stage=3) as program:
        names = {leaf.name for leaf in program.layout.leaves}
        assert "['layers'][1]['w1']" in names
        assert "['layers'][0]['w1']" not in names
        state = program.init(jax.random.key(0))
        losses, state = toys.run(program, state, toys.batches(3))
        every = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
        ]
        assert [name for name, _ in program.iter_params(state)] == every
    flags = jax.tree.map(lambda flag, sub: jax.tree.map(lambda _: flag, sub), frozen, params)
    frozen_too = jax.tree.map(lambda flag, label: "none" if flag else label, flags, labels)
    tx = optax.multi_transform(
        {"slow": optax.adamw(1e-3), "fast": optax.adamw(1e-2), "none": optax.set_to_zero()},
        frozen_too,
    )
    with build(False, tmp_path, tx=tx, model=model, stage=0) as program:
        plain, _ = toys.run(program, program.init(jax.random.key(0)), toys.batches(3))
    np.testing.assert_allclose(losses, plain, rtol=1e-5)


TILED = {"scale": False, "mix": {"kernel": True, "bias": False}, "second": True}
TILED["first"] = {"up": True, "gate": False, "down": True, "up_bias": False, "gate_bias": True}
OF_TILES = {
    "in_backward": {"params": HOST, "opt_state": HOST, "update": "in_backward"},
    "base_on_host": {"frozen": HOST, "num_microbatches": 2, "prefetch_distance": 2},
    "base_on_disk": {"frozen": DISK, "activations": "selective"},
    "all_on_disk": {"params": DISK, "opt_state": DISK, "grads": DISK, "num_microbatches": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", OF_TILES)
def test_tiles_of_the_base_are_records(case, tmp_path):
    """Groups of frozen tiles, and one of both kinds, equal full layers on the device."""
    runs, model, frozen = [], tiled_toys.model(stochastic=False), {"embed": True, "block": TILED}
    for fields in (
        {"stage": 0, "num_microbatches": OF_TILES[case].get("num_microbatches", 1)},
        OF_TILES[case],
    ):
        with build(
            frozen, tmp_path, tx=optax.sgd(1e-4, momentum=0.9), model=model, **fields
        ) as program:
            losses, state = toys.run(
                program, program.init(jax.random.key(0)), tiled_toys.batches(3)
            )
            runs.append((losses, jax.device_get(dict(program.iter_params(state)))))
            if DISK in (fields.get("frozen"), fields.get("params")):
                kinds = program.layout.disk.kinds
                assert {
                    "frozen.tiles.first",
                    "frozen.tiles.second",
                    "frozen.tiles.mix",
                } < kinds.keys()
    np.testing.assert_allclose(*(losses for losses, _ in runs), rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *(params for _, params in runs)
    )


@pytest.mark.parametrize(
    ("frozen", "fields", "error", "match"),
    [
        (True, {}, ValueError, "all 9 parameter leaves are frozen"),
        ({"blocks": True}, {}, ValueError, "frozen has keys.*'block'"),
        ({"block": {"w9": True}}, {}, ValueError, "must mirror the parameters"),
        ({"block": {"w1": 1}}, {}, ValueError, "must mirror the parameters"),
        ({"head": 1}, {}, ValueError, "frozen holds 1 for .*True or False"),
        ("head", {}, ValueError, "a dict with some of the keys"),
        (FROZEN, {"stage": 2, "frozen": HOST}, ValueError, "frozen='pinned_host' needs stage=3"),
        (FROZEN, {"frozen": "disk"}, ValueError, "frozen='disk' is unknown"),
        (FROZEN, {"frozen_dtype": "int4"}, ValueError, "frozen_dtype='int4' is unknown"),
        (
            False,
            {"frozen_dtype": "int8"},
            ValueError,
            "frozen_dtype='int8', and the model freezes nothing",
        ),
        (False, {"frozen": HOST}, ValueError, "the model freezes nothing"),
    ],
)
def test_what_cannot_be_frozen_is_told(frozen, fields, error, match, tmp_path):
    with pytest.raises(error, match=match):
        build(frozen, tmp_path, **fields)


def test_a_model_without_layers_keeps_its_base_on_the_device(tmp_path):
    with pytest.raises(ValueError, match="frozen='pinned_host' works layer by layer"):
        build(
            {"embed": True, "layers": False, "head": False},
            tmp_path,
            model=toys.unrolled(),
            frozen=HOST,
        )
