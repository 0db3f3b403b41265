"""Parameters that are not gathered yet: the values with which gather-on-use computes until a
parameter meets data.

A `Shard` is a parameter leaf as stored, and the moves that lead from it to the value in question:
casts, transposes and other equations that act on a shard as they do on the whole (`move_spec`
decides which). A `Lazy` is any value that is computed from shards alone: a weight, its transpose, a
weight-normed or LoRA-merged matrix. Those shards are its sources.

`gathered` gathers sources and runs a function of the whole values as one unit. At stage 3 the
gathers wait for the unit's data, and backward gathers and computes again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.linear_cross_entropy.vjp import LSE
from zerojax.gather.all_gather import gather
from zerojax.jaxprs import ELEMENTWISE, bind
from zerojax.sharding import Spec, without_axis

Array = jax.Array
KEPT = jax.checkpoint_policies.save_only_these_names(LSE)
"""Checkpoint policy of a unit that backward computes again. It saves the logsumexp of a tiled loss,
one number for each token. Without it backward would compute the tiles of logits twice: once for the
logsumexp, once for the gradient."""
HERE = object()
"""Stands for the shard among the operands of a Move."""


# eq=False: compared and hashed by identity, since arrays can be neither, and Shards and Nodes are
# keys.
@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A cast, layout or elementwise equation. It acts on a shard as on the whole, so it may come
    before the gather or after it.

    Attributes:
      eqn: the equation.
      operands: its operands, HERE and scalars.
      stored: spec of the shard after it.
      cotangent: spec of the gradient after it.
    """

    eqn: jex.JaxprEqn
    operands: tuple[Any, ...]
    stored: Spec
    cotangent: Spec

    def __call__(self, value: Array) -> Array:
        return bind(self.eqn, [value if o is HERE else o for o in self.operands])[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A parameter leaf as stored, and the moves that compute the value in question from it.

    Attributes:
      path: the leaf's name.
      value: the shard, in the compute dtype; all that is kept for backward.
      root_stored: spec of the shard.
      root_cotangent: spec of its gradient.
      moves: equations between the shard and the value.
    """

    path: str
    value: Array
    root_stored: Spec
    root_cotangent: Spec
    moves: tuple[Move, ...] = ()

    @property
    def stored(self) -> Spec:
        """Spec of the moved shard."""
        return self.moves[-1].stored if self.moves else self.root_stored

    @property
    def cotangent(self) -> Spec:
        """Spec of the moved shard's gradient."""
        return self.moves[-1].cotangent if self.moves else self.root_cotangent

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole value that a gather makes, before the moves that come after it."""
        aval = self._avals[self._num_moves_before]
        return aval.size * aval.dtype.itemsize

    @property
    def _avals(self) -> list[Any]:
        """What there is between two moves, from the shard on."""
        return [self.value, *(m.eqn.outvars[0].aval for m in self.moves)]

    @property
    def _num_moves_before(self) -> int:
        """How many moves come before the gather, which is made where the value is narrowest."""
        # A narrowing cast comes first, since it halves the bytes sent. Of equal widths the last
        # wins: more work on the shard.
        avals = self._avals
        return min(range(len(avals)), key=lambda i: (avals[i].dtype.itemsize, -i))

    def moved(self) -> Array:
        """Return the shard after its moves."""
        value = self.value
        for move in self.moves:
            value = move(value)
        return value

    def gathered(self, mesh: Mesh, axis: str) -> Array:
        """Return the whole value, gathered where it is narrowest between two moves."""
        narrowest = self._num_moves_before
        before = dataclasses.replace(self, moves=self.moves[:narrowest])
        value = gather(
            before.moved(), before.stored, without_axis(before.stored, axis), before.cotangent, mesh
        )
        for move in self.moves[narrowest:]:
            value = move(value)
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A postponed equation over parameters alone: its operands are Lazy values and constants."""

    eqn: jex.JaxprEqn
    operands: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A value that depends on parameters alone: a source, or one result of a postponed equation."""

    sources: tuple[Shard, ...]
    node: Node | None = None
    position: int = 0


class Whole:
    """The gathered sources of one unit, and the values computed from them.

    Each postponed equation runs once in a unit.
    """

    def __init__(self, sources: dict[Shard, Array]) -> None:
        self.sources = sources
        self.results: dict[Node, list[Any]] = {}

    def value(self, lazy: Lazy) -> Any:
        """Return `lazy` as an array. Not recursive: a chain of equations may be long."""
        if lazy.node is None:
            return self.sources[lazy.sources[0]]
        pending = [lazy.node]
        while pending:
            node = pending[-1]
            missing = [
                o.node
                for o in node.operands
                if isinstance(o, Lazy) and o.node and o.node not in self.results
            ]
            if missing:
                # Visited again once its operands are there.
                pending += missing
            elif node not in self.results:
                self.results[node] = bind(node.eqn, [self._operand(o) for o in node.operands])
            else:
                # Computed just now, or for another reader before.
                pending.pop()
        return self._operand(lazy)

    def _operand(self, operand: Any) -> Any:
        if not isinstance(operand, Lazy):
            return operand
        return (
            self.sources[operand.sources[0]]
            if operand.node is None
            else self.results[operand.node][operand.position]
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    """How parameters are gathered.

    Attributes:
      mesh: the device mesh.
      axis: the mesh axis that is gathered.
      remat: True where gathered values must not live from forward to backward (stage 3).
      budget_bytes: bytes that neighbouring uses may gather together.
      region_bytes: a rematerialised region of at most so many bytes is gathered at its top.
      report: called with a sentence for each parameter that is gathered before it is used.
    """

    mesh: Mesh
    axis: str
    remat: bool
    budget_bytes: int
    region_bytes: int
    report: Callable[[str], None]

    def gather(self, source: Shard) -> Array:
        """Return the whole value of `source`."""
        return source.gathered(self.mesh, self.axis)


def union(lazies: Sequence[Lazy]) -> tuple[Shard, ...]:
    """Return the distinct sources of several values."""
    return tuple(dict.fromkeys(s for z in lazies for s in z.sources))


def total_bytes(sources: Sequence[Shard]) -> int:
    """Return the bytes that the distinct sources take once gathered."""
    return sum(s.num_bytes for s in dict.fromkeys(sources))


def gathered(
    rule: Rule,
    body: Callable[[Whole, Sequence[Any]], Any],
    sources: tuple[Shard, ...],
    data: Sequence[Any],
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Any:
    """Return body(whole values of the sources, data); at stage 3 tied to the data, and repeated in
    backward.

    Args:
      rule: how to gather.
      body: the function.
      sources: what it reads of the parameters.
      data: what else it reads.
      checkpoint: the transformation that rematerialises; jax.checkpoint of all but KEPT where the
        rule asks for it by default.
    """

    def run(shards: list[Array], data: Sequence[Any]) -> Any:
        # Without the barrier XLA's scheduler hoists every gather to the top of the program.
        if rule.remat:
            shards = tie(shards, data)
        inputs = [dataclasses.replace(s, value=v) for s, v in zip(sources, shards, strict=True)]
        return body(
            Whole({s: rule.gather(shard) for s, shard in zip(sources, inputs, strict=True)}), data
        )

    if checkpoint is None:
        checkpoint = functools.partial(jax.checkpoint, policy=KEPT) if rule.remat else lambda f: f
    # A checkpoint keeps its arguments, so the shards are what backward keeps. The whole values are
    # made inside.
    return checkpoint(run)([s.value for s in sources], data)


@jax.custom_jvp
def _wait(shards: list[Array], data: list[Array]) -> list[Array]:
    return jax.lax.optimization_barrier((shards, data))[0]


@_wait.defjvp
def _wait_jvp(
    primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[list[Array], list[Array]]:
    # The barrier's own rule would give tangents to data that has none, behind a stop_gradient.
    return _wait(*primals), tangents[0]


def tie(shards: list[Array], data: Sequence[Any]) -> list[Array]:
    """Make `shards` wait for `data`. Random keys are left out: the barrier takes plain arrays."""
    plain = [v for v in data if not jnp.issubdtype(v.dtype, jax.dtypes.extended)]
    return _wait(shards, plain) if plain else shards


def move_spec(eqn: jex.JaxprEqn, spec: Spec, position: int = 0) -> Spec | None:
    """Return the spec of an equation's result, or None where the equation does not act shard by
    shard.

    This table, and not the partitioner, decides where an equation goes: before the gather, on the
      shard, or after it. A move
    in front of the gather costs 1/N of its work, and a cast there halves the bytes that are
    gathered.

    Args:
      eqn: an equation of which operand `position` is sharded, and every other one a scalar
        constant.
      spec: of that operand.
      position: its index.
    """
    name, params = eqn.primitive.name, eqn.params
    before: Any = eqn.invars[position].aval
    after: Any = eqn.outvars[0].aval
    old, new = before.shape, after.shape
    if name in ELEMENTWISE:
        return spec if new == old else None
    if name == "transpose":
        return tuple(spec[d] for d in params["permutation"])
    if name == "squeeze":
        return tuple(s for d, s in enumerate(spec) if d not in params["dimensions"])
    # A slice along a split dim would need other devices' shards. Along any other dim each shard is
    # sliced alike.
    if name in ("slice", "dynamic_slice") and all(
        s is None or old[d] == new[d] for d, s in enumerate(spec)
    ):
        return spec
    if name == "broadcast_in_dim":
        old_dims = dict(zip(params["broadcast_dimensions"], range(len(old)), strict=True))
        # A broadcast that grows comes after the gather, which would otherwise send the copies too.
        grows = any(new[d] != (old[old_dims[d]] if d in old_dims else 1) for d in range(len(new)))
        return (
            None
            if grows
            else tuple(spec[old_dims[d]] if d in old_dims else None for d in range(len(new)))
        )
    if name == "reshape" and params.get("dimensions") is None:
        # Dims of 1 may come and go. Any other reshape may merge a split dim with its neighbour.
        long_dims = [(n, s) for n, s in zip(old, spec, strict=True) if n != 1]
        split_ones = any(s for n, s in zip(old, spec, strict=True) if n == 1)
        if split_ones or [n for n, _ in long_dims] != [n for n in new if n != 1]:
            return None
        rest = iter(long_dims)
        return tuple(None if n == 1 else next(rest)[1] for n in new)
    return None
