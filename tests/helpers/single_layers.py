"""Programs of 8 layers, with or without a pipeline, and the layers that they yield."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import toys

import zerojax as zj


def read_layers(program: zj.Program, state: zj.TrainState, ema: bool) -> Any:
    """Return float32 parameters, or averages, with stacks of the layers that are read one by one.

    Also check the order in which the pieces come.
    """
    pieces = dict(program.iter_params(state, ema=ema))
    assert isinstance(program.model, zj.LayeredModel)
    layers = [f"blocks/{layer}" for layer in range(program.model.num_layers)]
    assert list(pieces) == ["embed", *layers, "head"]
    pieces = jax.device_get(pieces)
    blocks = jax.tree.map(lambda *leaves: np.stack(leaves), *(pieces[name] for name in layers))
    return {"embed": pieces["embed"], "blocks": blocks, "head": pieces["head"]}


def build_small(**axes: Any) -> zj.Program:
    """Return a program on a mesh of these axes, with two chunks a stage if it has stages."""
    config = zj.ZeroConfig(stage=3, num_microbatches=4, pipe_chunks=2)
    model = dataclasses.replace(toys.small(), num_layers=8)
    return zj.build_train_step(model, optax.adamw(1e-2), config, zj.make_mesh(**axes))
