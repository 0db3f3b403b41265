"""The widest MLP whose train step fits N H200s that are not there, by the number of its tiles: compiled, not run.

    python benchmarks/tiling.py --save benchmarks/results/NAME.md       # 64 GPUs, 1 to 32 tiles, about 10 minutes

A stack of MLPs h -> 4h -> h in bfloat16 at stage 3, with AdamW. The width is the largest multiple of STEP whose compiled step
takes no more than the budget on each device: arguments, what it returns beside them, and temporary memory. States take
16 x 8 h^2 bytes a layer over all devices; what tiles lower is the rest, a whole layer gathered and its gradient. Needs
zerojax[aot].
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts: the topology must not look for a driver

import argparse
import dataclasses
import datetime
import functools
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import zerojax as zj
from zerojax import aot, hlo

STEP = 4096
WIDEST = 1 << 19
TILES = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Bytes of a compiled step on each device."""

    arguments: int
    temp: int
    gathered: int

    @property
    def total(self) -> int:
        """Bytes that the step takes: donated arguments are returned in place."""
        return self.arguments + self.temp


class Net(nnx.Module):
    """MLPs on a stream, in tiles of the hidden dim."""

    def __init__(self, width: int, layers: int, tiles: int, *, rngs: nnx.Rngs) -> None:
        make = functools.partial(zj.TiledMLP, width, 4 * width, num_tiles=tiles, use_bias=False, dtype=jnp.bfloat16)
        self.mlps = nnx.List([make(rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def loss(net: Net, x: jax.Array) -> jax.Array:
    """Return the mean square of what the stack makes of x[B, S, h]."""
    return jnp.mean(jnp.square(net(x).astype(jnp.float32)))


def compile_width(width: int, tiles: int, gpus: int, layers: int, tokens: int) -> Figures:
    """Compile the step for `tokens` a device."""
    mesh = aot.gpu_mesh("h200", hosts=max(1, gpus // 8), gpus_per_host=min(8, gpus), fsdp=gpus)
    model = zj.from_flax(lambda rngs: Net(width, layers, tiles, rngs=rngs), loss)
    program = zj.build_train_step(model, optax.adamw(1e-3), zj.ZeroConfig(stage=3, precision="bf16"), mesh)
    compiled: Any = program.lower(jax.ShapeDtypeStruct((gpus, tokens, width), jnp.bfloat16)).compile()
    stats = compiled.memory_analysis()
    gathered = hlo.peak_gathered_bytes(compiled.as_text())
    return Figures(stats.argument_size_in_bytes, stats.temp_size_in_bytes, gathered)


def widest(tiles: int, gpus: int, layers: int, tokens: int, budget: float, start: int) -> tuple[int, Figures]:
    """Return the widest multiple of STEP that fits, from `start` on, which must; by doubling and halving."""
    fits, found = start, compile_width(start, tiles, gpus, layers, tokens)
    if found.total > budget:
        raise ValueError(
            f"a width of {start} takes {found.total} bytes, more than the budget of {budget:.0f}: give a larger one"
        )
    step = start
    while step >= STEP:
        wider = fits + step
        if wider <= WIDEST and (figures := compile_width(wider, tiles, gpus, layers, tokens)).total <= budget:
            fits, found = wider, figures
        else:
            step = step // 2 // STEP * STEP
    return fits, found


def main() -> None:
    """Search for every number of tiles, print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="of a device")
    parser.add_argument("--budget", type=float, default=128.0, help="GB of a device")
    parser.add_argument("--tiles", type=int, nargs="+", default=TILES)
    parser.add_argument("--save", help="write the table here; a temporary folder by default")
    options = parser.parse_args()
    lines = [
        f"# The widest MLP on {options.gpus} H200s, {datetime.date.today():%Y-%m}", "",
        f"{options.layers} MLPs h -> 4h -> h, {options.tokens} tokens a device, bf16, AdamW, stage 3; {options.budget:g} GB.",
        f"Compiled for H200s that are not there by jax {jax.__version__}, nothing run. Widths in steps of {STEP}.",
        f"Command: `python benchmarks/tiling.py --gpus {options.gpus} --layers {options.layers} --tokens {options.tokens} "
        f"--budget {options.budget:g}`", "",
        "| tiles | widest h | parameters | states GB | temporary GB | gathered at once GB |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines))
    start = STEP
    for tiles in options.tiles:
        width, found = widest(tiles, options.gpus, options.layers, options.tokens, options.budget * 1e9, start)
        row = f"| {tiles} | {width:,} | {options.layers * 8 * width**2 / 1e9:,.1f} B |"
        row += "".join(f" {n / 1e9:.2f} |" for n in (found.arguments, found.temp, found.gathered))
        lines.append(row)
        print(row, flush=True)
        start = max(STEP, width // 2 // STEP * STEP)  # more tiles may take a little more, too
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "tiling.md")
    target.write_text("\n".join(lines) + "\n")
    print(f"saved as {target}")


if __name__ == "__main__":
    main()
