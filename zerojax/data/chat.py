"""Which characters of a rendered conversation are its answers: what the assistant's turns add to it.

Templates with `{% generation %}` marks say it themselves, and transformers reads them. Of the others an answer is found between
two prefixes of the whole text:

    before = render(messages[:i], add_generation_prompt=True)      what the model is given when it answers
    after  = render(messages[:i + 1])
    answer = whole[len(before) : len(after)]                       with what ends the turn

This is right only if both are prefixes of the whole. Some templates write a turn in another way when more follows: Qwen 3 takes
the thinking out of all but the last. Then training on the whole would show the model a context that it never meets, so such a
conversation is refused, or cut into one example for each answer, in the context that it is given in (`each_answer`).
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
ASSISTANT = "assistant"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A text and its answers.

    Attributes:
      text: with all that the template writes.
      answers: [start, end) of characters, in order.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class Template:
    """A tokenizer's chat template.

    Attributes:
      has_marks: it says by itself which tokens the assistant made.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Read a template.

        Args:
          tokenizer: of transformers.
          options: given to the template by name, such as `enable_thinking`.

        Raises:
          ValueError: the tokenizer has none.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, which `messages` need: use that of a model for chats, or set "
                "tokenizer.chat_template"
            )
        self._tokenizer, self._options = tokenizer, dict(options)
        self.has_marks = _MARK.search(tokenizer.get_chat_template()) is not None

    def render(self, messages: Messages, tools: Any, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt` up to where an answer begins."""
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self._options
        )

    def marked(self, messages: Messages, tools: Any) -> Mapping[str, Any]:
        """Return `input_ids`, `assistant_masks` and `offset_mapping` of a conversation, by a template with marks."""
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False}, **self._options,
        )  # fmt: skip

    def rendered(self, messages: Messages, tools: Any, first: int = 0) -> Rendered:
        """Return a conversation and the answers of its messages from `first` on, between prefixes.

        Raises:
          ValueError: the template writes the start of this conversation in another way than the whole.
        """
        whole = self.render(messages, tools)
        answers = []
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT or i < first:
                continue
            before = self.answer_starts(messages[:i], tools, whole)
            after = whole if i == len(messages) - 1 else self.render(messages[: i + 1], tools)
            _check_prefix(after, whole, f"messages 0 to {i}")
            if before > len(after):
                raise ValueError(f"the chat template writes less with message {i}, an answer, than with a prompt for it")
            answers.append((before, len(after)))
        return Rendered(whole, tuple(answers))

    def answer_starts(self, context: Messages, tools: Any, whole: str) -> int:
        """Return the character of a rendered conversation at which the answer to its first messages begins.

        Raises:
          ValueError: there are none, or the template writes them in another way than the whole.
        """
        if not context:
            raise ValueError(
                "the conversation begins with an answer, and a chat template without {% generation %} marks does not tell "
                "where that begins: let a message of the user or the system come first"
            )
        before = self.render(context, tools, prompt=True)
        _check_prefix(before, whole, f"messages 0 to {len(context) - 1} and the prompt for an answer")
        return len(before)


def _check_prefix(part: str, whole: str, what: str) -> None:
    """Raise ValueError unless a text begins with another."""
    if whole.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    raise ValueError(
        f"the chat template writes {what} in another way when more follows: from character {at} {part[at : at + 40]!r}, and in "
        f"the whole {whole[at : at + 40]!r}. So an answer is not given in the context of the whole: take each_answer=True, an "
        "example for each answer, or a template with {% generation %} marks"
    )
