"""Shape-dependent decisions of an optimizer use one layer's leaf, like optax on separate layers."""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import separate_layers
import tiled_toys
from separate_layers import (
    HOST,
    LAYERS,
    NVME,
    applied,
    batches,
    final,
    first_params,
    layered,
    run,
    separate,
)

import zerojax as zj
from zerojax.models import init_params
from zerojax.optim import learning_rates, unused_grads
from zerojax.optim.elementwise import ElementwiseTransformation


def by_dims(tree):
    """Select matrices."""
    return jax.tree.map(lambda a: a.ndim >= 2, tree)


def by_size(tree):
    """Select a layer's matrices and the head; the head is smaller than a stack of vectors."""
    return jax.tree.map(lambda a: a.size > 30, tree)


def labels(tree):
    return jax.tree.map(lambda a: "matrix" if a.ndim >= 2 else "other", tree)


def scaled_by_size():
    """Scale each leaf's update by the leaf's size."""
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u: u / u.size**0.5, updates))


def scaled_by_state(scale_of):
    """Scale each leaf's update by a number in the state.

    `init` computes the number from the leaf's shape.
    """
    return optax.GradientTransformation(
        lambda params: jax.tree.map(scale_of, params),
        lambda updates, state, params=None: (
            jax.tree.map(lambda u, s: -0.02 * s * u, updates, state),
            state,
        ),
    )


def by_fan_in(leaf):
    return jnp.float32(1 / leaf.shape[0] if leaf.ndim >= 2 else 1)


def by_rank(leaf):
    return jnp.full((), 1.0 if leaf.ndim >= 2 else 3.0)


def scaled_by_list():
    """The same scaling with a flat list as its state, whose paths differ from the parameters'."""

    def update(updates, state, params=None):
        leaves, tree = jax.tree.flatten(updates)
        return jax.tree.unflatten(
            tree, [-0.1 * s * u for u, s in zip(leaves, state, strict=True)]
        ), state

    return optax.GradientTransformation(
        lambda params: [by_fan_in(a) for a in jax.tree.leaves(params)], update
    )


def by_rows():
    """Adagrad over the rows of a matrix: the state's shape depends on the leaf's rank."""

    def sums(u):
        return jnp.sum(u**2, axis=1) if u.ndim >= 2 else jnp.sum(u**2)

    def scaled(u, s):
        return -0.05 * u / jnp.sqrt((s[:, None] if u.ndim >= 2 else s) + 1e-6)

    def update(updates, state, params=None):
        state = jax.tree.map(lambda u, s: s + sums(u), updates, state)
        return jax.tree.map(scaled, updates, state), state

    return optax.GradientTransformation(
        lambda params: jax.tree.map(
            lambda a: jnp.zeros(a.shape[:1]) if a.ndim >= 2 else jnp.zeros(()), params
        ),
        update,
    )


TX = {
    "adamw": lambda: optax.adamw(0.02, weight_decay=0.5, mask=by_dims),
    "adamw_by_size": lambda: optax.adamw(0.02, weight_decay=0.5, mask=by_size),
    "lion": lambda: optax.lion(0.01, weight_decay=0.5, mask=by_dims),
    "masked": lambda: optax.chain(
        optax.adam(0.02), optax.masked(optax.add_decayed_weights(-0.1), by_dims)
    ),
    "masked_state": lambda: optax.chain(optax.masked(optax.adam(1.0), by_dims), optax.scale(-0.02)),
    "partition": lambda: optax.partition(
        {"matrix": optax.adam(0.02), "other": optax.sgd(0.1, 0.9)}, labels
    ),
    "frozen_vectors": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.02), "other": optax.set_to_zero()}, labels
    ),
    "schedule": lambda: optax.adamw(
        optax.linear_schedule(0.02, 0.0, 10), weight_decay=0.5, mask=by_dims
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adamw, "mask")(
        learning_rate=0.02, weight_decay=0.5, mask=by_dims
    ),
    "sizes": lambda: optax.chain(optax.scale_by_adam(), scaled_by_size(), optax.scale(-0.1)),
    "average": lambda: optax.chain(optax.adamw(0.02, weight_decay=0.5, mask=by_dims), zj.Ema(0.9)),
    "accumulation": lambda: optax.MultiSteps(
        optax.adamw(0.02, weight_decay=0.5, mask=by_dims), 2
    ).gradient_transformation(),
}

STORED = {
    "scale": lambda: scaled_by_state(by_fan_in),
    "number": lambda: scaled_by_state(by_rank),
    "list": scaled_by_list,
    "rows": by_rows,
}
"""Optimizers whose states have other shapes or counts for stacks than for layers."""

TIERS = {
    "stage_0": {"stage": 0},
    "stage_2": {"stage": 2, "num_microbatches": 2},
    "stage_3": {"stage": 3},
    "whole_tree": {"activations": HOST},
    "host": {"params": HOST, "grads": HOST, "opt_state": HOST},
    "host_in_backward": {"params": HOST, "opt_state": HOST, "update": "in_backward"},
    "host_in_part": {"opt_state": HOST, "opt_state_device_fraction": 0.4},
    "nvme_in_backward": {"params": NVME, "opt_state": NVME, "update": "in_backward"},
    "on_host": {"params": HOST, "grads": HOST, "opt_state": HOST, "update_on": "host"},
    "on_host_in_backward": {"opt_state": HOST, "update": "in_backward", "update_on": "host"},
}


def build(tx, tmp_path, model=None, **fields):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(
        model or layered(), tx, zj.ZeroConfig(swap_dir=tmp_path, **fields), mesh
    )


@pytest.mark.parametrize("name", TX)
def test_a_decision_about_one_leaf_enters_no_other(name):
    """They include MultiSteps, whose conditional contains the full tree."""
    assert isinstance(applied(TX[name]()), ElementwiseTransformation)


@pytest.mark.by_default("adamw", "frozen_vectors", "sizes")
@pytest.mark.parametrize("name", TX)
def test_two_updates_of_stacks_equal_those_of_layers(name):
    tx, params = TX[name](), first_params()
    stacks_tx = applied(tx)
    assert isinstance(stacks_tx, ElementwiseTransformation)
    layers = separate(params)
    state, expected_state = stacks_tx.init(params), tx.init(layers)
    assert sum(a.size for a in jax.tree.leaves(state)) == sum(
        a.size for a in jax.tree.leaves(expected_state)
    )
    for scale in (1.0, -0.5):
        grads = jax.tree.map(
            lambda p, scale=scale: np.cos(scale * np.arange(p.size, dtype=np.float32)).reshape(
                p.shape
            ),
            params,
        )
        updates, state = stacks_tx.update(grads, state, params, value=jnp.float32(1))
        expected, expected_state = tx.update(separate(grads), expected_state, layers)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            separate(updates),
            expected,
        )


@pytest.mark.parametrize("name", STORED)
def test_states_are_decided_by_one_layers_leaf(name):
    tx, params = STORED[name](), first_params()
    stacks_tx, layers = applied(tx), separate(params)
    state, expected_state = jax.jit(stacks_tx.init)(params), tx.init(layers)
    update = jax.jit(lambda state: stacks_tx.update(params, state, params, value=jnp.float32(1)))
    for _ in range(2):
        updates, state = update(state)
        expected, expected_state = tx.update(layers, expected_state, layers)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            separate(updates),
            expected,
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "tier", ["stage_0", "stage_2", "stage_3", "host", "host_in_backward", "nvme_in_backward"]
)
@pytest.mark.parametrize("name", STORED)
def test_states_are_decided_by_one_layers_leaf_in_every_tier(name, tier, tmp_path):
    with build(STORED[name](), tmp_path, **TIERS[tier]) as program:
        losses, state = run(program, batches(4))
        found = final(program, state)
    separate_layers.assert_equals_plain(STORED[name](), losses, found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", sorted(set(TX) - {"accumulation"}))
def test_every_stage_and_tier_equals_optax_on_separate_layers(name, tier, tmp_path):
    with build(TX[name](), tmp_path, **TIERS[tier]) as program:
        losses, state = run(program, batches(6))
        found = final(program, state)
    separate_layers.assert_equals_plain(TX[name](), losses, found)


@pytest.mark.by_default("host_in_backward")
@pytest.mark.parametrize("tier", TIERS)
def test_a_resident_and_a_streamed_run_equal_optax_on_separate_layers(tier, tmp_path):
    """Labels by ndim leave vectors without state, and masks by ndim leave them without decay."""
    decayed = lambda: optax.adamw(0.02, weight_decay=0.5, mask=by_dims)  # noqa: E731
    tx = optax.chain(
        optax.partition({"matrix": decayed(), "other": optax.sgd(0.1)}, labels), zj.Ema(0.5)
    )
    with build(tx, tmp_path, **TIERS[tier]) as program:
        assert sum("mu" in name for name in program.layout.opt_map.names) == 4
        losses, state = run(program, batches(3))
        found = final(program, state)
    separate_layers.assert_equals_plain(tx, losses, found)


@pytest.mark.exhaustive
def test_a_delayed_update_equals_optax_on_separate_layers(tmp_path):
    """The last gradient waits.

    Each step with delayed gradients equals a step of a program without masks by shape.
    """
    found = []

    def path_mask(tree):
        return jax.tree.map_with_path(
            lambda path, a: path[-1].key in ("up", "down", "table", "out"), tree
        )

    for mask in (by_dims, path_mask):
        tx = optax.adamw(0.02, weight_decay=0.5, mask=mask)
        fields = {"params": HOST, "opt_state": HOST, "update_on": "host", "delayed_update": True}
        with build(tx, tmp_path, **fields) as program:
            losses, state = run(program, batches(6))
            found.append((losses, final(program, state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fields", [{"stage": 3}, {"opt_state": HOST}, {"opt_state": HOST, "gather_ahead": True}]
)
def test_leaves_of_tiles_are_decided_as_the_block_makes_them(fields, tmp_path):
    """Every route gives the results of an equivalent mask by path.

    That mask selects the leaves that `init_block` creates with two or more dims.
    """
    model = tiled_toys.model()
    layer = jax.eval_shape(model.init_block, jax.random.key(0))
    of_layer = {
        jax.tree_util.keystr(path): a.ndim >= 2
        for path, a in jax.tree_util.tree_flatten_with_path(layer)[0]
    }
    assert len(set(of_layer.values())) == 2

    def by_path(tree):
        of_blocks = jax.tree.map_with_path(
            lambda path, _: of_layer[jax.tree_util.keystr(path)], tree["blocks"]
        )
        return {**by_dims(tree), "blocks": of_blocks}

    found = []
    for mask in (by_dims, by_path):
        with build(
            optax.adamw(0.02, weight_decay=0.5, mask=mask), tmp_path, model, **fields
        ) as program:
            losses, state = run(program, tiled_toys.batches(3))
            found.append((losses, jax.device_get(program.params(state))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *found)


def test_rates_and_unused_gradients_are_found_as_with_layers(tmp_path):
    layout = build(TX["schedule"](), tmp_path, stage=3).layout
    assert learning_rates(layout).names == ("learning_rate",)
    layout = build(TX["frozen_vectors"](), tmp_path, stage=3).layout
    unused = unused_grads(layout.update_jaxpr, len(layout.leaves))
    assert [layout.leaves[i].name for i in sorted(unused)] == [
        "['blocks']['b']",
        "['blocks']['gate']",
    ]


def several_stacks():
    plain = layered()
    stacks = [
        zj.Stack("one", 2, plain.init_block, plain.block),
        zj.Stack("two", LAYERS, plain.init_block, plain.block),
    ]
    return dataclasses.replace(plain, num_layers=None, init_block=None, block=None, stacks=stacks)


def test_each_of_several_stacks_is_decided_by_its_own_layers():
    params = jax.eval_shape(lambda: init_params(several_stacks(), jax.random.key(0)))
    tx = applied(TX["frozen_vectors"](), params)
    state = jax.eval_shape(tx.init, params)
    moments = {
        jax.tree_util.keystr(path[-2:]): a.shape
        for path, a in jax.tree_util.tree_flatten_with_path(state)[0]
    }
    assert moments["['one']['up']"] == (2, 8, 12)
    assert moments["['two']['up']"] == (3, 8, 12)
    assert "['one']['b']" not in moments


def by_total(in_state):
    """Scale by the total number of parameters, kept in the state or computed in the update."""

    def total(tree):
        return float(sum(a.size for a in jax.tree.leaves(tree)))

    def init(params):
        return {"total": jnp.float32(total(params) if in_state else 1)}

    def update(updates, state, params=None):
        scale = state["total"] if in_state else total(updates)
        return jax.tree.map(lambda u: -u / scale, updates), state

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("in_state", [True, False])
def test_an_update_that_reads_the_shapes_of_other_leaves_is_refused(in_state):
    """The total number of parameters is neither one layer's number nor a leaf's."""
    named = "the optimizer's state ['total']" if in_state else "['head']['out']"
    with pytest.raises(ValueError, match=f"reads the shapes of other leaves.*{re.escape(named)}"):
        applied(by_total(in_state))


def test_a_shared_state_that_a_stack_changes_is_refused_by_its_path():
    def init(params):
        return {"most": jnp.float32(max(a.ndim for a in jax.tree.leaves(params["blocks"])))}

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    with pytest.raises(ValueError, match=r"the optimizer's state \['most'\]"):
        applied(tx)


def test_where_layers_cannot_be_shown_a_stored_number_is_an_error_by_leaf():
    leaf = re.escape("['blocks']['up'] (3, 8, 12), one layer (8, 12)")
    with pytest.raises(ValueError, match=f"decides from shapes.*{leaf}"):
        applied(clipped(scaled_by_state(by_fan_in)))


def test_an_optimizer_that_fails_on_stacks_and_combines_leaves_names_both():
    """Adagrad over rows works on one layer at a time; clipping by the global norm does not."""
    with pytest.raises(
        ValueError,
        match=r"not on stacks of layers \[L, \.\.\.\].*combines layers or leaves.*clip_norm",
    ):
        applied(clipped(by_rows()))


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


COMBINES = {
    "mask": clipped(optax.adamw(0.02, mask=by_dims)),
    "label": clipped(
        optax.partition({"matrix": optax.adam(0.02), "other": optax.sgd(0.1)}, labels)
    ),
    "accumulation": optax.MultiSteps(
        clipped(optax.adamw(0.02, mask=by_dims)), 2
    ).gradient_transformation(),
    "muon": clipped(optax.contrib.muon(0.02)),
}


@pytest.mark.by_default("mask", "muon")
@pytest.mark.parametrize("name", COMBINES)
def test_where_layers_cannot_be_shown_the_leaves_are_named(name):
    leaf = re.escape("['blocks']['b'] (3, 12), one layer (12,)")
    with pytest.raises(ValueError, match=f"decides from shapes.*{leaf}"):
        applied(COMBINES[name])


def test_sizes_that_are_read_of_stacks_are_logged_by_leaf(caplog):
    tx = clipped(optax.chain(optax.scale_by_adam(), scaled_by_size()))
    with caplog.at_level(logging.WARNING, "zerojax"):
        assert applied(tx) is tx
    assert "reads sizes" in caplog.text
    assert "['blocks']['up'] (3, 8, 12), one layer (8, 12)" in caplog.text
    assert "head" not in caplog.text


SAME = {
    "clipping": clipped(optax.adamw(0.02)),
    "accumulation": optax.MultiSteps(clipped(optax.adamw(0.02)), 2).gradient_transformation(),
    "finite": optax.apply_if_finite(optax.adamw(0.02), 3),
    "prodigy": optax.contrib.prodigy(),
    "dadapt": optax.contrib.dadapt_adamw(),
    "schedule_free": clipped(optax.contrib.schedule_free_adamw(1e-2)),
    "mask_by_path": clipped(
        optax.adamw(0.02, mask=lambda tree: {"embed": True, "blocks": False, "head": True})
    ),
}


@pytest.mark.by_default("clipping", "finite")
@pytest.mark.parametrize("name", SAME)
def test_what_decides_nothing_from_shapes_stays_as_it_is(name, caplog):
    assert applied(SAME[name]) is SAME[name]
    assert not caplog.records
