"""The tiled loss and its gradients equal a float64 program with full logits.

Every option, dtype and number of tiles is tested.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import zerojax as zj
from pallas_kernels import dispatch
from pallas_kernels.linear_cross_entropy import Config, linear_cross_entropy

T, D, V = 37, 24, 101
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "all smoothed": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "ignore_index": {"ignore_index": 3},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0, "ignore_index": 3},
}
TILES = {
    "one tile": Config(block_t=64, block_v=128, passes=1),
    "ragged": Config(block_t=16, block_v=32, passes=1),
    "ragged in two passes": Config(block_t=16, block_v=32, passes=2),
    "columns of one": Config(block_t=37, block_v=1, passes=1),
    "rows of one": Config(block_t=1, block_v=101, passes=2),
}
# Largest difference from float64 relative to the largest value, for the loss and for gradients,
# whose slopes are rounded too.
TOLERANCES = {"float32": (1e-6, 2e-6), "bfloat16": (1e-6, 8e-3), "float16": (1e-6, 1e-3)}


def problem(
    dtype: str = "float32", shape: tuple[int, int, int] = (T, D, V), scale: float = 1.0
) -> tuple[Any, Any, Any]:
    t, d, v = shape
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(scale * rng.normal(size=s), dtype) for s in ((t, d), (d, v)))
    labels = rng.integers(0, v, t)
    labels[::5] = -1 - rng.integers(0, 200, len(labels[::5]))
    labels[1 % t] = min(3, v - 1)
    return x, w, labels.astype(np.int32)


def exact(
    x: Any,
    w: Any,
    labels: np.ndarray,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return losses, dx and dw in float64, from probabilities and one-hot labels.

    `weights` scales the tokens' losses under "none".
    """
    x, w = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, w))
    raw = x @ w
    z = raw if softcap is None else softcap * np.tanh(raw / softcap)
    top = z.max(1, keepdims=True)
    lse = (np.log(np.exp(z - top).sum(1, keepdims=True)) + top)[:, 0]
    counts = (labels >= 0) & (labels != (-1 if ignore_index is None else ignore_index))
    target = np.full(z.shape, label_smoothing / z.shape[1])
    target[np.arange(len(z)), np.where(counts, labels, 0)] += 1 - label_smoothing
    losses = counts * (lse - (target * z).sum(1) + z_loss * lse**2)
    if reduction == "none":
        value, weight = losses, weights * counts
    else:
        weight = counts / (max(counts.sum(), 1) if reduction == "mean" else 1)
        value = (weight * losses).sum()
    slope = np.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None] - target
    slope *= weight[:, None] * (1 if softcap is None else 1 - (z / softcap) ** 2)
    return value, slope @ w.T, x.T @ slope


@functools.partial(jax.jit, static_argnames=("options",))
def value_and_grads(
    x: Any, w: Any, labels: Any, options: tuple[tuple[str, Any], ...], weights: Any = None
) -> Any:
    value, vjp = jax.vjp(lambda x, w: linear_cross_entropy(x, w, labels, **dict(options)), x, w)
    return value, *vjp(jnp.ones((), jnp.float32) if weights is None else weights)


def assert_equal(got: Any, expected: Any, dtype: str = "float32") -> None:
    value, *grads = TOLERANCES[dtype][:1] + TOLERANCES[dtype][1:] * 2
    for name, a, b, tolerance in zip(
        ("loss", "dx", "dw"), got, expected, (value, *grads), strict=True
    ):
        a = np.asarray(a.astype(jnp.float32), np.float64)
        assert a.shape == b.shape, name
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-30), err_msg=name
        )


def check(x: Any, w: Any, labels: Any, dtype: str = "float32", **options: Any) -> None:
    got = value_and_grads(x, w, labels, tuple(options.items()))
    assert got[0].dtype == jnp.float32
    assert (got[1].dtype, got[2].dtype) == (x.dtype, w.dtype)
    plain = {
        k: v
        for k, v in options.items()
        if k not in ("config", "implementation", "num_tiles", "split")
    }
    assert_equal(got, exact(x, w, labels, **plain), dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_equal_float64_for_every_option(options):
    check(*problem(), config=TILES["ragged"], **options)
    check(*problem(), implementation="reference", **options)


@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [(d, t) for d in TOLERANCES for t in TILES if d == "float32" or "ragged" in t],
)
def test_loss_and_gradients_equal_float64_for_every_dtype_and_tile(dtype, tiles):
    check(*problem(dtype, scale=0.5), dtype=dtype, config=TILES[tiles], **OPTIONS["all"])


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 2), (5, 1, 13), (33, 9, 65)])
def test_any_dims_are_served(shape):
    check(*problem(shape=shape), config=Config(block_t=4, block_v=8, passes=2))
    check(*problem(shape=shape))  # tiles chosen by the function


def test_num_tiles_are_of_the_vocabulary():
    check(*problem(), num_tiles=3)
    body = str(
        jax.make_jaxpr(lambda x, w, y: linear_cross_entropy(x, w, y, num_tiles=4))(*problem())
    )
    assert "[24,26]" in body  # of 101 columns


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reductions(reduction):
    x, w, labels = problem()
    options = (("reduction", reduction), ("config", TILES["ragged"]), ("z_loss", 0.01))
    weights = (
        np.random.default_rng(1).normal(size=T).astype(np.float32) if reduction == "none" else None
    )
    got = value_and_grads(x, w, labels, options, weights)
    assert_equal(got, exact(x, w, labels, reduction=reduction, z_loss=0.01, weights=weights))


def test_no_label_that_counts_gives_zero_and_no_nan():
    x, w, _ = problem()
    for options in ({}, {"ignore_index": 7, "z_loss": 0.1, "label_smoothing": 0.1}):
        labels = np.full(T, options.get("ignore_index", -100), np.int32)
        for implementation in ("xla", "reference"):
            made = value_and_grads(
                x, w, labels, (*options.items(), ("implementation", implementation))
            )
            assert all(not np.asarray(a).any() for a in made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_logits_do_not_overflow(dtype):
    """Logits of about 3e4 have exponentials beyond every dtype; a label misses by as much."""
    x, w, labels = problem(dtype, scale=80.0)
    got = value_and_grads(x, w, labels, (("config", TILES["ragged in two passes"]),))
    assert got[0] > 1e4
    assert_equal(got, exact(x, w, labels), dtype)


def test_float16_keeps_small_probabilities():
    """One column has a logit of 14, so the other columns have probabilities of 8e-7.

    That is 14 of float16's smallest steps.
    """
    x, w = jnp.ones((8, 4), jnp.float16), jnp.zeros((4, 16384), jnp.float16).at[:, 0].set(3.5)
    options = (("config", Config(block_t=2, block_v=4096)),)
    labels = np.zeros(8, np.int32)
    _, _, dw = value_and_grads(x, w, labels, options, jnp.float32(100))
    np.testing.assert_allclose(
        np.asarray(dw[:, 1:], np.float64), 100 * exact(x, w, labels)[2][:, 1:], rtol=1e-3
    )


@pytest.mark.parametrize("passes", [1, 2])
def test_float16_keeps_small_cotangents(passes):
    """A cotangent of 1e-7 per token times probabilities of 6e-5 vanishes in float16.

    Their sum is 16 of its steps.
    """
    x, w = jnp.zeros((8, 4), jnp.float16), jnp.full((4, 16384), 10, jnp.float16).at[:, 0].set(0)
    options = (("config", Config(block_t=2, block_v=4096, passes=passes)),)
    _, dx, _ = value_and_grads(x, w, np.zeros(8, np.int32), options, jnp.float32(8e-7))
    np.testing.assert_allclose(np.asarray(dx, np.float64), 1e-6, atol=4e-8)


@pytest.mark.parametrize("passes", [1, 2])
def test_bfloat16_gradients_are_summed_in_float32_and_rounded_once(passes):
    """Over 512 tiles of one token or column, bfloat16 sums would stop growing at 256 terms."""
    labels = np.full(512, -1, np.int32)
    labels[0] = 0
    w = (jnp.arange(512) / 4096).astype(jnp.bfloat16)[None] * jnp.ones((4, 1), jnp.bfloat16)
    for x, y, config in (
        (
            jnp.ones((512, 4), jnp.bfloat16),
            np.zeros(512, np.int32),
            Config(block_t=1, block_v=512, passes=passes),
        ),
        (jnp.ones((2, 4), jnp.bfloat16), labels[:2], Config(block_t=2, block_v=1, passes=passes)),
    ):
        got = value_and_grads(x, w, y, (("config", config), ("reduction", "sum")))
        for a, b in zip(got[1:], exact(x, w, y, reduction="sum")[1:], strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=8e-3, atol=1e-5)


def test_leading_dims_are_tokens():
    x, w, labels = problem(shape=(36, D, V))
    loss = jax.jit(functools.partial(linear_cross_entropy, reduction="none"))
    flat = exact(x, w, labels, reduction="none", weights=labels)[0]
    np.testing.assert_allclose(
        loss(x.reshape(4, 9, D), w, labels.reshape(4, 9)), flat.reshape(4, 9), atol=1e-5
    )
    one = loss(x[1], w, labels[1])
    np.testing.assert_allclose(one, flat[1], atol=1e-5)
    assert one.shape == ()


def test_labels_of_any_integer_dtype():
    x, w, _ = problem(shape=(8, D, V))
    labels = np.arange(8)
    expected = exact(x, w, labels)[0]
    for dtype in (np.int8, np.uint8, np.uint32):
        np.testing.assert_allclose(
            jax.jit(linear_cross_entropy)(x, w, labels.astype(dtype)), expected, rtol=1e-6
        )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_labels_that_32_bits_make_negative_are_out_of_range_all_the_same(implementation):
    x, w, _ = problem(shape=(8, D, V))
    labels = np.arange(-1, 7).astype(np.uint32)  # the first label was -1
    made = value_and_grads(x, w, labels, (("implementation", implementation),))
    # The gradient is NaN too: otherwise a step would move the weights by a gradient of no loss.
    assert all(np.isnan(np.asarray(a)).any() for a in made)


def test_narrow_labels_are_refused_where_a_cast_negative_one_would_be_a_label():
    x, w = np.zeros((4, 8), np.float32), np.zeros((8, 300), np.float32)
    with pytest.raises(
        ValueError,
        match="labels are uint8, which holds no negative number: a -1 that was cast to it is 255",
    ):
        linear_cross_entropy(x, w, np.arange(4, dtype=np.uint8))
    # A V larger than a signed dtype can hold cannot be reached by that dtype's labels.
    jax.eval_shape(linear_cross_entropy, x, w, np.arange(4, dtype=np.int8))


def test_under_vmap_scan_and_checkpoint():
    x, w, labels = problem(shape=(24, D, V))
    xs, ys = x.reshape(3, 8, D), labels.reshape(3, 8)
    loss = functools.partial(
        linear_cross_entropy, config=Config(block_t=3, block_v=32, passes=2), reduction="sum"
    )
    expected = exact(x, w, labels, reduction="sum")

    def mapped(x, w):
        return jax.vmap(loss, (0, None, 0))(x, w, ys).sum()

    def scanned(x, w):
        body = jax.checkpoint(lambda carry, xy: (carry + loss(xy[0], w, xy[1]), None))
        return jax.lax.scan(body, jnp.float32(0), (x, ys))[0]

    for fn in (mapped, scanned):
        value, (dx, dw) = jax.jit(jax.value_and_grad(fn, (0, 1)))(xs, w)
        assert_equal((value, dx.reshape(24, D), dw), expected)
    over_heads = jax.jit(jax.vmap(jax.grad(loss, 1), (None, 0, None)))(
        x, jnp.stack([w, 2 * w]), labels
    )
    for head, dw in zip((w, 2 * w), over_heads, strict=True):
        np.testing.assert_allclose(dw, exact(x, head, labels, reduction="sum")[2], atol=1e-4)


def test_a_label_out_of_range_is_never_silent():
    x, w, labels = problem()
    labels[4] = V
    for implementation in ("xla", "reference"):
        made = value_and_grads(x, w, labels, (("implementation", implementation),))
        assert all(np.isnan(np.asarray(a)).any() for a in made)


def test_check_labels_raises_where_labels_are_known_and_under_checkify():
    x, w, labels = problem()
    wrong = labels.copy()
    wrong[4:6] = V, V + 7
    told = f"2 of 37 labels are not below V={V}; the largest is {V + 7}"
    loss = functools.partial(linear_cross_entropy, check_labels=True, config=TILES["ragged"])
    for known in (wrong, jnp.asarray(wrong), wrong.tolist()):
        with pytest.raises(ValueError, match=told):
            loss(x, w, known)
        with pytest.raises(ValueError, match=told):
            jax.jit(lambda x, known=known: loss(x, w, known))(x)
    # nobody functionalizes the check, so NaN reports the error
    assert np.isnan(jax.jit(loss)(x, w, wrong))

    def trained(x, w, y):
        return jax.value_and_grad(jax.checkpoint(lambda x: loss(x, w, y)))(x)

    checked = jax.jit(checkify.checkify(trained))
    error, _ = checked(x, w, wrong)
    with pytest.raises(checkify.JaxRuntimeError, match=told):
        error.throw()
    error, (value, _) = checked(x, w, labels)
    error.throw()
    np.testing.assert_allclose(value, exact(x, w, labels)[0], rtol=1e-6)


def test_ignored_labels_are_not_out_of_range():
    x, w, labels = problem()
    labels[4] = V + 5
    loss = jax.jit(
        lambda x, w: linear_cross_entropy(x, w, labels, ignore_index=V + 5, check_labels=True)
    )(x, w)
    np.testing.assert_allclose(loss, exact(x, w, np.where(labels > V, -1, labels))[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.ones((T, D + 1))}, r"x is \[37, 25\] and w \[24, 101\]"),
        ({"w": jnp.ones((V, D))}, "transpose an embedding"),
        ({"w": jnp.ones((D, V, 1))}, r"w\[D, V\] are needed"),
        ({"w": jnp.ones((D, V), jnp.bfloat16)}, "x is float32 and w bfloat16: one dtype"),
        (
            {"x": jnp.ones((T, D), int), "w": jnp.ones((D, V), int)},
            "one dtype of float32, bfloat16, float16",
        ),
        ({"labels": np.zeros(T)}, "labels are float64: integers"),
        ({"labels": np.zeros(T, bool)}, "labels are bool"),
        ({"labels": np.zeros(T - 1, int)}, r"labels are \[36\]"),
        ({"x": jnp.ones((0, D)), "labels": np.zeros(0, int)}, "one token, one dim and one column"),
        ({"reduction": "max"}, "reduction='max' is unknown: choose from mean, sum, none"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"num_tiles": 0}, "num_tiles=0: 1 to V=101"),
        ({"num_tiles": V + 1}, "1 to V=101"),
        ({"num_tiles": 2, "config": Config()}, "both set the tiles"),
        ({"implementation": "cuda"}, "'cuda' is unknown: choose from mosaic, xla, reference"),
    ],
)
def test_bad_input_is_refused_in_plain_words(change, words):
    x, w, labels = problem()
    arguments = {"x": x, "w": w, "labels": labels} | change
    for call in (linear_cross_entropy, zj.linear_cross_entropy):
        with pytest.raises(ValueError, match=words):
            call(**arguments)


@pytest.mark.parametrize("fields", [{"block_t": 0}, {"block_v": -1}, {"passes": 3}])
def test_bad_tiles_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Config(**fields)


def test_a_named_implementation_serves_or_raises():
    told = "'mosaic' cannot serve: it multiplies bfloat16 and float16, not float32; choose xla, reference or None"
    with pytest.raises(NotImplementedError, match=told):
        linear_cross_entropy(*problem(), implementation="mosaic")


def test_a_choice_is_logged_once_with_its_reason(caplog):
    dispatch.log_choice.cache_clear()
    x, w, labels = problem()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            jax.eval_shape(functools.partial(linear_cross_entropy, reduction="sum"), x, w, labels)
        jax.eval_shape(functools.partial(linear_cross_entropy, implementation="xla"), x, w, labels)
    told = [r.message for r in caplog.records if "linear_cross_entropy" in r.message]
    assert told == [
        "linear_cross_entropy runs as xla (not mosaic: it multiplies bfloat16 and float16, not float32)"
    ]


def test_from_forward_to_backward_one_number_a_token_is_kept():
    x, w, labels = problem()
    kept = jax.eval_shape(
        lambda x, w: jax.vjp(lambda x, w: linear_cross_entropy(x, w, labels), x, w)[1], x, w
    )
    sizes = [
        leaf.size
        for leaf in jax.tree.leaves(kept)
        if leaf.ndim and leaf.shape not in (x.shape, w.shape)
    ]
    assert sizes
    assert all(size <= T for size in sizes)
