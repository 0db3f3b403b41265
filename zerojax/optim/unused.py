"""Find gradients that an optimizer never uses, because it freezes their weights.

It freezes them with optax.set_to_zero behind a mask or a label.

    unused = {i : no update depends on grads[i], in this step or through the optimizer state in a
              later step}

Such a gradient may have any size, or be NaN, without changing the weights. So the step leaves it
out of the global norm, which clipping, `grad_norm` and the check for finite gradients read. The
property is proven from the trace: an equation of the traced update is assumed to use all that it
reads. A product with 0 uses its operand, because 0 x NaN is NaN. A global norm that the optimizer
itself computes before it freezes also uses the gradient. The moments of a gradient whose update is
then set to zero feed only moments.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from zerojax.jaxprs import flatten


def unused_grads(update: jex.ClosedJaxpr, num_grads: int) -> frozenset[int]:
    """Return the indices of the gradients that no update ever depends on.

    Args:
      update: the traced `tx.update` of (grads, state, ..) to (updates, state), each flattened.
      num_grads: number of leaves of the gradients, and of the updates.
    """
    program = flatten(update.jaxpr, update.consts)
    after = program.outputs[num_grads:]
    state = program.inputs[num_grads : num_grads + len(after)]
    wanted = list(program.outputs[:num_grads])
    is_known = [False] * len(state)
    while True:
        used = {ref for ref in wanted if isinstance(ref, int)}
        for i in program.live(wanted):
            used.update(i.reads)
        # A used state leaf was computed by the previous step, so its inputs are used as well.
        used_states = [n for n, slot in enumerate(state) if slot in used and not is_known[n]]
        if not used_states:
            grads = program.inputs[:num_grads]
            return frozenset(n for n, slot in enumerate(grads) if slot not in used)
        for n in used_states:
            is_known[n] = True
            wanted.append(after[n])


def used(values: Iterable[Any], indices: Sequence[int], unused: frozenset[int]) -> list[Any]:
    """Return the values of the leaves whose gradients are used.

    Args:
      values: one value for each leaf.
      indices: the index of each leaf.
      unused: indices of the leaves whose gradients are never used.
    """
    return [value for value, i in zip(values, indices, strict=True) if i not in unused]
