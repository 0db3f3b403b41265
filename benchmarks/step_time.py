"""Step time of ZeRO stages 0 to 3 over a plain jitted JAX program, beside torch, FSDP2 and DeepSpeed.

    python benchmarks/step_time.py                                       # jax alone
    python benchmarks/step_time.py --peer-python PEER/bin/python         # PEER: an environment with torch and deepspeed
    python benchmarks/step_time.py --save benchmarks/results/NAME.md

Every contender trains the same GPT from the same weights on the same tokens, in a process of its own. A round runs each of them
once; a ratio is taken within a round, and the table shows its median and range over the rounds, so that a slow minute of the
machine falls on all. In float32 the losses of all contenders must agree within 1e-4 at every step, else the exit status is 1.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from problem import Problem, add_arguments, from_arguments
from problem_in_jax import flax_tree, gpt_config, optimizer, time_steps

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-4
WARMUP = 2
BASE = "jax plain"


# --- one contender, in a process of its own ------------------------------------------------------------------------------


def run_jax(mode: str, p: Problem, devices: int) -> dict[str, Any]:
    """Train with "plain" (one jitted program, one device), or "zero0" .. "zero3", or "zero3-unrolled"."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import gpt
    import jax.numpy as jnp
    import optax

    import zerojax as zj

    c, tx, tree = gpt_config(p), optimizer(p), flax_tree(p)
    if mode == "plain":
        loss = gpt.unrolled_gpt(c).loss
        master = jax.device_put(tree)
        state: Any = (master, tx.init(master))

        def plain(state: Any, batch: Any) -> Any:
            master, opt_state = state
            params = jax.tree.map(lambda a: a.astype(c.dtype), master)
            value, grads = jax.value_and_grad(loss)(params, batch, None)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            updates, opt_state = tx.update(grads, opt_state, master)
            return (optax.apply_updates(master, updates), opt_state), {"loss": value}

        step: Any = jax.jit(plain, donate_argnums=0)
    else:
        if not mode.endswith("unrolled"):
            tree["blocks"] = jax.tree.map(lambda *layers: np.stack(layers), *tree["blocks"].values())
        model = gpt.unrolled_gpt(c) if mode.endswith("unrolled") else gpt.layered_gpt(c)
        config = zj.ZeroConfig(stage=int(mode[4]), precision=p.precision)  # type: ignore[arg-type]
        program = zj.build_train_step(model, tx, config, zj.make_mesh(fsdp=-1))
        state = program.init(jax.random.key(0))
        params = jax.tree.map(lambda a, old: jax.device_put(a.astype(old.dtype), old.sharding), tree, state.params)
        masters = None if state.master is None else jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), tree, state.master)
        state = dataclasses.replace(state, params=params, master=masters)
        step = program.step
    return time_steps(step, state, p)


# --- all contenders, in rounds -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contender:
    """A name for the table, how many devices or ranks it uses, and its command."""

    name: str
    ranks: int
    command: list[str]


def contenders(p: Problem, ranks: int, peer_python: str | None) -> list[Contender]:
    """Return what a round runs, in order."""
    worker = [sys.executable, str(HERE / "step_time.py"), *p.arguments(), "--worker"]
    found = [Contender(BASE, 1, [*worker, "plain", "--ranks", "1"])]
    found += [Contender(f"zerojax stage {s}", ranks, [*worker, f"zero{s}", "--ranks", str(ranks)]) for s in range(4)]
    found.append(Contender("zerojax stage 3, gather on use", ranks, [*worker, "zero3-unrolled", "--ranks", str(ranks)]))
    found.append(Contender("zerojax stage 0, 1 device", 1, [*worker, "zero0", "--ranks", "1"]))
    if peer_python is not None:
        peer = [str(HERE / "peer.py"), *p.arguments(), "--mode"]
        launch = [peer_python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *peer]
        found.append(Contender("torch plain", 1, [peer_python, *peer, "plain"]))
        found.append(Contender("FSDP2", ranks, [*launch, "fsdp2"]))
        if subprocess.run([peer_python, "-c", "import deepspeed"], capture_output=True, check=False).returncode == 0:
            found += [Contender(f"DeepSpeed ZeRO {s}", ranks, [*launch, f"deepspeed{s}"]) for s in (1, 2, 3)]
    return found


def run_process(contender: Contender, folder: str, peer_python: str | None) -> dict[str, Any]:
    """Run one contender once.

    Raises:
      RuntimeError: it printed no result; its last lines are in the message.
    """
    env = dict(os.environ)
    if peer_python is not None and contender.command[0] == peer_python:
        env |= {"PATH": f"{pathlib.Path(peer_python).parent}{os.pathsep}{env['PATH']}"}
        env |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // contender.ranks))}
        if not pathlib.Path("/dev/nvidia0").exists():
            env |= {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(contender.command, env=env, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{contender.name} printed no result:\n{(done.stdout + done.stderr)[-2000:]}")


def cpu_name() -> str:
    """Return the processor's name, or its architecture where that is not told."""
    info = pathlib.Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def table(p: Problem, ranks: int, rounds: list[dict[str, Any]], entries: list[Contender], command: str) -> tuple[str, bool]:
    """Return the report in Markdown, and whether the losses agree."""
    base = rounds[0][BASE]
    names = [e.name for e in entries if all(e.name in r for r in rounds)]
    versions = sorted({r["version"] for r in rounds[0].values()})
    lines = [
        f"# Step time, {p.precision}, {datetime.date.today():%Y-%m}",
        "",
        f"{p.layers} layers x {p.hidden}, {p.num_params / 1e6:.1f} M parameters, batch {p.batch} x {p.seq}, "
        f"vocabulary {p.vocab}.",
        f"Hardware: {base['hardware']}, {os.cpu_count()} cores of {cpu_name()}. Versions: {', '.join(versions)}, "
        f"Python {platform.python_version()}.",
        f"Command: `{command}`",
        "",
        f"{len(rounds)} rounds; each round runs every contender once, for {p.steps} steps of which {WARMUP} warm up. A ratio "
        f"is taken within a round; the median and the range over rounds are shown. Below 1 is faster than {BASE}.",
        "",
        f"| contender | devices | ms a step | time over {BASE} | range | last loss | largest loss difference |",
        "|---|---|---|---|---|---|---|",
    ]
    agree = True
    for name in names:
        ms = [1e3 * statistics.median(r[name]["seconds"][WARMUP:]) for r in rounds]
        ratio = [m / (1e3 * statistics.median(r[BASE]["seconds"][WARMUP:])) for m, r in zip(ms, rounds, strict=True)]
        away = max(np.abs(np.subtract(r[name]["losses"], base["losses"])).max() for r in rounds)
        agree = agree and away <= TOLERANCE
        count = next(e.ranks for e in entries if e.name == name)
        lines.append(
            f"| {name} | {count} | {statistics.median(ms):.0f} | {statistics.median(ratio):.2f} "
            f"| {min(ratio):.2f}-{max(ratio):.2f} | {rounds[0][name]['losses'][-1]:.5f} | {away:.1e} |"
        )
    if p.precision == "fp32":
        lines += ["", f"Losses {'agree' if agree else 'DO NOT agree'} within {TOLERANCE:g} at each of the {p.steps} steps."]
    return "\n".join(lines) + "\n", agree or p.precision != "fp32"


def main() -> None:
    """Run all rounds, print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer-python", help="python of an environment with torch, and deepspeed")
    parser.add_argument("--ranks", type=int, default=2, help="devices that share a sharded run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help=f"parts of the names of the contenders to run beside {BASE}")
    parser.add_argument("--save", help="write the table here; a temporary folder by default")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_arguments(parser)
    options = parser.parse_args()
    p = from_arguments(options)
    if options.worker:
        print("RESULT " + json.dumps(run_jax(options.worker, p, options.ranks)))
        return
    if p.batch % options.ranks:
        parser.error(f"--batch {p.batch} does not divide by --ranks {options.ranks}")
    if p.steps <= WARMUP:
        parser.error(f"--steps {p.steps}: more than the {WARMUP} that warm up are needed")
    entries = [
        entry
        for entry in contenders(p, options.ranks, options.peer_python)
        if entry.name == BASE or options.only is None or any(part in entry.name for part in options.only)
    ]
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.rounds):
            results = {}
            for entry in entries:
                try:
                    results[entry.name] = run_process(entry, folder, options.peer_python)
                except (RuntimeError, subprocess.TimeoutExpired) as e:
                    if entry.name.startswith(("jax", "zerojax")):
                        raise
                    print(f"round {index + 1}: {entry.name} left out: {e}", file=sys.stderr)
                    continue
                seconds = statistics.median(results[entry.name]["seconds"][WARMUP:])
                print(f"round {index + 1}: {entry.name}: {seconds:.3f} s a step")
            rounds.append(results)
    words = [w if w != options.peer_python else "PEER/bin/python" for w in sys.argv[1:]]
    text, agree = table(p, options.ranks, rounds, entries, " ".join(["python benchmarks/step_time.py", *words]))
    print(f"\n{text}")
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "step_time.md")
    target.write_text(text)
    print(f"saved as {target}")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
