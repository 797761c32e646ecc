"""The `verifier/` artefact on this machine: what the stages after prepare use."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from eagle3.artifact import Artifact
from eagle3.errors import ManifestInvalid
from eagle3.manifest import TokenizerFacts, VerifierFacts
from eagle3.verifier import tokenizer as tokenizers
from eagle3.verifier.text_model import (
    CONFIG_NAME,
    EMBED_KEY,
    LM_HEAD_KEY,
    NORM_KEY,
    TENSORS_NAME,
    TextModel,
    ThreeTensors,
)

_AGAIN = "run prepare again under a prefix of its own"


class LoadedVerifier(TextModel):
    """A committed `verifier/` artefact. Its tensors are brought here when they are asked for.

    Its folder holds what the manifest names and nothing else: of whatever lies beside that in the
    store, a tokenizer's class would read files of names that it knows.
    """

    def __init__(self, artifact: Artifact, scratch: Path, *, trust_remote_code: bool) -> None:
        """See `load_verifier_artifact`."""
        self._artifact = artifact
        self._root = scratch / "verifier-artifact"
        manifest = artifact.manifest
        if manifest.verifier is None or manifest.tokenizer is None:
            raise ManifestInvalid(
                f"{artifact.store.url}: verifier and tokenizer",
                wanted="both, in the manifest of a verifier artefact",
                found="one missing",
                remedy=_AGAIN,
            )
        self._facts, self._tokenizer_facts = manifest.verifier, manifest.tokenizer
        for entry in manifest.files:
            if entry.path != TENSORS_NAME:
                self._bring(entry.path)
        config = json.loads((self._root / CONFIG_NAME).read_text(encoding="utf-8"))
        super().__init__(text_config=config, trust_remote_code=trust_remote_code)

    @property
    def tokenizer_folder(self) -> Path:
        """A local folder with the tokenizer's files and config.json."""
        return self._root

    @cached_property
    def folder(self) -> Path:
        """A local folder with all of the artefact's files: three tensors, not a model."""
        self._bring(TENSORS_NAME)
        return self._root

    def _open_tokenizer(self) -> PreTrainedTokenizerBase:
        """As every verifier's. Raises ManifestInvalid for one that is not the manifest's."""
        found = super()._open_tokenizer()
        facts = tokenizers.facts_of(found, self.tokenizer_folder)
        for name in ("size", "fingerprint"):
            if getattr(facts, name) != getattr(self._tokenizer_facts, name):
                raise ManifestInvalid(
                    f"{self._artifact.store.url}: tokenizer.{name}",
                    wanted=f"{getattr(self._tokenizer_facts, name)}, as when prepare used it",
                    found=getattr(facts, name),
                    remedy="use the verifier.trust_remote_code and the image that prepare had, or "
                    + _AGAIN,
                )
        return found

    def _bring(self, path: str) -> None:
        found, here = self._artifact.local(path, self._root), self._root / path
        if found != here:
            here.parent.mkdir(parents=True, exist_ok=True)
            here.unlink(missing_ok=True)
            here.symlink_to(found.absolute())

    def facts(self) -> VerifierFacts:
        """As the manifest has them."""
        return self._facts

    def tokenizer_facts(self) -> TokenizerFacts:
        """As the manifest has them."""
        return self._tokenizer_facts

    def three_tensors(self) -> ThreeTensors:
        """Load the three tensors. Raises ManifestInvalid for bytes that changed."""
        tensors = load_file(self.folder / TENSORS_NAME)
        return ThreeTensors(
            embed=tensors[EMBED_KEY], norm=tensors[NORM_KEY], lm_head=tensors[LM_HEAD_KEY]
        )


def load_verifier_artifact(
    artifact: Artifact, scratch: Path, *, trust_remote_code: bool = False
) -> LoadedVerifier:
    """Bring a committed `verifier/` artefact to this machine, every byte checked.

    Args:
        artifact: as the gate returned it.
        scratch: where the files are downloaded to when the store is not local.
        trust_remote_code: as `verifier.trust_remote_code` says, for its tokenizer.

    Raises ManifestInvalid for an object that differs from the manifest.
    """
    return LoadedVerifier(artifact, scratch, trust_remote_code=trust_remote_code)
