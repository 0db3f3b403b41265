"""A model learns another model's most likely tokens by the divergence that torch computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_decoder
from chat_tokenizers import byte_tokenizer, conversation
from chat_tokenizers import write as write_lines
from flax import nnx
from hf_models import need, program_of, torch_logits, write

from zerojax import data, import_hf
from zerojax.hf import FAMILIES, config_of, model_of
from zerojax.hf.decoder import Embed, Head
from zerojax.preferences import TeacherRows, distillation_loss, read_outputs, teacher_outputs
from zerojax.weights import renaming

need("torch", "transformers")

VOCAB, SEQ = 259, 48


def write_all(folder, case="llama"):
    """Write a teacher, a smaller student and rows; return the two models of transformers."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    teacher = write(case, folder / "teacher", seed=3, **sizes)
    student = write(case, folder / "student", **sizes)
    chats = [conversation(f"{a}", f"{2 * a}") for a in range(4)]
    examples = data.tokenize(write_lines(folder / "chats.jsonl", chats), byte_tokenizer())
    return teacher, student, data.pack(examples, SEQ)


def divergence(student, teacher, batch, top_k, hard) -> Any:
    """Return the loss by torch, from full logits of both models, row by row."""
    import torch

    total: Any = 0.0
    count = 0
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            at = np.flatnonzero(batch["segment_ids"][row] == segment)
            piece = {"tokens": batch["tokens"][row : row + 1, at]}
            targets = torch.tensor(batch["targets"][row, at], dtype=torch.long)
            ours = torch_logits(student, piece)[0].log_softmax(-1)
            with torch.no_grad():
                theirs = torch_logits(teacher, piece)[0].log_softmax(-1)
            values, ids = theirs.topk(top_k)
            listed = ours.gather(-1, ids)
            loss = (values.exp() * (values - listed)).sum(-1)
            if top_k < VOCAB:
                rest = torch.log(-torch.expm1(values.logsumexp(-1)))
                loss = loss + rest.exp() * (rest - torch.log(-torch.expm1(listed.logsumexp(-1))))
            counted = targets >= 0
            entropy = -ours.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
            total = total + ((1 - hard) * loss + hard * entropy)[counted].sum()
            count += int(counted.sum())
    return total / count


def test_log_probabilities_of_several_tokens_need_no_logits(tmp_path):
    """The head has a cap, and a token counts nowhere if it is negative."""
    folder = small_decoder.write(tmp_path, model_type="gemma2", final_logit_softcapping=2.0)
    config = config_of(folder)
    embed = Embed(config, rngs=nnx.Rngs(0))
    head = Head(config, rngs=nnx.Rngs(0))
    embed.embed_tokens.embedding[...] = jax.random.normal(
        jax.random.key(1), (config.vocab, config.hidden)
    )
    x = jax.random.normal(jax.random.key(2), (2, 5, config.hidden))
    ids = jax.random.randint(jax.random.key(3), (2, 5, 3), 0, config.vocab).at[0, 1].set(-1)

    def ours(x):
        return head.log_probs(embed, x, ids, None)

    def expected(x):
        log_probs = jax.nn.log_softmax(head.logits(embed, x))
        chosen = jnp.take_along_axis(log_probs, jnp.maximum(ids, 0), axis=-1)
        return jnp.where(ids >= 0, chosen, 0)

    weight = jax.random.normal(jax.random.key(4), ids.shape)
    results = [
        jax.jit(jax.value_and_grad(lambda x, of=of: (jnp.sum(weight * of(x)), of(x))[0]))(x)
        for of in (ours, expected)
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_divergence_of_all_tokens_is_that_of_full_distributions():
    rng = np.random.default_rng(0)
    theirs, ours = (jax.nn.log_softmax(jnp.float32(rng.normal(size=(2, 3, 7)))) for _ in range(2))
    batch = {
        "tokens": np.zeros((2, 3), np.int32),
        "targets": np.asarray([[1, -1, 2], [3, 4, -1]], np.int32),
        "teacher_ids": np.broadcast_to(np.arange(7, dtype=np.int32), (2, 3, 7)),
        "teacher_log_probs": np.asarray(theirs),
    }
    loss = distillation_loss()(ours, batch)
    kl = (np.exp(theirs) * (np.asarray(theirs) - np.asarray(ours))).sum(-1)
    assert loss.weight == 4
    assert float(loss.total) == pytest.approx(kl[batch["targets"] >= 0].sum(), abs=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["llama", "gemma2"])
@pytest.mark.parametrize("hard", [0.0, 0.25])
@pytest.mark.parametrize("top_k", [1, 5, VOCAB])
def test_divergence_and_its_gradients_are_those_of_full_logits(tmp_path, top_k, hard, case):
    """A gemma2 has caps on its logits, and a tied head."""
    teacher, student, rows = write_all(tmp_path, case)
    folder = tmp_path / "teacher"
    program = program_of(model_of(folder), "device", tmp_path, devices=1)
    state = import_hf(program, folder, key=jax.random.key(0))
    outputs = teacher_outputs(program, state, rows, 2, top_k=top_k, folder=tmp_path / "outputs")
    for name, array in read_outputs(tmp_path / "outputs").items():
        np.testing.assert_array_equal(array, outputs[name])
    batch = next(data.batches_once(TeacherRows(rows, outputs), 2))
    model = model_of(tmp_path / "student", loss=distillation_loss(hard=hard))
    program = program_of(model, "device", tmp_path, devices=1)
    state = import_hf(program, tmp_path / "student", key=jax.random.key(0))
    loss, grads = program.grads(state, batch)
    expected = divergence(student, teacher, batch, top_k, hard)
    expected.backward()
    assert expected.item() > 0.01  # a thousand times the bound
    assert abs(float(loss["loss"]) - expected.item()) < 1e-5
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]
    }
    place = renaming(FAMILIES[student.config.model_type].names)
    for name, parameter in student.named_parameters():
        found = place(name)
        here = leaves[found.name] if found.layer is None else leaves[found.name][found.layer]
        there = parameter.grad.numpy()
        there = there if found.axes is None else there.transpose(found.axes)
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
def test_a_student_comes_closer_to_its_teacher_in_every_tier(tmp_path, tier):
    _, _, rows = write_all(tmp_path)
    folder = tmp_path / "teacher"
    with program_of(model_of(folder), tier, tmp_path) as program:
        state = import_hf(program, folder, key=jax.random.key(0))
        outputs = teacher_outputs(program, state, rows, 2, top_k=8)
    batch = next(data.batches_once(TeacherRows(rows, outputs), 2))
    model = model_of(tmp_path / "student", loss=distillation_loss())
    losses = []
    with program_of(model, tier, tmp_path, tx=optax.adam(1e-2)) as program:
        state = import_hf(program, tmp_path / "student", key=jax.random.key(0))
        for _ in range(10):
            state, metrics = program.step(state, batch)
            losses.append(float(jax.block_until_ready(metrics["loss"])))
    assert losses[-1] < 0.3 * losses[0]


def test_outputs_of_other_rows_and_wrong_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="hard=1: a number from 0 to below 1"):
        distillation_loss(hard=1)
    batch = {"tokens": np.zeros((2, 4), np.int32), "targets": np.zeros((2, 4), np.int32)}
    with pytest.raises(ValueError, match="needs 'teacher_ids' \\[B, T, K\\] too"):
        distillation_loss().check_batch(batch)
    batch |= {"teacher_ids": np.zeros((2, 3, 5), np.int32)}
    with pytest.raises(ValueError, match=r"signed integers \[B, 4, K\] are needed"):
        distillation_loss().check_batch(batch)
