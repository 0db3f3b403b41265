"""Measure this machine's rates: products, memory, the link, the host's kernel.

Predictions use them in place of assumed rates.
"""

import dataclasses
import os
import time
from collections.abc import Iterator

import numpy as np

from gpu_checks.jobs import one_device, platform_name
from gpu_checks.parts import KNOWN, Context
from gpu_checks.rows import Row

RATE = f"{KNOWN}rates."


def check_rates(context: Context) -> Iterator[Row]:
    """Measure the link, the device and host memory.

    That is: the link by `jax.device_put`, products and copies on the device, and one thread's copy
    of host memory.
    """
    import kernels

    from zerojax.planner import measure_link

    sizes = context.sizes
    link = measure_link(one_device(), sizes.link_bytes)
    for way, rate in dataclasses.asdict(link).items():
        yield Row(
            f"link, {way.replace('_', ' ')}",
            f"{rate / 1e9:.1f} GB/s",
            values={f"{KNOWN}link.{way}": rate},
        )
    slower = min(link.to_device, link.to_host)
    yield Row("link, the slower way", f"{slower / 1e9:.1f} GB/s", values={f"{RATE}link": slower})
    peak = kernels.peaks(sizes.few or platform_name() == "cpu")
    yield Row(
        "products of bfloat16",
        f"{peak['flops'] / 1e12:.4g} TF/s",
        values={f"{RATE}products": peak["flops"]},
    )
    yield Row(
        "device memory, copied",
        f"{peak['bytes'] / 1e9:.4g} GB/s",
        values={f"{RATE}memory": peak["bytes"]},
    )
    rate = copy_rate(sizes.link_bytes)
    yield Row(
        "host memory, copied by one thread",
        f"{rate / 1e9:.1f} GB/s",
        values={f"{RATE}host_copy": rate},
    )


def copy_rate(num_bytes: int, repeats: int = 3) -> float:
    """Return the bytes per second that one thread copies within host memory."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - start)
    return num_bytes / min(found)


def check_host_kernel(context: Context) -> Iterator[Row]:
    """Time the fused AdamW of `update_on="host"` on every core.

    The rate is the bytes of host memory that it reads and writes per second.
    """
    import host_adam

    n, threads = context.sizes.host_params, len(os.sched_getaffinity(0))
    grads, m, v, params = host_adam.fill(n)
    low_grads, low_params = host_adam.to_low(grads), host_adam.to_low(params)
    for low, name in ((False, "float32"), (True, "bf16 gradients in, parameters out")):
        update = host_adam.build_adamw(low)
        given = (params, m, v, low_grads if low else grads, low_params, threads)
        seconds = host_adam.best_seconds(lambda update=update, given=given: update(*given))
        rate = host_adam.NUM_BYTES * n / seconds
        text = (
            f"{rate / 1e9:.0f} GB/s ({threads} threads, {n / 1e6:.3g} M parameters, "
            f"{1e3 * seconds:.1f} ms)"
        )
        yield Row(
            f"host's kernel, {name}",
            text,
            values={f"{RATE}host_kernel" if low else "bytes_per_second": rate},
        )
