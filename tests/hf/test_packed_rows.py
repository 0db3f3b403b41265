"""Rows of several sequences, and uneven masks, change no loss and no gradient."""

import jax
import numpy as np
import optax
import pytest
from hf_models import FAMILIES, batch_of, need, program_of, write

import zerojax as zj
from zerojax.hf import model_of

need("torch", "transformers")
LENGTHS = ((5, 4), (7,))
"""Lengths of the sequences in each row; the remainder is padding."""


def packed_and_alone(length=12):
    """Return a batch of rows with several sequences, and a batch with one sequence per row."""
    rng = np.random.default_rng(3)
    names = ("tokens", "targets", "segment_ids", "positions")
    packed = {name: np.zeros((len(LENGTHS), length), np.int32) for name in names}
    packed["targets"][:] = -1
    alone = {"tokens": [], "targets": []}
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for number, n in enumerate(lengths):
            tokens, end = rng.integers(1, 96, n + 1).astype(np.int32), at + n
            targets = np.where(rng.random(n) < 0.3, -1, tokens[1:])
            parts = {
                "tokens": tokens[:-1],
                "targets": targets,
                "segment_ids": number + 1,
                "positions": np.arange(n),
            }
            for name, part in parts.items():
                packed[name][row, at:end] = part
            alone["tokens"].append(np.pad(tokens[:-1], (0, length - n)))
            alone["targets"].append(np.pad(targets, (0, length - n), constant_values=-1))
            at = end
    # The devices of the mesh divide the rows.
    rows = {
        name: np.stack([*parts, np.full(length, 0 if name == "tokens" else -1)])
        for name, parts in alone.items()
    }
    return packed, {name: a.astype(np.int32) for name, a in rows.items()}


@pytest.mark.by_default("gemma3")
@pytest.mark.parametrize("case", FAMILIES)
def test_loss_of_packed_rows_is_that_of_their_sequences_alone(tmp_path, case):
    write(case, tmp_path)
    program = program_of(model_of(tmp_path), "device", tmp_path)
    state = zj.import_hf(program, tmp_path, key=jax.random.key(0))
    packed, alone = packed_and_alone()
    (loss, grads), (expected, expected_grads) = (
        program.grads(state, packed),
        program.grads(state, alone),
    )
    assert abs(float(loss) - float(expected)) < 1e-6
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    one_segment = {**packed, "segment_ids": np.minimum(packed["segment_ids"], 1)}
    assert (
        abs(float(program.eval(state, one_segment)) - float(expected)) > 1e-4
    )  # because of the segments


def weights_of(program, state):
    return [
        np.asarray(leaf) for _, tree in program.iter_params(state) for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.exhaustive  # tests/data covers one of them
@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
def test_microbatches_with_uneven_masks_have_the_gradients_of_one_batch(tmp_path, tier):
    write("qwen2", tmp_path / "model", num_hidden_layers=2)
    batch = batch_of(rows=8)
    batch["targets"][:3] = -1
    batch["targets"][3, 1:] = -1
    found = []
    for count in (1, 2, 4):
        # A step of plain descent at a rate of 1 subtracts the gradient, whatever its tier.
        program = program_of(
            model_of(tmp_path / "model"), tier, tmp_path, tx=optax.sgd(1.0), num_microbatches=count
        )
        with program:
            before = zj.import_hf(program, tmp_path / "model", key=jax.random.key(0))
            weights = weights_of(program, before)
            after, metrics = program.step(before, batch)
            found.append([metrics["loss"], *map(np.subtract, weights, weights_of(program, after))])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert max(np.abs(a).max() for a in found[0][1:]) > 0.1
