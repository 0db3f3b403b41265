"""What `zj.probe` measures: every figure is timed as documented, and nothing is left behind."""

import os
import sys

import pytest

import zerojax as zj
from host_offload.disk.tuning import DEFAULT
from zerojax import cli, commands, planner
from zerojax.planner import ProbeSizes

# The package's function of the same name hides the module as an attribute.
module = sys.modules["zerojax.machines.probe"]
TINY = ProbeSizes(
    product=16, num_products=2, memory_bytes=1 << 12, num_passes=2, link_bytes=1 << 12, gathered_bytes=1 << 12,
    host_elements=1000, record_bytes=1 << 16, num_records=2, seconds=0.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _settings_are_known(monkeypatch):
    monkeypatch.setattr(module, "tune", lambda path: DEFAULT)


def test_probe_gives_every_figure_that_can_be_measured(tmp_path):
    found = zj.probe(str(tmp_path), sizes=TINY)
    unknown = {
        "disk_tbw_bytes",
        "network_between_nodes",
        *(f"peak_flops.{p}" for p in ("fp32", "bf16", "fp16")),
    }
    assert found.figures.keys() == set(planner.FIGURES) - unknown
    assert (found.nodes, found.devices_per_node, found.name) == (1, 8, "cpu")
    assert found.need("host_bytes") // 8 == found.device_bytes
    assert "copies of memory" in found.source["link_up"]
    assert "4 concurrent transfers of 8 MiB" in found.source["disk_both"]
    assert not os.listdir(tmp_path)


def test_probe_divides_work_by_seconds(monkeypatch):
    """With a clock in which every call takes 2 s, each rate is half of a call's work.

    A call's work is what it moves or computes on one device.
    """
    counted = []

    def two_seconds(call, *_, **__):
        call()
        counted.append(call)
        return 2.0

    monkeypatch.setattr(module, "_best", two_seconds)
    found = zj.probe(sizes=TINY)
    assert found.flops == dict.fromkeys(("fp32", "bf16", "fp16"), 2 * 16**3 * 2 / 2)
    assert found.memory_rate == 2 * 4096 * 2 / 2
    assert (found.link_up, found.link_down, found.link_both) == (2048, 2048, 4096)
    assert found.network_in_node == 4096 * 7 / 8 / 2
    assert found.host_kernel == 28 * 1000 / 2
    assert found.disk_read is None
    assert len(counted) == 9


def test_probe_refuses_a_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module, "measure_link", lambda *_: pytest.fail("the link was measured first")
    )
    with pytest.raises(ValueError, match="does not exist"):
        zj.probe(str(tmp_path / "gone"))


def test_probe_command_writes_what_machine_reads(tmp_path, monkeypatch, capsys):
    measured = zj.machine("dgx2", nodes=3)
    monkeypatch.setattr(commands, "probe", lambda swap_dir: measured)
    path = tmp_path / "m.toml"
    cli.main(["probe", "--out", str(path)])
    assert zj.machine(path) == measured
    assert capsys.readouterr().out == f"{measured}\n"
    monkeypatch.setattr(commands, "probe", lambda swap_dir: pytest.fail("the probe ran"))
    for out, message in (("m.txt", "end with .toml"), ("gone/m.toml", "cannot be written")):
        with pytest.raises(SystemExit) as caught:
            cli.main(["probe", "--out", str(tmp_path / out)])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_machines_command_lists_figures_and_sources(tmp_path, capsys):
    cli.main(["machines"])
    told = capsys.readouterr().out
    assert all(str(machine) in told for machine in planner.NAMED.values())
    cli.main(["machines", "l4"])
    assert capsys.readouterr().out == f"{zj.machine('l4')}\n"
    with pytest.raises(SystemExit):
        cli.main(["machines", "h20"])
    assert "did you mean 'h200'" in capsys.readouterr().err
