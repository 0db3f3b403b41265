"""Pictures of a plan: drawings are to scale, correctly placed, and fit their space."""

import dataclasses
import html
import itertools
import pickle
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import zerojax as zj
from host_offload.schedule import LANES, StepPlan, build_schedule
from zerojax.costs.timing import LayerWork, PhaseTime, Span, StepTime, step_time
from zerojax.machines import format_bytes
from zerojax.planner import charts, plan
from zerojax.planner.charts import CHAR, KINDS, LEFT, RIGHT, WIDTH, round_ticks
from zerojax.planner.lanes import TALL, build_boxes, draw_step
from zerojax.planner.pictures import draw_tiers

SVG = "{http://www.w3.org/2000/svg}"
DISK = {"params": "nvme", "grads": "nvme", "opt_state": "nvme", "activations": "nvme"}
TRILLION = zj.Sizes(layers=128, hidden=25600, heads=256, seq=1024, batch=112)


@pytest.fixture(scope="module")
def trillion():
    """Return ZeRO-Infinity's 1 T model on the machine of its figure 2b, with everything on disk."""
    fixed = {"precision": "fp16", "stage": 3, "prefetch_distance": 2, "num_microbatches": 1, **DISK}
    return plan(TRILLION, machine=zj.machine("dgx2"), fixed=fixed)


@pytest.fixture(scope="module")
def drawn(trillion):
    return ET.fromstring(trillion.svg())


@pytest.fixture(scope="module")
def resident():
    sizes = zj.Sizes(layers=2, hidden=1024, heads=16, seq=1024, batch=8)
    fixed = {"precision": "bf16", "params": "device", "opt_state": "device", "activations": "save"}
    return plan(sizes, machine=zj.machine("h200", devices_per_node=1), fixed=fixed)


def of_part(part):
    """Return part of a drawing as a separate document."""
    return ET.fromstring(f'<svg xmlns="http://www.w3.org/2000/svg">{"".join(part.body)}</svg>')


def by_class(root, name):
    return [node for node in root.iter() if node.get("class") == name]


def with_id(root, name):
    (found,) = (node for node in root.iter() if node.get("id") == name)
    return found


def words(node):
    return "".join(node.itertext())


def at(line):
    return float(line.get("d").removeprefix("M").split()[0])


def step_of(spans, seconds, phases=()):
    busy = {lane: sum(s.stop - s.start for s in spans if s.lane == lane) for lane in LANES}
    return StepTime(
        seconds=seconds,
        busy=busy,
        exposed=dict.fromkeys(LANES, 0.0),
        phases=tuple(phases),
        spans=tuple(spans),
    )


# --- bytes ----------------------------------------------------------------------------------------


def test_pictures_stripes_are_as_wide_as_their_bytes(trillion, drawn):
    for tier, kinds in trillion.bytes.items():
        stripes = by_class(with_id(drawn, f"bytes-{tier}"), "stripe")
        widths = {
            stripe.find(f"{SVG}title").text.split(": ")[1].split()[0]: float(stripe.get("width"))
            for stripe in stripes
        }
        assert widths.keys() == {kind for kind, n in kinds.items() if n}
        for kind, width in widths.items():
            assert width == pytest.approx(
                (RIGHT - LEFT) * kinds[kind] / trillion.capacity[tier], rel=1e-4
            ), (tier, kind)
        ends = sorted(
            (float(s.get("x")), float(s.get("x")) + float(s.get("width"))) for s in stripes
        )
        assert all(b[0] == pytest.approx(a[1], abs=0.01) for a, b in itertools.pairwise(ends))
    told = f"{format_bytes(sum(trillion.bytes['device'].values()))} of {format_bytes(trillion.capacity['device'])}"
    assert told in words(with_id(drawn, "bytes-device"))


def test_pictures_capacity_is_the_end_of_a_bar_or_within_it():
    bytes_by_tier = {
        "device": {"params": 30, "grads": 30},
        "pinned_host": {"buffers": 5},
        "nvme": {},
    }
    root = of_part(draw_tiers(bytes_by_tier, {"device": 40.0, "pinned_host": 10.0, "nvme": None}))
    (device,) = by_class(with_id(root, "bytes-device"), "capacity")
    (host,) = by_class(with_id(root, "bytes-pinned_host"), "capacity")
    assert at(device) == pytest.approx(LEFT + (RIGHT - LEFT) * 40 / 60, abs=0.01)
    assert at(host) == RIGHT
    assert not [
        node for node in root.iter() if node.get("id") == "bytes-nvme"
    ]  # neither used nor given
    unknown = of_part(draw_tiers({"nvme": {"params": 7}}, {}))
    assert not by_class(unknown, "capacity")
    assert float(by_class(unknown, "stripe")[0].get("width")) == RIGHT - LEFT


# --- seconds --------------------------------------------------------------------------------------


def scale_of(root):
    """Return the pixels per second, from the axis."""
    (x0, t0), *_, (x1, t1) = [
        (float(tick.get("x")), float(words(tick))) for tick in by_class(root, "tick")
    ]
    return (x1 - x0) / (t1 - t0)


def lengths(lane):
    """Return the pixels of a lane's boxes; stripes count by their share of the height."""
    area = sum(float(r.get("width")) * float(r.get("height")) for r in lane.iter(f"{SVG}rect"))
    outlines = "".join(path.get("d") for path in lane.iter(f"{SVG}path"))
    area += sum(float(w) * float(h) for w, h in re.findall(r"h([\d.e-]+)v([\d.e-]+)h-", outlines))
    return area / TALL


def test_pictures_boxes_of_a_lane_sum_to_its_busy_seconds(trillion):
    root = of_part(draw_step(trillion.time))
    for lane in LANES:
        if trillion.time.busy[lane]:
            seconds = lengths(with_id(root, f"step-{lane}")) / scale_of(root)
            assert seconds == pytest.approx(trillion.time.busy[lane], rel=0.01), lane
    # which has no effect
    assert not [node for node in root.iter() if node.get("id") == "step-host"]


def test_pictures_boxes_are_where_the_work_is():
    rng, grain = np.random.default_rng(0), 1.0
    pauses, seconds = rng.exponential(0.3, 500), rng.exponential(0.6, 500)
    stops = np.cumsum(pauses + seconds)
    labels = rng.choice(["read params", "read opt_state"], 500)
    spans = [
        Span("read", str(k), float(b - s), float(b), n)
        for n, (k, s, b) in enumerate(zip(labels, seconds, stops, strict=True))
    ]
    boxes = build_boxes(spans, grain)
    assert sum(box.seconds for box in boxes) == pytest.approx(seconds.sum())
    assert 2 < len(boxes) < 400
    for box in boxes:
        inside = [s for s in spans if box.start <= s.start and s.stop <= box.stop]
        assert box.layers == (inside[0].layer, inside[-1].layer)
        assert set(box.labels) == {s.label for s in inside}
        assert 0 <= box.stop - box.start - box.seconds < grain


def test_pictures_number_layers_through_the_model():
    steps = StepPlan({f"{n}": build_schedule(n, record_bytes={}) for n in (2, 3)})
    root = of_part(draw_step(step_time(steps, [LayerWork(forward=1.0, backward=2.0)] * 2)))
    names = [words(text) for text in with_id(root, "step-compute").iter(f"{SVG}text")]
    assert names == ["forward 0 to 4", "backward 0 to 4"]


def test_pictures_of_many_layers_have_few_elements(trillion, drawn):
    assert len(trillion.time.spans) > 2000
    assert sum(1 for _ in drawn.iter()) < 1000
    # Every lane has as many boxes of 6 pixels or more as fit.
    wide = [
        Span(lane, label, i + 0.0, i + 0.9)
        for lane in LANES
        for i, label in enumerate(["gather", "reduce"] * 60)
    ]
    assert sum(1 for _ in of_part(draw_step(step_of(wide, 120.0))).iter()) < 2000


@pytest.mark.parametrize(
    "shares", [(1e-6, 0.3, 1e-3, 0.5, 0.2), (0.9, 0.02, 0.02, 0.03, 0.03), (0.2,) * 5], ids=str
)
def test_pictures_parts_of_a_step_are_named_without_overlap(shares):
    names, stops = ("embed", "forward", "head", "backward", "update"), np.cumsum(shares)
    phases = [
        PhaseTime(n, float(b - s), float(b), "compute")
        for n, s, b in zip(names, shares, stops, strict=True)
    ]
    root = of_part(
        draw_step(step_of([Span("compute", "forward", 0.0, 1.0, 0)], float(stops[-1]), phases))
    )
    found = [(float(t.get("x")), float(t.get("y")), words(t)) for t in by_class(root, "phase")]
    assert [text.split()[0] for _, _, text in found] == list(names)
    for x, _, text in found:
        assert x >= LEFT
        assert x + len(text) * CHAR <= WIDTH
    for (x, y, text), (other, row, _) in itertools.permutations(found, 2):
        assert y != row or not x <= other < x + len(text) * CHAR


def test_pictures_ticks_are_round_and_few():
    for stop in (1984.0, 1.325, 0.0788, 1.0, 3e-4, 7e5):
        ticks = round_ticks(stop)
        step = ticks[1]
        assert 3 <= len(ticks) <= 11
        assert ticks[-1] <= stop * (1 + 1e-9) < ticks[-1] + step * (1 + 1e-6)
        assert f"{step:e}"[0] in "125"


# --- efficiency -----------------------------------------------------------------------------------


def test_pictures_efficiency_is_of_steps_walked_again(trillion, drawn):
    dot, time = with_id(drawn, "machine"), trillion.time
    top, foot = (
        next(float(t.get("y")) for t in drawn.iter(f"{SVG}text") if words(t) == p) - 4
        for p in ("100 %", "0 %")
    )
    here = time.busy["compute"] / time.seconds
    assert float(dot.get("cy")) == pytest.approx(foot + (top - foot) * here, abs=0.1)
    for name, slower in (("link", 0.125), ("disk", 0.125)):
        curve = [
            tuple(map(float, p.split(",")))
            for p in with_id(drawn, f"curve-{name}").get("points").split()
        ]
        assert curve[len(curve) // 2] == pytest.approx((float(dot.get("cx")), float(dot.get("cy"))))
        estimate = trillion.estimate
        seconds = estimate.seconds_with(estimate.wires.times(**{name: slower}))
        assert seconds > 1.2 * time.seconds
        assert curve[0][1] == pytest.approx(
            foot + (top - foot) * time.busy["compute"] / seconds, abs=0.1
        )


def test_pictures_of_a_resident_step_have_no_curve(resident):
    root = ET.fromstring(resident.svg())
    assert not list(root.iter(f"{SVG}polyline"))
    assert "Nothing moves over the link or the disk" in words(root)


# --- the document ---------------------------------------------------------------------------------


def test_pictures_stand_alone_and_fit(drawn):
    assert drawn.tag == f"{SVG}svg"
    assert not re.search(r"href|url\(", ET.tostring(drawn, "unicode"))
    assert not list(drawn.iter(f"{SVG}script"))
    ids = [node.get("id") for node in drawn.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    for text in drawn.iter(f"{SVG}text"):
        size = float(text.get("font-size", 12))
        width = len(words(text)) * CHAR * size / 12
        left = (
            float(text.get("x"))
            - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")]
        )
        assert 0 <= left <= left + width <= WIDTH, words(text)


def test_pictures_have_a_colour_for_what_a_plan_has(trillion):
    kinds = {kind for by_kind in trillion.bytes.values() for kind in by_kind}
    assert kinds <= KINDS.keys()
    assert len(set(KINDS.values())) == len(KINDS)
    assert charts.colour("of a later version") == charts.OTHER


def test_pictures_page_holds_the_plan_and_escapes_its_name(resident):
    named = dataclasses.replace(resident, name='<b>"x" & y</b>')
    page = named.html()
    assert page.startswith("<!DOCTYPE html>")
    assert '<meta charset="utf-8">' in page
    assert named.svg() in page
    assert "<b>" not in page
    (text,) = re.findall(r"<pre[^>]*>(.*)</pre>", page, re.DOTALL)
    assert html.unescape(text) == str(named)
    ET.fromstring(named.svg())


def test_pictures_of_a_plan_that_was_pickled_are_the_same(resident):
    assert pickle.loads(pickle.dumps(resident)).svg() == resident.svg()
