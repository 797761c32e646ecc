"""Conversations as they lie in a store: JSON lines, packed by gzip or zstd or not, and Parquet.

What a file is, is told by its first bytes. Lines are split here and decoded one at a time, with
no schema inferred: a wrong line is a row that is rejected, and memory holds one line, or one
batch of a Parquet row group.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from eagle3 import strict_json
from eagle3.conversations.messages import COLUMNS, Rejected
from eagle3.conversations.ranged import RangedFile, answered
from eagle3.errors import ConfigError, ConversationsInvalid
from eagle3.manifest import SourceFile
from eagle3.store import open_store
from eagle3.store.urls import refuse_secrets

_CHUNK = 8 * 2**20
_LONGEST_LINE = 64 * 2**20
_BATCH_ROWS = 256
_BOM = b"\xef\xbb\xbf"
_MAGIC = {b"PAR1": "parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """A row as it was read: a line of JSON, or a record of a Parquet file.

    Attributes:
        place: the line, or the record, counted from 1.
        size: bytes that it took where it was read, about; of records the mean of some.
    """

    place: int
    value: bytes | dict[str, Any]
    size: int = 0

    def record(self) -> dict[str, Any]:
        """The row as a record. Raises Rejected."""
        if isinstance(self.value, dict):
            return self.value
        try:
            found: Any = strict_json.decode(self.value, object)
        except msgspec.DecodeError as error:
            raise Rejected("not_json", str(error)) from error
        if not isinstance(found, dict):
            raise Rejected("not_an_object", type(found).__name__)
        return found


def open_sources(urls: Iterable[str]) -> list[Source]:
    """The files that `prepare.data` names, in that order; each file once.

    The last part of a name may be a pattern such as `*.jsonl`, whose files follow by name.
    Raises ConfigError where nothing is found, and for a file that is named twice.
    """
    sources = [source for url in urls for source in _expanded(url)]
    found = [source.url for source in sources]
    if doubled := [url for url in found if found.count(url) > 1]:
        raise ConfigError(
            "prepare.data", wanted="each file once", found=f"{doubled[0]} twice", remedy="drop one"
        )
    return sources


def _expanded(url: str) -> list[Source]:
    # The store is opened by what stands before the name, and sees no more of the URL.
    refuse_secrets(url)
    parent, _, name = url.rpartition("/")
    if not any(mark in name for mark in "*?["):
        return [Source(url)]
    below = parent or ("/" if url.startswith("/") else ".")
    with answered(url):
        names = [info.path for info in open_store(below).list() if "/" not in info.path]
    matching = fnmatch.filter(names, name)
    if not matching:
        raise ConfigError(
            "prepare.data", wanted="files that match", found=f"none for {url}", remedy="correct it"
        )
    return [Source(f"{below.rstrip('/')}/{match}") for match in matching]


class Source:
    """One file of conversations.

    Args: url: a path or any fsspec URL.

    Raises ConfigError where no file is, ConversationsInvalid for a format that cannot be read.
    """

    def __init__(self, url: str) -> None:
        parent, _, self._name = url.rpartition("/")
        if not self._name or parent.endswith(":/"):
            raise ConfigError("prepare.data", wanted="a file", found=url, remedy="name one")
        root = "/" if url.startswith("/") else "."
        self._store = open_store(parent or root)
        self.url = f"{self._store.url}/{self._name}"
        self._measured: str | None = None
        try:
            with answered(url):
                self._size = self._store.size(self._name)
        except FileNotFoundError as error:
            raise ConfigError(
                "prepare.data", wanted="a file of conversations", found=url, remedy="correct it"
            ) from error
        with answered(url):
            head = self._store.read_range(self._name, 0, 4) if self._size else b""
        self._format = next((f for magic, f in _MAGIC.items() if head.startswith(magic)), "jsonl")
        if self._format == "bzip2":
            raise ConversationsInvalid(
                self.url,
                wanted="JSON lines, as they are or packed with gzip or zstd, or Parquet",
                found=self._format,
                remedy="unpack it, or pack it with one of these",
            )

    def measure(self) -> tuple[SourceFile, int]:
        """(what the manifest records, how many rows there are), by reading the file once."""
        if self._format == "parquet":
            with self._broken_as_invalid():
                rows = pyarrow.parquet.ParquetFile(self._open()).metadata.num_rows
            self._measured = self._sha256()
            return self._facts(self._measured), rows
        digest = hashlib.sha256()
        rows = sum(1 for _ in self._lines(digest))
        self._measured = digest.hexdigest()
        return self._facts(self._measured), rows

    def rows(self, limit: int = sys.maxsize) -> Iterator[RawRow]:
        """The first `limit` rows in order. The file is read to its end all the same.

        Raises ConversationsInvalid for a file that breaks off, or that is no longer the one
        that was measured, which is known when all of it has been read.
        """
        digest = hashlib.sha256()
        every = self._records() if self._format == "parquet" else self._lines(digest)
        for number, row in enumerate(every):
            if number < limit:
                yield row
            elif self._format == "parquet":
                break
        if self._measured is None:
            return
        parquet = self._format == "parquet"
        found = self._sha256() if parquet else digest.hexdigest()
        if self._measured != found:
            raise ConversationsInvalid(
                self.url,
                wanted=f"sha256 {self._measured[:16]}, as when the stage began",
                found=found[:16],
                remedy="run prepare again, on files that nobody is writing",
            )

    def _sha256(self) -> str:
        file = io.BufferedReader(self._open(), _CHUNK)
        return hashlib.file_digest(file, "sha256").hexdigest()

    def _facts(self, sha256: str) -> SourceFile:
        return SourceFile(url=self.url, bytes=self._size, sha256=sha256)

    def _open(self, digest: Any = None) -> RangedFile:
        return RangedFile(self._store, self._name, self._size, digest)

    def _lines(self, digest: Any) -> Iterator[RawRow]:
        file = self._open(digest)
        raw: io.BufferedIOBase = io.BufferedReader(file, _CHUNK)
        stream = raw
        if self._format == "gzip":
            stream = gzip.GzipFile(fileobj=raw)
        elif self._format == "zstd":
            stream = _unpacked(raw)
        place, begins = 0, True
        with self._broken_as_invalid():
            while line := stream.readline(_LONGEST_LINE):
                place += 1
                if len(line) == _LONGEST_LINE:
                    raise ConversationsInvalid(
                        f"{self.url}:{place}",
                        wanted=f"lines below {_LONGEST_LINE // 2**20} MiB",
                        found="a longer one",
                        remedy="write one JSON object a line, not one array of them",
                    )
                text = line.removeprefix(_BOM) if place == 1 else line
                if not text.strip():
                    continue
                if begins and text.lstrip().startswith(b"["):
                    raise ConversationsInvalid(
                        self.url,
                        wanted="one JSON object a line, or Parquet",
                        found="a JSON array",
                        remedy="write each of its elements as a line of its own",
                    )
                begins = False
                yield RawRow(place=place, value=text, size=len(text))
            file.check_ended()

    def _records(self) -> Iterator[RawRow]:
        place = 0
        with self._broken_as_invalid():
            table = pyarrow.parquet.ParquetFile(self._open())
            columns = [name for name in table.schema_arrow.names if name in COLUMNS]
            for batch in table.iter_batches(batch_size=_batch_rows(table), columns=columns):
                size = batch.nbytes // max(batch.num_rows, 1)
                for record in batch.to_pylist():
                    place += 1
                    yield RawRow(place=place, value=_without_nulls(record), size=size)

    def _broken_as_invalid(self) -> _BrokenAsInvalid:
        return _BrokenAsInvalid(self.url)


def _unpacked(packed: io.BufferedIOBase) -> io.BufferedIOBase:
    """The contents of a file packed with zstd, of several frames too."""
    return io.BufferedReader(_ZstdFile(packed), _CHUNK)


class _ZstdFile(io.RawIOBase):
    """pyarrow's unpacking, whose complaints are OSErrors as those of a store are."""

    def __init__(self, packed: io.BufferedIOBase) -> None:
        super().__init__()
        self._packed = packed
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise EOFError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)


def _batch_rows(table: pyarrow.parquet.ParquetFile) -> int:
    """How many rows of this file to have in memory at once."""
    groups = [table.metadata.row_group(at) for at in range(table.metadata.num_row_groups)]
    row = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=1)
    return max(1, min(_BATCH_ROWS, _CHUNK // max(row, 1)))


def _without_nulls(value: Any) -> Any:
    """A record of a Parquet file without the keys that its schema gives to every object."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


class _BrokenAsInvalid:
    """Turns what the formats' readers raise on a cut or altered file into one of our errors."""

    # A column of text may hold bytes that are none.
    _BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, pyarrow.ArrowException, UnicodeDecodeError)

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, self._BROKEN):
            raise ConversationsInvalid(
                self._url,
                wanted="a whole file",
                found=" ".join(str(error).split())[:200],
                remedy="write it again",
            ) from error
