"""What zerojax trains: a loss over a parameter tree, or a stack of equal layers between an embedding and a head.

A `Model` is any traced loss. A `LayeredModel` names its layers. Streaming, per-layer gathers and rematerialisation need that:

    x[0]   = embed(p_embed, batch)            x: tree of activations, batch first
    x[l+1] = block(p_blocks[l], x[l])         l = 0 .. L-1, a scan over the leading dim of p_blocks
    loss   = head(p_head, p_embed, x[L], batch)
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = Any
Batch = Any
Key = jax.Array | None


@dataclasses.dataclass(frozen=True)
class Model:
    """Any loss over any pytree of parameters. Those that are trained are floating.

    Attributes:
      init: `init(key) -> params`.
      loss: `loss(params, batch, key)`, the mean over the examples of the batch: a scalar, `(scalar, aux)`, or a
        `zerojax.Loss`. Parameters arrive in the compute dtype. `key` is None unless `stochastic`, and always None in
        `program.eval`.
      specs: tensor parallelism: None, or a tree (or prefix of one) of PartitionSpec over the parameters.
      tiles: tree over the parameters, or a prefix of it: True for leaves [T, ...] that are stacks of tiles, or as an integer
        how many of T lie along the first dim of the weight (`in_tiles` of `zerojax.tiling.tile_kernel`); else False.
        Checkpoints convert them to other numbers of tiles.
      stochastic: True where the loss draws random numbers, such as dropout.
      frozen: tree of bool over the parameters, or a prefix of it: True for weights that are read and never trained. The
        optimizer sees the other leaves alone, None being in the place of these. Leaves of integers or booleans are frozen too.
      init_state: None, or `init_state(key) -> state`, a tree of any dtypes that is not trained, such as running statistics; of
        the key that `init` gets. The loss is then `loss(params, batch, key, state) -> (loss, new state)`. Microbatches pass it
        on in order; `program.eval` reads it and drops what is new.
      predict: None, or `predict(params, batch) -> outputs`, what the model gives without a loss; with `init_state`
        `predict(params, batch, state)`.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., Any]
    specs: Any = None
    tiles: Any = False
    stochastic: bool = False
    frozen: Any = False
    init_state: Callable[[jax.Array], Any] | None = None
    predict: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A stack of `num_layers` equal blocks between an embedding and a head.

    Attributes:
      num_layers: L, at least 1.
      init_embed: `init_embed(key) -> p_embed`.
      embed: `embed(p_embed, batch, key) -> x`.
      init_block: `init_block(key) -> p`, the parameters of ONE layer.
      block: `block(p, x, key) -> x`, of the same structure, shapes and dtypes as its input; with `context` or `per_layer`
        `block(p, x, key, context, layer) -> x`. It may return `(x, zerojax.Loss)`: the total is added to the loss, and metrics
        are averaged over layers.
      init_head: `init_head(key) -> p_head`.
      head: `head(p_head, p_embed, x, batch, key)`, the mean loss, in the forms of a Model's; `p_embed` is there for tied
        embeddings.
      specs: None, or `{"embed": ..., "block": ..., "head": ...}` of PartitionSpec trees; "block" describes one layer.
      tiles: as of a Model, with the structure of one layer's parameters: leaves [T, ...] that `block` uses in one loop of
        `zerojax.tiling.operators` alone. In a streamed step their records are tiles.
      stochastic: True where random numbers are drawn; each of the functions then gets a key of (step, layer).
      frozen: as of a Model: a bool, or `{"embed": ..., "block": ..., "head": ...}` of trees of bool; "block" describes one
        layer.
      context: None, or `context(batch) -> tree` of any dtypes, dim 0 the batch: what every block reads and none changes, such
        as segment ids and positions. It is computed once, and kept once.
      per_layer: None, or a tree of arrays [L, ...], such as window sizes; `layer` is the slice of a block's own layer.
      init_state: None, or init functions by "embed", "block" (of ONE layer) and "head", of state that is not trained; of the
        keys that `init_embed`, `init_block` and `init_head` get. A function whose part has state takes it last and returns it:
        `embed(.., state) -> (x, state)`, `block(.., state) -> (x, state)`; `head(.., state) -> (loss, state)` is given
        `{"head": .., "embed": ..}` and returns its own. A streamed step refuses blocks that change theirs.
      predict: None, or `predict(p_head, p_embed, x, batch) -> outputs`, what the head gives without a loss; where the head has
        state, `predict(p_head, p_embed, x, batch, state)`, given what the head is given.
    """

    num_layers: int
    init_embed: Callable[[jax.Array], Params]
    embed: Callable[..., Any]
    init_block: Callable[[jax.Array], Params]
    block: Callable[..., Any]
    init_head: Callable[[jax.Array], Params]
    head: Callable[..., Any]
    specs: Any = None
    tiles: Any = False
    stochastic: bool = False
    frozen: Any = False
    context: Callable[[Batch], Any] | None = None
    per_layer: Any = None
    init_state: Mapping[str, Callable[[jax.Array], Any]] | None = None
    predict: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_layers, bool) or not isinstance(self.num_layers, int) or self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers!r}: an integer of at least 1 is needed")
        if self.specs is not None and set(self.specs) - {"embed", "block", "head"}:
            raise ValueError(f"specs has keys {sorted(self.specs)}: they may be 'embed', 'block' and 'head'")
        if self.init_state is not None and not (
            isinstance(self.init_state, Mapping) and all(callable(init) for init in self.init_state.values())
        ):
            raise ValueError(
                'init_state must be a dict of functions, {"embed": init, "block": init, "head": init}, of the parts that have '
                f"state: each is init(key) -> state; got {self.init_state!r}"
            )
        if self.init_state is not None and set(self.init_state) - {"embed", "block", "head"}:
            raise ValueError(f"init_state has keys {sorted(self.init_state)}: they may be 'embed', 'block' and 'head'")
        if self.context is not None and not callable(self.context):
            raise ValueError(f"context must be a function of the batch, got {type(self.context).__name__}")
        self._check_block_call()
        for path, a in jax.tree_util.tree_flatten_with_path(self.per_layer)[0]:
            if jnp.shape(a)[:1] != (self.num_layers,):
                raise ValueError(
                    f"per_layer{jax.tree_util.keystr(path)} has shape {jnp.shape(a)}: dim 0 counts the layers, of which there "
                    f"are {self.num_layers}"
                )

    def _check_block_call(self) -> None:
        """Raise ValueError for a block that does not take what blocks of this model are given."""
        names = ["p", "x", "key"]
        if self.context is not None or self.per_layer is not None:
            names += ["context", "layer"]
        names += ["state"] if "block" in (self.init_state or {}) else []
        try:
            signature = inspect.signature(self.block)
        except (TypeError, ValueError):  # a callable that tells none
            return
        try:
            signature.bind(*names)
        except TypeError as error:
            raise ValueError(
                f"block is called as block({', '.join(names)}) in a model with this context, per_layer and init_state, and it "
                f"is block{signature}"
            ) from error


BLOCKS = "blocks"
"""The key of the stacked layers in the parameter tree of a LayeredModel."""


def init_layered(
    model: LayeredModel, key: jax.Array, select: Callable[[str, Params], Params] = lambda part, params: params
) -> Params:
    """Make `{"embed", "blocks", "head"}`, one layer at a time; blocks are stacked on a leading layer dim.

    Args:
      model: the layers.
      key: random.
      select: given one of these names, and its parameters or those of one layer, returns what is wanted of them.
    """
    k_embed, k_blocks, k_head = jax.random.split(key, 3)
    return {
        "embed": select("embed", model.init_embed(k_embed)),
        # One layer after the other: a vmap would hold the temporaries of all layers at once.
        BLOCKS: jax.lax.map(lambda k: select(BLOCKS, model.init_block(k)), jax.random.split(k_blocks, model.num_layers)),
        "head": select("head", model.init_head(k_head)),
    }


def layered_specs(model: LayeredModel) -> Any:
    """Return the specs over the stacked tree: those of one block, after an unsplit layer dim."""
    if model.specs is None:
        return None

    def stack(spec: jax.sharding.PartitionSpec | None) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec(None, *(spec or ()))

    specs = dict(model.specs)
    block = specs.get("block")
    stacked = jax.tree.map(stack, block, is_leaf=lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec))
    return {"embed": specs.get("embed"), BLOCKS: stacked, "head": specs.get("head")}


def init_params(model: Model | LayeredModel, key: jax.Array) -> Any:
    """Make the parameter tree."""
    return model.init(key) if isinstance(model, Model) else init_layered(model, key)


def init_state(model: Model | LayeredModel, key: jax.Array) -> Any:
    """Make the state that is not trained, from the keys that the parameters are made of; None where there is none."""
    if isinstance(model, Model):
        return None if model.init_state is None else model.init_state(key)
    if not model.init_state:
        return None
    k_embed, k_blocks, k_head = jax.random.split(key, 3)
    inits = dict(model.init_state)
    state = {name: inits[name](k) for name, k in (("embed", k_embed), ("head", k_head)) if name in inits}
    if "block" in inits:
        state[BLOCKS] = jax.lax.map(inits["block"], jax.random.split(k_blocks, model.num_layers))
    return state
