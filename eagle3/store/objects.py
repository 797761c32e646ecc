"""What is said of one object: its place in a listing, its hash, and whether it is only a trial."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

PROBE = ".probe-"


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One object in a listing: its path below the store's prefix, and its size in bytes."""

    path: str
    bytes: int


def is_probe(path: str) -> bool:
    """Whether an object is what `Store.probe` writes, and a killed process left behind."""
    return path.startswith(PROBE) and "/" not in path


def sha256_of_file(path: Path) -> str:
    """Hash of a local file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
