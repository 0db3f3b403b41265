"""Unedited Flax modules, NNX and Linen, as one module and as layers."""

import logging
from typing import Any

import flax.linen as nn
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.models import build_objective, init_params

CONFIG = gpt.GPTConfig(layers=2, hidden=32, heads=4, seq=16, vocab=64)


def tokens(count: int, size: int = 16) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        {
            "tokens": random.integers(0, 64, (size, 16)),
            "targets": random.integers(0, 64, (size, 16)),
        }
        for _ in range(count)
    ]


def mse(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def regression(count: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        {
            "x": random.standard_normal((16, 8), dtype=np.float32),
            "y": random.standard_normal((16, 8), dtype=np.float32),
        }
        for _ in range(count)
    ]


def plain_nnx(make: Any, params: Any, loss: Any, data: list[Any], lr: float) -> list[float]:
    """Train an NNX module as Flax's own documentation does, on one device."""
    module = make(nnx.Rngs(0))
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    nnx.replace_by_pure_dict(state, jax.device_put(jax.device_get(params), jax.devices()[0]))
    module = nnx.merge(graph, state, rest)
    optimizer = nnx.Optimizer(module, optax.adamw(lr), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any, batch: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(module, batch)
        optimizer.update(module, grads)
        return value

    return [float(step(module, optimizer, batch)) for batch in data]


@pytest.mark.by_default("True")
@pytest.mark.parametrize("tied", [True, False])
def test_nnx_gpt_at_stage_3_equals_plain_flax(tied):
    c = gpt.dataclasses.replace(CONFIG, tied=tied)

    def make(rngs):
        return gpt.GPT(c, rngs=rngs)

    def loss(model, batch):
        return gpt.cross_entropy(model(batch), batch)

    program = zj.build_train_step(
        zj.from_flax(make, loss),
        optax.adamw(1e-2),
        zj.ZeroConfig(stage=3),
        zj.make_mesh(data=2, fsdp=4),
    )
    state = program.init(jax.random.key(0))
    data = tokens(5)
    expected = plain_nnx(make, program.params(state), loss, data, 1e-2)
    losses, _ = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert not program.gathered_early
    assert losses[-1] != losses[0]


@pytest.fixture(scope="module")
def layered():
    return zj.build_train_step(
        gpt.layered_gpt(CONFIG), optax.adamw(1e-2), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )


def test_nnx_layered_equals_the_same_gpt_unrolled(layered):
    state = layered.init(jax.random.key(0))
    params = jax.device_get(layered.params(state))
    whole = gpt.unrolled_gpt(CONFIG)
    tree = {
        "embed": params["embed"],
        "blocks": {
            i: jax.tree.map(lambda a, i=i: a[i], params["blocks"]) for i in range(CONFIG.layers)
        },
        "head": params["head"],
    }
    batch = tokens(1)[0]
    _, metrics = layered.step(state, batch)
    np.testing.assert_allclose(
        float(metrics["loss"]), float(jax.jit(whole.loss)(tree, batch, None)), rtol=1e-6
    )


class ScannedMLP(nnx.Module):
    """Layers made by nnx.vmap and run by nnx.scan over nnx.remat, like large Flax models."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return x + jnp.tanh(layer(x))

        return run(x, self.layers)


def test_nnx_scan_over_remat_is_entered():
    def make(rngs):
        return ScannedMLP(rngs=rngs)

    program = zj.build_train_step(
        zj.from_flax(make, mse), optax.adamw(1e-2), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    data = regression(4)
    expected = plain_nnx(make, program.params(state), mse, data, 1e-2)
    losses, _ = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert not program.gathered_early


class LinenMLP(nn.Module):
    """Linen with nn.scan over nn.remat, an annotated kernel, and dropout."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Layer(nn.Module):
            rate: float

            @nn.compact
            def __call__(self, x: jax.Array, _: Any) -> Any:
                x = x + jnp.tanh(nn.Dense(8)(x))
                return nn.Dropout(self.rate, deterministic=not self.has_rng("dropout"))(x), None

        stack = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        x, _ = stack(self.rate, name="stack")(x, None)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"))
        return nn.Dense(8, kernel_init=init, name="out")(x)


def test_linen_at_stage_3_equals_plain_flax():
    module, data = LinenMLP(), regression(4)
    model = zj.from_flax(module, mse, example_batch=data[0])
    assert model.specs["out"]["kernel"] == P(None, "tensor")
    program = zj.build_train_step(
        model, optax.adamw(1e-2), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=4, tensor=2)
    )
    state = program.init(jax.random.key(0))
    params = jax.device_put(jax.device_get(program.params(state)), jax.devices()[0])
    tx = optax.adamw(1e-2)
    opt_state, expected = tx.init(params), []

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean((module.apply({"params": p}, batch["x"]) - batch["y"]) ** 2)
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in data:
        params, opt_state, loss = step(params, opt_state, batch)
        expected.append(float(loss))
    losses, _ = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert not program.gathered_early


class LinenEmbed(nn.Module):
    def setup(self) -> None:
        self.table = nn.Embed(64, 32)

    def __call__(self, batch: Any) -> jax.Array:
        return self.table(batch["tokens"])

    def attend(self, x: jax.Array) -> jax.Array:
        return self.table.attend(x)


class LinenBlock(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.rate, deterministic=not self.has_rng("dropout"))(y)


class LinenInput(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        return nn.Dense(8)(batch["x"])


def linen_layered(rate: float = 0.0) -> zj.LayeredModel:
    return zj.from_flax(
        embed=LinenEmbed(),
        block=LinenBlock(rate),
        head=nn.LayerNorm(),
        num_layers=3,
        loss=lambda head, embed, x, batch: gpt.cross_entropy(embed.attend(head(x)), batch),
        example_batch=tokens(1)[0],
        rngs=("dropout",) if rate else (),
    )


def test_linen_layered_with_tied_embedding_trains_the_same_on_any_mesh():
    results = []
    for mesh, stage in (
        (zj.make_mesh(data=2, fsdp=4), 3),
        (zj.make_mesh(devices=jax.devices()[:1]), 0),
    ):
        program = zj.build_train_step(
            linen_layered(), optax.adamw(1e-2), zj.ZeroConfig(stage=stage), mesh
        )
        assert set(program.layout.abstract_params) == {"embed", "blocks", "head"}
        losses, _ = toys.run(program, program.init(jax.random.key(0)), tokens(4))
        results.append(losses)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_tiles_of_linen_modules_are_found_in_blocks_and_whole_models():
    class Tiled(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = zj.linen.TiledDense(8, num_tiles=2)(nn.Dense(8)(x))
            return nn.Dropout(0.5, deterministic=False)(y)

    expected = {
        "Dense_0": {"bias": False, "kernel": False},
        "TiledDense_0": {"bias": False, "kernel": True},
    }
    batch = {"x": jnp.ones((4, 8))}
    whole = zj.from_flax(
        Tiled(), lambda m, b: jnp.mean(m(b["x"]) ** 2), example_batch=batch, rngs=("dropout",)
    )
    assert whole.tiles == expected
    layered = zj.from_flax(
        embed=LinenInput(),
        block=Tiled(),
        head=nn.LayerNorm(),
        num_layers=2,
        loss=lambda head, embed, x, batch: jnp.mean(head(x) ** 2),
        example_batch=batch,
        rngs=("dropout",),
    )
    assert layered.tiles == expected


def test_tiles_of_nnx_modules_are_counted_and_those_of_stacked_modules_are_not():
    class Stacked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            make = nnx.vmap(lambda rngs: zj.TiledMLP(8, 24, num_tiles=4, rngs=rngs))
            self.mlps = make(rngs.fork(split=3))
            self.out = zj.TiledDense(8, 8, in_tiles=2, num_tiles=4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(
                nnx.scan(lambda x, mlp: mlp(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                    x, self.mlps
                )
            )

    model = zj.from_flax(lambda rngs: Stacked(rngs), lambda m, b: jnp.mean(m(b["x"]) ** 2))
    assert model.tiles["out"] == {"bias": False, "kernel": 2}
    assert not any(jax.tree.leaves(model.tiles["mlps"]))
    program = zj.build_train_step(
        model, optax.sgd(1e-2), zj.ZeroConfig(stage=3), zj.make_mesh(devices=jax.devices()[:1])
    )
    losses, _ = toys.run(
        program, program.init(jax.random.key(0)), [{"x": np.ones((4, 8), np.float32)}] * 2
    )
    assert losses[1] < losses[0]


def dropout_models() -> dict[str, Any]:
    c = gpt.dataclasses.replace(CONFIG, dropout=0.5)
    return {
        "nnx_model": gpt.unrolled_gpt(c),
        "nnx_layered": gpt.layered_gpt(c),
        "linen_layered": linen_layered(0.5),
    }


@pytest.mark.by_default("nnx_layered-remat")
@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("nnx_model", "save"),
        pytest.param("nnx_layered", "save", marks=pytest.mark.exhaustive),
        ("nnx_layered", "remat"),
        ("linen_layered", "remat"),
    ],
)
def test_dropout_draws_anew_each_step_and_the_same_in_recomputation(name, activations):
    model = dropout_models()[name]
    assert model.stochastic
    batch = tokens(1)[0]
    # the first step does not move the weights
    tx = optax.sgd(lambda step: jnp.where(step == 0, 0.0, 1.0))

    def train(config: zj.ZeroConfig, mesh: Any) -> tuple[list[float], Any, Any]:
        program = zj.build_train_step(model, tx, config, mesh)
        (losses, _), (again, state) = (
            toys.run(program, program.init(jax.random.key(0)), [batch, batch]) for _ in range(2)
        )
        assert again == losses
        return (
            losses,
            jax.device_get(program.params(state)),
            jax.device_get(program.params(program.init(jax.random.key(0)))),
        )

    losses, params, before = train(
        zj.ZeroConfig(stage=3, activations=activations), zj.make_mesh(fsdp=8)
    )
    assert abs(losses[0] - losses[1]) > 1e-5  # only the key differs
    # compared with a plain gradient with the same keys: recomputation saw the same masks
    expected, reference, _ = train(zj.ZeroConfig(stage=0), zj.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(params, reference, atol=1e-5)
    assert any(
        np.abs(a - b).max() > 1e-3
        for a, b in zip(*map(jax.tree.leaves, (before, params)), strict=True)
    )


def test_dropout_is_off_in_eval():
    for model in dropout_models().values():
        program = zj.build_train_step(
            model, optax.sgd(0.0), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
        )
        state, batch = program.init(jax.random.key(0)), tokens(1)[0]
        assert float(program.eval(state, batch)) == float(program.eval(state, batch))


class Attention(nnx.Module):
    """Attention whose constructor does not set whether it is deterministic."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attend = nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attend(x[None])[0]


class SwitchedOff(nnx.Module):
    """Dropout that its constructor switches off."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense, self.drop = (
            nnx.Linear(8, 8, rngs=rngs),
            nnx.Dropout(0.5, deterministic=True, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.dense(x))


class Jitter(nnx.Module):
    """A module without random streams that training would change.

    It takes x, or a batch that holds it.
    """

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense, self.deterministic = nnx.Linear(8, 8, rngs=rngs), True

    def __call__(self, x: Any) -> jax.Array:
        return self.dense(x["x"] if isinstance(x, dict) else x) * (
            1.0 if self.deterministic else 2.0
        )


class Stacked(nnx.Module):
    """Layers of one kind, stacked by nnx.vmap."""

    def __init__(self, kind: Any, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.vmap(lambda rngs: kind(rngs=rngs))(rngs.fork(split=3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


class Projection(nnx.Module):
    """A head that takes x, or a batch that holds it."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        return self.dense(batch["x"] if isinstance(batch, dict) else batch)


def layered_of(kind: Any, embed: Any = Projection) -> zj.LayeredModel:
    return zj.from_flax(
        embed=lambda rngs: embed(rngs=rngs),
        block=lambda rngs: kind(rngs=rngs),
        head=lambda rngs: nnx.LayerNorm(8, rngs=rngs),
        num_layers=2,
        loss=lambda head, embed, x, batch: mse(
            lambda x: head(x) + embed({"x": x}), {"x": x, "y": batch["y"]}
        ),
    )


MODES = {
    "attention": lambda: zj.from_flax(lambda rngs: Attention(rngs=rngs), mse),
    "switched_off": lambda: zj.from_flax(lambda rngs: SwitchedOff(rngs=rngs), mse),
    "stacked": lambda: zj.from_flax(lambda rngs: Stacked(SwitchedOff, rngs=rngs), mse),
    "no_streams": lambda: zj.from_flax(lambda rngs: Jitter(rngs=rngs), mse),
    "layered": lambda: layered_of(Attention),
    "layered_no_streams": lambda: layered_of(Jitter),
}


@pytest.mark.parametrize("name", MODES)
def test_a_step_trains_and_eval_evaluates_whatever_the_constructor_left(name):
    model, (batch,) = MODES[name](), regression(1)
    assert model.stochastic  # a step then passes it a key, and eval does not
    if isinstance(model, zj.Model):
        params, loss = model.init(jax.random.key(0)), model.loss
    else:
        params, objective = init_params(model, jax.random.key(0)), build_objective(model)
        loss = lambda params, batch, key: objective(params, batch, key, None)[0].total  # noqa: E731
    trained, evaluated = (
        jax.jit(loss)(params, batch, jax.random.key(1)),
        jax.jit(loss)(params, batch, None),
    )
    assert abs(float(trained) - float(evaluated)) > 1e-3


def test_the_embedding_that_a_loss_calls_trains_with_its_head():
    model, (batch,) = layered_of(Projection, Jitter), regression(1)
    ends = model.init_head(jax.random.key(0)), model.init_embed(jax.random.key(0))
    trained, evaluated = (
        jax.jit(model.head)(*ends, batch["x"], batch, key) for key in (jax.random.key(1), None)
    )
    assert abs(float(trained) - float(evaluated)) > 1e-3


def test_from_flax_leaves_a_module_that_its_function_returns_in_its_mode():
    module, (batch,) = SwitchedOff(rngs=nnx.Rngs(0)), regression(1)
    model = zj.from_flax(lambda rngs: module, mse)
    for key in (jax.random.key(0), None):
        model.loss(nnx.to_pure_dict(nnx.state(module, nnx.Param)), batch, key)
        assert module.drop.deterministic is True


def test_annotations_of_nnx_modules_become_specs(layered):
    c = gpt.dataclasses.replace(CONFIG, tensor_axis="tensor")
    program = zj.build_train_step(
        gpt.layered_gpt(c),
        optax.adamw(1e-2),
        zj.ZeroConfig(stage=3),
        zj.make_mesh(fsdp=4, tensor=2),
    )
    assert program.shardings.params["blocks"]["fc"]["kernel"].spec == P(None, "fsdp", "tensor")
    assert program.shardings.params["blocks"]["out"]["kernel"].spec == P(None, "tensor", "fsdp")
    assert program.shardings.params["embed"]["token"]["embedding"].spec == P("tensor", "fsdp")
    state = program.init(jax.random.key(0))
    losses = [
        toys.run(p, s, tokens(3))[0]
        for p, s in ((program, state), (layered, layered.init(jax.random.key(0))))
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


class WithTables(nnx.Module):
    """Constant arrays as plain attributes.

    They are a table that the constructor traces, a numpy mask, and an array in nnx.data.
    """

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.table = jnp.sin(jnp.arange(8.0))
        self.mask = np.arange(8.0) > 2
        self.more = nnx.data({"scale": jnp.full((8,), 2.0)})

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.where(self.mask, self.dense(x) + self.table, 0.0) * self.more["scale"]


class ScannedDropout(nnx.Module):
    """Layers with random streams, stacked by nnx.vmap."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Sequential:
            return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: nnx.Sequential) -> jax.Array:
            return x + layer(x)

        return run(x, self.layers)


def test_nnx_constants_are_kept():
    model = zj.from_flax(lambda rngs: WithTables(rngs=rngs), mse)
    program = zj.build_train_step(
        model, optax.adamw(1e-2), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    state = program.init(jax.random.key(0))
    assert set(program.params(state)) == {"dense"}
    module, batch = WithTables(rngs=nnx.Rngs(0)), regression(1)[0]
    nnx.update(module, {"dense": jax.device_get(program.params(state))["dense"]})
    _, metrics = program.step(state, batch)
    np.testing.assert_allclose(float(metrics["loss"]), float(mse(module, batch)), rtol=1e-6)


def test_nnx_scan_over_layers_with_dropout():
    model = zj.from_flax(lambda rngs: ScannedDropout(rngs=rngs), mse)
    program = zj.build_train_step(
        model, optax.sgd(0.0), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    state, batch = program.init(jax.random.key(0)), regression(1)[0]
    losses, state = toys.run(program, state, [batch, batch])
    assert abs(losses[0] - losses[1]) > 1e-5
    assert float(program.eval(state, batch)) == float(program.eval(state, batch))


class LinenTable(nn.Module):
    """A constant as a variable is part of the state; as an array it is part of the program."""

    is_variable: bool = True

    def setup(self) -> None:
        table = jnp.arange(8.0)
        self.table = (
            self.variable("constants", "table", lambda: table).value
            if self.is_variable
            else jnp.asarray(table)
        )
        self.dense = nn.Dense(8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x) + self.table


def test_a_linen_constant_is_an_array_made_in_setup_or_a_variable():
    (batch,) = regression(1)
    array, variable = (zj.from_flax(LinenTable(v), mse, example_batch=batch) for v in (False, True))
    params, state = array.init(jax.random.key(0)), variable.init_state(jax.random.key(0))
    assert set(params) == {"dense"}
    assert array.init_state is None
    assert set(state) == {"constants"}
    value, after = variable.loss(params, batch, None, state)
    assert float(value) == float(array.loss(params, batch, None))
    np.testing.assert_array_equal(after["constants"]["table"], np.arange(8.0))


class WithAxes(nnx.Module):
    """A kernel in 16 bits whose dims have names unknown to the mesh."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.dense = nnx.Linear(8, 8, kernel_init=init, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def test_logical_axes_are_refused_with_what_translates_them():
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return WithAxes(rngs=rngs)

    mesh = zj.make_mesh(fsdp=4, tensor=2)
    with pytest.raises(ValueError, match=r"names axis 'embed'.*axis_rules"):
        zj.build_train_step(zj.from_flax(make, mse), optax.sgd(0.1), zj.ZeroConfig(stage=3), mesh)
    model = zj.from_flax(make, mse, axis_rules=(("embed", None), ("mlp", "tensor")))
    program = zj.build_train_step(model, optax.sgd(0.1), zj.ZeroConfig(stage=3), mesh)
    assert program.shardings.params["dense"]["kernel"].spec == P("fsdp", "tensor")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_made_in_16_bits_are_said_to_become_float32_once(caplog, precision):
    model = zj.from_flax(lambda rngs: nnx.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=rngs), mse)
    with caplog.at_level(logging.WARNING, "zerojax"):
        zj.build_train_step(
            model, optax.sgd(0.1), zj.ZeroConfig(precision=precision), zj.make_mesh()
        )
    (message,) = [r.getMessage() for r in caplog.records if "bfloat16" in r.getMessage()]
    for words in (
        "2 parameter leaves",
        "['bias']",
        "made in bfloat16",
        "float32",
        f"precision='{precision}'",
        "param_dtype",
    ):
        assert words in message


def test_what_from_flax_refuses():
    with pytest.raises(ValueError, match="lambda rngs: Linear"):
        zj.from_flax(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mse)
    with pytest.raises(ValueError, match="example_batch"):
        zj.from_flax(nn.Dense(8), mse)
    with pytest.raises(ValueError, match=r"list it in from_flax\(..., mutable=.*batch_stats"):
        zj.from_flax(nn.BatchNorm(use_running_average=False), mse, example_batch=regression(1)[0])
    with pytest.raises(ValueError, match="calling it failed"):
        zj.from_flax(nnx.Linear, mse)
    with pytest.raises(ValueError, match="it got \\['embed'\\]"):
        zj.from_flax(embed=nn.Dense(8), loss=mse)
    with pytest.raises(ValueError, match="needs a loss"):
        zj.from_flax(nn.Dense(8))
    with pytest.raises(ValueError, match=r"rngs -> nnx\.Module, but it returned int"):
        zj.from_flax(lambda rngs: 3, mse)  # type: ignore[arg-type]


class NnxWindowed(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x, context, layer):
        seen = (context["position"] % layer["window"] > 0).astype(x.dtype)[..., None]
        return x + seen * jnp.tanh(self.up(x))


class LinenWindowed(nn.Module):
    @nn.compact
    def __call__(self, x, context, layer):
        seen = (context["position"] % layer["window"] > 0).astype(x.dtype)[..., None]
        return x + seen * jnp.tanh(nn.Dense(16)(x))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_blocks_read_a_context_and_data_of_their_layer(kind):
    """Build the model from plain functions, as for a LayeredModel."""
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    batch, layers = {"tokens": tokens, "targets": tokens}, 3
    block = {"nnx": lambda rngs: NnxWindowed(rngs=rngs), "linen": LinenWindowed()}[kind]

    class OfTokens(nn.Module):
        @nn.compact
        def __call__(self, batch):
            return nn.Embed(8, 16)(batch["tokens"])

    class NnxOfTokens(nnx.Module):
        def __init__(self, *, rngs):
            self.table = nnx.Embed(8, 16, rngs=rngs)

        def __call__(self, batch):
            return self.table(batch["tokens"])

    head = {"nnx": lambda rngs: nnx.LayerNorm(16, rngs=rngs), "linen": nn.LayerNorm()}[kind]
    windows = np.asarray([2, 3, 4], np.int32)
    model = zj.from_flax(
        embed=(lambda rngs: NnxOfTokens(rngs=rngs)) if kind == "nnx" else OfTokens(),
        block=block,
        head=head,
        num_layers=layers,
        loss=lambda head, embed, x, batch: jnp.mean(head(x)[..., 0] * batch["targets"]),
        example_batch=batch,
        context=lambda batch: {
            "position": jnp.broadcast_to(
                jnp.arange(batch["tokens"].shape[1]), batch["tokens"].shape
            )
        },
        per_layer={"window": windows},
    )
    params = init_params(model, jax.random.key(0))
    x = model.embed(params["embed"], batch, None)
    kernel, bias = sorted(jax.tree.leaves(params["blocks"]), key=lambda a: -a.ndim)
    for layer in range(layers):
        seen = (jnp.arange(4) % windows[layer] > 0)[None, :, None]
        x = x + seen * jnp.tanh(x @ kernel[layer] + bias[layer])
    expected = model.head(params["head"], params["embed"], x, batch, None)
    program = zj.build_train_step(
        model, optax.sgd(0.1), zj.ZeroConfig(), zj.make_mesh(devices=jax.devices()[:1])
    )
    np.testing.assert_allclose(
        program.eval(program.init(jax.random.key(0)), batch), expected, rtol=1e-6
    )
    assert float(program.eval(program.init(jax.random.key(0)), batch)) != 0
    with pytest.raises(
        ValueError,
        match="from_flax got a single module together with context, which only blocks read",
    ):
        zj.from_flax(
            lambda rngs: NnxOfTokens(rngs=rngs), lambda m, b: 0.0, context=lambda batch: None
        )
