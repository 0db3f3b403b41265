"""Compare gradients reduced in bfloat16 and in float32 with float64, on 8 simulated devices.

    python benchmarks/reductions.py --save benchmarks/results/reductions_cpu2_202611.md

Both models run at stage 3 in bfloat16. In the first, each parameter meets the data once and the
loss is linear, so cotangents are exact: the errors come only from sums, and show how they grow with
the number of tokens. The second is a stack of blocks. Its activations and cotangents are bfloat16
with either reduction, so most of its error is common to both. The reference is the same loss in
float64, at the same rounded parameters and data.
"""

import argparse
import datetime
import math
import os
import pathlib
import platform
import sys
from typing import Any, Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
jax.config.update("jax_num_cpu_devices", 8)

import zerojax as zj  # noqa: E402

DEVICES, HIDDEN, VOCAB, LAYERS = 8, 64, 128, 4
REDUCTIONS: tuple[Literal["float32"] | None, ...] = (None, "float32")
LEAVES = {
    "matrix": (HIDDEN, HIDDEN),
    "bias": (HIDDEN,),
    "scale": (HIDDEN,),
    "table": (VOCAB, HIDDEN),
}


def draw(key: Any, shape: tuple[int, ...]) -> Any:
    """Return the random initial value of a parameter."""
    return jax.random.normal(key, shape) / np.sqrt(shape[0] if len(shape) > 1 else 1)


def init(key: Any) -> Any:
    """Return one parameter leaf of each kind."""
    return {
        name: draw(jax.random.fold_in(key, n), shape)
        for n, (name, shape) in enumerate(LEAVES.items())
    }


def inner(a: Any, b: Any) -> Any:
    """Return the inner product of two arrays; its cotangents are exact."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.sum(a.astype(wide) * b.astype(wide))


def linear(p: Any, batch: Any, key: Any) -> Any:
    """Return a loss that is linear in each leaf."""
    del key
    x, c = batch["x"].astype(p["matrix"].dtype), batch["c"]
    return (
        inner(x @ p["matrix"], c) + inner(jnp.zeros_like(x) + p["bias"], c)
        + inner(x * p["scale"], c)
        + inner(p["table"][batch["tokens"]], c)
    )  # fmt: skip


def init_blocks(key: Any) -> Any:
    """Return the parameters of `blocks`."""
    keys = jax.random.split(key, LAYERS + 1)
    blocks = [{name: a for name, a in init(k).items() if name != "table"} for k in keys[1:]]
    return {"table": draw(keys[0], LEAVES["table"]), "blocks": blocks}


def blocks(p: Any, batch: Any, key: Any) -> Any:
    """Return the loss of residual blocks with a tied embedding."""
    del key
    x = p["table"][batch["tokens"]] * math.sqrt(VOCAB)
    for b in p["blocks"]:
        x = x + jnp.tanh((x * b["scale"]) @ b["matrix"] + b["bias"])
    logits = (x @ p["table"].T).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(batch["tokens"], 1, 1))
    )


def data(tokens: int) -> Any:
    """Return a batch with `tokens` tokens per device, which bfloat16 represents exactly."""
    random = np.random.default_rng(tokens)
    rows, seq = DEVICES * max(1, tokens // 64), min(64, tokens)

    def normal():
        return np.asarray(
            jnp.asarray(random.standard_normal((rows, seq, HIDDEN)), jnp.bfloat16), np.float32
        )

    return {
        "tokens": random.integers(0, VOCAB, (rows, seq), np.int32),
        "x": normal(),
        "c": normal(),
    }


def errors(
    init: Any, loss: Any, batch: Any, reduce_dtype: Literal["float32"] | None
) -> dict[str, float]:
    """Return the gradients' relative errors by kind of leaf: norms over all leaves of a kind."""
    config = zj.ZeroConfig(stage=3, precision="bf16", reduce_dtype=reduce_dtype)
    program = zj.build_train_step(
        zj.Model(init, loss), optax.sgd(1.0), config, zj.make_mesh(fsdp=DEVICES)
    )
    state = program.init(jax.random.key(0))
    grads = jax.device_get(program.grads(state, batch)[1])
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: np.asarray(a, np.float64), jax.device_get(state.params))
        batch = {name: np.float64(a) if a.dtype == np.float32 else a for name, a in batch.items()}
        exact = jax.device_get(jax.jit(jax.grad(loss), static_argnums=2)(params, batch, None))
    squares: dict[str, Any] = {}
    for (path, e), g in zip(
        jax.tree_util.tree_flatten_with_path(exact)[0], jax.tree.leaves(grads), strict=True
    ):
        squares[path[-1].key] = squares.get(path[-1].key, 0) + np.array(
            [np.sum((g - e) ** 2), np.sum(e**2)]
        )
    return {name: float(np.sqrt(wrong / whole)) for name, (wrong, whole) in squares.items()}


def rows(tokens: int) -> list[str]:
    """Return the lines of the table for `tokens` tokens per device."""
    batch, lines = data(tokens), []
    for name, model in (
        ("sums alone", (init, linear)),
        (f"{LAYERS} blocks", (init_blocks, blocks)),
    ):
        narrow, wide = (errors(*model, batch, dtype) for dtype in REDUCTIONS)
        for kind in LEAVES:
            ratio = f"{narrow[kind] / wide[kind]:.3g}"
            lines.append(
                f"| {name} | {tokens} | {kind} | {narrow[kind]:.1e} | {wide[kind]:.1e} | {ratio} |"
            )
    return lines


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[64, 1024, 8192],
        help="numbers of tokens per device",
    )
    parser.add_argument("--save", type=pathlib.Path, help="file to write")
    options = parser.parse_args()
    lines = [
        f"# Gradients reduced in bfloat16 and in float32, {datetime.date.today():%Y-%m}",
        "",
        "Relative errors of gradients against float64, ||g - g64|| / ||g64|| over the leaves of "
        "a kind: stage 3, bf16, "
        f"{DEVICES} simulated devices, hidden {HIDDEN}, vocabulary {VOCAB}.",
        f"jax {jax.__version__}, Python {platform.python_version()}, on a CPU. "
        f"Command: `python {' '.join(sys.argv)}`.",
        "",
        "On CPUs XLA adds bfloat16 arrays of several devices in float32, and rounds once. "
        "Within a device it rounds each step "
        "of a sum that is no product. On GPUs both differ.",
        "",
        "| model | tokens a device | leaves | bfloat16 | float32 | ratio |",
        "|---|---|---|---|---|---|",
        *(line for tokens in options.tokens for line in rows(tokens)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.save:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
