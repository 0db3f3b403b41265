"""cuDNN's attention on each device: what it supports, its forward and its derivative."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from zerojax.chips import find_chip
from zerojax.context.scores import Scores

Array = jax.Array


def find_fault(dtype: Any, width: int, has_cap: bool, target: Target) -> str | None:
    """Return why cuDNN's attention does not support such arguments on a device, or None.

    Args:
      dtype: dtype of queries, keys and values.
      width: width of a head.
      has_cap: whether scores are capped.
      target: the device.
    """
    chip = find_chip(target.kind)
    widest = 256 if target.is_hopper or (chip is not None and chip.capability >= (9, 0)) else 128
    if target.platform != "gpu" or not target.kind.startswith("NVIDIA"):
        return f"it is for NVIDIA GPUs, but the program is for {target.platform} {target.kind!r}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {dtype}"
    if width % 8 or width > widest:
        return f"it takes heads of at most {widest} on {target.kind} in steps of 8, not {width}"
    if has_cap:
        return "it cannot cap scores, which Gemma 2 needs"
    return None


def cudnn_forward(scores: Scores, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return attention's outputs [B, T, N, D] and log-sum-exp f32[B, T, N]."""
    o, lse = cudnn_attention(scores, q, k, v, return_residual=True)
    return o, lse.astype(jnp.float32)


def cudnn_backward(
    scores: Scores, q: Array, k: Array, v: Array, do: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values.

    JAX offers cuDNN's backward only with its forward, which therefore runs again, on one device.
    """
    return jax.vjp(lambda *qkv: cudnn_attention(scores, *qkv), q, k, v)[1](do)


def cudnn_attention(scores: Scores, q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Return cuDNN's attention, which has a derivative of its own."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scores.scale,
        is_causal=scores.causal,
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation="cudnn",
        **options,
    )
