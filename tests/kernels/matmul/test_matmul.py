"""matmul: every implementation equals numpy in float64, in value and gradient.

Also tested are bad input, and the choice of implementation.
"""

import dataclasses
import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import matmul_in_float64 as float64
import numpy as np
import pytest
from devices import on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from matmul_in_float64 import TOLERANCE

from pallas_kernels import dispatch
from pallas_kernels.matmul import Config, matmul
from pallas_kernels.matmul.config import Problem, choose
from pallas_kernels.shared_memory import SHARED_BYTES

pytestmark = pytest.mark.xdist_group("kernels")
SMALL = Config(block_m=128, block_n=64, num_stages=2, num_cores=1)
IN_PAIRS = Config(block_m=128, block_n=128, num_stages=2, num_cores=2, cluster_n=2)


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int] = (
        130,
        64,
        128,
    )  # M, N, K: 2 tiles of the smallest blocks, which reuse their slots
    num_weights: int = 1
    activation: str | None = None
    has_bias: bool = False
    accumulate: str | None = None
    dtype: str = "bfloat16"
    out: str | None = None
    config: Config | None = None  # by the kernel

    def arrays(self) -> tuple[Any, ...]:
        """Return dy, and (x, weights, biases, accumulates)."""
        m, n, k = self.shape
        rng = np.random.default_rng(m * n * k)

        def draw(shape, dtype, scale=1.0):
            return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

        of_each = range(self.num_weights)
        return draw((m, n), jnp.float32), (
            draw((m, k), self.dtype),
            tuple(draw((k, n), self.dtype, k**-0.5) for _ in of_each),
            tuple(draw((n,), self.dtype) for _ in of_each) if self.has_bias else (),
            tuple(draw((m, n), self.accumulate) for _ in of_each) if self.accumulate else (),
        )

    def call(
        self, implementation: str | None, x: Any, weights: Any, biases: Any, accumulates: Any
    ) -> jax.Array:
        return matmul(
            x,
            weights if self.num_weights == 2 else weights[0],
            biases or None,
            self.activation,
            accumulates or None,
            implementation,
            preferred_element_type=self.out,
            config=self._config() if implementation == "mosaic" else None,
        )

    def _config(self) -> Config:
        return self.config or dataclasses.replace(SMALL, block_n=64 * self.num_weights)

    def check(self, implementation: str, gradient: bool) -> None:
        dy, arrays = self.arrays()
        f = functools.partial(self.call, implementation)
        if gradient:
            y, pull = jax.vjp(f, *arrays)
            dy = dy.astype(y.dtype)
            gradients = pull(dy)
        else:
            y, gradients = jax.jit(f)(*arrays), None
        assert y.dtype == jnp.dtype(self.out or self.accumulate or self.dtype)
        expected, expected_gradients = float64.matmul(self.activation, dy, *arrays)
        float64.assert_close(y, expected, TOLERANCE[str(y.dtype)])
        if gradient:
            float64.assert_close(gradients, expected_gradients, TOLERANCE[self.dtype])


FORMS = [
    Case(),
    Case(activation="gelu", has_bias=True),
    Case(activation="silu", accumulate="float32"),
    Case(activation="silu", accumulate="float32", out="bfloat16", has_bias=True),
    Case(num_weights=2, activation="silu", has_bias=True),
    Case(num_weights=2, activation="gelu", accumulate="float32"),
    Case(num_weights=2),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_matmul_of_each_form_and_dtype_equals_float64_in_value_and_gradient(case, dtype):
    out = case.out and dtype
    for implementation in ("reference", "xla"):
        dataclasses.replace(case, shape=(33, 17, 40), dtype=dtype, out=out).check(
            implementation, gradient=True
        )


@pytest.mark.parametrize(
    ("case", "gradient"),
    [
        pytest.param(
            Case(
                shape=(130, 192, 128), config=dataclasses.replace(SMALL, block_n=128, num_cores=2)
            ),  # 2 x 2 tiles
            False,
            marks=pytest.mark.exhaustive,
        ),
        # no dim is divisible by 64
        (Case(shape=(70, 100, 90), dtype="float16", config=SMALL), True),
        pytest.param(
            Case(shape=(40, 128, 64), activation="gelu", has_bias=True),  # 2 tiles of columns
            False,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Case(activation="silu", accumulate="float32", out="bfloat16"),  # 2 tiles of rows
            True,
            marks=pytest.mark.exhaustive,
        ),
        (Case(num_weights=2, activation="silu", has_bias=True), True),
        pytest.param(
            Case(shape=(40, 128, 64), num_weights=2, activation="gelu", accumulate="float32"),
            False,
            marks=pytest.mark.exhaustive,
        ),
        # Clusters of two, along M: 3 groups of tiles, the second block of which has 2 rows; 3 steps
        # in 2 slots.
        (
            Case(
                shape=(130, 192, 192), config=dataclasses.replace(SMALL, num_cores=2, cluster_m=2)
            ),
            False,
        ),
        # And along N: in the third group, the second block is entirely outside.
        (
            Case(
                shape=(40, 320, 128),
                num_weights=2,
                activation="silu",
                accumulate="float32",
                config=IN_PAIRS,
            ),
            True,
        ),
    ],
    ids=str,
)
def test_matmul_kernel_interpreted_equals_float64_without_races(races, case, gradient):
    with races():
        case.check("mosaic", gradient)


def test_matmul_over_tiles_of_k_accumulated_in_place_equals_the_whole(races):
    case = Case(shape=(3 * 24, 64, 256), activation="gelu", has_bias=True)
    _, (x, [w], [bias], _) = case.arrays()
    x = x.reshape(3, 24, 256)

    def in_two_tiles(x, w, bias):
        run = functools.partial(matmul, implementation="mosaic", config=SMALL)
        total = run(x[..., :128], w[:128], preferred_element_type=jnp.float32)
        return run(x[..., 128:], w[128:], bias, "gelu", total)

    with races():
        y = jax.jit(in_two_tiles)(x, w, bias)
    assert y.dtype == jnp.float32
    expected, _ = float64.matmul("gelu", np.zeros((72, 64)), x.reshape(72, 256), (w,), (bias,), ())
    float64.assert_close(y.reshape(72, 64), expected, TOLERANCE["float32"])


def test_matmul_called_outside_of_jit_leaves_what_it_accumulates_to_as_it_was(races):
    x, w, total = (
        jnp.ones((8, 64), jnp.bfloat16),
        jnp.ones((64, 64), jnp.bfloat16),
        jnp.full((8, 64), 3.0),
    )
    with races():
        y = matmul(x, w, accumulate=total, implementation="mosaic", config=SMALL)
    np.testing.assert_array_equal(y, np.full((8, 64), 67.0))
    np.testing.assert_array_equal(total, np.full((8, 64), 3.0))


def test_matmul_of_shards_has_the_gradient_of_the_whole():
    case = Case(shape=(32, 16, 24), activation="gelu", has_bias=True)
    _, arrays = case.arrays()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(in_shards, *arrays):
        f = functools.partial(case.call, "xla")
        if in_shards:
            f = jax.shard_map(
                f, mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P("data")
            )
        return (f(*arrays).astype(jnp.float32) ** 2).sum()

    whole, shards = (
        jax.jit(jax.grad(functools.partial(loss, in_shards), argnums=(0, 1, 2)))(*arrays)
        for in_shards in (0, 1)
    )
    expected = jax.tree.map(lambda a: np.asarray(a, np.float64), whole)
    float64.assert_close(shards, expected, TOLERANCE["bfloat16"])


def test_the_race_detector_sees_a_product_of_memory_that_is_being_written(races):
    """The control of every check for races: no barrier orders the copy before the product."""
    x = jnp.ones((64, 64), jnp.bfloat16)

    def body(x_gmem, out_gmem, x_smem, out_smem, barrier):
        @pl.when(jax.lax.axis_index("warpgroup") == 0)
        def _():
            plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
            plgpu.barrier_wait(barrier)

        @pl.when(jax.lax.axis_index("warpgroup") == 1)
        def _():
            def product(acc_ref):
                plgpu.wgmma(acc_ref, x_smem, x_smem)
                return acc_ref[...]

            out_smem[...] = pl.run_scoped(
                product, plgpu.WGMMAAccumulatorRef((64, 64), jnp.float32)
            ).astype(x.dtype)
            plgpu.copy_smem_to_gmem(out_smem, out_gmem)

    if not jax.__version__.startswith("0.10."):
        pytest.skip("this jax's interpreter does not check reads of wgmma")
    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = [plgpu.SMEM(x.shape, x.dtype, transforms=layout)] * 2 + [plgpu.Barrier()]
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=scratch,
        grid=(1,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
    )
    with pytest.raises(AssertionError, match="found a race"), races():
        jax.block_until_ready(kernel(x))


X, W, GATED = (
    jnp.ones((4, 8), jnp.bfloat16),
    jnp.ones((8, 6), jnp.bfloat16),
    (jnp.ones((8, 6), jnp.bfloat16),) * 2,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (X, jnp.ones((9, 6), jnp.bfloat16)),
            r"w is \[9, 6\], and x is \[4, 8\]: \[8, 6\] is needed",
        ),
        ((X, W[0]), r"w is \[6\]"),
        ((X, W[0, 0]), r"w is \[\]"),
        ((X[0, 0], W), r"x is bfloat16\[\]: \[..., K\]"),
        ((X, W.astype(jnp.float32)), r"x is bfloat16 and w float32: one dtype is needed"),
        ((X.astype(int), W.astype(int)), r"x is int32.* of a float dtype"),
        ((X, W, jnp.ones(5)), r"bias is \[5\].*\[6\] is needed"),
        ((X, W, None, "relu6"), r"'relu6' is unknown: choose from None, 'gelu', 'silu'"),
        ((X, W, None, None, jnp.ones((4, 5))), r"accumulate is \[4, 5\].*\[4, 6\] is needed"),
        ((X, GATED, jnp.ones(6)), r"1 of bias for 2 of w"),
        ((X, (W, W, W)), r"3 weights: one, or two"),
        (
            (X, W, None, None, None, "triton"),
            r"'triton' is unknown: choose from mosaic, xla, reference, or None",
        ),
    ],
)
def test_matmul_of_bad_input_says_what_is_needed(arguments, message):
    with pytest.raises(ValueError, match=message):
        matmul(*arguments)


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "Tesla V100-SXM2-16GB"])
def test_matmul_kernel_named_for_another_gpu_than_hopper_is_refused(kind):
    with (
        on_gpu(kind),
        pytest.raises(
            NotImplementedError,
            match=f"needs a Hopper GPU .* for gpu '{kind}'; choose xla, reference",
        ),
    ):
        jax.eval_shape(lambda: matmul(X, W, implementation="mosaic"))


def test_matmul_of_integers_as_a_result_is_refused():
    with pytest.raises(ValueError, match="preferred_element_type=int32: a float dtype"):
        matmul(X, W, preferred_element_type=jnp.int32)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (4, 0)])
def test_matmul_of_nothing_is_zeros(shape):
    y = matmul(jnp.ones(shape, jnp.bfloat16), jnp.ones((shape[-1], 6), jnp.bfloat16))
    np.testing.assert_array_equal(y, np.zeros((*shape[:-1], 6)))


def test_matmul_kernel_named_on_a_cpu_is_refused():
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU .* for cpu"):
        matmul(X, W, implementation="mosaic")


@pytest.mark.parametrize(
    ("x", "w", "out", "message"),
    [
        (
            X.astype(jnp.float32),
            W.astype(jnp.float32),
            None,
            "multiplies bfloat16 and float16, not float32",
        ),
        (X, W, jnp.float16, "the result is bfloat16 or float32, not float16"),
        (X[:0], W, None, "dims of 0"),
    ],
)
def test_matmul_kernel_named_for_what_it_has_no_code_for_is_refused(x, w, out, message):
    with on_gpu("NVIDIA H200"), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda: matmul(x, w, implementation="mosaic", preferred_element_type=out))


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200 141GB HBM3e", "NVIDIA GH200 480GB", "NVIDIA H20"]
)
def test_matmul_kernel_named_for_a_hopper_gpu_is_traced(kind):
    with on_gpu(kind):
        jaxpr = jax.make_jaxpr(lambda: matmul(X, W, implementation="mosaic"))()
    assert "mpmd_map" in str(jaxpr)  # a kernel


def test_matmul_chosen_by_none_is_logged_once_with_the_reason(caplog):
    dispatch.log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        ys = [matmul(X, W) for _ in range(2)]
    np.testing.assert_array_equal(ys[1], matmul(X, W, implementation="xla"))
    [record] = caplog.records
    assert record.getMessage().startswith("matmul runs as xla (not mosaic: it needs a Hopper GPU")


def test_matmul_on_hopper_is_xlas_until_a_measurement_says_otherwise(caplog):
    dispatch.log_choice.cache_clear()
    with on_gpu("NVIDIA H200"), caplog.at_level(logging.INFO, logger="pallas_kernels"):
        jaxpr = jax.make_jaxpr(lambda: matmul(X, W))()
    assert "mpmd_map" not in str(jaxpr)
    assert [record.getMessage() for record in caplog.records] == [
        "matmul runs as xla (not mosaic: no measurement of this shape on this GPU says that it is faster)"
    ]


def test_matmul_dispatch_raises_where_nothing_serves():
    with pytest.raises(
        NotImplementedError, match="no implementation serves: not mosaic: a; not xla: b"
    ):
        dispatch.resolve("op", None, {"mosaic": "a", "xla": "b"}, {})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_m": 64}, "block_m=64"),
        ({"block_k": 32}, "block_k=32"),
        ({"block_m": 256, "block_n": 256}, "do not fit the registers"),
        ({"num_stages": 1}, "2 stages or more"),
        ({"cluster_m": 2, "cluster_n": 2}, "a cluster is of one block or of two"),
        ({"cluster_m": 2, "num_cores": 131}, "num_cores is a multiple of its blocks"),
        ({"num_stages": 8}, "bytes of shared memory, and a block has 231424: lower num_stages"),
    ],
)
def test_matmul_config_that_does_not_fit_is_refused(sizes, message):
    with on_gpu("NVIDIA H200"), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: matmul(X, W, implementation="mosaic", config=Config(**sizes)))


@settings(deadline=None, max_examples=100)
@given(
    m=st.integers(1, 1 << 17),
    n=st.integers(1, 1 << 18),
    num_weights=st.sampled_from([1, 2]),
    out=st.sampled_from([jnp.bfloat16, jnp.float32]),
    bias=st.sampled_from([None, jnp.bfloat16, jnp.float32]),
    accumulate=st.sampled_from([None, jnp.bfloat16, jnp.float32]),
    num_cores=st.sampled_from([114, 132]),
)
def test_matmul_config_chosen_fits_and_leaves_no_stage_out(
    m, n, num_weights, out, bias, accumulate, num_cores
):
    problem = Problem(
        m=m,
        n=n,
        k=64,
        num_weights=num_weights,
        dtype=jnp.dtype(jnp.bfloat16),
        out_dtype=jnp.dtype(out),
        bias_dtype=bias and jnp.dtype(bias),
        accumulate_dtype=accumulate and jnp.dtype(accumulate),
    )
    config = choose(problem, num_cores)
    problem.check(config)
    more = dataclasses.replace(config, num_stages=config.num_stages + 1)
    assert config.num_stages == 6 or problem.shared_bytes(more) > SHARED_BYTES
    if math.ceil(m / 128) * math.ceil(n / 256) > 100 * num_cores:  # the last wave no longer counts
        assert config.block_m * config.block_n == 128 * 256
