"""A transformer from its numbers alone: what a plan needs of a model that nobody has written yet.

Of L layers with hidden size h, heads a (of which k for keys and values), MLP width f, sequences of
T tokens and V words:

    weights of a layer      h (2 h + 2 h k/a + m f)      12 h^2 for k = a, f = 4 h; m = 2 matrices of the MLP, 3 if gated
    parameters              L weights + V h              ZeRO-Infinity (arXiv:2104.07857), equation 1, and the embedding
    layer forward           2 weights + 4 T h            FLOPs a token: products, and scores and values of attention
    layer's working memory  4 h 4h; b T ci (16 h + 2 a T)   ZeRO-Infinity, equations 4 and 5
    logits                  b T V (4 + itemsize)         in float32, and their gradient

Norms and biases are left out: of 12 h^2 they are 13 h, so 0.3 % at h = 4096. A model's own count of
  its parameters may be given
in the place of this one. It may be up to 10 % off; above that one of the numbers is another
model's.
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
from zerojax.given import as_integer, as_number

MOST_LAYERS = 1000
"""That are planned: a plan walks through each layer of many schedules.

Published transformers have up to 1,000 layers.
"""
_MOST = {"layers": MOST_LAYERS, "seq": 10**9, "batch": 10**9, "params": 10**18}
_MOST_WIDTH = 10**7
_MOST_ELEMENTS = 10**15
"""Of a step's widest activation. Bytes that follow from more do not fit 64 bits."""
TOLERANCE = 0.1
"""How far, in parts of the equation's, a count of parameters may be from it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a transformer and of its step's batch. Bytes are for a dtype that each method is
    told.

    Attributes:
      layers: L.
      hidden: h, the width of all heads together.
      heads: a, of queries.
      seq: T, tokens of a sequence.
      batch: sequences of a step, over all devices.
      params: P, of all layers and both ends; None: L layers and V h.
      vocab: V; 0 leaves out the embedding and the head.
      mlp: f, the width of the MLP; None: 4 h.
      kv_heads: k, heads of keys and values; None: as many as of queries.
      gated: the MLP multiplies two products (SwiGLU), so it has three matrices.

    Raises:
      ValueError: a size is no whole number of at least 1, heads do not divide, or `params` is more
        than 10 % from the other sizes' equation.
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
        for field in dataclasses.fields(self):
            if wrong := _what_is_wrong(field.name, getattr(self, field.name)):
                raise ValueError(wrong)
            if (number := _whole(field.name, getattr(self, field.name))) is not None:
                object.__setattr__(self, field.name, number)
        widest = max(self.hidden, self.mlp_width, self.vocab)
        if self.tokens * widest > _MOST_ELEMENTS:
            raise ValueError(
                f"batch = {self.batch:,} x seq = {self.seq:,} tokens of width {widest:,} are {self.tokens * widest:.3g} "
                f"elements: at most {_MOST_ELEMENTS:.0e} are planned"
            )
        if wrong := _heads_wrong(self.hidden, self.heads, self.num_kv_heads):
            raise ValueError(wrong)
        if self.params is None:
            return
        counted = self.counted_params
        if (
            abs(self.params - counted) > TOLERANCE * counted
            or self.params - self.vocab * self.hidden < self.layers
        ):
            raise ValueError(
                f"params = {self.params:,}, and layers, hidden, mlp, kv_heads and vocab make {counted:,} "
                f"({self.params / counted - 1:+.0%}): drop params, or correct the size that is wrong"
                + (" (vocab = 0 leaves out the embedding)" if not self.vocab else "")
            )

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values, k."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, f."""
        return 4 * self.hidden if self.mlp is None else self.mlp

    @property
    def qkv_width(self) -> int:
        """Elements of queries, keys and values of a token: h (1 + 2 k/a), 3 h where k = a."""
        return self.hidden + 2 * self.num_kv_heads * (self.hidden // self.heads)

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's products, h (2 h + 2 h k/a + m f): 12 h^2 by default (ZeRO-Infinity,
        equation 1).
        """
        return self.hidden * (
            self.qkv_width + self.hidden + (3 if self.gated else 2) * self.mlp_width
        )

    @property
    def head_weights(self) -> int:
        """Weights of the head's product, V h. A tied embedding has the same."""
        return self.vocab * self.hidden

    @property
    def counted_params(self) -> int:
        """Parameters of L layers and V h of the embedding, whatever `params` is."""
        return self.layers * self.layer_weights + self.head_weights

    @property
    def num_params(self) -> int:
        """Parameters P: `params`, or else 12 L h^2 + V h (ZeRO-Infinity, equation 1, and the
        embedding).
        """
        return self.counted_params if self.params is None else int(self.params)

    @property
    def layer_params(self) -> int:
        """Parameters of a layer: `layer_weights`, or less where `params` leaves less beside V h.

        L of them and `end_params` are `num_params`.
        """
        return min(self.layer_weights, (self.num_params - self.head_weights) // self.layers)

    @property
    def end_params(self) -> int:
        """Parameters of both ends: V h, and what `params` has beyond the equation, such as an
        untied head.
        """
        return self.num_params - self.layers * self.layer_params

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def layer_flops_per_token(self) -> float:
        """FLOPs of a layer's forward for one token: 2 weights + 4 T h (Korthikanti et al.,
        arXiv:2205.05198, appendix A).
        """
        return 2.0 * self.layer_weights + 4.0 * self.seq * self.hidden

    def step_flops(self, activations: str = "save") -> float:
        """Return the FLOPs of a step of all devices (`zerojax.planner.hardware_flops_per_token`).

        Args:
          activations: "everything" and "save": the model's own, of MFU. "selective" and "remat":
            with what is recomputed, of HFU.

        Raises:
          ValueError: `activations` is none of these.
        """
        sizes = (self.layers, self.hidden, self.seq, self.layer_weights, self.head_weights)
        if activations in ("everything", "save"):
            return self.tokens * flops_per_token(*sizes)
        return self.tokens * hardware_flops_per_token(*sizes, activations=activations)

    def layer_kept_bytes(
        self, sequences: int, *, itemsize: int = 2, tensor: int = 1, **how: Any
    ) -> float:
        """Return the bytes that a layer keeps from forward to backward on each device.

        Other widths of keys, values and MLP than a GPT's are added to
        `zerojax.memory.layer_activation_bytes`: a gated MLP keeps both of its products. With
        "everything" the norms are taken for LayerNorms: RMSNorms keep less.

        Args:
          sequences: on the devices of one tensor group.
          itemsize: bytes of an activation.
          tensor: tensor-parallel shards.
          **how: activations ("save" by default), sequence_parallel, partition_activations and
            fused_attention, as there.

        Raises:
          ValueError: as there, or `tensor` does not divide heads of keys and values, of which a
            device has whole ones.
        """
        if self.num_kv_heads % tensor:
            raise ValueError(
                f"kv_heads = {self.num_kv_heads} do not divide by tensor = {tensor}: a device has whole heads; choose a tensor "
                f"axis that divides them, such as {math.gcd(self.num_kv_heads, tensor)}"
            )
        of_gpt = layer_activation_bytes(
            self.seq, sequences, self.hidden, self.heads, tensor=tensor, itemsize=itemsize, **how
        )
        if how.get("activations") == "remat":
            return of_gpt
        # How many values of the MLP's width are kept: its products alone, or those of its
        # activation as well.
        of_gelu, values = (
            (6, 6) if how.get("activations") == "everything" else (1, 2 if self.gated else 1)
        )
        more = (
            self.qkv_width - 3 * self.hidden + values * self.mlp_width - of_gelu * 4 * self.hidden
        )
        return of_gpt + sequences * self.seq * more * itemsize / tensor

    def checkpoints_bytes(self, sequences: int, interval: int = 1, itemsize: int = 2) -> float:
        """Return the bytes of all layers' inputs, b T h L itemsize / ci (ZeRO-Infinity, equation
        3).

        Args:
          sequences: b, those counted: of a device, a node or a step.
          interval: ci, layers between two checkpoints.
          itemsize: bytes of an activation.
        """
        sizes = (sequences, self.seq, self.hidden, self.heads, self.layers)
        return transformer_activation_bytes(*sizes, remat=True, itemsize=itemsize) / interval

    def states_working_bytes(self, itemsize: int = 2) -> int:
        """Return MSWM, parameters and gradients of a layer's largest product: 16 h^2 bytes
        (ZeRO-Infinity, equation 4).

        The head's product is not a layer's. It is tiled, or takes `head_weights` on top.

        Args:
          itemsize: bytes of a parameter, and of a gradient.
        """
        return states_working_bytes(self.hidden, max(self.mlp_width, self.qkv_width), itemsize)

    def activations_working_bytes(self, sequences: int, interval: int = 1) -> int:
        """Return AWM, b T ci (16 h + 2 a T) bytes: a GPT's in 16 bits (ZeRO-Infinity, equation 5).

        Args:
          sequences: b, on a device.
          interval: ci, layers between two checkpoints.
        """
        return activations_working_bytes(sequences, self.seq, self.hidden, self.heads, interval)

    def logits_bytes(self, sequences: int, *, itemsize: int = 2, tensor: int = 1) -> float:
        """Return the bytes of the head's logits in float32 and of their gradient, where the loss is
        not tiled.

        Args:
          sequences: on the devices of one tensor group.
          itemsize: bytes of the gradient's elements.
          tensor: tensor-parallel shards, which split the vocabulary.
        """
        return sequences * self.seq * self.vocab * (4 + itemsize) / tensor


def _whole(name: str, value: object) -> int | None:
    """Return a size as an `int`, a number of parameters such as 7e9 among them; None if it is no
    whole number.
    """
    number = as_number(value)
    if (
        name == "params"
        and number is not None
        and number.is_integer()
        and as_integer(value) is None
    ):
        return int(number)
    return as_integer(value)


def _what_is_wrong(name: str, value: Any) -> str | None:
    """Say what is wrong with one size, or None."""
    if name == "gated":
        return None if isinstance(value, bool) else f"gated = {value!r}: True or False is needed"
    if value is None and name in ("params", "mlp", "kv_heads"):
        return None
    least = 0 if name == "vocab" else 1
    number = _whole(name, value)
    if number is None or number < least:
        return f"{name} = {value!r}: a whole number, at least {least}, is needed"
    most = _MOST.get(name, _MOST_WIDTH)
    return None if number <= most else f"{name} = {_digits(number)}: at most {most:,} is planned"


def _digits(value: int) -> str:
    """Return a number as an error shows it; a long one in parts of ten."""
    return f"{value:,}" if value < 10**30 else f"2^{value.bit_length() - 1} or more"


def _heads_wrong(hidden: int, heads: int, kv_heads: int) -> str | None:
    """Say which heads do not divide, or None."""
    if hidden % heads:
        fits = max(n for n in range(1, heads) if hidden % n == 0)
        wider = -(-hidden // heads) * heads
        return f"hidden = {hidden} does not divide by heads = {heads}: choose {fits} heads, or hidden = {wider}"
    if heads % kv_heads:
        fits = max(n for n in range(1, min(kv_heads, heads) + 1) if heads % n == 0)
        return f"heads = {heads} do not divide by kv_heads = {kv_heads}: each serves as many queries; choose {fits}"
    return None
