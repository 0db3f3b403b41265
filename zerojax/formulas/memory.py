"""Bytes of model states, activations and collectives in closed form.

For P parameters over N shards, in mixed precision with Adam, ZeRO (arXiv:1910.02054, section 5)
counts these bytes per device:

    stage 0   16P            params 2P, grads 2P, optimizer 12P (float32 master 4P, moments 8P)
    stage 1   4P + 12P/N
    stage 2   2P + 14P/N
    stage 3   16P/N

ZeRO-Infinity (arXiv:2104.07857, section 3) counts 20 bytes per parameter, because it also keeps
float32 gradients. `StateBytes` therefore derives the bytes per parameter from the precision and
from the dtype in which gradients are stored, not from a constant.

From forward to backward, a GPT layer saves its input and the outputs of its products
(`zerojax.activations.kept`). In units of s b h bytes, with 2 bytes per element, t tensor-parallel
shards and a heads:

    remat        2
    selective    4 + 16/t    input 2, projection 2, qkv 6/t, attention's output 2/t,
                             hidden layer 8/t
    save         4 + 16/t    as selective, plus float32 scores, 4 a s / (h t); a fused kernel
                             saves the logsumexp of each row instead, 4 a / (h t)
    everything   30 + 56/t   input 2, outputs of both norms 4, the norms' float32 values 24,
                             qkv 6/t, attention's output 2/t, tanh approximation of gelu 48/t;
                             plus scores before and after the softmax, 6 a s / (h t), or the
                             logsumexp of a fused kernel. Dropout masks are not counted.
"""

import dataclasses

import jax.numpy as jnp

from zerojax.activations import MODES
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes per parameter of each kind of model state.

    Attributes:
      params: bytes of the parameter in the compute dtype.
      grads: bytes of its gradient between backward and update.
      master: bytes of its float32 master; 0 if the parameters themselves are float32.
      moments: bytes of its optimizer state; 8 for Adam.
    """

    params: int
    grads: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        """Bytes per parameter if nothing is sharded: 16 for ZeRO, 20 for ZeRO-Infinity."""
        return self.params + self.grads + self.master + self.moments


def state_bytes(
    precision: str = "bf16",
    *,
    moments: int = 8,
    num_microbatches: int = 1,
    keeps_fp32_grads: bool = False,
    reduce_dtype: str | None = None,
    grads_dtype: str | None = None,
) -> StateBytes:
    """Return the bytes per parameter of each kind of model state.

    Args:
      precision: name of a precision in `zerojax.precision.PRECISIONS`.
      moments: bytes of optimizer state per parameter.
      num_microbatches: microbatches per step; with more than one, gradients accumulate in float32.
      keeps_fp32_grads: whether to count float32 gradients in addition to gradients in the compute
        dtype, as ZeRO-Infinity does.
      reduce_dtype: dtype in which gradients are reduced; None is the compute dtype.
      grads_dtype: dtype in which gradients are stored; None is float32 if they are accumulated or
        reduced in float32, else the compute dtype.
    """
    compute_dtype = PRECISIONS[precision].compute_dtype
    params = jnp.dtype(compute_dtype).itemsize
    grads = 4 if num_microbatches > 1 or reduce_dtype == "float32" else params
    if grads_dtype is not None:
        grads = jnp.dtype(grads_dtype).itemsize
    if keeps_fp32_grads:
        grads += 4
    master = 4 if PRECISIONS[precision].has_master else 0
    return StateBytes(params=params, grads=grads, master=master, moments=moments)


def model_state_bytes(
    num_params: int, stage: int, num_shards: int, per_param: StateBytes | None = None
) -> dict[str, float]:
    """Return the bytes of model states per device.

    Args:
      num_params: P, number of parameters.
      stage: ZeRO stage, 0 to 3.
      num_shards: N, the size of the axis `fsdp`.
      per_param: bytes per parameter; mixed precision with Adam (16) by default.

    Returns:
      Bytes by kind: {"params", "grads", "master", "opt_state", "total"}.
    """
    sharded = STAGES[stage]
    per_param = per_param or state_bytes()

    def per_device(num_bytes: int, is_sharded: bool) -> float:
        return num_params * num_bytes / (num_shards if is_sharded else 1)

    kinds = {
        "params": per_device(per_param.params, sharded.params),
        "grads": per_device(per_param.grads, sharded.grads),
        "master": per_device(per_param.master, sharded.opt_state),
        "opt_state": per_device(per_param.moments, sharded.opt_state),
    }
    return kinds | {"total": sum(kinds.values())}


def collective_elements(
    num_params: int,
    stage: int,
    num_shards: int,
    num_microbatches: int = 1,
    num_reductions: int | None = None,
) -> dict[str, float]:
    """Return the elements that each device sends per step, by collective (ZeRO, section 7).

    A ring all_gather or reduce_scatter of P elements sends P (N-1)/N; an all_reduce is one of each.
    Each microbatch reduces gradients and, at stage 3, gathers parameters twice. Stages 0 to 3 sum
    to 2P, 2P, 2P and 3P. With M microbatches, stages 1 and 2 sum to (1 + M) P, or to 2P with
    reduce_every="step", where `num_reductions` is 1.

    Args:
      num_params: P, number of parameters.
      stage: ZeRO stage, 0 to 3.
      num_shards: N, the size of the axis `fsdp`.
      num_microbatches: M, microbatches per step.
      num_reductions: gradient reductions per step; one per microbatch by default.

    Returns:
      Elements per device: {"all_reduce", "all_gather", "reduce_scatter"}.
    """
    reductions = num_microbatches if num_reductions is None else num_reductions
    sharded = STAGES[stage]
    ring = num_params * (num_shards - 1) / num_shards
    if not sharded.opt_state:
        return {"all_reduce": 2 * ring * reductions, "all_gather": 0.0, "reduce_scatter": 0.0}
    gathers = 2 * num_microbatches if sharded.params else 1
    return {"all_reduce": 0.0, "all_gather": gathers * ring, "reduce_scatter": reductions * ring}


def transformer_params(num_layers: int, hidden: int) -> int:
    """Return the parameters in a transformer's blocks, 12 L h^2 (ZeRO-Infinity, equation 1)."""
    return 12 * num_layers * hidden**2


def transformer_activation_bytes(
    batch: int,
    seq: int,
    hidden: int,
    heads: int,
    num_layers: int,
    *,
    remat: bool,
    tensor: int = 1,
    itemsize: int = 2,
) -> float:
    """Return the saved activation bytes of a transformer in which each operator saves its inputs.

    zerojax saves less: see `layer_activation_bytes`.

    Args:
      batch: sequences per device.
      seq: tokens per sequence.
      hidden: h, the model width.
      heads: number of attention heads.
      num_layers: L, number of layers.
      remat: if True, only each layer's input is saved: b s h elements of `itemsize` bytes
        (ZeRO-Infinity, equation 3). Otherwise everything that backward needs is saved:
        s b h (10 + 24/t + 5 a s / (h t)) bytes in 16 bits (Korthikanti et al., arXiv:2205.05198,
        equation 2).
      tensor: t, number of tensor-parallel shards.
      itemsize: bytes per activation element; the second formula scales with it, including its
        dropout masks.
    """
    if remat:
        return float(num_layers * batch * seq * hidden * itemsize)
    per_element = 10 + 24 / tensor + 5 * heads * seq / (hidden * tensor)
    return num_layers * seq * batch * hidden * per_element * itemsize / 2


def layer_activation_bytes(
    seq: int,
    batch: int,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    partition_activations: bool = False,
    activations: str = "save",
    fused_attention: bool = False,
    itemsize: int = 2,
) -> float:
    """Return the bytes per device that a GPT layer saves from forward to backward.

    A layer saves its input and the outputs of its products; the module's docstring has the terms.

    What "everything" saves depends on how a block is written: these figures are for the blocks of
    `examples/gpt.py`.

    The terms that tensor parallelism does not split are split too with `sequence_parallel` or
    `partition_activations`.

    Args:
      seq: s, tokens per sequence.
      batch: b, sequences on the devices of one tensor group.
      hidden: h, the model width.
      heads: a, number of attention heads.
      tensor: t, number of tensor-parallel shards.
      sequence_parallel: whether the residual stream is also split over `tensor`.
      partition_activations: whether the saved part of the residual stream is split over `tensor`.
      activations: activation mode: "everything", "save", "selective" or "remat".
      fused_attention: whether attention is one kernel, a custom_vjp that saves its output and the
        logsumexp of each row.
      itemsize: bytes per activation element; scores and logsumexp are float32.

    Raises:
      ValueError: `activations` is unknown, or `heads` is not divisible by `tensor`.
    """
    _check_mode(activations)
    _check_heads(heads, tensor)
    sbh = float(seq * batch * hidden * itemsize)
    stream = tensor if sequence_parallel or partition_activations else 1
    if activations == "remat":
        return sbh / stream
    score_rows = float(batch * heads * seq)
    if activations == "everything":
        norms = 6 * sbh * 4 / itemsize
        score_bytes = 4 * score_rows if fused_attention else score_rows * seq * (4 + itemsize)
        return (3 * sbh + norms) / stream + (28 * sbh + score_bytes) / tensor
    products = 2 * sbh / stream + 8 * sbh / tensor
    if activations == "selective":
        return products
    saved_per_row = 1 if fused_attention else seq
    return products + 4 * score_rows * saved_per_row / tensor


def korthikanti_layer_bytes(
    seq: int,
    batch: int,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    activations: str = "save",
    fused_attention: bool = False,
    itemsize: int = 2,
) -> float:
    """Return the bytes per device that Korthikanti et al. count for a layer's saved activations.

    Table 2 of arXiv:2205.05198 gives s b h (10 + 24/t + 5 a s / (h t)) in 16 bits, and with
    sequence parallelism all of it over t. The last term is dropped if attention's inner part is
    recomputed or is one fused kernel. If the full layer is recomputed, 2 s b h remain. The paper
    counts each operator's inputs, so "everything" and "save" give the same result here.

    Args:
      seq: s, tokens per sequence.
      batch: b, sequences on the devices of one tensor group.
      hidden: h, the model width.
      heads: a, number of attention heads.
      tensor: t, number of tensor-parallel shards.
      sequence_parallel: whether the residual stream is also split over `tensor`.
      activations: activation mode: "everything", "save", "selective" or "remat".
      fused_attention: whether attention is one kernel.
      itemsize: bytes per activation element; the formula scales with it, including its dropout
        masks.

    Raises:
      ValueError: `activations` is unknown, or `heads` is not divisible by `tensor`.
    """
    _check_mode(activations)
    _check_heads(heads, tensor)
    sbh = seq * batch * hidden * itemsize / 2
    if activations == "remat":
        return 2 * sbh
    stream = tensor if sequence_parallel else 1
    inner = 0.0
    if activations != "selective" and not fused_attention:
        inner = 5 * heads * seq / (hidden * tensor)
    return sbh * (10 / stream + 24 / tensor + inner)


def _check_mode(activations: str) -> None:
    if activations not in MODES:
        raise ValueError(
            f"activations={activations!r} is unknown; choose from {', '.join(map(repr, MODES))}"
        )


def tiled_loss_pays(
    *, vocab: int, seq: int, hidden: int, heads: int, itemsize: int = 2, tensor: int = 1
) -> bool:
    """Return whether a tiled loss (`zj.linear_cross_entropy`) lowers a transformer's peak memory.

    At the head, a program with unsharded logits holds them in float32 and their gradient in the
    compute dtype: 4 + itemsize bytes per token and vocabulary entry. A block's backward holds that
    block's residuals. With remat, the peak is the larger of the two, so tiles lower it only if the
    head sets it. Without remat, the head also holds every block's residuals; logits smaller than
    one block's residuals are then less than 1/L of the peak, which is not worth the products that
    tiles recompute. So tiles pay if the logits take more than a block.

    Args:
      vocab: V, vocabulary size.
      seq: tokens per sequence.
      hidden: h, the model width.
      heads: number of attention heads.
      itemsize: bytes per activation element.
      tensor: number of tensor-parallel shards, which split both logits and blocks.
    """
    block = transformer_activation_bytes(
        1, seq, hidden, heads, 1, remat=False, tensor=tensor, itemsize=itemsize
    )
    return seq * vocab * (4 + itemsize) / tensor > block


def _check_heads(heads: int, tensor: int) -> None:
    if heads % tensor:
        raise ValueError(
            f"heads={heads} is not divisible by tensor={tensor}: a head is not split over devices"
        )


def tiled_mlp_pays(
    *, seq: int, hidden: int, heads: int, itemsize: int = 2, tensor: int = 1
) -> bool:
    """Return whether a tiled MLP (`zj.TiledMLP`) lowers a transformer's peak memory at stage 3.

    A gathered MLP of width 4 h takes 8 h^2 itemsize bytes while it is used, and each of its t tiles
    takes one t-th. The price is t gathers instead of one, and recomputed hidden activations. If one
    sequence's residuals of a block take more than the MLP, activations dominate at any batch size
    and tiles save little.

    Args:
      seq: tokens per sequence.
      hidden: h, the model width.
      heads: number of attention heads.
      itemsize: bytes per element of a gathered weight and of an activation.
      tensor: number of tensor-parallel shards, which split both the MLP and the activations.
    """
    block = transformer_activation_bytes(
        1, seq, hidden, heads, 1, remat=False, tensor=tensor, itemsize=itemsize
    )
    return 8 * hidden**2 * itemsize / tensor > block
