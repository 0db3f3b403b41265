"""`zj.attention`: what it takes, which method exchanges tokens, and what is refused.

A mesh with `context` splits the tokens of a sequence, and attention is the one operation of a
decoder that sees tokens of other devices. Three methods exchange them:

    ulysses   heads are split in place of tokens, by all_to_all     `zerojax.context.ulysses`
    ring      keys and values go around, by permutes                `zerojax.context.ring`
    gather    keys and values are gathered                          `zerojax.context.gathered`

Without `context`, and inside of a shard_map over it, the arrays are one device's, and attention
runs there as a whole (`zerojax.context.local`).
"""

import dataclasses
import functools
import logging
import math
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import find_target
from zerojax.context.call import Call, Operands, vary, varying_over
from zerojax.context.cudnn import cudnn_attention, find_fault
from zerojax.context.derivative import attend
from zerojax.context.scores import Scores
from zerojax.sharding import CONTEXT, TENSOR, batch_axes, check_automatic, context_size
from zerojax.user_values import as_integer, as_number, positive_number, shown

Array = jax.Array
Method = Literal["ulysses", "ring", "gather"]
METHODS = ("ulysses", "ring", "gather")
_IMPLEMENTATIONS = (None, "xla", "cudnn")
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
logger = logging.getLogger("zerojax")


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    segment_ids: Array | None = None,
    scale: float | None = None,
    window: int | Array | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
    method: Method | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    block: int = 512,
) -> Array:
    """Return attention's outputs [B, T, N, D], over a sequence that `context` may split.

        o = zj.attention(q, k, v, segment_ids=batch["segment_ids"])

    Scores are never held in full: blocks of queries meet blocks of keys with a running softmax, as
    in FlashAttention-2 (arXiv:2307.08691), in forward and in backward. On a mesh whose axis
    `context` has c devices, each of them computes the outputs of its T / c tokens:

        ulysses   q[B, T_context, N, D] -> q[B, T, N_context, D], as k and v, and o back: 4
                  all_to_alls, and 5 in backward (arXiv:2309.14509). Needs heads that divide; key
                  heads are repeated as often as that takes.
        ring      k, v and segment_ids go around in c - 1 permutes each, while devices compute
                  (arXiv:2310.01889); in backward their gradients follow. Causal: in zigzag order,
                  so that all devices do equal work; the model sees tokens in order.
        gather    k, v[B, T_context, K, D] -> [B, T, K, D], and their gradients scattered. For
                  windows much shorter than T / c.

    The mesh is the one in scope, which in a train step is the program's. Inside of a
    `jax.shard_map` over `context`, the arrays are one device's and nothing is exchanged. The
    derivative keeps o, log-sum-exp, and q, k and v as the method laid them out, so backward does
    not repeat forward's exchange with activations="save" or "selective"; "remat" does.

    Args:
      q: queries [B, T, N, D]: float32, bfloat16 or float16.
      k: keys [B, T, K, D] in q's dtype; K divides N, and each key head serves N / K query heads.
      v: values, like the keys.
      causal: whether a query sees only its own and earlier keys.
      segment_ids: integers [B, T]; tokens see only tokens with the same number. None: all.
      scale: factor of the scores, a number of Python; None: 1 / sqrt(D).
      window: number of latest keys that a query sees, including its own; None: all. As an array
        i32[], 0 means all.
      cap: soft cap of the scores, cap tanh(score / cap), a number of Python; or None.
      sinks: one more score of each head's softmax [N], floating, whose value is 0; or None.
      method: how devices exchange tokens; None: "ulysses" if K divides by tensor x context, else
        "ring". The choice is logged.
      implementation: "xla" or None: blocks, as described. "cudnn": cuDNN's kernel on each device,
        for one device or "ulysses", without caps, segment ids or an array as window.
      block: largest number of queries and of keys of a block; scores take 4 B N block^2 bytes,
        with N the query heads of a device.

    Raises:
      ValueError: shapes, dtypes or options do not fit, tokens or heads do not divide by the mesh,
        or the mesh has explicit axes.
      NotImplementedError: cuDNN's kernel does not support this call, or `context` splits the
        tokens and there are sinks.
    """
    _check_shapes(q, k, v, segment_ids)
    _check_options(causal, window, method, implementation, block)
    if scale is not None:
        scale = _as_scale(scale)
    if cap is not None:
        cap = positive_number("attention: cap", cap, ", or None")
    place = _Place.find(q.shape[0])
    if place.size == 1:
        chosen = "local"
    else:
        chosen = method or _choose(k.shape[2], place)
        _check_divides(q, chosen, causal, place)
    if sinks is not None:
        _check_sinks(q, sinks, chosen)
    if implementation == "cudnn":
        _check_cudnn(q, chosen, cap, segment_ids, window, sinks)
    is_array = isinstance(window, jax.Array)
    scores = Scores(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        window=None if window is None or is_array else int(window),
        cap=cap,
    )
    if chosen == "local" and implementation == "cudnn":
        return cudnn_attention(scores, q, k, v)  # it has a derivative of its own
    is_divided = k.shape[2] % place.tensor == 0
    repeats = 1
    if chosen == "ulysses":
        repeats = _count_repeats(q.shape[2], k.shape[2], place.tensor * place.size)
        if not is_divided:
            # Here and not in the island, in which `tensor` has already split the heads.
            k, v = (jnp.repeat(a, repeats, 2) for a in (k, v))
            is_divided, repeats = True, 1
    call = Call(
        scores=scores,
        method=chosen,
        kernel="cudnn" if implementation == "cudnn" else "xla",
        block=block,
        mesh=place.mesh,
        rows=place.rows,
        size=place.size,
        tensor=place.tensor,
        names_tensor=place.has_tensor and is_divided,
        repeats=repeats,
    )
    if segment_ids is not None:
        segment_ids = segment_ids.astype(jnp.int32)
    operands = Operands(q, k, v, segment_ids, window.astype(jnp.int32) if is_array else None)
    with jax.named_scope("attention"):  # the name of what it keeps, in `program.kept`
        axes = varying_over((operands, sinks))
        return attend(call, vary(operands, axes), vary(sinks, axes))


@dataclasses.dataclass(frozen=True)
class _Place:
    """The mesh in scope, as far as attention is concerned.

    Attributes:
      mesh: the mesh; None on one device.
      rows: axes that split the batch; none if it does not divide by their devices.
      size: number of devices along `context`; 1 inside of a shard_map over it.
      tensor: number of devices along `tensor`; 1 inside of a shard_map over it.
      has_tensor: whether islands may name `tensor`.
    """

    mesh: Any = None
    rows: tuple[str, ...] = ()
    size: int = 1
    tensor: int = 1
    has_tensor: bool = False

    @classmethod
    def find(cls, batch: int) -> Self:
        """Return the place of an attention over a batch of this size.

        Raises:
          ValueError: the mesh has explicit axes.
        """
        mesh = jax.sharding.get_abstract_mesh()
        manual = set[str](getattr(mesh, "manual_axes", ()))
        if mesh.empty or CONTEXT in manual or context_size(mesh) == 1:
            return cls()
        check_automatic("attention", mesh)
        rows = tuple(axis for axis in batch_axes(mesh) if axis not in manual)
        is_split = batch % math.prod(mesh.shape[axis] for axis in rows) == 0
        has_tensor = TENSOR in mesh.axis_names and TENSOR not in manual
        return cls(
            mesh=mesh,
            rows=rows if is_split else (),
            size=context_size(mesh),
            tensor=mesh.shape[TENSOR] if has_tensor else 1,
            has_tensor=has_tensor,
        )


def _choose(kv_heads: int, place: _Place) -> str:
    """Return the method for these key heads, and log it."""
    shards = f"tensor={place.tensor} x context={place.size}"
    if kv_heads % (place.tensor * place.size) == 0:
        _log_choice("ulysses", f"{kv_heads} key heads divide by {shards}")
        return "ulysses"
    _log_choice("ring", f"{kv_heads} key heads do not divide by {shards}")
    return "ring"


@functools.cache  # logs each choice once
def _log_choice(method: str, reason: str) -> None:
    logger.info("attention over context runs as %s: %s", method, reason)


def _count_repeats(heads: int, kv_heads: int, shards: int) -> int:
    """Return how often key heads are repeated, so that they divide by the shards."""
    groups = heads // kv_heads
    counts = [n for n in range(1, groups + 1) if groups % n == 0 and kv_heads * n % shards == 0]
    return counts[0]


def _as_scale(scale: Any) -> float:
    """Return a scale as a `float`.

    Raises:
      ValueError: it is not a finite number, or not known when the program is traced.
    """
    number = as_number(scale)
    if number is None:
        raise ValueError(
            f"attention: scale={shown(scale)}: a finite number of Python is needed, or None for "
            "1 / sqrt(D): to scale by an array, multiply q by it and pass scale=1.0"
        )
    return number


def _check_shapes(q: Array, k: Array, v: Array, segment_ids: Array | None) -> None:
    """Raise ValueError unless q, k, v and segment ids are arrays that fit together."""
    arrays = {"q": q, "k": k, "v": v}
    if segment_ids is not None:
        arrays["segment_ids"] = segment_ids
    for name, a in arrays.items():
        if not hasattr(a, "shape") or not hasattr(a, "dtype"):
            raise ValueError(
                f"attention: {name} must be an array, got {type(a).__name__}: pass "
                f"jnp.asarray({name})"
            )
    shapes = f"q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)}"
    if (
        q.ndim != 4
        or k.shape != v.shape
        or q.shape[:2] != k.shape[:2]
        or q.shape[3:] != k.shape[3:]
    ):
        raise ValueError(f"attention needs q[B, T, N, D] and k, v[B, T, K, D], got {shapes}")
    if 0 in q.shape or 0 in k.shape or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention needs a number N of query heads that is a multiple of K, the number of key "
            f"heads, and no empty dim, got {shapes}"
        )
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            "attention needs q, k and v of one dtype, float32, bfloat16 or float16, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}: cast them"
        )
    if segment_ids is None:
        return
    if segment_ids.shape != q.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"attention needs integer segment_ids{list(q.shape[:2])}, one for each token, got "
            f"{segment_ids.dtype}{list(segment_ids.shape)}"
        )


def _check_options(
    causal: bool,
    window: int | Array | None,
    method: str | None,
    implementation: str | None,
    block: int,
) -> None:
    """Raise ValueError for options that are unknown or do not fit together."""
    if method is not None and method not in METHODS:
        raise ValueError(
            f"attention: method={method!r} is unknown: choose from {', '.join(METHODS)}, or None"
        )
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attention: implementation={implementation!r} is unknown: choose from xla, cudnn, or "
            "None"
        )
    if window is not None and not causal:
        raise ValueError(
            "attention: window counts the latest keys, and causal=False has no latest ones: leave "
            "out window, or set causal=True"
        )
    if isinstance(window, jax.Array):
        if window.shape or not jnp.issubdtype(window.dtype, jnp.integer):
            raise ValueError(
                f"attention: a window that is an array is an integer scalar, got "
                f"{window.dtype}{list(window.shape)}"
            )
    elif window is not None and (as_integer(window) or 0) < 1:
        raise ValueError(
            f"attention: window={window!r} is not a number of keys: an integer of at least 1 is "
            "needed, or None for all"
        )
    if (as_integer(block) or 0) < 1:
        raise ValueError(f"attention: block={block!r} must be an integer of at least 1")


def _check_divides(q: Array, method: str, causal: bool, place: _Place) -> None:
    """Raise ValueError unless tokens and heads divide by the mesh as a method needs it."""
    tokens, heads = q.shape[1:3]
    size = place.size
    tensor = place.tensor
    is_zigzag = method == "ring" and causal
    shards = 2 * size if is_zigzag else size
    if tokens % shards:
        why = (
            f"2 x context={size}, since a causal ring" if is_zigzag else f"context={size}, since it"
        )
        noun = "token does" if tokens == 1 else "tokens do"
        raise ValueError(
            f"attention: {tokens} {noun} not divide by {why} splits them in {shards}: pad the "
            f"sequences to {-(-tokens // shards) * shards}"
        )
    if method == "ulysses" and heads % (tensor * size):
        largest = math.gcd(heads // tensor, size) if heads % tensor == 0 else 1
        other = f", or context={largest}" if largest > 1 else ""
        noun = "head does" if heads == 1 else "heads do"
        raise ValueError(
            f"attention: method='ulysses' splits heads, and {heads} {noun} not divide by "
            f"tensor={tensor} x context={size}: use method='ring'{other}"
        )


def _check_sinks(q: Array, sinks: Array, method: str) -> None:
    """Raise an error unless sinks fit the heads, and one device holds the sequence."""
    if sinks.shape != (q.shape[2],) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"attention needs floating sinks[{q.shape[2]}], one for each query head, got "
            f"{sinks.dtype}{list(sinks.shape)}"
        )
    if method != "local":
        raise NotImplementedError(
            "attention: sinks are not built for a sequence that context splits: use context=1"
        )


def _check_cudnn(
    q: Array,
    method: str,
    cap: float | None,
    segment_ids: Array | None,
    window: Any,
    sinks: Array | None,
) -> None:
    """Raise NotImplementedError unless cuDNN's kernel supports a call."""
    fault = find_fault(q.dtype, q.shape[3], cap is not None, find_target(q))
    if fault is None and sinks is not None:
        fault = "it has no sinks"
    if fault is None and segment_ids is not None:
        fault = "it takes segments only as a mask of T x T elements"
    if fault is None and isinstance(window, jax.Array):
        fault = "it takes a window only as a Python integer"
    if fault is None and method in ("ring", "gather"):
        fault = f"it is not built for method={method!r}: use method='ulysses'"
    if fault is not None:
        raise NotImplementedError(
            f"attention: implementation='cudnn' cannot be used: {fault}; otherwise leave "
            "implementation out"
        )
