"""Run the checks of a part within their time limits, isolated from each other's failures.

A worker is a process that runs checks on request. Both sides of the pipe send lines of JSON:

    {"check": "copies up", "known": {"rates.link": 5.1e10}, "short": false}   ->
        <-  {"facts": {..}}  {"check": .., "row": {..}}  ..  {"check": .., "end": "done"}

The runner appends each line to `PART.jsonl` as it arrives, so results survive any end of the run.
The runner also keeps the time. A check that gets fewer seconds than it needs runs in its short
form, and a check is not run only if there is no time to start it. When a check's seconds are over,
the worker is killed, and the next check gets a new worker, as after a crash. Measurements of the
machine are stored in a file that later parts read.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from gpu_checks.parts import KNOWN, LEAST, POOL, START, Check, Context, Group, Part, seconds_of
from gpu_checks.rows import Row, attempt, line

DONE, CRASHED, STOPPED, NOT_RUN = "done", "crashed", "stopped", "not run"
Write = Callable[[Mapping[str, Any]], None]


def share_of(left: float, needs: float, later: float) -> float:
    """Return a check's share of the seconds that are left.

    It gets all seconds that later checks do not need. If seconds are short, it gets what it needs
    as long as the later checks keep `LEAST` of theirs. If they are shorter still, all checks get
    the same share of what they need.

    Args:
      left: seconds left for the part.
      needs: seconds that the check needs.
      later: seconds that the checks after it need together.
    """
    return max(left - later, min(needs, left - LEAST * later), left * needs / (needs + later))


class Worker:
    """A process that runs checks on request."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], errors: pathlib.Path
    ) -> None:
        """Start the process; its error output is appended to the file `errors`."""
        self.errors = errors
        with errors.open("a") as out:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.put(text)
        self.lines.put(None)

    def ask(
        self,
        check: str,
        known: Mapping[str, float],
        seconds: float,
        write: Write,
        is_short: bool = False,
    ) -> tuple[str, str]:
        """Run a check, pass its results to `write`, and return a status and a reason.

        The status is STOPPED if the check takes longer than `seconds`, and CRASHED if the process
        ends.
        """
        ends = time.monotonic() + seconds
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(
                json.dumps({"check": check, "known": dict(known), "short": is_short}) + "\n"
            )
            self.process.stdin.flush()
        while True:
            try:
                text = self.lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                return STOPPED, f"stopped after {seconds:.0f} s"
            if text is None:
                return CRASHED, f"exit status {self.process.wait()}"
            said = json.loads(text)
            if "end" in said:
                return said["end"], ""
            write(said)

    def last_line(self) -> str:
        """Return the last line that the process wrote to its error output."""
        return next(iter(self.errors.read_text(errors="replace").strip().splitlines()[::-1]), "")

    def kill(self) -> None:
        """End the process and its descendants.

        The ranks that torchrun starts have their own process groups and would keep the device.
        """
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(timeout=10)  # a process that left the group may hold the pipe
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # from the last, unread request
                if pipe is not None:
                    pipe.close()


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children and of their descendants, from Linux's /proc."""
    children: dict[int, list[int]] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = children.get(pid, [])
    for child in found:  # the list grows during the loop
        found += children.get(child, [])
    return found


@dataclasses.dataclass(kw_only=True)
class Run:
    """One run of a part.

    Attributes:
      part: the part to run.
      only: names of the checks to run; None runs all.
      mode: "run" or "compile-only", each possibly with "small " in front.
      limit: time limit in seconds.
      out: folder of the results.
      command: command of a worker, without the part and the group.
      told: command for the table, as the user gave it.
      pool: function that returns the limit in GiB of a group's pool of pinned memory; None leaves
        JAX's own limit.
      key: device and version of jax under which rates are stored for later parts; None neither
        reads nor stores rates.
    """

    part: Part
    only: Sequence[str] | None
    mode: str
    limit: float
    out: pathlib.Path
    command: Sequence[str]
    told: str
    pool: Callable[[Group], int] | None = None
    key: str | None = None

    def __call__(self, folders: Sequence[pathlib.Path] = ()) -> None:
        """Run the checks one after another.

        Args:
          folders: folders that are emptied after a check is lost.
        """
        starts = time.monotonic()
        chosen = [
            check for check in self.part.checks if self.only is None or check.name in self.only
        ]
        waiting = [check.name for check in chosen]
        self.out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context((self.out / f"{self.part.name}.jsonl").open("a"))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            before = {} if self.key is None else read_rates(self.out, self.key)
            known = {name: rate for rates in before.values() for name, rate in rates.items()}
            measured: dict[str, dict[str, float]] = {}
            failed: set[str] = set()
            head = {
                "part": self.part.name,
                "command": self.told,
                "mode": self.mode,
                "limit": self.limit,
            }
            _append(file, {"head": head | {"time": _now(), "checks": waiting}})

            def write(said: Mapping[str, Any]) -> None:
                _append(file, said)
                if "row" in said:
                    row = Row(**said["row"])
                    found = {
                        k.removeprefix(KNOWN): v
                        for k, v in row.values.items()
                        if k.startswith(KNOWN)
                    }
                    known.update(found)
                    measured.setdefault(said["check"], {}).update(found)
                    failed.update([said["check"]] if row.ok is False else [])
                    print(line(said["check"], row), flush=True)

            worker: Worker | None = None
            stack.callback(lambda: worker and worker.kill())
            for index, group in enumerate(self.part.groups):
                for check in (check for check in group.checks if check in chosen):
                    waiting.remove(check.name)
                    began = time.monotonic()
                    left, needs = self.limit - (began - starts), seconds_of(check.needs, self.mode)
                    later = sum(seconds_of(c.needs, self.mode) for c in chosen if c.name in waiting)
                    if check.measures and check.name in before:
                        rates = ", ".join(
                            f"{name} {rate:.4g}" for name, rate in before[check.name].items()
                        )
                        self._end(
                            write,
                            check,
                            DONE,
                            Row(check.name, f"measured by an earlier part: {rates}"),
                            0.0,
                        )
                        continue
                    if left < min(needs, START):
                        why = (
                            f"not run: it needs {needs:.0f} s, and {max(0.0, left):.0f} s "
                            f"of {self.limit:g} s were left"
                        )
                        self._end(write, check, NOT_RUN, Row(check.name, why), 0.0)
                        continue
                    worker = worker or Worker(
                        [*self.command, self.part.name, str(index)],
                        self._env(group, folder),
                        self._errors(),
                    )
                    seconds = share_of(left, needs, later)
                    status, why = worker.ask(
                        check.name, known, seconds, write, is_short=seconds < needs
                    )
                    found = measured.get(check.name, {})
                    # The next part repeats a measurement that failed halfway.
                    if (
                        status == DONE
                        and check.measures
                        and self.key is not None
                        and found
                        and check.name not in failed
                    ):
                        keep_rates(self.out, self.key, check.name, found)
                    lost = status in (CRASHED, STOPPED)
                    last = worker.last_line() if lost else ""
                    row = (
                        Row(check.name, ": ".join([why, *([last] if last else [])])[:400], ok=False)
                        if lost
                        else None
                    )
                    if status != DONE:
                        worker.kill()
                        worker = None
                        _empty(folders)
                    self._end(write, check, status if lost else DONE, row, time.monotonic() - began)
                if worker is not None:
                    worker.kill()
                    worker = None
            _append(file, {"seconds": time.monotonic() - starts})

    def _errors(self) -> pathlib.Path:
        """Return the file for the error output of the part's workers."""
        return self.out / f"{self.part.name}.log"

    def _env(self, group: Group, folder: str) -> dict[str, str]:
        env = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
        }
        # The cache keeps the timings of kernels, and no programs.
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
        if self.pool is not None:
            env[POOL] = str(self.pool(group))
        env |= group.env
        if self.mode.endswith("compile-only"):
            env |= {"JAX_PLATFORMS": "cpu"}
            # Without a GPU to try on, XLA's Triton backend finds no tiles for tiny products.
            if self.mode.startswith("small"):
                env |= {
                    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
                    "--xla_gpu_enable_triton_gemm=false"
                }
        return env

    @staticmethod
    def _end(write: Write, check: Check, status: str, row: Row | None, seconds: float) -> None:
        if row is not None:
            write({"check": check.name, "row": dataclasses.asdict(row)})
        write({"check": check.name, "end": {"status": status, "seconds": round(seconds, 2)}})


RATES = "rates.json"
"""Results file with measured rates: {key: {check: {"time": when, "rates": {name: rate}}}}."""


def read_rates(folder: pathlib.Path, key: str) -> dict[str, dict[str, float]]:
    """Return the rates that earlier parts stored under a key, by check; {} if there are none."""
    return {check: one["rates"] for check, one in _kept_rates(folder).get(key, {}).items()}


def keep_rates(folder: pathlib.Path, key: str, check: str, rates: Mapping[str, float]) -> None:
    """Store a check's rates for later parts."""
    kept = _kept_rates(folder)
    kept.setdefault(key, {})[check] = {"time": _now(), "rates": dict(rates)}
    (folder / RATES).write_text(json.dumps(kept, indent=1) + "\n")


def _kept_rates(folder: pathlib.Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the file's contents; {} if it does not exist or its writer was cut off."""
    try:
        return json.loads((folder / RATES).read_text())
    except (OSError, ValueError):
        return {}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


def _append(file: TextIO, said: Mapping[str, Any]) -> None:
    file.write(json.dumps(said) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _empty(folders: Sequence[pathlib.Path]) -> None:
    for folder in folders:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def serve(
    checks: Sequence[Check],
    context: Context,
    compiled: bool,
    facts: Callable[[], Mapping[str, Any]],
    read: TextIO,
    send: TextIO,
) -> None:
    """Run checks on request until the pipe ends, as a worker."""

    def say(said: Mapping[str, Any]) -> None:
        send.write(json.dumps(said) + "\n")
        send.flush()

    by_name = {check.name: check for check in checks}
    for number, text in enumerate(read):
        asked = json.loads(text)
        name, context.known, context.is_short = asked["check"], asked["known"], asked["short"]
        context.check = name
        check, broken = by_name[name], False
        if number == 0:
            say({"facts": facts()})

        def rows(check: Check = check) -> Iterator[Row]:
            run = check.compiled if compiled else check.run
            if run is None:
                raise NotImplementedError("there is nothing to compile")
            yield from run(context)

        for row in attempt(name, rows):
            say({"check": name, "row": dataclasses.asdict(row)})
            broken |= row.ok is False and _breaks(row.figure)
        say({"check": name, "end": "broken" if broken else DONE})


def _breaks(figure: str) -> bool:
    """Return whether an error may have left the device unusable for its process.

    A kernel's wrong address does so.
    """
    return "JaxRuntimeError" in figure.partition(":")[0] and "RESOURCE_EXHAUSTED" not in figure


def pipes() -> tuple[TextIO, TextIO]:
    """Return the files of a worker's requests and of its results.

    Afterwards, standard input is empty, and standard output goes to standard error.
    """
    read, send = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return read, send
