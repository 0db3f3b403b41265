"""The reference is the model before training, and the base with its adapters off, bit for bit."""

import jax
import numpy as np
import optax
import pytest
from hf_models import need, program_of
from preference_inputs import pair_rows, whole_batch, write_inputs

import zerojax as zj
from zerojax.hf import model_of
from zerojax.preferences import read_reference, reference_log_probs, write_reference

need("torch", "transformers")

LORA = zj.Lora(rank=3, alpha=12, targets=("q_proj", "down_proj"))
TIERS = ("device", "pinned_host", "nvme")


@pytest.mark.by_default("device-float32")
@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("tier", TIERS)
def test_adapters_off_are_a_second_copy_of_the_base_bit_for_bit(tmp_path, tier, base):
    """The base is on the device, streamed from the host or from a disk, and in 4 bits or not.

    The second copy is a program of the same folder in the same tier without adapters, and for 4 bits
    the untrained state of another program.
    """
    like = write_inputs(tmp_path, hidden_size=64, num_hidden_layers=2)
    rows = pair_rows(tmp_path)
    loss = zj.dpo_loss(0.1)
    fields = {} if base == "float32" else {"frozen_dtype": base}
    copy_of = (
        model_of(like, loss=loss) if base == "float32" else model_of(like, lora=LORA, loss=loss)
    )
    with program_of(copy_of, tier, tmp_path, devices=1, **fields) as program:
        copy = zj.import_hf(program, like, key=jax.random.key(7))
        second = reference_log_probs(program, copy, rows, 2)
    model = model_of(like, lora=LORA, loss=loss)
    with program_of(model, tier, tmp_path, devices=1, tx=optax.adam(1e-2), **fields) as program:
        state = zj.import_hf(program, like, key=jax.random.key(1))
        before = reference_log_probs(program, state, rows, 2)
        batch = whole_batch(rows.with_reference(before), 4)
        losses = []
        for _ in range(2):
            state, metrics = program.step(state, batch)
            losses.append(float(jax.block_until_ready(metrics["loss"])))
        off = reference_log_probs(program, state, rows, 2, adapters=False)
        trained = reference_log_probs(program, state, rows, 2)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[1] < losses[0] - 0.01
    assert np.abs(trained - before).max() > 0.1
    np.testing.assert_array_equal(off, before)
    np.testing.assert_array_equal(off, second)


def test_adapters_cannot_be_off_where_other_weights_are_trained(tmp_path):
    like = write_inputs(tmp_path)
    rows = pair_rows(tmp_path)
    program = program_of(model_of(like, loss=zj.dpo_loss()), "device", tmp_path, devices=1)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    with pytest.raises(ValueError, match="adapters=False needs a model that trains only adapters"):
        reference_log_probs(program, state, rows, 2, adapters=False)


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "reference.npz"
    assert read_reference(path, "a") is None
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    write_reference(path, values, "a")
    np.testing.assert_array_equal(read_reference(path, "a"), values)
    with pytest.raises(ValueError, match="of another model, or of other sequences: delete it"):
        read_reference(path, "b")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="not a file of reference log-probabilities"):
        read_reference(path, "a")
    assert [file.name for file in tmp_path.iterdir()] == ["reference.npz"]
