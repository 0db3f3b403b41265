"""Set up the problem in JAX: the model of examples/gpt.py, the optimizer, and the timed loop.

The model has the problem's weights.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from problem import Problem, batches, weight
from usage import disk_bytes, peak_resident_bytes

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

Tree = dict[Any, Any]


def gpt_config(p: Problem) -> Any:
    """Return the problem's gpt.GPTConfig."""
    import gpt
    import jax.numpy as jnp

    return gpt.GPTConfig(
        layers=p.layers, hidden=p.hidden, heads=p.heads, seq=p.seq, vocab=p.vocab, tied=False,
        dtype=jnp.bfloat16 if p.precision == "bf16" else jnp.float32,
    )  # fmt: skip


def optimizer(p: Problem) -> Any:
    """Return the problem's AdamW."""
    import optax

    return optax.adamw(p.learning_rate, b2=0.95, weight_decay=0.1)


def norm(p: Problem, name: str) -> Tree:
    """Return the scale and the bias of a norm."""
    return {"scale": weight(p, f"{name}.weight"), "bias": weight(p, f"{name}.bias")}


def flax_block(p: Problem, i: int) -> Tree:
    """Return the initial weights of block i of examples/gpt.py."""
    heads, width = p.heads, p.hidden // p.heads

    def dense(name: str) -> Tree:
        w, b = weight(p, f"{name}.weight"), weight(p, f"{name}.bias")
        # torch's rows are [3, heads, width]; the Flax block's are [heads, 3, width].
        if name.endswith("qkv"):
            w = w.reshape(3, heads, width, -1).swapaxes(0, 1).reshape(w.shape)
            b = b.reshape(3, heads, width).swapaxes(0, 1).reshape(b.shape)
        return {"kernel": np.ascontiguousarray(w.T), "bias": b}

    parts = {name: dense(f"blocks.{i}.{name}") for name in ("qkv", "proj", "fc", "out")}
    return parts | {name: norm(p, f"blocks.{i}.{name}") for name in ("ln1", "ln2")}


def flax_embed(p: Problem) -> Tree:
    """Return the initial weights of the embedding of examples/gpt.py."""
    return {
        "token": {"embedding": weight(p, "wte.weight")},
        "position": {"embedding": weight(p, "wpe.weight")},
    }


def flax_head(p: Problem) -> Tree:
    """Return the initial weights of the head of examples/gpt.py."""
    return {
        "norm": norm(p, "ln_f"),
        "out": {"kernel": np.ascontiguousarray(weight(p, "head.weight").T)},
    }


def flax_tree(p: Problem) -> Tree:
    """Return the initial weights as the parameter tree of examples/gpt.py's unrolled form."""
    return {
        "embed": flax_embed(p),
        "blocks": {i: flax_block(p, i) for i in range(p.layers)},
        "head": flax_head(p),
    }


def born_with_weights(model: Any, p: Problem, key: Any) -> Any:
    """Return the LayeredModel whose `init(key)` creates the problem's weights in any tier.

    Layers are created one at a time. An init function recognizes its layer by its key; a model
    whose parameters are the keys themselves shows which key each layer gets.
    """
    import jax

    from zerojax.models import BLOCKS, init_layered

    def initial(abstract: Any, make: Callable[[Any], Tree]) -> Callable[[Any], Any]:
        def numbers(key_data: Any) -> Any:
            tree = make(bytes(np.asarray(key_data)))
            return jax.tree.map(lambda a, shape: a.astype(shape.dtype), tree, abstract)

        return lambda key: jax.pure_callback(numbers, abstract, jax.random.key_data(key))

    inits = ("init_embed", "init_block", "init_head")
    keys = init_layered(
        dataclasses.replace(model, **dict.fromkeys(inits, jax.random.key_data)), key
    )[BLOCKS]
    layer_of = {bytes(np.asarray(data)): i for i, data in enumerate(keys)}
    makes = (
        lambda _: flax_embed(p),
        lambda data: flax_block(p, layer_of[data]),
        lambda _: flax_head(p),
    )
    made = {
        name: initial(jax.eval_shape(getattr(model, name), key), make)
        for name, make in zip(inits, makes, strict=True)
    }
    return dataclasses.replace(model, **made)


def time_steps(step: Callable[[Any, Any], Any], state: Any, p: Problem) -> dict[str, Any]:
    """Train over the problem's batches and return figures for a table.

    They include the loss and the seconds of each step.
    """
    import jax

    losses, seconds, disk = [], [], []
    for tokens, targets in batches(p):
        batch = {"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32)}
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
        losses.append(float(metrics["loss"]))
        disk.append(disk_bytes())
    return {
        "losses": losses,
        "seconds": seconds,
        "disk_bytes": disk,
        "resident_bytes": peak_resident_bytes(),
        "version": f"jax {jax.__version__}",
        "hardware": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
    }
