"""A layered model that uses every input and output of its functions, and the plain loop.

The model must equal the loop. The number of counted tokens differs between examples. The block adds
to the loss, passes integers on, and reads context, per-layer arrays and state. The embedding and
the head update state of their own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from toys import draw

import zerojax as zj
from zerojax.models import init_params, init_state

LAYERS, HIDDEN, VOCAB, SEQ, BATCH = 3, 8, 11, 6, 16
Tree = Any


def init_block(key: jax.Array) -> Tree:
    return {"w": 0.3 * draw(key, (HIDDEN, HIDDEN)), "router": draw(key, (HIDDEN, 2), 1)}


def embed(p: Tree, batch: Tree, key: Any, state: Tree) -> tuple[Tree, Tree]:
    del key
    x = p["table"][batch["tokens"]]
    mean = jax.lax.stop_gradient(x.mean((0, 1)))
    return {"x": x - 0.1 * state["mean"], "count": batch["tokens"]}, {
        "mean": 0.5 * state["mean"] + 0.5 * mean
    }


def block(
    p: Tree, x: Tree, key: Any, context: Tree, layer: Tree, state: Tree
) -> tuple[tuple[Tree, zj.Loss], Tree]:
    del key
    h = x["x"]
    routes = jax.nn.softmax(h @ p["router"])
    use = routes.mean((0, 1))
    inner = h @ p["w"] + context["position"][..., None] * layer["scale"] + state["shift"]
    h = h + jnp.tanh(inner) * context["counts"][..., None]
    first = zj.Loss(routes[..., 0].sum(), routes[..., 0].size)
    added = zj.Loss(0.1 * jnp.sum(use**2), metrics={"use": use.max(), "first": first})
    return ({"x": h, "count": (x["count"] + 1) % VOCAB}, added), state


def predict(p: Tree, p_embed: Tree, x: Tree, batch: Tree, state: Tree) -> jax.Array:
    del p_embed, batch
    return (
        x["x"] @ p["out"]
        + 0.01 * state["embed"]["mean"].sum()
        + 0.01 * x["count"][..., None] * jnp.arange(VOCAB)
    )


def head(
    p: Tree, p_embed: Tree, x: Tree, batch: Tree, key: Any, state: Tree
) -> tuple[zj.Loss, Tree]:
    del key
    logits = predict(p, p_embed, x, batch, state)
    counts, right = batch["counts"], logits.argmax(-1) == batch["targets"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    num = counts.sum()
    loss = zj.Loss(
        jnp.sum(losses * counts), num, {"accuracy": zj.Loss(jnp.sum(right * counts), num)}
    )
    return loss, {"tokens": state["head"]["tokens"] + num.astype(jnp.int32)}


def context(batch: Tree) -> Tree:
    position = jnp.broadcast_to(jnp.arange(SEQ, dtype=jnp.float32), batch["tokens"].shape)
    return {"position": position, "counts": batch["counts"]}


def model() -> zj.LayeredModel:
    return zj.LayeredModel(
        LAYERS,
        lambda key: {"table": draw(key, (VOCAB, HIDDEN))},
        embed,
        init_block,
        block,
        lambda key: {"out": 0.3 * draw(key, (HIDDEN, VOCAB))},
        head,
        context=context,
        per_layer={"scale": np.arange(LAYERS, dtype=np.float32) / 10},
        init_state={
            "embed": lambda key: {"mean": jnp.zeros(HIDDEN)},
            "block": lambda key: {"shift": draw(key, (HIDDEN,))},
            "head": lambda key: {"tokens": jnp.int32(0)},
        },
        predict=predict,
    )


def unlayered() -> zj.Model:
    """Return the same model as a `Model`."""
    layered = model()

    def loss(params: Tree, batch: Tree, key: Any, state: Tree) -> tuple[zj.Loss, Tree]:
        total, after, metrics = forward(params, batch, state)
        del key
        return zj.Loss(
            total.total + total.weight * metrics.total,
            total.weight,
            {**total.metrics, **metrics.metrics},
        ), after

    return zj.Model(
        lambda key: init_params(layered, key),
        loss,
        init_state=lambda key: init_state(layered, key),
        predict=plain_outputs,
    )


def batches(steps: int, size: int = BATCH) -> list[Tree]:
    def batch(seed: int) -> Tree:
        rng = np.random.default_rng(seed)
        tokens, targets = (rng.integers(0, VOCAB, (size, SEQ)) for _ in range(2))
        counts = (rng.random((size, SEQ)) < rng.random((size, 1))).astype(np.float32)
        return {"tokens": tokens, "targets": targets, "counts": counts}

    return [batch(seed) for seed in range(steps)]


def _layers(params: Tree, batch: Tree, state: Tree) -> tuple[Tree, Tree, list[zj.Loss]]:
    """Return the head's input, its state, and what each layer adds to the loss."""
    layered, pick = model(), lambda tree, number: jax.tree.map(lambda a: a[number], tree)
    x, of_embed = embed(params["embed"], batch, None, state["embed"])
    added = []
    for number in range(LAYERS):
        args = (context(batch), pick(layered.per_layer, number), pick(state["blocks"], number))
        (x, one), _ = block(pick(params["blocks"], number), x, None, *args)
        added.append(one)
    return x, {"head": state["head"], "embed": of_embed}, added


def plain_outputs(params: Tree, batch: Tree, state: Tree) -> jax.Array:
    """Return the outputs of `predict`."""
    x, of_ends, _ = _layers(params, batch, state)
    return predict(params["head"], params["embed"], x, batch, of_ends)


def plain_loss(params: Tree, batch: Tree, state: Tree) -> jax.Array:
    """Return the loss of one microbatch."""
    loss, _, added = forward(params, batch, state)
    return loss.total / loss.weight + added.total


def forward(params: Tree, batch: Tree, state: Tree) -> tuple[zj.Loss, Tree, zj.Loss]:
    """Return the head's loss, the state, and the layers' losses (summed) and metrics (averaged)."""
    x, of_ends, added = _layers(params, batch, state)
    loss, of_head = head(params["head"], params["embed"], x, batch, None, of_ends)
    use = jnp.mean(jnp.stack([one.metrics["use"] for one in added]))
    first = [one.metrics["first"] for one in added]
    metrics = {
        "use": use,
        "first": zj.Loss(sum(m.total for m in first), sum(m.weight for m in first)),
    }
    after = {"embed": of_ends["embed"], "head": of_head, "blocks": state["blocks"]}
    return loss, after, zj.Loss(sum(one.total for one in added), None, metrics)


def plain_run(
    data: list[Tree], count: int, tx: optax.GradientTransformation
) -> tuple[list[Tree], Tree, Tree]:
    """Train on one device in a plain loop over microbatches.

    Returns the metrics of each step, the parameters and the state.
    """
    layered, key = model(), jax.random.key(0)
    params, state = jax.jit(lambda key: (init_params(layered, key), init_state(layered, key)))(key)
    opt_state, steps = tx.init(params), []

    @jax.jit
    def of_microbatch(params: Tree, state: Tree, batch: Tree, whole: jax.Array) -> Tree:
        def value(params: Tree) -> tuple[jax.Array, Tree]:
            loss, after, added = forward(params, batch, state)
            accuracy = loss.metrics["accuracy"]
            return loss.total / whole + added.total / count, (after, (accuracy, added.metrics))

        return jax.value_and_grad(value, has_aux=True)(params)

    for batch in data:
        losses, grads, sums = [], [], []
        for number in range(count):
            piece = jax.tree.map(lambda a, number=number: jnp.asarray(a[number::count]), batch)
            (loss, (state, metrics)), grad = of_microbatch(
                params, state, piece, batch["counts"].sum()
            )
            losses.append(loss)
            grads.append(grad)
            sums.append(metrics)
        updates, opt_state = tx.update(jax.tree.map(lambda *g: sum(g), *grads), opt_state, params)
        params = optax.apply_updates(params, updates)
        accuracy, others = jax.tree.map(lambda *m: sum(m), *sums)
        steps.append(
            {
                "loss": sum(losses),
                "accuracy": accuracy.total / accuracy.weight,
                "use": others["use"] / count,
                "first": others["first"].total / others["first"].weight,
            }
        )
    return steps, params, state
