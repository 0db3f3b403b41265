"""Find the order in which a traced program's callbacks ask for records, by computing their indices.

A program computes the index of a record from the counters of its loops. No index depends on data.
The indices are therefore computed here in the same way, and everything else is left out:

    while, scan     run all their iterations: bounds are known in the same way as indices
    cond            run the branch that will be taken, if that is known
    an equation     evaluated if all of its operands are known and an index or a bound depends on it

The result is the order of layers for each site (`host_offload.calls`). A callback in a loop or
branch that depends on data has no known order, and waits for its index. A warning names it, unless
it is in a branch: a forward that skips experts has such branches.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from host_offload.calls import CallbackSite, find_site
from zerojax.jaxprs import called, list_regions

logger = logging.getLogger("zerojax")
_MOST_TRIPS = 1 << 24
_MOST_ENTRIES = 1 << 20  # most entries of a constant array of indices
_NEVER = "is_never"  # `zerojax.state.ordering`


@dataclasses.dataclass(frozen=True)
class _Concatenation:
    """A concatenation whose operands are not all known."""

    values: tuple[Any, ...]


def order_calls(closed: jex.ClosedJaxpr) -> list[CallbackSite]:
    """Compute the order of calls of every site in a program, and store it in the sites.

    Args:
      closed: traced program.

    Returns:
      The sites.
    """
    evaluator = IndexEvaluator()
    evaluator.run(closed.jaxpr, closed.consts, [None] * len(closed.jaxpr.invars), frozenset())
    orders = evaluator.layers
    for site, layers in orders.items():
        site.order = layers
    for calls in {site.calls for site in orders}:
        call_orders = [layers for site, layers in orders.items() if site.calls is calls]
        calls.reserve(sum(len(layers or ()) for layers in call_orders))
    unknown = [site for site, layers in orders.items() if layers is None]
    waiting = sorted({site.name for site in unknown if site not in evaluator.skipped})
    if waiting:
        logger.warning(
            "callbacks whose order depends on data wait for the device at each call: %s",
            ", ".join(waiting),
        )
    return list(orders)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """The part of a jaxpr that has to be evaluated.

    Attributes:
      eqns: equations in order, each with the positions of its needed results.
      inputs: positions of the needed arguments.
    """

    eqns: tuple[tuple[jex.JaxprEqn, frozenset[int]], ...]
    inputs: frozenset[int]


class IndexEvaluator:
    """Evaluate the indices of a traced program.

    Attributes:
      layers: for each site, the layer of each call in order; None if they are unknown.
      skipped: the sites in branches that depend on data.
    """

    def __init__(self) -> None:
        """Start without sites."""
        self.layers: dict[CallbackSite, list[int] | None] = {}
        self.skipped: set[CallbackSite] = set()
        self._slices: dict[tuple[int, frozenset[int]], _Slice] = {}
        self._has_sites: dict[int, bool] = {}
        self._kept: list[Any] = []  # keeps the jaxprs alive whose ids are keys above

    def run(
        self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], wanted: frozenset[int]
    ) -> list[Any]:
        """Evaluate a jaxpr; return its results, with None for unwanted and unknown ones.

        Args:
          jaxpr: jaxpr to evaluate.
          consts: values of its constants.
          args: values of its arguments; None for unknown ones.
          wanted: positions of the wanted results.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_small, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Any:
            return _small(atom.val) if isinstance(atom, jex.Literal) else env.get(atom)

        for eqn, outs in self._slice(jaxpr, wanted).eqns:
            results = self._eqn(eqn, [value(v) for v in eqn.invars], outs)
            env.update(zip(eqn.outvars, results, strict=True))
        return [value(v) if i in wanted else None for i, v in enumerate(jaxpr.outvars)]

    # --- needed values ----------------------------------------------------------------------------

    def _slice(self, jaxpr: jex.Jaxpr, wanted: frozenset[int]) -> _Slice:
        """Return the part of a jaxpr that its sites and its results at `wanted` depend on."""
        key = (id(jaxpr), wanted)
        if key not in self._slices:
            self._kept.append(jaxpr)
            results = [v for i, v in enumerate(jaxpr.outvars) if i in wanted]
            needed = {v for v in results if not isinstance(v, jex.Literal)}
            eqns = []
            for eqn in reversed(jaxpr.eqns):
                outs = frozenset(i for i, v in enumerate(eqn.outvars) if v in needed)
                if outs or self._calls(eqn):
                    eqns.append((eqn, outs))
                    operands = [eqn.invars[i] for i in self._needs(eqn, outs)]
                    needed.update(v for v in operands if not isinstance(v, jex.Literal))
            inputs = frozenset(i for i, v in enumerate(jaxpr.invars) if v in needed)
            self._slices[key] = _Slice(tuple(reversed(eqns)), inputs)
        return self._slices[key]

    def _calls(self, eqn: jex.JaxprEqn) -> bool:
        """Return whether an equation is a site or contains one."""
        if eqn.primitive.name == "buffer_callback":
            return find_site(eqn.params["callback"]) is not None
        return any(self._calls_in(jaxpr) for jaxpr in jex.jaxprs_in_params(eqn.params))

    def _calls_in(self, jaxpr: jex.Jaxpr) -> bool:
        if id(jaxpr) not in self._has_sites:
            self._kept.append(jaxpr)
            self._has_sites[id(jaxpr)] = any(self._calls(eqn) for eqn in jaxpr.eqns)
        return self._has_sites[id(jaxpr)]

    def _needs(self, eqn: jex.JaxprEqn, outs: frozenset[int]) -> frozenset[int]:
        """Return the positions of the operands that an equation's sites and `outs` need."""
        name = eqn.primitive.name
        params = eqn.params
        if name == "buffer_callback":
            return frozenset({0})
        if name == "optimization_barrier":
            return outs
        if name == "while":
            num_cond = params["cond_nconsts"]
            num_body = params["body_nconsts"]
            of_cond = self._slice(params["cond_jaxpr"].jaxpr, frozenset({0})).inputs
            carried = outs | {i - num_cond for i in of_cond if i >= num_cond}
            carried, of_body = self._carried(params["body_jaxpr"].jaxpr, carried, num_body)
            return (
                frozenset(i for i in of_cond if i < num_cond)
                | frozenset(num_cond + i for i in of_body if i < num_body)
                | frozenset(num_cond + num_body + i for i in carried)
            )
        if name == "scan":
            (body,) = list_regions(eqn)
            places = body.carried
            carried, of_body = self._carried(body.jaxpr, outs, places.start, len(places))
            around = frozenset(places[i] for i in carried if i < len(places))
            return frozenset(i for i in of_body if i not in places) | around
        if name == "cond":
            needed = {0}
            for branch in list_regions(eqn):
                needed.update(branch.first + i for i in self._slice(branch.jaxpr, outs).inputs)
            return frozenset(needed)
        inner = called(eqn)
        if inner is not None:
            return self._slice(inner[0], outs).inputs
        return frozenset(range(len(eqn.invars)))

    def _carried(
        self, body: jex.Jaxpr, wanted: frozenset[int], num_consts: int, num_carry: int | None = None
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return the results of a loop's body that are needed in the end, and their arguments."""
        last = len(body.invars) if num_carry is None else num_consts + num_carry
        while True:
            inputs = self._slice(body, wanted).inputs
            more = wanted | {i - num_consts for i in inputs if num_consts <= i < last}
            if more == wanted:
                return wanted, inputs
            wanted = more

    # --- evaluation -------------------------------------------------------------------------------

    def _eqn(self, eqn: jex.JaxprEqn, ins: list[Any], outs: frozenset[int]) -> list[Any]:
        """Return the results of an equation; None for unknown ones."""
        name = eqn.primitive.name
        nothing = [None] * len(eqn.outvars)
        if name == "buffer_callback":
            self._record_call(eqn, ins[0])
            return nothing
        if name == "optimization_barrier":
            return ins
        if name == "while":
            return self._while(eqn, ins, outs)
        if name == "scan":
            return self._scan(eqn, ins, outs)
        if name == "cond":
            branches = list_regions(eqn)
            if not _is_known(ins[0]):
                for branch in branches:
                    self.skipped.update(self._give_up(branch.jaxpr))
                return nothing
            branch = branches[min(max(int(ins[0]), 0), len(branches) - 1)]
            return self.run(branch.jaxpr, branch.consts, ins[1:], outs)
        if eqn.params.get("name") == _NEVER:
            return [np.zeros((), np.bool_)]
        inner = called(eqn)
        if inner is not None:
            if name == "shard_map":
                # A split operand has different values on each device.
                ins = list(ins)
                for i, spec in enumerate(eqn.params["in_specs"]):
                    if any(axes is not None for axes in spec):
                        ins[i] = None
                self.run(*inner, ins, frozenset())
                return nothing
            return self.run(*inner, ins, outs)
        if name == "concatenate" and not all(map(_is_known, ins)):
            return [_Concatenation(tuple(ins))]
        rule = _RULES.get(name)
        if rule is None or not all(map(_is_known, ins)):
            for jaxpr in jex.jaxprs_in_params(eqn.params):
                self._give_up(jaxpr)
            return nothing
        with np.errstate(all="ignore"):
            results = rule(eqn.params, *ins)
        return results if eqn.primitive.multiple_results else [np.asarray(results, _dtype(eqn))]

    def _record_call(self, eqn: jex.JaxprEqn, operand: Any) -> None:
        """Record the layer of a call, which is the second value of its first operand."""
        site = find_site(eqn.params["callback"])
        assert site is not None
        layers = self.layers.setdefault(site, [])
        if isinstance(operand, _Concatenation):
            layer = operand.values[1]
        else:
            layer = None if operand is None else operand[1:2]
        if layer is None or isinstance(layer, _Concatenation):
            self.layers[site] = None
        elif layers is not None:
            layers.append(int(layer[0]))

    def _give_up(self, jaxpr: jex.Jaxpr) -> set[CallbackSite]:
        """Record that the order of all sites in a jaxpr is unknown; return these sites."""
        sites = set[CallbackSite]()
        for eqn in jaxpr.eqns:
            if not self._calls(eqn):
                continue
            if eqn.primitive.name == "buffer_callback":
                site = find_site(eqn.params["callback"])
                assert site is not None
                self.layers[site] = None
                sites.add(site)
            for inner in jex.jaxprs_in_params(eqn.params):
                sites |= self._give_up(inner)
        return sites

    def _while(self, eqn: jex.JaxprEqn, ins: list[Any], outs: frozenset[int]) -> list[Any]:
        params = eqn.params
        num_cond = params["cond_nconsts"]
        num_body = params["body_nconsts"]
        cond = params["cond_jaxpr"]
        body = params["body_jaxpr"]
        of_cond = ins[:num_cond]
        of_body = ins[num_cond : num_cond + num_body]
        carry = ins[num_cond + num_body :]
        needed = frozenset(
            i - num_cond for i in self._slice(cond.jaxpr, frozenset({0})).inputs if i >= num_cond
        )
        wanted, _ = self._carried(body.jaxpr, outs | needed, num_body)
        for _ in range(_MOST_TRIPS):
            (go,) = self.run(cond.jaxpr, cond.consts, [*of_cond, *carry], frozenset({0}))
            if not _is_known(go):
                break
            if not go:
                return carry
            carry = self.run(body.jaxpr, body.consts, [*of_body, *carry], wanted)
        self._give_up(body.jaxpr)
        return [None] * len(eqn.outvars)

    def _scan(self, eqn: jex.JaxprEqn, ins: list[Any], outs: frozenset[int]) -> list[Any]:
        params = eqn.params
        (body,) = list_regions(eqn)
        consts, carry, xs = body.split(ins)
        wanted, _ = self._carried(body.jaxpr, outs, len(consts), len(carry))
        trips = range(params["length"])
        for t in reversed(trips) if params["reverse"] else trips:
            slices = [x[t] if _is_known(x) else None for x in xs]
            operands = [*consts, *carry, *slices]
            carry = self.run(body.jaxpr, body.consts, operands, wanted)[: len(carry)]
        # No index is made from stacked results.
        return [*carry, *[None] * (len(eqn.outvars) - len(carry))]


def _is_known(value: Any) -> bool:
    return value is not None and not isinstance(value, _Concatenation)


def _dtype(eqn: jex.JaxprEqn) -> Any:
    aval: Any = eqn.outvars[0].aval
    return aval.dtype


def _small(value: Any) -> np.ndarray | None:
    """Return a constant if it may be part of an index, else None."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        value = np.asarray(value)
        dtype = value.dtype
    is_integer = isinstance(dtype, np.dtype) and dtype.kind in "iub"
    if not is_integer or math.prod(np.shape(value)) > _MOST_ENTRIES:
        return None
    return np.asarray(value)


def _dynamic_slice(params: Mapping[str, Any], array: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    slices = []
    for dim, (start, size) in enumerate(zip(starts, params["slice_sizes"], strict=True)):
        first = min(max(int(start), 0), array.shape[dim] - size)
        slices.append(slice(first, first + size))
    return array[tuple(slices)]


def _slice(params: Mapping[str, Any], array: np.ndarray) -> np.ndarray:
    steps = params["strides"] or [1] * array.ndim
    return array[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _broadcast(params: Mapping[str, Any], array: np.ndarray, *_: Any) -> np.ndarray:
    lead = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], array.shape, strict=True):
        lead[dim] = size
    return np.broadcast_to(array.reshape(lead), params["shape"])


def _quotient(_: Mapping[str, Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # XLA rounds toward zero, numpy rounds down.
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


def _iota(params: Mapping[str, Any]) -> np.ndarray:
    lead = [1] * len(params["shape"])
    lead[params["dimension"]] = -1
    return np.broadcast_to(
        np.arange(params["shape"][params["dimension"]]).reshape(lead), params["shape"]
    )


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, a, b: function(a, b)


_SAME: Callable[..., Any] = lambda params, a, *_: a  # noqa: E731
_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("convert_element_type", "copy", "stop_gradient", "name"), _SAME),
    **dict.fromkeys(("sharding_constraint", "pvary", "pcast", "reshard", "mesh_cast"), _SAME),
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "max": _binary(np.maximum),
    "min": _binary(np.minimum),
    "lt": _binary(np.less),
    "le": _binary(np.less_equal),
    "gt": _binary(np.greater),
    "ge": _binary(np.greater_equal),
    "eq": _binary(np.equal),
    "ne": _binary(np.not_equal),
    "and": _binary(np.bitwise_and),
    "or": _binary(np.bitwise_or),
    "xor": _binary(np.bitwise_xor),
    "rem": _binary(np.fmod),
    "add_any": _binary(np.add),
    "div": _quotient,
    "neg": lambda params, a: -a,
    "sign": lambda params, a: np.sign(a),
    "not": lambda params, a: ~a,
    "clamp": lambda params, low, a, high: np.clip(a, low, high),
    "select_n": lambda params, which, *cases: np.choose(which.astype(np.intp), cases),
    "squeeze": lambda params, a: np.squeeze(a, tuple(params["dimensions"])),
    "reshape": lambda params, a, *_: a.reshape(params["new_sizes"]),
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
    "iota": _iota,
    "device_put": lambda params, *values: list(values),
}
"""How equations compute known integers: (parameters, *operands) -> result, or list of results."""
