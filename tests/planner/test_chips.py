"""A GPU has one set of figures, used by the planner, by compilation and by predictions."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax import aot, hlo, planner
from zerojax.chips import CHIPS, RESERVED_BYTES, find_chip
from zerojax.machines import machine_of

ATTAINED = {"v100-32": 70e12}
"""FLOP/s of 16-bit products attained by ZeRO-Infinity's authors.

The planner uses them instead of a fraction of the peak.
"""


@pytest.mark.parametrize("name", [*CHIPS])
def test_planner_and_predictions_read_the_table(name):
    chip, machine = CHIPS[name], zj.machine(name)
    assert machine.device_bytes == chip.allocatable_bytes == chip.memory_bytes - RESERVED_BYTES
    assert dict(machine.peak_flops) == dict(chip.peak)
    assert machine.link_up == machine.link_down == hlo.RATES[name].link
    if name in ATTAINED:
        assert machine.rates().products == ATTAINED[name]
    else:
        assert machine.rates() == hlo.RATES[name]
    # Programs attain less than the vendor's printed figure, and more than half of it.
    attained = (
        (hlo.RATES[name].products, chip.half_peak),
        (hlo.RATES[name].products_float32, chip.peak["fp32"]),
        (hlo.RATES[name].memory, chip.memory_rate),
        (hlo.RATES[name].link, chip.link_rate),
    )
    assert all(0.5 < rate / peak < 1 for rate, peak in attained)
    assert all(find_chip(kind) is chip and machine_of(kind) == name for kind in chip.device_kinds)


@pytest.mark.parametrize("name", [*aot.CHIPS])
def test_programs_are_compiled_for_the_tables_chip(name):
    chip, text = CHIPS[name], aot.target_config(name)
    assert aot.CHIPS[name] is chip
    for field, value in (
        ("device_memory_size", chip.memory_bytes),
        ("memory_bandwidth", round(chip.memory_rate)),
        ("core_count", chip.die.cores),
        ("l2_cache_size", chip.die.l2_bytes),
        (
            "pcie_bandwidth",
            {4: 32 << 30, 5: 64 << 30}[chip.pcie],
        ),  # XLA's cuda_executor.cc: 0.25 GiB per lane, doubled
    ):
        assert re.findall(rf"{field}: (\d+)", text) == [str(value)]
    links = [str(chip.nvlinks)] if chip.nvlinks else []
    assert re.findall(r"active_links: (\d+)", text) == links
    assert f'name: "{chip.device_kinds[0]}"' in text
    assert f"major: {chip.capability[0]}" in text
    assert (
        chip.link_rate < int(re.findall(r"pcie_bandwidth: (\d+)", text)[0]) < 1.1 * chip.link_rate
    )


@pytest.mark.parametrize("name", [*aot.CHIPS])
def test_xla_compiles_a_product_and_a_sum_for_each_chip(name, h200_compiler):
    mesh = aot.gpu_mesh(name, hosts=1, gpus_per_host=1)
    x, w = (
        jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
        for _ in range(2)
    )
    compiled = (
        jax.jit(lambda x, w: jnp.sum(jax.nn.relu(x @ w), axis=1, dtype=jnp.float32))
        .lower(x, w)
        .compile()
    )
    assert mesh.devices.flat[0].device_kind == CHIPS[name].device_kinds[0]
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 256 * 256 * 2


def test_nvlink_rates_belong_to_their_links():
    """A link has 50 GB/s in both directions together.

    The fifth generation, which the B200 has, has 100 GB/s.
    """
    for chip in CHIPS.values():
        a_link = 100e9 if chip.capability == (10, 0) else 50e9
        assert (chip.nvlink or 0) == chip.nvlinks * a_link


def test_no_two_chips_have_a_name_in_common():
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert set(CHIPS) <= set(planner.NAMED)
    assert find_chip("NVIDIA H300") is None
