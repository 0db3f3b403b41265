"""Which gradients an optimizer never uses: those of weights that it freezes (optax.set_to_zero behind a mask or a label).

    unused = {i : no update and no new state of tx.update depends on grads[i]}

Such a gradient may be of any size, or NaN, and the optimizer does the same. So the step leaves it out of the global norm, which
clipping, `grad_norm` and the check for finite gradients read. It is proven, not guessed: an equation of the traced update is
taken to use all that it reads. A product with 0 uses its operand, since 0 x NaN is NaN; and so does a global norm that the
optimizer itself takes before it freezes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from zerojax.jaxprs import flatten


def unused_grads(update: jex.ClosedJaxpr, num_grads: int) -> frozenset[int]:
    """Return the indices of the gradients that no result depends on.

    Args:
      update: the traced `tx.update`, whose first arguments are the gradients.
      num_grads: leaves of these.
    """
    program = flatten(update.jaxpr, update.consts)
    used = {ref for ref in program.outputs if isinstance(ref, int)}
    used.update(slot for i in program.live(program.outputs) for slot in i.reads)
    return frozenset(n for n, slot in enumerate(program.inputs[:num_grads]) if slot not in used)


def used(values: Iterable[Any], indices: Sequence[int], unused: frozenset[int]) -> list[Any]:
    """Return those of some leaves' values whose gradients are used; `indices` say which leaves they are."""
    return [value for value, i in zip(values, indices, strict=True) if i not in unused]
