"""Units: every row in exactly one, whoever works and in whatever order they finish."""

import itertools
import random
import secrets

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.artifact import Artifact
from eagle3.errors import ManifestInvalid, ShardInvalid
from eagle3.manifest import FileEntry, Manifest, check
from eagle3.progress import Progress
from eagle3.shards import TokenRow, encode_rows
from eagle3.store import Store, open_store
from eagle3.units import (
    Unit,
    cut_units,
    longest_row,
    merge,
    merge_token_counts,
    open_units,
    row_lengths,
    walk_units,
    write_unit,
)
from eagle3.work import UnitRecord, Work

sample_counts = st.lists(st.integers(0, 40), max_size=8)


def entries(samples: list[int]) -> list[FileEntry]:
    return [
        FileEntry(path=f"rows-{number:06d}.safetensors", bytes=1, sha256="0", samples=count)
        for number, count in enumerate(samples)
    ]


def rows_of(units: list[Unit] | tuple[Unit, ...]) -> list[tuple[str, int]]:
    return [
        (span.path, row)
        for unit in units
        for span in unit.spans
        for row in range(span.start, span.stop)
    ]


def record_of(unit: Unit, seed: int = 0) -> UnitRecord:
    """What a worker might leave of a unit: a function of the unit and a seed alone."""
    draw = random.Random(f"{seed}-{unit.number}")
    rejected = draw.randint(0, unit.num_rows)
    kept = unit.num_rows - rejected
    path = f"hidden-{unit.number:06d}.safetensors"
    files = FileEntry(
        path=path, bytes=kept * 8, sha256=f"{unit.number}", samples=kept, tokens=5 * kept
    )
    return UnitRecord(
        unit=unit.number,
        rows_in=unit.num_rows,
        rows_kept=kept,
        files=(files,) if kept else (),
        rejected={"non_finite": rejected} if rejected else {},
        facts={"clipped": draw.randint(0, 3)},
        token_counts={draw.randint(0, 5): draw.randint(1, 9)},
        measured={"seconds": 1.0},
    )


@given(samples=sample_counts, unit_rows=st.integers(1, 50))
def test_every_row_is_in_exactly_one_unit_and_in_order(samples: list[int], unit_rows: int) -> None:
    files = entries(samples)
    units = cut_units(files, unit_rows)
    assert rows_of(units) == [(file.path, row) for file in files for row in range(file.samples)]
    assert [unit.number for unit in units] == list(range(len(units)))
    assert all(unit.num_rows == unit_rows for unit in units[:-1])
    assert all(0 < unit.num_rows <= unit_rows for unit in units)


@given(
    objects=st.lists(st.lists(st.integers(1, 60), max_size=12), max_size=6),
    unit_rows=st.integers(1, 10),
    unit_tokens=st.integers(1, 100),
)
def test_no_unit_has_more_tokens_than_allowed_unless_it_is_one_row(
    objects: list[list[int]], unit_rows: int, unit_tokens: int
) -> None:
    files = entries([len(lengths) for lengths in objects])
    lengths = {file.path: tokens for file, tokens in zip(files, objects, strict=True)}
    units = cut_units(files, unit_rows, unit_tokens=unit_tokens, lengths=lengths)
    assert rows_of(units) == [(file.path, row) for file in files for row in range(file.samples)]
    sizes = [[lengths[path][row] for path, row in rows_of([unit])] for unit in units]
    assert all(sum(size) <= unit_tokens or len(size) == 1 for size in sizes)
    assert all(len(size) <= unit_rows for size in sizes)
    # None could take the first row of the next one too.
    for size, following in itertools.pairwise(sizes):
        assert len(size) == unit_rows or sum(size) + following[0] > unit_tokens


def claimed(store: Store, stage: str) -> Work:
    work = Work(store, stage)
    work.claim({}, {})
    return work


def token_rows(lengths: list[int], **fields: object) -> Artifact:
    """A committed artefact of one shard with rows of these lengths."""
    store = open_store(f"memory://test-units/{secrets.token_hex(4)}/prepare")
    rows = [
        TokenRow(row=f"{number:09d}.0", input_ids=torch.arange(n), loss_mask=torch.ones(n).long())
        for number, n in enumerate(lengths)
    ]
    data = encode_rows(rows, identity="i")
    written = write_unit(store, "rows-000000.safetensors", data, rows, identity="i")
    return Artifact(store=store, manifest=manifest_of((written.entry,), **fields))


def manifest_of(files: tuple[FileEntry, ...], **fields: object) -> Manifest:
    return Manifest(artifact="prepare", identity="i", files=files, **fields)


def test_the_lengths_of_rows_are_read_from_the_objects_headers() -> None:
    rows = token_rows([5, 3, 900])
    assert row_lengths(rows) == {"rows-000000.safetensors": [5, 3, 900]}


def test_lengths_that_are_not_those_of_the_manifest_are_refused() -> None:
    rows = token_rows([5, 3])
    (entry,) = rows.manifest.files
    other = msgspec.structs.replace(entry, tokens=9)
    with pytest.raises(ShardInvalid, match=r"2 rows of 9 tokens.*found 2 of 8"):
        row_lengths(Artifact(store=rows.store, manifest=manifest_of((other,))))


def test_rows_without_a_longest_one_are_refused() -> None:
    assert longest_row(token_rows([5], max_seq_len=64)) == 64
    with pytest.raises(ManifestInvalid, match="max_seq_len"):
        longest_row(token_rows([5]))


def test_a_walk_counts_what_others_did_before_and_meanwhile_and_each_unit_when_it_is_done() -> None:
    store = open_store(f"memory://test-units/{secrets.token_hex(4)}")
    work, units = claimed(store, "extract"), cut_units(entries([10]), 4)
    work.record(record_of(units[0]))
    shown = []
    with Progress(store, "extract", "capture", total=10, unit="rows") as progress:
        walk = walk_units(units, work, progress, 0)
        for unit in walk:
            shown.append((unit.number, progress.done))
            if unit.number == 1:
                work.record(record_of(units[2]))
        assert progress.done == 10
    assert shown == [(1, 4)]


@given(
    samples=sample_counts,
    unit_rows=st.integers(1, 10),
    workers=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
    seed=st.integers(0, 2**16),
)
def test_any_workers_in_any_interleaving_leave_one_manifest(
    samples: list[int], unit_rows: int, workers: list[int], seed: int
) -> None:
    units = cut_units(entries(samples), unit_rows)
    records: dict[int, UnitRecord] = {}
    walks = [open_units(units, records.__contains__, worker) for worker in workers]
    draw = random.Random(seed)
    while walks:
        walk = draw.choice(walks)
        unit = next(walk, None)
        if unit is None:
            walks.remove(walk)
        else:
            records.setdefault(unit.number, record_of(unit))
    expected = {unit.number: record_of(unit) for unit in units}
    assert merge("extract", "id", units, records) == merge("extract", "id", units, expected)
    assert merge_token_counts(records.values()) == merge_token_counts(expected.values())
    check(merge("extract", "id", units, records), "here")


@given(samples=sample_counts, unit_rows=st.integers(1, 10), worker=st.integers(0, 5))
def test_a_worker_alone_does_every_open_unit_once(
    samples: list[int], unit_rows: int, worker: int
) -> None:
    units = cut_units(entries(samples), unit_rows)
    done = {unit.number for unit in units if unit.number % 3 == 0}
    walked = [unit.number for unit in open_units(units, done.__contains__, worker)]
    assert sorted(walked) == [unit.number for unit in units if unit.number % 3]


def test_the_first_worker_takes_the_natural_order_and_another_does_not() -> None:
    units = cut_units(entries([100]), 1)
    first = [unit.number for unit in open_units(units, lambda _: False, 0)]
    second = [unit.number for unit in open_units(units, lambda _: False, 1)]
    assert first == list(range(100))
    assert second != first
    assert sorted(second) == first


@pytest.mark.fault("B76")
def test_a_unit_without_a_record_is_no_manifest() -> None:
    units = cut_units(entries([10]), 4)
    records = {unit.number: record_of(unit) for unit in units[:-1]}
    with pytest.raises(ManifestInvalid, match=r"none for \[2\]"):
        merge("extract", "id", units, records)


def test_a_record_of_no_unit_is_refused() -> None:
    units = cut_units(entries([4]), 4)
    records = {unit.number: record_of(unit) for unit in cut_units(entries([8]), 4)}
    with pytest.raises(ManifestInvalid, match=r"records of no unit, \[1\]"):
        merge("extract", "id", units, records)


@pytest.mark.parametrize(("rows_in", "kept"), [(4, 3), (5, 5)])
def test_rows_in_must_be_rows_kept_plus_rejected_of_the_unit(rows_in: int, kept: int) -> None:
    units = cut_units(entries([4]), 4)
    record = UnitRecord(unit=0, rows_in=rows_in, rows_kept=kept)
    with pytest.raises(ManifestInvalid, match="rows_in = rows_kept"):
        merge("extract", "id", units, {0: record})


def test_an_input_without_rows_has_no_units_and_an_empty_manifest() -> None:
    assert cut_units(entries([0, 0]), 4) == ()
    assert merge("extract", "id", (), {}).files == ()


def test_records_survive_the_store_with_their_token_counts() -> None:
    work = claimed(open_store("memory://test-units/records"), "regenerate")
    unit = cut_units(entries([6]), 6)[0]
    assert not work.is_finished(unit.number)
    work.record(record_of(unit))
    assert work.is_finished(unit.number)
    assert work.finished() == {0: record_of(unit)}


def test_of_two_records_of_a_unit_the_first_stands() -> None:
    work = claimed(open_store("memory://test-units/two"), "extract")
    unit = cut_units(entries([6]), 6)[0]
    first, second = record_of(unit, seed=1), record_of(unit, seed=2)
    assert first != second
    assert work.record(first) == first
    assert work.record(second) == first
    assert work.finished() == {0: first}
