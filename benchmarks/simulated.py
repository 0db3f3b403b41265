"""Predict steps of a Llama of 6.7 B parameters on one GPU, without a GPU, by `hlo.simulate`.

    # about 5 minutes for 16K and 32K
    python benchmarks/simulated.py --save benchmarks/results/simulated_h200_aot_202611.md

Nothing is measured here. A step is compiled for an H200, or for the GPU that `--chip` names, and
its schedule is simulated at the rates of `hlo.RATES[chip]`, or at given rates. XLA's thunks show
whether a slice of host memory becomes a copy or a kernel, and the stream of each asynchronous
operation. The file that `--save` names has a section for each version of jax; a run replaces the
section of its own version. Products use cuBLAS, since XLA cannot choose its own tiles without a
GPU.

A step that needs more device memory than the GPU has, by the compiler's count, is predicted all the
same, and its row says how much it needs. For an update in forward with the optimizer state on the
host, a second table has the floor of that order: compute without forward, plus either forward or
the bytes of the busier direction over the link, whichever takes longer. It also has the goal that
the project set for that order.

The model is Llama 7B: 32 layers x 4096, 32 heads, 11008 in the MLP, 32000 tokens, sequences of
2048, bf16, AdamW, layers recomputed in backward, cuDNN's attention, and a loss without logits. With
`--autotune`, settings of the schedule are tried for several sizes of Llama (`zj.autotune`). Needs
zerojax[aot].

    # FILE is, for example, benchmarks/results/graphs_h100_aot_202611.md
    python benchmarks/simulated.py --graphs --chip h100 --save FILE

With `--graphs`, each step is compiled without CUDA graphs, as by default, and with
`cuda_graphs=True`. The table shows how many bytes of the link are copied by nodes of graphs, and
the predicted seconds if copy engines make these copies, and if the cores do.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from llama import MODES, Mode, llama

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import zerojax as zj  # noqa: E402
from zerojax import aot, hlo  # noqa: E402
from zerojax.chips import CHIPS  # noqa: E402

SEQ = 2048
CLIPPED = "opt_state on the host, clip_norm"
IN_FORWARD = f"{CLIPPED}, in forward"
GOAL_SECONDS = {16384: 2.7, 32768: 3.75}
"""Most seconds that are wanted of a step of 6.7 B parameters that updates in forward, by tokens."""
GOAL_OVER_COMPUTE = 1.05
"""The same for other numbers of tokens, as a multiple of compute alone."""
TUNED: dict[str, dict[str, Any]] = {
    "1.3 B": {"layers": 24, "hidden": 2048, "heads": 16, "ff": 5504, "vocab": 50304},
    "6.7 B": {"layers": 32},
    "7.6 B": {"layers": 32, "ff": 14336, "vocab": 128256},
    "13 B": {"layers": 40, "hidden": 5120, "heads": 40, "ff": 13824},
}
"""Sizes for `--autotune`, by number of parameters."""


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step's predictions.

    Attributes:
      exclusive: prediction in which kernels that move host memory have the cores to themselves.
      beside: prediction in which these kernels run during products.
      device_bytes: bytes of device memory that the program needs, by the compiler's count.
    """

    exclusive: hlo.Simulation
    beside: hlo.Simulation
    device_bytes: int


def simulated(
    mode: Mode,
    tokens: int,
    sizes: dict[str, Any],
    rates: hlo.Rates,
    chip: str,
    keep: pathlib.Path | None,
    streams: set[str],
) -> Predicted:
    """Compile a step and return its predictions.

    The streams that the step's thunks name are added to `streams`.
    """
    batch = {
        name: jax.ShapeDtypeStruct((tokens // SEQ, SEQ), jnp.int32)
        for name in ("tokens", "targets")
    }
    config = zj.ZeroConfig(precision="bf16", activations="remat", **mode.config)
    text, thunks, device_bytes = compiled_step(config, batch, sizes, chip)
    if keep is not None:
        keep.write_text(text)
    streams |= set(thunks.streams.values())
    rates = dataclasses.replace(rates, **mode.rates)
    exclusive, beside = (
        hlo.simulate(text, rates=rates, thunks=thunks, callbacks=mode.callbacks, kernels=kernels)
        for kernels in ("exclusive", "beside")
    )
    return Predicted(exclusive, beside, device_bytes)


def row(name: str, predicted: Predicted, chip: str) -> str:
    """Return a line of the table from a mode's predictions."""
    s, beside = predicted.exclusive, predicted.beside
    if predicted.device_bytes > CHIPS[chip].allocatable_bytes:
        name += f" (does not fit: {predicted.device_bytes / 1e9:.0f} GB)"
    ways = ("to_device", "to_host")
    moved = [
        f"{of[way] / 1e9:.1f}"
        for way in ways
        for of in (s.traffic.by_copies, s.traffic.by_kernels, s.callback_bytes)
    ]
    seconds = (
        f"{s.seconds:.2f}"
        if abs(s.seconds - beside.seconds) < 0.005
        else f"{beside.seconds:.2f}-{s.seconds:.2f}"
    )
    over = (s.compute_seconds, s.floor_seconds)
    cells = [
        name,
        seconds,
        f"{100 * s.idle:.0f} %",
        *(cell for n in over for cell in (f"{n:.2f}", f"{s.seconds / n:.2f}")),
    ]
    cells += [
        *moved,
        f"{s.host_wait_seconds:.2f}",
        str(s.num_host_waits),
        f"{s.flops / s.seconds / 1e12:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(
    tokens: int,
    names: list[str],
    sizes: dict[str, Any],
    rates: hlo.Rates,
    chip: str,
    keep: pathlib.Path | None,
    streams: set[str],
) -> tuple[list[str], dict[str, Predicted]]:
    """Return the lines of a table of modes, for steps of `tokens` tokens, and the predictions.

    The streams that the steps' thunks name are added to `streams`.
    """
    predictions = dict[str, Predicted]()
    rows = [
        f"Predicted steps of {tokens:,} tokens, "
        f"{', '.join(f'{size} {name}' for name, size in sizes.items())}:",
        "",
        "| states | s | idle | compute s | over compute | floor s | over floor "
        "| up: copies GB | kernels | callbacks "
        "| down: copies GB | kernels | callbacks | host waits s | drains | TF/s |",
        "|" + "---|" * 16,
    ]
    for name in names:
        print(f"{tokens} tokens, {name}", flush=True)
        path = (
            None
            if keep is None
            else keep / f"{jax.__version__}_{tokens}_{name.replace(' ', '_').replace(',', '')}.txt"
        )
        predictions[name] = simulated(MODES[name], tokens, sizes, rates, chip, path, streams)
        rows.append(row(name, predictions[name], chip))
        print(rows[-1], flush=True)
    return [*rows, ""], predictions


def floor_row(tokens: int, predictions: dict[str, Predicted]) -> str:
    """Return a line that compares an update in forward with the floor of its order.

    The seconds of forward alone are those of the first loop of a step that updates after backward,
    whose forward moves nothing over the link.
    """
    after = predictions[CLIPPED].exclusive
    found = predictions[IN_FORWARD].exclusive
    forward = after.loops[0].seconds
    most_bytes = max(
        found.traffic.by_copies[way] + found.traffic.by_kernels[way]
        for way in ("to_device", "to_host")
    )
    link = most_bytes / found.rates.link
    floor = found.compute_seconds - forward + max(forward, link)
    seconds = (forward, link, floor, found.seconds, found.seconds / floor, after.seconds)
    cells = [f"{tokens:,}", *(f"{cell:.2f}" for cell in seconds)]
    goal = GOAL_SECONDS.get(tokens, GOAL_OVER_COMPUTE * found.compute_seconds)
    cells.append(f"{goal:.2f}" if tokens in GOAL_SECONDS else f"{GOAL_OVER_COMPUTE} of compute")
    cells.append("yes" if found.seconds <= goal else "no")
    return f"| {' | '.join(cells)} |"


def tuned(name: str, tokens: list[int], rates: hlo.Rates, chip: str) -> list[str]:
    """Return the lines of `zj.autotune`'s report on a size, for each number of tokens per step."""
    mode, lines = MODES["opt_state on the host"], []
    for count in tokens:
        batch = {
            name: jax.ShapeDtypeStruct((count // SEQ, SEQ), jnp.int32)
            for name in ("tokens", "targets")
        }
        config = zj.ZeroConfig(precision="bf16", activations="remat", **mode.config)
        mesh = aot.gpu_mesh(chip, gpus_per_host=1)
        found = zj.autotune(
            llama(**TUNED[name]), optax.adamw(1e-3), config, mesh, batch, rates=rates
        )
        lines += [
            f"{name} parameters, {count:,} tokens, opt_state on the host:",
            "",
            "```",
            str(found),
            "```",
            "",
        ]
        print("\n".join(lines[-6:]), flush=True)
    return lines


def graphs_section(
    names: list[str], tokens: list[int], sizes: dict[str, Any], rates: hlo.Rates, chip: str
) -> str:
    """Return the section of `--graphs` for this version of jax."""
    rows = [
        f"## jax {jax.__version__}",
        "",
        "| states | tokens | GB in graphs by default, up and down | s "
        "| with `cuda_graphs=True`: GB in graphs, up | down "
        "| of all GB over the link | s, one node after another "
        "| s, by copy engines beside products | s, by the cores |",
        "|" + "---|" * 10,
    ]
    for count in tokens:
        batch = {
            name: jax.ShapeDtypeStruct((count // SEQ, SEQ), jnp.int32)
            for name in ("tokens", "targets")
        }
        for name in names:
            cells = [name, f"{count:,}"]
            for graphs in (False, True):
                config = zj.ZeroConfig(
                    precision="bf16", activations="remat", cuda_graphs=graphs, **MODES[name].config
                )
                text, thunks, _ = compiled_step(config, batch, sizes, chip)

                def predict(text: str, thunks: hlo.Thunks, name: str, who: Any) -> hlo.Simulation:
                    of_mode = dataclasses.replace(rates, **MODES[name].rates)
                    return hlo.simulate(
                        text,
                        rates=of_mode,
                        thunks=thunks,
                        graphs=who,
                        callbacks=MODES[name].callbacks,
                    )

                found = predict(text, thunks, name, "in_turn")
                up, down = (found.traffic.in_graphs[way] / 1e9 for way in ("to_device", "to_host"))
                if not graphs:
                    cells += [f"{up:.1f} and {down:.1f}", f"{found.seconds:.2f}"]
                    continue
                moved = (
                    sum((*found.traffic.by_copies.values(), *found.traffic.by_kernels.values()))
                    / 1e9
                )
                share = f"{100 * (up + down) / moved:.0f} %" if moved else ""
                seconds = [
                    found.seconds,
                    *(predict(text, thunks, name, who).seconds for who in ("copies", "kernels")),
                ]
                cells += [f"{up:.1f}", f"{down:.1f}", share, *(f"{one:.2f}" for one in seconds)]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    return "\n".join([*rows, ""])


def compiled_step(
    config: zj.ZeroConfig, batch: Any, sizes: dict[str, Any], chip: str
) -> tuple[str, hlo.Thunks, int]:
    """Compile a step for a chip; return its HLO text, thunks and bytes of device memory."""
    with tempfile.TemporaryDirectory() as folder:
        program = zj.build_train_step(
            llama(**sizes), optax.adamw(1e-3), config, aot.gpu_mesh(chip, gpus_per_host=1)
        )
        with program:
            compiled = program.lower(batch).compile(
                {"xla_gpu_enable_triton_gemm": False, "xla_dump_to": folder}
            )
            text = compiled.as_text() or ""
            stats: Any = compiled.memory_analysis()
        device_bytes = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        return text, hlo.read_thunks(folder, hlo.module_name(text)), device_bytes


def graphs_head(rates: hlo.Rates, chip: str) -> str:
    """Return the text above the sections of `--graphs`."""
    assumed = ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(rates).items())
    return "\n".join(
        [
            f"# Copies in CUDA graphs, one {chip.upper()}, 2026-11",
            "",
            "**Compiled and predicted, not measured.** Steps of a Llama of 6.7 B parameters, "
            "compiled for a GPU that is not",
            "there. Bytes are read from XLA's thunks and are facts of the program; "
            "seconds are predicted by `hlo.simulate`.",
            "Command, once for each version of jax: "
            f"`python benchmarks/simulated.py --graphs --chip {chip} --save FILE`.",
            "",
            f"Rates, assumed: {assumed}.",
            "",
            "",
        ]
    )


def section(
    names: list[str],
    tokens: list[int],
    sizes: dict[str, Any],
    rates: hlo.Rates,
    chip: str,
    keep: pathlib.Path | None,
    title: str,
) -> str:
    """Return the section for this version of jax, with `title` in its heading if there is one."""
    versions = f"jaxlib {importlib.metadata.version('jaxlib')}, Python {platform.python_version()}"
    tables, floors, streams = [], [], set[str]()
    for count in tokens:
        lines, predictions = table(count, names, sizes, rates, chip, keep, streams)
        tables += lines
        if {CLIPPED, IN_FORWARD} <= set(predictions):
            floors.append(floor_row(count, predictions))
    if floors:
        tables += [
            f"Floor and goal of an update in forward, predicted for `{IN_FORWARD}`:",
            "",
            "| tokens | forward alone, s | the link alone, s | floor of the order, s "
            "| in forward, s | over the floor | after backward, s | goal | goal met |",
            "|" + "---|" * 9,
            *floors,
            "",
        ]
    told = ", ".join(f"`{stream}`" for stream in sorted(streams)) or "none"
    name = f"## jax {jax.__version__}{f', {title}' if title else ''}"
    return "\n".join([name, "", f"{versions}. Streams that its thunks name: {told}.", "", *tables])


def head(rates: hlo.Rates, chip: str) -> str:
    """Return the text above the sections."""
    gpu = chip.upper()
    command = "python benchmarks/simulated.py"
    if chip != "h200":
        command += f" --chip {chip}"
    memory = CHIPS[chip].allocatable_bytes / 1e9
    assumed = ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(rates).items())
    return "\n".join(
        [
            f"# Predicted steps on one {gpu}, 2026-11",
            "",
            "**Predicted, not measured.** Steps of a Llama of 6.7 B parameters, "
            f"compiled for an {gpu} without one and walked by",
            f"`hlo.simulate`. Command, once for each version of jax: `{command} --save`",
            f"`benchmarks/results/simulated_{chip}_aot_202611.md`; "
            "of a vocabulary of 128256 with `--vocab 128256 --ff 14336`; of",
            "settings of the schedule with `--autotune`.",
            "",
            f"Rates, assumed: {assumed}.",
            "",
            "`s`: where kernels move host memory, from kernels that run beside products "
            "at no cost to kernels that have the",
            "cores to themselves; the other columns are of the latter. "
            "`idle`: the share of the step in which the cores do",
            "nothing but move host memory. `compute`: products and other kernels alone. "
            "`floor`: the busiest resource alone,",
            "all bytes by copies. `callbacks`: GB that callbacks copy. "
            "`drains`: how often the host's thread waits until the",
            "device has done everything. Large resident steps recompute more on jax 0.12, to save "
            "memory.",
            f"`does not fit`: more GB of device memory, by the compiler's count, than the "
            f"{memory:.1f} that a program can use.",
            "With state on a disk, an update on the host in forward is not built, and has no row.",
            "",
            "",
        ]
    )


def save(path: pathlib.Path, text: str, start: str) -> None:
    """Insert a section into a file, or replace the section with the same heading."""
    old = path.read_text() if path.exists() else ""
    sections = {
        part.partition("\n")[0]: part for part in re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]
    }
    sections[text.partition("\n")[0]] = text
    path.write_text(
        start + "\n".join(sections[name].rstrip("\n") + "\n" for name in sorted(sections))
    )


def main() -> None:
    """Compile, predict and print; write the file of --save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16384, 32768], help="tokens per step"
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocab", type=int, help="size of the vocabulary; 32000 by default")
    parser.add_argument("--ff", type=int, help="hidden width of the MLP; 11008 by default")
    parser.add_argument(
        "--autotune",
        action="store_true",
        help="try settings of the schedule for several sizes instead",
    )
    parser.add_argument(
        "--graphs", action="store_true", help="compare with and without CUDA graphs instead"
    )
    parser.add_argument(
        "--chip", choices=list(aot.CHIPS), default="h200", help="GPU to compile for"
    )
    parser.add_argument(
        "--rate",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="field of hlo.Rates to replace, and its value",
    )
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the HLO texts")
    parser.add_argument("--title", default="", help="title of the section, after the version")
    parser.add_argument("--save", type=pathlib.Path, help="file to write")
    options = parser.parse_args()
    rates = dataclasses.replace(
        hlo.RATES[options.chip], **{name: float(value) for name, value in options.rate}
    )
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    sizes = {
        name: size
        for name in ("layers", "vocab", "ff")
        if (size := getattr(options, name)) is not None
    }
    if options.autotune:
        title = f"## jax {jax.__version__}, settings of the schedule by `--autotune`"
        lines = [title, ""]
        for name in TUNED:
            lines += tuned(name, options.tokens, rates, options.chip)
        text = "\n".join(lines)
        if options.save:
            save(options.save, text, head(rates, options.chip))
        return
    if options.graphs:
        moving = [name for name in options.modes if name != "resident" and "nvme" not in name]
        text = graphs_section(moving, options.tokens, sizes, rates, options.chip)
        if options.save:
            save(options.save, text, graphs_head(rates, options.chip))
        return
    text = section(
        options.modes, options.tokens, sizes, rates, options.chip, options.keep, options.title
    )
    print(f"\n{head(rates, options.chip)}{text}")
    if options.save:
        save(options.save, text, head(rates, options.chip))


if __name__ == "__main__":
    main()
