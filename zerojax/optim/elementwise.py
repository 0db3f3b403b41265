"""Apply an optimizer to part of the parameters: one layer, or one leaf.

An optimizer is elementwise if two things depend only on an element's own gradient, weight and
state, and on scalars that no gradient reaches (a step count, a learning rate, the loss): the
element's update, and each element of the state that mirrors it. Adam, AdamW, Lion and momentum are
elementwise; a global norm, a trust ratio (LAMB) or a factored moment (Adafactor) is not. Only an
elementwise optimizer gives the same result layer by layer, on any device, as one update of the full
tree. This property is proven from the trace: the traced update is read equation by equation, and
for each value the set of leaves it depends on is followed.

The optimizer is traced over the tree of one layer, whose leaves have no layer dim. So masks and
labels see the paths, dims and sizes that the model's author wrote. The traced equations then serve
as the rule for a stack, a layer, a tile and some rows alike (`zerojax.elements`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.elements import ElementProgram
from zerojax.jaxprs import FILLS, POINTWISE, Constant, FlatJaxpr, Instruction, Ref, flatten
from zerojax.optim.leaf_rule import one_layer
from zerojax.state import OptStateMap, OwnedTransformation, init_opt_state_shape, map_opt_state
from zerojax.trees import Grads, OptState, Params


@dataclasses.dataclass(frozen=True, eq=False)
class ElementwiseUpdate:
    """An elementwise optimizer, and how its state divides over the parameters.

    Attributes:
      params: abstract float32 parameters, including stacks of layers.
      opt_map: the owner of each leaf of the optimizer state.
      init: the traced `tx.init`, over the tree of one layer.
      update: the traced `tx.update`, a function of (grads, state, params, loss).
    """

    params: Params
    opt_map: OptStateMap
    init: ElementProgram
    update: ElementProgram

    def __call__(
        self,
        leaf_ids: Sequence[int],
        grads: Sequence[jax.Array],
        params: Sequence[jax.Array],
        states: Sequence[jax.Array],
        shared: Sequence[jax.Array],
        loss: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Update some leaves, or slices of them.

        Args:
          leaf_ids: indices of parameter leaves.
          grads: float32 gradients, one for each leaf: a stack, a layer, a tile, or some rows.
          params: float32 weights, with the shapes of `grads`.
          states: one array, shaped like its parameter, for each of
            `opt_map.list_state_leaves(leaf_ids)`.
          shared: one scalar for each of `opt_map.shared`, before the step.
          loss: f32[], the loss of the step.

        Returns:
          New parameters, new states, and the shared scalars after the step.
        """
        updates, states, shared = self.updates(leaf_ids, grads, params, states, shared, loss)
        weights: Any = optax.apply_updates(list(params), updates)
        return weights, states, shared

    def updates(
        self,
        leaf_ids: Sequence[int],
        grads: Sequence[jax.Array],
        params: Sequence[jax.Array],
        states: Sequence[jax.Array],
        shared: Sequence[jax.Array],
        loss: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Return the updates of some leaves, their new states, and the new shared scalars.

        The arguments are the arguments of `__call__`.
        """
        program = self.update.program
        num_params = len(jax.tree.leaves(self.params))
        num_states = len(self.opt_map.owners)
        mirrors = self.opt_map.list_state_leaves(leaf_ids)
        shared_leaves = self.opt_map.shared

        # The inputs are the gradients, the state, the parameters and the loss.
        grad_slots = program.inputs[:num_params]
        state_slots = program.inputs[num_params : num_params + num_states]
        param_slots = program.inputs[num_params + num_states : -1]
        inputs = {program.inputs[-1]: loss}
        inputs |= _by_slot(grad_slots, leaf_ids, grads)
        inputs |= _by_slot(param_slots, leaf_ids, params)
        inputs |= _by_slot(state_slots, mirrors, states)
        inputs |= _by_slot(state_slots, shared_leaves, shared)

        # The outputs are the updates and the state. A shared scalar has no shape of a leaf.
        state_outputs = program.outputs[num_params:]
        wanted = [program.outputs[i] for i in leaf_ids]
        wanted += [state_outputs[j] for j in (*mirrors, *shared_leaves)]
        leaf_shapes = {i: jnp.shape(value) for i, value in zip(leaf_ids, params, strict=True)}
        shapes: list[tuple[int, ...] | None] = [leaf_shapes[i] for i in leaf_ids]
        shapes += [leaf_shapes[self.opt_map.owner(j)] for j in mirrors]
        shapes += [None] * len(shared_leaves)

        results = [jnp.asarray(value) for value in self.update(inputs, wanted, shapes)]
        num_updates = len(leaf_ids)
        first_shared = num_updates + len(mirrors)
        return results[:num_updates], results[num_updates:first_shared], results[first_shared:]

    def first_states(self, leaf_ids: Sequence[int], params: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the initial states of some leaves, or of slices of them, in state order.

        Args:
          leaf_ids: indices of parameter leaves.
          params: float32 weights, one for each leaf of `leaf_ids`.
        """
        program = self.init.program
        mirrors = self.opt_map.list_state_leaves(leaf_ids)
        inputs = _by_slot(program.inputs, leaf_ids, params)
        wanted = [program.outputs[j] for j in mirrors]
        leaf_shapes = {i: jnp.shape(value) for i, value in zip(leaf_ids, params, strict=True)}
        return self.init(inputs, wanted, [leaf_shapes[self.opt_map.owner(j)] for j in mirrors])

    def first_shared(self) -> list[jax.Array]:
        """Return the scalars that all leaves share, before the first step."""
        wanted = [self.init.program.outputs[j] for j in self.opt_map.shared]
        values = self.init({}, wanted, [None] * len(wanted))
        return [jnp.asarray(value) for value in values]


def _by_slot(
    slots: Sequence[int], indices: Sequence[int], values: Sequence[jax.Array]
) -> dict[int, jax.Array]:
    """Return the values of some leaves by slot; `slots` has the slots of all leaves."""
    return {slots[i]: value for i, value in zip(indices, values, strict=True)}


class ElementwiseTransformation(OwnedTransformation):
    """An elementwise optimizer over stacks that makes its shape-based decisions from one layer.

    Attributes:
      rule: the rule for each element.
      inner: the optimizer as it was given.
    """

    rule: ElementwiseUpdate
    inner: optax.GradientTransformation


def elementwise_transformation(
    tx: optax.GradientTransformation, rule: ElementwiseUpdate
) -> ElementwiseTransformation:
    """Return the rule of `tx` as an optimizer of the full tree."""
    opt_map = rule.opt_map
    tree = jax.tree.structure(rule.opt_map.abstract)
    leaf_ids = range(len(jax.tree.leaves(rule.params)))
    mirrors = opt_map.list_state_leaves(leaf_ids)

    def build_state(states: Sequence[jax.Array], shared: Sequence[jax.Array]) -> OptState:
        leaves = dict(zip((*mirrors, *opt_map.shared), (*states, *shared), strict=True))
        return jax.tree.unflatten(tree, [leaves[j] for j in sorted(leaves)])

    def init(params: Params) -> OptState:
        states = rule.first_states(leaf_ids, jax.tree.leaves(params))
        return build_state(states, rule.first_shared())

    def update(
        updates: Grads, state: OptState, params: Params = None, *, value: Any = None, **_: Any
    ) -> tuple[Grads, OptState]:
        before = jax.tree.leaves(state)
        loss = jnp.float32(0) if value is None else value
        states = [before[j] for j in mirrors]
        shared = [before[j] for j in opt_map.shared]
        weights, structure = jax.tree.flatten(params)
        leaf_updates, states, shared = rule.updates(
            leaf_ids, jax.tree.leaves(updates), weights, states, shared, loss
        )
        return jax.tree.unflatten(structure, leaf_updates), build_state(states, shared)

    applied = ElementwiseTransformation(init, update)
    applied.owners = opt_map.owners
    applied.moved = ((0, 0),) * len(leaf_ids)
    applied.rule = rule
    applied.inner = tx
    return applied


def elementwise_update(
    tx: optax.GradientTransformation,
    params: Params,
    why: str,
    stacked: Sequence[int],
    beyond: Callable[[], str | None] = lambda: None,
) -> ElementwiseUpdate:
    """Return an optimizer that can be applied to one layer of stacked leaves, or to one other leaf.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      why: the setting that needs an elementwise optimizer, for the error.
      stacked: for each parameter leaf, the number of leading dims that count layers.
      beyond: function that returns what in the optimizer combines layers or leaves, or None, for
        the error.

    Raises:
      ValueError: the optimizer is not elementwise; the message names the equation and the leaves.
    """
    if isinstance(tx, ElementwiseTransformation):
        tx = tx.inner
    layer = one_layer(params, stacked)
    try:
        state, update = init_opt_state_shape(tx, layer)
        rule = elementwise_rule(tx, params, stacked, state, update)
    except ValueError as error:
        rule = f"it fails on one layer: {error}"
    if isinstance(rule, str):
        # If the optimizer combines leaves, report that fault: combining the elements of one leaf
        # might be supported.
        fault = beyond() or rule
        raise ValueError(
            f"{why} updates one layer at a time, so each element (or each leaf of a layer) must be "
            f"updated independently, but {fault}. Use an elementwise optimizer such as "
            "optax.adamw; replace optax.clip_by_global_norm by clip_norm= and optax.MultiSteps by "
            "num_microbatches=; or keep params, grads and opt_state on the device with "
            "update='after_backward'"
        )
    return rule


def elementwise_rule(
    tx: optax.GradientTransformation,
    params: Params,
    stacked: Sequence[int],
    state: OptState,
    closed: jex.ClosedJaxpr,
) -> ElementwiseUpdate | str:
    """Return an optimizer as a rule for each element, or the reason why it is not elementwise.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      stacked: for each parameter leaf, the number of leading dims that count layers.
      state: the optimizer's abstract state over the tree of one layer.
      closed: the optimizer's traced update of one layer's tree, a function of (grads, state,
        params, loss).
    """
    layer = one_layer(params, stacked)
    layer_map = map_opt_state(state, layer)
    names = _names(params)
    update_reader = _reader_of_update(closed, layer_map, names)
    if isinstance(update_reader, str):
        return update_reader
    init = jax.make_jaxpr(tx.init)(layer)
    init_reader = _Reader(flatten(init.jaxpr, init.consts), range(len(names)), names)
    fault = init_reader.fault(layer_map.owners)
    if fault is not None:
        return f"in its initial state {fault}"

    # The state of a stack has the shape of the stack.
    leaves = jax.tree.leaves(params)
    state_leaves = []
    for leaf, owner in zip(layer_map.leaves, layer_map.owners, strict=True):
        shape = leaf.shape if owner is None else leaves[owner].shape
        state_leaves.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
    abstract_state = jax.tree.unflatten(jax.tree.structure(state), state_leaves)
    return ElementwiseUpdate(
        params,
        OptStateMap(abstract_state, layer_map.owners),
        init=ElementProgram(init_reader.program, init_reader.leaf),
        update=ElementProgram(update_reader.program, update_reader.leaf),
    )


def _names(params: Params) -> list[str]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def fault_of_update(closed: jex.ClosedJaxpr, opt_map: OptStateMap, params: Params) -> str | None:
    """Return what in an update is not elementwise, or None.

    Args:
      closed: the traced update, a function of (grads, state, params, loss).
      opt_map: the owner of each leaf of the optimizer state.
      params: abstract parameters.
    """
    reader = _reader_of_update(closed, opt_map, _names(params))
    return reader if isinstance(reader, str) else None


def _reader_of_update(
    closed: jex.ClosedJaxpr, opt_map: OptStateMap, names: Sequence[str]
) -> "_Reader | str":
    """Return the leaf on which each value of an update depends, or what is not elementwise."""
    for j in opt_map.shared:
        shape = opt_map.leaves[j].shape
        if shape:
            return f"its state {opt_map.names[j]} with shape {shape} mirrors no parameter"
    program = flatten(closed.jaxpr, closed.consts)
    leaf_ids = range(len(names))
    input_leaves = [*leaf_ids, *opt_map.owners, *leaf_ids, None]
    reader = _Reader(program, input_leaves, names)
    return reader.fault([*leaf_ids, *opt_map.owners]) or reader


class _Reader:
    """Follows which parameter leaf each value of a traced update depends on.

    Attributes:
      program: the traced update.
      names: names of the parameter leaves.
      leaf: the only leaf that each slot depends on, or None.
      uneven: slots of arrays that depend on no leaf and whose elements may differ.
    """

    def __init__(
        self, program: FlatJaxpr, input_leaves: Sequence[int | None], names: Sequence[str]
    ) -> None:
        self.program = program
        self.names = names
        self.leaf: dict[int, int | None] = dict(zip(program.inputs, input_leaves, strict=True))
        self.uneven: set[int] = set()

    def fault(self, output_leaves: Sequence[int | None]) -> str | None:
        """Return what is not elementwise, or None.

        Args:
          output_leaves: the only leaf that each output may depend on; None if it may depend on
            none.
        """
        for i in self.program.instructions:
            fault = self.step(i)
            if fault is not None:
                return fault
        for ref, expected in zip(self.program.outputs, output_leaves, strict=True):
            leaf = self.leaf.get(ref) if isinstance(ref, int) else None
            if leaf is not None and leaf != expected:
                to = "a state shared by all leaves" if expected is None else self.names[expected]
                return f"{self.names[leaf]} enters the update of {to}"
            if isinstance(ref, int) and ref in self.uneven:
                return "its update contains an array that does not depend on the parameters"
        return None

    def step(self, i: Instruction) -> str | None:
        """Follow one equation; return what in it is not elementwise, or None."""
        name = i.eqn.primitive.name
        leaves = {self.leaf.get(ref) for ref in i.ins if isinstance(ref, int)} - {None}
        if len(leaves) > 1:
            leaf_names = sorted(self.names[leaf] for leaf in leaves if leaf is not None)
            return f"{name} combines {' and '.join(leaf_names)}"
        leaf = next(iter(leaves), None)
        outvars: list[Any] = list(i.eqn.outvars)
        if leaf is None:
            # Scalars and constants. If one is an array, its elements must be equal, because the
            # update of a slice sees only some of them.
            even = name in POINTWISE | FILLS and not any(self.is_uneven(ref) for ref in i.ins)
            for out, variable in zip(i.outs, outvars, strict=True):
                self.leaf[out] = None
                if variable.aval.shape and not even:
                    self.uneven.add(out)
            return None
        # The equation depends on exactly one leaf, and must act on each of its elements separately.
        shape = outvars[0].aval.shape
        fits = all(self._fits(ref, v, shape) for ref, v in zip(i.ins, i.eqn.invars, strict=True))
        if name not in POINTWISE | FILLS or not fits or i.has_jaxpr:
            return f"{name} combines elements of {self.names[leaf]}"
        if any(self.is_uneven(ref) for ref in i.ins):
            return f"{name} gives elements of {self.names[leaf]} different constants"
        self.leaf.update(dict.fromkeys(i.outs, leaf))
        return None

    def _fits(self, ref: Ref, variable: Any, shape: tuple[int, ...]) -> bool:
        """Return whether an operand has the shape of the result, or is a scalar of no leaf."""
        if variable.aval.shape == shape:
            return True
        is_of_leaf = isinstance(ref, int) and self.leaf.get(ref) is not None
        return variable.aval.shape == () and not is_of_leaf

    def is_uneven(self, ref: Ref) -> bool:
        """Return whether an array depends on no leaf, and its elements may differ."""
        if isinstance(ref, Constant):
            value = np.asarray(ref.value)
            elements = np.frombuffer(value.tobytes(), np.uint8).reshape(value.size, value.itemsize)
            return not (elements == elements[:1]).all()
        return ref in self.uneven
