"""GPUs by name: one table of memory sizes, FLOP/s, links and dies.

The planner, `zerojax.aot` and `zerojax.hlo` read it. The figures are the vendor's, printed in the
sheet that `Chip.sheet` names, with two exceptions. `memory_bytes` is the total that `nvidia-smi`
prints. `allocatable_bytes` is that total minus `RESERVED_BYTES`, an assumed amount for the driver
and one process's context. `zerojax.hlo.RATES` holds the assumed fractions of these peaks that
programs reach.

    chip = CHIPS["h100"]
    chip.peak["bf16"], chip.memory_rate, chip.link_rate
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

MIB = 2**20
RESERVED_BYTES = 1536 * MIB
"""Bytes of a device's memory that programs cannot use (assumed).

They hold the driver and the context of one process.
"""
LANES = 16
"""Number of PCIe lanes between most GPUs and their host."""
PCIE: Mapping[int, float] = MappingProxyType({3: 15.75e9, 4: 31.5e9, 5: 63e9})
"""Bytes per second in one direction over `LANES`, by generation.

The lanes run at 8, 16 and 32 GT/s, and 128 of every 130 bits are data.
"""
_SHEET = "NVIDIA {} Tensor Core GPU data sheet ({})"
_WITH_SPARSITY = "half of what it prints with sparsity"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Die:
    """A die's properties that XLA normally asks the driver for, needed to compile for it.

    Attributes:
      cores: number of streaming multiprocessors.
      clock_ghz: boost clock in GHz.
      l2_bytes: bytes of the second-level cache.
      shared_bytes: bytes of shared memory per multiprocessor.
      shared_bytes_of_block: largest part of the shared memory that one block can use, in bytes.
      threads: number of resident threads per multiprocessor.
      fpus: number of float32 units per multiprocessor.
    """

    cores: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int
    shared_bytes_of_block: int
    threads: int
    fpus: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One kind of GPU.

    Attributes:
      name: this project's name for the chip, such as "h100".
      device_kinds: values of `jax.Device.device_kind` that mean this chip; `zerojax.aot` uses the
        first. None if cards with other memory have the same name.
      capability: compute capability, (major, minor).
      memory_bytes: bytes of device memory, the total that `nvidia-smi` prints.
      peak: FLOP/s of dense products by precision. 16-bit products accumulate in float32; "fp32" is
        without tensor cores.
      memory_rate: bandwidth of device memory in bytes per second.
      pcie: PCIe generation of the lanes to the host.
      lanes: number of these lanes.
      nvlink: bandwidth to other devices in bytes per second, both directions together; None without
        NVLink.
      nvlinks: number of links that provide this bandwidth together.
      devices_per_node: number of these GPUs in the machine that commonly holds them.
      sheet: document in which the vendor printed the figures.
      detail: how the 16-bit figures follow from the sheet; empty if the sheet prints them.
      die: properties for compiling; None if `zerojax.aot` does not support the chip.
    """

    name: str
    device_kinds: tuple[str, ...]
    capability: tuple[int, int]
    memory_bytes: int
    peak: Mapping[str, float]
    memory_rate: float
    pcie: int
    lanes: int = LANES
    nvlink: float | None = None
    nvlinks: int = 0
    devices_per_node: int = 1
    sheet: str
    detail: str = ""
    die: Die | None = None

    @property
    def allocatable_bytes(self) -> int:
        """Bytes of device memory that a program can use."""
        return self.memory_bytes - RESERVED_BYTES

    @property
    def half_peak(self) -> float:
        """FLOP/s of dense 16-bit products: bfloat16 if the chip supports it, else float16."""
        return self.peak["bf16"] if "bf16" in self.peak else self.peak["fp16"]

    @property
    def link_rate(self) -> float:
        """PCIe bandwidth between host and device in bytes per second, in one direction."""
        return PCIE[self.pcie] * self.lanes / LANES


def _peak(half: float, single: float) -> Mapping[str, float]:
    return MappingProxyType({"fp32": single, "bf16": half, "fp16": half})


def _die(
    cores: int, clock_ghz: float, l2_mib: int, shared_kib: int, threads: int, fpus: int = 128
) -> Die:
    # A block can use a multiprocessor's shared memory, except for 1 KiB that the system keeps.
    return Die(
        cores=cores,
        clock_ghz=clock_ghz,
        l2_bytes=l2_mib * MIB,
        shared_bytes=shared_kib << 10,
        shared_bytes_of_block=(shared_kib - 1) << 10,
        threads=threads,
        fpus=fpus,
    )


_HOPPER = _die(132, 1.98, 50, 228, 2048)  # H100 and H200 share it
_ALL = (
    Chip(
        name="h200",
        device_kinds=("NVIDIA H200 141GB HBM3e", "NVIDIA H200"),
        capability=(9, 0),
        memory_bytes=143771 * MIB,
        peak=_peak(989e12, 67e12),
        memory_rate=4.8e12,
        pcie=5,
        nvlink=900e9,
        nvlinks=18,
        devices_per_node=8,
        sheet=_SHEET.format("H200", "SXM"),
        detail=_WITH_SPARSITY,
        die=_HOPPER,
    ),
    Chip(
        name="h100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        capability=(9, 0),
        memory_bytes=81559 * MIB,
        peak=_peak(989e12, 67e12),
        memory_rate=3.35e12,
        pcie=5,
        nvlink=900e9,
        nvlinks=18,
        devices_per_node=8,
        sheet=_SHEET.format("H100", "SXM"),
        detail=_WITH_SPARSITY,
        die=_HOPPER,
    ),
    Chip(
        name="h100-pcie",
        device_kinds=("NVIDIA H100 PCIe",),
        capability=(9, 0),
        memory_bytes=81559 * MIB,
        peak=_peak(756e12, 51e12),
        memory_rate=2e12,
        pcie=5,
        sheet=_SHEET.format("H100", "PCIe"),
        detail=_WITH_SPARSITY,
    ),
    Chip(
        name="a100-80",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        capability=(8, 0),
        memory_bytes=81920 * MIB,
        peak=_peak(312e12, 19.5e12),
        memory_rate=2.039e12,
        pcie=4,
        nvlink=600e9,
        nvlinks=12,
        devices_per_node=8,
        sheet=_SHEET.format("A100", "80 GB, SXM"),
        die=_die(108, 1.41, 40, 164, 2048, fpus=64),
    ),
    Chip(
        name="a100-40",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
        capability=(8, 0),
        memory_bytes=40960 * MIB,
        peak=_peak(312e12, 19.5e12),
        memory_rate=1.555e12,
        pcie=4,
        nvlink=600e9,
        nvlinks=12,
        devices_per_node=8,
        sheet=_SHEET.format("A100", "40 GB, SXM"),
        die=_die(108, 1.41, 40, 164, 2048, fpus=64),
    ),
    Chip(
        name="v100-32",
        device_kinds=("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"),
        capability=(7, 0),
        memory_bytes=32768 * MIB,
        peak=MappingProxyType({"fp32": 15.7e12, "fp16": 125e12}),
        memory_rate=900e9,
        pcie=3,
        nvlink=300e9,
        nvlinks=6,
        devices_per_node=8,
        sheet=_SHEET.format("V100", "SXM2"),
    ),
    Chip(
        name="l4",
        device_kinds=("NVIDIA L4",),
        capability=(8, 9),
        memory_bytes=23034 * MIB,
        peak=_peak(121e12, 30.3e12),
        memory_rate=300e9,
        pcie=4,
        sheet=_SHEET.format("L4", "PCIe"),
        detail=_WITH_SPARSITY,
        die=_die(58, 2.04, 48, 100, 1536),
    ),
    Chip(
        name="l40s",
        device_kinds=("NVIDIA L40S",),
        capability=(8, 9),
        memory_bytes=46068 * MIB,
        peak=_peak(362e12, 91.6e12),
        memory_rate=864e9,
        pcie=4,
        sheet="NVIDIA L40S GPU data sheet",
        die=_die(142, 2.52, 96, 100, 1536),
    ),
    Chip(
        name="rtx3060",
        device_kinds=(),  # cards with 8 GB have the same name
        capability=(8, 6),
        memory_bytes=12288 * MIB,
        peak=_peak(25.5e12, 12.74e12),
        memory_rate=360e9,
        pcie=4,
        sheet="NVIDIA GeForce RTX 3060 specifications (12 GB)",
        detail="dense, summed in float32: twice its float32 rate",
    ),
    Chip(
        name="rtx3090",
        device_kinds=("NVIDIA GeForce RTX 3090",),
        capability=(8, 6),
        memory_bytes=24576 * MIB,
        peak=_peak(71e12, 35.6e12),
        memory_rate=936e9,
        pcie=4,
        sheet="NVIDIA Ampere GA102 GPU architecture white paper, appendix A",
        detail="dense, summed in float32",
    ),
    Chip(
        name="rtx4060ti-16",
        device_kinds=(),  # cards with 8 GB have the same name
        capability=(8, 9),
        memory_bytes=16380 * MIB,
        peak=_peak(44.1e12, 22.06e12),
        memory_rate=288e9,
        pcie=4,
        lanes=8,
        sheet="NVIDIA GeForce RTX 4060 Ti specifications (16 GB)",
        detail="dense, summed in float32: twice its float32 rate",
    ),
    Chip(
        name="rtx4090",
        device_kinds=("NVIDIA GeForce RTX 4090",),
        capability=(8, 9),
        memory_bytes=24564 * MIB,
        peak=_peak(165e12, 82.6e12),
        memory_rate=1.008e12,
        pcie=4,
        sheet="NVIDIA Ada GPU architecture white paper, appendix A",
        detail="dense, summed in float32",
        die=_die(128, 2.52, 72, 100, 1536),
    ),
    Chip(
        name="rtx5090",
        device_kinds=("NVIDIA GeForce RTX 5090",),
        capability=(12, 0),
        memory_bytes=32607 * MIB,
        peak=_peak(209.5e12, 104.8e12),
        memory_rate=1.792e12,
        pcie=5,
        sheet="NVIDIA RTX Blackwell GPU architecture white paper, appendix A",
        detail="dense, summed in float32",
        die=_die(170, 2.41, 96, 100, 1536),
    ),
    Chip(
        name="b200",
        device_kinds=("NVIDIA B200",),
        capability=(10, 0),
        memory_bytes=183359 * MIB,
        peak=_peak(2.25e15, 75e12),
        memory_rate=7.7e12,
        pcie=5,
        nvlink=1.8e12,
        nvlinks=18,
        devices_per_node=8,
        sheet="NVIDIA HGX B200 data sheet",
        detail=f"an eighth of the board's, {_WITH_SPARSITY}",
        die=_die(148, 1.965, 126, 228, 2048),
    ),
)
CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _ALL})
"""Chips by name."""


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip with JAX's name `device_kind`, such as "NVIDIA H200", or None if unknown."""
    return next((chip for chip in _ALL if device_kind in chip.device_kinds), None)
