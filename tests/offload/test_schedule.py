import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import host_offload


@given(st.integers(1, 40), st.integers(0, 8))
def test_schedule_fetches_each_layer_exactly_distance_ticks_before_its_use(num_layers, distance):
    s = host_offload.build_schedule(num_layers, distance)
    issued = {-1 - i: layer for i, layer in enumerate(s.preload[::-1])}  # tick before 0 -> layer
    issued |= {tick: layer for tick, layer in enumerate(s.fetch) if layer >= 0}
    order = [layer for _, layer in sorted(issued.items())]
    assert order == list(s.compute)
    for tick, layer in enumerate(s.fetch):
        if layer >= 0:
            assert s.compute[tick + distance] == layer
    assert s.peak_layers <= distance + 1


@given(st.integers(1, 40))
def test_schedule_visits_forward_then_backward(num_layers):
    s = host_offload.build_schedule(num_layers)
    np.testing.assert_array_equal(s.compute, [*range(num_layers), *reversed(range(num_layers))])
    assert s.peak_layers == 1
    assert len(str(s).splitlines()) == 2 + 2 * num_layers


@pytest.mark.parametrize(("num_layers", "distance"), [(0, 0), (3, -1)])
def test_schedule_refuses_impossible_sizes(num_layers, distance):
    with pytest.raises(ValueError, match=r"=-?\d+: "):
        host_offload.build_schedule(num_layers, distance)


def test_tiers_have_memory_kinds_except_nvme():
    assert host_offload.TIERS == ("device", "pinned_host", "nvme")
    assert host_offload.memory_kind("pinned_host") == "pinned_host"
    with pytest.raises(ValueError, match="nvme"):
        host_offload.memory_kind("nvme")
