"""Byte-level tokenizers built in the tests, with several kinds of chat templates."""

import json
import pathlib
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PLAIN = """{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
MARKED = """{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" %}{% generation %}{{ m.content + "<|im_end|>" }}{% endgeneration %}{{ "\\n" }}
{%- else %}{{ m.content + "<|im_end|>\\n" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
# Like Qwen 3's template: answers before the last question lose their thinking, and the last answer
# gets an empty thinking block.
THINKING = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" and loop.index0 > ns.last %}{{ "<think>" + (m.reasoning_content or "") + "</think>" }}{% endif %}
{{- m.content + "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}
{%- if enable_thinking is false %}{{ "<think></think>" }}{% endif %}{% endif %}"""


def byte_tokenizer(
    template: str | dict[str, str] | None = PLAIN,
    eos: str | None = "<|im_end|>",
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    bos: str | None = None,
) -> Any:
    """Return a tokenizer of 256 bytes and at least 3 special tokens.

    If `bos` is given, every text begins with that token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=eos,
        pad_token="<pad>",
        additional_special_tokens=list(special),
    )
    if bos is not None:
        tokenizer.add_special_tokens({"bos_token": bos})
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    return tokenizer


def conversation(*texts: str) -> dict[str, Any]:
    """Return a record of alternating user and assistant turns."""
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        ]
    }


def write(path: pathlib.Path, records: list[dict[str, Any]]) -> pathlib.Path:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
