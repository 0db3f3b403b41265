"""Facts about the values of a program, followed through its equations and its control flow.

An analysis is an abstract interpretation: it gives each value a fact, such as how the value is
split over devices, and each equation turns the facts of its operands into the facts of its results.
A subclass defines the facts, and what one equation does with them. The base class follows them
through control flow, in the same way for all facts:

    calls        take the facts of the operands, and return the facts of the results
    cond         a result's fact is the join of its facts in all branches
    scan         a carry's fact is the join over all iterations: the fact is joined with the
                 body's result until it stops changing
    shard_map    facts about global arrays become facts about shards, and back
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax.extend.core as jex

from zerojax.jaxprs.flat import FlatJaxpr, Instruction, Ref
from zerojax.jaxprs.regions import Region, list_regions

Fact = TypeVar("Fact")


class Analysis(Generic[Fact]):
    """A fact for each value of a program.

    Attributes:
      enters: primitives whose jaxprs are entered, a row of `zerojax.jaxprs.ENTERED`.
    """

    enters: frozenset[str]

    # --- defined by a subclass -----------------------------------------------------------------

    def constant(self, value: Any) -> Fact:
        """Return the fact of a constant."""
        raise NotImplementedError

    def apply(self, eqn: jex.JaxprEqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of the results of an equation that is not entered."""
        raise NotImplementedError

    def join(self, facts: Sequence[Fact]) -> Fact:
        """Return the fact of a value that has one of these facts.

        Repeated joins must stop changing the fact, so that `scan` ends.
        """
        raise NotImplementedError

    def sliced(self, fact: Fact) -> Fact:
        """Return the fact of one slice along dim 0, given the array's fact."""
        raise NotImplementedError

    def stacked(self, fact: Fact) -> Fact:
        """Return the fact of an array of slices along dim 0, given a slice's fact."""
        raise NotImplementedError

    def of_shards(self, eqn: jex.JaxprEqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of a shard_map's operands on one device, given the global facts."""
        raise NotImplementedError

    def of_wholes(self, eqn: jex.JaxprEqn, outs: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of a shard_map's results, given the facts of their shards."""
        raise NotImplementedError

    # --- programs and control flow -------------------------------------------------------------

    def run(self, program: FlatJaxpr, inputs: Sequence[Fact]) -> dict[int, Fact]:
        """Return the fact of every slot of a program, given the facts of its inputs."""
        facts = dict(zip(program.inputs, inputs, strict=True))
        for i in program.instructions:
            ins = [self.read(ref, facts) for ref in i.ins]
            facts.update(zip(i.outs, self.instruction(i, ins), strict=True))
        return facts

    def results(self, program: FlatJaxpr, facts: Mapping[int, Fact]) -> list[Fact]:
        """Return the facts of a program's results, given the facts of its slots."""
        return [self.read(ref, facts) for ref in program.outputs]

    def read(self, ref: Ref, facts: Mapping[int, Fact]) -> Fact:
        """Return the fact of an operand."""
        return facts[ref] if isinstance(ref, int) else self.constant(ref.value)

    def instruction(self, i: Instruction, ins: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of an instruction's results."""
        return self.equation(i.eqn, ins)

    def equation(self, eqn: jex.JaxprEqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of an equation's results, entering the jaxprs in it."""
        name = eqn.primitive.name
        if name not in self.enters or not list_regions(eqn):
            return self.apply(eqn, ins)
        if name == "scan":
            return self.scan(eqn, ins)
        if name == "cond":
            return self.cond(eqn, ins)
        if name == "shard_map":
            return self.shard_map(eqn, ins)
        (region,) = list_regions(eqn)
        return self.region(region, ins)

    def region(self, region: Region, ins: Sequence[Fact]) -> list[Fact]:
        """Return the facts of a region's results, given the facts of the equation's operands."""
        program = region.flatten()
        return self.results(program, self.run(program, ins[region.first :]))

    def cond(self, eqn: jex.JaxprEqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of a cond's results."""
        branches = [self.region(region, ins) for region in list_regions(eqn)]
        return [self.join(facts) for facts in zip(*branches, strict=True)]

    def scan(self, eqn: jex.JaxprEqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of a scan's results.

        The iteration ends when joins no longer change the carry's facts.
        """
        (region,) = list_regions(eqn)
        consts, carry, xs = region.split(ins)
        slices = [self.sliced(fact) for fact in xs]
        while True:
            outs = self.region(region, [*consts, *carry, *slices])
            joined = [self.join(facts) for facts in zip(carry, outs, strict=False)]
            if joined == carry:
                stacked = [self.stacked(fact) for fact in outs[len(carry) :]]
                return [*carry, *stacked]
            carry = joined

    def shard_map(self, eqn: jex.JaxprEqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of a shard_map's results."""
        (region,) = list_regions(eqn)
        shard_facts = self.of_shards(eqn, ins)
        return self.of_wholes(eqn, self.region(region, shard_facts))
