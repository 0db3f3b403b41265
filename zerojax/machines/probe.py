"""This machine's figures, measured in less than a minute, for plans where no data sheet has them.

    figure                   what is timed
    flops                    chained products of square matrices in one program, on all devices
    memory_rate              an elementwise pass over a large array, read once and written once
    link_up, down, both      `jax.device_put` between pinned host memory and the device
    network_in_node          an all_gather of B bytes over N devices: each sends B (N-1)/N
    host_kernel              the host update's AdamW kernel on all cores, with bfloat16 gradients
                             and parameters
    disk_read, write, both   records as a swapping step moves them, including checksums

All devices of the process work at the same time, so shared resources are measured as shared. Each
time is the best of several, because other work on the machine can only slow it down. On a CPU, the
devices are threads of the cores, and link and network are copies of memory; the sources say so.
"""

import dataclasses
import datetime
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from host_offload.device import host_bytes, pinned_pool_bytes
from host_offload.disk import Bench, SwapFolder, tune
from host_offload.host_update import build_kernel
from zerojax.machines.machines import Machine
from zerojax.machines.named_machines import NAMED, machine_of
from zerojax.precision import PRECISIONS
from zerojax.sharding import FSDP, make_mesh, named
from zerojax.trees import Grads, OptState, Params

_HOST = "pinned_host"
_REPEATS = 20
_ROUNDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """Amounts of data and compute in the measurements.

    Attributes:
      product: rows and columns of each square matrix, per device.
      num_products: number of consecutive products in one program, an even number.
      memory_bytes: bytes of the array that is passed over, per device.
      num_passes: number of consecutive passes in one program.
      link_bytes: bytes that cross the link, per device.
      gathered_bytes: bytes of the gathered array.
      host_elements: number of parameters that the host kernel updates.
      record_bytes: bytes of a record on disk.
      num_records: number of records on disk.
      seconds: time limit for repeating one measurement, which runs at least once.
    """

    product: int
    num_products: int = 4
    memory_bytes: int
    num_passes: int = 4
    link_bytes: int
    gathered_bytes: int
    host_elements: int
    record_bytes: int = 64 << 20
    num_records: int = 8
    seconds: float = 1.5


_SIZES = {
    # On a CPU, arrays of 32 MB or more use fresh pages each time, unlike layers' records.
    "cpu": ProbeSizes(
        product=1024,
        memory_bytes=256 << 20,
        link_bytes=16 << 20,
        gathered_bytes=16 << 20,
        host_elements=20_000_000,
    ),
    "gpu": ProbeSizes(
        product=8192,
        num_products=16,
        memory_bytes=1 << 30,
        num_passes=16,
        link_bytes=512 << 20,
        gathered_bytes=1 << 30,
        host_elements=50_000_000,
    ),
}
"""Sizes that fill a device and take a few seconds, by platform."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes per second per device between pinned host memory and the device.

    Attributes:
      to_device: rate of host to device transfers alone.
      to_host: rate of device to host transfers alone.
      both: rate of both directions at the same time, summed.
    """

    to_device: float
    to_host: float
    both: float

    def seconds(self, to_device: float, to_host: float) -> float:
        """Return the least time, in seconds, to move these bytes in both directions.

        Args:
          to_device: bytes from the host to the device.
          to_host: bytes from the device to the host.
        """
        return max(
            to_device / self.to_device, to_host / self.to_host, (to_device + to_host) / self.both
        )


def measure_link(mesh: Mesh, num_bytes: int, repeats: int = 5) -> Link:
    """Measure the host link by timing `jax.device_put` on every device of a mesh at the same time.

    Args:
      mesh: mesh whose devices are measured.
      num_bytes: bytes moved per device and direction.
      repeats: number of timed repetitions, of which the fastest counts.

    Returns:
      Rates of one device.
    """
    on_device = named(mesh, ())
    on_host = named(mesh, (), _HOST)
    x = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), on_device)
    y = jax.device_put(x, on_host)
    jax.block_until_ready((x, y))

    def rate(*pairs: tuple[jax.Array, NamedSharding]) -> float:
        def move() -> None:
            jax.block_until_ready(
                [jax.device_put(a, sharding, may_alias=False) for a, sharding in pairs]
            )

        return len(pairs) * x.nbytes / _best(move, repeats)

    return Link(rate((y, on_device)), rate((x, on_host)), rate((y, on_device), (x, on_host)))


def probe(swap_dir: str | None = None, *, sizes: ProbeSizes | None = None) -> Machine:
    """Measure the devices of this process, their host, and a folder's disk.

    The measurement takes less than a minute, about 1 GB of host memory, and 3 GB of each GPU.
    Nothing is written outside `swap_dir`, where only a small file with the disk's tuned settings is
    left for later runs.

    Args:
      swap_dir: an existing folder on the disk that will be swapped to. Without it, the disk's
        figures stay unknown.
      sizes: amounts of data and compute to measure with; by default, sizes that suit a CPU or a
        GPU.

    Returns:
      One node with this process's devices. A disk's endurance (`disk_tbw_bytes`) and the network
      between nodes cannot be measured: set them with `dataclasses.replace`. Peaks are copied from
      the named machine that `machine_of` returns, if any.

    Raises:
      ValueError: `swap_dir` is not a folder.
      SwapError: `swap_dir` cannot be used or is too small.
    """
    devices = jax.local_devices()
    is_cpu = devices[0].platform == "cpu"
    kind = devices[0].device_kind
    sizes = _SIZES["cpu" if is_cpu else "gpu"] if sizes is None else sizes
    measured = (
        f"measured by zerojax probe {datetime.date.today()} on {platform.node()}, "
        f"{len(devices)} x {kind}"
    )
    disk = _Measured({}, {})
    if swap_dir is not None:  # measured first, so that a problem with the folder is seen at once
        disk = _measure_disk(swap_dir, sizes, measured)
    mesh = make_mesh(devices=devices)
    rates = _measure_rates(mesh, sizes, measured, is_cpu)
    flops = {
        name: _product_rate(mesh, sizes, precision.compute_dtype)
        for name, precision in PRECISIONS.items()
    }
    source = disk.source | rates.source | {f"flops.{name}": measured for name in flops}
    sheet = NAMED.get(machine_of(kind) or "")
    peak = {} if sheet is None else dict(sheet.peak_flops)
    if sheet is not None:
        source |= {f"peak_flops.{name}": sheet.source[f"peak_flops.{name}"] for name in peak}
    memories = _Measured(*probe_memories(devices))
    return Machine(
        name=kind.lower().replace(" ", "-"),
        devices_per_node=len(devices),
        peak_flops=peak,
        flops=flops,
        **memories.figures,
        **rates.figures,
        **disk.figures,
        source=source | memories.source,
    )


class _Measured(NamedTuple):
    """Some figures of a machine.

    Attributes:
      figures: figures by name.
      source: source of each figure.
    """

    figures: dict[str, Any]
    source: dict[str, str]


def _measure_rates(mesh: Mesh, sizes: ProbeSizes, measured: str, is_cpu: bool) -> _Measured:
    """Return the rates of device memory, link, network in the node, and host kernel."""
    link = measure_link(mesh, sizes.link_bytes, _REPEATS)
    figures: dict[str, Any] = {
        "memory_rate": _memory_rate(mesh, sizes),
        "link_up": link.to_device,
        "link_down": link.to_host,
        "link_both": link.both,
        "host_kernel": _host_kernel_rate(sizes),
    }
    if mesh.size > 1:
        figures["network_in_node"] = _gather_rate(mesh, sizes)
    source = dict.fromkeys(figures, measured)
    if is_cpu:
        copies = f"{measured}: copies of memory, because a CPU has no link"
        moves = [name for name in figures if name.startswith(("link", "network"))]
        source |= dict.fromkeys(moves, copies)
    return _Measured(figures, source)


def probe_memories(devices: Sequence[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the bytes of each memory of one node, by figure name, and the source of each figure.

    Args:
      devices: devices of this process, taken to be all devices of the node.
    """
    host = host_bytes()
    pool = pinned_pool_bytes(devices[0].platform)
    stats = devices[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    limit_source = "the limit of XLA's allocator, by memory_stats()"
    if limit is None and host is not None:
        limit = host // len(devices)
        limit_source = f"host_bytes / {len(devices)}: devices of a CPU share the host's memory"
    known = [n for n in (pool, host) if n is not None]
    pinned = min(known, default=None)
    pinned_source = "XLA's pool of one process"
    if pool is None or pinned == host:
        pinned_source = "host_bytes: no lower limit is set"
    figures = {"device_bytes": limit, "host_bytes": host, "pinned_bytes": pinned}
    source = {
        "device_bytes": limit_source,
        "host_bytes": "the system's memory, or the control group's limit if lower",
        "pinned_bytes": pinned_source,
    }
    return figures, {name: source[name] for name, n in figures.items() if n is not None}


def _best(call: Callable[[], Any], repeats: int = _REPEATS, seconds: float = float("inf")) -> float:
    """Return the least seconds of a call, timed after two calls that compile and allocate."""
    call()
    call()
    times = list[float]()
    began = time.perf_counter()
    while not times or (len(times) < repeats and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _product_rate(mesh: Mesh, sizes: ProbeSizes, dtype: str) -> float:
    """Return the FLOP/s per device of repeated products x[N n_fsdp, n] @ w[n, n]."""
    n = sizes.product
    rows = named(mesh, (FSDP, None))
    replicated = named(mesh, ())

    # This scale keeps the product's elements near 1: zeros and infinities have other speeds.
    def draw_x(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (mesh.size * n, n), dtype)

    def draw_w(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, (n, n)) * n**-0.5).astype(dtype)

    x = jax.jit(draw_x, out_shardings=rows)(jax.random.key(0))
    w = jax.jit(draw_w, out_shardings=replicated)(jax.random.key(1))
    # Two products per iteration: XLA copies a carry that a single product reads and writes.
    iterations = sizes.num_products // 2
    chain = jax.jit(lambda x, w: jax.lax.fori_loop(0, iterations, lambda _, x: (x @ w) @ w, x))
    flops = 2.0 * n**3 * (iterations * 2)
    return flops / _best(_blocking(chain, x, w), seconds=sizes.seconds)


def _memory_rate(mesh: Mesh, sizes: ProbeSizes) -> float:
    """Return the bytes per second that one device reads and writes in its memory."""
    x = _ones(mesh, sizes.memory_bytes // 4)
    # The array is donated because fresh memory is slower on first use.
    passes = jax.jit(
        lambda x, c: jax.lax.fori_loop(0, sizes.num_passes, lambda _, x: x * c, x), donate_argnums=0
    )
    num_bytes = 2.0 * x.nbytes / mesh.size * sizes.num_passes

    def call() -> None:
        nonlocal x
        x = jax.block_until_ready(passes(x, np.float32(1.0001)))

    return num_bytes / _best(call, seconds=sizes.seconds)


def _gather_rate(mesh: Mesh, sizes: ProbeSizes) -> float:
    """Return the bytes per second that each device sends in an all_gather, x[B_fsdp] -> x[B]."""
    n = mesh.size
    x = _ones(mesh, sizes.gathered_bytes // 4 // n)
    gather = jax.jit(lambda x: x, out_shardings=named(mesh, ()))
    return x.nbytes * (n - 1) / n / _best(_blocking(gather, x), seconds=sizes.seconds)


def _ones(mesh: Mesh, elements: int) -> jax.Array:
    """Return float32 ones with `elements` elements per device, created on the devices."""
    return jax.jit(
        lambda: jnp.ones(mesh.size * elements, jnp.float32), out_shardings=named(mesh, (FSDP,))
    )()


def _blocking(f: Callable[..., Any], *args: jax.Array) -> Callable[[], None]:
    """Return a call of `f` that waits for its results."""

    def call() -> None:
        jax.block_until_ready(f(*args))

    return call


def _host_kernel_rate(sizes: ProbeSizes) -> float:
    """Return the bytes per second that the host's AdamW reads and writes: 28 bytes per element."""
    tx = optax.adamw(1e-3)

    def rule(params: Params, state: OptState, grads: Grads) -> Any:
        updates, state = tx.update(grads.astype(jnp.float32), state, params)
        new: Any = optax.apply_updates(params, updates)
        return new, state, new.astype(jnp.bfloat16)

    abstract_params = jax.ShapeDtypeStruct((8,), jnp.float32)
    abstract_grads = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    abstract_state = jax.eval_shape(tx.init, abstract_params)
    closed = jax.make_jaxpr(rule)(abstract_params, abstract_state, abstract_grads)
    # Inputs: parameters, step count, both moments, gradients. Parameters and moments are updated
    # in place.
    kernel = build_kernel(closed, [(0, 0), (2, 2), (3, 3)])
    n = sizes.host_elements
    params, m, v = (np.full(n, value, np.float32) for value in (1.0, 1e-3, 1e-6))
    grads = np.full(n, 1e-3, jnp.bfloat16)
    low_params = np.zeros(n, jnp.bfloat16)
    count = np.zeros((), np.int32)

    def update() -> None:
        kernel([params, 3, m, v, grads], [None, count, None, None, low_params])

    return kernel.bytes_per_element * n / _best(update, seconds=sizes.seconds)


def _measure_disk(folder: str, sizes: ProbeSizes, measured: str) -> _Measured:
    """Return the figures of a folder's disk."""
    with SwapFolder(folder) as swap:
        free = swap.free_bytes()
        settings = tune(swap.path)
        with Bench(
            swap.path, settings, num_records=sizes.num_records, record_bytes=sizes.record_bytes
        ) as bench:
            bench.records()  # first writes to new files are slower
            rounds = [(bench.records(), bench.both()) for _ in _until(5 * sizes.seconds)]
    figures = {
        "disk_bytes": free,
        "disk_read": max(alone.read for alone, _ in rounds),
        "disk_write": max(alone.write for alone, _ in rounds),
        "disk_both": max(both for _, both in rounds),
    }
    transfers = f"{settings.num_threads} concurrent transfers of {settings.block_bytes >> 20} MiB"
    source = dict.fromkeys(figures, f"{measured}: {transfers}")
    return _Measured(figures, source | {"disk_bytes": "free space of the folder"})


def _until(seconds: float) -> Iterator[int]:
    """Yield at least once, then until `seconds` have passed, and at most `_ROUNDS` times."""
    began = time.perf_counter()
    for n in range(_ROUNDS):
        if n and time.perf_counter() - began > seconds:
            return
        yield n
