"""Compare streamed steps with the resident step in every combination of settings.

The settings are tiers, schedules, updates and activations.

    # hours on one core; --minutes cuts it short
    python benchmarks/equivalence.py --save benchmarks/results/NAME.md
    python benchmarks/equivalence.py --where gather_ahead=False --jobs 2
    # the cases that store something on disk
    python benchmarks/equivalence.py --disk --where prefetch_distance=1

The cases are listed in tests/helpers/matrix.py and run 10 steps each on 4 simulated devices. A
fixed seed shuffles their order, so a run that is cut short has covered an even sample, and the
table shows how many. For each value of each axis, the table shows the largest differences.
"""

import argparse
import concurrent.futures
import datetime
import os
import pathlib
import platform
import random
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "examples")]

SWAP_DIR = "ZEROJAX_EQUIVALENCE_SWAP_DIR"  # environment variable of a worker
Case = dict[str, Any]
# case; loss difference in ulp, parameter difference over a leaf's largest, and the bounds of both
Found = tuple[Case, float, float, float, float]


def start(folder: str | None = None) -> None:
    """Prepare a process; a worker gets its own swap folder in `folder`."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    if folder is not None:
        # The disk is probed once per worker.
        os.environ[SWAP_DIR] = os.path.join(folder, str(os.getpid()))
        os.mkdir(os.environ[SWAP_DIR])


def run(case: Case) -> Found:
    """Train one case and return its differences and bounds."""
    import matrix

    return case, *matrix.differences(case, os.environ[SWAP_DIR]), *matrix.bounds(case)


def name_of(value: Any) -> str:
    """Return a value's name, as used in the table and on the command line."""
    return ", on ".join(value) if isinstance(value, tuple) else str(value)


def select(cases: list[Case], where: list[str]) -> list[Case]:
    """Return the cases with the values that `where` lists as AXIS=VALUE.

    Raises:
      ValueError: an axis or a value is unknown, or no case has all of the values.
    """
    for pair in where:
        axis, equals, value = pair.partition("=")
        axes = list(cases[0])
        if not equals or axis not in axes:
            raise ValueError(f"--where {pair}: give AXIS=VALUE; the axes are {', '.join(axes)}")
        values = dict.fromkeys(name_of(case[axis]) for case in cases)
        chosen = [case for case in cases if name_of(case[axis]) == value]
        if not chosen:
            raise ValueError(
                f"--where {pair}: no case has this value; with the values before it, {axis} is "
                f"one of: {'; '.join(values)}"
            )
        cases = chosen
    return cases


def table(found: list[Found], total: int, command: str, seconds: float) -> str:
    """Return the table in Markdown."""
    import jax
    from contenders import cpu_name

    within = sum(
        ulps <= most_ulps and part <= most_part for _, ulps, part, most_ulps, most_part in found
    )
    lines = [
        f"# Streamed against resident, {datetime.date.today():%Y-%m}",
        "",
        f"{len(found)} of {total} cases were run, 10 steps each on 4 simulated devices; "
        f"{within} are within their "
        "bounds: with the update on the device 2 units in the last place of a loss and "
        "1e-6 of a leaf's largest parameter, on "
        "the host 1e-5 of both.",
        f"Hardware: {os.cpu_count()} cores of {cpu_name()}. "
        f"jax {jax.__version__}, Python {platform.python_version()}. "
        f"Command: `{command}`; {seconds / 60:.0f} min.",
        "",
        "| axis | value | cases | largest loss difference, ulp | largest parameter difference "
        "| within bounds |",
        "|---|---|---|---|---|---|",
    ]
    for axis in found[0][0]:
        for value in dict.fromkeys(case[axis] for case, *_ in found):
            rows = [entry for entry in found if entry[0][axis] == value]
            good = sum(u <= mu and p <= mp for _, u, p, mu, mp in rows)
            name = name_of(value)
            ulps, part = max(r[1] for r in rows), max(r[2] for r in rows)
            lines.append(f"| {axis} | {name} | {len(rows)} | {ulps:.1f} | {part:.1e} | {good} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--where", nargs="*", default=[], metavar="AXIS=VALUE", help="only cases with these values"
    )
    parser.add_argument(
        "--disk",
        action="store_true",
        help="only cases that store something on disk",
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=0,
        metavar="N",
        help="leave out the first N cases, which another run has covered",
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no case after this time"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--save", help="file for the table")
    options = parser.parse_args()
    start()
    import matrix

    cases = [
        case
        for case in matrix.every_case(options.disk)
        if not options.disk or matrix.DISK in case.values()
    ]
    try:
        cases = select(cases, options.where)
    except ValueError as error:
        parser.error(str(error))
    random.Random(0).shuffle(cases)
    if not 0 <= options.skip < len(cases):
        parser.error(f"--skip {options.skip}: there are {len(cases)} cases")
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: a number above 0 is needed")
    cases = cases[options.skip :]
    found: list[Found] = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            options.jobs, initializer=start, initargs=(folder,), max_tasks_per_child=40
        ) as pool,
    ):
        waiting, rest = set(), iter(cases)
        while True:
            while (
                len(waiting) < 2 * options.jobs and time.monotonic() - began < 60 * options.minutes
            ):
                if (case := next(rest, None)) is None:
                    break
                waiting.add(pool.submit(run, case))
            if not waiting:
                break
            done, waiting = concurrent.futures.wait(
                waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                case, ulps, part, most_ulps, most_part = entry = future.result()
                found.append(entry)
                if ulps > most_ulps or part > most_part:
                    print(f"beyond its bound: {case}: {ulps} ulp, {part}", flush=True)
            if len(found) % 50 < len(done):
                print(f"{len(found)} of {len(cases)}", file=sys.stderr, flush=True)
    text = table(
        found,
        len(cases),
        " ".join(["python benchmarks/equivalence.py", *sys.argv[1:]]),
        time.monotonic() - began,
    )
    print(text)
    if options.save:
        pathlib.Path(options.save).write_text(text)
    sys.exit(1 if any(u > mu or p > mp for _, u, p, mu, mp in found) else 0)


if __name__ == "__main__":
    main()
