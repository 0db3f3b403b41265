"""An optimizer applied to part of the parameters: one layer, or one leaf.

An optimizer is elementwise where the update of each parameter element, and each element of the state that mirrors it, is a
function of that element's own gradient, weight and state, and of scalars that no gradient reaches (a step count, a learning
rate, the loss). Adam, AdamW, Lion and momentum are; a global norm, a trust ratio (LAMB) or a factored moment (Adafactor) is
not. Only then does updating layer by layer, on any device, give what one update of the whole tree gives. It is not guessed:
the traced update is read equation by equation, and for each value the set of leaves it depends on.

To update a part, the whole tree's structure is kept, and every other leaf is empty (shape (0, ...)): masks and labels see
the paths and the number of dims that they see in a whole update. A rule that reads sizes (a mask of large leaves, a step
scaled by a leaf's size) would see others: so the update of each part is traced too, and its equations must be the whole's.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.jaxprs import FILLS, POINTWISE, Constant, FlatJaxpr, Instruction, flatten
from zerojax.state import OptStateMap, call_update, fill, map_opt_state


@dataclasses.dataclass(frozen=True, eq=False)
class ElementwiseUpdate:
    """An elementwise optimizer, and how its state divides over the parameters.

    Attributes:
      tx: the optimizer.
      params: abstract float32 parameters.
      opt_map: how its state divides over them.
    """

    tx: optax.GradientTransformation
    params: Any
    opt_map: OptStateMap

    def __call__(
        self,
        part: Sequence[int],
        grads: Sequence[jax.Array],
        params: Sequence[jax.Array],
        states: Sequence[jax.Array],
        shared: Sequence[jax.Array],
        loss: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Update some leaves, or slices of them.

        Args:
          part: indices of parameter leaves.
          grads: float32, one for each of `part`.
          params: float32, likewise.
          states: one for each of `opt_map.states_of(part)`.
          shared: one for each of `opt_map.shared`, before the step.
          loss: f32[].

        Returns:
          New parameters, new states and the shared scalars after the step.
        """
        mirrors = self.opt_map.states_of(part)
        g, p = (fill(self.params, part, values) for values in (grads, params))
        state = fill(self.opt_map.abstract, (*mirrors, *self.opt_map.shared), (*states, *shared))
        updates, after = call_update(self.tx, g, state, p, loss)
        weights = jax.tree.leaves(optax.apply_updates(p, updates))
        after = jax.tree.leaves(after)
        return [weights[i] for i in part], [after[j] for j in mirrors], [after[j] for j in self.opt_map.shared]


def elementwise_update(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    why: str,
    stacked: Sequence[Sequence[int]] = (),
    beyond: Callable[[], str | None] = lambda: None,
) -> ElementwiseUpdate:
    """Return the optimizer as one that may be applied to parts: one layer of stacked leaves, or one other leaf.

    Args:
      tx: the optimizer.
      params: abstract float32 parameters.
      opt_state: its abstract state over them.
      why: the setting that needs it, for the error.
      stacked: indices of the parameter leaves that are stacks of layers, in the parts that are updated together.
      beyond: tells what in the optimizer combines layers or leaves, for the error.

    Raises:
      ValueError: the optimizer is not elementwise; names the equation and the leaves.
    """
    update = ElementwiseUpdate(tx, params, map_opt_state(opt_state, params))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    trace = jax.make_jaxpr(lambda g, s, p, value: call_update(tx, g, s, p, value))
    fault = fault_of_update(trace(params, opt_state, params, scalar), update.opt_map, params)
    fault = fault or _fault_of_parts(update, names, stacked)
    if fault is not None:
        # Of an optimizer that combines leaves, that is the fault: elements of one leaf might be combined.
        fault = beyond() or fault
        raise ValueError(
            f"{why} updates layer by layer, which needs an optimizer whose every element, or every leaf of a layer, is updated "
            f"by itself, but {fault}; use an elementwise optimizer such as optax.adamw (what optax.clip_by_global_norm does is "
            "config.clip_norm, what optax.MultiSteps does num_microbatches), or keep params, grads and opt_state on the device "
            "with update='after_backward'"
        )
    return update


def fault_of_update(closed: jex.ClosedJaxpr, opt_map: OptStateMap, params: Any) -> str | None:
    """Return what in an update is not elementwise, or None.

    Args:
      closed: the update, traced: of (grads, state, params, loss).
      opt_map: how the state divides over the parameters.
      params: abstract parameters.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    for name, leaf, owner in zip(opt_map.names, opt_map.leaves, opt_map.owners, strict=True):
        if owner is None and leaf.shape:
            return f"its state {name} of shape {leaf.shape} mirrors no parameter"
    program = flatten(closed.jaxpr, closed.consts)
    # The leaf that each input is of, and the only one that each output may depend on; None is no leaf.
    every = range(len(names))
    reads = [*every, *opt_map.owners, *every, None]
    return _Reader(program, reads, names).fault([*every, *opt_map.owners])


def _fault_of_parts(update: ElementwiseUpdate, names: Sequence[str], parts: Sequence[Sequence[int]]) -> str | None:
    """Return how the update of a part differs from the whole's, or None."""
    opt_map = update.opt_map
    leaves, states = jax.tree.leaves(update.params), opt_map.leaves
    every = tuple(range(len(leaves)))
    whole = _trace(update, every, leaves, states)
    stacked = {i for part in parts for i in part}
    # The empty part is the one that moves the scalars which all parameters share.
    for part in [*(part for part in parts if part), *((i,) for i in every if i not in stacked), ()]:
        mirrors = set(opt_map.states_of(part))
        ones = [_one_layer(a) if i in stacked else a for i, a in enumerate(leaves)]
        mirrored = [_one_layer(a) if opt_map.owners[j] in stacked else a for j, a in enumerate(states)]
        try:
            alone = _trace(update, part, ones, mirrored)
        except Exception as error:  # the user's code: whatever it raises
            return f"its update of {[names[i] for i in part]} alone fails: {error!r}"
        # What makes each result must be what makes it in the update of the whole tree.
        for key in [*(("p", i) for i in part), *(("s", j) for j in (*mirrors, *opt_map.shared))]:
            if _equations(*whole, key) != _equations(*alone, key):
                what = names[key[1]] if key[0] == "p" else f"its state {key[1]}"
                return f"its rule for {what} depends on the sizes of arrays"
    return None


def _one_layer(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype)


def _trace(
    update: ElementwiseUpdate, part: Sequence[int], leaves: Sequence[Any], states: Sequence[Any]
) -> tuple[FlatJaxpr, dict[int, Any], dict[Any, Any]]:
    """Trace the update of a part; returns it, and what its inputs and outputs are."""
    mirrors, shared = update.opt_map.states_of(part), update.opt_map.shared
    arrays = [leaves[i] for i in part]
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    args = (arrays, arrays, [states[j] for j in mirrors], [states[j] for j in shared], scalar)
    closed = jax.make_jaxpr(lambda *a: update(part, *a))(*args)
    program = flatten(closed.jaxpr, closed.consts)
    of_states = [("s", j) for j in (*mirrors, *shared)]
    roles = [*(("g", i) for i in part), *(("p", i) for i in part), *of_states, "loss"]
    outputs = [*(("p", i) for i in part), *of_states]
    return program, dict(zip(program.inputs, roles, strict=True)), dict(zip(outputs, program.outputs, strict=True))


def _equations(program: FlatJaxpr, roles: dict[int, Any], outputs: dict[Any, Any], key: Any) -> list[Any]:
    """Return the equations of one output, in a form that does not name shapes."""
    names: dict[int, Any] = dict(roles)

    def name(ref: Any) -> Any:
        if isinstance(ref, int):
            return names[ref]
        # As bytes: a constant that is not a number equals itself, and -0 is not 0.
        value = np.asarray(ref.value)
        return ("constant", str(value.dtype), value.reshape(-1)[:1].tobytes())

    equations = []
    for number, i in enumerate(program.live([outputs[key]])):
        # What changes the numbers, and does not follow from shapes.
        attributes = {k: str(v) for k, v in i.eqn.params.items() if k in ("y", "new_dtype", "direction", "mode")}
        equations.append((i.eqn.primitive.name, attributes, [name(ref) for ref in i.ins]))
        # Numbered by equation: slots differ between the two traces.
        names.update({out: (number, n) for n, out in enumerate(i.outs)})
    return [*equations, name(outputs[key])]


class _Reader:
    """Follows which parameter leaf each value of a traced update depends on."""

    def __init__(self, program: FlatJaxpr, reads: Sequence[int | None], names: Sequence[str]) -> None:
        self.program, self.names = program, names
        self.leaf: dict[int, int | None] = dict(zip(program.inputs, reads, strict=True))
        self.uneven: set[int] = set()  # arrays of no leaf whose elements may differ

    def fault(self, writes: Sequence[int | None]) -> str | None:
        for i in self.program.instructions:
            if (fault := self.step(i)) is not None:
                return fault
        for ref, expected in zip(self.program.outputs, writes, strict=True):
            leaf = self.leaf.get(ref) if isinstance(ref, int) else None
            if leaf is not None and leaf != expected:
                to = "a state that all leaves share" if expected is None else self.names[expected]
                return f"{self.names[leaf]} enters the update of {to}"
            if isinstance(ref, int) and ref in self.uneven:
                return "its update holds an array that is no function of the parameters"
        return None

    def step(self, i: Instruction) -> str | None:
        name = i.eqn.primitive.name
        leaves = {self.leaf.get(ref) for ref in i.ins if isinstance(ref, int)} - {None}
        if len(leaves) > 1:
            return f"{name} combines {' and '.join(sorted(self.names[r] for r in leaves if r is not None))}"
        leaf = next(iter(leaves), None)
        avals: list[Any] = [v.aval for v in i.eqn.outvars]
        shapes = [a.shape for a in avals]
        if leaf is None:
            # Scalars and constants. The elements of an array among them must be equal: the update of a part sees only some.
            even = name in POINTWISE | FILLS and not any(self.is_uneven(ref) for ref in i.ins)
            for out, shape in zip(i.outs, shapes, strict=True):
                self.leaf[out] = None
                if shape and not even:
                    self.uneven.add(out)
            return None
        # Else it depends on one leaf alone, and may only act on each of its elements.
        read_avals: list[Any] = [v.aval for v in i.eqn.invars]
        operands = [a.shape for a in read_avals]
        read_shapes = [
            s for ref, s in zip(i.ins, operands, strict=True) if isinstance(ref, int) and self.leaf.get(ref) is not None
        ]
        fits = all(s == shapes[0] for s in read_shapes) and all(s in ((), shapes[0]) for s in operands)
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
