"""Flax modules, NNX and Linen, as a Model or a LayeredModel. The modules need no changes.

    NNX     pass a function of the random streams: `lambda rngs: GPT(config, rngs=rngs)`
    Linen   pass the module itself, `GPT(config)`, and an example batch, because Linen finds the
            shapes of parameters by a call

The user's loss is called with the module, which holds the parameters: `loss(model, batch)`. A Linen
module is bound, so that it is called in the same way. Parameters become a plain nested dict. Splits
over `tensor` are read from the modules' annotations (`nnx.with_partitioning`,
`nn.with_partitioning`, `nn.with_logical_partitioning`); `zerojax.models.axes` documents how names
are translated.

Random numbers: an NNX module with random streams (dropout) gets new keys for each (step,
microbatch, layer). A Linen module gets the streams named in `rngs`, or none if there is no key. A
loss with an argument `key` gets a key, and None in `program.eval`.

Modes: a step passes a key and `program.eval` passes none. So an NNX module is in `train()` mode if
there is a key and in `eval()` mode otherwise, whatever mode its constructor set. A module that
these modes change counts as stochastic even without random streams. `zerojax.models.flax_calls`
documents how Linen modules get their mode.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.models.axes import AxisNames, Rules
from zerojax.models.flax_calls import (
    EMBED_IN_HEAD,
    Calls,
    call_with_key,
    takes_key,
    without_variables,
)
from zerojax.models.flax_linen import LinenPart
from zerojax.models.flax_nnx import NnxPart
from zerojax.models.model import Cache, LayeredModel, Model
from zerojax.trees import Batch, Context, Params

Modules = Callable[[nnx.Rngs], nnx.Module] | nn.Module


class Part(Protocol):
    """A module, split into parts.

    Attributes:
      init_state: `init_state(key) -> state`, which creates the untrained state, or None if there is
        none.
      stochastic: whether the module draws random numbers, or differs between training and
        evaluation.
      specs, tiles, frozen: fields of a Model for the module's parameters.
      collections: Linen collections that are state.
    """

    init_state: Callable[[jax.Array], Any] | None
    stochastic: bool
    specs: Any
    tiles: Any
    frozen: Any
    collections: tuple[str, ...]

    def init(self, key: jax.Array) -> Any:
        """Create the module's parameters, a nested dict."""
        ...

    def bind(self, params: Params, key: jax.Array | None, state: Any = None) -> Any:
        """Return the module with these parameters and state, in training mode if there is a key."""
        ...

    def arguments(self, key: jax.Array | None) -> dict[str, Any]:
        """Return keyword arguments for a call of the module."""
        ...

    def read_state(self, module: Any) -> Any:
        """Return the state of a bound module after it was called."""
        ...


def from_flax(
    module: Modules | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    embed: Modules | None = None,
    block: Modules | None = None,
    head: Modules | None = None,
    num_layers: int | None = None,
    example_batch: Any = None,
    rngs: Sequence[str] = (),
    axis_rules: Rules | None = None,
    mesh_axes: Mapping[str, str | None] | None = None,
    trainable: Any = None,
    mutable: Sequence[str] = (),
    sown: Sequence[str] = (),
    predict: Callable[..., Any] | None = None,
    context: Callable[[Any], Any] | None = None,
    per_layer: Any = None,
    cache: Cache | None = None,
) -> Any:
    """Create a Model, or a LayeredModel, from Flax modules.

        model = zj.from_flax(lambda rngs: GPT(config, rngs=rngs), loss)         # loss(model, batch)
        model = zj.from_flax(embed=..., block=..., head=..., num_layers=12, loss=loss)
        model = zj.from_flax(GPT(config), loss, example_batch=batch)            # Linen

    Args:
      module: the full model. Its loss is `loss(model, batch)`.
      loss: function that returns a scalar, `(scalar, aux)` or a `zerojax.Loss`: `loss(model,
        batch)`, or `loss(head, embed, x, batch)` in the layered form, in which `embed` serves tied
        embeddings. It may take one more argument `key`, the random key of (step, microbatch), which
        is None in `program.eval`.
      embed: module called as `embed(batch) -> x`, with `rngs=` if its call takes random streams.
      block: module of ONE layer, called as `block(x) -> x`, with `rngs=` if its call takes random
        streams. It may return `(x, zerojax.Loss)`.
      head: module that `loss` calls.
      num_layers: number of blocks.
      example_batch: tree of arrays or ShapeDtypeStruct; needed for Linen.
      rngs: names of the Linen random streams that training draws from, such as ("dropout",).
      axis_rules: translation of the names of parameters' dims, such as `(("vocab", "tensor"),
        ("embed", None))`: pairs of a name and a mesh axis, several axes, or None. Defaults to
        `flax.linen.logical_axis_rules` in scope. `fsdp`, `data`, `context` and `pipe` are
        dropped, because ZeRO and the pipeline assign them, and so are names without a rule,
        unless there is a rule ("*", "refuse"). Dropped names are logged. Without rules, names are
        mesh axes.
      mesh_axes: for modules that constrain activations by axes of a mesh of their own: a dict from
        these axes to axes of the program's mesh, such as {"dp": "fsdp", "tp": "tensor"}; {} hides
        the mesh from the modules. Parameters are split by these names too.
      trainable: filter of the trainable parameters; all others are frozen. Either an NNX filter,
        such as `nnx.LoRAParam`, or a function `(path, value) -> bool` of a parameter's names and
        its abstract value. None: all are trainable.
      mutable: Linen collections that calls update, such as ("batch_stats",). They are part of
        `state.model_state`, as are collections that calls only read. NNX modules do not need this:
        each Variable that is not a parameter is part of that state.
      sown: Linen collections that calls sow and the loss reads, as `model.variables["losses"]`;
        they are not kept.
      predict: function that returns the model's outputs: `predict(model, batch) -> outputs`, or
        `predict(head, embed, x, batch) -> outputs`. The modules are in evaluation mode.
      context: function of the batch that returns what all blocks read, such as its segment ids, as
        in a LayeredModel. If it or `per_layer` is given, the block is called as `block(x, context,
        layer)`.
      per_layer: tree of arrays [L, ...], as in a LayeredModel; a block's `layer` is the slice for
        its layer.
      cache: cache for earlier tokens, as in a LayeredModel, except that its `block` gets the
        module, in evaluation mode, instead of its parameters.

    Returns:
      A `zerojax.Model` if `module` is given, else a `zerojax.LayeredModel`.

    Raises:
      ValueError: neither form is complete, a module instance is given where a function is needed,
        `axis_rules` refuses a name, no module has a collection of `mutable`, or `trainable` matches
        nothing.
    """
    if loss is None:
        raise ValueError(
            "from_flax needs a loss: loss(model, batch), or loss(head, embed, x, batch) for the "
            "layered form"
        )
    calls = Calls(
        AxisNames(axis_rules, mesh_axes), tuple(rngs), tuple(mutable), tuple(sown), trainable
    )
    block_inputs = _BlockInputs(context, per_layer, cache)
    input_names = [name for name, value in block_inputs._asdict().items() if value is not None]
    if module is not None and input_names:
        raise ValueError(
            f"from_flax got a single module together with {', '.join(input_names)}, which only "
            "blocks read: give embed, block and head"
        )
    layered_arguments = {"embed": embed, "block": block, "head": head, "num_layers": num_layers}
    names = [name for name, value in layered_arguments.items() if value is not None]
    modules = None
    if embed is not None and block is not None and head is not None and num_layers is not None:
        modules = _LayeredModules(embed, block, head, num_layers)
    task = _Task(loss, predict, example_batch)
    if module is not None and not names:
        model = _build_model(module, task, calls)
    elif module is None and modules is not None:
        model = _LayeredFlax(modules, task, block_inputs, calls).build()
    else:
        if module is not None:
            names.insert(0, "module")
        raise ValueError(
            "from_flax takes either module, or all of embed, block, head and num_layers; it got "
            f"{names}"
        )
    calls.names.log_dropped()
    return model


class _Task(NamedTuple):
    """The user's functions of bound modules, and an example of their batch.

    Attributes:
      loss: loss, as in `from_flax`.
      predict: function that returns the model's outputs, or None.
      batch: tree of arrays or ShapeDtypeStruct, or None.
    """

    loss: Callable[..., Any]
    predict: Callable[..., Any] | None
    batch: Any


def _build_model(module: Modules, task: _Task, calls: Calls) -> Model:
    """Return the Model of a single module."""
    predict = task.predict
    call_loss = call_with_key(task.loss, "model", "batch")
    part = _part("module", module, lambda m, b: call_loss(m, b, None), (task.batch,), calls)
    _check((part,), calls)

    def run(params: Params, batch: Batch, key: jax.Array | None, *state: Any) -> Any:
        with calls.run(key is not None):
            bound = part.bind(params, key, *state)
            out = without_variables(call_loss(bound, batch, key))
            return (out, part.read_state(bound)) if state else out

    def run_predict(params: Params, batch: Batch, *state: Any) -> Any:
        assert predict is not None
        with calls.run(is_training=False):
            return without_variables(predict(part.bind(params, None, *state), batch))

    return Model(
        init=part.init,
        loss=run,
        specs=part.specs,
        tiles=part.tiles,
        stochastic=part.stochastic or takes_key(task.loss, "model", "batch"),
        init_state=part.init_state,
        frozen=part.frozen,
        predict=None if predict is None else run_predict,
    )


_LOSS_ARGUMENTS = ("head", "embed", "x", "batch")
"""Arguments of the loss of the layered form, before its key."""


class _LayeredModules(NamedTuple):
    """The user's modules of the layered form, and the number of blocks."""

    embed: Modules
    block: Modules
    head: Modules
    num_layers: int


class _BlockInputs(NamedTuple):
    """Fields of a LayeredModel that only its blocks read; see `from_flax`."""

    context: Callable[[Any], Any] | None
    per_layer: Any
    cache: Cache | None

    @property
    def has_context(self) -> bool:
        """Whether blocks are called as `block(x, context, layer)`."""
        return self.context is not None or self.per_layer is not None

    def abstract(self, batch: Batch) -> tuple[Any, ...]:
        """Return the shapes of a block's inputs in addition to x: none, or context and layer."""
        if not self.has_context:
            return ()
        context = None
        if self.context is not None and batch is not None:
            context = jax.eval_shape(self.context, batch)
        layer = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(jnp.shape(a)[1:], jnp.asarray(a).dtype), self.per_layer
        )
        return context, layer


class _LayeredFlax:
    """Embedding, block and head as parts, and the functions of a LayeredModel over them."""

    def __init__(
        self,
        modules: _LayeredModules,
        task: _Task,
        block_inputs: _BlockInputs,
        calls: Calls,
    ) -> None:
        """Split the modules; each is traced with the shapes that the one before it returns."""
        batch = task.batch
        self.num_layers = modules.num_layers
        self.loss = task.loss
        self.call_loss = call_with_key(task.loss, *_LOSS_ARGUMENTS)
        self.predict = task.predict
        self.block_inputs = block_inputs
        self.calls = calls
        self.embed = _part("embed", modules.embed, lambda m, b: m(b), (batch,), calls)

        # Shapes of the first block's input, or None without an example batch.
        x = None if batch is None else jax.eval_shape(self._embed_untrained, batch)
        block_args = (x, *block_inputs.abstract(batch))
        self.block = _part("block", modules.block, lambda m, *args: m(*args), block_args, calls)
        self.head = _part("head", modules.head, self._shape_head, (x, batch), calls)
        self.parts = {"embed": self.embed, "block": self.block, "head": self.head}
        _check(tuple(self.parts.values()), calls)

    def build(self) -> LayeredModel:
        """Return the model."""
        init_state = dict[str, Callable[[jax.Array], Any]]()
        for name, part in self.parts.items():
            if part.init_state is not None:
                init_state[name] = part.init_state
        if "embed" in init_state:
            # The loss may call the embedding, and only a head with state gets any.
            init_state.setdefault("head", lambda key: {})
        frozen: Any = False
        if self.calls.trainable is not None:
            frozen = {name: part.frozen for name, part in self.parts.items()}
        is_stochastic = any(part.stochastic for part in self.parts.values())
        return LayeredModel(
            num_layers=self.num_layers,
            init_embed=self.embed.init,
            embed=self._run_embed,
            init_block=self.block.init,
            block=self._run_block_in_context if self.block_inputs.has_context else self._run_block,
            init_head=self.head.init,
            head=self._run_head,
            specs={name: part.specs for name, part in self.parts.items()},
            tiles=self.block.tiles,
            stochastic=is_stochastic or takes_key(self.loss, *_LOSS_ARGUMENTS),
            init_state=init_state or None,
            frozen=frozen,
            predict=None if self.predict is None else self._run_predict,
            context=self.block_inputs.context,
            per_layer=self.block_inputs.per_layer,
            cache=self._cache(),
        )

    # --- functions of the model -------------------------------------------------------------------

    def _run_embed(self, p: Params, x: Any, key: jax.Array | None, *state: Any) -> Any:
        return self._call(self.embed, p, key, (x,), state)

    def _run_block(self, p: Params, x: Any, key: jax.Array | None, *state: Any) -> Any:
        return self._call(self.block, p, key, (x,), state)

    def _run_block_in_context(
        self, p: Params, x: Any, key: jax.Array | None, context: Context, layer: Any, *state: Any
    ) -> Any:
        return self._call(self.block, p, key, (x, context, layer), state)

    def _call(
        self,
        part: Part,
        p: Params,
        key: jax.Array | None,
        args: tuple[Any, ...],
        state: tuple[Any, ...],
    ) -> Any:
        """Call a module bound to parameters `p`; `state` holds its state, if it has any."""
        with self.calls.run(key is not None):
            bound = part.bind(p, key, *state)
            out = without_variables(bound(*args, **part.arguments(key)))
            return (out, part.read_state(bound)) if state else out

    def _run_head(
        self, p: Params, p_embed: Params, x: Any, batch: Batch, key: jax.Array | None, *state: Any
    ) -> Any:
        # The loss may call the embedding, which is then in training mode like the head. No layer's
        # key is derived from this one.
        embed_key = None if key is None else jax.random.fold_in(key, EMBED_IN_HEAD)
        states = state[0] if state else {}
        with self.calls.run(key is not None):
            head = self.head.bind(p, key, states.get("head"))
            embed = self.embed.bind(p_embed, embed_key, states.get("embed"))
            out = without_variables(self.call_loss(head, embed, x, batch, key))
            return (out, self.head.read_state(head)) if state else out

    def _run_predict(self, p: Params, p_embed: Params, x: Any, batch: Batch, *state: Any) -> Any:
        assert self.predict is not None
        states = state[0] if state else {}
        with self.calls.run(is_training=False):
            head = self.head.bind(p, None, states.get("head"))
            embed = self.embed.bind(p_embed, None, states.get("embed"))
            return without_variables(self.predict(head, embed, x, batch))

    def _cache(self) -> Cache | None:
        """Return the cache with a block that takes parameters instead of the module."""
        cache = self.block_inputs.cache
        if cache is None:
            return None

        def block(p: Params, *args: Any) -> Any:
            assert callable(cache.block)
            with self.calls.run(False):
                return without_variables(cache.block(self.block.bind(p, None), *args))

        return Cache(cache.init, block, cache.max_length)

    # --- shapes -----------------------------------------------------------------------------------

    def _embed_untrained(self, batch: Batch) -> Any:
        """Return the output of a new embedding, to find its shapes."""
        params, key, *state = self._init_embed()
        out = self._run_embed(params, batch, key, *state)
        return out[0] if state else out

    def _shape_head(self, m: Any, x: Any, b: Batch) -> Any:
        # Called only for Linen, to find the shapes of the head's parameters. The loss may read a
        # tied embedding, so one is passed.
        return self.call_loss(m, self.embed.bind(*self._init_embed()), x, b, None)

    def _init_embed(self) -> tuple[Any, ...]:
        """Return the arguments of `embed.bind`: parameters, no key, and the state, if any."""
        key = jax.random.key(0)
        params = self.embed.init(key)
        if self.embed.init_state is None:
            return params, None
        return params, None, self.embed.init_state(key)


def _check(parts: Sequence[Part], calls: Calls) -> None:
    """Raise ValueError unless `mutable` names collections, and `trainable` matches a parameter."""
    collections = sorted(set().union(*(part.collections for part in parts)))
    missing = sorted(set(calls.mutable) - set(collections))
    if missing:
        raise ValueError(
            f"mutable names {missing}, but the collections of the Linen modules are {collections}"
        )
    if calls.trainable is not None and all(jax.tree.leaves([part.frozen for part in parts])):
        hint = ""
        if isinstance(calls.trainable, str):
            hint = (
                " (a string is a tag of NNX variables; to match names, use a function of (path, "
                "value))"
            )
        raise ValueError(
            f"trainable={calls.trainable!r} matches no parameter, so there is nothing to "
            f"train{hint}"
        )


def _part(
    name: str, module: Modules, use: Callable[..., Any], args: Sequence[Any], calls: Calls
) -> Part:
    """Split a module; `use(module, *args)` calls it, which shows the shapes of a Linen module."""
    if isinstance(module, nn.Module):
        if args[0] is None:
            raise ValueError(
                f"{name} is a Linen module, whose parameters get their shapes from a call: give "
                "example_batch"
            )
        return LinenPart(name, module, use, args, calls)
    if isinstance(module, nnx.Module):
        raise ValueError(
            f"{name} is an NNX module that already holds its arrays; give a function, such as "
            f"lambda rngs: {type(module).__name__}(..., rngs=rngs), so that its parameters are "
            "created sharded"
        )
    if not callable(module):
        raise ValueError(
            f"{name} must be a Linen module or a function rngs -> NNX module, got "
            f"{type(module).__name__}"
        )
    return NnxPart(name, module, calls)
