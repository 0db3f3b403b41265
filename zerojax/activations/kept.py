"""Choose the values of a traced layer to save from forward to backward; others are recomputed.

Backward reads more values than need to be saved. The saved values are results of equations that are
expensive to repeat: products, convolutions, look-ups, sorts, loops, kernels. Values that
elementwise, layout, cast and reduction equations derive from them are recomputed, including random
masks. In units of s b h bytes (s tokens of b sequences of width h in 16 bits, a heads), a GPT's
layer saves

    save         20 + 4 a s / h    the layer's input 2, qkv 6, scores in float32 4 a s / h,
                                   attention's output 2, its projection 2, the hidden layer 8
    selective    20
    remat        2

where Korthikanti et al. (arXiv:2205.05198, table 2) count 34 + 5 a s / h, 34 and 2, because they
save every value that an operator reads.

    save         the results of all expensive equations
    selective    the same without attention's inner part, between the product of queries and keys
                 and the product with the values
    remat        only the layer's input

Values computed from parameters alone are never saved, because backward has the gathered layer.
ZeRO-3's bound on memory therefore holds in every mode. Attention is recognized by its form: two
products of data with data that have batch dims, one feeding the other.
"""

import collections
import itertools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.activations.sequence_ops import is_gather, is_scatter
from zerojax.jaxprs import (
    CHEAP,
    CUSTOM_DERIVATIVES,
    INLINED,
    POINTWISE,
    REDUCTIONS,
    FlatJaxpr,
    Instruction,
)

_ALSO_CHEAP = frozenset(
    {
        "stop_gradient",
        "argmax",
        "argmin",
        "sharding_constraint",
        "random_wrap",
        "random_unwrap",
        "random_fold_in",
        "random_split",
        "random_seed",
        "random_bits",
        "random_clone",
        "threefry2x32",
        "rng_bit_generator",
        "real",
        "imag",
        "complex",
        "conj",
        "population_count",
        "clz",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
        "atan2",
        "asinh",
        "acosh",
        "atanh",
        "lgamma",
        "digamma",
        "reshard",
        "mesh_cast",
        "to_edtype",
        "from_edtype",
        "reduce_xor",
        "platform_index",
    }
)
_REPEATED = CHEAP | POINTWISE | REDUCTIONS | _ALSO_CHEAP
"""Equations whose results are recomputed from their operands."""


def is_cheap(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation's result is better recomputed than saved.

    A custom derivative counts as cheap if all equations inside of it are.
    """
    if eqn.primitive.name in _REPEATED:
        return True
    enters = eqn.primitive.name.startswith("custom_") or eqn.primitive.name in INLINED
    inner = list(jex.jaxprs_in_params(eqn.params)) if enters else []
    return bool(inner) and all(is_cheap(e) for jaxpr in inner for e in jaxpr.eqns)


def depending(program: FlatJaxpr, data: Iterable[int]) -> set[int]:
    """Return the slots that depend on data, including the slots of `data` themselves.

    A slice of a stack of parameters is a parameter, even at an index that is data: choosing a layer
    by data does not make it a value to save. Rows that a look-up takes from a table are
    activations.
    """
    of_data = set(data)
    for i in program.instructions:
        reads = i.ins[:1] if i.eqn.primitive.name == "dynamic_slice" else i.ins
        if any(isinstance(ref, int) and ref in of_data for ref in reads):
            of_data.update(i.outs)
    return of_data


def candidates(program: FlatJaxpr, of_data: set[int]) -> dict[int, Any]:
    """Return the avals of the slots in `of_data` that are expensive to recompute, by slot."""
    avals = dict[int, Any]()
    for i in program.instructions:
        if is_cheap(i.eqn):
            continue
        for out, v in zip(i.outs, i.eqn.outvars, strict=True):
            if out in of_data:
                avals[out] = v.aval
    # If a product's result is scattered, the scattered value is saved instead.
    readers = collections.Counter(slot for i in program.instructions for slot in i.reads)
    readers.update(ref for ref in program.outputs if isinstance(ref, int))
    for i in program.instructions:
        if is_scatter(i.eqn) and i.reads and i.reads[0] in avals and readers[i.reads[0]] == 1:
            del avals[i.reads[0]]
            avals[i.outs[0]] = i.eqn.outvars[0].aval
    # Random keys are recomputed, since they are functions of (step, layer).
    return {
        s: a
        for s, a in avals.items()
        if hasattr(a, "dtype") and not jnp.issubdtype(a.dtype, jax.dtypes.extended)
    }


def describe(eqn: jex.JaxprEqn) -> str:
    """Return a short description of an equation, such as `dot_general f32[8,16] f32[16,32]`."""
    inputs = eqn.invars
    if eqn.primitive.name in CUSTOM_DERIVATIVES:
        inputs = inputs[eqn.params.get("num_consts", 0) :]  # arguments, without constants
    operands = [v.aval.str_short(short_dtypes=True) for v in inputs]  # pyright: ignore[reportAttributeAccessIssue]
    # Only the scopes that the model named, without those of transformations and without the
    # placeholder for an empty scope (`zerojax.jaxprs.bind`).
    transformations = r"\b(jvp|transpose|vmap|checkpoint|rematted_computation)\(?"
    scopes = re.sub(transformations, "", str(eqn.source_info.name_stack)).replace(")", "")
    scope = "/".join(name for name in scopes.split("/") if name and name != "param")
    if is_gather(eqn):
        name = "gather_sequence"
    elif is_scatter(eqn):
        name = "scatter_sequence"
    else:
        name = eqn.primitive.name
    words = [name, *operands]
    if scope:
        words.insert(0, scope)
    return " ".join(words)


def attention_inner(program: FlatJaxpr, activations: Iterable[int]) -> frozenset[int]:
    """Return the slots between the two products of attention.

    These are the scores, the weights, and the masks that only they read.

    Args:
      program: program of a layer.
      activations: slots of the layer's input.
    """
    data = depending(program, activations)

    def is_product_of_data(i: Instruction) -> bool:
        """Return whether an instruction is a batched product of data with data."""
        if i.eqn.primitive.name != "dot_general":
            return False
        if not all(isinstance(ref, int) and ref in data for ref in i.ins):
            return False
        # dimension_numbers is (contracting dims, batch dims), each of them (lhs, rhs).
        return bool(i.eqn.params["dimension_numbers"][1][0])

    products = [i for i in program.instructions if is_product_of_data(i)]
    inner: set[int] = set()
    for first in products:
        after = program.reached(first.outs)
        for second in products:
            if second is not first and any(ref in after for ref in second.ins):
                inner |= _between(program, second, after, data)
    return frozenset(inner)


def _between(program: FlatJaxpr, second: Instruction, after: set[int], data: set[int]) -> set[int]:
    """Return the slots between two products, and the values for them that do not depend on data.

    Args:
      program: program of the block.
      second: the second product.
      after: slots that depend on the first product.
      data: slots that depend on data.
    """

    def is_inner(slot: int) -> bool:
        return slot in after or slot not in data

    # Walk back from the second product to the first, and through everything that reads no data,
    # such as dropout masks.
    live = program.live(second.ins, is_followed=is_inner)
    reads = itertools.chain(*(i.reads for i in (*live, second)))
    return set(filter(is_inner, reads))
