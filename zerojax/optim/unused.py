"""Which gradients an optimizer never uses: those of weights that it freezes (optax.set_to_zero
behind a mask or a label).

    unused = {i : no update depends on grads[i], in this step or by way of the optimizer state in a
    later one}

Such a gradient may be of any size, or NaN, and the weights are the same. So the step leaves it out
of the global norm, which clipping, `grad_norm` and the check for finite gradients read. It is
proven, not guessed: an equation of the traced update is taken to use all that it reads. A product
with 0 uses its operand, since 0 x NaN is NaN; and so does a global norm that the optimizer itself
takes before it freezes. Moments of a gradient whose update is then set to zero feed moments alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from zerojax.jaxprs import flatten


def unused_grads(update: jex.ClosedJaxpr, num_grads: int) -> frozenset[int]:
    """Return the indices of the gradients that no update ever depends on.

    Args:
      update: the traced `tx.update` of (grads, state, ..) to (updates, state), each flattened.
      num_grads: leaves of the gradients, and of the updates.
    """
    program = flatten(update.jaxpr, update.consts)
    after = program.outputs[num_grads:]
    state = program.inputs[num_grads : num_grads + len(after)]
    wanted, is_known = list(program.outputs[:num_grads]), [False] * len(state)
    while True:
        used = {ref for ref in wanted if isinstance(ref, int)}
        used.update(slot for i in program.live(wanted) for slot in i.reads)
        # What is used of the state was made by the step before.
        found = [n for n, slot in enumerate(state) if slot in used and not is_known[n]]
        if not found:
            return frozenset(
                n for n, slot in enumerate(program.inputs[:num_grads]) if slot not in used
            )
        for n in found:
            is_known[n] = True
            wanted.append(after[n])


def used(values: Iterable[Any], indices: Sequence[int], unused: frozenset[int]) -> list[Any]:
    """Return those of some leaves' values whose gradients are used; `indices` say which leaves they
    are.
    """
    return [value for value, i in zip(values, indices, strict=True) if i not in unused]
