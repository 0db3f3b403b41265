"""Equations with control flow: the jaxprs in them, and how to replace these jaxprs.

An interpreter that enters an equation needs to know which operands each of its jaxprs takes, what a
loop carries, and how to apply the equation again around other functions. This is the same for all
interpreters:

    list_regions(eqn)                  the jaxprs, each with the operands it takes: a `Region`
    rebind(eqn, functions, values)   the equation with functions in place of its regions

    scan         region(*consts, *carry, *slices) -> (*carry, *slices of the stacked results)
    cond         region(*operands without the index), one region for each branch
    remat        region(*operands); already differentiated (`rebind_remat`), or not yet
                 (`checkpointed`)
    shard_map    region(*shards)
    calls        region(*operands): jit, and the forward function of a custom derivative

An interpreter computes values: it rewrites the regions and binds them again. An analysis
(`zerojax.jaxprs.analysis`) computes facts: it runs the regions and joins their facts.
"""

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.extend.core as jex

from zerojax.jaxprs.flat import FlatJaxpr, Ref, bind, flatten, is_among
from zerojax.jaxprs.parameters import called, manual_axes, opened, scan_arity
from zerojax.jaxprs.primitives import REMAT

T = TypeVar("T")
Function = Callable[[Sequence[Any]], Sequence[Any]]
"""Function that replaces a region: from the list of its operands to the list of its results."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A jaxpr inside an equation.

    Attributes:
      jaxpr: the jaxpr; its results are the equation's results, in order.
      consts: values of the jaxpr's constvars.
      first: position of the first operand that the jaxpr takes: 1 for a branch, after the index.
      carried: positions of a loop's carry among the jaxpr's operands. The first results are the
        next carry; a loop's other results are stacked.
      is_loop: whether the jaxpr is the body of a scan.
    """

    jaxpr: jex.Jaxpr
    consts: Sequence[Any]
    first: int = 0
    carried: range = range(0)
    is_loop: bool = False

    def flatten(self, is_opaque: Callable[[jex.JaxprEqn], bool] = lambda eqn: False) -> FlatJaxpr:
        """Return the region as a flat program; see `zerojax.jaxprs.flatten`."""
        return flatten(self.jaxpr, self.consts, is_opaque)

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split a scan's operands into constants, the carry, and the scanned operands."""
        start = self.carried.start
        stop = self.carried.stop
        return list(operands[:start]), list(operands[start:stop]), list(operands[stop:])

    def inputs_among(self, program: FlatJaxpr, ins: Sequence[Ref], slots: Set[int]) -> set[int]:
        """Return the inputs of the region's program whose operands are among `slots`.

        Args:
          program: the region, flattened.
          ins: operands of the equation.
          slots: slots of the program that contains the equation.
        """
        pairs = zip(program.inputs, ins[self.first :], strict=True)
        return {slot for slot, ref in pairs if is_among(ref, slots)}

    def reached(self, program: FlatJaxpr, ins: Sequence[Ref], outside: Set[int]) -> set[int]:
        """Return the slots inside that depend on slots outside, in any iteration of a loop.

        Args:
          program: the region, flattened.
          ins: operands of the equation.
          outside: slots of the program that contains the equation.
        """
        starts = self.inputs_among(program, ins, outside)
        while True:
            reached = program.reached(starts, by_result=True)
            pairs = zip(self.carried, program.outputs, strict=False)
            reached_carry = {program.inputs[n] for n, ref in pairs if is_among(ref, reached)}
            if reached_carry <= starts:
                return reached
            starts = starts | reached_carry


def list_regions(eqn: jex.JaxprEqn) -> list[Region]:
    """Return the jaxprs that an equation runs on its operands; none for a `while` or a kernel.

    Call it only for equations that the interpreter enters (`zerojax.jaxprs.ENTERED`): the function
    of a `reduce` also takes as many operands as the equation.
    """
    if eqn.primitive.name == "cond":
        return [Region(*opened(branch), first=1) for branch in eqn.params["branches"]]
    inner = called(eqn)
    if inner is None:
        return []
    if eqn.primitive.name != "scan":
        return [Region(*inner)]
    num_consts, num_carry = scan_arity(eqn.params, len(eqn.invars))
    return [Region(*inner, carried=range(num_consts, num_consts + num_carry), is_loop=True)]


def rebind(eqn: jex.JaxprEqn, functions: Sequence[Function], values: Sequence[Any]) -> list[Any]:
    """Apply a scan, cond, `jax.shard_map` or rematerialized region with its regions replaced.

    Args:
      eqn: the equation.
      functions: replacements of the regions, in the order of `list_regions(eqn)`.
      values: operands of the equation.
    """
    name = eqn.primitive.name
    if name == "cond":
        return rebind_cond(eqn, functions, values)
    (function,) = functions
    rebinds = {"scan": rebind_scan, REMAT: rebind_remat, "shard_map": rebind_shard_map}
    return rebinds[name](eqn, function, values)


def rebind_scan(
    eqn: jex.JaxprEqn,
    function: Function,
    values: Sequence[Any],
    around: Callable[..., Any] = lambda body: body,
) -> list[Any]:
    """Apply a scan with another body, which closes over the constants.

    Args:
      eqn: the scan.
      function: function from constants, carry and slices to the carry and the stacked results.
      values: operands of the scan. Constants may be anything.
      around: transformation of the body, such as `jax.checkpoint`.
    """
    (region,) = list_regions(eqn)
    consts, carry, xs = region.split(values)

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = list(function([*consts, *carry, *slices]))
        return outs[: len(carry)], outs[len(carry) :]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(around(body), carry, xs, **options)
    return [*carry, *ys]


def rebind_cond(
    eqn: jex.JaxprEqn,
    functions: Sequence[Function],
    values: Sequence[Any],
) -> list[Any]:
    """Apply a cond with other functions in place of its branches.

    A `jax.lax.platform_dependent` stays a platform_dependent: a platform compiles only its own
    branch, and may lack features that another branch needs.

    Args:
      eqn: the cond.
      functions: replacements of the branches.
      values: operands of the cond; the index comes first.
    """
    index, *operands = values
    branches = [lambda *operands, function=function: function(operands) for function in functions]
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return list(jax.lax.switch(index, branches, *operands))
    by_platform = {}
    for names, branch in zip(platforms, branches, strict=True):
        by_platform.update(dict.fromkeys(names or ("default",), branch))
    return list(jax.lax.platform_dependent(*operands, **by_platform))


def rebind_remat(eqn: jex.JaxprEqn, function: Function, values: Sequence[Any]) -> list[Any]:
    """Apply an already differentiated rematerialized region with another function in it.

    It stays the same equation instead of becoming a new region, because its barriers are already
    placed.

    Args:
      eqn: the equation.
      function: replacement of the region.
      values: operands of the equation.
    """
    closed = jax.make_jaxpr(lambda *values: function(values))(*values)
    inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    jaxpr = closed.jaxpr.replace(constvars=[], invars=inputs)
    return bind(eqn.replace(params={**eqn.params, "jaxpr": jaxpr}), [*closed.consts, *values])


def rebind_shard_map(
    eqn: jex.JaxprEqn,
    function: Function,
    values: Sequence[Any],
    out_specs: Any = None,
) -> list[Any]:
    """Apply a `jax.shard_map` with another function, and other specs of its results if given.

    Args:
      eqn: the shard_map.
      function: replacement of its function, on shards.
      values: operands of the shard_map.
      out_specs: specs of the results; None keeps the equation's specs.
    """
    params = eqn.params
    mapped = jax.shard_map(
        lambda *shards: tuple(function(shards)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"] if out_specs is None else out_specs,
        check_vma=params["check_vma"],
        axis_names=set(manual_axes(eqn)),
    )
    return list(mapped(*values))


def checkpointed(
    eqn: jex.JaxprEqn,
    function: Callable[..., Any],
    is_never_saved: Callable[[str, dict[str, Any]], bool],
) -> Callable[..., Any]:
    """Return a function under `jax.checkpoint`, like a region that is not differentiated yet.

    Args:
      eqn: the region.
      function: replacement of the region's function.
      is_never_saved: function of an equation's name and parameters that returns whether the
        region's policy must not save its result, whatever the policy says.
    """
    policy = eqn.params["policy"]
    prevent_cse = eqn.params["prevent_cse"]
    if policy is None:
        return jax.checkpoint(function, prevent_cse=prevent_cse)

    def narrowed_policy(primitive: Any, *args: Any, **params: Any) -> Any:
        if is_never_saved(primitive.name, params):
            return False
        return policy(primitive, *args, **params)

    return jax.checkpoint(function, policy=narrowed_policy, prevent_cse=prevent_cse)
