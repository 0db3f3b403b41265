"""Products overlapped with their collective: rings of t - 1 permutes over `tensor`.

A ring replaces a gather or a scatter. Each of t devices multiplies one piece of the sequence while
the next piece, or a partial sum, is in flight to its neighbour:

    column   y[B, T, F_t] = z[B, T_t, H] W[H, F_t]   step n: multiply the present piece, pass it on
    row      y[B, T_t, H] = h[B, T, F_t] V[F_t, H]   step n: multiply a piece of h, add it to the
                                                     partial sum that arrived

A permute moves one piece, B T H / t elements, so a ring moves as much as the collective: (t - 1) /
t of B T H per device. The transposes are written out, as rings of the other kind:

    column   dz[B, T_t, H] = dy W^T around a ring, like a row product. During the same products the
             pieces of z are passed around once more, because a gathered value is never saved. Then
             dW = z^T dy. If backward recomputes the layer, they were already passed around then.
    row      dh[B, T, F_t] = dy[B, T_t, H] V^T around a ring, like a column product; its pieces of
             dy are put together. Then dV = h^T dy.

The gradients of weights are single products outside of the rings. In pieces, each would be reduced
over `data` and `fsdp` separately, t times the bytes, and summed in 16 bits.

XLA for GPUs would schedule such permutes one after the other, and would merge the products of a
scattering ring into one. Barriers therefore tie each step's permutes to its products: both end
before the next step begins.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax.activations.flow import ANY, Split
from zerojax.sharding import TENSOR

Array = jax.Array
_Partial = Callable[[Array], list[Array]]


@dataclasses.dataclass(frozen=True)
class RingProduct:
    """A dot_general of data and a weight, without batch dims.

    Attributes:
      contract: contracted dims of the data, and of the weight.
      weight_first: whether the weight is the first operand.
      sequence: dim of the data that the ring passes around; it is not contracted.
      split: dim of the weight that `tensor` splits.
      options: `precision` and `preferred_element_type` of the dot_general.
    """

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    weight_first: bool
    sequence: int
    split: int
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, data: Array, weight: Array) -> Array:
        """Return the product."""
        of_data, of_weight = self.contract
        if self.weight_first:
            return jax.lax.dot_general(
                weight, data, ((of_weight, of_data), ((), ())), **dict(self.options)
            )
        return jax.lax.dot_general(
            data, weight, ((of_data, of_weight), ((), ())), **dict(self.options)
        )

    def of_data(self, d_result: Array, weight: Array, data: Any) -> Array:
        """Return the cotangent of the data, with the shape and dtype of `data`."""
        return jax.linear_transpose(
            lambda a: self(a, weight), jax.ShapeDtypeStruct(data.shape, data.dtype)
        )(d_result)[0]

    def of_weight(self, data: Array, d_result: Array, weight: Array) -> Array:
        """Return the cotangent of the weight."""
        return jax.linear_transpose(
            lambda w: self(data, w), jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        )(d_result)[0]

    def dims_of_result(
        self, data_ndim: int, weight_ndim: int
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return the positions in the result of the data's and of the weight's free dims."""
        data = [d for d in range(data_ndim) if d not in self.contract[0]]
        weight = [d for d in range(weight_ndim) if d not in self.contract[1]]
        first = len(weight) if self.weight_first else 0
        other = 0 if self.weight_first else len(data)
        return {d: first + n for n, d in enumerate(data)}, {
            d: other + n for n, d in enumerate(weight)
        }


def ring_product(
    eqn: jex.JaxprEqn, kind: str, w: int, splits: Sequence[Split | None]
) -> tuple[RingProduct | None, str]:
    """Return a product as a ring runs it, or None and the reason why no ring can run it.

    Args:
      eqn: the product's equation.
      kind: "column" or "row".
      w: position of its weight among the operands.
      splits: how its two operands are split.
    """
    if eqn.primitive.name != "dot_general":
        return None, f"; no ring, since it is a {eqn.primitive.name}"
    (contract, batch), (data, weight) = (
        eqn.params["dimension_numbers"],
        (splits[1 - w] or (), splits[w] or ()),
    )
    if batch[w]:
        return None, "; no ring, since it has batch dims"
    of_data, of_weight = (
        {d: e for d, e in enumerate(s) if e is not ANY and TENSOR in e} for s in (data, weight)
    )
    if list(of_weight.values()) != [(TENSOR,)]:
        return None, "; no ring, since tensor is not alone in one dim of its weight"
    (k,) = of_weight
    if kind == "column":
        if list(of_data.values()) != [(TENSOR,)]:
            return None, "; no ring, since tensor is not alone in one dim of its operand"
        (sequence,) = of_data
    else:
        if of_data != {contract[1 - w][contract[w].index(k)]: (TENSOR,)}:
            return None, "; no ring, since its operand is not known to be split as its weight is"
        # Dim 1 of the result is the sequence dim of the stream.
        free = [d for d in range(len(data)) if d not in contract[1 - w]]
        if w == 0 or len(free) < 2:
            return None, "; no ring, since dim 1 of its result is its weight's"
        sequence = free[1]
    options = tuple((name, eqn.params[name]) for name in ("precision", "preferred_element_type"))
    return RingProduct(
        (tuple(contract[1 - w]), tuple(contract[w])), w == 0, sequence, k, options
    ), ""


def column_products(
    z: Array,
    weights: Sequence[Array],
    products: Sequence[RingProduct],
    mesh: Mesh,
    again: bool = True,
) -> list[Array]:
    """Multiply z, split over `tensor` in its sequence, by weights split in a free dim.

    Args:
      z: [B, T_t, H], whose pieces go once around the ring for all products.
      weights: [H, F_t] each.
      products: products of z and each weight; their `sequence` is the same dim.
      mesh: the device mesh.
      again: whether the derivative passes the pieces of z around once more. Otherwise its forward
        puts them together, which is right if the derivative runs that forward anyway, because it is
        rematerialised.

    Returns:
      [B, T, F_t] for each weight.
    """
    dim = products[0].sequence
    weights = list(weights)
    placed = [p.dims_of_result(z.ndim, w.ndim) for p, w in zip(products, weights, strict=True)]
    z_spec = _spec(z.ndim, dim)
    w_specs = [_spec(w.ndim, p.split) for p, w in zip(products, weights, strict=True)]
    y_ndims = [len(of_z) + len(of_w) for of_z, of_w in placed]
    y_specs = [
        _spec(n, of_w[p.split]) for n, (_, of_w), p in zip(y_ndims, placed, products, strict=True)
    ]
    y_dims = [of_z[dim] for of_z, _ in placed]

    def forward_local(
        ring: _Ring, z: Array, weights: list[Array], whole: bool
    ) -> tuple[list[Array], list[Array]]:
        def multiplied(piece: Array) -> list[Array]:
            return [p(piece, w) for p, w in zip(products, weights, strict=True)]

        return _gathering(ring, z, dim, multiplied, y_dims, whole)

    def backward_local(
        ring: _Ring, weights: list[Array], d_ys: list[Array], z: list[Array]
    ) -> tuple[Array, list[Array]]:
        def piece_of_sum(n: Array) -> tuple[list[Array], Callable[[list[Array]], Array]]:
            rows = [ring.piece(d_y, n, at) for d_y, at in zip(d_ys, y_dims, strict=True)]
            return rows, lambda rows: _sum(
                [p.of_data(d, w, of_piece) for p, d, w in zip(products, rows, weights, strict=True)]
            )

        return _scattering(ring, piece_of_sum, z, dim)

    shape = list(z.shape)
    shape[dim] //= mesh.shape[TENSOR]
    of_piece = jax.ShapeDtypeStruct(tuple(shape), z.dtype)

    def multiply(z: Array, weights: list[Array], whole: bool) -> tuple[list[Array], list[Array]]:
        local = partial(forward_local, whole=whole)
        outs = (y_specs, [PartitionSpec()] * whole)
        return _island(local, mesh, (z_spec, w_specs), outs)(z, weights)

    @jax.custom_vjp
    def run(z: Array, weights: list[Array]) -> list[Array]:
        return multiply(z, weights, whole=False)[0]

    def forward(z: Array, weights: list[Array]) -> tuple[list[Array], Any]:
        ys, whole = multiply(z, weights, whole=not again)
        return ys, (weights, [z] if again else [], whole)

    def backward(
        saved: tuple[list[Array], list[Array], list[Array]], d_ys: list[Array]
    ) -> tuple[Array, list[Array]]:
        weights, pieces, whole = saved
        ins = (w_specs, y_specs, [z_spec] * len(pieces))
        outs = (z_spec, [PartitionSpec()] * len(pieces))
        d_z, gathered = _island(backward_local, mesh, ins, outs)(weights, d_ys, pieces)
        (whole,) = gathered or whole
        return d_z, [
            p.of_weight(whole, d_y, w) for p, d_y, w in zip(products, d_ys, weights, strict=True)
        ]

    run.defvjp(forward, backward)
    return run(z, weights)


def row_product(h: Array, weight: Array, product: RingProduct, mesh: Mesh) -> Array:
    """Multiply h by a weight, both split over `tensor` in a contracted dim, and scatter the sum.

    Args:
      h: [B, T, F_t].
      weight: [F_t, H].
      product: product of the two.
      mesh: the device mesh.

    Returns:
      [B, T_t, H], split over `tensor` in the sequence.
    """
    dim = product.sequence
    (of_h, of_w), (h_contract, w_contract) = (
        product.dims_of_result(h.ndim, weight.ndim),
        product.contract,
    )
    h_spec = _spec(h.ndim, h_contract[w_contract.index(product.split)])
    w_spec = _spec(weight.ndim, product.split)
    y_spec = _spec(len(of_h) + len(of_w), of_h[dim])

    def forward_local(ring: _Ring, h: Array, weight: Array) -> Array:
        def piece_of_sum(n: Array) -> tuple[list[Array], Callable[[list[Array]], Array]]:
            return [ring.piece(h, n, dim)], lambda rows: product(rows[0], weight)

        return _scattering(ring, piece_of_sum, [], dim)[0]

    def backward_local(ring: _Ring, weight: Array, d_y: Array, h: Array) -> tuple[Array, Array]:
        shape = list(h.shape)
        shape[dim] //= ring.size
        of_piece = jax.ShapeDtypeStruct(tuple(shape), h.dtype)
        (d_h,), (whole,) = _gathering(
            ring,
            d_y,
            of_h[dim],
            lambda piece: [product.of_data(piece, weight, of_piece)],
            [dim],
            whole=True,
        )
        return d_h, whole

    @jax.custom_vjp
    def run(h: Array, weight: Array) -> Array:
        return _island(forward_local, mesh, (h_spec, w_spec), y_spec)(h, weight)

    def forward(h: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
        return run(h, weight), (h, weight)

    def backward(saved: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
        h, weight = saved
        d_h, whole = _island(
            backward_local, mesh, (w_spec, y_spec, h_spec), (h_spec, PartitionSpec())
        )(weight, d_y, h)
        return d_h, product.of_weight(h, whole, weight)

    run.defvjp(forward, backward)
    return run(h, weight)


# --- on one device --------------------------------------------------------------------------------


def _island(local: Callable[..., Any], mesh: Mesh, ins: Any, outs: Any) -> Callable[..., Any]:
    """Return a function of arrays split over `tensor`, given its computation on one device.

    Other axes are left to the partitioner, as outside. The first argument of `local` is its
    device's position in the ring.
    """
    axes = {TENSOR}
    ins = (PartitionSpec(TENSOR), *ins)
    mapped = jax.shard_map(
        lambda ring, *args: local(_Ring(ring[0], mesh.shape[TENSOR]), *args),
        mesh=mesh,
        in_specs=ins,
        out_specs=outs,
        axis_names=axes,
        check_vma=False,
    )
    # Not axis_index: next to arrays in host memory, XLA refuses the partition's number if some axes
    # are left to it.
    return lambda *args: mapped(jax.lax.iota(jnp.int32, mesh.shape[TENSOR]), *args)


def _spec(ndim: int, dim: int) -> PartitionSpec:
    return PartitionSpec(*(TENSOR if d == dim else None for d in range(ndim)))


@dataclasses.dataclass(frozen=True)
class _Ring:
    """One device's position in the ring.

    Attributes:
      place: position i32[], from 0.
      size: number of devices of the ring.
    """

    place: Array
    size: int

    def passed(self, piece: Array) -> Array:
        """Pass a piece to the next device, and return the piece of the device behind."""
        return jax.lax.ppermute(piece, TENSOR, [(n, (n + 1) % self.size) for n in range(self.size)])

    def behind(self, n: int) -> Array:
        """Return the position of the device that is n steps behind."""
        return jax.lax.rem(self.place + (self.size - n % self.size), self.size)

    def piece(self, a: Array, n: Array, dim: int) -> Array:
        """Return piece n of an array along dim `dim`."""
        size = a.shape[dim] // self.size
        return jax.lax.dynamic_slice_in_dim(a, n * size, size, dim)


def _sum(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    for a in arrays[1:]:
        total = total + a
    return total


class _Whole:
    """Put pieces together, in place."""

    def __init__(self, dim: int, count: int) -> None:
        self.dim = dim
        self.count = count
        self._value = None

    def put(self, piece: Array, n: Array) -> None:
        """Insert the piece of device n."""
        if self._value is None:
            shape = list(piece.shape)
            shape[self.dim] *= self.count
            self._value = jnp.zeros(shape, piece.dtype)
        self._value = jax.lax.dynamic_update_slice_in_dim(
            self._value, piece, n * piece.shape[self.dim], self.dim
        )

    @property
    def value(self) -> Array:
        """The array of all pieces."""
        assert self._value is not None
        return self._value


def _gathering(
    ring: _Ring, piece: Array, dim: int, multiplied: _Partial, dims: Sequence[int], whole: bool
) -> tuple[list[Array], list[Array]]:
    """Pass pieces around; each device computes pieces of its results from all of them, in turn.

    Args:
      ring: this device's position.
      piece: this device's piece.
      dim: dim along which the pieces are cut.
      multiplied: function from a piece to its products.
      dims: for each result, the dim along which its pieces are put together.
      whole: whether to put the passed pieces together too.

    Returns:
      The results, and a list of the pieces put together, empty unless `whole`.
    """
    results = [_Whole(d, ring.size) for d in dims]
    pieces = _Whole(dim, ring.size)
    for n in range(ring.size):
        if whole:
            pieces.put(piece, ring.behind(n))
        made = multiplied(piece)
        if n < ring.size - 1:
            piece, *made = jax.lax.optimization_barrier((ring.passed(piece), *made))
        for result, part in zip(results, made, strict=True):
            result.put(part, ring.behind(n))
    return [result.value for result in results], [pieces.value] if whole else []


def _scattering(
    ring: _Ring,
    piece_of_sum: Callable[[Array], tuple[list[Array], Callable[[list[Array]], Array]]],
    others: list[Array],
    dim: int,
) -> tuple[Array, list[Array]]:
    """Pass partial sums around; each device adds its own part to each of them.

    Args:
      ring: this device's position.
      piece_of_sum: function from the number of a piece to this device's operands for it, and to a
        function that computes this device's part of the sum from them.
      others: this device's pieces of other arrays, which are passed around during the same products
        and put together.
      dim: dim along which these pieces are cut.

    Returns:
      This device's piece of the sum, and the arrays that were put together.
    """
    wholes = [_Whole(dim, ring.size) for _ in others]
    total = list[Array]()
    for n in range(ring.size):
        for whole, other in zip(wholes, others, strict=True):
            whole.put(other, ring.behind(n))
        if n == ring.size - 1:
            others = []
        # A sum starts one step ahead of the device that owns it, and reaches that device last.
        operands, product = piece_of_sum(ring.behind(n + 1))
        if total:
            # Without the barrier, XLA would merge all products into one.
            *total, operands = jax.lax.optimization_barrier((*total, operands))
        moved = [ring.passed(a) for a in (*total, *others)]
        own = product(operands)
        *moved, own = jax.lax.optimization_barrier((*moved, own))
        others = moved[len(total) :]
        total = [moved[0] + own] if total else [own]
    return total[0], [whole.value for whole in wholes]
