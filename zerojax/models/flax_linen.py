"""A Linen module taken apart: its variables, and the module that they are bound to.

Linen shapes parameters by a call, so an example batch is needed. It may be abstract: zeros of its shapes are traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import PartitionSpec

from zerojax.models.flax_calls import Calls
from zerojax.models.flax_nnx import other_state
from zerojax.tiling import find_stacks


class LinenPart:
    """A Linen module and the function that uses it."""

    takes_rngs = False

    def __init__(self, name: str, module: nn.Module, use: Callable[..., Any], args: Sequence[Any], calls: Calls) -> None:
        self.name, self.module, self.use, self.args, self.calls = name, module, use, args, calls
        self.stochastic = calls.has_modes
        with calls.names.while_made():
            variables = jax.eval_shape(self._variables, jax.random.key(0))
        rest = sorted(set(variables) - {"params"})
        if rest:
            raise ValueError(other_state(name, rest, "an array made in setup and no variable of a collection"))
        boxed = variables.get("params", {})
        self.specs = jax.tree_util.tree_map_with_path(self._spec, boxed, is_leaf=_is_box)
        self.tiles: Any = False
        # Linen parameters carry no mark like that of NNX's tiled layers, so the stacks are found by tracing.
        if name in ("block", "module"):
            args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(self.args))
            key = jax.random.key(0) if calls.rngs else None

            def used(p: Any, *args: Any) -> Any:
                with calls.run(is_training=True):
                    return use(self.bind(p, key), *args)

            self.tiles = find_stacks(used, nn.unbox(boxed), *args)

    def _spec(self, path: Any, boxed: Any) -> PartitionSpec:
        if not _is_box(boxed) or not hasattr(boxed, "get_partition_spec"):
            return PartitionSpec()
        path = f"{self.name}{jax.tree_util.keystr(path)}"
        return self.calls.names.spec(path, boxed.get_partition_spec(), getattr(boxed, "rules", None))

    def _variables(self, key: jax.Array) -> Any:
        args = jax.tree.map(lambda a: jnp.zeros(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)), tuple(self.args))
        keys = {stream: jax.random.fold_in(key, i) for i, stream in enumerate(("params", *self.calls.rngs))}
        with self.calls.run(is_training=True):
            return nn.init(self.use, self.module)(keys, *args)

    def init(self, key: jax.Array) -> Any:
        with self.calls.names.while_made():
            return nn.unbox(self._variables(key).get("params", {}))

    def bind(self, params: Any, key: jax.Array | None) -> nn.Module:
        rngs = self.calls.rngs
        keys = None if key is None else {stream: jax.random.fold_in(key, i) for i, stream in enumerate(rngs)}
        return self.module.bind({"params": params}, rngs=keys or {})

    def arguments(self, key: jax.Array | None) -> dict[str, Any]:
        """Return what the module is called with beside its input: nothing."""
        del key
        return {}


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)
