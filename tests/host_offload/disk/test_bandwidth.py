"""zerojax bench-io and benchmarks/bandwidth.py measure, report correctly, and clean up."""

import argparse
import os
import pathlib

import bandwidth as benchmark
import numpy as np
import pytest

from host_offload.disk.bandwidth import DIRECT, PLAIN, TENSORSTORE, UNCHECKED, Bench, Rates
from host_offload.disk.direct_io import DirectIo
from host_offload.disk.errors import SwapError
from host_offload.disk.folder import SwapFolder
from host_offload.disk.tuning import IoSettings
from host_offload.schedule.build import build_schedule
from zerojax import cli
from zerojax.formulas import state_bytes
from zerojax.machines import disk as bench_io

SETTINGS = IoSettings(2, 8192)
MIB = 1 << 20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["after_backward", "in_backward"])
def test_disk_traffic_is_that_of_the_schedule(precision, update):
    b = state_bytes(precision)
    each = {"params": b.params, "grads": b.grads, "opt_state": b.master + b.moments}
    schedule = build_schedule(
        num_layers=5,
        distance=2,
        tiers=dict.fromkeys(each, "nvme"),
        update=update,
        master=b.master > 0,
    )
    read = sum(each[kind] for phase in schedule.phases for kind in (*phase.fetches, *phase.reads))
    written = sum(each[kind] for phase in schedule.phases for kind in phase.writes)
    assert bench_io.disk_traffic(b, update) == (read, written)
    held = {kind for phase in schedule.phases for kind in phase.writes} | {"params"}
    assert bench_io.disk_bytes(b, update) == sum(each[kind] for kind in held)


def test_a_round_measures_every_reader_and_the_records_are_right(tmp_path):
    with (
        SwapFolder(str(tmp_path)) as swap,
        Bench(swap.path, SETTINGS, num_records=5, record_bytes=50_000) as bench,
    ):
        rates = bench.round()
        assert list(rates) == [PLAIN, DIRECT, UNCHECKED, TENSORSTORE]
        assert all(0 < rate < 1e12 for r in rates.values() for rate in (r.read, r.write))
        assert bench.store.written.all()
        contents = [pathlib.Path(bench.store.record_path(k)).read_bytes() for k in range(5)]
        assert len(set(contents)) == 4, "there must be as many different contents as buffers"
        assert contents[0] == contents[4]
    assert os.listdir(tmp_path) == []


def test_both_ways_at_once_read_one_half_and_write_the_other(tmp_path, monkeypatch):
    moved = {"read": [], "write": []}

    def noted(way, own):
        def start(io, store, layer, buffer, **options):
            moved[way].append((layer, buffer.ctypes.data))
            return own(io, store, layer, buffer, **options)

        return start

    for way in moved:
        monkeypatch.setattr(DirectIo, way, noted(way, getattr(DirectIo, way)))
    with (
        SwapFolder(str(tmp_path)) as swap,
        Bench(swap.path, SETTINGS, num_records=6, record_bytes=50_000) as bench,
    ):
        alone = bench.records()
        assert min(alone.read, alone.write) > 0
        assert (
            [layer for layer, _ in moved["read"]]
            == [layer for layer, _ in moved["write"]]
            == list(range(6))
        )
        for layers in moved.values():
            layers.clear()
        assert bench.both() > 0
    assert len(moved["read"]) + len(moved["write"]) == 6  # as many records as there are
    assert {layer for layer, _ in moved["read"]} <= {0, 1, 2}
    assert {layer for layer, _ in moved["write"]} <= {3, 4, 5}
    assert not {buffer for _, buffer in moved["read"]} & {buffer for _, buffer in moved["write"]}


def test_the_model_table_is_its_formula():
    rates = Rates(read=4e9, write=2e9)
    lines = bench_io.model_table(rates, free_bytes=160_000_000_000)
    row = next(
        line.split() for line in lines if line.startswith("bf16") and "after_backward" in line
    )
    assert row[2:5] == ["16", "18", "16"]
    assert [float(x) for x in row[5:]] == [
        10.0,
        12.5,
        125.0,
    ]  # 18/4 + 16/2 = 12.5 s for 1e9 parameters


def test_bench_io_prints_and_leaves_only_the_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_io, "tune", lambda path: SETTINGS)
    cli.main(["bench-io", str(tmp_path), "--gib", "0.001", "--rounds", "1"])
    out = capsys.readouterr().out
    for part in (str(tmp_path), PLAIN, DIRECT, TENSORSTORE, "bf16", "fp32", "GB free"):
        assert part in out
    assert os.listdir(tmp_path) == []


def test_bench_io_tells_what_is_wrong(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench-io", str(tmp_path / "gone")])
    assert caught.value.code == 2
    assert "does not exist" in capsys.readouterr().err
    with SwapFolder(str(tmp_path)), pytest.raises(SystemExit):
        cli.main(["bench-io", str(tmp_path)])
    assert f"in use by this process (pid {os.getpid()})" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench-io", str(tmp_path), "--gib", "0"])


def test_a_disk_that_is_too_small_for_the_bench_is_an_error(small_disk):
    with SwapFolder(str(small_disk)) as swap, pytest.raises(SwapError, match="too few"):
        Bench(swap.path, SETTINGS, num_records=4, record_bytes=MIB)


def test_the_benchmark_saves_a_table_and_leaves_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "tune", lambda path: SETTINGS)
    monkeypatch.setattr(benchmark.shutil, "which", lambda program: None)
    swap, target = tmp_path / "swap", tmp_path / "table.md"
    swap.mkdir()
    words = [
        "--folder",
        str(swap),
        "--gib",
        "0.0005",
        "--records",
        "4",
        "--rounds",
        "2",
        "--save",
        str(target),
    ]
    monkeypatch.setattr("sys.argv", ["bandwidth.py", *words])
    benchmark.main()
    names = [
        line.split("|")[1].strip()
        for line in target.read_text().splitlines()
        if line.startswith("| ")
    ]
    assert names == ["reader", PLAIN, DIRECT, UNCHECKED, TENSORSTORE]
    assert "fio is not installed" in target.read_text()
    assert os.listdir(swap) == []
    assert "round 2" in capsys.readouterr().out


def test_the_benchmarks_ratios_are_within_rounds_and_over_the_best():
    def rates(**read):
        return {name: Rates(read=value, write=10.0) for name, value in read.items()}

    rounds = [
        rates(**{PLAIN: 10.0, benchmark.FIO: 5.0, DIRECT: 9.5}),
        rates(**{PLAIN: 2.0, benchmark.FIO: 4.0, DIRECT: 3.4}),
    ]
    text = "\n".join(benchmark.table(rounds))
    assert f"| {DIRECT} | 0.00 | 0.90 (0.85-0.95) | 0.00 | 1.00 (1.00-1.00) |" in text
    assert "| fio | 0.00 | 0.75 (0.50-1.00) |" in text
    rounds[1][DIRECT] = Rates(read=3.2, write=10.0)
    assert "read 0.88 (MISSED), write 1.00 (reached)" in "\n".join(benchmark.table(rounds))


def test_fio_runs_the_same_transfers(tmp_path, monkeypatch):
    program = tmp_path / "fio"
    program.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/words
echo '{{"jobs": [{{"read": {{"bw_bytes": 3}}, "write": {{"bw_bytes": 7}}}}]}}'
""")
    program.chmod(0o755)
    monkeypatch.setattr(benchmark.shutil, "which", lambda name: str(program))
    assert benchmark.fio_rates(str(tmp_path), 1 << 20, SETTINGS) == {
        benchmark.FIO: Rates(read=3, write=7)
    }
    write, read = (tmp_path / "words").read_text().splitlines()
    for words, way in ((write, "write"), (read, "read")):
        assert {
            f"--rw={way}",
            "--bs=8192",
            "--numjobs=2",
            f"--size={1 << 19}",
            "--direct=1",
        } <= set(words.split())


def test_heading_names_the_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bandwidth.py", "--rounds", "3"])
    options = argparse.Namespace(records=4, rounds=3)
    text = "\n".join(benchmark.heading(options, SETTINGS, np.int64(MIB)))
    assert "python benchmarks/bandwidth.py --rounds 3" in text
    assert "4 records of 1.0 MiB" in text
