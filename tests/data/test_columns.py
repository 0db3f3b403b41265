"""ShareGPT's and Alpaca's columns give the tokens of the same conversations as messages."""

import numpy as np
import pytest
from chat_tokenizers import byte_tokenizer, write

from zerojax.data import tokenize

SYSTEM, QUESTION, ANSWER = (
    {"role": role, "content": text}
    for role, text in (("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"))
)
TURNS = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
CALL = '{"name": "add", "arguments": {"a": 1}}'
TEMPLATE = """{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" + (m.content or "") }}
{%- for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}
{{- "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


def tokens(path, *records, template=TEMPLATE, **options):
    examples = tokenize(write(path / "a.jsonl", list(records)), byte_tokenizer(template), **options)
    return examples.tokens, examples.counted


def assert_same(path, record, messages):
    found, expected = tokens(path, record), tokens(path, {"messages": messages})
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": TURNS, "id": "7"}, [QUESTION, ANSWER]),
        ({"conversations": TURNS, "system": "Be brief.", "tools": ""}, [SYSTEM, QUESTION, ANSWER]),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, *TURNS]},
            [SYSTEM, QUESTION, ANSWER],
        ),
        ({"conversations": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
        (
            {"conversations": [*TURNS[:1], {"from": "gpt", "value": "3", "weight": 0}, *TURNS]},
            [QUESTION, {**ANSWER, "content": "3", "weight": 0}, QUESTION, ANSWER],
        ),
        (
            {
                "conversations": [
                    TURNS[0],
                    {"from": "function_call", "value": CALL},
                    {"from": "observation", "value": "2"},
                    TURNS[1],
                ]
            },
            [
                QUESTION,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
                },
                {"role": "tool", "content": "2"},
                ANSWER,
            ],
        ),
        ({"instruction": "1 + 1?", "input": "", "output": "2"}, [QUESTION, ANSWER]),
        (
            {"instruction": "1 + 1?", "output": "2", "system": "Be brief.", "input": None},
            [SYSTEM, QUESTION, ANSWER],
        ),
        (
            {"instruction": "Add.", "input": "1 + 1", "output": "2", "history": [["1 + 1?", "2"]]},
            [QUESTION, ANSWER, {"role": "user", "content": "Add.\n\n1 + 1"}, ANSWER],
        ),
    ],
)
def test_columns_are_the_messages_that_they_stand_for(tmp_path, record, messages):
    assert_same(tmp_path, record, messages)


def test_alpaca_without_a_chat_template_is_put_below_headings(tmp_path):
    record = {"instruction": "Add.", "input": "1 + 1", "output": "2", "system": "Be brief."}
    prompt = "Be brief.\n\n### Instruction:\nAdd.\n\n### Input:\n1 + 1\n\n### Response:\n"
    found = tokens(tmp_path, record, template=None)
    expected = tokens(tmp_path, {"prompt": prompt, "completion": "2"}, template=None)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=r":1: the record has a history .* needs a chat template"):
        tokens(tmp_path, {**record, "history": [["a", "b"]]}, template=None)


ALPACA = {"instruction": "1 + 1?", "output": "2"}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({**ALPACA, "text": "1 + 1 = 2"}, "fit text and alpaca: choose one by form="),
        (
            {"conversations": TURNS, "messages": []},
            "fit messages and sharegpt: choose one by form=",
        ),
        ({"conversations": "hi"}, "conversations must be a list of objects with 'from'"),
        ({"conversations": [{"from": "human"}]}, "turn 0 of conversations has the keys"),
        ({"conversations": [{"from": "me", "value": ""}]}, "turn 0 of conversations is from 'me'"),
        ({"conversations": [{"from": "function_call", "value": "f("}]}, "which is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "[]"}]}, "an object with 'name'"),
        ({"conversations": TURNS[:1]}, "no message has the role 'assistant'"),
        ({"instruction": "1 + 1?"}, "'instruction' and 'output' is needed"),
        ({**ALPACA, "input": 3}, "'input' must be text, got int"),
        ({**ALPACA, "history": [["a"]]}, "history must be a list of pairs of texts"),
    ],
)
def test_what_does_not_have_the_columns_is_refused(tmp_path, record, words):
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{words}"):
        tokens(tmp_path, record)


def test_a_form_decides_between_columns(tmp_path):
    record = {**ALPACA, "text": "1 + 1 = 2"}
    found = tokens(tmp_path, record, form="alpaca")
    np.testing.assert_array_equal(found, tokens(tmp_path, ALPACA))
