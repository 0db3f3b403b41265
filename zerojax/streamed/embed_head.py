"""Embedding and head of a streamed model, and the derivatives of both.

Their leaves are unstacked. They are loaded once per step and stay on the device until
it ends. At stage 3 each leaf is gathered where it is used, as in the resident step. The gradients
of head and embedding are added, since both may use a tied embedding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.models import (
    BLOCKS,
    LayeredModel,
    Loss,
    call_context,
    call_embed,
    call_enter,
    call_head,
    call_predict,
    embed_number,
    enter_number,
    floating,
    head_number,
    in_stack,
    list_stacks,
    merged,
    per_layer_arrays,
    summed,
    whole_weight,
    with_blocks,
)
from zerojax.sharding import ActivationSpec
from zerojax.state import is_stored, join_frozen, split_frozen
from zerojax.streamed.microbatches import LayerInputs, Microbatches, derive_key
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.trees import Batch, Context, Grads, ModelState, Params

Array = jax.Array


class HeadResult(NamedTuple):
    """Results of the head for all microbatches.

    Attributes:
      loss: f32[], loss over all microbatches.
      dy: cotangent of the head's input; None for leaves that are not floating.
      grads: summed gradients of the unstacked leaves.
      metrics: metrics of the head, summed and not divided yet.
      state: state of embedding and head after the step.
    """

    loss: Array
    dy: Any
    grads: list[Array]
    metrics: Any
    state: Any


class EmbedHead:
    """Embedding and head of a model, as functions of a tree `{"embed", "head"}` of their leaves."""

    def __init__(
        self,
        model: LayeredModel,
        plan: StreamedPlan,
        microbatches: Microbatches,
        gather: Callable[..., Any],
    ) -> None:
        """Evaluate embedding and head through `gather(function, leaves, *args)`.

        `gather` gathers the leaves and reduces their gradients.
        """
        self.model = model
        self.plan = plan
        self.microbatches = microbatches
        self.mesh = plan.mesh
        self._gather = gather
        self.activations = ActivationSpec(plan.mesh)
        self._models = {
            stack.name: stack.model for stack in list_stacks(model)
        }  # their `enter` may decode

    def load(self, params: Params) -> Any:
        """Return the leaves of embedding and head, sharded, on the device."""
        # An OnDisk counts as one leaf, which `RecordSpec.load` reads.
        leaves, tree = jax.tree.flatten(_without_blocks(params), is_leaf=is_stored)
        in_tree = [i for i in self.plan.layout.in_tree if not self.plan.leaves[i].is_stacked]
        return jax.tree.unflatten(
            tree, [self.plan.params[i].load(leaf) for i, leaf in zip(in_tree, leaves, strict=True)]
        )

    def _split(self, unstacked: Any) -> tuple[Any, Any]:
        """Return two trees, of trainable and of frozen leaves, with None for the other leaves."""
        flags = self.plan.layout.flags
        return split_frozen(None if flags is None else _without_blocks(flags), unstacked)

    def context(self, batch: Batch) -> Any:
        """Return the context that all blocks read, of all microbatches, or None."""
        if self.model.context is None:
            return None
        constrain = self.activations.constrain
        return self.microbatches.each(
            lambda b: constrain(call_context(self.model, constrain(b))), batch
        )

    def embed(self, unstacked: Any, batch: Batch, key: Any, state: Any) -> tuple[Any, Any]:
        """Return the first layer's input of one microbatch, and the state of embedding and head."""
        batch = self.activations.constrain(batch)
        key = derive_key(key, embed_number(self.model))
        x, state = self._gather(
            lambda p, b, k, s: call_embed(self.model, p["embed"], b, k, s),
            unstacked,
            batch,
            key,
            state,
        )
        return self.activations.constrain(x), state

    def embed_all(
        self, unstacked: Any, batch: Batch, keys: Any, state: Any
    ) -> tuple[Any, Any, Any]:
        """Return the first layer's input, and the states before and after the embedding.

        All three are of all microbatches. The states belong to embedding and head. Both are kept
        for each microbatch: the head reads the state that the embedding of its microbatch left, and
        backward runs the embedding again with the state that it read.
        """

        def one(state: Any, piece: Any) -> tuple[Any, Any]:
            batch, key = piece
            x, after = self.embed(unstacked, batch, key, state)
            return after, (x, state, after)

        _, results = self._in_order(one, state, (batch, keys))
        return results

    def _in_order(
        self, function: Callable[[Any, Any], tuple[Any, Any]], carry: Any, pieces: Any
    ) -> tuple[Any, Any]:
        """Apply `function(carry, piece)` to one microbatch after another.

        Returns the final carry and the stacked results.
        """
        if self.microbatches.count == 1:
            return function(carry, pieces)
        return jax.lax.scan(function, carry, pieces)

    def abstract_inputs(
        self, abstract_params: Params, abstract_state: Any, abstract_batch: Batch
    ) -> list[Any]:
        """Return the shapes of the inputs of each run of layers, of all microbatches.

        Each entry is (input of the stack's `enter`, input of the first layer, `LayerInputs`).

        Args:
          abstract_params: shapes of the parameters.
          abstract_state: shapes of the model state.
          abstract_batch: shapes of the batch.
        """

        def first(params: Params, model_state: ModelState, batch: Batch) -> Any:
            batch, keys = self.microbatches.split(
                batch, jax.random.key(0) if self.model.stochastic else None
            )
            unstacked = _without_blocks(params)
            inputs = []
            x, _, _ = self.embed_all(unstacked, batch, keys, embed_head_state(model_state))
            for stack in self.plan.of_stacks:
                if not stack.run.starts_stack:
                    inputs.append(inputs[-1])
                    continue
                before = x
                # A block's output has the shape of its input, so this stack's input stands for its
                # output.
                x, context = self.enter(stack, unstacked, before, batch, keys)
                inputs.append((before, x, self.inputs(stack, context, keys, model_state)))
            return inputs

        args = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (abstract_params, abstract_state)
        )
        return jax.eval_shape(first, *args, abstract_batch)

    def inputs(
        self, stack: StackPlan, context: Context, keys: Any, model_state: ModelState
    ) -> LayerInputs:
        """Return the inputs that all layers of a stack read, of all microbatches."""
        of_blocks = None if model_state is None else stack.stack.of(model_state.get(BLOCKS))
        return LayerInputs(keys, context, per_layer_arrays(stack.model), of_blocks)

    def enter(
        self, stack: StackPlan, unstacked: Any, x: Any, batch: Batch, keys: Any
    ) -> tuple[Any, Any]:
        """Return the first layer's input and the context of a stack, of all microbatches.

        Args:
          stack: the run of layers that starts the stack.
          unstacked: the leaves of embedding and head, sharded.
          x: output of the previous stack, or of the embedding.
          batch: the microbatches.
          keys: their random keys, or None.
        """
        if stack.model.enter is None:
            return x, self.context(batch)
        return self.microbatches.each(partial(self._enter, stack, unstacked), x, batch, keys)

    def _enter(
        self, stack: StackPlan, unstacked: Any, x: Any, batch: Batch, key: Any
    ) -> tuple[Any, Any]:
        """Return the first layer's input and the context of a stack, of one microbatch."""
        model = self._models[stack.name]
        key = derive_key(key, enter_number(self.model, stack.stack))

        def enter(p: Params, x: Any, b: Any, k: Any) -> tuple[Any, Any]:
            return call_enter(model, p["embed"], x, b, k)

        with in_stack(stack.name):
            made = self._gather(enter, unstacked, x, self.activations.constrain(batch), key)
        # A result that depends on no argument leaves a gathered function as a number.
        return self.activations.constrain(jax.tree.map(jnp.asarray, made))

    def enter_grads(
        self,
        stack: StackPlan,
        unstacked: Any,
        x: Any,
        batch: Batch,
        keys: Any,
        dx: Any,
        d_context: Any,
        g_unstacked: list[Array],
    ) -> tuple[Any, list[Array]]:
        """Return the cotangent of a stack's `enter` input, and the gradients of embedding and head.

        `enter` is recomputed, as the embedding is.

        Args:
          stack: the run of layers that starts the stack.
          unstacked: the leaves of embedding and head, sharded.
          x: the input of `enter`.
          batch: the microbatches.
          keys: their random keys, or None.
          dx: cotangent of the first layer's input.
          d_context: cotangent of the context.
          g_unstacked: gradients of the unstacked leaves so far; the gradients of `enter` are added.
        """
        if stack.model.enter is None:
            return dx, g_unstacked
        trained, frozen = self._split(unstacked)

        def one(dx: Any, d_context: Any, x: Any, batch: Batch, key: Any) -> tuple[list[Array], Any]:
            def derivative(cotangents: Any, data: Any, params: Params) -> tuple[Any, Any]:
                (x, batch, key), (trained, frozen) = data, params

                def run(trained: Any, floats: Any) -> Any:
                    return floating(
                        self._enter(
                            stack, join_frozen(trained, frozen), merged(floats, x), batch, key
                        )
                    )

                return jax.vjp(run, trained, floating(x))[1](cotangents)

            g, before = self.plan.derivative(derivative)(
                (dx, d_context), (x, batch, key), (trained, frozen)
            )
            return self._reduced(g), self.activations.constrain(before)

        if self.microbatches.count > 1:
            g_unstacked, dx = self.microbatches.fold(
                one, g_unstacked, dx, d_context, x, batch, keys
            )
            return dx, g_unstacked
        grads, dx = one(dx, d_context, x, batch, keys)
        return dx, [a + b for a, b in zip(g_unstacked, grads, strict=True)]

    def head(self, unstacked: Any, x: Any, batch: Batch, key: Any, state: Any) -> tuple[Loss, Any]:
        """Return the loss of one microbatch, and the state of embedding and head."""
        key = derive_key(key, head_number(self.model))

        def loss(p: Params, x: Any, b: Any, k: Any, s: Any) -> tuple[Loss, Any]:
            return call_head(self.model, p["head"], p["embed"], x, b, k, s)

        return self._gather(loss, unstacked, x, batch, key, state)

    def predict(self, unstacked: Any, x: Any, batch: Batch, state: Any) -> Any:
        """Return the model's outputs for one microbatch."""

        def outputs(p: Params, x: Any, b: Any, s: Any) -> Any:
            return call_predict(self.model, p["head"], p["embed"], x, b, s)

        return self._gather(outputs, unstacked, x, batch, state)

    def head_and_grads(
        self, unstacked: Any, y: Any, batch: Batch, keys: Any, scale: Array, states: Any
    ) -> HeadResult:
        """Return the loss of all microbatches, the derivative of scale * loss, metrics and state.

        Args:
          unstacked: the leaves of embedding and head, sharded.
          y: the last layer's output, of all microbatches.
          batch: the microbatches.
          keys: their random keys, or None.
          scale: f32[], loss scale.
          states: states of embedding and head after each microbatch's embedding; the head's own
            part is passed on from one microbatch to the next instead.
        """
        count = self.microbatches.count
        trained, frozen = self._split(unstacked)
        whole = None
        if count > 1:
            first = jax.tree.map(lambda a: a[0], states)

            def weight_of(piece: Any, state: Any) -> Any:
                y, batch, key = piece
                return self.head(unstacked, y, self.activations.constrain(batch), key, state)[
                    0
                ].weight

            whole = whole_weight(weight_of, (y, batch, keys), first)

        def one(carry: tuple[list[Array], Any], piece: Any) -> tuple[tuple[list[Array], Any], Any]:
            total, own = carry
            y, batch, key, state = piece
            batch = self.activations.constrain(batch)
            if own is not None:
                state = {**state, "head": own}

            def derivative(scale: Array, data: Any, params: Params) -> tuple[Any, tuple[Any, ...]]:
                (y, batch, key, state, whole), (trained, frozen) = data, params

                def loss(trained: Any, floats: Any) -> tuple[Array, tuple[Array, Any, Any]]:
                    loss, after = self.head(
                        join_frozen(trained, frozen), merged(floats, y), batch, key, state
                    )
                    value = with_blocks(loss, None).value(whole, count)
                    return value, (value, loss.metrics, after)

                # jax.vjp, since jax.grad does not accept a complex y.
                value, pullback, aux = jax.vjp(loss, trained, floating(y), has_aux=True)
                # Small float16 cotangents would vanish without the scale.
                g, dy = pullback(scale.astype(value.dtype))
                return g, (dy, *aux)

            data = (y, batch, key, state, whole)
            params = (trained, frozen)
            g, (dy, value, metrics, after) = self.plan.derivative(derivative)(scale, data, params)
            g = self._reduced(g)
            if count > 1:
                g = [t + a.astype(jnp.float32) for t, a in zip(total, g, strict=True)]
            return (g, _part(after, "head")), (
                value,
                self.activations.constrain(dy),
                metrics,
                after,
            )

        zeros = self.plan.zero_grads(self.plan.unstacked) if count > 1 else []
        own = _part(states, "head")
        own = own if count == 1 else jax.tree.map(lambda a: a[0], own)
        (g, own), (value, dy, metrics, after) = self._in_order(
            one, (zeros, own), (y, batch, keys, states)
        )
        if count == 1:
            return HeadResult(value, dy, g, metrics, after)
        # The last microbatch's state is the state after the step.
        return HeadResult(
            jnp.sum(value) / count, dy, g, summed(metrics), jax.tree.map(lambda a: a[-1], after)
        )

    def embed_grads(
        self,
        unstacked: Any,
        batch: Batch,
        keys: Any,
        dx: Any,
        states: Any,
        g_unstacked: list[Array],
    ) -> list[Array]:
        """Add the embedding's gradients to the head's.

        The embedding is a look-up, so it is recomputed instead of keeping its residuals for the
        full step.

        Args:
          unstacked: the leaves of embedding and head, sharded.
          batch: the microbatches.
          keys: their random keys, or None.
          dx: cotangent of the embedding's output.
          states: states of embedding and head before each microbatch.
          g_unstacked: gradients of the unstacked leaves so far.
        """
        trained, frozen = self._split(unstacked)

        def one(dx: Any, batch: Batch, key: Any, state: Any) -> tuple[list[Array], None]:
            def derivative(dx: Any, data: Any, params: Params) -> tuple[Any, None]:
                (batch, key, state), (trained, frozen) = data, params
                embed = lambda p: floating(self.embed(join_frozen(p, frozen), batch, key, state)[0])  # noqa: E731
                (g,) = jax.vjp(embed, trained)[1](dx)
                return g, None

            g, _ = self.plan.derivative(derivative)(dx, (batch, key, state), (trained, frozen))
            return self._reduced(g), None

        # With several microbatches, each is added to the head's gradients in float32. A single
        # microbatch's gradients are added in their own dtype.
        if self.microbatches.count > 1:
            g_unstacked = self.microbatches.fold(one, g_unstacked, dx, batch, keys, states)[0]
            if self.plan.layout.reduces_once:
                return self.plan.reduced(g_unstacked, self.plan.unstacked)
            return g_unstacked
        return [a + b for a, b in zip(g_unstacked, one(dx, batch, keys, states)[0], strict=True)]

    def _reduced(self, grads: Grads) -> list[Array]:
        """Return gradients of the leaves, placed where they are summed."""
        return self.plan.summed_at(jax.tree.leaves(grads), self.plan.unstacked)


def _without_blocks(params: Params) -> Any:
    return {name: tree for name, tree in params.items() if name != BLOCKS}


def embed_head_state(model_state: ModelState) -> Any:
    """Return the part of a model's state that belongs to embedding and head, or None."""
    return None if model_state is None else _without_blocks(model_state)


def _part(state: Any, name: str) -> Any:
    """Return one part of the state of embedding and head, or None."""
    return None if state is None else state.get(name)
