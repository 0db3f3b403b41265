"""The kernels of linear_cross_entropy compiled for an absent H200.

The sizes are 16K tokens, D 4096, and a vocabulary of 128K.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.linear_cross_entropy import KernelConfig, linear_cross_entropy, mosaic
from pallas_kernels.linear_cross_entropy.reference import Form

pytestmark = pytest.mark.xdist_group("kernels_h200")
BF16, F16, F32, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32
T, D, V = 16384, 4096, 131072
SUMS = 132 * 128 * D * 4
"""Bytes of all cores' float32 sums of dw."""
FORM = Form(V, label_smoothing=0.1, z_loss=1e-4, softcap=30.0)


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(dtype):
    return abstract((T, D), dtype), abstract((D, V), dtype), abstract((T,), I32)


def check(report, num_kernels, temp_bytes):
    assert report.spill_bytes() == 0
    assert report.count("LDL") + report.count("STL") == 0
    assert report.registers() == 168  # of 65536 per core, for 384 threads
    assert "serialized" not in report.ptxas  # ptxas's warning that products wait for each other
    assert report.hlo.count('custom_call_target="mosaic_gpu_v2"') == num_kernels
    assert report.count("UTMALDG") >= 2 * num_kernels  # TMA: x and w
    assert report.temp_bytes <= temp_bytes


def test_forward_kernel_for_h200_multiplies_on_tensor_cores_and_writes_statistics_alone(
    compile_for_h200,
):
    config = KernelConfig(num_cores=132)
    report = compile_for_h200(functools.partial(mosaic.forward, FORM, config), *operands(F16))
    check(report, 1, 1 << 22)
    assert report.count("HGMMA") >= 4  # 64 of D in steps of 16


@pytest.mark.parametrize("of", ["x", "w"])
def test_backward_kernels_for_h200_multiply_on_tensor_cores_without_spills(compile_for_h200, of):
    config = KernelConfig(num_cores=132)

    def gradient(*arrays):
        return mosaic.backward(FORM, config, *arrays)["xw".index(of)]

    report = compile_for_h200(gradient, *operands(F16), abstract((T,), F32), abstract((T,), F32))
    check(report, 1, SUMS + (1 << 20))
    assert report.count("HGMMA") >= 4 + 8  # 64 of D; 128 columns or tokens


@pytest.mark.exhaustive  # by default its kernels are compiled one by one
def test_loss_and_gradients_for_h200_take_float32_sums_and_no_array_of_logits(compile_for_h200):
    loss = functools.partial(
        linear_cross_entropy, implementation="mosaic", config=KernelConfig(backward=True)
    )
    report = compile_for_h200(jax.value_and_grad(loss, (0, 1)), *operands(BF16))
    check(report, 3, SUMS + (1 << 22))
    assert report.temp_bytes >= SUMS
    assert report.count("HGMMA") >= 4 + 2 * (4 + 8)
    assert not re.search(r" dot\(|__cublas", report.hlo)
    sizes = [
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", report.hlo)
    ]
    assert max(sizes) == D * V  # w
