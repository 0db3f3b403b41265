"""Check on a GPU what tests on a CPU cannot show.

That is: correct records, the link's speed, idle time, equal numbers, and peak memory.

    # list the parts, their checks, and the seconds that each needs
    python benchmarks/gpu_check.py --list
    # one part, at most 8 minutes on one H200
    python benchmarks/gpu_check.py --part first --out results
    # one table of all parts that were run
    python benchmarks/gpu_check.py --join results --save benchmarks/results/NAME.md
    # every part with tiny sizes, on any machine
    python benchmarks/gpu_check.py --small
    # compile only, without a GPU
    python benchmarks/gpu_check.py --compile-only --chip h100

Parts run separately, on one machine or on several, and are joined later. Each part appends to
`PART.jsonl` in --out as its checks produce results, so a run that is cut off keeps what it found. A
part enforces its own time limit. A check with fewer seconds left than it needs runs in its short
form: at most 8 layers in a step, and no profile. Other checks keep what they found when their time
runs out. A check is listed as not run only if there is no time to start it. If a check crashes or
hangs, only that check and its process are lost. A check that lacks a package or a device reports
so and does not fail.

Steps have as many layers as fit into device and host memory; a row reports any reduction. Each
process pins as much host memory as its programs keep there, and never more than
XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB in the environment. The machine's rates are measured once and
stored in `rates.json` in --out, where later parts read them.

    first             records by both forms of index, copies alone and during products, both ways
                      at the same time, a short streamed step
    groups            8 layers of that step, with records that cross the link in 2, 4, 6 and 10
                      groups (`ZeroConfig.link_groups`)
    steps-*           a Llama of 6.7 B: 16K and 32K tokens, with its states in a mode; seconds, idle
                      share, bytes over the link by copies and by kernels, peak memory, a profile
                      stored as a file, and the prediction of `hlo.simulate`
    disks             3.9 B with everything on the host, on a RAM disk and on a disk
    kernels           each op of pallas_kernels compared with XLA's
    sweep             the fastest sizes of matmul's kernel, compared with XLA's form and JAX's own
                      kernel
    peers             FSDP2 and DeepSpeed with their states on the host and the same attention,
                      compared with zerojax
    equality*, nvme   steps with mixes of tiers against the resident step: losses, parameters
    memory, mixes     peak device memory over `program.memory`; mixes of tiers interleaved with the
                      resident step

`gpu_checks` holds the checks. The seconds in `Needs` were measured on an H200 for the checks that
have run on one (`benchmarks/results/gpu_check_h200_202611.md`), and are assumed for the rest.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from contenders import cpu_name
from gpu_checks import equality, joined, kernels, memory, speed, swap
from gpu_checks.compiled import compile_rows
from gpu_checks.jobs import Job, platform_name
from gpu_checks.link import copies, rates, slices
from gpu_checks.machine import GIB, SHARE, Machine, check_machine, described, look
from gpu_checks.mixes import GPU, SMALL, LlamaSizes, Sizes
from gpu_checks.parts import TIME_LIMIT, Check, Context, Group, Needs, Part, seconds_of
from gpu_checks.rows import Row
from gpu_checks.runner import RATES, Run, pipes, serve
from gpu_checks.steps import disks, llamas, peers
from gpu_checks.steps.needs import pinned_bytes

HOST_VARIABLE = "ZEROJAX_HOST_MEMORY_GB"

ALL_MEMORY: Mapping[str, str] = MappingProxyType({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})
"""Environment of a process that takes device memory in one piece, as a training run does."""
MOST_MEMORY: Mapping[str, str] = MappingProxyType(
    {**ALL_MEMORY, "XLA_PYTHON_CLIENT_MEM_FRACTION": str(SHARE)}
)
"""Environment of a process that takes SHARE of device memory in one piece."""


def of_jobs(
    name: str,
    run: Callable[[Sizes], Iterator[Row]],
    jobs: Callable[[Sizes], list[Job]],
    needs: Needs,
) -> Check:
    """Return a check that runs or compiles the programs of `Job`s.

    Args:
      name: name of the check.
      run: returns the check's rows for given sizes.
      jobs: returns the jobs whose programs --compile-only compiles.
      needs: seconds that the check needs.
    """

    def compiled(context: Context) -> Iterator[Row]:
        return compile_rows(name, jobs(context.sizes), context)

    def pinned(sizes: Sizes) -> int:
        return max((job.state_bytes for job in jobs(sizes)), default=0)

    return Check(
        name=name,
        run=lambda context: run(context.sizes),
        compiled=compiled,
        needs=needs,
        pinned=pinned,
    )


def equal(precision: str, needs: Needs) -> Check:
    """Return the check that compares every mix with the resident step in one precision."""
    jobs = functools.partial(equality.equal_jobs, precision)
    return of_jobs(precision, lambda sizes: equality.compare_jobs(jobs(sizes)), jobs, needs)


def kernel(kind: str, needs: Needs) -> Check:
    """Return the check of one kind of kernel."""
    return of_jobs(kind, functools.partial(kernels.check_kernels, kind), lambda _: [], needs)


def measured_rates() -> Check:
    """Return the check that measures the machine's rates for a part's other checks."""
    return Check(
        name="rates",
        run=rates.check_rates,
        compiled=None,
        needs=Needs(gpu=15, compiled=10, small=12),
        pinned=lambda sizes: 2 * sizes.link_bytes,
        measures=True,
    )


def host_kernel() -> Check:
    """Return the check that times the host's AdamW kernel."""
    needs = Needs(gpu=10, compiled=10, small=12)
    return Check(
        name="host kernel", run=rates.check_host_kernel, compiled=None, needs=needs, measures=True
    )


def copied(way: str) -> Check:
    """Return the check of copies in one direction, or in both at the same time."""
    needs = Needs(gpu=30, compiled=20, small=15)

    def pinned(sizes: Sizes) -> int:
        # XLA's pool grows by pieces of power-of-two sizes, and each stack needs a piece that holds
        # it.
        stack_bytes = 4 * math.prod(sizes.copied.shape)
        piece_bytes = 1 << (stack_bytes - 1).bit_length()
        return 2 * piece_bytes

    return Check(
        name=f"copies {way}",
        run=copies.check_copies(way),
        compiled=copies.compile_copies(way),
        needs=needs,
        pinned=pinned,
        shares="stacks",
    )


def stepped(
    name: str,
    mode: str,
    needs: Needs,
    which: int = 0,
    short: bool = False,
    groups: int | None = None,
    graphs: bool = False,
) -> Check:
    """Return the check of a step in one mode, at the first or the second number of tokens.

    Args:
      name: name of the check.
      mode: key of `llama.MODES`.
      needs: seconds that the check needs.
      which: index of the number of tokens, 0 or 1.
      short: whether to use the short model of 8 layers.
      groups: `link_groups` of the config.
      graphs: `cuda_graphs` of the config.
    """

    def of(sizes: Sizes) -> LlamaSizes:
        return sizes.short if short else sizes.llama

    def case(context: Context) -> llamas.Case:
        sizes = of(context.sizes)
        is_largest = which == 1 and not short
        return llamas.Case(
            mode=mode,
            sizes=sizes,
            tokens=sizes.tokens[which],
            is_largest=is_largest,
            link_groups=groups,
            cuda_graphs=graphs,
        )

    return Check(
        name=name,
        run=llamas.check_step(case),
        compiled=llamas.compile_step(case),
        needs=needs,
        pinned=lambda sizes: pinned_bytes(mode, of(sizes)),
        shares="states",
    )


def steps_part(
    name: str, mode: str, what: str, seconds: tuple[float, float], first: tuple[Check, ...] = ()
) -> Part:
    """Return the part of one mode: the machine's rates, then a step of each number of tokens.

    The same program runs both numbers of tokens, the smaller first.

    Args:
      name: name of the part after "steps-".
      mode: key of `llama.MODES`.
      what: description of the mode for the list of parts.
      seconds: seconds that the check of each number of tokens needs.
      first: checks that run before the steps.
    """
    both = tuple(
        stepped(f"{tokens} tokens", mode, Needs(gpu=need, compiled=60, small=30), which)
        for which, (tokens, need) in enumerate(zip(("16K", "32K"), seconds, strict=True))
    )
    what = f"a Llama of 6.7 B, {what}: a step of 16K and of 32K tokens"
    groups = (Group(checks=(measured_rates(),)), *(Group(checks=(check,)) for check in first))
    return Part(
        name=f"steps-{name}", what=what, groups=(*groups, Group(checks=both, env=MOST_MEMORY))
    )


def disk(name: str, where: str, seconds: float) -> Check:
    """Return the check of steps with the states in one place, a key of `disks.MODES`."""
    needs = Needs(gpu=seconds, compiled=60, small=30)
    # A disk and a RAM disk run the same program, so it is compiled only once.
    compiled = None if where == disks.RAM else llamas.compile_step(disks.compiled_case(where))
    return Check(
        name=name,
        run=disks.check_disk(where),
        compiled=compiled,
        needs=needs,
        pinned=lambda sizes: pinned_bytes(disks.MODES[where], sizes.on_disk),
    )


def peer(name: str, seconds: float) -> Check:
    """Return the check of another framework's contender."""
    return Check(
        name=name,
        run=peers.check_peer(name),
        compiled=None,
        needs=Needs(gpu=seconds, compiled=10, small=30),
    )


def ours(name: str) -> Check:
    """Return the check of one of zerojax's contenders."""

    def compiled(context: Context) -> Iterator[Row]:
        return compile_rows(
            "speed", [job for job in peers.our_jobs(context) if job.name == name], context
        )

    def pinned(sizes: Sizes) -> int:
        return Job(name=name, problem=sizes.peer, fields=peers.OURS[name]).state_bytes

    needs = Needs(gpu=70, compiled=90, small=60)
    return Check(
        name=name, run=peers.check_ours(name), compiled=compiled, needs=needs, pinned=pinned
    )


def alone(*checks: Check, env: Mapping[str, str] = MappingProxyType({})) -> tuple[Group, ...]:
    """Return one group per check, so that each check runs in its own process."""
    return tuple(Group(checks=(check,), env=env) for check in checks)


FORMS = of_jobs("slices", slices.check_slices, lambda _: [], Needs(gpu=10, compiled=25, small=25))
MACHINE = Check(
    name="machine", run=check_machine, compiled=None, needs=Needs(gpu=10, compiled=10, small=10)
)
SHORT = Needs(gpu=50, compiled=60, small=30)
PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        Part(
            name="first",
            what="the machine; records by both forms of index, copies alone and during products, "
            "a short streamed step",
            groups=(
                # This share of device memory is the limit that the check reports.
                *alone(MACHINE, env={"XLA_PYTHON_CLIENT_MEM_FRACTION": str(SHARE)}),
                Group(checks=(FORMS, measured_rates(), *(copied(way) for way in copies.WAYS))),
                Group(checks=(host_kernel(),)),
                Group(
                    checks=(
                        stepped("8 layers, resident", "resident", SHORT, short=True),
                        stepped("8 layers, opt_state", "opt_state on the host", SHORT, short=True),
                    ),
                    env=MOST_MEMORY,
                ),
                *alone(
                    stepped(
                        "8 layers, CUDA graphs",
                        "opt_state on the host",
                        SHORT,
                        short=True,
                        graphs=True,
                    ),
                    env=MOST_MEMORY,
                ),
            ),
        ),
        Part(
            name="equality",
            what="10 steps with every mix of tiers against the resident step: losses, parameters, "
            "gradients",
            groups=alone(
                FORMS,
                equal("fp32", Needs(gpu=300, compiled=150, small=60)),
                of_jobs(
                    "activations",
                    lambda sizes: equality.compare_jobs(equality.activation_jobs(sizes)),
                    equality.activation_jobs,
                    Needs(gpu=50, compiled=60, small=60),
                ),
            ),
        ),
        steps_part("opt_state", "opt_state on the host", "opt_state in host memory", (110, 60)),
        steps_part(
            "host",
            "opt_state on the host, update_on host",
            'update_on="host"',
            (180, 100),
            (host_kernel(),),
        ),
        Part(
            name="nvme",
            what="10 steps with mixes on disk against the resident step; the disk's speed; "
            "time and stall of these steps",
            groups=alone(
                of_jobs(
                    "nvme", swap.check_swap, swap.swap_jobs, Needs(gpu=300, compiled=130, small=150)
                )
            ),
        ),
        Part(
            name="peers",
            what="FSDP2 and DeepSpeed with their states on the host and the same attention, "
            "compared with zerojax",
            groups=alone(
                ours(peers.ON_HOST),
                ours(peers.ON_DEVICE),
                peer("FSDP2", 110),
                peer("DeepSpeed", 150),
            ),
        ),
        steps_part(
            "all",
            "params, grads, opt_state on the host",
            "params, grads and opt_state in host memory",
            (180, 100),
        ),
        Part(
            name="kernels",
            what="each op of pallas_kernels compared with XLA's: error against float64, time, "
            "share of the measured peak",
            groups=alone(
                kernel("matmul", Needs(gpu=120, compiled=40)),
                kernel("linear_cross_entropy", Needs(gpu=60, compiled=30)),
                kernel("quantize", Needs(gpu=60, compiled=30)),
                kernel("nf4", Needs(gpu=60, compiled=30)),
            ),
        ),
        Part(
            name="sweep",
            what="the fastest sizes of matmul's kernel, compared with XLA's form and JAX's own "
            "kernel; a table keeps the winners",
            groups=alone(
                Check(
                    name="sweep",
                    run=kernels.check_sweep,
                    compiled=None,
                    needs=Needs(gpu=420, compiled=10),
                )
            ),
        ),
        Part(
            name="disks",
            what="3.9 B with everything on the host, on a RAM disk and on a disk: the time that "
            "the engine adds, and the disk",
            groups=alone(
                disk("host", disks.HOST, 110),
                disk("RAM disk", disks.RAM, 140),
                disk("disk", disks.DISK, 200),
                env=MOST_MEMORY,
            ),
        ),
        Part(
            name="memory",
            what="peak device memory over program.memory and over the compiler's own count; "
            "a process for each mix",
            groups=alone(
                of_jobs(
                    "memory",
                    memory.check_memory,
                    memory.memory_jobs,
                    Needs(gpu=120, compiled=60, small=60),
                )
            ),
        ),
        Part(
            name="equality-more",
            what="the same in bf16, and with MLPs whose tiles are records",
            groups=alone(
                of_jobs(
                    "tiles",
                    lambda sizes: equality.compare_jobs(equality.tile_jobs(sizes)),
                    equality.tile_jobs,
                    Needs(gpu=90, compiled=190, small=60),
                ),
                equal("bf16", Needs(gpu=90, compiled=160, small=60)),
            ),
        ),
        Part(
            name="groups",
            what="8 layers with opt_state in host memory, with records that cross the link in "
            "2, 4, 6 and 10 groups",
            groups=(
                Group(checks=(measured_rates(),)),
                *alone(
                    *(
                        stepped(f"{n} groups", "opt_state on the host", SHORT, short=True, groups=n)
                        for n in (2, 4, 6, 10)
                    ),
                    env=MOST_MEMORY,
                ),
            ),
        ),
        steps_part(
            "delayed",
            "the same, delayed_update",
            'update_on="host" and delayed_update',
            (180, 100),
            (host_kernel(),),
        ),
        steps_part("resident", "resident", "its states on the device", (130, 90)),
        Part(
            name="mixes",
            what="step time of each mix of tiers over the resident step, interleaved; "
            "share of its transfers that is hidden",
            groups=alone(
                of_jobs(
                    "speed",
                    speed.check_speed,
                    speed.speed_jobs,
                    Needs(gpu=300, compiled=120, small=60),
                ),
                env=ALL_MEMORY,
            ),
        ),
    )
}
"""Parts by name, most decisive first."""


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes that the options select."""
    return SMALL if options.small else GPU


def facts(sizes: Sizes, chip: str | None) -> dict[str, Any]:
    """Return hardware, versions and sizes; `chip` is the compilation target, or None for a run."""
    import jax

    device = jax.devices()[0]
    kind = (
        device.device_kind
        if chip is None
        else f"{chip}, which is not there, compiled for on {device.device_kind}"
    )
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "numba"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if platform_name() == "gpu" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = (
            subprocess.run(query, capture_output=True, text=True, check=False)
            .stdout.split("\n")[0]
            .strip()
        )
        versions |= {"driver": told} if told else {}
    return {
        "hardware": f"{kind}, {os.cpu_count()} cores of {cpu_name()}",
        "platform": " ".join(device.client.platform_version.split()),
        "versions": versions,
        "sizes": dataclasses.asdict(sizes),
    }


def work(options: argparse.Namespace) -> None:
    """Run the checks of one group on request, as a worker."""
    read, send = pipes()
    part, index = options.worker
    sizes = sizes_of(options)
    told = json.loads(options.machine)
    context = Context(
        sizes=sizes,
        peer_python=options.peer_python,
        keep=pathlib.Path(options.out),
        swap_dir=options.swap_dir,
        ram_dir=options.ram_dir,
        part=part,
        chip=told["chip"],
        device_bytes=told["device_bytes"],
        host_bytes=told["host_bytes"],
    )
    checks = PARTS[part].groups[int(index)].checks
    serve(
        checks,
        context,
        options.compile_only,
        lambda: facts(sizes, context.chip if options.compile_only else None),
        read,
        send,
    )


def parse() -> argparse.Namespace:
    """Return the parsed and validated options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--part",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        metavar="PART",
        help="run these parts",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", help="run only these checks of the parts"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and their checks")
    parser.add_argument(
        "--join",
        metavar="DIR",
        help="make one table of the results in this folder and below; run nothing",
    )
    parser.add_argument(
        "--fits",
        action="store_true",
        help="with --join: show only the memory that the programs of --compile-only take",
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes and few mixes")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile every program for a GPU that is not there",
    )
    parser.add_argument(
        "--chip", choices=("h100", "h200"), help="target of --compile-only; h200 by default"
    )
    parser.add_argument(
        "--host-memory",
        type=float,
        metavar="GIB",
        help="host memory, if the system reports less than there will be: a virtual machine's "
        "memory may grow as it is taken; 128 by default with --compile-only",
    )
    parser.add_argument(
        "--measure-again", action="store_true", help="measure rates again that --out holds"
    )
    parser.add_argument(
        "--peer-python", help="Python of an environment with torch; this one if it has torch"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=TIME_LIMIT,
        help=f"seconds for a part; {TIME_LIMIT:g} by default",
    )
    parser.add_argument("--out", help="folder for the results; a temporary folder by default")
    parser.add_argument("--save", help="file for the table")
    parser.add_argument(
        "--swap-dir",
        default=tempfile.gettempdir(),
        help="folder on a disk, for records stored on disk",
    )
    parser.add_argument("--ram-dir", default="/dev/shm", help="folder on a RAM disk")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--machine", help=argparse.SUPPRESS)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = {check.name for part in options.part for check in PARTS[part].checks}
    if options.only and (unknown := set(options.only) - names):
        parser.error(
            f"--only {', '.join(sorted(unknown))}: these parts have the checks "
            f"{', '.join(sorted(names))}"
        )
    if not 0 < options.limit < math.inf:
        parser.error(f"--limit {options.limit:g}: a positive number of seconds is needed")
    if options.host_memory is not None and not 1 <= options.host_memory < math.inf:
        parser.error(f"--host-memory {options.host_memory:g}: at least 1 GiB is needed")
    if options.fits and not options.join:
        parser.error("--fits applies to joined results; give --join, too")
    if options.chip is not None and not options.compile_only:
        parser.error(
            "--chip names the GPU to compile for; give --compile-only, too. "
            "A run uses the GPU of this machine"
        )
    # With a missing folder, the table would show another disk's figures.
    for name in ("join", "swap_dir", "ram_dir"):
        folder, default = getattr(options, name), parser.get_default(name)
        if folder not in (None, default) and not pathlib.Path(folder).is_dir():
            parser.error(f"--{name.replace('_', '-')} {folder}: no such folder")
    return options


def found_machine(options: argparse.Namespace) -> Machine:
    """Return the machine that the parts are fitted to."""
    host_memory = None if options.host_memory is None else int(options.host_memory * GIB)
    if options.host_memory is not None:
        os.environ[HOST_VARIABLE] = f"{options.host_memory:g}"  # the programs check it themselves
    if options.compile_only:
        return described(options.chip or "h200", host_memory)
    machine = look(host_memory)
    if machine.platform == "cpu" and not options.small:
        why = (
            "JAX finds no GPU here: give --small for tiny sizes on any machine, "
            "or --compile-only to compile without a GPU"
        )
        print(f"gpu_check.py: error: {why}", file=sys.stderr)
        sys.exit(2)
    return machine


def pool_of(group: Group, sizes: Sizes, machine: Machine) -> int:
    """Return the limit in GiB of the pinned-memory pool of a group's process.

    Memory that checks share (the states of steps, the stacks of copies) is counted once.
    """
    pinned = dict[str, int]()
    for check in group.checks:
        shared = check.shares or check.name
        pinned[shared] = max(pinned.get(shared, 0), check.pinned(sizes))
    return machine.pool(sum(pinned.values()))


def listed(mode: str) -> str:
    """Return a list of the parts, their checks, and the seconds that each needs, as text."""
    lines = []
    for part in PARTS.values():
        needs = [seconds_of(check.needs, mode) for check in part.checks]
        lines.append(f"{part.name} ({sum(needs):.0f} s): {part.what}")
        lines += [
            f"    {check.name} ({seconds:.0f} s)"
            for check, seconds in zip(part.checks, needs, strict=True)
        ]
    return "\n".join(lines)


def run_parts(options: argparse.Namespace, mode: str, out: pathlib.Path, machine: Machine) -> None:
    """Run the selected parts one after another."""
    from zerojax.chips import find_chip

    sizes, chip = sizes_of(options), find_chip(machine.device_kind)
    told_machine = {
        "chip": "h200" if chip is None else chip.name,
        "device_bytes": machine.device_bytes,
        "host_bytes": machine.host_bytes,
    }
    is_run = not options.compile_only
    places = {
        options.peer_python: "PEER/bin/python",
        options.out: "RESULTS",
        options.swap_dir: "DISK",
        options.ram_dir: "RAM_DISK",
    }
    words = [places.get(word, word) for word in sys.argv[1:]]  # tables show no paths of a machine
    own = [sys.executable, str(pathlib.Path(__file__).resolve())]
    own += [
        f"--{name}"
        for name in ("small", "compile-only")
        if getattr(options, name.replace("-", "_"))
    ]
    own += ["--peer-python", options.peer_python] if options.peer_python else []
    own += ["--machine", json.dumps(told_machine)]
    if options.measure_again:
        (out / RATES).unlink(missing_ok=True)
    for name in options.part:
        with contextlib.ExitStack() as stack:
            # These folders end with the part at the latest, with whatever a killed check left.
            folders = {
                option: stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="gpu_check_", dir=base)
                )
                for option, base in (
                    ("--swap-dir", options.swap_dir),
                    ("--ram-dir", options.ram_dir),
                )
                if pathlib.Path(base).is_dir()
            }
            command = [
                *own,
                "--out",
                str(out),
                *(word for pair in folders.items() for word in pair),
                "--worker",
            ]
            told = shlex.join(["python", "benchmarks/gpu_check.py", *words])
            run = Run(
                part=PARTS[name],
                only=options.only,
                mode=mode,
                limit=options.limit,
                out=out,
                command=command,
                told=told,
                pool=(lambda group: pool_of(group, sizes, machine))
                if is_run and machine.platform == "gpu"
                else None,
                key=f"{machine.key}{', tiny sizes' * options.small}" if is_run else None,
            )
            run(folders=[pathlib.Path(folder) for folder in folders.values()])


def main() -> None:
    """Run the parts, then print and save their table.

    The exit status is 1 if a bound does not hold or a check has no result.
    """
    options = parse()
    if options.worker:
        work(options)
        return
    if options.peak:
        job = next(job for job in memory.memory_jobs(sizes_of(options)) if job.name == options.peak)
        print("RESULT " + json.dumps(memory.peak_of(job)))
        return
    mode = "small " * options.small + ("compile-only" if options.compile_only else "run")
    if options.list:
        print(listed(mode))
        return
    out = pathlib.Path(options.join or options.out or tempfile.mkdtemp(prefix="gpu_check_"))
    if not options.join:
        machine = found_machine(options)
        # A normal exit ends the workers and removes their folders.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        out.mkdir(parents=True, exist_ok=True)
        run_parts(options, mode, out.resolve(), machine)
    try:
        all_runs = joined.read_runs(out)
        runs = joined.latest(all_runs)
    except ValueError as error:
        sys.exit(f"gpu_check.py: {error}")
    try:
        text = (
            joined.fits(all_runs, list(PARTS)) if options.fits else joined.table(runs, list(PARTS))
        )
    except ValueError as error:
        sys.exit(f"gpu_check.py: {error}")
    print(f"\n{text}")
    if options.save:
        pathlib.Path(options.save).write_text(text)
    if not options.join:
        print(f"results in {out}")
    sys.exit(0 if joined.holds(runs) else 1)


if __name__ == "__main__":
    main()
