"""Models that zerojax trains: any loss over a parameter tree, or stacks of equal layers.

A `Model` is any traced loss. A `LayeredModel` names its layers, which streaming, per-layer gathers
and rematerialization need:

    x[0]   = embed(p_embed, batch)            x: tree of activations, batch first
    x[l+1] = block(p_blocks[l], x[l])         l = 0 .. L-1, a scan over the leading dim of p_blocks
    loss   = head(p_head, p_embed, x[L], batch)

An encoder and a decoder, or alternating blocks of two kinds, are several stacks, one after the
other. A stack's `enter` creates what the stack reads in addition to the previous stack's output.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.trees import Batch, Params, Tree
from zerojax.user_values import whole_number

Key = jax.Array | None


@dataclasses.dataclass(frozen=True)
class Model:
    """Any loss over any pytree of parameters. Trainable parameters are floating.

    Attributes:
      init: `init(key) -> params`.
      loss: `loss(params, batch, key)`, the mean over the examples of the batch: a scalar, `(scalar,
        aux)`, or a `zerojax.Loss`. Parameters are passed in the compute dtype. `key` is None unless
        `stochastic`, and always None in `program.eval`.
      specs: tensor parallelism: None, or a tree (or prefix of one) of PartitionSpec over the
        parameters.
      tiles: tree over the parameters, or a prefix of it. True marks a leaf [T, ...] as a stack of T
        tiles; an integer also gives the number of these tiles along the weight's first dim
        (`in_tiles` of `zerojax.tiling.tile_kernel`); False marks any other leaf. Checkpoints
        convert stacks to other numbers of tiles.
      stochastic: whether the loss draws random numbers, for example for dropout.
      frozen: tree of bool over the parameters, or a prefix of it: True for weights that are read
        and never trained. The optimizer sees None in their place. Leaves of integers or booleans
        are always frozen.
      init_state: None, or `init_state(key) -> state`, a tree of any dtypes that is not trained,
        such as running statistics. It gets the same key as `init`. The loss is then `loss(params,
        batch, key, state) -> (loss, new state)`. The state is passed from microbatch to microbatch
        in order; `program.eval` reads it and discards the new state.
      predict: None, or `predict(params, batch) -> outputs`, the model's outputs without a loss;
        with `init_state`, `predict(params, batch, state)`.
      about: None, or a JSON-serializable dict that checkpoints store, such as the scale of
        adapters. Exports read it, because they have no model. A restore compares the entries that
        both the checkpoint and the model have, except for a key "dropout" in a nested dict.
      check_batch: None, or `check_batch(batch)`, which raises ValueError for a batch that the model
        cannot read. It gets each batch as it was passed to the program, before anything is placed
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
      name: key of the stack in the parameter tree, an identifier.
      num_layers: L, at least 1.
      init_block: `init_block(key) -> p`, the parameters of ONE layer.
      block: `block(p, x, key) -> x`, like the block of a LayeredModel.
      enter: None, or `enter(p_embed, x, batch, key) -> (x, context)`. It gets the output of the
        previous stack (for the first stack, of `embed`), and returns the input of the first block
        and the context of all blocks, which are then called as `block(p, x, key, context, layer)`.
        The context is a tree of arrays, or None, and replaces the model's; leaves whose dim 0 is
        the batch are sharded like the batch. Its floating leaves, such as an encoder's output, are
        differentiated.
    """

    name: str
    num_layers: int
    init_block: Callable[[jax.Array], Params]
    block: Callable[..., Any]
    enter: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Check the values."""
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
        if self.enter is None:
            del functions["enter"]
        wrong = [name for name, function in functions.items() if not callable(function)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of stack {self.name!r} must be a function")


@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache of what a LayeredModel's blocks compute for earlier tokens, such as keys and values.

    With it, each token is read only once.

    Attributes:
      init: `init(rows, length, dtype) -> cache` of ONE layer, with room for `length` tokens per
        row: a tree of arrays [rows, ...]; `dtype` is the dtype of activations.
      block: `block(p, x, cache, context, layer) -> (x, cache)`: applies the layer to x[B, T, ...],
        the next T tokens of each row, which also attend to the cached tokens. There is no random
        key. `context` and `layer` are the model's, or None. For a model with several stacks, a
        dict of such functions by the stacks' names.
      max_length: largest number of tokens per row for which a cache gives the same results as
        reading all tokens; None: any number.
    """

    init: Callable[[int, int, Any], Any]
    block: Callable[..., tuple[Any, Any]] | Mapping[str, Callable[..., tuple[Any, Any]]]
    max_length: int | None = None


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A stack of `num_layers` equal blocks between an embedding and a head, or several such stacks.

    Attributes:
      num_layers: L, at least 1.
      init_embed: `init_embed(key) -> p_embed`.
      embed: `embed(p_embed, batch, key) -> x`.
      init_block: `init_block(key) -> p`, the parameters of ONE layer.
      block: `block(p, x, key) -> x`, whose output has the structure, shapes and dtypes of its
        input; with `context` or `per_layer`, `block(p, x, key, context, layer) -> x`. It may return
        `(x, zerojax.Loss)`: the total is added to the loss, and metrics are averaged over layers.
      init_head: `init_head(key) -> p_head`.
      head: `head(p_head, p_embed, x, batch, key)`, the mean loss, in the same forms as a Model's
        loss; `p_embed` serves tied embeddings.
      specs: None, or `{"embed": ..., "block": ..., "head": ...}` of PartitionSpec trees; "block"
        describes one layer.
      tiles: tree over one layer's parameters, with values as in `Model.tiles`: marks leaves [T,
        ...] that `block` uses only in one loop of `zerojax.tiling.operators`. In a streamed step
        each of their tiles is a record.
      stochastic: whether random numbers are drawn; each function then gets a key of (step, layer).
      frozen: a bool, or `{"embed": ..., "block": ..., "head": ...}` of trees of bool, as in
        `Model.frozen`; "block" describes one layer.
      context: None, or `context(batch) -> tree` of any dtypes with the batch as dim 0, such as
        segment ids and positions: arrays that every block reads and none changes. It is computed
        and stored once.
      per_layer: None, or a tree of arrays [L, ...], such as window sizes; a block's `layer` is the
        slice for its layer.
      init_state: None, or functions by "embed", "block" (for ONE layer) and "head" that create
        state that is not trained, from the keys that `init_embed`, `init_block` and `init_head`
        get. If a part has state, its function takes the state last and returns it: `embed(..,
        state) -> (x, state)`, `block(.., state) -> (x, state)`; `head(.., state) -> (loss, state)`
        gets `{"head": .., "embed": ..}` and returns its own. A streamed step refuses blocks that
        change their state.
      predict: None, or `predict(p_head, p_embed, x, batch) -> outputs`, the head's outputs without
        a loss; if the head has state, `predict(p_head, p_embed, x, batch, state)`, with the same
        state that the head gets.
      stacks: several stacks in order, instead of `num_layers`, `init_block` and `block`;
        `num_layers` is then their total, whatever is passed. The "block" entries of `specs`,
        `frozen` and `init_state`, and `tiles` and `per_layer`, are then dicts by the stacks' names;
        stacks may be left out of them.
      enter: None, or `enter(p_embed, x, batch, key) -> (x, context)`, as in a `Stack`; for a model
        without `stacks`.
      about: None, or a JSON-serializable dict that checkpoints store, as in a `Model`.
      cache: None, or a cache for earlier tokens, with which `zerojax.generate` reads each token
        once; for a model without `enter` and `init_state`.
      check_batch: None, or `check_batch(batch)`, which raises ValueError for a batch that the model
        cannot read, as in a `Model`.
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
        """Check the values; functions are not called."""
        self._check_parts()
        has_enter = self.enter is not None or any(stack.enter is not None for stack in self.stacks)
        if self.cache is not None and (has_enter or self.init_state is not None):
            raise ValueError("a cache needs a model without enter and init_state: leave out cache=")
        if self.specs is not None and set(self.specs) - {"embed", "block", "head"}:
            raise ValueError(
                f"specs has keys {sorted(self.specs)}: only 'embed', 'block' and 'head' are allowed"
            )
        self._check_init_state()
        if self.context is not None and not callable(self.context):
            raise ValueError(
                f"context must be a function of the batch, got {type(self.context).__name__}"
            )
        if self.stacks:
            self._check_stacks()
            return
        self._check_block_call()
        for path, a in jax.tree_util.tree_flatten_with_path(self.per_layer)[0]:
            if jnp.shape(a)[:1] != (self.num_layers,):
                raise ValueError(
                    f"per_layer{jax.tree_util.keystr(path)} has shape {jnp.shape(a)}: dim 0 must "
                    f"be the number of layers, {self.num_layers}"
                )

    def split_layer_keys(self, key: jax.Array) -> jax.Array:
        """Return the keys from which the layers of all stacks are created, key[L].

        Args:
          key: the random key of all layers.
        """
        return jax.random.split(key, self.num_layers)

    def _check_init_state(self) -> None:
        """Raise ValueError unless `init_state` is None, or functions by the names of parts."""
        init_state = self.init_state
        if init_state is None:
            return
        inits: list[Any] = []
        if isinstance(init_state, Mapping):
            inits = list(init_state.values())
            if self.stacks and "block" in init_state:
                block_inits: Any = init_state["block"]
                self._check_by_stack("init_state['block']", block_inits, is_dict=True)
                inits = [init for part, init in init_state.items() if part != "block"]
                inits += block_inits.values()
        if not isinstance(init_state, Mapping) or not all(map(callable, inits)):
            raise ValueError(
                'init_state must be a dict of functions init(key) -> state, {"embed": init, '
                '"block": init, "head": init}, for the parts '
                f"that have state; got {init_state!r}"
            )
        if set(init_state) - {"embed", "block", "head"}:
            raise ValueError(
                f"init_state has keys {sorted(init_state)}: only 'embed', 'block' and 'head' "
                "are allowed"
            )

    def _check_stacks(self) -> None:
        """Raise ValueError unless the fields of several stacks, and each stack, are valid."""
        # The specs and flags of blocks are prefixes of the blocks' tree, which is a dict by stack.
        self._check_by_stack("specs['block']", (self.specs or {}).get("block"))
        self._check_by_stack("per_layer", self.per_layer, is_dict=self.per_layer is not None)
        self._check_by_stack("tiles", self.tiles)
        if self.cache is not None:
            names = [stack.name for stack in self.stacks]
            if not isinstance(self.cache.block, Mapping) or set(self.cache.block) != set(names):
                raise ValueError(
                    "the block of a cache must be a dict of functions by the names of the stacks, "
                    f"{names}"
                )
        frozen = self.frozen.get("block") if isinstance(self.frozen, Mapping) else None
        self._check_by_stack("frozen['block']", frozen)
        for stack in self.stacks:
            try:
                one_stack(self, stack)  # checks the stack as a model of its own
            except ValueError as error:
                raise ValueError(f"stack {stack.name!r}: {error}") from error

    def _check_parts(self) -> None:
        """Raise ValueError unless either one stack's functions or several stacks are given.

        For several stacks, `num_layers` is set to their total.
        """
        needed = ["init_embed", "embed", "init_head", "head"]
        alternative = ""
        if not self.stacks:
            needed += ["num_layers", "init_block", "block"]
            alternative = ", or `stacks` for blocks"
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a LayeredModel needs {', '.join(missing)}{alternative}")
        if not self.stacks:
            object.__setattr__(self, "num_layers", whole_number("num_layers", self.num_layers, 1))
            return
        if not isinstance(self.stacks, Sequence) or not all(
            isinstance(stack, Stack) for stack in self.stacks
        ):
            raise ValueError(f"stacks must be a sequence of zerojax.Stack, got {self.stacks!r}")
        object.__setattr__(self, "stacks", tuple(self.stacks))
        names = [stack.name for stack in self.stacks]
        count = sum(stack.num_layers for stack in self.stacks)
        if len(set(names)) < len(names):
            raise ValueError(f"the stacks have the names {names}: use different names")
        # num_layers is not checked: `dataclasses.replace` with other stacks passes the old total.
        fields = {"init_block": self.init_block, "block": self.block, "enter": self.enter}
        wrong = [name for name, value in fields.items() if value is not None]
        if wrong:
            raise ValueError(
                f"a LayeredModel with stacks is given {', '.join(wrong)}: set them on each Stack "
                "instead"
            )
        object.__setattr__(self, "num_layers", count)

    def _check_by_stack(self, field: str, value: Any, is_dict: bool = False) -> None:
        """Raise ValueError unless `value` is a dict by existing stacks, or one for all of them."""
        names = [stack.name for stack in self.stacks]
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - set(names), key=str)
            if unknown:
                raise ValueError(
                    f"{field} has keys {unknown}: a dict by the names of the stacks is needed, "
                    f"{names}"
                )
            return
        is_for_all = value is None or isinstance(value, bool)
        if is_dict or not is_for_all:
            raise ValueError(
                f"{field}={value!r}: a dict by the names of the stacks is needed, {names}"
            )

    def _check_block_call(self) -> None:
        """Raise ValueError unless `block` and `enter` accept the arguments that they will get."""
        names = ["p", "x", "key"]
        if takes_context(self):
            names += ["context", "layer"]
        if "block" in (self.init_state or {}):
            names += ["state"]
        _check_call(
            "block",
            self.block,
            names,
            " in a model with this context, enter, per_layer and init_state",
        )
        if self.enter is not None:
            _check_call("enter", self.enter, ["p_embed", "x", "batch", "key"])


def _check_call(
    field: str, function: Callable[..., Any], names: Sequence[str], condition: str = ""
) -> None:
    """Raise ValueError unless a function accepts positional arguments of these names.

    Args:
      field: name of the function.
      function: function to check.
      names: names of the arguments.
      condition: text of the error that says when the function is called with these arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(
            f"{field} is called as {field}({', '.join(names)}){condition}, but it is "
            f"{field}{signature}"
        ) from error


BLOCKS = "blocks"
"""Key of the stacked layers in the parameter tree of a LayeredModel."""


def takes_context(model: LayeredModel) -> bool:
    """Return whether a one-stack model passes its blocks a context and a slice of `per_layer`."""
    return model.context is not None or model.per_layer is not None or model.enter is not None


def one_stack(model: LayeredModel, stack: Stack) -> LayeredModel:
    """Return a model with only one of its stacks, between the same embedding and head."""
    inits: dict[str, Any] = dict(model.init_state or {})
    block_inits = inits.pop("block", None) or {}
    if block_inits.get(stack.name) is not None:
        inits["block"] = block_inits[stack.name]
    return dataclasses.replace(
        model,
        num_layers=stack.num_layers,
        init_block=stack.init_block,
        block=stack.block,
        enter=stack.enter,
        stacks=(),
        cache=None,
        specs=None,
        frozen=False,
        tiles=False,  # specs, frozen and tiles are read from the full model
        per_layer=(model.per_layer or {}).get(stack.name),
        init_state=inits or None,
    )


@dataclasses.dataclass(frozen=True)
class StackModel:
    """One stack of a model.

    Attributes:
      name: name of the stack; "" if it is the only one.
      model: model with only this stack.
      first: number of layers in earlier stacks: its layers are numbered `first` .. `first + L - 1`.
      number: index of the stack.
    """

    name: str
    model: LayeredModel
    first: int = 0
    number: int = 0

    def of(self, tree: Tree) -> Any:
        """Return this stack's part of a tree over all blocks, such as their parameters."""
        if not self.name or tree is None:
            return tree
        return tree.get(self.name)

    def select_keys(self, keys: jax.Array) -> jax.Array:
        """Return the keys of this stack's layers, of the keys of all layers (`layer_keys`)."""
        return keys[self.first : self.first + self.model.num_layers]


def list_stacks(model: LayeredModel) -> tuple[StackModel, ...]:
    """Return the stacks of a model, in order."""
    if not model.stacks:
        return (StackModel("", model),)
    stacks = list[StackModel]()
    first = 0
    for number, stack in enumerate(model.stacks):
        stacks.append(StackModel(stack.name, one_stack(model, stack), first, number))
        first += stack.num_layers
    return tuple(stacks)


def by_stack(model: LayeredModel, of_each: Callable[[StackModel], Any]) -> Any:
    """Return `of_each(stack)` by name, or only its value if the model has a single stack."""
    values = {stack.name: of_each(stack) for stack in list_stacks(model)}
    return values if model.stacks else values[""]


def of_every_stack(model: LayeredModel, value: Any, missing: Any) -> Any:
    """Return a dict by stack in which `missing` fills in for stacks that `value` leaves out.

    A `value` that is not a dict by stack is returned unchanged.
    """
    if not model.stacks or not isinstance(value, Mapping):
        return value
    return {stack.name: value.get(stack.name, missing) for stack in model.stacks}


def layer_keys(model: LayeredModel, key: jax.Array) -> jax.Array:
    """Return the keys from which the layers of all stacks are created, key[L]."""
    return model.split_layer_keys(jax.random.split(key, 3)[1])


def init_layered(
    model: LayeredModel,
    key: jax.Array,
    select: Callable[[Sequence[str], Params], Params] = lambda path, params: params,
) -> Params:
    """Create `{"embed", "blocks", "head"}`, one layer at a time.

    Blocks are stacked along a leading layer dim.

    Args:
      model: model whose parameters are created.
      key: random key.
      select: function `select(path, params)` that returns the wanted part of the parameters of the
        embedding, the head, or one layer; `path` is their place in the parameter tree.
    """
    k_embed, _, k_head = jax.random.split(key, 3)
    keys = layer_keys(model, key)

    def stacked(stack: StackModel) -> Params:
        path = block_path(stack.name)
        # One layer after the other: a vmap would hold the temporaries of all layers simultaneously.
        return jax.lax.map(
            lambda k: select(path, stack.model.init_block(k)), stack.select_keys(keys)
        )

    return {
        "embed": select(("embed",), model.init_embed(k_embed)),
        BLOCKS: by_stack(model, stacked),
        "head": select(("head",), model.init_head(k_head)),
    }


def abstract_block(model: LayeredModel) -> Params:
    """Return the shapes of one layer's parameters, of a model with a single stack."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(model.init_block, key)


def block_path(stack: str) -> tuple[str, ...]:
    """Return the path of a stack's layers in the parameter tree; `stack` is "" for the only one."""
    return (BLOCKS, stack) if stack else (BLOCKS,)


def layered_specs(model: LayeredModel) -> Any:
    """Return the specs over the stacked tree: a block's specs after an unsplit layer dim."""
    if model.specs is None:
        return None

    def stack(spec: jax.sharding.PartitionSpec | None) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec(None, *(spec or ()))

    specs = dict(model.specs)
    block = of_every_stack(model, specs.get("block"), None)
    stacked = jax.tree.map(
        stack, block, is_leaf=lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec)
    )
    return {"embed": specs.get("embed"), BLOCKS: stacked, "head": specs.get("head")}


def init_params(model: Model | LayeredModel, key: jax.Array) -> Any:
    """Create the parameter tree."""
    return model.init(key) if isinstance(model, Model) else init_layered(model, key)


def init_state(model: Model | LayeredModel, key: jax.Array) -> Any:
    """Create the untrained state from the same keys as the parameters; None if there is none."""
    if isinstance(model, Model):
        return None if model.init_state is None else model.init_state(key)
    if not model.init_state:
        return None
    k_embed, _, k_head = jax.random.split(key, 3)
    inits = dict(model.init_state)
    keys = layer_keys(model, key)
    state = {}
    if "embed" in inits:
        state["embed"] = inits["embed"](k_embed)
    if "head" in inits:
        state["head"] = inits["head"](k_head)

    def stacked(stack: StackModel) -> Any:
        init = (stack.model.init_state or {}).get("block")
        layers = stack.select_keys(keys)
        return None if init is None else jax.lax.map(init, layers)

    if "block" in inits:
        state[BLOCKS] = by_stack(model, stacked)
    return state
