"""Parameters of equations that hold jaxprs. Names differ between primitives and versions of jax.

They are read only here, so that a new version of jax requires changes in one place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

JaxprAndConsts = tuple[jex.Jaxpr, Sequence[Any]]
"""A jaxpr, and the values of its constvars."""


def opened(jaxpr: Any) -> JaxprAndConsts:
    """Return a jaxpr and its constants; some parameters hold both, others only a jaxpr."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def called(eqn: jex.JaxprEqn) -> JaxprAndConsts | None:
    """Return the jaxpr that an equation runs on its operands, such as a call or a loop's body.

    Returns:
      The jaxpr and its constants; None if there is no jaxpr, or if it takes other operands.
    """
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        param = eqn.params.get(name)
        if isinstance(param, jex.Jaxpr | jex.ClosedJaxpr):
            jaxpr, consts = opened(param)
            fits = len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.constvars) == len(consts)
            return (jaxpr, consts) if fits else None
    return None


def scan_arity(params: Mapping[str, Any], num_operands: int) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are carried.

    The remaining operands are scanned over.

    Args:
      params: parameters of the scan.
      num_operands: number of operands of the scan.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 groups the operands
    consts, carry, _ = params["ft_in"].update(range(num_operands)).unpack()
    return len(list(consts)), len(list(carry))


def manual_axes(eqn: jex.JaxprEqn) -> frozenset[str]:
    """Return the mesh axes that a `jax.shard_map` maps over.

    The partitioner splits the other axes.
    """
    return frozenset(eqn.params["newly_manual_axes"])
