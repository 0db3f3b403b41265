"""A state that leaves the device comes back with the same bits, and training goes on."""

import jax
import numpy as np
import pytest
import toys

import zerojax as zj
from zerojax.state import OnDisk

CONFIGS = {
    "device": {"precision": "bf16"},
    "opt_state": {"opt_state": "pinned_host"},
    "nvme": {"opt_state": "nvme"},
    "in_forward": {"update": "in_forward", "params": "pinned_host", "opt_state": "pinned_host"},
}


def on_device(state):
    return [
        leaf
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array) and leaf.ndim and leaf.sharding.memory_kind == "device"
    ]


@pytest.mark.by_default("device")
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_state_leaves_the_device_and_comes_back_bit_for_bit(tmp_path, name):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    fields = CONFIGS[name] | ({"swap_dir": str(tmp_path)} if name == "nvme" else {})
    data = toys.batches(3)
    with zj.build_train_step(
        toys.small(), toys.optimizer(), zj.ZeroConfig(**fields), mesh
    ) as program:

        def train(moves: bool):
            state = program.init(jax.random.key(0))
            losses = []
            for batch in data:
                state, metrics = program.step(state, batch)
                losses.append(float(jax.block_until_ready(metrics["loss"])))
                if moves:
                    before = on_device(state)
                    tiers = jax.tree.map(lambda leaf: leaf.sharding, [*before])
                    state = program.offload(state)
                    assert before
                    assert all(leaf.is_deleted() for leaf in before)
                    assert not on_device(state)
                    with pytest.raises(ValueError, match=r"call program.reload\(state\)"):
                        program.step(state, batch)
                    with pytest.raises(ValueError, match=r"call program.reload\(state\)"):
                        program.eval(state, batch)
                    state = program.reload(state)
                    assert [leaf.sharding for leaf in on_device(state)] == tiers
            pieces = [
                np.asarray(a) for _, p in program.iter_params(state) for a in jax.tree.leaves(p)
            ]
            return losses, pieces

        stayed, moved = train(False), train(True)
        assert stayed[0] == moved[0]
        for a, b in zip(stayed[1], moved[1], strict=True):
            np.testing.assert_array_equal(a, b)
        state = program.init(jax.random.key(0))
        assert any(isinstance(leaf, OnDisk) for leaf in jax.tree.leaves(state)) == (name == "nvme")
        state = program.reload(state)  # a state that did not leave stays as it is
        state, metrics = program.step(state, data[0])
        jax.block_until_ready(metrics["loss"])


def test_a_state_of_another_program_is_not_reloaded(tmp_path):
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    program = zj.build_train_step(toys.small(), toys.optimizer(), zj.ZeroConfig(), mesh)
    other = zj.build_train_step(
        toys.small(), toys.optimizer(), zj.ZeroConfig(precision="bf16"), mesh
    )
    state = other.offload(other.init(jax.random.key(0)))
    with pytest.raises(ValueError, match="reload it with the program that offloaded it"):
        program.reload(state)
    used = program.init(jax.random.key(0))
    jax.block_until_ready(program.step(used, toys.batches(1)[0]))
    with pytest.raises(ValueError, match="donated"):
        program.offload(used)
