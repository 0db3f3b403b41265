"""Split a Linen module into its variables and the module that they are bound to.

    params       the collection "params"
    state        every other collection that `init` creates; calls update the collections in
                 `mutable`, and the others stay unchanged
    sown         collections in `sown`: each call creates them, the loss may read them, and they are
                 then discarded

Linen finds the shapes of parameters by a call, so an example batch is needed. It may be abstract:
zeros of its shapes are traced.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import PartitionSpec

from zerojax.models.flax_calls import Calls
from zerojax.models.objective import OVERWRITTEN
from zerojax.models.traced_init import TracedInit
from zerojax.tiling import find_stacks
from zerojax.trees import Params


class LinenPart:
    """A Linen module and the function that uses it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        use: Callable[..., Any],
        args: Sequence[Any],
        calls: Calls,
    ) -> None:
        """Trace the module's init with the example `args`."""
        self.name = name
        self.module = module
        self.use = use
        self.args = args
        self.calls = calls
        self.stochastic = calls.has_modes
        with calls.names.while_made():
            self._variables = TracedInit(self._made_with)
        variables = self._variables.abstract
        self.collections = tuple(sorted(set(variables) - {"params", *calls.sown}))
        if OVERWRITTEN in self.collections and name != "module":
            raise ValueError(
                f"{name} holds {OVERWRITTEN!r}, which is replaced by its gradient: only a full "
                "model, from_flax(module, loss), supports this, not the layered form"
            )
        self.init_state = self._init_state if self.collections else None
        boxed = variables.get("params", {})
        self.specs = jax.tree_util.tree_map_with_path(self._spec, boxed, is_leaf=_is_box)
        self.frozen: Any = False
        if calls.trainable is not None:
            self.frozen = jax.tree_util.tree_map_with_path(self._is_frozen, nn.unbox(boxed))
        self.tiles: Any = False
        # Unlike NNX's tiled layers, Linen parameters carry no mark, so stacks of tiles are found
        # by tracing.
        if name in ("block", "module"):
            # E.g. numpy's int64 to int32: jax 0.12 warns of abstract arrays that it would narrow.
            canonical = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
            args = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, canonical(a.dtype)), tuple(self.args)
            )
            key = jax.random.key(0) if calls.rngs else None
            state = nn.unbox({c: variables[c] for c in self.collections})

            def used(p: Params, *args: Any) -> Any:
                with calls.run(is_training=True):
                    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state)
                    return jax.tree.leaves(use(self.bind(p, key, zeros), *args))

            self.tiles = find_stacks(used, nn.unbox(boxed), *args)

    def _is_frozen(self, path: Any, leaf: Any) -> bool:
        names = tuple(entry.key for entry in path)
        try:
            return not self.calls.trainable(names, leaf)
        except TypeError as e:
            raise ValueError(
                f"{self.name} is a Linen module, whose parameters are all of one kind: trainable "
                f"must be a function of (path, value), got {self.calls.trainable!r}, which failed "
                f"for {names}: {e}"
            ) from e

    def _spec(self, path: Any, boxed: Any) -> PartitionSpec:
        if not _is_box(boxed) or not hasattr(boxed, "get_partition_spec"):
            return PartitionSpec()
        path = f"{self.name}{jax.tree_util.keystr(path)}"
        return self.calls.names.spec(
            path, boxed.get_partition_spec(), getattr(boxed, "rules", None)
        )

    def _made_with(self, key: jax.Array) -> Any:
        args = jax.tree.map(
            lambda a: jnp.zeros(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)), tuple(self.args)
        )
        streams = ("params", *self.calls.rngs)
        keys = {stream: jax.random.fold_in(key, i) for i, stream in enumerate(streams)}
        with self.calls.run(is_training=True):
            return nn.init(self.use, self.module)(keys, *args)

    def init(self, key: jax.Array) -> Any:
        """Create the parameters, a nested dict."""
        with self.calls.names.while_made():
            return nn.unbox(self._variables(key).get("params", {}))

    def _init_state(self, key: jax.Array) -> Any:
        with self.calls.names.while_made():
            variables = self._variables(key)
        return nn.unbox({c: variables[c] for c in self.collections})

    def bind(self, params: Params, key: jax.Array | None, state: Any = None) -> nn.Module:
        """Return the module bound to params and state, with random streams if there is a key."""
        calls = self.calls
        keys = {}
        if key is not None:
            keys = {stream: jax.random.fold_in(key, i) for i, stream in enumerate(calls.rngs)}
        mutable = [*calls.mutable, *calls.sown] or False
        return self.module.bind({"params": params, **(state or {})}, rngs=keys, mutable=mutable)

    def read_state(self, module: nn.Module) -> Any:
        """Return the state of a module after it was called."""
        return flax.core.unfreeze({c: module.variables[c] for c in self.collections})

    def arguments(self, key: jax.Array | None) -> dict[str, Any]:
        """Return keyword arguments for a call: none."""
        del key
        return {}


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)
