"""Flax modules, NNX and Linen, as a Model or a LayeredModel. The modules are not edited.

    NNX     a module is given as a function of its random streams: `lambda rngs: GPT(config, rngs=rngs)`
    Linen   a module is given as it is: `GPT(config)`, with an example batch, since Linen shapes parameters by use

The user's loss is called with the module, holding the parameters: `loss(model, batch)`; for Linen the module is bound, so
it is called in the same way. Parameters become a plain nested dict. Splits over `tensor` are read from the annotations that
the modules carry (`nnx.with_partitioning`, `nn.with_partitioning`, `nn.with_logical_partitioning`); `zerojax.models.axes` tells
what names become.

Random numbers: an NNX module with random streams (dropout) gets fresh keys each (step, microbatch, layer). A Linen module gets
the streams named in `rngs`, and none where there is no key. A loss that takes a `key` gets one, and None in `program.eval`.

Modes: a step gives a key and `program.eval` none. So an NNX module is in `train()` mode where there is a key, and in `eval()`
mode where there is none, whatever its constructor left. One that these modes change counts as stochastic, also without random
streams. How Linen modules are told is in `zerojax.models.flax_calls`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from zerojax.models.axes import AxisNames, Rules
from zerojax.models.flax_calls import EMBED_IN_HEAD, Calls, call_with_key, takes_key
from zerojax.models.flax_linen import LinenPart
from zerojax.models.flax_nnx import NnxPart
from zerojax.models.model import LayeredModel, Model

Modules = Callable[[nnx.Rngs], nnx.Module] | nn.Module


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
    axis_rules: Rules | None = None,
    mesh_axes: Mapping[str, str | None] | None = None,
) -> Any:
    """Make a Model, or a LayeredModel, from Flax modules.

        model = zj.from_flax(lambda rngs: GPT(config, rngs=rngs), loss)             # loss(model, batch)
        model = zj.from_flax(embed=..., block=..., head=..., num_layers=12, loss=loss)
        model = zj.from_flax(GPT(config), loss, example_batch=batch)                # Linen

    Args:
      module: the whole model. Its loss is `loss(model, batch) -> scalar`.
      loss: for the layered form `loss(head, embed, x, batch) -> scalar`; `embed` is there for tied embeddings. A loss may take
        one argument more, `key`: the random key of (step, microbatch), and None in `program.eval`.
      embed: module called as `embed(batch) -> x`, with `rngs=` if it takes random streams at the call.
      block: module of ONE layer, called as `block(x) -> x`, with `rngs=` as `embed`.
      head: module that `loss` calls.
      num_layers: number of blocks.
      example_batch: tree of arrays or ShapeDtypeStruct; needed for Linen.
      rngs: names of the Linen random streams that training draws from, such as ("dropout",).
      axis_rules: what the names of the parameters' dims become, as `(("vocab", "tensor"), ("embed", None))`: pairs of a name
        and a mesh axis, several, or None; `flax.linen.logical_axis_rules` in scope where None is given. `fsdp` and `data` are
        dropped, since ZeRO assigns them, and so are names that no rule knows, unless there is a rule ("*", "refuse"). What was
        dropped is logged. Without rules names are mesh axes.
      mesh_axes: for modules that constrain activations by axes of a mesh of their own: these axes, and those of the program's
        mesh that they are, as {"dp": "fsdp", "tp": "tensor"}; {} hides the mesh from the modules. Parameters are split by
        these names, too.

    Returns:
      A `zerojax.Model` if `module` is given, else a `zerojax.LayeredModel`.

    Raises:
      ValueError: neither form is complete, a module instance where a function is needed, state other than parameters, or a
        name that `axis_rules` refuses.
    """
    if loss is None:
        raise ValueError("from_flax needs a loss: loss(model, batch), or loss(head, embed, x, batch) for the layered form")
    calls = Calls(AxisNames(axis_rules, mesh_axes), tuple(rngs))
    if module is not None and embed is None and block is None and head is None and num_layers is None:
        model = _whole(module, loss, example_batch, calls)
    elif module is None and embed is not None and block is not None and head is not None and num_layers is not None:
        model = _layered(embed, block, head, num_layers, loss, example_batch, calls)
    else:
        parts = {"module": module, "embed": embed, "block": block, "head": head, "num_layers": num_layers}
        names = [name for name, value in parts.items() if value is not None]
        raise ValueError(f"from_flax takes a module alone, or all of embed, block, head and num_layers; it got {names}")
    calls.names.log_dropped()
    return model


def _whole(module: Modules, loss: Callable[..., jax.Array], batch: Any, calls: Calls) -> Model:
    call = call_with_key(loss, "model", "batch")
    part = _part("module", module, lambda m, b: call(m, b, None), (batch,), calls)

    def run(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        with calls.run(key is not None):
            return call(part.bind(params, key), batch, key)

    return Model(
        init=part.init,
        loss=run,
        specs=part.specs,
        tiles=part.tiles,
        stochastic=part.stochastic or takes_key(loss, "model", "batch"),
    )


def _layered(
    embed: Modules,
    block: Modules,
    head: Modules,
    num_layers: int,
    loss: Callable[..., jax.Array],
    batch: Any,
    calls: Calls,
) -> LayeredModel:
    call = call_with_key(loss, *(of_loss := ("head", "embed", "x", "batch")))
    first = _part("embed", embed, lambda m, b: m(b), (batch,), calls)

    def run_embed(p: Any, batch: Any, key: jax.Array | None) -> Any:
        with calls.run(key is not None):
            return first.bind(p, key)(batch, **first.arguments(key))

    # The shapes that the embedding hands to the first block, or None without an example batch.
    x = None if batch is None else jax.eval_shape(lambda b: run_embed(first.init(jax.random.key(0)), b, None), batch)
    layer = _part("block", block, lambda m, x: m(x), (x,), calls)

    def run_block(p: Any, x: Any, key: jax.Array | None) -> Any:
        with calls.run(key is not None):
            return layer.bind(p, key)(x, **layer.arguments(key))

    def shape_head(m: Any, x: Any, b: Any) -> jax.Array:
        # Called for Linen alone, to shape the head's parameters. The loss may read a tied embedding, so it is given one.
        return call(m, first.bind(first.init(jax.random.key(0)), None), x, b, None)

    last = _part("head", head, shape_head, (x, batch), calls)

    def run_head(p: Any, p_embed: Any, x: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        # The loss may call the embedding, which then trains as the head does. No layer's key is folded from this one.
        of_embed = None if key is None else jax.random.fold_in(key, EMBED_IN_HEAD)
        with calls.run(key is not None):
            return call(last.bind(p, key), first.bind(p_embed, of_embed), x, batch, key)

    return LayeredModel(
        num_layers=num_layers,
        init_embed=first.init,
        embed=run_embed,
        init_block=layer.init,
        block=run_block,
        init_head=last.init,
        head=run_head,
        specs={"embed": first.specs, "block": layer.specs, "head": last.specs},
        tiles=layer.tiles,
        stochastic=first.stochastic or layer.stochastic or last.stochastic or takes_key(loss, *of_loss),
    )


def _part(name: str, module: Modules, use: Callable[..., Any], args: Sequence[Any], calls: Calls) -> NnxPart | LinenPart:
    if isinstance(module, nn.Module):
        if any(a is None for a in args):
            raise ValueError(f"{name} is a Linen module, whose parameters are shaped by use: give example_batch")
        return LinenPart(name, module, use, args, calls)
    if isinstance(module, nnx.Module):
        raise ValueError(
            f"{name} is an NNX module that already holds its arrays; give a function, such as "
            f"lambda rngs: {type(module).__name__}(..., rngs=rngs), so that its parameters are born sharded"
        )
    if not callable(module):
        raise ValueError(f"{name} must be a Linen module or a function rngs -> NNX module, got {type(module).__name__}")
    return NnxPart(name, module, calls.names)
