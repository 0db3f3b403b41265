"""Planned bytes equal those of programs compiled for 1, 8 and 64 H200s.

Device memory, host memory and sent bytes are compared.
"""

import dataclasses

import planned_memory
import pytest

import zerojax as zj
from zerojax.costs import buildable_of_sizes
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
    (gathered, reduced), (gathers, reduces) = (
        planned_memory.of_kinds(sent) for sent in (found.planned_sent, found.sent)
    )
    # Norms are not counted.
    assert reduced == pytest.approx(reduces, rel=1e-3)
    assert gathered + also_gathered(made, sizes) == pytest.approx(gathers, rel=1e-3)


H, N = "pinned_host", "nvme"
CROSSING = {
    "updated on the host": {"opt_state": H, "update_on": "host", "update": "in_backward"},
    "updated on the host, in float32": {"opt_state": H, "update_on": "host", "precision": "fp32"},
    "all on nvme": {"params": N, "grads": N, "opt_state": N, "activations": N},
    "nvme, updated on the host": {
        "params": N,
        "grads": N,
        "opt_state": N,
        "activations": N,
        "update_on": "host",
    },
    "delayed": {"opt_state": H, "update_on": "host", "delayed_update": True},
}


@pytest.mark.by_default("updated on the host-1", "nvme, updated on the host-8")
@pytest.mark.parametrize("each", [1, 8])
@pytest.mark.parametrize("name", CROSSING)
def test_a_plan_and_its_program_count_the_same_slots(name, each):
    sizes = planned_memory.SMALL | {"layers": 4, "hidden": 1024}
    case = planned_memory.Case(name=name, sizes=sizes, each=each, batch=8, fields=CROSSING[name])
    made, of = planned_memory.planned(case)
    model, tx, mesh, batch = buildable_of_sizes(
        of, made.machine, made.grid, made.config.precision, made.tiles
    )
    program = zj.build_train_step(
        model, tx, dataclasses.replace(made.config, swap_dir="not there"), mesh
    )
    slots = program.memory(batch).tiers["device"]["slots"]
    assert slots > 0
    # A program's records are padded, and scalars are moved with them.
    assert made.bytes["device"]["slots"] == pytest.approx(slots, rel=1e-3)


def also_gathered(made, sizes):
    """Return the bytes that XLA gathers for a tied table, which the plan does not count."""
    each = 2 * (1 - 1 / made.grid.fsdp)
    if made.config.stage == 3:  # for each of its two uses
        return each * sizes.vocab * sizes.hidden
    return (
        each * sizes.batch * sizes.seq * sizes.hidden if made.config.stage == 0 else 0
    )  # the embedding's cotangents
