"""The compiled form of a step, for batches of one shape."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from host_offload.engine import DiskRecords
from zerojax.aot import CompiledProgram, compile_with_callbacks, is_there
from zerojax.config import streams
from zerojax.models import LayeredModel, Model
from zerojax.sharding import FSDP
from zerojax.state import Layout, numbered_next, unit_bytes
from zerojax.streamed import Scratch


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A train step that is lowered and not yet compiled."""

    lowered: jax.stages.Lowered
    mesh: Mesh
    options: Mapping[str, Any] | None = None
    has_callbacks: bool = False

    def as_text(self) -> str:
        """Return the StableHLO."""
        return self.lowered.as_text()

    def compile(self) -> jax.stages.Compiled | CompiledProgram:
        """Compile; the result offers `as_text()` (scheduled HLO of one device) and `memory_analysis()`."""
        if self.has_callbacks and not is_there(self.mesh):
            return compile_with_callbacks(self.lowered, self.mesh, self.options)
        with jax.set_mesh(self.mesh):
            return self.lowered.compile()


@dataclasses.dataclass
class CompiledStep:
    """The step for batches of one shape, and the host memory that it uses while it runs.

    Attributes:
      step: `step(state, batch, plans, one, scratch) -> ((state, scratch), metrics)`.
      abstract_scratch: shapes and shardings of `scratch`.
      on_disk: records that it writes before it reads them.
      kept: its activations, allocated at the first step; None where a step that failed, or one of another shape, had them.
    """

    step: Any
    abstract_scratch: Scratch
    on_disk: Sequence[DiskRecords] = ()
    kept: list[jax.Array] | None = None


def with_next_number(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step whose state has the next number on disk."""

    def numbered(*args: Any) -> Any:
        (state, scratch), metrics = step(*args)
        return (numbered_next(state), scratch), metrics

    return numbered


def compiler_options(model: Model | LayeredModel, layout: Layout) -> dict[str, Any] | None:
    """Return XLA options for GPUs: collectives are combined up to one layer, not up to the whole model.

    XLA's default merges the gradients of several layers into one reduce_scatter and holds them all until it runs.
    """
    if layout.mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return None
    leaves, layer = unit_bytes(layout)
    threshold = layer if isinstance(model, LayeredModel) else max(leaves)
    shards = layout.mesh.shape[FSDP]
    options: dict[str, Any] = {
        "xla_gpu_all_gather_combine_threshold_bytes": threshold,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": threshold // shards,
    }
    if isinstance(model, LayeredModel) and streams(layout.config):
        # A layer's gradients are reduced leaf by leaf, beside the products that are left of it.
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = max(leaves) // shards
        # By default XLA lets one collective and one copy run at a time, and so starts the next where the last one ended.
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 16
        options["xla_gpu_experimental_parallel_async_compute_limit"] = 64
    return options
