"""Which record a callback of a running program is asked for, known before it is asked.

A callback on a GPU runs while its program is being queued: what the program computes is not there
  yet. To read even one index
it would have to wait until the GPU has done all that was queued before, and the GPU would then be
idle until more is queued. But the order of a program's callbacks is no secret. A **site** is one
callback of a traced program. The schedule says which records it asks for, one after the other, and
each device calls it in that order:

    site.order      layers, one for each call of a step                known when the program was traced
    call n          layer = order[n], n counted by the site            for each device by itself, from 0 in each step
    the device      that of the stream on which the program runs
    the state       its number, which no callback changes in a step

The program sends all three along, i32[3] (`Calls.where`). On a CPU they are compared with what is
assumed at once. On a GPU they are copied to a log in page-locked memory when the program comes to
that point (`host_offload.calls.log`), and compared at the end of the step, before anybody is told
its results (`Calls.check`). Another order is a `SwapError`, never a wrong number.

A site without an order, as of a program that makes a state or reads one, waits for what it is sent.
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
    """What a callback is asked for.

    Attributes:
      rank: position of the device in the mesh.
      layer: index of the record among those of its kind.
      number: of the state on disk to which it belongs; 0 of a record that lives inside a step.
    """

    rank: int
    layer: int
    number: int


class Calls:
    """The callbacks of a mesh's programs, of which one runs at a time.

    Attributes:
      number: of the state that the program reads and updates; 0 where none is on disk.
      run: number of the program that runs.
      log: what programs on GPUs send, from the first one on; None on CPUs.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        """Serve the devices of a mesh, in its order.

        They need not be there before a program runs.
        """
        self._devices, self.number = list(devices), 0
        self.log: CallLog | None = None
        self.run, self._most = 0, 0

    def begin(self) -> None:
        """Expect a program, from its first call on."""
        # A new number, so that each site counts from 0, also after a program that was left in the
        # middle.
        self.run += 1
        self._make_log()
        if self.log is not None:
            self.log.clear()

    def _make_log(self) -> None:
        if self.log is None and self._devices[0].platform != "cpu":
            self.log = CallLog(self._devices, driver(), jax.process_index())
        if self.log is not None:
            self.log.reserve(self._most)

    def reserve(self, num_calls: int) -> None:
        """Make room for what a program sends on each device, before it runs, so that no callback
        has to.
        """
        # A program that is only compiled has no driver, and needs no room.
        self._most = max(self._most, num_calls)
        if self.log is not None:
            self.log.reserve(num_calls)

    def check(self) -> None:
        """Compare what the program has sent since `begin` with what was assumed, when the program
        is over.

        Raises:
          SwapError: it asked for other records than those that it was given, or that were taken
            from it.
        """
        if self.log is None:
            return
        for (site, count, assumed), sent in self.log.entries():
            if assumed != sent:
                raise site.surprise(count, Asked(*sent), assumed)

    @staticmethod
    def where(position: Array, layer: Array, number: Array) -> Array:
        """Return what a program sends along with a call, i32[3], given i32[1], i32[] and i32[1];
        inside of a `shard_map`.
        """
        # `zerojax.program.call_order` finds the layer in this concatenation.
        return jnp.concatenate([position, layer[None].astype(jnp.int32), number])


class Site:
    """One callback of a traced program.

    A callback is handed its site by `functools.partial(callback, ..., site=site)`, where `site_of`
    finds it.

    Attributes:
      name: of what it does, for messages.
      order: the layer of each call in one run of the program; None where it is not known.
    """

    def __init__(self, calls: Calls, name: str, *, of_state: bool = True) -> None:
        """Make a site.

        Args:
          calls: of the program's mesh.
          name: of what it does.
          of_state: whether it is sent the number of the state, and not 0.
        """
        self.calls, self.name, self.of_state = calls, name, of_state
        self.order: Sequence[int] | None = None
        self._made: dict[
            int, tuple[int, int]
        ] = {}  # by device: the run, and the calls that came in it

    def ask(self, context: Any, where: Any) -> Asked:
        """Return what this call is asked for.

        Args:
          context: of the callback.
          where: its buffer, i32[3], as `Calls.where` makes it.

        Raises:
          SwapError: it is not what the schedule says.
        """
        log = self.calls.log
        if log is None:
            asked = Asked(*np.asarray(where).tolist())
            if self.order is not None:
                count = self._count(asked.rank)
                if self._layer(count, asked.rank) != asked.layer:
                    raise self.surprise(count, asked, asked._replace(layer=self.order[count]))
            return asked
        if self.order is None:
            return Asked(*log.read(context, where))
        rank = log.rank_of(context, where)
        count = self._count(rank)
        assumed = Asked(rank, self._layer(count, rank), self.calls.number if self.of_state else 0)
        log.append(context, where, (self, count, assumed), rank)
        return assumed

    def _count(self, rank: int) -> int:
        """Return the number of this call on a device, from 0 in each run."""
        # One device makes one call at a time, and devices share no entry.
        last, made = self._made.get(rank, (0, 0))
        run = self.calls.run
        made = made if last == run else 0
        self._made[rank] = (run, made + 1)
        return made

    def _layer(self, count: int, rank: int) -> int:
        assert self.order is not None
        if count < len(self.order):
            return self.order[count]
        raise SwapError(
            f"{self.name}: device {rank} makes call {count + 1}, and its schedule has {len(self.order)}"
        )

    def surprise(self, count: int, asked: Asked, assumed: Asked) -> SwapError:
        """Return the error of a call that came for another record than was assumed."""
        told = ", ".join(
            f"{name} {a} and not {b}"
            for name, a, b in zip(Asked._fields, asked, assumed, strict=True)
            if a != b
        )
        told = told.replace("rank", "device").replace("number", "state")
        return SwapError(
            f"{self.name}: call {count + 1} of a step was for {told} as scheduled, so wrong records may have moved. This is an "
            "error of zerojax, not of the disk",
            layer=asked.layer,
        )


def site_of(callback: Callable[..., Any]) -> Site | None:
    """Return the site that a callback was handed, or None."""
    site = getattr(callback, "keywords", {}).get("site")
    return site if isinstance(site, Site) else None
