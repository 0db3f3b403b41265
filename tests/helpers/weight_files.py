"""Small programs to export and import weights of, and the names of their trees elsewhere."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matrix_of_checkpoints import numbers

import zerojax as zj


def awkward() -> zj.Model:
    """Return a model with lists, a scalar, an empty leaf, and names with unusual characters."""

    def init(key: jax.Array) -> Any:
        return {
            "layers": [
                {"w": jax.random.normal(jax.random.fold_in(key, i), (6, 4 + i))} for i in range(2)
            ],
            "gate": jnp.float32(0.25),
            "none": jnp.zeros((0, 3)),
            'it\'s "odd" / here': jnp.arange(3.0) / 3,
            "numbers": {7: {"Ä": jnp.ones((2, 2, 2)) / 7}},
        }

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        del key
        total = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
        return jnp.mean(batch["x"]) * total

    return zj.Model(init, loss)


AWKWARD = {
    "layers.0.w": "weights['layers'][0]['w']",
    "layers.1.w": "weights['layers'][1]['w']",
    "gate": "weights['gate']",
    "none": "weights['none']",
    'it\'s "odd" / here': "weights['it\\'s \"odd\" / here']",
    "numbers.7.Ä": "weights['numbers'][7]['Ä']",
}
"""Names in a checkpoint, by the names that other libraries see."""


def program_of(
    model: Any, tx: optax.GradientTransformation | None = None, devices: int = 1, **fields: Any
) -> zj.Program:
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    return zj.build_train_step(
        model, optax.sgd(0.1) if tx is None else tx, zj.ZeroConfig(**fields), mesh
    )


def save(
    program: zj.Program, state: zj.TrainState, directory: pathlib.Path
) -> dict[str, np.ndarray]:
    """Write a checkpoint, and return its numbers."""
    with zj.Checkpointer(directory) as ckpt:
        ckpt.save(program, state)
    return numbers(directory, int(state.step))
