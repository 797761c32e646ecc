"""Writing on a local disk so that a file is seen whole or not at all, and created once.

fsspec's own local file system writes in place, and its exclusive mode looks before it writes;
both would let a reader or a second writer see half a file.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial-"
_ATTEMPTS = 20
_COPY_CHUNK = 8 * 2**20
# A living writer's temporary file was changed just now; it is linked seconds after its last byte.
_ABANDONED_SECONDS = 300.0


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
    """Remove what killed writers left below a folder, and every folder that is empty then.

    A temporary file that was written to a moment ago may be a living writer's, and stays.
    """
    for folder, _, names in os.walk(root, topdown=False):
        for path in (Path(folder, name) for name in names if is_partial(name)):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
        # A writer may come between the look and the deed, or have gone with the folder.
        with contextlib.suppress(OSError):
            if not any(Path(folder).iterdir()):
                Path(folder).rmdir()


def _write_all(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)


def _new(path: Path) -> BinaryIO:
    """A new file, its folders made again where `tidy` took the empty ones in between."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("xb")
    return path.open("xb")


def _publish(target: Path, fill: Callable[[BinaryIO], None], *, exclusive: bool) -> None:
    """Fill a temporary file beside the target, fsync, then link (fails if taken) or rename."""
    partial = target.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
    try:
        with _new(partial) as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        if exclusive:
            os.link(partial, target)
        else:
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
