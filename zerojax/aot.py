"""Meshes of GPUs that this machine does not have: compile a step for a cluster on a laptop, and
read collectives and memory.

    mesh = zj.aot.gpu_mesh("h200", hosts=8, gpus_per_host=8, fsdp=64)
    program = zj.build_train_step(model, tx, config, mesh)
    compiled = program.lower(abstract_batch).compile()
    compiled.memory_analysis().argument_size_in_bytes

XLA compiles for a described chip as it would beside one, except that it cannot time kernels, so it
does not tune them. A program that exceeds the chip's memory still compiles: compare bytes yourself.
cuDNN's attention, `jax.nn.dot_product_attention(implementation="cudnn")`, compiles too, without the
workspace that cuDNN may ask for.

The chips are those of `zerojax.chips` whose die is in that table: `CHIPS` has their names.

Needs `pip install zerojax[aot]`, and JAX_PLATFORMS=cpu in the environment of a machine without a
driver, before JAX starts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.cudnn import fused_attention_stablehlo as fused_attention  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]  it has no public face
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from zerojax.chips import CHIPS as ALL_CHIPS
from zerojax.chips import LANES, Chip
from zerojax.compat import compiler_level
from zerojax.sharding import make_mesh

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {name: chip for name, chip in ALL_CHIPS.items() if chip.die is not None}
)
"""Chips that can be compiled for, by name."""

_CUDNN = (9, 10, 0)
"""The version of cuDNN that chips are described with."""
_LANE_BYTES = 1 << 28
"""Bytes a second of a lane of PCIe's first generation, as XLA's driver counts.

Each generation has twice as many.
"""
_ACCELERATED = ((9, 0), (10, 0), (12, 0))
"""Compute capabilities with instructions of their own, "9.0a" and so on."""

_LEVELS = frozenset(
    {
        "exec_time_optimization_effort",
        "memory_fitting_effort",
        "optimization_level",
        "memory_fitting_level",
    }
)
"""Options that are no flags of XLA: JAX sets them apart from these.

The efforts are gone in jax 0.11.
"""


def target_config(chip: str) -> str:
    """Return XLA's description of `chip` (a GpuTargetConfigProto in text form).

    Raises:
      ValueError: an unknown chip.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is unknown: choose from {', '.join(CHIPS)}")
    described = CHIPS[chip]
    die = described.die
    assert die is not None
    major, minor = described.capability
    accelerated = described.capability in _ACCELERATED
    minor_field = f" minor: {minor}" if minor else ""
    features = " feature_extension: ACCELERATED_FEATURES" if accelerated else ""
    name = described.device_kinds[0]
    facts = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": die.shared_bytes,
        "shared_memory_per_block_optin": die.shared_bytes_of_block,
        "threads_per_core_limit": die.threads,
        "core_count": die.cores,
        "fpus_per_core": die.fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "l2_cache_size": die.l2_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "device_address_bits": 64,
        "pcie_bandwidth": LANES * _LANE_BYTES << (described.pcie - 1),
        "memory_bandwidth": round(described.memory_rate),
        "device_memory_size": described.memory_bytes,
        "clock_rate_ghz": die.clock_ghz,
    }
    lines = [f"  {fact}: {value}" for fact, value in facts.items()]
    lines += [
        f"  cuda_compute_capability {{ major: {major}{minor_field}{features} }}",
        '  device_vendor: "NVIDIA Corporation"',
        f'  platform_version: "Compute Capability {major}.{minor}{"a" if accelerated else ""}"',
        f'  name: "{name}"',
        '  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"',
        f'  dnn_version: "{".".join(map(str, _CUDNN))}" ecc_enabled: true',
    ]
    if described.nvlinks:
        lines.append(f"  device_interconnect_info {{ active_links: {described.nvlinks} }}")
    body = "\n".join(lines)
    return (
        f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\n'
        f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}\n"
        f'device_description_str: "{name}"\n'
    )


def gpu_devices(chip: str, hosts: int, gpus_per_host: int) -> list[Any]:
    """Return compile-only devices, host by host.

    Raises:
      RuntimeError: the CUDA plugin is missing, or JAX looked for a driver.
    """
    _answer_cudnn()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{hosts}x{gpus_per_host}",
            target_config=target_config(chip),
        )
    except (RuntimeError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
        raise RuntimeError(
            f"cannot describe {hosts} x {gpus_per_host} {chip} GPUs: {e}; install zerojax[aot], and set JAX_PLATFORMS=cpu "
            "before JAX starts where there is no GPU driver"
        ) from e
    return list(topology.devices)


def _answer_cudnn() -> None:
    """Let JAX trace cuDNN's attention for a described chip: it asks the machine for a GPU and its
    cuDNN while it traces.

    Only where the mesh in scope is of such chips is the answer theirs. Everywhere else JAX asks the
    machine, as before.
    """
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda chip: _CUDNN[0] * 10000 + _CUDNN[1] * 100 + _CUDNN[2],
        "check_compute_capability": lambda chip, least: _version(least) <= chip.capability,
        "is_cuda_compute_capability_equal": lambda chip, exact: _version(exact) == chip.capability,
    }
    for name, answer in answers.items():
        ask = getattr(fused_attention, name)
        if not hasattr(ask, "__wrapped__"):  # once
            setattr(fused_attention, name, _of_described(ask, answer))


def _of_described(ask: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    described = {chip.device_kinds[0]: chip for chip in CHIPS.values()}

    @functools.wraps(ask)
    def either(*args: Any) -> Any:
        device = jax.sharding.get_abstract_mesh().abstract_device
        chip = (
            None
            if device is None or jax.default_backend() == "gpu"
            else described.get(device.device_kind)
        )
        return ask(*args) if chip is None else answer(chip, *args)

    return either


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for devices that are not there, with what `jax.stages.Compiled` offers
    about it.
    """

    executable: Any

    def as_text(self) -> str:
        """Return the scheduled HLO of one device."""
        return self.executable.hlo_modules()[0].to_string()

    def memory_analysis(self) -> Any:
        """Return the bytes of arguments, results and temporaries."""
        return self.executable.get_compiled_memory_stats()


def compile_with_callbacks(
    lowered: jax.stages.Lowered, mesh: Mesh, options: Mapping[str, Any] | None
) -> CompiledProgram:
    """Compile a program that calls back to Python, through the client of the devices that are not
    there.

    JAX's own path hands that client the callbacks, which it cannot take; without them the program
    compiles all the same.

    Args:
      lowered: the program.
      mesh: of devices of a compile-only topology.
      options: XLA's, by name.
    """
    size = mesh.size
    compile_options = xla_client.CompileOptions()
    build = compile_options.executable_build_options
    build.num_replicas, build.num_partitions = 1, size
    # What JAX sets on its own path. Without it the program would not be partitioned over the mesh.
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(size).reshape(1, size))
    given = dict(options or {})
    for name in _LEVELS & given.keys() & set(dir(build)):
        setattr(build, name, compiler_level(compiler, given.pop(name)))
    compile_options.env_option_overrides = list(given.items())
    devices = tuple(mesh.devices.flat)
    compiled = devices[0].client.compile(
        lowered.compiler_ir("stablehlo"), _jax.DeviceList(devices), compile_options
    )
    return CompiledProgram(compiled)


def is_there(mesh: Mesh) -> bool:
    """Tell whether the devices of a mesh can run a program."""
    # Devices of a compile-only topology know no memory kinds, so the sharding has none.
    return NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host").memory_kind is not None


def gpu_mesh(
    chip: str = "h200",
    *,
    hosts: int = 1,
    gpus_per_host: int = 8,
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
) -> Mesh:
    """Arrange `hosts` x `gpus_per_host` GPUs that are not there in a mesh; the axes are those of
    `zerojax.make_mesh`.
    """
    return make_mesh(
        data=data, fsdp=fsdp, tensor=tensor, devices=gpu_devices(chip, hosts, gpus_per_host)
    )
