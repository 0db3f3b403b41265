"""An update in the next step's forward equals an update after backward, and nothing is stale."""

import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import jax
import matrix
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax import aot
from zerojax.checkpoint.manifest import SavedState
from zerojax.config import require_built
from zerojax.program.updated_records import RecordSettler
from zerojax.state import state_records

pytestmark = pytest.mark.xdist_group("update_in_forward")  # which share a program
HOST = "pinned_host"
STEPS = 6
ALL_ON_HOST = {"params": HOST, "grads": HOST, "opt_state": HOST}
CASES = {
    "all_on_host": {**ALL_ON_HOST, "clip_norm": 1.2},
    "bf16_opt_state_on_host": {"opt_state": HOST, "precision": "bf16", "clip_norm": 1.2},
    "gather_ahead": {**ALL_ON_HOST, "gather_ahead": True, "clip_norm": 1.2, "num_microbatches": 2},
    "opt_state_on_host_gather_ahead": {
        "params": HOST,
        "opt_state": HOST,
        "gather_ahead": True,
        "precision": "bf16",
        "clip_norm": 1.2,
    },
    "no_prefetch": {**ALL_ON_HOST, "prefetch_distance": 0},
    "two_ahead": {"params": HOST, "opt_state": HOST, "prefetch_distance": 2, "clip_norm": 1.2},
}


def build(update: str, model: Any = None, tx: Any = None, **fields: Any) -> zj.Program:
    config = zj.ZeroConfig(**{"stage": 3, "update": update, **fields})
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    return zj.build_train_step(model or toys.layered(), tx or toys.optimizer(), config, mesh)


@functools.cache
def build_on_host(update: str) -> zj.Program:
    """Return a program that several tests share: all on the host, with clipping."""
    return build(update, **CASES["all_on_host"])


def train(program: zj.Program, data: list[Any], state: Any = None) -> tuple[list[dict], Any]:
    """Return the metrics of each step, and the last state."""
    state = program.init(jax.random.key(0)) if state is None else state
    rows = []
    for batch in data:
        state, metrics = jax.block_until_ready(program.step(state, batch))
        rows.append({name: np.asarray(value) for name, value in metrics.items()})
    return rows, state


def read(program: zj.Program, state: Any) -> Any:
    return {name: jax.device_get(tree) for name, tree in program.iter_params(state)}


def assert_close(actual: Any, expected: Any) -> None:
    """Assert differences of at most 1e-6 of each leaf's largest number.

    A read of an unsettled state computes the update in a program of its own, in which XLA for CPUs
    may fuse a product and a sum that the step rounds separately.
    """

    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b)))

    jax.tree.map(check, actual, expected)


def assert_same(case: dict[str, Any], data: list[Any], **kwargs: Any) -> list[dict]:
    """Assert equal metrics in every step and equal parameters after the last, bit for bit."""
    shares = not kwargs and case == CASES["all_on_host"]
    build_case = build_on_host if shares else functools.partial(build, **kwargs, **case)
    expected, last = train(after := build_case("after_backward"), data)
    actual, state = train(program := build_case("in_forward"), data)
    for old, new in zip(expected, actual, strict=True):
        assert old.keys() == new.keys()
        for name in old:
            np.testing.assert_array_equal(old[name], new[name], err_msg=name)
    assert_close(read(program, state), read(after, last))
    settled = read(program, program.settle(state))
    jax.tree.map(np.testing.assert_array_equal, settled, read(after, last))
    return actual


@pytest.mark.by_default("all_on_host")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_an_update_after_backward(case):
    rows = assert_same(case, toys.batches(STEPS))
    if "clip_norm" in case:  # the norm is clipped in some steps and not in others
        assert {bool(row["grad_norm"] > case["clip_norm"]) for row in rows} == {True, False}


@pytest.mark.usefixtures("default_fusions")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", [{}, {"stage": 2, "grads": HOST, "opt_state": HOST}], ids=["device", "stage_2"]
)
def test_parameters_on_the_device_change_no_more_than_the_last_places(case):
    case = {"model": toys.small(), "clip_norm": 0.4, **case}
    expected, _ = train(build("after_backward", **case), toys.batches(3))
    actual, _ = train(build("in_forward", **case), toys.batches(3))
    for old, new in zip(expected, actual, strict=True):
        np.testing.assert_allclose(old["loss"], new["loss"], rtol=1e-6)


def test_steps_that_overflow_are_skipped():
    data = toys.batches(STEPS)
    data[1] = {**data[1], "weight": np.float32(np.nan)}
    scaling = zj.LossScaling(initial=2.0**20)
    case = {**ALL_ON_HOST, "precision": "fp16", "loss_scaling": scaling}
    rows = assert_same({**case, "clip_norm": 0.4}, data, model=toys.small())
    assert int(rows[-1]["skipped_steps"]) >= 2  # the NaN, and at least one overflow


def test_optimizers_that_update_whole_leaves_or_average_the_weights():
    muon = optax.contrib.muon(1e-2)
    assert_same(ALL_ON_HOST, toys.batches(3), model=toys.small(), tx=muon)
    tx = optax.chain(optax.adamw(1e-2), zj.Ema(0.9))
    data = toys.batches(3)
    case = {"model": toys.small(), "tx": tx, **ALL_ON_HOST}
    _, last = train(after := build("after_backward", **case), data)
    _, state = train(program := build("in_forward", **case), data)
    expected = dict(after.iter_params(last, ema=True))
    actual = dict(program.iter_params(state, ema=True))
    assert_close(actual, expected)
    with pytest.raises(ValueError, match=r"program\.settle\(state\)"):
        program.ema_params(state)
    state = program.settle(state)
    averages = program.ema_params(state)
    assert_close(averages, after.ema_params(last))
    # The documented way to evaluate with the averages.
    loss = program.eval(dataclasses.replace(state, params=averages), data[0])
    expected_state = dataclasses.replace(last, params=after.ema_params(last))
    assert float(loss) == float(after.eval(expected_state, data[0]))


def test_nothing_that_a_user_reads_is_stale(tmp_path):
    data = toys.batches(4)
    _, last = train(after := build_on_host("after_backward"), data[:3])
    _, state = train(program := build_on_host("in_forward"), data[:3])
    assert float(program.eval(state, data[3])) == float(after.eval(last, data[3]))
    assert_close(program.params(state), after.params(last))
    with pytest.raises(ValueError, match=r"program\.settle\(state\)"):
        program.master_params(state)
    # Reading changed nothing: the state trains on, and settling it changes no later step.
    settled = program.settle(state)
    jax.tree.map(np.testing.assert_array_equal, program.params(settled), after.params(last))
    program.master_params(settled)
    rows, _ = train(program, data[3:], settled)
    expected, _ = train(after, data[3:], last)
    assert rows[0]["loss"] == expected[0]["loss"]


SAVED = {
    "all_on_host": ("in_forward", ALL_ON_HOST, None),
    "bounded": ("in_forward", {"params": HOST, "opt_state": HOST}, 0),
    "after_backward": ("after_backward", {"params": HOST}, None),
    "nvme": ("after_backward", dict.fromkeys(("params", "grads", "opt_state"), "nvme"), None),
    "in_backward": ("in_backward", {**ALL_ON_HOST, "clip_norm": None}, None),
}


@pytest.mark.by_default("nvme")
@pytest.mark.parametrize(("update", "tiers", "most"), SAVED.values(), ids=SAVED)
def test_a_checkpoint_holds_updated_records_for_any_program(update, tiers, most, tmp_path):
    case = {"clip_norm": tiers.get("clip_norm", 1.2)}
    data = toys.batches(4)
    clips = case["clip_norm"] is not None
    program = build_on_host("in_forward") if clips else build("in_forward", **ALL_ON_HOST)
    _, state = train(program, data[:2])
    with zj.Checkpointer(tmp_path / "saved", max_host_bytes=most) as checkpointer:
        checkpointer.save(program, state)
        expected, last = train(program, data[2:], state)
    with SavedState(str(tmp_path / "saved" / "2" / "state")) as saved:
        assert not [name for name in (*saved.leaves, *saved.values) if name.startswith("pending")]
    with (
        build(update, swap_dir=str(tmp_path), **{**tiers, **case}) as other,
        zj.Checkpointer(tmp_path / "saved") as checkpointer,
    ):
        restored = checkpointer.restore(other)
        actual, end = train(other, data[2:], restored)
        assert [row["loss"] for row in actual] == [row["loss"] for row in expected]
        settled = read(program, program.settle(last))
        jax.tree.map(np.testing.assert_array_equal, read(other, other.settle(end)), settled)


def test_a_checkpoint_holds_the_gradients_if_an_update_combines_elements(tmp_path):
    """Another program may compute such an update in another order."""
    case = {**ALL_ON_HOST, "clip_norm": 1.2}
    tx = optax.contrib.muon(1e-2)
    data = toys.batches(4)
    program = build("in_forward", model=toys.small(), tx=tx, **case)
    _, state = train(program, data[:2])
    with zj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(program, state)
    expected, _ = train(program, data[2:], state)
    other = build("in_forward", model=toys.small(), tx=tx, params=HOST, clip_norm=1.2)
    with zj.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(other)
    assert bool(restored.pending.ready)
    actual, _ = train(other, data[2:], restored)
    assert [row["loss"] for row in actual] == [row["loss"] for row in expected]


@pytest.mark.by_default("microbatches")
@pytest.mark.parametrize(
    "changed",
    [{"clip_norm": None}, {"num_microbatches": 4}, {"precision": "bf16"}],
    ids=["no_clipping", "microbatches", "precision"],
)
def test_a_pending_update_keeps_the_factors_of_the_step_that_made_it(
    changed, tmp_path, monkeypatch
):
    """In a checkpoint as an earlier version saved it, with the gradients."""
    monkeypatch.setattr(RecordSettler, "is_exact", False)
    case = {**ALL_ON_HOST, "clip_norm": 0.1, "num_microbatches": 2, "precision": "fp16"}
    case["loss_scaling"] = zj.LossScaling(initial=2.0**10)
    sgd = optax.sgd(0.1)
    case |= {"model": toys.small(), "tx": sgd}
    program = build("in_forward", **case)
    _, state = train(program, toys.batches(2))
    with zj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(program, state)
    expected = read(program, program.settle(state))
    other = build("in_forward", **{**case, **changed})
    with zj.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(other)
    assert_close(read(other, other.settle(restored)), expected)


def test_exports_refuse_what_is_not_settled(tmp_path, monkeypatch):
    program = build("in_forward", toys.small(), **ALL_ON_HOST)
    _, state = train(program, toys.batches(2))
    with monkeypatch.context() as patch:
        patch.setattr(RecordSettler, "is_exact", False)  # save the gradients
        with zj.Checkpointer(tmp_path / "unsettled") as checkpointer:
            checkpointer.save(program, state)
    with pytest.raises(zj.CheckpointError, match=r"program\.settle\(state\)"):
        zj.export_safetensors(tmp_path / "unsettled", tmp_path / "out.safetensors")
    with zj.Checkpointer(tmp_path / "updated") as checkpointer:
        checkpointer.save(program, state)
    state = program.settle(state)
    with zj.Checkpointer(tmp_path / "settled") as checkpointer:
        checkpointer.save(program, state)
    for name in ("updated", "settled"):
        zj.export_safetensors(tmp_path / name, tmp_path / f"{name}.safetensors")
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("updated", "settled")]
    assert files[0] == files[1]


def test_a_program_refuses_an_unsettled_state_of_another_program():
    _, state = train(program := build_on_host("in_forward"), toys.batches(1))
    other = build_on_host("after_backward")
    with pytest.raises(ValueError, match="of another program"):
        other.params(state)
    with pytest.raises(ValueError, match="of another program"):
        other.settle(state)
    with pytest.raises(ValueError, match="of another program"):
        next(other.iter_params(state))
    named = "by a program with update='in_forward', .* save the state with a zerojax.Checkpointer"
    with pytest.raises(ValueError, match=named):
        other.step(program.settle(state), toys.batches(1)[0])
    state = other.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"by a program with update='after_backward' or"):
        program.step(state, toys.batches(1)[0])


@pytest.mark.by_default("all_ahead")
@pytest.mark.parametrize(
    "case",
    [
        {"opt_state": HOST, "precision": "bf16"},
        {**ALL_ON_HOST, "gather_ahead": True, "prefetch_distance": 2},
        {**ALL_ON_HOST, "num_microbatches": 2, "precision": "bf16"},
    ],
    ids=["opt_state", "all_ahead", "microbatches"],
)
def test_storing_a_record_while_the_next_is_loaded_changes_no_number(case, monkeypatch):
    data = toys.batches(3)

    def trained():
        program = build("in_forward", toys.small(), **case, clip_norm=0.4)
        rows, state = train(program, data)
        return [row["loss"] for row in rows], read(program, program.settle(state))

    losses, params = trained()
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    beside_losses, beside_params = trained()
    np.testing.assert_allclose(beside_losses, losses, rtol=1e-6)
    assert_close(beside_params, params)


def test_it_builds_for_a_gpu_that_copies_both_ways():
    config = zj.ZeroConfig(update="in_forward", precision="bf16", opt_state=HOST, clip_norm=1.0)
    mesh = aot.gpu_mesh("h200", gpus_per_host=1)
    program = zj.build_train_step(toys.small(), optax.adamw(1e-3), config, mesh)
    forward = toys.layer_schedule(program).phase("forward")
    assert forward.stores_late == 0
    assert "opt_state" in forward.fetches


@pytest.mark.exhaustive
def test_settled_checkpoints_restore_into_any_update(tmp_path):
    data = toys.batches(4)
    case = {**ALL_ON_HOST, "clip_norm": 1.2}
    program = build("in_forward", **case)
    _, state = train(program, data[:2])
    state = program.settle(state)
    with zj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(program, state)
    expected, _ = train(program, data[2:], state)
    for update in ("after_backward", "in_forward"):
        other = build(update, **case)
        with zj.Checkpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore(other)
        actual, _ = train(other, data[2:], restored)
        assert [row["loss"] for row in actual] == [row["loss"] for row in expected]


@pytest.mark.by_default("masters_on_device")
@pytest.mark.parametrize(
    "case",
    [{"params": HOST, "precision": "bf16"}, {"params": HOST, "gather_ahead": True}],
    ids=["masters_on_device", "gather_ahead"],
)
def test_an_evaluation_loads_parameters_that_a_step_only_stores(case):
    data = toys.batches(2)
    losses = []
    for update in ("after_backward", "in_forward"):
        program = build(update, toys.small(), **case)
        _, state = train(program, data[:1])
        losses.append(float(program.eval(program.settle(state), data[1])))
    assert losses[0] == losses[1]


def test_settle_returns_other_states_unchanged():
    program = build("after_backward", opt_state=HOST)
    state = program.init(jax.random.key(0))
    assert program.settle(state) is state


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"update_on": "host", "opt_state": HOST}, "update_on='host'"),
    ],
)
def test_unsupported_settings_are_refused(fields, match):
    with pytest.raises(NotImplementedError, match=match):
        build("in_forward", **fields)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="update='in_forward'"):
        zj.build_train_step(
            toys.unrolled(),
            toys.optimizer(),
            zj.ZeroConfig(update="in_forward"),
            zj.make_mesh(fsdp=4, devices=jax.devices()[:4]),
        )


def test_operations_update_a_layer_before_it_is_computed():
    program = build_on_host("in_forward")
    steps = program.operations(toys.batches(1)[0])
    names = [part.name for part in steps.phases]
    assert names.index("unstacked") < names.index("embed")
    assert "update" not in names
    (forward,) = (part.phase for part in steps.phases if part.name == "forward")
    verbs = [op.verb for loop in forward.loops for op in loop.ops]
    assert verbs.index("update") < verbs.index("compute")
    after = build_on_host("after_backward").operations(toys.batches(1)[0])
    # fp32 parameters are their own masters: an update after backward loads them once more.
    assert steps.moved("up") < after.moved("up")
    assert steps.moved("down") == after.moved("down")


FACTORS: dict[str, tuple[Any, ...]] = {
    "tiers": tuple(itertools.product(*(matrix.AXES[name] for name in ALL_ON_HOST))),
    "trouble": ("none", "clip", "fp16", "nan"),
    "update_on": ("device", "host"),
    "optimizer": ("adamw", "muon", "ema"),
}
"""What is combined by pairs: all tiers, and what makes an update differ from step to step."""
HALF = {"adamw": 1.5, "muon": 4.69, "ema": 1.5}
"""Norms by optimizer that about half of ten steps exceed."""


def optimizer_of(name: str) -> optax.GradientTransformation:
    if name == "muon":
        return optax.contrib.muon(1e-2)
    tx = toys.optimizer()
    return optax.chain(tx, zj.Ema(0.9)) if name == "ema" else tx


def fields_of(case: dict[str, Any], folder: pathlib.Path | None = None) -> dict[str, Any]:
    """Return the fields of a case's config, without `update`."""
    fields = {"update_on": case["update_on"], "swap_dir": folder}
    fields |= dict(zip(ALL_ON_HOST, case["tiers"], strict=True))
    if case["trouble"] == "clip":
        fields["clip_norm"] = HALF[case["optimizer"]]
    if case["trouble"] == "fp16":
        scaling = zj.LossScaling(initial=2.0**20, growth_interval=3)
        fields |= {"precision": "fp16", "loss_scaling": scaling}
    if case["trouble"] == "nan":
        fields["num_microbatches"] = 2
    return fields


@functools.cache
def accepts_optimizer(update_on: str, optimizer: str) -> bool:
    try:
        build("in_forward", tx=optimizer_of(optimizer), update_on=update_on, **ALL_ON_HOST)
    except ValueError:
        return False
    return True


def is_built(case: dict[str, Any]) -> bool:
    """Return whether an update in forward and an update after backward support a case."""
    try:
        for update in ("in_forward", "after_backward"):
            config = zj.ZeroConfig(
                stage=3, update=update, **fields_of(case, pathlib.Path("unused"))
            )
            require_built(config)
    except (ValueError, NotImplementedError):
        return False
    return accepts_optimizer(case["update_on"], case["optimizer"])


@functools.cache
def cases_of_every_pair() -> list[dict[str, Any]]:
    """Choose cases greedily until they cover every pair of values of two factors."""
    every = [
        dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())
    ]
    return matrix.pairwise([case for case in every if is_built(case)])


def data_of(case: dict[str, Any]) -> list[Any]:
    data = toys.batches(11)
    if case["trouble"] == "nan":
        for n in (4, 7):  # the first one is the last step before a checkpoint
            data[n]["features"][0, 0] = np.nan  # one row, and so one microbatch
    return data


@dataclasses.dataclass
class Trained:
    """The numbers of ten steps, with a read, an evaluation and a checkpoint in the middle."""

    rows: list[dict]
    evals: list[float]
    middle: Any
    params: Any


def numbers_of(update: str, case: dict[str, Any], folder: pathlib.Path) -> Trained:
    data = data_of(case)
    tx = optimizer_of(case["optimizer"])
    (swap := folder / "swap").mkdir()
    with build(update, tx=tx, **fields_of(case, swap)) as program:
        rows, state = train(program, data[:5])
        evals = [float(program.eval(state, data[10]))]
        on_disk = case["tiers"][0] == matrix.DISK  # where `params` returns records, not arrays
        middle = read(program, state) if on_disk else jax.device_get(program.params(state))
        with zj.Checkpointer(folder / "saved") as checkpointer:
            checkpointer.save(program, state)
        with zj.Checkpointer(folder / "saved") as checkpointer:
            state = checkpointer.restore(program)
        more, state = train(program, data[5:10], state)
        state = program.settle(state)
        evals.append(float(program.eval(state, data[10])))
        params = [read(program, state)]
        if case["optimizer"] == "ema":
            params.append(dict(jax.device_get(list(program.iter_params(state, ema=True)))))
    return Trained(rows + more, evals, middle, params)


def assert_trouble(case: dict[str, Any], rows: list[dict]) -> None:
    """Assert that about half of the steps are clipped, or that some are skipped."""
    if case["trouble"] == "clip":
        clipped = sum(bool(row["grad_norm"] > HALF[case["optimizer"]]) for row in rows)
        assert 4 <= clipped <= 6
    elif case["trouble"] == "none":
        assert "skipped_steps" not in rows[-1] or not int(rows[-1]["skipped_steps"])
    else:
        assert int(rows[-1]["skipped_steps"]) >= 2


def is_exact(case: dict[str, Any]) -> bool:
    """Return whether both updates round alike: XLA fuses some sums of device parameters."""
    return case["tiers"][0] != "device"


def largest_difference(actual: Trained, expected: Trained) -> float:
    """Return the largest difference of a number, relative to its leaf's largest.

    What an unsettled state gives in the middle is compared within 1e-6 here.
    """

    def difference(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        a, b = np.nan_to_num(a, posinf=0, neginf=0), np.nan_to_num(b, posinf=0, neginf=0)
        return float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1))

    names = [name for name in expected.rows[0] if not name.startswith("swap_")]
    actual_rows = [[row[name] for name in names] for row in actual.rows]
    expected_rows = [[row[name] for name in names] for row in expected.rows]
    assert_close(actual.middle, expected.middle)
    np.testing.assert_allclose(actual.evals, expected.evals, rtol=1e-6)
    ends = (actual_rows, actual.params), (expected_rows, expected.params)
    return max(jax.tree.leaves(jax.tree.map(difference, *ends)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("trouble", FACTORS["trouble"])
@pytest.mark.parametrize("tiers", FACTORS["tiers"], ids="-".join)
def test_every_pair_equals_an_update_after_backward(tiers, trouble, tmp_path, record_property):
    cases = [
        case
        for case in cases_of_every_pair()
        if (case["tiers"], case["trouble"]) == (tiers, trouble)
    ]
    assert cases
    for case in cases:
        (after_folder := tmp_path / case["update_on"] / "after").mkdir(parents=True)
        (forward_folder := tmp_path / case["update_on"] / "forward").mkdir()
        after = numbers_of("after_backward", case, after_folder)
        forward = numbers_of("in_forward", case, forward_folder)
        assert_trouble(case, after.rows)
        worst = largest_difference(forward, after)
        record_property("-".join([case["update_on"], case["optimizer"]]), worst)
        assert worst <= (0.0 if is_exact(case) else 1e-6)
