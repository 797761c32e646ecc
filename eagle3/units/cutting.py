"""An input's rows cut into units, from its manifest and the lengths of its rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eagle3.artifact import Artifact
from eagle3.errors import ManifestInvalid, ShardInvalid
from eagle3.manifest import FileEntry
from eagle3.shards import ShardReader
from eagle3.store import Store

# Headers are small, and an input may have thousands of objects: requests at a time.
_READERS = 16


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows `start` to `stop` (exclusive) of one object of the input."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Consecutive rows of the input, which may come from several of its objects."""

    number: int
    spans: tuple[Span, ...]

    @property
    def num_rows(self) -> int:
        """How many rows of the input it covers."""
        return sum(span.stop - span.start for span in self.spans)


def cut_units(
    files: Iterable[FileEntry],
    unit_rows: int,
    *,
    unit_tokens: int = 0,
    lengths: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Unit, ...]:
    """Cut the rows of an artefact, in the order of its manifest, into units of `unit_rows`.

    The last unit may be smaller. Objects without samples are passed over.

    Args:
        unit_tokens: with `lengths`, the most tokens in a unit; a row that is longer makes a unit
            of its own.
        lengths: path -> the tokens of each of its rows, see `row_lengths`.
    """
    units: list[Unit] = []
    spans: list[Span] = []
    rows = tokens = 0
    for entry in files:
        start = 0
        for at in range(entry.samples):
            length = lengths[entry.path][at] if lengths else 0
            if rows == unit_rows or (rows and tokens + length > unit_tokens):
                _add_span(spans, entry.path, start, at)
                units.append(Unit(number=len(units), spans=tuple(spans)))
                spans, start, rows, tokens = [], at, 0, 0
            rows, tokens = rows + 1, tokens + length
        _add_span(spans, entry.path, start, entry.samples)
    if spans:
        units.append(Unit(number=len(units), spans=tuple(spans)))
    return tuple(units)


def _add_span(spans: list[Span], path: str, start: int, stop: int) -> None:
    if start < stop:
        spans.append(Span(path=path, start=start, stop=stop))


def longest_row(rows: Artifact) -> int:
    """The longest row that token rows may have, in tokens. Raises ManifestInvalid."""
    if rows.manifest.max_seq_len is None:
        raise ManifestInvalid(
            f"{rows.store.url}: max_seq_len",
            wanted="the longest row allowed",
            found="none",
            remedy="run prepare again under a prefix of its own",
        )
    return rows.manifest.max_seq_len


def row_lengths(rows: Artifact) -> dict[str, list[int]]:
    """The tokens of each row, by object, from the objects' headers alone.

    Raises ShardInvalid for an object whose rows or tokens are not those of its manifest.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        entries = [entry for entry in rows.manifest.files if entry.samples]
        found = readers.map(lambda entry: _lengths_in(rows.store, entry), entries)
        return {entry.path: lengths for entry, lengths in zip(entries, found, strict=True)}


def _lengths_in(store: Store, entry: FileEntry) -> list[int]:
    lengths = [ref.num_tokens for ref in ShardReader(store, entry.path).refs()]
    if (len(lengths), sum(lengths)) != (entry.samples, entry.tokens):
        raise other_rows(
            f"{store.url}/{entry.path}",
            f"{entry.samples} rows of {entry.tokens} tokens",
            f"{len(lengths)} of {sum(lengths)}",
        )
    return lengths


def other_rows(where: str, wanted: str, found: object) -> ShardInvalid:
    """The error of an object that holds other rows than its manifest says."""
    return ShardInvalid(
        where,
        wanted=f"{wanted}, as its manifest says",
        found=found,
        remedy="run the stage that wrote it again under a prefix of its own",
    )
