"""The contents of a training and of an export: every tensor of each draft, by key and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from eagle3.artifact import Artifact
from eagle3.draft.checkpoints import CONFIG_NAME, CURVE_NAME, DRAFT, MODEL_NAME, UNTRAINED
from eagle3.draft.export import Wanted, check_export, check_weights
from eagle3.draft.metrics import decode_curve
from eagle3.verification.contents import Check, Contents, Sources
from eagle3.verification.tensors import readable
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import load_mapping

_NEEDED = ("vocab", "verifier")


class TrainContents(Contents):
    """The trained and the untrained draft, and the curve."""

    def whole(self) -> Iterable[Check]:
        """Tensors by key, shape, type and, where training leaves them alone, by value."""
        yield self._check_curve
        wanted = _wanted(self.artifact, self.inputs, self.sources, self)
        for part in (DRAFT, UNTRAINED):
            if wanted is not None:
                folder = _brought(self.artifact, self.sources.scratch / "train") / part
                yield partial(self._check_draft, folder / MODEL_NAME, wanted, part)

    def _check_draft(self, path: Path, wanted: Wanted, part: str) -> None:
        with readable(self, f"{part}/{MODEL_NAME}"):
            check_weights(path, wanted, part)

    def _check_curve(self) -> None:
        steps = [point.step for point in decode_curve(self.artifact.read(CURVE_NAME))]
        self.says("facts.steps", max(steps, default=0), self.artifact.manifest.facts.get("steps"))


class ExportContents(Contents):
    """The folder that vLLM serves, which must pass the lint that it passed before."""

    def whole(self) -> Iterable[Check]:
        """The lint of export, on the trained draft and on the untrained one where it is there."""
        train = self.inputs.get("train")
        wanted = None if train is None else _wanted(train, self.inputs, self.sources, self)
        if wanted is None:
            return
        folder = _brought(self.artifact, self.sources.scratch / "export")
        yield partial(self._check_draft, folder, wanted)
        if self.artifact.named(f"{UNTRAINED}/{CONFIG_NAME}") is not None:
            yield partial(self._check_draft, folder / UNTRAINED, wanted)

    def _check_draft(self, folder: Path, wanted: Wanted) -> None:
        with readable(self, MODEL_NAME):
            check_export(folder, wanted)


def _wanted(
    trained: Artifact, inputs: Mapping[str, Artifact], sources: Sources, contents: Contents
) -> Wanted | None:
    """What the drafts must be, from the artefacts upstream; None where one cannot be read."""
    if any(name not in inputs for name in _NEEDED):
        contents.notes.append(f"{contents.artifact.store.url}: its drafts were not compared")
        return None
    verifier = load_verifier_artifact(
        inputs["verifier"], sources.scratch, trust_remote_code=sources.trust_remote_code
    )
    mapping = load_mapping(inputs["vocab"], vocab_size=verifier.vocab_size, required_ids=())
    facts = contents.artifact.manifest.facts
    return Wanted(
        layer=trained.fact("layer_config", dict),
        aux_layer_ids=tuple(trained.fact("aux_layer_ids", list)),
        mapping=mapping,
        tensors=verifier.three_tensors(),
        norm_before_fc=trained.fact("norm_before_fc", bool),
        norm_output=trained.fact("norm_output", bool),
        serving_name=str(facts.get("serving_name", "")),
        num_speculative_tokens=int(facts.get("num_speculative_tokens", 0)),
    )


def _brought(artifact: Artifact, scratch: Path) -> Path:
    for entry in artifact.manifest.files:
        artifact.local(entry.path, scratch)
    return artifact.store.local_path() or scratch


CONTENTS = {"train": TrainContents, "export": ExportContents}
