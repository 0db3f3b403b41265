"""Seconds of a step: its schedule, walked tick by tick, with every resource in order.

A sum of totals (bytes / bandwidth + FLOPs / rate) is no step time: what overlaps is decided by the
schedule. So each resource of a device is a lane that does one thing after another,

    compute    the device's cores
    network    collectives over `fsdp` and `data`
    up, down   the link from and to the host
    read, write  the disk
    host       the kernel of the host's update

and a piece of work begins when its lane is free and what it waits for has ended. With d slots in
the ring of a loop, t its tick,

    fetched[t]  = max(fetched[t-1], taken[t-d])              + bytes / up        of a record on disk after its read
    computed[t] = max(computed[t-1], fetched[t], gathered[t]) + seconds(layer)
    stored[t]   = max(stored[t-1], computed[t])              + bytes / down

Gathers are waited for unless `gather_ahead`, as in the step. A record is fetched after it was
stored: what forward stores last is what backward fetches first. Lanes that share a wire share its
bandwidth: while a loop moves a bytes one way and b the other, both at once take (a + b) / both, and
each way gets its part of that, at most its own rate. Loops overlap at their seams, where this gives
too much; so a step is never shorter than the bytes of a wire over its rate. The engine reads
records on disk ahead, at most `distance` of a kind, and not before they were written.

Cores that wait for an event wait for what it waited for: of a gather that began late, because a
  load came late, the gather's
own seconds count for the network, and those before it for the link (`StepTime.exposed`).

On a CPU the devices are threads of the cores that also copy and update: `up`, `down` and `host` are
  then done by `compute`.
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
"""What the cores do besides where the device is a CPU."""


class Event(NamedTuple):
    """When a piece of work has ended and begun, in which lane, and what it began after: what else
    it needed, or its lane.
    """

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
            self,
            up=self.up * link,
            down=self.down * link,
            link_both=self.link_both * link,
            read=self.read * disk,
            write=self.write * disk,
            disk_both=self.disk_both * disk,
        )

    def sharing(self, moved: Mapping[str, float]) -> dict[str, float]:
        """Return the rate of each lane while so many bytes move in each."""
        rates = {"up": self.up, "down": self.down, "read": self.read, "write": self.write}
        for one, other, both in (("up", "down", self.link_both), ("read", "write", self.disk_both)):
            a, b = moved.get(one, 0.0), moved.get(other, 0.0)
            if a and b and both < rates[one] + rates[other]:
                rates |= {
                    one: min(rates[one], both * a / (a + b)),
                    other: min(rates[other], both * b / (a + b)),
                }
        return rates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Seconds of one layer on one device, of all its microbatches.

    Attributes:
      forward: of compute.
      backward: likewise, of the derivative and of what it computes again.
      update: of the optimizer on the device.
      gather: of a gather of the parameters.
      reduce: of the reduction of the gradients.
      regather: of the gather after an update, of stages 1 and 2.
      host: of an update on the host.
    """

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    regather: float = 0.0
    host: float = 0.0

    def seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds of an operation by its verb and the name of its phase; others take
        none.
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
class EndsWork:
    """Seconds of the leaves that are no layers: embedding and head.

    Attributes:
      embed: of forward.
      head: of forward and derivative.
      embed_backward: of the derivative.
      update: of the optimizer on the device.
      gather: of a gather of each; both are gathered twice.
      reduce: of the reduction.
      host: of an update on the host.
    """

    embed: float = 0.0
    head: float = 0.0
    embed_backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    host: float = 0.0

    def seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds of an operation by its verb and the name of its phase."""
        names = ("embed", "head", "embed_backward")
        found = {("compute", name): getattr(self, name) for name in names} | {
            ("gather", name): self.gather for name in names
        }
        return found | {
            ("reduce", "embed_backward"): self.reduce,
            ("update", "ends"): self.update,
            ("host_update", "ends"): self.host,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Something that a lane did: from `start` to `stop`, in seconds of the step, for a layer of the
    model; -1: for none.
    """

    lane: str
    label: str
    start: float
    stop: float
    layer: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseTime:
    """One part of a step: its seconds, and the lane that bounds it, which works or is waited for
    the longest in it.
    """

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
      exposed: seconds that the device's cores wait for a lane; of "compute" what they compute.
        These sum to `seconds`.
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
        return {
            lane: max(0.0, self.busy[lane] - self.exposed[lane]) if lane != "compute" else 0.0
            for lane in LANES
        }

    @property
    def bound_by(self) -> str:
        """The lane that works the longest, or is waited for: with the others infinitely fast, the
        step takes as long.
        """
        return max(LANES, key=lambda lane: max(self.busy[lane], self.exposed[lane]))

    def __str__(self) -> str:
        rows = [f"{'':<10} {'busy s':>10} {'hidden s':>10} {'exposed s':>10}"]
        for lane in LANES:
            if self.busy[lane] or self.exposed[lane]:
                rows.append(
                    f"{lane:<10} {self.busy[lane]:>10.4f} {self.hidden[lane]:>10.4f} {self.exposed[lane]:>10.4f}"
                )
        parts = ", ".join(
            f"{p.name} {p.seconds:.4f} s ({p.bound_by})" for p in self.phases if p.seconds
        )
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

    def run(
        self, lane: str, seconds: float, *after: Event, label: str = "", layer: int = -1
    ) -> Event:
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
        self.spans.append(
            Span(named, label, start, end.time, layer + self.first if layer >= 0 else layer)
        )
        return end

    def move(
        self, lane: str, num_bytes: float, *after: Event, label: str = "", layer: int = -1
    ) -> Event:
        """Move bytes in a lane of a wire."""
        self.moved[lane] += num_bytes
        return self.run(lane, num_bytes / self.rates[lane], *after, label=label, layer=layer)

    def wait(self, *events: Event) -> Event:
        """Let the cores wait for events."""
        self._wait(_latest(*events))
        return self.now

    def _wait(self, ready: Event) -> None:
        """Let the cores wait, and note for what: for the event's own work since it began; before,
        for what that waited for.
        """
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
        # When the records of a kind on disk were taken from the ring of buffers, in order; and when
        # each was last stored.
        self.taken: dict[_Kind, collections.deque[Event]] = collections.defaultdict(
            lambda: collections.deque(maxlen=self.distance)
        )
        self.written: dict[tuple[_Kind, int], Event] = {}

    # --- moves ------------------------------------------------------------------------------------

    def load(self, stack: str | None, ops: Sequence[Op], *after: Event) -> Event:
        """Bring records to the device: off the disk first, where they rest there.

        Returns their arrival.
        """
        clock, here, read = self.clock, _latest(*after), list[_Kind]()
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
        """Return when the next record of a kind on disk has a buffer to be read to."""
        ring = self.taken[key]
        return ring[0] if len(ring) == self.distance else Event(0.0, "read")

    def store(self, stack: str | None, ops: Sequence[Op], *after: Event) -> Event:
        """Take records off the device, and to the disk where they rest there.

        Returns when they have left the device.
        """
        clock, stores = self.clock, [op for op in ops if op.verb == "store"]
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
        """Do what callbacks of the host's update do in a tick.

        Returns when the last of it is over for the device.
        """
        clock, ready, end = self.clock, list[Event](), _latest(*after)
        for op in ops:
            layer, size = _layer(op), op.num_bytes
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
                # A delayed update works on the gradients of the step before.
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
        """Run a phase whose first fetches may start at `begin`. Returns when the last of its stores
        has ended.

        Args:
          part: the phase.
          seconds: of what it computes, by verb and name of the phase.
          begin: when its first fetches may start.
          first: the layer of the model that is the first of its stack.
        """
        clock, stack, name = self.clock, part.stack, part.name
        clock.first, clock.rates = first, clock.wires.sharing(_moved(part.phase))
        gathers = any(op.record.kind == "gathered" for loop in part.phase.loops for op in loop.ops)
        arrived, gathered, made = (
            dict[int, Event](),
            dict[int, Event](),
            dict[tuple[str, int], Event](),
        )
        last = begin

        def run(op: Op, verb: str, *after: Event) -> Event:
            label = {"compute": name, "regather": "gather"}.get(verb, verb)
            return clock.run(
                op.lane, seconds.get((verb, name), 0.0), *after, label=label, layer=_layer(op)
            )

        for tick, ops in part.phase.ticks():
            start = clock.now if tick >= 0 else begin
            take = next((op.number for op in ops if _takes(op, gathers)), None)
            taken = (
                start if take is None or take not in arrived else _latest(arrived.pop(take), start)
            )
            done, read, called = taken, start, [op for op in ops if _is_called(op)]
            for (verb, index, *_), group in itertools.groupby(
                (op for op in ops if op not in called), partial(_step_of, ops)
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
                    for op in some:  # one after the other: of head and embedding
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
        """Let the step last as long as each wire needs for its bytes.

        Writes to the disk may end beside the next step's forward, and reads of the next step be in
        this one. In a steady state a step is no shorter for it than what the disk has to do.
        """
        clock, wires = self.clock, self.clock.wires
        up, down, read, write = clock.moved.values()
        least = {
            "up": (up + down) / wires.link_both,
            "read": (read + write) / wires.disk_both,
            "write": write / wires.write,
        }
        lane = max(least, key=least.__getitem__)
        clock.wait(Event(least[lane], lane, clock.now.time, clock.now))

    def part(self, name: str, start: float, exposed: Mapping[str, float]) -> None:
        """Note a part of the step that ends now, given what was waited for before it."""
        waited = {lane: self.clock.exposed[lane] - exposed[lane] for lane in LANES}
        self.parts.append((name, start, self.clock.now.time, waited))

    def phases(self) -> list[PhaseTime]:
        """Return the parts of the step. What a lane does may reach from one into others."""
        starts, worked = (
            [start for _, start, _, _ in self.parts],
            [dict.fromkeys(LANES, 0.0) for _ in self.parts],
        )
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
    """Records of a kind, of one stack of layers; None: of leaves that are no layers."""

    stack: str | None
    record: Record


def _layer(op: Op) -> int:
    """Return the layer for which an operation is shown; -1 of leaves that are no layers."""
    return op.number if op.record.leaves == LAYERS else -1


def _takes(op: Op, gathers: bool) -> bool:
    """Return whether an operation takes its tick's record: it gathers the record, or computes or
    updates where none does.
    """
    if gathers:
        return op.record.kind == "gathered"
    return op.verb in ("compute", "update", "host_update") and op.record.leaves == LAYERS


def _is_called(op: Op) -> bool:
    """Tell whether an operation is done by callbacks of the host's update."""
    return (
        op.record.kind in ("handed", "weights", "made")
        or op.lane == "host"
        or op.verb in ("host_read", "host_write")
    )


def _step_of(ops: Sequence[Op], op: Op) -> tuple[str, int, int]:
    """Return what the operations of a tick that are done as one have in common: verb, index and
    lag.
    """
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
    ends: EndsWork | None = None,
    wires: Wires | None = None,
    *,
    repeats: int = 1,
) -> StepTime:
    """Return the seconds of a step.

    Args:
      steps: what it does, with the bytes of each operation.
      layers: seconds of one layer of each of its stacks, in order.
      ends: seconds of embedding and head.
      wires: rates of link and disk; without, nothing that moves takes time.
      repeats: how often forward and backward run: once for each microbatch of a resident step. The
        ticks of a streamed step compute all microbatches.
    """
    ends, wires = ends or EndsWork(), wires or Wires()
    walk = _Walk(wires, max((schedule.distance for schedule in steps.stacks.values()), default=0))
    clock = walk.clock
    numbers = [0, *itertools.accumulate(schedule.num_layers for schedule in steps.stacks.values())]
    firsts = {
        name: n - schedule.first_layer
        for (name, schedule), n in zip(steps.stacks.items(), numbers, strict=False)
    }
    seconds = {name: work.seconds() for name, work in zip(steps.stacks, layers, strict=True)}

    def run(part: Part, begin: Event) -> Event:
        if part.stack is None:
            return walk.run(part, ends.seconds(), begin)
        return walk.run(part, seconds[part.stack], begin, firsts[part.stack])

    def parts(*names: str) -> list[Part]:
        return [part for part in steps.parts if part.name in names]

    def phase(name: str, body: Callable[[], None]) -> None:
        start, before = clock.now.time, dict(clock.exposed)
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
        if parts("update"):  # the norm of all gradients is known once they are there
            clock.wait(clock.free["network"])
        each(parts("ends", "update"))
        clock.wait(last, *(clock.free[lane] for lane in ("up", "down", "host", "network")))
        walk.rest()

    for _ in range(repeats):
        phase("embed", lambda: each(parts("embed")))
        phase("forward", lambda: each(parts("forward")))
        begin = clock.now  # what backward fetches first may overlap the head, and not the layers
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
    """Return the bytes that a tick which does all that the phase does moves in each lane, by which
    lanes share a wire.
    """
    each = {(op.lane, op.verb, op.record): op.num_bytes for loop in phase.loops for op in loop.ops}
    return {
        lane: sum(n for (of, *_), n in each.items() if of == lane)
        for lane in ("up", "down", "read", "write")
    }


def _joined(phases: Sequence[PhaseTime]) -> tuple[PhaseTime, ...]:
    """Return the parts of a step; of several microbatches, those of the last one stand for all, in
    one part.
    """
    names = [p.name for p in phases]
    if len(set(names)) == len(names):
        return tuple(phases)
    last = {p.name: p for p in phases}
    start, stop = phases[0].start, phases[-2].stop
    longest = max((p for p in phases if p.name != "update"), key=lambda p: p.seconds)
    return (PhaseTime("microbatches", start, stop, longest.bound_by), last["update"])
