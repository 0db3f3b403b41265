"""nf4: the 16 values, the nearest of them, and errors against float64.

All implementations return the same bits; bad input is refused.
"""

import dataclasses
import functools
import logging
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import on_gpu

from pallas_kernels import dispatch
from pallas_kernels.nf4 import Config, Nf4, _problem, choose_group, dequantize_nf4, quantize_nf4
from pallas_kernels.nf4.reference import LEVELS, MIDPOINTS, dequantize_scales, quantize_scales
from pallas_kernels.quantize.config import choose
from pallas_kernels.shared_memory import SHARED_BYTES

pytestmark = pytest.mark.xdist_group("kernels")
FLOATS = ["bfloat16", "float16", "float32"]
LEVELS_64 = np.array(LEVELS)
HALF_GAP = np.diff(LEVELS_64).max() / 2  # between -1 and its neighbor


def draw(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def codes_of(q: Nf4) -> np.ndarray:
    """Return the code of each element, [.., K / 64, 64]."""
    pairs = np.asarray(q.codes).reshape(*q.scales.shape, 32)
    return np.concatenate([pairs & 15, pairs >> 4], -1)


def largest_of(q: Nf4) -> np.ndarray:
    """Return the largest magnitudes that the scales represent, [.., K / 64], in float64."""
    steps, means = (np.asarray(a, np.float64) for a in (q.steps, q.means))
    for axis in (-2, -1)[-q.scales.ndim :]:
        steps, means = (
            np.repeat(a, q.scales.shape[axis] // q.steps.shape[axis], axis) for a in (steps, means)
        )
    scales = np.asarray(q.scales, np.float64)
    return np.where(scales == -128, np.nan, np.maximum(np.float32(scales * steps + means), 0))


def in_groups(array, group) -> np.ndarray:
    """Return [.., R / r, K / c, r c] of [.., R, K]."""
    *outer, rows, blocks = array.shape
    r, c = group
    return (
        array.reshape(*outer, rows // r, r, blocks // c, c)
        .swapaxes(-3, -2)
        .reshape(*outer, rows // r, blocks // c, -1)
    )


def assert_same(actual, expected) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def test_nf4_levels_are_the_published_ones_as_the_papers_quantiles_in_float32():
    quantile, start, end = statistics.NormalDist().inv_cdf, np.float32(0.9677083), np.float32(0.5)

    def tail(count: int) -> list[float]:
        step = np.float32((end - start) / np.float32(count))
        # From both ends, like torch.linspace, which computed the published values.
        points = [
            start + step * np.float32(i)
            if i < (count + 1) // 2
            else end - step * np.float32(count - i)
            for i in range(count)
        ]
        return [quantile(float(p)) for p in points]

    values = np.array(sorted([*tail(8), 0.0, *(-v for v in tail(7))]), np.float32)
    np.testing.assert_array_equal(np.array(LEVELS, np.float32), values / values.max())
    exact = 1 - (1 / 30 + 1 / 32) / 2
    in_64 = [quantile(p) for p in np.linspace(exact, 0.5, 9)[:-1]] + [
        -quantile(p) for p in np.linspace(exact, 0.5, 8)[:-1]
    ]
    np.testing.assert_allclose(
        LEVELS, sorted([*(np.array(in_64) / quantile(exact)), 0.0]), atol=2e-7
    )


@pytest.mark.parametrize("in_dtype", FLOATS)
def test_nf4_takes_the_nearest_value_and_is_off_by_the_two_bounds_at_most(in_dtype):
    x = draw((3, 5, 960), in_dtype)  # 15 blocks per row
    q = quantize_nf4(x)
    assert [(a.dtype.name, a.shape) for a in jax.tree.leaves(q)] == [
        ("uint8", (3, 5, 480)),
        ("int8", (3, 5, 15)),
        ("float32", (3, 1, 1)),
        ("float32", (3, 1, 1)),
    ]
    wide = np.asarray(x, np.float64).reshape(3, 5, 15, 64)
    largest = np.abs(wide).max(-1)
    v = wide / largest[..., None]
    codes = codes_of(q)
    off = np.abs(LEVELS_64[codes] - v)
    assert (off <= np.abs(LEVELS_64 - v[..., None]).min(-1) + 2**-22).all()
    # A scale's error is at most half a step; a step is 1 / 127 of the largest distance from the
    # mean.
    mean = largest.mean((1, 2), keepdims=True)
    np.testing.assert_allclose(q.means, mean, rtol=2**-21)
    apart = np.abs(largest - mean).max((1, 2), keepdims=True)
    scale_error = np.abs(largest_of(q) - largest)
    assert (scale_error <= apart / 254 * (1 + 2**-10) + 2**-20).all()
    y = np.asarray(dequantize_nf4(q), np.float64).reshape(wide.shape)
    assert (np.abs(y - wide) <= (HALF_GAP * largest + apart / 254)[..., None] * (1 + 2**-10)).all()


def test_nf4_of_normal_weights_costs_a_tenth_of_a_percent_more_error_than_with_exact_scales():
    x = draw((64, 16384))
    q = quantize_nf4(x)
    assert sum(a.nbytes for a in jax.tree.leaves(q)) / x.size == 0.5 + 1 / 64 + 8 / 16384  # 0.516
    wide = np.asarray(x, np.float64)
    error = np.sqrt(np.mean((np.asarray(dequantize_nf4(q)) - wide) ** 2))
    blocks = wide.reshape(-1, 64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    exact = np.sqrt(
        np.mean((LEVELS_64[np.searchsorted(MIDPOINTS, blocks / largest)] * largest - blocks) ** 2)
    )
    assert 0.090 < exact < 0.094  # of a standard deviation
    assert abs(error / exact - 1) < 1e-3


@pytest.mark.parametrize("group", [(1, 1), (2, 3), (4, 15)])
def test_nf4_groups_have_means_and_steps_of_their_own(group):
    x = draw((4, 960)) * jnp.repeat(jnp.exp2(jnp.arange(15.0) - 7), 64)
    q = quantize_nf4(x, group)
    blocks = np.abs(np.asarray(x, np.float64)).reshape(4, 15, 64).max(-1)
    largest = in_groups(blocks, group)
    np.testing.assert_allclose(q.means, largest.mean(-1), rtol=2**-20)
    apart = np.abs(largest - largest.mean(-1, keepdims=True)).max(-1)
    np.testing.assert_allclose(q.steps, apart / 127, rtol=2**-16, atol=1e-9)
    found = in_groups(largest_of(q), group)
    assert (np.abs(found - largest) <= apart[..., None] / 254 * (1 + 2**-8) + 1e-6).all()
    if group == (1, 1):  # the mean is the scale
        np.testing.assert_array_equal(largest_of(q), blocks)


def test_nf4_of_zeros_and_of_what_is_nearly_zero_is_zero():
    rows = np.array([0.0, 2.0**-149, 2.0**-73, 2.0**-72, 1.0, 3.0e38], np.float32)
    x = jnp.asarray(rows[:, None] * np.sign(np.arange(64) % 3 - 1.0), jnp.float32)
    y = dequantize_nf4(quantize_nf4(x, (1, 1)))  # of one group; the largest would hide the others
    np.testing.assert_array_equal(y[:3], 0)
    np.testing.assert_array_equal(y[3:], x[3:])
    # An exact zero stays zero, and so does a block of zeros among others, whose scale is close to
    # their mean.
    mixed = draw((1, 640)).at[0, ::3].set(0.0).at[0, 128:192].set(-0.0)
    y = np.asarray(dequantize_nf4(quantize_nf4(mixed)))
    np.testing.assert_array_equal(y[np.asarray(mixed) == 0], 0)
    assert not np.signbit(y[0, 128:192]).any()


def test_nf4_of_a_block_that_is_not_finite_is_nan_and_hurts_no_other():
    x = draw((4, 640))
    broken = x.at[0, 3].set(jnp.nan).at[0, 100].set(jnp.inf).at[1, 639].set(-jnp.inf)
    q = quantize_nf4(broken, (2, 10))
    assert np.isfinite(q.steps).all()
    y = np.asarray(dequantize_nf4(q)).reshape(4, 10, 64)
    is_broken = np.zeros((4, 10), bool)
    is_broken[0, :2] = is_broken[1, 9] = True
    np.testing.assert_array_equal(np.asarray(q.scales) == -128, is_broken)
    np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(is_broken[..., None], y.shape))
    assert_same(jax.tree.map(lambda a: a[-(len(a) // 2) :], q), quantize_nf4(x[2:], (2, 10)))
    largest = np.abs(np.asarray(x)).reshape(4, 10, 64).max(-1)
    bound = (HALF_GAP + 1 / 127) * np.where(is_broken, 0, largest).max(-1)
    assert (
        np.abs(y - np.asarray(x).reshape(y.shape))[~is_broken]
        <= np.repeat(bound[:, None], 10, 1)[~is_broken][:, None]
    ).all()


def test_nf4_scales_far_below_their_mean_are_never_negative():
    largest = jnp.asarray(
        [[1e-6] * 80 + [1.0]], jnp.float32
    )  # their mean is 1.59 steps, which rounds to 2
    scales, steps, means = jax.jit(quantize_scales, static_argnums=1)(largest, (1, 81))
    assert float(means[0, 0] - 2 * steps[0, 0]) < 0
    assert (np.asarray(scales)[0, :80] == -2).all()
    again = np.asarray(jax.jit(dequantize_scales)(scales, steps, means))
    np.testing.assert_array_equal(again[0, :80], 0)
    np.testing.assert_allclose(again[0, 80], 1, rtol=2**-16)


@pytest.mark.parametrize("out", FLOATS)
def test_dequantize_nf4_multiplies_and_rounds_once(out):
    q = quantize_nf4(draw((7, 192)))
    exact = np.array(LEVELS, np.float32)[codes_of(q)] * np.float32(largest_of(q))[..., None]
    expected = np.asarray(jnp.asarray(exact.reshape(7, 192)).astype(out), np.float64)
    np.testing.assert_array_equal(np.asarray(dequantize_nf4(q, out), np.float64), expected)


@pytest.mark.by_default("dequantize_nf4")
@pytest.mark.parametrize("op", ["quantize_nf4", "dequantize_nf4"])
def test_nf4_fused_by_xla_has_the_bits_of_the_reference(op):
    x = draw((8, 512), seed=5) * 2.0 ** np.random.default_rng(0).integers(-90, 20, (8, 1))
    q = quantize_nf4(x.at[3, 3].set(jnp.inf), (2, 4))
    if op == "quantize_nf4":  # the reference, one operation at a time
        assert_same(q, quantize_nf4(x.at[3, 3].set(jnp.inf), (2, 4), "reference"))
    else:
        y = dequantize_nf4(q, jnp.bfloat16, "reference").astype(jnp.float32)
        assert_same(jax.jit(lambda q: dequantize_nf4(q, jnp.bfloat16).astype(jnp.float32))(q), y)


@pytest.mark.by_default("dequantize_nf4-float16-shape2-None")
@pytest.mark.parametrize(
    ("in_dtype", "shape", "config"),
    [
        (
            "bfloat16",
            (260, 64),
            Config(num_warpgroups=1, num_stages=2, num_cores=1),
        ),  # slots are reused
        ("bfloat16", (23, 192), None),  # 69 blocks: less than two tiles, and not a multiple of 8
        ("float16", (3, 192), None),
        ("float32", (2, 70, 128), Config(num_warpgroups=2, num_stages=2, num_cores=1)),
    ],
)
@pytest.mark.parametrize("op", ["quantize_nf4", "dequantize_nf4"])
def test_nf4_kernel_interpreted_has_xlas_bits_without_races(races, op, in_dtype, shape, config):
    x = draw(shape, in_dtype)
    x = x.at[(0,) * len(shape)].set(jnp.nan).at[-1].set(0)
    expected = quantize_nf4(x)
    with races():
        if op == "quantize_nf4":
            found = quantize_nf4(x, None, "mosaic", config=config)
        else:
            found = dequantize_nf4(expected, in_dtype, "mosaic", config=config).astype(jnp.float32)
    assert_same(
        found,
        expected
        if op == "quantize_nf4"
        else dequantize_nf4(expected, in_dtype).astype(jnp.float32),
    )


def test_nf4_has_no_derivative_and_passes_one_straight_through():
    x = draw((4, 64))

    def loss(x, stops):
        y = dequantize_nf4(quantize_nf4(x))
        return jnp.vdot(jax.lax.stop_gradient(y - x) + x if stops else y, jnp.cos(x))

    with pytest.raises(
        ValueError,
        match=r"quantize_nf4 has no derivative: .*stop_gradient\(dequantize_nf4\(quantize_nf4\(x\)",
    ):
        jax.grad(loss)(x, False)
    y = dequantize_nf4(quantize_nf4(x))
    np.testing.assert_allclose(
        jax.grad(loss)(x, True), jnp.cos(x) - y * jnp.sin(x), rtol=1e-5, atol=1e-6
    )


def test_nf4_of_nothing_is_nothing():
    for shape in ((0, 64), (3, 0)):
        q = quantize_nf4(jnp.ones(shape, jnp.bfloat16))
        assert q.codes.shape == (shape[0], shape[1] // 2)
        assert dequantize_nf4(q).shape == shape


X = jnp.ones((4, 128), jnp.bfloat16)
Q = quantize_nf4(X)
swap = functools.partial(dataclasses.replace, Q)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: quantize_nf4(X.astype(int)),
            r"x is int32\[4, 128\]: \[..., K\] of bfloat16, float16 or float32",
        ),
        (lambda: quantize_nf4(X[0, 0]), r"x is bfloat16\[\]"),
        (lambda: quantize_nf4(X[:, :96]), r"x is \[4, 96\]: 96 is no multiple of 64"),
        (
            lambda: quantize_nf4(X, (1, 3)),
            r"group=\(1, 3\): divisors of 4 rows and of the 2 blocks of a row",
        ),
        (lambda: quantize_nf4(X, (0, 1)), r"group=\(0, 1\): divisors"),
        (lambda: quantize_nf4(X[0], (2, 1)), r"group=\(2, 1\): divisors of 1 rows"),
        (
            lambda: quantize_nf4(X, implementation="triton"),
            "'triton' is unknown: choose from mosaic, xla, reference, or None",
        ),
        (lambda: dequantize_nf4(Q, jnp.int8), "dtype=int8: choose from bfloat16, float16, float32"),
        (
            lambda: dequantize_nf4(swap(codes=X)),
            r"codes bfloat16\[4, 128\].*: codes uint8\[..., R, K / 2\]",
        ),
        (lambda: dequantize_nf4(swap(codes=Q.codes[:, :40])), r"codes uint8\[4, 40\]"),
        (lambda: dequantize_nf4(swap(scales=Q.scales[:, :1])), r"scales int8\[4, 1\]"),
        (lambda: dequantize_nf4(swap(means=Q.means[:0])), r"means float32\[0, 1\]"),
    ],
)
def test_nf4_of_bad_input_says_what_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_nf4_kernel_named_for_what_it_cannot_do_is_refused():
    with (
        on_gpu("NVIDIA B200"),
        pytest.raises(NotImplementedError, match=r"needs a Hopper GPU .* choose xla, reference"),
    ):
        jax.eval_shape(lambda: quantize_nf4(X, implementation="mosaic"))
    with (
        on_gpu("NVIDIA H200"),
        pytest.raises(NotImplementedError, match="without elements has no blocks"),
    ):
        jax.eval_shape(lambda: quantize_nf4(X[:0], implementation="mosaic"))
    config = Config(num_warpgroups=4, num_stages=40)
    with (
        on_gpu("NVIDIA H200"),
        pytest.raises(ValueError, match="bytes of shared memory, and a thread block has 231424"),
    ):
        jax.eval_shape(lambda: quantize_nf4(X, None, "mosaic", config=config))


def test_nf4_chosen_by_none_is_xlas_and_logged_once_with_the_reason(caplog):
    dispatch.log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels"), on_gpu("NVIDIA H200"):
        for _ in range(2):
            assert "mpmd_map" not in str(jax.make_jaxpr(lambda: quantize_nf4(X))())
    [record] = caplog.records
    assert (
        record.getMessage()
        == "quantize_nf4 runs as xla (not mosaic: no measurement on a GPU says yet that it is faster)"
    )


@pytest.mark.parametrize("dtypes", [*[("int8", f) for f in FLOATS], *[(f, "int8") for f in FLOATS]])
def test_nf4_config_chosen_fits_and_has_enough_on_its_way(dtypes):
    problem = _problem((1 << 20,), *dtypes)
    config = choose(problem, 132)
    assert config is not None
    problem.check(config)
    read, written = (32 if dtype == "int8" else 64 * jnp.dtype(dtype).itemsize for dtype in dtypes)
    tiles = config.num_warpgroups * config.num_stages * 64
    assert (
        tiles * read
        <= problem.shared_bytes(config.num_warpgroups, config.num_stages)
        <= SHARED_BYTES
    )
    assert tiles * read >= (36 << 10) * read / (read + written)


def test_nf4_group_is_the_largest_divisor_up_to_256():
    cases = {
        (1, 1): (1, 1),
        (1, 344): (1, 172),
        (1, 1 << 20): (1, 256),
        (4096, 28): (8, 28),
        (4096, 8): (32, 8),
        (7, 257): (7, 1),
    }
    assert {case: choose_group(*case) for case in cases} == cases
