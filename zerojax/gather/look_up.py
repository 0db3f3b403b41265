"""The gradient of a look-up: rows travel to the shards of the table, so that no device sums a whole
table.

    forward    y[B_(data, fsdp), H] = table[ids[B_(data, fsdp)]]             of the gathered table[V, H]
    backward   g[B_(data, fsdp), H] -> g[B_data, H_fsdp]                     an all_to_all of rows
               sum over rows in float32 -> [V, H_fsdp]{U_data}               a scatter, local
               -> table's shard, reduced over `data`                         an all_to_all of 1/N of the table

Left to itself the partitioner sums a whole table [V, H] on each device and reduce_scatters it. For
a table that is also the output matrix that is the second reduction of the same V H elements. The
two cannot be added first: a sum over devices is no value that a program may hold, so each is
reduced where it is made, at either end of backward. If they could, the head's whole gradient would
stay in memory through all of backward. Rows need neither: a device sends R H + V H / N elements,
for R rows of its own, where the reduction takes V H.

Where a device has so many rows that these are more, the whole table is reduced, and its gradient is
constrained to be whole before a shard is cut from it. Without that the shard's sharding would reach
the scatter. If H is split (where N does not divide V, as GPT-2's 50,257), the partitioner would
then weigh sending rows from `(data, fsdp)` to `fsdp` in one move, which it can do only by gathering
all of them, and would warn of "Involuntary full rematerialization".
"""

import math
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.gather.all_gather import gather
from zerojax.jaxprs import bind
from zerojax.sharding import BATCH_AXES, DATA, Spec, num_batch_shards, without_axis

Array = jax.Array


def is_look_up(eqn: jex.JaxprEqn) -> bool:
    """Tell whether an equation takes whole rows of a matrix: `table[ids]`, or `jnp.take(table, ids,
    axis=0)`.
    """
    if eqn.primitive.name != "gather":
        return False
    avals: list[Any] = [v.aval for v in eqn.invars]
    table, ids = avals
    numbers = eqn.params["dimension_numbers"]
    return (
        table.ndim == 2
        and ids.ndim > 1
        and not numbers.operand_batching_dims
        and (numbers.start_index_map, numbers.collapsed_slice_dims) == ((0,), (0,))
        and numbers.offset_dims == (ids.ndim - 1,)
        and tuple(eqn.params["slice_sizes"]) == (1, table.shape[1])
    )


def sends_rows(
    table: tuple[int, ...], ids: tuple[int, ...], cotangent: Spec, mesh: Mesh, axis: str
) -> bool:
    """Tell whether rows can be sent to the shards of a table's gradient, and are fewer than the
    table has.

    Args:
      table: its shape, (V, H).
      ids: shape of the indices, whose dim 0 is taken for the batch and whose last holds one index.
      cotangent: spec of the table's gradient.
      mesh: the device mesh.
      axis: the ZeRO axis.
    """
    shards, (rows, width) = mesh.shape[axis], table
    # The user's own split of a table (tensor parallelism) is left to the partitioner.
    if any(without_axis(cotangent, axis)) or width % shards or ids[0] % num_batch_shards(mesh):
        return False
    # Of elements over `width`: own rows, and a shard of the table, against the whole table.
    return math.prod(ids[:-1]) / num_batch_shards(mesh) + rows / shards < rows


def look_up(
    eqn: jex.JaxprEqn, table: Array, ids: Array, cotangent: Spec, mesh: Mesh, axis: str
) -> Array:
    """Apply a look-up to a gathered table; its gradient arrives at the table's shards by rows,
    where that takes fewer bytes.

    Args:
      eqn: the look-up (`is_look_up`).
      table: [V, H], gathered.
      ids: i32[B, ..., 1], rows to take.
      cotangent: spec of the table's gradient.
      mesh: the device mesh.
      axis: the ZeRO axis.

    Returns:
      The rows, [B, ..., H].
    """
    whole = without_axis(cotangent, axis)
    if not sends_rows(table.shape, ids.shape, cotangent, mesh, axis):
        # Whole here, and cut where the table was gathered.
        return bind(eqn, [gather(table, whole, whole, whole, mesh), ids])[0]
    shape, dtype = table.shape, table.dtype

    @jax.custom_vjp
    def op(table: Array, ids: Array) -> Array:
        return bind(eqn, [table, ids])[0]

    def forward(table: Array, ids: Array) -> tuple[Array, Array]:
        return op(table, ids), ids

    def backward(ids: Array, g: Array) -> tuple[Array, None]:
        return _sum_rows(eqn, shape, dtype, ids, g, cotangent, mesh, axis), None

    op.defvjp(forward, backward)
    return op(table, ids)


def _sum_rows(
    eqn: jex.JaxprEqn,
    shape: tuple[int, ...],
    dtype: Any,
    ids: Array,
    g: Array,
    cotangent: Spec,
    mesh: Mesh,
    axis: str,
) -> Array:
    """Return the gradient of a table[V, H], with spec `cotangent`, from that of the rows taken."""
    replicas = mesh.shape[DATA]

    def constrain(value: Array, *spec: Any) -> Array:
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*spec)))

    def by_replica(value: Array) -> Array:
        # A dim for `data`: sums of different replicas are then different elements, and are added
        # where this code says.
        return constrain(value.reshape(replicas, -1, *value.shape[1:]), *BATCH_AXES)

    def scatter(ids: Array, g: Array) -> Array:
        # The look-up's own transpose, so that it treats ids out of range as the look-up does.
        (table,) = jax.linear_transpose(
            lambda t: bind(eqn, [t, ids])[0], jax.ShapeDtypeStruct(shape, g.dtype)
        )(g)
        return table

    g, ids = by_replica(g), constrain(by_replica(ids), DATA)
    g = constrain(
        g, DATA, *(None,) * (g.ndim - 2), axis
    )  # [data, B, ..., H_fsdp]: sent in the dtype in which it came
    # A device now adds the rows of all of its ZeRO group, N times as many as its own: a frequent
    # token's sum in bfloat16 would stop growing.
    sums = jax.vmap(scatter)(ids, g.astype(jnp.promote_types(dtype, jnp.float32)))
    sums = constrain(sums, DATA, None, axis).astype(dtype)
    sums = constrain(sums, DATA, *cotangent)
    # lax.reduce, since jnp.sum would widen 16 bits, and send twice the bytes.
    total = jax.lax.reduce(sums, jnp.zeros((), dtype), jax.lax.add, (0,))
    return constrain(total, *cotangent)
