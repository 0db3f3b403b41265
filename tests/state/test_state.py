"""State is created sharded, donated, and reported."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.sharding.partition import local_elements
from zerojax.state import is_stored

EXPECTED = {  # is split over fsdp?       params  moments
    0: (False, False),
    1: (False, True),
    2: (False, True),
    3: (True, True),
}


@pytest.mark.parametrize("stage", EXPECTED)
def test_state_is_sharded_as_the_stage_says(stage):
    program = zj.build_train_step(
        toys.layered(), optax.adam(1e-3), zj.ZeroConfig(stage=stage), zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    moments = state.opt_state[0]
    for tree, is_split in ((state.params, EXPECTED[stage][0]), (moments.mu, EXPECTED[stage][1])):
        w1 = tree["blocks"]["w1"]
        local = w1.addressable_shards[0].data.shape
        assert local == (
            (3, 16 // 8, 40) if is_split else (3, 16, 40)
        )  # the layer dim is never split
    assert jax.tree.map(lambda a: a.sharding, state) == program.shardings


def test_step_donates_its_state():
    program = zj.build_train_step(
        toys.layered(), optax.adam(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    after, _ = program.step(state, toys.batches(1)[0])
    assert all(
        leaf.is_deleted()
        for leaf in jax.tree.leaves(state.params) + jax.tree.leaves(state.opt_state)
    )
    assert jax.tree.map(lambda a: a.sharding, after) == program.shardings


def test_init_never_holds_a_whole_leaf():
    def init(key):
        return {"w": jax.random.normal(key, (4096, 512)), "v": jax.random.normal(key, (4096, 512))}

    model = zj.Model(init, lambda p, batch, key: jnp.mean((batch @ p["w"].T) @ p["v"]))
    program = zj.build_train_step(
        model, optax.adam(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    with jax.set_mesh(program.mesh):
        compiled = program._init.jitted.lower(jax.eval_shape(lambda: jax.random.key(0))).compile()
    stats = compiled.memory_analysis()
    shard = 4096 * 512 * 4 // 8
    assert (
        stats.output_size_in_bytes < 6 * shard * 1.01 + 4096
    )  # params and two moments, one shard of each leaf
    assert stats.temp_size_in_bytes < 4 * shard  # the full leaf would be 8 shards


def test_replicated_leaves_are_reported_by_name_and_bytes(caplog):
    with caplog.at_level(logging.WARNING, "zerojax"):
        program = zj.build_train_step(
            toys.layered(), optax.adam(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
        )
    found = {r.name: r for r in program.replicated}
    assert found["['embed']['odd']"].num_bytes == 7 * 3 * 4
    assert "(7, 3)" in found["['embed']['odd']"].why
    assert "fsdp=8" in found["['embed']['odd']"].why
    assert "['embed']['odd'] (84 B" in caplog.text
    assert "['embed']['table']" not in found


def test_small_leaves_stay_whole_below_min_shard_bytes():
    config = zj.ZeroConfig(stage=3, min_shard_bytes=16 * 4 + 1)
    program = zj.build_train_step(toys.unrolled(), optax.adam(1e-3), config, zj.make_mesh(fsdp=8))
    specs = program.layout.specs
    assert specs["['head']['frozen']"].replicated is not None
    assert specs["['embed']['table']"].replicated is None


def test_hybrid_mesh_shards_inside_and_replicates_across():
    program = zj.build_train_step(
        toys.layered(), optax.adam(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh(data=2, fsdp=4)
    )
    table = program.init(jax.random.key(0)).params["embed"]["table"]
    shards = {d.id: s.index for s in table.addressable_shards for d in [s.device]}
    for first, second in zip(
        program.mesh.devices[0].flat, program.mesh.devices[1].flat, strict=True
    ):
        assert shards[first.id] == shards[second.id]
    assert len({str(index) for index in shards.values()}) == 4


def test_any_optax_state_is_sharded():
    def moments_of(tx):
        program = zj.build_train_step(
            toys.unrolled(), tx, zj.ZeroConfig(stage=1), zj.make_mesh(fsdp=8)
        )
        layout = program.layout
        total = whole = 0
        leaves = zip(
            jax.tree.leaves(layout.abstract_state.opt_state),
            jax.tree.leaves(layout.shardings.opt_state),
            strict=True,
        )
        for leaf, sharding in leaves:
            whole += leaf.size
            total += local_elements(leaf.shape, tuple(sharding.spec), program.mesh)
        return total / whole

    adam = moments_of(optax.adam(1e-3))
    assert adam < 0.2
    for tx in (
        optax.lion(1e-3),
        optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
        optax.inject_hyperparams(optax.adam)(1e-3),
    ):
        np.testing.assert_allclose(moments_of(tx), adam, rtol=0.05)


def test_a_fraction_of_the_layers_is_not_lost_to_rounding():
    """0.29 * 100 is below 29 in float64."""
    model = dataclasses.replace(toys.layered(), num_layers=100)
    config = zj.ZeroConfig(opt_state="pinned_host", opt_state_device_fraction=0.29)
    program = zj.build_train_step(model, optax.adam(1e-3), config, zj.make_mesh(fsdp=8))
    stacks = jax.tree.leaves(
        program.layout.abstract_state.opt_state[0].mu["blocks"], is_leaf=is_stored
    )
    assert {stack.device.shape[0] for stack in stacks} == {29}


def sam(**options):
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.adam(1e-2), ascent, sync_period=2, **options)


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "sgd_schedule": lambda: optax.sgd(optax.linear_schedule(1e-1, 0.0, 5), momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2),
    "plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
    "sam": lambda: sam(),  # takes extra arguments, but not `value`
    "sam_in_chain": lambda: optax.chain(optax.clip(1.0), sam()),
    "multisteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


@pytest.mark.by_default("adafactor")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_equals_plain_optax(name):
    tx, data = optax.with_extra_args_support(OPTIMIZERS[name]()), toys.batches(4)
    program = zj.build_train_step(
        toys.unrolled(), OPTIMIZERS[name](), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    params = jax.device_put(jax.device_get(program.params(state)), jax.devices()[0])
    opt_state, expected = tx.init(params), []

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(toys.plain_loss)(params, batch)
        extra = {} if name.startswith("sam") else {"value": loss}
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in data:
        params, opt_state, loss = step(params, opt_state, batch)
        expected.append(float(loss))
    losses, state = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(program.params(state), jax.device_get(params), atol=1e-4)


def test_iter_params_yields_layer_by_layer():
    program = zj.build_train_step(
        toys.layered(), optax.adam(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    pieces = dict(program.iter_params(state))
    assert list(pieces) == ["embed", "blocks/0", "blocks/1", "blocks/2", "head"]
    np.testing.assert_array_equal(pieces["blocks/1"]["w1"], state.params["blocks"]["w1"][1])
    assert "3 layers" in str(program.schedule)
