"""Train the toy on two devices, saving often, until killed or done.

A test starts this script again and again.

    python killed.py FOLDER TIER LAST_STEP

    FOLDER/saved    checkpoints
    FOLDER/losses   a line per finished step, "step loss", with the loss as float.hex
    FOLDER/whole    the same for an uninterrupted run, which follows once this one ends
    FOLDER/swap     swap folder of the tier nvme

The first line that it prints is "ready STEP", once its programs are compiled: the step from which
it continues.
"""

import os
import pathlib
import sys
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)

import toys

import zerojax as zj
import zerojax.runtime.swap
from host_offload.disk import tuning

EVERY, KEPT = 2, 2


DATA = toys.batches(7, size=8)


def build(swap: pathlib.Path, tier: str) -> zj.Program:
    """Return a program in a tier, or with update="in_forward" in host memory or on a disk."""
    fields: dict[str, Any] = {"params": tier, "opt_state": tier}
    if tier.startswith("in_forward"):
        state_tier = "nvme" if tier.endswith("nvme") else "pinned_host"
        fields = dict.fromkeys(("params", "grads", "opt_state"), state_tier)
        fields |= {"update": "in_forward", "clip_norm": 1.0}
    if tier.endswith("nvme"):
        fields["swap_dir"] = str(swap)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(
        toys.layered(), toys.optimizer(), zj.ZeroConfig(stage=3, **fields), mesh
    )


def batch_of(step: int) -> Any:
    """Return the batch of the step with this number; steps count from 1."""
    return DATA[step % len(DATA)]


def train(
    program: zj.Program, state: zj.TrainState, last: int, log: int, ckpt: zj.Checkpointer | None
) -> None:
    """Train up to a step, logging each loss, and saving if there is a checkpointer."""
    for step in range(int(state.step) + 1, last + 1):
        state, metrics = program.step(state, batch_of(step))
        os.write(log, f"{step} {float(metrics['loss']).hex()}\n".encode())
        if ckpt is not None:
            is_saved = ckpt.save(program, state)
            if is_saved and program.config.update == "in_forward" and step % (2 * EVERY) == 0:
                state = program.settle(state)
                ckpt.save(program, state)  # in place of the checkpoint with the gradients, if any


def main(folder: pathlib.Path, tier: str, last: int) -> None:
    """Continue from the last checkpoint, then train all steps again from the first.

    Both runs use the same program.
    """
    zerojax.runtime.swap.tune = lambda _: tuning.DEFAULT  # a probe takes a second
    (folder / "swap").mkdir(exist_ok=True)
    log = os.open(folder / "losses", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    ckpt = zj.Checkpointer(folder / "saved", max_to_keep=KEPT, save_interval_steps=EVERY)
    with build(folder / "swap", tier) as program, ckpt:
        for is_compiled in (False, True):
            state = ckpt.restore(program) if ckpt.all_steps() else program.init(jax.random.key(0))
            start = int(state.step)
            if not is_compiled:
                program.step(state, batch_of(start + 1))
        print(f"ready {start}", flush=True)
        train(program, state, last, log, ckpt)
        ckpt.wait()
        whole = os.open(folder / "whole", os.O_WRONLY | os.O_CREAT, 0o600)
        train(program, program.init(jax.random.key(0)), last, whole, None)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
