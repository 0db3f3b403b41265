"""Seconds of a step: a walk through its schedule, tick by tick, with every resource used in order.

Adding up totals (bytes / bandwidth + FLOPs / rate) does not give the step time, because the
schedule decides what overlaps. So each resource of a device is a lane that does one thing at a
time:

    compute      the device's cores
    network      collectives over `fsdp` and `data`
    up, down     the host link, to the device and to the host
    read, write  the disk
    host         the kernel of the host update

A piece of work starts when its lane is free and its dependencies have ended. With d slots in a
loop's ring, and tick t,

    fetched[t]  = max(fetched[t-1], taken[t-d])               + bytes / up
    computed[t] = max(computed[t-1], fetched[t], gathered[t]) + seconds(layer)
    stored[t]   = max(stored[t-1], computed[t])               + bytes / down

where a record on disk is fetched after its read.

Compute waits for gathers unless `gather_ahead` is set, as in the step. A record is fetched after it
was stored: the record that forward stores last is the one that backward fetches first. Lanes that
share a wire share its bandwidth: if a loop moves a bytes one way and b bytes the other, both
together take (a + b) / both, and each direction gets its share of that rate, at most its own rate.
Where loops overlap, this overestimates the bandwidth, so a step is never shorter than a wire's
bytes over its rate. The engine reads records on disk ahead, at most `distance` of a kind, and not
before they were written.

Waiting for an event is charged to the lane that caused it. If a gather began late because a load
arrived late, the gather's own seconds count for the network, and the seconds before them for the
link (`StepTime.exposed`).

On a CPU, the devices are threads of the same cores that copy and update, so `compute` does the work
of `up`, `down` and `host`.
"""

import bisect
import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from host_offload.schedule import LANES, LAYERS, Op, Part, Phase, Record, StepPlan

ON_CORES = frozenset({"up", "down", "host"})
"""Lanes whose work the cores do if the device is a CPU."""


class Event(NamedTuple):
    """The end of a piece of work.

    Attributes:
      time: second at which the work ended.
      lane: lane of the work.
      start: second at which the work began.
      after: event that the work waited for: a dependency, or earlier work in its lane.
    """

    time: float
    lane: str
    start: float = 0.0
    after: "Event | None" = None


_time = operator.itemgetter(0)


def _latest(*events: Event) -> Event:
    """Return the latest of some events."""
    return max(events, key=_time)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wires:
    """Rates at which one device can use its host link and its disk, in bytes per second.

    Attributes:
      up: rate from host to device.
      down: rate from device to host.
      link_both: rate with both directions busy, summed.
      read: read rate of the disk; this device's part if several devices share the disk.
      write: write rate of the disk, shared in the same way.
      disk_both: rate with reads and writes both active, summed.
      shares_cores: whether the device is a CPU, whose cores also copy and run the host update.
    """

    up: float = float("inf")
    down: float = float("inf")
    link_both: float = float("inf")
    read: float = float("inf")
    write: float = float("inf")
    disk_both: float = float("inf")
    shares_cores: bool = False

    def times(self, *, link: float = 1.0, disk: float = 1.0) -> "Wires":
        """Return wires whose link rates and disk rates are multiplied by the given factors."""
        return dataclasses.replace(
            self,
            up=self.up * link,
            down=self.down * link,
            link_both=self.link_both * link,
            read=self.read * disk,
            write=self.write * disk,
            disk_both=self.disk_both * disk,
        )

    def sharing(self, moved: Mapping[str, float]) -> dict[str, float]:
        """Return the rate of each lane, in bytes per second.

        `moved` is the number of bytes that move in each lane during the same time.
        """
        rates = {"up": self.up, "down": self.down, "read": self.read, "write": self.write}
        for one, other, both in (("up", "down", self.link_both), ("read", "write", self.disk_both)):
            a = moved.get(one, 0.0)
            b = moved.get(other, 0.0)
            if a and b and both < rates[one] + rates[other]:
                rates |= {
                    one: min(rates[one], both * a / (a + b)),
                    other: min(rates[other], both * b / (a + b)),
                }
        return rates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Seconds of one layer on one device, over all its microbatches.

    Attributes:
      forward: seconds of forward compute.
      backward: seconds of backward compute, including recomputation.
      update: seconds of the optimizer on the device.
      gather: seconds of one gather of the parameters.
      reduce: seconds of reducing the gradients.
      regather: seconds of the gather after an update, at stages 1 and 2.
      host: seconds of the host update.
    """

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    regather: float = 0.0
    host: float = 0.0

    def seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds of an operation, by its verb and the name of its phase.

        Operations without an entry take no time.
        """
        both = {("gather", name): self.gather for name in ("forward", "backward")}
        both |= {
            (verb, name): getattr(self, field)
            for name in ("backward", "update")
            for verb, field in _UPDATES.items()
        }
        both |= {("compute", "forward"): self.forward, ("compute", "backward"): self.backward}
        return both | {("reduce", "backward"): self.reduce}


_UPDATES = {"update": "update", "host_update": "host", "regather": "regather"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnstackedWork:
    """Seconds of embedding and head on one device.

    Attributes:
      embed: seconds of the embedding's forward.
      head: seconds of the head's forward and backward.
      embed_backward: seconds of the embedding's backward.
      update: seconds of the optimizer on the device.
      gather: seconds of one gather of embedding or head; each is gathered twice.
      reduce: seconds of reducing the gradients.
      host: seconds of the host update.
    """

    embed: float = 0.0
    head: float = 0.0
    embed_backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    host: float = 0.0

    def seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds of an operation, by its verb and the name of its phase."""
        names = ("embed", "head", "embed_backward")
        found = {("compute", name): getattr(self, name) for name in names} | {
            ("gather", name): self.gather for name in names
        }
        return found | {
            ("reduce", "embed_backward"): self.reduce,
            ("update", "unstacked"): self.update,
            ("host_update", "unstacked"): self.host,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a lane.

    Attributes:
      lane: lane that does the work.
      label: description of the work.
      start: second of the step at which it begins.
      stop: second of the step at which it ends.
      layer: index of the layer in the model, or -1 if the work belongs to no layer.
    """

    lane: str
    label: str
    start: float
    stop: float
    layer: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseTime:
    """One part of a step.

    Attributes:
      name: name of the part.
      start: second of the step at which it begins.
      stop: second of the step at which it ends.
      bound_by: lane that bounds the part: it works, or is waited for, the longest.
    """

    name: str
    start: float
    stop: float
    bound_by: str

    @property
    def seconds(self) -> float:
        """Seconds from start to stop."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of one step.

    Attributes:
      seconds: seconds of the step.
      busy: seconds that each lane works.
      exposed: seconds that the device's cores wait for each lane; for "compute", the seconds that
        they compute. The values sum to `seconds`.
      phases: parts of the step in order, with the lane that bounds each.
      spans: work of every lane.
    """

    seconds: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    phases: tuple[PhaseTime, ...]
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds that each lane works while the cores do not wait for it."""
        # The cores may wait longer than a lane works, where loops overlap (`_StepWalk.rest`).
        return {
            lane: max(0.0, self.busy[lane] - self.exposed[lane]) if lane != "compute" else 0.0
            for lane in LANES
        }

    @property
    def bound_by(self) -> str:
        """The lane that works, or is waited for, the longest.

        With all other lanes infinitely fast, the step would take as long.
        """
        return max(LANES, key=lambda lane: max(self.busy[lane], self.exposed[lane]))

    def __str__(self) -> str:
        """Return busy, hidden and exposed seconds of each lane as a table."""
        rows = [f"{'':<10} {'busy s':>10} {'hidden s':>10} {'exposed s':>10}"]
        for lane in LANES:
            if self.busy[lane] or self.exposed[lane]:
                rows.append(
                    f"{lane:<10} {self.busy[lane]:>10.4f} {self.hidden[lane]:>10.4f} "
                    f"{self.exposed[lane]:>10.4f}"
                )
        parts = ", ".join(
            f"{p.name} {p.seconds:.4f} s ({p.bound_by})" for p in self.phases if p.seconds
        )
        return "\n".join([f"{self.seconds:.4f} s a step, predicted: {parts}", *rows])


class _Clock:
    """The lanes, and the work that they have done so far."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.rates = wires.sharing({})
        self.free = {lane: Event(0.0, lane) for lane in LANES}
        self.moved: dict[str, float] = dict.fromkeys(("up", "down", "read", "write"), 0.0)
        self.busy = dict.fromkeys(LANES, 0.0)
        self.exposed = dict.fromkeys(LANES, 0.0)
        self.spans: list[Span] = []
        self.first = 0
        """Index in the model of the schedule's layer 0."""

    @property
    def now(self) -> Event:
        """End of the cores' last work."""
        return self.free["compute"]

    def run(
        self, lane: str, seconds: float, *after: Event, label: str = "", layer: int = -1
    ) -> Event:
        """Run some work after some events, and return its end.

        Work of zero seconds occupies no lane.
        """
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
        self.spans.append(
            Span(named, label, start, end.time, layer + self.first if layer >= 0 else layer)
        )
        return end

    def move(
        self, lane: str, num_bytes: float, *after: Event, label: str = "", layer: int = -1
    ) -> Event:
        """Move bytes in a lane of a wire, and return the end."""
        self.moved[lane] += num_bytes
        return self.run(lane, num_bytes / self.rates[lane], *after, label=label, layer=layer)

    def wait(self, *events: Event) -> Event:
        """Make the cores wait for events."""
        self._wait(_latest(*events))
        return self.now

    def _wait(self, ready: Event) -> None:
        """Make the cores wait, and charge the wait to lanes.

        The seconds since the event's work began are charged to its lane, earlier seconds to the
        lanes of the events that it waited for.
        """
        now = self.now.time
        stop = ready.time
        event = ready
        if stop <= now:
            return
        self.free["compute"] = ready
        while event is not None and stop > now:
            begin = max(now, event.start)
            self.exposed[event.lane] += stop - begin
            stop = begin
            event = event.after


class _StepWalk:
    """One walk through a step."""

    def __init__(self, wires: Wires, distance: int) -> None:
        self.clock = _Clock(wires)
        self.distance = max(1, distance)
        self.parts: list[tuple[str, float, float, Mapping[str, float]]] = []
        # For each kind on disk, when its last records were taken from the ring of buffers, in
        # order; and for each record, when it was last stored.
        self.taken: dict[_Kind, collections.deque[Event]] = collections.defaultdict(
            lambda: collections.deque(maxlen=self.distance)
        )
        self.written: dict[tuple[_Kind, int], Event] = {}

    # --- moves ------------------------------------------------------------------------------------

    def load(self, stack: str | None, ops: Sequence[Op], *after: Event) -> Event:
        """Load records onto the device, after reading them if they are on disk.

        Returns their arrival.
        """
        clock = self.clock
        here = _latest(*after)
        read = list[_Kind]()
        loads = [op for op in ops if op.verb != "read" and op.num_bytes]
        for op in loads:
            key = _Kind(stack, op.record)
            there = self.written.get((key, op.number), Event(0.0, "down"))
            for off_disk in (
                other for other in ops if other.verb == "read" and other.record == op.record
            ):
                label = f"read {op.record.kind}"
                there = clock.move(
                    "read", off_disk.num_bytes, self.room(key), there, label=label, layer=_layer(op)
                )
                read.append(key)
            here = _latest(here, there)
        label = f"load {', '.join(op.record.kind for op in ops if op.verb != 'read')}"
        end = clock.move(
            "up", sum(op.num_bytes for op in loads), here, label=label, layer=_layer(ops[0])
        )
        for key in read:
            self.taken[key].append(end)
        return end

    def room(self, key: "_Kind") -> Event:
        """Return when a buffer is free for reading the next record of a kind from disk."""
        ring = self.taken[key]
        return ring[0] if len(ring) == self.distance else Event(0.0, "read")

    def store(self, stack: str | None, ops: Sequence[Op], *after: Event) -> Event:
        """Store records to the host, and write them to disk if they are stored there.

        Returns when they have left the device.
        """
        clock = self.clock
        stores = [op for op in ops if op.verb == "store"]
        label = f"store {', '.join(op.record.kind for op in stores)}"
        total = sum(op.num_bytes for op in stores if op.lane == "down")
        end = clock.move("down", total, *after, label=label, layer=_layer(ops[0]))
        for op in stores:
            rests = end
            for write in (
                other for other in ops if other.verb == "write" and other.record == op.record
            ):
                rests = clock.move(
                    "write", write.num_bytes, end, label=f"write {op.record.kind}", layer=_layer(op)
                )
            self.written[_Kind(stack, op.record), op.number] = rests
        return end

    def update_on_host(
        self, stack: str | None, ops: Sequence[Op], seconds: float, *after: Event
    ) -> Event:
        """Run the callbacks of the host update in one tick.

        Returns the last event that the device waits for.
        """
        clock = self.clock
        ready = list[Event]()
        end = _latest(*after)
        for op in ops:
            layer = _layer(op)
            size = op.num_bytes
            if op.verb == "store" and op.lane == "down":
                end = clock.move("down", size, *after, label="gradients", layer=layer)
                ready.append(end)
            elif op.verb == "host_read":
                key = _Kind(stack, op.record)
                read = clock.move(
                    "read", size, self.room(key), label=f"read {op.record.kind}", layer=layer
                )
                ready.append(read)
                self.taken[key].append(read)
            elif op.verb == "host_update":
                # A delayed update uses the gradients of the previous step.
                needs = [] if op.lag < 0 else [*after, *ready]
                end = _latest(end, clock.run("host", seconds, *needs, label="update", layer=layer))
                for other in (other for other in ops if other.verb == "host_read"):
                    self.taken[_Kind(stack, other.record)][-1] = end
            elif op.verb == "host_write":
                clock.move("write", size, end, label=f"write {op.record.kind}", layer=layer)
            elif op.verb == "load":
                end = clock.move("up", size, end, label="parameters", layer=layer)
        return end

    # --- phases -----------------------------------------------------------------------------------

    def run(
        self, part: Part, seconds: Mapping[tuple[str, str], float], begin: Event, first: int = 0
    ) -> Event:
        """Run a phase, and return when the last of its stores has ended.

        Args:
          part: phase, with its stack.
          seconds: seconds of its computations, by verb and name of the phase.
          begin: earliest start of its first fetches.
          first: index in the model of the first layer of its stack.
        """
        clock = self.clock
        stack = part.stack
        name = part.name
        clock.first = first
        clock.rates = clock.wires.sharing(_moved(part.phase))
        gathers = any(op.record.kind == "gathered" for loop in part.phase.loops for op in loop.ops)
        arrived = dict[int, Event]()
        gathered = dict[int, Event]()
        made = dict[tuple[str, int], Event]()
        last = begin

        def run(op: Op, verb: str, *after: Event) -> Event:
            label = {"compute": name, "regather": "gather"}.get(verb, verb)
            return clock.run(
                op.lane, seconds.get((verb, name), 0.0), *after, label=label, layer=_layer(op)
            )

        for tick, ops in part.phase.ticks():
            start = clock.now if tick >= 0 else begin
            take = next((op.number for op in ops if _takes(op, gathers)), None)
            if take is None or take not in arrived:
                taken = start
            else:
                taken = _latest(arrived.pop(take), start)
            done = taken
            read = start
            called = [op for op in ops if _is_called(op)]
            for (verb, index, *_), group in itertools.groupby(
                (op for op in ops if op not in called), partial(_op_key, ops)
            ):
                some = list(group)
                if verb == "fetch" and index == take:
                    taken = done = self.load(stack, some, start)
                elif verb == "fetch":
                    arrived[index] = self.load(stack, some, taken)
                elif verb == "load":
                    read = self.load(stack, some, start)
                elif verb == "store":
                    last = _latest(
                        last,
                        self.store(stack, some, made.get((some[0].record.leaves, index), done)),
                    )
                elif verb == "gather":
                    for op in some:  # head and embedding are gathered one after another
                        taken = gathered[index] = run(op, verb, taken)
                elif verb == "regather":
                    done = run(some[0], verb, done)
                elif verb != "tiles":
                    ready = gathered.get(index, taken) if verb == "compute" else done
                    done = run(some[0], verb, ready, *([read] if verb == "update" else []))
                    made[some[0].record.leaves, index] = done
            if called:
                last = _latest(
                    last,
                    self.update_on_host(
                        stack, called, seconds.get(("host_update", name), 0.0), done
                    ),
                )
            last = _latest(last, done)
        return last

    def rest(self) -> None:
        """Extend the step to the time that each wire needs for its bytes.

        Disk writes may end during the next step's forward, and reads for the next step may be in
        this one. In a steady state this makes no step shorter than the disk's work.
        """
        clock = self.clock
        wires = self.clock.wires
        up, down, read, write = clock.moved.values()
        least = {
            "up": (up + down) / wires.link_both,
            "read": (read + write) / wires.disk_both,
            "write": write / wires.write,
        }
        lane = max(least, key=least.__getitem__)
        clock.wait(Event(least[lane], lane, clock.now.time, clock.now))

    def part(self, name: str, start: float, exposed: Mapping[str, float]) -> None:
        """Record a part of the step that ends now, given the exposed seconds before it."""
        waited = {lane: self.clock.exposed[lane] - exposed[lane] for lane in LANES}
        self.parts.append((name, start, self.clock.now.time, waited))

    def phases(self) -> list[PhaseTime]:
        """Return the parts of the step. A lane's work may extend from one part into others."""
        starts = [start for _, start, _, _ in self.parts]
        worked = [dict.fromkeys(LANES, 0.0) for _ in self.parts]
        for span in self.clock.spans:
            first = max(0, bisect.bisect_right(starts, span.start) - 1)
            for n in range(first, bisect.bisect_left(starts, span.stop)):
                _, start, stop, _ = self.parts[n]
                worked[n][span.lane] += max(0.0, min(stop, span.stop) - max(start, span.start))
        found = []
        for (name, start, stop, waited), work in zip(self.parts, worked, strict=True):
            found.append(
                PhaseTime(
                    name,
                    start,
                    stop,
                    max(LANES, key=lambda lane, w=work, e=waited: max(w[lane], e[lane])),
                )
            )
        return found


class _Kind(NamedTuple):
    """A kind of record of one stack of layers; the stack is None for unstacked leaves."""

    stack: str | None
    record: Record


def _layer(op: Op) -> int:
    """Return the layer of an operation, or -1 for unstacked leaves."""
    return op.number if op.record.leaves == LAYERS else -1


def _takes(op: Op, gathers: bool) -> bool:
    """Return whether an operation takes its tick's record.

    A gather takes the record; without gathers, compute and updates take it.
    """
    if gathers:
        return op.record.kind == "gathered"
    return op.verb in ("compute", "update", "host_update") and op.record.leaves == LAYERS


def _is_called(op: Op) -> bool:
    """Return whether callbacks of the host update do an operation."""
    return (
        op.record.kind in ("handed", "weights", "made")
        or op.lane == "host"
        or op.verb in ("host_read", "host_write")
    )


def _op_key(ops: Sequence[Op], op: Op) -> tuple[str, int, int]:
    """Return the key by which a tick's operations are grouped: verb, index and lag."""
    verb = op.verb
    if verb == "read":
        same = (
            other
            for other in ops
            if (other.record, other.number, other.lane) == (op.record, op.number, "up")
        )
        verb = next(same).verb
    if verb == "write":
        verb = "store"
    if verb == "gather" and op.record.kind == "params":
        verb = "regather"
    return verb, op.number, op.lag


def step_time(
    steps: StepPlan,
    layers: Sequence[LayerWork],
    unstacked: UnstackedWork | None = None,
    wires: Wires | None = None,
    *,
    repeats: int = 1,
) -> StepTime:
    """Return the predicted seconds of a step.

    Args:
      steps: all operations of the step, with their bytes.
      layers: seconds of one layer of each stack, in order.
      unstacked: seconds of embedding and head.
      wires: rates of host link and disk; by default, moves take no time.
      repeats: number of times that forward and backward run: once per microbatch of a resident
        step. The ticks of a streamed step compute all microbatches.
    """
    unstacked = unstacked or UnstackedWork()
    wires = wires or Wires()
    walk = _StepWalk(
        wires, max((schedule.distance for schedule in steps.stacks.values()), default=0)
    )
    clock = walk.clock
    numbers = [0, *itertools.accumulate(schedule.num_layers for schedule in steps.stacks.values())]
    firsts = {
        name: n - schedule.first_layer
        for (name, schedule), n in zip(steps.stacks.items(), numbers, strict=False)
    }
    seconds = {name: work.seconds() for name, work in zip(steps.stacks, layers, strict=True)}

    def run(part: Part, begin: Event) -> Event:
        if part.stack is None:
            return walk.run(part, unstacked.seconds(), begin)
        return walk.run(part, seconds[part.stack], begin, firsts[part.stack])

    def parts(*names: str) -> list[Part]:
        return [part for part in steps.parts if part.name in names]

    def phase(name: str, body: Callable[[], None]) -> None:
        start = clock.now.time
        before = dict(clock.exposed)
        body()
        walk.part(name, start, before)

    last = Event(0.0, "compute")

    def each(some: Sequence[Part], begin: Event | None = None) -> None:
        nonlocal last
        for part in some:
            last = _latest(last, run(part, clock.now if begin is None else begin))
            begin = None

    def update() -> None:
        nonlocal last
        last = _latest(last, clock.now, clock.free["network"])
        if parts("update"):  # the global norm is known only after all gradients are reduced
            clock.wait(clock.free["network"])
        each(parts("unstacked", "update"))
        clock.wait(last, *(clock.free[lane] for lane in ("up", "down", "host", "network")))
        walk.rest()

    for _ in range(repeats):
        phase("embed", lambda: each(parts("embed")))
        phase("forward", lambda: each(parts("forward")))
        begin = clock.now  # backward's first fetches may overlap the head, but not the layers
        phase("head", lambda: each(parts("head")))
        phase("backward", lambda begin=begin: each(parts("backward", "embed_backward"), begin))
    phase("update", update)
    return StepTime(
        seconds=clock.now.time,
        busy=dict(clock.busy),
        exposed=dict(clock.exposed),
        phases=_joined(walk.phases()),
        spans=tuple(clock.spans),
    )


def _moved(phase: Phase) -> dict[str, float]:
    """Return the bytes that a tick moves in each lane if it does all operations of the phase.

    Lanes share their wires in proportion to these bytes.
    """
    each = {(op.lane, op.verb, op.record): op.num_bytes for loop in phase.loops for op in loop.ops}
    return {
        lane: sum(n for (of, *_), n in each.items() if of == lane)
        for lane in ("up", "down", "read", "write")
    }


def _joined(phases: Sequence[PhaseTime]) -> tuple[PhaseTime, ...]:
    """Return the parts of a step, with several microbatches joined into one part."""
    names = [p.name for p in phases]
    if len(set(names)) == len(names):
        return tuple(phases)
    last = {p.name: p for p in phases}
    start = phases[0].start
    stop = phases[-2].stop
    longest = max((p for p in phases if p.name != "update"), key=lambda p: p.seconds)
    return (PhaseTime("microbatches", start, stop, longest.bound_by), last["update"])
