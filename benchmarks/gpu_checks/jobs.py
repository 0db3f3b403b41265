"""Build and train a mix of tiers as a program: a GPT, its optimizer, its data."""

import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np
from problem import Problem, batches

from gpu_checks.mixes import Fields

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The code of this repository is measured, installed or not.
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

EPSILON = 1e-3  # of Adam, so that a gradient of mere rounding errors does not move an element
NOISE = 0.02  # scale of the noise added to the GPT's initial values, above all to biases

Trained = tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]
"""Result of `Job.train`: losses, and the parameters' leaves before and after training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One program: a GPT, an optimizer and a config.

    Attributes:
      name: name of the job's rows.
      problem: sizes of the GPT and of its data.
      fields: fields of the ZeroConfig.
      gradients: whether to take steps of gradient descent at rate 1, with blocks that name a value.
      mlp_tiles: number of tiles of the GPT's MLPs; 0 means dense layers.
    """

    name: str
    problem: Problem
    fields: Fields
    gradients: bool = False
    mlp_tiles: int = 0

    @property
    def on_host(self) -> bool:
        """Whether the optimizer runs on the host."""
        return self.fields.get("update_on") == "host"

    @property
    def state_bytes(self) -> int:
        """Upper bound of the host memory that the program keeps, in bytes.

        It counts states and gradients, two float32 copies, and activations.
        """
        p = self.problem
        params = p.layers * 12 * p.hidden**2 + (2 * p.vocab + p.seq) * p.hidden
        return 24 * params + 8 * p.layers * p.batch * p.seq * p.hidden

    def build(self, mesh: Any) -> Any:
        """Return the program for a mesh.

        Raises:
          NotImplementedError: if this version of zerojax does not support the config.
        """
        import gpt
        import jax.numpy as jnp
        import optax

        import zerojax as zj

        p = self.problem
        c = gpt.GPTConfig(
            layers=p.layers, hidden=p.hidden, heads=p.heads, seq=p.seq, vocab=p.vocab, tied=False,
            dtype=jnp.bfloat16 if p.precision == "bf16" else jnp.float32, mlp_tiles=self.mlp_tiles,
        )  # fmt: skip
        model = without_zeros(gpt.layered_gpt(c))
        tx = optax.adamw(p.learning_rate, b2=0.95, eps=EPSILON, weight_decay=0.1)
        if self.gradients:
            model, tx = with_a_name(model), optax.sgd(1.0)
        fields: dict[str, Any] = {"precision": p.precision, **self.fields}
        return zj.build_train_step(model, tx, zj.ZeroConfig(**fields), mesh)

    def data(self) -> list[dict[str, np.ndarray]]:
        """Return the batch of each step."""
        return [
            {"tokens": t.astype(np.int32), "targets": u.astype(np.int32)}
            for t, u in batches(self.problem)
        ]

    def train(self, mesh: Any) -> Trained:
        """Train from key 0 and return the losses and the parameters before and after.

        Losses are float32[steps]; parameters are lists of float32 leaves.
        """
        import jax

        # TF32 results would differ between programs.
        with jax.default_matmul_precision("highest"), self.build(mesh) as program:
            state = program.init(jax.random.key(0))
            before, losses = leaves_of(program, state), []
            for batch in self.data():
                state, metrics = program.step(state, batch)
                losses.append(jax.device_get(metrics["loss"]))
            return np.array(losses, np.float32), before, leaves_of(program, state)


def without_zeros(model: Any) -> Any:
    """Return a LayeredModel whose leaves do not start near zero.

    Differences are divided by a leaf's largest magnitude, which must not be tiny.
    """
    import jax

    def shaken(init: Any) -> Any:
        def made(key: Any) -> Any:
            leaves, tree = jax.tree.flatten(init(key))
            keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
            return tree.unflatten(
                [
                    a + NOISE * jax.random.normal(k, a.shape)
                    for a, k in zip(leaves, keys, strict=True)
                ]
            )

        return made

    inits = {
        name: shaken(getattr(model, name)) for name in ("init_embed", "init_block", "init_head")
    }
    return dataclasses.replace(model, **inits)


def with_a_name(model: Any) -> Any:
    """Return a LayeredModel whose blocks name a value, "squashed", that their derivative reads."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    def block(params: Any, x: Any, key: Any) -> Any:
        return model.block(
            params, jax.tree.map(lambda a: checkpoint_name(jnp.tanh(a), "squashed"), x), key
        )

    return dataclasses.replace(model, block=block)


def leaves_of(program: Any, state: Any) -> list[np.ndarray]:
    """Return the float32 parameters' leaves as numpy arrays, from any tier, with stacked layers."""
    import jax

    pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
    layers = [pieces.pop(f"blocks/{i}") for i in range(program.model.num_layers)]
    return jax.tree.leaves(
        {**pieces, "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}
    )


def one_device() -> Any:
    """Return a mesh of the first device."""
    import jax

    import zerojax as zj

    return zj.make_mesh(devices=jax.devices()[:1])


def platform_name() -> str:
    """Return "cpu" or "gpu"."""
    import jax

    return "cpu" if jax.default_backend() == "cpu" else "gpu"
