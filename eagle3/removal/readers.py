"""Who still needs what would be deleted: committed artefacts, and stages that are making some.

A stage at work reads its inputs to its end, days later, and its claim names them by their digests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.errors import Eagle3Error, StillNeeded, TemporaryFailure, UpstreamMissing
from eagle3.manifest import MANIFEST_NAME, InputRef
from eagle3.progress import SILENT_SECONDS, read_progress
from eagle3.removal.targets import Target, parent_of, place_of
from eagle3.stages import ARTIFACT_KINDS, STAGES, Stage, stage_named
from eagle3.store import Store, open_store
from eagle3.work import CLAIM_NAME, REMOVAL_NAME, Claim, Work

# Requests in flight, each of one small object.
_AT_ONCE = 16
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A stage of a run that has claimed its prefix and committed nothing yet."""

    run: Store
    stage: Stage
    claim: Claim

    @property
    def output(self) -> Store:
        """Where its artefact will be."""
        return self.run.child(self.stage.writes[-1])


@dataclass(frozen=True, kw_only=True)
class Readers:
    """All that was looked at."""

    committed: Sequence[Artifact]
    begun: Sequence[Begun]


def find_readers(run: Store, kinds: Sequence[str], also: Sequence[str]) -> Readers:
    """What may rest on these artefacts of a run: beside them, in sibling runs, and `also`.

    Raises UpstreamMissing for a prefix of `also` that holds nothing of a run.
    """
    places = [run.child(kind) for kind in ARTIFACT_KINDS if kind not in kinds]
    runs = [run]
    above, own = parent_of(run)
    if above is not None:
        siblings = [above.child(name) for name in above.folders() if name != own]
        places += [sibling.child(kind) for sibling in siblings for kind in ARTIFACT_KINDS]
        runs += siblings
    committed, begun = _committed(places), _begun(runs)
    for url in also:
        store = open_store(url)
        below = [store, *(store.child(name) for name in store.folders())]
        named = _committed([place for one in below for place in _places(one)]), _begun(below)
        if not any(named):
            raise UpstreamMissing(
                f"--also {store.url}",
                wanted="an artefact, a run, or a folder of runs",
                found="no manifest and no claim in any of their places",
                remedy="correct the URL, since what it was to protect was not looked at",
            )
        committed, begun = committed + named[0], begun + named[1]
    going = {place_of(run.child(kind)) for kind in kinds}
    return Readers(
        committed=[one for one in committed if place_of(one.store) not in going],
        begun=[one for one in begun if place_of(one.output) not in going],
    )


def _places(store: Store) -> list[Store]:
    """Where an artefact lies if the prefix is one, and where they lie if it is a run."""
    return [store, *(store.child(kind) for kind in ARTIFACT_KINDS)]


def _committed(places: Sequence[Store]) -> list[Artifact]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [found for found in pool.map(artifacts.find, places) if found is not None]


def _begun(runs: Sequence[Store]) -> list[Begun]:
    pairs = [(run, stage) for run in runs for stage in STAGES]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [found for found in pool.map(_begun_at, pairs) if found is not None]


def _begun_at(place: tuple[Store, Stage]) -> Begun | None:
    run, stage = place
    claim = Work(run, stage.name).standing()
    if claim is None or not _is_unfinished(run, stage):
        return None
    return Begun(run=run, stage=stage, claim=claim)


def _is_unfinished(run: Store, stage: Stage) -> bool:
    return not run.exists(f"{stage.writes[-1]}/{MANIFEST_NAME}")


def refuse_at_work(run: Store, names: Iterable[str]) -> None:
    """Raises TemporaryFailure where a process may be at work on one of the stages.

    One that loads an engine reports nothing, of a large verifier for many minutes: a claim without
    any report may be its.
    """
    for stage in map(stage_named, names):
        if not _is_unfinished(run, stage):
            continue
        last = max(read_progress(run, stage.name), key=lambda one: one.updated_at, default=None)
        seconds = time.time() - last.updated_at if last else 0.0
        if last is not None and seconds < SILENT_SECONDS:
            found = f"one that did {max(seconds, 0):.0f} s ago, on {last.host}"
        elif last is None and _is_claimed(run, stage):
            found = "a claim, and no report of any process yet, as while an engine is loaded"
        else:
            continue
        raise TemporaryFailure(
            run.child(stage.writes[-1]).url,
            wanted=f"no process at work on it, so none that reported in {SILENT_SECONDS:.0f} s",
            found=found,
            remedy="stop it first, or wait; where you know that all are stopped, give --stopped",
        )


def _is_claimed(run: Store, stage: Stage) -> bool:
    """Whether a claim stands that a process may be at work under: none is during a deletion."""
    work = run.child(f"work/{stage.name}")
    return work.exists(CLAIM_NAME) and not work.exists(REMOVAL_NAME)


def refuse_needed(targets: Sequence[Target], readers: Readers) -> None:
    """Raises StillNeeded for the first target that something rests on."""
    for target in targets:
        needed_by = [
            *(
                f"{one.manifest.artifact} in {one.store.url}"
                for one in readers.committed
                if _rests(one, target, targets)
            ),
            *(
                f"unfinished {one.stage.name} in {one.output.url}"
                for one in readers.begun
                if _reads(one, target, targets)
            ),
        ]
        if needed_by:
            more = len(needed_by) - _MOST_NAMED
            raise StillNeeded(
                target.store.url,
                wanted="no artefact that rests on it, nor one that is being made from it",
                found=", ".join(needed_by[:_MOST_NAMED])
                + (f" and {more} more" if more > 0 else ""),
                remedy="keep it, or delete those first",
            )


def _rests(other: Artifact, target: Target, targets: Sequence[Target]) -> bool:
    """Whether a committed artefact was made from this one, and from no copy that stays."""
    if _same_stage_needs(other, target):
        return True
    place = place_of(target.store)
    for ref in other.manifest.inputs.values():
        here = place_of(open_store(ref.url)) == place
        if here and target.digest in ("", ref.digest):
            return True
        if target.digest == ref.digest and not _stands_elsewhere(ref, targets):
            return True
    return False


def _reads(begun: Begun, target: Target, targets: Sequence[Target]) -> bool:
    """Whether an unfinished stage reads this one, and has no copy in its own run that stays."""
    if not ({target.digest, target.identity} - {""}) & {*begun.claim.inputs.values()}:
        return False
    if place_of(begun.run) == place_of(target.run):
        return True
    own = InputRef(artifact=target.kind, url=begun.run.child(target.kind).url, digest=target.digest)
    return not _stands_elsewhere(own, targets)


def _same_stage_needs(other: Artifact, target: Target) -> bool:
    """A stage that writes two artefacts commits the first one before the last, and never again
    once the last one stands."""
    writes = target.stage.writes
    beside = place_of(other.store) == place_of(target.store).removesuffix(target.kind) + writes[-1]
    return beside and target.kind != writes[-1]


def _stands_elsewhere(ref: InputRef, targets: Sequence[Target]) -> bool:
    """Whether the copy that a consumer read still stands and is none that goes now."""
    store = open_store(ref.url)
    if place_of(store) in {place_of(target.store) for target in targets}:
        return False
    try:
        found = artifacts.find(store)
    except Eagle3Error:
        return False
    return found is not None and found.digest == ref.digest
