"""Split the optimizer's rule for one leaf: scalars for the program, elements for a host kernel.

The rule is traced. Equations that no array reaches (a schedule, bias corrections, the clipping
factor) stay in the program, on the device. The remaining equations become the kernel. Scalars that
the kernel reads are sent to it as float32. Random bits would not survive that, so equations that
make them belong to the kernel too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.jaxprs import Instruction, Ref, evaluate, flatten, read
from zerojax.optim.by_record import RecordUpdate

Array = jax.Array


class HostRule:
    """The update of one leaf, split into scalars of the program and a kernel over elements.

    Attributes:
      states: indices of the state leaves that belong to the parameter leaf.
      program: the traced rule, a function of (arrays, scalars).
      num_arrays: number of the rule's arrays: gradient, weight, states.
      before: equations of the program on the device.
      elements: equations of the kernel.
      sent: slots of the scalars that the program sends to the kernel.
      fills: shapes of the arrays that are sent as one number, by slot.
      kernel: the traced kernel, a function of (arrays, sent scalars in float32).
    """

    def __init__(
        self, update: RecordUpdate, index: int, grad_dtype: Any, summed: int, casts: bool
    ) -> None:
        """Split the update of leaf `index`.

        Args:
          update: the update of the program's state by records.
          index: index of the parameter leaf.
          grad_dtype: dtype in which the leaf's gradient is summed.
          summed: number of microbatches whose gradients are summed.
          casts: whether the kernel also makes the parameter in the compute dtype.
        """
        opt_map = update.layout.opt_map
        shape = update.layout.leaves[index].record_shape
        self.states = opt_map.list_state_leaves((index,))
        state_dtypes = [opt_map.leaves[j].dtype for j in self.states]
        array_dtypes = (grad_dtype, jnp.float32, *state_dtypes)
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for dtype in array_dtypes]
        f32 = jax.ShapeDtypeStruct((), jnp.float32)
        scalars = [*(opt_map.leaves[j] for j in opt_map.shared), f32, f32, f32]
        if update.layout.config.update == "in_forward":
            scalars.append(f32)
        closed = jax.make_jaxpr(_build_rule(update, index, summed, casts))(arrays, scalars)
        self.program = flatten(closed.jaxpr, closed.consts)
        self.num_arrays = len(arrays)

        live = self.program.live(self.program.outputs)
        array_slots = self.program.inputs[: self.num_arrays]
        varies = self.program.reached([*array_slots, *_random_slots(live)])
        # The program computes an equation that no element reaches once, instead of once for every
        # element of every layer.
        self.elements = [i for i in live if not varies.isdisjoint(i.outs)]
        self.before = [i for i in live if varies.isdisjoint(i.outs)]
        # The program's scalars that the kernel reads; each is sent once.
        reads: list[Ref] = []
        for i in self.elements:
            reads += i.ins
        reads += self.program.outputs
        scalar_reads = [ref for ref in reads if isinstance(ref, int) and ref not in varies]
        self.sent = tuple(dict.fromkeys(scalar_reads))

        scalar_slots = self.program.inputs[self.num_arrays :]
        avals: dict[int, Any] = dict(zip(scalar_slots, scalars, strict=True))
        # An array whose elements are all equal is sent as one number, and the kernel broadcasts it.
        self.fills: dict[int, tuple[int, ...]] = {}
        for i in self.before:
            for slot, variable in zip(i.outs, i.eqn.outvars, strict=True):
                avals[slot] = variable.aval
                if slot in self.sent and avals[slot].shape:
                    self.fills[slot] = avals[slot].shape
        # All scalars are sent as float32, and the kernel casts each back to its dtype in the rule.
        dtypes = [avals[slot].dtype for slot in self.sent]

        def kernel(arrays: list[Array], values: list[Array]) -> list[Array]:
            slots: dict[int, Any] = dict(zip(array_slots, arrays, strict=True))
            for slot, value, dtype in zip(self.sent, values, dtypes, strict=True):
                value = value.astype(dtype)
                if slot in self.fills:
                    value = jnp.broadcast_to(value, self.fills[slot])
                slots[slot] = value
            evaluate(self.elements, slots)
            return [read(ref, slots) for ref in self.program.outputs]

        self.kernel: jex.ClosedJaxpr = jax.make_jaxpr(kernel)(arrays, [f32] * len(self.sent))

    def scalars(self, values: Sequence[Array]) -> list[Array]:
        """Return the scalars that the program sends to the kernel, f32[] each.

        Args:
          values: the rule's scalars: shared optimizer state, loss, clipping factor, loss scale, and
            the number of microbatches with an update in forward.
        """
        scalar_slots = self.program.inputs[self.num_arrays :]
        slots: dict[int, Any] = dict(zip(scalar_slots, values, strict=True))
        evaluate(self.before, slots)
        sent = []
        for slot in self.sent:
            if jnp.size(slots[slot]):
                # An array that depends on no array is a broadcast scalar: its elements are equal.
                sent.append(jnp.ravel(slots[slot])[0].astype(jnp.float32))
            else:
                sent.append(jnp.float32(0))
        return sent


def _build_rule(
    update: RecordUpdate, index: int, summed: int, casts: bool
) -> Callable[[list[Array], list[Array]], list[Array]]:
    """Return the update of a leaf as a function of (arrays, scalars); see `HostRule`."""
    layout = update.layout
    leaf = layout.leaves[index]
    clips = layout.config.clip_norm is not None
    scales_loss = layout.abstract_state.loss_scale is not None

    def mean(grad: Array, factor: Array, scale: Array, *count: Array) -> Array:
        if count:
            # The step that computed the gradient may have run with another precision, `clip_norm`
            # or number of microbatches. Factors of 1 change no bit.
            return grad / count[0] / scale * factor
        if summed > 1:
            grad = grad / summed
        if scales_loss:
            grad = grad / scale
        return grad * factor if clips else grad

    def rule(arrays: list[Array], scalars: list[Array]) -> list[Array]:
        grad, old, *states = arrays
        num_shared = len(layout.opt_map.shared)
        shared, (loss, *factors) = scalars[:num_shared], scalars[num_shared:]
        # The same order as in the update on the device (mean, loss scale, clipping), so that the
        # numbers are the same.
        grad = mean(grad.astype(jnp.float32), *factors)
        (new,), states, _ = update.elementwise((index,), (grad,), (old,), states, shared, loss)
        cast = [new.astype(leaf.dtype)] if casts else []
        return [new, *states, *cast]

    return rule


def _random_slots(instructions: Sequence[Instruction]) -> list[int]:
    """Return the slots of 32-bit integers, such as random bits, which the kernel makes itself.

    Scalars are sent as float32, which can hold a step count but not 32 random bits.
    """
    slots: list[int] = []
    for i in instructions:
        avals: list[Any] = [variable.aval for variable in i.eqn.outvars]
        if any(aval.dtype == jnp.uint32 for aval in avals):
            slots += i.outs
    return slots
