"""Machines by name: a vendor's figures and what is assumed of them; and machines from files.

A vendor's data sheet has peaks of a GPU. What programs attain is the share of them that `zerojax.hlo.RATES` assumes of an H200:
0.71 of products in 16 bits, 0.9 of those in float32, 0.83 of memory, 0.87 of PCIe; and 0.8 of NVLink one way. No run stands
behind these; `zerojax probe` measures. The DGX-2's are those that the authors of ZeRO-Infinity measured.
"""

import dataclasses
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zerojax.hlo import RATES
from zerojax.machines.machine_files import read
from zerojax.machines.machines import BY_DTYPE, COUNTS, FIGURES, Machine, nearest, what_is_wrong

_ASSUMED = RATES["h200"]
_SHARES = {
    "fp32": _ASSUMED.products_float32 / 67e12,
    "16 bits": _ASSUMED.products / 989e12,
    "memory": _ASSUMED.memory / 4.8e12,
    "link": _ASSUMED.link / 63e9,
    "nvlink": 0.8,
}
"""What is assumed of a vendor's figure: but for NVLink, what `zerojax.hlo.RATES` assumes over the H200's data sheet."""
_SHEET = "NVIDIA {} Tensor Core GPU data sheet ({})"
_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}  # one way of 16 lanes at 8, 16 and 32 GT/s, 128 of 130 bits


def _gpu(
    name: str, sheet: str, *, gigabytes: int, half: float, single: float, memory: float, pcie: int, nvlink: float | None = None,
    devices: int = 1, dtypes: tuple[str, ...] = ("bf16", "fp16"), detail: str = "half of what it prints with sparsity",
) -> Machine:  # fmt: skip
    """Return nodes of one GPU's kind.

    Args:
      name: of the machine.
      sheet: what the vendor printed the figures in.
      gigabytes: of device memory, as printed: 1e9 bytes each, of which the device has a little more.
      half: FLOP/s of dense products in 16 bits that are summed in float32.
      single: in float32, without tensor cores.
      memory: bytes a second of device memory.
      pcie: generation of its 16 lanes to the host.
      nvlink: bytes a second to other devices, both ways together, as printed.
      devices: of a node.
      dtypes: of 16 bits that products take.
      detail: of the figure in 16 bits.
    """
    peak = {"fp32": single} | dict.fromkeys(dtypes, half)
    shares = {"fp32": _SHARES["fp32"]} | dict.fromkeys(dtypes, _SHARES["16 bits"])
    link = _SHARES["link"] * _PCIE[pcie]

    def assumed(share: float, of: str) -> str:
        return f"assumed: share {share:.2g} of {of}"

    details = {dtype: f"{sheet}, {detail}" if detail and dtype != "fp32" else sheet for dtype in peak}
    source = {"device_bytes": sheet} | {f"peak_flops.{dtype}": text for dtype, text in details.items()}
    source |= {f"flops.{dtype}": assumed(shares[dtype], f"{peak[dtype]:.4g}, {sheet}") for dtype in peak}
    source |= {
        "memory_rate": assumed(_SHARES["memory"], f"{memory:.4g}, {sheet}"),
        **dict.fromkeys(("link_up", "link_down"), assumed(_SHARES["link"], f"{_PCIE[pcie]:.4g}, PCIe {pcie} x16, {sheet}")),
        "link_both": "assumed: the two ways do not slow each other",
    }
    if nvlink is not None:
        source["network_in_node"] = assumed(_SHARES["nvlink"], f"{nvlink / 2:.4g}, NVLink one way, {sheet}")
    return Machine(
        name=name,
        devices_per_node=devices,
        device_bytes=gigabytes * 10**9,
        peak_flops=peak,
        flops={dtype: shares[dtype] * peak[dtype] for dtype in peak},
        memory_rate=_SHARES["memory"] * memory,
        link_up=link,
        link_down=link,
        link_both=2 * link,
        network_in_node=None if nvlink is None else _SHARES["nvlink"] * nvlink / 2,
        source=source,
    )


_V100 = _gpu(
    "v100-32", _SHEET.format("V100", "SXM2"), gigabytes=32, half=125e12, single=15.7e12, memory=900e9, pcie=3,
    nvlink=300e9, devices=8, dtypes=("fp16",), detail="",
)  # fmt: skip
_INFINITY = "ZeRO-Infinity (arXiv:2104.07857)"
_ATTAINED = f"{_INFINITY}, section 4: 70 TFLOP/s attained of a V100's peak"
_V100 = dataclasses.replace(_V100, flops={**_V100.flops, "fp16": 70e12}, source={**_V100.source, "flops.fp16": _ATTAINED})
_DGX2 = dataclasses.replace(
    _V100,
    name="dgx2",
    devices_per_node=16,
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
        "host_bytes": f"{_INFINITY}, figure 2b",
        "disk_bytes": f"{_INFINITY}, figure 2b",
        "memory_rate": f"{_INFINITY}, figure 2b: the lower of 600-900 GB/s",
        "link_up": f"{_INFINITY}, figure 2b: 3.0 GB/s a GPU with all 16 at it",
        "link_down": "assumed: as link_up",
        "link_both": "assumed: the two ways do not slow each other",
        "network_in_node": f"{_INFINITY}, figure 2b: the lower of 150-300 GB/s",
        "network_between_nodes": f"{_INFINITY}, figure 2b: the lower of 60-100 GB/s",
        "disk_read": f"{_INFINITY}, figure 2b: 1.6 GB/s a GPU with all 16 at it",
        "disk_write": "assumed: as disk_read",
        "disk_both": "assumed: reads and writes together go as reads alone",
    },
)

_GPUS = (
    _gpu("h200", _SHEET.format("H200", "SXM"), gigabytes=141, half=989e12, single=67e12, memory=4.8e12, pcie=5, nvlink=900e9,
         devices=8),
    _gpu("h100", _SHEET.format("H100", "SXM"), gigabytes=80, half=989e12, single=67e12, memory=3.35e12, pcie=5, nvlink=900e9,
         devices=8),
    _gpu("h100-pcie", _SHEET.format("H100", "PCIe"), gigabytes=80, half=756e12, single=51e12, memory=2e12, pcie=5),
    _gpu("a100-80", _SHEET.format("A100", "80 GB, SXM"), gigabytes=80, half=312e12, single=19.5e12, memory=2.039e12, pcie=4,
         nvlink=600e9, devices=8, detail=""),
    _gpu("a100-40", _SHEET.format("A100", "40 GB, SXM"), gigabytes=40, half=312e12, single=19.5e12, memory=1.555e12, pcie=4,
         nvlink=600e9, devices=8, detail=""),
    _V100,
    _gpu("l4", _SHEET.format("L4", "PCIe"), gigabytes=24, half=121e12, single=30.3e12, memory=300e9, pcie=4),
    _gpu("rtx4090", "NVIDIA Ada GPU architecture white paper, appendix A", gigabytes=24, half=165e12, single=82.6e12,
         memory=1.008e12, pcie=4, detail="dense, summed in float32"),
    _DGX2,
)  # fmt: skip
NAMED: Mapping[str, Machine] = MappingProxyType({machine.name: machine for machine in _GPUS})
"""Machines by name: nodes of one kind of GPU, of which host and disk are not known, and the DGX-2 of ZeRO-Infinity."""
_KINDS = {
    "NVIDIA H200": "h200",
    "NVIDIA H200 141GB HBM3e": "h200",  # as `zerojax.aot` describes it
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "Tesla V100-SXM2-32GB": "v100-32",
    "Tesla V100-SXM3-32GB": "v100-32",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def machine_of(device_kind: str) -> str | None:
    """Return the name of the machine whose devices JAX calls so, such as "NVIDIA H200"; None where none is known."""
    return _KINDS.get(device_kind)


def machine(name: str | os.PathLike[str], *, nodes: int | None = None, devices_per_node: int | None = None) -> Machine:
    """Return a machine by its name, or from a file.

    Args:
      name: one of `zerojax machines`, or the path of a TOML file. Its keys are the attributes of `Machine`: `link_up = 5e10`,
        `flops.bf16 = 6e14`, `source.link_up = "..."`. `base = "h200"` starts from a named machine.
      nodes: instead of the machine's own.
      devices_per_node: likewise.

    Raises:
      ValueError: no machine has that name, or the file has a key or value that a machine does not take; with its line and the
        nearest that is known.
      OSError: the file cannot be read.
    """
    text = os.fspath(name)
    # A file of a machine's name does not hide that machine: a path says what it is.
    is_path = text.endswith(".toml") or os.sep in text
    found = _read(text) if is_path else _named(text, "machine")
    given = {"nodes": nodes, "devices_per_node": devices_per_node}
    return dataclasses.replace(found, **{key: n for key, n in given.items() if n is not None})


def _named(name: str, what: str) -> Machine:
    if name.lower() not in NAMED:
        raise ValueError(
            f"{what} {name!r} is unknown{nearest(name.lower(), NAMED)} (`zerojax machines` lists them; a file of "
            "figures is given by its path, which ends with .toml)"
        )
    return NAMED[name.lower()]


def _read(path: str) -> Machine:
    path = os.path.expanduser(path)
    values, places = read(path)
    for key, value in values.items():
        if wrong := what_is_wrong(key, value):
            raise ValueError(f"{places[key]}: {wrong}")
    stem = os.path.splitext(os.path.basename(path))[0]
    base = _named(values["base"], f"{places['base']}: base") if "base" in values else Machine(name=stem)
    given = {key: values[key] for key in values if key in FIGURES}
    said = {key.removeprefix("source."): text for key, text in values.items() if key.startswith("source.")}
    if absent := [name for name in said if name not in given and name not in base.figures]:
        raise ValueError(f"{places[f'source.{absent[0]}']}: source of {absent[0]}, a figure that the file does not give")
    source = {**base.source, **dict.fromkeys(given, f"given in {os.path.basename(path)}"), **said}
    fields: dict[str, Any] = {key: value for key, value in given.items() if "." not in key}
    for name in BY_DTYPE:
        own = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
        fields[name] = {**getattr(base, name), **own}
    fields |= {key: values[key] for key in COUNTS if key in values}
    return dataclasses.replace(base, name=values.get("name", stem), **fields, source=source)
