"""Parameters that are not gathered yet, and the values computed from them.

A `Shard` is a parameter leaf as stored, plus the moves that lead from it to the value in question:
casts, transposes and other equations that act on a shard as they do on the unsharded array
(`move_spec` decides which). A `Lazy` is any value computed from shards alone, such as a weight, its
transpose, or a weight-normed or LoRA-merged matrix. Those shards are its sources.

`run_gathered` gathers sources and runs a function of the gathered values as one unit. At stage 3
the gathers wait for the unit's data, and backward gathers and computes again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.linear_cross_entropy.vjp import LSE
from zerojax.gather.all_gather import gather
from zerojax.jaxprs import ELEMENTWISE, bind
from zerojax.sharding import Spec, without_axes

Array = jax.Array
UNIT_POLICY = jax.checkpoint_policies.save_only_these_names(LSE)
"""Checkpoint policy of a unit that backward recomputes.

It saves the logsumexp of a tiled loss, one number per token. Without it backward would compute the
tiles of logits twice: once for the logsumexp, once for the gradient.
"""
SHARD_OPERAND = object()
"""Placeholder for the shard among the operands of a Move."""


# eq=False: Shards and Nodes are dictionary keys. They compare and hash by identity because arrays
# support neither comparison by value nor hashing.
@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A cast, layout or elementwise equation that can run before or after the gather.

    It acts on a shard as it does on the unsharded array.

    Attributes:
      eqn: the equation.
      operands: its operands: SHARD_OPERAND and scalars.
      stored: spec of the shard after the equation.
      cotangent: spec of the gradient after the equation.
    """

    eqn: jex.JaxprEqn
    operands: tuple[Any, ...]
    stored: Spec
    cotangent: Spec

    def __call__(self, value: Array) -> Array:
        """Apply the equation to the shard `value`."""
        operands = [value if o is SHARD_OPERAND else o for o in self.operands]
        return bind(self.eqn, operands)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A parameter leaf as stored, and the moves that compute the value in question from it.

    Attributes:
      path: the leaf's name.
      value: the shard, in the compute dtype; the only array that is kept for backward.
      root_stored: spec of the shard.
      root_cotangent: spec of the shard's gradient.
      axes: the ZeRO axes that split the shard or its gradient, which a gather removes.
      moves: equations between the shard and the value.
    """

    path: str
    value: Array
    root_stored: Spec
    root_cotangent: Spec
    axes: tuple[str, ...]
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
        """Bytes of the gathered array, before the moves that follow the gather."""
        aval = self._avals[self._num_early_moves]
        return aval.size * aval.dtype.itemsize

    @property
    def _avals(self) -> list[Any]:
        """The shard, then its abstract value after each move."""
        return [self.value, *(m.eqn.outvars[0].aval for m in self.moves)]

    @property
    def _num_early_moves(self) -> int:
        """Number of moves before the gather, which happens where the value is narrowest."""
        # A narrowing cast comes first, since it halves the bytes sent. Among equal widths the last
        # one wins: more of the work is done on the shard.
        avals = self._avals
        return min(range(len(avals)), key=lambda i: (avals[i].dtype.itemsize, -i))

    def moved(self) -> Array:
        """Return the shard after its moves."""
        value = self.value
        for move in self.moves:
            value = move(value)
        return value

    def gathered(self, mesh: Mesh) -> Array:
        """Return the unsharded value, gathered at the move where the dtype is narrowest."""
        num_early_moves = self._num_early_moves
        shard = dataclasses.replace(self, moves=self.moves[:num_early_moves])
        unsharded = without_axes(shard.stored, *self.axes)
        value = gather(shard.moved(), shard.stored, unsharded, shard.cotangent, mesh)
        for move in self.moves[num_early_moves:]:
            value = move(value)
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A postponed equation over parameters alone; its operands are Lazy values and constants."""

    eqn: jex.JaxprEqn
    operands: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A value that depends on parameters alone: a source, or one result of a postponed equation."""

    sources: tuple[Shard, ...]
    node: Node | None = None
    position: int = 0


class GatheredSources:
    """The gathered sources of one unit, and the values computed from them.

    Each postponed equation runs once in a unit.
    """

    def __init__(self, arrays: dict[Shard, Array]) -> None:
        """Start from the gathered array of each source."""
        self.arrays = arrays
        self.results: dict[Node, list[Any]] = {}

    def value(self, lazy: Lazy) -> Any:
        """Return `lazy` as an array. Iterative, since a chain of equations may be long."""
        if lazy.node is None:
            return self.arrays[lazy.sources[0]]
        pending = [lazy.node]
        while pending:
            node = pending[-1]
            operand_nodes = [o.node for o in node.operands if isinstance(o, Lazy) and o.node]
            missing = [operand for operand in operand_nodes if operand not in self.results]
            if missing:
                # Visited again once its operands are computed.
                pending += missing
            elif node not in self.results:
                self.results[node] = bind(node.eqn, [self._operand(o) for o in node.operands])
            else:
                # Computed just now, or earlier for another reader.
                pending.pop()
        return self._operand(lazy)

    def _operand(self, operand: Any) -> Any:
        if not isinstance(operand, Lazy):
            return operand
        if operand.node is None:
            return self.arrays[operand.sources[0]]
        return self.results[operand.node][operand.position]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How parameters are gathered.

    Attributes:
      mesh: the device mesh.
      remat: whether gathered values must not live from forward to backward (stage 3).
      budget_bytes: gathered bytes that neighbouring uses may share in one unit.
      region_bytes: largest size of a rematerialised region that is gathered at its top, in gathered
        bytes of its parameters.
      report: called with a sentence for each parameter that is gathered before it is used.
    """

    mesh: Mesh
    remat: bool
    budget_bytes: int
    region_bytes: int
    report: Callable[[str], None]

    def gather(self, source: Shard) -> Array:
        """Return the gathered value of `source`."""
        return source.gathered(self.mesh)


def union(lazies: Sequence[Lazy]) -> tuple[Shard, ...]:
    """Return the distinct sources of several values."""
    return tuple(dict.fromkeys(s for z in lazies for s in z.sources))


def total_bytes(sources: Sequence[Shard]) -> int:
    """Return the bytes of the distinct sources after the gather."""
    return sum(s.num_bytes for s in dict.fromkeys(sources))


def with_arrays(sources: Sequence[Shard], arrays: Sequence[Array]) -> dict[Shard, Shard]:
    """Return for each source the same source with another array as its shard."""
    pairs = zip(sources, arrays, strict=True)
    return {source: dataclasses.replace(source, value=array) for source, array in pairs}


def run_gathered(
    rule: Rule,
    body: Callable[[GatheredSources, Sequence[Any]], Any],
    sources: tuple[Shard, ...],
    data: Sequence[Any],
) -> Any:
    """Return body(gathered values of the sources, data).

    At stage 3 the gathers wait for the data, and backward repeats them under `jax.checkpoint` with
    `UNIT_POLICY`.

    Args:
      rule: how to gather.
      body: the function to run.
      sources: the shards that `body` reads.
      data: the other values that `body` reads.
    """

    def run(shards: list[Array], data: Sequence[Any]) -> Any:
        # Without the barrier XLA's scheduler hoists every gather to the top of the program.
        if rule.remat:
            shards = tie(shards, data)
        inputs = with_arrays(sources, shards)
        arrays = {source: rule.gather(shard) for source, shard in inputs.items()}
        return body(GatheredSources(arrays), data)

    # A checkpoint keeps its arguments, so only the shards are kept for backward. The gathered
    # values are computed inside.
    unit = jax.checkpoint(run, policy=UNIT_POLICY) if rule.remat else run
    return unit([s.value for s in sources], data)


def reduce_shards(lazy: Lazy) -> Lazy:
    """Compute a small value from shards, without a gather, and return it as a source of its own.

    The equations mean the same on sharded arrays; the partitioner adds the psum. Their inputs are
    kept for backward, and their intermediate values are not.
    """
    sources = lazy.sources

    @jax.checkpoint
    def reduce(shards: list[Array]) -> Array:
        inputs = with_arrays(sources, shards)
        arrays = {source: shard.moved() for source, shard in inputs.items()}
        return GatheredSources(arrays).value(lazy)

    value = reduce([s.value for s in sources])
    path = " and ".join(dict.fromkeys(s.path for s in sources))
    unsharded: Spec = (None,) * value.ndim
    return Lazy((Shard(path, value, unsharded, unsharded, ()),))


def slice_layer(stack: Any, value: Any) -> Any:
    """Return an iteration's slice; the slice of a shard is a shard without the layer dim.

    Args:
      stack: the scanned operand, an array or a Lazy.
      value: the slice of its array.
    """
    if not isinstance(stack, Lazy):
        return value
    source = stack.sources[0]
    stored = source.stored[1:]
    return Lazy((Shard(source.path, value, stored, source.cotangent[1:], source.axes),))


@jax.custom_jvp
def _wait(shards: list[Array], data: list[Array]) -> list[Array]:
    return jax.lax.optimization_barrier((shards, data))[0]


@_wait.defjvp
def _wait_jvp(
    primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[list[Array], list[Array]]:
    # The barrier's own rule would give tangents to data that has none (behind a stop_gradient).
    return _wait(*primals), tangents[0]


def tie(shards: list[Array], data: Sequence[Any]) -> list[Array]:
    """Make `shards` wait for `data`.

    Random keys in `data` are skipped: the barrier takes only plain arrays.
    """
    arrays = [v for v in data if not jnp.issubdtype(v.dtype, jax.dtypes.extended)]
    return _wait(shards, arrays) if arrays else shards


def move_spec(eqn: jex.JaxprEqn, spec: Spec, position: int = 0) -> Spec | None:
    """Return the spec of an equation's result, or None if it cannot run shard by shard.

    This table, and not the partitioner, decides whether an equation runs on the shard before the
    gather or after it. A move before the gather costs 1/N of its work, and a cast there halves the
    gathered bytes.

    Args:
      eqn: an equation with a sharded operand at `position`; all other operands are scalar
        constants.
      spec: spec of the sharded operand.
      position: index of the sharded operand.
    """
    name = eqn.primitive.name
    params = eqn.params
    operand: Any = eqn.invars[position].aval
    result: Any = eqn.outvars[0].aval
    old = operand.shape
    new = result.shape
    if name in ELEMENTWISE:
        return spec if new == old else None
    if name == "transpose":
        return tuple(spec[d] for d in params["permutation"])
    if name == "squeeze":
        return tuple(axes for d, axes in enumerate(spec) if d not in params["dimensions"])
    if name in ("slice", "dynamic_slice"):
        # A slice along a sharded dim would need other devices' shards. Along any other dim, each
        # shard is sliced in the same way.
        is_local = all(axes is None or old[d] == new[d] for d, axes in enumerate(spec))
        return spec if is_local else None
    if name == "broadcast_in_dim":
        return _broadcast_spec(spec, old, new, params["broadcast_dimensions"])
    if name == "reshape" and params.get("dimensions") is None:
        return _reshape_spec(spec, old, new)
    return None


def _broadcast_spec(
    spec: Spec, old: tuple[int, ...], new: tuple[int, ...], new_dims: Sequence[int]
) -> Spec | None:
    """Return the spec of a broadcast from shape `old` to `new`, or None if it enlarges the array.

    Such a broadcast comes after the gather, which would otherwise send the copies too.

    Args:
      spec: spec of the operand.
      old: shape of the operand.
      new: shape of the result.
      new_dims: dim of the result for each dim of the operand.
    """
    lengths = [1] * len(new)
    new_spec: list[Any] = [None] * len(new)
    for old_dim, new_dim in enumerate(new_dims):
        lengths[new_dim] = old[old_dim]
        new_spec[new_dim] = spec[old_dim]
    return tuple(new_spec) if tuple(lengths) == tuple(new) else None


def _reshape_spec(spec: Spec, old: tuple[int, ...], new: tuple[int, ...]) -> Spec | None:
    """Return the spec of a reshape that only adds or removes dims of 1, or None for any other.

    Any other reshape may merge a sharded dim with its neighbour.
    """
    long_dims: list[tuple[int, Any]] = []
    for length, axes in zip(old, spec, strict=True):
        if length != 1:
            long_dims.append((length, axes))
        elif axes:
            return None
    if [length for length, _ in long_dims] != [length for length in new if length != 1]:
        return None
    long_axes = iter([axes for _, axes in long_dims])
    return tuple(None if length == 1 else next(long_axes) for length in new)
