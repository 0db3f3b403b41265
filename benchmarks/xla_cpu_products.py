"""Reproduce slow gradients of XLA on CPUs when activations have two batch dims, in JAX alone.

    python benchmarks/xla_cpu_products.py

A dense layer over x[B, T, D], and the same layer over x reshaped to [B T, D], compute the same
numbers. The gradient of the weights sums over B and T. For two such dims, XLA for CPUs transposes
each operand until these dims are last, and fuses the equations that compute the operand into the
transpose. The fusion writes its result column by column, and takes several times as long as the
product. For one dim there is no transpose.

Each case runs both forms in turn, checks that they agree, and counts the transposes in the compiled
programs.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")
B, T, D, F, RANK = 4, 256, 512, 1376, 16


def dense(x: Any, weights: Any) -> jax.Array:
    """Return a gated MLP of x[..., D]."""
    gate, up, down = weights
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def adapted(x: Any, weights: Any) -> jax.Array:
    """Return the same MLP with a trainable low-rank adapter on each frozen weight."""

    def product(x: Any, n: int) -> jax.Array:
        a, b = weights[n]
        return x @ BASE[n] + (x @ a) @ b

    return product(jax.nn.silu(product(x, 0)) * product(x, 1), 2)


def draw(n: int, *shape: int) -> jax.Array:
    """Return normal numbers, scaled so that products have a variance of about 1."""
    return jax.random.normal(jax.random.key(n), shape) / shape[0] ** 0.5


SHAPES = ((D, F), (D, F), (F, D))
BASE = [draw(n, *shape) for n, shape in enumerate(SHAPES)]
CASES: dict[str, tuple[Callable[[Any, Any], jax.Array], Any]] = {
    "all weights of a gated MLP": (dense, BASE),
    "adapters of rank 16 beside them": (
        adapted,
        [(draw(3, d, RANK), draw(4, RANK, f)) for d, f in SHAPES],
    ),
}


def layers(function: Callable[[Any, Any], jax.Array], is_flat: bool) -> Any:
    """Return a jitted function for the gradients of four such layers over x[B, T, D]."""

    def loss(weights: Any, x: Any) -> jax.Array:
        x = x.reshape(B * T, D) if is_flat else x
        for _ in range(4):
            x = x + function(x, weights)
        return jnp.mean(x**2)

    return jax.jit(jax.grad(loss))


def main() -> None:
    """Time each case and print a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    x = draw(9, B, T, D)
    print(f"jax {jax.__version__}, x[{B}, {T}, {D}], four layers; ms of the gradients")
    for name, (function, weights) in CASES.items():
        runs = {
            form: layers(function, form == "one batch dim")
            for form in ("two batch dims", "one batch dim")
        }
        results = [jax.block_until_ready(run(weights, x)) for run in runs.values()]
        away = max(
            float(jnp.max(jnp.abs(a - b)))
            for a, b in zip(*map(jax.tree.leaves, results), strict=True)
        )
        seconds: dict[str, list[float]] = {form: [] for form in runs}
        for _ in range(options.repeats):
            for form, run in runs.items():
                start = time.perf_counter()
                jax.block_until_ready(run(weights, x))
                seconds[form].append(time.perf_counter() - start)
        told = []
        for form, run in runs.items():
            text = run.lower(weights, x).compile().as_text() or ""
            count = len(re.findall(r" = f32\[[\d,]+\]\S* copy\(%transpose", text))
            told.append(
                f"{form} {1e3 * statistics.median(seconds[form]):.0f} ms, {count} transposes"
            )
        ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(f"{name}: {'; '.join(told)}; ratio {ratio:.2f}; largest difference {away:.1e}")


if __name__ == "__main__":
    main()
