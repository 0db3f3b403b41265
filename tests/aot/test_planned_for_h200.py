"""Planned bytes are those of programs compiled for 1, 8 and 64 H200s: the device's, and host memory's."""

import planned_memory
import pytest

from zerojax.planner import validated

pytestmark = pytest.mark.xdist_group("h200")
CLOSE = 0.05
LESS_CLOSE = {"opt_state on the host, remat": 0.09, "all on nvme": 0.08, "opt_state on the host, in backward": 0.08}
"""Programs whose update or backward XLA packs less tightly than the account has it."""


@pytest.mark.by_default("stage 2")
@pytest.mark.parametrize("name", [case.name for case in planned_memory.CASES])
def test_planned_bytes_are_those_of_the_compiled_program(name):
    (case,) = (case for case in planned_memory.CASES if case.name == name)
    made, sizes = planned_memory.planned(case)
    found = validated(made, sizes, None, None, None)
    assert found.planned_bytes == pytest.approx(found.device_bytes, rel=LESS_CLOSE.get(name, CLOSE))
    assert found.planned_host_bytes == pytest.approx(found.host_bytes, rel=0.01)
