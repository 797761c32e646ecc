"""What a manifest's content is, whoever did the work, and whose work a prefix holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from eagle3.manifest.fields import FileEntry, Manifest

# Where and when work was done does not change what it is: none of these enter the digest.
# `config` is left out because `identity` stands for the part of it that affects the result.
_NOT_IN_DIGEST = frozenset(
    {
        "created_at",
        "produced_by",
        "config",
        "index",
        "measured",
        "model_path",
        "total_time_seconds",
        "tp_size",
    }
)


def digest(manifest: Manifest) -> str:
    """Content digest: sha256 over canonical JSON without times, urls, rates and versions.

    The same work done again, or elsewhere, has the same digest.
    """
    record = {k: v for k, v in msgspec.to_builtins(manifest).items() if k not in _NOT_IN_DIGEST}
    record["data_format_version"] = manifest.data_format_version
    record["files"] = [
        {"path": entry["path"]} if entry.get("timed") else entry for entry in record["files"]
    ]
    for part in [*record.get("inputs", {}).values(), *record.get("sources", ())]:
        part.pop("url", None)
    (record.get("verifier") or {}).pop("commit", None)
    return hashlib.sha256(msgspec.json.encode(record, order="sorted")).hexdigest()


def identity_of(inputs: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """Hash that decides whether work is reused: upstream digests and result-affecting settings.

    Args:
        inputs: input name -> content digest.
        settings: field name -> value, JSON-like.
    """
    record = {"inputs": dict(inputs), "settings": dict(settings)}
    return hashlib.sha256(msgspec.json.encode(record, order="sorted")).hexdigest()


def totals(entries: Iterable[FileEntry]) -> tuple[int, int]:
    """(samples, tokens) over objects."""
    entries = list(entries)
    return sum(e.samples for e in entries), sum(e.tokens for e in entries)
