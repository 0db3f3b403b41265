"""Machine figures: by name, from a file, replaced, missing, and wrong."""

import copy
import dataclasses
import pickle
import re

import pytest

import zerojax as zj
from zerojax import hlo, planner


def test_machines_of_a_name_attain_less_than_the_vendor_prints():
    assert {"h200", "h100", "a100-40", "a100-80", "v100-32", "l4", "rtx4090", "dgx2"} <= set(
        planner.NAMED
    )
    for name, machine in planner.NAMED.items():
        assert machine.name == name
        assert set(machine.source) == set(machine.figures)
        assert machine.peak_flops.keys() == machine.flops.keys()
        assert all(machine.flops[dtype] < peak for dtype, peak in machine.peak_flops.items())
        assert "given" not in machine.source.values()
        unknown = {"host_bytes", "disk_bytes", "disk_read", "network_between_nodes"} & set(
            machine.figures
        )
        assert bool(unknown) == (name == "dgx2")


def test_machines_h200_has_the_rates_that_a_simulation_assumes():
    assert zj.machine("h200").rates() == hlo.RATES["h200"]
    slow = dataclasses.replace(zj.machine("h200"), link_up=11e9, disk_read=2e9).rates()
    assert (slow.link, slow.kernel_link, slow.disk_read) == (11e9, 9e9, 2e9)
    assert zj.machine("v100-32").rates().products == 70e12  # for float16: it has no other rate
    with pytest.raises(ValueError, match=r"has no figure for flops\.bf16"):
        zj.Machine(name="empty").rates()


def test_machines_dgx2_is_that_of_the_paper():
    dgx2 = zj.machine("dgx2", nodes=32)
    assert (dgx2.nodes, dgx2.devices_per_node, dgx2.devices) == (32, 16, 512)
    assert dgx2.needs("device_bytes", "host_bytes", "disk_bytes") == (32e9, 1.5e12, 28e12)
    assert dgx2.needs("link_up", "disk_read", "flops.fp16") == (3e9, 25.6e9, 70e12)
    assert "2104.07857" in dgx2.source["link_up"]


def test_machines_say_which_figure_nobody_gave():
    machine = zj.machine("l4")
    with pytest.raises(
        ValueError,
        match=r"machine l4 has no figure for host_bytes \(B a node\), disk_read .*host_bytes=\.\.\..*probe",
    ):
        machine.needs("device_bytes", "host_bytes", "disk_read")
    with pytest.raises(ValueError, match=r"flops=\{\*\*machine\.flops, 'fp16': \.\.\.\}"):
        zj.Machine(name="m").need("flops.fp16")
    with pytest.raises(
        ValueError, match="unknown machine figure 'link_upp': did you mean 'link_up'"
    ):
        machine.need("link_upp")
    assert dataclasses.replace(machine, host_bytes=2e12).need("host_bytes") == 2 * 10**12


def test_machines_forget_the_source_of_a_figure_that_is_replaced():
    machine = zj.machine("h200")
    other = dataclasses.replace(machine, link_up=48e9, host_bytes=2e12, memory_rate=None, nodes=3)
    assert other.source["link_up"] == other.source["host_bytes"] == "given"
    assert other.source["link_down"] == machine.source["link_down"]
    assert "memory_rate" not in other.source
    said = dataclasses.replace(
        machine, link_up=48e9, source={**machine.source, "link_up": "our own"}
    )
    assert dataclasses.replace(said, nodes=2).source["link_up"] == "our own"


def test_machines_are_hashed_copied_and_pickled():
    machine = zj.machine("dgx2")
    for other in (
        copy.deepcopy(machine),
        pickle.loads(pickle.dumps(machine)),
        dataclasses.replace(machine),
    ):
        assert other == machine
        assert hash(other) == hash(machine)
    assert machine != zj.machine("dgx2", nodes=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, r"nodes = 0: must be an integer from 1"),
        ({"devices_per_node": 1.5}, r"devices_per_node = 1\.5"),
        ({"link_up": 0}, r"machine m: link_up = 0: must be bytes per second"),
        ({"link_up": True}, r"link_up = True"),
        ({"disk_read": float("nan")}, r"disk_read = nan"),
        ({"device_bytes": 0.5}, r"device_bytes = 0\.5: must be whole bytes from 1"),
        ({"flops": {"bf17": 1e12}}, r"flops\.bf17 .* flops\.bf16"),
        ({"flops": {"bf16": -1.0}}, r"flops\.bf16 = -1\.0: must be FLOP per second"),
        ({"flops": 1e12}, r"flops is not a mapping"),
        (
            {"source": {"link": "x"}},
            r"'link', which is not a machine figure.*did you mean 'link_up'",
        ),
        ({"name": ""}, r"a name is needed"),
    ],
)
def test_machines_refuse_what_is_no_figure(fields, message):
    with pytest.raises(ValueError, match=message):
        zj.Machine(**{"name": "m", **fields})


def test_machines_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match=r"machine 'h20' is unknown: did you mean 'h200'"):
        zj.machine("h20")
    assert zj.machine("H200") == planner.NAMED["h200"]
    assert planner.machine_of("NVIDIA A100-SXM4-40GB") == "a100-40"
    assert planner.machine_of("cpu") is None


def test_machines_are_read_as_they_were_saved(tmp_path):
    path = tmp_path / "m.toml"
    for machine in planner.NAMED.values():
        odd = dataclasses.replace(
            machine,
            nodes=3,
            disk_read=1 / 3 * 1e10,
            source={**machine.source, "disk_read": 'a "b" \\ é\n'},
        )
        odd.save(path)
        assert zj.machine(path) == odd
    assert zj.machine(str(path), nodes=7, devices_per_node=2).devices == 14


def test_machines_files_start_from_a_named_one(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(
        'base = "h200"\nhost_bytes = 2e12\nlink_up = 4e10\nsource.link_up = "ours"\n[flops]\nbf16 = 6e14\n'
    )
    lab, h200 = zj.machine(path), zj.machine("h200")
    assert (lab.name, lab.devices_per_node, lab.host_bytes, lab.link_up) == (
        "lab",
        8,
        2 * 10**12,
        4e10,
    )
    assert lab.flops == {**h200.flops, "bf16": 6e14}
    assert (lab.source["link_up"], lab.source["flops.bf16"]) == ("ours", "given in lab.toml")
    assert lab.source["flops.fp16"] == h200.source["flops.fp16"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nodes = 2\ndisk_raed = 3e9\n",
            r"bad\.toml, line 2: 'disk_raed' is not a machine figure: did you mean 'disk_read'",
        ),
        (
            '\n\nlink_up = "fast"\n',
            r"bad\.toml, line 3: link_up = 'fast': must be bytes per second",
        ),
        ("[flops]\nfp8 = 1e12\n", r"bad\.toml, line 2: flops\.fp8 = .* not a precision"),
        ("flops = 1e12\n", r"line 1: flops = .* per precision; choose from flops\.fp32"),
        ('base = "h300"\n', r"bad\.toml, line 1: base 'h300' is unknown: did you mean 'h200'"),
        ("nodes = \n", r"bad\.toml is not valid TOML: .*line 1"),
        ('source.link_ups = "x"\n', r"line 1: source of 'link_ups'.*'link_up'"),
        (
            'base = "l4"\nsource.disk_read = "x"\n',
            r"line 2: source of disk_read, a figure that the file does not set",
        ),
        ("link_up = 2024-01-01\n", r"line 1: link_up = "),
    ],
)
def test_machines_files_say_which_line_is_wrong(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        zj.machine(path)


def test_machines_print_figures_units_and_sources():
    text = str(zj.machine("dgx2", nodes=2))
    assert text.startswith("dgx2: 2 nodes of 16 devices\n")
    assert re.search(
        r"^  link_up +3e\+09 B/s a device +ZeRO-Infinity .*, figure 2b", text, re.MULTILINE
    )
    assert text.endswith("not given: pinned_bytes, disk_tbw_bytes, host_kernel")
