"""Checkpoint descriptions with a correct checksum and wrong contents: each field is validated.

File names, and non-files that have a file's name, are validated too.
"""

import json
import os
import pathlib
import shutil
import socket
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
import older
import pytest
from mutations import DEEP, flipped, mutated, outcomes

from host_offload.disk import numpy_dtype
from zerojax.checkpoint import manifest as manifests
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.inspection import inspect
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.program_state import leaves_of_program
from zerojax.checkpoint.source import find_sources
from zerojax.weights.exporting import read_part

W = "weights['embed']['w']"


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> pathlib.Path:
    """Return a step of a state that was on disk: stacks, tiles, and a leaf with one record."""
    folder = tmp_path_factory.mktemp("described")
    with tarfile.open(older.DATA / "disk.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder / "disk" / "3"


@pytest.fixture
def text(step):
    """Return the description, which is restored after the test."""
    path = step / "state" / "manifest.0.json"
    yield (before := path.read_text())
    path.write_text(before)


def describe(step: pathlib.Path, said: Any, name: str = "manifest.0.json") -> None:
    """Write a description, with its checksum."""
    said.pop("checksum", None)
    (step / "state" / name).write_text(json.dumps({**said, "checksum": manifests._checksum(said)}))


def read_all(step: pathlib.Path) -> None:
    """Do everything with a checkpoint that needs no program."""
    inspect(step)
    with SavedState(str(step / "state")) as saved:
        saved.check(checksums=True)
        for name, leaf in saved.leaves.items():
            out = np.empty([min(n, 3) for n in leaf.shape], numpy_dtype(leaf.dtype))
            read_part(saved, name, tuple((0, min(n, 3)) for n in leaf.shape), out)


def put(*path: Any) -> Callable[[Any], None]:
    """Return a function that puts the last of `path` at the place given by the other entries."""
    *keys, last, value = path

    def change(said: Any) -> None:
        for key in keys:
            said = said[key]
        said[last] = value

    return change


def lose(*path: Any) -> Callable[[Any], None]:
    def change(said: Any) -> None:
        for key in path[:-1]:
            said = said[key]
        del said[path[-1]]

    return change


STORE, SHARD = ("stores", 0), ("stores", 0, "leaves", 0)
REFUSED = {
    "no leaves": (lose("leaves"), "leaves is missing"),
    "no values": (put("values", 3), "values is 3, and an object is needed"),
    "many processes": (put("num_processes", "2"), "num_processes is '2', and an integer, from 1"),
    "another process": (put("process", 1), "process is 1, and an integer, 0, is needed"),
    "shape": (
        put("leaves", W, "shape", [4, -8]),
        r"leaves\[.*\]\.shape\[1\] is -8, and an integer, from 0 to 2\^63 - 1,",
    ),
    "large shape": (
        put("leaves", W, "shape", [2**40, 2**40]),
        r"shape is \[1099511627776, .*less than 2\^63 bytes",
    ),
    "shape beyond its records": (
        put("leaves", W, "shape", [4, 9]),
        r"shape is \[4, 9\], and its records hold 32 elements",
    ),
    "dims": (put("leaves", W, "shape", [1] * 70), "a list of at most 32 integers is needed"),
    "dtype": (
        put("leaves", W, "dtype", "object"),
        r"dtype is 'object', and a dtype of numpy or ml_dtypes is needed",
    ),
    "lead": (put("leaves", W, "lead", 3), r"lead is 3, and an integer, from 0 to 2,"),
    "flag": (put("leaves", W, "is_tiled", 1), "is_tiled is 1, and true or false is needed"),
    "data": (
        put("values", "step", "data", "AwAA"),
        r"values.step.data is 'AwAA', and the base64 of 4 bytes, for int32\[\]",
    ),
    "base64": (
        put("values", "step", "data", "?"),
        "values.step.data is '\\?', and base64 is needed",
    ),
    "surrogate": (put("leaves", W, "spec", "\ud800"), r"spec is '\\ud800', and a text of UTF-8"),
    "key": (put("keys", {"other": "rbg"}), r"keys\['other'\] belongs to no leaf in values"),
    "position": (
        put("data", {"at": 3}),
        r'data is .*, and \{"json": ...\} or \{"bytes": ...\} is needed',
    ),
    "absolute folder": (
        put(*STORE, "folder", "/tmp"),
        r"stores\[0\].folder is '/tmp', and a path below the folder of the desc",
    ),
    "outer folder": (
        put(*STORE, "folder", "../../x"),
        "stores.0..folder is '../../x', and a path below",
    ),
    "first": (put(*STORE, "first", 4), r"stores\[0\].first is 4, and an integer, from 0 to 3,"),
    "first alone": (
        put(*STORE, "first", 1),
        r"stores\[0\].num_records is 4, and an integer, from 1 to 3,",
    ),
    "lead of a store": (
        put(*STORE, "lead", [4]),
        r"stores\[0\].lead is \[4\], and \[2, 2\] of weights",
    ),
    "huge lead": (
        put(*STORE, "lead", [2**62, 2**62]),
        r"stores\[0\].lead is .*less than 2\^63 bytes",
    ),
    "checksums": (
        put(*STORE, "checksums", ["0" * 16]),
        r"stores\[0\].checksums are 1, and num_records is 4",
    ),
    "digits": (
        put(*STORE, "checksums", ["x" * 16] * 4),
        r"stores\[0\].checksums\[0\] is 'x{16}', and 16 hexadecimal digits",
    ),
    "offset": (
        put(*SHARD, "offset", 4080),
        r"leaves\[0\].offset is 4080, and an integer, from 0 to 4032,",
    ),
    "large shard": (
        put(*SHARD, "shape", [4, 4000]),
        r"shape is \[4, 4000\], and a shard of float32 in a record of 4096 bytes",
    ),
    "start": (
        put(*SHARD, "start", [0, 5]),
        r"is the part \[4, 4\] of weights.* that starts at \[0, 5\], but its records are \[4, 8\]",
    ),
    "unknown leaf": (
        put(*SHARD, "name", "x"),
        r"leaves\[0\].name is 'x', and a name in leaves is needed",
    ),
}


def test_what_makes_no_sense_is_refused_by_field(step, text):
    """This is not damage, so a restore must not fall back to an older step."""
    for name, (change, told) in REFUSED.items():
        change(said := json.loads(text))
        describe(step, said)
        with pytest.raises(CheckpointError, match=told) as caught:
            read_all(step)
        assert not isinstance(caught.value, DamagedError), name


@pytest.mark.parametrize("number", [2, 3 * 10**8, 2**62])
def test_processes_whose_descriptions_are_not_there_are_counted_not_listed(step, text, number):
    put("num_processes", number)(said := json.loads(text))
    describe(step, said)
    with pytest.raises(
        DamagedError, match=f"was saved by {number} processes, and lost manifest.1.json"
    ):
        read_all(step)


def test_descriptions_of_two_checkpoints_are_told(step, text):
    put("num_processes", 2)(said := json.loads(text))
    describe(step, said)
    said["process"] = 1
    said["leaves"][W]["spec"] = "()"
    describe(step, said, "manifest.1.json")
    try:
        with pytest.raises(
            CheckpointError,
            match=r"manifest\.1\.json and manifest\.0\.json are not from the same checkpoint",
        ):
            read_all(step)
    finally:
        (step / "state" / "manifest.1.json").unlink()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("[" * 100_000, id="deep"),
        '{"a": 1' + "0" * 5000 + "}",
        "[]",
        "{}",
        b"\xff\xfe",
        "\0",
        "",
    ],
)
def test_what_is_no_description_is_damage(step, text, content):
    (step / "state" / "manifest.0.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(DamagedError, match=r"manifest\.0\.json cannot be read"):
        SavedState(str(step / "state"))
    config = step / "config" / "metadata"
    before = config.read_bytes()
    try:
        config.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert not inspect(step).is_whole
    finally:
        config.write_bytes(before)


@pytest.mark.parametrize("name", ["manifest.٣.json", "manifest.00.json", "manifest.²"])
def test_names_that_are_like_those_of_descriptions_are_not_read(step, name):
    (path := step / "state" / name).write_text("{")
    try:
        read_all(step)
    finally:
        path.unlink()


def test_configs_of_any_content_are_shown(step):
    config = step / "config" / "metadata"
    before = config.read_bytes()
    try:
        for content in ({"a": "\ud800"}, {"\ud800": DEEP}, {"": None}, {"a": {"b": [1]}}):
            config.write_text(json.dumps(content))
            inspect(step).text.encode()
    finally:
        config.write_bytes(before)


# --- what is not a file ---------------------------------------------------------------------------


def fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)


def bound_socket(path: pathlib.Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("make", [fifo, bound_socket, pathlib.Path.mkdir])
@pytest.mark.parametrize(
    "name", ["state/manifest.0.json", "config/metadata", "state/disk.opt_state/0/c.1.0"]
)
def test_what_is_no_file_is_damage_and_nothing_waits_for_it(step, make, name, tmp_path):
    shutil.copytree(step, copy := tmp_path / "3")
    (copy / name).unlink()
    make(copy / name)
    report = inspect(copy, verify=True)
    assert not report.is_whole
    assert str(copy / name) in report.text
    if name.startswith("state"):
        with pytest.raises(
            DamagedError,
            match=r"a (folder|FIFO|socket) is in its place, and no regular|has \d+ bytes, and the record 4096",
        ):
            read_all(copy)


# --- any content ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program():
    axes, fields = older.PLACES["disk"]
    with older.build(
        axes, {name: value for name, value in fields.items() if value != older.DISK}
    ) as made:
        yield made


def read_for(program: Any, step: pathlib.Path) -> None:
    read_all(step)
    with SavedState(str(step / "state")) as saved:
        find_sources(
            leaves_of_program(program), saved, program.config.loss_scaling, program.settler
        )


def check(program: Any, step: pathlib.Path, text: str, num: int) -> None:
    def change(seed: int) -> None:
        said = mutated(text, seed)
        if not isinstance(said, dict):
            said = {"format": 1}
        describe(step, said)
        read_for(program, step)

    def flip(seed: int) -> None:
        (step / "state" / "manifest.0.json").write_bytes(flipped(text.encode(), seed))
        read_for(program, step)

    found = outcomes({seed: lambda seed=seed: change(seed) for seed in range(num)})
    print(f"{num} changed descriptions: {dict(found)}")
    assert found["CheckpointError"] > num / 2
    found = outcomes({seed: lambda seed=seed: flip(seed) for seed in range(num // 4)})
    print(f"{num // 4} flipped bits: {dict(found)}")
    assert found == {"DamagedError": num // 4}


@pytest.mark.parametrize("num", [60, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_changed_descriptions_end_in_an_error_that_tells_them(program, step, text, num):
    check(program, step, text, num)
