"""What a deletion is asked to take: the artefacts that a URL names, and the run they are of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle3 import artifact as artifacts
from eagle3.errors import ConfigError, ManifestInvalid, UpstreamMissing
from eagle3.manifest import MANIFEST_NAME
from eagle3.stages import ARTIFACT_KINDS, STAGES, Stage
from eagle3.store import Store, open_store
from eagle3.work import CLAIM_NAME, REMOVAL_NAME


@dataclass(frozen=True, kw_only=True)
class Target:
    """An artefact that would go, whether or not its manifest still stands or can be read.

    Attributes:
        run: the run that it is of.
        digest: empty where there is none to read: consumers are then known by the URL alone.
        identity: by which what is imported beside it names it; empty as the digest.
    """

    run: Store
    kind: str
    committed: bool
    digest: str
    identity: str

    @property
    def store(self) -> Store:
        """The artefact's prefix."""
        return self.run.child(self.kind)

    @property
    def stage(self) -> Stage:
        """The stage that writes it."""
        return next(stage for stage in STAGES if self.kind in stage.writes)


def named(url: str) -> tuple[Store, tuple[str, ...]]:
    """The run, and the kinds of its artefacts that a URL names: one of them, or all."""
    store = open_store(url)
    above, name = parent_of(store)
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
    beside = (f"work/{stage}/{name}" for name in (CLAIM_NAME, REMOVAL_NAME))
    return any(run.exists(path) for path in (f"{kind}/{MANIFEST_NAME}", *beside))


def parent_of(store: Store) -> tuple[Store | None, str]:
    """The prefix above, where there is one, and this one's name in it."""
    above, _, name = store.url.rpartition("/")
    return (None if above.endswith("/") else open_store(above)), name


def target_at(run: Store, kind: str) -> Target:
    """The artefact of a kind in a run, whatever its manifest is."""
    try:
        found = artifacts.find(run.child(kind))
    except ManifestInvalid:
        return Target(run=run, kind=kind, committed=True, digest="", identity="")
    if found is None:
        return Target(run=run, kind=kind, committed=False, digest="", identity="")
    identity = found.manifest.identity
    return Target(run=run, kind=kind, committed=True, digest=found.digest, identity=identity)


def place_of(store: Store) -> str:
    """One spelling of a prefix's place: links followed, the older name of S3's scheme replaced."""
    local = store.local_path()
    return str(local.resolve()) if local else re.sub("^s3a://", "s3://", store.url)
