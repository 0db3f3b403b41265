"""A product with its bias, accumulation, activation and gate: `matmul`, one kernel on Hopper.

Comparison with existing kernels (jax 0.10.2 and 0.12.0, and tokamax of 2026):

- jax's `hopper_matmul_mgpu` has no bias, activation or gate. It accumulates only onto arrays of the
  result's dtype, stalls once per chunk, and does not write in place. M, N and K must be multiples
  of the blocks, and the pipeline drains and fills between two tiles. It has no gradient and no
  splitting over devices. Clusters share loads.
- tokamax's `gated_linear_unit` for sm90 has an activation but no bias, and takes the two weights of
  a gate as one array `[K, 2, N]`. It does not accumulate. Blocks, pipeline and clusters are as in
  jax. It has a gradient and no splitting over devices.
- Here there are gelu, silu and a bias; a gate takes two arrays, as checkpoints store them.
  Accumulation takes both dtypes, reads ahead and writes in place. Any M, N and K work; N and K that
  are not multiples of 64, and M that is not a multiple of 8, cost copies. The next tile's loads
  continue during the epilogue. The gradient leaves its products to cuBLAS. Over devices it splits
  rows, columns, or parts of a sum (`Split`). Clusters of two blocks, along M or N, share loads.

A plain product with dims that blocks divide is therefore served by JAX's kernel, and by XLA's
cuBLAS; this kernel is for everything else. The gated form takes two arrays because Llama's
checkpoints name the weights separately (`gate_proj`, `up_proj`), and stacking them is a copy;
tokamax accepts such a pair too, and stacks it.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Target, find_target, resolve
from pallas_kernels.matmul import measured, mosaic, reference, vjp
from pallas_kernels.matmul.config import Config as Config
from pallas_kernels.matmul.config import Problem, choose
from pallas_kernels.matmul.reference import ACTIVATIONS, Form
from pallas_kernels.matmul.split import Split as Split
from pallas_kernels.varying import vary_alike

Pair = tuple[jax.Array, jax.Array]
Terms = tuple[jax.Array, ...]
UNMEASURED = "no measurement of this shape on this GPU says that it is faster"


def matmul(
    x: jax.Array,
    w: jax.Array | Pair,
    bias: jax.Array | Pair | None = None,
    activation: str | None = None,
    accumulate: jax.Array | Pair | None = None,
    implementation: Implementation | None = None,
    *,
    preferred_element_type: Any = None,
    config: Config | None = None,
    split: Split | None = None,
) -> jax.Array:
    """Return `activation(x @ w + bias + accumulate)`, summed in float32 and rounded once.

    With two weights, return `activation(z_0) * z_1`, where each z_i is such a sum.

    `x[..., K] @ w[K, N] -> y[..., N]`. Differentiable in every array. On several devices pass a
    `split`, or call it in `jax.shard_map` on each device's own pieces: the kernel is opaque to the
    partitioner.

    Args:
      x: activations `[..., K]`: bfloat16 or float16 for the kernel; any float dtype otherwise.
      w: weight `[K, N]` in x's dtype. A pair `(gate, up)` makes a gated linear unit.
      bias: `[N]`, in x's dtype or float32; a pair for two weights.
      activation: "gelu" (tanh form), "silu" or None.
      accumulate: `[..., N]`, an existing output to which the product is added before the
        activation; a pair for two weights. The kernel overwrites it (the first of a pair) if its
        dtype is the result's dtype: donate it. Inside a `jax.shard_map` that checks over which axes
        a value varies, JAX cannot alias it: set `check_vma=False` there if memory matters.
      implementation: "mosaic" (the Hopper kernel), "xla", "reference" (float32), or None to choose
        and log one: the kernel if the table of `pallas_kernels.matmul.measured` shows that it is
        faster for this shape, XLA's form otherwise and under `jax.vmap`, which has no measurements.
      preferred_element_type: dtype of the result; None takes the dtype of `accumulate`, else x's.
        Use float32 for sums that continue.
      config: sizes of the kernel; None takes them from that table, and for unmeasured shapes from a
        closed form.
      split: how the arrays are split over a mesh; in-place accumulation still works. If it splits
        K, over P devices, the result and `accumulate` are `[P, ..., N]`, the parts of the sum. None
        if nothing is split, or if the call is inside a `jax.shard_map`.

    Raises:
      ValueError: dims or dtypes do not fit each other, the activation or implementation is unknown,
        or the blocks do not fit.
      NotImplementedError: the named implementation has no kernel for these dtypes or this device,
        or the named kernel is under `jax.vmap` in jax 0.10, which cannot batch a kernel.
    """
    weights = _as_tuple(w)
    biases = _as_tuple(bias)
    accumulates = _as_tuple(accumulate)
    call = _describe(x, weights, biases, accumulates, activation, preferred_element_type, split)
    problem = call.problem
    # From here on everything is a matrix: the leading dims are flattened to rows.
    k, n = weights[0].shape
    m = math.prod(x.shape[:-1])
    num_parts = 0 if split is None else split.num_parts
    rows = x.reshape(m, k)
    leading = (num_parts,) if num_parts else ()
    accumulates = tuple(a.reshape(*leading, m, n) for a in accumulates)
    form = Form(activation, problem.out_dtype)
    chosen = resolve(
        "matmul",
        implementation,
        {"mosaic": call.refusal, "xla": None, "reference": None},
        {"mosaic": call.passed_over},
    )
    if chosen == "reference":
        # The reference bypasses the rule of `vjp`: JAX derives its gradients.
        y = reference.matmul(form, rows, weights, biases, accumulates, num_parts)
    else:
        static = vjp.Call(
            form=form,
            config=call.choose_config(config) if chosen == "mosaic" else None,
            is_named=implementation is not None,
            split=split,
            bias_dtype=problem.bias_dtype,
            accumulate_dtype=problem.accumulate_dtype,
        )
        # The cast is outside of the rule, so that JAX sums a replicated weight's gradient over the
        # shards (see `varying`).
        y: Any = vjp.matmul(static, *vary_alike((rows, weights, biases, accumulates)))
    return y.reshape((*leading, *x.shape[:-1], n))


def is_measured(*arrays: Any) -> bool:
    """Return whether the table of measurements has a row for the target device of these arrays.

    Args:
      *arrays: arrays of one product, whose device counts.
    """
    target = find_target(*arrays)
    chips = {(row.chip, row.num_cores) for row in measured.table()}
    return (target.chip, target.num_cores) in chips


def is_faster(
    x: jax.Array,
    w: jax.Array | Pair,
    bias: jax.Array | Pair | None = None,
    activation: str | None = None,
    accumulate: jax.Array | Pair | None = None,
    *,
    preferred_element_type: Any = None,
    split: Split | None = None,
) -> bool:
    """Return whether `matmul` would use the kernel for these arguments with `implementation=None`.

    It does if a measurement shows that the kernel is faster. Only shapes, dtypes and devices
    of the arrays matter.

    Args:
      x: activations `[..., K]`.
      w: weight `[K, N]`, or a pair `(gate, up)`.
      bias: bias `[N]`, a pair for two weights, or None.
      activation: "gelu", "silu" or None.
      accumulate: existing output `[..., N]`, a pair for two weights, or None.
      preferred_element_type: dtype of the result, as in `matmul`.
      split: how the arrays are split over a mesh, or None.

    Raises:
      ValueError: the arguments do not fit; see `matmul`.
    """
    call = _describe(
        x,
        _as_tuple(w),
        _as_tuple(bias),
        _as_tuple(accumulate),
        activation,
        preferred_element_type,
        split,
    )
    return call.refusal is None and call.passed_over is None


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call's problem on one device, the target device, and the matching measurement, or None."""

    problem: Problem
    target: Target
    row: measured.Row | None

    @property
    def refusal(self) -> str | None:
        """Why the kernel cannot serve, or None if it can."""
        return mosaic.refusal(self.problem, self.target)

    @property
    def passed_over(self) -> str | None:
        """Why the kernel is only used if it is named, or None if it is chosen by default."""
        if self.row is None:
            return UNMEASURED
        if self.row.is_faster:
            return None
        return f"it was measured, and takes {self.row.over_xla:.2f} of XLA's time"

    def choose_config(self, config: Config | None) -> Config:
        """Return the sizes of the kernel: the caller's, the fastest measured, or the closed form's.

        Raises:
          ValueError: the sizes do not fit the problem.
        """
        if config is None and self.row is not None:
            config = self.row.config
        elif config is None:
            config = choose(self.problem, self.target.num_cores)
        self.problem.check(config)
        return config


def _describe(
    x: jax.Array,
    weights: Terms,
    biases: Terms,
    accumulates: Terms,
    activation: str | None,
    preferred: Any,
    split: Split | None,
) -> _Call:
    """Check a call's arrays, and return its problem on one device."""
    accumulate_dtype = accumulates[0].dtype if accumulates else None
    dtype = jnp.dtype(preferred or accumulate_dtype or x.dtype)
    num_weights = len(weights)
    num_parts = 0 if split is None else split.num_parts
    _check_product(x, weights, activation, dtype)
    if num_parts and (num_weights > 1 or biases or activation is not None):
        raise ValueError(
            f"matmul: K is split over {num_parts} devices, and bias, activation and gate come "
            f"after the sum of their parts: one weight alone is needed, not {num_weights} with "
            f"{len(biases)} biases and activation={activation!r}"
        )
    _check_terms(x, weights, biases, accumulates, num_parts)
    k, n = weights[0].shape
    m = math.prod(x.shape[:-1])
    shard_m, shard_n, shard_k = (m, n, k) if split is None else split.shard(m, n, k)
    problem = Problem(
        m=shard_m,
        n=shard_n,
        k=shard_k,
        num_weights=num_weights,
        dtype=x.dtype,
        out_dtype=dtype,
        bias_dtype=biases[0].dtype if biases else None,
        accumulate_dtype=accumulate_dtype,
    )
    target = find_target(x, *weights)
    return _Call(problem, target, measured.find(measured.table(), problem, activation, target))


def _as_tuple(value: jax.Array | Pair | None) -> Terms:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _check_product(x: jax.Array, weights: Terms, activation: str | None, dtype: jnp.dtype) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"matmul: activation={activation!r} is unknown: choose from "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )
    if len(weights) not in (1, 2):
        raise ValueError(
            f"matmul: {len(weights)} weights: one, or two for a gated product, are needed"
        )
    if not x.ndim or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"matmul: x is {x.dtype}{list(x.shape)}: [..., K] of a float dtype is needed"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"matmul: preferred_element_type={dtype}: a float dtype is needed")


def _check_terms(
    x: jax.Array, weights: Terms, biases: Terms, accumulates: Terms, num_parts: int
) -> None:
    """Raise ValueError unless every weight has its terms, of fitting shapes and dtypes."""
    k = x.shape[-1]
    n = weights[0].shape[-1] if weights[0].ndim else 0
    leading = (num_parts,) if num_parts else ()
    y_shape = (*leading, *x.shape[:-1], n)
    for name, terms, shape in (
        ("w", weights, (k, n)),
        ("bias", biases, (n,)),
        ("accumulate", accumulates, y_shape),
    ):
        if terms and len(terms) != len(weights):
            raise ValueError(
                f"matmul: {len(terms)} of {name} for {len(weights)} of w: one for each weight is "
                "needed"
            )
        for term in terms:
            if term.shape != shape:
                raise ValueError(
                    f"matmul: {name} is {list(term.shape)}, and x is {list(x.shape)}: "
                    f"{list(shape)} is needed"
                )
            if term.dtype != terms[0].dtype or not jnp.issubdtype(term.dtype, jnp.floating):
                raise ValueError(
                    f"matmul: {name} is {', '.join(str(t.dtype) for t in terms)}: one float dtype "
                    "is needed"
                )
    if weights[0].dtype != x.dtype:
        raise ValueError(
            f"matmul: x is {x.dtype} and w {weights[0].dtype}: one dtype is needed; cast one of "
            "them"
        )
