"""An artefact in a store: committing it, reading its manifest, and gating it for a consumer.

The gate is what an init container runs before any GPU is held: manifest present and whole,
lineage digests, every object there with its size, and the cross-checks between a stage's inputs.
It needs the standard library, msgspec and the store, and reads no object but manifests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import manifest as manifests
from eagle3.errors import IdentityConflict, ManifestInvalid, UpstreamMissing
from eagle3.manifest import MANIFEST_NAME, FileEntry, InputRef, Manifest
from eagle3.store import Store, open_store, sha256_of_file


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


def find(store: Store) -> Artifact | None:
    """The artefact at a prefix, or None where nothing is committed. Raises ManifestInvalid."""
    try:
        data = store.read_bytes(MANIFEST_NAME)
    except FileNotFoundError:
        return None
    return Artifact(store=store, manifest=manifests.decode(data, f"{store.url}/{MANIFEST_NAME}"))


def commit(store: Store, manifest: Manifest) -> Artifact:
    """Write the manifest, which makes the artefact exist. Always the last thing a stage does.

    Where another process has committed the same content first, its manifest stands. Raises
    ManifestInvalid for a manifest that contradicts itself, IdentityConflict for other content.
    """
    where = f"{store.url}/{MANIFEST_NAME}"
    manifests.check(manifest, where)
    try:
        store.create_bytes(MANIFEST_NAME, manifests.encode(manifest))
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

    Raises IdentityConflict where other bytes lie there: the same inputs gave the same bytes.
    """
    try:
        if isinstance(content, bytes):
            size, sha256 = len(content), hashlib.sha256(content).hexdigest()
            store.create_bytes(path, content)
        else:
            size, sha256 = content.stat().st_size, sha256_of_file(content)
            store.create_file(content, path)
    except FileExistsError as error:
        raise IdentityConflict(
            f"{store.url}/{path}",
            wanted="the bytes that these inputs give",
            found="others, as of another version of eagle3",
            remedy="give this run a store prefix of its own",
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
                remedy=f"run {artifact.manifest.artifact} again under a prefix of its own",
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
                remedy=f"run {artifact.manifest.artifact} again under a prefix of its own",
            )


def cross_check(inputs: Mapping[str, Artifact]) -> None:
    """What a stage's inputs must agree on: verifier, tokenizer, and digests of shared upstreams.

    Raises ManifestInvalid naming the field, the two inputs and both values.
    """
    _agree(inputs, "verifier", lambda m: m.verifier)
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
