"""What the fields of a configuration say of themselves: meaning, unit, and what they can change."""

from __future__ import annotations

from typing import Any

import msgspec


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
