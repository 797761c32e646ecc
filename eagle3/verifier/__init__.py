"""Everything particular to a verifier: its config, key table, three tensors and tokenizer.

A verifier is opened from a folder, a hub id or any fsspec URL, and never loaded: of its weights
only three tensors are read (embedding, final norm, lm_head), which is all that later stages need.
`prepare` saves them under plain names with a plain text config and the tokenizer as the
`verifier/` artefact; every later stage loads that with `load_verifier_artifact`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from eagle3.artifact import Artifact
from eagle3.config import VerifierConfig
from eagle3.errors import ConfigError, ManifestInvalid, VerifierInvalid
from eagle3.manifest import TokenizerFacts, VerifierFacts
from eagle3.store import sha256_of_file
from eagle3.verifier import tokenizer as tokenizers
from eagle3.verifier.families import Family, family_of, resolve_text_config
from eagle3.verifier.files import VerifierFiles, open_files
from eagle3.verifier.weights import StoredTensor, Weights

__all__ = [
    "CONFIG_NAME",
    "TENSORS_NAME",
    "LoadedVerifier",
    "ThreeTensors",
    "Verifier",
    "default_layer_ids",
    "load_verifier_artifact",
    "open_verifier",
]

CONFIG_NAME = "config.json"
TENSORS_NAME = "model.safetensors"
EMBED_KEY = "model.embed_tokens.weight"
NORM_KEY = "model.norm.weight"
LM_HEAD_KEY = "lm_head.weight"

_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, kw_only=True)
class ThreeTensors:
    """embed [V, H], norm [H], lm_head [V, H], in the checkpoint's type (float16 as float32).

    For a tied verifier `lm_head` is `embed`.
    """

    embed: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor


class TextModel:
    """What every holder of a verifier can ask, whether it was opened or loaded.

    Attributes:
        text_config: the text model's config as plain values, never nested.
        folder: a local folder with the tokenizer's files and config.json.
    """

    def __init__(self, *, text_config: dict[str, Any], trust_remote_code: bool) -> None:
        self.text_config = text_config
        self._trust_remote_code = trust_remote_code

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers of the text model."""
        return int(self.text_config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.text_config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Rows of lm_head, which the config is checked against."""
        return int(self.text_config["vocab_size"])

    @property
    def tokenizer_folder(self) -> Path:
        """A local folder with the tokenizer's files and config.json."""
        raise NotImplementedError

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizers.open_tokenizer(
            self.tokenizer_folder,
            vocab_size=self.vocab_size,
            trust_remote_code=self._trust_remote_code,
        )

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The proven tokenizer, one per verifier. Raises ConfigError, VerifierInvalid."""
        return self._tokenizer

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, ascending."""
        path = self.tokenizer_folder / tokenizers.GENERATION_CONFIG_NAME
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return tuple(sorted(tokenizers.stop_ids(self._tokenizer, settings)))

    @cached_property
    def required_ids(self) -> tuple[int, ...]:
        """Ids that every draft vocabulary must hold: special and stop ids, ascending, below V.

        Raises VerifierInvalid for one that lm_head has no row for.
        """
        ids = sorted({*tokenizers.special_ids(self._tokenizer), *self.stop_ids})
        if ids and not 0 <= ids[0] <= ids[-1] < self.vocab_size:
            raise VerifierInvalid(
                "special and stop ids",
                wanted=f"ids below {self.vocab_size}, the rows of lm_head",
                found=ids[-1] if ids[0] >= 0 else ids[0],
                remedy="correct generation_config.json or bring the matching tokenizer",
            )
        return tuple(ids)

    def layer_ids(self, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
        """Three auxiliary ids and num_hidden_layers, ascending.

        Id k names the residual stream that enters layer k, so the last is num_hidden_layers and
        stands for what the final norm is given.

        Args:
            wanted: from the configuration; None takes `default_layer_ids`.

        Raises ConfigError for ids that break this.
        """
        last = self.num_hidden_layers
        ids = tuple(default_layer_ids(last) if wanted is None else wanted)
        auxiliary = ids[:-1]
        right = (
            len(ids) == 4
            and ids[-1] == last
            and list(auxiliary) == sorted(set(auxiliary))
            and auxiliary[0] > 0
            and auxiliary[-1] < last
        )
        if not right:
            raise ConfigError(
                "extract.layer_ids",
                wanted=f"three different ids between 1 and {last - 1}, ascending, then {last}",
                found=list(ids),
                remedy="note that id k is the input of layer k: "
                "the output of layer k, as older lists count, is k + 1",
            )
        return ids


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
        self._downloads: tempfile.TemporaryDirectory[str] | None = None

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embedding."""
        return bool(self.text_config["tie_word_embeddings"])

    def facts(self) -> VerifierFacts:
        """Identity of the verifier. Reads the three tensors in pieces, once."""
        return self._facts

    @cached_property
    def _facts(self) -> VerifierFacts:
        digest = hashlib.sha256()
        for part in (self.files.store.read_bytes(CONFIG_NAME), self._weights.index):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        for tensor in self._stored.values():
            digest.update(f"{tensor.key} {tensor.dtype} {tensor.shape}".encode())
            for chunk in self._weights.chunks(tensor):
                digest.update(chunk)
        return VerifierFacts(
            fingerprint=digest.hexdigest(),
            num_hidden_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
        )

    def tokenizer_facts(self) -> TokenizerFacts:
        """Identity of the tokenizer and of the chat template in effect."""
        return tokenizers.facts_of(self._tokenizer, self.tokenizer_folder)

    def three_tensors(self) -> ThreeTensors:
        """Read the three tensors. Raises VerifierInvalid where one is missing or misshapen."""
        loaded = {name: self._weights.load(tensor) for name, tensor in self._stored.items()}
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
            if tokenizers.is_tokenizer_file(name) or name == tokenizers.GENERATION_CONFIG_NAME:
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

    @property
    def tokenizer_folder(self) -> Path:
        """The verifier's own folder where it is local, else a download of the small files."""
        if (folder := self.files.store.local_path()) is not None:
            return folder
        if self._downloads is None:
            self._downloads = tempfile.TemporaryDirectory(prefix="eagle3-tokenizer-")
            small = (CONFIG_NAME, tokenizers.GENERATION_CONFIG_NAME)
            names = [
                name
                for name in self.files.names()
                if tokenizers.is_tokenizer_file(name) or name in small
            ]
            self.files.copy(names, Path(self._downloads.name))
        return Path(self._downloads.name)

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.files)

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        """The tensors that the checkpoint holds, found and checked: lm_head only if untied."""
        matrix, vector = (self.vocab_size, self.hidden_size), (self.hidden_size,)
        stored = {
            "embed": self._found(self._family.embed, matrix),
            "norm": self._found(self._family.norm, vector),
        }
        if not self.tied:
            stored["lm_head"] = self._found(self._family.lm_head, matrix)
        return stored

    def _found(self, key: str, shape: tuple[int, ...]) -> StoredTensor:
        where = f"{self.files.where}: {key}"
        tensor = self._weights.find(key)
        if tensor is None:
            stem = key.removesuffix("weight")
            beside = sorted(k for k in self._weights.paths if k.startswith(stem))
            raise VerifierInvalid(
                where,
                wanted="this tensor, unquantised",
                found=f"{beside[0]}, a quantised one" if beside else "no such key",
                remedy="leave the embedding, the final norm and lm_head out of quantisation"
                if beside
                else "complete the checkpoint: nothing is put in its place",
            )
        if tensor.dtype not in _FLOATS:
            raise VerifierInvalid(
                where,
                wanted=" or ".join(_FLOATS),
                found=f"{tensor.dtype}, a quantised type",
                remedy="leave the embedding, the final norm and lm_head out of quantisation",
            )
        if tensor.shape != shape:
            raise VerifierInvalid(
                where,
                wanted=f"shape {list(shape)}, as config.json says",
                found=list(tensor.shape),
                remedy="bring the config.json that was published with these weights",
            )
        return tensor


class LoadedVerifier(TextModel):
    """A committed `verifier/` artefact on this machine: what the stages after prepare use.

    Attributes:
        folder: a local folder with the artefact's files. It holds three tensors, not a model.
    """

    def __init__(self, folder: Path, artifact: Artifact, *, trust_remote_code: bool) -> None:
        self.folder = folder
        manifest = artifact.manifest
        if manifest.verifier is None or manifest.tokenizer is None:
            raise ManifestInvalid(
                f"{artifact.store.url}: verifier and tokenizer",
                wanted="both, in the manifest of a verifier artefact",
                found="one missing",
                remedy="run prepare again under a prefix of its own",
            )
        self._facts, self._tokenizer_facts = manifest.verifier, manifest.tokenizer
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        super().__init__(text_config=config, trust_remote_code=trust_remote_code)

    @property
    def tokenizer_folder(self) -> Path:
        """The artefact's folder."""
        return self.folder

    def facts(self) -> VerifierFacts:
        """As the manifest has them."""
        return self._facts

    def tokenizer_facts(self) -> TokenizerFacts:
        """As the manifest has them."""
        return self._tokenizer_facts

    def three_tensors(self) -> ThreeTensors:
        """Load the three tensors."""
        tensors = load_file(self.folder / TENSORS_NAME)
        return ThreeTensors(
            embed=tensors[EMBED_KEY], norm=tensors[NORM_KEY], lm_head=tensors[LM_HEAD_KEY]
        )


def default_layer_ids(num_hidden_layers: int) -> tuple[int, int, int, int]:
    """The ids that vLLM's own default takes, and the last: [2, n//2, n-3, n]."""
    n = num_hidden_layers
    return (2, n // 2, n - 3, n)


def open_verifier(config: VerifierConfig) -> Verifier:
    """Open the verifier that the configuration names.

    Raises ConfigError, VerifierInvalid, PermissionRefused or ServiceUnavailable.
    """
    files = open_files(config.source, config.revision)
    return Verifier(files, trust_remote_code=config.trust_remote_code)


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
    store = artifact.store
    folder = store.local_path() or scratch / "verifier-artifact"
    for entry in artifact.manifest.files:
        path = folder / entry.path
        if store.local_path() is None:
            store.get_file(entry.path, path)
        if not path.exists() or sha256_of_file(path) != entry.sha256:
            raise ManifestInvalid(
                f"{store.url}/{entry.path}",
                wanted=f"sha256 {entry.sha256[:16]}, as the manifest says",
                found="other bytes" if path.exists() else "no object",
                remedy="run prepare again under a prefix of its own",
            )
    return LoadedVerifier(folder, artifact, trust_remote_code=trust_remote_code)
