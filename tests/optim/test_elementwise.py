"""Which optimizers can update a layer or a leaf at a time.

The results must equal an update of the full tree.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.jaxprs import only_live
from zerojax.optim.elementwise import elementwise_update
from zerojax.state.opt_state import call_update

PARAMS = {"a": jnp.arange(32.0).reshape(8, 4) / 7, "b": {"c": jnp.ones(4), "s": jnp.float32(2)}}
ABSTRACT = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), PARAMS)


def is_a(tree):
    return {"a": True, "b": {"c": False, "s": True}}


ELEMENTWISE = {
    "adamw": optax.adamw(1e-2),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)),
    "decay_of_matrices": optax.adamw(1e-2, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
    "lion": optax.lion(1e-2),
    "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "clipped_elements": optax.chain(optax.clip(0.5), optax.rmsprop(1e-2)),
    "masked": optax.chain(
        optax.masked(optax.adam(1e-2), is_a), optax.masked(optax.set_to_zero(), {"a": False, "b": {"c": True, "s": False}})
    ),
    "partitioned": optax.multi_transform({"x": optax.adam(1e-2), "y": optax.sgd(0.1)}, {"a": "x", "b": {"c": "y", "s": "x"}}),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    # contains a constant that is not a number
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "size in the rate": optax.chain(
        optax.scale_by_adam(), optax.stateless(lambda u, p: jax.tree.map(lambda x: -1e-3 * x.size**0.5 * x, u))
    ),
    "size in a mask": optax.adamw(1e-2, weight_decay=1.0, mask=lambda tree: jax.tree.map(lambda p: p.size > 8, tree)),
    "size in a label": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-3)}, lambda tree: jax.tree.map(lambda p: "a" if p.size > 8 else "b", tree)
    ),
}  # fmt: skip
NO_STACKS = (False, False, False)

REFUSED = {
    "lamb": (optax.lamb(1e-2), r"reduce_sum combines elements of \['a'\]"),
    "global norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        "reduce_sum combines",
    ),
    "adafactor": (optax.adafactor(1e-2), "mirrors no parameter"),
    "muon": (optax.contrib.muon(1e-2), "mirrors no parameter"),
    "adaptive clipping": (optax.adaptive_grad_clip(0.1), "reduce_sum combines"),
    "accumulation": (
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        "cond combines",
    ),
    "signs of zero": (
        optax.stateless(
            lambda u, p: jax.tree.map(
                lambda x: (
                    x / np.copysign(np.zeros(x.shape), np.arange(x.size).reshape(x.shape) - 1)
                ),
                u,
            )
        ),
        "different constants",
    ),
    "centred": (optax.centralize(), "combines elements|different constants"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_updating_in_parts_equals_updating_the_tree(name):
    tx = ELEMENTWISE[name]
    update = elementwise_update(tx, ABSTRACT, "opt_state='pinned_host'", NO_STACKS)
    params, state = PARAMS, tx.init(PARAMS)
    tree, state_tree = jax.tree.structure(params), jax.tree.structure(state)
    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p * (step + 1)), params)
        loss = jnp.float32(3 - step)
        # One equation at a time, as the rule is run here: equal to the last bit.
        plain = only_live(lambda g, s, p, value: call_update(tx, g, s, p, value))
        updates, expected_state = plain(grads, state, params, loss)
        expected = optax.apply_updates(params, updates)
        leaves = jax.tree.leaves(state)
        shared = [leaves[i] for i in update.opt_map.shared]
        new, after = (
            {},
            dict(zip(update.opt_map.shared, update((), (), (), (), shared, loss)[2], strict=True)),
        )
        for part in ((0,), (1, 2)):
            own = update.opt_map.list_state_leaves(part)
            pick = lambda t, part=part: [jax.tree.leaves(t)[i] for i in part]  # noqa: E731
            moved, states, scalars = update(
                part, pick(grads), pick(params), [leaves[i] for i in own], shared, loss
            )
            new |= dict(zip(part, moved, strict=True))
            after |= dict(zip(own, states, strict=True))
            for a, b in zip(scalars, (after[i] for i in update.opt_map.shared), strict=True):
                np.testing.assert_array_equal(a, b)
        params = jax.tree.unflatten(tree, [new[i] for i in sorted(new)])
        state = jax.tree.unflatten(state_tree, [after[i] for i in sorted(after)])
        jax.tree.map(np.testing.assert_array_equal, (params, state), (expected, expected_state))


@pytest.mark.parametrize("name", ["adamw", "size in a mask", "size in a label", "schedule_free"])
def test_rows_of_a_leaf_get_what_they_get_in_the_whole(name):
    """Pieces, tiles and shards of a leaf differ in size from the leaf that decides."""
    tx, state = ELEMENTWISE[name], ELEMENTWISE[name].init(PARAMS)
    update = elementwise_update(tx, ABSTRACT, "opt_state='pinned_host'", NO_STACKS)
    leaves, grad, loss = jax.tree.leaves(state), jnp.sin(PARAMS["a"]), jnp.float32(1)
    own, shared = update.opt_map.list_state_leaves((0,)), [leaves[j] for j in update.opt_map.shared]
    whole = update((0,), [grad], [PARAMS["a"]], [leaves[j] for j in own], shared, loss)
    for rows in (slice(0, 1), slice(3, 8)):
        first = update.first_states((0,), [PARAMS["a"][rows]])
        jax.tree.map(np.testing.assert_array_equal, first, [leaves[j][rows] for j in own])
        some = update((0,), [grad[rows]], [PARAMS["a"][rows]], first, shared, loss)
        jax.tree.map(
            np.testing.assert_array_equal,
            list(some[:2]),
            [[a[rows] for a in part] for part in whole[:2]],
        )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused_by_the_equation(name):
    tx, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        elementwise_update(tx, ABSTRACT, "update_on='host'", NO_STACKS)


def test_a_leaf_in_anothers_update_is_refused():
    def update(updates, state, params=None):
        return {
            "a": updates["a"],
            "b": {"c": updates["b"]["c"] * (params or {})["b"]["s"], "s": updates["b"]["s"]},
        }, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(ValueError, match=r"mul combines \['b'\]\['c'\] and \['b'\]\['s'\]"):
        elementwise_update(tx, ABSTRACT, "x", NO_STACKS)
