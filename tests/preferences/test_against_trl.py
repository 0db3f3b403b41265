"""Losses, gradients and steps over the same pairs are those of TRL's trainers, in float32."""

import importlib
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from chat_tokenizers import byte_tokenizer, write
from hf_models import adamw, need, program_of
from hf_models import write as write_model
from preference_inputs import SEQ, VOCAB, records, whole_batch, write_inputs

import zerojax as zj
from zerojax.data import PairRows, Preferences, pack_pairs, read_preferences
from zerojax.data.examples import ExampleBuilder
from zerojax.hf import FAMILIES, model_of
from zerojax.preferences import reference_log_probs
from zerojax.weights import renaming

need("torch", "transformers", "peft", "trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytestmark = [
    pytest.mark.exhaustive,  # importing trl alone takes seconds
    pytest.mark.filterwarnings("ignore"),  # trl, transformers and peft warn about each other
]

LOSS, GRADIENT, STEPS = 1e-5, 1e-5, 1e-4
"""Largest allowed differences."""
BETA, GAMMA, COUNT = 0.2, 0.4, 20
KINDS = ("sigmoid", "ipo", "orpo", "kto", "simpo")


def load(folder: pathlib.Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", trust_remote_code=False
    )


def trainer_of(
    kind: str, model: Any, reference: Any, lines: list[Any], folder: pathlib.Path
) -> Any:
    """Return TRL's trainer of a kind."""
    import datasets

    # Its modules load names on demand, which pyright does not see.
    trl: Any = importlib.import_module("trl")
    cpo: Any = importlib.import_module("trl.experimental.cpo")
    orpo: Any = importlib.import_module("trl.experimental.orpo")
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "sigmoid": (trl.DPOTrainer, trl.DPOConfig, {"loss_type": ["sigmoid"], "max_length": None}),
        "ipo": (trl.DPOTrainer, trl.DPOConfig, {"loss_type": ["ipo"], "max_length": None}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, {"max_length": None}),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, {}),
        "simpo": (
            cpo.CPOTrainer,
            cpo.CPOConfig,
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": GAMMA},
        ),
    }
    trainer, config, more = kinds[kind]
    options = config(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=8,
        beta=BETA,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        **more,
    )
    of_reference = {} if reference is None else {"ref_model": reference}
    return trainer(
        model=model,
        args=options,
        train_dataset=datasets.Dataset.from_list(lines),
        processing_class=byte_tokenizer(),
        **of_reference,
    )


def sequences(ids: Any, attention: Any, is_answer: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the tokens of each sequence of TRL's batch, and which of them belong to an answer."""
    listed = []
    for tokens, kept, counted in zip(ids, attention, is_answer, strict=True):
        chosen = kept.numpy().astype(bool)
        listed.append(
            (tokens.numpy()[chosen].astype(np.int32), counted.numpy()[chosen].astype(bool))
        )
    return listed


def rows_of(kind: str, batch: Any, source: Any, seq: int = SEQ) -> PairRows:
    """Return the sequences of TRL's batch as rows."""
    if kind in ("sigmoid", "ipo"):
        both = sequences(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        first, second = both[: len(both) // 2], both[len(both) // 2 :]
        labels = np.ones(len(first), np.int32)
    elif kind == "kto":
        first = sequences(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        second = sequences(
            batch["KL_input_ids"], batch["KL_attention_mask"], batch["KL_completion_mask"]
        )
        labels = np.where(batch["label"].numpy(), 1, -1).astype(np.int32)
    else:
        first, second = (
            sequences(
                batch[f"{name}_input_ids"],
                batch[f"{name}_attention_mask"],
                batch[f"{name}_labels"] != -100,
            )
            for name in ("chosen", "rejected")
        )
        labels = np.ones(len(first), np.int32)
    builder = ExampleBuilder()
    for i, pair in enumerate(zip(first, second, strict=True)):
        for tokens, counted in pair:
            builder.add(tokens, counted, i)
    return pack_pairs(Preferences(builder.finish(source), labels, True), seq)


def copy_base(theirs: Any, program: zj.Program, state: zj.TrainState) -> None:
    """Give a torch model the base that a program computes with, decoded."""
    import torch

    pieces = dict(program.iter_params(state))
    place = renaming(FAMILIES[theirs.config.model_type].names)
    for name, parameter in theirs.named_parameters():
        if (found := place(name)) is None:
            continue
        part, *path = found.name.split(".")
        tree = pieces[part if found.layer is None else f"blocks/{found.layer}"]
        for key in path:
            tree = tree[key]
        value = np.asarray(tree, np.float32)
        value = value if found.axes is None else value.transpose(found.axes)
        with torch.no_grad():
            parameter.copy_(torch.tensor(value))


def torch_steps(trainer: Any, batch: Any, parameters: Any) -> list[float]:
    """Return the losses of AdamW steps of TRL's loss over one batch."""
    import torch

    optimizer = torch.optim.AdamW(
        parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    losses = []
    for _ in range(COUNT):
        optimizer.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def steps(program: zj.Program, state: zj.TrainState, batch: Any) -> list[float]:
    losses = []
    for _ in range(COUNT):
        state, metrics = program.step(state, batch)
        losses.append(float(jax.block_until_ready(metrics["loss"])))
    return losses


@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_gradients_and_steps_are_those_of_trl(tmp_path, kind, tier):
    """The reference of DPO, IPO and KTO is another model than the one that is trained."""
    like = write_inputs(tmp_path)
    other = tmp_path / "other"
    write_model("llama", other, vocab_size=VOCAB, seed=3)
    lines = records(4) if kind == "kto" else records(8)
    if kind == "kto":
        lines = [
            {"prompt": line["prompt"], "completion": line[key], "label": key == "chosen"}
            for line in lines
            for key in ("chosen", "rejected")
        ]
    loss = zj.dpo_loss(BETA, kind, gamma=GAMMA)
    reference = load(other) if loss.reads_reference else None
    trainer = trainer_of(kind, load(like), reference, lines, tmp_path / "trl")
    theirs = next(iter(trainer.get_train_dataloader()))
    source = read_preferences(tmp_path / "pairs.jsonl", byte_tokenizer()).examples.source
    rows = rows_of(kind, theirs, source)
    if loss.reads_reference:
        model = model_of(other, loss=loss)
        with program_of(model, "device", tmp_path, devices=1) as program:
            state = zj.import_hf(program, other, key=jax.random.key(0))
            rows = rows.with_reference(reference_log_probs(program, state, rows, len(rows)))
    batch = whole_batch(rows)
    if tier == "device":
        program = program_of(model_of(like, loss=loss), tier, tmp_path)
        state = zj.import_hf(program, like, key=jax.random.key(0))
        value = trainer.compute_loss(trainer.model, theirs)
        value.backward()
        out, grads = program.grads(state, batch)
        assert abs(float(out["loss"]) - value.item()) < LOSS
        flat = jax.tree_util.tree_flatten_with_path(grads)[0]
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
            for path, leaf in flat
        }
        place = renaming(FAMILIES["llama"].names)
        for name, parameter in trainer.model.named_parameters():
            found = place(name)
            here = leaves[found.name] if found.layer is None else leaves[found.name][found.layer]
            there = parameter.grad.numpy()
            there = there if found.axes is None else there.transpose(found.axes)
            # Of the largest gradient, because IPO's are in the hundreds.
            bound = GRADIENT * max(1.0, float(np.abs(there).max()))
            np.testing.assert_allclose(here, there, rtol=0, atol=bound, err_msg=name)
    with program_of(model_of(like, loss=loss), tier, tmp_path, tx=adamw(1e-3)) as program:
        state = zj.import_hf(program, like, key=jax.random.key(0))
        ours = steps(program, state, batch)
    expected = torch_steps(trainer, theirs, trainer.model.parameters())
    assert abs(expected[0] - expected[-1]) > 0.05
    np.testing.assert_allclose(ours, expected, rtol=STEPS, atol=STEPS)


@pytest.mark.parametrize("kind", ["sigmoid", "kto"])
def test_adapters_over_4_bits_on_a_disk_track_trl_with_peft(tmp_path, kind):
    """The reference is the same base with the adapters off, here and in TRL."""
    import peft

    like = write_inputs(tmp_path, hidden_size=64, intermediate_size=256)
    lines = records(8)
    if kind == "kto":
        lines = [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in lines]
        lines = [{**line, "label": i % 2 == 0} for i, line in enumerate(lines)]
    model = model_of(like, lora=zj.Lora(3, 12, "all"), loss=zj.dpo_loss(BETA, kind))
    fields = {"frozen": "nvme", "frozen_dtype": "nf4", "swap_dir": str(tmp_path)}
    with program_of(model, "device", tmp_path, devices=1, **fields) as program:
        state = zj.import_hf(program, like, key=jax.random.key(1))
        base = load(like)
        copy_base(base, program, state)
        with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
            ckpt.save(program, state)
        zj.export_peft(tmp_path / "ckpt", tmp_path / "adapters", like=like)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True)
        trainer = trainer_of(kind, adapted, None, lines, tmp_path / "trl")
        theirs = next(iter(trainer.get_train_dataloader()))
        source = read_preferences(tmp_path / "pairs.jsonl", byte_tokenizer()).examples.source
        rows = rows_of(kind, theirs, source)
        rows = rows.with_reference(reference_log_probs(program, state, rows, 2, adapters=False))
        ours = steps(program, state, whole_batch(rows))
    trained = [
        p for name, p in trainer.model.named_parameters() if "lora_" in name and p.requires_grad
    ]
    expected = torch_steps(trainer, theirs, trained)
    assert abs(expected[0] - expected[-1]) > 0.02
    np.testing.assert_allclose(ours, expected, rtol=0, atol=STEPS)


def test_sequences_of_a_file_are_those_of_trl(tmp_path):
    like = write_inputs(tmp_path)
    talks = [
        {
            "prompt": [{"role": "user", "content": line["prompt"]}],
            "chosen": [{"role": "assistant", "content": line["chosen"]}],
            "rejected": [{"role": "assistant", "content": line["rejected"]}],
        }
        for line in records(8)
    ]
    for lines in (records(8), talks):
        trainer = trainer_of("sigmoid", load(like), None, lines, tmp_path / "trl")
        batch = next(iter(trainer.get_train_dataloader()))
        source = write(tmp_path / "pairs.jsonl", lines)
        pairs = read_preferences(source, byte_tokenizer())
        theirs = rows_of("sigmoid", batch, pairs.examples.source, 64).examples

        def listed(examples: Any) -> list[Any]:
            return sorted(
                (examples.tokens[b:e].tolist(), examples.counted[b:e].tolist())
                for b, e in zip(examples.starts, examples.starts[1:], strict=False)
            )

        assert listed(pairs.examples) == listed(theirs)
