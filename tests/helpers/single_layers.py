"""Parameters put together from the single layers that a program yields."""

from typing import Any

import jax
import numpy as np

import zerojax as zj


def read_layers(program: zj.Program, state: zj.TrainState, ema: bool) -> Any:
    """Return float32 parameters, or averages, with stacks of the layers that are read one by one.

    Also check the order in which the pieces come.
    """
    pieces = dict(program.iter_params(state, ema=ema))
    layers = [f"blocks/{layer}" for layer in range(program.model.num_layers)]
    assert list(pieces) == ["embed", *layers, "head"]
    pieces = jax.device_get(pieces)
    blocks = jax.tree.map(lambda *leaves: np.stack(leaves), *(pieces[name] for name in layers))
    return {"embed": pieces["embed"], "blocks": blocks, "head": pieces["head"]}
