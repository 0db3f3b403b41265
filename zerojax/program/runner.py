"""Run compiled programs, together with the disk, callbacks on the host, and signals that must wait.

    begin    the disk reads ahead the program's records; the state's memory is bound for callbacks
    run      the program runs to its end, while its callbacks are called
    end      errors of callbacks are raised here, where the program can no longer hang

Ctrl-C can interrupt the wait while the program's callbacks are still running. They must not run
against the next program or state, so the runner's next call waits for them first.

While a program calls back, Python's threads switch quickly.

A program without callbacks needs none of this. Its call returns before it has ended, like that of
any JAX program.
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
    """Run the compiled programs of a step; programs that call back run one at a time.

    Attributes:
      swap: session of the nvme tier, or None.
      host: update on the host, or None.
      moved: metrics of the records that the last program moved on disk.
    """

    def __init__(self, swap: SwapSession | None, host: HostUpdate | None) -> None:
        """Run programs with this disk session and host update; either may be None."""
        self.swap = swap
        self.host = host
        self.moved: dict[str, float] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()
        # results of the running program, or of one that an exception left running
        self._left: Any = None

    @property
    def calls_back(self) -> bool:
        """Whether the programs contain callbacks."""
        return self.swap is not None or self.host is not None

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Return a context in which to run a program.

        If the programs call back, no signal interrupts it, and no other thread runs one at the same
        time.
        """
        if not self.calls_back:
            yield
            return
        with self._lock, interrupts_wait(), quick_switches():
            self._end_last()
            yield

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the runner's.

        A fork has none of the runner's threads, and owns none of its memory.
        """
        return os.getpid() != self._process

    def call(self, program: Callable[..., Any], *args: Any) -> Any:
        """Return `program(*args)`, which has been started and may not have ended.

        Arguments and results may contain leaves on disk.
        """
        if not self.calls_back:
            return program(*args)
        # An interrupt between the start of the program and the return of its results would leave
        # nothing to wait for.
        with interrupts_wait(all_wait=True):
            self._left = program(*as_arguments(args))
        return as_leaves(self._left)

    def _end_last(self) -> None:
        """Wait for a program that an exception left running."""
        if self._left is not None:
            # its error was already raised when it was left
            with contextlib.suppress(Exception):
                _wait_for(self._left)
            self._left = None

    def open(self) -> int:
        """Make files and buffers for a new state; return its number on disk, 0 if it has none."""
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
        """Return `program(*args)`, for a program that makes no new state on disk, or the first one.

        Args:
          name: name of the program in a trace.
          program: compiled program.
          *args: arguments of the program.
          reads: the state that it reads, or part of one.
          moves: records that it reads from disk and writes to disk, in order.
          written: records that it writes before it reads them.

        Raises:
          ValueError: the state is not the one on disk.
          SwapError: an earlier program failed, or a record could not be moved.
        """
        if self.swap is None:
            return program(*args)
        self.swap.begin(reads, moves, written, name=name)
        # `finish` checks whether a callback failed, so all of them must have ended. None may run
        # during the next program either.
        result = self.finished(self.call(program, *args))
        self.moved = self.swap.finish()
        return result

    def begin_step(
        self,
        state: TrainState,
        moves: Sequence[Move],
        written: Sequence[DiskRecords] = (),
        name: str = "step",
    ) -> list[int]:
        """Prepare for a step, or for another program that makes the next state.

        Args:
          state: state that the program takes.
          moves: records that it reads from disk and writes to disk, in order.
          written: records that it writes before it reads them.
          name: name of the program in a trace.

        Returns:
          The addresses on which the host update works, for `end_step`.

        Raises:
          ValueError: the state is not the one on disk.
          SwapError: an earlier program failed.
        """
        # Kernels are bound to the state's memory, so nothing may still be writing it.
        if self.host is None:
            addresses = []
        else:
            addresses = self.host.binding.prepare(jax.block_until_ready(state))
        if self.swap is not None:
            self.swap.begin(state, moves, written, name=name)
        return addresses

    def finished(self, results: Any) -> Any:
        """Return the results of a step; if it calls back, wait until it has ended."""
        if self.calls_back:
            jax.block_until_ready(results)
            self._left = None
        return results

    def end_step(
        self, state: TrainState, addresses: list[int]
    ) -> tuple[TrainState, dict[str, float]]:
        """Return the state and the metrics of the disk, after a step that made `state`.

        Args:
          state: state that the step returned.
          addresses: addresses from `begin_step`.

        Raises:
          RuntimeError: an update on the host failed.
          SwapError: a record could not be moved.
        """
        metrics = {} if self.swap is None else self.swap.finish(is_step=True)
        self.moved = metrics
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
    """Wait for the results of a program; those donated or deleted since are already complete."""
    jax.block_until_ready([a for a in jax.tree.leaves(results) if not a.is_deleted()])
