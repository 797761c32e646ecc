"""A manifest as it lies in a store: JSON with a seal, and past many objects an index beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from eagle3 import strict_json
from eagle3.errors import ManifestInvalid
from eagle3.manifest.checks import check, is_below
from eagle3.manifest.fields import FORMAT_VERSION, FileEntry, FileIndex, Manifest
from eagle3.manifest.seal import sealed, unseal


def encode(manifest: Manifest) -> bytes:
    """The manifest as it lies in a store: indented JSON, keys sorted, sealed.

    The version is always written, although it has a default, since readers of every version
    look at it first.
    """
    record = msgspec.to_builtins(manifest)
    record["data_format_version"] = manifest.data_format_version
    return sealed(record)


def split(manifest: Manifest) -> tuple[Manifest, bytes]:
    """A manifest as it is stored past MOST_INLINE objects, and the bytes of its index.

    The same objects give the same index under the same name.
    """
    encoder = msgspec.json.Encoder(order="sorted")
    lines = b"".join(encoder.encode(entry) + b"\n" for entry in manifest.files)
    sha256 = hashlib.sha256(lines).hexdigest()
    index = FileIndex(
        path=f"files-{sha256[:16]}.jsonl",
        bytes=len(lines),
        sha256=sha256,
        objects=len(manifest.files),
    )
    return msgspec.structs.replace(manifest, files=(), index=index), lines


def decode(data: bytes, where: str, read: Callable[[str], bytes] | None = None) -> Manifest:
    """Read and check a manifest.

    Args:
        where: names it in an error.
        read: the bytes of an object beside it, for an index. Raises FileNotFoundError.

    Raises ManifestInvalid for anything that is no whole manifest of this version.
    """
    head = _record(data, where)
    unseal(head, data, where)
    try:
        manifest = msgspec.convert(head, Manifest)
    except msgspec.ValidationError as error:
        raise ManifestInvalid(
            where,
            wanted="a whole manifest",
            found=error,
            remedy="run the stage that wrote it again",
        ) from error
    if manifest.index is not None:
        files = _indexed(manifest, manifest.index, where, read)
        manifest = msgspec.structs.replace(manifest, files=files, index=None)
    check(manifest, where)
    return manifest


def _record(data: bytes, where: str) -> dict[str, Any]:
    """What the bytes say, of the version that can be read here. Raises ManifestInvalid."""
    try:
        record = strict_json.decode(data, dict[str, Any])
    except msgspec.DecodeError as error:
        raise ManifestInvalid(
            where, wanted="a JSON object", found=error, remedy="run the stage that wrote it again"
        ) from error
    version = record.get("data_format_version")
    if version == 1:
        raise ManifestInvalid(
            f"{where}: data_format_version",
            wanted=FORMAT_VERSION,
            found="1, whose layer ids follow another convention",
            remedy="take it over with `eagle3 import`; version 1 is never read in place",
        )
    if version != FORMAT_VERSION:
        raise ManifestInvalid(
            f"{where}: data_format_version",
            wanted=f"the number {FORMAT_VERSION}",
            found=repr(version)[:80],
            remedy="use the version of eagle3 that wrote it",
        )
    return record


def _indexed(
    manifest: Manifest, index: FileIndex, where: str, read: Callable[[str], bytes] | None
) -> tuple[FileEntry, ...]:
    """The entries of an index, whose bytes are proven first. Raises ManifestInvalid."""
    try:
        readable = read is not None and is_below(index.path) and "/" not in index.path
        lines = read(index.path) if read is not None and readable else b""
        found = (len(lines), lines.count(b"\n"), hashlib.sha256(lines).hexdigest())
        if found != (index.bytes, index.objects, index.sha256):
            raise FileNotFoundError(f"{found[0]} bytes of {found[1]} objects, or other ones")
        if manifest.files:
            raise FileNotFoundError(f"{len(manifest.files)} objects named beside it")
        # Line by line: dicts of a hundred thousand entries would take many times the memory.
        return tuple(strict_json.decode_lines(lines, FileEntry))
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise ManifestInvalid(
            f"{where}: index",
            wanted=f"{index.path}, {index.bytes} bytes, {index.objects} objects",
            found=error,
            remedy="run the stage that wrote it again under a prefix of its own",
        ) from error
