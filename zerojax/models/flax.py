"""Flax modules, NNX and Linen, as a Model or a LayeredModel. The modules are not edited.

    NNX     a module is given as a function of its random streams: `lambda rngs: GPT(config, rngs=rngs)`
    Linen   a module is given as it is: `GPT(config)`, with an example batch, since Linen shapes parameters by use

The user's loss is called with the module, holding the parameters: `loss(model, batch)`; for Linen the module is bound, so
it is called in the same way. Parameters become a plain nested dict. Splits over `tensor` are read from the annotations that
the modules carry (`nnx.with_partitioning`, `nn.with_partitioning`).

Random numbers: an NNX module with random streams (dropout) gets fresh keys each (step, microbatch, layer). A Linen module gets
the streams named in `rngs`; where there is no key it gets none, which `module.has_rng("dropout")` tells.

Modes: a step gives a key and `program.eval` none. So an NNX module is in `train()` mode where there is a key, and in `eval()`
mode where there is none, whatever its constructor left. One that these modes change counts as stochastic, also without random
streams.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.models.model import LayeredModel, Model
from zerojax.tiling import find_stacks

Modules = Callable[[nnx.Rngs], nnx.Module] | nn.Module

_EMBED_IN_HEAD = 0x7FFFFFFF
"""Folded into the head's key for the embedding that the loss reads: modules number their streams from 0."""


class _Part(Protocol):
    """A module taken apart: how to make its parameters, and how to put them back."""

    stochastic: bool
    specs: Any
    tiles: Any

    def init(self, key: jax.Array) -> Any: ...

    def bind(self, params: Any, key: jax.Array | None) -> Any: ...


def from_flax(
    module: Modules | None = None,
    loss: Callable[..., jax.Array] | None = None,
    *,
    embed: Modules | None = None,
    block: Modules | None = None,
    head: Modules | None = None,
    num_layers: int | None = None,
    example_batch: Any = None,
    rngs: Sequence[str] = (),
) -> Any:
    """Make a Model, or a LayeredModel, from Flax modules.

        model = zj.from_flax(lambda rngs: GPT(config, rngs=rngs), loss)             # loss(model, batch)
        model = zj.from_flax(embed=..., block=..., head=..., num_layers=12, loss=loss)
        model = zj.from_flax(GPT(config), loss, example_batch=batch)                # Linen

    Args:
      module: the whole model. Its loss is `loss(model, batch) -> scalar`.
      loss: for the layered form `loss(head, embed, x, batch) -> scalar`; `embed` is there for tied embeddings.
      embed: module called as `embed(batch) -> x`.
      block: module of ONE layer, called as `block(x) -> x`.
      head: module that `loss` calls.
      num_layers: number of blocks.
      example_batch: tree of arrays or ShapeDtypeStruct; needed for Linen.
      rngs: names of the Linen random streams that training draws from, such as ("dropout",).

    Returns:
      A `zerojax.Model` if `module` is given, else a `zerojax.LayeredModel`.

    Raises:
      ValueError: neither form is complete, a module instance where a function is needed, or state other than parameters.
    """
    if loss is None:
        raise ValueError("from_flax needs a loss: loss(model, batch), or loss(head, embed, x, batch) for the layered form")
    if module is not None and embed is None and block is None and head is None and num_layers is None:
        return _whole(module, loss, example_batch, rngs)
    if module is None and embed is not None and block is not None and head is not None and num_layers is not None:
        return _layered(embed, block, head, num_layers, loss, example_batch, rngs)
    parts = {"module": module, "embed": embed, "block": block, "head": head, "num_layers": num_layers}
    names = [name for name, value in parts.items() if value is not None]
    raise ValueError(f"from_flax takes a module alone, or all of embed, block, head and num_layers; it got {names}")


def _whole(module: Modules, loss: Callable[..., jax.Array], batch: Any, rngs: Sequence[str]) -> Model:
    part = _part("module", module, lambda m, b: loss(m, b), (batch,), rngs)
    return Model(
        init=part.init,
        loss=lambda params, batch, key: loss(part.bind(params, key), batch),
        specs=part.specs,
        tiles=part.tiles,
        stochastic=part.stochastic,
    )


def _layered(
    embed: Modules,
    block: Modules,
    head: Modules,
    num_layers: int,
    loss: Callable[..., jax.Array],
    batch: Any,
    rngs: Sequence[str],
) -> LayeredModel:
    first = _part("embed", embed, lambda m, b: m(b), (batch,), rngs)
    x = _abstract_x(first, batch)
    layer = _part("block", block, lambda m, x: m(x), (x,), rngs)

    def run_head(m: Any, x: Any, b: Any) -> jax.Array:
        # Called for Linen alone, to shape the head's parameters. The loss may read a tied embedding, so it is given one.
        return loss(m, first.bind(first.init(jax.random.key(0)), None), x, b)

    last = _part("head", head, run_head, (x, batch), rngs)

    def run_loss(p: Any, p_embed: Any, x: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        # The loss may call the embedding, which then trains as the head does. No layer's key is folded from this one.
        of_embed = None if key is None else jax.random.fold_in(key, _EMBED_IN_HEAD)
        return loss(last.bind(p, key), first.bind(p_embed, of_embed), x, batch)

    return LayeredModel(
        num_layers=num_layers,
        init_embed=first.init,
        embed=lambda p, batch, key: first.bind(p, key)(batch),
        init_block=layer.init,
        block=lambda p, x, key: layer.bind(p, key)(x),
        init_head=last.init,
        head=run_loss,
        specs={"embed": first.specs, "block": layer.specs, "head": last.specs},
        tiles=layer.tiles,
        stochastic=first.stochastic or layer.stochastic or last.stochastic,
    )


def _abstract_x(embed: _Part, batch: Any) -> Any:
    """Return the shapes that the embedding hands to the first block, or None without an example batch."""
    if batch is None:
        return None
    return jax.eval_shape(lambda b: embed.bind(embed.init(jax.random.key(0)), None)(b), batch)


def _part(name: str, module: Modules, use: Callable[..., Any], args: Sequence[Any], rngs: Sequence[str]) -> _Part:
    if isinstance(module, nn.Module):
        if any(a is None for a in args):
            raise ValueError(f"{name} is a Linen module, whose parameters are shaped by use: give example_batch")
        return _Linen(name, module, use, args, rngs)
    if isinstance(module, nnx.Module):
        raise ValueError(
            f"{name} is an NNX module that already holds its arrays; give a function, such as "
            f"lambda rngs: {type(module).__name__}(..., rngs=rngs), so that its parameters are born sharded"
        )
    if not callable(module):
        raise ValueError(f"{name} must be a Linen module or a function rngs -> NNX module, got {type(module).__name__}")
    return _Nnx(name, module)


def _other_state(name: str, state: Sequence[str], constant: str) -> str:
    """Return why state other than parameters is refused, and what to do; `constant` says what is none."""
    return (
        f"{name} holds state other than parameters: {', '.join(state)}. A step updates parameters alone. For statistics that "
        "training updates, as of BatchNorm, use a norm without any (LayerNorm, RMSNorm, GroupNorm). What never changes (a "
        f"table, a mask, frozen statistics) may stay as {constant}: self.table = jnp.asarray(...)"
    )


class _Nnx:
    """An NNX module: graph definitions of both modes, parameters, random streams, and constant arrays (masks, tables)."""

    def __init__(self, name: str, make: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self.name, self.make = name, make
        graphs = []

        def parts() -> Any:
            graph, *states = nnx.split(self._made(nnx.Rngs(0)), nnx.Param, nnx.RngState, ...)
            # Graph definitions are no arrays, so eval_shape cannot return them. Modes are set on copies: the module may be one
            # that the user holds.
            for mode in ("train", "eval"):
                copy = nnx.merge(graph, *states)
                getattr(copy, mode)()
                graphs.append(nnx.graphdef(copy))
            return states

        # With eager sharding NNX constrains each annotated array to the mesh in scope; the step chooses shardings itself.
        with nnx.use_eager_sharding(False):
            self.abstract, self.streams, rest = jax.eval_shape(parts)
            self.train_graph, self.eval_graph = graphs[:2]
            state = [".".join(map(str, path)) for path, v in nnx.to_flat_state(rest) if isinstance(v, nnx.Variable)]
            if state:
                raise ValueError(_other_state(name, state, "a plain array of the module and no nnx.Variable"))
            # Only what is returned is computed, so the parameters are not made here.
            self.constants = jax.tree.map(np.asarray, jax.jit(lambda: parts()[2])() if jax.tree.leaves(rest) else rest)
        # The key is what tells a step from an evaluation, so a module with two modes needs one.
        self.stochastic = bool(jax.tree.leaves(self.streams)) or self.train_graph != self.eval_graph
        leaves = jax.tree.leaves(nnx.get_partition_spec(self.abstract), is_leaf=lambda s: isinstance(s, PartitionSpec))
        tree = jax.tree.structure(nnx.to_pure_dict(self.abstract))
        self.specs = jax.tree.unflatten(tree, leaves)
        self.tiles = jax.tree.unflatten(tree, [_tiles_of(v) for _, v in nnx.to_flat_state(self.abstract)])

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
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))

    def bind(self, params: Any, key: jax.Array | None) -> nnx.Module:
        # The plain dict has the leaves of NNX's state, in the same order.
        state = jax.tree.unflatten(jax.tree.structure(self.abstract), jax.tree.leaves(params))
        graph = self.eval_graph if key is None else self.train_graph
        return nnx.merge(graph, state, self._streams(key), jax.tree.map(jnp.asarray, self.constants))

    def _streams(self, key: jax.Array | None) -> Any:
        """Return the random streams reset: the i-th stream's key is a function of (key, i), its count is 0."""
        base = jax.random.key(0) if key is None else key
        leaves, treedef = jax.tree.flatten(self.streams)

        def fresh(i: int, leaf: Any) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)
            one = jax.random.fold_in(base, i)
            return jax.random.split(one, leaf.shape) if leaf.shape else one  # layers stacked by nnx.vmap: a key each

        return jax.tree.unflatten(treedef, [fresh(i, leaf) for i, leaf in enumerate(leaves)])


def _tiles_of(variable: Any) -> bool | int:
    """Return what `Model.tiles` tells of a parameter; a stack of modules, as `nnx.vmap` makes it, is no stack of tiles."""
    in_tiles, ndim = variable.get_metadata().get("tiles", (False, 0))
    return in_tiles if len(variable.shape) == ndim else False


class _Linen:
    """A Linen module and the function that uses it."""

    def __init__(self, name: str, module: nn.Module, use: Callable[..., Any], args: Sequence[Any], rngs: Sequence[str]) -> None:
        self.module, self.use, self.args, self.rngs = module, use, args, tuple(rngs)
        self.stochastic = bool(rngs)
        variables = jax.eval_shape(self._variables, jax.random.key(0))
        rest = sorted(set(variables) - {"params"})
        if rest:
            raise ValueError(_other_state(name, rest, "an array made in setup and no variable of a collection"))
        boxed = variables.get("params", {})
        self.specs = nn.get_partition_spec(boxed)
        self.tiles: Any = False
        # Linen parameters carry no mark like that of NNX's tiled layers, so the stacks are found by tracing.
        if name in ("block", "module"):
            args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(self.args))
            key = jax.random.key(0) if rngs else None
            self.tiles = find_stacks(lambda p, *args: use(self.bind(p, key), *args), nn.unbox(boxed), *args)

    def _variables(self, key: jax.Array) -> Any:
        # Linen shapes parameters by a call, and the example batch may be abstract: zeros stand for it.
        args = jax.tree.map(lambda a: jnp.zeros(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)), tuple(self.args))
        keys = {stream: jax.random.fold_in(key, i) for i, stream in enumerate(("params", *self.rngs))}
        return nn.init(self.use, self.module)(keys, *args)

    def init(self, key: jax.Array) -> Any:
        return nn.unbox(self._variables(key).get("params", {}))

    def bind(self, params: Any, key: jax.Array | None) -> nn.Module:
        keys = None if key is None else {stream: jax.random.fold_in(key, i) for i, stream in enumerate(self.rngs)}
        return self.module.bind({"params": params}, rngs=keys or {})
