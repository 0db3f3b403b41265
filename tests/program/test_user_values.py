"""Numbers and paths as users pass them.

Scalars of numpy and JAX and `~` are accepted; anything else that is not a number is named.
"""

import json
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax.config import Segment
from zerojax.costs import Sizes
from zerojax.data import batches
from zerojax.hf import Lora
from zerojax.machines import machine as named_machine
from zerojax.tiling.weights import check_tiles
from zerojax.user_values import as_flag, as_int_or_float, as_integer, as_number, as_path

WHOLE = (3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3))
NO_WHOLE = (
    3.0,
    np.float32(3),
    True,
    np.True_,
    "3",
    None,
    np.array([3]),
    jax.ShapeDtypeStruct((), jnp.int32),
    3j,
)
NUMBERS = (
    0.5,
    np.float32(0.5),
    np.float64(0.5),
    np.array(0.5),
    jnp.float32(0.5),
    jnp.bfloat16(0.5),
    ml_dtypes.bfloat16(0.5),
)
NO_NUMBERS = (
    math.nan,
    math.inf,
    np.float32("nan"),
    jnp.inf,
    10**400,
    False,
    np.False_,
    "0.5",
    None,
    [0.5],
    1j,
    np.array([0.5]),
)


def test_numbers_and_flags_become_pythons_own():
    assert [(type(n), n) for n in map(as_integer, WHOLE)] == [(int, 3)] * len(WHOLE)
    assert [as_integer(n) for n in NO_WHOLE] == [None] * len(NO_WHOLE)
    assert [(type(n), n) for n in map(as_number, NUMBERS)] == [(float, 0.5)] * len(NUMBERS)
    assert [as_number(n) for n in NO_NUMBERS] == [None] * len(NO_NUMBERS)
    assert [as_number(n) for n in WHOLE] == [3.0] * len(WHOLE)
    assert [type(as_int_or_float(n)) for n in (np.int64(2), np.float32(2))] == [int, float]
    assert [as_flag(f) for f in (True, np.False_, 1, np.int8(1), "yes")] == [
        True,
        False,
        None,
        None,
        None,
    ]


def test_an_array_that_is_traced_is_no_number():
    def check(x):
        assert as_integer(x) is None
        assert as_number(x) is None
        return x

    jax.make_jaxpr(check)(jnp.int32(1))


def test_numpy_scalars_are_taken_and_kept_as_pythons_own():
    scaling = zj.LossScaling(
        growth_interval=np.int64(100), initial=np.float32(8), hysteresis=np.int8(2)
    )
    config = zj.ZeroConfig(
        stage=np.int64(3), num_microbatches=np.int32(2), clip_norm=np.float32(1), prefetch_distance=np.uint8(2),
        min_shard_bytes=np.int64(8), link_groups=np.int64(2), device_budget_bytes=np.int64(1 << 30), opt_state="pinned_host",
        opt_state_device_fraction=np.float32(0.5), gather_ahead=np.True_, activations=(Segment(np.int64(2)),),
        precision="fp16", loss_scaling=scaling,
    )  # fmt: skip
    (segment,) = config.activations
    assert isinstance(segment, Segment)
    numbers = {
        name: getattr(config, name)
        for name in ("stage", "num_microbatches", "clip_norm", "link_groups", "gather_ahead")
    }
    assert json.loads(json.dumps(numbers)) == {
        **numbers,
        "stage": 3,
        "clip_norm": 1.0,
        "gather_ahead": True,
    }
    assert (
        json.dumps(
            [segment.num_layers, scaling.growth_interval, scaling.initial, scaling.hysteresis]
        )
        == "[2, 100, 8.0, 2]"
    )
    assert config == zj.ZeroConfig(
        stage=3, num_microbatches=2, clip_norm=1.0, prefetch_distance=2, min_shard_bytes=8, link_groups=2,
        device_budget_bytes=1 << 30, opt_state="pinned_host", opt_state_device_fraction=0.5, gather_ahead=True,
        activations=(Segment(2),), precision="fp16",
        loss_scaling=zj.LossScaling(growth_interval=100, initial=8.0, hysteresis=2),
    )  # fmt: skip


def test_numpy_scalars_are_taken_elsewhere(tmp_path):
    lora = Lora(rank=np.int64(8), alpha=np.float32(16), dropout=np.float64(0.1))
    assert json.dumps([lora.rank, lora.alpha, lora.dropout]) == "[8, 16.0, 0.1]"
    assert type(Lora(rank=8, alpha=np.int64(16)).alpha) is int
    devices = np.asarray(jax.devices()[:2])
    assert dict(zj.make_mesh(fsdp=np.int64(2), tensor=np.array(1), devices=devices).shape) == {
        "data": 1,
        "fsdp": 2,
        "tensor": 1,
    }
    with zj.Checkpointer(
        tmp_path / "c",
        max_to_keep=np.int64(2),
        save_interval_steps=np.int64(10),
        max_host_bytes=np.int64(0),
    ):
        pass
    machine = zj.Machine(
        name="lab",
        nodes=np.int64(2),
        host_bytes=np.float32(1e9),
        link_up=np.float32(2e9),
        flops={"bf16": np.int64(7)},
    )
    (tmp_path / "lab.toml").write_text(machine.to_toml())
    assert named_machine(str(tmp_path / "lab.toml")).figures == machine.figures
    sizes = Sizes(layers=np.int64(2), hidden=np.int32(64), heads=4, vocab=128, seq=16, batch=2)
    assert type(sizes.num_params) is int
    assert check_tiles(np.int64(2), np.int64(8), "tiles") == 2
    assert zj.Ema(np.float32(0.5))
    stack = zj.Stack("one", np.int64(2), lambda key: key, lambda p, x, key: x)
    assert type(stack.num_layers) is int


REFUSED = {
    "stage": (lambda: zj.ZeroConfig(stage=np.float32(3)), "stage="),
    "clip_norm": (lambda: zj.ZeroConfig(clip_norm=np.float32("nan")), "clip_norm=.*nan.*finite"),
    "clip_norm of float32": (lambda: zj.ZeroConfig(clip_norm=1e-50), "clip_norm=1e-50.*float32"),
    "fraction": (
        lambda: zj.ZeroConfig(opt_state="pinned_host", opt_state_device_fraction=math.nan),
        "fraction=nan",
    ),
    "rank": (lambda: Lora(rank=8.0, alpha=1), "rank=8.0 of a Lora"),
    "alpha": (lambda: Lora(rank=8, alpha=math.nan), "alpha=nan of a Lora"),
    "segment": (lambda: Segment(np.float64(2)), "num_layers="),
    "mesh": (lambda: zj.make_mesh(fsdp=1.0), "fsdp=1.0"),
    "interval": (
        lambda: zj.Checkpointer("/nowhere", save_interval_steps=None),
        "save_interval_steps=None",
    ),
    "directory": (lambda: zj.Checkpointer(3), "directory=3"),
    "decay": (lambda: zj.Ema(np.float32("nan")), "decay="),
    "batch_size": (lambda: batches([], 2.0), "batch_size=2.0"),
    "nodes": (lambda: zj.Machine(name="lab", nodes=math.inf), "nodes = inf"),
    "rate": (lambda: zj.Machine(name="lab", link_up=np.float32("inf")), "link_up = "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_number_is_refused_by_name(name):
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        make()


SCALING = [
    {"growth_factor": math.nan}, {"growth_factor": math.inf}, {"growth_factor": 1.0}, {"growth_factor": 1 + 1e-9},
    {"backoff_factor": math.nan}, {"backoff_factor": 1.0}, {"backoff_factor": 1 - 1e-9}, {"backoff_factor": 0.0},
    {"growth_interval": 1.5}, {"growth_interval": 0}, {"growth_interval": True}, {"growth_interval": 2**31},
    {"hysteresis": 2.0}, {"hysteresis": 0}, {"least": 1e-50}, {"least": 0.0}, {"least": math.nan}, {"most": 1e39},
    {"most": math.inf}, {"initial": math.nan}, {"initial": "8"}, {"initial": 2.0**25}, {"initial": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("fields", SCALING, ids=str)
def test_loss_scaling_refuses_what_float32_or_int32_cannot_hold(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        zj.LossScaling(**fields)


def test_loss_scaling_takes_all_that_float32_holds():
    scaling = zj.LossScaling(
        least=1.1754944e-38,
        most=3.4028234e38,
        initial=1,
        growth_factor=1.0000002,
        backoff_factor=0.9999999,
    )
    assert np.float32(scaling.growth_factor) > 1 > np.float32(scaling.backoff_factor)
    assert np.isfinite(np.float32(scaling.most))
    assert np.float32(scaling.least) > 0


def test_home_folders_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert as_path(pathlib.Path("~/runs")) == str(tmp_path / "runs")
    assert as_path(b"runs") is None
    assert zj.ZeroConfig(opt_state="nvme", swap_dir="~/swap").swap_dir == str(tmp_path / "swap")
    with zj.Checkpointer("~/checkpoints") as ckpt:
        assert str(ckpt.directory) == str(tmp_path / "checkpoints")
    (tmp_path / "lab.toml").write_text(zj.Machine(name="lab", nodes=2).to_toml())
    assert named_machine("~/lab.toml").nodes == 2
    with zj.Run("~/log", program=build(), bars=False) as run:
        assert run.logdir == str(tmp_path / "log")
    assert not os.path.exists(tmp_path / "~")


def build():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    model = zj.Model(
        lambda key: {"w": jnp.ones(4)}, lambda p, batch, key: jnp.sum(p["w"] * batch["x"])
    )
    return zj.build_train_step(
        model, tx, zj.ZeroConfig(stage=0), zj.make_mesh(devices=jax.devices()[:1])
    )


def test_a_number_takes_the_place_of_a_scalar_of_the_optimizers_state():
    program, batch = build(), {"x": np.ones((1, 4), np.float32)}
    state = program.init(jax.random.key(0))
    rates = (0.25, np.float64(0.25), jnp.float16(0.25), jax.device_put(0.25, jax.devices()[1]))
    for steps, rate in enumerate(rates, 1):
        state.opt_state.hyperparams["learning_rate"] = rate
        state, metrics = program.step(state, batch)
        np.testing.assert_array_equal(
            program.params(state)["w"], np.full(4, 1 - 0.25 * steps, np.float32)
        )
        assert metrics["learning_rate"] == 0.25
    leaf = state.opt_state.hyperparams["learning_rate"]
    assert (leaf.dtype, leaf.sharding) == (
        jnp.float32,
        program.shardings.opt_state.hyperparams["learning_rate"],
    )
    numbers = "it must be a finite number that float32 can hold"
    path = r"\.opt_state\.hyperparams\['learning_rate'\]"
    for wrong in (
        math.nan, 1e39, 1e-50, True, "0.1", np.array([1e-3]), jnp.ones(1), 1 + 2j, jnp.complex64(1), np.ma.masked, 10**400,
        10**5000,
    ):  # fmt: skip
        state.opt_state.hyperparams["learning_rate"] = wrong
        with pytest.raises(ValueError, match=rf"{path} is .*: {numbers}") as found:
            program.step(state, batch)
        assert len(str(found.value)) < 400
    for wrong, how in (
        (None, rf"it lacks {path}"),
        ([1e-3], rf"it lacks {path}, and it has {path}\[0\]"),
    ):
        state.opt_state.hyperparams["learning_rate"] = wrong
        with pytest.raises(ValueError, match=rf"another structure.*{how}"):
            program.step(state, batch)
    state.opt_state.hyperparams.update(learning_rate=0.25, lr=0.25)
    with pytest.raises(
        ValueError, match=r"another structure.*it has \.opt_state\.hyperparams\['lr'\]"
    ):
        program.step(state, batch)
    del state.opt_state.hyperparams["lr"]
    state.opt_state.hyperparams["learning_rate"] = (
        3.4028235e38  # float32's largest number as commonly written
    )
    state, metrics = program.step(state, batch)
    assert metrics["learning_rate"] == np.finfo(np.float32).max


def test_limits_of_float32_are_taken_as_they_are_written():
    assert zj.LossScaling(most=3.4028235e38).most == np.finfo(np.float32).max
    assert zj.LossScaling(least=1.1754943e-38).least == np.finfo(np.float32).tiny
    assert zj.ZeroConfig(clip_norm=3.4028235e38).clip_norm == np.finfo(np.float32).max
    for wrong in ("most", "initial"):
        with pytest.raises(ValueError, match=f"{wrong}=3.41e\\+38"):
            zj.LossScaling(**{wrong: 3.41e38})


def test_strings_of_numpy_are_kept_as_str():
    config = zj.ZeroConfig(
        precision=np.str_("bf16"), opt_state=np.array("pinned_host"), activations=np.str_("remat")
    )
    assert config == zj.ZeroConfig(precision="bf16", opt_state="pinned_host", activations="remat")
    assert {type(config.precision), type(config.opt_state), type(config.activations)} == {str}
    assert type(zj.Segment(1, activations=np.str_("remat")).activations) is str
    with pytest.raises(ValueError, match=r"precision=.*bf17.* is unknown"):
        zj.ZeroConfig(precision=np.str_("bf17"))


@pytest.mark.parametrize(
    "field",
    ["stage", "prefetch_distance", "clip_norm", "opt_state_device_fraction", "delayed_update"],
)
@pytest.mark.parametrize("digits", [400, 5000])
def test_long_values_are_cut_in_errors(field, digits):
    with pytest.raises(ValueError, match=field) as found:
        zj.ZeroConfig(**{field: -(10**digits)})
    assert len(str(found.value)) < 300
