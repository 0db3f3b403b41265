"""Checkpoints of a toy on four devices, saved by several processes together or by one alone."""

import contextlib
import errno
import os
import pathlib
import tempfile
import time
from typing import Any

import jax
import pytest
import toys

import zerojax as zj
from zerojax.checkpoint import save as saving

STEPS = 3


class Counter:
    """An iterator over this process's part of the batches; positions differ between processes."""

    def __init__(self) -> None:
        self.position = 10 * jax.process_index()
        size = toys.BATCH // jax.process_count()
        part = slice(jax.process_index() * size, (jax.process_index() + 1) * size)
        self._data = [
            {k: v[part] if getattr(v, "ndim", 0) else v for k, v in batch.items()}
            for batch in toys.batches(5)
        ]

    def __next__(self) -> Any:
        self.position += 1
        return self._data[self.position % 10 - 1]

    def get_state(self) -> int:
        return self.position

    def set_state(self, position: int) -> None:
        self.position = position


def build(folder: pathlib.Path, tier: str) -> zj.Program:
    fields: dict[str, Any] = {"params": tier, "opt_state": tier} | (
        {"swap_dir": str(folder)} if tier == "nvme" else {}
    )
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    return zj.build_train_step(
        toys.layered(), toys.optimizer(), zj.ZeroConfig(stage=3, **fields), mesh
    )


def losses_of(
    program: zj.Program, state: zj.TrainState, data: Counter, steps: int
) -> tuple[list[float], zj.TrainState]:
    return toys.run(program, state, [next(data) for _ in range(steps)])


def save(program: zj.Program, directory: pathlib.Path) -> list[float]:
    """Train, save after STEPS steps together with the other processes, and return all losses."""
    data = Counter()
    with zj.Checkpointer(directory) as ckpt:
        before, state = losses_of(program, program.init(jax.random.key(0)), data, STEPS)
        assert ckpt.save(program, state, data=data)
        after, _ = losses_of(program, state, data, 2)
    return before + after


def restore(program: zj.Program, directory: pathlib.Path, again: pathlib.Path) -> list[float]:
    """Restore a checkpoint written by one process, save it again, and return the next losses."""
    data = Counter()
    with zj.Checkpointer(directory) as ckpt:
        with pytest.raises(zj.IteratorError, match="this run has 2"):
            ckpt.restore(program, data=data)
        state = ckpt.restore(program)
    data.position += STEPS
    with zj.Checkpointer(again) as ckpt:
        ckpt.save(program, state)
        return losses_of(program, state, data, 2)[0]


class Broken(Counter):
    def get_state(self) -> int:
        if jax.process_index() == 1:
            raise ZeroDivisionError("no position")
        return 0


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_the_way(directory: pathlib.Path) -> Any:
    """Return a `Saving.finish` that first puts an obstacle where the checkpoint is to appear."""
    finish = saving.Saving.finish

    def obstructed(self: saving.Saving) -> None:
        finish(self)
        (directory / str(STEPS)).mkdir()
        (directory / str(STEPS) / "obstacle").touch()

    return obstructed


def fail(program: zj.Program, directory: pathlib.Path, me: int) -> dict[str, Any]:
    """Make a save fail in one process at each point of a save, and return what every process saw.

    It fails while the step waits, during the steps, and where the checkpoint is to appear.
    """
    found: dict[str, Any] = {"left": {}}
    with zj.Checkpointer(directory) as ckpt:
        _, state = losses_of(program, program.init(jax.random.key(0)), Counter(), STEPS)

        def tried(what: str, data: Any = None) -> None:
            start, where = time.monotonic(), "save"
            try:
                ckpt.save(program, state, data=data)
                where = "wait"
                ckpt.wait()
            except (RuntimeError, ArithmeticError) as error:
                found[what] = [
                    where,
                    type(error).__name__,
                    str(error),
                    getattr(error, "errno", None),
                ]
            assert time.monotonic() - start < 20
            with contextlib.suppress(FileNotFoundError):
                (directory / str(STEPS) / "obstacle").unlink()
                (directory / str(STEPS)).rmdir()
            left = [path.name for path in directory.iterdir() if path.is_dir()]
            found["left"][what] = left if me == 0 else []

        tried("copying", Broken())
        with pytest.MonkeyPatch.context() as patch:
            if me == 0:
                patch.setattr(tempfile, "TemporaryFile", disk_full)
            tried("making")
        with pytest.MonkeyPatch.context() as patch:
            if me == 1:
                patch.setattr(saving, "write_manifest", disk_full)
            tried("writing")
        with pytest.MonkeyPatch.context() as patch:
            if me == 0:
                patch.setattr(saving.Saving, "finish", in_the_way(directory))
            tried("committing")
        ckpt.save(program, state)
        found["after"] = ckpt.all_steps()
    return found


def pass_over(program: zj.Program, directory: pathlib.Path, me: int) -> int:
    """Return the restored step if a record of the newest checkpoint is damaged.

    One process reads the damaged record.
    """
    with zj.Checkpointer(directory) as ckpt:
        data = Counter()
        _, state = losses_of(program, program.init(jax.random.key(0)), data, 1)
        ckpt.save(program, state)
        _, state = losses_of(program, state, data, 1)
        ckpt.save(program, state)
        ckpt.wait()
        if me == 0:
            record = next((directory / "2" / "state").rglob("c.1.0"))
            record.write_bytes(bytes([record.read_bytes()[0] ^ 1]) + record.read_bytes()[1:])
        return int(ckpt.restore(program).step)


def work(folder: pathlib.Path, me: int, tier: str) -> dict[str, Any]:
    """Return the findings of one process of two."""
    found: dict[str, Any] = {}
    with build(folder, tier) as program:
        found["trained"] = save(program, folder / "saved")
        found["restored"] = restore(program, folder.parent / "one", folder / "again")
        with zj.Checkpointer(folder / "saved") as ckpt:
            ckpt.restore(program, data=(data := Counter()))
        found["position"] = data.position
        found |= fail(program, folder / "failing", me)
        found["passed over"] = pass_over(program, folder / "damaged", me)
    return found
