"""Predicted steps of a Llama of 6.7 B parameters on one H200: compiled without a GPU, and walked by `hlo.simulate`.

    python benchmarks/simulated.py --save benchmarks/results/simulated_h200_aot_202611.md    # about 5 minutes for 16K and 32K

Nothing here is measured. A step is compiled for an H200 that is not there, and its schedule is walked at the rates of
`hlo.RATES["h200"]`, or those that are given. What becomes of a slice of host memory (copy or kernel), and the stream of each
asynchronous operation, are read from XLA's thunks. The file that `--save` names has a section for each version of jax; that of
the version that runs is put in its place. Products are cuBLAS's, since XLA cannot choose tiles of its own without a GPU.

The model is that of Llama 7B: 32 layers x 4096, 32 heads, 11008 in the MLP, 32000 tokens, sequences of 2048, bf16, AdamW,
layers recomputed in backward; its attention is cuDNN's, its loss has no logits. Needs zerojax[aot].
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import zerojax as zj  # noqa: E402
from zerojax import aot, hlo  # noqa: E402

SEQ = 2048
HOST, DISK = "pinned_host", "nvme"
NO_DISK = 1e18
"""Bytes a second of a disk that takes no time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """Where a step's states rest, and what its callbacks do.

    Attributes:
      config: fields of `ZeroConfig`.
      callbacks: as `hlo.simulate` takes it.
      rates: that are other than those assumed.
    """

    config: dict[str, Any]
    callbacks: str = "plain"
    rates: dict[str, float] = dataclasses.field(default_factory=dict)


_IN_BACKWARD = {"update": "in_backward"}
_ON_HOST = {"opt_state": HOST, "update_on": "host"}
_ALL_NVME = {"params": DISK, "grads": DISK, "opt_state": DISK, "swap_dir": "not there", **_IN_BACKWARD}
_NO_DISK = {"disk_read": NO_DISK, "disk_write": NO_DISK}
MODES = {
    "resident": Mode(config={}),
    "opt_state on the host": Mode(config={"opt_state": HOST, **_IN_BACKWARD}),
    "opt_state on the host, clip_norm": Mode(config={"opt_state": HOST, "clip_norm": 1.0}),
    "params, grads, opt_state on the host": Mode(config={"params": HOST, "grads": HOST, "opt_state": HOST, **_IN_BACKWARD}),
    "opt_state on the host, update_on host": Mode(config={**_ON_HOST, **_IN_BACKWARD}, callbacks="update"),
    "the same, delayed_update": Mode(config={**_ON_HOST, "delayed_update": True}, callbacks="delayed"),
    "all on nvme": Mode(config=_ALL_NVME, callbacks="nvme"),
    "all on nvme, a disk that takes no time": Mode(config=_ALL_NVME, callbacks="nvme", rates=_NO_DISK),
    "all on nvme, update_on host": Mode(config={**_ALL_NVME, "update_on": "host"}, callbacks="nvme_update"),
}


def llama(layers: int, hidden: int = 4096, heads: int = 32, ff: int = 11008, vocab: int = 32000) -> zj.LayeredModel:
    """Return the model: RMSNorm, rotary positions, a gated MLP."""
    width = hidden // heads
    sizes = {
        "wq": (hidden, hidden), "wk": (hidden, hidden), "wv": (hidden, hidden), "wo": (hidden, hidden),
        "w1": (hidden, ff), "w3": (hidden, ff), "w2": (ff, hidden),
    }  # fmt: skip

    def norm(x: jax.Array, g: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype) * g

    def rotated(x: jax.Array) -> jax.Array:  # [B, T, heads, width]
        inverse = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
        angle = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * inverse)[None, :, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        c, s = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)

    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        y = norm(x, p["g1"])
        q, k, v = ((y @ p[name]).reshape(*x.shape[:2], heads, width) for name in ("wq", "wk", "wv"))
        a = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True, implementation="cudnn")
        x = x + a.reshape(x.shape) @ p["wo"]
        y = norm(x, p["g2"])
        return x + (jax.nn.silu(y @ p["w1"]) * (y @ p["w3"])) @ p["w2"]

    def init_block(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(sizes))
        weights = {name: 0.02 * jax.random.normal(k, size) for k, (name, size) in zip(keys, sizes.items(), strict=True)}
        return weights | {"g1": jnp.ones(hidden), "g2": jnp.ones(hidden)}

    return zj.LayeredModel(
        layers,
        lambda key: 0.02 * jax.random.normal(key, (vocab, hidden)),
        lambda table, batch, key: table[batch["tokens"]],
        init_block,
        block,
        lambda key: {"w": 0.02 * jax.random.normal(key, (hidden, vocab)), "g": jnp.ones(hidden)},
        lambda p, p_embed, x, batch, key: zj.linear_cross_entropy(norm(x, p["g"]), p["w"], batch["targets"]),
    )


def simulated(
    mode: Mode, tokens: int, layers: int, rates: hlo.Rates, keep: pathlib.Path | None, streams: set[str]
) -> list[hlo.Simulation]:
    """Compile a step; return what is predicted where kernels have the cores to themselves, and where they run beside products.

    The streams that its thunks name are added to `streams`.
    """
    batch = {name: jax.ShapeDtypeStruct((tokens // SEQ, SEQ), jnp.int32) for name in ("tokens", "targets")}
    config = zj.ZeroConfig(precision="bf16", activations="remat", **mode.config)
    with tempfile.TemporaryDirectory() as folder:
        program = zj.build_train_step(llama(layers), optax.adamw(1e-3), config, aot.gpu_mesh("h200", gpus_per_host=1))
        with program:
            compiled = program.lower(batch).compile({"xla_gpu_enable_triton_gemm": False, "xla_dump_to": folder})
            text = compiled.as_text() or ""
        thunks = hlo.read_thunks(folder, hlo.module_name(text))
    if keep is not None:
        keep.write_text(text)
    streams |= set(thunks.streams.values())
    rates = dataclasses.replace(rates, **mode.rates)
    return [
        hlo.simulate(text, rates=rates, thunks=thunks, callbacks=mode.callbacks, kernels=kernels)
        for kernels in ("exclusive", "beside")
    ]


def row(name: str, found: list[hlo.Simulation]) -> str:
    """Return a line of the table."""
    s, beside = found
    ways = ("to_device", "to_host")
    moved = [f"{of[way] / 1e9:.1f}" for way in ways for of in (s.traffic.by_copies, s.traffic.by_kernels, s.callback_bytes)]
    seconds = f"{s.seconds:.2f}" if abs(s.seconds - beside.seconds) < 0.005 else f"{beside.seconds:.2f}-{s.seconds:.2f}"
    over = (s.compute_seconds, s.floor_seconds)
    cells = [name, seconds, f"{100 * s.idle:.0f} %", *(cell for n in over for cell in (f"{n:.2f}", f"{s.seconds / n:.2f}"))]
    cells += [*moved, f"{s.host_wait_seconds:.2f}", str(s.num_host_waits), f"{s.flops / s.seconds / 1e12:.0f}"]
    return f"| {' | '.join(cells)} |"


def table(
    tokens: int, names: list[str], layers: int, rates: hlo.Rates, keep: pathlib.Path | None, streams: set[str]
) -> list[str]:
    """Return the lines of a table of modes for steps of so many tokens; `streams` is as for `simulated`."""
    rows = [
        f"Predicted steps of {tokens:,} tokens, {layers} layers:",
        "",
        "| states | s | idle | compute s | over compute | floor s | over floor | up: copies GB | kernels | callbacks "
        "| down: copies GB | kernels | callbacks | host waits s | drains | TF/s |",
        "|" + "---|" * 16,
    ]
    for name in names:
        print(f"{tokens} tokens, {name}", flush=True)
        path = None if keep is None else keep / f"{jax.__version__}_{tokens}_{name.replace(' ', '_').replace(',', '')}.txt"
        found = simulated(MODES[name], tokens, layers, rates, path, streams)
        rows.append(row(name, found))
        print(rows[-1], flush=True)
    return [*rows, ""]


def section(names: list[str], tokens: list[int], layers: int, rates: hlo.Rates, keep: pathlib.Path | None, title: str) -> str:
    """Return the part of the file that is of this version of jax, and perhaps of a title."""
    versions = f"jaxlib {importlib.metadata.version('jaxlib')}, Python {platform.python_version()}"
    tables, streams = [], set[str]()
    for count in tokens:
        tables += table(count, names, layers, rates, keep, streams)
    told = ", ".join(f"`{stream}`" for stream in sorted(streams)) or "none"
    name = f"## jax {jax.__version__}{f', {title}' if title else ''}"
    return "\n".join([name, "", f"{versions}. Streams that its thunks name: {told}.", "", *tables])


def head(rates: hlo.Rates) -> str:
    """Return what stands above the sections."""
    assumed = ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(rates).items())
    return "\n".join(
        [
            "# Predicted steps on one H200, 2026-11",
            "",
            "**Predicted, not measured.** Steps of a Llama of 6.7 B parameters, compiled for an H200 without one and walked by",
            "`hlo.simulate`. Command, once for each version of jax: `python benchmarks/simulated.py --save`",
            "`benchmarks/results/simulated_h200_aot_202611.md`.",
            "",
            f"Rates, assumed: {assumed}.",
            "",
            "`s`: where kernels move host memory, from kernels that run beside products at no cost to kernels that have the",
            "cores to themselves; the other columns are of the latter. `idle`: the share of the step in which the cores do",
            "nothing but move host memory. `compute`: products and other kernels alone. `floor`: the busiest resource alone,",
            "all bytes by copies. `callbacks`: GB that callbacks copy. `drains`: how often the host's thread waits until the",
            "device has done everything. In the resident step of 32,768 tokens jax 0.12 recomputes more, to save memory.",
            "",
            "",
        ]
    )


def save(path: pathlib.Path, text: str, rates: hlo.Rates) -> None:
    """Put a section in its place in a file, among those of other versions."""
    old = path.read_text() if path.exists() else ""
    sections = {part.partition("\n")[0]: part for part in re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]}
    sections[text.partition("\n")[0]] = text
    path.write_text(head(rates) + "\n".join(sections[name].rstrip("\n") + "\n" for name in sorted(sections)))


def main() -> None:
    """Compile, predict and print; write a file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768], help="of a step")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rate", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="of hlo.Rates")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the HLO texts")
    parser.add_argument("--title", default="", help="of the section, beside the version")
    parser.add_argument("--save", type=pathlib.Path, help="the file to write")
    options = parser.parse_args()
    rates = dataclasses.replace(hlo.RATES["h200"], **{name: float(value) for name, value in options.rate})
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    text = section(options.modes, options.tokens, options.layers, rates, options.keep, options.title)
    print(f"\n{head(rates)}{text}")
    if options.save:
        save(options.save, text, rates)


if __name__ == "__main__":
    main()
