"""Compile a GPT's train step for N H200s, without having any, and report its memory per device.

    # 3.3 B parameters for 64 GPUs, about 2 minutes
    python benchmarks/memory.py
    python benchmarks/memory.py --save benchmarks/results/NAME.md

For each stage and form of the model, the table shows the bytes of the compiled step's arguments and
its temporary bytes, the peak of gathered parameters that are live at the same time, and the
elements that collectives move, over the number of parameters. The baseline is plain GSPMD: the same
loss and state, parameters sharded as at stage 3, and collectives chosen by XLA. Needs zerojax[aot].
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts: the topology must not look for a driver

import argparse
import datetime
import pathlib
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import gpt
import jax
import jax.numpy as jnp
import optax

import zerojax as zj
from zerojax import aot, hlo
from zerojax.optim import build_update
from zerojax.resident import build_grads, plain_objective

FORMS = {"scan": gpt.layered_gpt, "separate blocks": gpt.unrolled_gpt}


def compile_case(
    c: gpt.GPTConfig, form: str, gpus: int, *, plain: bool = False, **config: Any
) -> dict[str, Any]:
    """Compile one train step and return its figures."""
    mesh = aot.gpu_mesh("h200", hosts=max(1, gpus // 8), gpus_per_host=min(8, gpus))
    tx = optax.adamw(1e-3)
    program = zj.build_train_step(
        FORMS[form](c), tx, zj.ZeroConfig(precision="bf16", clip_norm=1.0, **config), mesh
    )
    tokens = jax.ShapeDtypeStruct((gpus, c.seq), jnp.int32)
    batch = program.abstract_batch({"tokens": tokens, "targets": tokens})
    start = time.monotonic()
    if plain:
        layout = program.layout
        grads = build_grads(program.model, layout, plain_objective(program.model, layout))
        update = build_update(tx, layout)
        step = jax.jit(
            lambda state, batch: update(state, *grads(state, batch)[:2]),
            donate_argnums=0,
            out_shardings=(layout.shardings, None),
        )
        with jax.set_mesh(mesh):
            compiled: Any = step.lower(layout.abstract_state, batch).compile()
    else:
        compiled = program.lower(batch).compile()
    seconds = time.monotonic() - start
    text, stats = compiled.as_text(), compiled.memory_analysis()
    moved = hlo.collective_bytes(text, least_bytes=1024)
    return {
        "arguments": stats.argument_size_in_bytes,
        "account": program.memory(batch).argument_bytes,
        "temp": stats.temp_size_in_bytes,
        "gathered": hlo.peak_gathered_bytes(text),
        "moved": {op: n / 2 / c.num_params for op, n in moved.items() if n > 1e-3 * c.num_params},
        "seconds": seconds,
    }


def main() -> None:
    """Compile every case, and print and save the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--save", help="file for the table; in a temporary folder by default")
    options = parser.parse_args()
    c = gpt.GPTConfig(
        layers=options.layers, hidden=options.hidden, heads=options.hidden // 128,
        seq=512, vocab=4096,
        tied=False, dtype=jnp.bfloat16, attention="xla",
    )  # fmt: skip
    layer = 2 * (12 * c.hidden**2 + 13 * c.hidden)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("plain GSPMD", form, {"stage": 3, "plain": True}) for form in FORMS
    ]
    cases += [(f"stage {stage}", form, {"stage": stage}) for stage in range(4) for form in FORMS]
    cases += [("stage 3, remat", form, {"stage": 3, "activations": "remat"}) for form in FORMS]
    words = " ".join(["python benchmarks/memory.py", *sys.argv[1:]])
    lines = [
        f"# Memory of a train step compiled for {options.gpus} H200s, "
        f"{datetime.date.today():%Y-%m}",
        "",
        f"GPT of {c.num_params / 1e9:.2f} B parameters, {c.layers} layers x {c.hidden}, "
        "bf16 with float32 masters, AdamW, "
        f"one sequence of {c.seq} a GPU. "
        f"Compiled without a GPU and not run; jax {jax.__version__}.",
        f"Command: `{words}`",
        "",
        f"One layer is {layer / 2**20:.0f} MiB of bf16. Elements moved are over P: "
        "ZeRO's closed form is 2 P for stages 0 "
        "to 2, 3 P for stage 3 (an all_reduce counts twice).",
        "",
        "| program | layers as | arguments GiB | over account | temp GiB "
        "| gathered at once, layers | moved | compile s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name, form, fields in cases:
        r = compile_case(c, form, options.gpus, **fields)
        moved = ", ".join(f"{op} {n:.2f}" for op, n in sorted(r["moved"].items()))
        whole = f"{r['gathered'] / layer:.2f}" if fields["stage"] == 3 else "stored whole"
        lines.append(
            f"| {name} | {form} | {r['arguments'] / 2**30:.3f} "
            f"| {r['arguments'] / r['account']:.4f} | {r['temp'] / 2**30:.2f} "
            f"| {whole} | {moved} | {r['seconds']:.1f} |"
        )
        print(lines[-1], flush=True)
    target = pathlib.Path(options.save or pathlib.Path(tempfile.mkdtemp()) / "memory.md")
    target.write_text("\n".join(lines) + "\n")
    print(f"saved as {target}")


if __name__ == "__main__":
    main()
