"""This machine's figures, measured in less than a minute: what a plan takes where no data sheet
knows them.

    figure                   what is timed
    flops                    products of square matrices, chained in one program, on all devices at once
    memory_rate              a pass over a large array, element by element: read once, written once
    link_up, down, both      `jax.device_put` between pinned host memory and the device
    network_in_node          an all_gather over the devices, B bytes: each sends B (N-1)/N
    host_kernel              the kernel of the host's update, AdamW from gradients and to parameters in bfloat16, on all cores
    disk_read, write, both   records as a swapping step moves them, checksums included

All devices of the process work at once, so what they share is shared. Each time is the best of
  several: other work on the
machine only slows it down. On a CPU the devices are threads of the cores, and link and network are
copies of memory; the sources say so.
"""

import dataclasses
import datetime
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from host_offload.device import host_bytes, pinned_pool_bytes
from host_offload.disk import Bench, SwapFolder, tune
from host_offload.host_update import build_kernel
from zerojax.machines.machines import Machine
from zerojax.machines.named_machines import NAMED, machine_of
from zerojax.precision import PRECISIONS
from zerojax.sharding import FSDP, make_mesh, named

_HOST = "pinned_host"
_REPEATS, _ROUNDS = 20, 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """How much is moved and computed in one measurement.

    Attributes:
      product: rows and columns of each matrix, a device.
      num_products: one after another in a program, an even number.
      memory_bytes: of the array that is passed over, a device.
      num_passes: one after another in a program.
      link_bytes: of what crosses the link, a device.
      gathered_bytes: of what is gathered.
      host_elements: parameters that the host's kernel updates.
      record_bytes: of a record on disk.
      num_records: records.
      seconds: that one measurement may be repeated; it is done once in any case.
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
    # Arrays of 32 MB or more are of fresh pages each time on a CPU, which layers' records are not.
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
"""What fills a device and takes few seconds on it."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes a second between pinned host memory and the device: each way alone, and both at once,
    summed.
    """

    to_device: float
    to_host: float
    both: float

    def seconds(self, to_device: float, to_host: float) -> float:
        """Return the least time of a transfer."""
        return max(
            to_device / self.to_device, to_host / self.to_host, (to_device + to_host) / self.both
        )


def measure_link(mesh: Any, num_bytes: int, repeats: int = 5) -> Link:
    """Time `jax.device_put` of arrays of `num_bytes`, on every device of a mesh at once; rates are
    of one device.
    """
    on_device, on_host = named(mesh, ()), named(mesh, (), _HOST)
    x = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), on_device)
    y = jax.device_put(x, on_host)
    jax.block_until_ready((x, y))

    def rate(*pairs: Any) -> float:
        def move() -> None:
            jax.block_until_ready(
                [jax.device_put(a, sharding, may_alias=False) for a, sharding in pairs]
            )

        return len(pairs) * x.nbytes / _best(move, repeats)

    return Link(rate((y, on_device)), rate((x, on_host)), rate((y, on_device), (x, on_host)))


def probe(swap_dir: str | None = None, *, sizes: ProbeSizes | None = None) -> Machine:
    """Measure the devices of this process, their host, and a folder's disk.

    It takes less than a minute, some 1 GB of host memory, and 3 GB of each GPU. Nothing is written
    outside `swap_dir`, where only a small file with the settings of the disk stays, which later
    runs use.

    Args:
      swap_dir: an existing folder, of the disk that is to be swapped to. Without it the figures of
        a disk are not given.
      sizes: of the measurements; what fills a CPU or a GPU by default.

    Returns:
      One node with this process's devices. A disk's endurance (`disk_tbw_bytes`) and the network
      between nodes cannot be
      measured: give them by `dataclasses.replace`. Peaks are of the machine that `machine_of`
        knows, if any.

    Raises:
      ValueError: swap_dir is no folder.
      SwapError: it cannot be used or is too small.
    """
    devices = jax.local_devices()
    is_cpu, kind = devices[0].platform == "cpu", devices[0].device_kind
    sizes = _SIZES["cpu" if is_cpu else "gpu"] if sizes is None else sizes
    mesh = make_mesh(devices=devices)
    when = f"measured by zerojax probe {datetime.date.today()} on {platform.node()}, {len(devices)} x {kind}"
    copies = f"{when}: copies of memory, as a CPU has no link" if is_cpu else when
    found, source = (
        ({}, {}) if swap_dir is None else _disk(swap_dir, sizes, when)
    )  # first: what is wrong with it shows at once
    link = measure_link(mesh, sizes.link_bytes, _REPEATS)
    figures: dict[str, Any] = {
        "memory_rate": _memory_rate(mesh, sizes),
        "link_up": link.to_device,
        "link_down": link.to_host,
        "link_both": link.both,
        "host_kernel": _host_kernel_rate(sizes),
    }
    if len(devices) > 1:
        figures["network_in_node"] = _gather_rate(mesh, sizes)
    flops = {name: _product_rate(mesh, sizes, p.compute_dtype) for name, p in PRECISIONS.items()}
    source |= {name: copies if name.startswith(("link", "network")) else when for name in figures}
    source |= {f"flops.{name}": when for name in flops}
    sheet = NAMED.get(machine_of(kind) or "")
    peak = {} if sheet is None else dict(sheet.peak_flops)
    source |= (
        {}
        if sheet is None
        else {f"peak_flops.{name}": sheet.source[f"peak_flops.{name}"] for name in peak}
    )
    memories, told = memories_of(devices)
    return Machine(
        name=kind.lower().replace(" ", "-"),
        devices_per_node=len(devices),
        peak_flops=peak,
        flops=flops,
        **memories,
        **figures,
        **found,
        source=source | told,
    )


def memories_of(devices: Sequence[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the bytes of each memory of one node, by the names of a machine's figures, and what
    they are.

    Args:
      devices: of this process, which are taken for those of the node.
    """
    host, pool = host_bytes(), pinned_pool_bytes(devices[0].platform)
    stats = devices[0].memory_stats() or {}
    limit, of = stats.get("bytes_limit"), "the limit of XLA's allocator, by memory_stats()"
    if limit is None and host is not None:
        limit, of = (
            host // len(devices),
            f"host_bytes over {len(devices)}: devices of a CPU share the host's memory",
        )
    pinned = host if pool is None else pool if host is None else min(pool, host)
    figures = {"device_bytes": limit, "host_bytes": host, "pinned_bytes": pinned}
    source = {
        "device_bytes": of,
        "host_bytes": "the system's memory, or less where a control group limits it",
        "pinned_bytes": "host_bytes: nothing less is set"
        if pool is None or pinned == host
        else "XLA's pool, of one process",
    }
    return figures, {name: source[name] for name, n in figures.items() if n is not None}


def _best(call: Callable[[], Any], repeats: int = _REPEATS, seconds: float = float("inf")) -> float:
    """Return the least seconds of a call after two, which compile and allocate."""
    call()
    call()
    found, began = [], time.perf_counter()
    while not found or (len(found) < repeats and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def _product_rate(mesh: Any, sizes: ProbeSizes, dtype: str) -> float:
    """Return the FLOP/s of one device: x[N n_fsdp, n] @ w[n, n], several times in a row."""
    n, num = sizes.product, mesh.size
    rows, whole = named(mesh, (FSDP, None)), named(mesh, ())
    # Of this scale the product's elements stay of size 1: zeros or infinities are not as fast as
    # numbers.
    x = jax.jit(lambda key: jax.random.normal(key, (num * n, n), dtype), out_shardings=rows)(
        jax.random.key(0)
    )
    w = jax.jit(
        lambda key: (jax.random.normal(key, (n, n)) * n**-0.5).astype(dtype), out_shardings=whole
    )(jax.random.key(1))
    # Two products a trip: XLA copies a carry that one product would read and write.
    chain = jax.jit(
        lambda x, w: jax.lax.fori_loop(0, sizes.num_products // 2, lambda _, x: (x @ w) @ w, x)
    )
    return (
        2.0
        * n**3
        * (sizes.num_products // 2 * 2)
        / _best(_blocking(chain, x, w), seconds=sizes.seconds)
    )


def _memory_rate(mesh: Any, sizes: ProbeSizes) -> float:
    """Return the bytes a second that one device reads and writes of its memory."""
    x = _ones(mesh, sizes.memory_bytes // 4)
    # The array is donated: fresh memory is slower at its first use.
    passes = jax.jit(
        lambda x, c: jax.lax.fori_loop(0, sizes.num_passes, lambda _, x: x * c, x), donate_argnums=0
    )
    held = [x]

    def call() -> None:
        held[0] = jax.block_until_ready(passes(held[0], np.float32(1.0001)))

    return 2.0 * x.nbytes / mesh.size * sizes.num_passes / _best(call, seconds=sizes.seconds)


def _gather_rate(mesh: Any, sizes: ProbeSizes) -> float:
    """Return the bytes a second that each device sends: x[B_fsdp] -> x[B]."""
    num = mesh.size
    x = _ones(mesh, sizes.gathered_bytes // 4 // num)
    gather = jax.jit(lambda x: x, out_shardings=named(mesh, ()))
    return x.nbytes * (num - 1) / num / _best(_blocking(gather, x), seconds=sizes.seconds)


def _ones(mesh: Any, elements: int) -> Any:
    """Return ones of float32, so many on each device, made there."""
    return jax.jit(
        lambda: jnp.ones(mesh.size * elements, jnp.float32), out_shardings=named(mesh, (FSDP,))
    )()


def _blocking(f: Callable[..., Any], *args: Any) -> Callable[[], None]:
    def call() -> None:
        jax.block_until_ready(f(*args))

    return call


def _host_kernel_rate(sizes: ProbeSizes) -> float:
    """Return the bytes a second that the host's AdamW reads and writes: 28 an element."""
    tx = optax.adamw(1e-3)

    def rule(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads.astype(jnp.float32), state, params)
        new: Any = optax.apply_updates(params, updates)
        return new, state, new.astype(jnp.bfloat16)

    one = jax.ShapeDtypeStruct((8,), jnp.float32)
    closed = jax.make_jaxpr(rule)(
        one, jax.eval_shape(tx.init, one), jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    )
    # Inputs: parameters, the count of steps, both moments, gradients. Parameters and moments are
    # updated in place.
    kernel = build_kernel(closed, [(0, 0), (2, 2), (3, 3)])
    n = sizes.host_elements
    params, m, v = (np.full(n, value, np.float32) for value in (1.0, 1e-3, 1e-6))
    grads, low, count = (
        np.full(n, 1e-3, jnp.bfloat16),
        np.zeros(n, jnp.bfloat16),
        np.zeros((), np.int32),
    )

    def update() -> None:
        kernel([params, 3, m, v, grads], [None, count, None, None, low])

    return kernel.bytes_per_element * n / _best(update, seconds=sizes.seconds)


def _disk(folder: str, sizes: ProbeSizes, when: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of a folder's disk, and their sources."""
    with SwapFolder(folder) as swap:
        free, settings = swap.free_bytes(), tune(swap.path)
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
    of = f"{when}: {settings.num_threads} transfers at once of {settings.block_bytes >> 20} MiB"
    return figures, {
        name: of if name != "disk_bytes" else "what is free in the folder" for name in figures
    }


def _until(seconds: float) -> Iterator[int]:
    """Yield at least once, and until so many seconds have passed, at most `_ROUNDS` times."""
    began = time.perf_counter()
    for n in range(_ROUNDS):
        if n and time.perf_counter() - began > seconds:
            return
        yield n
