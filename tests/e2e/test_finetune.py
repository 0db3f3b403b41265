"""The script fine-tunes on conversations, and writes a folder of what it trained.

If it is stopped, it continues bit for bit.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any, cast

import finetune
import jax
import numpy as np
import pytest
from finetune_inputs import write_inputs
from hf_models import need
from hf_models import write as write_model

import zerojax as zj

need("torch", "transformers", "peft")
pytestmark = [
    pytest.mark.xdist_group("finetune"),  # tests share a program and its run
    # peft reads an attribute that transformers renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS, EVERY, STOPPED = 16, 4, 10
ADAPTERS = ["--lora-rank", "8", "--learning-rate", "1e-2"]
BEST = ["--keep-best", "True", "--patience", "3"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def options_of(folder: pathlib.Path, *more: str) -> list[str]:
    """Return the options that all runs share; float32 makes numbers comparable."""
    sizes = [
        "--steps",
        str(STEPS),
        "--seq",
        "128",
        "--batch-size",
        "8",
        "--eval-every",
        "4",
        "--sample-tokens",
        "4",
    ]
    return [*sizes, "--precision", "fp32", "--logdir", str(folder / "log"), *more]


def saving(folder: pathlib.Path) -> list[str]:
    return [
        "--checkpoint-dir",
        str(folder / "saved"),
        "--checkpoint-every",
        str(EVERY),
        "--keep",
        "2",
    ]


def figures(folder: pathlib.Path, name: str = "train/loss") -> dict[int, float]:
    """Return a figure of a run by step, with all digits."""
    lines = [
        json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()
    ]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.fixture(scope="module")
def here():
    """Return `tune(*arguments)`, which runs in this process with one program for all calls.

    It returns the output, and whether the run was stopped.
    """
    programs: list[zj.Program] = []
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])

    def tune(*arguments: str) -> tuple[str, bool]:
        options = finetune.parse(arguments)
        finetune.check(options)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            ckpt = finetune.open_checkpoints(
                options, finetune.METRIC if options.keep_best else None
            )
            record = finetune.open_record(options, mesh, ckpt)
            inputs = finetune.prepare(options)
            notes = finetune.begin(options, inputs, record)
            if not programs:
                programs.append(finetune.build(options, mesh, STEPS)[0])
            with ckpt or contextlib.nullcontext():
                is_over = finetune.run(
                    options, programs[0], inputs, ckpt, record=record, notes=notes
                )
        return printed.getvalue(), is_over

    yield tune
    for program in programs:
        program.close()


@pytest.fixture(scope="module")
def uncut(tmp_path_factory, inputs, here):
    """Return the folder of an uninterrupted run, and its output."""
    folder = tmp_path_factory.mktemp("uncut")
    out = ["--export", str(folder / "adapters")]
    arguments = [*inputs, *options_of(folder), *ADAPTERS, *BEST, *saving(folder), *out]
    return folder, here(*arguments)[0]


def test_validation_loss_falls_on_200_conversations(uncut):
    folder, printed = uncut
    assert "train: 190 examples in" in printed
    assert "held out: 10 examples in" in printed
    validation = figures(folder, "validation/loss")
    assert list(validation) == [0, 4, 8, 12, 16]
    start = float(printed.split("step     0  validation ")[1].split()[0])
    assert 5 < start < 6.5  # with 259 tokens, log(259) is 5.56
    assert validation[4] < start - 1
    assert validation[16] < validation[8] - 0.2
    assert printed.split("--- sample ---\n")[1].startswith("<|im_start|>user\n")
    assert "tokens/s" in printed
    assert (folder / "log" / "report.html").stat().st_size > 10_000


def test_what_was_exported_is_what_peft_loads(uncut, inputs):
    import peft
    import transformers

    folder, printed = uncut
    assert f"{folder / 'adapters'} holds the adapters" in printed
    base = transformers.AutoModelForCausalLM.from_pretrained(inputs[1], trust_remote_code=False)
    untouched = {name: value.clone() for name, value in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, folder / "adapters").merge_and_unload()
    changed = [
        name
        for name, value in merged.state_dict().items()
        if not bool((value == untouched[name]).all())
    ]
    assert len(changed) == 7 * 3


def test_a_stopped_run_goes_on_to_the_uncut_losses_bit_for_bit(
    tmp_path, monkeypatch, inputs, here, uncut
):
    """SIGTERM is sent to this process itself, in the middle of a run."""
    step = zj.Run.step

    def stopping(self: zj.Run, number: int, metrics: Any) -> None:
        step(self, number, metrics)
        if number == STOPPED:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(zj.Run, "step", stopping)
    arguments = [*inputs, *options_of(tmp_path), *ADAPTERS, *BEST, *saving(tmp_path)]
    printed, is_over = here(*arguments)
    assert is_over
    assert f"stopped by a signal after step {STOPPED}" in printed
    assert "--- sample ---" not in printed
    assert list(figures(tmp_path)) == [*range(1, STOPPED + 1)]
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=f"up to step {STOPPED}: continue from there with --resume True"
    ):
        here(*arguments)
    with pytest.raises(
        ValueError,
        match=r"saved holds the checkpoints of another run: --weight-decay 0.0, and here 0.5",
    ):
        here(*arguments, "--resume", "True", "--weight-decay", "0.5")
    printed, is_over = here(*arguments, "--resume", "True")
    assert not is_over
    assert f"continues from step {STOPPED} of" in printed
    assert "began with" not in printed
    for name in ("train/loss", "validation/loss"):
        assert figures(tmp_path, name) == figures(uncut[0], name)
    recorded, expected = (
        (folder / "saved" / "validations.json").read_text() for folder in (tmp_path, uncut[0])
    )
    assert recorded == expected
    assert (
        f"at step {min(json.loads(recorded)['losses'].items(), key=lambda x: x[1])[0]}" in printed
    )


@pytest.mark.exhaustive  # by default the positions of streams are compared without a run
def test_a_stopped_run_over_streams_goes_on_bit_for_bit(tmp_path, monkeypatch, inputs, here):
    data = [f"{inputs[3]}:3", f"{inputs[3]}:1", "--stream", "30", "--held-out", "0"]
    for folder in ("uncut", "stopped"):
        arguments = [*inputs[:3], *data, *options_of(tmp_path / folder), *ADAPTERS]
        arguments += saving(tmp_path / folder)
        if folder == "stopped":
            step = zj.Run.step

            def stopping(self: zj.Run, number: int, metrics: Any, step: Any = step) -> None:
                step(self, number, metrics)
                if number == STOPPED:
                    os.kill(os.getpid(), signal.SIGTERM)

            monkeypatch.setattr(zj.Run, "step", stopping)
            assert here(*arguments)[1]
            monkeypatch.undo()
            arguments += ["--resume", "True"]
        printed, is_over = here(*arguments)
        assert not is_over
        assert "train: rows of 128, read in windows of 30 records" in printed
    assert figures(tmp_path / "stopped") == figures(tmp_path / "uncut")


SLOWLY = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "examples")!r})
import finetune, zerojax as zj
step = zj.Run.step
zj.Run.step = lambda self, number, metrics: (step(self, number, metrics), time.sleep(0.3 * (number > {EVERY})))
finetune.main()
"""


def start(
    folder: pathlib.Path, *arguments: str, processes: int = 1, slowly: bool = False
) -> list[subprocess.Popen[str]]:
    """Start the script in processes that share two devices."""
    script = ["-c", SLOWLY] if slowly else [str(ROOT / "examples" / "finetune.py")]
    command = [sys.executable, *script, *arguments, "--devices", str(2 // processes)]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
    }
    pipes: dict[str, Any] = {
        "cwd": folder,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    return [
        subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(me)}, **pipes)
        for me in range(processes)
    ]


def ended(workers: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for processes; returns each one's status and output."""
    try:
        outputs = [worker.communicate(timeout=200) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *output) for worker, output in zip(workers, outputs, strict=True)]


# by default test_two_processes.py stops two processes, and tests/data and test_cluster.py have the
# parts of a batch and the cluster's names
@pytest.mark.exhaustive
def test_two_processes_agree_with_one(tmp_path, inputs, uncut, here):
    """Both processes stop at the same step after a signal to the last; one process continues."""
    arguments = [*inputs, *options_of(tmp_path), *ADAPTERS, *saving(tmp_path)]
    workers = start(tmp_path, *arguments, "--stopped-status", "75", processes=2, slowly=True)
    try:
        while not (tmp_path / "saved" / str(EVERY)).is_dir():
            assert all(worker.poll() is None for worker in workers), [
                worker.communicate() for worker in workers
            ]
            time.sleep(0.02)
    finally:
        workers[-1].send_signal(signal.SIGTERM)
    found = ended(workers)
    assert [status for status, *_ in found] == [75, 75], found
    step = int(found[0][1].split("stopped by a signal after step ")[1].split(",")[0])
    assert EVERY <= step < STEPS
    assert "loss" not in found[1][1]  # only the first process prints
    assert list(figures(tmp_path)) == [*range(1, step + 1)]
    printed, _ = here(*arguments, "--resume", "True")
    assert f"continues from step {step} of" in printed
    for name in ("train/loss", "validation/loss"):
        found, expected = figures(tmp_path, name), figures(uncut[0], name)
        # The step that a signal ends is not validated.
        assert found.keys() == expected.keys() - ({step} if name == "validation/loss" else set())
        np.testing.assert_allclose(
            list(found.values()), [expected[s] for s in found], rtol=1e-4, err_msg=name
        )


def test_an_export_that_fails_is_told_alone(tmp_path, inputs, uncut, capsys):
    write_model("llama", tmp_path / "sibling", vocab_size=259, seed=1)
    options = finetune.parse(
        [*inputs, "--lora-rank", "8", "--checkpoint-dir", str(uncut[0] / "saved")]
    )
    options = dataclasses.replace(
        options, model=str(tmp_path / "sibling"), export=str(tmp_path / "out")
    )
    with (
        pytest.raises(SystemExit, match="2"),
        finetune.train_loop.errors_without_traceback("finetune.py", finetune.Options),
    ):
        finetune.export(options, cast(Any, None))
    told = capsys.readouterr().err
    assert "error: --export " in told
    assert "imported from as --model. The checkpoints are complete" in told


@pytest.mark.exhaustive  # by default the test's own process is sent the signal
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
@pytest.mark.parametrize("name", ["schedule_free", "muon", "adafactor"])
def test_optimizers_by_name_train_adapters_and_averages_are_exported(tmp_path, inputs, name):
    from safetensors.numpy import load_file

    arguments = [*inputs, *options_of(tmp_path), *ADAPTERS, *BEST, *saving(tmp_path)]
    arguments += ["--export", str(tmp_path / "out"), "--optimizer", name]
    ((status, printed, error),) = ended(start(tmp_path, *arguments))
    assert status == 0, error
    validation = list(figures(tmp_path, "validation/loss").values())
    assert validation[-1] < validation[0] - 1.5, validation
    assert "--- sample ---" in printed
    is_averaged = name == "schedule_free"
    step = tmp_path / "saved" / str(min(zip(validation[1:], (4, 8, 12, 16), strict=True))[1])
    zj.export_peft(step, tmp_path / "again", like=inputs[1], ema=is_averaged)
    exported, again = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "again")
    )
    for tensor, value in exported.items():
        np.testing.assert_array_equal(value, again[tensor])
    if is_averaged:
        zj.export_peft(step, tmp_path / "weights", like=inputs[1])
        weights = load_file(tmp_path / "weights" / "adapter_model.safetensors")
        assert any((value != weights[tensor]).any() for tensor, value in exported.items())


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
    arguments = [
        *inputs,
        *options_of(tmp_path),
        *saving(tmp_path),
        "--export",
        str(out),
        *rate,
        *more,
    ]
    ((status, printed, error),) = ended(start(tmp_path, *arguments))
    assert status == 0, error
    validation = list(figures(tmp_path, "validation/loss").values())
    assert validation[-1] < 4
    assert "--- sample ---" in printed
    assert not [
        path
        for path in tmp_path.iterdir()
        if path.is_dir() and path.name.startswith("zerojax-swap")
    ]
    if peft:
        assert (out / "adapter_model.safetensors").exists()
    else:
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        _, told = load(out, output_loading_info=True, trust_remote_code=False)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
