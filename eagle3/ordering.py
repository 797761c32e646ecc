"""Which stage of a run may get its Job now: decided from what is there, never from what happened.

The truth is the store's manifests and the Jobs' own state. Two records in the store, each created
exclusively, stand for what cannot be seen later: one before a Job is created, so that a run's
prefix has one orderer's Jobs only, and one when the Job is known to be there. A Job that is
missing was never made without the second, and has vanished with it; that one is not made again
by itself. (Between a Job's creation and its second record lie milliseconds; a Job that somebody
deletes just then is taken for one that was never made.)
"""

from __future__ import annotations

from enum import Enum

import msgspec

from eagle3 import strict_json
from eagle3.errors import IdentityConflict, ManifestInvalid, UpstreamMissing
from eagle3.stages import Stage
from eagle3.store import Store

_INTENDED, _MADE = "job-intended.json", "job-made.json"


class JobState(Enum):
    """How a Job stands. A complete one has done its work only if the manifest is there."""

    MISSING = "missing"
    ACTIVE = "active"
    COMPLETE = "complete"
    FAILED = "failed"


class Act(Enum):
    """What is to be done for a stage."""

    NOTHING = "nothing, its artefacts are committed"
    MAKE = "record that its Job will be made, and make it"
    LOOK = "see how its Job is going"
    MISS = "say that its Job is gone"


def decide(*, committed: bool, made: bool, job: JobState) -> Act:
    """What is to be done for a stage whose upstream passes the gate. Pure.

    Args:
        committed: whether the manifests of all that it writes are there; asked after `job`.
        made: whether it is recorded that its Job was there.
        job: how its Job stands.
    """
    if committed:
        return Act.NOTHING
    if job is not JobState.MISSING:
        return Act.LOOK
    return Act.MISS if made else Act.MAKE


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Job that an orderer was about to make, or found made."""

    job: str
    namespace: str
    uid: str = ""


class JobRecords:
    """The two records of a stage's Job, in the run's store under `work/<stage>/`."""

    def __init__(self, run: Store, stage: Stage) -> None:
        self._store = run.child(f"work/{stage.name}")
        self._stage = stage

    def made(self) -> JobRecord | None:
        """The Job that was known to be there. Raises ManifestInvalid."""
        return self._read(_MADE)

    def known(self) -> bool:
        """Whether either record stands here, damaged ones too."""
        return any(self._store.exists(name) for name in (_INTENDED, _MADE))

    def expect(self, ours: JobRecord) -> None:
        """Raises IdentityConflict where the Job of another run is recorded here."""
        standing = self._read(_INTENDED)
        if standing and (standing.job, standing.namespace) != (ours.job, ours.namespace):
            raise IdentityConflict(
                f"{self._store.url}/{_INTENDED}",
                wanted=f"job {ours.job} in the namespace {ours.namespace}",
                found=f"job {standing.job} in {standing.namespace}",
                remedy="give each run a prefix of its own",
            )

    def intend(self, record: JobRecord) -> None:
        """Record the Job that is about to be made, or find the same recorded.

        Raises IdentityConflict as `expect`.
        """
        self._create(_INTENDED, record)
        self.expect(record)

    def note(self, record: JobRecord) -> None:
        """Record that the Job is there; which one was first noted stays."""
        self._create(_MADE, record)

    def forget(self) -> None:
        """Delete both, so that the stage gets a Job again: for a person who has looked."""
        for name in (_MADE, _INTENDED):
            if self._store.exists(name):
                self._store.delete(name)

    def cancel(self) -> None:
        """Delete the record that the Job is there, so that one that is gone is made again."""
        if self._store.exists(_MADE):
            self._store.delete(_MADE)

    def vanished(self) -> UpstreamMissing:
        """The error of a Job that was there and is not."""
        record = self.made() or JobRecord(job="", namespace="")
        return UpstreamMissing(
            f"{self._stage.name}: job {record.job}",
            wanted=f"the one that was made (uid {record.uid})",
            found="none, and no manifest",
            remedy=f"see who deleted it; `eagle3 retry {self._stage.name}` has it made again",
        )

    def _create(self, name: str, record: JobRecord) -> None:
        try:
            self._store.create_bytes(name, msgspec.json.encode(record))
        except FileExistsError:
            return

    def _read(self, name: str) -> JobRecord | None:
        try:
            data = self._store.read_bytes(name)
        except FileNotFoundError:
            return None
        try:
            return strict_json.decode(data, JobRecord)
        except msgspec.DecodeError as error:
            raise ManifestInvalid(
                f"{self._store.url}/{name}",
                wanted="the record of a Job",
                found=error,
                remedy=f"look at the Job, then `eagle3 retry {self._stage.name}`",
            ) from error
