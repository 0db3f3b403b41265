"""Templates that loop over the parts of `content`.

Every text of a message is written, in whichever form the record has it.
"""

import logging

import pytest
from chat_tokenizers import MARKED, PLAIN, byte_tokenizer, conversation, write

from zerojax import data

PROMPT = '{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}'


def turns(body: str, condition: str = "") -> str:
    """Return a template that writes the content of each message using `body`."""
    head = '{% for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}'
    return head + condition + body + '{{ "<|im_end|>\\n" }}{% endfor %}' + PROMPT


LOOPS = {
    "llava": turns(
        "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}"
    ),
    "idefics": turns(
        "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    ),
    "bare": turns("{% for p in m.content %}{{ p['text'] }}{% endfor %}"),
    "first": turns("{{ m.content[0]['text'] }}"),
    "raising": turns('{% for p in m.content %}{{ p.text + "" }}{% endfor %}'),
    "users": turns(
        "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content + '' }}{% endif %}"
    ),
    "answers": turns(
        "{% if m.role == 'user' %}{{ m.content + '' }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    ),
    "marked": turns(
        "{% if m.role == 'assistant' %}{% generation %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endgeneration %}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    ),
}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def told(path, template, messages, **options):
    """Return (full text, counted text) of a conversation."""
    tokenizer = byte_tokenizer(template)
    found = data.tokenize(write(path / "a.jsonl", [{"messages": messages}]), tokenizer, **options)
    return tokenizer.decode(found.tokens), tokenizer.decode(found.tokens[found.counted])


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("form", ["texts", "parts", "mixed"])
def test_a_loop_over_parts_writes_every_text(tmp_path, name, form):
    question = {"role": "user", "content": "Why blue?" if form == "texts" else parts("Why blue?")}
    answer = {"role": "assistant", "content": parts("a") if form == "parts" else "a"}
    whole, counted = told(tmp_path, LOOPS[name], [question, answer])
    assert whole == "<|im_start|>user\nWhy blue?<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert counted == ("a" if name == "marked" else "a<|im_end|>\n")


def test_prompts_and_ends_of_texts_are_of_the_same_form(tmp_path):
    tokenizer = byte_tokenizer(LOOPS["llava"], eos="<|end|>")
    prompt = data.prompt_tokens(tokenizer, [{"role": "user", "content": "Why?"}])
    assert tokenizer.decode(prompt) == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    text = "<|im_start|>assistant\nyes<|im_end|>\n"  # text that the template rendered keeps its end
    found = data.tokenize(write(tmp_path / "a.jsonl", [{"text": text}]), tokenizer)
    assert tokenizer.decode(found.tokens) == text


LOSING = {
    "never": turns("", "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"),
    "other-key": turns("{{ m.content if m.role == 'user' else m.answer }}"),
    "printed": turns("{{ m.content if m.role == 'user' else '' }}"),
    "marked": MARKED.replace('{{ m.content + "<|im_end|>" }}', '{{ "<|im_end|>" }}'),
}


@pytest.mark.parametrize("name", LOSING)
@pytest.mark.parametrize("answer", ["e", "A long answer.", parts("e", "f")])
def test_an_answer_that_no_form_writes_is_refused(tmp_path, name, answer):
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:1: message 1, an answer: the chat template does not write its text",
    ):
        told(tmp_path, LOSING[name], messages)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_an_answer_that_is_lost_at_its_place_is_refused(tmp_path, template):
    """The template writes all answers except the first one."""
    losing = template.replace("m.content", '(m.content if loop.index0 != 1 else "")')
    messages = conversation("Why?", "Because.", "How?", "So!")["messages"]
    error = r"message 1, an answer: the chat template does not write its text"
    with pytest.raises(ValueError, match=error):
        told(tmp_path, losing, messages)
    with pytest.raises(ValueError, match=error):
        told(tmp_path, losing, messages, each_answer=True)
    assert told(tmp_path, losing, [*messages[:1], {**messages[1], "content": ""}])[1].startswith(
        "<|im_end|>"
    )


def test_a_text_beside_a_call_that_is_lost_is_warned_of(tmp_path, caplog):
    calling = turns(
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}"
    )
    call = {"function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
    ]
    with caplog.at_level(logging.WARNING):
        assert told(tmp_path, calling, messages)[1] == "weather<|im_end|>\n"
    assert (
        "a.jsonl:1: the chat template does not write the text of message 1, which calls a tool"
        in caplog.text
    )


def test_each_part_of_a_question_is_looked_for(tmp_path, caplog):
    string_or_parts = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    messages = [
        {"role": "user", "content": parts("p1", "p2")},
        {"role": "assistant", "content": "a"},
    ]
    with caplog.at_level(logging.WARNING):
        assert (
            "user\np1p2<|im_end|>"
            in told(tmp_path, turns(string_or_parts + "{% endif %}"), messages)[0]
        )
        assert not caplog.records
        # joined, so that no part is lost
        first = "{{ m.content if m.content is string else m.content[0].text }}"
        assert "user\np1\np2<|im_end|>" in told(tmp_path, turns(first), messages)[0]
        assert "user\np1\np2<|im_end|>" in told(tmp_path, LOOPS["first"], messages)[0]
        assert not caplog.records
        told(tmp_path, turns("{% if m.role != 'user' %}{{ m.content }}{% endif %}"), messages)
    assert "does not write message 0, of the role 'user'" in caplog.text
