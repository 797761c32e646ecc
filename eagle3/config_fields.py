"""What a configuration's fields say of themselves: name, meaning, unit, what they can change."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from eagle3.errors import ConfigError


def settings_that_affect(section: msgspec.Struct) -> dict[str, Any]:
    """The fields of a section that can change what its stage writes, nested ones included."""
    chosen: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        meta = field_meta(field)
        if not meta["affects"]:
            continue
        value = getattr(section, field.name)
        if isinstance(value, dict):
            value = {key: below for key, below in value.items() if key not in meta["but"]}
        chosen[field.name] = (
            settings_that_affect(value)
            if isinstance(value, msgspec.Struct)
            else msgspec.to_builtins(value)
        )
    return chosen


def field_meta(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    """`text`, `unit`, `affects` and `but` of a field, from its annotation."""
    info = msgspec.inspect.type_info(field.type)
    while not isinstance(info, msgspec.inspect.Metadata):
        return {"text": "", "unit": "", "affects": True, "but": ()}
    extra = info.extra or {}
    schema = info.extra_json_schema or {}
    return {
        "text": schema.get("description", ""),
        "unit": extra.get("unit", ""),
        "affects": extra.get("affects", True),
        "but": extra.get("but", ()),
    }


def refuse_unknown(raw: Mapping[Any, Any], section: type[msgspec.Struct], where: str = "") -> None:
    """Raises ConfigError for a key that no field has, here or in a section below.

    Args: where: the path of this section, with its last dot.
    """
    fields = {field.name: field for field in msgspec.structs.fields(section)}
    for key, value in raw.items():
        name = f"{where}{key}"
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.4)
            hint = f"write {where}{near[0]}" if near else f"remove it; known: {', '.join(fields)}"
            raise ConfigError(name, wanted="a known field", found="an unknown one", remedy=hint)
        below = _section_of(fields[key])
        if below is not None and isinstance(value, dict):
            refuse_unknown(value, below, f"{name}.")


def _section_of(field: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | None:
    info = msgspec.inspect.type_info(field.type)
    if isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    return info.cls if isinstance(info, msgspec.inspect.StructType) else None
