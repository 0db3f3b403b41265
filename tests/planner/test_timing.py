"""Predicted seconds of a schedule against an event simulation.

Tasks are in the queues of lanes, each after the tasks that it waits for.
"""

import collections
import dataclasses
import heapq
import random
from typing import Any

import pytest

from host_offload.schedule import (
    LANES,
    HostUpdate,
    Phase,
    Schedule,
    StepPlan,
    UnstackedLeaf,
    build_schedule,
    build_unstacked,
)
from zerojax.costs.timing import LayerWork, UnstackedWork, Wires, step_time

H, N = "pinned_host", "nvme"
KINDS = ("params", "frozen", "grads", "opt_state", "activations")


class Simulation:
    """Tasks of a step.

    A lane runs its tasks in order. A task begins when all tasks that it waits for have ended.
    """

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.seconds, self.after, self.work = (
            list[float](),
            list[list[int]](),
            collections.Counter[str](),
        )
        self.updated = list[int]()  # by the host
        self.queues: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
        self.last = self.task("compute", 0.0, in_order=True)  # last task on the cores

    def task(self, lane: str, seconds: float, *after: int, in_order: bool = False) -> int:
        """Add a task, and return its number.

        A task of no seconds does not queue, unless `in_order` is set.
        """
        number = len(self.seconds)
        self.work[lane] += seconds
        on_cores = self.wires.shares_cores and lane in ("up", "down", "host")
        lane = "compute" if on_cores else lane
        queue = lane if seconds or in_order else f"moment {number}"
        self.seconds.append(seconds)
        self.after.append(list(after))
        self.queues[queue].append(number)
        if queue == "compute":
            self.last = number
        return number

    def run(self) -> float:
        """Return when the cores finish their last task.

        Only writes to the disk may end later.
        """
        lanes = [
            self.queues[lane][-1] for lane in ("up", "down", "host", "network") if self.queues[lane]
        ]
        self.task("compute", 0.0, *lanes, *self.updated, in_order=True)
        waits = [len(set(after)) for after in self.after]
        followers = collections.defaultdict[int, list[int]](list)
        lane_of = {number: lane for lane, queue in self.queues.items() for number in queue}
        for number, after in enumerate(self.after):
            for other in set(after):
                followers[other].append(number)
        busy, running, now, end_of_cores = set[str](), list[tuple[float, int]](), 0.0, 0.0
        looked_at = set(self.queues)
        while True:
            for lane in looked_at:
                queue = self.queues[lane]
                if queue and lane not in busy and not waits[queue[0]]:
                    number = queue.popleft()
                    busy.add(lane)
                    heapq.heappush(running, (now + self.seconds[number], number))
            if not running:
                assert not any(self.queues.values()), (
                    "tasks wait for each other: the simulation is stuck"
                )
                return end_of_cores
            now, done = heapq.heappop(running)
            end_of_cores = now if lane_of[done] == "compute" else end_of_cores
            busy.discard(lane_of[done])
            looked_at = {lane_of[done]}
            for number in followers[done]:
                waits[number] -= 1
                looked_at.add(lane_of[number])


class Step(Simulation):
    """The tasks of a step, built from its schedules and from their sizes and tiers."""

    def __init__(self, layers: Any, ends: Any, wires: Wires, repeats: int) -> None:
        super().__init__(wires)
        ends, leaf = ends
        self.distance = max(1, max(schedule.distance for schedule, _ in layers))
        self.stored: dict[Any, int] = {}
        self.taken: dict[Any, list[int]] = collections.defaultdict(list)
        self.moved = collections.Counter[str]()
        self.rates: dict[str, float] = {}
        numbered = list(enumerate(layers))
        for _ in range(repeats):
            self.share({})
            loaded = self.fetch_end(leaf, ["params"])
            self.compute(ends.embed, self.task("network", ends.gather, loaded, self.last))
            for n, (schedule, work) in numbered:
                self.loop(n, schedule, schedule.phase("forward"), work, self.last)
            begin = self.last
            self.compute(ends.head, self.task("network", 2 * ends.gather, self.last))
            for n, (schedule, work) in reversed(numbered):
                self.loop(n, schedule, schedule.phase("backward"), work, begin)
                begin = self.last
            done = self.compute(ends.embed_backward, self.task("network", ends.gather, self.last))
            self.task("network", ends.reduce, done, self.last)
        later = [
            (n, s, w) for n, (s, w) in numbered if any(phase.name == "update" for phase in s.phases)
        ]
        if later:
            self.task("compute", 0.0, *list(self.queues["network"])[-1:], in_order=True)
        for n, schedule, work in later:
            self.loop(n, schedule, schedule.phase("update"), work, self.last)
        self.update_unstacked(
            ends, leaf, has_master=layers[0][0].master, on_host=any(work.host for _, work in layers)
        )

    def share(self, moved: Any) -> None:
        """Set the rates of lanes for these numbers of bytes per lane."""
        wires = self.wires
        self.rates = {"up": wires.up, "down": wires.down, "read": wires.read, "write": wires.write}
        for one, other, together in (
            ("up", "down", wires.link_both),
            ("read", "write", wires.disk_both),
        ):
            a, b = moved.get(one, 0), moved.get(other, 0)
            if a and b and together < self.rates[one] + self.rates[other]:
                seconds = (a + b) / together  # in which each direction moves its part
                self.rates[one] = min(self.rates[one], a / seconds)
                self.rates[other] = min(self.rates[other], b / seconds)

    def move(self, lane: str, num_bytes: float, *after: int) -> int:
        self.moved[lane] += num_bytes
        return self.task(lane, num_bytes / self.rates[lane], *after)

    def compute(self, seconds: float, *after: int) -> int:
        return self.task("compute", seconds, *after)

    def fetch(
        self,
        n: int,
        schedule: Schedule,
        kinds: tuple[str, ...],
        layer: int,
        sizes: Any,
        *after: int,
    ) -> int:
        """Read a record from disk into a buffer emptied d records ago, and load it."""
        before, on_disk = list(after), list[Any]()
        for kind in kinds:
            key, stored, size = (n, kind), self.stored.get((n, kind, layer)), sizes.get(kind, 0)
            needs = [] if stored is None or not size else [stored]
            if size and schedule.tiers[kind] == N:
                needs += (
                    self.taken[key][-self.distance :][:1]
                    if len(self.taken[key]) >= self.distance
                    else []
                )
                needs = [self.move("read", size, *needs)]
                on_disk.append(key)
            before += needs
        loaded = self.move("up", sum(sizes.get(kind, 0) for kind in kinds), *before)
        for key in on_disk:
            self.taken[key].append(loaded)
        return loaded

    def fetch_end(self, leaf: UnstackedLeaf, kinds: list[str], *after: int) -> int:
        """Load the records of the unstacked leaf, and read them first if they are on disk."""
        sizes = [leaf.sizes[kind] if leaf.tiers[kind] != "device" else 0 for kind in kinds]
        reads = [
            self.move("read", n)
            for kind, n in zip(kinds, sizes, strict=True)
            if leaf.tiers[kind] == N
        ]
        return self.move("up", sum(sizes), *after, *reads)

    def store(
        self, n: int, schedule: Schedule, kinds: tuple[str, ...], layer: int, sizes: Any, after: int
    ) -> None:
        there = self.move("down", sum(sizes.get(kind, 0) for kind in kinds), after)
        for kind in kinds:
            size = sizes.get(kind, 0) if schedule.tiers[kind] == N else 0
            self.stored[n, kind, layer] = self.move("write", size, there)

    def update_on_host(
        self, n: Any, tiers: Any, sizes: Any, seconds: float, has_master: bool, after: int
    ) -> None:
        """Store gradients, and load weights that are their own masters.

        Records on disk are updated in the buffers into which they are read.
        """
        given, weights = sizes["handed"], sizes["weights"] if not has_master else 0
        there = (
            self.move("down", weights, self.move("down", given, after))
            if weights
            else self.move("down", given, after)
        )
        ready, read = [there], []
        for kind in ["opt_state"] if has_master else ["params", "opt_state"]:
            if tiers[kind] != N:
                continue
            key = (n, kind)
            needs = (
                self.taken[key][-self.distance :][:1]
                if len(self.taken[key]) >= self.distance
                else []
            )
            ready.append(self.move("read", sizes[kind], *needs))
            read.append(key)
        done = self.task("host", seconds, after, *ready)
        for key in read:
            self.taken[key].append(done)
        for kind in ("params", "opt_state"):
            if tiers[kind] == N:
                self.move("write", sizes[kind], done)
        self.updated.append(self.move("up", sizes["made"], done))

    def update_unstacked(
        self, ends: UnstackedWork, leaf: UnstackedLeaf, has_master: bool, on_host: bool
    ) -> None:
        away = {
            kind: n if leaf.tiers.get(kind, "device") != "device" else 0
            for kind, n in leaf.sizes.items()
        }
        own = 0 if has_master else away["params"]
        if on_host:
            on_disk = {
                kind: n if leaf.tiers.get(kind) == N else 0 for kind, n in leaf.sizes.items()
            }
            read, write = (
                on_disk["opt_state"] + (0 if has_master else on_disk["params"]),
                on_disk["opt_state"] + on_disk["params"],
            )
            down = leaf.sizes["handed"] + (0 if has_master else leaf.sizes["weights"])
            self.share({"up": leaf.sizes["made"], "down": down, "read": read, "write": write})
            return self.update_on_host(
                "unstacked", leaf.tiers, leaf.sizes, ends.host, has_master, self.last
            )
        on_disk = {kind: n if leaf.tiers.get(kind) == N else 0 for kind, n in away.items()}
        both = {"read": on_disk["opt_state"] + (0 if has_master else on_disk["params"])}
        both |= {"write": on_disk["opt_state"] + on_disk["params"]}
        self.share(
            {"up": away["opt_state"] + own, "down": away["opt_state"] + away["params"]} | both
        )
        start = self.last
        done = self.compute(
            ends.update,
            self.fetch_end(leaf, [*([] if has_master else ["params"]), "opt_state"], start),
            start,
        )
        there = self.move("down", away["params"] + away["opt_state"], done)
        for kind in ("params", "opt_state"):
            self.move("write", on_disk[kind], there)

    def loop(self, n: int, schedule: Schedule, phase: Phase, work: LayerWork, begin: int) -> None:
        self.share(bytes_of_a_loop(schedule, phase, work))
        read, updating = (
            schedule.record_bytes,
            phase.name == ("backward" if schedule.update == "in_backward" else "update"),
        )
        gathers = 0.0 if phase.name == "update" else work.gather
        ring: dict[int, int] = {}
        whole = begin
        unsaved = None  # from the tick before, if stores are late

        def fetches(layer: int) -> tuple[str, ...]:
            return phase.off_device(phase.fetches, layer)

        if phase.first >= 0:
            whole = self.task(
                "network",
                gathers,
                self.fetch(n, schedule, fetches(phase.first), phase.first, read, begin),
            )
        for slot, layer in enumerate(phase.preload.tolist()):
            ring[slot] = self.fetch(n, schedule, fetches(layer), layer, read, begin)
        for t, layer in enumerate(phase.layer.tolist()):
            begun, taken, slot = self.last, self.last, int(phase.use_slot[t])
            if unsaved is not None:
                self.store(
                    n,
                    schedule,
                    phase.off_device(phase.writes, unsaved[0]),
                    unsaved[0],
                    read,
                    unsaved[1],
                )
            taking = int(phase.consume[t])
            if slot >= 0:
                taken = self.task("compute", 0.0, begun, ring[slot])
            elif taking >= 0 and fetches(taking):
                fetched = self.fetch(n, schedule, fetches(taking), taking, read, begun)
                taken = self.task("compute", 0.0, begun, fetched)
            if phase.fetch_slot[t] >= 0:
                coming = int(phase.fetch[t])
                ring[int(phase.fetch_slot[t])] = self.fetch(
                    n, schedule, fetches(coming), coming, read, taken
                )
            before, whole = whole, self.task("network", gathers, taken) if taking >= 0 else whole
            ready = before if schedule.gather_ahead and phase.name != "update" else whole
            besides = phase.off_device(phase.reads, layer)
            here = self.fetch(n, schedule, besides, layer, read, begun) if besides else begun
            if phase.name == "update":
                made = begun if work.host else self.compute(work.update, ready, here)
            else:
                made = self.compute(
                    work.backward if phase.name == "backward" else work.forward, ready
                )
            if phase.name == "backward":
                made = self.task("network", work.reduce, made)
                if updating and not work.host:
                    made = self.compute(work.update, made, here)
            unsaved = None
            if updating:
                gathered = self.task("network", work.regather, made)
                if work.host:
                    self.update_on_host(
                        n, schedule.tiers, read, work.host, schedule.master, gathered
                    )
                    continue
            if phase.stores_late:
                unsaved = (layer, made)
            elif (writes := phase.off_device(phase.writes, layer)) and phase.store[t] == layer:
                self.store(n, schedule, writes, layer, read, made)
        for layer in phase.drain.tolist():
            assert unsaved is not None
            assert unsaved[0] == layer
            self.store(n, schedule, phase.off_device(phase.writes, layer), layer, read, unsaved[1])

    def run(self) -> float:
        """Return the seconds of the step, including the limits of wires on total bytes."""
        end_of_cores = super().run()
        up, down, read, write = (self.moved[lane] for lane in ("up", "down", "read", "write"))
        wires = self.wires
        return max(
            end_of_cores,
            (up + down) / wires.link_both,
            write / wires.write,
            (read + write) / wires.disk_both,
        )


def bytes_of_a_loop(schedule: Schedule, phase: Phase, work: LayerWork) -> dict[str, float]:
    """Return the bytes per lane of a tick that moves everything the phase moves."""
    assert schedule.record_bytes is not None
    size, tiers, updating = (
        schedule.record_bytes,
        schedule.tiers,
        phase.name == "update" or schedule.update == "in_backward",
    )
    on_host = bool(work.host) and phase.name != "forward"
    moved: dict[str, float] = {"up": sum(size[kind] for kind in (*phase.fetches, *phase.reads))}
    moved |= {"down": 0 if on_host else sum(size[kind] for kind in phase.writes)}
    moved |= {
        "read": sum(size[kind] for kind in (*phase.fetches, *phase.reads) if tiers[kind] == N)
    }
    moved |= {
        "write": 0 if on_host else sum(size[kind] for kind in phase.writes if tiers[kind] == N)
    }
    if on_host and updating:
        own = [] if schedule.master else ["params"]
        beside = {
            "up": size["made"],
            "down": size["handed"] + (0 if schedule.master else size["weights"]),
        }
        beside |= {"read": sum(size[kind] for kind in ("opt_state", *own) if tiers[kind] == N)}
        beside |= {"write": sum(size[kind] for kind in ("opt_state", "params") if tiers[kind] == N)}
        moved = {lane: n + beside[lane] for lane, n in moved.items()}
    return moved


# --- random steps ---------------------------------------------------------------------------------


def random_step(seed: int) -> dict[str, Any]:
    """Return arguments of `step_time`: one to three ranges of layers, with random moves."""
    draw = random.Random(seed)

    def some(scale: float) -> float:
        return draw.choice([0.0, draw.random() * scale])

    update = draw.choice(["after_backward", "in_backward"])
    on_host, resident, master = draw.random() < 0.25, draw.random() < 0.2, draw.random() < 0.5
    tiers = {kind: "device" if resident else draw.choice(["device", H, N]) for kind in KINDS}
    if on_host:
        tiers |= {"grads": "device"}
    shares_cores = draw.random() < 0.3
    late = (
        not on_host
        and not shares_cores
        and tiers["opt_state"] == H
        and N not in tiers.values()
        and draw.random() < 0.7
    )
    distance, ahead = draw.randint(0, 3), draw.random() < 0.4
    host = HostUpdate(takes_weights=not master) if on_host else None
    seconds_of_host = 0.1 + 3 * draw.random() if on_host else 0.0
    schedules, works = {}, []
    for n in range(draw.choice([1, 1, 2, 3])):
        num_layers = draw.randint(1, 6)
        sizes = {kind: draw.randint(0, 20) for kind in (*KINDS, "handed", "weights", "made")}
        may_stay = not late and not on_host and tiers["opt_state"] != "device"
        schedules[f"{n}"] = build_schedule(
            num_layers, distance, tiers=tiers, update=update, gather_ahead=ahead, master=master,
            device_layers=draw.choice([0, draw.randint(0, num_layers)]) if may_stay else 0,
            stores_late=int(late), host=host, regathers=True, record_bytes=sizes,
        )  # fmt: skip
        works.append(LayerWork(
            forward=draw.random(), backward=2 * draw.random(), update=some(1), gather=some(1), reduce=some(1), regather=some(1),
            host=seconds_of_host,
        ))  # fmt: skip
    leaf = UnstackedLeaf(
        "unstacked",
        tiers,
        {kind: draw.randint(0, 3) for kind in ("params", "opt_state", "handed", "weights", "made")},
    )
    rates = ("up", "down", "link_both", "read", "write", "disk_both")
    names = ("embed", "head", "embed_backward", "gather", "reduce")
    ends = UnstackedWork(**{name: some(2) for name in names}, update=some(1), host=seconds_of_host)
    return {
        "steps": StepPlan(schedules, build_unstacked([leaf], master, host)),
        "layers": works,
        "unstacked": ends,
        "leaf": leaf,
        "wires": Wires(**{name: draw.choice([5.0, 50.0, 500.0]) * (0.5 + draw.random()) for name in rates},
                       shares_cores=shares_cores),
        "repeats": draw.randint(1, 3) if resident else 1,
    }  # fmt: skip


def predicted(step: Any) -> Any:
    return step_time(
        step["steps"], step["layers"], step["unstacked"], step["wires"], repeats=step["repeats"]
    )


def simulation_of(step: Any) -> Step:
    layers = list(zip(step["steps"].stacks.values(), step["layers"], strict=True))
    return Step(layers, (step["unstacked"], step["leaf"]), step["wires"], step["repeats"])


def check_step(seed: int) -> None:
    step = random_step(seed)
    time, simulated = predicted(step), simulation_of(step)
    assert time.seconds == pytest.approx(simulated.run(), rel=1e-9), seed
    # The lanes' busy times are their work. The cores wait for a lane no longer than it is busy,
    # except at the seams of loops.
    for lane in LANES:
        assert time.busy[lane] == pytest.approx(simulated.work[lane], rel=1e-9), (seed, lane)
    assert sum(time.exposed.values()) == pytest.approx(time.seconds, rel=1e-9), seed
    assert min(time.exposed.values()) >= 0
    spans = max(
        (span.stop for span in time.spans if span.lane not in ("read", "write")), default=0.0
    )
    rest = time.seconds - spans
    for lane in LANES:
        assert time.exposed[lane] <= time.busy[lane] + max(0.0, rest) + 1e-9, (seed, lane)
    assert sum(part.seconds for part in time.phases) == pytest.approx(time.seconds, rel=1e-9), seed


def test_step_time_is_that_of_a_simulation_of_events():
    for seed in range(300):
        check_step(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 20000, 1000))
def test_step_time_is_that_of_a_simulation_of_more_events(first):
    for seed in range(first, first + 1000):
        check_step(seed)


# --- steps of known duration ----------------------------------------------------------------------

BYTE_A_SECOND = Wires(up=1, down=1, link_both=2, read=1, write=1, disk_both=2)


def run_of(
    num_layers: int, work: LayerWork | None = None, distance: int = 0, wires: Wires = BYTE_A_SECOND, *,
    unstacked: UnstackedWork | None = None, repeats: int = 1, sizes: Any = None, **fields: Any,
) -> Any:  # fmt: skip
    """Return the seconds of one range of layers at a byte per second; other leaves move nothing."""
    schedule = build_schedule(
        num_layers, distance, regathers=True, record_bytes=sizes or {}, **fields
    )
    steps = StepPlan({"": schedule}, build_unstacked([UnstackedLeaf("unstacked", {}, {})], True))
    return step_time(steps, [work or LayerWork()], unstacked, wires, repeats=repeats)


def test_step_of_resident_layers_takes_what_they_compute():
    time = run_of(4, LayerWork(forward=1, backward=2, update=0.5))
    assert time.seconds == 4 * 1 + 4 * 2 + 4 * 0.5
    assert time.bound_by == "compute"
    assert [(part.name, part.seconds) for part in time.phases] == [
        ("embed", 0), ("forward", 4), ("head", 0), ("backward", 8), ("update", 2),
    ]  # fmt: skip


def test_step_without_a_ring_waits_for_every_fetch():
    time = run_of(
        4, LayerWork(forward=1, backward=2), sizes={"frozen": 3}, distance=0, tiers={"frozen": H}
    )
    assert time.seconds == 4 * (3 + 1) + 4 * (3 + 2)
    assert (time.busy["up"], time.exposed["up"], time.hidden["up"]) == (24, 24, 0)


def test_step_bound_by_the_link_computes_beside_it():
    """Loads follow each other: 4 x 3 s and the last layer's compute, forward and backward."""
    time = run_of(
        4, LayerWork(forward=1, backward=2), sizes={"frozen": 3}, distance=1, tiers={"frozen": H}
    )
    assert time.seconds == (4 * 3 + 1) + (4 * 3 + 2)
    assert (time.busy["up"], time.exposed["up"], time.exposed["compute"]) == (24, 15, 12)
    assert time.bound_by == "up"
    assert {part.bound_by for part in time.phases if part.seconds} == {"up"}


@pytest.mark.parametrize("distance", [1, 2])
def test_step_bound_by_compute_hides_all_loads_but_the_first(distance):
    time = run_of(
        4,
        LayerWork(forward=1, backward=2),
        sizes={"frozen": 1},
        distance=distance,
        tiers={"frozen": H},
    )
    assert time.seconds == (1 + 4) + (1 + 8)
    assert time.hidden["up"] == 6


def test_step_hides_no_slow_layer_behind_more_slots():
    """With two slots, loads begin earlier, but none is faster."""
    work = LayerWork(forward=1, backward=1)
    seconds = [
        run_of(4, work, d, sizes={"frozen": 2}, tiers={"frozen": H}).seconds for d in (0, 1, 2, 3)
    ]
    assert seconds == [24, 18, 18, 18]


def test_step_bound_by_the_disk_reads_as_far_ahead_as_it_has_buffers():
    """Reading takes 5 s and loading 1 s.

    A single buffer is read into once it is empty; with two, one is read while the other is loaded.
    """
    work, wires = (
        LayerWork(forward=1, backward=1),
        dataclasses.replace(BYTE_A_SECOND, up=5, link_both=10),
    )
    time = [run_of(3, work, d, wires, sizes={"frozen": 5}, tiers={"frozen": N}) for d in (1, 2)]
    assert time[0].seconds == 6 * (5 + 1) + 1
    assert time[1].seconds == 6 * 5 + 1 + 1
    assert [t.bound_by for t in time] == ["read", "read"]


def test_step_is_no_shorter_than_what_the_disk_has_to_do():
    """Reads and writes share a disk: 4 x (1 + 1) + 4 records of 3 bytes at 2 bytes per second.

    No loop does both.
    """
    wires, moved = (
        Wires(read=2, write=2, disk_both=2),
        {"sizes": {"params": 3}, "tiers": {"params": N}},
    )
    time = run_of(4, distance=1, wires=wires, master=False, **moved)
    assert time.seconds >= 4 * (3 * 3 + 3) / 2
    slow = run_of(4, distance=1, wires=dataclasses.replace(wires, write=0.1), **moved)
    assert slow.seconds == pytest.approx(4 * 3 / 0.1)
    assert slow.bound_by == "write"


def test_step_reads_back_what_was_stored_before():
    """Forward's last store unstacked at 10 s; backward loads that record first."""
    work, wires = LayerWork(forward=1, backward=1), Wires(down=1, up=6, link_both=7)
    for tier in (H, N):
        time = run_of(3, work, 1, wires, sizes={"activations": 3}, tiers={"activations": tier})
        assert time.seconds == (1 + 3 * 3) + 0.5 + 3
        assert (time.exposed["down"], time.exposed["up"], time.exposed["compute"]) == (7, 0.5, 6)


def test_step_updates_what_was_stored_before():
    """A gradient is loaded for its update after backward's last gradient was stored."""
    time = run_of(2, LayerWork(backward=1), 1, sizes={"grads": 4}, tiers={"grads": H})
    assert time.seconds == (1 + 4 + 4) + (4 + 4)


def test_gathers_are_waited_for_unless_they_are_ahead():
    work = LayerWork(forward=2, backward=2, gather=1)
    serial, ahead = (run_of(3, work, gather_ahead=a) for a in (False, True))
    assert serial.seconds == 2 * 3 * (1 + 2)
    assert ahead.seconds == 2 * (1 + 3 * 2)
    assert (serial.hidden["network"], ahead.hidden["network"]) == (0, 4)


def test_wait_for_a_gather_of_a_late_load_counts_for_both():
    """4 s of the link and 0.5 s of the network in each of 2 x 2 ticks.

    If the network's wait were not traced to its cause, the network would get all of the time.
    """
    time = run_of(
        2, LayerWork(forward=1, backward=1, gather=0.5), sizes={"frozen": 4}, tiers={"frozen": H}
    )
    assert time.seconds == 4 * (4 + 0.5 + 1)
    assert (time.exposed["up"], time.exposed["network"]) == (16, 2)
    assert time.bound_by == "up"


def test_late_stores_cross_beside_the_next_load():
    """Each record takes 2 s up and 2 s down: one record after the other, or two overlapped."""
    time = run_of(
        3, LayerWork(update=0.5), sizes={"opt_state": 2}, tiers={"opt_state": H}, stores_late=1
    )
    assert time.seconds == 3 * (2 + 0.5) + 2
    assert time.exposed["down"] == 2


def test_ways_of_a_link_share_its_bandwidth():
    """3 bytes up and 1 down at 2 bytes per second together take 2 s.

    The lanes therefore move 1.5 and 0.5 bytes per second.
    """
    wires = Wires(up=2, down=2, link_both=2)
    assert wires.sharing({"up": 3, "down": 1}) | {"read": 0, "write": 0} == {
        "up": 1.5,
        "down": 0.5,
        "read": 0,
        "write": 0,
    }
    assert wires.sharing({"up": 3})["up"] == 2
    assert Wires(up=2, down=2, link_both=4).sharing({"up": 3, "down": 1})["up"] == 2
    assert Wires(up=1, down=2, link_both=2.5).sharing({"up": 3, "down": 1})["up"] == 1


def test_host_update_reads_no_further_ahead_than_it_has_buffers():
    """One or two layers' states are read while forward computes.

    The other states are read as kernels free buffers.
    """
    work = LayerWork(forward=10, host=1)
    moved = {"sizes": {"opt_state": 4}, "tiers": {"opt_state": N}, "host": HostUpdate()}
    wires = dataclasses.replace(BYTE_A_SECOND, write=1e9, disk_both=1e9)
    one, two = (run_of(4, work, d, wires, **moved) for d in (1, 2))
    assert one.seconds == 40 + 1 + 3 * (4 + 1)
    assert two.seconds == 40 + 1 + 1 + 4 - 1 + 4 + 1
    assert one.bound_by == two.bound_by == "compute"


def test_cores_of_a_cpu_copy_and_update():
    work, moved = (
        LayerWork(forward=1, backward=1, host=3),
        {"sizes": {"handed": 1, "made": 2, "frozen": 2}, "tiers": {"frozen": H}},
    )
    times = [
        run_of(
            2,
            work,
            1,
            dataclasses.replace(BYTE_A_SECOND, shares_cores=shares),
            host=HostUpdate(),
            **moved,
        )
        for shares in (False, True)
    ]
    assert times[1].seconds == 2 * (1 + 1 + 1 + 2 + 3) + 4 * 2  # one thing after the other
    assert times[0].seconds < times[1].seconds
    assert all(times[1].exposed[lane] == times[1].busy[lane] for lane in LANES)


def test_repeats_run_forward_and_backward_again_and_update_once():
    work, ends = (
        LayerWork(forward=1, backward=2, update=4, reduce=0.5),
        UnstackedWork(embed=0.25, head=0.5, embed_backward=0.25, update=1),
    )
    once, thrice = (run_of(3, work, unstacked=ends, repeats=n) for n in (1, 3))
    assert thrice.seconds - once.seconds == 2 * (
        3 * 1 + 3 * 2 + 1
    )  # reductions are hidden, except for part of the last one
    assert [part.name for part in once.phases] == ["embed", "forward", "head", "backward", "update"]
    assert [(part.name, part.seconds) for part in thrice.phases] == [
        ("microbatches", 3 * 10),
        ("update", 0.25 + 13),
    ]


def test_more_bandwidth_is_never_slower():
    """Lanes keep their order, so reducing a lane's time never delays the end.

    If both directions share a wire, more for one direction takes from the other, which may cost a
    few per cent.
    """
    names = ("up", "down", "link_both", "read", "write", "disk_both")
    for seed in range(100):
        step = random_step(seed)
        seconds, wires = predicted(step).seconds, step["wires"]

        def faster(*raised: str, step: Any = step, wires: Wires = wires) -> float:
            return predicted(
                step
                | {
                    "wires": dataclasses.replace(
                        wires, **{n: 2 * getattr(wires, n) for n in raised}
                    )
                }
            ).seconds

        assert max(faster(*names), faster("link_both"), faster("disk_both")) <= seconds * (
            1 + 1e-9
        ), seed
        assert max(faster(name) for name in names) <= 1.1 * seconds, seed


def test_step_time_prints_lanes_and_phases():
    text = str(
        run_of(
            4,
            LayerWork(forward=1, backward=2),
            sizes={"frozen": 3},
            distance=1,
            tiers={"frozen": H},
        )
    )
    assert (
        text.splitlines()[0]
        == "27.0000 s a step, predicted: forward 13.0000 s (up), backward 14.0000 s (up)"
    )
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["compute", "12.0000", "0.0000", "12.0000"], ["up", "24.0000", "9.0000", "15.0000"],
    ]  # fmt: skip
