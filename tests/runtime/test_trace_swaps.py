"""The trace of a program with everything on disk.

Its plan appears once per step, and its bytes and waits equal the metrics.
"""

import gzip
import json
import re

import jax
import optax
import pytest
import toys
import traces

import zerojax as zj
from zerojax.planner import plan

DISK = "nvme"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}


def build(swap_dir, **fields):
    config = zj.ZeroConfig(stage=3, swap_dir=str(swap_dir), **{**ALL, **fields})
    return zj.build_train_step(
        toys.small(), optax.adamw(1e-2), config, zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    )


@pytest.mark.by_default("host")
@pytest.mark.parametrize(
    "fields",
    [{}, {"update": "in_backward", "update_on": "host", "prefetch_distance": 0}],
    ids=["device", "host"],
)
def test_a_trace_has_the_plan_once_a_step_and_sums_to_the_metrics(tmp_path, fields):
    path, batches = tmp_path / "trace.json.gz", toys.batches(4)
    (tmp_path / "swap").mkdir()
    with build(tmp_path / "swap", **fields) as program:
        state, _ = program.step(program.init(jax.random.key(0)), batches[0])
        found = []
        with program.trace_swaps(path):
            for batch in batches[1:]:
                state, metrics = jax.block_until_ready(program.step(state, batch))
                found.append(metrics)
            jax.block_until_ready(program.eval(state, batches[0]))
        moves, eval_moves = program._moves, program._eval_moves
        state, metrics = jax.block_until_ready(program.step(state, batches[0]))  # untraced again
        assert metrics["swap_read_bytes"] > 0
    trace = json.loads(gzip.decompress(path.read_bytes()))
    traces.check(trace)
    assert trace["otherData"]["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1}
    assert trace["otherData"]["runs_dropped"] == trace["otherData"]["events_dropped"] == 0
    steps = {f"step {i}": moves for i in (1, 2, 3)}
    traces.check_runs(trace, steps | {"eval 1": eval_moves}, list(range(4)))
    for step, metrics in zip(steps, found, strict=True):
        names = ("swap_read_bytes", "swap_write_bytes", "swap_stall_seconds", "swap_misses")
        traces.check_sums(trace, step, *(metrics[name] for name in names))
    if not fields:
        queued = [
            e["args"]
            for e in trace["traceEvents"]
            if e["ph"] == "C" and e["name"] == "transfers queued"
        ]
        assert (
            max(a["read"] + a["write"] for a in queued)
            >= max(m["swap_most_queued"] for m in found) - 1
        )


def test_a_trace_shows_what_a_plan_predicts_from_the_begin_of_each_step(tmp_path, program):
    sizes = zj.Sizes(layers=4, hidden=4096, heads=32, seq=128, batch=16)
    planned = plan(
        sizes,
        machine=zj.machine("dgx2"),
        fixed={"stage": 3, "precision": "fp16", "num_microbatches": 1, **ALL},
    )
    state, batches = program.init(jax.random.key(0)), toys.batches(2)
    for path, prediction in (
        (tmp_path / "plain.json", None),
        (tmp_path / "predicted.json", planned),
    ):
        with program.trace_swaps(path, plan=prediction):
            for batch in batches:
                state, _ = jax.block_until_ready(program.step(state, batch))
            jax.block_until_ready(program.eval(state, batches[0]))
    plain, trace = (
        json.loads((tmp_path / name).read_text()) for name in ("plain.json", "predicted.json")
    )
    traces.check(trace)
    names = ["disk", "planned", *(f"rank {n}" for n in range(4))]
    assert sorted(traces.process_names(plain).values()) == names
    assert sorted(traces.process_names(trace).values()) == sorted([*names, "predicted"])
    orders = [
        e["args"]["sort_index"]
        for t in (plain, trace)
        for e in t["traceEvents"]
        if e["name"] == "process_sort_index"
    ]
    assert sorted(orders[:6]) == list(range(6))
    assert sorted(orders[6:]) == list(range(7))
    predicted = traces.slices(trace, "", "predicted")
    assert {s["args"]["run"] for s in predicted} == {"step 1", "step 2"}
    steps = [s for s in traces.slices(trace, "steps") if s["name"].startswith("step")]
    lanes = ("compute", "up", "down", "read", "write")
    for step in steps:
        drawn = [
            (s["cat"], s["ts"] - step["ts"], s["dur"], s["name"])
            for s in predicted
            if s["args"]["run"] == step["name"]
        ]
        spans = [
            (s.lane, s.start * 1e6, (s.stop - s.start) * 1e6, s.label)
            for s in planned.time.spans
            if s.lane in lanes
        ]
        assert {lane for lane, *_ in spans} == set(lanes)
        assert len(drawn) == len(spans)
        for found, span in zip(sorted(drawn), sorted(spans), strict=True):
            assert found[0] == span[0]
            assert found[1:3] == pytest.approx(span[1:3], abs=1.0)  # us
            assert found[3].startswith(span[3])


def test_a_program_with_nothing_on_disk_cannot_be_traced(tmp_path):
    config = zj.ZeroConfig(stage=3, params="pinned_host")
    program = zj.build_train_step(
        toys.layered(), toys.optimizer(), config, zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    )
    with pytest.raises(ValueError, match="nothing on nvme"):
        program.trace_swaps(tmp_path / "trace.json")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    with build(tmp_path_factory.mktemp("swap")) as program:
        yield program


@pytest.mark.parametrize(
    "path",
    ["", None, 3, b"trace.json", "/dev/full", "/proc/trace.json", "{}", "{}/nowhere/trace.json"],
)
def test_a_trace_that_cannot_be_written_is_refused_before_it_begins(tmp_path, program, path):
    path = path.format(tmp_path) if isinstance(path, str) else path
    with pytest.raises(ValueError, match=f"a trace cannot be written to .*{re.escape(str(path))}"):
        program.trace_swaps(path)
    assert not list(tmp_path.iterdir())


def test_asking_for_a_trace_changes_no_file(tmp_path, program):
    (tmp_path / "old.json").write_text("old")
    program.trace_swaps(tmp_path / "old.json")
    program.trace_swaps(tmp_path / "new.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "old")]


def test_a_trace_that_cannot_be_written_at_its_end_hides_no_error(tmp_path, program, caplog):
    folder = tmp_path / "folder"

    def trace(error):
        folder.mkdir()
        with program.trace_swaps(folder / "trace.json"):
            folder.rmdir()
            if error is not None:
                raise error

    with pytest.raises(FileNotFoundError, match=re.escape("trace.json")):
        trace(None)
    assert "no trace" not in caplog.text
    with pytest.raises(KeyError, match="of the body"):
        trace(KeyError("of the body"))
    assert f"no trace was written to {folder / 'trace.json'}: FileNotFoundError" in caplog.text


def test_a_program_closed_in_its_trace_is_written(tmp_path):
    path = tmp_path / "trace.json"
    (tmp_path / "swap").mkdir()
    program = build(tmp_path / "swap")
    with program.trace_swaps(path):
        jax.block_until_ready(program.step(program.init(jax.random.key(0)), toys.batches(1)[0]))
        program.close()
    trace = json.loads(path.read_text())
    traces.check(trace)
    assert [s["name"] for s in traces.slices(trace, "steps")] == ["init 1", "step 1"]
