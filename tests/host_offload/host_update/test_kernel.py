"""Kernels over host memory equal the jitted function.

The lengths, offsets, dtypes and numbers of threads are arbitrary.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.host_update import kernel as fused

# relative to an array's largest element, per call: XLA contracts products and sums, the kernel does
# not
TOLERANCE = 1e-6
TINY = float(np.finfo(np.float32).tiny)


def rule_of(tx, grad_dtype=jnp.float32, out_dtype=None):
    """Return the update of one float32 array as a function, and its jaxpr.

    With `out_dtype`, the update also returns a copy of the parameters in that dtype.
    """

    def rule(grads: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = tx.update(grads.astype(jnp.float32), opt_state, params)
        params = optax.apply_updates(params, updates)
        return (
            (params, opt_state)
            if out_dtype is None
            else (params, opt_state, params.astype(out_dtype))
        )

    params = jax.ShapeDtypeStruct((8,), jnp.float32)
    grads = jax.ShapeDtypeStruct((8,), grad_dtype)
    return rule, jax.make_jaxpr(rule)(grads, jax.eval_shape(tx.init, params), params)


def aliases_of(closed):
    """Return the kernel's arrays: parameters are the first output and the last input.

    States are in between, in order; counts are not arrays.
    """
    last = len(closed.in_avals) - 1
    return [(0, last)] + [(k, k) for k in range(1, last) if closed.in_avals[k].ndim]


@functools.cache
def adamw(grad_dtype=jnp.float32, out_dtype=None):
    rule, closed = rule_of(optax.adamw(1e-3), grad_dtype, out_dtype)
    return jax.jit(rule), fused.build_kernel(closed, aliases_of(closed))


def adamw_inputs(n, seed=0, offset=0):
    """Return gradient, count, both moments and parameters, as views at `offset` elements."""
    rng = np.random.default_rng(seed)
    g, m, v, p = (rng.normal(size=n + offset).astype(np.float32)[offset:] for _ in range(4))
    np.square(v, out=v)
    return [g, np.int32(3), m, v, p]


def run_adamw(kernel, inputs, num_threads=2):
    """Run in place on copies, and return count, moments and parameters."""
    g, count, *state = inputs
    state = [np.copy(a) for a in state]
    out = np.zeros((), np.int32)
    kernel([g, count, *state], [None, out, None, None], num_threads)
    return [out, *state]


def assert_close(actual, desired):
    scale = np.abs(desired, dtype=np.float32).max(initial=0, where=np.isfinite(desired))
    np.testing.assert_allclose(
        actual.astype(np.float32), np.asarray(desired, np.float32), rtol=0, atol=TOLERANCE * scale
    )


def adam_state(count, m, v):
    return (optax.ScaleByAdamState(count, m, v), optax.EmptyState(), optax.EmptyState())


def jitted_adamw(jitted, inputs):
    g, count, m, v, p = inputs
    params, (state, *_), *_ = jitted(
        jnp.asarray(g), adam_state(jnp.int32(count), jnp.asarray(m), jnp.asarray(v)), jnp.asarray(p)
    )
    return [np.asarray(a) for a in (state.count, state.mu, state.nu, params)]


# --- the jitted rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 2, 9), mask=True),
        optax.chain(optax.clip(0.5), optax.lion(1e-3)),
        optax.sgd(1e-2, momentum=0.9, nesterov=True),
        optax.rmsprop(1e-3),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    ],
    ids=["adamw", "lion", "sgd", "rmsprop", "hyperparams"],
)
def test_kernel_is_the_jitted_rule_over_steps(tx):
    n, rng = 4099, np.random.default_rng(0)
    rule, closed = rule_of(tx)
    kernel, jitted = fused.build_kernel(closed, aliases_of(closed)), jax.jit(rule)
    params = jnp.asarray(rng.normal(size=n), jnp.float32)
    opt_state = tx.init(params)
    inputs = [np.array(a) for a in jax.tree.leaves((params, opt_state, params))]
    for _ in range(4):
        inputs[0] = rng.normal(size=n).astype(np.float32)
        params, opt_state = jitted(jnp.asarray(inputs[0]), opt_state, params)
        outputs = [None if aval.ndim else np.zeros((), aval.dtype) for aval in closed.out_avals]
        kernel(inputs, outputs)
        inputs[1:-1] = [
            a if out is None else out for a, out in zip(inputs[1:-1], outputs[1:], strict=True)
        ]
        for actual, desired in zip(
            [inputs[-1], *inputs[1:-1]], jax.tree.leaves((params, opt_state)), strict=True
        ):
            assert_close(actual, np.asarray(desired))


@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("n", [0, 1, 7, 1000, 100003])
def test_kernel_takes_any_length_at_any_offset(n, offset):
    jitted, kernel = adamw()
    inputs = adamw_inputs(n, seed=n, offset=offset)
    around = np.full(n + offset + 9, 7, np.float32)  # elements next to the array are unchanged
    around[offset : offset + n] = inputs[4]
    count = np.zeros((), np.int32)
    kernel([*inputs[:4], around[offset : offset + n]], [None, count, None, None], 2)
    assert (around[:offset] == 7).all()
    assert (around[offset + n :] == 7).all()
    for actual, desired in zip(
        [count, inputs[2], inputs[3], around[offset : offset + n]],
        jitted_adamw(jitted, adamw_inputs(n, seed=n, offset=offset)),
        strict=True,
    ):
        assert_close(actual, desired)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("as_bits", [False, True])
def test_kernel_reads_and_writes_half_precision(dtype, as_bits):
    jitted, kernel = adamw(dtype, dtype)
    g, count, m, v, p = adamw_inputs(1003)
    g, low = g.astype(dtype), np.zeros(1003, dtype)
    desired = jitted_adamw(jitted, [g, count, m, v, p])
    bits = [a.view(np.uint16) if as_bits else a for a in (g, low)]
    new_count = np.zeros((), np.int32)
    kernel([bits[0], count, m, v, p], [None, new_count, None, None, bits[1]], 1)
    for actual, wanted in zip([new_count, m, v, p], desired, strict=True):
        assert_close(actual, wanted)
    np.testing.assert_array_equal(low.view(np.uint16), p.astype(dtype).view(np.uint16))


@pytest.mark.parametrize("mu_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_kernel_is_the_rule_op_by_op_bit_for_bit(mu_dtype):
    tx = optax.lion(1e-3, mu_dtype=mu_dtype)
    rule, closed = rule_of(tx)
    kernel = fused.build_kernel(closed, aliases_of(closed))
    g, count, m, _, p = adamw_inputs(4099)
    m = m.astype(mu_dtype)
    opt_state = (
        optax.ScaleByLionState(jnp.int32(count), jnp.array(m)),
        optax.EmptyState(),
        optax.EmptyState(),
    )
    params, (state, *_) = rule(
        jnp.array(g), opt_state, jnp.array(p)
    )  # not jitted: XLA would keep m in float32, contracted
    kernel([g, count, m, p], [None, np.zeros((), np.int32), None])
    np.testing.assert_array_equal(p, params)
    np.testing.assert_array_equal(m, state.mu)


def test_kernel_passes_nan_and_infinity_on():
    jitted, kernel = adamw()
    inputs = adamw_inputs(300)
    inputs[0][::7], inputs[0][1::7], inputs[0][2::7], inputs[0][3::7] = (
        np.nan,
        np.inf,
        -np.inf,
        3e38,
    )
    for actual, desired in zip(
        run_adamw(kernel, inputs), jitted_adamw(jitted, inputs), strict=True
    ):
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(desired))
        np.testing.assert_array_equal(np.isposinf(actual), np.isposinf(desired))
        assert_close(np.nan_to_num(actual), np.nan_to_num(desired))


# --- threads --------------------------------------------------------------------------------------


def test_threads_do_not_change_a_bit():
    _, kernel = adamw()
    inputs = adamw_inputs(200003)
    alone = run_adamw(kernel, inputs, 1)
    for num_threads in (2, 3, 8, None):
        for actual, desired in zip(run_adamw(kernel, inputs, num_threads), alone, strict=True):
            np.testing.assert_array_equal(actual, desired)


def test_threads_may_call_at_once():
    _, kernel = adamw()
    inputs = [adamw_inputs(60000 + k, seed=k) for k in range(6)]
    alone = [run_adamw(kernel, i, 1) for i in inputs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda i: [run_adamw(kernel, i) for _ in range(20)][-1], inputs))
    jax.tree.map(np.testing.assert_array_equal, together, alone)


def test_threads_that_never_start_are_not_waited_for():
    _, closed = rule_of(optax.sgd(0.5))
    kernel = fused.build_kernel(closed, [(0, 1)])
    busy = threading.Event()
    blocked = [kernel._helpers.submit(busy.wait) for _ in range(kernel._helpers._max_workers)]
    params = np.ones(500000, np.float32)
    kernel([params.copy(), params], [None], 4)
    busy.set()
    assert (params == 0.5).all()
    assert all(b.result() for b in blocked)


def test_threads_of_xla_and_of_python_agree_on_subnormals():
    _, kernel = adamw()
    n = 100000
    tiny = np.full(n, 1e-39, np.float32)
    inputs = [tiny, np.int32(3), tiny, tiny, np.ones(n, np.float32)]
    desired = run_adamw(kernel, inputs, 1)
    assert not desired[1].any()
    inside = []

    def callback(x):
        inside.append((np.float32(1e-39) * np.ones(1, np.float32), run_adamw(kernel, inputs)))
        return x

    jax.block_until_ready(
        jax.jit(lambda x: jax.pure_callback(callback, jax.ShapeDtypeStruct((), x.dtype), x))(
            jnp.float32(0)
        )
    )
    jax.tree.map(np.testing.assert_array_equal, inside[0][1], desired)
    assert (tiny * np.ones(1, np.float32)).all()  # the mode of this thread is unchanged


# --- equations ------------------------------------------------------------------------------------

EXACT = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "cube": lambda x, y: jax.lax.integer_pow(x, 3),
    "sign": lambda x, y: jnp.sign(x),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "clamp": lambda x, y: jax.lax.clamp(jnp.float32(-1), x, y),
    "floor": lambda x, y: jnp.floor(x),
    "ceil": lambda x, y: jnp.ceil(x),
    "finite": lambda x, y: jnp.where(jnp.isfinite(x) & ~(y > 2), 1.0, jnp.nan),
    "select": lambda x, y: jnp.where((x == y) | (x < -y) | ((x >= 3) & (y != 4) & (x <= 9)), x, -y),
    "int": lambda x, y: x.astype(jnp.int32).astype(jnp.float32),
    "bool": lambda x, y: jnp.float32(x != 0) + x.astype(bool),
    "relu": lambda x, y: jax.nn.relu(x),
}
CLOSE = {
    "sqrt": lambda x, y: jnp.sqrt(x),
    "rsqrt": lambda x, y: jax.lax.rsqrt(x),
    "square": lambda x, y: jnp.square(x),
    "inverse": lambda x, y: jax.lax.integer_pow(x, -2),
    "exp": lambda x, y: jnp.exp(x),
    "expm1": lambda x, y: jnp.expm1(x),
    "log": lambda x, y: jnp.log(x),
    "log1p": lambda x, y: jnp.log1p(x),
    "logistic": lambda x, y: jax.nn.sigmoid(x),
    "tanh": lambda x, y: jnp.tanh(x),
    "cos": lambda x, y: jnp.cos(x),
    "pow": lambda x, y: abs(x) ** y,
}


@functools.cache
def all_equations():
    arg = jax.ShapeDtypeStruct((4,), jnp.float32)
    evaluate = lambda x, y: [f(x, y) for f in (EXACT | CLOSE).values()]  # noqa: E731
    return jax.jit(evaluate), fused.build_kernel(jax.make_jaxpr(evaluate)(arg, arg))


FLOATS = st.lists(
    st.tuples(*[st.floats(width=32, allow_subnormal=False)] * 2), min_size=1, max_size=40
)


@given(FLOATS)
@settings(deadline=None, max_examples=60)
def test_equations_are_those_of_xla_on_any_numbers(pairs):
    x, y = np.full((2, 40), 1, np.float32)
    for k, (a, b) in enumerate(pairs):
        x[k], y[k] = a, b
    jitted, kernel = all_equations()
    outputs = [np.zeros_like(x) for _ in EXACT | CLOSE]
    kernel([x, y], outputs)
    for name, actual, desired in zip(EXACT | CLOSE, outputs, jitted(x, y), strict=True):
        desired = np.asarray(desired)
        rtol, atol = (0, 0) if name in EXACT else (3e-6 if name == "pow" else TOLERANCE, TINY)
        np.testing.assert_allclose(actual, desired, rtol, atol, err_msg=f"{name} of {x}, {y}")


@functools.cache
def bit_equations():
    def evaluate(x, y, n):
        a, b = (jax.lax.bitcast_convert_type(v, jnp.uint32) for v in (x, y))
        m = n.astype(jnp.uint32)
        small = b & 63  # includes shifts by 32 and more
        found = [
            a + b,
            a - b,
            a * b,
            a * m,
            m * m + a,
            a & b,
            a | m,
            a ^ b,
            a << small,
            a >> small,
            (m >> 5) ^ a,
            a << 31,
        ]
        found += [
            jnp.where(a < b, a, m),
            jnp.where(a >= m, b, jnp.uint32(0xFFFFFFFF)),
            (a > 7).astype(jnp.uint32),
        ]
        counts = [(a >> 8).astype(jnp.float32), (a >> 1).astype(jnp.int32).astype(jnp.float32)]
        return [jax.lax.bitcast_convert_type(v, jnp.float32) for v in found] + counts

    arg = jax.ShapeDtypeStruct((4,), jnp.float32)
    closed = jax.make_jaxpr(evaluate)(arg, arg, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.jit(evaluate), fused.build_kernel(closed), len(closed.out_avals)


@given(
    st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 2), min_size=1, max_size=40),
    st.integers(-(2**31), 2**31 - 1),
)
@settings(deadline=None, max_examples=60)
def test_bits_are_those_of_xla(pairs, n):
    """Bits of uint32 reinterpreted as float32: no NaN and no subnormal number is changed."""
    x, y = (
        np.ascontiguousarray(column).view(np.float32) for column in np.array(pairs, np.uint32).T
    )
    jitted, kernel, num = bit_equations()
    outputs = [np.zeros_like(x) for _ in range(num)]
    kernel([x, y, np.int32(n)], outputs)
    for actual, desired in zip(outputs, jitted(x, y, jnp.int32(n)), strict=True):
        np.testing.assert_array_equal(actual.view(np.uint32), np.asarray(desired).view(np.uint32))


@functools.cache
def conversions():
    narrow = lambda x: (x.astype(jnp.bfloat16), x.astype(jnp.float16))  # noqa: E731
    wide = lambda a, b: (a.astype(jnp.float32), b.astype(jnp.float32), a, -b)  # noqa: E731
    shapes = [
        jax.ShapeDtypeStruct((4,), dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    ]
    return fused.build_kernel(jax.make_jaxpr(narrow)(shapes[0])), fused.build_kernel(
        jax.make_jaxpr(wide)(*shapes[1:])
    )


def test_rounding_keeps_every_half_precision_number():
    narrow, wide = conversions()
    bits = np.arange(2**16, dtype=np.uint16)
    low, half = bits.view(ml_dtypes.bfloat16), bits.view(np.float16)
    out = [
        np.zeros(2**16, dtype) for dtype in (np.float32, np.float32, ml_dtypes.bfloat16, np.float16)
    ]
    wide([low, half], out)
    np.testing.assert_array_equal(out[0].view(np.uint32), bits.astype(np.uint32) << 16)
    np.testing.assert_array_equal(out[1], half.astype(np.float32))
    np.testing.assert_array_equal(out[2].view(np.uint16), bits)
    back = [np.zeros(2**16, dtype) for dtype in (ml_dtypes.bfloat16, np.float16)]
    for k, source in ((0, out[0]), (1, out[1])):
        narrow([source], back)
        kept = ~np.isnan(source)
        np.testing.assert_array_equal(back[k].view(np.uint16)[kept], bits[kept])
        assert np.isnan(back[k][~kept]).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_rounding_is_to_nearest_even(some, seed):
    rng = np.random.default_rng(seed)
    high = rng.integers(0, 2**16, 4096, dtype=np.uint32) << 16
    ties = high | rng.choice(np.array([0x8000, 0x7FFF, 0x8001, 0], np.uint32), 4096)
    half_ties = (
        rng.integers(0, 2**16, 4096)
        .astype(np.uint16)
        .view(np.float16)
        .astype(np.float32)
        .view(np.uint32)
        | 0x1000
    )
    x = np.concatenate(
        [np.array(some, np.uint32), ties, half_ties, rng.integers(0, 2**32, 4096, dtype=np.uint32)]
    ).view(np.float32)
    low, half = np.zeros(x.shape, ml_dtypes.bfloat16), np.zeros(x.shape, np.float16)
    conversions()[0]([x], [low, half], 1)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(
            low.view(np.uint16), x.astype(ml_dtypes.bfloat16).view(np.uint16)
        )
        np.testing.assert_array_equal(half, x.astype(np.float16))


def test_scalars_are_computed_before_the_loop():
    _, kernel = adamw()
    before, loop = kernel.source.split("while True")
    assert "**" in before
    assert "**" not in loop
    assert kernel.bytes_per_element == 4 + 2 * 12
    assert adamw(jnp.bfloat16, jnp.bfloat16)[1].bytes_per_element == 2 + 2 * 12 + 2


def test_arrays_may_be_traced_without_dims():
    number = jax.ShapeDtypeStruct((), jnp.float32)
    closed = jax.make_jaxpr(lambda x, c: x * c + 1)(number, number)
    x = np.arange(5, dtype=np.float32)
    fused.build_kernel(closed, [(0, 0)], arrays=[True, False])([x, 2.0], [None])
    np.testing.assert_array_equal(x, [1, 3, 5, 7, 9])


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x / jnp.sum(x), "reduce_sum"),
        (lambda x: x * jax.random.normal(jax.random.key(0), x.shape), "random_"),
        (lambda x: x + jnp.arange(4.0), "iota"),
        (lambda x: x[::-1], "rev"),
        (lambda x: jnp.cumsum(x), "cumsum"),
        (lambda x: (x.reshape(2, 2) * 2).reshape(4), "reshape"),
        (lambda x: x * np.arange(4, dtype=np.float32), r"constant of shape \(4,\)"),
        (lambda x: x > 0, "output 0 is bool"),
        (
            lambda x: jax.lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32),
            "bitcast_convert_type",
        ),
        (
            lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16)[:, 0].astype(jnp.float32),
            "bitcast_convert_type",
        ),
        (lambda x: x.astype(jnp.uint32).astype(jnp.float32), "convert_element_type"),
        (lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: -x), "slice|squeeze|gather"),
    ],
)
def test_build_refuses_what_is_not_elementwise(function, named):
    with pytest.raises(ValueError, match=named):
        fused.build_kernel(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((4,), jnp.float32)))


def test_build_refuses_inputs_and_aliases_that_do_not_fit():
    x, y, count = (
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((4,), jnp.float32), ((4,), jnp.bfloat16), ((), jnp.int32))
    )
    closed = jax.make_jaxpr(lambda x, y, n: (x * n, y, n))(x, y, count)
    for aliases, message in [
        ([(0, 1)], "float32 is written over bfloat16"),
        ([(2, 2)], "not an array"),
        ([(0, 0), (1, 0)], "one place"),
        ([(9, 0)], "no such output"),
    ]:
        with pytest.raises(ValueError, match=message):
            fused.build_kernel(closed, aliases)
    with pytest.raises(ValueError, match=r"input 0 is int32\[4\]"):
        fused.build_kernel(jax.make_jaxpr(lambda i: i)(jax.ShapeDtypeStruct((4,), jnp.int32)))
    with pytest.raises(ValueError, match="at least one array"):
        fused.build_kernel(closed, arrays=[False] * 3)
    with pytest.raises(ValueError, match=r"\[4, 5\] elements"):
        fused.build_kernel(
            jax.make_jaxpr(lambda a, b: (a, b))(x, jax.ShapeDtypeStruct((5,), jnp.float32))
        )


def test_call_refuses_memory_that_does_not_fit():
    kernel = conversions()[0]
    x, low, half = np.zeros(8, np.float32), np.zeros(8, ml_dtypes.bfloat16), np.zeros(8, np.float16)
    fixed = np.zeros(8, np.float16)
    fixed.flags.writeable = False
    both = np.zeros(16, np.uint16)
    cases = [
        ([x[:7]], [low, half], "input 0 has 7, output 0 has 8"),
        ([x.astype(np.float64)], [low, half], "dtype float64"),
        ([np.zeros(16, np.float32)[::2]], [low, half], "contiguous"),
        ([x], [low, fixed], "read-only"),
        ([x], [None, half], "output 0 is NoneType"),
        ([x], [low], "1 inputs, 1 outputs"),
        ([x], [both[:8], both[4:12]], "overlaps"),
        ([x], [x.view(np.uint16)[:8], half], "overlaps"),
        ([x], [x.view(np.uint16)[8:], half], "overlaps"),
    ]
    for inputs, outputs, message in cases:
        with pytest.raises(ValueError, match=message):
            kernel(inputs, outputs)
    with pytest.raises(ValueError, match="num_threads=0"):
        kernel([x], [low, half], 0)
    _, kernel = adamw()
    state = adamw_inputs(8)
    with pytest.raises(ValueError, match="in place over input 4"):
        kernel(state, [np.zeros(8, np.float32), np.zeros((), np.int32), None, None])
    kernel(state, [state[4], np.zeros((), np.int32), None, None])
