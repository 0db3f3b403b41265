"""The matrix products in an equation: their FLOPs and dtype, and equations that are one product."""

import itertools
import math
from typing import Any

import jax.extend.core as jex

from zerojax.jaxprs.flat import flatten
from zerojax.jaxprs.primitives import CUSTOM_DERIVATIVES

FUSED_ATTENTION = {
    "dot_product_attention_fwd_wrapper": 1.0,
    "dot_product_attention_bwd_wrapper": 2.5,
}
"""cuDNN attention's FLOPs, as a multiple of the two products of a forward pass.

Backward recomputes the scores.
"""


def find_product(eqn: jex.JaxprEqn) -> jex.JaxprEqn | None:
    """Return the dot_general that an equation consists of, or None.

    The equation is a dot_general itself, or a custom derivative with a single dot_general inside.
    """
    if eqn.primitive.name == "dot_general":
        return eqn
    if eqn.primitive.name not in CUSTOM_DERIVATIVES or len(eqn.invars) != 2:
        return None
    inner: Any = eqn.params["call_jaxpr"].jaxpr
    program = flatten(inner, eqn.params["call_jaxpr"].consts)
    casts = ("name", "convert_element_type")
    computing = [i for i in program.instructions if i.eqn.primitive.name not in casts]
    if len(computing) != 1:
        return None
    product = computing[0]
    is_product = product.eqn.primitive.name == "dot_general" and product.ins == program.inputs
    return product.eqn if is_product else None


def count_flops(eqn: jex.JaxprEqn) -> float:
    """Return the FLOPs of an equation's products, in total over all devices.

    Products of matrices, convolutions and attention count, including products in the equation's
    jaxprs: the largest branch counts for a cond, one iteration for a loop of unknown length, and
    the cost estimate for a Pallas kernel.
    """
    name = eqn.primitive.name
    params = eqn.params
    if name in ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"):
        return _count_product_flops(eqn)
    if name in FUSED_ATTENTION:
        query, key = (_shape(v) for v in eqn.invars[:2])
        length = key[2 if params["layout"] else 1]  # BNTH, else BTNH
        flops = 4.0 * math.prod(query) * length * FUSED_ATTENTION[name]
        return flops * 0.5 if "CAUSAL" in str(params["mask_type"]) else flops
    if name == "pallas_call":
        return float(getattr(params.get("cost_estimate"), "flops", 0.0))
    flops_inside = [sum(map(count_flops, jaxpr.eqns)) for jaxpr in jex.jaxprs_in_params(params)]
    if name == "cond":
        return max(flops_inside)
    num_runs = params["mesh"].size if name == "shard_map" else params.get("length", 1)
    return sum(flops_inside) * num_runs


def _count_product_flops(eqn: jex.JaxprEqn) -> float:
    """Return the FLOPs of a matrix product or a convolution."""
    name = eqn.primitive.name
    lhs, rhs = (_shape(v) for v in eqn.invars[:2])
    if name == "dot_general":
        (lhs_dims, _), _ = eqn.params["dimension_numbers"]
        num_summed = math.prod(lhs[dim] for dim in lhs_dims)
    elif name == "conv_general_dilated":
        # all dims of the kernel but the output's features
        num_features = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        num_summed = math.prod(rhs) // num_features
    else:
        num_summed = lhs[-1]
    return 2.0 * math.prod(_shape(eqn.outvars[-1])) * num_summed


def _shape(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def dtype_of_products(eqn: jex.JaxprEqn) -> Any:
    """Return the dtype of the operands of an equation's products.

    If the equation holds jaxprs, the equation with the most FLOPs in them counts.
    """
    while eqn.primitive.name != "pallas_call":
        jaxprs = jex.jaxprs_in_params(eqn.params)
        inner = list(itertools.chain(*(jaxpr.eqns for jaxpr in jaxprs)))
        largest = max(inner, key=count_flops, default=None)
        if largest is None or not count_flops(largest):
            break
        eqn = largest
    return getattr(eqn.invars[0].aval, "dtype", None)
