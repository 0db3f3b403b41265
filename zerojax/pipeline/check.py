"""Which models and configs a pipeline supports, checked before anything is built."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax.config import ZeroConfig, resolve_activations
from zerojax.models import LayeredModel, Model, list_stacks
from zerojax.sharding import PIPE, list_axes, num_stages
from zerojax.state import StageOrder


def check_pipeline(
    model: Model | LayeredModel, config: ZeroConfig, mesh: Mesh
) -> tuple[LayeredModel, ZeroConfig, StageOrder]:
    """Check that a model can be trained in pipeline stages, and return how.

    Args:
      model: the model.
      config: configuration of the program.
      mesh: a mesh with the axis `pipe`.

    Returns:
      The model; the config with the step's choice of `reduce_every`; and the order of the layers.

    Raises:
      ValueError: the layers do not divide by the stages, or the microbatches do not.
      NotImplementedError: a model or a setting that a pipeline does not support.
    """
    stages = num_stages(mesh)
    if not isinstance(model, LayeredModel):
        raise NotImplementedError(
            f"the mesh has {PIPE}={stages}, and a Model has no layers to divide into stages: use a "
            f"LayeredModel, or {PIPE}=1"
        )
    _check_model(model, stages)
    _check_specs(model)
    _check_config(config, stages)
    order = StageOrder(model.num_layers, stages, config.pipe_chunks)
    _check_numbers(model.num_layers, config, stages)
    # Sums of a step are float32, which a config may have refused.
    sums_allowed = config.reduce_dtype in (None, "float32")
    if config.reduce_every is None and config.stage <= 1 and sums_allowed:
        config = dataclasses.replace(config, reduce_every="step")
    return model, config, order


def _check_model(model: LayeredModel, stages: int) -> None:
    unsupported = {
        "several stacks of layers": len(model.stacks) > 1,
        "`enter`": any(stack.model.enter is not None for stack in list_stacks(model)),
        "`init_state`": model.init_state is not None,
    }
    for what, is_present in unsupported.items():
        if is_present:
            raise NotImplementedError(
                f"a model with {what} is not supported on a mesh with {PIPE}={stages}: use "
                f"{PIPE}=1, and put these devices on fsdp"
            )


def _check_specs(model: LayeredModel) -> None:
    """Raise ValueError if a spec of the model names `pipe`."""
    specs = jax.tree_util.tree_flatten_with_path(
        model.specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )[0]
    for path, spec in specs:
        if PIPE in list_axes(tuple(spec)):
            raise ValueError(
                f"specs{jax.tree_util.keystr(path)} is {spec}, but {PIPE!r} splits layers by their "
                "numbers: leave it out of specs"
            )


def _check_config(config: ZeroConfig, stages: int) -> None:
    """Raise NotImplementedError for a setting that a pipeline does not support."""
    supported: dict[str, tuple[Any, ...]] = {
        "params": ("device",),
        "grads": ("device",),
        "opt_state": ("device", "pinned_host"),
        "frozen": (None, "device"),
        "offloaded_names": ((),),
        "partition_activations": (False,),
        "gather_ahead": (False,),
        "delayed_update": (False,),
        "update": (None, "after_backward"),
        "device_budget_bytes": (None,),
    }
    for name, values in supported.items():
        value = getattr(config, name)
        if value not in values:
            _refuse(name, value, values[0], stages)
    if isinstance(config.activations, tuple):
        raise NotImplementedError(
            f"activations={config.activations!r} with segments is not supported on a mesh with "
            f"{PIPE}={stages}: choose one mode for all layers, such as activations='selective'"
        )
    for kind in resolve_activations(config):
        if kind in ("pinned_host", "nvme"):
            _refuse("activations", kind, "selective", stages)


def _refuse(name: str, value: Any, instead: Any, stages: int) -> None:
    raise NotImplementedError(
        f"{name}={value!r} is not supported on a mesh with {PIPE}={stages}: use "
        f"{name}={instead!r}, or {PIPE}=1"
    )


def _check_numbers(num_layers: int, config: ZeroConfig, stages: int) -> None:
    """Raise ValueError unless layers and microbatches divide."""
    chunks = config.pipe_chunks
    parts = stages * chunks
    if num_layers % parts:
        below = num_layers // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        raise ValueError(
            f"num_layers={num_layers} does not divide by {PIPE} x pipe_chunks = {stages} x "
            f"{chunks} = {parts}: use {nearest} layers, or other {PIPE} or pipe_chunks"
        )
