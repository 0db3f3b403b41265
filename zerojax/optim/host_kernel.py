"""Split the optimizer's rule for one leaf: scalars for the program, elements for a host kernel.

The rule is traced. Equations that no array reaches (a schedule, bias corrections, the clipping
factor) stay in the program, on the device. The remaining equations become the kernel. Scalars that
the kernel reads are sent to it as float32. Random bits would not survive that, so equations that
make them belong to the kernel too.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.jaxprs import evaluate, flatten, read
from zerojax.optim.by_record import RecordUpdate

Array = jax.Array


class HostRule:
    """The update of one leaf, split into scalars of the program and a kernel over elements."""

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
        layout = update.layout
        leaf = update.layout.leaves[index]
        opt_map = update.layout.opt_map
        config = layout.config
        state = opt_map.leaves
        self.states = opt_map.list_state_leaves((index,))
        shape = leaf.record_shape
        f32 = jax.ShapeDtypeStruct((), jnp.float32)
        scalars = [*(state[j] for j in opt_map.shared), f32, f32, f32]
        dtypes_of_arrays = (grad_dtype, jnp.float32, *(state[j].dtype for j in self.states))
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes_of_arrays]

        def rule(arrays: list[Array], scalars: list[Array]) -> list[Array]:
            grad, old, *before = arrays
            *shared, loss, factor, scale = scalars
            # The same order as in the update on the device (mean, loss scale, clipping), so that
            # the numbers are the same.
            grad = grad.astype(jnp.float32)
            grad = grad / summed if summed > 1 else grad
            grad = grad / scale if layout.abstract_state.loss_scale is not None else grad
            grad = grad * factor if config.clip_norm is not None else grad
            (new,), after, _ = update.elementwise((index,), (grad,), (old,), before, shared, loss)
            return [new, *after, *([new.astype(leaf.dtype)] if casts else [])]

        closed = jax.make_jaxpr(rule)(arrays, scalars)
        self.program = flatten(closed.jaxpr, closed.consts)
        self.num_arrays = len(arrays)
        live = self.program.live(self.program.outputs)
        # Scalars are sent as float32, which can hold a step count but not 32 random bits: the
        # kernel makes random bits itself.
        wide = [
            out
            for i in live
            if any(v.aval.dtype == jnp.uint32 for v in i.eqn.outvars)  # pyright: ignore
            for out in i.outs
        ]
        varies = self.program.reached([*self.program.inputs[: self.num_arrays], *wide])
        # The program computes an equation that no element reaches once, instead of once for every
        # element of every layer.
        self.elements = [i for i in live if not varies.isdisjoint(i.outs)]
        self.before = [i for i in live if varies.isdisjoint(i.outs)]
        # The program's scalars that the kernel reads; each is sent once.
        reads = [ref for i in self.elements for ref in i.ins] + list(self.program.outputs)
        self.transfer = tuple(
            dict.fromkeys(ref for ref in reads if isinstance(ref, int) and ref not in varies)
        )
        dtypes = {
            slot: a.dtype
            for slot, a in zip(self.program.inputs[self.num_arrays :], scalars, strict=True)
        }
        shapes: dict[int, Any] = {
            out: v.aval for i in self.before for out, v in zip(i.outs, i.eqn.outvars, strict=True)
        }
        # An array whose elements are all equal is sent as one number, and the kernel broadcasts it.
        self.fills = {
            slot: shapes[slot].shape
            for slot in self.transfer
            if slot in shapes and shapes[slot].shape
        }
        abstract_values = [jax.ShapeDtypeStruct((), jnp.float32) for _ in self.transfer]
        # All scalars are sent as float32, and the kernel casts each back to its dtype in the rule.
        kinds = [shapes[slot].dtype if slot in shapes else dtypes[slot] for slot in self.transfer]

        def kernel(arrays: list[Array], values: list[Array]) -> list[Array]:
            slots: dict[int, Any] = dict(zip(self.program.inputs, arrays, strict=False))
            for slot, value, kind in zip(self.transfer, values, kinds, strict=True):
                value = value.astype(kind)
                if slot in self.fills:
                    slots[slot] = jnp.broadcast_to(value, self.fills[slot])
                else:
                    slots[slot] = value
            evaluate(self.elements, slots)
            return [read(ref, slots) for ref in self.program.outputs]

        self.kernel: jex.ClosedJaxpr = jax.make_jaxpr(kernel)(arrays, abstract_values)

    def scalars(self, values: Sequence[Array]) -> list[Array]:
        """Return the scalars that the program sends to the kernel, f32[] each.

        Args:
          values: the rule's scalars: shared optimizer state, loss, clipping factor, loss scale.
        """
        slots: dict[int, Any] = dict(
            zip(self.program.inputs[self.num_arrays :], values, strict=True)
        )
        evaluate(self.before, slots)
        # An array that depends on no array is a broadcast scalar: its elements are equal.
        return [
            jnp.ravel(slots[slot])[0].astype(jnp.float32)
            if jnp.size(slots[slot])
            else jnp.float32(0)
            for slot in self.transfer
        ]
