"""From an artefact back to the conversations, by the manifests' own record of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.errors import AcceptanceInvalid, Eagle3Error, ManifestInvalid, UpstreamMissing
from eagle3.manifest import MANIFEST_NAME, InputRef
from eagle3.stages import ARTIFACT_KINDS
from eagle3.store import open_store


class _Row(msgspec.Struct, frozen=True):
    """The one field of a prepared row that tells which conversation it is of."""

    conversation: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """An artefact in the tree of what another was made from.

    Attributes:
        name: the consumer's name for this input; empty for the artefact asked about.
        ref: the kind, URL and digest that the consumer recorded, or the artefact's own.
        artifact: what stands there, or None where the link is broken.
        error: why it is broken.
        below: what it was made from; empty where it is told further up in the tree.
        repeated: whether it is told further up.
    """

    name: str
    ref: InputRef
    artifact: Artifact | None = None
    error: Eagle3Error | None = None
    below: tuple[Link, ...] = ()
    repeated: bool = False

    def errors(self) -> Iterator[Eagle3Error]:
        """What is broken in it and below it, from the top down."""
        if self.error is not None:
            yield self.error
        for link in self.below:
            yield from link.errors()


def trace(start: Artifact) -> Link:
    """The tree of all that an artefact was made from, broken links in their places.

    A link is broken where nothing is committed, where another content stands by now, and where a
    store does not answer or refuses: none of these raises.
    """
    return _traced("", start.ref(), start, {start.digest})


def _traced(name: str, ref: InputRef, artifact: Artifact, told: set[str]) -> Link:
    below = []
    for input_name, upstream in sorted(artifact.manifest.inputs.items()):
        try:
            found = input_of(artifact, input_name)
        except Eagle3Error as error:
            below.append(Link(name=input_name, ref=upstream, error=error))
            continue
        if found.digest in told:
            below.append(Link(name=input_name, ref=upstream, artifact=found, repeated=True))
            continue
        told.add(found.digest)
        below.append(_traced(input_name, upstream, found, told))
    return Link(name=name, ref=ref, artifact=artifact, below=tuple(below))


def input_of(consumer: Artifact, name: str) -> Artifact:
    """An input of an artefact: where it was read, or beside the artefact, known by its content.

    A run may have been copied whole, and its manifests still name the first place. Raises the
    fault of that place (UpstreamMissing, ManifestInvalid, or what a store raises that does not
    answer) where neither holds the content that was read.
    """
    ref = consumer.manifest.inputs[name]
    beside = f"{consumer.store.url.rpartition('/')[0]}/{ref.artifact}"
    faults: list[Eagle3Error] = []
    for url in dict.fromkeys((ref.url, beside)):
        try:
            found = artifacts.find(open_store(url))
        except Eagle3Error as error:
            faults.append(error)
            continue
        if found is not None and found.digest == ref.digest:
            return found
        faults.append(_other_input(consumer, name, ref, found))
    raise faults[0]


def _other_input(
    consumer: Artifact, name: str, ref: InputRef, found: Artifact | None
) -> Eagle3Error:
    where = f"{consumer.store.url}/{MANIFEST_NAME}: inputs.{name}"
    if found is None:
        return UpstreamMissing(
            where,
            wanted=f"{ref.artifact} {ref.digest[:16]} at {ref.url}, or beside it",
            found="no manifest",
            remedy="put it back, or make this artefact again from one that stands",
        )
    return ManifestInvalid(
        f"{where}.digest",
        wanted=f"{ref.digest[:16]} at {ref.url}, which it was made from",
        found=found.digest[:16],
        remedy=f"put that {ref.artifact} back, or {artifacts.again(consumer.manifest.artifact)}",
    )


def artifact_or_last(url: str) -> Artifact:
    """The artefact at a prefix, or the last one of the run whose prefix it is.

    Raises UpstreamMissing, ManifestInvalid, and ConfigError for a URL of no store.
    """
    store = open_store(url)
    for place in (store, *(store.child(kind) for kind in reversed(ARTIFACT_KINDS))):
        if (found := artifacts.find(place)) is not None:
            return found
    raise UpstreamMissing(
        f"{store.url}/{MANIFEST_NAME}",
        wanted="a committed artefact, or a run that holds one",
        found="no manifest here, and none of any kind below",
        remedy="correct the URL",
    )


def walk(start: Iterable[Artifact]) -> list[Artifact]:
    """The artefacts given and all that they were made from, each once, the conversations first.

    Every manifest must still have the digest that its consumer recorded, see `input_of`, which
    also tells what is raised.
    """
    found: dict[str, Artifact] = {}
    waiting = list(start)
    while waiting:
        artifact = waiting.pop()
        if artifact.digest in found:
            continue
        found[artifact.digest] = artifact
        waiting += [input_of(artifact, name) for name in artifact.manifest.inputs]
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
    conversation that is on both sides, and where a row does not say of which one it is.
    """
    looked_at = 0
    for prepared in of_kind(lineage, "prepare"):
        for trained_on in _training_conversations(prepared):
            looked_at += 1
            if not trained_on:
                raise AcceptanceInvalid(
                    "evaluate: lineage",
                    wanted="training rows whose conversations are known",
                    found=f"rows in {prepared.store.url} that carry none, as imported ones do",
                    remedy="serve the draft and measure it there, or train on prepared "
                    "conversations: nobody can show that it never saw these prompts",
                )
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
