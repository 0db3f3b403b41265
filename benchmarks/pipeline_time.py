r"""Time a pipeline of stages on CPU cores, a core for each stage, against one device with one core.

    python benchmarks/pipeline_time.py --save benchmarks/results/pipeline_cpu_202611.md

Each step runs in one of several processes, in turn, while the others wait. A process has as many
cores as devices. Each row compares the median time of a step with the ideal one,
(M + (p - 1) / v) / M of a p-th of the time on one device, for M microbatches, p stages and v
chunks. The rows of data parallelism show what the machine itself loses with more cores: there is
no pipeline in them. Needs at least two cores, and zerojax[examples].
"""

import argparse
import importlib.metadata
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

from contenders import cpu_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADS = ("mesh", "microbatches", "chunks", "step, s", "p t / t(1)", "ideal", "of the ideal")


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2, help="number of stages and cores")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a microbatch")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--activations", default="save")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each process")
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # the mesh, in a process of its own
    parser.add_argument("--microbatch-count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--chunk-count", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- in the process of one program ----------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Run a step for each line of the input, and print its seconds."""
    cores = 1 if options.serve == "one" else options.stages
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={cores} --xla_cpu_multi_thread_eigen=false"
    )
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
    import gpt
    import jax
    import numpy as np
    import optax

    import zerojax as zj

    count = options.microbatch_count
    mesh = zj.make_mesh(
        pipe=cores if options.serve == "pipe" else 1,
        fsdp=cores if options.serve == "data" else 1,
    )
    c = gpt.GPTConfig(
        layers=options.layers,
        hidden=options.hidden,
        heads=4,
        seq=options.tokens,
        vocab=256,
        tied=False,
        loss_tiles=0,
        attention="xla",
    )
    config = zj.ZeroConfig(
        stage=1,
        num_microbatches=count // cores if options.serve == "data" else count,
        pipe_chunks=options.chunk_count,
        activations=options.activations,
    )
    program = zj.build_train_step(gpt.layered_gpt(c), optax.sgd(1e-3), config, mesh)
    tokens = np.random.default_rng(0).integers(0, 256, (count, options.tokens), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    state = program.init(jax.random.key(0))
    for _ in sys.stdin:
        start = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        print(time.perf_counter() - start, flush=True)


# --- in the process that compares -----------------------------------------------------------------


class Server:
    """A process that runs the steps of one program."""

    def __init__(self, mesh: str, microbatches: int, chunks: int) -> None:
        """Start the process, and run the first step, which compiles."""
        own = ["--serve", mesh, "--microbatch-count", str(microbatches)]
        own += ["--chunk-count", str(chunks)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seconds = list[float]()
        self.step()
        self.seconds.clear()

    def step(self) -> None:
        """Run a step and keep its seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.seconds.append(float(self.process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def compare(options: argparse.Namespace, microbatches: int) -> list[list[str]]:
    """Return the rows of a number of microbatches."""
    servers = {("one", 1): Server("one", microbatches, 1)}
    servers["data", 1] = Server("data", microbatches, 1)
    for chunks in options.chunks:
        servers["pipe", chunks] = Server("pipe", microbatches, chunks)
    for _ in range(options.steps):
        for server in servers.values():
            server.step()
    for server in servers.values():
        server.close()
    times = {key: statistics.median(server.seconds) for key, server in servers.items()}
    count = options.stages
    labels = {"one": "one device", "data": f"fsdp {count}", "pipe": f"pipe {count}"}
    rows = list[list[str]]()
    for (mesh, chunks), seconds in times.items():
        devices = 1 if mesh == "one" else count
        ideal = 1 + (count - 1) / (chunks * microbatches) if mesh == "pipe" else 1.0
        ratio = seconds * devices / times["one", 1]
        row = [labels[mesh], f"{microbatches}", f"{chunks}", f"{seconds:.3f}"]
        rows.append([*row, f"{ratio:.3f}", f"{ideal:.3f}", f"{ratio / ideal:.3f}"])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Compare the programs, and print or save the table."""
    options = parse()
    if options.serve:
        serve(options)
        return
    rows = list[list[str]]()
    for microbatches in options.microbatches:
        rows += compare(options, microbatches)
    table = ["| " + " | ".join(row) + " |" for row in (HEADS, ["---"] * len(HEADS), *rows)]
    versions = f"jax {importlib.metadata.version('jax')}, Python {platform.python_version()}"
    text = "\n".join(
        [
            "# Pipeline stages on CPU cores: time of a step, 2026-11",
            "",
            f"{options.stages} cores of {cpu_name()}; {versions}. GPT of {options.layers} layers "
            f"of width {options.hidden}, one sequence of {options.tokens} tokens in each "
            f"microbatch, float32, stage 1, activations={options.activations!r}. Each device has "
            f"one core. Medians of {options.steps} steps, which the programs run in turn.",
            "",
            f"Command: `python benchmarks/pipeline_time.py {' '.join(sys.argv[1:])}`.",
            "",
            *table,
            "",
        ]
    )
    print(text)
    if options.save:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
