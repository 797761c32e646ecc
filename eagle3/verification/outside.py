"""An artefact as it is seen from outside: its manifest, one listing, and its inputs' manifests."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from eagle3 import strict_json
from eagle3.artifact import Artifact, again, find, listing_of, object_faults
from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    EnvironmentMisconfigured,
    ManifestInvalid,
    PermissionRefused,
    ServiceUnavailable,
    UpstreamMissing,
)
from eagle3.lineage import input_of
from eagle3.manifest import MANIFEST_NAME
from eagle3.stages import ARTIFACT_KINDS, STAGES
from eagle3.store import ObjectInfo, Store, open_store
from eagle3.upstream import agree, check_alone, cross_check

# An input that cannot be asked is told, and is no fault of the artefact.
_AWAY = (ServiceUnavailable, PermissionRefused, EnvironmentMisconfigured, ConfigError)


@dataclass(kw_only=True)
class Outside:
    """What was found without reading any object but manifests.

    Attributes:
        artifact: None where no manifest stands or it cannot be read.
        listing: every object below the prefix.
        inputs: those that could be read and are what the manifest recorded.
        findings: what is wrong, each a sentence.
        notes: what could not be looked at, and is no fault.
    """

    artifact: Artifact | None = None
    listing: list[ObjectInfo] = field(default_factory=list)
    inputs: dict[str, Artifact] = field(default_factory=dict)
    findings: list[Eagle3Error] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def strangers(self) -> Iterator[ManifestInvalid]:
        """The objects below the prefix that its manifest does not name."""
        if self.artifact is None:
            return
        store = self.artifact.store
        known = {MANIFEST_NAME, *(entry.path for entry in self.artifact.manifest.files)}
        record = strict_json.decode(store.read_bytes(MANIFEST_NAME), _Indexed)
        if record.index is not None:
            known.add(record.index.path)
        for info in self.listing:
            if info.path not in known:
                yield ManifestInvalid(
                    f"{store.url}/{info.path}",
                    wanted="only objects that the manifest names",
                    found=f"{info.bytes} bytes that it does not",
                    remedy="find out what wrote it, and move it away",
                )


class _Place(msgspec.Struct):
    path: str


class _Indexed(msgspec.Struct):
    """The one field of a manifest that tells where its index lies."""

    index: _Place | None = None


def artifacts_at(url: str) -> list[Store]:
    """The artefact at a prefix, or every one below it where it is a run's, committed or not.

    Raises UpstreamMissing where there is none, ConfigError for a URL of no store.
    """
    store = open_store(url)
    if store.exists(MANIFEST_NAME):
        return [store]
    below = [child for child in map(store.child, ARTIFACT_KINDS) if child.list()]
    if below:
        return below
    if posixpath.basename(store.url) in ARTIFACT_KINDS and store.list():
        return [store]
    raise UpstreamMissing(
        f"{store.url}/{MANIFEST_NAME}",
        wanted="a committed artefact, or a run that holds one",
        found="no manifest here, and none of any kind below",
        remedy="correct the URL",
    )


def look_at(store: Store) -> Outside:
    """Everything that the gate claims to find in one artefact, all of it and not the first alone.

    Raises what the artefact's own store raises when it does not answer.
    """
    seen = Outside()
    try:
        seen.artifact = find(store)
    except ManifestInvalid as error:
        seen.findings.append(error)
        return seen
    seen.listing = store.list() if seen.artifact is None else listing_of(seen.artifact)
    if seen.artifact is None:
        seen.findings.append(_uncommitted(store, len(seen.listing)))
        return seen
    artifact = seen.artifact
    seen.findings += _refused(lambda: _check_place(artifact))
    seen.findings += _refused(lambda: check_alone(artifact))
    seen.findings += object_faults(artifact, seen.listing)
    _open_inputs(seen, artifact)
    seen.findings += _refused(lambda: cross_check(seen.inputs))
    seen.findings += _refused(lambda: agree({**seen.inputs, artifact.manifest.artifact: artifact}))
    seen.findings = _each_once(seen.findings)
    return seen


def _refused(check: Callable[[], None]) -> list[Eagle3Error]:
    try:
        check()
    except ManifestInvalid as error:
        return [error]
    return []


def _each_once(findings: list[Eagle3Error]) -> list[Eagle3Error]:
    return list({str(error): error for error in findings}.values())


def _uncommitted(store: Store, count: int) -> UpstreamMissing:
    kind = posixpath.basename(store.url)
    return UpstreamMissing(
        f"{store.url}/{MANIFEST_NAME}",
        wanted="a manifest",
        found=f"none beside {count} objects",
        remedy=f"run {_stage_of(kind)} to its end, or put the manifest back",
    )


def _stage_of(kind: str) -> str:
    return next((stage.name for stage in STAGES if kind in stage.writes), "its stage")


def _check_place(artifact: Artifact) -> None:
    """Under a name that is a kind's, no other kind may lie."""
    place = posixpath.basename(artifact.store.url)
    if place in ARTIFACT_KINDS and place != artifact.manifest.artifact:
        raise ManifestInvalid(
            f"{artifact.store.url}/{MANIFEST_NAME}: artifact",
            wanted=place,
            found=artifact.manifest.artifact,
            remedy=again(place),
        )


def _open_inputs(seen: Outside, artifact: Artifact) -> None:
    kind = artifact.manifest.artifact
    reads = next(stage.reads for stage in STAGES if kind in stage.writes)
    for name, ref in artifact.manifest.inputs.items():
        if ref.artifact not in reads.get(name, ()):
            seen.findings.append(
                ManifestInvalid(
                    f"{artifact.store.url}/{MANIFEST_NAME}: inputs.{name}",
                    wanted=" or ".join(reads.get(name, ())) or f"no such input of {kind}",
                    found=ref.artifact,
                    remedy=again(kind),
                )
            )
            continue
        try:
            seen.inputs[name] = input_of(artifact, name)
        except _AWAY as error:
            seen.notes.append(f"{artifact.store.url}: input {name} could not be read: {error}")
        except Eagle3Error as error:
            seen.findings.append(error)
