"""Compare zerojax with plain programs that do the same work.

The parts are updates, steps, compile times, imports, adapters, tiles and saves.

    python benchmarks/beside_plain.py                     # all parts, about half an hour
    python benchmarks/beside_plain.py --parts update step --rounds 5
    # PEER is an environment with torch and deepspeed
    python benchmarks/beside_plain.py --peer-python PEER/bin/python
    python benchmarks/beside_plain.py --save benchmarks/results/NAME.md

A round runs every part once, in its own processes, and a part runs its contenders in turn. Ratios
are taken within a round, so a slow minute of the machine affects both numbers; the table shows
their median and range. Contenders that train start from the same weights and read the same tokens.
Their losses must agree within 1e-4 at every step; otherwise the exit status is 1. Adapters are
compared only by speed, with torch, transformers and PEFT from the `dev` extra.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from contenders import TOLERANCE, WARMUP, Contender, cpu_name, run_process
from plain_parts import adapters, compiling, imports, operators, steps
from plain_parts.rows import Row
from problem import Problem, add_arguments, from_arguments

HERE = pathlib.Path(__file__).resolve().parent
PEER_BASE = steps.BLOCKS
SAVED_BYTES, UPDATED_PARAMS = 456 << 20, 50_000_000
ISAS = {
    "avx2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
}
"""Environment variables that restrict every contender to the named vector width."""
Found = tuple[dict[str, float], dict[str, list[float]]]
"""Results of one round: seconds by contender, and losses by training contender."""


PARTS: Mapping[str, tuple[str, Sequence[Row]]] = {
    "update": ("AdamW's update alone, {params:.1f} M parameters, one device", steps.UPDATE),
    "step": (
        "a step of {layers} x {hidden}, {batch} x {seq} tokens, one device",
        steps.ONE_DEVICE,
    ),
    "sharded": ("the same step on two devices", steps.TWO_DEVICES),
    "compile": (
        "from nothing to a state and a compiled step: 24 separate NNX layers, two devices",
        compiling.ROWS,
    ),
    "imports": ("a process, from its start to its end: seconds more", imports.ROWS),
    "adapters": (
        "a step of a Llama of 8 x 512, 4 x 256 tokens, adapters of rank 16",
        adapters.TABLE,
    ),
    "tiles": ("value and gradient of an MLP 512 -> 2048 -> 512, 2048 rows", operators.TILES),
    "saves": ("a save in the background, 456 MiB in memory", operators.SAVES),
    "kernel": ("AdamW on the host, 50 M parameters", operators.KERNEL),
}
"""Description and rows of each part."""
OWN_PROCESS: Mapping[str, Callable[[str, Problem], float]] = {
    "compile": compiling.seconds,
    "imports": lambda name, p: imports.seconds(name),
    "adapters": lambda name, p: adapters.seconds(name),
}
"""Parts whose contenders each need their own process."""
TOGETHER: Mapping[str, Callable[[Problem], Found]] = {
    "update": steps.update,
    "step": steps.one_device,
    "sharded": steps.two_devices,
    "tiles": lambda p: (operators.tiles(), {}),
    "saves": lambda p: (operators.saves(SAVED_BYTES), {}),
    "kernel": lambda p: (operators.kernel(UPDATED_PARAMS, len(os.sched_getaffinity(0))), {}),
}
"""Parts whose contenders share one process."""


def peers(p: Problem, python: str) -> list[Contender]:
    """Return torch's contenders: plain on one device, and sharded over two ranks."""
    peer = [str(HERE / "peer.py"), *p.arguments(), "--mode"]
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *peer]
    found = [
        Contender("torch plain", 1, [python, *peer, "plain"]),
        Contender("FSDP2, two ranks", 2, [*launch, "fsdp2"]),
    ]
    if (
        subprocess.run(
            [python, "-c", "import deepspeed"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        found += [
            Contender(f"DeepSpeed ZeRO {s}, two ranks", 2, [*launch, f"deepspeed{s}"])
            for s in (1, 2, 3)
        ]
    return found


def run_part(part: str, p: Problem, environment: Mapping[str, str], folder: str) -> Found:
    """Run the contenders of a part in new processes and return their results."""
    command = [sys.executable, str(HERE / "beside_plain.py"), *p.arguments(), "--worker", part]
    names = [""]
    if part in OWN_PROCESS:
        names = list(dict.fromkeys(name for row in PARTS[part][1] for name in (row.base, row.name)))
    seconds, losses = dict[str, float](), dict[str, list[float]]()
    for name in names:
        done = subprocess.run(
            [*command, name], env={**os.environ, "JAX_PLATFORMS": "cpu", **environment}, cwd=folder,
            capture_output=True,
            text=True, timeout=1800, check=False,
        )  # fmt: skip
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
        if line is None:
            raise RuntimeError(
                f"{part} {name} printed no result:\n{(done.stdout + done.stderr)[-2000:]}"
            )
        found = json.loads(line.removeprefix("RESULT "))
        seconds |= found[0]
        losses |= found[1]
    return seconds, losses


def disagreement(rounds: Sequence[Mapping[str, Found]]) -> float:
    """Return the largest difference between the losses of two contenders at the same step."""
    runs = [
        losses for found in rounds for _, by_name in found.values() for losses in by_name.values()
    ]
    if len(runs) < 2:
        return 0.0
    count = min(map(len, runs))
    return float(
        np.max(np.abs(np.array([run[:count] for run in runs]) - np.array(runs[0][:count])))
    )


def rows_of(part: str, peer_names: Sequence[str]) -> list[Row]:
    """Return a part's rows; the rows of part "step" include the peers."""
    more = [Row(name, PEER_BASE) for name in peer_names] if part == "step" else []
    return [*PARTS[part][1], *more]


def table(
    p: Problem,
    rounds: Sequence[Mapping[str, Found]],
    peer_names: Sequence[str],
    isa: str,
    command: str,
) -> str:
    """Return the report in Markdown."""
    sizes = {
        "params": p.num_params / 1e6,
        "layers": p.layers,
        "hidden": p.hidden,
        "batch": p.batch,
        "seq": p.seq,
    }
    packages = (
        "jax",
        "flax",
        "optax",
        "orbax-checkpoint",
        "numba",
        "torch",
        "transformers",
        "peft",
    )
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    lines = [
        f"# zerojax beside plain programs, {datetime.date.today():%Y-%m}",
        "",
        f"Hardware: {os.cpu_count()} cores of {cpu_name()}, {isa}. "
        f"Versions: {versions}, Python {platform.python_version()}.",
        f"Command: `{command}`",
        "",
        f"{len(rounds)} rounds, float32. Ratios are taken within a round: median (range). "
        "Below 1 is faster than what "
        "stands beside it. A difference is in seconds.",
    ]
    for part in rounds[0]:
        lines += ["", f"**{part}**: {PARTS[part][0].format(**sizes)}", ""]
        lines += [
            "| contender | beside | ms | ms beside | ratio or difference | goal |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows_of(part, peer_names):
            pairs = [
                (f[part][0][row.name], f[part][0][row.base])
                for f in rounds
                if row.name in f[part][0]
            ]
            if not pairs:
                continue
            values = sorted(row.value(*pair) for pair in pairs)
            own, base = (1e3 * statistics.median(pair[n] for pair in pairs) for n in (0, 1))
            unit = " s" if row.differs else ""
            goal = "" if row.goal is None else f"{row.goal:.2f}{unit}"
            lines.append(
                f"| {row.name} | {row.base} | {own:,.1f} | {base:,.1f} "
                f"| {statistics.median(values):.2f}{unit} "
                f"({values[0]:.2f} to {values[-1]:.2f}) | {goal} |"
            )
    return "\n".join(lines) + "\n"


def vectors() -> str:
    """Return the name of this processor's widest vector instructions."""
    info = pathlib.Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()


def main() -> None:
    """Run all rounds, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer-python", help="Python of an environment with torch and, optionally, deepspeed"
    )
    parser.add_argument(
        "--isa",
        choices=list(ISAS),
        help="widest vector instructions to use; by default the processor's own",
    )
    parser.add_argument("--save", help="file for the table; in a temporary folder by default")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    add_arguments(parser)
    options = parser.parse_args()
    p = from_arguments(options)
    if options.worker:
        part, name = options.worker
        found: Any = (
            ({name: OWN_PROCESS[part](name, p)}, {}) if part in OWN_PROCESS else TOGETHER[part](p)
        )
        print("RESULT " + json.dumps(found))
        return
    if p.batch % 2:
        parser.error(f"--batch {p.batch} is not divisible by two devices; give an even number")
    others = peers(p, options.peer_python) if options.peer_python else []
    environment = ISAS[options.isa] if options.isa else {}
    rounds: list[dict[str, Found]] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.rounds):
            results: dict[str, Found] = {}
            for part in options.parts:
                results[part] = run_part(part, p, environment, folder)
                if part == "step":
                    for other in others:
                        of_peer = run_process(other, folder, options.peer_python)
                        results[part][0][other.name] = statistics.median(
                            of_peer["seconds"][WARMUP:]
                        )
                told = ", ".join(
                    f"{name} {1e3 * seconds:.0f} ms" for name, seconds in results[part][0].items()
                )
                print(f"round {index + 1}: {part}: {told}", flush=True)
            rounds.append(results)
    isa = (
        f"{vectors()}"
        if not options.isa
        else f"{vectors()}, no wider than {options.isa.upper()} used"
    )
    words = [w if w != options.peer_python else "PEER/bin/python" for w in sys.argv[1:]]
    text = table(
        p,
        rounds,
        [other.name for other in others],
        isa,
        " ".join(["python benchmarks/beside_plain.py", *words]),
    )
    away = disagreement(rounds)
    text += (
        f"\nLosses {'agree' if away <= TOLERANCE else 'DO NOT agree'} within {TOLERANCE:g}: "
        f"{away:.1e} apart at most.\n"
    )
    print(f"\n{text}")
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "beside_plain.md")
    target.write_text(text)
    print(f"saved as {target}")
    sys.exit(0 if away <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
