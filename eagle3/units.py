"""Work units: cutting an input into them, sharing them out, and merging what they left behind.

A unit is cut from the input alone (its manifest, and where a limit asks for them the lengths of
its rows), so every worker and every restart cuts the same ones and names its objects the same
way. Merging is a pure function of the unit records: whoever sees the last unit done may do it,
and any number of workers doing it get the same manifest.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from eagle3.artifact import Artifact
from eagle3.errors import ManifestInvalid, ShardInvalid
from eagle3.manifest import FileEntry, Manifest
from eagle3.progress import Progress
from eagle3.shards import ShardReader, TokenRow, decode_rows, header_sha256_of
from eagle3.store import Store
from eagle3.work import UnitRecord, Work

T = TypeVar("T")
K = TypeVar("K", str, int)
N = TypeVar("N", int, float)

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
        raise _other_rows(
            f"{store.url}/{entry.path}",
            f"{entry.samples} rows of {entry.tokens} tokens",
            f"{len(lengths)} of {sum(lengths)}",
        )
    return lengths


def _other_rows(where: str, wanted: str, found: object) -> ShardInvalid:
    return ShardInvalid(
        where,
        wanted=f"{wanted}, as its manifest says",
        found=found,
        remedy="run the stage that wrote it again under a prefix of its own",
    )


def walk_units(
    units: Sequence[Unit], work: Work, progress: Progress, worker: int
) -> Iterator[Unit]:
    """The open units of a worker, see `open_units`; each counts as done when the next is asked for.

    Units that others finish count as resumed, at the latest when their turn comes.
    """
    finished = work.finished_units()
    rows = {unit.number: unit.num_rows for unit in units}
    progress.advance(sum(rows[number] for number in finished & rows.keys()), resumed=True)

    def is_finished(number: int) -> bool:
        if number in finished or not work.is_finished(number):
            return number in finished
        progress.advance(rows[number], resumed=True)
        return True

    for unit in open_units(units, is_finished, worker):
        yield unit
        progress.advance(unit.num_rows)


def open_units(
    units: Sequence[Unit], is_finished: Callable[[int], bool], worker: int
) -> Iterator[Unit]:
    """The units that are still to be done, in this worker's order, each asked for just before.

    Worker 0 takes the natural order. Others take a random order of their own, seeded by their
    index, so that workers who know nothing of each other seldom meet in one unit.

    Args:
        is_finished: whether a unit's record is there by now.
        worker: the index of this worker.
    """
    order = list(units)
    if worker:
        random.Random(worker).shuffle(order)
    for unit in order:
        if not is_finished(unit.number):
            yield unit


class UnitReader(Generic[T]):
    """Reads what the rows of a unit are; the object read last is kept, for the next unit's sake."""

    def __init__(self, read: Callable[[str], Sequence[T]], files: Iterable[FileEntry]) -> None:
        """Args:
        read: reads a whole object by the path of its shard, one value a row.
        files: the manifest's entries, whose counts every object is held against.
        """
        self._read = read
        self._samples = {entry.path: entry.samples for entry in files}
        self._path = ""
        self._values: Sequence[T] = ()

    def read(self, unit: Unit) -> list[T]:
        """One value for each row of the unit, in order. Raises ShardInvalid."""
        return [
            value for span in unit.spans for value in self._all(span.path)[span.start : span.stop]
        ]

    def _all(self, path: str) -> Sequence[T]:
        if self._path != path:
            values = self._read(path)
            if len(values) != self._samples[path]:
                raise _other_rows(path, f"{self._samples[path]} rows", len(values))
            self._path, self._values = path, values
        return self._values


class WrittenUnit(NamedTuple):
    """A unit's object: its entry, the token rows that it holds, and whether we found it there."""

    entry: FileEntry
    rows: Sequence[TokenRow]
    adopted: bool


def write_unit(store: Store, path: str, data: bytes, rows: Sequence[TokenRow]) -> WrittenUnit:
    """Create a unit's shard, or adopt the one that stands there without a record.

    A worker that was killed between the object and its record, or one that is at the same unit,
    may have left other bytes: an engine on other hardware rounds differently. Those stand, since
    an object is never replaced, and the record is made from what they hold.

    Args:
        rows: the token rows that `data` holds.

    Raises ShardInvalid for a standing object that is no shard.
    """
    try:
        store.create_bytes(path, data)
    except FileExistsError:
        return adopt_unit(store, path)
    return WrittenUnit(_entry_of(path, data, rows), rows, adopted=False)


def adopt_unit(store: Store, path: str) -> WrittenUnit:
    """A unit's object that another worker left. Raises ShardInvalid where it is no shard."""
    rows = decode_rows(data := store.read_bytes(path), path)
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


def merge(
    kind: str, identity: str, units: Sequence[Unit], records: Mapping[int, UnitRecord]
) -> Manifest:
    """The manifest that the records of all units add up to; facts of the kind are still missing.

    Pure, and independent of the order in which units were done. `facts` and `measured` hold the
    sums over the records' own.

    Raises ManifestInvalid when a unit has no record, when a record is of no unit, or when a
    record's rows do not add up.
    """
    _check_records(kind, units, records)
    done = [records[unit.number] for unit in units]
    files = sorted((entry for record in done for entry in record.files), key=lambda f: f.path)
    return Manifest(
        artifact=kind,
        identity=identity,
        files=tuple(files),
        rows_in=sum(record.rows_in for record in done),
        rows_kept=sum(record.rows_kept for record in done),
        rejected=_sum(record.rejected for record in done),
        total_samples=sum(entry.samples for entry in files),
        total_tokens=sum(entry.tokens for entry in files),
        facts=_sum(record.facts for record in done),
        measured=_sum(record.measured for record in done),
    )


def merge_token_counts(records: Iterable[UnitRecord]) -> dict[int, int]:
    """Supervised tokens of all units: token id -> count, ids ascending."""
    return _sum(record.token_counts for record in records)


def _check_records(kind: str, units: Sequence[Unit], records: Mapping[int, UnitRecord]) -> None:
    numbers = {unit.number for unit in units}
    if numbers != set(records):
        missing, strange = sorted(numbers - set(records)), sorted(set(records) - numbers)
        raise ManifestInvalid(
            f"work/{kind}/units",
            wanted=f"one record for each of {len(units)} units",
            found=f"none for {missing[:3]}" if missing else f"records of no unit, {strange[:3]}",
            remedy="run the stage again" if missing else "give the run a prefix of its own",
        )
    for unit in units:
        record = records[unit.number]
        rejected = sum(record.rejected.values())
        if record.rows_in != record.rows_kept + rejected or record.rows_in > unit.num_rows:
            raise ManifestInvalid(
                f"work/{kind}/units/{unit.number:06d}.json",
                wanted=f"rows_in = rows_kept + rejected, of {unit.num_rows} rows",
                found=f"{record.rows_in}, {record.rows_kept} and {rejected}",
                remedy="delete it and its objects, and run the stage again",
            )


def _sum(parts: Iterable[Mapping[K, N]]) -> dict[K, N]:
    total: dict[K, N] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return {key: total[key] for key in sorted(total)}
