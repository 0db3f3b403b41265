"""Moments in bfloat16: unbiased rounding to a neighbor.

Parts and full leaves round alike, and so does the host's kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

import zerojax as zj
from host_offload.host_update import kernel as fused
from zerojax.jaxprs import only_live
from zerojax.optim.elementwise import elementwise_update
from zerojax.optim.moments import keep_in_bfloat16, random_bits, round_stochastically

LARGEST = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
TRANSFORMATIONS = {
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-2),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
}


def rounded(x, r):
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(
        round_stochastically(x, jnp.broadcast_to(jnp.asarray(r, jnp.uint32), x.shape))
    )


def neighbours(x):
    """Return the bfloat16 values below and above the magnitude of x, as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    low = bits & np.uint32(0xFFFF0000)
    high = np.where(bits == low, low, low + np.uint32(0x10000))
    return low.view(np.float32), high.astype(np.uint32).view(np.float32)


# --- one rounding ---------------------------------------------------------------------------------


@given(
    st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=40),
    st.integers(0, 2**16 - 1),
)
@settings(deadline=None, max_examples=60)
def test_rounding_gives_a_neighbour_and_keeps_what_is_exact(values, r):
    x = np.ones(40, np.float32)
    x[: len(values)] = values
    y = rounded(x, r)
    assert y.dtype == ml_dtypes.bfloat16
    low, high = neighbours(x)
    y = y.astype(np.float32)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(y[~finite], x[~finite])
    high = np.where(np.isfinite(high), high, low)  # no finite number becomes infinite
    assert ((y == low) | (y == high))[finite].all()
    assert (np.signbit(y) == np.signbit(x))[finite].all()
    np.testing.assert_array_equal(rounded(low[finite], r).astype(np.float32), low[finite])


def test_rounding_up_is_as_likely_as_the_part_that_is_dropped():
    """Exactly the expected number of all 2^16 random numbers carry."""
    every = np.arange(2**16, dtype=np.uint32)
    for bits in (
        0x3F800001,
        0x3F80FFFF,
        0x3F804000,
        0x0080C000,
        0xC1234567,
        0x7F7F0001,
        0xFF001234,
    ):
        x = np.uint32(bits).view(np.float32)
        low, high = neighbours(x)
        y = rounded(np.full(2**16, x), every).astype(np.float32)
        expected = (bits & 0xFFFF) if np.isfinite(high) else 0
        assert (y == high).sum() == expected
        assert (y == low).sum() == 2**16 - expected


def test_rounding_keeps_zeros_infinities_and_nan_and_does_not_overflow():
    special = np.array([0.0, -0.0, np.inf, -np.inf, LARGEST, -LARGEST], np.float32)
    top = np.array([np.finfo(np.float32).max, np.finfo(np.float32).min], np.float32)
    nan = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(
        np.float32
    )
    for r in (0, 1, 0x8000, 0xFFFF):
        np.testing.assert_array_equal(
            rounded(special, r).view(np.uint16), special.astype(ml_dtypes.bfloat16).view(np.uint16)
        )
        np.testing.assert_array_equal(rounded(top, r).astype(np.float32), [LARGEST, -LARGEST])
        assert np.isnan(rounded(nan, r).astype(np.float32)).all()


# --- the random numbers ---------------------------------------------------------------------------


def steps_of_bits(steps, grad, moments):
    """Return [steps, moments, ...] of random numbers."""
    return np.asarray(
        jax.vmap(lambda t: jnp.stack(random_bits(t, grad, moments)))(jnp.arange(steps))
    )


def test_rounding_is_unbiased_over_steps_at_every_magnitude():
    """Round the same value in many steps.

    Each mean is within 5 standard deviations; their squares together are within 3.
    """
    steps, count = 4096, 256
    rng = np.random.default_rng(0)
    scale = np.float32(10) ** rng.uniform(-30, 30, count).astype(np.float32)
    x = (rng.normal(size=count).astype(np.float32) * scale).astype(np.float32)
    before = np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
    bits = steps_of_bits(steps, jnp.asarray(x), [jnp.asarray(before)] * 3)
    low, high = neighbours(x)
    gap = np.abs(high.astype(np.float64) - low)
    part = np.abs(x.astype(np.float64) - low) / gap
    for r in np.moveaxis(bits, 1, 0):
        mean = rounded(np.broadcast_to(x, (steps, count)), r).astype(np.float64).mean(0)
        deviations = (mean - x) / (gap * np.sqrt(part * (1 - part) / steps))
        assert np.abs(deviations).max() < 5
        assert abs(np.square(deviations).mean() - 1) < 3 * np.sqrt(2 / count)


def test_random_numbers_are_uniform_and_independent():
    """Random numbers differ over elements that differ in one input, over steps and over moments."""
    size = 2**16
    rng = np.random.default_rng(0)
    varied = jnp.asarray(rng.normal(size=size).astype(ml_dtypes.bfloat16).astype(np.float32))
    same = jnp.full(size, 0.5)
    # The 16 bits of a normal number take a few thousand values: choose one element per value.
    kept = np.unique(np.abs(np.asarray(varied)), return_index=True)[1]
    tables = {
        "steps": steps_of_bits(size, jnp.float32(0.3), [jnp.float32(0.5)] * 3).T,
        "gradients": steps_of_bits(1, varied, [same] * 3)[0][:, kept],
        "moments": steps_of_bits(1, same, [same, varied, same])[0][:, kept],
    }
    for name, table in tables.items():
        num, parts = table.shape[1], table / 2.0**16
        counts = np.stack([np.bincount(row >> 12, minlength=16) for row in table])
        chi = np.square(counts - num / 16).sum(1) / (num / 16)
        assert (chi < 15 + 5 * np.sqrt(30)).all(), name  # 15 degrees of freedom
        between = np.corrcoef(parts)[np.triu_indices(3, 1)]
        after = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in parts]
        assert (np.abs([*between, *after]) < 5 / np.sqrt(num)).all(), name


def test_random_numbers_do_not_see_last_bits_or_the_sign_of_a_gradient():
    grad, moment = jnp.float32([1.5, -0.25, 0.0]), jnp.ones(3)
    expected = random_bits(jnp.int32(3), grad, [moment])[0]
    for other in (-grad, jnp.nextafter(grad, grad * 2), grad * (1 + 2.0**-10)):
        np.testing.assert_array_equal(random_bits(jnp.int32(3), other, [moment])[0], expected)
    others = [(4, grad, moment), (3, grad * 1.25 + 1, moment), (3, grad, -moment)]
    for step, other_grad, other in others:
        assert (random_bits(jnp.int32(step), other_grad, [other])[0] != expected).all()


# --- an optimizer ---------------------------------------------------------------------------------

PARAMS = {"a": jnp.arange(32.0).reshape(8, 4) / 7, "b": {"c": jnp.ones(4), "s": jnp.float32(2)}}


def wrap(tx, **fields) -> Any:
    return keep_in_bfloat16(tx, **fields)


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def bfloat16_leaves(tree):
    return [a for a in jax.tree.leaves(tree) if a.dtype == jnp.bfloat16]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_update_is_the_optimizers_from_widened_moments(name):
    tx = TRANSFORMATIONS[name]
    wrapped = wrap(tx)
    state = wrapped.init(PARAMS)
    moments = {"adamw": 2, "lion": 1, "momentum": 1}[name]
    assert len(bfloat16_leaves(state)) == 3 * moments
    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p * (step + 1)), PARAMS)
        widened = jax.tree.map(
            lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, state.inner
        )
        expected, moved = tx.update(grads, widened, PARAMS)
        updates, state = wrapped.update(grads, state, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        assert int(state.step) == step + 1
        for a, b in zip(jax.tree.leaves(state.inner), jax.tree.leaves(moved), strict=True):
            low, high = neighbours(b) if a.dtype == jnp.bfloat16 else (b, b)
            a = np.asarray(a).astype(np.float32)
            assert ((a == low) | (a == high)).all()


def test_what_is_no_float32_moment_stays():
    init = {
        "own": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
        "factored": optax.adafactor(1e-2, momentum=0.9),
    }
    own = wrap(init["own"]).init(PARAMS)
    assert len(bfloat16_leaves(own)) == 6
    big = {"w": jnp.ones((256, 256))}
    before, after = (
        {
            jax.tree_util.keystr(p)[-20:]: a.dtype
            for p, a in jax.tree_util.tree_flatten_with_path(s)[0]
        }
        for s in (init["factored"].init(big), wrap(init["factored"]).init(big).inner)
    )
    changed = {name for name in before if before[name] != after[name]}
    assert all("v_row" not in name and "v_col" not in name for name in changed)
    assert changed
    free = wrap(optax.contrib.schedule_free_adamw(1e-2)).init(
        PARAMS
    )  # z are weights: initialized from the parameters
    assert {a.dtype for a in jax.tree.leaves(free.inner.z)} == {jnp.dtype("float32")}
    assert len(bfloat16_leaves(free)) == 3


def test_an_optimizer_without_moments_is_refused():
    with pytest.raises(ValueError, match=r"moments='bfloat16' narrows float32 moments.*has none"):
        wrap(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match=r"^moments='bfloat16'.*use moments='float32'"):
        zj.build_train_step(
            toys.layered(),
            optax.sgd(0.1),
            zj.ZeroConfig(moments="bfloat16"),
            zj.make_mesh(devices=jax.devices()[:1]),
        )


def second_moments(steps, grad, size=512, nearest=False):
    """Return v after `steps` updates by `grad(t)`, its minimum, and v kept in float32."""
    params = {"w": jnp.zeros(size)}
    exact, wrapped = optax.adam(1e-3, b2=0.999), wrap(optax.adam(1e-3, b2=0.999), nearest=nearest)

    @jax.jit
    def run(state, other):
        def one(t, carry):
            state, other, least = carry
            _, state = wrapped.update({"w": grad(t)}, state, params)
            _, other = exact.update({"w": grad(t)}, other, params)
            return state, other, jnp.minimum(least, jnp.min(state.inner[0].nu["w"]))

        return jax.lax.fori_loop(0, steps, one, (state, other, jnp.bfloat16(jnp.inf)))

    state, other, least = run(wrapped.init(params), exact.init(params))
    return (
        np.asarray(state.inner[0].nu["w"]).astype(np.float64),
        float(least),
        np.asarray(other[0].nu["w"], np.float64),
    )


def test_second_moment_follows_gradients_that_fall_where_nearest_stands_still():
    first = jax.random.normal(jax.random.key(0), (512,))

    def grad(t):
        return jnp.where(t < 1, 1.0, 1e-12) * first

    v, least, exact = second_moments(2001, grad)
    assert least > 0
    assert abs((v / exact).mean() - 1) < 5 * (v / exact).std() / np.sqrt(512)
    v, _, exact = second_moments(2001, grad, nearest=True)
    assert (v / exact).mean() > 5  # 1 / 0.999**2000 is 7.4


def test_second_moment_is_as_exact_as_the_docstring_says():
    def grad(t):
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), t), (512,))

    v, _, exact = second_moments(5000, grad)
    assert abs((v / exact).mean() - 1) < 5 * (v / exact).std() / np.sqrt(512)
    assert 0.04 < (v / exact).std() < 0.06


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_updating_in_parts_equals_updating_the_tree(name):
    tx = wrap(TRANSFORMATIONS[name])
    shapes = abstract(PARAMS)
    update = elementwise_update(
        tx, shapes, "opt_state='pinned_host'", [False] * len(jax.tree.leaves(shapes))
    )
    tree, state = jax.tree.structure(PARAMS), tx.init(PARAMS)
    params = PARAMS
    for step in range(4):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p * (step + 1)), params)
        # One equation at a time, as the rule is run here: equal to the last bit.
        updates, after = only_live(tx.update)(grads, state, params)
        expected = optax.apply_updates(params, updates)
        old: list[Any] = jax.tree.leaves(params)
        leaves: list[Any] = jax.tree.leaves(state)
        shared = [leaves[i] for i in update.opt_map.shared]
        pieces_of: list[list[Any]] = [[slice(layer, layer + 1) for layer in range(8)], [...], [...]]
        for leaf, cuts in enumerate(pieces_of):
            own = update.opt_map.list_state_leaves((leaf,))
            pieces: list[list[Any]] = []
            of_leaf: list[Any] = [
                jax.tree.leaves(grads)[leaf],
                old[leaf],
                *(leaves[i] for i in own),
            ]
            for cut in cuts:
                grad, weight, *before = (a[cut] for a in of_leaf)
                moved, states, _ = update((leaf,), [grad], [weight], before, shared, jnp.float32(0))
                pieces.append([*moved, *states])
            wanted = [jax.tree.leaves(expected)[leaf], *(jax.tree.leaves(after)[i] for i in own)]
            for parts, whole in zip(zip(*pieces, strict=True), wanted, strict=True):
                joined = np.concatenate([np.atleast_1d(part) for part in parts])
                np.testing.assert_array_equal(joined, np.atleast_1d(whole))
        params, state = jax.tree.unflatten(tree, jax.tree.leaves(expected)), after


# --- the host's kernel ----------------------------------------------------------------------------


@functools.cache
def rounding_kernel():
    def function(count, x, grad, one, two, three):
        moments = [one, two, three]
        return [round_stochastically(x, r) for r in random_bits(count, grad, moments)]

    array = jax.ShapeDtypeStruct((4,), jnp.float32)
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.int32), *[array] * 5)
    return jax.jit(function), fused.build_kernel(closed)


@given(st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1))
@settings(deadline=None, max_examples=40)
def test_host_kernel_rounds_as_the_program_bit_for_bit(seed, count):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 2**32, 257, dtype=np.uint32).view(np.float32) for _ in range(5)]
    jitted, kernel = rounding_kernel()
    outputs = [np.zeros(257, ml_dtypes.bfloat16) for _ in range(3)]
    kernel([np.int32(count), *arrays], outputs)
    for actual, desired in zip(
        outputs, jitted(jnp.int32(count), *map(jnp.asarray, arrays)), strict=True
    ):
        desired = np.asarray(desired)
        numbers = ~np.isnan(arrays[0])
        np.testing.assert_array_equal(
            actual.view(np.uint16)[numbers], desired.view(np.uint16)[numbers]
        )
        assert np.isnan(actual[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_host_kernel_is_the_jitted_update_but_for_last_bits(name):
    """Only XLA contracts products and sums: a few moments in 10^5 round to the other neighbor."""
    tx, n = wrap(TRANSFORMATIONS[name]), 40_000

    def rule(grad, state, param):
        updates, state = tx.update(grad, state, param)
        return optax.apply_updates(param, updates), state

    array = jax.ShapeDtypeStruct((8,), jnp.float32)
    closed = jax.make_jaxpr(rule)(array, jax.eval_shape(tx.init, array), array)
    last = len(closed.in_avals) - 1
    kernel = fused.build_kernel(
        closed, [(0, last), *((k, k) for k in range(1, last) if closed.in_avals[k].ndim)]
    )
    assert kernel.bytes_per_element == 4 + 8 + 4 * sum(
        a.dtype == jnp.bfloat16 for a in closed.in_avals
    )
    rng = np.random.default_rng(0)
    param = jnp.asarray(rng.normal(size=n), jnp.float32)
    state = tx.init(param)
    for _ in range(4):
        grad = rng.normal(size=n).astype(np.float32)
        inputs = [grad, *(np.array(a) for a in jax.tree.leaves((state, param)))]
        param, state = jax.jit(rule)(jnp.asarray(grad), state, param)
        outputs = [None if aval.ndim else np.zeros((), aval.dtype) for aval in closed.out_avals]
        kernel(inputs, outputs)
        np.testing.assert_allclose(inputs[-1], param, rtol=0, atol=1e-5)
        for actual, out, desired in zip(
            inputs[1:-1], outputs[1:], jax.tree.leaves(state), strict=True
        ):
            differs = (actual if out is None else out) != np.asarray(desired)
            assert differs.mean() < 1e-3
            if out is None:
                a, b = (
                    actual[differs].astype(np.float64),
                    np.asarray(desired)[differs].astype(np.float64),
                )
                np.testing.assert_array_less(np.abs(a - b), np.abs(b) * 2.0**-6)
