"""From an artefact back to the conversations, by the manifests' own record of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.errors import AcceptanceInvalid, ManifestInvalid, UpstreamMissing
from eagle3.manifest import MANIFEST_NAME, InputRef
from eagle3.stages import ARTIFACT_KINDS
from eagle3.store import open_store


class _Row(msgspec.Struct, frozen=True):
    """The one field of a prepared row that tells which conversation it is of."""

    conversation: str


def walk(start: Iterable[Artifact]) -> list[Artifact]:
    """The artefacts given and all that they were made from, each once, the conversations first.

    Every manifest is read where its consumer read it and must still have the digest that the
    consumer recorded. Raises UpstreamMissing, ManifestInvalid.
    """
    found: dict[str, Artifact] = {}
    waiting = list(start)
    while waiting:
        artifact = waiting.pop()
        if artifact.digest in found:
            continue
        found[artifact.digest] = artifact
        waiting += [_open(ref, artifact) for ref in artifact.manifest.inputs.values()]
    order = {kind: place for place, kind in enumerate(ARTIFACT_KINDS)}
    return sorted(found.values(), key=lambda item: (order[item.manifest.artifact], item.digest))


def of_kind(lineage: Iterable[Artifact], kind: str) -> list[Artifact]:
    """The artefacts of one kind among a lineage's."""
    return [artifact for artifact in lineage if artifact.manifest.artifact == kind]


def refuse_trained_on(conversations: set[str], lineage: Iterable[Artifact]) -> int:
    """No conversation of these ids may be one that the draft was trained on.

    Args:
        conversations: ids of the held-out prompts' conversations.
        lineage: the draft's, as `walk` gives it.

    Returns how many training rows were looked at. Raises AcceptanceInvalid naming a
    conversation that is on both sides.
    """
    looked_at = 0
    for prepared in of_kind(lineage, "prepare"):
        for trained_on in _training_conversations(prepared):
            looked_at += 1
            if trained_on in conversations:
                raise AcceptanceInvalid(
                    "evaluate: prompts",
                    wanted="conversations that the draft was never trained on",
                    found=f"{trained_on[:16]}, which is in {prepared.store.url} too",
                    remedy="take the prompts and the draft from the same prepare artefact, or"
                    " leave the shared conversations out of the prompts",
                )
    if not looked_at:
        raise AcceptanceInvalid(
            "evaluate: lineage",
            wanted="the rows that the draft was trained on",
            found="no prepared row",
            remedy="export a draft that was trained on prepared conversations",
        )
    return looked_at


def _training_conversations(prepared: Artifact) -> Iterator[str]:
    rows = [entry.path for entry in prepared.manifest.files if _is_rows(entry.path)]
    for path in rows:
        yield from (row.conversation for row in prepared.read_lines(path, _Row))


def _is_rows(path: str) -> bool:
    return path.startswith("rows-") and path.endswith(".jsonl")


def _open(ref: InputRef, consumer: Artifact) -> Artifact:
    found = artifacts.find(open_store(ref.url))
    if found is None:
        raise UpstreamMissing(
            f"{ref.url}/{MANIFEST_NAME}",
            wanted=f"the {ref.artifact} artefact that {consumer.store.url} was made from",
            found="no manifest",
            remedy="put it back: without it nobody can tell what the draft was trained on",
        )
    if found.digest != ref.digest:
        raise ManifestInvalid(
            f"{ref.url}/{MANIFEST_NAME}",
            wanted=f"content {ref.digest[:16]}, which {consumer.store.url} was made from",
            found=found.digest[:16],
            remedy="evaluate a draft whose upstream artefacts are still as they were",
        )
    return found
