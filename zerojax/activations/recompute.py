"""Rematerialisation that saves expensive values, for steps that JAX differentiates.

The function is traced, and each value to save is named. A `jax.checkpoint` has a policy that saves
these names. Loops are entered, so that each iteration saves the same values as a layer; an equation
with a derivative of its own runs forward once (`zerojax.activations.split_vjp`).

The values of a layer are counted in the order of its program, up to a loop or a branch, whose inner
order is unknown. From these counts follow the numbers of the values that backward reads, which are
the same as in a streamed step (`zerojax.streamed.residuals`).
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.linear_cross_entropy.vjp import LSE
from zerojax.activations.flow import flow, has_island
from zerojax.activations.kept import candidates, depending, describe, is_cheap
from zerojax.activations.split_vjp import SplitVjp, is_splittable, split_custom_vjp
from zerojax.jaxprs import (
    ENTERED,
    INLINED,
    FlatJaxpr,
    Function,
    Instruction,
    Region,
    bind,
    is_among,
    list_regions,
    read,
    rebind,
    trace,
)
from zerojax.sharding import ActivationSpec, Spec, splits_activations
from zerojax.trees import Params

PREFIX = "zerojax_kept "
_COUNTED = re.compile(r"#(\w*):(\d+) (.*)")
"""Group, count and equation of a value."""


def keeps(prim: Any, *args: Any, **params: Params) -> bool:
    """Checkpoint policy that saves the values named by a `Keeper` and a tiled loss's logsumexp."""
    del args
    # Without the saved logsumexp, backward would compute the tiles of logits twice.
    return prim.name == "name" and (params["name"].startswith(PREFIX) or params["name"] == LSE)


def find_label(name: str) -> str:
    """Return the label of a saved value.

    It is the description of an equation that a `Keeper` named, preceded by its count, or the name
    that the model gave.
    """
    return name.removeprefix(PREFIX)


def numbered_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels with consecutive numbers instead of counts: "#2 dot_general ..."."""
    matches = [_COUNTED.fullmatch(label) for label in labels]
    counts_by_group = dict[str, set[int]]()
    for match in matches:
        if match is not None:
            counts_by_group.setdefault(match[1], set()).add(int(match[2]))
    counts = {group: sorted(numbers) for group, numbers in counts_by_group.items()}
    numbered = list[str]()
    for label, match in zip(labels, matches, strict=True):
        if match is None:
            numbered.append(label)
        else:
            numbered.append(f"#{counts[match[1]].index(int(match[2]))} {match[3]}")
    return numbered


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """How the inputs of a function are split over a mesh.

    The splits of all its values follow from this. They are used if the mesh or an island in the
    function splits values by other dims than the batch.

    Attributes:
      mesh: the device mesh.
      params: spec of each leaf of the parameters, or None if unknown.
    """

    mesh: Mesh
    params: tuple[Spec | None, ...]

    def flow(
        self, program: FlatJaxpr, shapes: Sequence[tuple[int, ...]], batch_size: int
    ) -> dict[int, Spec | None]:
        """Return the spec of every slot of a program over (params, *data).

        Args:
          program: a flattened program.
          shapes: shapes of the leaves of the data.
          batch_size: number of rows of the batch; a dim 0 of this size is taken to be the batch.
        """
        data = [ActivationSpec(self.mesh).given(shape, batch_size) for shape in shapes]
        return flow(program, [*self.params, *data], self.mesh.shape)


def keep_products(
    function: Callable[..., Any],
    prevent_cse: bool = True,
    splits: Splits | None = None,
    group: str = "",
) -> Callable[..., Any]:
    """Return `function(params, x, *data)`, saving values that are expensive to recompute.

    Args:
      function: function whose argument x is a tree of leaves with the batch as dim 0. If it has
        side effects, JAX chooses the saved values.
      prevent_cse: option of `jax.checkpoint`.
      splits: how the inputs are split, which determines the splits of the saved values; None leaves
        these to the partitioner.
      group: name of the functions whose values are counted together.
    """

    def run(params: Params, *data: Any) -> Any:
        program, out = trace(function, params, *data)
        # A checkpoint refuses callbacks, and would print twice.
        if any(i.eqn.effects for i in program.instructions):
            return function(params, *data)
        keeper = Keeper.of(program, program.inputs[len(jax.tree.leaves(params)) :], splits, data)
        keeper.group = group

        @partial(jax.checkpoint, policy=keeps, prevent_cse=prevent_cse)
        def region(*values: Any) -> list[Any]:
            return program.run(values, keeper.run)

        return jax.tree.unflatten(
            jax.tree.structure(out), region(*jax.tree.leaves((params, *data)))
        )

    return run


class Keeper:
    """Run instructions of a program and name the values to save for backward.

    Attributes:
      group: name of the values that are counted together; None while values are not counted.
    """

    def __init__(
        self,
        program: FlatJaxpr,
        data: Sequence[int],
        specs: Mapping[int, Spec | None] = MappingProxyType({}),
        mesh: Mesh | None = None,
    ) -> None:
        """Choose the values of a program to save.

        Args:
          program: program over parameters and data.
          data: slots of the inputs that are not parameters.
          specs: spec of each slot whose split is known.
          mesh: mesh of these specs.
        """
        self.of_data = depending(program, data)
        self.specs = specs
        self.mesh = mesh
        self.kept = candidates(program, self.of_data)
        self.group: str | None = None
        self._count = itertools.count()

    @classmethod
    def of(
        cls, program: FlatJaxpr, slots: Sequence[int], splits: Splits | None, data: Sequence[Any]
    ) -> Self:
        """Choose the values of a program over (params, *data) to save; `slots` are the data's."""
        if splits is None or not (splits_activations(splits.mesh) or has_island(program)):
            return cls(program, slots)
        shapes = [jnp.shape(a) for a in jax.tree.leaves(data)]
        return cls(program, slots, splits.flow(program, shapes, _batch_size(data[0])), splits.mesh)

    def run(self, instructions: Sequence[Instruction], slots: dict[int, Any]) -> None:
        """Run instructions in order, reading and writing `slots`."""
        for i in instructions:
            values = [read(ref, slots) for ref in i.ins]
            # An equation that is taken apart names its results itself: named twice, they would be
            # saved twice.
            apart = None
            if _has_rule(i) and not self.of_data.isdisjoint(i.reads):
                apart = split_custom_vjp(i, partial(bind, i.eqn))
            label = PREFIX + describe(i.eqn)
            if apart is not None:
                slots.update(zip(i.outs, self._named_by_rule(i, apart, values, label), strict=True))
                continue
            of_data = self.depend_on_data(i)
            outs = _run(i, values, of_data)
            if any(of_data) and i.eqn.primitive.name in _ENTERED:
                self.group = None
            for slot, value in zip(i.outs, outs, strict=True):
                slots[slot] = self.named(slot, value, label) if slot in self.kept else value

    def named(self, slot: int, value: Any, label: str) -> Any:
        """Return a saved value under a name, constrained to its spec if known."""
        spec = self.specs.get(slot)
        if spec is not None:
            assert self.mesh is not None
            value = jax.lax.with_sharding_constraint(
                value, NamedSharding(self.mesh, PartitionSpec(*spec))
            )
        return _named(value, self._counted(label))

    def _counted(self, label: str) -> str:
        """Return a label with the count of its value before it."""
        if self.group is None:
            return label
        return f"{PREFIX}#{self.group}:{next(self._count)} {label.removeprefix(PREFIX)}"

    def _named_by_rule(
        self, i: Instruction, apart: SplitVjp, values: Sequence[Any], label: str
    ) -> list[Any]:
        """Return the results of a taken-apart equation, naming what its derivative reads."""

        @jax.custom_vjp
        def call(*operands: Any) -> list[Any]:
            return bind(i.eqn, operands)

        def forward(*operands: Any) -> tuple[list[Any], Any]:
            outs, kept = apart.forward(operands)
            outs = [self.named(slot, a, label) for slot, a in zip(i.outs, outs, strict=True)]
            kept = [_named(a, self._counted(label)) for a in kept]
            # Values that the derivative does not read are not saved, such as the result of one tile
            # of a sum.
            return outs, apart.read_by_backward(operands, outs, kept)

        def backward(saved: list[Any], d_outs: list[Any]) -> tuple[Any, ...]:
            return apart.backward(saved, d_outs)

        call.defvjp(forward, backward)
        return call(*values)

    def depend_on_data(self, i: Instruction) -> list[bool]:
        """Return whether each operand of an instruction depends on data."""
        return [is_among(ref, self.of_data) for ref in i.ins]


def _named(value: Any, label: str) -> Any:
    """Return a value under a name."""
    if jnp.issubdtype(
        value.dtype, jnp.complexfloating
    ):  # a checkpoint that saves a complex number cannot be traced
        return jax.lax.complex(
            checkpoint_name(value.real, label), checkpoint_name(value.imag, label)
        )
    return checkpoint_name(value, label)


def _has_rule(i: Instruction) -> bool:
    """Return whether an equation's own rule or checkpoint chooses its saved values."""
    return is_splittable(i) and i.eqn.primitive.name not in _ENTERED


_ENTERED = ENTERED["keep_products"] - INLINED


def _run(i: Instruction, values: Sequence[Any], of_data: Sequence[bool]) -> list[Any]:
    """Return the results of one equation, naming the values to save in loops and branches."""
    is_entered = i.eqn.primitive.name in _ENTERED and any(of_data)
    if not is_entered or i.eqn.effects or is_cheap(i.eqn):
        return bind(i.eqn, values)
    return rebind(i.eqn, [_inside(region, of_data) for region in list_regions(i.eqn)], values)


def _inside(region: Region, of_data: Sequence[bool]) -> Function:
    """Return a function that runs a loop's body or a branch, naming the values to save.

    Args:
      region: loop body or branch of the equation.
      of_data: whether each operand of the equation depends on data.
    """
    program = region.flatten()
    # Carried values meet data sooner or later.
    flags = [of or p in region.carried for p, of in enumerate(of_data[region.first :])]
    pairs = zip(program.inputs, flags, strict=True)
    keeper = Keeper(program, [slot for slot, of in pairs if of])
    return lambda values: program.run(values, keeper.run)


def open_equations(
    program: FlatJaxpr, data: Sequence[int], closed: Iterable[int]
) -> tuple[FlatJaxpr, dict[int, SplitVjp], dict[int, Any]]:
    """Take apart the equations of a program that depend on data and have their own derivative.

    Args:
      program: program of a layer.
      data: slots of the inputs that are not parameters.
      closed: first results of equations that stay unchanged.

    Returns:
      The program, in which these equations also return their saved values; each taken-apart
      equation, by the slot of its first result; and the new slots, with avals.
    """
    keeper = Keeper(program, data)
    stay = set(closed)
    slots = itertools.chain(program.inputs, *(i.outs for i in program.instructions))
    new_slots = itertools.count(max(slots, default=0) + 1)
    instructions: list[Instruction] = []
    apart: dict[int, SplitVjp] = {}
    kept: dict[int, Any] = {}
    for i in program.instructions:
        of_data = keeper.depend_on_data(i)
        split_vjp = None
        if is_splittable(i) and any(of_data) and stay.isdisjoint(i.outs):
            split_vjp = split_custom_vjp(i, partial(_differentiable, i, of_data))
        if split_vjp is not None:
            residuals = {next(new_slots): aval for aval in split_vjp.kept}
            apart[i.outs[0]] = split_vjp
            kept.update(residuals)
            i = dataclasses.replace(i, outs=(*i.outs, *residuals))
        instructions.append(i)
    return dataclasses.replace(program, instructions=tuple(instructions)), apart, kept


def _differentiable(i: Instruction, of_data: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """Run an equation such that its derivative saves values by `keeps` or by its own rule."""
    if _has_rule(i):
        return bind(i.eqn, values)
    return jax.checkpoint(lambda *v: _run(i, v, of_data), policy=keeps, prevent_cse=False)(*values)


def _batch_size(x: Any) -> int:
    """Return dim 0 of the leaves of x, or 0 if all are scalars."""
    return next((a.shape[0] for a in jax.tree.leaves(x) if a.shape), 0)
