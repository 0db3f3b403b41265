"""Find the widest MLP whose train step fits on N H200s, by number of tiles, without a GPU.

    # 64 GPUs, 1 to 32 tiles, about 10 minutes
    python benchmarks/tiling.py --save benchmarks/results/NAME.md
    # one GPU, its states in host memory
    python benchmarks/tiling.py --stream --gpus 1

The model is a stack of MLPs h -> 4h -> h in bfloat16 at stage 3, with AdamW. The width is the
largest multiple of STEP whose compiled step stays within the budget on each device, counting
arguments and temporary memory. States take 16 x 8 h^2 bytes per layer over all devices; tiles
reduce the rest, a gathered layer and its gradient. With --stream the layers' states are in host
memory, 14 x 8 h^2 bytes per layer, and are updated in backward; tiles then reduce nearly all of the
device's memory. Needs zerojax[aot].
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
    """Bytes of a compiled step on each device.

    Attributes:
      arguments: bytes of arguments.
      temp: bytes of temporary memory.
      gathered: peak bytes of gathered parameters.
    """

    arguments: int
    temp: int
    gathered: int

    @property
    def total(self) -> int:
        """Bytes that the step takes; results reuse the donated arguments."""
        return self.arguments + self.temp


class Block(nnx.Module):
    """Layer of a streamed stack: a normalized MLP, tiled along its hidden dim."""

    def __init__(self, width: int, tiles: int, *, rngs: nnx.Rngs) -> None:
        """Make a layer for a stream of `width`, with `tiles` tiles."""
        self.norm = nnx.RMSNorm(width, dtype=jnp.bfloat16, rngs=rngs)
        self.mlp = zj.TiledMLP(
            width, 4 * width, num_tiles=tiles, use_bias=False, dtype=jnp.bfloat16, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the layer's output for x[B, S, h]."""
        return x + self.mlp(self.norm(x))


class Scale(nnx.Module):
    """Embedding or head of a streamed stack: it scales its input."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        """Make a scale of ones."""
        del rngs
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x in bfloat16, scaled."""
        return x.astype(jnp.bfloat16) * self.scale[...].astype(jnp.bfloat16)


STREAM = {"params": "pinned_host", "opt_state": "pinned_host", "update": "in_backward"}
"""Default tiers of a streamed stack's states, and its update."""


def streamed_program(
    width: int, tiles: int, gpus: int, layers: int, tokens: int, **fields: Any
) -> tuple[zj.Program, jax.ShapeDtypeStruct]:
    """Return a streamed program of MLPs h -> 4h -> h, and the shape of its batch.

    The batch has `tokens` tokens per device; `fields` are further fields of the ZeroConfig.
    """
    mesh = aot.gpu_mesh("h200", hosts=max(1, gpus // 8), gpus_per_host=min(8, gpus), fsdp=gpus)
    model = zj.from_flax(
        embed=lambda rngs: Scale(width, rngs=rngs),
        block=lambda rngs: Block(width, tiles, rngs=rngs),
        head=lambda rngs: Scale(width, rngs=rngs),
        num_layers=layers,
        loss=lambda head, embed, x, batch: jnp.mean(jnp.square(head(x).astype(jnp.float32))),
    )
    config = zj.ZeroConfig(stage=3, precision="bf16", activations="remat", **fields)
    batch = jax.ShapeDtypeStruct((gpus, tokens, width), jnp.bfloat16)
    return zj.build_train_step(model, optax.adamw(1e-3), config, mesh), batch


class Net(nnx.Module):
    """Stack of residual MLPs, tiled along their hidden dim."""

    def __init__(self, width: int, layers: int, tiles: int, *, rngs: nnx.Rngs) -> None:
        """Make `layers` MLPs for a stream of `width`, with `tiles` tiles each."""
        make = functools.partial(
            zj.TiledMLP, width, 4 * width, num_tiles=tiles, use_bias=False, dtype=jnp.bfloat16
        )
        self.mlps = nnx.List([make(rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the stack's output for x[B, S, h]."""
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def loss(net: Net, x: jax.Array) -> jax.Array:
    """Return the mean square of the stack's output for x[B, S, h]."""
    return jnp.mean(jnp.square(net(x).astype(jnp.float32)))


def compile_width(
    width: int, tiles: int, gpus: int, layers: int, tokens: int, stream: bool = False
) -> Figures:
    """Compile a step with `tokens` tokens per device, and return its bytes."""
    if stream:
        program, batch = streamed_program(width, tiles, gpus, layers, tokens, **STREAM)
    else:
        mesh = aot.gpu_mesh("h200", hosts=max(1, gpus // 8), gpus_per_host=min(8, gpus), fsdp=gpus)
        model = zj.from_flax(lambda rngs: Net(width, layers, tiles, rngs=rngs), loss)
        program = zj.build_train_step(
            model, optax.adamw(1e-3), zj.ZeroConfig(stage=3, precision="bf16"), mesh
        )
        batch = jax.ShapeDtypeStruct((gpus, tokens, width), jnp.bfloat16)
    compiled: Any = program.lower(batch).compile()
    stats = compiled.memory_analysis()
    gathered = hlo.peak_gathered_bytes(compiled.as_text())
    return Figures(stats.argument_size_in_bytes, stats.temp_size_in_bytes, gathered)


def widest(
    tiles: int, gpus: int, layers: int, tokens: int, budget: float, start: int, stream: bool = False
) -> tuple[int, Figures]:
    """Return the largest multiple of STEP that fits the budget, and its bytes.

    The search starts at `start` and widens by a step that is halved when a width does not fit.

    Raises:
      ValueError: if `start` does not fit.
    """
    fits, found = start, compile_width(start, tiles, gpus, layers, tokens, stream)
    if found.total > budget:
        raise ValueError(
            f"a width of {start} takes {found.total} bytes, more than the budget of {budget:.0f}: "
            "give a larger one"
        )
    step = start
    while step >= STEP:
        wider = fits + step
        if (
            wider <= WIDEST
            and (figures := compile_width(wider, tiles, gpus, layers, tokens, stream)).total
            <= budget
        ):
            fits, found = wider, figures
        else:
            step = step // 2 // STEP * STEP
    return fits, found


def main() -> None:
    """Search for every number of tiles, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per device")
    parser.add_argument("--budget", type=float, default=128.0, help="GB per device")
    parser.add_argument(
        "--stream", action="store_true", help="states in host memory, updated in backward"
    )
    parser.add_argument("--tiles", type=int, nargs="+", default=TILES)
    parser.add_argument("--save", help="file for the table; in a temporary folder by default")
    options = parser.parse_args()
    where = "states in host memory, updated in backward" if options.stream else "stage 3"
    gpus = "one H200" if options.gpus == 1 else f"{options.gpus} H200s"
    lines = [
        f"# The widest MLP on {gpus}{', streamed' if options.stream else ''}, "
        f"{datetime.date.today():%Y-%m}", "",
        f"{options.layers} MLPs h -> 4h -> h, {options.tokens} tokens a device, bf16, AdamW, "
        f"{where}; {options.budget:g} GB.",
        f"Compiled for H200s that are not there by jax {jax.__version__}, nothing run. "
        f"Widths in steps of {STEP}.",
        f"Command: `python benchmarks/tiling.py --gpus {options.gpus} "
        f"--layers {options.layers} --tokens {options.tokens} "
        f"--budget {options.budget:g}{' --stream' if options.stream else ''}`", "",
        "| tiles | widest h | parameters | arguments GB | temporary GB | gathered at once GB |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines))
    start = STEP
    for tiles in options.tiles:
        width, found = widest(
            tiles,
            options.gpus,
            options.layers,
            options.tokens,
            options.budget * 1e9,
            start,
            options.stream,
        )
        row = f"| {tiles} | {width:,} | {options.layers * 8 * width**2 / 1e9:,.1f} B |"
        row += "".join(f" {n / 1e9:.2f} |" for n in (found.arguments, found.temp, found.gathered))
        lines.append(row)
        print(row, flush=True)
        start = max(STEP, width // 2 // STEP * STEP)  # more tiles may also take slightly more
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "tiling.md")
    target.write_text("\n".join(lines) + "\n")
    print(f"saved as {target}")


if __name__ == "__main__":
    main()
