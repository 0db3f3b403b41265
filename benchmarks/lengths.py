r"""Compile long rows of one sequence for one H100 without having one: the bytes that a step takes.

    python benchmarks/lengths.py --save benchmarks/results/lengths_h100_aot_202611.md

Each row of the table is a step of a Llama of 8 billion parameters on one row of tokens: adapters
over a base in 4 bits, or all parameters with their state in host memory. Inputs of layers are in
host memory between forward and backward, and layers are computed again. MLPs run on all tokens at
once, or over tiles of 8,192 (`seq_tiles`). Nothing is measured: XLA was not run on a GPU, and does
not tune its kernels here. Needs zerojax[aot].
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import zerojax as zj
from zerojax import aot
from zerojax.hf import model_of

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 2**20,
    "rms_norm_eps": 1e-5,
}
TILE = 8192
"""Tokens of a tile."""
HOST = "pinned_host"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LoRA, base in nf4": (
        {"lora": zj.Lora(rank=16, alpha=32, targets="all")},
        {"frozen_dtype": "nf4"},
    ),
    "all parameters": ({}, {"params": HOST, "grads": HOST, "opt_state": HOST}),
}
HEADS = ("trained", "tokens", "tiles", "on the device, GB", "on the host, GB", "compile, s")


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[131_072, 262_144, 524_288])
    parser.add_argument("--whole", type=int, nargs="*", default=[131_072], help="also untiled")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--save", type=pathlib.Path)
    return parser.parse_args()


def compile_step(options: argparse.Namespace, case: str, tokens: int, tiles: int) -> list[str]:
    """Return the row of a step."""
    of_model, fields = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
        model = model_of(folder, seq_tiles=tiles, attention=options.attention, **of_model)
    config = zj.ZeroConfig(precision="bf16", activations=HOST, **fields)
    mesh = aot.gpu_mesh("h100", gpus_per_host=1)
    program = zj.build_train_step(model, optax.adamw(1e-5), config, mesh)
    row = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    start = time.perf_counter()
    compiled = program.lower({"tokens": row, "targets": row}).compile()
    seconds = time.perf_counter() - start
    stats: Any = compiled.memory_analysis()
    device = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    cells = [case, f"{tokens:,}", f"{tiles}", f"{device / 1e9:.1f}", f"{host / 1e9:.1f}"]
    cells.append(f"{seconds:.0f}")
    print(" | ".join(cells), flush=True)
    return cells


def main() -> None:
    """Compile each step, and print or save the table."""
    options = parse()
    rows = list[list[str]]()
    for case in options.cases:
        for tokens in options.tokens:
            if tokens in options.whole:
                rows.append(compile_step(options, case, tokens, 1))
            rows.append(compile_step(options, case, tokens, tokens // TILE))
    table = ["| " + " | ".join(row) + " |" for row in (HEADS, ["---"] * len(HEADS), *rows)]
    text = "\n".join(
        [
            "# Long rows, compiled for one H100, 2026-11",
            "",
            f"jax {jax.__version__}. Command: `python benchmarks/lengths.py "
            f"{' '.join(sys.argv[1:])}`. Not run on a GPU.",
            "",
            "Llama of 8.03 B parameters, bf16, one row a step, adamw. Inputs of layers are in host "
            "memory until backward, which computes layers again. The bytes on the device are the "
            "compiled step's arguments and temporary memory.",
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
