"""Units shared out among workers who know nothing of each other, and the rows of each read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from eagle3.manifest import FileEntry
from eagle3.progress import Progress
from eagle3.units.cutting import Unit, other_rows
from eagle3.work import Work

T = TypeVar("T")


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
                raise other_rows(path, f"{self._samples[path]} rows", len(values))
            self._path, self._values = path, values
        return self._values
