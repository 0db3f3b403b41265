"""What fails in one process is raised in all: else the others wait for it in the next collective, without end.

A step is one program of all processes, and its callbacks never raise, so that every process comes to its end. There, and before
the next, each tells the others whether something failed, by a reduction of one number a device:

    failed = min over processes (its index if something failed in it, else the number of processes)

A number that all must agree on is the least of theirs. A program of one process needs none of it and does none.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_offload.swap_error import SwapError


class Together:
    """The processes of a mesh.

    Attributes:
      what: they do together.
      error: raised in those that did not fail.
    """

    def __init__(self, mesh: Mesh, what: str = "the nvme tier", error: type[Exception] = SwapError) -> None:
        self.mesh, self.what, self.error = mesh, what, error

    @cached_property
    def _is_alone(self) -> bool:
        return len({device.process_index for device in self.mesh.devices.flat}) == 1

    @cached_property
    def _least(self) -> Any:
        return jax.jit(jnp.min, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def do(self, work: Callable[[], None]) -> None:
        """Do what may fail in one process alone. To be called by every process, at the same place.

        Raises:
          BaseException: whatever `work` raised here.
          SwapError, or as `error` says: it raised in another process, which is named.
        """
        if self._is_alone:
            work()
            return
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # an interrupt too: the others would wait
            error = raised
        first = self._first_of(error is not None)
        if error is not None:
            raise error
        if first is not None:
            raise self.error(f"{self.what} of process {first} failed: that process raises the error, with its cause and remedy")

    def _first_of(self, failed: bool) -> int | None:
        """Return the first process that failed."""
        none = jax.process_count()
        first = self.least(jax.process_index() if failed else none)
        return None if first == none else first

    def least(self, number: int) -> int:
        """Return the least of the processes' numbers, of 32 bits. To be called by every process, at the same place."""
        if self._is_alone:
            return number
        mine = np.full(1, number, np.int32)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        given = jax.make_array_from_callback((self.mesh.size,), sharding, lambda _: mine)
        return int(self._least(given))
