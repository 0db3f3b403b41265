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
from typing import Any, Protocol

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
from zerojax.trees import Batch, Params

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
        `flax.linen.logical_axis_rules` in scope. `fsdp` and `data` are dropped, because ZeRO
        assigns them, and so are names without a rule, unless there is a rule ("*", "refuse").
        Dropped names are logged. Without rules, names are mesh axes.
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
    of_blocks = {"context": context, "per_layer": per_layer, "cache": cache}
    given = [name for name, value in of_blocks.items() if value is not None]
    if module is not None and given:
        raise ValueError(
            f"from_flax got a single module together with {', '.join(given)}, which only blocks "
            "read: give embed, block and head"
        )
    if (
        module is not None
        and embed is None
        and block is None
        and head is None
        and num_layers is None
    ):
        model = _whole(module, loss, predict, example_batch, calls)
    elif (
        module is None
        and embed is not None
        and block is not None
        and head is not None
        and num_layers is not None
    ):
        model = _layered(
            embed, block, head, num_layers, loss, predict, example_batch, calls, of_blocks
        )
    else:
        parts = {
            "module": module,
            "embed": embed,
            "block": block,
            "head": head,
            "num_layers": num_layers,
        }
        names = [name for name, value in parts.items() if value is not None]
        raise ValueError(
            "from_flax takes either module, or all of embed, block, head and num_layers; it got "
            f"{names}"
        )
    calls.names.log_dropped()
    return model


def _whole(
    module: Modules,
    loss: Callable[..., Any],
    predict: Callable[..., Any] | None,
    batch: Batch,
    calls: Calls,
) -> Model:
    call = call_with_key(loss, "model", "batch")
    part = _part("module", module, lambda m, b: call(m, b, None), (batch,), calls)
    _check((part,), calls)

    def run(params: Params, batch: Batch, key: jax.Array | None, *state: Any) -> Any:
        with calls.run(key is not None):
            bound = part.bind(params, key, *state)
            out = without_variables(call(bound, batch, key))
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
        stochastic=part.stochastic or takes_key(loss, "model", "batch"),
        init_state=part.init_state,
        frozen=part.frozen,
        predict=None if predict is None else run_predict,
    )


def _layered(
    embed: Modules,
    block: Modules,
    head: Modules,
    num_layers: int,
    loss: Callable[..., Any],
    predict: Callable[..., Any] | None,
    batch: Batch,
    calls: Calls,
    of_blocks: dict[str, Any],
) -> LayeredModel:
    call_loss = call_with_key(loss, *(of_loss := ("head", "embed", "x", "batch")))
    has_context = any(of_blocks[name] is not None for name in ("context", "per_layer"))
    first = _part("embed", embed, lambda m, b: m(b), (batch,), calls)

    def called(part: Part) -> Callable[..., Any]:
        """Return `run(params, x, key[, context, layer][, state])`, which calls a bound module."""

        def run(p: Params, x: Any, key: jax.Array | None, *state: Any) -> Any:
            return call(p, key, (x,), state)

        def run_with_context(
            p: Params, x: Any, key: jax.Array | None, context: Any, layer: Any, *state: Any
        ) -> Any:
            return call(p, key, (x, context, layer), state)

        def call(
            p: Params, key: jax.Array | None, args: tuple[Any, ...], state: tuple[Any, ...]
        ) -> Any:
            with calls.run(key is not None):
                bound = part.bind(p, key, *state)
                out = without_variables(bound(*args, **part.arguments(key)))
                return (out, part.read_state(bound)) if state else out

        return run_with_context if part is not first and has_context else run

    def made(part: Part) -> tuple[Any, ...]:
        key = jax.random.key(0)
        return part.init(key), None, *(() if part.init_state is None else (part.init_state(key),))

    def abstract_x(batch: Batch) -> Any:
        params, key, *state = made(first)
        out = called(first)(params, batch, key, *state)
        return out[0] if state else out

    # Shapes of the first block's input, or None without an example batch.
    x = None if batch is None else jax.eval_shape(abstract_x, batch)
    layer = _part(
        "block", block, lambda m, *args: m(*args), (x, *_abstract_inputs(of_blocks, batch)), calls
    )

    def shape_head(m: Any, x: Any, b: Any) -> Any:
        # Called only for Linen, to find the shapes of the head's parameters. The loss may read a
        # tied embedding, so one is passed.
        return call_loss(m, first.bind(*made(first)), x, b, None)

    last = _part("head", head, shape_head, (x, batch), calls)
    parts = {"embed": first, "block": layer, "head": last}
    _check(tuple(parts.values()), calls)

    def run_head(
        p: Params, p_embed: Params, x: Any, batch: Batch, key: jax.Array | None, *state: Any
    ) -> Any:
        # The loss may call the embedding, which is then in training mode like the head. No layer's
        # key is derived from this one.
        of_embed = None if key is None else jax.random.fold_in(key, EMBED_IN_HEAD)
        of = state[0] if state else {}
        with calls.run(key is not None):
            bound = last.bind(p, key, of.get("head"))
            out = without_variables(
                call_loss(bound, first.bind(p_embed, of_embed, of.get("embed")), x, batch, key)
            )
            return (out, last.read_state(bound)) if state else out

    def run_predict(p: Params, p_embed: Params, x: Any, batch: Batch, *state: Any) -> Any:
        assert predict is not None
        of = state[0] if state else {}
        with calls.run(is_training=False):
            modules = last.bind(p, None, of.get("head")), first.bind(p_embed, None, of.get("embed"))
            return without_variables(predict(*modules, x, batch))

    init_state = {
        name: part.init_state for name, part in parts.items() if part.init_state is not None
    }
    if (
        "embed" in init_state
    ):  # the loss may call the embedding, and only a head with state gets any
        init_state.setdefault("head", lambda key: {})
    return LayeredModel(
        num_layers=num_layers,
        init_embed=first.init,
        embed=called(first),
        init_block=layer.init,
        block=called(layer),
        init_head=last.init,
        head=run_head,
        specs={name: part.specs for name, part in parts.items()},
        tiles=layer.tiles,
        stochastic=any(part.stochastic for part in parts.values()) or takes_key(loss, *of_loss),
        init_state=init_state or None,
        frozen=False
        if calls.trainable is None
        else {name: part.frozen for name, part in parts.items()},
        predict=None if predict is None else run_predict,
        **{**of_blocks, "cache": _bound(of_blocks["cache"], layer, calls)},
    )


def _bound(cache: Cache | None, part: Part, calls: Calls) -> Cache | None:
    """Return a cache whose block takes parameters, given a cache whose block takes the module."""
    if cache is None:
        return None

    def block(p: Params, *args: Any) -> Any:
        with calls.run(False):
            return without_variables(cache.block(part.bind(p, None), *args))

    return Cache(cache.init, block)


def _abstract_inputs(of_blocks: dict[str, Any], batch: Batch) -> tuple[Any, ...]:
    """Return the shapes of a block's inputs in addition to x: none, or context and layer."""
    context = of_blocks["context"]
    per_layer = of_blocks["per_layer"]
    if context is None and per_layer is None:
        return ()
    made = None if context is None or batch is None else jax.eval_shape(context, batch)
    return made, jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(jnp.shape(a)[1:], jnp.asarray(a).dtype), per_layer
    )


def _check(parts: Sequence[Part], calls: Calls) -> None:
    """Raise ValueError unless `mutable` names collections, and `trainable` matches a parameter."""
    collections = sorted({c for part in parts for c in part.collections})
    if missing := sorted(set(calls.mutable) - set(collections)):
        raise ValueError(
            f"mutable names {missing}, but the collections of the Linen modules are {collections}"
        )
    if calls.trainable is not None and all(jax.tree.leaves([part.frozen for part in parts])):
        of_text = (
            " (a string is a tag of NNX variables; to match names, use a function of (path, value))"
        )
        text = of_text if isinstance(calls.trainable, str) else ""
        raise ValueError(
            f"trainable={calls.trainable!r} matches no parameter, so there is nothing to "
            f"train{text}"
        )


def _part(
    name: str, module: Modules, use: Callable[..., Any], args: Sequence[Any], calls: Calls
) -> Part:
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
