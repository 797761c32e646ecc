"""What the records of all units add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from eagle3.errors import ManifestInvalid
from eagle3.manifest import Manifest
from eagle3.units.cutting import Unit
from eagle3.work import UnitRecord

K = TypeVar("K", str, int)
N = TypeVar("N", int, float)


def merge(
    kind: str, identity: str, units: Sequence[Unit], records: Mapping[int, UnitRecord]
) -> Manifest:
    """The manifest that the records of all units add up to; facts of the kind are still missing.

    Pure, and independent of the order in which units were done. `facts` and `measured` hold the
    sums over the records' own.

    Raises ManifestInvalid when a unit has no record, when a record is of no unit, or when a
    record's rows do not add up.
    """
    _check_records(f"work/{kind}/{identity[:16]}/units", units, records)
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


def _check_records(where: str, units: Sequence[Unit], records: Mapping[int, UnitRecord]) -> None:
    numbers = {unit.number for unit in units}
    if numbers != set(records):
        missing, strange = sorted(numbers - set(records)), sorted(set(records) - numbers)
        raise ManifestInvalid(
            where,
            wanted=f"one record for each of {len(units)} units",
            found=f"none for {missing[:3]}" if missing else f"records of no unit, {strange[:3]}",
            remedy="run the stage again" if missing else "give the run a prefix of its own",
        )
    for unit in units:
        record = records[unit.number]
        rejected = sum(record.rejected.values())
        if record.rows_in != record.rows_kept + rejected or record.rows_in > unit.num_rows:
            raise ManifestInvalid(
                f"{where}/{unit.number:06d}.json",
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
