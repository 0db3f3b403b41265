"""Wrong arguments are refused by name before a record is read.

The error is never one of Python's own.
"""

import json
import os

import pytest
from chat_tokenizers import MARKED, PLAIN, byte_tokenizer, conversation, write

from zerojax import data

ONE = conversation("hi", "yes")


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("/tmp/no/such/folder", "folder='/tmp/no/such/folder': no such folder; .*nothing is downloaded"),
        ("meta-llama/Llama-3", "no such folder; .*nothing is downloaded.*hf download meta-llama/Llama-3 "),
        ("~/no-such-folder", "folder='~/no-such-folder': no such folder"),
        ("/dev/null", "folder='/dev/null' is not a folder"),
        (None, "folder=None: the path of a folder is needed"),
        (3, "folder=3: the path of a folder is needed"),
        (b"/tmp", "folder=b'/tmp': the path of a folder is needed"),
        ("", "folder='': the path of a folder is needed"),
    ],
)  # fmt: skip
def test_folders_that_hold_no_tokenizer_are_refused(folder, words):
    with pytest.raises(ValueError, match=words):
        data.load_tokenizer(folder)


def test_a_folder_without_tokenizer_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        data.load_tokenizer(tmp_path)


def test_the_home_of_the_user_is_found(tmp_path, monkeypatch):
    byte_tokenizer().save_pretrained(tmp_path / "tok")
    (tmp_path / "t.jinja").write_text(PLAIN)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.load_tokenizer("~/tok", chat_template="~/t.jinja").chat_template == PLAIN


@pytest.mark.parametrize("value", ["a", [1], {}, True])
def test_a_length_in_the_config_that_is_no_number_is_refused_when_loading(tmp_path, value):
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"model_max_length": value})
    )
    with pytest.raises(
        ValueError,
        match=r"tokenizer_config\.json: model_max_length is .*: a number or null is needed",
    ):
        data.load_tokenizer(tmp_path)


@pytest.mark.parametrize("place", ["vocab", "added"])
def test_two_tokens_with_one_id_are_refused(tmp_path, place):
    byte_tokenizer().save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    if place == "vocab":
        tree["model"]["vocab"]["a"] = tree["model"]["vocab"]["b"]
        words = "the tokens 'a' and 'b' have the same id"
    else:
        tree["added_tokens"][1]["id"] = tree["added_tokens"][0]["id"]
        words = "the tokens '.*' and '.*' have the same id"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=rf"tokenizer\.json: {words}"):
        data.load_tokenizer(tmp_path)


def test_a_template_is_a_regular_file(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tok")
    os.mkfifo(tmp_path / "pipe")
    cases = [
        ("/dev/zero", "a pipe or a device"), (tmp_path / "pipe", "a pipe or a device"), (tmp_path / "tok", "a folder"),
        (tmp_path / "none", "no such file"), (3, "the path of a file is needed"), (b"a", "the path of a file is needed"),
    ]  # fmt: skip
    for path, words in cases:
        with pytest.raises(ValueError, match=f"chat_template=.*{words}"):
            data.load_tokenizer(tmp_path / "tok", chat_template=path)


@pytest.mark.parametrize("path", [None, 3, b"a.jsonl", ["a.jsonl"], ""])
def test_a_path_is_a_text_or_a_path(path):
    with pytest.raises(
        ValueError, match=r"path=.*: the path of a JSONL file or of a folder is needed"
    ):
        data.tokenize(path, byte_tokenizer())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([1], r"template_options=\[1\]: an object of names and values is needed"),
        ([], r"template_options=\[\]: an object"),
        ("a", "template_options='a': an object"),
        ({3: 1}, "template_options: 3 is not a name that a template can read"),
        ({"messages": []}, "template_options: 'messages' is not a name"),
        ({"conversations": []}, "template_options: 'conversations' is not a name"),
        ({"self": 1}, "template_options: 'self' is not a name"),
        ({"a b": 1}, "template_options: 'a b' is not a name"),
    ],
)
def test_template_options_are_refused_before_a_file_is_read(tmp_path, options, words):
    path = write(tmp_path / "a.jsonl", [ONE])
    with pytest.raises(ValueError, match=f"^{words}"):
        data.tokenize(
            path,
            byte_tokenizer("{# self messages conversations #}" + PLAIN),
            template_options=options,
        )
    with pytest.raises(ValueError, match=f"^{words}"):
        data.prompt_tokens(byte_tokenizer(), ONE["messages"][:1], template_options=options)


def test_prompts_are_checked():
    for messages, words in (
        (None, "got None"),
        ([], r"got \[\]"),
        ([{"role": "user", "content": 3}], "message 0: content must"),
    ):
        with pytest.raises(ValueError, match=words):
            data.prompt_tokens(byte_tokenizer(), messages)


@pytest.mark.parametrize(
    "dead", ["{# {% generation %} {% endgeneration %} #}", "{% raw %}{% generation %}{% endraw %}"]
)
def test_marks_in_a_comment_are_none(tmp_path, dead):
    tokenizer = byte_tokenizer(dead + PLAIN)
    found = data.tokenize(write(tmp_path / "a.jsonl", [ONE]), tokenizer)
    assert tokenizer.decode(found.tokens[found.counted]) == "yes<|im_end|>\n"


@pytest.mark.parametrize("mark", ["{%- generation -%}", "{%+ generation %}", "{%\ngeneration\n%}"])
def test_marks_are_found_in_every_spelling(tmp_path, mark):
    tokenizer = byte_tokenizer(MARKED.replace("{% generation %}", mark))
    found = data.tokenize(write(tmp_path / "a.jsonl", [ONE]), tokenizer)
    assert tokenizer.decode(found.tokens[found.counted]) == "yes<|im_end|>"


def test_marks_that_are_never_reached_are_named(tmp_path):
    template = "{% if false %}{% generation %}{% endgeneration %}{% endif %}" + PLAIN
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: no token counts in the loss: the {% generation %} marks"
    ):
        data.tokenize(write(tmp_path / "a.jsonl", [ONE]), byte_tokenizer(template))
