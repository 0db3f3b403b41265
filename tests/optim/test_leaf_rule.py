"""Optimizers that combine elements of one layer's leaf are applied to each layer.

The results equal optax on separate layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import separate_layers
import tiled_toys
from jax.sharding import PartitionSpec as P
from separate_layers import (
    HIDDEN,
    HOST,
    INNER,
    LAYERS,
    NVME,
    applied,
    batches,
    final,
    first_params,
    layered,
    run,
    separate,
)  # fmt: skip

import zerojax as zj
from zerojax.optim import LayerTransformation

TX = {
    "muon": lambda: optax.contrib.muon(0.02, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=8, momentum=0.9),
    "lamb": lambda: optax.lamb(0.02, weight_decay=0.1),
    "lars": lambda: optax.lars(0.1, weight_decay=0.1),
    "novograd": lambda: optax.novograd(
        0.02
    ),  # branches over the full tree, for its first step and for later steps
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(0.1, 0.9)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.adam(0.02)),
}


def build(name, tmp_path=None, model=None, mesh=None, **fields):
    mesh = mesh or zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    config = zj.ZeroConfig(swap_dir=tmp_path, **fields)
    return zj.build_train_step(model or layered(), TX[name](), config, mesh)


TIERS = {
    "stage_0": {"stage": 0},
    "stage_1": {"stage": 1},
    "stage_2": {"stage": 2, "num_microbatches": 2},
    "stage_3": {"stage": 3},
    "host": {"params": HOST, "grads": HOST, "opt_state": HOST, "prefetch_distance": 0},
    "host_in_backward": {"params": HOST, "opt_state": HOST, "update": "in_backward"},
    "host_in_part": {"opt_state": HOST, "opt_state_device_fraction": 0.4},
    "device_in_backward": {"update": "in_backward"},
    "whole_tree": {"activations": HOST},
    "nvme": {"params": NVME, "grads": NVME, "opt_state": NVME},
    "nvme_in_backward": {"params": NVME, "opt_state": NVME, "update": "in_backward"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", TX)
def test_every_stage_and_tier_equals_optax_on_separate_layers(name, tier, tmp_path):
    with build(name, tmp_path, **TIERS[tier]) as program:
        losses, state = run(program, batches(8))
        found = final(program, state)
    assert_equals_plain(name, losses, found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", ["stage_1", "stage_3", "host", "nvme_in_backward"])
def test_leaves_that_tensor_splits_are_whole_too(tier, tmp_path):
    mesh = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    model = layered(
        {
            "block": {
                "b": P("tensor"),
                "down": P("tensor", None),
                "gate": P(),
                "up": P(None, "tensor"),
            }
        }
    )
    with build("muon", tmp_path, model, mesh, **TIERS[tier]) as program:
        losses, state = run(program, batches(8))
        found = final(program, state)
    assert_equals_plain("muon", losses, found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", ["stage_2", "stage_3", "host", "nvme_in_backward"])
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_beside_frozen_leaves_the_others_are_updated_as_without(name, tier, tmp_path):
    frozen = {
        "embed": True,
        "block": {"b": True, "down": False, "gate": False, "up": True},
        "head": False,
    }
    model = dataclasses.replace(layered(), frozen=frozen)
    with build(name, tmp_path, model, **TIERS[tier]) as program:
        losses, state = run(program, batches(8))
        found = final(program, state)
    labels = separate({"embed": {"table": "no"}, "blocks": {}, "head": {"out": "yes"}})
    labels["layers"] = [{"b": "no", "down": "yes", "gate": "yes", "up": "no"}] * LAYERS
    tx = optax.multi_transform({"yes": TX[name](), "no": optax.set_to_zero()}, labels)
    assert_equals_plain(tx, losses, found)


def assert_equals_plain(name, losses, found):
    separate_layers.assert_equals_plain(
        TX[name]() if isinstance(name, str) else name, losses, found
    )


@pytest.mark.exhaustive  # by default, tests/checkpoint restores any tier in any other
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("muon", "stage_3", "nvme_in_backward", id="muon"),
        pytest.param("adafactor", "stage_1", "host", id="adafactor"),
        pytest.param("muon", "nvme", "stage_0", id="muon_from_nvme"),
        pytest.param("adafactor", "host", "nvme", id="adafactor_to_nvme"),
        pytest.param("novograd", "nvme", "host_in_part", id="novograd"),
    ],
)
def test_a_run_that_goes_on_in_another_tier_equals_optax_on_separate_layers(
    name, before, after, tmp_path
):
    """Train 4 steps, resident or streamed; save; train 4 more steps elsewhere."""
    data = batches(8)
    with zj.Checkpointer(tmp_path / "c") as ckpt:
        with build(name, tmp_path, **TIERS[before]) as program:
            losses, state = run(program, data[:4])
            ckpt.save(program, state)
        with build(
            name, tmp_path, mesh=zj.make_mesh(fsdp=4, devices=jax.devices()[:4]), **TIERS[after]
        ) as program:
            more, state = run(program, data[4:], ckpt.restore(program))
            found = final(program, state)
    assert_equals_plain(name, losses + more, found)


@pytest.mark.by_default("muon", "adafactor", "novograd", "clip_by_block_rms")
@pytest.mark.parametrize("name", TX)
def test_one_step_of_stacks_equals_that_of_layers(name):
    """Train two steps, the second with a state that the first returned."""
    tx, params = TX[name](), first_params()
    layered_tx = applied(tx)
    assert isinstance(layered_tx, LayerTransformation)
    layers = separate(params)
    state, expected_state = layered_tx.init(params), tx.init(layers)
    step, expected_step = jax.jit(layered_tx.update), jax.jit(tx.update)
    for scale in (1.0, -0.5):
        grads = jax.tree.map(
            lambda p, scale=scale: np.cos(scale * np.arange(p.size, dtype=np.float32)).reshape(
                p.shape
            ),
            params,
        )
        updates, state = step(grads, state, params, value=jnp.float32(1))
        expected, expected_state = expected_step(separate(grads), expected_state, layers)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            separate(updates),
            expected,
        )


UNCHANGED = {
    "elementwise": lambda: optax.adamw(
        1e-2, mask=lambda tree: jax.tree.map_with_path(lambda path, _: len(path) > 2, tree)
    ),
    "combines leaves": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_is_elementwise_or_combines_leaves_is_applied_to_stacks_as_it_is(name):
    tx = UNCHANGED[name]()
    assert applied(tx) is tx


def test_the_rule_of_a_leaf_is_found_and_its_state_with_it():
    tx = applied(optax.contrib.muon(0.02))
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(first_params())[0]
    ]
    # Matrices of a layer and of the ends are multiplied. A layer's vector is not, though its stack
    # is a matrix.
    whole = {names[i] for i in tx.rule.whole}
    assert whole == {
        "['blocks']['down']",
        "['blocks']['up']",
        "['embed']['table']",
        "['head']['out']",
    }
    # One matrix is moved to the device and one back; no gradients, weights or moments move.
    assert tx.moved[names.index("['blocks']['up']")] == (HIDDEN * INNER, HIDDEN * INNER)
    program = build("adafactor", opt_state=HOST)
    layout, state = program.layout, program.layout.abstract_state.opt_state[0]
    assert state.v_row["blocks"]["up"].shape == (LAYERS, HIDDEN)
    assert state.v["blocks"]["up"].shape == (LAYERS, 1)
    assert state.v_row["blocks"]["up"].sharding.memory_kind == HOST
    assert state.v_row["blocks"]["up"].sharding.spec == P(None, "fsdp")
    assert state.count.sharding.memory_kind != HOST
    assert (
        applied(TX["adafactor"]()).rule.whole == frozenset()
    )  # sums of rows and columns are partial sums of shards
    assert layout.opt_map.owners == applied(TX["adafactor"]()).owners


def noise():
    """Add random numbers to each leaf."""
    return optax.chain(optax.lamb(1e-2), optax.add_noise(0.1, 0.5, 0))


REFUSED = {
    "leaves": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.02)),
        {},
        "add combines .*clip_norm",
    ),
    "random": (noise(), {}, "draws random numbers for .*, which would be the same in all layers"),
    "on_host": (
        optax.contrib.muon(0.02),
        {"update_on": "host"},
        "and update_on='host': .* use update_on='device'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_record_can_be_updated_with_alone_is_refused(name):
    tx, fields, why = REFUSED[name]
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=why):
        zj.build_train_step(layered(), tx, zj.ZeroConfig(opt_state=HOST, **fields), mesh)


def test_a_leaf_that_moves_tile_by_tile_is_refused_by_name():
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with pytest.raises(
        ValueError,
        match=r"\['blocks'\].* is moved tile by tile, . tiles a layer.*use gather_ahead=True",
    ):
        zj.build_train_step(
            tiled_toys.model(), optax.contrib.muon(0.02), zj.ZeroConfig(opt_state=HOST), mesh
        )
    zj.build_train_step(
        tiled_toys.model(),
        optax.contrib.muon(0.02),
        zj.ZeroConfig(opt_state=HOST, gather_ahead=True),
        mesh,
    )


@pytest.mark.exhaustive
def test_averages_bfloat16_moments_and_injected_rates_go_along(tmp_path):
    def make(_=None):
        return optax.chain(
            optax.inject_hyperparams(optax.contrib.muon)(learning_rate=0.02), zj.Ema(0.9)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TX, "ema", make)
        found = []
        for tier in ("stage_3", "host", "nvme_in_backward"):
            with build("ema", tmp_path, **TIERS[tier], moments="bfloat16") as program:
                losses, state = run(program, batches(4))
                pieces = {
                    name: jax.device_get(tree)
                    for name, tree in program.iter_params(state, ema=True)
                }
                found.append((losses, final(program, state), pieces))
    assert found[0][2]["embed"]["table"].shape == (6, HIDDEN)
    for other in found[1:]:  # a moment may round to the other neighbor
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-3), other, found[0]
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found[1], found[2]
    )
