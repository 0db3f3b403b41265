"""Flax modules, NNX and Linen, as a Model or a LayeredModel. The modules are not edited.

    NNX     a module is given as a function of its random streams: `lambda rngs: GPT(config, rngs=rngs)`
    Linen   a module is given as it is: `GPT(config)`, with an example batch, since Linen shapes parameters by use

The user's loss is called with the module, holding the parameters: `loss(model, batch)`; for Linen
the module is bound, so it is called in the same way. Parameters become a plain nested dict. Splits
over `tensor` are read from the annotations that the modules carry (`nnx.with_partitioning`,
`nn.with_partitioning`, `nn.with_logical_partitioning`); `zerojax.models.axes` tells what names
become.

Random numbers: an NNX module with random streams (dropout) gets fresh keys each (step, microbatch,
  layer). A Linen module gets
the streams named in `rngs`, and none where there is no key. A loss that takes a `key` gets one, and
None in `program.eval`.

Modes: a step gives a key and `program.eval` none. So an NNX module is in `train()` mode where there
  is a key, and in `eval()`
mode where there is none, whatever its constructor left. One that these modes change counts as
stochastic, also without random streams. How Linen modules are told is in
`zerojax.models.flax_calls`.
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

Modules = Callable[[nnx.Rngs], nnx.Module] | nn.Module


class Part(Protocol):
    """A module taken apart.

    Attributes:
      init_state: `init_state(key) -> state` that is not trained, or None where there is none.
      stochastic: True where it draws random numbers, or differs between training and evaluation.
      specs, tiles, frozen: of its parameters, as a Model has them.
      collections: Linen's collections that are state.
    """

    init_state: Callable[[jax.Array], Any] | None
    stochastic: bool
    specs: Any
    tiles: Any
    frozen: Any
    collections: tuple[str, ...]

    def init(self, key: jax.Array) -> Any:
        """Make its parameters, a nested dict."""
        ...

    def bind(self, params: Any, key: jax.Array | None, state: Any = None) -> Any:
        """Put the module together; it trains if there is a key."""
        ...

    def arguments(self, key: jax.Array | None) -> dict[str, Any]:
        """Return what the module is called with beside its input."""
        ...

    def state_of(self, module: Any) -> Any:
        """Return the state of a bound module after its calls."""
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
    """Make a Model, or a LayeredModel, from Flax modules.

        model = zj.from_flax(lambda rngs: GPT(config, rngs=rngs), loss)             # loss(model, batch)
        model = zj.from_flax(embed=..., block=..., head=..., num_layers=12, loss=loss)
        model = zj.from_flax(GPT(config), loss, example_batch=batch)                # Linen

    Args:
      module: the whole model. Its loss is `loss(model, batch)`.
      loss: for the layered form `loss(head, embed, x, batch)`; `embed` is there for tied
        embeddings. It returns a scalar, `(scalar, aux)` or a `zerojax.Loss`. It may take one
        argument more, `key`: the random key of (step, microbatch), and None in `program.eval`.
      embed: module called as `embed(batch) -> x`, with `rngs=` if it takes random streams at the
        call.
      block: module of ONE layer, called as `block(x) -> x`, with `rngs=` as `embed`. It may return
        `(x, zerojax.Loss)`.
      head: module that `loss` calls.
      num_layers: number of blocks.
      example_batch: tree of arrays or ShapeDtypeStruct; needed for Linen.
      rngs: names of the Linen random streams that training draws from, such as ("dropout",).
      axis_rules: what the names of the parameters' dims become, as `(("vocab", "tensor"), ("embed",
        None))`: pairs of a name and a mesh axis, several, or None; `flax.linen.logical_axis_rules`
        in scope where None is given. `fsdp` and `data` are dropped, since ZeRO assigns them, and so
        are names that no rule knows, unless there is a rule ("*", "refuse"). What was dropped is
        logged. Without rules names are mesh axes.
      mesh_axes: for modules that constrain activations by axes of a mesh of their own: these axes,
        and those of the program's mesh that they are, as {"dp": "fsdp", "tp": "tensor"}; {} hides
        the mesh from the modules. Parameters are split by these names, too.
      trainable: which parameters are trained; the others are frozen. A filter of NNX, such as
        `nnx.LoRAParam`, or a function `(path, value) -> bool` of a parameter's names and its
        abstract value. All by default.
      mutable: Linen's collections that calls update, such as ("batch_stats",); they are part of
        `state.model_state`, and so are collections that calls only read. NNX modules need none:
        each Variable that is no parameter is part of it.
      sown: Linen's collections that calls sow and the loss reads, as `model.variables["losses"]`;
        they are not kept.
      predict: what the model gives: `predict(model, batch) -> outputs`, or `predict(head, embed, x,
        batch) -> outputs`. The modules evaluate.
      context: as of a LayeredModel: a function of the batch, such as its segment ids. Where it or
        `per_layer` is given, the block is called as `block(x, context, layer)`.
      per_layer: as of a LayeredModel: a tree of arrays [L, ...], of which `layer` is the slice of a
        block's own layer.
      cache: as of a LayeredModel; its `block` is given the module, which evaluates, in the place of
        its parameters.

    Returns:
      A `zerojax.Model` if `module` is given, else a `zerojax.LayeredModel`.

    Raises:
      ValueError: neither form is complete, a module instance where a function is needed, a name
        that `axis_rules` refuses, a collection that no module has, or `trainable` that matches
        nothing.
    """
    if loss is None:
        raise ValueError(
            "from_flax needs a loss: loss(model, batch), or loss(head, embed, x, batch) for the layered form"
        )
    calls = Calls(
        AxisNames(axis_rules, mesh_axes), tuple(rngs), tuple(mutable), tuple(sown), trainable
    )
    of_blocks = {"context": context, "per_layer": per_layer, "cache": cache}
    given = [name for name, value in of_blocks.items() if value is not None]
    if module is not None and given:
        raise ValueError(
            f"from_flax of one module is given {', '.join(given)}, which blocks read: give embed, block and head"
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
            f"from_flax takes a module alone, or all of embed, block, head and num_layers; it got {names}"
        )
    calls.names.log_dropped()
    return model


def _whole(
    module: Modules,
    loss: Callable[..., Any],
    predict: Callable[..., Any] | None,
    batch: Any,
    calls: Calls,
) -> Model:
    call = call_with_key(loss, "model", "batch")
    part = _part("module", module, lambda m, b: call(m, b, None), (batch,), calls)
    _check((part,), calls)

    def run(params: Any, batch: Any, key: jax.Array | None, *state: Any) -> Any:
        with calls.run(key is not None):
            bound = part.bind(params, key, *state)
            out = without_variables(call(bound, batch, key))
            return (out, part.state_of(bound)) if state else out

    def run_predict(params: Any, batch: Any, *state: Any) -> Any:
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
    batch: Any,
    calls: Calls,
    of_blocks: dict[str, Any],
) -> LayeredModel:
    call_loss = call_with_key(loss, *(of_loss := ("head", "embed", "x", "batch")))
    has_context = any(of_blocks[name] is not None for name in ("context", "per_layer"))
    first = _part("embed", embed, lambda m, b: m(b), (batch,), calls)

    def called(part: Part) -> Callable[..., Any]:
        """Return `run(params, x, key[, context, layer][, state])`, which calls a module with its
        inputs.
        """

        def run(p: Any, x: Any, key: jax.Array | None, *state: Any) -> Any:
            return call(p, key, (x,), state)

        def run_with_context(
            p: Any, x: Any, key: jax.Array | None, context: Any, layer: Any, *state: Any
        ) -> Any:
            return call(p, key, (x, context, layer), state)

        def call(
            p: Any, key: jax.Array | None, args: tuple[Any, ...], state: tuple[Any, ...]
        ) -> Any:
            with calls.run(key is not None):
                bound = part.bind(p, key, *state)
                out = without_variables(bound(*args, **part.arguments(key)))
                return (out, part.state_of(bound)) if state else out

        return run_with_context if part is not first and has_context else run

    def made(part: Part) -> tuple[Any, ...]:
        key = jax.random.key(0)
        return part.init(key), None, *(() if part.init_state is None else (part.init_state(key),))

    def abstract_x(batch: Any) -> Any:
        params, key, *state = made(first)
        out = called(first)(params, batch, key, *state)
        return out[0] if state else out

    # The shapes that the embedding hands to the first block, or None without an example batch.
    x = None if batch is None else jax.eval_shape(abstract_x, batch)
    layer = _part(
        "block", block, lambda m, *args: m(*args), (x, *_abstract_inputs(of_blocks, batch)), calls
    )

    def shape_head(m: Any, x: Any, b: Any) -> Any:
        # Called for Linen alone, to shape the head's parameters. The loss may read a tied
        # embedding, so it is given one.
        return call_loss(m, first.bind(*made(first)), x, b, None)

    last = _part("head", head, shape_head, (x, batch), calls)
    parts = {"embed": first, "block": layer, "head": last}
    _check(tuple(parts.values()), calls)

    def run_head(
        p: Any, p_embed: Any, x: Any, batch: Any, key: jax.Array | None, *state: Any
    ) -> Any:
        # The loss may call the embedding, which then trains as the head does. No layer's key is
        # folded from this one.
        of_embed = None if key is None else jax.random.fold_in(key, EMBED_IN_HEAD)
        of = state[0] if state else {}
        with calls.run(key is not None):
            bound = last.bind(p, key, of.get("head"))
            out = without_variables(
                call_loss(bound, first.bind(p_embed, of_embed, of.get("embed")), x, batch, key)
            )
            return (out, last.state_of(bound)) if state else out

    def run_predict(p: Any, p_embed: Any, x: Any, batch: Any, *state: Any) -> Any:
        assert predict is not None
        of = state[0] if state else {}
        with calls.run(is_training=False):
            ends = last.bind(p, None, of.get("head")), first.bind(p_embed, None, of.get("embed"))
            return without_variables(predict(*ends, x, batch))

    init_state = {
        name: part.init_state for name, part in parts.items() if part.init_state is not None
    }
    if (
        "embed" in init_state
    ):  # the loss may call it, and only a head with state of its own is given any
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
    """Return a cache whose block takes parameters, of one whose block takes the module."""
    if cache is None:
        return None

    def block(p: Any, *args: Any) -> Any:
        with calls.run(False):
            return without_variables(cache.block(part.bind(p, None), *args))

    return Cache(cache.init, block)


def _abstract_inputs(of_blocks: dict[str, Any], batch: Any) -> tuple[Any, ...]:
    """Return the shapes of what blocks are called with beside x: nothing, or the context and the
    slice of one layer.
    """
    context, per_layer = of_blocks["context"], of_blocks["per_layer"]
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
        of_text = " (a string is a tag of NNX variables; names take a function of (path, value))"
        text = of_text if isinstance(calls.trainable, str) else ""
        raise ValueError(
            f"trainable={calls.trainable!r} matches no parameter, so there is nothing to train{text}"
        )


def _part(
    name: str, module: Modules, use: Callable[..., Any], args: Sequence[Any], calls: Calls
) -> Part:
    if isinstance(module, nn.Module):
        if args[0] is None:
            raise ValueError(
                f"{name} is a Linen module, whose parameters are shaped by use: give example_batch"
            )
        return LinenPart(name, module, use, args, calls)
    if isinstance(module, nnx.Module):
        raise ValueError(
            f"{name} is an NNX module that already holds its arrays; give a function, such as "
            f"lambda rngs: {type(module).__name__}(..., rngs=rngs), so that its parameters are born sharded"
        )
    if not callable(module):
        raise ValueError(
            f"{name} must be a Linen module or a function rngs -> NNX module, got {type(module).__name__}"
        )
    return NnxPart(name, module, calls)
