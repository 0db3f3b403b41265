"""Run a benchmark's contenders, programs in their own processes that print their results."""

import dataclasses
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

TOLERANCE = 1e-4
"""Largest allowed difference between losses at a step, in float32."""
WARMUP = 2
"""Number of untimed steps."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program to compare.

    Attributes:
      name: name in the table.
      ranks: number of devices or ranks that the program uses.
      command: command line that runs the program.
    """

    name: str
    ranks: int
    command: list[str]


def run_process(contender: Contender, folder: str, peer_python: str | None) -> dict[str, Any]:
    """Run one contender once and return the JSON of its RESULT line.

    Raises:
      RuntimeError: if the contender printed no result; the message has its last output.
    """
    env = dict(os.environ)
    if peer_python is not None and contender.command[0] == peer_python:
        env |= {"PATH": f"{pathlib.Path(peer_python).parent}{os.pathsep}{env['PATH']}"}
        env |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // contender.ranks))}
        if not pathlib.Path("/dev/nvidia0").exists():
            env |= {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        contender.command,
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(
        f"{contender.name} printed no result:\n{(done.stdout + done.stderr)[-2000:]}"
    )


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system reports no name."""
    info = pathlib.Path("/proc/cpuinfo")
    names = (
        [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()
