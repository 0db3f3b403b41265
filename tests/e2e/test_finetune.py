"""The script fine-tunes on conversations, is stopped and goes on bit for bit, and writes a folder of what it trained."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from typing import Any, cast

import finetune
import jax
import numpy as np
import pytest
import yaml
from chat_tokenizers import byte_tokenizer, conversation, write
from hf_models import need
from hf_models import write as write_model

import zerojax as zj
from zerojax.hf import config_of
from zerojax.runtime.cluster import find_place

need("torch", "transformers", "peft")
pytestmark = [
    pytest.mark.xdist_group("finetune"),  # tests share a program and its run
    # peft reads an attribute that transformers renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS, EVERY, STOPPED = 24, 4, 10
ADAPTERS = ["--lora-rank", "8", "--learning-rate", "1e-2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """Options of a tiny model, its tokenizer, and 200 conversations."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model("llama", folder / "model", vocab_size=259)
    byte_tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 50, (200, 2)).tolist()
    chats = [conversation(f"{a} + {b} = ?", f"It is {a + b}.") for a, b in pairs]
    data = write(folder / "chats.jsonl", chats)
    return ["--model", str(folder / "model"), "--data", str(data)]


def options_of(folder: pathlib.Path, *more: str) -> list[str]:
    """Return what all runs share; in float32, in which numbers can be compared."""
    sizes = ["--steps", str(STEPS), "--seq", "128", "--batch-size", "8", "--eval-every", "6", "--sample-tokens", "4"]
    return [*sizes, "--precision", "fp32", "--logdir", str(folder / "log"), *more]


def saving(folder: pathlib.Path) -> list[str]:
    return ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", str(EVERY), "--keep", "2"]


def figures(folder: pathlib.Path, name: str = "train/loss") -> dict[int, float]:
    """Return a figure of a run by step, all its digits."""
    lines = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.fixture(scope="module")
def here():
    """Return `tune(*arguments)`: runs in this process, one program for all; returns what it printed, and if it was stopped."""
    programs: list[zj.Program] = []
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])

    def tune(*arguments: str) -> tuple[str, bool]:
        options = finetune.parse(arguments)
        finetune.check(options)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            ckpt = finetune.open_checkpoints(options)
            record = finetune.record_of(options, mesh, ckpt)
            inputs = finetune.prepare(options)
            told = finetune.begin(options, inputs, record)
            if not programs:
                programs.append(finetune.build(options, mesh, STEPS)[0])
            with ckpt or contextlib.nullcontext():
                is_over = finetune.run(options, programs[0], inputs, ckpt, record=record, told=told)
        return printed.getvalue(), is_over

    yield tune
    for program in programs:
        program.close()


@pytest.fixture(scope="module")
def uncut(tmp_path_factory, inputs, here):
    """The folder of a run that nothing stopped, and what it printed."""
    folder = tmp_path_factory.mktemp("uncut")
    out = ["--export", str(folder / "adapters")]
    return folder, here(*inputs, *options_of(folder), *ADAPTERS, *saving(folder), *out)[0]


def test_validation_loss_falls_on_200_conversations(uncut):
    folder, printed = uncut
    assert "train: 190 examples in" in printed
    assert "held out: 10 examples in" in printed
    validation = figures(folder, "validation/loss")
    assert list(validation) == [6, 12, 18, 24]
    start = float(printed.split("step     0  validation ")[1].split()[0])
    assert 5 < start < 6.5  # of 259 tokens, log(259) is 5.56
    assert validation[6] < start - 1
    assert validation[24] < validation[12] - 0.2
    assert printed.split("--- sample ---\n")[1].startswith("<|im_start|>user\n")
    assert "tokens/s" in printed
    assert (folder / "log" / "report.html").stat().st_size > 10_000


def test_what_was_exported_is_what_peft_loads(uncut, inputs):
    import peft
    import transformers

    folder, printed = uncut
    assert f"{folder / 'adapters'} holds the adapters" in printed
    base = transformers.AutoModelForCausalLM.from_pretrained(inputs[1])
    untouched = {name: value.clone() for name, value in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, folder / "adapters").merge_and_unload()
    changed = [name for name, value in merged.state_dict().items() if not bool((value == untouched[name]).all())]
    assert len(changed) == 7 * 3


def test_a_stopped_run_goes_on_to_the_uncut_losses_bit_for_bit(tmp_path, monkeypatch, inputs, here, uncut):
    """SIGTERM comes to this process itself, in the middle of a run."""
    step = zj.Run.step

    def stopping(self: zj.Run, number: int, metrics: Any) -> None:
        step(self, number, metrics)
        if number == STOPPED:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(zj.Run, "step", stopping)
    arguments = [*inputs, *options_of(tmp_path), *ADAPTERS, *saving(tmp_path)]
    printed, is_over = here(*arguments)
    assert is_over
    assert f"stopped by a signal after step {STOPPED}" in printed
    assert "--- sample ---" not in printed
    assert list(figures(tmp_path)) == [*range(1, STOPPED + 1)]
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"holds checkpoints up to step {STOPPED}: --resume True"):
        here(*arguments)
    with pytest.raises(ValueError, match=r"saved holds the checkpoints of another run: --weight-decay 0.0, and here 0.5"):
        here(*arguments, "--resume", "True", "--weight-decay", "0.5")
    printed, is_over = here(*arguments, "--resume", "True")
    assert not is_over
    assert f"goes on from step {STOPPED} of" in printed
    assert "began with" not in printed
    for name in ("train/loss", "validation/loss"):
        assert figures(tmp_path, name) == figures(uncut[0], name)


def resumed(folder: pathlib.Path, *arguments: str) -> list[str]:
    """Compare options with the run whose checkpoints are in a folder, without any of its steps; returns what is told."""
    options = finetune.parse([*arguments, "--checkpoint-dir", str(folder)])
    finetune.check(options)
    ckpt = cast(Any, types.SimpleNamespace(all_steps=lambda: [3] if (folder / "3").exists() else []))
    record = finetune.record_of(options, zj.make_mesh(fsdp=1, devices=jax.devices()[:1]), ckpt)
    told = finetune.begin(options, finetune.prepare(options), record)
    record.keep()
    return told


def test_another_run_does_not_go_on_and_another_schedule_is_told(tmp_path, inputs):
    folder = tmp_path / "saved"
    common = [*inputs, "--seq", "128", "--lora-rank", "4"]
    assert resumed(folder, *common, "--lora-rank", "8") == []  # a run that ended before its first checkpoint
    assert resumed(folder, *common) == []
    (folder / "3").mkdir()
    write_model("llama", tmp_path / "sibling", vocab_size=259, seed=1)
    shutil.copytree(inputs[1], tmp_path / "elsewhere")
    shutil.copytree(inputs[1], tmp_path / "long")
    told = (tmp_path / "long" / "config.json").read_text()
    (tmp_path / "long" / "config.json").write_text(told.replace('"rope_theta": 10000.0', '"rope_theta": 50000.0'))
    write(tmp_path / "chats.jsonl", [conversation(f"{n}?", "Yes.") for n in range(400)])
    for more, words in (
        (["--model", str(tmp_path / "sibling")], "run: the weights of --model "),
        (["--model", str(tmp_path / "long")], "run: config.json of --model ropes .*, and here "),
        (["--learning-rate", "1e-4"], "--learning-rate 0.0002, and here 0.0001"),
        (["--lora-rank", "0"], "--lora-rank 4, and here 0; .*--learning-rate 0.0002, and here 1e-05"),
        (["--lora-targets", "q_proj", "v_proj"], "--lora-targets q_proj k_proj .* down_proj, and here q_proj v_proj"),
        (["--frozen-dtype", "nf4"], "--frozen-dtype None, and here nf4"),
        (["--seed", "1", "--clip-norm", "2"], "--clip-norm 1.0, and here 2.0; --seed 0, and here 1"),
        (
            ["--data", str(tmp_path / "chats.jsonl")],
            r"run: the rows of --data \(.*--held-out.*\): 64 of 128, .*, and here 95 of",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            resumed(folder, *common, *more)
    assert resumed(folder, *common, "--model", str(tmp_path / "elsewhere"), "--learning-rate", "2e-4") == []
    more = ["--steps", "30", "--lora-dropout", "0.5", "--precision", "fp32"]
    names = ("goes on with --lora-dropout 0.5, and began with 0.0", "goes on with --precision fp32, and began with bf16")
    assert resumed(folder, *common, *more) == [*names, "goes on with --steps 30, and began with 8"]
    assert resumed(folder, *common, *more)[0] == names[0]  # each time beside what the run began with
    assert resumed(tmp_path / "other", *common, "--validation-data", str(tmp_path / "chats.jsonl")) == []
    (tmp_path / "other" / "3").mkdir()
    (line,) = resumed(tmp_path / "other", *common, "--validation-data", inputs[3])
    assert line.startswith("goes on with held-out rows ")
    before = (folder / "run.json").read_text()
    record = json.loads(before)
    del record["refuses"]["config.json of --model"]["logits_cap"], record["refuses"]["seed"]
    (folder / "run.json").write_text(json.dumps(record))
    (line,) = resumed(folder, *common)  # as of a version that told less
    assert "run.json does not tell --seed: not compared" in line
    assert json.loads((folder / "run.json").read_text())["refuses"]["seed"] == 0
    (folder / "run.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read"):
        resumed(folder, *common)
    (folder / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.json, which tells what the run began with, cannot be read: .*Remove it"):
        resumed(folder, *common)
    (folder / "run.json").unlink()
    (line,) = resumed(folder, *common, "--seed", "7")
    assert "which older versions did not write: nothing was compared" in line
    with pytest.raises(ValueError, match="--seed 7, and here 0"):
        resumed(folder, *common)


def test_files_that_an_index_names_are_looked_for_before_all_else(tmp_path, inputs):
    shutil.copytree(inputs[1], tmp_path / "model")
    max((tmp_path / "model").glob("*.safetensors")).unlink()
    with pytest.raises(zj.CheckpointError, match="of which 1 are not beside it"):
        finetune.check(finetune.parse([*inputs, "--model", str(tmp_path / "model")]))


def test_errors_of_the_library_name_options(capsys, inputs):
    with pytest.raises(SystemExit), finetune.train_loop.told_alone("finetune.py", finetune.Options):
        finetune.parse([*inputs, "--moments", "bfloat16", "--update-on", "host"])
    told = "finetune.py: error: --update-on host needs --opt-state pinned_host or 'nvme', got --opt-state device\n"
    assert capsys.readouterr().err == told
    as_options = finetune.train_loop.as_options
    for message, options in (
        ("set swap_dir", "set --swap-dir"),
        ("a longer seq, or too_long='drop'", "a longer seq, or --too-long drop"),
        ("--mesh data=3: sizes are", "--mesh data=3: sizes are"),
        ("/a/my_seq=3", "/a/my_seq=3"),
    ):
        assert as_options(message, finetune.Options) == options


# The script, whose steps take 0.3 s more once a checkpoint is there: a signal finds it running, however fast it is.
SLOWLY = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "examples")!r})
import finetune, zerojax as zj
step = zj.Run.step
zj.Run.step = lambda self, number, metrics: (step(self, number, metrics), time.sleep(0.3 * (number > {EVERY})))
finetune.main()
"""


def start(folder: pathlib.Path, *arguments: str, processes: int = 1, slowly: bool = False) -> list[subprocess.Popen[str]]:
    """Start the script in processes that share two devices."""
    script = ["-c", SLOWLY] if slowly else [str(ROOT / "examples" / "finetune.py")]
    command = [sys.executable, *script, *arguments, "--devices", str(2 // processes)]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    pipes: dict[str, Any] = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(me)}, **pipes) for me in range(processes)]


def ended(workers: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for processes; returns the status and the outputs of each."""
    try:
        outputs = [worker.communicate(timeout=200) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *output) for worker, output in zip(workers, outputs, strict=True)]


def test_two_processes_agree_with_one(tmp_path, inputs, uncut, here):
    """They stop at one step, after a signal to the last one, and one process goes on from there."""
    arguments = [*inputs, *options_of(tmp_path), *ADAPTERS, *saving(tmp_path)]
    workers = start(tmp_path, *arguments, "--stopped-status", "75", processes=2, slowly=True)
    try:
        while not (tmp_path / "saved" / str(EVERY)).is_dir():
            assert all(worker.poll() is None for worker in workers), [worker.communicate() for worker in workers]
            time.sleep(0.02)
    finally:
        workers[-1].send_signal(signal.SIGTERM)
    found = ended(workers)
    assert [status for status, *_ in found] == [75, 75], found
    step = int(found[0][1].split("stopped by a signal after step ")[1].split(",")[0])
    assert EVERY <= step < STEPS
    assert "loss" not in found[1][1]  # the first alone prints
    assert list(figures(tmp_path)) == [*range(1, step + 1)]
    printed, _ = here(*arguments, "--resume", "True")
    assert f"goes on from step {step} of" in printed
    for name in ("train/loss", "validation/loss"):
        found, expected = figures(tmp_path, name), figures(uncut[0], name)
        # The step that a signal ends is not validated.
        assert found.keys() == expected.keys() - ({step} if name == "validation/loss" else set())
        np.testing.assert_allclose(list(found.values()), [expected[s] for s in found], rtol=1e-4, err_msg=name)


def test_kubernetes_job_fits_the_script(monkeypatch):
    service, job = yaml.safe_load_all((ROOT / "examples" / "k8s" / "finetune.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {pair["name"]: pair["value"] for pair in container["env"]}
    name, count = job["metadata"]["name"], spec["completions"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"] == env["HEADLESS_SERVICE"]
    assert spec["parallelism"] == count
    place = find_place(env | {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{name}-1"})
    assert (place.process, place.num_processes) == (1, count)
    assert place.coordinator is not None
    assert place.coordinator.startswith(f"{name}-0.{service['metadata']['name']}:")
    options = finetune.parse(container["command"][2:])
    assert options.resume
    actions = {value: rule["action"] for rule in spec["podFailurePolicy"]["rules"] for value in _codes(rule)}
    assert actions == {options.stopped_status: "Ignore", 128 + signal.SIGTERM: "Ignore", 2: "FailJob"}
    check_fit(options, count * container["resources"]["limits"]["nvidia.com/gpu"], monkeypatch)


def check_fit(options: finetune.Options, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a run takes so many devices, and that its batch divides."""
    devices = [jax.devices()[0]] * count
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(zj, "join_cluster", lambda timeout: None)
    assert finetune.start(dataclasses.replace(options, devices=8)).size == count
    assert options.batch_size % count == 0


def _codes(rule: dict[str, Any]) -> list[int]:
    return rule.get("onExitCodes", {}).get("values", [])


def test_slurm_script_starts_a_run_that_fits_its_nodes_and_is_queued_again(tmp_path, monkeypatch):
    """Stand-ins for srun and scontrol tell what they were called with on 2 nodes; the run ends by a signal."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    for name, text in (("srun", "shift 2\nprintf '%s\\n' \"$@\"\nexit 75"), ("scontrol", 'echo scontrol "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "VENV": str(tmp_path)}
    env |= {"MODEL": "model", "DATA": "chats.jsonl", "EXPORT": "out", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "examples" / "slurm" / "finetune.sh"), "--lora-rank", "16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    *arguments, last = done.stdout.splitlines()
    assert (done.returncode, last) == (75, "scontrol requeue 7")
    options = finetune.parse(arguments)
    assert (options.model, options.data, options.export, options.lora_rank) == ("model", "chats.jsonl", "out", 16)
    assert (options.resume, options.stopped_status) == (True, 75)
    check_fit(options, 16, monkeypatch)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--lora-alpha", "3"], "give --lora-rank"),
        (["--merge-lora", "True"], "give --lora-rank"),
        (["--export", "out"], "give --checkpoint-dir"),
        (["--lora-rank", "2", "--merge-lora", "True"], "give --export"),
        (["--export", "no/where/out", "--checkpoint-dir", "c"], "its folder is not there"),
        (["--export", "", "--checkpoint-dir", "c"], "its folder is not there"),
        (["--export", "out", "--checkpoint-dir", "c", "--steps", "0"], "--steps 0"),
        (["--sample-tokens", "-1"], "--sample-tokens -1"),
        (["--eval-every", "0"], "--eval-every 0"),
        (["--eval-batches", "0"], "--eval-batches 0"),
        (["--devices", "0"], "--devices 0"),
        (["--logdir", __file__], "is a file"),
        (["--frozen-dtype", "nf4"], "give --lora-rank"),
        (["--held-out", "1"], "--held-out 1"),
        (["--seq", "1"], "--seq 1"),
        (["--epochs", "nan"], "--epochs nan"),
        (["--steps", "-1"], "--steps -1"),
        (["--model", "nowhere"], "nothing is downloaded"),
        (["--learning-rate", "nan"], "--learning-rate nan"),
        (["--weight-decay", "-1"], "--weight-decay -1"),
        (["--seed", "-1"], "--seed -1"),
        (["--mlp-tiles", "3"], "--mlp-tiles 3"),
        (["--loss-tiles", "300"], "--loss-tiles 300"),
        (["--lora-rank", "2", "--lora-targets", "wq"], "--lora-targets"),
        (["--lora-rank", "2", "--lora-dropout", "2"], "--lora-dropout 2"),
        (["--checkpoint-dir", __file__], "--checkpoint-dir .* is a file"),
    ],
)
def test_options_that_would_fail_late_are_refused_at_once(inputs, more, words):
    with pytest.raises(ValueError, match=words):
        finetune.check(finetune.parse([*inputs, *more]))


def test_folders_that_cannot_be_written_are_told_before_the_run(tmp_path, inputs):
    (tmp_path / "file").touch()
    arguments = [*inputs, "--seq", "128", "--lora-rank", "4"]
    with pytest.raises(ValueError, match=r"--logdir .*file/log: .*file is no folder that can be written"):
        finetune.start(finetune.parse([*arguments, "--logdir", str(tmp_path / "file" / "log"), "--devices", "8"]))
    with pytest.raises(ValueError, match="--checkpoint-dir: the name of a folder is needed"):
        finetune.check(finetune.parse([*arguments, "--checkpoint-dir", ""]))
    (tmp_path / "saved" / "run.json.new").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"--checkpoint-dir: .*run.json cannot be written: "):
        resumed(tmp_path / "saved", *arguments)


def test_an_export_that_fails_is_told_alone(tmp_path, inputs, uncut, capsys):
    write_model("llama", tmp_path / "sibling", vocab_size=259, seed=1)
    options = finetune.parse([*inputs, "--lora-rank", "8", "--checkpoint-dir", str(uncut[0] / "saved")])
    options = dataclasses.replace(options, model=str(tmp_path / "sibling"), export=str(tmp_path / "out"))
    with pytest.raises(SystemExit, match="2"), finetune.train_loop.told_alone("finetune.py", finetune.Options):
        finetune.export(options, cast(Any, None))
    told = capsys.readouterr().err
    assert "error: --export " in told
    assert "imported from as --model. The checkpoints are whole" in told


def test_a_tokenizer_of_another_model_is_refused(tmp_path, inputs):
    write_model("llama", tmp_path / "model", vocab_size=100)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="and the model has 100"):
        finetune.prepare(finetune.parse([*inputs, "--model", str(tmp_path / "model")]))


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp=x", "fsdp=2,data="])
def test_a_mesh_without_numbers_is_told(inputs, mesh):
    with pytest.raises(ValueError, match="has no number: sizes are as in data=2,fsdp=4"):
        finetune.start(finetune.parse([*inputs, "--mesh", mesh, "--devices", "8"]))


def test_prompts_are_looked_at_before_the_run(tmp_path, inputs):
    tokenizer = byte_tokenizer(None)
    tokenizer.add_tokens(["<new>"])
    write_model("llama", tmp_path / "model", vocab_size=259)
    tokenizer.save_pretrained(tmp_path / "model")
    write(tmp_path / "texts.jsonl", [{"text": f"text {i}"} for i in range(40)])
    options = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "texts.jsonl")]
    for prompt, words in (("a <new>", "gives token 259, and the model has 259"), ("", "each needs a token")):
        with pytest.raises(ValueError, match=words):
            finetune.prepare(finetune.parse([*options, "--prompt", prompt]))
    assert finetune.prepare(finetune.parse([*options, "--prompt", "ab"])).prompts == [tokenizer("ab")["input_ids"]]


def test_nothing_is_held_out_where_that_is_asked_for(inputs):
    found = finetune.prepare(finetune.parse([*inputs, "--held-out", "0", "--seq", "128"]))
    assert found.held_out is None
    assert found.rows.counts.examples == 200
    assert found.prompts[0][0] == found.rows.examples.tokens[0]


def test_an_answer_ends_at_any_of_the_models_end_tokens(tmp_path, inputs):
    shutil.copytree(inputs[1], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    options = finetune.parse([*inputs, "--model", str(tmp_path / "model")])
    tokenizer = byte_tokenizer()
    assert finetune.end_tokens(options, tokenizer) == {7, 8, tokenizer.eos_token_id}


def test_flops_of_frozen_matrices_have_no_gradients(inputs):
    whole, adapters = (
        finetune.model_flops_per_token(finetune.parse([*inputs, *more, "--seq", "2"])) for more in ((), ("--lora-rank", "4"))
    )
    c = config_of(inputs[1])
    matrices = c.num_params - c.hidden * (2 * c.layers + 1) - c.vocab * c.hidden  # without norms and the embedding
    attention = 12 * c.layers * c.heads * c.head_dim * 2
    assert math.isclose(whole, 6 * matrices + attention)
    assert math.isclose(adapters, 4 * matrices + attention)


@pytest.mark.exhaustive  # by default the signal comes to the test's own process
def test_a_process_that_is_stopped_ends_with_the_status_asked_for(tmp_path, inputs, uncut, here):
    arguments = [*inputs, *options_of(tmp_path), *ADAPTERS, *saving(tmp_path)]
    (worker,) = start(tmp_path, *arguments, "--stopped-status", "75", slowly=True)
    try:
        while not (tmp_path / "saved" / str(EVERY)).is_dir():
            assert worker.poll() is None, worker.communicate()
            time.sleep(0.02)
    finally:
        worker.send_signal(signal.SIGTERM)
    ((status, printed, error),) = ended([worker])
    assert status == 75, error
    step = int(printed.split("stopped by a signal after step ")[1].split(",")[0])
    assert EVERY <= step < STEPS
    here(*arguments, "--resume", "True")
    assert figures(tmp_path) == figures(uncut[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--params", "nvme", "--grads", "nvme", "--opt-state", "nvme", "--swap-dir", "."],
        [*ADAPTERS, "--frozen", "nvme", "--frozen-dtype", "nf4", "--swap-dir", "."],
        [*ADAPTERS, "--auto", "True", "--merge-lora", "True"],
    ],
    ids=["all", "disk", "nf4", "auto"],
)
def test_tiers_and_exports(tmp_path, inputs, more):
    import transformers

    rate = [] if "--learning-rate" in more else ["--learning-rate", "3e-3"]
    peft = "--lora-rank" in more and "--merge-lora" not in more
    out = tmp_path / "out"
    arguments = [*inputs, *options_of(tmp_path), *saving(tmp_path), "--export", str(out), *rate, *more]
    ((status, printed, error),) = ended(start(tmp_path, *arguments))
    assert status == 0, error
    validation = list(figures(tmp_path, "validation/loss").values())
    assert validation[-1] < 4
    assert "--- sample ---" in printed
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("zerojax-swap")]
    if peft:
        assert (out / "adapter_model.safetensors").exists()
    else:
        _, told = cast(Any, transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True))
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
