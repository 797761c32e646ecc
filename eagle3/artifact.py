"""An artefact in a store: committing it, finding it, and reading it with every byte proven."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from eagle3 import manifest as manifests
from eagle3 import strict_json
from eagle3.errors import IdentityConflict, ManifestInvalid
from eagle3.manifest import MANIFEST_NAME, FileEntry, InputRef, Manifest
from eagle3.stages import STAGES
from eagle3.store import ObjectInfo, Store, sha256_of_file

T = TypeVar("T")

# Objects of one part of a listing: a part too many costs a request of a thousand.
_PART = 10_000


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A committed artefact: its store and its manifest."""

    store: Store
    manifest: Manifest

    @cached_property
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

    def fact(self, name: str, kind: type[T]) -> T:
        """A figure of `facts`, of its type. Raises ManifestInvalid where it is not there."""
        try:
            return msgspec.convert(self.manifest.facts.get(name), kind)
        except msgspec.ValidationError as error:
            raise ManifestInvalid(
                f"{self.store.url}/{MANIFEST_NAME}: facts.{name}",
                wanted=f"a value that this version of eagle3 writes ({kind.__name__})",
                found=error,
                remedy=again(self.manifest.artifact),
            ) from error

    def refuse_strangers(self, suffix: str) -> None:
        """No object whose name ends so lies in the artefact without being named by the manifest.

        For a folder that is handed to an engine whole: it loads what it finds. Raises
        ManifestInvalid.
        """
        for info in self.store.list():
            if info.path.endswith(suffix) and self.named(info.path) is None:
                raise ManifestInvalid(
                    f"{self.store.url}/{info.path}",
                    wanted="no object that the manifest does not name",
                    found="one",
                    remedy="move it away",
                )

    def read(self, path: str) -> bytes:
        """An object's bytes, proven to be those of the manifest. Raises ManifestInvalid."""
        entry = self.entry(path)
        try:
            data = self.store.read_bytes(path)
        except FileNotFoundError as error:
            raise self._gone(entry) from error
        self.check_bytes(entry, len(data), hashlib.sha256(data).hexdigest())
        return data

    def prove(self, path: str) -> None:
        """Hash an object in ranges, and hold it against the manifest. Raises ManifestInvalid."""
        entry = self.entry(path)
        try:
            size, sha256 = self.store.size(path), self.store.sha256(path)
        except FileNotFoundError as error:
            raise self._gone(entry) from error
        self.check_bytes(entry, size, sha256)

    def check_bytes(self, entry: FileEntry, size: int, sha256: str) -> None:
        """An object of this size and hash is the one of the entry. Raises ManifestInvalid."""
        if size != entry.bytes:
            wanted = f"{entry.bytes} bytes, as the manifest says"
            raise self._differs(entry.path, wanted, f"{size} bytes")
        if sha256 != entry.sha256:
            wanted = f"sha256 {entry.sha256[:16]}, as the manifest says"
            raise self._differs(entry.path, wanted, f"{sha256[:16]}, other bytes")

    def read_lines(self, path: str, kind: type[T]) -> list[T]:
        """An object of JSON lines as values of a type, proven by `read`. Raises ManifestInvalid."""
        try:
            return strict_json.decode_lines(self.read(path), kind)
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
        self.check_bytes(entry, to.stat().st_size, sha256_of_file(to))

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
        self.check_bytes(entry, here.stat().st_size, sha256_of_file(here))
        return here

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        return {entry.path: entry for entry in self.manifest.files}

    def _gone(self, entry: FileEntry) -> ManifestInvalid:
        return self._differs(entry.path, f"{entry.bytes} bytes, as the manifest says", "no object")

    def _differs(self, path: str, wanted: str, found: str) -> ManifestInvalid:
        return ManifestInvalid(
            f"{self.store.url}/{path}",
            wanted=wanted,
            found=found,
            remedy=again(self.manifest.artifact),
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


def check_objects(artifact: Artifact, remedy: str = "") -> None:
    """Every object of the manifest is there with its size, by one listing.

    Raises ManifestInvalid.
    """
    for fault in object_faults(artifact, listing_of(artifact), remedy):
        raise fault


def listing_of(artifact: Artifact) -> list[ObjectInfo]:
    """Every object below an artefact's prefix. Of many it knows the names, and so has them listed
    in parts at the same time."""
    paths = sorted(entry.path for entry in artifact.manifest.files)
    return artifact.store.list(splits=paths[_PART::_PART])


def object_faults(
    artifact: Artifact, listing: Iterable[ObjectInfo], remedy: str = ""
) -> Iterator[ManifestInvalid]:
    """What a listing of an artefact's prefix has otherwise than its manifest: lost, other sizes."""
    sizes = {info.path: info.bytes for info in listing}
    for entry in artifact.manifest.files:
        found = sizes.get(entry.path)
        if found != entry.bytes:
            yield ManifestInvalid(
                f"{artifact.store.url}/{entry.path}",
                wanted=f"{entry.bytes} bytes, as its manifest says",
                found="no object" if found is None else f"{found} bytes",
                remedy=remedy or again(artifact.manifest.artifact),
            )


def again(kind: str) -> str:
    """What to do about an artefact that is wrong, as an imperative clause."""
    stage = next((stage.name for stage in STAGES if kind in stage.writes), kind)
    return f"run {stage} again under a prefix of its own"
