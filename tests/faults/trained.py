"""Small programs to train while system calls fail, and their results without faults."""

import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys
from matrix_of_checkpoints import numbers

import zerojax as zj
from zerojax.state import OnDisk
from zerojax.weights.importing import open_weights

FIRST, LAST = 2, 9
"""Steps at which an episode begins and ends."""
DATA = toys.batches(LAST + 1, size=2)
KEY = 7
BEST: dict[str, Any] = {"best_metric": "step", "best_mode": "max"}
"""The metric to rank by: the newest step is the best, so ranking keeps the same steps."""
EXPORTS = {"safetensors": zj.export_safetensors, "orbax": zj.export_orbax}


def small() -> zj.Model:
    """Return a model without stacks, which is saved and read in a few milliseconds."""

    def init(key: jax.Array) -> Any:
        return {"table": 0.1 * jax.random.normal(key, (24, 8)), "bias": jnp.zeros(3)}

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        del key
        x = params["table"][batch["tokens"]]  # [B, T, 8]
        return jnp.mean((x @ params["table"].T) ** 2) + jnp.sum(
            (params["bias"] - batch["weight"]) ** 2
        )

    return zj.Model(init, loss)


def layered() -> zj.LayeredModel:
    """Return a model with two layers, and thus few records of each kind."""

    def embed(p: Any, batch: Any, key: Any) -> jax.Array:
        del key
        return p["table"][batch["tokens"]]  # [B, T, 8]

    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        return x + jnp.tanh(x @ p["w"] + p["b"])

    def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
        del p_embed, key
        return jnp.mean((x @ p["w"] - batch["weight"]) ** 2)

    return zj.LayeredModel(
        2,
        lambda key: {"table": jax.random.normal(key, (24, 8))}, embed,
        lambda key: {"w": jax.random.normal(key, (8, 8)) / 3, "b": jnp.zeros(8)}, block,
        lambda key: {"w": jax.random.normal(key, (8, 2))}, head,
    )  # fmt: skip


NVME = {"params": "nvme", "opt_state": "nvme"}
TOYS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "device": (small, {}),
    "nvme": (layered, NVME),
    "nvme_tensorstore": (layered, NVME | {"io": "tensorstore"}),
    "nvme_all": (layered, NVME | {"grads": "nvme", "activations": "nvme", "prefetch_distance": 2}),
    "in_forward": (layered, NVME | {"grads": "nvme", "update": "in_forward", "clip_norm": 1.0}),
}


class Found(Exception):  # noqa: N818
    """A check failed.

    Attributes:
      what: kind of failure.
    """

    def __init__(self, what: str, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.what, self.cause = what, cause


class Toy:
    """A program, and the results of its training without faults.

    Attributes:
      program: the program, built once.
      leaves_updates: whether its states hold an update that the next step applies. Then so do its
        checkpoints, which are not exported.
      held: all numbers of the state, by step.
      saved: all numbers of the checkpoint, by step.
      losses: loss of the step that made the state, by step.
      read: parameters and a loss from `iter_params` and `eval`, by step.
      template: a directory of checkpoints with steps 1 and FIRST.
      weights: an export of step FIRST, by format.
      imported: all numbers of the state imported from it.
      counts: number of calls of each kind, by operation.
    """

    def __init__(self, name: str, root: pathlib.Path) -> None:
        """Build the program, with its folders below `root`."""
        model, fields = TOYS[name]
        self.name, self.root = name, root / name
        self.root.mkdir()
        self.on_disk = "nvme" in fields.values()
        self.leaves_updates = fields.get("update") == "in_forward"
        self.swap = self.root / "swap"
        self.swap.mkdir()
        config = zj.ZeroConfig(
            stage=3, **fields, **({"swap_dir": str(self.swap)} if self.on_disk else {})
        )
        self.program = zj.build_train_step(
            model(), optax.adam(1e-2), config, zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
        )
        self.held, self.saved, self.losses, self.read = {}, {}, {}, {}
        self.counts: dict[str, dict[str, int]] = {}
        with zj.Checkpointer(self.root / "all", **BEST) as ckpt:
            state = self.program.init(jax.random.key(0))
            for step in range(LAST + 1):
                if step:
                    state, metrics = self.program.step(state, DATA[step])
                    self.losses[step] = float(metrics["loss"])
                self.held[step], self.read[step] = self.numbers(state), self.params_and_loss(state)
                ckpt.save(self.program, state, metrics={"step": step})
            ckpt.wait()
        self.saved = {step: numbers(self.root / "all", step) for step in self.held}
        self.template = self.root / "template"
        self.template.mkdir()
        for step in (1, FIRST):
            shutil.copytree(self.root / "all" / str(step), self.template / str(step))
        if self.leaves_updates:
            return
        self.weights = {
            "safetensors": self.root / "weights.safetensors",
            "orbax": self.root / "weights.orbax",
        }
        for form, path in self.weights.items():
            EXPORTS[form](self.template, path)
        self.exported = {form: weights_in(path) for form, path in self.weights.items()}
        self.imported = self.numbers(
            zj.import_params(self.program, self.weights["safetensors"], key=jax.random.key(KEY))
        )

    def params_and_loss(self, state: zj.TrainState) -> dict[str, np.ndarray]:
        """Return the results of `iter_params` and `eval`."""
        found = {"loss": np.array(self.program.eval(state, DATA[0]))}
        for name, tree in self.program.iter_params(state):
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                found[f"{name}{jax.tree_util.keystr(path)}"] = np.array(leaf)
        return found

    def numbers(self, state: zj.TrainState) -> dict[str, np.ndarray]:
        """Return all contents of a state, in memory and on disk.

        Raises:
          SwapError: if a record was not written.
        """
        found = {}
        leaves = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda node: isinstance(node, OnDisk)
        )[0]
        for path, leaf in leaves:
            if not isinstance(leaf, OnDisk):
                is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                found[jax.tree_util.keystr(path)] = np.array(
                    jax.random.key_data(leaf) if is_key else leaf
                )
        if self.program.swap is not None:
            engine = self.program.swap.engine
            engine.flush()
            engine.check()
            for records in self.program.swap.disk.kinds.values():
                for rank in self.program.swap.disk.ranks() if records.lifetime == "state" else ():
                    store = engine.find_store(records.kind, rank)
                    for layer in range(store.num_layers):
                        views = store.format.views(np.fromfile(store.record_path(layer), np.uint8))
                        found |= {
                            f"{records.kind} {rank} {layer} {i}": np.array(view) for i, view in enumerate(views)
                        }  # fmt: skip
        return found


def weights_in(path: pathlib.Path) -> dict[str, np.ndarray]:
    file = open_weights(path)
    return {
        n: np.array(file.read(n, tuple((0, size) for size in t.shape)))
        for n, t in file.tensors.items()
    }


def require_same(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], what: str
) -> None:
    """Raise Found unless all numbers are the same, bit for bit."""
    if sorted(actual) != sorted(expected):
        raise Found(
            "wrong number",
            f"{what} has extra or missing entries: {sorted(set(actual) ^ set(expected))}",
        )
    for name, value in expected.items():
        found = actual[name]
        if (
            found.dtype != value.dtype
            or found.shape != value.shape
            or found.tobytes() != value.tobytes()
        ):
            raise Found("wrong number", f"{what}: {name} differs")
