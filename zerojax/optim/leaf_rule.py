"""Apply optimizers that combine elements only within one leaf of one layer.

Examples are Muon, Adafactor, LAMB, LARS and Novograd.

    for each layer l, for each leaf i:      u, s = rule_i(g[l, i], s[l, i], w[l, i], scalars)

The update of a layer's leaf depends only on that leaf of that layer, and on values that no gradient
reaches: a count, a learning rate, the loss, constants. So layers can be updated one after the
other, on any device, and each leaf of the state belongs to one parameter leaf whatever its shape,
such as a factored moment or a scalar for each matrix. In a pipeline a record holds one layer of
every stage (`zerojax.state.wide`), and the rule is mapped over the stages as it is over the layers
of a stack. The property is proven by tracing, as for elementwise optimizers
(`zerojax.optim.elementwise`): the update is traced over the tree of one layer, whose leaves have no
layer dim, and each value's leaf is followed.

The traced equations themselves are then the rule: the equations that a leaf's results need are
evaluated on that leaf. Masks and labels have seen the paths, dims and sizes of one layer's tree, as
optax on separate layers shows them. The equations are divided once more, because only some need a
full leaf on one device:

    before    m = b m + g;  x = m / |m|        on shards: elementwise, and sums of partial sums
    middle    y = p(x x^T) x                   on the full leaf: products, decompositions, others
    after     u = -lr (scale y + decay w)      on shards again

So Muon gathers one matrix and shards one back, while LAMB, Adafactor and clipping by leaf only move
sums.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax

from zerojax.jaxprs import (
    POINTWISE,
    REDUCTIONS,
    FlatJaxpr,
    Instruction,
    Ref,
    evaluate,
    flatten,
    list_regions,
    read,
)
from zerojax.sharding import PIPE
from zerojax.trees import Grads, OptState, Params

Array = jax.Array
Slots = dict[int, Any]
_MOVES = frozenset({"reshape", "squeeze", "expand_dims", "transpose"})
"""Equations that only rearrange elements."""
_LOCAL = POINTWISE | REDUCTIONS | _MOVES | {"broadcast_in_dim"}
"""Equations that run on shards: XLA adds up partial sums and moves no element.

A reshape runs on shards only if it merges no dims.
"""
_RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})


class LayerDims(NamedTuple):
    """Sizes of the leading dims of a value that count layers.

    Attributes:
      layers: number of layers, or of records, in a stack; None for one of them.
      stages: number of pipeline stages, each with a layer in a record; None if a record is a layer.
    """

    layers: int | None = None
    stages: int | None = None

    def map(self, function: Any) -> Any:
        """Return a function of one layer's values, mapped over all layers."""
        if self.stages is not None:
            function = jax.vmap(function, axis_size=self.stages, spmd_axis_name=PIPE)
        if self.layers is not None:
            function = jax.vmap(function, axis_size=self.layers)
        return function


class Move(Protocol):
    """Moves values to the devices that work on full leaves, and back."""

    def whole(self, index: int, value: Array) -> Array:
        """Return a value of parameter leaf `index` with all its dims gathered on one device.

        Layers may be appended as padding.
        """
        ...

    def shard(self, index: int, value: Array, like: Any) -> Array:
        """Return a value of parameter leaf `index` on the leaf's shards.

        Args:
          index: index of the parameter leaf.
          value: value to shard.
          like: the leaf; the result has as many layers as the leaf.
        """
        ...


class Stay:
    """Leaves values where they are."""

    def whole(self, index: int, value: Array) -> Array:
        """Return the value unchanged."""
        del index
        return value

    def shard(self, index: int, value: Array, like: Any) -> Array:
        """Return the value unchanged."""
        del index, like
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class _Phases:
    """The equations that produce one leaf's results.

    Attributes:
      before: equations that run on shards.
      middle: equations that run on the full leaf.
      after: equations that run on shards and depend on the middle's results.
      entering: slots that the middle reads and does not compute; they are gathered.
      leaving: slots that the middle computes and that are read after it or are results; they are
        sharded again.
      outputs: the results.
    """

    before: tuple[Instruction, ...]
    middle: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    outputs: tuple[Ref, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LeafRule:
    """An optimizer as one rule for each parameter leaf.

    Attributes:
      params: abstract float32 parameters, including stacks of layers.
      stacked: for each parameter leaf, the number of leading dims that count layers: 1 for
        [L, ...], and 2 for the records of p pipeline stages [L / p, p, ...].
      layer_state: the abstract state over one layer's tree.
      owners: for each state leaf, the index of the parameter leaf that it belongs to; None if all
        leaves share it.
      init: the traced `tx.init` over one layer's tree.
      update: the traced `tx.update`, a function of (grads, state, params, loss).
      leaf_of: the leaf on which each slot of `update` depends; None or missing if it depends on
        none.
    """

    params: Any
    stacked: tuple[int, ...]
    layer_state: Any
    owners: tuple[int | None, ...]
    init: FlatJaxpr
    update: FlatJaxpr
    leaf_of: Mapping[int, int | None]

    @functools.cached_property
    def shared(self) -> tuple[int, ...]:
        """Indices of the state leaves that all parameters share."""
        return tuple(j for j, owner in enumerate(self.owners) if owner is None)

    @functools.cached_property
    def whole(self) -> frozenset[int]:
        """Indices of the parameter leaves whose update needs a full leaf on one device.

        The updates of all other leaves run on shards.
        """
        return frozenset(i for i in range(len(self.stacked)) if self._phases[i].middle)

    def moved(self, index: int) -> tuple[int, int]:
        """Return how many elements of one layer of a leaf are gathered, and how many sent back.

        Args:
          index: index of the parameter leaf.

        Returns:
          Number of gathered elements, and number of elements sent back; both are 0 if the update
          runs on shards.
        """
        phases = self._phases[index]
        gathered = sum(math.prod(self._shapes[slot]) for slot in phases.entering)
        sent_back = sum(math.prod(self._shapes[slot]) for slot in phases.leaving)
        return gathered, sent_back

    @functools.cached_property
    def _shapes(self) -> dict[int, tuple[int, ...]]:
        """The shapes of all inputs of the update except the loss, and of all results, by slot."""
        layer = one_layer(self.params, self.stacked)
        inputs = jax.tree.leaves((layer, self.layer_state, layer))
        shapes: dict[int, tuple[int, ...]] = {}
        for slot, array in zip(self.update.inputs[:-1], inputs, strict=True):
            shapes[slot] = tuple(array.shape)
        for i in self.update.instructions:
            outvars: list[Any] = list(i.eqn.outvars)
            for slot, variable in zip(i.outs, outvars, strict=True):
                shapes[slot] = variable.aval.shape
        return shapes

    def list_state_leaves(self, index: int) -> tuple[int, ...]:
        """Return the indices of the state leaves that belong to a parameter leaf."""
        return tuple(j for j, owner in enumerate(self.owners) if owner == index)

    # --- one leaf ---------------------------------------------------------------------------------

    def _stack_dims(self, index: int, weight: Array) -> LayerDims:
        """Return the dims of layers of a leaf."""
        return LayerDims(*weight.shape[: self.stacked[index]])

    def _record_dims(self, index: int, weight: Array) -> LayerDims:
        """Return the dims of layers of one record of a leaf."""
        return LayerDims(None, *weight.shape[: max(0, self.stacked[index] - 1)])

    def first_states(self, index: int, weight: Array, dims: LayerDims) -> list[Array]:
        """Return the initial state of a parameter leaf.

        Args:
          index: index of the parameter leaf.
          weight: float32 weight of one record or of a stack.
          dims: sizes of the weight's dims that count layers.
        """
        program = self.init
        outputs = [program.outputs[j] for j in self.list_state_leaves(index)]
        inputs = {program.inputs[index]: weight}
        return _run(program.live(outputs), inputs, {}, outputs, dims)

    def first_shared(self) -> list[Array]:
        """Return the state that all leaves share, before the first step."""
        outputs = [self.init.outputs[j] for j in self.shared]
        return _run(self.init.live(outputs), {}, {}, outputs, LayerDims())

    def scalars(self, shared: Sequence[Array], loss: Array) -> Slots:
        """Return the values that depend on no leaf, by slot.

        Args:
          shared: the state that all leaves share, before the step.
          loss: f32[], the loss of the step.
        """
        _, state_slots, _ = self._input_slots
        slots = {state_slots[j]: value for j, value in zip(self.shared, shared, strict=True)}
        slots[self.update.inputs[-1]] = loss
        evaluate(self._leafless, slots)
        return slots

    def shared_after(self, shared: Sequence[Array], loss: Array) -> list[Array]:
        """Return the state that all leaves share, after a step.

        Args:
          shared: the state that all leaves share, before the step.
          loss: f32[], the loss of the step.
        """
        slots = self.scalars(shared, loss)
        state_outputs = self.update.outputs[len(self.stacked) :]
        return [jnp.asarray(read(state_outputs[j], slots)) for j in self.shared]

    def update_leaf(
        self,
        index: int,
        grad: Array,
        weight: Array,
        states: Sequence[Array],
        scalars: Slots,
        dims: LayerDims,
        move: Move,
    ) -> tuple[Array, list[Array]]:
        """Return the update of a leaf, and the leaf's state after it.

        Args:
          index: index of the parameter leaf.
          grad: float32 gradient of one record or of a stack.
          weight: float32 weight of one record or of a stack.
          states: one array for each of `list_state_leaves(index)`, for one record or for a stack.
          scalars: values returned by `scalars`.
          dims: sizes of the weight's dims that count layers.
          move: how values reach the devices that hold full leaves.
        """
        phases = self._phases[index]
        grad_slots, state_slots, param_slots = self._input_slots
        values = {grad_slots[index]: grad, param_slots[index]: weight}
        for j, state in zip(self.list_state_leaves(index), states, strict=True):
            values[state_slots[j]] = state
        values = _advance(phases.before, values, scalars, dims)
        if phases.middle:
            gathered = {slot: move.whole(index, values[slot]) for slot in phases.entering}
            padded = dims
            if dims.layers is not None:
                # The gathered values may have more layers than the stack, because of padding.
                padded = dims._replace(layers=next(iter(gathered.values())).shape[0])
            results = _run(phases.middle, gathered, scalars, phases.leaving, padded)
            for slot, value in zip(phases.leaving, results, strict=True):
                values[slot] = move.shard(index, value, weight)
            values = _advance(phases.after, values, scalars, dims)
        update, *states_after = _run((), values, scalars, phases.outputs, dims)
        return update, states_after

    @functools.cached_property
    def _leafless(self) -> tuple[Instruction, ...]:
        """The equations of the update whose results depend on no leaf."""
        live = self.update.live(self.update.outputs)
        return tuple(i for i in live if self.leaf_of.get(i.outs[0]) is None)

    @functools.cached_property
    def _input_slots(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The slots of the gradients, of the state, and of the parameters."""
        num_leaves = len(self.stacked)
        first_param = num_leaves + len(self.owners)
        inputs = self.update.inputs
        return inputs[:num_leaves], inputs[num_leaves:first_param], inputs[first_param:-1]

    @functools.cached_property
    def _phases(self) -> tuple[_Phases, ...]:
        """The equations of each leaf's update."""
        num_leaves = len(self.stacked)
        instructions: list[list[Instruction]] = [[] for _ in range(num_leaves)]
        for i in self.update.live(self.update.outputs):
            leaf = self.leaf_of.get(i.outs[0])
            if leaf is not None:
                instructions[leaf].append(i)
        updates = self.update.outputs[:num_leaves]
        state_outputs = self.update.outputs[num_leaves:]
        phases = []
        for leaf in range(num_leaves):
            states = [state_outputs[j] for j in self.list_state_leaves(leaf)]
            phases.append(_divided(instructions[leaf], [updates[leaf], *states], self.leaf_of))
        return tuple(phases)

    # --- the whole tree ---------------------------------------------------------------------------

    def init_tree(self, params: Params) -> OptState:
        """Return the initial state of the full tree; the state of a stack has its layer dims."""
        leaves: list[Any] = [None] * len(self.owners)
        for i, weight in enumerate(jax.tree.leaves(params)):
            states = self.first_states(i, weight, self._stack_dims(i, weight))
            for j, value in zip(self.list_state_leaves(i), states, strict=True):
                leaves[j] = value
        for j, value in zip(self.shared, self.first_shared(), strict=True):
            leaves[j] = value
        return jax.tree.unflatten(jax.tree.structure(self.layer_state), leaves)

    def update_tree(
        self, grads: Grads, state: OptState, params: Params, loss: Array, move: Move
    ) -> tuple[Grads, OptState]:
        """Return the updates of the full tree, and the state after them.

        Args:
          grads: float32 gradients.
          state: the optimizer state before the step.
          params: float32 weights.
          loss: f32[], the loss of the step.
          move: how values reach the devices that hold full leaves.
        """
        before, state_tree = jax.tree.flatten(state)
        weights, tree = jax.tree.flatten(params)
        shared = [before[j] for j in self.shared]
        scalars = self.scalars(shared, loss)
        updates = []
        after = list(before)
        for i, (grad, weight) in enumerate(zip(jax.tree.leaves(grads), weights, strict=True)):
            state_leaves = self.list_state_leaves(i)
            states = [before[j] for j in state_leaves]
            dims = self._stack_dims(i, weight)
            update, states = self.update_leaf(i, grad, weight, states, scalars, dims, move)
            updates.append(update)
            for j, value in zip(state_leaves, states, strict=True):
                after[j] = value
        for j, value in zip(self.shared, self.shared_after(shared, loss), strict=True):
            after[j] = value
        return jax.tree.unflatten(tree, updates), jax.tree.unflatten(state_tree, after)

    def update_part(
        self,
        leaf_ids: Sequence[int],
        grads: Sequence[Array],
        params: Sequence[Array],
        states: Sequence[Array],
        shared: Sequence[Array],
        loss: Array,
        move: Move,
    ) -> tuple[list[Array], list[Array]]:
        """Update one record: one layer, one layer of every pipeline stage, or one unstacked leaf.

        Args:
          leaf_ids: indices of parameter leaves.
          grads: float32 gradients of the record, one for each leaf of `leaf_ids`.
          params: float32 weights of the record, one for each leaf of `leaf_ids`.
          states: the state leaves that belong to `leaf_ids`, in the order of the state.
          shared: the state that all leaves share, before the step.
          loss: f32[], the loss of the step.
          move: how values reach the devices that hold full leaves.

        Returns:
          New parameters and new states.
        """
        mirrors = [j for j, owner in enumerate(self.owners) if owner in leaf_ids]
        before = dict(zip(mirrors, states, strict=True))
        after: dict[int, Array] = {}
        weights = []
        scalars = self.scalars(shared, loss)
        for n, i in enumerate(leaf_ids):
            state_leaves = self.list_state_leaves(i)
            leaf_states = [before[j] for j in state_leaves]
            dims = self._record_dims(i, params[n])
            update, leaf_states = self.update_leaf(
                i, grads[n], params[n], leaf_states, scalars, dims, move
            )
            weights.append(optax.apply_updates(params[n], update))
            after.update(zip(state_leaves, leaf_states, strict=True))
        return weights, [after[j] for j in mirrors]

    def init_part(self, leaf_ids: Sequence[int], weights: Sequence[Array]) -> list[Array]:
        """Return the initial states of one record, in the order of the state."""
        after: dict[int, Array] = {}
        for i, weight in zip(leaf_ids, weights, strict=True):
            states = self.first_states(i, weight, self._record_dims(i, weight))
            after.update(zip(self.list_state_leaves(i), states, strict=True))
        return [after[j] for j in sorted(after)]


def _advance(
    instructions: Sequence[Instruction], values: Slots, scalars: Slots, dims: LayerDims
) -> Slots:
    """Return `values` together with all results of the equations."""
    wanted: list[int] = []
    for i in instructions:
        wanted += i.outs
    results = _run(instructions, values, scalars, wanted, dims)
    return values | dict(zip(wanted, results, strict=True))


def _run(
    instructions: Sequence[Instruction],
    values: Mapping[int, Array],
    scalars: Slots,
    wanted: Sequence[Ref],
    dims: LayerDims,
) -> list[Array]:
    """Evaluate equations, mapped over the layers in the dims of `dims`.

    Results that do not depend on the layer have these dims too.
    """

    def run_layer(arrays: Sequence[Array]) -> list[Array]:
        slots = scalars | dict(zip(values, arrays, strict=True))
        evaluate(instructions, slots)
        return [jnp.asarray(read(ref, slots)) for ref in wanted]

    return dims.map(run_layer)(list(values.values()))


def _divided(
    instructions: Sequence[Instruction], outputs: Sequence[Ref], leaf_of: Mapping[int, int | None]
) -> _Phases:
    """Divide the equations behind a leaf's results into those before, in and after the middle.

    Args:
      instructions: the equations whose results depend on the leaf, in order.
      outputs: the leaf's results: its update, then its state.
      leaf_of: the leaf on which each slot depends, if any.
    """
    producers: dict[int, int] = {}
    for n, i in enumerate(instructions):
        producers |= dict.fromkeys(i.outs, n)
    inputs = [[producers[slot] for slot in i.reads if slot in producers] for i in instructions]
    results = {ref for ref in outputs if isinstance(ref, int)}
    downstream, middle = _find_middle(instructions, inputs, results)

    before: list[Instruction] = []
    inside: list[Instruction] = []
    after: list[Instruction] = []
    for n, i in enumerate(instructions):
        if n in middle:
            inside.append(i)
        elif n in downstream:
            after.append(i)
        else:
            before.append(i)

    inside_slots: set[int] = set()
    read_inside: dict[int, None] = {}  # in order, without duplicates
    for i in inside:
        inside_slots.update(i.outs)
        read_inside |= dict.fromkeys(i.reads)
    read_later = set(results)
    for i in after:
        read_later.update(i.reads)
    entering = [
        slot for slot in read_inside if slot not in inside_slots and leaf_of.get(slot) is not None
    ]
    leaving: list[int] = []
    for i in inside:
        leaving += [slot for slot in i.outs if slot in read_later]
    return _Phases(
        before=tuple(before),
        middle=tuple(inside),
        after=tuple(after),
        entering=tuple(entering),
        leaving=tuple(leaving),
        outputs=tuple(outputs),
    )


def _find_middle(
    instructions: Sequence[Instruction], inputs: Sequence[Sequence[int]], results: set[int]
) -> tuple[set[int], set[int]]:
    """Return the equations that run in or after the middle, and the middle's equations.

    Args:
      instructions: the equations whose results depend on the leaf, in order.
      inputs: for each equation, the numbers of the equations whose results it reads.
      results: slots of the leaf's results.
    """
    names = [i.eqn.primitive.name for i in instructions]
    not_on_shards = {n for n, i in enumerate(instructions) if not _runs_on_shards(i)}
    downstream, upstream = _around(not_on_shards, inputs)
    # Values that enter or leave the middle have the leaf's dims in the leaf's order, so a transpose
    # on the way to a product also belongs to the middle.
    transposes = {n for n in downstream | upstream if names[n] == "transpose"}
    downstream, upstream = _around(transposes | (downstream & upstream), inputs)
    middle = downstream & upstream

    # Equations that only move elements join the middle on either side, so that the values that
    # enter or leave it have the leaf's shape if possible.
    for n, name in enumerate(names):
        if name in _MOVES and not middle.isdisjoint(inputs[n]):
            middle.add(n)
    readers: dict[int, set[int]] = {}
    for n, equations in enumerate(inputs):
        for producer in equations:
            readers.setdefault(producer, set()).add(n)
    for n in reversed(range(len(instructions))):
        only_moves = names[n] in _MOVES and results.isdisjoint(instructions[n].outs)
        if only_moves and readers.get(n, set()) and readers[n] <= middle:
            middle.add(n)
    return downstream, middle


def _around(equations: set[int], inputs: Sequence[Sequence[int]]) -> tuple[set[int], set[int]]:
    """Return the equations downstream of a set, and the equations upstream; both include the set.

    Args:
      equations: numbers of the equations in the set.
      inputs: for each equation, the numbers of the equations whose results it reads.
    """
    downstream = set(equations)
    upstream = set(equations)
    for n, producers in enumerate(inputs):
        if not downstream.isdisjoint(producers):
            downstream.add(n)
    for n in reversed(range(len(inputs))):
        if n in upstream:
            upstream.update(inputs[n])
    return downstream, upstream


def _runs_on_shards(i: Instruction) -> bool:
    """Return whether an equation can run on shards of the leaf."""
    name = i.eqn.primitive.name
    if i.has_jaxpr or name not in _LOCAL:
        return False
    if name != "reshape":
        return True
    before: Any = i.eqn.invars[0].aval
    after: Any = i.eqn.outvars[0].aval
    return [n for n in before.shape if n != 1] == [n for n in after.shape if n != 1]


def without_branches(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return a traced function whose conditionals compute all branches and select.

    A conditional over the full tree, such as Novograd's first step, hides which result depends on
    which leaf. A conditional stays if its branches need a full leaf or contain loops, because
    computing all branches would waste the work that it avoids.

    Args:
      closed: the traced function.
    """
    program = flatten(closed.jaxpr, closed.consts)
    if not any(i.eqn.primitive.name == "cond" for i in program.instructions):
        return closed

    def run(*args: Any) -> list[Any]:
        slots: Slots = dict(zip(program.inputs, args, strict=True))
        for i in program.instructions:
            regions = list_regions(i.eqn) if i.eqn.primitive.name == "cond" else []
            branches = [region.flatten() for region in regions]
            on_shards = [all(map(_runs_on_shards, branch.instructions)) for branch in branches]
            if not branches or not all(on_shards):
                evaluate([i], slots)
                continue
            index, *operands = (read(ref, slots) for ref in i.ins)
            results = [branch.run(operands) for branch in branches]
            chosen = results[0]
            for number, values in enumerate(results[1:], 1):
                chosen = [
                    jnp.where(index >= number, a, b) for a, b in zip(values, chosen, strict=True)
                ]
            slots.update(zip(i.outs, chosen, strict=True))
        return program.results(slots)

    args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(run)(*args)


# --- the proof ------------------------------------------------------------------------------------


def one_layer(params: Params, stacked: Sequence[int]) -> Params:
    """Return the abstract tree of one layer: stacks lose their dims of layers.

    Args:
      params: abstract parameters.
      stacked: for each parameter leaf, the number of leading dims that count layers, or whether it
        is a stack of layers.
    """
    leaves, tree = jax.tree.flatten(params)
    layer_leaves = []
    for leaf, num_dims in zip(leaves, stacked, strict=True):
        layer_leaves.append(jax.ShapeDtypeStruct(leaf.shape[int(num_dims) :], leaf.dtype))
    return jax.tree.unflatten(tree, layer_leaves)


def leaf_rule(
    tx: optax.GradientTransformation,
    params: Params,
    stacked: Sequence[int],
    state: OptState,
    closed: jex.ClosedJaxpr,
) -> LeafRule | str:
    """Return an optimizer as a rule for each leaf of a layer, or the reason why that is impossible.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      stacked: for each parameter leaf, the number of leading dims that count layers.
      state: the optimizer's abstract state over the tree of one layer.
      closed: the optimizer's update of one layer's tree, traced and without branches
        (`without_branches`), a function of (grads, state, params, loss).
    """
    layer = one_layer(params, stacked)
    update = flatten(closed.jaxpr, closed.consts)
    traced_init = jax.make_jaxpr(tx.init)(layer)
    init = flatten(traced_init.jaxpr, traced_init.consts)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(layer)[0]]
    names = [jax.tree_util.keystr(path) for path in paths]
    state_paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    owners = [owner_by_path(path, paths) for path in state_paths]
    leaf_ids = range(len(paths))
    while True:
        after_update = _follow(update, [*leaf_ids, *owners, *leaf_ids, None], names)
        if after_update.fault is not None:
            return after_update.fault
        state_leaves = after_update.output_leaves(update)[len(paths) :]
        found = {
            j: leaf for j, leaf in enumerate(state_leaves) if leaf is not None and owners[j] is None
        }
        if not found:
            break
        # A state leaf computed from one parameter leaf belongs to it. The next iteration then
        # follows what reads the state leaf.
        owners = [found.get(j, owner) for j, owner in enumerate(owners)]
    after_init = _follow(init, list(leaf_ids), names)
    if after_init.fault is not None:
        return after_init.fault

    fault = after_update.wrong_output(update, [*leaf_ids, *owners], names)
    fault = fault or after_init.wrong_output(init, owners, names)
    if fault is not None:
        return fault
    drawn = after_update.random_output(update, [*leaf_ids, *owners], stacked)
    if drawn is None:
        drawn = after_init.random_output(init, owners, stacked)
    if drawn is not None:
        return f"it draws random numbers for {names[drawn]}, which would be the same in all layers"
    return LeafRule(
        params, tuple(stacked), state, tuple(owners), init, update, after_update.leaf_of
    )


def owner_by_path(path: tuple[Any, ...], params: Sequence[tuple[Any, ...]]) -> int | None:
    """Return the index of the parameter to which a state leaf belongs by its path, or None.

    Optax builds states so that a state leaf's path ends with its parameter's path. If several
    parameter paths match, the longest is used.
    """
    indices = {param_path: i for i, param_path in enumerate(params)}
    for start in range(len(path)):
        if path[start:] in indices:
            return indices[path[start:]]
    return None


@dataclasses.dataclass(frozen=True)
class _Dependences:
    """What each value of a traced function depends on.

    Attributes:
      leaf_of: the leaf that each slot depends on; None or missing if it depends on none.
      random: slots that random numbers reach.
      fault: the first equation that combines leaves, or None. The equations after it were not
        followed.
    """

    leaf_of: dict[int, int | None]
    random: set[int]
    fault: str | None

    def output_leaves(self, program: FlatJaxpr) -> list[int | None]:
        """Return the leaf that each output depends on, or None."""
        return [self.leaf_of.get(ref) if isinstance(ref, int) else None for ref in program.outputs]

    def wrong_output(
        self, program: FlatJaxpr, owners: Sequence[int | None], names: Sequence[str]
    ) -> str | None:
        """Return which output depends on another leaf than its owner, or None."""
        for leaf, owner in zip(self.output_leaves(program), owners, strict=True):
            if leaf is not None and leaf != owner:
                target = "a state shared by all leaves" if owner is None else names[owner]
                return f"{names[leaf]} enters the update of {target}"
        return None

    def random_output(
        self, program: FlatJaxpr, owners: Sequence[int | None], stacked: Sequence[int]
    ) -> int | None:
        """Return the first stacked owner of an output that random numbers reach, or None."""
        for ref, owner in zip(program.outputs, owners, strict=True):
            is_random = isinstance(ref, int) and ref in self.random
            if is_random and owner is not None and stacked[owner]:
                return owner
        return None


def _follow(
    program: FlatJaxpr, input_leaves: Sequence[int | None], names: Sequence[str]
) -> _Dependences:
    """Follow which leaf each slot depends on, and which slots random numbers reach.

    Args:
      program: the traced function.
      input_leaves: the leaf of each input, or None.
      names: names of the leaves.
    """
    leaf_of: dict[int, int | None] = dict(zip(program.inputs, input_leaves, strict=True))
    random: set[int] = set()
    for i in program.instructions:
        leaves = {leaf_of.get(slot) for slot in i.reads} - {None}
        if len(leaves) > 1:
            leaf_names = sorted(names[leaf] for leaf in leaves if leaf is not None)
            fault = f"{i.eqn.primitive.name} combines {' and '.join(leaf_names)}"
            return _Dependences(leaf_of, random, fault)
        leaf_of.update(dict.fromkeys(i.outs, next(iter(leaves), None)))
        if i.eqn.primitive.name in _RANDOM or not random.isdisjoint(i.reads):
            random.update(i.outs)
    return _Dependences(leaf_of, random, None)
