"""The derivative of `matmul`, one rule for the kernel and for XLA's form.

    dz_i = d/dz_i join(z_0, ..) . dy            elementwise in float32, then rounded to x's dtype
    dx = sum_i dz_i @ w_i^T                     summed in float32
    dw_i = x^T @ dz_i,  dbias_i = sum_m dz_i,  daccumulate_i = dz_i

Kept for it are x, the weights and, where there is an activation or a gate, the z_i in the result's
dtype, which the forward kernel writes beside y. To recompute them would be a third product; whoever
must not keep them wraps the layer in `jax.checkpoint`.

Both products of the backward pass are plain, with nothing before or after them that a kernel could
fuse and transposed operands that cuBLAS takes as they are: they are left to XLA. JAX's own rule for
a product of bfloat16 that sums in float32 would multiply in float32; this one keeps both operands
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
    """What is static about a call: its form, who computes it (`config`: the kernel; None: XLA),
    whether the caller named who, over which mesh, and the dtypes of its terms.
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
        """Return y, and the products where they are kept."""
        operands = (x, weights, biases, accumulates)
        by_xla = functools.partial(
            xla.matmul, self.form, keeps_products=keeps_products, num_parts=self.num_parts
        )
        if self.config is None:
            return by_xla(*operands)
        by_kernel = functools.partial(self._run_kernel, self.config, keeps_products)
        if self.is_named:
            return by_kernel(*operands)
        # What was measured speaks for one product, and not for as many as a batch has. And jax 0.10
        # batches no kernel.
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

        # Nothing is differentiated in there, so no axes need be followed; and unfollowed, what is
        # accumulated is in place.
        ins, outs = (
            (self.split.x, self.split.w, self.split.bias, self.split.y),
            (self.split.y, self.split.y),
        )
        mapped = jax.shard_map(
            on_one_device, mesh=self.split.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )
        return mapped(x, weights, biases, accumulates)

    @property
    def num_parts(self) -> int:
        """P, or 0."""
        return 0 if self.split is None else self.split.num_parts


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    call: Call, x: jax.Array, weights: Terms, biases: Terms, accumulates: Terms
) -> jax.Array:
    """Return y[M, N] for x[M, K] and one or two of w[K, N], bias[N] and accumulate[M, N]; terms
    that are absent are ().
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
        return (
            dx,
            (dw,),
            (),
            () if call.accumulate_dtype is None else (dy.astype(call.accumulate_dtype),),
        )
    dzs = (dy.astype(jnp.float32),)
    # Where none were kept z is y, and its cotangent is dy.
    if products:
        dzs = jax.vjp(lambda *z: call.form.join(z), *(z.astype(jnp.float32) for z in products))[1](
            *dzs
        )
    # Rounded for the two products alone: sums of biases are made of the float32 ones.
    narrow = [dz.astype(x.dtype) for dz in dzs]  # [M, N] each
    # On a mesh devices sum these products, in the dtype that they come in: that of x, as those of a
    # dense layer.
    dtype = jnp.float32 if call.split is None else x.dtype
    parts = [
        _contract(dz, w, 1, 1, dtype) for dz, w in zip(narrow, weights, strict=True)
    ]  # [M, N] [K, N] -> [M, K]
    # The parts of two weights are added before they are rounded.
    dx = functools.reduce(jnp.add, parts).astype(x.dtype)
    dweights = tuple(
        _contract(x, dz, 0, 0, dtype).astype(x.dtype) for dz in narrow
    )  # [M, K] [M, N] -> [K, N]
    dbiases = (
        () if call.bias_dtype is None else tuple(dz.sum(0).astype(call.bias_dtype) for dz in dzs)
    )
    daccumulates = (
        ()
        if call.accumulate_dtype is None
        else tuple(dz.astype(call.accumulate_dtype) for dz in dzs)
    )
    return dx, dweights, dbiases, daccumulates


def _derivative_of_parts(
    call: Call, x: jax.Array, w: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return dx[M, K] and dw[K, N] of y[P, M, N], whose parts each read their K / P columns of x
    and rows of w.
    """
    assert call.split is not None
    count = call.num_parts
    # The parts have one cotangent, which every device has. Left to itself, the partitioner may
    # split another dim of its copies.
    dy = jax.lax.with_sharding_constraint(dy, NamedSharding(call.split.mesh, call.split.y))
    xs, ws = x.reshape(len(x), count, -1), w.reshape(count, -1, w.shape[1])
    dx = jnp.einsum("pmn,pkn->mpk", dy, ws, preferred_element_type=x.dtype)
    dw = jnp.einsum("mpk,pmn->pkn", xs, dy, preferred_element_type=x.dtype)
    return dx.reshape(x.shape), dw.reshape(w.shape)


def _contract(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int, dtype: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=dtype)


matmul.defvjp(_forward, _backward)
