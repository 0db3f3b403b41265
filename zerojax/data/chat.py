"""Which characters of a rendered conversation are its answers: what the assistant's turns add to
it.

Templates with `{% generation %}` marks say it themselves, and transformers reads them. Of the
others an answer is found between two prefixes of the whole text:

    before = render(messages[:i], add_generation_prompt=True)      what the model is given when it answers
    after  = render(messages[:i + 1])
    answer = whole[len(before) : len(after)]                       with what ends the turn

This is right only if both are prefixes of the whole. Some templates write a turn in another way
  when more follows: Qwen 3 takes
the thinking out of all but the last. Then training on the whole would show the model a context that
it never meets, so such a conversation is refused, or cut into one example for each answer, in the
context that it is given in (`each_answer`).

A template is a program that came with the model. It is limited in processor time and in what it
makes, and the form of contents that it wants is found in `zerojax.data.contents`.
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
    shortened,
    text_of,
)
from zerojax.data.cpu_limit import CpuLimit, OverrunError

RENDER_SECONDS = 5.0
"""Processor time in which one conversation is rendered."""
LEAST_BOUND = 2**20
"""Characters that any conversation may render to."""
GROWTH = 64
"""Characters that a conversation may render to for each of its own."""
_TAKEN = ("self", "messages", "conversations", "compiled_template")
"""Names that the template is given by transformers, or that its functions have as arguments."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A text and its answers.

    Attributes:
      text: with all that the template writes.
      answers: [start, end) of characters, in order.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Marked:
    """A text as tokens, by a template with marks.

    Attributes:
      text: with all that the template writes.
      tokens: its tokens.
      counted: 1 where a token is of an answer.
      offsets: [start, end) of each token's characters.
    """

    text: str
    tokens: Sequence[int]
    counted: Sequence[int]
    offsets: Sequence[tuple[int, int]]


class Template:
    """A tokenizer's chat template, or its two: one for conversations with tools."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], limit: CpuLimit) -> None:
        """Read a template.

        Args:
          tokenizer: of transformers.
          options: given to the template by name, such as `enable_thinking`.
          limit: under which it renders.

        Raises:
          ValueError: the tokenizer has none, or it reads no option of such a name.
        """
        templates = tokenizer.chat_template
        if not templates:
            raise ValueError(
                "the tokenizer has no chat template, which `messages` need: use that of a model for chats, or set "
                "tokenizer.chat_template"
            )
        sources = list(templates.values()) if isinstance(templates, Mapping) else [templates]
        if not all(isinstance(source, str) for source in sources):
            raise ValueError(f"the tokenizer's chat template is no text: {shortened(templates)}")
        self._tokenizer, self._options, self._limit = tokenizer, dict(options), limit
        self._forms = ContentForms(self.render)
        self._check_options(sources)

    def _check_options(self, sources: Sequence[str]) -> None:
        """Refuse options that the template would never see."""
        taken = inspect.signature(self._tokenizer.apply_chat_template).parameters
        for name in self._options:
            if name in taken:
                raise ValueError(f"template_options: {name!r} is no name that a template can read")
            if not any(re.search(rf"\b{name}\b", source) for source in sources):
                raise ValueError(
                    f"template_options: the chat template reads no {name!r}: is it spelled otherwise there?"
                )

    def source(self, tools: Tools) -> str:
        """Return the template for a conversation with these tools, or without any.

        Raises:
          ValueError: there are several, and none is for it.
        """
        return self._tokenizer.get_chat_template(tools=tools)

    def has_marks(self, tools: Tools) -> bool:
        """Return whether the template says by itself which tokens the assistant made."""
        return _has_marks(self.source(tools))

    def render(self, messages: Messages, tools: Tools, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt` up to where an answer begins.

        Raises:
          TemplateError: the template fails, computes for too long, or writes too much.
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
                f"the chat template does not end: {error}; is there a loop over a large range in it?"
            ) from error
        except Exception as error:  # of jinja2, of the template itself, or of Python
            line = getattr(error, "lineno", None)
            where = f", line {line}" if isinstance(line, int) else ""
            raise TemplateError(
                f"the chat template{where}: {error or type(error).__name__}"
            ) from error
        if len(text) > LEAST_BOUND and len(text) > GROWTH * len(f"{source}{messages}{tools}"):
            raise EndlessError(
                f"the chat template writes {len(text):,} characters for this conversation, more than {GROWTH} times what it is "
                "given; is there a loop over a large range in it?"
            )
        return text

    def marked(self, messages: Messages, tools: Tools) -> Marked:
        """Return a conversation as tokens, by a template with marks."""
        text = self.render(messages, tools)  # which limits it
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
        """Return messages in the form that the template wants: arguments as objects or texts,
        contents as parts or texts.

        Raises:
          ValueError: the template does not read what an answer consists of.
        """
        tools = conversation.tools
        source = self.source(tools)
        for i, message in enumerate(conversation.messages):
            for key in BESIDE_CONTENT:
                if message.get(key) and key not in source:
                    raise ValueError(
                        f"message {i} has {key!r}, which the chat template does not read: it would be lost"
                    )
            if isinstance(message.get("content"), Mapping) and not re.search(
                r"\bis\s+mapping\b", source
            ):
                raise ValueError(
                    f"message {i}: content is an object, which the chat template does not read: write it as a text"
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
                and text_of(message).strip()
            ):
                raise lost_answer(i)
        return messages

    def with_contents(self, messages: Messages, tools: Tools) -> Messages:
        """Return messages with contents in the form that the template writes."""
        return self._forms.fit(messages, tools, self.source(tools))[0]

    def _takes_objects(self, conversation: Conversation) -> bool:
        """Return whether the template writes arguments that are objects as JSON, and not as Python
        would, or not at all.
        """
        tools = conversation.tools
        objects, texts = joined(conversation.messages), joined(conversation.texts)
        try:
            written = self.render(objects, tools)
        except EndlessError:
            raise
        except TemplateError:
            try:
                self.render(texts, tools)
            except TemplateError:
                return True  # the fault is another one, which the same rendering tells again
            return False  # it adds them to a text
        calls = [call for message in objects for call in message.get("tool_calls", ())]
        as_python = [str(call.get("function", call).get("arguments") or "") for call in calls]
        as_python = [text for text in as_python if text and text in written]
        if not as_python:
            return True
        other = self.render(texts, tools)
        return all(text in other for text in as_python)

    def rendered(self, messages: Messages, tools: Tools, answers: Sequence[int]) -> Rendered:
        """Return a conversation and those of its messages that are answers, between prefixes.

        Raises:
          ContextError: the template writes the start of this conversation in another way than the
            whole.
          ValueError: it begins with an answer.
        """
        whole = self.render(messages, tools)
        found = []
        for i in answers:
            before = self._prompt_end(messages[:i], tools, whole)
            after = self._end(messages, i + 1, tools, whole)
            if before > after:
                raise ContextError(
                    f"the chat template writes less with message {i}, an answer, than with a prompt for it"
                )
            found.append((before, after))
        return Rendered(whole, tuple(found))

    def spans(
        self, messages: Messages, tools: Tools, answers: Sequence[int], whole: str
    ) -> list[tuple[int, int]]:
        """Return [start, end) of messages in a rendered conversation, with their headers, for a
        template with marks.

        Raises:
          ContextError: the template writes the start of this conversation in another way than the
            whole.
        """
        return [
            (self._end(messages, i, tools, whole), self._end(messages, i + 1, tools, whole))
            for i in answers
        ]

    def _prompt_end(self, context: Messages, tools: Tools, whole: str) -> int:
        """Return the character of a rendered conversation at which the answer to its first messages
        begins.
        """
        if not context:
            raise ValueError(
                "the conversation begins with an answer, and a chat template without {% generation %} marks does not tell "
                "where that begins: let a message of the user or the system come first"
            )
        before = self.render(context, tools, prompt=True)
        _check_prefix(
            before, whole, f"messages 0 to {len(context) - 1} and the prompt for an answer"
        )
        return len(before)

    def _end(self, messages: Messages, count: int, tools: Tools, whole: str) -> int:
        """Return the character of a rendered conversation at which its first messages end."""
        if count in (0, len(messages)):
            return len(whole) if count else 0
        part = self.render(messages[:count], tools)
        _check_prefix(part, whole, f"messages 0 to {count - 1}")
        return len(part)


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
      messages: of which the last one is to be answered, with contents that are texts or lists of
        parts that are text.
      tools: given to the template.
      template_options: given to the template by name; the same as for `tokenize`.

    Raises:
      ValueError: messages of another form; or the tokenizer has no chat template, or the template
        fails, or does not end.
    """
    options = checked_options(template_options)
    check_contents(messages)
    with CpuLimit(RENDER_SECONDS) as limit:
        template = Template(tokenizer, options, limit)
        text = template.render(template.with_contents(messages, tools), tools, prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def checked_options(options: object) -> Mapping[str, object]:
    """Return options of a template, none if they are None.

    Raises:
      ValueError: they are no object, or have a name that no template can read.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ValueError(
            f"template_options={shortened(options)}: an object of names and values is needed, such as "
            '{"enable_thinking": False}'
        )
    for name in options:
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise ValueError(
                f"template_options: {shortened(name)} is no name that a template can read"
            )
    return options


@functools.lru_cache
def _has_marks(source: str) -> bool:
    """Return whether a template has `{% generation %}`, comments and raw text aside."""
    import jinja2

    try:
        tokens = [
            (kind, text)
            for _, kind, text in jinja2.Environment().lex(source)
            if kind != "whitespace"
        ]
    except jinja2.TemplateSyntaxError:  # which rendering reports
        return False
    return any(
        a[0] == "block_begin" and b == ("name", "generation") for a, b in itertools.pairwise(tokens)
    )


def lost_answer(i: int) -> ValueError:
    """Return the error about an answer whose text is not in the rendering."""
    return ValueError(
        f"message {i}, an answer: the chat template does not write its text, neither from a text nor from a list of parts, so "
        "the model would learn to say nothing: take a template that writes `content` for this role, or leave out the answer "
        '("weight": 0)'
    )


def _check_prefix(part: str, whole: str, what: str) -> None:
    """Raise ContextError unless a text begins with another."""
    if whole.startswith(part):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b),
        min(len(part), len(whole)),
    )
    raise ContextError(
        f"the chat template writes {what} in another way when more follows: from character {at} {part[at : at + 40]!r}, and in "
        f"the whole {whole[at : at + 40]!r}. So an answer is not given in the context of the whole"
    )
