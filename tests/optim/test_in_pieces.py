"""Large leaves with their state in host memory are updated in pieces of rows, to equal results."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.optim import by_record, late_records
from zerojax.state import state_records

HOST, VOCAB, HIDDEN = "pinned_host", 48, 8
SEGMENTS = (zj.Segment(3, activations="remat"), zj.Segment(8, activations="save"))
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST}
HEAD = {"update": "in_backward", "opt_state": HOST, "layers": 12}  # 8 ticks, each with a row of 48
CASES = {
    "head": ({**HEAD, "precision": "bf16"}, {"fsdp": 2}),
    "head_8_layers": ({**HEAD, "layers": 8}, {"fsdp": 1}),
    "head_all": (
        {**HEAD, "params": HOST, "precision": "bf16", "gather_ahead": True},
        {"data": 2, "fsdp": 2},
    ),
    "head_float32": ({**HEAD, "params": HOST, "prefetch_distance": 2}, {"fsdp": 2, "tensor": 2}),
    "head_stage_1": ({**HEAD, "stage": 1, "precision": "bf16"}, {"data": 2, "fsdp": 2}),
    "head_microbatches": (
        {**HEAD, "num_microbatches": 2, "reduce_every": "step", "precision": "bf16"},
        {"fsdp": 2},
    ),
    "head_segments": (
        {**HEAD, "layers": 11, "activations": SEGMENTS, "precision": "bf16"},
        {"fsdp": 2},
    ),
    "in_backward": ({"update": "in_backward", "opt_state": HOST, "precision": "bf16"}, {"fsdp": 2}),
    "in_backward_1": ({"update": "in_backward", "opt_state": HOST}, {"fsdp": 1}),
    "all_in_backward": ({"update": "in_backward", "precision": "bf16", **ALL}, {"fsdp": 2}),
    "all_float32": (ALL, {"fsdp": 2, "tensor": 2}),
    "clip_norm": (
        {"opt_state": HOST, "clip_norm": 0.5, "num_microbatches": 2, "precision": "bf16"},
        {"fsdp": 2},
    ),
    "stage_1": ({"stage": 1, "opt_state": HOST, "precision": "bf16"}, {"data": 2, "fsdp": 2}),
}


def large_ends(layers=2):
    """Return a model whose embedding and head are larger than a layer."""
    return zj.LayeredModel(
        layers,
        lambda key: {"table": toys.draw(key, (VOCAB, HIDDEN)), "scale": jnp.ones(HIDDEN)},
        lambda p, batch, key: p["table"][batch["x"]] * p["scale"],
        lambda key: {"a": toys.draw(key, (HIDDEN, HIDDEN)) / 3, "b": jnp.zeros(HIDDEN)},
        lambda p, x, key: x + jnp.tanh(x @ p["a"] + p["b"]),
        lambda key: toys.draw(key, (HIDDEN, VOCAB)),
        lambda w, e, x, batch, key: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels((x @ w).astype(jnp.float32), batch["y"])
        ),
    )


def train(model, data, fields, axes):
    """Return the losses and state after three steps, and the last program's pieces per leaf."""
    config = zj.ZeroConfig(**{"stage": 3, **fields})
    size = int(np.prod(list(axes.values())))
    with zj.build_train_step(
        model, optax.adamw(1e-2), config, zj.make_mesh(devices=jax.devices()[:size], **axes)
    ) as program:
        losses, state = toys.run(program, program.init(jax.random.key(0)), data)
        leaves = [*jax.tree.leaves(program.params(state)), *jax.tree.leaves(state.opt_state)]
        return [np.asarray(losses), *(np.asarray(a, np.float32) for a in leaves)], str(
            program.schedule
        )


def both(monkeypatch, model, data, fields, axes):
    """Return `train`'s results with uncut and with cut leaves, and how often a leaf was cut."""
    cut = []

    def update(*args):
        cut.append(args[-2])
        return late_records.update_in_pieces(*args)

    monkeypatch.setattr(by_record, "update_in_pieces", update)
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    whole, _ = train(model, data, fields, axes)
    assert not cut
    monkeypatch.setattr(late_records, "LEAST_BYTES", 1)
    found, schedule = train(model, data, fields, axes)
    return whole, found, schedule, cut


@pytest.mark.by_default("head_segments")
@pytest.mark.parametrize("case", CASES)
def test_embedding_and_head_are_updated_in_pieces_to_the_same_numbers(case, monkeypatch):
    fields, axes = CASES[case]
    fields = dict(fields)
    model = large_ends(fields.pop("layers", 2))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 8, 5))
    data = [{"x": x, "y": y} for x, y in itertools.pairwise(tokens)]
    whole, found, schedule, cut = both(monkeypatch, model, data, fields, axes)
    assert ("8 pieces of the head: one a tick" in schedule) == case.startswith("head")
    assert len(cut) >= (1 if case.startswith("head") else 2)
    assert all(pieces.count > 1 for pieces in cut)
    # If stores are not late, the schedule reports no leaves except the layers'.
    assert ("pieces of larger leaves: after the last store" in schedule) == (
        "a tick late" in schedule
    )
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.max(np.abs(b)))


@pytest.mark.parametrize("where", ["head", "layer"])
def test_the_whole_head_is_updated_or_none_of_it(where, monkeypatch):
    """The gradient is known before the first tick.

    A layer's non-finite gradient stops only the layers below it.
    """
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    monkeypatch.setattr(late_records, "LEAST_BYTES", 1)
    plain = large_ends(12)

    def block(p, x, key):
        return plain.block(p, x, key) + 0 * jnp.sqrt(p["c"])  # where c is 0 its derivative is NaN

    def init_block(key):
        c = jax.random.normal(key)
        return {
            **plain.init_block(key),
            "c": jnp.maximum(c, 0) if where == "layer" else jnp.float32(1),
        }

    def head(w, e, x, batch, key):
        return plain.head(w, e, x, batch, key) * (jnp.nan if where == "head" else 1.0)

    model = dataclasses.replace(plain, init_block=init_block, block=block, head=head)
    config, mesh = (
        zj.ZeroConfig(stage=3, opt_state=HOST, update="in_backward"),
        zj.make_mesh(devices=jax.devices()[:1]),
    )
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 8, 5))
    with zj.build_train_step(model, optax.adamw(1e-2), config, mesh) as program:
        assert "8 pieces of the head: one a tick" in str(program.schedule)
        state = program.init(jax.random.key(0))
        before = jax.device_get(program.params(state))
        state, _ = program.step(state, {"x": tokens[0], "y": tokens[1]})
        after = jax.device_get(program.params(state))
    assert np.all(after["head"] != before["head"]) == (where == "layer")
    assert np.any(after["head"] != before["head"]) == (where == "layer")
    moved = [
        np.any(a != b) for a, b in zip(after["blocks"]["a"], before["blocks"]["a"], strict=True)
    ]
    finite = [
        where == "layer" and bool(np.all(before["blocks"]["c"][layer:] > 0)) for layer in range(12)
    ]
    assert moved == finite
    assert not np.any(after["embed"]["table"] != before["embed"]["table"])


@pytest.mark.exhaustive
def test_a_resident_model_is_updated_in_pieces_to_the_same_numbers(monkeypatch):
    fields, axes = {"opt_state": HOST, "precision": "bf16", "clip_norm": 0.5}, {"fsdp": 4}
    whole, found, _, cut = both(monkeypatch, toys.unrolled(), toys.batches(3), fields, axes)
    assert len(cut) > 2
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.max(np.abs(b)))


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([4, 4, 4], [[0], [1], [2]]),  # two groups would take 8 + 8
        ([4, 2, 2], [[0], [1, 2]]),  # three would take 4 + 2 + 4
        ([4, 4], [[0], [1]]),
        ([4, 1], [[0], [1]]),
    ],
)
def test_arrays_are_in_the_groups_whose_turns_take_least(sizes, groups):
    assert late_records._turns(sizes) == groups


def test_an_optimizer_that_combines_elements_updates_whole_leaves(monkeypatch):
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    monkeypatch.setattr(late_records, "LEAST_BYTES", 1)
    config = zj.ZeroConfig(stage=3, opt_state=HOST, update="in_backward")
    for tx, is_cut in ((optax.adamw(1e-2), True), (optax.lamb(1e-2), False)):
        with zj.build_train_step(
            large_ends(), tx, config, zj.make_mesh(devices=jax.devices()[:1])
        ) as program:
            assert ("pieces of larger leaves" in str(program.schedule)) == is_cut
    for least, told in (
        (1, "update: opt_state is read and written leaf by leaf, "),
        (1 << 40, "leaf by leaf\n"),
    ):
        monkeypatch.setattr(late_records, "LEAST_BYTES", least)
        config = zj.ZeroConfig(opt_state=HOST)
        with zj.build_train_step(
            toys.unrolled(), optax.adamw(1e-2), config, zj.make_mesh(devices=jax.devices()[:1])
        ) as program:
            assert told in str(program.schedule)
