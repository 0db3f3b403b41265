"""Weights as they rest when they are never trained: in 8 or 4 bits, split over devices as the
weights themselves are.

    layout = choose_layout("nf4", (4096, 11008), (8, 1))      # of one layer's leaf W[D_fsdp, F], from shapes alone
    q = encode(w, layout)                                     # 0.516 bytes an element; int8: 1.016
    w = decode(q, jnp.bfloat16)                               # W[D, F]

    all_gather(encode(shard)) = encode(all_gather(shard)),    decode(all_gather(q)) = all_gather(decode(q))        bit for bit

The second line holds where no block, and no group of scales, lies across two shards. A piece of an
array that is split along one dim is a range of its elements in memory, once for each index of the
dims before: so the last dim that is split is merged with all dims behind it, and blocks lie along
the result,

    W[A, B_fsdp, C, D] -> codes[A, (B C D / 2)_fsdp], scales[A, (B C D / block)_fsdp], ..

whose dims are split as the weight's are. What must divide is each shard's own range, B C D /
shards, by the block: 256 elements of int8 and 64 of nf4. Where it does not, as for W[D_fsdp,
F_tensor] whose F / shards is 1376, another dim is moved to the end and has the blocks: W[D_fsdp,
F_tensor] -> codes[F_tensor, (D / 2)_fsdp], which decoding transposes. Where no dim serves, and for
a leaf that is a vector or less than a block, there is no layout: `refusal` tells why, and the
caller keeps the weight as it is, as bitsandbytes does with biases and norms. A ragged last block is
refused too: it would be another one on every mesh.

A group of nf4's scales is of as many blocks of a row, and then of rows, as divide a shard's, 256 at
most. So what is encoded depends on the shards that it was made for, by the layout alone: where two
layouts are equal but for `inner`, and each group is of one row, the arrays have the same bytes in
the same order. Stacks of layers `[L, ...]` are encoded by the layout of one layer: L stays a dim of
its own.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation
from pallas_kernels.nf4 import Group, Nf4, dequantize_nf4, group_of, quantize_nf4
from pallas_kernels.quantize import Quantized, dequantize, quantize

Format = Literal["int8", "nf4"]
BLOCKS: dict[Format, int] = {"int8": 256, "nf4": 64}
"""Elements of a block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a leaf lies in its encoded arrays; the same for the whole leaf, for each shard and for a
    stack of layers.

    Attributes:
      format: "int8" or "nf4".
      inner: the dims that are merged with the one before them.
      moved: the dim that was moved to the end before that, counted from the end (-1 is the last);
        None where none was.
      group: nf4's rows and blocks of a group of scales; (1, 1) of int8.
    """

    format: Format
    inner: tuple[int, ...] = ()
    moved: int | None = None
    group: Group = (1, 1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A leaf in 8 or 4 bits.

    Attributes:
      q: the arrays, all of one number of dims, each split over devices by `encoded_spec`.
      layout: how the leaf lies in them.
    """

    q: Quantized | Nf4
    layout: Layout


def refusal(format: Format, shape: Sequence[int], shards: Sequence[int]) -> str | None:
    """Tell why a leaf has no layout and keeps its dtype, or None.

    Arguments as of `choose_layout`.
    """
    layout = _layout(format, tuple(shape), tuple(shards))
    return layout if isinstance(layout, str) else None


def choose_layout(format: Format, shape: Sequence[int], shards: Sequence[int]) -> Layout:
    """Return how a leaf is encoded, from shapes alone.

    Args:
      format: "int8" (blocks of 256 elements) or "nf4" (64).
      shape: of the whole leaf; of one layer, where layers are stacked.
      shards: for each dim, over how many devices it is split; 1 where it is whole.

    Raises:
      ValueError: no such format, shards that do not fit the shape, or `refusal` tells why the leaf
        cannot be encoded.
    """
    layout = _layout(format, tuple(shape), tuple(shards))
    if isinstance(layout, str):
        raise ValueError(f"{format}: {layout}")
    return layout


def encoded_spec(layout: Layout, spec: Sequence[Any]) -> tuple[Any, ...]:
    """Return the entries of the PartitionSpec of every encoded array.

    Args:
      layout: of `choose_layout`.
      spec: an entry for each dim of the leaf, None where it is whole; of a stack, its first entry
        included.
    """
    entries = list(spec)
    if layout.moved is not None:
        entries.append(entries.pop(len(entries) + layout.moved))
    return tuple(entries[: len(entries) - len(layout.inner)])


def abstract_encoded(layout: Layout, shape: Sequence[int]) -> Encoded:
    """Return shapes and dtypes of the encoded arrays of a leaf, a shard or a stack of this shape:
    ShapeDtypeStructs.
    """
    return jax.eval_shape(
        functools.partial(encode, layout=layout), jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    )


def encoded_bytes(layout: Layout, shape: Sequence[int]) -> int:
    """Return the bytes of the encoded arrays of a leaf of this shape."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(abstract_encoded(layout, shape)))


def encode(w: jax.Array, layout: Layout, implementation: Implementation | None = None) -> Encoded:
    """Return w in 8 or 4 bits; deterministic, and on each device's own shard the same as of the
    whole.

    Errors and what is not finite: see `quantize` and `quantize_nf4`. On several devices call it in
    `jax.shard_map`.

    Args:
      w: the leaf, a shard of it or a stack of either, `[.., *shape]`: bfloat16, float16 or float32.
      layout: of the whole leaf of one layer.
      implementation: "mosaic", "xla", "reference", or None to have it chosen and logged.

    Raises:
      ValueError: w does not fit the layout.
      NotImplementedError: the named implementation cannot serve.
    """
    if layout.moved is not None:
        w = jnp.moveaxis(w, layout.moved, -1)
    outer = w.ndim - len(layout.inner) - 1
    if outer < 0 or w.shape[outer + 1 :] != layout.inner:
        raise ValueError(
            f"encode: w is {list(w.shape)}, and its layout merges the dims {list(layout.inner)} with one before them"
        )
    (r, c), block = layout.group, BLOCKS[layout.format]
    rows, size = w.shape[outer - 1] if outer else 1, math.prod(w.shape[outer:])
    if size % (block * c) or rows % r:
        raise ValueError(
            f"encode: w is {list(w.shape)}, {rows} rows of {size} elements, and its layout has groups of {r} rows and {c} "
            f"blocks of {block}: make the layout for the shards that w is split into"
        )
    w = w.reshape(*w.shape[:outer], size)
    if layout.format == "int8":
        return Encoded(quantize(w, jnp.int8, block, implementation=implementation), layout)
    return Encoded(quantize_nf4(w, layout.group, implementation), layout)


def decode(
    encoded: Encoded, dtype: Any = jnp.bfloat16, implementation: Implementation | None = None
) -> jax.Array:
    """Return the leaf, the shard or the stack that was encoded, in bfloat16, float16 or float32.

    The result of XLA's form may be split as the arrays are, without communication; the kernels are
    opaque to the partitioner and want `jax.shard_map`. What is encoded is a constant to
    derivatives, where `dequantize` raises: these weights are never trained, and a barrier beside
    what is differentiated would give them a derivative of zeros.

    Raises:
      ValueError: arrays that do not fit each other, or another dtype.
      NotImplementedError: the named implementation cannot serve.
    """
    q, layout = jax.lax.stop_gradient(encoded.q), encoded.layout
    w = (
        dequantize(q, dtype, implementation)
        if isinstance(q, Quantized)
        else dequantize_nf4(q, dtype, implementation)
    )
    inner = math.prod(layout.inner)
    w = w.reshape(*w.shape[:-1], w.shape[-1] // inner, *layout.inner)
    return w if layout.moved is None else jnp.moveaxis(w, -1, layout.moved)


def _layout(format: Format, shape: tuple[int, ...], shards: tuple[int, ...]) -> Layout | str:
    """Return the layout, or why there is none."""
    if format not in BLOCKS:
        raise ValueError(f"format={format!r}: choose from {', '.join(BLOCKS)}")
    if len(shards) != len(shape) or any(
        n < 1 or size % n for size, n in zip(shape, shards, strict=False)
    ):
        raise ValueError(
            f"a leaf {list(shape)} in {list(shards)} shards: each dim needs a number of shards that divides it"
        )
    block = BLOCKS[format]
    if len(shape) < 2:
        return f"a leaf {list(shape)} has less than 2 dims"
    if math.prod(shape) < block:
        return f"a leaf {list(shape)} has {math.prod(shape)} elements, less than a block of {block}"

    def layout(outer: Sequence[int], size: int, **how: Any) -> Layout:
        rows = outer[-1] if outer else 1
        return Layout(
            format=format, group=group_of(rows, size // block) if format == "nf4" else (1, 1), **how
        )

    own = [size // n for size, n in zip(shape, shards, strict=True)]
    first = max((dim for dim, n in enumerate(shards) if n > 1), default=0)
    if (size := math.prod(own[first:])) % block == 0:
        return layout(own[:first], size, inner=shape[first + 1 :])
    for dim in reversed(range(len(shape))):
        if own[dim] % block == 0:
            return layout(own[:dim] + own[dim + 1 :], own[dim], moved=dim - len(shape))
    return (
        f"a leaf {list(shape)} in {list(shards)} shards has {size} elements in a row of a shard's dims {first} to "
        f"{len(shape) - 1}, and {own} along its dims: none is a multiple of the block, {block}"
    )
