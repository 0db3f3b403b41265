"""Causal attention of a decoder, with grouped heads, windows, score caps and packed sequences.

    score[t, s] = q[t] . k[s] scale,    s <= t,  t - s < window,  segment[t] = segment[s]
    cap         : score -> cap tanh(score / cap)          Gemma 2
    sinks       : the softmax has one more score per head, whose value is 0        gpt-oss

This is `jax.nn.dot_product_attention`, implemented by cuDNN if supported. Only capped scores and
sinks, which that function lacks, are computed here. A window that is the same in all layers is
static, so cuDNN can skip what it hides. A window that differs between layers is an array and
becomes a mask, as segments do.

JAX knows which dtypes and head dims cuDNN supports. Whether the installed cuDNN has a kernel for a
given combination with a mask only shows when it is compiled, and an error then aborts the full
program. So on a GPU, a small attention of the same kind is compiled once beforehand, and if cuDNN
refuses it, the XLA implementation is used.

On a mesh with `context`, which splits the tokens of a row, it is `zerojax.attention`, which never
holds the scores [T, T] in full. For long rows it is that on other meshes too ("blocks").
"""

import concurrent.futures
import dataclasses
import functools
import logging
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, find_target
from zerojax.context import attention, find_fault
from zerojax.sharding import CONTEXT, context_size

Implementation = Literal["auto", "xla", "cudnn", "blocks"]
IMPLEMENTATIONS = ("auto", "xla", "cudnn", "blocks")
_MOST_SCORES = 2**30
"""Maximum size in bytes of a device's scores, or of a mask, that "auto" holds in full."""
_PROBE_LENGTH = 128
"""Maximum number of tokens of the small attention that is compiled to probe cuDNN."""
logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Properties that decide whether cuDNN has a kernel for an attention.

    Attributes:
      dtype: dtype of queries, keys and values.
      length: number of tokens per row.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      width: width of a head.
      window: number of latest tokens that a token attends to, including itself; None: all.
      has_mask: whether there is a mask in addition to causality and the window.
      has_cap: whether scores are capped.
      has_sinks: whether the softmax has one more score per head.
    """

    dtype: Any
    length: int
    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    has_mask: bool = False
    has_cap: bool = False
    has_sinks: bool = False


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    cap: float | None = None,
    window: int | jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Return attention's outputs [B, T, heads, D].

    Args:
      q: queries [B, T, heads, D].
      k: keys [B, T, kv_heads, D]; kv_heads divides heads.
      v: values [B, T, kv_heads, D].
      scale: factor of the scores.
      cap: soft cap of the scores, or None.
      window: number of latest tokens that a token attends to, including itself; None: all. As an
        array i32[], 0 means all.
      segment_ids: integers [B, T]; tokens attend only to tokens with the same number. None: to all.
      sinks: one more score for each head's softmax [heads], or None.
      implementation: "xla", "cudnn", "blocks", or "auto": cuDNN if supported, else "xla" unless
        scores would take more than 1 GiB of a device, else "blocks". The choice is logged. On a
        mesh with `context`, "auto" and "xla" are "blocks".

    Raises:
      ValueError: `implementation` is "cudnn", but cuDNN does not support this attention; or tokens
        do not divide by `context`.
      NotImplementedError: the same for cuDNN on a mesh with `context`; or sinks on that mesh.
    """
    kernel: Literal["cudnn", "xla"] = "cudnn" if implementation == "cudnn" else "xla"
    in_blocks = functools.partial(
        attention,
        q,
        k,
        v,
        segment_ids=segment_ids,
        scale=scale,
        window=window,
        cap=cap,
        sinks=sinks,
        implementation=kernel,
    )
    if _splits_tokens() or implementation == "blocks":
        return in_blocks()
    static_window = window if isinstance(window, int) else None
    is_masked = segment_ids is not None or isinstance(window, jax.Array)
    kind = Kind(
        dtype=q.dtype,
        length=q.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        width=q.shape[3],
        window=static_window,
        has_mask=is_masked,
        has_cap=cap is not None,
        has_sinks=sinks is not None,
    )
    uses_cudnn = implementation != "xla" and takes_cudnn(
        kind, find_target(q), implementation == "cudnn"
    )
    if implementation == "auto" and _is_long(q, uses_cudnn, is_masked):
        _log_blocks(q.shape[1])
        return in_blocks()
    mask = _mask(q.shape[1], None if isinstance(window, int) else window, segment_ids)
    if cap is not None or sinks is not None:
        indices = jnp.arange(q.shape[1])
        visible = (indices[:, None] >= indices)[None, None]
        if static_window is not None:
            visible &= indices[:, None] - indices < static_window
        visible = visible if mask is None else visible & mask
        return _with_scores(q, k, v, scale, cap, visible, sinks)
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
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return attention's outputs [B, T, heads, D] over cached keys and values.

    The cache holds these and earlier tokens.

    Args:
      q: queries [B, T, heads, D].
      k: keys [B, S, kv_heads, D]; slot s holds the token at position s of its row.
      v: values [B, S, kv_heads, D].
      positions: i32[B, T], positions of the queries; later slots are not read.
      scale: factor of the scores.
      cap: soft cap of the scores, or None.
      window: number of latest tokens that a token attends to, including itself, or an array of it
        [B, 1, T, 1]; 0 or None: all.
      sinks: one more score for each head's softmax [heads], or None.
    """
    behind = positions[:, None, :, None] - jnp.arange(k.shape[1])  # [B, 1, T, S]
    visible = behind >= 0
    if window is not None:
        visible &= (window == 0) | (behind < window)
    if cap is None and sinks is None:
        return _by_xla(q, k, v, mask=visible, scale=scale)
    return _with_scores(q, k, v, scale, cap, visible, sinks)


def _splits_tokens() -> bool:
    """Return whether the mesh in scope splits tokens, outside of a shard_map that already did."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and context_size(mesh) > 1 and CONTEXT not in mesh.manual_axes


def _is_long(q: jax.Array, uses_cudnn: bool, is_masked: bool) -> bool:
    """Return whether a device would hold too many scores, or with cuDNN too large a mask."""
    batch, length, heads, _ = q.shape
    num_bytes = batch * length**2 * (is_masked if uses_cudnn else 4 * heads)
    mesh = jax.sharding.get_abstract_mesh()
    manual = getattr(mesh, "manual_axes", ())
    devices = math.prod(size for axis, size in mesh.shape.items() if axis not in manual)
    return num_bytes > devices * _MOST_SCORES


@functools.cache  # logs each length once
def _log_blocks(length: int) -> None:
    logger.info("attention runs in blocks: rows have %d tokens", length)


def _by_xla(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    def run(*qkv: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*qkv, implementation="xla", **options)

    if q.dtype != jnp.float16:
        return run(q, k, v)
    return jax.lax.platform_dependent(q, k, v, cpu=_widened(run), default=run)


def _widened(run: Any) -> Any:
    """Return an attention that computes in float32, because XLA on CPU lacks float16 products."""
    return lambda q, k, v: run(*(a.astype(jnp.float32) for a in (q, k, v))).astype(q.dtype)


def _mask(length: int, window: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array | None:
    """Return the visible part of a causal square, bool[B or 1, 1, T, T], or None for all."""
    mask = None
    if window is not None:
        indices = jnp.arange(length)
        mask = ((window == 0) | (indices[:, None] - indices[None, :] < window))[None, None]
    if segment_ids is not None:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        mask = same if mask is None else mask & same
    return mask


def _with_scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    cap: float | None,
    seen: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:
    """Return attention with capped scores, sinks, or both.

    Scores and softmax are float32, as in `jax.nn.dot_product_attention`. `seen` is
    bool[B or 1, 1, T, S].
    """
    batch, length, heads, width = q.shape
    groups = q.reshape(batch, length, k.shape[2], -1, width)  # [B, T, K, heads / K, D]

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * scale
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        scores = jnp.where(seen[:, :, None], scores, -0.7 * jnp.finfo(jnp.float32).max)
        if sinks is None:
            weights = jax.nn.softmax(scores, axis=-1)
        else:
            of_heads = sinks.astype(jnp.float32).reshape(k.shape[2], -1, 1, 1)  # [K, G, 1, 1]
            more = jnp.broadcast_to(of_heads, (*scores.shape[:-1], 1))
            weights = jax.nn.softmax(jnp.concatenate([scores, more], -1), axis=-1)[..., :-1]
        return jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)

    if q.dtype == jnp.float16:
        out = jax.lax.platform_dependent(groups, k, v, cpu=_widened(run), default=run)
    else:
        out = run(groups, k, v)
    return out.reshape(batch, length, heads, width)


@functools.cache
def takes_cudnn(kind: Kind, target: Target, is_named: bool) -> bool:
    """Return whether a program for a device uses cuDNN's attention, and log the choice once.

    Args:
      kind: properties of the attention.
      target: device that the program is compiled for.
      is_named: whether the user asked for cuDNN.

    Raises:
      ValueError: the user asked for cuDNN, but it does not support this attention.
    """
    reason = _unsupported(kind, target)
    device = None if reason is not None else _find_local_device(target)
    if device is not None:
        probe = dataclasses.replace(kind, length=min(kind.length, _PROBE_LENGTH))
        reason = cudnn_refusal(probe, device)
    if is_named and reason is not None:
        raise ValueError(f"attention='cudnn' cannot be used: {reason}; choose 'auto' or 'xla'")
    _log_choice(reason)
    return reason is None


def _unsupported(kind: Kind, target: Target) -> str | None:
    """Return why cuDNN's attention does not support such arguments on a device, or None."""
    if kind.has_sinks:
        return "it has no sinks"
    return find_fault(kind.dtype, kind.width, kind.has_cap, target)


def _find_local_device(target: Target) -> Any | None:
    """Return a device of this process like the target, or None if it has no such device."""
    if jax.default_backend() != "gpu":
        return None
    return next(
        (device for device in jax.local_devices() if device.device_kind == target.kind), None
    )


@functools.cache
def cudnn_refusal(kind: Kind, device: Any) -> str | None:
    """Compile cuDNN's attention and its gradient on a device; return why it fails, or None.

    Compilation takes about a second, once for each kind of attention. Nothing is run.
    """
    on_device = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = kind.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)

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
        # Use another thread, because this one is tracing a program, perhaps under a mesh.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(compile_both).result()
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
    ) as error:  # from JAX's checks, from loading cuDNN, or from its compiler
        return f"it refused a small test of the same kind: {' '.join(str(error).split())[:300]}"
    return None


@functools.cache  # logs each reason once
def _log_choice(reason: str | None) -> None:
    logger.info("attention runs as %s", "cudnn" if reason is None else f"xla (not cudnn: {reason})")
