"""The learning rate in a step's metrics is reported if a state holds it or a schedule makes it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import zerojax as zj
from zerojax.optim import learning_rates
from zerojax.program.compile import with_learning_rates
from zerojax.state import build_layout

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-2, 2, 8)
WIDTH, LAYERS = 8, 2


def matrix(key):
    return {"w": toys.draw(key, (WIDTH, WIDTH)) / 3, "b": jnp.zeros(WIDTH)}


def layered():
    return zj.LayeredModel(
        LAYERS,
        init_embed=matrix,
        embed=lambda p, batch, key: batch["x"] @ p["w"] + p["b"],
        init_block=matrix,
        block=lambda p, x, key: x + jnp.tanh(x @ p["w"] + p["b"]),
        init_head=matrix,
        head=lambda p, p_embed, x, batch, key: jnp.mean((x @ p["w"] + p["b"] - batch["y"]) ** 2),
    )


def plain_loss(params, batch):
    model = layered()
    x = model.embed(params["embed"], batch, None)
    for layer in range(LAYERS):
        x = model.block(jax.tree.map(lambda a, n=layer: a[n], params["blocks"]), x, None)
    return model.head(params["head"], params["embed"], x, batch, None)


def labels(tree):
    """Name a group for each parameter by its path."""

    def label(path, _):
        name = jax.tree_util.keystr(path)
        return "bias" if name.endswith("['b']") else "blocks" if "blocks" in name else "ends"

    return jax.tree_util.tree_map_with_path(label, tree)


def groups():
    return optax.partition(
        {
            "blocks": optax.adamw(SCHEDULE),
            "ends": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
            "bias": optax.adam(1e-2),
        },
        labels,
    )


def mesh():
    return zj.make_mesh(fsdp=2, devices=jax.devices()[:2])


RULES = {
    "constant": (lambda: optax.adamw(1e-3), {}),
    "schedule": (lambda: optax.adamw(SCHEDULE), {"learning_rate": SCHEDULE(2)}),
    "schedule_and_average": (
        lambda: optax.chain(optax.lion(SCHEDULE), zj.Ema(0.9)),
        {"learning_rate": SCHEDULE(2)},
    ),
    "injected": (
        lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=2e-3),
        {"learning_rate": 2e-3},
    ),
    "injected_schedule": (
        lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE),
        {"learning_rate": SCHEDULE(2)},
    ),
    "groups": (groups, {"learning_rate/blocks": SCHEDULE(2), "learning_rate/ends": 0.1}),
    # Another schedule in the chain is not a rate: it scales up.
    "warm_up_beside_it": (
        lambda: optax.chain(
            optax.scale_by_schedule(lambda count: 1 / (1 + count)), optax.adamw(SCHEDULE)
        ),
        {"learning_rate": SCHEDULE(2)},
    ),
    "decay_of_a_schedule": (
        lambda: optax.chain(optax.scale_by_schedule(SCHEDULE), optax.adamw(1e-3)),
        {},
    ),
    # Unknown rates: two rates in one group, a sign flipped elsewhere, an update inside a cond.
    "two": (lambda: optax.chain(optax.sgd(SCHEDULE), optax.sgd(SCHEDULE)), {}),
    "not_negated": (
        lambda: optax.chain(optax.scale_by_schedule(lambda n: 2 * SCHEDULE(n)), optax.scale(-0.5)),
        {},
    ),
    "in_a_cond": (lambda: optax.MultiSteps(optax.adamw(SCHEDULE), 2).gradient_transformation(), {}),
}


@pytest.mark.parametrize("name", RULES)
def test_rate_is_found_where_it_can_be_known(name):
    make, expected = RULES[name]
    tx = make()
    rates = learning_rates(build_layout(layered(), tx, zj.ZeroConfig(), mesh()))
    assert set(rates.names) == set(expected)
    if expected:
        params = {
            "embed": matrix(jax.random.key(0)),
            "blocks": jax.vmap(matrix)(jax.random.split(jax.random.key(1), 2)),
        }
        params["head"] = params["embed"]
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(params, state, params)
        found = rates(state, tx.update(params, state, params)[1])  # of the third step
        assert {
            key: pytest.approx(float(value), rel=1e-6) for key, value in expected.items()
        } == found


@pytest.mark.by_default("streamed")
@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 1, "precision": "bf16"},
        {"params": "pinned_host", "opt_state": "pinned_host"},
        {"opt_state": "nvme"},
    ],
    ids=["resident", "streamed", "disk"],
)
def test_groups_have_rates_of_their_own_and_tell_them(fields, tmp_path):
    """Train 8 steps and compare with plain optax; the metrics report each step's rates."""
    random = np.random.default_rng(0)
    data = [
        {name: random.standard_normal((8, WIDTH), dtype=np.float32) for name in "xy"}
        for _ in range(8)
    ]
    tx = groups()
    with zj.build_train_step(
        layered(), tx, zj.ZeroConfig(swap_dir=str(tmp_path), **fields), mesh()
    ) as program:
        state = program.init(jax.random.key(0))

        def weights():
            pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
            blocks = jax.tree.map(
                lambda *a: np.stack(a), *[pieces[f"blocks/{n}"] for n in range(LAYERS)]
            )
            return {"embed": pieces["embed"], "blocks": blocks, "head": pieces["head"]}

        params = weights()
        opt_state = tx.init(params)
        step = jax.jit(
            lambda p, s, b: (
                jax.value_and_grad(plain_loss)(p, b)[0],
                *tx.update(jax.grad(plain_loss)(p, b), s, p),
            )
        )
        exact = fields.get("precision") is None
        for n, batch in enumerate(data):
            state, metrics = program.step(state, batch)
            assert float(metrics["learning_rate/blocks"]) == pytest.approx(
                float(SCHEDULE(n)), rel=1e-6
            )
            assert float(metrics["learning_rate/ends"]) == pytest.approx(0.1)
            assert "learning_rate/bias" not in metrics
            loss, updates, opt_state = step(params, opt_state, batch)
            params = optax.apply_updates(params, updates)
            assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-5 if exact else 0.1)
        if exact:
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), weights(), params
            )


def test_groups_by_path_of_an_nnx_module_equal_plain_optax():
    def label(path, leaf):
        return "bias" if "bias" in jax.tree_util.keystr(path) else "kernel"

    tx = optax.partition(
        {"kernel": optax.adamw(SCHEDULE), "bias": optax.sgd(0.1)},
        lambda p: jax.tree_util.tree_map_with_path(label, p),
    )
    model = zj.from_flax(
        lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        lambda m, batch: jnp.mean((m(batch) - 1) ** 2),
    )
    program = zj.build_train_step(model, tx, zj.ZeroConfig(), mesh())
    state, batch = program.init(jax.random.key(0)), np.ones((8, WIDTH), np.float32)
    params = jax.device_get(program.params(state))
    opt_state = tx.init(params)
    step = jax.jit(
        lambda p, s: tx.update(
            jax.grad(lambda p: jnp.mean((batch @ p["kernel"] + p["bias"] - 1) ** 2))(p), s, p
        )
    )
    for n in range(8):
        state, metrics = jax.block_until_ready(program.step(state, batch))
        assert float(metrics["learning_rate/kernel"]) == pytest.approx(float(SCHEDULE(n)), rel=1e-6)
        updates, opt_state = step(params, opt_state)
        params = optax.apply_updates(params, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4),
        program.params(state),
        params,
    )


def test_a_metric_of_the_losss_own_with_the_name_of_a_rate_is_refused():
    rates = learning_rates(build_layout(layered(), optax.sgd(SCHEDULE), zj.ZeroConfig(), mesh()))
    step = with_learning_rates(lambda state: ((state, {}), {"learning_rate": 0}), rates)
    with pytest.raises(ValueError, match=r"\['learning_rate'\], which are this optimizer's"):
        step(None)
