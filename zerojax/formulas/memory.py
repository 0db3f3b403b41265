"""Bytes in closed form: model states, activations and collectives.

ZeRO (arXiv:1910.02054, section 5) counts, for P parameters over N shards in mixed precision with
Adam, bytes a device of

    stage 0   16P            params 2P, grads 2P, optimizer 12P (float32 master 4P, moments 8P)
    stage 1   4P + 12P/N
    stage 2   2P + 14P/N
    stage 3   16P/N

and ZeRO-Infinity (arXiv:2104.07857, section 3) 20 bytes a parameter, because it also keeps float32
gradients. So the bytes of a parameter follow from the precision and from the dtype in which
gradients rest, never from a constant: `StateBytes`.
"""

import dataclasses

import jax.numpy as jnp

from zerojax.activations import MODES
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes that each kind of state takes for one parameter.

    Attributes:
      params: compute-dtype parameters.
      grads: gradients between backward and update.
      master: float32 master weights; 0 where the parameters are float32.
      moments: the optimizer's state; 8 for Adam.
    """

    params: int
    grads: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        """Bytes of one parameter where nothing is sharded: 16 for ZeRO, 20 for ZeRO-Infinity."""
        return self.params + self.grads + self.master + self.moments


def state_bytes(
    precision: str = "bf16",
    *,
    moments: int = 8,
    num_microbatches: int = 1,
    keeps_fp32_grads: bool = False,
    reduce_dtype: str | None = None,
) -> StateBytes:
    """Return the bytes of one parameter.

    Args:
      precision: a name in `zerojax.precision.PRECISIONS`.
      moments: bytes of optimizer state for one parameter.
      num_microbatches: gradients are accumulated in float32 where there is more than one.
      keeps_fp32_grads: count float32 gradients beside those of the compute dtype, as ZeRO-Infinity
        does.
      reduce_dtype: gradients rest in the dtype in which they are reduced; None: the compute dtype.
    """
    p = PRECISIONS[precision]
    size = jnp.dtype(p.compute_dtype).itemsize
    grads = 4 if num_microbatches > 1 or reduce_dtype == "float32" else size
    return StateBytes(
        params=size,
        grads=grads + (4 if keeps_fp32_grads else 0),
        master=4 if p.has_master else 0,
        moments=moments,
    )


def model_state_bytes(
    num_params: int, stage: int, num_shards: int, per_param: StateBytes | None = None
) -> dict[str, float]:
    """Return the bytes of model states on each device: {"params", "grads", "master", "opt_state",
    "total"}.

    Args:
      num_params: P.
      stage: 0 to 3.
      num_shards: N, the size of the axis `fsdp`.
      per_param: bytes of one parameter; mixed precision with Adam (16) by default.
    """
    row, per_param = STAGES[stage], per_param or state_bytes()

    def per_device(num_bytes: int, sharded: bool) -> float:
        return num_params * num_bytes / (num_shards if sharded else 1)

    parts = {
        "params": per_device(per_param.params, row.params),
        "grads": per_device(per_param.grads, row.grads),
        "master": per_device(per_param.master, row.opt_state),
        "opt_state": per_device(per_param.moments, row.opt_state),
    }
    return parts | {"total": sum(parts.values())}


def collective_elements(
    num_params: int,
    stage: int,
    num_shards: int,
    num_microbatches: int = 1,
    num_reductions: int | None = None,
) -> dict[str, float]:
    """Return the elements that each device sends in a step, by collective (ZeRO, section 7).

    A ring all_gather or reduce_scatter of P elements sends P (N-1)/N; an all_reduce is one of each.
    Gradients are reduced, and at stage 3 parameters gathered twice, in every microbatch. Rows 0 to
    3 sum to 2P, 2P, 2P and 3P. Of M microbatches rows 1 and 2 sum to (1 + M) P; with
    reduce_every="step" to 2P, since `num_reductions` is 1.
    """
    reductions = num_microbatches if num_reductions is None else num_reductions
    row, ring = STAGES[stage], num_params * (num_shards - 1) / num_shards
    if not row.opt_state:
        return {"all_reduce": 2 * ring * reductions, "all_gather": 0.0, "reduce_scatter": 0.0}
    gathers = 2 * num_microbatches if row.params else 1
    return {"all_reduce": 0.0, "all_gather": gathers * ring, "reduce_scatter": reductions * ring}


def transformer_params(num_layers: int, hidden: int) -> int:
    """Return the parameters of a transformer's blocks, 12 L h^2 (ZeRO-Infinity, equation 1)."""
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
    """Return the activation bytes that a transformer has from forward to backward where each
    operator keeps what it reads.

    What zerojax keeps is less: `layer_activation_bytes`.

    Args:
      batch: sequences on one device.
      seq: tokens of a sequence.
      hidden: h.
      heads: attention heads.
      num_layers: L.
      remat: only each layer's input is kept: b s h bytes times itemsize (ZeRO-Infinity, equation
        3). Else all that backward needs: s b h (10 + 24/t + 5 a s / (h t)) in 16 bits (Korthikanti
        et al., arXiv:2205.05198, equation 2).
      tensor: t, tensor-parallel shards.
      itemsize: bytes of an activation; the second formula scales with it, its dropout masks
        included.
    """
    if remat:
        return float(num_layers * batch * seq * hidden * itemsize)
    each = 10 + 24 / tensor + 5 * heads * seq / (hidden * tensor)
    return num_layers * seq * batch * hidden * each * itemsize / 2


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
    """Return the bytes that a GPT's layer keeps from forward to backward on each device.

    A layer keeps its input and what products make (`zerojax.activations.kept`). In units of s b h
    elements of 2 bytes:

        remat        2
        selective    4 + 16/t: the input 2, the projection 2, qkv 6/t, attention's output 2/t, the hidden layer 8/t
        save         the same, and scores in float32: 4 a s / (h t); of a fused kernel the logsumexp of its rows: 4 a / (h t)
        everything   30 + 56/t: the input 2, the outputs of both norms 4, what these keep in float32 24, qkv 6/t, attention's
                     output 2/t, the tanh approximation of gelu 48/t; and scores before and after
                     the softmax, 6 a s / (h t), or the logsumexp of a fused kernel. Dropout masks
                     are not counted.

    What "everything" keeps depends on how a block is written: these are the figures of the blocks
      of `examples/gpt.py`.

    What tensor parallelism does not split is split all the same with `sequence_parallel` or
    `partition_activations`.

    Args:
      seq: s, tokens of a sequence.
      batch: b, sequences on the devices of one tensor group.
      hidden: h.
      heads: a.
      tensor: t, tensor-parallel shards.
      sequence_parallel: the stream is split over `tensor` too.
      partition_activations: what is kept of it is.
      activations: one of "everything", "save", "selective" and "remat".
      fused_attention: attention is one kernel, a custom_vjp that saves its output and the logsumexp
        of each row.
      itemsize: bytes of an activation; scores and logsumexp are float32.
    """
    _check_mode(activations)
    _check_heads(heads, tensor)
    sbh = float(seq * batch * hidden * itemsize)
    stream = tensor if sequence_parallel or partition_activations else 1
    if activations == "remat":
        return sbh / stream
    rows = float(batch * heads * seq)  # of scores
    if activations == "everything":
        norms = 6 * sbh * 4 / itemsize
        scores = 4 * rows if fused_attention else rows * seq * (4 + itemsize)
        return (3 * sbh + norms) / stream + (28 * sbh + scores) / tensor
    products = 2 * sbh / stream + 8 * sbh / tensor
    if activations == "selective":
        return products
    return products + 4 * rows * (1 if fused_attention else seq) / tensor


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
    """Return what a transformer's layer keeps by Korthikanti et al. (arXiv:2205.05198, table 2), in
    bytes on each device.

    It has s b h (10 + 24/t + 5 a s / (h t)) in 16 bits, and all of it over t with sequence
    parallelism; without the last term if attention's inner part is recomputed, or is one fused
    kernel; and 2 s b h if the whole layer is. They count what each operator reads, so that
    "everything" and "save" are the same here.

    Args:
      seq: s, tokens of a sequence.
      batch: b, sequences on the devices of one tensor group.
      hidden: h.
      heads: a.
      tensor: t, tensor-parallel shards.
      sequence_parallel: the stream is split over `tensor` too.
      activations: one of "everything", "save", "selective" and "remat".
      fused_attention: attention is one kernel.
      itemsize: bytes of an activation; the formula scales with it, its dropout masks included.
    """
    _check_mode(activations)
    _check_heads(heads, tensor)
    sbh = seq * batch * hidden * itemsize / 2
    if activations == "remat":
        return 2 * sbh
    inner = (
        0.0
        if activations == "selective" or fused_attention
        else 5 * heads * seq / (hidden * tensor)
    )
    return sbh * (10 / (tensor if sequence_parallel else 1) + 24 / tensor + inner)


def _check_mode(activations: str) -> None:
    if activations not in MODES:
        raise ValueError(
            f"activations={activations!r} is unknown: choose from {', '.join(map(repr, MODES))}"
        )


def tiled_loss_pays(
    *, vocab: int, seq: int, hidden: int, heads: int, itemsize: int = 2, tensor: int = 1
) -> bool:
    """Tell whether a loss in tiles of logits (`zj.linear_cross_entropy`) lowers the peak of a
    transformer's memory.

    At the head a program of whole logits holds them in float32, and their gradient in the compute
      dtype: 4 + itemsize bytes a
    token and word. A block's backward holds that block's residuals. With remat the peak is the
    larger of the two: tiles lower it only if it is the head's. Without, every block's residuals are
    held at the head too, and logits below one block's are less than 1 in L of the peak: not worth
    the products that tiles compute again. So they pay where logits take more than a block.

    Args:
      vocab: V.
      seq: tokens of a sequence.
      hidden: h.
      heads: attention heads.
      itemsize: bytes of an activation.
      tensor: tensor-parallel shards, which split both.
    """
    block = transformer_activation_bytes(
        1, seq, hidden, heads, 1, remat=False, tensor=tensor, itemsize=itemsize
    )
    return seq * vocab * (4 + itemsize) / tensor > block


def _check_heads(heads: int, tensor: int) -> None:
    if heads % tensor:
        raise ValueError(
            f"heads={heads} do not divide by tensor={tensor}: a device has whole heads"
        )


def tiled_mlp_pays(
    *, seq: int, hidden: int, heads: int, itemsize: int = 2, tensor: int = 1
) -> bool:
    """Tell whether a transformer's MLP in tiles (`zj.TiledMLP`) lowers the peak of memory at stage
    3.

    A gathered MLP of 4 h takes 8 h^2 itemsize bytes while it is used, and its tiles one t-th of it;
    the price is t gathers for one, and the hidden activations computed again. Where one sequence's
    residuals of a block take more, the activations of any batch are the larger part, and the tiles
    save little.

    Args:
      seq: tokens of a sequence.
      hidden: h.
      heads: attention heads.
      itemsize: bytes of a gathered weight, and of an activation.
      tensor: tensor-parallel shards, which split both.
    """
    block = transformer_activation_bytes(
        1, seq, hidden, heads, 1, remat=False, tensor=tensor, itemsize=itemsize
    )
    return 8 * hidden**2 * itemsize / tensor > block
