"""Run what the pictures show, and store the figures in docs/pictures/data/.

    python docs/pictures/measure.py timelines
    python docs/pictures/measure.py losses
    python docs/pictures/measure.py bytes

`timelines` traces one step of a GPT in each tier: JAX's profiler records the instructions, and
`program.trace_swaps` the transfers of the disk. `losses` trains the same GPT at stages 1 to 3 in
each tier. `bytes` counts bytes per device with `zj.plan`, without running anything. Each file names
its command, machine and versions.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import glob
import gzip
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "examples"), str(HERE.parent.parent)]
os.environ["JAX_PLATFORMS"] = "cpu"

import gpt  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import text_data  # noqa: E402

import zerojax as zj  # noqa: E402

Interval = tuple[float, float]
TIERS = ("device", "pinned_host", "nvme")
STEPS, WARM_UP, TRACED = 120, 3, 6
GRAIN = 1e-3
"""Seconds; work of one lane with a shorter pause between is stored as one interval."""


def about(command: str) -> dict[str, str]:
    """Return how, when and on what a measurement ran."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", info)
    return {
        "command": f"python docs/pictures/measure.py {command}",
        "machine": f"{os.cpu_count()} CPU cores of {name[1].strip() if name else 'a processor'}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "jax": importlib.metadata.version("jax"),
    }


def tiers(tier: str, folder: str, stage: int = 3) -> dict[str, Any]:
    """Return the fields of a config with all states in `tier`; below stage 3 without parameters."""
    kinds = ("params", "grads", "opt_state") if stage == 3 else ("grads", "opt_state")
    fields: dict[str, Any] = dict.fromkeys(kinds, tier) | {"stage": stage}
    return fields | ({"swap_dir": folder} if tier == "nvme" else {})


def joined(intervals: Iterable[Interval], pause: float) -> list[Interval]:
    """Return the union of intervals; pauses shorter than `pause` are closed."""
    result = list[Interval]()
    for start, stop in sorted(intervals):
        if result and start - result[-1][1] <= pause:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def lane_of(name: str, streamed: bool) -> str | None:
    """Return the lane of an instruction by its name in the source; None for a loop itself."""
    if "callback" in name:
        return "callbacks"
    if "/cond" in name:
        return "update"
    if name.endswith("/while"):
        return None
    if "dynamic_index" in name or "dynamic_update" in name or name.endswith("broadcast_in_dim"):
        return "copies"
    if not re.search(r"jvp\(|vmap\(|_take|param/", name):
        return "copies"
    if "rematted" in name or (streamed and "/while/" in name and "/jvp(" in name):
        return "recompute"
    return "backward" if "transpose(jvp" in name else "forward"


def profiled(folder: str, names: dict[str, str], steps: range, streamed: bool) -> list[Any]:
    """Return (start, {lane: intervals}) of each step in the profile in `folder`, in seconds."""
    found = glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz")
    with gzip.open(found[0]) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    bounds = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"][:5] == "step "}
    result = list[Any]()
    for step in steps:
        first, last = bounds[f"step {step}"]
        lanes: dict[str, list[Interval]] = collections.defaultdict(list)
        for event in events:
            start, stop = event["ts"], event["ts"] + event["dur"]
            if "hlo_op" in event.get("args", {}) and first <= start < last:
                lane = lane_of(names.get(event["args"]["hlo_op"], ""), streamed)
                if lane is not None:
                    lanes[lane].append(((start - first) / 1e6, (stop - first) / 1e6))
        result.append(((last - first) / 1e6, lanes))
    return result


def swapped(path: str, count: int) -> list[dict[str, list[Interval]]]:
    """Return the disk's transfers and the waits of each step, from a trace of `trace_swaps`."""
    events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    runs = [e for e in events if e.get("cat") == "steps"]
    result = list[dict[str, list[Interval]]]()
    for run in runs[:count]:
        lanes: dict[str, list[Interval]] = collections.defaultdict(list)
        for event in events:
            lane, is_rank = event.get("cat", ""), event.get("pid", 0) >= 3
            if is_rank and lane.split(" ")[0] in ("read", "write", "wait"):
                start = (event["ts"] - run["ts"]) / 1e6
                stop = start + event["dur"] / 1e6
                if stop > 0 and start < run["dur"] / 1e6:
                    # Overlapping transfers of one kind are on numbered tracks.
                    name = "waits" if lane.startswith("wait") else re.sub(r"\.\d+$", "", lane)
                    lanes[name].append((max(start, 0.0), min(stop, run["dur"] / 1e6)))
        result.append(lanes)
    return result


@contextlib.contextmanager
def built(model: Any, config: zj.ZeroConfig) -> Iterator[tuple[Any, Any]]:
    """Yield a program of the GPT on all devices, and its first state."""
    with zj.build_train_step(model, optax.adamw(1e-3), config, zj.make_mesh(fsdp=-1)) as program:
        yield program, program.init(jax.random.key(0))


def timeline(model: Any, tier: str, batch: Any) -> dict[str, Any]:
    """Run some steps in a tier, and return the lanes of the fastest one."""
    update = None if tier == "device" else "in_backward"
    with tempfile.TemporaryDirectory() as folder:
        fields = tiers(tier, folder) | {"update": update, "activations": "remat"}
        if update:
            fields["grads"] = "device"
        with built(model, zj.ZeroConfig(**fields)) as (program, state):
            for _ in range(WARM_UP):
                state, metrics = program.step(state, batch)
                jax.block_until_ready((state, metrics))
            options: Any = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            trace = contextlib.nullcontext()
            if tier == "nvme":
                trace = program.trace_swaps(f"{folder}/swap.json")
            steps = range(TRACED)
            with trace, jax.profiler.trace(f"{folder}/profile", profiler_options=options):
                for step in steps:
                    with jax.profiler.TraceAnnotation(f"step {step}"):
                        state, metrics = program.step(state, batch)
                        jax.block_until_ready((state, metrics))
            text = program.lower(batch).compile().as_text()
        pattern = r"%?([\w.\-]+) = [^\n]*?metadata=\{[^\n]*?op_name=\"([^\"]*)\""
        names = {match[1]: match[2] for match in re.finditer(pattern, text)}
        found = profiled(f"{folder}/profile", names, steps, streamed=update is not None)
        if tier == "nvme":
            swaps = swapped(f"{folder}/swap.json", len(found))
            found = [(s, lanes | swap) for (s, lanes), swap in zip(found, swaps, strict=True)]
    seconds, lanes = min(found, key=lambda one: one[0])
    busy = {lane: sum(b - a for a, b in joined(own, 0.0)) for lane, own in lanes.items()}
    return {
        "seconds": round(seconds, 4),
        "busy": {lane: round(s, 4) for lane, s in sorted(busy.items())},
        "lanes": {
            lane: [[round(a, 4), round(b, 4)] for a, b in joined(own, GRAIN)]
            for lane, own in sorted(lanes.items())
        },
    }


def timelines() -> dict[str, Any]:
    """Trace a step of a GPT of 6 x 512 in each tier, on one device."""
    c = dataclasses.replace(gpt.PRESETS["tiny"], layers=6, hidden=512, heads=8, seq=256)
    tokens = np.random.default_rng(0).integers(0, c.vocab, (4, c.seq)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    model = gpt.layered_gpt(c)
    return {
        "model": f"GPT of {c.layers} layers x {c.hidden}, {c.num_params / 1e6:.1f} M parameters, "
        "float32, 4 sequences of 256 tokens, AdamW, one CPU device",
        "config": "stage 3, remat; off the device: update in backward",
        "step": f"the fastest of {TRACED} after {WARM_UP}",
        "tiers": {tier: timeline(model, tier, batch) for tier in TIERS},
    }


def losses() -> dict[str, Any]:
    """Train a GPT of 4 x 128 with the same data at stages 1 to 3 in each tier, on 2 devices."""
    c = dataclasses.replace(gpt.PRESETS["tiny"], seq=64)
    corpus, _ = text_data.load_corpus(None)
    data = text_data.batches(corpus, c.seq, 8, seed=0)
    batches = [next(data) for _ in range(STEPS)]
    curves = dict[str, list[float]]()
    began = time.perf_counter()
    for stage in (1, 2, 3):
        for tier in TIERS:
            with tempfile.TemporaryDirectory() as folder:
                config = zj.ZeroConfig(**tiers(tier, folder, stage))
                with built(gpt.layered_gpt(c), config) as (program, state):
                    curve = list[float]()
                    for batch in batches:
                        state, metrics = program.step(state, batch)
                        curve.append(float(metrics["loss"]))
            curves[f"stage {stage}, {tier}"] = curve
            print(stage, tier, curve[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    return {
        "model": f"GPT of {c.layers} layers x {c.hidden}, float32, {STEPS} steps of 8 sequences of "
        f"{c.seq} bytes of Python's standard library, AdamW, 2 simulated CPU devices",
        "stored": "gradients and optimizer state in the tier; at stage 3 parameters too",
        "losses": curves,
    }


def count_bytes() -> dict[str, Any]:
    """Plan a transformer of 6.6 B parameters for 8 H200s, at each stage and in each tier."""
    sizes = zj.Sizes(layers=32, hidden=4096, heads=32, seq=2048, batch=8, vocab=32000)
    machine = dataclasses.replace(
        zj.machine("h200", devices_per_node=8),
        host_bytes=2e12,
        pinned_bytes=1.9e12,
        host_kernel=150e9,
        disk_bytes=30e12,
        disk_read=25e9,
        disk_write=12e9,
        disk_both=25e9,
    )
    counted = dict[str, Any]()
    for stage in range(4):
        for tier in TIERS:
            fixed = tiers(tier, "/mnt/disk", stage) | {
                "precision": "bf16",
                "activations": "remat",
                "update": None if tier == "device" else "after_backward",
                "opt_state_device_fraction": 0.0,
                "prefetch_distance": 1,
                "num_microbatches": 1,
                "gather_ahead": False,
            }
            fixed["params"] = tier if stage == 3 else "device"
            plan = zj.plan(sizes, machine=machine, fixed=fixed)
            counted[f"stage {stage}, {tier}"] = {
                where: {kind: n for kind, n in kinds.items() if n}
                for where, kinds in plan.bytes.items()
            }
    return {
        "model": "transformer of 32 layers x 4096, 32,000 words, bf16, AdamW, remat, "
        "8 sequences of 2,048 tokens, 8 H200s",
        "bytes": counted,
    }


PARTS = {"timelines": timelines, "losses": losses, "bytes": count_bytes}
DEVICES = {"losses": 2}


def main() -> None:
    """Measure one part, and store it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    jax.config.update("jax_num_cpu_devices", DEVICES.get(part, 1))
    found = about(part) | PARTS[part]()
    text = json.dumps(found, indent=1)
    # Numbers of one list share a line.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)
    (HERE / f"data/{part}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
