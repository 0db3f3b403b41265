"""Parameters that are not gathered yet: what gather-on-use computes with until data is met.

A `Source` is a shard. A `Lazy` is any value that follows from sources alone: a weight, its transpose, a weight-normed or
LoRA-merged matrix. `gathered` runs a function of the whole values as one unit: tied to its data, and repeated in backward.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.gather import Spec, gather, without_axis
from zerojax.jaxprs import bind

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A parameter leaf as stored, or what casts and layout operations on the shard make of it.

    Attributes:
      path: the leaf's name.
      value: the shard, in the compute dtype; all that is kept for backward.
      stored: spec of the moved shard.
      cotangent: spec of its gradient.
      moves: layout equations, applied to the shard just before its gather.
    """

    path: str
    value: Array
    stored: Spec
    cotangent: Spec
    moves: tuple[jex.JaxprEqn, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole value that a gather makes."""
        aval: Any = self.moves[-1].outvars[0].aval if self.moves else self.value
        return aval.size * aval.dtype.itemsize

    def moved(self) -> Array:
        """Return the shard after its moves."""
        value = self.value
        for eqn in self.moves:
            (value,) = bind(eqn, [value])
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A value that depends on parameters alone: its sources, and how it follows from them once gathered.

    `compute` is None where the value is its one source.
    """

    sources: tuple[Source, ...]
    compute: Callable[[dict[Source, Array]], Any] | None = None

    def evaluate(self, whole: dict[Source, Array]) -> Any:
        """Return the value, given the gathered sources."""
        return whole[self.sources[0]] if self.compute is None else self.compute(whole)


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

    def gather(self, source: Source) -> Array:
        """Return the whole value of `source`."""
        whole = without_axis(source.stored, self.axis)
        return gather(source.moved(), source.stored, whole, source.cotangent, self.mesh)


def union(lazies: Sequence[Lazy]) -> tuple[Source, ...]:
    """Return the distinct sources of several values."""
    return tuple(dict.fromkeys(s for z in lazies for s in z.sources))


def total_bytes(sources: Sequence[Source]) -> int:
    """Return the bytes that the distinct sources take once gathered."""
    return sum(s.num_bytes for s in dict.fromkeys(sources))


def rebase(lazy: Lazy, held: dict[Source, Source]) -> Lazy:
    """Return `lazy` over other holders of the same shards, such as the operands inside a branch or region."""
    sources = tuple(held[s] for s in lazy.sources)
    if lazy.compute is None:
        return Lazy(sources)
    compute, back = lazy.compute, dict(zip(lazy.sources, sources, strict=True))
    return Lazy(sources, lambda whole: compute({s: whole[h] for s, h in back.items()}))


def gathered(
    rule: Rule,
    body: Callable[[dict[Source, Array], Sequence[Any]], Any],
    sources: tuple[Source, ...],
    data: Sequence[Any],
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Any:
    """Return body(whole values of the sources, data); at stage 3 tied to the data, and repeated in backward.

    Args:
      rule: how to gather.
      body: the function.
      sources: what it reads of the parameters.
      data: what else it reads.
      checkpoint: the transformation that rematerialises; jax.checkpoint where the rule asks for it by default.
    """

    def run(shards: list[Array], data: Sequence[Any]) -> Any:
        if rule.remat:
            shards = _tie(shards, data)
        held = [dataclasses.replace(s, value=v) for s, v in zip(sources, shards, strict=True)]
        return body({s: rule.gather(h) for s, h in zip(sources, held, strict=True)}, data)

    if checkpoint is None:
        checkpoint = jax.checkpoint if rule.remat else lambda f: f
    return checkpoint(run)([s.value for s in sources], data)


@jax.custom_jvp
def _wait(shards: list[Array], data: list[Array]) -> list[Array]:
    return jax.lax.optimization_barrier((shards, data))[0]


@_wait.defjvp
def _wait_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[list[Array], list[Array]]:
    # The barrier's own rule would give tangents to data that has none, behind a stop_gradient.
    return _wait(*primals), tangents[0]


def _tie(shards: list[Array], data: Sequence[Any]) -> list[Array]:
    """Make `shards` wait for `data`. Random keys are left out: the barrier takes plain arrays."""
    plain = [v for v in data if not jnp.issubdtype(v.dtype, jax.dtypes.extended)]
    return _wait(shards, plain) if plain else shards
