"""Deleting an artefact or a whole run: only what nothing rests on, and never by halves unseen.

The manifest goes first, so that a deletion that is killed leaves no artefact that claims to be
whole; then its objects, then the stage's progress and work. A record beside the work says that a
deletion has begun, and goes last: while it stands no process works there, and by it the next
deletion knows the objects for what they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eagle3.manifest import MANIFEST_NAME
from eagle3.removal.readers import find_readers, refuse_at_work, refuse_needed
from eagle3.removal.targets import Target, named, target_at
from eagle3.stages import ARTIFACT_KINDS, STAGES, Stage
from eagle3.store import ObjectInfo, Store, is_probe, open_store
from eagle3.work import CLAIM_NAME, REMOVAL_NAME

# What `eagle3 run` leaves in a run's prefix beside its stages' folders.
_OF_THE_RUN = ("summary.json",)
# Requests in flight, each of one small object.
_AT_ONCE = 16


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


def plan_removal(url: str, also: Sequence[str] = (), *, stopped: bool = False) -> Removal:
    """What deleting an artefact, or a run with all its artefacts, comes to. Deletes nothing.

    Args:
        url: the prefix of either.
        also: prefixes of further artefacts, runs or folders of runs. Besides these, the rest of
            the run and the runs beside it are asked what they were made from; others are not.
        stopped: somebody has made sure that no process works on these any more. Without that, one
            that reported lately, or has yet to report, is taken for alive.

    Raises StillNeeded naming the artefacts that rest on it, UpstreamMissing where nothing of a
    run lies there, TemporaryFailure where a process is at work on it, and ManifestInvalid for a
    damaged manifest elsewhere, since nobody can tell then.
    """
    run, kinds = named(url)
    targets = tuple(target_at(run, kind) for kind in reversed(ARTIFACT_KINDS) if kind in kinds)
    if not stopped:
        refuse_at_work(run, dict.fromkeys(target.stage.name for target in targets))
    refuse_needed(targets, find_readers(run, kinds, also))
    whole = open_store(url).url == run.url
    gone = [stage for stage in STAGES if _nothing_left(run, stage, kinds)]
    objects, work, left = [], [], []
    for info in _listing(run, targets, whole=whole):
        if info.path.split("/")[0] in kinds:
            objects.append(info)
        elif _is_work(info.path, gone) or (whole and _is_of_the_run(info.path)):
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
    records = [f"work/{target.stage.name}/{REMOVAL_NAME}" for target in removal.targets]
    for path in dict.fromkeys(records):
        run.write_bytes(path, b"{}\n")
    manifests = [f"{target.kind}/{MANIFEST_NAME}" for target in removal.targets]
    standing = {info.path for info in (*removal.objects, *removal.work)}
    for path in manifests:
        run.delete(path)
        told(int(path in standing))
    _delete(run, (info.path for info in removal.objects if info.path not in manifests), told)
    claims = [info.path for info in removal.work if info.path.endswith(f"/{CLAIM_NAME}")]
    last = {*claims, *records}
    _delete(run, (info.path for info in removal.work if info.path not in last), told)
    _delete(run, claims, told)
    # A process that was about to commit when the record was written may have done so since.
    for path in manifests:
        run.delete(path)
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


def _is_of_the_run(path: str) -> bool:
    """Whether an object is none of a stage's and the run's all the same: its summary, and what a
    process left that was killed while it tried whether it can write."""
    return path in _OF_THE_RUN or is_probe(path)


def _is_work(path: str, stages: Sequence[Stage]) -> bool:
    """Whether an object is the unfinished work or the progress of one of these stages."""
    return any(
        path.startswith(f"work/{stage.name}/")
        or re.fullmatch(rf"progress/{stage.name}-\d+\.json", path)
        for stage in stages
    )
