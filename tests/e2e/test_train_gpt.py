"""The example trains, reports and samples.

Its text is deterministic, and its iterator can be resumed.
"""

import dataclasses
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time
import typing

import jax
import numpy as np
import pytest
import text_data
import train_gpt
from flax import nnx
from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]

import zerojax as zj

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


ON_HOST = [f"--{kind}=pinned_host" for kind in ("params", "grads", "opt-state", "activations")]


def run(tmp_path: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "examples" / "train_gpt.py"),
        "--logdir",
        str(tmp_path / "log"),
        *arguments,
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )


def folder(tmp_path: pathlib.Path) -> str:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(
            f"file {i}: the quick brown fox jumps over the lazy dog. " * 40
        )
    (text / "binary").write_bytes(b"\0\1\2")
    return str(text)


@pytest.mark.exhaustive  # by default the runs of test_resumed_gpt.py read a folder, and sample
@pytest.mark.parametrize(
    "arguments",
    [
        ["--mesh", "data=2,fsdp=2", "--precision", "bf16", "--num-microbatches", "2", *ON_HOST],
        [
            *(
                "--model",
                "unrolled",
                "--mesh",
                "fsdp=2,tensor=2",
                "--dropout",
                "0.1",
                "--loss-tiles",
                "3",
                "--precision",
                "fp16",
            ),
            *("--moments", "bfloat16", "--activations", "remat", "--loss-scaling.initial", "1024"),
        ],
        [
            "--mesh",
            "fsdp=2,tensor=4",
            "--devices",
            "8",
            "--sequence-parallel",
            "True",
            "--activations",
            "selective",
        ],
    ],
    ids=["streamed", "unrolled", "sequence_parallel"],
)
def test_train_gpt_runs_on_a_folder_of_text(tmp_path, arguments):
    sizes = [
        "--steps",
        "12",
        "--seq",
        "32",
        "--batch-size",
        "16",
        "--eval-every",
        "6",
        "--sample-bytes",
        "20",
    ]
    done = run(tmp_path, "--data", folder(tmp_path), *sizes, *arguments)
    assert done.returncode == 0, done.stderr
    assert "--- sample ---" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (lines[0], lines[-1]))
    assert last < first
    assert "tokens/s" in lines[-1]
    assert "validation" in lines[-1]
    assert list((tmp_path / "log").glob("events.out.tfevents.*"))


def events(path: pathlib.Path, name: str) -> dict[int, float]:
    """Return the values of a figure, in float32, by step."""
    data, start, found = path.read_bytes(), 0, {}
    while start < len(data):  # u64 length, u32 checksum, the event, u32 checksum
        (size,) = struct.unpack_from("<Q", data, start)
        event = Event.FromString(data[start + 12 : start + 12 + size])
        for value in event.summary.value:
            if value.tag == name:
                found[event.step] = value.simple_value
        start += size + 16
    return found


def start_two(tmp_path: pathlib.Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start the script in two processes with two devices each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    sizes = [
        "--seq",
        "32",
        "--batch-size",
        "16",
        "--eval-every",
        "4",
        "--sample-bytes",
        "8",
        "--devices",
        "2",
    ]
    command = [
        sys.executable,
        str(ROOT / "examples" / "train_gpt.py"),
        "--data",
        folder(tmp_path),
        *sizes,
        *arguments,
    ]
    workers = []
    for me in range(2):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address}
        env |= {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(me)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        mine = [*command, "--mesh", "data=2,fsdp=2", "--logdir", str(tmp_path / f"log{me}")]
        workers.append(subprocess.Popen(mine, env=env, cwd=tmp_path, **pipes))
    return workers


@pytest.mark.exhaustive  # by default test_resumed_gpt.py starts two processes
def test_train_gpt_joins_a_cluster(tmp_path):
    """Two processes whose environment names a coordinator train one model.

    Only the first process prints and writes.
    """
    workers = start_two(tmp_path, "--steps", "8")
    outputs = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert "4 x cpu, mesh {'data': 2, 'fsdp': 2" in outputs[0][0]
    assert "validation" in outputs[0][0]
    assert not any(
        word in outputs[1][0] for word in ("loss", "parameters", "sample")
    )  # gloo writes lines of its own
    assert not (tmp_path / "log1").exists()


@pytest.mark.exhaustive
def test_train_gpt_ends_soon_after_one_of_its_processes_was_killed(tmp_path):
    """Otherwise JAX would wait for up to 100 s."""
    first, last = start_two(tmp_path, "--steps", "100000", "--heartbeat-timeout", "5")
    assert first.stdout is not None
    try:
        while "(compiled)" not in (line := first.stdout.readline()):
            assert line, first.communicate()
        last.kill()
        start = time.monotonic()
        first.communicate(timeout=120)
        assert time.monotonic() - start < 40
        assert first.returncode != 0
    finally:
        for worker in (first, last):
            worker.kill()
            worker.communicate()


@pytest.mark.exhaustive  # by default test_resumed_gpt.py sees a refusal
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "6"], "a batch of 6 does not divide"),
        (["--mesh", "fsdp=3"], "fsdp 3 x tensor 1 = 3, but there are 4 devices"),
        (["--mesh", "rows=3"], "the axes are data, fsdp, expert, context and tensor"),
        (
            ["--mesh", "fsdp=1,context=4", "--attention", "ring", "--seq", "60"],
            "60 tokens do not divide by 2 x context=4",
        ),
        (["--mesh", "context=2", "--auto", "True"], "zj.plan cannot predict what a step sends"),
        (["--mesh", "expert=2"], "the mesh has expert=2, but no weight"),
        (["--experts", "8", "--mlp-tiles", "4"], "--mlp-tiles 4 cuts an MLP that --experts 8"),
        (["--experts", "4", "--top-k", "5"], "--top-k 5"),
        (["--data", "nowhere"], "not a folder"),
        (["--params", "nvme"], "set --swap-dir"),
        (["--params", "nvme", "--swap-dir", "nowhere"], "nowhere"),
        (
            [
                "--delayed-update",
                "True",
                "--update-on",
                "host",
                "--opt-state",
                "nvme",
                "--params",
                "nvme",
                "--swap-dir",
                ".",
            ],
            "not supported",
        ),
        (["--swap-trace", "trace.json"], "nothing on nvme"),
        (["--stage", "5"], "5"),
        (["--loss-tiles", "257"], "0 (full logits) to 256"),
        (["--mesh", "fsdp=1,tensor=3", "--devices", "3"], "heads=4 do not divide by tensor=3"),
        (
            ["--mesh", "fsdp=1,tensor=4", "--seq", "30", "--sequence-parallel", "True"],
            "pad the sequences to 32",
        ),
        (["--model", "unrolled", "--sequence-parallel", "True"], "works layer by layer"),
    ],
)
def test_train_gpt_refuses_clearly(tmp_path, arguments, words):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["train_gpt.sh", "train_gpt_tensor.sh", "train_long_context.sh"])
def test_slurm_scripts_start_a_run_that_fits_their_nodes(tmp_path, monkeypatch, script):
    """A stand-in for srun records its call on 2 nodes, with example options for 16 devices."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\nshift 2\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    env = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
        "VENV": str(tmp_path),
        "DATA": "text",
    }
    env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "examples" / "slurm" / script), "--steps", "3"]
    arguments = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    options = train_gpt.parse(arguments)
    assert (options.steps, options.data, options.resume) == (3, "text", True)
    devices = [jax.devices()[0]] * 16
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(zj, "join_cluster", lambda timeout: None)
    mesh = train_gpt.start(dataclasses.replace(options, devices=8))
    assert mesh.size == 16
    preset = train_gpt.gpt.PRESETS[options.preset]
    train_gpt.gpt.check_tensor(preset, mesh.shape["tensor"])
    assert (options.seq or preset.seq) % (2 * mesh.shape.get("context", 1)) == 0
    assert (
        options.batch_size
        % (mesh.shape["data"] * mesh.shape["fsdp"] * options.zero.num_microbatches)
        == 0
    )


def test_presets_have_the_parameters_of_their_names():
    presets = train_gpt.gpt.PRESETS
    assert tuple(presets) == typing.get_args(typing.get_type_hints(train_gpt.Options)["preset"])
    # The vocabulary is bytes here; the named models have the vocabularies of GPT-2 and, from 22b
    # on, of Korthikanti et al.
    of_name = {"124m": 124.4e6, "350m": 354.8e6, "1.3b": 1.3e9, "6.7b": 6.7e9, "13b": 13e9}
    of_paper = {"22b": 22e9, "175b": 175e9, "530b": 530e9, "1t": 1008e9}
    for name, count in (of_name | of_paper).items():
        vocab = 51200 if name in of_paper else 50257
        np.testing.assert_allclose(
            dataclasses.replace(presets[name], vocab=vocab).num_params, count, rtol=0.02
        )


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": False}, {"experts": 4}, {"experts": 3, "expert_hidden": 40, "tied": False}],
    ids=["dense", "untied", "experts", "narrow_experts"],
)
def test_num_params_is_the_number_of_parameters(changes):
    c = train_gpt.gpt.GPTConfig(layers=2, hidden=16, heads=2, seq=8, vocab=32, **changes)
    model = nnx.eval_shape(lambda: train_gpt.gpt.GPT(c, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert c.num_params == sum(leaf.size for leaf in leaves)


def test_experts_are_not_negative_and_have_no_tiles():
    with pytest.raises(ValueError, match="experts=-1: at least 1 is needed, or 0 for an MLP"):
        train_gpt.gpt.GPTConfig(experts=-1)
    with pytest.raises(ValueError, match="mlp_tiles=4 cuts an MLP that experts=8 replaces"):
        train_gpt.gpt.GPTConfig(experts=8, mlp_tiles=4)


def test_corpus_is_deterministic_and_split_by_file(tmp_path):
    train, held = text_data.load_corpus(None)
    again, _ = text_data.load_corpus(None)
    np.testing.assert_array_equal(train, again)
    assert len(train) > 5e6
    assert 0.01 < len(held) / len(train) < 0.2
    first, second = text_data.load_corpus(folder(tmp_path))
    assert b"\1" not in first.tobytes() + second.tobytes()
    assert len(first) + len(second) == sum(
        len(p.read_bytes()) + 1 for p in (tmp_path / "text").glob("*.txt")
    )


def test_iterator_resumes_from_its_state():
    data = np.arange(4000, dtype=np.int64).astype(np.uint8)
    it = text_data.batches(data, 16, 4, seed=1)
    for _ in range(3):
        next(it)
    state = it.get_state()  # type: ignore[attr-defined]
    expected = [next(it)["tokens"] for _ in range(3)]
    fresh = text_data.batches(data, 16, 4, seed=1)
    fresh.set_state(state)  # type: ignore[attr-defined]
    for tokens in expected:
        np.testing.assert_array_equal(next(fresh)["tokens"], tokens)


def test_parts_side_by_side_are_the_same_batches():
    """Any number of processes read the same text, even past its end.

    An iterator can be set to any position.
    """
    data = np.arange(16 * 21 + 1, dtype=np.int64)
    whole = text_data.batches(data, 16, 8, seed=1)
    parts = [text_data.batches(data, 16, 4, seed=1, part=part, num_parts=2) for part in range(2)]
    expected = [next(whole)["tokens"] for _ in range(7)]
    for rows in expected:
        np.testing.assert_array_equal(
            np.concatenate([next(part)["tokens"] for part in parts]), rows
        )
    late = text_data.batches(data, 16, 4, seed=1, part=1, num_parts=2)
    text_data.go_to(late, 5)
    np.testing.assert_array_equal(next(late)["tokens"], expected[5][4:])


def test_processes_read_disjoint_windows():
    data = np.arange(16 * 40 + 1, dtype=np.int64)
    seen = []
    for part in range(2):
        it = text_data.batches(data, 16, 4, seed=1, part=part, num_parts=2)
        seen.append({int(row[0]) for _ in range(5) for row in next(it)["tokens"]})
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == 40
