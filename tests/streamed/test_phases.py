"""The loops that are compiled for a phase, and the record numbers in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax as zj
from host_offload.schedule import build_schedule
from zerojax.state import OnDevice
from zerojax.streamed import phases

HOST = "pinned_host"
ALL = dict.fromkeys(("params", "grads", "opt_state", "activations"), HOST)


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [
        ([], []),
        ([7], [(0, 1, 1)]),
        ([5, 4, 3], [(0, 3, -1)]),
        ([2, 3, 0, 1], [(0, 2, 1), (2, 4, 1)]),
        ([0, 1, 5, 3, 1], [(0, 2, 1), (2, 5, -2)]),
    ],
)
def test_numbers_are_parted_where_they_are_not_linear(numbers, parts):
    assert phases._progressions(numbers) == parts
    for start, stop, step in parts:
        assert numbers[start:stop] == [numbers[start] + step * n for n in range(stop - start)]


@pytest.mark.parametrize(
    "fields", [{}, {"gather_ahead": True}, {"stores_late": 1}, {"device_layers": 3}]
)
@pytest.mark.parametrize("distance", [0, 1, 2, 9])
def test_the_loops_of_a_phase_have_the_numbers_of_its_ticks(distance, fields):
    """The compiled loops are those that the schedule shows."""
    for phase in build_schedule(6, distance, tiers=ALL, **fields).phases:
        ticks = []
        for loop in phases._tick_loops(
            phase, fields.get("device_layers", 0) if phase.name == "update" else 0
        ):
            for tick in range(loop.start, loop.stop):
                ticks.append(tick)
                for name in loop.numbers:
                    assert (
                        int(loop.index(name, jnp.int32(tick), None)) == getattr(phase, name)[tick]
                    )
            for name in ("consume", "fetch"):  # a move without numbers happens in no tick
                assert (name in loop.numbers) == bool(
                    (getattr(phase, name)[loop.start : loop.stop] >= 0).all()
                )
        assert ticks == list(range(6))


@pytest.mark.parametrize("in_loops", [False, True])
@pytest.mark.parametrize(
    ("layers", "device_layers"), [([3], 0), ([4, 3, 2], 0), ([4, 5, 0, 1], 0), ([1, 2, 3, 4], 3)]
)
def test_records_are_fetched_into_the_slots_in_order(layers, device_layers, in_loops, monkeypatch):
    monkeypatch.setattr(phases, "adds_order", lambda mesh: not in_loops)
    mesh = zj.make_mesh(devices=jax.devices()[:1])
    stack = jnp.arange(6.0)[:, None]

    def fetch(layer):
        if isinstance(layer, OnDevice):
            return [-jax.lax.dynamic_index_in_dim(stack, layer.layer, 0, keepdims=False)]
        return [jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False)]

    (ring,) = jax.jit(
        lambda: phases._fetch_all(
            layers, jnp.int32(0), fetch, mesh, slices_host=True, device_layers=device_layers
        )
    )()
    expected = [-layer if layer < device_layers else layer for layer in layers]
    np.testing.assert_array_equal(ring.reshape(-1), expected)
