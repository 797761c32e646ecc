"""An artefact in a store: committing it, reading its manifest, and gating it for a consumer.

The gate is what an init container runs before any GPU is held: manifest present and whole,
lineage digests, every object there with its size, and the cross-checks between a stage's inputs.
It needs the standard library, msgspec and the store, and reads no object but manifests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eagle3 import manifest as manifests
from eagle3.errors import IdentityConflict, ManifestInvalid, UpstreamMissing
from eagle3.manifest import MANIFEST_NAME, FileEntry, InputRef, Manifest
from eagle3.stages import STAGES
from eagle3.store import Store, open_store, sha256_of_file

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A committed artefact: its store and its manifest."""

    store: Store
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The content digest of its manifest."""
        return manifests.digest(self.manifest)

    def ref(self) -> InputRef:
        """How a consumer's manifest records it."""
        return InputRef(artifact=self.manifest.artifact, url=self.store.url, digest=self.digest)

    def named(self, path: str) -> FileEntry | None:
        """What the manifest says of an object, or None where it names none such."""
        return self._entries.get(path)

    def entry(self, path: str) -> FileEntry:
        """What the manifest says of an object. Raises ManifestInvalid where it names none such."""
        found = self.named(path)
        if found is None:
            raise self._differs(path, "an object that the manifest names", "none of that name")
        return found

    def read(self, path: str) -> bytes:
        """An object's bytes, proven to be those of the manifest. Raises ManifestInvalid."""
        entry = self.entry(path)
        try:
            data = self.store.read_bytes(path)
        except FileNotFoundError as error:
            raise self._gone(entry) from error
        self._prove(entry, len(data), hashlib.sha256(data).hexdigest())
        return data

    def read_lines(self, path: str, kind: type[T]) -> list[T]:
        """An object of JSON lines as values of a type, proven by `read`. Raises ManifestInvalid."""
        try:
            return msgspec.json.Decoder(kind).decode_lines(self.read(path))
        except msgspec.DecodeError as error:
            wanted = f"lines of {kind.__name__.lstrip('_')}"
            raise self._differs(path, wanted, str(error)) from error

    def fetch(self, path: str, to: Path) -> None:
        """Copy an object into a local file, proven as by `read`. Raises ManifestInvalid."""
        entry = self.entry(path)
        try:
            self.store.get_file(path, to)
        except FileNotFoundError as error:
            raise self._gone(entry) from error
        self._prove(entry, to.stat().st_size, sha256_of_file(to))

    def local(self, path: str, folder: Path) -> Path:
        """An object as a local file, proven as by `read`; it is not to be changed.

        Where the store is on this machine that is the object itself, else a copy below `folder`.
        """
        here = self.store.local_path(path)
        if here is None:
            copy = folder / path
            if not copy.is_file() or sha256_of_file(copy) != self.entry(path).sha256:
                self.fetch(path, copy)
            return copy
        entry = self.entry(path)
        if not here.is_file():
            raise self._gone(entry)
        self._prove(entry, here.stat().st_size, sha256_of_file(here))
        return here

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        return {entry.path: entry for entry in self.manifest.files}

    def _prove(self, entry: FileEntry, size: int, sha256: str) -> None:
        if size != entry.bytes:
            wanted = f"{entry.bytes} bytes, as the manifest says"
            raise self._differs(entry.path, wanted, f"{size} bytes")
        if sha256 != entry.sha256:
            wanted = f"sha256 {entry.sha256[:16]}, as the manifest says"
            raise self._differs(entry.path, wanted, f"{sha256[:16]}, other bytes")

    def _gone(self, entry: FileEntry) -> ManifestInvalid:
        return self._differs(entry.path, f"{entry.bytes} bytes, as the manifest says", "no object")

    def _differs(self, path: str, wanted: str, found: str) -> ManifestInvalid:
        return ManifestInvalid(
            f"{self.store.url}/{path}",
            wanted=wanted,
            found=found,
            remedy=_again(self.manifest.artifact),
        )


def find(store: Store) -> Artifact | None:
    """The artefact at a prefix, or None where nothing is committed. Raises ManifestInvalid."""
    try:
        data = store.read_bytes(MANIFEST_NAME)
    except FileNotFoundError:
        return None
    where = f"{store.url}/{MANIFEST_NAME}"
    return Artifact(store=store, manifest=manifests.decode(data, where, store.read_bytes))


def commit(store: Store, manifest: Manifest) -> Artifact:
    """Write the manifest, which makes the artefact exist. Always the last thing a stage does.

    Where another process has committed the same content first, its manifest stands. Raises
    ManifestInvalid for a manifest that contradicts itself, IdentityConflict for other content.
    """
    where = f"{store.url}/{MANIFEST_NAME}"
    manifests.check(manifest, where)
    stored = manifest
    if len(manifest.files) > manifests.MOST_INLINE:
        stored, lines = manifests.split(manifest)
        assert stored.index is not None, "split names an index"
        store.create_bytes(stored.index.path, lines)
    try:
        store.create_bytes(MANIFEST_NAME, manifests.encode(stored))
    except FileExistsError:
        standing = find(store)
        if standing is None or manifests.digest(standing.manifest) != manifests.digest(manifest):
            raise IdentityConflict(
                where,
                wanted=f"content {manifests.digest(manifest)[:12]}",
                found=f"content {standing.digest[:12]}" if standing else "a vanished manifest",
                remedy="give this run a store prefix of its own",
            ) from None
        return standing
    return Artifact(store=store, manifest=manifest)


def put(
    store: Store,
    path: str,
    content: bytes | Path,
    *,
    samples: int = 0,
    tokens: int = 0,
    timed: bool = False,
) -> FileEntry:
    """Create an object of an artefact from bytes or from a finished file; returns its entry.

    Where a process that came first has committed a `timed` object, its entry is returned. Raises
    IdentityConflict where other bytes lie there: the same inputs gave the same bytes.
    """
    try:
        if isinstance(content, bytes):
            size, sha256 = len(content), hashlib.sha256(content).hexdigest()
            store.create_bytes(path, content)
        else:
            size, sha256 = content.stat().st_size, sha256_of_file(content)
            store.create_file(content, path)
    except FileExistsError as error:
        standing = find(store)
        named = standing.named(path) if standing else None
        if timed and named is not None and named.timed:
            return named
        raise IdentityConflict(
            f"{store.url}/{path}",
            wanted="the bytes that these inputs give",
            found="others, of a process that was killed or still runs"
            if timed
            else "others, as of another version of eagle3",
            remedy="if no other process of this run is alive, delete it, for no manifest names it"
            if timed and standing is None
            else "give this run a store prefix of its own",
        ) from error
    return FileEntry(
        path=path, bytes=size, sha256=sha256, samples=samples, tokens=tokens, timed=timed
    )


def gate(url: str, kinds: tuple[str, ...]) -> Artifact:
    """Check one upstream artefact to gate depth and return it.

    Args:
        url: the artefact's prefix.
        kinds: the artefact kinds that may stand there.

    Raises UpstreamMissing, ManifestInvalid.
    """
    store = open_store(url)
    found = find(store)
    if found is None:
        missing = next((kind for kind in kinds if store.url.endswith(f"/{kind}")), kinds[0])
        raise UpstreamMissing(
            f"{store.url}/{MANIFEST_NAME}",
            wanted=f"a committed {' or '.join(kinds)} artefact",
            found="no manifest",
            remedy=f"run {missing} first, or name another run's artefact under inputs",
        )
    if found.manifest.artifact not in kinds:
        raise ManifestInvalid(
            f"{store.url}/{MANIFEST_NAME}: artifact",
            wanted=" or ".join(kinds),
            found=found.manifest.artifact,
            remedy="correct the URL under inputs",
        )
    _require_facts(found)
    if "regenerate" in kinds:
        _refuse_unanswered(found)
    if found.manifest.artifact == "extract":
        manifests.check_states(found.manifest, f"{store.url}/{MANIFEST_NAME}")
    _check_objects(found)
    return found


def _require_facts(artifact: Artifact) -> None:
    """Every artefact says whose it is; one that does not could be mixed with any other."""
    for field in ("verifier", "tokenizer"):
        if getattr(artifact.manifest, field) is None:
            raise ManifestInvalid(
                f"{artifact.store.url}/{MANIFEST_NAME}: {field}",
                wanted="the facts of the one it was made for",
                found="none",
                remedy=_again(artifact.manifest.artifact),
            )


def _refuse_unanswered(artifact: Artifact) -> None:
    """Conversations that nobody has answered are for regenerate alone: they teach nothing."""
    count = artifact.manifest.facts.get("unanswered", 0)
    if artifact.manifest.artifact == "prepare" and count:
        raise ManifestInvalid(
            f"{artifact.store.url}/{MANIFEST_NAME}: facts.unanswered",
            wanted="0 conversations without an answer",
            found=count,
            remedy="run regenerate first, which answers them, and read its artefact",
        )


def _check_objects(artifact: Artifact) -> None:
    """Every object of the manifest is there with its size, by one listing."""
    sizes = {info.path: info.bytes for info in artifact.store.list()}
    for entry in artifact.manifest.files:
        found = sizes.get(entry.path)
        if found != entry.bytes:
            raise ManifestInvalid(
                f"{artifact.store.url}/{entry.path}",
                wanted=f"{entry.bytes} bytes, as its manifest says",
                found="no object" if found is None else f"{found} bytes",
                remedy=_again(artifact.manifest.artifact),
            )


def _again(kind: str) -> str:
    stage = next((stage.name for stage in STAGES if kind in stage.writes), kind)
    return f"run {stage} again under a prefix of its own"


def cross_check(inputs: Mapping[str, Artifact]) -> None:
    """What a stage's inputs must agree on: verifier, tokenizer, and digests of shared upstreams.

    Raises ManifestInvalid naming the field, the two inputs and both values.
    """
    _agree(inputs, "verifier", lambda m: m.verifier and m.verifier.elsewhere())
    _agree(inputs, "tokenizer", lambda m: m.tokenizer)
    _same_upstreams(inputs)


def _agree(inputs: Mapping[str, Artifact], field: str, value_of: Any) -> None:
    first: tuple[str, Any] | None = None
    for name, artifact in inputs.items():
        value = value_of(artifact.manifest)
        if value is None:
            continue
        if first is None:
            first = (name, value)
        elif value != first[1]:
            part = next(
                key
                for key in value.__struct_fields__
                if getattr(value, key) != getattr(first[1], key)
            )
            raise ManifestInvalid(
                f"{artifact.store.url}/{MANIFEST_NAME}: {field}.{part}",
                wanted=f"{getattr(first[1], part)}, as input {first[0]} has it",
                found=getattr(value, part),
                remedy="take both inputs from runs on the same verifier and tokenizer",
            )


def _same_upstreams(inputs: Mapping[str, Artifact]) -> None:
    """An artefact that two inputs both rest on must be the same one, and so must a direct input.

    `train` reads `extract` and `vocab`: both must come from the same rows, by the name of their
    input too, since one could come from prepare's rows and the other from regenerate's.
    """
    seen: dict[str, tuple[str, str]] = {
        artifact.manifest.artifact: (name, artifact.digest) for name, artifact in inputs.items()
    }
    for name, artifact in inputs.items():
        for input_name, ref in artifact.manifest.inputs.items():
            for key in (ref.artifact, f"input {input_name}"):
                standing = seen.setdefault(key, (name, ref.digest))
                if standing[1] != ref.digest:
                    raise ManifestInvalid(
                        f"{artifact.store.url}/{MANIFEST_NAME}: inputs.{input_name}.digest",
                        wanted=f"{standing[1][:16]}, as input {standing[0]} has it",
                        found=f"{ref.digest[:16]} ({ref.artifact})",
                        remedy=f"take {name} and {standing[0]} from the same {ref.artifact}",
                    )
