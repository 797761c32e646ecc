"""A unit's object: created, or found there and adopted, and written beside the engine."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from eagle3.manifest import FileEntry
from eagle3.shards import TokenRow, decode_rows, header_of, header_sha256_of
from eagle3.store import Store
from eagle3.work import UnitRecord


class WrittenUnit(NamedTuple):
    """A unit's object: its entry, the token rows that it holds, and whether we found it there."""

    entry: FileEntry
    rows: Sequence[TokenRow]
    adopted: bool


def write_unit(
    store: Store, path: str, data: bytes, rows: Sequence[TokenRow], *, identity: str
) -> WrittenUnit:
    """Create a unit's shard, or adopt the one that stands there without a record.

    A worker that was killed between the object and its record, or one that is at the same unit,
    may have left other bytes: an engine on other hardware rounds differently. Those stand, since
    an object is never replaced, and the record is made from what they hold.

    Args:
        rows: the token rows that `data` holds.
        identity: that of the inputs and settings which `data` was made with, and names.

    Raises as `adopt_unit`.
    """
    try:
        store.create_bytes(path, data)
    except FileExistsError:
        return adopt_unit(store, path, identity=identity)
    return WrittenUnit(_entry_of(path, data, rows), rows, adopted=False)


def adopt_unit(store: Store, path: str, *, identity: str) -> WrittenUnit:
    """A unit's object that another worker of the same inputs and settings left.

    Raises ShardInvalid where it is no shard, IdentityConflict where it is one of other settings:
    rows, shapes and numbers of those look the same.
    """
    header_of(data := store.read_bytes(path), path).refuse_other(identity, f"{store.url}/{path}")
    rows = decode_rows(data, path)
    return WrittenUnit(_entry_of(path, data, rows), rows, adopted=True)


def _entry_of(path: str, data: bytes, rows: Sequence[TokenRow]) -> FileEntry:
    return FileEntry(
        path=path,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        samples=len(rows),
        tokens=sum(len(row.input_ids) for row in rows),
        header_sha256=header_sha256_of(data),
    )


class Writers:
    """Writes units beside the engine, few at a time, since each holds a unit in memory.

    A context manager: leaving it waits for what was handed over. The first error of a write
    comes up at the next `submit`, or on leaving.
    """

    def __init__(self, limit: int) -> None:
        """Args: limit: writes at a time; `submit` waits when they are all busy."""
        self._limit = limit
        self._pool = ThreadPoolExecutor(limit)
        self._running: deque[Future[UnitRecord]] = deque()

    def __enter__(self) -> Writers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            self._wait_down_to(0)

    def submit(self, write: Callable[[], UnitRecord]) -> None:
        """Have a unit written and recorded."""
        self._wait_down_to(self._limit - 1)
        self._running.append(self._pool.submit(write))

    def _wait_down_to(self, count: int) -> None:
        while len(self._running) > count:
            self._running.popleft().result()
