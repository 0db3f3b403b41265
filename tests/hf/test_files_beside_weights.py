"""A folder's other files are checked before an export begins.

The checks cover links, unreadable files, and JSON.
"""

import json
import os
import pathlib

import numpy as np
import pytest
from hf_models import SIZES
from safetensors.numpy import save_file

import zerojax as zj
from zerojax.hf import end_tokens
from zerojax.hf.beside import copy_beside, files_beside


def folder_of(path: pathlib.Path) -> pathlib.Path:
    """Return a folder with a model's files, which none of these tests reads to the end."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (path / "tokenizer.json").write_text("{}")
    (path / "more").mkdir()
    (path / "more" / "a.jinja").write_text("a")
    save_file({"model.norm.weight": np.ones(48, np.float32)}, path / "model.safetensors")
    return path


def names(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_links_are_followed_within_the_folder_and_to_the_cache_s_blobs(tmp_path):
    model = tmp_path / "models--org--name"
    snapshot = folder_of(model / "snapshots" / "0123abcd")
    (model / "blobs").mkdir()
    for name, depth in (("tokenizer.json", 1), ("more/a.jinja", 2)):
        blob = model / "blobs" / name.replace("/", "-")
        (snapshot / name).rename(blob)
        (snapshot / name).symlink_to(pathlib.Path("../" * depth) / ".." / "blobs" / blob.name)
    (snapshot / "again.json").symlink_to("tokenizer.json")
    # Weights and hidden files are not copied, so they may be anything.
    (snapshot / "pytorch_model.bin").symlink_to("nowhere")
    (snapshot / ".git").symlink_to("/")
    (tmp_path / "by-name").symlink_to(snapshot)
    for like in (snapshot, tmp_path / "by-name"):
        out = tmp_path / f"out-{like.name}"
        out.mkdir()
        copy_beside(files_beside(like), out)
        assert names(out) == ["again.json", "config.json", "more/a.jinja", "tokenizer.json"]
        assert (out / "more" / "a.jinja").read_text() == "a"
        assert not any(path.is_symlink() for path in out.rglob("*"))


WRONG = {
    "dangling": (
        lambda at, outside: at.symlink_to("nowhere"),
        "is a link to nowhere, which does not exist",
    ),
    "outside": (
        lambda at, outside: at.symlink_to(outside / "secret"),
        r"is a link to .*secret, outside of the folder",
    ),
    "other-blobs": (
        lambda at, outside: at.symlink_to("../../blobs/x"),
        r"is a link to .*blobs/x, outside of the folder",
    ),
    "folder-outside": (lambda at, outside: at.symlink_to(outside), "outside of the folder"),
    "loop": (lambda at, outside: at.symlink_to(at.name), "is a link that leads to itself"),
    "fifo": (lambda at, outside: os.mkfifo(at), "is a FIFO, not a regular file"),
    "device": (lambda at, outside: at.symlink_to("/dev/zero"), "outside of the folder"),
}


@pytest.mark.parametrize("where", [".", "more"])
@pytest.mark.parametrize("fault", WRONG)
def test_what_cannot_be_copied_is_named_before_anything_else_is_done(tmp_path, fault, where):
    make, message = WRONG[fault]
    like = folder_of(tmp_path / "like" / "snapshots" / "model")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("key")
    (tmp_path / "like" / "blobs").mkdir()
    # "like" is not a folder of the hub's cache, whose names begin with "models--".
    (tmp_path / "like" / "blobs" / "x").write_text("blob")
    (like / "blobs").mkdir()
    make(like / where / "bad", outside)
    if fault == "other-blobs" and where == "more":
        message = r"is a link to .*blobs/x, which does not exist"
    # The checkpoint is not even looked for.
    with pytest.raises(ValueError, match=message):
        zj.export_hf(tmp_path / "absent", tmp_path / "out", like=like)
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("target", ["..", ".", "../inner"])
def test_links_to_folders_are_refused(tmp_path, target):
    like = folder_of(tmp_path / "like")
    (like / "inner").mkdir()
    (like / "more" / "link").symlink_to(target)
    with pytest.raises(ValueError, match=r"more/link is a link to .*like.*, which is a folder"):
        zj.export_hf(tmp_path / "absent", tmp_path / "out", like=like)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read all files")
def test_files_that_cannot_be_read_are_named(tmp_path):
    like = folder_of(tmp_path / "like")
    (like / "tokenizer.json").chmod(0)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        files_beside(like)


BROKEN = {
    "text": ("not json", "is not JSON"),
    "list": ("[]", "holds a list, but a JSON object is needed"),
    "deep": ("[" * 100_000, "is not JSON: it is nested too deeply"),
    "string": (
        '{"eos_token_id": "</s>"}',
        r"eos_token_id is '</s>': a token id, a list of token ids, or null is needed",
    ),
    "float": ('{"eos_token_id": [1, 2.5]}', r"eos_token_id is \[1, 2\.5\]"),
    "flag": ('{"eos_token_id": true}', "eos_token_id is True"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_generation_config_is_named_first(tmp_path, fault):
    text, message = BROKEN[fault]
    like = folder_of(tmp_path / "like")
    (like / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}"):
        zj.export_hf(tmp_path / "absent", tmp_path / "out", like=like)


def test_the_tokens_that_end_an_answer_are_read(tmp_path):
    like = folder_of(tmp_path / "like")
    assert end_tokens(like) == ()
    for text, expected in (("7", (7,)), ("[7, 9]", (7, 9)), ("null", ()), ("-1", ()), ("[]", ())):
        (like / "generation_config.json").write_text(f'{{"eos_token_id": {text}}}')
        assert end_tokens(like) == expected
    (like / "generation_config.json").unlink()
    os.mkfifo(like / "generation_config.json")
    with pytest.raises(ValueError, match="FIFO"):
        end_tokens(like)


def test_config_has_the_new_dtype_under_both_of_its_names(tmp_path):
    like = folder_of(tmp_path / "like")
    for keys in (["torch_dtype", "dtype"], ["torch_dtype"], ["dtype"], []):
        (like / "config.json").write_text(
            json.dumps({"model_type": "llama"} | dict.fromkeys(keys, "float32"))
        )
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        copy_beside(files_beside(like), out, dtype="bfloat16")
        assert json.loads((out / "config.json").read_text()) == {
            "model_type": "llama"
        } | dict.fromkeys(keys or ["dtype"], "bfloat16")
        same = tmp_path / f"same-{out.name}"
        same.mkdir()
        copy_beside(files_beside(like), same)
        assert (same / "config.json").read_bytes() == (like / "config.json").read_bytes()
