"""The optimizer on the host: bytes over the link, the delayed update, and errors without hangs."""

import jax
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from host_offload.device import view
from host_offload.host_update import DelayedStep, HostStep

HOST = "pinned_host"


def build(fields, model=None, tx=None):
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    config = zj.ZeroConfig(stage=3, opt_state=HOST, update_on="host", **fields)
    return zj.build_train_step(model or toys.small(), tx or optax.adamw(1e-2), config, mesh)


@pytest.mark.by_default("fields3-4-2")
@pytest.mark.parametrize(
    ("fields", "down", "up"),
    [
        ({"precision": "bf16"}, 2, 2),  # ZeRO-Offload's 4 bytes per parameter
        ({"precision": "bf16", "grads": HOST, "update": "after_backward"}, 2, 2),
        (
            {"precision": "bf16", "params": HOST, "update": "in_backward"},
            2,
            0,
        ),  # the parameters are already on the host
        (
            {"precision": "bf16", "num_microbatches": 4},
            4,
            2,
        ),  # float32 sums, moved once and not four times
        ({"precision": "bf16", "delayed_update": True}, 2, 2),
        ({"params": HOST}, 4, 0),
        ({}, 8, 4),  # float32 weights on the device are loaded as well
    ],
)
def test_bytes_that_cross_the_link(fields, down, up):
    program = build(fields)
    state = program.init(jax.random.key(0))
    traffic = program._runner.host.host.traffic
    for step, batch in enumerate(toys.batches(2)):
        before = (traffic.to_host, traffic.to_device)
        state, _ = program.step(state, batch)
        assert traffic.to_host - before[0] == toys.trained_bytes(program, down)
        first = fields.get("delayed_update") and step == 0  # nothing to install yet
        assert traffic.to_device - before[1] == (0 if first else toys.trained_bytes(program, up))


def test_the_schedule_tells_what_callbacks_move():
    down, up = "callbacks move gradients down", "new parameters up"
    bf16 = {"precision": "bf16", "activations": "remat"}
    for fields, told in (
        ({**bf16}, [f"update: {down}, {up}\n"]),
        ({**bf16, "grads": HOST}, [f"backward: {down}\n", f"update: callbacks move {up}\n"]),
        ({**bf16, "update": "in_backward"}, [f"backward: {down}, {up}\n"]),
        ({**bf16, "delayed_update": True}, [f"backward: {down}, {up}\n"]),
        ({"params": HOST}, [f"update: writes params; {down}\n"]),
        ({"activations": "remat"}, [f"update: {down}, float32 weights down, {up}\n"]),
    ):
        with build(fields) as program:
            for line in told:
                assert line in str(program.schedule)


def delayed_reference(params, data, tx):
    """Each step's gradient is applied after the next step's gradient is computed."""
    opt_state, losses, pending = tx.init(params), [], None
    loss_and_grads = jax.jit(jax.value_and_grad(toys.plain_loss))

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in data:
        loss, grads = loss_and_grads(params, batch)
        losses.append(float(loss))
        if pending is not None:
            params, opt_state = update(pending, opt_state, params)
        pending = grads
    return losses, params


@pytest.mark.by_default("clipped")
@pytest.mark.parametrize(
    "fields", [{}, {"clip_norm": 0.5, "num_microbatches": 4}], ids=["plain", "clipped"]
)
def test_delayed_update_is_one_step_late(fields):
    fields = {"params": HOST, "delayed_update": True, **fields}
    program, data = build(fields, toys.layered(), toys.optimizer()), toys.batches(6)
    state = program.init(jax.random.key(0))
    params = jax.device_get(program.params(state))
    clip = fields.get("clip_norm")
    tx = (
        toys.optimizer()
        if clip is None
        else optax.chain(optax.clip_by_global_norm(clip), toys.optimizer())
    )
    expected, after = delayed_reference(params, data, tx)
    losses, state = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(program.params(state), jax.device_get(after), atol=1e-5)


def test_a_delayed_update_is_taken_over_in_backward_and_exchanged_in_host_memory(monkeypatch):
    calls = []

    def spy(step, name):
        whole = getattr(step, name)

        def call(self, context, out, where, *rest, **fields):
            device, layer = np.asarray(where).tolist()[:2]
            if device == 0:
                calls.append((name, layer))
            return whole(self, context, out, where, *rest, **fields)

        monkeypatch.setattr(step, name, call)

    for step, name in (
        (HostStep, "stash"),
        (DelayedStep, "start"),
        (DelayedStep, "install"),
        (DelayedStep, "finish"),
    ):
        spy(step, name)
    first, *rest = toys.batches(3)
    with build({"precision": "bf16", "delayed_update": True}) as program:
        state, _ = program.step(program.init(jax.random.key(0)), first)
        in_backward = [(name, layer) for layer in (2, 1, 0) for name in ("stash", "install")]
        assert calls == [("start", 0), *in_backward, ("stash", 0), ("install", 0), ("finish", 0)]
    with build({"precision": "bf16", "delayed_update": True, "params": HOST}) as program:
        state, host = program.init(jax.random.key(0)), program._runner.host
        for batch in (first, *rest):
            calls.clear()
            state, _ = program.step(state, batch)
            assert not [name for name, _ in calls if name == "install"]
            made = {a.ctypes.data for a in host.host.new_params.values()}
            assert made == {
                view(s.data).ctypes.data
                for a in jax.tree.leaves(state.params)
                for s in a.addressable_shards
            }


@pytest.mark.by_default("in_backward")
@pytest.mark.parametrize(
    "fields",
    [{}, {"grads": HOST}, {"params": HOST, "update": "in_backward"}, {"precision": "bf16"}],
    ids=["fp32", "grads", "in_backward", "bf16"],
)
def test_a_gradient_that_is_not_finite_updates_nothing(fields):
    program = build(fields)
    state, _ = program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
    before = jax.tree.map(
        lambda a: np.array(a), (program.params(state), state.master, state.opt_state)
    )
    bad = toys.batches(2)[1] | {"weight": np.float32(np.nan)}
    state, metrics = program.step(state, bad)
    assert float(metrics["skipped_steps"]) == 1
    after = jax.tree.map(
        lambda a: np.array(a), (program.params(state), state.master, state.opt_state)
    )
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.by_default("lion")
@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_any_elementwise_optimizer_runs_there(name):
    tx = {"lion": optax.lion(1e-3), "sgd": optax.sgd(0.05, 0.9)}[name]
    data, mesh = toys.batches(5), zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    resident = zj.build_train_step(toys.small(), tx, zj.ZeroConfig(stage=3), mesh)
    expected, before = toys.run(resident, resident.init(jax.random.key(0)), data)
    program = build({"params": HOST}, tx=tx)
    losses, after = toys.run(program, program.init(jax.random.key(0)), data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if name == "sgd":
        toys.assert_trees_close(program.params(after), before.params, atol=1e-5)


def test_an_error_in_a_callback_is_raised_by_the_step_and_hangs_nothing(monkeypatch):
    program = build({"params": HOST})
    state, _ = program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
    calls = []

    def fail(*args, **_):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("no such thing")

    monkeypatch.setattr(program._runner.host.host, "run_kernel", fail)
    with pytest.raises(
        RuntimeError, match="update on the host failed, and the state is lost"
    ) as error:
        program.step(state, toys.batches(1)[0])
    assert isinstance(error.value.__cause__, OSError)
    assert len(calls) > 3  # the other devices and layers continued


def test_an_optimizer_that_is_not_elementwise_is_refused_when_building():
    with pytest.raises(
        ValueError,
        match=r"opt_state='pinned_host' .* combines elements of a leaf .* and update_on='host'",
    ):
        build({}, tx=optax.lamb(1e-3))


def test_host_memory_is_shared_between_batch_shapes_and_released():
    mesh = zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    config = zj.ZeroConfig(stage=3, params=HOST, grads=HOST, activations=HOST)
    program = zj.build_train_step(toys.small(), optax.adamw(1e-2), config, mesh)
    state = program.init(jax.random.key(0))
    for size in (32, 16, 32):
        state, _ = program.step(state, toys.batches(1, size)[0])
    assert len(program._compiler._by_shape) == 2
    grads, kept = (program._scratch.stacks(use) for use in ("grads", "residuals"))
    assert grads
    assert {a.shape[1] for a in kept} == {32}  # of the last batch only
    program.close()
    assert not program._scratch.stacks("grads")
    assert not program._scratch.stacks("residuals")
    delayed = build({"precision": "bf16", "delayed_update": True})
    state, _ = delayed.step(delayed.init(jax.random.key(0)), toys.batches(1)[0])
    host = delayed._runner.host.host
    assert host.stashed
    delayed.close()
    assert not any((host.stashed, host.new_params, host.arrays, host.pending))
    state, metrics = delayed.step(state, toys.batches(2)[1])  # reserved again
    assert np.isfinite(float(metrics["loss"]))
