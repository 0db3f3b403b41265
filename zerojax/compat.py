"""Differences between the supported versions of jax and jaxlib, in one place.

`zerojax.jaxprs` knows the names and parameters of primitives, and `pallas_kernels.registers` knows
Pallas's.
"""

import functools
import importlib.metadata
import logging
import re
from typing import Any

logger = logging.getLogger("zerojax")

GPU_JAXLIB = (0, 11, 1)
"""The first jaxlib whose XLA slices host memory at the right address on a GPU.

`host_offload.device.self_test` tests for the bug.
"""


def jax_version() -> tuple[int, ...]:
    """Return jax's version as a tuple of integers.

    This does not import JAX: the command line reads versions too.
    """
    return version_numbers(importlib.metadata.version("jax"))


def jaxlib_version() -> tuple[int, ...]:
    """Return jaxlib's version as integers: (0, 12, 0) for "0.12.0rc1" and for "0.12.0.1"."""
    return version_numbers(importlib.metadata.version("jaxlib"))


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version string."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def check_gpu_version(platform: str, *, runs: bool) -> None:
    """Check that the installed jaxlib can run steps on a platform.

    Every supported jaxlib runs on CPUs.

    Args:
      platform: "cpu" or "gpu".
      runs: whether the devices are present. If not, the program is only compiled, and a warning is
        logged once.

    Raises:
      RuntimeError: the devices are GPUs, they are present, and jaxlib is older than `GPU_JAXLIB`.
    """
    if platform == "cpu" or jaxlib_version() >= GPU_JAXLIB:
        return
    installed = importlib.metadata.version("jaxlib")
    needed = ".".join(map(str, GPU_JAXLIB))
    fault = "on a GPU its XLA reads and writes host memory at wrong addresses (openxla/xla 46231)"
    if runs:
        raise RuntimeError(
            f"jaxlib {installed} cannot train on GPUs: {fault}. Install jax {needed} or newer, "
            f"which needs Python 3.12 or newer: pip install -U 'jax[cuda13]>={needed}'"
        )
    _warn_once(
        f"jaxlib {installed} compiles programs for GPUs that must not run: {fault}. Programs "
        f"compiled by jaxlib {needed} or newer may run"
    )


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def find_stream_assignment(version: str) -> str:
    """Return how a jaxlib version's XLA assigns asynchronous operations to streams.

    The result is an argument of `zerojax.hlo.simulate`. "turns" (before 0.12): to four streams in
    turn, so loads wait for stores. "direction": each direction of the host link has its own stream.
    """
    return "turns" if version_numbers(version) < (0, 12) else "direction"


def most_link_groups() -> int:
    """Return the most groups into which a record's arrays are split during backward.

    A group crosses the host link while backward's products run. Simulated milliseconds per step of
    16K and 32K tokens, for a Llama of 6.7 B with `opt_state` on the host of one H200:

        groups           2           3           4           5           6
        jax 0.12                           1983, 3221  1935, 3008  1991, 2955
        jax 0.11.2  3118, 3894  2983, 3733  2679, 3410  2693, 3383  2623, 3209

        groups           8          10          12
        jax 0.12    2042, 3055  2000, 2962  2106, 3100
        jax 0.11.2  2251, 3117  2173, 3115  2274, 3180

    Before 0.12 loads wait for stores (`find_stream_assignment`), so smaller groups shorten waits.
    """
    return 6 if jax_version() >= (0, 12) else 10


def num_update_groups() -> int:
    """Return the number of groups into which a record's arrays are split in a separate update.

    An update after backward has no products to overlap with. Simulated as in `most_link_groups`,
    with clip_norm; milliseconds per step of 16K tokens:

        groups      2     3     4     6     10    20
        jax 0.12    2960  2960  3002  3026  2960  3534
        jax 0.11.2  4054  3864  3687  3636  3128  3562
    """
    return 2 if jax_version() >= (0, 12) else 10


def varying_axes(aval: Any) -> frozenset[str]:
    """Return the axes of a `jax.shard_map` with `check_vma` over which a value varies.

    Without `check_vma`, JAX does not count them. A version of JAX that names them in another way
    gives none either, and then raises its own error for a loop.

    Args:
      aval: abstract value, from `jax.typeof`.
    """
    kinds = getattr(aval, "manual_axis_type", aval)
    return frozenset(getattr(kinds, "varying", None) or getattr(kinds, "vma", None) or ())


def compiler_level(kind: Any, level: Any) -> Any:
    """Return an optimization level in the form that jaxlib's compile options accept.

    jax 0.11 and newer also accept names such as "O1".
    """
    names = getattr(kind, "CompilerEffortLevel", None)
    return level if names is None else names(level).value
