r"""A conversation in the form of OpenAI's API, as the chat templates of transformers read it.

    OpenAI                                                    templates
    "arguments": "{\"city\": \"Rome\"}"                           an object, or the text where a template wants that
    "content": [{"type": "text", "text": "a"}, ..]            the parts, or a text where a template wants that
    "weight": 0, of an assistant's message                    nothing: that answer does not count

Everything that a template is given is JSON: text that can be encoded, finite numbers, objects
  nested to a limited depth. Which
of two forms a template wants is found in `zerojax.data.chat` and `zerojax.data.contents`. A call
without arguments, with null, or with an empty text calls a function without parameters: its
arguments are `{}`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from host_offload.fields import parse_json

Message = Mapping[str, Any]
Messages = Sequence[Message]
ASSISTANT = "assistant"
BESIDE_CONTENT = ("tool_calls", "function_call", "refusal")
"""Keys in which an answer may be, beside its content."""
DEEPEST = 100
"""Levels of objects and lists in a record, far more than tools and arguments have."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation that was checked.

    Attributes:
      messages: arguments of tool calls are objects.
      texts: the same messages, with those arguments as JSON texts.
      answers: the indices of messages that count in the loss, in order.
      skipped: some answer does not count, by its weight.
      tools: that the template is given, or None.
    """

    messages: Messages
    texts: Messages
    answers: tuple[int, ...]
    skipped: bool
    tools: Sequence[Mapping[str, Any]] | None

    @property
    def has_calls(self) -> bool:
        """Whether a message calls a tool with arguments, so that its two forms differ."""
        return self.messages != self.texts


def read_conversation(messages: Any, first: int, tools: Any) -> Conversation:
    """Check a conversation, of which the answers from message `first` on may count.

    Raises:
      ValueError: it does not have the form, with the message and the key.
    """
    _check_messages(messages)
    as_objects, as_texts, weights = [], [], []
    for i, message in enumerate(messages):
        check_json(message, f"message {i}")
        weights.append(_weight(message, f"message {i}"))
        kept = {
            key: value for key, value in message.items() if key != "weight" and value is not None
        }
        _check_content(kept, f"message {i}")
        if "content" not in kept and not (
            kept["role"] == ASSISTANT and any(kept.get(key) for key in BESIDE_CONTENT)
        ):
            raise ValueError(
                f"message {i} has no content: a text is needed, or a list of parts that are text; only a message of "
                f'{ASSISTANT!r} that calls a tool may leave it out. An empty text is written as ""'
            )
        as_objects.append(_with_arguments(kept, f"message {i}", _parsed))
        as_texts.append(_with_arguments(kept, f"message {i}", _dumped))
    answers = [
        i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i >= first
    ]
    if not answers:
        since = f" from message {first} on" if first else ""
        raise ValueError(
            f"no token counts in the loss: no message{since} has the role {ASSISTANT!r}"
        )
    counted = tuple(i for i in answers if weights[i])
    if not counted:
        raise ValueError("no token counts in the loss: every answer has the weight 0")
    return Conversation(as_objects, as_texts, counted, len(counted) < len(answers), _tools(tools))


def check_contents(messages: Any) -> None:
    """Check that messages have roles, and contents of the form.

    Raises:
      ValueError: they do not, with the message.
    """
    _check_messages(messages)
    for i, message in enumerate(messages):
        if message.get("content") is not None:
            _check_content(message, f"message {i}")


def _check_messages(messages: Any) -> None:
    """Check that messages are objects with roles."""
    if not _is_list_of_objects(messages):
        raise ValueError(
            f"messages must be a list of objects with 'role' and 'content', got {shortened(messages)}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {i} has the keys {sorted(map(str, message))}, and 'role' and 'content' are needed"
            )


def _is_list_of_objects(value: Any) -> bool:
    """Return whether a value is a list with an object at least, and nothing else."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(element, Mapping) for element in value)
    )


def shortened(value: Any) -> str:
    """Return a value for an error, which can be printed and is short."""
    try:
        text = repr(value)
    except (
        RecursionError,
        ValueError,
    ):  # nested deeply, or a number of more digits than Python writes
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:80] + "…"


def check_json(value: Any, place: str, depth: int = 0) -> None:
    """Check that a value is JSON which a tokenizer can read.

    Raises:
      ValueError: some of it is not, with its place.
    """
    if depth > DEEPEST:
        raise ValueError(f"{place[:200]} is nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        check_text(value, place)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_json(key, place, depth + 1)
            check_json(inner, f"{place}: {key}", depth + 1)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            check_json(inner, f"{place}[{i}]", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"{place} is {value}, which is no number of JSON: leave it out, or write null"
        )
    elif value is not None and not isinstance(value, bool | int | float):
        raise ValueError(
            f"{place} is a {type(value).__name__}, and JSON holds texts, numbers, true, false, null, lists, objects"
        )


def check_text(text: str, place: str) -> None:
    """Check that a text can be encoded.

    Raises:
      ValueError: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds {text[error.start]!a} at character {error.start}, half of a surrogate pair, which is no character"
        ) from error


def has_parts(messages: Messages) -> bool:
    """Return whether the content of a message is a list of parts."""
    return any(isinstance(message.get("content"), list | tuple) for message in messages)


def joined(messages: Messages) -> Messages:
    """Return messages with contents that are texts: parts are joined by line ends, as servers of
    open models join them.
    """
    return [
        {**message, "content": text_of(message)} if has_parts([message]) else message
        for message in messages
    ]


def merged(messages: Messages) -> Messages:
    """Return messages with one part in the place of several."""
    return [
        {**message, "content": [{"type": "text", "text": text_of(message)}]}
        if has_parts([message])
        else message
        for message in messages
    ]


def text_of(message: Message) -> str:
    """Return the content of a message as a text; empty if there is none, or if it is an object."""
    return "\n".join(texts_of(message))


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message's parts, or its content if that is a text."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return [part["text"] for part in content]
    return [content] if isinstance(content, str) else []


def _weight(message: Message, place: str) -> bool:
    """Return whether a message may count in the loss."""
    weight = message.get("weight")
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(
            f"{place}: weight={shortened(weight)}: 0 and 1 are allowed, which leave an answer out or count it"
        )
    if weight and message["role"] != ASSISTANT:
        raise ValueError(
            f"{place}: weight=1 for the role {shortened(message['role'])}: only messages of {ASSISTANT!r} can count in the loss"
        )
    return bool(weight)


def _check_content(message: Message, place: str) -> None:
    content = message.get("content", "")
    if isinstance(
        content, str | Mapping
    ):  # objects, as results of tools: some templates write these
        return
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"{place}: content must be text, or a list of parts that are text, got {type(content).__name__}"
        )
    if not content:
        raise ValueError(
            f"{place}: content is an empty list: a text is needed, or a list of parts that are text"
        )
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{place}: part {j} of its content is {shortened(part)}: only parts of the form "
                '{"type": "text", "text": ".."} can be trained on'
            )


def _with_arguments(message: Message, place: str, convert: Callable[[Any, str], Any]) -> Message:
    """Return a message with the arguments of its tool calls in one form."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{place}: tool_calls must be a list of objects, got {shortened(calls)}")
    found = []
    for j, call in enumerate(calls):
        there = f"{place}, tool call {j}"
        function = call.get("function")
        if isinstance(function, Mapping):
            found.append({**call, "function": _converted(function, there, convert)})
        elif function is None:
            found.append(_converted(call, there, convert))
        else:
            raise ValueError(
                f"{there}: function must be an object with 'name' and 'arguments', got {shortened(function)}"
            )
    return {**message, "tool_calls": found}


def _converted(function: Message, place: str, convert: Callable[[Any, str], Any]) -> Message:
    """Return a call with its arguments in one form: none, null and an empty text are an object
    without keys.
    """
    arguments = function.get("arguments")
    return {**function, "arguments": convert({} if arguments is None else arguments, place)}


def _parsed(arguments: Any, place: str) -> Any:
    """Return arguments as an object."""
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, str):
        raise ValueError(
            f"{place}: arguments must be an object, or its JSON text, got {shortened(arguments)}"
        )
    if not arguments.strip():  # the function has no parameters
        return {}
    try:
        found = parse_json(arguments)
    except ValueError as error:
        raise ValueError(
            f"{place}: arguments are {shortened(arguments)}, which is no JSON text: {error}"
        ) from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(
            f"{place}: arguments must be the JSON text of an object, got {shortened(arguments)}"
        )
    check_json(found, f"{place}: arguments")
    return found


def _dumped(arguments: Any, place: str) -> str:
    """Return arguments as a JSON text."""
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    return "{}" if arguments.strip() in ("", "null") else arguments


def _tools(tools: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools that a record names; some data sets store them as a JSON text."""
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ValueError(
                f"tools are {shortened(tools)}, which is no JSON text: {error}"
            ) from error
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of objects, got {shortened(tools)}")
    check_json(tools, "tools")
    return tools
