"""Planned bytes are those of programs compiled for 1, 8 and 64 H200s: the device's, host memory's, and those that are sent."""

import planned_memory
import pytest

from zerojax.planner import validated

pytestmark = pytest.mark.xdist_group("h200")


@pytest.mark.by_default("stage 2")
@pytest.mark.parametrize("name", [case.name for case in planned_memory.CASES])
def test_planned_bytes_are_those_of_the_compiled_program(name):
    (case,) = (case for case in planned_memory.CASES if case.name == name)
    made, sizes = planned_memory.planned(case)
    found = validated(made, sizes, None, None, None)
    assert found.planned_bytes == pytest.approx(found.device_bytes, rel=0.05)
    assert found.planned_host_bytes == pytest.approx(found.host_bytes, rel=0.01)
    (gathered, reduced), (gathers, reduces) = (planned_memory.of_kinds(sent) for sent in (found.planned_sent, found.sent))
    # Norms are not counted. A table that is both embedding and head is gathered for each, which the plan counts as one leaf.
    assert reduced == pytest.approx(reduces, rel=1e-3)
    table = 2 * sizes.vocab * sizes.hidden * (1 - 1 / made.grid.fsdp)
    again = table if made.config.stage == 3 and made.grid.fsdp > 1 else 0
    assert gathered + again == pytest.approx(gathers, rel=1e-3)
