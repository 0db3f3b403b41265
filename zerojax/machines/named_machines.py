"""Named machines, from vendors' figures and assumptions about them; and machines read from files.

`zerojax.chips` has the figures that vendors publish, and `zerojax.hlo.RATES` the rates that
programs are assumed to attain. A machine's `source` names the assumed fraction. Only NVLink's
fraction is assumed here. None of these rates were measured; `zerojax probe` measures them. The
figures of the DGX-2 were measured by the authors of ZeRO-Infinity.
"""

import dataclasses
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zerojax.chips import CHIPS, MIB, RESERVED_BYTES, Chip, find_chip
from zerojax.hlo import RATES
from zerojax.machines.machine_files import read
from zerojax.machines.machines import BY_DTYPE, COUNTS, FIGURES, Machine, find_wrong_entry, nearest

_NVLINK_SHARE = 0.8
"""Fraction of NVLink's one-way bandwidth that collectives are assumed to attain."""


def _gpu(chip: Chip) -> Machine:
    """Return a machine with one kind of GPU, with unknown host and disk."""
    rates = RATES[chip.name]
    sheet = chip.sheet
    flops = dict.fromkeys(chip.peak, rates.products)
    if "fp32" in flops:
        flops["fp32"] = rates.products_float32
    nvlink = None if chip.nvlink is None else _NVLINK_SHARE * chip.nvlink / 2

    def assumed(rate: float, printed: float, document: str) -> str:
        return f"assumed: share {rate / printed:.2g} of {printed:.4g}, {document}"

    detailed_sheet = f"{sheet}, {chip.detail}" if chip.detail else sheet
    source = {
        "device_bytes": f"nvidia-smi's total of {chip.memory_bytes // MIB} MiB, "
        f"less {RESERVED_BYTES // MIB} MiB assumed"
    }
    for dtype in chip.peak:
        source[f"peak_flops.{dtype}"] = sheet if dtype == "fp32" else detailed_sheet
    source |= {
        f"flops.{dtype}": assumed(flops[dtype], chip.peak[dtype], sheet) for dtype in chip.peak
    }
    link = assumed(rates.link, chip.link_rate, f"PCIe {chip.pcie} x{chip.lanes}, {sheet}")
    source |= {
        "memory_rate": assumed(rates.memory, chip.memory_rate, sheet),
        "link_up": link,
        "link_down": link,
        "link_both": "assumed: the two directions do not slow each other",
    }
    if chip.nvlink is not None and nvlink is not None:
        source["network_in_node"] = assumed(nvlink, chip.nvlink / 2, f"NVLink one way, {sheet}")
    return Machine(
        name=chip.name,
        devices_per_node=chip.devices_per_node,
        device_bytes=chip.allocatable_bytes,
        peak_flops=chip.peak,
        flops=flops,
        memory_rate=rates.memory,
        link_up=rates.link,
        link_down=rates.link,
        link_both=2 * rates.link,
        network_in_node=nvlink,
        source=source,
    )


_INFINITY = "ZeRO-Infinity (arXiv:2104.07857)"
_V100 = _gpu(CHIPS["v100-32"])
_V100 = dataclasses.replace(
    _V100,
    flops={**_V100.flops, "fp16": 70e12},
    source={
        **_V100.source,
        "flops.fp16": f"{_INFINITY}, section 4: 70 TFLOP/s attained on a V100",
    },
)
_DGX2 = dataclasses.replace(
    _V100,
    name="dgx2",
    devices_per_node=16,
    device_bytes=32 * 10**9,
    host_bytes=1.5e12,
    disk_bytes=28e12,
    memory_rate=600e9,
    link_up=3.0e9,
    link_down=3.0e9,
    link_both=6.0e9,
    network_in_node=150e9,
    network_between_nodes=60e9,
    disk_read=16 * 1.6e9,
    disk_write=16 * 1.6e9,
    disk_both=16 * 1.6e9,
    source={
        **_V100.source,
        "device_bytes": f"{_INFINITY}: 32 GB",
        "host_bytes": f"{_INFINITY}, figure 2b",
        "disk_bytes": f"{_INFINITY}, figure 2b",
        "memory_rate": f"{_INFINITY}, figure 2b: the lower of 600-900 GB/s",
        "link_up": f"{_INFINITY}, figure 2b: 3.0 GB/s per GPU with all 16 active",
        "link_down": "assumed: same as link_up",
        "link_both": "assumed: the two directions do not slow each other",
        "network_in_node": f"{_INFINITY}, figure 2b: the lower of 150-300 GB/s",
        "network_between_nodes": f"{_INFINITY}, figure 2b: the lower of 60-100 GB/s",
        "disk_read": f"{_INFINITY}, figure 2b: 1.6 GB/s per GPU with all 16 active",
        "disk_write": "assumed: same as disk_read",
        "disk_both": "assumed: reads and writes together are as fast as reads alone",
    },
)

NAMED: Mapping[str, Machine] = MappingProxyType(
    {name: _gpu(chip) for name, chip in CHIPS.items()}
    | {machine.name: machine for machine in (_V100, _DGX2)}
)
"""Machines by name: one per kind of GPU, with unknown host and disk, and ZeRO-Infinity's DGX-2."""


def machine_of(device_kind: str) -> str | None:
    """Return the name of the machine with these devices, or None if it is not known.

    Args:
      device_kind: `device_kind` of a JAX device, such as "NVIDIA H200".
    """
    chip = find_chip(device_kind)
    return None if chip is None else chip.name


def machine(
    name: str | os.PathLike[str], *, nodes: int | None = None, devices_per_node: int | None = None
) -> Machine:
    """Return a machine by its name or from a file.

    Args:
      name: a name that `zerojax machines` lists, or the path of a TOML file. The file's keys are
        the attributes of `Machine`: `link_up = 5e10`, `flops.bf16 = 6e14`, `source.link_up =
        "..."`. `base = "h200"` starts from a named machine.
      nodes: number of nodes; the machine's own by default.
      devices_per_node: number of devices per node; the machine's own by default.

    Raises:
      ValueError: no machine has that name, or the file has an invalid key or value; the message has
        the line and the nearest valid name.
      OSError: the file cannot be read.
    """
    text = os.fspath(name)
    # Only a suffix or a separator marks a path, so a file called "h200" does not hide the machine.
    is_path = text.endswith(".toml") or os.sep in text
    base = _read(text) if is_path else _named(text, "machine")
    counts = {"nodes": nodes, "devices_per_node": devices_per_node}
    return dataclasses.replace(base, **{key: n for key, n in counts.items() if n is not None})


def _named(name: str, description: str) -> Machine:
    """Return a named machine; `description` introduces the name in the error message."""
    if name.lower() not in NAMED:
        raise ValueError(
            f"{description} {name!r} is unknown{nearest(name.lower(), NAMED)} "
            "(`zerojax machines` lists all names; to use a file of figures, pass its path, which "
            "ends with .toml)"
        )
    return NAMED[name.lower()]


def _read(path: str) -> Machine:
    """Return the machine of a file."""
    path = os.path.expanduser(path)
    values, locations = read(path)
    for key, value in values.items():
        if wrong := find_wrong_entry(key, value):
            raise ValueError(f"{locations[key]}: {wrong}")
    file_name = os.path.basename(path)
    stem = os.path.splitext(file_name)[0]
    if "base" in values:
        base = _named(values["base"], f"{locations['base']}: base")
    else:
        base = Machine(name=stem)

    figures = {key: values[key] for key in values if key in FIGURES}
    own_sources = dict[str, str]()
    for key, text in values.items():
        if not key.startswith("source."):
            continue
        name = key.removeprefix("source.")
        if name not in figures and name not in base.figures:
            raise ValueError(
                f"{locations[key]}: source of {name}, a figure that the file does not set"
            )
        own_sources[name] = text
    source = {**base.source, **dict.fromkeys(figures, f"given in {file_name}"), **own_sources}

    fields: dict[str, Any] = {key: value for key, value in figures.items() if "." not in key}
    for name in BY_DTYPE:
        by_dtype = dict(getattr(base, name))
        for key, value in figures.items():
            if key.startswith(f"{name}."):
                by_dtype[key.partition(".")[2]] = value
        fields[name] = by_dtype
    fields |= {key: values[key] for key in COUNTS if key in values}
    return dataclasses.replace(base, name=values.get("name", stem), **fields, source=source)
