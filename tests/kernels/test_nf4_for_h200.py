"""The nf4 kernels compiled for an absent H200: registers, copies, memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.nf4 import dequantize_nf4, quantize_nf4
from zerojax import aot

pytestmark = pytest.mark.xdist_group("kernels_h200")
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SIZE = 8192 * 8192
LARGEST = 4 * SIZE // 64  # bytes of a float32 per block
QUANTIZED = jax.eval_shape(quantize_nf4, jax.ShapeDtypeStruct((SIZE,), BF16))


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def check(report, reads: int) -> None:
    assert report.spill_bytes() == 0
    assert report.count("UTMALDG") >= reads  # TMA, to shared memory
    assert report.count("UTMASTG") >= 1  # and back to global memory
    assert report.count("LDL") + report.count("STL") == 0
    assert report.hlo.count('custom_call_target="mosaic_gpu_v2"') == 1


@pytest.mark.by_default("bfloat16")
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_quantize_nf4_kernel_for_h200_reads_and_writes_once_without_spills(compile_for_h200, dtype):
    report = compile_for_h200(
        lambda x: quantize_nf4(x, implementation="mosaic"), abstract((SIZE,), dtype)
    )
    check(report, reads=1)
    # One float32 per block moves from the kernel to the program that makes 8 bits of it.
    assert LARGEST <= report.temp_bytes <= 2.1 * LARGEST
    assert report.count("FFMA") == 0  # no product is rounded together with a sum


@pytest.mark.by_default("bfloat16")
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_dequantize_nf4_kernel_for_h200_reads_and_writes_once_without_spills(
    compile_for_h200, dtype
):
    report = compile_for_h200(lambda q: dequantize_nf4(q, dtype, "mosaic"), QUANTIZED)
    check(report, reads=2)
    assert report.temp_bytes <= 1.01 * LARGEST
    assert report.count("FFMA") == 0
    # A thread has 32 elements of a tile, which select at most 15 times.
    assert report.count("FSEL") + report.count("SEL") <= 15 * 32


def test_dequantize_nf4_by_xla_for_h200_is_one_program_that_keeps_nothing(h200_compiler):
    sharding = NamedSharding(aot.gpu_mesh("h200", hosts=1, gpus_per_host=1), PartitionSpec())
    q = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), QUANTIZED)
    compiled = (
        jax.jit(lambda q: dequantize_nf4(q, BF16))
        .trace(q)
        .lower(lowering_platforms=("cuda",))
        .compile()
    )
    stats: Any = compiled.memory_analysis()
    # XLA computes the two shifts for a byte's halves beforehand
    assert stats.temp_size_in_bytes <= 8
    assert len(re.findall(r" fusion\(.*q_codes", compiled.as_text() or "")) == 1
    assert (
        len(re.findall(r" fusion\([^)]", compiled.as_text() or "")) == 1
    )  # only that one reads an array
