"""Derivatives rewritten after JAX traced them.

Gradients are summed in float32, or kept as each device's own sums, and other work overlaps the
products.
"""

from zerojax.grads.beside import Turn as Turn
from zerojax.grads.beside import beside as beside
from zerojax.grads.float32_grads import float32_grads as float32_grads
from zerojax.grads.rewriter import Derivative as Derivative
from zerojax.grads.row_rule import unreduced_sharding as unreduced_sharding
from zerojax.grads.unreduced import ReducedEarly as ReducedEarly
from zerojax.grads.unreduced import reduced as reduced
from zerojax.grads.unreduced import unreduced_grads as unreduced_grads
