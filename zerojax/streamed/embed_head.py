"""Embedding and head of a streamed model, and the derivatives of both.

Their leaves are unstacked. They are loaded once per step and stay on the device until it ends. At
stage 3 each leaf is gathered where it is used, as in the resident step. The gradients of head and
embedding are added, since both may use a tied embedding.
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
    Metrics,
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
from zerojax.streamed.loops import Cotangents
from zerojax.streamed.microbatches import LayerInputs, Microbatches, derive_key
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.trees import Batch, Context, Grads, ModelState, Params, Tree

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
    dy: Tree
    grads: list[Array]
    metrics: Metrics
    state: ModelState


class _HeadSums(NamedTuple):
    """Values that the head passes on from one microbatch to the next.

    Attributes:
      grads: sums of the gradients of the unstacked leaves so far; empty with one microbatch.
      state: the head's own state, or None.
    """

    grads: list[Array]
    state: ModelState


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
        # The `enter` of these models may decode.
        self._models = {stack.name: stack.model for stack in list_stacks(model)}

    def load(self, params: Params) -> Params:
        """Return the leaves of embedding and head, sharded, on the device."""
        # An OnDisk counts as one leaf, which `RecordSpec.load` reads.
        leaves, tree = jax.tree.flatten(_without_blocks(params), is_leaf=is_stored)
        in_tree = [i for i in self.plan.layout.in_tree if not self.plan.leaves[i].is_stacked]
        loaded = [self.plan.params[i].load(leaf) for i, leaf in zip(in_tree, leaves, strict=True)]
        return jax.tree.unflatten(tree, loaded)

    def _split(self, unstacked: Params) -> tuple[Params, Params]:
        """Return two trees, of trainable and of frozen leaves, with None for the other leaves."""
        flags = self.plan.layout.flags
        return split_frozen(None if flags is None else _without_blocks(flags), unstacked)

    def context(self, batch: Batch) -> Context:
        """Return the context that all blocks read, of all microbatches, or None."""
        if self.model.context is None:
            return None
        constrain = self.activations.constrain

        def context(batch: Batch) -> Context:
            return constrain(call_context(self.model, constrain(batch)))

        return self.microbatches.each(context, batch)

    def embed(
        self, unstacked: Params, batch: Batch, key: Array | None, state: ModelState
    ) -> tuple[Tree, ModelState]:
        """Return the first layer's input of one microbatch, and the state of embedding and head."""
        batch = self.activations.constrain(batch)
        key = derive_key(key, embed_number(self.model))

        def embed(params: Params, batch: Batch, key: Array | None, state: ModelState) -> Any:
            return call_embed(self.model, params["embed"], batch, key, state)

        x, state = self._gather(embed, unstacked, batch, key, state)
        return self.activations.constrain(x), state

    def embed_all(
        self, unstacked: Params, batch: Batch, keys: Array | None, state: ModelState
    ) -> tuple[Tree, ModelState, ModelState]:
        """Return the first layer's input, and the states before and after the embedding.

        All three are of all microbatches. The states belong to embedding and head. Both are kept
        for each microbatch: the head reads the state that the embedding of its microbatch left, and
        backward runs the embedding again with the state that it read.
        """

        def embed(state: ModelState, microbatch: tuple[Batch, Array | None]) -> tuple[Any, Any]:
            batch, key = microbatch
            x, after = self.embed(unstacked, batch, key, state)
            return after, (x, state, after)

        _, results = self._in_order(embed, state, (batch, keys))
        return results

    def _in_order(
        self, function: Callable[[Any, Any], tuple[Any, Any]], carry: Any, microbatches: Tree
    ) -> tuple[Any, Any]:
        """Apply `function(carry, microbatch)` to one microbatch after another.

        Returns the final carry and the stacked results.
        """
        if self.microbatches.count == 1:
            return function(carry, microbatches)
        return jax.lax.scan(function, carry, microbatches)

    def abstract_inputs(
        self, abstract_params: Params, abstract_state: ModelState, abstract_batch: Batch
    ) -> list[tuple[Tree, Tree, LayerInputs]]:
        """Return the shapes of the inputs of each run of layers, of all microbatches.

        Each entry is (input of the stack's `enter`, input of the first layer, `LayerInputs`).

        Args:
          abstract_params: shapes of the parameters.
          abstract_state: shapes of the model state.
          abstract_batch: shapes of the batch.
        """

        def enter_all(params: Params, model_state: ModelState, batch: Batch) -> list[Any]:
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
        return jax.eval_shape(enter_all, *args, abstract_batch)

    def inputs(
        self, stack: StackPlan, context: Context, keys: Array | None, model_state: ModelState
    ) -> LayerInputs:
        """Return the inputs that all layers of a stack read, of all microbatches."""
        of_blocks = None if model_state is None else stack.stack.of(model_state.get(BLOCKS))
        return LayerInputs(keys, context, per_layer_arrays(stack.model), of_blocks)

    def enter(
        self, stack: StackPlan, unstacked: Params, x: Tree, batch: Batch, keys: Array | None
    ) -> tuple[Tree, Context]:
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
        self, stack: StackPlan, unstacked: Params, x: Tree, batch: Batch, key: Array | None
    ) -> tuple[Tree, Context]:
        """Return the first layer's input and the context of a stack, of one microbatch."""
        model = self._models[stack.name]
        key = derive_key(key, enter_number(self.model, stack.stack))

        def enter(params: Params, x: Tree, batch: Batch, key: Array | None) -> Any:
            return call_enter(model, params["embed"], x, batch, key)

        with in_stack(stack.name):
            entered = self._gather(enter, unstacked, x, self.activations.constrain(batch), key)
        # A result that depends on no argument leaves a gathered function as a number.
        return self.activations.constrain(jax.tree.map(jnp.asarray, entered))

    def enter_grads(
        self,
        stack: StackPlan,
        unstacked: Params,
        x: Tree,
        batch: Batch,
        keys: Array | None,
        cotangents: Cotangents,
        g_unstacked: list[Array],
    ) -> tuple[Tree, list[Array]]:
        """Return the cotangent of a stack's `enter` input, and the gradients of embedding and head.

        `enter` is recomputed, as the embedding is.

        Args:
          stack: the run of layers that starts the stack.
          unstacked: the leaves of embedding and head, sharded.
          x: the input of `enter`.
          batch: the microbatches.
          keys: their random keys, or None.
          cotangents: cotangents of the first layer's input and of the context, in its dtypes.
          g_unstacked: gradients of the unstacked leaves so far; the gradients of `enter` are added.
        """
        if stack.model.enter is None:
            return cotangents.dx, g_unstacked
        params = self._split(unstacked)

        def derivative(cotangents: Tree, data: Any, params: Any) -> tuple[Grads, Tree]:
            x, batch, key = data
            trained, frozen = params

            def run(trained: Params, floats: Tree) -> Tree:
                unstacked = join_frozen(trained, frozen)
                return floating(self._enter(stack, unstacked, merged(floats, x), batch, key))

            return jax.vjp(run, trained, floating(x))[1](cotangents)

        def derive(
            dx: Tree, d_context: Context, x: Tree, batch: Batch, key: Array | None
        ) -> tuple[list[Array], Tree]:
            grads, before = self.plan.derivative(derivative, self.plan.unstacked)(
                (dx, d_context), (x, batch, key), params
            )
            return self._reduced(grads), self.activations.constrain(before)

        data = (cotangents.dx, cotangents.context, x, batch, keys)
        if self.microbatches.count > 1:
            g_unstacked, dx = self.microbatches.fold(derive, g_unstacked, *data)
            return dx, g_unstacked
        grads, dx = derive(*data)
        return dx, [a + b for a, b in zip(g_unstacked, grads, strict=True)]

    def head(
        self, unstacked: Params, x: Tree, batch: Batch, key: Array | None, state: ModelState
    ) -> tuple[Loss, ModelState]:
        """Return the loss of one microbatch, and the state of embedding and head."""
        key = derive_key(key, head_number(self.model))

        def loss(
            params: Params, x: Tree, batch: Batch, key: Array | None, state: ModelState
        ) -> Any:
            return call_head(self.model, params["head"], params["embed"], x, batch, key, state)

        return self._gather(loss, unstacked, x, batch, key, state)

    def predict(self, unstacked: Params, x: Tree, batch: Batch, state: ModelState) -> Tree:
        """Return the model's outputs for one microbatch."""

        def outputs(params: Params, x: Tree, batch: Batch, state: ModelState) -> Tree:
            return call_predict(self.model, params["head"], params["embed"], x, batch, state)

        return self._gather(outputs, unstacked, x, batch, state)

    def head_and_grads(
        self,
        unstacked: Params,
        y: Tree,
        batch: Batch,
        keys: Array | None,
        scale: Array,
        states: ModelState,
    ) -> HeadResult:
        """Return the loss of all microbatches, the derivative of scale * loss, metrics and state.

        Args:
          unstacked: the leaves of embedding and head, sharded.
          y: the last layer's output, of all microbatches.
          batch: the microbatches.
          keys: their random keys, or None.
          scale: f32[], loss scale.
          states: states of embedding and head after each microbatch's embedding; the head's own
            state is passed on from one microbatch to the next instead.
        """
        count = self.microbatches.count
        total_weight = None
        if count > 1:
            total_weight = self.loss_weight(unstacked, y, batch, keys, states)

        def derive(sums: _HeadSums, microbatch: Tree) -> tuple[_HeadSums, tuple[Any, ...]]:
            y, batch, key, state = microbatch
            if sums.state is not None:
                state = {**state, "head": sums.state}
            grads, done = self.derive_head(unstacked, y, batch, key, scale, state, total_weight)
            if count > 1:
                pairs = zip(sums.grads, grads, strict=True)
                grads = [total + g.astype(jnp.float32) for total, g in pairs]
            after = done[3]
            return _HeadSums(grads, _substate(after, "head")), done

        zeros = self.plan.zero_grads(self.plan.unstacked) if count > 1 else []
        head_state = _substate(states, "head")
        if count > 1:
            head_state = jax.tree.map(lambda a: a[0], head_state)
        sums, (value, dy, metrics, after) = self._in_order(
            derive, _HeadSums(zeros, head_state), (y, batch, keys, states)
        )
        if count == 1:
            return HeadResult(value, dy, sums.grads, metrics, after)
        loss = jnp.sum(value) / count
        # The last microbatch's state is the state after the step.
        last_state = jax.tree.map(lambda a: a[-1], after)
        return HeadResult(loss, dy, sums.grads, summed(metrics), last_state)

    def derive_head(
        self,
        unstacked: Params,
        y: Tree,
        batch: Batch,
        key: Array | None,
        scale: Array,
        state: ModelState = None,
        total_weight: Array | None = None,
    ) -> tuple[list[Array], tuple[Array, Tree, Metrics, ModelState]]:
        """Return the derivative of scale * loss of one microbatch.

        Args:
          unstacked: the leaves of embedding and head, sharded.
          y: the last layer's output.
          batch: the microbatch.
          key: its random key, or None.
          scale: f32[], loss scale.
          state: state of embedding and head, or None.
          total_weight: weight of the loss over all microbatches; None if the loss is a mean, or if
            there is only one microbatch.

        Returns:
          The gradients of the unstacked leaves, where they are summed; and the loss, the cotangent
          of y, the metrics, and the state after the head.
        """
        derivative = self.plan.derivative(self._head_derivative, self.plan.unstacked)
        data = (y, self.activations.constrain(batch), key, state, total_weight)
        grads, (dy, value, metrics, after) = derivative(scale, data, self._split(unstacked))
        return self._reduced(grads), (value, self.activations.constrain(dy), metrics, after)

    def loss_weight(
        self, unstacked: Params, y: Tree, batch: Batch, keys: Array | None, states: ModelState
    ) -> Array | None:
        """Return the weight of the loss over all microbatches, or None if the loss is a mean.

        The arguments are of all microbatches.
        """

        def weight(microbatch: Tree, state: ModelState) -> Array | None:
            y, batch, key = microbatch
            loss, _ = self.head(unstacked, y, self.activations.constrain(batch), key, state)
            return loss.weight

        first_state = jax.tree.map(lambda a: a[0], states)
        return whole_weight(weight, (y, batch, keys), first_state)

    def batch_weight(
        self, unstacked: Params, y: Tree, batch: Batch, keys: Array | None
    ) -> Array | None:
        """Return the weight of the loss over all microbatches before any layer has run.

        Args:
          unstacked: the leaves of embedding and head, sharded.
          y: array of the shapes of the last layer's output, of one microbatch.
          batch: the microbatches.
          keys: their random keys, or None.

        Raises:
          ValueError: the weight depends on the activations.
        """

        def weight(microbatch: Tree, y: Tree) -> Array | None:
            batch, key = microbatch
            loss, _ = self.head(unstacked, y, self.activations.constrain(batch), key, None)
            return loss.weight

        why = (
            "the activations, but in a pipeline it is summed before the first layer runs: compute "
            "it from the batch alone"
        )
        return whole_weight(weight, (batch, keys), y, why)

    def _head_derivative(
        self, scale: Array, data: Any, params: Any
    ) -> tuple[Grads, tuple[Any, ...]]:
        """Return the gradients of one microbatch's scale * loss, and a tuple of further results.

        The tuple holds the cotangent of y, the loss, its metrics, and the state after the head.

        Args:
          scale: f32[], loss scale.
          data: (y, batch, key, state, weight of the loss over all microbatches).
          params: the trainable leaves, and the frozen ones.
        """
        y, batch, key, state, total_weight = data
        trained, frozen = params

        def loss(trained: Params, floats: Tree) -> tuple[Array, tuple[Any, ...]]:
            loss, after = self.head(
                join_frozen(trained, frozen), merged(floats, y), batch, key, state
            )
            value = with_blocks(loss, None).value(total_weight, self.microbatches.count)
            return value, (value, loss.metrics, after)

        # jax.vjp, since jax.grad does not accept a complex y.
        value, pullback, aux = jax.vjp(loss, trained, floating(y), has_aux=True)
        # Small float16 cotangents would vanish without the scale.
        grads, dy = pullback(scale.astype(value.dtype))
        return grads, (dy, *aux)

    def embed_grads(
        self,
        unstacked: Params,
        batch: Batch,
        keys: Array | None,
        dx: Tree,
        states: ModelState,
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

        def derive(
            dx: Tree, batch: Batch, key: Array | None, state: ModelState
        ) -> tuple[list[Array], None]:
            return self.derive_embed(unstacked, batch, key, dx, state), None

        data = (dx, batch, keys, states)
        # A single microbatch's gradients are added in their own dtype.
        if self.microbatches.count == 1:
            grads, _ = derive(*data)
            return [a + b for a, b in zip(g_unstacked, grads, strict=True)]
        # With several microbatches, each is added to the head's gradients in float32.
        g_unstacked, _ = self.microbatches.fold(derive, g_unstacked, *data)
        if self.plan.layout.reduces_once:
            return self.plan.reduced(g_unstacked, self.plan.unstacked)
        return g_unstacked

    def derive_embed(
        self,
        unstacked: Params,
        batch: Batch,
        key: Array | None,
        dx: Tree,
        state: ModelState = None,
    ) -> list[Array]:
        """Return the embedding's gradients of the unstacked leaves, of one microbatch.

        Args:
          unstacked: the leaves of embedding and head, sharded.
          batch: the microbatch.
          key: its random key, or None.
          dx: cotangent of the embedding's output.
          state: state of embedding and head before the embedding, or None.
        """

        def derivative(dx: Tree, data: Any, params: Any) -> tuple[Grads, None]:
            batch, key, state = data
            trained, frozen = params

            def embed(trained: Params) -> Tree:
                x, _ = self.embed(join_frozen(trained, frozen), batch, key, state)
                return floating(x)

            (grads,) = jax.vjp(embed, trained)[1](dx)
            return grads, None

        derive = self.plan.derivative(derivative, self.plan.unstacked)
        grads, _ = derive(dx, (batch, key, state), self._split(unstacked))
        return self._reduced(grads)

    def _reduced(self, grads: Grads) -> list[Array]:
        """Return gradients of the leaves, placed where they are summed."""
        return self.plan.summed_at(jax.tree.leaves(grads), self.plan.unstacked)


def _without_blocks(params: Params) -> Params:
    return {name: tree for name, tree in params.items() if name != BLOCKS}


def embed_head_state(model_state: ModelState) -> ModelState:
    """Return the part of a model's state that belongs to embedding and head, or None."""
    return None if model_state is None else _without_blocks(model_state)


def _substate(state: ModelState, name: str) -> ModelState:
    """Return the state of the embedding or of the head, by name, or None."""
    return None if state is None else state.get(name)
