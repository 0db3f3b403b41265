"""The example trains, validates and samples over `context`, `expert` and `pipe`."""

import contextlib
import dataclasses
import io
import json
import math
import re

import jax
import pytest
import test_train_gpt as t
import train_gpt

import zerojax as zj

EXPERTS = ("--experts", "4", "--expert-hidden", "32")
CASES = {
    "ring": ("context=2", "--attention", "ring"),
    "ring-of-4": ("context=4", "--attention", "ring"),
    "ulysses": ("context=2", "--attention", "ulysses"),
    "gather": ("context=2", "--attention", "gather", "--model", "unrolled"),
    "chosen": ("context=2,tensor=2", "--activations", "remat"),
    "experts": ("expert=2", *EXPERTS, "--top-k", "2"),
    "unrolled-experts": ("expert=2", *EXPERTS, "--model", "unrolled"),
    "dropping-experts": ("expert=2,tensor=2", *EXPERTS, "--capacity-factor", "0.5"),
    "whole-experts": ("fsdp=2", *EXPERTS, "--capacity-factor", "None", "--top-k", "1"),
    "stages": ("pipe=2", "--stage", "1", "--num-microbatches", "2"),
    "stages-of-tensor": (
        "pipe=2,tensor=2",
        "--num-microbatches",
        "2",
        "--sequence-parallel",
        "True",
    ),
    "stages-on-host": ("pipe=2", "--num-microbatches", "2", "--opt-state", "pinned_host"),
    "experts-in-context": ("expert=2,context=2", *EXPERTS, "--attention", "ring"),
}


@pytest.mark.by_default("experts", "stages")
@pytest.mark.parametrize("name", CASES)
def test_train_gpt_splits_sequences_and_experts(tmp_path, monkeypatch, name):
    """A run in this process, of a smaller model than the smallest preset."""
    axes, *arguments = CASES[name]
    tiny = dataclasses.replace(train_gpt.gpt.PRESETS["tiny"], layers=2, hidden=32)
    monkeypatch.setitem(train_gpt.gpt.PRESETS, "tiny", tiny)
    sizes = "--steps 6 --seq 32 --batch-size 4 --eval-every 3 --eval-batches 1 --sample-bytes 4"
    log = tmp_path / "log"
    options = train_gpt.parse(
        [*sizes.split(), "--data", t.folder(tmp_path), "--logdir", str(log), *arguments]
    )
    sizes_of_axes = {axis: int(size) for axis, size in (a.split("=") for a in axes.split(","))}
    num_devices = math.prod(({"fsdp": 2} | sizes_of_axes).values())
    mesh = zj.make_mesh(**sizes_of_axes, devices=jax.devices()[:num_devices])
    c, program, _ = train_gpt.build(options, mesh)
    with program, contextlib.redirect_stdout(io.StringIO()) as printed:
        train_gpt.run(options, c, program, train_gpt.prepare(options, c, program))
    assert "--- sample ---" in printed.getvalue()
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("step")]
    figures = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    losses = [step["train/loss"] for step in figures if "train/loss" in step]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "validation" in lines[-1]
    assert ("dropped" in lines[-1]) == bool(c.experts)
    if c.experts:
        dropped = figures[0]["train/dropped_fraction"]
        assert figures[0]["train/cross_entropy"] < losses[0]
        # At 0.5 at least half of the choices find no cell.
        least, most = {"0.5": (0.5, 1), "None": (0, 0)}.get(str(options.capacity_factor), (0, 1))
        assert least <= dropped <= most


@pytest.mark.parametrize(
    ("option", "value"), [("--top-k", "2"), ("--capacity-factor", "None"), ("--expert-hidden", "8")]
)
def test_options_of_experts_need_experts(option, value, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_gpt.py", option, value])
    with pytest.raises(SystemExit) as left:
        train_gpt.main()
    assert left.value.code == 2
    expected = f"train_gpt.py: error: {option} {value} needs experts: add --experts 8"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("fsdp=2,context=8", "but there are 8 devices; .* On a CPU, --devices 16 simulates this"),
        ("expert=2,fsdp=4", "expert=2 spreads experts over devices, .* add --experts 8"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_with_an_option(sizes, words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_gpt.py", "--mesh", sizes, "--devices", "8"])
    with pytest.raises(SystemExit) as left:
        train_gpt.main()
    assert left.value.code == 2
    assert re.search(words, capsys.readouterr().err)
