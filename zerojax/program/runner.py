"""Runs compiled programs, with what they need around them: the disk, callbacks on the host, and
signals that have to wait.

    begin    the disk reads ahead what the program will ask for; memory of the state is bound for callbacks
    run      the program, to its end: callbacks come while it runs
    end      errors of callbacks are raised here, where the program can no longer hang

An impatient user may leave the wait for a program. Its callbacks run on, and must not come in the
next program or find the next state: so whatever calls the runner next waits for it first.

While a program calls back, Python's threads give way to each other at once.

A program without callbacks needs none of this. Its call returns before it has ended, as that of any
program of JAX.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from host_offload.engine import DiskRecords
from host_offload.schedule import Move
from zerojax.optim import HostUpdate
from zerojax.runtime import SwapSession, interrupts_wait, quick_switches
from zerojax.state import TrainState, as_arguments, as_leaves


class Runner:
    """Runs the compiled programs of one step, one at a time where they call back.

    Attributes:
      swap: the session of the nvme tier, where there is one.
      host: the update on the host, where there is one.
    """

    def __init__(self, swap: SwapSession | None, host: HostUpdate | None) -> None:
        """Run programs with this disk session and host update; either may be None."""
        self.swap, self.host = swap, host
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._left: Any = None  # results of the program that runs, or that an exception left

    @property
    def calls_back(self) -> bool:
        """Whether the programs hold callbacks."""
        return self.swap is not None or self.host is not None

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Run a program in this: where it calls back, no signal leaves it, and no other thread runs
        one beside it.
        """
        if not self.calls_back:
            yield
            return
        with self._lock, interrupts_wait(), quick_switches():
            self._end_last()
            yield

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the runner's: it has none of the threads, and nothing
        here is its own.
        """
        return os.getpid() != self._process

    def call(self, program: Callable[..., Any], *args: Any) -> Any:
        """Return `program(*args)`, which has begun and may not have ended.

        Both may hold leaves on disk.
        """
        if not self.calls_back:
            return program(*args)
        # An interrupt after the program began and before its results are known would leave nothing
        # to wait for.
        with interrupts_wait(all_wait=True):
            self._left = program(*as_arguments(args))
        return as_leaves(self._left)

    def _end_last(self) -> None:
        """Wait for a program that an exception left."""
        if self._left is not None:
            with contextlib.suppress(
                Exception
            ):  # of the program: whoever left it has had an error already
                _wait_for(self._left)
            self._left = None

    def open(self) -> int:
        """Make files and buffers for a new state; returns the number that it has on disk, or 0."""
        if self.swap is None:
            return 0
        self.swap.open()
        return self.swap.generation

    def run(
        self,
        name: str,
        program: Callable[..., Any],
        *args: Any,
        reads: Any = (),
        moves: Sequence[Move] = (),
        written: Sequence[DiskRecords] = (),
    ) -> Any:
        """Return `program(*args)`, which makes no new state on disk, or the first one.

        Args:
          name: of the program in a trace.
          program: compiled.
          *args: its arguments.
          reads: the state that it reads, or part of one.
          moves: what it reads from disk and writes to it, in order.
          written: records that it writes before it reads them.

        Raises:
          ValueError: the state is not the one on disk.
          SwapError: an earlier program failed, or a record could not be moved.
        """
        if self.swap is None:
            return program(*args)
        self.swap.begin(reads, moves, written, name=name)
        # `finish` asks whether a callback failed, so all of them must be over; and none may come in
        # the next program.
        result = self.finished(self.call(program, *args))
        self.swap.finish()
        return result

    def begin_step(
        self, state: TrainState, moves: Sequence[Move], written: Sequence[DiskRecords]
    ) -> list[int]:
        """Prepare for a step.

        Args:
          state: that it takes.
          moves: what it reads from disk and writes to it, in order.
          written: records that it writes before it reads them.

        Returns:
          The addresses on which the host's update works, for `end_step`.

        Raises:
          ValueError: the state is not the one on disk.
          SwapError: an earlier program failed.
        """
        # The memory that kernels are bound to must hold the state: nothing may still be writing it.
        addresses = (
            [] if self.host is None else self.host.binding.prepare(jax.block_until_ready(state))
        )
        if self.swap is not None:
            self.swap.begin(state, moves, written)
        return addresses

    def finished(self, results: Any) -> Any:
        """Return the results of a step, when it has ended if it calls back."""
        if self.calls_back:
            jax.block_until_ready(results)
            self._left = None
        return results

    def end_step(
        self, state: TrainState, addresses: list[int]
    ) -> tuple[TrainState, dict[str, float]]:
        """Return the state, and the metrics of the disk, after a step that made `state`.

        Raises:
          RuntimeError: an update on the host failed.
          SwapError: a record could not be moved.
        """
        metrics = {} if self.swap is None else self.swap.finish(is_step=True)
        if self.host is not None:
            self.host.binding.check(addresses, state)
            state = self.host.binding.exchange(state)
        return state, metrics

    def close(self) -> None:
        """Release host memory and the disk."""
        if self.host is not None:
            self.host.close()
        if self.swap is not None:
            self.swap.close()


def _wait_for(results: Any) -> None:
    """Wait for what a program made; what was donated since, or deleted, has come."""
    jax.block_until_ready([a for a in jax.tree.leaves(results) if not a.is_deleted()])
