"""Loops over tiles under sequence parallelism.

The partial sum of each device of a tensor group is an entry of an array.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.activations.flow import Split, as_spec, tensor_dims
from zerojax.activations.sequence_ops import constrain
from zerojax.jaxprs import FlatJaxpr, Instruction, bind, find_product, read
from zerojax.sharding import TENSOR, without_axes
from zerojax.tiling import TileLoop, is_wide_product, loop_over, wide_product

Array = jax.Array


class Walked(NamedTuple):
    """What is known about the values of a program that ran with sequence parallelism.

    Attributes:
      kinds: for the result of a product, its kind, "column" or "row", and the position of its
        weight.
      scattered: slots of results that were scattered.
      splits: how each value is split.
    """

    kinds: Mapping[int, tuple[str, int]]
    scattered: Set[int]
    splits: Mapping[int, Split | None]


class Entries:
    """The unit of a loop over tiles, computed as [t_tensor, ...] entries, one per device.

    A column product of copies of x, and the partial sums of a row product, are

        h[B, T, F_t]         = sum_d x[t_tensor, B, T, D] W[D, t_tensor, F/t]
        y[t_tensor, B, T, H] = sum_f h[B, T, t_tensor, F/t] V[t_tensor, F/t, H]

    so neither y nor the cotangent of x is reduced while the loop adds to it.

    Attributes:
      serves: whether the unit has this form: only column products read x, and a row product
        computes its result.
      dtype: dtype of the operands of the row product.
    """

    def __init__(self, unit: FlatJaxpr, walked: Walked, copied: set[int], mesh: Mesh) -> None:
        """Check a unit that was walked with the slots `copied` gathered."""
        self.unit = unit
        self.walked = walked
        self.copied = copied
        self.mesh = mesh
        self.dtype: Any = None
        self.serves = self._check()

    def _check(self) -> bool:
        for i in self.unit.instructions:
            kind, w = self._kind(i)
            reads = [
                n for n, ref in enumerate(i.ins) if isinstance(ref, int) and ref in self.copied
            ]
            is_plain = i.eqn.primitive.name == "dot_general"
            is_row = bool(kind) and i.outs[0] in self.walked.scattered
            if reads and not (kind == "column" and reads == [1 - w] and is_plain):
                return False
            is_result = i.outs == self.unit.outputs
            if is_row and not (is_result and (is_plain or is_wide_product(i.eqn))):
                return False
            if reads or is_row:
                split = self.walked.splits[i.ins[w]]  # pyright: ignore[reportArgumentType]
                assert split is not None
                if split[self._split_dim(i, w)] != (TENSOR,):
                    return False
            if is_row:
                aval: Any = i.eqn.invars[w].aval
                self.dtype = aval.dtype
        return True

    def _kind(self, i: Instruction) -> tuple[str, int]:
        """Return the kind of a product, and the position of its weight; ("", 0) for no product."""
        return self.walked.kinds.get(i.outs[0], ("", 0)) if i.outs else ("", 0)

    def loop(self, loop: TileLoop, values: Sequence[Any]) -> Array:
        """Return the loop's result; a row product's has a dim of entries after the first dim."""
        num_consts = loop.sizes[0]
        tiles = [values[n] for n in loop.tiles]
        parts = [values[n] for n in loop.parts]
        shared = [v for n, v in enumerate(values) if n not in (*loop.tiles, *loop.parts)]

        def unit(tiles: list[Any], shared: list[Any], parts: list[Any]) -> Array:
            return self._run([*shared[:num_consts], *tiles, *shared[num_consts:], *parts])

        return loop_over(unit, tiles, shared, parts, num_out=loop.num_out, summed=loop.summed)

    def _run(self, values: Sequence[Any]) -> Array:
        slots: dict[int, Any] = dict(zip(self.unit.inputs, values, strict=True))
        for i in self.unit.instructions:
            operands = [read(ref, slots) for ref in i.ins]
            _, w = self._kind(i)
            dot = find_product(i.eqn)
            if not self.copied.isdisjoint(i.reads):
                outs = [self._column(i, operands, w)]
            elif dot is not None and i.outs[0] in self.walked.scattered:
                outs = [self._row(i, dot, operands, w)]
            else:
                outs = bind(i.eqn, operands)
            slots.update(zip(i.outs, outs, strict=True))
        return slots[self.unit.outputs[0]]  # pyright: ignore[reportArgumentType]

    def _split(self, a: Array, dim: int) -> Array:
        """Return an array split in `dim` as [t_tensor, ...]: W[D, F_t] -> W[t_tensor, D, F/t]."""
        t = self.mesh.shape[TENSOR]
        entries = a.reshape(*a.shape[:dim], t, a.shape[dim] // t, *a.shape[dim + 1 :])
        return jnp.moveaxis(entries, dim, 0)

    def _dot(self, eqn: jex.JaxprEqn, values: Sequence[Array]) -> Array:
        """Return the entries of a product, for operands [t, ...]."""
        contract, batch = eqn.params["dimension_numbers"]
        numbers: Any = (
            tuple(tuple(d + 1 for d in dims) for dims in contract),
            tuple((0, *(d + 1 for d in dims)) for dims in batch),
        )
        options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
        return jax.lax.dot_general(*values, dimension_numbers=numbers, **options)

    def _column(self, i: Instruction, values: list[Any], w: int) -> Array:
        contract, batch = i.eqn.params["dimension_numbers"]
        k = self._split_dim(i, w)
        operands = list(values)
        operands[w] = self._split(values[w], k)
        y = self._dot(i.eqn, operands)
        # The entries are the first dim. Move them in front of the dim of the weight that they
        # split.
        avals: list[Any] = [v.aval for v in i.eqn.invars]
        free = list[list[int]]()
        for n, aval in enumerate(avals):
            used = (*contract[n], *batch[n])
            free.append([d for d in range(aval.ndim) if d not in used])
        place = len(batch[0]) + free[w].index(k)
        if w == 1:
            place += len(free[0])
        out: Any = i.eqn.outvars[0].aval
        return jnp.moveaxis(y, 0, place).reshape(out.shape)

    def _row(self, i: Instruction, dot: jex.JaxprEqn, values: list[Any], w: int) -> Array:
        contract = dot.params["dimension_numbers"][0]
        k = self._split_dim(i, w)
        dims = {w: k, 1 - w: contract[1 - w][contract[w].index(k)]}
        operands = [self._split(v, dims[n]) for n, v in enumerate(values)]
        if is_wide_product(i.eqn):
            y = jax.vmap(wide_product)(*operands)
        else:
            y = self._dot(i.eqn, operands)
        spec = without_axes(as_spec(self.walked.splits[i.outs[0]] or ()), TENSOR)
        return constrain(y, (TENSOR, *spec), self.mesh)

    def _split_dim(self, i: Instruction, w: int) -> int:
        """Return the dim of the product's weight that `tensor` splits."""
        ref = i.ins[w]
        assert isinstance(ref, int)
        return tensor_dims(self.walked.splits[ref] or ())[0]
