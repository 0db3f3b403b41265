"""One attention over a mesh: what is static about it, its operands, and what backward reads."""

import dataclasses
from collections.abc import Callable, Set
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import PartitionSpec

from zerojax.compat import varying_axes
from zerojax.context.scores import Scores
from zerojax.sharding import CONTEXT, TENSOR

Array = jax.Array
T = TypeVar("T")


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
      names_tensor: whether islands name `tensor` too, which splits all heads.
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
    names_tensor: bool = False
    repeats: int = 1

    def spec(self, heads_dim: int | None = None) -> PartitionSpec:
        """Return the spec of an array whose dim 0 is the batch, and dim 1 is split by `context`.

        Args:
          heads_dim: dim of the heads, which `tensor` splits if the islands name it; None if the
            array has none.
        """
        if heads_dim is None or not self.names_tensor:
            return PartitionSpec(self.rows or None, CONTEXT)
        return PartitionSpec(self.rows or None, CONTEXT, *(None,) * (heads_dim - 2), TENSOR)


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


class Saved(NamedTuple):
    """What backward reads besides the outputs, in the layout of the method.

    Attributes:
      q: queries.
      k: keys.
      v: values.
      segment_ids: segment ids, or None.
      lse: log-sum-exp of the scores of each query and head, float32.
    """

    q: Array
    k: Array
    v: Array
    segment_ids: Array | None
    lse: Array


class Kept(NamedTuple):
    """What forward keeps for backward besides the outputs. `context` splits dim 1.

    Attributes:
      lse: log-sum-exp of the scores of each query and head, float32.
      q: queries in a layout of the method's own; None: they are kept as they came.
      k: keys, like the queries.
      v: values, like the queries.
      segment_ids: segment ids, like the queries.
    """

    lse: Array
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    segment_ids: Array | None = None

    def without_copies(self, operands: Operands) -> Operands:
        """Return the operands without the ones kept here in another layout."""
        q, k, v, segment_ids, window = operands
        return Operands(
            None if self.q is not None else q,  # pyright: ignore[reportArgumentType]
            None if self.k is not None else k,  # pyright: ignore[reportArgumentType]
            None if self.v is not None else v,  # pyright: ignore[reportArgumentType]
            None if self.segment_ids is not None else segment_ids,
            window,
        )

    def filled(self, operands: Operands) -> Saved:
        """Return what backward reads: what is kept here, and the other operands."""
        return Saved(
            operands.q if self.q is None else self.q,
            operands.k if self.k is None else self.k,
            operands.v if self.v is None else self.v,
            operands.segment_ids if self.segment_ids is None else self.segment_ids,
            self.lse,
        )


def varying_over(arrays: Any) -> frozenset[str]:
    """Return the axes of a caller's `jax.shard_map` over which any array of a tree varies.

    There are none outside of a shard_map, or with `check_vma=False`.
    """
    axes = [varying_axes(jax.typeof(a)) for a in jax.tree.leaves(arrays)]
    return frozenset[str]().union(*axes)


def vary(arrays: T, axes: Set[str]) -> T:
    """Return a tree of arrays whose types say that they vary over some axes; nothing is computed.

    Loops over blocks carry sums that depend on all operands, and a derivative must vary like its
    operand: JAX sums the derivative of an operand that is the same on several devices.
    """

    def cast(a: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(jax.typeof(a))))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(cast, arrays)


class Method(NamedTuple):
    """What one device computes, given its shards.

    Attributes:
      forward: function of (call, place, operands) that returns its outputs [B, T_context, N, D],
        and what it keeps. `place` is i32[], its place along `context`.
      backward: function of (call, place, saved, window, do, delta) that returns its gradients of
        queries, keys and values. do are the cotangents of its outputs, and delta f32[B, T_context,
        N] are sums over D of do o.
    """

    forward: Callable[[Call, Any, Operands], tuple[Array, Kept]]
    backward: Callable[[Call, Any, Saved, Array | None, Array, Array], tuple[Array, Array, Array]]
