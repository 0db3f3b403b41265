"""The quantize kernels compiled for an absent H200: registers, copies, memory."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantize import Quantized, dequantize, quantize
from zerojax import aot

pytestmark = pytest.mark.xdist_group("kernels_h200")
BF16, F16, F32, E4M3, E5M2, I8 = (
    jnp.bfloat16,
    jnp.float16,
    jnp.float32,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.int8,
)
KEY = jax.eval_shape(lambda: jax.random.PRNGKey(0))


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def check(report, reads: int) -> None:
    assert report.spill_bytes() == 0
    assert report.count("UTMALDG") >= reads  # TMA, to shared memory
    assert report.count("UTMASTG") >= 1  # and back to global memory
    assert report.count("LDL") + report.count("STL") == 0
    assert report.hlo.count('custom_call_target="mosaic_gpu_v2"') == 1


@pytest.mark.by_default(
    "shape0-bfloat16-int8-256", "shape1-float32-int8-128", "shape3-float16-float8_e5m2-64"
)
@pytest.mark.parametrize(
    ("shape", "in_dtype", "dtype", "block_size"),
    [
        ((8192, 8192), BF16, I8, 256),
        ((8192, 8192), F32, I8, 128),
        ((1 << 26,), BF16, E4M3, 128),
        ((8192, 8192), F16, E5M2, 64),
        ((4096, 4096), BF16, E4M3, 512),
    ],
)
def test_quantize_kernel_for_h200_reads_and_writes_once_without_spills(
    compile_for_h200, shape, in_dtype, dtype, block_size
):
    report = compile_for_h200(
        lambda x: quantize(x, dtype, block_size, implementation="mosaic"), abstract(shape, in_dtype)
    )
    check(report, reads=1)
    # Nothing runs before or after the kernel: blocks and fp8 are other names of the same memory.
    assert report.temp_bytes <= 16  # the addresses of the two results
    assert not re.search(r" (copy|fusion|transpose|convert|pad)\(", report.hlo)
    # A thread has block_size / 2 elements of a tile: no product is rounded together with a sum. The
    # products of fp8 are exact.
    if dtype == I8:
        assert report.count("FFMA") < block_size // 2


@pytest.mark.by_default("int8-256", "float8_e4m3fn-128")
@pytest.mark.parametrize("block_size", [128, 256])
@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_quantize_kernel_for_h200_rounds_stochastically_without_spills(
    compile_for_h200, dtype, block_size
):
    def f(x, key):
        return quantize(x, dtype, block_size, key, "mosaic")

    report = compile_for_h200(f, abstract((8192, 8192), BF16), KEY)
    check(report, reads=2)
    words = 4 * 8192 * 8192 // block_size
    assert (
        words <= report.temp_bytes <= words + 1024
    )  # random bits are made from one word per block, in the kernel


@pytest.mark.parametrize(
    ("dtype", "out", "block_size"), [(I8, BF16, 256), (E4M3, F32, 128), (E5M2, F16, 64)]
)
def test_dequantize_kernel_for_h200_reads_and_writes_once_without_spills(
    compile_for_h200, dtype, out, block_size
):
    def f(values, scales):
        return dequantize(Quantized(values, scales, block_size), out, "mosaic")

    report = compile_for_h200(
        f, abstract((8192, 8192), dtype), abstract((8192, 8192 // block_size), F32)
    )
    check(report, reads=2)
    assert report.temp_bytes == 0
    assert not re.search(r" (copy|fusion|transpose|convert|pad)\(", report.hlo)


@pytest.mark.by_default("shape0-copied0")
@pytest.mark.parametrize(
    ("shape", "copied"),
    [((1000, 1000), (1000, 1024)), ((1003, 128), (1008, 128)), ((5,), (8, 128))],
)
def test_quantize_kernels_for_h200_of_ragged_dims_copy_them(compile_for_h200, shape, copied):
    report = compile_for_h200(
        lambda x: quantize(x, I8, 128, implementation="mosaic"), abstract(shape, BF16)
    )
    check(report, reads=1)
    assert report.temp_bytes >= 2 * copied[0] * copied[1]  # the control of the checks above
    q = jax.eval_shape(lambda x: quantize(x, I8, 128, implementation="xla"), abstract(shape, BF16))
    back = compile_for_h200(lambda q: dequantize(q, F32, "mosaic"), q)
    check(back, reads=2)
    assert back.temp_bytes >= 4 * copied[0] * copied[1]


@pytest.mark.parametrize("checks", [True, False])
def test_quantize_kernels_for_h200_in_shard_map_are_one_of_each_a_shard(h200_compiler, checks):
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8)

    def there_and_back(x, key):
        return dequantize(quantize(x, I8, 256, key, "mosaic"), BF16, "mosaic")

    f = jax.shard_map(
        there_and_back, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P("fsdp"), check_vma=checks
    )
    x = jax.ShapeDtypeStruct((8192, 512), BF16, sharding=NamedSharding(mesh, P("fsdp")))
    key = jax.ShapeDtypeStruct(KEY.shape, KEY.dtype, sharding=NamedSharding(mesh, P()))
    hlo = jax.jit(f).trace(x, key).lower(lowering_platforms=("cuda",)).compile().as_text() or ""
    assert hlo.count('custom_call_target="mosaic_gpu_v2"') == 2
    assert "all-" not in hlo  # no collective
