"""An NNX module taken apart: parameters, state, random streams, constants, and the graph that puts
them together.

    graph        of either mode
    params       floating nnx.Param, and the kinds of Variable that `trainable` names
    streams      nnx.RngState
    state        every other Variable: statistics, counters, tables, integer parameters
    constants    plain arrays

The module is made while tracing, so nothing of it is held; `init` makes its parameters where they
rest. A call puts a module together from the parameters and the state that it is given, with streams
made of the key of its step. Variables that the call makes, such as those of `sow`, are no state:
the loss may read them, and then they are gone.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.models.flax_calls import CALL_STREAM, Calls, without_key
from zerojax.models.traced_init import TracedInit


class NnxPart:
    """An NNX module and what it is made of."""

    collections = ()

    def __init__(self, name: str, make: Callable[[nnx.Rngs], nnx.Module], calls: Calls) -> None:
        self.name, self.make, self.names = name, make, calls.names
        # A kind of Variable that the user asks to train is one of parameters.
        filters = (
            calls.trainable if isinstance(calls.trainable, tuple | list) else (calls.trainable,)
        )
        self._kinds = (nnx.Param, *(kind for kind in filters if isinstance(kind, type)))
        graphs, methods = [], []

        def parts(key: jax.Array) -> Any:
            module = self._made(nnx.Rngs(key))
            methods.append(type(module).__call__ if callable(module) else None)
            graph, *states = nnx.split(module, self._is_param, nnx.RngState, _is_variable, ...)
            # A traced function returns arrays alone, and graph definitions are none. Modes are set
            # on copies: the module may be one that the user holds.
            for mode in ("train", "eval"):
                copy = nnx.merge(graph, *states)
                getattr(copy, mode)()
                graphs.append(nnx.graphdef(copy))
            return states

        # With eager sharding NNX constrains each annotated array to the mesh in scope; the step
        # chooses shardings itself.
        with nnx.use_eager_sharding(False), self.names.while_made():
            self._parts = TracedInit(parts)
            self.abstract, self.streams, self.abstract_state, rest = self._parts.abstract
            self.train_graph, self.eval_graph = graphs[:2]
            if jax.tree.leaves(rest):
                # Only what is returned is computed, so the parameters are not made here.
                rest = jax.jit(lambda: self._parts(jax.random.key(0))[3])()
            self.constants = jax.tree.map(np.asarray, rest)
        self._state_paths = frozenset(path for path, _ in nnx.to_flat_state(self.abstract_state))
        self.init_state = self._init_state if self._state_paths else None
        has_streams, has_modes = (
            bool(jax.tree.leaves(self.streams)),
            self.train_graph != self.eval_graph,
        )
        self._takes_rngs = methods[0] is not None and _takes_rngs(
            methods[0], has_modes and not has_streams
        )
        # The key is what tells a step from an evaluation, so a module with two modes needs one.
        self.stochastic = has_streams or has_modes or self._takes_rngs
        tree = jax.tree.structure(nnx.to_pure_dict(self.abstract))
        flat = nnx.to_flat_state(self.abstract)
        self.specs = jax.tree.unflatten(
            tree, [self._spec(path, variable) for path, variable in flat]
        )
        self.tiles = jax.tree.unflatten(tree, [_tiles_of(v) for _, v in flat])
        self.frozen = (
            False
            if calls.trainable is None
            else jax.tree.unflatten(tree, self._frozen(flat, calls.trainable))
        )

    def _frozen(self, flat: Any, trainable: Any) -> list[bool]:
        """Return what is not trained of parameters with their paths."""
        try:
            is_trained = nnx.filterlib.to_predicate(trainable)
            return [not is_trained(path, variable) for path, variable in flat]
        except Exception as e:  # the user's function: whatever it raises
            what = getattr(
                trainable, "__name__", type(trainable).__name__
            )  # NNX cannot print what is no filter
            raise ValueError(
                f"trainable must be a filter of NNX, such as nnx.LoRAParam, or a function (path, value) -> bool; {what!r} "
                f"failed for the parameters of {self.name}: {e}"
            ) from e

    def _is_param(self, path: Any, value: Any) -> bool:
        del path
        is_floating = jnp.issubdtype(getattr(value, "dtype", jnp.float32), jnp.floating)
        return isinstance(value, self._kinds) and is_floating

    def _spec(self, path: Any, variable: Any) -> PartitionSpec:
        metadata = variable.get_metadata()
        annotated = metadata.get("out_sharding") or ()
        names = getattr(
            getattr(annotated, "sharding", annotated), "spec", annotated
        )  # of a Format, a NamedSharding, or names
        return self.names.spec(
            f"{self.name}.{'.'.join(map(str, path))}", names, metadata.get("sharding_rules")
        )

    def _made(self, rngs: nnx.Rngs) -> nnx.Module:
        """Make the module.

        Arrays that it holds as plain attributes become constants, also when made while tracing.
        """
        try:
            module = self.make(rngs)
        except TypeError as e:
            raise ValueError(
                f"{self.name} must be a function rngs -> nnx.Module, but calling it failed: {e}"
            ) from e
        if not isinstance(module, nnx.Module):
            raise ValueError(
                f"{self.name} must be a function rngs -> nnx.Module, but it returned {type(module).__name__}"
            )
        # nnx.data tells NNX that an attribute holds arrays, so that `split` returns it with the
        # state.
        for _, node in list(nnx.iter_graph(module)):
            if isinstance(node, nnx.Module):
                for attribute, value in list(vars(node).items()):
                    if isinstance(value, jax.Array | np.ndarray):
                        setattr(node, attribute, nnx.data(value))
        return module

    def init(self, key: jax.Array) -> Any:
        params, *_ = self._made_with(key)
        return nnx.to_pure_dict(params)

    def _init_state(self, key: jax.Array) -> Any:
        _, _, state, _ = self._made_with(key)
        return nnx.to_pure_dict(state)

    def _made_with(self, key: jax.Array) -> Any:
        with nnx.use_eager_sharding(False), self.names.while_made():
            return self._parts(key)

    def bind(self, params: Any, key: jax.Array | None, state: Any = None) -> nnx.Module:
        # A plain dict has the leaves of NNX's state, in the same order.
        filled = (
            jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(leaves))
            for abstract, leaves in ((self.abstract, params), (self.abstract_state, state))
        )
        params, state = filled
        graph = self.eval_graph if key is None else self.train_graph
        return nnx.merge(
            graph, params, self._streams(key), state, jax.tree.map(jnp.asarray, self.constants)
        )

    def state_of(self, module: nnx.Module) -> Any:
        """Return the state of a module after its calls."""
        return nnx.to_pure_dict(nnx.state(module, lambda path, _: path in self._state_paths))

    def arguments(self, key: jax.Array | None) -> dict[str, Any]:
        """Return what the module is called with beside its input: random streams, if it takes some."""
        return (
            {"rngs": nnx.Rngs(jax.random.fold_in(without_key(key), CALL_STREAM))}
            if self._takes_rngs
            else {}
        )

    def _streams(self, key: jax.Array | None) -> Any:
        """Return the random streams reset: the i-th stream's key is a function of (key, i), its
        count is 0.
        """
        base = without_key(key)
        leaves, treedef = jax.tree.flatten(self.streams)

        def fresh(i: int, leaf: Any) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)
            one = jax.random.fold_in(base, i)
            return (
                jax.random.split(one, leaf.shape) if leaf.shape else one
            )  # layers stacked by nnx.vmap: a key each

        return jax.tree.unflatten(treedef, [fresh(i, leaf) for i, leaf in enumerate(leaves)])


def _takes_rngs(call: Callable[..., Any], needs_some: bool) -> bool:
    """Return whether a module is called with `rngs`: it must be, or it may be and draws from none
    of its own.
    """
    argument = inspect.signature(call).parameters.get("rngs")
    return argument is not None and (argument.default is argument.empty or needs_some)


def _tiles_of(variable: Any) -> bool | int:
    """Return what `Model.tiles` tells of a parameter; a stack of modules, as `nnx.vmap` makes it,
    is no stack of tiles.
    """
    in_tiles, ndim = variable.get_metadata().get("tiles", (False, 0))
    return in_tiles if len(variable.shape) == ndim else False


def _is_variable(path: Any, value: Any) -> bool:
    del path
    return isinstance(value, nnx.Variable)
