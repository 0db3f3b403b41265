"""What Flax modules hold and change besides parameters.

They have statistics, counters, tables, sown values and scales of 8-bit floats.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import zerojax as zj

STEPS, LR, KEY = 8, 1e-2, jax.random.key(0)


def batches(count: int = STEPS) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        {name: random.standard_normal((16, 8), dtype=np.float32) for name in ("x", "y")}
        for _ in range(count)
    ]


def mse(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.norm = (
            nnx.Linear(8, 8, use_bias=False, rngs=rngs),
            nnx.BatchNorm(8, momentum=0.8, rngs=rngs),
        )

    def __call__(self, x: Any) -> jax.Array:
        return x + jnp.tanh(self.norm(self.dense(x)))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        return x + jnp.tanh(
            nn.BatchNorm(use_running_average=not train, momentum=0.8, name="norm")(
                nn.Dense(8, use_bias=False)(x)
            )
        )


def nnx_apply(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
    graph, p, s = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)
    nnx.replace_by_pure_dict(p, params)
    nnx.replace_by_pure_dict(s, stats)
    module = nnx.merge(graph, p, s)
    value = mse(module, batch)
    return value, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))


def linen_apply(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
    out, stats = LinenNormed().apply(
        {"params": params, **stats}, batch["x"], mutable=["batch_stats"]
    )
    return jnp.mean((out - batch["y"]) ** 2), stats


def plain_run(
    loss: Any, params: Any, state: Any, data: list[Any], microbatches: int
) -> tuple[list[float], Any, Any]:
    """Train on one device, one microbatch at a time.

    The loss is `loss(params, state, batch) -> (loss, new state)`.
    """
    tx = optax.adamw(LR)

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, batch: Any) -> Any:
        values, sums = [], []
        for one in (
            jax.tree.map(lambda a, i=i: a[i::microbatches], batch) for i in range(microbatches)
        ):
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, one)
            values, sums = [*values, value], [*sums, grads]
        grads = jax.tree.map(lambda *g: sum(g) / microbatches, *sums)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, sum(values) / microbatches

    params, state = jax.device_put(jax.device_get((params, state)), jax.devices()[0])
    opt_state, losses = tx.init(params), []
    for batch in data:
        params, state, opt_state, value = step(params, state, opt_state, batch)
        losses.append(float(value))
    return losses, params, state


KINDS = {
    "nnx": (lambda batch: zj.from_flax(lambda rngs: Normed(rngs), mse), nnx_apply),
    "linen": (
        lambda batch: zj.from_flax(
            LinenNormed(), mse, example_batch=batch, mutable=("batch_stats",)
        ),
        linen_apply,
    ),
}


@pytest.mark.by_default("2-3-nnx", "2-2-linen")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("microbatches", [1, 2])
def test_statistics_are_those_of_the_global_batch_microbatch_by_microbatch(
    kind, stage, microbatches
):
    make, apply = KINDS[kind]
    data = batches()
    config = zj.ZeroConfig(stage=stage, num_microbatches=microbatches)
    program = zj.build_train_step(
        make(data[0]), optax.adamw(LR), config, zj.make_mesh(fsdp=4, devices=jax.devices()[:4])
    )
    state = program.init(KEY)
    expected, params, stats = plain_run(
        apply, program.params(state), state.model_state, data, microbatches
    )
    losses, state = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(program.params(state), params, atol=1e-4)
    toys.assert_trees_close(state.model_state, stats, atol=1e-5)
    before = jax.device_get(state.model_state)
    evaluated = program.eval(state, data[0])
    x = data[0]["x"]
    if kind == "linen":  # the running averages are read, not written
        out = LinenNormed().apply({"params": jax.device_get(params), **before}, x, train=False)
        np.testing.assert_allclose(
            float(evaluated), float(jnp.mean((out - data[0]["y"]) ** 2)), rtol=1e-5
        )
    toys.assert_trees_close(state.model_state, before, atol=0)


class Holds(nnx.Module):
    """A module with a counter, a table as a Variable and as an integer Param, and sown values.

    A mask is a plain array.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.count, self.table = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.arange(8.0))
        self.order = nnx.Param(jnp.arange(8)[::-1])
        self.mask = np.arange(8.0) > 2

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        y = self.dense(x)[:, self.order[...]]
        self.sow(nnx.Intermediate, "norm", jnp.mean(y**2))
        return jnp.where(self.mask, y + self.table, 0.0)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_nnx_variables_that_are_no_parameters_are_state_and_sown_ones_are_read_by_the_loss():
    def loss(module: Any, batch: Any) -> Any:
        value = mse(module, batch)
        return value, nnx.pop(module, nnx.Intermediate)

    model, (batch,) = zj.from_flax(lambda rngs: Holds(rngs), loss), batches(1)
    assert model.init_state is not None
    params, state = model.init(KEY), model.init_state(KEY)
    assert set(params) == {"dense"}
    assert set(state) == {"count", "table", "order"}
    assert state["order"].dtype == jnp.int32
    (value, aux), after = jax.jit(model.loss)(params, batch, None, state)
    module = Holds(nnx.Rngs(KEY))
    np.testing.assert_allclose(float(value), float(mse(module, batch)), rtol=1e-6)
    sown = nnx.pop(module, nnx.Intermediate)
    np.testing.assert_allclose(float(aux["norm"][0]), float(jax.tree.leaves(sown)[0]), rtol=1e-6)
    assert int(after["count"]) == 1
    toys.assert_trees_close({**after, "count": 0}, {**state, "count": 0}, atol=0)


class LinenHolds(nn.Module):
    """A module with a counter, a table that no call changes, and sown values."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        count = self.variable("counters", "calls", lambda: jnp.int32(0))
        if not self.is_initializing():
            count.value += 1
        table = self.variable("constants", "table", lambda: jnp.arange(8.0)).value
        y = nn.Dense(8)(x)
        self.sow("losses", "norm", jnp.mean(y**2))
        return y + table


def test_linen_collections_are_state_and_sown_ones_are_read_by_the_loss():
    def loss(module: Any, batch: Any) -> Any:
        value = mse(module, batch)
        return zj.Loss(value, metrics={"norm": module.variables["losses"]["norm"][0]})

    (batch,) = batches(1)
    model = zj.from_flax(
        LinenHolds(), loss, example_batch=batch, mutable=("counters",), sown=("losses",)
    )
    params, state = model.init(KEY), model.init_state(KEY)
    assert set(state) == {"counters", "constants"}
    out, after = jax.jit(model.loss)(params, batch, KEY, state)
    assert int(after["counters"]["calls"]) == 1
    np.testing.assert_array_equal(after["constants"]["table"], np.arange(8.0))
    expected, variables = LinenHolds().apply(
        {"params": params, **state}, batch["x"], mutable=["counters", "losses"]
    )
    np.testing.assert_allclose(
        float(out.total), float(jnp.mean((expected - batch["y"]) ** 2)), rtol=1e-6
    )
    np.testing.assert_allclose(
        float(out.metrics["norm"]), float(variables["losses"]["norm"][0]), rtol=1e-6
    )
    with pytest.raises(
        ValueError, match=r"mutable names \['cache'\].*\['constants', 'counters', 'losses'\]"
    ):
        zj.from_flax(LinenHolds(), mse, example_batch=batch, mutable=("counters", "cache"))
    with pytest.raises(
        ValueError, match=r'list it in from_flax\(..., mutable=.*it is \(\).*"calls"'
    ):
        zj.from_flax(LinenHolds(), mse, example_batch=batch)


class Fp8(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        op = nn.Fp8DirectDotGeneralOp  # type: ignore[attr-defined]
        return nn.Dense(16, dot_general_cls=lambda: op(amax_history_length=4))(x)[:, :8]


def test_scales_of_8_bit_floats_are_overwritten_with_their_gradients():
    data = batches()
    model = zj.from_flax(Fp8(), mse, example_batch=data[0])
    program = zj.build_train_step(
        model,
        optax.adamw(LR),
        zj.ZeroConfig(stage=3),
        zj.make_mesh(fsdp=2, devices=jax.devices()[:2]),
    )
    state = program.init(KEY)
    params, fp8, tx = (
        jax.device_get(program.params(state)),
        jax.device_get(state.model_state),
        optax.adamw(LR),
    )
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, fp8: Any, opt_state: Any, batch: Any) -> Any:
        def loss(params: Any, fp8: Any) -> jax.Array:
            return jnp.mean((Fp8().apply({"params": params, **fp8}, batch["x"]) - batch["y"]) ** 2)

        value, (grads, fp8) = jax.value_and_grad(loss, argnums=(0, 1))(params, fp8)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), fp8, opt_state, value

    expected = []
    for batch in data:
        params, fp8, opt_state, value = step(params, fp8, opt_state, batch)
        expected.append(float(value))
    losses, state = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(state.model_state, fp8, atol=1e-4)
    toys.assert_trees_close(program.params(state), params, atol=1e-4)
    history = jax.tree.leaves(state.model_state["_overwrite_with_gradient"])
    assert any(np.asarray(leaf).std() > 0 for leaf in history)
    with pytest.raises(ValueError, match="block holds '_overwrite_with_gradient'"):
        layered(Fp8(), data[0])


class Entry(nnx.Module):
    """A head that normalizes its input, as does its loss, which reads the embedding's state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        return self.norm(batch["x"])


class Routed(Normed):
    """A block that adds to the loss, and reports a metric."""

    def __call__(self, x: jax.Array) -> Any:
        y = super().__call__(x)
        return y, zj.Loss(0.1 * jnp.mean(y**2), metrics={"size": jnp.mean(y**2)})


class LoRA(nnx.Module):
    """A layer with an adapter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class Scale(nnx.Variable[jax.Array]):
    """A variable type of the user's own."""


class Scaled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.scale = nnx.Linear(8, 8, rngs=rngs), Scale(jnp.ones(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x) * self.scale


def test_trainable_is_a_filter_or_a_function_of_path_and_value():
    (batch,) = batches(1)
    adapter = zj.from_flax(lambda rngs: LoRA(rngs), mse, trainable=nnx.LoRAParam)
    assert adapter.frozen == {
        "dense": {"bias": True, "kernel": True, "lora": {"lora_a": False, "lora_b": False}}
    }
    by_path = zj.from_flax(
        lambda rngs: LoRA(rngs), mse, trainable=lambda path, value: path[-1] == "bias"
    )
    assert by_path.frozen == {
        "dense": {"bias": False, "kernel": True, "lora": {"lora_a": True, "lora_b": True}}
    }
    of_linen = zj.from_flax(
        nn.Dense(8), mse, example_batch=batch, trainable=lambda path, value: value.ndim == 2
    )
    assert of_linen.frozen == {"bias": True, "kernel": False}
    own = zj.from_flax(lambda rngs: Scaled(rngs), mse, trainable=Scale)
    assert own.frozen == {"dense": {"bias": True, "kernel": True}, "scale": False}
    assert own.init_state is None
    assert layered(lambda rngs: LoRA(rngs), trainable=nnx.LoRAParam).frozen["head"] == {
        "bias": True,
        "kernel": True,
    }
    assert zj.from_flax(lambda rngs: LoRA(rngs), mse).frozen is False
    with pytest.raises(ValueError, match="matches no parameter"):
        zj.from_flax(lambda rngs: Normed(rngs), mse, trainable=nnx.LoRAParam)
    with pytest.raises(
        ValueError, match=r"'bias' matches no parameter.*a string is a tag of NNX variables"
    ):
        zj.from_flax(lambda rngs: LoRA(rngs), mse, trainable="bias")
    for wrong in (lambda path: True, 5):
        with pytest.raises(
            ValueError,
            match=r"trainable must be a filter of NNX, .*or a function \(path, value\) -> bool; '",
        ):
            zj.from_flax(lambda rngs: LoRA(rngs), mse, trainable=wrong)
    with pytest.raises(ValueError, match=r"module is a Linen module.*function of \(path, value\)"):
        zj.from_flax(nn.Dense(8), mse, example_batch=batch, trainable=nnx.LoRAParam)


def test_an_adapter_trains_and_its_base_stays():
    data = batches()
    model = zj.from_flax(lambda rngs: LoRA(rngs), mse, trainable=nnx.LoRAParam)
    program = zj.build_train_step(
        model,
        optax.adamw(LR),
        zj.ZeroConfig(stage=3),
        zj.make_mesh(fsdp=2, devices=jax.devices()[:2]),
    )
    state = program.init(KEY)
    params = jax.device_get(program.params(state))
    labels = jax.tree.map(lambda f: "frozen" if f else "trained", model.frozen)
    tx = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adamw(LR)}, labels)
    opt_state, expected, after = tx.init(params), [], params

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: model.loss(p, batch, None))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for batch in data:
        after, opt_state, value = step(after, opt_state, batch)
        expected.append(float(value))
    losses, state = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(program.params(state), after, atol=1e-4)
    np.testing.assert_array_equal(
        program.params(state)["dense"]["kernel"], params["dense"]["kernel"]
    )


def layered(block: Any, batch: Any = None, **options: Any) -> zj.LayeredModel:
    return zj.from_flax(
        embed=lambda rngs: Entry(rngs),
        block=block,
        head=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        num_layers=2,
        loss=lambda head, embed, x, batch: (
            jnp.mean((head(x) - batch["y"]) ** 2) + 0.1 * jnp.mean(embed(batch) ** 2)
        ),
        example_batch=batch,
        **options,
    )


def test_blocks_hold_state_of_their_layer_and_add_to_the_loss():
    data = batches()
    model = layered(lambda rngs: Routed(rngs))
    program = zj.build_train_step(
        model,
        optax.adamw(LR),
        zj.ZeroConfig(stage=3),
        zj.make_mesh(fsdp=2, devices=jax.devices()[:2]),
    )
    state = program.init(KEY)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        def bound(make: Any, p: Any, s: Any) -> Any:
            graph, params, stats = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
            nnx.replace_by_pure_dict(params, p)
            nnx.replace_by_pure_dict(stats, s)
            return nnx.merge(graph, params, stats)

        def stats(module: Any) -> Any:
            return nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

        embed = bound(Entry, params["embed"], state["embed"])
        x = embed(batch)
        of_embed, added, of_blocks = stats(embed), [], []
        for i in range(2):
            block = bound(
                Routed, *jax.tree.map(lambda a, i=i: a[i], (params["blocks"], state["blocks"]))
            )
            x, extra = block(x)
            added, of_blocks = [*added, extra.total], [*of_blocks, stats(block)]
        head = bound(lambda rngs: nnx.Linear(8, 8, rngs=rngs), params["head"], {})
        value = (
            jnp.mean((head(x) - batch["y"]) ** 2) + 0.1 * jnp.mean(embed(batch) ** 2) + sum(added)
        )
        return value, {
            "embed": of_embed,
            "blocks": jax.tree.map(lambda *a: jnp.stack(a), *of_blocks),
            "head": {},
        }

    expected, params, stats = plain_run(loss, program.params(state), state.model_state, data, 1)
    losses, state = toys.run(program, state, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    toys.assert_trees_close(program.params(state), params, atol=1e-4)
    toys.assert_trees_close(state.model_state, stats, atol=1e-5)
    evaluated = program.eval(state, data[0])
    assert set(evaluated) == {"loss", "size"}


def test_predictions_are_those_of_modules_that_evaluate():
    (batch,) = batches(1)
    whole = zj.from_flax(
        lambda rngs: Normed(rngs), mse, predict=lambda module, batch: module(batch["x"])
    )
    assert whole.predict is not None
    params, state = whole.init(KEY), whole.init_state(KEY)
    module = Normed(nnx.Rngs(KEY))
    module.eval()
    np.testing.assert_allclose(whole.predict(params, batch, state), module(batch["x"]), rtol=1e-6)
    parts = layered(
        lambda rngs: Routed(rngs), predict=lambda head, embed, x, batch: head(x) + embed(batch)
    )
    assert parts.predict is not None
    assert parts.init_state is not None
    ends = parts.init_head(KEY), parts.init_embed(KEY)
    of_ends = {name: parts.init_state[name](KEY) for name in ("embed", "head")}
    head, embed = nnx.Linear(8, 8, rngs=nnx.Rngs(KEY)), Entry(nnx.Rngs(KEY))
    embed.eval()
    outputs = parts.predict(*ends, batch["x"], batch, of_ends)
    np.testing.assert_allclose(outputs, head(batch["x"]) + embed(batch), rtol=1e-6)
    assert zj.from_flax(lambda rngs: Normed(rngs), mse).predict is None
