"""The `zerojax` command: closed forms on the command line, what a disk gives, and what a checkpoint holds.

zerojax memory --params 7.5e9 --shards 64 --precision bf16
zerojax bench-io FOLDER
zerojax inspect CHECKPOINTS
zerojax export CHECKPOINTS OUT --format safetensors --dtype bfloat16
"""

import argparse
import os
from collections.abc import Sequence

import jax

from host_offload.disk import SwapError
from zerojax.checkpoint import CheckpointError, NoCheckpointError, inspect
from zerojax.memory import collective_elements, model_state_bytes, state_bytes
from zerojax.planner import report as disk_report
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES
from zerojax.weights import DTYPES, export_orbax, export_safetensors

_EXPORTS = {"orbax": export_orbax, "safetensors": export_safetensors}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="zerojax", description="ZeRO in JAX: bytes of model states and collectives, of disks, and of checkpoints"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    states = commands.add_parser("memory", help="model states on each device, and elements moved a step, by ZeRO stage")
    states.add_argument("--params", type=float, required=True, help="parameters of the model, such as 7.5e9")
    states.add_argument("--shards", type=int, required=True, help="devices that share the state (the mesh axis fsdp)")
    states.add_argument("--precision", choices=list(PRECISIONS), default="bf16")
    states.add_argument("--moments", type=int, default=8, help="bytes of optimizer state for one parameter; Adam: 8")
    states.add_argument("--microbatches", type=int, default=1)
    disk = commands.add_parser("bench-io", help="bandwidth of a folder's disk, and the models and step times that it supports")
    disk.add_argument("folder", help="an existing folder, such as a swap_dir; only a small file with the settings found stays")
    disk.add_argument("--gib", type=float, default=1.0, help="GiB that each reader writes and reads in a round")
    disk.add_argument("--rounds", type=int, default=3, help="the median of so many is shown")
    checkpoints = commands.add_parser(
        "inspect", help="what a checkpoint holds, and whether it is whole: exit status 0, or 1 if it is not, 2 if it is none"
    )
    checkpoints.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    checkpoints.add_argument("--verify", action="store_true", help="read all bytes and compare their checksums")
    weights = commands.add_parser("export", help="the weights of a checkpoint, in Orbax's own format or as a safetensors file")
    weights.add_argument("folder", help="a Checkpointer's directory, or the folder of one step")
    weights.add_argument("out", help="what to write; nothing may be there")
    weights.add_argument("--format", choices=list(_EXPORTS), required=True)
    weights.add_argument("--dtype", choices=list(DTYPES), default="float32")
    weights.add_argument(
        "--ema", action="store_true", help="the averages that zerojax.Ema keeps of the weights instead of these"
    )
    weights.add_argument("--step", type=int, help="of a directory; without it, its newest whole step")
    options = parser.parse_args(arguments)
    if options.command == "inspect":
        try:
            report = inspect(options.folder, verify=options.verify)
        except NoCheckpointError as error:
            parser.exit(2, f"zerojax inspect: {error}\n")
        except CheckpointError as error:
            parser.exit(1, f"zerojax inspect: {error}\n")
        print(report.text)
        if not report.is_whole:
            parser.exit(1)
        return
    if options.command == "export":
        jax.config.update("jax_platforms", "cpu")  # Orbax asks JAX for its processes, which would take memory of GPUs
        folder = options.folder if options.step is None else os.path.join(options.folder, str(options.step))
        try:
            _EXPORTS[options.format](folder, options.out, dtype=options.dtype, ema=options.ema)
        except (ValueError, CheckpointError) as error:
            parser.exit(1, f"zerojax export: {error}\n")
        return
    if options.command == "bench-io":
        if options.gib <= 0 or options.rounds < 1:
            parser.error("--gib must be more than 0, and --rounds at least 1")
        try:
            print(disk_report(options.folder, num_bytes=int(options.gib * 2**30), num_rounds=options.rounds))
        except (ValueError, SwapError) as error:
            parser.exit(1, f"zerojax bench-io: {error}\n")
        return
    # The command that is left is `memory`.
    if options.params < 1 or options.shards < 1 or options.microbatches < 1 or options.moments < 0:
        parser.error("--params, --shards and --microbatches must be at least 1, and --moments at least 0")
    print(memory_table(int(options.params), options.shards, options.precision, options.moments, options.microbatches))


def memory_table(num_params: int, shards: int, precision: str, moments: int, num_microbatches: int) -> str:
    """Return one line for each stage."""
    per_param = state_bytes(precision, moments=moments, num_microbatches=num_microbatches)
    rows = [
        f"{num_params:,} parameters over {shards} devices, {precision}: {per_param.total} bytes each before sharding",
        f"{'stage':>5} {'params':>10} {'grads':>10} {'master':>10} {'opt_state':>10} {'total':>10}   GiB a device; sent a step",
    ]
    for stage in STAGES:
        state = model_state_bytes(num_params, stage, shards, per_param)
        sent = sum(collective_elements(num_params, stage, shards, num_microbatches).values())
        cells = " ".join(f"{state[kind] / 2**30:>10.3f}" for kind in ("params", "grads", "master", "opt_state", "total"))
        rows.append(f"{stage:>5} {cells}   {sent / num_params:.2f} P")
    return "\n".join(rows)
