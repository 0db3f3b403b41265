"""Programs with reduce_every="step": one reduction per step.

The results equal one reduction per microbatch.
"""

import dataclasses
import functools
import logging
from typing import Any

import encoder_decoder
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax import hlo
from zerojax.grads import unreduced_grads

LOSS, PARAMS = 2e-6, 1e-5  # relative; to a leaf's largest element
HOST, DISK = "pinned_host", "nvme"
STEPS = 3


# --- one step, in full ----------------------------------------------------------------------------


def tiny() -> zj.LayeredModel:
    """A product, a bias and a look-up, tied, on which every kind of sum is computed."""

    def init(key: jax.Array) -> Any:
        return {"table": toys.draw(key, (8, 16))}

    def init_block(key: jax.Array) -> Any:
        return {"w": toys.draw(key, (16, 16)) / 4, "b": jnp.zeros(16)}

    def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(x @ p_embed["table"].T + p["bias"], -1)) + 1e-2 * jnp.sum(
            p["bias"] ** 2
        )

    return zj.LayeredModel(
        2, init, lambda p, batch, key: p["table"][batch], init_block, lambda p, x, key: jnp.tanh(x @ p["w"] + p["b"]),
        lambda key: {"bias": jnp.arange(8.0)}, head,
    )  # fmt: skip


def tiny_loss(p: Any, batch: Any) -> jax.Array:
    model = tiny()
    x = model.embed(p["embed"], batch, None)
    for i in range(model.num_layers):
        x = model.block(jax.tree.map(lambda a, i=i: a[i], p["blocks"]), x, None)
    return model.head(p["head"], p["embed"], x, batch, None)


@pytest.mark.parametrize("fields", [{}, {"update": "in_backward"}], ids=["resident", "streamed"])
def test_a_step_is_that_of_plain_optax_and_gradients_are_reduced_once(fields):
    config = zj.ZeroConfig(stage=2, num_microbatches=2, reduce_every="step", **fields)
    batch = np.arange(64).reshape(16, 4) % 7
    with zj.build_train_step(tiny(), optax.sgd(0.5), config, zj.make_mesh(fsdp=8)) as program:
        state = program.init(jax.random.key(0))
        before = by_name(program, state)
        params = {"embed": before["embed"], "head": before["head"]}
        params["blocks"] = jax.tree.map(
            lambda *a: np.stack(a), before["blocks/0"], before["blocks/1"]
        )
        loss, exact = jax.jit(jax.value_and_grad(tiny_loss))(params, batch)
        text = program.lower(jax.ShapeDtypeStruct(batch.shape, batch.dtype)).compile().as_text()
        state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)
        after = by_name(program, state)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=LOSS)
    grads = {"embed": exact["embed"], "head": exact["head"]}
    grads |= {f"blocks/{i}": jax.tree.map(lambda a, i=i: a[i], exact["blocks"]) for i in (0, 1)}
    assert_close(after, jax.tree.map(lambda a, g: a - 0.5 * g, before, grads))
    found = hlo.collectives(text, unknown_trips=1, mesh=program.mesh)
    # XLA for CPUs only has all_reduces. Each layer of a streamed step is a loop of its own.
    elements = (
        sum(
            c.num_bytes * c.times
            for c in found
            if c.op in ("all-reduce", "reduce-scatter") and c.num_bytes > 16
        )
        // 4
    )
    num_params = sum(np.size(a) for a in jax.tree.leaves(params))
    assert num_params <= elements < num_params + 8  # the loss and the norm are reduced with them


def by_name(program: zj.Program, state: Any) -> dict[str, Any]:
    return {name: jax.device_get(tree) for name, tree in program.iter_params(state)}


def assert_close(actual: Any, expected: Any) -> None:
    flat, expected_flat = (
        jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (actual, expected)
    )
    assert [path for path, _ in flat] == [path for path, _ in expected_flat]
    for (path, a), (_, b) in zip(flat, expected_flat, strict=True):
        atol = PARAMS * max(float(np.max(np.abs(b), initial=0)), 1e-3)
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


def test_data_may_split_a_leaf_but_then_it_has_no_sums_of_its_own():
    model = zj.with_specs(toys.layered(), {"w1$": P("data")})
    mesh, batch = zj.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4]), toys.batches(1)[0]
    zj.build_train_step(
        model, optax.adamw(1e-3), zj.ZeroConfig(stage=1, num_microbatches=2), mesh, batch=batch
    )
    config = zj.ZeroConfig(stage=1, num_microbatches=2, reduce_every="step")
    with pytest.raises(
        ValueError,
        match=r"reduce_every='step' sums .* 'data' splits .*w1.*use reduce_every='microbatch'",
    ):
        zj.build_train_step(model, optax.adamw(1e-3), config, mesh, batch=batch)


def test_a_model_whose_layers_are_not_known_is_refused():
    with pytest.raises(ValueError, match=r"reduce_every='step' works layer by layer.*from_flax"):
        zj.build_train_step(
            toys.unrolled(),
            optax.sgd(0.5),
            zj.ZeroConfig(reduce_every="step"),
            zj.make_mesh(fsdp=8),
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("fields", [{}, {"opt_state": HOST}], ids=["resident", "streamed"])
def test_the_default_is_every_microbatch_and_one_microbatch_has_nothing_to_sum(fields):
    def text(**settings: Any) -> str:
        config = zj.ZeroConfig(precision="bf16", **fields, **settings)
        program = zj.build_train_step(
            toys.layered(), optax.adamw(1e-3), config, zj.make_mesh(fsdp=8)
        )
        return program.lower(toys.batches(1)[0]).as_text()

    assert text(num_microbatches=2) == text(num_microbatches=2, reduce_every="microbatch")
    assert text(reduce_every="step") == text(reduce_dtype="float32")
    assert text(num_microbatches=2) != text(num_microbatches=2, reduce_every="step")


# --- every stage, tier and mode -------------------------------------------------------------------


def run(
    model: zj.LayeredModel, data: list[Any], mesh: dict[str, int] | None = None, **fields: Any
) -> tuple[list[float], Any]:
    """Return the losses of the steps, and the parameters by name."""
    config = zj.ZeroConfig(**{"num_microbatches": 2, **fields})
    with zj.build_train_step(
        model, optax.adamw(1e-2, eps=1e-3), config, zj.make_mesh(**(mesh or {"fsdp": 8}))
    ) as program:
        state, losses = program.init(jax.random.key(0)), list[float]()
        for batch in data:
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, by_name(program, state)


@functools.cache
def of_each_microbatch() -> tuple[list[float], Any]:
    return run(toys.layered(), toys.batches(STEPS), stage=2)


TIERS: dict[str, dict[str, Any]] = {
    "resident": {},
    "on_device": {"update": "in_backward"},
    "host": {"opt_state": HOST, "grads": HOST},
    "disk": {"opt_state": DISK, "grads": DISK},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["save", "selective", "remat"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_tier_and_mode_equals_a_reduction_a_microbatch(stage, tier, mode, tmp_path):
    fields = {"stage": stage, "activations": mode, **TIERS[tier]}
    if stage == 3 and tier in ("host", "disk"):
        fields["params"] = fields["opt_state"]
    if tier == "disk":
        fields["swap_dir"] = str(tmp_path)
    losses, params = run(toys.layered(), toys.batches(STEPS), reduce_every="step", **fields)
    exact_losses, exact = of_each_microbatch()
    np.testing.assert_allclose(losses, exact_losses, rtol=LOSS)
    assert_close(params, exact)


def small_gpt(**fields: Any) -> zj.LayeredModel:
    return gpt.layered_gpt(
        gpt.GPTConfig(**{"vocab": 64, "seq": 16, "hidden": 32, "layers": 2, "heads": 4, **fields})
    )


def tokens(count: int = STEPS) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        {name: random.integers(0, 64, (32, 16)) for name in ("tokens", "targets")}
        for _ in range(count)
    ]


def weighted() -> zj.LayeredModel:
    """A loss whose weights differ between devices and between microbatches."""

    def head(p: Any, p_embed: Any, x: jax.Array, batch: Any, key: Any) -> zj.Loss:
        logits = (x @ p_embed["table"].T + p["bias"]) * jnp.mean(p["frozen"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        )
        mask = batch["tokens"] < jnp.arange(len(x))[:, None]
        return zj.Loss(jnp.sum(losses * mask), jnp.sum(mask), {"masked": jnp.sum(mask)})

    return dataclasses.replace(toys.layered(), head=head)


TENSOR, BOTH = {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "replicas": (toys.layered, toys.batches, {"mesh": {"data": 2, "fsdp": 4}}),
    "replicas_streamed": (toys.layered, toys.batches, {"mesh": {"data": 4, "fsdp": 2}, **ALL}),
    "tensor": (lambda: toys.layered(tensor=True), toys.batches, {"mesh": BOTH, "stage": 2}),
    "clipped": (toys.layered, toys.batches, {"clip_norm": 0.1, "num_microbatches": 4}),
    "fp16": (toys.layered, toys.batches, {"precision": "fp16", "reduce_dtype": "float32", "stage": 2}),
    "all_on_host": (toys.layered, toys.batches, {**ALL, "num_microbatches": 4}),
    "updated_on_host": (toys.layered, toys.batches, {**ALL, "update_on": "host"}),
    "delayed": (toys.layered, toys.batches, {**ALL, "update_on": "host", "delayed_update": True}),
    "gathered_ahead": (toys.layered, toys.batches, {"opt_state": HOST, "gather_ahead": True}),
    "small_leaves_whole": (toys.layered, toys.batches, {"stage": 3, "min_shard_bytes": 1 << 20}),
    "gpt_dropout": (lambda: small_gpt(dropout=0.2), tokens, {"activations": "remat"}),
    "gpt_dropout_streamed": (lambda: small_gpt(dropout=0.2, tied=False), tokens, {**ALL, "activations": "selective"}),
    "gpt_tiled_loss": (lambda: small_gpt(loss_tiles=4), tokens, {"stage": 2}),
    "gpt_tiled_loss_tensor": (lambda: small_gpt(loss_tiles=2, tensor_axis="tensor"), tokens, {"mesh": BOTH}),
    "gpt_sequence": (lambda: small_gpt(tensor_axis="tensor"), tokens, {"mesh": TENSOR, "sequence_parallel": True}),
    "gpt_sequence_streamed": (
        lambda: small_gpt(tensor_axis="tensor"), tokens, {"mesh": TENSOR, "sequence_parallel": True, **ALL}
    ),
    "gpt_parts": (lambda: small_gpt(tensor_axis="tensor"), tokens, {"mesh": TENSOR, "partition_activations": True}),
    "gpt_tiles": (lambda: small_gpt(mlp_tiles=4), tokens, {}),
    "gpt_tiles_streamed": (lambda: small_gpt(mlp_tiles=4), tokens, {**ALL, "activations": "save"}),
    "weights": (weighted, toys.batches, {"stage": 2}),
    "weights_streamed": (weighted, toys.batches, ALL),
    "tiles": (tiled_toys.model, lambda count: tiled_toys.batches(count, 32), {}),
    "tiles_streamed": (tiled_toys.model, lambda count: tiled_toys.batches(count, 32), {**ALL, "update": "in_backward"}),
    "stacks": (encoder_decoder.model, lambda count: encoder_decoder.batches(count), {"stage": 2}),
    "stacks_streamed": (encoder_decoder.model, lambda count: encoder_decoder.batches(count), ALL),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", OTHERS)
def test_other_settings_and_models_equal_a_reduction_a_microbatch(case, caplog):
    make, data, fields = OTHERS[case]
    losses, params = run(make(), data(STEPS), **fields)
    with caplog.at_level(logging.WARNING):
        once_losses, once = run(make(), data(STEPS), reduce_every="step", **fields)
    np.testing.assert_allclose(once_losses, losses, rtol=LOSS)
    assert_close(once, params)
    assert not [r for r in caplog.records if "reduce_every" in r.getMessage()]


# --- the rewriting --------------------------------------------------------------------------------

ROWS, D = 16, 6


def looked_up(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x[:, None] @ (p["table"][ids] * p["scale"]).mT)) + 0.1 * jnp.sum(
        p["table"] ** 2
    )


def transposed(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    y = (jnp.broadcast_to(x[:, None], (ROWS, 3, D)).reshape(ROWS * 3, D) @ p["w"]).reshape(
        ROWS, 3, D
    )
    return jnp.sum(jnp.sin(jnp.einsum("btd,tde->bte", y, p["each"]).transpose(1, 0, 2) + p["bias"]))


def merged(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    """LoRA: the gradient of a merged weight is passed on to the weights that it is made of."""
    return jnp.sum(jnp.tanh(x @ (p["w"] + p["down"] @ p["up"] / jnp.linalg.norm(p["w"]))))


def scanned(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.checkpoint(lambda x, w, b: jnp.tanh(x @ w + b))(x, w, p["bias"])
        return jax.lax.cond(jnp.sum(ids) > 3, lambda: y @ p["w"], lambda: jnp.sin(y)), jnp.sum(y)

    x, sums = jax.lax.scan(body, x, p["each"])
    return jnp.sum(x) + jnp.sum(sums)


def convolved(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        x[..., None], p["kernel"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.sum(y**3)


def in_islands(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(
        zj.linear_cross_entropy(x, p["vocab"], ids[:, 0], num_tiles=2) * jnp.sum(p["bias"])
    )


@jax.custom_vjp
def decayed(w: jax.Array) -> jax.Array:
    """Return w, with a derivative of its own that adds a term to the gradient.

    The term is not a sum over the batch, so it counts once.
    """
    return w


decayed.defvjp(lambda w: (w, w), lambda w, g: (g + 0.05 * w,))


@jax.custom_vjp
def clipped(w: jax.Array) -> jax.Array:
    """Return w, with a derivative of its own that clips the gradient of the complete sum."""
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (g / jnp.maximum(1, jnp.sqrt(jnp.sum(g * g))),))


def own_rule(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(x @ decayed(p["w"])) @ p["down"])


FUNCTIONS = [looked_up, transposed, merged, scanned, convolved, in_islands, own_rule]
SHAPES = {
    "table": (7, D), "scale": (D,), "w": (D, D), "each": (3, D, D), "bias": (D,), "down": (D, 2), "up": (2, D),
    "kernel": (3, 1, 4), "vocab": (D, 16),
}  # fmt: skip


def gradients(function: Any, x: jax.Array) -> tuple[Any, Any, str]:
    """Return a function's unreduced gradients, its plain gradients, and a compiled program.

    The program is that of the unreduced gradients.
    """
    keys = dict(zip(SHAPES, jax.random.split(jax.random.key(0), len(SHAPES)), strict=True))
    params = {name: jax.random.normal(keys[name], shape) for name, shape in SHAPES.items()}
    ids = jnp.arange(ROWS * 2).reshape(ROWS, 2) % 7
    mesh = zj.make_mesh(data=2, fsdp=4)

    def derivative(dy: jax.Array, data: Any, params: Any) -> tuple[Any, Any]:
        value, pullback = jax.vjp(lambda p, x: function(p, x, data[1]), params, data[0])
        grads, dx = pullback(dy)
        return grads, (value, dx)

    with jax.set_mesh(mesh):
        at = jax.NamedSharding(mesh, P(("data", "fsdp")))
        args = (jnp.float32(2), jax.device_put((x, ids), at), params)
        compiled = jax.jit(unreduced_grads(derivative, mesh)).lower(*args).compile()
        own, others = compiled(*args)
        exact, exact_others = jax.jit(derivative)(*args)
    jax.block_until_ready((own, exact))
    np.testing.assert_array_equal(others[0], exact_others[0])
    np.testing.assert_allclose(others[1], exact_others[1], rtol=1e-5, atol=1e-6)
    return own, exact, compiled.as_text() or ""


@pytest.mark.by_default("transposed", "own_rule")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_rows_of_gradients_are_those_of_each_devices_batch_and_are_made_without_a_reduction(
    function, caplog
):
    own, exact, text = gradients(function, jax.random.normal(jax.random.key(1), (ROWS, D)))
    for name, g in own.items():
        assert g.shape == (8, *exact[name].shape)
        np.testing.assert_allclose(np.sum(g, 0), exact[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert not [r for r in caplog.records if "reduce_every" in r.getMessage()]
    # Only the loss and values that a branch depends on are reduced.
    assert all(c.num_bytes <= 4 for c in hlo.collectives(text, unknown_trips=1))


@pytest.mark.exhaustive
def test_a_sum_that_cannot_be_cut_is_reduced_where_it_is_made_and_reported(caplog):
    def looped(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        order = jnp.argsort(jnp.sum(x, 1))
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(x[order], p["each"], jnp.asarray([5, 8, 3]))))

    own, exact, _ = gradients(looped, jax.random.normal(jax.random.key(1), (ROWS, D)))
    np.testing.assert_allclose(np.sum(own["each"], 0), exact["each"], rtol=1e-5, atol=1e-5)
    assert any(
        "ragged_dot" in r.getMessage() and "each microbatch" in r.getMessage()
        for r in caplog.records
    )


def test_a_gradient_that_a_rule_of_the_models_own_clips_is_clipped_by_the_norm_of_the_sum():
    def function(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x @ clipped(p["w"])) @ p["down"])

    own, exact, _ = gradients(function, jax.random.normal(jax.random.key(1), (ROWS, D)))
    np.testing.assert_allclose(np.sum(own["w"], 0), exact["w"], rtol=1e-5, atol=1e-5)
