"""`autotune` compiles a step with several schedule settings and chooses by their predictions."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
import toys

import zerojax as zj
from zerojax import aot
from zerojax.planner import tuning
from zerojax.state import state_records
from zerojax.streamed import StreamedStep

HOST = "pinned_host"
IN_BACKWARD = {"opt_state": HOST, "update": "in_backward"}


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A stand-in for a simulation."""

    seconds: float
    idle: float = 0.25
    floor_seconds: float = 0.5


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A stand-in for a lowered step, which takes a second to create."""

    text: str

    def as_text(self):
        return self.text


def lower(program, batch):
    return Lowered(f"{program.config.prefetch_distance} {program.config.link_groups}")


def tuned(
    monkeypatch, fields, seconds, num_bytes=lambda config: 100, linear=True, lowers=False, **options
):
    """Return the choice if a config takes `seconds(config)`, and the settings in trial order."""
    tried = []

    def predicted(config, lowered, rates):
        tried.append((config.prefetch_distance, config.link_groups))
        return tuning.TunedStep(
            config=config, simulation=Predicted(seconds(config)), num_bytes=num_bytes(config)
        )

    monkeypatch.setattr(tuning, "_predicted", predicted)
    if not lowers:
        monkeypatch.setattr(zj.Program, "lower", lower)
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: linear)
    config = zj.ZeroConfig(precision="bf16", activations="remat", **fields)
    mesh = aot.gpu_mesh("h200", gpus_per_host=1)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), toys.batches(1)[0])
    options = {"groups": (2, 10)} | options
    return zj.autotune(toys.layered(), optax.adamw(1e-3), config, mesh, batch, **options), tried


def test_settings_are_tried_where_the_step_has_a_use_for_them(monkeypatch):
    flat = lambda config: 1.0  # noqa: E731
    groups = [(1, 2), (1, 10)]
    assert tuned(monkeypatch, {}, flat)[1] == [(1, None)]
    assert tuned(monkeypatch, IN_BACKWARD, flat)[1] == [(1, None), *groups]
    assert tuned(monkeypatch, IN_BACKWARD, flat, linear=False)[1] == [
        (1, None)
    ]  # by kernels, one way at a time
    assert tuned(monkeypatch, {"opt_state": HOST, "params": HOST}, flat, linear=False)[1] == [
        (1, None),
        (2, None),
        (4, None),
    ]
    after = {"opt_state": HOST}  # an update after backward
    assert tuned(monkeypatch, after, flat, groups=(3, 4))[1] == [(1, None), (1, 3), (1, 4)]
    fetching = {"params": HOST, **IN_BACKWARD}
    assert tuned(monkeypatch, fetching, flat)[1] == [(1, None), (2, None), (4, None), *groups]
    assert tuned(monkeypatch, fetching, flat, distances=(1, 3), groups=(2,))[1] == [
        (1, None),
        (3, None),
        (1, 2),
    ]


def test_settings_that_make_the_same_program_are_compiled_once(monkeypatch):
    """There are at most as many groups as arrays."""
    found = tuned(monkeypatch, IN_BACKWARD, lambda config: 1.0, lowers=True, groups=(3, 50, 100))
    assert found[1][1:] == [(1, 3), (1, 50)]


def test_the_fastest_that_fits_is_chosen(monkeypatch):
    fields = {"params": HOST, **IN_BACKWARD}

    def seconds(config):
        return {1: 1.0, 2: 0.9, 4: 0.5}[config.prefetch_distance] - 0.01 * (config.link_groups or 0)

    def num_bytes(config):
        return 10 * config.prefetch_distance

    found, _ = tuned(monkeypatch, fields, seconds, num_bytes)
    assert (found.config.prefetch_distance, found.config.link_groups) == (4, 10)
    found, _ = tuned(monkeypatch, fields, seconds, num_bytes, device_bytes=20)
    assert (found.config.prefetch_distance, found.config.link_groups) == (2, 10)
    lines = str(found).splitlines()
    assert lines[0].startswith(
        "predicted from 5 compiled programs at assumed rates, such as 55 GB/s of the link each way"
    )
    assert lines[2].split() == ["1", "default", "1,000.000", "25", "%", "500.000", "0.0"]
    assert [line.endswith("more than the device's 0.0") for line in lines[2:]] == [
        n == 2 for n in range(5)
    ]
    assert [line.endswith("<- fastest") for line in lines[2:]] == [n == 4 for n in range(5)]
    with pytest.raises(
        ValueError, match="no setting fits: the smallest takes 10 bytes of the device, which has 9"
    ):
        tuned(monkeypatch, fields, seconds, num_bytes, device_bytes=9)


def test_settings_that_cannot_be_built_are_told_and_not_chosen(monkeypatch):
    fields = {"params": HOST, **IN_BACKWARD}
    with zj.build_train_step(
        toys.layered(), optax.adamw(1e-3), zj.ZeroConfig(precision="bf16", activations="remat", **fields),
        aot.gpu_mesh("h200", gpus_per_host=1),
    ) as program:  # fmt: skip
        most = program.operations(toys.batches(1)[0]).peak_bytes
    budget = {"device_budget_bytes": most}
    found, tried = tuned(
        monkeypatch, fields | budget, lambda config: 1 / config.prefetch_distance, linear=False
    )
    assert tried == [(1, None)]
    assert [
        (config.prefetch_distance, f"device_budget_bytes={most}: " in why)
        for config, why in found.refused
    ] == [
        (2, True),
        (4, True),
    ]
    assert str(found).splitlines()[3].split()[:4] == ["2", "default", "not", "built:"]
    with pytest.raises(ValueError, match=r"device_budget_bytes=1: .*nothing fits"):
        tuned(monkeypatch, fields | {"device_budget_bytes": 1}, lambda config: 1.0, linear=False)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"groups": 4}, "groups=4: pass a sequence of values of link_groups"),
        ({"groups": (1,)}, "link_groups=1: an integer of at least 2"),
        ({"distances": "12"}, "distances='12': pass a sequence"),
        ({"distances": (-1,)}, "prefetch_distance=-1"),
        ({"device_bytes": "60e9"}, "device_bytes='60e9': an integer"),
        ({"rates": "l5"}, r"rates .l5. are unknown: .* zerojax.machine\(.lab.toml.\).rates\(\)"),
        ({"rates": zj.machine("l4")}, "rates of type Machine are unknown"),
    ],
)
def test_arguments_are_checked_before_anything_is_compiled(wrong, told, monkeypatch):
    monkeypatch.setattr(tuning, "build_train_step", None)
    with pytest.raises(ValueError, match=told):
        tuned(monkeypatch, IN_BACKWARD, None, **wrong)


def test_a_step_without_settings_says_so(monkeypatch):
    assert str(tuned(monkeypatch, {}, lambda config: 1.0)[0]).endswith(
        "no setting of the schedule changes this step"
    )


def test_a_gain_within_rounding_changes_nothing(monkeypatch):
    found, _ = tuned(
        monkeypatch, IN_BACKWARD, lambda config: 1 - 0.0004 * (config.link_groups or 0)
    )
    assert found.config.link_groups is None
    assert found.device_bytes == zj.machine("h200").device_bytes  # of the described chip


def test_meshes_of_cpus_and_of_several_gpus_are_refused():
    config, batch = zj.ZeroConfig(**IN_BACKWARD), toys.batches(1)[0]
    for mesh, told in (
        (zj.make_mesh(devices=jax.devices()[:1]), "has 1 of platform 'cpu'"),
        (aot.gpu_mesh("h200", gpus_per_host=2), "has 2 of platform 'gpu'"),
    ):
        with pytest.raises(NotImplementedError, match=told):
            zj.autotune(toys.layered(), optax.adamw(1e-3), config, mesh, batch)


def test_link_groups_are_checked():
    for wrong in (1, True, 2.0, "4"):
        with pytest.raises(ValueError, match=r"link_groups=.*: an integer of at least 2"):
            zj.ZeroConfig(link_groups=wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.exhaustive
def test_link_groups_change_no_number(monkeypatch):
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    losses = []
    for groups in (None, 2, 3):
        config = zj.ZeroConfig(link_groups=groups, **IN_BACKWARD)
        with zj.build_train_step(
            toys.layered(), optax.adamw(1e-2), config, zj.make_mesh(devices=jax.devices()[:1])
        ) as program:
            losses.append(toys.run(program, program.init(jax.random.key(0)), toys.batches(2))[0])
            step = program._step
            assert isinstance(step, StreamedStep)
            assert groups in (None, step.plan.link_groups(step.plan.stacked))
    assert jnp.allclose(jnp.asarray(losses), jnp.asarray(losses[0]), rtol=1e-6)
