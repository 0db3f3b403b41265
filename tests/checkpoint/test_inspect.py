"""What `zerojax inspect` reports for good, damaged, unfinished and missing checkpoints."""

import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest
from matrix_of_checkpoints import Place, build

import zerojax as zj
from zerojax import cli
from zerojax.checkpoint.manifest import SavedState


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspected")
    with (
        build(Place(3, "device"), folder / "swap") as program,
        zj.Checkpointer(folder / "c") as ckpt,
    ):
        ckpt.save(program, program.init(jax.random.key(0)))
    shutil.copytree(folder / "c" / "0", folder / "c" / "20")
    return folder / "c"


@pytest.fixture
def checkpoints(original, tmp_path):
    shutil.copytree(original, tmp_path / "c")
    return tmp_path / "c"


def inspected(capsys, *arguments: str | pathlib.Path) -> tuple[int, str]:
    """Return the exit status and the output."""
    capsys.readouterr()
    try:
        cli.main(["inspect", *map(str, arguments)])
    except SystemExit as ended:
        shown = capsys.readouterr()
        return int(ended.code or 0), shown.out + shown.err
    return 0, capsys.readouterr().out


def record(folder: pathlib.Path) -> pathlib.Path:
    """Return the file of a record of weights."""
    with SavedState(str(folder / "state")) as saved:
        return next(
            pathlib.Path(path)
            for store, _, path in saved.records.files()
            if any(leaf.name == "weights['blocks']['w1']" for leaf in store.leaves)
        )


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)


def row(text: str, first: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


def test_directory_that_is_whole(original, capsys):
    status, text = inspected(capsys, original, "--verify")
    assert status == 0
    with SavedState(str(original / "0" / "state")) as saved:
        assert row(text, "0") == ["0", "whole", f"{saved.num_bytes:,}", "1"]
    assert row(text, "20")[1] == "whole"
    assert "2 of 2 checkpoints whole (all checksums" in text


def test_step_shows_leaves_values_config_and_totals(original, capsys):
    status, text = inspected(capsys, original / "20")
    assert status == 0
    line = next(line for line in text.splitlines() if line.startswith("weights['blocks']['w1']"))
    assert re.split(" {2,}", line) == [
        "weights['blocks']['w1']",
        "[3, 16, 40]",
        "float32",
        "(None, 'fsdp', None)",
        "7,680",
    ]
    assert row(text, "step") == ["step", "[]", "int32", "=", "0", "4"]
    assert row(text, "mesh")[1:] == ["data=1", "fsdp=8", "tensor=1"]
    assert {"stage=3", "precision=fp16"} <= set(text.split())
    with SavedState(str(original / "20" / "state")) as saved:
        weights = sum(c.num_bytes for name, c in saved.leaves.items() if name.startswith("weights"))
        rest = sum(
            c.num_bytes for name, c in saved.leaves.items() if not name.startswith("weights")
        )
        rest += sum(value.nbytes for value in saved.values.values())
    assert row(text, "total") == ["total", "weights", f"{weights:,}"]
    assert text.splitlines()[-1].split() == ["total", f"{weights + rest:,}"]


def test_byte_that_flipped_is_found_by_verify(checkpoints, capsys):
    flip(path := record(checkpoints / "20"))
    assert inspected(capsys, checkpoints)[0] == 0
    status, text = inspected(capsys, checkpoints, "--verify")
    assert status == 1
    assert row(text, "0")[1] == "whole"
    assert row(text, "20")[1] == "damaged"
    assert f"{path}: its checksum is" in text
    status, text = inspected(capsys, checkpoints / "20", "--verify")
    assert status == 1
    assert f"{path}: its checksum is" in text


def test_file_that_was_removed_is_named(checkpoints, capsys):
    (path := record(checkpoints / "20")).unlink()
    status, text = inspected(capsys, checkpoints)
    assert status == 1
    assert f"removed: {path}" in text
    status, text = inspected(capsys, checkpoints / "20")
    assert status == 1
    assert f"removed: {path}" in text
    assert row(text, "weights['blocks']['w1']")


@pytest.mark.parametrize("lost", ["state/manifest.0.json", "config/metadata", "state"])
def test_description_that_was_removed(checkpoints, capsys, lost):
    path = checkpoints / "20" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in (checkpoints, checkpoints / "20"):
        status, text = inspected(capsys, folder)
        assert status == 1
        assert str(path).removesuffix("/metadata").removesuffix("/manifest.0.json") in text


def test_save_that_did_not_end_is_incomplete(checkpoints, capsys):
    (checkpoints / "30.orbax-checkpoint-tmp-17").mkdir()
    status, text = inspected(capsys, checkpoints)
    assert status == 1
    assert row(text, "30")[1] == "incomplete"
    assert "2 of 3" in text
    assert inspected(capsys, checkpoints / "30.orbax-checkpoint-tmp-17")[0] == 1


def test_what_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "other" / "7" / "default").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path / "other", tmp_path):
        status, text = inspected(capsys, path)
        assert status == 2
        assert text.count("\n") == 1
        assert str(path) in text


def test_no_device_is_used(original):
    program = (
        "import sys; from zerojax import cli; from jax._src import xla_bridge; cli.main(sys.argv[1:]); "
        "sys.exit(bool(xla_bridge._backends))"
    )
    subprocess.run(
        [sys.executable, "-c", program, "inspect", str(original / "20"), "--verify"],
        check=True,
        capture_output=True,
    )
