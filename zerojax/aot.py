"""Compile a step for GPUs that this machine does not have, and read its collectives and memory.

    mesh = zj.aot.gpu_mesh("h200", hosts=8, gpus_per_host=8, fsdp=64)
    program = zj.build_train_step(model, tx, config, mesh)
    compiled = program.lower(abstract_batch).compile()
    compiled.memory_analysis().argument_size_in_bytes

XLA compiles for a described chip as it would for a real one, except that it cannot time kernels and
so does not tune them. A program that exceeds the chip's memory still compiles: compare the bytes
yourself. cuDNN's attention, `jax.nn.dot_product_attention(implementation="cudnn")`, compiles too,
but without the workspace that cuDNN may request.

`CHIPS` holds the supported chips: the entries of `zerojax.chips.CHIPS` that describe their die.

Needs `pip install zerojax[aot]`. On a machine without a GPU driver, set JAX_PLATFORMS=cpu in the
environment before JAX starts.
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
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from zerojax.chips import CHIPS as ALL_CHIPS
from zerojax.chips import Chip
from zerojax.compat import compiler_level
from zerojax.sharding import make_mesh

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {name: chip for name, chip in ALL_CHIPS.items() if chip.die is not None}
)
"""Chips that you can compile for, by name."""

_CUDNN = (9, 10, 0)
"""The cuDNN version in the description of every chip."""
_LANE_BYTES = 1 << 28
"""Bytes per second of one first-generation PCIe lane, as XLA's driver counts them.

Each generation doubles the rate.
"""
_ACCELERATED = ((9, 0), (10, 0), (12, 0))
"""Compute capabilities with an architecture-specific instruction set, such as "9.0a"."""

_LEVELS = frozenset(
    {
        "exec_time_optimization_effort",
        "memory_fitting_effort",
        "optimization_level",
        "memory_fitting_level",
    }
)
"""Compile options that are not XLA flags: JAX sets them separately.

jax 0.11 no longer has the two efforts.
"""


def target_config(chip: str) -> str:
    """Return XLA's description of `chip` (a GpuTargetConfigProto in text form).

    Raises:
      ValueError: the chip is unknown.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is unknown: choose from {', '.join(CHIPS)}")
    sheet = CHIPS[chip]
    die = sheet.die
    assert die is not None
    major, minor = sheet.capability
    accelerated = sheet.capability in _ACCELERATED
    minor_field = f" minor: {minor}" if minor else ""
    features = " feature_extension: ACCELERATED_FEATURES" if accelerated else ""
    name = sheet.device_kinds[0]
    fields = {
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
        "pcie_bandwidth": sheet.lanes * _LANE_BYTES << (sheet.pcie - 1),
        "memory_bandwidth": round(sheet.memory_rate),
        "device_memory_size": sheet.memory_bytes,
        "clock_rate_ghz": die.clock_ghz,
    }
    lines = [f"  {field}: {value}" for field, value in fields.items()]
    lines += [
        f"  cuda_compute_capability {{ major: {major}{minor_field}{features} }}",
        '  device_vendor: "NVIDIA Corporation"',
        f'  platform_version: "Compute Capability {major}.{minor}{"a" if accelerated else ""}"',
        f'  name: "{name}"',
        '  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: '
        '"13.0.0"',
        f'  dnn_version: "{".".join(map(str, _CUDNN))}" ecc_enabled: true',
    ]
    if sheet.nvlinks:
        lines.append(f"  device_interconnect_info {{ active_links: {sheet.nvlinks} }}")
    body = "\n".join(lines)
    return (
        f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\n'
        f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}\n"
        f'device_description_str: "{name}"\n'
    )


def gpu_devices(chip: str, hosts: int, gpus_per_host: int) -> list[Any]:
    """Return compile-only devices, in the order of their hosts.

    Args:
      chip: name in `CHIPS`.
      hosts: number of hosts.
      gpus_per_host: number of devices on each host.

    Raises:
      ValueError: the chip is unknown.
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
            f"cannot describe {hosts} x {gpus_per_host} {chip} GPUs: {e}; install zerojax[aot], "
            "and set JAX_PLATFORMS=cpu before JAX starts if there is no GPU driver"
        ) from e
    return list(topology.devices)


def _answer_cudnn() -> None:
    """Let JAX trace cuDNN's attention for a described chip.

    While tracing, JAX checks the machine's GPU and cuDNN version. These checks are answered for the
    described chip, but only if the mesh in scope consists of described chips; otherwise they query
    the machine as before.
    """
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda chip: _CUDNN[0] * 10000 + _CUDNN[1] * 100 + _CUDNN[2],
        "check_compute_capability": lambda chip, least: _version(least) <= chip.capability,
        "is_cuda_compute_capability_equal": lambda chip, exact: _version(exact) == chip.capability,
    }
    for name, answer in answers.items():
        query = getattr(fused_attention, name)
        if not hasattr(query, "__wrapped__"):  # not yet wrapped
            setattr(fused_attention, name, _answer_if_described(query, answer))


def _answer_if_described(
    query: Callable[..., Any], answer: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `query`, replaced by `answer(chip, ...)` if the mesh in scope has described chips."""
    chips = {chip.device_kinds[0]: chip for chip in CHIPS.values()}

    @functools.wraps(query)
    def answer_or_query(*args: Any) -> Any:
        device = jax.sharding.get_abstract_mesh().abstract_device
        if device is None or jax.default_backend() == "gpu" or device.device_kind not in chips:
            return query(*args)
        return answer(chips[device.device_kind], *args)

    return answer_or_query


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for devices that are not present.

    It offers a part of `jax.stages.Compiled`'s methods.

    Attributes:
      executable: XLA's executable, which this machine cannot run.
    """

    executable: Any

    def as_text(self) -> str:
        """Return the scheduled HLO of one device."""
        return self.executable.hlo_modules()[0].to_string()

    def memory_analysis(self) -> Any:
        """Return XLA's statistics: bytes per device of arguments, results and temporaries."""
        return self.executable.get_compiled_memory_stats()


def compile_with_callbacks(
    lowered: jax.stages.Lowered, mesh: Mesh, options: Mapping[str, Any] | None
) -> CompiledProgram:
    """Compile a program that calls back into Python, for devices that are not present.

    JAX's own path passes the callbacks to the compile-only client, which rejects them. The program
    compiles without them.

    Args:
      lowered: lowered program.
      mesh: mesh of compile-only devices.
      options: XLA's compile options by name, or None.
    """
    size = mesh.size
    compile_options = xla_client.CompileOptions()
    build = compile_options.executable_build_options
    build.num_replicas = 1
    build.num_partitions = size
    # JAX sets these on its own path. Without them the program would not be partitioned.
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(size).reshape(1, size))
    flags = dict(options or {})
    for name in _LEVELS & flags.keys() & set(dir(build)):
        setattr(build, name, compiler_level(compiler, flags.pop(name)))
    compile_options.env_option_overrides = list(flags.items())
    devices = tuple(mesh.devices.flat)
    compiled = devices[0].client.compile(
        lowered.compiler_ir("stablehlo"), _jax.DeviceList(devices), compile_options
    )
    return CompiledProgram(compiled)


def is_there(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh can run a program."""
    # Compile-only devices have no memory kinds, so a sharding over them has none either.
    return NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host").memory_kind is not None


def gpu_mesh(
    chip: str = "h200",
    *,
    hosts: int = 1,
    gpus_per_host: int = 8,
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    pipe: int = 1,
) -> Mesh:
    """Return a mesh of `hosts` x `gpus_per_host` GPUs that need not be present.

    Args:
      chip: name in `CHIPS`.
      hosts: number of hosts.
      gpus_per_host: number of devices on each host.
      data: size of the axis `data`, as in `zerojax.make_mesh`.
      fsdp: size of the axis `fsdp`; -1 takes the remaining devices.
      tensor: size of the axis `tensor`.
      context: size of the axis `context`.
      expert: size of the axis `expert`.
      pipe: size of the axis `pipe`.

    Raises:
      ValueError: the chip is unknown, or the sizes do not fit the devices.
      RuntimeError: the CUDA plugin is missing, or JAX looked for a driver.
    """
    devices = gpu_devices(chip, hosts, gpus_per_host)
    return make_mesh(
        data=data,
        fsdp=fsdp,
        tensor=tensor,
        context=context,
        expert=expert,
        pipe=pipe,
        devices=devices,
    )
