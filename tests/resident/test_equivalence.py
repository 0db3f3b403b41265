"""Sharded training equals optax on one device.

Every stage, mesh, microbatch count and kind of model is tested.
"""

import itertools

import jax
import numpy as np
import pytest
import toys

import zerojax as zj

MESHES = {
    "fsdp8": {"fsdp": 8},
    "data2_fsdp4": {"data": 2, "fsdp": 4},
    "fsdp4_tensor2": {"fsdp": 4, "tensor": 2},
}
KINDS = {"model": toys.unrolled, "layered": toys.layered}
STEPS, CLIP = 10, 0.5


AXES = (tuple(KINDS), (0, 1, 2, 3), tuple(MESHES), (1, 4))


QUICK = {(0, 1, 0, 0), (0, 2, 2, 1), (0, 3, 1, 0), (1, 0, 2, 0), (1, 3, 0, 1)}
"""Positions in the axes."""


def cases():
    """Every combination; without `-m exhaustive`, a tenth of them with every value of each axis."""
    for places in itertools.product(*(range(len(axis)) for axis in AXES)):
        values = [axis[place] for axis, place in zip(AXES, places, strict=True)]
        yield pytest.param(*values, marks=[] if places in QUICK else [pytest.mark.exhaustive])


def test_quick_cases_have_every_value():
    quick = [case.values for case in cases() if not case.marks]
    assert [set(values) for values in zip(*quick, strict=True)] == [set(axis) for axis in AXES]
    assert {kind for kind, stage, *_ in quick if stage == 3} == set(KINDS)


@pytest.mark.parametrize(("kind", "stage", "mesh", "num_microbatches"), cases())
def test_step_equals_plain_program(capfd, kind, stage, mesh, num_microbatches):
    model = KINDS[kind](tensor="tensor" in mesh)
    config = zj.ZeroConfig(stage=stage, clip_norm=CLIP, num_microbatches=num_microbatches)
    program = zj.build_train_step(model, toys.optimizer(), config, zj.make_mesh(**MESHES[mesh]))
    state = program.init(jax.random.key(0))
    data = toys.batches(STEPS)
    expected_losses, expected = toys.plain_run(program.params(state), data, CLIP)
    losses, state = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    toys.assert_trees_close(program.params(state), expected, atol=1e-4)
    assert losses[-1] < losses[0]
    assert not program.gathered_early
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.by_default("3-model")
@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (0, "model"),
        (2, "layered"),
        (3, "model"),
        (3, "layered"),
        pytest.param(0, "layered", marks=pytest.mark.exhaustive),
        pytest.param(2, "model", marks=pytest.mark.exhaustive),
    ],
)
def test_remat_equals_save(stage, kind):
    data, mesh = toys.batches(4), zj.make_mesh(data=2, fsdp=4)
    results = []
    for activations in ("save", "remat"):
        config = zj.ZeroConfig(stage=stage, clip_norm=CLIP, activations=activations)
        program = zj.build_train_step(KINDS[kind](), toys.optimizer(), config, mesh)
        losses, state = toys.run(program, program.init(jax.random.key(0)), data)
        results.append((losses, program.params(state)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    toys.assert_trees_close(results[0][1], results[1][1], atol=1e-5)


def test_eval_is_the_loss_without_an_update():
    program = zj.build_train_step(
        toys.layered(), toys.optimizer(), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    batch = toys.batches(1)[0]
    before = float(program.eval(state, batch))
    np.testing.assert_allclose(
        before, float(toys.plain_loss(jax.device_get(program.params(state)), batch)), rtol=1e-6
    )
    _, metrics = program.step(state, batch)
    np.testing.assert_allclose(before, float(metrics["loss"]), rtol=1e-6)


def test_init_does_not_depend_on_the_mesh():
    trees = []
    for mesh in (
        zj.make_mesh(fsdp=8),
        zj.make_mesh(data=4, fsdp=2),
        zj.make_mesh(devices=jax.devices()[:1]),
    ):
        program = zj.build_train_step(
            toys.layered(), toys.optimizer(), zj.ZeroConfig(stage=3), mesh
        )
        trees.append(jax.device_get(program.params(program.init(jax.random.key(7)))))
    toys.assert_trees_close(trees[0], trees[1], atol=0)
    toys.assert_trees_close(trees[0], trees[2], atol=0)
