"""quantize: within half a step of float64, and unbiased if stochastic.

All implementations return the same bits; bad input is refused.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices import on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch
from pallas_kernels.quantize import Config, Quantized, dequantize, quantize
from pallas_kernels.quantize.config import MAX_STAGES, Problem, choose
from pallas_kernels.quantize.reference import FORMATS as FORMATS_OF
from pallas_kernels.shared_memory import SHARED_BYTES

pytestmark = pytest.mark.xdist_group("kernels")
MOST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
FORMATS = sorted(MOST)
FLOATS = ["bfloat16", "float16", "float32"]


def draw(shape, dtype="float32", seed=0):
    """Return normal numbers of very different sizes, so that fp8 also has subnormal values."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 4, shape), dtype)


def bits(array) -> np.ndarray:
    return np.asarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(actual, expected) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        np.testing.assert_array_equal(bits(a), bits(e))


def spread(q: Quantized) -> np.ndarray:
    """Return the scale of each element, float64."""
    return np.repeat(np.asarray(q.scales, np.float64), q.block_size, -1)[..., : q.values.shape[-1]]


def neighbours(v: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the format's values at or below v and at or above it, in float64."""
    if dtype == "int8":
        return np.floor(v), np.ceil(v)
    codes = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    return values[np.searchsorted(values, v, "right") - 1], values[
        np.searchsorted(values, v, "left")
    ]


@pytest.mark.parametrize("in_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_to_nearest_is_off_by_half_a_step_at_most(dtype, in_dtype):
    x = draw((3, 5, 300), in_dtype)  # the last block of a row has 44
    q = quantize(x, dtype, block_size=128)
    assert (q.values.shape, q.values.dtype) == (x.shape, jnp.dtype(dtype))
    assert (q.scales.shape, q.scales.dtype) == ((3, 5, 3), jnp.float32)
    wide = np.asarray(x, np.float64)
    blocks = np.pad(wide, [(0, 0), (0, 0), (0, 84)]).reshape(3, 5, 3, 128)
    largest = np.abs(blocks).max(-1)
    np.testing.assert_allclose(q.scales, largest / MOST[dtype], rtol=2**-22)
    v = wide / np.repeat(largest / MOST[dtype], 128, -1)[..., :300]
    low, high = neighbours(np.clip(v, -MOST[dtype], MOST[dtype]), dtype)
    error = np.abs(np.asarray(q.values, np.float64) - v)
    assert (error <= (high - low) / 2 + 2**-21 * np.abs(v)).all()
    assert (
        np.abs(np.asarray(q.values, np.float64)).max(-1).min() == MOST[dtype]
    )  # a row's largest element becomes the largest value
    y = dequantize(q, jnp.float32)
    if dtype == "int8":
        assert (
            np.abs(y - wide) <= np.repeat(largest, 128, -1)[..., :300] / 127 / 2 * (1 + 2**-14)
        ).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_stochastically_is_within_a_step_and_unbiased_over_keys(dtype):
    num_keys = 4000
    x = jnp.concatenate([draw((2, 60), seed=3), jnp.full((2, 4), 0.3)], 1)
    q = jax.jit(jax.vmap(lambda key: quantize(x, dtype, 64, key)))(
        jax.random.split(jax.random.key(0), num_keys)
    )
    scales = np.asarray(q.scales, np.float64)
    assert (scales == scales[0]).all()
    v = np.asarray(x, np.float64) / scales[0]
    values = np.asarray(q.values, np.float64)
    low, high = neighbours(np.clip(v, -MOST[dtype], MOST[dtype]), dtype)
    slack = 2**-20 * np.abs(v)
    assert (values >= low - slack).all()
    assert (values <= high + slack).all()
    up = (v - low) / np.maximum(high - low, 1e-300)
    deviation = (high - low) * np.sqrt(up * (1 - up) / num_keys)
    assert (np.abs(values.mean(0) - v) <= 5 * deviation + (high - low) / num_keys + slack).all()
    assert (deviation > 0).sum() > 100  # most elements are between two values
    # Elements of equal value are rounded independently: in one row, in one column, and from key to
    # key.
    chosen = (values[:, :, 60:] == high[:, 60:]).reshape(num_keys, -1)
    correlations = np.corrcoef(np.concatenate([chosen, np.roll(chosen, 1, 0)], 1).T)
    assert np.abs(correlations - np.eye(16)).max() < 5 / np.sqrt(num_keys)


def test_quantize_with_a_key_depends_on_the_key_alone():
    x = draw((4, 256))
    again = [quantize(x, "int8", 128, jax.random.key(seed)) for seed in (1, 1, 2)]
    assert_same_bits(again[0], again[1])
    assert (bits(again[0].values) != bits(again[2].values)).any()
    raw = quantize(x, "int8", 128, jax.random.PRNGKey(1))
    assert_same_bits(raw, again[0])


@pytest.mark.parametrize("key", [None, 0])
@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_leaves_what_it_can_represent_as_it_is(dtype, key):
    codes = np.arange(256, dtype=np.uint8).view(
        getattr(ml_dtypes, dtype) if dtype != "int8" else np.int8
    )
    values = codes.astype(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) <= MOST[dtype])]
    assert len(values) >= 247
    x = jnp.asarray(np.stack([values * 0.125, values * 2.0**40]))
    q = quantize(x, dtype, 256, None if key is None else jax.random.key(key))
    np.testing.assert_array_equal(q.scales, [[0.125], [2.0**40]])
    np.testing.assert_array_equal(np.asarray(q.values, np.float32), np.stack([values] * 2))
    np.testing.assert_array_equal(dequantize(q), x)


@pytest.mark.parametrize("key", [None, 0])
@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_of_a_block_that_is_not_finite_is_nan_and_hurts_no_other(dtype, key):
    x = draw((5, 64))
    broken = x.at[0, 3].set(jnp.nan).at[1, 63].set(jnp.inf).at[2, 0].set(-jnp.inf)
    key = None if key is None else jax.random.key(key)
    q, whole = quantize(broken, dtype, 64, key), quantize(x, dtype, 64, key)
    np.testing.assert_array_equal(np.isnan(q.scales[:, 0]), [True, True, True, False, False])
    assert not bits(q.values[:3]).any()
    assert np.isnan(dequantize(q)[:3]).all()
    assert_same_bits((q.values[3:], q.scales[3:]), (whole.values[3:], whole.scales[3:]))


@pytest.mark.parametrize("key", [None, 0])
@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_of_zeros_and_of_what_is_nearly_zero_is_zero(dtype, key):
    rows = [0.0, 2.0**-149, 2.0**-73, 2.0**-72, 3.0e38]
    x = jnp.asarray(
        np.array(rows, np.float32)[:, None] * np.sign(np.arange(64) % 3 - 1.0), jnp.float32
    )
    q = quantize(x, dtype, 64, None if key is None else jax.random.key(key))
    np.testing.assert_array_equal(np.asarray(q.scales)[:3], 0)
    assert (np.asarray(q.scales)[3:] > 0).all()
    np.testing.assert_array_equal(dequantize(q)[:3], 0)
    np.testing.assert_allclose(dequantize(q)[3:], x[3:], rtol=2**-22)


@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_dequantize_multiplies_and_rounds_once(dtype, out):
    q = quantize(draw((7, 200)), dtype, 64)
    exact = np.asarray(q.values, np.float64) * spread(q)  # 8 bits times 24: exact
    once = exact.astype(np.float32).astype(jnp.dtype(out))
    np.testing.assert_array_equal(
        np.asarray(dequantize(q, out), np.float64), once.astype(np.float64)
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_divides_alike_on_devices_whose_quotients_are_off_by_two_last_bits(dtype):
    form = FORMATS_OF[jnp.dtype(dtype)]
    rng = np.random.default_rng(0)
    largest = (rng.uniform(1, 2, 20000) * 2.0 ** rng.integers(-72, 127, 20000)).astype(np.float32)
    guess = (form.most / largest.astype(np.float64)).astype(np.float32)
    guesses = [(guess.view(np.int32) + off).view(np.float32) for off in (-2, -1, 0, 1, 2)]
    inverses = [np.asarray(jax.jit(form.inverse)(largest, jnp.asarray(g))) for g in guesses]
    for inverse in inverses:
        np.testing.assert_array_equal(inverse, inverses[0])
    assert (inverses[0] * largest <= form.most).all()
    assert (np.nextafter(inverses[0], np.float32(np.inf)) * largest > form.most).all()


SPECIAL = jnp.asarray(
    [0.0, -0.0, 1.0, 2.0**-130, -(2.0**-126), 2.0**-72, -(2.0**-60), 3.4e38] * 8, jnp.float32
)


@pytest.mark.parametrize("key", [None, 7])
@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_fused_by_xla_has_the_bits_of_the_reference(dtype, key):
    key = None if key is None else jax.random.key(key)
    many = draw((200, 256), seed=5)
    for x in (
        many,
        many.astype(jnp.bfloat16),
        jnp.concatenate([many.at[17, 3].set(jnp.inf)[:-1], jnp.tile(SPECIAL, 4)[None]]),
    ):
        call = functools.partial(quantize, dtype=dtype, block_size=64, key=key)
        plain = call(x, implementation="reference")  # one operation at a time
        fused = call(x, implementation="xla")
        assert_same_bits(fused, plain)
        assert_same_bits(
            dequantize(fused, jnp.bfloat16, "xla"), dequantize(plain, jnp.bfloat16, "reference")
        )


@pytest.mark.by_default("float8_e4m3fn-float32-shape1-128-3-config1")
@pytest.mark.parametrize(
    ("dtype", "in_dtype", "shape", "block_size", "key", "config"),
    [
        (
            "int8",
            "bfloat16",
            (260, 64),
            64,
            None,
            Config(num_warpgroups=1, num_stages=2, num_cores=1),
        ),  # slots are reused
        (
            "float8_e4m3fn",
            "float32",
            (2, 70, 150),
            128,
            3,
            Config(num_warpgroups=2, num_stages=2, num_cores=1),
        ),  # ragged
        ("float8_e5m2", "float16", (3, 256), 256, 5, None),  # 2 chunks of columns; less than a tile
    ],
)
def test_quantize_kernel_interpreted_has_the_bits_of_the_reference_without_races(
    races, dtype, in_dtype, shape, block_size, key, config
):
    key = None if key is None else jax.random.key(key)
    x = draw(shape, in_dtype)
    x = x.at[(0,) * len(shape)].set(jnp.nan).at[-1].set(0)
    expected = quantize(x, dtype, block_size, key, "reference")
    with races():
        q = quantize(x, dtype, block_size, key, "mosaic", config=config)
        y = dequantize(expected, in_dtype, "mosaic", config=config)
    assert_same_bits(q, expected)
    assert_same_bits(y, dequantize(expected, in_dtype, "reference"))


def test_quantize_of_shards_has_the_blocks_of_the_whole():
    x = draw((8, 200))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def there_and_back(x):
        q = quantize(x, "int8", 64)
        return q.values, q.scales, dequantize(q)

    shards = jax.jit(
        jax.shard_map(there_and_back, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )(x)
    assert_same_bits(shards, there_and_back(x))


def test_quantize_has_no_derivative_and_passes_one_straight_through():
    x = draw((4, 64))

    def loss(x, stops):
        y = dequantize(quantize(x))
        return jnp.vdot(jax.lax.stop_gradient(y - x) + x if stops else y, jnp.cos(x))

    with pytest.raises(
        ValueError, match=r"quantize has no derivative: .*through with x \+ jax.lax.stop_gradient"
    ):
        jax.grad(loss)(x, False)
    y = dequantize(quantize(x))
    np.testing.assert_allclose(
        jax.grad(loss)(x, True), jnp.cos(x) - y * jnp.sin(x), rtol=1e-5, atol=1e-7
    )


def test_quantize_of_nothing_is_nothing():
    for shape in ((0, 64), (3, 0)):
        q = quantize(jnp.ones(shape, jnp.bfloat16), "int8", 64)
        assert (q.values.shape, q.scales.shape) == (shape, (shape[0], -(-shape[1] // 64)))
        assert dequantize(q).shape == shape


X = jnp.ones((4, 64), jnp.bfloat16)
Q = quantize(X, block_size=64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(X, jnp.int4), "dtype=int4: choose from int8, float8_e4m3fn, float8_e5m2"),
        (
            lambda: quantize(X.astype(int)),
            r"x is int32\[4, 64\]: \[..., K\] of bfloat16, float16 or float32",
        ),
        (lambda: quantize(X[0, 0]), r"x is bfloat16\[\]"),
        (lambda: quantize(X, block_size=0), "block_size=0: an integer of 1 or more"),
        (lambda: quantize(X, block_size=64.0), "block_size=64.0: an integer"),
        (lambda: quantize(X, key=0), "key is 0: one key is needed, such as jax.random.key"),
        (
            lambda: quantize(X, key=jax.random.split(jax.random.key(0))),
            r"key is key<fry>\[2\]: one key",
        ),
        (
            lambda: quantize(X, implementation="triton"),
            "'triton' is unknown: choose from mosaic, xla, reference, or None",
        ),
        (lambda: dequantize(Q, jnp.int8), "dtype=int8: choose from bfloat16, float16, float32"),
        (
            lambda: dequantize(Quantized(X, Q.scales, 64)),
            r"values are bfloat16\[4, 64\]: \[..., K\] of int8",
        ),
        (
            lambda: dequantize(Quantized(Q.values, Q.scales, 32)),
            r"scales are float32\[4, 1\].*float32\[4, 2\] is needed",
        ),
        (
            lambda: dequantize(Quantized(Q.values, Q.scales.astype(jnp.bfloat16), 64)),
            r"scales are bfloat16",
        ),
        (lambda: Config(num_warpgroups=5), "1 to 4 warpgroups"),
        (lambda: Config(num_stages=0), "1 stage or more"),
    ],
)
def test_quantize_of_bad_input_says_what_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        (
            "NVIDIA B200",
            lambda: quantize(X, "int8", 64, implementation="mosaic"),
            "needs a Hopper GPU .* choose xla, reference",
        ),
        (
            "NVIDIA H200",
            lambda: quantize(X, "int8", 96, implementation="mosaic"),
            "block_size=96 is no multiple of 64",
        ),
        (
            "NVIDIA H200",
            lambda: quantize(X, "int8", 8192, implementation="mosaic"),
            "64 blocks of 8192 do not fit",
        ),
        (
            "NVIDIA H200",
            lambda: quantize(X[:0], "int8", 64, implementation="mosaic"),
            "without elements has no blocks",
        ),
        (
            "NVIDIA H200",
            lambda: dequantize(Quantized(Q.values, Q.scales, 96), implementation="mosaic"),
            "multiple of 64",
        ),
    ],
)
def test_quantize_kernel_named_for_what_it_cannot_do_is_refused(kind, call, message):
    with on_gpu(kind), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(call)


def test_quantize_config_that_does_not_fit_is_refused():
    config = Config(num_warpgroups=4, num_stages=4)
    with (
        on_gpu("NVIDIA H200"),
        pytest.raises(ValueError, match="bytes of shared memory, and a thread block has 231424"),
    ):
        jax.eval_shape(lambda: quantize(X, "int8", 256, implementation="mosaic", config=config))


def test_quantize_chosen_by_none_is_xlas_and_logged_once_with_the_reason(caplog):
    dispatch.log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for kind in ("NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
            with on_gpu(kind):
                assert "mpmd_map" not in str(jax.make_jaxpr(lambda: quantize(X, "int8", 64))())
    hopper, other = (record.getMessage() for record in caplog.records)
    assert (
        hopper
        == "quantize runs as xla (not mosaic: no measurement on a GPU says yet that it is faster)"
    )
    assert other.startswith("quantize runs as xla (not mosaic: it needs a Hopper GPU")


@settings(deadline=None, max_examples=100)
@given(
    block_size=st.integers(1, 16).map(lambda n: 64 * n),
    dtypes=st.sampled_from([("int8", f) for f in FLOATS] + [(f, "int8") for f in FLOATS]),
    words=st.booleans(),
)
def test_quantize_config_chosen_fits_and_leaves_no_stage_out(block_size, dtypes, words):
    in_dtype, out_dtype = map(jnp.dtype, dtypes)
    problem = Problem(
        num_blocks=1000,
        block_size=block_size,
        in_dtype=in_dtype,
        out_dtype=out_dtype,
        in_block_bytes=4 * words,
        out_block_bytes=4,
    )
    config: Any = choose(problem, 132)
    if config is None:
        assert min(problem.shared_bytes(1, 2), problem.shared_bytes(2, 1)) > SHARED_BYTES
        return
    problem.check(config)
    assert (
        config.num_stages == MAX_STAGES
        or problem.shared_bytes(config.num_warpgroups, config.num_stages + 1) > SHARED_BYTES
    )
    in_flight = config.num_warpgroups * config.num_stages * 64 * block_size * in_dtype.itemsize
    assert in_flight >= (36 << 10) * in_dtype.itemsize / (in_dtype.itemsize + out_dtype.itemsize)
    assert config.num_warpgroups * config.num_stages >= 2
