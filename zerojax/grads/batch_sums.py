"""Equations that sum over the batch, and equations that are linear in such sums.

    dot_general    x[B, D], dy[B, F] -> g[D, F]           sums dim 0 of both operands
    reduce_sum     dy[B, F] -> g[F]                       sums dim 0
    scatter-add    g[V, H], ids[B, 1], dy[B, H] -> g      adds rows, which are the batch
    shard_map      psum(g, (data, fsdp)) as its last step

`find_cut_dims` returns the dims that are summed. `find_reductions` finds the last steps of a
`jax.shard_map` that reduce over the batch's axes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.jaxprs import LINEAR, Instruction, Ref, bind, list_regions, read
from zerojax.sharding import parse_axes

_REDUCTIONS = frozenset({"psum", "psum_invariant", "reduce_scatter"})
_MOVED = frozenset(
    {"transpose", "convert_element_type", "copy", "name", "pvary", "broadcast_in_dim"}
)
"""Equations that may accompany a reduction in a shard_map: they act alike on arrays and shards."""
BILINEAR = frozenset({"mul", "div", "dot_general", "conv_general_dilated"})
"""Equations with exactly one cotangent operand."""
ADDITIVE = frozenset(
    {"add", "sub", "add_any", "concatenate", "dynamic_update_slice", "complex", "scatter-add"}
)
"""Equations that are linear in all operands together: an operand without rows counts once."""
LINEAR_IN_SUMS = (
    LINEAR
    | ADDITIVE
    | BILINEAR
    | _MOVED
    | frozenset(
        {
            "rev",
            "pad",
            "select_n",
            "gather",
            "dynamic_slice",
            "cumsum",
            "sharding_constraint",
            "reduce",
            "real",
            "imag",
            "conj",
            "optimization_barrier",
            "all_to_all",
            "fft",
            "triangular_solve",
            "stop_gradient",
            "reshard",
        }
    )
)
SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "reduce", "scatter-add"})
"""Equations that may sum over the batch."""


class Step(NamedTuple):
    """An equation of a shard_map's body between a sum and a result, and the operand it reads."""

    eqn: jex.JaxprEqn
    operand: Ref


# --- sums over a dim of arrays ------------------------------------------------------------------


def find_cut_dims(eqn: jex.JaxprEqn, batch_dims: Sequence[int]) -> dict[int, int]:
    """Return {operand: dim to cut} for a sum over the batch; empty if it is not such a sum.

    Args:
      eqn: an equation in `SUMS`.
      batch_dims: for each operand, the dim that is split like the batch, or -1.
    """
    name = eqn.primitive.name
    params = eqn.params
    if name == "dot_general":
        (lhs_dims, rhs_dims), _ = params["dimension_numbers"]
        for lhs, rhs in zip(lhs_dims, rhs_dims, strict=True):
            if lhs == batch_dims[0] or rhs == batch_dims[1]:
                return {0: lhs, 1: rhs}
        return {}
    if name == "conv_general_dilated":
        # In a kernel's gradient, the batch is the feature dim that both operands have.
        numbers = params["dimension_numbers"]
        lhs = numbers.lhs_spec[1]
        rhs = numbers.rhs_spec[1]
        is_sum = params["feature_group_count"] == params["batch_group_count"] == 1
        return {0: lhs, 1: rhs} if is_sum and batch_dims[0] == lhs else {}
    if name == "scatter-add":
        return _find_cut_dims_of_scatter(eqn, batch_dims)
    return {0: batch_dims[0]} if batch_dims[0] in _list_summed_dims(eqn) else {}


def _find_cut_dims_of_scatter(eqn: jex.JaxprEqn, batch_dims: Sequence[int]) -> dict[int, int]:
    """Return the dims of the indices and of the added rows that are the batch."""
    numbers = eqn.params["dimension_numbers"]
    _, ids_dim, rows_dim = batch_dims
    num_dims = _ndim(eqn.invars[2])
    # All dims of the indices except the last correspond to these dims of the rows, in order.
    row_dims = [d for d in range(num_dims) if d not in numbers.update_window_dims]
    position = ids_dim if ids_dim < len(row_dims) else -1
    if rows_dim in row_dims:
        position = row_dims.index(rows_dim)
    # Batching dims are not summed.
    if position < 0 or position in numbers.scatter_indices_batching_dims:
        return {}
    return {1: position, 2: row_dims[position]}


def _list_summed_dims(eqn: jex.JaxprEqn) -> Sequence[int]:
    """Return the dims over which a `reduce_sum` or `reduce` sums; empty for other reductions."""
    if eqn.primitive.name == "reduce_sum":
        return eqn.params["axes"]
    combining = [inner.primitive.name for inner in eqn.params["jaxpr"].eqns]
    return eqn.params["dimensions"] if combining == ["add"] else ()


def _ndim(v: Any) -> int:
    return len(getattr(v.aval, "shape", ()))


def counts_once(i: Instruction, position: int) -> bool:
    """Return whether an operand is added, so that it is put in row 0 if it has no rows."""
    name = i.eqn.primitive.name
    if name == "select_n":
        return position > 0
    if name == "dynamic_update_slice":
        return position < 2
    return name in ADDITIVE and not (name == "scatter-add" and position == 1)


def is_initial_value(i: Instruction, position: int) -> bool:
    """Return whether a sum starts from an operand, which then counts once, not per piece."""
    return (i.eqn.primitive.name, position) in (("scatter-add", 0), ("reduce", 1))


# --- reductions in a shard_map ------------------------------------------------------------------


def find_reductions(
    eqn: jex.JaxprEqn, mesh: Mesh, axes: Sequence[str]
) -> list[Sequence[Step] | None]:
    """Return for each result of a shard_map the steps from a batch sum to the result, or None.

    Args:
      eqn: the shard_map.
      mesh: the device mesh.
      axes: axes of the batch over which a result must be summed.
    """
    needed_axes = {axis for axis in axes if mesh.shape[axis] > 1}
    if not needed_axes:  # one row: nothing to leave out
        return [None] * len(eqn.outvars)
    (region,) = list_regions(eqn)
    program = region.flatten()
    makers = {out: i for i in program.instructions for out in i.outs}
    reductions: list[Sequence[Step] | None] = []
    for ref in program.outputs:
        steps, summed_axes = _follow_reductions(ref, makers)
        reductions.append(steps if needed_axes <= summed_axes else None)
    return reductions


def _follow_reductions(
    ref: Ref, makers: Mapping[int, Instruction]
) -> tuple[Sequence[Step], set[str]]:
    """Return the reductions and moves that end in a result, and the axes they sum over."""
    steps: list[Step] = []
    summed_axes: set[str] = set()
    while isinstance(ref, int) and ref in makers:
        i = makers[ref]
        name = i.eqn.primitive.name
        if name not in _MOVED | _REDUCTIONS:
            break
        if name in _REDUCTIONS:
            params = i.eqn.params
            # A scatter that is not tiled drops a dim that the full array has.
            if not params.get("tiled", True) or params.get("axis_index_groups") is not None:
                break
            summed_axes |= _list_summed_axes(i.eqn)
        ref = i.ins[i.outs.index(ref)]
        steps.append(Step(i.eqn, ref))
    return steps[::-1], summed_axes


def apply_without_batch_sums(
    steps: Sequence[Step], slots: Mapping[int, Any], axes: Sequence[str]
) -> jax.Array:
    """Return a result of a shard_map as a row of this device, not summed over some axes.

    Args:
      steps: the steps from the sum to the result.
      slots: values of the body's slots.
      axes: the axes that split the rows.
    """
    value = read(steps[0].operand, slots)
    for step in steps:
        if step.eqn.primitive.name not in _REDUCTIONS:
            (value,) = bind(step.eqn, [value])
            continue
        other_axes = tuple(sorted(_list_summed_axes(step.eqn) - set(axes)))
        if other_axes:
            value = jax.lax.psum(value, other_axes)
    return jnp.asarray(value)[None]


def _list_summed_axes(eqn: jex.JaxprEqn) -> set[str]:
    """Return the axes over which a reduction in a shard_map sums."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return set(parse_axes(axes))
