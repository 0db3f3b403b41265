"""Find the form of `content` that a chat template writes: a text, or a list of parts.

Given a text, a template that loops over parts writes nothing and raises no error: it loops over
characters, which have no `text`. The form is therefore found by trial. Every text of a conversation
is replaced by a unique word, and the form of each role is the one in which the template writes that
word. The result of a trial serves all later conversations.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from zerojax.data.conversations import (
    ASSISTANT,
    Message,
    Messages,
    has_parts,
    joined,
    merged,
    read_text,
)

Tools = Sequence[Mapping[str, Any]] | None
Form = Literal["text", "parts", "lost"]
_PRINTED = r"""['"]text['"]:\s*['"]"""
"""Regular expression for what precedes a part's text when the part is printed as an object."""
_MOST_ROLES = 4
"""Maximum number of roles whose forms are tried in all combinations."""


class TemplateError(ValueError):
    """The chat template failed on a conversation."""


class EndlessError(TemplateError):
    """The chat template does not end, or its output does not."""


class ContextError(ValueError):
    """The chat template writes messages differently when more follow."""


class ContentForms:
    """Finds the form that a template expects for each role, and converts messages to it."""

    def __init__(self, render: Callable[[Messages, Tools], str]) -> None:
        """Take the function that renders messages; it raises TemplateError if it fails."""
        self._render = render
        self._known: dict[tuple[str, str], Form] = {}

    def fit(
        self, messages: Messages, tools: Tools, source: str
    ) -> tuple[Messages, Collection[str]]:
        """Return the messages as the template expects them, and the roles whose texts get lost.

        The template writes the texts of lost roles in neither form.

        Args:
          messages: messages whose contents are texts, parts or objects.
          tools: tool definitions passed to the template.
          source: Jinja source of the template.

        Raises:
          EndlessError: the template does not end.
        """
        forms = self._forms(messages, tools, source)
        in_parts = {role for role, form in forms.items() if form == "parts"}
        lost = {role for role, form in forms.items() if form == "lost"}
        if has_parts(messages):
            return self._fit_parts(messages, tools, in_parts), lost
        return _in_parts(messages, in_parts), lost

    def _fit_parts(self, messages: Messages, tools: Tools, in_parts: Collection[str]) -> Messages:
        """Return the messages with their parts if that renders like the joined text.

        Otherwise the parts are joined into a text, or merged into one part.
        """
        texts = _in_parts(joined(messages), in_parts)
        single = _in_parts(merged(messages), in_parts)
        with_parts = _in_parts(messages, in_parts)
        as_text = None
        try:
            as_text = self._render(texts, tools)
        except EndlessError:
            raise
        except TemplateError:  # the template accepts only parts, if anything
            pass
        try:
            is_same = as_text is None or self._render(single, tools) == as_text
            is_whole = is_same and _keeps_parts(with_parts, self._render(with_parts, tools))
        except TemplateError:
            return with_parts if as_text is None else texts
        if is_whole:
            return with_parts
        return single if as_text is None else texts

    def _forms(self, messages: Messages, tools: Tools, source: str) -> dict[str, Form]:
        """Return the form of each role.

        Roles without a text, and roles for which the trial found nothing, are left out.
        """
        tried = [i for i, message in enumerate(messages) if _shows_form(message)]
        roles = {messages[i]["role"] for i in tried}
        unknown = sorted(role for role in roles if (source, role) not in self._known)
        if not unknown:
            return {role: self._known[source, role] for role in roles}
        known: dict[str, Form] = {
            role: self._known[source, role] for role in roles.difference(unknown)
        }
        forms: dict[str, Form] = known | self._try(messages, tried, tools, unknown, known)
        for role, form in forms.items():
            if form != "lost" or role != ASSISTANT:  # an answer may be lost only at this position
                self._known[source, role] = form
        return forms

    def _try(
        self,
        messages: Messages,
        tried: Sequence[int],
        tools: Tools,
        unknown: Sequence[str],
        known: Mapping[str, Form],
    ) -> dict[str, Form]:
        """Return the forms of unknown roles.

        It chooses the combination that writes the most of these roles; among equals, the one with
        the fewest roles in parts.
        """
        before = {role for role, form in known.items() if form == "parts"}
        words = {i: f"zqprobe{i}zq" for i in tried}
        trial = [
            {**m, "content": words[i]} if i in words else m for i, m in enumerate(joined(messages))
        ]
        best: dict[str, Form] = {}
        most = -1
        for chosen in _choices(unknown):
            try:
                text = self._render(_in_parts(trial, before | chosen), tools)
            except EndlessError:
                raise
            except TemplateError:
                continue
            written = {
                messages[i]["role"] for i, word in words.items() if _writes(text, word)
            } & set(unknown)
            if len(written) > most:
                most = len(written)
                best = {role: _form(role in chosen, role in written) for role in unknown}
            if most == len(unknown):
                break
        return best


def _form(in_parts: bool, is_written: bool) -> Form:
    if not is_written:
        return "lost"
    return "parts" if in_parts else "text"


def _shows_form(message: Message) -> bool:
    """Return whether a message has a text that shows its form.

    Messages that call a tool do not: many templates write no text for them.
    """
    has_call = message.get("tool_calls") or message.get("function_call")
    return not has_call and bool(read_text(message).strip())


def _choices(roles: Sequence[str]) -> Iterator[set[str]]:
    """Yield the sets of roles to try with parts, smallest first."""
    sizes = range(len(roles) + 1) if len(roles) <= _MOST_ROLES else (0, 1, len(roles))
    for size in sizes:
        yield from map(set, itertools.combinations(roles, size))


def _writes(text: str, word: str) -> bool:
    """Return whether a rendered text contains `word`, other than in a part printed as an object."""
    return (
        re.search(word, re.sub(_PRINTED + word, "", text, flags=re.IGNORECASE), re.IGNORECASE)
        is not None
    )


def _in_parts(messages: Messages, roles: Collection[str]) -> Messages:
    """Return messages in which the text contents of `roles` are replaced by a single part."""
    if not roles:
        return messages
    replaced = []
    for message in messages:
        content = message.get("content")
        if message["role"] in roles and isinstance(content, str):
            replaced.append({**message, "content": [{"type": "text", "text": content}]})
        else:
            replaced.append(message)
    return replaced


def _keeps_parts(messages: Messages, text: str) -> bool:
    """Return whether a rendered text contains the text of every part of the messages."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple) and not all(
            part["text"].strip() in text for part in content
        ):
            return False
    return True
