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

    fetched[t]  = max(fetched[t-1], released[t-d])            + bytes / up
    computed[t] = max(computed[t-1], fetched[t], gathered[t]) + seconds(layer)
    stored[t]   = max(stored[t-1], computed[t])               + bytes / down

where a record on disk is fetched after its read, and a record is released from the ring once it is
on the device, gathered if it is sharded, and the work of the tick before has ended.

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
import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from host_offload.schedule import LANES, LAYERS, Op, Phase, Record, StepPhase, StepPlan
from zerojax.costs.lane_times import LayerWork, PhaseTime, Span, StepTime, UnstackedWork, Wires

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
Seconds = Mapping[tuple[str, str], float]
"""Seconds of operations, by their verb and the name of their phase."""


def _latest(*events: Event) -> Event:
    """Return the latest of some events."""
    return max(events, key=_time)


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
        self.first_layer = 0
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
        worker = lane  # the lane that does the work
        if self.wires.shares_cores and lane in ON_CORES:
            worker = "compute"
        before = _latest(self.free[worker], ready)
        start = before.time
        if worker == "compute":
            self._wait(ready)
            self.exposed[lane] += seconds
        self.busy[lane] += seconds
        end = Event(start + seconds, lane, start, before)
        self.free[worker] = end
        if layer >= 0:
            layer += self.first_layer
        self.spans.append(Span(lane, label, start, end.time, layer))
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


class _Section(NamedTuple):
    """A section of a step that has run, such as forward.

    Attributes:
      name: name of the section.
      start: second of the step at which it begins.
      stop: second of the step at which it ends.
      exposed: seconds that the cores waited for each lane.
    """

    name: str
    start: float
    stop: float
    exposed: Mapping[str, float]


class _StepWalk:
    """One walk through a step."""

    def __init__(
        self,
        steps: StepPlan,
        layers: Sequence[LayerWork],
        unstacked: UnstackedWork,
        wires: Wires,
    ) -> None:
        self.steps = steps
        self.clock = _Clock(wires)
        schedules = steps.stacks.values()
        self.distance = max(1, max((schedule.distance for schedule in schedules), default=0))
        self.seconds: dict[str | None, Seconds] = {None: unstacked.seconds()}
        self.first_layers: dict[str | None, int] = {None: 0}
        first_layer = 0
        for (name, schedule), work in zip(steps.stacks.items(), layers, strict=True):
            self.seconds[name] = work.seconds()
            self.first_layers[name] = first_layer - schedule.first_layer
            first_layer += schedule.num_layers
        self.last = Event(0.0, "compute")
        """Latest end of a phase so far."""
        self.sections: list[_Section] = []
        # For each kind on disk, when its last records left the ring of buffers, in order; and for
        # each record, when it was last stored.
        self.released: dict[_Kind, collections.deque[Event]] = collections.defaultdict(
            lambda: collections.deque(maxlen=self.distance)
        )
        self.written: dict[tuple[_Kind, int], Event] = {}

    # --- moves ------------------------------------------------------------------------------------

    def load(self, stack: str | None, ops: Sequence[Op], *after: Event) -> Event:
        """Load records onto the device, after reading them if they are on disk.

        Returns their arrival.
        """
        clock = self.clock
        available = _latest(*after)
        kinds_read = list[_Kind]()
        loads = [op for op in ops if op.verb != "read" and op.num_bytes]
        for op in loads:
            kind = _Kind(stack, op.record)
            stored = self.written.get((kind, op.number), Event(0.0, "down"))
            label = f"read {op.record.kind}"
            layer = _layer(op)
            for read in _of_record(ops, "read", op):
                room = self.room(kind)
                stored = clock.move("read", read.num_bytes, room, stored, label=label, layer=layer)
                kinds_read.append(kind)
            available = _latest(available, stored)
        label = f"load {', '.join(op.record.kind for op in ops if op.verb != 'read')}"
        total = sum(op.num_bytes for op in loads)
        end = clock.move("up", total, available, label=label, layer=_layer(ops[0]))
        for kind in kinds_read:
            self.released[kind].append(end)
        return end

    def room(self, kind: "_Kind") -> Event:
        """Return when a buffer is free for reading the next record of a kind from disk."""
        ring = self.released[kind]
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
            stored = end
            label = f"write {op.record.kind}"
            for write in _of_record(ops, "write", op):
                stored = clock.move("write", write.num_bytes, end, label=label, layer=_layer(op))
            self.written[_Kind(stack, op.record), op.number] = stored
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
                kind = _Kind(stack, op.record)
                label = f"read {op.record.kind}"
                read = clock.move("read", size, self.room(kind), label=label, layer=layer)
                ready.append(read)
                self.released[kind].append(read)
            elif op.verb == "host_update":
                # It uses the gradients of the previous step.
                inputs = [] if op.lag < 0 else [*after, *ready]
                updated = clock.run("host", seconds, *inputs, label="update", layer=layer)
                end = _latest(end, updated)
                for read_op in ops:
                    if read_op.verb == "host_read":
                        self.released[_Kind(stack, read_op.record)][-1] = end
            elif op.verb == "host_write":
                clock.move("write", size, end, label=f"write {op.record.kind}", layer=layer)
            elif op.verb == "load":
                end = clock.move("up", size, end, label="parameters", layer=layer)
        return end

    # --- phases -----------------------------------------------------------------------------------

    def run_phase(self, step_phase: StepPhase, begin: Event) -> Event:
        """Run a phase, and return when the last of its stores has ended.

        Args:
          step_phase: phase, with its stack.
          begin: earliest start of its first fetches.
        """
        clock = self.clock
        clock.first_layer = self.first_layers[step_phase.stack]
        clock.rates = clock.wires.sharing(_moved(step_phase.phase))
        phase_walk = _PhaseWalk(self, step_phase, begin)
        for tick, ops in step_phase.phase.ticks():
            phase_walk.run_tick(ops, clock.now if tick >= 0 else begin)
        return phase_walk.last

    def run_phases(self, *names: str, begin: Event | None = None) -> None:
        """Run phases of these names, in the order of the step.

        Args:
          *names: names of the phases.
          begin: earliest start of the first fetches of the first phase; by default, now.
        """
        for step_phase in self._list_phases(*names):
            start = self.clock.now if begin is None else begin
            self.last = _latest(self.last, self.run_phase(step_phase, start))
            begin = None

    def _list_phases(self, *names: str) -> list[StepPhase]:
        return [step_phase for step_phase in self.steps.phases if step_phase.name in names]

    # --- sections of the step ---------------------------------------------------------------------

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Record the work inside as one section of the step."""
        start = self.clock.now.time
        exposed_before = dict(self.clock.exposed)
        yield
        exposed = {lane: self.clock.exposed[lane] - exposed_before[lane] for lane in LANES}
        self.sections.append(_Section(name, start, self.clock.now.time, exposed))

    def run_first_update(self) -> None:
        """Update embedding and head before forward reads them, if forward updates the layers."""
        if self.steps.updates_in_forward:
            with self.section("update"):
                self.run_phases("unstacked")

    def run_microbatch(self) -> None:
        """Run forward and backward."""
        with self.section("embed"):
            self.run_phases("embed")
        with self.section("forward"):
            self.run_phases("forward")
        begin = self.clock.now  # backward's first fetches may overlap the head, but not the layers
        with self.section("head"):
            self.run_phases("head")
        with self.section("backward"):
            self.run_phases("backward", "embed_backward", begin=begin)

    def run_update(self) -> None:
        """Run the update, if forward did not, and wait for all lanes."""
        clock = self.clock
        with self.section("end" if self.steps.updates_in_forward else "update"):
            self.last = _latest(self.last, clock.now, clock.free["network"])
            if self._list_phases("update"):
                # The global norm is known only after all gradients are reduced.
                clock.wait(clock.free["network"])
            if not self.steps.updates_in_forward:
                self.run_phases("unstacked", "update")
            clock.wait(self.last, *(clock.free[lane] for lane in ("up", "down", "host", "network")))
            self.wait_for_wires()

    def wait_for_wires(self) -> None:
        """Extend the step to the time that each wire needs for its bytes.

        Disk writes may end during the next step's forward, and reads for the next step may be in
        this one. In a steady state this makes no step shorter than the disk's work.
        """
        clock = self.clock
        wires = self.clock.wires
        up, down, read, write = clock.moved.values()
        min_seconds = {
            "up": (up + down) / wires.link_both,
            "read": (read + write) / wires.disk_both,
            "write": write / wires.write,
        }
        lane = max(min_seconds, key=min_seconds.__getitem__)
        clock.wait(Event(min_seconds[lane], lane, clock.now.time, clock.now))

    def phases(self) -> list[PhaseTime]:
        """Return the sections of the step. A lane's work may extend from one into others."""
        starts = [section.start for section in self.sections]
        busy = [dict.fromkeys(LANES, 0.0) for _ in self.sections]
        for span in self.clock.spans:
            first = max(0, bisect.bisect_right(starts, span.start) - 1)
            for n in range(first, bisect.bisect_left(starts, span.stop)):
                section = self.sections[n]
                overlap = min(section.stop, span.stop) - max(section.start, span.start)
                busy[n][span.lane] += max(0.0, overlap)

        phases = list[PhaseTime]()
        for section, busy_seconds in zip(self.sections, busy, strict=True):
            longest = {lane: max(busy_seconds[lane], section.exposed[lane]) for lane in LANES}
            bound_by = max(LANES, key=longest.__getitem__)
            phases.append(PhaseTime(section.name, section.start, section.stop, bound_by))
        return phases


_BEFORE_COMPUTE = ("embed", "forward")
"""Phases in which callbacks come before the computations of their tick."""


class _PhaseWalk:
    """A walk through one phase: which records have arrived, are gathered and are computed.

    Attributes:
      arrived: arrival of each fetched record that no tick has used yet, by layer.
      gathered: end of each gather, by layer.
      computed: end of each record's last computation, by its leaves and its layer.
      last: latest end of the phase's work and stores so far.
    """

    def __init__(self, step_walk: _StepWalk, step_phase: StepPhase, begin: Event) -> None:
        self.step_walk = step_walk
        self.clock = step_walk.clock
        self.stack = step_phase.stack
        self.name = step_phase.name
        self.seconds = step_walk.seconds[step_phase.stack]
        ops = [op for loop in step_phase.phase.loops for op in loop.ops]
        self.gathers = any(op.record.kind == "gathered" for op in ops)
        self.arrived = dict[int, Event]()
        self.gathered = dict[int, Event]()
        self.computed = dict[tuple[str, int], Event]()
        self.last = begin

    def run_tick(self, ops: Sequence[Op], start: Event) -> None:
        """Run the operations of one tick."""
        used = next((op.number for op in ops if _uses_record(op, self.gathers)), None)
        on_device = start  # the tick's record has arrived
        if used is not None and used in self.arrived:
            on_device = _latest(self.arrived.pop(used), start)
        work_end = on_device
        loaded = start  # records that the tick itself loads have arrived

        called = [op for op in ops if _is_called(op)]
        inside = [op for op in ops if op not in called]
        seconds = self.seconds.get(("host_update", self.name), 0.0)
        if called and self.name in _BEFORE_COMPUTE:
            # Forward uses the parameters that the host has made.
            on_device = self.step_walk.update_on_host(self.stack, called, seconds, start)
            work_end = _latest(work_end, on_device)
            called = []
        for (verb, index, _), group in itertools.groupby(inside, partial(_op_key, ops)):
            group_ops = list(group)
            first = group_ops[0]
            if verb == "fetch" and index == used:
                on_device = self.step_walk.load(self.stack, group_ops, start)
                work_end = on_device
            elif verb == "fetch":
                self.arrived[index] = self.step_walk.load(self.stack, group_ops, on_device)
            elif verb == "load":
                loaded = self.step_walk.load(self.stack, group_ops, start)
            elif verb == "store":
                ready = self.computed.get((first.record.leaves, index), work_end)
                stored = self.step_walk.store(self.stack, group_ops, ready)
                self.last = _latest(self.last, stored)
            elif verb == "gather":
                for op in group_ops:  # head and embedding are gathered one after another
                    on_device = self._compute(op, verb, on_device)
                    self.gathered[index] = on_device
            elif verb == "regather":
                work_end = self._compute(first, verb, work_end)
            elif verb != "tiles":
                ready = self.gathered.get(index, on_device) if verb == "compute" else work_end
                inputs = [ready]
                if verb == "update":
                    inputs.append(loaded)
                work_end = self._compute(first, verb, *inputs)
                self.computed[first.record.leaves, index] = work_end
                if verb == "update" and self.name == "forward":
                    on_device = work_end  # forward gathers the updated parameters

        if called:
            stored = self.step_walk.update_on_host(self.stack, called, seconds, work_end)
            self.last = _latest(self.last, stored)
        self.last = _latest(self.last, work_end)

    def _compute(self, op: Op, verb: str, *after: Event) -> Event:
        """Run a computation or a collective after some events, and return its end."""
        seconds = self.seconds.get((verb, self.name), 0.0)
        label = {"compute": self.name, "regather": "gather"}.get(verb, verb)
        return self.clock.run(op.lane, seconds, *after, label=label, layer=_layer(op))


class _Kind(NamedTuple):
    """A kind of record of one stack of layers; the stack is None for unstacked leaves."""

    stack: str | None
    record: Record


def _of_record(ops: Iterable[Op], verb: str, op: Op) -> list[Op]:
    """Return the operations of a verb on the record of `op`."""
    return [other for other in ops if other.verb == verb and other.record == op.record]


def _layer(op: Op) -> int:
    """Return the layer of an operation, or -1 for unstacked leaves."""
    return op.number if op.record.leaves == LAYERS else -1


def _uses_record(op: Op, gathers: bool) -> bool:
    """Return whether an operation is the first in its tick that uses the tick's record.

    This is the gather; without gathers, it is compute or an update.
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
    if verb == "read":  # it belongs to the operation that moves its record up
        moves_up = (op.record, op.number, "up")
        verb = next(move.verb for move in ops if (move.record, move.number, move.lane) == moves_up)
    elif verb == "write":
        verb = "store"
    elif verb == "gather" and op.record.kind == "params":
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
    walk = _StepWalk(steps, layers, unstacked or UnstackedWork(), wires or Wires())
    walk.run_first_update()
    for _ in range(repeats):
        walk.run_microbatch()
    walk.run_update()
    clock = walk.clock
    return StepTime(
        seconds=clock.now.time,
        busy=dict(clock.busy),
        exposed=dict(clock.exposed),
        phases=_join_microbatches(walk.phases()),
        spans=tuple(clock.spans),
    )


def _moved(phase: Phase) -> dict[str, float]:
    """Return the bytes that a tick moves in each lane if it does all operations of the phase.

    Lanes share their wires in proportion to these bytes.
    """
    by_operation = dict[tuple[str, str, Record], float]()
    for loop in phase.loops:
        by_operation |= {(op.lane, op.verb, op.record): op.num_bytes for op in loop.ops}
    moved: dict[str, float] = dict.fromkeys(("up", "down", "read", "write"), 0.0)
    for (lane, _, _), num_bytes in by_operation.items():
        if lane in moved:
            moved[lane] += num_bytes
    return moved


def _join_microbatches(phases: Sequence[PhaseTime]) -> tuple[PhaseTime, ...]:
    """Return the sections of a step, with several microbatches joined into one section."""
    names = [phase.name for phase in phases]
    if len(set(names)) == len(names):
        return tuple(phases)
    *microbatches, update = phases
    longest = max(microbatches, key=lambda phase: phase.seconds)
    start = microbatches[0].start
    stop = microbatches[-1].stop
    return PhaseTime("microbatches", start, stop, longest.bound_by), update
