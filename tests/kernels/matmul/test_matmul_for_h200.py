"""The matmul kernel compiled for an absent H200.

Its tensor core instructions, registers and memory are checked.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import matmul_sweep
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.matmul import Config, matmul
from zerojax import aot

pytestmark = pytest.mark.xdist_group("kernels_h200")
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def terms(shape, dtype, num_weights, bias, accumulate):
    m, n, k = shape
    pair = range(num_weights)
    return (
        abstract((m, k), dtype),
        tuple(abstract((k, n), dtype) for _ in pair),
        tuple(abstract((n,), bias) for _ in pair) if bias else None,
        tuple(abstract((m, n), accumulate) for _ in pair) if accumulate else None,
    )


@pytest.mark.by_default(
    "shape5-bfloat16-1-gelu-float32-float32-bfloat16-None",
    "shape7-bfloat16-1-silu-None-None-None-config7",
)
@pytest.mark.parametrize(
    ("shape", "dtype", "num_weights", "activation", "bias", "accumulate", "out", "config"),
    [
        ((8192, 8192, 8192), BF16, 1, None, None, None, None, None),
        ((1000, 1088, 960), F16, 1, "gelu", F16, None, None, None),
        ((1001, 1001, 999), BF16, 1, None, None, BF16, None, None),  # no dim is divisible by 8
        ((1004, 1024, 1024), F16, 2, "silu", F16, None, None, None),
        ((16384, 4096, 16384), BF16, 1, None, None, F32, None, None),
        ((4096, 4096, 4096), BF16, 1, "gelu", F32, F32, BF16, None),
        ((4096, 14336, 4096), BF16, 2, "silu", BF16, F32, None, None),
        ((4096, 4096, 4096), BF16, 1, "silu", None, None, None, Config(block_m=256, block_n=128)),
        ((4096, 4096, 4096), BF16, 1, None, None, None, None, Config(block_n=64)),
    ],
)
def test_matmul_kernel_for_h200_multiplies_on_tensor_cores_without_spills(
    compile_for_h200, shape, dtype, num_weights, activation, bias, accumulate, out, config
):
    def f(x, w, bias, accumulate):
        return matmul(
            x, w, bias, activation, accumulate, "mosaic", preferred_element_type=out, config=config
        )

    report = compile_for_h200(f, *terms(shape, dtype, num_weights, bias, accumulate))
    assert report.count("HGMMA") >= 4 * num_weights  # 64 of K in steps of 16
    assert report.spill_bytes() == 0
    assert report.registers() == 168  # of 65536 per core, for 384 threads
    assert "serialized" not in report.ptxas  # ptxas's warning that products wait for each other
    assert report.count("UTMALDG") >= 1 + num_weights  # TMA, to shared memory
    assert report.count("UTMASTG") >= 1  # and back to global memory


@pytest.mark.by_default("gated-along-m", "128-cores")
@pytest.mark.parametrize(
    ("num_weights", "accumulate", "config"),
    [
        pytest.param(1, None, Config(cluster_m=2), id="along-m"),
        pytest.param(1, None, Config(block_m=256, block_n=128, cluster_n=2), id="along-n"),
        pytest.param(1, F32, Config(num_cores=128, num_stages=3, cluster_n=2), id="128-cores"),
        pytest.param(2, None, Config(cluster_m=2), id="gated-along-m"),
        pytest.param(2, BF16, Config(num_stages=2, cluster_m=2), id="gated-in-place"),
    ],
)
def test_matmul_kernel_for_h200_in_clusters_shares_loads_without_spills(
    compile_for_h200, num_weights, accumulate, config
):
    def f(x, w, bias, accumulate):
        return matmul(
            x, w, bias, "silu" if num_weights == 2 else None, accumulate, "mosaic", config=config
        )

    report = compile_for_h200(f, *terms((4096, 4096, 4096), BF16, num_weights, None, accumulate))
    shared, loads = report.count("UTMALDG.4D.MULTICAST"), report.count("UTMALDG.4D")
    each = (
        num_weights if config.cluster_m == 2 else 1
    )  # shared loads of a step: of the weights, or of x
    if accumulate is None:
        assert shared
        assert (
            shared * (1 + num_weights) == loads * each
        )  # however often the assembler unrolls the step
    else:  # the accumulated array is loaded too, and not shared
        assert each <= shared < loads
    assert report.count("HGMMA") >= 4 * num_weights
    assert report.spill_bytes() == 0
    assert report.registers() == 168


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "product", matmul_sweep.swept(small=False), ids=lambda product: product.name
)
def test_every_size_of_the_sweep_compiles_for_h200_without_spills(compile_for_h200, product):
    first = matmul_sweep.tiles_and_clusters(product.problem, 132)
    others = [
        vary(product.problem, c)
        for c in first[:3]
        for vary in (matmul_sweep.fewer_cores, matmul_sweep.other_depths)
    ]
    case = product.case()
    total = case.arrays[-1] if case.accumulates else None
    for config in dict.fromkeys([*first, *itertools.chain(*others)]):
        report = compile_for_h200(product.step("mosaic", config), case.arrays, total)
        assert report.spill_bytes() == 0, config
        assert (report.count("UTMALDG.4D.MULTICAST") > 0) == (config.cluster > 1), config


def test_matmul_gradient_for_h200_runs_one_kernel_and_leaves_products_to_cublas(compile_for_h200):
    def loss(x, w):
        return matmul(x, w, None, "silu", implementation="mosaic").astype(F32).sum()

    arrays = terms((4096, 4096, 4096), BF16, 2, None, None)[:2]
    report = compile_for_h200(jax.grad(loss, argnums=(0, 1)), *arrays)
    assert report.hlo.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert len(re.findall(r" dot\(|__cublas", report.hlo)) == 4  # dx of each weight, and dw of each
    assert report.spill_bytes() == 0


@pytest.mark.parametrize("checks", [True, False])
def test_matmul_for_h200_in_shard_map_is_one_kernel_a_shard_in_place_where_jax_lets_it(
    h200_compiler, checks
):
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8)
    specs = (P("fsdp"), P(), P("fsdp"))

    def f(x, w, accumulate):
        return matmul(x, w, None, "gelu", accumulate, "mosaic")

    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(
            ((8192, 512), (512, 1024), (8192, 1024)), (BF16, BF16, F32), specs, strict=True
        )
    ]
    sharded = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=checks)
    compiled = (
        jax.jit(sharded, donate_argnums=2)
        .trace(*arrays)
        .lower(lowering_platforms=("cuda",))
        .compile()
    )
    hlo = compiled.as_text() or ""
    assert hlo.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert ("output_to_operand_aliasing" in hlo) == (not checks)
    assert "all-" not in hlo  # no collective
    gradient = jax.grad(lambda *a: sharded(*a).astype(F32).sum(), argnums=(0, 1, 2))
    assert [g.dtype for g in jax.eval_shape(gradient, *arrays)] == [BF16, BF16, F32]


def test_matmul_accumulated_for_h200_into_donated_memory_takes_no_other(compile_for_h200):
    def f(x, w, accumulate):
        return matmul(x, w, None, None, accumulate, "mosaic")

    arrays = [abstract((4096, 4096), dtype) for dtype in (BF16, BF16, F32)]
    donated = compile_for_h200(f, *arrays, donate=(2,))
    assert "output_to_operand_aliasing" in donated.hlo
    assert donated.temp_bytes == 0
    assert " copy(" not in donated.hlo
    assert (
        " copy(" in compile_for_h200(f, *arrays).hlo
    )  # the control: memory that is kept is copied
