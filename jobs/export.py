"""export: the trained draft as the folder that vLLM serves, linted against its upstreams.

Writes `config.json` and `model.safetensors` at the artefact's root, and under `untrained/` the
same for the draft before its first step, which evaluate measures as the baseline.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.config import name_when_served
from eagle3.draft.checkpoints import CONFIG_NAME, DRAFT, DRAFT_FILES, MODEL_NAME, UNTRAINED
from eagle3.draft.export import Wanted, check_export, write_config
from eagle3.errors import ManifestInvalid
from eagle3.manifest import FileEntry, Manifest
from eagle3.store import Store
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import load_mapping
from jobs.process import StageRun, run_stage


def story(run: StageRun) -> str:
    """Bring the drafts here, write their serving configs, lint them, commit them."""
    serving_name = name_when_served(run.config.verifier)
    identity = run.claim(settings={"serving_name": serving_name})
    if done := run.committed(identity):
        return f"already committed, for {done.manifest.facts['serving_name']}"
    trained = run.inputs["train"]
    parts = {DRAFT: ""}
    if run.config.export.include_untrained:
        parts[UNTRAINED] = f"{UNTRAINED}/"
    files: list[FileEntry] = []
    with run.scratch() as scratch:
        wanted = _wanted(run, scratch, serving_name)
        with run.progress("lint", total=len(parts), unit="drafts") as progress:
            for part, prefix in parts.items():
                folder = _assemble(trained, part, scratch, wanted)
                check_export(folder, wanted)
                files += _put(run.output(), folder, prefix)
                progress.advance()
    run.commit(
        Manifest(
            artifact="export",
            identity=identity,
            files=tuple(files),
            verifier=trained.manifest.verifier,
            tokenizer=trained.manifest.tokenizer,
            facts={
                "serving_name": serving_name,
                "num_speculative_tokens": wanted.num_speculative_tokens,
                "aux_layer_ids": list(wanted.aux_layer_ids),
                "draft_vocab_size": wanted.mapping.draft_vocab_size,
                "mapping_sha256": trained.fact("mapping_sha256", str),
                "steps": trained.fact("steps", int),
            },
        )
    )
    size = sum(entry.bytes for entry in files if entry.path == MODEL_NAME)
    return f"wrote a draft of {size / 1e6:.0f} MB for {serving_name}"


def _wanted(run: StageRun, scratch: Path, serving_name: str) -> Wanted:
    """What the upstream artefacts say that the draft must be."""
    trained, vocab = run.inputs["train"], run.inputs["vocab"]
    verifier = load_verifier_artifact(
        run.inputs["verifier"], scratch, trust_remote_code=run.config.verifier.trust_remote_code
    )
    mapping = load_mapping(
        vocab, vocab_size=verifier.vocab_size, required_ids=verifier.required_ids
    )
    used, given = (one.fact("mapping_sha256", str) for one in (trained, vocab))
    if used != given:
        raise ManifestInvalid(
            "export: vocab",
            wanted=f"the mapping {used[:16]} that the draft was trained with",
            found=given[:16],
            remedy="name the vocab artefact of the training under inputs",
        )
    return Wanted(
        layer=trained.fact("layer_config", dict),
        aux_layer_ids=tuple(trained.fact("aux_layer_ids", list)),
        mapping=mapping,
        tensors=verifier.three_tensors(),
        norm_before_fc=trained.fact("norm_before_fc", bool),
        norm_output=trained.fact("norm_output", bool),
        serving_name=serving_name,
        num_speculative_tokens=run.config.export.num_speculative_tokens,
    )


def _assemble(trained: Artifact, part: str, scratch: Path, wanted: Wanted) -> Path:
    """One draft's serving folder, made from the train artefact's objects, every byte checked."""
    source, target = scratch / "trained" / part, scratch / "served" / part
    target.mkdir(parents=True)
    for name in DRAFT_FILES:
        trained.fetch(f"{part}/{name}", source / name)
    write_config(source, target, wanted)
    (source / MODEL_NAME).rename(target / MODEL_NAME)
    return target


def _put(output: Store, folder: Path, prefix: str) -> list[FileEntry]:
    """Upload a serving folder, which follows from the inputs byte for byte."""
    return [
        artifacts.put(output, f"{prefix}{name}", folder / name)
        for name in (CONFIG_NAME, MODEL_NAME)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process."""
    return run_stage("export", story, argv)


if __name__ == "__main__":
    sys.exit(main())
