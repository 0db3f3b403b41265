"""The implementation of each `zerojax` command; `zerojax.options` parses their options."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.activations import MODES
from zerojax.checkpoint import CheckpointError, inspect
from zerojax.environment import report_environment
from zerojax.hf import export_hf, export_peft
from zerojax.hlo import RATES, Rates, Simulation, dumped_text, module_name, read_thunks, simulate
from zerojax.memory import (
    collective_elements,
    korthikanti_layer_bytes,
    layer_activation_bytes,
    model_state_bytes,
    state_bytes,
    transformer_params,
)
from zerojax.options import Shape, on_one_line
from zerojax.planner import NAMED, machine, probe, run_plan
from zerojax.planner import report as disk_report
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES
from zerojax.weights import export_orbax, export_safetensors


def run(options: argparse.Namespace) -> None:
    """Run one command and print its result.

    Exits with status 1 if a checkpoint is incomplete.

    Args:
      options: parsed options, from `zerojax.options.parse`.

    Raises:
      ValueError, OSError, RuntimeError: an option is wrong, or something on the machine is.
    """
    commands = {
        "env": lambda options: print(report_environment(options.swap_dir)),
        "memory": _memory,
        "simulate": lambda options: print(_simulation(options)),
        "bench-io": _bench_io,
        "machines": _machines,
        "probe": _probe,
        "plan": run_plan,
        "inspect": _inspect,
        "export": _export,
    }
    commands[options.command](options)


def _bench_io(options: argparse.Namespace) -> None:
    """Measure the disk that holds a folder."""
    print(
        disk_report(options.folder, num_bytes=int(options.gib * 2**30), num_rounds=options.rounds)
    )


def _machines(options: argparse.Namespace) -> None:
    """Print the figures of machines."""
    print("\n\n".join(str(machine(name)) for name in options.name or NAMED))


def _probe(options: argparse.Namespace) -> None:
    """Measure this machine, and write its figures to a file if `--out` names one."""
    measured = probe(options.swap_dir)
    if options.out is not None:
        measured.save(options.out)
    print(measured)


def _inspect(options: argparse.Namespace) -> None:
    """Print a checkpoint's contents."""
    parser: argparse.ArgumentParser = options.parser
    try:
        report = inspect(options.folder, verify=options.verify)
    except CheckpointError as error:
        parser.exit(1, f"zerojax inspect: {on_one_line(str(error))}\n")
    print(report.text)
    if not report.is_whole:
        parser.exit(1)


def _export(options: argparse.Namespace) -> None:
    """Write a checkpoint's weights in another format."""
    # Orbax asks JAX for its processes, which would allocate GPU memory.
    jax.config.update("jax_platforms", "cpu")
    folder = options.folder
    if options.step is not None:
        folder = os.path.join(folder, str(options.step))
    try:
        _export_folder(folder, options)
    except (ValueError, CheckpointError) as error:
        raise ValueError(_as_options(str(error))) from error


def _export_folder(folder: str, options: argparse.Namespace) -> None:
    """Export a folder in the requested format; raises the errors of the export functions."""
    if options.format == "hf":
        export_hf(
            folder,
            options.out,
            like=options.like,
            dtype=options.dtype,
            shard_bytes=options.shard_bytes,
            merge_lora=options.merge_lora,
            ema=options.ema,
        )
    elif options.format == "peft":
        export_peft(folder, options.out, like=options.like, dtype=options.dtype, ema=options.ema)
    else:
        export = export_orbax if options.format == "orbax" else export_safetensors
        export(folder, options.out, dtype=options.dtype, ema=options.ema)


def _as_options(message: str) -> str:
    """Replace the API names in an export's message by the command's options."""
    for name, option in (
        ("zerojax.export_hf(merge_lora=True)", "--format hf --merge-lora"),
        ("merge_lora=True", "--merge-lora"),
        ("zerojax.export_peft", "--format peft"),
        ("zerojax.export_hf", "--format hf"),
        ("`like`", "--like"),
    ):
        message = message.replace(name, option)
    return message


def _simulation(options: argparse.Namespace) -> Simulation:
    """Predict the step of the program that `zerojax simulate` was given.

    Raises:
      ValueError: the program, its thunks or a rate cannot be used.
      OSError: the program cannot be read.
    """
    folder = options.program if os.path.isdir(options.program) else options.thunks
    text = dumped_text(folder) if folder == options.program else _read_text(options.program)
    overrides = {}
    for field in dataclasses.fields(Rates):
        rate = getattr(options, field.name)
        if rate is not None:
            overrides[field.name] = rate
    return simulate(
        text,
        rates=dataclasses.replace(RATES[options.rates], **overrides),
        thunks=None if folder is None else read_thunks(folder, module_name(text)),
        streams=options.streams,
        kernels=options.kernels,
        graphs=options.graphs,
        callbacks=options.callbacks,
    )


def _read_text(path: str) -> str:
    """Return the text of a file.

    Raises:
      ValueError: the path is not a regular file (reading a pipe might never end), or holds no text.
      OSError: the file cannot be read.
    """
    if not path or "\0" in path:
        raise ValueError(f"PROGRAM={path!r}: the name of a file or of a folder is needed")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(
            f"{path} is not a regular file: the text of a compiled program is needed, "
            "compiled.as_text()"
        )
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text: the result of compiled.as_text() is needed"
        ) from error


def _memory(options: argparse.Namespace) -> None:
    """Print the model states per device, and a transformer's saved activations."""
    num_params = options.params
    if num_params is None:
        embedding_params = (options.vocab or 0) * options.hidden
        num_params = transformer_params(options.layers, options.hidden) + embedding_params
    # `tensor` splits the parameters between its devices; ZeRO shards what each of them has.
    device_params = -(-num_params // options.tensor)
    if options.tensor > 1:
        print(
            f"{num_params:,} parameters; each of the {options.tensor} devices of `tensor` has "
            f"{device_params:,}"
        )
    table = memory_table(
        device_params, options.shards, options.precision, options.moments, options.microbatches
    )
    print(table)
    if options.shape is not None:
        itemsize = jnp.dtype(PRECISIONS[options.precision].compute_dtype).itemsize
        modes = MODES if options.activations is None else (options.activations,)
        print(activations_table(options.shape, modes, itemsize))


def activations_table(shape: Shape, modes: Sequence[str], itemsize: int) -> str:
    """Return one line per mode with the bytes that one layer and all layers keep.

    The right half of each line is the same by Korthikanti et al.

    Args:
      shape: sizes of the transformer.
      modes: modes to list, from `zerojax.activations.MODES`.
      itemsize: bytes of one activation element.
    """
    s = shape
    if s.sequence_parallel:
        split = ", the stream split"
    elif s.partition_activations:
        split = ", what is kept split"
    else:
        split = ""
    rows = [
        f"activations of {s.layers} layers, h {s.hidden}, a {s.heads}, s {s.seq}, b {s.batch}, "
        f"tensor {s.tensor}{split}",
        f"{'mode':>10} {'a layer':>10} {'all':>10} {'a layer':>10} {'all':>10}   GiB a device; "
        "right: Korthikanti et al.",
    ]
    for mode in modes:
        sizes = (s.seq, s.batch, s.hidden, s.heads)
        settings: dict[str, Any] = {
            "tensor": s.tensor,
            "sequence_parallel": s.sequence_parallel,
            "fused_attention": s.fused_attention,
            "activations": mode,
            "itemsize": itemsize,
        }
        ours = layer_activation_bytes(
            *sizes, partition_activations=s.partition_activations, **settings
        )
        paper = korthikanti_layer_bytes(*sizes, **settings)
        num_bytes = (ours, s.layers * ours, paper, s.layers * paper)
        cells = " ".join(f"{n / 2**30:>10.3f}" for n in num_bytes)
        rows.append(f"{mode:>10} {cells}")
    return "\n".join(rows)


def memory_table(
    num_params: int, shards: int, precision: str, moments: int, num_microbatches: int
) -> str:
    """Return one line per ZeRO stage: GiB per device of each state, and elements sent per step.

    Args:
      num_params: number of parameters that are sharded.
      shards: number of devices that share the state.
      precision: key of `zerojax.precision.PRECISIONS`.
      moments: bytes of optimizer state per parameter.
      num_microbatches: number of microbatches per step.
    """
    per_param = state_bytes(precision, moments=moments, num_microbatches=num_microbatches)
    rows = [
        f"{num_params:,} parameters over {shards} devices, {precision}: {per_param.total} "
        "bytes each before sharding",
        f"{'stage':>5} {'params':>10} {'grads':>10} {'master':>10} {'opt_state':>10} "
        f"{'total':>10}   GiB a device; sent a step",
    ]
    for stage in STAGES:
        state = model_state_bytes(num_params, stage, shards, per_param)
        sent = sum(collective_elements(num_params, stage, shards, num_microbatches).values())
        cells = " ".join(
            f"{state[kind] / 2**30:>10.3f}"
            for kind in ("params", "grads", "master", "opt_state", "total")
        )
        rows.append(f"{stage:>5} {cells}   {sent / num_params:.2f} P")
    return "\n".join(rows)
