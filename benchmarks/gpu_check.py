"""What a GPU does that tests on a CPU cannot show: the right records, the same numbers, the link's speed, overlap, peak memory.

    python benchmarks/gpu_check.py --out benchmarks/results/NAME.md --json NAME.json     # under 8 minutes on one H200
    python benchmarks/gpu_check.py --peer-python PEER/bin/python                         # PEER: an environment with torch
    python benchmarks/gpu_check.py --small                                               # everything, as small as it goes
    python benchmarks/gpu_check.py --compile-only                                        # for an H200 that is not there

Every check runs in a process of its own, one after the other, and yields rows (figure, bound, whether it holds) as it goes; one
that fails, crashes or hangs leaves its rows and stops none of the others. The checks, on one device:

    slices         each form in which a step slices host memory, against numpy
    fp32, bf16     10 steps with every mix of tiers against the resident step: losses, parameters
    activations    gradients with activations in host memory against recomputed ones
    tiles          10 steps with MLPs whose tiles are records, in mixes of tiers, against the resident step
    memory         peak device memory over `program.memory` and over the compiler's own count; a process for each mix
    nvme           10 steps with mixes on disk against the resident step; the disk's speed; time and stall of such steps
    speed          the link's bandwidth; step time of each mix over the resident step, interleaved; overlap; FSDP2 offloaded
    kernels        each op of pallas_kernels beside XLA's: error against float64, time, share of the measured peak

The resident step recomputes its layers, as the mixes do, so that the extra of a mix is its transfers. With c its time, b the
bytes that a mix moves over the measured bandwidth (both ways at once) and s the time of the mix, max(c, b) is the floor, and

    hidden = (c + b - s) / min(c, b)

is 1 where the shorter of the two is free and 0 where they take turns. What each does is in `gpu_checks`; later checks are
added to `CHECKS`.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpu_checks import equality, kernels, memory, slices, speed, swap
from gpu_checks.compiled import compile_rows
from gpu_checks.jobs import Job, platform_name
from gpu_checks.mixes import CPU, GPU, SMALL, Sizes
from gpu_checks.rows import Row, attempt, line
from step_time import cpu_name

TIME_LIMIT = 480.0  # seconds, for all checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What a worker does.

    Attributes:
      run: (sizes, peer's python) -> rows.
      programs: the jobs that it compiles.
      preallocates: take device memory in one piece, as a training run does.
    """

    run: Callable[[Sizes, str | None], Iterator[Row]]
    programs: Callable[[Sizes], list[Job]]
    preallocates: bool = False


def equal(precision: str) -> Check:
    """Return the check of one precision."""

    def programs(sizes: Sizes) -> list[Job]:
        return equality.equal_jobs(precision, sizes)

    return Check(run=lambda sizes, _: equality.compare_jobs(programs(sizes)), programs=programs)


CHECKS: Mapping[str, Check] = {
    "slices": Check(run=lambda s, _: slices.check_slices(s), programs=lambda _: []),
    "fp32": equal("fp32"),
    "bf16": equal("bf16"),
    "activations": Check(
        run=lambda s, _: equality.compare_jobs(equality.activation_jobs(s)), programs=equality.activation_jobs
    ),
    "tiles": Check(run=lambda s, _: equality.compare_jobs(equality.tile_jobs(s)), programs=equality.tile_jobs),
    "memory": Check(run=lambda s, _: memory.check_memory(s), programs=memory.memory_jobs),
    "nvme": Check(run=lambda s, _: swap.check_swap(s), programs=swap.swap_jobs),
    "speed": Check(run=speed.check_speed, programs=speed.speed_jobs, preallocates=True),
    "kernels": Check(run=lambda s, _: kernels.check_kernels(s), programs=lambda _: []),
}


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes for these options and this platform."""
    if options.small:
        return SMALL
    return CPU if platform_name() == "cpu" and not options.compile_only else GPU


def head(sizes: Sizes) -> dict[str, Any]:
    """Return hardware, versions and sizes."""
    import jax

    device = jax.devices()[0]
    driver = None
    if platform_name() == "gpu" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "numba"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "hardware": f"{device.device_kind}, {os.cpu_count()} cores of {cpu_name()}",
        "driver": driver,
        "platform": " ".join(device.client.platform_version.split()),
        "versions": versions,
        "sizes": dataclasses.asdict(sizes),
    }


def work(options: argparse.Namespace) -> None:
    """Run one check, and append a line of JSON to the file for its head and for each row."""
    sizes, name = sizes_of(options), options.worker
    with open(options.rows, "a", buffering=1) as rows:
        rows.write(json.dumps({"head": head(sizes)}) + "\n")
        check = CHECKS[name]

        def run() -> Iterator[Row]:
            if options.compile_only:
                return compile_rows(name, check.programs(sizes), sizes)
            return check.run(sizes, options.peer_python)

        for row in attempt(name, run):
            rows.write(json.dumps({"row": dataclasses.asdict(row)}) + "\n")
            print(line(name, row), flush=True)


def run_check(name: str, options: argparse.Namespace, folder: str, seconds: float) -> tuple[dict[str, Any], list[Row]]:
    """Run a worker for at most `seconds`; returns its head and its rows."""
    if seconds <= 0:
        return {}, [Row(name, f"not run: the others took the {options.limit:g} s", ok=False)]
    file = pathlib.Path(folder) / f"{name}.jsonl"
    words = ["--worker", name, "--rows", str(file)]
    words += ["--small"] if options.small else []
    words += ["--compile-only"] if options.compile_only else []
    words += ["--peer-python", options.peer_python] if options.peer_python else []
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}  # keep what kernels were timed, and not programs
    if CHECKS[name].preallocates:
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}  # the rest is the peer's
    if options.compile_only:
        env |= {"JAX_PLATFORMS": "cpu"}
        if options.small:  # without a GPU to try on, XLA's Triton backend finds no tiles for products as small as these
            env |= {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"}
    errors = pathlib.Path(folder) / f"{name}.txt"
    with errors.open("w") as out:
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), *words]
        process = subprocess.Popen(command, env=env, stderr=out, start_new_session=True)
        try:
            status = process.wait(seconds if seconds < float("inf") else None)
            why = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, why = 1, f"stopped after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a peer may be left
            process.wait()
    found = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    rows = [Row(**one["row"]) for one in found if "row" in one]
    if status:
        tail = errors.read_text().strip().splitlines()[-1:]
        rows.append(Row(name, ": ".join([why, *tail])[:400], ok=False))
        print(line(name, rows[-1]), flush=True)
        print(errors.read_text()[-4000:], file=sys.stderr)
    return next((one["head"] for one in found if "head" in one), {}), rows


def report(facts: Mapping[str, Any], results: Mapping[str, Sequence[Row]]) -> str:
    """Return the table in Markdown."""
    versions = [f"{name} {version}" for name, version in facts.get("versions", {}).items()]
    sizes = facts.get("sizes", {})
    fast = sizes.get("fast", {})
    judged = [row.ok for rows in results.values() for row in rows if row.ok is not None]
    device = "compiled for an H200 that is not there" if facts["compile_only"] else facts.get("hardware", "unknown")
    driver = f", driver {facts['driver']}" if facts.get("driver") else ""
    lines = [
        f"# What the device does, {datetime.date.today():%Y-%m}",
        "",
        f"Hardware: {device}{driver}. Versions: {', '.join(versions)}.",
        f"Command: `{facts['command']}`; {facts['seconds']:.0f} s "
        f"({', '.join(f'{name} {seconds:.0f}' for name, seconds in facts['check_seconds'].items())}).",
        "",
    ]
    if "speed" in results and not facts["compile_only"] and fast:
        lines += [
            f"Speed: {fast['layers']} layers x {fast['hidden']}, batch {fast['batch']} x {fast['seq']}, {fast['precision']}, "
            f"{sizes['rounds']} rounds; a ratio is taken within a round, and its median and range are shown. `all` is params, "
            "grads and opt_state in pinned_host; the resident step recomputes its layers, as the mixes do.",
            "",
        ]
    lines += ["| check | what | figure | bound | ok |", "|---|---|---|---|---|"]
    lines += [line(name, row) for name, rows in results.items() for row in rows]
    lines += ["", f"{sum(judged)} of {len(judged)} bounds hold."]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes and few mixes")
    parser.add_argument("--compile-only", action="store_true", help="compile every program for an H200 that is not there")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="run these checks alone")
    parser.add_argument("--peer-python", help="python of an environment with torch; this one if it has torch")
    parser.add_argument("--limit", type=float, help=f"seconds for all checks; {TIME_LIMIT:g}, or none where nothing is run")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--out", help="write the table here")
    for name in ("worker", "rows", "peak"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limit is None:
        options.limit = float("inf") if options.compile_only else TIME_LIMIT
    return options


def main() -> None:
    """Run every check, print and save the table."""
    options = parse()
    if options.worker:
        work(options)
        return
    if options.peak:
        job = next(job for job in memory.memory_jobs(sizes_of(options)) if job.name == options.peak)
        print("RESULT " + json.dumps(memory.peak_of(job)))
        return
    words = [w if w != options.peer_python else "PEER/bin/python" for w in sys.argv[1:]]
    facts: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gpu_check.py", *words]),
        "compile_only": options.compile_only,
        "check_seconds": {},
    }
    results: dict[str, list[Row]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            began = time.monotonic()
            seen, results[name] = run_check(name, options, folder, options.limit - (began - start))
            facts |= seen
            facts["check_seconds"] |= {name: round(time.monotonic() - began, 1)}
    facts["seconds"] = time.monotonic() - start
    text = report(facts, results)
    print(f"\n{text}")
    if options.out:
        pathlib.Path(options.out).write_text(text)
    if options.json:
        rows = {name: [dataclasses.asdict(row) for row in rows] for name, rows in results.items()}
        pathlib.Path(options.json).write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    sys.exit(1 if any(row.ok is False for rows in results.values() for row in rows) else 0)


if __name__ == "__main__":
    main()
