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
from zerojax.jaxprs import FILLS, POINTWISE, Constant, FlatJaxpr, Instruction, flatten
from zerojax.optim.leaf_rule import one_layer
from zerojax.state import OptStateMap, OwnedTransformation, init_opt_state_shape, map_opt_state
from zerojax.trees import Params


@dataclasses.dataclass(frozen=True, eq=False)
class ElementwiseUpdate:
    """An elementwise optimizer, and how its state divides over the parameters.

    Attributes:
      params: abstract float32 parameters, including stacks of layers.
      opt_map: the owner of each leaf of the optimizer state.
      init: the traced `tx.init`, over the tree of one layer.
      update: the traced `tx.update`, a function of (grads, state, params, loss).
    """

    params: Any
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
        num_params = len(self._leaves)
        mirrors = self.opt_map.list_state_leaves(leaf_ids)
        everyone = self.opt_map.shared
        at_states = num_params
        at_params = num_params + len(self.opt_map.owners)
        inputs = {program.inputs[-1]: loss}
        inputs |= {program.inputs[i]: value for i, value in zip(leaf_ids, grads, strict=True)}
        inputs |= {
            program.inputs[at_params + i]: value for i, value in zip(leaf_ids, params, strict=True)
        }
        inputs |= {
            program.inputs[at_states + j]: value for j, value in zip(mirrors, states, strict=True)
        }
        inputs |= {
            program.inputs[at_states + j]: value for j, value in zip(everyone, shared, strict=True)
        }
        shapes = {i: jnp.shape(value) for i, value in zip(leaf_ids, params, strict=True)}
        wanted = [
            program.outputs[n] for n in (*leaf_ids, *(at_states + j for j in (*mirrors, *everyone)))
        ]
        of_mirrors = [shapes[self.opt_map.owner(j)] for j in mirrors]
        results = self.update(
            inputs, wanted, [*(shapes[i] for i in leaf_ids), *of_mirrors, *(None for _ in everyone)]
        )
        results = [jnp.asarray(value) for value in results]
        first = len(leaf_ids)
        last = len(leaf_ids) + len(mirrors)
        return results[:first], results[first:last], results[last:]

    def first_states(self, leaf_ids: Sequence[int], params: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the initial states of some leaves, or of slices of them, in state order.

        Args:
          leaf_ids: indices of parameter leaves.
          params: float32 weights, one for each leaf of `leaf_ids`.
        """
        program = self.init.program
        mirrors = self.opt_map.list_state_leaves(leaf_ids)
        inputs = {program.inputs[i]: value for i, value in zip(leaf_ids, params, strict=True)}
        shapes = {i: jnp.shape(value) for i, value in zip(leaf_ids, params, strict=True)}
        wanted = [program.outputs[j] for j in mirrors]
        return self.init(inputs, wanted, [shapes[self.opt_map.owner(j)] for j in mirrors])

    def first_shared(self) -> list[jax.Array]:
        """Return the scalars that all leaves share, before the first step."""
        everyone = self.opt_map.shared
        values = self.init(
            {}, [self.init.program.outputs[j] for j in everyone], [None for _ in everyone]
        )
        return [jnp.asarray(value) for value in values]

    @property
    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.params)


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
    every = range(len(jax.tree.leaves(rule.params)))
    owned = opt_map.list_state_leaves(every)
    everyone = opt_map.shared

    def ordered(states: Sequence[jax.Array], shared: Sequence[jax.Array]) -> Any:
        leaves = dict(zip((*owned, *everyone), (*states, *shared), strict=True))
        return jax.tree.unflatten(tree, [leaves[j] for j in sorted(leaves)])

    def init(params: Params) -> Any:
        return ordered(rule.first_states(every, jax.tree.leaves(params)), rule.first_shared())

    def update(
        updates: Any, state: Any, params: Params = None, *, value: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        before = jax.tree.leaves(state)
        loss = jnp.float32(0) if value is None else value
        states, shared = ([before[j] for j in indices] for indices in (owned, everyone))
        weights, structure = jax.tree.flatten(params)
        new, states, shared = rule.updates(
            every, jax.tree.leaves(updates), weights, states, shared, loss
        )
        return jax.tree.unflatten(structure, new), ordered(states, shared)

    applied = ElementwiseTransformation(init, update)
    applied.owners = opt_map.owners
    applied.moved = ((0, 0),) * len(every)
    applied.rule = rule
    applied.inner = tx
    return applied


def elementwise_update(
    tx: optax.GradientTransformation,
    params: Params,
    why: str,
    stacked: Sequence[bool],
    beyond: Callable[[], str | None] = lambda: None,
) -> ElementwiseUpdate:
    """Return an optimizer that can be applied to one layer of stacked leaves, or to one other leaf.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      why: the setting that needs an elementwise optimizer, for the error.
      stacked: whether each parameter leaf is a stack of layers.
      beyond: function that returns what in the optimizer combines layers or leaves, or None, for
        the error.

    Raises:
      ValueError: the optimizer is not elementwise; the message names the equation and the leaves.
    """
    tx = tx.inner if isinstance(tx, ElementwiseTransformation) else tx
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
    stacked: Sequence[bool],
    state: Any,
    closed: jex.ClosedJaxpr,
) -> ElementwiseUpdate | str:
    """Return an optimizer as a rule for each element, or the reason why it is not elementwise.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      stacked: whether each parameter leaf is a stack of layers.
      state: the optimizer's abstract state over the tree of one layer.
      closed: the optimizer's traced update of one layer's tree, a function of (grads, state,
        params, loss).
    """
    layer = one_layer(params, stacked)
    of_layer = map_opt_state(state, layer)
    names = _names(params)
    reader = _reader_of_update(closed, of_layer, names)
    if isinstance(reader, str):
        return reader
    first = jax.make_jaxpr(tx.init)(layer)
    begins = _Reader(flatten(first.jaxpr, first.consts), range(len(names)), names)
    if (fault := begins.fault(of_layer.owners)) is not None:
        return f"in its initial state {fault}"
    leaves = jax.tree.leaves(params)
    shapes = [
        a.shape if owner is None else leaves[owner].shape
        for a, owner in zip(of_layer.leaves, of_layer.owners, strict=True)
    ]
    whole = [
        jax.ShapeDtypeStruct(shape, a.dtype)
        for shape, a in zip(shapes, of_layer.leaves, strict=True)
    ]
    opt_map = OptStateMap(jax.tree.unflatten(jax.tree.structure(state), whole), of_layer.owners)
    programs = (ElementProgram(one.program, one.leaf) for one in (begins, reader))
    return ElementwiseUpdate(params, opt_map, *programs)


def _names(params: Params) -> list[str]:
    return [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]


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
    for name, leaf, owner in zip(opt_map.names, opt_map.leaves, opt_map.owners, strict=True):
        if owner is None and leaf.shape:
            return f"its state {name} with shape {leaf.shape} mirrors no parameter"
    program = flatten(closed.jaxpr, closed.consts)
    # The leaf that each input belongs to, and the only leaf that each output may depend on. None
    # means no leaf.
    every = range(len(names))
    reader = _Reader(program, [*every, *opt_map.owners, *every, None], names)
    return reader.fault([*every, *opt_map.owners]) or reader


class _Reader:
    """Follows which parameter leaf each value of a traced update depends on."""

    def __init__(
        self, program: FlatJaxpr, reads: Sequence[int | None], names: Sequence[str]
    ) -> None:
        self.program = program
        self.names = names
        self.leaf: dict[int, int | None] = dict(zip(program.inputs, reads, strict=True))
        self.uneven: set[int] = set()  # arrays that depend on no leaf and whose elements may differ

    def fault(self, writes: Sequence[int | None]) -> str | None:
        for i in self.program.instructions:
            if (fault := self.step(i)) is not None:
                return fault
        for ref, expected in zip(self.program.outputs, writes, strict=True):
            leaf = self.leaf.get(ref) if isinstance(ref, int) else None
            if leaf is not None and leaf != expected:
                to = "a state shared by all leaves" if expected is None else self.names[expected]
                return f"{self.names[leaf]} enters the update of {to}"
            if isinstance(ref, int) and ref in self.uneven:
                return "its update contains an array that does not depend on the parameters"
        return None

    def step(self, i: Instruction) -> str | None:
        name = i.eqn.primitive.name
        leaves = {self.leaf.get(ref) for ref in i.ins if isinstance(ref, int)} - {None}
        if len(leaves) > 1:
            return (
                f"{name} combines "
                f"{' and '.join(sorted(self.names[r] for r in leaves if r is not None))}"
            )
        leaf = next(iter(leaves), None)
        avals: list[Any] = [v.aval for v in i.eqn.outvars]
        shapes = [a.shape for a in avals]
        if leaf is None:
            # Scalars and constants. If one is an array, its elements must be equal, because the
            # update of a part sees only some of them.
            even = name in POINTWISE | FILLS and not any(self.is_uneven(ref) for ref in i.ins)
            for out, shape in zip(i.outs, shapes, strict=True):
                self.leaf[out] = None
                if shape and not even:
                    self.uneven.add(out)
            return None
        # The equation depends on exactly one leaf, and must act on each of its elements separately.
        read_avals: list[Any] = [v.aval for v in i.eqn.invars]
        operands = [a.shape for a in read_avals]
        read_shapes = [
            s
            for ref, s in zip(i.ins, operands, strict=True)
            if isinstance(ref, int) and self.leaf.get(ref) is not None
        ]
        fits = all(s == shapes[0] for s in read_shapes) and all(
            s in ((), shapes[0]) for s in operands
        )
        if name not in POINTWISE | FILLS or not fits or i.has_jaxpr:
            return f"{name} combines elements of {self.names[leaf]}"
        if any(self.is_uneven(ref) for ref in i.ins):
            return f"{name} gives elements of {self.names[leaf]} different constants"
        self.leaf.update(dict.fromkeys(i.outs, leaf))
        return None

    def is_uneven(self, ref: Any) -> bool:
        if isinstance(ref, Constant):
            value = np.asarray(ref.value)
            elements = np.frombuffer(value.tobytes(), np.uint8).reshape(value.size, value.itemsize)
            return not (elements == elements[:1]).all()
        return ref in self.uneven
