"""The values that one program saves from forward to backward: `program.kept(batch)`.

For a streamed step they follow from its plan. For a resident step they are found by tracing the
loss and its derivative, without running either: residuals are the results of the traced forward
that the derivative reads. A residual that is an argument takes no bytes of its own. In a loop over
layers each residual is a stack, with one entry per layer.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.activations import describe, find_label, numbered_labels
from zerojax.jaxprs import INLINED, REMAT, list_regions
from zerojax.memory.leaves import local_record_bytes
from zerojax.pipeline import PipelineStep
from zerojax.sharding import TENSOR, ActivationSpec, Spec, local_elements, pad_spec, parse_axes
from zerojax.state import Layout, join_frozen
from zerojax.streamed import ResidualPlan, StreamedStep
from zerojax.trees import Batch, ModelState, Params


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """One value that forward saves for backward.

    Attributes:
      name: name that the model gave it (`jax.ad_checkpoint.checkpoint_name`), "x" and a path for
        the input of a layer, or a description of the equation that computed it.
      shape: shape for one layer and microbatch, over all devices.
      dtype: dtype of the value.
      spec: how it is split, one entry per dim; None for a dim that is unsplit, or that XLA may
        split.
      tier: tier where it is stored.
      count: number of copies that exist at the same time: layers, times microbatches in a streamed
        step; in a pipeline the layers of all slots of a stage.
      num_bytes: bytes of all copies per device.
      stack: name of its layers, in a model of several stacks or with segments; otherwise "".
      replicated: reason why `partition_activations` leaves it unsplit, or "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: Spec
    tier: str
    count: int
    num_bytes: int
    stack: str = ""
    replicated: str = ""

    def __str__(self) -> str:
        """Return the value as one line of a table."""
        split = ", ".join("+".join(parse_axes(entry)) or "-" for entry in self.spec)
        shape = f"{jnp.dtype(self.dtype).name}{list(self.shape)}"
        why = f" (whole: {self.replicated})" if self.replicated else ""
        return (
            f"{self.num_bytes:>16,} {self.count:>5} x {shape:<32} ({split}) {self.tier} "
            f"{self.stack} {self.name}{why}"
        )


class KeptValues(tuple[Kept, ...]):
    """The values that a step saves, largest first; prints as a table."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all saved values per device, in every tier."""
        return sum(kept.num_bytes for kept in self)

    def __str__(self) -> str:
        """Return the values as a table."""
        head = f"{'bytes':>16} {'count':>5} x {'shape':<32} (spec) tier stack name"
        return "\n".join(
            [f"{self.num_bytes:>16,} bytes kept on each device", head, *map(str, self)]
        )


def kept_values(values: list[Kept]) -> KeptValues:
    """Return the values as KeptValues, largest first."""
    return KeptValues(sorted(values, key=lambda kept: -kept.num_bytes))


def streamed_kept(streamed: StreamedStep, abstract_batch: Batch) -> list[Kept]:
    """Return the values that a streamed step saves of its layers."""
    shapes = jax.tree.map(_shape, abstract_batch)
    values: list[Kept] = []
    for loops, residuals in zip(streamed.loops, streamed.abstract_residuals(shapes), strict=True):
        run = loops.stack.run
        values += _saved_values(residuals, run.num_layers, run.name)
    return values


def bytes_gathered(streamed: StreamedStep, abstract_batch: Batch) -> int:
    """Return the bytes that each device sends over `tensor` to gather saved values for backward.

    Only values that are stored split over `tensor` count. In a ring, each device passes on every
    piece but one: t - 1 times the bytes that it stores.
    """
    shapes = jax.tree.map(_shape, abstract_batch)
    stored = 0
    for loops, residuals in zip(streamed.loops, streamed.abstract_residuals(shapes), strict=True):
        layer_bytes = 0
        for array in residuals.arrays:
            if array.gathered_spec is not None:
                a = array.abstract
                layer_bytes += local_record_bytes(array.record, a.shape, a.dtype)
        stored += loops.stack.num_layers * layer_bytes
    return stored * (streamed.mesh.shape[TENSOR] - 1)


def pipeline_kept(step: PipelineStep, abstract_microbatch: Batch) -> list[Kept]:
    """Return the values that a pipelined step saves of its layers, in all slots of a device."""
    residuals = step.plan_residuals(abstract_microbatch)
    count = step.table.num_slots * step.order.chunk_layers
    return _saved_values(residuals, count, step.stack.run.name)


def _saved_values(residuals: ResidualPlan, num_layers: int, stack: str) -> list[Kept]:
    """Return the values that a number of layers save."""
    values = list[Kept]()
    lead = residuals.lead
    for name, array in zip(residuals.names, residuals.arrays, strict=True):
        record = array.record
        a = array.abstract
        value = Kept(
            name=name,
            shape=a.shape[lead:],
            dtype=a.dtype,
            spec=_constrained_entries(record.spec)[lead:],
            tier=record.tier,
            count=num_layers * math.prod(a.shape[:lead]),
            num_bytes=num_layers * local_record_bytes(record, a.shape, a.dtype),
            stack=stack,
            replicated=array.replicated or "",
        )
        values.append(value)
    return values


def _constrained_entries(spec: Spec | PartitionSpec) -> Spec:
    """Return a spec with None for dims that are left to the partitioner."""
    return tuple(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec)


def resident_kept(layout: Layout, loss: Any, abstract_batch: Batch) -> list[Kept]:
    """Return the values that a microbatch of a resident step saves.

    The values of one microbatch are freed before the next one runs.

    Args:
      layout: layout of the program.
      loss: objective, a function of the full parameters.
      abstract_batch: tree of ShapeDtypeStruct.
    """
    micro = microbatch_shapes(abstract_batch, layout.config.num_microbatches)
    state = layout.abstract_arrays
    params = jax.tree.map(_shape, state.params)
    model_state = jax.tree.map(_shape, state.model_state)
    # Backward decodes again, so the decoded weights are not residuals.
    frozen = jax.eval_shape(layout.decode, jax.tree.map(_shape, state.frozen))

    def residuals(
        params: Params, frozen: Params, batch: Batch, model_state: ModelState
    ) -> list[jax.Array]:
        def value(params: Params) -> jax.Array:
            return loss(join_frozen(params, frozen), batch, None, model_state)[0].value()

        return jax.tree.leaves(jax.vjp(value, params)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, frozen, micro, model_state).jaxpr
    # A residual that is an argument (a parameter, the batch) takes no bytes of its own; every other
    # residual counts once.
    values = {v: None for v in jaxpr.outvars if isinstance(v, jex.Var)}
    for v in jaxpr.invars:
        values.pop(v, None)
    sizes = [a.shape[0] for a in jax.tree.leaves(micro) if a.shape]
    batch_size = sizes[0] if sizes else 0
    kept = [_resident_value(v, jaxpr, layout, batch_size) for v in values]
    labels = numbered_labels([value.name for value in kept])
    pairs = zip(kept, labels, strict=True)
    return [dataclasses.replace(value, name=label) for value, label in pairs]


def microbatch_shapes(abstract_batch: Batch, count: int) -> Batch:
    """Return the shapes and dtypes of one of `count` microbatches."""

    def shape_of_one(a: Any) -> jax.ShapeDtypeStruct:
        shape = (a.shape[0] // count, *a.shape[1:]) if a.shape else a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(shape_of_one, abstract_batch)


def _shape(a: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, without its sharding."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _resident_value(v: jex.Var, jaxpr: jex.Jaxpr, layout: Layout, batch_size: int) -> Kept:
    """Return a residual of a traced loss as a saved value."""
    aval: Any = v.aval
    name, spec, loops = _source(v, jaxpr, 0)
    shape = aval.shape[loops:]
    stacked = math.prod(aval.shape[:loops])
    if spec is None:
        is_stream = layout.config.sequence_parallel and name.split("[")[0] == "x"
        spec = ActivationSpec(layout.mesh, is_stream=is_stream).given(shape, batch_size)
    itemsize = 8 if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else aval.dtype.itemsize
    num_bytes = stacked * local_elements(shape, spec, layout.mesh) * itemsize
    return Kept(name, shape, aval.dtype, spec, "device", stacked, num_bytes)


_ENTERED = (*INLINED, REMAT, "scan")
_PASSED_ON = ("reduce_precision", "optimization_barrier")


def _source(v: Any, jaxpr: jex.Jaxpr, loops: int) -> tuple[str, Spec | None, int]:
    """Return the description, spec and number of enclosing loops of the equation that made v.

    The spec is None unless a constraint set it. Each loop stacks the value.
    """
    producers = dict[Any, tuple[jex.JaxprEqn, int]]()
    for eqn in jaxpr.eqns:
        for n, out in enumerate(eqn.outvars):
            producers[out] = (eqn, n)
    spec: Spec | None = None
    while not isinstance(v, jex.Literal) and v in producers:  # a Literal is not hashable
        eqn, position = producers[v]
        primitive = eqn.primitive.name
        if primitive == "name":
            constraint = spec or _constrained(producers, eqn.invars[0])
            return find_label(eqn.params["name"]), constraint, loops
        if primitive == "sharding_constraint":
            spec = spec or _read_constraint(eqn)
        elif primitive in _ENTERED:
            (region,) = list_regions(eqn)
            is_stacked = region.is_loop and position >= len(region.carried)
            return _source(region.jaxpr.outvars[position], region.jaxpr, loops + is_stacked)
        elif primitive not in _PASSED_ON:
            return describe(eqn), spec, loops
        v = eqn.invars[0]
    name = "constant" if isinstance(v, jex.Literal) else "x"
    return name, spec, loops


def _constrained(producers: Mapping[Any, tuple[jex.JaxprEqn, int]], v: Any) -> Spec | None:
    """Return the spec of a variable that is the result of a constraint, or None."""
    if isinstance(v, jex.Literal) or v not in producers:
        return None
    eqn, _ = producers[v]
    if eqn.primitive.name != "sharding_constraint":
        return None
    return _read_constraint(eqn)


def _read_constraint(eqn: jex.JaxprEqn) -> Spec:
    """Return the spec of a constraint; None for dims that are left to the partitioner."""
    entries = _constrained_entries(eqn.params["sharding"].spec)
    return pad_spec(entries, len(eqn.outvars[0].aval.shape))  # pyright: ignore[reportAttributeAccessIssue]
