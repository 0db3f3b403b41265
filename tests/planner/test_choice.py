"""The choice among layer options, against all assignments.

Its predicted seconds are compared with an event simulation.
"""

import collections
import dataclasses
import heapq
import itertools
import math
import random
import re

import numpy as np
import pytest

from zerojax.choice import choice
from zerojax.choice.choice import Problem, Solver, by_greedy, by_milp, predicted_seconds, uniform
from zerojax.choice.choice_problem import build_choice, compute_seconds
from zerojax.choice.choice_program import ChoiceProgram
from zerojax.choice.layer_choices import LayerOption, Value, layer_front, layer_options
from zerojax.choice.least_bytes import least_peak

GAP = 1e-6


def random_options(rng):
    """Return some options of a layer: those that its values allow, or arbitrary ones."""
    if rng.random() < 0.5:
        values = [
            Value(name=f"v{i}", num_bytes=rng.randint(1, 5), seconds=rng.random())
            for i in range(rng.randint(2, 3))
        ]
        return layer_options(values, 2, max_options=4)
    return tuple(
        LayerOption(
            device_bytes=rng.randint(0, 12),
            host_bytes=rng.choice((0, 0, rng.randint(1, 12))),
            seconds=rng.choice((0.0, 2 * rng.random())),
            transient_bytes=rng.randint(0, 12),
        )
        for _ in range(rng.randint(2, 4))
    )


def random_problem(rng, num_layers):
    """Return a small problem.

    Its budgets are between too little and the most that an assignment could take.
    """
    L, traffic = num_layers, lambda: rng.choice((0, rng.randint(1, 9)))
    options = random_options(rng)
    return Problem(
        num_layers=L,
        options=options,
        forward_seconds=0.5 + rng.random(),
        backward_seconds=0.5 + 2 * rng.random(),
        head_seconds=rng.choice((0.0, rng.random())),
        link_down=2 + 18 * rng.random(),
        link_up=2 + 18 * rng.random(),
        distance=rng.randint(1, 3),
        device_budget_bytes=rng.randint(5, 12 + 8 * L),
        host_budget_bytes=rng.choice((0, rng.randint(0, 12 * L), rng.randint(0, 12 * L))),
        up_forward_bytes=traffic(),
        up_backward_bytes=traffic(),
        down_backward_bytes=traffic(),
        down_forward_bytes=traffic(),
        max_segments=rng.randint(min(2, L), L),
    )


def bytes_at_ticks(problem, assignment):
    """Return the device bytes at the backward of each layer, and the host bytes."""
    options = [problem.options[p] for p in assignment]
    kept = itertools.accumulate(option.device_bytes for option in options)
    ticks = [below + option.transient_bytes for below, option in zip(kept, options, strict=True)]
    return ticks, sum(option.host_bytes for option in options)


def all_assignments(problem):
    """Yield the assignments of at most `max_segments` segments."""
    for assignment in itertools.product(range(len(problem.options)), repeat=problem.num_layers):
        if len(list(itertools.groupby(assignment))) <= problem.max_segments:
            yield assignment


def fitting(problem):
    for assignment in all_assignments(problem):
        ticks, host = bytes_at_ticks(problem, assignment)
        if max(ticks) <= problem.device_budget_bytes and host <= problem.host_budget_bytes:
            yield assignment


def least_seconds(problem):
    """Return the fewest seconds of all assignments that fit, or None."""
    found = list(fitting(problem))
    return float(compute_seconds(problem, np.array(found)).min()) if found else None


def simulate(problem, assignment):
    """Return the seconds of a step from an event simulation.

    Three resources run tasks in order, each task once its causes have happened.
    """
    p, L = problem, problem.num_layers
    options = [problem.options[option] for option in assignment]
    queues = {name: collections.deque() for name in ("device", "up", "down")}

    def queue(resource, task, seconds, *causes):
        queues[resource].append((task, seconds, set(causes)))

    for t in range(L):
        queue(
            "up",
            f"load {t}",
            p.up_forward_bytes / p.link_up,
            *([f"end forward {t - p.distance}"] if t >= p.distance else []),
        )
        queue("device", f"forward {t}", p.forward_seconds, f"end load {t}")
        queue(
            "down",
            f"store {t}",
            (options[t].host_bytes + p.down_forward_bytes) / p.link_down,
            f"end forward {t}",
        )
    queue("device", "head", p.head_seconds)
    for k, layer in enumerate(reversed(range(L))):
        slot_is_free = [f"begin backward {layer + p.distance}"] if k >= p.distance else []
        causes = [f"end forward {L - 1}", f"end store {layer}", *slot_is_free]
        queue(
            "up",
            f"fetch {layer}",
            (options[layer].host_bytes + p.up_backward_bytes) / p.link_up,
            *causes,
        )
        queue(
            "device",
            f"backward {layer}",
            p.backward_seconds + options[layer].seconds,
            f"end fetch {layer}",
        )
        queue(
            "down",
            f"store grads {layer}",
            p.down_backward_bytes / p.link_down,
            f"end backward {layer}",
        )

    happened, busy, ends, now = set(), set(), [], 0.0
    while ends or any(queues.values()):
        while startable := [
            r for r, tasks in queues.items() if tasks and r not in busy and tasks[0][2] <= happened
        ]:
            task, seconds, _ = queues[startable[0]].popleft()
            busy.add(startable[0])
            happened.add(f"begin {task}")
            heapq.heappush(ends, (now + seconds, task, startable[0]))
        now, task, resource = heapq.heappop(ends)
        happened.add(f"end {task}")
        busy.remove(resource)
    return now


def test_choice_predicts_the_seconds_of_a_simulation():
    rng = random.Random(0)
    for _ in range(100):
        problem = random_problem(rng, rng.randint(1, 8))
        assignment = [rng.randrange(len(problem.options)) for _ in range(problem.num_layers)]
        assert predicted_seconds(problem, assignment) == pytest.approx(
            simulate(problem, assignment), rel=1e-12
        )


def test_choice_by_milp_is_the_best_of_all_assignments():
    rng, num_fit = random.Random(1), 0
    for _ in range(200):
        problem = random_problem(rng, rng.randint(2, 5))
        least = least_seconds(problem)
        greedy, found = by_greedy(problem), by_milp(problem, gap=GAP)
        result, assignment = ChoiceProgram(problem).solved(at_most=np.inf, gap=GAP, seconds=20.0)
        assert greedy.fits == found.fits == (assignment is not None) == (least is not None), (
            result.message
        )
        if least is None:
            continue
        num_fit += 1
        assert predicted_seconds(problem, assignment) == pytest.approx(least, rel=GAP + 1e-6)
        assert found.seconds == pytest.approx(least, rel=GAP + 1e-6)
        assert found.solver.gap <= GAP + 1e-6
        assert greedy.seconds >= least * (1 - 1e-12)
        assert {greedy.assignment, found.assignment} <= set(fitting(problem))
    assert 100 < num_fit < 190


def test_choice_by_milp_takes_what_the_solver_betters(monkeypatch):
    rng, num_bettered = random.Random(2), 0
    monkeypatch.setattr(
        choice,
        "by_greedy",
        lambda problem: min(uniform(problem), key=lambda c: (not c.fits, c.seconds)),
    )
    for _ in range(30):
        problem = random_problem(rng, 5)
        found = by_milp(problem, gap=GAP)
        if found.fits:
            assert found.seconds == pytest.approx(least_seconds(problem), rel=GAP + 1e-6)
            assert found.assignment in set(fitting(problem))
            num_bettered += (
                found.solver.text.startswith("milp: ") and found.solver.gap <= GAP + 1e-6
            )
    assert num_bettered > 5


def test_choice_program_of_one_option_has_the_predicted_seconds():
    rng = random.Random(7)
    for _ in range(60):
        problem = random_problem(rng, rng.randint(1, 8))
        problem = dataclasses.replace(
            problem, options=problem.options[-1:], device_budget_bytes=1000, host_budget_bytes=1000
        )
        # A slow link and a long head: the ring is full before backward begins.
        problem = dataclasses.replace(
            problem, link_up=0.5 + 4 * rng.random(), head_seconds=40 * rng.random()
        )
        predicted = predicted_seconds(problem, [0] * problem.num_layers)
        assert ChoiceProgram(problem).relaxed_seconds() == pytest.approx(predicted, rel=1e-6)


def test_choice_bounds_are_below_all_assignments():
    rng = random.Random(3)
    for _ in range(40):
        problem = random_problem(rng, 4)
        if (least := least_seconds(problem)) is not None:
            assert ChoiceProgram(problem).relaxed_seconds() <= least + 1e-6


def test_choice_tells_its_bytes_and_segments():
    problem = random_problem(random.Random(4), 4)
    for found in uniform(problem):
        ticks, host = bytes_at_ticks(problem, found.assignment)
        assert (found.device_bytes, found.host_bytes) == (max(ticks), host)
        assert found.segments == ((4, found.assignment[0]),)
    found = build_choice(problem, [1, 1, 0, 1], Solver(text="by hand", gap=math.inf, seconds=0.0))
    ticks, host = bytes_at_ticks(problem, found.assignment)
    assert (found.device_bytes, found.host_bytes) == (max(ticks), host)
    assert found.segments == ((2, 1), (1, 0), (1, 1))
    assert found.seconds == predicted_seconds(problem, found.assignment)


def test_choice_that_nothing_fits_tells_the_fewest_bytes():
    """The reported bytes are the minimum over all assignments.

    With that many bytes an assignment fits; with one byte less none does.
    """
    rng, tiers = random.Random(9), collections.Counter()
    for _ in range(60):
        problem = random_problem(rng, rng.randint(2, 4))
        problem = dataclasses.replace(
            problem, device_budget_bytes=0, max_segments=rng.randint(1, 3)
        )
        found = by_milp(problem)
        peaks = [max(ticks) for ticks, host in (bytes_at_ticks(problem, a) for a in all_assignments(problem))
                 if host <= problem.host_budget_bytes]  # fmt: skip
        tiers.update(missing.tier for missing in found.missing)
        if peaks:
            assert found.device_bytes == min(peaks)
            assert [(m.tier, m.needed, m.had) for m in found.missing] == [
                ("device", min(peaks), 0)
            ] * (min(peaks) > 0)
            assert by_milp(dataclasses.replace(problem, device_budget_bytes=min(peaks))).fits
        else:
            assert found.host_bytes == problem.num_layers * min(
                option.host_bytes for option in problem.options
            )
            assert "pinned_host" in {missing.tier for missing in found.missing}
    assert set(tiers) == {"device", "pinned_host"}


def test_choice_of_the_least_peak_is_that_of_all_assignments():
    """Choose with few segments and tight host memory, where one more segment would take less."""
    rng = random.Random(8)
    for _ in range(60):
        problem = dataclasses.replace(
            random_problem(rng, 5), max_segments=2, host_budget_bytes=rng.randint(5, 25)
        )
        found = [(max(ticks), a) for a in all_assignments(problem) for ticks, host in [bytes_at_ticks(problem, a)]
                 if host <= problem.host_budget_bytes]  # fmt: skip
        assignment = least_peak(problem)
        assert (assignment is None) == (not found)
        if found:
            assert (max(bytes_at_ticks(problem, assignment)[0]), tuple(assignment)) in found
            assert max(bytes_at_ticks(problem, assignment)[0]) == min(found)[0]


def test_choice_is_no_slower_with_more():
    """More memory, more segments or a faster link never cost time."""
    rng = random.Random(6)
    for _ in range(10):
        problem = dataclasses.replace(random_problem(rng, 6), max_segments=3)
        for more in (
            "device_budget_bytes",
            "host_budget_bytes",
            "max_segments",
            "link_down",
            "link_up",
        ):
            amounts = [int(getattr(problem, more) * factor) for factor in (0.5, 1, 1.5, 2)]
            found = [
                by_milp(dataclasses.replace(problem, **{more: max(1, amount)}), gap=GAP)
                for amount in amounts
            ]
            for less, with_more in itertools.pairwise(found):
                assert with_more.fits or not less.fits
                if less.fits:
                    assert with_more.seconds <= less.seconds * (1 + GAP + 1e-6)


def test_choice_of_many_layers_is_within_the_gap_of_the_bound():
    values = [
        Value(name=f"v{i}", num_bytes=(3, 1, 4, 4)[i] << 20, seconds=(2.0, 3.0, 2.5, 0.1)[i] * 1e-3)
        for i in range(4)
    ]
    problem = Problem(
        num_layers=32,
        options=layer_options(values, 1 << 20),
        forward_seconds=8e-3,
        backward_seconds=16e-3,
        link_down=1e9,
        link_up=1e9,
        distance=2,
        device_budget_bytes=150 << 20,
        host_budget_bytes=64 << 20,
    )
    found = by_milp(problem, gap=3e-3)
    assert found.fits
    assert len(found.segments) <= 4
    assert found.solver.gap <= 3e-3
    assert found.seconds < 0.98 * min(c.seconds for c in uniform(problem) if c.fits)


def test_choice_among_few_options_of_a_layer_is_as_good_as_among_all():
    """Choose by the bound, with the values of a GPT block.

    Sizes are in units of the block's input, seconds in units of a product of its width.
    """
    sizes, seconds = (1, 3, 1, 1, 1, 1, 4, 4), (0.1, 3.0, 1.5, 1.0, 0.1, 0.1, 4.0, 0.4)
    values = [
        Value(name=f"v{i}", num_bytes=b, seconds=s)
        for i, (b, s) in enumerate(zip(sizes, seconds, strict=True))
    ]
    front, options = layer_front(values, 1), layer_options(values, 1)
    assert len(front) > 10 * len(options)
    for device, host, link in itertools.product((20, 50), (0, 12, 50), (0.4, 2.0)):
        problem = dataclasses.replace(
            LAYER,
            num_layers=6,
            options=options,
            forward_seconds=11.0,
            backward_seconds=22.0,
            link_down=link,
            link_up=link,
        )
        problem = dataclasses.replace(problem, device_budget_bytes=device, host_budget_bytes=host)
        bound = ChoiceProgram(dataclasses.replace(problem, options=front)).relaxed_seconds()
        assert ChoiceProgram(problem).relaxed_seconds() == pytest.approx(bound, rel=1e-3)


LAYER = Problem(
    num_layers=3,
    options=(LayerOption(device_bytes=4, host_bytes=0, seconds=0.0, transient_bytes=0),),
    forward_seconds=1.0,
    backward_seconds=2.0,
    link_down=1.0,
    link_up=1.0,
    device_budget_bytes=9,
)


def test_choice_says_what_is_missing():
    assert (
        str(by_milp(LAYER).missing[0]) == "device: 12 bytes are needed, 3 more than the 9 available"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": ()}, "options is empty"),
        ({"num_layers": 0}, "num_layers=0: at least 1"),
        ({"distance": 0}, "distance=0: at least 1"),
        ({"max_segments": 0}, "max_segments=0: at least 1"),
        ({"forward_seconds": 0.0}, "forward_seconds=0.0: a finite number above 0"),
        ({"link_up": float("inf")}, "link_up=inf: a finite number above 0"),
        ({"host_budget_bytes": -1}, "host_budget_bytes=-1: a finite number, at least 0"),
    ],
)
def test_choice_refuses_a_problem_that_makes_no_sense(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(LAYER, **fields)


def test_choice_refuses_an_assignment_of_other_layers_or_options():
    with pytest.raises(ValueError, match="the assignment has 2 layers, but the problem has 3"):
        predicted_seconds(LAYER, [0, 0])
    with pytest.raises(
        ValueError, match="unknown option 1: the problem has 1 options, counted from 0"
    ):
        predicted_seconds(LAYER, [0, 1, 0])
