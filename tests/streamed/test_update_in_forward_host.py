"""A host update in the next step's forward equals one after backward, and nothing is stale."""

import dataclasses
import re
import threading
from typing import Any

import encoder_decoder
import jax
import numpy as np
import optax
import pytest
import test_update_in_forward
import toys
from test_update_in_forward import ALL_ON_HOST, HOST, train

import zerojax as zj
from host_offload.host_update import delayed
from zerojax import aot

STEPS = 6
MIXED = {"opt_state": HOST, "precision": "bf16"}  # parameters and masters in different places
CASES = {
    "small": {**MIXED, "clip_norm": 0.4, "num_microbatches": 2, "model": toys.small()},
    "all_on_host": {**ALL_ON_HOST, "clip_norm": 1.2},
    "params_on_device": {**MIXED, "clip_norm": 1.2, "num_microbatches": 2},
    "grads_on_device": {"params": HOST, "opt_state": HOST, "clip_norm": 1.2},
    "bf16": {**ALL_ON_HOST, "precision": "bf16", "clip_norm": 1.2},
    "gather_ahead": {**ALL_ON_HOST, "gather_ahead": True, "clip_norm": 1.2, "num_microbatches": 2},
    "ahead_on_device": {**MIXED, "gather_ahead": True, "clip_norm": 1.2, "prefetch_distance": 2},
    "no_prefetch": {**ALL_ON_HOST, "prefetch_distance": 0},
    "stage_2": {**MIXED, "stage": 2, "grads": HOST, "clip_norm": 1.2},
    "saved_on_host": {**ALL_ON_HOST, "activations": HOST},
    "segments": {
        **ALL_ON_HOST,
        "precision": "bf16",
        "activations": (zj.Segment(1, activations="remat"), zj.Segment(2, activations="save")),
    },
    "reduced_once": {**ALL_ON_HOST, "num_microbatches": 2, "reduce_every": "step"},
}
SKIPS = {
    "nan": {**ALL_ON_HOST, "clip_norm": 1.2, "num_microbatches": 2},
    "nan_on_device": {**MIXED, "clip_norm": 1.2, "num_microbatches": 2},
    "fp16": {**ALL_ON_HOST, "precision": "fp16", "clip_norm": 1.2},
    "fp16_on_device": {"opt_state": HOST, "precision": "fp16", "num_microbatches": 2},
}


def build(
    update: str, model: Any = None, tx: Any = None, update_on: str = "host", **fields: Any
) -> zj.Program:
    return test_update_in_forward.build(update, model, tx, update_on=update_on, **fields)


def arrays(state: Any) -> Any:
    """Return copies of the parameters, masters and optimizer state of a state."""
    trees = (state.params, state.master, state.opt_state)
    return jax.tree.map(lambda a: np.array(jax.device_get(a)), trees)


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual: Any, expected: Any) -> None:
    """Assert differences of at most 1e-6 of each leaf's largest number.

    A read of an unsettled state computes the update on the device, where XLA may fuse a product and
    a sum that the host's kernel rounds separately.
    """

    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b)))

    jax.tree.map(check, actual, expected)


def read(program: zj.Program, state: Any, **kwargs: Any) -> Any:
    return {name: jax.device_get(tree) for name, tree in program.iter_params(state, **kwargs)}


def assert_equal_training(
    case: dict[str, Any], data: list[Any], program: zj.Program | None = None, **kwargs: Any
) -> list[dict]:
    """Assert equal metrics in every step and an equal state after the last, bit for bit."""
    expected, last = train(build("after_backward", **kwargs, **case), data)
    program = program or build("in_forward", **kwargs, **case)
    actual, state = train(program, data)
    for old, new in zip(expected, actual, strict=True):
        assert_same(new, old)
    assert_same(arrays(program.settle(state)), arrays(last))
    return actual


@pytest.mark.by_default("small")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_host_update_after_backward(case):
    rows = assert_equal_training(case, toys.batches(STEPS))
    if "clip_norm" in case:  # the norm is clipped in some steps and not in others
        assert {bool(row["grad_norm"] > case["clip_norm"]) for row in rows} == {True, False}


@pytest.mark.by_default("nan")
@pytest.mark.parametrize("case", SKIPS.values(), ids=SKIPS)
def test_skipped_steps_leave_everything_as_it_was(case):
    data = toys.batches(STEPS)
    data[2]["features"] = np.array(data[2]["features"])
    data[2]["features"][0, 0] = np.nan  # one row, and so one microbatch
    if case.get("precision") == "fp16":
        case = {**case, "loss_scaling": zj.LossScaling(initial=2.0**20)}
    program = build("in_forward", **case)
    rows = assert_equal_training(case, data, program)
    assert int(rows[-1]["skipped_steps"]) >= (2 if "loss_scaling" in case else 1)
    _, state = train(program, data[:2])
    before = arrays(program.settle(state))
    _, state = train(program, data[:2])
    _, state = train(program, data[2:3], state)
    assert_same(arrays(state), before)
    assert not bool(state.pending.ready)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [ALL_ON_HOST, MIXED], ids=["all_on_host", "params_on_device"])
def test_averages_of_the_weights(case):
    tx = optax.chain(optax.adamw(1e-2), zj.Ema(0.9))
    data = toys.batches(3)
    assert_equal_training(case, data, model=toys.small(), tx=tx)
    _, last = train(after := build("after_backward", model=toys.small(), tx=tx, **case), data)
    _, state = train(program := build("in_forward", model=toys.small(), tx=tx, **case), data)
    assert_close(read(program, state, ema=True), read(after, last, ema=True))
    assert_same(program.ema_params(program.settle(state)), after.ema_params(last))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [{**ALL_ON_HOST, "precision": "bf16"}, {**ALL_ON_HOST, "gather_ahead": True}, MIXED],
    ids=["all_on_host", "ahead", "params_on_device"],
)
def test_several_stacks(case):
    model = encoder_decoder.model()
    data = encoder_decoder.batches(3)
    assert_equal_training(case, data, model=model, tx=optax.adamw(1e-2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", [{**ALL_ON_HOST, "gather_ahead": True}, MIXED], ids=["ahead", "params_on_device"]
)
def test_frozen_leaves_stay(case):
    frozen = {
        "embed": {"table": True, "odd": False},
        "block": {"w1": True, "b1": True, "w2": False, "scale": False, "gate": False},
    }
    model = dataclasses.replace(toys.layered(), frozen=frozen)
    assert_equal_training(case, toys.batches(3), model=model)


@pytest.mark.by_default("all_on_host")
@pytest.mark.parametrize("case", [ALL_ON_HOST, MIXED], ids=["all_on_host", "params_on_device"])
def test_nothing_that_a_user_reads_is_stale(case):
    case = {**case, "clip_norm": 1.2}
    data = toys.batches(4)
    _, last = train(after := build("after_backward", toys.small(), **case), data[:3])
    _, state = train(program := build("in_forward", toys.small(), **case), data[:3])
    assert_close(program.eval(state, data[3]), after.eval(last, data[3]))
    assert_close(program.params(state), after.params(last))
    assert_close(read(program, state), read(after, last))
    with pytest.raises(ValueError, match=r"program\.settle\(state\)"):
        program.master_params(state)
    # Reading changed nothing: the state trains on, and settling it changes no later step.
    settled = program.settle(state)
    assert_same(arrays(settled), arrays(last))
    assert float(program.eval(settled, data[3])) == float(after.eval(last, data[3]))
    assert_same(program.params(settled), after.params(last))
    program.master_params(settled)
    settled = program.settle(settled)  # with nothing to apply
    rows, state = train(program, data[3:], settled)
    expected, last = train(after, data[3:], last)
    assert_same(rows, expected)
    assert_same(arrays(program.settle(state)), arrays(last))


def test_a_program_refuses_an_unsettled_state_of_another_program():
    _, state = train(build("in_forward", toys.small(), **ALL_ON_HOST), toys.batches(1))
    other = build("after_backward", toys.small(), **ALL_ON_HOST)
    for read_state in (other.params, lambda state: next(other.iter_params(state))):
        with pytest.raises(ValueError, match="of another program"):
            read_state(state)
    with pytest.raises(ValueError, match="by a program with update='in_forward'"):
        other.step(state, toys.batches(1)[0])


@pytest.mark.by_default("same")
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ({}, {}),
        ({}, {"update_on": "device"}),
        ({"update_on": "device"}, {}),
        ({}, {"params": "device", "grads": "device", "precision": "bf16"}),
    ],
    ids=["same", "to_device", "from_device", "other_tiers"],
)
def test_checkpoints_hold_the_pending_update(saved, restored, tmp_path):
    case = {**ALL_ON_HOST, "clip_norm": 1.2}
    data = toys.batches(4)
    program = build("in_forward", toys.small(), **{**case, **saved})
    _, state = train(program, data[:2])
    with zj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(program, state)
    expected, state = train(program, data[2:], state)
    other = build("in_forward", toys.small(), **{**case, **restored})
    with zj.Checkpointer(tmp_path) as checkpointer:
        state_after = checkpointer.restore(other)
    actual, state_after = train(other, data[2:], state_after)
    if saved == restored:
        assert_same(actual, expected)
        assert_same(arrays(other.settle(state_after)), arrays(program.settle(state)))
    else:
        rtol = 1e-2 if "precision" in restored else 1e-6
        for old, new in zip(expected, actual, strict=True):
            np.testing.assert_allclose(new["loss"], old["loss"], rtol=rtol)
    # A program with another update applies it during the restore.
    other = build("after_backward", toys.small(), **case)
    with zj.Checkpointer(tmp_path) as checkpointer:
        state_after = checkpointer.restore(other)
    actual, _ = train(other, data[2:], state_after)
    for old, new in zip(expected, actual, strict=True):
        np.testing.assert_allclose(new["loss"], old["loss"], rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changed",
    [{"clip_norm": None}, {"num_microbatches": 4}, {"precision": "bf16"}],
    ids=["no_clipping", "microbatches", "precision"],
)
def test_a_pending_update_keeps_the_factors_of_the_step_that_made_it(changed, tmp_path):
    case = {**ALL_ON_HOST, "clip_norm": 0.1, "num_microbatches": 2, "precision": "fp16"}
    case["loss_scaling"] = zj.LossScaling(initial=2.0**10)
    sgd = optax.sgd(0.1, momentum=0.9)
    program = build("in_forward", tx=sgd, **case)
    _, state = train(program, toys.batches(2))
    with zj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(program, state)
    expected = read(program, program.settle(state))
    other = build("in_forward", tx=sgd, **{**case, **changed})
    with zj.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(other)
    assert_same(read(other, other.settle(restored)), expected)


def test_the_host_updates_in_the_order_of_forward_and_only_inside_a_program(monkeypatch):
    updated = list[tuple[int, int]]()
    update_pending = delayed.update_pending

    def record(leaves: Any, device: int, leaf_ids: range, layer: int, *args: Any) -> None:
        if device == 0:
            updated.append((leaf_ids.start, layer))
        update_pending(leaves, device, leaf_ids, layer, *args)

    monkeypatch.setattr(delayed, "update_pending", record)
    program = build("in_forward", model=toys.small(), **ALL_ON_HOST)
    _, state = train(program, toys.batches(2))
    unstacked = program._runner.host.host.kernels
    first = next(n for n, kernel in enumerate(unstacked) if not kernel.stacked)
    assert updated == 2 * [(first, 0), (0, 0), (0, 1), (0, 2)]
    # A state that is dropped or donated between steps has no worker.
    assert not [t for t in threading.enumerate() if isinstance(t, delayed._Update)]
    program.settle(state)
    assert len(updated) == 12
    assert not [t for t in threading.enumerate() if isinstance(t, delayed._Update)]


def test_a_layer_waits_for_its_own_update_alone(monkeypatch):
    """The last layer's update ends after the first layer was installed."""
    program = build("in_forward", model=toys.small(), **ALL_ON_HOST)
    installed = threading.Event()
    late = list[bool]()
    install = delayed.DelayedStep.install
    update_pending = delayed.update_pending

    def note(*args: Any, **kwargs: Any) -> None:
        install(*args, **kwargs)
        if kwargs["first"] == 0:
            installed.set()

    def wait(leaves: Any, device: int, leaf_ids: range, layer: int, *args: Any) -> None:
        if leaf_ids.start == 0 and layer == toys.LAYERS - 1:
            late.append(installed.wait(60))
        update_pending(leaves, device, leaf_ids, layer, *args)

    monkeypatch.setattr(delayed.DelayedStep, "install", note)
    monkeypatch.setattr(delayed, "update_pending", wait)
    train(program, toys.batches(1))
    assert late == [True] * 4


def test_a_failed_update_is_raised_by_the_step_and_hangs_nothing(monkeypatch):
    program = build("in_forward", model=toys.small(), **ALL_ON_HOST)
    _, state = train(program, toys.batches(1))

    def fail(*args: Any) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(delayed, "update_pending", fail)
    with pytest.raises(RuntimeError, match="the state is lost"):
        program.step(state, toys.batches(1)[0])
    monkeypatch.undo()
    train(program, toys.batches(2))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"opt_state": HOST}, "precision='fp32' and params='device'"),
        ({**ALL_ON_HOST, "params": "nvme"}, "update_on='host' and params='nvme'"),
        ({**ALL_ON_HOST, "grads": "nvme"}, "update_on='host' and grads='nvme'"),
        ({**ALL_ON_HOST, "opt_state": "nvme"}, "update_on='host' and opt_state='nvme'"),
        ({**ALL_ON_HOST, "frozen": "nvme"}, "update_on='host' and frozen='nvme'"),
    ],
    ids=["no_master", "params", "grads", "opt_state", "frozen"],
)
def test_unsupported_settings_are_refused(fields, match, tmp_path):
    with pytest.raises(NotImplementedError, match=match):
        build("in_forward", **fields, swap_dir=str(tmp_path))


def test_a_delayed_update_in_forward_is_refused():
    with pytest.raises(ValueError, match="delayed_update=True needs"):
        build("in_forward", **ALL_ON_HOST, delayed_update=True)


@pytest.mark.by_default("params_on_device")
@pytest.mark.parametrize("case", [ALL_ON_HOST, MIXED], ids=["all_on_host", "params_on_device"])
def test_operations_and_bytes(case):
    program = build("in_forward", **case)
    batch = toys.batches(1)[0]
    steps = program.operations(batch)
    after = build("after_backward", **case).operations(batch)
    names = [part.name for part in steps.phases]
    assert names.index("unstacked") < names.index("embed")
    assert "update" not in names
    assert "forward: callbacks move new parameters up\n" in str(toys.layer_schedule(program))
    (forward,) = (part.phase for part in steps.phases if part.name == "forward")
    ops = [(op.verb, op.record.kind) for loop in forward.loops for op in loop.ops]
    waits = ops.index(("host_update", "opt_state"))
    assert waits < ops.index(("load", "made")) < ops.index(("compute", "layer"))
    for lane in ("up", "down"):
        assert steps.moved(lane) == after.moved(lane)

    report = program.memory(batch)
    host = program._runner.host.host
    _, state = train(program, toys.batches(1))
    before = dataclasses.replace(host.traffic)
    _, state = train(program, toys.batches(1), state)
    moved = {way: getattr(host.traffic, way) - getattr(before, way) for way in report.callback_link}
    assert moved == {way: 4 * n for way, n in report.callback_link.items()}
    held = [a for a in jax.tree.leaves(state) if a.sharding.memory_kind == HOST]
    num_bytes = sum(a.addressable_shards[0].data.nbytes for a in held)
    assert report.host_argument_bytes == num_bytes
    made = {id(a): a.nbytes for a in host.new_params.values()}
    if case is MIXED:
        assert sum(made.values()) == 4 * report.tiers[HOST]["made"]
    else:
        assert report.tiers[HOST]["made"] == 0


def find_sources(text: str, shape: str) -> list[str]:
    """Return where each loop of a compiled program takes a value of a shape from: the operation."""
    instructions = dict[str, tuple[str, str, list[str], str]]()
    for line in text[text.index("\nENTRY") :].splitlines():
        if found := re.match(r"\s*(?:ROOT )?(%\S+) = (.*?) ([a-z-]+)\((.*)", line):
            name, kind, verb, operands = found.groups()
            names = re.findall(r"%[\w.-]+", operands.split("), ")[0])
            instructions[name] = (kind, verb, names, line)
    sources = list[str]()
    for _, verb, operands, _ in list(instructions.values()):
        if verb != "while":
            continue
        for name in instructions[operands[0]][2]:
            kind, verb, operands, line = instructions[name]
            while kind.startswith(shape) and verb not in ("parameter", "while"):
                assert verb == "get-tuple-element"
                _, verb, operands, _ = instructions[operands[-1]]
                if verb == "tuple":
                    name = operands[int(re.findall(r"index=(\d+)", line)[-1])]
                    kind, verb, operands, line = instructions[name]
            if kind.startswith(shape):
                sources.append(verb)
    return sources


@pytest.mark.by_default("plain")
@pytest.mark.parametrize("gather_ahead", [False, True], ids=["plain", "gather_ahead"])
def test_backward_reads_what_forward_passed_on_when_compiled_for_a_gpu(gather_ahead):
    config = zj.ZeroConfig(
        update="in_forward",
        update_on="host",
        clip_norm=1.0,
        precision="bf16",
        gather_ahead=gather_ahead,
        **ALL_ON_HOST,
    )
    mesh = aot.gpu_mesh("h200", gpus_per_host=1)
    program = zj.build_train_step(toys.small(), optax.adamw(1e-3), config, mesh)
    assert toys.layer_schedule(program).phase("forward").fetches == ()
    # Kernels overwrite the stack without XLA's knowledge. Only forward's loop takes it from the
    # program's arguments, so that loops of backward run after the callbacks of forward's.
    text = program.lower(toys.batches(1)[0]).compile().as_text()
    sources = find_sources(text, "bf16[3,16,16]{2,1,0:S(5)}")
    assert sources == ["parameter", *["while"] * (len(sources) - 1)]
    assert len(sources) > 2


@pytest.mark.exhaustive
def test_activations_on_a_disk(tmp_path):
    case = {**ALL_ON_HOST, "clip_norm": 1.2, "activations": "nvme"}
    data = toys.batches(3)
    _, last = train(build("after_backward", **{**case, "activations": HOST}), data)
    with build("in_forward", **case, swap_dir=str(tmp_path)) as program:
        _, state = train(program, data[:2])
        assert np.isfinite(float(program.eval(state, data[2])))
        _, state = train(program, data[2:], program.settle(state))
        assert_same(arrays(program.settle(state)), arrays(last))
