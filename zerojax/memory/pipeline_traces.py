"""The computations of a pipeline's tick, traced for one stage and one microbatch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.activations import sent_over_tensor
from zerojax.jaxprs import flatten
from zerojax.memory.alive import find_peak_bytes, split_like_batch
from zerojax.models import BLOCKS, call_embed, call_head, floating, merged, with_blocks
from zerojax.pipeline import PipelineStep
from zerojax.sharding import PIPE, ActivationSpec, Spec, parse_axes
from zerojax.streamed import derivative_jaxpr
from zerojax.trees import Batch, Params, Tree


@dataclasses.dataclass(frozen=True)
class UnitTrace:
    """One computation of a tick.

    Attributes:
      closed: its closed jaxpr.
      specs: spec of each argument.
      num_weights: number of the first arguments that are weights.
      saved: positions of the arguments that forward saved.
    """

    closed: Any
    specs: list[Spec]
    num_weights: int
    saved: range = range(0)


class UnitTraces:
    """All computations of a tick.

    Attributes:
      units: traces of "embed", "forward", "head", "backward" and "embed_backward".
      x: shapes of one microbatch's activations between layers.
      x_specs: how each is split.
      spread_specs: the same with the tokens split over the stages too, if they divide.
      unstacked: indices of the leaves of embedding and head, in the order of the tree.
    """

    def __init__(self, step: PipelineStep, abstract_microbatch: Batch) -> None:
        """Trace the computations of a step.

        Args:
          step: the step.
          abstract_microbatch: shapes of one microbatch.
        """
        self.step = step
        self.activations = ActivationSpec(step.mesh)
        self.batch = abstract_microbatch
        self.residuals = step.plan_residuals(abstract_microbatch)
        self.x, self._inputs = step.abstract_entered(abstract_microbatch)
        leaves = jax.tree.leaves(self.x)
        self.batch_size: int = next((a.shape[0] for a in leaves if a.shape), 0)
        self.x_specs = [step.plan.stream.given(a.shape, self.batch_size) for a in leaves]
        self.spread_specs = [
            self._spread(a.shape, spec) for a, spec in zip(leaves, self.x_specs, strict=True)
        ]
        in_tree = step.layout.in_tree
        self.unstacked = [i for i in in_tree if not step.plan.leaves[i].is_stacked]
        self.units = {**self._trace_layer(), **self._trace_unstacked()}

    def working_bytes(self, unit: str, copies_weights: bool, grad_itemsize: int | None) -> int:
        """Return the temporary memory of a unit on each device.

        Args:
          unit: name of the unit.
          copies_weights: whether weights are copied for the products that read them.
          grad_itemsize: bytes of an element of a gradient; None for those of its dtype.
        """
        trace = self.units[unit]
        return find_peak_bytes(
            trace.closed,
            [tuple(map(parse_axes, spec)) for spec in trace.specs],
            self.step.mesh.shape,
            split_like_batch(self.activations, self.batch_size),
            weights=range(trace.num_weights) if copies_weights else (),
            saved=trace.saved,
            adds_results=True,
            result_itemsize=grad_itemsize,
        )

    def read_leaves(self, unit: str) -> set[int]:
        """Return the indices of the unstacked leaves that embedding or head reads in a unit."""
        trace = self.units[unit]
        program = flatten(trace.closed.jaxpr, trace.closed.consts)
        read = set[int]()
        for i in program.live(program.outputs):
            read.update(i.reads)
        weights = program.inputs[: trace.num_weights]
        return {i for i, slot in zip(self.unstacked, weights, strict=True) if slot in read}

    def sent_over_tensor(self, unit: str) -> dict[str, float]:
        """Return the bytes that each device sends over `tensor` in a unit, by collective."""
        trace = self.units[unit]
        return sent_over_tensor(trace.closed, trace.specs, self.step.mesh)

    def _spread(self, shape: Sequence[int], spec: Spec) -> Spec:
        """Return a spec whose dim 1 `pipe` splits too, if it divides."""
        if len(shape) < 3:
            return spec
        axes = (*(axis for axis in parse_axes(spec[1]) if axis != "tensor"), PIPE)
        size = 1
        for axis in axes:
            size *= self.step.mesh.shape[axis]
        if shape[1] % size:
            return spec
        return (spec[0], axes if len(axes) > 1 else axes[0], *spec[2:])

    def _given(self, tree: Tree) -> list[Spec]:
        """Return the specs of arrays that a layer or the head receives."""
        return [self.activations.given(a.shape, self.batch_size) for a in jax.tree.leaves(tree)]

    def _trace_layer(self) -> dict[str, UnitTrace]:
        """Return the traces of a layer's forward and backward."""
        step = self.step
        block = self.residuals.block
        params, x, key, given = step.tracer.abstract_call(self.x, self._inputs, 1)
        specs = [leaf.layer_spec for leaf in step.layout.decoded_leaves() if leaf.is_stacked]
        num_weights = len(jax.tree.leaves(params))
        assert len(specs) == num_weights
        common = [*specs, *self.x_specs, *self._given((key, given))]
        num_x = len(self.x_specs)
        saved = [_as_spec(array.record.spec) for array in self.residuals.arrays[num_x:]]
        d_added: list[Spec] = [()] if block.adds else []
        dy = [
            spec for a, spec in zip(jax.tree.leaves(x), self.x_specs, strict=True) if _is_float(a)
        ]
        forward = jax.make_jaxpr(block.forward)(params, x, key, given)
        # Without rows of unreduced gradients, which a device has only one of.
        plain = dataclasses.replace(block, transform=lambda derivative: derivative)
        backward = derivative_jaxpr(plain, params, x, key, given)
        return {
            "forward": UnitTrace(forward, common, num_weights),
            "backward": UnitTrace(
                backward,
                [*common, *saved, *dy, *d_added],
                num_weights,
                range(len(common), len(common) + len(saved)),
            ),
        }

    def _trace_unstacked(self) -> dict[str, UnitTrace]:
        """Return the traces of embedding, head and the embedding's derivative."""
        step = self.step
        model = step.embed_head.model
        params = step.layout.join(step.layout.abstract_arrays)
        unstacked = {name: _shapes(tree) for name, tree in params.items() if name != BLOCKS}
        specs = [step.plan.leaves[i].spec.base for i in self.unstacked]
        key = None
        if step.model.stochastic:
            key = jax.eval_shape(lambda: jax.random.key(0))

        def embed(params: Params, batch: Batch, key: Any) -> Any:
            return call_embed(model, params["embed"], batch, key, None)[0]

        def embed_backward(params: Params, batch: Batch, key: Any, dx: Tree) -> Any:
            def floats(params: Params) -> Tree:
                return floating(embed(merged(params, whole), batch, key))

            whole = params
            return jax.vjp(floats, floating(params))[1](dx)[0]

        def head(params: Params, batch: Batch, key: Any, y: Tree) -> Any:
            def loss(floats: Params, y_floats: Tree) -> Any:
                whole = merged(floats, params)
                loss, _ = call_head(
                    model, whole["head"], whole["embed"], merged(y_floats, y), batch, key, None
                )
                return with_blocks(loss, None).value()

            return jax.value_and_grad(loss, (0, 1))(floating(params), floating(y))

        data = [*specs, *self._given((self.batch, key))]
        dx = floating(self.x)
        pairs = zip(jax.tree.leaves(self.x), self.spread_specs, strict=True)
        dx_specs = [spec for a, spec in pairs if _is_float(a)]
        arguments = (unstacked, self.batch, key)
        num = len(specs)
        return {
            "embed": UnitTrace(jax.make_jaxpr(embed)(*arguments), data, num),
            "embed_backward": UnitTrace(
                jax.make_jaxpr(embed_backward)(*arguments, dx), [*data, *dx_specs], num
            ),
            "head": UnitTrace(
                jax.make_jaxpr(head)(*arguments, self.x), [*data, *self.spread_specs], num
            ),
        }


def _shapes(tree: Tree) -> Any:
    """Return shapes and dtypes, without shardings."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def _as_spec(spec: Sequence[Any]) -> Spec:
    """Return a spec in which dims that are left to the partitioner count as unsplit."""
    return tuple(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec)


def _is_float(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.inexact)
