"""A step's backward sends nothing again that attention's forward sent, unless all is recomputed."""

import collections
import functools

import jax
import jax.numpy as jnp
import long_decoder
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax import hlo
from zerojax.activations import describe

MESH = {"fsdp": 2, "context": 4}
# Forward and backward of one layer. Ring: q, k, v, ids and o to zigzag order and back, 3 arrays in 3
# turns; do, delta and 3 gradients, 5 arrays in 3 turns, and 2 home.
ONCE = {"ulysses": ("all-to-all", 4, 5), "ring": ("collective-permute", 10 + 9, 10 + 15 + 2)}
CASES = {
    "ulysses-selective": ("ulysses", {"stage": 3, "activations": "selective"}),
    "ulysses-save": ("ulysses", {"stage": 3, "activations": "save"}),
    "ulysses-remat": ("ulysses", {"stage": 3, "activations": "remat"}),
    "ulysses-resident": ("ulysses", {"stage": 0, "activations": "save"}),
    "ring-selective": ("ring", {"stage": 3, "activations": "selective"}),
    "ring-save-host": ("ring", {"stage": 3, "activations": "save", "opt_state": "pinned_host"}),
    "ring-remat": ("ring", {"stage": 3, "activations": "remat"}),
}


def attend(method):
    return lambda q, k, v, ids: zj.attention(q, k, v, segment_ids=ids, method=method, block=4)


def build(model, mesh, fields):
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return zj.build_train_step(
        model,
        optax.adam(1e-2, eps=1e-2),
        zj.ZeroConfig(**fields),
        zj.make_mesh(**mesh, devices=devices),
    )


def train(model, mesh, fields):
    """Return two losses, and parameters after two steps."""
    batches = long_decoder.batches(2)
    with build(model, mesh, fields) as program:
        state = program.init(jax.random.key(0))
        losses = []
        for batch in batches:
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        layers = [jax.device_get(tree) for _, tree in program.iter_params(state)]
    return np.asarray(losses, np.float32), layers


@pytest.mark.by_default("ulysses-selective")
@pytest.mark.parametrize("case", CASES)
def test_a_step_exchanges_once(case):
    method, fields = CASES[case]
    program = build(long_decoder.model(attend(method)), MESH, fields)
    text = program.lower(long_decoder.batches(1)[0]).compile().as_text()
    op, forward, backward = ONCE[method]
    counts = collections.Counter()
    for c in hlo.collectives(text or "", unknown_trips=1):
        if c.times >= long_decoder.LAYERS - 1:
            counts[c.op] += c.times
    once = (forward + backward) * long_decoder.LAYERS
    # XLA may merge equal permutes of forward and of backward, where both are in one loop's body.
    if fields["activations"] == "remat":
        assert once < counts[op] <= once + forward * long_decoder.LAYERS
    else:
        assert once * 0.9 <= counts[op] <= once


@pytest.mark.exhaustive  # by default tests/axes/test_steps.py compares such steps
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_one_device(case):
    method, fields = CASES[case]
    losses, params = train(long_decoder.model(attend(method)), MESH, fields)
    expected, weights = train(long_decoder.model(), {"fsdp": 1}, {})
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    toys.assert_trees_close(params, weights, atol=5e-6)


@pytest.mark.exhaustive  # by default tests/axes/test_steps.py has a mesh with tensor
@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_a_step_on_a_mesh_with_tensor_equals_one_device(method):
    fields = {"stage": 3, "activations": "selective", "sequence_parallel": True}
    mesh = {"fsdp": 2, "context": 2, "tensor": 2}
    losses, params = train(long_decoder.model(attend(method)), mesh, fields)
    expected, weights = train(long_decoder.model(), {"fsdp": 1}, {})
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    toys.assert_trees_close(params, weights, atol=5e-6)


def test_what_attention_keeps_has_a_short_name():
    q, k = jnp.zeros((1, 16, 4, 8)), jnp.zeros((1, 16, 2, 8))
    with jax.set_mesh(zj.make_mesh(fsdp=2, context=4)):
        traced = jax.make_jaxpr(functools.partial(zj.attention, method="ring"))(q, k, k)
    # Its constants, such as pairs of blocks, are left out.
    expected = "attention custom_vjp_call f32[1,16,4,8] f32[1,16,2,8] f32[1,16,2,8]"
    assert describe(traced.eqns[-1]) == expected
