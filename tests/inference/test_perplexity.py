"""Perplexity: each counted target has the same weight, in any batches, in any processes."""

import math

import jax
import numpy as np
import optax
import packed_decoder as decoder
import pytest
from packed_examples import uneven_examples
from processes import launch

import zerojax as zj
from zerojax import data

SCRIPT = """
import optax, packed_decoder as decoder, zerojax as zj
from packed_examples import uneven_examples
from zerojax import data
program = zj.build_train_step(decoder.model(), optax.sgd(1.0), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=2))
state = program.init(jax.random.key(0))
rows = data.pack(uneven_examples(), decoder.SEQ)
value = zj.perplexity(program, state, data.batches_once(rows, 8))
generator = zj.build_train_step(decoder.generator(), optax.sgd(1.0), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=2))
state = generator.init(jax.random.key(0))
found = {"loss": value.loss, "tokens": value.tokens, "generated": []}
for cached in (True, False):
    rows = zj.generate(generator, state, [[3, 1, 4], [1], [5, 9]], 5, 1.0, key=jax.random.key(1), use_cache=cached)
    found["generated"].append([row.tolist() for row in rows])
"""


def build(model=None):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(
        model or decoder.model(), optax.sgd(1.0), zj.ZeroConfig(stage=3), mesh
    )


def test_perplexity_does_not_depend_on_batches():
    rows = data.pack(uneven_examples(), decoder.SEQ)
    with build() as program:
        state = program.init(jax.random.key(0))
        (whole,) = data.batches_once(rows, len(rows))
        expected = float(program.eval(state, whole))
        found = zj.perplexity(program, state, data.batches_once(rows, 4))
        means = np.mean([float(program.eval(state, batch)) for batch in data.batches_once(rows, 4)])
        one = (
            zj.perplexity(program, state, [program.shard_batch(whole)])
            if len(rows) % 2 == 0
            else found
        )
    assert found.tokens == one.tokens == rows.counts.counted
    np.testing.assert_allclose([found.loss, one.loss], expected, rtol=1e-6)
    assert abs(means - expected) > 1e-4 * expected  # a mean of means differs
    assert found.perplexity == math.exp(found.loss)


@pytest.mark.exhaustive  # by default two processes of test_finetune.py cover this
def test_two_processes_find_the_perplexity_and_the_tokens_of_one(tmp_path):
    rows = data.pack(uneven_examples(), decoder.SEQ)
    with build() as program:
        alone = zj.perplexity(program, program.init(jax.random.key(0)), data.batches_once(rows, 8))
    with build(decoder.generator()) as program:
        state = program.init(jax.random.key(0))
        tokens = zj.generate(
            program, state, [[3, 1, 4], [1], [5, 9]], 5, 1.0, key=jax.random.key(1)
        )
    for found in launch(SCRIPT, tmp_path / "two", 2, devices=2):
        assert found["tokens"] == alone.tokens
        assert found["generated"] == [[row.tolist() for row in tokens]] * 2
        np.testing.assert_allclose(found["loss"], alone.loss, rtol=1e-6)


def test_nothing_that_counts_is_an_error():
    row = data.pack(uneven_examples(), decoder.SEQ).empty()
    batch = {name: np.stack([a, a]) for name, a in row.items()}
    program = zj.build_train_step(
        decoder.model(),
        optax.sgd(1.0),
        zj.ZeroConfig(),
        zj.make_mesh(fsdp=2, devices=jax.devices()[:2]),
    )
    state = program.init(jax.random.key(0))
    with pytest.raises(ValueError, match="no target counts in 2 batches"):
        zj.perplexity(program, state, [batch, batch])
