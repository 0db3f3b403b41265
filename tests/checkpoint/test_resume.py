"""Training continues from a checkpoint as if it had not stopped.

It is bit for bit the same in the same place, and within rounding elsewhere.
"""

import contextlib

import jax
import numpy as np
import optax
import pytest
import toys
from matrix_of_checkpoints import DISK, HOST, assert_same, numbers

import zerojax as zj
from zerojax.precision import LossScaling

pytestmark = pytest.mark.xdist_group("resume")  # which share a program
DATA = toys.batches(6)
ON_HOST = {"params": HOST, "grads": HOST, "opt_state": HOST}


def build(fields, swap, axes=None, model=None, tx=None):
    if DISK in fields.values():
        swap.mkdir(exist_ok=True)
        fields = fields | {"swap_dir": str(swap)}
    axes = axes or {"fsdp": 4}
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    made = model or toys.layered(tensor="tensor" in axes)
    return zj.build_train_step(made, tx or toys.optimizer(), zj.ZeroConfig(**fields), mesh)


CASES = {
    "device": {
        "stage": 3,
        "precision": "fp16",
        "loss_scaling": LossScaling(initial=2.0**10, growth_interval=2),
    },
    "host": {"stage": 3, **ON_HOST, "precision": "bf16"},
    "fraction": {"stage": 3, **ON_HOST, "opt_state_device_fraction": 0.5},
    "disk": {"stage": 3, "params": DISK, "opt_state": DISK, "update": "in_backward"},
    "disk_tensorstore": {"stage": 2, "opt_state": DISK, "precision": "bf16", "io": "tensorstore"},
    "updated_on_host": {"stage": 3, "params": HOST, "opt_state": DISK, "update_on": "host"},
    "delayed": {"stage": 3, **ON_HOST, "update_on": "host", "delayed_update": True},
    "rounded_moments": {"stage": 1, "moments": "bfloat16"},
}


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """Return a program of the case "disk", a directory with its checkpoint, and losses.

    The checkpoint is of step 3; the losses are those of the next 3 steps.
    """
    folder = tmp_path_factory.mktemp("on_disk")
    with build(CASES["disk"], folder / "swap") as program:
        with zj.Checkpointer(folder / "c") as ckpt:
            _, state = toys.run(program, program.init(jax.random.key(0)), DATA[:3])
            ckpt.save(program, state)
            losses, _ = toys.run(program, state, DATA[3:])
        yield program, folder / "c", losses


@pytest.mark.by_default("disk")
@pytest.mark.parametrize("name", CASES)
def test_resumed_losses_are_those_of_the_run_that_went_on(name, on_disk, tmp_path):
    """Save in the background while the run continues: the saved state is the save step's."""
    tx = optax.adamw(1e-2) if "update_on" in CASES[name] else None
    with contextlib.ExitStack() as stack:
        program = (
            on_disk[0]
            if name == "disk"
            else stack.enter_context(build(CASES[name], tmp_path / "swap", tx=tx))
        )
        ckpt = stack.enter_context(zj.Checkpointer(tmp_path / "c"))
        state = program.init(jax.random.key(0))
        _, state = toys.run(program, state, DATA[:3])
        assert ckpt.save(program, state)
        losses, state = toys.run(program, state, DATA[3:])
        assert ckpt.save(program, state)
        assert toys.run(program, ckpt.restore(program, 3), DATA[3:])[0] == losses
        resumed, again = toys.run(
            program, ckpt.restore(program, 3), DATA[3:]
        )  # over a restored state
        assert resumed == losses
        with zj.Checkpointer(tmp_path / "again") as other:
            other.save(program, again)
        assert_same(numbers(tmp_path / "again", 6), numbers(tmp_path / "c", 6))


def losses_after(ckpt, fields, swap, **where):
    with build(fields, swap, **where) as program:
        return toys.run(program, ckpt.restore(program), DATA[3:])[0]


@pytest.mark.by_default("host")
@pytest.mark.parametrize(
    ("fields", "axes", "rtol"),
    [
        ({"stage": 0}, {"fsdp": 1}, 1e-5),
        ({"stage": 3, **ON_HOST}, {"fsdp": 2, "tensor": 2}, 1e-5),
        ({"stage": 3, "params": DISK}, {"data": 2, "fsdp": 2}, 1e-5),
        ({"stage": 1, "precision": "bf16"}, {"fsdp": 8}, 2e-2),
        ({"stage": 1, "moments": "bfloat16"}, {"fsdp": 2}, 2e-2),
    ],
    ids=["one_device", "host", "disk", "bf16", "moments"],
)
def test_resumed_elsewhere_losses_agree_within_rounding(fields, axes, rtol, on_disk, tmp_path):
    _, directory, expected = on_disk
    with zj.Checkpointer(directory) as ckpt:
        np.testing.assert_allclose(
            losses_after(ckpt, fields, tmp_path / "b", axes=axes), expected, rtol=rtol
        )


@pytest.mark.by_default("device")
@pytest.mark.parametrize(
    "fields", [{"stage": 3}, {"stage": 1, "opt_state": DISK}], ids=["device", "disk"]
)
def test_a_model_without_layers_is_restored_from_and_onto_disk(fields, tmp_path, monkeypatch):
    monkeypatch.setattr(toys, "LAYERS", 1)  # has leaves of every kind
    found = []
    with zj.Checkpointer(tmp_path / "c") as ckpt:
        with build(
            {"stage": 2, "opt_state": DISK}, tmp_path / "a", model=toys.unrolled()
        ) as program:
            _, state = toys.run(program, program.init(jax.random.key(0)), DATA[:3])
            ckpt.save(program, state)
            found.append(toys.run(program, state, DATA[3:])[0])
        found.append(
            losses_after(ckpt, fields, tmp_path / "b", model=toys.unrolled(), axes={"fsdp": 8})
        )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_weights_that_were_saved_are_those_that_are_cast(tmp_path):
    """The compute copy is not part of a checkpoint."""
    with build(CASES["host"], tmp_path) as program, zj.Checkpointer(tmp_path / "c") as ckpt:
        _, state = toys.run(program, program.init(jax.random.key(0)), DATA[:1])
        expected = jax.device_get((state.params, state.master))
        ckpt.save(program, state)
        restored = ckpt.restore(program)
        toys.assert_trees_close(
            jax.device_get((restored.params, restored.master)), expected, atol=0
        )


def test_random_keys_of_an_optimizer_are_restored(tmp_path):
    tx = optax.chain(optax.add_noise(1e-3, 0.5, jax.random.key(7)), optax.sgd(1e-2))
    with build({"stage": 2}, tmp_path, tx=tx) as program, zj.Checkpointer(tmp_path / "c") as ckpt:
        _, state = toys.run(program, program.init(jax.random.key(0)), DATA[:1])
        ckpt.save(program, state)
        losses, _ = toys.run(program, state, DATA[1:4])
        assert toys.run(program, ckpt.restore(program), DATA[1:4])[0] == losses
