"""Facts that are followed through control flow; here, the arguments on which a value depends."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from zerojax.jaxprs import ENTERED, Analysis, trace

Names = frozenset[str]
MESH = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
X = jnp.arange(3.0)


class Dependences(Analysis[Names]):
    """Return the names of the arguments on which a value depends.

    "?" marks an equation that is not entered.
    """

    enters = ENTERED["flow"]

    def constant(self, value: Any) -> Names:
        return frozenset()

    def apply(self, eqn: Any, ins: Sequence[Names]) -> list[Names]:
        held = any(name in eqn.params for name in ("jaxpr", "call_jaxpr", "body_jaxpr", "branches"))
        return [frozenset("?") if held else frozenset().union(*ins)] * len(eqn.outvars)

    def join(self, facts: Sequence[Names]) -> Names:
        return frozenset().union(*facts)

    def sliced(self, fact: Names) -> Names:
        return fact

    def stacked(self, fact: Names) -> Names:
        return fact

    def of_shards(self, eqn: Any, ins: Sequence[Names]) -> list[Names]:
        return [fact | {"shard"} for fact in ins]

    def of_wholes(self, eqn: Any, outs: Sequence[Names]) -> list[Names]:
        return [fact - {"shard"} for fact in outs]


@jax.custom_vjp
def first_of(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sin(a)


first_of.defvjp(lambda a, b: (first_of(a, b), a), lambda a, dy: (dy * a, dy))


def shifted(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """Each iteration shifts the carry by one, so the first value reaches the last after two."""
    rows = jnp.stack([c, c])
    carry, ys = jax.lax.scan(lambda v, row: ((v[0], v[0] + 1, v[1]), v[2] + row), (a, b, b), rows)
    return *carry, ys


def islanded(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    spec = PartitionSpec("fsdp")
    return jax.shard_map(lambda a, b: (a + 1, b + a), mesh=MESH, in_specs=spec, out_specs=spec)(
        a, c
    )


CASES = {
    "jit": (lambda a, b, c: jax.jit(lambda x, y: (y, x + 1))(a, b), ["b", "a"]),
    "custom_vjp": (lambda a, b, c: first_of(b, c), ["b"]),
    "custom_jvp": (lambda a, b, c: jax.nn.relu(c), ["c"]),
    "remat": (lambda a, b, c: jax.checkpoint(lambda x, y: (x * 2, x * y))(a, c), ["a", "ac"]),
    "cond": (
        lambda a, b, c: jax.lax.cond(a[0] > 0, lambda x: x[0], lambda x: x[1], (b, c)),
        ["bc"],
    ),
    "scan": (shifted, ["a", "ab", "ab", "abc"]),
    "shard_map": (islanded, ["a", "ac"]),
    "while": (lambda a, b, c: jax.lax.while_loop(lambda x: x[0] < 3, lambda x: x + 1, a), ["?"]),
}


@pytest.mark.parametrize("case", CASES)
def test_facts_follow_what_values_are_made_of(case: str) -> None:
    function, expected = CASES[case]
    program, _ = trace(function, X, X, X)
    analysis = Dependences()
    facts = analysis.run(program, [frozenset("a"), frozenset("b"), frozenset("c")])
    assert ["".join(sorted(fact)) for fact in analysis.results(program, facts)] == expected


def test_an_equation_that_is_not_entered_is_applied_as_a_whole() -> None:
    class Shallow(Dependences):
        enters: frozenset[str] = frozenset()

    for case in ("custom_vjp", "remat", "cond", "scan", "shard_map"):
        program, _ = trace(CASES[case][0], X, X, X)
        facts = Shallow().run(program, [frozenset("a")] * 3)
        found = set(Shallow().results(program, facts))
        # jax passes an unchanged carry outside its loop
        assert found == ({frozenset("?"), frozenset("a")} if case == "scan" else {frozenset("?")})
