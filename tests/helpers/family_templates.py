"""Chat templates of model families, reduced to how they write turns, tools, thoughts and ends."""

import dataclasses
from typing import Any

from chat_tokenizers import byte_tokenizer


@dataclasses.dataclass(frozen=True)
class Family:
    """A tokenizer's special tokens and template.

    Attributes:
      template: the chat template, in Jinja.
      special: the template's special tokens.
      eos: token that ends a text.
      bos: token that the tokenizer adds at the beginning of a text.
    """

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None

    def tokenizer(self, template: Any = None) -> Any:
        """Return a byte-level tokenizer with these tokens; `template` replaces this template."""
        return byte_tokenizer(template or self.template, self.eos, self.special, self.bos)


LLAMA3 = Family(
    """{{- bos_token }}{% for m in messages %}
{{- "<|start_header_id|>" + m.role + "<|end_header_id|>\\n\\n" }}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{- '{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson }}{{- "}" }}
{%- else %}{{- m.content | trim }}{% endif %}{{- "<|eot_id|>" }}{% endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}""",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", "<|begin_of_text|>",
)  # fmt: skip
QWEN3 = Family(
    """{%- if tools %}{{- "<|im_start|>system\\n" }}{% for t in tools %}{{- t | tojson + "\\n" }}{% endfor %}
{{- "<|im_end|>\\n" }}{% endif %}{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{- "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- "<think>\\n" + (m.reasoning_content or "") + "\\n</think>\\n\\n" }}{% endif %}{{- m.content or "" }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{% else %}{{- call.arguments | tojson }}{% endif %}
{{- "}\\n</tool_call>" }}{% endfor %}{{- "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\\n\\n</think>\\n\\n" }}{% endif %}{% endif %}""",
    ("<|im_start|>", "<|im_end|>"), "<|im_end|>",
)  # fmt: skip
# Removes the thoughts from every answer, opens them in the prompt, and appends arguments to text.
R1 = Family(
    """{{- bos_token }}{% for m in messages %}{% if m.role == "user" %}{{- "<|User|>" + m.content }}{% endif %}
{%- if m.role == "assistant" %}{{- "<|Assistant|>" }}
{%- for call in m.tool_calls or [] %}{{- "<|call|>" + call.function.name + "\\n" + call.function.arguments }}{% endfor %}
{%- if m.content %}{{- m.content.split("</think>")[-1] }}{% endif %}{{- eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- "<|Assistant|><think>\\n" }}{% endif %}""",
    ("<|User|>", "<|Assistant|>", "<|call|>"), "<|eos|>", "<|bos|>",
)  # fmt: skip
# Keeps the thoughts of the last answer and opens them in the prompt.
QWQ = Family(
    """{%- for m in messages %}{{- "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" and not loop.last %}{{- m.content.split("</think>")[-1] }}{% else %}{{- m.content }}{% endif %}
{{- "<|im_end|>\\n" }}{% endfor %}{% if add_generation_prompt %}{{- "<|im_start|>assistant\\n<think>\\n" }}{% endif %}""",
    ("<|im_start|>", "<|im_end|>"), "<|im_end|>",
)  # fmt: skip
# Writes the system message only before a user message, and only if that is the last message.
MISTRAL = Family(
    """{%- if messages[0].role == "system" %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}{{- bos_token }}{% for m in turns %}{% if m.role == "user" %}
{%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + m.content + "[/INST]" }}
{%- else %}{{- "[INST] " + m.content + "[/INST]" }}{% endif %}
{%- else %}{{- " " + m.content | trim + eos_token }}{% endif %}{% endfor %}""",
    ("[INST]", "[/INST]"), "</s>", "<s>",
)  # fmt: skip
# Reads content parts. Turns and texts end with different tokens.
GEMMA = Family(
    """{{- bos_token }}{% for m in messages %}
{%- set role = "model" if m.role == "assistant" else m.role %}{{- "<start_of_turn>" + role + "\\n" }}
{%- if m.content is string %}{{- m.content | trim }}{% else %}
{%- for part in m.content %}{% if part.type == "text" %}{{- part.text | trim }}{% endif %}{% endfor %}{% endif %}
{{- "<end_of_turn>\\n" }}{% endfor %}{% if add_generation_prompt %}{{- "<start_of_turn>model\\n" }}{% endif %}""",
    ("<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>",
)  # fmt: skip
PHI = Family(
    """{%- for m in messages %}{{- "<|" + m.role + "|>\\n" + m.content + "<|end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>\\n" }}{% endif %}""",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>",
)  # fmt: skip
# A turn ends where the next one begins.
GLM = Family(
    """{{- "[gMASK]<sop>" }}{% for m in messages %}{{- "<|" + m.role + "|>\\n" + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>\\n" }}{% endif %}""",
    ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"), "<|endoftext|>",
)  # fmt: skip
FAMILIES = {
    "llama3": LLAMA3, "qwen3": QWEN3, "r1": R1, "qwq": QWQ, "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI, "glm": GLM,
}  # fmt: skip
