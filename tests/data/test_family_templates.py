"""Templates of real families: which answers count, what ends them, and useful advice on refusal."""

import logging

import pytest
from chat_tokenizers import MARKED, PLAIN, byte_tokenizer, conversation, write
from family_templates import FAMILIES, GEMMA, GLM, LLAMA3, MISTRAL, QWEN3, QWQ, R1

from zerojax import data

TWO = conversation("hi", "yes", "why?", "no!")
SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, *TWO["messages"][:2]]}
THOUGHT = conversation("hi", "<think>\nHm.\n</think>\n\nyes")


def tokenized(path, tokenizer, record, **options):
    return data.tokenize(write(path / "a.jsonl", [record]), tokenizer, **options)


def texts(path, tokenizer, record, **options):
    """Return the counted text of each example."""
    found = tokenized(path, tokenizer, record, **options)
    spans = [slice(*found.starts[i : i + 2]) for i in range(len(found))]
    return [tokenizer.decode(found.tokens[span][found.counted[span]]) for span in spans]


ENDS = {
    "llama3": "yes<|eot_id|>", "qwen3": "<think>\n\n</think>\n\nyes<|im_end|>\n", "qwq": "Hm.\n</think>\n\nyes<|im_end|>\n",
    "mistral": " yes</s>", "gemma": "yes<end_of_turn>\n", "phi": "yes<|end|>\n", "glm": "yes",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_counts_with_what_ends_its_turn(tmp_path, name):
    record = THOUGHT if name == "qwq" else conversation("hi", "yes")
    (counted,) = texts(tmp_path, FAMILIES[name].tokenizer(), record)
    assert counted == ENDS[name]


@pytest.mark.parametrize("name", [name for name in ENDS if name != "qwq"])
def test_a_rendered_text_has_the_tokens_of_its_conversation(tmp_path, name):
    """The text begins and ends as the tokenizer would make it: nothing is added twice."""
    tokenizer = FAMILIES[name].tokenizer()
    messages = conversation("hi", "yes")["messages"]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    expected = tokenized(tmp_path, tokenizer, {"messages": messages})
    ended = expected.tokens.tolist() + [tokenizer.eos_token_id] * (
        name == "glm"
    )  # whose turns have no end token of their own
    assert tokenized(tmp_path, tokenizer, {"text": whole}).tokens.tolist() == ended
    split = tokenized(tmp_path, tokenizer, {"prompt": prompt, "completion": whole[len(prompt) :]})
    assert split.tokens.tolist() == ended
    assert split.counted[: len(expected.counted)].tolist() == expected.counted.tolist()


def test_a_text_of_its_own_begins_and_ends_as_the_tokenizer_says(tmp_path):
    tokenizer = LLAMA3.tokenizer()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain = tokenized(tmp_path, tokenizer, {"text": "ab"}).tokens.tolist()
    assert (plain[0], len(plain), plain[-1]) == (bos, 4, eos)
    ending = tokenizer.backend_tokenizer.post_processor.__class__(
        single="<|begin_of_text|> $A <|eot_id|>",
        special_tokens=[("<|begin_of_text|>", bos), ("<|eot_id|>", eos)],
    )
    tokenizer.backend_tokenizer.post_processor = ending
    for text in ("ab", "ab<|eot_id|>", "<|begin_of_text|>ab<|eot_id|>"):
        found = tokenized(tmp_path, tokenizer, {"text": text})
        assert (found.tokens.tolist(), bool(found.counted[-1])) == (plain, True)
    assert (
        tokenized(tmp_path, tokenizer, {"text": "ab<|eot_id|>\n"}).tokens.tolist().count(eos) == 1
    )
    gemma = GEMMA.tokenizer()  # not every special token ends an answer
    assert (
        tokenized(tmp_path, gemma, {"text": "ab<start_of_turn>"}).tokens[-1] == gemma.eos_token_id
    )


def test_what_ends_a_turn_counts_where_the_next_one_begins_with_it(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert texts(tmp_path, GLM.tokenizer(), TWO) == ["yes<|user|>no!"]
    assert "a.jsonl:1: the chat template ends an answer with no special token" in caplog.text
    open_end = '("" if loop.last and not add_generation_prompt else "\\n<|im_end|>\\n")'
    late = PLAIN.replace('"<|im_end|>\\n"', open_end)
    assert texts(tmp_path, byte_tokenizer(late), TWO) == ["yes\n<|im_end|>no!"]
    weighed = {
        "messages": [TWO["messages"][0], {**TWO["messages"][1], "weight": 0}, *TWO["messages"][2:]]
    }
    assert texts(tmp_path, GLM.tokenizer(), weighed) == ["no!"]


def test_templates_that_end_turns_are_not_warned_of_and_marks_without_ends_are(tmp_path, caplog):
    outside = MARKED.replace(
        'm.content + "<|im_end|>" }}{% endgeneration %}',
        'm.content }}{% endgeneration %}{{ "<|im_end|>" }}',
    )
    with caplog.at_level(logging.WARNING):
        for family in (LLAMA3, QWEN3, MISTRAL, GEMMA):
            texts(tmp_path, family.tokenizer(), conversation("hi", "yes"))
        texts(tmp_path, byte_tokenizer(MARKED), TWO)
        assert not caplog.records
        assert texts(tmp_path, byte_tokenizer(outside), TWO) == ["yesno!"]  # the marks alone say so
    (warning,) = caplog.records
    assert (
        "a.jsonl:1: the {% generation %} marks of the chat template leave out the special token"
        in warning.getMessage()
    )


@pytest.mark.parametrize(
    ("family", "record"),
    [(R1, THOUGHT), (R1, TWO), (QWQ, TWO), (MISTRAL, SYSTEM)],
    ids=["r1", "r1-two", "qwq", "mistral"],
)
@pytest.mark.parametrize("each_answer", [False, True])
def test_advice_is_for_another_template_where_each_answer_would_not_help(
    tmp_path, family, record, each_answer
):
    with pytest.raises(ValueError, match=r"set tokenizer\.chat_template to one that") as error:
        texts(tmp_path, family.tokenizer(), record, each_answer=each_answer)
    assert "each_answer" not in str(error.value)


@pytest.mark.parametrize("each_answer", [False, True])
def test_a_template_as_the_advice_says_is_taken(tmp_path, each_answer):
    """The template has marks around answers, or answers that begin like the prompt."""
    marked = R1.template.replace(
        '{%- if m.content %}{{- m.content.split("</think>")[-1] }}{% endif %}{{- eos_token }}',
        "{% generation %}{{- m.content }}{{- eos_token }}{% endgeneration %}",
    )
    whole = R1.template.replace('m.content.split("</think>")[-1]', "m.content")
    options = {"each_answer": each_answer}
    assert texts(tmp_path, R1.tokenizer(marked), THOUGHT, **options) == [
        "<think>\nHm.\n</think>\n\nyes<|eos|>"
    ]
    assert texts(tmp_path, R1.tokenizer(whole), THOUGHT, **options) == [
        "Hm.\n</think>\n\nyes<|eos|>"
    ]


def test_advice_is_for_each_answer_where_that_works(tmp_path):
    record = conversation("hi", "<think>\nHm.\n</think>yes", "why?", "<think>\nSo.\n</think>no!")
    with pytest.raises(
        ValueError, match=r"use each_answer=True, which makes one example per answer$"
    ):
        texts(tmp_path, QWQ.tokenizer(), record)
    found = texts(tmp_path, QWQ.tokenizer(), record, each_answer=True)
    assert found == ["Hm.\n</think>yes<|im_end|>\n", "So.\n</think>no!<|im_end|>\n"]


def test_marks_without_prefixes_are_taken_as_wholes(tmp_path):
    """A template that writes the system message only before the last question.

    The turns cannot be told apart.
    """
    template = MISTRAL.template.replace(
        '{{- " " + m.content | trim + eos_token }}',
        '{% generation %}{{- " " + m.content | trim + eos_token }}{% endgeneration %}',
    )
    with pytest.raises(
        ValueError, match="leave out each_answer=True, because the template's marks show"
    ):
        texts(tmp_path, MISTRAL.tokenizer(template), SYSTEM, each_answer=True)
    assert texts(tmp_path, MISTRAL.tokenizer(template), SYSTEM) == [" yes</s>"]


TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("each_answer", [False, True])
@pytest.mark.parametrize("marks", ["default", "tool_use"])
def test_of_two_templates_each_has_its_own_marks(tmp_path, marks, each_answer):
    with_tools = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    plain, marked = PLAIN, MARKED
    templates = {"default": marked, "tool_use": with_tools + plain} if marks == "default" else {
        "default": plain, "tool_use": with_tools + marked,
    }  # fmt: skip
    tokenizer = byte_tokenizer(templates)
    record = conversation("hi", "yes")
    ends = ["yes<|im_end|>", "yes<|im_end|>\n"]
    found = [
        texts(tmp_path, tokenizer, kind, each_answer=each_answer)[0]
        for kind in (record, {**record, "tools": TOOLS})
    ]
    assert found == (ends if marks == "default" else ends[::-1])


def test_of_two_templates_one_may_be_missing(tmp_path):
    tokenizer = byte_tokenizer({"tool_use": "{{ tools | tojson }}" + PLAIN})
    record = conversation("hi", "yes")
    assert texts(tmp_path, tokenizer, {**record, "tools": TOOLS}) == ["yes<|im_end|>\n"]
    with pytest.raises(ValueError, match=r"a.jsonl:1: .*no default"):
        texts(tmp_path, tokenizer, record)


def test_options_that_no_template_reads_are_refused(tmp_path):
    for name, words in (
        ("enable_thinkng", "reads no 'enable_thinkng'"),
        ("truncation", "not a name that a template can read"),
    ):
        with pytest.raises(ValueError, match=f"template_options: .*{words}"):
            texts(tmp_path, QWEN3.tokenizer(), TWO, template_options={name: False})


def test_prompts_are_rendered_as_for_training():
    tokenizer = QWEN3.tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    found = data.prompt_tokens(tokenizer, messages, template_options={"enable_thinking": False})
    assert (
        tokenizer.decode(found)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
