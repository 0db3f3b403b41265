"""Measure the bandwidth of the nvme tier's two readers over the disk's own bandwidth.

    # 1 GiB per reader and round in a temporary folder
    python benchmarks/bandwidth.py
    python benchmarks/bandwidth.py --folder SWAP_DIR --save benchmarks/results/NAME.md

Each round's ceiling is the fastest of plain preadv/pwritev with O_DIRECT, at several settings, on
the same files and buffers, and of fio if it is installed. A round measures every reader, writes
before reads, and drops the page cache in between. Ratios are taken within a round, so a slow minute
of the disk affects all readers. The first round is left out because it writes new files.
`host_offload.disk.bandwidth` takes the measurements.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile

from contenders import cpu_name

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from host_offload.disk import (
    DIRECT,
    PLAIN,
    TENSORSTORE,
    UNCHECKED,
    Bench,
    IoSettings,
    Rates,
    SwapFolder,
    tune,
)

FIO = "fio"
FLOOR = 0.90
"""Least share of the ceiling for io="direct", checksums included."""


def main() -> None:
    """Run all rounds, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--folder", help="folder on the disk to measure; a temporary folder by default"
    )
    parser.add_argument(
        "--gib", type=float, default=1.0, help="GiB that each reader writes and reads per round"
    )
    parser.add_argument(
        "--records", type=int, default=16, help="number of records into which --gib is split"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", help="write the table here; a temporary folder by default")
    options = parser.parse_args()
    if options.gib <= 0 or options.records < 2 or options.rounds < 1:
        parser.error("--gib must be more than 0, --records at least 2 and --rounds at least 1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        with SwapFolder(folder) as swap:
            settings = tune(swap.path)
            size = int(options.gib * 2**30 / options.records)
            with Bench(
                swap.path, settings, num_records=options.records, record_bytes=size
            ) as bench:
                rounds = []
                for turn in range(options.rounds + 1):
                    rates = bench.round() | fio_rates(swap.path, int(options.gib * 2**30), settings)
                    if turn:
                        rounds.append(rates)
                    told = ", ".join(
                        f"{name} {r.read / 1e9:.2f}/{r.write / 1e9:.2f}"
                        for name, r in rates.items()
                    )
                    print(f"round {turn}: read/write GB/s: {told}", flush=True)
    text = "\n".join([*heading(options, settings, size), "", *table(rounds)]) + "\n"
    print(f"\n{text}")
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "bandwidth.md")
    target.write_text(text)
    print(f"saved as {target}")


def heading(options: argparse.Namespace, settings: IoSettings, size: int) -> list[str]:
    """Return the report's heading: sizes, hardware, versions and command."""
    return [
        f"# Bandwidth of the nvme tier, {datetime.date.today():%Y-%m}",
        "",
        f"{options.records} records of {size / 2**20:.1f} MiB in four buffers; "
        f"{settings.num_threads} transfers at once of "
        f"{settings.block_bytes / 2**20:g} MiB.",
        f"Hardware: {os.cpu_count()} cores of {cpu_name()}. "
        f"tensorstore {importlib.metadata.version('tensorstore')}, Python "
        f"{platform.python_version()}, Linux {platform.release().split('-')[0]}.",
        f"Command: `{' '.join(['python benchmarks/bandwidth.py', *sys.argv[1:]])}`",
        "",
        f"{options.rounds} rounds; a ratio is taken within a round, over the best of "
        f"{PLAIN}{' and fio' if shutil.which(FIO) else ' (fio is not installed)'}.",
    ]


def table(rounds: list[dict[str, Rates]]) -> list[str]:
    """Return the table's lines and a sentence on whether io="direct" reaches its floor."""
    lines = [
        "| reader | read GB/s | over the best, median (range) "
        "| write GB/s | over the best, median (range) |",
        "|---|---|---|---|---|",
    ]
    medians = {}
    for name in (PLAIN, FIO, DIRECT, UNCHECKED, TENSORSTORE):
        if name not in rounds[0]:
            continue
        cells = []
        for way in ("read", "write"):
            rates = [getattr(r[name], way) for r in rounds]
            best = [max(getattr(r[n], way) for n in (PLAIN, FIO) if n in r) for r in rounds]
            ratio = [a / b for a, b in zip(rates, best, strict=True)]
            medians[name, way] = statistics.median(ratio)
            cells.append(
                f"{statistics.median(rates) / 1e9:.2f} | {medians[name, way]:.2f} "
                f"({min(ratio):.2f}-{max(ratio):.2f})"
            )
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    told = [
        f"{way} {medians[DIRECT, way]:.2f} "
        f"({'reached' if medians[DIRECT, way] >= FLOOR else 'MISSED'})"
        for way in ("read", "write")
    ]
    return [
        *lines,
        "",
        f'io="direct" is to reach {FLOOR:.2f} of the best, checksums included: {", ".join(told)}.',
    ]


def fio_rates(folder: str, num_bytes: int, settings: IoSettings) -> dict[str, Rates]:
    """Return {"fio": its rates} for the same transfers, or {} if fio is not installed."""
    program = shutil.which(FIO)
    if program is None:
        return {}
    found, share = {}, num_bytes // settings.num_threads
    for way in ("write", "read"):
        command = [program, "--name=swap", f"--directory={folder}", "--filename=fio",
                   f"--filesize={num_bytes}", f"--rw={way}",
                   "--ioengine=psync", "--direct=1", "--thread", f"--bs={settings.block_bytes}",
                   f"--numjobs={settings.num_threads}", f"--size={share}",
                   f"--offset_increment={share}",
                   "--iomem_align=2m", "--group_reporting", "--output-format=json"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[way] = json.loads(done.stdout)["jobs"][0][way]["bw_bytes"]
    return {FIO: Rates(**found)}


if __name__ == "__main__":
    main()
