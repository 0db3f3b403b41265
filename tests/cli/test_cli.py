import subprocess
import sys

import disks
import pytest

from host_offload.disk.tuning import DEFAULT
from zerojax import cli
from zerojax.planner import disk as bench_io


def test_memory_prints_the_papers_figures(capsys):
    cli.main(["memory", "--params", "7.5e9", "--shards", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert "16 bytes each" in lines[0]
    totals = [float(line.split()[5]) * 2**30 / 1e9 for line in lines[2:]]
    assert [round(t, 1) for t in totals] == [120.0, 31.4, 16.6, 1.9]
    assert lines[-1].endswith("2.95 P")


@pytest.mark.parametrize("arguments", [["memory", "--params", "0", "--shards", "4"], ["memory"], []])
def test_bad_arguments_exit_with_a_message(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "usage" in capsys.readouterr().err


def test_bench_io_on_too_small_a_disk_says_which_flag_to_lower(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_io, "tune", lambda path: DEFAULT)
    with disks.mounted(tmp_path / "small", "size=1m") as folder, pytest.raises(SystemExit) as caught:
        cli.main(["bench-io", str(folder), "--gib", "0.5"])
    assert caught.value.code == 1
    told = capsys.readouterr().err
    assert f"takes {2**29} bytes (0.5 GiB)" in told
    assert "a smaller --gib" in told
    assert "swap_dir" not in told
    assert "devices" not in told


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "zerojax", "--help"], capture_output=True, text=True, check=True)
    assert "memory" in done.stdout
