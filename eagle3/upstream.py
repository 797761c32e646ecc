"""What a stage reads, checked to gate depth: one artefact alone, and several against each other.

It is what an init container runs before any GPU is held: manifest present and whole, lineage
digests, every object there with its size, and the cross-checks between a stage's inputs. It needs
the standard library, msgspec and the store, and reads no object but manifests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3 import manifest as manifests
from eagle3.artifact import Artifact, again, check_objects, find
from eagle3.errors import ConfigError, ManifestInvalid, UpstreamMissing
from eagle3.manifest import MANIFEST_NAME
from eagle3.store import Store, open_store


def gate(url: str, kinds: tuple[str, ...]) -> Artifact:
    """Check one upstream artefact to gate depth and return it.

    Args:
        url: the artefact's prefix.
        kinds: the artefact kinds that may stand there.

    Raises UpstreamMissing, ManifestInvalid, and ConfigError for a run's URL in place of one of
    its artefacts'.
    """
    store = open_store(url)
    found = find(store)
    if found is None:
        if (below := _kind_below(store, kinds)) is not None:
            raise ConfigError(
                store.url,
                wanted=f"the URL of {' or '.join(kinds)} itself",
                found="that of a run which holds it",
                remedy=f"write {store.url}/{below} under inputs",
            )
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
    check_alone(found)
    if "regenerate" in kinds:
        _refuse_unanswered(found)
    check_objects(found)
    return found


def check_alone(artifact: Artifact) -> None:
    """What a manifest of its kind must say, whoever reads it. Raises ManifestInvalid."""
    _require_facts(artifact)
    if artifact.manifest.artifact == "extract":
        manifests.check_states(artifact.manifest, f"{artifact.store.url}/{MANIFEST_NAME}")


def _kind_below(store: Store, kinds: tuple[str, ...]) -> str | None:
    """The first of these artefacts that stands below a prefix, as below a run's own."""
    return next((kind for kind in kinds if store.exists(f"{kind}/{MANIFEST_NAME}")), None)


def _require_facts(artifact: Artifact) -> None:
    """Every artefact says whose it is; one that does not could be mixed with any other."""
    for field in ("verifier", "tokenizer"):
        if getattr(artifact.manifest, field) is None:
            raise ManifestInvalid(
                f"{artifact.store.url}/{MANIFEST_NAME}: {field}",
                wanted="the facts of the one it was made for",
                found="none",
                remedy=again(artifact.manifest.artifact),
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


def cross_check(inputs: Mapping[str, Artifact]) -> None:
    """What a stage's inputs must agree on: verifier, tokenizer, and digests of shared upstreams.

    Raises ManifestInvalid naming the field, the two inputs and both values.
    """
    agree(inputs)
    _same_upstreams(inputs)


def agree(artifacts: Mapping[str, Artifact]) -> None:
    """The artefacts are of one verifier and tokenizer, by fingerprint. Raises ManifestInvalid."""
    _agree(artifacts, "verifier", lambda m: m.verifier and m.verifier.elsewhere())
    _agree(artifacts, "tokenizer", lambda m: m.tokenizer)


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
