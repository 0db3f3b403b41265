"""Predict a step's time, idle compute, host-link traffic and waits from its compiled program.

XLA's scheduled HLO is the order in which a host thread enqueues operations on a device. The
simulation walks the program in that order, running each loop for all its iterations. Each operation
becomes a task on a timeline (`zerojax.hlo.timeline`):

    host thread           enqueues one operation after another; waits for the device at a loop
                          whose trip count XLA does not know, at a conditional, and in a callback
                          (`zerojax.hlo.callbacks`)
    main stream           runs every synchronous operation in turn, on the cores
    streams               run asynchronous operations, in turn on each stream; an operation begins
                          once the main stream has reached the point where it was enqueued; a
                          `done` makes the main stream wait for its start
    link up, link down    one copy engine each; cores, disk and the host's kernel are also one
                          resource each

A slice of host memory is either a copy, which occupies only its direction of the link, or a kernel,
which also occupies the cores (`zerojax.hlo.traffic`). With `kernels="beside"` such a kernel does
not slow products at all. The truth lies in between; only a measurement on a GPU can decide it.

CUDA graphs: a graph's nodes run one after another, and copy engines make its copies. A profile of
an H200 with jax 0.11.2 shows both, and the default `graphs="in_turn"` assumes both.
`graphs="copies"` gives each asynchronous copy its own lane, overlapped with products, at
`Rates.graph_link`. `graphs="kernels"` lets the cores make the copies, at `Rates.kernel_link`. The
table reports which was assumed, and for how many bytes.

Streams: XLA before 0.12 assigns asynchronous operations to four streams in turn, so a download
blocks the upload behind it. From 0.12 on, operations that move host memory have one stream per
direction. Dumped thunks name the streams; without thunks, the simulation assumes that the installed
jaxlib compiled the text.

Everything here is predicted and depends on the rates (`zerojax.hlo.rates`). Use it to choose
between programs. The simulation leaves out three effects: copies use device memory bandwidth and so
slow products; the two directions of the link slow each other; and kernels that are nodes of a graph
are launched together rather than one by one. It refuses programs for several devices, since
collectives have no rates.
"""

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from zerojax.compat import find_stream_assignment
from zerojax.hlo.callbacks import (
    CALLBACKS,
    CORES,
    DISK,
    DOWN,
    HOST,
    HOST_KERNEL,
    MAIN,
    UP,
    WAIT,
    Callbacks,
)
from zerojax.hlo.check import MOST_TRIPS, checked_module
from zerojax.hlo.communication import COLLECTIVES
from zerojax.hlo.costs import Cost, Costs
from zerojax.hlo.parse import Instruction, parse_arrays, reads_program
from zerojax.hlo.rates import Rates, find_rates
from zerojax.hlo.thunks import Thunks
from zerojax.hlo.timeline import Timeline
from zerojax.hlo.traffic import KERNEL, HostMove, HostTraffic, host_traffic

STREAMS: Mapping[str, str] = {
    "turns": "four streams in turn, as XLA before 0.12 does",
    "direction": (
        "one stream each way for host memory and four in turn for the rest, as XLA from 0.12 does"
    ),
    "each": "a stream for each operation",
}
"""The ways to assign asynchronous operations to streams, by name."""

GRAPHS: Mapping[str, str] = MappingProxyType(
    {
        "in_turn": "by copy engines, one node of the graph after another",
        "copies": "by copy engines, as on streams",
        "kernels": "by the cores, as a kernel does",
    }
)
"""The ways in which copies in CUDA graphs can be made, by name."""

_NUM_STREAMS = 4
_TO_DEVICE = "to_device"
_TO_HOST = "to_host"
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "optimization-barrier",
    "after-all",
    "add-dependency",
    "partition-id",
    "replica-id",
    "iota",
}
_WAITED = re.compile(r'"is_sync":\s*true')
MOST_OPERATIONS = 10**6
"""Most operations that a walk enqueues. Each is an object of some hundred bytes on the timeline."""
_OF_CPUS = re.compile(
    r'custom_call_target="[^"]*(?:onednn|python_cpu)|"outer_dimension_partitions"'
)
_OF_GPUS = "operation_queue_id"
FOR_CPUS = (
    "the program was compiled for a CPU: a GPU runs other fusions in another schedule, so compile "
    "it for a GPU"
)
_CALLBACK_TARGET = re.compile(r'custom_call_target="[^"]*callback[^"]*"')
_CONTROL_FLOW = ("while", "conditional", "call")
_DONE = "-done"
_START = "-start"


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop of the program's entry computation, as it was walked.

    Attributes:
      name: name of the loop's instruction.
      trips: number of iterations.
      is_known: whether XLA knows the trip count. If not, the host waits for the device in each
        iteration.
      seconds: predicted seconds on the main stream.
    """

    name: str
    trips: int
    is_known: bool
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step predicted from its compiled program at stated rates; nothing in it was measured.

    It prints as a table.

    Attributes:
      seconds: seconds per step.
      compute_seconds: seconds in which the cores run products or other kernels, not counting
        kernels that move host memory.
      busy: seconds in which each resource is occupied: "compute", "link up", "link down", "disk",
        "host kernel", "host thread".
      work: (number of runs, seconds) by kind of work, most seconds first.
      flops: FLOPs of products and attention.
      traffic: bytes that the program moves over the link, by copies and by kernels.
      callback_bytes: bytes that callbacks move over the link, by direction: "to_device", "to_host".
      num_callbacks: number of callbacks.
      num_host_waits: number of times that the host thread waits for all enqueued work, callbacks
        included.
      host_wait_seconds: seconds in which the host thread waits instead of enqueuing: for the
        device, and inside callbacks for their copies, the host's kernel and the disk.
      transfer_wait_seconds: seconds in which the main stream waits for asynchronous operations.
      loops: loops of the entry computation, in order.
      not_priced: targets of library calls that are priced by their bytes alone, since the text does
        not contain their FLOPs.
      streams: how asynchronous operations were assigned to streams, in words.
      graphs: how copies in CUDA graphs were assumed to be made, in words; empty if there are none.
      rates: the assumed rates.
      notes: reasons to doubt the prediction, such as a program compiled for a CPU.
    """

    seconds: float
    compute_seconds: float
    busy: Mapping[str, float]
    work: Mapping[str, tuple[int, float]]
    flops: float
    traffic: HostTraffic
    callback_bytes: Mapping[str, int]
    num_callbacks: int
    num_host_waits: int
    host_wait_seconds: float
    transfer_wait_seconds: float
    loops: tuple[Loop, ...]
    not_priced: tuple[str, ...]
    streams: str
    rates: Rates
    graphs: str = ""
    notes: tuple[str, ...] = ()

    @property
    def idle(self) -> float:
        """Predicted share of the step in which the cores are idle or only move host memory."""
        return 1 - self.compute_seconds / self.seconds if self.seconds else 0.0

    @property
    def floor_seconds(self) -> float:
        """Predicted lower bound on the seconds of a step with these bytes and FLOPs.

        It is the time of the busiest resource alone: compute, the busier direction of the link with
        all bytes moved by copies at `rates.link`, the disk, or the host's kernel.
        """
        copies = self.traffic.by_copies
        kernels = self.traffic.by_kernels
        callbacks = self.callback_bytes
        link_bytes = max(
            copies[way] + kernels[way] + callbacks[way] for way in (_TO_DEVICE, _TO_HOST)
        )
        return max(
            self.compute_seconds,
            link_bytes / self.rates.link,
            self.busy[DISK],
            self.busy[HOST_KERNEL],
        )

    def __str__(self) -> str:
        """Return the prediction as a table, which states that it is predicted."""
        rows = [*self._headline_rows(), *self._link_rows()]
        rows.append(
            "predicted busy:  " + ", ".join(f"{name} {_ms(s)}" for name, s in self.busy.items())
        )
        rows += [f"  {kind:<40} {n:>7} x {_ms(s):>12}" for kind, (n, s) in self.work.items()]
        for loop in self.loops:
            known = "" if loop.is_known else ", unknown to XLA: the host waits in each"
            rows.append(
                f"  loop {loop.name:<12} {loop.trips:>5} trips {_ms(loop.seconds):>12}{known}"
            )
        rows += [f"note: {note}" for note in self.notes]
        if self.not_priced:
            rows.append(f"priced by their bytes alone: {', '.join(self.not_priced)}")
        rates = dataclasses.asdict(self.rates)
        rows.append("rates: " + ", ".join(f"{name} {value:g}" for name, value in rates.items()))
        return "\n".join(rows)

    def _headline_rows(self) -> list[str]:
        """Return the table's first rows: what was assumed, the step's time, and its waits."""
        rows = [
            "predicted from the compiled program at assumed rates; nothing here was measured",
            f"streams: {self.streams}; copies and kernels distinguished by the program's "
            f"{self.traffic.source}",
            f"predicted step {_ms(self.seconds)}: compute {_ms(self.compute_seconds)}, "
            f"idle {100 * self.idle:.1f} %, "
            f"{self.flops / max(self.seconds, 1e-12) / 1e12:.0f} TF/s",
            f"predicted waits: main stream for transfers {_ms(self.transfer_wait_seconds)}; "
            f"host thread {_ms(self.host_wait_seconds)}, with {self.num_host_waits} drains of the "
            f"device; {self.num_callbacks} callbacks; floor {_ms(self.floor_seconds)}",
        ]
        if self.graphs:
            in_graphs = sum(self.traffic.in_graphs.values()) / 1e9
            rows.append(
                f"{in_graphs:.2f} GB of the copies are nodes of CUDA graphs, assumed to be made "
                f"{self.graphs}"
            )
        return rows

    def _link_rows(self) -> list[str]:
        """Return the table's rows of bytes over the host link, by direction and by mover."""
        copies = self.traffic.by_copies
        kernels = self.traffic.by_kernels
        callbacks = self.callback_bytes
        rows = [
            f"{'predicted GB over the link':<28} {'by copies':>10} {'by kernels':>10} "
            f"{'callbacks':>10}"
        ]
        for name, way in (("up, to the device", _TO_DEVICE), ("down, to the host", _TO_HOST)):
            rows.append(
                f"  {name:<26} {copies[way] / 1e9:>10.2f} {kernels[way] / 1e9:>10.2f} "
                f"{callbacks[way] / 1e9:>10.2f}"
            )
        return rows


@reads_program
def simulate(
    text: str,
    *,
    rates: Rates | str = "h200",
    thunks: Thunks | None = None,
    streams: str | None = None,
    kernels: Literal["exclusive", "beside"] = "exclusive",
    graphs: Literal["in_turn", "copies", "kernels"] = "in_turn",
    callbacks: str = "plain",
    unknown_trips: int = 1,
) -> Simulation:
    """Walk a compiled program and predict a step of it.

    Every figure of the result is predicted, none is measured.

        simulation = hlo.simulate(compiled.as_text(), rates="h200", thunks=hlo.read_thunks(folder))
        print(simulation)

    Args:
      text: scheduled HLO of one device, as `compiled.as_text()`.
      rates: rates of the machine, or a name in `RATES`.
      thunks: thunks of the same compilation; they distinguish copies from kernels, and name the
        streams.
      streams: "turns", "direction" or "each" (`STREAMS`). None: as the thunks name them, or as the
        installed jaxlib assigns them.
      kernels: whether a kernel that moves host memory has the cores to itself ("exclusive"), or
        overlaps products at no cost to them ("beside").
      graphs: how copies that are nodes of CUDA graphs are made: "in_turn", by copy engines while
        nothing else runs; "copies", by copy engines overlapped with products; or "kernels", by the
        cores (`GRAPHS`).
      callbacks: what callbacks to the host do: "plain", "update", "delayed", "in_forward", "nvme"
        or "nvme_update", described in `zerojax.hlo.callbacks`. The text does not say.
      unknown_trips: trip count to assume for a loop whose count XLA does not know; 1 in a streamed
        step.

    Returns:
      The predicted step.

    Raises:
      ValueError: the program is for several devices, is not scheduled, or runs too many operations;
        or an argument has an unsupported value.
    """
    _check_types(text, thunks)
    assumptions = _Assumptions(
        streams=streams,
        kernels=kernels,
        graphs=graphs,
        callbacks=callbacks,
        unknown_trips=unknown_trips,
    )
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "the program is not scheduled: give the text of a compiled program, compiled.as_text()"
        )
    walk = _StreamWalk(text, find_rates(rates), thunks, assumptions)
    walk.check_length()
    walk.run(walk.module.entry)
    return walk.result()


def _check_types(text: Any, thunks: Any) -> None:
    """Raise ValueError unless `text` is a str, and `thunks` are Thunks or None."""
    if not isinstance(text, str):
        raise ValueError(
            f"text is of type {type(text).__name__}: give the text of a compiled program, "
            "compiled.as_text()"
        )
    if thunks is not None and not isinstance(thunks, Thunks):
        raise ValueError(
            f"thunks are of type {type(thunks).__name__}: give what hlo.read_thunks(folder) returns"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Assumptions:
    """What the text of a program does not state, as `simulate` describes it."""

    streams: str | None
    kernels: str
    graphs: str
    callbacks: str
    unknown_trips: int

    def __post_init__(self) -> None:
        """Check each value."""
        if self.kernels not in ("exclusive", "beside"):
            raise ValueError(f"kernels={self.kernels!r}: choose from exclusive, beside")
        if self.graphs not in GRAPHS:
            raise ValueError(f"graphs={self.graphs!r}: choose from {', '.join(GRAPHS)}")
        if self.callbacks not in CALLBACKS:
            raise ValueError(f"callbacks={self.callbacks!r}: choose from {', '.join(CALLBACKS)}")
        if self.streams is not None and self.streams not in STREAMS:
            raise ValueError(f"streams={self.streams!r}: choose from {', '.join(STREAMS)}")
        if (
            isinstance(self.unknown_trips, bool)
            or not isinstance(self.unknown_trips, int)
            or not 0 <= self.unknown_trips <= MOST_TRIPS
        ):
            raise ValueError(
                f"unknown_trips={self.unknown_trips!r}: a whole number from 0 to {MOST_TRIPS:,} "
                "is needed"
            )


class _WalkedLoop(NamedTuple):
    """A loop of the entry computation, with the last tasks of the main stream around it."""

    instruction: Instruction
    trips: int
    task_before: int | None
    last_task: int | None


class _StreamWalk:
    """A walk through a program that fills a timeline."""

    def __init__(
        self, text: str, rates: Rates, thunks: Thunks | None, assumptions: _Assumptions
    ) -> None:
        self.module = checked_module(text)
        self.rates = rates
        self.exclusive = assumptions.kernels == "exclusive"
        self.unknown_trips = assumptions.unknown_trips
        self.graphs = assumptions.graphs
        self.traffic = host_traffic(text, thunks, self.unknown_trips)
        self.timeline = Timeline()
        self.callbacks = Callbacks(assumptions.callbacks, rates, self.timeline)
        self._moves: dict[tuple[str, str], list[HostMove]] = {}
        for move in self.traffic.moves:
            self._moves.setdefault((move.computation, move.instruction), []).append(move)
        self._costs = Costs(self.module)
        self._cost_of = dict[tuple[str, str], Cost]()
        self._started: dict[str, int] = {}
        self._flops = 0.0
        self._unpriced = dict[str, None]()  # an ordered set
        self._dones: list[int] = []
        self._loops: list[_WalkedLoop] = []
        self._lengths = dict[str, int]()
        is_of_cpu = _OF_GPUS not in text and _OF_CPUS.search(text) is not None
        self.notes = (f"{FOR_CPUS} (zerojax.aot)",) if is_of_cpu else ()
        self._depth = 0
        self._streams, self.streams = self._assign_streams(thunks, assumptions.streams)

    def _assign_streams(
        self, thunks: Thunks | None, rule: str | None
    ) -> tuple[Mapping[str, str], str]:
        """Return the stream of each asynchronous start, and in words how they were chosen.

        Args:
          thunks: thunks of the program, if known.
          rule: a name in `STREAMS`; None to follow the thunks or the installed jaxlib.
        """
        names = frozenset[str]() if thunks is None else thunks.in_graphs
        graph_lanes = {name: MAIN if self.graphs == "in_turn" else name for name in names}
        if rule is None and thunks is not None:
            lanes = {name: graph_lanes.get(name, stream) for name, stream in thunks.streams.items()}
            return lanes, "as the program's thunks name them"

        assumed = ""
        if rule is None:
            installed = importlib.metadata.version("jaxlib")
            rule = find_stream_assignment(installed)
            assumed = f" (assumed: jaxlib {installed} is installed)"
        lanes = dict[str, str]()
        number = 0
        for computation in self._scheduled_computations():
            for i in self.module.instructions(computation):
                if not i.op.endswith(_START):
                    continue
                moves = self._moves.get((computation, i.result))
                if i.result in graph_lanes:
                    lanes[i.result] = graph_lanes[i.result]
                elif rule == "each":
                    lanes[i.result] = i.result
                elif rule == "direction" and moves:
                    lanes[i.result] = f"stream {moves[0].direction}"
                else:
                    lanes[i.result] = f"stream {number % _NUM_STREAMS}"
                number += 1
        return lanes, STREAMS[rule] + assumed

    def _scheduled_computations(self) -> list[str]:
        """Return the computations whose instructions are enqueued one by one.

        They are the entry computation and the computations of control flow.
        """
        names = [self.module.entry]
        for computation in names:  # the list grows while it is read
            for i in self.module.instructions(computation):
                if i.op in _CONTROL_FLOW:
                    names += [c for c in i.called if c not in names]
        return names

    def check_length(self) -> None:
        """Raise ValueError if the program's loops run too many operations to walk one by one."""
        count = self._num_operations(self.module.entry)
        if count > MOST_OPERATIONS:
            raise ValueError(
                f"the program runs {count:,} operations in a step; at most {MOST_OPERATIONS:,} are "
                "supported"
            )

    def _num_operations(self, computation: str) -> int:
        """Return the number of operations that a computation enqueues, including its loops."""
        if computation not in self._lengths:
            total = 0
            for i in self.module.instructions(computation):
                total += 1
                if i.op not in _CONTROL_FLOW:
                    continue
                inner = sum(map(self._num_operations, i.called))
                if i.op == "while":
                    trips = self.unknown_trips if i.trips is None else i.trips
                    # The walk also visits the iterations of a loop without operations.
                    total += trips * (1 + inner)
                else:
                    total += inner
            self._lengths[computation] = total
        return self._lengths[computation]

    # --- the walk ---------------------------------------------------------------------------------

    def run(self, computation: str) -> None:
        for i in self.module.instructions(computation):
            if i.op in _FREE:
                continue
            if i.op.removesuffix(_START) in COLLECTIVES:
                raise ValueError(
                    f"{i.result} is a collective: a program of one device is simulated, and this "
                    "one is for several"
                )
            if i.op == "while":
                self._while(i)
            elif i.op == "conditional":
                # XLA reads the condition back to the host. The last branch of a jax.lax.cond is the
                # one for True.
                self._wait_for_device()
                self.run(i.called[-1])
            elif i.op == "call":
                self.run(i.called[0])
            elif i.op == "custom-call" and _CALLBACK_TARGET.search(i.text):
                self._callback(computation, i)
            elif i.op.endswith(_DONE):
                self._done(i)
            elif i.op.endswith(_START) and not _WAITED.search(i.text):
                lane = self._streams.get(i.result, MAIN)
                self._started[i.result] = self._operation(computation, i, lane)
            else:
                self._operation(computation, i, MAIN)

    def _callback(self, computation: str, i: Instruction) -> None:
        instructions = self.module.computations[computation].instructions
        operand_bytes = []
        for name in i.operands:
            if name in instructions:
                arrays = parse_arrays(instructions[name].shape)
                operand_bytes.append(sum(a.num_bytes for a in arrays))
        result_bytes = [a.num_bytes for a in parse_arrays(i.shape)]
        self.callbacks.call(operand_bytes, result_bytes, in_loop=self._depth > 0)

    def _done(self, i: Instruction) -> None:
        """Let the main stream wait for an asynchronous start."""
        start = self._started.pop(i.operands[0], None)
        if start is not None:
            enqueued = self.timeline.last.get(HOST)
            self._dones.append(self.timeline.add(MAIN, after=[start, enqueued]))

    def _while(self, i: Instruction) -> None:
        condition, body = _loop_computations(i)
        trips = self.unknown_trips if i.trips is None else i.trips
        task_before = self.timeline.last.get(MAIN)
        self._depth += 1
        for trip in range(trips + (i.trips is None)):
            # The condition is computed on the device, and read back before each iteration and after
            # the last.
            if i.trips is None:
                self.run(condition)
                self._wait_for_device()
            if trip < trips:
                self.run(body)
        self._depth -= 1
        if not self._depth:
            self._loops.append(_WalkedLoop(i, trips, task_before, self.timeline.last.get(MAIN)))

    def _wait_for_device(self) -> None:
        self.timeline.add(
            HOST, self.rates.sync_seconds, after=[self.timeline.last.get(MAIN)], label=WAIT
        )

    def _operation(self, computation: str, i: Instruction, lane: str) -> int:
        """Add an operation to a lane after the host thread enqueues it; return its task number."""
        enqueued = self.timeline.add(HOST, self.rates.issue_seconds)
        after = [enqueued, self.timeline.last.get(MAIN)]
        moves = self._moves.get((computation, i.result))
        if moves:
            return self._move(moves, lane, after)
        if (computation, i.result) not in self._cost_of:
            self._cost_of[computation, i.result] = self._costs.price(computation, i)
        cost = self._cost_of[computation, i.result]
        self._flops += cost.flops
        if cost.target:
            self._unpriced[cost.target] = None
        rates = self.rates
        seconds = max(
            cost.flops / getattr(rates, cost.rate),
            cost.num_bytes / rates.memory,
            rates.launch_seconds,
        )
        return self.timeline.add(lane, seconds, (CORES,), after, cost.kind)

    def _move(self, moves: list[HostMove], lane: str, after: list[int | None]) -> int:
        """Add an operation that moves host memory; both directions run at the same time."""
        in_graph = any(m.in_graph for m in moves)
        by_cores = any(m.by == KERNEL for m in moves) or (in_graph and self.graphs == "kernels")
        if by_cores:
            rate = self.rates.kernel_link
        elif in_graph:
            rate = self.rates.graph_link
        else:
            rate = self.rates.link

        num_bytes = {UP: 0, DOWN: 0}
        for move in moves:
            if move.direction != _TO_HOST:
                num_bytes[UP] += move.num_bytes
            if move.direction != _TO_DEVICE:
                num_bytes[DOWN] += move.num_bytes
        links = tuple(link for link, n in num_bytes.items() if n)
        seconds = max(num_bytes.values()) / rate + self.rates.launch_seconds
        cores = (CORES,) if by_cores and self.exclusive else ()
        label = f"{' and '.join(links)}: {'kernels' if by_cores else 'copies'}"
        return self.timeline.add(lane, seconds, (*links, *cores), after, label)

    # --- results ----------------------------------------------------------------------------------

    def result(self) -> Simulation:
        spans = self.timeline.play()
        num_host_waits, host_wait_seconds = self._host_waits(spans)
        loops = []
        for loop in self._loops:
            i = loop.instruction
            seconds = _end(spans, loop.last_task) - _end(spans, loop.task_before)
            loops.append(Loop(i.result, loop.trips, i.trips is not None, seconds))
        return Simulation(
            seconds=max((end for _, end in spans), default=0.0),
            compute_seconds=self._compute_seconds(),
            busy=self._busy(),
            work=self._work_by_kind(),
            flops=self._flops,
            traffic=self.traffic,
            callback_bytes={
                _TO_DEVICE: self.callbacks.bytes_up,
                _TO_HOST: self.callbacks.bytes_down,
            },
            num_callbacks=self.callbacks.count,
            num_host_waits=num_host_waits,
            host_wait_seconds=host_wait_seconds,
            transfer_wait_seconds=self._transfer_waits(spans),
            loops=tuple(loops),
            not_priced=tuple(self._unpriced),
            streams=self.streams,
            rates=self.rates,
            graphs=GRAPHS[self.graphs] if any(self.traffic.in_graphs.values()) else "",
            notes=self.notes,
        )

    def _busy(self) -> dict[str, float]:
        """Return the seconds in which each resource, and the host thread, is occupied."""
        busy: dict[str, float] = dict.fromkeys((CORES, UP, DOWN, DISK, HOST_KERNEL, HOST), 0.0)
        for task in self.timeline.tasks:
            for resource in task.resources:
                busy[resource] += task.seconds
            if task.lane == HOST and task.label != WAIT:
                busy[HOST] += task.seconds
        return busy

    def _compute_seconds(self) -> float:
        """Return the seconds of kernels that do not move host memory."""
        seconds = 0.0
        for task in self.timeline.tasks:
            if CORES in task.resources and not {UP, DOWN} & set(task.resources):
                seconds += task.seconds
        return seconds

    def _work_by_kind(self) -> dict[str, tuple[int, float]]:
        """Return (number of runs, seconds) by kind of work, most seconds first."""
        work: dict[str, tuple[int, float]] = {}
        for task in self.timeline.tasks:
            if task.label and task.label != WAIT:
                times, seconds = work.get(task.label, (0, 0.0))
                work[task.label] = (times + 1, seconds + task.seconds)
        return dict(sorted(work.items(), key=lambda item: -item[1][1]))

    def _host_waits(self, spans: list[tuple[float, float]]) -> tuple[int, float]:
        """Return how often the host thread waits for the device, and the seconds of all waits."""
        num_waits = 0
        seconds = 0.0
        host_end = 0.0
        for task, (start, end) in zip(self.timeline.tasks, spans, strict=True):
            if task.lane != HOST:
                continue
            # Time from the end of the thread's last work until it continues.
            idle = start - host_end
            if task.label == WAIT:
                num_waits += 1
                idle += task.seconds
            seconds += idle
            host_end = end
        return num_waits, seconds

    def _transfer_waits(self, spans: list[tuple[float, float]]) -> float:
        """Return the seconds for which the main stream waits in dones.

        A done's wait starts when everything before it on the main stream has ended and it is
        enqueued.
        """
        tasks = self.timeline.tasks
        dones = set(self._dones)
        total = 0.0
        main_end = 0.0
        for number, task in enumerate(tasks):
            if task.lane == MAIN:
                if number in dones:
                    enqueued = max(
                        (spans[n][1] for n in task.after if tasks[n].lane == HOST), default=0.0
                    )
                    total += max(0.0, spans[number][1] - max(main_end, enqueued))
                main_end = spans[number][1]
        return total


def _loop_computations(i: Instruction) -> tuple[str, str]:
    """Return the names of a loop's condition and body."""
    condition = re.search(r"condition=%?([\w.\-]+)", i.text)
    body = re.search(r"body=%?([\w.\-]+)", i.text)
    # `zerojax.hlo.check` refuses a loop without them.
    assert condition is not None
    assert body is not None
    return condition[1], body[1]


def _end(spans: list[tuple[float, float]], task: int | None) -> float:
    return 0.0 if task is None else spans[task][1]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
