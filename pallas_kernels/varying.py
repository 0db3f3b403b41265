"""Over which axes of a `jax.shard_map` around it a value varies, where that is checked
(`check_vma`).

A kernel's operands must vary over the same axes, and so must what a derivative returns and what it
was of. A replicated weight is therefore cast to vary as its activations do, before the rule: JAX
transposes the cast to the sum of the weight's gradient over the shards.
"""

from typing import Any

import jax


def varying_axes(array: Any) -> frozenset[Any]:
    """Return the axes over which the array's value varies."""
    return jax.typeof(array).manual_axis_type.varying


def vary_alike(arrays: Any) -> Any:
    """Let all arrays of a tree vary over the axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))

    def vary(array: Any) -> Any:
        missing = tuple(axes - varying_axes(array))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, arrays)
