"""What differs between the supported versions of jax and jaxlib, in one place.

`zerojax.jaxprs` knows the names of primitives and of their parameters, and
`pallas_kernels.registers` those of Pallas.
"""

import functools
import importlib.metadata
import logging
import re
from typing import Any

logger = logging.getLogger("zerojax")

GPU_JAXLIB = (0, 11, 1)
"""The first jaxlib whose XLA slices host memory at the right address on a GPU
(`host_offload.device.self_test`).
"""


def jax_version() -> tuple[int, ...]:
    """Return the version of jax as numbers.

    JAX is not imported: the command line reads versions, too.
    """
    return version_numbers(importlib.metadata.version("jax"))


def jaxlib_version() -> tuple[int, ...]:
    """Return the version of jaxlib as numbers: (0, 12, 0) for "0.12.0rc1" and "0.12.0.1"."""
    return version_numbers(importlib.metadata.version("jaxlib"))


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def check_gpu_version(platform: str, *, runs: bool) -> None:
    """Check that the installed jaxlib may run steps on a platform. CPUs take any supported jaxlib.

    Args:
      platform: "cpu" or "gpu".
      runs: whether the devices are present. Otherwise the program is only compiled, and a warning
        is logged once.

    Raises:
      RuntimeError: the devices are GPUs that are present, and jaxlib is older than `GPU_JAXLIB`.
    """
    if platform == "cpu" or jaxlib_version() >= GPU_JAXLIB:
        return
    installed = importlib.metadata.version("jaxlib")
    needed = ".".join(map(str, GPU_JAXLIB))
    fault = "on a GPU its XLA reads and writes host memory at wrong addresses (openxla/xla 46231)"
    if runs:
        raise RuntimeError(
            f"jaxlib {installed} cannot train on GPUs: {fault}. Install jax {needed} or newer, which needs Python 3.12 or "
            f"newer: pip install -U 'jax[cuda13]>={needed}'"
        )
    _warn_once(
        f"jaxlib {installed} compiles programs for GPUs that must not run: {fault}. jaxlib {needed} and newer compile programs "
        "that may"
    )


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def streams_of(version: str) -> str:
    """Return how the XLA of a jaxlib assigns asynchronous operations to streams
    (`zerojax.hlo.simulate`).

    "turns": to four streams in turn, so that loads wait for stores; before 0.12. "direction": each
    direction of the link has a stream of its own.
    """
    return "turns" if version_numbers(version) < (0, 12) else "direction"


def most_link_groups() -> int:
    """Return into how many groups at most a record's arrays are split that cross the link beside
    backward's products.

    Simulated for a Llama of 6.7 B with `opt_state` on the host of one H200, milliseconds a step of
    16K and 32K tokens:

        groups      2           3           4           5           6           8           10          12
        jax 0.12                            1983, 3221  1935, 3008  1991, 2955  2042, 3055  2000, 2962  2106, 3100
        jax 0.11.2  3118, 3894  2983, 3733  2679, 3410  2693, 3383  2623, 3209  2251, 3117  2173, 3115  2274, 3180

    Before 0.12 loads wait for stores (`streams_of`): the smaller a group is, the shorter is the
    wait.
    """
    return 6 if jax_version() >= (0, 12) else 10


def num_update_groups() -> int:
    """Return into how many groups a record's arrays are split in an update after backward, which
    has no products.

    Simulated as in `most_link_groups`, with clip_norm, milliseconds a step of 16K tokens:

        groups      2     3     4     6     10    20
        jax 0.12    2960  2960  3002  3026  2960  3534
        jax 0.11.2  4054  3864  3687  3636  3128  3562
    """
    return 2 if jax_version() >= (0, 12) else 10


def compiler_level(kind: Any, level: Any) -> Any:
    """Return an optimization level as the compile options take it; jax 0.11 and newer also take
    names such as "O1".
    """
    names = getattr(kind, "CompilerEffortLevel", None)
    return level if names is None else names(level).value
