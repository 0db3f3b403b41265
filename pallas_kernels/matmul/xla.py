"""`matmul` in XLA: products of narrow inputs summed in float32 (cuBLAS on GPUs).

XLA fuses the other operations as it sees fit.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.reference import Form, product


def matmul(
    form: Form,
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    accumulates: Sequence[jax.Array],
    keeps_products: bool,
    num_parts: int = 0,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return y[M, N] and, if `keeps_products`, the z_i[M, N], all in the result's dtype.

    With `num_parts` = P > 0, return the parts of the sum, y[P, M, N].
    """
    products = [product(x, w, num_parts, preferred_element_type=jnp.float32) for w in weights]
    for terms in (biases, accumulates):
        if terms:
            products = [
                z + term.astype(jnp.float32) for z, term in zip(products, terms, strict=True)
            ]
    residuals = tuple(z.astype(form.dtype) for z in products) if keeps_products else ()
    return form.join(products).astype(form.dtype), residuals
