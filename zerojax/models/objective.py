"""Any model as a function of parameters, batch, key and state.

    objective(params, batch, key, state) -> (terms of the loss, new state)

Users' functions return a scalar, (scalar, aux) or a `Loss`, and take a state only if the model has
one. The functions `call_...` here hide these differences from the steps. A block's `Given` is what
it reads in addition to parameters, activations and key:

    context    part of the batch, the same for every layer
    layer      this layer's slice of `per_layer`
    state      this layer's slice of the blocks' state
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.jaxprs import flatten, only_live
from zerojax.models.loss import Loss, Terms, as_loss, joined, summed, together
from zerojax.models.model import (
    BLOCKS,
    Key,
    LayeredModel,
    Model,
    StackModel,
    list_stacks,
    takes_context,
)
from zerojax.trees import Batch, Context, Params, Tree

Array = jax.Array
State = Any
"""Untrained state of a model or of one of its parts; None if there is none."""
Objective = Callable[[Params, Batch, Key, State], tuple[Terms, State]]
Region = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""`region(function, stack)` returns the same function with other values saved for backward."""
OVERWRITTEN = "_overwrite_with_gradient"
"""Key, in a model's state, of values that are replaced by their gradients.

These are the scales of 8-bit floats, under Flax's name.
"""


class Given(NamedTuple):
    """A block's inputs in addition to its parameters, activations and key.

    Attributes:
      context: `model.context(batch)`, or None.
      layer: slice of `model.per_layer`, or None.
      state: slice of the blocks' state, or None.
    """

    context: Any = None
    layer: Any = None
    state: Any = None


class BlockOutput(NamedTuple):
    """The output of a block.

    Attributes:
      x: activations.
      loss: the block's addition to the loss, and its metrics; or None.
      state: new state of the block, or None.
    """

    x: Any
    loss: Loss | None
    state: Any


def call_block(model: LayeredModel, p: Params, x: Any, key: Key, given: Given) -> BlockOutput:
    """Run one block on activations `x`, with the parameters `p` of one layer."""
    args = (given.context, given.layer) if takes_context(model) else ()
    has_state = "block" in (model.init_state or {})
    out = model.block(p, x, key, *args, *((given.state,) if has_state else ()))
    out, state = _with_state(out, given.state, "a block") if has_state else (out, None)
    # Activations may themselves be a tuple of two, but never contain a Loss.
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Loss)):
        return BlockOutput(out, None, state)
    if out[1].weight is not None:
        raise ValueError(
            "a block's zj.Loss has a weight, but its addition to the loss must be a mean, which is "
            "averaged over microbatches: leave weight=None, and divide the total by the weight"
        )
    x, loss = out
    if isinstance(loss.total, int | float):
        # A block with only metrics adds a plain 0.
        loss = dataclasses.replace(loss, total=jnp.float32(loss.total))
    return BlockOutput(x, as_loss(loss, "what a block adds to the loss"), state)


def call_embed(
    model: LayeredModel, p: Params, batch: Batch, key: Key, state: State
) -> tuple[Any, State]:
    """Run the embedding; return its output and the new state of embedding and head, by name."""
    if "embed" not in (model.init_state or {}):
        return model.embed(p, batch, key), state
    x, after = _with_state(model.embed(p, batch, key, state["embed"]), state["embed"], "embed")
    return x, {**state, "embed": after}


def call_enter(
    model: LayeredModel, p_embed: Params, x: Any, batch: Batch, key: Key
) -> tuple[Any, Any]:
    """Return the input of a stack's first block, and the context of its blocks.

    The stack must have an `enter`.
    """
    assert model.enter is not None
    out = model.enter(p_embed, x, batch, key)
    if not isinstance(out, tuple) or len(out) != 2:
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else "one value"
        raise ValueError(
            f"the enter of a stack must return (x, context), where context may be None; got {got}"
        )
    x = _arrays(out[0], "the x that the enter of a stack returns")
    context = _arrays(out[1], "the context of a stack")
    return x, context


@contextlib.contextmanager
def in_stack(name: str) -> Iterator[None]:
    """Return a context that adds the stack's name to errors; "" is the only stack."""
    try:
        yield
    except Exception as error:  # users' functions may raise anything
        if name:
            error.add_note(f"This error is from stack {name!r}.")
        raise


def call_context(model: LayeredModel, batch: Batch) -> Any:
    """Return what all blocks read of a batch, or None if the model has no context."""
    if model.context is None:
        return None
    return _arrays(model.context(batch), "the context of a model")


def _arrays(tree: Tree, what: str) -> Any:
    """Return a tree whose numbers are converted to arrays.

    Raises:
      ValueError: a leaf is not a number or an array.
    """

    def array(path: Any, leaf: Any) -> Array:
        try:
            return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        except TypeError as error:
            name = jax.tree_util.keystr(path) or "it"
            raise ValueError(
                f"{what} must be a tree of arrays, but {name} is {type(leaf).__name__} {leaf!r}"
            ) from error

    return jax.tree_util.tree_map_with_path(array, tree)


def call_head(
    model: LayeredModel, p: Params, p_embed: Params, x: Any, batch: Batch, key: Key, state: State
) -> tuple[Loss, State]:
    """Run the head; return its loss and the new state of embedding and head, by name."""
    if "head" not in (model.init_state or {}):
        return as_loss(model.head(p, p_embed, x, batch, key)), state
    loss, after = _with_state(model.head(p, p_embed, x, batch, key, state), state["head"], "head")
    return as_loss(loss), {**state, "head": after}


def call_predict(
    model: LayeredModel, p: Params, p_embed: Params, x: Any, batch: Batch, state: State
) -> Any:
    """Return the head's outputs without a loss; `state` holds embedding and head by name."""
    assert model.predict is not None
    if "head" in (model.init_state or {}):
        return model.predict(p, p_embed, x, batch, state)
    return model.predict(p, p_embed, x, batch)


def _with_state(out: Any, before: State, what: str) -> tuple[Any, State]:
    """Return the result and the new state of a function, after checking the new state."""
    if not isinstance(out, tuple) or len(out) != 2:
        form = "((loss, aux), new state)" if what == "the loss" else "(result, new state)"
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else "something else"
        raise ValueError(
            f"{what} must return (result, new state), such as {form}, because the model has "
            f"init_state; got {got}"
        )
    check_state(before, out[1], what)
    return out


def check_state(before: State, after: State, what: str) -> None:
    """Raise ValueError unless a state keeps its structure, shapes and dtypes."""
    old = _leaf_types(before)
    new = _leaf_types(after)
    if old != new:
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        changes = "; ".join(
            f"{name}: {old.get(name, 'not present')} before, {new.get(name, 'not present')} after"
            for name in names
        )
        raise ValueError(
            f"{what} must return its state in the structure, shapes and dtypes that it got, but "
            f"{changes}"
        )


def _leaf_types(tree: Tree) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each leaf, by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): (jnp.shape(a), jnp.result_type(a)) for path, a in leaves}


def build_objective(
    model: Model | LayeredModel,
    *,
    region: Region = lambda f, stack: f,
    constrain: Callable[[Any], Any] = lambda x: x,
) -> Objective:
    """Return the objective over unsharded parameters.

    Args:
      model: model to train.
      region: wrapper of a layer of a LayeredModel, given the layer's function of (parameters, x,
        data ...) and the name of its stack; it decides what is saved for backward.
      constrain: function applied to the activations at layer boundaries.
    """
    if isinstance(model, LayeredModel):
        return _layered(model, region, constrain)
    return _unlayered(model)


def _unlayered(model: Model) -> Objective:
    def objective(params: Params, batch: Batch, key: Key, state: State) -> tuple[Terms, State]:
        if model.init_state is None:
            return with_blocks(as_loss(model.loss(params, batch, key)), None), None
        loss, state = _with_state(model.loss(params, batch, key, state), state, "the loss")
        return with_blocks(as_loss(loss), None), state

    return objective


def _layered(model: LayeredModel, region: Region, constrain: Callable[[Any], Any]) -> Objective:
    """Return the objective of embedding, a scan over the blocks, and head."""
    layers = _Layers(model, region, constrain)

    def objective(params: Params, batch: Batch, key: Key, state: State) -> tuple[Terms, State]:
        out = layers(params, batch, key, state)
        head_key = _derive_key(key, head_number(model))
        loss, outer_state = call_head(
            model, params["head"], params["embed"], out.x, batch, head_key, out.outer_state
        )
        terms = with_blocks(loss, out.loss)
        if state is None:
            return terms, None
        if out.block_state is None:
            return terms, {**outer_state}
        return terms, {**outer_state, BLOCKS: out.block_state}

    return objective


def embed_number(model: LayeredModel) -> int:
    """Return the number from which the embedding's key is derived.

    Layers have the numbers 0 .. L-1, so no two parts share a key.
    """
    return model.num_layers


def head_number(model: LayeredModel) -> int:
    """Return the number from which the head's key is derived."""
    return model.num_layers + 1


def enter_number(model: LayeredModel, stack: StackModel) -> int:
    """Return the number for the key of a stack's `enter`; `model` has all stacks."""
    return model.num_layers + 2 + stack.number


def _derive_key(key: Key, layer: int | Array) -> Key:
    """Return the key of a layer, or of another part, by its number."""
    return None if key is None else jax.random.fold_in(key, layer)


class LayersOutput(NamedTuple):
    """The output of embedding and blocks.

    Attributes:
      x: activations after the last layer.
      loss: the layers' additions to the loss, and their metrics; or None.
      outer_state: new state of embedding and head, by name; or None.
      block_state: new state of the blocks, or None.
    """

    x: Any
    loss: Loss | None
    outer_state: State
    block_state: State


@dataclasses.dataclass(frozen=True)
class _Layers:
    """Embedding and scans over the blocks; the fields are as in `build_objective`."""

    model: LayeredModel
    region: Region
    constrain: Callable[[Any], Any]

    def __call__(self, params: Params, batch: Batch, key: Key, state: State) -> LayersOutput:
        """Run the embedding and the blocks of all stacks."""
        model = self.model
        context = self.constrain(call_context(model, batch))
        outer_state = None
        block_state = None
        if state is not None:
            outer_state = {name: tree for name, tree in state.items() if name != BLOCKS}
            block_state = state.get(BLOCKS)
        embed_key = _derive_key(key, embed_number(model))
        x, outer_state = call_embed(model, params["embed"], batch, embed_key, outer_state)
        x = self.constrain(x)

        losses = []
        states_after = {}
        for stack in list_stacks(model):
            stack_context = context
            if stack.model.enter is not None:
                enter_key = _derive_key(key, enter_number(model, stack))
                with in_stack(stack.name):
                    x, stack_context = self.constrain(
                        call_enter(stack.model, params["embed"], x, batch, enter_key)
                    )
            given = Given(stack_context, state=stack.of(block_state))
            with in_stack(stack.name):
                x, loss, states_after[stack.name] = self._run_stack(
                    stack, stack.of(params[BLOCKS]), x, key, given
                )
            losses.append(loss)

        if block_state is not None:
            block_state = states_after if model.stacks else states_after[""]
        return LayersOutput(x, together(losses), outer_state, block_state)

    def _run_stack(
        self, stack: StackModel, params: Params, x: Any, key: Key, given: Given
    ) -> tuple[Any, Loss | None, State]:
        """Run the blocks of one stack.

        Args:
          stack: stack to run.
          params: parameters of its blocks, stacked.
          x: input of its first block.
          key: random key of the microbatch, or None.
          given: context, and the stacked states of the blocks.

        Returns:
          (output of the last block, the blocks' summed addition to the loss, their new states).
        """

        def block(
            p: Params, x: Any, index: Array, key: Key, given: Given
        ) -> tuple[Any, tuple[Loss | None, State]]:
            out = call_block(stack.model, p, x, _derive_key(key, index), given)
            return self.constrain(out.x), (out.loss, out.state)

        def body(
            x: Any, layer: tuple[Params, Array, Any, State]
        ) -> tuple[Any, tuple[Loss | None, State]]:
            p, index, per_layer, state = layer
            layer_given = Given(given.context, per_layer, state)
            return self.region(block, stack.name)(p, x, index, key, layer_given)

        abstract_params, abstract_state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (params, given.state)
        )
        abstract_inputs = abstract_given(stack.model, given.context, abstract_state)
        check_block(stack.model, abstract_params, x, key, abstract_inputs)

        numbers = jnp.arange(stack.first, stack.first + stack.model.num_layers)
        layers = (params, numbers, per_layer_arrays(stack.model), given.state)
        x, (losses, states) = jax.lax.scan(body, x, layers)
        return x, None if losses is None else summed(losses), states


def build_predict(
    model: Model | LayeredModel, constrain: Callable[[Any], Any] = lambda x: x
) -> Callable[[Params, Batch, State], Any]:
    """Return `predict(params, batch, state) -> outputs` over unsharded parameters, without keys.

    The model's state is only read.

    Args:
      model: model with a `predict`.
      constrain: function applied to the activations at layer boundaries.
    """
    if isinstance(model, Model):
        function = model.predict
        assert function is not None
        if model.init_state is None:
            return lambda params, batch, state: function(params, batch)
        return function
    layers = _Layers(model, lambda f, stack: f, constrain)

    def predict(params: Params, batch: Batch, state: State) -> Any:
        out = layers(params, batch, None, state)
        return call_predict(model, params["head"], params["embed"], out.x, batch, out.outer_state)

    return predict


def with_blocks(loss: Loss, blocks: Loss | None) -> Terms:
    """Return the terms of the head's loss and of the blocks' additions, summed over layers."""
    if blocks is None:
        return Terms(loss.total, loss.weight, None, dict(loss.metrics))
    return Terms(
        loss.total, loss.weight, blocks.total, joined(dict(loss.metrics), dict(blocks.metrics))
    )


def per_layer_arrays(model: LayeredModel) -> Any:
    """Return `model.per_layer` as arrays [L, ...], or None."""
    return None if model.per_layer is None else jax.tree.map(jnp.asarray, model.per_layer)


def abstract_given(model: LayeredModel, context: Context, state: Any) -> Given:
    """Return the shapes of one block's `Given`.

    Args:
      model: model with a single stack.
      context: context of the blocks, abstract or not.
      state: abstract state of one layer.
    """

    def shape(a: Any, lead: int = 0) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(a)[lead:], jnp.result_type(a))

    layer = jax.tree.map(lambda a: shape(a, 1), model.per_layer)
    return Given(jax.tree.map(shape, context), layer, state)


def check_block(model: LayeredModel, params: Params, x: Any, key: Any, given: Given) -> BlockOutput:
    """Return the shapes of a block's output.

    Args:
      model: model with a single stack.
      params: abstract parameters of one layer.
      x: input of the layer, abstract or not.
      key: random key of the layer, abstract or not; or None.
      given: abstract further inputs.

    Raises:
      ValueError: the output of the block differs from its input in structure, shape or dtype.
    """
    # Checked before the scan, whose own error would mention its carry. The usual cause is a
    # promotion to float32.
    out = jax.eval_shape(lambda *args: call_block(model, *args), params, x, key, given)
    before = jax.tree.map(lambda a: (a.shape, a.dtype.name), x)
    after = jax.tree.map(lambda a: (a.shape, a.dtype.name), out.x)
    if before != after:
        is_pair = isinstance(out.x, tuple) and len(out.x) == 2
        if is_pair and jax.tree.structure(out.x[0]) == jax.tree.structure(x):
            raise ValueError(
                "a block that returns more than x must return (x, zerojax.Loss(total, "
                "metrics={...})): its addition to the loss, and its metrics; it returned "
                f"{after} for {before}"
            )
        raise ValueError(
            f"a block must return x as it got it: x is {before} before and {after} after; cast x "
            "to the compute dtype in embed, or the result in block"
        )
    return out


def whole_weight(
    weight_of: Callable[[Any, Any], Array | None],
    pieces: Any,
    unread: Any,
    why: str = "the model's state, which is not allowed with num_microbatches > 1",
) -> Array | None:
    """Return the weight of all microbatches together, f32[]; None if the loss is a mean.

    It is computed before the first derivative, so that cotangents have the size of a mean's: sums
    over a batch would overflow in float16. Equations that the weights do not depend on are not run;
    a weight that counts tokens reads only the batch.

    Args:
      weight_of: function (microbatch, unread) -> weight.
      pieces: all microbatches, stacked along dim 0.
      unread: what the weight must not depend on, such as the state of the model before the step,
        which each microbatch changes.
      why: description of `unread` for the error, with the reason.

    Raises:
      ValueError: the weight depends on `unread`.
    """
    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), pieces)
    closed, weight = jax.make_jaxpr(weight_of, return_shape=True)(first, unread)
    if weight is None:
        return None
    program = flatten(closed.jaxpr, closed.consts)
    used = set(program.outputs)
    for instruction in program.live(program.outputs):
        used.update(instruction.reads)
    if used & set(program.inputs[len(jax.tree.leaves(first)) :]):
        raise ValueError(f"the weight of the loss depends on {why}")
    return jnp.sum(jax.lax.map(only_live(lambda piece: weight_of(piece, unread)), pieces))
