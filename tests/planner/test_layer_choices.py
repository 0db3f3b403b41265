"""The options chosen for one layer, against all 2 * 3^n of them."""

import dataclasses
import itertools
import random
import re

import pytest

from zerojax.choice.layer_choices import LayerOption, Value, layer_front, layer_options

KEEP, OFFLOAD, RECOMPUTE = range(3)


def random_values(rng, num):
    """Return values of few sizes and integer seconds.

    Sums are then exact, and some options cost the same.
    """
    return [
        Value(
            name=f"v{i}",
            num_bytes=rng.choice((1, 2, 3, 8)),
            seconds=float(rng.randint(0, 6)),
            operands=tuple(j for j in range(i) if rng.random() < 0.4),
        )
        for i in range(num)
    ]


def costs_by_making(values, x_bytes, what_of, is_input_offloaded):
    """Return the costs of one option, by running its backward.

    Before a value is made, the values that it is made from are made.
    """
    there = {i for i, what in enumerate(what_of) if what != RECOMPUTE}
    seconds = 0.0

    def make(i):
        nonlocal seconds
        if i not in there:
            for operand in values[i].operands:
                make(operand)
            there.add(i)
            seconds += values[i].seconds

    for i in reversed(range(len(values))):
        make(i)
    device = sum(
        value.num_bytes for value, what in zip(values, what_of, strict=True) if what == KEEP
    )
    host = sum(
        value.num_bytes for value, what in zip(values, what_of, strict=True) if what == OFFLOAD
    )
    return device + x_bytes * (not is_input_offloaded), host + x_bytes * is_input_offloaded, seconds


def costs(option):
    return option.device_bytes, option.host_bytes, option.seconds


def brute_force(values, x_bytes):
    """Return the costs that no option dominates."""
    choices = itertools.product(itertools.product(range(3), repeat=len(values)), (False, True))
    everything = {costs_by_making(values, x_bytes, *choice) for choice in choices}
    return {
        a
        for a in everything
        if not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in everything)
    }


@pytest.mark.parametrize("num", range(6))
def test_layer_front_is_that_of_all_options(num):
    rng = random.Random(num)
    for _ in range(4):
        values, x_bytes = random_values(rng, num), rng.randint(1, 4)
        front = layer_front(values, x_bytes)
        assert {costs(option) for option in front} == brute_force(values, x_bytes)
        assert len(front) == len({costs(option) for option in front})


@pytest.mark.exhaustive
def test_layer_front_of_six_values_is_that_of_all_options():
    rng = random.Random(6)
    for _ in range(4):
        values, x_bytes = random_values(rng, 6), rng.randint(1, 4)
        assert {costs(option) for option in layer_front(values, x_bytes)} == brute_force(
            values, x_bytes
        )


def test_layer_options_cost_what_they_name():
    values, x_bytes = random_values(random.Random(1), 12), 3
    for option in layer_options(values, x_bytes):
        what_of = [
            KEEP if v.name in option.keep else OFFLOAD if v.name in option.offload else RECOMPUTE
            for v in values
        ]
        assert costs(option) == costs_by_making(values, x_bytes, what_of, option.input_offloaded)
        assert (
            option.transient_bytes
            == x_bytes + sum(v.num_bytes for v in values) - option.device_bytes
        )
        assert not set(option.keep) & set(option.offload)


def test_layer_options_are_few_of_the_front_and_hold_its_corners():
    rng = random.Random(2)
    values = [
        Value(name=f"v{i}", num_bytes=rng.randint(1, 1000), seconds=rng.random()) for i in range(8)
    ]
    options, names = layer_options(values, 7), tuple(value.name for value in values)
    assert len(layer_front(values, 7)) > 100
    assert len(set(options)) == len(options) == 16
    assert set(options) <= set(layer_front(values, 7))
    assert {(o.keep, o.offload, o.input_offloaded) for o in options} >= {
        (names, (), False),
        ((), (), False),
        ((), (), True),
        ((), names, True),
    }
    assert len(layer_options(values, 7, max_options=4)) == 4


def test_layer_options_of_many_values_hold_the_corners_though_the_front_is_thinned():
    rng = random.Random(3)
    values = [
        Value(name=f"v{i}", num_bytes=rng.randint(1, 10**6), seconds=rng.random())
        for i in range(10)
    ]
    options, whole = layer_options(values, 5), sum(v.num_bytes for v in values)
    seconds = sum(v.seconds for v in values)
    found = {(o.device_bytes, o.host_bytes, o.seconds) for o in options}
    assert len(layer_front(values, 5)) == 2048
    assert found >= {(5 + whole, 0, 0.0), (5, 0, seconds), (0, 5, seconds), (0, 5 + whole, 0.0)}


def test_layer_options_without_values_are_those_of_the_input():
    kept = LayerOption(device_bytes=4, host_bytes=0, seconds=0.0, transient_bytes=0)
    offloaded = LayerOption(
        device_bytes=0, host_bytes=4, seconds=0.0, transient_bytes=4, input_offloaded=True
    )
    assert layer_options([], 4) == (kept, offloaded)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_bytes": 0}, "value 'b': num_bytes=0, seconds=1.0: at least 1 byte"),
        ({"seconds": -1.0}, "value 'b': num_bytes=2, seconds=-1.0"),
        ({"seconds": float("nan")}, "value 'b': num_bytes=2, seconds=nan"),
        (
            {"operands": (1,)},
            "value 'b': operand 1 is not an earlier value; earlier values are 0 to 0",
        ),
        ({"name": "a"}, "value 1: the name 'a' is already used"),
    ],
)
def test_layer_options_refuse_values_that_make_no_sense(fields, message):
    a, b = (
        Value(name="a", num_bytes=1, seconds=0.5),
        Value(name="b", num_bytes=2, seconds=1.0, operands=(0,)),
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        layer_options([a, dataclasses.replace(b, **fields)], 1)


def test_layer_options_refuse_an_empty_input_and_too_few_options():
    with pytest.raises(ValueError, match="x_bytes=0: the layer's input has at least 1 byte"):
        layer_options([], 0)
    with pytest.raises(ValueError, match="max_options=3: at least 4"):
        layer_options([], 1, max_options=3)
