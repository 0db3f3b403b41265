"""Store weights that are never trained in 8 or 4 bits, split over devices like the weights.

    layout = choose_layout("nf4", (4096, 11008), (8, 1))    # one layer's leaf W[D_fsdp, F]
    q = encode(w, layout)                                   # bytes per element: 0.516; int8: 1.016
    w = decode(q, jnp.bfloat16)                             # W[D, F]

A layout depends only on shapes. The following equations are exact, bit for bit:

    all_gather(encode(shard)) = encode(all_gather(shard))
    decode(all_gather(q)) = all_gather(decode(q))

They require that no block, and no group of scales, crosses two shards. A piece of an array that is
split along one dim is a contiguous range of its elements, once for each index of the dims before.
The last split dim is therefore merged with all dims after it, and blocks lie along the result,

    W[A, B_fsdp, C, D] -> codes[A, (B C D / 2)_fsdp], scales[A, (B C D / block)_fsdp], ..

whose dims are split like the weight's. The block, 256 elements for int8 and 64 for nf4, must divide
each shard's own range, B C D / shards. If it does not, as for W[D_fsdp, F_tensor] with F / shards
of 1376, another dim is moved to the end and has the blocks: W[D_fsdp, F_tensor] -> codes[F_tensor,
(D / 2)_fsdp], which decoding transposes. If no dim is divisible, and for vectors and leaves smaller
than a block, there is no layout: `refusal` returns the reason, and the caller keeps the weight as
it is, as bitsandbytes does with biases and norms. A ragged last block is refused too, because it
would differ from mesh to mesh.

A group of nf4's scales has as many blocks of a row, and then as many rows, as divide a shard's,
256 blocks at most. The encoded arrays depend on the intended shards only through the layout: if two
layouts differ only in `inner`, and each group is within one row, the arrays have the same bytes in
the same order. Stacks of layers `[L, ...]` are encoded with the layout of one layer: L remains a
dim of its own.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation
from pallas_kernels.nf4 import Group, Nf4, choose_group, dequantize_nf4, quantize_nf4
from pallas_kernels.quantize import Quantized, dequantize, quantize

Format = Literal["int8", "nf4"]
BLOCKS: dict[Format, int] = {"int8": 256, "nf4": 64}
"""Elements per block, by format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a leaf is arranged in its encoded arrays.

    It is the same for the full leaf, for each shard and for a stack of layers.

    Attributes:
      format: "int8" or "nf4".
      inner: sizes of the dims that are merged with the dim before them.
      moved: dim that is moved to the end before the merge, counted from the end (-1 is the last);
        None if no dim is moved.
      group: rows and blocks per group of nf4's scales; (1, 1) for int8.
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
      q: encoded arrays, all with the same number of dims, each split over devices by
        `encoded_spec`.
      layout: how the leaf is arranged in the arrays.
    """

    q: Quantized | Nf4
    layout: Layout


def refusal(format: Format, shape: Sequence[int], shards: Sequence[int]) -> str | None:
    """Return why a leaf has no layout and keeps its dtype, or None if it has one.

    Args:
      format: "int8" (blocks of 256 elements) or "nf4" (64).
      shape: shape of the full leaf of one layer.
      shards: number of devices over which each dim is split; 1 if it is not split.

    Raises:
      ValueError: the format is unknown, or the shards do not fit the shape.
    """
    layout = _layout(format, tuple(shape), tuple(shards))
    return layout if isinstance(layout, str) else None


def choose_layout(format: Format, shape: Sequence[int], shards: Sequence[int]) -> Layout:
    """Return how a leaf is encoded, from shapes alone.

    Args:
      format: "int8" (blocks of 256 elements) or "nf4" (64).
      shape: shape of the full leaf; of one layer if layers are stacked.
      shards: number of devices over which each dim is split; 1 if it is not split.

    Raises:
      ValueError: the format is unknown, the shards do not fit the shape, or the leaf cannot be
        encoded (`refusal` returns why).
    """
    layout = _layout(format, tuple(shape), tuple(shards))
    if isinstance(layout, str):
        raise ValueError(f"{format}: {layout}")
    return layout


def encoded_spec(layout: Layout, spec: Sequence[Any]) -> tuple[Any, ...]:
    """Return the entries of the PartitionSpec of every encoded array.

    Args:
      layout: layout of the leaf, from `choose_layout`.
      spec: one entry per dim of the leaf, None if the dim is not split; for a stack of layers it
        includes the entry of the stacked dim.
    """
    entries = list(spec)
    if layout.moved is not None:
        entries.append(entries.pop(len(entries) + layout.moved))
    return tuple(entries[: len(entries) - len(layout.inner)])


def abstract_encoded(layout: Layout, shape: Sequence[int]) -> Encoded:
    """Return ShapeDtypeStructs of the encoded arrays.

    Args:
      layout: layout of the full leaf of one layer.
      shape: shape of the leaf, of a shard of it, or of a stack of either.

    Raises:
      ValueError: the shape does not fit the layout.
    """
    return jax.eval_shape(
        functools.partial(encode, layout=layout), jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    )


def encoded_bytes(layout: Layout, shape: Sequence[int]) -> int:
    """Return the bytes of the encoded arrays.

    Args:
      layout: layout of the full leaf of one layer.
      shape: shape of the leaf, of a shard of it, or of a stack of either.

    Raises:
      ValueError: the shape does not fit the layout.
    """
    arrays = jax.tree.leaves(abstract_encoded(layout, shape))
    return sum(array.size * array.dtype.itemsize for array in arrays)


def encode(w: jax.Array, layout: Layout, implementation: Implementation | None = None) -> Encoded:
    """Return w in 8 or 4 bits.

    Encoding is deterministic, and encoding each device's own shard gives the shards of the encoded
    full leaf. For the error bounds and the treatment of NaN and infinities see `quantize` and
    `quantize_nf4`. On several devices call it in `jax.shard_map`.

    Args:
      w: the leaf, a shard of it or a stack of either, `[.., *shape]`: bfloat16, float16 or float32.
      layout: layout of the full leaf of one layer.
      implementation: "mosaic", "xla", "reference", or None to choose and log one.

    Raises:
      ValueError: w does not fit the layout.
      NotImplementedError: the named implementation does not support this call.
    """
    if layout.moved is not None:
        w = jnp.moveaxis(w, layout.moved, -1)
    num_outer = w.ndim - len(layout.inner) - 1
    if num_outer < 0 or w.shape[num_outer + 1 :] != layout.inner:
        raise ValueError(
            f"encode: w is {list(w.shape)}, and its layout merges the dims {list(layout.inner)} "
            "with one before them"
        )
    r, c = layout.group
    block = BLOCKS[layout.format]
    rows = w.shape[num_outer - 1] if num_outer else 1
    size = math.prod(w.shape[num_outer:])
    if size % (block * c) or rows % r:
        raise ValueError(
            f"encode: w is {list(w.shape)}, {rows} rows of {size} elements, and its layout has "
            f"groups of {r} rows and {c} blocks of {block}: make the layout for the shards that w "
            "is split into"
        )
    w = w.reshape(*w.shape[:num_outer], size)
    if layout.format == "int8":
        return Encoded(quantize(w, jnp.int8, block, implementation=implementation), layout)
    return Encoded(quantize_nf4(w, layout.group, implementation), layout)


def decode(
    encoded: Encoded, dtype: Any = jnp.bfloat16, implementation: Implementation | None = None
) -> jax.Array:
    """Return the encoded leaf, shard or stack in bfloat16, float16 or float32.

    The result of XLA's form may be split like the arrays, without communication; the kernels are
    opaque to the partitioner and need `jax.shard_map`. The encoded arrays are constants to
    derivatives, where `dequantize` would raise: these weights are never trained, and an
    optimization barrier next to differentiated values would otherwise ask for their derivative, of
    zeros.

    Args:
      encoded: the encoded arrays.
      dtype: dtype of the result: bfloat16, float16 or float32.
      implementation: "mosaic", "xla", "reference", or None to choose and log one.

    Raises:
      ValueError: the arrays do not fit each other, or the dtype is not supported.
      NotImplementedError: the named implementation does not support this call.
    """
    q = jax.lax.stop_gradient(encoded.q)
    layout = encoded.layout
    if isinstance(q, Quantized):
        w = dequantize(q, dtype, implementation)
    else:
        w = dequantize_nf4(q, dtype, implementation)
    inner = math.prod(layout.inner)
    w = w.reshape(*w.shape[:-1], w.shape[-1] // inner, *layout.inner)
    return w if layout.moved is None else jnp.moveaxis(w, -1, layout.moved)


def _layout(format: Format, shape: tuple[int, ...], shards: tuple[int, ...]) -> Layout | str:
    """Return the layout, or the reason why there is none."""
    if format not in BLOCKS:
        raise ValueError(f"format={format!r}: choose from {', '.join(BLOCKS)}")
    if len(shards) != len(shape) or any(
        n < 1 or size % n for size, n in zip(shape, shards, strict=False)
    ):
        raise ValueError(
            f"a leaf {list(shape)} in {list(shards)} shards: each dim needs a number of shards "
            "that divides it"
        )
    block = BLOCKS[format]
    if len(shape) < 2:
        return f"a leaf {list(shape)} has less than 2 dims"
    if math.prod(shape) < block:
        return f"a leaf {list(shape)} has {math.prod(shape)} elements, less than a block of {block}"

    def scale_group(outer: Sequence[int], size: int) -> Group:
        if format != "nf4":
            return (1, 1)
        return choose_group(outer[-1] if outer else 1, size // block)

    shard = [size // n for size, n in zip(shape, shards, strict=True)]
    last_split = max((dim for dim, n in enumerate(shards) if n > 1), default=0)
    size = math.prod(shard[last_split:])
    if size % block == 0:
        group = scale_group(shard[:last_split], size)
        return Layout(format=format, inner=shape[last_split + 1 :], group=group)
    for dim in reversed(range(len(shape))):
        if shard[dim] % block == 0:
            group = scale_group(shard[:dim] + shard[dim + 1 :], shard[dim])
            return Layout(format=format, moved=dim - len(shape), group=group)
    return (
        f"a leaf {list(shape)} in {list(shards)} shards has {size} elements in a row of a shard's "
        f"dims {last_split} to {len(shape) - 1}, and {shard} along its dims: none is a multiple of "
        f"the block, {block}"
    )
