"""benchmarks/kernels.py runs every case and reports wrong results.

On a CPU it says that nothing is measured.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from kernel_cases import MOSAIC, UNFUSED, XLA

SMALL = kernels.cases(small=True)


@pytest.mark.exhaustive  # by default each kernel's own tests run its cases
def test_kernel_benchmark_runs_every_case_and_says_that_a_cpu_measures_nothing():
    lines = list(kernels.table(small=True, rounds=1))
    assert all(right for _, right in lines)
    texts = [text for text, _ in lines]
    assert kernels.NO_MEASUREMENT in texts
    rows = {
        tuple(cell.strip() for cell in text.split("|")[1:3]): text
        for text in texts
        if text.startswith("| ")
    }
    assert set(rows) == {("case", "contender")} | {
        (case.name, name) for case in SMALL for name in case.programs
    }
    for (_, name), text in rows.items():
        assert ("not run: " in text and "needs a Hopper GPU" in text) == (name == MOSAIC)


@pytest.mark.by_default(  # one of each op
    "matmul 192 x 128 x 320, bias, gelu",
    "linear_cross_entropy 64 x 32 x 512, with gradients",
    "quantize 128 x 512, bfloat16 to int8, blocks of 256",
    "dequantize 128 x 512, int8 to bfloat16, blocks of 256",
    "dequantize_nf4 65536, 4 bits to bfloat16",
)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_kernel_benchmark_tells_of_a_wrong_result(case):
    def spoil(_: Any, value: Any) -> Any:
        return jax.tree.map(
            lambda a: a * 1.05 if a.dtype in (jnp.float32, jnp.bfloat16) else a, value
        )

    wrong = dataclasses.replace(case, programs={UNFUSED: [*case.programs[UNFUSED], spoil]})
    found: Any = kernels.measure(wrong, rounds=0)[UNFUSED]
    assert found.error > 1


def test_kernel_benchmark_takes_ratios_in_a_round_and_shares_of_the_peak():
    found = {
        MOSAIC: kernels.Found([1.0, 2.0, 3.0], 0, 0.5),
        XLA: kernels.Found([2.0, 1.0, 2.0], 1 << 20, 0.25),
    }
    case = dataclasses.replace(SMALL[0], work=4e12)
    assert kernels.words(case, MOSAIC, found, {"flops": 8e12, "bytes": 1.0}) == [
        "2e+03 ms", "2 TFLOP/s", "0.25", "1.50 (0.50-2.00)", "0 MiB", "0.50",
    ]  # fmt: skip
    assert kernels.words(case, XLA, {XLA: "no"}, {}) == ["not run: no", "", "", "", "", ""]


def test_kernel_benchmark_counts_what_lies_between_unfused_programs():
    f32 = jnp.zeros((256, 256), jnp.float32)
    case = dataclasses.replace(SMALL[0], arrays=(f32,), accumulates=False)
    steps = [lambda arrays, _: arrays[0] + 1, lambda _, z: (z, z * 2), lambda _, z: z[0] + z[1]]
    assert kernels.Contender(case, steps[:1], (f32,)).extra_bytes == 0
    assert (
        kernels.Contender(case, steps, (f32,)).extra_bytes == 2 * f32.nbytes
    )  # z, and z * 2 next to it
    np.testing.assert_array_equal(kernels.Contender(case, steps, (f32,))(), 3)
