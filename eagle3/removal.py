"""Deleting an artefact or a whole run: only what nothing rests on, and never by halves unseen.

The manifest goes first, so that a deletion that is killed leaves no artefact that claims to be
whole; then its objects, then the stage's progress and work. A record beside the work says that a
deletion has begun, and goes last: by it the next one knows the objects for what they are.
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    ManifestInvalid,
    StillNeeded,
    TemporaryFailure,
    UpstreamMissing,
)
from eagle3.manifest import MANIFEST_NAME, InputRef
from eagle3.progress import read_progress
from eagle3.stages import ARTIFACT_KINDS, STAGES, Stage
from eagle3.store import ObjectInfo, Store, open_store

CLAIM, RECORD = "claim.json", "removal.json"
# What `eagle3 run` leaves in a run's prefix beside its stages' folders.
_OF_THE_RUN = ("summary.json",)
# Requests in flight, each of one small object.
_AT_ONCE = 16
_MOST_NAMED = 5
# Processes report every ten seconds while they work.
_SILENT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """An artefact that would go, whether or not its manifest still stands or can be read.

    `digest` is empty where it cannot: consumers are then known by the URL alone.
    """

    kind: str
    store: Store
    committed: bool
    digest: str

    @property
    def stage(self) -> Stage:
        """The stage that writes it."""
        return next(stage for stage in STAGES if self.kind in stage.writes)


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What a deletion takes away; all paths are relative to the run.

    Attributes:
        targets: the artefacts, each before those that it was made from.
        objects: below the artefacts' prefixes, manifests included.
        work: progress, claims and records of stages that nothing is left of.
        left: what lies in the run's prefix and is no run's; it stays. Whole runs only.
    """

    run: Store
    whole: bool
    targets: tuple[Target, ...]
    objects: tuple[ObjectInfo, ...]
    work: tuple[ObjectInfo, ...]
    left: tuple[ObjectInfo, ...]

    @property
    def num_objects(self) -> int:
        """All that would go."""
        return len(self.objects) + len(self.work)

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(info.bytes for info in (*self.objects, *self.work))


def plan_removal(url: str, also: Sequence[str] = ()) -> Removal:
    """What deleting an artefact, or a run with all its artefacts, comes to. Deletes nothing.

    Args:
        url: the prefix of either.
        also: prefixes of further artefacts, runs or folders of runs. Besides these, the rest of
            the run and the runs beside it are asked what they were made from; others are not.

    Raises StillNeeded naming the artefacts that rest on it, UpstreamMissing where nothing of a
    run lies there, TemporaryFailure where a process is at work on it, and ManifestInvalid for a
    damaged manifest elsewhere, since nobody can tell then.
    """
    run, kinds = _named(url)
    targets = tuple(_target(run, kind) for kind in reversed(ARTIFACT_KINDS) if kind in kinds)
    for target in targets:
        _refuse_at_work(run, target)
    _refuse_needed(targets, _others(run, kinds, also))
    whole = open_store(url).url == run.url
    gone = [stage for stage in STAGES if _nothing_left(run, stage, kinds)]
    objects, work, left = [], [], []
    for info in _listing(run, targets, whole=whole):
        if info.path.split("/")[0] in kinds:
            objects.append(info)
        elif _is_work(info.path, gone) or (whole and info.path in _OF_THE_RUN):
            work.append(info)
        elif whole:
            left.append(info)
    return Removal(
        run=run,
        whole=whole,
        targets=targets,
        objects=tuple(objects),
        work=tuple(work),
        left=tuple(left),
    )


def remove(removal: Removal, told: Callable[[int], None]) -> None:
    """Delete what `plan_removal` found, in an order that may be cut off anywhere.

    Args: told: hears how many objects are gone, after each batch.
    """
    run = removal.run
    records = [f"work/{target.stage.name}/{RECORD}" for target in removal.targets]
    for path in dict.fromkeys(records):
        run.write_bytes(path, b"{}\n")
    manifests = [f"{target.kind}/{MANIFEST_NAME}" for target in removal.targets]
    standing = {info.path for info in (*removal.objects, *removal.work)}
    for path in manifests:
        run.delete(path)
        told(int(path in standing))
    _delete(run, (info.path for info in removal.objects if info.path not in manifests), told)
    claims = [info.path for info in removal.work if info.path.endswith(f"/{CLAIM}")]
    last = {*claims, *records}
    _delete(run, (info.path for info in removal.work if info.path not in last), told)
    _delete(run, claims, told)
    for path in dict.fromkeys(records):
        run.delete(path)
        told(int(path in standing))
    folders = [*(target.kind for target in removal.targets), *map(posixpath.dirname, records)]
    for name in folders:
        run.child(name).tidy()
    if removal.whole and not removal.left:
        run.tidy()


def _delete(run: Store, paths: Iterable[str], told: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(run.delete, paths):
            told(1)


def _named(url: str) -> tuple[Store, tuple[str, ...]]:
    """The run, and the kinds of its artefacts that a URL names: one of them, or all."""
    store = open_store(url)
    above, name = _parent(store)
    if above is not None and name in ARTIFACT_KINDS and _was_begun(above, name):
        return above, (name,)
    if store.exists(MANIFEST_NAME):
        raise ConfigError(
            store.url,
            wanted="an artefact below its run, in the folder of its kind",
            found="an artefact by itself, of which nobody knows the run",
            remedy="delete it with the store's own tools, if nothing reads it",
        )
    kinds = tuple(kind for kind in ARTIFACT_KINDS if _was_begun(store, kind))
    if not kinds:
        raise UpstreamMissing(
            store.url,
            wanted="an artefact, or a run that holds or held one",
            found="neither a manifest nor the claim of a stage",
            remedy="correct the URL",
        )
    return store, kinds


def _was_begun(run: Store, kind: str) -> bool:
    """Whether what lies below `kind/` is a run's: committed, claimed, or half deleted."""
    stage = next(stage.name for stage in STAGES if kind in stage.writes)
    paths = (f"{kind}/{MANIFEST_NAME}", f"work/{stage}/{CLAIM}", f"work/{stage}/{RECORD}")
    return any(run.exists(path) for path in paths)


def _parent(store: Store) -> tuple[Store | None, str]:
    """The prefix above, where there is one, and this one's name in it."""
    above, _, name = store.url.rpartition("/")
    return (None if above.endswith("/") else open_store(above)), name


def _target(run: Store, kind: str) -> Target:
    store = run.child(kind)
    try:
        found = artifacts.find(store)
    except ManifestInvalid:
        return Target(kind=kind, store=store, committed=True, digest="")
    digest = found.digest if found else ""
    return Target(kind=kind, store=store, committed=found is not None, digest=digest)


def _others(run: Store, kinds: Sequence[str], also: Sequence[str]) -> list[Artifact]:
    """The committed artefacts that may rest on these: beside them, in sibling runs, and `also`.

    Raises UpstreamMissing for a prefix of `also` that holds none.
    """
    places = [run.child(kind) for kind in ARTIFACT_KINDS if kind not in kinds]
    above, own = _parent(run)
    if above is not None:
        for name in above.folders():
            if name != own:
                places += [above.child(f"{name}/{kind}") for kind in ARTIFACT_KINDS]
    found = _committed(places)
    for url in also:
        store = open_store(url)
        below = [place for name in store.folders() for place in _places(store.child(name))]
        named = _committed([*_places(store), *below])
        if not named:
            raise UpstreamMissing(
                f"--also {store.url}",
                wanted="an artefact, a run, or a folder of runs",
                found="no manifest in any of their places",
                remedy="correct the URL, since what it was to protect was not looked at",
            )
        found += named
    targets = {_place(run.child(kind)) for kind in kinds}
    return [artifact for artifact in found if _place(artifact.store) not in targets]


def _places(store: Store) -> list[Store]:
    """Where an artefact lies if the prefix is one, and where they lie if it is a run."""
    return [store, *(store.child(kind) for kind in ARTIFACT_KINDS)]


def _committed(places: Sequence[Store]) -> list[Artifact]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [found for found in pool.map(artifacts.find, places) if found is not None]


def _refuse_at_work(run: Store, target: Target) -> None:
    """Raises TemporaryFailure where an unfinished stage has reported its progress just now."""
    if target.committed:
        return
    reports = read_progress(run, target.stage.name)
    seconds = min((time.time() - one.updated_at for one in reports), default=_SILENT_SECONDS)
    if seconds < _SILENT_SECONDS:
        raise TemporaryFailure(
            target.store.url,
            wanted=f"no process at work on it, so none that reported in {_SILENT_SECONDS:.0f} s",
            found=f"one that did {max(seconds, 0):.0f} s ago, on {reports[0].host}",
            remedy="stop it first, or wait",
        )


def _refuse_needed(targets: Sequence[Target], others: Sequence[Artifact]) -> None:
    """Raises StillNeeded for the first target that something rests on."""
    for target in targets:
        needed_by = [other for other in others if _rests(other, target, targets)]
        if needed_by:
            named = [f"{one.manifest.artifact} in {one.store.url}" for one in needed_by]
            more = len(named) - _MOST_NAMED
            raise StillNeeded(
                target.store.url,
                wanted="no committed artefact that rests on it",
                found=", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else ""),
                remedy="keep it, or delete those first",
            )


def _rests(other: Artifact, target: Target, targets: Sequence[Target]) -> bool:
    """Whether a committed artefact was made from this one, and from no copy that stays."""
    if _same_stage_needs(other, target):
        return True
    place = _place(target.store)
    for ref in other.manifest.inputs.values():
        here = _place(open_store(ref.url)) == place
        if here and target.digest in ("", ref.digest):
            return True
        if target.digest == ref.digest and not _stands_elsewhere(ref, targets):
            return True
    return False


def _same_stage_needs(other: Artifact, target: Target) -> bool:
    """A stage that writes two artefacts commits the first one before the last, and never again
    once the last one stands."""
    writes = target.stage.writes
    beside = _place(other.store) == _place(target.store).removesuffix(target.kind) + writes[-1]
    return beside and target.kind != writes[-1]


def _stands_elsewhere(ref: InputRef, targets: Sequence[Target]) -> bool:
    """Whether the copy that a consumer read still stands and is none that goes now."""
    store = open_store(ref.url)
    if _place(store) in {_place(target.store) for target in targets}:
        return False
    try:
        found = artifacts.find(store)
    except Eagle3Error:
        return False
    return found is not None and found.digest == ref.digest


def _place(store: Store) -> str:
    """One spelling of a prefix's place: links followed, the older name of S3's scheme replaced."""
    local = store.local_path()
    return str(local.resolve()) if local else re.sub("^s3a://", "s3://", store.url)


def _nothing_left(run: Store, stage: Stage, kinds: Sequence[str]) -> bool:
    """Whether no object of a stage's artefacts will stay, at least one of which goes now."""
    if not set(stage.writes) & set(kinds):
        return False
    return not any(run.list(kind) for kind in stage.writes if kind not in kinds)


def _listing(run: Store, targets: Sequence[Target], *, whole: bool) -> Iterator[ObjectInfo]:
    """Every object of the run, or of those of its folders that can hold anything of these."""
    if whole:
        yield from run.list()
        return
    stages = dict.fromkeys(f"work/{target.stage.name}" for target in targets)
    for folder in (*(target.kind for target in targets), *stages, "progress"):
        yield from run.list(folder)


def _is_work(path: str, stages: Sequence[Stage]) -> bool:
    """Whether an object is the unfinished work or the progress of one of these stages."""
    return any(
        path.startswith(f"work/{stage.name}/")
        or re.fullmatch(rf"progress/{stage.name}-\d+\.json", path)
        for stage in stages
    )
