import os
import subprocess
import sys

import disks
import jax
import pytest

import zerojax as zj
from host_offload.disk.tuning import DEFAULT
from zerojax import cli, commands
from zerojax.machines import disk as bench_io


def test_memory_prints_the_papers_figures(capsys):
    cli.main(["memory", "--params", "7.5e9", "--shards", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert "16 bytes each" in lines[0]
    totals = [float(line.split()[5]) * 2**30 / 1e9 for line in lines[2:]]
    assert [round(t, 1) for t in totals] == [120.0, 31.4, 16.6, 1.9]
    assert lines[-1].endswith("2.95 P")


@pytest.mark.parametrize(
    "arguments", [["memory", "--params", "0", "--shards", "4"], ["memory"], []]
)
def test_bad_arguments_exit_with_a_message(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("--help lists the options)")


def test_bench_io_on_too_small_a_disk_says_which_flag_to_lower(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_io, "tune", lambda path: DEFAULT)
    with (
        disks.mounted(tmp_path / "small", "size=1m") as folder,
        pytest.raises(SystemExit) as caught,
    ):
        cli.main(["bench-io", str(folder), "--gib", "0.5"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert f"takes {2**29} bytes (0.5 GiB)" in told
    assert "a smaller --gib" in told
    assert "swap_dir" not in told
    assert "devices" not in told


def test_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "--help"], capture_output=True, text=True, check=True
    )
    assert "memory" in done.stdout


SHAPE = ["--layers", "48", "--hidden", "6144", "--heads", "64", "--seq", "2048", "--shards", "2"]


def test_memory_prints_a_transformers_activations(capsys):
    """The closed forms: with the stream split, 20 s b h / t bytes per layer.

    Korthikanti et al. have 34 s b h / t.
    """
    cli.main(
        [
            "memory",
            *SHAPE,
            "--vocab",
            "51200",
            "--tensor",
            "8",
            "--sequence-parallel",
            "--activations",
            "selective",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == f"{48 * 12 * 6144**2 + 51200 * 6144:,}"  # 22 B parameters
    mode, *cells = lines[-1].split()
    sbh = 2048 * 6144 / 2**30
    assert mode == "selective"
    assert [float(cell) for cell in cells] == [
        round(n, 3) for each in (20, 34) for n in (each * sbh / 8, 48 * each * sbh / 8)
    ]
    cli.main(["memory", *SHAPE])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]] == [
        "save",
        "selective",
        "remat",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--layers", "2", "--shards", "2"],
            "--layers: activations need a transformer, whose --hidden, --heads",
        ),
        (
            ["--params", "5", "--shards", "2", "--sequence-parallel"],
            "--sequence-parallel: activations need",
        ),
        (["--shards", "2"], "--params, or --layers, --hidden, --heads and --seq"),
        ([*SHAPE, "--tensor", "5"], "--heads 64 do not divide by --tensor 5"),
        ([*SHAPE, "--hidden", "6145"], "--hidden 6145 does not divide by --heads 64"),
        ([*SHAPE, "--sequence-parallel"], "give 2 or more"),
        ([*SHAPE, "--partition-activations"], "--partition-activations splits the sequence"),
        (
            [*SHAPE, "--seq", "2047", "--tensor", "8", "--sequence-parallel"],
            "pad the sequences to 2048",
        ),
        ([*SHAPE, "--batch", "0"], "must be at least 1"),
    ],
)
def test_memory_refuses_what_does_not_fit_together(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["memory", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


SCHEDULED = """HloModule jit_step, is_scheduled=true

ENTRY %main (h: f32[1000,1000]) -> f32[1000,1000] {
  %h = f32[1000,1000]{1,0:S(5)} parameter(0)
  %up = (f32[1000,1000]{1,0}, f32[1000,1000]{1,0:S(5)}, u32[]) copy-start(%h)
  ROOT %x = f32[1000,1000]{1,0} copy-done(%up)
}
"""


def test_simulate_prints_predictions_at_the_rates_given(tmp_path, capsys):
    path = tmp_path / "program.txt"
    path.write_text(SCHEDULED)
    cli.main(
        [
            "simulate",
            str(path),
            "--link",
            "4e6",
            "--launch-seconds",
            "0",
            "--issue-seconds",
            "0",
            "--streams",
            "turns",
        ]
    )
    told = capsys.readouterr().out
    # 4e6 bytes at 4e6 bytes per second.
    assert "predicted step 1000.0 ms: compute 0.0 ms, idle 100.0 %" in told
    assert "nothing here was measured" in told
    assert "before 0.12" in told
    assert "link 4e+06" in told


def test_errors_of_an_export_name_options(tmp_path, capsys, monkeypatch):
    said = "merge them by merge_lora=True, or write only the adapters by zerojax.export_peft; give it as `like`"
    monkeypatch.setattr(
        commands, "export_hf", lambda *args, **options: (_ for _ in ()).throw(ValueError(said))
    )
    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", str(tmp_path), "out", "--format", "hf", "--like", "folder"])
    assert (
        "by --merge-lora, or write only the adapters by --format peft; give it as --like\n"
        in capsys.readouterr().err
    )


def test_simulate_says_what_it_cannot_read(tmp_path, capsys):
    path = tmp_path / "program.txt"
    path.write_text(SCHEDULED)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x7fELF\xd0\xff")
    for arguments, message in (
        ([str(binary)], f"{binary} is not text"),
        ([str(tmp_path)], "holds no program that XLA dumped for a GPU"),
        ([str(tmp_path / "none")], "No such file"),
        ([str(path), "--link", "0"], "link = 0.0: it must be a rate, above 0 a second"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["simulate", *arguments])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


PLAN = [
    "plan",
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


@pytest.mark.parametrize(("arguments", "words"), [
    (["memory", "--params", "nan"], "argument --params: 'nan': a whole number from 1"),
    (["memory", "--params", "inf"], "argument --params: 'inf': a whole number from 1"),
    (["memory", "--params", "1e400"], "argument --params: '1e400': a whole number from 1"),
    (["memory", "--params", "1", "--shards", "9" * 100], "--shards: '999"),
    ([*PLAN, "--params", "inf"], "argument --params: 'inf'"),
    ([*PLAN, "--layers", "1e6"], "zerojax plan: layers = 1,000,000: must be at most 1,000"),
    ([*PLAN, "--fix", "stage=---1"], "zerojax plan: stage='---1' is unknown: choose from 0, 1, 2, 3"),
    ([*PLAN, "--fix", "stage=" + "(" * 3000], "zerojax plan: --fix stage: the value has 3,000 characters"),
    ([*PLAN, "--min-disk-days", "nan"], "argument --min-disk-days: 'nan': a number above 0"),
    (["bench-io", ".", "--gib", "inf"], "argument --gib: 'inf': a number above 0"),
    (["export", ".", "x", "--format", "hf", "--like", ".", "--shard-bytes", "nan"], "argument --shard-bytes: 'nan'"),
])  # fmt: skip
def test_numbers_that_are_none_are_refused_by_option(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(("name", "data", "words"), [
    ("deep.toml", b"a = " + b"[" * 5000, "deep.toml is nested too deeply"),
    ("empty.toml", b"# nothing\n", "empty.toml is empty: add a line for each figure"),
    ("latin.toml", b'name = "\xe9"', "latin.toml is not valid TOML"),
    ("long.toml", b"#" * (1 << 21), "long.toml has 2,097,152 bytes"),
    ("huge.toml", b"link_up = 1" + b"0" * 400, "line 1: link_up = an integer of 1,329 bits: must be bytes per second"),
    ("pipe.toml", None, "pipe.toml is not a regular file"),
])  # fmt: skip
def test_machine_files_of_any_kind_end_with_one_line(name, data, words, tmp_path, capsys):
    if data is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["machines", str(tmp_path / name)])
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    "arguments",
    [["probe", "--out=\ud800"], ["machines", "\ud800.toml"], [*PLAN, "--set=link_up=\udcff"]],
)
def test_errors_of_arguments_that_are_no_utf_8_can_be_printed(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    (line,) = capsys.readouterr().err.encode().splitlines()
    assert rb"\ud" in line


def test_traceback_of_an_error_is_shown_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("ZEROJAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="machine 'h20' is unknown"):
        cli.main(["machines", "h20"])


def test_fault_of_the_program_shows_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(commands, "machine", lambda name: {}[name])
    with pytest.raises(KeyError):
        cli.main(["machines", "h200"])


def test_env_reports_versions_memory_and_a_disk(tmp_path, capsys):
    cli.main(["env", "--swap-dir", str(tmp_path)])
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["jax"] == jax.__version__
    assert rows["swap_dir"] == str(tmp_path)
    assert rows["devices"].endswith("(cpu)")
    assert "mounted at" in rows["file system"]
    assert rows["direct I/O"].startswith(("yes", "no ("))
    assert not list(tmp_path.iterdir())


def test_env_of_a_folder_that_does_not_exist_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["env", "--swap-dir", "/nowhere"])
    assert ended.value.code == 2
    assert "swap_dir='/nowhere' is not a folder" in capsys.readouterr().err


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code
    assert zj.__version__ in "".join(capsys.readouterr())
