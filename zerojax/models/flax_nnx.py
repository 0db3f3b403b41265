"""Split an NNX module into parameters, state, random streams, constants, and a graph to merge them.

    graph        one for training and one for evaluation
    params       floating nnx.Param, and the kinds of Variable that `trainable` names
    streams      nnx.RngState
    state        every other Variable: statistics, counters, tables, integer parameters
    constants    plain arrays

The module is built while tracing, so none of its arrays are kept; `init` creates its parameters
where they are stored. A call merges a module from the parameters and the state that are passed in,
with streams created from the key of the step. Variables created during the call, for example by
`sow`, are not state: the loss may read them, and they are then discarded.
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
from zerojax.trees import Params, Tree


class NnxPart:
    """An NNX module and its parts."""

    collections = ()

    def __init__(self, name: str, make: Callable[[nnx.Rngs], nnx.Module], calls: Calls) -> None:
        """Trace `make` and split the module that it returns."""
        self.name = name
        self.make = make
        self.names = calls.names
        # If the user asks to train a kind of Variable, its floating arrays are parameters.
        filters = calls.trainable
        if not isinstance(filters, tuple | list):
            filters = (filters,)
        self._kinds = (nnx.Param, *(kind for kind in filters if isinstance(kind, type)))
        graphs = []
        methods = []

        def parts(key: jax.Array) -> Any:
            module = self._made(nnx.Rngs(key))
            methods.append(type(module).__call__ if callable(module) else None)
            graph, *states = nnx.split(module, self._is_param, nnx.RngState, _is_variable, ...)
            # A traced function can only return arrays, so graph definitions are appended to a list.
            # Modes are set on copies, because the user may hold the module itself.
            for mode in ("train", "eval"):
                copy = nnx.merge(graph, *states)
                getattr(copy, mode)()
                graphs.append(nnx.graphdef(copy))
            return states

        # With eager sharding, NNX would constrain each annotated array to the mesh in scope, but
        # the step chooses the shardings.
        with nnx.use_eager_sharding(False), self.names.while_made():
            self._parts = TracedInit(parts)
            self.abstract, self.streams, self.abstract_state, constants = self._parts.abstract
            self.train_graph, self.eval_graph = graphs[:2]
            if jax.tree.leaves(constants):
                # Only the returned constants are computed, so no parameters are created here.
                constants = jax.jit(lambda: self._parts(jax.random.key(0))[3])()
            self.constants = jax.tree.map(np.asarray, constants)
        self._state_paths = frozenset(path for path, _ in nnx.to_flat_state(self.abstract_state))
        self.init_state = self._init_state if self._state_paths else None
        has_streams = bool(jax.tree.leaves(self.streams))
        has_modes = self.train_graph != self.eval_graph
        self._takes_rngs = methods[0] is not None and _takes_rngs(
            methods[0], has_modes and not has_streams
        )
        # Only the key distinguishes training from evaluation, so a module with two modes needs one.
        self.stochastic = has_streams or has_modes or self._takes_rngs
        tree = jax.tree.structure(nnx.to_pure_dict(self.abstract))
        flat = nnx.to_flat_state(self.abstract)
        self.specs = jax.tree.unflatten(
            tree, [self._spec(path, variable) for path, variable in flat]
        )
        self.tiles = jax.tree.unflatten(tree, [_read_tiles(v) for _, v in flat])
        self.frozen: Any = False
        if calls.trainable is not None:
            self.frozen = jax.tree.unflatten(tree, self._frozen(flat, calls.trainable))

    def _frozen(self, flat: Any, trainable: Any) -> list[bool]:
        """Return whether each parameter is frozen, given the parameters with their paths."""
        try:
            is_trained = nnx.filterlib.to_predicate(trainable)
            return [not is_trained(path, variable) for path, variable in flat]
        except Exception as e:  # the user's function may raise anything
            # NNX cannot print an object that is not a filter.
            filter_name = getattr(trainable, "__name__", type(trainable).__name__)
            raise ValueError(
                "trainable must be a filter of NNX, such as nnx.LoRAParam, or a function (path, "
                f"value) -> bool; {filter_name!r} failed for the parameters of {self.name}: {e}"
            ) from e

    def _is_param(self, path: Any, value: Any) -> bool:
        del path
        is_floating = jnp.issubdtype(getattr(value, "dtype", jnp.float32), jnp.floating)
        return isinstance(value, self._kinds) and is_floating

    def _spec(self, path: Any, variable: Any) -> PartitionSpec:
        metadata = variable.get_metadata()
        annotated = metadata.get("out_sharding") or ()
        # A Format, a NamedSharding, or names.
        sharding = getattr(annotated, "sharding", annotated)
        names = getattr(sharding, "spec", annotated)
        name = f"{self.name}.{'.'.join(map(str, path))}"
        return self.names.spec(name, names, metadata.get("sharding_rules"))

    def _made(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build the module.

        Arrays in plain attributes become constants, even if they are created while tracing.
        """
        try:
            module = self.make(rngs)
        except TypeError as e:
            raise ValueError(
                f"{self.name} must be a function rngs -> nnx.Module, but calling it failed: {e}"
            ) from e
        if not isinstance(module, nnx.Module):
            raise ValueError(
                f"{self.name} must be a function rngs -> nnx.Module, but it returned "
                f"{type(module).__name__}"
            )
        # nnx.data marks an attribute as holding arrays, so that `split` returns it with the state.
        for _, node in list(nnx.iter_graph(module)):
            if isinstance(node, nnx.Module):
                for attribute, value in list(vars(node).items()):
                    if isinstance(value, jax.Array | np.ndarray):
                        setattr(node, attribute, nnx.data(value))
        return module

    def init(self, key: jax.Array) -> Any:
        """Create the parameters, a nested dict."""
        params, *_ = self._made_with(key)
        return nnx.to_pure_dict(params)

    def _init_state(self, key: jax.Array) -> Any:
        _, _, state, _ = self._made_with(key)
        return nnx.to_pure_dict(state)

    def _made_with(self, key: jax.Array) -> Any:
        with nnx.use_eager_sharding(False), self.names.while_made():
            return self._parts(key)

    def bind(self, params: Params, key: jax.Array | None, state: Any = None) -> nnx.Module:
        """Return the module with these parameters and state, in training mode if there is a key."""
        # A plain dict has the leaves of NNX's state, in the same order.
        params = _with_structure(self.abstract, params)
        state = _with_structure(self.abstract_state, state)
        graph = self.eval_graph if key is None else self.train_graph
        return nnx.merge(
            graph, params, self._streams(key), state, jax.tree.map(jnp.asarray, self.constants)
        )

    def read_state(self, module: nnx.Module) -> Any:
        """Return the state of a module after it was called."""
        return nnx.to_pure_dict(nnx.state(module, lambda path, _: path in self._state_paths))

    def arguments(self, key: jax.Array | None) -> dict[str, Any]:
        """Return keyword arguments for a call: random streams, if the module takes them."""
        if not self._takes_rngs:
            return {}
        return {"rngs": nnx.Rngs(jax.random.fold_in(without_key(key), CALL_STREAM))}

    def _streams(self, key: jax.Array | None) -> Any:
        """Return reset random streams: the i-th key depends on (key, i), all counts are 0."""
        base = without_key(key)
        leaves, treedef = jax.tree.flatten(self.streams)

        def fresh(i: int, leaf: Any) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)
            stream_key = jax.random.fold_in(base, i)
            # Layers stacked by nnx.vmap have one key each.
            return jax.random.split(stream_key, leaf.shape) if leaf.shape else stream_key

        return jax.tree.unflatten(treedef, [fresh(i, leaf) for i, leaf in enumerate(leaves)])


def _with_structure(abstract: Any, tree: Tree) -> Any:
    """Return the leaves of a tree in the structure of another one."""
    return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(tree))


def _takes_rngs(call: Callable[..., Any], needs_some: bool) -> bool:
    """Return whether to pass `rngs`: it is required, or optional and the module needs some.

    The module needs some if it has two modes and no streams of its own.
    """
    argument = inspect.signature(call).parameters.get("rngs")
    return argument is not None and (argument.default is argument.empty or needs_some)


def _read_tiles(variable: Any) -> bool | int:
    """Return the value of `Model.tiles` for a parameter.

    A stack of modules, as `nnx.vmap` creates it, is not a stack of tiles.
    """
    in_tiles, ndim = variable.get_metadata().get("tiles", (False, 0))
    return in_tiles if len(variable.shape) == ndim else False


def _is_variable(path: Any, value: Any) -> bool:
    del path
    return isinstance(value, nnx.Variable)
