"""Measure checkpoints' bandwidth, the time a step is blocked, and peak host memory.

Bandwidth is compared with plain writes; Orbax's own checkpointer is measured for comparison.

    # on the disk of FOLDER, which must exist
    python benchmarks/checkpoints.py FOLDER
    python benchmarks/checkpoints.py FOLDER --save benchmarks/results/NAME.md

Each row runs in its own process, which creates a GPT's state (float32 weights and Adam's moments,
12 bytes per parameter) in some tier, saves it once while waiting and once in the background, and
restores it. The same process also writes as many bytes to the folder plainly: files of a record's
size, O_DIRECT, then synced. The ratio is taken within that process, and the table shows its median
and range over the rounds. Orbax's row has no plain writes; it uses the median of the other rows'.

Memory is the process's anonymous memory (RssAnon) beyond what it had before. While saving, this is
the copies; while restoring into memory, it is the state itself plus what the restore needs. On a
CPU, the "device" is host memory too.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "examples")]
HOST, DISK = "pinned_host", "nvme"
ROWS = {
    "on the device": {},
    "on the device, at most 64 MB of copies": {"max_host_bytes": 64 << 20},
    "in host memory": {"tier": HOST},
    "on disk, the same as the checkpoint's": {"tier": DISK},
    "on disk, another file system": {"tier": DISK, "elsewhere": True},
    "Orbax's StandardCheckpointer, on the device": {"orbax": True},
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of the GPT."""

    layers: int = 24
    hidden: int = 512


class Peak:
    """Peak anonymous memory of this process inside a `with` block, beyond what it had before."""

    def __init__(self) -> None:
        """Record the current anonymous memory in bytes."""
        self.before, self.most = anonymous_bytes(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, anonymous_bytes() - self.before)

    def __enter__(self) -> "Peak":
        """Start sampling every 2 ms."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling and take a last sample."""
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, anonymous_bytes() - self.before)


def anonymous_bytes() -> int:
    """Return this process's anonymous memory in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon entry; Linux is needed")


@contextlib.contextmanager
def timed(into: dict[str, Any], name: str) -> Iterator[None]:
    """Add the block's seconds and peak memory in bytes to `into`, under keys that start `name`."""
    with Peak() as peak:
        start = time.perf_counter()
        yield
        into[f"{name}_seconds"] = time.perf_counter() - start
    into[f"{name}_bytes"] = peak.most


def write_plainly(folder: str, num_bytes: int, record_bytes: int) -> float:
    """Write and sync files of `record_bytes` each, `num_bytes` in total, and return seconds."""
    from host_offload.device import allocate
    from host_offload.disk import sync, write_file

    buffer = allocate(record_bytes)
    buffer[:] = 7
    start = time.perf_counter()
    for number in range(max(1, num_bytes // record_bytes)):
        path = os.path.join(folder, str(number))
        write_file(path, buffer, record_bytes)
        sync(path)
    return time.perf_counter() - start


def run(name: str, size: Size, folder: str) -> dict[str, Any]:
    """Measure one row in this process and return its figures."""
    import gpt
    import jax
    import optax

    import zerojax as zj

    row: dict[str, Any] = ROWS[name]
    jax.config.update("jax_num_cpu_devices", 1)
    c = gpt.GPTConfig(vocab=256, seq=128, hidden=size.hidden, layers=size.layers, heads=8)
    fields: dict[str, Any] = {"stage": 3}
    with contextlib.ExitStack() as stack:
        if tier := row.get("tier"):
            fields |= {"params": tier, "grads": tier, "opt_state": tier}
        if tier == DISK:
            root = "/dev/shm" if row.get("elsewhere") else folder
            fields["swap_dir"] = stack.enter_context(tempfile.TemporaryDirectory(dir=root))

        def built() -> zj.Program:
            return zj.build_train_step(
                gpt.layered_gpt(c), optax.adamw(1e-3), zj.ZeroConfig(**fields), zj.make_mesh(fsdp=1)
            )

        program = stack.enter_context(built())
        state = jax.block_until_ready(program.init(jax.random.key(0)))
        state_bytes = 12 * c.num_params
        out: dict[str, Any] = {"state_bytes": state_bytes}
        target = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        if row.get("orbax"):
            return out | run_orbax(program, state, target)
        record_bytes = max(s.record_bytes for s in saved_stores(program, state, f"{target}/sizes"))
        for warm in (True, False):
            os.makedirs(plain := f"{target}/plain{warm}")
            out["plain_seconds"] = write_plainly(plain, state_bytes, record_bytes)
        out["record_bytes"] = record_bytes
        most = row.get("max_host_bytes")
        with (
            zj.Checkpointer(f"{target}/sync", is_async=False, max_host_bytes=most) as ckpt,
            timed(out, "sync"),
        ):
            ckpt.save(program, state)
        with zj.Checkpointer(f"{target}/async", max_host_bytes=most) as ckpt:
            with timed(out, "async"):
                start = time.perf_counter()
                ckpt.save(program, state)
                out["blocked_seconds"] = time.perf_counter() - start
                ckpt.wait()
            del state
            program.close()
            again = stack.enter_context(built())
            with timed(out, "restore"):
                restored = ckpt.restore(again)
            assert int(restored.step) == 0
    return out


def saved_stores(program: Any, state: Any, folder: str) -> Any:
    """Save a state into `folder` and return the descriptions of the checkpoint's stores."""
    from zerojax.checkpoint import SavedState, begin_save

    os.makedirs(folder)
    begin_save(program, state, folder).finish()
    with SavedState(folder) as saved:
        return saved.records.stores


def run_orbax(program: Any, state: Any, target: str) -> dict[str, Any]:
    """Save and restore the same arrays with Orbax alone, and return the figures."""
    import jax
    import orbax.checkpoint as ocp

    tree = {"params": state.params, "opt_state": jax.tree.leaves(state.opt_state)}
    out: dict[str, Any] = {}
    with ocp.StandardCheckpointer() as ckpt:
        for warm in (True, False):
            path = f"{target}/sync{warm}"
            with timed(out, "sync"):
                ckpt.save(path, tree)
                ckpt.wait_until_finished()
        with timed(out, "async"):
            start = time.perf_counter()
            ckpt.save(f"{target}/async", tree)
            out["blocked_seconds"] = time.perf_counter() - start
            ckpt.wait_until_finished()
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree
        )
        del tree
        jax.tree.map(lambda a: a.delete(), state)
        with timed(out, "restore"):
            jax.block_until_ready(ckpt.restore(f"{target}/async", abstract))
    return out


def measure(name: str, size: Size, folder: str) -> dict[str, Any]:
    """Measure one row in a new process."""
    command = [
        sys.executable,
        __file__,
        folder,
        "--row",
        name,
        "--layers",
        str(size.layers),
        "--hidden",
        str(size.hidden),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rounds: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of the table."""

    def of(found: list[float], form: str) -> str:
        middle = statistics.median(found)
        return (
            f"{middle:{form}} ({min(found):{form}} to {max(found):{form}})"
            if len(found) > 1
            else f"{middle:{form}}"
        )

    plain = [r["plain_seconds"] for runs in rounds.values() for r in runs if "plain_seconds" in r]
    lines = [
        "| state | save GB/s | over plain writes | blocked s, waiting | blocked s, async "
        "| saving: MB of copies | "
        "restore s | restoring: MB beyond the state |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in rounds.items():
        rate = [r["state_bytes"] / r["sync_seconds"] / 1e9 for r in runs]
        over = [r.get("plain_seconds", statistics.median(plain)) / r["sync_seconds"] for r in runs]
        held = 0 if ROWS[name].get("tier") == DISK else runs[0]["state_bytes"]
        beyond = [(r["restore_bytes"] - held) / 1e6 for r in runs]
        lines.append(
            f"| {name} | {of(rate, '.2f')} | {of(over, '.2f')} "
            f"| {of([r['sync_seconds'] for r in runs], '.2f')} | "
            f"{of([r['blocked_seconds'] for r in runs], '.3f')} "
            f"| {of([r['async_bytes'] / 1e6 for r in runs], '.0f')} | "
            f"{of([r['restore_seconds'] for r in runs], '.2f')} | {of(beyond, '.0f')} |"
        )
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="folder on the disk to measure")
    parser.add_argument(
        "--row", choices=list(ROWS), help="measure this row in this process and print JSON"
    )
    parser.add_argument("--layers", type=int, default=Size.layers)
    parser.add_argument("--hidden", type=int, default=Size.hidden)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=pathlib.Path, help="file for the table")
    args = parser.parse_args()
    if not os.path.isdir(args.folder):
        parser.error(f"{args.folder} is not a folder; give an existing one")
    size = Size(args.layers, args.hidden)
    if args.row:
        print(json.dumps(run(args.row, size, args.folder)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for _ in range(args.rounds):
        for name, found in rounds.items():
            found.append(measure(name, size, args.folder))
    first = rounds["on the device"][0]
    import jax
    import orbax.checkpoint as ocp

    lines = [
        "# Checkpoints",
        "",
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores; "
        f"jax {jax.__version__}, "
        f"orbax-checkpoint {ocp.__version__}. "
        f"`python benchmarks/checkpoints.py FOLDER --layers {size.layers} --hidden "
        f"{size.hidden} --rounds {args.rounds}`",
        "",
        f"A GPT of {size.layers} layers, hidden {size.hidden}: "
        f"{first['state_bytes'] / 1e6:.0f} MB of weights and moments, "
        f"records of at most {first['record_bytes'] / 1e6:.1f} MB. "
        "Medians, and ranges over the rounds.",
        "",
        *table(rounds),
    ]
    print("\n".join(lines))
    if args.save is not None:
        args.save.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
