"""What `zj.attention` refuses, and which method it chooses."""

import logging
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import zerojax as zj
from zerojax.context.interface import _log_choice


def trace(q_shape=(1, 16, 8, 4), kv_heads=None, context=4, tensor=1, dtype=jnp.float32, **options):
    """Trace an attention on a mesh; nothing is compiled."""
    batch, tokens, heads, width = q_shape
    q = jax.ShapeDtypeStruct(q_shape, dtype)
    k = jax.ShapeDtypeStruct((batch, tokens, kv_heads or heads, width), dtype)
    devices = jax.devices()[: context * tensor]
    with jax.set_mesh(zj.make_mesh(context=context, tensor=tensor, fsdp=1, devices=devices)):
        return jax.eval_shape(lambda q, k: zj.attention(q, k, k, **options), q, k)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"q_shape": (1, 12, 8, 4), "method": "ring"},
            "12 tokens do not divide by 2 x context=4, since a causal ring splits them in 8: pad "
            "the sequences to 16",
        ),
        (
            {"q_shape": (1, 18, 8, 4), "method": "ulysses"},
            "18 tokens do not divide by context=4, since it splits them in 4: pad the sequences "
            "to 20",
        ),
        (
            {"q_shape": (1, 16, 6, 4), "method": "ulysses"},
            "6 heads do not divide by tensor=1 x context=4: use method='ring', or context=2",
        ),
        (
            {"q_shape": (1, 16, 3, 4), "method": "ulysses"},
            "3 heads do not divide by tensor=1 x context=4: use method='ring'",
        ),
        ({"causal": False, "window": 4}, "leave out window, or set causal=True"),
        ({"window": 0}, "window=0 is not a number of keys"),
        ({"window": 2.5}, "window=2.5 is not a number of keys"),
        ({"window": jnp.ones(2, jnp.int32)}, "is an integer scalar, got int32[2]"),
        ({"cap": -1.0}, "cap=-1.0: a positive finite number"),
        ({"cap": "a"}, "cap='a': a positive finite number that float32 holds is needed, or None"),
        ({"scale": "a"}, "scale='a': a finite number of Python is needed, or None for 1 / sqrt(D)"),
        ({"scale": float("inf")}, "scale=inf: a finite number"),
        (
            {"q_shape": (1, 1, 8, 4), "method": "gather"},
            "1 token does not divide by context=4",
        ),
        ({"block": 0}, "block=0 must be an integer of at least 1"),
        ({"method": "rings"}, "method='rings' is unknown: choose from ulysses, ring, gather"),
        ({"implementation": "flash"}, "implementation='flash' is unknown: choose from xla, cudnn"),
        ({"kv_heads": 3}, "multiple of K, the number of key heads"),
        ({"dtype": jnp.int32}, "got int32, int32 and int32: cast them"),
        ({"segment_ids": jnp.zeros((1, 8), jnp.int32)}, "one for each token, got int32[1, 8]"),
        ({"segment_ids": jnp.zeros((1, 16))}, "got float32[1, 16]"),
        (
            {"segment_ids": [[0] * 16]},
            "segment_ids must be an array, got list: pass jnp.asarray(segment_ids)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_repair(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        trace(**options)


def test_a_traced_scale_is_refused_with_a_repair():
    q = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"multiply q by it and pass scale=1\.0"):
        jax.eval_shape(lambda scale: zj.attention(q, q, q, scale=scale), jnp.float32(2))


def test_explicit_axes_are_refused_with_a_repair():
    q = jnp.zeros((1, 8, 2, 4))
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Explicit,), devices=jax.devices()[:4])
    message = "attention: the mesh in scope has explicit axes, context, .* zj.make_mesh"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        zj.attention(q, q, q)


def test_keys_of_another_length_are_refused():
    q, k = jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, 4, 2, 4))
    with pytest.raises(ValueError, match=r"needs q\[B, T, N, D\] and k, v\[B, T, K, D\], got q"):
        zj.attention(q, k, k)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "it is for NVIDIA GPUs, but the program is for cpu"),
        ({"dtype": jnp.float32}, "it is for NVIDIA GPUs"),
    ],
)
def test_cudnn_serves_or_says_why_not(options, text):
    with pytest.raises(NotImplementedError, match=f"implementation='cudnn' cannot be used: {text}"):
        trace(implementation="cudnn", **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": jnp.float32}, "it takes bfloat16 and float16, not float32"),
        ({"q_shape": (1, 16, 8, 12)}, "in steps of 8, not 12"),
        ({"cap": 30.0}, "it cannot cap scores"),
        ({"segment_ids": jnp.zeros((1, 16), jnp.int32)}, "only as a mask of T x T elements"),
        ({"window": jnp.int32(4)}, "a window only as a Python integer"),
        ({"method": "ring"}, "not built for method='ring': use method='ulysses'"),
    ],
)
def test_cudnn_on_a_gpu_serves_or_says_why_not(options, text, h200_compiler):
    from zerojax import aot

    options = {"dtype": jnp.bfloat16, "q_shape": (1, 16, 8, 16), **options}
    q = jax.ShapeDtypeStruct(options.pop("q_shape"), options.pop("dtype"))
    with (
        jax.set_mesh(aot.gpu_mesh("h200", fsdp=2, context=4)),
        pytest.raises(NotImplementedError, match=re.escape(text)),
    ):
        jax.eval_shape(lambda q: zj.attention(q, q, q, implementation="cudnn", **options), q)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "chosen"),
    [(8, 1, "ulysses"), (4, 1, "ulysses"), (2, 1, "ring"), (4, 2, "ring"), (8, 2, "ulysses")],
)
def test_the_method_follows_from_the_key_heads_and_is_logged_once(kv_heads, tensor, chosen, caplog):
    _log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "zerojax"):
        trace(kv_heads=kv_heads, tensor=tensor)
        trace(kv_heads=kv_heads, tensor=tensor)
    (message,) = [r.message for r in caplog.records if "attention over context" in r.message]
    assert message.startswith(f"attention over context runs as {chosen}: {kv_heads} key heads ")
