"""The contents of a verifier's artefact and of a vocabulary: a few tensors and small files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from safetensors import SafetensorError

from eagle3 import strict_json
from eagle3.coverage import coverage
from eagle3.errors import ConfigError
from eagle3.verification.contents import Check, Contents
from eagle3.verifier import TENSORS_NAME, LoadedVerifier, load_verifier_artifact
from eagle3.vocab import build_mapping, load_counts, load_mapping

_COVERAGE_NAME = "coverage.json"
_ROUNDING = 1e-9


@contextlib.contextmanager
def readable(contents: Contents, path: str) -> Iterator[None]:
    """What a reader of tensors raises for a file that it cannot take is told as ours."""
    try:
        yield
    except (SafetensorError, KeyError) as error:
        raise contents.differs(path, "a safetensors file of its kind", error) from error


class VerifierContents(Contents):
    """Three tensors under plain names, a plain config, and the tokenizer."""

    def whole(self) -> Iterable[Check]:
        """Sizes against the manifest, the tensors' shapes and numbers, the tokenizer's hash."""
        loaded = load_verifier_artifact(
            self.artifact,
            self.sources.scratch,
            trust_remote_code=self.sources.trust_remote_code,
        )
        yield lambda: self._check_sizes(loaded)
        yield lambda: self._check_tensors(loaded)
        yield lambda: self._check_tokenizer(loaded)

    def _check_sizes(self, loaded: LoadedVerifier) -> None:
        facts = loaded.facts()
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            self.says(f"verifier.{name}", getattr(loaded, name), getattr(facts, name))

    def _check_tensors(self, loaded: LoadedVerifier) -> None:
        with readable(self, TENSORS_NAME):
            three = loaded.three_tensors()
        matrix = [loaded.vocab_size, loaded.hidden_size]
        shapes = {"embed": matrix, "norm": matrix[1:], "lm_head": matrix}
        for name, shape in shapes.items():
            tensor: torch.Tensor = getattr(three, name)
            where = f"{TENSORS_NAME}: {name}"
            if list(tensor.shape) != shape or not tensor.is_floating_point():
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise self.differs(where, f"floating point {shape}", found)
            if not bool(tensor.isfinite().all()) or not bool(tensor.any()):
                raise self.differs(where, "finite numbers, not all of them zero", "others")

    def _check_tokenizer(self, loaded: LoadedVerifier) -> None:
        try:
            # Held against the manifest's facts where it is opened.
            loaded.load_tokenizer()
        except ConfigError as error:
            self.notes.append(f"{self.artifact.store.url}: its tokenizer was not opened: {error}")


class VocabContents(Contents):
    """The mapping, its invariants, and that it is the one that the rows' counts give."""

    def whole(self) -> Iterable[Check]:
        """Invariants, size, the mapping built again, and coverage counted again."""
        required = self._required_ids()
        mapping = load_mapping(
            self.artifact, vocab_size=self.vocab_size(), required_ids=required or ()
        )
        size, facts = mapping.draft_vocab_size, self.artifact.manifest.facts
        yield lambda: self.says("facts.draft_vocab_size", size, facts.get("draft_vocab_size"))
        if required is None or "rows" not in self.inputs:
            self.notes.append(f"{self.artifact.store.url}: it was not built again")
            return
        counts = load_counts(self.inputs["rows"], vocab_size=self.vocab_size())

        def check_built() -> None:
            built = build_mapping(counts, size, required)
            if not torch.equal(built.t2d, mapping.t2d):
                other = int((built.t2d != mapping.t2d).sum())
                raise self.differs("t2d", "the tokens that its rows give", f"{other} others")

        yield check_built
        yield lambda: self._check_coverage(coverage(counts, mapping))

    def _required_ids(self) -> tuple[int, ...] | None:
        """None where the verifier's tokenizer is not to be had."""
        if "verifier" not in self.inputs:
            return None
        verifier = load_verifier_artifact(
            self.inputs["verifier"],
            self.sources.scratch,
            trust_remote_code=self.sources.trust_remote_code,
        )
        try:
            return verifier.required_ids
        except ConfigError as error:
            self.notes.append(
                f"{self.artifact.store.url}: special ids were not looked for: {error}"
            )
            return None

    def _check_coverage(self, share: float) -> None:
        told = [("facts.coverage", self.artifact.manifest.facts.get("coverage"))]
        if self.artifact.named(_COVERAGE_NAME) is not None:
            record = strict_json.decode(self.artifact.read(_COVERAGE_NAME), dict)
            told.append((_COVERAGE_NAME, record.get("coverage")))
        for field, value in told:
            if not isinstance(value, float | int) or abs(value - share) > _ROUNDING:
                raise self.differs(field, f"coverage {share}, as counted again", value)


CONTENTS = {"verifier": VerifierContents, "vocab": VocabContents}
