"""A record as tokens, of which some count in the loss.

    messages                the assistant's turns count; templates: `zerojax.data.chat`
    prompt, completion      the completion counts; two texts, or two lists of messages
    text                    all count

A text is tokenized as a whole. A token counts where it lies, even in part, in what counts: transformers has the same rule for
`{% generation %}` marks.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from zerojax.data.chat import ASSISTANT, Messages, Rendered, Template

Form = Literal["messages", "prompt", "text"]
KEYS: dict[str, tuple[str, ...]] = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
"""The keys of each form of record."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One example.

    Attributes:
      tokens: i32[n].
      counted: bool[n], where a token counts in the loss, once it is predicted from those before it.
    """

    tokens: np.ndarray
    counted: np.ndarray


class Encoder:
    """Makes examples of records."""

    def __init__(
        self, tokenizer: Any, form: Form | None, add_eos: bool, each_answer: bool, template_options: Mapping[str, Any]
    ) -> None:
        """Check the tokenizer; arguments are those of `zerojax.data.tokenize`.

        Raises:
          ValueError: an unknown form, or a tokenizer that does not tell which characters a token is of.
        """
        if form is not None and form not in KEYS:
            raise ValueError(f"form={form!r} is unknown: choose from {', '.join(KEYS)}")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} does not tell which characters a token is of: a tokenizer of the tokenizers "
                "library is needed (is_fast)"
            )
        self._tokenizer, self._form, self._each_answer = tokenizer, form, each_answer
        self._add_eos, self._options = add_eos, template_options
        self._template: Template | None = None

    def encode(self, record: Mapping[str, Any]) -> Iterator[Encoded]:
        """Yield the example of a record; with `each_answer` one for each answer.

        Raises:
          ValueError: a record of no form, of a wrong type, or without a token that counts.
        """
        form = self._form_of(record)
        values = [record[key] for key in KEYS[form]]
        if form == "messages":
            yield from self._conversation(values[0], 0, record.get("tools"))
        elif form == "prompt" and all(isinstance(value, list | tuple) for value in values):
            yield from self._conversation([*values[0], *values[1]], len(values[0]), record.get("tools"))
        elif wrong := [key for key, value in zip(KEYS[form], values, strict=True) if not isinstance(value, str)]:
            kind = "text" if form == "text" else "text, or both lists of messages"
            raise ValueError(f"{', '.join(map(repr, wrong))} must be {kind}, got {type(record[wrong[0]]).__name__}")
        else:
            whole = "".join(values)
            yield _checked(self._with_eos(self._of_text(Rendered(whole, ((len(whole) - len(values[-1]), len(whole)),)), True)))

    def _form_of(self, record: Mapping[str, Any]) -> str:
        forms = [form for form in KEYS if self._form in (None, form)]
        found = [form for form in forms if all(record.get(key) is not None for key in KEYS[form])]
        if len(found) == 1:
            return found[0]
        if not found:
            needed = " or ".join(" and ".join(map(repr, KEYS[form])) for form in forms)
            raise ValueError(f"the keys are {sorted(record)}: {needed} is needed")
        raise ValueError(f"the keys are {sorted(record)}, which fit {' and '.join(found)}: choose one by form=")

    def _conversation(self, messages: Any, first: int, tools: Any) -> Iterator[Encoded]:
        _check_messages(messages)
        if self._template is None:
            self._template = Template(self._tokenizer, self._options)
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i >= first]
        if not answers:
            raise ValueError("no token counts in the loss: no message" + f" from message {first} on" * (first > 0) + " has the "
                             f"role {ASSISTANT!r}")  # fmt: skip
        if not self._each_answer:
            yield _checked(self._of_messages(self._template, messages, first, tools))
        else:
            for i in answers:
                yield _checked(self._of_messages(self._template, messages[: i + 1], i, tools))

    def _of_messages(self, template: Template, messages: Messages, first: int, tools: Any) -> Encoded:
        """Return a conversation, of which the answers from message `first` on count."""
        if not template.has_marks:
            return self._of_text(template.rendered(messages, tools, first), False)
        out = template.marked(messages, tools)
        counted = np.asarray(out["assistant_masks"], bool)
        if first:
            start = template.answer_starts(messages[:first], tools, template.render(messages, tools))
            counted &= np.asarray([end for _, end in out["offset_mapping"]]) > start
        return Encoded(np.asarray(out["input_ids"], np.int32), counted)

    def _of_text(self, rendered: Rendered, add_special_tokens: bool) -> Encoded:
        out = self._tokenizer(rendered.text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
        tokens = np.asarray(out["input_ids"], np.int32)
        # [n, 2] characters of each token; those that the tokenizer adds are of none, [0, 0].
        starts, ends = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2).T
        counted = np.zeros(tokens.shape, bool)
        for start, end in rendered.answers:
            counted |= (starts < end) & (ends > start)
        return Encoded(tokens, counted)

    def _with_eos(self, example: Encoded) -> Encoded:
        """Return an example that ends with the tokenizer's token for it, which counts."""
        if not self._add_eos:
            return example
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ValueError("the tokenizer has no eos_token to end a text with: set one, or take add_eos=False")
        if example.tokens[-1:].tolist() == [eos]:
            return Encoded(example.tokens, np.append(example.counted[:-1], True))
        return Encoded(np.append(example.tokens, np.int32(eos)), np.append(example.counted, True))


def _check_messages(messages: Any) -> None:
    is_list = isinstance(messages, list | tuple) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"messages must be a list of objects with 'role' and 'content', got {str(messages)[:80]!r}")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has the keys {sorted(message)}, and 'role' and 'content' are needed")


def _checked(example: Encoded) -> Encoded:
    if not example.counted[1:].any():
        raise ValueError(
            f"no token counts in the loss: of {len(example.tokens)} tokens none but the first is of an answer, a completion or "
            "a text, and the first is predicted from nothing"
        )
    return example
