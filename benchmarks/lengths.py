r"""Compile long rows of one sequence for one H100 without having one: the bytes that a step takes.

    python benchmarks/lengths.py --save benchmarks/results/lengths_h100_aot_202611.md

Each row of the table is a step on one row of tokens. A Llama of 8 billion parameters trains
adapters over a base in 4 bits, or all parameters with their state in host memory. A mixture of 20.9
billion parameters (gpt-oss-20b) trains adapters over a base in 4 bits. Inputs of layers are in host
memory between forward and backward, and layers are computed again. MLPs and experts run on all
tokens at once, or over tiles of 8,192 tokens (`seq_tiles`). A second table has the longest rows
that `zj.plan` finds.

Bytes are those of the compiled step. Seconds are the planner's for the same settings, from the
assumed rates of an H100 (`zj.machine("h100")`): a roofline, which counts attention in blocks as
products at full speed. Nothing is measured: XLA was not run on a GPU, and does not tune its kernels
here. Needs zerojax[aot].
"""

import argparse
import dataclasses
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
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.9,
    "output_router_logits": False,
}
TILE = 8192
"""Tokens of a tile."""
HOST = "pinned_host"
HOST_BYTES = 512e9
"""Bytes of host memory that a plan may use."""
LORA = zj.Lora(rank=16, alpha=32, targets="all")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
      config: `config.json` of the model.
      of_model: arguments of `model_of`.
      fields: fields of the config.
    """

    config: dict[str, Any]
    of_model: dict[str, Any]
    fields: dict[str, Any]


CASES = {
    "8 B: LoRA, base in nf4": Case(LLAMA_8B, {"lora": LORA}, {"frozen_dtype": "nf4"}),
    "8 B: all parameters": Case(LLAMA_8B, {}, {"params": HOST, "grads": HOST, "opt_state": HOST}),
    "20 B mixture: LoRA, base in nf4": Case(GPT_OSS_20B, {"lora": LORA}, {"frozen_dtype": "nf4"}),
}
HEADS = (
    "trained",
    "tokens",
    "tiles",
    "on the device, GB",
    "on the host, GB",
    "predicted: s a step",
    "tokens/s",
    "compile, s",
)
LONGEST_HEADS = (
    "trained",
    "longest, tokens",
    "planned, GB",
    "compiled, GB",
    "on the host, GB",
    "predicted: s a step",
    "tokens/s",
    "chosen",
)
STEP = 65_536
"""Tokens whose multiples are tried for the longest sequences."""
CHOSEN = (
    "update",
    "update_on",
    "opt_state_device_fraction",
    "prefetch_distance",
    "gather_ahead",
    "num_microbatches",
)
"""Fields that a plan would choose, and that keep their defaults here."""


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", type=int, nargs="*", default=[131_072, 262_144, 524_288])
    parser.add_argument("--whole", type=int, nargs="*", default=[131_072], help="also untiled")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--only-plan", action="store_true", help="predict seconds alone")
    parser.add_argument("--longest", type=int, default=1, help="0: no search for the longest rows")
    parser.add_argument("--save", type=pathlib.Path)
    return parser.parse_args()


def build(case: str, tokens: int, tiles: int, attention: str) -> tuple[Any, ...]:
    """Return the model, config, mesh and batch of a row."""
    of_case = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(of_case.config))
        model = model_of(folder, seq_tiles=tiles, attention=attention, **of_case.of_model)  # pyright: ignore[reportArgumentType]
    config = zj.ZeroConfig(precision="bf16", activations=HOST, **of_case.fields)
    row = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    mesh = aot.gpu_mesh("h100", gpus_per_host=1)
    return model, config, mesh, {"tokens": row, "targets": row}


def predict(model: Any, config: zj.ZeroConfig, mesh: Any, batch: Any) -> zj.Plan:
    """Return the plan of a row, in which nothing is left to choose."""
    machine = dataclasses.replace(
        zj.machine("h100", devices_per_node=1), device_bytes=1e12, host_bytes=HOST_BYTES
    )  # as much memory as the row takes: the compiled bytes say whether it fits
    names = ("precision", "activations", "params", "grads", "opt_state", "frozen_dtype", *CHOSEN)
    fixed = {name: getattr(config, name) for name in names}
    return zj.plan(model, optax.adamw(1e-5), mesh, batch, machine, fixed=fixed)


def find_longest(options: argparse.Namespace, case: str) -> list[str]:
    """Return the row of the longest sequences that fit an H100 with 80 GB, by the planner."""
    machine = dataclasses.replace(
        zj.machine("h100", devices_per_node=1), host_bytes=HOST_BYTES, host_kernel=1.5e11
    )
    _, config, mesh, batch = build(case, STEP, 1, options.attention)
    fixed = {
        "precision": "bf16",
        "frozen_dtype": config.frozen_dtype,
        "moments": "float32",
        "prefetch_distance": config.prefetch_distance,
        "gather_ahead": False,
    }
    plan = zj.plan(
        lambda tokens: build(case, tokens, tokens // TILE, options.attention)[0],
        optax.adamw(1e-5),
        mesh,
        batch,
        machine,
        fixed=fixed,
        longest=STEP,
        validate=not options.only_plan,
    )
    found = plan.validated
    chosen = {name: value for name, value in plan.fields.items() if name not in fixed}
    cells = [
        case,
        f"{plan.length:,}",
        f"{plan.device_bytes / 1e9:.1f}",
        "" if found is None else f"{found.device_bytes / 1e9:.1f}",
        f"{sum(plan.bytes['pinned_host'].values()) / 1e9:.1f}",
        f"{plan.seconds:,.0f}",
        f"{plan.tokens_per_second:,.0f}",
        ", ".join(f"{name}={value}" for name, value in chosen.items() if value is not None),
    ]
    print(" | ".join(cells), flush=True)
    return cells


def as_table(heads: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table."""
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def compile_step(options: argparse.Namespace, case: str, tokens: int, tiles: int) -> list[str]:
    """Return the row of a step."""
    model, config, mesh, batch = build(case, tokens, tiles, options.attention)
    plan = predict(model, config, mesh, batch)
    cells = [case, f"{tokens:,}", f"{tiles}", "", "", f"{plan.seconds:,.0f}"]
    cells += [f"{plan.tokens_per_second:,.0f}", ""]
    if not options.only_plan:
        program = zj.build_train_step(model, optax.adamw(1e-5), config, mesh)
        start = time.perf_counter()
        compiled = program.lower(batch).compile()
        seconds = time.perf_counter() - start
        stats: Any = compiled.memory_analysis()
        device = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
        cells[3:5] = f"{device / 1e9:.1f}", f"{host / 1e9:.1f}"
        cells[7] = f"{seconds:.0f}"
    print(" | ".join(cells), flush=True)
    return cells


def main() -> None:
    """Compile each step, and print or save the table."""
    options = parse()
    rows = list[list[str]]()
    for case in options.cases:
        for tokens in options.tokens:
            if tokens in options.whole and CASES[case].config is LLAMA_8B:
                rows.append(compile_step(options, case, tokens, 1))
            rows.append(compile_step(options, case, tokens, tokens // TILE))
    longest = [find_longest(options, case) for case in options.cases if options.longest]
    text = "\n".join(
        [
            "# Long rows, compiled for one H100, 2026-11",
            "",
            f"jax {jax.__version__}. Command: `python benchmarks/lengths.py "
            f"{' '.join(sys.argv[1:])}`. Not run on a GPU.",
            "",
            "Llama of 8.03 B parameters, and a mixture of 20.9 B with 32 experts, 4 for each token "
            "(gpt-oss-20b); bf16, one row a step, adamw. Inputs of layers are in host memory until "
            "backward, which computes layers again. The bytes on the device are the compiled "
            "step's arguments and temporary memory. Seconds and tokens/s are predicted by zj.plan "
            "for the same settings at the assumed rates of an H100: a roofline, in which attention "
            "in blocks runs at the rate of large products. Windows that differ between layers are "
            "masks: attention computes, and the seconds count, all blocks before a token.",
            "",
            *as_table(HEADS, rows),
            "",
            "The longest rows that zj.plan finds for one H100 of 80 GB and "
            f"{HOST_BYTES / 1e9:g} GB of host memory, in multiples of {STEP:,} tokens, with the "
            "settings that it chooses; their steps were compiled.",
            "",
            *as_table(LONGEST_HEADS, longest),
            "",
        ]
    )
    print(text)
    if options.save:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
