import html
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import host_offload
from host_offload.schedule.build import build_schedule
from host_offload.schedule.moves import list_moves
from host_offload.schedule.ops import KINDS, UNSTACKED_PIECES
from host_offload.schedule.phase_text import describe_moves
from host_offload.schedule.stacks import StepPlan
from host_offload.schedule.unstacked import UnstackedMove

COLUMNS = ("layer", "consume", "use_slot", "fetch", "fetch_slot", "store", "preload")
SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def settings_of_schedules(draw, max_layers=30):
    num_layers = draw(st.integers(1, max_layers))
    update = draw(st.sampled_from(["after_backward", "in_backward", "in_forward"]))
    in_forward = update == "in_forward"
    return {
        "num_layers": num_layers,
        "distance": draw(st.integers(0, 6)),
        "tiers": draw(st.dictionaries(st.sampled_from(KINDS), st.sampled_from(host_offload.TIERS))),
        "update": update,
        # With gather_ahead, a tick of forward stores another layer than it computes
        # (`test_update_in_forward.py`).
        "gather_ahead": draw(st.just(False) if in_forward else st.booleans()),
        "master": draw(st.booleans()),
        "device_layers": draw(st.one_of(st.just(0), st.integers(0, num_layers))),
    }


def stores_at_once(kw):
    """Return whether a schedule stores every record in the tick that updates it."""
    return bool(kw["device_layers"]) or kw["update"] == "in_forward"


many = settings(max_examples=100, deadline=None)
few = settings(max_examples=60, deadline=None)
schedules = settings_of_schedules()
bytes_of_records = st.fixed_dictionaries(
    {}, optional={kind: st.integers(0, 1000) for kind in (*KINDS, "gathered", "derivative")}
)


def off_device(s, kinds, layer):
    """Return the kinds in `kinds` that are off the device for a layer, from the definition."""
    return {
        k
        for k in kinds
        if s.tiers[k] != "device" and not (k == "opt_state" and layer < s.device_layers)
    }


def order_of(s, name):
    L, n = s.num_layers, s.device_layers
    return {
        "forward": [*range(L)],
        "backward": [*range(L)][::-1],
        "update": [*range(n, L), *range(n)],
    }[name]


def expected_kinds(s, master, name):
    """Return a phase's fetches, reads and writes, from the definition, before tiers apply."""
    in_backward = ({"params", "frozen", "activations"}, {"opt_state"}, {"opt_state", "params"})
    after = ({"params", "frozen", "activations"}, set(), {"grads"})
    updating = (
        {"frozen", "grads", "opt_state"} | (set() if master else {"params"}),
        set(),
        {"activations", "opt_state", "params"},
    )
    plain = ({"params", "frozen"}, set(), {"activations"})
    return {
        "forward": updating if s.update == "in_forward" else plain,
        "backward": in_backward if s.update == "in_backward" else after,
        "update": (
            {"grads", "opt_state"} | (set() if master else {"params"}),
            set(),
            {"opt_state", "params"},
        ),
    }[name]


def run(phase, distance):
    """Run a phase's ticks over a ring, and assert the properties that a loop relies on.

    Returns the (tick, layer) pairs taken from off the device.
    """
    ring, took = {}, []
    for i, (layer, slot) in enumerate(zip(phase.preload, range(len(phase.preload)), strict=True)):
        assert slot not in ring
        # As if fetched `distance` ticks before its use.
        ring[slot] = (layer, phase.first_take + i - distance)
    for tick in range(len(phase.layer)):
        use, fetch, fill = phase.use_slot[tick], phase.fetch[tick], phase.fetch_slot[tick]
        if use >= 0:
            layer, fetched = ring.pop(use)
            assert layer == phase.consume[tick]
            assert fetched == tick - distance
            took.append((tick, layer))
        if fill >= 0:
            assert fetch >= 0
            assert fill not in ring, "a live slot is overwritten"
            assert use == fill
            ring[fill] = (fetch, tick)
        elif fetch >= 0:  # no ring: what is fetched is taken immediately
            assert distance == 0
            assert fetch == phase.consume[tick]
            took.append((tick, fetch))
        assert len(ring) <= distance
    assert not ring
    return took


def test_forward_that_updates_and_gathers_ahead_fetches_each_layer_once():
    """The optimizer state alone is fetched, and layer 0 before the first tick."""
    s = build_schedule(
        5, 2, tiers={"opt_state": "pinned_host"}, update="in_forward", gather_ahead=True
    )
    ticks = [ops for _, ops in s.phase("forward").ticks()]
    assert [op.number for ops in ticks for op in ops if op.verb == "fetch"] == [*range(5)]


@many
@given(schedules)
def test_schedule_visits_each_layer_once_a_phase_in_order(kw):
    s = build_schedule(**kw)
    names = ["forward", "backward"] + ["update"] * (kw["update"] == "after_backward")
    assert [p.name for p in s.phases] == names
    for p in s.phases:
        assert s.phase(p.name) is p
        assert p.layer.tolist() == order_of(s, p.name)
        if kw["gather_ahead"] and p.name != "update":
            assert [p.first, *p.consume] == [*p.layer, -1]
        else:
            assert p.first == -1
            assert p.consume.tolist() == p.layer.tolist()


@few
@given(schedules, st.integers(1, 9), st.integers(0, 3))
def test_schedule_of_a_part_of_a_stack_is_that_of_a_stack_with_other_numbers(kw, first, late):
    """The records on disk have other numbers too.

    Only activation records are counted from the part's first layer.
    """
    kw, on_device = (
        {**kw, "stores_late": 0 if stores_at_once(kw) else min(late, kw["num_layers"])},
        int(kw["device_layers"]),
    )
    shifted = {**kw, "first_layer": first, "device_layers": on_device and on_device + first}
    whole, part = build_schedule(**kw), build_schedule(**shifted)
    for a, b in zip(whole.phases, part.phases, strict=True):
        for name in COLUMNS:
            numbers = getattr(a, name)
            moved = (
                numbers if name.endswith("slot") else np.where(numbers >= 0, numbers + first, -1)
            )
            np.testing.assert_array_equal(getattr(b, name), moved, err_msg=name)
        assert (b.fetches, b.reads, b.writes, b.drain.tolist()) == (
            a.fetches,
            a.reads,
            a.writes,
            [n + first for n in a.drain],
        )
    moves = [
        list_moves(StepPlan({"": s}), (*KINDS, "kept"), names={"": ("", "kept")})
        for s in (whole, part)
    ]
    counted_from = {"kept": 0, "opt_state": 0 if on_device else first}
    assert [(m.kind, m.layer + counted_from.get(m.kind, first), m.writes) for m in moves[0]] == [
        tuple(m) for m in moves[1]
    ]


@many
@given(schedules)
def test_schedule_moves_the_kinds_that_each_phase_needs(kw):
    s = build_schedule(**kw)
    assert set(s.tiers) == set(KINDS)
    assert all(s.tiers[kind] == kw["tiers"].get(kind, "device") for kind in KINDS)
    for p in s.phases:
        fetches, reads, writes = expected_kinds(s, kw["master"], p.name)
        last = s.num_layers - 1  # is off the device if any layer is
        assert set(p.fetches) == off_device(s, fetches, last)
        assert set(p.reads) == off_device(s, reads, last)
        assert set(p.writes) == off_device(s, writes, last)
        for tick, layer in enumerate(p.layer):
            assert set(p.list_fetches(tick)) == off_device(s, fetches, layer)
            assert p.store[tick] == (layer if off_device(s, writes, layer) else -1)


@many
@given(schedules)
def test_schedule_ring_gives_each_take_its_record_fetched_distance_ticks_before(kw):
    s = build_schedule(**kw)
    for p in s.phases:
        due = [
            (t, layer)
            for t, layer in enumerate(p.consume)
            if layer >= 0 and off_device(s, p.fetches, layer)
        ]
        assert run(p, s.distance) == due
        slots = p.use_slot[p.use_slot >= 0].tolist()
        assert slots == [c % s.distance for c in range(len(due) if s.distance else 0)]
        assert len(p.preload) == min(s.distance, len(due))
    assert s.num_slots == (s.distance if any(len(p.preload) for p in s.phases) else 0)


@many
@given(schedules)
def test_schedule_never_reads_a_record_whose_write_is_pending(kw):
    s = build_schedule(**kw)
    for p in s.phases:
        written = set()
        fetched = {
            (k, layer)
            for layer in [*p.preload.tolist(), p.first]
            for k in off_device(s, p.fetches, layer)
        }
        for tick, layer in enumerate(p.layer.tolist()):
            for reader, kinds in ((int(p.fetch[tick]), p.fetches), (layer, p.reads)):
                reads = {(k, reader) for k in off_device(s, kinds, reader) if reader >= 0}
                assert not reads & written
                assert not reads & fetched, "read twice"
                fetched |= reads
            if p.store[tick] >= 0:
                kinds = off_device(s, p.writes, layer)
                written |= {(k, layer) for k in kinds}
                assert {(k, layer) for k in kinds if k in (*p.fetches, *p.reads)} <= fetched
        assert written == {
            (k, layer) for layer in range(s.num_layers) for k in off_device(s, p.writes, layer)
        }


@many
@given(schedules, st.integers(0, 3))
def test_operations_of_a_tick_are_of_the_layer_that_their_lag_says(kw, late):
    """Ticks follow each other, and each computes one layer.

    A lag is the distance to the tick that computes with the record.
    """
    s = build_schedule(
        **kw,
        stores_late=0 if stores_at_once(kw) else min(late, kw["num_layers"]),
        record_bytes=dict.fromkeys(KINDS, 1),
    )
    for p in s.phases:
        own = ("update",) if p.name == "update" else ("compute",)
        ticks = [(tick, ops) for tick, ops in p.ticks() if any(op.verb in own for op in ops)]
        assert [tick for tick, _ in ticks] == list(range(s.num_layers))
        layers = [op.number for _, ops in ticks for op in ops if op.verb in own]
        assert layers == p.layer.tolist()
        for tick, ops in p.ticks():
            assert len({(op.verb, op.record, op.number) for op in ops}) == len(ops), (
                "the operation is done twice"
            )
            for op in ops:
                if (
                    0 <= tick - op.lag < s.num_layers
                    and (tick >= 0 or op.verb == "fetch")
                    and p.first != op.number
                ):
                    assert layers[tick - op.lag] == op.number, (p.name, tick, op)
        # A device loads and stores each record once per phase.
        for lane, verbs in (("up", ("fetch", "load")), ("down", ("store",))):
            moved = [
                (op.record, op.number)
                for _, ops in p.ticks()
                for op in ops
                if op.verb in verbs and op.lane == lane
            ]
            assert len(moved) == len(set(moved))
            assert p.moved(lane) == len(moved)


@many
@given(schedules, st.booleans())
def test_an_update_in_forward_moves_each_state_that_is_off_the_device_once(kw, gather_ahead):
    kw |= {"update": "in_forward", "gather_ahead": gather_ahead}
    kw["tiers"] |= {"opt_state": "pinned_host"}
    s = build_schedule(**kw)
    ops = [op for _, ops in s.phase("forward").ticks() for op in ops]
    state = [(op.verb, op.number) for op in ops if op.record.kind == "opt_state"]
    away = range(s.device_layers, s.num_layers)
    assert [number for verb, number in state if verb == "fetch"] == list(away)
    assert [number for verb, number in state if verb == "store"] == list(away)
    assert [number for verb, number in state if verb == "update"] == list(range(s.num_layers))


def test_a_ring_waits_for_the_first_layer_whose_state_is_off_the_device():
    tiers = {"opt_state": "pinned_host"}
    options = {"tiers": tiers, "update": "in_forward", "device_layers": 3}
    forward = build_schedule(6, 2, **options).phase("forward")
    assert forward.preload.tolist() == [3, 4]
    assert forward.fetch.tolist() == [-1, -1, -1, 5, -1, -1]
    assert forward.use_slot.tolist() == [-1, -1, -1, 0, 1, 0]
    # A ring that also holds gradients has a record of every layer.
    options["tiers"] = {**tiers, "grads": "pinned_host"}
    forward = build_schedule(6, 2, **options).phase("forward")
    assert forward.preload.tolist() == [0, 1]
    assert forward.use_slot.tolist() == [0, 1, 0, 1, 0, 1]


def test_records_are_stored_as_many_ticks_late_as_asked_for():
    options = {"tiers": {"opt_state": "pinned_host"}, "record_bytes": {"opt_state": 10}}
    phase = build_schedule(5, 1, stores_late=3, **options).phase("update")
    assert (phase.store.tolist(), phase.drain.tolist(), phase.stores_late) == (
        [-1, -1, -1, 0, 1],
        [2, 3, 4],
        3,
    )
    assert "writes opt_state 3 ticks late" in describe_moves(phase)
    assert phase.peak_bytes == 3 * 10 + 10  # the waiting records, and the updated one
    with pytest.raises(ValueError, match="stores_late=6: 0 to 5"):
        build_schedule(5, 1, stores_late=6, **options)


@many
@given(schedules)
def test_columns_of_a_phase_are_int32_with_an_entry_for_each_tick(kw):
    for p in build_schedule(**kw).phases:
        for name in COLUMNS:
            column = getattr(p, name)
            assert column.dtype == np.int32
            assert column.shape == (len(p.preload) if name == "preload" else kw["num_layers"],)
            assert not column.flags.writeable


def brute_bytes(s, p, tick, master):
    """Return the bytes of a tick, record by record."""
    size, layer, consume = s.record_bytes, int(p.layer[tick]), int(p.consume[tick])
    records = [k for k in p.fetches for _ in p.preload]  # all slots are alike
    if p.fetch[tick] >= 0:
        records += off_device(s, p.fetches, p.fetch[tick])
    records += [*off_device(s, p.reads, layer), *off_device(s, p.writes, layer)]
    if p.name != "update":
        records += ["gathered"] * (2 if s.gather_ahead and consume >= 0 else 1)
        if s.gather_ahead:
            records += [k for k in p.fetches if k == "activations"]
            if p.name == "backward" and s.update == "in_backward" and not master:
                records += [k for k in p.fetches if k == "params"]
    if p.name == "backward":
        records += ["derivative", *(["grads"] if "grads" not in p.writes else [])]
    return sum(size[k] for k in records)


@many
@given(schedules, bytes_of_records)
def test_schedule_counts_bytes_in_flight_record_by_record(kw, sizes):
    s = build_schedule(**kw, record_bytes=sizes)
    flights = s.in_flight()
    for p in s.phases:
        assert flights[p.name].dtype == np.int64
        assert flights[p.name].shape == (s.num_layers,)
        assert flights[p.name].max() <= s.peak_bytes
        for tick in range(s.num_layers):
            assert flights[p.name][tick] == brute_bytes(s, p, tick, kw["master"]), (p.name, tick)
    assert any(s.peak_bytes in f for f in flights.values())


@many
@given(schedules, bytes_of_records)
def test_schedule_parts_the_peak_of_its_layers_from_that_of_its_drain(kw, sizes):
    schedule = build_schedule(**kw, record_bytes=sizes)
    for phase in schedule.phases:
        assert phase.layers_peak_bytes == phase.in_flight().max()
        assert phase.peak_bytes == max(phase.layers_peak_bytes, phase.drain_peak_bytes)


def test_schedule_counts_the_pieces_that_are_updated_after_the_last_layer():
    sizes = {"params": 0, "opt_state": 30, "grads": 0, "derivative": 0, "gathered": 0}
    tiers = {
        "params": "device",
        "grads": "device",
        "opt_state": "pinned_host",
        "activations": "device",
    }
    pieces = UnstackedMove(UNSTACKED_PIECES, num_bytes=(100,), counts=(2,))
    phase = build_schedule(
        4,
        1,
        tiers=tiers,
        update="in_backward",
        stores_late=1,
        unstacked=[pieces],
        record_bytes=sizes,
    ).phase("backward")
    # Memory for the last layer's record; a piece that is loaded, one that is computed from it, and
    # one that is stored a tick late.
    assert phase.drain_peak_bytes == 30 + 3 * 100
    assert phase.layers_peak_bytes == 30 + 30
    assert phase.peak_bytes == phase.drain_peak_bytes


def test_schedule_counts_the_parameters_that_are_gathered_after_an_update():
    sizes = {"params": 7, "opt_state": 30, "grads": 10, "derivative": 11, "gathered": 0}
    tiers = dict.fromkeys(("params", "grads", "opt_state", "activations"), "device")
    peaks = [
        build_schedule(
            4, 1, tiers=tiers, update="in_backward", regathers=gathers, record_bytes=sizes
        )
        .phase("backward")
        .peak_bytes
        for gathers in (False, True)
    ]
    assert peaks[1] - peaks[0] == sizes["params"]


@many
@given(schedules, bytes_of_records, st.integers(1, 5000))
def test_schedule_budget_is_exact_and_its_advice_fits(kw, sizes, less):
    peak = build_schedule(**kw, record_bytes=sizes).peak_bytes
    build_schedule(**kw, record_bytes=sizes, budget_bytes=peak)
    if not peak:
        return
    for budget in {peak - 1, max(0, peak - less)}:
        with pytest.raises(ValueError, match=f"budget_bytes={budget}: .* {peak} bytes") as error:
            build_schedule(**kw, record_bytes=sizes, budget_bytes=budget)
        message = str(error.value)
        peaks = {
            (ahead, d): build_schedule(
                **kw | {"distance": d, "gather_ahead": ahead}, record_bytes=sizes
            ).peak_bytes
            for ahead in {kw["gather_ahead"], False}
            for d in range(kw["distance"] + 1)
        }
        fits = [key for key in peaks if peaks[key] <= budget]
        # the distance is reduced before gather_ahead is given up, and no further than needed
        if fits:
            ahead, distance = max(fits)
            assert (
                f"prefetch_distance={distance} fits, with {peaks[ahead, distance]} bytes" in message
            )
            assert ("; gather_ahead=False with" in message) == (ahead != kw["gather_ahead"])
            advised = kw | {"distance": distance, "gather_ahead": ahead}
            build_schedule(**advised, record_bytes=sizes, budget_bytes=budget)
        else:
            assert (
                f"nothing fits: prefetch_distance=0 with gather_ahead=False needs {peaks[False, 0]} bytes"
                in message
            )
            assert message.endswith(f" {peaks[False, 0] - budget} more")


@many
@given(schedules)
def test_schedule_peak_layers_are_the_ring_and_those_in_use(kw):
    s = build_schedule(**kw)
    peak = 1
    for p in s.phases:
        ahead = s.gather_ahead and p.name != "update"
        ring = len(p.preload)
        for tick in range(s.num_layers):
            ring += int(p.fetch_slot[tick] >= 0) - int(p.use_slot[tick] >= 0)
            peak = max(peak, 1 + (ahead and tick < s.num_layers - 1) + ring)
    assert s.peak_layers == peak <= min(s.num_layers, s.distance + 1 + s.gather_ahead)
    if "params" in off_device(s, ["params"], 0) and not s.gather_ahead:
        assert peak == min(s.num_layers, s.distance + 1)


def lanes_of(s, p):
    """Return the layers that each lane must show, in order."""
    fetched = [] if p.first < 0 or not p.fetches else [p.first]
    fetched += [*p.preload, *p.fetch[p.fetch >= 0]]
    lanes = {
        "fetch": fetched,
        "read": [layer for layer in p.layer if off_device(s, p.reads, layer)],
        "gather": [layer for layer in (p.first, *p.consume) if layer >= 0 and p.name != "update"],
        "compute": [*p.layer],
        "store": [*p.store[p.store >= 0]],
    }
    for slot in range(len(p.preload)):
        lanes[f"slot {slot}"] = [*p.consume[p.use_slot == slot]]
    return {name: [str(layer) for layer in layers] for name, layers in lanes.items() if layers}


@many
@given(settings_of_schedules(max_layers=20))
def test_schedule_timeline_shows_every_layer_in_every_lane(kw):
    s = build_schedule(**kw)
    blocks = s.timeline(width=200).split("\n\n")
    assert s.title() in blocks[0]
    assert len(blocks) == 1 + len(s.phases)
    for block, p in zip(blocks[1:], s.phases, strict=True):
        head, *rows = block.splitlines()
        assert head.startswith(p.name)
        label = max(len(name) for row in rows for name in re.findall(r"^slot \d+|^\w+", row))
        cells = {row[:label].strip(): row[label:].replace("|", "").split() for row in rows}
        ticks = cells.pop("tick")
        assert ticks == [str(t) for t in range(int(ticks[0]), s.num_layers)]
        assert {row.find("|") for row in rows} == {rows[0].find("|")}
        expected = lanes_of(s, p)
        assert cells.keys() == expected.keys()
        for name, cell in cells.items():
            assert len(cell) == len(ticks)
            shown = [
                c
                for i, c in enumerate(cell)
                if c != "." and (not name.startswith("slot") or c != cell[i - 1] or i == 0)
            ]
            assert shown == expected[name]
        for tick in range(s.num_layers):
            column = ticks.index(str(tick))
            assert cells["compute"][column] == str(p.layer[tick])
            if p.use_slot[tick] >= 0:  # a taken record was in its slot until then
                assert cells[f"slot {p.use_slot[tick]}"][column - 1] == str(p.consume[tick])


@few
@given(schedules)
def test_schedule_svg_shows_every_layer_in_every_lane(kw):
    s = build_schedule(**kw)
    root = ET.fromstring(s.timeline_svg())
    assert root.tag == f"{SVG}svg"
    assert s.title() in root.findtext(f"{SVG}title", "")
    width, height = int(root.get("width")), int(root.get("height"))
    groups = {g.get("id"): g for g in root.iter(f"{SVG}g") if g.get("id")}
    legend = {
        t.text: r.get("fill")
        for r, t in zip(
            *(groups["legend"].findall(SVG + tag) for tag in ("rect", "text")), strict=True
        )
    }
    for p in s.phases:
        assert [int(t.text) for t in groups[f"{p.name}-tick"].findall(f"{SVG}text")[1:]][
            -s.num_layers :
        ] == [*range(s.num_layers)]
        for name, layers in lanes_of(s, p).items():
            boxes = groups[f"{p.name}-{name.replace(' ', '-')}"].findall(f"{SVG}g")
            assert [box.findtext(f"{SVG}text") for box in boxes] == layers
            right = 0.0
            for box in boxes:
                *stripes, frame = box.findall(f"{SVG}rect")
                kinds = box.findtext(f"{SVG}title", "").partition(": ")[2].split(", ")[1:]
                assert [stripe.get("fill") for stripe in stripes] == [
                    legend[kind] for kind in kinds
                ]
                x, y, w, h = (float(frame.get(key)) for key in ("x", "y", "width", "height"))
                assert right < x  # a lane's boxes do not overlap
                right = x + w
                assert right <= width
                assert y + h <= height


def test_schedule_svg_stripes_tell_which_kinds_move():
    s = build_schedule(4, 1, tiers={"grads": "nvme", "opt_state": "nvme"}, device_layers=1)
    root = ET.fromstring(s.timeline_svg())
    fetch = next(g for g in root.iter(f"{SVG}g") if g.get("id") == "update-fetch")
    titles = [box.findtext(f"{SVG}title") for box in fetch.findall(f"{SVG}g")]
    assert titles == [
        "fetch, tick -1: layer 1, grads, opt_state",
        "fetch, tick 0: layer 2, grads, opt_state",
        "fetch, tick 1: layer 3, grads, opt_state",
        "fetch, tick 2: layer 0, grads",
    ]


def test_schedule_html_holds_the_svg_and_the_table():
    s = build_schedule(5, 2, tiers={"params": "nvme"}, gather_ahead=True)
    page = s.timeline_html()
    assert page.startswith("<!DOCTYPE html>")
    assert s.timeline_svg() in page
    assert html.escape(str(s)) in page


def test_schedule_timeline_of_many_layers_fits_its_width():
    s = build_schedule(500, 3, tiers={"params": "pinned_host"})
    for width in (80, 120):
        lines = s.timeline(width).splitlines()
        assert width - 6 <= max(map(len, lines)) <= width
        compute = next(line for line in lines if line.startswith("compute"))
        assert compute.split()[4:6] == ["|", "0"]
        assert ".." in compute
        assert compute.endswith(" 499")
    assert ".." not in build_schedule(12, 2, tiers={"params": "pinned_host"}).timeline()


@many
@given(schedules)
def test_schedule_prints_a_row_for_each_tick_and_preload(kw):
    s = build_schedule(**kw)
    head, *lines = str(s).splitlines()
    assert s.title() in head
    rows = [line.split() for line in lines[len(s.phases) + 1 :]]
    assert len(rows) == sum(s.num_layers + len(p.preload) + (p.first >= 0) for p in s.phases)
    for p in s.phases:
        ticks = [row for row in rows if row[0] == p.name and row[1] != "before"]
        for column, field in ((2, "fetch"), (4, "consume"), (5, "layer"), (6, "store")):
            assert [-1 if row[column] == "-" else int(row[column]) for row in ticks] == getattr(
                p, field
            ).tolist()


def test_schedule_golden_ring_of_two():
    s = build_schedule(5, 2, tiers={"params": "nvme"}, gather_ahead=True, update="in_backward")
    p = s.phase("backward")
    assert (p.first, p.preload.tolist()) == (4, [3, 2])
    assert p.consume.tolist() == [3, 2, 1, 0, -1]
    assert p.use_slot.tolist() == [0, 1, 0, 1, -1]
    assert p.fetch.tolist() == [1, 0, -1, -1, -1]
    assert p.fetch_slot.tolist() == [0, 1, -1, -1, -1]
    assert p.store.tolist() == [4, 3, 2, 1, 0]
    assert (s.num_slots, s.peak_layers) == (2, 4)


def test_schedule_golden_bytes():
    sizes = {"params": 1, "gathered": 8, "grads": 20, "opt_state": 300, "activations": 4000}
    s = build_schedule(
        4, 1, tiers=dict.fromkeys(KINDS, "pinned_host"), device_layers=1, record_bytes=sizes
    )
    flights = s.in_flight()
    assert flights["forward"].tolist() == [1 + 1 + 8 + 4000] * 3 + [1 + 8 + 4000]
    assert flights["backward"].tolist() == [4001 + 4001 + 8 + 20] * 3 + [4001 + 8 + 20]
    assert flights["update"].tolist() == [320 + 320 + 301] * 2 + [320 + 20 + 301, 320 + 1]
    assert s.peak_bytes == 8030


def test_schedule_with_the_device_alone_moves_nothing():
    s = build_schedule(6, 3)
    assert "6 layers, distance 3" in str(s)
    assert s.timeline()
    assert (s.num_slots, s.peak_layers) == (0, 1)
    for p in s.phases:
        assert p.fetches == p.reads == p.writes == ()
        for array in (p.fetch, p.use_slot, p.fetch_slot, p.store):
            assert (array == -1).all()
        assert p.preload.size == 0


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: 1 or more"),
        ({"num_layers": True}, "num_layers=True: an int"),
        ({"num_layers": 2.0}, "num_layers=2.0: an int"),
        ({"distance": -1}, "distance=-1: 0 or more"),
        ({"distance": False}, "distance=False: an int"),
        (
            {"tiers": {"params": "disk"}},
            r"tiers\['params'\]='disk': known tiers are device, pinned_host, nvme",
        ),
        (
            {"tiers": {"weights": "nvme"}},
            "tiers has unknown 'weights': choose from params, frozen, grads, opt_state, activations",
        ),
        ({"update": "in_forward", "stores_late": 1}, "stores_late=1 with update='in_forward'"),
        ({"update": "at_night"}, "update='at_night': choose from 'after_backward', 'in_back"),
        ({"device_layers": 4}, "device_layers=4: 0 to 3"),
        ({"device_layers": -1}, "device_layers=-1: 0 to 3"),
        ({"device_layers": True}, "device_layers=True: an int"),
        (
            {"record_bytes": {"param": 1}},
            "record_bytes has unknown 'param': choose from gathered, derivative",
        ),
        ({"record_bytes": {"params": -1}}, r"record_bytes\['params'\]=-1: 0 or more"),
        ({"budget_bytes": 10}, "budget_bytes=10 needs record_bytes"),
        ({"budget_bytes": 1.5, "record_bytes": {}}, "budget_bytes=1.5: an int"),
    ],
)
def test_schedule_refuses_bad_input(kw, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(**{"num_layers": 3} | kw)


def test_schedule_refuses_what_it_does_not_hold():
    s = build_schedule(3, update="in_backward")
    with pytest.raises(
        ValueError,
        match="'update': a schedule with update='in_backward' has the phases forward, backward",
    ):
        s.phase("update")
    with pytest.raises(ValueError, match="this schedule holds no bytes"):
        s.in_flight()
    with pytest.raises(ValueError, match="this schedule holds no bytes"):
        _ = s.peak_bytes
    with pytest.raises(TypeError, match="item assignment"):
        s.tiers["params"] = "nvme"


def test_tiers_have_memory_kinds_except_nvme():
    assert host_offload.TIERS == ("device", "pinned_host", "nvme")
    assert host_offload.memory_kind("pinned_host") == "pinned_host"
    with pytest.raises(ValueError, match="nvme"):
        host_offload.memory_kind("nvme")
