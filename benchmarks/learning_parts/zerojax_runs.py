"""Fine-tuning by `examples/finetune.py`, and answers by `zj.generate`."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import finetune
import jax
import numpy as np
import optax

import zerojax as zj
from learning_parts.repeating import LETTERS, alphabet_tokenizer, prompt_of
from zerojax.data import batches
from zerojax.hf import FAMILIES, end_tokens, model_of, read_peft
from zerojax.weights import renaming

SCRIPT = pathlib.Path(finetune.__file__)
OPTIONS = (
    *("--precision", "fp32", "--activations", "save", "--devices", "1", "--sample-tokens", "0"),
    *("--schedule", "constant", "--warmup-steps", "0", "--held-out", "0"),
    *("--eval-every", "1000000"),
)  # fmt: skip
"""Options of all runs."""
TIERS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "4 bits on a disk": {"frozen": "nvme", "frozen_dtype": "nf4"},
}
"""Where the frozen base is, as fields of the config."""


def train(folder: pathlib.Path, name: str, arguments: Sequence[str]) -> list[float]:
    """Run `finetune.py`, export into the folder `name`, and return each step's loss.

    Raises:
      RuntimeError: the script failed.
    """
    root = SCRIPT.parent.parent
    places = {"--checkpoint-dir": f"{name}_steps", "--export": name, "--logdir": f"{name}_log"}
    full = [*OPTIONS, *arguments]
    for option, place in places.items():
        full += [option, str(folder / place)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), *full]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"finetune.py {' '.join(full)} failed: {done.stderr[-2000:]}")
    lines = (folder / f"{name}_log" / "metrics.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        if "train/loss" in line:
            found[line["step"]] = line["train/loss"]
    return [found[step] for step in sorted(found)]


def list_examples(arguments: Sequence[str], steps: int) -> list[list[str]]:
    """Return the words of each step's examples, in the order in which `finetune.py` packs them."""
    options = finetune.parse([*OPTIONS, *arguments])
    rows = finetune.prepare(options).rows
    tokenizer = alphabet_tokenizer()
    found = []
    data = batches(rows, options.batch_size, options.seed, part=0, num_parts=1)
    for batch in itertools.islice(data, steps):
        texts = []
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for segment in np.unique(segments[segments > 0]):
                texts.append(tokenizer.decode(tokens[segments == segment]))
        words = [text.split(":")[0].split()[1] for text in texts]
        # Both answers of a pair have the same prompt.
        found.append(words if options.method == "sft" else words[::2])
    return found


def build(
    base: pathlib.Path, adapters: pathlib.Path | None, tier: str, swap_dir: str
) -> tuple[zj.Program, zj.TrainState]:
    """Return a program of a model with adapters, and its state."""
    lora = None if adapters is None else read_peft(adapters)
    fields = dict(TIERS[tier])
    if fields and lora is None:
        lora = zj.Lora(1, 1.0)  # only a frozen base is stored in 4 bits; new adapters add 0
    config = zj.ZeroConfig(stage=3, swap_dir=swap_dir, **fields)
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    program = zj.build_train_step(model_of(base, lora=lora), optax.sgd(0.0), config, mesh)
    state = zj.import_hf(
        program,
        base,
        key=jax.random.key(0),
        adapters=None if adapters is None else str(adapters),
    )
    return program, state


def answer(
    base: pathlib.Path, adapters: pathlib.Path | None, tier: str, words: Sequence[str]
) -> list[str]:
    """Return the greedy answers for words."""
    tokenizer = alphabet_tokenizer()
    prompts = [tokenizer.encode(prompt_of(word)) for word in words]
    with tempfile.TemporaryDirectory() as swap_dir:
        program, state = build(base, adapters, tier, swap_dir)
        with program:
            answers = zj.generate(program, state, prompts, LETTERS + 2, eos=end_tokens(base))
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


def write_decoded(base: pathlib.Path, tier: str, folder: pathlib.Path) -> None:
    """Write the base that a program computes with, decoded from 4 bits, for transformers."""
    import torch

    from learning_parts.torch_runs import load

    theirs = load(base)
    names: Any = FAMILIES["llama"].names
    place = renaming(names)
    with tempfile.TemporaryDirectory() as swap_dir:
        program, state = build(base, None, tier, swap_dir)
        with program:
            pieces = dict(program.iter_params(state))
    for name, parameter in theirs.named_parameters():
        found = place(name)
        assert found is not None
        part, *path = found.name.split(".")
        tree = pieces[part if found.layer is None else f"blocks/{found.layer}"]
        for key in path:
            tree = tree[key]
        value = np.asarray(tree, np.float32)
        value = value if found.axes is None else value.transpose(found.axes)
        with torch.no_grad():
            parameter.copy_(torch.tensor(value))
    theirs.save_pretrained(folder)
    alphabet_tokenizer().save_pretrained(folder)
