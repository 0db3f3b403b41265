"""A step that was compiled ahead of time is not compiled again."""

import logging

import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj

DISK = "nvme"


@pytest.mark.by_default("device")
@pytest.mark.parametrize("tier", ["device", "pinned_host", DISK])
def test_steps_run_what_was_compiled_ahead_of_time(tier, tmp_path, caplog):
    mesh, data = zj.make_mesh(fsdp=2, devices=jax.devices()[:2]), toys.batches(3)
    config = zj.ZeroConfig(
        stage=3, opt_state=tier, swap_dir=str(tmp_path) if tier == DISK else None
    )
    losses = []
    for ahead in (True, False):
        with zj.build_train_step(toys.small(), optax.adamw(1e-2), config, mesh) as program:
            if ahead:
                program.lower(data[0]).compile()
            state = program.init(jax.random.key(0))
            caplog.clear()
            with jax.log_compiles(), caplog.at_level(logging.WARNING):
                found, state = toys.run(program, state, data)
            messages = [
                r.getMessage()
                for r in caplog.records
                if "XLA compilation of jit(" in r.getMessage()
            ]
            compiled = [m for m in messages if "jit(step)" in m or "jit(numbered)" in m]
            assert bool(compiled) == (not ahead)
            losses.append(found)
            shorter = toys.batches(1, size=toys.BATCH // 2)[
                0
            ]  # of another shape: compiled on its first call
            assert np.isfinite(float(program.step(state, shorter)[1]["loss"]))
    np.testing.assert_array_equal(*losses)


def test_host_copies_are_read_from_programs_for_gpus():
    program = zj.build_train_step(
        toys.layered(), toys.optimizer(), zj.ZeroConfig(), zj.make_mesh(devices=jax.devices()[:1])
    )
    with pytest.raises(
        NotImplementedError, match="reads programs for GPUs, and this mesh is of platform 'cpu'"
    ):
        program.host_copies(toys.batches(1)[0])
