"""Records in the columns of ShareGPT and Alpaca, as messages.

    ShareGPT    conversations: [{"from": "human", "value": ..}, {"from": "gpt", "value": ..}, ..]
                and, beside it, system, tools
    Alpaca      instruction, output; and input, system, history: [[question, answer], ..]

Data sets in the first form also write `conversations` as messages with `role` and `content`.
Alpaca's `input` follows the instruction after an empty line. Without a chat template the parts of
an Alpaca record are put below headings instead (`alpaca_texts`).
"""

from collections.abc import Mapping
from typing import Any

from host_offload.fields import parse_json
from zerojax.data.conversations import Message, shortened

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The role of each speaker's name in ShareGPT's `from`."""
CALL = "function_call"
"""Name in `from` of an answer that calls a function: its value is the call as JSON."""


def sharegpt_messages(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a record with `conversations`.

    Raises:
      ValueError: a turn does not have the form; the error names it.
    """
    turns = record["conversations"]
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(
            "conversations must be a list of objects with 'from' and 'value', got "
            f"{shortened(turns)}"
        )
    if turns and all("role" in turn for turn in turns):
        return [*_system(record), *turns]
    messages: list[Message] = _system(record)
    for i, turn in enumerate(turns):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or not isinstance(value, str):
            raise ValueError(
                f"turn {i} of conversations has the keys {sorted(map(str, turn))}, but the texts "
                "'from' and 'value' are needed, or 'role' and 'content' in all turns"
            )
        if speaker == CALL:
            message: dict[str, Any] = {"role": "assistant", "tool_calls": _calls(value, i)}
        elif speaker in ROLES:
            message = {"role": ROLES[speaker], "content": value}
        else:
            raise ValueError(
                f"turn {i} of conversations is from {speaker!r}: known are "
                f"{', '.join([*ROLES, CALL])}"
            )
        if turn.get("weight") is not None:
            message["weight"] = turn["weight"]
        messages.append(message)
    return messages


def _calls(value: str, i: int) -> list[dict[str, Any]]:
    """Return the function calls of a turn."""
    try:
        calls = parse_json(value)
    except ValueError as error:
        raise ValueError(
            f"turn {i} of conversations, a {CALL}, is {shortened(value)}, which is not JSON: "
            f"{error}"
        ) from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(
            f"turn {i} of conversations, a {CALL}, is {shortened(value)}: an object with 'name' "
            "and 'arguments' is needed, or a list of them"
        )
    return [{"type": "function", "function": call} for call in calls]


def alpaca_messages(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a record with `instruction` and `output`.

    Raises:
      ValueError: a value is not a text, or `history` is not a list of pairs of texts.
    """
    messages = _system(record)
    for pair in _history(record):
        for role, content in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": content})
    parts = [_text(record, "instruction"), _text(record, "input")]
    question = "\n\n".join(part for part in parts if part.strip())
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(record, "output")})
    return messages


def alpaca_texts(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a record with `instruction` and `output` as prompt and completion.

    Raises:
      ValueError: a value is not a text, or the record has a `history`, which needs a template.
    """
    if _history(record):
        raise ValueError(
            "the record has a history of earlier turns, which needs a chat template: set "
            "tokenizer.chat_template to one"
        )
    system = [message["content"] for message in _system(record)]
    parts = [f"{text}\n\n" for text in system]
    parts.append(f"### Instruction:\n{_text(record, 'instruction')}\n\n")
    if (text := _text(record, "input")).strip():
        parts.append(f"### Input:\n{text}\n\n")
    prompt = "".join(parts) + "### Response:\n"
    return {"prompt": prompt, "completion": _text(record, "output")}


def read_tools(record: Mapping[str, Any]) -> Any:
    """Return the tools of a record; these data sets write an empty text for none."""
    tools = record.get("tools")
    return None if isinstance(tools, str) and not tools.strip() else tools


def _system(record: Mapping[str, Any]) -> list[Message]:
    """Return the system message that a record has beside its turns, if any."""
    text = _text(record, "system")
    return [{"role": "system", "content": text}] if text.strip() else []


def _history(record: Mapping[str, Any]) -> list[Any]:
    """Return earlier questions and answers."""
    history = record.get("history") or []
    is_valid = isinstance(history, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
        for pair in history
    )
    if not is_valid:
        raise ValueError(
            "history must be a list of pairs of texts, a question and its answer, got "
            f"{shortened(history)}"
        )
    return list(history)


def _text(record: Mapping[str, Any], key: str) -> str:
    """Return a text of a record; empty if it is missing or null."""
    value = record.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, got {type(value).__name__}")
    return value
