"""The program whose bytes a plan counts: of a model as it was given, of sizes the transformer that
stands for them.

A plan from numbers alone has no model, but `zerojax.costs.sized_model` has the same layers. Its
step is laid out, and never compiled, for GPUs that need not be present. Their bytes do not depend
on the chip, so an H200 stands for any machine.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.aot import CHIPS, gpu_mesh
from zerojax.costs.sized_model import sized_batch, sized_model
from zerojax.costs.sizes import Sizes
from zerojax.costs.workload import Grid
from zerojax.machines import Machine
from zerojax.models import LayeredModel, Model
from zerojax.precision import PRECISIONS

_ANY_CHIP = "h200"
_MOST_DEVICES = 1 << 14


class Buildable(NamedTuple):
    """What a program is built of.

    Attributes:
      model: whose step it is.
      tx: its optimizer.
      mesh: of devices that need not be present.
      batch: of one step, arrays or ShapeDtypeStructs.
    """

    model: Model | LayeredModel
    tx: optax.GradientTransformation
    mesh: Mesh
    batch: Any


def buildable_of_sizes(
    sizes: Sizes, machine: Machine, grid: Grid, precision: str, tiles: int
) -> Buildable:
    """Return the transformer that stands for sizes, with Adam, on the devices of a machine.

    Args:
      sizes: of the transformer.
      machine: gives the chip, if programs are compiled for it, and the devices of a node.
      grid: sizes of the mesh's axes.
      precision: of the config.
      tiles: in which the layers' MLPs run.

    Raises:
      ValueError: the sizes have no vocabulary, or tiles do not divide the MLP's width.
      RuntimeError: the compiler for GPUs is not installed.
    """
    if sizes.mlp_width % tiles:
        raise ValueError(f"an MLP of width {sizes.mlp_width} does not run in {tiles} equal tiles")
    dtype = PRECISIONS[precision].compute_dtype
    cudnn = jnp.dtype(dtype) != jnp.float32
    chip = machine.name if machine.name in CHIPS else _ANY_CHIP
    mesh = _mesh(chip, machine.nodes, machine.devices_per_node, grid)
    model = sized_model(sizes, dtype=dtype, tensor=grid.tensor, cudnn=cudnn, mlp_tiles=tiles)
    return Buildable(model, optax.adamw(1e-4), mesh, sized_batch(sizes))


@functools.lru_cache(maxsize=16)
def _mesh(chip: str, hosts: int, gpus_per_host: int, grid: Grid) -> Mesh:
    return gpu_mesh(
        chip,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        data=grid.data,
        fsdp=grid.fsdp,
        tensor=grid.tensor,
    )


def why_no_program(sizes: Sizes, machine: Machine, precision: str) -> str | None:
    """Return why `buildable_of_sizes` does not have the bytes that a plan of sizes assumes; None if
    it does.
    """
    if not sizes.vocab:
        return "vocab = 0, and without a vocabulary there is no loss; give vocab, such as 50304"
    if sizes.params is not None and sizes.params != sizes.counted_params:
        return f"params = {sizes.params:,}, and the other sizes make {sizes.counted_params:,}; leave out params"
    if machine.devices > _MOST_DEVICES:
        return f"the machine has {machine.devices:,} devices, and programs are laid out for {_MOST_DEVICES:,} at most"
    if PRECISIONS[precision].compute_dtype == "float32":
        return (
            "in float32 its attention keeps scores, and a plan of sizes assumes that it keeps none"
        )
    return None
