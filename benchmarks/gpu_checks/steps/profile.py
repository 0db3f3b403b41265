"""Read a device's profile: idle time, copies during kernels, both directions, bytes.

`jax.profiler` stores CUPTI's events in a file `*.xplane.pb`, which XProf opens; here it is stored
compressed. The plane "/device:GPU:0" has a line for each stream. An event there is a kernel, or a
copy ("MemcpyH2D", "MemcpyD2H") whose details give its bytes. Kernels that move host memory are
recognized by their instruction, since the profile shows no other difference.
"""

import contextlib
import dataclasses
import gzip
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

UP, DOWN = "MemcpyH2D", "MemcpyD2H"
_SIZE = re.compile(r"\bsize:(\d+)")

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class DeviceEvents:
    """Events on a device, in seconds from an arbitrary start.

    Attributes:
      kernels: (start, end, instruction) of each kernel; the instruction is "" if the profile does
        not name it.
      copies: (start, end, bytes) of each copy, by `UP` and `DOWN`.
    """

    kernels: list[tuple[float, float, str]]
    copies: dict[str, list[tuple[float, float, int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured activity of a device per step.

    Attributes:
      seconds: time from the first event to the last.
      compute_seconds: time in which at least one kernel runs that does not move host memory.
      mover_seconds: time in which a kernel runs that moves host memory.
      copy_seconds: time in which a copy runs, by direction.
      copied_bytes: bytes that copies move, by direction.
      beside: share of the copies' time in which kernels of `compute_seconds` run.
      both_seconds: time in which copies run in both directions.
      both_rate: bytes per second in both directions together during `both_seconds`; 0 if copies
        never run in both.
    """

    seconds: float
    compute_seconds: float
    mover_seconds: float
    copy_seconds: dict[str, float]
    copied_bytes: dict[str, float]
    beside: float
    both_seconds: float
    both_rate: float

    @property
    def idle(self) -> float:
        """Share of the step in which the cores run no kernel, or only move host memory."""
        return 1 - self.compute_seconds / self.seconds


@contextlib.contextmanager
def profiled(keep: pathlib.Path) -> Iterator[None]:
    """Profile the code inside and store the compressed profile in the file `keep`."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        options: Any = jax.profiler.ProfileOptions()
        # The calls of Python and of the runtime would fill most of the file.
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        with jax.profiler.trace(folder, profiler_options=options):
            yield
        found = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not found:
            raise RuntimeError("the profiler left no *.xplane.pb")
        keep.parent.mkdir(parents=True, exist_ok=True)
        with found[-1].open("rb") as profile, gzip.open(keep, "wb") as kept:
            shutil.copyfileobj(profile, kept)


def read_events(path: pathlib.Path) -> DeviceEvents:
    """Read a profile that `profiled` stored.

    Raises:
      NotImplementedError: if it holds no GPU.
    """
    from jax.profiler import ProfileData

    with gzip.open(path) as kept:
        return events_of(ProfileData.from_serialized_xspace(kept.read()))


def events_of(data: Any) -> DeviceEvents:
    """Return the events on the first GPU of a profile.

    Raises:
      NotImplementedError: if it holds no GPU.
    """
    planes = sorted(
        (plane for plane in data.planes if plane.name.startswith("/device:GPU")),
        key=lambda plane: plane.name,
    )
    if not planes:
        raise NotImplementedError("the profile holds no GPU, only its host")
    events = DeviceEvents([], {UP: [], DOWN: []})
    for one in planes[0].lines:
        if not one.name.startswith("Stream"):  # other lines repeat the events by step and module
            continue
        for event in one.events:
            start, end = event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
            stats = {
                name: value for name, value in event.stats if name in ("memcpy_details", "hlo_op")
            }
            if event.name in events.copies:
                size = _SIZE.search(str(stats.get("memcpy_details", "")))
                events.copies[event.name].append((start, end, int(size[1]) if size else 0))
            elif not event.name.startswith(("Memcpy", "Memset")):
                events.kernels.append((start, end, str(stats.get("hlo_op", ""))))
    return events


def measure(events: DeviceEvents, movers: Collection[str], num_steps: int) -> Measured:
    """Return the activity of a profile's steps, per step.

    Args:
      events: events on the device.
      movers: instructions whose kernels move host memory.
      num_steps: number of steps in the profile, run back to back.

    Raises:
      NotImplementedError: if the profile holds no kernel.
    """
    all_copies = [interval for copies in events.copies.values() for interval in copies]
    if not events.kernels:
        raise NotImplementedError("the profile saw no kernel")
    starts, ends = zip(*[(e[0], e[1]) for e in (*events.kernels, *all_copies)], strict=True)
    compute = union([(start, end) for start, end, name in events.kernels if name not in movers])
    moving = union([(start, end) for start, end, name in events.kernels if name in movers])
    ways = {
        way: union([(start, end) for start, end, _ in copies])
        for way, copies in events.copies.items()
    }
    both = common(ways[UP], ways[DOWN])
    either = union([*ways[UP], *ways[DOWN]])
    # Bytes moved while both directions are in use, if each copy runs at an even rate.
    moved = sum(
        size * length(common([(start, end)], both)) / (end - start)
        for start, end, size in all_copies
        if end > start
    )
    return Measured(
        seconds=(max(ends) - min(starts)) / num_steps,
        compute_seconds=length(compute) / num_steps,
        mover_seconds=length(moving) / num_steps,
        copy_seconds={way: length(found) / num_steps for way, found in ways.items()},
        copied_bytes={
            way: sum(size for *_, size in copies) / num_steps
            for way, copies in events.copies.items()
        },
        beside=length(common(either, compute)) / length(either) if either else 0.0,
        both_seconds=length(both) / num_steps,
        both_rate=moved / length(both) if both else 0.0,
    )


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same time."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the time in both of two lists of intervals, each as returned by `union`."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Sequence[Interval]) -> float:
    """Return the total seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def keep_profile(run: Callable[[], None], keep: pathlib.Path) -> DeviceEvents:
    """Profile a call, store the profile, and return the events on the device.

    Raises:
      NotImplementedError: if the call ran on no GPU. The file is stored nevertheless.
    """
    with profiled(keep):
        run()
    return read_events(keep)
