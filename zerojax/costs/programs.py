"""The program whose bytes a plan counts: a given model's, or a transformer's built from sizes.

A plan from numbers alone has no model, but `zerojax.costs.sized_model` builds one with the same
layers. Its step is laid out, but never compiled, for GPUs that need not be present. Its bytes do
not depend on the chip, so an H200 stands for any machine.
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
    """Everything needed to build a program.

    Attributes:
      model: model that is trained.
      tx: optimizer.
      mesh: mesh of devices that need not be present.
      batch: batch of one step, as arrays or ShapeDtypeStructs.
    """

    model: Model | LayeredModel
    tx: optax.GradientTransformation
    mesh: Mesh
    batch: Any


def buildable_of_sizes(
    sizes: Sizes, machine: Machine, grid: Grid, precision: str, tiles: int
) -> Buildable:
    """Return the transformer described by `sizes`, with Adam, on the devices of a machine.

    Args:
      sizes: sizes of the transformer and its batch.
      machine: machine that determines the chip, if programs can be compiled for it, and the number
        of devices per node.
      grid: sizes of the mesh axes.
      precision: name of the config's precision.
      tiles: number of tiles in which the layers' MLPs run.

    Raises:
      ValueError: the sizes have no vocabulary, or `tiles` does not divide the MLP's width.
      RuntimeError: the compiler for GPUs is not installed.
    """
    if sizes.mlp_width % tiles:
        raise ValueError(
            f"MLP width {sizes.mlp_width} is not divisible by {tiles} tiles; choose a divisor"
        )
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
    """Return why the program of `buildable_of_sizes` has other bytes than a plan of sizes assumes.

    Returns None if the bytes are the same.
    """
    if not sizes.vocab:
        return "vocab = 0, and without a vocabulary there is no loss; set vocab, such as 50304"
    if sizes.params is not None and sizes.params != sizes.counted_params:
        return (
            f"params = {sizes.params:,}, but the other sizes imply {sizes.counted_params:,}; "
            "omit params"
        )
    if machine.devices > _MOST_DEVICES:
        return (
            f"the machine has {machine.devices:,} devices, but programs are laid out for at most "
            f"{_MOST_DEVICES:,}"
        )
    if PRECISIONS[precision].compute_dtype == "float32":
        return (
            "in float32 its attention saves scores, but a plan of sizes assumes that it saves none"
        )
    return None
