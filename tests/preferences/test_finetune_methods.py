"""finetune.py learns from preferences, and keeps the reference's log-probabilities in a file."""

import contextlib
import io
import json
import pathlib

import finetune
import jax
import pytest
from chat_tokenizers import write
from hf_models import need
from preference_inputs import records, write_inputs

import zerojax as zj

need("torch", "transformers", "peft")


def tune(folder: pathlib.Path, programs: list[zj.Program], *arguments: str) -> str:
    """Run the script in this process on one device, and return its output.

    All calls with the same list share a program.
    """
    options = finetune.parse(
        [
            *("--model", str(folder / "model"), "--data", str(folder / "pairs.jsonl")),
            *("--seq", "64", "--batch-size", "4", "--precision", "fp32", "--eval-every", "4"),
            *("--sample-tokens", "0", "--held-out", "5", "--logdir", str(folder / "log")),
            *arguments,
        ]
    )
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    finetune.check(options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ckpt = finetune.open_checkpoints(options)
        record = finetune.open_record(options, mesh, ckpt)
        inputs = finetune.prepare(options)
        notes = finetune.begin(options, inputs, record)
        if not programs:
            steps = finetune.num_steps(options, inputs.rows)
            programs.append(finetune.build(options, mesh, steps, inputs.rows)[0])
        with ckpt or contextlib.nullcontext():
            finetune.run(options, programs[0], inputs, ckpt, None, record, notes)
    return printed.getvalue()


def figures(folder: pathlib.Path, name: str) -> list[float]:
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    return [line[name] for line in map(json.loads, lines) if name in line]


METHODS = {
    "dpo": ["--lora-rank", "4", "--learning-rate", "1e-2"],
    "dpo-nvme-nf4": [
        *(
            "--lora-rank",
            "4",
            "--learning-rate",
            "1e-2",
            "--frozen",
            "nvme",
            "--frozen-dtype",
            "nf4",
        ),
        *("--swap-dir", "."),
    ],
    "ipo": ["--dpo-kind", "ipo", "--learning-rate", "1e-3"],
    "simpo": ["--dpo-kind", "simpo", "--learning-rate", "1e-3"],
    "orpo": ["--learning-rate", "1e-3"],
    "kto": ["--lora-rank", "4", "--learning-rate", "1e-2"],
}


@pytest.mark.exhaustive  # by default, the blocks of docs/preferences.md train
@pytest.mark.parametrize("case", list(METHODS))
def test_held_out_loss_falls_and_a_resumed_run_reads_the_reference(tmp_path, case, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path, count=40, hidden_size=64, num_hidden_layers=2)
    method = case.split("-")[0]
    method = "dpo" if method in ("ipo", "simpo") else method
    options = ["--method", method, *METHODS[case], "--checkpoint-dir", str(tmp_path / "saved")]
    options += ["--logdir", str(tmp_path / "log")]
    programs: list[zj.Program] = []
    printed = tune(tmp_path, programs, *options, "--steps", "8")
    assert f"{32 * (2 if method == 'kto' else 1)} pairs in" in printed
    files = [path.name for path in tmp_path.glob("pairs.jsonl.reference-*.npz")]
    assert len(files) == (case not in ("orpo", "simpo"))
    assert printed.count("computing the reference's") == len(files)
    losses = figures(tmp_path, "validation/loss")
    assert losses[-1] < 0.9 * losses[0]
    if case not in ("orpo", "kto"):
        assert figures(tmp_path, "train/rewards/accuracies")[-1] == 1
    again = tune(tmp_path, programs, *options, "--steps", "8", "--resume", "True")
    assert "computing" not in again
    assert again.count("reference: ") == len(files)
    with pytest.raises(ValueError, match="another run: --beta"):
        tune(tmp_path, programs, *options, "--steps", "8", "--resume", "True", "--beta", "0.7")
    programs[0].close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beta", "0.2"], "--beta is for --method dpo or orpo or kto, not for --method sft"),
        (["--method", "orpo", "--dpo-kind", "ipo"], "--dpo-kind is for --method dpo, not for"),
        (["--method", "dpo", "--gamma", "1"], "--gamma is for --dpo-kind simpo"),
        (["--method", "dpo", "--beta", "-1"], "--beta -1.0: a positive number is needed"),
        (["--method", "dpo", "--form", "text"], "--form is for --method sft"),
        (["--method", "dpo", "--reference", "no/r.npz"], "no is not a writable folder"),
        (
            ["--method", "dpo", "--dpo-kind", "simpo", "--reference", "r.npz"],
            "simpo reads no reference",
        ),
    ],
)
def test_options_of_another_method_are_refused(tmp_path, arguments, message):
    options = finetune.parse(["--model", str(tmp_path), "--data", "pairs.jsonl", *arguments])
    with pytest.raises(ValueError, match=message):
        finetune.check(options)


def test_labels_are_for_kto(tmp_path):
    write_inputs(tmp_path)
    lines = [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in records(8)]
    write(tmp_path / "pairs.jsonl", lines)
    with pytest.raises(ValueError, match="which --method kto reads; --method dpo reads 'chosen'"):
        tune(tmp_path, [], "--method", "dpo")
