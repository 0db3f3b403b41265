"""Bad input is refused at build time, with names, numbers and a remedy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from host_offload.disk.errors import SwapError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stage": 4}, ["stage=4", "0, 1, 2, 3"]),
        ({"stage": "3"}, ["stage='3'"]),
        ({"stage": True}, ["stage=True"]),
        ({"params": "disk"}, ["params='disk'", "'device', 'pinned_host', 'nvme'"]),
        ({"stag": 3}, ["'stag'", "did you mean 'stage'"]),
        ({"colour": 3}, ["'colour'", "the fields are stage"]),
        ({"precision": "fp8"}, ["precision='fp8'", "'fp32', 'bf16', 'fp16'"]),
        ({"activations": "drop"}, ["activations='drop'"]),
        ({"moments": "float16"}, ["moments='float16'", "'float32', 'bfloat16'"]),
        ({"num_microbatches": 0}, ["num_microbatches=0"]),
        ({"clip_norm": -1.0}, ["clip_norm=-1.0"]),
        ({"clip_norm": "1"}, ["clip_norm='1'"]),
        ({"clip_norm": True}, ["clip_norm=True"]),
        ({"loss_scaling": {"initial": 8}}, ["loss_scaling", "LossScaling"]),
        ({"swap_dir": 3}, ["swap_dir=3", "path"]),
        ({"swap_dir": b"/tmp"}, ["swap_dir=b'/tmp'", "str"]),
        ({"clip_norm": float("nan")}, ["clip_norm=nan"]),
        ({"prefetch_distance": -1}, ["prefetch_distance=-1"]),
        ({"min_shard_bytes": 1.5}, ["min_shard_bytes=1.5"]),
        (
            {"update": "in_backward", "clip_norm": 1.0},
            ["in_backward", "clip_norm=1.0", "after_backward"],
        ),
        ({"params": "pinned_host", "stage": 2}, ["params='pinned_host'", "stage=3", "stage=2"]),
        ({"update_on": "host"}, ["update_on='host'", "opt_state"]),
        ({"opt_state": "nvme"}, ["swap_dir"]),
        ({"update": "in_backward", "precision": "fp16"}, ["in_backward", "fp16", "overflow"]),
        ({"delayed_update": True}, ["delayed_update=True", "update_on='host'"]),
        (
            {"delayed_update": True, "update_on": "host", "opt_state": "pinned_host"},
            ["precision='fp32'", "params='pinned_host'"],
        ),
        (
            {"opt_state_device_fraction": 0.5},
            ["opt_state_device_fraction=0.5", "opt_state='device'"],
        ),
        (
            {"opt_state_device_fraction": 1.0, "opt_state": "pinned_host"},
            ["opt_state_device_fraction=1.0", "below 1"],
        ),
        ({"gather_ahead": True, "stage": 2}, ["gather_ahead=True", "stage=3", "stage=2"]),
        ({"saved_names": ["x"]}, ["saved_names=['x']", "tuple"]),
        ({"saved_names": ("x",), "offloaded_names": ("x",)}, ["['x']", "one place"]),
        ({"device_budget_bytes": 0}, ["device_budget_bytes=0"]),
        ({"reduce_dtype": "int8"}, ["reduce_dtype='int8'"]),
        ({"reduce_dtype": "float16", "precision": "bf16"}, ["float16", "bf16"]),
        ({"reduce_every": "epoch"}, ["reduce_every='epoch'", "'microbatch'", "'step'"]),
        (
            {"reduce_every": "step", "reduce_dtype": "bfloat16", "precision": "bf16"},
            ["reduce_every='step'", "reduce_dtype='bfloat16'", "float32"],
        ),
    ],
)
def test_config_refuses(fields, words):
    with pytest.raises(ValueError) as e:  # noqa: PT011
        zj.ZeroConfig(**fields)
    assert all(word in str(e.value) for word in words), e.value


def test_a_swap_dir_is_any_path_and_kept_as_a_string(tmp_path):
    config = zj.ZeroConfig(opt_state="nvme", swap_dir=tmp_path)  # type: ignore[arg-type]
    assert config.swap_dir == str(tmp_path)
    assert config == zj.ZeroConfig(opt_state="nvme", swap_dir=str(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"opt_state": "nvme"},
        *(
            {name: "nvme", "opt_state": "pinned_host"}
            for name in ("params", "grads", "activations")
        ),
    ],
)
def test_build_refuses_a_delayed_update_with_the_nvme_tier(fields):
    name = next(name for name, tier in fields.items() if tier == "nvme")
    with pytest.raises(
        NotImplementedError, match=f"delayed_update=True is not supported.*{name}='nvme'"
    ):
        build(
            delayed_update=True,
            update_on="host",
            swap_dir="nowhere",
            **{"params": "pinned_host", **fields},
        )


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"initial": 0.5}, ["least <= initial"]),
        ({"growth_factor": 1.0}, ["growth_factor=1.0"]),
        ({"backoff_factor": 1.0}, ["backoff_factor=1.0"]),
        ({"hysteresis": 0}, ["hysteresis=0"]),
    ],
)
def test_loss_scaling_refuses(scaling, words):
    with pytest.raises(ValueError) as e:  # noqa: PT011
        zj.LossScaling(**scaling)
    assert all(word in str(e.value) for word in words), e.value


def build(
    model: Any = None, tx: Any = None, batch: Any = None, mesh: Any = None, **config: Any
) -> zj.Program:
    model = toys.layered() if model is None else model
    tx = optax.adam(1e-3) if tx is None else tx
    return zj.build_train_step(
        model, tx, zj.ZeroConfig(**config), mesh or zj.make_mesh(fsdp=8), batch=batch
    )


def refused(words: list[str], **arguments: Any) -> None:
    with pytest.raises(ValueError) as e:  # noqa: PT011
        build(**arguments)
    assert all(word in str(e.value) for word in words), e.value


def test_a_swap_folder_in_use_is_a_swap_error(tmp_path):
    one = build(opt_state="nvme", swap_dir=str(tmp_path), batch=toys.batches(1)[0])
    with pytest.raises(zj.SwapError, match="in use by this process") as e:
        build(opt_state="nvme", swap_dir=str(tmp_path), batch=toys.batches(1)[0])
    assert type(e.value) is SwapError
    one.close()


def test_batch_that_does_not_divide():
    refused(
        ["30", "data 1 x fsdp 8", "num_microbatches 2 = 16", "such as 16"],
        batch=toys.batches(1, 30)[0],
        num_microbatches=2,
    )


def test_batch_that_is_empty_or_no_tree_of_arrays():
    refused(["a batch of 0"], batch=toys.batches(1, 0)[0])
    program = build()
    state = program.init(jax.random.key(0))
    for bad in ("hello", {"tokens": "hello"}):
        with pytest.raises(ValueError, match="tree of arrays, but"):
            program.step(state, bad)


def test_state_that_was_donated():
    program = build()
    state, batch = program.init(jax.random.key(0)), toys.batches(1)[0]
    after, _ = program.step(state, batch)
    with pytest.raises(ValueError, match="donated to an earlier step"):
        program.step(state, batch)
    program.step(after, batch)


def test_a_state_that_is_none():
    program, batch = build(), toys.batches(1)[0]
    state = program.init(jax.random.key(0))
    of_numpy, abstract = jax.device_get(state), jax.eval_shape(lambda: state)
    in_part = dataclasses.replace(state, params=of_numpy.params)
    for other, kind in (
        (of_numpy, "ndarray"),
        (in_part, "ndarray"),
        (abstract, "ShapeDtypeStruct"),
    ):
        for use in (program.step, program.eval):
            with pytest.raises(
                ValueError, match=f"this state holds a {kind} where a jax.Array is needed"
            ):
                use(other, batch)
    for other in (None, (state, {})):
        with pytest.raises(
            ValueError, match=r"a zerojax\.TrainState is needed, .* not (NoneType|tuple)"
        ):
            program.step(other, batch)


def test_keys():
    program = build()
    with pytest.raises(ValueError, match=r"jax\.random\.key\(0\), got 0"):
        program.init(0)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        program.init(jax.random.split(jax.random.key(0)))
    legacy, typed = program.init(jax.random.PRNGKey(3)), program.init(jax.random.key(3))
    toys.assert_trees_close(legacy.params, typed.params, atol=0)


def test_mesh_and_positional_config():
    with pytest.raises(ValueError, match="make_mesh, got NoneType"):
        zj.build_train_step(toys.layered(), optax.adam(1e-3), zj.ZeroConfig(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by name, such as stage=3"):
        zj.ZeroConfig(3)  # type: ignore[call-arg]


def test_batch_with_unequal_leaves():
    batch = toys.batches(1)[0] | {"features": np.zeros((16, 7), np.float32)}
    refused(["differ", "'features'", "16", "32"], batch=batch)


def test_batch_is_also_refused_by_step_memory_and_lower_before_anything_runs():
    program = build()
    state = program.init(jax.random.key(0))
    bad, good = toys.batches(1, 30)[0], toys.batches(1)[0]
    for call in (
        lambda: program.step(state, bad),
        lambda: program.memory(bad),
        lambda: program.lower(bad),
    ):
        with pytest.raises(ValueError, match="does not divide"):
            call()
    program.step(state, good)  # the state was not donated


def test_loss_that_is_not_a_scalar():
    def model(loss):
        return zj.Model(lambda key: {"w": jnp.ones((8, 8))}, loss)

    batch = {"x": np.ones((8, 8), np.float32)}
    refused(["scalar", "(8, 8)", "mean"], model=model(lambda p, b, k: b["x"] @ p["w"]), batch=batch)
    refused(
        ["one scalar", "zj.Loss"], model=model(lambda p, b, k: [jnp.sum(p["w"]), {}]), batch=batch
    )
    refused(["computed from the parameters", "1.0"], model=model(lambda p, b, k: 1.0), batch=batch)
    refused(["floating scalar", "int32"], model=model(lambda p, b, k: jnp.int32(3)), batch=batch)
    program = build(model=model(lambda p, b, k: b["x"] @ p["w"]))
    with pytest.raises(ValueError, match="scalar"):
        program.step(program.init(jax.random.key(0)), batch)


def test_parameters_that_are_not_floating():
    model = zj.Model(
        lambda key: {"w": jnp.ones(8), "table": {"z": 1j * jnp.arange(8)}},
        lambda p, b, k: jnp.sum(p["w"]),
    )
    refused(["['table']['z'] (complex64)", "floating"], model=model)
    integers = zj.Model(lambda key: {"ids": jnp.arange(8)}, lambda p, b, k: jnp.float32(0))
    refused(["all 1 parameter leaves are frozen"], model=integers)
    refused(["no parameters"], model=zj.Model(lambda key: {}, lambda p, b, k: jnp.float32(0)))


def test_model_config_and_optimizer_of_the_wrong_kind():
    refused(["zerojax.Model", "function"], model=lambda p, b, k: 0.0)
    refused(["GradientTransformation", "float"], tx=3e-4)
    with pytest.raises(ValueError, match="ZeroConfig"):
        zj.build_train_step(toys.layered(), optax.adam(1e-3), {"stage": 3}, zj.make_mesh())  # type: ignore[arg-type]


def test_optimizers_that_a_sharded_step_cannot_run():
    refused(["value_fn", "value=loss", "search along a line"], tx=optax.lbfgs())
    sam = functools.partial(optax.contrib.sam, optax.adam(1e-2), optax.sgd(0.05))
    refused(["grad_fn", "opaque_mode=False"], tx=sam(opaque_mode=True))
    refused(["obj_fn", "another batch"], tx=optax.contrib.sophia(1e-3))
    refused(
        ["takes no value=loss", "needs it"],
        tx=optax.chain(sam(), optax.contrib.reduce_on_plateau()),
    )
    odd = optax.GradientTransformation(lambda p: {"f": print}, lambda g, s, p=None: (g, s))  # type: ignore[arg-type]
    refused(["initialised as sharded arrays"], tx=odd)
    grows = optax.GradientTransformation(
        lambda p: jnp.zeros(2), lambda g, s, p=None: (g, jnp.concatenate([s, s]))
    )  # type: ignore[arg-type]
    refused(["changes shape", "(2,)", "(4,)"], tx=grows)
    drops = optax.GradientTransformation(
        lambda p: optax.EmptyState(), lambda g, s, p=None: (g["head"], s)
    )
    refused(["structure"], tx=drops)
    scalars = optax.GradientTransformation(
        lambda p: optax.EmptyState(),
        lambda g, s, p=None: (jax.tree.map(lambda _: jnp.float32(0), g), s),
    )
    refused(["parameters' shapes", "() for (16,)"], tx=scalars)
    unfolds = optax.GradientTransformation(
        lambda p: (), lambda g, s, p=None: (g, (jnp.float32(1),))
    )
    refused(["state changes structure"], tx=unfolds)
    refused(["update cannot run", "AttributeError"], tx=optax.lookahead(optax.sgd(0.1), 5, 0.5))


def test_block_that_changes_its_input():
    model = zj.LayeredModel(
        2,
        toys.init_embed,
        toys.embed,
        toys.init_block,
        lambda p, x, key: x[..., :-1],
        toys.init_head,
        toys.head,
    )
    refused(["block must return x as it got it"], model=model, batch=toys.batches(1)[0])
    with pytest.raises(ValueError, match="num_layers=0"):
        zj.LayeredModel(
            0, toys.init_embed, toys.embed, toys.init_block, toys.block, toys.init_head, toys.head
        )
    with pytest.raises(ValueError, match="blocks"):
        zj.LayeredModel(
            2,
            toys.init_embed,
            toys.embed,
            toys.init_block,
            toys.block,
            toys.init_head,
            toys.head,
            specs={"blocks": None},
        )


def test_offload_with_a_plain_model():
    with pytest.raises(ValueError, match=r"params='pinned_host'.*LayeredModel"):
        build(model=toys.unrolled(), params="pinned_host")


@pytest.mark.parametrize(
    "fields",
    [
        {"params": "pinned_host"},
        {"grads": "pinned_host"},
        {"activations": "pinned_host"},
        {"activations": "selective"},
        {"update": "in_backward"},
        {"gather_ahead": True},
        {"saved_names": ("x",)},
        {"opt_state_device_fraction": 0.5, "opt_state": "pinned_host"},
        {
            "delayed_update": True,
            "update_on": "host",
            "opt_state": "pinned_host",
            "precision": "bf16",
        },
    ],
)
def test_a_model_without_layers_is_refused_what_works_layer_by_layer(fields):
    name, value = next(iter(fields.items()))
    refused(
        [f"{name}={value!r}", "layers of a Model are not known", "from_flax"],
        model=toys.unrolled(),
        **fields,
    )


def test_a_schedule_that_exceeds_its_budget_says_what_fits():
    with pytest.raises(
        ValueError, match=r"device_budget_bytes=\d+: prefetch_distance=4.*nothing fits"
    ):
        build(params="pinned_host", prefetch_distance=4, device_budget_bytes=100)
    least = (
        build(params="pinned_host", prefetch_distance=1).operations(toys.batches(1)[0]).peak_bytes
    )
    with pytest.raises(ValueError, match=r"prefetch_distance=4.*prefetch_distance=1"):
        build(params="pinned_host", prefetch_distance=4, device_budget_bytes=least)
    build(params="pinned_host", prefetch_distance=1, device_budget_bytes=least)


def test_host_memory_that_is_not_there_is_refused_with_the_bytes(monkeypatch):
    program = build(params="pinned_host", opt_state="pinned_host")
    monkeypatch.setattr("host_offload.device.limits.available_bytes", lambda: 1000)
    with pytest.raises(
        RuntimeError, match=r"no room for \d+ bytes .* of pinned host memory.*1000 bytes"
    ):
        program.init(jax.random.key(0))


def test_a_budget_where_nothing_streams_is_refused():
    refused(["device_budget_bytes=1", "does not stream"], device_budget_bytes=1)
    refused(
        ["device_budget_bytes=1"],
        model=toys.unrolled(),
        device_budget_bytes=1,
        opt_state="pinned_host",
    )


def test_a_state_of_another_program_is_refused():
    one = build(params="pinned_host")
    with pytest.raises(ValueError, match=r"host memory, and this program's is .* in device memory"):
        build().step(one.init(jax.random.key(0)), toys.batches(1)[0])
