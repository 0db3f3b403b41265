"""Reduce every kind of program to numbers that show whether two checkouts agree bit for bit.

    cd FOLDER    # outside of any checkout, so that PYTHONPATH decides which one is imported
    # about 5 minutes each
    PYTHONPATH=BEFORE python AFTER/benchmarks/same_numbers.py run --out before.json
    PYTHONPATH=AFTER python AFTER/benchmarks/same_numbers.py run --out after.json
    # exit status 1 if they differ
    python AFTER/benchmarks/same_numbers.py compare before.json after.json
    # Python calls of a step
    PYTHONPATH=AFTER python AFTER/benchmarks/same_numbers.py calls --out calls.json

Use it for a change that must not change any number. `run` trains toys for 3 steps on 8 simulated
devices, in every stage, tier, precision and form of a model, and records losses and norms as
hexadecimal floats and a SHA-256 of every leaf of the state. State on disk is read through a
checkpoint that an in-memory program restores. `run` then compiles programs for H200s, without
having any, and records their collectives, their bytes of memory, their traffic over the host link,
and a SHA-256 of their optimized HLO without names. A different text is reported, but does not count
as different numbers. Numbers are reproducible on one machine with one version of jax; different
machines give different numbers.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts: the topology must not look for a driver
os.environ["XLA_FLAGS"] = (  # shortens compilation
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
)

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

import jax

# zerojax is imported where it is used: `compare` does not need it, and `calls` wraps its imports.
TRAINED, COMPILED = "trained", "compiled"


def about() -> dict[str, str]:
    """Return the checkout and everything else that the numbers depend on."""
    import zerojax as zj

    root = pathlib.Path(zj.__file__).parent.parent
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
        "--abbrev=40",
    ]
    return {
        "zerojax": str(root),
        "commit": subprocess.run(
            command, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def work() -> list[tuple[str, str]]:
    """Return the kind (trained or compiled) and the name of each case."""
    import same_cases

    return [
        *((TRAINED, name) for name in same_cases.CASES),
        *((COMPILED, name) for name in same_cases.COMPILED),
    ]


def start() -> None:
    """Prepare a process to run cases."""
    import same_cases

    jax.config.update("jax_num_cpu_devices", same_cases.DEVICES)


def numbers_of(kind: str, name: str, folder: str) -> tuple[dict[str, Any], float]:
    """Return the numbers of a case, and its seconds."""
    import same_cases

    began, found = time.monotonic(), {}
    swap = pathlib.Path(folder) / str(os.getpid())  # the disk is probed once per process
    swap.mkdir(exist_ok=True)
    try:
        if kind == TRAINED:
            found = same_cases.train(same_cases.CASES[name], str(swap))
        else:
            found = same_cases.compile_case(same_cases.COMPILED[name])
    except Exception as error:  # the other cases still run
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}"}
    return found, time.monotonic() - began


def run(only: list[str], folder: str | None, jobs: int) -> dict[str, Any]:
    """Return the numbers of the cases whose names contain one of `only`."""
    found: dict[str, Any] = {"about": about()}
    print("zerojax of {zerojax}, {commit}".format(**found["about"]), flush=True)
    wanted = [
        (kind, name)
        for kind, name in work()
        if not only or any(part in f"{kind}: {name}" for part in only)
    ]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(dir=folder) as inside,
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=start) as pool,
    ):
        futures = {
            pool.submit(numbers_of, kind, name, inside): f"{kind}: {name}" for kind, name in wanted
        }
        for future in concurrent.futures.as_completed(futures):
            print(f"{future.result()[1]:6.1f} s  {futures[future]}", flush=True)
        return found | {name: future.result()[0] for future, name in futures.items()}


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """Return a line for each difference between two trees of JSON."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys((*before, *after))
        return [
            line
            for key in keys
            for line in differences(before.get(key), after.get(key), f"{name}/{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            line
            for i, (a, b) in enumerate(zip(before, after, strict=True))
            for line in differences(a, b, f"{name}/{i}")
        ]
    return [] if before == after else [f"{name}: {before} before, {after} after"]


def count_numbers(tree: Any) -> int:
    """Return the number of values in a tree of JSON."""
    if isinstance(tree, dict | list):
        return sum(
            count_numbers(part) for part in (tree.values() if isinstance(tree, dict) else tree)
        )
    return 1


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print a table of differences; return whether there are numbers, and all of them agree.

    HLO texts may differ; differing texts are counted.
    """
    same, texts = len(before) > 1, [0, 0]
    for name, value in {**before["about"], **after["about"]}.items():
        two = [found["about"].get(name) for found in (before, after)]
        print(
            f"{name}: {value}" if two[0] == two[1] else f"{name}: {two[0]} before, {two[1]} after"
        )
    print("\n| program | values | differ | HLO text |\n|---|---|---|---|")
    lines = []
    for name in dict.fromkeys((*before, *after)):
        if name == "about":
            continue
        two = [dict(found.get(name, {"missing": "no numbers"})) for found in (before, after)]
        text = [one.pop("text", None) for one in two]
        found = [
            *differences(two[0], two[1]),
            *(f"/failed: {one['failed']}" for one in two if "failed" in one),
        ]
        told = "" if text == [None, None] else "same" if text[0] == text[1] else "differs"
        texts = [texts[0] + bool(told), texts[1] + (told == "differs")]
        print(f"| {name} | {count_numbers(two[0])} | {len(found)} | {told} |")
        lines += [f"{name}{line}" for line in itertools.islice(found, 10)]
        same = same and not found
    print(
        f"\n{'All numbers are the same.' if same else 'DIFFERENT numbers.'} "
        f"HLO texts: {texts[1]} of {texts[0]} differ."
    )
    for line in lines:
        print(line)
    return same


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train and compile, and write the numbers")
    running.add_argument(
        "--only", nargs="*", default=[], metavar="PART", help="cases whose names contain this"
    )
    running.add_argument(
        "--folder", help="folder on a disk for swapped records; a temporary folder by default"
    )
    running.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    counting = commands.add_parser(
        "calls", help="count the Python calls of a step with all states on disk"
    )
    for each in (running, counting):
        each.add_argument("--out", required=True, metavar="FILE", type=pathlib.Path)
    comparing = commands.add_parser(
        "compare", help="compare two files; exit status 1 unless they hold the same numbers"
    )
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "compare":
        sys.exit(
            0
            if compare(*(json.loads(path.read_text()) for path in (options.before, options.after)))
            else 1
        )
    if options.command == "run":
        found = run(options.only, options.folder, options.jobs)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        failed = [name for name, one in found.items() if "failed" in one]
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    import step_calls

    found = step_calls.count_calls()
    options.out.write_text(json.dumps({"about": about()} | found, indent=1) + "\n")
    low, high = found["range"]
    print(
        f"{found['calls']:,} calls in callbacks and transfers of a step ({low:,} to {high:,}), "
        f"{found['record formats']:,} of "
        f"them sizes of records; {found['of the caller']:,} more in the caller, "
        f"and {found['of all code']:,} of all code"
    )
    for name, count in itertools.islice(found["by function"].items(), 40):
        print(f"{count:6,}  {name}")


if __name__ == "__main__":
    main()
