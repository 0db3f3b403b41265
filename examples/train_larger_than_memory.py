"""Train a GPT whose training states are several times the memory that this process may use.

    # 9.5 GB of states in 3 GB of memory:
    python examples/train_larger_than_memory.py --swap-dir /mnt/disk

The script first limits its own memory with RLIMIT_AS: the kernel then refuses every allocation that
would extend the process's address space beyond the limit, including libraries, buffers and XLA's
temporaries, however much memory the machine has. Then it trains layer by layer, with parameters,
gradients, optimizer state and activations on disk. `--tier device` keeps everything in memory
instead, and proves that the limit works: training fails if the states are larger.

RLIMIT_AS is the strictest limit that Linux has for one process. XLA on a CPU can work under it
because it reserves no address space in advance. Some address space counts although it is not
memory: libraries (0.8 GB with jax 0.10), thread stacks (8 MB each; XLA has several threads per
core) and malloc's arenas, which reserve 64 MB for each allocating thread; the script allows two
arenas. RLIMIT_DATA counts neither libraries nor arenas, and so would allow more.
"""

import ctypes
import dataclasses
import errno
import mmap
import pathlib
import resource
import sys
import time
from typing import Literal

import gpt
import jax
import jax.numpy as jnp
import optax
import tyro
from text_data import batches, load_corpus

import zerojax as zj

GB = 1e9
_M_ARENA_MAX = -8  # malloc.h


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Train a GPT whose training states are several times the memory that this process may use.

    Attributes:
      swap_dir: existing folder on a fast local disk, with space for the states.
      limit_gb: address space that this process may use, in 1e9 bytes.
      layers: number of blocks.
      hidden: width of the stream.
      heads: number of attention heads.
      seq: tokens per sequence.
      batch_size: sequences per step, over all devices.
      steps: number of train steps; the first step compiles.
      devices: number of devices to simulate on the CPU.
      update: "in_backward" updates a layer as soon as its gradient is computed; "after_backward"
        first stores all gradients.
      precision: precision of compute and of stored parameters.
      prefetch_distance: number of layers to read ahead.
      io: disk reader.
      tier: tier of parameters, gradients, optimizer state and activations.
      learning_rate: learning rate of AdamW.
    """

    swap_dir: str
    limit_gb: float = 3.0
    layers: int = 112
    hidden: int = 768
    heads: int = 12
    seq: int = 128
    batch_size: int = 2
    steps: int = 4
    devices: int = 1
    update: Literal["in_backward", "after_backward"] = "in_backward"
    precision: Literal["fp32", "bf16"] = "fp32"
    prefetch_distance: int = 1
    io: Literal["direct", "tensorstore"] = "direct"
    tier: Literal["nvme", "device"] = "nvme"
    learning_rate: float = 2e-6


def limit_memory(num_bytes: int) -> bool:
    """Limit this process's address space; return whether the kernel enforces the limit.

    macOS does not.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 2)
    try:
        resource.setrlimit(
            resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1])
        )
        mmap.mmap(-1, num_bytes).close()  # exceeds the limit together with the existing mappings
    except ValueError:  # this system has no such limit, or a lower one
        return False
    except OSError as error:
        return error.errno == errno.ENOMEM
    return False


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident memory, in bytes."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start at the parent process's peak
        return next(
            int(line.split()[1]) << 10
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM:")
        )
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def build(options: Options) -> tuple[gpt.GPTConfig, zj.Program]:
    """Build the GPT and its train step, with everything in one tier."""
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[options.precision]
    c = gpt.GPTConfig(
        seq=options.seq,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        dtype=dtype,
    )
    tier = options.tier
    config = zj.ZeroConfig(
        params=tier,
        grads=tier,
        opt_state=tier,
        activations="nvme" if tier == "nvme" else "remat",
        update=options.update,
        precision=options.precision,
        prefetch_distance=options.prefetch_distance,
        swap_dir=options.swap_dir,
        io=options.io,
    )
    mesh = zj.make_mesh(fsdp=options.devices)
    tokens = jax.ShapeDtypeStruct((options.batch_size, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return c, zj.build_train_step(
        gpt.layered_gpt(c), optax.adamw(options.learning_rate, b2=0.95), config, mesh, batch=batch
    )


def main(options: Options) -> None:
    """Limit the memory, train, and print memory and speed."""
    limit = int(options.limit_gb * GB)
    is_limited = limit_memory(limit)
    # Set this before the first use of a device, which starts the backend.
    jax.config.update("jax_num_cpu_devices", options.devices)
    c, program = build(options)
    with program:
        train(options, c, program, limit if is_limited else None)


def train(options: Options, c: gpt.GPTConfig, program: zj.Program, limit: int | None) -> None:
    """Train, and print memory and speed of each step."""
    tokens = jax.ShapeDtypeStruct((options.batch_size, c.seq), jnp.int32)
    report = program.memory({"tokens": tokens, "targets": tokens})
    # The report counts one device.
    states = report.model_state_bytes * options.devices
    buffers = report.tiers["pinned_host"].get("buffers", 0) * options.devices
    say(
        f"{c.num_params:,} parameters in {c.layers} layers x {c.hidden}, {options.precision}, "
        f"update {options.update}"
    )
    if limit is None:
        say(
            f"states {states / GB:.2f} GB; NO limit: this system does not enforce RLIMIT_AS, "
            "so this run proves nothing"
        )
    else:
        say(
            f"states {states / GB:.2f} GB = {states / limit:.1f} x the limit of "
            f"{limit / GB:.2f} GB (RLIMIT_AS)"
        )
    say(f"buffers between disk and devices {buffers / GB:.2f} GB")

    text, _ = load_corpus(None)
    data = batches(text, c.seq, options.batch_size, seed=0)
    since = time.monotonic()
    state = program.init(jax.random.key(0))
    say(f"init     {time.monotonic() - since:6.1f} s  {told_peak()}")
    for step in range(1, options.steps + 1):
        since = time.monotonic()
        state, metrics = program.step(state, next(data))
        loss = float(metrics["loss"])  # waits for the step
        seconds = time.monotonic() - since
        line = f"step {step:>3} {seconds:6.1f} s  loss {loss:.4f}  {told_peak()}"
        if "swap_stall_seconds" in metrics:
            moved = float(metrics["swap_read_bytes"]) + float(metrics["swap_write_bytes"])
            stall = float(metrics["swap_stall_seconds"]) / (options.devices * seconds)
            line += (
                f"  stall {100 * stall:.0f} %  {moved / GB:.2f} GB at {moved / seconds / GB:.2f} "
                "GB/s"
            )
        say(line + ("  (compiled)" if step == 1 else ""))
    say(f"peak resident {peak_resident_bytes() / GB:.2f} GB, states {states / GB:.2f} GB")


def told_peak() -> str:
    """Return the peak of resident memory so far, in words."""
    return f"peak resident {peak_resident_bytes() / GB:.2f} GB"


def say(line: str) -> None:
    """Print a line immediately, because a step takes long."""
    print(line, flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
