"""Compare the calls of a run's processes, so that a difference raises an error in each of them.

Otherwise the run could hang, or train two different models.

    when                              what is compared                           how
    build_train_step                  versions, mesh, config, model, optimizer   each waits for all
    init                              the key                                    each waits for all
    a call with a new shape of batch  the call, and the shapes                   each waits for all
    any other call                    the call, and the shapes                   in the background
    a number put into a state         its path, and the number                   in the background
    the end of a process, and close   that no process makes a further call       in the background

The background comparison runs once a second. Statements (`zerojax.runtime.statements`) are sent
through JAX's coordination service, which uses the network: a collective would itself hang if
processes differ. The first process is the judge. It reads all statements and publishes its
findings. A thread in each process therefore sends or reads two messages a second, and a call costs
the main thread a look-up. A process that is alone does none of this.

A process that waits here raises the error. A process in a step that another process does not run
cannot raise: its main thread is inside a collective without end. The thread logs the error and ends
the process, as JAX does after a process was killed.

Calls whose shapes are all known do not wait. If processes mix up such shapes, the collectives
differ immediately: gloo may abort before the error is found, and report a mismatch.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax._src import distributed  # pyright: ignore[reportPrivateImportUsage]  the coordination service has no public face
from jax.sharding import Mesh

from zerojax.runtime.statements import (
    END,
    IN_DETAIL,
    Conflict,
    Statement,
    all_wait,
    describe,
    differing_parts,
    digest,
    find_closed,
    find_conflict,
)

_INTERVAL = 1.0
"""Seconds between two looks at the other processes, for up to 256 of them."""
_WARN_AFTER = 30.0
_WAIT_AT_MOST = 1800.0
"""Seconds that a process waits for the others in a call, until it warns and until it raises.

The longest wait is that of torch.distributed's gloo groups.
"""
_CLOSED_AFTER = 10.0
"""Seconds after which a call of a program that another process has closed is an error."""
_REST = 0.05
"""Seconds to sleep after a look, which limits the looks of a process whose calls change often."""
_GRACE = 3.0
"""Seconds in which a process may raise the error by itself, before it is ended."""
_LEAVE_AT_MOST = 300.0
"""Longest wait in seconds for the other processes when a process ends: the same as JAX's."""
_NUM_CHANGES = 8
_MOST_LABEL = 2000
_MOST_REASON = 300
_MOST_DETAILS = 2_000_000
"""Most characters of differing parts in all processes together: gRPC takes 4 MiB per message."""
_MOST_FAILURES = 5  # failed looks in a row
_ADVICE = (
    "every process must make the same calls in the same order, with the same arguments and shapes "
    "of batches"
)
logger = logging.getLogger("zerojax")


class Store(Protocol):
    """The methods of JAX's coordination service that are used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set the value of a key."""
        ...

    def key_value_try_get(self, key: str) -> str:
        """Return the value of a key, or raise an error that says NOT_FOUND."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return the keys below a key, with their values."""
        ...


class Peers:
    """The processes of a mesh, as one of them sees the others.

    Attributes:
      members: indices of the processes, ascending; the first is the judge.
      me: index of this process.
    """

    def __init__(
        self, store: Store, members: Sequence[int], me: int, end: Callable[[], None]
    ) -> None:
        """Begin to state what this process does.

        Args:
          store: key-value store that the processes share.
          members: indices of the processes, ascending.
          me: index of this process.
          end: function that ends this process; called by any thread.
        """
        self.members = tuple(members)
        self.me = me
        self._store = store
        self._end_process = end
        self._folder = f"zerojax/peers/{digest(map(str, members))[:8]}"
        self._is_judge = me == self.members[0]
        self._interval = _INTERVAL * max(1.0, len(self.members) / 256)
        self._number = 0
        self._label = ""
        self._changes: deque[tuple[int, str]] = deque(maxlen=_NUM_CHANGES)
        self._parts: Mapping[str, str] | None = None
        self._details = False
        self._closed: list[str] = []
        self._left = ""
        self._programs = 0
        self._sent: Statement | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._answered: set[int] = set()  # calls that the judge has answered
        self._news: dict[str, Any] = {"over": None, "gone": {}, "all_left": False}
        self._closed_since: tuple[Conflict, float] | None = None
        self._is_taken = False  # a call has raised the error
        self._is_cut = False  # the service does not answer
        self._failures = 0
        self._stops = False
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zerojax-peers", daemon=True)
        self._thread.start()

    # --- calls of the main thread -----------------------------------------------------------------

    def program(self, parts: Mapping[str, Sequence[str]]) -> "Calls":
        """Compare the parts of a new program with the other processes'; return the program's calls.

        Args:
          parts: lines of each part, by name.

        Raises:
          ValueError: a part differs; the message names it, and the processes.
          RuntimeError: a process left, or did not arrive within half an hour.
        """
        self._programs += 1
        calls = Calls(self, f"program {self._programs}")
        calls.agree("build_train_step", parts)
        return calls

    def agree(self, label: str, parts: Mapping[str, Sequence[str]]) -> None:
        """Make a call that waits for the other processes, and compare its parts.

        Args:
          label: name of the call.
          parts: lines of each part, by name.

        Raises:
          ValueError: a part differs; the message names it, and the processes.
          RuntimeError: a process left, or did not arrive within half an hour.
        """
        answer = self._meet(label, {name: digest(lines) for name, lines in parts.items()}, False)
        names = answer["differing"]
        if names:
            most = _MOST_DETAILS // len(self.members) // len(names)
            lines = {name: "\n".join(parts.get(name, ()))[:most] for name in names}
            answer = self._meet(label + IN_DETAIL, lines, True)
            too_long = (
                f"{label} differs between processes: {', '.join(names)}, in lines too far down to "
                "be shown"
            )
            raise ValueError(f"{answer['error'] or too_long}; {_ADVICE}")
        if answer["error"]:
            raise ValueError(f"{answer['error']}; {_ADVICE}")

    def note(self, label: str) -> None:
        """Make a call of a kind that the processes agreed on before; it is sent in the background.

        Args:
          label: name of the call, with the shapes of its batch.

        Raises:
          RuntimeError: a process left before this call, or the processes were found to differ.
        """
        with self._lock:
            self._begin(label, is_change=label != self._label)

    def close(self, program: str) -> None:
        """State that this process closed a program."""
        with self._lock:
            if program not in self._closed:
                self._closed.append(program)

    def _begin(self, label: str, is_change: bool) -> None:
        """Count a call, and state it if it is a change. Must be called with the lock."""
        self._check(self._number + 1)
        self._number += 1
        self._closed.clear()
        if is_change:
            self._label = label
            self._changes.append((self._number, label))
            self._wake.set()

    def _check(self, number: int) -> None:
        """Raise RuntimeError if a call with this number cannot end."""
        over = self._news["over"]
        if over is not None:
            self._is_taken = True
            raise RuntimeError(f"{over['sentence']}; {_ADVICE}")
        for process, (last, why) in self._news["gone"].items():
            if number >= last:
                raise RuntimeError(
                    f"process {process} {why} after call {last - 1}, and this is call {number}; "
                    f"{_ADVICE}"
                )

    def _meet(self, label: str, parts: Mapping[str, str], details: bool) -> dict[str, Any]:
        """Make a call, and return the judge's answer once all processes have made it."""
        with self._lock:
            self._begin(label, is_change=True)
            number = self._number
            self._parts = parts
            self._details = details
            begin = time.monotonic()
            warned = False
            try:
                self._wake.set()
                while number not in self._answers:
                    self._check(number)
                    if self._is_cut:
                        raise RuntimeError(f"{label}: JAX's coordination service does not answer")
                    waited = time.monotonic() - begin
                    if waited > _WAIT_AT_MOST or (waited > _WARN_AFTER and not warned):
                        late = self._late(number)
                        if waited > _WAIT_AT_MOST:
                            raise RuntimeError(
                                f"{label}: call {number} waited {waited:.0f} s for {late}; "
                                f"{_ADVICE}"
                            )
                        logger.warning("%s waits for %s", label, late)
                        warned = True
                    self._lock.wait(0.5)
                return self._answers.pop(number)
            finally:
                self._parts = None

    def _late(self, number: int) -> str:
        """Return which processes have not reached a call, and where they are.

        Must be called with the lock.
        """
        self._lock.release()
        try:
            late = [s for s in self._read_all() if s.number < number]
        except Exception:
            return "the other processes"
        finally:
            self._lock.acquire()
        names = []
        for s in late:
            label = f", {s.changes[-1][1]}" if s.changes else ""
            names.append(f"process {s.process} (after call {s.number}{label})")
        return ", ".join(names)

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = self._interval
        while not self._stops and not self._is_cut:
            if self._wake.wait(pause):
                self._wake.clear()
                pause = 0.001
            self._look()
            over = self._news["over"]
            if over is not None:
                self._end(over)
                return
            if self._parts is not None:
                pause = min(2 * pause, 0.1)
            else:
                pause = self._interval
                time.sleep(_REST)

    def _end(self, over: Mapping[str, Any]) -> None:
        """Give the main thread time to raise the error, and end the process if it cannot."""
        with self._lock:
            self._lock.notify_all()
        # A process that waits in a call raises the error now.
        while self._parts is not None:
            if self._stops or self._is_taken:
                return
            time.sleep(0.05)
        logger.critical("%s; %s. The run ends.", over["sentence"], _ADVICE)
        # A process that has not reached this call raises the error in its next call, if the
        # coordination service exists until then.
        while self._number < over["number"]:
            if self._stops or self._is_taken:
                return
            time.sleep(0.05)
        until = time.monotonic() + self._grace
        while time.monotonic() < until:
            if self._stops or self._is_taken:
                return
            time.sleep(0.05)
        self._end_process()

    @property
    def _grace(self) -> float:
        # The coordination service runs in the judge's process. Without it, JAX ends the other
        # processes immediately, so the judge ends last.
        return _GRACE + 2 * self._interval * self._is_judge

    def _look(self) -> None:
        """Send changes, and read the judge's findings; the judge reads all statements."""
        try:
            self._send()
            if self._is_judge:
                self._judge(self._read_all())
            else:
                self._read_news()
        except Exception as error:
            # A message may be lost. If the service does not come back, JAX itself ends the process.
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                logger.warning(
                    "processes are no longer compared: %s", str(error).partition("\n")[0]
                )
                with self._lock:
                    self._is_cut = True
                    self._lock.notify_all()
        else:
            self._failures = 0

    def _statement(self) -> Statement:
        with self._lock:
            return Statement(
                process=self.me,
                number=self._number,
                changes=tuple(self._changes),
                parts=self._parts,
                details=self._details,
                closed=tuple(self._closed),
                left=self._left,
            )

    def _send(self) -> None:
        statement = self._statement()
        if statement != self._sent:
            self._store.key_value_set(
                f"{self._folder}/now/{self.me}", statement.to_text(), allow_overwrite=True
            )
            self._sent = statement

    def _read_all(self) -> list[Statement]:
        texts = dict(self._store.key_value_dir_get(f"{self._folder}/now/"))
        statements = {s.process: s for s in map(Statement.from_text, texts.values())}
        return [statements.get(process, Statement(process=process)) for process in self.members]

    def _read_news(self) -> None:
        with self._lock:
            number = self._number if self._parts is not None else None
        answer = None if number is None else self._get(f"answer/{number}")
        if number is not None and answer is not None:
            self._take(number, answer)
        news = self._get("news")
        if news is not None:
            with self._lock:
                self._news = news
                self._lock.notify_all()

    def _get(self, key: str) -> Any:
        try:
            return json.loads(self._store.key_value_try_get(f"{self._folder}/{key}"))
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _take(self, number: int, answer: dict[str, Any]) -> None:
        """Pass an answer to the call that waits for it."""
        with self._lock:
            if self._parts is not None and self._number == number:
                self._answers[number] = answer
                self._lock.notify_all()

    # --- the judge --------------------------------------------------------------------------------

    def _judge(self, statements: Sequence[Statement]) -> None:
        conflict = find_conflict(statements, self._answered)
        if conflict is not None and all_wait(statements, conflict.number):
            # Each of them raises the error by itself once all have arrived.
            if all(s.number == conflict.number for s in statements):
                self._answer(conflict.number, conflict.sentence, ())
            conflict = None
        elif conflict is None:
            conflict = self._closed_for_long(find_closed(statements))
            waiting = [s for s in statements if s.parts is not None]
            for number in {s.number for s in waiting} - self._answered:
                differing = differing_parts(statements, number)
                if differing is None:
                    continue
                details = any(s.details for s in waiting if s.number == number)
                error = describe(number, differing, statements) if details and differing else ""
                self._answer(number, error, () if details else differing)
        news: dict[str, Any] = {
            "over": self._news["over"],
            "gone": {str(s.process): [s.number, s.left] for s in statements if s.left},
            "all_left": all(s.left for s in statements),
        }
        if conflict is not None and news["over"] is None:
            news["over"] = {"number": conflict.number, "sentence": conflict.sentence}
        if news != self._news:
            self._store.key_value_set(
                f"{self._folder}/news", json.dumps(news), allow_overwrite=True
            )
            with self._lock:
                self._news = news
                self._lock.notify_all()

    def _closed_for_long(self, conflict: Conflict | None) -> Conflict | None:
        since = self._closed_since
        if conflict is None or since is None or since[0] != conflict:
            self._closed_since = None if conflict is None else (conflict, time.monotonic())
            return None
        return conflict if time.monotonic() - since[1] > _CLOSED_AFTER else None

    def _answer(self, number: int, error: str, differing: Any) -> None:
        answer = {"error": error, "differing": list(differing)}
        self._store.key_value_set(
            f"{self._folder}/answer/{number}", json.dumps(answer), allow_overwrite=True
        )
        self._answered.add(number)
        self._take(number, answer)

    # --- the end ----------------------------------------------------------------------------------

    def leave(self, why: str) -> None:
        """State that this process ends, and stop its thread.

        From then on `await_others` does the thread's work.

        Args:
          why: how the process ended, as a verb phrase.
        """
        self._stops = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10)
        with self._lock:
            self._number += 1
            self._changes.append((self._number, END))
            self._left = why
        self._look()

    def await_others(self) -> None:
        """Wait until all processes have left; end this one if it was found to differ."""
        until = time.monotonic() + _LEAVE_AT_MOST
        pause = 0.01
        while time.monotonic() < until and not self._is_cut:
            over = self._news["over"]
            if over is not None:
                logger.critical("%s; %s. The run ends.", over["sentence"], _ADVICE)
                time.sleep(self._grace - _GRACE)
                self._end_process()
                return
            if self._news["all_left"]:
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
            self._look()


class Calls:
    """The calls of one program, which all processes make in the same order."""

    def __init__(self, peers: Peers, program: str) -> None:
        """Name the program, such as "program 1" for the first one."""
        self._peers = peers
        self._program = program
        self._known: dict[Hashable, str] = {}  # labels that the processes agreed on

    def agree(self, call: str, parts: Mapping[str, Sequence[str]]) -> None:
        """Wait for the other processes in a call, and compare its parts.

        Args:
          call: name of the call.
          parts: lines of each part, by name.

        Raises:
          ValueError: a part differs; the message names it, and the processes.
          RuntimeError: a process left, or did not arrive within half an hour.
        """
        self._peers.agree(f"{self._program}, {call}", parts)

    def note(self, call: str, key: Hashable, shapes: Callable[[], Sequence[str]]) -> bool:
        """Make a call, possibly over a batch; the first one over its shapes waits for the others.

        Args:
          call: name of the call.
          key: hashable key for the shapes of the batch.
          shapes: function that returns a line for each leaf of the batch; no lines without a batch.

        Returns:
          Whether this was the first call over these shapes.

        Raises:
          ValueError: the processes make different calls.
          RuntimeError: a process left, did not arrive within half an hour, or was found to differ.
        """
        label = self._known.get((call, key))
        if label is not None:
            self._peers.note(label)
            return False
        label = _label(f"{self._program}, {call}", shapes())
        self._peers.agree(label, {})
        self._known[call, key] = label
        return True

    def tell(self, call: str, lines: Sequence[str]) -> None:
        """State an action of this process, without waiting.

        If another process states something different, both learn of it in the background.

        Args:
          call: name of the action.
          lines: data of the action, which must be the same in all processes.

        Raises:
          RuntimeError: a process left, or the processes were found to differ.
        """
        self._peers.note(_label(f"{self._program}, {call}", lines, ": "))

    def close(self) -> None:
        """State that this process closed the program."""
        self._peers.close(self._program)


def _label(call: str, shapes: Sequence[str], joint: str = " over ") -> str:
    if not shapes:
        return call
    text = "; ".join(shapes)
    if len(text) > _MOST_LABEL:
        text = f"{text[:_MOST_LABEL]}.. {digest(shapes)}"
    return f"{call}{joint}{text}"


# --- the processes of this run --------------------------------------------------------------------

_ALL: dict[tuple[int, ...], Peers] = {}
"""Peers by their members: calls of the same processes have one order, across all programs."""


def find_peers(mesh: Mesh) -> Peers | None:
    """Return the processes of a mesh, or None.

    None: the mesh has only one process, this process is not among them, or `jax.distributed` was
    not initialized.
    """
    members = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    if (
        len(members) == 1
        or jax.process_index() not in members
        or distributed.global_state.client is None
    ):
        return None
    if not _ALL:
        # JAX's own handler waits for all processes. It was registered earlier, and so runs after
        # this one.
        atexit.register(_leave, os.getpid())
    if members not in _ALL:
        _ALL[members] = Peers(
            distributed.global_state.client, members, jax.process_index(), _end_now
        )
    return _ALL[members]


def _leave(process: int) -> None:
    if os.getpid() != process or distributed.global_state.client is None:
        return  # a fork of the process, or it has already left the others by itself
    error = getattr(sys, "last_value", None)
    why = "ended"
    if error is not None:
        why = f"ended with {type(error).__name__} ({str(error)[:_MOST_REASON]})"
    for peers in _ALL.values():
        peers.leave(why)
    for peers in _ALL.values():
        peers.await_others()


def _end_now() -> None:
    """End this process immediately.

    Its main thread, or JAX at its exit, waits for something that never arrives.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
