"""Apply optimizers that combine elements only within one leaf of one layer.

Examples are Muon, Adafactor, LAMB, LARS and Novograd.

    for each layer l, for each leaf i:      u, s = rule_i(g[l, i], s[l, i], w[l, i], scalars)

The update of a layer's leaf depends only on that leaf of that layer, and on values that no gradient
reaches: a count, a learning rate, the loss, constants. So layers can be updated one after the
other, on any device, and each leaf of the state belongs to one parameter leaf whatever its shape,
such as a factored moment or a scalar for each matrix. This property is proven by tracing, as for
elementwise optimizers (`zerojax.optim.elementwise`): the update is traced over the tree of one
layer, whose leaves have no layer dim, and each value's leaf is followed.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

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
from zerojax.trees import Grads, Params

Array = jax.Array
Slots = dict[int, Any]
_MOVES = frozenset({"reshape", "squeeze", "expand_dims", "transpose"})
"""Equations that only rearrange elements."""
_LOCAL = POINTWISE | REDUCTIONS | _MOVES | {"broadcast_in_dim"}
"""Equations that run on shards: XLA adds up partial sums and moves no element.

A reshape runs on shards only if it merges no dims.
"""
_RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})


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
      there: slots that the middle reads and does not compute.
      back: slots that the middle computes and that are read after it or are results.
      outputs: the results.
    """

    before: tuple[Instruction, ...]
    middle: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    there: tuple[int, ...]
    back: tuple[int, ...]
    outputs: tuple[Ref, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LeafRule:
    """An optimizer as one rule for each parameter leaf.

    Attributes:
      params: abstract float32 parameters, including stacks of layers.
      stacked: whether each parameter leaf is a stack of layers, [L, ...].
      layer_state: the abstract state over one layer's tree.
      owners: for each state leaf, the index of the parameter leaf that it belongs to; None if all
        leaves share it.
      init: the traced `tx.init` over one layer's tree.
      update: the traced `tx.update`, a function of (grads, state, params, loss).
      leaf_of: the leaf on which each slot of `update` depends; None or missing if it depends on
        none.
    """

    params: Any
    stacked: tuple[bool, ...]
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
        shapes = self._shapes
        there, back = (
            sum(math.prod(shapes[slot]) for slot in slots) for slots in (phases.there, phases.back)
        )
        return there, back

    @functools.cached_property
    def _shapes(self) -> dict[int, tuple[int, ...]]:
        layer = one_layer(self.params, self.stacked)
        # The shapes of all inputs except the loss, and of each equation's results.
        given = [tuple(a.shape) for a in jax.tree.leaves((layer, self.layer_state, layer))]
        shapes = dict(zip(self.update.inputs, given, strict=False))
        for i in self.update.instructions:
            avals: list[Any] = [v.aval for v in i.eqn.outvars]
            shapes.update(zip(i.outs, (a.shape for a in avals), strict=True))
        return shapes

    def list_state_leaves(self, index: int) -> tuple[int, ...]:
        """Return the indices of the state leaves that belong to a parameter leaf."""
        return tuple(j for j, owner in enumerate(self.owners) if owner == index)

    # --- one leaf ---------------------------------------------------------------------------------

    def first_states(self, index: int, weight: Array, layers: int | None) -> list[Array]:
        """Return the initial state of a parameter leaf.

        Args:
          index: index of the parameter leaf.
          weight: float32 weight of one layer or of a stack.
          layers: number of layers in the stack; None for one layer or an unstacked leaf.
        """
        program = self.init
        outputs = [program.outputs[j] for j in self.list_state_leaves(index)]
        given = {program.inputs[index]: weight}
        return _run(program.live(outputs), given, {}, outputs, layers)

    def first_shared(self) -> list[Array]:
        """Return the state that all leaves share, before the first step."""
        outputs = [self.init.outputs[j] for j in self.shared]
        return _run(self.init.live(outputs), {}, {}, outputs, None)

    def scalars(self, shared: Sequence[Array], loss: Array) -> Slots:
        """Return the values that depend on no leaf, by slot.

        Args:
          shared: the state that all leaves share, before the step.
          loss: f32[], the loss of the step.
        """
        state = self._inputs(1)
        slots = {state[j]: value for j, value in zip(self.shared, shared, strict=True)} | {
            self.update.inputs[-1]: loss
        }
        evaluate(self._of_no_leaf, slots)
        return slots

    def shared_after(self, shared: Sequence[Array], loss: Array) -> list[Array]:
        """Return the state that all leaves share, after a step.

        Args:
          shared: the state that all leaves share, before the step.
          loss: f32[], the loss of the step.
        """
        slots = self.scalars(shared, loss)
        return [
            jnp.asarray(read(self.update.outputs[len(self.stacked) + j], slots))
            for j in self.shared
        ]

    def update_leaf(
        self,
        index: int,
        grad: Array,
        weight: Array,
        states: Sequence[Array],
        scalars: Slots,
        layers: int | None,
        move: Move,
    ) -> tuple[Array, list[Array]]:
        """Return the update of a leaf, and the leaf's state after it.

        Args:
          index: index of the parameter leaf.
          grad: float32 gradient of one layer or of a stack.
          weight: float32 weight of one layer or of a stack.
          states: one array for each of `list_state_leaves(index)`, for one layer or for a stack.
          scalars: values returned by `scalars`.
          layers: number of layers in the stack; None for one layer or an unstacked leaf.
          move: how values reach the devices that hold full leaves.
        """
        phases = self._phases[index]
        at_grads, at_states, at_params = (self._inputs(k) for k in range(3))
        values = {at_grads[index]: grad, at_params[index]: weight}
        values |= {
            at_states[j]: value
            for j, value in zip(self.list_state_leaves(index), states, strict=True)
        }
        values = _advance(phases.before, values, scalars, layers)
        if phases.middle:
            there = {slot: move.whole(index, values[slot]) for slot in phases.there}
            # The gathered values may have more layers than the stack, because of padding.
            rows = layers if layers is None else next(iter(there.values())).shape[0]
            made = _run(phases.middle, there, scalars, phases.back, rows)
            values |= {
                slot: move.shard(index, value, weight)
                for slot, value in zip(phases.back, made, strict=True)
            }
            values = _advance(phases.after, values, scalars, layers)
        update, *after = _run((), values, scalars, phases.outputs, layers)
        return update, after

    @functools.cached_property
    def _of_no_leaf(self) -> tuple[Instruction, ...]:
        live = self.update.live(self.update.outputs)
        return tuple(i for i in live if self.leaf_of.get(i.outs[0]) is None)

    def _inputs(self, place: int) -> tuple[int, ...]:
        """Return the slots of the gradients (0), the state (1) or the parameters (2)."""
        leaves = len(self.stacked)
        states = len(self.owners)
        start = (0, leaves, leaves + states)[place]
        return self.update.inputs[start : start + (states if place == 1 else leaves)]

    @functools.cached_property
    def _phases(self) -> tuple[_Phases, ...]:
        num = len(self.stacked)
        own = {i: [] for i in range(len(self.stacked))}
        for i in self.update.live(self.update.outputs):
            if (leaf := self.leaf_of.get(i.outs[0])) is not None:
                own[leaf].append(i)
        outputs = [
            (
                self.update.outputs[i],
                *(self.update.outputs[num + j] for j in self.list_state_leaves(i)),
            )
            for i in range(num)
        ]
        return tuple(_divided(own[i], out, self.leaf_of) for i, out in enumerate(outputs))

    # --- the whole tree ---------------------------------------------------------------------------

    def init_tree(self, params: Params) -> Any:
        """Return the initial state of the full tree; the state of a stack has a layer dim."""
        leaves: list[Any] = [None] * len(self.owners)
        for i, (weight, stacked) in enumerate(
            zip(jax.tree.leaves(params), self.stacked, strict=True)
        ):
            own = self.first_states(i, weight, weight.shape[0] if stacked else None)
            for j, value in zip(self.list_state_leaves(i), own, strict=True):
                leaves[j] = value
        for j, value in zip(self.shared, self.first_shared(), strict=True):
            leaves[j] = value
        return jax.tree.unflatten(jax.tree.structure(self.layer_state), leaves)

    def update_tree(
        self, grads: Grads, state: Any, params: Params, loss: Array, move: Move
    ) -> tuple[Any, Any]:
        """Return the updates of the full tree, and the state after them.

        Args:
          grads: float32 gradients.
          state: the optimizer state before the step.
          params: float32 weights.
          loss: f32[], the loss of the step.
          move: how values reach the devices that hold full leaves.
        """
        before = jax.tree.leaves(state)
        (weights, tree) = jax.tree.flatten(params)
        shared = [before[j] for j in self.shared]
        scalars = self.scalars(shared, loss)
        updates = []
        after = list(before)
        for i, (grad, weight, stacked) in enumerate(
            zip(jax.tree.leaves(grads), weights, self.stacked, strict=True)
        ):
            own = self.list_state_leaves(i)
            layers = weight.shape[0] if stacked else None
            update, states = self.update_leaf(
                i, grad, weight, [before[j] for j in own], scalars, layers, move
            )
            updates.append(update)
            for j, value in zip(own, states, strict=True):
                after[j] = value
        for j, value in zip(self.shared, self.shared_after(shared, loss), strict=True):
            after[j] = value
        return jax.tree.unflatten(tree, updates), jax.tree.unflatten(
            jax.tree.structure(state), after
        )

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
        """Update one record: the leaves of one layer, or one unstacked leaf.

        Args:
          leaf_ids: indices of parameter leaves.
          grads: float32 gradients, one for each leaf of `leaf_ids`, without a layer dim.
          params: float32 weights, one for each leaf of `leaf_ids`, without a layer dim.
          states: the state leaves that belong to `leaf_ids`, in the order of the state.
          shared: the state that all leaves share, before the step.
          loss: f32[], the loss of the step.
          move: how values reach the devices that hold full leaves.

        Returns:
          New parameters and new states.
        """
        owned = [j for j, owner in enumerate(self.owners) if owner in leaf_ids]
        before = dict(zip(owned, states, strict=True))
        after = {}
        weights = []
        scalars = self.scalars(shared, loss)
        for i, grad, weight in zip(leaf_ids, grads, params, strict=True):
            own = self.list_state_leaves(i)
            update, new = self.update_leaf(
                i, grad, weight, [before[j] for j in own], scalars, None, move
            )
            weights.append(optax.apply_updates(weight, update))
            after.update(zip(own, new, strict=True))
        return weights, [after[j] for j in owned]

    def init_part(self, leaf_ids: Sequence[int], weights: Sequence[Array]) -> list[Array]:
        """Return the initial states of one record, in the order of the state."""
        after: dict[int, Array] = {}
        for i, weight in zip(leaf_ids, weights, strict=True):
            after.update(
                zip(self.list_state_leaves(i), self.first_states(i, weight, None), strict=True)
            )
        return [after[j] for j in sorted(after)]


def _advance(
    instructions: Sequence[Instruction], values: Slots, scalars: Slots, layers: int | None
) -> Slots:
    """Return `values` together with all results of the equations."""
    wanted = [slot for i in instructions for slot in i.outs]
    return values | dict(
        zip(wanted, _run(instructions, values, scalars, wanted, layers), strict=True)
    )


def _run(
    instructions: Sequence[Instruction],
    values: Mapping[int, Array],
    scalars: Slots,
    wanted: Sequence[Ref],
    layers: int | None,
) -> list[Array]:
    """Evaluate equations, with a vmap over `layers` if it is not None.

    With the vmap, results that do not depend on the layer have a layer dim too.
    """

    def one(given: Sequence[Array]) -> list[Array]:
        slots = scalars | dict(zip(values, given, strict=True))
        evaluate(instructions, slots)
        return [jnp.asarray(read(ref, slots)) for ref in wanted]

    arrays = list(values.values())
    return one(arrays) if layers is None else jax.vmap(one, axis_size=layers)(arrays)


def _divided(
    own: Sequence[Instruction], outputs: Sequence[Ref], leaf_of: Mapping[int, int | None]
) -> _Phases:
    """Divide the equations behind a leaf's results into those before, in and after the middle."""
    made_by = {slot: n for n, i in enumerate(own) for slot in i.outs}
    inputs = [[made_by[slot] for slot in i.reads if slot in made_by] for i in own]
    behind, ahead = _around({n for n, i in enumerate(own) if not _runs_on_shards(i)}, inputs)
    # Values that enter or leave the middle have the leaf's dims in the leaf's order, so a transpose
    # on the way to a product also belongs to the middle.
    needs_whole = {n for n in behind | ahead if own[n].eqn.primitive.name == "transpose"} | (
        behind & ahead
    )
    behind, ahead = _around(needs_whole, inputs)
    middle = behind & ahead
    # Equations that only move elements join the middle on either side, so that the values that
    # enter or leave it have the leaf's shape if possible.
    for n, i in enumerate(own):
        if i.eqn.primitive.name in _MOVES and not middle.isdisjoint(inputs[n]):
            middle.add(n)
    results = {ref for ref in outputs if isinstance(ref, int)}
    readers: dict[int, set[int]] = {}
    for n, producers in enumerate(inputs):
        for producer in producers:
            readers.setdefault(producer, set()).add(n)
    for n in reversed(range(len(own))):
        moves = own[n].eqn.primitive.name in _MOVES and results.isdisjoint(own[n].outs)
        if moves and readers.get(n, set()) and readers[n] <= middle:
            middle.add(n)
    before = tuple(i for n, i in enumerate(own) if n not in middle and n not in behind)
    inside = tuple(i for n, i in enumerate(own) if n in middle)
    after = tuple(i for n, i in enumerate(own) if n not in middle and n in behind)
    of_middle = {slot for i in inside for slot in i.outs}
    there = dict.fromkeys(
        slot
        for i in inside
        for slot in i.reads
        if slot not in of_middle and leaf_of.get(slot) is not None
    )  # in order, without duplicates
    later = {slot for i in after for slot in i.reads} | results
    back = [slot for i in inside for slot in i.outs if slot in later]
    return _Phases(before, inside, after, tuple(there), tuple(back), tuple(outputs))


def _around(equations: set[int], inputs: Sequence[Sequence[int]]) -> tuple[set[int], set[int]]:
    """Return the equations downstream of a set, and the equations upstream; both include the set.

    Args:
      equations: numbers of the equations in the set.
      inputs: for each equation, the numbers of the equations whose results it reads.
    """
    behind = set(equations)
    ahead = set(equations)
    for n, before in enumerate(inputs):
        if not behind.isdisjoint(before):
            behind.add(n)
    for n in reversed(range(len(inputs))):
        if n in ahead:
            ahead.update(inputs[n])
    return behind, ahead


def _runs_on_shards(i: Instruction) -> bool:
    name = i.eqn.primitive.name
    if i.has_jaxpr or name not in _LOCAL:
        return False
    if name != "reshape":
        return True
    avals: list[Any] = [i.eqn.invars[0].aval, i.eqn.outvars[0].aval]
    before, after = ([n for n in aval.shape if n != 1] for aval in avals)
    return before == after


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
            if not branches or not all(
                _runs_on_shards(one) for branch in branches for one in branch.instructions
            ):
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

    return jax.make_jaxpr(run)(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars)
    )


# --- the proof ------------------------------------------------------------------------------------


def one_layer(params: Params, stacked: Sequence[bool]) -> Any:
    """Return the abstract tree of one layer: stacks lose their layer dim."""
    leaves, tree = jax.tree.flatten(params)
    ones = [
        jax.ShapeDtypeStruct(a.shape[1:] if s else a.shape, a.dtype)
        for a, s in zip(leaves, stacked, strict=True)
    ]
    return jax.tree.unflatten(tree, ones)


def leaf_rule(
    tx: optax.GradientTransformation,
    params: Params,
    stacked: Sequence[bool],
    state: Any,
    closed: jex.ClosedJaxpr,
) -> LeafRule | str:
    """Return an optimizer as a rule for each leaf of a layer, or the reason why that is impossible.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      stacked: whether each parameter leaf is a stack of layers.
      state: the optimizer's abstract state over the tree of one layer.
      closed: the optimizer's update of one layer's tree, traced and without branches
        (`without_branches`), a function of (grads, state, params, loss).
    """
    layer = one_layer(params, stacked)
    update = flatten(closed.jaxpr, closed.consts)
    init = jax.make_jaxpr(tx.init)(layer)
    first = flatten(init.jaxpr, init.consts)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(layer)[0]]
    names = [jax.tree_util.keystr(path) for path in paths]
    state_paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    owners = [owner_by_path(path, paths) for path in state_paths]
    every = range(len(paths))
    while True:
        leaf_of, random, fault = _follow(update, [*every, *owners, *every, None], names)
        if fault is not None:
            return fault
        ends = [leaf_of.get(ref) if isinstance(ref, int) else None for ref in update.outputs]
        found = {
            j: leaf
            for j, leaf in enumerate(ends[len(paths) :])
            if leaf is not None and owners[j] is None
        }
        if not found:
            break
        # A state leaf computed from one parameter leaf belongs to it. The next iteration then
        # follows what reads the state leaf.
        owners = [found.get(j, owner) for j, owner in enumerate(owners)]
    begins = _follow(first, list(every), names)
    if begins[2] is not None:
        return begins[2]
    starts = [begins[0].get(ref) if isinstance(ref, int) else None for ref in first.outputs]
    pairs = [*zip(ends, [*every, *owners], strict=True), *zip(starts, owners, strict=True)]
    for leaf, expected in pairs:
        if leaf is not None and leaf != expected:
            to = "a state shared by all leaves" if expected is None else names[expected]
            return f"{names[leaf]} enters the update of {to}"
    results = [
        (ref, owner, random) for ref, owner in zip(update.outputs, [*every, *owners], strict=True)
    ]
    results += [(ref, owner, begins[1]) for ref, owner in zip(first.outputs, owners, strict=True)]
    for ref, owner, drawn in results:
        if owner is not None and stacked[owner] and isinstance(ref, int) and ref in drawn:
            return (
                f"it draws random numbers for {names[owner]}, which would be the same in all layers"
            )
    return LeafRule(params, tuple(stacked), state, tuple(owners), first, update, leaf_of)


def owner_by_path(path: tuple[Any, ...], params: Sequence[tuple[Any, ...]]) -> int | None:
    """Return the index of the parameter to which a state leaf belongs by its path, or None.

    Optax builds states so that a state leaf's path ends with its parameter's path. If several
    parameter paths match, the longest is used.
    """
    index = {p: i for i, p in enumerate(params)}
    return next((index[path[start:]] for start in range(len(path)) if path[start:] in index), None)


def _follow(
    program: FlatJaxpr, reads: Sequence[int | None], names: Sequence[str]
) -> tuple[dict[int, int | None], set[int], str | None]:
    """Follow which leaf each slot depends on, and which slots random numbers reach.

    Returns:
      The leaf of each slot, the slots reached by random numbers, and the first equation that
      combines leaves, or None.
    """
    leaf_of: dict[int, int | None] = dict(zip(program.inputs, reads, strict=True))
    random: set[int] = set()
    for i in program.instructions:
        leaves = _leaves(leaf_of.get(slot) for slot in i.reads)
        if len(leaves) > 1:
            of = " and ".join(sorted(names[leaf] for leaf in leaves))
            return leaf_of, random, f"{i.eqn.primitive.name} combines {of}"
        leaf_of.update(dict.fromkeys(i.outs, next(iter(leaves), None)))
        if i.eqn.primitive.name in _RANDOM or not random.isdisjoint(i.reads):
            random.update(i.outs)
    return leaf_of, random, None


def _leaves(of: Iterable[int | None]) -> set[int]:
    return {leaf for leaf in of if leaf is not None}
