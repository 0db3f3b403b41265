"""Kinds of equations, by the names of their primitives: cheap, linear, elementwise, calls.

A primitive that is in no set is assumed to have none of these properties.
"""

PRODUCTS = frozenset(
    {
        "dot_general",
        "ragged_dot",
        "ragged_dot_general",
        "conv_general_dilated",
        "gather",
        "dynamic_slice",
    }
)
"""Equations that are too costly to repeat in backward, or that look up data."""
LINEAR = frozenset(
    {
        "add",
        "sub",
        "neg",
        "convert_element_type",
        "transpose",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "copy",
        "reduce_precision",
        "name",
        "slice",
        "concatenate",
        "split",
        "reduce_sum",
        "add_any",
    }
)
"""Equations whose derivative does not need their operands."""
ELEMENTWISE = frozenset(
    {
        "convert_element_type",
        "copy",
        "name",
        "reduce_precision",
        "stop_gradient",
        "add",
        "sub",
        "neg",
        "mul",
        "div",
        "max",
        "min",
        "exp",
        "exp2",
        "log",
        "log1p",
        "expm1",
        "tanh",
        "logistic",
        "rsqrt",
        "sqrt",
        "cbrt",
        "square",
        "integer_pow",
        "pow",
        "abs",
        "sign",
        "erf",
        "erf_inv",
        "erfc",
        "sin",
        "cos",
        "tan",
        "floor",
        "ceil",
        "round",
        "clamp",
    }
)
"""Equations that act on each element separately, so on a shard as on the full array."""
CHEAP = (
    LINEAR
    | ELEMENTWISE
    | frozenset(
        {
            "select_n",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "and",
            "or",
            "not",
            "xor",
            "rev",
            "pad",
            "iota",
            "reduce_max",
            "reduce_min",
            "reduce_and",
            "reduce_or",
            "is_finite",
            "rem",
            "nextafter",
        }
    )
)
"""Elementwise, layout and reduction equations: cheap to repeat."""
REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
)
POINTWISE = ELEMENTWISE | {
    "select_n",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "not",
    "xor",
    "is_finite",
    "rem",
    "nextafter",
    "add_any",
    "bitcast_convert_type",
    "shift_left",
    "shift_right_logical",
    "shift_right_arithmetic",
}
"""Equations whose result at an index reads its operands only at that index.

A bitcast does so if it keeps the shape.
"""
FILLS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
"""Equations that turn an array of equal elements into another shape with the same elements."""
INLINED = frozenset({"jit", "closed_call", "eval_jaxpr"})
"""Equations that call a jaxpr once, unchanged.

From jax 0.11 on, "eval_jaxpr" replaces "closed_call".
"""
REMAT = "remat2"
"""The equation that `jax.checkpoint` makes."""
CUSTOM_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Equations with a custom derivative, made by `jax.custom_jvp` and `jax.custom_vjp`."""
