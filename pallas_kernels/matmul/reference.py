"""The specification of `matmul`, in float32: products, bias, accumulation, activation, gate.

    z_i[M, N] = x[M, K] @ w_i[K, N] + bias_i[N] + accumulate_i[M, N]
    y = f(z_0)  or, with two weights,  f(z_0) * z_1

with f the identity, gelu (its tanh form, as in jax.nn.gelu and Flax) or silu. One weight is a dense
layer; two are a gated linear unit (Shazeer, arXiv:2002.05202): SwiGLU with silu, GeGLU with gelu.
Accumulated arrays are added before the activation, as in cuBLASLt and CUTLASS: a product over tiles
of K keeps its sums in float32 and applies the activation with the last tile.

JAX derives the gradients.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda z: z,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Form:
    """The operations after the products.

    Attributes:
      activation: a key of `ACTIVATIONS`.
      dtype: dtype of the result.
    """

    activation: str | None
    dtype: jnp.dtype

    def join(self, products: Sequence[jax.Array]) -> jax.Array:
        """Return y from z, both float32 and of any shape: apply activation and gate."""
        y = ACTIVATIONS[self.activation](products[0])
        return y if len(products) == 1 else y * products[1]


def matmul(
    form: Form,
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    accumulates: Sequence[jax.Array],
    num_parts: int = 0,
) -> jax.Array:
    """Return y[M, N] for x[M, K] and one or two of w[K, N], bias[N] and accumulate[M, N].

    With `num_parts` = P > 0, return the parts of the sum, y[P, M, N].
    """
    wide = x.astype(jnp.float32)
    # By default accelerators multiply float32 at reduced precision (TF32 on GPUs).
    products = [
        product(wide, w.astype(jnp.float32), num_parts, precision=jax.lax.Precision.HIGHEST)
        for w in weights
    ]
    for terms in (biases, accumulates):
        if terms:
            products = [
                z + term.astype(jnp.float32) for z, term in zip(products, terms, strict=True)
            ]
    return form.join(products).astype(form.dtype)


def product(x: jax.Array, w: jax.Array, num_parts: int, **options: Any) -> jax.Array:
    """Return x[M, K] w[K, N]; in P parts, x[M, P, K / P] w[P, K / P, N] -> y[P, M, N]."""
    if not num_parts:
        return jnp.dot(x, w, **options)
    x = x.reshape(len(x), num_parts, -1)
    w = w.reshape(num_parts, -1, w.shape[1])
    return jax.lax.dot_general(x, w, (((2,), (1,)), ((1,), (0,))), **options)
