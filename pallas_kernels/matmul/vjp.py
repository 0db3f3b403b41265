"""The derivative of `matmul`: one rule for the kernel and for XLA's form.

    dz_i = d/dz_i join(z_0, ..) . dy            elementwise in float32, then rounded to x's dtype
    dx = sum_i dz_i @ w_i^T                     summed in float32
    dw_i = x^T @ dz_i,  dbias_i = sum_m dz_i,  daccumulate_i = dz_i

The residuals are x, the weights and, if there is an activation or a gate, the z_i in the result's
dtype, which the forward kernel writes in addition to y. Recomputing them would be a third product;
to save their memory, wrap the layer in `jax.checkpoint`.

Both products of backward are plain, with nothing before or after them that a kernel could fuse, and
with transposed operands that cuBLAS takes as they are, so they are left to XLA. JAX's own rule for
a product of bfloat16 that sums in float32 would multiply in float32; this rule keeps both operands
narrow.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels.dispatch import log_choice
from pallas_kernels.matmul import mosaic, xla
from pallas_kernels.matmul.config import Config
from pallas_kernels.matmul.reference import Form
from pallas_kernels.matmul.split import Split

Terms = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """Static arguments of a call.

    Attributes:
      form: operations after the products.
      config: sizes of the kernel; None if XLA computes the call.
      is_named: whether the caller named the implementation.
      split: how the arrays are split over a mesh, or None.
      bias_dtype: dtype of the biases, or None.
      accumulate_dtype: dtype of the accumulated arrays, or None.
    """

    form: Form
    config: Config | None
    is_named: bool
    split: Split | None
    bias_dtype: jnp.dtype | None
    accumulate_dtype: jnp.dtype | None

    def run(
        self, x: jax.Array, weights: Terms, biases: Terms, accumulates: Terms, keeps_products: bool
    ) -> tuple[jax.Array, Terms]:
        """Return y and, if `keeps_products`, the products."""
        operands = (x, weights, biases, accumulates)
        by_xla = functools.partial(
            xla.matmul, self.form, keeps_products=keeps_products, num_parts=self.num_parts
        )
        if self.config is None:
            return by_xla(*operands)
        by_kernel = functools.partial(self._run_kernel, self.config, keeps_products)
        if self.is_named:
            return by_kernel(*operands)
        # The measurements are of single products, not of batches. Also, jax 0.10 cannot batch a
        # kernel.
        unless_batched = jax.custom_batching.custom_vmap(by_kernel)

        @unless_batched.def_vmap
        def batched(axis_size: int, in_batched: Any, *operands: Any) -> tuple[Any, Any]:
            log_choice(
                "matmul",
                "xla",
                "not mosaic: the call is batched by jax.vmap, and no measurement is of that",
            )
            axes = tuple(jax.tree.map(lambda is_batched: 0 if is_batched else None, in_batched))
            results = jax.vmap(by_xla, axes, axis_size=axis_size)(*operands)
            return results, jax.tree.map(lambda _: True, results)

        return unless_batched(*operands)

    def _run_kernel(
        self,
        config: Config,
        keeps_products: bool,
        x: jax.Array,
        weights: Terms,
        biases: Terms,
        accumulates: Terms,
    ) -> tuple[jax.Array, Terms]:
        kernel = functools.partial(mosaic.matmul, self.form, config, keeps_products=keeps_products)
        if self.split is None:
            return kernel(x, weights, biases, accumulates)

        def on_one_device(
            x: jax.Array, weights: Terms, biases: Terms, accumulates: Terms
        ) -> tuple[jax.Array, Terms]:
            if not self.num_parts:
                return kernel(x, weights, biases, accumulates)
            y, products = kernel(x, weights, biases, tuple(a[0] for a in accumulates))
            return y[None], products

        # Nothing inside is differentiated, so varying axes need not be tracked, and without
        # tracking the accumulated array is updated in place.
        ins = (self.split.x, self.split.w, self.split.bias, self.split.y)
        outs = (self.split.y, self.split.y)
        mapped = jax.shard_map(
            on_one_device, mesh=self.split.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )
        return mapped(x, weights, biases, accumulates)

    @property
    def num_parts(self) -> int:
        """Number of parts P of the sum, or 0 if K is not split."""
        return 0 if self.split is None else self.split.num_parts


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    call: Call, x: jax.Array, weights: Terms, biases: Terms, accumulates: Terms
) -> jax.Array:
    """Return y[M, N] for x[M, K] and one or two of w[K, N], bias[N] and accumulate[M, N].

    Absent terms are ().
    """
    return call.run(x, weights, biases, accumulates, keeps_products=False)[0]


def _forward(
    call: Call, x: jax.Array, weights: Terms, biases: Terms, accumulates: Terms
) -> tuple[jax.Array, Any]:
    keeps_products = call.form.activation is not None or len(weights) > 1
    y, products = call.run(x, weights, biases, accumulates, keeps_products)
    return y, (x, weights, products)


def _backward(call: Call, residuals: Any, dy: jax.Array) -> tuple[jax.Array, Terms, Terms, Terms]:
    x, weights, products = residuals
    if call.num_parts:
        dx, dw = _derivative_of_parts(call, x, weights[0], dy.astype(x.dtype))
        return dx, (dw,), (), _cast((dy,), call.accumulate_dtype)
    dzs = (dy.astype(jnp.float32),)
    # If no products were saved, z is y and its cotangent is dy.
    if products:
        wide = [z.astype(jnp.float32) for z in products]
        _, pullback = jax.vjp(lambda *z: call.form.join(z), *wide)
        dzs = pullback(*dzs)
    # Rounded only for the two products: the biases' gradients are sums of the float32 values.
    narrow = [dz.astype(x.dtype) for dz in dzs]  # [M, N] each
    # On a mesh, devices sum these products in the dtype of the partial products: x's dtype, as for
    # a dense layer.
    dtype = jnp.float32 if call.split is None else x.dtype
    # [M, N] [K, N] -> [M, K]
    contributions = [_contract(dz, w, 1, 1, dtype) for dz, w in zip(narrow, weights, strict=True)]
    # The contributions of two weights are added before they are rounded.
    dx = functools.reduce(jnp.add, contributions).astype(x.dtype)
    # [M, K] [M, N] -> [K, N]
    dweights = tuple(_contract(x, dz, 0, 0, dtype).astype(x.dtype) for dz in narrow)
    dbiases = ()
    if call.bias_dtype is not None:
        dbiases = tuple(dz.sum(0).astype(call.bias_dtype) for dz in dzs)
    return dx, dweights, dbiases, _cast(dzs, call.accumulate_dtype)


def _cast(arrays: Terms, dtype: jnp.dtype | None) -> Terms:
    """Return the arrays in a dtype; no arrays if it is None."""
    return () if dtype is None else tuple(array.astype(dtype) for array in arrays)


def _derivative_of_parts(
    call: Call, x: jax.Array, w: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return dx[M, K] and dw[K, N] for y[P, M, N].

    Each part of y reads its K / P columns of x and rows of w.
    """
    assert call.split is not None
    count = call.num_parts
    # All parts have the same cotangent, present on every device. Without the constraint, the
    # partitioner might split another dim of its copies.
    dy = jax.lax.with_sharding_constraint(dy, NamedSharding(call.split.mesh, call.split.y))
    xs = x.reshape(len(x), count, -1)
    ws = w.reshape(count, -1, w.shape[1])
    dx = jnp.einsum("pmn,pkn->mpk", dy, ws, preferred_element_type=x.dtype)
    dw = jnp.einsum("mpk,pmn->pkn", xs, dy, preferred_element_type=x.dtype)
    return dx.reshape(x.shape), dw.reshape(w.shape)


def _contract(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int, dtype: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=dtype)


matmul.defvjp(_forward, _backward)
