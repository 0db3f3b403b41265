"""Conversations in the form of OpenAI's API.

Arguments are JSON texts, contents come in parts, and answers have a weight.
"""

import json
import logging

import pytest
from chat_tokenizers import MARKED, PLAIN, byte_tokenizer, write
from family_templates import GEMMA, LLAMA3, PHI, QWEN3, R1

from zerojax import data

PRINTED = PLAIN.replace(
    "m.content", '(m.content or m.tool_calls[0].function.arguments ~ "")'
)  # as Python would print it
QUESTION = {"role": "user", "content": "How is it?"}
SPACES = '{"city":"Rome",  "days": 2}'


def told(path, tokenizer, messages, **options):
    """Return (full text, counted text) of a conversation."""
    record = messages if isinstance(messages, dict) else {"messages": messages}
    found = data.tokenize(write(path / "a.jsonl", [record]), tokenizer, **options)
    return tokenizer.decode(found.tokens), tokenizer.decode(found.tokens[found.counted])


def call(arguments, **more):
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    ]
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": calls, **more}]


@pytest.mark.parametrize("family", [LLAMA3, QWEN3], ids=["llama3", "qwen3"])
def test_arguments_as_texts_are_written_as_objects_are(tmp_path, family):
    as_text = told(tmp_path, family.tokenizer(), call(SPACES))
    assert as_text == told(tmp_path, family.tokenizer(), call(json.loads(SPACES)))
    assert '{"city": "Rome", "days": 2}' in as_text[1]
    assert '"arguments": {}' in told(tmp_path, QWEN3.tokenizer(), call(""))[1]


@pytest.mark.parametrize("template", [None, PRINTED], ids=["added", "printed"])
def test_templates_that_write_texts_are_given_texts(tmp_path, template):
    """One template adds arguments to a text; the other prints them as Python prints a dict."""
    tokenizer = (
        R1.tokenizer(template=R1.template.replace("<think>\\n", ""))
        if template is None
        else byte_tokenizer(template)
    )
    assert SPACES in told(tmp_path, tokenizer, call(SPACES))[1]
    assert '{"city": "Röm"}' in told(tmp_path, tokenizer, call({"city": "Röm"}))[1]


def test_parts_are_one_text(tmp_path):
    parts = [{"type": "text", "text": "How is"}, {"type": "text", "text": "it?"}]
    asked, answer = (
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "Fine."}]},
    )
    for family in (PHI, LLAMA3):
        whole, counted = told(tmp_path, family.tokenizer(), [asked, answer])
        assert "How is\nit?" in whole
        assert counted.startswith("Fine.<|e")
    printing = byte_tokenizer(PLAIN.replace("m.content", '(m.content ~ "")'))
    assert "user\nHow is\nit?<|im_end|>" in told(tmp_path, printing, [asked, answer])[0]
    assert (
        "How isit?" in told(tmp_path, GEMMA.tokenizer(), [asked, answer])[0]
    )  # as the template itself writes parts


ANSWERS = [
    QUESTION,
    {"role": "assistant", "content": "one", "weight": 0},
    QUESTION,
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_an_answer_of_weight_0_does_not_count(tmp_path, template):
    tokenizer = byte_tokenizer(template)
    whole, counted = told(tmp_path, tokenizer, ANSWERS)
    assert "one" in whole
    assert counted.rstrip() == "two<|im_end|>"
    for options in ({"each_answer": True}, {}):
        swapped = [QUESTION, {**ANSWERS[1], "weight": 1}, QUESTION, {**ANSWERS[3], "weight": 0.0}]
        assert told(tmp_path, tokenizer, swapped, **options)[1].rstrip() == "one<|im_end|>"
    completion = {"prompt": ANSWERS[:2], "completion": ANSWERS[2:]}
    assert told(tmp_path, tokenizer, completion)[1].rstrip() == "two<|im_end|>"


PART = {"type": "image_url", "image_url": {"url": "a"}}
WRONG = {
    "weight": ([QUESTION, {**ANSWERS[1], "weight": 0.5}], "message 1: weight=0.5: only 0 .* and 1 .* are allowed"),
    "weight-true": ([QUESTION, {**ANSWERS[1], "weight": True}], "message 1: weight=True: only 0 "),
    "weight-text": ([QUESTION, {**ANSWERS[1], "weight": "0"}], "message 1: weight='0': only 0 "),
    "weight-user": ([{**QUESTION, "weight": 1}, ANSWERS[3]], "message 0: weight=1 for the role 'user'"),
    "weights": (ANSWERS[:2], "no token counts in the loss: every answer has the weight 0"),
    "arguments": (call('{"city": '), "message 1, tool call 0: arguments are '{\"city\": ', which is not JSON text"),
    "arguments-list": (call("[1]"), "message 1, tool call 0: arguments must be the JSON text of an object, got '\\[1\\]'"),
    "arguments-number": (call(3), "message 1, tool call 0: arguments must be an object, or its JSON text, got 3"),
    "arguments-nan": (call('{"a": NaN}'), "message 1, tool call 0: arguments: a is nan"),
    "calls": ([QUESTION, {"role": "assistant", "tool_calls": "a"}], "message 1: tool_calls must be a list of objects"),
    "function": ([QUESTION, {"role": "assistant", "tool_calls": [{"function": 3}]}], "message 1, tool call 0: function must"),
    "image": ([{"role": "user", "content": [PART]}, ANSWERS[3]], "message 0: part 0 of its content is .*only parts of"),
    "no-parts": ([{"role": "user", "content": []}, ANSWERS[3]], "message 0: content is an empty list"),
    "number": ([{"role": "user", "content": 3}, ANSWERS[3]], "message 0: content must be a text, or a list of text parts, got int"),
    "object": ([{"role": "user", "content": {"a": 1}}, ANSWERS[3]], "message 0: content is an object, which the chat template"),
    "old-call": ([QUESTION, {"role": "assistant", "function_call": {"name": "f"}}], "message 1 has 'function_call', which the"),
    "refusal": ([QUESTION, {"role": "assistant", "refusal": "No."}], "message 1 has 'refusal', which the chat template"),
    "half": ([{"role": "user", "content": "\ud800"}, ANSWERS[3]], r"message 0: content holds '\\ud800' at character 0"),
    "infinite": ([{"role": "user", "content": "a", "n": float("inf")}, ANSWERS[3]], "message 0: n is inf, which is not a JSON number"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_the_form_does_not_have_is_refused_by_name(tmp_path, name):
    messages, words = WRONG[name]
    with pytest.raises(ValueError, match=f"a.jsonl:1: {words}"):
        told(tmp_path, QWEN3.tokenizer(), messages)


def test_tools_are_a_list_or_its_json_text(tmp_path):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    record = {"messages": call("{}"), "tools": tools}
    as_text = {**record, "tools": json.dumps(tools)}
    assert told(tmp_path, QWEN3.tokenizer(), record) == told(tmp_path, QWEN3.tokenizer(), as_text)
    for wrong in (3, "{", [1], {"a": 1}):
        with pytest.raises(ValueError, match=r"a\.jsonl:1: tools "):
            told(tmp_path, QWEN3.tokenizer(), {**record, "tools": wrong})


def test_calls_that_a_template_does_not_read_are_refused_and_the_rest_is_warned_of(
    tmp_path, caplog
):
    with pytest.raises(
        ValueError, match="message 1 has 'tool_calls', which the chat template does not read"
    ):
        told(tmp_path, byte_tokenizer(), call("{}", content="Let me see."))
    thinking = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {**ANSWERS[3], "reasoning_content": "Hm."},
    ]
    no_system = MARKED.replace("for m in messages", 'for m in messages if m.role != "system"')
    with caplog.at_level(logging.WARNING):
        told(tmp_path, byte_tokenizer(no_system), {"messages": thinking, "tools": [{"name": "f"}]})
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert "a.jsonl:1: the chat template does not write message 0, of the role 'system'" in messages
    assert "writes no thoughts" in messages
    assert "writes no tools" in messages


@pytest.mark.parametrize("arguments", ["", "  ", "null", None, "{}", {}, ...], ids=repr)
@pytest.mark.parametrize("family", [QWEN3, R1], ids=["objects", "texts"])
def test_no_arguments_are_an_empty_object(tmp_path, family, arguments):
    """OpenAI's API has a text there.

    Models write none, or null, for a function without parameters.
    """
    turns = call(arguments)
    if arguments is ...:
        del turns[1]["tool_calls"][0]["function"]["arguments"]
    template = family.template.replace("<think>\\n", "") if family is R1 else None
    counted = told(tmp_path, family.tokenizer(template), turns)[1]
    assert "weather\n{}" in counted or '"arguments": {}}' in counted


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a", "text": "b"}', "'text' appears twice"),
        (
            '{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}',
            "'role' appears twice",
        ),
        (
            {"messages": call('{"city": "Rome", "city": "Oslo"}')},
            "message 1, tool call 0: arguments .*'city' appears twice",
        ),
        (
            {"messages": call("{}"), "tools": '[{"name": "a", "name": "b"}]'},
            "tools .*'name' appears twice",
        ),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{words}"):
        data.tokenize(tmp_path / "a.jsonl", QWEN3.tokenizer())


@pytest.mark.parametrize(
    "content",
    [{}, {"content": None}, {"content": None, "tool_calls": []}],
    ids=["missing", "null", "none"],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_message_without_content_is_refused(tmp_path, role, content):
    turns = [QUESTION, {"role": role, **content}, ANSWERS[3]]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: message 1 has no content: .*text is needed"):
        told(tmp_path, QWEN3.tokenizer(), turns)


def test_an_answer_that_calls_may_leave_content_out(tmp_path):
    turns = call("{}")
    without = [turns[0], {key: value for key, value in turns[1].items() if key != "content"}]
    assert told(tmp_path, QWEN3.tokenizer(), without) == told(tmp_path, QWEN3.tokenizer(), turns)
    asking = [{**QUESTION, "content": None, "tool_calls": turns[1]["tool_calls"]}, ANSWERS[3]]
    with pytest.raises(ValueError, match="message 0 has no content"):
        told(tmp_path, QWEN3.tokenizer(), asking)
