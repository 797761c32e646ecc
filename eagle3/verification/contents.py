"""What every kind's checks have: an artefact, its inputs, a look at each object and at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3.artifact import Artifact, again
from eagle3.errors import ManifestInvalid
from eagle3.manifest import MANIFEST_NAME, FileEntry

Check = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What reading an artefact's contents may use, see `eagle3.verification.verify`."""

    scratch: Path
    trust_remote_code: bool


class Contents:
    """The contents of one artefact. Of a kind that holds nothing more to check, bytes alone.

    `check_object` is called for every object, several at a time; only where nothing was found are
    the checks of `whole` called, one after the other. Both raise DataInvalid for what is wrong.

    Attributes:
        notes: what could not be looked at, and is no fault.
    """

    def __init__(
        self, artifact: Artifact, inputs: Mapping[str, Artifact], sources: Sources
    ) -> None:
        self.artifact = artifact
        self.inputs = inputs
        self.sources = sources
        self.notes: list[str] = []

    def check_object(self, entry: FileEntry) -> None:
        """Prove every byte of an object, and what it holds by itself."""
        self.artifact.prove(entry.path)

    def whole(self) -> Iterable[Check]:
        """The checks over all objects, and against the manifest and the inputs."""
        return ()

    def says(self, field: str, counted: object, told: object) -> None:
        """A field of the manifest is what was counted again. Raises ManifestInvalid."""
        if counted != told:
            raise self.differs(f"{MANIFEST_NAME}: {field}", f"{counted}, as counted again", told)

    def differs(self, path: str, wanted: object, found: object) -> ManifestInvalid:
        """The error for what is not as it must be."""
        return ManifestInvalid(
            f"{self.artifact.store.url}/{path}",
            wanted=wanted,
            found=found,
            remedy=again(self.artifact.manifest.artifact),
        )

    def vocab_size(self) -> int:
        """The rows of the verifier's lm_head, as the manifest has them."""
        facts = self.artifact.manifest.verifier
        if facts is None:
            raise self.differs(f"{MANIFEST_NAME}: verifier", "its facts", "none")
        return facts.vocab_size
