"""The seal of a manifest: a hash of its own bytes, written into them.

It finds any byte of a manifest that was changed by accident: by a disk, a copy, an editor, a
script. It is no signature, since whoever means to change a manifest can seal it again.

The value of `seal` is the sha256 of the file with those 64 digits written as zeros. It is over
the bytes as they lie there, so that a reader proves fields that it does not know as well.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from eagle3.errors import ManifestInvalid

FIELD = "seal"
_UNSET = b"0" * 64
_DIGITS = re.compile(r"[0-9a-f]{64}")
# Two spaces deep, so at the top; a string cannot hold this, since JSON has no bare line breaks.
_WRITTEN = b'\n  "seal": "'


def sealed(record: Mapping[str, Any]) -> bytes:
    """A manifest's record as it lies in a store: indented JSON, keys sorted, a line break, sealed.

    Args: record: JSON-like; a seal in it is replaced.
    """
    plain = msgspec.json.encode({**record, FIELD: _UNSET.decode()}, order="sorted")
    text = msgspec.json.format(plain, indent=2) + b"\n"
    head, rest = text.split(_WRITTEN + _UNSET)
    return head + _WRITTEN + hashlib.sha256(text).hexdigest().encode() + rest


def unseal(record: Mapping[str, Any], data: bytes, where: str) -> None:
    """Prove that no byte of a manifest has changed since it was written.

    Args:
        record: what its bytes say.
        where: names it in an error.

    Raises ManifestInvalid naming the seal, what it had to be and what it is.
    """
    seal = record.get(FIELD)
    found, wanted = repr(seal)[:80] if FIELD in record else "none", "the sha256 of its bytes"
    if isinstance(seal, str) and _DIGITS.fullmatch(seal) and data.count(seal.encode()) == 1:
        wanted = hashlib.sha256(data.replace(seal.encode(), _UNSET)).hexdigest()
        if seal == wanted:
            return
        wanted, found = f"{wanted[:16]}, the sha256 of its bytes", f"{seal[:16]}, of other bytes"
    raise ManifestInvalid(
        f"{where}: {FIELD}",
        wanted=wanted,
        found=found,
        remedy="put back the bytes that the stage wrote, or run it again under a prefix of its own",
    )
