"""`zerojax plan`: what it prints and writes, and what it refuses in one line."""

import json
import os
import sys

import pytest

import zerojax as zj
from zerojax import cli

TRILLION = "--params 1T --layers 128 --hidden 25600 --heads 256 --seq 1024 --batch 7 --machine dgx2"
SMALL = "--layers 4 --hidden 512 --heads 8 --seq 128 --batch 2 --vocab 1024"
LAB = """
base = "l4"
host_bytes = 64_000_000_000
disk_bytes = 1_000_000_000_000
link_both = 3e10
disk_read = 3e9
disk_write = 2e9
disk_both = 3e9
"""
QUICK = (
    "--fix prefetch_distance=1 --fix num_microbatches=1 --fix activations=remat --fix grads=device"
)


@pytest.fixture
def lab(tmp_path) -> str:
    (tmp_path / "lab.toml").write_text(LAB)
    return f"{SMALL} --machine {tmp_path / 'lab.toml'} {QUICK}"


def run(arguments: str) -> None:
    cli.main(["plan", *arguments.split()])


def refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a command prints when it exits with status 2."""
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    told = capsys.readouterr()
    assert (caught.value.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    assert line.startswith("zerojax plan: ")
    return line


def test_plan_of_a_trillion_parameters_is_on_disk(tmp_path, capsys):
    """ZeRO-Infinity trains a trillion parameters on one DGX-2.

    Each GPU has 12 P / 16 bytes of optimizer state on its disks.
    """
    path = tmp_path / "plan.json"
    fixed = "--fix prefetch_distance=2 --fix num_microbatches=1 --fix gather_ahead=False --fix update=None"
    run(f"{TRILLION} {fixed} --json {path}")
    text, read = capsys.readouterr().out, json.loads(path.read_text())
    assert text.startswith("1,000,000,000,000 parameters, 128 layers x 25600 on dgx2 (fsdp=16): ")
    assert "  nvme        " in text
    config, nvme = read["config"], read["bytes"]["nvme"]
    assert (config["precision"], config["opt_state"], config["params"]) == ("fp16", "nvme", "nvme")
    assert nvme["opt_state"] == pytest.approx(12e12 / 16, rel=1e-3)
    assert nvme["params"] == pytest.approx(2e12 / 16, rel=1e-3)
    for tier, kinds in read["bytes"].items():
        assert sum(kinds.values()) <= read["capacity"][tier]
    assert read["seconds"] > 6 * 1e12 * 1024 * 7 / 70e12  # no GPU attains more


def test_plan_command_is_the_function(lab, tmp_path, capsys):
    run(f"{lab} --json {tmp_path / 'plan.json'} --fix update=None")
    sizes = zj.Sizes(layers=4, hidden=512, heads=8, seq=128, batch=2, vocab=1024)
    fixed = {
        "prefetch_distance": 1,
        "num_microbatches": 1,
        "activations": "remat",
        "grads": "device",
        "update": None,
    }
    made = zj.plan(
        sizes, machine=zj.machine(tmp_path / "lab.toml"), fixed=fixed | {"precision": "bf16"}
    )
    read, expected = (
        json.loads(text) for text in ((tmp_path / "plan.json").read_text(), made.to_json())
    )
    assert {k: v for k, v in read.items() if k != "search"} == {
        k: v for k, v in expected.items() if k != "search"
    }
    assert capsys.readouterr().out.splitlines()[:-1] == str(made).splitlines()[:-1]


def test_plan_command_fixes_fields(lab, capsys):
    run(f"{lab} --fix opt_state=nvme --fix update_on=device --fix clip_norm=0.5 --precision fp32")
    (config,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  config ")
    ]
    assert "opt_state='nvme'" in config
    assert "clip_norm=0.5" in config
    assert "precision" not in config  # fp32 is the default


def test_plan_command_sets_figures(lab, capsys):
    """Twice the devices process twice the sequences: `--batch` is per device."""
    run(f"{lab} --set device_bytes=200e6 --set flops.bf16=5e12 --fix update_on=device")
    small = capsys.readouterr().out
    assert "of 190 MB a device" in small
    assert "pinned_host" in small
    run(f"{lab} --devices-per-node 2 --set network_in_node=1e10")
    assert "on lab (fsdp=2)" in capsys.readouterr().out


def test_plan_command_compares_stages_and_tiers(lab, capsys):
    run(
        f"{lab} --devices-per-node 2 --set network_in_node=1e10 --set device_bytes=120e6 --set disk_bytes=0 --compare"
    )
    made, table = capsys.readouterr().out.split("\n\n")
    seconds = float(made.split(": ")[1].split(" s a step")[0])
    rows = {line[:28].strip(): line[28:].split() for line in table.splitlines()[1:]}
    assert list(rows) == [
        *(f"stage={n}" for n in range(4)),
        *(f"opt_state={t}" for t in ("device", "pinned_host", "nvme")),
    ]
    of_plan = [float(row[1]) for row in rows.values() if row[0] != "-"]
    assert min(of_plan) == pytest.approx(1.0, abs=0.03)
    assert all(float(row[0]) >= 0.97 * seconds for row in rows.values() if row[0] != "-")
    assert any(row[0] == "-" for row in rows.values())  # it says what does not fit


@pytest.mark.parametrize(("arguments", "message"), [
    ("--machine h201", "machine 'h201' is unknown"),
    ("--machine nowhere.toml", "nowhere.toml does not exist: pass the path of a TOML file of figures"),
    ("--machine l4 --precision bf16 --fix precision=fp32", "--precision bf16 and --fix precision=fp32: give only one of them"),
    ("--machine l4 --set host_byte=1", "'host_byte' is not a machine figure"),
    ("--machine l4 --set host_bytes=much", "a finite number is needed, such as host_bytes=2e12"),
    ("--machine l4 --set device_bytes=inf", "--set device_bytes=inf: a finite number is needed"),
    ("--machine l4 --set link_up=nan", "--set link_up=nan: a finite number is needed"),
    ("--machine l4 --fix stage=3 --fix stage=2", "--fix stage is given more than once, as 3 and 2"),
    ("--machine /tmp", "/tmp is a folder: pass the path of a TOML file of figures"),
    ("--machine l4 --min-disk-days -1", "argument --min-disk-days: '-1': a number above 0"),
    ("--machine l4 --fix stages=3", "ZeroConfig has no field 'stages'; did you mean 'stage'?"),
    ("--machine l4 --fix stage", "a value is needed, such as stage=3"),
    ("--machine l4 --fix stage=5", "stage=5 is unknown: choose from 0, 1, 2, 3"),
    ("--machine l4 --nodes 2", "On the command line, use --set FIGURE=VALUE."),
    ("--machine l4 --tensor 3", "--tensor 3 does not divide the 1 devices of l4"),
    ("--machine l4 --fix opt_state=pinned_host", "fixed opt_state='pinned_host' needs pinned_host: "),
    ("--machine l4 --set device_bytes=1e6 --fix activations=remat", "nothing fits l4: device needs"),
    ("--machine l4 --json nowhere/plan.json", "nowhere/plan.json: its folder does not exist"),
    ("--machine l4 --min-disk-days 30", "disk_tbw_bytes"),
    ("--machine l4 --kv-heads 3", "heads = 8 is not divisible by kv_heads = 3"),
    ("--machine l4 --params 1B", "drop params, or correct the size that is wrong"),
])  # fmt: skip
def test_plan_command_refuses_with_one_line(arguments, message, capsys):
    assert message in refused(f"{SMALL} {arguments}", capsys)


def test_figures_that_no_probe_measures_are_not_said_to_be(capsys):
    assert "zerojax probe" not in refused(f"{SMALL} --machine l4 --nodes 2", capsys)
    assert "zerojax probe" in refused(f"{SMALL} --machine l4 --fix opt_state=pinned_host", capsys)


def test_plan_command_ends_quietly_when_nobody_reads_on(monkeypatch):
    """Run the equivalent of `zerojax plan ... | head -1`."""
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        run(f"{SMALL} --machine l4 --fix opt_state=device {QUICK}")


@pytest.mark.parametrize(
    "arguments",
    ["--layers 4", f"{SMALL} --machine l4 --params many", f"{SMALL} --machine l4 --layers 0"],
)
def test_plan_command_tells_how_it_is_used(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2
    assert "zerojax plan --help lists the options" in capsys.readouterr().err


def test_the_longest_sequence_needs_no_length(tmp_path, capsys):
    (tmp_path / "lab.toml").write_text(LAB)
    sizes = "--layers 4 --hidden 512 --heads 8 --vocab 1024 --fix opt_state=device"
    machine = f"--machine {tmp_path / 'lab.toml'} {QUICK} --fix params=device"
    run(f"{sizes} {machine} --longest 1048576 --json {tmp_path / 'plan.json'}")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["length"] % plan["block"] == 0
    assert plan["block"] == 1048576
    assert f"{plan['length']:,} tokens per sequence" in capsys.readouterr().out
    assert "--seq and --longest: give only one" in refused(f"{SMALL} {machine} --longest", capsys)
    assert "--seq and --batch are needed" in refused(f"{sizes} {machine}", capsys)
