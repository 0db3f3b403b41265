"""`program.operations` lists the bytes of `program.memory`, the disk and the budget."""

import itertools
from typing import Any

import jax
import optax
import pytest
import toys

import zerojax as zj

HOST, DISK = "pinned_host", "nvme"
AWAY = {"params": HOST, "opt_state": HOST, "grads": HOST, "stage": 3}
ON_DISK = {"params": DISK, "opt_state": DISK, "grads": DISK, "activations": DISK, "stage": 3}
DELAYED = {"opt_state": HOST, "update_on": "host", "delayed_update": True, "precision": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "host": AWAY,
    "host, gather ahead": AWAY | {"gather_ahead": True, "prefetch_distance": 2},
    "host, in backward": AWAY | {"grads": "device", "update": "in_backward"},
    "host, updated there": AWAY | {"update_on": "host", "num_microbatches": 2},
    "delayed": DELAYED,
    "host, in forward": AWAY | {"update": "in_forward"},
    "host, updated there in forward": AWAY | {"update_on": "host", "update": "in_forward"},
    "host, made there in forward": DELAYED | {"delayed_update": False, "update": "in_forward"},
    "disk": ON_DISK,
    "disk, in backward": ON_DISK | {"grads": "device", "update": "in_backward"},
    "disk, updated on the host": ON_DISK | {"update_on": "host"},
    "host, rounded gradients": AWAY | {"grads_dtype": "bfloat16", "update": "in_forward"},
    "disk, rounded gradients": ON_DISK | {"grads_dtype": "bfloat16", "num_microbatches": 2},
}


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])


def build(fields: dict[str, Any], folder: Any, devices: int = 2) -> zj.Program:
    config = zj.ZeroConfig(**fields, swap_dir=str(folder))
    return zj.build_train_step(toys.layered(), optax.adamw(1e-3), config, mesh_of(devices))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_operations_have_the_bytes_of_the_report_and_of_the_disk(case, devices, tmp_path):
    batch = toys.batches(1)[0]
    with build(CASES[case], tmp_path, devices) as program:
        report, operations = program.memory(batch), program.operations(batch)
        device = report.tiers["device"]
        assert operations.peak_bytes == device["gathered"] + device["in_flight"] > 0
        moved = {"to_device": operations.moved("up"), "to_host": operations.moved("down")}
        assert moved == report.host_link
        if program.layout.disk is not None:
            sizes = {kind: records.num_bytes for kind, records in program.layout.disk.kinds.items()}
            for lane, writes in (("read", False), ("write", True)):
                moves = [move for move in program._moves if move.writes == writes]
                assert operations.moved(lane) == sum(sizes[move.kind] for move in moves)
                assert operations.moved(lane) % 4096 == 0


@pytest.mark.parametrize("case", ["host", "host, in backward", "disk"])
def test_a_budget_of_the_peak_is_enough_and_a_byte_less_is_not(case, tmp_path):
    batch = toys.batches(1)[0]
    with build(CASES[case], tmp_path) as program:
        most = program.operations(batch).peak_bytes
    with build(CASES[case] | {"device_budget_bytes": most}, tmp_path) as program:
        program.memory(batch)
    less = CASES[case] | {"device_budget_bytes": most - 1}
    told = rf"device_budget_bytes={most - 1}: {{}}prefetch_distance.* puts {most} bytes in flight"
    if case != "disk":
        with pytest.raises(ValueError, match=told.format("")):
            build(less, tmp_path)
        return
    # The bytes of activations kept off the device for backward are known with a batch.
    with (
        build(less, tmp_path) as program,
        pytest.raises(ValueError, match=told.format("with this batch.s saved activations .*, ")),
    ):
        program.memory(batch)


def test_a_delayed_update_is_listed_once_for_each_record(tmp_path):
    with build(DELAYED, tmp_path) as program:
        operations = program.operations(toys.batches(1)[0])
        leaves = [program.layout.all_leaves[i].name for i in program.layout.unstacked]
    updates = [
        (op.record.leaves, op.number)
        for part in operations.phases
        for _, ops in part.phase.ticks()
        for op in ops
        if op.verb == "host_update"
    ]
    assert len(updates) == len(set(updates)) == toys.LAYERS + len(leaves)
    assert str(operations).count("since the step began") == 1 + len(leaves)


def test_a_table_names_leaves_and_says_what_a_tick_computes(tmp_path):
    with build(AWAY | {"num_microbatches": 2}, tmp_path) as program:
        operations = program.operations(toys.batches(1)[0])
    table = str(operations)
    assert "its 2 microbatches in one tick" in table.splitlines()[0]
    assert (
        f"at most {operations.peak_bytes:,} bytes in flight on a device, in {operations.peak[0]}"
        in table
    )
    assert "params of ['embed']['table']" in table
    assert "  1 tick ahead" in table
    assert " 1 ticks" not in table
    assert repr(operations).startswith(
        "<StepPlan of embed, forward, head, backward, embed_backward, update, unstacked"
    )


def test_lanes_and_phases_that_do_not_exist_are_refused(tmp_path):
    with build(AWAY, tmp_path) as program:
        operations = program.operations(toys.batches(1)[0])
    for lanes in ((), ("upp",), ("network",), ("up", "compute"), (["up"],), (None,)):
        with pytest.raises(
            ValueError, match="one or more of the lanes 'up', 'down', 'read', 'write'"
        ):
            operations.moved(*lanes)
    with pytest.raises(ValueError, match="called='yes': True, False or None is needed"):
        operations.moved("up", called="yes")
    with pytest.raises(
        ValueError, match=r"phase 'forwards': this step has embed, forward, .*, unstacked"
    ):
        operations.find_peak("forwards")
    assert operations.find_peak("forward") > 0


def test_both_directions_sum_up(tmp_path):
    with build(ON_DISK, tmp_path) as program:
        operations = program.operations(toys.batches(1)[0])
    lanes = ("up", "down", "read", "write")
    for some in itertools.combinations(lanes, 2):
        assert operations.moved(*some) == sum(map(operations.moved, some))


def test_a_resident_step_says_where_its_bytes_are():
    model = toys.unrolled()
    config = zj.ZeroConfig(stage=3, opt_state=HOST)
    with zj.build_train_step(model, optax.adamw(1e-3), config, mesh_of(1)) as program:
        assert toys.layer_schedule(program).title().startswith("1 layer, ")
        with pytest.raises(ValueError, match=r"program\.operations\(batch\)"):
            _ = toys.layer_schedule(program).peak_bytes
        batch = toys.batches(1)[0]
        assert (
            program.operations(batch).peak_bytes
            == program.memory(batch).tiers["device"]["in_flight"]
            > 0
        )


def test_a_resident_step_lists_its_update_once():
    batch = toys.batches(1)[0]
    models = {"layers": toys.layered(), "leaves": toys.unrolled()}
    for name, model in models.items():
        config = zj.ZeroConfig(stage=1)
        with zj.build_train_step(model, optax.adamw(1e-3), config, mesh_of(2)) as program:
            operations = program.operations(batch)
        verbs = [
            op.verb for part in operations.phases for _, ops in part.phase.ticks() for op in ops
        ]
        assert verbs.count("update") == 1, name
        assert "update" in str(operations)
        assert " gather " not in str(operations)
        assert ("head" in [part.name for part in operations.phases]) == (name == "layers")


def test_advice_keeps_what_makes_the_step_stream():
    """`gather_ahead=False` is not advised if it is the only reason why the step streams."""
    fields = {"stage": 3, "gather_ahead": True}
    model, tx = toys.layered(), optax.adamw(1e-3)
    with zj.build_train_step(model, tx, zj.ZeroConfig(**fields), mesh_of(2)) as program:
        most = program.operations(toys.batches(1)[0]).peak_bytes
    config = zj.ZeroConfig(**fields, device_budget_bytes=most - 1)
    with pytest.raises(ValueError, match=f"device_budget_bytes={most - 1}: ") as found:
        zj.build_train_step(model, tx, config, mesh_of(2))
    assert "gather_ahead=False" not in str(found.value)


def test_late_stores_are_an_int():
    from host_offload.schedule import build_schedule

    for value in (2.5, "x", None, True):
        with pytest.raises(ValueError, match=r"stores_late=.*: an int is needed"):
            build_schedule(4, stores_late=value)
