"""Cross entropy of a linear head without its logits: `linear_cross_entropy`.

The logits `x[T, D] @ w[D, V]` of a large vocabulary are the largest array of a language model: at
16K tokens and 128K words, 8 GiB in float32, compared with 128 MiB for x. Here they exist one tile
at a time, in the forward pass and again in backward.

Comparison with existing implementations (optax 0.2.8; tokamax, Liger-Kernel and torch of 2026):

- optax holds `[T, V]` and differentiates the logits. Labels are ignored by `where`; there are no
  options and no reduction; devices are left to the partitioner.
- tokamax has chunked XLA, Mosaic and Triton implementations. Backward starts from log-sum-exps, on
  GPUs with float32 copies; dw is summed in float32 or in the dtype of w; dims that tiles do not
  divide need a padded copy of w. It has no ignored labels, no options and no splitting over
  devices. The reduction is sum (default) or mean.
- Liger (torch has its options) has tiles of tokens and any T, and computes gradients in forward. dw
  is summed in the dtype of w, unless asked otherwise. It has `ignore_index=-100`,
  `label_smoothing`, `lse_square_scale` and `softcap`, the reductions mean (default), sum and none,
  and no splitting over devices.
- Here there are tiles of both tokens and vocabulary, on Hopper in registers. Backward starts from
  log-sum-exps, and dw is summed in float32 and rounded once. Any dims work; the kernels copy unless
  64 divides D, V and 8 T. It has negative labels and `ignore_index`, `label_smoothing`, `z_loss`
  and `softcap`, and the reductions mean (default), sum and none. Over devices the vocabulary is
  split, and w is gathered by tiles.

Argument names follow torch and Liger, except `z_loss`, which PaLM, T5X and MaxText use. As in torch
and Liger, the mean is over the labels that count. If no label counts, the loss is 0 with gradient
0, where torch returns NaN: a batch of padding then does not disturb a run.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from pallas_kernels.dispatch import Implementation, find_target, resolve
from pallas_kernels.linear_cross_entropy import mosaic, reference, vjp
from pallas_kernels.linear_cross_entropy.config import Config as Config
from pallas_kernels.linear_cross_entropy.kernel_config import KernelConfig as KernelConfig
from pallas_kernels.linear_cross_entropy.reference import Form
from pallas_kernels.linear_cross_entropy.split import Split as Split
from pallas_kernels.varying import vary_alike

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
REDUCTIONS = ("mean", "sum", "none")
_LEAST_CAST = 127
"""Negative labels from -128 to -1, such as -1 and -100, may have been cast to an unsigned dtype."""
UNMEASURED = "no measurement on a GPU says yet that it is faster"


def linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: Any,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    check_labels: bool = False,
    num_tiles: int | None = None,
    implementation: Implementation | None = None,
    split: Split | None = None,
    config: Config | KernelConfig | None = None,
) -> jax.Array:
    """Return the cross entropy of `x[..., D] @ w[D, V]` with `labels[...]`, in nats and float32.

    Differentiable in x and w. Products are in the inputs' dtype and summed in float32; each
    gradient is summed in float32 and rounded once to its dtype. Temporary arrays take about a
    twentieth of the logits' bytes (see `Config`), or 512 D bytes per core with Hopper's kernels.
    Backward recomputes the logits: forward and backward take 4 or 5 products instead of 3.

    A label >= V makes the loss and the gradients NaN in every mode. The function works under jit,
    vmap, scan, `jax.checkpoint` and first-order reverse-mode differentiation.

    Args:
      x: activations `[..., D]`: float32, bfloat16 or float16.
      w: weight of the head, `[D, V]`, in x's dtype.
      labels: integers below V, as an array or a list. A token with a negative label is ignored: its
        loss and gradient are 0. Unsigned dtypes have no negative numbers: a -1 that was cast to
        uint32 is above V and gives NaN; uint8 and uint16 are refused if V is so large that a cast
        -1 would be a valid label.
      reduction: "mean" over the labels that count (0 if none does), "sum", or "none" for losses of
        the shape of `labels`.
      ignore_index: one more label to ignore, such as the label of padding.
      label_smoothing: fraction of a label that is spread evenly over the vocabulary, 0 to 1.
      z_loss: factor of lse^2 in each token's loss; 1e-4 is usual.
      softcap: bound c of the logits, which become `c * tanh(logits / c)`; None for no cap.
      check_labels: whether labels >= V raise ValueError. Under jit the labels are not known: there
        the error is reported through `jax.experimental.checkify`, whose `err.throw()` raises it.
        Without `checkify` only the NaN shows the error, because a callback that raised would leave
        other devices waiting in a collective.
      num_tiles: number of tiles of each device's part of the vocabulary; None chooses it by memory.
      implementation: "mosaic" (the Hopper kernel in forward, for 16-bit dtypes and an unsharded w;
        backward uses XLA's loops unless `KernelConfig(backward=True)` asks for the kernels), "xla"
        (in tiles), "reference" (full logits in float32), or None to choose and log one.
      split: how the arrays are split over a mesh. None if they are not split, or if the call is
        inside a `jax.shard_map` with an unsharded w.
      config: sizes of the tiles on one device: a `KernelConfig` for the kernels or a `Config` for
        XLA's loops. None chooses them. Cannot be combined with `num_tiles`.

    Raises:
      ValueError: dims, dtypes or options do not fit, or labels are out of range (see `labels` and
        `check_labels`).
      NotImplementedError: the named implementation does not support this call, or the kernels are
        under `jax.vmap` in jax 0.10, which cannot batch a kernel.
    """
    x = jnp.asarray(x)
    w = jnp.asarray(w)
    if not isinstance(labels, jax.Array) or (check_labels and _is_known(labels)):
        labels = np.asarray(labels)  # a NumPy array stays concrete while a program is traced
    _check_arrays(x, w, labels)
    vocab = w.shape[1]
    _check_options(reduction, label_smoothing, z_loss, softcap)
    _check_tiles(num_tiles, config, vocab, implementation)
    if jnp.iinfo(labels.dtype).bits < 32:
        labels = labels.astype(np.int32)  # V may exceed the range of such a dtype
    is_counted = labels >= 0
    if ignore_index is not None:
        is_counted = is_counted & (labels != ignore_index)
    is_too_large = is_counted & (labels >= vocab)
    if check_labels:
        _check_range(is_too_large, labels, vocab)
    cap = None if softcap is None else float(softcap)
    form = Form(vocab, float(label_smoothing), float(z_loss), cap)
    chosen, kernel = _choose(x, w, implementation, split, num_tiles, config)

    rows = x.reshape(-1, x.shape[-1])
    # -1 marks every ignored label. Labels >= V become V, which matches no column, and NaN replaces
    # their loss: cast to int32 they might be negative and would be ignored instead.
    in_range = jnp.where(is_too_large, vocab, labels).astype(jnp.int32)
    targets = jnp.where(is_counted, in_range, -1).reshape(-1)
    losses: Any
    if chosen == "reference":
        losses = reference.losses(form, rows, w, targets)
    else:
        if split is not None:
            split.check(rows.shape[0], rows.shape[1], vocab)
        tiles = config if isinstance(config, Config) else None
        call = vjp.Call(form, tiles, num_tiles, split, kernel)
        losses = vjp.losses(call, *vary_alike((rows, w, targets)))
    # A factor, so that the gradients are NaN too.
    losses = jnp.reshape(losses, labels.shape) * jnp.where(is_too_large, jnp.nan, 1)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / jnp.maximum(is_counted.sum(), 1)


def _choose(
    x: jax.Array,
    w: jax.Array,
    implementation: Implementation | None,
    split: Split | None,
    num_tiles: int | None,
    config: Config | KernelConfig | None,
) -> tuple[Implementation, KernelConfig | None]:
    """Return the implementation that runs, and the sizes of its kernels, or None."""
    target = find_target(x, w)
    refusals: dict[Implementation, str | None] = {
        "mosaic": mosaic.refusal(x.dtype, target, split, num_tiles),
        "xla": None,
        "reference": None,
    }
    if split is not None:
        refusals["reference"] = "its logits are left to the partitioner, so it takes no split"
    chosen = resolve("linear_cross_entropy", implementation, refusals, {"mosaic": UNMEASURED})
    if chosen != "mosaic":
        return chosen, None
    kernel = config if isinstance(config, KernelConfig) else KernelConfig()
    num_cores = kernel.num_cores or target.num_cores
    return chosen, dataclasses.replace(kernel, num_cores=num_cores)


def _check_range(is_too_large: Any, labels: Any, vocab: int) -> None:
    """Raise, now or under checkify, if labels are out of range."""
    message = (
        f"{{count}} of {math.prod(labels.shape)} labels are not below V={vocab}; the largest is "
        "{largest}"
    )
    if isinstance(labels, Tracer):
        checkify.debug_check(
            ~is_too_large.any(),
            f"linear_cross_entropy: {message}",
            count=is_too_large.sum(),
            largest=labels.max(),
        )
    # Labels partly held by other processes are neither traced nor known: only the NaN reports them.
    elif isinstance(is_too_large, np.ndarray | np.generic) and is_too_large.any():
        raise _refusal(message.format(count=is_too_large.sum(), largest=labels.max()))


def _is_known(labels: jax.Array) -> bool:
    return not isinstance(labels, Tracer) and labels.is_fully_addressable


def _check_arrays(x: Any, w: Any, labels: Any) -> None:
    names = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
    shapes = f"x is {list(x.shape)} and w {list(w.shape)}"
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        raise _refusal(
            f"x is {x.dtype} and w {w.dtype}: one dtype of {names} is needed; cast one of them"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise _refusal(
            f"labels are {labels.dtype}: integers, which index the vocabulary, are needed"
        )
    bounds = jnp.iinfo(labels.dtype)
    if bounds.min == 0 and bounds.max - _LEAST_CAST < w.shape[-1]:
        raise _refusal(
            f"labels are {labels.dtype}, which holds no negative number: a -1 that was cast to it "
            f"is {bounds.max}, which may be a valid label for V={w.shape[-1]}. Convert the "
            "original labels to int32"
        )
    if w.ndim != 2 or not x.ndim or x.shape[-1] != w.shape[0]:
        raise _refusal(f"{shapes}: x[..., D] and w[D, V] are needed; transpose an embedding[V, D]")
    if labels.shape != x.shape[:-1]:
        raise _refusal(
            f"labels are {list(labels.shape)} and {shapes}: one label per token, "
            f"{list(x.shape[:-1])}, is needed"
        )
    if not x.size or not w.size:
        raise _refusal(f"{shapes}: at least one token, one dim and one column are needed")


def _check_options(
    reduction: str, label_smoothing: float, z_loss: float, softcap: float | None
) -> None:
    if reduction not in REDUCTIONS:
        raise _refusal(f"reduction={reduction!r} is unknown: choose from {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise _refusal(
            f"label_smoothing={label_smoothing}: a fraction of a label, 0 to 1, is needed"
        )
    if not 0 <= z_loss < math.inf:
        raise _refusal(f"z_loss={z_loss}: a factor of 0 or more is needed")
    if softcap is not None and not 0 < softcap < math.inf:
        raise _refusal(f"softcap={softcap}: a bound above 0 is needed, or None for no cap")


def _check_tiles(
    num_tiles: int | None,
    config: Config | KernelConfig | None,
    vocab: int,
    implementation: Implementation | None,
) -> None:
    if isinstance(config, KernelConfig) and implementation != "mosaic":
        raise _refusal(
            f"{config} is for the kernels, but implementation={implementation!r}: set "
            "implementation='mosaic'"
        )
    if isinstance(config, Config) and implementation == "mosaic":
        raise _refusal(
            f"{config} is for XLA's loops, but implementation='mosaic': pass a KernelConfig or None"
        )
    if num_tiles is None:
        return
    if config is not None:
        raise _refusal(
            f"num_tiles={num_tiles} and {config} both set the tiles: pass only one of them"
        )
    if isinstance(num_tiles, bool) or not isinstance(num_tiles, int) or not 1 <= num_tiles <= vocab:
        raise _refusal(f"num_tiles={num_tiles!r}: 1 to V={vocab} is needed, or None to choose it")


def _refusal(reason: str) -> ValueError:
    return ValueError(f"linear_cross_entropy: {reason}")
