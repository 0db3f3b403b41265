"""Random command lines and machine files.

Each command prints what was asked for, or one line with exit status 2.
"""

import os
import pathlib
import random
import string
from collections.abc import Callable

import fuzz
import pytest

import zerojax as zj
from zerojax import cli, commands
from zerojax.machines import FIGURES

COMMAND_LINES, MACHINE_FILES = 3000, 3000
NUMBERS = [
    "nan", "inf", "-inf", "1e400", "1e308", "1e-320", "-1", "0", "-0", "0.5", "1.0", "1", "2", "3", "7", "8", "64", "1024",
    "1e6", "1e9", "1e18", "1e19",
     "10" * 200, "9" * 5000, "1T", "175B", "7.5e9", "K", "", " ", "x", "---1", "0x10", "1_000", "٣", "½",
    "1e", "--", "-", "\ud800",
]  # fmt: skip
WORDS = [
    "bf16",
    "fp16",
    "fp32",
    "h200",
    "l4",
    "dgx2",
    "H200",
    "turns",
    "each",
    "plain",
    "nvme",
    "save",
    "remat",
    "hf",
    "orbax",
]
FIX = [
    "stage", "opt_state", "params", "activations", "num_microbatches", "prefetch_distance", "clip_norm", "precision",
    "swap_dir", "update_on", "frozen", "opt_state_device_fraction", "gather_ahead", "nothing", "",
]  # fmt: skip
LITERALS = [
    "None", "True", "()", "{}", "[]", "{[]: 1}", "1+2j", "---1", "'a'", "('a', 'b')", "(" * 300, "-" * 3000 + "1", "b'x'",
    "...",     "3", "2", "1", "0", "pinned_host",
]  # fmt: skip
USUAL = ["1", "2", "4", "8", "16"]
OPTIONS = {
    "memory": ["--params", "--shards", "--precision", "--moments", "--microbatches", "--layers", "--hidden", "--heads", "--seq",
               "--vocab", "--batch", "--tensor", "--sequence-parallel", "--partition-activations", "--fused-attention",
               "--activations"],
    "simulate": ["--thunks", "--rates", "--streams", "--kernels", "--graphs", "--callbacks", "--link", "--memory",
                 "--launch-seconds", "--disk-read", "--products"],
    "bench-io": ["--gib", "--rounds"],
    "machines": [],
    "probe": ["--swap-dir", "--out"],
    "plan": ["--params", "--layers", "--hidden", "--heads", "--seq", "--batch", "--vocab", "--mlp", "--kv-heads", "--gated",
             "--machine", "--nodes", "--devices-per-node", "--set", "--tensor", "--data", "--precision", "--fix",
             "--min-disk-days", "--round-moments"],
    "inspect": ["--verify"],
    "export": ["--format", "--dtype", "--like", "--merge-lora", "--shard-bytes", "--ema", "--step"],
}  # fmt: skip
FLAGS = {"--sequence-parallel", "--partition-activations", "--fused-attention", "--gated", "--round-moments", "--verify",
         "--merge-lora", "--ema"}  # fmt: skip
WHOLE_PLAN = [
    "--layers",
    "2",
    "--hidden",
    "64",
    "--heads",
    "4",
    "--seq",
    "16",
    "--batch",
    "8",
    "--machine",
    "h200",
]
WHOLE_SHAPE = ["--layers", "2", "--hidden", "64", "--heads", "4", "--seq", "16"]


@pytest.fixture
def paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Create files of every kind that a path may lead to, and disable measurements."""
    monkeypatch.setattr(commands, "probe", lambda swap_dir: zj.machine("l4"))
    monkeypatch.setattr(commands, "disk_report", lambda folder, **sizes: f"{folder} {sizes}")
    made = {
        "empty.toml": b"", "deep.toml": b"a = " + b"[" * 5000, "tables.toml": b"[" + b".".join([b"a"] * 5000) + b"]\nb = 1\n",
        "lab.toml": b'base = "h200"\nhost_bytes = 2e12\n', "binary": b"\x7fELF\xd0\xff", "text.txt": b"HloModule a\n",
        "latin.toml": b'name = "\xe9"\n', "big.toml": b"#" * (2 << 20),
    }  # fmt: skip
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe.toml")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "gone.toml").symlink_to("nowhere")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    names = [
        *made,
        "pipe.toml",
        "pipe",
        "zero.toml",
        "gone.toml",
        "folder.toml",
        "checkpoints",
        "none",
        "none/none.toml",
        "",
    ]
    return [str(tmp_path / name) for name in names]


def drawn_line(rng: random.Random, paths: list[str]) -> list[str]:
    """Return a command line: a command with its own options, and values of any kind."""
    command = rng.choice([*OPTIONS, "plan", "memory", "simulate"])

    def value(option: str) -> str:
        if option == "--fix":
            return f"{rng.choice(FIX)}={rng.choice([*NUMBERS, *WORDS, *LITERALS])}"
        if option == "--set":
            return f"{rng.choice([*FIGURES, 'x', ''])}={rng.choice(NUMBERS)}"
        pools = [NUMBERS, USUAL, WORDS, paths] if rng.random() < 0.5 else [USUAL]
        if option in ("--machine", "--like", "--thunks", "--swap-dir", "--out"):
            pools = [paths, paths, WORDS, NUMBERS]
        return rng.choice(rng.choice(pools))

    line = [command]
    if command == "plan" and rng.random() < 0.8:
        line += WHOLE_PLAN
    if command == "memory" and rng.random() < 0.5:
        line += WHOLE_SHAPE
    if command in ("simulate", "bench-io", "inspect", "export"):
        line.append(rng.choice(paths))
    if command == "export":
        line += [
            rng.choice(paths),
            "--format",
            rng.choice(["orbax", "safetensors", "hf", "peft", "x"]),
        ]
    if command == "machines":
        line += [rng.choice([*paths, *WORDS]) for _ in range(rng.randrange(3))]
    for _ in range(rng.randrange(1, 4)):
        if OPTIONS[command]:
            option = rng.choice(OPTIONS[command])
            line += [option] if option in FLAGS else [f"{option}={value(option)}"]
    if rng.random() < 0.05:
        del line[rng.randrange(len(line))]
    return line


def outcome(line: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a case that runs a command line and checks how it ends."""

    def case() -> str:
        try:
            cli.main(line)
        except SystemExit as stop:
            code = stop.code
        else:
            capsys.readouterr()
            return "done"
        told = capsys.readouterr()
        assert code == 2 or (code, line[0]) == (1, "inspect"), (code, told.err)
        assert told.err.splitlines()[-1].startswith("zerojax"), told.err
        return "refused"

    return case


def check_lines(seeds: range, paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cases = []
    for seed in seeds:
        line = drawn_line(random.Random(seed), paths)
        cases.append((f"{seed}: {' '.join(line)[:300]!r}", outcome(line, capsys)))
    found = fuzz.run_all(cases)
    assert found["refused"] > len(cases) // 3
    with capsys.disabled():
        print(f"\n{len(cases)} command lines: {dict(found)}")


def test_drawn_command_lines_end_with_one_line(paths, capsys):
    check_lines(range(40), paths, capsys)


@pytest.mark.exhaustive
def test_all_drawn_command_lines_end_with_one_line(paths, capsys):
    check_lines(range(COMMAND_LINES), paths, capsys)


VALUES = ["1", "-1", "0", "1e12", "nan", "inf", "-inf", "1e400", "9" * 5000, '"x"', '""', "true", "[]", "[1, [2]]", "{a = 1}",
          "2024-01-01", "0x10", "1_000", "'", '"""', "5e10", "3.5", "1e-300", "1e300", "", '"\\ud800"']  # fmt: skip


def drawn_file(rng: random.Random) -> bytes:
    """Return the text of a machine file of keys and values, some wrong, with random edits."""
    keys = [
        "name",
        "base",
        "nodes",
        "devices_per_node",
        *FIGURES,
        "source.link_up",
        "flops",
        "source",
        "a.b",
        '"x y"',
        "",
        "[t]",
    ]
    rows = ['base = "h200"'] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(6)):
        key = rng.choice(keys)
        usual = {"name": '"lab"', "base": '"l4"', "nodes": "2", "devices_per_node": "4"}.get(
            key, "5e10"
        )
        rows.append(f"{key} = {usual if rng.random() < 0.5 else rng.choice(VALUES)}")
    if rng.random() < 0.3:
        rows.append(
            rng.choice(
                [
                    "[flops]",
                    "[[flops]]",
                    "[a.b.c]",
                    "[source]",
                    "[",
                    "]",
                    "a = " + "[" * 3000,
                    "a = " + "{x=" * 3000,
                ]
            )
        )
        rows.append(f"{rng.choice(['bf16', 'fp8', 'link_up'])} = {rng.choice(VALUES)}")
    data = "\n".join(rows).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(data) + 1)
        edit = rng.choice(
            [b"", b"\x00", b"\xff", rng.choice(string.printable).encode(), b"\n", b"="]
        )
        data = data[:at] + edit + data[at + rng.randrange(3) :]
    return data


def check_files(seeds: range, folder: pathlib.Path) -> None:
    path = folder / "lab.toml"

    def case(data: bytes) -> Callable[[], str]:
        def read() -> str:
            path.write_bytes(data)
            try:
                found = zj.machine(path)
            except ValueError as error:
                said = str(error)
                return (
                    "refused"
                    if str(path) in said or "machine" in said
                    else f"says no place: {said}"
                )
            assert str(found)
            assert zj.machine(folder / found_again(found)) == found
            return "read"

        return read

    def found_again(found: zj.Machine) -> str:
        found.save(folder / "again.toml")
        return "again.toml"

    drawn = [(seed, drawn_file(random.Random(seed))) for seed in seeds]
    found = fuzz.run_all([(f"{seed}: {data[:300]!r}", case(data)) for seed, data in drawn])
    assert set(found) == {"refused", "read"}
    assert min(found.values()) > len(drawn) // 20
    print(f"{len(drawn)} machine files: {dict(found)}")


def test_drawn_machine_files_are_read_or_refused(tmp_path):
    check_files(range(200), tmp_path)


@pytest.mark.exhaustive
def test_all_drawn_machine_files_are_read_or_refused(tmp_path):
    check_files(range(MACHINE_FILES), tmp_path)
