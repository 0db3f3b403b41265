"""Tokenize a record and find which of its tokens count in the loss.

    messages                the assistant's turns count; templates: `zerojax.data.chat`
    prompt, completion      the completion counts; two texts, or two lists of messages
    text                    all count
    conversations           ShareGPT's, as messages: `zerojax.data.corpora.columns`
    instruction, output     Alpaca's, as messages, or as prompt and completion without a template

A text is tokenized as a unit. A token counts if any part of it lies in a range that counts.
transformers has the same rule for `{% generation %}` marks.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from zerojax.data.chat import Template, lost_answer
from zerojax.data.contents import ContextError, Tools
from zerojax.data.conversations import (
    Conversation,
    Message,
    Messages,
    check_text,
    read_conversation,
    read_text,
    read_texts,
    shortened,
)
from zerojax.data.corpora.columns import (
    alpaca_messages,
    alpaca_texts,
    read_tools,
    sharegpt_messages,
)
from zerojax.data.cpu_limit import CpuLimit
from zerojax.data.notices import Notices
from zerojax.data.special_tokens import SpecialTokens, Tokenized

Form = Literal["messages", "prompt", "text", "sharegpt", "alpaca"]
KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
}
"""The keys of each form of record."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_ASKING = ("system", "developer", "user")
_NO_END = (
    "the chat template ends an answer with no special token, so the model does not learn to stop "
    "there: use a template that ends every turn, for example with the tokenizer's eos_token"
)
_NO_MARKED_END = (
    "the {% generation %} marks of the chat template leave out the special token that ends an "
    "answer, so the model does not learn to stop there: put the token before {% endgeneration %}"
)
_NO_MARKED_TOKEN = (
    "no token counts in the loss: the {% generation %} marks of the chat template enclose nothing "
    "of this conversation's answers. Put them around what the template writes for the role "
    "'assistant', or remove them: answers are found without marks too"
)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One tokenized example.

    Attributes:
      tokens: i32[n], token ids.
      counted: bool[n], whether predicting the token counts in the loss.
    """

    tokens: np.ndarray
    counted: np.ndarray


class Encoder:
    """Converts records to tokenized examples.

    Attributes:
      notices: warnings about the records, collected until they are logged.
    """

    def __init__(
        self,
        tokenizer: Any,
        form: Form | None,
        add_eos: bool,
        each_answer: bool,
        template_options: Mapping[str, Any],
        limit: CpuLimit,
    ) -> None:
        """Check the tokenizer; the arguments are the same as in `zerojax.data.tokenize`.

        Raises:
          ValueError: `form` is unknown, or the tokenizer has no vocabulary or cannot map tokens to
            characters.
        """
        if form is not None and form not in KEYS:
            raise ValueError(f"form={form!r} is unknown: choose from {', '.join(KEYS)}")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} does not map tokens to characters: use a fast "
                "tokenizer, which the tokenizers library implements (is_fast)"
            )
        if not tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False):
            raise ValueError(
                "the tokenizer's vocabulary is empty, so it splits a text into no tokens: check "
                "that tokenizer.json is complete"
            )
        self._tokenizer = tokenizer
        self._form = form
        self._each_answer = each_answer
        self._add_eos = add_eos
        self._options = template_options
        self._limit = limit
        self._special = SpecialTokens(tokenizer)
        self.notices = Notices()

    @functools.cached_property
    def _template(self) -> Template:
        return Template(self._tokenizer, self._options, self._limit)

    @functools.cached_property
    def _turn_end(self) -> int | None:
        """The special token that ends a turn of the template, or None if there is none."""
        return self._special.turn_end(self._template) if self._tokenizer.chat_template else None

    def encode(self, record: Mapping[str, Any]) -> Iterator[Encoded]:
        """Yield the example of a record; with `each_answer`, one example per answer.

        Raises:
          ValueError: the record has no known form, a value has a wrong type, or no token counts.
        """
        form = self._detect_form(record)
        if form == "alpaca" and not self._tokenizer.chat_template:
            form, record = "prompt", alpaca_texts(record)
        values = [record[key] for key in KEYS[form]]
        if form == "messages":
            yield from self._conversation(values[0], 0, record.get("tools"))
        elif form == "sharegpt":
            yield from self._conversation(sharegpt_messages(record), 0, read_tools(record))
        elif form == "alpaca":
            yield from self._conversation(alpaca_messages(record), 0, read_tools(record))
        elif form == "prompt" and all(isinstance(value, list | tuple) for value in values):
            yield from self._conversation(
                [*values[0], *values[1]], len(values[0]), record.get("tools")
            )
        elif wrong := [
            key for key, value in zip(KEYS[form], values, strict=True) if not isinstance(value, str)
        ]:
            kind = "text" if form == "text" else "text, or both lists of messages"
            raise ValueError(
                f"{', '.join(map(repr, wrong))} must be {kind}, got "
                f"{type(record[wrong[0]]).__name__}"
            )
        else:
            for key, value in zip(KEYS[form], values, strict=True):
                check_text(value, repr(key))
            yield _checked(self._of_text("".join(values), len(values[-1])))

    def _detect_form(self, record: Mapping[str, Any]) -> str:
        forms = [form for form in KEYS if self._form in (None, form)]
        fitting = [form for form in forms if all(record.get(key) is not None for key in KEYS[form])]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            needed = " or ".join(" and ".join(map(repr, KEYS[form])) for form in forms)
            raise ValueError(f"the keys are {sorted(record)}: {needed} is needed")
        raise ValueError(
            f"the keys are {sorted(record)}, which fit {' and '.join(fitting)}: choose one by form="
        )

    # --- texts

    def _of_text(self, text: str, length: int) -> Encoded:
        """Return a text, of which the last `length` characters count.

        The tokens with which the tokenizer begins and ends a text are added.
        """
        tokenized = self._special.tokenized(text, add_special_tokens=True)
        counted = tokenized.in_span(len(text) - length, len(text))
        if not self._add_eos:
            return Encoded(tokenized.tokens, counted)
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no eos_token to end a text with: set one, or use add_eos=False"
            )
        last = tokenized.last_visible(len(tokenized.tokens))
        if last >= 0 and self._ends_text(int(tokenized.tokens[last])):
            counted[last] = True  # even if the tokenizer added it
            return Encoded(tokenized.tokens, counted)
        return Encoded(np.append(tokenized.tokens, np.int32(eos)), np.append(counted, True))

    def _ends_text(self, token: int) -> bool:
        """Return whether a token ends a text: the eos_token, or its template's turn end."""
        return token == self._tokenizer.eos_token_id or (
            token in self._special.ids and token == self._turn_end
        )

    # --- conversations

    def _conversation(self, messages: Any, first: int, tools: Any) -> Iterator[Encoded]:
        conversation = read_conversation(messages, first, tools)
        fitted = self._template.fitted(conversation)
        if not self._each_answer:
            yield _checked(
                self._of_messages(
                    conversation,
                    fitted,
                    conversation.answers,
                    all_answers=_all(conversation, first),
                )
            )
            return
        for i in conversation.answers:
            yield _checked(
                self._of_messages(conversation, fitted[: i + 1], (i,), all_answers=False)
            )

    def _of_messages(
        self,
        conversation: Conversation,
        messages: Messages,
        answers: Sequence[int],
        all_answers: bool,
    ) -> Encoded:
        """Return messages as tokens, of which the given or all answers count."""
        if self._template.has_marks(conversation.tools):
            example, text = self._by_marks(conversation, messages, answers, all_answers)
        else:
            example, text = self._by_prefixes(conversation, messages, answers)
        self._note_what_is_lost(conversation, messages, text)
        return example

    def _by_prefixes(
        self, conversation: Conversation, messages: Messages, answers: Sequence[int]
    ) -> tuple[Encoded, str]:
        tools = conversation.tools
        try:
            rendered = self._template.rendered(messages, tools, answers)
        except ContextError as error:
            raise ValueError(f"{error}: {self._advice(messages, tools, answers)}") from error
        tokenized = self._special.tokenized(rendered.text, add_special_tokens=False)
        counted = np.zeros(tokenized.tokens.shape, bool)
        for i, (start, end) in zip(answers, rendered.answers, strict=True):
            self._check_text(i, messages[i], rendered.text[start:end])
            inside = tokenized.in_span(start, end)
            if not inside.any():
                continue
            counted |= inside
            begin, last = np.flatnonzero(inside)[[0, -1]].tolist()
            stop = self._special.stop_after(tokenized, begin, last + 1)
            if stop is None:
                self.notices.add(_NO_END)
            else:
                counted[last + 1 : stop] = True  # the special token that ends the answer
        return Encoded(tokenized.tokens, counted), rendered.text

    def _by_marks(
        self,
        conversation: Conversation,
        messages: Messages,
        answers: Sequence[int],
        all_answers: bool,
    ) -> tuple[Encoded, str]:
        marked = self._template.marked(messages, conversation.tools)
        starts, ends = np.asarray(marked.offsets, np.int64).reshape(-1, 2).T
        tokenized = Tokenized(marked.text, np.asarray(marked.tokens, np.int32), starts, ends)
        counted = np.asarray(marked.counted, bool)
        if not all_answers:
            try:
                spans = self._template.spans(messages, conversation.tools, answers, marked.text)
            except ContextError as error:
                raise ValueError(f"{error}: {self._advice_with_marks(conversation)}") from error
            counted &= np.logical_or.reduce([tokenized.in_span(*span) for span in spans])
        for i in answers:
            self._check_text(
                i, messages[i], marked.text
            )  # the marks may leave out an earlier answer
        if not counted.any():
            raise ValueError(_NO_MARKED_TOKEN)
        stop = int(np.flatnonzero(counted)[-1]) + 1
        end = self._special.stop_after(tokenized, 0, stop)
        if end != stop:  # the marks have the last word, so the end token does not count
            self.notices.add(_NO_END if end is None else _NO_MARKED_END)
        return Encoded(tokenized.tokens, counted), marked.text

    def _check_text(self, i: int, message: Message, answer: str) -> None:
        """Check that the text of message `i` appears in the answer that counts.

        For a message that calls a tool, a missing text is only a warning.

        Raises:
          ValueError: the text is missing.
        """
        if _keeps(answer, read_text(message)):
            return
        if not message.get("tool_calls"):
            raise lost_answer(i)
        self.notices.add(
            f"the chat template does not write the text of message {i}, which calls a tool"
        )

    def _advice(self, messages: Messages, tools: Tools, answers: Sequence[int]) -> str:
        """Return the remedy if a template without marks renders an answer's context differently."""
        if not self._each_answer:
            try:
                for i in answers:
                    self._template.rendered(messages[: i + 1], tools, (i,))
                return "use each_answer=True, which makes one example per answer"
            except ValueError:  # a single answer fails too
                pass
        return (
            "set tokenizer.chat_template to one that has {% generation %} marks around answers, or "
            "that writes an answer, with its thinking, right after the prompt for it"
        )

    def _advice_with_marks(self, conversation: Conversation) -> str:
        """Return the remedy if a template with marks does not show which answer is which."""
        if self._each_answer and not conversation.skipped:
            return (
                "leave out each_answer=True, because the template's marks show which tokens are "
                "answers"
            )
        return (
            "set tokenizer.chat_template to one that writes messages in the same way whatever "
            "follows them"
        )

    def _note_what_is_lost(self, conversation: Conversation, messages: Messages, text: str) -> None:
        """Add notices about parts of a record that its template does not write."""
        source = self._template.source(conversation.tools)
        for i, message in enumerate(messages):
            if message["role"] in _ASKING and not all(
                piece.strip() in text for piece in read_texts(message)
            ):
                self.notices.add(
                    f"the chat template does not write message {i}, of the role "
                    f"{shortened(message['role'])}"
                )
            if any(message.get(key) for key in _THOUGHTS) and not any(
                key in source for key in _THOUGHTS
            ):
                self.notices.add(
                    f"the chat template writes no thoughts ({', '.join(_THOUGHTS)}): the thoughts "
                    "in the answers are lost"
                )
        if conversation.tools and "tools" not in source:
            self.notices.add("the chat template writes no tools: the record's tools are lost")


def _keeps(answer: str, text: str) -> bool:
    """Return whether an answer contains any word of a text.

    The template may drop parts of the text, such as thoughts.
    """
    text = text.strip().casefold()
    answer = answer.casefold()
    return text in answer or not _words(text).isdisjoint(_words(answer))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _all(conversation: Conversation, first: int) -> bool:
    """Return whether every answer of a conversation counts, including answers in its prompt."""
    return first == 0 and not conversation.skipped


def _checked(example: Encoded) -> Encoded:
    if not example.counted[1:].any():
        raise ValueError(
            f"no token counts in the loss: of {len(example.tokens)} tokens none after the first "
            "belongs to an answer, a completion or a text, and nothing predicts the first token"
        )
    return example
