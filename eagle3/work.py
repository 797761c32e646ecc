"""Unfinished work of a stage: who owns the prefix, which units are done, how it goes.

Work lies beside the artefacts, never inside them: `work/<stage>/` holds the claim, and below it
`<identity>/`, the first 16 digits of the claim's, all that was done under it: a record for each
finished unit, what workers measured once, checkpoints, answers. A process may be taken for dead,
its work deleted and the prefix claimed for other settings: when it wakes, what it writes lies
elsewhere, and it finds that its claim is gone. `progress/<stage>-<index>.json` is what the process
reports. A unit is cut from the input alone, so every worker and every restart cuts the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from eagle3 import strict_json
from eagle3.errors import IdentityConflict, ManifestInvalid, TemporaryFailure
from eagle3.manifest import FileEntry, identity_of
from eagle3.store import Store

T = TypeVar("T")

CLAIM_NAME = "claim.json"
# Stands while a deletion of the stage's work is going on, or was cut off.
REMOVAL_NAME = "removal.json"
_UNITS = "units"
_RECORD = re.compile(rf"{_UNITS}/([0-9]{{6}}|[1-9][0-9]{{6,}})\.json")
# Records are small, and a run may have ten thousand of them: requests at a time.
_READERS = 16


class UnitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finished unit: the objects it wrote, and its part of the manifest's counts.

    Attributes:
        unit: its number, from 0.
        files: the objects written; none when every row was rejected.
        token_counts: supervised tokens of the unit, token id -> count, where the stage counts.
        measured: seconds and the like, summed over units; never part of a digest.
    """

    unit: int
    rows_in: int
    rows_kept: int
    files: tuple[FileEntry, ...] = ()
    rejected: dict[str, int] = {}
    facts: dict[str, int] = {}
    token_counts: dict[int, int] = {}
    measured: dict[str, float] = {}


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """For what a prefix was begun: input name -> content digest, and the settings that affect."""

    inputs: dict[str, str]
    settings: dict[str, Any]

    @property
    def identity(self) -> str:
        """What they come to; see `eagle3.manifest.identity_of`."""
        return identity_of(self.inputs, self.settings)


class Work:
    """The claim and the unit records of one stage in a run's store."""

    def __init__(self, run: Store, stage: str) -> None:
        self._store = run.child(f"work/{stage}")
        self._run_url = run.url
        self._stage = stage
        self._identity = ""

    @property
    def identity(self) -> str:
        """That of this process's claim, or of the one that stands; empty where there is none."""
        if self._identity:
            return self._identity
        standing = self.standing()
        return standing.identity if standing else ""

    @property
    def own(self) -> Store:
        """The prefix of what is done under the claim, and under no other."""
        return self._store.child(self.identity[:16] or "unclaimed")

    def claim(self, inputs: dict[str, str], settings: dict[str, Any]) -> str:
        """Take the stage's prefix for these inputs and settings, or find it taken by the same.

        Args:
            inputs: input name -> content digest.
            settings: result-affecting settings, nested mappings allowed.

        Returns the identity, by the claim that stands: one that was made before a setting came to
        be says the same as one where it is null. Raises IdentityConflict naming the first field
        that differs, ManifestInvalid for a damaged claim, and TemporaryFailure while the work that
        stands here is being deleted.
        """
        self._refuse_removal()
        ours = Claim(inputs=inputs, settings=settings)
        data = msgspec.json.encode(ours, order="sorted")
        try:
            self._store.create_bytes(CLAIM_NAME, data)
        except FileExistsError:
            standing = self.standing()
            if standing is None:
                raise self._vanished(CLAIM_NAME) from None
            # Both as JSON has them: a tuple of ours would differ from the same list read back.
            self._refuse(strict_json.decode(data, dict[str, Any]), msgspec.to_builtins(standing))
            ours = standing
        self._identity = ours.identity
        return self._identity

    def standing(self) -> Claim | None:
        """The claim that stands here, whoever's it is. Raises ManifestInvalid for a damaged one."""
        try:
            data = self._store.read_bytes(CLAIM_NAME)
        except FileNotFoundError:
            return None
        try:
            return strict_json.decode(data, Claim)
        except msgspec.DecodeError as error:
            wanted = "the inputs and settings with which this prefix was begun"
            remedy = "give the run a --store prefix of its own, since they are lost here"
            raise _damaged(f"{self._store.url}/{CLAIM_NAME}", wanted, error, remedy) from error

    def check_held(self) -> None:
        """This process's claim stands, and nobody is deleting what was done under it.

        Asked before each object of a unit, each record and the commit. Raises IdentityConflict
        where it was deleted or is another's now, and TemporaryFailure while it is being deleted.
        """
        assert self._identity, "a stage claims its prefix before it works"
        self._refuse_removal()
        standing = self.standing()
        if standing is None or standing.identity != self._identity:
            raise IdentityConflict(
                f"{self._store.url}/{CLAIM_NAME}",
                wanted=f"the claim under which this process began, {self._identity[:16]}",
                found=f"one of {standing.identity[:16]}" if standing else "none",
                remedy="see who deleted it while this process was at work; what it did is not used",
            )

    def finished(self) -> dict[int, UnitRecord]:
        """The records of the units that are done, by number. Raises ManifestInvalid."""
        paths = [_record_path(unit) for unit in sorted(self.finished_units())]
        with ThreadPoolExecutor(_READERS) as readers:
            return {record.unit: record for record in readers.map(self._read, paths)}

    def finished_units(self) -> frozenset[int]:
        """The numbers of the units that are done, by one listing.

        An object of another name is none of ours, such as the mark of a folder that some tools
        leave, and tells nothing of any unit.
        """
        found = (_RECORD.fullmatch(info.path) for info in self.own.list(_UNITS))
        return frozenset(int(match[1]) for match in found if match)

    def is_finished(self, unit: int) -> bool:
        """Whether a unit's record is there by now, by one request."""
        return self.own.exists(_record_path(unit))

    def record(self, record: UnitRecord) -> UnitRecord:
        """Mark a unit done. Where another worker was first, its record stands and is returned.

        Raises as `check_held`.
        """
        self.check_held()
        path = _record_path(record.unit)
        try:
            plain = msgspec.to_builtins(record, str_keys=True)
            self.own.create_bytes(path, msgspec.json.encode(plain, order="sorted"))
        except FileExistsError:
            return self._read(path)
        return record

    def keep_figures(self, name: str, worker: int, figures: Mapping[str, float]) -> None:
        """Keep what a worker measured once, in place of what it measured before, if it did."""
        self.own.write_bytes(f"{name}/{worker:06d}.json", msgspec.json.encode(figures))

    def kept_figures(self, name: str, *, required: str = "") -> list[dict[str, float]]:
        """What the workers kept by this name, in the order of their indices.

        Args: required: a figure that each of them must have kept.

        Raises ManifestInvalid.
        """
        paths = sorted(info.path for info in self.own.list(name))
        kept = [self._decoded(path, dict[str, float], "figures") for path in paths]
        for path, figures in zip(paths, kept, strict=True):
            if required and required not in figures:
                raise ManifestInvalid(
                    f"{self.own.url}/{path}",
                    wanted=f"the figure {required}",
                    found=", ".join(figures) or "none",
                    remedy="delete it and run again",
                )
        return kept

    def _read(self, path: str) -> UnitRecord:
        return self._decoded(path, UnitRecord, "a unit record")

    def _decoded(self, path: str, kind: type[T], wanted: str) -> T:
        try:
            return strict_json.decode(self.own.read_bytes(path), kind)
        except FileNotFoundError as error:
            raise self._vanished(path) from error
        except msgspec.DecodeError as error:
            raise _damaged(f"{self.own.url}/{path}", wanted, error) from error

    def _vanished(self, path: str) -> TemporaryFailure:
        return TemporaryFailure(
            f"{self._store.url}: {path}",
            wanted="work that nobody deletes",
            found="an object that was there and is not",
            remedy="see who deletes it, and run again",
        )

    def _refuse_removal(self) -> None:
        if self._store.exists(REMOVAL_NAME):
            raise TemporaryFailure(
                f"{self._store.url}/{REMOVAL_NAME}",
                wanted="no deletion of this stage's work",
                found="one that has begun",
                remedy="let `eagle3 delete` finish, or give the command again if it was cut off",
            )

    def _refuse(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        mine, standing = _flat(ours), _flat(theirs)
        for field in sorted(mine.keys() | standing.keys()):
            if mine.get(field) != standing.get(field):
                name = field.removeprefix("settings.")
                raise IdentityConflict(
                    f"{self._stage}: {name}",
                    wanted=f"{standing.get(field)}, with which this prefix was begun",
                    found=mine.get(field),
                    remedy=f"set it back, or begin a new run: {new_run(self._run_url)}",
                )


def new_run(run_url: str) -> str:
    """The command that begins a run of other inputs or settings, under a prefix beside a run's."""
    return f"`eagle3 run --config FILE --store {run_url}-2`"


def _damaged(
    where: str, wanted: str, found: object, remedy: str = "delete it and run again"
) -> ManifestInvalid:
    return ManifestInvalid(where, wanted=wanted, found=found, remedy=remedy)


def _record_path(unit: int) -> str:
    return f"{_UNITS}/{unit:06d}.json"


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    """Nested mappings as dotted field names, so that two claims compare field by field."""
    if not isinstance(value, dict) or not value:
        return {where: value}
    fields: dict[str, Any] = {}
    for key, below in value.items():
        fields.update(_flat(below, f"{where}.{key}" if where else str(key)))
    return fields
