"""Which equations each interpreter of traced programs enters, and which it treats as a unit."""

from collections.abc import Mapping
from types import MappingProxyType

from zerojax.jaxprs.primitives import CUSTOM_DERIVATIVES, INLINED, REMAT

ENTERED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "flow": frozenset({*INLINED, *CUSTOM_DERIVATIVES, REMAT, "scan", "cond", "shard_map"}),
        "traffic": frozenset({*INLINED, *CUSTOM_DERIVATIVES, REMAT, "scan", "cond", "shard_map"}),
        "float32_grads": frozenset({*INLINED, REMAT, "scan", "cond", "shard_map"}),
        "unreduced_grads": frozenset({*INLINED, REMAT, "scan", "cond", "shard_map"}),
        "gather_on_use": frozenset({*INLINED, REMAT, "scan", "cond"}),
        "keep_products": frozenset({*INLINED, "scan", "cond"}),
        "sequence_parallel": frozenset({*INLINED, REMAT}),
    }
)
"""The primitives whose jaxprs an interpreter enters, by the name of the interpreter.

    interpreter        where                      jit  custom_*  remat  scan  cond  while  shard_map
    flow               activations/flow            x      x        x      x     x     -        x
    traffic            activations/traffic         x      x        x      x     x     -        x
    float32_grads      grads/float32_grads         x      -        x      x     x     -        x
    unreduced_grads    grads/unreduced_rewriter    x      -        x      x     x     -        (1)
    gather_on_use      gather/on_use               x     (2)       x      x     x     -        -
    keep_products      activations/recompute       x     (3)      (3)     x     x     -        -
    sequence_parallel  activations/sequence_walk   x     (4)       x      -     -     -        -

`jit` is inlined when a program is flattened, except for a call that must stay one equation. An
equation that is not entered is left unchanged: an analysis knows nothing about its results, and a
rewriter uses them in the form that the equation makes. Derivatives (float32_grads,
unreduced_grads) are already traced, so the rules of custom derivatives are ordinary equations.

1. Only its reductions: the final sums over the batch's axes are left out.
2. One unit: its operands are gathered, and its derivative rule is kept.
3. Taken apart (`zerojax.activations.split_vjp`): its forward runs once, and its own choice of
   residuals is kept.
4. Only if it is a single product (`zerojax.jaxprs.find_product`).
"""
