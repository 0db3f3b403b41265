"""What fails in one process is raised in all. Else the others would wait for it in the next
collective, without end.

A step is one program of all processes. Its callbacks never raise, so that every process reaches its
end. Then, and before the next step, each tells the others whether something failed, by a reduction
of one number a device:

    failed = min over processes (its index if something failed in it, else a larger number)

Where all must agree on a number, they take the least of theirs. A program of one process does none
of this.

A background thread must start no program of all processes: each process could start its programs in
  another order, and their
collectives would hang. Such threads meet by JAX's coordination service instead, which sends
messages over the network (`BackgroundBarrier`).
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
      what: they do together; the subject of the error.
      error: its type; raised in those that did not fail.
      lesser: a type of errors that give way: where one process has another error, all raise that,
        and where these are all the errors that there are, this type is raised in those that did not
        fail.
    """

    def __init__(
        self,
        mesh: Mesh,
        what: str = "the nvme tier",
        error: type[Exception] = SwapError,
        lesser: type[Exception] | None = None,
    ) -> None:
        self.mesh, self.what, self.error, self.lesser = mesh, what, error, lesser

    @cached_property
    def _is_alone(self) -> bool:
        return len({device.process_index for device in self.mesh.devices.flat}) == 1

    @cached_property
    def _least(self) -> Any:
        return jax.jit(jnp.min, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def do(self, work: Callable[[], None]) -> None:
        """Do what may fail in one process alone. To be called by every process, at the same place.

        Raises:
          BaseException: whatever `work` raised here, unless it is a lesser error than another
            process's.
          SwapError, or as `error` and `lesser` say: it raised in another process, which is named.
        """
        if self._is_alone:
            work()
            return
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # an interrupt too: the others would wait
            error = raised
        is_lesser = self.lesser is not None and isinstance(error, self.lesser)
        # A process's index; plus their count for a lesser error, plus it twice for none: the least
        # is what all raise.
        count = jax.process_count()
        number = 2 * count if error is None else jax.process_index() + count * is_lesser
        # Exchanged before anything is raised: a process that left here would let the others wait in
        # the reduction.
        first = self.least(number)
        if first == 2 * count:
            return
        # Of two kinds of errors only the greater is raised.
        if error is not None and is_lesser == (first >= count):
            raise error
        kind = self.error if first < count or self.lesser is None else self.lesser
        raise kind(failure(self.what, first % count))

    def least(self, number: int) -> int:
        """Return the least of the processes' numbers, of 32 bits.

        To be called by every process, at the same place.
        """
        if self._is_alone:
            return number
        # One element for each device; those of a process's own devices all hold its number.
        shard = np.full(1, number, np.int32)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        numbers = jax.make_array_from_callback((self.mesh.size,), sharding, lambda _: shard)
        return int(self._least(numbers))


class BackgroundBarrier:
    """Where the processes of a run wait for each other beside the steps, one piece of work after
    the other.

    A piece of work has stages. A stage ends when all processes have ended it. A process that fails
    skips the stages that are left. At the end of the work it passes their barriers, so that the
    others go on, and tells them that it failed.
    """

    # Counts alike in all processes, because every process calls `renew` for each piece of work.
    _numbers = itertools.count()

    def __init__(self, what: str, error: type[Exception], stages: Sequence[str]) -> None:
        """Name the work and its stages; `error` is raised in processes that did not fail."""
        self._what, self._error, self._stages = what, error, tuple(stages)
        self._left: list[str] = []
        self._name = ""

    def renew(self) -> None:
        """Name the next piece of work.

        To be called by every process, in the thread that runs the steps.
        """
        self._name, self._left = f"zerojax/beside/{next(self._numbers)}", []

    def begin(self) -> None:
        """Begin it: from now on this process passes all stages."""
        self._left = list(self._stages)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes.

        Args:
          key: contains the name of a stage, or else stands for what comes after the last of them.
          timeout_ms: to wait at most.

        Raises:
          Exception: as the constructor says: a process failed, which is named.
        """
        client = distributed.global_state.client
        if client is None or jax.process_count() == 1:
            return
        stage = next((stage for stage in self._left if stage in key), None)
        if stage is None:
            # The work is over. Stages that this process never came to are those in which it failed;
            # the others wait there, and look for a key once they are through: so the key is set
            # before the barrier.
            for missed in self._left:
                client.key_value_set(f"{self._name}/{missed}/failed/{jax.process_index()}", "")
                client.wait_at_barrier(f"{self._name}/{missed}", timeout_ms)
            self._left = []
            client.wait_at_barrier(f"{self._name}/{key}", timeout_ms)
            return
        self._left.remove(stage)
        client.wait_at_barrier(f"{self._name}/{stage}", timeout_ms)
        # A process that failed has set its key before it came to the barrier, so it is there by
        # now.
        keys = client.key_value_dir_get(f"{self._name}/{stage}/failed/")
        if failed := [int(name.rpartition("/")[2]) for name, _ in keys]:
            raise self._error(failure(self._what, min(failed)))


def failure(what: str, process: int) -> str:
    """Return what the other processes are told."""
    return f"{what} of process {process} failed: that process raises the error, with its cause and remedy"
