"""Time imports and the command line as full processes, from their start to their end."""

import subprocess
import sys
import time

from plain_parts.rows import Row

_JAX = "import jax, flax, optax"
PROGRAMS = {
    "import jax, flax, optax": ["-c", _JAX],
    "import zerojax": ["-c", f"{_JAX}; import zerojax"],
    "import zerojax, and build_train_step": [
        "-c",
        f"{_JAX}; import zerojax; zerojax.build_train_step",
    ],
    "import argparse": ["-c", "import argparse"],
    "zerojax --help": ["-m", "zerojax", "--help"],
}
ROWS = (
    Row("import zerojax", "import jax, flax, optax", 0.4, differs=True),
    Row("import zerojax, and build_train_step", "import jax, flax, optax", differs=True),
    Row("zerojax --help", "import argparse", 0.5, differs=True),
)


def seconds(name: str) -> float:
    """Return the seconds of a process that runs one of `PROGRAMS`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *PROGRAMS[name]], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
