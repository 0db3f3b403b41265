"""Find which characters of a rendered conversation belong to the assistant's answers.

Templates with `{% generation %}` marks state this themselves, and transformers reads the marks. For
templates without marks, an answer lies between two prefixes of the full text:

    before = render(messages[:i], add_generation_prompt=True)      the context of the answer
    after  = render(messages[:i + 1])
    answer = whole[len(before) : len(after)]                       includes the end of the turn

This is right only if both are prefixes of the full text. Some templates render a turn differently
when more turns follow: Qwen 3 removes the thinking from all turns but the last. Training on the
full text would then show the model a context that it never sees at inference. Such a conversation
is refused, or split into one example per answer, each with the context that the model sees for it
(`each_answer`).

A template is a program that is distributed with the model. Its CPU time and the size of its results
are limited. `zerojax.data.contents` finds the form of `content` that it expects.
"""

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.data.contents import ContentForms, ContextError, EndlessError, TemplateError, Tools
from zerojax.data.conversations import (
    BESIDE_CONTENT,
    Conversation,
    Messages,
    check_contents,
    joined,
    read_text,
    shortened,
)
from zerojax.data.cpu_limit import CpuLimit, OverrunError

RENDER_SECONDS = 5.0
"""CPU seconds that rendering one conversation may take."""
LEAST_BOUND = 2**20
"""Number of characters that any conversation may render to."""
GROWTH = 64
"""Number of rendered characters allowed per character of the conversation and its template."""
_TAKEN = ("self", "messages", "conversations", "compiled_template")
"""Names that transformers passes to the template, or that are arguments of its own functions."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A rendered conversation and the character ranges of its answers.

    Attributes:
      text: full rendered text.
      answers: [start, end) of each answer's characters in `text`, in order.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Marked:
    """A conversation rendered and tokenized by a template with `{% generation %}` marks.

    Attributes:
      text: full rendered text.
      tokens: token ids of the text.
      counted: 1 for each token of an answer, else 0.
      offsets: [start, end) of each token's characters in `text`.
    """

    text: str
    tokens: Sequence[int]
    counted: Sequence[int]
    offsets: Sequence[tuple[int, int]]


class Template:
    """A tokenizer's chat template, or its two: some have a separate one for tool use."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], limit: CpuLimit) -> None:
        """Read the tokenizer's template.

        Args:
          tokenizer: tokenizer of transformers.
          options: extra variables for the template by name, such as `enable_thinking`.
          limit: CPU time limit for rendering.

        Raises:
          ValueError: the tokenizer has no template, or the template reads no option of a given
            name.
        """
        templates = tokenizer.chat_template
        if not templates:
            raise ValueError(
                "the tokenizer has no chat template, which `messages` need: use the tokenizer of a "
                "chat model, or set tokenizer.chat_template"
            )
        sources = list(templates.values()) if isinstance(templates, Mapping) else [templates]
        if not all(isinstance(source, str) for source in sources):
            raise ValueError(
                f"the tokenizer's chat template is not a string: {shortened(templates)}"
            )
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._limit = limit
        self._forms = ContentForms(self.render)
        self._check_options(sources)

    def _check_options(self, sources: Sequence[str]) -> None:
        """Raise ValueError for options that the template would never see."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        for name in self._options:
            if name in parameters:
                raise ValueError(
                    f"template_options: {name!r} is not a name that a template can read"
                )
            if not any(re.search(rf"\b{name}\b", source) for source in sources):
                raise ValueError(
                    f"template_options: the chat template reads no {name!r}: check the spelling in "
                    "the template"
                )

    def source(self, tools: Tools) -> str:
        """Return the Jinja source of the template for a conversation with these tools, or without.

        Raises:
          ValueError: the tokenizer has several templates, and none of them is for this case.
        """
        return self._tokenizer.get_chat_template(tools=tools)

    def has_marks(self, tools: Tools) -> bool:
        """Return whether the template itself marks which tokens the assistant generates."""
        return _has_marks(self.source(tools))

    def render(self, messages: Messages, tools: Tools, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt`, up to where the next answer begins.

        Raises:
          TemplateError: the template fails, exceeds its CPU time, or writes too much.
        """
        source = self.source(tools)
        call = functools.partial(
            self._tokenizer.apply_chat_template,
            list(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=prompt,
            **self._options,
        )
        from zerojax.data.sandbox import bounded  # imports transformers

        try:
            with bounded():
                text = self._limit.run(call)
        except OverrunError as error:
            raise EndlessError(
                f"the chat template does not end: {error}; check it for a loop over a large range"
            ) from error
        except Exception as error:  # from jinja2, from the template itself, or from Python
            line = getattr(error, "lineno", None)
            in_line = f", line {line}" if isinstance(line, int) else ""
            raise TemplateError(
                f"the chat template{in_line}: {error or type(error).__name__}"
            ) from error
        if len(text) > LEAST_BOUND and len(text) > GROWTH * len(f"{source}{messages}{tools}"):
            raise EndlessError(
                f"the chat template writes {len(text):,} characters for this conversation, more "
                f"than {GROWTH} times the size of its input; check it for a loop over a large range"
            )
        return text

    def marked(self, messages: Messages, tools: Tools) -> Marked:
        """Return a conversation as tokens, rendered by a template with `{% generation %}` marks."""
        text = self.render(messages, tools)  # enforces the limits on time and size
        out = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
            **self._options,
        )
        return Marked(text, out["input_ids"], out["assistant_masks"], out["offset_mapping"])

    def fitted(self, conversation: Conversation) -> Messages:
        """Return the messages in the form that the template expects.

        Arguments of tool calls become objects or JSON texts, and contents become parts or texts.

        Raises:
          ValueError: the template does not read a field that an answer consists of.
        """
        tools = conversation.tools
        source = self.source(tools)
        for i, message in enumerate(conversation.messages):
            for key in BESIDE_CONTENT:
                if message.get(key) and key not in source:
                    raise ValueError(
                        f"message {i} has {key!r}, which the chat template does not read, so it "
                        "would be lost: use a template that reads it, or remove the message"
                    )
            if isinstance(message.get("content"), Mapping) and not re.search(
                r"\bis\s+mapping\b", source
            ):
                raise ValueError(
                    f"message {i}: content is an object, which the chat template does not read: "
                    "write it as a text"
                )
        messages = conversation.messages
        if conversation.has_calls and not self._takes_objects(conversation):
            messages = conversation.texts
        messages, lost = self._forms.fit(messages, tools, source)
        for i in conversation.answers:
            message = messages[i]
            if (
                message["role"] in lost
                and not message.get("tool_calls")
                and read_text(message).strip()
            ):
                raise lost_answer(i)
        return messages

    def with_contents(self, messages: Messages, tools: Tools) -> Messages:
        """Return the messages with each `content` in the form that the template writes."""
        return self._forms.fit(messages, tools, self.source(tools))[0]

    def _takes_objects(self, conversation: Conversation) -> bool:
        """Return whether the template writes object arguments as JSON.

        Other templates write them as Python does, or fail on them.
        """
        tools = conversation.tools
        objects = joined(conversation.messages)
        texts = joined(conversation.texts)
        try:
            written = self.render(objects, tools)
        except EndlessError:
            raise
        except TemplateError:
            try:
                self.render(texts, tools)
            except TemplateError:
                return True  # something else fails, and the next rendering reports it
            return False  # the template concatenates arguments with a string
        calls = [call for message in objects for call in message.get("tool_calls", ())]
        as_python = [str(call.get("function", call).get("arguments") or "") for call in calls]
        as_python = [text for text in as_python if text and text in written]
        if not as_python:
            return True
        with_texts = self.render(texts, tools)
        return all(text in with_texts for text in as_python)

    def rendered(self, messages: Messages, tools: Tools, answers: Sequence[int]) -> Rendered:
        """Return the rendered conversation and the ranges of `answers`, found by its prefixes.

        Raises:
          ContextError: the template renders the start of this conversation differently when more
            follows.
          ValueError: the conversation begins with an answer.
        """
        full_text = self.render(messages, tools)
        ranges = []
        for i in answers:
            before = self._prompt_end(messages[:i], tools, full_text)
            after = self._end(messages, i + 1, tools, full_text)
            if before > after:
                raise ContextError(
                    f"the chat template writes less with message {i}, an answer, than with a "
                    "prompt for it"
                )
            ranges.append((before, after))
        return Rendered(full_text, tuple(ranges))

    def spans(
        self, messages: Messages, tools: Tools, answers: Sequence[int], full_text: str
    ) -> list[tuple[int, int]]:
        """Return [start, end) of messages in a conversation rendered by a template with marks.

        The ranges include the messages' headers.

        Raises:
          ContextError: the template renders the start of this conversation differently when more
            follows.
        """
        return [
            (self._end(messages, i, tools, full_text), self._end(messages, i + 1, tools, full_text))
            for i in answers
        ]

    def _prompt_end(self, context: Messages, tools: Tools, full_text: str) -> int:
        """Return the character of `full_text` at which the answer to `context` begins."""
        if not context:
            raise ValueError(
                "the conversation begins with an answer, and a chat template without {% generation "
                "%} marks does not show where that answer begins: put a user or system message "
                "first"
            )
        before = self.render(context, tools, prompt=True)
        _check_prefix(
            before, full_text, f"messages 0 to {len(context) - 1} and the prompt for an answer"
        )
        return len(before)

    def _end(self, messages: Messages, count: int, tools: Tools, full_text: str) -> int:
        """Return the character of `full_text` at which the first `count` messages end."""
        if count in (0, len(messages)):
            return len(full_text) if count else 0
        prefix = self.render(messages[:count], tools)
        _check_prefix(prefix, full_text, f"messages 0 to {count - 1}")
        return len(prefix)


def prompt_tokens(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return messages and the prompt for an answer as token ids, as `zj.generate` takes them.

    Args:
      tokenizer: tokenizer of transformers, with a chat template.
      messages: conversation whose last message is to be answered. Contents are texts, or lists of
        text parts.
      tools: tool definitions passed to the template.
      template_options: extra variables for the template by name; use the same as for `tokenize`.

    Returns:
      Token ids.

    Raises:
      ValueError: the messages have another form, the tokenizer has no chat template, or the
        template fails or does not end.
    """
    options = checked_options(template_options)
    check_contents(messages)
    with CpuLimit(RENDER_SECONDS) as limit:
        template = Template(tokenizer, options, limit)
        text = template.render(template.with_contents(messages, tools), tools, prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def checked_options(options: object) -> Mapping[str, object]:
    """Return template options; an empty mapping if they are None.

    Raises:
      ValueError: `options` is not an object, or has a name that no template can read.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ValueError(
            f"template_options={shortened(options)}: an object of names and values is needed, such "
            'as {"enable_thinking": False}'
        )
    for name in options:
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise ValueError(
                f"template_options: {shortened(name)} is not a name that a template can read"
            )
    return options


@functools.lru_cache
def _has_marks(source: str) -> bool:
    """Return whether a template has `{% generation %}` outside comments and raw text."""
    import jinja2

    try:
        lexed = [(kind, text) for _, kind, text in jinja2.Environment().lex(source)]
    except jinja2.TemplateSyntaxError:  # rendering reports it
        return False
    tokens = [token for token in lexed if token[0] != "whitespace"]
    return any(
        token[0] == "block_begin" and following == ("name", "generation")
        for token, following in itertools.pairwise(tokens)
    )


def lost_answer(i: int) -> ValueError:
    """Return the error for an answer whose text is missing from the rendered conversation."""
    return ValueError(
        f"message {i}, an answer: the chat template does not write its text, given as a text or as "
        "a list of parts, so the model would learn to say nothing: use a template that writes "
        '`content` for this role, or leave out the answer ("weight": 0)'
    )


def _check_prefix(prefix: str, full_text: str, description: str) -> None:
    """Raise ContextError unless `full_text` begins with `prefix`."""
    if full_text.startswith(prefix):
        return
    position = next(
        (i for i, (a, b) in enumerate(zip(prefix, full_text, strict=False)) if a != b),
        min(len(prefix), len(full_text)),
    )
    shown = slice(position, position + 40)
    raise ContextError(
        f"the chat template writes {description} differently when more follows: from character "
        f"{position} it writes {prefix[shown]!r}, but in the full conversation "
        f"{full_text[shown]!r}. So the model would not see this context when it answers"
    )
