"""Compare predicted seconds of a step with measured ones, on the machine that runs this.

The configs of a GPT are resident, or use the host or nvme.

    # measures the machine, then each config in turn
    python benchmarks/planned.py --swap-dir DIR
    python benchmarks/planned.py --swap-dir DIR --machine lab.toml --auto
    # compares mixed layers with uniform layers
    python benchmarks/planned.py --only resident --mixed

Each config's step is predicted (`zj.plan` with every field fixed) and then run. Rounds go through
all configs in turn, so that a slow minute affects all. `--auto` also runs the choice of `zj.plan`.
Figures are medians over rounds, and a config's seconds in a round are the median of its steps.
`--mixed` also plans for a device with room for half of the layers' saved activations. The layers of
this plan differ in what they save, and it is compared with uniform configs.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax as zj
from zerojax.planner import plan

H, N = "pinned_host", "nvme"
CONFIGS: dict[str, dict[str, Any]] = {
    "resident": {"activations": "save"},
    "resident, remat": {"activations": "remat"},
    "opt_state on the host": {"opt_state": H, "activations": "remat"},
    "opt_state on the host, updated there": {
        "opt_state": H,
        "update_on": "host",
        "activations": "remat",
    },
    "all on the host": {"params": H, "grads": H, "opt_state": H, "activations": H},
    "all on the host, in backward": {
        "params": H,
        "opt_state": H,
        "activations": H,
        "update": "in_backward",
    },
    "opt_state on nvme": {"opt_state": N, "activations": "remat"},
    "all on nvme": {"params": N, "grads": N, "opt_state": N, "activations": N},
    "all on nvme, in backward": {
        "params": N,
        "opt_state": N,
        "activations": N,
        "update": "in_backward",
    },
    "states on nvme, updated on the host": {
        "params": N,
        "opt_state": N,
        "update_on": "host",
        "activations": "remat",
    },
}
NAMES = ("params", "grads", "opt_state", "activations", "update", "update_on")


def fixed_of(fields: dict[str, Any], swap_dir: str, precision: str) -> dict[str, Any]:
    """Return every field that a plan would choose, as set by a config of `CONFIGS`."""
    default = zj.ZeroConfig()
    names = [
        *NAMES,
        "stage",
        "opt_state_device_fraction",
        "prefetch_distance",
        "gather_ahead",
        "num_microbatches",
        "moments",
    ]
    every = {name: getattr(default, name) for name in names}
    return every | fields | {"swap_dir": swap_dir, "precision": precision}


def main() -> None:
    """Predict and run every config, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--swap-dir", help="existing folder on the disk; a temporary folder by default"
    )
    parser.add_argument("--machine", help="TOML file of zerojax probe; measured by default")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of a config per round")
    parser.add_argument("--only", help="run only configs whose name contains this")
    parser.add_argument("--auto", action="store_true", help="also run the choice of zj.plan")
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="also run the choice of zj.plan for room for half of the saved activations",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.swap_dir) as folder:
        run(options, folder)


def run(options: argparse.Namespace, folder: str) -> None:
    """Predict and run every config, and print the table."""
    mesh = zj.make_mesh(fsdp=-1)
    machine = zj.machine(options.machine) if options.machine else zj.probe(folder)
    print(machine)
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[options.precision]
    c = dataclasses.replace(
        gpt.PRESETS["tiny"],
        layers=options.layers,
        hidden=options.hidden,
        heads=8,
        seq=options.seq,
        dtype=dtype,
    )
    model, tx = gpt.layered_gpt(c), optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, c.vocab, (options.batch, c.seq)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    rows = {name: fields for name, fields in CONFIGS.items() if (options.only or "") in name}
    predicted: dict[str, list[float]] = {name: [] for name in rows}
    measured: dict[str, list[float]] = {name: [] for name in rows}
    programs = {name: fixed_of(fields, folder, options.precision) for name, fields in rows.items()}
    if options.auto:
        chosen = plan(
            model,
            tx,
            mesh,
            batch,
            machine,
            fixed={"swap_dir": folder, "precision": options.precision},
        )
        print(chosen)
        programs["chosen by zj.plan"] = fixed_of(chosen.fields, folder, options.precision)
        predicted["chosen by zj.plan"], measured["chosen by zj.plan"] = [], []
    if options.mixed:
        resident = dict.fromkeys(("params", "grads", "opt_state"), "device") | {
            "num_microbatches": 1,
            "update": None,
        }
        whole = {"swap_dir": folder, "precision": options.precision} | resident
        needed = [
            plan(model, tx, mesh, batch, machine, fixed=whole | {"activations": mode}).device_bytes
            for mode in ("save", "remat")
        ]
        small = dataclasses.replace(machine, device_bytes=int(sum(needed) / 2 / 0.95))
        chosen = plan(model, tx, mesh, batch, small, fixed=whole)
        print(f"save needs {needed[0] / 1e6:.0f} MB, remat {needed[1] / 1e6:.0f} MB\n{chosen}")
        programs["mixed, chosen by zj.plan"] = fixed_of(chosen.fields, folder, options.precision)
        predicted["mixed, chosen by zj.plan"], measured["mixed, chosen by zj.plan"] = [], []
    for number in range(options.rounds):
        for name, fixed in programs.items():
            # Predicted before and after: a shared machine's speed changes in between.
            before = plan(model, tx, mesh, batch, machine, fixed=fixed)
            measured[name].append(
                seconds_of_steps(model, tx, mesh, batch, before.config, options.steps)
            )
            after = plan(model, tx, mesh, batch, machine, fixed=fixed)
            predicted[name].append((before.seconds + after.seconds) / 2)
            print(
                f"round {number}  {name:<40} predicted {before.seconds:.3f}, {after.seconds:.3f}  "
                f"measured {measured[name][-1]:.3f}",
                flush=True,
            )
    print(f"\n{'config':<40} {'predicted s':>12} {'measured s':>12} {'ratio':>8}")
    for name in programs:
        p, m = statistics.median(predicted[name]), statistics.median(measured[name])
        ratio = statistics.median(
            a / b for a, b in zip(predicted[name], measured[name], strict=True)
        )
        print(f"{name:<40} {p:>12.3f} {m:>12.3f} {ratio:>8.2f}")


def seconds_of_steps(
    model: Any, tx: Any, mesh: Any, batch: Any, config: zj.ZeroConfig, steps: int
) -> float:
    """Return the median seconds of `steps` steps, after two untimed steps."""
    with zj.build_train_step(model, tx, config, mesh) as program:
        state, found = program.init(jax.random.key(0)), []
        for n in range(steps + 2):
            start = time.perf_counter()
            state, metrics = program.step(state, batch)
            jax.block_until_ready((state, metrics))
            if n > 1:
                found.append(time.perf_counter() - start)
    return statistics.median(found)


if __name__ == "__main__":
    main()
