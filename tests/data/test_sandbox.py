"""Template operations that would make a huge value are refused immediately.

Ordinary operations are unchanged.
"""

import time

import pytest
from chat_tokenizers import PLAIN, byte_tokenizer, conversation, write
from family_templates import FAMILIES
from transformers.utils import chat_template_utils

from zerojax import data

ONE = conversation("hi", "yes")
DOUBLED = (
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = DOUBLE %}{% endfor %}"
)
HUGE = {
    "constant": "{{ 'x' * 10**10 }}",
    "swapped": "{{ 10**10 * 'x' }}",
    "list": "{% set a = [1] * 10**10 %}",
    "variable": "{% set n = 10000000000 %}{{ messages[0].role * n }}",
    "power": "{% set a = 10 ** 10000000000 %}",
    "product": "{% set ns = namespace(s=10**4000) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "plus": DOUBLED.replace("DOUBLE", "ns.s + ns.s"),
    "tilde": DOUBLED.replace("DOUBLE", "ns.s ~ ns.s"),
    "join": DOUBLED.replace("DOUBLE", "''.join([ns.s, ns.s])"),
    "join-filter": DOUBLED.replace("DOUBLE", "[ns.s, ns.s] | join"),
    "replace": DOUBLED.replace("DOUBLE", "ns.s.replace('x', ns.s + 'x')"),
    "replace-filter": DOUBLED.replace("DOUBLE", "ns.s | replace('x', ns.s + 'x')"),
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent-star": "{{ '%*d' % (9999999999, 1) }}",
    "percent-filter": "{{ '%.9999999999f' | format(1.5) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format-nested": "{{ '{:{}}'.format(1, 9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "center-filter": "{{ 'x' | center(9999999999) }}",
    "indent-filter": "{{ 'x\\ny' | indent(width=9999999999) }}",
}


@pytest.mark.parametrize("name", HUGE)
def test_an_operation_that_makes_a_huge_value_is_refused_at_once(tmp_path, name):
    path, start = write(tmp_path / "a.jsonl", [ONE]), time.monotonic()
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:1: the chat template.*: .*(would create|would have|has a width of) ",
    ):
        data.tokenize(path, byte_tokenizer(HUGE[name] + PLAIN))
    assert time.monotonic() - start < 2


def test_ordinary_operations_are_as_jinja2_does_them(tmp_path):
    body = (
        "{{ 2 ** 10 }} {{ 3 * 'ab' }} {{ [1] * 2 }} {{ 7 % 4 }} {{ '%5.2f|%-4d' % (1.5, 3) }} {{ '{:>4}'.format(7) }} "
        "{{ 'a' | center(5) }} {{ ['a', 'b'] | join('-') }} {{ 'aa' | replace('a', 'b') }} {{ 'a' ~ 1 ~ none }} "
        "{{ 'a'.ljust(3) }}| {{ '-'.join(['x', 'y']) }} {{ 'id 12345678901 %s' % 1712345678901 }} {{ 'b' | indent(2, true) }} "
        "{{ '%s' | format(99999999999) }} {{ 1.5 * 2 }} {{ [1] + [2] }} {{ '{}: 12345678901'.format(99999999999) }}"
    )
    tokenizer = byte_tokenizer(body + PLAIN)
    found = tokenizer.decode(data.tokenize(write(tmp_path / "a.jsonl", [ONE]), tokenizer).tokens)
    chat_template_utils._compile_jinja_template.cache_clear()
    assert found == tokenizer.apply_chat_template(ONE["messages"], tokenize=False)
    assert "1024 ababab [1, 1] 3  1.50|3       7" in found
    restored = vars(chat_template_utils)["ImmutableSandboxedEnvironment"]
    assert "BoundedEnvironment" not in str(restored)


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_families_render_as_without_bounds(tmp_path, name):
    tokenizer = FAMILIES[name].tokenizer()
    turns = [{"role": "user", "content": "hi"}]
    prompt = data.prompt_tokens(tokenizer, turns)
    chat_template_utils._compile_jinja_template.cache_clear()
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer(text, add_special_tokens=False)["input_ids"]
