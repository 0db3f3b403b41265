"""One annotated operation: all_gather forward, reduce_scatter backward.

    forward    W[D_fsdp, F]   -> W[D, F]            an all_gather of the compute dtype
    backward   g[D, F]{U_fsdp} -> g[D_fsdp, F]      a reduce_scatter ({U_x}: unreduced over axis x)

Both directions are only sharding constraints, which XLA turns into collectives. The transpose of
`with_sharding_constraint` constrains the cotangent to the *same* sharding, which for a gather would
be an all_reduce. The derivative is therefore written out: it constrains the tangent, and hence the
cotangent, to the shard (ZeRO, section 5.2; arXiv:1910.02054).

Every stage uses this operation. If a parameter is stored unsharded (stages 0 to 2), the forward
constraint is the identity, and only the cotangent moves to where its stage stores it.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.sharding import Spec


def gather(x: jax.Array, stored: Spec, unsharded: Spec, cotangent: Spec, mesh: Mesh) -> jax.Array:
    """All_gather a shard; reduce_scatter its cotangent.

    Args:
      x: the parameter as stored, of any shape.
      stored: spec of `x` before the gather.
      unsharded: spec of the result: `stored` without the ZeRO axes.
      cotangent: spec to which the gradient of `x` is reduced.
      mesh: the device mesh.

    Returns:
      `x`, with `unsharded` as its sharding. Its transpose sends a cotangent to `cotangent`.
    """

    def constrain(value: jax.Array, spec: Spec) -> jax.Array:
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*spec)))

    def forward(shard: jax.Array) -> jax.Array:
        # The inner constraint pins the operand. Without it, the partitioner may propagate
        # `unsharded` back to the operation that computes the shard.
        return shard if stored == unsharded else constrain(constrain(shard, stored), unsharded)

    op = jax.custom_jvp(forward)

    @op.defjvp
    def op_jvp(
        primals: tuple[jax.Array], tangents: tuple[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        # The transpose of a constraint is the same constraint on the cotangent. A custom_vjp would
        # be correct too, but a scan could not see through it that a residual is one of its own
        # inputs, and would stack a copy for every layer.
        return forward(*primals), constrain(tangents[0], cotangent)

    return op(x)
