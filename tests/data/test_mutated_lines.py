"""Randomly changed lines are refused with their place, or tokenized as the form specifies.

The reference renders with transformers alone, and finds answers by the texts that the templates
here write around them.
"""

import json
import logging
import random
import time

import numpy as np
import pytest
from chat_tokenizers import MARKED, PLAIN, byte_tokenizer, conversation
from mutations import mutated

from zerojax import data

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLING = """{%- for t in tools or [] %}{{ t | tojson + "\\n" }}{% endfor %}
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" + (m.content or "") }}
{%- for c in m.tool_calls or [] %}{{ "<call>" + (c.function or c).arguments | tojson }}{% endfor %}
{{- "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
TURNS = conversation("hi é", "yes", "why?", "no!")["messages"]
RECORDS = [
    {"messages": TURNS},
    {"messages": [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2], {**TURNS[3], "weight": 1}], "score": 0.5},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, TURNS[1]]},
    {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [CALL["function"]]},
    {"prompt": "2+2=", "completion": " 4"},
    {"prompt": TURNS[:3], "completion": TURNS[3:]},
    {"text": "free<|im_end|>"},
]  # fmt: skip
TOKENIZERS = [byte_tokenizer(template) for template in (PLAIN, MARKED, CALLING)]


def changed(seed: int) -> bytes:
    """Return a file with a good record and a changed one, as an object, as text or as bytes."""
    rng = random.Random(seed)
    record = RECORDS[seed % len(RECORDS)]
    kind = rng.randrange(8)
    if kind < 5:
        line = json.dumps(mutated(json.dumps(record), seed)).encode()
    elif kind == 5:  # the keys of two forms
        line = json.dumps({**record, **rng.choice(RECORDS)}).encode()
    else:
        line = bytearray(json.dumps(record, ensure_ascii=rng.random() < 0.5).encode())
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(line))
            new = rng.choice(
                (
                    b"",
                    b"\x00",
                    b"\xff",
                    b"\xed\xa0\x80",
                    b"\xef\xbb\xbf",
                    b"NaN",
                    b"1e999",
                    b'"',
                    b"\\ud800",
                    b"\n",
                    b"]",
                )
            )
            line[at : at + rng.randrange(2)] = new
        line = bytes(line)
    before = rng.choice((b"", b"\n", b"\xef\xbb\xbf", b" \r\n"))
    return before + json.dumps(RECORDS[-1]).encode() + rng.choice((b"\n", b"\r\n", b"\n\n")) + line


def expected(record: dict, tokenizer) -> tuple[list[int], list[bool]]:
    """Return the tokens of an accepted record, and which of them count."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    if record.get("text") is not None:
        pieces = [(record["text"], True)]
    elif isinstance(record.get("prompt"), str):
        pieces = [(record["prompt"], False), (record["completion"], True)]
    else:
        return expected_turns(record, tokenizer, encode)
    tokens = [token for text, _ in pieces for token in encode(text)]
    counted = [counts for text, counts in pieces for _ in encode(text)]
    visible = "".join(text for text, _ in pieces).rstrip()
    if visible.endswith("<|im_end|>"):
        last = len(tokens) - 1 - tokens[::-1].index(tokenizer.eos_token_id)
        counted[last] = True
    else:
        tokens.append(tokenizer.eos_token_id)
        counted.append(True)
    return tokens, counted


def expected_turns(record, tokenizer, encode):
    if record.get("messages") is not None:
        messages, first = record["messages"], 0
    else:
        messages, first = [*record["prompt"], *record["completion"]], len(record["prompt"])
    is_marked = tokenizer.chat_template == MARKED
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    prefix = (
        "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools or [])
        if tokenizer.chat_template == CALLING
        else ""
    )
    tokens = encode(prefix)
    counted = [False] * len(tokens)
    for i, message in enumerate(messages):
        head, body = f"<|im_start|>{message['role']}\n", message.get("content") or ""
        if isinstance(body, list):
            body = "\n".join(part["text"] for part in body)
        for call in message.get("tool_calls") or []:
            arguments = (call.get("function") or call).get("arguments")
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            body += "<call>" + json.dumps(arguments or {}, ensure_ascii=False)
        counts = message["role"] == "assistant" and i >= first and message.get("weight") != 0
        for text, is_answer in ((head, False), (body + "<|im_end|>", True), ("\n", not is_marked)):
            tokens += encode(text)
            counted += [counts and is_answer] * len(encode(text))
    return tokens, counted


def outcome(seed: int, path) -> str:
    """Tokenize a changed file, and compare the accepted records; return the outcome."""
    content, tokenizer = changed(seed), TOKENIZERS[seed // len(RECORDS) % len(TOKENIZERS)]
    path.write_bytes(content)
    start, found, refused = time.monotonic(), None, ""
    try:
        found = data.tokenize(path, tokenizer)
    except ValueError as error:
        refused = str(error)
    assert time.monotonic() - start < 10, seed
    if found is None:
        refused.encode()  # the error can be printed
        assert f"{path}" in refused, (seed, refused)
        assert not any(word in refused for word in ("unhashable", "object is not", "NoneType")), (
            seed,
            refused,
        )
        return "refused"
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    assert len(found) == len(lines), seed
    for i, line in enumerate(lines):
        span = slice(*found.starts[i : i + 2])
        tokens, counted = expected(json.loads(line), tokenizer)
        np.testing.assert_array_equal(
            found.tokens[span], tokens, err_msg=f"seed {seed}: {line[:300]}"
        )
        # The first token is not predicted from anything.
        np.testing.assert_array_equal(
            found.counted[span][1:], counted[1:], err_msg=f"seed {seed}: {line[:300]}"
        )
    return "accepted"


def outcomes(seeds, path):
    logging.getLogger("zerojax.data").setLevel(logging.ERROR)
    try:
        found = [outcome(seed, path / "a.jsonl") for seed in seeds]
    finally:
        logging.getLogger("zerojax.data").setLevel(logging.NOTSET)
    return {kind: found.count(kind) for kind in ("refused", "accepted")}


def test_a_few_changed_lines_are_refused_or_read_as_they_say(tmp_path):
    found = outcomes(range(60), tmp_path)
    assert min(found.values()) > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_changed_lines_are_refused_or_read_as_they_say(tmp_path, part):
    found = outcomes(range(1000 * part, 1000 * part + 500), tmp_path)
    print(found)
    assert min(found.values()) > 50
