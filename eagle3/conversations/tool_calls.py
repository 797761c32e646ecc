"""How a chat template wants tool calls, found out by rendering one in every way there is.

Each wrong way is silent in some published template: an object printed as Python prints it, a
text quoted a second time, a call left out because its message has content, or has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eagle3.conversations.messages import Message, Rejected

_KEY = "probe_key"
_CONTENT = "probe content"
_QUESTION: Message = {"role": "user", "content": "probe question"}


@dataclass(frozen=True, kw_only=True)
class ToolStyle:
    """The way of one template.

    Attributes:
        as_text: arguments are JSON text; else an object.
        empty_as_null: the content of a message that only calls is null; else an empty text.
        beside_content: whether a message may call and say something.
    """

    as_text: bool
    empty_as_null: bool
    beside_content: bool = False

    def spell(self, message: Message) -> Message:
        """A normalised message with tool calls as this template wants it. Raises Rejected."""
        if message["content"].strip() and not self.beside_content:
            raise Rejected("tool_calls_unsupported", "the template drops them beside content")
        calls = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            if self.as_text:
                function["arguments"] = msgspec.json.encode(function["arguments"]).decode()
            calls.append({**call, "function": function})
        content = message["content"] or (None if self.empty_as_null else "")
        return {**message, "content": content, "tool_calls": calls}


def find_tool_style(render: Callable[[Sequence[Message]], str]) -> ToolStyle | None:
    """The first way in which a call survives, objects before text; None where none does.

    Args: render: messages as they are to text; raises Rejected.
    """
    for as_text in (False, True):
        for empty_as_null in (False, True):
            style = ToolStyle(as_text=as_text, empty_as_null=empty_as_null)
            if _survives(render, style, ""):
                both = ToolStyle(as_text=as_text, empty_as_null=empty_as_null, beside_content=True)
                return both if _survives(render, both, _CONTENT) else style
    return None


def _survives(render: Callable[[Sequence[Message]], str], style: ToolStyle, content: str) -> bool:
    call: dict[str, Any] = {
        "type": "function",
        "id": "probe",
        "function": {"name": "probe", "arguments": {_KEY: "probe value"}},
    }
    answer: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    try:
        text = render([_QUESTION, style.spell(answer)])
    except Rejected:
        return False
    spoilt = f"'{_KEY}'" in text or f'\\"{_KEY}' in text
    return _KEY in text and content in text and not spoilt
