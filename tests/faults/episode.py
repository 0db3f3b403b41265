"""A training run with a failing disk: its operations, and what must hold after each.

`runs.py` describes the checks.
"""

import contextlib
import faulthandler
import os
import pathlib
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import shim
from matrix_of_checkpoints import numbers
from trained import BEST, DATA, EXPORTS, FIRST, KEY, LAST, Found, Toy, require_same, weights_in

import zerojax as zj
from host_offload.disk import tuning
from host_offload.disk.errors import SwapError
from zerojax.checkpoint.directory import DELETED, TEMPORARY
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.inspection import inspect

LONGEST = 30.0
"""Maximum seconds for an operation and the checks after it."""
TOLD = (CheckpointError, SwapError)


class Episode:
    """A training run with a failing disk."""

    def __init__(
        self,
        toy: Toy,
        faults: shim.Faults,
        folder: pathlib.Path,
        seed: int,
        told: Callable[[str], None],
    ) -> None:
        """Start with two checkpoints.

        Args:
          toy: program to train, and its expected results.
          faults: faults of this process.
          folder: folder to create, below the root of the faults.
          seed: seed of all random choices.
          told: function called with each operation before it begins.
        """
        self.toy, self.program, self.faults, self.folder, self._told = (
            toy,
            toy.program,
            faults,
            folder,
            told,
        )
        self.seed, self.random = seed, random.Random(seed)
        shutil.copytree(toy.template, folder / "c")
        self.settings = {
            "max_to_keep": self.random.choice((None, 1, 2)),
            "is_async": self.random.random() < 0.7,
        }
        if self.random.random() < 0.3:
            self.settings |= BEST
        self.confirmed = {1, FIRST}
        self.compared: dict[int, Any] = {}  # by step, the files with the expected contents
        self.injected: list[shim.Injected] = []
        self.operation, self.plan, self.rehearses, self.num_exports = "", shim.Plan({}), False, 0
        self.history: list[str] = []
        self.slowest, self.num_runs, self.num_hit = (0.0, ""), 0, 0
        self.watch()
        self.ckpt = self.checkpointer()
        self.state = self.ckpt.restore(self.program)
        self.last = FIRST  # that this run saved or restored

    @staticmethod
    def watch() -> None:
        """Start the time limit of the next operation and its checks.

        If they hang, the process ends.
        """
        faulthandler.dump_traceback_later(LONGEST, exit=True)

    def checkpointer(self) -> zj.Checkpointer:
        return zj.Checkpointer(self.folder / "c", **self.settings)

    @property
    def step(self) -> int:
        return int(self.state.step)

    def attempt(self, operation: str, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Run an action under faults; returns its result or its exception.

        Raises:
          Found: if it or a thread raised a bare error.
        """
        self.operation = operation
        if self.rehearses:
            self.plan = shim.Plan({})
        else:
            self.plan = shim.drawn(self.toy.counts[operation], self.random)
        self._told(f"{operation} under {self.plan}")
        self.watch()
        result, error, start = None, None, time.monotonic()
        with self.faults.some(self.plan) as injected, background_errors() as background:
            try:
                result = call()
            except BaseException as raised:
                error = raised
        self.injected = injected()
        self.slowest = max(
            self.slowest,
            (time.monotonic() - start, f"seed {self.seed}: {operation} under {self.plan}"),
        )
        self.num_runs += 1
        self.num_hit += bool(self.injected)
        what = "done" if error is None else f"{type(error).__name__}: {error}"
        self.history.append(
            f"{operation} under {self.plan}: {'; '.join(map(str, self.injected[:4]))} -> {what[:200]}"
        )
        if self.rehearses:
            self.toy.counts[operation] = self.faults.counts()
        for other in [error, *background]:
            # Orbax closes its loop at the first error, while other arrays are being opened; the
            # export reports that error.
            is_late = (
                operation == "export_orbax"
                and error is not None
                and str(other) == "Event loop is closed"
            )
            if other is not None and not isinstance(other, TOLD) and not is_late:
                where = "" if other is error else " in a thread"
                raise Found("bare error", f"{type(other).__name__}{where}: {other}", other)
        if error is not None and not self.injected:
            raise Found("stuck", f"nothing failed, but it raised {error}", error)
        return result, error

    @property
    def lost_bytes(self) -> bool:
        """Return whether a reader had to treat something as damage."""
        return any(each.error in shim.LOST for each in self.injected)

    # --- operations -------------------------------------------------------------------------------

    def begin_save(self) -> bool:
        return self.ckpt.save(self.program, self.state, metrics={"step": self.step})

    def save(self) -> None:
        self.advance()
        result, error = self.attempt("save", lambda: (self.begin_save(), self.ckpt.wait())[0])
        self.saved(self.step, result, error)

    def save_and_step(self) -> None:
        """Save, and keep training while the checkpoint is written."""
        self.advance()
        step, losses, states = self.step, [], []

        def call() -> Any:
            result = self.begin_save()
            try:
                state, self.state = self.state, None  # donated
                state, metrics = self.program.step(state, DATA[step + 1])
                states.append(state)
                losses.append(float(metrics["loss"]))
            finally:
                self.ckpt.wait()
            return result

        result, error = self.attempt("save_and_step", call)
        if states:
            self.state = states[0]
            self.holds(step + 1, losses[0])
        self.saved(step, result, error)
        self.regain()

    def save_and_close(self) -> None:
        """Save with a Checkpointer that is closed immediately."""
        self.advance()
        result, error = self.attempt(
            "save_and_close", lambda: (self.begin_save(), self.ckpt.close())[0]
        )
        self.saved(self.step, result, error)
        with contextlib.suppress(*TOLD):
            self.ckpt.close()
        self.ckpt = self.checkpointer()
        self.restored(self.ckpt.restore(self.program))

    def begin_again(self) -> None:
        """Restore with another Checkpointer, as the next run does."""
        self.ckpt.close()

        def call() -> Any:
            self.ckpt = self.checkpointer()
            return self.ckpt.restore(self.program)

        state, error = self.attempt("begin_again", call)
        if error is None:
            self.restored(state)
        else:
            self.state = None
            self.ckpt.close()
            self.ckpt = self.checkpointer()
            self.regain()

    def restore(self) -> None:
        state, error = self.attempt("restore", lambda: self.ckpt.restore(self.program))
        if error is None:
            self.restored(state)
        else:
            self.regain()

    def latest_step(self) -> None:
        step, error = self.attempt("latest_step", self.ckpt.latest_step)
        if error is None and not self.lost_bytes and step != (newest := max(self.on_disk())):
            raise Found("lost", f"latest_step() is {step}, but step {newest} is complete")

    def best_step(self) -> None:
        step, error = self.attempt("best_step", self.ckpt.best_step)
        if error is None and not self.lost_bytes and step != (newest := max(self.on_disk())):
            raise Found("lost", f"best_step() is {step}, but step {newest} is complete")

    def all_steps(self) -> None:
        steps, error = self.attempt("all_steps", self.ckpt.all_steps)
        if error is None and steps != self.on_disk():
            raise Found("lost", f"all_steps() is {steps}, but {self.on_disk()} exist")

    def inspect(self) -> None:
        report, error = self.attempt("inspect", lambda: inspect(self.folder / "c", verify=True))
        if (
            error is None and "damaged" in report.text and not self.lost_bytes
        ):  # incomplete ones may exist too
            raise Found("lost", f"it reports damage without cause: {report.text}")

    def export(self) -> None:
        form = self.random.choice(sorted(EXPORTS))
        target = self.folder / f"out{self.num_exports}"
        self.num_exports += 1
        source = (
            self.folder / "c" / (str(max(self.on_disk())) if self.random.random() < 0.5 else "")
        )
        newest = max(self.on_disk())
        _, error = self.attempt(f"export_{form}", lambda: EXPORTS[form](source, target))
        if error is None:
            exported = weights_in(target)
            if not self.lost_bytes:
                self.weights_are(exported, newest)
            else:
                self.weights_are(exported, *self.on_disk())
            return
        if target.exists():  # the contents were complete before the name appeared
            self.weights_are(weights_in(target), *self.on_disk())
        else:
            EXPORTS[form](source, target)
            self.weights_are(weights_in(target), newest)

    def weights_are(self, found: dict[str, np.ndarray], *steps: int) -> None:
        """Require the weights of one of the steps."""
        expected = [
            {
                n.split("weights")[1]: v
                for n, v in self.toy.saved[s].items()
                if n.startswith("weights")
            }
            for s in steps
        ]
        for each in expected:
            by_name = {
                "".join(f"['{key}']" for key in name.split(".")): value
                for name, value in found.items()
            }
            if sorted(by_name) == sorted(each) and all(
                by_name[n].tobytes() == v.tobytes() for n, v in each.items()
            ):
                return
        raise Found(
            "wrong number", f"the exported weights are not those of steps {steps}: {sorted(found)}"
        )

    def import_weights(self) -> None:
        form = self.random.choice(sorted(EXPORTS))
        key = jax.random.key(KEY)
        state, error = self.attempt(
            f"import_{form}",
            lambda: zj.import_params(self.program, self.toy.weights[form], key=key),
        )
        if error is None:
            with self.told_later():
                require_same(self.toy.numbers(state), self.toy.imported, "the imported state")
        if self.program.swap is not None:
            self.state = None
        self.regain()

    def init(self) -> None:
        state, error = self.attempt("init", lambda: self.program.init(jax.random.key(0)))
        if error is None:
            with self.told_later():
                require_same(self.toy.numbers(state), self.toy.held[0], "the first state")
        self.state = None
        self.regain()

    def close_and_init(self) -> None:
        """Release the swap folder, and take it again.

        The compiled programs are kept, since compiling takes a second.
        """

        def call() -> Any:
            self.program.swap.close()
            return self.program.init(jax.random.key(0))

        state, error = self.attempt("close_and_init", call)
        if error is None:
            with self.told_later():
                require_same(self.toy.numbers(state), self.toy.held[0], "the first state")
        self.state = None
        self.regain()

    def read_params(self) -> None:
        """Read the parameters, and evaluate them."""
        found, error = self.attempt("read_params", lambda: self.toy.params_and_loss(self.state))
        if error is None:
            require_same(found, self.toy.read[self.step], f"what was read of step {self.step}")
        self.regain()

    def probe(self) -> None:
        """Measure the disk; this never fails."""
        tuning._tune.cache_clear()
        path = self.program.swap.engine.find_store(
            next(iter(self.program.swap.engine.kinds())), 0
        ).path
        result, error = self.attempt(
            "probe", lambda: tuning.tune(os.path.join(path, "..", ".."), 0.02)
        )
        if error is not None or not isinstance(result, tuning.IoSettings):
            raise Found("bare error", f"the probe gave {result} and {error}", error)

    def train(self) -> None:
        step = self.step

        def call() -> Any:
            state, self.state = self.state, None  # donated
            return self.program.step(state, DATA[step + 1])

        result, error = self.attempt("train", call)
        if error is None:
            self.state = result[0]
            self.holds(step + 1, float(result[1]["loss"]))
        elif isinstance(error, SwapError) and error.file is None:
            raise Found("bare error", f"the SwapError names no file: {error}", error)
        self.regain()

    def settle(self) -> None:
        """Apply the update that the state holds, and train on from the result."""
        step = self.step

        def call() -> Any:
            state, self.state = self.state, None  # donated
            return self.program.settle(state)

        state, error = self.attempt("settle", call)
        if error is None:
            with self.told_later():
                _, metrics = self.program.step(state, DATA[step + 1])
                if float(metrics["loss"]) != self.toy.losses[step + 1]:
                    raise Found("wrong number", f"another loss after settle at step {step}")
        elif not isinstance(error, SwapError) or error.file is None:
            raise Found("bare error", f"settle raised no SwapError with a file: {error}", error)
        self.regain()

    # --- common parts -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Train a step if this one was saved."""
        if self.step == self.last:
            state, self.state = self.state, None
            self.state, _ = self.program.step(state, DATA[int(state.step) + 1])

    def holds(self, step: int, loss: float) -> None:
        """Require the state of the given step; if a write failed since then, it is lost."""
        if loss != self.toy.losses[step]:
            raise Found(
                "wrong number",
                f"the loss of step {step} is {loss}, not {self.toy.losses[step]}",
            )
        with self.told_later():
            require_same(
                self.toy.numbers(self.state), self.toy.held[step], f"the state of step {step}"
            )
            return
        self.state = None

    @contextlib.contextmanager
    def told_later(self) -> Any:
        """Wait for the report of a failed write: writes end after the call that began them."""
        try:
            yield
        except SwapError:
            if not self.injected:
                raise

    def restored(self, state: zj.TrainState) -> None:
        """Take a restored state, and require that it is the newest readable one."""
        self.state, step, there = state, int(state.step), self.on_disk()
        if step not in self.toy.saved or step not in there:
            raise Found("wrong number", f"step {step} was restored, but {there} exist")
        if step != max(there) and not self.lost_bytes:
            raise Found("lost", f"step {step} was restored, but step {max(there)} is complete")
        self.last = step
        self.confirmed = {other for other in self.confirmed if other <= step} | {
            step
        }  # this run continues from there
        with self.told_later():
            require_same(
                self.toy.numbers(state), self.toy.held[step], f"the restored state of step {step}"
            )
            return
        self.state = None
        self.regain()

    def regain(self) -> None:
        """Restore without faults if the state is lost."""
        if self.state is not None and self.program.swap is not None:
            try:
                self.program.eval(self.state, DATA[0])
                require_same(
                    self.toy.numbers(self.state),
                    self.toy.held[self.step],
                    "the state that was kept",
                )
            except (
                SwapError,
                ValueError,
            ):  # ValueError: a failed restore had begun to overwrite it
                self.state = None
        if self.state is None:
            self.injected = []
            self.restored(self.ckpt.restore(self.program))

    def saved(self, step: int, result: Any, error: BaseException | None) -> None:
        """Check the directory after a save; if the save failed, the same save must now succeed."""
        if error is None:
            if result is not True:
                raise Found("stuck", f"save returned {result} for step {step}")
            self.confirmed.add(step)
            self.last = step
            return
        self.check()
        if self.state is None or self.step != step or self.operation == "save_and_close":
            return
        if self.program.swap is not None:
            try:
                self.program.eval(self.state, DATA[0])
            except SwapError:
                self.state = None
                return self.regain()
        is_saved = self.begin_save()
        self.ckpt.wait()
        if (
            not is_saved and step not in self.on_disk()
        ):  # it already existed, and was only not synced
            raise Found("lost", f"step {step} was not saved, is missing, and is not saved again")
        self.confirmed.add(step)
        self.last = step

    def on_disk(self) -> list[int]:
        """Return the steps that have a folder."""
        return sorted(int(name) for name in os.listdir(self.folder / "c") if name.isdigit())

    def check(self) -> None:
        """Check the directory without faults."""
        there, newest = self.on_disk(), max(self.confirmed)
        for step in there:
            files = [
                f"{folder}/{name}"
                for folder, _, names in os.walk(self.folder / "c" / str(step))
                for name in names
            ]
            seen = sorted(
                (file, s.st_ino, s.st_size, s.st_mtime_ns)
                for file in files
                for s in [os.stat(file)]
            )
            if self.compared.get(step) == seen:
                continue
            self.compared[step] = seen
            try:
                require_same(
                    numbers(self.folder / "c", step),
                    self.toy.saved[step],
                    f"the checkpoint of step {step}",
                )
            except CheckpointError as error:
                raise Found(
                    "lost",
                    f"the checkpoint of step {step} exists, but is incomplete: {error}",
                    error,
                ) from error
        if not there or max(there) < newest:
            names = sorted(os.listdir(self.folder / "c"))
            raise Found("lost", f"step {newest} was saved, but {there or 'none'} exist: {names}")
        keep = self.settings["max_to_keep"]
        missing = self.confirmed - set(there)
        if (keep is None and missing) or len(there) < min(keep or 0, len(self.confirmed)):
            raise Found(
                "lost",
                f"steps {sorted(missing)} were saved, but {there} exist; max_to_keep={keep}",
            )
        self.confirmed -= missing  # which retention removed
        found = zj.Checkpointer(self.folder / "c").latest_step()
        if found != max(there):
            raise Found("lost", f"latest_step() is {found}, but {there} exist")

    OPERATIONS: Mapping[str, tuple[float, float]] = {
        "save": (3, 3), "save_and_step": (1, 2), "save_and_close": (1, 1), "begin_again": (1.5, 1.5), "restore": (2, 2),
        "latest_step": (1, 1), "all_steps": (0.5, 0.5), "best_step": (0.5, 0.5), "inspect": (1, 1), "export": (1.5, 1),
        "import_weights": (1, 1), "init": (0, 2), "close_and_init": (0, 1), "train": (0, 3), "read_params": (0, 1),
        "probe": (0, 0.2), "settle": (0, 2),
    }  # fmt: skip
    """Weights with which operations are drawn, by whether a tier is nvme."""

    def weight(self, operation: str) -> float:
        """Return the weight with which an operation is drawn for this toy."""
        others = ("export", "import_weights") if self.toy.leaves_updates else ("settle",)
        return 0 if operation in others else self.OPERATIONS[operation][self.toy.on_disk]

    def run(self, count: int) -> None:
        """Run some checked operations, then one more save and a restore without faults."""
        weights = [self.weight(operation) for operation in self.OPERATIONS]
        for _ in range(count):
            (operation,) = self.random.choices(list(self.OPERATIONS), weights)
            if self.step > LAST - 3:
                break
            self.do(operation)
        self.finish()

    def rehearse(self) -> None:
        """Run each operation once without faults, and count its calls."""
        self.rehearses = True
        for operation in self.OPERATIONS:
            if self.weight(operation):
                self.do(operation)
            if operation == "save_and_close":
                self.begin_anew()
        for _ in range(20):  # both formats
            if self.toy.leaves_updates or {
                f"{a}_{form}" for a in ("export", "import") for form in EXPORTS
            } <= set(self.toy.counts):
                break
            self.export()
            self.import_weights()
        self.finish()

    def begin_anew(self) -> None:
        """Go back to the first checkpoints."""
        self.ckpt.close()
        shutil.rmtree(self.folder / "c")
        shutil.copytree(self.toy.template, self.folder / "c")
        self.ckpt = self.checkpointer()
        self.confirmed = {1, FIRST}
        self.restored(self.ckpt.restore(self.program))

    def do(self, operation: str) -> None:
        getattr(self, operation)()
        self.check()

    def finish(self) -> None:
        self.operation = "the end"
        self.regain()
        self.advance()
        self._told("the end")
        self.watch()
        self.begin_save()
        self.ckpt.close()
        self.confirmed.add(self.step)
        self.check()
        self.injected = []
        with zj.Checkpointer(self.folder / "c") as ckpt:
            self.restored(ckpt.restore(self.program))
        left = [
            name for name in os.listdir(self.folder / "c") if TEMPORARY in name or name == DELETED
        ]
        if self.toy.on_disk:
            left += [str(path) for path in self.toy.swap.glob("zerojax-swap-0/snapshot-*")]
        if left:
            raise Found("stuck", f"{left} are left over")


@contextlib.contextmanager
def background_errors() -> Any:
    """Yield a list of the errors raised in threads and finalizers."""
    found: list[BaseException] = []
    before, unraisable = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda args: found.append(args.exc_value)  # type: ignore[arg-type,return-value]
    sys.unraisablehook = lambda args: found.append(args.exc_value)  # type: ignore[arg-type,return-value]
    try:
        yield found
    finally:
        threading.excepthook, sys.unraisablehook = before, unraisable
