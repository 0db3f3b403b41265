"""What zerojax trains: a loss over a parameter tree, or a stack of equal layers between an embedding and a head.

A `Model` is any traced loss. A `LayeredModel` names its layers. Streaming, per-layer gathers and rematerialisation need that:

    x[0]   = embed(p_embed, batch)            x: tree of activations, batch first
    x[l+1] = block(p_blocks[l], x[l])         l = 0 .. L-1, a scan over the leading dim of p_blocks
    loss   = head(p_head, p_embed, x[L], batch)
"""

import dataclasses
from collections.abc import Callable
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
      loss: `loss(params, batch, key) -> scalar`, the mean over the examples of the batch. Parameters arrive in the
        compute dtype. `key` is None unless `stochastic`, and always None in `program.eval`.
      specs: tensor parallelism: None, or a tree (or prefix of one) of PartitionSpec over the parameters.
      tiles: tree over the parameters, or a prefix of it: True for leaves [T, ...] that are stacks of tiles, or as an integer
        how many of T lie along the first dim of the weight (`in_tiles` of `zerojax.tiling.tile_kernel`); else False.
        Checkpoints convert them to other numbers of tiles.
      stochastic: True where the loss draws random numbers, such as dropout.
      frozen: tree of bool over the parameters, or a prefix of it: True for weights that are read and never trained. The
        optimizer sees the other leaves alone, None being in the place of these. Leaves of integers or booleans are frozen too.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch, Key], jax.Array]
    specs: Any = None
    tiles: Any = False
    stochastic: bool = False
    frozen: Any = False


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A stack of `num_layers` equal blocks between an embedding and a head.

    Attributes:
      num_layers: L, at least 1.
      init_embed: `init_embed(key) -> p_embed`.
      embed: `embed(p_embed, batch, key) -> x`.
      init_block: `init_block(key) -> p`, the parameters of ONE layer.
      block: `block(p, x, key) -> x`, of the same structure, shapes and dtypes as its input.
      init_head: `init_head(key) -> p_head`.
      head: `head(p_head, p_embed, x, batch, key) -> scalar`, the mean loss; `p_embed` is there for tied embeddings.
      specs: None, or `{"embed": ..., "block": ..., "head": ...}` of PartitionSpec trees; "block" describes one layer.
      tiles: as of a Model, with the structure of one layer's parameters: leaves [T, ...] that `block` uses in one loop of
        `zerojax.tiling.operators` alone. In a streamed step their records are tiles.
      stochastic: True where random numbers are drawn; each of the functions then gets a key of (step, layer).
      frozen: as of a Model: a bool, or `{"embed": ..., "block": ..., "head": ...}` of trees of bool; "block" describes one
        layer.
    """

    num_layers: int
    init_embed: Callable[[jax.Array], Params]
    embed: Callable[[Params, Batch, Key], Any]
    init_block: Callable[[jax.Array], Params]
    block: Callable[[Params, Any, Key], Any]
    init_head: Callable[[jax.Array], Params]
    head: Callable[[Params, Params, Any, Batch, Key], jax.Array]
    specs: Any = None
    tiles: Any = False
    stochastic: bool = False
    frozen: Any = False

    def __post_init__(self) -> None:
        if isinstance(self.num_layers, bool) or not isinstance(self.num_layers, int) or self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers!r}: an integer of at least 1 is needed")
        if self.specs is not None and set(self.specs) - {"embed", "block", "head"}:
            raise ValueError(f"specs has keys {sorted(self.specs)}: they may be 'embed', 'block' and 'head'")


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


def layered_loss(
    model: LayeredModel, *, remat: bool, constrain: Callable[[Any], Any]
) -> Callable[[Params, Batch, Key], jax.Array]:
    """Return `loss(params, batch, key)`: embed, a scan over the blocks, head.

    Args:
      model: the layers.
      remat: keep each layer's input alone, and recompute the layer in backward.
      constrain: applied to the activations at layer boundaries.
    """

    def loss(params: Params, batch: Batch, key: Key) -> jax.Array:
        # Layers have the numbers 0 .. L-1, the embedding L and the head L + 1: no two functions share a key.
        def key_of(layer: int | jax.Array) -> Key:
            return None if key is None else jax.random.fold_in(key, layer)

        def body(x: Any, layer: tuple[Params, jax.Array]) -> tuple[Any, None]:
            p, index = layer
            return constrain(model.block(p, x, key_of(index))), None

        x = constrain(model.embed(params["embed"], batch, key_of(model.num_layers)))
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[BLOCKS])
        check_block(model, one, x, key)
        layers = (params[BLOCKS], jnp.arange(model.num_layers))
        # A scan's body is compiled apart from its derivative's, so there is nothing for CSE to merge, and no barrier is needed.
        x, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False) if remat else body, x, layers)
        return model.head(params["head"], params["embed"], x, batch, key_of(model.num_layers + 1))

    return loss


def check_block(model: LayeredModel, params: Params, x: Any, key: Any) -> None:
    """Raise ValueError unless a block returns what it takes.

    Args:
      model: the layers.
      params: abstract parameters of one layer.
      x: its input, abstract or not.
      key: its random key, abstract or not; or None.
    """
    # Checked before the scan, whose own error would speak of its carry. The usual cause is a promotion to float32.
    out = jax.eval_shape(model.block, params, x, key)
    before, after = (jax.tree.map(lambda a: (a.shape, a.dtype.name), t) for t in (x, out))
    if before != after:
        raise ValueError(
            f"a block must return what it takes: x is {before} before and {after} after; "
            "cast x to the compute dtype in embed, or the result in block"
        )


def init_params(model: Model | LayeredModel, key: jax.Array) -> Any:
    """Make the parameter tree."""
    return model.init(key) if isinstance(model, Model) else init_layered(model, key)


Loss = Callable[[Any, Any, Any], jax.Array]


def checked(loss: Loss) -> Loss:
    """Return `loss` with a check that its result is one floating scalar."""

    def checked_loss(params: Any, batch: Any, key: Any) -> jax.Array:
        out = loss(params, batch, key)
        leaves = jax.tree.leaves(out)
        if len(leaves) != 1 or leaves[0] is not out:
            raise ValueError(f"the loss must be one scalar, got {jax.tree.structure(out)}; return the mean loss alone")
        if not hasattr(out, "shape"):
            raise ValueError(f"the loss must be an array computed from the parameters, got {type(out).__name__} {out!r}")
        if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(f"the loss must be a floating scalar, got shape {out.shape} {out.dtype}; take its mean")
        return out

    return checked_loss
