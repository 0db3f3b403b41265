"""A transformer described by numbers alone, for planning a model that is not written yet.

For L layers of hidden size h, a heads (k for keys and values), MLP width f, sequences of T tokens
and a vocabulary of V:

    weights per layer       h (2 h + 2 h k/a + m f)      12 h^2 for k = a, f = 4 h; m = 2 matrices
                                                         of the MLP, 3 if gated
    parameters              L weights + V h              ZeRO-Infinity (arXiv:2104.07857),
                                                         equation 1, and the embedding
    layer forward           2 weights + 4 T h            FLOPs per token: products, and attention's
                                                         scores and values
    layer's working memory  4 h 4h; b T ci (16 h + 2 a T)   ZeRO-Infinity, equations 4 and 5
    logits                  b T V (4 + itemsize)         in float32, and their gradient

Norms and biases are not counted: they are 13 h per layer next to 12 h^2, 0.03 % at h = 4096. You
can pass a model's own parameter count instead. It may differ by up to 10 %; a larger difference
means that one of the numbers belongs to another model.
"""

import dataclasses
import math
from typing import Any

from zerojax.formulas import (
    activations_working_bytes,
    flops_per_token,
    hardware_flops_per_token,
    layer_activation_bytes,
    states_working_bytes,
    transformer_activation_bytes,
)
from zerojax.user_values import as_integer, as_number

MOST_LAYERS = 1000
"""Largest number of layers that is planned, because a plan walks every layer of many schedules.

Published transformers have up to 1,000 layers.
"""
_MOST = {"layers": MOST_LAYERS, "seq": 10**9, "batch": 10**9, "params": 10**18}
_MOST_WIDTH = 10**7
_MOST_ELEMENTS = 10**15
"""Most elements of a step's widest activation: beyond them, byte counts do not fit 64 bits."""
TOLERANCE = 0.1
"""Allowed difference of a given parameter count from the counted one, as a fraction."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a transformer and of its step's batch.

    Methods that return bytes take the element size as an argument.

    Attributes:
      layers: L, number of layers.
      hidden: h, the width of all heads together.
      heads: a, number of query heads.
      seq: T, tokens per sequence.
      batch: sequences per step, over all devices.
      params: P, number of parameters in all layers, embedding and head; by default, L layers and V
        h.
      vocab: V, vocabulary size; 0 leaves out the embedding and the head.
      mlp: f, width of the MLP; 4 h by default.
      kv_heads: k, number of key and value heads; as many as query heads by default.
      gated: whether the MLP multiplies two products (SwiGLU), so that it has three matrices.

    Raises:
      ValueError: a size is not an integer of at least 1, heads do not divide evenly, the batch is
        too large, or `params` differs by more than 10 % from the count that the other sizes imply.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    params: int | float | None = None
    vocab: int = 0
    mlp: int | None = None
    kv_heads: int | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        """Check all sizes and convert them to Python integers."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if wrong := _find_wrong_size(field.name, value):
                raise ValueError(wrong)
            number = _as_size(field.name, value)
            if number is not None:
                object.__setattr__(self, field.name, number)
        widest = max(self.hidden, self.mlp_width, self.vocab)
        if self.tokens * widest > _MOST_ELEMENTS:
            raise ValueError(
                f"batch = {self.batch:,} x seq = {self.seq:,} tokens of width {widest:,} have "
                f"{self.tokens * widest:.3g} elements: the planner supports at most "
                f"{_MOST_ELEMENTS:.0e}"
            )
        if wrong := _find_wrong_heads(self.hidden, self.heads, self.num_kv_heads):
            raise ValueError(wrong)
        if self.params is not None:
            self._check_params(self.params)

    def _check_params(self, params: int | float) -> None:
        """Raise ValueError if a number of parameters contradicts the other sizes."""
        counted = self.counted_params
        is_near = abs(params - counted) <= TOLERANCE * counted
        if not is_near or params - self.vocab * self.hidden < self.layers:
            vocab_hint = "" if self.vocab else " (vocab = 0 leaves out the embedding)"
            raise ValueError(
                f"params = {params:,}, but layers, hidden, mlp, kv_heads and vocab imply "
                f"{counted:,} ({params / counted - 1:+.0%}): "
                f"drop params, or correct the size that is wrong{vocab_hint}"
            )

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads, k."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, f."""
        return 4 * self.hidden if self.mlp is None else self.mlp

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values per token: h (1 + 2 k/a), which is 3 h if k = a."""
        return self.hidden + 2 * self.num_kv_heads * (self.hidden // self.heads)

    @property
    def layer_weights(self) -> int:
        """Number of weights in a layer's products, h (2 h + 2 h k/a + m f).

        This is 12 h^2 by default (ZeRO-Infinity, equation 1).
        """
        num_matrices = 3 if self.gated else 2
        return self.hidden * (self.qkv_width + self.hidden + num_matrices * self.mlp_width)

    @property
    def head_weights(self) -> int:
        """Number of weights in the head's product, V h, which a tied embedding shares."""
        return self.vocab * self.hidden

    @property
    def counted_params(self) -> int:
        """Number of parameters in L layers and the embedding (V h), regardless of `params`."""
        return self.layers * self.layer_weights + self.head_weights

    @property
    def num_params(self) -> int:
        """Number of parameters P: `params` if given, else the counted parameters.

        By default these are 12 L h^2 + V h (ZeRO-Infinity, equation 1, and the embedding).
        """
        return self.counted_params if self.params is None else int(self.params)

    @property
    def layer_params(self) -> int:
        """Number of parameters per layer.

        This is `layer_weights`, or less if `params` leaves less next to V h. L times this number
        plus `end_params` equals `num_params`.
        """
        return min(self.layer_weights, (self.num_params - self.head_weights) // self.layers)

    @property
    def end_params(self) -> int:
        """Number of parameters of embedding and head.

        This is V h plus the excess of `params` over the equation, such as an untied head.
        """
        return self.num_params - self.layers * self.layer_params

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.batch * self.seq

    @property
    def layer_flops_per_token(self) -> float:
        """FLOPs of a layer's forward per token: 2 weights + 4 T h.

        See Korthikanti et al., arXiv:2205.05198, appendix A.
        """
        return 2.0 * self.layer_weights + 4.0 * self.seq * self.hidden

    def step_flops(self, activations: str = "save") -> float:
        """Return the FLOPs of one step on all devices together.

        Args:
          activations: activation mode. "everything" and "save" give the model's FLOPs, for MFU.
            "selective" and "remat" include recomputation, for HFU (`hardware_flops_per_token`).

        Raises:
          ValueError: `activations` is not one of these modes.
        """
        sizes = (self.layers, self.hidden, self.seq, self.layer_weights, self.head_weights)
        if activations in ("everything", "save"):
            return self.tokens * flops_per_token(*sizes)
        return self.tokens * hardware_flops_per_token(*sizes, activations=activations)

    def layer_kept_bytes(
        self, sequences: int, *, itemsize: int = 2, tensor: int = 1, **how: Any
    ) -> float:
        """Return the bytes per device that a layer saves from forward to backward.

        The result is `zerojax.formulas.layer_activation_bytes`, corrected for widths of keys,
        values and MLP that differ from a GPT's: a gated MLP saves both of its products. With
        "everything", norms are assumed to be LayerNorms; RMSNorms save less.

        Args:
          sequences: sequences on the devices of one tensor group.
          itemsize: bytes per activation element.
          tensor: number of tensor-parallel shards.
          **how: `activations` ("save" by default), `sequence_parallel`, `partition_activations` and
            `fused_attention`, passed to `layer_activation_bytes`.

        Raises:
          ValueError: `activations` is unknown, or heads are not divisible by `tensor`.
        """
        if self.num_kv_heads % tensor:
            raise ValueError(
                f"kv_heads = {self.num_kv_heads} is not divisible by tensor = {tensor}, and a head "
                "is not split over devices; choose a tensor axis that divides kv_heads, such as "
                f"{math.gcd(self.num_kv_heads, tensor)}"
            )
        gpt_bytes = layer_activation_bytes(
            self.seq, sequences, self.hidden, self.heads, tensor=tensor, itemsize=itemsize, **how
        )
        if how.get("activations") == "remat":
            return gpt_bytes
        # Number of saved values of the MLP's width: only its products, or also the values inside
        # its activation function.
        if how.get("activations") == "everything":
            gpt_values = 6
            mlp_values = 6
        else:
            gpt_values = 1
            mlp_values = 2 if self.gated else 1
        extra_qkv = self.qkv_width - 3 * self.hidden
        extra_mlp = mlp_values * self.mlp_width - gpt_values * 4 * self.hidden
        return gpt_bytes + sequences * self.seq * (extra_qkv + extra_mlp) * itemsize / tensor

    def checkpoints_bytes(self, sequences: int, interval: int = 1, itemsize: int = 2) -> float:
        """Return the bytes of saved layer inputs, b T h L itemsize / ci.

        This is equation 3 of ZeRO-Infinity.

        Args:
          sequences: b, number of sequences counted, such as per device, per node or per step.
          interval: ci, layers between two checkpoints.
          itemsize: bytes per activation element.
        """
        sizes = (sequences, self.seq, self.hidden, self.heads, self.layers)
        return transformer_activation_bytes(*sizes, remat=True, itemsize=itemsize) / interval

    def states_working_bytes(self, itemsize: int = 2) -> int:
        """Return MSWM, the bytes of parameters and gradients of a layer's largest product.

        This is 16 h^2 bytes by default (ZeRO-Infinity, equation 4). The head's product is not
        counted: it is tiled, or takes `head_weights` in addition.

        Args:
          itemsize: bytes per parameter element and per gradient element.
        """
        return states_working_bytes(self.hidden, max(self.mlp_width, self.qkv_width), itemsize)

    def activations_working_bytes(self, sequences: int, interval: int = 1) -> int:
        """Return AWM, b T ci (16 h + 2 a T) bytes: a GPT's, in 16 bits (ZeRO-Infinity, equation 5).

        Args:
          sequences: b, sequences per device.
          interval: ci, layers between two checkpoints.
        """
        return activations_working_bytes(sequences, self.seq, self.hidden, self.heads, interval)

    def logits_bytes(self, sequences: int, *, itemsize: int = 2, tensor: int = 1) -> float:
        """Return the bytes per device of the untiled loss's float32 logits and their gradient.

        Args:
          sequences: sequences on the devices of one tensor group.
          itemsize: bytes per element of the gradient.
          tensor: number of tensor-parallel shards, which split the vocabulary.
        """
        return sequences * self.seq * self.vocab * (4 + itemsize) / tensor


def _as_size(name: str, value: object) -> int | None:
    """Return a size as an `int`, or None if it is not a whole number.

    A parameter count may be a float such as 7e9.
    """
    integer = as_integer(value)
    if name != "params" or integer is not None:
        return integer
    number = as_number(value)
    if number is None or not number.is_integer():
        return None
    return int(number)


def _find_wrong_size(name: str, value: Any) -> str | None:
    """Return what is wrong with one size, or None if it is valid."""
    if name == "gated":
        if isinstance(value, bool):
            return None
        return f"gated = {value!r}: must be True or False"
    if value is None and name in ("params", "mlp", "kv_heads"):
        return None
    least = 0 if name == "vocab" else 1
    number = _as_size(name, value)
    if number is None or number < least:
        return f"{name} = {value!r}: must be a whole number of at least {least}"
    most = _MOST.get(name, _MOST_WIDTH)
    if number <= most:
        return None
    return f"{name} = {_format_number(number)}: must be at most {most:,}"


def _format_number(value: int) -> str:
    """Return a number as text for an error message, as a power of two if it is very long."""
    return f"{value:,}" if value < 10**30 else f"2^{value.bit_length() - 1} or more"


def _find_wrong_heads(hidden: int, heads: int, kv_heads: int) -> str | None:
    """Return which heads do not divide evenly, and the remedy, or None."""
    if hidden % heads:
        fits = max(n for n in range(1, heads) if hidden % n == 0)
        wider = -(-hidden // heads) * heads
        return (
            f"hidden = {hidden} is not divisible by heads = {heads}: choose {fits} heads, or "
            f"hidden = {wider}"
        )
    if heads % kv_heads:
        fits = max(n for n in range(1, min(kv_heads, heads) + 1) if heads % n == 0)
        return (
            f"heads = {heads} is not divisible by kv_heads = {kv_heads}: each key and value head "
            f"serves the same number of query heads; choose {fits}"
        )
    return None
