"""Processes on one machine (jax.distributed, gloo) that run one script and report their results."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = [ROOT, ROOT / "tests" / "helpers"]

BEFORE = """
import json, os, pathlib, sys
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
processes, me, port, out = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], pathlib.Path(sys.argv[5])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, me)
import zerojax.runtime.swap
from host_offload.disk import tuning
zerojax.runtime.swap.tune = lambda _: tuning.DEFAULT  # a probe takes a second
"""
AFTER = """
json.dump(found, open(out / f"{me}.json", "w"))
"""


def environment() -> dict[str, str]:
    """Return the environment of a script that imports this repository and its tests."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATH)), "JAX_PLATFORMS": "cpu"}


def start(
    script: str, folder: pathlib.Path, processes: int, devices: int = 8
) -> list[subprocess.Popen[str]]:
    """Start a script in several processes.

    Args:
      script: source code; it can use `processes`, `me`, `out` (the folder) and the modules of
        BEFORE.
      folder: folder to create.
      processes: number of processes to start.
      devices: number of devices of all processes together.
    """
    folder.mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    code = BEFORE + script + AFTER
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(devices // processes), str(processes), str(me), port, str(folder)],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        )
        for me in range(processes)
    ]  # fmt: skip


def found_by(folder: pathlib.Path, processes: int) -> list[dict[str, Any]]:
    """Return what each process stored in `found`."""
    return [json.loads((folder / f"{me}.json").read_text()) for me in range(processes)]


def launch(
    script: str, folder: pathlib.Path, processes: int, devices: int = 8
) -> list[dict[str, Any]]:
    """Run a script in several processes, and return what each stored in `found`.

    The arguments are those of `start`.
    """
    workers = start(script, folder, processes, devices)
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0, output
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()  # close its pipe, even if another process failed
    assert not list(folder.glob("zerojax-swap-[0-9]*"))
    return found_by(folder, processes)
