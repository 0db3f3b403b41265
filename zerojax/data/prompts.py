"""What a model is given when it is to answer a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.data.chat import RENDER_SECONDS, Template, checked_options
from zerojax.data.conversations import Messages, check_contents
from zerojax.data.cpu_limit import CpuLimit


def prompt_tokens(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return messages and the prompt for an answer as tokens, such as `zj.generate` takes.

    Args:
      tokenizer: of transformers, with a chat template.
      messages: of which the last one is to be answered, with contents that are texts or lists of parts that are text.
      tools: given to the template.
      template_options: given to the template by name; the same as for `tokenize`.

    Raises:
      ValueError: messages of another form; or the tokenizer has no chat template, or the template fails, or does not end.
    """
    options = checked_options(template_options)
    check_contents(messages)
    with CpuLimit(RENDER_SECONDS) as limit:
        template = Template(tokenizer, options, limit)
        text = template.render(template.with_contents(messages, tools), tools, prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
