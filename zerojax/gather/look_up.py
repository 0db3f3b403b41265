"""The gradient of a look-up: rows are sent to the table's shards, so no device sums the full table.

    forward    y[B_(data, fsdp), H] = table[ids[B_(data, fsdp)]]   from the gathered table[V, H]
    backward   g[B_(data, fsdp), H] -> g[B_data, H_fsdp]           an all_to_all of rows
               sum over rows in float32 -> [V, H_fsdp]{U_data}     a scatter, local
               -> table's shard, reduced over `data`               an all_to_all of 1/N of the table

By default the partitioner sums a full table [V, H] on each device and reduce_scatters it. If the
table is also the output matrix, that is the second reduction of the same V H elements. The two
gradients cannot be added first: a program cannot hold an unfinished sum over devices as a value, so
each is reduced where it is computed, at either end of backward. If they could be added, the head's
full gradient would stay in memory through all of backward. Sending rows avoids both: a device sends
R H + V H / N elements for its R rows, where the reduction takes V H.

If a device has so many rows that sending them takes more elements, the full table is reduced, and
its gradient is constrained to be unsharded before a shard is cut from it. Without that constraint
the shard's sharding would propagate to the scatter. If H is sharded (because N does not divide V,
as with GPT-2's 50,257), the partitioner would then consider sending rows from `(data, fsdp)` to
`fsdp` in one move. It can only do that by gathering all rows, and it would warn of "Involuntary
full rematerialization".
"""

import math
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.gather.all_gather import gather
from zerojax.jaxprs import bind
from zerojax.sharding import DATA, Spec, batch_axes, num_batch_shards, without_axes

Array = jax.Array


def is_look_up(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation takes full rows of a matrix.

    Examples are `table[ids]` and `jnp.take(table, ids, axis=0)`.
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
    table_shape: tuple[int, ...],
    ids_shape: tuple[int, ...],
    cotangent: Spec,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> bool:
    """Return whether sending rows is possible and takes fewer elements than reducing the table.

    The rows are from a device's own batch shard. They are sent to the shards of the table's
    gradient.

    Args:
      table_shape: shape of the table, (V, H).
      ids_shape: shape of the indices; dim 0 is taken as the batch, and the last dim holds one
        index.
      cotangent: spec of the table's gradient.
      mesh: the device mesh.
      axes: the ZeRO axes of the table.
    """
    # XLA would gather the rows to send them over several axes at once.
    if len(axes) != 1:
        return False
    num_shards = mesh.shape[axes[0]]
    vocab_size, width = table_shape
    # A table that the user already shards (tensor parallelism) is left to the partitioner.
    if any(without_axes(cotangent, *axes)):
        return False
    if width % num_shards or ids_shape[0] % num_batch_shards(mesh):
        return False
    # Elements, divided by `width`: the device's rows plus a shard of the table, against the full
    # table.
    rows_per_device = math.prod(ids_shape[:-1]) / num_batch_shards(mesh)
    return rows_per_device + vocab_size / num_shards < vocab_size


def look_up(
    eqn: jex.JaxprEqn,
    table: Array,
    ids: Array,
    cotangent: Spec,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> Array:
    """Apply a look-up to a gathered table.

    Backward sends rows to the shards of the table's gradient if that takes fewer bytes than
    reducing the full table.

    Args:
      eqn: the look-up (`is_look_up`).
      table: [V, H], gathered.
      ids: i32[B, ..., 1], indices of the rows.
      cotangent: spec of the table's gradient.
      mesh: the device mesh.
      axes: the ZeRO axes of the table.

    Returns:
      The rows, [B, ..., H].
    """
    if not sends_rows(table.shape, ids.shape, cotangent, mesh, axes):
        # Unsharded here, and cut into shards where the table was gathered.
        unsharded = without_axes(cotangent, *axes)
        return bind(eqn, [gather(table, unsharded, unsharded, unsharded, mesh), ids])[0]
    abstract_table = jax.ShapeDtypeStruct(table.shape, table.dtype)

    @jax.custom_vjp
    def op(table: Array, ids: Array) -> Array:
        return bind(eqn, [table, ids])[0]

    def forward(table: Array, ids: Array) -> tuple[Array, Array]:
        return op(table, ids), ids

    def backward(ids: Array, g: Array) -> tuple[Array, None]:
        return _sum_rows(eqn, abstract_table, ids, g, cotangent, mesh, axes[0]), None

    op.defvjp(forward, backward)
    return op(table, ids)


def _sum_rows(
    eqn: jex.JaxprEqn,
    abstract_table: jax.ShapeDtypeStruct,
    ids: Array,
    g: Array,
    cotangent: Spec,
    mesh: Mesh,
    axis: str,
) -> Array:
    """Return the gradient of table[V, H], with spec `cotangent`, from the gradient of its rows."""
    dtype = abstract_table.dtype

    def constrain(value: Array, *spec: Any) -> Array:
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*spec)))

    def by_replica(value: Array) -> Array:
        # A dim for `data` makes the sums of different replicas different elements, so they are
        # added where this code says.
        return constrain(value.reshape(mesh.shape[DATA], -1, *value.shape[1:]), *batch_axes(mesh))

    def scatter(ids: Array, g: Array) -> Array:
        # The look-up's own transpose, which treats ids out of range as the look-up does.
        summed_table = jax.ShapeDtypeStruct(abstract_table.shape, g.dtype)
        transpose = jax.linear_transpose(lambda table: bind(eqn, [table, ids])[0], summed_table)
        (table,) = transpose(g)
        return table

    g = by_replica(g)
    ids = constrain(by_replica(ids), DATA)
    # [data, B, ..., H_fsdp]: sent in the cotangent's own dtype
    g = constrain(g, DATA, *(None,) * (g.ndim - 2), axis)
    # A device now adds the rows of its full ZeRO group, N times as many as its own. In bfloat16 the
    # sum of a frequent token would stop growing.
    sums = jax.vmap(scatter)(ids, g.astype(jnp.promote_types(dtype, jnp.float32)))
    sums = constrain(sums, DATA, None, axis).astype(dtype)
    sums = constrain(sums, DATA, *cotangent)
    # lax.reduce, since jnp.sum would widen 16-bit values and send twice the bytes.
    total = jax.lax.reduce(sums, jnp.zeros((), dtype), jax.lax.add, (0,))
    return constrain(total, *cotangent)
