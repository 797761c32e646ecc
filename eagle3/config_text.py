"""A configuration as YAML for a person: every field with its meaning, its unit and its choices.

What is printed can be given back: it parses to the configuration it was made from.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import msgspec
import yaml

from eagle3.config import PrepareConfig, RunConfig, VerifierConfig
from eagle3.config_fields import field_meta

_WIDTH = 98
_INDENT = "  "


def render(config: RunConfig) -> str:
    """The whole configuration, resolved, a comment above each field."""
    return "\n".join(_section(config, "")).lstrip("\n") + "\n"


def template() -> str:
    """Every field at its default; the two that have none carry an example and say so."""
    example = RunConfig(
        verifier=VerifierConfig(source="organisation/model"),
        prepare=PrepareConfig(data=("s3://bucket/conversations.jsonl",)),
    )
    return render(example)


def _section(section: msgspec.Struct, indent: str) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if not indent:
            yield ""
        if isinstance(value, msgspec.Struct):
            yield from _comment(field_meta(field)["text"], indent)
            yield f"{indent}{field.name}:"
            yield from _section(value, indent + _INDENT)
        else:
            yield from _comment(_meaning(field), indent)
            yield f"{indent}{field.name}: {_inline(value)}"


def _meaning(field: msgspec.structs.FieldInfo) -> str:
    meta = field_meta(field)
    parts = [f"{meta['text']} ({meta['unit']})" if meta["unit"] else meta["text"]]
    if choices := _choices(msgspec.inspect.type_info(field.type)):
        parts.append(f"one of {', '.join(choices)}")
    if not meta["affects"]:
        parts.append("free to change when a run goes on")
    if field.required:
        parts.append("required")
    return "; ".join(parts)


def _choices(info: msgspec.inspect.Type) -> list[str]:
    if isinstance(info, msgspec.inspect.Metadata):
        return _choices(info.type)
    if isinstance(info, msgspec.inspect.LiteralType):
        return [str(value) for value in info.values]
    return []


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"


def _inline(value: object) -> str:
    plain = msgspec.to_builtins(value)
    text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6)
    # A lone scalar is followed by the end-of-document mark.
    return text.removesuffix("...\n").strip()
