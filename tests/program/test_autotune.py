"""`autotune` compiles a step with several settings of its schedule, and chooses by what is predicted of each."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
import toys

import zerojax as zj
from zerojax import aot
from zerojax.program import tuning
from zerojax.state import state_records
from zerojax.streamed import StreamedStep

HOST = "pinned_host"
IN_BACKWARD = {"opt_state": HOST, "update": "in_backward"}


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Stands for a simulation."""

    seconds: float
    idle: float = 0.25
    floor_seconds: float = 0.5


def tuned(monkeypatch, fields, seconds, num_bytes=lambda config: 100, linear=True, **options):
    """Return what is chosen if a config takes `seconds(config)`, and the settings in the order in which they were tried."""
    tried = []

    def predicted(program, batch, rates):
        config = program.config
        tried.append((config.prefetch_distance, config.link_groups))
        return tuning.TunedStep(config=config, simulation=Predicted(seconds(config)), num_bytes=num_bytes(config))

    monkeypatch.setattr(tuning, "_predicted", predicted)
    monkeypatch.setattr(state_records, "takes_linear_slices", lambda mesh: linear)
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
    assert tuned(monkeypatch, IN_BACKWARD, flat, linear=False)[1] == [(1, None)]  # by kernels, one way at a time
    assert tuned(monkeypatch, {"opt_state": HOST, "params": HOST}, flat, linear=False)[1] == [(1, None), (2, None), (4, None)]
    assert tuned(monkeypatch, {"opt_state": HOST}, flat)[1] == [(1, None), *groups]  # an update after backward
    fetching = {"params": HOST, **IN_BACKWARD}
    assert tuned(monkeypatch, fetching, flat)[1] == [(1, None), (2, None), (4, None), *groups]
    assert tuned(monkeypatch, fetching, flat, distances=(1, 3), groups=(2,))[1] == [(1, None), (3, None), (1, 2)]


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
    assert "predicted at assumed rates from 5 compiled programs; nothing here was measured" in lines[0]
    assert lines[2].split() == ["1", "default", "1.0000", "25", "%", "0.5000", "0.00"]
    assert [line.endswith("more than the device's 0.00") for line in lines[2:]] == [n == 2 for n in range(5)]
    assert [line.endswith("<- fastest") for line in lines[2:]] == [n == 4 for n in range(5)]
    with pytest.raises(ValueError, match="no setting fits: the least takes 10 bytes of the device, which has 9"):
        tuned(monkeypatch, fields, seconds, num_bytes, device_bytes=9)


def test_a_gain_within_rounding_changes_nothing(monkeypatch):
    found, _ = tuned(monkeypatch, IN_BACKWARD, lambda config: 1 - 0.0004 * (config.link_groups or 0))
    assert found.config.link_groups is None
    assert found.device_bytes == 141 << 30  # of the described chip


def test_meshes_of_cpus_and_of_several_gpus_are_refused():
    config, batch = zj.ZeroConfig(**IN_BACKWARD), toys.batches(1)[0]
    for mesh, told in (
        (zj.make_mesh(devices=jax.devices()[:1]), "has 1 of platform 'cpu'"),
        (aot.gpu_mesh("h200", gpus_per_host=2), "has 2 of platform 'gpu'"),
    ):
        with pytest.raises(NotImplementedError, match=told):
            zj.autotune(toys.layered(), optax.adamw(1e-3), config, mesh, batch)


def test_link_groups_are_checked_and_are_those_of_the_schedule(monkeypatch):
    monkeypatch.setattr(state_records, "takes_linear_slices", lambda mesh: True)
    for wrong in (1, True, 2.0, "4"):
        with pytest.raises(ValueError, match=r"link_groups=.*: an integer of at least 2"):
            zj.ZeroConfig(link_groups=wrong)
    losses = []
    for groups in (None, 2):
        config = zj.ZeroConfig(link_groups=groups, **IN_BACKWARD)
        with zj.build_train_step(toys.layered(), optax.adamw(1e-2), config, zj.make_mesh(devices=jax.devices()[:1])) as program:
            losses.append(toys.run(program, program.init(jax.random.key(0)), toys.batches(2))[0])
            step = program._step
            assert isinstance(step, StreamedStep)
            assert groups in (None, step.plan.link_groups(step.plan.stacked))
    assert jnp.allclose(jnp.asarray(losses), jnp.asarray(losses[0]), rtol=1e-6)
