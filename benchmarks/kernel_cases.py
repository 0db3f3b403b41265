"""Define the cases of benchmarks/kernels.py.

A case is an op at one size, each contender's programs, and the error against float64.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from pallas_kernels.linear_cross_entropy import KernelConfig, linear_cross_entropy
from pallas_kernels.matmul import Config, matmul
from pallas_kernels.matmul.config import Problem
from pallas_kernels.matmul.reference import ACTIVATIONS
from pallas_kernels.nf4 import Nf4, dequantize_nf4, quantize_nf4
from pallas_kernels.nf4.reference import LEVELS, MIDPOINTS, pack, quantize_scales
from pallas_kernels.quantize import Quantized, dequantize, quantize

MOSAIC, XLA, UNFUSED = "mosaic", "xla", "unfused"
ROWS = 64  # number of rows that are compared with float64
NF4_BYTES = 0.5 + 1 / 64 + 8 / (64 * 256)  # bytes per element, in groups of 256 blocks
Step = Callable[[tuple[Any, ...], Any], Any]
"""Function (case's arrays, previous step's result, donated) -> next value, run as one program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size.

    Attributes:
      name: name of the case's rows.
      work: floating-point operations or bytes of a call.
      unit: "flops" or "bytes".
      arrays: abstract arguments.
      programs: steps of one call, by contender.
      error: function (arguments, result) -> the largest error over its bound.
      accumulates: whether a call adds to the last argument in place. The first step gets it,
        donated, and each call's result is what the next call adds to.
    """

    name: str
    work: float
    unit: str
    arrays: tuple[Any, ...]
    programs: Mapping[str, Sequence[Step]]
    error: Callable[[tuple[Any, ...], Any], float]
    accumulates: bool = False

    def draw(self) -> tuple[Any, ...]:
        """Return random arguments.

        Floating-point arguments are normal numbers whose products have a size of about 1; integers
        are random keys or values of 8 or 4 bits.
        """

        def array(n: int, a: Any) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(0), n)
            if a.dtype == jnp.uint32:
                return jax.random.key_data(key)
            if a.dtype == jnp.uint8:
                return jax.random.bits(key, a.shape, jnp.uint8)
            if a.dtype == jnp.int8:
                return jax.random.randint(key, a.shape, -127, 128, jnp.int8)
            scale = 1.0 if n == 0 else a.shape[0] ** -0.5
            return (scale * jax.random.normal(key, a.shape, jnp.float32)).astype(a.dtype)

        return tuple(jax.jit(functools.partial(array, n, a))() for n, a in enumerate(self.arrays))


@dataclasses.dataclass(frozen=True)
class Product:
    """A product `x[M, K] @ w[K, N]` in bfloat16, and the operations that follow it.

    Attributes:
      m: rows of x.
      n: columns of w.
      k: columns of x.
      gated: whether there are two weights, whose products are multiplied.
      bias: whether each weight has a bfloat16 bias.
      activation: name of the activation, or None.
      accumulates: whether the product is added in place to a float32 result.
    """

    m: int
    n: int
    k: int
    gated: bool = False
    bias: bool = False
    activation: str | None = None
    accumulates: bool = False

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return 2 if self.gated else 1

    @property
    def name(self) -> str:
        """Name of the product: its dims and the operations that follow it."""
        told = (
            ("bias", self.bias),
            (self.activation, self.activation),
            ("gated", self.gated),
            ("in place", self.accumulates),
        )
        return ", ".join(
            [f"{self.m} x {self.n} x {self.k}", *[str(word) for word, there in told if there]]
        )

    @property
    def out(self) -> Any:
        """Dtype of the result."""
        return jnp.float32 if self.accumulates else jnp.bfloat16

    @property
    def problem(self) -> Problem:
        """Problem that the op chooses its sizes for."""
        narrow, wide = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
        return Problem(
            m=self.m,
            n=self.n,
            k=self.k,
            num_weights=self.num_weights,
            dtype=narrow,
            out_dtype=jnp.dtype(self.out),
            bias_dtype=narrow if self.bias else None,
            accumulate_dtype=wide if self.accumulates else None,
        )

    def step(self, implementation: Any, config: Config | None = None) -> Step:
        """Return the op in one program, by an implementation with optional sizes."""
        num = self.num_weights

        def call(arrays: Any, total: Any) -> Any:
            x, w, b = arrays[0], arrays[1 : 1 + num], arrays[1 + num : 1 + num + num * self.bias]
            options = {"preferred_element_type": self.out, "config": config}
            return matmul(x, w, b or None, self.activation, total, implementation, **options)

        return call

    def case(self) -> Case:
        """Return the case, with the kernel, XLA's form and the unfused programs."""
        num, out = self.num_weights, self.out
        shapes = [(self.m, self.k), *[(self.k, self.n)] * num, *[(self.n,)] * (num * self.bias)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        arrays += [jax.ShapeDtypeStruct((self.m, self.n), jnp.float32)] * self.accumulates

        def products(arrays: Any, total: Any) -> Any:
            dot = [
                jnp.dot(arrays[0], w, preferred_element_type=jnp.float32)
                for w in arrays[1 : 1 + num]
            ]
            return dot, total

        def add_bias(arrays: Any, z: Any) -> Any:
            terms = arrays[1 + num : 1 + 2 * num]
            return [each + t.astype(jnp.float32) for each, t in zip(z[0], terms, strict=True)], z[1]

        steps: list[Step] = [products]
        if self.bias:
            steps.append(add_bias)
        if self.accumulates:
            steps.append(lambda _, z: ([z[0][0] + z[1]], None))
        if self.activation:
            steps.append(lambda _, z: ([ACTIVATIONS[self.activation](z[0][0]), *z[0][1:]], None))
        steps.append(lambda _, z: (z[0][0] * z[0][1] if self.gated else z[0][0]).astype(out))
        return Case(
            name=f"matmul {self.name}",
            work=2.0 * self.m * self.n * self.k * num,
            unit="flops",
            arrays=tuple(arrays),
            programs={MOSAIC: [self.step(MOSAIC)], XLA: [self.step(XLA)], UNFUSED: steps},
            error=self.error,
            accumulates=self.accumulates,
        )

    def error(self, arrays: Any, y: Any) -> float:
        """Return the largest error of some rows of a result, over its bound."""
        num = self.num_weights
        rows = np.random.default_rng(0).choice(self.m, min(self.m, ROWS), replace=False)
        x = np.asarray(arrays[0][rows], np.float64)
        z = [x @ np.asarray(w, np.float64) for w in arrays[1 : 1 + num]]
        if self.bias:
            z = [
                each + np.asarray(t, np.float64)
                for each, t in zip(z, arrays[1 + num : 1 + 2 * num], strict=True)
            ]
        if self.accumulates:
            z = [z[0] + np.asarray(arrays[-1][rows], np.float64)]
        expected = activate(self.activation, z[0]) * (z[1] if self.gated else 1)
        return float(
            np.abs(np.asarray(y[rows], np.float64) - expected).max()
            / (self.bound * np.abs(expected).max())
        )

    @property
    def bound(self) -> float:
        """Largest allowed error, over the result's largest number."""
        return {2: 2.0**-8, 4: 2e-6}[jnp.dtype(self.out).itemsize]

    def apart(self, y: Any, other: Any) -> float:
        """Return how far apart two results are, over the sum of their bounds."""
        y, other = (jnp.asarray(a, jnp.float32) for a in (y, other))
        return float(jnp.abs(y - other).max() / (2 * self.bound * jnp.abs(other).max()))


def activate(name: str | None, z: np.ndarray) -> np.ndarray:
    """Return an activation of z in float64."""
    if name is None:
        return z
    if name == "silu":
        return z / (1 + np.exp(-z))
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def quantize_case(
    rows: int, columns: int, in_dtype: Any, dtype: Any, block_size: int, *, stochastic: bool = False
) -> Case:
    """Return the case of `quantize`; its bytes are those of x, values and scales."""
    most = float(jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))

    def op(implementation: Any) -> Step:
        return lambda arrays, _: quantize(
            arrays[0], dtype, block_size, arrays[1] if stochastic else None, implementation
        )

    def blocks(x: Any) -> Any:
        return x.reshape(rows, -1, block_size).astype(jnp.float32)

    def noise(arrays: Any, z: Any) -> Any:
        return (
            jnp.floor(z[0] + jax.random.uniform(jax.random.wrap_key_data(arrays[1]), z[0].shape)),
            z[1],
        )

    def unscaled(arrays: Any, scales: Any) -> Any:
        return blocks(arrays[0]) / scales[..., None], scales

    def cast(_: Any, z: Any) -> Any:
        return Quantized(z[0].reshape(rows, columns).astype(dtype), z[1], block_size)

    steps: list[Step] = [lambda arrays, _: jnp.abs(blocks(arrays[0])).max(-1) / most, unscaled]
    if dtype == jnp.int8:
        steps.append(noise if stochastic else lambda _, z: (jnp.round(z[0]), z[1]))
    steps.append(cast)

    def error(arrays: Any, q: Quantized) -> float:
        chosen = np.random.default_rng(0).choice(rows, min(rows, ROWS), replace=False)
        x = np.asarray(arrays[0][chosen], np.float64)
        largest = np.repeat(np.abs(x.reshape(len(x), -1, block_size)).max(-1), block_size, -1)
        y = np.asarray(
            dequantize(Quantized(q.values[chosen], q.scales[chosen], block_size), jnp.float32),
            np.float64,
        )
        step = largest / most
        if dtype != jnp.int8:  # half the distance of neighbours, which grows with the element
            info = jnp.finfo(dtype)
            step = np.maximum(np.abs(x) * 2.0**-info.nmant, step * float(info.smallest_subnormal))
        return float((np.abs(y - x) / (step * (1.0 if stochastic else 0.5) * (1 + 1e-4))).max())

    size = rows * columns
    name = (
        f"quantize {rows} x {columns}, {jnp.dtype(in_dtype)} to {jnp.dtype(dtype)}, "
        f"blocks of {block_size}"
    )
    return Case(
        name=name + (", stochastic" if stochastic else ""),
        work=size * (jnp.dtype(in_dtype).itemsize + 1 + 4 / block_size),
        unit="bytes",
        arrays=(
            jax.ShapeDtypeStruct((rows, columns), in_dtype),
            *[jax.ShapeDtypeStruct(key.shape, key.dtype)] * stochastic,
        ),
        programs={
            MOSAIC: [op(MOSAIC)],
            XLA: [op(XLA)],
            **({} if stochastic and dtype != jnp.int8 else {UNFUSED: steps}),
        },
        error=error,
    )


def dequantize_case(rows: int, columns: int, dtype: Any, block_size: int) -> Case:
    """Return the case of `dequantize` from int8."""

    def op(implementation: Any) -> Step:
        return lambda arrays, _: dequantize(
            Quantized(arrays[0], arrays[1], block_size), dtype, implementation
        )

    def error(arrays: Any, y: Any) -> float:
        chosen = np.random.default_rng(0).choice(rows, min(rows, ROWS), replace=False)
        values, scales = (np.asarray(a[chosen], np.float64) for a in arrays)
        exact = values * np.repeat(scales, block_size, -1)
        return float(
            (
                np.abs(np.asarray(y[chosen], np.float64) - exact)
                / (2.0**-8 * np.abs(exact) + 1e-30)
            ).max()
        )

    steps: list[Step] = [
        lambda arrays, _: arrays[0].astype(jnp.float32),
        lambda arrays, z: z * jnp.repeat(arrays[1], block_size, -1),
        lambda _, z: z.astype(dtype),
    ]
    return Case(
        name=f"dequantize {rows} x {columns}, int8 to {jnp.dtype(dtype)}, blocks of {block_size}",
        work=rows * columns * (1 + jnp.dtype(dtype).itemsize + 4 / block_size),
        unit="bytes",
        arrays=(
            jax.ShapeDtypeStruct((rows, columns), jnp.int8),
            jax.ShapeDtypeStruct((rows, columns // block_size), jnp.float32),
        ),
        programs={MOSAIC: [op(MOSAIC)], XLA: [op(XLA)], UNFUSED: steps},
        error=error,
    )


def quantize_nf4_case(size: int, dtype: Any) -> Case:
    """Return the case of `quantize_nf4` of a vector; its bytes are those of x and of the result."""
    group = (1, 256)

    def op(implementation: Any) -> Step:
        return lambda arrays, _: quantize_nf4(arrays[0], group, implementation)

    def blocks(arrays: Any) -> Any:
        return arrays[0].reshape(-1, 64).astype(jnp.float32)

    def packed(_: Any, z: Any) -> Any:
        codes = jax.lax.bitcast_convert_type(pack(z[0][:, :32], z[0][:, 32:]), jnp.uint8)
        return Nf4(codes.reshape(-1), *[a[0] for a in quantize_scales(z[1][None], group)])

    steps: list[Step] = [
        lambda arrays, _: jnp.abs(blocks(arrays)).max(-1),
        lambda arrays, largest: (blocks(arrays) / largest[:, None], largest),
        lambda _, z: (
            jnp.searchsorted(jnp.array(MIDPOINTS, jnp.float32), z[0]).astype(jnp.int32),
            z[1],
        ),
        packed,
    ]

    def error(arrays: Any, q: Nf4) -> float:
        chosen = 64 * group[1] * min(4, len(q.steps))  # number of elements, in full groups
        x = np.asarray(arrays[0][:chosen], np.float64).reshape(-1, group[1], 64)
        largest = np.abs(x).max(-1)
        first = jax.tree.map(lambda a: a[: a.size * chosen // size], q)
        y = np.asarray(dequantize_nf4(first, jnp.float32), np.float64).reshape(x.shape)
        apart = np.abs(largest - largest.mean(-1, keepdims=True)).max(-1, keepdims=True)
        bound = np.diff(LEVELS).max() / 2 * largest + apart / 254
        return float((np.abs(y - x) / (bound[..., None] * (1 + 1e-3))).max())

    return Case(
        name=f"quantize_nf4 {size}, {jnp.dtype(dtype)} to 4 bits",
        work=size * (jnp.dtype(dtype).itemsize + NF4_BYTES),
        unit="bytes",
        arrays=(jax.ShapeDtypeStruct((size,), dtype),),
        programs={MOSAIC: [op(MOSAIC)], XLA: [op(XLA)], UNFUSED: steps},
        error=error,
    )


def dequantize_nf4_case(size: int, dtype: Any) -> Case:
    """Return the case of `dequantize_nf4` to a vector."""
    q = jax.eval_shape(lambda x: quantize_nf4(x, (1, 256)), jax.ShapeDtypeStruct((size,), dtype))

    def op(implementation: Any) -> Step:
        return lambda arrays, _: dequantize_nf4(Nf4(*arrays), dtype, implementation)

    def largest(arrays: Any, _: Any) -> Any:
        _, scales, steps, means = arrays
        return jnp.maximum(
            scales.astype(jnp.float32) * jnp.repeat(steps, 256) + jnp.repeat(means, 256), 0
        )

    def levels(arrays: Any, z: Any) -> Any:
        pairs = arrays[0].reshape(-1, 32)
        return jnp.array(LEVELS, jnp.float32)[jnp.concatenate([pairs & 15, pairs >> 4], 1)], z

    def error(arrays: Any, y: Any) -> float:
        chosen = 64 * 256 * min(4, len(arrays[2]))
        codes, scales, steps, means = (np.asarray(a[: a.size * chosen // size]) for a in arrays)
        pairs = codes.reshape(-1, 32)
        steps, means = (np.repeat(a.astype(np.float64), 256) for a in (steps, means))
        # The drawn steps have 24 bits, so their products are rounded, either together with the sum
        # in one instruction or separately.
        scale = np.maximum(scales * steps + means, 0)
        values = np.array(LEVELS)[np.concatenate([pairs & 15, pairs >> 4], 1)]
        off = np.abs(
            np.asarray(y[:chosen], np.float64).reshape(values.shape) - values * scale[:, None]
        )
        rounded = (np.abs(scales * steps) + np.abs(means)) * 2.0**-22
        return float(
            (off / (2.0**-8 * np.abs(values * scale[:, None]) + rounded[:, None] + 1e-30)).max()
        )

    steps: list[Step] = [
        largest,
        levels,
        lambda _, z: z[0] * z[1][:, None],
        lambda _, z: z.astype(dtype).reshape(-1),
    ]
    return Case(
        name=f"dequantize_nf4 {size}, 4 bits to {jnp.dtype(dtype)}",
        work=size * (jnp.dtype(dtype).itemsize + NF4_BYTES),
        unit="bytes",
        arrays=(q.codes, q.scales, q.steps, q.means),
        programs={MOSAIC: [op(MOSAIC)], XLA: [op(XLA)], UNFUSED: steps},
        error=error,
    )


def loss_case(tokens: int, hidden: int, vocab: int) -> Case:
    """Return the case of `linear_cross_entropy` in bfloat16, forward and both gradients.

    Its work counts three products. The kernels compute five products for them, and XLA's contender,
    the tiled op, four or five; the unfused contender stores full logits.
    """
    dtype = jnp.bfloat16

    def labels() -> jax.Array:
        return jnp.arange(tokens, dtype=jnp.int32) * 7919 % vocab

    def op(implementation: Any) -> Step:
        def call(arrays: Any, _: Any) -> Any:
            config = KernelConfig(backward=True) if implementation == MOSAIC else None
            loss = functools.partial(
                linear_cross_entropy, labels=labels(), implementation=implementation, config=config
            )
            return jax.value_and_grad(loss, argnums=(0, 1))(arrays[0], arrays[1])

        return call

    def losses(_: Any, z: Any) -> Any:
        lse = jax.nn.logsumexp(z, axis=1)
        loss = jnp.mean(lse - jnp.take_along_axis(z, labels()[:, None], axis=1)[:, 0])
        slopes = (jnp.exp(z - lse[:, None]) - jax.nn.one_hot(labels(), vocab)) / tokens
        return loss, slopes.astype(dtype)

    def gradients(arrays: Any, made: Any) -> Any:
        x, w = arrays
        loss, slopes = made
        return loss, (jnp.dot(slopes, w.T), jnp.dot(x.T, slopes))

    steps: list[Step] = [
        lambda arrays, _: jnp.dot(*arrays, preferred_element_type=jnp.float32),
        losses,
        gradients,
    ]

    def error(arrays: Any, found: Any) -> float:
        rows = np.random.default_rng(0).choice(tokens, min(tokens, ROWS // 4), replace=False)
        w = np.asarray(arrays[1], np.float64)
        z = np.asarray(arrays[0][rows], np.float64) @ w
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(rows)), rows * 7919 % vocab] -= 1
        expected = p @ w.T / tokens
        dx = np.asarray(found[1][0][rows], np.float64)
        return float(np.abs(dx - expected).max() / (2.0**-8 * np.abs(expected).max()))

    return Case(
        name=f"linear_cross_entropy {tokens} x {hidden} x {vocab}, with gradients",
        work=6.0 * tokens * hidden * vocab,
        unit="flops",
        arrays=(
            jax.ShapeDtypeStruct((tokens, hidden), dtype),
            jax.ShapeDtypeStruct((hidden, vocab), dtype),
        ),
        programs={MOSAIC: [op(MOSAIC)], XLA: [op(XLA)], UNFUSED: steps},
        error=error,
    )


def products(small: bool) -> list[Product]:
    """Return the products among the cases; small ones for machines without a measurement."""
    m, n, k = (192, 128, 320) if small else (16384, 14336, 4096)
    sizes = [(m, n, k)] if small else [(8192, 8192, 8192), (16384, 4096, 16384), (8100, 5000, 3000)]
    return [
        *[Product(*size) for size in sizes],
        Product(m, n, k, bias=True, activation="gelu"),
        Product(m, n, k, gated=True, activation="silu"),
        Product(m, n, k, accumulates=True),
    ]


def cases(small: bool) -> list[Case]:
    """Return the cases; small ones for machines without a measurement."""
    rows, columns, losses = (
        (128, 512, (64, 32, 512)) if small else (1 << 15, 1 << 13, (16384, 4096, 1 << 17))
    )
    return [
        *[product.case() for product in products(small)],
        loss_case(*losses),
        quantize_case(rows, columns, jnp.bfloat16, jnp.int8, 256),
        quantize_case(rows, columns, jnp.bfloat16, jnp.int8, 256, stochastic=True),
        quantize_case(rows, columns, jnp.float32, jnp.float8_e4m3fn, 128),
        dequantize_case(rows, columns, jnp.bfloat16, 256),
        quantize_nf4_case(rows * columns, jnp.bfloat16),
        dequantize_nf4_case(rows * columns, jnp.bfloat16),
    ]
