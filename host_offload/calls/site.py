"""Predict which record each callback of a running program asks for.

A GPU callback runs while its program is still being queued, so the values that the program computes
do not exist yet. To read even one index, the callback would have to wait until the GPU has finished
all work queued so far, and the GPU would then be idle until more work is queued. But the order of a
program's callbacks is known in advance. A **site** is one callback of a traced program. The
schedule lists the records it asks for, and every device calls it in that order:

    site.order      layer of each call in a step; known when the program is traced
    call n          layer = order[n]; the site counts n per device, from 0 in each step
    device          the device to which the program's stream belongs
    state           number of the state, which no callback changes during a step

The program also sends all three values, i32[3] (`Calls.request`). On a CPU they are immediately
compared with the prediction. On a GPU they are copied to a log in page-locked memory when the
program reaches the call (`host_offload.calls.log`), and compared at the end of the step, before its
results are returned (`Calls.check`). A different order raises a `SwapError`; it never produces a
wrong result.

A site without an order waits for the values that the program sends. Programs that create or read a
state use such sites.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.calls.log import CallLog
from host_offload.device import driver
from host_offload.disk import SwapError

Array = jax.Array


class Asked(NamedTuple):
    """The record that a callback is asked for.

    Attributes:
      rank: position of the device in the mesh.
      layer: index of the record within its kind.
      number: number of the state on disk to which the record belongs; 0 for a record that exists
        only within a step.
    """

    rank: int
    layer: int
    number: int


class Calls:
    """The callbacks of a mesh's programs. Only one program runs at a time.

    Attributes:
      number: number of the state that the program reads and updates; 0 if none is on disk.
      run: number of the running program.
      log: log of the requests that GPU programs send; None on CPUs and before the first program.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        """Store the devices of a mesh, in its order.

        The devices are not used before a program runs, so they need not be present until then.
        """
        self._devices = list(devices)
        self.number = 0
        self.log: CallLog | None = None
        self.run = 0
        self._max_calls = 0

    def begin(self) -> None:
        """Prepare for the first call of a program."""
        # With a new number each site counts from 0, even if the previous program was abandoned
        # halfway.
        self.run += 1
        self._make_log()
        if self.log is not None:
            self.log.clear()

    def _make_log(self) -> None:
        if self.log is None and self._devices[0].platform != "cpu":
            self.log = CallLog(self._devices, driver(), jax.process_index())
        if self.log is not None:
            self.log.reserve(self._max_calls)

    def reserve(self, num_calls: int) -> None:
        """Reserve log memory before a program runs, so that no callback has to allocate.

        Args:
          num_calls: number of calls of the program, per device.
        """
        # A program that is only compiled has no log, and needs no memory.
        self._max_calls = max(self._max_calls, num_calls)
        if self.log is not None:
            self.log.reserve(num_calls)

    def check(self) -> None:
        """Compare the requests that a GPU program sent since `begin` with the predictions.

        Call this when the program has ended. It does nothing on CPUs.

        Raises:
          SwapError: the program asked for different records than were fetched or stored for it.
        """
        if self.log is None:
            return
        for (site, count, assumed), sent in self.log.entries():
            if assumed != sent:
                raise site.surprise(count, Asked(*sent), assumed)

    @staticmethod
    def request(position: Array, layer: Array, number: Array) -> Array:
        """Return the i32[3] that a program sends with a call; used inside of a `shard_map`.

        Args:
          position: i32[1], position of the device in the mesh.
          layer: integer scalar, index of the record.
          number: i32[1], number of the state, or 0.
        """
        # `zerojax.program.call_order` finds the layer in this concatenation.
        return jnp.concatenate([position, layer[None].astype(jnp.int32), number])


class CallbackSite:
    """One callback of a traced program.

    A callback receives its site through `functools.partial(callback, ..., site=site)`; `find_site`
    retrieves it from there.

    Attributes:
      calls: callbacks of the program's mesh.
      name: operation of the callback, for messages, such as "fetch params".
      of_state: whether the program sends the number of the state; if False, it sends 0.
      order: layer of each call in one run of the program; None if unknown.
    """

    def __init__(self, calls: Calls, name: str, *, of_state: bool = True) -> None:
        """Create a site without an order.

        Args:
          calls: callbacks of the program's mesh.
          name: operation of the callback, for messages.
          of_state: whether the program sends the number of the state; if False, it sends 0.
        """
        self.calls = calls
        self.name = name
        self.of_state = of_state
        self.order: Sequence[int] | None = None
        # By rank: the number of the run, and of the calls made in it.
        self._counts: dict[int, tuple[int, int]] = {}

    def ask(self, context: Any, request: Any) -> Asked:
        """Return the record that this call is asked for.

        Args:
          context: the callback's context.
          request: the callback's buffer, i32[3], made by `Calls.request`.

        Raises:
          SwapError: the request differs from the schedule, or the schedule has no such call.
        """
        log = self.calls.log
        if log is None:
            asked = Asked(*np.asarray(request).tolist())
            if self.order is not None:
                count = self._count(asked.rank)
                if self._layer(count, asked.rank) != asked.layer:
                    raise self.surprise(count, asked, asked._replace(layer=self.order[count]))
            return asked
        if self.order is None:
            return Asked(*log.read(context, request))
        rank = log.find_rank(context, request)
        count = self._count(rank)
        assumed = Asked(rank, self._layer(count, rank), self.calls.number if self.of_state else 0)
        log.append(context, request, (self, count, assumed), rank)
        return assumed

    def _count(self, rank: int) -> int:
        """Return the number of this call on a device, counted from 0 in each run."""
        # No lock: a device makes one call at a time, and each device has its own entry.
        last_run, count = self._counts.get(rank, (0, 0))
        run = self.calls.run
        if last_run != run:
            count = 0
        self._counts[rank] = (run, count + 1)
        return count

    def _layer(self, count: int, rank: int) -> int:
        assert self.order is not None
        if count < len(self.order):
            return self.order[count]
        raise SwapError(
            f"{self.name}: device {rank} makes call {count + 1}, and its schedule has "
            f"{len(self.order)}"
        )

    def surprise(self, count: int, asked: Asked, assumed: Asked) -> SwapError:
        """Return the error for a call that asked for a different record than predicted.

        Args:
          count: number of the call on its device, counted from 0.
          asked: record that the program asked for.
          assumed: record that the schedule predicted.
        """
        names = {"rank": "device", "layer": "layer", "number": "state"}
        differences = list[str]()
        for field, name in names.items():
            actual = getattr(asked, field)
            expected = getattr(assumed, field)
            if actual != expected:
                differences.append(f"{name} {actual} and not {expected}")
        text = ", ".join(differences)
        return SwapError(
            f"{self.name}: call {count + 1} of a step was for {text} as scheduled, so wrong "
            "records may have moved. This is a bug in zerojax, not an error of the disk",
            layer=asked.layer,
        )


def find_site(callback: Callable[..., Any]) -> CallbackSite | None:
    """Return the site bound to a callback by `functools.partial`, or None if there is none."""
    site = getattr(callback, "keywords", {}).get("site")
    return site if isinstance(site, CallbackSite) else None
