"""Streamed steps equal resident ones.

The tiers, the fetches and the place of the optimizer change no number.
"""

import dataclasses
import functools
import itertools

import jax
import matrix
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

HOST = matrix.HOST


@pytest.mark.xdist_group("equivalence_of_tiers")  # which share references
@pytest.mark.parametrize("case", matrix.quick_cases(), ids=matrix.name_of)
def test_streamed_step_equals_the_resident_one(case, tmp_path, request):
    if case["update"][1] == "device":  # whose bound is a few ulp; on the host it is 1e-5
        request.getfixturevalue("default_fusions")
    ulps, relative = matrix.differences(case, str(tmp_path))
    most_ulps, most_relative = matrix.bounds(case)
    assert ulps <= most_ulps
    assert relative <= most_relative
    # the case needs a swap folder
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", matrix.pairwise_cases(), ids=matrix.name_of)
def test_streamed_steps_of_every_pair_equal_the_resident_one(case, tmp_path, request):
    test_streamed_step_equals_the_resident_one(case, tmp_path, request)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", matrix.every_case(), ids=matrix.name_of)
def test_every_streamed_step_equals_the_resident_one(case, tmp_path, request):
    test_streamed_step_equals_the_resident_one(case, tmp_path, request)


def test_choice_of_cases_has_every_pair():
    pairs = {
        pair
        for case in matrix.pairwise_cases()
        for pair in itertools.combinations(sorted(case.items()), 2)
    }
    every = {
        pair
        for case in matrix.every_case(disk=True)
        for pair in itertools.combinations(sorted(case.items()), 2)
    }
    assert pairs == every


def test_quick_cases_have_every_value():
    values = {entry for case in matrix.quick_cases() for entry in case.items()}
    assert values == {
        (name, value) for name, options in matrix.AXES.items() for value in options
    } - {("activations", "save")}


def train(model, config, steps=6, tx=None):
    program = zj.build_train_step(
        model, tx or toys.optimizer(), config, zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    )
    losses, state = toys.run(program, program.init(jax.random.key(0)), toys.batches(steps))
    return np.asarray(losses, np.float32), state, program


@functools.cache
def resident(kind, steps, **fields):
    """Return a toy's resident losses, and its parameters in float32."""
    losses, state, program = train(getattr(toys, kind)(), zj.ZeroConfig(**fields), steps)
    return losses, jax.device_get(program.params(state))


@pytest.mark.by_default("host")
@pytest.mark.parametrize(
    "fields",
    [
        {"opt_state": HOST, "grads": HOST},
        {"opt_state": HOST, "update_on": "host", "grads": HOST, "params": HOST},
        pytest.param(
            {"opt_state": HOST, "opt_state_device_fraction": 0.5, "params": HOST},
            marks=pytest.mark.exhaustive,
        ),
        {"opt_state": HOST, "opt_state_device_fraction": 0.7, "num_microbatches": 4},
    ],
    ids=["device", "host", "half", "two_of_three"],
)
def test_clipping_is_exact_in_every_tier(fields):
    count = {"num_microbatches": fields.get("num_microbatches", 1)}
    expected, before = resident("layered", 6, stage=3, clip_norm=0.5, **count)
    losses, after, program = train(toys.layered(), zj.ZeroConfig(stage=3, clip_norm=0.5, **fields))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    toys.assert_trees_close(program.params(after), before, atol=2e-6)
    # The clipping equals optax's.
    plain, _ = toys.plain_run(
        jax.device_get(program.params(program.init(jax.random.key(0)))), toys.batches(6), 0.5
    )
    np.testing.assert_allclose(losses, plain, rtol=1e-5)


def host_cases():
    """Stages, microbatches and places of the update; without `-m exhaustive`, one combination."""
    return itertools.product((1, 3), (1, 4), ("device", "host"))


@pytest.mark.by_default("3-4-device")
@pytest.mark.parametrize(("stage", "num_microbatches", "update_on"), host_cases())
def test_resident_model_with_its_optimizer_state_on_the_host(stage, num_microbatches, update_on):
    fields = {"stage": stage, "clip_norm": 0.5, "num_microbatches": num_microbatches}
    expected, before = resident("unrolled", 6, **fields)
    losses, after, _ = train(
        toys.unrolled(), zj.ZeroConfig(**fields, opt_state=HOST, update_on=update_on)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    toys.assert_trees_close(after.params, before, atol=5e-6)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim}
    assert kinds == {HOST}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_tiers_agree_bit_for_bit_in_16_bits(precision, request):
    """The resident step fuses operations differently, and so rounds differently."""
    if precision == "fp16":
        request.getfixturevalue("default_fusions")

    def run(**fields):
        config = zj.ZeroConfig(stage=3, precision=precision, activations="selective", **fields)
        losses, state, _ = train(toys.layered(), config)
        return losses, jax.device_get((state.master, state.opt_state, state.params))

    everything = {"params": HOST, "grads": HOST, "opt_state": HOST, "prefetch_distance": 2}
    losses, expected = run(opt_state=HOST)
    on_host, state = run(**everything, gather_ahead=precision == "bf16")
    np.testing.assert_array_equal(on_host, losses)
    toys.assert_trees_close(state, expected, atol=0)


# by default the test above compares streamed steps in 16 bits, whose tiers differ
@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_a_streamed_step_in_16_bits_are_those_on_the_device(precision):
    """The moments after a step are the gradients.

    The update rounds differently when it is compiled by layers than when it is compiled for the
    full tree.
    """

    def run(**fields):
        config = zj.ZeroConfig(stage=3, precision=precision, activations="selective", **fields)
        losses, state, _ = train(toys.layered(), config, steps=1)
        return losses, jax.device_get(state)

    losses, expected = run()
    on_host, state = run(params=HOST, grads=HOST, opt_state=HOST, prefetch_distance=2)
    np.testing.assert_array_equal(on_host, losses)
    toys.assert_trees_close(state.opt_state, expected.opt_state, atol=0)
    for a, b in zip(jax.tree.leaves(state.master), jax.tree.leaves(expected.master), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b)))


def test_one_layer_and_more_distance_than_layers():
    one, tx = dataclasses.replace(toys.small(), num_layers=1), optax.adamw(1e-2)
    expected, _, _ = train(one, zj.ZeroConfig(stage=3), 3, tx)
    for ahead in (False, True):
        fields = {
            "params": HOST,
            "opt_state": HOST,
            "activations": HOST,
            "grads": HOST,
            "prefetch_distance": 5,
        }
        losses, _, _ = train(one, zj.ZeroConfig(stage=3, gather_ahead=ahead, **fields), 3, tx)
        np.testing.assert_allclose(losses, expected, rtol=3e-7)


@pytest.mark.exhaustive  # by default the cases above cover every stage
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_below_3_stream_what_they_shard(stage):
    expected, _, _ = train(toys.layered(), zj.ZeroConfig(stage=stage), steps=3)
    fields = {"opt_state": HOST, "grads": HOST, "activations": HOST}
    losses, _, _ = train(toys.layered(), zj.ZeroConfig(stage=stage, **fields), steps=3)
    np.testing.assert_allclose(losses, expected, rtol=3e-7)


@pytest.mark.usefixtures("default_fusions")
@pytest.mark.by_default("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_is_born_in_its_tier_with_the_same_bits(precision):
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])

    def normal(shape):
        """Return a draw whose last bits could depend on the fusion, unlike the toys' draws."""
        return lambda key: {"w": 0.3 * jax.random.normal(key, shape)}

    small = toys.small()
    model = zj.LayeredModel(
        toys.LAYERS,
        normal((toys.VOCAB, toys.HIDDEN)),
        lambda p, batch, key: p["w"][batch["tokens"]],
        normal((toys.HIDDEN, toys.HIDDEN)),
        small.block,
        normal((toys.HIDDEN, toys.VOCAB)),
        lambda p, *args: small.head({"out": p["w"]}, *args),
    )

    def born(**fields):
        program = zj.build_train_step(
            model, optax.adamw(1e-2), zj.ZeroConfig(stage=3, precision=precision, **fields), mesh
        )
        return program, program.init(jax.random.key(3))

    resident, expected = born()
    for fields in (
        {"params": HOST, "opt_state": HOST},
        {"opt_state": HOST, "opt_state_device_fraction": 0.5},
    ):
        program, state = born(**fields)
        jax.tree.map(
            lambda a, s: a.sharding.is_equivalent_to(s, a.ndim) or pytest.fail(str(s)),
            state,
            program.shardings,
        )
        toys.assert_trees_close(
            jax.device_get(state.params), jax.device_get(expected.params), atol=0
        )
        for (name, tree), (other, same) in zip(
            program.iter_params(state), resident.iter_params(expected), strict=True
        ):
            assert name == other
            toys.assert_trees_close(jax.device_get(tree), jax.device_get(same), atol=0)
        batch = toys.batches(1)[0]
        np.testing.assert_allclose(
            program.eval(state, batch),
            resident.eval(expected, batch),
            rtol=1e-6 if precision == "fp32" else 1e-2,
        )
