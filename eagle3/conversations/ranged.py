"""A file of conversations read by ranges, and what the hub says no by."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from httpx2 import HTTPError

from eagle3.errors import ConfigError, ConversationsInvalid, ServiceUnavailable
from eagle3.store import Store

# What the hub answers for a repository that is not there, or not for this token.
_NO = (401, 403, 404)


@contextlib.contextmanager
def answered(url: str) -> Iterator[None]:
    """What the hub says no by, which is no OSError of a kind that a store tells from others."""
    try:
        yield
    except ServiceUnavailable as error:
        status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if not isinstance(error.__cause__, HTTPError) or status not in _NO:
            raise
        raise ConfigError(
            f"prepare.data: {url}",
            wanted="a data set of the hub that HF_TOKEN may read",
            found=f"{type(error.__cause__).__name__}, status {status}",
            remedy="correct the name, or set HF_TOKEN",
        ) from error


class RangedFile(io.RawIOBase):
    """A file in a store as Python sees files, read by ranged requests, hashed when asked to."""

    def __init__(self, store: Store, path: str, size: int, digest: Any) -> None:
        super().__init__()
        self._store, self._path, self._size, self._digest = store, path, size, digest
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def check_ended(self) -> None:
        """All of it has been read, and hashed. Raises ConversationsInvalid."""
        if self._at != self._size:
            raise ConversationsInvalid(
                f"{self._store.url}/{self._path}",
                wanted=f"rows to its end, {self._size} bytes",
                found=f"an end after {self._at}",
                remedy="write it again",
            )

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        with answered(f"{self._store.url}/{self._path}"):
            data = self._store.read_range(self._path, self._at, end) if end > self._at else b""
        if len(data) != max(end - self._at, 0):
            raise ConversationsInvalid(
                f"{self._store.url}/{self._path}",
                wanted=f"the {end - self._at} bytes from byte {self._at}",
                found=f"{len(data)} bytes",
                remedy="name a copy in a store that gives ranges, and that nobody is writing",
            )
        if self._digest is not None:
            self._digest.update(data)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
