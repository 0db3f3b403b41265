"""Save, restore, train, import and export while system calls fail, and check every outcome.

    LD_PRELOAD=shim.so python runs.py shim.so FOLDER TOYS FIRST_SEED SECONDS RUNS OUT

A run is one operation under one plan of faults. Runs are grouped in episodes: an episode is a
training run with a directory of checkpoints of steps 1 and 2 (`episode.py`). Its toy
(`trained.py`), its settings, its operations and their faults follow from its seed. After each
operation the faults stop, and these outcomes are checked:

    wrong number    results returned without an error (state, loss, weights, files) equal the
                    results without faults, bit for bit
    lost            each saved step is complete, bit for bit; the newest is at least the newest
                    step whose save was confirmed; as many steps exist as are to be kept; a reader
                    skipped a step only because of damage
    bare error      the raised error is a CheckpointError or a SwapError, and threads end without
                    an error
    stuck           the state or the directory cannot be used any more: the same save, or a save
                    of the next step, fails without faults; or a file is left that nothing removes
    hang            an operation and its checks end within 30 s; otherwise all stacks are printed
                    and the process ends

OUT is a JSON of the findings, each with the seed of its episode.
"""

import contextlib
import faulthandler
import json
import os
import pathlib
import shutil
import sys
import time
import traceback
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)

import shim
from episode import Episode
from open_files import descriptors
from trained import Found, Toy

import zerojax.runtime.swap
from host_offload.disk import tuning

RUNS_OF_EPISODE = 6


def frames(error: BaseException | None) -> list[str]:
    """Return the innermost frames of an error and of its causes."""
    lines = []
    while error is not None:
        stack = traceback.extract_tb(error.__traceback__)[-7:]
        lines.append(f"{type(error).__name__}: {str(error)[:300]}")
        lines += [
            f"  {os.sep.join(f.filename.split(os.sep)[-3:])}:{f.lineno} {f.name}: {f.line}"
            for f in stack
        ]
        error = error.__cause__ or error.__context__
    return lines


def main(
    library: str, folder: str, names: str, first: int, seconds: float, runs: int, out: str
) -> None:
    """Run episodes for the seeds from `first` on, up to a number of runs or a time limit."""
    zerojax.runtime.swap.tune = lambda _: tuning.DEFAULT  # a probe takes a second
    root, began = pathlib.Path(folder), time.monotonic()
    faults = shim.Faults(library, root)
    log = (root.parent / f"{root.name}.last").open("w")

    def told(seed: int, text: str) -> None:
        log.seek(0)
        log.truncate()
        log.write(f"seed {seed}: {text}\n")
        log.flush()

    made = {}
    for name in names.split(","):
        made[name] = Toy(name, root)
        Episode(
            made[name], faults, made[name].root / "rehearsal", 0, lambda text: told(-1, text)
        ).rehearse()
    found, counts, seed, ran, hit, slowest = [], {}, first, 0, 0, (0.0, "")
    before = descriptors()
    start = time.monotonic()
    while ran < runs and time.monotonic() - start < seconds:
        toy = made[names.split(",")[seed % len(made)]]
        path = toy.root / str(seed)
        episode = None
        try:
            episode = Episode(toy, faults, path, seed, lambda text, seed=seed: told(seed, text))
            episode.run(min(RUNS_OF_EPISODE, runs - ran))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and episode is None:
                raise
            what = error.what if isinstance(error, Found) else "stuck"
            cause = error.cause if isinstance(error, Found) else error
            entry: dict[str, Any] = {
                "seed": seed,
                "toy": toy.name,
                "what": what,
                "text": str(error),
                "stack": frames(cause),
            }
            if episode is not None:
                entry |= {
                    "operation": episode.operation, "settings": episode.settings, "history": episode.history,
                    "injected": [str(each) for each in episode.injected[:8]], "num_injected": len(episode.injected),
                }  # fmt: skip
            found.append(entry)
            with contextlib.suppress(Exception):
                episode.ckpt.close()  # type: ignore[union-attr]
            with contextlib.suppress(Exception):
                toy.program.swap.close()
        faulthandler.cancel_dump_traceback_later()
        if episode is not None:
            ran, hit, slowest = (
                ran + episode.num_runs,
                hit + episode.num_hit,
                max(slowest, episode.slowest),
            )
        shutil.rmtree(path, ignore_errors=True)
        seed += 1
    leaked = sorted((descriptors() - before).elements())
    counts = {
        "runs": ran, "hit": hit, "episodes": seed - first, "slowest": slowest, "leaked": leaked,
        "seconds": time.monotonic() - start, "seconds_before": start - began,
    }  # fmt: skip
    pathlib.Path(out).write_text(json.dumps({"counts": counts, "found": found}, indent=1))


if __name__ == "__main__":
    library, folder, names, first, seconds, runs, out = sys.argv[1:]
    main(library, folder, names, int(first), float(seconds), int(runs), out)
