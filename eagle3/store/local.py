"""Writing on a local disk so that a file is seen whole or not at all, and created once.

fsspec's own local file system writes in place, and its exclusive mode looks before it writes;
both would let a reader or a second writer see half a file.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial-"
_COPY_CHUNK = 8 * 2**20


def write(target: Path, data: bytes, *, exclusive: bool) -> None:
    """Write bytes to a path. Raises FileExistsError when exclusive and the path is taken."""
    _publish(target, lambda stream: _write_all(stream, data), exclusive=exclusive)


def copy(source: Path, target: Path, *, exclusive: bool) -> None:
    """Copy a finished file to a path, under the same promise as `write`."""
    with source.open("rb") as origin:
        _publish(
            target,
            lambda stream: shutil.copyfileobj(origin, stream, _COPY_CHUNK),
            exclusive=exclusive,
        )


def is_partial(path: str) -> bool:
    """Whether a file is what a killed writer left behind, which no listing shows."""
    return posixpath.basename(path).startswith(_PARTIAL)


def tidy(root: Path) -> None:
    """Remove what killed writers left below a folder, and every folder that is empty then."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            if is_partial(name):
                Path(folder, name).unlink(missing_ok=True)
        if not any(Path(folder).iterdir()):
            Path(folder).rmdir()


def _write_all(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)


def _publish(target: Path, fill: Callable[[BinaryIO], None], *, exclusive: bool) -> None:
    """Fill a temporary file beside the target, fsync, then link (fails if taken) or rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        if exclusive:
            os.link(partial, target)
        else:
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
