"""Raise in all processes what fails in one of them.

Otherwise the others would wait for it in the next collective without end.

A step is one program of all processes. Its callbacks never raise, so every process reaches its end.
Then, and before the next step, each process tells the others whether something failed, with a
reduction of one number per device:

    failed = min over processes (its index if something failed in it, else a larger number)

If all must agree on a number, they take the least of their numbers. A program of one process does
none of this.

A background thread must not start a program of all processes: processes could start their programs
in different orders, and their collectives would hang. Such threads use JAX's coordination service
instead, which sends messages over the network (`BackgroundBarrier`).
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # pyright: ignore[reportPrivateImportUsage]  the coordination service has no public face
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_offload.disk import SwapError


class AllProcesses:
    """The processes of a mesh.

    Attributes:
      mesh: mesh whose processes these are.
      what: work that they do together; the subject of the error message.
      error: type of the error that is raised in processes that did not fail.
      lesser: type of errors that give way. If one process has another error, all processes raise
        that one. If all errors are of this type, it is also raised in the processes that did not
        fail.
    """

    def __init__(
        self,
        mesh: Mesh,
        what: str = "the nvme tier",
        error: type[Exception] = SwapError,
        lesser: type[Exception] | None = None,
    ) -> None:
        """Work with the processes of `mesh`; the arguments become the attributes."""
        self.mesh = mesh
        self.what = what
        self.error = error
        self.lesser = lesser

    @cached_property
    def _is_alone(self) -> bool:
        return len({device.process_index for device in self.mesh.devices.flat}) == 1

    @cached_property
    def _least(self) -> Any:
        return jax.jit(jnp.min, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def do(self, work: Callable[[], None]) -> None:
        """Do work that may fail in one process alone.

        Must be called by every process at the same place.

        Raises:
          BaseException: the exception that `work` raised here, unless it is a lesser error than
            another process's.
          SwapError: `work` raised in another process, which is named. The type is `error` or
            `lesser` if they were given.
        """
        if self._is_alone:
            work()
            return
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # interrupts too: the other processes would wait
            error = raised
        is_lesser = self.lesser is not None and isinstance(error, self.lesser)
        # A process's index; plus the number of processes for a lesser error; or twice that number
        # for no error. All processes raise for the least.
        count = jax.process_count()
        number = 2 * count if error is None else jax.process_index() + count * is_lesser
        # Exchanged before anything is raised: if a process left here, the others would wait in the
        # reduction.
        first = self.least(number)
        if first == 2 * count:
            return
        # If there are both kinds of errors, only the greater is raised.
        if error is not None and is_lesser == (first >= count):
            raise error
        kind = self.error if first < count or self.lesser is None else self.lesser
        raise kind(failure(self.what, first % count))

    def least(self, number: int) -> int:
        """Return the least of the processes' numbers, which must fit into 32 bits.

        Must be called by every process at the same place.
        """
        if self._is_alone:
            return number
        # One element per device; all of a process's own devices have its number.
        shard = np.full(1, number, np.int32)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        numbers = jax.make_array_from_callback((self.mesh.size,), sharding, lambda _: shard)
        return int(self._least(numbers))


class BackgroundBarrier:
    """A barrier where background threads of the processes meet, one job after another.

    A job has stages. A stage ends when all processes have finished it. A process that fails skips
    the remaining stages. At the end of the job it passes their barriers, so that the other
    processes continue, and tells them that it failed.
    """

    # Counts equally in all processes, because every process calls `renew` for each job.
    _numbers = itertools.count()

    def __init__(self, what: str, error: type[Exception], stages: Sequence[str]) -> None:
        """Name the job and its stages.

        Args:
          what: the job; the subject of the error message.
          error: type of the error that is raised in processes that did not fail.
          stages: names of the stages, in order.
        """
        self._what = what
        self._error = error
        self._stages = tuple(stages)
        self._left: list[str] = []
        self._name = ""

    def renew(self) -> None:
        """Name the next job.

        Must be called by every process, in the thread that runs the steps.
        """
        self._name = f"zerojax/beside/{next(self._numbers)}"
        self._left = []

    def begin(self) -> None:
        """Begin the job: from now on this process passes all stages."""
        self._left = list(self._stages)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes.

        Args:
          key: text that contains the name of a stage; any other text means the end of the job.
          timeout_ms: longest wait in milliseconds.

        Raises:
          Exception: a process failed, which is named; the type is the constructor's `error`.
        """
        client = distributed.global_state.client
        if client is None or jax.process_count() == 1:
            return
        stage = next((stage for stage in self._left if stage in key), None)
        if stage is None:
            # The job is over. If this process never reached some stages, it failed before them. The
            # other processes wait there, and look for a key after the barrier, so the key is set
            # first.
            for missed in self._left:
                client.key_value_set(f"{self._name}/{missed}/failed/{jax.process_index()}", "")
                client.wait_at_barrier(f"{self._name}/{missed}", timeout_ms)
            self._left = []
            client.wait_at_barrier(f"{self._name}/{key}", timeout_ms)
            return
        self._left.remove(stage)
        client.wait_at_barrier(f"{self._name}/{stage}", timeout_ms)
        # A process that failed set its key before it reached the barrier, so the key exists by now.
        keys = client.key_value_dir_get(f"{self._name}/{stage}/failed/")
        failed = [int(name.rpartition("/")[2]) for name, _ in keys]
        if failed:
            raise self._error(failure(self._what, min(failed)))


def failure(what: str, process: int) -> str:
    """Return the message for the processes that did not fail."""
    return (
        f"{what} of process {process} failed: that process raises the error, with its cause and "
        "remedy"
    )
