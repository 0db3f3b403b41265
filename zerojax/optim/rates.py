"""Find a step's learning rate for its metrics, in the optimizer's state or its traced update.

    optax.inject_hyperparams(optax.adamw)(..)    the state holds hyperparams["learning_rate"], the
                                                 rate of the last update
    optax.adamw(schedule)                        the state holds a count, and the update multiplies
                                                 by -schedule(count)

With a schedule, the state holds only the count, and the function is hidden in a closure. But the
update is traced. The schedule's value is the scalar that follows from this count alone and whose
negative multiplies every gradient that it meets. It is computed from the count before the step, so
it is the rate of this step. If the trace does not show exactly one such scalar (a sign that is not
flipped, a `cond` around the update), no rate is reported.

With `optax.partition` (multi_transform) each group has its own rate, "learning_rate/<label>".
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.jaxprs import Constant, FlatJaxpr, Instruction, Ref, evaluate, flatten
from zerojax.state import Layout, is_stored
from zerojax.trees import OptState

LEARNING_RATE = "learning_rate"
_SAME = frozenset(
    {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy"}
)
"""Equations that change only a scalar's dtype or shape."""


@dataclasses.dataclass(frozen=True)
class _Scheduled:
    """A schedule's value: the equations that compute it from a count."""

    count: int
    start: int
    instructions: tuple[Instruction, ...]
    value: int


@dataclasses.dataclass(frozen=True)
class LearningRates:
    """The learning rates of an optimizer.

    Attributes:
      held: {name of a metric: index of the optimizer state leaf that holds the rate}.
      scheduled: {name of a metric: how the rate follows from a count in the optimizer state}.
    """

    held: Mapping[str, int]
    scheduled: Mapping[str, _Scheduled]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return (*self.held, *self.scheduled)

    def __call__(self, before: OptState, after: OptState) -> dict[str, jax.Array]:
        """Return the metrics, f32[] each.

        Args:
          before: the optimizer's state before the step.
          after: the optimizer's state after the step.
        """
        old = jax.tree.leaves(before, is_leaf=is_stored)
        new = jax.tree.leaves(after, is_leaf=is_stored)
        values: dict[str, Any] = {name: new[j] for name, j in self.held.items()}
        for name, rate in self.scheduled.items():
            slots = {rate.start: old[rate.count]}
            evaluate(rate.instructions, slots)
            values[name] = slots[rate.value]
        return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def learning_rates(layout: Layout) -> LearningRates:
    """Find the learning rates of an optimizer, from `optax.inject_hyperparams` and schedules.

    Args:
      layout: layout of the program's state.
    """
    tree = jax.tree.structure(layout.opt_map.abstract)
    indices = jax.tree.unflatten(tree, range(tree.num_leaves))
    rates: dict[str, list[int | _Scheduled]] = {}
    program: FlatJaxpr | None = None
    nodes: Any = jax.tree_util.tree_flatten_with_path(indices, is_leaf=_has_rate)[0]
    for path, node in nodes:
        if not _has_rate(node):
            continue
        if isinstance(node, optax.ScaleByScheduleState):
            program = program or flatten(layout.update_jaxpr.jaxpr, layout.update_jaxpr.consts)
            rate = _scheduled(layout, program, node.count)
        else:
            index = node.hyperparams[LEARNING_RATE]
            rate = index if layout.opt_map.leaves[index].shape == () else None
        # A schedule that is not a learning rate, such as a weight decay schedule, gives None.
        if rate is not None:
            name = "/".join([LEARNING_RATE, *_labels(path)])
            rates.setdefault(name, []).append(rate)
    held: dict[str, int] = {}
    scheduled: dict[str, _Scheduled] = {}
    for name, rates_of_name in rates.items():
        # If a name has two rates, neither is reported.
        if len(rates_of_name) > 1:
            continue
        (rate,) = rates_of_name
        if isinstance(rate, _Scheduled):
            scheduled[name] = rate
        else:
            held[name] = rate
    return LearningRates(held, scheduled)


def _has_rate(node: Any) -> bool:
    """Return whether a node of an optimizer's state gives a learning rate."""
    hyperparams = getattr(node, "hyperparams", None)
    return isinstance(node, optax.ScaleByScheduleState) or (
        isinstance(hyperparams, dict) and LEARNING_RATE in hyperparams
    )


def _labels(path: tuple[Any, ...]) -> list[str]:
    """Return the labels of `optax.partition` along the path to a node of its state."""
    labels = []
    for key, label in itertools.pairwise(path):
        if getattr(key, "name", None) == "inner_states" and hasattr(label, "key"):
            labels.append(str(label.key))
    return labels


def _scheduled(layout: Layout, program: FlatJaxpr, count: Any) -> _Scheduled | None:
    """Return the schedule's value whose negative the update multiplies gradients by, or None.

    Args:
      layout: layout of the program's state.
      program: the traced update, a function of (grads, state, params, loss).
      count: index of the schedule's count in the state.
    """
    num_params = len(layout.leaves)
    num_states = len(layout.opt_map.leaves)
    start = program.inputs[num_params + count]
    others = program.reached(slot for slot in program.inputs if slot != start)
    scalars = program.reached([start]) - others
    producers: dict[int, Instruction] = {}
    for i in program.instructions:
        producers |= dict.fromkeys(i.outs, i)

    def find_origin(ref: Ref | None) -> Ref | None:
        """Return the value that equations which change no number pass on as `ref`."""
        while isinstance(ref, int) and ref in producers:
            i = producers[ref]
            if i.eqn.primitive.name not in _SAME:
                break
            ref = i.ins[0]
        return ref

    states_after = program.outputs[num_params : num_params + num_states]
    values: set[Ref | None] = set()
    for i in program.instructions:
        for ref in i.reads:
            # Here the scalar meets values that do not follow from this count alone: the gradients.
            if ref not in scalars or others.isdisjoint(i.outs):
                continue
            if i.eqn.primitive.name == "mul" and ref not in states_after:
                values.add(_negated(find_origin(ref), producers))
            else:
                values.add(None)
    if len(values) != 1:
        return None
    value = find_origin(values.pop())
    if not isinstance(value, int) or value not in scalars:
        return None
    return _Scheduled(count, start, program.live([value]), value)


def _negated(ref: Ref | None, producers: Mapping[int, Instruction]) -> Ref | None:
    """Return x if a value is -x, else None."""
    if not isinstance(ref, int) or ref not in producers:
        return None
    i = producers[ref]
    if i.eqn.primitive.name == "neg":
        return i.ins[0]
    if i.eqn.primitive.name == "mul":
        for factor, value in (i.ins, i.ins[::-1]):
            if isinstance(factor, Constant) and np.ndim(factor.value) == 0 and factor.value == -1:
                return value
    return None
