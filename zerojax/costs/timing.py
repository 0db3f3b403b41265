"""Seconds of a step: its schedule, walked tick by tick, with every resource in order.

A sum of totals (bytes / bandwidth + FLOPs / rate) is no step time: what overlaps is decided by the schedule. So each
resource of a device is a lane that does one thing after another,

    compute    the device's cores
    network    collectives over `fsdp` and `data`
    up, down   the link from and to the host
    read, write  the disk
    host       the kernel of the host's update

and a piece of work begins when its lane is free and what it waits for has ended. With d slots in the ring of a loop, t its
tick,

    fetched[t]  = max(fetched[t-1], taken[t-d])              + bytes / up        of a record on disk after its read
    computed[t] = max(computed[t-1], fetched[t], gathered[t]) + seconds(layer)
    stored[t]   = max(stored[t-1], computed[t])              + bytes / down

Gathers are waited for unless `gather_ahead`, as in the step. A record is fetched after it was stored: what forward stores last
is what backward fetches first. Lanes that share a wire share its bandwidth: while a loop moves a bytes one way and b the other,
both at once take (a + b) / both, and each way gets its part of that, at most its own rate. Loops overlap at their seams, where
this gives too much; so a step is never shorter than the bytes of a wire over its rate. The engine reads records on disk ahead,
at most `distance` of a kind, and not before they were written.

Cores that wait for an event wait for what it waited for: of a gather that began late, because a load came late, the gather's
own seconds count for the network, and those before it for the link (`StepTime.exposed`).

On a CPU the devices are threads of the cores that also copy and update: `up`, `down` and `host` are then done by `compute`.
"""

import bisect
import collections
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from host_offload.schedule import Phase, Schedule

LANES: tuple[str, ...] = ("compute", "network", "up", "down", "read", "write", "host")
ON_CORES = frozenset({"up", "down", "host"})
"""What the cores do besides where the device is a CPU."""


class Event(NamedTuple):
    """When a piece of work has ended and begun, in which lane, and what it began after: what else it needed, or its lane."""

    time: float
    lane: str
    start: float = 0.0
    after: "Event | None" = None


_time = operator.itemgetter(0)


def _latest(*events: Event) -> Event:
    """Return the last of some events."""
    return max(events, key=_time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wires:
    """Bytes a second of what one device can use of its link and its disk.

    Attributes:
      up: host to device.
      down: device to host.
      link_both: both ways at once, summed.
      read: of the disk; where several devices share it, this one's part.
      write: to the disk.
      disk_both: reads and writes at once, summed.
      shares_cores: the device is a CPU, whose cores copy and run the host's update.
    """

    up: float = float("inf")
    down: float = float("inf")
    link_both: float = float("inf")
    read: float = float("inf")
    write: float = float("inf")
    disk_both: float = float("inf")
    shares_cores: bool = False

    def times(self, *, link: float = 1.0, disk: float = 1.0) -> "Wires":
        """Return the wires with all rates of the link, or of the disk, times a factor."""
        return dataclasses.replace(
            self, up=self.up * link, down=self.down * link, link_both=self.link_both * link,
            read=self.read * disk, write=self.write * disk, disk_both=self.disk_both * disk,
        )  # fmt: skip

    def sharing(self, moved: Mapping[str, float]) -> dict[str, float]:
        """Return the rate of each lane while so many bytes move in each."""
        rates = {"up": self.up, "down": self.down, "read": self.read, "write": self.write}
        for one, other, both in (("up", "down", self.link_both), ("read", "write", self.disk_both)):
            a, b = moved.get(one, 0.0), moved.get(other, 0.0)
            if a and b and both < rates[one] + rates[other]:
                rates |= {one: min(rates[one], both * a / (a + b)), other: min(rates[other], both * b / (a + b))}
        return rates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostWork:
    """What an update on the host does for one record.

    Attributes:
      grads_down: bytes of gradients to the host.
      params_up: bytes of new parameters to the device.
      seconds: of the kernel.
      read: bytes read from disk.
      write: bytes written to it.
    """

    grads_down: float = 0.0
    params_up: float = 0.0
    seconds: float = 0.0
    read: float = 0.0
    write: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Work of one layer on one device, of all its microbatches.

    Attributes:
      forward: seconds of compute.
      backward: likewise, of the derivative and of what it computes again.
      update: seconds of the optimizer on the device.
      gather: seconds of a gather of the parameters.
      reduce: seconds of the reduction of the gradients.
      regather: seconds of the gather after an update, of stages 1 and 2.
      read: bytes of a record that is read, by kind of the schedule.
      written: likewise, of one that is written.
      host: of an update on the host.
    """

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    regather: float = 0.0
    read: Mapping[str, int] = dataclasses.field(default_factory=dict)
    written: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host: HostWork | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndsWork:
    """Work of the leaves that are no layers: embedding and head.

    Attributes:
      embed: seconds of forward.
      head: seconds of forward and derivative.
      embed_backward: seconds of the derivative.
      update: seconds of the optimizer on the device.
      gather: seconds of a gather of each; both are gathered twice.
      reduce: seconds of the reduction.
      load: bytes of parameters that are loaded once a step.
      load_read: those of them on disk.
      state_up: bytes of optimizer state that the update loads.
      state_down: bytes that it stores.
      state_read: those of `state_up` on disk.
      state_write: those of `state_down` on disk.
      host: of an update on the host.
    """

    embed: float = 0.0
    head: float = 0.0
    embed_backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    load: float = 0.0
    load_read: float = 0.0
    state_up: float = 0.0
    state_down: float = 0.0
    state_read: float = 0.0
    state_write: float = 0.0
    host: HostWork | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Something that a lane did: from `start` to `stop`, in seconds of the step, for a layer of the model; -1: for none."""

    lane: str
    label: str
    start: float
    stop: float
    layer: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseTime:
    """One part of a step: its seconds, and the lane that bounds it, which works or is waited for the longest in it."""

    name: str
    start: float
    stop: float
    bound_by: str

    @property
    def seconds(self) -> float:
        """From its start to its stop."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step, predicted.

    Attributes:
      seconds: of the step.
      busy: seconds that each lane works.
      exposed: seconds that the device's cores wait for a lane; of "compute" what they compute. These sum to `seconds`.
      phases: parts of the step in order, and what bounds each.
      spans: what every lane did.
    """

    seconds: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    phases: tuple[PhaseTime, ...]
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds that each lane works while the cores do not wait for it."""
        # More than a lane's work may be waited for: the seams of loops (`_Walk.rest`).
        return {lane: max(0.0, self.busy[lane] - self.exposed[lane]) if lane != "compute" else 0.0 for lane in LANES}

    @property
    def bound_by(self) -> str:
        """The lane that works the longest, or is waited for: with the others infinitely fast, the step takes as long."""
        return max(LANES, key=lambda lane: max(self.busy[lane], self.exposed[lane]))

    def __str__(self) -> str:
        rows = [f"{'':<10} {'busy s':>10} {'hidden s':>10} {'exposed s':>10}"]
        for lane in LANES:
            if self.busy[lane] or self.exposed[lane]:
                rows.append(f"{lane:<10} {self.busy[lane]:>10.4f} {self.hidden[lane]:>10.4f} {self.exposed[lane]:>10.4f}")
        parts = ", ".join(f"{p.name} {p.seconds:.4f} s ({p.bound_by})" for p in self.phases if p.seconds)
        return "\n".join([f"{self.seconds:.4f} s a step, predicted: {parts}", *rows])


class _Clock:
    """The lanes, and what they have done so far."""

    def __init__(self, wires: Wires) -> None:
        self.wires, self.rates = wires, wires.sharing({})
        self.free = {lane: Event(0.0, lane) for lane in LANES}
        self.moved: dict[str, float] = dict.fromkeys(("up", "down", "read", "write"), 0.0)
        self.busy, self.exposed = dict.fromkeys(LANES, 0.0), dict.fromkeys(LANES, 0.0)
        self.spans: list[Span] = []
        self.first = 0
        """The model's layer that is layer 0 of the schedule."""

    @property
    def now(self) -> Event:
        """When the cores have done what they were given."""
        return self.free["compute"]

    def run(self, lane: str, seconds: float, *after: Event, label: str = "", layer: int = -1) -> Event:
        """Do some work after some events, and return its end. Work of no seconds takes no lane."""
        ready = max(after, key=_time, default=Event(0.0, lane))
        if seconds <= 0:
            return ready
        named = lane
        if self.wires.shares_cores and lane in ON_CORES:
            lane = "compute"
        before = _latest(self.free[lane], ready)
        start = before.time
        if lane == "compute":
            self._wait(ready)
            self.exposed[named] += seconds
        self.busy[named] += seconds
        end = Event(start + seconds, named, start, before)
        self.free[lane] = end
        self.spans.append(Span(named, label, start, end.time, layer + self.first if layer >= 0 else layer))
        return end

    def move(self, lane: str, num_bytes: float, *after: Event, label: str = "", layer: int = -1) -> Event:
        """Move bytes in a lane of a wire."""
        self.moved[lane] += num_bytes
        return self.run(lane, num_bytes / self.rates[lane], *after, label=label, layer=layer)

    def wait(self, *events: Event) -> Event:
        """Let the cores wait for events."""
        self._wait(_latest(*events))
        return self.now

    def _wait(self, ready: Event) -> None:
        """Let the cores wait, and note for what: for the event's own work since it began; before, for what that waited for."""
        now, stop, event = self.now.time, ready.time, ready
        if stop <= now:
            return
        self.free["compute"] = ready
        while event is not None and stop > now:
            begin = max(now, event.start)
            self.exposed[event.lane] += stop - begin
            stop, event = begin, event.after


class _Walk:
    """One walk through a step."""

    def __init__(self, wires: Wires, distance: int) -> None:
        self.clock, self.distance = _Clock(wires), max(1, distance)
        self.parts: list[tuple[str, float, float, Mapping[str, float]]] = []
        # When the records of a kind on disk were taken from the ring of buffers, in order; and when each was last stored.
        self.taken: dict[str, collections.deque[Event]] = collections.defaultdict(
            lambda: collections.deque(maxlen=self.distance)
        )
        self.written: dict[tuple[str, int], Event] = {}

    # --- moves -------------------------------------------------------------------------------------------------------------

    def fetch(
        self, kinds: Iterable[str], layer: int, run: "_Run", *after: Event, sizes: Mapping[str, int] | None = None
    ) -> Event:
        """Bring a record to the device: off the disk first, where it rests there. Returns its arrival."""
        clock, sizes = self.clock, run.work.read if sizes is None else sizes
        here, total, read = _latest(*after), 0, list[str]()
        for kind in kinds:
            size = sizes.get(kind, 0)
            if not size:
                continue
            total += size
            key = f"{run.name}{kind}"
            there = self.written.get((key, layer), Event(0.0, "down"))
            if run.schedule.tiers[kind] == "nvme":
                there = clock.move("read", size, self.room(key), there, label=f"read {kind}", layer=layer)
                read.append(key)
            here = _latest(here, there)
        end = clock.move("up", total, here, label=f"load {', '.join(kinds)}", layer=layer)
        for key in read:
            self.taken[key].append(end)
        return end

    def room(self, key: str) -> Event:
        """Return when the next record of a kind on disk has a buffer to be read to."""
        ring = self.taken[key]
        return ring[0] if len(ring) == self.distance else Event(0.0, "read")

    def store(self, kinds: Iterable[str], layer: int, run: "_Run", *after: Event) -> Event:
        """Take a record off the device, and to the disk where it rests there. Returns when it rests."""
        clock = self.clock
        sizes = {kind: run.work.written.get(kind, 0) for kind in kinds}
        label = f"store {', '.join(kinds)}"
        end = clock.move("down", sum(sizes.values()), *after, label=label, layer=layer)
        for kind, size in sizes.items():
            on_disk = size and run.schedule.tiers[kind] == "nvme"
            rests = clock.move("write", size, end, label=f"write {kind}", layer=layer) if on_disk else end
            self.written[f"{run.name}{kind}", layer] = rests
        return end

    def update_on_host(self, host: HostWork, layer: int, *after: Event, name: str = "") -> Event:
        """Run the host's update of one record. Returns when its parameters are where they rest."""
        clock = self.clock
        there = clock.move("down", host.grads_down, *after, label="gradients", layer=layer)
        read = clock.move("read", host.read, self.room(name), label="read opt_state", layer=layer)
        done = clock.run("host", host.seconds, there, read, label="update", layer=layer)
        self.taken[name].append(done)
        clock.move("write", host.write, done, label="write opt_state", layer=layer)
        return clock.move("up", host.params_up, done, label="parameters", layer=layer)

    # --- loops -------------------------------------------------------------------------------------------------------------

    def loop(self, phase: Phase, run: "_Run", begin: Event) -> Event:
        """Run a phase whose first fetches may start at `begin`. Returns when the last store of the loop has ended."""
        clock, work, slots = self.clock, run.work, dict[int, Event]()
        clock.first = run.first
        is_update, is_backward = phase.name == "update", phase.name == "backward"
        ahead = run.schedule.gather_ahead and not is_update
        updates = is_update or (is_backward and run.schedule.update == "in_backward")
        clock.rates = clock.wires.sharing(_moved(phase, run))
        off = phase.off_device
        fetches = lambda layer: off(phase.fetches, layer)  # noqa: E731
        for layer, slot in zip(phase.preload.tolist(), phase.preload_slot.tolist(), strict=True):
            slots[slot] = self.fetch(fetches(layer), layer, run, begin)
        gather = 0.0 if is_update else work.gather
        gathered = begin
        if phase.first >= 0:
            arrived = self.fetch(fetches(phase.first), phase.first, run, begin)
            gathered = clock.run("network", gather, arrived, label="gather", layer=phase.first)
        last = begin
        columns = [getattr(phase, name).tolist() for name in ("layer", "consume", "use_slot", "fetch", "fetch_slot")]
        for layer, consume, slot, fetched, fetch_slot in zip(*columns, strict=True):
            start = clock.now
            record = slots[slot] if slot >= 0 else start
            if slot < 0 and consume >= 0 and fetches(consume):
                record = self.fetch(fetches(consume), consume, run, start)
            taken = _latest(record, start)
            if fetched >= 0 and fetch_slot >= 0:
                slots[fetch_slot] = self.fetch(fetches(fetched), fetched, run, taken)
            ready = gathered
            if consume >= 0:
                gathered = clock.run("network", gather, taken, label="gather", layer=consume)
            if not ahead:
                ready = gathered
            besides = off(phase.reads, layer)
            read = self.fetch(besides, layer, run, start) if besides else start
            if is_update:
                done = clock.run("compute", work.update, ready, read, label="update", layer=layer)
            else:
                seconds = work.backward if is_backward else work.forward
                done = clock.run("compute", seconds, ready, label=phase.name, layer=layer)
            if is_backward:
                done = clock.run("network", work.reduce, done, label="reduce", layer=layer)
                if updates and work.host is None:
                    done = clock.run("compute", work.update, done, read, label="update", layer=layer)
            made = done  # what is stored: it need not be gathered first
            if updates:
                done = clock.run("network", work.regather, done, label="gather", layer=layer)
            if updates and work.host is not None:
                last = _latest(last, self.update_on_host(work.host, layer, done, name=f"{run.name}opt_state"))
            # Stored late, a record waits for the next tick, which begins when this one has ended.
            if (writes := off(phase.writes, layer)) and not (updates and work.host is not None):
                last = _latest(last, self.store(writes, layer, run, made))
            last = _latest(last, done)
        return last

    def rest(self) -> None:
        """Let the step last as long as each wire needs for its bytes.

        Writes to the disk may end beside the next step's forward, and reads of the next step be in this one. In a steady state
        a step is no shorter for it than what the disk has to do.
        """
        clock, wires = self.clock, self.clock.wires
        up, down, read, write = clock.moved.values()
        least = {"up": (up + down) / wires.link_both, "read": (read + write) / wires.disk_both, "write": write / wires.write}
        lane = max(least, key=least.__getitem__)
        clock.wait(Event(least[lane], lane, clock.now.time, clock.now))

    def part(self, name: str, start: float, exposed: Mapping[str, float]) -> None:
        """Note a part of the step that ends now, given what was waited for before it."""
        waited = {lane: self.clock.exposed[lane] - exposed[lane] for lane in LANES}
        self.parts.append((name, start, self.clock.now.time, waited))

    def phases(self) -> list[PhaseTime]:
        """Return the parts of the step. What a lane does may reach from one into others."""
        starts, worked = [start for _, start, _, _ in self.parts], [dict.fromkeys(LANES, 0.0) for _ in self.parts]
        for span in self.clock.spans:
            first = max(0, bisect.bisect_right(starts, span.start) - 1)
            for n in range(first, bisect.bisect_left(starts, span.stop)):
                _, start, stop, _ = self.parts[n]
                worked[n][span.lane] += max(0.0, min(stop, span.stop) - max(start, span.start))
        found = []
        for (name, start, stop, waited), work in zip(self.parts, worked, strict=True):
            found.append(PhaseTime(name, start, stop, max(LANES, key=lambda lane, w=work, e=waited: max(w[lane], e[lane]))))
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """The loops over some layers.

    Attributes:
      name: of them.
      first: layer of the model that is the first of them.
      schedule: of their loops.
      work: of a layer.
    """

    name: str
    first: int
    schedule: Schedule
    work: LayerWork


def step_time(
    layers: Sequence[tuple[Schedule, LayerWork]], ends: EndsWork | None = None, wires: Wires | None = None, *, repeats: int = 1
) -> StepTime:
    """Return the seconds of a step that follows some schedules.

    Args:
      layers: the schedule of each stack or segment of layers, in order, and the work of one of its layers.
      ends: work of embedding and head.
      wires: rates of link and disk; without, nothing that moves takes time.
      repeats: how often forward and backward run: once for each microbatch of a resident step. The schedules of a streamed
        step compute all microbatches in a tick.
    """
    ends, wires = ends or EndsWork(), wires or Wires()
    firsts = [0, *itertools.accumulate(schedule.num_layers for schedule, _ in layers)]
    runs = [_Run(name=f"{n}/" if n else "", first=firsts[n], schedule=s, work=w) for n, (s, w) in enumerate(layers)]
    walk = _Walk(wires, max((s.distance for s, _ in layers), default=0))
    clock = walk.clock

    def phase(name: str, body: Any) -> Any:
        start, before = clock.now.time, dict(clock.exposed)
        result = body()
        walk.part(name, start, before)
        return result

    def embed() -> None:
        clock.rates = wires.sharing({})
        read = clock.move("read", ends.load_read, label="read ends")
        here = clock.move("up", ends.load, read, label="load ends")
        clock.run("compute", ends.embed, clock.run("network", ends.gather, here, label="gather"), label="embed")

    def forward() -> None:
        begin = clock.now
        for run in runs:
            walk.loop(run.schedule.phase("forward"), run, begin)
            begin = clock.now

    def head() -> None:
        ready = clock.run("network", 2 * ends.gather, clock.now, label="gather")  # for its derivative, too
        clock.run("compute", ends.head, ready, label="head")

    def backward(begin: Event) -> Event:
        last = begin
        for run in reversed(runs):
            last = _latest(last, walk.loop(run.schedule.phase("backward"), run, begin))
            begin = clock.now
        ready = clock.run("network", ends.gather, clock.now, label="gather")
        done = clock.run("compute", ends.embed_backward, ready, label="embed, derivative")
        clock.run("network", ends.reduce, done, label="reduce")
        return _latest(last, clock.now, clock.free["network"])

    last = Event(0.0, "compute")
    for _ in range(repeats):
        phase("embed", embed)
        phase("forward", forward)
        begin = clock.now  # what backward fetches first may overlap the head, and not the layers
        phase("head", head)
        last = phase("backward", lambda begin=begin: backward(begin))

    def update(last: Event) -> None:
        after = [run for run in runs if any(p.name == "update" for p in run.schedule.phases)]
        if after:  # the norm of all gradients is known once they are there
            clock.wait(clock.free["network"])
        ended = [last, walk_ends(walk, ends)]
        for run in after:
            begin = clock.now
            ended.append(walk.loop(run.schedule.phase("update"), run, begin))
        clock.wait(*ended, *(clock.free[lane] for lane in ("up", "down", "host", "network")))
        walk.rest()

    phase("update", lambda: update(last))
    return StepTime(
        seconds=clock.now.time,
        busy=dict(clock.busy),
        exposed=dict(clock.exposed),
        phases=_joined(walk.phases()),
        spans=tuple(clock.spans),
    )


def walk_ends(walk: _Walk, ends: EndsWork) -> Event:
    """Update embedding and head; returns when they rest."""
    clock = walk.clock
    clock.rates = clock.wires.sharing({"up": ends.state_up, "down": ends.state_down})
    if ends.host is not None:
        return walk.update_on_host(ends.host, -1, clock.now)
    read = clock.move("read", ends.state_read, label="read ends")
    here = clock.move("up", ends.state_up, read, clock.now, label="load ends")
    done = clock.run("compute", ends.update, here, clock.now, label="update ends")
    end = clock.move("down", ends.state_down, done, label="store ends")
    clock.move("write", ends.state_write, end, label="write ends")
    return end


def _moved(phase: Phase, run: _Run) -> dict[str, float]:
    """Return the bytes that a loop moves in each lane, by which lanes share a wire."""
    moved = collections.Counter[str]()
    tiers, work = run.schedule.tiers, run.work
    for kinds, sizes, lane, disk in (
        ((*phase.fetches, *phase.reads), work.read, "up", "read"),
        (phase.writes, work.written, "down", "write"),
    ):
        for kind in kinds:
            moved[lane] += sizes.get(kind, 0)
            moved[disk] += sizes.get(kind, 0) if tiers[kind] == "nvme" else 0
    if work.host is not None and (phase.name == "update" or run.schedule.update == "in_backward"):
        host = work.host
        moved.update({"up": host.params_up, "down": host.grads_down, "read": host.read, "write": host.write})
    return dict(moved)


def _joined(phases: Sequence[PhaseTime]) -> tuple[PhaseTime, ...]:
    """Return the parts of a step; of several microbatches, those of the last one stand for all, in one part."""
    names = [p.name for p in phases]
    if len(set(names)) == len(names):
        return tuple(phases)
    last = {p.name: p for p in phases}
    start, stop = phases[0].start, phases[-2].stop
    longest = max((p for p in phases if p.name != "update"), key=lambda p: p.seconds)
    return (PhaseTime("microbatches", start, stop, longest.bound_by), last["update"])
