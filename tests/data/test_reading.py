"""Files and tokenizers without examples, or that would never end, are refused within seconds.

The error names them.
"""

import functools
import json
import logging
import os
import time

import pytest
from chat_tokenizers import MARKED, PLAIN, byte_tokenizer, conversation, write
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from zerojax import data
from zerojax.data import chat, examples, reading
from zerojax.data.cpu_limit import CpuLimit, OverrunError

ONE = conversation("hi", "yes")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"messages": ' + b"[" * 200_000, "nested too deeply"),
        (
            json.dumps({**ONE, "tools": [json.loads('{"a":' * 150 + "1" + "}" * 150)]}).encode(),
            "more than 100 levels deep",
        ),
        (
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "a", "x": json.loads("[" * 500 + "]" * 500)}
                    ]
                }
            ).encode(),
            "deep",
        ),
        (
            b'{"text": "a\xffb"}',
            "not a line of JSON in UTF-8: 'utf-8' codec can't decode byte 0xff",
        ),
        (b'{"text": "a\xed\xa0\x80b"}', "in UTF-8"),  # half of a surrogate pair
        ('{"text": "ä"}'.encode("utf-16"), "in UTF-8"),
        (
            b'{"text": "a\\ud800b"}',
            r"'text' holds '\\ud800' at character 1, half of a surrogate pair",
        ),
        (b'{"prompt": "\\udc00", "completion": "a"}', r"'prompt' holds '\\udc00' at character 0"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not a line of JSON: .*digits"),
        (
            b'\xef\xbb\xbf{"text": "a"}',
            "not a line of JSON",
        ),  # a byte order mark can only be at the beginning
        (b"\x00" * 100, "not a line of JSON"),
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{words}") as error:
        data.tokenize(tmp_path / "a.jsonl", byte_tokenizer())
    str(error.value).encode()  # the error can be printed
    assert len(str(error.value)) < 600


def test_a_byte_order_mark_and_line_ends_of_windows_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    found = data.tokenize(tmp_path / "a.jsonl", byte_tokenizer())
    assert found.numbers.tolist() == [1, 3]
    assert reading.source(tmp_path / "a.jsonl").count() == 3


def test_what_is_no_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(ValueError, match=f"{path} is a pipe or a device"):
            data.tokenize(path, byte_tokenizer())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="no such file or folder"):
        data.tokenize(tmp_path / "loop", byte_tokenizer())
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", [ONE])
    assert len(data.tokenize("~/a.jsonl", byte_tokenizer())) == 1


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 2**20)
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "a"}\n')
        file.truncate(2**33)
    monkeypatch.setattr(
        reading.Source, "count", lambda self: 1
    )  # which reads all of it, block by block
    with pytest.raises(ValueError, match=r"a\.jsonl:2: a line of more than 1,048,576 bytes"):
        data.tokenize(tmp_path / "a.jsonl", byte_tokenizer())


SILENT = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOUD = SILENT.replace("{% endfor %}{% endfor %}", "{{ i }}{% endfor %}{% endfor %}")


@pytest.mark.parametrize(
    "template", [SILENT + PLAIN, SILENT + MARKED, LOUD + PLAIN], ids=["plain", "marked", "loud"]
)
def test_a_template_that_does_not_end_is_ended(tmp_path, monkeypatch, template):
    monkeypatch.setattr(examples, "RENDER_SECONDS", 0.1)
    path, start = write(tmp_path / "a.jsonl", [ONE]), time.monotonic()
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:1: the chat template does not end: it computed for more than 0\.1 s",
    ):
        data.tokenize(path, byte_tokenizer(template))
    parts = {
        "messages": [
            {**message, "content": [{"type": "text", "text": "a"}]} for message in ONE["messages"]
        ]
    }
    with pytest.raises(ValueError, match="does not end"):
        data.tokenize(write(path, [parts]), byte_tokenizer(template))
    assert time.monotonic() - start < 5


def test_a_template_that_writes_too_much_is_refused(tmp_path):
    """The time is spent in one call into C, which nothing interrupts."""
    assert chat.LEAST_BOUND < 2**24
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: the chat template writes 16,777,\d+ characters"
    ):
        data.tokenize(
            write(tmp_path / "a.jsonl", [ONE]), byte_tokenizer('{{ "x" * 16777216 }}' + PLAIN)
        )


def test_a_limit_of_time_leaves_what_is_in_time_alone():
    def spin(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return seconds

    with CpuLimit(0.05) as limit:
        assert sum(limit.run(lambda: 1) for _ in range(1000)) == 1000
        assert limit.run(lambda: time.sleep(0.1)) is None  # which takes no processor time
        for _ in range(3):
            with pytest.raises(OverrunError, match=r"more than 0\.05 s"):
                limit.run(lambda: spin(5))
            assert limit.run(lambda: spin(0.01)) == 0.01
        with pytest.raises(ZeroDivisionError):
            limit.run(lambda: 1 // 0)


@pytest.mark.exhaustive
def test_calls_that_end_just_in_time_end_once():
    """The watching thread raises its exception about when the call returns."""

    def spin(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    seen = []
    with CpuLimit(0.01) as limit:
        for i in range(400):
            try:
                limit.run(functools.partial(spin, 0.0095 + 0.00002 * (i % 100)))
                seen.append(True)
            except OverrunError:
                seen.append(False)
            sum(range(1000))  # a late exception would be raised here
    assert 0 < sum(seen) < len(seen)


def test_a_syntax_error_names_the_line_of_the_template(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat template, line 2: "):
        data.tokenize(write(tmp_path / "a.jsonl", [ONE]), byte_tokenizer("{{ 1 }}\n{% for %}"))
    with pytest.raises(ValueError, match="the tokenizer's chat template is not a string"):
        data.tokenize(tmp_path / "a.jsonl", byte_tokenizer({"default": 3}))


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path):
    empty = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={}, merges=[])), eos_token="</s>"
    )
    with pytest.raises(ValueError, match="the tokenizer's vocabulary is empty"):
        data.tokenize(write(tmp_path / "a.jsonl", [{"text": "a"}]), empty)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "3",
        "{",
        "\x00",
        "[" * 200_000,
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {}}',
    ],
)
def test_damaged_tokenizer_files_are_refused_by_name(tmp_path, name, text):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    if name == "tokenizer_config.json" and json_object(text):  # any of whose keys may be missing
        assert len(data.load_tokenizer(tmp_path)) == 259
        return
    with pytest.raises(ValueError, match=f"{tmp_path}"):
        data.load_tokenizer(tmp_path)


def json_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize("number", [-1, 2**31, 2**40, 1.5, None, "7"])
@pytest.mark.parametrize("place", ["vocab", "added"])
def test_ids_that_are_none_are_refused(tmp_path, number, place):
    """tokenizers iterates over all ids up to the largest one."""
    byte_tokenizer().save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    if place == "vocab":
        tree["model"]["vocab"]["a"] = number
    else:
        tree["added_tokens"][0]["id"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.json: the id of the token '.*' is .*: a number from 0 to 16777215",
    ):
        data.load_tokenizer(tmp_path)


def test_code_of_a_folder_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks the user"))
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ValueError, match="it needs code of its own, which is not run"):
        data.load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_warnings_are_logged_once_with_their_number(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        data.tokenize(
            write(tmp_path / "a.jsonl", [ONE] * 5), byte_tokenizer(PLAIN.replace("<|im_end|>", ""))
        )
    (warning,) = caplog.records
    assert "a.jsonl:1 (and in 4 more): the chat template ends an answer" in warning.getMessage()
