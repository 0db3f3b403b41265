"""Causal attention of a decoder: grouped heads, windows, caps of the scores, and rows that hold
several sequences.

    score[t, s] = q[t] . k[s] scale,    s <= t,  t - s < window,  segment[t] = segment[s]
    cap         : score -> cap tanh(score / cap)          Gemma 2

It is `jax.nn.dot_product_attention`, by cuDNN where that serves; only scores with a cap, which that
has not, are computed here. A window that is the same in all layers is static, so that cuDNN leaves
out what it hides; one that differs from layer to layer is an array, and becomes a mask, as segments
do.

JAX says which dtypes and head dims cuDNN takes. Whether the installed cuDNN has a kernel for a
combination of them with a mask it tells only when it compiles one, and an error then ends the whole
program. So on a GPU a small attention of the same kind is compiled first, once, and where cuDNN
refuses it XLA's form is taken.
"""

import concurrent.futures
import dataclasses
import functools
import logging
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, target_of
from zerojax.chips import chip_of

Implementation = Literal["auto", "xla", "cudnn"]
IMPLEMENTATIONS = ("auto", "xla", "cudnn")
_PROBE_LENGTH = 128
"""Tokens of the attention that is compiled to ask cuDNN, or fewer where the program has fewer."""
logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What decides whether cuDNN has a kernel for an attention.

    Attributes:
      dtype: of queries, keys and values.
      length: tokens of a row.
      heads: of the queries.
      kv_heads: of keys and values.
      width: of a head.
      window: the last so many tokens are seen; None: all.
      has_mask: whether a mask hides more than what causality and the window do.
      has_cap: whether scores have a cap.
    """

    dtype: Any
    length: int
    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    has_mask: bool = False
    has_cap: bool = False


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    cap: float | None = None,
    window: int | jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Return attention's outputs [B, T, heads, D].

    Args:
      q: [B, T, heads, D].
      k: [B, T, kv_heads, D]; kv_heads divides heads.
      v: as k.
      scale: of the scores.
      cap: of the scores, or None.
      window: the last so many tokens are seen, the token itself among them; None: all. An array
        i32[]: 0 for all.
      segment_ids: integers [B, T]: tokens see those of their own number alone. None: all.
      implementation: "xla", "cudnn", or "auto": cuDNN's where it serves, which is logged.

    Raises:
      ValueError: cuDNN's is named, and does not serve.
    """
    mask = _mask(q.shape[1], None if isinstance(window, int) else window, segment_ids)
    static_window = window if isinstance(window, int) else None
    kind = Kind(
        dtype=q.dtype,
        length=q.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        width=q.shape[3],
        window=static_window,
        has_mask=mask is not None,
        has_cap=cap is not None,
    )
    uses_cudnn = implementation != "xla" and takes_cudnn(
        kind, target_of(q), implementation == "cudnn"
    )
    if cap is not None:
        at = jnp.arange(q.shape[1])
        seen = (at[:, None] >= at)[None, None]
        if static_window is not None:
            seen &= at[:, None] - at < static_window
        return _capped(q, k, v, scale, cap, seen if mask is None else seen & mask)
    local = None if static_window is None else (static_window - 1, 0)
    options: dict[str, Any] = {
        "mask": mask,
        "scale": scale,
        "is_causal": True,
        "local_window_size": local,
    }
    if uses_cudnn:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)

    return _by_xla(q, k, v, **options)


def attend_to_cache(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    cap: float | None = None,
    window: int | jax.Array | None = None,
) -> jax.Array:
    """Return attention's outputs [B, T, heads, D] to keys and values of this and earlier tokens.

    Args:
      q: [B, T, heads, D].
      k: [B, S, kv_heads, D], in which slot s holds the token at position s of its row.
      v: as k.
      positions: i32[B, T], of the queries; slots behind them are not read.
      scale: of the scores.
      cap: of the scores, or None.
      window: as of `attend`.
    """
    behind = positions[:, None, :, None] - jnp.arange(k.shape[1])  # [B, 1, T, S]
    seen = behind >= 0
    if window is not None:
        seen &= (window == 0) | (behind < window)
    return (
        _by_xla(q, k, v, mask=seen, scale=scale)
        if cap is None
        else _capped(q, k, v, scale, cap, seen)
    )


def _by_xla(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    def run(*qkv: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*qkv, implementation="xla", **options)

    if q.dtype != jnp.float16:
        return run(q, k, v)
    return jax.lax.platform_dependent(q, k, v, cpu=_widened(run), default=run)


def _widened(run: Any) -> Any:
    """Return attention in float32 of float16: XLA on CPU lacks its products in float16."""
    return lambda q, k, v: run(*(a.astype(jnp.float32) for a in (q, k, v))).astype(q.dtype)


def _mask(length: int, window: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array | None:
    """Return what of a causal square is seen, bool[B or 1, 1, T, T], or None for all."""
    mask = None
    if window is not None:
        at = jnp.arange(length)
        mask = ((window == 0) | (at[:, None] - at[None, :] < window))[None, None]
    if segment_ids is not None:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        mask = same if mask is None else mask & same
    return mask


def _capped(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, cap: float, seen: jax.Array
) -> jax.Array:
    """Return attention whose scores have a cap; scores and softmax in float32, as in
    `jax.nn.dot_product_attention`.

    `seen` is bool[B or 1, 1, T, S].
    """
    batch, length, heads, width = q.shape
    groups = q.reshape(batch, length, k.shape[2], -1, width)  # [B, T, K, heads / K, D]

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * scale
        scores = cap * jnp.tanh(scores / cap)
        weights = jax.nn.softmax(
            jnp.where(seen[:, :, None], scores, -0.7 * jnp.finfo(jnp.float32).max), axis=-1
        )
        return jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)

    if q.dtype == jnp.float16:
        out = jax.lax.platform_dependent(groups, k, v, cpu=_widened(run), default=run)
    else:
        out = run(groups, k, v)
    return out.reshape(batch, length, heads, width)


@functools.cache
def takes_cudnn(kind: Kind, target: Target, is_named: bool) -> bool:
    """Tell whether a program for a device takes cuDNN's attention, and log it, once.

    Raises:
      ValueError: it is named, and does not serve.
    """
    reason = _unsupported(kind, target)
    if reason is None and (device := _device_of(target)) is not None:
        reason = cudnn_refusal(
            dataclasses.replace(kind, length=min(kind.length, _PROBE_LENGTH)), device
        )
    if is_named and reason is not None:
        raise ValueError(f"attention='cudnn' does not serve: {reason}; choose auto or xla")
    _log_choice(reason)
    return reason is None


def _unsupported(kind: Kind, target: Target) -> str | None:
    """Return why cuDNN's attention takes no such arguments on a device, or None."""
    chip = chip_of(target.kind)
    widest = 256 if target.is_hopper or (chip is not None and chip.capability >= (9, 0)) else 128
    if target.platform != "gpu" or not target.kind.startswith("NVIDIA"):
        return f"it is for NVIDIA GPUs, and the program for {target.platform} {target.kind!r}"
    if kind.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {kind.dtype}"
    if kind.width % 8 or kind.width > widest:
        return (
            f"it takes heads of at most {widest} on {target.kind} in steps of 8, not {kind.width}"
        )
    if kind.has_cap:
        return "it has no cap of the scores, as Gemma 2 has"
    return None


def _device_of(target: Target) -> Any | None:
    """Return a device of this process that is the target, or None where the program is for one that
    is not there.
    """
    if jax.default_backend() != "gpu":
        return None
    return next(
        (device for device in jax.local_devices() if device.device_kind == target.kind), None
    )


@functools.cache
def cudnn_refusal(kind: Kind, device: Any) -> str | None:
    """Compile cuDNN's attention and its gradient on a device; returns why it cannot be, or None.

    Takes about a second, once for each kind of attention. Nothing runs.
    """
    at = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = kind.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

    queries = array(1, kind.length, kind.heads, kind.width)
    keys = array(1, kind.length, kind.kv_heads, kind.width)
    mask = array(1, 1, kind.length, kind.length, dtype=jnp.bool_) if kind.has_mask else None
    local = None if kind.window is None else (kind.window - 1, 0)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
        options: dict[str, Any] = {"mask": mask, "is_causal": True, "local_window_size": local}
        return (
            jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
            .astype(jnp.float32)
            .sum()
        )

    def compile_both() -> None:
        jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(queries, keys, keys, mask).compile()

    try:
        # A thread of its own: this one traces a program, perhaps under a mesh.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(compile_both).result()
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
    ) as error:  # of JAX's checks, of loading cuDNN, of its compiler
        return f"it refused a small one of the same kind: {' '.join(str(error).split())[:300]}"
    return None


@functools.cache  # once
def _log_choice(reason: str | None) -> None:
    logger.info("attention runs as %s", "cudnn" if reason is None else f"xla (not cudnn: {reason})")
