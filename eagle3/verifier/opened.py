"""A verifier as its owner published it: opened, asked, and saved as the `verifier/` artefact."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from eagle3.artifact import Artifact
from eagle3.config import VerifierConfig
from eagle3.errors import VerifierInvalid
from eagle3.manifest import TokenizerFacts, VerifierFacts
from eagle3.verifier import tokenizer as tokenizers
from eagle3.verifier.families import Family, family_of, resolve_text_config
from eagle3.verifier.files import VerifierFiles, open_files
from eagle3.verifier.fingerprint import by_this_formula, fingerprint_of
from eagle3.verifier.text_model import (
    CONFIG_NAME,
    EMBED_KEY,
    LM_HEAD_KEY,
    NORM_KEY,
    TENSORS_NAME,
    TextModel,
    ThreeTensors,
)
from eagle3.verifier.weights import StoredTensor, Weights

_FLOATS = ("BF16", "F16", "F32")
_UNQUANTISED = "leave the embedding, the final norm and lm_head out of quantisation"


class Verifier(TextModel):
    """A verifier's files, opened. Nothing of the weights is read before it is asked for."""

    def __init__(self, files: VerifierFiles, *, trust_remote_code: bool) -> None:
        """Raises VerifierInvalid for an unknown family or a broken layout."""
        self.files = files
        config = files.read_json(CONFIG_NAME)
        where = f"{files.where}/{CONFIG_NAME}"
        self._family: Family = family_of(config, where)
        super().__init__(
            text_config=resolve_text_config(config, where), trust_remote_code=trust_remote_code
        )

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embedding."""
        return bool(self.text_config["tie_word_embeddings"])

    def facts(self) -> VerifierFacts:
        """Identity of the verifier. Reads three tensors and pieces of the others, once."""
        return self._facts

    @cached_property
    def _facts(self) -> VerifierFacts:
        return VerifierFacts(
            fingerprint=fingerprint_of(self.files, self._weights, self.stored.values()),
            num_hidden_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            commit=self.files.revision or "",
        )

    def must_be(self, wanted: VerifierFacts) -> None:
        """Refuse to go on with other weights than those that the data was made for.

        A path or a hub id is no identity: another revision may lie there by now. Raises
        VerifierInvalid naming the first figure that differs.
        """
        found = self.facts()
        if not by_this_formula(wanted.fingerprint):
            raise VerifierInvalid(
                f"{self.files.where}: fingerprint",
                wanted=f"{wanted.fingerprint}, which another version of eagle3 took",
                found=found.fingerprint,
                remedy="use the version that prepared the data, or prepare it again",
            )
        for field in wanted.__struct_fields__:
            if field != "commit" and getattr(found, field) != getattr(wanted, field):
                raise VerifierInvalid(
                    f"{self.files.where}: {field}",
                    wanted=f"{getattr(wanted, field)}, for which the data was prepared",
                    found=getattr(found, field),
                    remedy="name the same verifier and revision, or prepare again",
                )

    def must_have(self, artifact: Artifact) -> None:
        """Refuse other tokenizer files or another generation_config.json than the artefact's.

        An engine reads the ids that end an answer from them. Raises VerifierInvalid.
        """
        here = {name for name in self.files.names() if _is_copied(name)}
        entries = {entry.path: entry for entry in artifact.manifest.files}
        there = {name for name in entries if _is_copied(name)}
        for name in sorted(here | there):
            found = self.files.sha256(name) if name in here else "no such file"
            wanted = entries[name].sha256 if name in there else "no such file"
            if found != wanted:
                raise VerifierInvalid(
                    f"{self.files.where}/{name}",
                    wanted=f"{wanted[:16]}, with which the data was prepared",
                    found=found[:16],
                    remedy="bring back the file that was there, or prepare again",
                )

    def pinned(self, config: VerifierConfig) -> VerifierConfig:
        """The configuration by which another process opens this one, at the same commit."""
        return msgspec.structs.replace(config, revision=self.files.revision or config.revision)

    def tokenizer_facts(self) -> TokenizerFacts:
        """Identity of the tokenizer and of the chat template in effect."""
        return tokenizers.facts_of(self._tokenizer, self.tokenizer_folder)

    def three_tensors(self) -> ThreeTensors:
        """Read the three tensors. Raises VerifierInvalid where one is missing or misshapen."""
        loaded = {name: self._weights.load(tensor) for name, tensor in self.stored.items()}
        for name, values in loaded.items():
            if not (bool(values.isfinite().all()) and bool(values.any())):
                raise VerifierInvalid(
                    f"{self.files.where}: {self.stored[name].key}",
                    wanted="finite numbers, not all of them zero",
                    found="all zero" if values.isfinite().all() else "one that is not finite",
                    remedy="download the file again",
                )
        return ThreeTensors(
            embed=loaded["embed"],
            norm=loaded["norm"],
            lm_head=loaded["embed"] if self.tied else loaded["lm_head"],
        )

    def local_folder(self, scratch: Path) -> Path:
        """The whole model as a local folder, for vLLM; downloaded into `scratch` if it must be."""
        return self.files.whole_folder(scratch)

    def save_artifact_files(self, folder: Path) -> list[str]:
        """Write the `verifier/` artefact's files and return their paths below `folder`.

        The three tensors under plain names (lm_head always), the plain text config, the
        tokenizer's files, and the chat template in effect as a file. The same verifier gives
        the same bytes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer, source = self._tokenizer, self.tokenizer_folder
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            name = path.relative_to(source).as_posix()
            if tokenizers.is_template_file(name) or _is_copied(name):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        tokenizers.write_effective_template(tokenizer, folder)
        text = json.dumps(self.text_config, indent=2, sort_keys=True)
        (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
        three = self.three_tensors()
        tensors = {EMBED_KEY: three.embed, NORM_KEY: three.norm, LM_HEAD_KEY: three.lm_head}
        if self.tied:
            tensors[LM_HEAD_KEY] = three.lm_head.clone()
        save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    @cached_property
    def tokenizer_folder(self) -> Path:
        """The verifier's own folder where it is local, else a download of the small files."""
        if (folder := self.files.store.local_path()) is not None:
            return folder
        folder = Path(tempfile.mkdtemp(prefix="eagle3-tokenizer-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        small = (CONFIG_NAME, tokenizers.GENERATION_CONFIG_NAME)
        names = (n for n in self.files.names() if tokenizers.is_tokenizer_file(n) or n in small)
        self.files.copy(list(names), folder)
        return folder

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.files)

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Where embed, norm and lm_head (only if untied) lie, from headers alone.

        Raises VerifierInvalid for one that is missing, misshapen, quantised or not alone.
        """
        matrix, vector = (self.vocab_size, self.hidden_size), (self.hidden_size,)
        stored = {
            "embed": self._found(self._family.embed, matrix),
            "norm": self._found(self._family.norm, vector),
        }
        if not self.tied:
            stored["lm_head"] = self._found(self._family.lm_head, matrix)
        elif self._family.lm_head in self._weights.paths:
            self._check_tied(stored["embed"], self._found(self._family.lm_head, matrix))
        return stored

    def _check_tied(self, embed: StoredTensor, lm_head: StoredTensor) -> None:
        """A tied checkpoint may hold lm_head too, if it is the same: an engine ignores it."""
        pieces = zip(self._weights.chunks(embed), self._weights.chunks(lm_head), strict=True)
        if embed.dtype != lm_head.dtype or any(one != other for one, other in pieces):
            raise VerifierInvalid(
                f"{self.files.where}: tie_word_embeddings",
                wanted=f"false, since {lm_head.key} differs from the embedding",
                found="true",
                remedy="correct config.json, or remove the tensor that is not used",
            )

    def _found(self, key: str, shape: tuple[int, ...]) -> StoredTensor:
        where = f"{self.files.where}: {key}"
        tensor = self._weights.find(key)
        stem = key.removesuffix("weight")
        beside = sorted(k for k in self._weights.paths if k.startswith(stem) and k != key)
        if tensor is None:
            raise VerifierInvalid(
                where,
                wanted="this tensor, unquantised",
                found=f"{beside[0]}, a quantised one" if beside else "no such key",
                remedy=_UNQUANTISED
                if beside
                else "complete the checkpoint: nothing is put in its place",
            )
        if beside:
            raise VerifierInvalid(
                where,
                wanted="this tensor alone",
                found=f"{beside[0]} too, which changes what it comes to",
                remedy=f"{_UNQUANTISED}, and bring a model without such a tensor",
            )
        if tensor.dtype not in _FLOATS:
            raise VerifierInvalid(
                where,
                wanted=" or ".join(_FLOATS),
                found=f"{tensor.dtype}, a quantised type",
                remedy=_UNQUANTISED,
            )
        if tensor.shape != shape:
            raise VerifierInvalid(
                where,
                wanted=f"shape {list(shape)}, as config.json says",
                found=list(tensor.shape),
                remedy="bring the config.json that was published with these weights",
            )
        return tensor


def open_verifier(config: VerifierConfig, wanted: VerifierFacts | None = None) -> Verifier:
    """Open the verifier that the configuration names.

    Args:
        wanted: the verifier that the data was made for, where there is data already. A hub id
            without a revision is opened at its commit, and other weights are refused.

    Raises ConfigError, VerifierInvalid, PermissionRefused or ServiceUnavailable.
    """
    commit = wanted.commit or None if wanted else None
    files = open_files(config.source, config.revision or commit)
    verifier = Verifier(files, trust_remote_code=config.trust_remote_code)
    if wanted is not None:
        verifier.must_be(wanted)
    return verifier


def reopen_verifier(config: VerifierConfig, artifact: Artifact) -> Verifier:
    """Open the verifier from which a committed `verifier/` artefact was made, for an engine.

    Raises as `open_verifier`, and VerifierInvalid where any file that decides about answers is
    another by now.
    """
    assert artifact.manifest.verifier is not None, "the gate has checked it"
    verifier = open_verifier(config, artifact.manifest.verifier)
    verifier.must_have(artifact)
    return verifier


def _is_copied(name: str) -> bool:
    """Whether the artefact holds this file byte for byte; a template is written anew."""
    return tokenizers.is_vocabulary_file(name) or name == tokenizers.GENERATION_CONFIG_NAME
