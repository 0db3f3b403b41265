"""How activations are split over the mesh: dim 0 as the batch is."""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax.sharding.mesh import BATCH_AXES, num_batch_shards
from zerojax.sharding.specs import named


def batch_spec(ndim: int, rest: Any = None) -> tuple[Any, ...]:
    """Return the spec of activations: dim 0 split as the batch is, `rest` for the others."""
    return (BATCH_AXES, *(rest,) * (ndim - 1)) if ndim else ()


def constrain_batch(mesh: Mesh, x: Any) -> Any:
    """Keep dim 0 of activations split as the batch is; other dims are left to the partitioner."""

    def constrain(a: jax.Array) -> jax.Array:
        if a.ndim == 0 or a.shape[0] % num_batch_shards(mesh):
            return a
        spec = PartitionSpec(BATCH_AXES, *(PartitionSpec.UNCONSTRAINED,) * (a.ndim - 1))
        return jax.lax.with_sharding_constraint(a, named(mesh, spec))

    return jax.tree.map(constrain, x)
