r"""A conversation in the form of OpenAI's API, as the chat templates of transformers read it.

    OpenAI                                                    templates
    "arguments": "{\"city\": \"Rome\"}"                           an object or its text
    "content": [{"type": "text", "text": "a"}, ..]            the parts or their text
    "weight": 0, in an assistant's message                    nothing: this answer does not count

Everything passed to a template is JSON: encodable text, finite numbers, and objects nested to a
limited depth. `zerojax.data.chat` and `zerojax.data.contents` find which of two forms a template
needs. A call whose arguments are missing, null or an empty text calls a function without
parameters: its arguments are `{}`.
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
"""Keys other than `content` that may hold an answer."""
DEEPEST = 100
"""Maximum nesting of objects and lists in a record, far more than tools and arguments need."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A checked conversation.

    Attributes:
      messages: messages in which arguments of tool calls are objects.
      texts: the same messages with these arguments as JSON texts.
      answers: indices of the messages that count in the loss, in order.
      skipped: whether the weight of some answer excludes it from the loss.
      tools: tool definitions passed to the template, or None.
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
    """Check a conversation and return it; only answers from message `first` on may count.

    Raises:
      ValueError: the conversation does not have the form; the error names the message and the key.
    """
    _check_messages(messages)
    as_objects = []
    as_texts = []
    weights = []
    for i, message in enumerate(messages):
        check_json(message, f"message {i}")
        weights.append(_weight(message, f"message {i}"))
        fields = {key: value for key, value in message.items() if value is not None}
        fields.pop("weight", None)
        _check_content(fields, f"message {i}")
        may_lack_content = fields["role"] == ASSISTANT and any(map(fields.get, BESIDE_CONTENT))
        if "content" not in fields and not may_lack_content:
            raise ValueError(
                f"message {i} has no content: a text is needed, or a list of text parts; only a "
                f"message of {ASSISTANT!r} that calls a tool may leave it out. An empty text is "
                'written as ""'
            )
        as_objects.append(_with_arguments(fields, f"message {i}", _parsed))
        as_texts.append(_with_arguments(fields, f"message {i}", _dumped))
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
    """Check that messages have roles and valid contents.

    Raises:
      ValueError: a message does not; the error names it.
    """
    _check_messages(messages)
    for i, message in enumerate(messages):
        if message.get("content") is not None:
            _check_content(message, f"message {i}")


def _check_messages(messages: Any) -> None:
    """Raise ValueError unless messages are objects with roles."""
    if not _is_list_of_objects(messages):
        raise ValueError(
            "messages must be a list of objects with 'role' and 'content', got "
            f"{shortened(messages)}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {i} has the keys {sorted(map(str, message))}, but 'role' and 'content' "
                "are needed"
            )


def _is_list_of_objects(value: Any) -> bool:
    """Return whether a value is a non-empty list that holds only objects."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(element, Mapping) for element in value)
    )


def shortened(value: Any) -> str:
    """Return a short, printable form of a value for an error message."""
    try:
        text = repr(value)
    except (
        RecursionError,
        ValueError,
    ):  # nested too deeply, or a number with more digits than Python prints
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:80] + "…"


def check_json(value: Any, place: str, depth: int = 0) -> None:
    """Check that a value is JSON that a tokenizer can read.

    Raises:
      ValueError: some part of the value is not; the error names its place.
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
            f"{place} is {value}, which is not a JSON number: leave it out, or write null"
        )
    elif value is not None and not isinstance(value, bool | int | float):
        raise ValueError(
            f"{place} is a {type(value).__name__}, but JSON holds only texts, numbers, true, "
            "false, null, lists and objects"
        )


def check_text(text: str, place: str) -> None:
    """Check that a text can be encoded.

    Raises:
      ValueError: the text holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds {text[error.start]!a} at character {error.start}, half of a surrogate "
            "pair, which is not a character"
        ) from error


def has_parts(messages: Messages) -> bool:
    """Return whether the content of any message is a list of parts."""
    return any(isinstance(message.get("content"), list | tuple) for message in messages)


def joined(messages: Messages) -> Messages:
    """Return messages whose contents are texts.

    Parts are joined by newlines, as inference servers of open models do.
    """
    texts = []
    for message in messages:
        if has_parts([message]):
            message = {**message, "content": read_text(message)}
        texts.append(message)
    return texts


def merged(messages: Messages) -> Messages:
    """Return messages in which each list of parts is merged into one part."""
    single_parts = []
    for message in messages:
        if has_parts([message]):
            content = [{"type": "text", "text": read_text(message)}]
            message = {**message, "content": content}
        single_parts.append(message)
    return single_parts


def read_text(message: Message) -> str:
    """Return a message's content as one text; empty if it has none or if it is an object."""
    return "\n".join(read_texts(message))


def read_texts(message: Message) -> list[str]:
    """Return the texts of a message's parts, or its content if the content is a text."""
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
            f"{place}: weight={shortened(weight)}: only 0 (leave the answer out of the loss) and 1 "
            "(count it) are allowed"
        )
    if weight and message["role"] != ASSISTANT:
        raise ValueError(
            f"{place}: weight=1 for the role {shortened(message['role'])}: only messages of "
            f"{ASSISTANT!r} can count in the loss"
        )
    return bool(weight)


def _check_content(message: Message, place: str) -> None:
    content = message.get("content", "")
    # Tool results may be objects: some templates write these.
    if isinstance(content, str | Mapping):
        return
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"{place}: content must be a text, or a list of text parts, got "
            f"{type(content).__name__}"
        )
    if not content:
        raise ValueError(
            f"{place}: content is an empty list: a text is needed, or a list of text parts"
        )
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{place}: part {j} of its content is {shortened(part)}: only parts of the form "
                '{"type": "text", "text": ".."} are supported in training'
            )


def _with_arguments(message: Message, place: str, convert: Callable[[Any, str], Any]) -> Message:
    """Return a message with the arguments of its tool calls converted by `convert`."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{place}: tool_calls must be a list of objects, got {shortened(calls)}")
    converted = []
    for j, call in enumerate(calls):
        call_place = f"{place}, tool call {j}"
        function = call.get("function")
        if isinstance(function, Mapping):
            converted.append({**call, "function": _converted(function, call_place, convert)})
        elif function is None:
            converted.append(_converted(call, call_place, convert))
        else:
            raise ValueError(
                f"{call_place}: function must be an object with 'name' and 'arguments', got "
                f"{shortened(function)}"
            )
    return {**message, "tool_calls": converted}


def _converted(function: Message, place: str, convert: Callable[[Any, str], Any]) -> Message:
    """Return a call with its arguments converted; missing or null arguments count as `{}`."""
    arguments = function.get("arguments")
    return {**function, "arguments": convert({} if arguments is None else arguments, place)}


def _parsed(arguments: Any, place: str) -> Any:
    """Return arguments as an object; an empty text becomes `{}`."""
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, str):
        raise ValueError(
            f"{place}: arguments must be an object, or its JSON text, got {shortened(arguments)}"
        )
    if not arguments.strip():  # the function has no parameters
        return {}
    try:
        parsed = parse_json(arguments)
    except ValueError as error:
        raise ValueError(
            f"{place}: arguments are {shortened(arguments)}, which is not JSON text: {error}"
        ) from error
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{place}: arguments must be the JSON text of an object, got {shortened(arguments)}"
        )
    check_json(parsed, f"{place}: arguments")
    return parsed


def _dumped(arguments: Any, place: str) -> str:
    """Return arguments as a JSON text; an empty text becomes `{}`."""
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    return "{}" if arguments.strip() in ("", "null") else arguments


def _tools(tools: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return a record's tools, which some data sets store as a JSON text."""
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ValueError(
                f"tools are {shortened(tools)}, which is not JSON text: {error}"
            ) from error
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of objects, got {shortened(tools)}")
    check_json(tools, "tools")
    return tools
