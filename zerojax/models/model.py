"""What zerojax trains: a loss over a parameter tree, or stacks of equal layers between an embedding
and a head.

A `Model` is any traced loss. A `LayeredModel` names its layers. Streaming, per-layer gathers and
rematerialisation need that:

    x[0]   = embed(p_embed, batch)            x: tree of activations, batch first
    x[l+1] = block(p_blocks[l], x[l])         l = 0 .. L-1, a scan over the leading dim of p_blocks
    loss   = head(p_head, p_embed, x[L], batch)

An encoder and a decoder, or blocks of two kinds in turn, are several stacks, one after the other.
What a stack reads besides the output of the one before it is made by its `enter`.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.given import whole_number

Params = Any
Batch = Any
Key = jax.Array | None


@dataclasses.dataclass(frozen=True)
class Model:
    """Any loss over any pytree of parameters. Those that are trained are floating.

    Attributes:
      init: `init(key) -> params`.
      loss: `loss(params, batch, key)`, the mean over the examples of the batch: a scalar, `(scalar,
        aux)`, or a `zerojax.Loss`. Parameters arrive in the compute dtype. `key` is None unless
        `stochastic`, and always None in `program.eval`.
      specs: tensor parallelism: None, or a tree (or prefix of one) of PartitionSpec over the
        parameters.
      tiles: tree over the parameters, or a prefix of it: True for leaves [T, ...] that are stacks
        of tiles, or as an integer how many of T lie along the first dim of the weight (`in_tiles`
        of `zerojax.tiling.tile_kernel`); else False. Checkpoints convert them to other numbers of
        tiles.
      stochastic: True where the loss draws random numbers, such as dropout.
      frozen: tree of bool over the parameters, or a prefix of it: True for weights that are read
        and never trained. The optimizer sees the other leaves alone, None being in the place of
        these. Leaves of integers or booleans are frozen too.
      init_state: None, or `init_state(key) -> state`, a tree of any dtypes that is not trained,
        such as running statistics; of the key that `init` gets. The loss is then `loss(params,
        batch, key, state) -> (loss, new state)`. Microbatches pass it on in order; `program.eval`
        reads it and drops what is new.
      predict: None, or `predict(params, batch) -> outputs`, what the model gives without a loss;
        with `init_state` `predict(params, batch, state)`.
      about: None, or a dict for JSON that checkpoints keep, such as the scale of adapters: for
        exports, which see no model. A restore compares what both tell, but for a key "dropout" of a
        dict in it.
      check_batch: None, or `check_batch(batch)`, which raises ValueError for a batch that the model
        cannot read. It is given each batch as the program was given it, before anything is placed
        or traced; arrays may be abstract.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., Any]
    specs: Any = None
    tiles: Any = False
    stochastic: bool = False
    frozen: Any = False
    init_state: Callable[[jax.Array], Any] | None = None
    predict: Callable[..., Any] | None = None
    about: Mapping[str, Any] | None = None
    check_batch: Callable[[Batch], None] | None = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """One of several stacks of equal blocks of a LayeredModel, such as an encoder or a decoder.

    Attributes:
      name: its key in the parameter tree, an identifier.
      num_layers: L, at least 1.
      init_block: `init_block(key) -> p`, the parameters of ONE layer.
      block: as of a LayeredModel.
      enter: None, or `enter(p_embed, x, batch, key) -> (x, context)`. It is given the output of the
        stack before this one (that of `embed`, for the first), and makes the input of the first
        block, and the context of all blocks, which then are called `block(p, x, key, context,
        layer)`. The context is a tree of arrays, or None, in the place of the model's; leaves whose
        dim 0 is the batch are split as it is. Its floating leaves, such as an encoder's output, are
        differentiated.
    """

    name: str
    num_layers: int
    init_block: Callable[[jax.Array], Params]
    block: Callable[..., Any]
    enter: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(
                f"the name of a stack must be an identifier, such as 'encoder', got {self.name!r}"
            )
        object.__setattr__(
            self,
            "num_layers",
            whole_number(f"num_layers of stack {self.name!r}", self.num_layers, 1),
        )
        functions = {"init_block": self.init_block, "block": self.block, "enter": self.enter}
        if wrong := [
            name
            for name, f in functions.items()
            if not callable(f) and (name, f) != ("enter", None)
        ]:
            raise ValueError(f"{', '.join(wrong)} of stack {self.name!r} must be a function")


@dataclasses.dataclass(frozen=True)
class Cache:
    """What the blocks of a LayeredModel keep of earlier tokens, such as keys and values, so that
    these are read once.

    Attributes:
      init: `init(rows, length, dtype) -> cache` of ONE layer, with room for `length` tokens of each
        row: a tree of arrays [rows, ...]; `dtype` is that of activations.
      block: `block(p, x, cache, context, layer) -> (x, cache)`: the layer over x[B, T, ...], the
        next T tokens of each row, which see those in the cache too; without keys. `context` and
        `layer` are those of the model, or None.
    """

    init: Callable[[int, int, Any], Any]
    block: Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A stack of `num_layers` equal blocks between an embedding and a head; or several stacks, one
    after the other.

    Attributes:
      num_layers: L, at least 1.
      init_embed: `init_embed(key) -> p_embed`.
      embed: `embed(p_embed, batch, key) -> x`.
      init_block: `init_block(key) -> p`, the parameters of ONE layer.
      block: `block(p, x, key) -> x`, of the same structure, shapes and dtypes as its input; with
        `context` or `per_layer` `block(p, x, key, context, layer) -> x`. It may return `(x,
        zerojax.Loss)`: the total is added to the loss, and metrics are averaged over layers.
      init_head: `init_head(key) -> p_head`.
      head: `head(p_head, p_embed, x, batch, key)`, the mean loss, in the forms of a Model's;
        `p_embed` is there for tied embeddings.
      specs: None, or `{"embed": ..., "block": ..., "head": ...}` of PartitionSpec trees; "block"
        describes one layer.
      tiles: as of a Model, with the structure of one layer's parameters: leaves [T, ...] that
        `block` uses in one loop of `zerojax.tiling.operators` alone. In a streamed step their
        records are tiles.
      stochastic: True where random numbers are drawn; each of the functions then gets a key of
        (step, layer).
      frozen: as of a Model: a bool, or `{"embed": ..., "block": ..., "head": ...}` of trees of
        bool; "block" describes one layer.
      context: None, or `context(batch) -> tree` of any dtypes, dim 0 the batch: what every block
        reads and none changes, such as segment ids and positions. It is computed once, and kept
        once.
      per_layer: None, or a tree of arrays [L, ...], such as window sizes; `layer` is the slice of a
        block's own layer.
      init_state: None, or init functions by "embed", "block" (of ONE layer) and "head", of state
        that is not trained; of the keys that `init_embed`, `init_block` and `init_head` get. A
        function whose part has state takes it last and returns it: `embed(.., state) -> (x,
        state)`, `block(.., state) -> (x, state)`; `head(.., state) -> (loss, state)` is given
        `{"head": .., "embed": ..}` and returns its own. A streamed step refuses blocks that change
        theirs.
      predict: None, or `predict(p_head, p_embed, x, batch) -> outputs`, what the head gives without
        a loss; where the head has state, `predict(p_head, p_embed, x, batch, state)`, given what
        the head is given.
      stacks: several stacks, in order, in the place of `num_layers`, `init_block` and `block`;
        `num_layers` is then that of all together, whatever is given. What "block" has in `specs`,
        `frozen` and `init_state`, and `tiles` and `per_layer`, are then dicts by the names of the
        stacks; stacks may be left out of them.
      enter: as of a `Stack`, of a model without `stacks`.
      about: as of a Model.
      cache: None, or what blocks keep of earlier tokens, with which `zerojax.generate` reads each
        token once; of a model of one stack, without `enter` and `init_state`.
      check_batch: as of a Model.
    """

    num_layers: int = None  # pyright: ignore[reportAssignmentType]  # required without `stacks`, as are all functions
    init_embed: Callable[[jax.Array], Params] = None  # pyright: ignore[reportAssignmentType]
    embed: Callable[..., Any] = None  # pyright: ignore[reportAssignmentType]
    init_block: Callable[[jax.Array], Params] = None  # pyright: ignore[reportAssignmentType]
    block: Callable[..., Any] = None  # pyright: ignore[reportAssignmentType]
    init_head: Callable[[jax.Array], Params] = None  # pyright: ignore[reportAssignmentType]
    head: Callable[..., Any] = None  # pyright: ignore[reportAssignmentType]
    specs: Any = None
    tiles: Any = False
    stochastic: bool = False
    frozen: Any = False
    context: Callable[[Batch], Any] | None = None
    per_layer: Any = None
    init_state: Mapping[str, Callable[[jax.Array], Any]] | None = None
    predict: Callable[..., Any] | None = None
    stacks: Sequence[Stack] = ()
    enter: Callable[..., Any] | None = None
    about: Mapping[str, Any] | None = None
    cache: Cache | None = None
    check_batch: Callable[[Batch], None] | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        if self.cache is not None and (
            self.stacks or self.enter is not None or self.init_state is not None
        ):
            raise ValueError(
                "a cache is of a model of one stack, without enter and init_state: leave out cache="
            )
        if self.specs is not None and set(self.specs) - {"embed", "block", "head"}:
            raise ValueError(
                f"specs has keys {sorted(self.specs)}: they may be 'embed', 'block' and 'head'"
            )
        inits: list[Any] = (
            list(self.init_state.values()) if isinstance(self.init_state, Mapping) else []
        )
        if self.stacks and isinstance(self.init_state, Mapping) and "block" in self.init_state:
            self._check_by_stack("init_state['block']", self.init_state["block"], is_dict=True)
            of_blocks: Any = self.init_state["block"]
            inits = [init for part, init in self.init_state.items() if part != "block"] + [
                *of_blocks.values()
            ]
        if self.init_state is not None and not (
            isinstance(self.init_state, Mapping) and all(map(callable, inits))
        ):
            raise ValueError(
                'init_state must be a dict of functions, {"embed": init, "block": init, "head": init}, of the parts that have '
                f"state: each is init(key) -> state; got {self.init_state!r}"
            )
        if self.init_state is not None and set(self.init_state) - {"embed", "block", "head"}:
            raise ValueError(
                f"init_state has keys {sorted(self.init_state)}: they may be 'embed', 'block' and 'head'"
            )
        if self.context is not None and not callable(self.context):
            raise ValueError(
                f"context must be a function of the batch, got {type(self.context).__name__}"
            )
        if self.stacks:
            # The specs and flags of blocks are prefixes of their tree, which is a dict by stack.
            self._check_by_stack("specs['block']", (self.specs or {}).get("block"))
            frozen = self.frozen.get("block") if isinstance(self.frozen, Mapping) else None
            self._check_by_stack("per_layer", self.per_layer, is_dict=self.per_layer is not None)
            for what, value in (("tiles", self.tiles), ("frozen['block']", frozen)):
                self._check_by_stack(what, value)
            for stack in self.stacks:
                try:
                    one_stack(self, stack)  # which checks what is below
                except ValueError as error:
                    raise ValueError(f"stack {stack.name!r}: {error}") from error
            return
        self._check_block_call()
        for path, a in jax.tree_util.tree_flatten_with_path(self.per_layer)[0]:
            if jnp.shape(a)[:1] != (self.num_layers,):
                raise ValueError(
                    f"per_layer{jax.tree_util.keystr(path)} has shape {jnp.shape(a)}: dim 0 counts the layers, of which there "
                    f"are {self.num_layers}"
                )

    def _check_parts(self) -> None:
        """Raise ValueError unless the functions of one stack are given, or several stacks; count
        the layers of these.
        """
        of_one = ("num_layers", "init_block", "block")
        needed = ("init_embed", "embed", "init_head", "head", *(() if self.stacks else of_one))
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(
                f"a LayeredModel needs {', '.join(missing)}{'' if self.stacks else ', or `stacks` for blocks'}"
            )
        if not self.stacks:
            object.__setattr__(self, "num_layers", whole_number("num_layers", self.num_layers, 1))
            return None
        if not isinstance(self.stacks, Sequence) or not all(
            isinstance(stack, Stack) for stack in self.stacks
        ):
            raise ValueError(f"stacks must be a sequence of zerojax.Stack, got {self.stacks!r}")
        object.__setattr__(self, "stacks", tuple(self.stacks))
        names, count = (
            [stack.name for stack in self.stacks],
            sum(stack.num_layers for stack in self.stacks),
        )
        if len(set(names)) < len(names):
            raise ValueError(f"the stacks have the names {names}: each needs its own")
        # Not num_layers: a copy with other stacks, as `dataclasses.replace` makes it, is given that
        # of the first.
        given = {"init_block": self.init_block, "block": self.block, "enter": self.enter}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"a LayeredModel with stacks is given {', '.join(wrong)}: each Stack has its own"
            )
        object.__setattr__(self, "num_layers", count)

    def _check_by_stack(self, what: str, value: Any, is_dict: bool = False) -> None:
        """Raise ValueError for what names stacks that are not there, or is neither a dict by stack
        nor the same for all.
        """
        names = [stack.name for stack in self.stacks]
        if isinstance(value, Mapping) and (unknown := sorted(set(value) - set(names), key=str)):
            raise ValueError(
                f"{what} has keys {unknown}: a dict by the names of the stacks is needed, {names}"
            )
        if not isinstance(value, Mapping) and (
            is_dict or not (value is None or isinstance(value, bool))
        ):
            raise ValueError(
                f"{what}={value!r}: a dict by the names of the stacks is needed, {names}"
            )

    def _check_block_call(self) -> None:
        """Raise ValueError for a block, or an enter, that does not take what those of this model
        are given.
        """
        names = ["p", "x", "key"]
        if takes_context(self):
            names += ["context", "layer"]
        names += ["state"] if "block" in (self.init_state or {}) else []
        _check_call(
            "block",
            self.block,
            names,
            " in a model with this context, enter, per_layer and init_state",
        )
        if self.enter is not None:
            _check_call("enter", self.enter, ["p_embed", "x", "batch", "key"])


def _check_call(
    what: str, function: Callable[..., Any], names: Sequence[str], where: str = ""
) -> None:
    """Raise ValueError unless a function takes arguments of these names, by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable that tells none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(
            f"{what} is called as {what}({', '.join(names)}){where}, and it is {what}{signature}"
        ) from error


BLOCKS = "blocks"
"""The key of the stacked layers in the parameter tree of a LayeredModel."""


def takes_context(model: LayeredModel) -> bool:
    """Tell whether the blocks of a model of one stack are given a context and a slice of
    `per_layer`.
    """
    return model.context is not None or model.per_layer is not None or model.enter is not None


def one_stack(model: LayeredModel, stack: Stack) -> LayeredModel:
    """Return a model with one of its stacks alone: between the same embedding and head, what is
    said of that stack.
    """
    inits: dict[str, Any] = dict(model.init_state or {})
    if (init := (inits.pop("block", None) or {}).get(stack.name)) is not None:
        inits["block"] = init
    return dataclasses.replace(
        model,
        num_layers=stack.num_layers,
        init_block=stack.init_block,
        block=stack.block,
        enter=stack.enter,
        stacks=(),
        specs=None,
        frozen=False,
        tiles=False,  # these three are read of the whole tree
        per_layer=(model.per_layer or {}).get(stack.name),
        init_state=inits or None,
    )


@dataclasses.dataclass(frozen=True)
class StackModel:
    """One stack of a model.

    Attributes:
      name: its name; "" where it is the only one.
      model: with this stack alone.
      first: layers of the stacks before it: its layers have the numbers `first` .. `first + L - 1`.
      number: of the stack.
    """

    name: str
    model: LayeredModel
    first: int = 0
    number: int = 0

    def of(self, tree: Any) -> Any:
        """Return the part of what there is of all blocks, such as their parameters, that is this
        stack's.
        """
        return tree if not self.name or tree is None else tree.get(self.name)


def stacks_of(model: LayeredModel) -> tuple[StackModel, ...]:
    """Return the stacks of a model, in order."""
    if not model.stacks:
        return (StackModel("", model),)
    firsts = itertools.accumulate((stack.num_layers for stack in model.stacks), initial=0)
    pairs = enumerate(zip(model.stacks, firsts, strict=False))
    return tuple(
        StackModel(stack.name, one_stack(model, stack), first, number)
        for number, (stack, first) in pairs
    )


def by_stack(model: LayeredModel, of_each: Callable[[StackModel], Any]) -> Any:
    """Return what there is of each stack: a dict by name, or that of the only one."""
    parts = {stack.name: of_each(stack) for stack in stacks_of(model)}
    return parts if model.stacks else parts[""]


def of_every_stack(model: LayeredModel, value: Any, missing: Any) -> Any:
    """Return a dict by stack with `missing` for those that are left out; whatever is no dict by
    stack as it is.
    """
    if not model.stacks or not isinstance(value, Mapping):
        return value
    return {stack.name: value.get(stack.name, missing) for stack in model.stacks}


def layer_keys(model: LayeredModel, key: jax.Array) -> jax.Array:
    """Return the keys of which the layers are made, of all stacks, key[L]."""
    return jax.random.split(jax.random.split(key, 3)[1], model.num_layers)


def init_layered(
    model: LayeredModel,
    key: jax.Array,
    select: Callable[[Sequence[str], Params], Params] = lambda part, params: params,
) -> Params:
    """Make `{"embed", "blocks", "head"}`, one layer at a time; blocks are stacked on a leading
    layer dim.

    Args:
      model: the layers.
      key: random.
      select: given the keys of one of these, or of one stack, and its parameters or those of one
        layer, returns what is wanted of them.
    """
    k_embed, _, k_head = jax.random.split(key, 3)
    keys = layer_keys(model, key)

    def stacked(stack: StackModel) -> Params:
        part = block_path(stack.name)
        mine = keys[stack.first : stack.first + stack.model.num_layers]
        # One layer after the other: a vmap would hold the temporaries of all layers at once.
        return jax.lax.map(lambda k: select(part, stack.model.init_block(k)), mine)

    return {
        "embed": select(("embed",), model.init_embed(k_embed)),
        BLOCKS: by_stack(model, stacked),
        "head": select(("head",), model.init_head(k_head)),
    }


def block_path(stack: str) -> tuple[str, ...]:
    """Return the keys of a stack's layers in the parameter tree, given its name, "" of the only
    one.
    """
    return (BLOCKS, stack) if stack else (BLOCKS,)


def layered_specs(model: LayeredModel) -> Any:
    """Return the specs over the stacked tree: those of one block, after an unsplit layer dim."""
    if model.specs is None:
        return None

    def stack(spec: jax.sharding.PartitionSpec | None) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec(None, *(spec or ()))

    specs = dict(model.specs)
    block = specs.get("block")
    block = of_every_stack(model, block, None)
    stacked = jax.tree.map(
        stack, block, is_leaf=lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec)
    )
    return {"embed": specs.get("embed"), BLOCKS: stacked, "head": specs.get("head")}


def init_params(model: Model | LayeredModel, key: jax.Array) -> Any:
    """Make the parameter tree."""
    return model.init(key) if isinstance(model, Model) else init_layered(model, key)


def init_state(model: Model | LayeredModel, key: jax.Array) -> Any:
    """Make the state that is not trained, from the keys that the parameters are made of; None where
    there is none.
    """
    if isinstance(model, Model):
        return None if model.init_state is None else model.init_state(key)
    if not model.init_state:
        return None
    k_embed, _, k_head = jax.random.split(key, 3)
    inits, keys = dict(model.init_state), layer_keys(model, key)
    state = {
        name: inits[name](k) for name, k in (("embed", k_embed), ("head", k_head)) if name in inits
    }

    def stacked(stack: StackModel) -> Any:
        init = (stack.model.init_state or {}).get("block")
        mine = keys[stack.first : stack.first + stack.model.num_layers]
        return None if init is None else jax.lax.map(init, mine)

    if "block" in inits:
        state[BLOCKS] = by_stack(model, stacked)
    return state
