"""Scores, rewards and classes are those of transformers' classifiers and of TRL's RewardTrainer."""

import importlib
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from chat_tokenizers import byte_tokenizer, write
from hf_models import SIZES, adamw, need, program_of
from preference_inputs import records, whole_batch

import zerojax as zj
from zerojax.data import pack_pairs, read_preferences
from zerojax.hf import classification_loss, model_of, reward_loss

need("torch", "transformers")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytestmark = pytest.mark.filterwarnings("ignore")  # trl, transformers and peft warn
KEY = jax.random.key(0)
VOCAB = 260
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def write_classifier(folder: pathlib.Path, num_labels: int = 1) -> Any:
    """Write a random classifier as transformers does, with its tokenizer, and return it."""
    import torch
    import transformers

    torch.manual_seed(0)
    fields: dict[str, Any] = {**SIZES, "vocab_size": VOCAB, "num_labels": num_labels}
    config = transformers.LlamaConfig(**fields, pad_token_id=0)
    model = transformers.LlamaForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return load(folder)


def load(folder: pathlib.Path) -> Any:
    import transformers

    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", trust_remote_code=False
    )


def pairs_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Return packed pairs as one batch, with margins."""
    write(folder / "pairs.jsonl", records(8))
    pairs = read_preferences(folder / "pairs.jsonl", byte_tokenizer())
    batch = whole_batch(pack_pairs(pairs, 40, with_last=True))
    shape = batch["labels"].shape
    batch["margin"] = np.linspace(0, 1, batch["labels"].size, dtype=np.float32).reshape(shape)
    return batch


def sequences(batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the chosen and then the rejected sequences of a batch of pairs."""
    listed = []
    for side in (1, 2):
        for row, slot in zip(*np.nonzero(batch["labels"]), strict=True):
            listed.append(batch["tokens"][row][batch["segment_ids"][row] == 2 * slot + side])
    return listed


def padded(listed: list[np.ndarray], pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences padded on the right, and where they are."""
    length = max(map(len, listed))
    tokens = np.stack([np.pad(a, (0, length - len(a)), constant_values=pad) for a in listed])
    return tokens, np.stack([np.arange(length) < len(a) for a in listed]).astype(np.int64)


def test_scores_of_a_folder_are_those_of_transformers_and_are_exported_with_the_same_bits(tmp_path):
    import torch

    theirs = write_classifier(tmp_path / "model", 3)
    model = model_of(tmp_path / "model", loss=classification_loss(3))
    program = program_of(model, "device", tmp_path, devices=1)
    state = zj.import_hf(program, tmp_path / "model", key=KEY)
    listed = [np.arange(5, 5 + n, dtype=np.int32) for n in (9, 4)]
    tokens, mask = padded(listed)
    last = np.asarray([8, 3], np.int32)
    ours = np.asarray(program.apply(state, {"tokens": tokens, "last": last}))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits.numpy()
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
    # Padding on the left is a segment of its own, and positions begin after it.
    left = np.stack([np.pad(a, (9 - len(a), 0)) for a in listed])
    segments = np.stack([np.pad(np.ones(len(a), np.int32), (9 - len(a), 0)) for a in listed])
    positions = np.maximum(np.cumsum(segments, 1, dtype=np.int32) - 1, 0)
    batch = {"tokens": left, "segment_ids": segments, "positions": positions}
    from_left = np.asarray(program.apply(state, batch))[:, -1]
    np.testing.assert_allclose(from_left, wanted, rtol=1e-5, atol=1e-5)
    checkpoints = zj.Checkpointer(tmp_path / "checkpoints")
    checkpoints.save(program, state)
    checkpoints.wait()
    zj.export_hf(tmp_path / "checkpoints", tmp_path / "out", like=tmp_path / "model")
    exported = load(tmp_path / "out").state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(exported[name], value), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert len(config["id2label"]) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "problem", ["single_label_classification", "multi_label_classification", "regression"]
)
def test_losses_of_classes_are_those_of_transformers(tmp_path, problem):
    import torch

    theirs = write_classifier(tmp_path / "model", 3)
    theirs.config.problem_type = problem
    model = model_of(tmp_path / "model", loss=classification_loss(3, problem))
    program = program_of(model, "device", tmp_path, devices=1)
    state = zj.import_hf(program, tmp_path / "model", key=KEY)
    tokens, mask = padded([np.arange(5, 5 + n, dtype=np.int32) for n in (9, 4)])
    labels = np.asarray([[1, 0, 1], [0, 1, 1]], np.float32)
    if problem == "single_label_classification":
        labels = np.asarray([2, 0], np.int32)
    batch = {"tokens": tokens, "last": np.asarray([8, 3], np.int32), "labels": labels}
    target = torch.tensor(labels if labels.ndim == 2 else labels.astype(np.int64))
    wanted = theirs(torch.tensor(tokens), attention_mask=torch.tensor(mask), labels=target).loss
    out: Any = program.eval(state, batch)
    loss = out["loss"] if isinstance(out, dict) else out
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def torch_trainer(model: Any, folder: pathlib.Path, coefficient: float | None) -> Any:
    import datasets

    # Its modules load names on demand, which pyright does not see.
    trl: Any = importlib.import_module("trl")
    options = trl.RewardConfig(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        center_rewards_coefficient=coefficient,
        max_length=None,
    )
    lines = datasets.Dataset.from_list(records(8))
    tokenizer = byte_tokenizer()
    return trl.RewardTrainer(
        model=model, args=options, train_dataset=lines, processing_class=tokenizer
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
@pytest.mark.parametrize("coefficient", [None, 0.1])
def test_rewards_train_as_in_trl(tmp_path, tier, coefficient):
    need("trl")
    import torch

    theirs = write_classifier(tmp_path / "model")
    batch = pairs_of(tmp_path)
    listed = sequences(batch)
    pad = min(set(range(VOCAB)) - set(np.concatenate(listed).tolist()) - {0})
    tokens, mask = padded(listed, pad)
    inputs = {
        "input_ids": torch.tensor(tokens).long(),
        "attention_mask": torch.tensor(mask),
        "margin": torch.tensor(batch["margin"][batch["labels"] != 0]),
    }
    trainer = torch_trainer(theirs, tmp_path / "trl", coefficient)
    # The trainer sets it to the tokenizer's, which may be a sequence's last token.
    theirs.config.pad_token_id = pad
    loss = reward_loss(center_rewards_coefficient=coefficient)
    model = model_of(tmp_path / "model", loss=loss)
    program = program_of(model, tier, tmp_path, tx=adamw(), clip_norm=None, stage=3)
    with program:
        state = zj.import_hf(program, tmp_path / "model", key=KEY)
        theirs.train()
        optimizer = torch.optim.AdamW(theirs.parameters(), **ADAMW)
        for step in range(20):
            optimizer.zero_grad()
            wanted = trainer.compute_loss(theirs, dict(inputs))
            wanted.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
            state, metrics = program.step(state, batch)
            jax.block_until_ready(metrics["loss"])
            bound = 1e-5 if step == 0 else 1e-4
            assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=bound)
            assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=bound)
            logged = trainer._metrics["train"]
            for name in ("accuracy", "margin", "mean_reward"):
                value = logged[name][-1]
                assert float(metrics[name]) == pytest.approx(value, rel=1e-4, abs=1e-4)
            optimizer.step()


@pytest.mark.exhaustive
def test_a_new_head_trains_with_adapters_over_4_bits(tmp_path):
    from hf_models import write as write_model

    write_model("llama", tmp_path / "model", vocab_size=VOCAB)
    batch = pairs_of(tmp_path)
    lora = zj.Lora(rank=4, alpha=8)
    model = model_of(tmp_path / "model", loss=reward_loss(), lora=lora)
    program = program_of(model, "device", tmp_path, stage=3, frozen_dtype="nf4")
    state = zj.import_hf(program, tmp_path / "model", key=KEY)
    first = float(program.eval(state, batch)["loss"])
    for _ in range(5):
        state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics["loss"])
    assert float(program.eval(state, batch)["loss"]) < first


def test_another_number_of_labels_is_refused(tmp_path):
    config = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has 2 labels, but the loss has num_labels=1"):
        model_of(tmp_path, loss=reward_loss())
