import subprocess
import sys

import pytest

from zerojax import cli


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


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "zerojax", "--help"], capture_output=True, text=True, check=True)
    assert "memory" in done.stdout
