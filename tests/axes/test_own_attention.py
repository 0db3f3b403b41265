"""Attention that a model computes itself is logged on a mesh with `context`, once a program."""

import functools

import jax
import long_decoder
import optax
import pytest

import zerojax as zj

RING = functools.partial(long_decoder.split_attention, "ring")
WORDS = "attention over context=2 is the model's own: XLA gathers its keys and values"


def unlayered(attend):
    """Return a decoder whose loss runs all blocks."""
    layered = long_decoder.model(attend)

    def init(key):
        return [layered.init_embed(key), layered.init_block(key), layered.init_head(key)]

    def loss(params, batch, key):
        x = layered.embed(params[0], batch, key)
        x = layered.block(params[1], x, key, batch["segment_ids"], None)
        return layered.head(params[2], params[0], x, batch, key)

    return zj.Model(init, loss)


def no_attention(q, k, v, segment_ids):
    return q


CASES = {
    "own": (long_decoder.model(), 1, {}),
    "own-streamed": (long_decoder.model(), 1, {"params": "pinned_host"}),
    "own-in-one-loss": (unlayered(long_decoder.plain_attention), 1, {}),
    "ring": (long_decoder.model(RING), 0, {}),
    "ring-in-one-loss": (unlayered(RING), 0, {}),
    "none": (long_decoder.model(no_attention), 0, {}),
}


@pytest.mark.by_default("own", "ring")
@pytest.mark.parametrize("case", CASES)
def test_own_attention_is_logged_once(case, caplog):
    model, count, fields = CASES[case]
    mesh = zj.make_mesh(fsdp=2, context=2, devices=jax.devices()[:4])
    with caplog.at_level("INFO", logger="zerojax"):
        program = zj.build_train_step(model, optax.sgd(0.1), zj.ZeroConfig(**fields), mesh)
        for batch in long_decoder.batches(2):
            program.check(batch)
            program.check({name: array[:, :8] for name, array in batch.items()})
    assert sum(WORDS in record.getMessage() for record in caplog.records) == count
