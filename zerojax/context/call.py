"""One attention over a mesh: what is static about it, its operands, and what backward reads."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from zerojax.context.scores import Scores
from zerojax.sharding import CONTEXT

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of an attention.

    Attributes:
      scores: how scores are computed.
      method: "local" on one device, or "ring", "ulysses", "gather".
      kernel: "xla", or "cudnn" for cuDNN's kernel on each device.
      block: largest number of tokens of a block.
      mesh: the mesh in scope; None on one device.
      rows: mesh axes that split the batch.
      size: number of devices along `context`.
      tensor: number of devices along `tensor`.
      repeats: how often ulysses repeats each key head.
    """

    scores: Scores
    method: str
    kernel: str
    block: int
    mesh: Any = None
    rows: tuple[str, ...] = ()
    size: int = 1
    tensor: int = 1
    repeats: int = 1

    def spec(self, ndim: int) -> PartitionSpec:
        """Return the spec of an array whose dim 0 is the batch, and dim 1 is split by `context`."""
        return PartitionSpec(self.rows or None, CONTEXT, *(None,) * (ndim - 2))


class Operands(NamedTuple):
    """Arrays of an attention.

    Attributes:
      q: queries [B, T, N, D].
      k: keys [B, T, K, D].
      v: values [B, T, K, D].
      segment_ids: i32[B, T], or None.
      window: i32[], or None.
    """

    q: Array
    k: Array
    v: Array
    segment_ids: Array | None
    window: Array | None


class Kept(NamedTuple):
    """What backward reads besides the outputs, as a method laid it out; dim 1 is split by `context`.

    None stands for an operand that is kept as it is.

    Attributes:
      q: queries.
      k: keys.
      v: values.
      segment_ids: segment ids.
      lse: log-sum-exp of the scores of each query and head, float32.
    """

    q: Array | None
    k: Array | None
    v: Array | None
    segment_ids: Array | None
    lse: Array
