"""The JSON Schema of `data_config.json`, from the structs: `python -m eagle3.manifest.schema FILE`.

It says of the form what `decode` asks of it, and of a newer writer's fields nothing. What goes
over several fields (the seal, sums, an index's bytes) no schema says: `decode` checks it.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

from eagle3.manifest.fields import FORMAT_VERSION, Manifest
from eagle3.stages import ARTIFACT_KINDS


class _Stored(Manifest, frozen=True, kw_only=True, omit_defaults=True):
    """A manifest as it lies in a store."""

    seal: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def manifest_schema() -> dict[str, Any]:
    """The schema, of JSON Schema's draft 2020-12."""
    schema: dict[str, Any] = msgspec.json.schema(_Stored)
    stored = schema["$defs"].pop("_Stored")
    stored["title"] = f"data_config.json, version {FORMAT_VERSION}"
    stored["description"] = inspect.cleandoc(Manifest.__doc__ or "")
    stored["required"] = sorted({*stored["required"], "data_format_version"})
    stored["properties"]["data_format_version"] = {"const": FORMAT_VERSION}
    stored["properties"]["artifact"] = {"enum": list(ARTIFACT_KINDS)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **stored,
        "$defs": {
            name: {**part, "description": inspect.cleandoc(part["description"])}
            for name, part in schema["$defs"].items()
        },
    }


def main() -> None:
    """Write the schema into the file that the argument names."""
    text = json.dumps(manifest_schema(), indent=2) + "\n"
    Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
