"""An NNX module taken apart: parameters, random streams, constants, and the graph that puts them together.

    module  ->  graph of either mode, params {nnx.Param}, streams {nnx.RngState}, constants {plain arrays}

The module is made while tracing, so nothing of it is held; `init` makes its parameters where they rest. A call puts a module
together from the parameters that it is given, with streams made of the key of its step.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.models.axes import AxisNames
from zerojax.models.flax_calls import CALL_STREAM, without_key


class NnxPart:
    """An NNX module: graph definitions of both modes, parameters, random streams, and constant arrays (masks, tables)."""

    def __init__(self, name: str, make: Callable[[nnx.Rngs], nnx.Module], names: AxisNames) -> None:
        self.name, self.make, self.names = name, make, names
        graphs, calls = [], []

        def parts() -> Any:
            module = self._made(nnx.Rngs(0))
            calls.append(type(module).__call__ if callable(module) else None)
            graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
            # Graph definitions are no arrays, so eval_shape cannot return them. Modes are set on copies: the module may be one
            # that the user holds.
            for mode in ("train", "eval"):
                copy = nnx.merge(graph, *states)
                getattr(copy, mode)()
                graphs.append(nnx.graphdef(copy))
            return states

        # With eager sharding NNX constrains each annotated array to the mesh in scope; the step chooses shardings itself.
        with nnx.use_eager_sharding(False), names.while_made():
            self.abstract, self.streams, rest = jax.eval_shape(parts)
            self.train_graph, self.eval_graph = graphs[:2]
            state = [".".join(map(str, path)) for path, v in nnx.to_flat_state(rest) if isinstance(v, nnx.Variable)]
            if state:
                raise ValueError(other_state(name, state, "a plain array of the module and no nnx.Variable"))
            # Only what is returned is computed, so the parameters are not made here.
            self.constants = jax.tree.map(np.asarray, jax.jit(lambda: parts()[2])() if jax.tree.leaves(rest) else rest)
        has_streams, has_modes = bool(jax.tree.leaves(self.streams)), self.train_graph != self.eval_graph
        self.takes_rngs = calls[0] is not None and _takes_rngs(calls[0], has_modes and not has_streams)
        # The key is what tells a step from an evaluation, so a module with two modes needs one.
        self.stochastic = has_streams or has_modes or self.takes_rngs
        tree = jax.tree.structure(nnx.to_pure_dict(self.abstract))
        flat = nnx.to_flat_state(self.abstract)
        self.specs = jax.tree.unflatten(tree, [self._spec(path, variable) for path, variable in flat])
        self.tiles = jax.tree.unflatten(tree, [_tiles_of(v) for _, v in flat])

    def _spec(self, path: Any, variable: Any) -> PartitionSpec:
        metadata = variable.get_metadata()
        annotated = metadata.get("out_sharding") or ()
        names = getattr(getattr(annotated, "sharding", annotated), "spec", annotated)  # of a Format, a NamedSharding, or names
        return self.names.spec(f"{self.name}.{'.'.join(map(str, path))}", names, metadata.get("sharding_rules"))

    def _made(self, rngs: nnx.Rngs) -> nnx.Module:
        """Make the module. Arrays that it holds as plain attributes become constants, also when made while tracing."""
        try:
            module = self.make(rngs)
        except TypeError as e:
            raise ValueError(f"{self.name} must be a function rngs -> nnx.Module, but calling it failed: {e}") from e
        if not isinstance(module, nnx.Module):
            raise ValueError(f"{self.name} must be a function rngs -> nnx.Module, but it returned {type(module).__name__}")
        # nnx.data tells NNX that an attribute holds arrays, so that `split` returns it with the state.
        for _, node in list(nnx.iter_graph(module)):
            if isinstance(node, nnx.Module):
                for attribute, value in list(vars(node).items()):
                    if isinstance(value, jax.Array | np.ndarray):
                        setattr(node, attribute, nnx.data(value))
        return module

    def init(self, key: jax.Array) -> Any:
        with nnx.use_eager_sharding(False), self.names.while_made():
            return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))

    def bind(self, params: Any, key: jax.Array | None) -> nnx.Module:
        # The plain dict has the leaves of NNX's state, in the same order.
        state = jax.tree.unflatten(jax.tree.structure(self.abstract), jax.tree.leaves(params))
        graph = self.eval_graph if key is None else self.train_graph
        return nnx.merge(graph, state, self._streams(key), jax.tree.map(jnp.asarray, self.constants))

    def arguments(self, key: jax.Array | None) -> dict[str, Any]:
        """Return what the module is called with beside its input: random streams, if it takes some."""
        return {"rngs": nnx.Rngs(jax.random.fold_in(without_key(key), CALL_STREAM))} if self.takes_rngs else {}

    def _streams(self, key: jax.Array | None) -> Any:
        """Return the random streams reset: the i-th stream's key is a function of (key, i), its count is 0."""
        base = without_key(key)
        leaves, treedef = jax.tree.flatten(self.streams)

        def fresh(i: int, leaf: Any) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)
            one = jax.random.fold_in(base, i)
            return jax.random.split(one, leaf.shape) if leaf.shape else one  # layers stacked by nnx.vmap: a key each

        return jax.tree.unflatten(treedef, [fresh(i, leaf) for i, leaf in enumerate(leaves)])


def _takes_rngs(call: Callable[..., Any], needs_some: bool) -> bool:
    """Return whether a module is called with `rngs`: it must be, or it may be and draws from none of its own."""
    argument = inspect.signature(call).parameters.get("rngs")
    return argument is not None and (argument.default is argument.empty or needs_some)


def _tiles_of(variable: Any) -> bool | int:
    """Return what `Model.tiles` tells of a parameter; a stack of modules, as `nnx.vmap` makes it, is no stack of tiles."""
    in_tiles, ndim = variable.get_metadata().get("tiles", (False, 0))
    return in_tiles if len(variable.shape) == ndim else False


def other_state(name: str, state: Any, constant: str) -> str:
    """Return why state other than parameters is refused, and what to do; `constant` says what is none."""
    return (
        f"{name} holds state other than parameters: {', '.join(state)}. A step updates parameters alone. For statistics that "
        "training updates, as of BatchNorm, use a norm without any (LayerNorm, RMSNorm, GroupNorm). What never changes (a "
        f"table, a mask, frozen statistics) may stay as {constant}: self.table = jnp.asarray(...)"
    )
