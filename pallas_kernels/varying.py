"""Track the axes of a surrounding `jax.shard_map` over which a value varies.

This matters if the shard_map checks them (`check_vma`). A kernel's operands must all vary over the
same axes, and so must a derivative and the value it belongs to. A replicated weight is therefore
cast to vary like its activations, before the custom rule: JAX transposes the cast to the sum of the
weight's gradient over the shards.
"""

from typing import Any

import jax


def varying_axes(array: Any) -> frozenset[Any]:
    """Return the axes over which the array's value varies."""
    return jax.typeof(array).manual_axis_type.varying


def vary_alike(arrays: Any) -> Any:
    """Return the tree with each array cast to vary over the axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))

    def vary(array: Any) -> Any:
        missing = tuple(axes - varying_axes(array))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, arrays)
