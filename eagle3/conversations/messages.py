"""A row of data as messages: which form it has, and every message in one plain shape.

A normalised message is `{"role", "content"}` with a role of `ROLES` and a text, and where the row
has them `name`, `tool_call_id`, the reasoning, and `tool_calls` as
`[{"type": "function", "function": {"name", "arguments": {...}}, "id"?}]`.
Nothing is guessed: what cannot be read for certain is rejected with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from eagle3 import strict_json
from eagle3.errors import ConfigError

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
"""The roles that a normalised message may have."""

BUILT_IN_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
"""Roles that mean the same everywhere; a developer's message is a system prompt's newer name, which
few templates know. Others vary from one data set to the next, so they must be mapped in the
configuration: taking any unknown role for the assistant would train on it."""

_FORMS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "conversation": ("conversation",),
    "prompt/response": ("prompt", "response"),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
}
_SYSTEM_FIELDS = ("system", "system_prompt")
_BESIDE = (*_SYSTEM_FIELDS, "tools", "input", "history")
COLUMNS = frozenset({key for keys in _FORMS.values() for key in keys} | set(_BESIDE))
"""Every key of a row that can matter here."""

_KEPT_TEXTS = ("name", "tool_call_id")
REASONING = "reasoning_content"
# Under its other names too a template may look for it.
_REASONING = (REASONING, "reasoning", "thinking")
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
_LONGEST_NAME = 40


def visible(text: str) -> str:
    """A text whose control characters, and others that have no form of their own, are spelt out.

    Lines and tabs stay. An escape sequence or a mark that reverses the writing does not.
    """
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


class Rejected(Exception):
    """The outcome of a row that cannot be used; it is counted, and never ends a stage by itself.

    Args:
        reason: one word that rows are counted by.
        detail: what was found, for the example that a person is shown.

    Attributes: text: the beginning of the row, for the same.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        # Both are printed, and both may hold what the data holds.
        self.reason = visible(reason)
        self.detail = visible(detail)
        self.text = ""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A usable row: normalised messages and the tools that were offered, if any."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


def role_map(extra: Mapping[str, str]) -> dict[str, str]:
    """The built-in roles and those of the configuration. Raises ConfigError."""
    for name, role in extra.items():
        if role not in ROLES:
            raise ConfigError(
                f"prepare.roles.{name}",
                wanted=", ".join(ROLES),
                found=role,
                remedy="map it to one of these",
            )
    return {**BUILT_IN_ROLES, **extra}


def forms_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The forms whose keys a row has, null counting as absent. One is right, none is unknown."""
    return tuple(
        form for form, keys in _FORMS.items() if all(record.get(key) is not None for key in keys)
    )


def parse(
    record: Mapping[str, Any], form: str, roles: Mapping[str, str], *, unanswered: bool = False
) -> Conversation:
    """The conversation of a row of a known form; `unanswered` ones only where that is wanted.

    Raises Rejected.
    """
    raw = _raw_messages(record, form)
    messages = [_message(one, roles) for one in raw]
    for field in _SYSTEM_FIELDS:
        messages = _with_system(messages, record.get(field))
    _check_order(messages, unanswered=unanswered)
    return Conversation(messages=messages, tools=_tools(record.get("tools")))


def _raw_messages(record: Mapping[str, Any], form: str) -> list[Any]:
    keys = _FORMS[form]
    if len(keys) == 1:
        return _listed(record[keys[0]], "bad_messages")
    if record.get("history"):
        raise Rejected("unsupported_field", "history")
    prompt, answer = (record[key] for key in keys)
    if form == "instruction/output" and isinstance(prompt, str) and record.get("input"):
        if not isinstance(record["input"], str):
            raise Rejected("bad_content", "an input that is not text")
        prompt = f"{prompt}\n\n{record['input']}"
    return [*_spoken(prompt, "user"), *_spoken(answer, "assistant")]


def _spoken(value: Any, role: str) -> list[Any]:
    """A text is one message of the role; a list holds whole messages."""
    return (
        [{"role": role, "content": value}]
        if isinstance(value, str)
        else _listed(value, "bad_messages")
    )


def _listed(value: Any, reason: str) -> list[Any]:
    """A list, or one that was stored as JSON text."""
    if isinstance(value, str):
        value = _decoded(value, reason)
    if not isinstance(value, list) or not value:
        raise Rejected(reason, f"a list expected, not {type(value).__name__}")
    return value


def _decoded(text: str, reason: str) -> Any:
    try:
        return strict_json.decode(text, object)
    except msgspec.DecodeError as error:
        raise Rejected(reason, str(error)) from error


def _message(raw: Any, roles: Mapping[str, str]) -> Message:
    if not isinstance(raw, dict):
        raise Rejected("bad_message", f"an object expected, not {type(raw).__name__}")
    if (plain := _plain(raw, roles)) is not None:
        return plain
    name = _one_of(raw, "role", "from")
    if not isinstance(name, str):
        raise Rejected("bad_message", "neither role nor from")
    role = roles.get(name)
    if role is None:
        raise Rejected(f"unknown_role:{name[:_LONGEST_NAME]}", name)
    message: Message = {"role": role, "content": _text(_one_of(raw, "content", "value"))}
    for key in _KEPT_TEXTS:
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    message.update(_reasoning(raw))
    if raw.get("tool_calls"):
        message["tool_calls"] = [
            _tool_call(call) for call in _listed(raw["tool_calls"], "bad_tool_call")
        ]
    return message


def _plain(raw: Mapping[str, Any], roles: Mapping[str, str]) -> Message | None:
    """A message of a known role and a text and nothing else, as nearly all are."""
    if len(raw) != 2:
        return None
    said, content = raw.get("role"), raw.get("content")
    role = roles.get(said) if isinstance(said, str) else None
    return {"role": role, "content": content} if role and isinstance(content, str) else None


def _reasoning(raw: Mapping[str, Any]) -> dict[str, str]:
    """The reasoning under the name it came by and under the one that most templates read."""
    found = {key: raw[key] for key in _REASONING if isinstance(raw.get(key), str) and raw[key]}
    if len(set(found.values())) > 1:
        raise Rejected("bad_message", f"{' and '.join(found)} differ")
    return {**found, REASONING: next(iter(found.values()))} if found else {}


def _one_of(raw: Mapping[str, Any], key: str, other: str) -> Any:
    found = [raw[k] for k in (key, other) if raw.get(k) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise Rejected("bad_message", f"{key} and {other} differ")
    return found[0] if found else None


def _text(content: Any) -> str:
    """Content as text. Parts are joined as vLLM joins them, and only when all are text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected("bad_content", f"{type(content).__name__} in place of text")
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise Rejected("image_content" if kind in _IMAGE_PARTS else "non_text_content", str(kind))


def _tool_call(raw: Any) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected("bad_tool_call", "no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(arguments, "bad_tool_call") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Rejected("bad_tool_call", "arguments are not an object")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(raw.get("id"), str):
        call["id"] = raw["id"]
    return call


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if not value:
        return None
    tools = _decoded(value, "bad_tools") if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise Rejected("bad_tools", "a list of objects expected")
    return [_tool(tool) for tool in tools] or None


def _tool(raw: Any) -> dict[str, Any]:
    """A tool as servers hand it to a template: a bare function becomes a tool of that type."""
    tool = _decoded(raw, "bad_tools") if isinstance(raw, str) else raw
    if not isinstance(tool, dict):
        raise Rejected("bad_tools", "a list of objects expected")
    if "function" not in tool and isinstance(tool.get("name"), str) and "parameters" in tool:
        return {"type": "function", "function": tool}
    return tool


def _with_system(messages: list[Message], system: Any) -> list[Message]:
    """The messages, begun by a field's system prompt; an empty one is none. Raises Rejected."""
    if system is None:
        return messages
    if not isinstance(system, str):
        raise Rejected("bad_content", "a system prompt that is not text")
    if not system.strip():
        return messages
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise Rejected("two_system_prompts", "another in the row than in its messages")
        return messages
    return [{"role": "system", "content": system}, *messages]


def _check_order(messages: list[Message], *, unanswered: bool) -> None:
    """What no template has to say: it begins with a prompt, and every answer says something."""
    spoken = [message for message in messages if message["role"] != "system"]
    if not spoken or not any(message["role"] == "user" for message in spoken):
        raise Rejected("no_prompt", "no user message")
    if spoken[0]["role"] != "user":
        raise Rejected("prompt_not_first", f"it begins with {spoken[0]['role']}")
    if not spoken[0]["content"].strip():
        raise Rejected("empty_prompt")
    answers = [message for message in spoken if message["role"] == "assistant"]
    if not answers and not unanswered:
        raise Rejected("no_answer", "no assistant message, and regenerate is not enabled")
    if any(not one["content"].strip() and not one.get("tool_calls") for one in answers):
        raise Rejected("empty_answer")
