"""A folder of `datasets` gives the same tokens as the same records in JSON lines."""

import logging

import datasets
import numpy as np
import pytest
from chat_tokenizers import byte_tokenizer, write
from family_templates import QWEN3

from zerojax import data


def calling(arguments, **more):
    """Return a record whose answer calls a tool."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "tool_calls": [call]}]
    return {"messages": turns, **more}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"city": {"type": "string"}}},
    }
]
OTHER_TOOLS = [
    {"type": "function", "function": {"name": "time", "parameters": {"zone": {"type": "string"}}}}
]
CALLS = [
    calling({"city": "Rome"}, tools=TOOLS),
    calling({"day": 3}, tools=OTHER_TOOLS),
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    calling({}),
]


def assert_same(first, second):
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.counted, second.counted)
    np.testing.assert_array_equal(first.starts, second.starts)


@pytest.mark.parametrize(
    "options", [{}, {"on_mixed_types": "use_json"}], ids=["fixed-keys", "json"]
)
def test_a_folder_has_the_tokens_of_the_same_lines(tmp_path, options):
    tokenizer = QWEN3.tokenizer()
    lines = data.tokenize(write(tmp_path / "a.jsonl", CALLS), tokenizer)
    datasets.Dataset.from_list(CALLS, **options).save_to_disk(tmp_path / "folder")
    assert '{"city": "Rome"}' in tokenizer.decode(lines.tokens)
    assert_same(data.tokenize(tmp_path / "folder", tokenizer), lines)


def test_a_null_that_a_line_has_stays_in_a_column_of_json(tmp_path):
    records = [calling({"city": None, "days": [1, None]}), calling({"day": {"of": None}})]
    tokenizer = QWEN3.tokenizer()
    lines = data.tokenize(write(tmp_path / "a.jsonl", records), tokenizer)
    assert '{"city": null, "days": [1, null]}' in tokenizer.decode(lines.tokens)
    datasets.Dataset.from_list(records, on_mixed_types="use_json").save_to_disk(tmp_path / "folder")
    assert_same(data.tokenize(tmp_path / "folder", tokenizer), lines)


def test_fixed_keys_in_the_place_of_free_ones_are_warned_of(tmp_path, caplog):
    datasets.Dataset.from_list(CALLS).save_to_disk(tmp_path / "fixed")
    datasets.Dataset.from_list(CALLS, on_mixed_types="use_json").save_to_disk(tmp_path / "json")
    with caplog.at_level(logging.WARNING):
        data.tokenize(tmp_path / "json", QWEN3.tokenizer())
        assert not caplog.records
        data.tokenize(tmp_path / "fixed", QWEN3.tokenizer())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "messages.tool_calls.function.arguments, tools.function.parameters" in warning


def test_a_format_that_was_saved_does_not_matter(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]
    records = [{"messages": turns}]
    datasets.Dataset.from_list(records).with_format("numpy").save_to_disk(tmp_path / "folder")
    lines = data.tokenize(write(tmp_path / "a.jsonl", records), byte_tokenizer())
    assert_same(data.tokenize(tmp_path / "folder", byte_tokenizer()), lines)


def test_values_that_json_has_not_are_refused(tmp_path):
    import datetime

    turns = [
        {"role": "user", "content": "a", "at": datetime.datetime(2026, 1, 1)},
        {"role": "assistant", "content": "b"},
    ]
    datasets.Dataset.from_list([{"messages": turns}]).save_to_disk(tmp_path / "folder")
    with pytest.raises(ValueError, match="folder: example 0: message 0: at is a datetime"):
        data.tokenize(tmp_path / "folder", byte_tokenizer())


@pytest.mark.parametrize("kind", ["empty", "damaged", "no-arrow"])
def test_a_folder_without_a_data_set_is_refused(tmp_path, kind):
    if kind != "empty":
        datasets.Dataset.from_list(CALLS).save_to_disk(tmp_path)
        (file,) = tmp_path.glob("state.json" if kind == "damaged" else "*.arrow")
        file.write_bytes(b'{"_data_files": 3}')
    with pytest.raises(ValueError, match="not a folder that `datasets` saved by save_to_disk: "):
        data.tokenize(tmp_path, byte_tokenizer())
