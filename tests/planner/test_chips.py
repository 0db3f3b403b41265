"""One GPU has one set of figures, whoever asks: the planner's machines, programs compiled for it, predictions."""

import re

import pytest

import zerojax as zj
from zerojax import aot, hlo, planner
from zerojax.chips import CHIPS, RESERVED_BYTES, chip_of
from zerojax.machines import machine_of

AS_THE_PAPERS_SAY = {"v100-32"}
"""Whose memory and products are those that ZeRO's authors had."""


@pytest.mark.parametrize("name", sorted(CHIPS.keys() - AS_THE_PAPERS_SAY))
def test_planner_and_predictions_read_the_table(name):
    chip, machine = CHIPS[name], zj.machine(name)
    assert machine.device_bytes == chip.allocatable_bytes == chip.memory_bytes - RESERVED_BYTES
    assert dict(machine.peak_flops) == dict(chip.peak)
    assert machine.rates() == hlo.RATES[name]
    # What programs attain is below what the vendor printed, and above half of it.
    attained = (
        (hlo.RATES[name].products, chip.half_peak),
        (hlo.RATES[name].products_float32, chip.peak["fp32"]),
        (hlo.RATES[name].memory, chip.memory_rate),
        (hlo.RATES[name].link, chip.link_rate),
    )
    assert all(0.5 < rate / peak < 1 for rate, peak in attained)
    assert all(chip_of(kind) is chip and machine_of(kind) == name for kind in chip.device_kinds)


@pytest.mark.parametrize("name", [*aot.CHIPS])
def test_programs_are_compiled_for_the_tables_chip(name):
    chip, text = CHIPS[name], aot.target_config(name)
    assert aot.CHIPS[name] is chip
    for field, value in (
        ("device_memory_size", chip.memory_bytes),
        ("memory_bandwidth", round(chip.memory_rate)),
        ("core_count", chip.die.cores),
    ):
        assert re.findall(rf"{field}: (\d+)", text) == [str(value)]
    assert f'name: "{chip.device_kinds[0]}"' in text
    assert f"major: {chip.capability[0]}" in text


def test_no_two_chips_have_a_name_in_common():
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert set(CHIPS) <= set(planner.NAMED)
    assert chip_of("NVIDIA H300") is None
