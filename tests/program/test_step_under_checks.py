"""A step under checks: donated memory returned elsewhere, XLA's verification, the report."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import toys

import zerojax as zj
from zerojax import aot
from zerojax.program import program as of_programs
from zerojax.program import self_test
from zerojax.program.compile import LoweredStep

H = "pinned_host"
MODES = {
    "opt_state": {"opt_state": H},
    "in_backward": {"opt_state": H, "update": "in_backward"},
    "all, activations": {"params": H, "grads": H, "opt_state": H, "activations": H},
    "on_host": {"opt_state": H, "update_on": "host"},
    "delayed": {"opt_state": H, "update_on": "host", "delayed_update": True, "precision": "bf16"},
}


def built(mode="opt_state", **config):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(
        toys.layered(), toys.optimizer(), zj.ZeroConfig(**MODES[mode], **config), mesh
    )


@pytest.mark.by_default("in_backward", "all, activations", "delayed")
@pytest.mark.parametrize("mode", [*MODES])
def test_what_a_streamed_step_takes_in_host_memory_it_updates_in_place(mode):
    with built(mode) as program:
        (batch,) = toys.batches(1)
        state = program.init(jax.random.key(0))
        state, _ = program.self_test(state, batch)
        _, found = program.self_test(
            state, batch
        )  # with a delayed update each step takes the memory of the step before the previous one
        assert found.num_host_arrays >= 3 * len(jax.tree.leaves(toys.init_block(jax.random.key(0))))
        assert not found.offsets_verified  # a CPU has no descriptors
        assert np.isfinite(found.metrics["loss"])
        assert (
            f"{found.num_host_arrays} arrays of {found.host_bytes:,} bytes were updated in place"
            in str(found)
        )


def test_the_step_is_an_ordinary_one_and_later_ones_run_the_usual_program():
    data = toys.batches(3)
    with built() as program:
        losses, state = toys.run(program, program.init(jax.random.key(0)), data)
        expected = jax.device_get(program.params(state))
    with built() as program:
        state, found = program.self_test(program.init(jax.random.key(0)), data[0])
        usual = program.lower(data[1]).step
        assert usual.run is usual.step
        others, state = toys.run(program, state, data[1:])
        assert [float(found.metrics["loss"]), *others] == losses
        toys.assert_trees_close(program.params(state), expected, 0)


def test_a_copy_of_donated_memory_is_named(monkeypatch):
    """Plant a fault: a program whose master weights are returned as copies."""

    def copying(lowered, options=None):
        def run(*args):
            (state, scratch), metrics = lowered.step.step(*args)
            master = jax.tree.map(
                lambda a: jax.device_put(a, a.sharding, may_alias=False), state.master
            )
            return (
                dataclasses.replace(state, master=jax.block_until_ready(master)),
                scratch,
            ), metrics

        lowered.step.run = run

    with built(precision="bf16") as program:
        state = program.init(jax.random.key(0))
        monkeypatch.setattr(LoweredStep, "compile", copying)
        with pytest.raises(
            RuntimeError,
            match=r"donated arrays in host memory came back elsewhere: .*master\['blocks'\].*bytes more",
        ):
            program.self_test(state, toys.batches(1)[0])


def test_a_wrong_offset_ends_the_step_with_what_to_do(monkeypatch):
    """Plant a fault: the error of a program whose slices XLA verifies."""
    asked = []

    def failing(lowered, options=None):
        def run(*args):
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: offset 4096 of slice 3, where the device computed 8192"
            )

        asked.append(options)
        lowered.step.run = run

    with built() as program:
        monkeypatch.setattr(of_programs, "verifies_offsets", lambda mesh: True)
        monkeypatch.setattr(LoweredStep, "compile", failing)
        with pytest.raises(
            RuntimeError, match=r"offset 4096 of slice 3.*do not train with this jaxlib"
        ):
            program.self_test(program.init(jax.random.key(0)), toys.batches(1)[0])
    assert asked == [{self_test.VERIFY_OFFSETS: True}]


@pytest.mark.xdist_group("h200")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib has the option since 0.11")
def test_xla_takes_the_option_for_gpus(h200_compiler):
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=1)
    program = zj.build_train_step(
        toys.layered(), toys.optimizer(), zj.ZeroConfig(**MODES["opt_state"]), mesh
    )
    shapes = functools.partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype))
    program.lower(shapes(toys.batches(1)[0])).compile({self_test.VERIFY_OFFSETS: True})
    assert self_test.verifies_offsets(mesh)
