"""Build the schedule of a train step, and suggest a change if it exceeds a budget of bytes.

`host_offload.schedule.phase_writer` writes the phases. Bytes in flight never decrease with the
distance, so bisection finds the largest distance that fits a budget.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np

from host_offload.schedule.ops import (
    HEAD,
    HEAD_PIECES,
    KINDS,
    LATE_UNSTACKED,
    ON_DISK,
    UNSTACKED_PIECES,
    HostUpdate,
)
from host_offload.schedule.phase_writer import PhaseWriter
from host_offload.schedule.schedule import SIZES, UPDATES, Schedule
from host_offload.schedule.unstacked import UnstackedMove
from host_offload.tiers import TIERS


class HasPeak(Protocol):
    """A schedule or a step that knows its peak of bytes in flight."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device."""
        ...


def build_schedule(
    num_layers: int,
    distance: int = 0,
    *,
    tiers: Mapping[str, str] | None = None,
    update: str = "after_backward",
    gather_ahead: bool = False,
    master: bool = True,
    device_layers: int = 0,
    stores_late: int = 0,
    unstacked: Sequence[UnstackedMove] = (),
    host: HostUpdate | None = None,
    regathers: bool = False,
    record_bytes: Mapping[str, int] | None = None,
    budget_bytes: int | None = None,
    first_layer: int = 0,
) -> Schedule:
    """Return the schedule of a train step over equal layers.

    Args:
      num_layers: number of equal layers of the stack.
      distance: ticks between the fetch of a record and its use; may exceed num_layers.
      tiers: tier in TIERS by kind in KINDS; missing kinds are on the device.
      update: when a layer's optimizer runs, "after_backward", "in_backward" or "in_forward".
      gather_ahead: whether to take and gather the next layer while the current layer computes; two
        layers are then gathered at the same time.
      master: whether parameters have float32 masters, stored and moved with opt_state; without them
        an update reads the parameters.
      device_layers: number of the first layer whose opt_state is in its tier; the opt_state of
        lower layers stays on the device.
      stores_late: number of ticks between a record's update and its store, in the phase that
        updates (backward or update); at most num_layers.
      unstacked: unstacked leaves that are updated during a phase with late stores.
      host: how callbacks update records on the host; None: the device updates them.
      regathers: whether devices update shards of replicated parameters and gather them afterwards.
      record_bytes: bytes of one layer per device, by kind as stored (params: the device's shard).
        More keys are "gathered", the layer's gathered parameters; "derivative", its unsharded
        gradient, in addition to the shards; "handed", "weights" and "made" for an update on the
        host; and "<kind>_on_disk", a record's size on disk, by default the kind's own size. Missing
        keys are 0.
      budget_bytes: most bytes in flight per device; None for no limit.
      first_layer: number of the first layer in its stack, if the layers are a part of a stack.

    Raises:
      ValueError: a size is invalid, a name is unknown, or more bytes are in flight than the budget.
        In the last case the message gives the largest distance that fits, with the same
        gather_ahead if possible.
    """
    _check_sizes(num_layers, distance, device_layers, stores_late, first_layer)
    _check_unstacked(unstacked, num_layers)
    _check_records(tiers or {}, record_bytes or {})
    if update not in UPDATES:
        choices = ", ".join(map(repr, UPDATES))
        raise ValueError(f"update={update!r}: choose from {choices}")
    if stores_late and update == "in_forward":
        raise ValueError(f"stores_late={stores_late} with update='in_forward': 0 is needed")

    sizes = None
    if record_bytes is not None:
        zeros = {kind: 0 for kind in SIZES if not kind.endswith(ON_DISK)}
        sizes = MappingProxyType(zeros | dict(record_bytes))
    writer = PhaseWriter(
        layers=range(first_layer, first_layer + num_layers),
        distance=distance,
        tiers={kind: (tiers or {}).get(kind, "device") for kind in KINDS},
        update=update,
        gather_ahead=gather_ahead,
        master=master,
        device_layers=device_layers,
        stores_late=stores_late,
        unstacked=tuple(unstacked),
        host=host,
        regathers=regathers,
        sizes=sizes or {},
    )

    def build(distance: int, gather_ahead: bool) -> Schedule:
        changed = dataclasses.replace(writer, distance=distance, gather_ahead=gather_ahead)
        return _write_schedule(changed, sizes)

    schedule = build(distance, gather_ahead)
    if budget_bytes is not None:
        _check_budget(schedule, build, budget_bytes)
    return schedule


def _write_schedule(writer: PhaseWriter, record_bytes: Mapping[str, int] | None) -> Schedule:
    """Return the schedule with the writer's phases; `record_bytes` is None if sizes are unknown."""
    return Schedule(
        num_layers=len(writer.layers),
        distance=writer.distance,
        update=writer.update,
        gather_ahead=writer.gather_ahead,
        master=writer.master,
        tiers=MappingProxyType(dict(writer.tiers)),
        device_layers=writer.device_layers,
        phases=writer.phases(),
        record_bytes=record_bytes,
        first_layer=writer.layers.start,
    )


def _check_budget(
    schedule: Schedule, build: Callable[[int, bool], Schedule], budget_bytes: int
) -> None:
    """Raise ValueError if a schedule exceeds its budget, or if its bytes are unknown.

    Args:
      schedule: schedule to check.
      build: function that builds the schedule of another prefetch distance and `gather_ahead`.
      budget_bytes: most bytes in flight per device.
    """
    _check_int("budget_bytes", budget_bytes, 0)
    if schedule.record_bytes is None:
        raise ValueError(
            f"budget_bytes={budget_bytes} needs record_bytes, the bytes of one layer by kind"
        )
    if schedule.peak_bytes > budget_bytes:
        raise _over_budget(schedule, build, budget_bytes)


def _over_budget(
    schedule: Schedule, build: Callable[[int, bool], Schedule], budget_bytes: int
) -> ValueError:
    """Return the error for a schedule that exceeds its budget, with a change that makes it fit."""
    gather_ahead = schedule.gather_ahead
    choices = (True, False) if gather_ahead else (False,)
    peak_bytes = schedule.peak_bytes
    return ValueError(
        f"budget_bytes={budget_bytes}: prefetch_distance={schedule.distance} with "
        f"gather_ahead={gather_ahead} puts {peak_bytes} bytes in flight on a "
        f"device, {peak_bytes - budget_bytes} more; "
        + advise(build, schedule.distance, choices, budget_bytes)
    )


def advise(
    build: Callable[[int, bool], HasPeak],
    distance: int,
    gather_ahead: Sequence[bool],
    budget_bytes: int,
) -> str:
    """Return a change that makes a schedule fit a budget, as a clause of an error message.

    Args:
      build: function that builds the schedule of a prefetch distance and a `gather_ahead`.
      distance: prefetch distance that does not fit.
      gather_ahead: choices in order of preference, beginning with the choice that does not fit.
      budget_bytes: most bytes in flight per device.
    """
    for ahead in gather_ahead:
        distances = range(distance + 1)
        num_fitting = bisect.bisect_right(
            distances, budget_bytes, key=lambda d: build(d, ahead).peak_bytes
        )
        if num_fitting:
            largest = num_fitting - 1
            peak_bytes = build(largest, ahead).peak_bytes
            change = "" if ahead == gather_ahead[0] else f"gather_ahead={ahead} with "
            return f"{change}prefetch_distance={largest} fits, with {peak_bytes} bytes"
    ahead = gather_ahead[-1]
    min_bytes = build(0, ahead).peak_bytes
    return (
        f"nothing fits: prefetch_distance=0 with gather_ahead={ahead} needs {min_bytes} bytes, "
        f"{min_bytes - budget_bytes} more"
    )


def _check_sizes(
    num_layers: int, distance: int, device_layers: int, stores_late: int, first_layer: int
) -> None:
    _check_int("num_layers", num_layers, 1)
    _check_int("distance", distance, 0)
    _check_int("first_layer", first_layer, 0)
    _check_int("stores_late", stores_late, 0, num_layers)
    _check_int("device_layers", device_layers, 0, first_layer + num_layers)


def _check_unstacked(unstacked: Sequence[UnstackedMove], num_layers: int) -> None:
    known = (HEAD, HEAD_PIECES, LATE_UNSTACKED, UNSTACKED_PIECES)
    _check_names("unstacked", [move.leaves for move in unstacked], known)
    for move in unstacked:
        most = num_layers if move.leaves == HEAD_PIECES else None
        for count in move.counts:
            _check_int(f"counts of {move.leaves}", count, 1, most)


def _check_records(tiers: Mapping[str, str], record_bytes: Mapping[str, int]) -> None:
    _check_names("tiers", tiers, KINDS)
    for kind, tier in tiers.items():
        if tier not in TIERS:
            raise ValueError(f"tiers[{kind!r}]={tier!r}: known tiers are {', '.join(TIERS)}")
    _check_names("record_bytes", record_bytes, SIZES)
    for kind, size in record_bytes.items():
        _check_int(f"record_bytes[{kind!r}]", size, 0)


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}={value!r}: an int is needed")
    if value < least or (most is not None and value > most):
        bounds = f"{least} or more is needed" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}={value}: {bounds}")


def _check_names(argument: str, names: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(names) - set(known), key=str)
    if unknown:
        wrong = ", ".join(map(repr, unknown))
        raise ValueError(f"{argument} has unknown {wrong}: choose from {', '.join(known)}")
