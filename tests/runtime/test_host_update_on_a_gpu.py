"""The optimizer on the host as on a GPU, with workers and slots, on a simulated driver.

The results are the same, and nothing waits.
"""

import encoder_decoder
import jax
import numpy as np
import optax
import pytest
import toys
from simulated_cuda import CONTEXT, SimulatedCuda

import zerojax as zj
from host_offload.device import gpu_copies, link
from host_offload.device.cuda_driver import Driver
from host_offload.device.gpu_copies import GpuCopies
from host_offload.host_update import gpu_worker, queued
from zerojax.optim import on_host
from zerojax.optim.host_state import HostState

HOST, DISK = "pinned_host", "nvme"


class Program(SimulatedCuda):
    """Count the waits for the program's stream, which is stream 0."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drains = 0

    def cuStreamGetCtx(self, stream):  # noqa: N802
        return (0, CONTEXT) if stream == 0 else super().cuStreamGetCtx(stream)

    def cuStreamSynchronize(self, stream):  # noqa: N802
        self.drains += stream == 0
        return super().cuStreamSynchronize(stream)


def on_gpu(monkeypatch, cuda):
    """Make CPU programs call back as GPU programs do, through a simulated driver."""
    driver, whole = Driver(cuda), HostState.__init__

    def init(self, *args, **fields):
        whole(self, *args, **fields)
        self.hands_over = False

    monkeypatch.setattr(HostState, "__init__", init)
    monkeypatch.setattr(on_host, "find_link", lambda platform: link.CudaLink())
    for module in (link, on_host, queued, gpu_worker, gpu_copies):
        for name, of in (
            ("driver", lambda: driver),
            ("pointer", lambda buffer: np.asarray(buffer).ctypes.data),
            ("pointers", lambda buffers: [np.asarray(buffer).ctypes.data for buffer in buffers]),
            ("find_stream", lambda context: 0),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, of)
    monkeypatch.setattr(
        "host_offload.engine.ops.build_copies", lambda devices: GpuCopies(devices, driver)
    )


def build(fields, model=None, **more):
    config = zj.ZeroConfig(
        **{"opt_state": HOST, "update_on": "host", "precision": "bf16", **fields}, **more
    )
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    return zj.build_train_step(
        model or toys.small(),
        optax.adamw(1e-2) if model is None else toys.optimizer(),
        config,
        mesh,
    )


def train(program, batches=toys.batches, cuda=None):
    """Return losses, float32 parameters, and a step's waits for the program's stream."""
    losses, drains = [], 0
    with program:
        state = program.init(jax.random.key(0))
        for batch in batches(3):
            drains -= cuda.drains if cuda else 0
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
            drains += cuda.drains if cuda else 0
        params = [
            np.asarray(a) for _, tree in program.iter_params(state) for a in jax.tree.leaves(tree)
        ]
        return losses, params, drains


CASES: dict[str, dict] = {
    "in backward": {"update": "in_backward"},
    "after backward": {"clip_norm": 0.5, "num_microbatches": 2},
    "weights on the device": {"precision": "fp32", "update": "in_backward"},
    "params on the host": {"params": HOST, "update": "in_backward"},
    "two stacks": {"update": "in_backward"},
    "resident": {"stage": 1, "clip_norm": 0.5},
    "state on disk": {"opt_state": DISK, "update": "in_backward"},
    "state on disk, after backward": {"opt_state": DISK, "clip_norm": 0.5},
    "gradients on the host": {"grads": HOST, "clip_norm": 0.5},
    "gradients on disk": {"grads": DISK, "opt_state": DISK, "params": HOST, "clip_norm": 0.5},
    "delayed": {"delayed_update": True},
    "delayed, params on the host": {"delayed_update": True, "params": HOST, "clip_norm": 0.5},
}
MODELS = {"two stacks": encoder_decoder.model, "resident": toys.unrolled}


@pytest.mark.by_default("state on disk")
@pytest.mark.parametrize("name", CASES)
def test_workers_make_the_same_numbers_and_no_callback_waits_for_the_program(
    name, monkeypatch, tmp_path
):
    disk = {"swap_dir": str(tmp_path)} if DISK in CASES[name].values() else {}
    model = MODELS.get(name, toys.small)
    batches = encoder_decoder.batches if name == "two stacks" else toys.batches
    expected, params, _ = train(build(CASES[name] | disk, model()), batches)
    cuda = Program(delay=0.001)
    on_gpu(monkeypatch, cuda)
    program = build(CASES[name] | disk, model())
    losses, same, drains = train(program, batches, cuda)
    assert losses == expected
    for a, b in zip(same, params, strict=True):
        np.testing.assert_array_equal(a, b)
    assert drains == 0
    assert cuda.streams == cuda.events == cuda.registered == {}


def states(program, state):
    return jax.tree.map(
        lambda a: np.array(a), (program.params(state), state.master, state.opt_state)
    )


def test_a_gradient_that_is_not_finite_updates_nothing(monkeypatch):
    on_gpu(monkeypatch, Program(delay=0.001))
    with build({"update": "in_backward"}) as program:
        state, _ = program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
        before = states(program, state)
        state, metrics = program.step(state, toys.batches(2)[1] | {"weight": np.float32(np.nan)})
        assert float(metrics["skipped_steps"]) == 1
        jax.tree.map(np.testing.assert_array_equal, states(program, state), before)


ERRORS = [
    pytest.param("in backward", OSError("no such thing"), id="error"),
    pytest.param("in backward", KeyboardInterrupt(), id="interrupt"),
    pytest.param("delayed", OSError("no such thing"), id="delayed"),
    pytest.param(
        "delayed, params on the host", OSError("no such thing"), id="delayed_in_host_memory"
    ),
]


@pytest.mark.by_default("error", "interrupt")
@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_an_error_in_a_worker_is_raised_by_the_step_and_hangs_nothing(name, error, monkeypatch):
    on_gpu(monkeypatch, Program(delay=0.001))
    with build(CASES[name]) as program:
        data = toys.batches(3)
        expected, _ = toys.run(program, program.init(jax.random.key(0)), data)
        state, host, calls = program.init(jax.random.key(0)), program._runner.host.host, []
        if "delayed" in name:  # its first step updates nothing
            state, _ = program.step(state, data[0])
        whole = host.run_kernel

        def fail(*args, **fields):
            calls.append(args)
            if len(calls) == 3:
                raise error
            whole(*args, **fields)

        monkeypatch.setattr(host, "run_kernel", fail)
        lost = r"update on the host failed, and the state is lost|^$"
        with pytest.raises((RuntimeError, KeyboardInterrupt), match=lost) as raised:
            program.step(state, data[0])
        assert error in (raised.value, raised.value.__cause__)
        assert len(calls) > 3  # other layers continued
        monkeypatch.setattr(host, "run_kernel", whole)
        assert toys.run(program, program.init(jax.random.key(0)), data)[0] == expected


@pytest.mark.by_default("in backward")
@pytest.mark.parametrize("name", ["in backward", "delayed", "delayed, params on the host"])
def test_an_error_of_the_driver_is_raised_by_the_step_and_hangs_nothing(name, monkeypatch):
    cuda = Program(delay=0.001)
    on_gpu(monkeypatch, cuda)
    with build(CASES[name]) as program:
        state, _ = program.step(program.init(jax.random.key(0)), toys.batches(1)[0])
        cuda.fail_copies = True
        with pytest.raises(
            RuntimeError, match="update on the host failed, and the state is lost"
        ) as error:
            program.step(state, toys.batches(2)[1])
        assert "cuMemcpyAsync failed" in str(error.value.__cause__)
        cuda.fail_copies = False
        losses, _ = toys.run(program, program.init(jax.random.key(0)), toys.batches(2))
        assert np.isfinite(losses).all()
