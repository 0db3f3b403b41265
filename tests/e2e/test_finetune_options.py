"""finetune.py checks its options before a run, and scripts start it; no test here makes a step."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import types
from typing import Any, cast

import finetune
import jax
import pytest
import yaml
from chat_tokenizers import PLAIN, THINKING, byte_tokenizer, conversation, write
from corpus import split_weights
from family_templates import R1
from finetune_inputs import write_inputs
from hf_models import need
from hf_models import write as write_model

import zerojax as zj
from zerojax.data import load_tokenizer
from zerojax.hf import config_of
from zerojax.runtime.cluster import find_place

need("torch", "transformers", "peft")
pytestmark = [
    pytest.mark.xdist_group("finetune_options"),  # tests share their inputs
    # peft reads an attribute that transformers renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def resumed(folder: pathlib.Path, *arguments: str) -> list[str]:
    """Compare options with the run that saved in `folder`, without running any of its steps.

    Returns what is reported.
    """
    options = finetune.parse([*arguments, "--checkpoint-dir", str(folder)])
    finetune.check(options)
    ckpt = cast(
        Any, types.SimpleNamespace(all_steps=lambda: [3] if (folder / "3").exists() else [])
    )
    record = finetune.open_record(options, zj.make_mesh(fsdp=1, devices=jax.devices()[:1]), ckpt)
    told = finetune.begin(options, finetune.prepare(options), record)
    record.keep()
    return told


def test_another_run_does_not_go_on_and_another_schedule_is_told(tmp_path, inputs):
    folder = tmp_path / "saved"
    common = [*inputs, "--seq", "128", "--lora-rank", "4"]
    assert (
        resumed(folder, *common, "--lora-rank", "8") == []
    )  # a run that ended before its first checkpoint
    assert resumed(folder, *common) == []
    (folder / "3").mkdir()
    write_model("llama", tmp_path / "sibling", vocab_size=259, seed=1)
    shutil.copytree(inputs[1], tmp_path / "elsewhere")
    shutil.copytree(inputs[1], tmp_path / "long")
    told = (tmp_path / "long" / "config.json").read_text()
    (tmp_path / "long" / "config.json").write_text(
        told.replace('"rope_theta": 10000.0', '"rope_theta": 50000.0')
    )
    write(tmp_path / "chats.jsonl", [conversation(f"{n}?", "Yes.") for n in range(400)])
    for more, words in (
        (["--model", str(tmp_path / "sibling")], "run: the weights of --model "),
        (["--model", str(tmp_path / "long")], "run: config.json of --model ropes .*, and here "),
        (["--learning-rate", "1e-4"], "--learning-rate 0.0002, and here 0.0001"),
        (
            ["--lora-rank", "0"],
            "--lora-rank 4, and here 0; .*--learning-rate 0.0002, and here 1e-05",
        ),
        (
            ["--lora-targets", "q_proj", "v_proj"],
            "--lora-targets q_proj k_proj .* down_proj, and here q_proj v_proj",
        ),
        (["--frozen-dtype", "nf4"], "--frozen-dtype None, and here nf4"),
        (
            ["--seed", "1", "--clip-norm", "2"],
            "--clip-norm 1.0, and here 2.0; --seed 0, and here 1",
        ),
        (
            ["--data", str(tmp_path / "chats.jsonl")],
            r"run: the rows of --data \(.*--held-out.*\): 64 of 128, .*, and here 95 of",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            resumed(folder, *common, *more)
    assert (
        resumed(folder, *common, "--model", str(tmp_path / "elsewhere"), "--learning-rate", "2e-4")
        == []
    )
    more = ["--steps", "30", "--lora-dropout", "0.5", "--precision", "fp32"]
    names = (
        "continues with --lora-dropout 0.5, and began with 0.0",
        "continues with --precision fp32, and began with bf16",
    )
    assert resumed(folder, *common, *more) == [
        *names,
        "continues with --steps 30, and began with 8",
    ]
    assert (
        resumed(folder, *common, *more)[0] == names[0]
    )  # each time next to the files of the run's start
    assert (
        resumed(tmp_path / "other", *common, "--validation-data", str(tmp_path / "chats.jsonl"))
        == []
    )
    (tmp_path / "other" / "3").mkdir()
    (line,) = resumed(tmp_path / "other", *common, "--validation-data", inputs[3])
    assert line.startswith("continues with held-out rows ")
    before = (folder / "run.json").read_text()
    record = json.loads(before)
    del record["refuses"]["config.json of --model"]["logits_cap"], record["refuses"]["seed"]
    (folder / "run.json").write_text(json.dumps(record))
    (line,) = resumed(folder, *common)  # from a version that recorded less
    assert "run.json does not record --seed: not compared" in line
    assert json.loads((folder / "run.json").read_text())["refuses"]["seed"] == 0
    (folder / "run.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read"):
        resumed(folder, *common)
    (folder / "run.json").write_text("{")
    with pytest.raises(
        ValueError,
        match=r"run.json, which records what the run began with, cannot be read: .*Remove it",
    ):
        resumed(folder, *common)
    (folder / "run.json").unlink()
    (line,) = resumed(folder, *common, "--seed", "7")
    assert "which older versions did not write: nothing was compared" in line
    with pytest.raises(ValueError, match="--seed 7, and here 0"):
        resumed(folder, *common)


def test_files_that_an_index_names_are_looked_for_before_all_else(tmp_path, inputs):
    shutil.copytree(inputs[1], tmp_path / "model")
    max((tmp_path / "model").glob("*.safetensors")).unlink()
    with pytest.raises(zj.CheckpointError, match="1 missing next to it"):
        finetune.check(finetune.parse([*inputs, "--model", str(tmp_path / "model")]))


def test_errors_of_the_library_name_options(capsys, inputs):
    with (
        pytest.raises(SystemExit),
        finetune.train_loop.errors_without_traceback("finetune.py", finetune.Options),
    ):
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


# The script's steps take 0.3 s longer once a checkpoint exists, so a signal finds it running,
# however fast it is.
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
    actions = {
        value: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for value in _codes(rule)
    }
    assert actions == {
        options.stopped_status: "Ignore",
        128 + signal.SIGTERM: "Ignore",
        2: "FailJob",
    }
    check_fit(options, count * container["resources"]["limits"]["nvidia.com/gpu"], monkeypatch)


def check_fit(options: finetune.Options, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a run uses this many devices, and that its batch divides by them."""
    devices = [jax.devices()[0]] * count
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(zj, "join_cluster", lambda timeout: None)
    assert finetune.start(dataclasses.replace(options, devices=8)).size == count
    assert options.batch_size % count == 0


def _codes(rule: dict[str, Any]) -> list[int]:
    return rule.get("onExitCodes", {}).get("values", [])


def test_slurm_script_starts_a_run_that_fits_its_nodes_and_is_queued_again(tmp_path, monkeypatch):
    """Stand-ins for srun and scontrol record their calls on 2 nodes; a signal ends the run."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    for name, text in (
        ("srun", "shift 2\nprintf '%s\\n' \"$@\"\nexit 75"),
        ("scontrol", 'echo scontrol "$@"'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
        "VENV": str(tmp_path),
    }
    env |= {
        "MODEL": "model",
        "DATA": "chats.jsonl",
        "EXPORT": "out",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    command = ["bash", str(ROOT / "examples" / "slurm" / "finetune.sh"), "--lora-rank", "16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    *arguments, last = done.stdout.splitlines()
    assert (done.returncode, last) == (75, "scontrol requeue 7")
    options = finetune.parse(arguments)
    assert (options.model, options.data, options.export, options.lora_rank) == (
        "model",
        ("chats.jsonl",),
        "out",
        16,
    )
    assert (options.resume, options.stopped_status) == (True, 75)
    check_fit(options, 16, monkeypatch)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--lora-alpha", "3"], "give --lora-rank"),
        (["--merge-lora", "True"], "give --lora-rank"),
        (["--export", "out"], "give --checkpoint-dir"),
        (["--lora-rank", "2", "--merge-lora", "True"], "give --export"),
        (["--export", "no/where/out", "--checkpoint-dir", "c"], "its parent folder does not exist"),
        (["--export", "", "--checkpoint-dir", "c"], "its parent folder does not exist"),
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
        (["--lora-use-dora", "True"], "--lora-use-dora: only adapters .*give --lora-rank"),
        (["--lora-rank", "2", "--lora-init", "olora"], "--lora-init 'olora'"),
        (["--lora-rank", "2", "--lora-plus-ratio", "0"], "--lora-plus-ratio 0"),
        (["--adapters", "nowhere"], "nowhere/adapter_config.json cannot be read"),
        (["--adapters", "x", "--lora-rank", "2"], "--adapters x sets .*leave out --lora-rank"),
        (["--neftune-noise-alpha", "-1"], "--neftune-noise-alpha -1"),
        (["--checkpoint-dir", __file__], "--checkpoint-dir .* is a file"),
        (["--template-options", "{"], "--template-options {: not JSON"),
        (["--template-options", "[]"], r"--template-options \[\]: a JSON object is needed"),
        (["--data", "a.jsonl:0", "b.jsonl"], "--data a.jsonl:0: a weight is a positive number"),
        (["--data", "a.jsonl:0.7", "b.jsonl"], "b.jsonl has no weight: .* as in b.jsonl:1"),
        (["--stream", "-1"], "--stream -1"),
        (["--stream", "10"], "give --steps in place of --epochs"),
        (["--stream", "10", "--steps", "4"], "give --validation-data, or --held-out 0"),
        (
            ["--stream", "10", "--steps", "4", "--held-out", "0", "--data", "a", "b"],
            "give weights, as in a:1",
        ),
        (["--patience", "0"], "--patience 0"),
        (["--export-gguf", "out.gguf"], "give --export, and with adapters --merge-lora True"),
        (["--keep-best", "True"], "give --checkpoint-dir"),
        (["--patience", "1", "--held-out", "0"], "give --validation-data"),
        (["--optimizer", "schedule_free", "--schedule", "linear"], "use --schedule constant"),
        (["--chat-template", "nowhere.jinja"], "chat_template='nowhere.jinja': no such file"),
        (["--chat-template", "/dev/zero"], "chat_template='/dev/zero': it is a pipe or a device"),
    ],
)
def test_options_that_would_fail_late_are_refused_at_once(inputs, more, words):
    with pytest.raises(ValueError, match=words):
        finetune.check(finetune.parse([*inputs, *more]))


def test_folders_that_cannot_be_written_are_told_before_the_run(tmp_path, inputs):
    (tmp_path / "file").touch()
    arguments = [*inputs, "--seq", "128", "--lora-rank", "4"]
    with pytest.raises(ValueError, match=r"--logdir .*file/log: .*file is not a writable folder"):
        finetune.start(
            finetune.parse(
                [*arguments, "--logdir", str(tmp_path / "file" / "log"), "--devices", "8"]
            )
        )
    with pytest.raises(ValueError, match="--checkpoint-dir: the name of a folder is needed"):
        finetune.check(finetune.parse([*arguments, "--checkpoint-dir", ""]))
    (tmp_path / "saved" / "run.json.new").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"--checkpoint-dir: .*run.json cannot be written: "):
        resumed(tmp_path / "saved", *arguments)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, inputs):
    write_model("llama", tmp_path / "model", vocab_size=100)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="but the model has 100"):
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
    for prompt, words in (
        ("a <new>", "returned token 259, but the model has 259"),
        ("", "each needs at least one token"),
    ):
        with pytest.raises(ValueError, match=words):
            finetune.prepare(finetune.parse([*options, "--prompt", prompt]))
    assert finetune.prepare(finetune.parse([*options, "--prompt", "ab"])).prompts == [
        tokenizer("ab")["input_ids"]
    ]


def test_files_with_weights_and_streams_are_read(tmp_path, inputs):
    chats = tmp_path / "more.jsonl"
    write(chats, [conversation(f"{i}?", "Yes.") for i in range(60)])
    common = [*inputs[:3], inputs[3], str(chats), "--seq", "128", "--batch-size", "4"]
    found: Any = finetune.prepare(finetune.parse(common))
    assert found.rows.counts.examples == 190 + 57
    assert found.held_out.counts.examples == 10 + 3
    weighted = [*common[:3], f"{inputs[3]}:3", f"{chats}:1", *common[5:]]
    lines = finetune.describe_rows(finetune.prepare(finetune.parse(weighted)).rows)
    assert lines[1].startswith(f"75 % of the rows from {inputs[3]}: 190 examples in ")
    streamed = [*weighted, "--stream", "50", "--steps", "3", "--held-out", "0"]
    assert resumed(tmp_path / "saved", *streamed) == []
    options = finetune.parse(streamed)
    found = finetune.prepare(options)
    assert finetune.describe_rows(found.rows)[0] == "rows of 128, read in windows of 50 records"
    assert finetune.num_steps(options, found.rows) == 3
    (tmp_path / "saved" / "3").mkdir()
    with pytest.raises(ValueError, match="--stream also change"):
        resumed(tmp_path / "saved", *streamed, "--stream", "40")
    write(chats, [{"text": "a", "instruction": "b", "output": "c"}])
    with pytest.raises(ValueError, match=r"--data: .*more\.jsonl:1: .*choose one by form="):
        finetune.prepare(finetune.parse(common))


def test_another_template_and_its_options_make_the_examples_and_the_prompts(tmp_path, inputs):
    (tmp_path / "thinking.jinja").write_text(THINKING)
    given = [
        "--chat-template",
        str(tmp_path / "thinking.jinja"),
        "--seq",
        "128",
        "--prompt",
        "Why?",
    ]
    found: Any = finetune.prepare(
        finetune.parse([*inputs, *given, "--template-options", '{"enable_thinking": false}'])
    )
    first = found.tokenizer.decode(found.rows.examples.tokens[: found.rows.examples.starts[1]])
    assert "<|im_start|>assistant\n<think></think>It is" in first
    assert found.tokenizer.decode(found.prompts[0]).endswith(
        "<|im_start|>assistant\n<think></think>"
    )
    with pytest.raises(ValueError, match=r"--data: .*the chat template reads no 'enable_thinkng'"):
        finetune.prepare(
            finetune.parse([*inputs, *given, "--template-options", '{"enable_thinkng": false}'])
        )


def test_an_export_has_the_template_of_the_run(tmp_path):
    """transformers reads this template before all others in the model's folder."""
    tokenizer = byte_tokenizer({"default": PLAIN, "tool_use": PLAIN})
    tokenizer.save_pretrained(tmp_path / "out")
    (tmp_path / "thinking.jinja").write_text(THINKING)
    finetune.write_template(str(tmp_path / "thinking.jinja"), str(tmp_path / "out"))
    assert load_tokenizer(tmp_path / "out").chat_template == THINKING


def test_advice_of_the_library_names_options(tmp_path, inputs):
    write(tmp_path / "a.jsonl", [conversation("hi", "yes")])
    (tmp_path / "r1.jinja").write_text(R1.template)
    given = ["--data", str(tmp_path / "a.jsonl"), "--chat-template", str(tmp_path / "r1.jinja")]
    with pytest.raises(
        ValueError,
        match=r"this context when it answers: give a --chat-template that has {% generation %} marks",
    ):
        finetune.prepare(finetune.parse([*inputs, *given]))


@pytest.mark.parametrize("name", ["empty", "pipe", "/dev/zero"])
def test_data_that_is_none_is_refused_at_once(tmp_path, inputs, name):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"--data: .*(not a folder that|is a pipe or a device)"):
        finetune.prepare(finetune.parse([*inputs, "--data", str(tmp_path / name)]))


@pytest.mark.parametrize("text", ["{}", "[" * 100_000, '{"model": {"vocab": {"a": -1}}}'])
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path, inputs, text):
    shutil.copytree(inputs[1], tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"--model .*tokenizer\.json: "):
        finetune.prepare(finetune.parse([*inputs, "--model", str(tmp_path / "model")]))


def test_code_of_a_model_is_not_asked_for(tmp_path, inputs, monkeypatch):
    """The script does not ask about a config with code, or a tokenizer that needs code."""
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks the user"))
    shutil.copytree(inputs[1], tmp_path / "model")
    options = finetune.parse([*inputs, "--model", str(tmp_path / "model"), "--seq", "128"])
    for file, more in (
        ("config.json", {"auto_map": {"AutoConfig": "mine.Config"}}),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, "tokenizer_class": "Mine"},
        ),
    ):
        path = tmp_path / "model" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
        if file == "config.json":
            assert len(finetune.prepare(options).rows) > 0
    with pytest.raises(ValueError, match=r"--model .*: it needs code of its own, which is not run"):
        finetune.prepare(options)


def test_nothing_is_held_out_where_that_is_asked_for(inputs):
    found: Any = finetune.prepare(finetune.parse([*inputs, "--held-out", "0", "--seq", "128"]))
    assert found.held_out is None
    assert found.rows.counts.examples == 200
    assert found.prompts[0][0] == found.rows.examples.tokens[0]


def test_an_answer_ends_at_any_of_the_models_end_tokens(tmp_path, inputs):
    shutil.copytree(inputs[1], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    options = finetune.parse([*inputs, "--model", str(tmp_path / "model")])
    tokenizer = byte_tokenizer()
    assert finetune.end_tokens(options, tokenizer) == {7, 8, tokenizer.eos_token_id}


def test_what_would_end_an_export_is_refused_before_the_run(tmp_path, inputs):
    model = tmp_path / "model"
    shutil.copytree(inputs[1], model)
    saving = ["--checkpoint-dir", str(tmp_path / "c"), "--export", str(tmp_path / "out")]
    arguments = [*inputs, "--model", str(model), *saving]
    finetune.check(finetune.parse(arguments))
    (model / "notes.txt").symlink_to("nowhere")
    with pytest.raises(
        ValueError, match=r"--export .*notes\.txt is a link to nowhere, which does not exist"
    ):
        finetune.check(finetune.parse(arguments))
    # Adapters alone are written without the folder's other files.
    finetune.check(finetune.parse([*arguments, "--lora-rank", "2"]))
    (model / "notes.txt").unlink()
    (model / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    for more in ([], ["--lora-rank", "2"]):
        with pytest.raises(
            ValueError, match=r"--model .*generation_config\.json: eos_token_id is '</s>'"
        ):
            finetune.check(finetune.parse([*arguments, *more]))


def test_home_is_expanded(tmp_path, inputs, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = ["--data", "~/chats.jsonl:1"]
    options = finetune.parse([*inputs, "--model=~/model", *data, "--export=~/out"])
    paths, _ = split_weights(options.data)
    assert [options.model, *paths, options.export] == [
        str(tmp_path / name) for name in ("model", "chats.jsonl", "out")
    ]


def test_flops_of_frozen_matrices_have_no_gradients(inputs):
    whole, adapters = (
        finetune.model_flops_per_token(finetune.parse([*inputs, *more, "--seq", "2"]))
        for more in ((), ("--lora-rank", "4"))
    )
    c = config_of(inputs[1])
    matrices = (
        c.num_params - c.hidden * (2 * c.layers + 1) - c.vocab * c.hidden
    )  # without norms and the embedding
    attention = 12 * c.layers * c.heads * c.head_dim * 2
    assert math.isclose(whole, 6 * matrices + attention)
    assert math.isclose(adapters, 4 * matrices + attention)
